"""The types of OpenCode's server-sent events, and their decoding.

``opencode.feed`` finds the session of each frame and decodes only the events of sessions that are
followed; ``opencode.turn_state`` consumes them. Unknown fields and unknown events are ignored; a
known event that is malformed is an error. Nothing here knows what a turn is.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

from opencode_a2a.events import JsonObject, Resolution
from opencode_a2a.ids import MessageId, RequestId, SessionId
from opencode_a2a.jsonguard import loads
from opencode_a2a.opencode.types import (
    Message,
    Part,
    PermissionRequest,
    QuestionRequest,
    ReasoningPart,
    SessionStatus,
    StatusBusy,
    StatusIdle,
    StatusRetry,
    TextPart,
    TurnError,
    Wire,
)


class MalformedEventError(ValueError):
    """A known event has another form than OpenCode should send."""

    def __init__(self, cause: Exception) -> None:
        # The text of a validation error repeats the payload, which is the user's.
        what = f": {cause.args[0]!r:.80}" if isinstance(cause, KeyError) else ""
        super().__init__(f"{type(cause).__name__}{what}")


class SessionEvent(Wire):
    """Base of the events of a session; ``directory`` is known on the global stream only."""

    event_id: str = ""
    directory: str | None = None
    session_id: SessionId


class SessionDeleted(SessionEvent):
    pass


class SessionFailed(SessionEvent):
    """An error, which need not end the turn: the stored message decides."""

    error: TurnError | None = None


class MessageUpdated(SessionEvent):
    info: Message


class MessageRemoved(SessionEvent):
    message_id: MessageId


class PartUpdated(SessionEvent):
    part: Part


class PartRemoved(SessionEvent):
    message_id: MessageId
    part_id: str


# The frequent events are plain tuples, decoded by hand in a third of the time.


class SessionInfo(NamedTuple):
    """The fields of a session that a turn needs."""

    title: str
    directory: str
    parent_id: SessionId | None


class SessionChanged(NamedTuple):
    event_id: str
    session_id: SessionId
    info: SessionInfo


class SessionStatusChanged(NamedTuple):
    event_id: str
    session_id: SessionId
    status: SessionStatus


class PartDelta(NamedTuple):
    """Text that was added to a part."""

    event_id: str
    session_id: SessionId
    message_id: MessageId
    part_id: str
    delta: str


class HeardText(NamedTuple):
    """The text of a part that is being written, as far as the feed has heard it without a gap.

    The feed itself makes it, for a follower that begins in the middle of the part.
    """

    event_id: str
    session_id: SessionId
    message_id: MessageId
    part_id: str
    pieces: Mapping[str, str]
    """By the ids of their events, in order."""
    start: TextPart | ReasoningPart | None
    """The part as it began; None if pieces are missing between that and the first."""


class Missed(NamedTuple):
    """Something that cannot be told without an event that was missed: only the store can tell."""

    event_id: str
    session_id: SessionId


class RequestSettled(NamedTuple):
    """A permission or question was answered, by this service or by another client."""

    event_id: str
    session_id: SessionId
    request_id: RequestId
    type: Literal["permission", "question"]
    resolution: Resolution


class PermissionAsked(PermissionRequest, SessionEvent):
    pass


class QuestionAsked(QuestionRequest, SessionEvent):
    pass


Validated = (
    PartUpdated
    | PartRemoved
    | MessageUpdated
    | MessageRemoved
    | SessionDeleted
    | SessionFailed
    | PermissionAsked
    | QuestionAsked
)
Event = (
    PartDelta
    | HeardText
    | SessionStatusChanged
    | SessionChanged
    | RequestSettled
    | Missed
    | Validated
)

EVENTS: dict[str, type[Validated]] = {
    "message.part.updated": PartUpdated,
    "message.part.removed": PartRemoved,
    "message.updated": MessageUpdated,
    "message.removed": MessageRemoved,
    "session.deleted": SessionDeleted,
    "session.error": SessionFailed,
    "permission.asked": PermissionAsked,
    "question.asked": QuestionAsked,
}

BY_HAND = frozenset(
    {
        "message.part.delta",
        "session.created",
        "session.updated",
        "session.status",
        "session.idle",
        "permission.replied",
        "question.replied",
        "question.rejected",
    }
)
FOLLOWED = frozenset(name.encode() for name in (*BY_HAND, *EVENTS))
"""The event types that ``decode`` knows, as they stand in a frame."""

_BUSY, _IDLE = StatusBusy(), StatusIdle()
_RESOLUTIONS: dict[str, Resolution] = {
    "once": "once",
    "always": "always",
    "reject": "rejected",
    "question.replied": "replied",
    "question.rejected": "rejected",
}
_TYPE = b'"type":"'
_SESSION = b'"sessionID":"'
_PARENT = b'"parentID":"'
_ITSELF = b'"info":{"id":"'
"""Where an event about a session itself has the session's id before 1.4."""


