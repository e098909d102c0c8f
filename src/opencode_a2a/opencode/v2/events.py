"""The events of OpenCode 2, as those that the turn reader knows.

An event of 2.x leaves out what earlier ones said: an answer does not name its prompt, the end of a
tool call not its input. So a ``Decoder2`` remembers that, for the length of one connection. Where
the earlier event was missed, it tells just that (``Missed``), and the turn reader reads the store.
Nothing here knows what a turn is.

A session of 2.x may continue by itself: a command or a sub-agent that the model has put into the
background reports its end by a message of its own, and the model is asked again. Until then the
session is not told to be idle, although its execution is over.
"""

from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import structlog

from opencode_a2a.bounds import Recent
from opencode_a2a.events import Resolution
from opencode_a2a.ids import MessageId, RequestId, SessionId
from opencode_a2a.jsonguard import loads
from opencode_a2a.opencode.events import (
    Event,
    MalformedEventError,
    MessageUpdated,
    Missed,
    PartDelta,
    PartUpdated,
    PermissionAsked,
    QuestionAsked,
    RequestSettled,
    SessionChanged,
    SessionDeleted,
    SessionFailed,
    SessionInfo,
    SessionStatusChanged,
    head_of,
    parent_in,
)
from opencode_a2a.opencode.types import (
    AssistantMessage,
    Message,
    MessageTime,
    MessageWithParts,
    Part,
    SessionStatus,
    StatusBusy,
    StatusIdle,
    StatusRetry,
)
from opencode_a2a.opencode.v2.messages import (
    REFUSED,
    Call2,
    Failure2,
    Form2,
    Permission2,
    compaction,
    left_in_background,
    permission_of,
    prompt_message,
    question_of,
    reasoning_part,
    step_finish,
    step_start,
    text_part,
    tool_part,
    turn_error,
    unreported,
)
from opencode_a2a.opencode.v2.outputs import Running

logger = structlog.get_logger(__name__)

KNOWN_SESSIONS: Final = 10_000
"""Sessions that a connection remembers something about."""
_BUSY, _IDLE = StatusBusy(), StatusIdle()
_TEXTS: Final = frozenset(
    f"session.{kind}.{what}"
    for kind in ("text", "reasoning")
    for what in ("started", "delta", "ended")
)
_ENDS: Final = frozenset(
    {
        "session.execution.succeeded",
        "session.execution.failed",
        "session.execution.interrupted",
    }
)
_TOOLS: Final = {
    "session.tool.input.started": "streaming",
    "session.tool.called": "running",
    "session.tool.progress": "running",
    "session.tool.success": "completed",
    "session.tool.failed": "error",
}
_REQUESTS: Final = frozenset(
    {
        "permission.asked",
        "permission.replied",
        "form.created",
        "form.replied",
        "form.cancelled",
    }
)
_OTHERS: Final = frozenset(
    {
        "session.created",
        "session.renamed",
        "session.deleted",
        "session.inbox.enqueued",
        "session.inbox.delivered",
        "session.input.admitted",
        "session.input.promoted",
        "session.execution.started",
        "session.retry.scheduled",
        "session.compaction.started",
        "session.compaction.ended",
        "session.compaction.failed",
        "session.step.started",
        "session.step.ended",
        "session.step.failed",
    }
)
_IGNORED: Final = frozenset(
    {
        "session.agent.selected",
        "session.compacted",
        "session.compaction.admitted",
        "session.compaction.delta",
        "session.forked",
        "session.idle",
        "session.instructions.updated",
        "session.model.selected",
        "session.moved",
        "session.revert.cleared",
        "session.revert.committed",
        "session.revert.staged",
        "session.shell.ended",
        "session.shell.started",
        "session.skill.activated",
        "session.status",
        "session.synthetic",
        "session.tool.input.delta",
        "session.tool.input.ended",
        "session.usage.recorded",
        "session.usage.updated",
    }
)
"""What is known and does not matter: another event, or the store, says the same."""
_REPLIES: Final[Mapping[str, Resolution]] = {
    "once": "once",
    "always": "always",
    "reject": "rejected",
}


@dataclass(slots=True)
class KnownCall:
    """What is known of a tool call that has not ended."""

    name: str
    input: dict[str, Any]


KnownCalls = MutableMapping[tuple[str, str], KnownCall]
"""By the ids of message and call."""


