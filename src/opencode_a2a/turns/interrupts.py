"""Interrupts: permissions and questions that stop a turn until somebody answers.

``WorkInterrupts`` holds the interrupts of one turn, or of one errand (see ``errands``), from the
request to its end. It calls ``SharedInterrupts``, which all turns and errands share: the interrupts
that are open now, the table, and the way to OpenCode. ``tasks`` and ``extensions`` bring the answer
of a person to the ``WorkInterrupts`` that asked. ``turns.interrupt_state`` says what an
``Interrupt`` is, and which stages it goes through.

An open request is recorded in several objects. After a crash, each is filled from the log of the
task or from the row:

==========================  ============================  =====================  ===============
object                      added by                      removed by             after a crash
==========================  ============================  =====================  ===============
the row in the table        ``store_asked``               ``store_settled``      is kept
``Status.pending``          an entry of the log           an entry of the log    by the log
``Emitted.open``            ``TurnReader._emit``          ``TurnReader._emit``   by the log [1]_
``AskedRequests.pending``   an event or a snapshot        an event, a snapshot   ``Emitted.open``
``WorkInterrupts.open``     ``ask_and_settle``            ``ask_and_settle``     by the row
``SharedInterrupts.open``   together with the one above   with the one above     by the row
==========================  ============================  =====================  ===============

.. [1] Requests that a rule or a grant answers are not in the log: they are added by the row.

The row is written first and the log last, when a request is asked and when it is settled. What a
crash kept from the log is written to it after the restart (``unlogged``).
"""

import asyncio
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum, auto
from functools import partial

import structlog

from opencode_a2a.bounds import Stop, StoppedError, wait
from opencode_a2a.clock import now_ms
from opencode_a2a.errors import (
    InterruptChangedError,
    InterruptNotFoundError,
    ServiceError,
    SessionNotFoundError,
    StoreUnavailableError,
    UpstreamAwayError,
    UpstreamError,
    UpstreamNotFoundError,
    UpstreamPayloadError,
    UpstreamTimeoutError,
    UpstreamUnreachableError,
)
from opencode_a2a.events import Finished, Interrupted, Resumed, ToolChanged, TurnEvent
from opencode_a2a.ids import Owner, Principal, RequestId, SessionId
from opencode_a2a.messages import Answered, Message
from opencode_a2a.opencode.driver import Location
from opencode_a2a.opencode.translate import interrupted
from opencode_a2a.store.database import Write
from opencode_a2a.telemetry import AUDIT
from opencode_a2a.turns import files, snapshot
from opencode_a2a.turns.answers import (
    Answer,
    PermissionReply,
    QuestionRejection,
    QuestionReply,
    check_allowed,
)
from opencode_a2a.turns.interrupt_state import (
    CLOCK,
    Interrupt,
    Settlement,
    Stage,
    StoredInterrupt,
    judge_end,
    told_by,
)
from opencode_a2a.turns.policy import RULE, answered_unasked, expiry, known_answer
from opencode_a2a.turns.shared_interrupts import SharedInterrupts

logger = structlog.get_logger(__name__)

LINKS_SECONDS = 1.0
"""How long a request, or an answer, waits to learn where the files are: a file system may hang."""
CONFIRM_SECONDS = 10.0
"""Seconds in which OpenCode has to take an answer of a person, and again to confirm it."""
LOST_SECONDS = 1.5
"""Seconds after which the event that confirms an answer counts as lost: OpenCode (1.18) says that a
connection to its events is open a moment before it is."""
CONNECT_SECONDS = 10.0
"""Seconds that an answer waits for its turn to be connected after a restart of the service."""
HANGS_MESSAGE = (
    "OpenCode does not respond. The answer is stored, and OpenCode is given it when it responds"
)
STOPPED_MESSAGE = "The turn stopped before OpenCode confirmed the answer; try again"


class AfterAttend(Enum):
    """What the work that asks has to do next."""

    GO_ON = auto()
    RECONCILE = auto()
    """Read OpenCode's state: it may not know an interrupt that is open here, or it has not
    confirmed an answer."""
    STOP_EXPIRED = auto()
    """Stop OpenCode: nobody answered in time."""
    STOP_FORGED = auto()
    """Stop OpenCode: an interrupt was answered past this service, where that is not allowed."""


def _wake_nobody() -> None:
    """Stand in for the wake-up of work that has ended."""


