"""A turn: it takes a session, waits for earlier turns in it, and is given further messages.

``tasks`` runs a ``Turn`` and gives it the log to write to. In its session the turn makes an
``Attempt`` (``turns.attempt``), which sends the prompt and follows the session until the turn is
over. ``SharedTurns`` is what the turns in one OpenCode share.
"""

import asyncio
from collections.abc import Container, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Protocol

import structlog

from opencode_a2a.bounds import Recent
from opencode_a2a.config import Settings
from opencode_a2a.errors import (
    ServiceError,
    StoreUnavailableError,
    UpstreamBackpressureError,
    UpstreamTimeoutError,
    UpstreamUnreachableError,
)
from opencode_a2a.events import (
    Emitted,
    Failure,
    Finished,
    Outcome,
    Progressed,
    Resumed,
    SessionBound,
    TurnEvent,
)
from opencode_a2a.ids import MessageId, ModelRef, Owner, SessionId
from opencode_a2a.messages import Added, Answered, Delivery, TurnRequest
from opencode_a2a.opencode.client import Location, OpenCode
from opencode_a2a.opencode.feed import Feed
from opencode_a2a.opencode.types import MessageWithParts
from opencode_a2a.store.database import Write
from opencode_a2a.turns.attempt import (
    AGAIN_SECONDS,
    AWAY_SECONDS,
    UNCONFIRMED,
    Attempt,
    SessionGoneError,
)
from opencode_a2a.turns.interrupts import SharedInterrupts, StoredInterrupt, WorkInterrupts
from opencode_a2a.turns.sessions import KNOWN_SESSIONS, PLAN_AGENT, BoundSession, Sessions, TurnLock
from opencode_a2a.turns.snapshot import Snapshots
from opencode_a2a.turns.tools import Tools

logger = structlog.get_logger(__name__)

FIRST_ANSWER_SECONDS = 3.0
"""Seconds that a call waits for an OpenCode that has never answered."""
AWAY = (UpstreamUnreachableError, StoreUnavailableError)
"""Errors that pass by themselves: a turn waits until OpenCode or the database is back."""


class SharedTurns:
    """What all turns in one OpenCode share."""

    def __init__(
        self,
        settings: Settings,
        opencode: OpenCode,
        feed: Feed,
        sessions: Sessions,
        interrupts: SharedInterrupts,
        tools: Tools | None,
    ) -> None:
        self.settings = settings
        self.rights = settings.auth.rights
        """The most that any turn may do."""
        self.default_model = settings.opencode.model
        self.opencode = opencode
        self.feed = feed
        self.sessions = sessions
        self.interrupts = interrupts
        self.tools = tools
        self.snapshots = Snapshots(opencode)
        self.running = 0
        """Turns that were admitted and have not ended, those that wait for a session included."""
        self._models = Recent[SessionId, ModelRef | None](KNOWN_SESSIONS)
        """For each session whose last prompt named a model: the one it had before."""

    async def reachable(self) -> None:
        """Raise an error if OpenCode has never answered this service and does not answer now.

        Once it has answered, a turn waits for an OpenCode that is away. Before that the address or
        the password may be wrong, and waiting would not help.
        """
        if self.feed.connections:
            return
        try:
            async with asyncio.timeout(FIRST_ANSWER_SECONDS):
                await self.opencode.health()
        except TimeoutError:
            raise UpstreamTimeoutError from None

    async def model(self, session: BoundSession, named: ModelRef | None) -> ModelRef | None:
        """Return the model to prompt a session with; None leaves the choice to OpenCode.

        A request names a model for itself alone, but OpenCode keeps it for the session; the prompt
        after it therefore names the earlier model again.
        """
        session_id, default = session.session_id, self.default_model
        if named is None:
            return default or self._models.pop(session_id, None)
        if default is None and session_id not in self._models:
            before = (await self.opencode.session(session_id)).model
            if before is None:
                config = await self.opencode.config(at=session.location)
                before = ModelRef.parse(config.model)
            self._models[session_id] = before
        return named


class Log(Protocol):
    """The log of a task, as its turn writes it."""

    async def append(
        self, events: Sequence[TurnEvent | Answered], also: Write | None = None
    ) -> object:
        """Append events, and run ``also`` in the same transaction; return once both are stored."""
        ...

    def append_now(self, events: Sequence[TurnEvent]) -> object:
        """Append growing text, without waiting until it is stored."""
        ...


@dataclass(frozen=True, slots=True)
class LoggedTurn:
    """A turn that an earlier process began, as the log of its task has it.

    OpenCode may have been sent its prompt and the messages that were added to it.
    """

    emitted: Emitted
    added: Sequence[Added] = ()
    interrupts: Sequence[StoredInterrupt] = ()
    """All interrupts of the task."""


