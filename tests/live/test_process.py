"""The life of a managed OpenCode: start, death, restart, stop, and what is left of it."""

import asyncio
import os
import signal
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from opencode_a2a.errors import UpstreamError
from opencode_a2a.events import JsonObject
from opencode_a2a.opencode import versions
from opencode_a2a.opencode.client import Location, OpenCode
from opencode_a2a.opencode.launch import Launch, OpenCodeStartError
from opencode_a2a.opencode.process import (
    ManagedOpenCode,
    marked_processes,
)
from opencode_a2a.opencode.types import Session, SessionDraft, ShellCall
from tests.support.heard import listening

pytestmark = pytest.mark.live


@pytest.fixture
def launch(opencode_command: str, tmp_path: Path) -> Launch:
    return configured(opencode_command, tmp_path, {"share": "disabled"})


def configured(command: str, path: Path, config: JsonObject) -> Launch:
    workspace = path / "workspace"
    workspace.mkdir()
    return Launch(
        environment=os.environ,
        command=command,
        startup_timeout=60,
        state=path / "state",
        directory=workspace,
        config=config,
    )


def _marked() -> set[int]:
    return {pid for pid, marker in marked_processes() if marker.startswith(f"{os.getpid()}.")}


_others: set[int] = set()


@pytest.fixture(autouse=True)
def others() -> None:
    """Leave aside what ran before the test, such as the OpenCode that live tests share."""
    _others.clear()
    _others.update(_marked())


def ours() -> list[int]:
    """Return what runs of all that this test program started through OpenCode."""
    return sorted(_marked() - _others)


async def session_in(opencode: OpenCode, launch: Launch) -> Session:
    at = Location(str(launch.directory))
    return await opencode.create_session(SessionDraft(title="T"), at=at)


async def run_for_ever(opencode: OpenCode, session: Session) -> None:
    """Run a shell command that ends when its processes are ended."""
    command = "(setsid sleep 1000 &) ; echo un''der way ; sleep 1000"
    try:
        await opencode.run_shell(session.id, ShellCall(command=command, agent="build"))
    except UpstreamError:
        return


async def test_a_dead_opencode_is_started_again_at_the_same_address(launch: Launch) -> None:
    async with (
        asyncio.timeout(120),
        ManagedOpenCode(launch) as managed,
        OpenCode(managed.url, password=managed.password) as opencode,
        asyncio.TaskGroup() as group,
    ):
        restarted = asyncio.Event()
        managed.on_restart.append(restarted.set)
        first, address = managed.pid, managed.url
        session = await session_in(opencode, launch)
        async with listening(opencode) as heard:
            group.create_task(run_for_ever(opencode, session))
            await heard.until(b"under way")
        before = set(ours())

        assert first is not None
        os.kill(first, signal.SIGKILL)
        await restarted.wait()

        assert versions.doubt(managed.version) is None
        assert managed.running
        assert managed.pid != first
        assert managed.url == address
        assert await opencode.session(session.id) is not None
        assert before.isdisjoint(ours())

    assert ours() == []


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("wrapped", [True, False], ids=["launcher", "program"])
async def test_a_launcher_that_still_shows_the_password_is_warned_of(
    launch: Launch, tmp_path: Path, caplog: pytest.LogCaptureFixture, wrapped: bool
) -> None:
    if wrapped:
        launcher = tmp_path / "launcher"
        launcher.write_text(f'#!/bin/sh\n"{launch.command}" "$@"\n:\n')
        launcher.chmod(0o755)
        launch = replace(launch, command=str(launcher))

    async with asyncio.timeout(120), ManagedOpenCode(launch):
        pass

    assert ("set OPENCODE_COMMAND to the OpenCode program itself" in caplog.text) is wrapped


async def test_nothing_is_left_after_a_stop_in_the_middle_of_a_tool(launch: Launch) -> None:
    async with asyncio.timeout(120), asyncio.TaskGroup() as group:
        async with (
            ManagedOpenCode(launch) as managed,
            OpenCode(managed.url, password=managed.password) as opencode,
        ):
            session = await session_in(opencode, launch)
            async with listening(opencode) as heard:
                work = group.create_task(run_for_ever(opencode, session))
                await heard.until(b"under way")
        work.cancel()

    assert managed.pid is None
    assert ours() == []


async def test_an_invalid_configuration_is_a_start_error_that_names_it(
    opencode_command: str, tmp_path: Path
) -> None:
    launch = configured(opencode_command, tmp_path, {"model": 5})

    with pytest.raises(OpenCodeStartError) as caught:
        async with ManagedOpenCode(launch):
            pass

    assert "OPENCODE_CONFIG_CONTENT: model:" in caught.value.reason
    assert ours() == []
