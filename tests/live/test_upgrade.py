"""The upgrade from the existing adapter: its database is recognised, imported, and never changed.

The adapter itself, from the package index and in an environment of its own, writes the database.
"""

import json
import os
import shutil
import sqlite3
import subprocess
import time
import uuid
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2
import pytest

from bench.systems import install_adapter
from tests.support.answers import RefusedError
from tests.support.backstage import Backstage, script
from tests.support.caller import Caller
from tests.support.ports import free_port
from tests.support.program import Program, run
from tests.support.service import TOKEN, variables_for

pytestmark = pytest.mark.live

OTHER_TOKEN = "a-token-for-the-tests-of-another-caller"  # noqa: S105 - not a secret
CREDENTIALS = json.dumps(
    [
        {"scheme": "bearer", "principal": "alice", "token": TOKEN},
        {"scheme": "bearer", "principal": "bob", "token": OTHER_TOKEN},
    ]
)
ANSWERED = script(
    [
        {"think": "let me think"},
        {"tool": "bash", "input": {"command": "echo hi", "description": "say hi"}},
    ],
    [{"say": "last words"}],
)


@dataclass(frozen=True)
class Written:
    """What the adapter left, after a polite end and after a crash, and what it had answered."""

    stopped: Path
    killed: Path
    streamed: Any
    followed: Any
    failed: Any
    open: Any


@pytest.fixture(scope="module")
def written(backstage: Backstage, tmp_path_factory: pytest.TempPathFactory) -> Written:
    stopped = tmp_path_factory.mktemp("adapter")
    killed = tmp_path_factory.mktemp("killed")
    port = free_port()
    variables = {
        "PATH": os.environ["PATH"],
        "HOME": str(stopped),
        "A2A_PORT": str(port),
        "A2A_STATIC_AUTH_CREDENTIALS": CREDENTIALS,
        "OPENCODE_BASE_URL": backstage.url,
        "OPENCODE_AUTH_PASSWORD": backstage.password,
        "OPENCODE_WORKSPACE_ROOT": str(backstage.workspace),
    }
    with (
        (stopped / "log").open("w") as log,
        subprocess.Popen(  # noqa: S603 - installed above
            [install_adapter(), "serve"], cwd=stopped, env=variables, stdout=log, stderr=log
        ) as process,
        httpx2.Client(
            base_url=f"http://127.0.0.1:{port}",
            headers={"Authorization": f"Bearer {TOKEN}", "A2A-Version": "1.0"},
            timeout=60,
            trust_env=False,
        ) as http,
    ):
        try:
            until_it_answers(http)
            gate = uuid.uuid4().hex
            streamed = stream(http, ANSWERED)
            followed = send(http, script({"say": "again"}), contextId=streamed["contextId"])
            failed = send(http, script({"error": 400}))
            begun = send(http, script({"gate": gate}), returnImmediately=True)
            for file in stopped.glob("opencode-a2a.db*"):
                shutil.copyfile(file, killed / file.name)
        finally:
            process.terminate()
    return Written(
        stopped / "opencode-a2a.db", killed / "opencode-a2a.db", streamed, followed, failed, begun
    )


def until_it_answers(http: httpx2.Client) -> None:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        try:
            http.get("/.well-known/agent-card.json").raise_for_status()
        except httpx2.TransportError:
            time.sleep(0.05)
        else:
            return
    raise AssertionError("the adapter does not answer")


def call(method: str, text: str, fields: dict[str, Any]) -> dict[str, Any]:
    configuration = {"returnImmediately": fields.pop("returnImmediately", False)}
    parts = [{"text": text}]
    message = {"messageId": str(uuid.uuid4()), "role": "ROLE_USER", "parts": parts, **fields}
    params = {"message": message, "configuration": configuration}
    return {"jsonrpc": "2.0", "id": 1, "method": method, "params": params}


def send(http: httpx2.Client, text: str, **fields: Any) -> Any:
    answer = http.post("/", json=call("SendMessage", text, fields)).json()
    return answer["result"]["task"]


def stream(http: httpx2.Client, text: str) -> Any:
    """Stream an answer to its end, and return the task."""
    answer = http.post("/", json=call("SendStreamingMessage", text, {})).text
    first = json.loads(answer.partition("data: ")[2].partition("\n")[0])["result"]
    return first["task"]


def state_of(file: Path) -> dict[str, bytes]:
    """Return every file of a database as it is."""
    return {path.name: path.read_bytes() for path in file.parent.glob("opencode-a2a.db*")}


async def migrate(source: Path, target: Path, tmp_path: Path) -> tuple[int, list[str]]:
    status, output = await run(
        *("migrate", "--from", f"sqlite:///{source}", "--to", f"sqlite:///{target}"),
        HOME=str(tmp_path),
    )
    return status, output.splitlines()


