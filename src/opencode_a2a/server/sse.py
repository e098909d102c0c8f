"""Write a stream of server-sent events.

``server.http`` makes the encoded frames. This module writes comments, so that a client can tell a
quiet stream from a dead one, drops a client that is gone or does not read, and never ends a stream
without saying why. It does not look into the frames.

A stream has two tasks: the server's own, which writes the frames, and one that waits for the end
of the connection. One timer looks after all streams of the process: a frame costs no timer, and a
comment in a silence wakes no task.
"""

import asyncio
import contextlib
import math
import time
from collections.abc import AsyncGenerator, Callable, Mapping
from enum import StrEnum

import structlog
from starlette.types import Message, Receive, Scope, Send
from structlog.typing import FilteringBoundLogger

from opencode_a2a import metrics
from opencode_a2a.config import StreamSettings
from opencode_a2a.errors import ServiceError, StreamEndedError

logger: FilteringBoundLogger = structlog.get_logger()

EVENT_STREAM = {
    "content-type": "text/event-stream",
    "cache-control": "no-cache, no-transform",
    "x-accel-buffering": "no",
}
"""The headers of a stream of server-sent events."""
Header = tuple[bytes, bytes]
WRITE_NOW = "write_now"
"""Key in the ASGI scope of a function that writes frames of a streamed response at once; it returns
False if the connection cannot take them now. Waking the task of a stream for each frame would take
longer than writing the frame. The layers between the server and a stream look only at the start of
a response, so frames may bypass them."""

# One line, not an event of its own: some readers take the blank line after it for an event
# without data, and fail to parse that.
_PING = b": ping\n"
_HEADERS: tuple[Header, ...] = tuple(
    (name.encode(), value.encode()) for name, value in EVENT_STREAM.items()
)


WriteNow = Callable[[bytes], bool]
"""Writes frames at once; False when the reader cannot take them now."""
MakeFrames = Callable[[WriteNow], AsyncGenerator[bytes, None]]
"""Makes the frames of a stream, always whole ones. Some may be written by the function it is given
while it has yielded nothing; if that returns False, they have to be yielded."""
ErrorFrame = Callable[[ServiceError], bytes]
"""Makes the frame that a stream is broken off with."""


class Ending(StrEnum):
    """Why a stream ended."""

    COMPLETE = "complete"
    DISCONNECTED = "disconnected"
    STALLED = "stalled"
    DRAINED = "drained"
    TOO_MANY_BYTES = "too_many_bytes"
    TOO_LONG = "too_long"
    IDLE = "idle"
    FAILED = "failed"


_BUDGETS = frozenset({Ending.TOO_MANY_BYTES, Ending.TOO_LONG, Ending.IDLE})


SEND_SECONDS = 30.0
"""How long a reader may leave a frame unread before it is dropped."""


_AHEAD_SECONDS = 0.25
"""Streams that are due so soon are looked at together: to wake up for each of them costs more."""
_EARLY_SHARE = 0.1
"""The share of the time between two comments by which one may be early, to join others."""
_LATE_SECONDS = 0.002
"""Event-loop timers are rounded to a millisecond and may fire up to this much early."""


class Streams:
    """All streams of a process: looks after them, and ends them when it is about to stop."""

    def __init__(self) -> None:
        self._streams: set[EventStream] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._next = math.inf
        self.draining = False

    def __len__(self) -> int:
        return len(self._streams)

    def drain(self) -> None:
        """End every open stream, and every later one, because the service is stopping."""
        self.draining = True
        for stream in self._streams:
            stream.end(Ending.DRAINED)

    def add(self, stream: "EventStream") -> None:
        self._streams.add(stream)
        if self.draining:
            stream.end(Ending.DRAINED)
        self._wake_at(stream.due)

    def discard(self, stream: "EventStream") -> None:
        self._streams.discard(stream)

    def _wake_at(self, when: float) -> None:
        if when < self._next:
            if self._timer is not None:
                self._timer.cancel()
            self._next = when
            pause = max(0.0, when - time.monotonic()) + _LATE_SECONDS
            self._timer = asyncio.get_running_loop().call_later(pause, self._look)

    def _look(self) -> None:
        now, next_due = time.monotonic(), math.inf
        for stream in self._streams:
            if stream.due <= now + _AHEAD_SECONDS:
                stream.look(now)
            if stream.due < next_due:
                next_due = stream.due
        self._timer, self._next = None, math.inf
        self._wake_at(next_due)


