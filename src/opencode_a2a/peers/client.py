"""Call another A2A agent: ask, and follow the answer to its end.

The commands, ``peers.pool`` and the tool use this. It speaks both protocol lines over JSON-RPC
and HTTP+JSON straight on httpx2: the SDK's client takes most of a second to import, cannot
resume a stream and sends its headers wherever a card points. Which addresses may be called is
the business of ``peers.network``.

A connection that drops is taken up again: with ``Last-Event-ID`` where the peer numbers its
events, otherwise from the task as the peer has it. ``peers.answer`` sees to it that no text is
told twice.
"""

import asyncio
import math
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass, field

from opencode_a2a.events import JsonObject
from opencode_a2a.messages import Message
from opencode_a2a.peers import wire
from opencode_a2a.peers.answer import PeerEvent, PeerTask
from opencode_a2a.peers.credential import Credential
from opencode_a2a.peers.discovery import Preference, choose, find_card
from opencode_a2a.peers.errors import ErrorCode, LostError, PeerError
from opencode_a2a.peers.exchange import DroppedError, Exchange
from opencode_a2a.peers.network import Egress
from opencode_a2a.peers.wire import Card, Interface, Operation, Task, Version

HOPS_HEADER = "A2A-Hops"
"""How many agents a message went through; an agent that asks on sends one more."""
_RESUMES = 4
Tell = Callable[[PeerEvent], None]


@dataclass(frozen=True, slots=True)
class Options:
    """How peers are called; the defaults are those of the ``A2A_CLIENT_…`` settings."""

    timeout: float = 30.0
    """Seconds for one request, and of silence on a stream before it counts as dropped."""
    card_timeout: float = 5.0
    preference: Preference = field(default_factory=Preference)
    polling: bool = False
    """Ask for the task again and again when an answer was not final and nothing streams."""
    poll_first: float = 0.5
    poll_most: float = 2.0
    poll_factor: float = 2.0
    poll_timeout: float = 10.0
    max_hops: int = 3


