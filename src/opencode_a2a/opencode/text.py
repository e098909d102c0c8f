"""The running texts of a turn, each made of parts that grow, end, die or are held back.

``opencode.reader`` reports what is heard about a part; a channel decides what can be emitted now,
so that what was emitted is always a beginning of what OpenCode will have stored. Only when
OpenCode dies is more emitted than stored: it stays. Each part keeps what was emitted of it beside
what is known: texts grow long, and the difference must not be computed from the beginning.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

from opencode_a2a.events import GREW, Channel, ChannelReplaced, RunningText, TurnEvent
from opencode_a2a.ids import MessageId
from opencode_a2a.opencode.types import ReasoningPart, TextPart

SEPARATOR = "\n\n"


def ended(part: TextPart | ReasoningPart) -> bool:
    return part.time is None or part.time.end is not None


@dataclass(slots=True)
class _ChannelPart:
    """One part as OpenCode has it, as far as it is known, and what was emitted of it."""

    id: str
    message_id: MessageId
    emitted: list[str] = field(default_factory=list[str])
    """The pieces in the channel's running text, the separator included."""
    separated: bool = False
    """Whether the emitted pieces begin with a separator."""
    waiting: list[str] = field(default_factory=list[str])
    """Text that was heard and cannot be emitted yet."""
    streaming: bool = False
    """All of its text since the beginning was heard; otherwise it waits for its final text."""
    final: str | None = None
    void: bool = False
    """A provider's retry left it dead."""
    fresh: bool = False
    """It was heard of since the last gap, so that an older snapshot may lack it."""

    @property
    def open(self) -> bool:
        return self.final is None and not self.void

    @property
    def emitted_text(self) -> str:
        text = "".join(self.emitted)
        return text[len(SEPARATOR) :] if self.separated else text

    @property
    def heard_text(self) -> str:
        return self.emitted_text + "".join(self.waiting)

    def hold(self) -> None:
        self.streaming = False
        self.waiting.clear()


