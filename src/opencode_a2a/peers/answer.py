"""What a peer's task tells, each thing once, whichever way it came.

``peers.client`` feeds the events of streams and the snapshots of polls into an ``PeerTask``; out
come normalised events for commands and for the tool: the answer apart from reasoning and tool
activity, and no text twice, however often the peer repeats it. Pure: knows no HTTP.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

from opencode_a2a.events import JsonObject
from opencode_a2a.messages import Part
from opencode_a2a.peers import hints
from opencode_a2a.peers.hints import Progress, Prompt, ToolCall
from opencode_a2a.peers.wire import Artifact, Event, State, Status, Task, Update


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
    progress: Progress | None = None
    """Why there is nothing else to tell; the text then says the same."""


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


class PeerTask:
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
        self.last_words: str | None = None
        """What the last status said: its message, or its progress."""

    @property
    def answer(self) -> str:
        """The whole answer so far, its artifacts on lines of their own."""
        texts = ["".join(t.text) for (_, channel), t in self._told.items() if channel == "text"]
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
        self.context_id = event.context_id or self.context_id
        if event.task_id not in (None, self.task_id):
            self.task_id = event.task_id
            yield TaskOpened(event.task_id, self.context_id)
        match event:
            case Task():
                for artifact in event.artifacts:
                    yield from self._artifact(artifact, append=False)
                if event.status != self.status:
                    yield from self._status(event.status, event.metadata)
            case Update():
                if event.artifact:
                    yield from self._artifact(event.artifact, append=event.append)
                if event.status:
                    yield from self._status(event.status, event.metadata)

    def _artifact(self, artifact: Artifact, *, append: bool) -> Iterator[PeerEvent]:
        channel = hints.read_channel(artifact.metadata)
        if channel == "tool_call":
            yield from self._tool(artifact)
            return
        told = self._told.setdefault((artifact.artifact_id, channel), _Told())
        words = [part.text or "" for part in artifact.parts if _is_words(part)]
        if words:
            yield from self._words(artifact.artifact_id, channel, told, "".join(words), append)
        yield from _files(artifact, told, append)

    def _words(
        self, artifact_id: str, channel: str, told: _Told, text: str, append: bool
    ) -> Iterator[PeerEvent]:
        before = "" if append else "".join(told.text)
        replaced = not text.startswith(before)
        news = text if replaced else text[len(before) :]
        if replaced:
            told.text.clear()
        told.text.append(news)
        if channel == "text" and (news or replaced):
            self._answered = True
            yield (AnswerReplaced if replaced else AnswerGrew)(artifact_id, news)
        elif channel == "reasoning" and news and not replaced:
            yield ReasoningGrew(news)

    def _tool(self, artifact: Artifact) -> Iterator[PeerEvent]:
        for part in artifact.parts:
            call = hints.read_tool(part.data, artifact.artifact_id)
            if part.kind == "data" and self._tools.get(call.call_id) != call:
                self._tools[call.call_id] = call
                yield ToolChanged(call)

    def _status(self, status: Status, metadata: JsonObject) -> Iterator[PeerEvent]:
        known, self.status = self.status, status
        self.settled = status.state.settled
        if status.state is State.COMPLETED and not self._answered and status.message:
            # Many small agents put their whole answer into the last status.
            yield from self._artifact(Artifact("status", status.message.parts), append=False)
        if status.state.ended:
            yield Finished(status.state, status.text)
        elif status.state.waits:
            said = (status.message and status.message.metadata) or {}
            yield Interrupted(status.state, status.text, hints.read_prompt(metadata | said))
        else:
            progress = hints.read_progress(metadata)
            text = status.text or (progress and progress.text)
            if (known.state, self.last_words) != (status.state, text):
                self.last_words = text
                yield StatusChanged(status.state, text, progress)


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
