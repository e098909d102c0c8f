"""A TCP relay between the service and PostgreSQL that breaks at COMMIT, or changes answers."""

import asyncio
from collections.abc import Callable
from contextlib import suppress
from enum import Enum

from tests.support.forward import Ends, Forwarder


class Cut(Enum):
    """When the connection of a COMMIT is cut."""

    BEFORE = "before"
    """The database does not get it."""
    AFTER = "after"
    """The database has answered it, and the service does not hear of it."""
    LATE = "late"
    """The database gets it when the service has been cut off for a while."""


LATE_SECONDS = 1.5


class Relay(Forwarder):
    """Passes bytes both ways; ``cut`` breaks the connection of the next COMMIT."""

    def __init__(
        self,
        target: int,
        back: Callable[[bytes], bytes] = lambda data: data,
        forth: Callable[[bytes], None] = lambda data: None,
    ) -> None:
        """``back`` changes what the database sends, ``forth`` sees what it receives."""
        super().__init__("127.0.0.1", target)
        self._target = target
        self._back = back
        self._forth = forth
        self.cut: Cut | None = None
        self.cuts = 0
        self.on_cut: Callable[[], None] | None = None
        """Called once the database has answered a COMMIT whose answer is cut off."""

    def lead_to(self, target: int) -> None:
        """Connect to another server from now on, as after a failover, and break what is open."""
        self._far = "127.0.0.1", target
        self.break_off()

    def url(self, url: str) -> str:
        """Return the URL of a database on the server, through this relay."""
        return url.replace(f":{self._target}/", f":{self.port}/")

    async def _forward(self, ends: Ends) -> None:
        reader, writer, far_reader, far_writer = ends
        muted, answered = asyncio.Event(), asyncio.Event()

        async def there() -> None:
            while data := await reader.read(65536):
                await self.hinder()
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
                await self.hinder()
                if muted.is_set():
                    if self.on_cut is not None:
                        self.on_cut()
                    answered.set()
                    return
                await self.passing.wait()
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
