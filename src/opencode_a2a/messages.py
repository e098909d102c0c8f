"""Messages with their parts, and the requests for turns that are made of them.

``a2a`` reads and writes messages, ``server.operations`` makes requests of them, and ``tasks``
stores both: messages in the log, as the history of a task, and the request of the latest turn with
the task, for a restart. Values of data parts and metadata are kept exactly as they came.
"""

import hmac
import random
import threading
import time
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from opencode_a2a.events import Json, JsonObject, load_known
from opencode_a2a.ids import ALPHABET, MessageId, ModelRef
from opencode_a2a.rights import FULL, Rights
from opencode_a2a.validation import FREE, FREE_OBJECT

Kind = Literal["text", "raw", "url", "data"]
Delivery = Literal["steer", "queue", "interrupt"]
"""When a running turn gets a further message: at its next step, after its end, or at once, which
aborts its current step."""
SUBJECT = 120
"""The longest subject, in characters."""


@dataclass(frozen=True, slots=True)
class Part:
    """One piece of content; ``kind`` says which of text, raw, url and data it is."""

    kind: Kind
    text: str | None = None
    raw: str | None = None
    """Base64."""
    url: str | None = None
    data: Annotated[Json, FREE] = None
    media_type: str | None = None
    filename: str | None = None
    metadata: Annotated[JsonObject, FREE_OBJECT] | None = None


@dataclass(frozen=True, slots=True)
class Message:
    message_id: str
    role: Literal["user", "agent"]
    parts: list[Part]
    metadata: Annotated[JsonObject, FREE_OBJECT] | None = None
    extensions: list[str] = field(default_factory=list[str])
    reference_task_ids: list[str] = field(default_factory=list[str])

    @property
    def text(self) -> str:
        """All text parts, a line each."""
        return "\n".join(part.text for part in self.parts if part.text is not None)

    @property
    def subject(self) -> str:
        """The beginning of the text in one line, or else the names of the files."""
        names = (part.filename or part.media_type or part.kind for part in self.parts)
        words = " ".join(part.text or "" for part in self.parts)[: 4 * SUBJECT].split()
        text = " ".join(words) or ", ".join(names)
        return text if len(text) <= SUBJECT else f"{text[: SUBJECT - 1].rstrip()}…"

    @classmethod
    def load(cls, fields: dict[str, Any]) -> "Message":
        """Build a message from the JSON object that it was stored as."""
        parts = [load_known(Part, part) for part in fields["parts"]]
        return load_known(cls, {**fields, "parts": parts})


@dataclass(frozen=True, slots=True)
class Answered:
    """A further message on a task that took effect: an answer, or a retry after a sign-in."""

    message: Message


@dataclass(frozen=True, slots=True)
class PromptPart:
    """A part of a prompt: text, or a base64 file of a media type that OpenCode can handle."""

    text: str | None = None
    media_type: str | None = None
    data: str | None = None
    filename: str | None = None


@dataclass(frozen=True, slots=True)
class Routing:
    """Where and how a turn is to run, as far as the caller says."""

    session_id: str | None = None
    directory: str | None = None
    workspace_id: str | None = None
    model: ModelRef | None = None
    agent: str | None = None
    """The name of the OpenCode agent that works on it."""
    command: str | None = None
    """The name of an OpenCode command to run; the text of the message is its arguments."""
    rights: Rights = FULL
    """The rights to which the caller limits the turn; the credential may allow less."""
    output_schema: Annotated[JsonObject, FREE_OBJECT] | None = None
    """A JSON schema for the answer, which is then data instead of text."""
    plan: bool = False
    """Whether the turn only plans; a person has to approve the plan before anything is changed."""
    new_task: bool = False
    """Whether the message starts a task even if it could answer one."""
    hops: int = 0
    """The number of agents that the request has passed through."""


NO_ROUTING = Routing()
"""The routing of a message that does not say where or how to run."""


class MessageIds:
    """Makes OpenCode message ids. Each sorts after all ids made before it.

    An id ends with a mark that only a process with the same key can make. So a prompt of this
    service can be told from one that somebody else gave to the same OpenCode.
    """

    def __init__(self, key: bytes) -> None:
        """``key`` is kept in the database, so that all processes that use it have the same."""
        self._lock = threading.Lock()
        self._last = 0
        self._keyed = hmac.new(key, b"prompt ", "sha256")

    def __call__(self) -> MessageId:
        drawn = _characters(random.randbytes(_HALF))  # noqa: S311 - the mark is the secret
        with self._lock:
            self._last = max(time.time_ns() // 1_000_000 * 4096, self._last + 1)
            made = f"msg_{self._last % 2**48:012x}{drawn}"
        return MessageId(made + self._mark(made))

    def made(self, message_id: MessageId) -> bool:
        """Whether an id was made with this key; one in 62 ** 7 others looks as if."""
        return hmac.compare_digest(message_id[-_HALF:], self._mark(message_id[:-_HALF]))

    def _mark(self, made: str) -> str:
        # Unlike ``hmac.digest``, this does not hand the interpreter to another thread.
        keyed = self._keyed.copy()
        keyed.update(made.encode())
        return _characters(keyed.digest()[:_HALF])


_HALF = 7
"""OpenCode's ids end with 14 characters: half of them are random in ours, half are the mark."""


def _characters(data: bytes) -> str:
    return "".join(ALPHABET[byte % 62] for byte in data)


@dataclass(frozen=True, slots=True)
class TurnRequest:
    """A turn to run: the prompt, and where and how to run it."""

    prompt: tuple[PromptPart, ...]
    user_message_id: MessageId
    """The id of the prompt in OpenCode: if OpenCode has it, the prompt was sent."""
    routing: Routing = NO_ROUTING
    rights: Rights = FULL
    """The rights of the turn: those that credential and caller both allow."""
    delivery: Delivery | None = None
    """When a running turn gets it; None if the caller does not say, which means ``steer``."""

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
