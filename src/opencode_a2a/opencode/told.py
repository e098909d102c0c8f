"""What a turn has told: folded, so that it can go on elsewhere, and joined, where it is wordy.

``opencode.reader`` starts from a ``Told`` after a restart; whoever restarts it folds the log.
Knows nothing of OpenCode.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

from opencode_a2a.events import (
    Channel,
    ChannelClosed,
    ChannelReplaced,
    Interrupted,
    JsonObject,
    Progressed,
    ReasoningGrew,
    Resumed,
    SessionBound,
    TextGrew,
    ToolChanged,
    TurnEvent,
)
from opencode_a2a.ids import MessageId, RequestId
from opencode_a2a.opencode.text import ToldChannel

ProgressKey = tuple[str, str, str | None]
"""Type, status and part: one of each is told once."""


@dataclass(slots=True)
class Told:
    """What a turn has told so far, so that another process can go on exactly there."""

    channels: dict[Channel, ToldChannel] = field(default_factory=dict[Channel, ToldChannel])
    tools: dict[str, ToolChanged] = field(default_factory=dict[str, ToolChanged])
    open: dict[RequestId, Interrupted] = field(default_factory=dict[RequestId, Interrupted])
    settled: set[RequestId] = field(default_factory=set[RequestId])
    progress: set[ProgressKey] = field(default_factory=set[ProgressKey])
    todos: list[JsonObject] | None = None
    title: str | None = None

    @classmethod
    def of(cls, events: Iterable[TurnEvent]) -> "Told":
        """Fold the events of a turn, in order."""
        told = cls()
        for event in events:
            told.add(event)
        return told

    def add(self, event: TurnEvent) -> None:
        match event:
            case TextGrew():
                self._channel(Channel.TEXT, event.message_id).grow(event.part_id, event.text)
            case ReasoningGrew():
                self._channel(Channel.REASONING, event.message_id).grow(event.part_id, event.text)
            case ChannelReplaced():
                self._channel(event.channel, event.message_id).parts = list(event.parts)
            case ChannelClosed():
                self._channel(event.channel, event.message_id).closed = True
            case _:
                self._add_state(event)

    def _add_state(self, event: TurnEvent) -> None:
        match event:
            case ToolChanged():
                self.tools[event.part_id] = event
            case Interrupted():
                self.open[event.request_id] = event
            case Resumed():
                self.open.pop(event.request_id, None)
                self.settled.add(event.request_id)
            case Progressed(type="todo"):
                self.todos = event.todos
            case Progressed():
                self.progress.add((event.type, event.status, event.part_id))
            case SessionBound(title=str(title)):
                self.title = title
            case _:
                pass

    def _channel(self, channel: Channel, message_id: MessageId) -> ToldChannel:
        told = self.channels.setdefault(channel, ToldChannel(message_id))
        told.message_id = message_id
        return told


def merged(events: list[TurnEvent]) -> list[TurnEvent]:
    """Join neighbouring growth of one part, and drop tool states that are overtaken at once."""
    if len(events) < 2:
        return events
    out: list[TurnEvent] = []
    texts: list[str] = []
    for event in events:
        last = out[-1] if out else None
        match last, event:
            case (TextGrew(), TextGrew()) | (ReasoningGrew(), ReasoningGrew()):
                if last.part_id == event.part_id:
                    texts.append(event.text)
                    continue
            case ToolChanged(), ToolChanged():
                if (last.part_id, last.status) == (event.part_id, event.status):
                    out[-1] = event
                    continue
            case _:
                pass
        _close(out, texts)
        out.append(event)
    _close(out, texts)
    return out


def _close(out: list[TurnEvent], texts: list[str]) -> None:
    """Give the last event the texts that followed it."""
    if not texts:
        return
    match out[-1]:
        case TextGrew() | ReasoningGrew() as last:
            joined = last.text + "".join(texts)
            out[-1] = type(last)(last.message_id, last.part_id, joined, last.opens)
        case _:
            pass
    texts.clear()
