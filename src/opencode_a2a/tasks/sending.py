"""Sending: which task a message is for, and where that runs.

``server.operations`` makes a ``SendCommand``. ``Sending.submit`` finds out where its task runs, or
is to run. ``Sending.handle`` is called there, on this replica or another: a message continues the
task that it names, or the one of its context that waits for an answer (``tasks.continuing``); every
other message starts a task, which ``admit`` stores before anything runs for it.
"""

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import NoReturn
from uuid import UUID

import structlog
from pydantic import TypeAdapter
from sqlalchemy.engine import Connection

from opencode_a2a.clock import now_ms
from opencode_a2a.cluster.fleet import Anywhere, Fleet, Member, MovedError, There, Where
from opencode_a2a.cluster.mailbox import Mailbox, OwnerCall
from opencode_a2a.config import LimitSettings
from opencode_a2a.errors import (
    BudgetExhaustedError,
    InvalidParamsError,
    LimitExceededError,
    ServiceError,
    TaskUnreadableError,
    UpstreamUnreachableError,
)
from opencode_a2a.ids import ContextId, TaskId
from opencode_a2a.log.log import LogWriter, ReadableLog, TaskLog, new_row
from opencode_a2a.log.state import (
    OPEN,
    Accepted,
    State,
    TaskRef,
    TaskState,
    dump_entries,
    load_request,
)
from opencode_a2a.log.stored import load_task
from opencode_a2a.messages import NO_ROUTING, Routing
from opencode_a2a.rights import UNLIMITED
from opencode_a2a.store import tasks as task_rows
from opencode_a2a.store.database import Database
from opencode_a2a.store.tasks import Segment, TaskRow
from opencode_a2a.store.webhooks import HookRow
from opencode_a2a.tasks import budget
from opencode_a2a.tasks.command import (
    AnswerExpectedError,
    Handled,
    SendCommand,
    check_prompt,
    earlier_task,
    load_refusal,
    message_write,
)
from opencode_a2a.tasks.continuing import Continuing
from opencode_a2a.tasks.open import OpenTask, OpenTasks
from opencode_a2a.tasks.webhooks import Webhooks
from opencode_a2a.telemetry import draw_id
from opencode_a2a.turns.answers import only_an_answer


@dataclass(frozen=True, slots=True)
class Submitted:
    """The task that a message led to, and where its log was before the message."""

    log: ReadableLog
    seq: int
    repeat: bool = False
    """The message was here before; nothing was done for it now."""


logger = structlog.get_logger(__name__)

OWN_TASKS = "This caller has {} tasks that have not ended, which is the limit; wait for one to end"
ALL_TASKS = "The service has {} tasks that have not ended, which is the limit; try again later"
SEVERAL = "Several tasks of this context wait for an answer."


def _note_failure(handling: "asyncio.Future[Handled]") -> None:
    """Log why a message failed whose sender has gone away, unless it is an ordinary refusal."""
    error = None if handling.cancelled() else handling.exception()
    if error is not None and not isinstance(error, ServiceError):
        logger.error("a message failed after its sender had gone", exc_info=error)


