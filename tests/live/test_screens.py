"""The screens that a newcomer meets, at a real terminal with a real OpenCode."""

import re
from collections.abc import Generator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from tests.support.ports import free_port
from tests.support.screens import compare, settled
from tests.support.terminal import Terminal

pytestmark = pytest.mark.live
SIZE = (100, 60)


@pytest.fixture
def home() -> Generator[Path]:
    """An empty home whose path always has the same length: lines are wrapped by that."""
    with TemporaryDirectory(prefix="a2a-", dir="/tmp") as directory:
        yield Path(directory)


async def test_every_screen_of_the_first_minutes_is_as_it_was(
    opencode_command: str, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    port = free_port()
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("OPENCODE_COMMAND", opencode_command)
    monkeypatch.setenv("OPENCODE_STARTUP_TIMEOUT", "60")
    for name in ("XDG_STATE_HOME", "XDG_CONFIG_HOME", "XDG_DATA_HOME", "NO_COLOR"):
        monkeypatch.delenv(name, raising=False)
    work = home / "work"
    work.mkdir()
    monkeypatch.chdir(work)

    def check(name: str, terminal: Terminal) -> None:
        places = ((home, "~"), (opencode_command, "OPENCODE"))
        compare(name, settled(terminal.seen, *places))

    async with Terminal("serve", "--demo", "--port", str(port), size=SIZE) as serve:
        await serve.sees("Ctrl-C stops the service")
        check("serve-started", serve)

        async with Terminal("call", "what can you do here?", size=SIZE) as call:
            assert await call.ended() == 0
            check("call", call)

        async with Terminal("chat", size=SIZE) as chat:
            await chat.sees("> ")
            chat.type("create a file notes.txt with 'hello'\n")
            await chat.sees("answer> ")
            chat.type("y\n")
            await chat.sees("completed in")
            for line in ("/hlep\n", "/model\n", "/cost\n"):
                await chat.sees("> ")
                chat.type(line)
            await chat.sees("> ")
            chat.type("/quit\n")
            assert await chat.ended() == 0
            check("chat", chat)

        async with Terminal("call", "run the tests", size=SIZE) as call:
            assert await call.ended() == 3
            check("call-question", call)
            waiting = re.findall(r"task ([0-9a-f]{8})", call.seen)[-1]

        async with Terminal("tasks", size=SIZE) as tasks:
            assert await tasks.ended() == 0
            check("tasks", tasks)

        async with Terminal("tasks", "--watch", "--state", "waiting", size=SIZE) as tasks:
            await tasks.sees("run the tests")
            check("tasks-watch", tasks)
            await tasks.interrupt()
            assert await tasks.ended() == 0

        async with Terminal("ping", size=SIZE) as ping:
            assert await ping.ended() == 0
            check("ping", ping)

        async with Terminal("doctor", "--demo", "--port", str(port), size=(250, 30)) as doctor:
            await doctor.ended()
            check("doctor", doctor)

        async with Terminal("task", "ffffffff", size=SIZE) as task:
            assert await task.ended() == 1
            check("task-unknown", task)

        async with Terminal("cancel", waiting, size=SIZE) as cancel:
            assert await cancel.ended() == 0
        await serve.sees("canceled")
        await serve.interrupt()
        assert await serve.ended() == 0
        check("serve", serve)
