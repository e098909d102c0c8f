"""HTTP/1.1 calls to one server, at little cost.

``opencode.client`` makes every call through this. A turn keeps its call open for minutes, the
event stream stays for as long as the service runs. A general client takes 0.8 ms of CPU for a
call and looks at every open connection each time; this takes 0.1 ms whatever else is open.
Nothing here knows OpenCode.
"""

import asyncio
import ssl
import time
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TypeVar, cast
from urllib.parse import urlsplit

import httptools

CONNECT_SECONDS = 10.0
KEPT_SECONDS = 4.0
"""Servers close idle connections after a while; one this fresh is still there."""
KEPT_CONNECTIONS = 64
P = TypeVar("P", bound=asyncio.Protocol)


class ExchangeError(Exception):
    """The call failed on the way; the text is short and holds nothing of the driver's."""


class TooLargeError(ExchangeError):
    """The answer is larger than allowed."""


@dataclass(slots=True)
class Reply:
    status: int = 0
    headers: dict[str, str] = field(default_factory=dict[str, str])
    body: bytes = b""


class _Connection(asyncio.Protocol):
    """One connection, with at most one call on it."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._transport: asyncio.Transport | None = None
        self._parser: httptools.HttpResponseParser | None = None
        self._waiting: asyncio.Future[Reply] | None = None
        self._reply = Reply()
        self._body = bytearray()
        self.reusable = False
        self.touched = False
        """Whether any of an answer has come."""
        self.free_since = 0.0

    async def call(self, request: bytes) -> Reply:
        if self._transport is None or self._transport.is_closing():
            raise ExchangeError("closed")
        self._parser = httptools.HttpResponseParser(self)
        self._reply, self._body = Reply(), bytearray()
        self.reusable = self.touched = False
        self._waiting = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        try:
            return await self._waiting
        finally:
            self._waiting = None
            if not self.reusable:
                self.close()

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    @property
    def open(self) -> bool:
        return self._transport is not None and not self._transport.is_closing()

    # What the transport says

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports do not descend from asyncio's.
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        if self._parser is None or self._waiting is None:
            self.close()
            return
        self.touched = True
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError:
            self._fail(ExchangeError("not HTTP"))

    def connection_lost(self, exc: Exception | None) -> None:
        self.reusable = False
        self._fail(ExchangeError(type(exc).__name__ if exc else "closed"))

    # What the parser says

    def on_header(self, name: bytes, value: bytes) -> None:
        self._reply.headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_body(self, body: bytes) -> None:
        self._body += body
        if len(self._body) > self._max_bytes:
            self._fail(TooLargeError(f"the answer is larger than {self._max_bytes} bytes"))

    def on_message_complete(self) -> None:
        if self._parser is None or self._waiting is None or self._waiting.done():
            return
        self._reply.status = self._parser.get_status_code()
        self._reply.body = bytes(self._body)
        self.reusable = self._parser.should_keep_alive()
        self._waiting.set_result(self._reply)

    def _fail(self, error: ExchangeError) -> None:
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_exception(error)
        self.close()


class Stream(asyncio.Protocol):
    """An answer that is handed on while it comes."""

    def __init__(self) -> None:
        loop = asyncio.get_running_loop()
        self.reply = Reply()
        self._transport: asyncio.Transport | None = None
        self._parser = httptools.HttpResponseParser(self)
        self._begun: asyncio.Future[None] = loop.create_future()
        self._over: asyncio.Future[None] = loop.create_future()
        self._sink: Callable[[bytes], object] | None = None
        self._chunks: list[bytes] = []

    async def read(self, sink: Callable[[bytes], object]) -> None:
        """Hand on the body as it arrives, cut anywhere, until it ends; ``sink`` must not wait."""
        self._sink = sink
        self._pass_on()
        await self._over

    async def begin(self, request: bytes) -> None:
        """Ask, and wait for status and headers."""
        if self._transport is not None:
            self._transport.write(request)
        await asyncio.wait((self._begun, self._over), return_when=asyncio.FIRST_COMPLETED)
        if not self._begun.done():
            await self._over
            raise ExchangeError("closed")

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()
        self._end(None)

    def _pass_on(self) -> None:
        if self._sink is not None and self._chunks:
            chunks, self._chunks = self._chunks, []
            self._sink(chunks[0] if len(chunks) == 1 else b"".join(chunks))

    def _end(self, error: Exception | None) -> None:
        if self._over.done():
            return
        if error is None:
            self._over.set_result(None)
        else:
            self._over.set_exception(error)
            self._over.exception()  # whoever reads it is told; there may be nobody

    # What the transport says

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
            self._pass_on()
        except httptools.HttpParserError:
            self._end(ExchangeError("not HTTP"))
            self.close()
        except Exception as error:  # it is the sink's: whoever reads has to hear of it
            self._end(error)
            self.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self._end(ExchangeError(type(exc).__name__) if exc else None)

    # What the parser says

    def on_header(self, name: bytes, value: bytes) -> None:
        self.reply.headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        self.reply.status = self._parser.get_status_code()
        self._begun.set_result(None)

    def on_body(self, body: bytes) -> None:
        self._chunks.append(body)

    def on_message_complete(self) -> None:
        self._pass_on()
        self._end(None)


class Exchange:
    """Calls to one server."""

    def __init__(self, base_url: str, headers: Mapping[str, str], max_bytes: int) -> None:
        url = urlsplit(base_url)
        self._secure = ssl.create_default_context() if url.scheme == "https" else None
        self._host = url.hostname or ""
        self._port = url.port or (443 if self._secure else 80)
        self._prefix = url.path.rstrip("/")
        self._max_bytes = max_bytes
        self._head = _lines({"host": url.netloc, **headers})
        self._free: list[_Connection] = []

    async def send(
        self,
        method: str,
        target: str,
        body: bytes | None,
        headers: Mapping[str, str],
    ) -> Reply:
        """Make a call and read all of the answer, however long it takes."""
        request = self._request(method, target, body, headers)
        kept = self._take()
        if kept is not None:
            try:
                return await self._call(kept, request)
            except ExchangeError:
                if kept.touched or method != "GET":
                    raise
        fresh = await self._connect(lambda: _Connection(self._max_bytes))
        return await self._call(fresh, request)

    @asynccontextmanager
    async def stream(self, target: str, headers: Mapping[str, str]) -> AsyncGenerator[Stream]:
        """Ask for an answer that does not end by itself; its head is there, its body comes."""
        stream = await self._connect(Stream)
        try:
            await stream.begin(self._request("GET", target, None, headers))
            yield stream
        finally:
            stream.close()

    def close(self) -> None:
        while self._free:
            self._free.pop().close()

    def _request(
        self, method: str, target: str, body: bytes | None, headers: Mapping[str, str]
    ) -> bytes:
        first = f"{method} {self._prefix}{target} HTTP/1.1\r\n".encode("ascii")
        length = b"content-length: %d\r\n\r\n" % len(body or b"")
        return first + self._head + _lines(headers) + length + (body or b"")

    async def _call(self, connection: _Connection, request: bytes) -> Reply:
        reply = await connection.call(request)
        if connection.reusable and len(self._free) < KEPT_CONNECTIONS:
            connection.free_since = time.monotonic()
            self._free.append(connection)
        else:
            connection.close()
        return reply

    def _take(self) -> _Connection | None:
        fresh = time.monotonic() - KEPT_SECONDS
        while self._free:
            connection = self._free.pop()
            if connection.open and connection.free_since > fresh:
                return connection
            connection.close()
        return None

    async def _connect(self, protocol: Callable[[], P]) -> P:
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(CONNECT_SECONDS):
                _, connection = await loop.create_connection(
                    protocol, self._host, self._port, ssl=self._secure
                )
        except TimeoutError:
            raise ExchangeError("no connection in time") from None
        except OSError as error:
            raise ExchangeError(type(error).__name__) from None
        return connection


def _lines(headers: Mapping[str, str]) -> bytes:
    return "".join(f"{name}: {value}\r\n" for name, value in headers.items()).encode("latin-1")
