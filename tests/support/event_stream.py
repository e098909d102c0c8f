"""What OpenCode's event stream has told, for tests that wait for a part of it."""

import asyncio
import re
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

from opencode_a2a.opencode.driver import Driver


class ReceivedEvents:
    """The bytes of the stream so far."""

    def __init__(self) -> None:
        self._received = b""
        self._more = asyncio.Event()

    def take(self, chunk: bytes) -> None:
        self._received += chunk
        self._more.set()

    async def until(self, part: bytes) -> None:
        await self._until(re.escape(part))

    async def until_idle(self, session_id: str) -> None:
        """Wait until a session has ended its turn, which each generation tells in its own way."""
        names = rb'"session\.(idle|execution\.succeeded)"[^\n]*'
        await self._until(names + b'"sessionID":"%b"' % session_id.encode())

    async def _until(self, pattern: bytes) -> None:
        async with asyncio.timeout(60):
            while not re.search(pattern, self._received):
                self._more.clear()
                await self._more.wait()


@asynccontextmanager
async def listening(opencode: Driver) -> AsyncGenerator[ReceivedEvents]:
    """Hear everything that happens from here on."""
    received = ReceivedEvents()
    stream = asyncio.create_task(opencode.events(received.take))
    try:
        await received.until(b"server.connected")
        yield received
    finally:
        stream.cancel()
        await asyncio.wait([stream])
