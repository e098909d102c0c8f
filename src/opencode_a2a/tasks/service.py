"""Every task: what ``server`` and ``extensions`` may ask of them.

``TaskService`` admits messages, holds the tasks that are open, and finds the ended ones in the
store. An ``OpenTask`` owns the log of a task and the turn that runs for it. A task of another
principal is not found.
"""

import asyncio
import base64
import hashlib
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields, replace
from uuid import uuid4
from weakref import WeakValueDictionary

import orjson
import structlog
from sqlalchemy.engine import Connection

from opencode_a2a import metrics
from opencode_a2a.config import LimitSettings
from opencode_a2a.errors import (
    AuthorizationForbiddenError,
    BudgetExhaustedError,
    InterruptNotFoundError,
    InterruptTypeMismatchError,
    InvalidParamsError,
    LimitExceededError,
    ServiceError,
    SessionNotFoundError,
    TaskNotCancelableError,
    TaskNotFoundError,
    UnsupportedOperationError,
    UpstreamUnreachableError,
    Violation,
)
from opencode_a2a.ids import ContextId, Principal, SessionId, TaskId
from opencode_a2a.messages import (
    ANYWHERE,
    Added,
    Answered,
    Message,
    PromptPart,
    PushConfig,
    Routing,
    TurnRequest,
)
from opencode_a2a.rights import UNLIMITED, Budget
from opencode_a2a.store import links, spending
from opencode_a2a.store import tasks as task_rows
from opencode_a2a.store.database import Database, Write
from opencode_a2a.store.spending import Spent
from opencode_a2a.store.tasks import Key, Segment, TaskRow
from opencode_a2a.store.webhooks import HookRow
from opencode_a2a.tasks import budget
from opencode_a2a.tasks.budget import Figures
from opencode_a2a.tasks.caretaker import UNSTOPPED, end_unowned
from opencode_a2a.tasks.log import LogWriter, TaskLog, load_task
from opencode_a2a.tasks.mailbox import OTHERS_SECONDS, Mailbox, known_fields
from opencode_a2a.tasks.open import ENDED, WORKING, OpenTask, OpenTasks
from opencode_a2a.tasks.outbox import SNAPSHOTS, Outbox
from opencode_a2a.tasks.readers import Begin, DurableReader, LogReader
from opencode_a2a.tasks.state import (
    OPEN,
    Accepted,
    Cursor,
    Query,
    State,
    TaskRef,
    TaskState,
    dump_entries,
    load_request,
)
from opencode_a2a.tasks.tails import RemoteLog, Tails
from opencode_a2a.telemetry import ROUTINE, now_ms
from opencode_a2a.turns.answers import (
    Answer,
    NotUnderstoodError,
    OutdatedAnswerError,
    PlanDecision,
    decide,
    only_an_answer,
    understand,
)
from opencode_a2a.turns.fleet import Fleet, Member, NotOwnerError
from opencode_a2a.turns.rights import DEFAULT_AGENT
from opencode_a2a.turns.sessions import (
    COMMAND_FIELD,
    DIRECTORY_FIELD,
    PLAN_FIELD,
    SESSION_FIELD,
    WORKSPACE_FIELD,
)
from opencode_a2a.turns.turn import Turns

logger = structlog.get_logger(__name__)

OWN_TASKS = "This caller has {} tasks that have not ended, the most at once; wait for one to end"
ALL_TASKS = "The service has {} tasks that have not ended, the most at once; try again later"
SEVERAL = "Several tasks of this context wait for an answer."
APPROVED = "The plan is approved. Carry it out."
"""What the agent is told; a remark follows."""
NOT_ALLOWED = (
    "The plan cannot be carried out with this credential and profile, which allow no changes; it "
    "can be changed, or the task be canceled"
)
UNASKED = (
    "A command can run shell commands without permission, and this credential or profile has to "
    "ask for, or refrain from, changes; send a message without metadata.opencode.command"
)
UNWATCHED = (
    "cannot be used where nobody is waited for (unattended); set metadata.opencode.agent to plan "
    "to get a plan as the answer"
)
ALREADY_AT_WORK = "comes too late for a task that works; send the message without taskId"
SEEN_SECONDS = 0.5
"""How long the word may take that another replica has shown what is asked."""
FIRST_ROUTING = frozenset({"session_id", "directory", "workspace_id", "model", "hops"})
"""The fields of a routing that 2.0.0 had."""
ANYWHERE_FIELDS = asdict(ANYWHERE)
REFUSALS = (
    *(AuthorizationForbiddenError, InterruptNotFoundError, InterruptTypeMismatchError),
    *(InvalidParamsError, UnsupportedOperationError),
)
"""How an answer is refused for good: the same message is never an answer to something else."""


