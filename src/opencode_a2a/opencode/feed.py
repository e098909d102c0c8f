"""The one subscription to OpenCode's events, shared by all turns.

``turns`` follows a session tree and gets its events in batches; ``app`` runs the feed.
The stream has no replay: whatever may have been missed is told as a ``Gap``, after which the
follower compares with what OpenCode has stored. Knows nothing of turns.
"""

import asyncio
import random
from collections.abc import Callable, Coroutine, Iterable, Iterator
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

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
    session_of,
    type_of,
)
from opencode_a2a.opencode.types import ToolPart

log = structlog.get_logger(__name__)

Read = Callable[[Callable[[bytes], object]], Coroutine[None, None, None]]
"""Reads ``GET /global/event`` to its end and hands on the bytes, which may be cut anywhere."""
Hear = Callable[[list[PartDelta]], None]

MAX_INBOX = 20_000
FIRST_SECONDS = 5.0
"""Silence of a new connection: one that OpenCode took while it was starting is never answered.
Doubled each time, since an OpenCode that gets no time answers as well, only later."""
MAX_FRAME = 64 * 1024 * 1024
LARGE = 64 * 1024
"""The size from which an unfinished event is put together without copying it for each piece."""
_PARENT = b'"parentID":"'
_FAMILY = frozenset({b"session.created", b"session.updated"})
_DISPOSED = frozenset({b"server.instance.disposed", b"global.disposed"})


@dataclass(frozen=True, slots=True)
class Gap:
    """Events may be missing. Reconcile now if ``connected``, else wait for the Gap that is."""

    reason: str
    connected: bool = True
    at: float = field(default_factory=lambda: asyncio.get_running_loop().time(), compare=False)
    """By the clock of the loop; the same for all who follow."""


@dataclass(frozen=True, slots=True)
class Wake:
    """Nothing was heard; whoever follows asked to be woken."""


WAKE = Wake()
FeedItem = Event | Gap | Wake


class FrameTooLargeError(Exception):
    """A single event larger than anything that OpenCode sends."""


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

    def __init__(self, feed: "Feed", root: SessionId, limit: int) -> None:
        self.sessions: set[SessionId] = set()
        self._feed = feed
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
            self._feed.route(session, self)

    async def batch(self, hear: Hear | None = None) -> list[FeedItem]:
        """Wait until there is something, and return all of it.

        With ``hear``, growing text is handed over while waiting: most of what a turn hears, and
        to wake the turn for it would cost more than to tell it.
        """
        if self._text or self._inbox:
            await asyncio.sleep(0)  # a follower that wakes itself must not keep the loop
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
            log.warning("feed.overflow", sessions=len(self.sessions))
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
            except Exception as error:  # it is the follower's own, and must not hit the others
                self._waiter.set_exception(error)
                return
        if self._text or self._inbox:
            self._waiter.set_result(None)

    def wake(self) -> None:
        """Have the follower look around though nothing was heard."""
        self.put(WAKE)
        self.flush()

    def close(self) -> None:
        self._feed.forget(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


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
        self.generation = 0
        """How many connections there have been."""
        self._read = read
        self._silence = silence
        self._delays = (first_delay, last_delay)
        self._inbox = inbox
        self._patience = min(silence, FIRST_SECONDS)
        self._up = asyncio.Event()
        self._routes: dict[bytes, list[Subscription]] = {}
        self._followers: set[Subscription] = set()
        self._touched: set[Subscription] = set()
        """Those with something new, to be told at the end of the chunk."""

    @property
    def up(self) -> bool:
        return self._up.is_set()

    async def connected(self) -> None:
        """Wait until events flow: what is prompted after this is heard."""
        await self._up.wait()

    def follow(self, root: SessionId) -> Subscription:
        """Follow a session tree from now on; close the subscription when done."""
        subscription = Subscription(self, root, self._inbox)
        self._followers.add(subscription)
        return subscription

    def route(self, session: SessionId, subscription: Subscription) -> None:
        self._routes.setdefault(session.encode(), []).append(subscription)

    def forget(self, subscription: Subscription) -> None:
        self._followers.discard(subscription)
        for session in subscription.sessions:
            key = session.encode()
            left = [other for other in self._routes.pop(key, ()) if other is not subscription]
            if left:
                self._routes[key] = left

    async def run(self) -> None:
        """Keep the subscription alive until cancelled."""
        delay, last_delay = self._delays
        while True:
            generation = self.generation
            reason = await self._listen()
            self._disconnect(reason)
            if self.generation > generation:
                delay = self._delays[0]
                self._patience = min(self._silence, FIRST_SECONDS)
            elif reason == "silence":
                self._patience = min(self._silence, 2 * self._patience)
            await asyncio.sleep(delay * random.uniform(0.5, 1.0))  # noqa: S311 - only a jitter
            delay = min(delay * 2, last_delay)

    async def _listen(self) -> str:
        """Read one connection to its end, and return why it ended."""
        frames = Frames()
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(self._patience) as deadline:

                def take(chunk: bytes) -> None:
                    due = loop.time() + self._silence
                    if due - (deadline.when() or 0.0) > self._silence / 20:
                        deadline.reschedule(due)
                    for data in frames.push(chunk):
                        self._dispatch(data)
                    self._flush()

                await self._read(take)
        except TimeoutError:
            return "silence"
        except Exception as error:  # the feed outlives whatever a connection does
            log.warning("feed.broken", error=type(error).__name__)
            return "broken"
        return "closed"

    def _disconnect(self, reason: str) -> None:
        if self._up.is_set():
            self._up.clear()
            metrics.UPSTREAM_RETRIES.inc()
            log.warning("feed.disconnected", reason=reason, generation=self.generation)
            self._tell(self._followers, Gap(reason, connected=False))
            self._flush()

    def _flush(self) -> None:
        touched, self._touched = self._touched, set()
        for subscription in touched:
            subscription.flush()

    def _dispatch(self, data: bytes) -> None:
        session = session_of(data)
        followers = self._routes.get(session)
        if followers is not None:
            if type_of(data) in FOLLOWED:
                self._deliver(data, followers)
        elif not session:
            self._server_event(type_of(data))
        elif type_of(data) in _FAMILY:
            self._learn_parent(data, session)

    def _server_event(self, kind: bytes) -> None:
        if kind == b"server.connected":
            self.generation += 1
            self._up.set()
            self._tell(self._followers, Gap("connected"))
        elif kind in _DISPOSED:
            self._tell(self._followers, Gap("disposed"))

    def _learn_parent(self, data: bytes, child: bytes) -> None:
        start = data.find(_PARENT)
        if start < 0:
            return
        start += len(_PARENT)
        for subscription in self._routes.get(data[start : data.find(b'"', start)], ()):
            subscription.adopt(SessionId(child.decode()))

    def _deliver(self, data: bytes, followers: list[Subscription]) -> None:
        try:
            event = decode(data)
        except MalformedEventError as error:
            log.warning("feed.malformed", error=str(error), bytes=len(data))
            self._tell(followers, Gap("malformed"))
            return
        if event is not None:
            self._tell(followers, event)
        if type(event) is SessionChanged:
            self._learn_parent(data, event.session_id.encode())
        elif type(event) is PartUpdated and isinstance(event.part, ToolPart):
            child = child_session(event.part.tool, event.part.state.metadata)
            if child is not None:
                for subscription in followers:
                    subscription.adopt(child)

    def _tell(self, followers: Iterable[Subscription], item: FeedItem) -> None:
        for subscription in followers:
            subscription.put(item)
            self._touched.add(subscription)