@dataclass(slots=True)
class _Session:
    """What earlier events said about a session."""

    title: str = ""
    directory: str = ""
    parent_id: SessionId | None = None
    inbox: dict[str, dict[str, Any]] = field(default_factory=dict[str, dict[str, Any]])
    """Prompts that the model has not been given yet."""
    steps: dict[str, AssistantMessage] = field(default_factory=dict[str, AssistantMessage])
    """The answers that are being written."""
    starts: dict[str, int] = field(default_factory=dict[str, int])
    """How often each of them was begun: more than once if the provider failed."""
    refused: set[str] = field(default_factory=set[str])
    """Answers with a tool call that a person refused."""
    compaction: MessageId | None = None

    def forget_execution(self) -> None:
        """Forget what only matters while the session works."""
        self.steps.clear()
        self.starts.clear()
        self.refused.clear()


class Decoder2:
    """The decoder of one connection to an OpenCode 2."""

    connected = b"server.connected"
    disposed = frozenset({b"global.disposed"})
    followed = frozenset(name.encode() for name in (*_TEXTS, *_ENDS, *_TOOLS, *_REQUESTS, *_OTHERS))
    overheard = frozenset(
        name.encode()
        for name in (
            *_TEXTS,
            *_ENDS,
            "session.inbox.delivered",
            "session.input.promoted",
            "session.step.started",
            "session.retry.scheduled",
            "session.deleted",
        )
    )

    def __init__(
        self,
        prompts: MutableMapping[SessionId, MessageId],
        calls: KnownCalls,
        running: MutableMapping[str, Running],
        background: MutableMapping[SessionId, dict[str, str]],
    ) -> None:
        """Note the last prompt of each session, tool ``calls``, and ``running`` commands by id.

        The work of each session in the ``background`` is noted by the ids of its commands or
        sessions, with those of its tool calls.
        """
        self._prompts = prompts
        self._calls = calls
        self._running = running
        self._background = background
        self._sessions = Recent[SessionId, _Session](KNOWN_SESSIONS)
        self._known = {*self.followed, *(name.encode() for name in _IGNORED)}

    def head(self, data: bytes) -> tuple[bytes, bytes]:
        kind, session = head_of(data)
        if kind not in self._known:
            self._known.add(kind)
            if kind.startswith((b"session.", b"permission.", b"form.")):
                # Perhaps a new name for an event that turns need: they would end late and silent.
                logger.warning("OpenCode 2 sends events of an unknown type", type=kind.decode())
        return kind, session

    def parent(self, kind: bytes, data: bytes) -> bytes:
        return parent_in(data) if kind == b"session.created" else b""

    def decode(self, data: bytes) -> Sequence[Event]:
        try:
            frame = loads(data)
            kind, event_id, given = frame["type"], frame["id"] + "", frame["data"]
            session = given.get("sessionID") or given["form"]["sessionID"]
            return [*self._events(kind, event_id, SessionId(session + ""), frame, given)]
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            # The text of a validation error repeats the payload, which is the user's.
            raise MalformedEventError(type(error).__name__) from error

    def _events(
        self,
        kind: str,
        event_id: str,
        session: SessionId,
        frame: dict[str, Any],
        data: dict[str, Any],
    ) -> Iterator[Event]:
        if kind in ("session.text.delta", "session.reasoning.delta"):
            message = MessageId(data["assistantMessageID"])
            part_id = f"{message}:{kind[8]}{data['ordinal']}"
            yield PartDelta(event_id, session, message, part_id, data["delta"] + "")
            return
        state = self._sessions.get(session)
        if state is None:
            state = self._sessions[session] = _Session()
        at = round(frame.get("created") or 0)
        tell = _Tell(event_id, session)
        if kind in _TEXTS:
            yield tell.part(_text(kind, session, data))
        elif kind in _TOOLS:
            yield self._tool(kind, state, tell, frame, data)
        elif kind in _REQUESTS:
            yield _request(kind, tell, frame, data)
        elif kind.startswith("session.step."):
            yield from self._step(kind, state, tell, at, data)
        elif kind.startswith(("session.inbox.", "session.input.")):
            yield from self._prompt(kind, state, tell, at, data)
        elif kind.startswith("session.compaction."):
            yield from _compaction(kind, state, tell, at, data)
        elif kind.startswith("session.execution."):
            self._forget_commands(session)
            yield from self._execution(kind, state, tell, data)
        elif kind == "session.retry.scheduled":
            words = turn_error(Failure2.model_validate(data["error"])).data.message or ""
            yield tell.status(
                StatusRetry(attempt=data["attempt"] - 1, message=words, next=data["at"])
            )
        elif kind == "session.deleted":
            del self._sessions[session]
            self._background.pop(session, None)
            self._forget_commands(session)
            yield SessionDeleted(event_id=event_id, session_id=session)
        else:
            yield _named(kind, state, tell, frame, data)

    def _prompt(
        self, kind: str, state: _Session, tell: "_Tell", at: int, data: dict[str, Any]
    ) -> Iterator[Event]:
        """Tell of a prompt once the model is given it; before that it is only in the inbox."""
        inbox_id = data.get("inboxID") or data["inputID"]
        if kind in ("session.inbox.enqueued", "session.input.admitted"):
            state.inbox[inbox_id] = data.get("item") or data.get("input") or data
            return
        item = state.inbox.pop(inbox_id, None)
        if item is None:
            # It came before this connection, or while nobody followed. The answers that come now
            # are to it, unless it is no prompt, and the store knows what it says.
            self._prompts[tell.session] = MessageId(inbox_id)
            yield tell.missed()
            return
        if item["type"] not in ("user", "synthetic"):
            return
        message = self._prompts[tell.session] = MessageId(inbox_id)
        payload = _object(item, "payload") or _object(item, "data")
        text, synthetic = payload.get("text", "") + "", item["type"] == "synthetic"
        if synthetic:
            self._background[tell.session] = unreported(
                self._background.get(tell.session) or {}, text
            )
        yield from tell.message(prompt_message(tell.session, message, at, text, synthetic))

    def _step(
        self, kind: str, state: _Session, tell: "_Tell", at: int, data: dict[str, Any]
    ) -> Iterator[Event]:
        session, message = tell.session, MessageId(data["assistantMessageID"])
        if kind == "session.step.started":
            model, prompt = _object(data, "model"), self._prompts.get(session)
            if prompt is None:
                yield tell.missed()
            else:
                known = state.steps.get(message)
                state.steps[message] = AssistantMessage(
                    id=message,
                    session_id=session,
                    parent_id=known.parent_id if known else prompt,
                    time=known.time if known else MessageTime(created=at),
                    provider_id=model.get("providerID"),
                    model_id=model.get("id"),
                    agent=data.get("agent"),
                )
                yield tell.info(state.steps[message])
            number = state.starts[message] = state.starts.get(message, 0) + 1
            yield tell.part(step_start(session, message, number))
            return
        known = state.steps.pop(message, None)
        refused, error = message in state.refused, data.get("error")
        failure = turn_error(Failure2.model_validate(error)) if error and not refused else None
        finish = "tool-calls" if refused else data.get("finish")
        if kind == "session.step.ended":
            yield tell.part(step_finish(session, message, data.get("finish") or ""))
        if known is None:
            yield tell.missed()
            return
        ended = AssistantMessage.model_validate(
            {
                **known.model_dump(exclude={"time", "cost", "tokens", "finish", "error"}),
                "time": {"created": known.time.created, "completed": at},
                "cost": data.get("cost"),
                "tokens": data.get("tokens"),
                "finish": None if finish == "error" else finish,
                "error": failure,
            }
        )
        yield tell.info(ended)

    def _tool(
        self,
        kind: str,
        state: _Session,
        tell: "_Tell",
        frame: dict[str, Any],
        data: dict[str, Any],
    ) -> Event:
        """Tell of a tool call, which only the first of its events names."""
        session, message = tell.session, MessageId(data["assistantMessageID"])
        call_id = data["id"] if "id" in data else data["callID"]
        known = self._calls.pop((message, call_id), None) or KnownCall("", {})
        known.name = data.get("name") or data.get("tool") or known.name
        known.input = data.get("input") or known.input
        call = Call2.model_validate(
            {
                "status": _TOOLS[kind],
                "input": known.input,
                "content": data.get("content") or [],
                "metadata": data.get("metadata") or data.get("structured"),
                "error": data.get("error"),
            }
        )
        if kind == "session.tool.failed" and call.error and call.error.message in REFUSED:
            state.refused.add(message)
        work = left_in_background(known.name, call.metadata)
        if kind == "session.tool.success" and work is not None:
            self._background.setdefault(session, {})[work] = call_id
        if known.name and call.status not in ("completed", "error"):
            self._calls[message, call_id] = known
        if call.status != "running":
            self._forget_commands(session, call_id)
        elif known.name == "shell" and isinstance(
            shell := (call.metadata or {}).get("shellID"), str
        ):
            place = _object(frame, "location").get("directory")
            self._running.setdefault(shell, Running(session, message, call_id, place))
        if not known.name:
            return tell.missed()
        return tell.part(tool_part(session, message, call_id, known.name, call))

    def _execution(
        self, kind: str, state: _Session, tell: "_Tell", data: dict[str, Any]
    ) -> Iterator[Event]:
        if kind == "session.execution.started":
            yield tell.status(_BUSY)
            return
        state.forget_execution()
        if kind == "session.execution.failed":
            error = turn_error(Failure2.model_validate(data["error"]))
            yield SessionFailed(event_id=tell.next_id(), session_id=tell.session, error=error)
        if not self._background.get(tell.session):
            yield tell.status(_IDLE)

    def _forget_commands(self, session: SessionId, call_id: str | None = None) -> None:
        """Forget the running command of a call, or all of a session."""
        for shell, one in [*self._running.items()]:
            if one.session == session and call_id in (None, one.call):
                del self._running[shell]


