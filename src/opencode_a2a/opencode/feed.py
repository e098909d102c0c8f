"""The one subscription to OpenCode's event stream, shared by all turns.

``Ownership.start`` (``cluster.ownership``) runs the ``Feed``. A turn follows a session tree and
gets its events in batches. The stream has no replay: a ``Gap`` stands where events may be missing,
and the follower then reads OpenCode's stored state. Where several replicas may run an OpenCode,
each listens to it all the time, and keeps the texts that are being written for a turn that it
resumes (``opencode.heard``). Nothing here knows about turns.
"""

import asyncio
import random
from collections.abc import Callable, Coroutine, Iterable, Iterator
from dataclasses import dataclass, field

import structlog

from opencode_a2a import metrics
from opencode_a2a.errors import ServiceError
from opencode_a2a.ids import SessionId
from opencode_a2a.opencode.driver import Decoder
from opencode_a2a.opencode.events import (
    Event,
    MalformedEventError,
    PartDelta,
    PartUpdated,
    SessionChanged,
    child_session,
)
from opencode_a2a.opencode.heard import HeardTexts
from opencode_a2a.opencode.types import Part, ToolPart

logger = structlog.get_logger(__name__)

Read = Callable[[Callable[[bytes], object]], Coroutine[None, None, None]]
"""Reads the event stream until it ends and passes on the bytes, cut anywhere."""
OnText = Callable[[list[PartDelta]], None]

MAX_INBOX = 20_000
"""Events that may wait for one follower."""
FIRST_SECONDS = 5.0
"""Seconds that a new connection may be silent. OpenCode never answers on a connection that it
accepted while it was starting. Doubled after each attempt: on a busy machine the first event only
comes later."""
UNREAD_SECONDS = 1.0
"""Seconds that followers are not woken for an event that cannot be read: a release may have renamed
a field of each piece of a text, and they read the store each time."""
MAX_FRAME = 64 * 1024 * 1024
"""Bytes of one event."""
LARGE = 64 * 1024
"""From this many bytes, chunks are appended to an unfinished event without copying it."""


@dataclass(frozen=True, slots=True)
class Gap:
    """Events may be missing here: followers compare with OpenCode's stored state."""

    reason: str
    connected: bool = True
    """False if the connection has just broken. Another Gap follows when there is a new one; an
    errand compares only then, a turn as soon as ``Feed.up`` is set."""
    at: float = field(default_factory=lambda: asyncio.get_running_loop().time(), compare=False)
    """When it was noticed, by the clock of the event loop; the same for all followers."""


@dataclass(frozen=True, slots=True)
class Wake:
    """Stands for a wake-up that the follower asked for itself, without an event."""


WAKE = Wake()
FeedItem = Event | Gap | Wake


class FrameTooLargeError(Exception):
    """An event is larger than anything that OpenCode sends."""


class Frames:
    """Splits a stream of bytes into the ``data`` fields of its server-sent events."""

    def __init__(self, large: int = LARGE) -> None:
        self._limit = large
        self._rest = b""
        """The beginning of an unfinished event."""
        self._large: bytearray | None = None
        """The same once it is large, so that a chunk can be appended without copying it."""

    def split(self, chunk: bytes) -> Iterator[bytes]:
        """Yield the data of each event that ``chunk`` completes."""
        chunk = chunk.replace(b"\r", b"")
        large = self._large
        if large is not None:
            searched = len(large) - 1
            large += chunk
            if large.find(b"\n\n", searched) < 0:
                if len(large) > MAX_FRAME:
                    raise FrameTooLargeError
                return
            chunk, self._large = bytes(large), None
        *frames, self._rest = (self._rest + chunk).split(b"\n\n")
        if len(self._rest) > self._limit:
            self._rest, self._large = b"", bytearray(self._rest)
        for frame in frames:
            if frame[:6] == b"data: " and b"\n" not in frame:
                yield frame[6:]
                continue
            lines = [line[5:].lstrip(b" ") for line in frame.split(b"\n") if line[:5] == b"data:"]
            if lines:
                yield b"\n".join(lines)


