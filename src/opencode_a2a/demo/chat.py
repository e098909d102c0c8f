"""The part of OpenAI's chat completion wire that OpenCode uses, as types and as bytes.

``server`` reads requests and writes answers with this; ``script`` and ``answers`` read the
messages. Nothing here knows what will be answered.
"""

import re
from dataclasses import dataclass
from typing import Literal, NewType

import orjson
from pydantic import BaseModel, ConfigDict, Field, JsonValue

MODEL = "demo"
Digest = NewType("Digest", str)
"""What tells one script from another."""
FinishReason = Literal["stop", "length", "content_filter", "tool_calls"]

_CALL_ID = re.compile(r"call_(?P<digest>[0-9a-f]+)_(?P<reply>\d+)_(?P<attempt>\d+)_(?P<number>\d+)")


class Wire(BaseModel):
    """Base of every request payload: immutable, and indifferent to fields it does not know."""

    model_config = ConfigDict(frozen=True, extra="ignore", defer_build=True)


class ContentPart(Wire):
    type: str
    text: str | None = None


class ToolCall(Wire):
    id: str = ""


class ChatMessage(Wire):
    role: str
    content: str | list[ContentPart] | None = None
    reasoning_content: str | None = None
    tool_calls: list[ToolCall] = []

    @property
    def text(self) -> str:
        if isinstance(self.content, str):
            return self.content
        return "\n".join(part.text for part in self.content or () if part.text is not None)

    @property
    def empty(self) -> bool:
        """Nothing was answered; OpenCode keeps such a message for an attempt that was cut."""
        return not (self.text or self.reasoning_content or self.tool_calls)


class Function(Wire):
    name: str


class Tool(Wire):
    function: Function


class ChatRequest(Wire):
    messages: list[ChatMessage] = Field(min_length=1)
    stream: bool = False
    tools: list[Tool] = []

    @property
    def tool_names(self) -> frozenset[str]:
        return frozenset(tool.function.name for tool in self.tools)

    @property
    def last_result(self) -> str:
        """What the last tool returned."""
        return next((m.text for m in reversed(self.messages) if m.role == "tool"), "")


@dataclass(frozen=True, slots=True)
class CallId:
    """The id of a tool call says which reply made it, so that the reply's place can be read back.

    The attempt keeps ids apart when OpenCode asks for the same reply twice.
    """

    digest: Digest
    reply: int
    attempt: int
    number: int

    def __str__(self) -> str:
        return f"call_{self.digest}_{self.reply}_{self.attempt}_{self.number}"

    @classmethod
    def parse(cls, text: str) -> "CallId | None":
        found = _CALL_ID.fullmatch(text)
        if found is None:
            return None
        reply, attempt, number = (int(found[name]) for name in ("reply", "attempt", "number"))
        return cls(Digest(found["digest"]), reply, attempt, number)


class Tokens(BaseModel):
    """What a reply is said to have cost; OpenAI counts the cached and reasoning tokens within."""

    model_config = ConfigDict(frozen=True, extra="forbid", defer_build=True)

    prompt: int = Field(default=0, ge=0)
    completion: int = Field(default=0, ge=0)
    cached: int = Field(default=0, ge=0)
    reasoning: int = Field(default=0, ge=0)

    def wire(self) -> dict[str, JsonValue]:
        return {
            "prompt_tokens": self.prompt,
            "completion_tokens": self.completion,
            "total_tokens": self.prompt + self.completion,
            "prompt_tokens_details": {"cached_tokens": self.cached},
            "completion_tokens_details": {"reasoning_tokens": self.reasoning},
        }


def error_body(message: str, kind: str = "invalid_request_error", code: str | None = None) -> bytes:
    """An error in OpenAI's shape."""
    return orjson.dumps({"error": {"message": message, "type": kind, "param": None, "code": code}})


_HEAD = (
    b'data: {"id":"chatcmpl-demo","object":"chat.completion.chunk","created":0,"model":"'
    + MODEL.encode()
    + b'","choices":['
)
_DELTA = _HEAD + b'{"index":0,"delta":{'
_OPEN_END = b'},"finish_reason":null}]}\n\n'
OPENING = _DELTA + b'"role":"assistant","content":""' + _OPEN_END
DONE = b"data: [DONE]\n\n"
MALFORMED = b'data: {"id":"chatcmpl-demo","choices":[{oops\n\n'
_TEXT = _DELTA + b'"content":'
_REASONING = _DELTA + b'"reasoning_content":'


def text_chunk(text: str) -> bytes:
    return _TEXT + orjson.dumps(text) + _OPEN_END


def reasoning_chunk(text: str) -> bytes:
    return _REASONING + orjson.dumps(text) + _OPEN_END


def call_chunk(number: int, call_id: str, name: str, arguments: str) -> bytes:
    """The whole call in one chunk, as many compatible servers send it."""
    call = call_object(call_id, name, arguments) | {"index": number}
    return _DELTA + b'"tool_calls":' + orjson.dumps([call]) + _OPEN_END


def call_object(call_id: str, name: str, arguments: str) -> dict[str, JsonValue]:
    return {
        "id": call_id,
        "type": "function",
        "function": {"name": name, "arguments": arguments},
    }


def finish_chunk(reason: FinishReason) -> bytes:
    return _DELTA + b'},"finish_reason":"' + reason.encode() + b'"}]}\n\n'


def usage_chunk(tokens: Tokens) -> bytes:
    return _HEAD + b'],"usage":' + orjson.dumps(tokens.wire()) + b"}\n\n"


def stream_error_chunk(message: str) -> bytes:
    return b"data: " + error_body(message, "server_error", "500") + b"\n\n"


def whole_body(message: dict[str, JsonValue], reason: FinishReason | None, used: Tokens) -> bytes:
    """The answer to a request that did not ask for a stream."""
    return orjson.dumps(
        {
            "id": "chatcmpl-demo",
            "object": "chat.completion",
            "created": 0,
            "model": MODEL,
            "choices": [{"index": 0, "message": message, "finish_reason": reason}],
            "usage": used.wire(),
        }
    )


def models_body() -> bytes:
    model = {"id": MODEL, "object": "model", "created": 0, "owned_by": "opencode-a2a"}
    return orjson.dumps({"object": "list", "data": [model]})