@dataclass(frozen=True, slots=True)
class SendCommand:
    """A message that starts a task, or continues the one it names."""

    principal: Principal
    message: Message
    request: TurnRequest
    """What the turn is to do, if the message leads to one."""
    task_id: str | None = None
    context_id: str | None = None
    output_modes: tuple[str, ...] | None = None
    push: PushConfig | None = None
    """Stored with a new task. It is not part of the content: a repeat may name another."""
    budget: Budget = UNLIMITED
    seen: Mapping[TaskId, int] = field(default_factory=dict[TaskId, int])
    """Of a message that came to another replica: what its readers were shown (``Tails.seen``)."""

    @property
    def digest(self) -> bytes:
        """What identifies the content: a repeat has the same message id and the same digest.

        Of a message on a task nothing else counts: a client that repeats it may have learnt the
        context meanwhile.
        """
        content: tuple[object, ...] = (self.message, self.task_id)
        if self.task_id is None:
            routing = asdict(self.request.routing)
            # A field that a later version added counts only if it says something: a repeat of a
            # message that an earlier version took has to be known.
            for name in routing.keys() - FIRST_ROUTING:
                if routing[name] == ANYWHERE_FIELDS[name]:
                    del routing[name]
            content += (
                self.context_id,
                orjson.Fragment(orjson.dumps(routing)),  # in the order of its fields
                self.output_modes,
            )
        return hashlib.sha256(orjson.dumps(content, option=orjson.OPT_SORT_KEYS)).digest()

    def dump(self) -> bytes:
        """Write it down for another replica, with the secrets of its webhook."""
        rest = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "request"}
        return orjson.dumps(rest) + b"\n" + orjson.dumps(self.request)

    @classmethod
    def load(cls, data: bytes) -> "SendCommand":
        rest, _, request = data.partition(b"\n")
        sent = orjson.loads(rest)
        modes, push = sent["output_modes"], sent["push"]
        loaded = {
            "message": Message.load(sent["message"]),
            "request": load_request(request),
            "output_modes": None if modes is None else tuple(modes),
            "push": None if push is None else PushConfig(**known_fields(PushConfig, push)),
            "budget": Budget(**known_fields(Budget, sent["budget"])),
        }
        return cls(**known_fields(cls, sent | loaded))


@dataclass(frozen=True, slots=True)
class Submitted:
    """What became of a message: its task, and where the log was before the message."""

    log: TaskLog
    seq: int
    new: bool = False
    """Whether the task was made for the message."""


@dataclass(frozen=True, slots=True)
class Page:
    tasks: list[TaskState]
    next_token: str
    """Empty on the last page."""
    size: int
    total: int


class AnswerExpectedError(Exception):
    """A message that names no task is not the answer that tasks of its context wait for."""

    reason = "ANSWER_EXPECTED"

    def __init__(self, waiting: Sequence[TaskState], problem: str) -> None:
        super().__init__(problem)
        self.waiting = waiting


