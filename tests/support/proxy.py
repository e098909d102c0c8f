"""A TCP proxy between the service and OpenCode that can break, or hold a request at a moment."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from urllib.parse import urlsplit

from tests.support.forward import Ends, Forwarder


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


class Proxy(Forwarder):
    """Passes bytes both ways; can hold requests, lose answers, or break all connections."""

    def __init__(self, target: str, port: int = 0) -> None:
        parts = urlsplit(target)
        super().__init__(parts.hostname or "127.0.0.1", parts.port or 80, port)
        self._hold: Hold | None = None
        self._mute = False
        """While set, the service gets nothing."""
        self.losing: dict[bytes, int] = {}
        """How many more answers are lost, by the beginning of their requests."""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def hold(self, request: bytes, moment: Moment) -> Hold:
        """Hold the next request that has these bytes; its connection is of no use afterwards."""
        self._hold = Hold(request, moment)
        return self._hold

    def release(self) -> None:
        """Let everything pass again."""
        self._hold, self._mute = None, False

    async def _forward(self, ends: Ends) -> None:
        held: list[Hold] = []
        """The hold that a request of this connection has reached."""
        lost = asyncio.Event()
        await asyncio.gather(
            _pass(ends.reader, ends.far_writer, lambda data: self._asked(data, lost, held)),
            _pass(ends.far_reader, ends.writer, lambda data: self._answered(data, lost, held)),
        )

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
