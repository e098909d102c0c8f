"""Decide which OpenCodes this replica runs, where several replicas share a database.

An OpenCode is run by one replica at a time, its owner. Only the owner sends anything to it, admits
its tasks and writes their logs. The table ``upstreams`` names the owners (``store.replicas``), and
``store.postgres`` makes sure that a replica that was declared gone writes nothing more. With SQLite
there is one process, which owns every OpenCode from start to end.

A replica listens to every OpenCode in its settings from start to end, whoever owns it, so that it
can continue a text in the middle (``opencode.heard``).

The life of an ownership, at a replica that lists the OpenCode in its settings:

1. The OpenCode is free: it is new, was handed over, or its owner is gone. ``start``, and later
   ``run`` every eighth of a lease, look at the database (``look_and_act``). An owner that has been
   silent for a lease is declared gone, and one that was killed, as soon as its short lease is over
   (``count_commits``, ``_declare_gone``).
2. This replica becomes its owner in one transaction (``_become_owner``), if the OpenCode belongs
   to its fair share or nobody else wants it.
3. It begins to run the OpenCode (``_begin``): it continues the open tasks, their webhooks and
   errands. From then on ``Member.owned`` is True.
4. While it owns the OpenCode, it publishes its state and the number of its open tasks for other
   replicas (``_publish``).
5. The ownership ends: ``_give_up`` leaves a single OpenCode to another replica that can reach it or
   has too few; ``hand_over`` leaves those that another live replica lists when the service stops.
   Both store everything first, so nothing that was shown is lost. A replica that dies leaves them
   as they are.

An OpenCode that no live replica lists is abandoned after a while: any replica becomes its owner
until it has ended its tasks (``_end_abandoned``). The table calls it ``lost``, as it
does one that its owner cannot reach (``Member.lost``).
"""

import asyncio
import time
from collections.abc import Callable, Collection, Coroutine, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, suppress
from dataclasses import dataclass, field
from typing import Protocol

import structlog

from opencode_a2a import metrics
from opencode_a2a.bounds import wait
from opencode_a2a.cluster.fleet import Fleet, Member
from opencode_a2a.errors import StoreUnavailableError
from opencode_a2a.store import replicas
from opencode_a2a.store.database import Database
from opencode_a2a.store.engine import DatabaseError
from opencode_a2a.store.replicas import Census, LastOwner, ReplicaRow, UpstreamRow

logger = structlog.get_logger(__name__)

NAME_IN_USE = (
    "{} is in use by the replica {}, and each would start an OpenCode of its own under one name; "
    'name it in OPENCODE_UPSTREAMS, like [{{"name": "local", "managed": 1}}], or set '
    "A2A_TASK_STORE_DATABASE_URL to another database"
)
STOP_SECONDS = 5.0
"""How long to wait, when the service stops, for calls that were canceled to end."""
REPEAT_SECONDS = 0.5
"""How long a call has then to end by itself if the next owner can repeat it."""
AWAY_SECONDS = 5.0
"""How long an OpenCode is unreachable before its owner reports it as away to other replicas."""
UNREACHED_SECONDS = 10.0
"""How long an OpenCode is unreachable before its owner offers it to other replicas."""
AVOID_SECONDS = (10.0, 120.0)
"""How long a replica then leaves it to others: the first time, and at most; doubled each time."""
RunBeside = Callable[[Coroutine[None, None, None], str], AbstractAsyncContextManager[None]]
"""Runs a coroutine, under a name, for as long as the context lasts."""


class OwnedWork(Protocol):
    """What runs in an OpenCode for this service; ``tasks.recovery`` has it."""

    async def recover(self, taken: Mapping[str, LastOwner], members: Collection[Member]) -> int:
        """Continue what the last owners of OpenCodes have left; return how many tasks there were.

        Tasks of OpenCodes without a member, which no settings list, fail.
        """
        ...

    def stop_leftovers(
        self, member: Member, last_owner: LastOwner
    ) -> Sequence[Coroutine[None, None, None]]:
        """Return what stops turns that the last owner has left running and nobody wants."""
        ...

    async def leave(self, member: Member) -> None:
        """Store everything, and run nothing in an OpenCode any more."""
        ...

    def end_reading(self) -> None:
        """End the streams that are being read; clients come again."""
        ...


