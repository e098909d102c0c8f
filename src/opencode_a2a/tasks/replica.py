"""Which OpenCodes this process runs, where several processes share a database.

An OpenCode is run by one replica at a time, its owner, which alone admits its tasks and writes
their logs. ``Ownership`` takes those that have no live owner, and recovers what runs there.
``store.replicas`` has the rows, and ``store.postgres`` makes sure that whoever was declared gone
writes nothing. With SQLite there is one process, which runs all of them from start to end.
"""

import asyncio
import math
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, suppress
from itertools import chain

import structlog

from opencode_a2a import metrics
from opencode_a2a.config import UpstreamEntry
from opencode_a2a.errors import StoreUnavailableError
from opencode_a2a.store import replicas
from opencode_a2a.store.database import Database
from opencode_a2a.store.replicas import ReplicaRow, UpstreamRow
from opencode_a2a.tasks.log import LogWriter
from opencode_a2a.tasks.outbox import Outbox
from opencode_a2a.tasks.recovery import recover
from opencode_a2a.tasks.service import TaskService
from opencode_a2a.turns.fleet import Fleet

logger = structlog.get_logger(__name__)

RETRY_SECONDS = 0.5
Beside = Callable[[Coroutine[None, None, None], str], AbstractAsyncContextManager[None]]
"""Runs something for as long as the context lasts."""


class Ownership:
    def __init__(
        self,
        database: Database,
        writer: LogWriter,
        fleet: Fleet,
        tasks: TaskService,
        outbox: Outbox,
        beside: Beside,
    ) -> None:
        self._database = database
        self._writer = writer
        self._fleet = fleet
        self._tasks = tasks
        self._outbox = outbox
        self._beside = beside
        self._lease = database.lease_seconds
        self._seen = time.monotonic()
        """When the database was last seen, by this process's clock."""
        self._judges_at = self._seen + self._lease
        """When silence of others begins to count. What their rows say may be old only because
        nobody could reach the database, or this replica could not."""
        self._terms: dict[str, AsyncExitStack] = {}
        """What runs for each OpenCode for as long as this replica is its owner."""
        self.live: Sequence[ReplicaRow] = ()
        """All that use the database, as they were seen last; none with SQLite."""
        self.upstreams: Sequence[UpstreamRow] = ()
        """All that these run, or could run."""

    async def start(self, entries: Iterable[UpstreamEntry]) -> None:
        """Take what is free; without other replicas that is everything."""
        me = self._database.replica
        if me is None:
            await self._begin(dict.fromkeys(self._fleet.members, False))
            return
        listed = [
            UpstreamRow(
                entry.name,
                None,
                "away",
                entry.drain,
                tuple(map(str, entry.directories)),
                entry.max_turns,
            )
            for entry in entries
        ]
        await self._database.write(lambda connection: replicas.enroll(connection, me, listed))
        await self._watch(me)

    async def run(self) -> None:
        """Look every now and then who is gone, and what is free."""
        me = self._database.replica
        while me is not None:
            await asyncio.sleep(self._lease / 8)
            with suppress(StoreUnavailableError):  # which has been logged
                await self._watch(me)

    async def close(self) -> None:
        """Stop following the OpenCodes."""
        for term in self._terms.values():
            await term.aclose()

    async def _watch(self, me: int) -> None:
        live, rows = await self._database.read(
            lambda connection: (replicas.live(connection), replicas.upstreams(connection))
        )
        now = time.monotonic()
        if now - self._seen > self._lease / 2:
            self._judges_at = now + self._lease
        self._seen = now
        silent = {one.no for one in live if one.silent > self._lease and one.no != me}
        if silent and now >= self._judges_at:
            found, lease = frozenset(silent), self._lease
            gone = await self._database.write(
                lambda connection: replicas.declare_gone(connection, found, lease)
            )
            names = [one.name for one in live if one.no in gone]
            logger.warning("replicas are silent and count as gone", replicas=names)
            live = [one for one in live if one.no not in gone]
        self.live, self.upstreams = live, rows
        metrics.REPLICAS.set(len(live))
        self._database.several = any(one.no != me for one in live)
        members = self._fleet.members
        self._fleet.others = {
            row.name: row for row in rows if row.name not in members and row.state != "lost"
        }
        self._fleet.alone = len(members) == 1 and not self._fleet.others
        wanted = self._wanted(me, live, rows)
        if wanted:
            taken = await self._database.write(
                lambda connection: replicas.take(connection, me, wanted)
            )
            if taken:
                before = {row.name: row.owner for row in rows}
                for name, handed_over in taken.items():
                    cause = "new" if before.get(name) == replicas.UNKNOWN else "gone"
                    metrics.TAKEOVERS.labels("handed over" if handed_over else cause).inc()
                with metrics.TAKEOVER_SECONDS.time():
                    await self._begin(taken)

    @property
    def any_up(self) -> bool:
        """Whether a live replica runs an OpenCode that is there, as they were seen last."""
        numbers = {one.no for one in self.live}
        return any(row.state == "up" and row.owner in numbers for row in self.upstreams)

    def _wanted(
        self, me: int, live: Sequence[ReplicaRow], rows: Sequence[UpstreamRow]
    ) -> list[str]:
        """Return what is free and would be this replica's fair share."""
        numbers = {one.no for one in live}
        listing = Counter(chain.from_iterable(one.lists for one in live))
        listing.update({name: 1 for name in self._fleet.members if not listing[name]})
        share = math.ceil(sum(1 / listing[name] for name in self._fleet.members) - 1e-9)
        room = share - sum(row.owner == me for row in rows)
        free = [
            row.name for row in rows if row.name in self._fleet.members and row.owner not in numbers
        ]
        # What nobody else can run comes first.
        return sorted(free, key=lambda name: (listing[name], name))[: max(0, room)]

    async def _begin(self, taken: Mapping[str, bool]) -> None:
        """Run what was taken, and go on with what ran there; True says it was handed over."""
        members = [self._fleet.members[name] for name in taken]
        for member in members:
            term = self._terms[member.name] = AsyncExitStack()
            await term.enter_async_context(self._beside(member.turns.feed.run(), "feed"))
        only = None if self._database.replica is None else taken
        while True:
            try:
                count = await recover(self._database, self._writer, self._tasks, self._fleet, only)
                if self._outbox.settings.enabled:
                    logs = {task.log.no: task.log for task in self._tasks.open_tasks()}
                    await self._outbox.recover(logs, only)
                await self._fleet.recover_errands(members)
                break
            except StoreUnavailableError:  # what was taken up before that is not taken up again
                await asyncio.sleep(RETRY_SECONDS)
        if count:
            logger.warning("tasks taken up after a restart", count=count)
        for member in members:
            member.mine = True
