"""Playing one reply: the actions of a script become the bytes of a response.

``server`` gives it a request that is already understood. What outlasts a request (gates that
tests open, how often an action was done) is kept in ``Gates`` and ``Progress``.
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from pydantic import JsonValue
from starlette.types import Send

from opencode_a2a_demo import chat
from opencode_a2a_demo.answers import RESULT, filled
from opencode_a2a_demo.chat import CallId, ChatRequest, FinishReason, Tokens
from opencode_a2a_demo.script import (
    Action,
    Call,
    Drop,
    Fail,
    Finish,
    Gate,
    Malformed,
    Say,
    Script,
    StreamError,
    Think,
    Usage,
    Wait,
    as_offered,
)

_RESULT_LIMIT = 4000
_GATES = 1000
_FAILURES: Mapping[int | str, tuple[str, str, str | None]] = {
    400: ("Bad request", "invalid_request_error", "bad_request"),
    401: ("Incorrect API key provided", "invalid_request_error", "invalid_api_key"),
    404: ("The model does not exist", "invalid_request_error", "model_not_found"),
    429: ("Rate limit reached", "rate_limit", "rate_limit_exceeded"),
    500: ("The server had an error", "server_error", None),
    503: ("Overloaded", "overloaded_error", None),
    "context_length": (
        "This model's maximum context length is 100000 tokens. "
        "However, your messages resulted in 200000 tokens.",
        "invalid_request_error",
        "context_length_exceeded",
    ),
}
Kind = Literal["content", "reasoning_content"]


class NamedGate:
    """A place where replies wait until a test lets them continue."""

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


class Stream:
    """Server-sent events, each written when it happens."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._started = False

    async def open(self) -> None:
        if not self._started:
            self._started = True
            await _start(self._send, 200, b"text/event-stream", {"cache-control": "no-cache"})
            await self._write(chat.delta_chunk({"role": "assistant", "content": ""}))

    async def text(self, kind: Kind, piece: str) -> None:
        await self._write(chat.delta_chunk({kind: piece}))

    async def call(self, number: int, call: dict[str, JsonValue]) -> None:
        """The whole call in one chunk, as many compatible servers send it."""
        await self._write(chat.delta_chunk({"tool_calls": [{**call, "index": number}]}))

    async def malformed(self) -> None:
        await self._write(chat.MALFORMED)

    async def error(self, message: str) -> None:
        await self._write(chat.stream_error_chunk(message))
        await self._write(b"", more=False)

    async def finish(self, reason: FinishReason | None, used: Tokens) -> None:
        if reason is not None:
            await self._write(chat.delta_chunk({}, reason))
        await self._write(chat.last_chunks(used), more=False)

    async def _write(self, data: bytes, *, more: bool = True) -> None:
        await self.open()
        await self._send({"type": "http.response.body", "body": data, "more_body": more})


