"""Recorded event streams, and what OpenCode had stored at each moment of them.

A model of OpenCode's store as OPENCODE.md describes it: parts and messages are kept as their
last update says, deltas are not kept at all, a session that is deleted takes everything with
it, a pending request stays until it is answered.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import orjson

from opencode_a2a.events import Channel, Resolution
from opencode_a2a.ids import MessageId, RequestId, SessionId
from opencode_a2a.opencode.events import (
    Event,
    MessageRemoved,
    MessageUpdated,
    PartDelta,
    PartRemoved,
    PartUpdated,
    PermissionAsked,
    QuestionAsked,
    RequestSettled,
    SessionChanged,
    SessionDeleted,
    SessionInfo,
    SessionStatusChanged,
    decode,
)
from opencode_a2a.opencode.turn_state import Snapshot
from opencode_a2a.opencode.types import (
    AssistantMessage,
    CompactionPart,
    Message,
    MessageWithParts,
    Part,
    PermissionRequest,
    QuestionRequest,
    ReasoningPart,
    SessionStatus,
    TextPart,
    ToolPart,
    UserMessage,
)

TRANSCRIPTS = Path(__file__).parent.parent / "transcripts" / "1.18.33"
OLDER = ("1.1.65", "1.3.2")
"""Versions whose events had another shape; their recordings are named ``version/name``."""
NAMES = sorted(path.stem for path in TRANSCRIPTS.glob("*.jsonl")) + sorted(
    f"{version}/{path.stem}"
    for version in OLDER
    for path in (TRANSCRIPTS.parent / version).glob("*.jsonl")
)


def frames(name: str) -> list[bytes]:
    """Return a recording as the data of its frames on the global stream."""
    place = TRANSCRIPTS.parent if "/" in name else TRANSCRIPTS
    lines = (place / f"{name}.jsonl").read_bytes().splitlines()
    return [_frame(orjson.loads(line)) for line in lines]


def _frame(line: dict[str, object]) -> bytes:
    line.pop("_t")
    if "payload" not in line:
        line = {"directory": "/workspace", "project": "0" * 40, "payload": line}
    return orjson.dumps(line)


@dataclass
class SessionState:
    infos: dict[MessageId, Message] = field(default_factory=dict[MessageId, Message])
    parts: dict[MessageId, dict[str, Part]] = field(
        default_factory=dict[MessageId, dict[str, Part]]
    )

    def messages(self) -> list[MessageWithParts]:
        return [
            MessageWithParts(info=info, parts=list(self.parts.get(info.id, {}).values()))
            for info in self.infos.values()
        ]


class OpenCodeState:
    """Folds events into what the store and the lists of pending requests would answer."""

    def __init__(self) -> None:
        self.sessions: dict[SessionId, SessionState] = {}
        self.parents: dict[SessionId, SessionId | None] = {}
        self.infos: dict[SessionId, SessionInfo] = {}
        self.statuses: dict[SessionId, SessionStatus] = {}
        self.permissions: dict[RequestId, PermissionRequest] = {}
        self.questions: dict[RequestId, QuestionRequest] = {}
        self.deleted: set[SessionId] = set()

    def apply(self, event: Event) -> None:
        if event.session_id not in self.deleted:
            self._apply_stored(event, self.sessions.setdefault(event.session_id, SessionState()))
        self._apply_live(event)

    def _apply_stored(self, event: Event, session: SessionState) -> None:
        match event:
            case MessageUpdated(info=info):
                session.infos[info.id] = info
            case MessageRemoved():
                session.infos.pop(event.message_id, None)
                session.parts.pop(event.message_id, None)
            case PartUpdated(part=part):
                session.parts.setdefault(part.message_id, {})[part.id] = part
            case PartRemoved():
                session.parts.get(event.message_id, {}).pop(event.part_id, None)
            case SessionChanged(info=info):
                self.parents[event.session_id] = info.parent_id
                self.infos[event.session_id] = info
            case SessionDeleted():
                self.deleted.add(event.session_id)
                self.sessions[event.session_id] = SessionState()
            case _:
                pass

    def _apply_live(self, event: Event) -> None:
        match event:
            case SessionStatusChanged():
                self.statuses[event.session_id] = event.status
            case PermissionAsked():
                self.permissions[event.id] = event
            case QuestionAsked():
                self.questions[event.id] = event
            case RequestSettled():
                self.permissions.pop(event.request_id, None)
                self.questions.pop(event.request_id, None)
            case _:
                pass

    def descendants(self, root: SessionId) -> set[SessionId]:
        found = {child for child, parent in self.parents.items() if parent == root}
        return found.union(*(self.descendants(child) for child in found))

    def stored(self, root: SessionId) -> Snapshot:
        return Snapshot(
            messages=self.sessions.get(root, SessionState()).messages(),
            children={
                child: self.sessions.get(child, SessionState()).messages()
                for child in self.descendants(root)
            },
            statuses={key: value for key, value in self.statuses.items() if value.type != "idle"},
            permissions=list(self.permissions.values()),
            questions=list(self.questions.values()),
            directory="/workspace",
        )


@dataclass(frozen=True, repr=False)
class Recording:
    """A recorded stream, read as the turn of one of its prompts."""

    name: str
    root: SessionId
    prompt: MessageId
    events: Sequence[Event]
    states: Sequence[Snapshot]
    """What was stored before the first event, after it, and so on."""

    @property
    def deleted(self) -> bool:
        return any(isinstance(event, SessionDeleted) for event in self.events)

    def __repr__(self) -> str:
        return f"<{self.name} {self.prompt}>"

    def first(self, kind: type[Event]) -> int:
        """Return the place of the first event of a kind."""
        return next(place for place, event in enumerate(self.events) if isinstance(event, kind))

    def run(self) -> list[MessageWithParts]:
        """Return the answer's messages as stored in the end, summaries left out."""
        ours = {self.prompt}
        prompts = {self.prompt}
        answers: list[MessageWithParts] = []
        seen = False
        for message in self.states[-1].messages:
            seen = seen or message.info.id == self.prompt
            match message.info:
                case UserMessage(id=key) if seen and key != self.prompt:
                    prompts = {key} if not _made_by_opencode(message) else prompts | {key}
                    ours |= {key} if self.prompt in prompts else set[MessageId]()
                case AssistantMessage(parent_id=parent, summary=False) if parent in ours:
                    answers.append(message)
                case _:
                    pass
        return answers

    def text(self, channel: Channel) -> str:
        """Return the stored text of a channel in the end."""
        texts = [
            part.text
            for message in self.run()
            for part in message.parts
            if isinstance(part, TextPart | ReasoningPart) and part.type == channel
        ]
        return "\n\n".join(filter(None, texts))

    def said(self, channel: Channel) -> str:
        """Return the text of a channel with that of its last attempts, which may not be stored.

        OpenCode stores no text of an attempt that failed: it stays if no other attempt followed.
        """
        texts: list[str] = []
        for message in self.run():
            starts = [i for i, part in enumerate(message.parts) if part.type == "step-start"]
            for index, part in enumerate(message.parts):
                if isinstance(part, TextPart | ReasoningPart) and part.type == channel:
                    lasts = part.id in self.dead_parts() and index >= (starts or [0])[-1]
                    texts.append(part.text or (self._sent(part.id) if lasts else ""))
        return "\n\n".join(filter(None, texts))

    def _sent(self, part_id: str) -> str:
        deltas = [e for e in self.events if isinstance(e, PartDelta) and e.part_id == part_id]
        return "".join({delta.event_id: delta.delta for delta in deltas}.values())

    def dead_parts(self) -> list[str]:
        """Return the text parts that never ended: a retry or a crash left them behind."""
        parts = [part for message in self.run() for part in message.parts]
        return [
            part.id
            for part in parts
            if isinstance(part, TextPart | ReasoningPart) and part.time and part.time.end is None
        ]

    def tools(self) -> dict[str, ToolPart]:
        """Return the stored tool parts in the end, by id."""
        parts = [part for message in self.run() for part in message.parts]
        return {part.id: part for part in parts if isinstance(part, ToolPart)}

    def requests(self) -> list[RequestId]:
        """Return the permissions and questions that were asked, in order."""
        return [e.id for e in self.events if isinstance(e, PermissionAsked | QuestionAsked)]

    def resolutions(self) -> dict[RequestId, Resolution]:
        """Return how each request was settled; void if the run ended before its answer."""
        answers: dict[RequestId, Resolution] = dict.fromkeys(self.requests(), "void")
        for event in self.events:
            if isinstance(event, RequestSettled):
                answers[event.request_id] = event.resolution
        return answers


