"""Admission: a message becomes a task, stored before anything runs for it.

One transaction looks for a repeat, checks the limits, and stores the task, its first entry, what
identifies the message, and its webhook.
"""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from uuid import uuid4

import orjson
from sqlalchemy.engine import Connection

from opencode_a2a.config import LimitSettings
from opencode_a2a.errors import BudgetExhaustedError, InvalidParamsError, LimitExceededError
from opencode_a2a.ids import ContextId, TaskId
from opencode_a2a.messages import Routing
from opencode_a2a.rights import UNLIMITED
from opencode_a2a.store import links
from opencode_a2a.store import tasks as task_rows
from opencode_a2a.store.database import Database
from opencode_a2a.store.tasks import Segment, TaskRow
from opencode_a2a.tasks import budget
from opencode_a2a.tasks.command import SendCommand, load_refusal
from opencode_a2a.tasks.log import LogWriter, TaskLog
from opencode_a2a.tasks.lookup import TaskLookup
from opencode_a2a.tasks.open import OpenTask, OpenTasks
from opencode_a2a.tasks.readers import Begin, DurableReader
from opencode_a2a.tasks.state import (
    OPEN,
    Accepted,
    TaskRef,
    TaskState,
    dump_entries,
    load_request,
)
from opencode_a2a.telemetry import now_ms
from opencode_a2a.turns.fleet import Fleet, Member, NotOwnerError

OWN_TASKS = "This caller has {} tasks that have not ended, the most at once; wait for one to end"
ALL_TASKS = "The service has {} tasks that have not ended, the most at once; try again later"


@dataclass(frozen=True, slots=True)
class Admission:
    """What became of a message that was to start a task."""

    log: TaskLog
    task: OpenTask | None
    """The task that was stored for it; None for a repeat, whose task exists already."""


class Admissions:
    def __init__(
        self,
        database: Database,
        writer: LogWriter,
        fleet: Fleet,
        limits: LimitSettings,
        readers: Sequence[DurableReader],
        open_tasks: OpenTasks,
        lookup: TaskLookup,
    ) -> None:
        self._database = database
        self._writer = writer
        self._fleet = fleet
        self._limits = limits
        self._readers = readers
        self._open = open_tasks
        self._lookup = lookup

    async def admit(self, command: SendCommand, member: Member) -> Admission:
        """Store a new task before anything runs; if the message is a repeat, find its task.

        A message with the same id and other content is a new message.
        """
        principal, digest = command.principal, command.digest
        state = TaskState(
            TaskRef(
                TaskId(str(uuid4())),
                ContextId(command.context_id or str(uuid4())),
                principal,
                command.output_modes,
                now_ms(),
            )
        )
        ref = state.ref
        segment = dump_entries([state.apply(Accepted(command.message), ref.created_at)])
        row = TaskRow(
            id=ref.id,
            principal=principal,
            context_id=ref.context_id,
            state=state.status.state,
            created_at=ref.created_at,
            updated_at=ref.created_at,
            status=orjson.dumps(state.status),
            output_modes=None if ref.output_modes is None else orjson.dumps(ref.output_modes),
            request=orjson.dumps(command.request),
            upstream=member.name,
        )
        several = self._database.has_other_replicas
        message = (principal, command.message.message_id)
        errands = self._fleet.errands_of(principal) if command.budget.turns else 0

        def write(connection: Connection) -> tuple[int, list[Begin]] | TaskRow:
            if several:
                task_rows.await_admissions(connection, principal)
            earlier = task_rows.find_message(connection, *message, digest)
            if earlier is not None:
                earlier_row, refusal = earlier
                if refusal is not None:
                    raise load_refusal(refusal)
                return earlier_row
            open_tasks = counted
            if several:
                self._check_binding(connection, command, member)
                own = task_rows.tally(connection, OPEN, principal)
                open_tasks = own, task_rows.tally(connection, OPEN)
            self._check_limits(connection, command, *open_tasks, errands)
            no = task_rows.add_task(connection, row, (command.message.message_id, digest))
            task_rows.append(connection, [Segment(no, 1, 1, segment)], [])
            begins = (one.admit(connection, no, ref, command.push) for one in self._readers)
            return no, [begin for begin in begins if begin is not None]

        def adopt(no: int, begins: Sequence[Begin]) -> OpenTask:
            log = TaskLog(no, state, self._writer, self._database)
            task = self._open.adopt(log, member, command.request.routing)
            for begin in begins:
                begin(log)
            return task

        def late(outcome: tuple[int, list[Begin]] | TaskRow) -> None:
            """Run a task that was stored after its sender was told that the database is away.

            The sender can send the message again, and finds this task.
            """
            if not isinstance(outcome, TaskRow) and member.owned:  # else its next owner finds it
                adopt(*outcome).start(command.request, new_context=command.context_id is None)

        with self._open.admission(principal, member, self._limits) as counted:
            try:
                outcome = await self._database.write(write, on_late_commit=late, lock_order=message)
            except BudgetExhaustedError as error:
                budget.note_refusal(principal, error)
                raise
            if not isinstance(outcome, TaskRow):
                task = adopt(*outcome)
                return Admission(task.log, task)
        return Admission(await self._lookup.log_of(outcome), None)

    def joins(self, command: SendCommand, row: TaskRow, task_routing: Routing) -> bool:
        """Whether a message is to run in the session of a task, which was to run somewhere."""
        routing = command.request.routing
        if row.context_id != command.context_id or routing.session_id is not None:
            return False
        with suppress(InvalidParamsError):  # the directory of the task is gone: its turn says so
            return self._fleet.first.turns.sessions.same_place(routing, task_routing)
        return False

    def _check_binding(self, connection: Connection, command: SendCommand, member: Member) -> None:
        """Raise NotOwnerError if another replica has bound the context to another OpenCode.

        For the transaction that admits a task, after ``await_admissions``: of two first messages
        of a context that come to two replicas at the same moment, the second finds the task of
        the first, and goes where that runs.
        """
        principal, routing = command.principal, command.request.routing
        if command.context_id is None or routing.session_id is not None:
            return  # a new context, or one that goes where the session is
        place = ContextId(command.context_id), member.turns.sessions.locate(routing)[1]
        linked = links.linked(connection, principal, *place)
        rows = task_rows.of_principal(connection, principal, list(OPEN), command.context_id)
        bound = [linked[1]] if linked else []
        bound += [
            row.upstream
            for row in rows
            if row.request is not None
            and self.joins(command, row, load_request(row.request).routing)
        ]
        if member.name not in bound:
            for upstream in filter(self._fleet.keeps_contexts, bound):
                raise NotOwnerError(upstream)

    def _check_limits(
        self, connection: Connection, command: SendCommand, own: int, total: int, errands: int
    ) -> None:
        """Refuse a further task of a caller who has too many, or no budget left.

        ``own`` and ``total`` count the open tasks of the caller and of all; ``errands`` are the
        caller's, which count as turns do.
        """
        principal, limits = command.principal, self._limits
        if own >= (most := limits.max_tasks_per_principal):
            raise LimitExceededError(OWN_TASKS.format(most), limit=most)
        if total >= (most := limits.max_open_tasks):
            raise LimitExceededError(ALL_TASKS.format(most), limit=most)
        if command.budget != UNLIMITED:
            budget.check_spent(connection, principal, command.budget)
        if command.budget.turns:
            running = task_rows.tally(connection, budget.RUNNING, principal) + errands + 1
            budget.check_turns(running, command.budget)
