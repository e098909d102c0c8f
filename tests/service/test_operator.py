"""What whoever runs the service meets: its log, and a start that fails.

The program runs as a process of its own, in front of an OpenCode that replays recordings.
"""

import asyncio
import base64
import re
import shutil
import sys
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import orjson
import pytest

from opencode_a2a.events import JsonObject
from tests.conftest import ROOT
from tests.support.caller import Caller
from tests.support.kinds import answering
from tests.support.opencode import FakeOpenCode
from tests.support.ports import free_port
from tests.support.program import Program, bare, run
from tests.support.service import TOKEN, message, variables_for
from tests.support.terminal import Terminal

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


async def test_payloads_are_logged_of_a2a_alone(opencode: FakeOpenCode, tmp_path: Path) -> None:
    """Other paths take what is secret, such as where a browser gets its push messages."""
    secret = {"endpoint": "https://push.example/secret-1", "keys": {"auth": "secret-2"}}
    async with Program(variables_for(opencode, tmp_path, A2A_LOG_PAYLOADS="true")) as program:
        await program.http.post("/notices/subscription", json=secret)
        await program.http.post("/tasks", json=secret, headers={"A2A-Version": "1.0"})
        await program.http.get("/tasks", headers={"A2A-Version": "1.0"})
        await program.stop()

    *others, listed = [record for record in program.records() if record["event"] == "payload"]
    assert [record["request"] for record in others] == ["omitted: sensitive method"] * 2
    assert orjson.loads(listed["response"])["tasks"] == []


async def test_a_backup_beside_the_service_is_made_and_restored_as_the_page_says(
    opencode: FakeOpenCode, tmp_path: Path
) -> None:
    page = (ROOT / "docs" / "operations.md").read_text()
    (command,) = re.findall(r"^\$ (python3 -c '.*?') ", page, re.MULTILINE | re.DOTALL)
    database, backup, plain = (tmp_path / f"{name}.db" for name in ("tasks", "backup", "plain"))
    variables = variables_for(opencode, tmp_path, A2A_TASK_STORE_BACKEND="database")
    async with Program(variables) as program:
        kept = (await Caller(program).send("hello")).id
        shutil.copy(database, plain)
        making = await asyncio.create_subprocess_shell(f"{command} {database} {backup}")
        assert await making.wait() == 0
        lost = (await Caller(program).send("hello again")).id
        await program.kill()
    for ending in ("", "-wal", "-shm"):
        database.with_name(database.name + ending).unlink()
    backup.rename(database)

    async with Program(variables) as program:
        listed = await Caller(program).answer("ListTasks", {})

    assert plain.stat().st_size < database.stat().st_size
    assert [task["id"] for task in listed["result"]["tasks"]] == [kept] != [lost]


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
    # The second cannot even be looked at, like a directory of somebody else.
    directories = {in_the_way(tmp_path / "file"): "Not a directory"}
    directories[tmp_path / ("x" * 300)] = "File name too long"

    for directory, why in directories.items():
        status, printed = await run("serve", *flags, A2A_STATE_DIR=str(directory), **in_memory())

        assert (status, printed) == (
            2,
            f"opencode-a2a: cannot write to the state directory {directory}: {why}; "
            "set A2A_STATE_DIR to one that can be written\n",
        )


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("2.0.2", "it is OpenCode 2 (2.0.2), and its API has no "),
        ("2.0.4", "it is OpenCode 2 (2.0.4), and its API has no "),
        ("2.2.6", "it is OpenCode 2 (2.2.6), and its API has no "),
        ("another password", "it asks for a password (status 401)"),
        ("a web page", "it answers with a web page where OpenCode tells its version"),
    ],
)
async def test_what_is_not_a_usable_opencode_is_refused_in_one_sentence(
    tmp_path: Path, name: str, what: str
) -> None:
    with answering(name) as url:
        given = {"OPENCODE_BASE_URL": url, "A2A_STATE_DIR": str(tmp_path), **in_memory()}
        status, printed = await run("serve", **given)
        examined, found = await run("doctor", "--json", **given)

    last = printed.strip().splitlines()[-1]
    assert (status, examined) == (2, 1)
    assert last.startswith(f"opencode-a2a: OpenCode at {url} cannot be used: {what}")
    [finding] = [one for one in orjson.loads(found)["findings"] if one["subject"] == "opencode"]
    assert finding["status"] == "failed"
    assert f"opencode-a2a: OpenCode at {finding['found']}; {finding['remedy']}" == last.replace(
        " cannot be used", ""
    )


