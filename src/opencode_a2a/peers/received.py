"""A peer's answer: its tasks, what is new in them, and its errors.

``peers.client`` feeds the events of streams and the tasks it polls into a ``PeerTask``, which
returns ``PeerEvent``s for the commands and the tool: the answer apart from reasoning and tool
calls, and no text twice, however often the peer repeats it. Services of this kind say more in
metadata (the channel of a text, the state of a tool call, what a person is asked); all text of any
other agent is answer. Pure: knows no HTTP.
"""

import base64
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import StrEnum

from opencode_a2a.a2a.types import STATE_NAMES
from opencode_a2a.a2a.v03 import Spelling, state_name
from opencode_a2a.errors import (
    ContentTypeNotSupportedError,
    InternalError,
    InvalidParamsError,
    InvalidRequestError,
    MethodNotFoundError,
    ParseError,
    PushNotSupportedError,
    StoreUnavailableError,
    StreamEndedError,
    TaskNotCancelableError,
    TaskNotFoundError,
    UnsupportedOperationError,
    VersionNotSupportedError,
)
from opencode_a2a.events import (
    AskedType,
    Interrupted,
    Json,
    JsonObject,
    Question,
    QuestionOption,
    Usage,
)
from opencode_a2a.ids import RequestId, SessionId
from opencode_a2a.jsonguard import as_object, items_in, text_in
from opencode_a2a.log.state import TERMINAL, State
from opencode_a2a.media import DIFF_TYPE
from opencode_a2a.messages import Message, Part
from opencode_a2a.printable import one_line

# --- errors -----------------------------------------------------------------------------------


class ErrorCode(StrEnum):
    """The kind of failure of a call. The model is shown these, so they do not change."""

    INVALID_INPUT = "a2a_invalid_input"
    AUTH_FAILED = "a2a_peer_auth_failed"
    PERMISSION_DENIED = "a2a_peer_permission_denied"
    TIMEOUT = "a2a_timeout"
    UNSUPPORTED = "a2a_unsupported_operation"
    RETRYABLE = "a2a_retryable_unavailable"
    INVALID_CARD = "a2a_invalid_agent_card"
    PROTOCOL = "a2a_peer_protocol_error"
    UNAVAILABLE = "a2a_unavailable"
    CALL_FAILED = "a2a_call_failed"
    UNEXPECTED = "a2a_unexpected_response"


class PeerError(Exception):
    """A call failed. The message is for people; text of the peer in it is made printable."""

    def __init__(
        self,
        code: ErrorCode,
        message: str,
        *,
        http_status: int | None = None,
        rpc_code: int | None = None,
        away: bool = False,
    ) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.http_status = http_status
        self.rpc_code = rpc_code
        self.away = away
        """Whether the peer cannot be reached, or says that it cannot do anything now."""

    @property
    def retryable(self) -> bool:
        return self.code in (ErrorCode.RETRYABLE, ErrorCode.TIMEOUT)


class LostError(PeerError):
    """The peer can no longer be reached; its task may still be running."""


class MalformedError(PeerError):
    """The peer sent something that is not A2A."""

    def __init__(self, problem: str) -> None:
        super().__init__(ErrorCode.PROTOCOL, f"the agent's answer is not valid A2A: {problem}")


