"""Prompts that wait for a person: whose they are, until when, and what happens then.

``turn`` asks and settles; ``tasks`` and ``extensions`` look up and answer. Each prompt is
stored, so that its deadline survives a restart, and leaves one audit record when it is
settled. Knows nothing of how OpenCode is answered.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Literal

import orjson
from sqlalchemy.engine import Connection

from opencode_a2a import metrics
from opencode_a2a.clock import now_ms
from opencode_a2a.config import InterruptSettings, Settings
from opencode_a2a.events import Interrupted, Resumed
from opencode_a2a.ids import ContextId, Principal, RequestId, SessionId, TaskId
from opencode_a2a.store import interrupts as rows
from opencode_a2a.store.database import Database
from opencode_a2a.store.interrupts import InterruptRow
from opencode_a2a.telemetry import AUDIT
from opencode_a2a.turns.answers import Answer, PermissionReply, QuestionReply, Reply

Action = Literal["allow", "ask", "deny"]

EXPIRED_MESSAGE = "Nobody answered in time. Go on without it, or say what you could not do."
DENIED_MESSAGE = "A rule of this service forbids it. Go on without it."


def rule_action(settings: InterruptSettings, asked: Interrupted) -> Action:
    """Say what the rules do with a permission: all its patterns have to agree to allow it."""
    if asked.type != "permission" or asked.permission is None:
        return "ask"
    actions: set[Action] = set()
    for pattern in asked.patterns or ["*"]:
        action: Action = "ask"
        for rule in settings.permission_rules:  # the last one that fits decides
            if fnmatchcase(asked.permission, rule.permission) and fnmatchcase(
                pattern, rule.pattern
            ):
                action = rule.action
        actions.add(action)
    if "deny" in actions:
        return "deny"
    return "ask" if "ask" in actions else "allow"


def expiry(settings: InterruptSettings, asked: Interrupted) -> Reply | None:
    """Return the answer at the deadline; None ends the turn."""
    if settings.interrupt_default_action == "end-turn":
        return None
    if asked.type == "question":
        return QuestionReply([[EXPIRED_MESSAGE] for _ in asked.questions])
    return PermissionReply("reject", EXPIRED_MESSAGE)


@dataclass(frozen=True, slots=True)
class Owner:
    """Whom a prompt is put to."""

    task_id: TaskId | None
    """None when the work was begun by method."""
    context_id: ContextId
    principal: Principal


class Interrupts:
    """Every prompt that was put to somebody."""

    def __init__(self, database: Database, settings: Settings) -> None:
        self._database = database
        self.settings = settings.interrupts
        self.console_answers = settings.console_answers
        self.turns: set[SessionId] = set()
        """Sessions in which the turn of a task runs: it is asked whatever the session asks."""
        self.open: set[RequestId] = set()
        """What somebody is being asked now: nobody else is asked the same."""

    async def ask(self, owner: Owner, asked: Interrupted) -> Interrupted:
        """Store a prompt and return it with its deadline and what happens then."""
        now = now_ms()
        asked = replace(
            asked,
            asked_at=now,
            expires_at=now + int(self.settings.interrupt_request_ttl_seconds * 1000),
            default=self._default(asked),
            allows_always=self.settings.allow_always and asked.type == "permission",
        )
        new = InterruptRow(
            asked.request_id,
            owner.task_id,
            owner.context_id,
            owner.principal,
            asked.type,
            orjson.dumps(asked),
            asked.expires_at or now,
        )

        def write(connection: Connection) -> InterruptRow:
            return rows.add(connection, new)

        row = await self._database.insist(write)
        metrics.INTERRUPT_REQUESTS.labels(asked.type).inc()
        return replace(asked, expires_at=row.expires_at)

    def _default(self, asked: Interrupted) -> str:
        if expiry(self.settings, asked) is None:
            return "the turn ends"
        if asked.type == "question":
            return "the question is dismissed and the turn continues"
        return "the request is rejected and the turn continues"

    async def store(
        self,
        request_id: RequestId,
        answer: Answer,
        also: Callable[[Connection], None] | None = None,
        *,
        insist: bool = False,
    ) -> None:
        """Store an answer, and what belongs to it, before OpenCode is given it.

        Without this a service that is killed in between would take the caller's repeat for
        the answer to the next interrupt.
        """
        stored = answer.dump()

        def write(connection: Connection) -> None:
            rows.answer(connection, request_id, stored)
            if also is not None:
                also(connection)

        await (self._database.insist(write) if insist else self._database.write(write))

    async def stored(self, task_id: TaskId) -> dict[RequestId, Answer]:
        """Return the answers to a task's interrupts that count, or may count yet.

        One that has settled its interrupt is among them: the service may have been killed
        before the log of the task told so.
        """

        def read(connection: Connection) -> Sequence[InterruptRow]:
            return rows.of_task(connection, task_id)

        found: dict[RequestId, Answer] = {}
        for row in await self._database.read(read):
            answer = Answer.load(row.answer) if row.answer else None
            if answer and (row.resolution is None or row.settled_by == answer.by):
                found[RequestId(row.request_id)] = answer
        return found

    async def left(self) -> list[tuple[Owner, Interrupted, Answer | None]]:
        """Return what an earlier process asked for work that no task follows."""

        def read(connection: Connection) -> Sequence[InterruptRow]:
            return rows.left(connection)

        return [
            (
                Owner(None, ContextId(row.context_id), Principal(row.principal)),
                Interrupted.load(orjson.loads(row.asked)),
                Answer.load(row.answer) if row.answer else None,
            )
            for row in await self._database.read(read)
        ]

    async def settle(self, owner: Owner, asked: Interrupted, settled: Resumed) -> None:
        """Write down how a prompt ended, and say it in the audit log."""
        now = now_ms()

        def write(connection: Connection) -> None:
            rows.settle(connection, settled.request_id, settled.resolution, now, settled.by)

        await self._database.insist(write)
        metrics.INTERRUPT_RESOLVED.labels(settled.resolution).inc()
        AUDIT.info(
            "interrupt settled",
            request_id=asked.request_id,
            type=asked.type,
            task_id=owner.task_id,
            principal=owner.principal,
            permission=asked.permission,
            patterns=asked.patterns,
            asked_at=asked.asked_at,
            resolution=settled.resolution,
            by=settled.by,
            settled_at=now,
        )

    def report_forged(self, owner: Owner, asked: Interrupted, settled: Resumed) -> None:
        """Say in the audit log that somebody answered OpenCode past this service."""
        AUDIT.warning(
            "interrupt answered past the service",
            request_id=asked.request_id,
            type=asked.type,
            task_id=owner.task_id,
            principal=owner.principal,
            session_id=asked.session_id,
            permission=asked.permission,
            patterns=asked.patterns,
            resolution=settled.resolution,
        )

    async def pending(
        self, principal: Principal, kind: str | None = None
    ) -> Sequence[InterruptRow]:
        """Return what a principal is asked at the moment, the most urgent first."""

        def read(connection: Connection) -> Sequence[InterruptRow]:
            return rows.pending(connection, principal, kind)

        return await self._database.read(read)

    async def find(self, principal: Principal, request_id: str) -> InterruptRow | None:
        """Return a principal's prompt, settled ones included; another's is not found."""

        def read(connection: Connection) -> InterruptRow | None:
            return rows.find(connection, request_id)

        row = await self._database.read(read)
        return row if row is not None and row.principal == principal else None

    async def known(self, request_id: str) -> bool:
        """Whether somebody's task was ever asked this."""

        def read(connection: Connection) -> bool:
            return rows.find(connection, request_id) is not None

        return await self._database.read(read)
