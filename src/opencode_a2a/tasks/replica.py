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
from collections.abc import Callable, Collection, Coroutine, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, suppress
from itertools import chain

import structlog

from opencode_a2a import metrics
from opencode_a2a.errors import StoreUnavailableError
from opencode_a2a.store import replicas
from opencode_a2a.store.database import Database, DatabaseError
from opencode_a2a.store.replicas import ReplicaRow, UpstreamRow
from opencode_a2a.tasks.log import LogWriter
from opencode_a2a.tasks.open import OpenTasks
from opencode_a2a.tasks.readers import DurableReader
from opencode_a2a.tasks.recovery import recover
from opencode_a2a.tasks.state import OPEN
from opencode_a2a.turns.fleet import Fleet, Member

logger = structlog.get_logger(__name__)

APART = (
    "{} is in use by the replica {}, and each would start an OpenCode of its own under one name; "
    'name it in OPENCODE_UPSTREAMS, like [{{"name": "local", "managed": 1}}], or set '
    "A2A_TASK_STORE_DATABASE_URL to another database"
)
RETRY_SECONDS = 0.5
AWAY_SECONDS = 5.0
"""How long an OpenCode may be silent before others are told that it is away."""
UNREACHED_SECONDS = 10.0
"""The same before another replica is to try."""
SHY_SECONDS = (10.0, 120.0)
"""How long one that could not be reached is left to others, at first and at the most."""
Beside = Callable[[Coroutine[None, None, None], str], AbstractAsyncContextManager[None]]
"""Runs something for as long as the context lasts."""


