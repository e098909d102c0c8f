"""An attempt to run a turn in one session: prompt, follow, interrupt, finish, abort.

``turns.turn`` makes an ``Attempt`` when the session is free. It sends the prompt and follows the
session until the turn is over. Three signals say so, and none is trusted alone: the answer to the
blocking prompt call, the events, and the session's status when asked; what OpenCode has stored
decides. ``PromptCalls`` are the calls that take prompts to OpenCode; ``TurnLimits`` says when to
look again, and when a turn is given up.
"""

import asyncio
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace

import structlog

from opencode_a2a.bounds import StoppedError, wait
from opencode_a2a.clock import now_ms
from opencode_a2a.config import Settings
from opencode_a2a.errors import (
    ServiceError,
    SessionNotFoundError,
    StoreUnavailableError,
    UpstreamError,
    UpstreamPayloadError,
    UpstreamUnansweredError,
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
    Started,
    ToolChanged,
    TurnEvent,
)
from opencode_a2a.ids import RequestId, SessionId
from opencode_a2a.messages import Answered, TurnRequest
from opencode_a2a.opencode.events import Event, Missed, PartDelta
from opencode_a2a.opencode.feed import FeedItem, Gap, Wake
from opencode_a2a.opencode.reader import TurnReader
from opencode_a2a.opencode.turn_state import Snapshot, TurnMessages
from opencode_a2a.opencode.types import (
    CommandCall,
    FileInput,
    InputPart,
    MessageWithParts,
    OutputFormat,
    Prompt,
    StatusRetry,
    TextInput,
    TextPart,
)
from opencode_a2a.rights import STRUCTURED_OUTPUT
from opencode_a2a.schemas import mismatches
from opencode_a2a.turns.interrupts import AfterAttend
from opencode_a2a.turns.job import Addition, Job, Log, PromptCall
from opencode_a2a.turns.sessions import TurnSession, WiderWorkError, Work

logger = structlog.get_logger(__name__)

AGAIN_SECONDS = 0.2
"""Seconds between two aborts of a turn that has not begun yet, and between two looks at a queue."""
START_SECONDS = 0.25
"""Seconds in which a tool call that has begun may ask for a permission before it is shown."""
AWAY_SECONDS = 0.5
"""Seconds between two tries while OpenCode is unreachable, or the session is busy."""
PROMPT_TRIES = 3
"""How many times to send a prompt that does not appear in OpenCode's store."""

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

TICK_SECONDS = 5.0
"""Seconds between two looks at a turn that has only just become quiet."""
LONGEST_TICK_SECONDS = 20.0
"""The same for a turn that has been quiet for long."""
DRAIN_SECONDS = 2.0
"""Seconds in which events may still arrive after the end of the turn is known."""
REPORT_SECONDS = 2.0
"""Seconds in which OpenCode reports the end of work in the background to the model."""
UNBEGUN_SECONDS = 15.0
"""Seconds that an OpenCode without CPU time may need from storing a message to working on it."""

SILENT = "OpenCode has been silent for {:.0f} s; the turn was stopped. Send the message again."
LONG = "The turn took longer than {:.0f} s and was stopped. Ask for less at once."
COSTLY = "The turn has cost {:.4g} and may cost {:g}; it was stopped."
ENDLESS = "The model was asked {} times without coming to an end; the turn was stopped."
RETRY_FAR = "The model provider asks to wait too long ({}); the turn was stopped. Try again later."


class SessionGoneError(Exception):
    """OpenCode deleted the session of the context before the prompt: the turn needs a new one."""