@dataclass(eq=False, slots=True)
class Addition:
    """A further message for a turn, until OpenCode has it."""

    added: Added
    stored: bool = False
    """Whether it is stored, and so may be sent."""
    cleared: bool = False
    """Whether the running work has been stopped for it."""
    sent: bool = False
    call: asyncio.Task[MessageWithParts] | None = None
    """The prompt call that it was last sent with."""
    tries: int = 0

    @property
    def prompt_id(self) -> MessageId:
        return self.added.request.user_message_id

    @property
    def delivery(self) -> Delivery:
        return self.added.request.delivery or "steer"

    def progress(self, status: str, reason: str | None = None) -> Progressed:
        """Return the event that tells the readers of the task what became of it."""
        message = self.added.message
        return Progressed(
            "message", status, message.message_id, message.subject, self.delivery, reason
        )


class Additions:
    """The messages that were added to a turn and that OpenCode is not known to have."""

    def __init__(self, added: Sequence[Added]) -> None:
        """Begin with those that an earlier process stored."""
        self._waiting = [Addition(one, stored=True) for one in added]

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[Addition]:
        return iter(self._waiting)

    def add(self, added: Added) -> Addition:
        """Queue a message that is about to be stored."""
        addition = Addition(added)
        self._waiting.append(addition)
        return addition

    def remove(self, addition: Addition) -> None:
        self._waiting.remove(addition)

    def take_delivered(self, prompts: Container[MessageId]) -> list[Addition]:
        """Remove those whose prompts OpenCode has, and return them."""
        delivered = [one for one in self._waiting if one.prompt_id in prompts]
        self._waiting = [one for one in self._waiting if one.prompt_id not in prompts]
        return delivered

    def next(self, *, failed: bool) -> Addition | None:
        """Return the message to send next; a turn that failed is not continued by a queued one."""
        for delivery in ("interrupt", "steer", "queue"):
            for addition in self._waiting:
                if addition.delivery == delivery and not (failed and delivery == "queue"):
                    return addition
        return None


