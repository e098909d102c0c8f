"""The interrupts of one turn: put to a person, answered by anybody, by a rule or by the clock.

``turn`` passes what its reader tells through here. An interrupt that a rule answers never stops
the task. An answer is stored before OpenCode is given it, and counts when OpenCode says so.
"""

import asyncio
from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass, field, replace

import structlog
from sqlalchemy.engine import Connection

from opencode_a2a.clock import now_ms
from opencode_a2a.errors import (
    InterruptNotFoundError,
    InterruptTypeMismatchError,
    InvalidParamsError,
    UpstreamError,
    UpstreamNotFoundError,
    UpstreamPayloadError,
    Violation,
)
from opencode_a2a.events import Finished, Interrupted, Progressed, Resumed, ToolChanged, TurnEvent
from opencode_a2a.ids import RequestId, SessionId
from opencode_a2a.messages import Answered, Message
from opencode_a2a.opencode.client import Location, OpenCode
from opencode_a2a.opencode.translate import interrupted
from opencode_a2a.turns import snapshot
from opencode_a2a.turns.answers import (
    Answer,
    PermissionReply,
    QuestionRejection,
    QuestionReply,
    Reply,
)
from opencode_a2a.turns.interrupts import DENIED_MESSAGE, Interrupts, Owner, expiry, rule_action

log = structlog.get_logger(__name__)

CONFIRM_SECONDS = 10.0
RULE, CLOCK, ELSEWHERE = "rule", "deadline", "elsewhere"

Write = Callable[[Connection], None]


@dataclass(slots=True)
class _Open:
    asked: Interrupted
    told: bool
    """A person was asked; False when a rule answers."""
    timer: asyncio.TimerHandle | None = None
    answer: Answer | None = None
    """The latest answer that OpenCode may have taken."""
    sending: bool = False
    """An answer is on its way: nobody else can answer now."""
    delivered: bool = False
    """OpenCode has confirmed that it took the answer."""
    expired: bool = False
    """Nobody answered in time, and the turn ends for it."""
    counted: Answer | None = None
    """The answer that settled it, once it is settled."""
    settled: asyncio.Event = field(default_factory=asyncio.Event)


