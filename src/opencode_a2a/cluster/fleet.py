"""Every OpenCode behind the service: which one a message goes to, and whether it can be reached.

``app`` makes a ``Member`` for each OpenCode in the settings and hands the ``Fleet`` to ``tasks``
and ``extensions``. A session lives in one OpenCode, so a context stays with the OpenCode that has
its session, unless that is lost. With a single OpenCode there is nothing to choose.

Before anything runs for a call, the fleet says where the call belongs: ``Here``, if this replica
owns the OpenCode, or ``There``. What runs here holds the member (``Member.hold``): while somebody
holds it, it stays with this replica, so that nothing further down has to ask. ``OwnerCall``
(``cluster.mailbox``) does both.
"""

import asyncio
import os
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import structlog

from opencode_a2a import metrics
from opencode_a2a.clock import now_ms
from opencode_a2a.config import UpstreamEntry
from opencode_a2a.errors import (
    InvalidParamsError,
    MaybeRunError,
    Missing,
    ServiceError,
    UpstreamBackpressureError,
)
from opencode_a2a.ids import Principal, RequestId, SessionId
from opencode_a2a.messages import Routing
from opencode_a2a.opencode.calls import well_formed
from opencode_a2a.opencode.upstream import OpenCodeServer
from opencode_a2a.store import interrupts
from opencode_a2a.store import tasks as task_rows
from opencode_a2a.store.database import Database
from opencode_a2a.store.replicas import Census
from opencode_a2a.turns.errands import Errands
from opencode_a2a.turns.job import SharedTurns
from opencode_a2a.turns.sessions import DERIVED_CONTEXT, DIRECTORY_FIELD
from opencode_a2a.turns.shared_interrupts import audit_void

logger = structlog.get_logger(__name__)

NOTICE_SECONDS = 1.0
LOCAL_BIAS = 2
"""How many more open tasks an OpenCode of this replica may have than one of another replica, and
still get a new context: streams of this replica's own OpenCodes are faster."""
PROBE_SECONDS = 3.0
"""How long an OpenCode may take to say whether a session is its own."""


class MovedError(Exception):
    """A call belongs to another OpenCode, or to the next owner of this one.

    Nothing was done for the call, or it can be done again. ``OwnerCall`` takes it there.
    """

    def __init__(self, upstream: str, *, begun: bool = False) -> None:
        """``begun`` says that some of the call may have been done."""
        super().__init__(upstream)
        self.upstream = upstream
        self.begun = begun


class Member:
    """One OpenCode in the settings of this replica, and the parts of the service that use it."""

    def __init__(
        self,
        entry: UpstreamEntry,
        server: OpenCodeServer,
        make: Callable[[], tuple[SharedTurns, Errands]],
    ) -> None:
        self.name = entry.name
        self.server = server
        self._make = make
        self.turns, self.errands = make()
        self.drain = entry.drain
        self.max_turns = entry.max_turns
        self.owned = False
        """Whether this replica is its owner. Others may still read what is the same in every
        OpenCode, such as models and agents."""
        self.lost = False
        """Whether it was away for too long: its tasks have failed, and its contexts move on."""
        self.away_since: float | None = None
        """When its owner could no longer reach it, by the clock of the event loop."""
        self.directories = [os.path.realpath(directory) for directory in entry.directories]
        self._holders: dict[asyncio.Timeout, bool] = {}
        """The calls that hold it, and whether another owner may repeat them."""
        self._unheld = asyncio.Event()

    @asynccontextmanager
    async def hold(self, *, repeatable: bool = True) -> AsyncGenerator[None]:
        """Keep this replica its owner; raise MovedError if it is not.

        If the OpenCode is given up meanwhile, what runs inside is canceled, and MovedError raised;
        or MaybeRunError if it must not be done again.
        """
        if not self.owned:
            raise MovedError(self.name)
        # A timeout without a limit until ``let_go`` sets one: a cancel that can be told apart from
        # one of the caller's.
        holder = asyncio.timeout(None)
        try:
            async with holder:
                self._holders[holder] = repeatable
                yield
        except TimeoutError:
            if not holder.expired():
                raise
            if repeatable:
                raise MovedError(self.name, begun=True) from None
            raise MaybeRunError from None
        finally:
            self._holders.pop(holder, None)
            self._unheld.set()

    @property
    def held(self) -> bool:
        return bool(self._holders)

    @property
    def cannot_be_repeated(self) -> bool:
        """Whether a call holds it that must not be carried out twice."""
        return not all(self._holders.values())

    async def let_go(self, seconds: float = 0.0, repeatable_seconds: float = 0.0) -> None:
        """Stop being its owner: nobody can hold it any more, and those who do are canceled.

        They have some seconds to end by themselves; calls that another owner may repeat have
        ``repeatable_seconds``.
        """
        self.owned, now = False, asyncio.get_running_loop().time()
        for holder, can_be_repeated in self._holders.items():
            if not holder.expired():
                holder.reschedule(now + (repeatable_seconds if can_be_repeated else seconds))
        while self._holders:
            self._unheld.clear()
            await self._unheld.wait()

    def renew(self) -> None:
        """Forget what is known of it: another replica is going to own it."""
        self.turns, self.errands = self._make()
        self.lost, self.away_since = False, None

    @property
    def up(self) -> bool:
        return self.turns.feed.up.is_set()

    @property
    def state(self) -> str:
        return "up" if self.up else "lost" if self.lost else "away"


