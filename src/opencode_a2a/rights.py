"""Rights: what a caller may do, and what the agent may do for a caller.

``config`` gives each credential a ceiling, and a request may narrow it; nothing widens it.
``turns`` has OpenCode keep to what is left. OpenCode's permissions are known by name alone.
"""

import difflib
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Final, Literal, TypeAlias, get_args

Capability: TypeAlias = Literal["session_shell", "workspace_mutation"]
"""What a credential can be allowed beyond the ordinary."""
CAPABILITIES: frozenset[Capability] = frozenset(get_args(Capability))

Action: TypeAlias = Literal["allow", "ask", "deny"]
Profile: TypeAlias = Literal["read-only", "ask", "auto", "unattended"]

STRUCTURED_OUTPUT: Final = "StructuredOutput"
READING: Final = frozenset(
    {
        *("read", "glob", "grep", "list", "lsp", "skill", "todoread", "todowrite"),
        *("webfetch", "websearch", "codesearch", "question"),
        # They stand before other permissions, and allow nothing by themselves.
        *("external_directory", "doom_loop"),
        # OpenCode's own: what it says of a wrong call, and how an answer by schema is given.
        *("invalid", STRUCTURED_OUTPUT),
    }
)
"""Permissions that change nothing. All others can, those of tools that nobody has heard of too."""
PERMISSIONS: Final = frozenset(
    {
        *("bash", "edit", "task", "read", "glob", "grep", "list", "lsp", "skill", "todoread"),
        *("todowrite", "webfetch", "websearch", "codesearch", "external_directory", "doom_loop"),
    }
)
"""What OpenCode itself asks for, in any version 1; tools from outside are asked for by name."""
ASKED_AS: Final[Mapping[str, str]] = {
    **dict.fromkeys(("write", "patch", "multiedit", "apply_patch"), "edit"),
    "shell": "bash",
    "subagent": "task",
}
"""Names of tools, and of OpenCode 2, that a rule may be written for by mistake."""
SUBAGENT: Final = "task"
QUESTION: Final = "question"
_WIDTH: Mapping[Action, int] = {"deny": 0, "ask": 1, "allow": 2}


@dataclass(frozen=True, slots=True)
class Rights:
    """What the agent may do, at the most; OpenCode's own configuration may allow less."""

    changes: Action = "allow"
    """What becomes of anything that could change something."""
    waits: bool = True
    """Whether a person may be waited for."""

    def __and__(self, other: "Rights") -> "Rights":
        """Return what both allow."""
        changes = min(self.changes, other.changes, key=_WIDTH.__getitem__)
        waits = self.waits and other.waits
        # Nobody is there to be asked.
        return Rights("deny" if changes == "ask" and not waits else changes, waits)

    def __le__(self, other: "Rights") -> bool:
        """Whether nothing is allowed here that the other forbids."""
        return self & other == self

    def narrow(self, permission: str, action: Action) -> Action:
        """Return what becomes of a permission for which the deployment has this action."""
        if permission not in READING:
            action = min(action, self.changes, key=_WIDTH.__getitem__)
        # A sub-agent asks for less than the session it works for: OpenCode hands down what is
        # denied, but not what is to be asked for. One that is resumed brings its own rules.
        if permission == SUBAGENT and self.changes != "allow":
            return "deny"
        if not self.waits and (action == "ask" or permission == QUESTION):
            return "deny"
        return action


def unmatched(names: Iterable[str], known: Iterable[str] = ()) -> Iterator[tuple[str, str | None]]:
    """Yield the permissions in rules that nothing is ever asked by, each with what may be meant.

    ``known`` are permissions beyond OpenCode's own, for tools from outside; they may hold ``*``.
    """
    asked = {*PERMISSIONS, *known}
    for name in dict.fromkeys(names):
        # Two patterns have a match in common if either matches the other as it is written.
        if any(fnmatchcase(one, name) or fnmatchcase(name, one) for one in asked):
            continue
        near = difflib.get_close_matches(name, sorted(asked), n=1, cutoff=0.7)
        yield name, ASKED_AS.get(name) or next(iter(near), None)


def outside(tools: Iterable[str], servers: Iterable[str]) -> list[str]:
    """Return the permissions that OpenCode asks by for its tools, and for those of MCP servers."""
    unasked = {*ASKED_AS, QUESTION, "invalid"}
    named = [re.sub(r"[^a-zA-Z0-9_-]", "_", server) for server in servers]
    return [*(tool for tool in tools if tool not in unasked), *(f"{name}_*" for name in named)]


def never_asked(name: str, meant: str | None) -> str:
    """Say that a rule has no effect, and what to write instead."""
    remedy = f"did you mean {meant}?" if meant else "check the name of the tool"
    return f"OpenCode never asks for {name}, so the rule for it has no effect; {remedy}"


@dataclass(frozen=True, slots=True)
class Budget:
    """What a caller may spend; 0 is no limit."""

    cost_per_day: float = 0.0
    tokens_per_day: int = 0
    turns: int = 0
    """Running at the same time."""


UNLIMITED: Final = Budget()
FULL: Final = Rights()
"""Nothing is narrowed: the deployment alone decides."""
NARROWEST: Final = Rights(changes="deny")
PROFILES: Mapping[str, Rights] = {
    "read-only": NARROWEST,
    "ask": Rights(changes="ask"),
    "auto": FULL,
    "unattended": Rights(waits=False),
}
