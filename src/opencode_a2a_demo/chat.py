"""The part of OpenAI's chat completion wire that OpenCode uses, as types and as bytes.

``server`` reads requests and writes answers with this; ``script`` and ``answers`` read the
messages. Nothing here knows what will be answered.
"""

import re
from typing import Literal, NamedTuple

import orjson
from pydantic import BaseModel, ConfigDict, Field, JsonValue

MODEL = "demo"
FinishReason = Literal["stop", "length", "content_filter", "tool_calls"]

_CALL_ID = re.compile(r"call_([0-9a-f]+)_(\d+)_(\d+)_(\d+)")


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


class CallId(NamedTuple):
    """The id of a tool call says which reply made it, so that the reply's place can be read back.

    The attempt keeps ids apart when OpenCode asks for the same reply twice.
    """

    digest: str
    reply: int
    attempt: int
    number: int

    def __str__(self) -> str:
        return f"call_{self.digest}_{self.reply}_{self.attempt}_{self.number}"

    @classmethod
    def parse(cls, text: str) -> "CallId | None":
        found = _CALL_ID.fullmatch(text)
        return cls(found[1], int(found[2]), int(found[3]), int(found[4])) if found else None


class Tokens(BaseModel):
    """What a reply is said to have cost; OpenAI counts the cached and reasoning tokens within."""

    model_config = ConfigDict(frozen=True, extra="forbid", defer_build=True)

    prompt: int = Field(default=0, ge=0)
    completion: int = Field(default=0, ge=0)
    cached: int = Field(default=0, ge=0)
    reasoning: int = Field(default=0, ge=0)
    raw: dict[str, JsonValue] = {}
    """Fields of the wire that replace these figures, for what a provider should not say."""

    def wire(self) -> dict[str, JsonValue]:
        return {
            "prompt_tokens": self.prompt,
            "completion_tokens": self.completion,
            "total_tokens": self.prompt + self.completion,
            "prompt_tokens_details": {"cached_tokens": self.cached},
            "completion_tokens_details": {"reasoning_tokens": self.reasoning},
            **self.raw,
        }


def error_body(message: str, kind: str = "invalid_request_error", code: str | None = None) -> bytes:
    """An error in OpenAI's shape."""
    return orjson.dumps({"error": {"message": message, "type": kind, "param": None, "code": code}})


_CHUNK = {"id": "chatcmpl-demo", "object": "chat.completion.chunk", "created": 0, "model": MODEL}
MALFORMED = b'data: {"id":"chatcmpl-demo","choices":[{oops\n\n'


def delta_chunk(delta: dict[str, JsonValue], reason: FinishReason | None = None) -> bytes:
    choice = {"index": 0, "delta": delta, "finish_reason": reason}
    return _event(orjson.dumps({**_CHUNK, "choices": [choice]}))


def last_chunks(used: Tokens) -> bytes:
    return _event(orjson.dumps({**_CHUNK, "choices": [], "usage": used.wire()})) + _event(b"[DONE]")


def stream_error_chunk(message: str) -> bytes:
    return _event(error_body(message, "server_error", "500"))


def _event(data: bytes) -> bytes:
    return b"data: " + data + b"\n\n"


def whole_body(message: dict[str, JsonValue], reason: FinishReason | None, used: Tokens) -> bytes:
    """The answer to a request that did not ask for a stream."""
    choice = {"index": 0, "message": message, "finish_reason": reason}
    head = {**_CHUNK, "object": "chat.completion"}
    return orjson.dumps({**head, "choices": [choice], "usage": used.wire()})
