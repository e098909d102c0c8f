"""Sending: what becomes of a message.

``server.operations`` makes a ``SendCommand``. ``Sending.submit`` finds out where its task runs, or
is to run. ``Sending.handle`` is called there, on this replica or another, and has the rules: a
message continues the task that it names, or the one of its context that waits for an answer; every
other message starts a task, which ``admit`` stores before anything runs for it. A message is
recorded with the transaction that accepts or refuses it, so that a repeat is recognised: it leads
to the task of the first, and one that was refused for good stays refused.
"""

import asyncio
import hashlib
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, fields, replace
from typing import Annotated, NamedTuple, NoReturn
from uuid import UUID
from weakref import WeakValueDictionary

import orjson
import structlog
from pydantic import ConfigDict, Field, TypeAdapter
from sqlalchemy.engine import Connection

from opencode_a2a.clock import now_ms
from opencode_a2a.cluster.fleet import Anywhere, Fleet, Member, MovedError, There, Where
from opencode_a2a.cluster.mailbox import Mailbox, OwnerCall
from opencode_a2a.config import LimitSettings
from opencode_a2a.errors import (
    AuthorizationForbiddenError,
    BudgetExhaustedError,
    InterruptNotFoundError,
    InterruptTypeMismatchError,
    InvalidParamsError,
    LimitExceededError,
    ServiceError,
    TaskUnreadableError,
    UnsupportedOperationError,
    UpstreamUnreachableError,
    Violation,
)
from opencode_a2a.events import Interrupted
from opencode_a2a.ids import ContextId, Principal, TaskId
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
from opencode_a2a.log.stored import load_task, state_of
from opencode_a2a.messages import (
    NO_ROUTING,
    Added,
    Message,
    PromptPart,
    PushConfig,
    Routing,
    TurnRequest,
)
from opencode_a2a.rights import UNLIMITED, Budget
from opencode_a2a.store import tasks as task_rows
from opencode_a2a.store.database import Database, Write
from opencode_a2a.store.tasks import Segment, TaskRow
from opencode_a2a.store.webhooks import HookRow, Replaced
from opencode_a2a.tasks import budget
from opencode_a2a.tasks.budget import Budgets
from opencode_a2a.tasks.open import ENDED, WORKING, OpenTask, OpenTasks
from opencode_a2a.tasks.webhooks import Webhooks
from opencode_a2a.telemetry import draw_id
from opencode_a2a.turns.answers import (
    Answer,
    ContradictionError,
    NotUnderstoodError,
    OutdatedAnswerError,
    PlanDecision,
    only_an_answer,
    understand,
    understand_plan_answer,
)
from opencode_a2a.turns.job import SharedTurns
from opencode_a2a.turns.sessions import (
    COMMAND_FIELD,
    DEFAULT_AGENT,
    DIRECTORY_FIELD,
    PLAN_FIELD,
    SESSION_FIELD,
    WORKSPACE_FIELD,
)

# The message, and how it is recorded

FIRST_ROUTING = frozenset({"session_id", "directory", "workspace_id", "model", "hops"})
"""The fields of a routing that 2.0.0 had."""
ROUTING = tuple(one.name for one in fields(Routing))