def _made_by_opencode(message: MessageWithParts) -> bool:
    return all(
        isinstance(part, CompactionPart) or (isinstance(part, TextPart) and part.synthetic)
        for part in message.parts
    )


@cache
def recordings() -> list[Recording]:
    """Return every recording, once for each prompt in it."""
    return [recording for name in NAMES for recording in _read(name)]


def recording(name: str) -> Recording:
    """Return a recording as the turn of its first prompt."""
    return next(recording for recording in recordings() if recording.name == name)


def _read(name: str) -> list[Recording]:
    events = [event for frame in frames(name) if (event := decode(frame)) is not None]
    state = OpenCodeState()
    root = next(e.session_id for e in events)
    states = [state.stored(root)]
    for event in events:
        state.apply(event)
        states.append(state.stored(root))
    prompts = dict.fromkeys(
        event.info.id
        for event in events
        if isinstance(event, MessageUpdated)
        and event.session_id == root
        and event.info.role == "user"
        and not _added(event.info.id, events)
    )
    return [
        Recording(name, root, prompt, events, states)
        for prompt in prompts or [MessageId("msg_unstored")]
    ]


def _added(message_id: MessageId, events: Sequence[Event]) -> bool:
    parts = [e.part for e in events if isinstance(e, PartUpdated)]
    return any(
        part.message_id == message_id
        and isinstance(part, TextPart)
        and part.metadata is not None
        and "compaction_continue" in part.metadata
        for part in parts
    )
