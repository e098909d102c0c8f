"""One turn: prompt, follow, interrupt, finish, abort.

``tasks`` runs a turn and stores what it tells. Three signals tell that a turn is over, and
none is trusted alone: the answer of the blocking prompt call, the events, and the session's
status when asked; what OpenCode has stored decides. A turn has no time limit; silence, an
endless loop of steps, and a retry far ahead end it.
"""

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Protocol

import structlog

from opencode_a2a.clock import now_ms
from opencode_a2a.config import Settings
from opencode_a2a.errors import (
    ServiceError,
    SessionNotFoundError,
    UpstreamBackpressureError,
    UpstreamError,
    UpstreamTimeoutError,
    UpstreamUnreachableError,
)
from opencode_a2a.events import (
    Emitted,
    Failure,
    Finished,
    Interrupted,
    Outcome,
    Progressed,
    SessionBound,
    Started,
    TurnEvent,
)
from opencode_a2a.ids import ContextId, MessageId, ModelRef, Principal, RequestId, SessionId, TaskId
from opencode_a2a.messages import Answered, Message, PromptPart, Routing
from opencode_a2a.opencode.client import OpenCode
from opencode_a2a.opencode.events import Event, PartDelta
from opencode_a2a.opencode.feed import Feed, FeedItem, Gap, Subscription, Wake
from opencode_a2a.opencode.reader import Reader
from opencode_a2a.opencode.state import Snapshot
from opencode_a2a.opencode.types import (
    FileInput,
    InputPart,
    MessageWithParts,
    Prompt,
    StatusRetry,
    TextInput,
)
from opencode_a2a.turns.answers import Answer, Reply
from opencode_a2a.turns.desk import TurnInterrupts, Write
from opencode_a2a.turns.interrupts import Interrupts, Owner
from opencode_a2a.turns.models import Models
from opencode_a2a.turns.sessions import BoundSession, Sessions
from opencode_a2a.turns.snapshot import Changes, Snapshots
from opencode_a2a.turns.tools import Tools

__all__ = ["Log", "Turn", "TurnSpec", "Turns"]

log = structlog.get_logger(__name__)

TICK_SECONDS = 5.0
"""How often a turn that hears nothing asks whether it is still running, at the least."""
LONGEST_TICK_SECONDS = 20.0
"""The same for a turn that has been quiet for long."""
DRAIN_SECONDS = 2.0
"""How long the events may come after the end of the turn is known."""
UNBEGUN_SECONDS = 15.0
"""How long an OpenCode that gets no time may have a message before it is seen to work on it."""
AGAIN_SECONDS = 0.2
"""How often a turn that has not begun yet is told to stop."""
START_SECONDS = 0.25
"""How long a tool call that has begun to run may take to ask before it is shown."""
READY_SECONDS = 10.0
FIRST_ANSWER_SECONDS = 3.0
"""How long a call may wait for an OpenCode that has never answered."""
PROMPT_TRIES = 3

SILENT = "OpenCode has told nothing for {:.0f} s; the turn was stopped. Send the message again."
LONG = "The turn took longer than {:.0f} s and was stopped. Ask for less at once."
ENDLESS = "The model was asked {} times without coming to an end; the turn was stopped."
RETRY_FAR = "The model provider asks to wait too long ({}); the turn was stopped. Try again later."
UNCONFIRMED = Failure(
    "UPSTREAM_ABORT_UNCONFIRMED",
    "The task is canceled, but OpenCode did not confirm in time that it has stopped.",
)
GONE = Failure(
    "UPSTREAM_RESOURCE_NOT_FOUND",
    "The session was deleted inside OpenCode. Send the message again to begin a new one.",
)
EXPIRED = Failure("INTERRUPT_EXPIRED", "Nobody answered in time; the turn was stopped.")
FORGED = Failure(
    "INTERRUPT_FORGED",
    "A permission or question was answered past this service, perhaps by the agent itself; the "
    "turn was stopped. Set A2A_CONSOLE_ANSWERS=true if people answer at OpenCode's own terminal.",
)


@dataclass(frozen=True, slots=True)
class TurnSpec:
    task_id: TaskId
    context_id: ContextId
    principal: Principal
    prompt: tuple[PromptPart, ...]
    routing: Routing
    user_message_id: MessageId
    session_id: SessionId | None = None
    """The session that an earlier process chose."""
    new_context: bool = False
    """The context was made for this very turn."""
    emitted: Emitted | None = None
    """What an earlier process told; then the prompt may have been sent already."""