@dataclass(eq=False, slots=True)
class Subscription:
    """The events of one session and its descendants, from the moment of ``Feed.follow``."""

    sessions: set[SessionId]
    routes: "Routes"
    limit: int
    """How many items may wait."""
    _text: list[PartDelta] = field(default_factory=list[PartDelta])
    """Waiting text, up to the first item that is not text."""
    _inbox: list[FeedItem] = field(default_factory=list[FeedItem])
    """The waiting items after ``_text``."""
    _later: bool = False
    """Whether nothing waits but a gap that is to be delivered later."""
    _waiter: asyncio.Future[None] | None = None
    _on_text: OnText | None = None

    def follow_child(self, child: SessionId) -> None:
        """Follow one more session, a descendant of the first."""
        if child not in self.sessions:
            self.sessions.add(child)
            self.routes.setdefault(child.encode(), []).append(self)

    async def batch(self, on_text: OnText | None = None) -> list[FeedItem]:
        """Wait for items and return all that there are.

        While it waits, growing text is passed to ``on_text`` directly. Most events are text, and
        waking the follower for it would cost more than handling it.
        """
        if (self._text or self._inbox) and not self._later:
            await asyncio.sleep(0)  # a follower that wakes itself must not starve the loop
        else:
            self._on_text = on_text
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = self._on_text = None
        items = [*self._text, *self._inbox]
        self._text, self._inbox, self._later = [], [], False
        return items

    def put(self, item: FeedItem) -> None:
        """Add an item. A follower that is too slow gets a gap in place of all waiting items."""
        self._later = False
        if len(self._text) + len(self._inbox) >= self.limit:
            self._text, self._inbox = [], []
            item = Gap("overflow")
            logger.warning("feed overflowed", sessions=len(self.sessions))
        if type(item) is Gap and self._inbox[-1:] == [item]:
            self._inbox[-1] = item  # what is read from now on has what both have missed
        elif type(item) is PartDelta and not self._inbox:
            self._text.append(item)
        else:
            self._inbox.append(item)

    def put_later(self, gap: Gap) -> None:
        """Add a gap; deliver it with the next item, or when ``deliver`` is called."""
        later = self._later or not (self._text or self._inbox)
        self.put(gap)
        self._later = later

    def deliver(self) -> None:
        self._later = False
        self.flush()

    def flush(self) -> None:
        """Deliver the items that were put."""
        if self._later or self._waiter is None or self._waiter.done():
            return
        if self._on_text is not None and self._text:
            text, self._text = self._text, []
            try:
                self._on_text(text)
            except Exception as error:  # of this follower: it must not affect the others
                self._waiter.set_exception(error)
                return
        if self._text or self._inbox:
            self._waiter.set_result(None)

    def wake(self) -> None:
        """Wake the follower without an event."""
        self.put(WAKE)
        self.flush()

    def close(self) -> None:
        """Stop following."""
        for session in self.sessions:
            key = session.encode()
            left = [other for other in self.routes.pop(key, ()) if other is not self]
            if left:
                self.routes[key] = left


Routes = dict[bytes, list[Subscription]]
"""The followers of each session, by its id as it stands in a frame."""


