"""One turn: prompt, follow, interrupt, finish, abort.

``tasks`` runs a turn and gives it the log to write to. Three signals say that a turn is over, and
none is trusted alone: the answer of the blocking prompt call, the events, and the session's
status when asked; what OpenCode has stored decides. A turn may take any time; silence, an endless
loop of steps, and a retry far ahead end it.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from typing import Protocol

import structlog

from opencode_a2a.config import Settings
from opencode_a2a.errors import (
    ServiceError,
    SessionNotFoundError,
    StoreUnavailableError,
    UpstreamBackpressureError,
    UpstreamError,
    UpstreamTimeoutError,
    UpstreamUnreachableError,
)
from opencode_a2a.events import (
    Channel,
    Emitted,
    Failure,
    FailureType,
    Finished,
    Interrupted,
    JsonObject,
    Outcome,
    Progressed,
    ResultGiven,
    Resumed,
    SessionBound,
    Started,
    ToolChanged,
    TurnEvent,
)
from opencode_a2a.ids import MessageId, ModelRef, Owner, RequestId, SessionId
from opencode_a2a.messages import Added, Answered, Delivery, TurnRequest
from opencode_a2a.opencode.client import Location, OpenCode
from opencode_a2a.opencode.events import Event, PartDelta
from opencode_a2a.opencode.feed import Feed, FeedItem, Gap, Wake
from opencode_a2a.opencode.reader import Reader
from opencode_a2a.opencode.turn_state import Snapshot
from opencode_a2a.opencode.types import (
    CommandCall,
    FileInput,
    InputPart,
    MessageWithParts,
    OutputFormat,
    Prompt,
    StatusRetry,
    TextInput,
)
from opencode_a2a.rights import STRUCTURED_OUTPUT
from opencode_a2a.schemas import mismatches
from opencode_a2a.store.database import Write
from opencode_a2a.telemetry import now_ms
from opencode_a2a.turns.interrupts import Interrupts, WorkInterrupts
from opencode_a2a.turns.rights import KNOWN_SESSIONS, WiderWorkError
from opencode_a2a.turns.sessions import PLAN_AGENT, BoundSession, Sessions
from opencode_a2a.turns.snapshot import Snapshots
from opencode_a2a.turns.tools import Tools

logger = structlog.get_logger(__name__)

TICK_SECONDS = 5.0
"""How often a turn that hears nothing asks whether it is still running, at the least."""
LONGEST_TICK_SECONDS = 20.0
"""The same for a turn that has been quiet for long."""
DRAIN_SECONDS = 2.0
"""How long events may still arrive after the end of the turn is known."""
UNBEGUN_SECONDS = 15.0
"""How long an OpenCode that gets no CPU time may have a message before it is seen to work on it."""
AGAIN_SECONDS = 0.2
"""How often a turn that has not begun yet is asked to stop."""
START_SECONDS = 0.25
"""How long a tool call that has begun to run may take to ask before it is shown."""
FIRST_ANSWER_SECONDS = 3.0
"""How long a call may wait for an OpenCode that has never answered."""
AWAY = (UpstreamUnreachableError, StoreUnavailableError)
"""What passes: it is waited for."""
AWAY_SECONDS = 0.5
"""How often a session is asked for while OpenCode is away."""
PROMPT_TRIES = 3

SILENT = "OpenCode has been silent for {:.0f} s; the turn was stopped. Send the message again."
LONG = "The turn took longer than {:.0f} s and was stopped. Ask for less at once."
COSTLY = "The turn has cost {:.4g} and may cost {:g}; it was stopped."
ENDLESS = "The model was asked {} times without coming to an end; the turn was stopped."
RETRY_FAR = "The model provider asks to wait too long ({}); the turn was stopped. Try again later."
UNCONFIRMED = Failure(
    FailureType.UPSTREAM_ABORT_UNCONFIRMED,
    "The task is canceled, but OpenCode did not confirm in time that it has stopped.",
)
NO_PLAN = Failure(
    FailureType.UPSTREAM_NO_PLAN, "The agent ended without a plan. Send the message again."
)
UNFITTING = "The answer does not fit the schema that was asked for"
DROPPED = "The turn ended before the message could be handed on. Send it again."
NOT_TAKEN = Failure(FailureType.UPSTREAM_UNREACHABLE, "OpenCode did not take the prompt.")
GONE = Failure(
    FailureType.UPSTREAM_RESOURCE_NOT_FOUND,
    "The session was deleted inside OpenCode. Send the message again to begin a new one.",
)
REPLACED = Progressed(
    "session",
    "replaced",
    title="The OpenCode that had this conversation is gone; it goes on in a new session",
)
EXPIRED = Failure(FailureType.INTERRUPT_EXPIRED, "Nobody answered in time; the turn was stopped.")
FORGED = Failure(
    FailureType.INTERRUPT_FORGED,
    "A permission or question was answered past this service, perhaps by the agent itself; the "
    "turn was stopped. Set A2A_CONSOLE_ANSWERS=true if people answer at OpenCode's own terminal.",
)


class Turns:
    """What all turns share."""

    def __init__(
        self,
        settings: Settings,
        opencode: OpenCode,
        feed: Feed,
        sessions: Sessions,
        interrupts: Interrupts,
        tools: Tools | None = None,
    ) -> None:
        self.settings = settings
        self.rights = settings.auth.rights
        """What any turn may do at the most."""
        self.default_model = settings.opencode.model
        self.opencode = opencode
        self.feed = feed
        self.sessions = sessions
        self.interrupts = interrupts
        self.tools = tools
        self.snapshots = Snapshots(opencode)
        self.running = 0
        self._models: OrderedDict[SessionId, ModelRef | None] = OrderedDict()
        """The own model of each session whose last prompt named another."""

    async def reachable(self) -> None:
        """Raise what is wrong as long as OpenCode has never answered this service.

        Once it has, a turn waits for an OpenCode that is away. Before that there is nothing to
        wait for: the address or the password may be wrong.
        """
        if self.feed.connections:
            return
        try:
            async with asyncio.timeout(FIRST_ANSWER_SECONDS):
                await self.opencode.health()
        except TimeoutError:
            raise UpstreamTimeoutError from None

    async def model(self, session: BoundSession, named: ModelRef | None) -> ModelRef | None:
        """Return the model to prompt a session with; None leaves it to OpenCode.

        A model that a request names is meant for that request, but OpenCode goes on with it in the
        same session; the prompt after it therefore names the model from before.
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
            if len(self._models) > KNOWN_SESSIONS:
                self._models.popitem(last=False)
        return named