_BY_STATUS = {
    401: ErrorCode.AUTH_FAILED,
    403: ErrorCode.PERMISSION_DENIED,
    408: ErrorCode.TIMEOUT,
    **dict.fromkeys((400, 413), ErrorCode.INVALID_INPUT),
    **dict.fromkeys((404, 405, 409, 501), ErrorCode.UNSUPPORTED),
    **dict.fromkeys((429, 502, 503, 504), ErrorCode.RETRYABLE),
}
_INVALID_AGENT_RESPONSE = -32006  # no service of ours sends it
_BY_RPC_CODE = {
    ParseError.code: ErrorCode.PROTOCOL,
    InvalidRequestError.code: ErrorCode.PROTOCOL,
    MethodNotFoundError.code: ErrorCode.UNSUPPORTED,
    InvalidParamsError.code: ErrorCode.INVALID_INPUT,
    InternalError.code: ErrorCode.RETRYABLE,
    TaskNotFoundError.code: ErrorCode.CALL_FAILED,
    TaskNotCancelableError.code: ErrorCode.CALL_FAILED,
    PushNotSupportedError.code: ErrorCode.UNSUPPORTED,
    UnsupportedOperationError.code: ErrorCode.UNSUPPORTED,
    ContentTypeNotSupportedError.code: ErrorCode.INVALID_INPUT,
    _INVALID_AGENT_RESPONSE: ErrorCode.UNEXPECTED,
    VersionNotSupportedError.code: ErrorCode.UNSUPPORTED,
}
_AWAY = (StoreUnavailableError.reason, StreamEndedError.reason)
_RPC_CODES = {
    InvalidParamsError.reason: InvalidParamsError.code,
    TaskNotFoundError.reason: TaskNotFoundError.code,
    TaskNotCancelableError.reason: TaskNotCancelableError.code,
    UnsupportedOperationError.reason: UnsupportedOperationError.code,
    ContentTypeNotSupportedError.reason: ContentTypeNotSupportedError.code,
    "INVALID_AGENT_RESPONSE": _INVALID_AGENT_RESPONSE,
    VersionNotSupportedError.reason: VersionNotSupportedError.code,
}
"""Reasons of HTTP+JSON errors that are more precise than their HTTP status."""
_TEXT_LIMIT = 500


def read_error(status: int, body: JsonObject) -> PeerError | None:
    """Return the error in an answer of either binding, or None."""
    error = body.get("error")
    if status < 400 and not error:
        return None
    inner = as_object(error) or body
    text = error if isinstance(error, str) else text_in(inner, "message", "detail")
    given = inner.get("code")
    number = given if isinstance(given, int) else 0
    details = [*items_in(inner, "details"), *items_in(inner, "data")]
    reason = next((r for item in details if (r := text_in(item, "reason"))), "")
    reason = reason or text_in(as_object(inner.get("data")), "type") or ""  # as 0.3 has it
    if status < 400 and number < 400:
        http_status, rpc_code, name = None, number, f"error {number}"
        code = _BY_RPC_CODE.get(number, ErrorCode.CALL_FAILED)
        away = reason in _AWAY
    else:
        # An error inside a stream of HTTP+JSON has its status as code.
        http_status = status if status >= 400 else number
        rpc_code = _RPC_CODES.get(reason)
        name, code = f"HTTP {http_status}", _BY_STATUS.get(http_status, ErrorCode.UNAVAILABLE)
        if rpc_code is not None:
            name, code = reason, _BY_RPC_CODE[rpc_code]
        away = http_status in (502, 503, 504)
    message = f"the agent answered {name}"
    if text and not text.isspace():
        message = f"the agent says: {one_line(text, _TEXT_LIMIT)}"
    if away:
        code = ErrorCode.RETRYABLE
    return PeerError(code, message, http_status=http_status, rpc_code=rpc_code, away=away)


# --- received objects -------------------------------------------------------------------------


WAITING = frozenset({State.INPUT_REQUIRED, State.AUTH_REQUIRED})
SETTLED = TERMINAL | WAITING
"""States in which nothing happens until somebody sends a message."""


def state_word(state: State | None) -> str:
    """Return the name of a state for people and models, such as ``input-required``."""
    return "unknown" if state is None else state_name(state, Spelling.JSON)


@dataclass(frozen=True, slots=True)
class ReceivedStatus:
    state: State | None
    """None for a state that A2A does not know."""
    message: Message | None = None
    timestamp: str | None = None

    @property
    def text(self) -> str | None:
        return (self.message.text or None) if self.message else None


@dataclass(frozen=True, slots=True)
class Artifact:
    artifact_id: str
    parts: list[Part]
    name: str | None = None
    metadata: JsonObject = field(default_factory=dict[str, Json])


@dataclass(frozen=True, slots=True)
class ReceivedTask:
    task_id: str
    context_id: str | None
    status: ReceivedStatus
    artifacts: list[Artifact] = field(default_factory=list[Artifact])
    history: list[Message] = field(default_factory=list[Message])
    metadata: JsonObject = field(default_factory=dict[str, Json])