class EventStream:
    """An ASGI response that writes frames as they come.

    Every chunk holds whole frames, so that a comment may stand between any two.
    """

    def __init__(
        self,
        frames: MakeFrames,
        error_frame: ErrorFrame,
        headers: Mapping[str, str],
        limits: StreamSettings,
        streams: Streams,
        *,
        send_seconds: float = SEND_SECONDS,
    ) -> None:
        self._frames = frames(self._write)
        self._error_frame = error_frame
        self._headers = headers
        self._limits = limits
        self._streams = streams
        self._send_seconds = send_seconds
        self._began = self._wrote = self._last_frame = time.monotonic()
        self._blocked: float | None = None
        """Since when the client has not taken a frame; None if it has taken all."""
        self._bytes = 0
        self._ending: Ending | None = None
        self._alarm: asyncio.Timeout | None = None
        self._write_now: Callable[[bytes], bool] | None = None
        self._send: Send
        self.due = 0.0
        """When to look at the stream again."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        metrics.STREAM_REQUESTS.inc()
        self._send = send
        if scope["method"] != "HEAD":
            self._write_now = scope.get(WRITE_NOW)
        self.look(time.monotonic())
        self._streams.add(self)
        with metrics.STREAM_ACTIVE.track_inprogress():
            try:
                ending = await self._run(receive)
            finally:
                self._streams.discard(self)
        metrics.STREAM_ENDED.labels(ending).inc()
        if ending in _BUDGETS:
            metrics.STREAM_BUDGET_REJECTED.inc()
        if ending is Ending.STALLED:
            # To close the connection would mean to wait for a reader that does not read.
            logger.info("reader dropped")
            if (abort := scope.get("abort")) is not None:
                abort()
                await _disconnect(receive)

    async def _run(self, receive: Receive) -> Ending:
        """Write everything there is to write; return why it ended."""
        own = [(k.lower().encode(), v.encode()) for k, v in self._headers.items()]
        start = {"type": "http.response.start", "status": 200, "headers": [*_HEADERS, *own]}
        gone = asyncio.create_task(_disconnect(receive), name="reader")
        gone.add_done_callback(lambda _: self.end(Ending.DISCONNECTED))
        try:
            # A proxy may keep the headers back until there is a body.
            failed = await self._sent(start, _chunk(_PING))
            ending = failed or await self._write_frames()
        finally:
            gone.cancel()
        self._ending = ending
        if ending in (Ending.DISCONNECTED, Ending.STALLED):
            return ending
        last = b""
        if ending is not Ending.COMPLETE:
            last = self._error_frame(StreamEndedError(cause=ending.value))
        return await self._sent({"type": "http.response.body", "body": last}) or ending

    async def _sent(self, *messages: Message) -> Ending | None:
        """Send messages; return why the stream ends if the reader does not take them."""
        try:
            async with asyncio.timeout(self._send_seconds):
                for message in messages:
                    await self._send(message)
        except TimeoutError:
            return Ending.STALLED
        except OSError:
            return Ending.DISCONNECTED
        return None

    async def _write_frames(self) -> Ending:
        """Write the frames until there are no more, or the stream is ended; return why it ended."""
        ending, most = Ending.COMPLETE, self._limits.max_bytes
        try:
            async with (
                contextlib.aclosing(self._frames),
                asyncio.timeout(None if self._ending is None else 0) as self._alarm,
            ):
                async for chunk in self._frames:
                    self._bytes += len(chunk)
                    if most and self._bytes > most:
                        ending = Ending.TOO_MANY_BYTES
                        break
                    self._wrote = self._last_frame = self._blocked = time.monotonic()
                    try:
                        await self._send(_chunk(chunk))
                    except OSError:
                        ending = Ending.DISCONNECTED
                        break
                    del chunk  # not to be kept while waiting for the next one
                    self._blocked = None
        except Exception:
            # The outermost edge of a stream: the reader must hear of it, whatever it was.
            if self._ending is None:  # else it is the alarm, which went off because of that
                logger.exception("stream failed")
                ending = Ending.FAILED
        return self._ending or ending

    def _write(self, chunk: bytes) -> bool:
        """Write a chunk at once, unless it has to wait or is too much."""
        most = self._limits.max_bytes
        if self._write_now is None or (most and self._bytes + len(chunk) > most):
            return False
        if not self._write_now(chunk):
            return False
        self._bytes += len(chunk)
        self._wrote = self._last_frame = time.monotonic()
        self._blocked = None  # a comment may have been refused before
        return True

    def end(self, ending: Ending) -> None:
        """Break the stream off, unless it has ended."""
        if self._ending is None:
            self._ending, self.due = ending, math.inf
            if self._alarm is not None:
                with contextlib.suppress(RuntimeError):  # everything is written already
                    self._alarm.reschedule(asyncio.get_running_loop().time())

    def look(self, now: float) -> None:
        """Do what is due: end the stream, or write a comment into a silence."""
        limits = self._limits
        keepalive, longest = limits.keepalive_seconds, limits.max_duration_seconds
        idle = limits.idle_timeout_seconds
        if self._blocked is not None and now >= self._blocked + self._send_seconds:
            self.end(Ending.STALLED)
        elif longest and now >= self._began + longest:
            self.end(Ending.TOO_LONG)
        elif idle and now >= self._last_frame + idle:
            self.end(Ending.IDLE)
        if self._ending is not None:
            return
        if now >= self._wrote + keepalive * (1 - _EARLY_SHARE):
            if self._write_now is not None:
                taken = self._write_now(_PING)
            elif taken := self._blocked is None:
                # Another server than ours has no way to write at once.
                self._commenting = asyncio.create_task(self._comment(), name="comment")
            if taken:
                self._wrote, self._blocked = now, None
            elif self._blocked is None:
                self._blocked = now
        # A reader that takes nothing is asked again after the same time.
        due = (self._wrote if self._blocked is None else now) + keepalive
        if self._blocked is not None:
            due = min(due, self._blocked + self._send_seconds)
        if longest:
            due = min(due, self._began + longest)
        if idle:
            due = min(due, self._last_frame + idle)
        self.due = due

    async def _comment(self) -> None:
        with contextlib.suppress(OSError):
            await self._send(_chunk(_PING))


def _chunk(body: bytes) -> Message:
    return {"type": "http.response.body", "body": body, "more_body": True}


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