class TaskService:
    def __init__(
        self,
        database: Database,
        writer: LogWriter,
        fleet: Fleet,
        limits: LimitSettings,
        outbox: Outbox,
        readers: Sequence[DurableReader],
    ) -> None:
        self._database = database
        self._writer = writer
        self._fleet = fleet
        self._limits = limits
        self._outbox = outbox
        self._readers = readers
        self.tails = Tails(database, writer)
        """The tasks that another replica runs, as far as they are read here."""
        self.open = OpenTasks(database, writer, fleet, self.tails)
        """The open tasks that this process runs."""
        self.mailbox = Mailbox(database, fleet.owned)
        """What is asked of the replica that runs a task, and by others of this one."""
        self.mailbox.handlers |= {
            "submit": self._submit_for,
            "cancel": self._cancel_for,
            "webhook": self._put_webhook_for,
            "no webhook": self._delete_webhook_for,
            "session": self._has_session,
        }
        fleet.find_session = self._find_session
        self.answering: WeakValueDictionary[tuple[Principal, str], asyncio.Lock] = (
            WeakValueDictionary()
        )
        """Held while a message on a task, or the reply to an interrupt, is handled: a copy of it
        waits, and is then known as a copy. A lock exists for as long as somebody refers to it."""

    # Sending

    async def submit(self, command: SendCommand) -> Submitted:
        """Start a task, or continue the one that the message names, wherever it runs."""
        try:
            return await self._submit(command)
        except NotOwnerError as other:
            upstream = other.upstream
        command = replace(command, seen=self.tails.seen(command.principal))
        reply = orjson.loads(
            await self.mailbox.ask(upstream, "submit", command.dump(), repeatable=True)
        )
        found = [await self._row(command.principal, task_id) for task_id in reply["tasks"]]
        if reply["expected"] is not None:
            raise AnswerExpectedError([load_task(row) for row in found], reply["expected"])
        return Submitted(await self._log(found[0]), reply["seq"], reply["new"])

    async def _submit_for(self, body: bytes) -> bytes:
        """Take a message for another replica."""
        try:
            done = await self._submit(SendCommand.load(body))
        except AnswerExpectedError as error:
            waiting = [state.ref.id for state in error.waiting]
            return orjson.dumps({"expected": str(error), "tasks": waiting})
        tasks = [done.log.ref.id]
        return orjson.dumps({"expected": None, "tasks": tasks, "seq": done.seq, "new": done.new})

    async def _submit(self, command: SendCommand) -> Submitted:
        if command.task_id is not None:
            return await self._continue(command, command.task_id)
        routing, references = command.request.routing, command.message.reference_task_ids
        named = command.context_id or routing.session_id or references
        elsewhere = (
            await self._elsewhere(command) if named and self._database.has_other_replicas else []
        )
        waiting: list[TaskLog] = []
        if named and not routing.new_task:
            waiting = self._waiting(command)
            for row, where in elsewhere:
                if self._awaits(command, load_task(row), where):
                    waiting.append(await self._log(row))
        if waiting:
            return await self._continue_one(command, waiting)
        if routing != ANYWHERE:
            earlier = await self._repeated(command)
            if earlier is not None:
                return Submitted(await self._log(earlier), 0)
        for row, where in elsewhere:
            if self._joins(command, row, where):
                raise NotOwnerError(row.upstream)  # its session may not be stored yet
        member = await self._fleet.member_for(command.principal, command.context_id, routing)
        await member.turns.reachable()
        if routing != ANYWHERE:
            await _check(command.principal, command.request, member.turns)
        if not member.owned:  # it was given up meanwhile
            raise NotOwnerError(member.name)
        task = await self.admit(command, member)
        if isinstance(task, TaskRow):
            return Submitted(await self._log(task), 0)
        task.start(command.request, new_context=command.context_id is None)
        return Submitted(task.log, task.log.state.seq, new=True)

    async def _continue_one(self, command: SendCommand, waiting: list[TaskLog]) -> Submitted:
        """Take a message as the answer to the task that waits for one, if that is only one.

        To run it behind a task that waits for its answer would be to wait for ever.
        """
        references = command.message.reference_task_ids
        waiting = [log for log in waiting if log.ref.id in references] or waiting
        if len(waiting) == 1:
            return await self._continue(command, waiting[0].ref.id)
        earlier = await self._repeated(command)
        if earlier is not None:
            return Submitted(await self._log(earlier), 0)
        states = [await log.firm_state() for log in waiting]
        refusal = AnswerExpectedError(states, SEVERAL)
        if only_an_answer(command.message):
            for log in waiting:
                await self._database.write(_remember(command, log, refusal=refusal))
        raise refusal

    async def admit(self, command: SendCommand, member: Member) -> OpenTask | TaskRow:
        """Store a new task before anything runs; if the message is a repeat, return its task.

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
        limits, several = self._limits, self._database.has_other_replicas
        message = (principal, command.message.message_id)
        begun = self._fleet.errands_of(principal) if command.budget.turns else 0

        def write(connection: Connection) -> tuple[int, list[Begin]] | TaskRow:
            if several:
                task_rows.await_admissions(connection, principal)
            earlier = task_rows.find_message(connection, *message, digest)
            if earlier is not None:
                row_before, refusal = earlier
                if refusal is not None:
                    raise _load_refusal(refusal)
                return row_before
            own, everybody = counted
            if several:
                self._check_binding(connection, command, member)
                own = task_rows.tally(connection, OPEN, principal)
                everybody = task_rows.tally(connection, OPEN)
            if own >= (most := limits.max_tasks_per_principal):
                raise LimitExceededError(OWN_TASKS.format(most), limit=most)
            if everybody >= (most := limits.max_open_tasks):
                raise LimitExceededError(ALL_TASKS.format(most), limit=most)
            if command.budget != UNLIMITED:
                budget.check_spent(connection, principal, command.budget)
            if command.budget.turns:
                running = task_rows.tally(connection, budget.RUNNING, principal) + begun + 1
                budget.check_turns(running, command.budget)
            no = task_rows.add_task(connection, row, (command.message.message_id, digest))
            task_rows.append(connection, [Segment(no, 1, 1, segment)], [])
            begins = (one.admit(connection, no, ref, command.push) for one in self._readers)
            return no, [begin for begin in begins if begin is not None]

        def admitted(no: int, begins: Sequence[Begin]) -> OpenTask:
            log = TaskLog(no, state, self._writer, self._database)
            task = self.open.adopt(log, member, command.request.routing)
            for begin in begins:
                begin(task.log)
            return task

        def late(outcome: tuple[int, list[Begin]] | TaskRow) -> None:
            """Run what was stored after its sender was told that the database is away.

            The sender can send the message again, and finds this task.
            """
            if not isinstance(outcome, TaskRow) and member.owned:  # else its next owner finds it
                task = admitted(*outcome)
                task.start(command.request, new_context=command.context_id is None)

        with self.open.admission(principal, member, limits) as counted:
            try:
                outcome = await self._database.write(write, late=late, order=message)
            except BudgetExhaustedError as error:
                budget.note_refusal(principal, error)
                raise
            return outcome if isinstance(outcome, TaskRow) else admitted(*outcome)

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
            and self._joins(command, row, load_request(row.request).routing)
        ]
        if member.name not in bound:
            for upstream in filter(self._fleet.keeps_contexts, bound):
                raise NotOwnerError(upstream)

    async def check_budget(
        self, principal: Principal, limits: Budget, *, another: bool = False
    ) -> None:
        """Raise BudgetExhaustedError if a caller may give no more work, or no other turn, now."""

        def read(connection: Connection) -> int:
            budget.check_spent(connection, principal, limits)
            return task_rows.tally(connection, budget.RUNNING, principal)

        if limits.cost_per_day or limits.tokens_per_day or limits.turns:
            try:
                running = await self._database.read(read)
                if another:  # else it is part of what runs already
                    # Nothing is awaited between this and the beginning of an errand.
                    budget.check_turns(running + self._fleet.errands_of(principal) + 1, limits)
            except BudgetExhaustedError as error:
                budget.note_refusal(principal, error)
                raise

    async def budget_of(self, principal: Principal, limits: Budget) -> Figures:
        """Return what a caller has used, and may still use."""
        day = spending.day_of(now_ms())

        def read(connection: Connection) -> tuple[Spent, int]:
            running = task_rows.tally(connection, budget.RUNNING, principal)
            return spending.read(connection, principal, day), running

        spent, running = await self._database.read(read)
        return budget.figures(spent, running + self._fleet.errands_of(principal), limits)

    def _waiting(self, command: SendCommand) -> list[TaskLog]:
        """Return the logs of the tasks whose answer a message that names no task may be.

        They are the caller's own and wait in the context that the message names, in the session
        that it names, or are named among its references. Of several, a reference decides.
        """
        return [
            task.log
            for task in self.open.waiting()
            if self._awaits(command, task.log.state, task.routing)
        ]

    async def _elsewhere(self, command: SendCommand) -> list[tuple[TaskRow, Routing]]:
        """Return the caller's tasks that other replicas run, and where each was to run.

        If the message names a context, only those in it.
        """
        states = [State.INPUT_REQUIRED] if command.context_id is None else list(OPEN)
        wanted = (command.principal, states, command.context_id)
        found = await self._database.read(
            lambda connection: task_rows.of_principal(connection, *wanted)
        )
        return [
            (row, load_request(row.request).routing)
            for row in found
            if row.request is not None
            and self.open.get(row.id) is None
            and not self._fleet.owns(row.upstream)
        ]

    def _joins(self, command: SendCommand, row: TaskRow, planned: Routing) -> bool:
        """Whether a message is to run in the session of a task, which was to run somewhere."""
        routing = command.request.routing
        if row.context_id != command.context_id or routing.session_id is not None:
            return False
        with suppress(InvalidParamsError):  # the directory of the task is gone: its turn says so
            return self._fleet.first.turns.sessions.same_place(routing, planned)
        return False

    def _awaits(self, command: SendCommand, state: TaskState, planned: Routing) -> bool:
        """Whether a task that was to run somewhere waits for a message like this one."""
        ref, status, routing = state.ref, state.status, command.request.routing
        if ref.principal != command.principal or status.state is not State.INPUT_REQUIRED:
            return False
        if command.context_id is None and routing.session_id is None:
            return ref.id in command.message.reference_task_ids
        if command.context_id not in (None, ref.context_id):
            return False
        # What is to run in another place is no answer, and does not have to wait.
        if routing.session_id is not None:
            return routing.session_id == status.session_id
        named = routing.directory is not None or routing.workspace_id is not None
        # All OpenCodes have the same places.
        return not named or self._fleet.first.turns.sessions.same_place(routing, planned)

    async def _repeated(self, command: SendCommand, task_id: str | None = None) -> TaskRow | None:
        """Return the task that this very message led to before; one that was refused still is.

        With ``task_id`` also if it named that task then, and does not do so now.
        """
        message = (command.principal, command.message.message_id)
        digests = dict.fromkeys((command.digest, replace(command, task_id=task_id).digest))

        def read(connection: Connection) -> tuple[TaskRow, bytes | None] | None:
            found = (task_rows.find_message(connection, *message, digest) for digest in digests)
            return next(filter(None, found), None)

        row, refusal = await self._database.read(read) or (None, None)
        if row is not None and refusal is not None:
            task = self.open.get(row.id)
            state = load_task(row) if task is None else task.log.state
            waits = state.status.state is State.INPUT_REQUIRED
            raise _load_refusal(refusal, [state] if waits else [])
        return row

    async def _continue(self, command: SendCommand, task_id: str) -> Submitted:
        """Take a message on a task: an answer, another try after a sign-in, or a further prompt."""
        row = await self._row(command.principal, task_id)
        if command.context_id is not None and command.context_id != row.context_id:
            raise _wrong("message.contextId", "is not the context of this task; leave it out")
        self._check_owned(row)
        copies = (command.principal, command.message.message_id)
        async with self.answering.setdefault(copies, asyncio.Lock()):
            earlier = await self._repeated(command, task_id)
            if earlier is not None:
                # A copy of a message that was here before: return what became of it.
                task = self.open.get(earlier.id)
                if task is not None:
                    await task.repeat(command.message)
                log = await self._log(earlier)
                if command.message not in log.state.history:
                    self._check_owned(earlier)
                    raise InterruptNotFoundError("The request was settled before this answer came")
                return Submitted(log, 0)
            task = self.open.get(task_id)
            if task is None:
                self._check_owned(row)
                raise UnsupportedOperationError(ENDED)
            task.check_owned()
            await task.member.turns.reachable()
            state = await task.log.firm_state()
            match state.status.state:
                case State.INPUT_REQUIRED:
                    return await self._answer(command, task)
                case State.AUTH_REQUIRED:
                    seq, named = state.seq, command.request.routing
                    self._check_place(named, task)
                    # What was to be planned is not done without a plan, and nobody gets more
                    # rights by another try.
                    plan = named.plan or task.routing.plan
                    routing = replace(_go_on(named, task.routing), plan=plan)
                    rights = command.request.rights & task.rights
                    request = replace(command.request, routing=routing, rights=rights)
                    if routing != ANYWHERE:
                        await _check(command.principal, request, task.member.turns)
                    remember = _remember(command, task.log, request)
                    await self.check_budget(command.principal, command.budget, another=True)
                    await task.resume(command.message, request, remember, None)
                    return Submitted(task.log, seq)
                case _:
                    late = command.request.delivery is None and only_an_answer(command.message)
                    if command.task_id is None or late or state.status.state.terminal:
                        refusal = UnsupportedOperationError(
                            ENDED if state.status.state.terminal else WORKING
                        )
                        if late:  # sent again, it must not answer what is asked next
                            await self._database.write(
                                _remember(command, task.log, refusal=refusal)
                            )
                        raise refusal
                    self._check_place(command.request.routing, task)
                    if command.request.routing.plan and not task.routing.plan:
                        raise _wrong(PLAN_FIELD, ALREADY_AT_WORK)
                    if command.request.routing.command is not None:
                        raise _wrong(COMMAND_FIELD, ALREADY_AT_WORK)
                    await self.check_budget(command.principal, command.budget)
                    seq, remember = state.seq, _remember(command, task.log)
                    await task.add(Added(command.message, command.request), remember)
                    return Submitted(task.log, seq)

    def _check_place(self, routing: Routing, task: OpenTask) -> None:
        """Refuse to take a message elsewhere than its task runs."""
        field, elsewhere = None, routing.workspace_id or routing.directory
        if routing.session_id not in (None, task.log.state.status.session_id):
            field = SESSION_FIELD
        elif elsewhere and not task.member.turns.sessions.same_place(routing, task.routing):
            field = WORKSPACE_FIELD if routing.workspace_id else DIRECTORY_FIELD
        if field is not None:
            raise _wrong(field, "is not where this task runs; leave it out")

    async def _answer(self, command: SendCommand, task: OpenTask) -> Submitted:
        state, log = task.log.state, task.log
        newest = max((one.number or 0 for one in state.status.pending), default=0)
        until = time.monotonic() + SEEN_SECONDS
        while (seen := max(log.seen_number, command.seen.get(log.ref.id, 0))) < newest:
            # What another replica showed is told by a notification, which may be on its way.
            if not self._database.has_other_replicas or time.monotonic() > until:
                break
            await asyncio.sleep(SEEN_SECONDS / 20)
        task.check_owned()
        try:
            if (plan := state.status.plan) is not None:
                decision = decide(command.message, plan, seen)
                return await self._decide(command, task, decision)
            meaning = understand(command.message, state.status.pending, seen)
        except NotUnderstoodError as error:
            task.log.note_seen(state.status)  # by this refusal
            outdated, text = isinstance(error, OutdatedAnswerError), str(error)
            refusal: AnswerExpectedError | ServiceError = AnswerExpectedError([state], text)
            if command.task_id is not None and not outdated:
                refusal = InvalidParamsError(text, violations=(Violation("message.parts", text),))
            # Sent again, it must not answer what it was not meant for. A message that names no
            # task, and could be something else than an answer, may yet start one.
            if command.task_id is not None or outdated or only_an_answer(command.message):
                await self._database.write(_remember(command, task.log, refusal=refusal))
            raise refusal from None
        seq, remember = state.seq, _remember(command, task.log)
        answer = Answer(meaning.reply, command.principal, command.message, command.request.rights)
        requests = [asked.request_id for asked in meaning.asked]
        try:
            await task.answer(requests, answer, remember)
        except REFUSALS as refused:
            await self._database.write(_remember(command, task.log, refusal=refused))
            raise
        return Submitted(task.log, seq)

    async def _decide(
        self, command: SendCommand, task: OpenTask, decision: PlanDecision
    ) -> Submitted:
        """Do with the plan of a task what its caller wants."""
        seq, routing = task.log.state.seq, command.request.routing
        plan = task.log.state.status.plan
        if decision.wanted == "cancel":
            await task.log.append([Answered(command.message)], _remember(command, task.log))
            await task.cancel()
            return Submitted(task.log, seq)
        self._check_place(routing, task)
        go, planned = decision.wanted == "go", task.routing
        following = _go_on(routing, planned)
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
            # A profile that was named for the plan holds for what comes of it.
            rights=command.request.rights & planned.rights,
            delivery=None,
        )
        if go:
            if (request.rights & task.member.turns.rights).changes == "deny":
                raise AuthorizationForbiddenError(NOT_ALLOWED)
            text = "\n\n".join(filter(None, (APPROVED, decision.remark)))
            request = replace(request, prompt=(PromptPart(text=text),))
        _check_watched(request)
        await self.check_budget(command.principal, command.budget, another=True)
        remember = _remember(command, task.log, request)
        await task.resume(command.message, request, remember, plan)
        return Submitted(task.log, seq)

    # Reading

    async def task(
        self, principal: Principal, task_id: str, *, supervised: bool = False
    ) -> TaskState:
        """Return a task; what a supervisor reads is not shown to its principal."""
        task = self.open.of(principal, task_id)
        if task is not None:
            state = await task.log.firm_state()
            if not supervised:
                task.log.note_seen(state.status)
            return state
        row = await self._row(principal, task_id)
        if State(row.state).terminal:
            return load_task(row)
        log = await self.tails.log(row)
        if not supervised:
            log.note_seen(log.state.status)
        return log.state

    async def owner(self, task_id: str) -> Principal | None:
        """Return whose task this is; for those who may know of all tasks."""
        task = self.open.get(task_id)
        if task is not None:
            return task.log.ref.principal
        found = await self._database.read(lambda connection: task_rows.owner(connection, task_id))
        return None if found is None else Principal(found)

    async def page(self, principal: Principal | None, query: Query) -> Page:
        """Return a page of the tasks of a principal, or of everybody's."""
        whole = query.artifacts or query.history_length > 0
        after = _read_token(query.token) if query.token else None

        def read(connection: Connection) -> tuple[list[TaskRow], int]:
            return task_rows.page(
                connection,
                principal,
                context_id=query.context_id,
                state=query.state,
                since=query.since,
                after=after,
                most=query.size + 1,
                brief=not whole,
            )

        found, total = await self._database.read(read)
        tasks: list[TaskState] = []
        for row in found[: query.size]:
            task = self.open.get(row.id)
            if not whole or State(row.state).terminal:
                tasks.append(load_task(row))
            elif task is not None:
                tasks.append(await task.log.firm_state())
            else:
                tasks.append((await self.tails.log(row)).state)
        token = ""
        if len(found) > query.size:
            last = found[query.size - 1]
            place = orjson.dumps([last.updated_at, last.no])
            token = base64.urlsafe_b64encode(place).decode().rstrip("=")
        return Page(tasks, token, query.size, total)

    async def spent(self, principal: Principal | None) -> Spent:
        """Return what the turns of a principal, or of all, have used today."""
        day = spending.day_of(now_ms())
        return await self._database.read(
            lambda connection: (
                spending.read_all(connection, day)
                if principal is None
                else spending.read(connection, principal, day)
            )
        )

    async def follow(
        self,
        principal: Principal,
        task_id: str,
        after: Cursor | None = None,
        *,
        until_asked: bool = False,
        supervised: bool = False,
    ) -> LogReader:
        """Return a reader of a task's log; see ``LogReader``."""
        log = await self.log(principal, task_id)
        if isinstance(log, RemoteLog) and after is not None:
            await log.reach(after)
        return LogReader(log, after, until_asked=until_asked, supervises=supervised)

    async def log(self, principal: Principal, task_id: str) -> TaskLog:
        """Return the log of a task, with nothing in its state that waits to be stored."""
        task = self.open.of(principal, task_id)
        if task is None:
            return await self._log(await self._row(principal, task_id))
        await task.log.firm_state()
        return task.log

    # Ending

    async def cancel(self, principal: Principal, task_id: str) -> TaskState:
        """End a task; an ended one is returned if it was canceled before, else refused."""
        try:
            return await self._cancel(principal, task_id)
        except NotOwnerError as other:
            upstream = other.upstream
        body = orjson.dumps([principal, task_id])
        try:
            await self.mailbox.ask(upstream, "cancel", body, repeatable=True)
        except UpstreamUnreachableError:
            row = await self._row(principal, task_id)
            if not await end_unowned(self._database, row, UNSTOPPED):
                raise
            self._writer.notify([row.no])
            self.tails.want([row.no])
            return await self._cancel(principal, task_id)
        return load_task(await self._row(principal, task_id))

    async def _cancel_for(self, body: bytes) -> bytes:
        """End a task for another replica."""
        await self._cancel(*orjson.loads(body))
        return b""

    async def _cancel(self, principal: Principal, task_id: str) -> TaskState:
        began = time.monotonic()
        task = self.open.of(principal, task_id)
        if task is None:
            row = await self._row(principal, task_id)
            self._check_owned(row)
            metrics.CANCEL_REQUESTS.inc()
            state = load_task(row)
        else:
            metrics.CANCEL_REQUESTS.inc()
            # What cannot be stored is refused while the turn still runs, not waited for.
            await self._database.check_writable()
            ROUTINE.info("task canceled", task_id=task_id, principal=principal)
            await task.cancel()
            state = await task.log.firm_state()
        if state.status.state is not State.CANCELED:
            raise TaskNotCancelableError("The task has ended and cannot be canceled")
        sure = "success" if state.status.failure is None else "timeout"
        metrics.CANCEL_SECONDS.labels(sure).observe(time.monotonic() - began)
        return state

    # Webhooks, which are served by the replica that runs the task, or ran it

    async def put_webhook(
        self, principal: Principal, task_id: str, config: PushConfig, *, anew: bool = True
    ) -> HookRow:
        """Have a task's changes sent to a webhook from now on; see ``Outbox.put``."""
        try:
            return await self._put_webhook(principal, task_id, config, anew=anew)
        except NotOwnerError as other:
            upstream = other.upstream
        if anew and config.id is None and config.version != SNAPSHOTS:
            config = replace(config, id=str(uuid4()))  # so that it is one, even if done twice
        body = orjson.dumps([principal, task_id, config, anew])
        named = await self.mailbox.ask(upstream, "webhook", body, repeatable=True)
        return await self._outbox.find(await self.log(principal, task_id), named.decode())

    async def _put_webhook_for(self, body: bytes) -> bytes:
        principal, task_id, config, anew = orjson.loads(body)
        row = await self._put_webhook(
            principal, task_id, PushConfig(**known_fields(PushConfig, config)), anew=anew
        )
        return row.config_id.encode()

    async def _put_webhook(
        self, principal: Principal, task_id: str, config: PushConfig, *, anew: bool
    ) -> HookRow:
        await self.check_serves(principal, task_id)
        return await self._outbox.put(await self.log(principal, task_id), config, anew=anew)

    async def delete_webhook(self, principal: Principal, task_id: str, config_id: str) -> None:
        """Forget a webhook of a task, and what is being sent to it; there may be none."""
        try:
            await self._delete_webhook(principal, task_id, config_id)
        except NotOwnerError as other:
            body = orjson.dumps([principal, task_id, config_id])
            await self.mailbox.ask(other.upstream, "no webhook", body, repeatable=True)

    async def _delete_webhook_for(self, body: bytes) -> bytes:
        await self._delete_webhook(*orjson.loads(body))
        return b""

    async def _delete_webhook(self, principal: Principal, task_id: str, config_id: str) -> None:
        await self.check_serves(principal, task_id)
        await self._outbox.delete(await self.log(principal, task_id), config_id)

    async def check_serves(self, principal: Principal, task_id: str) -> None:
        """Raise NotOwnerError if another replica serves the webhooks of a task."""
        if self.open.of(principal, task_id) is not None or not self._database.has_other_replicas:
            return
        row = await self._row(principal, task_id)
        if self._fleet.owns(row.upstream):
            return
        # That of a task that has ended needs nobody who runs it.
        ended = State(row.state).terminal
        if not ended or row.upstream in await self.mailbox.others():
            raise NotOwnerError(row.upstream)

    # Finding

    async def _find_session(self, session_id: SessionId) -> str | None:
        """Ask other replicas which of their OpenCodes has a session."""

        async def ask(upstream: str) -> bool:
            body = orjson.dumps([upstream, session_id])
            with suppress(TimeoutError, ServiceError):
                async with asyncio.timeout(OTHERS_SECONDS):
                    return (
                        await self.mailbox.ask(upstream, "session", body, repeatable=True)
                        == b"here"
                    )
            return False

        others = await self.mailbox.others()
        found = await asyncio.gather(*map(ask, others))
        return next((one for one, here in zip(others, found, strict=True) if here), None)

    async def _has_session(self, body: bytes) -> bytes:
        """Say to another replica whether an OpenCode has a session."""
        upstream, session_id = orjson.loads(body)
        try:
            await self._fleet.members[upstream].check_owned().turns.opencode.session(session_id)
        except SessionNotFoundError:
            return b"none"
        return b"here"

    def _check_owned(self, row: TaskRow) -> None:
        """Raise NotOwnerError if another replica runs a task."""
        if (task := self.open.get(row.id)) is not None:
            task.check_owned()
        elif not self._fleet.owns(row.upstream) and not State(row.state).terminal:
            raise NotOwnerError(row.upstream)

    async def _row(self, principal: Principal, task_id: str) -> TaskRow:
        row = await self._database.read(
            lambda connection: task_rows.load(connection, principal, task_id)
        )
        if row is None:
            raise TaskNotFoundError
        return row

    async def _log(self, row: TaskRow) -> TaskLog:
        task = self.open.get(row.id)
        if task is not None:
            await task.log.firm_state()
            return task.log
        if not State(row.state).terminal:  # another replica runs it, or it has just ended
            return await self.tails.log(row)
        return TaskLog(row.no, load_task(row), self._writer, self._database)


