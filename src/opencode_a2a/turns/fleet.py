"""Every OpenCode behind the service: which one a message goes to, and whether it can be reached.

``app`` makes a ``Member`` for each OpenCode in the settings and hands the ``Fleet`` to ``tasks``
and ``extensions``, which ask it for the OpenCode to use. A session lives in one OpenCode, so a
context stays with the OpenCode that has its session, unless that is lost. If another replica owns
the OpenCode, the fleet raises ``NotOwnerError``. With a single OpenCode there is nothing to choose.
"""

import asyncio
import os
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Sequence
from contextlib import suppress
from contextvars import ContextVar
from pathlib import Path

import structlog

from opencode_a2a import metrics
from opencode_a2a.config import UpstreamEntry
from opencode_a2a.errors import (
    InvalidParamsError,
    ServiceError,
    UpstreamBackpressureError,
)
from opencode_a2a.ids import Principal, RequestId, SessionId
from opencode_a2a.messages import Routing
from opencode_a2a.opencode.calls import well_formed
from opencode_a2a.opencode.upstream import Upstream
from opencode_a2a.store import interrupts
from opencode_a2a.store import tasks as task_rows
from opencode_a2a.store.database import Database
from opencode_a2a.store.replicas import Census
from opencode_a2a.turns.errands import Errands
from opencode_a2a.turns.sessions import DERIVED_CONTEXT, DIRECTORY_FIELD
from opencode_a2a.turns.turn import SharedTurns

logger = structlog.get_logger(__name__)

WATCH_SECONDS = 1.0
LOCAL_BIAS = 2
"""How many more open tasks an OpenCode of this replica may have than one of another replica, and
still get a new context: streams of this replica's own OpenCodes are faster."""
FORWARDED_TO: ContextVar[str | None] = ContextVar("forwarded to", default=None)
"""The OpenCode that another replica has chosen for the call that is being handled, if one has."""
PROBE_SECONDS = 3.0
"""How long an OpenCode may take to say whether a session is its own."""


class NotOwnerError(Exception):
    """A call is about an OpenCode that this replica does not own.

    ``TaskService`` and ``Dispatcher`` catch it, and have the owner run the call
    (``OwnerCall.ask`` in ``tasks.mailbox``).
    """

    def __init__(self, upstream: str) -> None:
        super().__init__(upstream)
        self.upstream = upstream