class Log(Protocol):
    """Where a turn writes what happens."""

    async def append(
        self, events: Sequence[TurnEvent | Answered], also: Write | None = None
    ) -> object:
        """Take events, and write what belongs to them; return once they may be relied on."""
        ...

    def append_now(self, events: Sequence[TurnEvent]) -> object:
        """Take growing text, which nobody waits for."""
        ...


class SessionGoneError(Exception):
    """The session of the context was deleted inside OpenCode; there has to be a new one."""


class TurnLimits:
    """What is known about the time of a turn, and when the turn is given up."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings.turn
        self._longest = settings.opencode.timeout_stream
        self.tick = min(TICK_SECONDS, settings.turn.silence_seconds, self._longest or TICK_SECONDS)
        """How often a turn that hears nothing is looked at."""
        self.now = asyncio.get_running_loop().time
        self._began = self.heard = self.now()
        """When the turn last gave a sign of life."""
        self.doubted = self.compared = self._began
        """When something turned out not to be as it was reported; when it was last compared."""
        self.ended: float | None = None
        """When the end of the turn was first known."""
        self.unlisted = False
        """OpenCode could not list what it asks, so that an interrupt may have been missed."""
        self._retry: StatusRetry | None = None
        """The retry that was last found near enough to wait for."""

    @property
    def quiet(self) -> float:
        return self.now() - self.heard

    @property
    def comparison_due(self) -> bool:
        """Whether to compare with the store: events get lost without a gap as well.

        That is after 5 s, 20 s, 80 s, since each comparison reads the messages of the session.
        """
        return self.now() - self.compared >= (self.tick if self.unlisted else self.quiet * 3 / 4)

    @property
    def silence(self) -> Failure | None:
        """Why to give the turn up, when OpenCode has been silent for too long."""
        seconds = self._settings.silence_seconds
        if self.quiet <= seconds:
            return None
        return Failure(FailureType.UPSTREAM_TIMEOUT, SILENT.format(seconds))

    def exceeded(self, reader: Reader) -> Failure | None:
        """Return why to give up a turn that does not end by itself."""
        steps = len(reader.state.messages.answers)
        if steps > self._settings.max_steps:
            return Failure(FailureType.UPSTREAM_ENDLESS, ENDLESS.format(steps))
        most = self._settings.max_cost
        if most and (cost := reader.state.cost) >= most:
            return Failure(FailureType.BUDGET_EXHAUSTED, COSTLY.format(cost, most))
        retry = reader.state.tree.retry
        if retry is not None and retry is not self._retry:
            # Judged once, when it is heard: the wall clock may jump while it is waited for.
            self._retry = retry
            if retry.next - now_ms() > self._settings.max_retry_wait_seconds * 1000:
                return Failure(FailureType.UPSTREAM_QUOTA_EXCEEDED, RETRY_FAR.format(retry.message))
        if self._longest is not None and self.now() - self._began > self._longest:
            return Failure(FailureType.UPSTREAM_TIMEOUT, LONG.format(self._longest))
        return None


@dataclass(eq=False, slots=True)
class Addition:
    """A further message for a turn, until OpenCode has it."""

    added: Added
    stored: bool = False
    """It may be sent."""
    cleared: bool = False
    """What was running has been stopped for it."""
    sent: bool = False
    call: asyncio.Task[MessageWithParts] | None = None
    """The call that it was last sent with."""
    tries: int = 0

    @property
    def prompt_id(self) -> MessageId:
        return self.added.request.user_message_id

    @property
    def delivery(self) -> Delivery:
        return self.added.request.delivery or "steer"

    def progress(self, status: str, reason: str | None = None) -> Progressed:
        """Return what the readers of the task are told of it."""
        message = self.added.message
        return Progressed(
            "message", status, message.message_id, message.subject, self.delivery, reason
        )


@dataclass(frozen=True, slots=True)
class LoggedTurn:
    """A turn that an earlier process began, as the log of its task has it.

    OpenCode may have been sent its prompt and the messages that were added to it.
    """

    emitted: Emitted
    added: Sequence[Added] = ()


class Turn:
    """One turn of a task: ``run`` takes a session, and follows the prompt in it to its end."""

    def __init__(
        self,
        turns: Turns,
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
        self.turns = turns
        self.owner = owner
        self.request = request
        self.plans = request.routing.plan
        """Whether the turn only plans."""
        self.recovered = logged is not None
        """Whether an earlier process began it."""
        self.emitted = logged.emitted if logged is not None else Emitted()
        """Everything that earlier processes wrote of it to the log."""
        added = logged.added if logged is not None else ()
        self.additions = [Addition(one, stored=True) for one in added]
        """Further messages that OpenCode does not have yet, as far as it is known."""
        self.canceled = False
        routing = request.routing
        if session_id is not None and routing.session_id is None:
            routing = replace(routing, session_id=session_id)
        self._routing = routing
        self._new_context = new_context
        self._preparing: asyncio.Task[None] | None = None
        """The task of the turn, while it has no session that it can follow yet."""
        self._attempt: Attempt | None = None
        self._lock: asyncio.Lock | None = None
        """The one of the session, once it is this turn's turn."""
        self.interrupts = WorkInterrupts(turns.interrupts, owner, self._wake)
        # They can be named at once, and are answered as soon as OpenCode is connected.
        for asked in self.emitted.open.values():
            self.interrupts.restore(asked)

    def cancel(self) -> None:
        """Ask the turn to stop; it then writes its end to the log."""
        if self._preparing is not None and not self.canceled:
            self._preparing.cancel()
        self.canceled = True
        self._wake()

    def add(self, added: Added) -> Addition | None:
        """Take a further message; None if the turn is ending.

        It is sent when ``store`` says that it is stored.
        """
        if self.canceled or (self._attempt is not None and self._attempt.finished):
            return None
        addition = Addition(added)
        self.additions.append(addition)
        return addition

    def store(self, addition: Addition) -> None:
        addition.stored = True
        self._wake()

    def _wake(self) -> None:
        """Have the turn look around though nothing was heard."""
        if self._attempt is not None:
            self._attempt.wake()

    async def run(self, log: Log) -> None:
        """Run the turn, and write it to the log; the last event is the end."""
        turns, most = self.turns, self.turns.settings.opencode.max_concurrent_streams
        turns.running += 1
        try:
            # A recovered turn was admitted before, and may be running in OpenCode.
            if 0 < most < turns.running and not self.recovered:
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
            turns.running -= 1
            self.interrupts.close()

    async def _begin(self, log: Log) -> BoundSession | None:
        """Take a session and wait for its earlier turns; None if the turn was canceled first.

        An OpenCode that is away is waited for. A canceled turn whose prompt an earlier process may
        have sent still gets its session, to be aborted there.
        """
        turns, owner, session = self.turns, self.owner, None
        # A task that an earlier process began waits for OpenCode for as long as it takes.
        limit = None if self.recovered else turns.settings.opencode.timeout
        task = self._preparing = asyncio.current_task()
        try:
            if self.canceled:
                raise asyncio.CancelledError
            if self.recovered and self._routing.session_id is not None:
                # Before OpenCode is asked for anything: an earlier turn may be running in there,
                # and those of one session are taken up in the order of their tasks.
                await self._wait_for_lock(SessionId(self._routing.session_id), log)
            async with asyncio.timeout(limit):
                while session is None:
                    await turns.feed.up.wait()
                    try:
                        session = await turns.sessions.take(
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
            if turns.tools is not None:
                await turns.tools.offer(session.location)
            if self._lock is None:
                if session.session_id in turns.sessions.turn_locks:
                    await log.append([self.bound(session)], session.link)
                await self._wait_for_lock(session.session_id, log)
        except TimeoutError:
            raise UpstreamUnreachableError from None
        except asyncio.CancelledError:
            if not self.canceled or task is None:
                raise  # the service is shutting down
            task.uncancel()
            return await self._begin_canceled(log, session)
        finally:
            self._preparing = None
        return session

    async def _wait_for_lock(self, session_id: SessionId, log: Log) -> None:
        """Wait for the earlier turns of a session."""
        # The lock exists for as long as a turn holds it or waits for it. It is not locked in the
        # moment in which it passes from one to the next, but this turn has to wait all the same.
        locks = self.turns.sessions.turn_locks
        queued, lock = session_id in locks, locks.setdefault(session_id, asyncio.Lock())
        reporting: asyncio.Task[None] | None = None
        if queued:
            reporting = asyncio.create_task(self._report_queue(session_id, log))
        try:
            await lock.acquire()
            self._lock = lock
        finally:
            if reporting is not None:
                reporting.cancel()
                await asyncio.gather(reporting, return_exceptions=True)

    async def _begin_canceled(self, log: Log, session: BoundSession | None) -> BoundSession | None:
        """End the turn, unless it may run in OpenCode: then return the session to abort."""
        emitted = self.emitted
        if emitted.bound is None or not emitted.started:
            await log.append([Finished(Outcome.CANCELED)], session and session.link)
            return None
        bound, seconds = emitted.bound, self.turns.interrupts.settings.cancel_abort_timeout_seconds
        if self._lock is None:
            try:
                async with asyncio.timeout(seconds):
                    await self._wait_for_lock(bound.session_id, log)
            except TimeoutError:  # another turn has the session, and an abort would stop that one
                await self._end_unfollowed(log, Finished(Outcome.CANCELED, failure=UNCONFIRMED))
                return None
        location = Location(directory=bound.directory)
        return session or BoundSession(bound.session_id, location, named=True)

    async def _end_unfollowed(self, log: Log, end: Finished) -> None:
        """End a turn that follows no session; what it was asking is void."""
        asked = [interrupt.asked for interrupt in self.interrupts.open.values()]
        void = [Resumed(one.request_id, one.type, "void") for one in asked]
        await log.append(await self.interrupts.screen([*void, end]))
        self.interrupts.note_logged()

    async def _report_queue(self, session_id: SessionId, log: Log) -> None:
        """Say what the earlier turn of the session is doing, for as long as it is waited for.

        While that turn waits for a person, this one waits for the same person: they must be able
        to find out.
        """
        told: Progressed | None = None
        while True:
            ahead = self.turns.interrupts.sessions_with_turn.get(session_id)
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
            if report != told:
                told = report
                await log.append([report])
                continue  # it may have changed meanwhile
            if changed is not None:
                await changed.wait()
            else:  # another turn is about to begin
                await asyncio.sleep(AGAIN_SECONDS)

    def bound(self, session: BoundSession) -> SessionBound:
        """Say where the turn runs, and with which model and agent if that was asked for."""
        model = self.request.routing.model or self.turns.default_model
        return SessionBound(
            session.session_id,
            session.location.directory,
            model=str(model) if model else None,
            agent=self.agent(),
        )

    def agent(self, named: str | None = None) -> str | None:
        """Return the agent to prompt; None leaves it to OpenCode."""
        if self.plans:
            return PLAN_AGENT
        return named or self.request.routing.agent or self.turns.settings.opencode.agent


class Attempt:
    """The turn in one session. If OpenCode deletes that before the prompt, there is another."""

    def __init__(self, turn: Turn, session: BoundSession, log: Log) -> None:
        self._turn = turn
        self._turns = turn.turns
        self._interrupts = turn.interrupts
        self._session = session
        self._log = log
        self._reader = self._new_reader(turn.emitted if turn.recovered else None)
        self._limits = TurnLimits(turn.turns.settings)
        self._prompt: asyncio.Task[MessageWithParts] | None = None
        """The call with the latest prompt."""
        self._calls: list[asyncio.Task[MessageWithParts]] = []
        self._tries = 0
        self._notes: list[TurnEvent] = []
        """What is to be written beside what is heard."""
        self._tick_timer: asyncio.TimerHandle | None = None
        self._start_timer: asyncio.TimerHandle | None = None
        tools = self._turns.tools
        self._caller = tools and tools.callers.enter(
            turn.request.routing.hops, self._note, turn.owner.principal
        )
        self._turns.interrupts.sessions_with_turn[session.session_id] = turn.interrupts
        rights = self._turns.sessions.rights
        self._work = rights.register(session.session_id, turn.owner.rights)
        self._subscription = self._turns.feed.follow(session.session_id)
        self.wake = self._subscription.wake

    @property
    def finished(self) -> bool:
        return self._reader.finished

    def _new_reader(self, emitted: Emitted | None = None) -> Reader:
        turn = self._turn
        prompt, answer = turn.request.user_message_id, Channel.PLAN if turn.plans else Channel.TEXT
        reader = Reader(self._session.session_id, prompt, emitted, answer)
        for addition in turn.additions:
            reader.state.messages.claim(addition.prompt_id)
        return reader

    def close(self) -> None:
        self._subscription.close()
        self._turns.interrupts.sessions_with_turn.pop(self._session.session_id, None)
        self._turns.sessions.rights.end(self._work)
        if self._turns.tools is not None and self._caller is not None:
            self._turns.tools.callers.leave(self._caller, canceled=self._turn.canceled)
        for pending in (self._tick_timer, self._start_timer, *self._calls):
            if pending is not None:
                pending.cancel()

    async def run(self) -> None:
        """Send the prompt, unless an earlier process did; then hear, decide and write."""
        turn, session = self._turn, self._session
        bound = turn.bound(session)
        if not turn.recovered:
            self._interrupts.connect(session.location)
            events: list[TurnEvent] = [bound, Started()]
            if session.replaces:
                events.append(REPLACED)
            await self._log.append(events, session.link)
            if not turn.canceled:
                self._send(turn.request)
        else:
            answered = await self._turns.interrupts.answered(turn.owner)
            self._interrupts.connect(session.location, answered)
            await self._log.append([bound], session.link)
        self._tick()
        while not self._reader.finished:
            await self._write(self._hear(await self._subscription.batch(self._on_text)))
            try:
                events = await self._decide()
            except SessionNotFoundError:
                await self._turns.sessions.forget(session.session_id)
                # Before anything was prompted, the context can go on in a new session.
                if not session.named and not self._reader.state.messages.prompt_seen:
                    raise SessionGoneError from None
                events = self._reader.finish(None, failure=GONE)
            except StoreUnavailableError:
                events = []  # OpenCode works on; the next tick tries again
            except UpstreamError as error:
                # OpenCode could not be asked; the next tick, or the feed's return, tries again.
                logger.warning("could not read OpenCode's state; will retry", error=error.message)
                events = []
                if turn.canceled:
                    events = _noted(self._reader.finish(None, aborted=True), UNCONFIRMED)
                elif (failure := self._limits.silence) is not None:
                    events = self._reader.finish(None, failure=failure)
            await self._write(events)
            if self._start_timer is None and self._reader.starting:
                loop = asyncio.get_running_loop()
                self._start_timer = loop.call_later(START_SECONDS, self._show_started)

    def _send(self, request: TurnRequest) -> None:
        """Send a prompt; the call is answered when OpenCode has no more to do."""

        def called(call: asyncio.Task[MessageWithParts]) -> None:
            if not call.cancelled():
                call.exception()  # nobody may ask for it, and asyncio would complain of that
            self.wake()

        self._tries += request is self._turn.request
        self._prompt = asyncio.create_task(self._call(request))
        self._prompt.add_done_callback(called)
        self._calls.append(self._prompt)
        self._limits.ended = None

    async def _call(self, request: TurnRequest) -> MessageWithParts:
        """Prompt the session, unless the turn is canceled first."""
        settings = self._turns.settings.opencode
        first = self._turn.request.routing
        schema = request.routing.output_schema or first.output_schema
        if self._turn.plans:  # the schema is for what comes after
            schema = None
        agent, command = self._turn.agent(request.routing.agent), request.routing.command
        if command is not None:
            # The agent that is chosen for the command comes before one that is chosen otherwise.
            sources = await self._turns.opencode.command_sources(at=self._session.location)
            agent = next((one.agent for one in sources if one.name == command), None) or agent
        agent, tools = await self._restrict(agent, widens=command is None)
        model = await self._turns.model(self._session, request.routing.model)
        if self._turn.canceled:  # while the model was asked for: OpenCode need not hear of it
            raise asyncio.CancelledError
        if command is not None:
            called = CommandCall(
                command=command,
                arguments=request.text,
                message_id=request.user_message_id,
                agent=agent,
                model=str(model) if model else None,
                variant=settings.variant,
            )
            session = self._session
            return await self._turns.opencode.run_command(
                session.session_id, called, at=session.location
            )
        parts: list[InputPart] = []
        for part in request.prompt:
            if part.text is not None:
                parts.append(TextInput(text=part.text))
            else:
                mime = part.media_type or "text/plain"
                url = f"data:{mime};base64,{part.data}"
                parts.append(FileInput(mime=mime, url=url, filename=part.filename))
        prompt = Prompt(
            parts=parts,
            message_id=request.user_message_id,
            model=model,
            agent=agent,
            system=settings.system,
            variant=settings.variant,
            tools=tools,
            format=OutputFormat(json_schema=schema) if schema else None,
        )
        session = self._session
        answer = self._turns.opencode.prompt(session.session_id, prompt, at=session.location)
        del prompt, parts  # large files need not be kept until the turn has ended
        return await answer

    async def _restrict(
        self, agent: str | None, *, widens: bool
    ) -> tuple[str | None, dict[str, bool] | None]:
        """Have the session keep to the rights of the turn; return agent and tools for the prompt.

        Work with wider rights is waited for: the prompt would join it.
        """
        rights, at, told = self._turns.sessions.rights, self._session.location, False
        while not self._turn.canceled:
            try:
                restricted = await rights.restrict(self._work, agent, at, widens=widens)
                if told:
                    self._note(Progressed("queue", "over", title="That work is over"))
                return restricted
            except WiderWorkError as wider:
                if not told:
                    self._note(Progressed("queue", "waiting", title=str(wider)))
                told = True
                over = wider.work.done.wait() if wider.work else asyncio.sleep(AWAY_SECONDS)
                with suppress(TimeoutError):
                    await asyncio.wait_for(over, AWAY_SECONDS)
        raise asyncio.CancelledError

    # Hear

    def _tick(self) -> None:
        # The longer it has been quiet, the less a moment matters: a thousand turns that wait for
        # their models should cost next to nothing.
        pause = max(self._limits.tick, min(self._limits.quiet / 2, LONGEST_TICK_SECONDS))
        self._tick_timer = asyncio.get_running_loop().call_later(pause, self._tick)
        self.wake()

    def _show_started(self) -> None:
        """Show the tool calls that have begun and did not ask."""
        self._start_timer = None
        self._notes += self._reader.show_starting()
        self.wake()

    def _note(self, progress: Progressed) -> None:
        """Take the progress of a tool of ours that the turn is calling."""
        self._notes.append(progress)
        self._limits.heard = self._limits.now()
        self.wake()

    def _on_text(self, deltas: list[PartDelta]) -> None:
        """Hear growing text, after which there is nothing to decide."""
        self._limits.heard = self._limits.now()
        self._log.append_now(self._reader.feed(deltas))

    def _hear(self, items: list[FeedItem]) -> list[TurnEvent]:
        out, self._notes = self._notes, []
        events: list[Event] = []
        if self._turns.tools is not None and self._caller is not None:
            self._turns.tools.hear(self._caller, items)
        for item in items:
            match item:
                case Gap():
                    out += self._reader.feed(events)
                    events = []
                    self._limits.heard = item.at
                    self._reader.state.note_gap()
                case Wake():
                    pass
                case _:
                    events.append(item)
        if events:
            self._limits.heard = self._limits.now()
            out += self._reader.feed(events)
        return out

    async def _write(self, events: list[TurnEvent]) -> None:
        """Write events to the log: as the schema has it, and with interrupts and end seen to."""
        if not events:
            return
        schema = self._turn.request.routing.output_schema
        if schema is not None and not self._turn.plans:
            events = await _by_schema(events, schema)
        heard = self._reader.state.messages.user_messages
        if any(addition.prompt_id in heard for addition in self._turn.additions):
            self._interrupts.go_on()  # before it is asked what comes of the new prompt
        screened = await self._interrupts.screen(events)
        if self._reader.finished:
            screened = await self._conclude(screened)
        await self._log.append(screened)
        self._interrupts.note_logged()

    async def _conclude(self, events: list[TurnEvent | Answered]) -> list[TurnEvent | Answered]:
        """Make of OpenCode's end of the turn what it is for the task.

        Messages that were not handed on are dropped. An end is good only if nobody answered past
        this service, and a plan has to be approved by a person.
        """
        turn = self._turn
        out: list[TurnEvent | Answered] = [
            one.progress("dropped", DROPPED) for one in turn.additions
        ]
        for event in events:
            if not isinstance(event, Finished) or event.outcome is not Outcome.COMPLETED:
                out.append(event)
            elif self._interrupts.forged is not None:
                out.append(Finished(Outcome.FAILED, event.message_id, failure=FORGED))
            elif not turn.plans:
                out.append(event)
            elif not self._reader.answer.strip():
                failed = Finished(Outcome.FAILED, event.message_id, event.finish, failure=NO_PLAN)
                out.append(failed)
            else:
                # The same one after a crash: it was stored, and has its number.
                request_id = RequestId(f"plan_{turn.request.user_message_id}")
                asked = Interrupted(request_id, "plan", self._session.session_id)
                out.append(await self._turns.interrupts.ask(turn.owner, asked, numbered=True))
        return out

    async def _decide(self) -> list[TurnEvent]:
        """Do what is to be done now that something was heard, or time has passed."""
        turns, reader, session = self._turns, self._reader, self._session
        if reader.state.messages.prompt_seen and session.named:
            owner, routing = self._turn.owner, self._turn.request.routing
            await turns.sessions.confirm(session, owner.principal, owner.context_id, routing)
            self._session = replace(session, named=False)
        # What ends the turn from outside comes first: OpenCode may never say another word.
        if self._turn.canceled:
            return await self._abort(None)
        if self._interrupts.forged is not None:
            return await self._abort(FORGED)
        if not await self._interrupts.answer_due():
            return await self._abort(EXPIRED)
        if self._interrupts.stale:
            self._interrupts.stale = False
            self._doubt()
        if reader.state.needs_reconcile and turns.feed.up.is_set():
            events = await self._reconcile()
            if events or self._reader.finished:
                return events
        if self._turn.additions:
            events = await self._deliver()
            if events:
                self.wake()
                return events
        if self._prompt is not None and self._prompt.done():
            return await self._answered(self._prompt)
        if self._prompt is None and self._reader.state.complete:
            return await self._end() if self._drained() else []
        return await self._guard()

    async def _answered(self, prompt: asyncio.Task[MessageWithParts]) -> list[TurnEvent]:
        """Go on after the prompt call has ended: with the turn, or with an error."""
        error = prompt.exception()
        if error is None:
            return await self._end() if self._drained() else []
        addition = next((one for one in self._turn.additions if one.call is prompt), None)
        if isinstance(error, UpstreamUnreachableError):
            # The connection broke; the turn may well be running. OpenCode's messages will tell.
            logger.warning("prompt call broke off", error=error.message)
            self._prompt = None
            if addition is not None:
                addition.sent = False
            self._doubt()
            self.wake()
            return []
        if isinstance(error, SessionNotFoundError) or not isinstance(error, ServiceError):
            raise error
        if addition is not None:
            self._calls.remove(prompt)
            self._prompt = self._calls[-1] if self._calls else None
            return [self._withdraw(addition, error.message)]
        # OpenCode would not begin; the reason may come as an event only.
        if self._reader.state.tree.last_error is None and not self._drained():
            return []
        if self._session.named:
            await self._turns.sessions.release(self._turn.owner.principal, self._session.session_id)
        if self._reader.state.tree.last_error is not None:
            return await self._finish()
        text = f"{error.message}; check the model, the agent and the files of the message"
        return await self._finish(Failure(FailureType.UPSTREAM_BAD_REQUEST, text))

    def _drained(self) -> bool:
        """Whether the events have caught up with the end of the turn, or take too long.

        OpenCode answers the prompt call before it has sent the last events.
        """
        limits = self._limits
        if limits.ended is None:
            limits.ended = limits.now()
            asyncio.get_running_loop().call_later(DRAIN_SECONDS, self.wake)
        late = limits.now() - limits.ended >= DRAIN_SECONDS
        return late or (self._reader.state.complete and self._reader.state.messages.diff_known)

    def _doubt(self) -> None:
        """Read OpenCode's stored state again; answers from before now do not count."""
        self._limits.doubted = self._limits.now()
        self._reader.state.note_gap()

    async def _reconcile(self) -> list[TurnEvent]:
        """Compare with the store; end the turn if OpenCode is no longer at it."""
        session, limits = self._session, self._limits
        session_id, since = session.session_id, max(limits.heard, limits.doubted)
        snapshots, message_id = self._turns.snapshots, self._turn.request.user_message_id
        state = await snapshots.read(session_id, message_id, session.location, since)
        known = any(message.info.id == message_id for message in state.messages)
        if known and self._work.begun is None:  # by an earlier process
            self._work.begun = self._turn.request.rights
        if not known and self._prompt is None:
            if self._tries >= PROMPT_TRIES:
                return self._reader.finish(None, failure=NOT_TAKEN)
            self._reader = self._new_reader()
            # First: after a restart the log says whether there is something to abort.
            await self._log.append([Started()])
            self._send(self._turn.request)
            return []
        limits.compared = limits.now()
        limits.unlisted = state.permissions is None or state.questions is None
        self._interrupts.busy = session_id in state.statuses
        events = self._reader.reconcile(state)
        if session_id not in state.statuses and self._idle_is_the_end:
            # The list may be older than the messages, from before the turn began. It is asked for
            # again: what is stored now and idle afterwards has ended.
            try:
                statuses = await snapshots.statuses.of(session.location, limits.now())
                if session_id not in statuses:
                    events += await self._end()
            except ServiceError:
                # The reader counts the events as emitted and will not repeat them.
                if not events:
                    raise
                self._doubt()
                self.wake()
        return events

    # Further messages

    @property
    def _next(self) -> Addition | None:
        """The message to hand on next, if any; a turn that failed is not continued by itself."""
        state = self._reader.state
        newest = state.messages.newest
        failed = state.tree.last_error is not None or (
            newest is not None and newest.error is not None
        )
        for delivery in ("interrupt", "steer", "queue"):
            for addition in self._turn.additions:
                if addition.delivery == delivery and not (failed and delivery == "queue"):
                    return addition
        return None

    async def _deliver(self) -> list[TurnEvent]:
        """Hand on messages that do not wait for the end; one after the other, in their order."""
        turn, state, out = self._turn, self._reader.state, list[TurnEvent]()
        for addition in [*turn.additions]:
            if addition.prompt_id in state.messages.user_messages:  # OpenCode has it
                turn.additions.remove(addition)
                progress = addition.progress("delivered")
                if (progress.type, progress.status, progress.part_id) not in turn.emitted.progress:
                    out.append(progress)
        addition, ready = self._next, state.messages.prompt_seen and not state.needs_reconcile
        if addition is None or addition.sent or not addition.stored or not ready:
            return out
        if addition.tries == PROMPT_TRIES:
            out.append(self._withdraw(addition, NOT_TAKEN.message))
        elif addition.delivery == "steer":
            self._prompt_with(addition)
        elif addition.delivery == "interrupt" and not addition.cleared:
            addition.cleared = True
            # What waits for a person is refused by whoever sent the message.
            self._interrupts.refuse_all(turn.owner.principal)
            seconds = self._turns.settings.interrupts.cancel_abort_timeout_seconds
            try:
                async with asyncio.timeout(seconds):
                    await self._stop()
            except (TimeoutError, UpstreamError) as error:
                logger.warning("abort not confirmed", error=type(error).__name__)
                addition.cleared = False
            self._doubt()  # how far the text had come
            self.wake()
        return out

    def _prompt_with(self, addition: Addition) -> None:
        addition.sent = True
        addition.tries += 1
        self._reader.state.expect(addition.prompt_id)
        self._send(addition.added.request)
        addition.call = self._prompt

    def _withdraw(self, addition: Addition, reason: str) -> Progressed:
        """Give up a message that OpenCode would not take."""
        self._turn.additions.remove(addition)
        sent = self._reader.state.messages.sent
        sent[:] = [prompt for prompt in sent if prompt != addition.prompt_id]
        self.wake()
        return addition.progress("refused", reason)

    # End

    async def _guard(self) -> list[TurnEvent]:
        """Look for signs that the turn will not end by itself, or has ended unheard."""
        limits, session = self._limits, self._session
        failure = limits.exceeded(self._reader)
        if failure is not None:
            return await self._abort(failure)
        if limits.quiet < limits.tick:
            return []
        if not self._reader.state.needs_reconcile and limits.comparison_due:
            self._reader.state.needs_reconcile = True
            self.wake()
            return []
        if self._interrupts.waiting:
            return []
        statuses = await self._turns.snapshots.statuses.of(session.location, limits.heard)
        if session.session_id not in statuses and self._idle_is_the_end:
            return await self._end()
        failure = limits.silence
        return [] if failure is None else await self._abort(failure)

    @property
    def _prompt_running(self) -> bool:
        """Whether the prompt call is still to be answered."""
        return self._prompt is not None and not self._prompt.done()

    @property
    def _idle_is_the_end(self) -> bool:
        """Whether a session that OpenCode does not list as busy is done with the turn.

        An OpenCode that gets no CPU time stores and announces a message seconds before it lists the
        session, so a second sign is needed: the answer to the prompt, its last message, or, where
        neither can come any more, that it has begun at all.
        """
        reader, limits = self._reader, self._limits
        if self._prompt_running:
            return reader.state.complete
        messages = reader.state.messages
        if (
            messages.answers and not messages.unanswered
        ) or reader.state.tree.last_error is not None:
            return True
        return limits.now() - max(limits.heard, limits.doubted) > UNBEGUN_SECONDS

    async def _end(self) -> list[TurnEvent]:
        """End the turn, or go on with the next message if there is one."""
        stored: Snapshot | None = None
        while (addition := self._next) is None:
            if stored is not None:  # and nothing came while it was read
                return self._reader.finish(stored)
            stored = await self._read_end()
        if self._reader.state.needs_reconcile or not addition.stored:
            pass  # both end with a wake
        elif addition.sent:
            self._doubt()  # nothing was heard of it
            self.wake()
        else:
            self._prompt_with(addition)
        return []

    async def _finish(self, failure: Failure | None = None) -> list[TurnEvent]:
        return self._reader.finish(await self._read_end(), failure=failure)

    async def _read_end(self) -> Snapshot:
        """Return what is stored at the end of the turn; the answer to the prompt may be all."""
        prompt = self._prompt
        answered = prompt is not None and prompt.done() and not prompt.cancelled()
        if prompt is not None and answered and prompt.exception() is None:
            answer = prompt.result()
            if self._reader.state.ends_with(answer):
                return Snapshot(messages=[answer])
        return await self._turns.snapshots.read_end(
            self._session.session_id,
            self._reader.state.messages.sent,
            self._reader.state.tree.children,
        )

    async def _abort(self, failure: Failure | None) -> list[TurnEvent]:
        """Stop the session and its sub-agents, make sure of it, and end the turn."""
        seconds = self._turns.settings.interrupts.cancel_abort_timeout_seconds
        try:
            async with asyncio.timeout(seconds):
                await self._stop()
            confirmed = True
        except (TimeoutError, UpstreamError) as error:
            logger.warning("abort not confirmed", error=type(error).__name__)
            confirmed = False
        state: Snapshot | None = None
        with suppress(TimeoutError, UpstreamError):
            async with asyncio.timeout(seconds):
                state = await self._read_end()
        events = self._reader.finish(state, aborted=failure is None, failure=failure)
        return events if confirmed and state is not None else _noted(events, UNCONFIRMED)

    async def _stop(self) -> None:
        """Abort until OpenCode is idle: an abort that comes before the turn begins is lost."""
        opencode, session = self._turns.opencode, self._session
        sessions = {session.session_id, *self._reader.state.tree.children}
        await opencode.abort_session(session.session_id)
        await self._interrupts.reject_all(sessions)
        while True:
            busy = sessions & set(await opencode.session_status(at=session.location))
            if self._prompt is not None and not busy:
                # It may be about to begin: the answer to the prompt says that it will not.
                await asyncio.wait([self._prompt], timeout=AGAIN_SECONDS)
                busy = {session.session_id} if self._prompt_running else busy
            if not busy:
                return
            for session_id in busy:
                await opencode.abort_session(session_id)


def _noted(events: list[TurnEvent], note: Failure) -> list[TurnEvent]:
    """Say on the end of a turn what could not be made sure of, unless it says more already."""
    return [
        replace(event, failure=note) if isinstance(event, Finished) and not event.failure else event
        for event in events
    ]


async def _by_schema(events: list[TurnEvent], schema: JsonObject) -> list[TurnEvent]:
    """Give the answer of a turn as data that fits the schema, or fail it.

    OpenCode (1.18) does not compare what the model gives with the schema. The tool by which the
    model gives it is OpenCode's own, and not shown.
    """
    out: list[TurnEvent] = []
    for event in events:
        if isinstance(event, ToolChanged) and event.tool == STRUCTURED_OUTPUT:
            continue
        if isinstance(event, Finished) and event.outcome is Outcome.COMPLETED:
            wrong = ["there is none"]
            if event.structured is not None:
                wrong = await asyncio.to_thread(mismatches, schema, event.structured)
            if wrong:
                text = f"{UNFITTING}: {'; '.join(wrong)}"
                failure = Failure(FailureType.UPSTREAM_STRUCTURED_OUTPUT, text)
                event = Finished(Outcome.FAILED, event.message_id, event.finish, failure=failure)
            else:
                out.append(ResultGiven(event.structured))
        out.append(event)
    return out