@dataclass(frozen=True, slots=True)
class SendCommand:
    """A message that starts a task, or continues the one it names."""

    __pydantic_config__ = ConfigDict(serialize_by_alias=True)

    principal: Principal
    message: Message
    request: TurnRequest
    """The turn to run, if the message leads to one."""
    task_id: str | None = None
    context_id: str | None = None
    output_modes: tuple[str, ...] | None = None
    push: PushConfig | None = None
    """The webhook to store with the message. It does not identify it: a repeat may name another."""
    budget: Budget = UNLIMITED
    trace: str | None = None
    """The trace that the message came with, as ``telemetry.Trace`` stores it."""
    answerable: Annotated[Mapping[TaskId, int], Field(alias="seen")] = field(
        default_factory=dict[TaskId, int]
    )
    """In a forwarded message: by task, the highest request that a plain answer at the first replica
    may be for (``RemoteLogs.answerable``). Replicas of 2.0 know it by another name."""
    sign_in: int | None = None
    """The sign-in (``Status.sign_in``) that the message is about: it is refused if the task waits
    for another, or for none. It does not identify the message."""

    @property
    def digest(self) -> bytes:
        """A hash of the content: a repeat has the same message id and the same digest.

        For a message on a task, message and task are the content: a client that repeats it may
        have learnt the context meanwhile.
        """
        content: tuple[object, ...] = (self.message, self.task_id)
        if self.task_id is None:
            routing = self.request.routing
            # For 2.0, until 3.0: a field that was added since counts only if it is set, so that a
            # repeat of a message that such a version took is recognised.
            counted = {
                name: value
                for name in ROUTING
                if (value := getattr(routing, name)) != getattr(NO_ROUTING, name)
                or name in FIRST_ROUTING
            }
            content += (
                self.context_id,
                orjson.Fragment(orjson.dumps(counted)),  # in the order of its fields
                self.output_modes,
            )
        return hashlib.sha256(orjson.dumps(content, option=orjson.OPT_SORT_KEYS)).digest()


@dataclass(frozen=True, slots=True)
class Submitted:
    """The task that a message led to, and where its log was before the message."""

    log: ReadableLog
    seq: int
    repeat: bool = False
    """The message was here before; nothing was done for it now."""


class AnswerExpectedError(UnsupportedOperationError):
    """A message is not the answer that tasks of its context wait for; ``task_ids`` names them.

    ``server.operations`` adds the questions of these tasks.
    """

    @property
    def task_ids(self) -> list[str]:
        match self.data.get("task_ids"):
            case list() as ids:
                return [str(task_id) for task_id in ids]
            case _:
                return []


REFUSALS: Mapping[str, type[ServiceError]] = {
    "ANSWER_EXPECTED": AnswerExpectedError,
    **{
        kind.reason: kind
        for kind in (
            *(AuthorizationForbiddenError, InterruptNotFoundError, InterruptTypeMismatchError),
            *(InvalidParamsError, UnsupportedOperationError),
        )
    },
}
"""The errors that refuse an answer for good, by the name they are stored under: sent again, the
same message must not answer something else."""
FINAL_REFUSALS = tuple(REFUSALS.values())


def message_write(
    command: SendCommand,
    log: ReadableLog,
    request: TurnRequest | None = None,
    refusal: ServiceError | None = None,
) -> Write:
    """Return the write that records a message on a task, with its next turn or its refusal.

    A repeat may name the task or only the context, whatever the message did.
    """
    message, task_no = (command.principal, command.message.message_id), log.no
    on_task = replace(command, task_id=log.ref.id)
    in_context = replace(command, task_id=None, context_id=log.ref.context_id)
    digests = dict.fromkeys(variant.digest for variant in (command, on_task, in_context))
    refused = None if refusal is None else dump_refusal(refusal)

    def write(connection: Connection) -> None:
        for digest in digests:
            task_rows.add_message(connection, *message, task_no, digest, refused)
        if request is not None:
            task_rows.set_request(connection, task_no, orjson.dumps(request))

    return write


def dump_refusal(refusal: ServiceError) -> bytes:
    """Encode a refusal for ``load_refusal``, also that of an earlier version.

    An error between replicas has a form of its own (``dump_error`` in ``cluster.mailbox``).
    """
    name = next(name for name, kind in REFUSALS.items() if isinstance(refusal, kind))
    wrong = [(violation.field, violation.description) for violation in refusal.violations]
    return orjson.dumps([name, refusal.message, wrong, refusal.data])


def load_refusal(refusal: bytes) -> ServiceError:
    """Return the refusal that is stored with a message."""
    name, text, wrong, data = orjson.loads(refusal)
    violations = tuple(Violation(*violation) for violation in wrong)
    return REFUSALS[name](text, violations=violations, **data)