class Ownership:
    def __init__(
        self,
        database: Database,
        writer: LogWriter,
        fleet: Fleet,
        tasks: OpenTasks,
        readers: Sequence[DurableReader],
        beside: Beside,
    ) -> None:
        self._database = database
        self._writer = writer
        self._fleet = fleet
        self._tasks = tasks
        self._readers = readers
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
        self._began: dict[str, float] = {}
        """When that was."""
        self._published: dict[str, tuple[str, int]] = {}
        """State and number of open tasks of each that this replica runs, as others know them."""
        self._shy: dict[str, tuple[float, float]] = {}
        """Until when those are left to others that could not be reached from here; and for how
        long it was."""
        self._free_since: dict[str, float] = {}
        self._wake = asyncio.Event()

    async def start(self) -> None:
        """Take what is free; without other replicas that is everything."""
        me = self._database.replica
        if me is None:
            await self._begin(dict.fromkeys(self._fleet.members, False))
            return
        own = [one.name for one in self._fleet.members.values() if one.upstream.managed]
        await self._check_apart(me, frozenset(name for name in own if "@" not in name))
        listed = [
            UpstreamRow(one.name, None, "away", one.drain, tuple(one.directories), one.max_turns)
            for one in self._fleet.members.values()
        ]
        await self._database.write(
            lambda connection: replicas.enroll(connection, me, listed, list(OPEN))
        )
        await self._watch(me)
        self._database.notify("u")

    async def _check_apart(self, me: int, names: Collection[str]) -> None:
        """Refuse to start beside a replica that has an OpenCode of the same name.

        Ours was started here, so they are two, and neither has the other's sessions. A
        predecessor that was killed has to be silent for a lease first.
        """
        silent, until = dict[int, float](), time.monotonic() + self._lease
        while names and time.monotonic() < until:
            live = await self._database.read(replicas.live)
            others = [one for one in live if one.no != me and one.lists.intersection(names)]
            if not others:
                return
            for one in others:
                if one.silent < silent.get(one.no, 0.0):
                    raise DatabaseError(APART.format(self._database.name, one.name), status=2)
            silent = {one.no: one.silent for one in others}
            await asyncio.sleep(self._lease / 32)

    async def run(self) -> None:
        """Look every now and then who is gone, and what is free."""
        me = self._database.replica
        if me is None:
            return
        self._database.listeners.append(self._on_notification)
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(self._lease / 8):
                    await self._wake.wait()
            self._wake.clear()
            with suppress(StoreUnavailableError):  # which has been logged
                await self._watch(me)

    async def guard(self) -> None:
        """End the streams of a replica that is cut off from the database.

        Nothing is shown any more, and others may go on with what it ran. Without others the
        streams wait.
        """
        while self._database.replica is not None:
            await asyncio.sleep(max(0.05, self._database.lease_until - time.monotonic()))
            if not self._database.holds_lease and self._database.has_other_replicas:
                logger.warning("cut off from the database; streams are ended")
                self._tasks.end_reading()
                await self._database.wait_for_lease()

    def _on_notification(self, text: str) -> None:
        if text in ("", "u"):
            self._wake.set()

    async def close_errands(self) -> None:
        """Stop following what runs without a task; what is asked stays open."""
        for member in self._fleet.members.values():
            await member.errands.close()

    async def hand_over(self) -> None:
        """Let other replicas go on, now that everything is stored and nothing runs here."""
        me = self._database.replica
        # Of what is only being taken, something may be lost.
        mine = [member.name for member in self._fleet.members.values() if member.owned]
        if me is not None:
            await self._database.write(lambda c: replicas.hand_over_listed(c, me, mine))
            self._database.notify("u")

    async def close(self) -> None:
        """Stop following the OpenCodes."""
        for term in self._terms.values():
            await term.aclose()

    async def _watch(self, me: int) -> None:
        live, rows = await self._database.read(
            lambda connection: (replicas.live(connection), replicas.upstreams(connection))
        )
        if all(one.no != me for one in live):
            return  # it was declared gone; the next beat says so, and ends this process
        now = time.monotonic()
        if now - self._seen > self._lease / 2:
            self._judges_at = now + self._lease
        self._seen = now
        silent = [one for one in live if one.silent > self._lease and one.no != me]
        if silent and now >= self._judges_at:
            gone = await self._declare_gone(silent)
            live = [one for one in live if one.no not in gone]
            rows = [row._replace(free=row.free or row.owner in gone) for row in rows]
        self.live, self.upstreams = live, rows
        metrics.REPLICAS.set(len(live))
        self._database.has_other_replicas = any(one.no != me for one in live)
        members = self._fleet.members
        self._fleet.others = {
            row.name: row
            for row in rows
            if row.state != "lost" and not (row.name in members and members[row.name].owned)
        }
        self._fleet.alone = len(members) == 1 and not self._fleet.others.keys() - members.keys()
        await self._publish(me)
        listing = Counter(chain.from_iterable(one.lists for one in live))
        shares = {
            one.no: math.ceil(sum(1 / listing[name] for name in one.lists) - 1e-9) for one in live
        }
        owned = Counter(row.owner for row in rows if not row.free)
        for name in self._unwanted(me, live, shares, owned):
            await self._give_up(me, members[name])
        wanted = self._wanted(rows, listing, shares[me] - owned[me])
        if wanted:
            taken = await self._database.write(lambda c: replicas.take(c, me, wanted))
            if taken:
                before = {row.name: row.owner for row in rows}
                for name, handed_over in taken.items():
                    cause = "new" if before.get(name) == replicas.UNKNOWN else "gone"
                    metrics.TAKEOVERS.labels("handed over" if handed_over else cause).inc()
                away = {row.name: row.away or 0.0 for row in rows}
                with metrics.TAKEOVER_SECONDS.time():
                    await self._begin(taken, away)
                self._database.notify("u")
        lost = [
            row.name
            for row in rows
            if row.free and row.state != "lost" and not listing[row.name]
            if row.away is not None and row.away >= self._fleet.lost_seconds > 0
        ]
        if lost:
            await self._lose(me, lost)

    @property
    def any_up(self) -> bool:
        """Whether a live replica runs an OpenCode that is there, as they were seen last."""
        numbers = {one.no for one in self.live}
        return any(row.state == "up" and row.owner in numbers for row in self.upstreams)

    async def _declare_gone(self, silent: Sequence[ReplicaRow]) -> list[int]:
        numbers, lease = [one.no for one in silent], self._lease
        gone = await self._database.write(lambda c: replicas.declare_gone(c, numbers, lease))
        names = [one.name for one in silent if one.no in gone]
        if names:
            logger.warning("replicas are silent and count as gone", replicas=names)
        return gone

    async def _publish(self, me: int) -> None:
        """Let others know how the OpenCodes of this replica are."""
        now, seen = asyncio.get_running_loop().time(), dict[str, tuple[str, int]]()
        for member in self._fleet.members.values():
            if not member.owned:
                continue
            state = self._published.get(member.name, ("away", 0))[0]
            if member.up or member.lost:
                state = member.state
            elif member.away_since is not None and now - member.away_since >= AWAY_SECONDS:
                state = "away"
            seen[member.name] = state, self._fleet.tasks[member.name]
        changed = {name: one for name, one in seen.items() if self._published.get(name) != one}
        if changed:
            await self._database.write(lambda c: replicas.publish(c, me, changed))
        self._published = seen

    def _unwanted(
        self,
        me: int,
        live: Sequence[ReplicaRow],
        shares: Mapping[int, int],
        owned: Mapping[int | None, int],
    ) -> list[str]:
        """Return what another replica should run: it may reach it, or has less than its share."""
        found, now = list[str](), asyncio.get_running_loop().time()
        others = [one for one in live if one.no != me]
        for member in self._fleet.members.values():
            listing = [one for one in others if member.name in one.lists]
            if not (member.owned and listing):
                continue
            if member.up:
                self._shy.pop(member.name, None)
            elif member.away_since is not None:
                since = max(member.away_since, self._began[member.name])
                if not member.lost and now - since >= UNREACHED_SECONDS:
                    seconds = self._shy.get(member.name, (0.0, SHY_SECONDS[0] / 2))[1]
                    seconds = min(2 * seconds, SHY_SECONDS[1])
                    self._shy[member.name] = time.monotonic() + seconds, seconds
                    found.append(member.name)
                continue
            # One at a time: its new owner counts it then.
            waiting = any(owned[one.no] < shares[one.no] for one in listing)
            if not found and waiting and owned[me] > shares[me] and self._idle(member):
                found.append(member.name)
        return found

    def _idle(self, member: Member) -> bool:
        return not self._fleet.tasks[member.name] and not member.errands.any()

    def _wanted(
        self, rows: Sequence[UpstreamRow], listing: Mapping[str, int], room: int
    ) -> list[str]:
        """Return what is free and belongs to this replica's fair share, or is left by all."""
        now = time.monotonic()
        free = [row.name for row in rows if row.free and row.name in self._fleet.members]
        self._free_since = {name: self._free_since.get(name, now) for name in free}
        ready = [
            name for name in free if listing[name] < 2 or self._shy.get(name, (0.0,))[0] <= now
        ]
        # What nobody else can run comes first.
        ready.sort(key=lambda name: (listing[name], name))
        left = [name for name in ready if now - self._free_since[name] >= self._lease / 2]
        return [*dict.fromkeys([*ready[: max(0, room)], *left])]

    async def _begin(
        self, taken: Mapping[str, bool], away: Mapping[str, float] | None = None
    ) -> None:
        """Run what was taken, and go on with what ran there; True says it was handed over."""
        members = [self._fleet.members[name] for name in taken]
        for member in members:
            self._fleet.others.pop(member.name, None)
            term = self._terms[member.name] = AsyncExitStack()
            await term.enter_async_context(self._beside(member.turns.feed.run(), "feed"))
        count = await self._recover(taken, members)
        if count:
            logger.warning("tasks taken up after a restart", count=count)
        now, longest = asyncio.get_running_loop().time(), self._fleet.lost_seconds
        for member in members:
            self._began[member.name] = now
            if away and away[member.name]:
                # Its owners before could not reach it either; but this one has to try.
                before = min(away[member.name], longest - 2 * UNREACHED_SECONDS)
                member.away_since = now - max(0.0, before)
            member.owned = True

    async def _recover(self, taken: Mapping[str, bool], members: Sequence[Member]) -> int:
        only = None if self._database.replica is None else taken
        while True:
            try:
                count = await recover(self._database, self._writer, self._tasks, self._fleet, only)
                logs = {task.log.no: task.log for task in self._tasks.all()}
                for reader in self._readers:
                    await reader.recover(logs, only)
                await self._fleet.recover_errands(members)
                return count
            except StoreUnavailableError:  # what was taken up before that is not taken up again
                await asyncio.sleep(RETRY_SECONDS)

    async def _give_up(self, me: int, member: Member) -> None:
        """Leave an OpenCode to another replica, with everything stored and nothing running here."""
        logger.warning("OpenCode is left to another replica", upstream=member.name)
        member.owned = False
        await member.errands.close()
        await self._tasks.give_up(member)
        for reader in self._readers:
            await reader.give_up(member.name)
        await self._terms.pop(member.name).aclose()
        member.renew()
        self._published.pop(member.name, None)
        await self._database.write_until_stored(lambda c: replicas.hand_over(c, me, [member.name]))
        self._database.notify("u")

    async def _lose(self, me: int, names: Sequence[str]) -> None:
        """End what is left of OpenCodes that nobody will run any more."""
        taken = await self._database.write(lambda c: replicas.lose(c, me, names))
        if not taken:
            return  # another replica does it
        logger.error("OpenCodes are lost", upstreams=list(taken))
        await self._recover(taken, [])
        await self._writer.commit()
        await self._database.write_until_stored(lambda c: replicas.hand_over(c, me, list(taken)))