@dataclass(frozen=True, slots=True)
class ReceivedUpdate:
    """A change of a task; or, without a task id, a message that is the whole answer."""

    task_id: str | None
    context_id: str | None
    status: ReceivedStatus | None = None
    artifact: Artifact | None = None
    append: bool = False
    metadata: JsonObject = field(default_factory=dict[str, Json])


Received = ReceivedTask | ReceivedUpdate


def read_event(value: JsonObject) -> Received:
    """Read the answer to a send, or an event of a stream."""
    match value:
        case {"task": dict() as task}:
            return read_task(task)
        case {"statusUpdate": dict() as update}:
            return ReceivedUpdate(
                _required(update, "taskId"),
                text_in(update, "contextId"),
                _read_status(update),
                metadata=as_object(update.get("metadata")),
            )
        case {"artifactUpdate": dict() as update}:
            return ReceivedUpdate(
                _required(update, "taskId"),
                text_in(update, "contextId"),
                None,
                _read_artifact(
                    as_object(update.get("artifact")), as_object(update.get("metadata"))
                ),
                update.get("append") is True,
            )
        case {"message": dict() as sent}:
            message = _read_message(sent)
            answer = Artifact(message.message_id, message.parts)
            completed = ReceivedStatus(State.COMPLETED)
            return ReceivedUpdate(None, text_in(sent, "contextId"), completed, answer)
        case _:
            raise MalformedError("neither a task nor a message nor an update")


def read_task(value: JsonObject) -> ReceivedTask:
    return ReceivedTask(
        _required(value, "id"),
        text_in(value, "contextId"),
        _read_status(value),
        [_read_artifact(item, {}) for item in items_in(value, "artifacts")],
        [_read_message(item) for item in items_in(value, "history")],
        as_object(value.get("metadata")),
    )


def _required(value: JsonObject, key: str) -> str:
    text = text_in(value, key)
    if not text:
        raise MalformedError(f"{key} is missing")
    return text


def _read_status(value: JsonObject) -> ReceivedStatus:
    status = as_object(value.get("status"))
    message = status.get("message")
    return ReceivedStatus(
        STATE_NAMES.get(text_in(status, "state") or ""),
        _read_message(message) if isinstance(message, dict) else None,
        text_in(status, "timestamp"),
    )


def _read_artifact(value: JsonObject, around: JsonObject) -> Artifact:
    return Artifact(
        text_in(value, "artifactId") or "",
        _read_parts(value),
        text_in(value, "name"),
        around | as_object(value.get("metadata")),
    )


def _read_message(value: JsonObject) -> Message:
    return Message(
        text_in(value, "messageId") or "",
        "user" if value.get("role") == "ROLE_USER" else "agent",
        _read_parts(value),
        as_object(value.get("metadata")),
    )


def _read_parts(value: JsonObject) -> list[Part]:
    """Read parts leniently: those without known content are skipped."""
    parts: list[Part] = []
    for item in items_in(value, "parts"):
        named = (text_in(item, "mediaType"), text_in(item, "filename"))
        metadata = as_object(item.get("metadata")) or None
        if (text := text_in(item, "text")) is not None:
            parts.append(Part("text", text, None, None, None, *named, metadata))
        elif (raw := text_in(item, "raw")) is not None:
            parts.append(Part("raw", None, raw, None, None, *named, metadata))
        elif (url := text_in(item, "url")) is not None:
            parts.append(Part("url", None, None, url, None, *named, metadata))
        elif "data" in item:
            parts.append(Part("data", None, None, None, item["data"], *named, metadata))
    return parts


# --- events -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class TaskOpened:
    """The peer created or named the task that the message belongs to."""

    task_id: str
    context_id: str | None


@dataclass(frozen=True, slots=True)
class AnswerGrew:
    """New answer text, to be appended to the text of the same artifact."""

    artifact_id: str
    text: str


@dataclass(frozen=True, slots=True)
class AnswerReplaced:
    """The whole text of an artifact: the peer has withdrawn some of what it had sent."""

    artifact_id: str
    text: str


@dataclass(frozen=True, slots=True)
class ThoughtGrew:
    """New reasoning text."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolReported:
    """The state of one of the peer's tool calls, which replaces the one reported before."""

    call_id: str
    tool: str
    status: str
    title: str | None
    payload: JsonObject