class ChannelText:
    """One channel: its parts in order, emitted strictly one after the other."""

    def __init__(self, channel: Channel, emitted: dict[Channel, RunningText]) -> None:
        """Continue what was emitted; ``emitted`` is kept up to date."""
        self._channel = channel
        self._emitted = emitted
        self.frozen = False
        """Parts may have been missed: nothing is emitted until the store was read."""
        self._parts: list[_ChannelPart] = []
        self._known: dict[str, _ChannelPart] = {}
        self._cursor = 0
        """The place of the part that is being emitted; those before are done."""
        self._dirty = False
        """What was emitted may no longer be a beginning of what is known."""
        earlier = emitted.get(channel) or RunningText(MessageId(""))
        for part_id, pieces in earlier.parts:
            part = self._add(part_id, earlier.message_id)
            part.emitted = pieces
            part.separated = len(self._parts) > 1 and pieces[0].startswith(SEPARATOR)

    def open_in(self, message_id: MessageId) -> bool:
        return any(p.open and p.message_id == message_id for p in self._parts[self._cursor :])

    def update(self, heard: TextPart | ReasoningPart, *, stored: bool = False) -> None:
        """Take over a part. Its final text, once it has ended, overrules everything before.

        Of an unfinished part the store has no text. Before 1.2 text grew in no other way than
        this: each update had the whole of it.
        """
        part = self._known.get(heard.id) or self._add(heard.id, heard.message_id)
        part.fresh |= not stored
        part.message_id = heard.message_id
        if ended(heard):
            self.end(heard)
        elif not stored and part.open and heard.text.startswith(known := part.heard_text):
            part.streaming = True
            if len(heard.text) > len(known):
                part.waiting.append(heard.text[len(known) :])

    def end(self, heard: TextPart | ReasoningPart) -> None:
        """Take the text of a known part for final, whether OpenCode says so or not."""
        part, text = self._known[heard.id], heard.text
        part.fresh = True  # final text stays, even if the next snapshot is an older one
        if part.final != text:
            # Before 1.4 OpenCode cuts white space off the end of a text that is complete; it then
            # no longer begins with what was emitted.
            if part.void or part.final is not None or not text.startswith(part.emitted_text):
                self._dirty = True
            part.final, part.void = text, False

    def grow(self, part_id: str, text: str) -> None:
        """Take over more text of a part, if it is of this channel."""
        part = self._known.get(part_id)
        if part is not None and part.streaming and part.open:
            part.waiting.append(text)

    def stream(self, part_id: str, text: str) -> TurnEvent | None:
        """Take over and emit more text, if it can be emitted without looking at anything else.

        That is so if it is of the part that is being emitted, and nothing waits before it.
        """
        part = self._known.get(part_id)
        if part is None or not part.streaming or part.final is not None or part.void:
            return None
        if part.waiting or self.frozen or self._dirty or self._parts[self._cursor] is not part:
            return None
        return self._grew(part, text) if text else None

    def kill(self, part_ids: Iterable[str]) -> None:
        """Give up unfinished parts: their text is void, unless a final text comes after all."""
        for part_id in part_ids:
            part = self._known.get(part_id)
            if part is not None and part.open:
                part.void = True
                part.hold()
                self._dirty = True

    def kill_open(self, message_id: MessageId | None = None) -> None:
        """Give up the unfinished parts, of one message or of all."""
        parts = self._parts[self._cursor :]
        self.kill([p.id for p in parts if message_id in (None, p.message_id)])

    def keep_open(self, message_id: MessageId) -> None:
        """Take what was heard of a message's unfinished parts for all there will be."""
        for part in self._parts[self._cursor :]:
            if part.open and part.message_id == message_id and (text := part.heard_text):
                part.final = text

    def remove(self, part_ids: Iterable[str]) -> None:
        """Forget parts that OpenCode no longer has."""
        for part_id in part_ids:
            part = self._known.pop(part_id, None)
            if part is not None:
                self._parts.remove(part)
                self._dirty = True

    def remove_message(self, message_id: MessageId) -> None:
        self.remove([p.id for p in self._parts if p.message_id == message_id])

    def freeze(self) -> None:
        """Emit nothing until the store was read: parts may have been missed."""
        self.frozen = True
        for part in self._parts:
            part.fresh = False
        for part in self._parts[self._cursor :]:
            part.hold()

    def arrange(self, stored: list[str]) -> None:
        """Take over the store's order; what was heard since the gap may be newer than it.

        Parts that the store does not have, and that are not that new, were removed.
        """
        places = {part_id: place for place, part_id in enumerate(stored)}
        self.remove([p.id for p in self._parts if p.id not in places and not p.fresh])
        self._parts.sort(key=lambda part: places.get(part.id, len(places)))
        self._dirty = True

    def emit(self, out: list[TurnEvent]) -> None:
        """Emit what is new, in order, up to the first part that is unfinished."""
        if self.frozen:
            return
        if self._dirty:
            self._dirty, self._cursor = False, 0
            self._mend(out)
        while self._cursor < len(self._parts):
            part = self._parts[self._cursor]
            if not part.void:
                if part.final is None:
                    text = "".join(part.waiting)
                else:
                    text = part.final[len(part.emitted_text) :]
                part.waiting.clear()
                if text:
                    out.append(self._grew(part, text))
                if part.final is None:
                    return
            self._cursor += 1

    def _add(self, part_id: str, message_id: MessageId) -> _ChannelPart:
        part = self._known[part_id] = _ChannelPart(part_id, message_id)
        self._parts.append(part)
        return part

    def _grew(self, part: _ChannelPart, text: str) -> TurnEvent:
        opens = False
        if not part.emitted:
            opens = self._channel not in self._emitted
            emitted = self._emitted.setdefault(self._channel, RunningText(part.message_id))
            emitted.message_id = part.message_id
            part.separated = bool(emitted.parts)
            text = SEPARATOR + text if part.separated else text
            emitted.parts.append((part.id, part.emitted))
        part.emitted.append(text)
        return GREW[self._channel](part.message_id, part.id, text, opens)

    def _mend(self, out: list[TurnEvent]) -> None:
        """Emit the channel anew if what was emitted is no beginning of what is known now."""
        emitted = self._emitted.get(self._channel)
        if emitted is None:
            return
        # What should have been emitted: final texts, and the first unfinished one as far as it was.
        wanted: dict[str, str] = {}
        for part in self._parts:
            text = part.emitted_text if part.final is None else part.final
            if text and not part.void:
                wanted[part.id] = SEPARATOR + text if wanted else text
            if part.open:
                break
        before = [(part_id, "".join(pieces)) for part_id, pieces in emitted.parts]
        begin = list(wanted.items())[: len(before)]
        if begin:
            begin[-1] = (begin[-1][0], begin[-1][1][: len(before[-1][1])])
        if begin == before:
            return
        for part in self._parts:
            if part.emitted and part.streaming and part.open and part.id not in wanted:
                part.waiting.insert(0, part.emitted_text)  # emitted again when its turn comes
            part.emitted = [wanted[part.id]] if part.id in wanted else []
            part.separated = part.id in wanted and part.id != next(iter(wanted))
            if part.emitted:
                emitted.message_id = part.message_id
        emitted.parts = [(part.id, part.emitted) for part in self._parts if part.emitted]
        out.append(ChannelReplaced(self._channel, emitted.message_id, list(wanted.items())))