def _object(data: dict[str, Any], key: str) -> dict[str, Any]:
    found: dict[str, Any] = data.get(key) or {}
    return found


@dataclass(slots=True)
class _Tell:
    """Makes the events that one frame stands for; each needs an id of its own."""

    event_id: str
    session: SessionId
    told: int = 0

    def next_id(self) -> str:
        self.told += 1
        return f"{self.event_id}.{self.told}"

    def part(self, part: Part) -> PartUpdated:
        return PartUpdated(event_id=self.next_id(), session_id=self.session, part=part)

    def missed(self) -> Missed:
        return Missed(self.next_id(), self.session)

    def info(self, info: Message) -> MessageUpdated:
        return MessageUpdated(event_id=self.next_id(), session_id=self.session, info=info)

    def message(self, message: MessageWithParts) -> Iterator[Event]:
        yield self.info(message.info)
        for part in message.parts:
            yield self.part(part)

    def status(self, status: SessionStatus) -> SessionStatusChanged:
        return SessionStatusChanged(self.next_id(), self.session, status)


def _text(kind: str, session: SessionId, data: dict[str, Any]) -> Part:
    _, channel, what = kind.split(".")
    make = text_part if channel == "text" else reasoning_part
    message, number, begins = (
        MessageId(data["assistantMessageID"]),
        data["ordinal"],
        what != "ended",
    )
    return make(session, message, number, "" if begins else data["text"], growing=begins)


