"""A stream says what there is to say, and never ends in silence."""

import asyncio
import time
from collections.abc import AsyncGenerator, Callable
from types import SimpleNamespace

import httpx2
import pytest
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from opencode_a2a.config import StreamSettings
from opencode_a2a.server import sse
from opencode_a2a.server.sse import WRITE_NOW, Ending, EventStream, Streams, WriteNow
from tests.support.running import RawClient, raw, running

Frames = AsyncGenerator[bytes, None]
PING = b": ping\n"


class Source:
    """Frames that come when the test says so, and a note of how they ended."""

    def __init__(self) -> None:
        self.queue: asyncio.Queue[bytes | Exception | None] = asyncio.Queue()
        self.closed = asyncio.Event()

    async def frames(self) -> Frames:
        try:
            while (item := await self.queue.get()) is not None:
                if isinstance(item, Exception):
                    raise item
                yield item
        finally:
            self.closed.set()


def farewell(ending: str) -> bytes:
    return f"event: end\ndata: {ending}\n\n".encode()


def response(
    frames: Callable[[WriteNow], Frames],
    limits: StreamSettings | None = None,
    streams: Streams | None = None,
    **options: float,
) -> EventStream:
    return EventStream(
        frames,
        lambda error: farewell(str(error.data["cause"])),
        {"X-Mine": "1"},
        limits or StreamSettings(),
        Streams() if streams is None else streams,
        **options,
    )


def stream_app(
    frames: Callable[[], Frames],
    limits: StreamSettings | None = None,
    streams: Streams | None = None,
    **options: float,
) -> ASGIApp:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await response(lambda _: frames(), limits, streams, **options)(scope, receive, send)

    return app


async def read_all(url: str) -> tuple[httpx2.Headers, bytes]:
    async with httpx2.AsyncClient() as http:
        response = await http.get(url)
    return response.headers, response.content


async def test_frames_are_written_as_they_are_after_a_first_comment() -> None:
    source = Source()
    for frame in (b"id: 1\ndata: a\n\n", b"id: 2\ndata: \xc3\xa4\n\n", None):
        source.queue.put_nowait(frame)

    async with asyncio.timeout(60), running(stream_app(source.frames)) as url:
        headers, body = await read_all(url)

    assert body == PING + b"id: 1\ndata: a\n\nid: 2\ndata: \xc3\xa4\n\n"
    assert headers["content-type"] == "text/event-stream"
    assert headers["cache-control"] == "no-cache, no-transform"
    assert (headers["x-accel-buffering"], headers["x-mine"]) == ("no", "1")
    assert source.closed.is_set()


async def test_a_quiet_stream_is_kept_alive_by_comments_and_goes_on() -> None:
    source = Source()
    app = stream_app(source.frames, StreamSettings(keepalive_seconds=0.01))

    async with asyncio.timeout(60), running(app) as url, raw(url) as reader:
        await ask(reader)
        comments = [await chunk(reader) for _ in range(4)]
        source.queue.put_nowait(b"data: x\n\n")
        while (frame := await chunk(reader)) == PING:
            pass

    assert (comments, frame) == ([PING] * 4, b"data: x\n\n")


async def test_a_comment_comes_within_the_interval_and_not_after_an_event() -> None:
    source, written, sent = Source(), list[bytes](), asyncio.Event()
    stream = response(
        lambda _: source.frames(), StreamSettings(keepalive_seconds=3, max_duration_seconds=0)
    )

    def write_now(chunk: bytes) -> bool:
        written.append(chunk)
        return True

    async def send(message: Message) -> None:
        if message.get("body") == b"data: x\n\n":
            sent.set()

    async def receive() -> Message:
        return await asyncio.get_running_loop().create_future()

    async with asyncio.timeout(60), asyncio.TaskGroup() as group:
        scope = {"type": "http", "method": "GET", WRITE_NOW: write_now}
        group.create_task(stream(scope, receive, send))
        source.queue.put_nowait(b"data: x\n\n")
        await sent.wait()
        after = time.monotonic()
        looks: list[tuple[float, int]] = []
        for seconds in (1.0, 2.5, 2.99, 5.0, 5.99):
            stream.look(after + seconds)
            looks.append((seconds, len(written)))
        source.queue.put_nowait(None)

    assert looks == [(1.0, 0), (2.5, 0), (2.99, 1), (5.0, 1), (5.99, 2)]
    assert written == [PING] * 2
    assert stream.due == pytest.approx(after + 5.99 + 3)


async def test_all_streams_are_kept_alive_by_one_timer() -> None:
    source, streams = Source(), Streams()
    app = stream_app(source.frames, StreamSettings(keepalive_seconds=0.05), streams)

    async with asyncio.timeout(60), raw_after(app, streams) as (readers, stop):
        for reader in readers:
            await ask(reader)
        comments = [[await chunk(reader) for _ in range(4)] for reader in readers]
        stop()

    assert comments == [[PING] * 4] * 3


