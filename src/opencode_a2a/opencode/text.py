"""The two running texts of a turn, each made of parts that grow, close, die or are held back.

``opencode.reader`` says what it hears about a part; a channel decides what may be told now, so
that what was told, joined, is always a beginning of what OpenCode will have stored. Only when
OpenCode dies is more told than stored: what was told stays. Knows neither events nor messages.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

from opencode_a2a.events import Channel, ChannelReplaced, ReasoningGrew, TextGrew, TurnEvent
from opencode_a2a.ids import MessageId

SEPARATOR = "\n\n"
_GREW = {Channel.TEXT: TextGrew, Channel.REASONING: ReasoningGrew}


@dataclass(slots=True)
class ToldChannel:
    """What has been told of a channel: (part id, text) in order, separators included."""

    message_id: MessageId
    parts: list[tuple[str, str]] = field(default_factory=list[tuple[str, str]])
    closed: bool = False

    def grow(self, part_id: str, text: str) -> None:
        if self.parts and self.parts[-1][0] == part_id:
            text = self.parts.pop()[1] + text
        self.parts.append((part_id, text))


@dataclass(slots=True)
class _Part:
    id: str
    message_id: MessageId
    told: list[str] = field(default_factory=list[str])
    untold: list[str] = field(default_factory=list[str])
    streaming: bool = False
    """All of its text since the beginning was heard; otherwise it waits for its final text."""
    final: str | None = None
    done: bool = False
    """Its final text is told in full."""
    void: bool = False
    """A provider's retry left it dead."""
    fresh: bool = True
    """It was heard of since the last gap."""

    @property
    def open(self) -> bool:
        return self.final is None and not self.void

    @property
    def told_text(self) -> str:
        return "".join(self.told)

    def hold(self) -> None:
        self.streaming = False
        self.untold.clear()

    def take(self) -> str:
        """Return what can be told now, as told."""
        if self.final is None:
            text = "".join(self.untold)
            self.untold.clear()
            if text:
                self.told.append(text)
            return text
        if self.done:
            return ""
        text = self.final[len(self.told_text) :]
        self.settle(self.final)
        return text

    def settle(self, text: str) -> None:
        self.told, self.done = [text] if text else [], True
        self.untold.clear()


