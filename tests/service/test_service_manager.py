"""What a service manager hears of the service, and whether the units are valid."""

import asyncio
import os
import shutil
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from opencode_a2a.service_manager import ServiceManager
from tests.support.program import Program
from tests.support.service import TOKEN

ROOT = Path(__file__).parent.parent.parent


class Manager:
    """A service manager that listens."""

    def __init__(self, address: str) -> None:
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.socket.bind(address)
        self.socket.setblocking(False)
        self.heard: list[str] = []

    async def hear(self, word: str) -> str:
        """Wait for a datagram that begins with a word, and return it."""
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(60):
            while True:
                told = (await loop.sock_recv(self.socket, 4096)).decode()
                self.heard.append(told)
                if told.startswith(word):
                    return told


@pytest.fixture
def manager(tmp_path: Path) -> Iterator[Manager]:
    made = Manager(str(tmp_path / "notify"))
    with made.socket:
        yield made


async def test_systemd_hears_that_the_service_is_ready_alive_reloading_and_stopping(
    manager: Manager, tmp_path: Path
) -> None:
    variables = {
        "A2A_BEARER_TOKEN": TOKEN,
        "A2A_STATE_DIR": str(tmp_path / "state"),
        "A2A_AUDIT_FILE": str(tmp_path / "audit.jsonl"),
        "OPENCODE_BASE_URL": "http://127.0.0.1:9",
        "NOTIFY_SOCKET": str(tmp_path / "notify"),
        "WATCHDOG_USEC": "200000",
    }
    async with Program(variables) as program:
        assert await manager.hear("READY=1") == f"READY=1\nSTATUS=Serving at {program.url}"
        await manager.hear("WATCHDOG=1")
        await manager.hear("WATCHDOG=1")

        assert await program.stop() == 0
        await manager.hear("STOPPING=1")


async def test_a_reload_is_told_with_its_time(manager: Manager, tmp_path: Path) -> None:
    told = ServiceManager({"NOTIFY_SOCKET": str(tmp_path / "notify")})

    told.reloading()

    reloading = await manager.hear("RELOADING=1")
    assert int(reloading.partition("MONOTONIC_USEC=")[2]) > 0


async def test_an_abstract_socket_is_found_and_a_missing_one_is_no_error() -> None:
    name = f"opencode-a2a-test-{os.getpid()}"
    manager = Manager(f"\0{name}")
    with manager.socket:
        ServiceManager({"NOTIFY_SOCKET": f"@{name}"}).stopping()
        assert await manager.hear("STOPPING=1") == "STOPPING=1"

    ServiceManager({"NOTIFY_SOCKET": "/nowhere/notify"}).ready("x")
    ServiceManager({}).ready("x")


@pytest.mark.parametrize(
    "environ",
    [
        {},
        {"WATCHDOG_USEC": "many"},
        {"WATCHDOG_USEC": "0"},
        {"WATCHDOG_USEC": "1000", "WATCHDOG_PID": "1"},
    ],
)
async def test_nothing_beats_for_a_watchdog_that_is_not_ours(environ: dict[str, str]) -> None:
    async with asyncio.timeout(60):
        await ServiceManager({"NOTIFY_SOCKET": "/nowhere", **environ}).keep_alive()


@pytest.mark.parametrize("name", ["opencode-a2a.service", "opencode.service"])
def test_the_units_have_no_key_twice_and_the_service_is_watched(name: str) -> None:
    lines = (ROOT / "deploy" / "systemd" / name).read_text().splitlines()
    keys = [line.partition("=")[0] for line in lines if "=" in line and line[0] != "#"]

    assert len(keys) == len({*keys}) + keys.count("Environment") - ("Environment" in keys)
    assert ("Type=notify" in lines) == name.startswith("opencode-a2a")
    assert "RestartPreventExitStatus=2" in lines
    if (program := shutil.which("systemd-analyze")) is None:
        return  # the rest is for machines with systemd
    told = subprocess.run(  # noqa: S603 - our own
        [program, "verify", str(ROOT / "deploy" / "systemd" / name)],
        capture_output=True, text=True, check=False,
    ).stderr  # fmt: skip
    assert "Unknown key" not in told
    assert "Failed to parse" not in told
