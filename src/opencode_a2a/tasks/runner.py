"""Drives turns into the logs of their tasks, one at a time for each task."""

import asyncio
from collections.abc import Callable, Coroutine

import structlog

from opencode_a2a.clock import now_ms
from opencode_a2a.errors import ServiceError
from opencode_a2a.events import Emitted, Failure, Finished, Outcome
from opencode_a2a.tasks.codec import Request
from opencode_a2a.tasks.log import TaskLog
from opencode_a2a.tasks.state import State
from opencode_a2a.turns.turn import Turn, Turns, TurnSpec

log = structlog.get_logger(__name__)

UNSIGNED = Failure(
    "SIGN_IN_EXPIRED", "Nobody signed in to the model provider in time. Send the message again."
)
INTERNAL = Failure(
    "INTERNAL_ERROR", "The service failed while running the turn. Send the message again."
)


class OpenTask:
    """An open task, with the turn that runs for it."""

    def __init__(self, log: TaskLog) -> None:
        self.log = log
        self.turn: Turn | None = None


class Runner:
    def __init__(self, turns: Turns, closed: Callable[[OpenTask], None]) -> None:
        self._turns = turns
        self._closed = closed
        self._running: set[asyncio.Task[None]] = set()

    def start(
        self,
        job: OpenTask,
        request: Request,
        emitted: Emitted | None = None,
        *,
        new_context: bool = False,
    ) -> None:
        """Run a turn for a task; what it tells goes into the log.

        ``emitted`` is what the log has of it already, if an earlier process began it.
        """
        ref = job.log.ref
        spec = TurnSpec(
            task_id=ref.id,
            context_id=ref.context_id,
            principal=ref.principal,
            prompt=request.prompt,
            routing=request.routing,
            user_message_id=request.user_message_id,
            session_id=job.log.state.status.session_id,
            new_context=new_context,
            emitted=emitted,
        )
        job.turn = self._turns.turn(spec)
        self._keep(self._run(job, job.turn), f"turn {ref.id}")

    def await_sign_in(self, job: OpenTask) -> None:
        """End a task that waits for a sign-in, unless there is another try in time."""
        self._keep(self._give_up(job, job.log.state.seq), f"sign-in {job.log.ref.id}")

    def _keep(self, work: Coroutine[None, None, None], name: str) -> None:
        task = asyncio.create_task(work, name=name)
        self._running.add(task)
        task.add_done_callback(self._running.discard)

    async def close(self) -> None:
        """Stop following; the tasks stay open."""
        for task in self._running:
            task.cancel()
        await asyncio.gather(*self._running, return_exceptions=True)

    async def _run(self, job: OpenTask, turn: Turn) -> None:
        with structlog.contextvars.bound_contextvars(task_id=job.log.ref.id):
            try:
                await turn.run(job.log)
            except ServiceError as error:
                failure = Failure(error.reason, error.message)
                await job.log.tell([Finished(Outcome.FAILED, failure=failure)])
            except Exception:
                log.exception("turn failed")
                await job.log.tell([Finished(Outcome.FAILED, failure=INTERNAL)])
        job.turn = None
        if job.log.state.status.state.terminal:
            self._closed(job)
        elif job.log.state.status.state is State.AUTH_REQUIRED:
            self.await_sign_in(job)
        else:
            log.error("turn ended without an end", task_id=job.log.ref.id)
            await job.log.tell([Finished(Outcome.FAILED, failure=INTERNAL)])
            self._closed(job)

    async def _give_up(self, job: OpenTask, seq: int) -> None:
        seconds = self._turns.interrupts.settings.interrupt_request_ttl_seconds
        waited = (now_ms() - job.log.state.status.at) / 1000
        await asyncio.sleep(max(0.0, seconds - waited))
        if job.log.state.seq == seq:
            await job.log.tell([Finished(Outcome.FAILED, failure=UNSIGNED)])
            self._closed(job)
