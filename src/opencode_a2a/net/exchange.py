"""A small HTTP/1.1 client for calls to one server.

``opencode.calls`` makes every call through it. A turn keeps its call open for minutes, and the
event stream stays open for as long as the service runs. A general HTTP client takes 0.8 ms of CPU
per call and looks at every open connection each time; this one takes 0.1 ms, however many
connections are open. Nothing here knows OpenCode.
"""

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import cast
from urllib.parse import urlsplit

import httptools

from opencode_a2a.net.trust import machine_trust

CONNECT_SECONDS = 10.0
KEPT_SECONDS = 4.0
"""Seconds that an idle connection is reused; servers close idle connections after a while."""
KEPT_CONNECTIONS = 64
"""Idle connections that are kept at most."""


class ExchangeError(Exception):
    """The call failed before the response was complete; the text is short and quotes no driver."""


class NotConnectedError(ExchangeError):
    """There was no connection, so nothing was sent."""


class NotHttpError(ExchangeError):
    """What answers does not speak HTTP."""


class TooLargeError(ExchangeError):
    """The response is larger than the limit."""


@dataclass(slots=True)
class HttpResponse:
    status: int = 0
    headers: dict[str, str] = field(default_factory=dict[str, str])
    body: bytes = b""


class HttpConnection(asyncio.Protocol):
    """One connection, with at most one call on it."""

    def __init__(self, max_bytes: int) -> None:
        self.response = HttpResponse()
        self.reusable = False
        """Whether the server allows another call on it, now that this one is complete."""
        self.responding = False
        """Whether any byte of the response has arrived."""
        self.free_since = 0.0
        """When its last call ended, by the monotonic clock."""
        self._max_bytes = max_bytes
        self._transport: asyncio.Transport | None = None
        self._parser: httptools.HttpResponseParser | None = None
        self._head: asyncio.Future[None] | None = None
        """Done when status and headers have arrived; only for a stream."""
        self._end: asyncio.Future[None] | None = None
        self._body = bytearray()
        """The bytes of the body that were not passed to the sink."""
        self._sink: Callable[[bytes], object] | None = None

    @property
    def open(self) -> bool:
        return self._transport is not None and not self._transport.is_closing()

    async def call(self, request: bytes, *, stream: bool = False) -> HttpResponse:
        """Send a request and wait for the whole response.

        For a ``stream`` wait for status and headers only; ``read`` reads the body.
        """
        if self._transport is None or self._transport.is_closing():
            raise ExchangeError("closed")
        loop = asyncio.get_running_loop()
        self._parser = httptools.HttpResponseParser(self)
        self.response, self._body = HttpResponse(), bytearray()
        self.reusable = self.responding = False
        self._end = loop.create_future()
        if stream:
            self._head = loop.create_future()
        self._transport.write(request)
        try:
            if self._head is None:
                await self._end
            else:
                await asyncio.wait((self._head, self._end), return_when=asyncio.FIRST_COMPLETED)
                if not self._head.done():
                    await self._end
                    raise ExchangeError("closed")
                return self.response
        except BaseException:  # a cancellation may coincide with the end of the response
            self.close()
            raise
        if not self.reusable:
            self.close()
        self.response.body = bytes(self._body)
        return self.response

    async def read(self, sink: Callable[[bytes], object]) -> None:
        """Pass the body to ``sink`` as it arrives, cut anywhere, until it ends.

        ``sink`` must not block.
        """
        self._sink = sink
        self._drain(sink)
        if self._end is not None:
            await self._end

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def _drain(self, sink: Callable[[bytes], object]) -> None:
        if self._body:
            body, self._body = self._body, bytearray()
            sink(bytes(body))

    def _fail(self, error: Exception) -> None:
        if self._end is not None and not self._end.done():
            self._end.set_exception(error)
            self._end.exception()  # asyncio would complain if nobody waits for it
        self.close()

    # Called by the transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports do not descend from asyncio's.
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        if self._parser is None or self._end is None or self._end.done():
            self.close()  # no request is open, so this is not a response
            return
        self.responding = True
        try:
            self._parser.feed_data(data)
            if self._sink is not None:
                self._drain(self._sink)
        except httptools.HttpParserError:
            self._fail(NotHttpError("not HTTP"))
        except Exception as error:  # raised by the sink: ``read`` has to raise it
            self._fail(error)

    def connection_lost(self, exc: Exception | None) -> None:
        self.reusable = False
        if exc is None and self._head is not None and self._end is not None:
            # The server may end a stream by closing the connection.
            if not self._end.done():
                self._end.set_result(None)
        else:
            self._fail(ExchangeError(type(exc).__name__ if exc else "closed"))

    # Called by the parser

    def on_header(self, name: bytes, value: bytes) -> None:
        self.response.headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        if self._parser is not None:
            self.response.status = self._parser.get_status_code()
        if self._head is not None:
            self._head.set_result(None)

    def on_body(self, body: bytes) -> None:
        self._body += body
        if self._sink is None and len(self._body) > self._max_bytes:
            self._fail(TooLargeError(f"the response is larger than {self._max_bytes} bytes"))

    def on_message_complete(self) -> None:
        if self._parser is None or self._end is None or self._end.done():
            return
        self.reusable = self._parser.should_keep_alive()
        self._end.set_result(None)


