"""A call of a method: its caller, and the parts of the service that it may use.

A handler gets a ``Call`` and typed params. The call decides, for reads and writes alike, which
sessions the caller may use and which directories they may name. It is about one OpenCode;
``dispatch`` chooses which. Methods and wire formats are not known here.
"""

import asyncio
import time
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import cached_property

from opencode_a2a.a2a.types import Version
from opencode_a2a.cluster.fleet import Anywhere, Fleet, Here, Member, Where
from opencode_a2a.config import Settings
from opencode_a2a.errors import (
    InvalidParamsError,
    ServiceError,
    SessionBusyError,
)
from opencode_a2a.extensions.params import Routed
from opencode_a2a.ids import Caller, Principal, SessionId
from opencode_a2a.net.egress import Fetch
from opencode_a2a.opencode.driver import Driver, Location
from opencode_a2a.opencode.types import ProviderCatalogue, Session
from opencode_a2a.rights import PROFILES, Rights
from opencode_a2a.tasks.service import TaskService
from opencode_a2a.tasks.webhooks import Webhooks
from opencode_a2a.turns.sessions import (
    WORKSPACE_FIELD,
    Places,
    Sessions,
    TurnLock,
    WiderWorkError,
    WorkspaceRoot,
)
from opencode_a2a.turns.shared_interrupts import SharedInterrupts

ENDING_SECONDS = 2.0
"""How long work in a session waits for the end of a prompt that runs there."""


class NotHereError(Exception):
    """The OpenCode of a call does not have what the call names, but another one may.

    Handlers raise it for ``dispatch``, which tries the others, and raises ``error`` if none has it.
    """

    def __init__(self, error: ServiceError) -> None:
        super().__init__(error.message)
        self.error = error


@dataclass(frozen=True, slots=True)
class Deps:
    """The parts of the service that methods use."""

    fleet: Fleet
    workspace: WorkspaceRoot
    tasks: TaskService
    webhooks: Webhooks
    fetch: Fetch
    catalogues: dict[Location, tuple[float, ProviderCatalogue]] = field(
        default_factory=dict[Location, tuple[float, ProviderCatalogue]]
    )
    """The catalogue of each location and the monotonic time it was read at, for ``providers``."""

    async def where(self, params: Routed, *, changes: bool) -> Where:
        """Say where a call belongs, by what its params name.

        That is the OpenCode with the session, request or workspace, or else one that serves the
        directory; if the call changes nothing, all of these answer the same.
        """
        fleet = self.fleet
        if fleet.alone and fleet.first.owned:
            return Here(fleet.first)
        if params.named_session is not None:
            return await fleet.where_session_is(params.named_session)
        if params.named_request is not None:
            return await fleet.where_request_is(params.named_request)
        if params.named_place is not None:
            where = await fleet.where_workspace_is(params.named_place)
            if where is not None or params.place.workspace is not None:
                return where or fleet.where(fleet.first.name)
        directory = self.workspace.directory(*params.named_directory)
        if params.begins_context:
            return fleet.where_new_context_goes(directory)
        member = fleet.serving(directory)
        return fleet.where(member.name) if changes else Anywhere(member)


@dataclass(frozen=True)
class Call:
    """One call of a method, about one OpenCode."""

    caller: Caller
    version: Version
    """The version of A2A in which tasks and messages are returned."""
    deps: Deps
    params: Routed
    member: Member
    """The OpenCode that the call is about; any one for a method that asks none."""

    @property
    def principal(self) -> Principal:
        return self.caller.principal

    @cached_property
    def rights(self) -> Rights:
        """The rights of the credential, narrowed to the profile that the call names."""
        return self.caller.rights & PROFILES[self.params.place.profile or "auto"]

    @property
    def settings(self) -> Settings:
        """All settings, as they apply to the OpenCode of the call."""
        return self.member.turns.settings

    @property
    def opencode(self) -> Driver:
        return self.member.turns.opencode

    @property
    def sessions(self) -> Sessions:
        return self.member.turns.sessions

    @property
    def interrupts(self) -> SharedInterrupts:
        return self.member.turns.interrupts

    @cached_property
    def at(self) -> Location:
        """The workspace that the call names, or else a directory inside the root."""
        workspace = self.params.place.workspace
        if workspace is not None:
            return Location(workspace=workspace.id)
        return Location(directory=self.deps.workspace.directory(*self.params.named_directory))

    async def check_workspace(self) -> None:
        """Refuse a workspace that another caller made."""
        named = self.params.place.workspace
        if named is not None and not await self.places.visible(self.principal, [named.id]):
            raise InvalidParamsError.of(WORKSPACE_FIELD, "is not the id of a workspace")

    @asynccontextmanager
    async def giving_work(
        self, session: Session, agent: str | None, tools: Mapping[str, bool] | None = None
    ) -> AsyncGenerator[str | None]:
        """Prepare a session for work, and yield the agent that is to do it.

        The session keeps to the rights of the call, and is followed until the work is done, so that
        its permissions and questions reach the caller.
        """
        sessions, at = self.sessions, Location(directory=session.directory)
        sessions.rights.note(session)
        joins = self.member.errands.follows(session.id)
        joins = joins or session.id in self.interrupts.sessions_with_turn
        limits = self.caller.budget
        await self.deps.tasks.budgets.check(self.principal, limits, begins_turn=not joins)
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
        """Return a session that the caller may use; another caller's is not found."""
        _ = self.at  # refuses a directory that may not be named before anything else
        return await self.sessions.find(self.principal, SessionId(session_id))

    async def visible(self, sessions: list[Session]) -> list[Session]:
        """Return those of the sessions that the caller may know about."""
        return await self.sessions.visible(self.principal, sessions)

    async def owned(self, sessions: list[Session]) -> list[Session]:
        """Return those of the sessions that belong to the caller, and not to nobody."""
        visible = await self.visible(sessions)
        return [one for one in visible if await self.sessions.owns(self.principal, one)]

    @asynccontextmanager
    async def changing(self, session_id: str) -> AsyncGenerator[Session]:
        """Hold a session while it is changed; afterwards it belongs to the caller."""
        session = await self.session(session_id)
        async with self.sessions.claimed(self.principal, session.id):
            yield session

    async def _idle(self, session: Session) -> bool:
        """Whether nothing runs in a session, or ends at once, as after the text of an answer."""
        at = Location(directory=session.directory)
        until = time.monotonic() + ENDING_SECONDS
        while session.id in await self.opencode.session_status(at=at):
            if time.monotonic() > until:
                return False
            await asyncio.sleep(0.1)
        return True

    @asynccontextmanager
    async def working(self, session_id: str, *, briefly: bool = False) -> AsyncGenerator[Session]:
        """Keep turns out of a session while something else runs in it.

        Unless that is brief, the session belongs to the caller from the start: OpenCode may ask
        for a permission meanwhile, and that is put to the owner.
        """
        async with self.changing(session_id) as session:
            busy = SessionBusyError(
                "A turn is running in the session; wait for it to end, or stop it with "
                "opencode.sessions.abort",
                session_id=session.id,
            )
            lock = self.sessions.turn_locks.setdefault(session.id, TurnLock())
            if lock.users:
                raise busy
            async with lock:
                if not briefly:
                    # OpenCode would let the work wait for as long as a prompt runs in the session,
                    # or waits for a person. What is brief, it refuses by itself.
                    if not await self._idle(session):
                        raise busy
                    await self.sessions.own(self.principal, session)
                yield session
