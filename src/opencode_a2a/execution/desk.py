"""The prompts of one turn: put to a person, answered by anybody, by a rule or by the clock.

``turn`` passes what its reader tells through here. A prompt that a rule answers never stops
the task. An answer counts when OpenCode says so.
"""

import asyncio
from collections.abc import Callable, Container
from dataclasses import dataclass, field, replace

import structlog

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
from opencode_a2a.events import Interrupted, Progressed, Resolution, Resumed, TurnEvent
from opencode_a2a.execution import stored
from opencode_a2a.execution.answers import PermissionReply, QuestionRejection, QuestionReply, Reply
from opencode_a2a.execution.interrupts import DENIED_MESSAGE, Interrupts, Owner
from opencode_a2a.ids import RequestId, SessionId
from opencode_a2a.upstream.client import Location, OpenCode
from opencode_a2a.upstream.translate import interrupted

log = structlog.get_logger(__name__)

CONFIRM_SECONDS = 10.0
RULE, CLOCK, ELSEWHERE = "rule", "deadline", "elsewhere"


@dataclass(slots=True)
class _Open:
    asked: Interrupted
    told: bool
    """A person was asked; False when a rule answers."""
    timer: asyncio.TimerHandle | None = None
    by: str | None = None
    resolution: Resolution | None = None
    settled: asyncio.Event = field(default_factory=asyncio.Event)


class Desk:
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
        """OpenCode does not know a prompt that is open here: the store has to be read."""
        self._due: list[RequestId] = []
        """Past their deadline, or to be answered by a rule."""

    @property
    def waiting(self) -> bool:
        """Whether a person is being waited for."""
        return any(one.told for one in self._open.values())

    async def screen(self, events: list[TurnEvent]) -> list[TurnEvent]:
        """Give prompts an owner and a deadline, and their ends the right name."""
        if not any(isinstance(event, Interrupted | Resumed) for event in events):
            return events
        out: list[TurnEvent] = []
        for event in events:
            match event:
                case Interrupted():
                    out.append(await self._ask(event))
                case Resumed():
                    out.extend(await self._resume(event))
                case _:
                    out.append(event)
        return out

    def restore(self, pending: list[Interrupted]) -> None:
        """Take up prompts that were told before a restart, with what is left of their time."""
        for asked in pending:
            self._open[asked.request_id] = _Open(asked, told=True)
            self._arm(asked)

    async def _ask(self, event: Interrupted) -> TurnEvent:
        action = self._interrupts.policy.action(event)
        asked = await self._interrupts.ask(self._owner, await self._with_input(event))
        self._open[asked.request_id] = _Open(asked, told=action == "ask")
        if action == "ask":
            self._arm(asked)
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
            called = await stored.tool_call(self._opencode, asked.session_id, asked.call_id)
        except UpstreamError as error:
            log.warning("input of a prompt not known", error=error.message)
            return asked
        if called is None:
            return asked
        return replace(asked, tool=called.tool, tool_input=called.state.input)

    def _arm(self, asked: Interrupted) -> None:
        left = max(0, (asked.expires_at or 0) - now_ms()) / 1000
        timer = asyncio.get_running_loop().call_later(left, self._expire, asked.request_id)
        self._open[asked.request_id].timer = timer

    def _expire(self, request_id: RequestId) -> None:
        self._due.append(request_id)
        self._wake()

    async def _resume(self, event: Resumed) -> list[TurnEvent]:
        one = self._open.pop(event.request_id, None)
        if one is None:
            return [event]
        if one.timer is not None:
            one.timer.cancel()
        by = one.by or (None if event.resolution == "void" else ELSEWHERE)
        event = replace(event, by=by, resolution=one.resolution or event.resolution)
        await self._interrupts.settle(self._owner, one.asked, event)
        one.settled.set()
        return [event] if one.told else []

    async def act(self) -> bool:
        """Answer what is due; False when the turn has to end instead."""
        due, self._due = self._due, []
        for request_id in due:
            one = self._open.get(request_id)
            if one is None or one.by is not None:
                continue
            action = self._interrupts.policy.action(one.asked) if not one.told else "ask"
            match action:
                case "allow":
                    await self._send(one, PermissionReply("once"), RULE)
                case "deny":
                    await self._send(one, PermissionReply("reject", DENIED_MESSAGE), RULE)
                case "ask":
                    reply = self._interrupts.policy.expiry(one.asked)
                    one.resolution = "expired"
                    if reply is None:
                        one.by = CLOCK
                        return False
                    await self._send(one, reply, CLOCK)
        return True

    async def _send(self, one: _Open, reply: Reply, by: str) -> None:
        one.by = by
        try:
            await self._reply(one.asked, reply)
        except UpstreamError as error:
            log.warning("prompt not answered", request_id=one.asked.request_id, error=error.message)
            one.by = None
            self._due.append(one.asked.request_id)

    def check(self, request_id: str, reply: Reply) -> _Open:
        """Return the prompt that a person may answer so; raise when nobody may."""
        one = self._open.get(RequestId(request_id))
        if one is None or not one.told or one.by is not None:
            raise InterruptNotFoundError(request_id=request_id)
        self._check(one.asked, reply)
        return one

    async def answer(self, request_id: str, reply: Reply, by: str) -> None:
        """Answer a prompt for a person; return once OpenCode has taken the answer."""
        one = self.check(request_id, reply)
        one.by = by
        try:
            await self._reply(one.asked, reply)
            async with asyncio.timeout(CONFIRM_SECONDS):
                await one.settled.wait()
        except UpstreamNotFoundError:
            self.stale = True
            self._wake()
            raise InterruptNotFoundError(request_id=request_id) from None
        except TimeoutError:
            one.by = None
            raise UpstreamPayloadError(
                "OpenCode took the answer but nothing came of it; try again", request_id=request_id
            ) from None
        except UpstreamError:
            one.by = None
            raise

    def _check(self, asked: Interrupted, reply: Reply) -> None:
        kind = "permission" if isinstance(reply, PermissionReply) else "question"
        if kind != asked.type:
            raise InterruptTypeMismatchError(
                request_id=asked.request_id,
                expected_interrupt_type=kind,
                actual_interrupt_type=asked.type,
            )
        always = isinstance(reply, PermissionReply) and reply.reply == "always"
        if always and not self._interrupts.policy.allow_always:
            text = '"always" is switched off here, since it holds for everybody; answer "once"'
            raise InvalidParamsError(text, violations=(Violation("reply", text),))

    async def _reply(self, asked: Interrupted, reply: Reply) -> None:
        at = Location(directory=asked.directory) if asked.directory else self._location
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
        permissions, questions = await stored.pending(self._opencode, self._location)
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
        for one in self._open.values():
            if one.timer is not None:
                one.timer.cancel()
