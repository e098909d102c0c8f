"""Messages and their parts, and what becomes of them: the request that a turn runs.

``a2a`` reads and writes them, ``server.operations`` makes requests of them, and ``tasks`` stores
both: the messages in the log as the history of a task, the request for a restart. Values of data
parts and metadata are kept exactly as they came.
"""

import os
import threading
import time
from dataclasses import dataclass, field
from typing import Any, Literal

from opencode_a2a.events import Json, JsonObject
from opencode_a2a.ids import ALPHABET, MessageId, ModelRef
from opencode_a2a.rights import FULL, Rights

Kind = Literal["text", "raw", "url", "data"]
Delivery = Literal["steer", "queue", "interrupt"]
"""How a running turn gets a further message: at its next step, after its end, or at once, in place
of what it is doing."""
SUBJECT = 120
"""Characters of a subject at most."""


@dataclass(frozen=True, slots=True)
class Part:
    """One piece of content; ``kind`` says which of text, raw, url and data it is."""

    kind: Kind
    text: str | None = None
    raw: str | None = None
    """Base64."""
    url: str | None = None
    data: Json = None
    media_type: str | None = None
    filename: str | None = None
    metadata: JsonObject | None = None


@dataclass(frozen=True, slots=True)
class Message:
    message_id: str
    role: Literal["user", "agent"]
    parts: list[Part]
    metadata: JsonObject | None = None
    extensions: list[str] = field(default_factory=list[str])
    reference_task_ids: list[str] = field(default_factory=list[str])

    @property
    def text(self) -> str:
        """All text parts, a line each."""
        return "\n".join(part.text for part in self.parts if part.text is not None)

    @property
    def subject(self) -> str:
        """One line that tells what the message is about."""
        names = (part.filename or part.media_type or part.kind for part in self.parts)
        text = " ".join(self.text[: 4 * SUBJECT].split()) or ", ".join(names)
        return text if len(text) <= SUBJECT else f"{text[: SUBJECT - 1].rstrip()}…"

    @classmethod
    def load(cls, fields: dict[str, Any]) -> "Message":
        """Build a message from the JSON object that it was stored as."""
        parts: list[Part] = [Part(**part) for part in fields.pop("parts")]
        return cls(parts=parts, **fields)


@dataclass(frozen=True, slots=True)
class Answered:
    """A further message on a task that counted: the answer to an interrupt, or another try."""

    message: Message


@dataclass(frozen=True, slots=True)
class PromptPart:
    """What OpenCode is given: text, or a file as base64 of a media type that it can handle."""

    text: str | None = None
    media_type: str | None = None
    data: str | None = None
    filename: str | None = None


@dataclass(frozen=True, slots=True)
class Routing:
    """Where a turn is to run, as far as the caller says."""

    session_id: str | None = None
    directory: str | None = None
    workspace_id: str | None = None
    model: ModelRef | None = None
    agent: str | None = None
    """Which of OpenCode's agents works on it."""
    command: str | None = None
    """Which of OpenCode's commands is run; the text of the message is its arguments."""
    rights: Rights = FULL
    """What the caller limits the turn to; the credential may allow less."""
    output_schema: JsonObject | None = None
    """What the answer has to fit; it is then data instead of text."""
    plan: bool = False
    """The turn only plans; a person has to approve that before anything is changed."""
    new_task: bool = False
    """The message starts a task even if it could be an answer to one."""
    hops: int = 0
    """How many agents the request went through before it came here."""


ANYWHERE = Routing()
"""The caller does not say where."""


class _MessageIds:
    """Makes OpenCode message ids; each sorts after every one made before it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._last = 0

    def __call__(self) -> MessageId:
        tail = "".join(ALPHABET[byte % 62] for byte in os.urandom(14))
        with self._lock:
            self._last = max(time.time_ns() // 1_000_000 * 4096, self._last + 1)
            return MessageId(f"msg_{self._last % 2**48:012x}{tail}")


new_message_id = _MessageIds()


@dataclass(frozen=True, slots=True)
class TurnRequest:
    """What a turn prompts, and where."""

    prompt: tuple[PromptPart, ...]
    routing: Routing = ANYWHERE
    user_message_id: MessageId = field(default_factory=new_message_id)
    """The id of the prompt in OpenCode: whether it is there tells whether the prompt was sent."""
    rights: Rights = FULL
    """What the turn may do: what credential and caller both allow."""
    delivery: Delivery | None = None
    """How a running turn is to get it; ``steer`` unless the caller says so."""

    @property
    def text(self) -> str:
        return "\n".join(part.text for part in self.prompt if part.text is not None)


@dataclass(frozen=True, slots=True)
class Added:
    """A further message for a turn that runs; OpenCode is given it once this is stored."""

    message: Message
    request: TurnRequest


@dataclass(frozen=True, slots=True)
class PushConfig:
    """A webhook that a caller wants for a task: its URL, and what proves our notifications."""

    url: str
    id: str | None = None
    """The service chooses one if the caller names none."""
    scheme: str | None = None
    """The HTTP authentication scheme; with ``credentials`` it is the Authorization header."""
    credentials: str | None = field(default=None, repr=False)
    token: str | None = field(default=None, repr=False)
    version: str = "1.0"
    """The A2A version of the notifications."""
    within: str = field(default="", compare=False)
    """Prefix of its fields in the request, for errors that name one."""