class Feed:
    """Reads the stream, reconnects, and passes each event to the followers of its session."""

    def __init__(
        self,
        read: Read,
        decoder: Callable[[], Decoder],
        *,
        silence: float = 25.0,
        first_delay: float = 0.25,
        last_delay: float = 5.0,
        inbox: int = MAX_INBOX,
        keeps_texts: bool = False,
    ) -> None:
        self.connections = 0
        """Connections established so far."""
        self._read = read
        self._new_decoder = decoder
        self._decoder: Decoder | None = None
        """The decoder of this connection, which may remember earlier events of it."""
        self._silence = silence
        self._delays = (first_delay, last_delay)
        self._inbox = inbox
        self.up = asyncio.Event()
        """Set while the stream is connected: the events of a prompt sent now will arrive."""
        self._routes: Routes = {}
        self._heard = HeardTexts() if keeps_texts else None
        self._touched: set[Subscription] = set()
        """Followers with new items, which are delivered at the end of the chunk."""
        self._unread: set[Subscription] = set()
        """Followers of events that could not be read, which are woken a little later."""
        self._warned: set[bytes] = set()
        """The types of such events of this connection."""

    def follow(self, root: SessionId, *, recovered: bool = False) -> Subscription:
        """Follow a session tree from now on; close the subscription when done.

        For a ``recovered`` turn it begins with what was kept of the session's open texts.
        """
        subscription = Subscription({root}, self._routes, self._inbox)
        self._routes.setdefault(root.encode(), []).append(subscription)
        if recovered and self._heard is not None:
            for text in self._heard.of(root):
                subscription.put(text)
        return subscription

    @property
    def _followers(self) -> set[Subscription]:
        return {follower for followers in self._routes.values() for follower in followers}

    async def run(self) -> None:
        """Keep the subscription alive until cancelled."""
        loop = asyncio.get_running_loop()
        first_delay, last_delay = self._delays
        delay, patience = first_delay, min(self._silence, FIRST_SECONDS)
        while True:
            connections, frames = self.connections, Frames()
            self._decoder = None
            self._warned.clear()
            reason = "closed"
            try:
                async with asyncio.timeout(patience) as deadline:

                    def on_chunk(chunk: bytes, frames: Frames = frames) -> None:
                        due = loop.time() + self._silence
                        # Moving the deadline costs more than a small event, so not every time.
                        if due - (deadline.when() or 0.0) > self._silence / 20:
                            deadline.reschedule(due)
                        for data in frames.split(chunk):
                            self._dispatch(data)
                        self._flush()

                    await self._read(on_chunk)
            except TimeoutError:
                reason = "silence"
            except Exception as error:  # the feed outlives any failure of a connection
                why = error.message if isinstance(error, ServiceError) else type(error).__name__
                logger.warning("feed broke", error=why)
                reason = "broken"
            if self.up.is_set():
                self.up.clear()
                self._forget_texts()
                metrics.UPSTREAM_RETRIES.inc()
                logger.warning("feed disconnected", reason=reason, connections=self.connections)
                self._put(self._followers, Gap(reason, connected=False))
                self._flush()
            if self.connections > connections:
                delay, patience = first_delay, min(self._silence, FIRST_SECONDS)
            elif reason == "silence":
                patience = min(self._silence, 2 * patience)
            await asyncio.sleep(delay * random.uniform(0.5, 1.0))  # noqa: S311 - only a jitter
            delay = min(delay * 2, last_delay)

    def _dispatch(self, data: bytes) -> None:
        """Pass an event to the followers of its session; without any, most are not even decoded."""
        # Made with the first event: by then the connection knows which generation answers.
        decoder = self._decoder = self._decoder or self._new_decoder()
        kind, session = decoder.head(data)
        followers, heard = self._routes.get(session), self._heard
        if followers is None:
            if kind == decoder.connected:
                self.connections += 1
                self.up.set()
                self._forget_texts()
                self._put(self._followers, Gap("connected"))
            elif kind in decoder.disposed:
                self._forget_texts()
                self._put(self._followers, Gap("disposed"))
            elif parent := decoder.parent(kind, data):
                self._adopt_child(parent, session)
            if heard is None or kind not in decoder.overheard:
                return
            followers = ()
        elif kind not in decoder.followed:
            return
        try:
            events = decoder.decode(data)
        except MalformedEventError as error:
            if kind not in self._warned:
                self._warned.add(kind)
                logger.warning(
                    "feed sent an event that could not be read",
                    type=kind.decode(),
                    error=str(error),
                    bytes=len(data),
                )
            self._put_unread(followers)
            if heard is not None:
                heard.forget(SessionId(session.decode()))
            return
        for event in events:
            self._put(followers, event)
            if heard is not None:
                heard.hear(event)
            if type(event) is SessionChanged and event.info.parent_id is not None:
                self._adopt_child(event.info.parent_id.encode(), session)
            elif type(event) is PartUpdated and (child := _child_of(event.part)) is not None:
                for subscription in followers:
                    subscription.follow_child(child)

    def _forget_texts(self) -> None:
        """Forget the texts that were kept: events are missing."""
        if self._heard is not None:
            self._heard.clear()

    def _adopt_child(self, parent: bytes, child: bytes) -> None:
        """Let the followers of a session follow its new child too."""
        for subscription in self._routes.get(parent, ()):
            subscription.follow_child(SessionId(child.decode()))

    def _put(self, followers: Iterable[Subscription], item: FeedItem) -> None:
        for subscription in followers:
            subscription.put(item)
            self._touched.add(subscription)

    def _put_unread(self, followers: Iterable[Subscription]) -> None:
        """Put a gap where an event could not be read, and deliver it a little later."""
        for subscription in followers:
            subscription.put_later(Gap("malformed"))
            if not self._unread:
                asyncio.get_running_loop().call_later(UNREAD_SECONDS, self._flush_unread)
            self._unread.add(subscription)

    def _flush_unread(self) -> None:
        unread, self._unread = self._unread, set()
        for subscription in unread:
            subscription.deliver()

    def _flush(self) -> None:
        touched, self._touched = self._touched, set()
        for subscription in touched:
            subscription.flush()


def _child_of(part: Part) -> SessionId | None:
    """Return the session of the sub-agent that a part is about, if it is about one."""
    return child_session(part.tool, part.state.metadata) if isinstance(part, ToolPart) else None