class Peer:
    """One agent, reached through the interface of its card that suits both sides."""

    def __init__(
        self, exchange: Exchange, card: Card, interface: Interface, options: Options
    ) -> None:
        self.card = card
        self.interface = interface
        self._exchange = exchange
        self._options = options

    @classmethod
    async def open(
        cls,
        url: str,
        rules: Egress,
        credential: Credential | None = None,
        options: Options | None = None,
    ) -> "Peer":
        """Read the card at a base URL or card URL and choose one of its interfaces."""
        options = options or Options()
        exchange = Exchange(rules, credential, patience=options.timeout)
        try:
            card = await find_card(exchange, url, options.card_timeout)
            return cls(exchange, card, choose(card, options.preference, rules), options)
        except BaseException:
            await exchange.aclose()
            raise

    async def aclose(self) -> None:
        await self._exchange.aclose()

    async def ask(
        self,
        message: Message,
        tell: Tell,
        *,
        task_id: str | None = None,
        context_id: str | None = None,
        account: PeerTask | None = None,
        stream: bool = True,
        hops: int = 0,
    ) -> None:
        """Send a message and tell what the peer tells, until its task ends or waits.

        To go on with a task, give its id, and its account if it was followed before: what
        that has told is not told again. ``hops`` is the number of agents that the request behind
        this message went through.
        """
        if hops >= self._options.max_hops:
            raise PeerError(
                ErrorCode.CALL_FAILED,
                f"not asked: the request went through {hops} agents already, they seem to call "
                "each other in a circle",
            )
        account = account or PeerTask()
        if task_id and task_id != account.task_id:
            account.prime(await self.task(task_id))
        account.begin()
        # Whoever may not poll has to be told the end by the answer itself; a stream ignores it.
        waits = not self._options.polling
        params = wire.send_params(self.interface, message, task_id, context_id, waits=waits)
        hearing = _Hearing(account, tell)
        if stream and self.card.streaming:
            await self._send_streaming(params, hearing, hops)
        if not hearing.heard:
            hearing.take(wire.read_event(await self._call(Operation.SEND, params, hops)))
        seconds = self._options.poll_timeout if self._options.polling else 0.0
        await self._hear_out(hearing, seconds)

    async def follow(self, task_id: str, tell: Tell, account: PeerTask | None = None) -> None:
        """Tell what a task has told so far and then what it tells, until it ends or waits.

        A peer that does not stream is polled for as long as it takes: that is what was asked for.
        """
        hearing = _Hearing(account or PeerTask(), tell, heard=True)
        hearing.take(await self.task(task_id))
        await self._hear_out(hearing, math.inf)

    async def task(self, task_id: str, history: int = 0) -> Task:
        # For 0.3 servers zero means everything.
        shown = history if self.interface.line is Version.V1 else max(history, 1)
        value = await self._call(Operation.GET, {"id": task_id, "historyLength": shown})
        return wire.read_task(value)

    async def tasks(self, context_id: str | None = None, limit: int = 50) -> list[Task]:
        params: JsonObject = {"pageSize": limit, "historyLength": 1}
        if context_id:
            params["contextId"] = context_id
        return wire.read_tasks(await self._call(Operation.LIST, params))

    async def cancel(self, task_id: str) -> Task:
        return wire.read_task(await self._call(Operation.CANCEL, {"id": task_id}))

    async def _send_streaming(self, params: JsonObject, hearing: "_Hearing", hops: int) -> None:
        """Send by stream; a peer that cannot has to be asked without."""
        try:
            async with aclosing(self._stream(Operation.STREAM, params, hearing, hops)) as events:
                async for event in events:
                    if hearing.take(event):
                        return
        except DroppedError as error:
            if not hearing.heard:
                # The peer may have the message: sending it again could do the work twice.
                raise PeerError(
                    ErrorCode.RETRYABLE, "the connection broke before the agent answered"
                ) from error
        except PeerError as error:
            if not (error.retryable if hearing.heard else error.code is ErrorCode.UNSUPPORTED):
                raise

    async def _hear_out(self, hearing: "_Hearing", seconds: float) -> None:
        """Take a broken stream up again; when there is none or that leads nowhere, poll."""
        account = hearing.account
        failures, pause = 0 if hearing.heard else _RESUMES, 0.0
        while account.task_id and not account.settled and failures < _RESUMES:
            await asyncio.sleep(pause)
            hearing.heard = False
            try:
                await self._subscribe(account.task_id, hearing)
            except PeerError:
                break
            except DroppedError:
                failures = 0 if hearing.heard else failures + 1
                pause = self._options.poll_first * (failures + 1)
        await self._poll(hearing, seconds)

    async def _subscribe(self, task_id: str, hearing: "_Hearing") -> None:
        """Subscribe again: exactly after the last event's id, else from the task as it is."""
        exact, aligned = hearing.last_id is not None, False
        async with aclosing(self._stream(Operation.SUBSCRIBE, {"id": task_id}, hearing)) as events:
            async for event in events:
                aligned = aligned or exact or isinstance(event, Task)
                if not aligned:
                    # A 0.3 server may go on without saying what was missed.
                    raise PeerError(ErrorCode.UNEXPECTED, "the stream cannot be resumed")
                ends = event.status and event.status.state.settled
                if ends and not exact and not isinstance(event, Task):
                    # Not every server joins task and stream without a seam; the task is right.
                    event = await self.task(task_id)
                if hearing.take(event):
                    return

    async def _poll(self, hearing: "_Hearing", seconds: float) -> None:
        """Read the task as it is, once and then for so many seconds again and again."""
        options, pause, failures = self._options, 0.0, 0
        clock = asyncio.get_running_loop().time
        deadline = clock() + seconds
        while hearing.account.task_id and not hearing.account.settled:
            if clock() + pause > deadline and pause:
                if failures:
                    raise LostError(ErrorCode.TIMEOUT, "the connection to the agent was lost")
                raise PeerError(ErrorCode.TIMEOUT, _unfinished(seconds))
            await asyncio.sleep(pause)
            try:
                hearing.take(await self.task(hearing.account.task_id))
                failures = 0
            except PeerError as error:
                failures += 1
                if not error.retryable or failures > _RESUMES:
                    raise
            pause = min(max(pause * options.poll_factor, options.poll_first), options.poll_most)

    async def _call(
        self, operation: Operation, params: JsonObject, hops: int | None = None
    ) -> JsonObject:
        request = wire.request(self.interface, operation, params)
        # The answer to a message may take as long as the work; who asks has a limit of their own.
        endless = operation is Operation.SEND
        return await self._exchange.fetch(request, self._headers(hops), endless=endless)

    async def _stream(
        self, operation: Operation, params: JsonObject, hearing: "_Hearing", hops: int | None = None
    ) -> AsyncGenerator[wire.Event]:
        resume = {"Last-Event-ID": hearing.last_id} if hearing.last_id else {}
        request = wire.request(self.interface, operation, params)
        results = self._exchange.stream(request, self._headers(hops) | resume)
        async with aclosing(results):
            async for value, hearing.last_id in results:
                hearing.heard = True
                yield wire.read_event(value)

    def _headers(self, hops: int | None) -> dict[str, str]:
        version = {"A2A-Version": self.interface.line.value}
        return version if hops is None else version | {HOPS_HEADER: str(hops + 1)}


def _unfinished(seconds: float) -> str:
    if seconds:
        return f"the agent had not finished after {seconds:g} s of polling"
    return "the agent has not finished, and A2A_CLIENT_POLLING_FALLBACK_ENABLED is off"


@dataclass(slots=True)
class _Hearing:
    """Who is told of a task, and how far its stream was heard."""

    account: PeerTask
    tell: Tell
    heard: bool = False
    last_id: str | None = None

    def take(self, event: wire.Event) -> bool:
        """Tell what is new; return whether the task has ended or waits."""
        for told in self.account.take(event):
            self.tell(told)
        return self.account.settled
