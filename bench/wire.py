"""A small HTTP/1.1 client over a raw asyncio protocol, and the lines of an event stream.

The load generator, the relay and the SDK server use it, so that none of them measures an HTTP
library. One request at a time on a connection. It knows neither A2A nor OpenCode.
"""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

import httptools

Sink = Callable[[bytes, int], None]
"""Takes one ``data:`` value of a stream, and the monotonic time in ns at which it was read."""


@dataclass(frozen=True, slots=True)
class Response:
    status: int
    body: bytes


class BrokenError(Exception):
    """The connection ended before the answer did."""


class Connection(asyncio.Protocol):
    def __init__(self) -> None:
        self.transport: asyncio.WriteTransport
        self.last_event_id = b""
        self._parser = httptools.HttpResponseParser(self)
        self._answer: asyncio.Future[Response] | None = None
        self._body: list[bytes] = []
        self._sink: Sink | None = None
        self._rest = b""
        self._now = 0

    @staticmethod
    async def open(port: int) -> "Connection":
        loop = asyncio.get_running_loop()
        _, connection = await loop.create_connection(Connection, "127.0.0.1", port)
        return connection

    def close(self) -> None:
        self.transport.abort()

    async def request(
        self,
        method: str,
        path: str,
        body: bytes = b"",
        headers: bytes = b"",
        sink: Sink | None = None,
    ) -> Response:
        """Send a request and wait for the end of its answer; a sink gets the events of a stream."""
        self._answer = asyncio.get_running_loop().create_future()
        self._body, self._sink, self._rest = [], sink, b""
        kind = b"content-type: application/json\r\n" if body else b""
        self.transport.write(
            b"%b %b HTTP/1.1\r\nhost: 127.0.0.1\r\n%b%bcontent-length: %d\r\n\r\n%b"
            % (method.encode(), path.encode(), kind, headers, len(body), body)
        )
        return await self._answer

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.WriteTransport", transport)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._answer and not self._answer.done():
            self._answer.set_exception(BrokenError(str(exc or "closed by the server")))

    def data_received(self, data: bytes) -> None:
        self._now = time.monotonic_ns()
        self._parser.feed_data(data)

    def on_body(self, body: bytes) -> None:
        if self._sink is None or self._parser.get_status_code() != 200:
            self._body.append(body)
            return
        lines = (self._rest + body).split(b"\n")
        self._rest = lines.pop()
        for line in lines:
            if line.startswith(b"data:"):
                self._sink(line[5:].strip(), self._now)
            elif line.startswith(b"id:"):
                self.last_event_id = line[3:].strip()
            elif self._body or line.startswith(b"{"):
                self._body.append(line)  # an error told as plain JSON instead of a stream

    def on_message_complete(self) -> None:
        body = b"".join(self._body) + (self._rest if self._sink else b"")
        if self._answer and not self._answer.done():
            self._answer.set_result(Response(self._parser.get_status_code(), body))