class Exchange:
    """Makes calls to one server, over connections that are kept open for a while."""

    def __init__(self, base_url: str, headers: Mapping[str, str], max_bytes: int) -> None:
        url = urlsplit(base_url)
        self._secure = machine_trust() if url.scheme == "https" else None
        self._host = url.hostname or ""
        self._port = url.port or (443 if self._secure else 80)
        self._prefix = url.path.rstrip("/")
        self._max_bytes = max_bytes
        fixed = {"host": url.netloc, **headers}
        self._headers = "".join(f"{name}: {value}\r\n" for name, value in fixed.items())
        self._free: list[HttpConnection] = []
        self._closed = False

    async def send(
        self,
        method: str,
        target: str,
        body: bytes | None,
        headers: Mapping[str, str],
        before_write: Callable[[], Awaitable[None]] | None = None,
    ) -> HttpResponse:
        """Send a request and return the whole response, however long that takes.

        ``before_write`` is awaited once there is a connection, which may take long. Nothing else
        runs between its return and the writing of the request.
        """
        request = self._request(method, target, body, headers)
        recently = time.monotonic() - KEPT_SECONDS
        kept: HttpConnection | None = None
        while self._free and kept is None:
            kept = self._free.pop()
            if not kept.open or kept.free_since < recently:
                kept.close()
                kept = None
        connection = kept or await self._connect()
        if before_write is not None:
            connection = await self._open_after(before_write, connection)
        try:
            response = await connection.call(request)
        except ExchangeError:
            # The server may have closed the kept connection at this very moment. Only a request
            # that changes nothing is sent again.
            if kept is None or kept.responding or method != "GET":
                raise
            connection = await self._connect()
            response = await connection.call(request)
        if connection.reusable and not self._closed and len(self._free) < KEPT_CONNECTIONS:
            connection.free_since = time.monotonic()
            self._free.append(connection)
        else:
            connection.close()
        return response

    @asynccontextmanager
    async def stream(
        self, target: str, headers: Mapping[str, str]
    ) -> AsyncGenerator[HttpConnection]:
        """Request an endless response; yield once its head has arrived."""
        connection = await self._connect()
        try:
            await connection.call(self._request("GET", target, None, headers), stream=True)
            yield connection
        finally:
            connection.close()

    def close(self) -> None:
        self._closed = True
        while self._free:
            self._free.pop().close()

    def _request(
        self, method: str, target: str, body: bytes | None, headers: Mapping[str, str]
    ) -> bytes:
        body = body or b""
        more = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        head = (
            f"{method} {self._prefix}{target} HTTP/1.1\r\n"
            f"{self._headers}{more}content-length: {len(body)}\r\n\r\n"
        )
        return head.encode("latin-1") + body

    async def _open_after(
        self, before_write: Callable[[], Awaitable[None]], connection: HttpConnection
    ) -> HttpConnection:
        """Return the connection, or another one if the server closes it meanwhile."""
        while True:
            try:
                await before_write()
            except BaseException:
                connection.close()
                raise
            if connection.open:
                return connection
            connection = await self._connect()

    async def _connect(self) -> HttpConnection:
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(CONNECT_SECONDS):
                _, connection = await loop.create_connection(
                    lambda: HttpConnection(self._max_bytes),
                    self._host,
                    self._port,
                    ssl=self._secure,
                )
        except TimeoutError:
            raise NotConnectedError("no connection in time") from None
        except OSError as error:
            raise NotConnectedError(type(error).__name__) from None
        return connection
