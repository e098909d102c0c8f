"""The program as a process in front of an OpenCode that replays recordings."""

import asyncio
import signal
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from tests.support.answers import RefusedError, Wire
from tests.support.caller import Caller
from tests.support.opencode import FakeOpenCode
from tests.support.ports import free_port
from tests.support.program import Program, run
from tests.support.proxy import Proxy
from tests.support.service import TOKEN, variables_for


@pytest.fixture
async def fake(tmp_path: Path) -> AsyncGenerator[FakeOpenCode]:
    workspace = tmp_path / "workspace"
    workspace.mkdir()
    async with FakeOpenCode(workspace).running() as running:
        yield running


def with_generated_token(fake: FakeOpenCode, state: Path, name: str) -> Program:
    """A service of this user that shares its state directory with others."""
    variables = variables_for(fake, state)
    del variables["A2A_BEARER_TOKEN"]
    variables["A2A_TASK_STORE_DATABASE_URL"] = f"sqlite:///{state / name}.db"
    return Program(variables)


# Several services of one user


async def test_the_end_of_one_service_leaves_another_of_the_same_user_reachable(
    fake: FakeOpenCode, tmp_path: Path
) -> None:
    async with (
        with_generated_token(fake, tmp_path, "first") as first,
        with_generated_token(fake, tmp_path, "second") as second,
    ):
        for program in (first, second):
            status, output = await run("call", program.url, "hello", **first.variables)
            assert status == 0, output

        assert await second.stop() == 0

        status, output = await run("call", first.url, "hello", **first.variables)
        assert status == 0, output


