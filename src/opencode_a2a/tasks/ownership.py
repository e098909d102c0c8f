"""Decide which OpenCodes this replica runs, where several replicas share a database.

An OpenCode is run by one replica at a time, its owner. Only the owner sends anything to it, admits
its tasks and writes their logs. The table ``upstreams`` names the owners (``store.replicas``), and
``store.postgres`` makes sure that a replica that was declared gone writes nothing more. With SQLite
there is one process, which owns every OpenCode from start to end.

A replica listens to every OpenCode in its settings from start to end, whoever owns it, so that it
can go on with a text in the middle (``opencode.heard``).

The life of an ownership, at a replica that lists the OpenCode in its settings:

1. The OpenCode is free: it is new, was handed over, or its owner is gone. ``start``, and later
   ``run`` every eighth of a lease, look at the database (``look_and_act``). An owner that has been
   silent for a lease is declared gone.
2. This replica becomes its owner in one transaction (``_become_owner``), if the OpenCode belongs
   to its fair share or nobody else wants it.
3. It begins to run the OpenCode (``_begin``): it continues the open tasks, their webhooks and
   errands. From then on ``Member.owned`` is True.
4. While it owns the OpenCode, it publishes its state and the number of its open tasks for other
   replicas (``_publish``).
5. The ownership ends: ``_give_up`` leaves a single OpenCode to another replica that can reach it or
   has too few; ``hand_over`` leaves all of them when the service stops. Both store everything
   first, so nothing that was shown is lost. A replica that dies leaves them as they are.

An OpenCode that no live replica lists is abandoned after a while: any replica becomes its owner
until it has ended its tasks (``_end_abandoned``). The table calls it ``lost``, as it
does one that its owner cannot reach (``Member.lost``).
"""

import asyncio
import time
from collections.abc import Callable, Collection, Coroutine, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, suppress
from dataclasses import dataclass, field

import structlog

from opencode_a2a import metrics
from opencode_a2a.bounds import wait
from opencode_a2a.errors import StoreUnavailableError
from opencode_a2a.store import replicas, webhooks
from opencode_a2a.store.database import Database
from opencode_a2a.store.engine import DatabaseError
from opencode_a2a.store.replicas import Census, Cleanly, ReplicaRow, UpstreamRow
from opencode_a2a.tasks.log import LogWriter
from opencode_a2a.tasks.open import OpenTasks
from opencode_a2a.tasks.recovery import IsOurs, recover, stop_canceled, stop_unknown
from opencode_a2a.turns.fleet import Fleet, Member

logger = structlog.get_logger(__name__)

