"""The open tasks that this process runs.

An ``OpenTask`` owns the log of a task and the turn that runs for it; both write to the log. So does
``recovery``, before it starts a turn again, and when it cancels a task that no replica runs.
``OpenTasks`` holds all of them: ``tasks.sending`` and ``tasks.recovery`` put them there, and they
leave it when they end or when another replica takes over their OpenCode. It also finds the row and
the log of any other task: one that another replica runs, or one that has ended.
"""

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import structlog
from sqlalchemy.engine import Connection

from opencode_a2a import metrics
from opencode_a2a.clock import now_ms
from opencode_a2a.cluster.fleet import Fleet, Here, Member, MovedError, There
from opencode_a2a.config import LimitSettings
from opencode_a2a.errors import (
    LimitExceededError,
    TaskNotFoundError,
    UnsupportedOperationError,
)
from opencode_a2a.events import (
    Failure,
    FailureType,
    Finished,
    Interrupted,
    Outcome,
    Progressed,
    Resolution,
    Resumed,
)
from opencode_a2a.ids import Owner, Principal, TaskId
from opencode_a2a.log.log import LogWriter, ReadableLog, TaskLog
from opencode_a2a.log.remote import RemoteLogs
from opencode_a2a.log.state import Status
from opencode_a2a.log.stored import load_task, state_of
from opencode_a2a.messages import NO_ROUTING, Added, Answered, Message, TurnRequest
from opencode_a2a.rights import FULL, NARROWEST
from opencode_a2a.store import interrupts as interrupt_rows
from opencode_a2a.store import tasks as task_rows
from opencode_a2a.store.database import Database, Write
from opencode_a2a.store.interrupts import InterruptRow
from opencode_a2a.store.tasks import TaskRow
from opencode_a2a.telemetry import current_trace
from opencode_a2a.turns.interrupt_state import CLOCK
from opencode_a2a.turns.interrupts import WorkInterrupts
from opencode_a2a.turns.job import LoggedTurn
from opencode_a2a.turns.shared_interrupts import audit_settled, audit_void
from opencode_a2a.turns.turn import INTERNAL, Turn

logger = structlog.get_logger(__name__)

WORKING = (
    "The task is running and is not waiting for an answer. To send the text to the agent while it "
    "works, set metadata.shared.delivery."
)
ENDED = (
    "The task has ended and takes no further message; send it without taskId and with the same "
    "contextId to go on"
)
NARROWER = (
    "The task may do more than this message allows: its credential or its profile has narrower "
    "rights. Cancel the task, or send the message without taskId."
)
MAX_ADDITIONS = 50
"""Messages on one task that OpenCode does not have yet."""
TOO_MANY = "Too many messages on this task wait to be handed on; wait until the agent has them"
UNSIGNED = Failure(
    FailureType.SIGN_IN_EXPIRED,
    "Nobody signed in to the model provider in time. Send the message again.",
)
UNAPPROVED = Failure(
    FailureType.INTERRUPT_EXPIRED,
    "Nobody approved the plan in time; nothing was changed. Send the message again.",
)
UPSTREAM_LOST = Failure(
    FailureType.UPSTREAM_LOST,
    "The OpenCode that ran the task is gone. Send the message again; the conversation goes on in "
    "another one, which does not know what was said before.",
)
CANCELING = Progressed("cancel", "requested", title="The task is being canceled")


