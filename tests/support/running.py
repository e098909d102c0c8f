"""An ASGI app on a socket, for as long as a test needs it."""

import asyncio
import socket
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

from starlette.types import ASGIApp, Send

from opencode_a2a.server.sse import Streams
from opencode_a2a.web.socket import Server, server
from opencode_a2a.web.tls import ServerTls


async def answer(
    send: Send,
    status: int,
    body: bytes,
    media_type: bytes,
    more: tuple[tuple[bytes, bytes], ...] = (),
) -> None:
    """Send a whole response."""
    headers = [(b"content-type", media_type), (b"content-length", b"%d" % len(body)), *more]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


@asynccontextmanager
async def running(
    app: ASGIApp,
    port: int = 0,
    *,
    streams: Streams | None = None,
    grace: float = 5.0,
    tls: ServerTls | None = None,
) -> AsyncGenerator[str]:
    """Serve the app, and yield its URL; stop it as SIGTERM would.

    Pass the streams of the app, so that they end with the server.
    """
    serving = server(app, "127.0.0.1", port, grace=grace, tls=tls)
    async with accepting(serving, port, tls=tls) as url:
        try:
            yield url
        finally:
            if streams is not None:
                streams.drain()
            serving.should_exit = True
            await serving.shutdown()


@asynccontextmanager
async def accepting(
    serving: Server, port: int = 0, *, tls: ServerTls | None = None
) -> AsyncGenerator[str]:
    """Have a server accept connections, and yield its URL; whoever has made it shuts it down.

    The signal handlers of the test run stay.
    """
    listener = socket.create_server(("127.0.0.1", port))
    port = listener.getsockname()[1]
    async with asyncio.TaskGroup() as group:
        group.create_task(_accept(serving, listener))
        async with asyncio.timeout(60):
            await serving.listening.wait()
        try:
            yield f"{'https' if tls else 'http'}://127.0.0.1:{port}"
        finally:
            serving.should_exit = True


async def _accept(serving: Server, listener: socket.socket) -> None:
    try:
        await serving.accept([listener])
    except SystemExit:
        raise RuntimeError("the app did not start; its log says why") from None


class RawClient:
    """A connection that sends exactly the given bytes."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    async def send(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    async def answer(self) -> tuple[int, dict[str, str], bytes]:
        """Read one response: status, headers and, when its length is known, the body."""
        head = (await self.reader.readuntil(b"\r\n\r\n")).decode("latin-1")
        first, *lines = head.removesuffix("\r\n\r\n").split("\r\n")
        pairs = (line.partition(": ") for line in lines)
        headers = {name.lower(): value for name, _, value in pairs}
        body = await self.reader.readexactly(int(headers.get("content-length", "0")))
        return int(first.split(" ")[1]), headers, body


@asynccontextmanager
async def raw(url: str) -> AsyncGenerator[RawClient]:
    """Open a bare connection to a server."""
    host, _, port = url.removeprefix("http://").partition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        yield RawClient(reader, writer)
    finally:
        writer.transport.abort()