def _request(kind: str, tell: _Tell, frame: dict[str, Any], data: dict[str, Any]) -> Event:
    place = _object(frame, "location").get("directory")
    match kind:
        case "permission.asked":
            asked = permission_of(Permission2.model_validate(data))
            return PermissionAsked(event_id=tell.next_id(), directory=place, **dict(asked))
        case "form.created":
            form = question_of(Form2.model_validate(data["form"]))
            return QuestionAsked(event_id=tell.next_id(), directory=place, **dict(form))
        case "permission.replied":
            reply = data.get("reply") or data["decision"]
            request = RequestId(data["requestID"] + "")
            return RequestSettled(
                tell.next_id(), tell.session, request, "permission", _REPLIES[reply]
            )
        case _:
            resolution: Resolution = "replied" if kind == "form.replied" else "rejected"
            request = RequestId(data["id"] + "")
            return RequestSettled(tell.next_id(), tell.session, request, "question", resolution)


def _compaction(
    kind: str, state: _Session, tell: _Tell, at: int, data: dict[str, Any]
) -> Iterator[Event]:
    if kind == "session.compaction.started":
        asked = data.get("inputID") or f"msg_{tell.event_id.partition('_')[2]}"
        state.compaction = MessageId(asked)
        for message in compaction(tell.session, state.compaction, at, "running"):
            yield from tell.message(message)
    elif state.compaction is not None:
        message, state.compaction = state.compaction, None
        _, summary = compaction(tell.session, message, at, "completed")
        yield from tell.message(summary)


def _named(
    kind: str, state: _Session, tell: _Tell, frame: dict[str, Any], data: dict[str, Any]
) -> Event:
    """Tell the title and the place of a session, which ``session.renamed`` knows in part."""
    if kind == "session.created":
        info = _object(data, "info") or data  # previews wrap it
        place = _object(info, "location") or _object(frame, "location")
        state.directory, state.parent_id = place.get("directory") or "", info.get("parentID")
        state.title = info.get("title") or state.title
    else:
        state.title = data["title"] + ""
        place = _object(frame, "location")
        state.directory = state.directory or place.get("directory") or ""
    info = SessionInfo(state.title, state.directory, state.parent_id)
    return SessionChanged(tell.next_id(), tell.session, info)