async def test_the_token_is_not_sent_to_where_a_killed_service_was(
    fake: FakeOpenCode, tmp_path: Path
) -> None:
    async with with_generated_token(fake, tmp_path, "first") as program:
        await program.kill()
        requests: list[str] = []

        async def stranger(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            requests.append((await reader.readuntil(b"\r\n\r\n")).decode())
            writer.write(b"HTTP/1.1 401 Unauthorized\r\nContent-Length: 0\r\n\r\n")
            writer.close()

        async with await asyncio.start_server(stranger, "127.0.0.1", program.port):
            await run("call", program.url, "hello", **program.variables)

    assert requests
    assert not any("authorization" in request.lower() for request in requests)


# Signals


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
async def test_a_signal_ends_the_service_in_order(
    fake: FakeOpenCode, tmp_path: Path, number: signal.Signals
) -> None:
    async with with_generated_token(fake, tmp_path, "first") as program:
        assert await program.stop(number) == 0

    assert list((tmp_path / "services").iterdir()) == []


# An OpenCode that is not there


@asynccontextmanager
async def locked_out(port: int = 0) -> AsyncGenerator[str]:
    """Be an OpenCode whose password is another."""

    async def refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 401 Unauthorized\r\nContent-Length: 0\r\n\r\n")
        writer.close()

    async with await asyncio.start_server(refuse, "127.0.0.1", port) as server:
        host, port = server.sockets[0].getsockname()
        yield f"http://{host}:{port}"


async def test_an_absent_opencode_is_said_at_once_and_calls_fail_until_it_answers(
    fake: FakeOpenCode, tmp_path: Path
) -> None:
    away = f"http://127.0.0.1:{free_port()}"
    async with Program(variables_for(fake, tmp_path, OPENCODE_BASE_URL=away)) as program:
        sentence = await program.printed(lambda line: "does not answer" in line)
        assert away in sentence
        assert "opencode-a2a opencode" in sentence
        assert "--managed" in sentence

        client = {"A2A_CLIENT_BEARER_TOKEN": TOKEN}
        async with asyncio.TaskGroup() as group:  # each waits for OpenCode for a while
            called = group.create_task(run("call", program.url, "hello", **client))
            for wire in Wire:
                group.create_task(refused(program, wire))
        status, output = called.result()
        assert (status, "OpenCode cannot be reached" in output) == (1, True), output
        assert (await Caller(program).answer("ListTasks", {}))["result"]["totalSize"] == 0

        async with Proxy(fake.url, port=int(away.rpartition(":")[2])):
            async with asyncio.timeout(60):
                while (await run("call", program.url, "hello", **client))[0] != 0:
                    pass


async def refused(program: Program, wire: Wire) -> None:
    with pytest.raises(RefusedError, match="UPSTREAM_UNREACHABLE"):
        await Caller(program, wire).send("hello")


async def test_a_wrong_password_ends_the_start(fake: FakeOpenCode, tmp_path: Path) -> None:
    """Only a person can mend it."""
    async with locked_out() as url:
        status, printed = await run("serve", **variables_for(fake, tmp_path, OPENCODE_BASE_URL=url))

    sentence = printed.strip().splitlines()[-1]
    assert status == 2
    assert f"OpenCode at {url} cannot be used: it refuses the user name or the pass" in sentence
    assert "OPENCODE_AUTH_PASSWORD" in sentence
    assert fake.password not in printed


# The variables of a managed OpenCode


THEIRS = {"JAVA_HOME": "/opt/java", "DATABASE_URL": "postgres://somewhere", "A_KEY": "of theirs"}


@pytest.mark.parametrize(
    ("narrowed", "wanted"),
    [(None, set(THEIRS)), ("JAVA_*, A_KEY", {"JAVA_HOME", "A_KEY"}), ("NONE", set[str]())],
)
async def test_a_managed_opencode_gets_the_variables_that_the_operator_chose(
    tmp_path: Path, narrowed: str | None, wanted: set[str]
) -> None:
    command = tmp_path / "opencode"
    command.write_text(f"#!/bin/sh\nenv > {tmp_path}/seen\n")
    command.chmod(0o700)
    variables = {
        "A2A_BEARER_TOKEN": TOKEN,
        "A2A_STATE_DIR": str(tmp_path / "state"),
        "A2A_TASK_STORE_BACKEND": "memory",
        "A2A_PEERS": '[{"name": "p", "url": "https://p.example", "credential": "PEER_TOKEN"}]',
        "OPENCODE_COMMAND": str(command),
        "OPENCODE_MODEL_ID": "m",
        "OPENCODE_PROVIDER_ID": "p",
        "PEER_TOKEN": "the-token-of-a-peer",
        **({"OPENCODE_ENV_PASSTHROUGH": narrowed} if narrowed else {}),
        **THEIRS,
    }

    status, output = await run("serve", "--managed", **variables)

    assert status == 1, output
    text = (tmp_path / "seen").read_text()
    seen = {line.partition("=")[0] for line in text.splitlines()}
    assert seen & THEIRS.keys() == wanted
    assert {"PATH", "HOME"} <= seen
    assert seen.isdisjoint({"PEER_TOKEN", "OPENCODE_COMMAND", "OPENCODE_MODEL_ID"})
    assert TOKEN not in text
    assert "A2A_" not in text.replace("OPENCODE_A2A_INSTANCE", "")


async def test_the_end_of_a_service_before_an_external_opencode_names_what_is_open(
    fake: FakeOpenCode, tmp_path: Path
) -> None:
    async with Program(variables_for(fake, tmp_path)) as program:
        caller = Caller(program)
        fake.play("permission-once")
        waiting = await caller.send("run it")
        fake.play("plain-text")
        held = fake.hold()
        working = await caller.begin("hello")
        await held.reached.wait()
        before = len(program.lines)

        assert await program.stop(signal.SIGINT) == 0

        said = await program.record("stopping", before)
        assert (said["waiting"], said["working"]) == ([waiting.id], [working.id])
        notes = "\n".join(said["notes"])
        assert "After the next start, follow a task: opencode-a2a task --follow TASK" in notes
        assert "OpenCode" not in notes
        assert (await program.record("stopped", before))["level"] == "info"
        fake.release()
