"""Sessions of OpenCode: which one a turn runs in, where, whose it is, and what it may do there.

A context has one session for each place it runs in, which is created for the first turn there and
kept. A caller may name a session: one that belongs to nobody is claimed for the length of the
prompt, and becomes the caller's when OpenCode takes the prompt. To a caller the sessions of others,
and of their sub-agents, do not exist. Turns of one session run one after the other.

``Sessions`` finds and creates them. Before a session is given work, ``SessionRights`` makes it keep
to the rights of that work. In OpenCode the rules of a session follow those of its agent, the last
rule that fits decides, and a session's rules can only be appended to. So the service appends a
mark, and after it the rules of the agent, narrowed to the rights.
"""

import asyncio
import os
from collections.abc import (
    AsyncGenerator,
    Awaitable,
    Callable,
    Iterable,
    Mapping,
    Sequence,
)
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal
from weakref import WeakValueDictionary

from opencode_a2a.bounds import Recent
from opencode_a2a.clock import now_ms
from opencode_a2a.errors import (
    InvalidParamsError,
    SessionNotFoundError,
    UpstreamPayloadError,
)
from opencode_a2a.ids import ContextId, Principal, SessionId
from opencode_a2a.messages import Routing
from opencode_a2a.opencode.calls import well_formed
from opencode_a2a.opencode.driver import Driver, Location
from opencode_a2a.opencode.types import PermissionRule, Session, SessionChanges, SessionDraft
from opencode_a2a.rights import FULL, QUESTION, READING, SUBAGENT, Action, Rights
from opencode_a2a.store import tasks as task_rows
from opencode_a2a.store.database import Database, Write
from opencode_a2a.telemetry import draw_id

SESSION_FIELD = "metadata.shared.session.id"
DIRECTORY_FIELD = "metadata.opencode.directory"
WORKSPACE_FIELD = "metadata.opencode.workspace.id"
PLAN_FIELD = "metadata.opencode.plan"
PLAN_AGENT = "plan"
"""OpenCode's agent that plans. OpenCode only tells it not to change anything (1.18), and lets it
run any command; this service narrows its rights."""
COMMAND_FIELD = "metadata.opencode.command"
AGENT_FIELD = "metadata.opencode.agent"
DERIVED_CONTEXT = "ctx:opencode-session:"
"""Begins the id of a context that stands for a session which this service did not create."""
RECENT_SESSIONS = 1000
"""How many sessions are searched for one that was created moments ago."""
KNOWN_SESSIONS = 10_000
"""How many sessions and contexts are remembered; the rest is in the database or in OpenCode."""
DEFAULT_AGENT = "build"
MARK = PermissionRule(permission="opencode-a2a", pattern="*", action="deny")
"""Precedes the rules of this service in a session; there is no such permission."""
MAX_DEPTH = 16
"""How deep sub-agents may be nested; nobody may use a session below that."""

ContextPlace = tuple[Principal, ContextId, str]
"""A context in one place it runs in: a directory or a workspace, empty for the root."""


class WorkspaceRoot:
    """The directory below which callers may choose one.

    Without a root, everything runs where OpenCode was started, and callers cannot choose.
    """

    def __init__(self, root: Path | None, *, allow_override: bool) -> None:
        self.root = None if root is None else os.path.realpath(root)
        self._allow_override = allow_override

    def directory(self, named: str | None, field: str) -> str | None:
        """Return the real path of a directory that a request names; the root for none."""
        if named is None or not named.strip():
            return self.root
        if "\0" in named:
            raise InvalidParamsError.of(field, "must be a path")
        if self.root is None:
            raise InvalidParamsError.of(
                field, "cannot be chosen: the service has no OPENCODE_WORKSPACE_ROOT; leave it out"
            )
        path = os.path.realpath(Path(self.root) / named.strip())
        if path != self.root and not self._allow_override:
            raise InvalidParamsError.of(field, "may not be chosen here; leave it out")
        if not Path(path).is_relative_to(self.root):
            raise InvalidParamsError.of(field, "must be inside the workspace")
        # For a name that is too long os.path says that it does not exist; pathlib raises an error.
        # A root on another machine cannot be checked.
        if os.path.isdir(self.root) and not os.path.isdir(path):
            raise InvalidParamsError.of(field, "must be an existing directory")
        return path

    def holds(self, path: str, workspace_id: str | None = None) -> bool:
        """Whether callers may run something at a real path, or in a workspace of OpenCode's own."""
        inside = self.root is None or Path(path).is_relative_to(self.root)
        return workspace_id is not None or inside


