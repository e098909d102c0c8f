"""The state of a task, folded from the events of its log, and both as the bytes that are stored.

``log`` applies and stores the events, ``a2a.render`` reads the result. The first terminal state
wins: nothing can be appended after it. An event is stored as its name and its fields, and is read
back equal. Nothing here does I/O.
"""

import re
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any, assert_never, get_args

import orjson

from opencode_a2a.errors import UpstreamUnreachableError
from opencode_a2a.events import (
    ArtifactChanged,
    ArtifactEvent,
    Channel,
    ChannelClosed,
    ChannelReplaced,
    DiffChanged,
    Failure,
    FileChange,
    Finished,
    FirmEvent,
    Grew,
    Interrupted,
    Json,
    Outcome,
    Progressed,
    Resumed,
    RunningText,
    SessionBound,
    Started,
    TextGrew,
    ToolChanged,
    TurnEvent,
    Usage,
    UsageCounted,
    fold_text,
    load_known,
)
from opencode_a2a.ids import ContextId, ModelRef, Principal, SessionId, TaskId
from opencode_a2a.jsonguard import storable
from opencode_a2a.media import DIFF_TYPE, accepts
from opencode_a2a.messages import Added, Answered, Message, PromptPart, Routing, TurnRequest
from opencode_a2a.rights import Rights

BATCH_BYTES = 256 * 1024
"""Bytes of events after which no further entry is handed to a reader at once. What a reader that
does not read holds in memory is about one batch, encoded."""


class State(StrEnum):
    __hash__ = str.__hash__  # see Channel

    SUBMITTED = "submitted"
    WORKING = "working"
    INPUT_REQUIRED = "input_required"
    AUTH_REQUIRED = "auth_required"
    COMPLETED = "completed"
    FAILED = "failed"
    CANCELED = "canceled"
    REJECTED = "rejected"

    def __init__(self, name: str) -> None:
        self.terminal = name in ("completed", "failed", "canceled", "rejected")
        self.interrupted = name in ("input_required", "auth_required")
        """Whether the task waits for a person."""


TERMINAL = frozenset(state for state in State if state.terminal)
OPEN = frozenset(State) - TERMINAL


@dataclass(frozen=True, slots=True)
class Accepted:
    """The first entry of every log: the message that asks for the work."""

    message: Message
    trace: str | None = None
    """The trace that the message came with, as ``telemetry.Trace`` stores it."""


@dataclass(frozen=True, slots=True)
class Recovered:
    """The service was restarted; entries that it had shown but not stored are lost.

    This entry and those after it reuse their numbers. A reader whose cursor is from before the
    restart and not below this entry has seen entries that no longer exist, and is given the task
    anew.
    """

    reason: str


@dataclass(frozen=True, slots=True)
class Unknown:
    """An event of a later version of the service, which may run as another replica."""

    name: str


LogEvent = TurnEvent | Accepted | Added | Answered | Recovered | Unknown
FIRM = frozenset({*get_args(FirmEvent), Accepted, Added, Answered, Recovered})
"""Events that readers see only once they are stored; others may be shown before."""
StatusEvent = SessionBound | Started | Progressed | Interrupted | Resumed | Finished | Recovered
"""Events that readers see as a status; only these may change the state.

With one exception: a message on a task that waits for a sign-in ends that wait. Readers learn of it
when the next turn starts.
"""
STATUS_EVENTS = frozenset(get_args(StatusEvent))


@dataclass(frozen=True, slots=True)
class TaskRef:
    """The facts about a task that never change."""

    id: TaskId
    context_id: ContextId
    principal: Principal
    output_modes: tuple[str, ...] | None = None
    """Media types that the caller accepts; None for any."""
    created_at: int = 0

    def visible(self, event: LogEvent) -> bool:
        """Whether readers of this task see an event."""
        if isinstance(event, Grew):  # most events are
            return self.shows_channel(event.channel)
        match event:
            case ChannelReplaced() | ChannelClosed():
                return self.shows_channel(event.channel)
            case ToolChanged() | DiffChanged() if self.output_modes is not None:
                # Data is shown to those who accept it; as text it would stand amid the answer.
                patch = isinstance(event, DiffChanged) and bool(event.patch)
                types = ("application/json", *((DIFF_TYPE,) if patch else ()))
                return any(accepts(self.output_modes, media_type) for media_type in types)
            case (
                Progressed()
                | ArtifactChanged()
                | SessionBound()
                | Started()
                | Interrupted()
                | Resumed()
                | Finished()
                | Recovered()
            ):
                return True
            case Accepted() | Added() | Answered() | UsageCounted() | Unknown():
                # Readers have the messages, and the usage comes with the end.
                return False
            case _:
                assert_never(event)

    def shows_channel(self, channel: Channel) -> bool:
        """Whether readers see a channel.

        Callers that accept plain text alone, or do not list it, get no reasoning.
        """
        modes = self.output_modes
        if channel is not Channel.REASONING or modes is None:
            return True
        return modes != ("text/plain",) and accepts(modes, "text/plain")