class SessionGoneError(Exception):
    """The session of the context was deleted inside OpenCode; there has to be a new one."""


class Turns:
    """Makes turns; holds what all of them share."""

    def __init__(
        self,
        settings: Settings,
        opencode: OpenCode,
        feed: Feed,
        sessions: Sessions,
        interrupts: Interrupts,
        tools: Tools | None = None,
    ) -> None:
        self.tools = tools
        self.opencode = opencode
        self.feed = feed
        self.sessions = sessions
        self.interrupts = interrupts
        self.settings = settings
        self.models = Models(opencode, settings.opencode.model)
        self.snapshots = Snapshots(opencode)
        self.running = 0

    async def reachable(self) -> None:
        """Raise what is wrong as long as OpenCode has never answered this service.

        Once it has, a turn waits for an OpenCode that is away. Before that there is nothing to
        wait for: the address or the password may be wrong.
        """
        if self.feed.generation:
            return
        try:
            async with asyncio.timeout(FIRST_ANSWER_SECONDS):
                await self.opencode.health()
        except TimeoutError:
            raise UpstreamTimeoutError from None

    def turn(self, spec: TurnSpec) -> "Turn":
        return Turn(spec, self)


class Log(Protocol):
    """Where a turn tells what happens."""

    async def tell(
        self, events: Sequence[TurnEvent | Answered], also: Write | None = None
    ) -> object:
        """Take events, and write what belongs to them; return once they may be relied on."""
        ...

    def say(self, events: Sequence[TurnEvent]) -> object:
        """Take growing text, which nobody waits for."""
        ...


class Turn:
    def __init__(self, spec: TurnSpec, turns: Turns) -> None:
        self._spec = spec
        self._turns = turns
        self._canceled = False
        self._preparing: asyncio.Task[None] | None = None
        """The task of the turn, while OpenCode has nothing to do with it yet."""
        self._seat: BoundSession | None = None
        self._run: Run | None = None
        self._ready: asyncio.Event | None = None

    async def run(self, told: Log) -> None:
        """Run the turn, and tell it; the last event is the end."""
        if 0 < self._turns.settings.opencode.max_concurrent_streams <= self._turns.running:
            raise UpstreamBackpressureError
        self._turns.running += 1
        try:
            while not await self._seated(told):
                log.warning("the session was deleted, the context goes on in a new one")
        finally:
            self._turns.running -= 1

    async def _seated(self, told: Log) -> bool:
        """Run the turn in a session; False when the session has to be another."""
        task = self._preparing = asyncio.current_task()
        self._seat = None
        try:
            if self._canceled:
                raise asyncio.CancelledError
            seat, lock = await self._prepare(told)
        except asyncio.CancelledError:
            if not self._canceled or task is None:
                raise
            task.uncancel()
            await told.tell([Finished(Outcome.CANCELED)], self._seat and self._seat.link)
            return True
        finally:
            self._preparing = None
        try:
            answers = await self._answers()
            with self._turns.feed.follow(seat.session_id) as subscription:
                self._run = Run(self._spec, self._turns, seat, subscription, told)
                self._run.desk.restore(self._run.pending, answers)
                if self._canceled:
                    self._run.cancel()
                if self._ready is not None:
                    self._ready.set()
                await self._run.follow()
        except SessionGoneError:
            return False
        finally:
            lock.release()
            if self._run is not None:
                self._run.close()
        return True

    async def _answers(self) -> Mapping[RequestId, Answer]:
        """Return the answers that an earlier process stored, and may not have given."""
        if self._spec.emitted is None:
            return {}
        return await self._turns.interrupts.stored(self._spec.task_id)

    async def _prepare(self, told: Log) -> tuple[BoundSession, asyncio.Lock]:
        """Take a seat and wait for the session's earlier turns."""
        self._seat = seat = await self._take()
        if self._turns.tools is not None:
            await self._turns.tools.offer(seat.location)
        lock = self._turns.sessions.turns[seat.session_id]
        if lock.locked():
            waiting = Progressed("queue", "waiting", title="An earlier turn runs")
            await told.tell([_bound(seat), waiting], seat.link)
        await lock.acquire()
        return seat, lock

    def cancel(self) -> None:
        """Ask the turn to stop; it then tells its end."""
        if self._preparing is not None and not self._canceled:
            self._preparing.cancel()
        self._canceled = True
        if self._run is not None:
            self._run.cancel()

    async def ready(self) -> None:
        """Wait until prompts can be answered; after a restart of the service it takes a moment."""
        if self._run is not None:
            return
        self._ready = self._ready or asyncio.Event()
        with suppress(TimeoutError):
            async with asyncio.timeout(READY_SECONDS):
                await self._ready.wait()

    def check(self, request_id: str, reply: Reply) -> None:
        """Raise when a person may not answer a prompt of this turn so."""
        self._desk.check(request_id, reply)

    async def answer(self, request_id: str, answer: Answer, also: Write | None = None) -> None:
        """Answer an interrupt of this turn for a person; ``also`` is stored with the answer."""
        await self._desk.answer(request_id, answer, also)

    async def repeat(self, message: Message) -> None:
        """See to it that OpenCode gets the answer in a message that was taken before."""
        await self._desk.repeat(message)

    @property
    def _desk(self) -> TurnInterrupts:
        if self._run is None:
            raise UpstreamUnreachableError("The turn is not connected to OpenCode yet; try again")
        return self._run.desk

    async def _take(self) -> BoundSession:
        spec = self._spec
        routing = spec.routing
        if spec.session_id is not None and routing.session_id is None:
            routing = replace(routing, session_id=spec.session_id)
        # A task that an earlier process began waits for OpenCode for as long as it takes.
        limit = self._turns.settings.opencode.timeout if spec.emitted is None else None
        try:
            async with asyncio.timeout(limit):
                return await self._patiently(spec, routing)
        except TimeoutError:
            raise UpstreamUnreachableError from None

    async def _patiently(self, spec: TurnSpec, routing: Routing) -> BoundSession:
        """Take a seat, waiting for an OpenCode that is away."""
        while True:
            await self._turns.feed.connected()
            try:
                return await self._turns.sessions.take(
                    spec.principal, spec.context_id, routing, fresh=spec.new_context
                )
            except UpstreamUnreachableError as error:
                log.warning("OpenCode is away, waiting", error=error.message)
                await asyncio.sleep(TICK_SECONDS / 10)


