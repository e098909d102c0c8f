"""What the live tests share: callers, and an OpenCode that asks before it does anything."""

import asyncio
import os
import sys
import uuid
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Generator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from opencode_a2a.events import JsonObject
from opencode_a2a.opencode.driver import Driver
from opencode_a2a.opencode.managed import install_nothing
from opencode_a2a_demo.server import DemoModel
from tests.conftest import ASKING, UNTRACKED, Stages
from tests.support import mcp_echo
from tests.support.answers import Wire
from tests.support.backstage import Backstage, past_service
from tests.support.caller import Caller
from tests.support.forked import ForkedProgram
from tests.support.program import Program
from tests.support.proxy import Moment, Proxy
from tests.support.service import TOKEN, Running, serving, settings_for, variables_for

KILLS = int(os.environ.get("OPENCODE_A2A_TEST_KILLS", "3"))
"""How often a test kills the service at a random moment; ``make kills`` does it more often."""
SEED = int(os.environ.get("OPENCODE_A2A_TEST_SEED", "11"))
ECHO = str(Path(mcp_echo.__file__))
EVERYTHING_ASKED: JsonObject = {
    "permission": dict.fromkeys(
        ("bash", "edit", "webfetch", "external_directory", "doom_loop", "todowrite", "echo_say"),
        "ask",
    ),
    "mcp": {"echo": {"type": "local", "command": [sys.executable, ECHO]}},
    **UNTRACKED,
}

two_wires = pytest.mark.parametrize("wire", [Wire.RPC, Wire.REST03], ids=lambda wire: wire.value)
"""Each binding and each version once; ``tests/service`` has all of them, before recordings."""

Serve = Callable[..., Awaitable[Running]]
"""Starts a service with changed settings, for the length of the test."""


@pytest.fixture
def gate() -> str:
    """The name of a point in a script where the model waits for the test."""
    return uuid.uuid4().hex


@pytest.fixture
async def model() -> AsyncGenerator[DemoModel]:
    async with DemoModel() as running:
        yield running


@pytest.fixture
def workspace(tmp_path: Path) -> Path:
    made = tmp_path / "workspace"
    made.mkdir()
    return made


@pytest.fixture(scope="session")
def asking_backstage(stages: Stages) -> Generator[Backstage]:
    """An OpenCode that asks for permission, one for the whole run."""
    with stages("asking", EVERYTHING_ASKED) as running:
        yield running


@pytest.fixture(scope="session")
def tracking_backstage(stages: Stages) -> Generator[Backstage]:
    """An OpenCode as users have it, which keeps track of changed files."""
    with stages("tracking", ASKING) as running:
        yield running


@pytest.fixture
def caller(service: Running) -> Caller:
    """Somebody who calls the service on JSON-RPC 1.0."""
    return Caller(service)


@pytest.fixture
async def serve(backstage: Backstage, tmp_path: Path) -> AsyncGenerator[Serve]:
    """A service with settings of the test's own, in front of the shared OpenCode."""
    async with AsyncExitStack() as stack:

        async def start(behind: Backstage = backstage, **changes: str) -> Running:
            settings = settings_for(behind, tmp_path, **changes)
            return await stack.enter_async_context(serving(settings))

        yield start


@pytest.fixture
async def program(backstage: Backstage, tmp_path: Path) -> AsyncGenerator[Program]:
    """The service as a process that a test may kill and start again."""
    async with ForkedProgram(variables_for(backstage, tmp_path)) as running:
        yield running


async def kill_at(
    moment: Moment, wire: Proxy, program: Program, answering: Coroutine[Any, Any, None]
) -> None:
    """Kill the service when its reply to OpenCode has come so far, and start it again."""
    hold = wire.hold(b"/reply", moment)
    async with asyncio.TaskGroup() as group:
        group.create_task(answering)
        async with asyncio.timeout(60):
            await hold.reached.wait()
        await program.kill()
    wire.release()
    await program.start()


@pytest.fixture
async def opencode(backstage: Backstage) -> AsyncGenerator[Driver]:
    """OpenCode's own API, past the service."""
    async with past_service(backstage.url, backstage.password) as driver:
        yield driver


@pytest.fixture
def variables(opencode_command: str, tmp_path: Path) -> dict[str, str]:
    """A service that starts the OpenCode of a user who has set up nothing."""
    (tmp_path / "workspace").mkdir()
    install_nothing(tmp_path / "config")
    return {
        "A2A_BEARER_TOKEN": TOKEN,
        "A2A_STATE_DIR": str(tmp_path / "state"),
        "OPENCODE_COMMAND": opencode_command,
        "OPENCODE_WORKSPACE_ROOT": str(tmp_path / "workspace"),
        "OPENCODE_STARTUP_TIMEOUT": "60",
        "HOME": str(tmp_path),
        "XDG_DATA_HOME": str(tmp_path / "data"),
        "XDG_CONFIG_HOME": str(tmp_path / "config"),
    }