@dataclass(frozen=True, slots=True)
class Status:
    """The state of a task, and everything else that a status update says; small and frozen."""

    state: State
    at: int
    """Milliseconds since the epoch of the last change of state."""
    session_id: SessionId | None = None
    title: str | None = None
    """The title of the session."""
    subject: str | None = None
    """The beginning of the first message."""
    directory: str | None = None
    model: str | None = None
    """``provider/model``: the one asked for, then the one that answered."""
    agent: str | None = None
    pending: tuple[Interrupted, ...] = ()
    failure: Failure | None = None
    finish: str | None = None
    structured: Json = None
    usage: UsageCounted | None = None
    trace: str | None = None
    """That of the first message; see ``Accepted``."""
    queued: Progressed | None = None
    """The progress event that says what the next prompt of the task waits for."""

    @property
    def plan(self) -> Interrupted | None:
        """The plan that waits to be approved."""
        return next((asked for asked in self.pending if asked.type == "plan"), None)

    @property
    def sign_in(self) -> int | None:
        """The sign-in that is waited for, by since when; None if none is."""
        return self.at if self.state is State.AUTH_REQUIRED else None

    @property
    def between_turns(self) -> bool:
        """Whether no turn runs, and the next message starts one."""
        return self.sign_in is not None or self.plan is not None


@dataclass(slots=True)
class Entry:
    """One numbered event of a log."""

    seq: int
    at: int
    event: LogEvent
    status: Status | None = None
    """The status after the event, if the event is shown as a status or changed it."""
    changes_state: bool = False
    """Whether readers see that it changed the state, or asked a person something more."""
    _size: int | None = field(default=None, compare=False)

    @property
    def size(self) -> int:
        """About how many bytes the event has, measured once: every reader asks for it."""
        if isinstance(self.event, Grew):  # most entries are
            return len(self.event.text)
        if self._size is None:
            self._size = len(encode(self.event))
        return self._size

    @property
    def stops(self) -> bool:
        """Whether the task stops with this entry: it ends, or begins to wait for a person.

        Progress that is reported while the task waits does not stop it again.
        """
        if self.status is None:  # as for all text
            return False
        match self.event:
            case Interrupted() | Resumed() | Finished():
                return self.status.state.terminal or self.status.state.interrupted
            case (
                Progressed()
                | Grew()
                | ChannelReplaced()
                | ChannelClosed()
                | ArtifactChanged()
                | SessionBound()
                | Started()
                | UsageCounted()
                | Accepted()
                | Added()
                | Answered()
                | Recovered()
                | Unknown()
            ):
                return False
            case _:
                assert_never(self.event)


def bounded(entries: list[Entry]) -> list[Entry]:
    """Return the first entries of a list, but at least one, up to about ``BATCH_BYTES``."""
    size = 0
    for count, entry in enumerate(entries, 1):
        size += entry.size
        if size >= BATCH_BYTES:
            return entries[:count]
    return entries


@dataclass(frozen=True, slots=True)
class Cursor:
    """The last entry that a reader has: its number, and the epoch of the task at that time."""

    seq: int
    epoch: int = 0

    def __str__(self) -> str:
        return f"{self.seq}.{self.epoch}" if self.epoch else str(self.seq)

    @classmethod
    def parse(cls, text: str) -> "Cursor":
        """Read the text that ``str`` makes; raise ValueError for any other."""
        found = re.fullmatch(r"([0-9]{1,15})(?:\.([0-9]{0,9}))?", text)
        if found is None:
            raise ValueError("not a cursor")
        return cls(int(found[1]), int(found[2] or 0))


