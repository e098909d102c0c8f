"""The one subscription to OpenCode's events, shared by all turns.

``turns`` follows a session tree and gets its events in batches; ``app`` runs the feed.
The stream has no replay: where events may be missing there is a ``Gap``, after which the
follower compares with what OpenCode has stored. Knows nothing of turns.
"""

import asyncio
import random
from collections.abc import Callable, Coroutine, Iterable, Iterator
from dataclasses import dataclass, field

import structlog

from opencode_a2a import metrics
from opencode_a2a.ids import SessionId
from opencode_a2a.opencode.events import (
    FOLLOWED,
    Event,
    MalformedEventError,
    PartDelta,
    PartUpdated,
    SessionChanged,
    child_session,
    decode,
    head_of,
)
from opencode_a2a.opencode.types import ToolPart

logger = structlog.get_logger(__name__)

Read = Callable[[Callable[[bytes], object]], Coroutine[None, None, None]]
"""Reads ``GET /global/event`` to its end and hands on the bytes, which may be cut anywhere."""
Hear = Callable[[list[PartDelta]], None]

MAX_INBOX = 20_000
FIRST_SECONDS = 5.0
"""How long a new connection may be silent: OpenCode never answers one that it accepted while it
was starting. Doubled each time, since an OpenCode on a busy machine does answer, only later."""
MAX_FRAME = 64 * 1024 * 1024
LARGE = 64 * 1024
"""From this size on, pieces are appended to an unfinished event without copying it each time."""
_PARENT = b'"parentID":"'
_FAMILY = frozenset({b"session.created", b"session.updated"})
_DISPOSED = frozenset({b"server.instance.disposed", b"global.disposed"})


@dataclass(frozen=True, slots=True)
class Gap:
    """Events may be missing. Reconcile now if ``connected``, else wait for the Gap that is."""

    reason: str
    connected: bool = True
    at: float = field(default_factory=lambda: asyncio.get_running_loop().time(), compare=False)
    """By the clock of the loop; the same for all followers."""


@dataclass(frozen=True, slots=True)
class Wake:
    """No event: the follower asked to be woken."""


WAKE = Wake()
FeedItem = Event | Gap | Wake


class FrameTooLargeError(Exception):
    """A single event is larger than anything that OpenCode sends."""


class Frames:
    """Cuts a stream of bytes into the ``data`` of its server-sent events."""

    def __init__(self, large: int = LARGE) -> None:
        self._limit = large
        self._rest = b""
        """The beginning of an event."""
        self._large: bytearray | None = None
        """The same, once it is large: adding to it must not copy what is there."""

    def push(self, chunk: bytes) -> Iterator[bytes]:
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


class Subscription:
    """The events of one session and its descendants, from the moment of ``Feed.follow``."""

    def __init__(self, routes: "Routes", root: SessionId, limit: int) -> None:
        self.sessions: set[SessionId] = set()
        self._routes = routes
        self._limit = limit
        self._text: list[PartDelta] = []
        """Growing text that came before anything else."""
        self._inbox: list[FeedItem] = []
        self._waiter: asyncio.Future[None] | None = None
        self._hear: Hear | None = None
        self.adopt(root)

    def adopt(self, session: SessionId) -> None:
        """Follow one more session, known to be a descendant."""
        if session not in self.sessions:
            self.sessions.add(session)
            self._routes.setdefault(session.encode(), []).append(self)

    async def batch(self, hear: Hear | None = None) -> list[FeedItem]:
        """Wait until there is something, and return all of it.

        With ``hear``, growing text is handed over while waiting. It is most of what a turn hears,
        and waking the turn for it would cost more than handling it.
        """
        if self._text or self._inbox:
            await asyncio.sleep(0)  # a follower that wakes itself must not starve the loop
        else:
            self._hear = hear
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = self._hear = None
        items = [*self._text, *self._inbox]
        self._text, self._inbox = [], []
        return items

    def put(self, item: FeedItem) -> None:
        """Add an item; a follower that is too slow gets a gap instead of what it missed."""
        if len(self._text) + len(self._inbox) >= self._limit:
            self._text, self._inbox = [], []
            item = Gap("overflow")
            logger.warning("feed.overflow", sessions=len(self.sessions))
        if type(item) is PartDelta and not self._inbox:
            self._text.append(item)
        else:
            self._inbox.append(item)

    def flush(self) -> None:
        """Let the follower have what was put."""
        if self._waiter is None or self._waiter.done():
            return
        if self._hear is not None and self._text:
            text, self._text = self._text, []
            try:
                self._hear(text)
            except Exception as error:  # raised by this follower, and must not hit the others
                self._waiter.set_exception(error)
                return
        if self._text or self._inbox:
            self._waiter.set_result(None)

    def wake(self) -> None:
        """Wake the follower though there was no event."""
        self.put(WAKE)
        self.flush()

    def close(self) -> None:
        """Hear nothing more."""
        for session in self.sessions:
            key = session.encode()
            left = [other for other in self._routes.pop(key, ()) if other is not self]
            if left:
                self._routes[key] = left


