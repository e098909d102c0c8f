"""Which OpenCode session a turn runs in, and whose it is.

A context has one session for each place it runs in; it is made on the first turn and kept. A
caller may name a session: one that belongs to nobody is claimed for the length of the prompt
and becomes the caller's when the prompt was taken. Sessions of others do not exist for a
caller, and neither do those that sub-agents of others ran in. Turns of one session run one after
the other.
"""

import asyncio
from collections import OrderedDict
from collections.abc import AsyncGenerator, Callable, Hashable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace
from typing import Generic, TypeVar
from weakref import WeakValueDictionary

from sqlalchemy.engine import Connection

from opencode_a2a.clock import now_ms
from opencode_a2a.errors import InvalidParamsError, SessionNotFoundError, Violation
from opencode_a2a.ids import ContextId, Principal, SessionId, new_uuid
from opencode_a2a.messages import Routing
from opencode_a2a.opencode.client import Location, OpenCode, well_formed
from opencode_a2a.opencode.types import Session, SessionDraft
from opencode_a2a.store import links
from opencode_a2a.store.database import Database
from opencode_a2a.store.places import Places
from opencode_a2a.turns.workspace import Workspace

SESSION_FIELD = "metadata.shared.session.id"
DIRECTORY_FIELD = "metadata.opencode.directory"
WORKSPACE_FIELD = "metadata.opencode.workspace.id"
DERIVED_CONTEXT = "ctx:opencode-session:"
"""Contexts of sessions that were listed, not begun, through this service."""
KNOWN_SESSIONS = 10_000
RECENT_SESSIONS = 1000
"""How many are looked through for one that was made moments ago."""
MAX_DEPTH = 16
"""How deep sub-agents may be nested; a session below that is nobody's to use."""

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class Locks(Generic[K]):
    """A lock for each key, for as long as somebody holds or waits for it."""

    def __init__(self) -> None:
        self._locks: WeakValueDictionary[K, asyncio.Lock] = WeakValueDictionary()

    def __getitem__(self, key: K) -> asyncio.Lock:
        lock = self._locks.get(key)
        if lock is None:
            lock = self._locks[key] = asyncio.Lock()
        return lock


@dataclass(frozen=True, slots=True)
class BoundSession:
    """A session that a turn may use."""

    session_id: SessionId
    directory: str
    title: str | None = None
    named: bool = False
    """The caller chose it; it is theirs once the prompt was taken."""
    link: Callable[[Connection], None] | None = None
    """Lets the context keep a new session; to be written before the session is prompted."""

    @property
    def location(self) -> Location:
        return Location(directory=self.directory)