async def test_an_opencode_that_is_replaced_by_another_kind_makes_the_service_unready(
    tmp_path: Path,
) -> None:
    workspace = tmp_path / "workspace"
    workspace.mkdir()
    async with AsyncExitStack() as stack:
        opencode = await stack.enter_async_context(FakeOpenCode(workspace).running())
        port = int(opencode.url.rpartition(":")[2])
        async with Program(variables_for(opencode, tmp_path)) as program:
            before = after = await program.http.get("/readyz")

            await stack.aclose()
            with answering("2.0.6", port):
                named = "OpenCode cannot be used: it is OpenCode 2 (2.0.6), and its API has no"
                async with asyncio.timeout(60):
                    while not any("not ready" in line and named in line for line in program.lines):
                        await asyncio.sleep(0.1)
                        after = await program.http.get("/readyz")

    assert before.status_code == 200
    assert (after.status_code, after.json()["checks"]["opencode"]) == (503, "failed")
    # A probe that fails is an answer, and no failure of its own.
    assert [record for record in program.records() if record["event"] == "request"] == []


async def test_a_terminal_says_that_opencode_is_being_started_and_that_it_was_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "opencode"
    program.write_text("#!/bin/sh\nexec sleep 1000\n")
    program.chmod(0o755)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("OPENCODE_COMMAND", str(program))
    for name in ("XDG_STATE_HOME", "XDG_CONFIG_HOME", "XDG_DATA_HOME"):
        monkeypatch.delenv(name, raising=False)

    async with Terminal("serve", "--demo", "--port", str(free_port())) as terminal:
        await terminal.sees("Starting OpenCode …")
        await terminal.sees("\r\x1b[KStarting OpenCode … ")
        assert terminal.seen.count("Starting") == 1
        await terminal.interrupt()
        assert await terminal.ended() == 0

        await terminal.sees("Stopped.")
        assert terminal.seen.split() == ["Stopped."]


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


async def test_how_long_a_task_has_been_waiting_for_a_person_is_measured(
    opencode: FakeOpenCode, tmp_path: Path
) -> None:
    async def longest() -> float:
        lines = (await program.http.get("/metrics")).text.splitlines()
        (line,) = [line for line in lines if line.startswith("a2a_waiting_oldest_seconds ")]
        return float(line.split()[1])

    opencode.play("permission-once")
    async with Program(variables_for(opencode, tmp_path)) as program:
        before = await longest()
        asked = await Caller(program).send("run it")
        during = await longest()
        await Caller(program).send("once", task=asked.id)
        after = await longest()

    assert before == after == 0
    assert during > 0


async def test_the_time_to_the_first_text_leaves_out_what_people_take_to_answer(
    opencode: FakeOpenCode, tmp_path: Path
) -> None:
    async def observed() -> float:
        lines = (await program.http.get("/metrics")).text.splitlines()
        (line,) = [line for line in lines if line.startswith("a2a_first_text_seconds_count ")]
        return float(line.split()[1])

    async with Program(variables_for(opencode, tmp_path)) as program:
        before = await observed()
        opencode.play("plain-text")
        await Caller(program).send("hello")
        answered = await observed()
        opencode.play("permission-once")
        asked = await Caller(program).send("run it")
        await Caller(program).send("once", task=asked.id)
        after = await observed()

    assert (before, answered, after) == (0, 1, 1)
