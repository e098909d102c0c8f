"""Receive notifications of other processes, by one connection that is read in the event loop.

A notification only says that it is worth looking at the database, so a lost one costs nothing but
time: all listeners are also told to look at each connect, and every few seconds. A connection can
be deaf without an error, for example behind a pooler. Therefore a process listens for its own
beats, which it sends by another connection; while it does not hear them, it has the database
looked at often.

The connection holds a lock, which is free when it ends. By that other processes know at once that
this one was killed (``Lease`` in ``clock``).
"""

import asyncio
import secrets
from time import monotonic

import psycopg
import structlog

from opencode_a2a import metrics
from opencode_a2a.bounds import wait
from opencode_a2a.store.engine import Notifications
from opencode_a2a.store.postgres_connections import AsyncConnection
from opencode_a2a.store.replicas import LIFE_LOCK

logger = structlog.get_logger(__name__)

CHANNEL = "'opencode_a2a_' || md5(current_schema())"
"""The name of the channel, in SQL. It contains the schema, since channels belong to the whole
database, and each schema may be used by other services."""
LOOK_SECONDS = 5.0
"""How often listeners look at the database while notifications are heard."""
DEAF_BEATS = 2
"""How many beats may pass before a connection that has not heard an own one counts as deaf."""
RETRY_SECONDS = 1.0
# Shared with an earlier connection of this process of which the server thinks that it still lasts.
_LOCK = f"SELECT pg_advisory_lock_shared({LIFE_LOCK.format('%s')})".encode()


class Listener:
    def __init__(
        self,
        conninfo: str | None,
        poll_seconds: float,
        database: Notifications,
    ) -> None:
        """Without ``conninfo`` there is no connection to listen by, only looking."""
        self._conninfo = conninfo
        self._beat_seconds = database.lease.seconds / 4
        self._poll_seconds = poll_seconds
        self._database = database
        self._beat = f"b,{secrets.token_hex(8)}"
        self._hears = False
        """Whether an own beat has come back by the present connection."""
        self._changed = asyncio.Event()
        self._echo: asyncio.Timeout | None = None
        """Ends the connection if the beat that was sent does not come back in time."""

    async def run(self) -> None:
        """Dispatch notifications until this is cancelled."""
        metrics.LISTEN_UP.set(0)
        async with asyncio.TaskGroup() as group:
            group.create_task(self._look())
            if self._conninfo is not None:
                group.create_task(self._beats())
                group.create_task(self._listen(self._conninfo))

    async def _look(self) -> None:
        while True:
            self._changed.clear()
            # A single replica needs no notification. Without a connection it cannot hear that
            # another one has started.
            often = not self._hears and (self._database.census.has_others or self._conninfo is None)
            await wait(self._changed, self._poll_seconds if often else LOOK_SECONDS)
            self._database.dispatch("")

    async def _beats(self) -> None:
        while True:
            await asyncio.sleep(self._beat_seconds)
            self._send_beat()

    def _send_beat(self) -> None:
        if self._echo is None:
            return
        if not self._hears:  # another replica may have just started
            self._changed.set()
        # A replica that is alone sends it too: whether it would hear others is worth knowing
        # before they come.
        self._database.notify(self._beat, alone=True)
        if self._echo.when() is None:
            loop = asyncio.get_running_loop()
            self._echo.reschedule(loop.time() + DEAF_BEATS * self._beat_seconds)

    async def _listen(self, conninfo: str) -> None:
        complained = False
        while True:
            try:
                async with await AsyncConnection.connect(conninfo, autocommit=True) as connection:
                    await self._hear(connection)
            except (psycopg.Error, OSError, TimeoutError) as error:
                if self._hears or not complained:
                    complained = True
                    logger.warning(
                        "LISTEN is not working; falling back to polling",
                        cause=(str(error).splitlines() or ["its own notifications do not come"])[0],
                    )
            self._hears, self._echo = False, None
            self._database.lease.locked_since = None
            metrics.LISTEN_UP.set(0)
            self._changed.set()
            await asyncio.sleep(min(RETRY_SECONDS, self._beat_seconds))

    async def _hear(self, connection: AsyncConnection) -> None:
        """Dispatch the notifications of a connection until it breaks or proves to be deaf."""
        channel = await connection.execute(f"SELECT quote_ident({CHANNEL})")
        (name,) = await channel.fetchone() or ("",)
        await connection.execute(f"LISTEN {name}".encode())
        await connection.execute(_LOCK, (str(self._database.replica),))
        locked_since = monotonic()
        async with asyncio.timeout(None) as self._echo:
            self._database.dispatch("")
            self._send_beat()
            async for notification in connection.notifies():
                if notification.payload != self._beat:
                    if not notification.payload.startswith("b,"):
                        self._database.dispatch(notification.payload)
                    continue
                if self._echo.expired():
                    # Its time was over before it came, as after a pause of the whole process, and
                    # what ``wait_for`` of Python 3.11 has to give goes before a cancellation.
                    raise TimeoutError
                self._echo.reschedule(None)
                if not self._hears:
                    self._hears = True
                    self._database.lease.locked_since = locked_since
                    metrics.LISTEN_UP.set(1)
                    self._changed.set()