@dataclass(eq=False, slots=True)
class MemberOwnership:
    """One OpenCode of this replica's settings: since when it is owned, or left to others.

    Times are those of the event loop's clock.
    """

    member: Member
    running: AsyncExitStack = field(default_factory=AsyncExitStack)
    """What runs while this replica owns the OpenCode."""
    owned_since: float = 0.0
    published: tuple[str, int] | None = None
    """Its state and the number of its open tasks, as other replicas know them."""
    free_since: float | None = None
    """When this replica first saw it without a live owner; None while it has one."""
    listened: bool = False
    """Whether this replica was listening to it when it last had an owner."""
    avoided_until: float = 0.0
    """Others go first until this time, because this replica could not reach it."""
    avoided_seconds: float = 0.0
    """How long it was left to others the last time."""

    def avoid(self, now: float) -> None:
        """Let other replicas go first, for twice as long as the last time."""
        first, longest = AVOID_SECONDS
        self.avoided_seconds = min(2 * self.avoided_seconds or first, longest)
        self.avoided_until = now + self.avoided_seconds


class Ownership:
    def __init__(
        self,
        database: Database,
        fleet: Fleet,
        work: OwnedWork,
        run_beside: RunBeside,
    ) -> None:
        self._database = database
        self._fleet = fleet
        self._work = work
        self._run_beside = run_beside
        self._lease = database.lease.seconds
        self._now = asyncio.get_running_loop().time
        self._ownerships = {name: MemberOwnership(member) for name, member in fleet.members.items()}
        self._wake = asyncio.Event()
        self._listening = AsyncExitStack()
        self._owned_last: list[str] = []
        """The OpenCodes that this replica owned when the service was stopped."""
        self._looking = AsyncExitStack()
        """The loops that look at the database, and take and give up OpenCodes."""
        self._commits: dict[int, tuple[int, float]] = {}
        """The commits of each replica, and since when this one has seen no more of them."""
        self._away: dict[str, float] = {}
        """Since when this replica has seen that no live owner reaches an OpenCode, by name. Not as
        the table has it: the clock of the database is another one after a failover."""
        self._promised: bool | None = False
        """Whether others may go by the short lease of this replica; None if they may or may not
        have been told."""

    # The service starts, runs and stops

    async def start(self) -> None:
        """Listen, and take every OpenCode that is free; without other replicas these are all."""
        me = self._database.replica
        if me is not None:
            await self._check_names(me)
        for member in self._fleet.members.values():
            listening = self._run_beside(member.turns.feed.run(), "listen to an OpenCode")
            await self._listening.enter_async_context(listening)
        if me is None:
            # SQLite: of this module only _begin and the closing are used.
            await self._begin(dict.fromkeys(self._fleet.members, LastOwner.GONE))
            return
        listed = [
            UpstreamRow(one.name, None, "away", one.drain, tuple(one.directories), one.max_turns)
            for one in self._fleet.members.values()
        ]
        await self._database.write(replicas.enroll, me, listed)
        await self.look_and_act(me)
        self._database.notify("u")
        for work, name in (
            (self.run(), "own OpenCodes"),
            (self.end_streams_without_lease(), "end streams without a lease"),
            (self.count_commits(), "count the commits of replicas"),
        ):
            await self._looking.enter_async_context(self._run_beside(work, name))

    async def _check_names(self, me: int) -> None:
        """Refuse to start beside a replica that has started an OpenCode of the same name.

        They would be two, and neither has the sessions of the other. A predecessor of this
        replica that was killed looks alive until it has been silent for a lease.
        """
        started = [one.name for one in self._fleet.members.values() if one.server.managed]
        names = {name for name in started if "@" not in name}
        silent, until = dict[int, float](), self._now() + self._lease
        while names and self._now() < until:
            live = await self._database.read(replicas.live)
            others = [one for one in live if one.no != me and one.lists.intersection(names)]
            if not others:
                return
            for one in others:
                if one.silent_seconds < silent.get(one.no, 0.0):  # it has written something since
                    raise DatabaseError(NAME_IN_USE.format(self._database.name, one.name), status=2)
            silent = {one.no: one.silent_seconds for one in others}
            await asyncio.sleep(self._lease / 32)

    async def run(self) -> None:
        """Look at the database every eighth of a lease, and when another replica says so."""
        me = self._database.replica
        if me is None:
            return
        self._database.listeners.append(self._on_notification)
        while True:
            await wait(self._wake, self._lease / 8)
            self._wake.clear()
            with suppress(StoreUnavailableError):  # which has been logged
                await self.look_and_act(me)

    async def count_commits(self) -> None:
        """Note since when replicas have not committed, whatever else this one does meanwhile."""
        while self._database.replica is not None:
            with suppress(StoreUnavailableError):
                live = await self._database.read(replicas.live)
                found = {one.no: (one.commits, self._now()) for one in live}
                for no, (commits, since) in self._commits.items():
                    if no in found and found[no][0] == commits:
                        found[no] = commits, since
                self._commits = found
            await asyncio.sleep(self._lease / 8)

    def _on_notification(self, text: str) -> None:
        if text in ("", "u"):
            self._wake.set()

    async def end_streams_without_lease(self) -> None:
        """End the streams of this replica whenever it is cut off from the database.

        It may show nothing any more, and others may continue what it ran. While there are no
        others, the streams wait.
        """
        while self._database.replica is not None:
            await asyncio.sleep(max(0.05, self._database.lease.cut_off_at - time.monotonic()))
            cut_off = time.monotonic() >= self._database.lease.cut_off_at
            if cut_off and self._database.census.has_others:
                logger.warning("cut off from the database; streams ended")
                self._work.end_reading()
                await self._database.wait_for_lease()

    async def let_go(self, seconds: float) -> None:
        """Take no further calls and no OpenCode; cancel calls that take longer than this.

        What the next owner can repeat is canceled sooner if another replica can be that.
        """
        await self._looking.aclose()
        # One that is only being taken is not handed over: its last owner may have lost something.
        self._owned_last += self._fleet.owned()
        listed, members = self._listed_elsewhere(), self._fleet.members.values()
        # They are asked again once all is handed over, for which the last call is waited for.
        waits = any(member.cannot_be_repeated for member in members)
        soon = seconds if waits else min(seconds, REPEAT_SECONDS)
        ends = [one.let_go(seconds, soon if one.name in listed else seconds) for one in members]
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds + STOP_SECONDS):
                await asyncio.gather(*ends)

    async def stop_following(self) -> None:
        """Stop following work without a task; what it asks stays open."""
        for ownership in self._ownerships.values():
            await ownership.member.errands.close()
            await ownership.running.aclose()

    async def hand_over(self) -> None:
        """Hand over the OpenCodes that another live replica lists.

        The logs of their tasks are closed (``OpenTasks.close``): as soon as the table says so, the
        next owner reads what is stored.
        """
        me = self._database.replica
        if me is None:
            return
        with suppress(StoreUnavailableError):  # what was known last will do
            self._database.census = await self._census(me)
        names = self._listed_elsewhere().intersection(self._owned_last)
        await self._database.write(replicas.hand_over_and_unlist, me, names)
        self._database.notify("u")
        for name in names:  # requests that are still being answered read these tasks from the store
            await self._work.leave(self._fleet.members[name])

    def _listed_elsewhere(self) -> set[str]:
        """Return the OpenCodes that other live replicas can run."""
        return {name for one in self._database.census.others for name in one.lists}

    async def close(self) -> None:
        """Stop listening to the OpenCodes."""
        await self._listening.aclose()

    # A look at the database

    async def look_and_act(self, me: int) -> None:
        """Look who lives and who owns what, and do what follows from that."""
        census = await self._census(me)
        this_replica = census.this_replica
        if this_replica is None:
            self._database.census = census
            return  # it was declared gone; the next beat says so, and ends this process
        self._database.census = census = census.without(await self._declare_gone(census))
        metrics.REPLICAS.set(len(census.live))
        await self._promise(census)
        await self._publish(me)
        for ownership in self._to_give_up(census, this_replica):
            await self._give_up(me, ownership)
        now, lost_seconds = self._now(), self._fleet.lost_seconds
        self._away = {r.name: self._away.get(r.name, now) for r in census.upstreams if r.away}
        self._note_free(census)
        if names := self._to_own(census, this_replica):
            await self._become_owner(census, names)
        long_away = [name for name, since in self._away.items() if now - since >= lost_seconds]
        if lost_seconds > 0 and (names := census.abandoned(long_away)):
            await self._end_abandoned(me, names)
        metrics.UPSTREAMS_UNOWNED.set(self._database.census.unowned)

    async def _census(self, me: int) -> Census:
        return await self._database.read(
            lambda connection: Census(me, replicas.live(connection), replicas.upstreams(connection))
        )

    async def _declare_gone(self, census: Census) -> list[int]:
        """Declare replicas gone that have not committed for a lease; return their numbers.

        Their leases may differ from this replica's; the longer one counts. If the lock of a replica
        is free, as after a kill, the short lease that it has promised is enough.
        """
        now, lease = self._now(), self._database.lease
        # They may have been silent only because nobody, or not this replica, could reach the
        # database. So their silence counts once this replica has reached it for a lease; and that
        # their locks are free, once it has held its own for as long.
        if lease.steady_seconds < self._lease:
            return []
        silent, maybe_killed = dict[int, int](), dict[int, int]()
        for one in census.others:
            commits, since = self._commits.get(one.no, (one.commits, now))
            short = one.short_lease if lease.locked_seconds > self._lease else None
            if now - since > max(self._lease, one.lease or 0.0):
                silent[one.no] = commits
            elif short is not None and now - since > short:
                maybe_killed[one.no] = commits
        gone = list[int]()
        if silent:
            gone += await self._database.write(replicas.declare_gone, silent)
        if maybe_killed:
            gone += await self._database.write(
                replicas.declare_gone_if_unlocked, census.me, maybe_killed
            )
        if gone:
            names = {one.no: one.name for one in census.others if one.no in gone}
            logger.warning(
                "replicas declared gone",
                silent=[name for no, name in names.items() if no in silent],
                ended=[name for no, name in names.items() if no in maybe_killed],
            )
        return gone

    async def _promise(self, census: Census) -> None:
        """Promise others to keep to the short lease, or take that back.

        It has a price: while the database is unreachable, text is held back earlier. So a replica
        that is alone does not promise it; nor does one whose commits take so long that it would
        never hold that lease.
        """
        lease = self._database.lease
        promised = (
            census.has_others
            and lease.short_seconds < lease.seconds
            and lease.locked_since is not None
            and lease.commit_seconds < lease.short_seconds / 4
        )
        if promised is not self._promised:
            self._promised, lease.promised = None, True
            seconds = lease.short_seconds if promised else None
            await self._database.write(replicas.promise, census.me, seconds)
            self._promised = lease.promised = promised

    async def _publish(self, me: int) -> None:
        """Write down the state and the open tasks of the OpenCodes that this replica owns."""
        now, news = self._now(), dict[str, tuple[str, int]]()
        for name, ownership in self._ownerships.items():
            member = ownership.member
            if not member.owned:
                ownership.published = None
                continue
            state = ownership.published[0] if ownership.published else "away"
            if member.up or member.lost:
                state = member.state
            elif member.away_since is not None and now - member.away_since >= AWAY_SECONDS:
                state = "away"
            if ownership.published != (state, self._fleet.tasks[name]):
                news[name] = state, self._fleet.tasks[name]
        if news:
            await self._database.write(replicas.publish, me, news)
        for name, published in news.items():
            self._ownerships[name].published = published

    # Taking

    def _note_free(self, census: Census) -> None:
        """Note since when OpenCodes are free, and whether this replica was listening before."""
        now, free = self._now(), {row.name for row in census.upstreams if row.free}
        for name, ownership in self._ownerships.items():
            if name in free:
                ownership.free_since = ownership.free_since or now
            else:
                ownership.free_since, ownership.listened = None, ownership.member.up

    def _to_own(self, census: Census, this_replica: ReplicaRow) -> list[str]:
        """Return the free OpenCodes of this replica's fair share, and those that nobody takes.

        One with open tasks is left for a while to replicas that were listening to it: one that was
        not, such as a replica that has just been restarted, has to hold back texts that are being
        written until their end. Who was listening is not known, but an older replica, which started
        before this one, probably was.
        """
        now, free = self._now(), {row.name: row for row in census.upstreams if row.free}
        ready = [
            name
            for name, ownership in self._ownerships.items()
            if name in free
            # One that is back is not left to others: they may have given it up just now.
            and (census.listings[name] < 2 or ownership.member.up or ownership.avoided_until <= now)
        ]
        # What nobody else can run comes first.
        ready.sort(key=lambda name: (census.listings[name], name))
        share, untaken = list[str](), list[str]()
        for name in ready:
            ownership, patience = self._ownerships[name], self._lease / 2
            older = any(one.no < census.me and name in one.lists for one in census.others)
            # Sooner than replicas that would have to hold texts back.
            if free[name].open_tasks and ownership.listened:
                patience = self._lease / 8
            if ownership.listened or not (free[name].open_tasks and older):
                share.append(name)
            if now - (ownership.free_since or now) >= patience:
                untaken.append(name)
        # What nobody has taken for so long is taken beyond the fair share, too.
        return [*dict.fromkeys([*share[: max(0, census.spare(this_replica))], *untaken])]

    async def _become_owner(self, census: Census, names: Sequence[str]) -> None:
        """Become the owner of OpenCodes, unless another replica was quicker, and run them."""
        taken = await self._database.write(replicas.become_owner, census.me, names)
        if not taken:
            return
        self._database.census = census.after_taking(taken)
        for last_owner in taken.values():
            metrics.TAKEOVERS.labels(last_owner).inc()
        with metrics.TAKEOVER_SECONDS.time():
            await self._begin(taken)
        for name in taken:
            # Its earlier owners could not reach it either; but this one has to try.
            now, longest = self._now(), self._fleet.lost_seconds - UNREACHED_SECONDS
            self._fleet.members[name].away_since = min(now, max(self._away[name], now - longest))
        self._database.notify("u")

    async def _begin(self, taken: Mapping[str, LastOwner]) -> None:
        """Continue the tasks and errands of OpenCodes that this replica owns now."""
        ownerships = [self._ownerships[name] for name in taken]
        count = await self._work.recover(taken, [ownership.member for ownership in ownerships])
        if count:
            logger.warning("open tasks recovered", count=count)
        for ownership in ownerships:
            ownership.owned_since = self._now()
            ownership.member.owned = True
            last_owner = taken[ownership.member.name]
            for stopping in self._work.stop_leftovers(ownership.member, last_owner):
                beside = self._run_beside(stopping, "stop leftover turns")
                await ownership.running.enter_async_context(beside)

    # Giving up

    def _to_give_up(self, census: Census, this_replica: ReplicaRow) -> list[MemberOwnership]:
        """Return the OpenCodes that another replica may reach, or that it should run instead."""
        unwanted, now = list[MemberOwnership](), self._now()
        too_many = census.spare(this_replica) < 0
        for name, ownership in self._ownerships.items():
            member, rivals = ownership.member, [one for one in census.others if name in one.lists]
            if not (member.owned and rivals):
                continue
            if member.up:
                ownership.avoided_until = ownership.avoided_seconds = 0.0
            elif member.away_since is not None:
                tried_since = max(member.away_since, ownership.owned_since)
                # One that is about to be lost stays: each new owner has to try first, so it would
                # never be lost.
                longest = self._fleet.lost_seconds - UNREACHED_SECONDS
                ending = self._fleet.can_lose and now - member.away_since >= longest
                if not (ending or member.lost) and now - tried_since >= UNREACHED_SECONDS:
                    ownership.avoid(now)
                    unwanted.append(ownership)
                continue
            # One at a time, and only an idle one: its new owner counts it in the next look.
            idle = not (self._fleet.tasks[name] or member.errands.any() or member.held)
            if unwanted or not idle or not too_many:
                continue
            if any(census.spare(rival) > 0 for rival in rivals):
                unwanted.append(ownership)
        return unwanted

    async def _give_up(self, me: int, ownership: MemberOwnership) -> None:
        """Leave an OpenCode to another replica, with everything stored and nothing running here."""
        member = ownership.member
        logger.warning("OpenCode left to another replica", upstream=member.name)
        self._owned_last.append(member.name)  # should the service be stopped meanwhile
        await member.let_go()
        await self._work.leave(member)
        await ownership.running.aclose()
        member.renew()
        await self._database.write_until_stored(replicas.hand_over, me, [member.name])
        self._owned_last.remove(member.name)
        self._database.notify("u")

    async def _end_abandoned(self, me: int, names: Sequence[str]) -> None:
        """Fail the tasks of OpenCodes that no live replica lists any more."""
        taken = await self._database.write(replicas.take_abandoned, me, names)
        if not taken:
            return  # another replica does it
        census = self._database.census
        before = {row.name: row.state for row in census.upstreams}
        if abandoned := [name for name in taken if before[name] != "lost"]:
            logger.error("OpenCodes abandoned: no replica lists them", upstreams=abandoned)
        # Before a task is seen to fail: its conversation can be continued in another OpenCode.
        # Not read from the database, where it may fail: nobody else ends what this one has taken.
        self._database.census = census.after_taking(taken, abandoned=True)
        self._database.notify("u")
        await self._work.recover(taken, ())
        await self._database.write_until_stored(replicas.hand_over, me, taken)