@dataclass(frozen=True, slots=True)
class Query:
    """Which tasks to list; newest status first."""

    context_id: str | None = None
    state: State | None = None
    since: int | None = None
    """Milliseconds since the epoch: only tasks whose state last changed then or later."""
    size: int = 50
    token: str | None = None
    artifacts: bool = False
    history_length: int = 0
    """How many messages of each task to return."""


TOO_NEW = (
    "A later version of the service has stored a task that this replica cannot read, so nothing "
    "was done; try again when all replicas have been upgraded"
)
STATE_CHANGES = 32
"""How many changes of state a task remembers."""


class TerminalError(Exception):
    """An entry was to follow a terminal state."""


@dataclass(eq=False, slots=True)
class TaskState:
    """A task, folded from its log up to the entry ``seq``."""

    ref: TaskRef
    seq: int = 0
    status: Status = Status(State.SUBMITTED, 0)
    """The first entry of every log, ``Accepted``, says since when."""
    history: list[Message] = field(default_factory=list[Message])
    channels: dict[Channel, RunningText] = field(default_factory=dict[Channel, RunningText])
    artifacts: dict[str, ArtifactEvent] = field(default_factory=dict[str, ArtifactEvent])
    """All artifacts but the texts, by ``ArtifactEvent.artifact``."""
    settled: dict[str, Resumed] = field(default_factory=dict[str, Resumed])
    """How each settled interrupt ended, by request id."""
    _used: UsageCounted | None = None
    """The usage of the turns before the present one; None unless the task began with a plan."""
    epochs: list[int] = field(default_factory=list[int])
    """The sequence number of every recovery, in order."""
    turn: int = 0
    """Which turn of the task runs, or ran last; 0 if that is not known."""
    state_changes: deque[Entry] = field(default_factory=deque[Entry])
    """The latest entries that changed the state, in order."""
    unremembered: int = 0
    """Sequence number of the latest change that is no longer in ``state_changes``."""

    @property
    def epoch(self) -> int:
        """How often the task was recovered after a restart."""
        return len(self.epochs)

    @property
    def last_change(self) -> int:
        """Sequence number of the latest change of state; 0 if there was none."""
        return self.state_changes[-1].seq if self.state_changes else self.unremembered

    def apply(self, event: LogEvent, at: int) -> Entry:
        """Append one event; raise TerminalError when the log is closed."""
        if self.status.state in TERMINAL:
            raise TerminalError(self.ref.id)
        self.seq += 1
        before = self.status
        self._fold(event, at)
        if type(event) is TextGrew:  # most events are, and have nothing to do with the status
            return Entry(self.seq, at, event)
        shown = type(event) in STATUS_EVENTS
        status = self.status if shown or self.status is not before else None
        entry = Entry(self.seq, at, event, status)
        if shown and (self.status.state is not before.state or isinstance(event, Interrupted)):
            entry.changes_state = True
            self.state_changes.append(entry)
            if len(self.state_changes) > STATE_CHANGES:
                self.unremembered = self.state_changes.popleft().seq
        return entry

    def _fold(self, event: LogEvent, at: int) -> None:  # noqa: C901 # one case for each event
        match event:
            case Grew() | ChannelReplaced() | ChannelClosed():
                fold_text(self.channels, event)
            case ArtifactChanged():
                self.artifacts[event.artifact] = event
            case Progressed():
                if event.type == "queue":
                    queued = None if event.status == "over" else event
                    self.status = replace(self.status, queued=queued)
            case Accepted():
                self.history.append(event.message)
                subject = event.message.subject
                self.status = replace(self.status, at=at, subject=subject, trace=event.trace)
                self.turn = 1
            case Added() | Answered():
                # A message that answered several interrupts is logged with each of them.
                if event.message not in self.history[1:]:
                    self.history.append(event.message)
                if self.status.state is State.AUTH_REQUIRED:  # the next turn begins
                    self._move(State.SUBMITTED, at)
                    self.turn += 1
            case SessionBound():
                self.status = replace(
                    self.status,
                    session_id=event.session_id,
                    title=event.title or self.status.title,
                    directory=event.directory or self.status.directory,
                    model=event.model or self.status.model,
                    agent=event.agent or self.status.agent,
                )
            case Started():
                self._move(State.WORKING, at)
            case Recovered():
                self.epochs.append(self.seq)
            case Interrupted():
                # One that has changed since it was shown is asked anew, in the same place.
                asked = {one.request_id: one for one in self.status.pending}
                pending = tuple((asked | {event.request_id: event}).values())
                self._move(State.INPUT_REQUIRED, at, pending=pending)
                if event.type == "plan":
                    self._used = self.status.usage
            case Resumed():
                self.settled[event.request_id] = event
                left = tuple(p for p in self.status.pending if p.request_id != event.request_id)
                self._move(State.INPUT_REQUIRED if left else State.WORKING, at, pending=left)
                self.turn += event.type == "plan"
            case UsageCounted():
                self.status = replace(
                    self.status,
                    usage=event if self._used is None else self._used + event,
                    model=event.model or self.status.model,
                    agent=event.agent or self.status.agent,
                )
            case Finished():
                self.status = replace(
                    self.status,
                    state=State(event.outcome.value),
                    at=at,
                    pending=(),
                    failure=event.failure,
                    finish=event.finish,
                    structured=event.structured,
                    queued=None,
                )
            case Unknown():
                pass
            case _:
                assert_never(event)

    def _move(self, state: State, at: int, pending: tuple[Interrupted, ...] = ()) -> None:
        self.status = replace(
            self.status,
            state=state,
            at=at,
            pending=pending,
            failure=None,
            finish=None,
            queued=None,
        )


