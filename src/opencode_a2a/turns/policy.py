"""Answers that need no person: by a rule, the rights of the work, a grant, or at the deadline.

A person who allows a permission "for this task" or "for this conversation" gives a grant: it allows
what OpenCode's own "always" would allow, by the patterns that the request names, but for that task
or context and that directory alone, and of command lines only plain ones (see ``shell``). OpenCode
does not know of it: the service answers each later request with "once".
"""

from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any
from uuid import uuid4

import orjson
from sqlalchemy.engine import Connection

from opencode_a2a.clock import now_ms
from opencode_a2a.config import InterruptSettings
from opencode_a2a.errors import GrantNotFoundError
from opencode_a2a.events import Interrupted, Progressed
from opencode_a2a.ids import ContextId, Owner, Principal, RequestId, TaskId
from opencode_a2a.rights import QUESTION, SHELL, Action
from opencode_a2a.store import grants as grant_rows
from opencode_a2a.store.database import Database, readable
from opencode_a2a.store.grants import GrantRow
from opencode_a2a.telemetry import AUDIT
from opencode_a2a.turns.answers import Answer, PermissionReply, QuestionReply, Reply, Scope
from opencode_a2a.turns.shell import (
    command_line,
    covers,
    directory_of,
    exact_command,
    is_plain,
    leads_elsewhere,
    wider_patterns,
)

RULE = "rule"
"""Recorded as ``by`` when a rule, or the rights of the work, settle an interrupt."""
EXPIRED_MESSAGE = "Nobody answered in time. Go on without it, or say what you could not do."
DENIED_MESSAGE = "A rule of this service forbids it. Go on without it."
UNATTENDED_MESSAGE = (
    "Nobody is there to answer. Decide by yourself if you can, or say what you could not do."
)


@dataclass(frozen=True, slots=True)
class Grant:
    """What a person has allowed for a task or a context."""

    id: str
    principal: Principal
    context_id: ContextId
    task_id: TaskId | None
    """The only task that it is for; None if it is for the whole context."""
    directory: str
    """Where a command may run; for everything else, the directory of the session."""
    permission: str
    patterns: tuple[str, ...]
    """OpenCode's patterns for what "always" would allow."""
    request_id: RequestId
    """The request that the person answered with it."""
    given_at: int
    exact: str | None = None
    """The command line that was allowed, if no pattern covers it (see ``shell``)."""

    @property
    def by(self) -> str:
        """Recorded as ``by`` when the grant settles an interrupt."""
        return f"grant:{self.id}"

    def covers(self, owner: Owner, asked: Interrupted) -> bool:
        """Whether this grant allows a request, of which the links are known."""
        return (
            asked.type == "permission"
            and bool(asked.patterns)  # else they could not be read
            and not leads_elsewhere(asked)
            and (owner.principal, owner.context_id) == (self.principal, self.context_id)
            and self.task_id in (None, owner.task_id)
            and (asked.permission, _place(asked)) == (self.permission, self.directory)
            and (self._covers_command(asked) if asked.permission == SHELL else self._fits(asked))
        )

    def _fits(self, asked: Interrupted) -> bool:
        return all(
            any(fits(pattern, allowed) for allowed in self.patterns) for pattern in asked.patterns
        )

    def _covers_command(self, asked: Interrupted) -> bool:
        """Whether it allows a command line: as it was, or a plain command by a pattern."""
        if asked.tool_input is None:  # it may run elsewhere
            return False
        command = command_line(asked)
        if command is not None and command == self.exact:
            return True
        commands = asked.patterns if command is None else [command, *asked.patterns]
        return all(any(covers(allowed, one) for allowed in self.patterns) for one in commands)


class Grants:
    def __init__(self, database: Database) -> None:
        self._database = database

    async def covering(self, owner: Owner, asked: Interrupted) -> Grant | None:
        """Return the grant by which a person has allowed a request before.

        Wait for a database that is unreachable: the request would be lost otherwise.
        """
        found = await self._database.read_until_available(
            grant_rows.of_context, owner.principal, owner.context_id
        )
        grants = readable("a grant", found, _load)
        return next((grant for grant in grants if grant.covers(owner, asked)), None)

    async def held(self, principal: Principal, ended: Sequence[str], most: int) -> list[Grant]:
        """Return the grants of a principal that still hold, newest first.

        Those for a task no longer hold when its state is one of ``ended``.
        """
        found = await self._database.read(grant_rows.listed, principal, ended, most)
        return [*readable("a grant", found, _load)]

    async def revoke(self, principal: Principal, grant_id: str) -> None:
        """End a grant: a person is asked again for what it allowed."""
        now = now_ms()
        if not await self._database.write(grant_rows.revoke, principal, grant_id, now):
            raise GrantNotFoundError(grant_id=grant_id[:128])
        AUDIT.info("grant revoked", grant_id=grant_id, principal=principal)


