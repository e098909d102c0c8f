"""`opencode-a2a call` while the service that it talks to is away for a moment."""

import asyncio
import socket
import sys
from pathlib import Path

import pytest

from tests.support import stores
from tests.support.opencode import FakeOpenCode
from tests.support.proxy import Proxy
from tests.support.service import TOKEN, serving, settings_for

pytestmark = pytest.mark.asyncio(loop_scope="module")

DONE = ("one two three four\n", "", 0)
DATABASE_AWAY_SECONDS = 10.0
"""Longer than the service waits for a write, and than the lease after which it ends streams."""


@pytest.fixture
def port(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> int:
    """A port for the service; the program has its credential."""
    monkeypatch.setenv("A2A_CLIENT_BEARER_TOKEN", TOKEN)
    monkeypatch.setenv("A2A_STATE_DIR", str(tmp_path))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


async def call(url: str) -> tuple[str, str, int | None]:
    """Return what the program prints and how it ends."""
    pipe = asyncio.subprocess.PIPE
    command = (sys.executable, "-m", "opencode_a2a", "call", url, "hello")
    child = await asyncio.create_subprocess_exec(*command, stdout=pipe, stderr=pipe)
    try:
        async with asyncio.timeout(60):
            out, err = await child.communicate()
    finally:
        if child.returncode is None:
            child.kill()
            await child.wait()
    return out.decode(), err.decode(), child.returncode


@pytest.mark.parametrize("binding", ["JSONRPC", "HTTP+JSON"])
async def test_a_message_that_gets_no_answer_is_sent_again_and_runs_once(
    opencode: FakeOpenCode,
    tmp_path: Path,
    port: int,
    monkeypatch: pytest.MonkeyPatch,
    binding: str,
) -> None:
    monkeypatch.setenv("A2A_CLIENT_SUPPORTED_TRANSPORTS", binding)
    async with Proxy(f"http://127.0.0.1:{port}") as proxy:
        settings = settings_for(opencode, tmp_path, A2A_PUBLIC_URL=proxy.url)
        async with serving(settings, port=port):
            proxy.losing[b"POST"] = 2
            result = await call(proxy.url)

    assert proxy.losing[b"POST"] == 0
    assert result == DONE
    assert len(opencode.prompts) == 1


@pytest.mark.parametrize("binding", ["JSONRPC", "HTTP+JSON"])
async def test_a_restart_of_the_only_replica_is_not_seen_in_the_output(
    opencode: FakeOpenCode,
    tmp_path: Path,
    port: int,
    monkeypatch: pytest.MonkeyPatch,
    binding: str,
) -> None:
    monkeypatch.setenv("A2A_CLIENT_SUPPORTED_TRANSPORTS", binding)
    settings = settings_for(
        opencode,
        tmp_path,
        A2A_TASK_STORE_BACKEND="database",
        A2A_PUBLIC_URL=f"http://127.0.0.1:{port}",
    )
    hold = opencode.hold(count=2)
    async with asyncio.TaskGroup() as group:
        async with serving(settings, port=port) as service:
            calling = group.create_task(call(service.url))
            async with asyncio.timeout(60):
                await hold.reached.wait()
        async with serving(settings, port=port):
            opencode.release()
            result = await calling

    assert result == DONE
    assert len(opencode.prompts) == 1


@pytest.mark.postgresql_only
@pytest.mark.parametrize("binding", ["JSONRPC", "HTTP+JSON"])
async def test_a_database_that_is_away_in_a_turn_is_not_seen_in_the_output(
    opencode: FakeOpenCode,
    tmp_path: Path,
    port: int,
    monkeypatch: pytest.MonkeyPatch,
    binding: str,
) -> None:
    monkeypatch.setenv("A2A_CLIENT_SUPPORTED_TRANSPORTS", binding)
    settings = settings_for(
        opencode,
        tmp_path,
        A2A_TASK_STORE_BACKEND="database",
        A2A_PUBLIC_URL=f"http://127.0.0.1:{port}",
    )
    hold, server = opencode.hold(count=2), stores.server()
    async with serving(settings, port=port) as service, asyncio.TaskGroup() as group:
        calling = group.create_task(call(service.url))
        async with asyncio.timeout(60):
            await hold.reached.wait()
        await asyncio.to_thread(server.kill)
        try:
            opencode.release()  # the turn ends while there is no database
            early = await asyncio.wait([calling], timeout=DATABASE_AWAY_SECONDS)
        finally:
            await asyncio.to_thread(server.start)
        result = await calling

    assert not early[0]
    assert result == DONE
    assert len(opencode.prompts) == 1
