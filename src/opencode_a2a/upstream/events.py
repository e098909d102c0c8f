"""OpenCode's server-sent events as types.

``upstream.feed`` looks for the session of each frame and decodes only what somebody follows;
``upstream.reader`` consumes the events. Unknown fields and unknown events are ignored, known
ones must be right. Nothing here knows what a turn is.
"""

from typing import Literal, NamedTuple

import orjson
from pydantic import ValidationError

from opencode_a2a.ids import MessageId, RequestId, SessionId
from opencode_a2a.upstream.models import (
    Message,
    Part,
    PermissionRequest,
    QuestionRequest,
    Session,
    SessionStatus,
    Todo,
    ToolCompleted,
    ToolFailed,
    ToolPart,
    ToolRunning,
    TurnError,
    Wire,
)


class MalformedEventError(ValueError):
    """A known event that is not what this version of OpenCode should send."""


class Heard(Wire):
    """What every event of a session has; ``directory`` is known on the global stream only."""

    event_id: str = ""
    directory: str | None = None
    session_id: SessionId


class SessionChanged(Heard):
    info: Session


class SessionDeleted(Heard):
    pass


class StatusChanged(Heard):
    status: SessionStatus


class SessionIdle(Heard):
    pass


class SessionFailed(Heard):
    """An error that need not be the end of the turn; the stored message decides."""

    error: TurnError | None = None


class MessageUpdated(Heard):
    info: Message


class MessageRemoved(Heard):
    message_id: MessageId


class PartUpdated(Heard):
    part: Part


class PartRemoved(Heard):
    message_id: MessageId
    part_id: str


class PartDelta(NamedTuple):
    """Text that a part grew by; a plain tuple, as this is most of what a turn hears."""

    event_id: str
    session_id: SessionId
    message_id: MessageId
    part_id: str
    delta: str


class PermissionAsked(PermissionRequest, Heard):
    pass


class PermissionReplied(Heard):
    request_id: RequestId
    reply: Literal["once", "always", "reject"]


class QuestionAsked(QuestionRequest, Heard):
    pass


class QuestionReplied(Heard):
    request_id: RequestId


class QuestionRejected(Heard):
    request_id: RequestId


class TodoUpdated(Heard):
    todos: list[Todo]


Validated = (
    PartUpdated
    | PartRemoved
    | MessageUpdated
    | MessageRemoved
    | SessionChanged
    | SessionDeleted
    | SessionFailed
    | SessionIdle
    | StatusChanged
    | PermissionAsked
    | PermissionReplied
    | QuestionAsked
    | QuestionReplied
    | QuestionRejected
    | TodoUpdated
)
Event = PartDelta | Validated

EVENTS: dict[str, type[Validated]] = {
    "message.part.updated": PartUpdated,
    "message.part.removed": PartRemoved,
    "message.updated": MessageUpdated,
    "message.removed": MessageRemoved,
    "session.created": SessionChanged,
    "session.updated": SessionChanged,
    "session.deleted": SessionDeleted,
    "session.error": SessionFailed,
    "session.idle": SessionIdle,
    "session.status": StatusChanged,
    "permission.asked": PermissionAsked,
    "permission.replied": PermissionReplied,
    "question.asked": QuestionAsked,
    "question.replied": QuestionReplied,
    "question.rejected": QuestionRejected,
    "todo.updated": TodoUpdated,
}

FOLLOWED = frozenset(name.encode() for name in ("message.part.delta", *EVENTS))
"""The types that ``decode`` returns an event for, as they stand in a frame."""

_TYPE = b'"type":"'
_SESSION = b'"sessionID":"'


def session_of(data: bytes) -> bytes:
    """Return the session of an undecoded frame, empty when it has none.

    To decode all that other sessions tell would cost more than everything else. OpenCode writes
    compact JSON. Inside a string every quote is escaped, so that an unescaped key is a key; the
    session comes before anything that a model or a tool wrote.
    """
    start = data.find(_SESSION)
    if start < 0:
        return b""
    start += len(_SESSION)
    return data[start : data.find(b'"', start)]


def type_of(data: bytes) -> bytes:
    """Return the type of an undecoded frame, which comes before its properties."""
    start = data.find(_TYPE) + len(_TYPE)
    return data[start : data.find(b'"', start)]


def decode(data: bytes) -> Event | None:
    """Return the event in one SSE ``data`` field, or None for a type that no turn depends on."""
    try:
        frame = orjson.loads(data)
        payload = frame.get("payload", frame)
        if payload["type"] == "message.part.delta":
            return _delta(payload["id"], payload["properties"])
        model = EVENTS.get(payload["type"])
        if model is None:
            return None
        head = {"eventID": payload["id"], "directory": frame.get("directory")}
        return model.model_validate(payload["properties"] | head)
    except (orjson.JSONDecodeError, ValidationError, KeyError, TypeError, AttributeError) as error:
        # The text of a validation error repeats the payload, which is the user's.
        raise MalformedEventError(type(error).__name__) from error


def _delta(event_id: str, properties: dict[str, str]) -> PartDelta | None:
    if properties["field"] != "text":
        return None
    return PartDelta(
        event_id,
        SessionId(properties["sessionID"]),
        MessageId(properties["messageID"]),
        properties["partID"],
        properties["delta"] + "",  # refuses what is no text
    )


def child_session(part: ToolPart) -> SessionId | None:
    """Return the session of the sub-agent that a call of the task tool runs."""
    match part:
        case ToolPart(
            tool="task",
            state=ToolRunning(metadata={"sessionId": str(child)})
            | ToolCompleted(metadata={"sessionId": str(child)})
            | ToolFailed(metadata={"sessionId": str(child)}),
        ):
            return SessionId(child)
        case _:
            return None
