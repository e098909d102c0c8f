"""Connections to OpenCode: every one that was opened is closed, whatever happens meanwhile."""

import asyncio
from collections.abc import AsyncGenerator

import pytest

from opencode_a2a.net.exchange import Exchange, HttpConnection

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
        except (OSError, asyncio.IncompleteReadError):
            pass  # closed without a good-bye, or a request
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


@pytest.mark.parametrize("canceled", [False, True])
async def test_a_request_that_is_not_written_keeps_no_connection(
    canceled: bool, server: Server
) -> None:
    waiting = asyncio.Event()

    async def refuse() -> None:
        waiting.set()
        if canceled:
            await asyncio.Future()
        raise LookupError

    exchange = Exchange(server.url, {}, 1000)
    calling = asyncio.create_task(exchange.send("POST", "/", b"", {}, refuse))
    async with asyncio.timeout(60):
        await waiting.wait()
        if canceled:
            calling.cancel()
        (outcome,) = await asyncio.gather(calling, return_exceptions=True)
        await server.left.wait()

    assert type(outcome) is (asyncio.CancelledError if canceled else LookupError)
    assert not server.asked.is_set()


async def test_a_request_that_waited_until_its_connection_was_closed_gets_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    connections, lost = list[asyncio.StreamWriter](), asyncio.Event()
    lose = HttpConnection.connection_lost

    def lose_and_tell(connection: HttpConnection, exc: Exception | None) -> None:
        lose(connection, exc)
        lost.set()

    async def close_the_first(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connections.append(writer)
        if len(connections) > 1:
            await reader.readuntil(b"\r\n\r\n")
            writer.write(ANSWER)
        writer.close()

    async def wait() -> None:
        await lost.wait()

    monkeypatch.setattr(HttpConnection, "connection_lost", lose_and_tell)
    async with (
        asyncio.timeout(60),
        await asyncio.start_server(close_the_first, "127.0.0.1") as listening,
    ):
        host, port = listening.sockets[0].getsockname()
        reply = await Exchange(f"http://{host}:{port}", {}, 1000).send("POST", "/", b"", {}, wait)

    assert reply.body == b"ok"
    assert len(connections) == 2
