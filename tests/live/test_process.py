"""The life of a managed OpenCode: start, death, restart, stop, and what is left of it."""

import asyncio
import os
import signal
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from opencode_a2a.config import OpenCodeSettings
from opencode_a2a.errors import UpstreamError
from opencode_a2a.events import JsonObject
from opencode_a2a.opencode.driver import Driver, Location
from opencode_a2a.opencode.kinds import untested
from opencode_a2a.opencode.managed import ManagedOpenCode
from opencode_a2a.opencode.process import OpenCodeStartError, marked_processes
from opencode_a2a.opencode.types import Session, SessionDraft, ShellCall
from tests.support.backstage import past_service, until_restarted

pytestmark = pytest.mark.live


def managed_in(workspace: Path, command: str, config: JsonObject | None = None) -> ManagedOpenCode:
    return ManagedOpenCode(
        OpenCodeSettings(command=command, startup_timeout=60),
        os.environ,
        config=config or {"share": "disabled"},
        state=workspace.parent / "state",
        directory=workspace,
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


async def session_in(opencode: Driver, workspace: Path) -> Session:
    at = Location(str(workspace))
    return await opencode.create_session(SessionDraft(title="T"), at=at)


async def run_for_ever(opencode: Driver, session: Session) -> None:
    """Run a shell command that ends when its processes are ended."""
    command = "(setsid sleep 1000 &) ; touch under-way ; sleep 1000"
    try:
        await opencode.run_shell(session.id, ShellCall(command=command, agent="build"))
    except UpstreamError:
        return


async def under_way(workspace: Path) -> None:
    while not (workspace / "under-way").exists():  # noqa: ASYNC110 - no event here
        await asyncio.sleep(0.02)


async def test_a_dead_opencode_is_started_again_at_the_same_address(
    workspace: Path, opencode_command: str
) -> None:
    async with (
        asyncio.timeout(120),
        managed_in(workspace, opencode_command) as managed,
        past_service(managed.url, managed.password) as opencode,
        asyncio.TaskGroup() as group,
    ):
        first, address = managed.pid, managed.url
        session = await session_in(opencode, workspace)
        group.create_task(run_for_ever(opencode, session))
        await under_way(workspace)
        before = set(ours())

        assert first is not None
        os.kill(first, signal.SIGKILL)
        await until_restarted(managed, first)

        assert untested(managed.version) is None
        assert managed.running
        assert managed.pid != first
        assert managed.url == address
        assert await opencode.session(session.id) is not None
        assert before.isdisjoint(ours())

    assert ours() == []
    # Nor was anything downloaded, which would take longer than all the rest.
    home = workspace.parent / "state"
    assert list((home / "config" / "opencode" / "node_modules").iterdir()) == []
    assert not (home / "home" / ".npm").exists()


@pytest.mark.linux_only
@pytest.mark.parametrize("wrapped", [True, False], ids=["launcher", "program"])
async def test_a_launcher_that_still_shows_the_password_is_warned_of(
    workspace: Path,
    opencode_command: str,
    tmp_path: Path,
    wrapped: bool,
) -> None:
    if wrapped:
        launcher = tmp_path / "launcher"
        launcher.write_text(f'#!/bin/sh\n"{opencode_command}" "$@"\n:\n')
        launcher.chmod(0o755)
        opencode_command = str(launcher)

    with capture_logs() as records:
        async with asyncio.timeout(120), managed_in(workspace, opencode_command):
            pass

    warned = [record["event"] for record in records if record["log_level"] == "warning"]
    assert any("set OPENCODE_COMMAND to the OpenCode program" in text for text in warned) is wrapped


@pytest.mark.both_drivers
async def test_an_opencode_that_has_not_got_the_password_is_not_used(
    workspace: Path, opencode_command: str, tmp_path: Path
) -> None:
    """OpenCode 1 then asks for none; the preview of OpenCode 2 makes up one of its own."""
    launcher = tmp_path / "launcher"
    launcher.write_text(
        f'#!/bin/sh\nexec env -u OPENCODE_SERVER_PASSWORD "{opencode_command}" "$@"\n'
    )
    launcher.chmod(0o755)

    with pytest.raises(OpenCodeStartError, match=r"OpenCode does not work: it .* password"):
        async with managed_in(workspace, str(launcher)):
            pass

    assert ours() == []


async def test_nothing_is_left_after_a_stop_in_the_middle_of_a_tool(
    workspace: Path, opencode_command: str
) -> None:
    async with asyncio.timeout(120), asyncio.TaskGroup() as group:
        async with (
            managed_in(workspace, opencode_command) as managed,
            past_service(managed.url, managed.password) as opencode,
        ):
            session = await session_in(opencode, workspace)
            work = group.create_task(run_for_ever(opencode, session))
            await under_way(workspace)
        work.cancel()

    assert managed.pid is None
    assert ours() == []


async def test_an_invalid_configuration_is_a_start_error_that_names_it(
    workspace: Path, opencode_command: str
) -> None:
    managed = managed_in(workspace, opencode_command, {"model": 5})

    with pytest.raises(OpenCodeStartError) as caught:
        async with managed:
            pass

    assert "OPENCODE_CONFIG_CONTENT: model:" in caught.value.reason
    assert ours() == []
