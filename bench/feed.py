"""One subscription to the upstream for all turns, and the two calls that start a turn.

The relay and the SDK server read OpenCode through this: the least that any adapter must do. It
finds the session in the raw bytes and decodes nothing else.
"""

import asyncio
import json
from collections.abc import Callable

from bench.wire import Connection

Reader = Callable[[bytes], None]
"""Takes the JSON text of a delta, still escaped; ``END`` when the turn is over."""
END = b""


class Feed:
    def __init__(self, port: int) -> None:
        self.port = port
        self.readers: dict[bytes, Reader] = {}
        self._idle: list[Connection] = []
        self._task: asyncio.Task[object] | None = None

    async def start(self) -> None:
        stream = await Connection.open(self.port)
        self._task = asyncio.create_task(stream.request("GET", "/event", sink=self._event))

    async def stop(self) -> None:
        if self._task:
            self._task.cancel()

    def _event(self, data: bytes, now: int) -> None:
        at = data.find(b'"sessionID":"') + 13
        reader = self.readers.get(data[at : data.find(b'"', at)])
        if reader is None:
            return
        if b'"type":"message.part.delta"' in data:
            reader(data[data.find(b'"delta":"') + 9 : -3])
        elif b'"type":"session.idle"' in data:
            reader(END)

    async def call(self, path: str, body: bytes) -> bytes:
        connection = self._idle.pop() if self._idle else await Connection.open(self.port)
        answer = await connection.request("POST", path, body)
        self._idle.append(connection)
        return answer.body

    async def run(self, prompt: str, reader: Reader) -> bytes:
        """Start a turn whose deltas go to the reader; return its session."""
        session = json.loads(await self.call("/session", b'{"title":"bench"}'))["id"]
        self.readers[session.encode()] = reader
        parts = json.dumps({"parts": [{"type": "text", "text": prompt}]}).encode()
        await self.call(f"/session/{session}/prompt_async", parts)
        return session.encode()