Routes = dict[bytes, list[Subscription]]
"""Who follows a session, by its id as it is in a frame."""


class Feed:
    """Reads the stream, reconnects, and hands each event to those who follow its session."""

    def __init__(
        self,
        read: Read,
        *,
        silence: float = 25.0,
        first_delay: float = 0.25,
        last_delay: float = 5.0,
        inbox: int = MAX_INBOX,
    ) -> None:
        self.connections = 0
        """How many connections there have been."""
        self._read = read
        self._silence = silence
        self._delays = (first_delay, last_delay)
        self._inbox = inbox
        self.up = asyncio.Event()
        """Set while events flow: those of a prompt that is sent now will arrive."""
        self._routes: Routes = {}
        self._touched: set[Subscription] = set()
        """Those with something new; they get it at the end of the chunk."""

    def follow(self, root: SessionId) -> Subscription:
        """Follow a session tree from now on; close the subscription when done."""
        return Subscription(self._routes, root, self._inbox)

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
            reason = "closed"
            try:
                async with asyncio.timeout(patience) as deadline:

                    def take(chunk: bytes, frames: Frames = frames) -> None:
                        due = loop.time() + self._silence
                        # Moving the deadline costs more than a small event: not for each of them.
                        if due - (deadline.when() or 0.0) > self._silence / 20:
                            deadline.reschedule(due)
                        for data in frames.push(chunk):
                            self._dispatch(data)
                        self._flush()

                    await self._read(take)
            except TimeoutError:
                reason = "silence"
            except Exception as error:  # the feed outlives whatever a connection does
                logger.warning("feed.broken", error=type(error).__name__)
                reason = "broken"
            if self.up.is_set():
                self.up.clear()
                metrics.UPSTREAM_RETRIES.inc()
                logger.warning("feed.disconnected", reason=reason, connections=self.connections)
                self._put(self._followers, Gap(reason, connected=False))
                self._flush()
            if self.connections > connections:
                delay, patience = first_delay, min(self._silence, FIRST_SECONDS)
            elif reason == "silence":
                patience = min(self._silence, 2 * patience)
            await asyncio.sleep(delay * random.uniform(0.5, 1.0))  # noqa: S311 - only a jitter
            delay = min(delay * 2, last_delay)

    def _dispatch(self, data: bytes) -> None:
        """Hand an event to those who follow its session, decoded only if there is somebody."""
        kind, session = head_of(data)
        followers = self._routes.get(session)
        if followers is None:
            if kind == b"server.connected":
                self.connections += 1
                self.up.set()
                self._put(self._followers, Gap("connected"))
            elif kind in _DISPOSED:
                self._put(self._followers, Gap("disposed"))
            elif kind in _FAMILY:
                self._adopt_child(data, session)
            return
        if kind not in FOLLOWED:
            return
        try:
            event = decode(data)
        except MalformedEventError as error:
            logger.warning("feed.malformed", error=str(error), bytes=len(data))
            self._put(followers, Gap("malformed"))
            return
        if event is not None:
            self._put(followers, event)
        if type(event) is SessionChanged:
            self._adopt_child(data, session)
        elif type(event) is PartUpdated and isinstance(event.part, ToolPart):
            child = child_session(event.part.tool, event.part.state.metadata)
            if child is not None:
                for subscription in followers:
                    subscription.adopt(child)

    def _adopt_child(self, data: bytes, child: bytes) -> None:
        """Let those who follow a session follow its new child too."""
        start = data.find(_PARENT)
        if start < 0:
            return
        start += len(_PARENT)
        for subscription in self._routes.get(data[start : data.find(b'"', start)], ()):
            subscription.adopt(SessionId(child.decode()))

    def _put(self, followers: Iterable[Subscription], item: FeedItem) -> None:
        for subscription in followers:
            subscription.put(item)
            self._touched.add(subscription)

    def _flush(self) -> None:
        touched, self._touched = self._touched, set()
        for subscription in touched:
            subscription.flush()
