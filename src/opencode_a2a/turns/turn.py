"""A turn: it binds a session, waits for earlier turns in it, and is given further messages.

``tasks`` runs a ``Turn`` and gives it the log to write to. In its session the turn makes an
``Attempt`` (``turns.attempt``), which sends the prompt and follows the session until the turn is
over. Both share the ``Job`` (``turns.job``).
"""

import asyncio
from contextlib import closing
from dataclasses import replace

import structlog

from opencode_a2a.bounds import StoppedError, wait
from opencode_a2a.errors import (
    ServiceError,
    SessionNotFoundError,
    StoreUnavailableError,
    UpstreamBackpressureError,
    UpstreamUnreachableError,
)
from opencode_a2a.events import (
    Failure,
    FailureType,
    Finished,
    Outcome,
    Progressed,
)
from opencode_a2a.ids import Owner, SessionId
from opencode_a2a.messages import Added, TurnRequest
from opencode_a2a.opencode.driver import Location
from opencode_a2a.store.database import Write
from opencode_a2a.turns.attempt import (
    AGAIN_SECONDS,
    AWAY_SECONDS,
    DROPPED,
    UNCONFIRMED,
    Attempt,
    SessionGoneError,
)
from opencode_a2a.turns.job import Addition, Job, Log, LoggedTurn, SharedTurns
from opencode_a2a.turns.sessions import TurnLock, TurnSession

logger = structlog.get_logger(__name__)

AWAY = (UpstreamUnreachableError, StoreUnavailableError)
"""Errors that pass by themselves: a turn waits until OpenCode or the database is back."""
INTERNAL = Failure(
    FailureType.INTERNAL_ERROR, "The service failed while running the turn. Send the message again."
)


