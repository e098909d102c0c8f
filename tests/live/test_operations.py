"""The program as its operator sees it: signals, exit statuses, readiness, logs, processes."""

import asyncio
import fcntl
import os
import signal
import sqlite3
import sys
import termios
import uuid
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import orjson
import pytest

from opencode_a2a.opencode.process import marked_processes
from tests.live.conftest import two_wires
from tests.support.answers import RefusedError, Wire, fold
from tests.support.backstage import Backstage, script
from tests.support.caller import Caller, Following
from tests.support.ports import free_port
from tests.support.program import Program, bare, run
from tests.support.proxy import Proxy
from tests.support.service import TOKEN, variables_for

pytestmark = pytest.mark.live


@pytest.fixture
async def program(backstage: Backstage, tmp_path: Path) -> AsyncGenerator[Program]:
    async with Program(variables_for(backstage, tmp_path)) as running:
        yield running


async def readiness(program: Program) -> AsyncIterator[tuple[int, dict[str, str]]]:
    """Ask again and again whether the service is ready; each answer takes a second to age."""
    while True:
        answer = await program.http.get("/readyz")
        yield answer.status_code, answer.json()["checks"]
        await asyncio.sleep(0.2)


async def until_ready(program: Program, *, ready: bool) -> dict[str, str]:
    """Wait, at most as long as I13 allows, until the service is ready, or not."""
    async with asyncio.timeout(60):
        async for status, checks in readiness(program):
            assert (await program.http.get("/livez")).status_code == 200
            if (status == 200) == ready:
                return checks
    raise AssertionError


# Signals


@two_wires
async def test_a_stop_tells_streams_how_to_resume_and_loses_nothing(
    program: Program, backstage: Backstage, gate: str, wire: Wire
) -> None:
    """I5 and I14."""
    caller = Caller(program, wire)
    async with caller.stream(script({"say": "half "}, {"gate": gate}, {"say": "whole"})) as before:
        await before.until_text("half ")
        program.signal(signal.SIGTERM)
        with pytest.raises(RefusedError, match="Last-Event-ID"):
            await before.rest()
    assert await program.ended() == 0
    await program.start()

    last = before.updates[-1].id
    async with caller.subscribe(before.task.id, after=last) as after:
        await backstage.open(gate)
        updates = before.updates + await after.rest()

    assert after.updates[0].task is None  # all was stored, so that the log goes on
    assert fold(updates).text == "half whole"
    assert fold(updates).state == "completed"


async def test_a_stop_answers_a_send_that_waits(
    program: Program, backstage: Backstage, gate: str
) -> None:
    caller = Caller(program)
    message_id = str(uuid.uuid4())
    prompt = script({"gate": gate}, {"say": "done"})
    async with asyncio.TaskGroup() as group:
        waiting = group.create_task(refused(caller, prompt, message_id))
        await backstage.reached(gate)
        assert await program.stop() == 0
    assert "The task is kept" in waiting.result().message

    await program.start()
    await backstage.open(gate)
    assert (await caller.send(prompt, message_id=message_id)).text == "done"


async def refused(caller: Caller, prompt: str, message_id: str) -> RefusedError:
    with pytest.raises(RefusedError) as caught:
        await caller.send(prompt, message_id=message_id)
    return caught.value


async def test_a_stop_before_the_service_listens_is_a_clean_one(
    opencode_command: str, tmp_path: Path
) -> None:
    variables = managed(opencode_command, tmp_path)
    program = Program(variables, "--demo", "--managed")
    await program.spawn()
    await program.printed(lambda line: "OpenCode printed" in line)  # its first words, in the log
    assert children(program)

    assert await program.stop() == 0
    assert children(program) == []
    await program.http.aclose()


# Starting


async def test_all_errors_of_the_configuration_are_listed_at_once() -> None:
    status, output = await run(
        "serve",
        A2A_PORT="many",
        A2A_STREAM_KEEPALIVE_SECONDS="soon",
        A2A_BEARER_TOCEN="x",
        OPENCODE_MODEL_ID="m",
    )

    assert status == 2
    assert [line.partition(":")[0] for line in output.splitlines()] == [
        "A2A_PORT",
        "A2A_STREAM_KEEPALIVE_SECONDS",
        "A2A_BEARER_TOCEN",
        "OPENCODE_MODEL_ID",
    ]


async def test_a_second_process_on_the_same_database_is_refused(program: Program) -> None:
    status, output = await run("serve", **program.variables | {"A2A_PORT": str(free_port())})

    assert status == 1
    assert output.strip() == (
        "opencode-a2a: the database file tasks.db is in use by another process; "
        "stop it, or set A2A_TASK_STORE_DATABASE_URL to another file"
    )


HOST = "127.0.0.1"


