"""Write a stream of server-sent events.

``server`` gives an iterator of encoded frames; this module sees to it that the reader can
tell a quiet stream from a dead one, that a reader who is gone or does not read is let go, and
that a stream never ends without saying so. It does not look into the frames.

A stream has two tasks: the server's own, which writes the frames, and one that waits for the
end of the connection and looks at the clock. A frame costs no timer.
"""

import asyncio
import contextlib
import time
from collections.abc import Callable
from enum import StrEnum

import structlog
from starlette.types import Message, Receive, Scope, Send
from structlog.typing import FilteringBoundLogger

from opencode_a2a import metrics
from opencode_a2a.config import StreamSettings
from opencode_a2a.errors import StreamEndedError
from opencode_a2a.server.exchange import EVENT_STREAM, Frames

log: FilteringBoundLogger = structlog.get_logger()

Header = tuple[bytes, bytes]
DIRECT_SEND = "direct_send"
"""In the scope: the server's own ``send``. What comes between looks at the start of an answer only,
so that the frames of a stream may go past it."""
WRITE_NOW = "write_now"
"""In the scope: writes a piece of an answer in pieces without waiting; False when it has to wait.
To wake the task of a stream for each frame takes longer than to write the frame."""

# One line, not an event of its own: some readers take the blank line after it for an event
# without data, and fail to parse that.
_PING = b": ping\n"
_HEADERS: tuple[Header, ...] = tuple(
    (name.encode(), value.encode()) for name, value in EVENT_STREAM.items()
)


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


_SILENT = frozenset({Ending.COMPLETE, Ending.DISCONNECTED, Ending.STALLED})
_BUDGETS = frozenset({Ending.TOO_MANY_BYTES, Ending.TOO_LONG, Ending.IDLE})


SEND_SECONDS = 30.0
"""How long a reader may leave a frame unread before it is dropped."""


def early_end(ending: Ending) -> StreamEndedError:
    """Return the error to break off a stream with, for a caller with frames of its own form."""
    return StreamEndedError(cause=ending.value)


class Drain:
    """Ends all streams of a process when it is about to stop."""

    def __init__(self) -> None:
        self._streams: set[EventStream] = set()
        self.begun = False
        self.on_begin: list[Callable[[], None]] = []
        """Called for whatever else waits for something and should not."""

    def __len__(self) -> int:
        return len(self._streams)

    def begin(self) -> None:
        """Let every open stream, and every later one, say goodbye."""
        self.begun = True
        for stream in self._streams:
            stream.wake()
        for call in self.on_begin:
            call()

    def add(self, stream: "EventStream") -> None:
        self._streams.add(stream)

    def discard(self, stream: "EventStream") -> None:
        self._streams.discard(stream)


_EARLY_SECONDS = 0.002
"""Timers of whole milliseconds may go off this much too early, to no purpose."""


class _EndedError(Exception):
    """Leaves the pump when the watch has found a reason to end the stream."""

    def __init__(self, ending: Ending) -> None:
        super().__init__(ending)
        self.ending = ending