@dataclass(frozen=True, slots=True)
class TurnSession:
    """A session that a turn may use."""

    session_id: SessionId
    location: Location
    named: bool = False
    """Whether it was asked for by its id, by the caller or by an earlier turn or process of the
    task: no other session can stand in for it."""
    claimed: bool = False
    """Whether the caller has only a claim on it, which lapses unless ``Sessions.confirm`` says that
    OpenCode took the prompt."""
    link: Write | None = None
    """Lets the context keep a new session; to be written before the session is prompted."""
    replaces: bool = False
    """Whether the context had a session before, in an OpenCode that is lost."""


class TurnLock(asyncio.Lock):
    """Held by the turn, or the method, that works in a session."""

    users = 0
    """How many hold it or wait for it. ``locked`` is no substitute: it is False at the moment at
    which the lock passes from one to the next."""

    async def acquire(self) -> Literal[True]:
        self.users += 1
        try:
            return await super().acquire()
        except BaseException:
            self.users -= 1
            raise

    def release(self) -> None:
        self.users -= 1
        super().release()


class Places:
    """The owners of workspaces (by id) and worktrees (by directory) that callers made."""

    def __init__(self, database: Database, upstream: str) -> None:
        self._database = database
        self._upstream = upstream

    async def own(self, principal: Principal, *names: str) -> None:
        await self._database.write(task_rows.own_places, principal, self._upstream, names)

    async def visible(self, principal: Principal, names: Iterable[str]) -> list[str]:
        """Return those that the caller may see: their own, and those of no caller."""
        asked = [*names]
        return (
            await self._database.read(task_rows.visible_places, principal, asked) if asked else []
        )

    async def forget(self, *names: str) -> None:
        await self._database.write(task_rows.forget_places, names)


