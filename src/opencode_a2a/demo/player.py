"""Playing one reply: the actions of a script become the bytes of a response.

``server`` gives it a request that is already understood. What outlasts a request (gates that
tests open, how often an action was done) is kept in ``Gates`` and ``Progress``.
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from pydantic import JsonValue
from starlette.types import Send

from opencode_a2a.demo import chat
from opencode_a2a.demo.answers import RESULT
from opencode_a2a.demo.chat import CallId, ChatRequest, FinishReason, Tokens
from opencode_a2a.demo.script import (
    Action,
    Call,
    Drop,
    Fail,
    Finish,
    Gate,
    Hang,
    Malformed,
    Reply,
    Say,
    Script,
    StreamError,
    Think,
    Usage,
    Wait,
)

_RESULT_LIMIT = 4000
_GATES = 1000
_FAILURES: Mapping[int, tuple[str, str, str | None]] = {
    400: ("Bad request", "invalid_request_error", "bad_request"),
    401: ("Incorrect API key provided", "invalid_request_error", "invalid_api_key"),
    404: ("The model does not exist", "invalid_request_error", "model_not_found"),
    429: ("Rate limit reached", "rate_limit", "rate_limit_exceeded"),
    500: ("The server had an error", "server_error", None),
    503: ("Overloaded", "overloaded_error", None),
}
_TOO_LONG = (
    "This model's maximum context length is 100000 tokens. "
    "However, your messages resulted in 200000 tokens."
)


class NamedGate:
    """A place where replies wait until a test lets them go on."""

    def __init__(self) -> None:
        self.reached = asyncio.Event()
        self.opened = asyncio.Event()

    async def passed(self) -> None:
        self.reached.set()
        await self.opened.wait()


class Gates:
    """All gates by name; the oldest are forgotten."""

    def __init__(self) -> None:
        self._gates: dict[str, NamedGate] = {}

    def __getitem__(self, name: str) -> NamedGate:
        if name not in self._gates and len(self._gates) >= _GATES:
            self._gates.pop(next(iter(self._gates))).opened.set()
        return self._gates.setdefault(name, NamedGate())


@dataclass(slots=True)
class Progress:
    """How far a session's script has come, and how often each of its actions was done."""

    script: Script
    next_place: int = 0
    _done: Counter[tuple[int, int]] = field(default_factory=Counter[tuple[int, int]])
    _attempts: Counter[int] = field(default_factory=Counter[int])

    def begin(self, place: int) -> int:
        """Count an attempt at a reply and return its number."""
        self.next_place = place
        self._attempts[place] += 1
        return self._attempts[place]

    def due(self, place: int, number: int, times: int | None) -> bool:
        """Whether an action is to be done once more; it is counted if so."""
        if times is None:
            return True
        self._done[place, number] += 1
        return self._done[place, number] <= times


class Output(Protocol):
    """A response in the making."""

    async def open(self) -> None: ...
    async def text(self, piece: str) -> None: ...
    async def thought(self, piece: str) -> None: ...
    async def call(self, number: int, call_id: str, name: str, arguments: str) -> None: ...
    async def malformed(self) -> None: ...
    async def error(self, message: str) -> None: ...
    async def finish(self, reason: FinishReason | None, used: Tokens) -> None: ...


class Stream:
    """Server-sent events, each written when it happens."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._started = False

    async def open(self) -> None:
        if self._started:
            return
        self._started = True
        await start(self._send, 200, b"text/event-stream", {"cache-control": "no-cache"})
        await self._write(chat.OPENING)

    async def text(self, piece: str) -> None:
        await self._write(chat.text_chunk(piece))

    async def thought(self, piece: str) -> None:
        await self._write(chat.reasoning_chunk(piece))

    async def call(self, number: int, call_id: str, name: str, arguments: str) -> None:
        await self._write(chat.call_chunk(number, call_id, name, arguments))

    async def malformed(self) -> None:
        await self._write(chat.MALFORMED)

    async def error(self, message: str) -> None:
        await self._write(chat.stream_error_chunk(message))
        await self._write(b"", more=False)

    async def finish(self, reason: FinishReason | None, used: Tokens) -> None:
        if reason is not None:
            await self._write(chat.finish_chunk(reason))
        await self._write(chat.usage_chunk(used) + chat.DONE, more=False)

    async def _write(self, data: bytes, *, more: bool = True) -> None:
        await self._send({"type": "http.response.body", "body": data, "more_body": more})


class Whole:
    """One JSON body, written at the end."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._text: list[str] = []
        self._thoughts: list[str] = []
        self._calls: list[JsonValue] = []
        self._spoilt = False

    async def open(self) -> None:
        """Nothing is sent before the end."""

    async def text(self, piece: str) -> None:
        self._text.append(piece)

    async def thought(self, piece: str) -> None:
        self._thoughts.append(piece)

    async def call(self, number: int, call_id: str, name: str, arguments: str) -> None:
        self._calls.append(chat.call_object(call_id, name, arguments))

    async def malformed(self) -> None:
        self._spoilt = True

    async def error(self, message: str) -> None:
        await respond(self._send, 500, chat.error_body(message, "server_error", "500"))

    async def finish(self, reason: FinishReason | None, used: Tokens) -> None:
        message: dict[str, JsonValue] = {"role": "assistant", "content": "".join(self._text)}
        if self._thoughts:
            message["reasoning_content"] = "".join(self._thoughts)
        if self._calls:
            message["tool_calls"] = self._calls
        body = chat.whole_body(message, reason, used)
        await respond(self._send, 200, body[:-2] if self._spoilt else body)