async def test_a_port_in_use_is_one_line_before_anything_is_started(
    program: Program, tmp_path: Path
) -> None:
    other = f"sqlite:///{tmp_path / 'other.db'}"
    status, output = await run(
        "serve", **program.variables | {"A2A_TASK_STORE_DATABASE_URL": other}
    )

    assert status == 1
    assert output.startswith(
        f"opencode-a2a: your service runs at http://{HOST}:{program.port} already; `"
    )
    assert output.endswith(
        "console` opens it, and --port with another --workspace starts one beside it\n"
    )
    assert not (tmp_path / "other.db").exists()


async def test_an_opencode_that_is_not_installed_is_said_with_the_remedy(tmp_path: Path) -> None:
    variables = managed("no-such-program", tmp_path)
    status, output = await run("serve", "--managed", **variables)

    assert status == 2  # a supervisor need not try again: somebody has to install it
    assert "npm install -g opencode-ai@" in output
    assert "Traceback" not in output


# Readiness


async def test_an_opencode_that_is_away_makes_the_service_unready_until_it_returns(
    backstage: Backstage, tmp_path: Path
) -> None:
    """I13: also at the start, which does not depend on OpenCode."""
    port = free_port()
    away = {"OPENCODE_BASE_URL": f"http://{HOST}:{port}"}
    async with Program(variables_for(backstage, tmp_path, **away)) as program:
        caller, failed = Caller(program), {"database": "ok", "opencode": "failed"}
        assert await until_ready(program, ready=False) == failed
        async with Proxy(backstage.url, port):
            await until_ready(program, ready=True)
            assert (await caller.send(script({"say": "at first"}))).text == "at first"

        assert await until_ready(program, ready=False) == failed
        begun = await caller.begin(script({"say": "at last"}))
        async with Proxy(backstage.url, port):
            await until_ready(program, ready=True)
            assert (await caller.ended(begun.id)).text == "at last"
            await program.kill()


async def test_a_lost_database_makes_the_service_unready_until_it_returns(
    program: Program, backstage: Backstage, tmp_path: Path, gate: str
) -> None:
    """I13: a turn that runs meanwhile is told, and stored when the database is back."""
    caller = Caller(program)
    file, elsewhere = tmp_path / "tasks.db", tmp_path / "elsewhere.db"
    async with caller.stream(script({"say": "half "}, {"gate": gate}, {"say": "whole"})) as stream:
        await stream.until_text("half ")
        file.rename(elsewhere)
        assert await until_ready(program, ready=False) == {"database": "failed", "opencode": "ok"}
        for wire in Wire:
            with pytest.raises(RefusedError) as caught:
                await Caller(program, wire).send("hello")
            assert "TASK_STORE_UNAVAILABLE" in str(caught.value)
            assert str(tmp_path) not in str(caught.value)
        await backstage.open(gate)
        await stream.until_text("half whole")

        elsewhere.rename(file)
        await until_ready(program, ready=True)
        await stream.rest()

    assert stream.task.state == "completed"
    await program.restart()
    assert (await caller.get(stream.task.id)).text == "half whole"


async def test_a_table_that_is_gone_is_a_stable_error_until_it_returns(
    program: Program, tmp_path: Path
) -> None:
    caller = Caller(program)
    with sqlite3.connect(tmp_path / "tasks.db") as other:
        other.execute("ALTER TABLE messages RENAME TO hidden")
    with pytest.raises(RefusedError, match="TASK_STORE_UNAVAILABLE"):
        await caller.send("hello")
    await until_ready(program, ready=False)

    with sqlite3.connect(tmp_path / "tasks.db") as other:
        other.execute("ALTER TABLE hidden RENAME TO messages")
    other.close()
    await until_ready(program, ready=True)
    assert (await caller.send(script({"say": "back"}))).text == "back"


# What it uses


@dataclass
class Use:
    descriptors: int
    threads: int
    megabytes: float
    streams: int


async def use_of(program: Program) -> Use:
    place = Path("/proc") / str(program.pid)
    pages = int((place / "statm").read_text().split()[1])
    return Use(
        len(list((place / "fd").iterdir())),
        len(list((place / "task").iterdir())),
        pages * os.sysconf("SC_PAGE_SIZE") / 2**20,
        (await program.http.get("/health")).json()["streams"],
    )


async def read_and_leave(program: Program, task_id: str, readers: int) -> None:
    """Follow a task with several readers at once, none of which waits for its end."""

    async def read() -> None:
        async with Caller(program).subscribe(task_id) as following:
            await following.until(lambda update: update.task is not None)

    async with asyncio.TaskGroup() as group:
        for _ in range(readers):
            group.create_task(read())


@pytest.mark.linux_only
async def test_streams_that_were_left_leave_nothing_behind(
    program: Program, backstage: Backstage, gate: str
) -> None:
    """I8."""
    caller = Caller(program)
    begun = await caller.begin(script({"say": "half "}, {"gate": gate}, {"say": "whole"}))
    await backstage.reached(gate)
    long = script({"say": "some text " * 2000, "chunk": 1000})
    await read_and_leave(program, begun.id, 60)
    await caller.send(long)
    before = await use_of(program)

    for _ in range(4):
        await read_and_leave(program, begun.id, 60)
        await caller.send(long)
    async with asyncio.timeout(60):
        while (after := await use_of(program)).streams:  # noqa: ASYNC110 - another process's
            await asyncio.sleep(0.05)

    assert after.descriptors <= before.descriptors + 10
    assert after.threads <= before.threads + 4
    assert after.megabytes < before.megabytes + 40
    await backstage.open(gate)
    assert (await caller.ended(begun.id)).text == "half whole"