@dataclass(frozen=True, slots=True)
class FileGiven:
    """A part of an artifact that is not answer text: a file, a diff, data."""

    artifact_id: str
    name: str | None
    part: Part


@dataclass(frozen=True, slots=True)
class PeerProgress:
    """The progress that a peer reports; ``events.Progressed`` is that of our own tasks."""

    type: str
    status: str
    title: str | None = None
    subtitle: str | None = None
    reason: str | None = None


@dataclass(frozen=True, slots=True)
class TaskStatusChanged:
    """The state of the task, and the peer's text about it.

    The last event of every answer has a settled state: the task has ended, or waits for an answer
    or a sign-in.
    """

    state: State | None
    text: str | None
    progress: PeerProgress | None = None
    """The progress behind the status; if the status has no message, ``text`` describes it."""
    asked: Interrupted | None = None
    """The permission, questions or plan that a service of this kind waits for."""


PeerEvent = (
    TaskOpened
    | AnswerGrew
    | AnswerReplaced
    | ThoughtGrew
    | ToolReported
    | FileGiven
    | TaskStatusChanged
)

CUT_SHORT = "The answer may be cut off: the model reached the limit of its output."
_PROGRESS_NAMES = {
    "retry": "Retrying",
    "queue": "Queued",
    "text": "Text waits",
    "compaction": "Compacting the conversation",
    "subagent": "Sub-agent",
    "peer": "Asking another agent",
    "permission": "Permission",
    "recovered": "Recovered",
    "todo": "Plan",
}


def progress_text(progress: PeerProgress) -> str:
    """Describe progress in a few words: ``Retrying: Cannot connect to API, attempt 4``."""
    if progress.type == "message":  # the title is the text of the message
        why = f": {progress.reason}" if progress.reason else ""
        return f"Message {progress.status}{why} ({progress.title})"
    words = ", ".join(filter(None, (progress.title, progress.subtitle))) or progress.status
    return f"{_PROGRESS_NAMES.get(progress.type, progress.type)}: {words}"


@dataclass(slots=True)
class _Channel:
    """The content of an artifact in one channel so far."""

    text: list[str] = field(default_factory=list[str])
    ahead: str = ""
    """Text that was told and follows ``text``: a service that was killed before it had stored it
    gives it once more."""
    others: list[Part] = field(default_factory=list[Part])
    """The parts that are not text."""

    def take(self, text: str, *, append: bool) -> tuple[str, bool]:
        """Take text that was received; return what to tell, and whether that replaces the rest."""
        if append:
            self.text.append(text)
            told, again = self.ahead, text
        else:
            told, again = "".join(self.text) + self.ahead, text
            self.text = [text]
        if told.startswith(again):
            self.ahead = told[len(again) :]
            return "", False
        self.ahead = ""
        return (again[len(told) :], False) if again.startswith(told) else ("".join(self.text), True)