@dataclass(eq=False, slots=True)
class WorkInterrupts:
    """The interrupts of one turn, or of one errand.

    The turn passes all events of the session through ``ask_and_settle``, says with ``note_logged``
    that they are in the log, and calls ``attend`` whenever it is woken. If it stops OpenCode, it
    says so with ``refuse_all``, ``go_on`` and ``reject_leftovers``. One that an earlier process
    began starts with ``restore``; ``close`` ends it. Other tasks of asyncio call ``answer`` and
    ``repeat`` for a person.
    """

    shared: SharedInterrupts
    owner: Owner
    wake: Callable[[], None]
    """Has the work call ``attend``."""
    location: Location = field(default_factory=Location)
    """Where the session runs."""
    stop: Stop = field(default_factory=Stop)
    """Ends the waits for OpenCode when the turn is canceled."""
    connected: asyncio.Event = field(default_factory=asyncio.Event)
    """Set once answers can be given: at once for new work, and for a turn that an earlier process
    began when it follows its session. The end sets it too."""
    busy: bool = False
    """Whether OpenCode was working when its state was last read, by the turn or errand."""
    forged: bool = False
    """Whether an interrupt was answered past this service, where that is not allowed."""
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when the turn begins or ceases to wait for a person, and replaced by a new event."""
    open: dict[RequestId, Interrupt] = field(default_factory=dict[RequestId, Interrupt])
    """Interrupts that are not settled, whether a person is asked or not."""
    _settled: list[Interrupt] = field(default_factory=list[Interrupt])
    """Interrupts that are settled, but not yet in the log."""
    _shown: list[Interrupt] = field(default_factory=list[Interrupt])
    """Interrupts that have changed and are about to be in the log as they are now."""
    _refusing: Answer | None = None
    """The refusal by the person who has the turn stopped; it is also for requests that are heard of
    only afterwards."""
    _needs_reconcile: bool = False
    """Whether OpenCode may not have an interrupt any more that is open here."""
    _closed: bool = False

    @property
    def waiting(self) -> bool:
        """Whether the turn is waiting for a person."""
        return any(interrupt.waits for interrupt in self.open.values())

    def restore(self, stored: Sequence[StoredInterrupt], asked: Container[RequestId]) -> None:
        """Take over the interrupts of an earlier process, with the rest of their time.

        ``asked`` are those that a person was asked; others are taken over only if a rule or a grant
        has answered them. Nobody knows whether OpenCode got the answers that are stored. They are
        given once more: OpenCode refuses an answer to a request that is not pending.
        """
        for one in stored:
            request_id, for_person = one.asked.request_id, one.asked.request_id in asked
            # Without an answer it is judged anew if OpenCode still asks.
            over = not for_person and (one.resumed is not None or one.answer is None)
            if over or request_id in self.open:
                continue
            stage = Stage.WAITING if one.answer is None else Stage.RETRY
            interrupt = Interrupt(one.asked, self, stage, for_person=for_person, given=one.answer)
            self.open[request_id] = self.shared.open[request_id] = interrupt
            self._arm(interrupt)
        for one in stored:
            if one.answer is not None and one.settled_at is not None:
                self._note_implied(one.asked, one.answer, one.settled_at)

    def close(self) -> None:
        """Stop; interrupts that are open stay open in OpenCode, and for the next process."""
        self._closed = True
        for request_id, interrupt in self.open.items():
            self.shared.open.pop(request_id, None)
            if interrupt.timer is not None:
                interrupt.timer.cancel()
        # Nothing will confirm the answers that callers of ``answer`` wait for.
        self.connected.set()
        for interrupt in (*self._settled, *self.open.values()):
            interrupt.logged.set()
            interrupt.shown.set()
        self.changed.set()
        # What refers to each other in a circle stays until the garbage collector finds it.
        self.wake = _wake_nobody

    # Asked

    async def ask_and_settle(self, events: list[TurnEvent]) -> list[TurnEvent | Answered]:
        """Store new interrupts, settle those that have ended, and store grants.

        Return the events for the log: interrupts with number and deadline, ends with who answered.
        """
        if not any(isinstance(event, Interrupted | Resumed) for event in events):
            return [*events]
        out: list[TurnEvent | Answered] = []
        ending = any(isinstance(event, Finished) for event in events)
        changed = [event for event in events if isinstance(event, ToolChanged)]
        ran = {call.call_id for call in changed if call.status == "completed"}
        for event in events:
            match event:
                case Interrupted():
                    interrupt = self.open.get(event.request_id)
                    if interrupt is not None and interrupt.changed is event:
                        interrupt.asked, interrupt.changed = event, None
                        self._shown.append(interrupt)
                        out.append(event)
                    elif event.request_id not in self.shared.open:  # else it is asked already
                        out.append(await self._ask(event))
                case Resumed():
                    interrupt = self.open.pop(event.request_id, None)
                    if interrupt is not None:  # else other work asked
                        asked = interrupt.asked
                        settled = judge_end(
                            interrupt,
                            event,
                            ran=asked.call_id in ran,
                            ending=ending,
                            busy=self.busy,
                        )
                        out += await self._close_interrupt(interrupt, settled)
                case _:
                    out.append(event)
        self.changed.set()
        self.changed = asyncio.Event()
        return out

    async def _ask(self, asked: Interrupted) -> TurnEvent:
        """Ask a person, unless the answer is known; return the event for the log."""
        # A grant is for one directory, so that it has to be known.
        asked = replace(asked, directory=asked.directory or self.location.directory)
        interrupt = Interrupt(asked, self, implied=self._refusing)
        # Before anything is awaited: an errand in the same session must not ask it as well.
        self.open[asked.request_id] = self.shared.open[asked.request_id] = interrupt
        if asked.call_id is not None and asked.tool_input is None:
            try:
                with self.stop.ends_waits():
                    called = await snapshot.tool_call(self.shared.opencode, asked)
                if called is not None:
                    asked = replace(asked, tool=called.tool, tool_input=called.state.input)
            except (UpstreamError, SessionNotFoundError) as error:  # a sub-agent's may be deleted
                logger.warning("input of a tool call not known", error=error.message)
            except StoppedError:
                pass  # the turn is aborted next
        asked = await self._looked_up(replace(asked, changes=files.changes(asked)))
        known = await known_answer(self.shared.settings, self.shared.grants, self.owner, asked)
        asked = await self.shared.store_asked(self.owner, asked, known)
        interrupt.asked, interrupt.for_person = asked, known is None
        if known is None:
            interrupt.stage = Stage.WAITING
            self._arm(interrupt)
            return asked
        self._make_due(interrupt, known)
        return answered_unasked(asked, known)

    async def _looked_up(self, asked: Interrupted) -> Interrupted:
        """Return a request with what the file system tells about its files now."""
        if not files.are_named(asked):
            return asked
        try:
            async with asyncio.timeout(LINKS_SECONDS):
                asked = await self.shared.look_ups.run(partial(files.looked_up, asked))
        except TimeoutError:
            asked = replace(asked, links_unknown=True)
        if asked.links_unknown:
            logger.warning("symbolic links not followed", directory=asked.directory)
        return asked

    def _arm(self, interrupt: Interrupt) -> None:
        """Wake the turn at the deadline of an interrupt, to give the default answer."""
        left = ((interrupt.asked.expires_at or 0) - now_ms()) / 1000
        if not self.owner.rights.waits:
            left = 0.0
        interrupt.timer = asyncio.get_running_loop().call_later(max(0.0, left), self.wake)

    def _make_due(self, interrupt: Interrupt, answer: Answer) -> None:
        """Have the turn give an answer that is stored."""
        interrupt.stage, interrupt.due = Stage.DUE, answer
        self.wake()

    # Answered

    async def attend(self) -> AfterAttend:
        """Give OpenCode the answers that are due; return what the work has to do next."""
        if self.forged:
            return AfterAttend.STOP_FORGED
        for interrupt in [*self.open.values()]:
            answer = self._answer_due(interrupt)
            if interrupt.stage is Stage.EXPIRED:
                return AfterAttend.STOP_EXPIRED
            if answer is None:
                continue
            expires = interrupt.stage is Stage.WAITING
            try:
                if expires:
                    await self._store([interrupt], answer, insist=True)
                with self.stop.ends_waits():
                    await self._give(interrupt, answer, Stage.WAITING if expires else Stage.RETRY)
            except UpstreamNotFoundError:
                pass  # OpenCode's state, which is read next, says why
            except UpstreamError as error:
                request_id = interrupt.asked.request_id
                logger.warning("interrupt not answered", request_id=request_id, error=error.message)
                if _refused(error):
                    await self._replace_refused(interrupt, answer)
        if self._needs_reconcile:
            self._needs_reconcile = False
            return AfterAttend.RECONCILE
        return AfterAttend.GO_ON

    def _answer_due(self, interrupt: Interrupt) -> Answer | None:
        """Return the answer that OpenCode is to be given now, if any.

        At the deadline, a person's answer that could not be delivered goes before the default. If
        that is to end the turn, the interrupt is EXPIRED.
        """
        match interrupt.stage:
            case Stage.DUE:
                return interrupt.due
            case Stage.RETRY:
                return interrupt.given
            case Stage.WAITING if interrupt.late:
                if interrupt.given is not None:
                    return interrupt.given
                reply = expiry(self.shared.settings, interrupt.asked)
                if reply is not None:
                    return Answer(reply, CLOCK)
                interrupt.stage = Stage.EXPIRED
            case _:
                pass
        return None

    async def _replace_refused(self, interrupt: Interrupt, answer: Answer) -> None:
        """Find another way on after an answer with which OpenCode finds fault.

        A person's leaves room for another, or at the deadline for the default answer. A question of
        OpenCode 2 may take no text, but a number or a choice: what says that nobody is there gives
        way to a dismissal, and if that does not do either, the turn ends.
        """
        if answer.by in (CLOCK, RULE):
            if isinstance(answer.reply, QuestionReply):
                dismissal = Answer(QuestionRejection(), answer.by)
                interrupt.given = None
                await self._store([interrupt], dismissal, insist=True)
                self._make_due(interrupt, dismissal)
            elif answer.resolution == "rejected":
                interrupt.stage = Stage.EXPIRED
                self.wake()
        elif interrupt.waits:
            interrupt.stage = Stage.WAITING
            if interrupt.late:
                interrupt.given = None
                self.wake()

    async def answer(
        self, request_ids: Sequence[str], answer: Answer, in_same_commit: Write | None = None
    ) -> None:
        """Answer for a person; return once OpenCode has confirmed the answer to each request.

        ``in_same_commit`` runs in the transaction that stores the answer, before OpenCode gets it.
        """
        await self._wait_connected()  # then the answers that an earlier process stored are known
        repeated = 0
        for request_id in request_ids:
            interrupt = self.open.get(RequestId(request_id))
            if interrupt is not None and interrupt.given is not None and interrupt.sends(answer):
                await self._wait_confirmed(interrupt, interrupt.given)
                repeated += 1
        if repeated == len(request_ids) and in_same_commit is None:
            return  # the answer that was being sent counts
        found = self._accepting(request_ids, answer)
        if answer.resolution in ("once", "always"):
            await self._check_as_shown(found)
            found = self._accepting(request_ids, answer)  # somebody may have answered meanwhile
        before = {interrupt: interrupt.stage for interrupt in found}
        await self._store(found, answer, in_same_commit)
        failed: dict[Interrupt, ServiceError] = {}
        for interrupt in found:
            interrupt.joint = answer  # "always" to one may settle the next before that is given it
        try:
            for place, interrupt in enumerate(found):
                try:
                    await self._give_and_confirm(interrupt, answer, before[interrupt])
                except UpstreamTimeoutError as error:
                    failed |= dict.fromkeys(found[place:], error)
                    break
                except ServiceError as error:
                    failed[interrupt] = error
        finally:
            for interrupt in found:
                if interrupt.stage is Stage.ANSWERED:  # the turn gives it, since it is stored
                    interrupt.stage, interrupt.given = Stage.RETRY, answer
            self.wake()  # also because the deadline may have passed meanwhile
        if failed:
            raise _outcome(found, failed)

    def _accepting(self, request_ids: Sequence[str], answer: Answer) -> list[Interrupt]:
        """Return interrupts by their ids; raise an error if one cannot be answered so."""
        found: list[Interrupt] = []
        for request_id in request_ids:
            interrupt = self.open.get(RequestId(request_id))
            if interrupt is None or not interrupt.accepts(answer):
                raise InterruptNotFoundError(request_id=request_id[:128])
            allow_always = self.shared.allows_always
            check_allowed(self.owner, interrupt.asked, answer, allow_always=allow_always)
            found.append(interrupt)
        return found

    async def _check_as_shown(self, found: Sequence[Interrupt]) -> None:
        """Refuse to allow what is not what the person was shown, and have that shown anew.

        Another call of the agent may put a link in the place of a file while a request waits.
        """
        # With one that OpenCode may have been given the answer to, it may be OpenCode's own change.
        shown = {one: one.asked for one in found if one.stage is Stage.WAITING}
        now = await asyncio.gather(*map(self._looked_up, shown.values()))
        changed = {one: asked for one, asked in zip(shown, now, strict=True) if asked != shown[one]}
        if not changed:
            return
        await self.shared.store_changed([*changed.values()])
        for interrupt, asked in changed.items():
            interrupt.changed = asked
            interrupt.shown.clear()
        self.wake()
        await asyncio.gather(*(wait(one.shown, CONFIRM_SECONDS) for one in changed))
        said = (
            f"{f'{one.name}: ' if len(found) > 1 else ''}"
            + ", ".join(files.differences(shown[one], asked))
            for one, asked in changed.items()
        )
        raise InterruptChangedError(
            f"The request has changed since it was shown: {'; '.join(said)}. Look at it again, and "
            "repeat the answer if it still holds.",
            request_id=next(iter(changed)).asked.request_id,
        )

    def asked_anew(self) -> list[Interrupted]:
        """Return, for ``ask_and_settle``, the requests that have changed since they were shown."""
        return [one.changed for one in self.open.values() if one.changed is not None]

    async def repeat(self, message: Message) -> None:
        """Make sure that OpenCode gets the answer in a message that was accepted before."""
        await self._wait_connected()
        # Those that are settled but not in the log yet are no longer open; wait for these too.
        for interrupt in (*self._settled, *self.open.values()):
            settled = interrupt.stage is Stage.SETTLED
            answer = interrupt.counted if settled else interrupt.given
            if answer is None or answer.message != message:
                continue
            if interrupt.stage in (Stage.WAITING, Stage.RETRY):
                try:
                    await self._give_and_confirm(interrupt, answer, interrupt.stage)
                finally:
                    self.wake()
            else:
                await self._wait_confirmed(interrupt, answer)

    async def _wait_connected(self) -> None:
        """Wait until answers can be given, which takes a moment after a restart of the service."""
        if not await wait(self.connected, CONNECT_SECONDS):
            raise UpstreamUnreachableError("The turn is not connected to OpenCode yet; try again")
        if self._closed and self.open:
            raise UpstreamUnreachableError(STOPPED_MESSAGE)

    async def _store(
        self,
        interrupts: Sequence[Interrupt],
        answer: Answer,
        in_same_commit: Write | None = None,
        *,
        insist: bool = False,
    ) -> None:
        """Store an answer to interrupts, which nobody else can answer from here on.

        ``insist`` waits for a database that is unreachable.
        """
        before = {interrupt: interrupt.stage for interrupt in interrupts}
        for interrupt in interrupts:
            interrupt.stage = Stage.ANSWERED
        requests = [interrupt.asked.request_id for interrupt in interrupts]
        try:
            await self.shared.store_answer(requests, answer, in_same_commit, insist=insist)
        except BaseException:
            for interrupt in interrupts:
                if interrupt.stage is Stage.ANSWERED:  # else an event has settled it meanwhile
                    interrupt.stage = before[interrupt]
            raise

    async def _give(self, interrupt: Interrupt, answer: Answer, undelivered: Stage) -> None:
        """Give OpenCode an answer that is stored, for ``attend``, ``answer`` or ``repeat``.

        Nothing else moves an interrupt into the stage SENDING, or out of it but by settling it.
        ``undelivered`` is its stage if OpenCode cannot be reached, or refuses the answer.
        """
        asked, earlier, interrupt.given = interrupt.asked, interrupt.given, answer
        settled_with_another = interrupt.implied is answer
        self._note_implied(asked, answer)
        # If its caller is canceled, the turn gives the answer.
        interrupt.stage, after = Stage.SENDING, Stage.RETRY
        try:
            await self.shared.reply(asked, answer.reply, self._at(asked))
            after = Stage.GIVEN
        except UpstreamNotFoundError:
            # It is not pending: OpenCode took an earlier try, or an answer from elsewhere.
            after, interrupt.given = Stage.GIVEN, earlier
            # An "always" that OpenCode was not given implies nothing.
            if answer.resolution == "always" and earlier is None and not settled_with_another:
                for other in self.open.values():
                    if other.implied is answer:
                        other.implied = None
            self._require_reconcile()
            raise
        except ServiceError as error:
            after = Stage.RETRY if _response_lost(error) else undelivered
            raise
        finally:
            if interrupt.stage is Stage.SENDING:  # else an event has settled it meanwhile
                interrupt.stage = after
        asyncio.get_running_loop().call_later(LOST_SECONDS, self._reconcile_unconfirmed, interrupt)

    async def _give_and_confirm(
        self, interrupt: Interrupt, answer: Answer, undelivered: Stage
    ) -> None:
        """Give OpenCode an answer, and wait until OpenCode confirms that it counts."""
        try:
            if interrupt.stage is not Stage.SETTLED:  # else it was settled together with another
                async with asyncio.timeout(CONFIRM_SECONDS):
                    await self._give(interrupt, answer, undelivered)
        except (TimeoutError, UpstreamTimeoutError):
            if interrupt.stage is not Stage.SETTLED:
                # OpenCode may act on it when it goes on. The turn gives it once more.
                raise UpstreamTimeoutError(HANGS_MESSAGE) from None
        except UpstreamNotFoundError:
            if answer not in (interrupt.counted, interrupt.given, interrupt.implied):
                raise InterruptNotFoundError(request_id=interrupt.asked.request_id) from None
        await self._wait_confirmed(interrupt, answer)

    def _reconcile_unconfirmed(self, interrupt: Interrupt) -> None:
        if interrupt.stage is Stage.GIVEN and not self._closed:
            self._require_reconcile()

    def _require_reconcile(self) -> None:
        """Have OpenCode's stored state say what became of a request."""
        self._needs_reconcile = True
        self.wake()

    async def _wait_confirmed(self, interrupt: Interrupt, answer: Answer) -> None:
        """Wait until an interrupt is settled; raise an error if not by this answer."""
        if not await wait(interrupt.logged, CONFIRM_SECONDS):
            if interrupt.stage is Stage.SETTLED:
                # OpenCode has confirmed it, but the database is away.
                raise StoreUnavailableError(operation="persisting")
            if interrupt.stage is Stage.GIVEN:
                # OpenCode may have acted on it, so that no other may follow. But if it did not know
                # the request, it has taken neither this answer nor one before.
                interrupt.stage = Stage.WAITING if interrupt.given is None else Stage.RETRY
            if interrupt.stage is Stage.SENDING:
                raise UpstreamTimeoutError(HANGS_MESSAGE)
            raise UpstreamPayloadError(
                "OpenCode accepted the answer but did not confirm it. Try again."
            )
        if self._closed and interrupt.stage is not Stage.SETTLED:
            raise UpstreamUnreachableError(STOPPED_MESSAGE)
        if interrupt.counted != answer:
            raise InterruptNotFoundError(request_id=interrupt.asked.request_id)

    # Settled

    async def _close_interrupt(
        self, interrupt: Interrupt, settled: Settlement
    ) -> list[TurnEvent | Answered]:
        """Record how an interrupt ended, and its consequences; return the events for the log."""
        asked, resumed, counted = interrupt.asked, settled.resumed, settled.answer
        self.shared.open.pop(asked.request_id, None)
        if interrupt.timer is not None:
            interrupt.timer.cancel()
        if counted is not None and counted is interrupt.given:
            self._note_implied(asked, counted)  # also for requests that came since it was sent
        if settled.answered_past_us and not self.shared.console_answers:
            self.forged = True
            AUDIT.warning(
                "interrupt answered past the service",
                request_id=asked.request_id,
                type=asked.type,
                task_id=self.owner.task_id,
                principal=self.owner.principal,
                session_id=asked.session_id,
                permission=asked.permission,
                patterns=asked.patterns,
                resolution=resumed.resolution,
            )
        interrupt.stage, interrupt.counted = Stage.SETTLED, counted
        interrupt.shown.set()
        self._settled.append(interrupt)
        resumed = told_by(resumed, counted)
        grant = await self.shared.store_settled(self.owner, asked, resumed, resumed.scope)
        if grant is not None:
            others = [other for other in self.open.values() if other.stage is Stage.WAITING]
            others = [other for other in others if grant.covers(self.owner, other.asked)]
            now = await asyncio.gather(*(self._looked_up(other.asked) for other in others))
            covered = [
                other
                for other, asked_now in zip(others, now, strict=True)
                # An answer that could not be delivered yet is that person's word on it.
                if other.stage is Stage.WAITING
                and other.given is None
                and grant.covers(self.owner, asked_now)
            ]
            allowed = Answer(PermissionReply("once"), grant.by)
            await self._store(covered, allowed, insist=True)
            for other in covered:
                self._make_due(other, allowed)
        if not interrupt.for_person:
            return []
        message = counted and counted.message
        return [resumed] if message is None else [Answered(message), resumed]

    def note_logged(self) -> None:
        """Note that these events are in the log: callers of ``answer`` may return."""
        for interrupt in self._settled:
            interrupt.logged.set()
        for interrupt in self._shown:
            interrupt.shown.set()
        self._settled.clear()
        self._shown.clear()

    def _note_implied(
        self, asked: Interrupted, answer: Answer, settled_at: int | None = None
    ) -> None:
        """Note which other interrupts OpenCode may settle with the answer to one.

        After a refusal OpenCode refuses all that is pending in the session; after its own "always"
        it allows what that covers. Neither is for requests that came after it was settled.
        """
        if answer.resolution not in ("rejected", "always"):
            return
        for other in self.open.values():
            same = answer.resolution == "rejected" or other.asked.permission == asked.permission
            later = settled_at is not None and (other.asked.asked_at or 0) > settled_at
            if same and other.asked.session_id == asked.session_id and not later:
                other.implied = answer

    # Stopped

    def refuse_all(self, by: Principal) -> None:
        """Note that a person has the turn stopped, and so refuses everything that it asks."""
        self._refusing = Answer(PermissionReply("reject"), by)
        for interrupt in self.open.values():
            interrupt.implied = self._refusing

    def voided(self) -> list[Resumed]:
        """Return the events that end all open interrupts without an answer."""
        asked = [interrupt.asked for interrupt in self.open.values()]
        return [Resumed(one.request_id, one.type, "void") for one in asked]

    def note_stopped(self) -> None:
        """Note that OpenCode was stopped as ``attend`` asked, and may be given other work."""
        self.forged = False

    def go_on(self) -> None:
        """Note that the turn continues after it was stopped: new requests are asked again."""
        self._refusing = None

    async def reject_leftovers(self, sessions: Container[SessionId]) -> None:
        """Reject the requests that are pending after the turn was stopped: OpenCode does not."""
        for interrupt in [*self.open.values()]:
            await self._reject(interrupt.asked)
        permissions, questions = await snapshot.pending(self.shared.opencode, self.location)
        for request in (*(permissions or ()), *(questions or ())):
            if request.session_id in sessions:  # asked at the last moment, and not heard of
                await self._reject(interrupted(request, None, self.location.directory))

    async def _reject(self, asked: Interrupted) -> None:
        reply = PermissionReply("reject") if asked.type == "permission" else QuestionRejection()
        try:
            await self.shared.reply(asked, reply, self._at(asked))
        except UpstreamError as error:
            logger.debug("leftover not rejected", error=error.message)

    def _at(self, asked: Interrupted) -> Location:
        return Location(directory=asked.directory) if asked.directory else self.location


def _response_lost(error: BaseException) -> bool:
    """Whether OpenCode may have acted on a call that failed with this error."""
    return isinstance(error, UpstreamUnreachableError) and not isinstance(error, UpstreamAwayError)


def _refused(error: UpstreamError) -> bool:
    """Whether OpenCode finds fault with the answer itself, and so will never take it."""
    return error.data.get("upstream_status") in (400, 422)


def _outcome(found: Sequence[Interrupt], failed: dict[Interrupt, ServiceError]) -> ServiceError:
    """Return the error for an answer that did not count for all its requests.

    An error that passes if the answer is sent again decides.
    """
    errors, passing = [*failed.values()], (UpstreamError, StoreUnavailableError)
    error = next((one for one in errors if isinstance(one, passing)), errors[0])
    if len(found) == 1:
        return error
    counted = ", ".join(one.name for one in found if one not in failed) or "none"
    missed = "; ".join(f"not for {one.name}: {why.message}" for one, why in failed.items())
    error.message = f"The answer counted for {counted}; {missed}"
    return error
