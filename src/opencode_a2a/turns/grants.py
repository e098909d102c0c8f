"""Grants: permissions that a person gave for more than one request. Pure.

A person who allows a permission "for this task" or "for this conversation" allows what OpenCode
itself would allow from then on, by the patterns that the request names, but for that task or
context alone. OpenCode is never told: each later request is answered with "once" by the grant.
"""

from dataclasses import dataclass

from opencode_a2a.events import Interrupted
from opencode_a2a.ids import ContextId, Principal, RequestId, TaskId
from opencode_a2a.rights import FULL, Rights


@dataclass(frozen=True, slots=True)
class Owner:
    """Whom an interrupt is put to."""

    task_id: TaskId | None
    """None when the work was begun by method."""
    context_id: ContextId
    principal: Principal
    rights: Rights = FULL
    """What the work may do at the most, whatever rules and people say."""


@dataclass(frozen=True, slots=True)
class Grant:
    id: str
    principal: Principal
    context_id: ContextId
    task_id: TaskId | None
    """None when it is for the whole context."""
    directory: str
    permission: str
    patterns: tuple[str, ...]
    """Those of OpenCode, which say what "always" would allow."""
    request_id: RequestId
    """The request that was answered with it."""
    given_at: int

    @property
    def by(self) -> str:
        """Recorded as the one who settled an interrupt."""
        return f"grant:{self.id}"

    def covers(self, owner: Owner, asked: Interrupted) -> bool:
        """Whether the person has allowed a request with this grant."""
        return (
            asked.type == "permission"
            and (owner.principal, owner.context_id) == (self.principal, self.context_id)
            and self.task_id in (None, owner.task_id)
            and (asked.permission, asked.directory) == (self.permission, self.directory)
            # A compound command has a pattern for each of its commands.
            and all(
                any(fits(pattern, allowed) for allowed in self.patterns)
                for pattern in asked.patterns or ["*"]
            )
        )


def fits(text: str, pattern: str) -> bool:
    """Whether a text fits a pattern, by the rules of OpenCode 1.x."""
    text, pattern = text.replace("\\", "/"), pattern.replace("\\", "/")
    # "ls *" is for a bare "ls" too.
    return (pattern.endswith(" *") and _matches(text, pattern[:-2])) or _matches(text, pattern)


def _matches(text: str, pattern: str) -> bool:
    """Compare without a regular expression, which some patterns would keep busy for hours.

    After a mismatch only the last star takes one character more: an earlier one need not, since
    whatever it could take the last one can take as well.
    """
    at = place = 0
    star, tried = -1, 0
    while at < len(text):
        if place < len(pattern) and pattern[place] == "*":
            star, tried = place, at
            place += 1
        elif place < len(pattern) and pattern[place] in ("?", text[at]):
            at, place = at + 1, place + 1
        elif star >= 0:
            tried += 1
            at, place = tried, star + 1
        else:
            return False
    return not pattern[place:].strip("*")
