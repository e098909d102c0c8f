"""The rights of a caller, and of the agent when it works for a caller.

``config`` gives each credential its rights; a request may narrow them, and nothing widens them.
``turns`` makes OpenCode respect the result. Of OpenCode, only the names of permissions are known.
"""

import difflib
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Final, Literal, TypeAlias, get_args

Capability: TypeAlias = Literal["session_shell", "workspace_mutation"]
"""Something that only credentials with an explicit right may do."""
CAPABILITIES: frozenset[Capability] = frozenset(get_args(Capability))

Action: TypeAlias = Literal["allow", "ask", "deny"]
Profile: TypeAlias = Literal["read-only", "ask", "auto", "unattended"]

STRUCTURED_OUTPUT: Final = "StructuredOutput"
READING: Final = frozenset(
    {
        "read", "glob", "grep", "list", "lsp", "skill", "todoread", "todowrite",
        "webfetch", "websearch", "codesearch", "question",
        # They are asked for before other permissions, and allow nothing by themselves.
        "external_directory", "doom_loop",
        # OpenCode's internal tools: the reply to an invalid call, and the answer by schema.
        "invalid", STRUCTURED_OUTPUT,
    }
)  # fmt: skip
"""Permissions for tools that change nothing; any other tool, even an unknown one, may."""
PERMISSIONS: Final = frozenset(
    {
        "bash", "edit", "task", "read", "glob", "grep", "list", "lsp", "skill", "todoread",
        "todowrite", "webfetch", "websearch", "codesearch", "external_directory", "doom_loop",
    }
)  # fmt: skip
"""The permissions of OpenCode's own tools, in all versions 1; other tools are asked by name."""
ASKED_AS: Final[Mapping[str, str]] = {
    **dict.fromkeys(("write", "patch", "multiedit", "apply_patch"), "edit"),
    "shell": "bash",
    "subagent": "task",
}
"""Names that rules may use by mistake (of tools, or in OpenCode 2), with the right permission."""
SUBAGENT: Final = "task"
SHELL: Final = "bash"
"""The permission to run a command line."""
QUESTION: Final = "question"
_WIDTH: Mapping[Action, int] = {"deny": 0, "ask": 1, "allow": 2}


@dataclass(frozen=True, slots=True)
class Rights:
    """The most that the agent may do; OpenCode's own configuration may allow less."""

    changes: Action = "allow"
    """The action for every permission that could change something."""
    waits: bool = True
    """Whether the turn may wait for a person."""

    def __and__(self, other: "Rights") -> "Rights":
        """Return the rights that both include."""
        changes = min(self.changes, other.changes, key=_WIDTH.__getitem__)
        waits = self.waits and other.waits
        # Nobody is there to be asked.
        return Rights("deny" if changes == "ask" and not waits else changes, waits)

    def __le__(self, other: "Rights") -> bool:
        """Whether the other rights include these."""
        return self & other == self

    def narrow(self, permission: str, action: Action) -> Action:
        """Return the action for a permission, at most the given one of the deployment."""
        if permission not in READING:
            action = min(action, self.changes, key=_WIDTH.__getitem__)
        # A sub-agent asks less often than the session that it works for: OpenCode passes on rules
        # that deny, but not rules that ask. A sub-agent that is resumed keeps its old rules.
        if permission == SUBAGENT and self.changes != "allow":
            return "deny"
        if not self.waits and (action == "ask" or permission == QUESTION):
            return "deny"
        return action


def at_least(action: Action, least: Action) -> bool:
    """Whether an action is as wide as the least that is needed, or wider."""
    return _WIDTH[action] >= _WIDTH[least]


def unmatched(names: Iterable[str], known: Iterable[str] = ()) -> Iterator[tuple[str, str | None]]:
    """Yield the permissions in rules that OpenCode never asks for, each with a suggestion.

    ``known`` are permissions of tools that are not OpenCode's own; they may contain ``*``.
    """
    asked = {*PERMISSIONS, *known}
    for name in dict.fromkeys(names):
        # Two patterns overlap if either matches the text of the other.
        if any(fnmatchcase(one, name) or fnmatchcase(name, one) for one in asked):
            continue
        near = difflib.get_close_matches(name, sorted(asked), n=1, cutoff=0.7)
        yield name, ASKED_AS.get(name) or next(iter(near), None)


def outside(tools: Iterable[str], servers: Iterable[str]) -> list[str]:
    """Return the permissions for tools beyond the built-in ones: by name, or of MCP servers."""
    unasked = {*ASKED_AS, QUESTION, "invalid"}
    named = [re.sub(r"[^a-zA-Z0-9_-]", "_", server) for server in servers]
    return [*(tool for tool in tools if tool not in unasked), *(f"{name}_*" for name in named)]


def never_asked(name: str, meant: str | None) -> str:
    """Return the warning about a rule without effect, with the remedy."""
    remedy = f"did you mean {meant}?" if meant else "check the name of the tool"
    return f"OpenCode never asks for {name}, so the rule for it has no effect; {remedy}"


@dataclass(frozen=True, slots=True)
class Budget:
    """The limits on what a caller may spend; 0 means no limit."""

    cost_per_day: float = 0.0
    tokens_per_day: int = 0
    turns: int = 0
    """Turns that may run at the same time."""


UNLIMITED: Final = Budget()
FULL: Final = Rights()
"""Rights that narrow nothing: only the deployment's configuration counts."""
NARROWEST: Final = Rights(changes="deny")
PROFILES: Mapping[str, Rights] = {
    "read-only": NARROWEST,
    "ask": Rights(changes="ask"),
    "auto": FULL,
    "unattended": Rights(waits=False),
}
