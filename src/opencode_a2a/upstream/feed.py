"""The one subscription to OpenCode's events, shared by all turns.

``execution`` follows a session tree and gets its events in batches; ``app`` runs the feed.
The stream has no replay: whatever may have been missed is told as a ``Gap``, after which the
follower compares with what OpenCode has stored. Knows nothing of turns.
"""

import asyncio
import random
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from types import TracebackType
from typing import Self

import structlog

from opencode_a2a import metrics
from opencode_a2a.ids import SessionId
from opencode_a2a.upstream.events import (
    FOLLOWED,
    Event,
    MalformedEventError,
    PartUpdated,
    child_session,
    decode,
    glance,
)
from opencode_a2a.upstream.models import ToolPart

log = structlog.get_logger(__name__)

OpenStream = Callable[[], AbstractAsyncContextManager[AsyncIterator[bytes]]]
"""Opens ``GET /global/event``; the bytes may be cut anywhere."""

MAX_INBOX = 20_000
FIRST_SECONDS = 5.0
"""Silence of a new connection: one that OpenCode took while it was starting is never answered."""
MAX_FRAME = 64 * 1024 * 1024
_PARENT = b'"parentID":"'
_FAMILY = frozenset({b"session.created", b"session.updated"})
_DISPOSED = frozenset({b"server.instance.disposed", b"global.disposed"})


@dataclass(frozen=True, slots=True)
class Gap:
    """Events may be missing. Reconcile now if ``connected``, else wait for the Gap that is."""

    reason: str
    connected: bool = True


@dataclass(frozen=True, slots=True)
class Wake:
    """Nothing was heard; whoever follows asked to be woken."""


WAKE = Wake()
FeedItem = Event | Gap | Wake


class FrameTooLargeError(Exception):
    """A single event larger than anything that OpenCode sends."""


class Frames:
    """Cuts a stream of bytes into the ``data`` of its server-sent events."""

    def __init__(self) -> None:
        self._rest = b""

    def push(self, chunk: bytes) -> Iterator[bytes]:
        """Yield the data of each event that ``chunk`` completes."""
        *frames, self._rest = (self._rest + chunk.replace(b"\r", b"")).split(b"\n\n")
        if len(self._rest) > MAX_FRAME:
            raise FrameTooLargeError
        for frame in frames:
            lines = [line[5:].lstrip(b" ") for line in frame.split(b"\n") if line[:5] == b"data:"]
            if lines:
                yield b"\n".join(lines)


class Subscription:
    """The events of one session and its descendants, from the moment of ``Feed.follow``."""

    def __init__(self, feed: "Feed", root: SessionId, limit: int) -> None:
        self.sessions: set[SessionId] = set()
        self._feed = feed
        self._limit = limit
        self._inbox: deque[FeedItem] = deque()
        self._waiter: asyncio.Future[None] | None = None
        self.adopt(root)

    def adopt(self, session: SessionId) -> None:
        """Follow one more session, known to be a descendant."""
        if session not in self.sessions:
            self.sessions.add(session)
            self._feed.route(session, self)

    async def batch(self) -> list[FeedItem]:
        """Wait until there is something, and return all of it."""
        if self._inbox:
            await asyncio.sleep(0)  # a follower that wakes itself must not keep the loop
        else:
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        items = list(self._inbox)
        self._inbox.clear()
        return items

    def put(self, item: FeedItem) -> None:
        """Add an item; a follower that is too slow gets a gap instead of what it missed."""
        if len(self._inbox) >= self._limit:
            self._inbox.clear()
            item = Gap("overflow")
            log.warning("feed.overflow", sessions=len(self.sessions))
        self._inbox.append(item)
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

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
        open_stream: OpenStream,
        *,
        silence: float = 25.0,
        first_delay: float = 0.25,
        last_delay: float = 5.0,
        inbox: int = MAX_INBOX,
    ) -> None:
        self.generation = 0
        """How many connections there have been."""
        self._open_stream = open_stream
        self._silence = silence
        self._delays = (first_delay, last_delay)
        self._inbox = inbox
        self._up = asyncio.Event()
        self._routes: dict[bytes, list[Subscription]] = {}
        self._followers: set[Subscription] = set()

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
            await asyncio.sleep(delay * random.uniform(0.5, 1.0))  # noqa: S311 - only a jitter
            delay = min(delay * 2, last_delay)

    async def _listen(self) -> str:
        """Read one connection to its end, and return why it ended."""
        frames = Frames()
        loop = asyncio.get_running_loop()
        try:
            first = min(self._silence, FIRST_SECONDS)
            async with asyncio.timeout(first) as deadline, self._open_stream() as stream:
                async for chunk in stream:
                    deadline.reschedule(loop.time() + self._silence)
                    for data in frames.push(chunk):
                        self._dispatch(data)
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

    def _dispatch(self, data: bytes) -> None:
        kind, session = glance(data)
        if not session:
            self._server_event(kind)
            return
        if kind in _FAMILY:
            self._learn_parent(data, session)
        followers = self._routes.get(session)
        if followers and kind in FOLLOWED:
            self._deliver(data, followers)

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
        match event:
            case PartUpdated(part=ToolPart() as part) if (child := child_session(part)) is not None:
                for subscription in followers:
                    subscription.adopt(child)
            case _:
                pass

    @staticmethod
    def _tell(followers: Iterable[Subscription], item: FeedItem) -> None:
        for subscription in followers:
            subscription.put(item)
