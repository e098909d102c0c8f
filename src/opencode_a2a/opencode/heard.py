"""What was heard lately of the texts that OpenCode is writing.

OpenCode (1.18) stores a text when it is complete, and its event stream has no replay. So a process
that takes a turn over can continue an open text only if it was listening before. Where several
replicas may run an OpenCode, the feed of each keeps the latest pieces of every open text
(``HeardTexts``), and gives them to the turn reader of a turn that is resumed. Nothing here knows
about turns.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

from opencode_a2a.ids import MessageId, SessionId
from opencode_a2a.opencode.events import (
    Event,
    HeardText,
    PartDelta,
    PartUpdated,
    SessionDeleted,
    SessionStatusChanged,
)
from opencode_a2a.opencode.text import ended
from opencode_a2a.opencode.types import (
    ReasoningPart,
    StatusIdle,
    StepStartPart,
    TextPart,
)

MAX_PIECES = 2_000
"""Pieces of one text that are kept: those since the last that its owner has stored are needed, and
an owner that dies is replaced within seconds."""
MAX_CHARACTERS = 500_000
"""Characters of one text that are kept."""


@dataclass(slots=True)
class _OpenText:
    message_id: MessageId
    start: TextPart | ReasoningPart | None = None
    """The part as it began; None if that was not heard, or is no longer kept."""
    pieces: dict[str, str] = field(default_factory=dict[str, str])
    """By the ids of their events, in order."""
    characters: int = 0

    def add(self, event_id: str, text: str) -> None:
        if event_id in self.pieces:  # OpenCode sends some events twice
            return
        self.pieces[event_id] = text
        self.characters += len(text)
        while len(self.pieces) > MAX_PIECES or self.characters > MAX_CHARACTERS:
            self.start = None
            self.characters -= len(self.pieces.pop(next(iter(self.pieces))))


class HeardTexts:
    """The open texts of all sessions of one OpenCode, since the feed last connected."""

    def __init__(self) -> None:
        self._sessions: dict[SessionId, dict[str, _OpenText]] = {}

    def of(self, session: SessionId) -> Iterator[HeardText]:
        """Return the open texts of a session, each as one event."""
        for part_id, text in self._sessions.get(session, {}).items():
            pieces = dict(text.pieces)
            yield HeardText("", session, text.message_id, part_id, pieces, text.start)

    def hear(self, event: Event) -> None:
        """Note an event. Events without an id (before 1.4) cannot be put in order."""
        session = event.session_id
        if type(event) is PartDelta:
            if not event.event_id:
                return
            texts = self._sessions.setdefault(session, {})
            text = texts.get(event.part_id)
            if text is None:
                text = texts[event.part_id] = _OpenText(event.message_id)
            text.add(event.event_id, event.delta)
            return
        match event:
            case PartUpdated(part=TextPart() | ReasoningPart() as part):
                texts = self._sessions.setdefault(session, {})
                if ended(part):
                    texts.pop(part.id, None)
                elif part.text:  # no version with ids does this: what came before is not counted on
                    texts[part.id] = _OpenText(part.message_id)
                elif event.event_id and part.id not in texts:
                    texts[part.id] = _OpenText(part.message_id, part)
            case (
                # A step that begins makes void what was not ended before.
                PartUpdated(part=StepStartPart())
                | SessionStatusChanged(status=StatusIdle())
                | SessionDeleted()
            ):
                self.forget(session)
            case _:
                pass

    def forget(self, session: SessionId) -> None:
        """Forget the texts of a session: they have ended, or an event may be missing."""
        self._sessions.pop(session, None)

    def clear(self) -> None:
        """Forget everything: events may be missing."""
        self._sessions.clear()
