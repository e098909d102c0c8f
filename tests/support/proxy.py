"""A wire that can be cut, or held at an exact moment: a TCP proxy between service and OpenCode."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from types import TracebackType
from typing import Self
from urllib.parse import urlsplit


class Moment(Enum):
    """When a request that is looked for is held."""

    SENT = "sent"
    """The service has sent it, OpenCode has not got it."""
    TAKEN = "taken"
    """OpenCode has answered it, and the service hears of nothing any more."""
    TOLD = "told"
    """OpenCode has answered it, and of all that the service hears only the answer is missing."""


@dataclass
class Hold:
    """A place on the wire where a request stops; ``reached`` once it is there."""

    request: bytes
    moment: Moment
    reached: asyncio.Event = field(default_factory=asyncio.Event)


class Proxy:
    """Passes bytes on both ways until it is told to cut all connections."""

    def __init__(self, target: str, port: int = 0) -> None:
        self._port = port
        parts = urlsplit(target)
        self._target = parts.hostname or "127.0.0.1", parts.port or 80
        self._server: asyncio.Server | None = None
        self._open: set[asyncio.StreamWriter] = set()
        self._passing: set[asyncio.Task[None]] = set()
        self._hold: Hold | None = None
        self._mute = False
        """While it is set, the service gets nothing."""
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

    def hold(self, request: bytes, moment: Moment) -> Hold:
        """Hold the next request that has these bytes; its connection is of no use afterwards."""
        self._hold = Hold(request, moment)
        return self._hold

    def release(self) -> None:
        """Let everything pass again."""
        self._hold, self._mute = None, False

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
        try:
            far_reader, far_writer = await asyncio.open_connection(*self._target)
        except OSError:
            writer.transport.abort()
            return
        ends = {writer, far_writer}
        self._open |= ends
        held: list[Hold] = []
        """The hold that a request of this connection has run into."""
        try:
            lost = asyncio.Event()
            await asyncio.gather(
                _pass(reader, far_writer, lambda data: self._asked(data, lost, held)),
                _pass(far_reader, writer, lambda data: self._answered(data, lost, held)),
            )
        finally:
            self._open -= ends
            for end in ends:
                end.transport.abort()

    def _asked(self, data: bytes, lost: asyncio.Event, held: list[Hold]) -> bytes:
        """Notice a request whose answer is to be lost, or that is to be held."""
        for request, left in self.losing.items():
            if left and data.startswith(request):
                self.losing[request] -= 1
                lost.set()
        hold = self._hold
        if hold is not None and hold.request in data:
            self._hold = None
            held.append(hold)
            self._mute = hold.moment is Moment.TAKEN
        if held and held[0].moment is Moment.SENT:
            held[0].reached.set()
            return b""
        return data

    def _answered(self, data: bytes, lost: asyncio.Event, held: list[Hold]) -> bytes | None:
        if lost.is_set():
            return None
        if held:
            held[0].reached.set()
        return b"" if held or self._mute else data


async def _pass(
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
    change: Callable[[bytes], bytes | None],
) -> None:
    """Pass on what ``change`` makes of each piece, until it says None."""
    try:
        while (data := await reader.read(65536)) and (data := change(data)) is not None:
            writer.write(data)
            await writer.drain()
    except OSError:
        pass
    finally:
        writer.close()
