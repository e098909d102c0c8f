"""What all turns and errands share of their interrupts: those that are open, the table, OpenCode.

``turns.interrupts`` calls this for one turn or errand; ``cluster``, ``extensions`` and
``tasks.recovery`` look here for what is open or stored.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace

import orjson
from sqlalchemy.engine import Connection

from opencode_a2a import metrics
from opencode_a2a.bounds import DaemonThreads
from opencode_a2a.clock import now_ms
from opencode_a2a.config import Settings
from opencode_a2a.events import Interrupted, Resumed, load_known
from opencode_a2a.ids import ContextId, Owner, Principal, RequestId, SessionId
from opencode_a2a.opencode.driver import Driver, Location
from opencode_a2a.rights import NARROWEST, Rights
from opencode_a2a.store import interrupts as interrupt_rows
from opencode_a2a.store.database import Database, Write, readable
from opencode_a2a.store.interrupts import InterruptRow
from opencode_a2a.telemetry import AUDIT
from opencode_a2a.turns.answers import (
    Answer,
    PermissionReply,
    QuestionRejection,
    QuestionReply,
    Reply,
    Scope,
)
from opencode_a2a.turns.interrupt_state import (
    Asker,
    Interrupt,
    StoredInterrupt,
    told_by,
)
from opencode_a2a.turns.policy import Grant, Grants, add_grant, audit_grant, expiry_text
from opencode_a2a.turns.shell import says_more

LOOK_UPS = 8
"""Requests whose files are looked up at once; one that was given up counts until that ends."""


class SharedInterrupts:
    """What all turns and errands share: the interrupts that are open, their table, OpenCode."""

    def __init__(self, database: Database, opencode: Driver, settings: Settings) -> None:
        self._database = database
        self.opencode = opencode
        self.grants = Grants(database)
        self.settings = settings.interrupts
        self.console_answers = settings.console_answers
        """Whether people may answer past this service, at OpenCode's own terminal."""
        self._rights = settings.auth.rights
        self.look_ups = DaemonThreads("look-up", LOOK_UPS)
        """Where it is looked up where files are: a file system may hang, and nothing else with it.
        """
        self.sessions_with_turn: dict[SessionId, Asker] = {}
        """The turn that runs in a session: it is asked everything that the session asks."""
        self.open: dict[RequestId, Interrupt] = {}
        """Interrupts that are not settled. A turn and an errand may follow the same session; the
        first of them to hear of a request asks it, and the other does not."""

    @property
    def allows_always(self) -> bool:
        return self.settings.allow_always and self.opencode.features.always

    async def reply(self, asked: Interrupted, reply: Reply, at: Location) -> None:
        """Send OpenCode a reply."""
        match reply:
            case PermissionReply():
                await self.opencode.reply_permission(
                    asked.request_id, reply.reply, reply.message, at=at
                )
            case QuestionReply():
                await self.opencode.reply_question(asked.request_id, reply.answers, at=at)
            case QuestionRejection():
                await self.opencode.reject_question(asked.request_id, at=at)

    async def store_asked(
        self, owner: Owner, asked: Interrupted, known: Answer | None = None
    ) -> Interrupted:
        """Store an interrupt; return it with its number, its deadline and the default then.

        If its answer is ``known``, that is stored with it, and nobody is asked.
        """
        settings, now = self.settings, now_ms()
        expires_at = now + int(settings.interrupt_request_ttl_seconds * 1000)
        asked = replace(
            asked,
            asked_at=now,
            expires_at=expires_at,
            default=expiry_text(settings, asked),
            allows_always=self.allows_always and says_more(asked),
        )
        new = InterruptRow(
            asked.request_id,
            owner.task_id or "",
            owner.context_id,
            owner.principal,
            asked.type,
            orjson.dumps(asked),
            expires_at,
            answer=None if known is None else known.dump(),
            rights=orjson.dumps(owner.rights),
        )
        # Only a request that a task puts to a person has a number: nobody has to name others.
        numbered = known is None and owner.task_id is not None
        # One that was asked before a restart keeps its deadline.
        row = await self._database.write_until_stored(interrupt_rows.add, new, numbered=numbered)
        metrics.INTERRUPT_REQUESTS.labels(asked.type).inc()
        return replace(asked, expires_at=row.expires_at, number=row.number)

    async def store_changed(self, asked: Sequence[Interrupted]) -> None:
        """Store interrupts that have changed since they were asked."""

        def write(connection: Connection) -> None:
            for one in asked:
                interrupt_rows.store_asked(connection, one.request_id, orjson.dumps(one))

        await self._database.write(write)

    async def store_answer(
        self,
        request_ids: Sequence[str],
        answer: Answer,
        in_same_commit: Write | None = None,
        *,
        insist: bool = False,
    ) -> None:
        """Store an answer, and run ``in_same_commit`` with that, before OpenCode is given it.

        Otherwise a service that is killed in between would take the caller's repeat for the
        answer to the next interrupt. ``insist`` waits for a database that is unreachable.
        """

        def write(connection: Connection) -> None:
            for request_id in request_ids:
                interrupt_rows.store_answer(connection, request_id, answer.dump())
            if in_same_commit is not None:
                in_same_commit(connection)

        await (self._database.write_until_stored(write) if insist else self._database.write(write))

    async def store_settled(
        self, owner: Owner, asked: Interrupted, resumed: Resumed, scope: Scope | None = None
    ) -> Grant | None:
        """Record in the table and in the audit log how an interrupt ended.

        With a scope the person has allowed more than this request: store and return the grant.
        """
        now = now_ms()

        def write(connection: Connection) -> tuple[bool, Grant | None]:
            settled = interrupt_rows.settle(
                connection, resumed.request_id, resumed.resolution, now, resumed.by
            )
            if not settled or scope is None:
                return settled, None
            return settled, add_grant(connection, owner, asked, scope, now)

        settled, grant = await self._database.write_until_stored(write)
        if not settled:  # an earlier process did, and recorded it
            return None
        if grant is not None and grant.request_id == asked.request_id:
            audit_grant(grant)
        audit_settled(owner, asked, resumed)
        return grant

    async def stored(self, task_id: str, context_id: str) -> list[StoredInterrupt]:
        """Return all interrupts of a task, or of an errand, for which the task id is empty."""
        found: list[StoredInterrupt] = []
        # The work may be running, and cannot go on without: wait for a database that is away.
        for row in await self._database.read_until_available(
            interrupt_rows.of_work, task_id, context_id
        ):
            asked = Interrupted.load(orjson.loads(row.asked))
            asked = replace(asked, expires_at=row.expires_at, number=row.number)
            resumed, answer = None, Answer.load(row.answer) if row.answer else None
            if row.resolution is not None:
                resumed = Resumed(asked.request_id, asked.type, row.resolution, row.settled_by)
                answer = answer if answer and answer.by == row.settled_by else None
                resumed = told_by(resumed, answer)
            found.append(StoredInterrupt(asked, answer, resumed, row.settled_at))
        return found

    async def errand_owners(self) -> list[Owner]:
        """Return the owners of the errands whose interrupts an earlier process left open."""

        def load(row: InterruptRow) -> Owner:
            # For 2.0, until 3.0: it did not store the rights; the deployment may allow less now.
            rights = load_known(Rights, orjson.loads(row.rights)) if row.rights else NARROWEST
            context_id, principal = ContextId(row.context_id), Principal(row.principal)
            return Owner(None, context_id, principal, rights & self._rights)

        owners: dict[str, Owner] = {}
        left = await self._database.read(interrupt_rows.left)
        for owner in readable("a permission or question", left, load):
            owners.setdefault(owner.context_id, owner)
        return [*owners.values()]

    async def pending(self, principal: Principal | None, kind: str) -> list[Interrupt]:
        """Return the interrupts that a principal is asked now, or everybody; most urgent first."""
        found = await self._database.read(interrupt_rows.pending, principal, kind, [*self.open])
        waiting = (self.open.get(RequestId(row.request_id)) for row in found)
        return [one for one in waiting if one is not None and one.waits]

    async def find(self, request_id: str) -> InterruptRow | None:
        """Return the row of an interrupt, also of a settled one."""
        return await self._database.read(interrupt_rows.find, request_id)


def audit_settled(owner: Owner, asked: Interrupted, resumed: Resumed) -> None:
    """Record in the audit log how an interrupt ended."""
    metrics.INTERRUPT_RESOLVED.labels(resumed.resolution).inc()
    AUDIT.info(
        "interrupt settled",
        request_id=asked.request_id,
        type=asked.type,
        task_id=owner.task_id,
        principal=owner.principal,
        permission=asked.permission,
        patterns=asked.patterns,
        asked_at=asked.asked_at,
        resolution=resumed.resolution,
        by=resumed.by,
        settled_at=now_ms(),
    )


def audit_void(owner: Owner, rows: Iterable[InterruptRow]) -> None:
    """Record in the audit log that interrupts ended with their task."""
    for row in rows:
        try:
            asked = Interrupted.load(orjson.loads(row.asked))
        except (KeyError, TypeError, ValueError):  # its task ends because it cannot be read
            asked = Interrupted(RequestId(row.request_id), row.type, SessionId("unknown"))
        audit_settled(owner, asked, Resumed(asked.request_id, asked.type, "void"))
