"""What a method works with: the caller, and the parts of the service that it may use.

A handler gets a ``Call`` and typed params. Who owns a session and which directories may be named
is decided here, for reads and writes alike. Methods and wire formats are not known here.
"""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TypeVar

from opencode_a2a.a2a.types import Version
from opencode_a2a.config import OpenCodeSettings
from opencode_a2a.errors import ServiceError, SessionBusyError
from opencode_a2a.events import Json
from opencode_a2a.extensions.params import Payload, Routed, invalid
from opencode_a2a.ids import Caller, Principal, SessionId
from opencode_a2a.opencode.client import Location, OpenCode
from opencode_a2a.opencode.types import ProviderCatalogue, Session
from opencode_a2a.peers.network import Fetch
from opencode_a2a.rights import PROFILES, Rights
from opencode_a2a.store.links import Places
from opencode_a2a.tasks.mailbox import OTHERS_SECONDS
from opencode_a2a.tasks.outbox import Outbox
from opencode_a2a.tasks.service import TaskService
from opencode_a2a.turns.fleet import Fleet, Member
from opencode_a2a.turns.interrupts import Interrupts
from opencode_a2a.turns.rights import WiderWorkError
from opencode_a2a.turns.sessions import WORKSPACE_FIELD, Sessions, WorkspaceRoot

P = TypeVar("P", bound=Payload)
CallOwner = Callable[[str], Awaitable[Json]]
"""Makes a call for an OpenCode that another replica runs, and returns the result as JSON."""


@dataclass(frozen=True, slots=True)
class Deps:
    """The parts of the service that methods use."""

    fleet: Fleet
    workspace: WorkspaceRoot
    tasks: TaskService
    outbox: Outbox
    defaults: OpenCodeSettings
    fetch: Fetch
    catalogues: dict[Location, tuple[float, ProviderCatalogue]] = field(
        default_factory=dict[Location, tuple[float, ProviderCatalogue]]
    )
    """The providers that OpenCode knows, and when they were read: see ``providers``."""

    async def member(self, params: Routed) -> Member:
        """Return the OpenCode that a call is about: that of the session or request it names.

        Raise NotOwnerError if another replica runs it.
        """
        if self.fleet.alone and self.fleet.first.owned:
            return self.fleet.first
        if params.named_session is not None:
            return await self.fleet.of_session(params.named_session)
        if params.named_request is not None:
            return await self.fleet.of_request(params.named_request)
        if params.named_place is not None:
            found = await self.fleet.of_place(params.named_place)
            if found is not None or params.place.workspace is not None:
                return found or self.fleet.first.check_owned()
        return self.fleet.serving(self.workspace.directory(*params.named_directory))


@dataclass(frozen=True)
class Call:
    """One call of a method."""

    caller: Caller
    version: Version
    """Of A2A, for what is returned in its terms."""
    deps: Deps
    params: Routed
    member: Member
    """The OpenCode that the call is about."""
    at_owner: "CallOwner"
    """Has the same call made by other replicas."""
    only: bool = False
    """It is about this OpenCode alone: the replica that was asked asks for the others."""

    @property
    def principal(self) -> Principal:
        return self.caller.principal

    @cached_property
    def rights(self) -> Rights:
        """What the call may do: what the credential allows, unless the call asks for less."""
        return self.caller.rights & PROFILES[self.params.place.profile or "auto"]

    @property
    def opencode(self) -> OpenCode:
        return self.member.turns.opencode

    def everywhere(self) -> list["Call"]:
        """Return this call for each OpenCode that is there: what is listed may be in any.

        Those of other replicas are asked with ``others``.
        """
        if self.only:
            return [self]
        up = [one for one in self.deps.fleet.members.values() if one.owned and one.up]
        found = [replace(self, member=one) for one in up]
        # If there are no others, it says what is wrong.
        return [*found] if found or self.deps.fleet.shared else [self]

    async def others(self, result: type[P]) -> list[P]:
        """Return what this call comes to in each OpenCode that another replica runs.

        One that does not answer soon is left out, as one that is away is.
        """

        async def ask(upstream: str) -> P | None:
            with suppress(ServiceError, TimeoutError):
                async with asyncio.timeout(OTHERS_SECONDS):
                    return result.model_validate(await self.at_owner(upstream))
            return None

        upstreams = [] if self.only else await self.deps.tasks.mailbox.others()
        return [one for one in await asyncio.gather(*map(ask, upstreams)) if one is not None]

    @property
    def sessions(self) -> Sessions:
        return self.member.turns.sessions

    @property
    def interrupts(self) -> Interrupts:
        return self.member.turns.interrupts

    @cached_property
    def at(self) -> Location:
        """Where the call runs: the workspace it names, else a directory inside the root."""
        workspace = self.params.place.workspace
        if workspace is not None:
            return Location(workspace=workspace.id)
        return Location(directory=self.deps.workspace.directory(*self.params.named_directory))

    async def enter(self) -> None:
        """Refuse a workspace that another caller made."""
        named = self.params.place.workspace
        if named is not None and not await self.places.visible(self.principal, [named.id]):
            raise invalid(WORKSPACE_FIELD, "is not the id of a workspace")

    @asynccontextmanager
    async def giving_work(
        self, session: Session, agent: str | None, tools: Mapping[str, bool] | None = None
    ) -> AsyncGenerator[str | None]:
        """Follow a session that is given work, and have it keep to the rights of the call.

        Yield the agent that is to do it. The session is followed until it is done.
        """
        sessions, at = self.sessions, Location(directory=session.directory)
        sessions.rights.note(session)
        joins = self.member.errands.follows(session.id)
        joins = joins or session.id in self.interrupts.sessions_with_turn
        limits = self.caller.budget
        await self.deps.tasks.check_budget(self.principal, limits, another=not joins)
        async with self.member.errands.following(self.principal, session, self.rights) as work:
            try:
                agent, _ = await sessions.rights.restrict(work, agent, at, tools)
            except WiderWorkError:
                raise SessionBusyError(
                    "Something with wider rights runs in the session; wait for it to end, or stop "
                    "it with opencode.sessions.abort",
                    session_id=session.id,
                ) from None
            yield agent

    @property
    def places(self) -> Places:
        return self.sessions.places

    async def session(self, session_id: str) -> Session:
        """Return a session that the caller may use; another's looks like one that is not there."""
        _ = self.at  # a place that may not be named is refused first
        return await self.sessions.find(self.principal, SessionId(session_id))

    async def visible(self, sessions: list[Session]) -> list[Session]:
        """Return those sessions that the caller may know about."""
        return await self.sessions.visible(self.principal, sessions)

    @asynccontextmanager
    async def changing(self, session_id: str) -> AsyncGenerator[Session]:
        """Hold a session that is about to be changed; afterwards it is the caller's."""
        session = await self.session(session_id)
        async with self.sessions.claimed(self.principal, session.id):
            yield session

    @asynccontextmanager
    async def working(self, session_id: str, *, briefly: bool = False) -> AsyncGenerator[Session]:
        """Keep turns out of a session while something else runs in it.

        Unless it is brief, the session becomes the caller's at once: OpenCode may ask something.
        """
        async with self.changing(session_id) as session:
            lock = self.sessions.turn_locks.setdefault(session.id, asyncio.Lock())
            if lock.locked():
                raise SessionBusyError(
                    "A turn is running in the session; wait for it to end, or stop it with "
                    "opencode.sessions.abort",
                    session_id=session.id,
                )
            async with lock:
                if not briefly:
                    await self.sessions.own(self.principal, session)
                yield session