logger = structlog.get_logger(__name__)

# The rules

OWN_TASKS = "This caller has {} tasks that have not ended, the most at once; wait for one to end"
ALL_TASKS = "The service has {} tasks that have not ended, the most at once; try again later"
SEVERAL = "Several tasks of this context wait for an answer."
SETTLED = "The request was settled before this answer came"
APPROVED = "The plan is approved. Carry it out."
"""The prompt for an approved plan; a remark follows."""
NOT_ALLOWED = (
    "The plan cannot be carried out with this credential and profile, which allow no changes; it "
    "can be changed, or the task be canceled"
)
UNASKED = (
    "A command can run shell commands without permission, and this credential or profile has to "
    "ask for, or refrain from, changes; send a message without metadata.opencode.command"
)
UNATTENDED = (
    "cannot be used where nobody is waited for (unattended); set metadata.opencode.agent to plan "
    "to get a plan as the answer"
)
NOT_AN_ANSWER = "With {}, the message says that it is not an answer."
NEW_TASK_FIELD = "metadata.opencode.new_task"
NOT_NEW = "contradicts taskId; leave one of the two out"
ALREADY_AT_WORK = "comes too late for a task that works; send the message without taskId"
SEEN_SECONDS = 0.5
"""How long to wait for the notification that another replica has shown a request of the task."""


def _note_failure(handling: "asyncio.Future[Handled]") -> None:
    """Log why a message failed whose sender has gone away, unless it is an ordinary refusal."""
    error = None if handling.cancelled() else handling.exception()
    if error is not None and not isinstance(error, ServiceError):
        logger.error("a message failed after its sender had gone", exc_info=error)


