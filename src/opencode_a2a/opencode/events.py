"""OpenCode's server-sent events as types.

``opencode.feed`` looks for the session of each frame and decodes only what somebody follows;
``opencode.reader`` consumes the events. Unknown fields and unknown events are ignored, known
ones must be right. Nothing here knows what a turn is.
"""

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import orjson
from pydantic import ValidationError

from opencode_a2a.ids import MessageId, RequestId, SessionId
from opencode_a2a.jsonguard import loads
from opencode_a2a.opencode.types import (
    Message,
    Part,
    PermissionRequest,
    QuestionRequest,
    SessionStatus,
    StatusBusy,
    StatusIdle,
    StatusRetry,
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


class SessionDeleted(Heard):
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


# Most of what a turn hears: plain tuples, made by hand in a third of the time.


class SessionInfo(NamedTuple):
    """What a turn needs to know of a session."""

    title: str
    directory: str
    parent_id: SessionId | None


class SessionChanged(NamedTuple):
    event_id: str
    session_id: SessionId
    info: SessionInfo


class StatusChanged(NamedTuple):
    event_id: str
    session_id: SessionId
    status: SessionStatus


class SessionIdle(NamedTuple):
    event_id: str
    session_id: SessionId


class PartDelta(NamedTuple):
    """Text that a part grew by."""

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
    | SessionDeleted
    | SessionFailed
    | PermissionAsked
    | PermissionReplied
    | QuestionAsked
    | QuestionReplied
    | QuestionRejected
    | TodoUpdated
)
Event = PartDelta | StatusChanged | SessionIdle | SessionChanged | Validated

EVENTS: dict[str, type[Validated]] = {
    "message.part.updated": PartUpdated,
    "message.part.removed": PartRemoved,
    "message.updated": MessageUpdated,
    "message.removed": MessageRemoved,
    "session.deleted": SessionDeleted,
    "session.error": SessionFailed,
    "permission.asked": PermissionAsked,
    "permission.replied": PermissionReplied,
    "question.asked": QuestionAsked,
    "question.replied": QuestionReplied,
    "question.rejected": QuestionRejected,
    "todo.updated": TodoUpdated,
}

_TYPE = b'"type":"'
_SESSION = b'"sessionID":"'
_ITSELF = b'"info":{"id":"'
"""Before 1.4 an event about a session names it only so."""


def session_of(data: bytes) -> bytes:
    """Return the session of an undecoded frame, empty when it has none.

    To decode all that other sessions tell would cost more than everything else. OpenCode writes
    compact JSON. Inside a string every quote is escaped, so that an unescaped key is a key; the
    session comes before anything that a model or a tool wrote.
    """
    for key in (_SESSION, _ITSELF):
        start = data.find(key)
        if start >= 0:
            start += len(key)
            return data[start : data.find(b'"', start)]
    return b""


def type_of(data: bytes) -> bytes:
    """Return the type of an undecoded frame, which comes before its properties."""
    start = data.find(_TYPE) + len(_TYPE)
    return data[start : data.find(b'"', start)]


def decode(data: bytes) -> Event | None:
    """Return the event in one SSE ``data`` field, or None for a type that no turn depends on."""
    try:
        frame = loads(data)
        payload = frame.get("payload", frame)
        # Before 1.4 events have no id.
        event_id = payload.get("id", "")
        make = _BY_HAND.get(payload["type"])
        if make is not None:
            return make(event_id, payload["properties"])
        model = EVENTS.get(payload["type"])
        if model is None:
            return None
        properties = payload["properties"]
        head = {"eventID": event_id, "directory": frame.get("directory")}
        if "sessionID" not in properties:
            head["sessionID"] = _inner_session(properties)
        return model.model_validate(properties | head)
    except (orjson.JSONDecodeError, ValidationError, KeyError, TypeError, AttributeError) as error:
        # The text of a validation error repeats the payload, which is the user's.
        raise MalformedEventError(type(error).__name__) from error


def _inner_session(properties: dict[str, Any]) -> str | None:
    """Return the session of an event that names it only inside (before 1.4)."""
    match properties:
        case {"part": {"sessionID": str(session)}}:
            return session
        case {"info": {"sessionID": str(session)} | {"id": str(session)}}:
            return session
        case _:
            return None


# Adding an empty text refuses what is no text.


def _delta(event_id: str, properties: dict[str, str]) -> PartDelta | None:
    if properties["field"] != "text":
        return None
    return PartDelta(
        event_id,
        SessionId(properties["sessionID"]),
        MessageId(properties["messageID"]),
        properties["partID"],
        properties["delta"] + "",
    )


def _status(event_id: str, properties: dict[str, Any]) -> StatusChanged:
    match properties["status"]:
        case {"type": "busy"}:
            status = _BUSY
        case {"type": "idle"}:
            status = _IDLE
        case other:
            status = StatusRetry.model_validate(other)
    return StatusChanged(event_id, SessionId(properties["sessionID"] + ""), status)


def _idle(event_id: str, properties: dict[str, str]) -> SessionIdle:
    return SessionIdle(event_id, SessionId(properties["sessionID"] + ""))


def _session(event_id: str, properties: dict[str, Any]) -> SessionChanged:
    info = properties["info"]
    known = SessionInfo(info["title"] + "", info["directory"] + "", info.get("parentID"))
    session = properties["sessionID"] if "sessionID" in properties else info["id"]
    return SessionChanged(event_id, SessionId(session + ""), known)


_BUSY, _IDLE = StatusBusy(), StatusIdle()
_BY_HAND: dict[str, Callable[[str, dict[str, Any]], Event | None]] = {
    "message.part.delta": _delta,
    "session.status": _status,
    "session.idle": _idle,
    "session.created": _session,
    "session.updated": _session,
}
FOLLOWED = frozenset(name.encode() for name in (*_BY_HAND, *EVENTS))
"""The types that ``decode`` returns an event for, as they stand in a frame."""


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