def _wrong(field: str, text: str) -> InvalidParamsError:
    return InvalidParamsError(f"{field} {text}", violations=(Violation(field, text),))


def _go_on(named: Routing, earlier: Routing) -> Routing:
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


async def _check(principal: Principal, request: TurnRequest, turns: Turns) -> None:
    """Refuse a prompt that cannot be run, or not with these rights, before it is stored."""
    routing = request.routing
    if routing.command is not None:
        if (request.rights & turns.rights).changes != "allow":
            raise AuthorizationForbiddenError(UNASKED)
        if any(part.text is None for part in request.prompt):
            raise _wrong("message.parts", "must be text alone: a command takes no files")
    await turns.sessions.check(principal, routing, request.text)
    _check_watched(request)


def _check_watched(request: TurnRequest) -> None:
    """Refuse to have something planned where nobody is there to approve it."""
    if request.routing.plan and not request.rights.waits:
        raise _wrong(PLAN_FIELD, UNWATCHED)


def _load_refusal(
    refusal: bytes, waiting: Sequence[TaskState] = ()
) -> AnswerExpectedError | ServiceError:
    """Return the error that ``_remember`` wrote down."""
    reason, text, fields, data = orjson.loads(refusal)
    if reason == AnswerExpectedError.reason:
        return AnswerExpectedError(waiting, text)
    violations = tuple(Violation(*field) for field in fields)
    kinds = {kind.reason: kind for kind in REFUSALS}
    return kinds[reason](text, violations=violations, **data)


