"""What whoever runs the service meets: its log, and a start that fails.

The program runs as a process of its own, in front of an OpenCode that replays recordings.
"""

import asyncio
import base64
import sys
from collections.abc import Generator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import orjson
import pytest

from opencode_a2a.events import JsonObject
from tests.support.caller import Caller
from tests.support.opencode import FakeOpenCode
from tests.support.program import Program, bare, run
from tests.support.service import TOKEN, message, variables_for

pytestmark = pytest.mark.asyncio(loop_scope="module")


async def test_payloads_are_logged_at_the_default_level(
    opencode: FakeOpenCode, tmp_path: Path
) -> None:
    variables = variables_for(opencode, tmp_path, A2A_LOG_PAYLOADS="true")
    async with Program(variables) as program:
        answer = await Caller(program).answer("SendMessage", message("hello"))
        await program.stop()

    [record] = [record for record in program.records() if record["event"] == "payload"]
    assert record["method"] == "SendMessage"
    assert orjson.loads(record["request"])["params"]["message"]["parts"] == [{"text": "hello"}]
    assert orjson.loads(record["response"])["result"] == answer["result"]
    assert not [record for record in program.records() if record["event"] == "request"]


async def test_the_access_log_names_the_operation(opencode: FakeOpenCode, tmp_path: Path) -> None:
    async with Program(variables_for(opencode, tmp_path, A2A_LOG_LEVEL="INFO")) as program:
        sent = await Caller(program).answer("SendMessage", message("hello"))
        task_id = sent["result"]["task"]["id"]
        await Caller(program).answer("opencode.agents.list", {})
        await Caller(program).answer("\x1b[31mnobody", {})
        modern, old = {"A2A-Version": "1.0"}, {"A2A-Version": "0.3"}
        await program.http.post("/", json=old_get(task_id), headers=old)
        await program.http.get(f"/tasks/{task_id}", headers=modern)
        await program.http.get("/extendedAgentCard", headers=modern)
        await program.http.get("/nothing", headers=modern)
        await program.stop()

    seen: list[Any] = [r["operation"] for r in program.records() if r["event"] == "request"]
    assert seen == [
        "SendMessage", "opencode.agents.list", None, "GetTask", "GetTask", "GetExtendedAgentCard",
        None,
    ]  # fmt: skip


def old_get(task_id: str) -> JsonObject:
    return {"jsonrpc": "2.0", "id": 1, "method": "tasks/get", "params": {"id": task_id}}


# --- a start that fails -----------------------------------------------------------------------


def in_the_way(path: Path) -> Path:
    """Return a directory that cannot be made, whoever tries."""
    path.write_text("a file")
    return path / "state"


@pytest.mark.parametrize("flags", [(), ("--demo",), ("--managed",)])
async def test_a_state_directory_that_cannot_be_written_is_one_line(
    tmp_path: Path, flags: tuple[str, ...]
) -> None:
    directory = in_the_way(tmp_path / "file")

    status, printed = await run("serve", *flags, A2A_STATE_DIR=str(directory), **in_memory())

    assert (status, printed) == (
        2,
        f"opencode-a2a: cannot write to the state directory {directory}: Not a directory; "
        "set A2A_STATE_DIR to one that can be written\n",
    )


@contextmanager
def opencode2(version: str, *, page: bool) -> Generator[str]:
    """Run a server that answers as OpenCode 2 does: its API is below ``/api``.

    Where 1.x tells its health, there is the web page, or nothing.
    """

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body, kind, status = b"<!doctype html>", "text/html", 200 if page else 404
            if self.path == "/api/health":
                body = orjson.dumps({"healthy": True, "version": version, "pid": 1})
                kind, status = "application/json", 200
            self.send_response(status)
            self.send_header("content-type", kind)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:  # type: ignore[override] # nothing is logged
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.mark.parametrize("page", [True, False])
@pytest.mark.parametrize("version", ["2.0.12", "0.0.0-beta-19296"])
async def test_an_opencode_2_is_recognised_and_refused_in_one_sentence(
    tmp_path: Path, version: str, page: bool
) -> None:
    with opencode2(version, page=page) as url:
        given = {"OPENCODE_BASE_URL": url, "A2A_STATE_DIR": str(tmp_path), **in_memory()}
        status, printed = await run("serve", **given)
        examined, found = await run("doctor", **given)

    why = f"OpenCode {version} has the API of OpenCode 2, which this service does not speak; "
    last = printed.strip().splitlines()[-1]
    assert (status, examined) == (2, 1)
    assert last.startswith(f"opencode-a2a: OpenCode at {url} cannot be used: {why}`npm install ")
    assert f"failed  opencode: {version} ({url})\n        {why}" in found


