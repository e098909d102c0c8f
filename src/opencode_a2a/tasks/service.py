"""Every task: what ``server`` and ``extensions`` may ask of them.

The board holds the open tasks, starts their turns, and finds the ended ones in the store. A
task of another principal is not found.
"""

import base64
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

import orjson
import structlog
from sqlalchemy.engine import Connection

from opencode_a2a import metrics
from opencode_a2a.config import LimitSettings
from opencode_a2a.errors import (
    InterruptNotFoundError,
    InvalidParamsError,
    TaskNotCancelableError,
    TaskNotFoundError,
    UnsupportedOperationError,
    Violation,
)
from opencode_a2a.events import Emitted, Finished, Outcome
from opencode_a2a.ids import Principal, TaskId, new_message_id
from opencode_a2a.messages import ANYWHERE, Answered
from opencode_a2a.store import tasks as rows
from opencode_a2a.store.database import Database
from opencode_a2a.store.tasks import Filter, Key, TaskRow
from opencode_a2a.tasks.admit import Admission, Admitted, digest
from opencode_a2a.tasks.codec import Request, dump_request, load_task
from opencode_a2a.tasks.commands import Cursor, Page, Query, SendCommand
from opencode_a2a.tasks.log import LogReader, TaskLog
from opencode_a2a.tasks.runner import OpenTask, Runner
from opencode_a2a.tasks.state import State, TaskState
from opencode_a2a.tasks.writer import LogWriter, Write
from opencode_a2a.turns.answers import Answer, NotUnderstoodError, understand
from opencode_a2a.turns.sessions import Locks
from opencode_a2a.turns.turn import Turn, Turns

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Submitted:
    """What became of a message: its task, and where the log was before the message."""

    log: TaskLog
    seq: int