# --- as bytes ---------------------------------------------------------------------------------

# This module wrote the bytes in the database, so their shape is not checked again.
_Fields = dict[str, Any]


def _failure(fields: _Fields | None) -> Failure | None:
    return load_known(Failure, fields) if fields else None


def _usage(fields: _Fields) -> UsageCounted:
    children = load_known(Usage, fields["children"]) if fields["children"] else None
    own = load_known(Usage, fields["own"])
    return load_known(UsageCounted, {**fields, "own": own, "children": children})


def _finished(fields: _Fields) -> Finished:
    failure, outcome = _failure(fields["failure"]), Outcome(fields["outcome"])
    return load_known(Finished, {**fields, "failure": failure, "outcome": outcome})


def _diff(fields: _Fields) -> DiffChanged:
    files = [load_known(FileChange, file) for file in fields["files"]]
    return load_known(DiffChanged, {**fields, "files": files})


def _replaced(fields: _Fields) -> ChannelReplaced:
    parts = [(part_id, text) for part_id, text in fields["parts"]]
    return ChannelReplaced(Channel(fields["channel"]), fields["message_id"], parts)


def _request(fields: _Fields) -> TurnRequest:
    routing: _Fields = fields["routing"]
    model = load_known(ModelRef, routing["model"]) if routing["model"] else None
    asked = load_known(Rights, routing.get("rights", {}))
    return TurnRequest(
        tuple(load_known(PromptPart, part) for part in fields["prompt"]),
        fields["user_message_id"],
        load_known(Routing, {**routing, "model": model, "rights": asked}),
        load_known(Rights, fields.get("rights", {})),
        fields.get("delivery"),  # 2.0.0 wrote no delivery, but a session, which is not needed
    )


_LOADERS: dict[str, Callable[[_Fields], LogEvent]] = {
    **{event.__name__: lambda fields, event=event: event(**fields) for event in get_args(LogEvent)},
    # Events with fields that are not plain JSON.
    "ChannelReplaced": _replaced,
    "ChannelClosed": lambda fields: ChannelClosed(Channel(fields["channel"]), fields["message_id"]),
    "Interrupted": Interrupted.load,
    "UsageCounted": _usage,
    "DiffChanged": _diff,
    "Finished": _finished,
    "Accepted": lambda fields: Accepted(Message.load(fields["message"]), fields.get("trace")),
    "Added": lambda fields: Added(Message.load(fields["message"]), _request(fields["request"])),
    "Answered": lambda fields: Answered(Message.load(fields["message"])),
    # 2.0.0 called a channel a lane.
    "LaneReplaced": lambda fields: _replaced({**fields, "channel": fields["lane"]}),
    "LaneClosed": lambda fields: ChannelClosed(Channel(fields["lane"]), fields["message_id"]),
}
"""Makes an event of its stored fields, by the name it is stored under."""


