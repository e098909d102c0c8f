"""A TCP forwarder that a test can interrupt; ``proxy`` and ``relay`` decide what passes."""

import asyncio
import random
from contextlib import suppress
from typing import NamedTuple, Self

RESENT_SECONDS = 0.2, 1.6
"""Seconds until TCP has sent a lost packet again: one to three timeouts."""


class Ends(NamedTuple):
    """The connections that bytes pass between: to the caller, and to the far server."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    far_reader: asyncio.StreamReader
    far_writer: asyncio.StreamWriter


class Forwarder:
    """Accepts connections on a port of 127.0.0.1 and connects each to the target."""

    def __init__(self, host: str, target: int, port: int = 0) -> None:
        self._far = host, target
        self.port = port
        """The port it listens on; chosen at the start if it is 0."""
        self.down = False
        """While set, new connections are closed at once, those that are being made included."""
        self.delay = 0.0
        """Seconds that each piece takes, one way."""
        self.loss = 0.0
        """The probability that a piece is lost at first. TCP sends it again, and everything behind
        it waits."""
        self.passing = asyncio.Event()
        """While it is cleared, connections are accepted, and nothing passes: the far host hangs."""
        self.passing.set()
        self._open: set[asyncio.StreamWriter] = set()
        self._passing: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._connected, "127.0.0.1", self.port)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        self.down = True
        self.passing.set()
        self.break_off()
        await asyncio.gather(*self._passing)

    def break_off(self) -> None:
        """Break every connection in the middle of whatever it carries."""
        for writer in self._open:
            writer.transport.abort()

    async def hinder(self) -> None:
        """Hold a piece back for as long as the network would."""
        lost = random.uniform(*RESENT_SECONDS) if random.random() < self.loss else 0.0  # noqa: S311 - a game
        if self.delay + lost:
            await asyncio.sleep(self.delay + lost)
        await self.passing.wait()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._passing.add(task)
        task.add_done_callback(self._passing.discard)
        try:
            far = None if self.down else await asyncio.open_connection(*self._far)
        except OSError:
            far = None
        if far is None or self.down:
            writer.transport.abort()
            if far is not None:
                far[1].transport.abort()
            return
        self._open |= (ends := {writer, far[1]})
        try:
            await self._forward(Ends(reader, writer, *far))
        finally:
            self._open -= ends
            for end in ends:
                end.transport.abort()
                with suppress(OSError):
                    await end.wait_closed()

    async def _forward(self, ends: Ends) -> None:
        """Pass bytes both ways until the connection is over."""
        raise NotImplementedError


class Line(Forwarder):
    """Passes everything, as well as it is let."""

    async def _forward(self, ends: Ends) -> None:
        async def one_way(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            with suppress(OSError):
                while data := await reader.read(65536):
                    await self.hinder()
                    writer.write(data)
                    await writer.drain()

        passing = [
            asyncio.create_task(one_way(ends.reader, ends.far_writer)),
            asyncio.create_task(one_way(ends.far_reader, ends.writer)),
        ]
        try:
            await asyncio.wait(passing, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for one in passing:
                one.cancel()
            await asyncio.gather(*passing, return_exceptions=True)
