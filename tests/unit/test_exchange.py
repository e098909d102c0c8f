"""Connections to OpenCode: every one that was opened is closed, whatever happens meanwhile."""

import asyncio
from collections.abc import AsyncGenerator

import pytest

from opencode_a2a.opencode.exchange import Exchange, HttpConnection

ANSWER = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"


class Server:
    """Answers every request when it is told to."""

    def __init__(self) -> None:
        self.url = ""
        self.asked = asyncio.Event()
        self.answer = asyncio.Event()
        self.left = asyncio.Event()
        """The other side has closed the connection."""

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await reader.readuntil(b"\r\n\r\n")
            self.asked.set()
            await self.answer.wait()
            writer.write(ANSWER)
            await reader.read()
        except OSError:
            pass  # closed without a good-bye
        finally:
            self.left.set()
            writer.close()


@pytest.fixture
async def server() -> AsyncGenerator[Server]:
    server = Server()
    async with await asyncio.start_server(server.serve, "127.0.0.1") as listening:
        host, port = listening.sockets[0].getsockname()
        server.url = f"http://{host}:{port}"
        yield server


async def test_a_call_that_ends_after_the_close_keeps_no_connection(server: Server) -> None:
    exchange = Exchange(server.url, {}, 1000)
    calling = asyncio.create_task(exchange.send("GET", "/", None, {}))
    async with asyncio.timeout(60):
        await server.asked.wait()
        exchange.close()
        server.answer.set()
        reply = await calling
        await server.left.wait()

    assert reply.body == b"ok"


async def test_a_call_that_is_canceled_when_its_answer_ends_keeps_no_connection(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    exchange = Exchange(server.url, {}, 1000)
    calling = asyncio.create_task(exchange.send("GET", "/", None, {}))
    complete = HttpConnection.on_message_complete

    def complete_and_cancel(connection: HttpConnection) -> None:
        complete(connection)
        calling.cancel()

    monkeypatch.setattr(HttpConnection, "on_message_complete", complete_and_cancel)
    async with asyncio.timeout(60):
        await server.asked.wait()
        server.answer.set()
        await asyncio.wait([calling])
        await server.left.wait()

    assert calling.cancelled()