class Handled(NamedTuple):
    """What ``Submitted`` says, as replicas send it to each other: with the id of the task alone."""

    task_id: TaskId
    seq: int
    repeat: bool = False


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
        budgets: Budgets,
        mailbox: Mailbox,
    ) -> None:
        self._database = database
        self._writer = writer
        self._fleet = fleet
        self._limits = limits
        self._webhooks = webhooks
        self._open = open_tasks
        self._budgets = budgets
        self.message_locks: WeakValueDictionary[tuple[Principal, str], asyncio.Lock] = (
            WeakValueDictionary()
        )
        """Held while a message on a task, or the reply to an interrupt, is handled: a copy of it
        waits, and is then known as a copy. A lock exists for as long as somebody refers to it."""

        self._handling = OwnerCall(
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
            log, where = await self._open.locate(command.principal, task_ids[0])
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
        answerable = self._open.answerable_of_remote_tasks(command.principal)
        command = replace(command, answerable=answerable)
        handling = asyncio.ensure_future(self._handling.run(where, command))
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
            earlier = await self._earlier(command)
            if earlier is not None:
                return Handled(TaskId(earlier.id), 0, repeat=True)
        if waiting:
            await self._refuse_ambiguous(command, waiting)
        bound = [] if self._fleet.alone else await self._database.read(self._bound, command)
        where = await self._fleet.where_message_belongs(command.context_id, routing, bound)
        return await self._handling.run(where, command)

    async def handle(self, member: Member, command: SendCommand) -> Handled:
        """Handle a message where it belongs; raise MovedError if that is not here."""
        task_ids = await self._tasks_meant(command)
        if len(task_ids) == 1:
            return await self._handle_on_task(command, task_ids[0])
        if task_ids:
            await self._refuse_ambiguous(command, task_ids)
        await member.turns.check_reachable()
        if command.request.routing != NO_ROUTING:
            await _check(command.principal, command.request, member.turns)
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

    async def _earlier(self, command: SendCommand, task_id: str | None = None) -> TaskRow | None:
        """Return the task that this very message led to before; raise its refusal again.

        With ``task_id`` also if the message named that task then, and does not do so now.
        """
        message = (command.principal, command.message.message_id)
        digests = dict.fromkeys((command.digest, replace(command, task_id=task_id).digest))

        def read(connection: Connection) -> tuple[TaskRow, bytes | None] | None:
            found = (task_rows.find_message(connection, *message, digest) for digest in digests)
            return next(filter(None, found), None)

        row, refusal = await self._database.read(read) or (None, None)
        if refusal is not None:
            raise load_refusal(refusal)
        return row

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

    # A task that exists

    async def _handle_on_task(self, command: SendCommand, task_id: str) -> Handled:
        """Handle an answer, another try after a sign-in, a further prompt, or a repeat of one."""
        copies, came = (command.principal, command.message.message_id), time.monotonic()
        async with self.message_locks.setdefault(copies, asyncio.Lock()):
            earlier = await self._earlier(command, task_id)
            row = earlier or await self._open.row(command.principal, task_id)
            task = self._open.get(row.id)
            if task is None and not state_of(row).terminal:
                raise MovedError(row.upstream)
            if earlier is not None:
                if task is not None and task.interrupts is not None:
                    await task.interrupts.repeat(command.message)
                log = await self._open.log_of(earlier)
                if command.message not in log.state.history:
                    raise InterruptNotFoundError(SETTLED)
                return Handled(log.ref.id, 0, repeat=True)
            if task is None:
                raise UnsupportedOperationError(ENDED)
            await task.member.turns.check_reachable()
            log = task.log
            # Before the state is read: it may change while this waits.
            answerable = await self._answerable(command, log, came)
            status = log.state.status
            if command.sign_in is not None and status.sign_in != command.sign_in:
                refusal = InterruptNotFoundError(SETTLED)
                await self._database.write(message_write(command, log, refusal=refusal))
                raise refusal
            match status.state:
                case State.INPUT_REQUIRED:
                    return await self._answer(command, task, answerable)
                case _ if command.request.routing.new_task:
                    raise InvalidParamsError.of(NEW_TASK_FIELD, NOT_NEW)
                case State.AUTH_REQUIRED:
                    return await self._try_again(command, task)
                case _:
                    return await self._add(command, task)

    async def _answerable(self, command: SendCommand, log: TaskLog, came: float) -> int:
        """Return the highest request that a plain answer may be for, by what readers were shown.

        Wait a moment if nobody was shown the latest request of the task, here or at the sender: the
        notification that another replica has shown it may be on its way. The state of the log is
        firm then, until the next await.
        """
        at_sender, by_context = command.answerable.get(log.ref.id, 0), command.task_id is None
        if by_context:
            # Whether it may be late for another request of the context is known only here.
            log.note_seen_number(at_sender)
            at_sender = 0
        newest = max((one.number or 0 for one in log.state.status.pending), default=0)
        until = time.monotonic() + SEEN_SECONDS
        while max(log.seen.newest, at_sender) < newest:
            if not self._database.census.has_others or time.monotonic() > until:
                break
            await asyncio.sleep(SEEN_SECONDS / 20)
        await log.firm_state()
        return max(log.seen.answerable(came, by_context=by_context), at_sender)

    async def _answer(self, command: SendCommand, task: OpenTask, answerable: int) -> Handled:
        """Take a message as the answer to what a task asks: its interrupts, or its plan."""
        state, log, request = task.log.state, task.log, command.request
        # What is declared to be work for the agent is no consent, whatever its words are. It stays
        # unrecorded: later, when the task works or without the task, it may well be taken.
        declared = {
            "metadata.shared.delivery": request.delivery is not None,
            NEW_TASK_FIELD: request.routing.new_task,
            COMMAND_FIELD: request.routing.command is not None,
        }
        if named := [name for name, is_set in declared.items() if is_set]:
            log.note_seen(state.status)  # the refusal shows it
            text = NOT_AN_ANSWER.format(" and ".join(named))
            raise AnswerExpectedError(text, task_ids=[log.ref.id])
        try:
            if (plan := state.status.plan) is not None:
                decision = understand_plan_answer(command.message, plan, answerable)
                return await self._act_on_plan(command, task, plan, decision)
            meaning = understand(command.message, state.status.pending, answerable)
        except NotUnderstoodError as error:
            log.note_seen(state.status)  # the refusal shows it
            outdated, text = isinstance(error, OutdatedAnswerError), str(error)
            refusal: ServiceError = AnswerExpectedError(text, task_ids=[log.ref.id])
            meant_as_answer = outdated or isinstance(error, ContradictionError)
            if command.task_id is not None and not meant_as_answer:
                refusal = InvalidParamsError.of("message.parts", text, text)
            # Sent again, it must not answer a request that comes later. A message that names no
            # task, and could be something else than an answer, may yet start one.
            if command.task_id is not None or meant_as_answer or only_an_answer(command.message):
                await self._database.write(message_write(command, log, refusal=refusal))
            raise refusal from None
        answer = Answer(meaning.reply, command.principal, command.message, command.request.rights)
        requests = [asked.request_id for asked in meaning.asked]
        seq = log.state.seq
        try:
            async with self._recording(command, task) as in_same_commit:
                if task.interrupts is None:
                    raise InterruptNotFoundError(request_id=requests[0])
                await task.interrupts.answer(requests, answer, in_same_commit)
        except ServiceError as refused:
            if isinstance(refused, FINAL_REFUSALS):
                await self._database.write(message_write(command, log, refusal=refused))
            raise
        return Handled(log.ref.id, seq)

    async def _act_on_plan(
        self, command: SendCommand, task: OpenTask, plan: Interrupted, decision: PlanDecision
    ) -> Handled:
        """Cancel a task, have its plan carried out, or have the plan changed."""
        routing, planned = command.request.routing, task.routing
        if decision.wanted == "cancel":
            seq = task.log.state.seq
            async with self._recording(command, task) as in_same_commit:
                await task.cancel_plan(command.message, in_same_commit, plan)
            return Handled(task.log.ref.id, seq)
        self._check_place(routing, task)
        go, following = decision.wanted == "go", _next_routing(routing, planned)
        agent = following.agent
        if routing.agent is not None:
            named = replace(planned, session_id=None, agent=routing.agent)
            await task.member.turns.sessions.check(command.principal, named)
        if go and agent is None:
            # OpenCode would go on with the agent that planned.
            agent = task.member.turns.settings.opencode.agent or DEFAULT_AGENT
        request = replace(
            command.request,
            routing=replace(following, agent=agent, command=None, plan=not go),
            # A profile that was named for the plan also limits the turn that carries it out.
            rights=command.request.rights & planned.rights,
            delivery=None,
        )
        if go:
            if (request.rights & task.member.turns.rights).changes == "deny":
                raise AuthorizationForbiddenError(NOT_ALLOWED)
            text = "\n\n".join(filter(None, (APPROVED, decision.remark)))
            request = replace(request, prompt=(PromptPart(text=text),))
        _check_attended(request)
        return await self._resume(command, task, request, plan)

    async def _try_again(self, command: SendCommand, task: OpenTask) -> Handled:
        """Run another turn of a task that waits for a sign-in."""
        named = command.request.routing
        self._check_place(named, task)
        # Work that was to be planned first is still planned first, and another try gives nobody
        # more rights.
        routing = replace(_next_routing(named, task.routing), plan=named.plan or task.routing.plan)
        rights = command.request.rights & task.rights
        request = replace(command.request, routing=routing, rights=rights)
        if routing != NO_ROUTING:
            await _check(command.principal, request, task.member.turns)
        return await self._resume(command, task, request, None)

    async def _resume(
        self,
        command: SendCommand,
        task: OpenTask,
        request: TurnRequest,
        plan: Interrupted | None,
    ) -> Handled:
        """Begin the next turn of a task, if the caller's budget allows one more."""
        await self._budgets.check(command.principal, command.budget, begins_turn=True)
        seq = task.log.state.seq
        async with self._recording(command, task, request) as in_same_commit:
            await task.begin_next_turn(command.message, request, in_same_commit, plan)
        return Handled(task.log.ref.id, seq)

    async def _add(self, command: SendCommand, task: OpenTask) -> Handled:
        """Hand a message to the turn that runs."""
        state, routing = task.log.state.status.state, command.request.routing
        late = command.request.delivery is None and only_an_answer(command.message)
        if command.task_id is None or late or state.terminal:
            refusal = UnsupportedOperationError(ENDED if state.terminal else WORKING)
            if late:  # sent again, it must not answer the next request
                await self._database.write(message_write(command, task.log, refusal=refusal))
            raise refusal
        self._check_place(routing, task)
        if routing.plan and not task.routing.plan:
            raise InvalidParamsError.of(PLAN_FIELD, ALREADY_AT_WORK)
        if routing.command is not None:
            raise InvalidParamsError.of(COMMAND_FIELD, ALREADY_AT_WORK)
        await self._budgets.check(command.principal, command.budget, begins_turn=False)
        added = Added(command.message, command.request)
        seq = task.log.state.seq
        async with self._recording(command, task) as in_same_commit:
            await task.add(added, in_same_commit)
        return Handled(task.log.ref.id, seq)

    @asynccontextmanager
    async def _recording(
        self, command: SendCommand, task: OpenTask, request: TurnRequest | None = None
    ) -> AsyncGenerator[Write]:
        """Yield the write that records a message, for the transaction in which a task accepts it.

        That also stores the webhook that the message brings: a message whose webhook cannot be
        stored is not accepted. ``request`` is that of the turn that the message begins.
        """
        log, push = task.log, command.push
        record_message = message_write(command, log, request)
        if push is None:
            yield record_message
            return
        await self._webhooks.check_limits(log, push)
        store_webhook = self._webhooks.inserting(log, push)
        stored: list[tuple[HookRow, Replaced | None] | None] = []

        def in_same_commit(connection: Connection) -> None:
            record_message(connection)
            stored[:] = [store_webhook(connection)]  # again, if the first transaction fails

        try:
            yield in_same_commit
        finally:  # it is stored, too, with an answer that OpenCode does not take now
            for webhook, replaced in filter(None, stored):
                await self._webhooks.note_if_stored(webhook, replaced, log)

    def _check_place(self, routing: Routing, task: OpenTask) -> None:
        """Refuse a message that names another place than its task runs in."""
        field, named = None, routing.workspace_id or routing.directory
        if routing.session_id not in (None, task.log.state.status.session_id):
            field = SESSION_FIELD
        elif named and not task.member.turns.sessions.same_place(routing, task.routing):
            field = WORKSPACE_FIELD if routing.workspace_id else DIRECTORY_FIELD
        if field is not None:
            raise InvalidParamsError.of(field, "is not where this task runs; leave it out")


def _next_routing(named: Routing, earlier: Routing) -> Routing:
    """Return where the next turn of a task runs: as the one before it, unless the message says."""
    return replace(
        earlier,
        model=named.model or earlier.model,
        agent=named.agent or earlier.agent,
        command=named.command,
        rights=named.rights & earlier.rights,
        output_schema=named.output_schema or earlier.output_schema,
        hops=named.hops,
    )


async def _check(principal: Principal, request: TurnRequest, turns: SharedTurns) -> None:
    """Refuse a prompt that cannot be run, or not with these rights, before it is stored."""
    routing = request.routing
    if routing.command is not None:
        if (request.rights & turns.rights).changes != "allow":
            raise AuthorizationForbiddenError(UNASKED)
        if any(part.text is None for part in request.prompt):
            raise InvalidParamsError.of(
                "message.parts", "must be text alone: a command takes no files"
            )
    await turns.sessions.check(principal, routing, request.text)
    _check_attended(request)


def _check_attended(request: TurnRequest) -> None:
    """Refuse a plan where nobody is there to approve it."""
    if request.routing.plan and not request.rights.waits:
        raise InvalidParamsError.of(PLAN_FIELD, UNATTENDED)