def rule_action(settings: InterruptSettings, asked: Interrupted) -> Action:
    """Return what the rules do with a permission; they allow it only if they allow each pattern.

    Patterns that could not be read may be anything: no rule allows them.
    """
    if asked.type != "permission" or asked.permission is None:
        return "ask"
    actions: set[Action] = set()
    for pattern in asked.patterns or ["*"]:
        action: Action = "ask"
        for rule in settings.permission_rules:  # the last rule that fits decides
            if fnmatchcase(asked.permission, rule.permission) and fnmatchcase(
                pattern, rule.pattern
            ):
                action = rule.action
        actions.add(action)
    if "deny" in actions:
        return "deny"
    return "ask" if "ask" in actions or not asked.patterns else "allow"


def expiry(settings: InterruptSettings, asked: Interrupted) -> Reply | None:
    """Return the answer to give at the deadline; None if the turn ends instead."""
    if settings.interrupt_default_action == "end-turn":
        return None
    if asked.type == "question":
        return QuestionReply([[EXPIRED_MESSAGE] for _ in asked.questions])
    return PermissionReply("reject", EXPIRED_MESSAGE)


def expiry_text(settings: InterruptSettings, asked: Interrupted) -> str:
    """Return what a person is told about the deadline."""
    if asked.type == "plan":
        return "the task ends and nothing is changed"
    if expiry(settings, asked) is None:
        return "the turn ends"
    if asked.type == "question":
        return "the question is dismissed and the turn continues"
    return "the request is rejected and the turn continues"


async def known_answer(
    settings: InterruptSettings, grants: Grants, owner: Owner, asked: Interrupted
) -> Answer | None:
    """Return the answer by a rule, the rights of the work, or a grant; None asks a person."""
    rights, action = owner.rights, rule_action(settings, asked)
    action = rights.narrow(asked.permission or QUESTION, action)
    if action == "ask":
        grant = await grants.covering(owner, asked)
        return None if grant is None else Answer(PermissionReply("once"), grant.by)
    if asked.type == "question":
        return Answer(QuestionReply([[UNATTENDED_MESSAGE] for _ in asked.questions]), RULE)
    if action == "allow":
        return Answer(PermissionReply("once"), RULE)
    message = DENIED_MESSAGE if rights.waits else UNATTENDED_MESSAGE
    return Answer(PermissionReply("reject", message), RULE)


def answered_unasked(asked: Interrupted, answer: Answer) -> Progressed:
    """Return the event which says that a request was answered, and nobody asked."""
    status = "allowed" if answer.resolution == "once" else "denied"
    reason = "answered by a rule of this service"
    if answer.by != RULE:
        reason = f"allowed before, by {answer.by}"
    if asked.type == "question":
        subject = " ".join(question.question for question in asked.questions)
        return Progressed("question", status, asked.request_id, subject, reason=reason)
    return Progressed("permission", status, asked.request_id, asked.summary, reason=reason)


def add_grant(
    connection: Connection, owner: Owner, asked: Interrupted, scope: Scope, now: int
) -> Grant:
    """Store the grant that a person gave with an answer, unless it is stored already."""
    row = GrantRow(
        id=str(uuid4()),
        principal=owner.principal,
        context_id=owner.context_id,
        task_id=(owner.task_id or "") if scope == "task" else "",
        directory=_place(asked) or "",
        permission=asked.permission or "",
        patterns=orjson.dumps({"fit": wider_patterns(asked), "exact": exact_command(asked)}),
        request_id=asked.request_id,
        given_at=now,
    )
    return _load(grant_rows.add(connection, row))


def _place(asked: Interrupted) -> str | None:
    """Return the directory that a grant for a request is for: elsewhere it was not allowed."""
    return directory_of(asked) if asked.permission == SHELL else asked.directory


def audit_grant(grant: Grant) -> None:
    """Record in the audit log that a person has given a grant."""
    AUDIT.info(
        "grant given",
        grant_id=grant.id,
        principal=grant.principal,
        context_id=grant.context_id,
        task_id=grant.task_id,
        directory=grant.directory,
        permission=grant.permission,
        patterns=[*grant.patterns],
        exact=grant.exact,
        request_id=grant.request_id,
    )


def _load(row: GrantRow) -> Grant:
    stored: dict[str, Any] | list[str] = orjson.loads(row.patterns)
    if isinstance(stored, list):  # earlier versions put a line that is not plain at its end
        exact = next((one for one in stored[-1:] if not is_plain(one)), None)
        stored = {"fit": stored, "exact": exact}
    return Grant(
        row.id,
        Principal(row.principal),
        ContextId(row.context_id),
        TaskId(row.task_id) if row.task_id else None,
        row.directory,
        row.permission,
        tuple(stored["fit"]),
        RequestId(row.request_id),
        row.given_at,
        stored["exact"],
    )


def fits(text: str, pattern: str) -> bool:
    """Whether a text fits a pattern by the rules of OpenCode 1.x."""
    text, pattern = text.replace("\\", "/"), pattern.replace("\\", "/")
    # "ls *" is for a bare "ls" too.
    return (pattern.endswith(" *") and _matches(text, pattern[:-2])) or _matches(text, pattern)


def _matches(text: str, pattern: str) -> bool:
    """Compare without a regular expression, which some patterns would keep busy for hours.

    After a mismatch only the last star takes one more character: whatever an earlier star could
    take instead, the last one can take as well.
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
