"""What a session may do while it works for somebody: rights, expressed as OpenCode's session rules.

``turn``, and the methods that give a session work, call ``SessionRights`` first. In OpenCode the
rules of a session follow those of its agent, the last rule that fits decides, and a session's rules
can only be appended to. So this module appends a mark, and after it the rules of the agent,
narrowed to the rights.
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
"""Precedes the rules of this service in a session; there is no such permission."""
DEFAULT_AGENT = "build"
KNOWN_SESSIONS = 10_000


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
        self, opencode: OpenCode, lineage: Callable[[SessionId], Awaitable[Sequence[SessionId]]]
    ) -> None:
        """Use ``lineage`` to find the ancestors of a session; it returns the session first."""
        self._opencode = opencode
        self._lineage = lineage
        self._work: dict[SessionId, list[Work]] = {}
        self._marked: OrderedDict[SessionId, None] = OrderedDict()
        """Sessions to which this service has added rules."""
        self._limiting: WeakValueDictionary[SessionId, asyncio.Lock] = WeakValueDictionary()
        """Held while the rules of a session are set, so that no other work begins meanwhile."""

    def note(self, session: Session) -> None:
        """Remember a session with rules that this service, or an earlier process of it, added."""
        if MARK in session.permission:
            self._marked[session.id] = None
            if len(self._marked) > KNOWN_SESSIONS:
                # The session that is forgotten stays narrow until its next narrowed prompt.
                self._marked.popitem(last=False)

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