class TaskService:
    def __init__(
        self, database: Database, journal: LogWriter, turns: Turns, limits: LimitSettings
    ) -> None:
        self._database = database
        self._journal = journal
        self._turns = turns
        self._admission = Admission(database, limits)
        self._jobs: dict[TaskId, OpenTask] = {}
        self.further: Locks[tuple[Principal, str]] = Locks()
        """Held while a message on a task, or a reply to a request, is dealt with: copies wait."""
        self._runner = Runner(turns, self.closed)

    # Sending

    async def submit(self, order: SendCommand) -> Submitted:
        """Start a task, or go on with the one that the message names."""
        await self._turns.reachable()
        if order.task_id is not None:
            return await self._go_on(order, order.task_id)
        if order.routing != ANYWHERE:
            earlier = await self._admission.repeated(order)
            if earlier is not None:
                return Submitted(await self._log(earlier), 0)
            await self._turns.sessions.check(order.principal, order.routing)
        outcome = await self._admission.admit(order)
        if isinstance(outcome, TaskRow):
            return Submitted(await self._log(outcome), 0)
        return Submitted(self._begin(outcome), outcome.state.seq)

    def _begin(self, admitted: Admitted) -> TaskLog:
        """Run a task that is stored, from where its log is."""
        log = TaskLog(admitted.no, admitted.state, self._journal, self._database)
        self._runner.start(self.adopt(log), admitted.request, new_context=admitted.new_context)
        return log

    def adopt(self, log: TaskLog) -> OpenTask:
        """Take an open task onto the board."""
        job = self._jobs[log.ref.id] = OpenTask(log)
        metrics.TASKS.labels(log.state.status.state).inc()
        self._admission.opened(log.ref.principal)
        return job

    def run(self, job: OpenTask, request: Request, emitted: Emitted | None = None) -> None:
        """Run a turn for a task, or go on with one of which ``emitted`` is in the log."""
        self._runner.start(job, request, emitted)

    def await_sign_in(self, job: OpenTask) -> None:
        """Let a task wait for another try after a sign-in, but not for ever."""
        self._runner.await_sign_in(job)

    async def _go_on(self, order: SendCommand, task_id: str) -> Submitted:
        row = await self._row(order.principal, task_id)
        if order.context_id is not None and order.context_id != row.context_id:
            text = "is not the context of this task; leave it out"
            raise InvalidParamsError(
                f"message.contextId {text}", violations=(Violation("message.contextId", text),)
            )
        async with self.further[order.principal, order.message.message_id]:
            earlier = await self._admission.repeated(order)
            if earlier is not None:
                return await self._repeat(order, earlier)
            return await self._take(order, self._jobs.get(TaskId(task_id)))

    async def _repeat(self, order: SendCommand, earlier: TaskRow) -> Submitted:
        """Return what became of a further message that was here before."""
        job = self._jobs.get(TaskId(earlier.id))
        if job is not None and job.turn is not None:
            await job.turn.ready()
            await job.turn.repeat(order.message)
        log = await self._log(earlier)
        if order.message not in log.state.history:
            raise InterruptNotFoundError("The request was settled before this answer came")
        return Submitted(log, 0)

    async def _take(self, order: SendCommand, job: OpenTask | None) -> Submitted:
        if job is None:
            raise UnsupportedOperationError(
                "The task has ended and takes no further message; send it without taskId and "
                "with the same contextId to go on"
            )
        state = await job.log.steady()
        match state.status.state:
            case State.INPUT_REQUIRED:
                return await self._answer(order, job)
            case State.AUTH_REQUIRED:
                return await self._retry(order, job)
            case _:
                raise UnsupportedOperationError(
                    "The task is working and asks nothing; wait until it ends, or cancel it"
                )

    async def _answer(self, order: SendCommand, job: OpenTask) -> Submitted:
        status = job.log.state.status
        try:
            asked, reply = understand(order.message, status.pending)
        except NotUnderstoodError as error:
            raise InvalidParamsError(
                str(error), violations=(Violation("message.parts", str(error)),)
            ) from None
        seq = job.log.state.seq
        answer, remember = Answer(reply, order.principal, order.message), self._remember(order, job)
        try:
            await self.answer(job, asked.request_id, answer, remember)
        except InterruptNotFoundError:
            # It came too late. Sent again it must not answer what is asked next.
            await self._database.write(remember)
            raise
        return Submitted(job.log, seq)

    async def answer(
        self, job: OpenTask, request_id: str, answer: Answer, also: Write | None = None
    ) -> None:
        """Answer a pending interrupt of a task; return when OpenCode has taken the answer."""
        turn = _turn(job)
        await turn.ready()
        await turn.answer(request_id, answer, also)

    async def _retry(self, order: SendCommand, job: OpenTask) -> Submitted:
        """Run another turn in a task that waits for a sign-in."""
        seq = job.log.state.seq
        session = job.log.state.status.session_id
        request = Request(order.prompt, order.routing, new_message_id(), session)
        await job.log.tell([Answered(order.message)], self._remember(order, job, request))
        self.run(job, request)
        return Submitted(job.log, seq)

    def _remember(self, order: SendCommand, job: OpenTask, request: Request | None = None) -> Write:
        """Return what stores that a message on a task was taken, and what it makes it prompt."""
        message = (order.principal, order.message.message_id)
        known = digest(order)

        def write(connection: Connection) -> None:
            if rows.find_message(connection, *message, known) is None:
                rows.add_message(connection, *message, job.log.no, known)
            if request is not None:
                rows.set_request(connection, job.log.no, dump_request(request))

        return write

    # Reading

    async def task(self, principal: Principal, task_id: str) -> TaskState:
        job = self._live(principal, task_id)
        if job is not None:
            return await job.log.steady()
        return load_task(await self._row(principal, task_id))

    async def page(self, principal: Principal, query: Query) -> Page:
        which = Filter(principal, query.context_id, query.state, query.since)
        after = _key(query.token)
        whole = query.artifacts or query.history

        def read(connection: Connection) -> tuple[list[TaskRow], int]:
            return rows.page(connection, which, after, query.size + 1, whole)

        found, total = await self._database.read(read)
        more = len(found) > query.size
        found = found[: query.size]
        tasks = [await self._current(row) if whole else load_task(row) for row in found]
        token = _token(found[-1]) if more else ""
        return Page(tasks, token, query.size, total)

    async def _current(self, row: TaskRow) -> TaskState:
        job = self._jobs.get(TaskId(row.id))
        return load_task(row) if job is None else await job.log.steady()

    async def follow(
        self, principal: Principal, task_id: str, after: Cursor | None = None
    ) -> LogReader:
        """Return a reader of a task's log; see ``TaskLog.tap``."""
        job = self._live(principal, task_id)
        if job is None:
            log = await self._log(await self._row(principal, task_id))
        else:
            log = job.log
            await log.steady()
        return log.tap(after)

    # Ending

    async def cancel(self, principal: Principal, task_id: str) -> TaskState:
        """End a task; an ended one is returned if it was canceled before, else refused."""
        metrics.CANCEL_REQUESTS.inc()
        began = time.monotonic()
        job = self._live(principal, task_id)
        if job is None:
            state = load_task(await self._row(principal, task_id))
        else:
            await self.stop(job)
            state = await job.log.steady()
        if state.status.state is not State.CANCELED:
            raise TaskNotCancelableError("The task has ended and cannot be canceled")
        sure = "success" if state.status.failure is None else "timeout"
        metrics.CANCEL_SECONDS.labels(sure).observe(time.monotonic() - began)
        return state

    async def stop(self, job: OpenTask) -> None:
        """End an open task; return when it has ended."""
        if job.turn is None:
            await job.log.tell([Finished(Outcome.CANCELED)])
            self.closed(job)
            return
        job.turn.cancel()
        while not job.log.state.status.state.terminal:
            if job.log.state.status.state is State.AUTH_REQUIRED:
                # The turn had just ended by itself.
                await job.log.tell([Finished(Outcome.CANCELED)])
                self.closed(job)
                return
            await job.log.changed()

    def leave(self) -> None:
        """Let nobody wait any longer for a task: the service is about to stop."""
        for job in self._jobs.values():
            job.log.leave()

    async def close(self) -> None:
        """Leave every open task as it is, for the next start, with all of it stored."""
        await self._runner.close()
        await self._journal.commit()

    def open_tasks(self) -> Sequence[OpenTask]:
        return list(self._jobs.values())

    def find(self, principal: Principal, task_id: str) -> OpenTask:
        """Return an open task of a principal."""
        job = self._live(principal, task_id)
        if job is None:
            raise TaskNotFoundError
        return job

    def closed(self, job: OpenTask) -> None:
        """Take an ended task off the board."""
        if self._jobs.pop(job.log.ref.id, None) is not None:
            self._admission.closed(job.log.ref.principal)

    def _live(self, principal: Principal, task_id: str) -> OpenTask | None:
        job = self._jobs.get(TaskId(task_id))
        return job if job is not None and job.log.ref.principal == principal else None

    async def _row(self, principal: Principal, task_id: str) -> TaskRow:
        def read(connection: Connection) -> TaskRow | None:
            return rows.load(connection, principal, task_id)

        row = await self._database.read(read)
        if row is None:
            raise TaskNotFoundError
        return row

    async def _log(self, row: TaskRow) -> TaskLog:
        job = self._jobs.get(TaskId(row.id))
        if job is not None:
            await job.log.steady()
            return job.log
        if not State(row.state).terminal:
            # The task has ended since the row was read, and its history is in the row of now.
            row = await self._row(Principal(row.principal), row.id)
        return TaskLog(row.no, load_task(row), self._journal, self._database)


def _turn(job: OpenTask) -> Turn:
    if job.turn is None:
        raise UnsupportedOperationError("The task is not running")
    return job.turn


def _token(row: TaskRow) -> str:
    return base64.urlsafe_b64encode(orjson.dumps([row.updated_at, row.no])).decode().rstrip("=")


def _key(token: str | None) -> Key | None:
    if not token:
        return None
    with suppress(ValueError):
        padded = token.encode() + b"=" * (-len(token) % 4)
        match orjson.loads(base64.b64decode(padded, altchars=b"-_", validate=True)):
            case [int(updated_at), int(no)] if 0 <= updated_at < 2**62 and 0 <= no < 2**62:
                return Key(updated_at, no)
            case _:
                pass
    text = "is not a token of this list; leave it out to begin anew"
    raise InvalidParamsError(f"pageToken {text}", violations=(Violation("pageToken", text),))