class RunningText:
    """One channel: its parts in order, told strictly one after the other."""

    def __init__(self, channel: Channel, told: ToldChannel | None = None) -> None:
        self.channel = channel
        self.opened = told is not None
        self.closed = told is not None and told.closed
        self.frozen = False
        self._message_id = told.message_id if told else MessageId("")
        self._parts: list[_Part] = []
        self._known: dict[str, _Part] = {}
        self._cursor = 0
        self._spoken = False
        self._dirty = False
        self._broken = False
        for part_id, text in told.parts if told else ():
            part = self._add(part_id, self._message_id, fresh=False)
            part.told.append(text.removeprefix(SEPARATOR) if self._spoken else text)
            self._spoken = True

    @property
    def message_id(self) -> MessageId:
        """The message that the channel's last told text is from."""
        return self._message_id

    def open_in(self, message_id: MessageId) -> bool:
        return any(p.open and p.message_id == message_id for p in self._parts[self._cursor :])

    def begin(self, part_id: str, message_id: MessageId, text: str) -> None:
        """Hear of an unfinished part; ``text`` is all of it so far.

        Before 1.2 text grew in no other way: each time the whole of it was told.
        """
        part = self._known.get(part_id) or self._add(part_id, message_id, fresh=True)
        part.fresh = True
        part.message_id = message_id
        heard = part.told_text + "".join(part.untold)
        if part.open and text.startswith(heard):
            part.streaming = True
            if len(text) > len(heard):
                part.untold.append(text[len(heard) :])

    def grow(self, part_id: str, text: str, out: list[TurnEvent]) -> bool:
        """Hear more of a part, and tell it; False when it is not of this channel."""
        part = self._known.get(part_id)
        if part is None:
            return False
        if not part.streaming or part.final is not None or part.void:
            return True
        if self.frozen or self._dirty or part.untold or self._parts[self._cursor] is not part:
            part.untold.append(text)
            self.tell(out)
        elif text:
            # Nearly always: it is the part that is being told, and all of it was told.
            out.append(self._grew(part, text, first=not part.told))
            part.told.append(text)
        return True

    def finish(self, part_id: str, message_id: MessageId, text: str) -> None:
        """Hear the final text of a part, which overrules everything before."""
        part = self._known.get(part_id) or self._add(part_id, message_id, fresh=True)
        part.fresh = True
        part.message_id = message_id
        if part.final == text:
            return
        if part.void or part.final is not None or not text.startswith(part.told_text):
            self._dirty = True
        part.final, part.void, part.done = text, False, False

    def store_open(self, part_id: str, message_id: MessageId) -> None:
        """Learn from the store of an unfinished part; its text is not stored yet."""
        part = self._known.get(part_id) or self._add(part_id, message_id, fresh=False)
        part.message_id = message_id

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
            if part.open and part.message_id == message_id and (part.told or part.untold):
                part.final = part.told_text + "".join(part.untold)

    def remove(self, part_ids: Iterable[str]) -> None:
        """Forget parts that OpenCode no longer has."""
        for part_id in part_ids:
            part = self._known.pop(part_id, None)
            if part is not None:
                self._parts.remove(part)
                self._dirty = True
                self._broken |= bool(part.told)

    def remove_message(self, message_id: MessageId) -> None:
        self.remove([p.id for p in self._parts if p.message_id == message_id])

    def freeze(self) -> None:
        """Tell nothing until the store was read: parts may have been missed."""
        self.frozen = True
        for part in self._parts:
            part.fresh = False
        for part in self._parts[self._cursor :]:
            part.hold()

    def arrange(self, stored: list[str]) -> None:
        """Take over the store's order; what was heard since the gap may be newer than it."""
        places = {part_id: place for place, part_id in enumerate(stored)}
        self.remove([p.id for p in self._parts if p.id not in places and not p.fresh])
        self._parts.sort(key=lambda part: places.get(part.id, len(places)))
        self._dirty = True

    def tell(self, out: list[TurnEvent]) -> None:
        """Tell what is new, in order, up to the first part that is unfinished."""
        if self.frozen:
            return
        if self._dirty:
            self._mend(out)
        while self._cursor < len(self._parts):
            part = self._parts[self._cursor]
            if not part.void:
                first = not part.told
                text = part.take()
                if text:
                    out.append(self._grew(part, text, first=first))
                if part.final is None:
                    return
            self._cursor += 1

    def _add(self, part_id: str, message_id: MessageId, *, fresh: bool) -> _Part:
        part = _Part(part_id, message_id, fresh=fresh)
        self._known[part_id] = part
        self._parts.append(part)
        return part

    def _grew(self, part: _Part, text: str, *, first: bool) -> TurnEvent:
        text = SEPARATOR + text if first and self._spoken else text
        opens, self.opened, self._spoken = not self.opened, True, True
        self._message_id = part.message_id
        return _GREW[self.channel](part.message_id, part.id, text, opens)

    def _mend(self, out: list[TurnEvent]) -> None:
        """Replace the channel if what was told is no beginning of what is known now."""
        broken, self._broken, self._dirty, self._cursor = self._broken, False, False, 0
        if not (broken or self._contradicts()):
            return
        blocked = False
        for part in self._parts:
            if part.void or blocked:
                part.untold[:0] = part.told if part.streaming else ()
                part.told, part.done = [], False
            elif part.final is not None:
                part.settle(part.final)
            else:
                blocked = True
        told = [part for part in self._parts if part.told]
        self._spoken = bool(told)
        self._message_id = told[-1].message_id if told else self._message_id
        parts = [
            (part.id, (SEPARATOR if place else "") + part.told_text)
            for place, part in enumerate(told)
        ]
        out.append(ChannelReplaced(self.channel, self._message_id, parts))

    def _contradicts(self) -> bool:
        blocked = False
        for part in self._parts:
            told = part.told_text
            if told and (part.void or blocked):
                return True
            if part.void:
                continue
            if part.final is None:
                blocked = True
            elif not part.final.startswith(told):
                return True
            else:
                blocked |= part.final != told
        return False