class Attempt:
    """One attempt to run the turn, in one session.

    If OpenCode deletes the session before it has the prompt, the turn makes another attempt in a
    new one. ``run`` begins, and then hears, decides and writes until the reader has finished;
    ``_decide`` has the table of what may happen next.
    """

    # Begin

    def __init__(self, job: Job, session: TurnSession, log: Log) -> None:
        self._job = job
        self._shared = job.shared
        self._interrupts = job.interrupts
        self._interrupts.location = session.location
        self._session = session
        self._log = log
        self._reader = self._new_reader(job.emitted if job.recovered else None)
        self._limits = TurnLimits(job.shared.settings)
        self._unwritten: list[TurnEvent] = []
        """Events that come from elsewhere than OpenCode, to be written with the next batch."""
        self._children_unread = False
        """Whether events may be missing that say what the sub-agents cost."""
        self._tick_timer: asyncio.TimerHandle | None = None
        self._start_timer: asyncio.TimerHandle | None = None
        self._drain_timer: asyncio.TimerHandle | None = None
        self._report_timer: asyncio.TimerHandle | None = None
        tools = self._shared.tools
        self._calling_turn = tools and tools.calling_turns.enter(
            job.request.routing.hops, self._report, job.owner.principal
        )
        self._shared.interrupts.sessions_with_turn[session.session_id] = job.interrupts
        self._subscription = self._shared.feed.follow(session.session_id, recovered=job.recovered)
        work = self._shared.sessions.rights.register(session.session_id, job.owner.rights)
        self._prompts = PromptCalls(job, session, work, self._report, self.wake)

    @property
    def finished(self) -> bool:
        return self._reader.finished

    def wake(self) -> None:
        """Have the turn decide again, though no event came."""
        self._subscription.wake()

    def _new_reader(self, emitted_before: Emitted | None = None) -> TurnReader:
        job = self._job
        prompt, channel = job.request.user_message_id, Channel.PLAN if job.plans else Channel.TEXT
        reader = TurnReader(self._session.session_id, prompt, emitted_before, channel)
        for addition in job.additions:
            reader.state.messages.claim(addition.prompt_id)
        return reader

    def close(self) -> None:
        self._subscription.close()
        self._shared.interrupts.sessions_with_turn.pop(self._session.session_id, None)
        self._prompts.close()
        if self._shared.tools is not None and self._calling_turn is not None:
            self._shared.tools.calling_turns.leave(self._calling_turn, canceled=self._job.canceled)
        timers = (self._tick_timer, self._start_timer, self._drain_timer, self._report_timer)
        for timer in timers:
            if timer is not None:
                timer.cancel()
        # They call this attempt back: a circle that only the garbage collector would find.
        del self._prompts

    async def run(self) -> None:
        """Begin; then hear, decide and write until the turn is over."""
        try:
            await self._prompt_or_recover()
            while not self._reader.finished:
                await self._write(self._hear(await self._subscription.batch(self._on_text)))
                await self._write(await self._decide_or_wait())
                if self._start_timer is None and self._reader.starting:
                    loop = asyncio.get_running_loop()
                    self._start_timer = loop.call_later(START_SECONDS, self._show_started)
        except SessionGoneError:
            raise
        except Exception:  # an error that ends the turn: nobody would follow it any more
            with suppress(SessionNotFoundError):
                await self._stopped_in_time()
            raise

    async def _prompt_or_recover(self) -> None:
        """Send the prompt, unless an earlier process may have sent it."""
        job, session = self._job, self._session
        bound = job.session_bound_event(session)
        if not job.recovered:
            events: list[TurnEvent] = [bound, Started()]
            if session.replaces:
                events.append(REPLACED)
            await self._log.append(events, session.link)
            if not job.canceled:
                self._prompts.send(job.request)
        else:
            # The first ``_decide`` looks whether OpenCode has the prompt, and else sends it
            # (``_send_unsent_prompt``). The answers of a turn that is about to be stopped wait
            # until it has ended.
            if not job.canceled and job.refusal is None:
                self._interrupts.connected.set()
            await self._log.append([bound], session.link)
        self._tick()

    # Hear

    def _tick(self) -> None:
        """Have the turn decide again from time to time, though no event comes."""
        loop = asyncio.get_running_loop()
        self._tick_timer = loop.call_later(self._limits.pause, self._tick)
        self.wake()

    def _show_started(self) -> None:
        """Show the tool calls that have begun and did not ask for a permission."""
        self._start_timer = None
        self._unwritten += self._reader.show_starting()
        self.wake()

    def _report(self, progress: Progressed) -> None:
        """Take a report of this service itself, such as the progress of one of its tools."""
        self._unwritten.append(progress)
        self._limits.heard = self._limits.now()
        self.wake()

    def _on_text(self, deltas: list[PartDelta]) -> None:
        """Hear growing text; it needs no decision."""
        self._limits.heard = self._limits.now()
        self._log.append_now(self._reader.feed(deltas))

    def _hear(self, items: list[FeedItem]) -> list[TurnEvent]:
        """Feed the reader; return the events to write."""
        out, self._unwritten = [*self._unwritten, *self._interrupts.asked_anew()], []
        events: list[Event] = []
        if self._shared.tools is not None and self._calling_turn is not None:
            self._shared.tools.hear(self._calling_turn, items)
        for item in items:
            match item:
                case Gap():
                    out += self._reader.feed(events)
                    events = []
                    self._limits.heard = item.at
                    self._reader.state.require_reconcile()
                case Wake():
                    pass
                case _:
                    # Of a sub-agent, it may be what a step has cost.
                    self._children_unread |= isinstance(item, Missed)
                    events.append(item)
        if events:
            self._limits.heard = self._limits.now()
            out += self._reader.feed(events)
        return out

    # Write

    async def _write(self, events: list[TurnEvent]) -> None:
        """Compare the answer with its schema, handle interrupts and the end, write to the log."""
        if not events:
            return
        schema = self._job.request.routing.output_schema
        if schema is not None and not self._job.plans:
            events = await _by_schema(events, schema)
        heard = self._reader.state.messages.user_messages
        if any(addition.prompt_id in heard for addition in self._job.additions):
            self._interrupts.go_on()  # before requests that come of the new prompt are asked
        to_log = await self._interrupts.ask_and_settle(events)
        if self._reader.finished:
            to_log = await self._conclude(to_log)
        await self._log.append(to_log)
        self._interrupts.note_logged()

    async def _conclude(self, events: list[TurnEvent | Answered]) -> list[TurnEvent | Answered]:
        """Translate the end that OpenCode reports into the end for the task.

        Messages that were not sent are dropped. The turn is completed only if nobody answered past
        this service; a plan waits for the approval of a person.
        """
        job = self._job
        out: list[TurnEvent | Answered] = [
            addition.progress("dropped", DROPPED) for addition in job.additions
        ]
        for event in events:
            if not isinstance(event, Finished) or event.outcome is not Outcome.COMPLETED:
                out.append(event)
            elif self._interrupts.forged:
                out.append(Finished(Outcome.FAILED, event.message_id, failure=FORGED))
            elif not job.plans:
                out.append(event)
            elif not self._reader.text.strip():
                failed = Finished(Outcome.FAILED, event.message_id, event.finish, failure=NO_PLAN)
                out.append(failed)
            else:
                # The id is the same after a crash, so that the stored row and its number are found.
                request_id = RequestId(f"plan_{job.request.user_message_id}")
                asked = Interrupted(request_id, "plan", self._session.session_id)
                out.append(await self._shared.interrupts.store_asked(job.owner, asked))
        return out

    # Decide

    async def _decide_or_wait(self) -> list[TurnEvent]:
        """Decide; if OpenCode or the database cannot be asked, the next tick tries again."""
        try:
            return await self._decide()
        except SessionNotFoundError:
            session = self._session
            await self._shared.sessions.forget(session.session_id, insist=True)
            # Before anything was prompted, the context can go on in a new session.
            if not session.named and not self._reader.state.messages.prompt_stored:
                raise SessionGoneError from None
            return self._reader.finish(None, failure=GONE)
        except (StoppedError, StoreUnavailableError):
            return []  # whoever cancels the turn has woken it
        except UpstreamError as error:
            logger.warning("could not read OpenCode's state; will retry", error=error.message)
            if (failure := self._limits.silence) is not None:
                return self._reader.finish(None, failure=failure)
            return []

    async def _decide(self) -> list[TurnEvent]:
        """Do what is due now that something was heard, or time has passed.

        The signals are looked at in this order, until one decides. The method of that one returns
        the events to write.

        ==========================================  =======================  =====================
        signal                                      method                   next
        ==========================================  =======================  =====================
        OpenCode has taken the prompt               ``Sessions.confirm``     next signal
        canceled, or refused                        ``_abort``               end
        an answer to an interrupt is due            ``attend``               next signal
        nobody answered in time, or somebody        ``_abort``               end
        answered past this service
        OpenCode does not know an open interrupt    ``_require_reconcile``   next signal
        events may be missing                       ``_reconcile``           end, wait or next
        - and OpenCode has not stored the prompt    ``_send_unsent_prompt``  prompt or end
        a further message may be sent               ``_deliver``             wait or next signal
        the latest prompt call has ended            ``_after_call``          end, prompt or wait
        no call, and the last message is complete   ``_finish_or_continue``  end or prompt
        none of these                               ``_guard``               end, abort or wait
        ==========================================  =======================  =====================
        """
        shared, reader, session = self._shared, self._reader, self._session
        if reader.state.messages.prompt_stored and session.claimed:
            owner, routing = self._job.owner, self._job.request.routing
            await shared.sessions.confirm(session, owner.principal, owner.context_id, routing)
            self._session = replace(session, claimed=False)
        # What ends the turn from outside comes first: OpenCode may never say another word.
        if self._job.canceled:
            return await self._abort(None)
        if self._job.refusal is not None:
            return await self._abort(self._job.refusal)
        match await self._interrupts.attend():
            case AfterAttend.STOP_FORGED:
                return await self._abort(FORGED)
            case AfterAttend.STOP_EXPIRED:
                return await self._abort(EXPIRED)
            case AfterAttend.RECONCILE:
                self._require_reconcile()
            case AfterAttend.GO_ON:
                pass
        if reader.state.needs_reconcile and shared.feed.up.is_set():
            events = await self._reconcile()
            if events or self._reader.finished:
                return events
        if self._job.additions:
            events = await self._deliver()
            if events:
                self.wake()
                return events
        call = self._prompts.latest
        if call is not None and call.done():
            return await self._after_call(call)
        if call is None and self._reader.state.complete:
            return await self._finish_or_continue() if self._drained() else []
        return await self._guard()

    def _require_reconcile(self) -> None:
        """Have OpenCode's stored state read again; answers from before now do not count."""
        self._limits.reconcile_required = self._limits.now()
        self._reader.state.require_reconcile()
        self.wake()

    async def _reconcile(self) -> list[TurnEvent]:
        """Compare with OpenCode's store; finish if it is done, send the prompt if it is not there.

        Only the store tells whether a prompt was sent by an earlier process, or by a call whose
        connection broke.
        """
        session, limits = self._session, self._limits
        session_id, since = session.session_id, max(limits.heard, limits.reconcile_required)
        snapshots, message_id = self._shared.snapshots, self._job.request.user_message_id
        with self._job.stop.ends_waits():
            stored = await snapshots.read(session_id, message_id, session.location, since)
        known = any(message.info.id == message_id for message in stored.messages)
        if not known and self._prompts.latest is None:
            return await self._send_unsent_prompt()
        work = self._prompts.work
        if known and work.begun is None:
            # An earlier process sent it: these are the most rights that it can have begun with.
            work.begun = self._job.request.rights
        limits.reconciled, self._children_unread = limits.now(), True
        limits.unlisted = stored.permissions is None or stored.questions is None
        self._interrupts.busy = session_id in stored.statuses
        events = self._reader.reconcile(stored)
        if session_id not in stored.statuses and self._idle_is_the_end:
            # The list may be older than the messages, from before the turn began. It is asked for
            # again: a turn that is stored now, in a session that is idle afterwards, has ended.
            try:
                with self._job.stop.ends_waits():
                    statuses = await snapshots.statuses.of(session.location, limits.now())
                if session_id not in statuses:
                    events += await self._finish_or_continue()
            except (StoppedError, ServiceError):
                # The reader counts the events as emitted and will not repeat them.
                if not events:
                    raise
                self._require_reconcile()
        return events

    async def _send_unsent_prompt(self) -> list[TurnEvent]:
        """Send the prompt that OpenCode has not stored; give up after some tries.

        On 2.x it may be in the inbox, which is not read here: the same id begins nothing twice.
        """
        if self._prompts.tries >= PROMPT_TRIES:
            return await self._abort(NOT_TAKEN)  # which empties the inbox
        self._reader = self._new_reader()  # nothing of the turn has happened in OpenCode
        # Before the prompt: after a restart the log says whether there is something to abort.
        await self._log.append([Started()])
        self._limits.ended = None
        self._prompts.send(self._job.request)
        return []

    async def _guard(self) -> list[TurnEvent]:
        """Look for signs that the turn will not end by itself, or has ended unheard."""
        limits, session, state = self._limits, self._session, self._reader.state
        if self._children_unread and self._shared.settings.turn.max_cost:
            self._children_unread, read = False, set[SessionId]()
            try:
                while unread := state.tree.children - read:  # sub-agents may have their own
                    with self._job.stop.ends_waits():
                        state.apply_children(await self._shared.snapshots.read_children(unread))
                    read |= unread
            except UpstreamError as error:
                # What is known counts meanwhile; the next reconcile tries again.
                logger.warning("cost of sub-agents not read", error=error.reason)
        failure = limits.exceeded(self._reader)
        if failure is not None:
            return await self._abort(failure)
        if limits.quiet < limits.tick:
            return []
        if not self._reader.state.needs_reconcile and limits.reconcile_due:
            self._reader.state.look_again()
            self.wake()
            return []
        if self._interrupts.waiting:
            return []
        with self._job.stop.ends_waits():
            statuses = await self._shared.snapshots.statuses.of(session.location, limits.heard)
        if session.session_id not in statuses and self._idle_is_the_end:
            return await self._finish_or_continue()
        failure = limits.silence
        return [] if failure is None else await self._abort(failure)

    # Further messages

    @property
    def _next_addition(self) -> Addition | None:
        """The further message to send next; one that is queued is not sent after a failure."""
        state = self._reader.state
        newest = state.messages.newest
        failed = state.tree.last_error is not None or (
            newest is not None and newest.error is not None
        )
        for delivery in ("interrupt", "steer") if failed else ("interrupt", "steer", "queue"):
            for addition in self._job.additions:
                if addition.delivery == delivery:
                    return addition
        return None

    async def _deliver(self) -> list[TurnEvent]:
        """Send messages that do not wait for the end of the turn, one after the other."""
        job, state, out = self._job, self._reader.state, list[TurnEvent]()
        for addition in list(job.additions):
            if addition.prompt_id in state.messages.user_messages:
                job.additions.remove(addition)
                progress = addition.progress("delivered")
                if job.emitted.is_news(progress):
                    out.append(progress)
        ready = state.messages.prompt_stored and not state.needs_reconcile
        addition = self._next_addition
        if addition is None or addition.sent or not addition.stored or not ready:
            return out
        if addition.tries == PROMPT_TRIES:
            out.append(self._withdraw(addition, NOT_TAKEN.message))
        elif addition.delivery == "steer":
            self._prompt_with(addition)
        elif addition.delivery == "interrupt" and not addition.cleared:
            # The sender of such a message refuses everything that waits for a person.
            self._interrupts.refuse_all(job.owner.principal)
            addition.cleared = await self._stopped_in_time()
            self._require_reconcile()  # how far the text had come
        return out

    def _prompt_with(self, addition: Addition) -> None:
        addition.sent = True
        addition.tries += 1
        self._reader.state.expect(addition.prompt_id)
        self._limits.ended = None
        addition.call = self._prompts.send(addition.added.request)

    def _withdraw(self, addition: Addition, reason: str) -> Progressed:
        """Give up a message that OpenCode would not take."""
        self._job.additions.remove(addition)
        sent = self._reader.state.messages.sent
        sent[:] = [prompt for prompt in sent if prompt != addition.prompt_id]
        self.wake()
        return addition.progress("refused", reason)

    # Finish

    def _drained(self) -> bool:
        """Whether the events have caught up with the end of the turn, or are too late.

        OpenCode answers the prompt call before it has sent the last events.
        """
        limits, state = self._limits, self._reader.state
        if state.complete and state.messages.diff_known:
            return True
        if limits.ended is None:
            limits.ended = limits.now()
            loop = asyncio.get_running_loop()
            self._drain_timer = loop.call_later(DRAIN_SECONDS, self.wake)
        return limits.now() - limits.ended >= DRAIN_SECONDS

    @property
    def _idle_is_the_end(self) -> bool:
        """Whether a session that OpenCode does not list as busy is done with the turn.

        An OpenCode without CPU time stores and announces a message seconds before it lists the
        session, so a second sign is needed: the answer to the prompt call, the last message, or,
        if neither can come any more, that OpenCode has had the time to begin.
        """
        limits, state, messages = self._limits, self._reader.state, self._reader.state.messages
        if self._prompts.running:
            return state.complete
        if (messages.assistant and not messages.unanswered) or state.tree.last_error is not None:
            return True
        return limits.now() - max(limits.heard, limits.reconcile_required) > UNBEGUN_SECONDS

    async def _after_call(self, call: PromptCall) -> list[TurnEvent]:
        """Finish after the latest prompt call has ended, or find out what its error means."""
        error = call.exception()
        addition = next((one for one in self._job.additions if one.call is call), None)
        if isinstance(error, UpstreamUnansweredError):
            # Stopped before the answer began. An event may still tell that the prompt was taken.
            if self._reader.state.tree.last_error is None and not self._drained():
                return []
            if addition is None and self._reader.state.messages.prompt_stored:
                return await self._finish_or_continue()
        if error is None:
            return await self._finish_or_continue() if self._drained() else []
        if isinstance(error, UpstreamUnreachableError):
            # The connection broke; the turn may well be running. OpenCode's messages will tell.
            logger.warning("prompt call broke off", error=error.message)
            self._prompts.latest = None
            if addition is not None:
                addition.sent = False
            self._require_reconcile()
            return []
        if isinstance(error, SessionNotFoundError) or not isinstance(error, ServiceError):
            raise error
        if addition is not None:
            self._prompts.drop(call)
            return [self._withdraw(addition, error.message)]
        # OpenCode would not begin; it may give the reason in an event only.
        if self._reader.state.tree.last_error is None and not self._drained():
            return []
        if self._session.claimed:
            await self._shared.sessions.release(self._job.owner.principal, self._session.session_id)
        failure: Failure | None = None
        if self._reader.state.tree.last_error is None:
            text = error.message
            refused = isinstance(error, UpstreamError)
            if refused and not isinstance(error, UpstreamPayloadError):
                # Errors of our own name the remedy themselves.
                text += "; check the model, the agent and the files of the message"
            failure = Failure(FailureType.UPSTREAM_BAD_REQUEST, text)
        with self._job.stop.ends_waits():
            stored = await self._read_end()
        return self._reader.finish(stored, failure=failure)

    async def _finish_or_continue(self) -> list[TurnEvent]:
        """Finish the turn, or continue with the next message if there is one."""
        stored: Snapshot | None = None
        while (addition := self._next_addition) is None:
            if stored is not None:  # and no message came while it was read
                return self._reader.finish(stored)
            with self._job.stop.ends_waits():
                stored = await self._read_end()
            if stored.leaves_work and not await self._work_is_lost():
                return []
        if self._reader.state.needs_reconcile or not addition.stored:
            pass  # both end with a wake
        elif addition.sent:
            self._require_reconcile()  # OpenCode was not heard to have it
        else:
            self._prompt_with(addition)
        return []

    async def _work_is_lost(self) -> bool:
        """Whether OpenCode does not run the work that the turn has left in the background.

        The end of such work is reported to the model a moment later; until then the turn continues.
        """
        limits, session = self._limits, self._session
        with self._job.stop.ends_waits():
            statuses = await self._shared.snapshots.statuses.of(session.location, limits.now())
        if session.session_id in statuses:
            # It was not the end after all; an event will tell that, or the next look.
            limits.idle_since = None
            self._prompts.latest, self._reader.state.tree.idle = None, False
            return False
        if limits.idle_since is None or limits.idle_since < limits.heard:
            limits.idle_since = limits.now()
            loop = asyncio.get_running_loop()
            self._report_timer = loop.call_later(REPORT_SECONDS, self.wake)
        return limits.now() - limits.idle_since >= REPORT_SECONDS

    async def _read_end(self) -> Snapshot:
        """Return the stored state at the end of the turn; the prompt's answer may be enough."""
        message, state = self._prompts.last_message, self._reader.state
        if message is not None and state.ends_with(message):
            return Snapshot(messages=[message])
        return await self._shared.snapshots.read_end(
            self._session.session_id, state.messages.sent, state.tree.children
        )

    # Abort

    async def _abort(self, failure: Failure | None) -> list[TurnEvent]:
        """Stop the session and its sub-agents, make sure of it, and finish the turn."""
        seconds = self._shared.settings.interrupts.cancel_abort_timeout_seconds
        confirmed = await self._stopped_in_time()
        stored: Snapshot | None = None
        with suppress(TimeoutError, UpstreamError):
            async with asyncio.timeout(seconds):
                stored = _heard_of(await self._read_end(), self._reader.state.messages)
        events = self._reader.finish(stored, aborted=failure is None, failure=failure)
        return events if confirmed and stored is not None else _noted(events, UNCONFIRMED)

    async def _stopped_in_time(self) -> bool:
        """Stop the session and its sub-agents; return whether OpenCode confirmed it in time.

        It is aborted until it is idle: OpenCode loses an abort that comes before the turn begins.
        """
        opencode, session, call = self._shared.opencode, self._session, self._prompts.latest
        sessions = {session.session_id, *self._reader.state.tree.children}
        seconds = self._shared.settings.interrupts.cancel_abort_timeout_seconds
        try:
            async with asyncio.timeout(seconds):
                await opencode.abort_session(session.session_id)
                await self._interrupts.reject_leftovers(sessions)
                while True:
                    busy = sessions & set(await opencode.session_status(at=session.location))
                    if call is not None and not call.done():
                        # It may be about to begin: the answer to the prompt says that it will not.
                        await asyncio.wait([call], timeout=AGAIN_SECONDS)
                        busy |= {session.session_id} if self._prompts.running else set()
                    elif busy:
                        await asyncio.sleep(AGAIN_SECONDS)
                    if not busy:
                        return True
                    for session_id in busy:
                        try:
                            await opencode.abort_session(session_id)
                        except SessionNotFoundError:
                            if session_id == session.session_id:
                                raise
                            # A sub-agent's may be deleted by now; the turn's own is still there.
        except (TimeoutError, UpstreamError) as error:
            logger.warning("abort not confirmed", error=type(error).__name__)
            return False