class Member:
    """One OpenCode in the settings of this replica, and the parts of the service that use it."""

    def __init__(
        self,
        entry: UpstreamEntry,
        upstream: Upstream,
        make: Callable[[], tuple[SharedTurns, Errands]],
    ) -> None:
        self.name = entry.name
        self.upstream = upstream
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

    def check_owned(self) -> "Member":
        """Return this member; raise NotOwnerError if this replica does not own it."""
        if not self.owned:
            raise NotOwnerError(self.name)
        return self


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
        """Asks other replicas for the name of the OpenCode that has a session."""

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

    def owned(self) -> list[str]:
        """Return the names of the OpenCodes that this replica owns."""
        return [member.name for member in self.members.values() if member.owned]

    def owns(self, upstream: str) -> bool:
        """Whether this replica owns an OpenCode."""
        return upstream in self.owned()

    def keeps_contexts(self, upstream: str) -> bool:
        """Whether contexts with a session in an OpenCode stay there; if it is lost they move on."""
        member = self.members.get(upstream)
        return upstream in self.census.elsewhere or (member is not None and not member.lost)

    def member(self, upstream: str) -> Member:
        """Return an OpenCode by its name; raise NotOwnerError if this replica does not own it."""
        member = self.members.get(upstream)
        if member is None:
            raise NotOwnerError(upstream)
        return member.check_owned()

    async def member_for_message(
        self, context_id: str | None, routing: Routing, bound: Sequence[str]
    ) -> Member:
        """Return the OpenCode for a message: the one with its session, or one with room.

        ``bound`` names the OpenCodes that its context is bound to. Raise NotOwnerError if another
        replica owns the one that is found.
        """
        if self.alone and self.first.owned:
            return self.first
        if routing.session_id is not None:
            return await self.holder_of_session(routing.session_id)
        if routing.workspace_id is not None:
            member = await self.holder_of_workspace(routing.workspace_id)
            if member is not None:
                return member
        if context_id is not None and context_id.startswith(DERIVED_CONTEXT):
            return await self.holder_of_session(context_id.removeprefix(DERIVED_CONTEXT))
        if bound:
            return self.member(bound[0])
        if routing.workspace_id is not None:
            return self.any_member.check_owned()
        location, _ = self.first.turns.sessions.locate(routing)
        return self.member_for_new_context(location.directory)

    @property
    def any_member(self) -> Member:
        """The OpenCode to ask about something that none is known to have.

        That is the first, unless another replica has chosen one: it may list them in another order,
        and they would send the call to and fro.
        """
        return self.members.get(FORWARDED_TO.get() or "", self.first)

    def serving(self, directory: str | None) -> Member:
        """Return an OpenCode to ask for what is the same in all that serve a directory."""
        serving = [
            member for member in self.members.values() if _serves(member.directories, directory)
        ]
        up = [member for member in serving if member.up]
        return (up or serving or [self.first])[0]

    async def holder_of_session(self, session_id: str) -> Member:
        """Return the OpenCode that has a session; one that denies it if none has.

        Raise NotOwnerError if another replica owns it.
        """
        if self.alone or not well_formed("ses", session_id):
            return self.any_member.check_owned()
        return (await self._find_session(SessionId(session_id))).check_owned()

    async def _find_session(self, session_id: SessionId) -> Member:
        for member in self.members.values():
            if member.turns.sessions.knows(session_id):
                return member
        name = await self._database.read(task_rows.upstream_of_session, session_id)
        if name is not None and name in self.census.elsewhere:
            raise NotOwnerError(name)
        if name is not None and name in self.members:
            return self.members[name]

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
                return member
        if (
            self.census.elsewhere
            and self.find_session_elsewhere is not None
            and FORWARDED_TO.get() is None
        ):
            name = await self.find_session_elsewhere(session_id)
            if name is not None:
                raise NotOwnerError(name)
        return self.any_member

    async def holder_of_workspace(self, name: str) -> Member | None:
        """Return the OpenCode that made a workspace or worktree; None if that is not known.

        Raise NotOwnerError if another replica owns it.
        """
        found = await self._database.read(task_rows.upstream_of_place, name)
        if found is not None and found in self.census.elsewhere:
            raise NotOwnerError(found)
        return self.members[found].check_owned() if found in self.members else None

    async def holder_of_request(self, request_id: str) -> Member:
        """Return the OpenCode that asks for a permission or an answer.

        If none is known to, return one that can be asked. Raise NotOwnerError if another replica
        owns it.
        """
        for member in self.members.values():
            if RequestId(request_id) in member.turns.interrupts.open:
                return member
        if self.census.has_others:
            name = await self._database.read(interrupts.upstream, request_id, DERIVED_CONTEXT)
            if name is not None and not self.owns(name):
                raise NotOwnerError(name)
        usable = (member for member in self.members.values() if member.owned and member.up)
        return next(usable, self.first)

    def member_for_new_context(self, directory: str | None) -> Member:
        """Return the OpenCode for a new context: one that has room, with the fewest open tasks.

        Raise NotOwnerError if another replica owns it; see ``LOCAL_BIAS``.
        """
        if self.alone:
            return self.first.check_owned()
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
        if others and FORWARDED_TO.get() is None:
            if self._sent[0] is not census:
                self._sent = census, Counter()
            sent = self._sent[1]
            usable = {
                row.name: row.open_tasks + sent[row.name]
                for row in others
                if row.state == "up" and not row.drain and census.reads_mail(row.name)
                if not row.max_turns or row.open_tasks + sent[row.name] < row.max_turns
            }
            least = min(usable, key=lambda name: usable[name], default=None)
            enough = best is not None and best.up and not best.drain
            if least and not (
                best and enough and self.tasks[best.name] <= usable[least] + LOCAL_BIAS
            ):
                sent[least] += 1
                raise NotOwnerError(least)
        if best is None and not own:
            raise NotOwnerError((serving or others)[0].name)  # the call waits for an owner
        if best is None:
            raise UpstreamBackpressureError(limit=sum(m.max_turns for m in there or taking))
        # If all are away, the turn waits as it does for a single one.
        return best

    def errands_of(self, principal: Principal) -> int:
        """Return how many errands of a caller run in this process."""
        return sum(member.errands.running(principal) for member in self.members.values())

    # Whether the members can be reached

    async def recover_errands(self, members: Collection[Member]) -> None:
        """Take up work without a task, which was asking something when its process ended."""
        for owner in await self.first.turns.interrupts.errand_owners():
            session = SessionId(owner.context_id.removeprefix(DERIVED_CONTEXT))
            member = None
            with suppress(NotOwnerError):
                member = self.first if self.alone else await self._find_session(session)
            if member is not None and member in members:
                stored = await self.first.turns.interrupts.stored("", owner.context_id)
                member.errands.recover(owner, stored)

    async def watch(self, lose: Callable[[Member], None]) -> None:
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
                several = not self.alone and self.lost_seconds > 0
                if several and away >= self.lost_seconds:
                    if not member.lost:
                        member.lost = True
                        member.turns.sessions.forget_links()
                        logger.error("OpenCode is lost", upstream=member.name, seconds=round(away))
                    lose(member)  # again for what was admitted since
            await asyncio.sleep(WATCH_SECONDS)
