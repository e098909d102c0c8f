"""What a session may do while it works for somebody: rights, as OpenCode's rules of the session.

``turn`` and the methods that give a session work call ``SessionRights`` first. OpenCode's rules of
a session come after those of its agent, the last that fits decides, and further ones can only be
added at the end. So what is added here repeats what the agent may do, narrowed, behind a mark.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from weakref import WeakValueDictionary

from opencode_a2a.errors import UpstreamPayloadError
from opencode_a2a.ids import SessionId
from opencode_a2a.opencode.client import Location, OpenCode
from opencode_a2a.opencode.types import PermissionRule, Session, SessionChanges
from opencode_a2a.rights import FULL, QUESTION, READING, SUBAGENT, Action, Rights

MARK = PermissionRule(permission="opencode-a2a", pattern="*", action="deny")
"""Stands before the rules of this service; there is no such permission."""
DEFAULT_AGENT = "build"
KNOWN_SESSIONS = 10_000


def narrowed(rights: Rights, base: Sequence[PermissionRule]) -> list[PermissionRule]:
    """Return rules which, after those of an agent, leave it what the rights allow of them."""
    rules: list[PermissionRule] = []
    if rights.changes == "deny" or not any(r.permission == r.pattern == "*" for r in base):
        # What no rule names is asked for.
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
    for name in names:  # a rule for `*` was narrowed as one for changes
        rules += projected(rights, base, name)
    return rules


def projected(rights: Rights, base: Sequence[PermissionRule], name: str) -> list[PermissionRule]:
    """Return the rules for one permission that follow from rights and the rules of an agent."""
    own = [_rule(name, r.pattern, rights.narrow(name, r.action)) for r in base if r.covers(name)]
    return [_rule(name, "*", rights.narrow(name, "ask")), *own]


def _rule(permission: str, pattern: str, action: Action) -> PermissionRule:
    return PermissionRule(permission=permission, pattern=pattern, action=action)


def foreign(session: Session) -> list[PermissionRule]:
    """Return the rules of a session that are not of this service."""
    rules = session.permission
    return rules[: rules.index(MARK)] if MARK in rules else rules


@dataclass(eq=False, slots=True)
class Work:
    """What a session works on, or is about to, for somebody."""

    session_id: SessionId
    rights: Rights
    begun: Rights | None = None
    """What it was begun with: its rights, or less if it joined other work. None: it was not."""
    done: asyncio.Event = field(default_factory=asyncio.Event)


class WiderWorkError(Exception):
    """A prompt would join work with wider rights than its own."""

    def __init__(self, work: Work | None) -> None:
        super().__init__("Work with wider rights is running in the session")
        self.work = work
        """None if it is not known: it was begun at OpenCode's own terminal, or before a restart."""


class SessionRights:
    """The rights of the sessions that work, and the rules that were added for them."""

    def __init__(
        self, opencode: OpenCode, lineage: Callable[[SessionId], Awaitable[Sequence[SessionId]]]
    ) -> None:
        """Use ``lineage``, which returns a session and those above it."""
        self._opencode = opencode
        self._lineage = lineage
        self._work: dict[SessionId, list[Work]] = {}
        self._marked: OrderedDict[SessionId, None] = OrderedDict()
        """Sessions that have rules of this service."""
        self._limiting: WeakValueDictionary[SessionId, asyncio.Lock] = WeakValueDictionary()
        """Held while rules are set, so that nothing begins before they are."""

    def note(self, session: Session) -> None:
        """Remember whether a session has rules of this service, of an earlier process perhaps."""
        if MARK in session.permission:
            self._marked[session.id] = None
            if len(self._marked) > KNOWN_SESSIONS:
                # It stays as narrow as it is until its next narrowed prompt.
                self._marked.popitem(last=False)

    def register(self, session_id: SessionId, rights: Rights) -> Work:
        """Note what a session is going to work on, until ``end``."""
        work = Work(session_id, rights)
        self._work.setdefault(session_id, []).append(work)
        return work

    def end(self, work: Work) -> None:
        """Forget some work; whoever gave it and whoever follows it may both say so."""
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
        """Have a session keep to the rights of some work, before it is given a prompt for it.

        OpenCode reads the rules of a session once, when it begins to work. A prompt that comes
        later joins that work, under its rules: raise WiderWorkError if they are wider. ``tools``
        takes tools away. Return the agent to prompt, and what the prompt has to say as ``tools``:
        nothing, unless it ``widens`` the session.
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
        """Have a session keep to rights from its next prompt on; return the agent they are for.

        ``tools`` takes tools away, or gives back what the rights allow of them.
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
        """Take back what narrowed a session; return what its next prompt has to say as ``tools``.

        With ``tools`` OpenCode replaces all rules of a session. Rules that cannot be said so are
        repeated instead, but then sub-agents still get what was denied before.
        """
        session = await self._opencode.session(session_id)
        kept = foreign(session)
        if any(rule.pattern != "*" or rule.action != "deny" for rule in kept):
            await self.narrow(session_id, FULL, agent, at)
            return None
        del self._marked[session_id]
        return {rule.permission: False for rule in (*kept, MARK)}