@dataclass(frozen=True, slots=True)
class Here:
    """A call belongs to an OpenCode that this replica owns."""

    member: Member


@dataclass(frozen=True, slots=True)
class There:
    """A call belongs to an OpenCode that another replica owns, or nobody at the moment."""

    upstream: str


@dataclass(frozen=True, slots=True)
class Anywhere:
    """A call needs no owner: every replica does the same for it."""

    member: Member
    """The OpenCode to ask, if one is asked at all."""


Where = Here | There | Anywhere
"""Where a call belongs."""


def _serves(directories: Sequence[str], directory: str | None) -> bool:
    """Whether an OpenCode that is for some directories, or for all, may work in one."""
    if not directories:
        return True
    return directory is not None and any(Path(directory).is_relative_to(d) for d in directories)


class Fleet:
    def __init__(self, members: Sequence[Member], database: Database, lost_seconds: float) -> None:
        self.members = {member.name: member for member in members}
        self.first = members[0]
        """The only member, or the one to ask for what is the same in all of them."""
        self.tasks: Counter[str] = Counter()
        """How many open tasks each member has, with those that are being admitted."""
        self._database = database
        self.lost_seconds = lost_seconds
        """How long an OpenCode may be away before it is lost; 0 is for ever."""
        self._sent: tuple[Census, Counter[str]] = Census(), Counter()
        """How many new contexts other OpenCodes were given since a census: their owners count them
        in the next."""
        self.find_session_elsewhere: Callable[[SessionId], Awaitable[str | None]] | None = None
        """Asks other replicas for the name of the OpenCode that has a session; set by
        ``TaskService``, which has the mailbox for that."""

    # Which OpenCode?

    @property
    def census(self) -> Census:
        """Which replicas there are, and what they own."""
        return self._database.census

    @property
    def alone(self) -> bool:
        """Whether there is only one OpenCode, behind this and all other replicas."""
        elsewhere = self._database.census.elsewhere
        return len(self.members) == 1 and elsewhere.keys() <= self.members.keys()

    @property
    def can_lose(self) -> bool:
        """Whether an OpenCode that is unreachable for too long is lost; a single one never is."""
        return not self.alone and self.lost_seconds > 0

    @property
    def missing(self) -> Missing:
        """What none of the OpenCodes has; what others have is not known here."""
        if not self._database.census.elsewhere.keys() <= self.members.keys():
            return frozenset()
        first, *others = (member.turns.opencode.features for member in self.members.values())
        return first.missing.intersection(*(one.missing for one in others))

    def owned(self) -> list[str]:
        """Return the names of the OpenCodes that this replica owns."""
        return [member.name for member in self.members.values() if member.owned]

    def where(self, upstream: str) -> Here | There:
        """Say where a call about an OpenCode belongs."""
        member = self.members.get(upstream)
        return Here(member) if member is not None and member.owned else There(upstream)

    def _gone(self, upstream: str) -> bool:
        """Whether no replica lists an OpenCode any more, and it was given up for lost."""
        if self._database.replica is None:
            return False
        known = upstream in self.members or upstream in self.census.elsewhere
        return not known and not self.census.listings[upstream]

    def keeps_contexts(self, upstream: str) -> bool:
        """Whether contexts with a session in an OpenCode stay there; if it is lost they move on."""
        member = self.members.get(upstream)
        return upstream in self.census.elsewhere or (member is not None and not member.lost)

    async def where_message_belongs(
        self, context_id: str | None, routing: Routing, bound: Sequence[str]
    ) -> Where:
        """Say where a message belongs: to the OpenCode with its session, or to one with room.

        ``bound`` names the OpenCodes that its context is bound to.
        """
        if self.alone:
            return self.where(self.first.name)
        if routing.session_id is not None:
            return await self.where_session_is(routing.session_id)
        if routing.workspace_id is not None:
            where = await self.where_workspace_is(routing.workspace_id)
            if where is not None:
                return where
        if context_id is not None and context_id.startswith(DERIVED_CONTEXT):
            return await self.where_session_is(context_id.removeprefix(DERIVED_CONTEXT))
        if bound:
            return self.where(bound[0])
        if routing.workspace_id is not None:
            return self.where(self.first.name)
        location, _ = self.first.turns.sessions.locate(routing)
        return self.where_new_context_goes(location.directory)

    def serving(self, directory: str | None) -> Member:
        """Return an OpenCode to ask for what is the same in all that serve a directory."""
        serving = [
            member for member in self.members.values() if _serves(member.directories, directory)
        ]
        up = [member for member in serving if member.up]
        return (up or serving or [self.first])[0]

    async def where_session_is(self, session_id: str) -> Here | There:
        """Say where a session is; if nobody has it, where that is said."""
        if self.alone or not well_formed("ses", session_id):
            return self.where(self.first.name)
        return self.where(await self._find_session(SessionId(session_id)))

    async def _find_session(self, session_id: SessionId) -> str:
        """Return the name of the OpenCode that has a session; the first if none has it."""
        for member in self.members.values():
            if member.turns.sessions.knows(session_id):
                return member.name
        name = await self._database.read(task_rows.upstream_of_session, session_id)
        if name is not None and (name in self.census.elsewhere or name in self.members):
            return name

        async def has(member: Member) -> bool:
            with suppress(TimeoutError, ServiceError):
                async with asyncio.timeout(PROBE_SECONDS):
                    await member.turns.opencode.session(session_id)
                    return True
            return False

        members = [member for member in self.members.values() if member.up]
        found = await asyncio.gather(*map(has, members))
        for member, here in zip(members, found, strict=True):
            if here:
                return member.name
        name = None
        if self.census.elsewhere and self.find_session_elsewhere is not None:
            name = await self.find_session_elsewhere(session_id)
        return name or self.first.name

    async def where_workspace_is(self, name: str) -> Here | There | None:
        """Say where a workspace or worktree was made; None if that is not known."""
        found = await self._database.read(task_rows.upstream_of_place, name)
        known = found in self.census.elsewhere or found in self.members
        return self.where(found) if found is not None and known else None

    async def where_request_is(self, request_id: str) -> Here | There:
        """Say which OpenCode asks for a permission or an answer; any one if that is not known."""
        for member in self.members.values():
            if RequestId(request_id) in member.turns.interrupts.open:
                return self.where(member.name)
        if self.census.elsewhere:  # also of a replica that is gone: its next owner answers
            name = await self._database.read(interrupts.upstream, request_id, DERIVED_CONTEXT)
            if name is not None:
                return self.where(name)
        usable = (member for member in self.members.values() if member.owned and member.up)
        return self.where(next(usable, self.first).name)

    def where_new_context_goes(self, directory: str | None) -> Here | There:
        """Choose an OpenCode for a new context: one that has room, with the fewest open tasks.

        One of this replica is preferred; see ``LOCAL_BIAS``.
        """
        serving = [
            member for member in self.members.values() if _serves(member.directories, directory)
        ]
        census = self.census
        others = [r for r in census.elsewhere.values() if _serves(r.directories, directory)]
        if not serving and not others:
            raise InvalidParamsError.of(DIRECTORY_FIELD, "is not served by any OpenCode here")
        own = [member for member in serving if member.owned]
        alive = [member for member in own if not member.lost] or own
        taking = [member for member in alive if not member.drain] or alive
        there = [member for member in taking if member.up]
        room = [m for m in there or taking if not m.max_turns or self.tasks[m.name] < m.max_turns]
        best = min(room, key=lambda member: self.tasks[member.name], default=None)
        if others:
            if self._sent[0] is not census:
                self._sent = census, Counter()
            sent = self._sent[1]
            usable = {
                row.name: row.open_tasks + sent[row.name]
                for row in others
                if row.state == "up" and not row.free and not row.drain
                if census.reads_mail(row.name)
                if not row.max_turns or row.open_tasks + sent[row.name] < row.max_turns
            }
            least = min(usable, key=lambda name: usable[name], default=None)
            enough = best is not None and best.up and not best.drain
            if least and not (
                best and enough and self.tasks[best.name] <= usable[least] + LOCAL_BIAS
            ):
                sent[least] += 1
                return There(least)
        if best is not None:
            return Here(best)  # if all are away, the turn waits as it does for a single one
        if not own:
            return There((serving or others)[0].name)  # the call waits for an owner
        raise UpstreamBackpressureError(limit=sum(m.max_turns for m in there or taking))

    def errands_of(self, principal: Principal) -> int:
        """Return how many errands of a caller run in this process."""
        return sum(member.errands.running(principal) for member in self.members.values())

    # Whether the members can be reached

    async def recover_errands(self, members: Collection[Member]) -> None:
        """Take up work without a task, which was asking something when its process ended.

        What it asks in an OpenCode that is gone for good is void: otherwise, every later start
        would ask all replicas who has its session.
        """
        # The table of interrupts is the same for all members.
        for owner in await self.first.turns.interrupts.errand_owners():
            session = SessionId(owner.context_id.removeprefix(DERIVED_CONTEXT))
            upstream = await self._database.read(task_rows.upstream_of_session, session)
            if upstream is not None and self._gone(upstream):
                context_id, now = owner.context_id, now_ms()
                audit_void(
                    owner, await self._database.write(interrupts.void_errand, context_id, now)
                )
                continue
            name = self.first.name if self.alone else await self._find_session(session)
            member = self.members.get(name)
            if member is not None and member in members:
                stored = await self.first.turns.interrupts.stored("", owner.context_id)
                member.errands.recover(owner, stored)

    async def notice_lost(self, lose: Callable[[Member], None]) -> None:
        """Notice which members are away, and call ``lose`` for one that was away for too long."""
        now = asyncio.get_running_loop().time
        while True:
            for member in self.members.values():
                # Every replica reports what it owns.
                metrics.UPSTREAM_OWNED.labels(member.name).set(member.owned)
                metrics.UPSTREAM_UP.labels(member.name).set(member.owned and member.up)
                metrics.UPSTREAM_RUNNING.labels(member.name).set(member.turns.running)
                if not member.owned:
                    continue
                if member.up:
                    member.away_since, member.lost = None, False
                    continue
                if member.away_since is None:
                    member.away_since = now()
                away = now() - member.away_since
                if self.can_lose and away >= self.lost_seconds:
                    if not member.lost:
                        member.lost = True
                        member.turns.sessions.forget_links()
                        logger.error("OpenCode lost", upstream=member.name, seconds=round(away))
                    lose(member)  # again for what was admitted since
            await asyncio.sleep(NOTICE_SECONDS)