async def test_a_comment_in_a_silence_wakes_no_task() -> None:
    source, sent = Source(), list[bytes]()
    app = stream_app(source.frames, StreamSettings(keepalive_seconds=0.01))

    async def counted(scope: Scope, receive: Receive, send: Send) -> None:
        async def count(message: Message) -> None:
            sent.append(message.get("body", b""))
            await send(message)

        await app(scope, receive, count)

    async with asyncio.timeout(60), running(counted) as url, raw(url) as reader:
        await ask(reader)
        comments = [await chunk(reader) for _ in range(4)]

    assert comments == [PING] * 4
    assert sent == [b"", PING]


async def test_a_reader_who_leaves_ends_the_stream_at_once() -> None:
    source = Source()
    app = stream_app(source.frames, StreamSettings(keepalive_seconds=3600))

    async with asyncio.timeout(60), running(app) as url:
        async with raw(url) as reader:
            await ask(reader)
            await chunk(reader)
        await source.closed.wait()


@pytest.mark.requirement("I8")
async def test_a_reader_who_does_not_read_is_cut_off() -> None:
    closed = asyncio.Event()

    async def flood() -> Frames:
        try:
            while True:
                yield b"data: " + b"x" * 65536 + b"\n\n"
        finally:
            closed.set()

    app = stream_app(flood, StreamSettings(keepalive_seconds=0.05, max_bytes=0), send_seconds=0.2)
    # The server can stop only when the connection is really gone.
    async with asyncio.timeout(60), running(app) as url, raw(url) as reader:
        reader.writer.transport.pause_reading()  # type: ignore[attr-defined] # a socket's can
        await ask(reader, read=False)
        await closed.wait()


async def test_a_reader_who_has_not_read_the_answer_before_is_cut_off() -> None:
    source, ended = Source(), asyncio.Event()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] == "/large":
            await Response(b"x" * 20_000_000)(scope, receive, send)
            return
        await stream_app(source.frames, send_seconds=0.2)(scope, receive, send)
        ended.set()

    async with asyncio.timeout(20), running(app) as url, raw(url) as reader:
        reader.writer.transport.pause_reading()  # type: ignore[attr-defined] # a socket's can
        await reader.send(b"GET /large HTTP/1.1\r\nhost: x\r\n\r\n")
        await ask(reader, read=False)
        await ended.wait()


@pytest.mark.parametrize("fails_at", range(4), ids=["start", "first comment", "frame", "end"])
async def test_a_connection_that_breaks_ends_the_stream(fails_at: int) -> None:
    source, sent = Source(), list[Message]()
    source.queue.put_nowait(b"data: a\n\n")
    source.queue.put_nowait(None)

    async def send(message: Message) -> None:  # as ASGI 2.4 has it
        if len(sent) == fails_at:
            raise OSError
        sent.append(message)

    async def receive() -> Message:
        return await asyncio.get_running_loop().create_future()

    async with asyncio.timeout(60):
        await response(lambda _: source.frames())({"type": "http", "method": "GET"}, receive, send)

    assert len(sent) == fails_at


async def test_frames_that_are_written_at_once_are_in_order_with_the_others() -> None:
    async def frames(write: WriteNow) -> Frames:
        yield b"data: 1\n\n"
        assert write(b"data: 2\n\n")
        yield b"data: 3\n\n"

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await response(frames)(scope, receive, send)

    async with asyncio.timeout(60), running(app) as url:
        _, body = await read_all(url)

    assert body == PING + b"data: 1\n\ndata: 2\n\ndata: 3\n\n"


async def test_nothing_is_written_at_once_to_a_reader_who_does_not_read() -> None:
    refused = asyncio.Event()

    async def frames(write: WriteNow) -> Frames:
        yield b"data: 1\n\n"
        while write(b"data: " + b"x" * 65536 + b"\n\n"):
            pass
        refused.set()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        limits = StreamSettings(max_bytes=0)
        await response(frames, limits, send_seconds=0.2)(scope, receive, send)

    async with asyncio.timeout(60), running(app) as url, raw(url) as reader:
        reader.writer.transport.pause_reading()  # type: ignore[attr-defined] # a socket's can
        await ask(reader, read=False)
        await refused.wait()