class Turn:
    """One turn of a task: ``run`` takes a session, and follows the prompt in it to its end.

    ``tasks`` may call ``cancel``, ``add`` and ``store``, and answer ``interrupts``, at any moment
    until ``run`` has returned.
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

        ``session_id`` is the session that an earlier turn or process chose; ``new_context`` says
        that the context was created for this turn.
        """
        self.shared = shared
        self.owner = owner
        self.request = request
        self.plans = request.routing.plan
        """Whether the turn only makes a plan."""
        self.recovered = logged is not None
        """Whether an earlier process began it."""
        self.emitted = logged.emitted if logged is not None else Emitted()
        """Everything that earlier processes wrote of it to the log."""
        added = logged.added if logged is not None else ()
        self.additions = Additions(added)
        self.canceled = False
        self.refusal: Failure | None = None
        """Why a recovered turn may not go on, and is only stopped in OpenCode."""
        routing = request.routing
        if session_id is not None and routing.session_id is None:
            routing = replace(routing, session_id=session_id)
        self._routing = routing
        self._new_context = new_context
        self._preparing: asyncio.Task[None] | None = None
        """The asyncio task that runs the turn, as long as the turn waits for its session."""
        self._attempt: Attempt | None = None
        self._lock: TurnLock | None = None
        """The turn lock of the session, while this turn holds it."""
        self.interrupts = WorkInterrupts(shared.interrupts, owner, self._wake)
        # A person can answer them at once; OpenCode gets the answers when it is connected.
        if logged is not None:
            self.interrupts.connected = asyncio.Event()
            self.interrupts.restore(logged.interrupts, self.emitted.open)
            # Those that a rule or a grant has answered are not in the log.
            for request_id, interrupt in self.interrupts.open.items():
                self.emitted.open[request_id] = interrupt.asked

    def cancel(self) -> None:
        """Ask the turn to stop; it then writes its end to the log."""
        if self._preparing is not None and not self.canceled:
            self._preparing.cancel()
        self.canceled = True
        self._wake()

    def add(self, added: Added) -> Addition | None:
        """Take a further message; None if the turn is ending. ``store`` lets it be sent."""
        if self.canceled or (self._attempt is not None and self._attempt.finished):
            return None
        return self.additions.add(added)

    def store(self, addition: Addition) -> None:
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
                    session = await self._begin(log)
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
        except ServiceError as error:
            failure = Failure(error.reason, error.message)
            await self._end_unfollowed(log, Finished(Outcome.FAILED, failure=failure))
        finally:
            shared.running -= 1
            self.interrupts.close()

    async def _begin(self, log: Log) -> BoundSession | None:
        """Take a session and wait for its earlier turns; None if the turn was canceled first.

        Wait for an OpenCode that is away. A turn whose prompt an earlier process may have sent gets
        its session in any case: if it is canceled, or may not use it any more, to be aborted there.
        """
        shared, owner, session = self.shared, self.owner, None
        # A recovered turn waits for OpenCode for as long as it takes.
        limit = None if self.recovered else shared.settings.opencode.timeout
        task = self._preparing = asyncio.current_task()
        try:
            if self.canceled:
                raise asyncio.CancelledError
            if self.recovered and self._routing.session_id is not None:
                # Before OpenCode is asked for anything: an earlier turn may run in the session,
                # and the turns of a session are recovered in the order of their tasks.
                await self._wait_for_lock(SessionId(self._routing.session_id), log)
            async with asyncio.timeout(limit):
                while session is None:
                    await shared.feed.up.wait()
                    try:
                        session = await shared.sessions.take(
                            owner.principal,
                            owner.context_id,
                            self._routing,
                            fresh=self._new_context,
                        )
                    except (*AWAY, UpstreamBackpressureError) as error:
                        if not self.recovered and not isinstance(error, AWAY):
                            raise
                        logger.warning("session not taken, trying again", error=error.message)
                        await asyncio.sleep(AWAY_SECONDS)
            if shared.tools is not None:
                await shared.tools.offer(session.location)
            if self._lock is None:
                if session.session_id in shared.sessions.turn_locks:
                    await log.append([self.bound(session)], session.link)
                await self._wait_for_lock(session.session_id, log)
        except TimeoutError:
            raise UpstreamUnreachableError from None
        except asyncio.CancelledError:
            if not self.canceled or task is None:
                raise  # the service is shutting down
            task.uncancel()
            return await self._begin_canceled(log, session)
        except ServiceError as error:
            session = self._logged_session
            if session is None or self._lock is None:
                raise
            # It may be running in OpenCode, where nobody would follow it.
            self.refusal = Failure(error.reason, error.message)
        finally:
            self._preparing = None
        return session

    async def _wait_for_lock(self, session_id: SessionId, log: Log) -> None:
        """Wait for the earlier turns of a session, and report what they do meanwhile."""
        lock = self.shared.sessions.turn_locks.setdefault(session_id, TurnLock())
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

    async def _begin_canceled(self, log: Log, session: BoundSession | None) -> BoundSession | None:
        """End a canceled turn, unless it may run in OpenCode: then return the session to abort."""
        logged = self._logged_session
        if logged is None:
            await log.append([Finished(Outcome.CANCELED)], session and session.link)
            return None
        if self._lock is None:
            seconds = self.shared.interrupts.settings.cancel_abort_timeout_seconds
            try:
                async with asyncio.timeout(seconds):
                    await self._wait_for_lock(logged.session_id, log)
            except TimeoutError:  # another turn runs in the session; an abort would stop that one
                await self._end_unfollowed(log, Finished(Outcome.CANCELED, failure=UNCONFIRMED))
                return None
        return session or logged

    @property
    def _logged_session(self) -> BoundSession | None:
        """The session in which an earlier process may have sent the prompt."""
        bound = self.emitted.bound
        if bound is None or not self.emitted.started:
            return None
        return BoundSession(bound.session_id, Location(directory=bound.directory), claimed=True)

    async def _end_unfollowed(self, log: Log, end: Finished) -> None:
        """End a turn that follows no session; what it was asking is void."""
        asked = [interrupt.asked for interrupt in self.interrupts.open.values()]
        void = [Resumed(one.request_id, one.type, "void") for one in asked]
        await log.append(await self.interrupts.ask_and_settle([*void, end]))
        self.interrupts.note_logged()

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
            changed = ahead and ahead.changed
            if report != reported:
                reported = report
                await log.append([report])
                continue  # it may have changed meanwhile
            if changed is not None:
                await changed.wait()
            else:  # the earlier turn has no interrupts yet: it is about to begin
                await asyncio.sleep(AGAIN_SECONDS)

    def bound(self, session: BoundSession) -> SessionBound:
        """Return the event that names the session, and the model and agent if they were chosen."""
        model = self.request.routing.model or self.shared.default_model
        return SessionBound(
            session.session_id,
            session.location.directory,
            model=str(model) if model else None,
            agent=self.agent(),
        )

    def agent(self, named: str | None = None) -> str | None:
        """Return the agent to prompt; None leaves the choice to OpenCode."""
        if self.plans:
            return PLAN_AGENT
        return named or self.request.routing.agent or self.shared.settings.opencode.agent