class Sending:
    """Accepts messages, for the OpenCodes of this replica and for those of others."""

    def __init__(
        self,
        database: Database,
        writer: LogWriter,
        fleet: Fleet,
        limits: LimitSettings,
        webhooks: Webhooks,
        open_tasks: OpenTasks,
        mailbox: Mailbox,
        continuing: Continuing,
    ) -> None:
        self._database = database
        self._writer = writer
        self._fleet = fleet
        self._limits = limits
        self._webhooks = webhooks
        self._open = open_tasks
        self._continuing = continuing
        self._handle_at_owner = OwnerCall(
            mailbox,
            "submit",
            fleet,
            self.handle,
            lambda: TypeAdapter(SendCommand),
            lambda: TypeAdapter(Handled),
        )

    async def submit(self, command: SendCommand) -> Submitted:
        """Have a message handled where its task runs, or is to run."""
        task_ids = await self._tasks_meant(command)
        log = where = None
        if len(task_ids) == 1:
            log, where = await self._open.find_with_owner(command.principal, task_ids[0])
            if where is None and command.task_id is None:
                # The task that waited in its context has ended since: the message starts one.
                task_ids, log = [], None
        if log is not None:
            # If the task that the message names has ended, any replica can say so.
            where = where or Anywhere(self._fleet.first)
            handled = await self._submit_to_task(command, log, where)
        else:
            handled = await self._submit_without_task(command, task_ids)
        log = await self._open.log(command.principal, handled.task_id)
        return Submitted(log, handled.seq, handled.repeat)

    async def _submit_to_task(
        self, command: SendCommand, log: ReadableLog, where: Where
    ) -> Handled:
        """Have a message on a task handled, even if its sender goes away meanwhile.

        Once it is stored it has to take effect, and so has its webhook.
        """
        if command.context_id not in (None, log.ref.context_id):
            raise InvalidParamsError.of(
                "message.contextId", "is not the context of this task; leave it out"
            )
        # A plain answer counts for what readers were shown, wherever they were.
        command = replace(command, seen_at_sender=self._open.seen_of_remote_task(log))
        handling = asyncio.ensure_future(self._handle_at_owner.run(where, command))
        try:
            return await asyncio.shield(handling)
        except asyncio.CancelledError:
            handling.add_done_callback(_note_failure)
            raise

    async def _submit_without_task(self, command: SendCommand, waiting: Sequence[str]) -> Handled:
        """Have a message start a task; refuse it if several tasks wait for an answer like it."""
        routing = command.request.routing
        if waiting or routing != NO_ROUTING:
            # A repeat does not fail because several tasks wait for an answer now, or because its
            # directory, agent or session is gone.
            earlier = await earlier_task(self._database, command)
            if earlier is not None:
                return Handled(TaskId(earlier.id), 0, repeat=True)
        if waiting:
            await self._refuse_ambiguous(command, waiting)
        bound = [] if self._fleet.alone else await self._database.read(self._bound, command)
        where = await self._fleet.where_message_belongs(command.context_id, routing, bound)
        return await self._handle_at_owner.run(where, command)

    async def handle(self, member: Member, command: SendCommand) -> Handled:
        """Handle a message where it belongs; raise MovedError if that is not here.

        Which task it is for is found anew: what ``submit`` found, perhaps on another replica, may
        have changed while the message was on its way.
        """
        task_ids = await self._tasks_meant(command)
        if len(task_ids) == 1:
            return await self._continuing.handle(command, task_ids[0])
        if task_ids:
            await self._refuse_ambiguous(command, task_ids)
        await member.turns.check_reachable()
        if command.request.routing != NO_ROUTING:
            await check_prompt(command.principal, command.request, member.turns)
        admitted = await self.admit(command, member)
        if isinstance(admitted, TaskRow):
            return Handled(TaskId(admitted.id), 0, repeat=True)
        admitted.start(command.request, new_context=command.context_id is None)
        return Handled(admitted.log.ref.id, admitted.log.state.seq)

    # Which task a message is for

    async def _tasks_meant(self, command: SendCommand) -> list[str]:
        """Return the task that a message is for; none if it is to start one.

        That is the task that it names, or the one that waits for an answer in the context that it
        names: behind that one it would wait for ever. If several wait, all of them are returned.
        """
        if command.task_id is not None:
            return [command.task_id]
        routing, references = command.request.routing, command.message.reference_task_ids
        names_none = not (command.context_id or routing.session_id or references)
        if names_none or routing.new_task:
            return []
        waiting = await self._waiting(command, await self._tasks_elsewhere(command))
        return [log.ref.id for log in waiting]

    async def _refuse_ambiguous(self, command: SendCommand, task_ids: Sequence[str]) -> NoReturn:
        """Refuse a message that may be the answer to several tasks."""
        refusal = AnswerExpectedError(SEVERAL, task_ids=[*task_ids])
        for task_id in task_ids:
            log = await self._open.log(command.principal, task_id)
            if only_an_answer(command.message):
                await self._database.write(message_write(command, log, refusal=refusal))
        raise refusal

    async def _tasks_elsewhere(self, command: SendCommand) -> list[tuple[TaskRow, Routing]]:
        """Return the caller's tasks that other replicas run, and where each was to run.

        If the message names a context, only those in it.
        """
        if not self._database.census.has_others:
            return []
        states = [State.INPUT_REQUIRED] if command.context_id is None else list(OPEN)
        wanted = (command.principal, states, command.context_id)
        found = list[tuple[TaskRow, Routing]]()
        for row in await self._database.read(task_rows.of_principal, *wanted):
            there = isinstance(self._fleet.where(row.upstream), There)
            if row.request is not None and there and self._open.get(row.id) is None:
                with suppress(UpstreamUnreachableError):  # it cannot be read: its owner says so
                    found.append((row, load_request(row.request).routing))
        return found

    async def _waiting(
        self, command: SendCommand, elsewhere: Sequence[tuple[TaskRow, Routing]]
    ) -> list[ReadableLog]:
        """Return the logs of the tasks whose answer a message that names no task may be.

        They are the caller's own and wait in the context that the message names, in the session
        that it names, or are named among its references. Of several, a reference decides.
        """
        waiting: list[ReadableLog] = [
            task.log
            for task in self._open.waiting()
            if self._awaits(command, task.log.state, task.routing)
        ]
        for row, routing in elsewhere:
            with suppress(TaskUnreadableError):
                if self._awaits(command, load_task(row), routing):
                    waiting.append(await self._open.log_of(row))
        references = command.message.reference_task_ids
        return [log for log in waiting if log.ref.id in references] or waiting

    def _awaits(self, command: SendCommand, state: TaskState, task_routing: Routing) -> bool:
        """Whether a task, which was to run at ``task_routing``, waits for a message like this."""
        ref, status, routing = state.ref, state.status, command.request.routing
        if ref.principal != command.principal or status.state is not State.INPUT_REQUIRED:
            return False
        if command.context_id is None and routing.session_id is None:
            return ref.id in command.message.reference_task_ids
        if command.context_id not in (None, ref.context_id):
            return False
        # A message for another place is no answer, and does not have to wait.
        if routing.session_id is not None:
            return routing.session_id == status.session_id
        names_place = routing.directory is not None or routing.workspace_id is not None
        # All OpenCodes have the same places.
        sessions = self._fleet.first.turns.sessions
        return not names_place or sessions.same_place(routing, task_routing)

    # A new task

    async def admit(self, command: SendCommand, member: Member) -> OpenTask | TaskRow:
        """Store a new task before anything runs; if the message is a repeat, return its task's row.

        A message with the same id and other content is a new message. The task binds its context
        to the OpenCode: of several first messages of a context, one is stored first, and the others
        raise MovedError if another OpenCode was chosen for them, in whatever process.
        """
        principal, limits, digest = command.principal, self._limits, command.digest
        ref = TaskRef(
            TaskId(str(UUID(hex=draw_id(16), version=4))),
            ContextId(command.context_id or str(UUID(hex=draw_id(16), version=4))),
            principal,
            command.output_modes,
            now_ms(),
        )
        state = TaskState(ref)
        segment = dump_entries(
            [state.apply(Accepted(command.message, command.trace), ref.created_at)]
        )
        row = new_row(state, command.request, member.name)
        several = self._database.census.has_others
        message = (principal, command.message.message_id)
        errands = self._fleet.errands_of(principal) if command.budget.turns else 0

        def write(connection: Connection) -> tuple[int, HookRow | None] | TaskRow:
            if several or command.context_id is not None:
                task_rows.await_admissions(connection, principal)
            earlier = task_rows.find_message(connection, *message, digest)
            if earlier is not None:
                earlier_row, refusal = earlier
                if refusal is not None:
                    raise load_refusal(refusal)
                return earlier_row
            self._check_binding(connection, command, member)
            own, total = counted
            if several:
                own = task_rows.tally(connection, OPEN, principal)
                total = task_rows.tally(connection, OPEN)
            if own >= (most := limits.max_tasks_per_principal):
                raise LimitExceededError(OWN_TASKS.format(most), limit=most)
            if total >= (most := limits.max_open_tasks):
                raise LimitExceededError(ALL_TASKS.format(most), limit=most)
            if command.budget != UNLIMITED:
                budget.check_new_turn(connection, principal, command.budget, errands)
            no = task_rows.add_task(connection, row, (command.message.message_id, digest))
            task_rows.append(connection, [Segment(no, 1, 1, segment)], [])
            if command.push is None and self._webhooks.notices_for is None:
                return no, None
            return no, self._webhooks.insert(connection, no, ref, command.push)

        def open_task(no: int, webhook: HookRow | None) -> OpenTask:
            if webhook is not None:
                self._webhooks.note_set(webhook, ref)
            log = TaskLog(no, state, self._writer, self._database)
            return self._open.add(log, member)

        def open_late_commit(outcome: tuple[int, HookRow | None] | TaskRow) -> None:
            # The sender was told that the database is away, but the task was stored after all. If
            # the message is sent again, it leads to this task.
            if not isinstance(outcome, TaskRow) and member.owned:  # else its next owner finds it
                open_task(*outcome).start(command.request, new_context=command.context_id is None)

        with self._open.admission(principal, member, limits) as counted:
            try:
                outcome = await self._database.write_in_time(write, open_late_commit, message)
            except BudgetExhaustedError as error:
                budget.note_refusal(principal, error)
                raise
            return outcome if isinstance(outcome, TaskRow) else open_task(*outcome)

    def _bound(self, connection: Connection, command: SendCommand) -> list[str]:
        """Return the OpenCodes that the context of a message is bound to; the first one counts.

        They are the one that has its session, and those of its open tasks, whose sessions may not
        be stored yet. A lost one binds nothing.
        """
        context_id, routing = command.context_id, command.request.routing
        if context_id is None or routing.session_id is not None:
            return []  # a new context, or a message that goes where the session is
        sessions = self._fleet.first.turns.sessions
        _, place = sessions.locate(routing)
        linked = task_rows.linked_session(
            connection, command.principal, ContextId(context_id), place
        )
        bound = [linked.upstream] if linked and self._fleet.keeps_contexts(linked.upstream) else []
        for upstream, request in task_rows.requests_in_context(
            connection, command.principal, context_id
        ):
            if (member := self._fleet.members.get(upstream)) is not None and member.lost:
                continue
            # Its directory is gone, which its turn says, or the request cannot be read.
            with suppress(InvalidParamsError, UpstreamUnreachableError):
                if sessions.locate(load_request(request).routing)[1] == place:
                    bound.append(upstream)
        return bound

    def _check_binding(self, connection: Connection, command: SendCommand, member: Member) -> None:
        """Raise MovedError if the context of a message is bound to other OpenCodes.

        For the transaction that admits a task, after ``await_admissions``.
        """
        bound = [] if self._fleet.alone else self._bound(connection, command)
        if bound and member.name not in bound:
            raise MovedError(bound[0])
