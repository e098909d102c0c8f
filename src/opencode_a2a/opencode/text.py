"""The running texts of a turn, each made of parts that grow, end, become void or are held back.

``opencode.turn_state`` passes on what OpenCode says about a part, and the channel decides what can
be emitted now: the emitted text is always a prefix of the text that OpenCode will have stored. Only
when OpenCode dies, or the last attempt of the provider fails, can more text have been emitted than
stored, and it stays. Each part keeps the text that was emitted of it beside the text that is known,
because texts grow long and the difference must not be computed from the beginning.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

from opencode_a2a.events import GREW, Channel, ChannelReplaced, RunningText, TurnEvent
from opencode_a2a.ids import MessageId
from opencode_a2a.opencode.events import HeardText
from opencode_a2a.opencode.types import ReasoningPart, TextPart

SEPARATOR = "\n\n"


def ended(part: TextPart | ReasoningPart) -> bool:
    """Whether the text of a part is complete."""
    return part.time is None or part.time.end is not None


@dataclass(slots=True)
class _ChannelPart:
    """The known text of one part, and how much of it was emitted."""

    id: str
    message_id: MessageId
    emitted: list[str] = field(default_factory=list[str])
    """The pieces that were emitted, including the separator from the part before."""
    separated: bool = False
    """Whether the emitted pieces begin with a separator."""
    waiting: list[str] = field(default_factory=list[str])
    """Text that was received and cannot be emitted yet."""
    streaming: bool = False
    """Whether all of its text so far was received. If not, it waits for its final text."""
    ends_at: str = ""
    """The id of the event that the received text ends with; empty if that is not known."""
    final: str | None = None
    """The whole text, once the part has ended."""
    void: bool = False
    """Whether it belongs to a failed attempt of the provider that another attempt followed."""
    left: bool = False
    """Whether OpenCode left it unfinished, so that it will have no more text than was sent."""
    fresh: bool = False
    """Whether an event was about it since the last gap: an older snapshot may lack it."""

    @property
    def open(self) -> bool:
        return self.final is None and not self.void

    @property
    def blocks(self) -> bool:
        """Whether the parts that follow have to wait for more of its text."""
        return self.open and not self.left

    @property
    def emitted_text(self) -> str:
        text = "".join(self.emitted)
        return text[len(SEPARATOR) :] if self.separated else text

    @property
    def received_text(self) -> str:
        return self.emitted_text + "".join(self.waiting)

    def hold_back(self) -> None:
        """Emit nothing more of it until its final text is known."""
        self.streaming = False
        if self.waiting:
            self.waiting.clear()
            self.ends_at = ""


@dataclass(slots=True)
class ChannelText:
    """The text of one channel: parts in order, emitted strictly one after the other."""

    channel: Channel
    emitted: dict[Channel, RunningText]
    """The emitted texts of all channels; that of this channel is kept up to date here."""
    frozen: bool = False
    """Whether parts may have been missed: nothing is emitted until the next snapshot."""
    _parts: list[_ChannelPart] = field(default_factory=list[_ChannelPart])
    _known: dict[str, _ChannelPart] = field(default_factory=dict[str, _ChannelPart])
    _cursor: int = 0
    """The index of the part that is being emitted; those before it are done."""
    _dirty: bool = False
    """Whether the emitted text may no longer be a prefix of the known text."""

    def resume(self) -> None:
        """Continue the text of the channel that an earlier process emitted."""
        earlier = self.emitted.get(self.channel) or RunningText(MessageId(""))
        for part_id, pieces in earlier.parts:
            part = self._add(part_id, earlier.message_id)
            part.emitted = pieces
            part.separated = len(self._parts) > 1 and pieces[0].startswith(SEPARATOR)
        if self._parts:
            self._parts[-1].ends_at = earlier.ends_at

    @property
    def held_back(self) -> str | None:
        """The id of the part that comes next and cannot be emitted before it has ended."""
        if self.frozen or self._cursor >= len(self._parts):
            return None
        part = self._parts[self._cursor]
        return part.id if part.open and not part.streaming else None

    def open_in(self, message_id: MessageId) -> bool:
        """Whether the message has an unfinished part."""
        return any(p.open and p.message_id == message_id for p in self._parts[self._cursor :])

    def update(self, new: TextPart | ReasoningPart, *, stored: bool = False) -> None:
        """Take over a part; its final text, once it has ended, overrides everything before.

        The store has no text of an unfinished part. Before 1.2 these updates were the only way in
        which text grew: each of them had the whole text.
        """
        part = self._known.get(new.id) or self._add(new.id, new.message_id)
        part.fresh |= not stored
        part.message_id = new.message_id
        if ended(new):
            self.end(new)
        elif not stored and part.open and new.text.startswith(known := part.received_text):
            part.streaming = True
            if len(new.text) > len(known):
                part.waiting.append(new.text[len(known) :])
                part.ends_at = ""
                self._dirty |= part.left

    def end(self, new: TextPart | ReasoningPart) -> None:
        """Take the text of a known part as final, whether OpenCode says so or not."""
        part, text = self._known[new.id], new.text
        part.fresh = True  # final text stays, even if the next snapshot is an older one
        if part.final != text:
            # Before 1.4 OpenCode strips trailing white space from a complete text, which then no
            # longer begins with the emitted text.
            if part.void or part.final is not None or not text.startswith(part.emitted_text):
                self._dirty = True
            part.final, part.void = text, False

    def catch_up(self, heard: HeardText) -> None:
        """Continue a part that an earlier process began to emit, if no text is missing between.

        None is missing if all of the part was heard, or the piece that the emitted text ends with.
        """
        part = self._known.get(heard.part_id)
        if part is None and heard.start is not None:
            part = self._add(heard.part_id, heard.message_id)
        if part is None or part.streaming or not part.open:
            return
        part.fresh = True
        ids, pieces, known = list(heard.pieces), list(heard.pieces.values()), part.received_text
        if heard.start is not None and (whole := "".join(pieces)).startswith(known):
            text = whole[len(known) :]
        elif part.ends_at in heard.pieces:
            text = "".join(pieces[ids.index(part.ends_at) + 1 :])
        else:
            return
        part.streaming = True
        if text:
            part.waiting.append(text)
            part.ends_at = ids[-1]

    def grow(self, part_id: str, text: str, event_id: str) -> None:
        """Add more text to a part, if the part is in this channel."""
        part = self._known.get(part_id)
        if part is None or not part.open:
            return
        if part.streaming:
            part.waiting.append(text)
            part.ends_at = event_id
            self._dirty |= part.left  # the snapshot was newer than the text that is still to come
        elif event_id and event_id == part.ends_at:
            # The process that emitted this piece had heard it sooner than this one, which has all
            # that follows.
            part.streaming = True

    def stream(self, part_id: str, text: str, event_id: str) -> TurnEvent | None:
        """Add text to a part and emit it at once, or return None if that is not possible.

        It is possible for the part that is being emitted, if no other text waits before it.
        """
        part = self._known.get(part_id)
        if part is None or not part.streaming or not part.blocks:
            return None
        if part.waiting or self.frozen or self._dirty or self._parts[self._cursor] is not part:
            return None
        if not text:
            return None
        part.ends_at = event_id
        return self._grew(part, text)

    def void(self, part_ids: Iterable[str]) -> None:
        """Mark unfinished parts as void, unless a final text comes after all."""
        for part_id in part_ids:
            part = self._known.get(part_id)
            if part is not None and part.open:
                part.void = True
                part.hold_back()
                self._dirty = True

    def leave(self, part_id: str) -> None:
        """Keep what was received of a part, and have the next parts no longer wait for its end."""
        self._known[part_id].left = True

    def void_open(self, message_id: MessageId | None = None) -> None:
        """Mark the unfinished parts of one message, or of all messages, as void."""
        parts = self._parts[self._cursor :]
        self.void([p.id for p in parts if message_id in (None, p.message_id)])

    def end_open(self, message_id: MessageId) -> None:
        """Take the received text of a message's unfinished parts as final."""
        for part in self._parts[self._cursor :]:
            if part.open and part.message_id == message_id and (text := part.received_text):
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
        """Emit nothing until the next snapshot: parts may have been missed."""
        self.frozen = True
        for part in self._parts:
            part.fresh = False
        for part in self._parts[self._cursor :]:
            part.hold_back()

    def reorder(self, stored: list[str]) -> None:
        """Put the parts into the order of the store, those that it lacks at the end.

        A part that the store lacks is newer than the snapshot, or was removed: it is kept only if
        an event was about it since the last gap.
        """
        order = {part_id: index for index, part_id in enumerate(stored)}
        self.remove([p.id for p in self._parts if p.id not in order and not p.fresh])
        self._parts.sort(key=lambda part: order.get(part.id, len(order)))
        self._dirty = True

    def emit(self, out: list[TurnEvent]) -> None:
        """Emit what is new, in order, up to the first part that is unfinished."""
        if self.frozen:
            return
        if self._dirty:
            self._dirty, self._cursor = False, 0
            self._replace_diverged(out)
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
                if part.blocks:
                    return
            self._cursor += 1

    def _add(self, part_id: str, message_id: MessageId) -> _ChannelPart:
        part = self._known[part_id] = _ChannelPart(part_id, message_id)
        self._parts.append(part)
        return part

    def _grew(self, part: _ChannelPart, text: str) -> TurnEvent:
        opens = False
        if not part.emitted:
            opens = self.channel not in self.emitted
            emitted = self.emitted.setdefault(self.channel, RunningText(part.message_id))
            emitted.message_id = part.message_id
            part.separated = bool(emitted.parts)
            text = SEPARATOR + text if part.separated else text
            emitted.parts.append((part.id, part.emitted))
        part.emitted.append(text)
        ends_at = part.ends_at if part.final is None else ""
        return GREW[self.channel](part.message_id, part.id, text, opens, ends_at)

    def _replace_diverged(self, out: list[TurnEvent]) -> None:
        """Emit the whole channel again if the emitted text is not a prefix of the known text."""
        emitted = self.emitted.get(self.channel)
        if emitted is None:
            return
        # The text that should have been emitted: final texts, what was received of those that were
        # left, and what was emitted of the first unfinished one.
        wanted: dict[str, str] = {}
        for part in self._parts:
            text = part.received_text if part.left else part.emitted_text
            text = text if part.final is None else part.final
            if text and not part.void:
                wanted[part.id] = SEPARATOR + text if wanted else text
            if part.blocks:
                break
        before = [(part_id, "".join(pieces)) for part_id, pieces in emitted.parts]
        begin = list(wanted.items())[: len(before)]
        if begin:
            begin[-1] = (begin[-1][0], begin[-1][1][: len(before[-1][1])])
        if begin == before:
            return
        for part in self._parts:
            if part.emitted and part.streaming and part.open and part.id not in wanted:
                part.waiting.insert(0, part.emitted_text)  # to be emitted again later
            elif part.left:
                part.waiting.clear()
            part.emitted = [wanted[part.id]] if part.id in wanted else []
            part.separated = part.id in wanted and part.id != next(iter(wanted))
            if part.emitted:
                emitted.message_id = part.message_id
        emitted.parts = [(part.id, part.emitted) for part in self._parts if part.emitted]
        out.append(ChannelReplaced(self.channel, emitted.message_id, list(wanted.items())))