# Managed OpenCode


def managed(command: str, path: Path) -> dict[str, str]:
    (path / "workspace").mkdir(exist_ok=True)
    return {
        "A2A_BEARER_TOKEN": TOKEN,
        "A2A_STATE_DIR": str(path / "state"),
        "A2A_TASK_STORE_DATABASE_URL": f"sqlite:///{path / 'tasks.db'}",
        "A2A_LOG_LEVEL": "DEBUG",
        "OPENCODE_COMMAND": command,
        "OPENCODE_WORKSPACE_ROOT": str(path / "workspace"),
        "OPENCODE_STARTUP_TIMEOUT": "60",
        "OPENCODE_ASK": "none",
        "DEMO_API_KEY": "a-key-of-a-provider",
    }


def children(program: Program) -> list[int]:
    """Return what runs of all that the program's OpenCode is, or has started."""
    return started_by(program.pid)


def started_by(owner: int) -> list[int]:
    return [pid for pid, marker in marked_processes() if marker.startswith(f"{owner}.")]


def started_as(pid: int) -> tuple[str, str]:
    """Return the command line and the environment of a process."""
    place = Path("/proc") / str(pid)
    return (place / "cmdline").read_text(), (place / "environ").read_text()


LONG_TOOL = {
    "tool": "bash",
    "input": {"command": "(setsid sleep 1000 &); echo un''der way; sleep 1000", "description": "d"},
}


@asynccontextmanager
async def under_way(caller: Caller) -> AsyncGenerator[Following]:
    """Have a turn whose tool has started processes, and would never end."""
    async with caller.stream(script(LONG_TOOL)) as following:
        await following.until(lambda _: "under way" in str(fold(following.updates).tools))
        yield following


@pytest.mark.linux_only
async def test_the_demo_runs_survives_the_death_of_its_opencode_and_leaves_nothing(
    opencode_command: str, tmp_path: Path
) -> None:
    async with Program(managed(opencode_command, tmp_path), "--demo", "--managed") as program:
        caller = Caller(program)
        assert (await caller.send("list the files here")).state == "completed"

        first = next(pid for pid in children(program) if "serve" in started_as(pid)[0])
        arguments, environment = started_as(first)
        assert "A2A_" not in environment.replace("OPENCODE_A2A_INSTANCE", "")
        assert "DEMO_API_KEY" in environment
        (record,) = (tmp_path / "state" / "managed").glob("*.json")
        password = orjson.loads(record.read_bytes())["password"]
        secrets = (TOKEN, password, "a-key-of-a-provider")
        assert not any(secret in arguments for secret in secrets)
        assert password not in environment

        async with under_way(caller) as lost:
            os.kill(first, signal.SIGKILL)
            await lost.rest()
        assert (lost.task.state, lost.task.error_type) == ("failed", "UPSTREAM_INTERRUPTED")
        assert (await caller.send(script({"say": "again"}))).text == "again"

        async with under_way(caller):
            assert len(children(program)) > 2
            assert await program.stop() == 0

        assert children(program) == []
        printed = "\n".join(program.lines)
        assert not any(secret in printed for secret in secrets)
        assert "Traceback" not in printed
        assert {"event", "level", "timestamp"} <= set(program.records()[0])


@pytest.mark.linux_only
async def test_closing_the_terminal_ends_the_service_and_its_opencode(
    opencode_command: str, tmp_path: Path
) -> None:
    variables = managed(opencode_command, tmp_path) | {"A2A_PORT": str(free_port())}
    ours, theirs = os.openpty()
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "opencode_a2a", "serve", "--demo"),
        env=bare(variables),
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        start_new_session=True,
        preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
    )
    os.close(theirs)
    async with asyncio.timeout(60):
        shown = b""
        while b"Workspace" not in shown:
            shown += await asyncio.to_thread(os.read, ours, 65536)
        assert started_by(process.pid)

        os.close(ours)

        assert await process.wait() == 0
    assert started_by(process.pid) == []


# Looking at it


async def test_the_doctor_says_by_its_status_whether_all_is_well(
    backstage: Backstage, tmp_path: Path
) -> None:
    variables = variables_for(backstage, tmp_path, A2A_PORT=str(free_port()))
    status, output = await run("doctor", **variables)
    assert (status, "failed" in output) == (0, False), output

    status, output = await run("doctor", **variables | {"OPENCODE_BASE_URL": "http://127.0.0.1:9"})
    assert (status, "9: it does not answer" in output) == (1, True), output

    status, output = await run("doctor", A2A_PORT="many")
    assert (status, "A2A_PORT" in output) == (1, True), output
