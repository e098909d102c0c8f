"""The events of OpenCode 2, as those that the turn reader knows.

``EVENTS``, at the end, names them all, each with what translates it: a release that calls one
otherwise needs one more line there.

An event of 2.x leaves out what earlier ones said: an answer does not name its prompt, the end of a
tool call not its input. So a ``Decoder2`` remembers that, for the length of one connection. Where
the earlier event was missed, it tells just that (``Missed``), and the turn reader reads the store.
Nothing here knows what a turn is.

A session of 2.x may continue by itself: a command or a sub-agent that the model has put into the
background reports its end by a message of its own, and the model is asked again. Until then the
session is not told to be idle, although its execution is over.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, Literal

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
from opencode_a2a.opencode.v2.background import left_in_background, unreported
from opencode_a2a.opencode.v2.messages import (
    REFUSED,
    Call2,
    Failure2,
    Form2,
    Permission2,
    compaction,
    finish_of,
    permission_of,
    prompt_message,
    question_of,
    reasoning_part,
    step_finish,
    step_start,
    text_part,
    tool_part,
    turn_error,
)
from opencode_a2a.opencode.v2.outputs import Running

logger = structlog.get_logger(__name__)

KNOWN: Final = 10_000
"""Sessions and tool calls that something is remembered about."""
_BUSY, _IDLE = StatusBusy(), StatusIdle()
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


@dataclass(slots=True)
class Memory:
    """What later events do not repeat: told by those of one connection, or by the store since."""

    prompts: Recent[SessionId, MessageId] = field(default_factory=lambda: Recent(KNOWN))
    """The last prompt of each session."""
    calls: Recent[tuple[str, str], KnownCall] = field(default_factory=lambda: Recent(KNOWN))
    """The tool calls that have not ended, by the ids of message and call."""
    running: dict[str, Running] = field(default_factory=dict[str, Running])
    """The running commands of followed sessions, by their ids."""
    background: Recent[SessionId, dict[str, str]] = field(default_factory=lambda: Recent(KNOWN))
    """The work of sessions in the background: the ids of its commands or sessions, with those of
    its tool calls."""

    def forget_commands(self, session: SessionId, call_id: str | None = None) -> None:
        """Forget the running command of a call, or all of a session."""
        for shell, one in [*self.running.items()]:
            if one.session == session and call_id in (None, one.call):
                del self.running[shell]


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
    called: set[str] = field(default_factory=set[str])
    """Answers with a tool call."""
    refused: set[str] = field(default_factory=set[str])
    """Answers with a tool call that a person refused."""
    compaction: MessageId | None = None

    def forget_execution(self) -> None:
        """Forget what only matters while the session works."""
        self.steps.clear()
        self.starts.clear()
        self.called.clear()
        self.refused.clear()


@dataclass(slots=True)
class Frame:
    """An event of OpenCode 2. It makes the events that it stands for; each needs its own id."""

    event_id: str
    session: SessionId
    whole: dict[str, Any]
    data: dict[str, Any]
    told: int = 0

    @property
    def at(self) -> int:
        return round(self.whole.get("created") or 0)

    @property
    def directory(self) -> str | None:
        return _object(self.whole, "location").get("directory")

    @property
    def message(self) -> MessageId:
        return MessageId(self.data["assistantMessageID"])

    def either(self, *names: str) -> Any:
        """Return a field that releases call differently, or None."""
        return next((self.data[name] for name in names if self.data.get(name)), None)

    def next_id(self) -> str:
        self.told += 1
        return f"{self.event_id}.{self.told}"

    def part(self, part: Part) -> PartUpdated:
        return PartUpdated(event_id=self.next_id(), session_id=self.session, part=part)

    def missed(self) -> Missed:
        return Missed(self.next_id(), self.session)

    def info(self, info: Message) -> MessageUpdated:
        return MessageUpdated(event_id=self.next_id(), session_id=self.session, info=info)

    def stored(self, message: MessageWithParts) -> Iterator[Event]:
        yield self.info(message.info)
        for part in message.parts:
            yield self.part(part)

    def status(self, status: SessionStatus) -> SessionStatusChanged:
        return SessionStatusChanged(self.next_id(), self.session, status)


class Decoder2:
    """The decoder of one connection to an OpenCode 2."""

    connected = b"server.connected"
    disposed = frozenset({b"global.disposed"})

    def __init__(self, memory: Memory, *, finish_unnamed: bool = False) -> None:
        """Begin a connection. ``finish_unnamed``: see ``finish_of``."""
        self.memory = memory
        self._finish_unnamed = finish_unnamed
        self.followed = frozenset(name.encode() for name in EVENTS)
        self.overheard = frozenset(name.encode() for name in OVERHEARD)
        self._sessions = Recent[SessionId, _Session](KNOWN)
        self._known = {*self.followed, *(name.encode() for name in IGNORED)}
        self._homeless = set[bytes]()
        """The types of events that should have named a session and did not: nobody gets them."""

    def head(self, data: bytes) -> tuple[bytes, bytes]:
        kind, session = head_of(data)
        if kind not in self._known:
            self._known.add(kind)
            if kind.startswith((b"session.", b"permission.", b"form.")):
                # Perhaps a new name for an event that turns need: they would end late and silent.
                logger.warning("OpenCode 2 sends events of an unknown type", type=kind.decode())
        elif not session and kind in self.followed and kind not in self._homeless:
            self._homeless.add(kind)
            logger.warning("OpenCode 2 sends events without a session", type=kind.decode())
        return kind, session

    def parent(self, kind: bytes, data: bytes) -> bytes:
        return parent_in(data) if kind == b"session.created" else b""

    def decode(self, data: bytes) -> Sequence[Event]:
        try:
            whole = loads(data)
            given = whole["data"]
            session = SessionId((given.get("sessionID") or given["form"]["sessionID"]) + "")
            frame = Frame(whole["id"] + "", session, whole, given)
            return [*EVENTS[whole["type"]](self, frame)]
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise MalformedEventError(error) from error

    def _of(self, session: SessionId) -> _Session:
        state = self._sessions.get(session)
        if state is None:
            state = self._sessions[session] = _Session()
        return state

    # Sessions

    def created(self, frame: Frame) -> Iterator[Event]:
        state = self._of(frame.session)
        info = _object(frame.data, "info") or frame.data  # previews wrap it
        place = _object(info, "location").get("directory") or frame.directory
        state.directory, state.parent_id = place or "", info.get("parentID")
        state.title = info.get("title") or state.title
        yield _changed(state, frame)

    def renamed(self, frame: Frame) -> Iterator[Event]:
        state = self._of(frame.session)
        state.title = frame.data["title"] + ""
        state.directory = state.directory or frame.directory or ""
        yield _changed(state, frame)

    def deleted(self, frame: Frame) -> Iterator[Event]:
        self._sessions.pop(frame.session, None)
        self.memory.background.pop(frame.session, None)
        self.memory.forget_commands(frame.session)
        yield SessionDeleted(event_id=frame.event_id, session_id=frame.session)

    def retry(self, frame: Frame) -> Iterator[Event]:
        data = frame.data
        words = turn_error(Failure2.model_validate(data["error"])).data.message or ""
        status = StatusRetry(attempt=data["attempt"] - 1, message=words, next=data["at"])
        yield frame.status(status)

    # Executions: what a session does without a pause

    def started(self, frame: Frame) -> Iterator[Event]:
        self.memory.forget_commands(frame.session)
        yield frame.status(_BUSY)

    def ended(self, frame: Frame) -> Iterator[Event]:
        self.memory.forget_commands(frame.session)
        self._of(frame.session).forget_execution()
        if not self.memory.background.get(frame.session):
            yield frame.status(_IDLE)

    def failed(self, frame: Frame) -> Iterator[Event]:
        error = turn_error(Failure2.model_validate(frame.data["error"]))
        yield SessionFailed(event_id=frame.next_id(), session_id=frame.session, error=error)
        yield from self.ended(frame)

    # Prompts: the model is given one a moment after OpenCode was

    def enqueued(self, frame: Frame) -> Iterator[Event]:
        inbox_id = frame.either("inboxID", "inputID") + ""
        self._of(frame.session).inbox[inbox_id] = frame.either("item", "input") or frame.data
        return iter(())

    def delivered(self, frame: Frame) -> Iterator[Event]:
        """Tell of a prompt once the model is given it; before that it is only in the inbox."""
        session, inbox_id = frame.session, MessageId(frame.either("inboxID", "inputID") + "")
        item = self._of(session).inbox.pop(inbox_id, None)
        if item is None:
            # It came before this connection, or while nobody followed. The answers that come now
            # are to it, unless it is no prompt, and the store knows what it says.
            self.memory.prompts[session] = inbox_id
            yield frame.missed()
            return
        if item["type"] not in ("user", "synthetic"):
            return
        self.memory.prompts[session] = inbox_id
        payload = _object(item, "payload") or _object(item, "data")
        text, synthetic = payload.get("text", "") + "", item["type"] == "synthetic"
        if synthetic:
            left = self.memory.background.get(session) or {}
            self.memory.background[session] = unreported(left, text)
        yield from frame.stored(prompt_message(session, inbox_id, frame.at, text, synthetic))

    # Steps: calls of the model, each with a message

    def step_started(self, frame: Frame) -> Iterator[Event]:
        state, session, message = self._of(frame.session), frame.session, frame.message
        model, prompt = _object(frame.data, "model"), self.memory.prompts.get(session)
        if prompt is None:
            yield frame.missed()
        else:
            known = state.steps.get(message)
            state.steps[message] = AssistantMessage(
                id=message,
                session_id=session,
                parent_id=known.parent_id if known else prompt,
                time=known.time if known else MessageTime(created=frame.at),
                provider_id=model.get("providerID"),
                model_id=model.get("id"),
                agent=frame.data.get("agent"),
            )
            yield frame.info(state.steps[message])
        number = state.starts[message] = state.starts.get(message, 0) + 1
        yield frame.part(step_start(session, message, number))

    def step_ended(self, frame: Frame) -> Iterator[Event]:
        finish = frame.data.get("finish") or ""
        yield frame.part(step_finish(frame.session, frame.message, finish))
        yield from self.step_over(frame, unnamed=self._finish_unnamed)

    def step_over(self, frame: Frame, *, unnamed: bool = False) -> Iterator[Event]:
        """Tell what a step has used, and why it failed if it did."""
        state, message, data = self._of(frame.session), frame.message, frame.data
        known = state.steps.pop(message, None)
        if known is None:
            yield frame.missed()
            return
        refused, error = message in state.refused, data.get("error")
        failure = turn_error(Failure2.model_validate(error)) if error and not refused else None
        called, unnamed = message in state.called, unnamed and not error
        finish = finish_of(data.get("finish"), called=called, unnamed=unnamed)
        ended = AssistantMessage.model_validate(
            {
                **known.model_dump(exclude={"time", "cost", "tokens", "finish", "error"}),
                "time": {"created": known.time.created, "completed": frame.at},
                "cost": data.get("cost"),
                "tokens": data.get("tokens"),
                "finish": "tool-calls" if refused else finish,
                "error": failure,
            }
        )
        yield frame.info(ended)

    def tool(self, frame: Frame, *, status: str) -> Iterator[Event]:
        """Tell of a tool call, which only the first of its events names."""
        session, message, memory, data = frame.session, frame.message, self.memory, frame.data
        call_id = data["id"] if "id" in data else data["callID"]
        known = memory.calls.pop((message, call_id), None) or KnownCall("", {})
        self._of(session).called.add(message)
        known.name = frame.either("name", "tool") or known.name
        known.input = data.get("input") or known.input
        call = Call2.model_validate(
            {
                "status": status,
                "input": known.input,
                "content": data.get("content") or [],
                "metadata": frame.either("metadata", "structured"),
                "error": data.get("error"),
            }
        )
        if status == "error" and call.error and call.error.message in REFUSED:
            self._of(session).refused.add(message)
        work = left_in_background(known.name, call.metadata)
        if status == "completed" and work is not None:
            memory.background.setdefault(session, {})[work] = call_id
        if known.name and status not in ("completed", "error"):
            memory.calls[message, call_id] = known
        if status != "running":
            memory.forget_commands(session, call_id)
        elif known.name == "shell" and isinstance(
            shell := (call.metadata or {}).get("shellID"), str
        ):
            memory.running.setdefault(shell, Running(session, message, call_id, frame.directory))
        if known.name:
            yield frame.part(tool_part(session, message, call_id, known.name, call))
        else:
            yield frame.missed()

    def compaction_started(self, frame: Frame) -> Iterator[Event]:
        asked = frame.data.get("inputID") or f"msg_{frame.event_id.partition('_')[2]}"
        message = self._of(frame.session).compaction = MessageId(asked)
        for one in compaction(frame.session, message, frame.at, "running"):
            yield from frame.stored(one)

    def compaction_ended(self, frame: Frame, *, status: str) -> Iterator[Event]:
        state, told = self._of(frame.session), frame.data.get("error")
        if state.compaction is not None:
            message, state.compaction = state.compaction, None
            # Without a readable error, the turn has failed all the same.
            error = Failure2.model_validate(told) if isinstance(told, dict) else None
            _, summary = compaction(frame.session, message, frame.at, status, error)
            yield from frame.stored(summary)


def _object(data: dict[str, Any], key: str) -> dict[str, Any]:
    found: dict[str, Any] = data.get(key) or {}
    return found


def _changed(state: _Session, frame: Frame) -> SessionChanged:
    info = SessionInfo(state.title, state.directory, state.parent_id)
    return SessionChanged(frame.next_id(), frame.session, info)


# Texts: of answers, and of the reasoning. Most events are text: these two remember nothing.


def _text(
    _: Decoder2, frame: Frame, *, make: Callable[..., Part], growing: bool
) -> Iterator[Event]:
    text = "" if growing else frame.data["text"]
    yield frame.part(
        make(frame.session, frame.message, frame.data["ordinal"], text, growing=growing)
    )


def _delta(_: Decoder2, frame: Frame, *, channel: Literal["t", "r"]) -> Iterable[Event]:
    data, message = frame.data, frame.message
    part_id = f"{message}:{channel}{data['ordinal']}"
    return (PartDelta(frame.event_id, frame.session, message, part_id, data["delta"] + ""),)


# Permissions and questions


def _permission_asked(_: Decoder2, frame: Frame) -> Iterator[Event]:
    asked = permission_of(Permission2.model_validate(frame.data))
    yield PermissionAsked(event_id=frame.next_id(), directory=frame.directory, **dict(asked))


def _permission_replied(_: Decoder2, frame: Frame) -> Iterator[Event]:
    resolution = _REPLIES[frame.either("reply", "decision")]
    request = RequestId(frame.data["requestID"] + "")
    yield RequestSettled(frame.next_id(), frame.session, request, "permission", resolution)


def _form_created(_: Decoder2, frame: Frame) -> Iterator[Event]:
    form = question_of(Form2.model_validate(frame.data["form"]))
    yield QuestionAsked(event_id=frame.next_id(), directory=frame.directory, **dict(form))


def _form_settled(_: Decoder2, frame: Frame, *, resolution: Resolution) -> Iterator[Event]:
    request = RequestId(frame.data["id"] + "")
    yield RequestSettled(frame.next_id(), frame.session, request, "question", resolution)


# The names

Translate = Callable[[Decoder2, Frame], Iterable[Event]]

OVERHEARD: Final[dict[str, Translate]] = {
    "session.deleted": Decoder2.deleted,
    "session.execution.failed": Decoder2.failed,
    "session.execution.interrupted": Decoder2.ended,
    "session.execution.succeeded": Decoder2.ended,
    "session.inbox.delivered": Decoder2.delivered,
    "session.input.promoted": Decoder2.delivered,  # in previews
    "session.reasoning.delta": partial(_delta, channel="r"),
    "session.reasoning.ended": partial(_text, make=reasoning_part, growing=False),
    "session.reasoning.started": partial(_text, make=reasoning_part, growing=True),
    "session.retry.scheduled": Decoder2.retry,
    "session.step.started": Decoder2.step_started,
    "session.text.delta": partial(_delta, channel="t"),
    "session.text.ended": partial(_text, make=text_part, growing=False),
    "session.text.started": partial(_text, make=text_part, growing=True),
}
"""Those that also matter to a replica that may take a turn over."""
EVENTS: Final[dict[str, Translate]] = {
    **OVERHEARD,
    "form.cancelled": partial(_form_settled, resolution="rejected"),
    "form.created": _form_created,
    "form.replied": partial(_form_settled, resolution="replied"),
    "permission.asked": _permission_asked,
    "permission.replied": _permission_replied,
    "session.compaction.ended": partial(Decoder2.compaction_ended, status="completed"),
    "session.compaction.failed": partial(Decoder2.compaction_ended, status="failed"),
    "session.compaction.started": Decoder2.compaction_started,
    "session.created": Decoder2.created,
    "session.execution.started": Decoder2.started,
    "session.inbox.enqueued": Decoder2.enqueued,
    "session.input.admitted": Decoder2.enqueued,  # in previews
    "session.renamed": Decoder2.renamed,
    "session.step.ended": Decoder2.step_ended,
    "session.step.failed": Decoder2.step_over,
    "session.tool.called": partial(Decoder2.tool, status="running"),
    "session.tool.failed": partial(Decoder2.tool, status="error"),
    "session.tool.input.started": partial(Decoder2.tool, status="streaming"),
    "session.tool.progress": partial(Decoder2.tool, status="running"),
    "session.tool.success": partial(Decoder2.tool, status="completed"),
}
"""All that matter to turns, each with what translates it."""
IGNORED: Final = frozenset(
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