async def test_a_token_that_others_can_read_is_one_line(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("a-token-for-everybody-to-read")
    token.chmod(0o644)

    status, printed = await run("serve", A2A_STATE_DIR=str(tmp_path), **in_memory())

    assert (status, printed) == (
        2,
        f"opencode-a2a: others can read {token}; run chmod 600 on it, or remove it\n",
    )


@pytest.mark.parametrize(
    ("variables", "variable"),
    [
        ({"A2A_BEARER_TOKEN": "a-token-with-a-space-at-its-end "}, "A2A_BEARER_TOKEN"),
        (
            {
                "A2A_STATIC_AUTH_CREDENTIALS": '[{"scheme": "basic", "username": "a:b", '
                '"password": "a-password-that-is-long"}]'
            },
            "A2A_STATIC_AUTH_CREDENTIALS",
        ),
        ({"A2A_HOST": "0.0.0.0", "A2A_BEARER_TOKEN": "short"}, "A2A_BEARER_TOKEN"),  # noqa: S104 - refused
        ({"OPENCODE_WORKSPACE_ROOT": "/"}, "OPENCODE_WORKSPACE_ROOT"),
    ],
)
async def test_a_setting_that_cannot_work_is_one_line(
    variables: dict[str, str], variable: str
) -> None:
    status, printed = await run("serve", **variables)

    [line] = printed.splitlines()
    assert (status, line.partition(":")[0]) == (2, variable)


async def test_a_host_that_cannot_be_a_name_is_one_line(tmp_path: Path) -> None:
    host = "a" * 300
    flags = ["--host", host, "--a2a-public-url", "https://agent.example"]
    flags += ["--auth-allowed-hosts", "agent.example"]

    status, printed = await run(
        "serve",
        *flags,
        A2A_STATE_DIR=str(tmp_path),
        A2A_BEARER_TOKEN=TOKEN,
        **in_memory(),
    )

    assert (status, printed) == (
        1,
        f"opencode-a2a: cannot listen on {host}:18999: not a host name; "
        "stop what uses it, or set A2A_HOST and A2A_PORT\n",
    )


async def test_a_working_directory_that_is_gone_is_one_line(tmp_path: Path) -> None:
    leave = 'cd "$1" && rmdir "$1" && shift && exec "$@"'
    inside = tmp_path / "gone"
    inside.mkdir()
    program = (sys.executable, "-m", "opencode_a2a", "serve", "--managed")
    command = ("sh", "-c", leave, "sh", inside, *program)
    process = await asyncio.create_subprocess_exec(
        *command,
        env=bare({}),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    async with asyncio.timeout(60):
        printed, _ = await process.communicate()

    assert (process.returncode, printed.decode()) == (
        2,
        "OPENCODE_WORKSPACE_ROOT: is not set, and the current directory is gone\n",
    )


def in_memory() -> dict[str, str]:
    return {"A2A_TASK_STORE_BACKEND": "memory", "A2A_PORT": "18999"}


# --- guessing ---------------------------------------------------------------------------------


def user(name: str, password: str) -> dict[str, str]:
    plain = base64.b64encode(f"{name}:{password}".encode()).decode()
    return {"Authorization": f"Basic {plain}"}


async def test_guessing_slows_the_guesser_and_not_the_others_behind_its_address(
    opencode: FakeOpenCode, tmp_path: Path
) -> None:
    people = [{"scheme": "basic", "username": name, "password": "short"} for name in ("ann", "ben")]
    variables = variables_for(
        opencode, tmp_path, A2A_STATIC_AUTH_CREDENTIALS=orjson.dumps(people).decode()
    )
    async with Program(variables) as program:

        async def status(headers: dict[str, str]) -> int:
            return (await program.http.get("/health", headers=headers)).status_code

        strangers = [await status(user("mallory", f"guess {n}")) for n in range(25)]
        tokens = [await status({"Authorization": f"Bearer guess-{n}"}) for n in range(25)]
        before = await status(user("ann", "short"))
        guesses = [await status(user("ann", f"guess {n}")) for n in range(25)]
        guessed, neighbour = await status(user("ann", "short")), await status(user("ben", "short"))

    assert strangers == tokens == guesses == [401] * 20 + [429] * 5
    assert (before, guessed, neighbour) == (200, 429, 200)
    assert "the password of ann is shorter than 20 characters" in "\n".join(program.lines)


async def test_a_client_that_repeats_an_old_password_is_no_guesser(
    opencode: FakeOpenCode, tmp_path: Path
) -> None:
    people = [{"scheme": "basic", "username": "ann", "password": "short"}]
    variables = variables_for(
        opencode, tmp_path, A2A_STATIC_AUTH_CREDENTIALS=orjson.dumps(people).decode()
    )
    async with Program(variables) as program:
        old = [await program.http.get("/health", headers=user("ann", "old one")) for _ in range(30)]
        right = await program.http.get("/health", headers=user("ann", "short"))

    assert {answer.status_code for answer in old} == {401}
    assert right.status_code == 200
