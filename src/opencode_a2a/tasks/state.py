"""What state a task is in, as the fold of its log. Pure.

``log`` applies and stores the entries, ``a2a.render`` reads the result. The first terminal state
wins: nothing can be appended after it.
"""

import re
from dataclasses import dataclass, replace
from enum import StrEnum

from opencode_a2a.events import (
    Channel,
    ChannelClosed,
    ChannelReplaced,
    DiffChanged,
    Failure,
    Finished,
    Interrupted,
    Json,
    Progressed,
    ReasoningGrew,
    Resumed,
    RunningText,
    SessionBound,
    Started,
    TextGrew,
    ToolChanged,
    TurnEvent,
    UsageCounted,
    fold_text,
)
from opencode_a2a.ids import ContextId, Principal, SessionId, TaskId
from opencode_a2a.messages import Answered, Message


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


@dataclass(frozen=True, slots=True)
class Recovered:
    """The service was restarted; what was shown after the entry before this one may be lost.

    A reader whose cursor is from before the restart and not below this entry has seen entries
    that no longer exist, and is given the task anew.
    """

    reason: str


LogEvent = TurnEvent | Accepted | Answered | Recovered


@dataclass(frozen=True, slots=True)
class TaskRef:
    """What never changes about a task."""

    id: TaskId
    context_id: ContextId
    principal: Principal
    output_modes: tuple[str, ...] | None = None
    """Media types the caller accepts; None when anything will do."""
    created_at: int = 0


@dataclass(frozen=True, slots=True)
class Status:
    """The state of a task and everything a status update says beside it; small and frozen."""

    state: State
    at: int
    """Milliseconds since the epoch of the last change of state."""
    session_id: SessionId | None = None
    title: str | None = None
    """Of the session."""
    subject: str | None = None
    """What was asked for: the beginning of the first message."""
    directory: str | None = None
    model: str | None = None
    """``provider/model``: the one asked for, then the one that answered."""
    agent: str | None = None
    pending: tuple[Interrupted, ...] = ()
    failure: Failure | None = None
    finish: str | None = None
    structured: Json = None
    usage: UsageCounted | None = None
    queued: Progressed | None = None
    """What a task that has not started yet waits for."""


@dataclass(slots=True)
class Entry:
    """One numbered event of a log, with the status it led to when it touched the status."""

    seq: int
    at: int
    event: LogEvent
    status: Status | None = None

    @property
    def stops(self) -> bool:
        """Whether the task stops here: it has ended, or begins to wait for a person."""
        if self.status is None or not isinstance(self.event, Interrupted | Resumed | Finished):
            return False
        return self.status.state.terminal or self.status.state.interrupted


@dataclass(frozen=True, slots=True)
class Cursor:
    """The last entry that a reader has: its number, and how often the task had been recovered."""

    seq: int
    epoch: int = 0

    def __str__(self) -> str:
        return f"{self.seq}.{self.epoch}" if self.epoch else str(self.seq)

    @classmethod
    def parse(cls, text: str) -> "Cursor":
        """Read what ``str`` wrote; raise ValueError for anything else."""
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
    """Milliseconds: only tasks whose status is from then or later."""
    size: int = 50
    token: str | None = None
    artifacts: bool = False
    history_length: int = 0
    """How many messages of each task to return."""


class TerminalError(Exception):
    """An entry was to follow a terminal state."""


class TaskState:
    """A task as its log tells it so far."""

    def __init__(self, ref: TaskRef) -> None:
        self.ref = ref
        self.seq = 0
        self.status = Status(State.SUBMITTED, ref.created_at)
        self.history: list[Message] = []
        self.channels: dict[Channel, RunningText] = {}
        self.tools: dict[str, ToolChanged] = {}
        self.diff: DiffChanged | None = None
        self.artifacts: dict[str, None] = {}
        """Artifacts in the order they were opened: a channel, ``tool:<part>``, ``diff``."""
        self.settled: dict[str, Resumed] = {}
        """Interrupts that are over, by request id."""
        self.epochs: list[int] = []
        """The sequence number of every recovery, in order."""

    @property
    def epoch(self) -> int:
        """How often the task was recovered."""
        return len(self.epochs)

    def apply(self, event: LogEvent, at: int) -> Entry:
        """Append one event; raise TerminalError when the log is closed."""
        if self.status.state in TERMINAL:
            raise TerminalError(self.ref.id)
        self.seq += 1
        if isinstance(event, TextGrew | ReasoningGrew):
            opened = fold_text(self.channels, event)
            if opened is not None:
                self.artifacts.setdefault(opened)
            return Entry(self.seq, at, event)
        before = self.status
        match event:
            case ChannelReplaced() | ChannelClosed():
                fold_text(self.channels, event)
                self.artifacts.setdefault(event.channel)
            case ToolChanged():
                self.tools[event.part_id] = event
                self.artifacts.setdefault(f"tool:{event.part_id}")
            case DiffChanged():
                self.diff = event
                self.artifacts.setdefault("diff")
            case Progressed():
                if event.type == "queue":
                    self.status = replace(self.status, queued=event)
                return Entry(self.seq, at, event, self.status)  # though the state is the same
            case Accepted():
                self.history.append(event.message)
                self.status = replace(before, subject=event.message.subject)
                return Entry(self.seq, at, event)  # the status says nothing new to a reader
            case Answered():
                if event.message not in self.history[1:]:  # it may have settled several interrupts
                    self.history.append(event.message)
            case _:
                self._change(event, at)
        return Entry(self.seq, at, event, self.status if self.status is not before else None)

    def _change(self, event: LogEvent, at: int) -> None:
        """Apply an event that changes the status."""
        match event:
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
                self.status = replace(self.status)
            case Interrupted():
                self._move(State.INPUT_REQUIRED, at, pending=(*self.status.pending, event))
            case Resumed():
                self.settled[event.request_id] = event
                left = tuple(p for p in self.status.pending if p.request_id != event.request_id)
                self._move(State.INPUT_REQUIRED if left else State.WORKING, at, pending=left)
            case UsageCounted():
                self.status = replace(
                    self.status,
                    usage=event,
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
            case _:
                raise AssertionError(f"no rule for {type(event).__name__}")

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
