"""What stands behind the service in live tests: a real OpenCode and the scripted model.

Both run in one thread with a loop of its own, started once for the test run, so that tests of
any loop can use them through their URLs.
"""

import asyncio
import os
import signal
import threading
from collections.abc import AsyncGenerator, Callable, Coroutine
from concurrent.futures import Future
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any, Self, TypeVar

from opencode_a2a.config import OpenCodeSettings
from opencode_a2a.errors import UpstreamError
from opencode_a2a.events import JsonObject
from opencode_a2a.opencode.connect import OpenCodeConnection
from opencode_a2a.opencode.driver import Driver
from opencode_a2a.opencode.managed import USERNAME, ManagedOpenCode
from opencode_a2a_demo.chat import MODEL
from opencode_a2a_demo.script import enclose
from opencode_a2a_demo.server import PRICES, PROVIDER, DemoModel, opencode_config

T = TypeVar("T")

_running: list["Backstage"] = []


def script(*actions: Any) -> str:
    """Return a prompt that makes the model do exactly this."""
    return enclose(list(actions))


class Backstage:
    """A running OpenCode with its model; ``with`` starts and stops both."""

    def __init__(self, command: str, state: Path, workspace: Path, config: JsonObject) -> None:
        self._command = command
        self._state = state
        self._config = config
        self.workspace = workspace
        self.model = DemoModel()
        self.opencode = ManagedOpenCode(OpenCodeSettings(), {})
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="backstage")

    @property
    def url(self) -> str:
        return self.opencode.url

    @property
    def password(self) -> str:
        return self.opencode.password

    def __enter__(self) -> Self:
        self._thread.start()
        try:
            self.run(self._start())
        except BaseException:
            self._end()
            raise
        _running.append(self)
        return self

    def __exit__(self, *_: object) -> None:
        if self not in _running:  # ``stop_all`` was here first
            return
        _running.remove(self)
        try:
            self.run(self._stop())
        finally:
            self._end()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run something in the thread and wait for it; never from the thread's own loop."""
        return self._submit(work).result(120)

    async def call(self, work: Coroutine[Any, Any, T]) -> T:
        """The same for a test's loop, which goes on meanwhile."""
        return await asyncio.wrap_future(self._submit(work))

    async def reached(self, gate: str) -> None:
        """Wait until a reply of the model stands at a gate."""
        async with asyncio.timeout(60):
            await self.call(self._reached(gate))

    async def open(self, gate: str) -> None:
        """Let the replies at a gate go on."""
        await self.call(self._on_loop(self.model.gate(gate).opened.set))

    async def kill(self, how: signal.Signals = signal.SIGKILL) -> int:
        """Kill OpenCode as a crash would, and return its pid; its keeper starts it again."""
        pid = self.opencode.pid
        assert pid is not None
        os.kill(pid, how)
        return pid

    async def _reached(self, gate: str) -> None:
        await self.model.gate(gate).reached.wait()

    async def _on_loop(self, do: Callable[[], None]) -> None:
        do()

    def _submit(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    async def _start(self) -> None:
        await self.model.__aenter__()
        config: dict[str, Any] = {**opencode_config(self.model.url, PRICES), **self._config}
        models = config["provider"][PROVIDER]["models"]
        models.setdefault(config["model"].partition("/")[2], models[MODEL])  # by another name
        self.opencode = ManagedOpenCode(
            OpenCodeSettings(command=self._command, startup_timeout=90),
            os.environ,
            config=config,
            state=self._state,
            directory=self.workspace,
        )
        await self.opencode.__aenter__()

    async def _stop(self) -> None:
        await self.opencode.__aexit__()
        await self.model.__aexit__(None, None, None)

    def _end(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


def stop_all() -> None:
    """Stop what runs, where nobody needs it any more."""
    for backstage in [*_running]:
        backstage.__exit__()


def on_disk(workspace: Path) -> dict[str, bytes]:
    """Return the files of the workspace, without what git keeps of them."""
    files = (path for path in workspace.rglob("*") if path.is_file())
    return {
        str(path.relative_to(workspace)): path.read_bytes()
        for path in files
        if ".git" not in path.parts
    }


@asynccontextmanager
async def past_service(url: str, password: str | None) -> AsyncGenerator[Driver]:
    """OpenCode's own API, as whoever knows its password can reach it."""
    async with OpenCodeConnection(url, username=USERNAME, password=password) as there:
        await there.choose()
        yield there.driver


async def until_restarted(managed: ManagedOpenCode, killed: int) -> None:
    """Wait until OpenCode answers again as another process than the one that was killed."""
    # It never answers on a connection that it accepted while it was starting.
    async with OpenCodeConnection(managed.url, password=managed.password, timeout=1) as opencode:
        while True:
            with suppress(UpstreamError):
                found = await opencode.choose(seconds=1)
                if found.usable and managed.pid not in (None, killed):
                    return
            await asyncio.sleep(0.05)