class Sessions:
    """The sessions of one OpenCode, whose name is ``upstream``.

    First come the methods that say whose a session is, then those that find or create the session
    for a turn.
    """

    def __init__(
        self,
        database: Database,
        opencode: Driver,
        workspace: WorkspaceRoot,
        claim_seconds: float,
        upstream: str,
    ) -> None:
        self.places = Places(database, upstream)
        self.rights = SessionRights(opencode, self._lineage)
        self.turn_locks: WeakValueDictionary[SessionId, TurnLock] = WeakValueDictionary()
        """The turn lock of each session; it exists for as long as somebody holds or wants it."""
        self._database = database
        self._opencode = opencode
        self._workspace = workspace
        self._upstream = upstream
        self._claim_ms = int(claim_seconds * 1000)
        self._creating: WeakValueDictionary[ContextPlace, asyncio.Lock] = WeakValueDictionary()
        """Held while a turn finds or creates the session of a context in a place."""
        self._unanswered = Recent[ContextPlace, str](KNOWN_SESSIONS)
        """The keys of sessions that OpenCode was asked to create, until it answers."""
        self._known = Recent[SessionId, TurnSession](KNOWN_SESSIONS)
        """Sessions that OpenCode was seen to have, so that it need not be asked again."""
        self._parents = Recent[SessionId, SessionId | None](KNOWN_SESSIONS)
        """The parent of each sub-agent's session; OpenCode never changes it."""
        self._links = Recent[ContextPlace, SessionId](KNOWN_SESSIONS)
        """The session of each context in a place, as it is stored or about to be."""
        self._owners = Recent[SessionId, Principal](KNOWN_SESSIONS)
        """The owners of the sessions in ``_links``."""

    # Whose a session is: one rule for turns, methods and lists

    async def _lineage(self, session_id: SessionId) -> list[SessionId]:
        """Return a session and its ancestors: a sub-agent's session belongs to its root's owner."""
        lineage = [session_id]
        while True:
            last = lineage[-1]
            if last not in self._parents:
                try:
                    session = await self._opencode.session(last)
                except SessionNotFoundError:
                    return lineage
                self._parents[last] = session.parent_id
            parent = self._parents[last]
            if parent is None:
                return lineage
            if len(lineage) == MAX_DEPTH:
                raise SessionNotFoundError(session_id=session_id)
            lineage.append(parent)

    async def _strangers(
        self, principal: Principal, session_ids: Sequence[SessionId]
    ) -> set[SessionId]:
        """Return the sessions among these that belong to another principal."""
        if not session_ids:
            return set()
        # A link that was made a moment ago may not be stored yet.
        theirs = {s for s in session_ids if self._owners.get(s, principal) != principal}
        return theirs | await self._database.read(
            task_rows.sessions_of_others, principal, session_ids, now_ms()
        )

    async def visible(self, principal: Principal, sessions: Sequence[Session]) -> list[Session]:
        """Return the sessions that a caller may know of and use."""
        lineages: dict[SessionId, list[SessionId]] = {}
        for session in sessions:
            self._parents[session.id] = session.parent_id
        for session in sessions:
            if self._workspace.holds(session.directory, session.workspace_id):
                with suppress(SessionNotFoundError):
                    lineages[session.id] = await self._lineage(session.id)
        involved = dict.fromkeys(one for lineage in lineages.values() for one in lineage)
        hidden = await self._strangers(principal, [*involved])
        return [
            session
            for session in sessions
            if session.id in lineages and not hidden.intersection(lineages[session.id])
        ]

    async def find(self, principal: Principal, session_id: SessionId) -> Session:
        """Return a session that a caller may use, as OpenCode has it now."""
        if well_formed("ses", session_id) and not await self._strangers(principal, [session_id]):
            session = await self._opencode.session(session_id)
            if await self.visible(principal, [session]):
                return session
        raise SessionNotFoundError(session_id=session_id[:128])

    async def owns(self, principal: Principal, session: Session) -> bool:
        """Whether a session, or an ancestor of it, belongs to the caller."""
        for session_id in await self._lineage(session.id):
            owner = self._owners.get(session_id)
            if owner is None:
                owner = await self._database.read(task_rows.owner_of_session, session_id, now_ms())
            if owner == principal:
                return True
        return False

    async def own(self, principal: Principal, session: Session) -> None:
        """Store that a session which was created for a caller belongs to them."""
        await self._database.write(task_rows.own_session, principal, session.id, self._upstream)
        self._remember(session)

    async def _hold(self, principal: Principal, session_id: SessionId, ms: int | None) -> bool:
        """Claim a session with its ancestors; return False if it belongs to somebody else.

        The claim lasts for ``ms`` milliseconds; with None it does not expire.
        """
        lineage = await self._lineage(session_id)
        if any(self._owners.get(one, principal) != principal for one in lineage):
            return False
        now = now_ms()
        until = None if ms is None else now + ms
        return await self._database.write(
            task_rows.claim_sessions, principal, lineage, self._upstream, now, until
        )

    async def release(self, principal: Principal, session_id: SessionId) -> None:
        """Give up the claim on a session in which nothing was changed."""
        lineage = await self._lineage(session_id)
        await self._database.write(task_rows.release_sessions, principal, lineage)

    @asynccontextmanager
    async def claimed(self, principal: Principal, session_id: SessionId) -> AsyncGenerator[None]:
        """Claim a session while it is changed; after the change it belongs to the caller."""
        if not await self._hold(principal, session_id, self._claim_ms):
            raise SessionNotFoundError(session_id=session_id)
        try:
            yield
        except BaseException:
            await self.release(principal, session_id)
            raise
        await self._hold(principal, session_id, None)

    # Which session a turn runs in

    async def check(self, principal: Principal, routing: Routing, arguments: str = "") -> None:
        """Refuse a routing that names something missing or forbidden, before a task exists.

        ``arguments`` are those of the command, if there is one.
        """
        location, _ = self.locate(routing)
        workspace = routing.workspace_id
        if workspace is not None and not await self.places.visible(principal, [workspace]):
            raise InvalidParamsError.of(WORKSPACE_FIELD, "is not the id of a workspace")
        if routing.agent is not None or routing.plan:
            agents = await self._opencode.agents(at=location)
            names = [agent.name for agent in agents if agent.selectable]
            if routing.agent not in (None, *names):
                raise InvalidParamsError.of(
                    AGENT_FIELD, f"is not one of the agents: {', '.join(names)}"
                )
            if routing.plan and PLAN_AGENT not in names:
                raise InvalidParamsError.of(
                    PLAN_FIELD, f"needs OpenCode's agent {PLAN_AGENT}, which is off"
                )
        if routing.command is not None:
            if routing.plan or routing.output_schema is not None:
                # OpenCode runs a command's shell commands at once, and takes no schema with one.
                raise InvalidParamsError.of(
                    COMMAND_FIELD, "cannot be used with a plan or a schema for the answer"
                )
            commands = {one.name: one for one in await self._opencode.command_sources(at=location)}
            if routing.command not in commands:
                raise InvalidParamsError.of(
                    COMMAND_FIELD, f"is not one of the commands: {', '.join(commands)}"
                )
            if problem := commands[routing.command].unsafe_arguments(arguments):
                raise InvalidParamsError.of("message.parts", problem)
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
            raise InvalidParamsError.of(SESSION_FIELD, "is not the id of a session") from None

    async def bind(
        self, principal: Principal, context_id: ContextId, routing: Routing, *, fresh: bool = False
    ) -> TurnSession:
        """Return the session for a turn: the one named, the context's own, or a new one.

        ``fresh`` says that the context was created for this turn, so that it has none.
        """
        location, name = self.locate(routing)
        if routing.session_id is not None:
            return await self._claim(principal, SessionId(routing.session_id))
        place = (principal, context_id, name)
        # A second message of a context that has only just been created must find the same session.
        async with self._creating.setdefault(place, asyncio.Lock()):
            session_id, elsewhere = self._links.get(place), False
            if session_id is None and not fresh:
                found = await self._database.read(task_rows.linked_session, *place)
                elsewhere = found is not None and found.upstream != self._upstream
                session_id = found.session_id if found and not elsewhere else None
            if session_id is None and context_id.startswith(DERIVED_CONTEXT):
                session_id = SessionId(context_id.removeprefix(DERIVED_CONTEXT))
                return await self._claim(principal, session_id)
            if session_id is not None:
                try:
                    return await self._load(session_id)
                except SessionNotFoundError:
                    await self.forget(session_id)
            # OpenCode may create a session whose answer gets lost. A key in its metadata lets the
            # next try find it, instead of leaving it behind and creating another.
            key, session = self._unanswered.get(place), None
            if key is not None:
                for recent in await self._opencode.sessions(at=location, limit=RECENT_SESSIONS):
                    match recent.metadata:
                        case {"a2a": {"key": found}} if found == key:
                            session = recent
                            break
                        case _:
                            pass
            if session is None:
                key = key or draw_id(16)
                self._unanswered[place] = key
                draft = SessionDraft(metadata={"a2a": {"contextId": context_id, "key": key}})
                session = await self._opencode.create_session(draft, at=location)
            self._unanswered.pop(place, None)
            bound = self._remember(session)
            return replace(bound, link=self._link(place, session.id), replaces=elsewhere)

    async def _claim(self, principal: Principal, session_id: SessionId) -> TurnSession:
        """Return a session that was asked for by its id, claimed for the length of the prompt."""
        if not well_formed("ses", session_id):
            raise SessionNotFoundError
        session = await self._load(session_id)
        if not await self._hold(principal, session_id, self._claim_ms):
            raise SessionNotFoundError
        return replace(session, named=True, claimed=True)

    async def confirm(
        self, session: TurnSession, principal: Principal, context_id: ContextId, routing: Routing
    ) -> None:
        """Let the context keep a claimed session, now that OpenCode took the prompt in it."""
        place = (principal, context_id, self.locate(routing)[1])
        await self._database.write(self._link(place, session.session_id))
        await self._hold(principal, session.session_id, None)

    def _link(self, place: ContextPlace, session_id: SessionId) -> Write:
        """Let a context use a session from now on; return the write that stores it."""
        self._links[place] = session_id
        self._owners[session_id] = place[0]
        return lambda connection: task_rows.link_session(
            connection, *place, session_id, self._upstream, now_ms()
        )

    async def forget(self, session_id: SessionId, *, insist: bool = False) -> None:
        """Forget a session that no longer exists, here and in the database.

        ``insist`` waits for a database that is unreachable.
        """
        self._known.pop(session_id, None)
        self._owners.pop(session_id, None)
        for place in [place for place, known in self._links.items() if known == session_id]:
            del self._links[place]
        write = self._database.write_until_stored if insist else self._database.write
        await write(task_rows.forget_session, session_id)

    def knows(self, session_id: SessionId) -> bool:
        """Whether OpenCode was seen to have a session, or its ancestor."""
        return session_id in self._known or session_id in self._parents

    def forget_links(self) -> None:
        """Have the sessions of contexts read from the database again.

        Another OpenCode may have them by now.
        """
        self._links.clear()

    def same_place(self, one: Routing, other: Routing) -> bool:
        """Whether two messages of a context would run in the same session of it."""
        return self.locate(one)[1] == self.locate(other)[1]

    def locate(self, routing: Routing) -> tuple[Location, str]:
        """Return where a turn runs, and the name of that place in the links of contexts."""
        if routing.workspace_id is not None:
            if not well_formed("wrk", routing.workspace_id):
                raise InvalidParamsError.of(WORKSPACE_FIELD, "is not the id of a workspace")
            location = Location(workspace=routing.workspace_id)
            return location, f"workspace:{routing.workspace_id}"
        directory = self._workspace.root
        if routing.directory is not None:
            directory = self._workspace.directory(routing.directory, DIRECTORY_FIELD)
        name = "" if directory == self._workspace.root else f"directory:{directory}"
        return Location(directory=directory), name

    async def _load(self, session_id: SessionId) -> TurnSession:
        known = self._known.get(session_id)
        return known or self._remember(await self._opencode.session(session_id))

    def _remember(self, session: Session) -> TurnSession:
        if not self._workspace.holds(session.directory, session.workspace_id):
            raise SessionNotFoundError  # to the caller it does not exist
        self._parents[session.id] = session.parent_id
        if session.permission:
            self.rights.note(session)
        bound = TurnSession(session.id, Location(directory=session.directory))
        self._known[session.id] = bound
        return bound