async def test_serve_and_doctor_say_what_to_do_with_the_adapters_database(
    written: Written, backstage: Backstage, tmp_path: Path
) -> None:
    before = state_of(written.stopped)
    url = f"sqlite:///{written.stopped}"
    variables = variables_for(backstage, tmp_path, A2A_TASK_STORE_DATABASE_URL=url)

    status, output = await run("serve", **variables)
    _, advice = await run("doctor", **variables)

    start = f"{written.stopped} was written by the earlier adapter; run `opencode-a2a migrate "
    assert status == 2
    assert output.startswith(f"opencode-a2a: the database {start}--from {url} --to sqlite:///")
    assert output.count("\n") == 1
    told = start.replace("; run", "\n        run")
    assert f"failed  database: {told}" in advice
    assert state_of(written.stopped) == before


@pytest.mark.parametrize("end", ["stopped", "killed"])
async def test_migrate_takes_what_is_finished_and_leaves_the_source_alone(
    written: Written, tmp_path: Path, end: str
) -> None:
    source: Path = getattr(written, end)
    target = tmp_path / "tasks.db"
    before = state_of(source)

    status, lines = await migrate(source, target, tmp_path)
    again = await migrate(source, target, tmp_path)

    assert state_of(source) == before
    held = contents(source, tmp_path)
    assert held.finished == 3
    end_line = f"{source} is unchanged; the tasks are in {target}"
    assert (status, lines) == (
        0,
        [
            "tasks: 3 taken",
            f"session owners: {held.owners} taken",
            f"context links: {held.links} taken",
            "tasks that are not finished: 1 left",
            end_line,
        ],
    )
    assert again == (
        0,
        [
            "tasks that are here already: 3 left",
            "tasks that are not finished: 1 left",
            f"session owners that are here already: {held.owners} left",
            f"context links that are here already: {held.links} left",
            end_line,
        ],
    )


@dataclass(frozen=True)
class Contents:
    finished: int
    owners: int
    links: int


def contents(file: Path, tmp_path: Path) -> Contents:
    """Count what is in a database, by looking into a copy."""
    for path in file.parent.glob("opencode-a2a.db*"):
        shutil.copyfile(path, tmp_path / path.name)
    with closing(sqlite3.connect(tmp_path / file.name)) as copy:
        ended = "status LIKE '%_COMPLETED%' OR status LIKE '%_FAILED%'"
        queries = (
            f"SELECT count(*) FROM tasks WHERE {ended}",  # noqa: S608 - our own words
            "SELECT count(*) FROM a2a_session_owners",
            "SELECT count(*) FROM a2a_session_bindings",
        )
        return Contents(*(copy.execute(query).fetchone()[0] for query in queries))


async def test_an_imported_task_reads_as_before_and_its_context_goes_on(
    written: Written, backstage: Backstage, tmp_path: Path
) -> None:
    target = tmp_path / "tasks.db"
    await migrate(written.stopped, target, tmp_path)
    variables = variables_for(
        backstage,
        tmp_path,
        A2A_BEARER_TOKEN="",
        A2A_STATIC_AUTH_CREDENTIALS=CREDENTIALS,
        A2A_TASK_STORE_DATABASE_URL=f"sqlite:///{target}",
    )

    async with Program(variables) as program:
        alice, bob = Caller(program), Caller(program, token=OTHER_TOKEN)
        streamed = await alice.get(written.streamed["id"])
        failed = await alice.get(written.failed["id"])
        next_turn = await alice.send(
            script({"say": "after the upgrade"}), context=streamed.context_id
        )
        for task_id in (written.streamed["id"], written.open["id"]):
            with pytest.raises(RefusedError):
                await bob.get(task_id)
        with pytest.raises(RefusedError):
            await bob.send("mine?", metadata={"shared": {"session": {"id": next_turn.session_id}}})

    assert (streamed.state, streamed.text) == ("completed", "last words")
    assert streamed.reasoning == "let me think"
    assert [(tool["tool"], tool["output"]) for tool in streamed.tools] == [("bash", "hi\n")]
    assert streamed.history == [ANSWERED]
    assert (failed.state, failed.error_type) == ("failed", "UPSTREAM_BAD_REQUEST")
    assert "Bad request" in failed.said
    assert next_turn.session_id == bound_session(written.stopped, streamed.context_id)


def bound_session(file: Path, context_id: str) -> str:
    """Return the session that the adapter used for a context."""
    query = "SELECT session_id FROM a2a_session_bindings WHERE context_id = ?"
    with closing(sqlite3.connect(f"file:{file}?immutable=1", uri=True)) as connection:
        return connection.execute(query, [context_id]).fetchone()[0]