class Whole:
    """One JSON body, written at the end."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._texts: dict[Kind, list[str]] = {"content": []}
        self._calls: list[JsonValue] = []
        self._spoilt = False

    async def open(self) -> None:
        """Nothing is sent before the end."""

    async def text(self, kind: Kind, piece: str) -> None:
        self._texts.setdefault(kind, []).append(piece)

    async def call(self, number: int, call: dict[str, JsonValue]) -> None:
        self._calls.append(call)

    async def malformed(self) -> None:
        self._spoilt = True

    async def error(self, message: str) -> None:
        await _respond(self._send, 500, chat.error_body(message, "server_error", "500"))

    async def finish(self, reason: FinishReason | None, used: Tokens) -> None:
        message: dict[str, JsonValue] = {"role": "assistant"}
        message |= {kind: "".join(pieces) for kind, pieces in self._texts.items()}
        if self._calls:
            message["tool_calls"] = self._calls
        body = chat.whole_body(message, reason, used)
        await _respond(self._send, 200, body[:-2] if self._spoilt else body)


async def _start(send: Send, status: int, kind: bytes, headers: Mapping[str, str]) -> None:
    pairs = [(name.encode(), value.encode()) for name, value in headers.items()]
    pairs.append((b"content-type", kind))
    await send({"type": "http.response.start", "status": status, "headers": pairs})


async def _respond(send: Send, status: int, body: bytes, **headers: str) -> None:
    length = {"content-length": str(len(body))}
    await _start(send, status, b"application/json", length | headers)
    await send({"type": "http.response.body", "body": body})


@dataclass(slots=True)
class Player:
    """One request and the reply to it."""

    request: ChatRequest
    progress: Progress
    place: int
    gates: Gates
    send: Send
    drop: Callable[[], None]
    _output: Stream | Whole = field(init=False)
    _calls: int = 0
    _words: int = 0
    _thoughts: int = 0

    async def play(self) -> bool:
        """Do the actions in order; return whether the reply came to an end that OpenCode accepts.

        A reply without a finish reason does not: OpenCode asks for it again at once.
        """
        self._output = Stream(self.send) if self.request.stream else Whole(self.send)
        attempt = self.progress.begin(self.place)
        reason: FinishReason | None = "stop"
        finish: Finish | None = None
        prompt = sum(len(message.text) for message in self.request.messages) // 4
        used: Tokens | None = None
        for number, action in enumerate(self.progress.script.reply(self.place)):
            if not self.progress.due(self.place, number, action.times):
                continue
            match action:
                case Say():
                    await self._speak(action, "content", action.say)
                case Think():
                    await self._speak(action, "reasoning_content", action.think)
                case Call():
                    await self._call(action, attempt)
                    reason = "tool_calls"
                case Wait():
                    await asyncio.sleep(action.wait)
                case Gate():
                    await self.gates[action.gate].passed()
                case Usage():
                    used = action.usage
                case Finish():
                    finish = action
                case Malformed():
                    await self._output.malformed()
                case _:
                    await self._break(action)
                    return False
        # The place moves first: whoever has read the end may ask for the next reply at once.
        self.progress.next_place = self.place + 1
        used = used or Tokens(prompt=prompt, completion=self._words, reasoning=self._thoughts)
        reason = finish.finish if finish else reason
        await self._output.finish(reason, used)
        return reason is not None

    async def _speak(self, action: Say | Think, kind: Kind, text: str) -> None:
        await self._output.open()
        if kind == "content" and RESULT in text:
            text = filled(text, self.request.last_result[:_RESULT_LIMIT])
        for piece in action.pieces(text):
            await self._output.text(kind, piece)
            # Also without a delay: a long text must not keep the loop from other streams.
            await asyncio.sleep(action.delay)
            self._words += 1
            self._thoughts += kind == "reasoning_content"

    async def _call(self, action: Call, attempt: int) -> None:
        call_id = CallId(self.progress.script.digest, self.place, attempt, self._calls)
        action = as_offered(action, self.request.tool_names)
        function: JsonValue = {"name": action.tool, "arguments": action.arguments}
        call: dict[str, JsonValue] = {"id": str(call_id), "type": "function", "function": function}
        await self._output.call(self._calls, call)
        self._calls += 1
        self._words += 1

    async def _break(self, action: Action) -> None:
        """Do an action that nothing can follow."""
        match action:
            case Fail():
                unknown = ("The request failed", "server_error", None)
                message, kind, code = _FAILURES.get(action.error, unknown)
                body = chat.error_body(
                    action.message or message, action.type or kind, action.code or code
                )
                status = 400 if action.error == "context_length" else action.error
                after = action.retry_after
                headers = {} if after is None else {"retry-after": str(after)}
                await _respond(self.send, status, body, **headers)
            case StreamError():
                await self._output.error(action.stream_error)
            case _:
                if isinstance(action, Drop):
                    self.drop()
                await asyncio.Event().wait()  # until the server has seen the connection go