class Run:
    """The part of a turn that talks to its session."""

    def __init__(
        self,
        spec: TurnSpec,
        turns: Turns,
        seat: BoundSession,
        subscription: Subscription,
        told: Log,
    ) -> None:
        self._spec = spec
        self._turns = turns
        self._opencode = turns.opencode
        self._settings = turns.settings
        self._longest = turns.settings.opencode.timeout_stream
        self._tick_seconds = min(
            TICK_SECONDS, self._settings.turn.silence_seconds, self._longest or TICK_SECONDS
        )
        self._seat = seat
        self._subscription = subscription
        self._log = told
        self._canceled = False
        self._reader = Reader(seat.session_id, spec.user_message_id, spec.emitted)
        owner = Owner(spec.task_id, spec.context_id, spec.principal)
        self.desk = TurnInterrupts(
            turns.opencode, turns.interrupts, owner, seat.location, self.wake
        )
        turns.interrupts.turns.add(seat.session_id)
        self._loop = asyncio.get_running_loop()
        self._prompt: asyncio.Task[MessageWithParts] | None = None
        self._tries = 0
        self._began = self._heard = self._loop.time()
        """When the turn last gave a sign of life."""
        self._changes = Changes(seat.session_id)
        self._notes: list[TurnEvent] = []
        """What is to be told beside what is heard."""
        tools = turns.tools
        self._origin = tools and tools.callers.enter(spec.routing.hops, self._note)
        self._ended: float | None = None
        """When the end of the turn was first known."""
        self._doubted = self._began
        """When something turned out not to be as it was told."""
        self._compared = self._began
        """When the store was last read."""
        self._unlisted = False
        """OpenCode could not list its prompts, so that one may have been missed."""
        self._confirmed = False
        self._retry: StatusRetry | None = None
        """The retry that was last found near enough to wait for."""
        self._timer: asyncio.TimerHandle | None = None
        self._starting: asyncio.TimerHandle | None = None

    @property
    def pending(self) -> list[Interrupted]:
        """The interrupts that wait for an answer."""
        return list(self._reader.state.asked.values())

    def wake(self) -> None:
        self._subscription.wake()

    def cancel(self) -> None:
        self._canceled = True
        self.wake()

    def close(self) -> None:
        self.desk.close()
        self._turns.interrupts.turns.discard(self._seat.session_id)
        if self._turns.tools is not None and self._origin is not None:
            self._turns.tools.callers.leave(self._origin, canceled=self._canceled)
        for timer in (self._timer, self._starting):
            if timer is not None:
                timer.cancel()
        if self._prompt is not None:
            self._prompt.cancel()

    def _start(self) -> None:
        """Show the tool calls that have begun and did not ask."""
        self._starting = None
        self._notes += self._reader.start()
        self.wake()

    def _note(self, progress: Progressed) -> None:
        self._notes.append(progress)
        self._heard = self._loop.time()
        self.wake()

    async def follow(self) -> None:
        """Follow the session to the end of the turn, and tell what happens."""
        if self._spec.emitted is None:
            await self._log.tell([_bound(self._seat), Started()], self._seat.link)
            if not self._canceled:
                self._send()
        else:
            await self._log.tell([_bound(self._seat)], self._seat.link)
        self._tick()
        while not self._reader.finished:
            await self._tell(self._hear(await self._subscription.batch(self._grow)))
            try:
                told = await self._decide()
            except SessionNotFoundError:
                told = await self._gone()
            except UpstreamError as error:
                # The store could not be read; the next tick, or the feed's return, tries again.
                log.warning("OpenCode could not be asked", error=error.message)
                told = self._overdue()
            await self._tell(told)
            if self._starting is None and self._reader.starting:
                self._starting = self._loop.call_later(START_SECONDS, self._start)

    async def _tell(self, events: list[TurnEvent]) -> None:
        if events:
            told = await self.desk.screen(events)
            if self.desk.forged is not None:  # noticed with the end of the turn: not a good end
                good = Outcome.COMPLETED
                told = [
                    Finished(Outcome.FAILED, event.message_id, failure=FORGED)
                    if isinstance(event, Finished) and event.outcome is good
                    else event
                    for event in told
                ]
            await self._log.tell(told)
            self.desk.told()

    def _grow(self, deltas: list[PartDelta]) -> None:
        """Hear growing text, after which there is nothing to decide."""
        self._heard = self._loop.time()
        self._log.say(self._reader.feed(deltas))

    def _hear(self, items: list[FeedItem]) -> list[TurnEvent]:
        told, self._notes = self._notes, []
        events: list[Event] = []
        self._changes.hear(items)
        if self._turns.tools is not None and self._origin is not None:
            self._turns.tools.hear(self._origin, items)
        for item in items:
            match item:
                case Gap():
                    told += self._reader.feed(events)
                    events = []
                    self._heard = item.at
                    self._reader.state.gap()
                case Wake():
                    pass
                case _:
                    events.append(item)
        if events:
            self._heard = self._loop.time()
            told += self._reader.feed(events)
        return told

    async def _decide(self) -> list[TurnEvent]:
        """Do what is to be done now that something was heard, or time has passed."""
        reader = self._reader
        if reader.state.messages.prompt_seen and not self._confirmed:
            await self._confirm()
        if self._canceled:
            return await self._abort(None)
        if self.desk.forged is not None:
            return await self._abort(FORGED)
        if not await self.desk.act():
            return await self._abort(EXPIRED)
        if self.desk.stale:
            self.desk.stale = False
            self._doubt()
        if reader.state.needs_reconcile and self._turns.feed.up:
            told = await self._reconcile()
            if told or reader.finished:
                return told
        if self._prompt is not None and self._prompt.done():
            return await self._prompt_done(self._prompt)
        if self._prompt is None and reader.state.complete:
            return await self._finish() if self._drained() else []
        return await self._guard()

    async def _confirm(self) -> None:
        self._confirmed = True
        spec = self._spec
        await self._turns.sessions.confirm(
            self._seat, spec.principal, spec.context_id, spec.routing
        )

    # The prompt

    def _send(self) -> None:
        self._tries += 1
        self._prompt = asyncio.create_task(self._prompting())
        self._prompt.add_done_callback(lambda _: self.wake())

    async def _prompting(self) -> MessageWithParts:
        model = await self._turns.models.choose(self._seat, self._spec.routing.model)
        if self._canceled:
            raise asyncio.CancelledError
        seat = self._seat
        return await self._opencode.prompt(seat.session_id, self._body(model), at=seat.location)

    def _body(self, model: ModelRef | None) -> Prompt:
        defaults = self._settings.opencode
        return Prompt(
            parts=[_input(part) for part in self._spec.prompt],
            message_id=self._spec.user_message_id,
            model=model,
            agent=defaults.agent,
            system=defaults.system,
            variant=defaults.variant,
        )

    async def _prompt_done(self, prompt: asyncio.Task[MessageWithParts]) -> list[TurnEvent]:
        error = prompt.exception()
        match error:
            case None:
                return await self._after_answer()
            case UpstreamUnreachableError():
                # The connection broke; the turn may well be running. The store will tell.
                log.warning("prompt call broke off", error=error.message)
                self._prompt = None
                self._doubt()
                self.wake()
                return []
            case SessionNotFoundError():
                raise error
            case ServiceError():
                return await self._refused(error)
            case _:
                raise error

    async def _after_answer(self) -> list[TurnEvent]:
        return await self._finish() if self._drained() else []

    def _drained(self) -> bool:
        """Whether the events have caught up with the end of the turn, or take too long."""
        if self._ended is None:
            self._ended = self._loop.time()
            self._loop.call_later(DRAIN_SECONDS, self.wake)
        late = self._loop.time() - self._ended >= DRAIN_SECONDS
        return late or (self._reader.state.complete and self._changes.known)

    async def _refused(self, error: ServiceError) -> list[TurnEvent]:
        """End a turn that OpenCode would not begin; the reason may come as an event only."""
        if self._reader.state.last_error is None and not self._drained():
            return []
        if self._seat.named:
            await self._turns.sessions.release(self._spec.principal, self._seat.session_id)
        if self._reader.state.last_error is not None:
            return await self._finish()
        text = f"{error.message}; check the model, the agent and the files of the message"
        return await self._finish(Failure("UPSTREAM_BAD_REQUEST", text))

    async def _gone(self) -> list[TurnEvent]:
        """End a turn whose session was deleted, or begin anew if nothing was prompted yet."""
        await self._turns.sessions.forget(self._seat.session_id)
        if not self._seat.named and not self._reader.state.messages.prompt_seen:
            raise SessionGoneError
        return self._fail(GONE)

    # The store

    def _doubt(self) -> None:
        """Have the store read, as it is from now on."""
        self._doubted = self._loop.time()
        self._reader.state.gap()

    async def _reconcile(self) -> list[TurnEvent]:
        """Compare with the store; end the turn if OpenCode is no longer at it."""
        spec, session_id = self._spec, self._seat.session_id
        state = await self._turns.snapshots.read(
            session_id, spec.user_message_id, self._seat.location, max(self._heard, self._doubted)
        )
        known = any(message.info.id == spec.user_message_id for message in state.messages)
        if not known and self._prompt is None:
            if self._tries < PROMPT_TRIES:
                self._reader = Reader(session_id, spec.user_message_id)
                self._send()
                return [Started()]
            return self._fail(Failure("UPSTREAM_UNREACHABLE", "OpenCode did not take the prompt."))
        self._compared = self._loop.time()
        self._unlisted = state.permissions is None or state.questions is None
        self.desk.busy = session_id in state.statuses
        told = self._reader.reconcile(state)
        if session_id not in state.statuses and self._idle_is_the_end:
            # The list may be older than the messages, from before the turn began. It is asked for
            # again: what is stored now and idle afterwards has ended.
            statuses = await self._turns.snapshots.statuses.of(
                self._seat.location, self._loop.time()
            )
            if session_id not in statuses:
                told += await self._finish()
        return told

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
            self._seat.session_id, self._spec.user_message_id, self._reader.state.children
        )

    def _fail(self, failure: Failure) -> list[TurnEvent]:
        return self._reader.finish(None, failure=failure)

    # What ends a turn from outside

    def _tick(self) -> None:
        # The longer it has been quiet, the less a moment matters: a thousand turns that wait for
        # their models should cost next to nothing.
        quiet = self._loop.time() - self._heard
        pause = max(self._tick_seconds, min(quiet / 2, LONGEST_TICK_SECONDS))
        self._timer = self._loop.call_later(pause, self._tick)
        self.wake()

    async def _guard(self) -> list[TurnEvent]:
        """Look for signs that the turn will not end by itself, or has ended unheard."""
        reader, limits = self._reader, self._settings.turn
        if reader.state.steps > limits.max_steps:
            return await self._abort(
                Failure("UPSTREAM_ENDLESS", ENDLESS.format(reader.state.steps))
            )
        retry = reader.state.retry
        if retry is not None and retry is not self._retry:
            # Judged once, when it is heard: the wall clock may jump while it is waited for.
            self._retry = retry
            if retry.next - now_ms() > limits.max_retry_wait_seconds * 1000:
                failure = Failure("UPSTREAM_QUOTA_EXCEEDED", RETRY_FAR.format(retry.message))
                return await self._abort(failure)
        now = self._loop.time()
        if self._longest is not None and now - self._began > self._longest:
            return await self._abort(Failure("UPSTREAM_TIMEOUT", LONG.format(self._longest)))
        quiet = now - self._heard
        if quiet < self._tick_seconds:
            return []
        # After 5 s, 20 s, 80 s: each comparison reads the messages of the session.
        compare_after = self._tick_seconds if self._unlisted else quiet * 3 / 4
        if not reader.state.needs_reconcile and now - self._compared >= compare_after:
            # Events get lost without a gap as well, right after a connection above all.
            reader.state.needs_reconcile = True
            self.wake()
            return []
        if self.desk.waiting:
            return []
        statuses = await self._turns.snapshots.statuses.of(self._seat.location, self._heard)
        if self._seat.session_id not in statuses and self._idle_is_the_end:
            return await self._finish()
        return await self._abort(self._silence()) if quiet > limits.silence_seconds else []

    @property
    def _answer_due(self) -> bool:
        """Whether the prompt call is still to be answered."""
        return self._prompt is not None and not self._prompt.done()

    @property
    def _idle_is_the_end(self) -> bool:
        """Whether a session that OpenCode does not list as busy is done with the turn.

        An OpenCode that gets no time stores and announces a message seconds before it lists the
        session, so a second sign is needed: the answer to the prompt, its last message, or, where
        neither can come any more, that it has begun at all.
        """
        reader = self._reader
        if self._answer_due:
            return reader.state.complete
        if reader.state.steps or reader.state.last_error is not None:
            return True
        return self._loop.time() - max(self._heard, self._doubted) > UNBEGUN_SECONDS

    def _silence(self) -> Failure:
        return Failure("UPSTREAM_TIMEOUT", SILENT.format(self._settings.turn.silence_seconds))

    def _overdue(self) -> list[TurnEvent]:
        """End a turn whose OpenCode has been away for too long."""
        if self._canceled:
            return _noted(self._reader.finish(None, aborted=True), UNCONFIRMED)
        if self._loop.time() - self._heard > self._settings.turn.silence_seconds:
            return self._fail(self._silence())
        return []

    async def _abort(self, failure: Failure | None) -> list[TurnEvent]:
        """Stop the session and its sub-agents, make sure of it, and end the turn."""
        try:
            async with asyncio.timeout(self._settings.interrupts.cancel_abort_timeout_seconds):
                await self._stop()
            confirmed = True
        except (TimeoutError, UpstreamError) as error:
            log.warning("abort not confirmed", error=type(error).__name__)
            confirmed = False
        with suppress(TimeoutError, UpstreamError):
            async with asyncio.timeout(self._settings.interrupts.cancel_abort_timeout_seconds):
                state = await self._read_end()
                told = self._reader.finish(state, aborted=failure is None, failure=failure)
                return told if confirmed else _noted(told, UNCONFIRMED)
        return _noted(
            self._reader.finish(None, aborted=failure is None, failure=failure), UNCONFIRMED
        )

    async def _stop(self) -> None:
        sessions = {self._seat.session_id, *self._reader.state.children}
        await self._opencode.abort_session(self._seat.session_id)
        await self.desk.reject_all(sessions)
        while True:
            busy = sessions & set(await self._opencode.session_status(at=self._seat.location))
            if self._prompt is not None and not busy:
                # It may be about to begin: the answer to the prompt says that it will not.
                await asyncio.wait([self._prompt], timeout=AGAIN_SECONDS)
                busy = {self._seat.session_id} if self._answer_due else busy
            if not busy:
                return
            for session_id in busy:
                await self._opencode.abort_session(session_id)


def _bound(seat: BoundSession) -> SessionBound:
    return SessionBound(seat.session_id, seat.directory, seat.title)


def _input(part: PromptPart) -> InputPart:
    if part.text is not None:
        return TextInput(text=part.text)
    media_type = part.media_type or "text/plain"
    return FileInput(
        mime=media_type, url=f"data:{media_type};base64,{part.data}", filename=part.filename
    )


def _noted(events: list[TurnEvent], note: Failure) -> list[TurnEvent]:
    """Say on the end of a turn what could not be made sure of, unless it says more already."""
    return [
        replace(event, failure=note) if isinstance(event, Finished) and not event.failure else event
        for event in events
    ]
