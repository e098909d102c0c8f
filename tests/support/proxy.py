"""A wire that can be cut: a TCP proxy between the service and OpenCode."""

import asyncio
from collections.abc import Callable
from types import TracebackType
from typing import Self
from urllib.parse import urlsplit


class Proxy:
    """Passes bytes on both ways until it is told to cut all connections."""

    def __init__(self, target: str, port: int = 0) -> None:
        self._port = port
        parts = urlsplit(target)
        self._target = parts.hostname or "127.0.0.1", parts.port or 80
        self._server: asyncio.Server | None = None
        self._open: set[asyncio.StreamWriter] = set()
        self._passing: set[asyncio.Task[None]] = set()
        self.down = False
        """While it is set, new connections are closed at once."""
        self.losing: dict[bytes, int] = {}
        """How many more answers are lost, to requests that begin so."""

    @property
    def url(self) -> str:
        assert self._server is not None
        return f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    def cut(self) -> None:
        """Break every connection in the middle of whatever it carries."""
        for writer in self._open:
            writer.transport.abort()

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._connected, "127.0.0.1", self._port)
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        assert self._server is not None
        self._server.close()
        self.cut()
        await asyncio.gather(*self._passing)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self.down:
            writer.transport.abort()
            return
        task = asyncio.current_task()
        assert task is not None
        self._passing.add(task)
        task.add_done_callback(self._passing.discard)
        far_reader, far_writer = await asyncio.open_connection(*self._target)
        ends = {writer, far_writer}
        self._open |= ends
        try:
            lost = asyncio.Event()
            await asyncio.gather(
                _pass(reader, far_writer, lambda data: self._asked(data, lost)),
                _pass(far_reader, writer, lambda _: not lost.is_set()),
            )
        finally:
            self._open -= ends
            for end in ends:
                end.transport.abort()

    def _asked(self, data: bytes, lost: asyncio.Event) -> bool:
        """Notice a request whose answer is to be lost; it is passed on all the same."""
        for request, left in self.losing.items():
            if left and data.startswith(request):
                self.losing[request] -= 1
                lost.set()
        return True


async def _pass(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, passes: Callable[[bytes], bool]
) -> None:
    try:
        while (data := await reader.read(65536)) and passes(data):
            writer.write(data)
            await writer.drain()
    except OSError:
        pass
    finally:
        writer.close()