def narrowed(rights: Rights, base: Sequence[PermissionRule]) -> list[PermissionRule]:
    """Return rules to append to those of an agent: they leave what the rights allow."""
    rules: list[PermissionRule] = []
    if rights.changes == "deny" or not any(r.permission == r.pattern == "*" for r in base):
        # OpenCode asks for permissions that no rule covers.
        rules.append(_rule("*", "*", rights.narrow("*", "ask")))
    if rights.changes != "deny":
        rules += [
            _rule(r.permission, r.pattern, rights.narrow(r.permission, r.action)) for r in base
        ]
    names: Iterable[str] = ()
    if rights.changes != "allow":
        names = (*sorted(READING), SUBAGENT)
    elif not rights.waits:
        names = (QUESTION,)
    for name in names:  # rules for `*` were narrowed as if they were about changes
        rules += projected(rights, base, name)
    return rules


def projected(rights: Rights, base: Sequence[PermissionRule], name: str) -> list[PermissionRule]:
    """Return the rules for one permission: those of an agent that cover it, narrowed."""
    own = [_rule(name, r.pattern, rights.narrow(name, r.action)) for r in base if r.covers(name)]
    return [_rule(name, "*", rights.narrow(name, "ask")), *own]


def _rule(permission: str, pattern: str, action: Action) -> PermissionRule:
    return PermissionRule(permission=permission, pattern=pattern, action=action)