async def test_a_reader_who_reads_again_before_the_next_comment_is_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now, full, given = 100.0, False, asyncio.get_running_loop().create_future()
    monkeypatch.setattr(sse, "time", SimpleNamespace(monotonic=lambda: now))

    async def frames(write: WriteNow) -> Frames:
        given.set_result(write)
        await asyncio.get_running_loop().create_future()
        yield b""

    def write_now(_: bytes) -> bool:
        return not full

    async def send(_: Message) -> None:
        pass

    async def receive() -> Message:
        return await asyncio.get_running_loop().create_future()

    stream = response(frames, StreamSettings(keepalive_seconds=3), send_seconds=5)
    scope: Scope = {"type": "http", "method": "GET", WRITE_NOW: write_now}
    async with asyncio.timeout(60):
        serving = asyncio.create_task(stream(scope, receive, send))
        write: WriteNow = await given
    now, full = 103.0, True
    stream.look(now)
    full = False
    for now in (104.0, 106.0, 108.0, 110.0):
        assert write(b"data: x\n\n")
        stream.look(now)
    due = stream.due
    serving.cancel()
    await asyncio.wait([serving])

    assert due == 113.0


@pytest.mark.requirement("I14")
async def test_when_the_server_stops_every_stream_says_goodbye() -> None:
    source, streams = Source(), Streams()
    app = stream_app(source.frames, StreamSettings(keepalive_seconds=3600), streams)

    async with asyncio.timeout(60), raw_after(app, streams) as (readers, stop):
        for reader in readers:
            await ask(reader)
            await chunk(reader)
        stop()
        last = [await chunk(reader) for reader in readers]
        rest = [await chunk(reader) for reader in readers]

    assert last == [farewell(Ending.DRAINED)] * 3
    assert rest == [b""] * 3
    assert len(streams) == 0


@pytest.mark.parametrize(
    ("limits", "ending"),
    [
        (StreamSettings(max_bytes=30), Ending.TOO_MANY_BYTES),
        (StreamSettings(max_duration_seconds=0.05), Ending.TOO_LONG),
        (StreamSettings(idle_timeout_seconds=0.05), Ending.IDLE),
    ],
)
async def test_a_budget_ends_a_stream_with_a_word(limits: StreamSettings, ending: Ending) -> None:
    source = Source()
    for _ in range(2):
        source.queue.put_nowait(b"data: 0123456789\n\n")

    async with (
        asyncio.timeout(60),
        running(stream_app(source.frames, limits)) as url,
    ):
        _, body = await read_all(url)

    assert body.endswith(farewell(ending))
    assert source.closed.is_set()


@pytest.mark.requirement("I5")
@pytest.mark.parametrize("kind", [ValueError, OSError, TimeoutError])
async def test_a_defect_behind_the_stream_is_told_without_its_text(kind: type[Exception]) -> None:
    source = Source()
    source.queue.put_nowait(b"data: a\n\n")
    source.queue.put_nowait(kind("a secret"))

    async with asyncio.timeout(60), running(stream_app(source.frames)) as url:
        _, body = await read_all(url)

    assert body == PING + b"data: a\n\n" + farewell(Ending.FAILED)


class raw_after:  # noqa: N801 # used like a function
    """Three readers of an app, and a way to stop its server while they read."""

    def __init__(self, app: ASGIApp, streams: Streams) -> None:
        self._app = app
        self._streams = streams
        self._stop = asyncio.Event()
        self._url: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    async def __aenter__(self) -> tuple[list[RawClient], Callable[[], None]]:
        self._serving = asyncio.create_task(self._serve())
        self._connections = [raw(await self._url) for _ in range(3)]
        readers = [await connection.__aenter__() for connection in self._connections]
        return readers, self._stop.set

    async def __aexit__(self, *_: object) -> None:
        self._stop.set()  # a test that fails must not wait for its stream
        for connection in self._connections:
            await connection.__aexit__(None, None, None)
        await self._serving

    async def _serve(self) -> None:
        async with running(self._app, streams=self._streams) as url:
            self._url.set_result(url)
            await self._stop.wait()


async def ask(reader: RawClient, *, read: bool = True) -> None:
    await reader.send(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
    if read:
        await reader.answer()


async def chunk(reader: RawClient) -> bytes:
    """Read one chunk of the body; nothing at its end."""
    size = int(await reader.reader.readline(), 16)
    return (await reader.reader.readexactly(size + 2))[:-2]


async def test_idle_streams_share_one_timer(monkeypatch: pytest.MonkeyPatch) -> None:
    loop, streams, timers = asyncio.get_running_loop(), Streams(), list[asyncio.TimerHandle]()
    call_later = loop.call_later

    def counted(delay: float, callback: Callable[[], None]) -> asyncio.TimerHandle:
        timers.append(call_later(delay, callback))
        return timers[-1]

    monkeypatch.setattr(loop, "call_later", counted)
    for _ in range(100):
        stream = response(lambda _: Source().frames(), StreamSettings(), streams)
        stream.look(time.monotonic())
        streams.add(stream)
    pending = [timer for timer in timers if not timer.cancelled()]
    for timer in timers:
        timer.cancel()

    assert (len(streams), len(pending)) == (100, 1)