def head_of(data: bytes) -> tuple[bytes, bytes]:
    """Return the type and the session of an undecoded frame; the session may be empty.

    Decoding the events of sessions that nobody follows would cost more than everything else.
    Searching the bytes is safe: OpenCode writes compact JSON, every quote inside a string is
    escaped, and type and session come before anything that a model or a tool wrote.
    """
    start = data.find(_TYPE) + len(_TYPE)
    kind = data[start : data.find(b'"', start)]
    for key in (_SESSION, _ITSELF):
        start = data.find(key)
        if start >= 0:
            start += len(key)
            return kind, data[start : data.find(b'"', start)]
    return kind, b""


def parent_in(data: bytes) -> bytes:
    """Return the parent that an undecoded frame about a session names; empty if it has none."""
    start = data.find(_PARENT)
    if start < 0:
        return b""
    start += len(_PARENT)
    return data[start : data.find(b'"', start)]


def decode(data: bytes) -> Event | None:
    """Return the event in one SSE ``data`` field; None if its type does not matter to turns."""
    try:
        frame = loads(data)
        payload = frame.get("payload", frame)
        # Before 1.4 events have no id.
        kind, event_id = payload["type"], payload.get("id", "")
        if kind in BY_HAND:
            return _by_hand(kind, event_id, payload["properties"])
        model = EVENTS.get(kind)
        if model is None:
            return None
        properties = payload["properties"]
        head = {"eventID": event_id, "directory": frame.get("directory")}
        if "sessionID" not in properties:
            # Before 1.4 only the part or the info in the event names the session.
            match properties:
                case {"part": {"sessionID": str(session)}}:
                    head["sessionID"] = session
                case {"info": {"sessionID": str(session)} | {"id": str(session)}}:
                    head["sessionID"] = session
                case _:
                    pass
        return model.model_validate(properties | head)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise MalformedEventError(error) from error


def _by_hand(kind: str, event_id: str, properties: dict[str, Any]) -> Event | None:
    # Adding an empty string raises TypeError for a value that is not a string.
    match kind:
        case "message.part.delta":
            if properties["field"] != "text":
                return None
            return PartDelta(
                event_id,
                SessionId(properties["sessionID"]),
                MessageId(properties["messageID"]),
                properties["partID"],
                properties["delta"] + "",
            )
        case "session.created" | "session.updated":
            info = properties["info"]
            known = SessionInfo(info["title"] + "", info["directory"] + "", info.get("parentID"))
            session = properties["sessionID"] if "sessionID" in properties else info["id"]
            return SessionChanged(event_id, SessionId(session + ""), known)
        case "session.status" | "session.idle":
            match properties["status"] if kind == "session.status" else {"type": "idle"}:
                case {"type": "busy"}:
                    status = _BUSY
                case {"type": "idle"}:
                    status = _IDLE
                case other:
                    status = StatusRetry.model_validate(other)
            return SessionStatusChanged(event_id, SessionId(properties["sessionID"] + ""), status)
        case "permission.replied" | "question.replied" | "question.rejected":
            permission = kind == "permission.replied"
            return RequestSettled(
                event_id,
                SessionId(properties["sessionID"] + ""),
                RequestId(properties["requestID"] + ""),
                "permission" if permission else "question",
                _RESOLUTIONS[properties["reply"] if permission else kind],
            )
        case _:
            raise ValueError(f"no case for an event of the type {kind}")


class Decoder1:
    """The decoder of OpenCode 1, whose events need no memory."""

    connected = b"server.connected"
    disposed = frozenset({b"server.instance.disposed", b"global.disposed"})
    followed = FOLLOWED
    overheard = frozenset(
        {
            b"message.part.delta",
            b"message.part.updated",
            b"session.status",
            b"session.idle",
            b"session.deleted",
        }
    )

    head = staticmethod(head_of)

    def parent(self, kind: bytes, data: bytes) -> bytes:
        return parent_in(data) if kind in (b"session.created", b"session.updated") else b""

    def decode(self, data: bytes) -> Sequence[Event]:
        event = decode(data)
        return () if event is None else (event,)


def child_session(tool: str, metadata: JsonObject | None) -> SessionId | None:
    """Return the session of the sub-agent that a call of the tool ``task`` runs, if it is one."""
    match metadata:
        case {"sessionId": str(child)} if tool == "task":
            return SessionId(child)
        case _:
            return None