def _remember(
    command: SendCommand,
    log: TaskLog,
    request: TurnRequest | None = None,
    refusal: AnswerExpectedError | ServiceError | None = None,
) -> Write:
    """Return the write that records the message, and its new prompt or why it was refused.

    A repeat may name the task, or only the context, whatever the message did: it is the same.
    """
    message, task_no = (command.principal, command.message.message_id), log.no
    on_task = replace(command, task_id=log.ref.id)
    in_context = replace(command, task_id=None, context_id=log.ref.context_id)
    digests = dict.fromkeys(one.digest for one in (command, on_task, in_context))
    refused = None
    if isinstance(refusal, AnswerExpectedError):
        refused = orjson.dumps([refusal.reason, str(refusal), [], {}])
    elif refusal is not None:
        fields = [(one.field, one.description) for one in refusal.violations]
        refused = orjson.dumps([refusal.reason, refusal.message, fields, refusal.data])

    def write(connection: Connection) -> None:
        for digest in digests:
            task_rows.add_message(connection, *message, task_no, digest, refused)
        if request is not None:
            task_rows.set_request(connection, task_no, orjson.dumps(request))

    return write


def _read_token(token: str) -> Key:
    with suppress(ValueError):
        padded = token.encode() + b"=" * (-len(token) % 4)
        match orjson.loads(base64.b64decode(padded, altchars=b"-_", validate=True)):
            case [int(updated_at), int(no)] if 0 <= updated_at < 2**62 and 0 <= no < 2**62:
                return Key(updated_at, no)
            case _:
                pass
    text = "is not a page token returned by this method; omit it to start from the first page"
    raise _wrong("pageToken", text)