async def start(send: Send, status: int, kind: bytes, headers: Mapping[str, str]) -> None:
    pairs = [(name.encode(), value.encode()) for name, value in headers.items()]
    pairs.append((b"content-type", kind))
    await send({"type": "http.response.start", "status": status, "headers": pairs})


async def respond(
    send: Send, status: int, body: bytes, headers: Mapping[str, str] | None = None
) -> None:
    length = {"content-length": str(len(body))}
    await start(send, status, b"application/json", length | dict(headers or {}))
    await send({"type": "http.response.body", "body": body})


@dataclass(slots=True)
class Player:
    """One request and the reply to it."""

    request: ChatRequest
    reply: Reply
    place: int
    progress: Progress
    gates: Gates
    send: Send
    drop: Callable[[], None]
    _output: Output = field(init=False)
    _attempt: int = field(init=False)
    _calls: int = 0
    _words: int = 0
    _thoughts: int = 0
    _tokens: Tokens | None = None
    _finish: Finish | None = None

    def __post_init__(self) -> None:
        self._output = Stream(self.send) if self.request.stream else Whole(self.send)
        self._attempt = self.progress.begin(self.place)

    async def play(self) -> bool:
        """Do the actions in order; tell whether the reply came to an end that OpenCode takes.

        A reply without a finish reason does not: it is asked for again at once.
        """
        for number, action in enumerate(self.reply):
            if not self.progress.due(self.place, number, action.times):
                continue
            if not await self._do(action):
                return False
        await self._output.open()
        # The place moves first: who has read the end may ask for the next reply at once.
        self.progress.next_place = self.place + 1
        reason = self._reason()
        await self._output.finish(reason, self._used())
        return reason is not None

    async def _do(self, action: Action) -> bool:
        """Do one action; False means that nothing can follow it."""
        match action:
            case Say() | Think():
                await self._speak(action)
            case Call():
                await self._call(action)
            case Wait() | Hang() | Gate():
                await self._pause(action)
            case Usage():
                self._tokens = action.usage
            case Finish():
                self._finish = action
            case Malformed():
                await self._output.open()
                await self._output.malformed()
            case _:
                await self._break(action)
                return False
        return True

    async def _speak(self, action: Say | Think) -> None:
        await self._output.open()
        if isinstance(action, Say):
            text, write = self._filled(action.say), self._output.text
        else:
            text, write = action.think, self._output.thought
        for piece in action.pieces(text):
            await write(piece)
            # Also without a delay: a long text must not keep the loop from other streams.
            await asyncio.sleep(action.delay)
            self._words += 1
            self._thoughts += isinstance(action, Think)

    def _filled(self, text: str) -> str:
        if RESULT not in text:
            return text
        return text.replace(RESULT, self.request.last_result[:_RESULT_LIMIT])

    async def _call(self, action: Call) -> None:
        await self._output.open()
        call_id = CallId(self.progress.script.digest, self.place, self._attempt, self._calls)
        await self._output.call(self._calls, str(call_id), action.tool, action.arguments)
        self._calls += 1
        self._words += 1

    async def _pause(self, action: Wait | Hang | Gate) -> None:
        match action:
            case Wait():
                await asyncio.sleep(action.wait)
            case Hang():
                await asyncio.Event().wait()
            case Gate():
                await self.gates[action.gate].passed()

    async def _break(self, action: Action) -> None:
        match action:
            case Fail():
                await self._fail(action)
            case StreamError():
                await self._output.open()
                await self._output.error(action.stream_error)
            case Drop():
                self.drop()
                await asyncio.Event().wait()  # until the server has seen the connection go
            case _:
                raise NotImplementedError(type(action).__name__)

    async def _fail(self, action: Fail) -> None:
        if action.error == "context_length":
            status, known = 400, (_TOO_LONG, "invalid_request_error", "context_length_exceeded")
        else:
            status = action.error
            known = _FAILURES.get(status, ("The request failed", "server_error", None))
        message, kind, code = known
        body = chat.error_body(action.message or message, action.type or kind, action.code or code)
        after = action.retry_after
        headers = {} if after is None else {"retry-after": str(after)}
        await respond(self.send, status, body, headers)

    def _reason(self) -> FinishReason | None:
        if self._finish is not None:
            return self._finish.finish
        return "tool_calls" if self._calls else "stop"

    def _used(self) -> Tokens:
        if self._tokens is not None:
            return self._tokens
        prompt = sum(len(message.text) for message in self.request.messages) // 4
        return Tokens(prompt=prompt, completion=self._words, reasoning=self._thoughts)