class PeerTask:
    """One task of a peer, as far as it was received; it outlives the calls that continue it."""

    def __init__(self) -> None:
        self.task_id: str | None = None
        self.context_id: str | None = None
        self.status = ReceivedStatus(None)
        self.asked: Interrupted | None = None
        self.scope_text: str | None = None
        """What an answer to it for the task or conversation allows, as the peer says."""
        """What the task waits for, if the peer says what it is."""
        self.several = False
        """Whether it waits for more than ``asked``, so that an answer has to say what it is for."""
        self.settled = False
        """Whether the task has ended or waits for somebody, and no new message was sent since."""
        self.usage: Usage | None = None
        """The tokens and costs of the task with its sub-agents, if the peer reports them."""
        self.cut_short = False
        """Whether the answer of a completed task may end in the middle; see ``CUT_SHORT``."""
        self.last_words: str | None = None
        """The text of the last status: its message, or its progress."""
        self._channels: dict[tuple[str, str], _Channel] = {}
        """The content received so far, by artifact id and channel."""
        self._tools: dict[str, ToolReported] = {}
        self._answered = False
        """Whether answer text was received since the last message was sent."""

    @property
    def answer(self) -> str:
        """The whole answer so far, each artifact on lines of its own."""
        texts = ["".join(c.text) for (_, name), c in self._channels.items() if name == "text"]
        return "\n".join(text for text in texts if text)

    @property
    def said(self) -> str:
        """The text of the status, without the answer if it repeats that."""
        return (self.status.text or "").removeprefix(self.answer).lstrip("\n")

    @property
    def patch(self) -> str | None:
        """The files that the task changed, as a diff; None if the peer reports no changes."""
        parts = (part for channel in self._channels.values() for part in channel.others)
        patches = [part.raw for part in parts if part.media_type == DIFF_TYPE and part.raw]
        return decode_text(patches[-1]) if patches else None

    def begin(self) -> None:
        """Prepare for the answer to a message that is about to be sent."""
        self.settled = False
        self._answered = False

    def prime(self, task: ReceivedTask) -> None:
        """Count everything in a task as reported, so that only later changes are."""
        for _ in self.take(task):
            pass
        self.begin()

    def take(self, received: Received) -> Iterator[PeerEvent]:
        """Apply what the peer sent, and yield what is new in it."""
        self.context_id = received.context_id or self.context_id
        if received.task_id not in (None, self.task_id):
            self.task_id = received.task_id
            yield TaskOpened(received.task_id, self.context_id)
        match received:
            case ReceivedTask():
                for artifact in received.artifacts:
                    yield from self._take_artifact(artifact, append=False)
                if received.status != self.status:
                    yield from self._take_status(received.status, received.metadata)
            case ReceivedUpdate():
                if received.artifact:
                    yield from self._take_artifact(received.artifact, append=received.append)
                if received.status:
                    yield from self._take_status(received.status, received.metadata)

    def _take_artifact(self, artifact: Artifact, *, append: bool) -> Iterator[PeerEvent]:
        hints = _shared(artifact.metadata, "stream")
        if text_in(hints, "source") == "status":
            return  # it repeats the status for clients that do not read that
        kind = text_in(hints, "block_type") or "text"
        if kind == "tool_call":
            for part in artifact.parts:
                payload = as_object(part.data)
                call = ToolReported(
                    text_in(payload, "call_id") or artifact.artifact_id,
                    text_in(payload, "tool") or "tool",
                    text_in(payload, "status") or "",
                    text_in(payload, "title"),
                    payload,
                )
                if part.kind == "data" and self._tools.get(call.call_id) != call:
                    self._tools[call.call_id] = call
                    yield call
            return
        channel = self._channels.setdefault((artifact.artifact_id, kind), _Channel())
        texts = [part.text or "" for part in artifact.parts if _is_prose(part)]
        if texts:
            new, replaced = channel.take("".join(texts), append=append)
            if kind == "text" and new:
                self._answered = True
                yield (AnswerReplaced if replaced else AnswerGrew)(artifact.artifact_id, new)
            elif kind == "reasoning" and new:  # also that of a turn that begins anew, after a plan
                yield ThoughtGrew(new)
        others = [part for part in artifact.parts if not _is_prose(part)]
        known = [] if append else channel.others
        if others[: len(known)] == known:
            others = others[len(known) :]
        channel.others += others
        for part in others:
            yield FileGiven(artifact.artifact_id, part.filename or artifact.name, part)

    def _take_status(self, status: ReceivedStatus, metadata: JsonObject) -> Iterator[PeerEvent]:
        before, self.status = self.status, status
        self.usage = read_usage(metadata) or self.usage
        self.settled = status.state in SETTLED
        self.asked = self.scope_text = None
        finish = text_in(as_object(metadata.get("opencode")), "finish")
        self.cut_short = status.state is State.COMPLETED and finish == "length"
        if status.state is State.COMPLETED and not self._answered and status.message:
            # Many small agents put their whole answer into the last status.
            yield from self._take_artifact(Artifact("status", status.message.parts), append=False)
        if self.settled:
            for (artifact_id, kind), channel in self._channels.items():
                if kind == "text" and channel.ahead:  # it did not come again
                    channel.ahead = ""
                    yield AnswerReplaced(artifact_id, "".join(channel.text))
            if status.state in WAITING:
                metadata = metadata | ((status.message and status.message.metadata) or {})
                self.asked = _read_asked(metadata)
                details = as_object(_shared(metadata, "interrupt").get("details"))
                self.scope_text = text_in(details, "scope_text")
                waiting = _shared(metadata, "interrupt").get("waiting")
                self.several = isinstance(waiting, list) and len(waiting) > 1
            yield TaskStatusChanged(status.state, status.text, asked=self.asked)
            return
        progress = _read_progress(metadata)
        text = status.text or (progress and progress_text(progress))
        if (before.state, self.last_words) != (status.state, text):
            self.last_words = text
            yield TaskStatusChanged(status.state, text, progress)