NAME_IN_USE = (
    "{} is in use by the replica {}, and each would start an OpenCode of its own under one name; "
    'name it in OPENCODE_UPSTREAMS, like [{{"name": "local", "managed": 1}}], or set '
    "A2A_TASK_STORE_DATABASE_URL to another database"
)
RETRY_SECONDS = 0.5
STOP_SECONDS = 5.0
"""How long to wait, when the service stops, for calls that are under way to end."""
AWAY_SECONDS = 5.0
"""How long an OpenCode is unreachable before its owner tells other replicas that it is away."""
UNREACHED_SECONDS = 10.0
"""How long an OpenCode is unreachable before its owner offers it to other replicas."""
AVOID_SECONDS = (10.0, 120.0)
"""How long a replica then leaves it to others: the first time, and at most; doubled each time."""
RunBeside = Callable[[Coroutine[None, None, None], str], AbstractAsyncContextManager[None]]
"""Runs a coroutine, under a name, for as long as the context lasts."""


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
    avoided_until: float = 0.0
    """Until then others go first: this replica could not reach it."""
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
        writer: LogWriter,
        fleet: Fleet,
        tasks: OpenTasks,
        run_beside: RunBeside,
        is_ours: IsOurs,
    ) -> None:
        """``is_ours`` tells the prompts of this service from those of others."""
        self._database = database
        self._writer = writer
        self._fleet = fleet
        self._tasks = tasks
        self._run_beside = run_beside
        self._is_ours = is_ours
        self._lease = database.lease.seconds
        self._now = asyncio.get_running_loop().time
        self._ownerships = {name: MemberOwnership(member) for name, member in fleet.members.items()}
        self._wake = asyncio.Event()
        self._owned_last: Sequence[str] = ()
        """The OpenCodes that this replica owned when it was stopped."""
        self._listening = AsyncExitStack()

    # The service starts, runs and stops

    async def start(self) -> None:
        """Listen, and take every OpenCode that is free; without other replicas these are all."""
        me = self._database.replica
        if me is not None:
            await self._check_names(me)
        for member in self._fleet.members.values():
            listening = self._run_beside(member.turns.feed.run(), "feed")
            await self._listening.enter_async_context(listening)
        if me is None:
            # SQLite: of this module only _begin, _recover and the closing are used.
            await self._begin(dict.fromkeys(self._fleet.members, False))
            return
        listed = [
            UpstreamRow(one.name, None, "away", one.drain, tuple(one.directories), one.max_turns)
            for one in self._fleet.members.values()
        ]
        await self._database.write(replicas.enroll, me, listed)
        await self.look_and_act(me)
        self._database.notify("u")

    async def _check_names(self, me: int) -> None:
        """Refuse to start beside a replica that has started an OpenCode of the same name.

        They would be two, and neither has the sessions of the other. A predecessor of this
        replica that was killed looks alive until it has been silent for a lease.
        """
        started = [one.name for one in self._fleet.members.values() if one.upstream.managed]
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

    def _on_notification(self, text: str) -> None:
        if text in ("", "u"):
            self._wake.set()

    async def end_streams_without_lease(self) -> None:
        """End the streams of this replica whenever it is cut off from the database.

        It may show nothing any more, and others may go on with what it ran. While there are no
        others, the streams wait.
        """
        while self._database.replica is not None:
            await asyncio.sleep(max(0.05, self._database.lease.until - time.monotonic()))
            if not self._database.lease.held and self._database.census.has_others:
                logger.warning("cut off from the database; streams are ended")
                self._tasks.end_reading()
                await self._database.wait_for_lease()

    async def stop(self) -> None:
        """Take no further calls, and stop following work without a task; what it asks stays open.

        Calls whose senders have gone away may still be under way; they end as in a crash.
        """
        self._owned_last = self._fleet.owned()
        for member in self._fleet.members.values():
            with suppress(TimeoutError):
                async with asyncio.timeout(STOP_SECONDS):
                    await member.let_go()
            await member.errands.close()

    async def hand_over(self) -> None:
        """Leave the OpenCodes to other replicas, with everything stored and nothing running."""
        me = self._database.replica
        # One that is only being taken is not handed over: its last owner may have lost something.
        if me is not None:
            await self._database.write(replicas.hand_over_listed, me, self._owned_last)
            self._database.notify("u")

    async def close(self) -> None:
        """Stop listening to the OpenCodes."""
        for ownership in self._ownerships.values():
            await ownership.running.aclose()
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
        await self._publish(me)
        for ownership in self._to_give_up(census, this_replica):
            await self._give_up(me, ownership)
        if names := self._to_own(census, this_replica):
            await self._become_owner(census, names)
        if names := census.abandoned(self._fleet.lost_seconds):
            await self._end_abandoned(me, names)
        metrics.UPSTREAMS_UNOWNED.set(self._database.census.unowned)

    async def _census(self, me: int) -> Census:
        return await self._database.read(
            lambda connection: Census(me, replicas.live(connection), replicas.upstreams(connection))
        )

    async def _declare_gone(self, census: Census) -> list[int]:
        """Declare replicas gone that have been silent for a lease; return their numbers."""
        lease = self._lease
        silent = {one.no: one.name for one in census.others if one.silent_seconds > lease}
        # Their rows may be old only because nobody, or not this replica, could reach the database.
        # So their silence counts once this replica has reached it for a lease.
        if not silent or self._database.lease.steady_seconds < lease:
            return []
        gone = await self._database.write(replicas.declare_gone, [*silent], lease)
        if gone:
            logger.warning(
                "replicas are silent and count as gone", replicas=[*map(silent.get, gone)]
            )
        return gone

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

    def _to_own(self, census: Census, this_replica: ReplicaRow) -> list[str]:
        """Return the free OpenCodes of this replica's fair share, and those that nobody takes."""
        now, free = self._now(), {row.name for row in census.upstreams if row.free}
        for name, ownership in self._ownerships.items():
            ownership.free_since = (ownership.free_since or now) if name in free else None
        ready = [
            name
            for name, ownership in self._ownerships.items()
            if name in free and (census.listings[name] < 2 or ownership.avoided_until <= now)
        ]
        # What nobody else can run comes first.
        ready.sort(key=lambda name: (census.listings[name], name))
        share = ready[: max(0, census.spare(this_replica))]
        untaken = [
            name
            for name in ready
            if now - (self._ownerships[name].free_since or now) >= self._lease / 2
        ]
        return [*dict.fromkeys([*share, *untaken])]

    async def _become_owner(self, census: Census, names: Sequence[str]) -> None:
        """Become the owner of OpenCodes, unless another replica was quicker, and run them."""
        taken = await self._database.write(replicas.become_owner, census.me, names)
        if not taken:
            return
        self._database.census = census.after_taking(taken)
        before = {row.name: row for row in census.upstreams}
        for name, cleanly in taken.items():
            cause = "new" if before[name].owner == replicas.UNKNOWN else "gone"
            metrics.TAKEOVERS.labels("handed over" if cleanly else cause).inc()
        with metrics.TAKEOVER_SECONDS.time():
            await self._begin(taken)
        for name in taken:
            if away := before[name].away_seconds:
                # Its earlier owners could not reach it either; but this one has to try.
                longest = self._fleet.lost_seconds - 2 * UNREACHED_SECONDS
                self._fleet.members[name].away_since = self._now() - max(0.0, min(away, longest))
        self._database.notify("u")

    async def _begin(self, taken: Mapping[str, Cleanly]) -> None:
        """Continue the tasks and errands of OpenCodes that this replica owns now."""
        ownerships = [self._ownerships[name] for name in taken]
        count = await self._recover(taken, [ownership.member for ownership in ownerships])
        if count:
            logger.warning("tasks taken up after a restart", count=count)
        for ownership in ownerships:
            ownership.owned_since = self._now()
            ownership.member.owned = True
            stops = list[Coroutine[None, None, None]]()
            if not taken[ownership.member.name]:  # the last owner may have left something running
                stops.append(stop_unknown(self._database, ownership.member, self._is_ours))
            if self._database.replica is not None:
                stops.append(stop_canceled(self._database, ownership.member))
            for stopping in stops:
                beside = self._run_beside(stopping, "stop")
                await ownership.running.enter_async_context(beside)

    async def _recover(self, taken: Mapping[str, Cleanly], members: Collection[Member]) -> int:
        """Take up tasks, their webhooks, and errands; return how many tasks there were."""
        # A single process also ends the tasks of OpenCodes that are no longer in its settings.
        all_tasks = self._database.replica is None
        while True:
            try:
                tasks = await recover(
                    self._database,
                    self._writer,
                    self._tasks,
                    self._fleet,
                    taken,
                    all_tasks=all_tasks,
                )
                # As an earlier version of this program does not note what is due.
                await self._database.write(webhooks.look_again, None if all_tasks else taken)
                self._database.dispatch("w")
                await self._fleet.recover_errands(members)
                return tasks
            except StoreUnavailableError:  # what was taken up before that is not taken up again
                await asyncio.sleep(RETRY_SECONDS)

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
                if not member.lost and now - tried_since >= UNREACHED_SECONDS:
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
        logger.warning("OpenCode is left to another replica", upstream=member.name)
        await member.let_go()
        await member.errands.close()
        await self._tasks.give_up(member)
        await ownership.running.aclose()
        member.renew()
        await self._database.write_until_stored(replicas.hand_over, me, [member.name])
        self._database.notify("u")

    async def _end_abandoned(self, me: int, names: Sequence[str]) -> None:
        """Fail the tasks of OpenCodes that no live replica lists any more."""
        taken = await self._database.write(replicas.take_abandoned, me, names)
        if not taken:
            return  # another replica does it
        before = {row.name: row.state for row in self._database.census.upstreams}
        if abandoned := [name for name in taken if before[name] != "lost"]:
            logger.error("OpenCodes are abandoned: no replica lists them", upstreams=abandoned)
        # Before a task is seen to fail: its conversation can be continued in another OpenCode.
        self._database.census = await self._census(me)
        self._database.notify("u")
        await self._recover(taken, ())
        await self._writer.commit()
        await self._database.write_until_stored(replicas.hand_over, me, taken)