class Turn(Job):
    """One turn of a task: ``run`` binds a session, and follows the prompt in it to its end.

    ``tasks`` may call ``cancel``, ``add`` and ``note_stored``, and answer ``interrupts``, at any
    moment until ``run`` has returned.
    """

    def __init__(
        self,
        shared: SharedTurns,
        owner: Owner,
        request: TurnRequest,
        *,
        session_id: SessionId | None = None,
        new_context: bool = False,
        logged: LoggedTurn | None = None,
    ) -> None:
        """Prepare a turn, or with ``logged`` recover one that an earlier process began.

        ``session_id`` is the session of the task's earlier turns; ``new_context`` says that the
        context was created for this turn.
        """
        self._attempt: Attempt | None = None
        super().__init__(shared, owner, request, self._wake, logged)
        self._prompted: TurnSession | None = None
        """The session that an earlier process may have prompted. If it is gone the turn fails: in
        another session the prompt might be carried out a second time."""
        self._queued_in: SessionId | None = None
        """The session that an earlier process chose, and did not prompt. If it is gone the context
        continues in another."""
        routing, bound = request.routing, self.emitted.bound
        if bound is not None and self.emitted.started:
            session_id, location = bound.session_id, Location(directory=bound.directory)
            self._prompted = TurnSession(session_id, location, named=True, claimed=True)
        if session_id is not None and routing.session_id is None:
            routing = replace(routing, session_id=session_id)
        if bound is not None and routing.session_id is None:
            self._queued_in = bound.session_id
        self._routing = routing
        self._new_context = new_context
        self._lock: TurnLock | None = None
        """The turn lock of the session, while this turn holds it."""

    def cancel(self) -> None:
        """Ask the turn to stop; it then writes its end to the log."""
        self.stop.set()
        self._wake()

    def add(self, added: Added) -> Addition | None:
        """Take a further message; None if the turn is ending. ``note_stored`` lets it be sent."""
        if self.canceled or (self._attempt is not None and self._attempt.finished):
            return None
        addition = Addition(added)
        self.additions.append(addition)
        return addition

    def note_stored(self, addition: Addition) -> None:
        """Note that a further message is stored, and may be sent."""
        addition.stored = True
        self._wake()

    def _wake(self) -> None:
        """Have the turn decide again, though no event came."""
        if self._attempt is not None:
            self._attempt.wake()

    async def run(self, log: Log) -> None:
        """Run the turn, and write it to the log; its last event is the end."""
        shared, most = self.shared, self.shared.settings.opencode.max_concurrent_streams
        shared.running += 1
        try:
            # A recovered turn was admitted before, and may be running in OpenCode.
            if 0 < most < shared.running and not self.recovered:
                raise UpstreamBackpressureError
            while True:
                try:
                    if self._prompted is None:
                        session = await self._bind_session_and_lock(log)
                    else:
                        session = await self._bind_prompted_session(self._prompted, log)
                    if session is None:
                        return
                    with closing(Attempt(self, session, log)) as self._attempt:
                        await self._attempt.run()
                        return
                except SessionGoneError:
                    logger.warning("session was deleted; continuing the context in a new session")
                finally:
                    self._attempt = None
                    if self._lock is not None:
                        self._lock.release()
                        self._lock = None
        except Exception as error:  # a fault of this service too must end the turn
            await self._end_unfollowed(log, Finished(Outcome.FAILED, failure=_failure(error)))
        finally:
            shared.running -= 1
            self.interrupts.close()

    async def _bind_session_and_lock(self, log: Log) -> TurnSession | None:
        """Bind a session and wait for earlier turns in it; None if the turn was canceled first."""
        shared, session = self.shared, None
        try:
            with self.stop.ends_waits():
                chosen = self._queued_in or self._routing.session_id
                if self.recovered and chosen is not None:
                    # Before OpenCode is asked for anything: the turns of a session are recovered in
                    # the order of their tasks.
                    await self._wait_for_lock(SessionId(chosen), log)
                # A recovered turn waits for OpenCode for as long as it takes.
                limit = None if self.recovered else shared.settings.opencode.timeout
                async with asyncio.timeout(limit):
                    session = await self._bind_session()
                if shared.tools is not None:
                    await shared.tools.offer(session.location)
                lock = shared.sessions.turn_locks.get(session.session_id)
                if lock is not None and lock is not self._lock:
                    await log.append([self.session_bound_event(session)], session.link)
                await self._wait_for_lock(session.session_id, log)
        except TimeoutError:
            raise UpstreamUnreachableError from None
        except StoppedError:
            link = session and session.link
            await self._end_unfollowed(log, Finished(Outcome.CANCELED), link)
            return None
        return session

    async def _bind_prompted_session(self, prompted: TurnSession, log: Log) -> TurnSession | None:
        """Bind the session that an earlier process may have prompted.

        A turn that is canceled, or may not use the session any more, gets it as well, to be stopped
        there; but None if it is canceled while another turn runs in the session.
        """
        shared, session, canceled_before = self.shared, prompted, self.canceled
        try:
            with self.stop.ends_waits():
                # Before OpenCode is asked for anything, as in ``_bind_session_and_lock``.
                await self._wait_for_lock(prompted.session_id, log)
                session = await self._bind_session()
                if shared.tools is not None:
                    await shared.tools.offer(session.location)
        except StoppedError:
            seconds = shared.settings.interrupts.cancel_abort_timeout_seconds
            if self._lock is None:
                try:
                    async with asyncio.timeout(seconds):
                        await self._wait_for_lock(prompted.session_id, log)
                except TimeoutError:  # another turn runs in it; an abort would stop that one
                    await self._end_unfollowed(log, Finished(Outcome.CANCELED, failure=UNCONFIRMED))
                    return None
            if canceled_before:  # an earlier process was to stop it; OpenCode may be starting, too
                await wait(shared.feed.up, seconds)
        except Exception as error:
            if self._lock is None:
                raise
            # It may be running in OpenCode, where nobody would follow it.
            self.refusal = _failure(error)
        return session

    async def _bind_session(self) -> TurnSession:
        """Bind the session of the context; wait while OpenCode or the database is unreachable."""
        shared, owner = self.shared, self.owner
        passing = (*AWAY, UpstreamBackpressureError) if self.recovered else AWAY
        while True:
            await shared.feed.up.wait()
            try:
                if self._queued_in is not None:
                    chosen = replace(self._routing, session_id=self._queued_in)
                    try:
                        session = await shared.sessions.bind(
                            owner.principal, owner.context_id, chosen
                        )
                        return replace(session, named=False)
                    except SessionNotFoundError:
                        self._queued_in = None
                return await shared.sessions.bind(
                    owner.principal, owner.context_id, self._routing, fresh=self._new_context
                )
            except passing as error:
                logger.warning("session not bound, trying again", error=error.message)
                await asyncio.sleep(AWAY_SECONDS)

    async def _wait_for_lock(self, session_id: SessionId, log: Log) -> None:
        """Wait for the earlier turns of a session, and report what they do meanwhile.

        The lock of another session, which the turn does not use after all, is released.
        """
        lock = self.shared.sessions.turn_locks.setdefault(session_id, TurnLock())
        if lock is self._lock:
            return
        if self._lock is not None:
            self._lock.release()
            self._lock = None
        reporting: asyncio.Task[None] | None = None
        if lock.users:
            reporting = asyncio.create_task(self._report_queue(session_id, log))
        try:
            await lock.acquire()
            self._lock = lock
        finally:
            if reporting is not None:
                reporting.cancel()
                await asyncio.gather(reporting, return_exceptions=True)

    async def _report_queue(self, session_id: SessionId, log: Log) -> None:
        """Write what the turn waits for to the log, again whenever that changes, until canceled.

        While the earlier turn waits for a person, this one waits for the same person, who must be
        able to see that.
        """
        reported: Progressed | None = None
        while True:
            ahead = self.shared.interrupts.sessions_with_turn.get(session_id)
            report = Progressed("queue", "waiting", title="An earlier turn is running")
            mine = ahead is not None and ahead.owner.principal == self.owner.principal
            if ahead is not None and mine and ahead.waiting:
                report = Progressed(
                    "queue",
                    "blocked",
                    part_id=ahead.owner.task_id,
                    title=f"Task {ahead.owner.task_id} of the same session waits for an answer",
                    reason="This task runs when that one was answered or canceled",
                )
            changed = None if ahead is None else ahead.changed
            if report != reported:
                reported = report
                await log.append([report])
                continue  # it may have changed meanwhile
            if changed is not None:
                await changed.wait()
            else:  # the earlier turn has no interrupts yet: it is about to begin
                await asyncio.sleep(AGAIN_SECONDS)

    async def _end_unfollowed(self, log: Log, end: Finished, link: Write | None = None) -> None:
        """End a turn that follows no session: its interrupts are void, its messages dropped."""
        dropped = [addition.progress("dropped", DROPPED) for addition in self.additions]
        events = await self.interrupts.ask_and_settle([*self.interrupts.voided(), *dropped, end])
        await log.append(events, link)
        self.interrupts.note_logged()


def _failure(error: Exception) -> Failure:
    """Return why an error failed a turn, and log it if it is a fault of this service."""
    if isinstance(error, ServiceError):
        return Failure(error.reason, error.message)
    logger.error("turn failed", exc_info=error)
    return INTERNAL