class Sessions:
    def __init__(
        self, database: Database, opencode: OpenCode, workspace: Workspace, claim_seconds: float
    ) -> None:
        self.places = Places(database)
        self._database = database
        self._opencode = opencode
        self._workspace = workspace
        self._claim_ms = int(claim_seconds * 1000)
        self._making: Locks[tuple[str, str, str]] = Locks()
        self._known: OrderedDict[SessionId, BoundSession] = OrderedDict()
        self._parents: OrderedDict[SessionId, SessionId | None] = OrderedDict()
        """Whose sub-agent a session was made for; OpenCode never changes it."""
        self._links: OrderedDict[tuple[Principal, ContextId, str], SessionId] = OrderedDict()
        """The sessions of contexts, as they are stored or about to be."""
        self._unanswered: OrderedDict[tuple[Principal, ContextId, str], str] = OrderedDict()
        """The keys of sessions that OpenCode was asked to make, until it has answered."""
        self._owners: OrderedDict[SessionId, Principal] = OrderedDict()
        """Whose those sessions are."""
        self.turns: Locks[SessionId] = Locks()

    async def check(self, principal: Principal, routing: Routing) -> None:
        """Refuse a session or place that the caller may not use, before a task exists."""
        self._place(routing)
        workspace = routing.workspace_id
        if workspace is not None and not await self.places.visible(principal, [workspace]):
            raise _no_workspace()
        if routing.session_id is None:
            return
        session_id = SessionId(routing.session_id)
        try:
            if not well_formed("ses", session_id):
                raise SessionNotFoundError
            await self._load(session_id)
            if await self._strangers(principal, await self._lineage(session_id)):
                raise SessionNotFoundError
        except SessionNotFoundError:
            raise _no_session() from None

    # Whose a session is

    async def find(self, principal: Principal, session_id: SessionId) -> Session:
        """Return a session that a caller may use, as OpenCode has it now."""
        if well_formed("ses", session_id) and not await self._strangers(principal, [session_id]):
            session = await self._opencode.session(session_id)
            if await self.visible(principal, [session]):
                return session
        raise SessionNotFoundError(session_id=session_id[:128])

    async def visible(self, principal: Principal, sessions: Sequence[Session]) -> list[Session]:
        """Return those sessions that a caller may know of and use."""
        for session in sessions:
            _keep(self._parents, session.id, session.parent_id)
        lineages: dict[SessionId, list[SessionId]] = {}
        for session in filter(self._inside, sessions):
            with suppress(SessionNotFoundError):
                lineages[session.id] = await self._lineage(session.id)
        everybody = dict.fromkeys(one for lineage in lineages.values() for one in lineage)
        hidden = await self._strangers(principal, [*everybody])
        return [
            session
            for session in sessions
            if session.id in lineages and not hidden.intersection(lineages[session.id])
        ]

    async def owns(self, principal: Principal, session: Session) -> bool:
        """Whether a session, or the one whose sub-agent it belongs to, is the caller's own."""
        for session_id in await self._lineage(session.id):
            if await self._owner(session_id) == principal:
                return True
        return False

    async def _lineage(self, session_id: SessionId) -> list[SessionId]:
        """Return the session and its ancestors: a sub-agent's session has its root's owner."""
        lineage = [session_id]
        while (parent := await self._parent(lineage[-1])) is not None:
            if len(lineage) == MAX_DEPTH:
                raise SessionNotFoundError(session_id=session_id)
            lineage.append(parent)
        return lineage

    async def _parent(self, session_id: SessionId) -> SessionId | None:
        if session_id not in self._parents:
            try:
                session = await self._opencode.session(session_id)
            except SessionNotFoundError:
                return None
            _keep(self._parents, session_id, session.parent_id)
        return self._parents[session_id]

    async def _owner(self, session_id: SessionId) -> Principal | None:
        if session_id in self._owners:
            return self._owners[session_id]

        def read(connection: Connection) -> Principal | None:
            return links.owner(connection, session_id, now_ms())

        return await self._database.read(read)

    async def _strangers(
        self, principal: Principal, session_ids: Sequence[SessionId]
    ) -> set[SessionId]:
        """Return which of these sessions belong to somebody else."""

        def read(connection: Connection) -> set[SessionId]:
            return links.strangers(connection, principal, session_ids, now_ms())

        theirs = {s for s in session_ids if self._owners.get(s, principal) != principal}
        return theirs | await self._database.read(read) if session_ids else set()

    def _inside(self, session: Session) -> bool:
        """Whether a session runs where a caller may."""
        return session.workspace_id is not None or self._workspace.holds(session.directory)

    @asynccontextmanager
    async def claimed(self, principal: Principal, session_id: SessionId) -> AsyncGenerator[None]:
        """Hold a session while it is changed; once it was, it belongs to the caller."""
        if not await self._hold(principal, session_id, self._claim_ms):
            raise SessionNotFoundError(session_id=session_id)
        try:
            yield
        except BaseException:
            await self.release(BoundSession(session_id, "", named=True), principal)
            raise
        await self._hold(principal, session_id, None)

    async def take(
        self, principal: Principal, context_id: ContextId, routing: Routing, *, fresh: bool = False
    ) -> BoundSession:
        """Return the session for a turn: the one named, the context's own, or a new one.

        ``fresh`` says that the context was made for this very turn, so that it has none.
        """
        location, place = self._place(routing)
        if routing.session_id is not None:
            return await self._claim(principal, SessionId(routing.session_id))
        # A second message of a context that has only just been made must find the same session.
        async with self._making[principal, context_id, place]:
            where = (principal, context_id, place)
            session_id = self._links.get(where) if fresh else await self._linked(*where)
            if session_id is None and context_id.startswith(DERIVED_CONTEXT):
                session_id = SessionId(context_id.removeprefix(DERIVED_CONTEXT))
                return await self._claim(principal, session_id)
            if session_id is not None:
                try:
                    return await self._load(session_id)
                except SessionNotFoundError:
                    await self.forget(session_id)
            return await self._create(principal, context_id, place, location)

    async def _linked(
        self, principal: Principal, context_id: ContextId, place: str
    ) -> SessionId | None:
        known = self._links.get((principal, context_id, place))
        if known is not None:
            return known

        def read(connection: Connection) -> SessionId | None:
            return links.linked(connection, principal, context_id, place)

        return await self._database.read(read)

    def _link(
        self, principal: Principal, context_id: ContextId, place: str, session_id: SessionId
    ) -> Callable[[Connection], None]:
        """Let a context use a session from now on; return what has to be written for it."""
        _keep(self._links, (principal, context_id, place), session_id)
        _keep(self._owners, session_id, principal)

        def write(connection: Connection) -> None:
            links.link(connection, principal, context_id, place, session_id, now_ms())

        return write

    async def confirm(
        self, seat: BoundSession, principal: Principal, context_id: ContextId, routing: Routing
    ) -> None:
        """Let the context keep a session that the caller named, now that it took the prompt."""
        if seat.named:
            _, place = self._place(routing)
            await self._database.write(self._link(principal, context_id, place, seat.session_id))
            await self._hold(principal, seat.session_id, None)

    async def release(self, seat: BoundSession, principal: Principal) -> None:
        """Give up the claim on a session that did not take the prompt."""
        if seat.named:
            lineage = await self._lineage(seat.session_id)

            def write(connection: Connection) -> None:
                links.release(connection, principal, lineage)

            await self._database.write(write)

    async def own(self, principal: Principal, session: Session) -> None:
        """Write down that a session made for a caller is theirs."""

        def write(connection: Connection) -> None:
            links.own(connection, principal, session.id)

        await self._database.write(write)
        self._remember(session)

    async def forget(self, session_id: SessionId) -> None:
        """Drop what is known of a session that no longer exists."""
        self._known.pop(session_id, None)
        self._owners.pop(session_id, None)
        for where in [where for where, known in self._links.items() if known == session_id]:
            del self._links[where]

        def write(connection: Connection) -> None:
            links.forget(connection, session_id)

        await self._database.write(write)

    def _place(self, routing: Routing) -> tuple[Location, str]:
        if routing.workspace_id is not None:
            if not well_formed("wrk", routing.workspace_id):
                raise _no_workspace()
            location = Location(workspace=routing.workspace_id)
            return location, f"workspace:{routing.workspace_id}"
        directory = self._workspace.directory(routing.directory, DIRECTORY_FIELD)
        place = "" if directory == self._workspace.root else f"directory:{directory}"
        return Location(directory=directory), place

    async def _claim(self, principal: Principal, session_id: SessionId) -> BoundSession:
        if not well_formed("ses", session_id):
            raise SessionNotFoundError
        seat = await self._load(session_id)
        if not await self._hold(principal, session_id, self._claim_ms):
            raise SessionNotFoundError
        return BoundSession(seat.session_id, seat.directory, seat.title, named=True)

    async def _hold(self, principal: Principal, session_id: SessionId, ms: int | None) -> bool:
        """Claim a session with its ancestors, for a time or for good."""
        lineage = await self._lineage(session_id)
        if any(self._owners.get(one, principal) != principal for one in lineage):
            return False
        now = now_ms()
        until = None if ms is None else now + ms

        def write(connection: Connection) -> bool:
            return links.claim(connection, principal, lineage, now, until)

        return await self._database.write(write)

    async def _load(self, session_id: SessionId) -> BoundSession:
        seat = self._known.get(session_id)
        if seat is None:
            seat = self._remember(await self._opencode.session(session_id))
        return seat

    async def _create(
        self, principal: Principal, context_id: ContextId, place: str, location: Location
    ) -> BoundSession:
        where = (principal, context_id, place)
        key = self._unanswered.get(where)
        session = None if key is None else await self._made(key, location)
        if session is None:
            key = key or new_uuid()
            _keep(self._unanswered, where, key)
            draft = SessionDraft(metadata={"a2a": {"contextId": context_id, "key": key}})
            session = await self._opencode.create_session(draft, at=location)
        self._unanswered.pop(where, None)
        seat = self._remember(session)
        return replace(seat, link=self._link(principal, context_id, place, seat.session_id))

    async def _made(self, key: str, location: Location) -> Session | None:
        """Return the session that OpenCode made although its answer never came."""
        recent = await self._opencode.sessions(at=location, limit=RECENT_SESSIONS)
        for session in recent:
            match session.metadata:
                case {"a2a": {"key": found}} if found == key:
                    return session
                case _:
                    pass
        return None

    def _remember(self, session: Session) -> BoundSession:
        if not self._inside(session):
            raise SessionNotFoundError  # for the caller it does not exist
        _keep(self._parents, session.id, session.parent_id)
        seat = BoundSession(session.id, session.directory)
        _keep(self._known, session.id, seat)
        return seat


def _keep(known: OrderedDict[K, V], key: K, value: V) -> None:
    """Remember the latest of what there may be any number of."""
    known[key] = value
    known.move_to_end(key)
    if len(known) > KNOWN_SESSIONS:
        known.popitem(last=False)


def _no_session() -> InvalidParamsError:
    return _nothing_there(SESSION_FIELD, "no such session")


def _no_workspace() -> InvalidParamsError:
    return _nothing_there(WORKSPACE_FIELD, "no such workspace")


def _nothing_there(field: str, text: str) -> InvalidParamsError:
    return InvalidParamsError(f"{field}: {text}", violations=(Violation(field, text),))