class OpenTask:
    """A task that has not ended: its log, and the turn that runs for it.

    One turn runs at a time; between two turns the task waits for the message that signs in or
    decides about its plan.
    """

    def __init__(
        self, log: TaskLog, member: Member, on_change: "Callable[[OpenTask], None]"
    ) -> None:
        self.log = log
        self.member = member
        """The OpenCode that runs its turns."""
        self.routing = NO_ROUTING
        """Where the latest turn was to run."""
        self.rights = FULL
        """The rights of the latest turn, as its credential and its caller limit them."""
        self._owner = Owner(log.ref.id, log.ref.context_id, log.ref.principal)
        self._shared = member.turns
        self._on_change = on_change
        """Called when a turn of the task is over or begins, and when the task has ended."""
        self._turn: Turn | None = None
        self._running: asyncio.Task[None] | None = None
        self._expiry: asyncio.Task[None] | None = None
        """Fails the task if nobody sends the message that it waits for."""
        self.losing: asyncio.Task[None] | None = None
        """Fails the task because its OpenCode is lost."""
        self._canceling: asyncio.Future[bool] | None = None
        """Stores that the task is to be canceled."""

    # Its turns

    def start(
        self,
        request: TurnRequest,
        logged: LoggedTurn | None = None,
        *,
        new_context: bool = False,
        after: asyncio.Future[bool] | None = None,
    ) -> None:
        """Run a turn, or recover one that an earlier process logged; wait for ``after`` first."""
        self.routing, self.rights, ref = request.routing, request.rights, self.log.ref
        # The deployment may allow less than when the task began.
        rights = request.rights & self._shared.rights
        if request.routing.plan:
            rights &= NARROWEST  # while a turn only plans, neither rules nor grants allow changes
        turn = self._turn = Turn(
            self._shared,
            replace(self._owner, rights=rights),
            request,
            session_id=logged.earlier_session if logged else self.log.state.status.session_id,
            new_context=new_context,
            logged=logged,
        )
        self._running = asyncio.create_task(self._run(turn, after), name=f"turn {ref.id}")

    async def _run(self, turn: Turn, after: asyncio.Future[bool] | None) -> None:
        if after is not None:
            await asyncio.shield(after)
            if self.ended:  # canceled meanwhile
                return
        # That of the task, whoever's request or restart this context was copied from.
        trace, ids = self.log.trace, dict[str, str | None]()
        current_trace.set(trace)
        if trace is not None:
            ids = {"trace_id": trace.trace_id, "span_id": trace.span_id}
        with structlog.contextvars.bound_contextvars(task_id=self.log.ref.id, **ids):
            try:
                await turn.run(self.log)
            except Exception:
                logger.exception("turn failed")
                await self.log.append([Finished(Outcome.FAILED, failure=INTERNAL)])
            if not self.ended and not self.log.state.status.between_turns:
                logger.error("turn returned without a final event")
                await self.log.append([Finished(Outcome.FAILED, failure=INTERNAL)])
        self._turn = None
        if self.ended:
            self._on_change(self)
        elif turn.canceled:  # after its last word, which was not the end of the task
            await self.end(Finished(Outcome.CANCELED))
        else:
            self.wait_for_message()

    def wait_for_message(self) -> None:
        """Let the task wait, for a limited time, for the message that begins its next turn."""
        status = self.log.state.status
        seconds = self._shared.interrupts.settings.interrupt_request_ttl_seconds
        left = seconds - (now_ms() - status.at) / 1000
        if status.plan is not None and status.plan.expires_at is not None:
            left = (status.plan.expires_at - now_ms()) / 1000

        async def expire() -> None:
            await asyncio.sleep(max(0.0, left))
            failure = UNSIGNED if status.plan is None else UNAPPROVED
            await self.end(Finished(Outcome.FAILED, failure=failure))

        self._expiry = asyncio.create_task(expire(), name=f"expiry of {self.log.ref.id}")
        self._on_change(self)

    async def begin_next_turn(
        self,
        message: Message,
        request: TurnRequest,
        in_same_commit: Write,
        plan: Interrupted | None,
    ) -> None:
        """Run another turn; ``in_same_commit`` is stored with the message.

        ``plan`` is the plan that the message is about, None for a sign-in.
        """
        self._check_waits_for(plan)
        if self._running is not None:
            await asyncio.wait([self._running])  # it has ended, and may be cleaning up
        self._check_waits_for(plan)
        if self._turn is not None:
            raise UnsupportedOperationError(WORKING)
        if self._expiry is not None:
            self._expiry.cancel()
        principal = self.log.ref.principal

        async def store() -> bool:
            events: list[Answered | Resumed] = [Answered(message)]
            done: Resolution = "replied" if request.routing.plan else "approved"
            if plan is not None:
                events.append(Resumed(plan.request_id, plan.type, done, principal))

            def write(connection: Connection) -> None:
                in_same_commit(connection)
                if plan is not None:
                    interrupt_rows.settle(connection, plan.request_id, done, now_ms(), principal)

            # From then on a restart runs the turn: its request is stored with the message.
            stored = await self.log.append(events, write)
            if not stored:  # the task has ended; the code that ends it reports that
                return False
            self._on_change(self)
            for event in events:
                if isinstance(event, Resumed) and plan is not None:
                    audit_settled(self._owner, plan, event)
            return True

        storing = asyncio.ensure_future(store())
        # The sender may go away, but the turn for a stored message has to run.
        self.start(request, after=storing)
        if not await asyncio.shield(storing):  # it was canceled in the same moment
            raise UnsupportedOperationError(ENDED)

    def _check_waits_for(self, plan: Interrupted | None) -> None:
        """Refuse a message about a plan or a sign-in that the task no longer waits for.

        A plan that has changed since is not the one that the sender has seen.
        """
        status = self.log.state.status
        waits = status.plan and status.plan.request_id
        if not status.between_turns or waits != (plan and plan.request_id):
            raise UnsupportedOperationError(WORKING)

    # Messages for the turn that runs

    async def add(self, added: Added, in_same_commit: Write) -> None:
        """Hand a further message to the turn that runs; ``in_same_commit`` is stored with it."""
        turn = self._turn
        if turn is not None and len(turn.additions) >= MAX_ADDITIONS:
            raise LimitExceededError(TOO_MANY, limit=MAX_ADDITIONS)
        if turn is not None and not turn.request.rights <= added.request.rights:
            raise UnsupportedOperationError(NARROWER)
        addition = turn.add(added) if turn is not None else None
        if turn is None or addition is None:
            raise UnsupportedOperationError(ENDED)
        storing = asyncio.ensure_future(
            self.log.append([added, addition.progress("accepted")], in_same_commit)
        )
        # The sender may go away, but a stored message has to be handed on.
        storing.add_done_callback(lambda _: turn.note_stored(addition))
        if not await asyncio.shield(storing):
            raise UnsupportedOperationError(ENDED)

    @property
    def interrupts(self) -> WorkInterrupts | None:
        """The permissions and questions of the turn that runs, if there is one."""
        return None if self._turn is None else self._turn.interrupts

    # Its end

    @property
    def ended(self) -> bool:
        return self.log.state.status.state.terminal

    def stop_turn(self) -> None:
        """Ask the turn that runs, if there is one, to stop."""
        if self._turn is not None:
            self._turn.cancel()

    async def cancel(self) -> None:
        """Have the task canceled: its log says when it has ended."""
        turn = self._turn
        if turn is not None and not turn.canceled and not self.log.state.status.between_turns:
            # Stored before OpenCode is told to stop: whoever recovers the task after a crash would
            # take the stopped turn for a failed one.
            if self._canceling is None or self._canceling.done():
                storing = self.log.append([CANCELING], firm=True)
                self._canceling = asyncio.ensure_future(storing)
            await asyncio.shield(self._canceling)
        self.stop_turn()
        # Between turns the last one is over, even if it has only just said so.
        if not self.ended and (self._turn is None or self.log.state.status.between_turns):
            await self.end(Finished(Outcome.CANCELED))

    async def cancel_plan(self, message: Message, in_same_commit: Write, plan: Interrupted) -> None:
        """Cancel a task because a message rejects its plan; ``in_same_commit`` is stored with that.

        Message and end are stored together: a task that was answered so waits for nobody.
        """
        self._check_waits_for(plan)
        if not await self.end(Finished(Outcome.CANCELED), in_same_commit, message):
            raise UnsupportedOperationError(ENDED)

    async def end(
        self, end: Finished, in_same_commit: Write | None = None, message: Message | None = None
    ) -> bool:
        """End a task that has no turn; False if it had ended.

        The message that asked for it, if there is one, and ``in_same_commit`` are stored with it.
        """
        plan, ref, left = self.log.state.status.plan, self.log.ref, list[InterruptRow]()
        events = [end] if message is None else [Answered(message), end]
        late = end.outcome is not Outcome.CANCELED
        by, how = (CLOCK, "expired") if late else (ref.principal, "rejected")

        def write(connection: Connection) -> None:
            if in_same_commit is not None:
                in_same_commit(connection)
            if plan is not None and end.failure is not UPSTREAM_LOST:
                interrupt_rows.settle(connection, plan.request_id, how, now_ms(), by)
            # Again, if the first transaction fails.
            left[:] = interrupt_rows.void(connection, ref.id, now_ms())

        stored = await self.log.append(events, write)
        self._on_change(self)
        if stored:
            audit_void(self._owner, left)
            if plan is not None and end.failure is not UPSTREAM_LOST:
                settled = Resumed(plan.request_id, plan.type, how, by)
                audit_settled(self._owner, plan, settled)
        if self._expiry is not None and self._expiry is not asyncio.current_task():
            self._expiry.cancel()
        return stored

    def lose(self) -> None:
        """Fail the task because its OpenCode is lost; nothing is asked of that."""

        async def end() -> None:
            await self.detach()
            if not self.ended:
                await self.end(Finished(Outcome.FAILED, failure=UPSTREAM_LOST))

        self.losing = asyncio.create_task(end(), name=f"lost {self.log.ref.id}")

    async def detach(self) -> None:
        """Stop following the turn; the task stays open."""
        tasks = [task for task in (self._running, self._expiry) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._turn = None


class OpenTasks:
    """The open tasks that this process runs, and how many they are.

    A single process counts them here for its limits; several replicas count in the database.
    """

    def __init__(
        self, database: Database, writer: LogWriter, fleet: Fleet, remote_logs: RemoteLogs
    ) -> None:
        self._database = database
        self._writer = writer
        self._fleet = fleet
        self._remote_logs = remote_logs
        self._tasks: dict[TaskId, OpenTask] = {}
        self._planned: dict[TaskId, OpenTask] = {}
        """Those whose plan waits for approval, so that ``waiting`` need not look at all tasks."""
        self._counts: Counter[Principal] = Counter()
        """Open tasks of each principal, with those that are being admitted."""
        database.listeners.append(self._on_notification)
        writer.on_unstorable = self._stop_unstorable

    # Finding; a task of another principal is not found

    def get(self, task_id: str) -> OpenTask | None:
        return self._tasks.get(TaskId(task_id))

    def of(self, principal: Principal, task_id: str) -> OpenTask | None:
        """Return a task if it is open here and belongs to the principal."""
        task = self.get(task_id)
        return task if task is not None and task.log.ref.principal == principal else None

    async def row(self, principal: Principal, task_id: str) -> TaskRow:
        """Return any task as it is stored; raise TaskNotFoundError."""
        row = await self._database.read(task_rows.load, principal, task_id)
        if row is None:
            raise TaskNotFoundError
        return row

    async def log(self, principal: Principal, task_id: str) -> ReadableLog:
        """Return the log of any task, with nothing in its state that waits to be stored."""
        task = self.of(principal, task_id)
        if task is None:
            return await self.log_of(await self.row(principal, task_id))
        await task.log.firm_state()
        return task.log

    async def find_with_owner(
        self, principal: Principal, task_id: str
    ) -> tuple[ReadableLog, Here | There | None]:
        """Return the log of any task, and where the task runs; None if it has ended."""
        task = self.of(principal, task_id)
        if task is not None:
            return task.log, None if task.ended else self._fleet.where(task.member.name)
        row = await self.row(principal, task_id)
        ended = state_of(row).terminal
        return await self.log_of(row), None if ended else self._fleet.where(row.upstream)

    async def log_of(self, row: TaskRow) -> ReadableLog:
        """Return the log of a task whose row was read."""
        task = self.get(row.id)
        if task is not None:
            await task.log.firm_state()
            return task.log
        if not state_of(row).terminal:  # another replica runs it, or it has just ended
            return await self._remote_logs.opened(row)
        return ReadableLog(row.no, load_task(row), self._database)

    def all(self) -> list[OpenTask]:
        return list(self._tasks.values())

    def waiting(self) -> list[OpenTask]:
        """Return the tasks that wait for a person: for an answer, or for the approval of a plan."""
        asking = dict.fromkeys(
            interrupt.asker.owner.task_id
            for member in self._fleet.members.values()
            for interrupt in member.turns.interrupts.open.values()
        )
        ids = asking | dict.fromkeys(self._planned)
        return [task for task_id in ids if task_id and (task := self._tasks.get(task_id))]

    # Coming and going

    @contextmanager
    def admission(
        self, principal: Principal, member: Member, limits: LimitSettings
    ) -> Generator[tuple[int, int]]:
        """Count a task as open while it is stored.

        Yield the open tasks before it: the caller's count and the total.

        Other admissions count it meanwhile. That ends after ``add`` has counted the task,
        before anything else can run.
        """
        own, total = self._counts[principal], self._counts.total()
        # A message that is about to be refused must not have another one refused.
        held = own < limits.max_tasks_per_principal and total < limits.max_open_tasks
        self._counts[principal] += held
        self._fleet.tasks[member.name] += 1
        try:
            yield own, total
        finally:
            self._counts[principal] -= held
            self._fleet.tasks[member.name] -= 1

    def add(self, log: TaskLog, member: Member) -> OpenTask:
        """Take charge of an open task."""
        task = self._tasks[log.ref.id] = OpenTask(log, member, self._on_change)
        if (remote := self._remote_logs.logs.get(log.no)) is not None:
            remote.taken_over(log)
        self._fleet.tasks[member.name] += 1
        metrics.TASKS.labels(log.state.status.state).inc()
        self._counts[log.ref.principal] += 1
        return task

    def _on_change(self, task: OpenTask) -> None:
        """Take note that a turn of a task is over or begins, or that the task has ended."""
        if task.ended:
            self._remove(task)
        elif task.log.state.status.plan is not None:
            self._planned[task.log.ref.id] = task
        else:
            self._planned.pop(task.log.ref.id, None)

    def _remove(self, task: OpenTask) -> None:
        ref = task.log.ref
        self._planned.pop(ref.id, None)
        if self._tasks.pop(ref.id, None) is not None:
            self._counts[ref.principal] -= 1
            self._fleet.tasks[task.member.name] -= 1

    def _stop_unstorable(self, log: TaskLog) -> None:
        """Stop the turn of a task that has failed, since something of it cannot be stored."""
        if (task := self.get(log.ref.id)) is not None:
            task.stop_turn()

    def lose(self, member: Member) -> None:
        """Fail the tasks of an OpenCode that is lost; their contexts continue in another one."""
        for task in self._tasks.values():
            if task.member is member and not task.losing:
                task.lose()

    async def give_up(self, member: Member) -> None:
        """Store all tasks of an OpenCode and leave them to another replica."""
        own = [task for task in self._tasks.values() if task.member is member]
        await self._detach(own)
        for task in own:
            self._remove(task)
            if not task.ended:
                metrics.TASKS.labels(task.log.state.status.state).dec()

    async def close(self) -> None:
        """Store all tasks, and leave them open for the next start."""
        await self._detach(self.all())

    async def _detach(self, tasks: Sequence[OpenTask]) -> None:
        """Stop following tasks, store them, and let nothing more be appended to their logs."""
        losing = [task.losing for task in tasks if task.losing is not None]
        await asyncio.gather(*(task.detach() for task in tasks), *losing)
        await self._writer.commit()
        for task in tasks:
            task.log.close(MovedError(task.member.name))

    # Readers

    def _on_notification(self, text: str) -> None:
        """Treat a request that another replica has shown to a reader as shown here."""
        match text.split(",", 2):
            case ["t", number, task_id] if number.isdecimal():
                if (task := self.get(task_id)) is not None:
                    task.log.note_seen_number(int(number))
            case _:
                pass

    def note_seen(self, no: int, task_id: TaskId, status: Status) -> None:
        """Note that somebody is given this status of a task, wherever the task runs."""
        task = self.get(task_id)
        log = self._remote_logs.logs.get(no) if task is None else task.log
        if log is not None:
            log.note_seen(status)
        elif status.pending:
            newest = max(one.number or 0 for one in status.pending)
            self._database.notify(f"t,{newest},{task_id}")

    def seen_of_remote_task(self, log: ReadableLog) -> dict[TaskId, int]:
        """Return what ``SeenRequests.newest_in_time`` says here, if another replica runs the task.

        Or ran it until a moment ago: the log of this replica does not know what was shown before.
        """
        remote = self._remote_logs.logs.get(log.no)
        if remote is None or not remote.state.status.pending:
            return {}
        return {log.ref.id: remote.seen.newest_in_time(time.monotonic())}

    def end_reading(self) -> None:
        """End the streams of all tasks: other replicas may know more."""
        for task in self._tasks.values():
            task.log.end_reading()
        self._remote_logs.end_reading()

    def stop_waiting(self) -> None:
        """Let nobody wait any longer for a task: the service is about to stop."""
        for task in self._tasks.values():
            task.log.stop_waiting()
        self._remote_logs.stop_waiting()