class TurnInterrupts:
    def __init__(
        self,
        opencode: OpenCode,
        interrupts: Interrupts,
        owner: Owner,
        location: Location,
        wake: Callable[[], None],
    ) -> None:
        self._opencode = opencode
        self._interrupts = interrupts
        self._owner = owner
        self._location = location
        self._wake = wake
        self._open: dict[RequestId, _Open] = {}
        self.stale = False
        """OpenCode does not know an interrupt that is open here: the store has to be read."""
        self.busy = False
        """OpenCode was at work when the store was last read."""
        self.forged: Interrupted | None = None
        """Answered past this service, where that is not allowed: the turn has to be stopped."""
        self._settled: list[_Open] = []
        """Settled, and about to be told."""
        self._due: list[RequestId] = []
        """Past their deadline, or to be answered by a rule."""
        self._refused: dict[SessionId, Answer] = {}
        """Sessions in which something was refused: OpenCode then refuses all that is pending."""
        self._granted: dict[RequestId, Answer] = {}
        """What was open when an "always" was given in its session: OpenCode may grant it too."""
        self._ran: set[str] = set()
        """The calls that have done their work, of those that are told now."""

    @property
    def waiting(self) -> bool:
        """Whether the turn is waiting for a person."""
        return any(one.told for one in self._open.values())

    async def screen(self, events: list[TurnEvent]) -> list[TurnEvent | Answered]:
        """Give interrupts an owner and a deadline, and name who settled them."""
        if not any(isinstance(event, Interrupted | Resumed) for event in events):
            return [*events]
        out: list[TurnEvent | Answered] = []
        ending = any(isinstance(event, Finished) for event in events)
        changed = [event for event in events if isinstance(event, ToolChanged)]
        self._ran = {call.call_id for call in changed if call.status == "completed"}
        for event in events:
            match event:
                case Interrupted() if event.request_id not in self._interrupts.open:
                    out.append(await self._ask(event))
                case Interrupted():
                    pass  # somebody else is being asked
                case Resumed():
                    out.extend(await self._resume(event, ending=ending))
                case _:
                    out.append(event)
        return out

    def told(self) -> None:
        """Note that all that was screened is in the log: whoever answered may go on."""
        for one in self._settled:
            one.settled.set()
        self._settled.clear()

    def restore(self, pending: list[Interrupted], answers: Mapping[RequestId, Answer]) -> None:
        """Take up interrupts that were told before a restart, with what is left of their time.

        Whether OpenCode got an answer that was stored before is not known. It is given once
        more, to the same request: OpenCode refuses it if it is not pending.
        """
        for asked in pending:
            one = self._add(_Open(asked, told=True))
            one.answer = answers.get(asked.request_id)
            if one.answer is not None:
                self._due.append(asked.request_id)
            self._arm(asked, ((asked.expires_at or 0) - now_ms()) / 1000)

    def find(self, request_id: str) -> Interrupted | None:
        """Return an interrupt that waits for a person."""
        one = self._open.get(RequestId(request_id))
        return one.asked if one is not None and one.told else None

    def _add(self, one: _Open) -> _Open:
        self._interrupts.open.add(one.asked.request_id)
        self._open[one.asked.request_id] = one
        return one

    async def _ask(self, event: Interrupted) -> TurnEvent:
        self._interrupts.open.add(event.request_id)
        action = rule_action(self._interrupts.settings, event)
        asked = await self._interrupts.ask(self._owner, await self._with_input(event))
        self._add(_Open(asked, told=action == "ask"))
        if action == "ask":
            self._arm(asked, self._interrupts.settings.interrupt_request_ttl_seconds)
            return asked
        self._due.append(asked.request_id)
        self._wake()
        return Progressed(
            "permission",
            "allowed" if action == "allow" else "denied",
            part_id=asked.request_id,
            title=f"{asked.permission}: {', '.join(asked.patterns)}",
            reason="answered by a rule of this service",
        )

    async def _with_input(self, asked: Interrupted) -> Interrupted:
        """Add what the tool was called with: OpenCode tells it a moment after it asks."""
        if asked.call_id is None or asked.tool_input is not None:
            return asked
        try:
            called = await snapshot.tool_call(self._opencode, asked.session_id, asked.call_id)
        except UpstreamError as error:
            log.warning("input of a prompt not known", error=error.message)
            return asked
        if called is None:
            return asked
        return replace(asked, tool=called.tool, tool_input=called.state.input)

    def _arm(self, asked: Interrupted, seconds: float) -> None:
        loop = asyncio.get_running_loop()
        timer = loop.call_later(max(0.0, seconds), self._expire, asked.request_id)
        self._open[asked.request_id].timer = timer

    def _expire(self, request_id: RequestId) -> None:
        self._due.append(request_id)
        self._wake()

    # Settled

    async def _resume(self, event: Resumed, *, ending: bool) -> list[TurnEvent | Answered]:
        one = self._open.pop(event.request_id, None)
        if one is None:
            return []  # it was somebody else's
        self._interrupts.open.discard(event.request_id)
        if one.timer is not None:
            one.timer.cancel()
        event = self._attributed(one, event, ending=ending)
        self._settled.append(one)
        await self._interrupts.settle(self._owner, one.asked, event)
        if not one.told:
            return []
        if one.counted is None or one.counted.message is None:
            return [event]
        return [Answered(one.counted.message), event]

    def _attributed(self, one: _Open, event: Resumed, *, ending: bool) -> Resumed:
        """Say whose answer settled an interrupt, and how."""
        answer, void = one.answer, event.resolution == "void"
        # A call that has asked and has done its work was allowed to by somebody.
        ran = one.asked.type == "permission" and one.asked.call_id in self._ran
        if one.expired:
            return replace(event, by=CLOCK, resolution="expired")
        if answer is not None:
            # One that is gone without a word has taken the answer that was on its way to it.
            taken = one.delivered or not ending if void else answer.resolution == event.resolution
            if void and ran and answer.resolution != "rejected":
                taken = True
            one.counted = answer if taken else None
        if one.counted is not None:
            if one.counted.resolution == "always":
                self._grant(one.asked, one.counted)  # also what was heard since it was sent
            resolution = "expired" if one.counted.by == CLOCK else one.counted.resolution
            return replace(event, by=one.counted.by, resolution=resolution)
        cause = self._cause(one.asked, event)
        if cause is not None:
            return replace(event, by=cause.by)
        if void and ran:
            event, void = replace(event, resolution="once"), False
        if void and (ending or not self.busy):
            return event
        if not self._interrupts.console_answers:
            self.forged = one.asked
            self._interrupts.report_forged(self._owner, one.asked, event)
        return event if void else replace(event, by=ELSEWHERE)

    def _cause(self, asked: Interrupted, event: Resumed) -> Answer | None:
        """Return the answer to another interrupt that OpenCode has let settle this one too."""
        refused = self._refused.get(asked.session_id)
        if refused is not None and event.resolution in ("rejected", "void"):
            return refused
        granted = self._granted.pop(asked.request_id, None)
        return granted if event.resolution in ("always", "void") else None

    def _grant(self, asked: Interrupted, answer: Answer) -> None:
        """Note which others of the session OpenCode may settle with an "always"."""
        for request_id, one in self._open.items():
            same = (one.asked.session_id, one.asked.permission)
            if same == (asked.session_id, asked.permission):
                self._granted[request_id] = answer

    # Answered

    async def act(self) -> bool:
        """Answer what is due; False when the turn has to end instead."""
        due, self._due = self._due, []
        for request_id in due:
            one = self._open.get(request_id)
            if one is None or one.sending or one.delivered:
                continue
            answer = one.answer or self._automatic(one)
            if answer is None:
                one.expired = True
                return False
            await self._send(one, answer)
        return True

    def _automatic(self, one: _Open) -> Answer | None:
        """Return the answer of a rule, or of the clock; None when the turn ends at the deadline."""
        if one.told:
            reply = expiry(self._interrupts.settings, one.asked)
            return reply and Answer(reply, CLOCK)
        if rule_action(self._interrupts.settings, one.asked) == "allow":
            return Answer(PermissionReply("once"), RULE)
        return Answer(PermissionReply("reject", DENIED_MESSAGE), RULE)

    async def _send(self, one: _Open, answer: Answer) -> None:
        request_id, one.sending = one.asked.request_id, True
        try:
            if answer is not one.answer:
                await self._interrupts.store(request_id, answer, insist=True)
            await self._deliver(one, answer)
        except UpstreamNotFoundError:
            pass  # the store will tell
        except UpstreamError as error:
            log.warning("interrupt not answered", request_id=request_id, error=error.message)
            self._due.append(request_id)
        finally:
            one.sending = False

    def check(self, request_id: str, reply: Reply) -> _Open:
        """Return the interrupt that a person may answer so; raise when nobody may."""
        one = self._open.get(RequestId(request_id))
        if one is None or not one.told or one.sending or one.delivered:
            raise InterruptNotFoundError(request_id=request_id)
        self._check(one.asked, reply)
        return one

    async def answer(self, request_id: str, answer: Answer, also: Write | None = None) -> None:
        """Answer an interrupt for a person; return once OpenCode has taken the answer.

        ``also`` is written together with the answer, before OpenCode gets it.
        """
        one = self.check(request_id, answer.reply)
        one.sending = True  # from here on nobody else can answer
        try:
            await self._interrupts.store(one.asked.request_id, answer, also)
            await self._give(one, answer)
        finally:
            one.sending = False

    async def repeat(self, message: Message) -> None:
        """See to it that OpenCode gets the answer in a message that was taken before."""
        # What is settled but not in the log yet is no longer open; its outcome is waited for too.
        for one in (*self._settled, *self._open.values()):
            answer = one.answer
            if answer is None or answer.message != message:
                continue
            if one.sending or one.delivered or one in self._settled:
                await self._confirmed(one, answer)
                continue
            one.sending = True
            try:
                await self._give(one, answer)
            finally:
                one.sending = False

    async def _give(self, one: _Open, answer: Answer) -> None:
        try:
            await self._deliver(one, answer)
        except UpstreamNotFoundError:
            if one.answer != answer:
                raise InterruptNotFoundError(request_id=one.asked.request_id) from None
        await self._confirmed(one, answer)

    async def _deliver(self, one: _Open, answer: Answer) -> None:
        """Give OpenCode an answer that is stored."""
        earlier, one.answer = one.answer, answer
        if answer.resolution == "rejected":
            self._refused[one.asked.session_id] = answer
        elif answer.resolution == "always":
            self._grant(one.asked, answer)
        try:
            await self._reply(one.asked, answer.reply)
        except UpstreamNotFoundError:
            # It is not pending: an earlier try got through, or an answer from elsewhere.
            one.answer, one.delivered = earlier, earlier is not None
            if earlier is None:
                self._granted.clear()
            self.stale = True
            self._wake()
            raise
        one.delivered = True

    async def _confirmed(self, one: _Open, answer: Answer) -> None:
        """Wait until OpenCode says that an interrupt is settled; raise if not by this answer."""
        try:
            async with asyncio.timeout(CONFIRM_SECONDS):
                await one.settled.wait()
        except TimeoutError:
            one.delivered = False
            raise UpstreamPayloadError(
                "OpenCode took the answer but nothing came of it; try again",
                request_id=one.asked.request_id,
            ) from None
        if one.counted != answer:
            raise InterruptNotFoundError(request_id=one.asked.request_id)

    def _check(self, asked: Interrupted, reply: Reply) -> None:
        kind = "permission" if isinstance(reply, PermissionReply) else "question"
        if kind != asked.type:
            raise InterruptTypeMismatchError(
                request_id=asked.request_id,
                expected_interrupt_type=kind,
                actual_interrupt_type=asked.type,
            )
        always = isinstance(reply, PermissionReply) and reply.reply == "always"
        if always and not self._interrupts.settings.allow_always:
            text = '"always" is switched off here, since it holds for everybody; answer "once"'
            raise InvalidParamsError(text, violations=(Violation("reply", text),))

    def _at(self, asked: Interrupted) -> Location:
        return Location(directory=asked.directory) if asked.directory else self._location

    async def _reply(self, asked: Interrupted, reply: Reply) -> None:
        at = self._at(asked)
        match reply:
            case PermissionReply():
                await self._opencode.reply_permission(
                    asked.request_id, reply.reply, reply.message, at=at
                )
            case QuestionReply():
                await self._opencode.reply_question(asked.request_id, reply.answers, at=at)
            case QuestionRejection():
                await self._opencode.reject_question(asked.request_id, at=at)

    async def reject_all(self, sessions: Container[SessionId]) -> None:
        """Clear what is pending after the turn was stopped: OpenCode does not."""
        for one in [one.asked for one in self._open.values()]:
            await self._reject(one)
        permissions, questions = await snapshot.pending(self._opencode, self._location)
        for request in (*(permissions or ()), *(questions or ())):
            if request.session_id in sessions:  # asked in the very last moment, and not heard
                await self._reject(interrupted(request, None, self._location.directory))

    async def _reject(self, asked: Interrupted) -> None:
        reply = PermissionReply("reject") if asked.type == "permission" else QuestionRejection()
        try:
            await self._reply(asked, reply)
        except UpstreamError as error:
            log.debug("leftover not rejected", error=error.message)

    def close(self) -> None:
        self._interrupts.open.difference_update(self._open)
        for one in self._open.values():
            if one.timer is not None:
                one.timer.cancel()