class EventStream:
    """An ASGI response that writes frames as they come.

    Every chunk of ``frames`` holds whole frames, so that a comment may stand between any two.
    """

    def __init__(
        self,
        frames: Frames,
        *,
        limits: StreamSettings | None = None,
        send_seconds: float = SEND_SECONDS,
        headers: tuple[Header, ...] = (),
        drain: Drain | None = None,
        farewell: Callable[[Ending], bytes],
    ) -> None:
        self._frames = frames(self._write)
        self._limits = limits or StreamSettings()
        self._send_seconds = send_seconds
        self._headers = headers
        self._drain = Drain() if drain is None else drain
        self._farewell = farewell
        self._began = self._wrote = self._last_frame = time.monotonic()
        self._writing = False
        self._bytes = 0
        self._alarm: asyncio.Timeout | None = None
        self._write_now: Callable[[bytes], bool] | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        metrics.STREAM_REQUESTS.inc()
        self._drain.add(self)
        if scope["method"] != "HEAD":
            self._write_now = scope.get(WRITE_NOW)
        with metrics.STREAM_ACTIVE.track_inprogress():
            try:
                ending = await self._run(receive, send, scope.get(DIRECT_SEND, send))
            finally:
                self._drain.discard(self)
        metrics.STREAM_ENDED.labels(ending).inc()
        if ending in _BUDGETS:
            metrics.STREAM_BUDGET_REJECTED.inc()
        if ending is Ending.STALLED:
            await _abort(scope, receive)

    def wake(self) -> None:
        """Have the watch look around now."""
        if self._alarm is not None and not self._alarm.expired():
            self._alarm.reschedule(asyncio.get_running_loop().time())

    async def _run(self, receive: Receive, send: Send, direct: Send) -> Ending:
        """Write everything there is to write; return why it ended."""
        async with contextlib.aclosing(self._frames):
            ending = await self._begin_and_pump(receive, send, direct)
        if ending in (Ending.DISCONNECTED, Ending.STALLED):
            return ending
        last = b"" if ending in _SILENT else self._farewell(ending)
        try:
            async with asyncio.timeout(self._send_seconds):
                await send({"type": "http.response.body", "body": last})
        except TimeoutError:
            return Ending.STALLED
        return ending

    async def _begin_and_pump(self, receive: Receive, send: Send, direct: Send) -> Ending:
        start = {"status": 200, "headers": [*_HEADERS, *self._headers]}
        await send({"type": "http.response.start", **start})
        # A proxy may keep the headers back until there is a body.
        await send(_chunk(_PING))
        ending = Ending.COMPLETE
        try:
            async with asyncio.TaskGroup() as group:
                watch = group.create_task(self._watch(receive, direct))
                await self._pump(direct)
                watch.cancel()
        except* _EndedError as ended:
            ending = _cause(ended)
        except* OSError:
            ending = Ending.DISCONNECTED
        except* Exception:
            # The outermost edge of a stream: the reader must hear of it, whatever it was.
            log.exception("stream failed")
            ending = Ending.FAILED
        return ending

    async def _pump(self, send: Send) -> None:
        most = self._limits.max_bytes
        async for chunk in self._frames:
            self._bytes += len(chunk)
            if most and self._bytes > most:
                raise _EndedError(Ending.TOO_MANY_BYTES)
            self._wrote = self._last_frame = time.monotonic()
            self._writing = True
            await send(_chunk(chunk))
            del chunk  # not to be kept while waiting for the next one
            self._writing = False

    def _write(self, chunk: bytes) -> bool:
        """Write a chunk at once, unless it has to wait or is too much."""
        most = self._limits.max_bytes
        if self._write_now is None or self._writing or (most and self._bytes + len(chunk) > most):
            return False
        if not self._write_now(chunk):
            return False
        self._bytes += len(chunk)
        self._wrote = self._last_frame = time.monotonic()
        return True

    async def _watch(self, receive: Receive, send: Send) -> None:
        """Wait for the reader to leave; in between, look at clock and budgets."""
        loop = asyncio.get_running_loop()

        def look() -> None:
            # Most of what there is to do in a silence: a comment, for which no task is woken.
            nonlocal timer
            now = time.monotonic()
            if self._reason_to_end(now) is None and self._ping_now(now):
                timer = loop.call_later(self._pause(now) + _EARLY_SECONDS, look)
            else:
                self.wake()

        while True:
            now = time.monotonic()
            reason = self._reason_to_end(now)
            if reason is not None:
                raise _EndedError(reason)
            if self._silent(now):
                await self._ping(send, now)
            timer = loop.call_later(self._pause(now) + _EARLY_SECONDS, look)
            try:
                async with asyncio.timeout(None) as self._alarm:
                    await _disconnect(receive)
                    raise _EndedError(Ending.DISCONNECTED)
            except TimeoutError:
                continue
            finally:
                timer.cancel()
                self._alarm = None

    def _silent(self, now: float) -> bool:
        """Whether it is time for a comment."""
        return not self._writing and now - self._wrote >= self._limits.keepalive_seconds

    def _ping_now(self, now: float) -> bool:
        """Write a comment if it is time for one; False if it has to wait for the reader."""
        if not self._silent(now):
            return True
        if self._write_now is None or not self._write_now(_PING):
            return False
        self._wrote = now
        return True

    async def _ping(self, send: Send, now: float) -> None:
        self._wrote = now
        try:
            async with asyncio.timeout(self._send_seconds):
                await send(_chunk(_PING))
        except TimeoutError:
            raise _EndedError(Ending.STALLED) from None

    def _reason_to_end(self, now: float) -> Ending | None:
        limits = self._limits
        if self._drain.begun:
            return Ending.DRAINED
        if self._writing and now - self._wrote >= self._send_seconds:
            return Ending.STALLED
        if limits.max_duration_seconds and now - self._began >= limits.max_duration_seconds:
            return Ending.TOO_LONG
        if limits.idle_timeout_seconds and now - self._last_frame >= limits.idle_timeout_seconds:
            return Ending.IDLE
        return None

    def _pause(self, now: float) -> float:
        """Return the seconds until there is something to look at."""
        limits = self._limits
        due = [self._wrote + (self._send_seconds if self._writing else limits.keepalive_seconds)]
        if limits.max_duration_seconds:
            due.append(self._began + limits.max_duration_seconds)
        if limits.idle_timeout_seconds:
            due.append(self._last_frame + limits.idle_timeout_seconds)
        return max(0.0, min(due) - now)


def _chunk(body: bytes) -> Message:
    return {"type": "http.response.body", "body": body, "more_body": True}


def _cause(ended: ExceptionGroup[_EndedError]) -> Ending:
    first = ended.exceptions[0]
    return first.ending if isinstance(first, _EndedError) else _cause(first)


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _abort(scope: Scope, receive: Receive) -> None:
    """Cut the connection of a reader that does not read; closing it would wait for the reader."""
    abort: Callable[[], None] | None = scope.get("abort")
    log.info("reader dropped")
    if abort is not None:
        abort()
        await _disconnect(receive)
