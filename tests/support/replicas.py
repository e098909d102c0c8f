"""Several replicas of the service in one test process, on one PostgreSQL, before shared OpenCodes.

Each runs in a thread with an event loop of its own, so that one can be killed or frozen while the
others go on: its loop stops, and with it everything but connections that are open. Tests that need
real processes start a ``Program`` with the variables of ``Cluster.variables``.
"""

import asyncio
import socket
import threading
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import httpx2
import orjson
import psycopg

from opencode_a2a.app import Service
from opencode_a2a.config import Settings, load
from opencode_a2a.events import Json
from tests.support import stores
from tests.support.opencode import FakeOpenCode
from tests.support.ports import free_port
from tests.support.service import TOKEN, variables_for

LEASE_SECONDS = 2.0
"""Shorter than the settings allow, and long enough for a busy machine."""
PATIENCE = 60.0


class _Service(Service):
    """A service whose failure ends itself, and not the process of the tests."""

    def end(self, part: str, error: BaseException) -> None:
        self.failed = True
        self.why += f"{part}: {error}\n"
        self.server.should_exit = True

    why = ""


class RunningReplica:
    """One replica; its HTTP client belongs to the loop of the test."""

    def __init__(self, name: str, settings: Settings) -> None:
        self.name = name
        self.settings = settings
        self.url = f"http://127.0.0.1:{settings.a2a.port}"
        self.http = httpx2.AsyncClient(
            base_url=self.url,
            headers={"Authorization": f"Bearer {TOKEN}"},
            timeout=PATIENCE,
            trust_env=False,
        )
        self.service = _Service(settings)
        self._server = self.service.server
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name=f"replica {name}", daemon=True)
        self._going = threading.Event()
        """Cleared while the loop stands still."""
        self._still = threading.Event()
        self._ended = threading.Event()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        serving = self._loop.create_task(self._serve())
        serving.add_done_callback(lambda _: self._loop.stop())
        while not serving.done():
            self._going.set()
            self._loop.run_forever()
            if not serving.done():
                self._going.clear()
                self._still.set()
                self._going.wait()
                self._still.clear()
        while left := asyncio.all_tasks(self._loop):  # one that ends may begin another
            for task in left:
                task.cancel()
            self._loop.run_until_complete(asyncio.gather(*left, return_exceptions=True))
        self._loop.close()
        self._ended.set()

    async def _serve(self) -> None:
        with socket.create_server(("127.0.0.1", self.settings.a2a.port)) as listener:
            async with self.service.running():
                await self._server.accept([listener])

    async def start(self) -> None:
        self._thread.start()
        await until(lambda: self._server.started or self._ended.is_set())
        assert not self._ended.is_set(), "the replica did not start; its log says why"

    async def stop(self) -> None:
        """End it as SIGTERM would."""
        self._server.should_exit = True
        await self.ended()

    async def ended(self) -> None:
        """Wait until it has ended by itself."""
        async with asyncio.timeout(PATIENCE):
            await asyncio.to_thread(self._ended.wait)

    async def freeze(self) -> None:
        """Let it do nothing any more, until it is thawed."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        await asyncio.to_thread(self._still.wait)

    def thaw(self) -> None:
        self._going.set()

    async def kill(self) -> None:
        """End it as a crash would: its connections break, and nothing is handed over."""

        def cut() -> None:
            for one in self._server.servers:
                one.close()
            for connection in [*self._server.server_state.connections]:
                with suppress(OSError):
                    connection.transport.get_extra_info("socket").shutdown(socket.SHUT_RDWR)
            self._loop.stop()

        self._loop.call_soon_threadsafe(cut)
        await asyncio.to_thread(self._still.wait)

    async def close(self) -> None:
        """End whatever is left of it."""
        await self.http.aclose()
        self._server.should_exit = True
        self.thaw()
        await self.ended()


class Cluster:
    """Replicas on one database, all of which can run all OpenCodes: ``one``, ``two`` and so on."""

    NAMES = ("one", "two", "three", "four")

    def __init__(self, opencodes: Sequence[FakeOpenCode], state: Path) -> None:
        self.opencodes: dict[str, FakeOpenCode] = dict(zip(self.NAMES, opencodes, strict=False))
        self.state = state
        self.replicas: dict[str, RunningReplica] = {}
        """The latest of each name."""
        self.started: list[RunningReplica] = []

    def variables(self, name: str, **changes: str) -> dict[str, str]:
        """Return the environment of a replica, in this process or in one of its own."""
        state = self.state / name
        state.mkdir(parents=True, exist_ok=True)
        entries: list[Json] = [
            {"name": upstream, "url": opencode.url, "shared": True}
            for upstream, opencode in self.opencodes.items()
        ]
        return variables_for(
            next(iter(self.opencodes.values())),
            state,
            **{
                "A2A_TASK_STORE_DATABASE_URL": stores.url(self.state),
                "A2A_REPLICA_NAME": name,
                "OPENCODE_UPSTREAMS": orjson.dumps(entries).decode(),
                **changes,
            },
        )

    async def start(
        self, name: str, *, lease: float = LEASE_SECONDS, **changes: str
    ) -> RunningReplica:
        """Start a replica and wait until it answers."""
        port = free_port()
        settings = load({}, self.variables(name, A2A_PORT=str(port), **changes))
        own = settings.replica.model_copy(update={"lease_seconds": lease})
        replica = RunningReplica(name, settings.model_copy(update={"replica": own}))
        self.replicas[name] = replica
        self.started.append(replica)
        await replica.start()
        return replica

    def owners(self) -> dict[str, str | None]:
        """Return the name of the replica that runs each upstream; None if no live one does."""
        query = (
            "SELECT u.name, r.name FROM upstreams u"
            " LEFT JOIN replicas r ON r.no = u.owner AND r.gone IS NULL ORDER BY 1"
        )
        with psycopg.connect(stores.url(self.state)) as connection:
            return dict(connection.execute(query).fetchall())

    async def runs(
        self, upstream: str = "one", *, but: RunningReplica | None = None
    ) -> RunningReplica:
        """Wait until a replica runs an OpenCode and hears it; return which."""

        def found() -> RunningReplica | None:
            for replica in self.replicas.values():
                fleet = replica.service.fleet
                if fleet is None or replica is but:
                    continue
                member = fleet.members.get(upstream)
                if member is not None and member.owned and member.up:
                    return replica
            return None

        await until(lambda: found() is not None)
        replica = found()
        assert replica is not None
        return replica


@asynccontextmanager
async def cluster(
    opencodes: Sequence[FakeOpenCode],
    state: Path,
    *names: str,
    lease: float = LEASE_SECONDS,
    **changes: str,
) -> AsyncGenerator[Cluster]:
    """Run replicas of these names, started one after the other."""
    made = Cluster(opencodes, state)
    try:
        for name in names:
            await made.start(name, lease=lease, **changes)
        yield made
    finally:
        for replica in made.started:
            await replica.close()


async def until(condition: Callable[[], bool]) -> None:
    """Wait for something that another thread or process does."""
    async with asyncio.timeout(PATIENCE):
        while not condition():  # noqa: ASYNC110 - there is no event
            await asyncio.sleep(0.02)
