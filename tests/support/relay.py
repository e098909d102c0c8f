"""A wire between the service and PostgreSQL that is cut at COMMIT, or carries something else."""

import asyncio
from collections.abc import Callable
from contextlib import suppress
from enum import Enum
from typing import Self


class Cut(Enum):
    """When the connection of a COMMIT is cut."""

    BEFORE = "before"
    """The database does not get it."""
    AFTER = "after"
    """The database has answered it, and the service does not hear of it."""
    LATE = "late"
    """The database gets it when the service has been cut off for a while."""


LATE_SECONDS = 1.5


class Relay:
    """Passes bytes on both ways; ``cut`` breaks the connection of the next COMMIT."""

    def __init__(
        self,
        target: int,
        back: Callable[[bytes], bytes] = lambda data: data,
        forth: Callable[[bytes], None] = lambda data: None,
    ) -> None:
        """``back`` changes what the database says, ``forth`` looks at what it is told."""
        self._target = target
        self._back = back
        self._forth = forth
        self._passing: set[asyncio.Task[None]] = set()
        self._open: set[asyncio.StreamWriter] = set()
        self.cut: Cut | None = None
        self.cuts = 0
        self.down = False
        """While it is set, new connections are closed at once."""
        self.on_cut: Callable[[], None] | None = None
        """Is called once the database has answered a COMMIT whose answer is cut off."""
        self.port = 0

    def url(self, url: str) -> str:
        """Return the URL of a database on the server, by way of here."""
        return url.replace(f":{self._target}/", f":{self.port}/")

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._connected, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        self.break_off()
        await asyncio.gather(*self._passing)

    def break_off(self) -> None:
        """Break every connection in the middle of whatever it carries."""
        for writer in self._open:
            writer.transport.abort()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._passing.add(task)
        task.add_done_callback(self._passing.discard)
        if self.down:
            writer.transport.abort()
            return
        try:
            far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self._target)
        except OSError:
            writer.transport.abort()
            return
        self._open |= (ends := {writer, far_writer})
        muted, answered = asyncio.Event(), asyncio.Event()

        async def there() -> None:
            while data := await reader.read(65536):
                self._forth(data)
                if self.cut is None or b"COMMIT" not in data:
                    far_writer.write(data)
                    continue
                how, self.cut = self.cut, None
                self.cuts += 1
                if how is Cut.AFTER:
                    muted.set()
                    far_writer.write(data)
                    continue
                writer.transport.abort()
                muted.set()
                if how is Cut.LATE:
                    await asyncio.sleep(LATE_SECONDS)
                    far_writer.write(data)
                    await answered.wait()
                return

        async def back() -> None:
            while data := await far_reader.read(65536):
                if muted.is_set():
                    if self.on_cut is not None:
                        self.on_cut()
                    answered.set()
                    return
                if writer.transport.is_closing():
                    return
                writer.write(self._back(data))

        passing = [asyncio.create_task(there()), asyncio.create_task(back())]
        try:
            with suppress(OSError):
                await asyncio.wait(passing, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for one in passing:
                one.cancel()
            await asyncio.gather(*passing, return_exceptions=True)
            self._open -= ends
            for end in ends:
                end.transport.abort()
                with suppress(OSError):
                    await end.wait_closed()