def _heard_of(stored: Snapshot, heard: TurnMessages) -> Snapshot:
    """Leave out what comes after a prompt that OpenCode added by itself while it was stopped.

    The end of work in the background wakes the model, which may be fast.
    """
    for index, message in enumerate(stored.messages):
        added = any(isinstance(part, TextPart) and part.synthetic for part in message.parts)
        if added and message.info.id not in heard.user_messages and message.info.role == "user":
            return replace(stored, messages=stored.messages[:index])
    return stored


def _noted(events: list[TurnEvent], note: Failure) -> list[TurnEvent]:
    """Add a note to the end of a turn, unless the end names a failure already."""
    return [
        replace(event, failure=note) if isinstance(event, Finished) and not event.failure else event
        for event in events
    ]


async def _by_schema(events: list[TurnEvent], schema: JsonObject) -> list[TurnEvent]:
    """Add the answer of a turn as data if it fits the schema, else fail the turn.

    OpenCode (1.18) does not compare the model's answer with the schema. The model gives the answer
    with a tool of OpenCode's own, which is not shown.
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


@dataclass(eq=False, slots=True)
class PromptCalls:
    """The prompts of a turn, and the calls to OpenCode that are under way with them.

    OpenCode answers a prompt call when it has no more to do, with its last message; or at once,
    with an error, if it does not take the prompt.
    """

    job: Job
    session: TurnSession
    work: Work
    """The turn, as work in a session that has to keep to rights."""
    report: Callable[[Progressed], None]
    """Says that a prompt has to wait."""
    wake: Callable[[], None]
    """Called when a call has ended."""
    latest: PromptCall | None = None
    """The call with the latest prompt; None as well if its connection broke."""
    tries: int = 0
    """How often the first prompt of the turn was sent."""
    calls: list[PromptCall] = field(default_factory=list[PromptCall])

    @property
    def running(self) -> bool:
        """Whether OpenCode has still to answer the latest call."""
        return self.latest is not None and not self.latest.done()

    @property
    def last_message(self) -> MessageWithParts | None:
        """The message with which OpenCode answered the latest call, if it did."""
        call = self.latest
        if call is None or not call.done() or call.cancelled() or call.exception() is not None:
            return None
        return call.result()

    def send(self, request: TurnRequest) -> PromptCall:
        """Send a prompt; return the call."""

        def ended(call: PromptCall) -> None:
            if not call.cancelled():
                call.exception()  # asyncio complains of exceptions that nobody has looked at
            self.wake()

        self.tries += request is self.job.request
        call = self.latest = asyncio.create_task(self._call(request))
        call.add_done_callback(ended)
        self.calls.append(call)
        return call

    def drop(self, call: PromptCall) -> None:
        """Forget a call whose prompt OpenCode did not take; the call before it is the latest."""
        self.calls.remove(call)
        self.latest = self.calls[-1] if self.calls else None

    def close(self) -> None:
        for call in self.calls:
            call.cancel()
        self.job.shared.sessions.rights.end(self.work)

    async def _call(self, request: TurnRequest) -> MessageWithParts:
        """Prompt the session, unless the turn is canceled first."""
        job, session, opencode = self.job, self.session, self.job.shared.opencode
        settings, routing = job.shared.settings.opencode, request.routing
        agent, schema, command = job.agent, None, routing.command
        if not job.plans:  # the schema is for the turn that carries the plan out
            agent = routing.agent or agent
            schema = routing.output_schema or job.request.routing.output_schema
        if command is not None:
            # An agent that the command itself names has precedence.
            sources = await opencode.command_sources(at=session.location)
            agent = next((one.agent for one in sources if one.name == command), None) or agent
        agent, tools = await self._restrict(agent, widens=command is None)
        model = await job.shared.model(session, routing.model)
        if job.canceled:  # while the model was looked up: OpenCode need not hear of it
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
            return await opencode.run_command(session.session_id, called, at=session.location)
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
        answer = opencode.prompt(session.session_id, prompt, at=session.location)
        del prompt, parts  # large files need not be kept until the turn has ended
        return await answer

    async def _restrict(
        self, agent: str | None, *, widens: bool
    ) -> tuple[str | None, dict[str, bool] | None]:
        """Have the session keep to the rights of the turn; return agent and tools for the prompt.

        Wait for work with wider rights to end: the prompt would join it.
        """
        rights, at, reported = self.job.shared.sessions.rights, self.session.location, False
        while not self.job.canceled:
            try:
                restricted = await rights.restrict(self.work, agent, at, widens=widens)
                if reported:
                    self.report(Progressed("queue", "over", title="That work is over"))
                return restricted
            except WiderWorkError as wider:
                if not reported:
                    self.report(Progressed("queue", "waiting", title=str(wider)))
                reported = True
                if wider.work:
                    await wait(wider.work.done, AWAY_SECONDS)
                else:
                    await asyncio.sleep(AWAY_SECONDS)
        raise asyncio.CancelledError


class TurnLimits:
    """The times of one turn, on the clock of the event loop, and what follows from them."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings.turn
        self._longest = settings.opencode.timeout_stream
        self.tick = min(TICK_SECONDS, settings.turn.silence_seconds, self._longest or TICK_SECONDS)
        """Seconds without an event after which the turn is looked at."""
        self.now = asyncio.get_running_loop().time
        self._began = self.heard = self.now()
        """When the turn last gave a sign of life."""
        self.reconcile_required = self._began
        """When a report of OpenCode turned out to be wrong or stale. Snapshots requested before
        this moment do not count."""
        self.reconciled = self._began
        """When the turn was last reconciled with OpenCode's store."""
        self.ended: float | None = None
        """When the end of the turn was first known."""
        self.idle_since: float | None = None
        """When the session was first seen idle, although it has left work in the background."""
        self.unlisted = False
        """OpenCode could not list its pending requests, so that one may have been missed."""
        self._retry: StatusRetry | None = None
        """The last retry that was judged near enough to wait for."""

    # When to look again

    @property
    def quiet(self) -> float:
        """Seconds since the last sign of life."""
        return self.now() - self.heard

    @property
    def pause(self) -> float:
        """Seconds until the next look at the turn.

        The longer it has been quiet, the less a moment matters: a thousand turns that wait for
        their models should cost next to nothing.
        """
        return max(self.tick, min(self.quiet, LONGEST_TICK_SECONDS))

    @property
    def reconcile_due(self) -> bool:
        """Whether to reconcile: events get lost without a gap as well.

        That is after 5 s, 20 s, 80 s, since each reads the messages of the session.
        """
        return self.now() - self.reconciled >= (self.tick if self.unlisted else self.quiet * 3 / 4)

    # When it is given up

    @property
    def silence(self) -> Failure | None:
        """Why to give the turn up, when OpenCode has been silent for too long."""
        seconds = self._settings.silence_seconds
        if self.quiet <= seconds:
            return None
        return Failure(FailureType.UPSTREAM_TIMEOUT, SILENT.format(seconds))

    def exceeded(self, reader: TurnReader) -> Failure | None:
        """Return why to give up a turn that does not end by itself."""
        steps = len(reader.state.messages.assistant)
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
        if self._longest and self.now() - self._began > self._longest:
            return Failure(FailureType.UPSTREAM_TIMEOUT, LONG.format(self._longest))
        return None