def _is_prose(part: Part) -> bool:
    return part.kind == "text" and part.media_type in (None, "", "text/plain", "text/markdown")


# --- metadata of services of this kind --------------------------------------------------------


def _shared(metadata: JsonObject, name: str) -> JsonObject:
    return as_object(as_object(metadata.get("shared")).get(name))


def decode_text(raw: str) -> str | None:
    """Return the text in the base64 of a part; None if it is not base64."""
    try:
        return base64.b64decode(raw).decode(errors="replace")
    except ValueError:
        return None


def read_usage(metadata: JsonObject) -> Usage | None:
    """Return what a task and its sub-agents have used, if the peer says so."""
    given = _shared(metadata, "usage")
    if not given:
        return None
    used = Usage()
    for one in (given, as_object(given.get("children"))):
        cache, cost = as_object(one.get("cache_tokens")), one.get("cost")
        used += Usage(
            *(
                count if isinstance(count, int) else 0
                for count in (
                    one.get("input_tokens"),
                    one.get("output_tokens"),
                    one.get("reasoning_tokens"),
                    cache.get("read_tokens"),
                    cache.get("write_tokens"),
                )
            ),
            cost=float(cost) if isinstance(cost, int | float) else 0.0,
        )
    return used


def _read_progress(metadata: JsonObject) -> PeerProgress | None:
    """Return the progress in a status that is worth showing; None for steps and ended work."""
    progress = _shared(metadata, "progress")
    kind, status = text_in(progress, "type") or "", text_in(progress, "status") or ""
    if not progress or kind in ("step-start", "step-finish") or status in ("completed", "error"):
        return None
    title, subtitle = text_in(progress, "title"), text_in(progress, "subtitle", "reason")
    if kind == "todo":
        todos = items_in(progress, "todos")
        current = [one for one in todos if one.get("status") == "in_progress"]
        title = text_in(current[0], "content") if current else None
        done = sum(one.get("status") == "completed" for one in todos)
        subtitle = f"{done} of {len(todos)} done"
    reason = text_in(progress, "reason")
    return PeerProgress(kind, status, title, subtitle, reason)


def _read_asked(metadata: JsonObject) -> Interrupted | None:
    """Return the interrupt that a task waits for, if the peer says what it is."""
    interrupt = _shared(metadata, "interrupt")
    request_id = text_in(interrupt, "request_id")
    if request_id is None:
        return None
    details = as_object(interrupt.get("details"))
    patterns, always = details.get("patterns"), details.get("always")
    # Without scopes nothing wider than this request can be allowed.
    wider = always if isinstance(always, list) and details.get("scopes") else []
    questions = [
        Question(
            text_in(item, "question") or "",
            text_in(item, "header") or "",
            [
                QuestionOption(text_in(option, "label") or "", text_in(option, "description") or "")
                for option in items_in(item, "options")
            ],
            item.get("multiple") is True,
            item.get("custom") is not False,
        )
        for item in items_in(details, "questions")
    ]
    is_question, number = interrupt.get("type") == "question", interrupt.get("number")
    kind: AskedType = "plan" if interrupt.get("type") == "plan" else "permission"
    return Interrupted(
        RequestId(request_id),
        "question" if is_question else kind,
        SessionId(text_in(interrupt, "session_id") or ""),
        None if is_question else text_in(details, "permission"),
        [p for p in patterns if isinstance(p, str)]
        if isinstance(patterns, list) and not is_question
        else [],
        always=[p for p in wider if isinstance(p, str)],
        questions=questions if is_question else [],
        number=number if isinstance(number, int) else None,
    )