def encode(value: object) -> bytes:
    """Encode a value for the database, whatever came into it."""
    try:
        return orjson.dumps(value)
    except TypeError:  # a number that is too large, deep nesting, half a character
        return orjson.dumps(storable(value))


def dump_entries(entries: Iterable[Entry]) -> bytes:
    return encode([(e.at, type(e.event).__name__, e.event) for e in entries])


_KINDS = {kind.__name__: kind for kind in get_args(LogEvent)}


def load_entries(data: bytes) -> list[tuple[int, LogEvent]]:
    """Return (time in ms, event) of each entry in a segment."""
    try:
        return [(at, _LOADERS[name](fields)) for at, name, fields in orjson.loads(data)]
    except (KeyError, TypeError, ValueError):  # a later version wrote some of the events
        return [(at, _load_later(name, fields)) for at, name, fields in orjson.loads(data)]


def _load_later(name: str, fields: _Fields) -> LogEvent:
    """Read an event without the fields that only a later version knows; ``Unknown`` if it fails."""
    try:
        known = _KINDS[name].__dataclass_fields__ if name in _KINDS else fields
        return _LOADERS[name]({field: fields[field] for field in fields if field in known})
    except (KeyError, TypeError, ValueError):
        return Unknown(name)


def load_status(data: bytes) -> Status:
    """Read a status as ``orjson`` wrote it."""
    fields: _Fields = orjson.loads(data)
    queued = fields.get("queued")  # 2.0.0 did not write it
    values = {
        "state": State(fields["state"]),
        "pending": tuple(Interrupted.load(one) for one in fields["pending"]),
        "failure": _failure(fields["failure"]),
        "usage": _usage(fields["usage"]) if fields["usage"] else None,
        "queued": load_known(Progressed, queued) if queued else None,
    }
    return load_known(Status, fields | values)


def dump_archive(state: TaskState) -> bytes:
    """Encode everything of an ended task that is not in its status."""
    return encode(
        {
            "seq": state.seq,
            "epochs": state.epochs,
            "history": state.history,
            "lanes": {
                channel.value: [
                    text.message_id,
                    text.closed,
                    [(part_id, "".join(pieces)) for part_id, pieces in text.parts],
                ]
                for channel, text in state.channels.items()
            },
            "artifacts": [(type(one).__name__, one) for one in state.artifacts.values()],
            "settled": list(state.settled.values()),
        }
    )


def load_state(ref: TaskRef, status: bytes, archive: bytes | None) -> TaskState:
    """Build a task as it was stored; without the archive it has a status and nothing else."""
    state = TaskState(ref)
    state.status = load_status(status)
    if archive is None:
        return state
    fields: _Fields = orjson.loads(archive)
    state.seq = state.unremembered = fields["seq"]
    state.epochs = fields["epochs"]
    state.history = [Message.load(message) for message in fields["history"]]
    for name, (message_id, closed, parts) in fields["lanes"].items():
        pieces = [(part_id, [text]) for part_id, text in parts]
        state.channels[Channel(name)] = RunningText(message_id, pieces, closed)
    artifacts: list[tuple[str, _Fields]] = fields["artifacts"]
    if "tools" in fields:  # 2.0.0 wrote only names here, and each kind under a key of its own
        artifacts = [("ToolChanged", tool) for tool in fields["tools"]]
        named = (("DiffChanged", fields["diff"]), ("ResultGiven", fields.get("result")))
        artifacts += [(name, one) for name, one in named if one]
    for name, one in artifacts:
        event = _load_later(name, one)
        if isinstance(event, ArtifactChanged):
            state.artifacts[event.artifact] = event
    state.settled = {one["request_id"]: load_known(Resumed, one) for one in fields["settled"]}
    return state


def load_request(data: bytes) -> TurnRequest:
    """Read a request as ``orjson`` wrote it; raise UpstreamUnreachableError if it is too new."""
    try:
        return _request(orjson.loads(data))
    except (KeyError, TypeError, ValueError):
        raise UpstreamUnreachableError(TOO_NEW) from None
