"""What a peer's task tells, each thing once, whichever way it came.

``peers.client`` feeds the events of streams and the snapshots of polls into an ``Account``; out
come normalised events for commands and for the tool: the answer apart from reasoning and tool
activity, and no text twice, however often the peer repeats it. Pure: knows no HTTP.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

from opencode_a2a.events import JsonObject
from opencode_a2a.messages import Part
from opencode_a2a.peers.hints import (
    Prompt,
    ToolCall,
    read_lane,
    read_progress,
    read_prompt,
    read_tool,
)
from opencode_a2a.peers.wire import (
    Artifact,
    ArtifactUpdate,
    Event,
    Reply,
    State,
    Status,
    StatusUpdate,
    Task,
)


@dataclass(frozen=True, slots=True)
class TaskOpened:
    """The peer made or named the task that the message belongs to."""

    task_id: str
    context_id: str | None


@dataclass(frozen=True, slots=True)
class AnswerGrew:
    """New answer text, to be set right behind what the same artifact told before."""

    artifact_id: str
    text: str


@dataclass(frozen=True, slots=True)
class AnswerReplaced:
    """An artifact's answer anew: the peer took back a part of what it had told."""

    artifact_id: str
    text: str


@dataclass(frozen=True, slots=True)
class ReasoningGrew:
    text: str


@dataclass(frozen=True, slots=True)
class ToolChanged:
    """The state of one tool call of the peer; it takes the place of the one told before."""

    call: ToolCall


@dataclass(frozen=True, slots=True)
class FileGiven:
    """A piece of an artifact that is not answer text: a file, a diff, data."""

    artifact_id: str
    name: str | None
    part: Part


@dataclass(frozen=True, slots=True)
class StatusChanged:
    """A sign of life, with words if the peer gave some."""

    state: State
    text: str | None


@dataclass(frozen=True, slots=True)
class Interrupted:
    """The task waits: for an answer, or for a sign-in elsewhere. The last event of an ask."""

    state: State
    text: str | None
    prompt: Prompt | None = None


@dataclass(frozen=True, slots=True)
class Finished:
    """The task has ended; ``text`` is what the peer says about the end."""

    state: State
    text: str | None


PeerEvent = (
    TaskOpened
    | AnswerGrew
    | AnswerReplaced
    | ReasoningGrew
    | ToolChanged
    | FileGiven
    | StatusChanged
    | Interrupted
    | Finished
)

_ANSWER_TYPES = (None, "", "text/plain", "text/markdown")


@dataclass(slots=True)
class _Told:
    """What an artifact has told: its running text and its other parts."""

    text: list[str] = field(default_factory=list[str])
    others: list[Part] = field(default_factory=list[Part])


class Account:
    """One task of a peer as far as it was told; keep it while the task is continued."""

    def __init__(self) -> None:
        self.task_id: str | None = None
        self.context_id: str | None = None
        self.status = Status(State.UNKNOWN)
        self.settled = False
        """The task has ended, or waits for somebody."""
        self._told: dict[tuple[str, str], _Told] = {}
        self._tools: dict[str, ToolCall] = {}
        self._answered = False

    @property
    def answer(self) -> str:
        """The whole answer so far, its artifacts on lines of their own."""
        texts = ["".join(t.text) for (_, lane), t in self._told.items() if lane == "text"]
        return "\n".join(text for text in texts if text)

    def begin(self) -> None:
        """A message is about to be sent: what comes now is the answer to it."""
        self.settled = False
        self._answered = False

    def prime(self, task: Task) -> None:
        """Take a task as already told, so that only news will be told."""
        for _ in self.take(task):
            pass
        self.begin()

    def take(self, event: Event) -> Iterator[PeerEvent]:
        """Fold an event in and yield what is new in it."""
        match event:
            case Task():
                yield from self._open(event.task_id, event.context_id)
                for artifact in event.artifacts:
                    yield from self._artifact(artifact, artifact.metadata, append=False)
                if event.status != self.status:
                    yield from self._status(event.status, event.metadata)
            case StatusUpdate():
                yield from self._open(event.task_id, event.context_id)
                yield from self._status(event.status, event.metadata)
            case ArtifactUpdate():
                yield from self._open(event.task_id, event.context_id)
                metadata = event.metadata | event.artifact.metadata
                yield from self._artifact(event.artifact, metadata, append=event.append)
            case Reply():
                self.context_id = event.context_id or self.context_id
                said = Artifact(event.message.message_id, event.message.parts)
                yield from self._artifact(said, {}, append=False)
                yield from self._status(Status(State.COMPLETED), {})

    def _open(self, task_id: str, context_id: str | None) -> Iterator[PeerEvent]:
        if task_id == self.task_id:
            return
        self.task_id = task_id
        self.context_id = context_id or self.context_id
        yield TaskOpened(task_id, self.context_id)

    def _artifact(
        self, artifact: Artifact, metadata: JsonObject, *, append: bool
    ) -> Iterator[PeerEvent]:
        lane = read_lane(metadata)
        if lane == "tool_call":
            yield from self._tool(artifact)
            return
        told = self._told.setdefault((artifact.artifact_id, lane), _Told())
        words = [part.text or "" for part in artifact.parts if _is_words(part)]
        if words:
            yield from self._words(artifact.artifact_id, lane, told, "".join(words), append)
        yield from _files(artifact, told, append)

    def _words(
        self, artifact_id: str, lane: str, told: _Told, text: str, append: bool
    ) -> Iterator[PeerEvent]:
        before = "" if append else "".join(told.text)
        if not text.startswith(before):
            told.text = [text]
            if lane == "text":
                self._answered = True
                yield AnswerReplaced(artifact_id, text)
            return
        news = text[len(before) :]
        if not news:
            return
        told.text.append(news)
        if lane == "text":
            self._answered = True
            yield AnswerGrew(artifact_id, news)
        elif lane == "reasoning":
            yield ReasoningGrew(news)

    def _tool(self, artifact: Artifact) -> Iterator[PeerEvent]:
        for part in artifact.parts:
            call = read_tool(part.data, artifact.artifact_id)
            if part.kind == "data" and self._tools.get(call.call_id) != call:
                self._tools[call.call_id] = call
                yield ToolChanged(call)

    def _status(self, status: Status, metadata: JsonObject) -> Iterator[PeerEvent]:
        known, self.status = self.status, status
        self.settled = status.state.ended or status.state.waits
        if status.state is State.COMPLETED and not self._answered and status.message:
            # Many small agents put their whole answer into the last status.
            yield from self._artifact(Artifact("status", status.message.parts), {}, append=False)
        if status.state.ended:
            yield Finished(status.state, status.text)
        elif status.state.waits:
            said = (status.message and status.message.metadata) or {}
            yield Interrupted(status.state, status.text, read_prompt(metadata | said))
        elif (known.state, known.text) != (status.state, status.text):
            yield StatusChanged(status.state, status.text or read_progress(metadata))


def _files(artifact: Artifact, told: _Told, append: bool) -> Iterator[FileGiven]:
    others = [part for part in artifact.parts if not _is_words(part)]
    known = [] if append else told.others
    if others[: len(known)] == known:
        others = others[len(known) :]
    told.others = [*told.others, *others]
    for part in others:
        yield FileGiven(artifact.artifact_id, part.filename or artifact.name, part)


def _is_words(part: Part) -> bool:
    return part.kind == "text" and part.media_type in _ANSWER_TYPES