def foreign(session: Session) -> list[PermissionRule]:
    """Return the rules of a session that this service did not add."""
    rules = session.permission
    return rules[: rules.index(MARK)] if MARK in rules else rules


@dataclass(eq=False, slots=True)
class Work:
    """A turn or an errand, as work in a session that has to keep to rights."""

    session_id: SessionId
    rights: Rights
    begun: Rights | None = None
    """The rights that it began with: its own, or less if it joined other work. None before that."""
    done: asyncio.Event = field(default_factory=asyncio.Event)


class WiderWorkError(Exception):
    """A prompt would join work that has wider rights than the prompt."""

    def __init__(self, work: Work | None) -> None:
        super().__init__("Work with wider rights is running in the session")
        self.work = work
        """The wider work. None if this process did not begin it: somebody did at OpenCode's own
        terminal, or an earlier process."""


class SessionRights:
    """Makes the sessions of one OpenCode keep to the rights of the work that they do."""

    def __init__(
        self, opencode: Driver, lineage: Callable[[SessionId], Awaitable[Sequence[SessionId]]]
    ) -> None:
        """Use ``lineage`` to find the ancestors of a session; it returns the session first."""
        self._opencode = opencode
        self._lineage = lineage
        self._work: dict[SessionId, list[Work]] = {}
        self._marked = Recent[SessionId, None](KNOWN_SESSIONS)
        """Sessions to which this service has added rules.

        One that is forgotten stays narrow until its next narrowed prompt.
        """
        self._limiting: WeakValueDictionary[SessionId, asyncio.Lock] = WeakValueDictionary()
        """Held while the rules of a session are set, so that no other work begins meanwhile."""

    def note(self, session: Session) -> None:
        """Remember a session with rules that this service, or an earlier process of it, added."""
        if MARK in session.permission:
            self._marked[session.id] = None

    def register(self, session_id: SessionId, rights: Rights) -> Work:
        """Register work that a session is about to be given; ``end`` ends it."""
        work = Work(session_id, rights)
        self._work.setdefault(session_id, []).append(work)
        return work

    def end(self, work: Work) -> None:
        """End some work; a second call does nothing, since two parts of the service may call."""
        if work.done.is_set():
            return
        work.done.set()
        self._work[work.session_id].remove(work)
        if not self._work[work.session_id]:
            del self._work[work.session_id]

    async def restrict(
        self,
        work: Work,
        agent: str | None,
        at: Location,
        tools: Mapping[str, bool] | None = None,
        *,
        widens: bool = False,
    ) -> tuple[str | None, dict[str, bool] | None]:
        """Make a session keep to the rights of some work, before it is given a prompt for it.

        OpenCode reads the rules of a session once, when it begins to work. A prompt that comes
        later joins that work, under its rules: raise WiderWorkError if they are wider. ``tools``
        takes tools away. Return the agent to prompt, and the field ``tools`` of the prompt, which
        is None unless the prompt ``widens`` the session.
        """
        lineage: Sequence[SessionId] = [work.session_id]
        if work.rights != FULL:  # nothing is wider than that
            lineage = await self._lineage(work.session_id)
        async with self._limiting.setdefault(work.session_id, asyncio.Lock()):
            begun = {
                one: [
                    other
                    for other in self._work.get(one, ())
                    if other is not work and other.begun is not None
                ]
                for one in lineage
            }
            for other in (other for others in begun.values() for other in others):
                if other.begun is not None and not other.begun <= work.rights:
                    raise WiderWorkError(other)
            joined = begun[work.session_id]
            if joined and tools:
                raise WiderWorkError(joined[0])
            if work.rights != FULL and work.begun is None:
                busy = await self._opencode.session_status(at=at)
                if any(one in busy and not begun[one] for one in lineage):
                    raise WiderWorkError(None)
            rights, said, marked = work.rights, None, work.session_id in self._marked
            for other in joined:
                rights &= other.begun or rights
            if joined:
                pass
            elif rights == FULL and not tools and widens:
                said = await self.widen(work.session_id, agent, at) if marked else None
            elif rights != FULL or tools or marked:
                agent = await self.narrow(work.session_id, rights, agent, at, tools)
            work.begun = rights
            return agent, said

    async def narrow(
        self,
        session_id: SessionId,
        rights: Rights,
        agent: str | None,
        at: Location,
        tools: Mapping[str, bool] | None = None,
    ) -> str:
        """Make a session keep to rights from its next prompt on; return the agent to prompt.

        ``tools`` takes tools away (False), or gives back what the rights allow of them (True).
        """
        session = await self._opencode.session(session_id)
        agents = {one.name: one for one in await self._opencode.agents(at=at)}
        if agent is None:
            agent = (await self._opencode.config(at=at)).default_agent or DEFAULT_AGENT
        base = [*(agents[agent].permission if agent in agents else ()), *foreign(session)]
        rules = [MARK, *narrowed(rights, base)]
        for name, offered in (tools or {}).items():
            if not offered:
                rules.append(_rule(name, "*", "deny"))
            else:
                rules += narrowed(rights, base) if name == "*" else projected(rights, base, name)
        if session.permission[-len(rules) :] != rules:
            changes = SessionChanges(permission=rules)
            session = await self._opencode.update_session(session_id, changes, at=at)
            if session.permission[-len(rules) :] != rules:
                raise UpstreamPayloadError(
                    "This version of OpenCode cannot limit what a session may do; only the profile "
                    "auto can be used with it"
                )
        self.note(session)
        return agent

    async def widen(
        self, session_id: SessionId, agent: str | None, at: Location
    ) -> dict[str, bool] | None:
        """Take back the rules that narrowed a session; return ``tools`` for its next prompt.

        With ``tools`` OpenCode replaces all rules of a session. Rules that it cannot express are
        appended again instead (None), but then sub-agents still inherit the denials from before.
        """
        session = await self._opencode.session(session_id)
        kept = foreign(session)
        if any(rule.pattern != "*" or rule.action != "deny" for rule in kept):
            await self.narrow(session_id, FULL, agent, at)
            return None
        del self._marked[session_id]
        return {rule.permission: False for rule in (*kept, MARK)}
