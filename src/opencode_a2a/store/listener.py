"""Hearing what other processes tell: one connection that listens, read in the event loop.

A notification only says that it is worth looking, so one that is lost costs time and nothing else:
every listener is called to look at each connect as well, and from time to time. A
connection can be deaf without an error, behind a pooler for example. Therefore a process listens
for its own beats, which it sends by another connection; while it does not hear them, it looks
often.
"""

import asyncio
import secrets
from typing import Protocol

import psycopg
import structlog

from opencode_a2a import metrics

logger = structlog.get_logger(__name__)

CHANNEL = "'opencode_a2a_' || md5(current_schema())"
"""In SQL. Channels belong to the whole database, and each schema may have services of its own."""
LOOK_SECONDS = 5.0
"""How often the database is looked at while notifications are heard."""
DEAF_BEATS = 2
RETRY_SECONDS = 1.0


class Notifications(Protocol):
    """What the listener needs of the database."""

    has_other_replicas: bool

    def notify(self, text: str, /) -> None: ...

    def dispatch(self, text: str, /) -> None: ...


class Listener:
    def __init__(
        self,
        conninfo: str | None,
        beat_seconds: float,
        poll_seconds: float,
        database: Notifications,
    ) -> None:
        """Without ``conninfo`` nothing can be heard."""
        self._conninfo = conninfo
        self._beat_seconds = beat_seconds
        self._poll_seconds = poll_seconds
        self._database = database
        self._beat = f"b,{secrets.token_hex(8)}"
        self._hears = False
        """Whether an own beat has come back by the connection that there is now."""
        self._changed = asyncio.Event()
        self._echo: asyncio.Timeout | None = None
        """Ends the connection if the beat that is under way does not come back."""

    async def run(self) -> None:
        """Pass on what is heard until this is cancelled."""
        metrics.LISTEN_UP.set(0)
        async with asyncio.TaskGroup() as group:
            group.create_task(self._look())
            if self._conninfo is not None:
                group.create_task(self._beats())
                group.create_task(self._listen(self._conninfo))

    async def _look(self) -> None:
        while True:
            self._changed.clear()
            # A replica alone hears nobody; without a connection nothing tells when that ends.
            often = not self._hears and (
                self._database.has_other_replicas or self._conninfo is None
            )
            try:
                async with asyncio.timeout(self._poll_seconds if often else LOOK_SECONDS):
                    await self._changed.wait()
            except TimeoutError:
                pass
            self._database.dispatch("")

    async def _beats(self) -> None:
        while True:
            await asyncio.sleep(self._beat_seconds)
            self._send_beat()

    def _send_beat(self) -> None:
        if not self._database.has_other_replicas or self._echo is None:
            return
        if not self._hears:  # others may only just have come
            self._changed.set()
        self._database.notify(self._beat)
        if self._echo.when() is None:
            loop = asyncio.get_running_loop()
            self._echo.reschedule(loop.time() + DEAF_BEATS * self._beat_seconds)

    async def _listen(self, conninfo: str) -> None:
        complained = False
        while True:
            try:
                async with await psycopg.AsyncConnection.connect(
                    conninfo, autocommit=True
                ) as connection:
                    await self._hear(connection)
            except (psycopg.Error, OSError, TimeoutError) as error:
                if self._hears or not complained:
                    complained = True
                    logger.warning(
                        "other processes are not heard; looking often instead",
                        cause=(str(error).splitlines() or ["its own notifications do not come"])[0],
                    )
            self._hears, self._echo = False, None
            metrics.LISTEN_UP.set(0)
            self._changed.set()
            await asyncio.sleep(min(RETRY_SECONDS, self._beat_seconds))

    async def _hear(self, connection: psycopg.AsyncConnection) -> None:
        """Pass on what the connection says, until it breaks or proves to be deaf."""
        channel = await connection.execute(f"SELECT quote_ident({CHANNEL})")
        (name,) = await channel.fetchone() or ("",)
        await connection.execute(f"LISTEN {name}".encode())
        async with asyncio.timeout(None) as self._echo:
            self._database.dispatch("")
            self._send_beat()
            async for notification in connection.notifies():
                if notification.payload != self._beat:
                    if not notification.payload.startswith("b,"):
                        self._database.dispatch(notification.payload)
                    continue
                self._echo.reschedule(None)
                if not self._hears:
                    self._hears = True
                    metrics.LISTEN_UP.set(1)
                    self._changed.set()
