"""A PostgreSQL that hangs: its kernel takes what is sent, and nothing answers."""

import asyncio
import os
import re
from collections.abc import Awaitable, Callable, Generator
from contextlib import contextmanager, suppress
from pathlib import Path
from signal import Signals

import psycopg
import pytest
import sqlalchemy as sa
from sqlalchemy.engine import Connection

from opencode_a2a import metrics
from opencode_a2a.errors import StoreUnavailableError
from opencode_a2a.store import callers, replicas
from opencode_a2a.store.callers import Spent
from opencode_a2a.store.database import Database
from opencode_a2a.store.engine import DatabaseError, Replica
from tests.support import stores
from tests.support.postgres import PostgresServer
from tests.support.relay import Relay

PATIENCE = 60.0
QUICK = "statement_timeout%3D500%20-c%20lock_timeout%3D500%20-c%20search_path"
"""So that a test does not have to wait for the usual limits."""


@pytest.fixture
def server() -> PostgresServer:
    return stores.server()


@pytest.fixture
def url(tmp_path: Path) -> Generator[str]:
    with stores.using("postgresql"):
        yield stores.url(tmp_path).replace("search_path", QUICK)


def backend(connection: Connection) -> int:
    """Return the number of the process that serves a connection."""
    return connection.execute(sa.select(sa.func.pg_backend_pid())).scalar_one()


@contextmanager
def frozen(*processes: int) -> Generator[None]:
    try:
        for process in processes:
            with suppress(ProcessLookupError):  # it has ended since it was listed
                os.kill(process, Signals.SIGSTOP)
        yield
    finally:
        for process in processes:
            with suppress(ProcessLookupError):
                os.kill(process, Signals.SIGCONT)


async def answered(ask: Callable[[], Awaitable[int]]) -> int:
    """Ask until the database answers."""
    async with asyncio.timeout(PATIENCE):
        while True:
            with suppress(StoreUnavailableError):
                return await ask()


async def test_a_session_that_hangs_is_replaced(url: str) -> None:
    async with Database(url) as database:
        writer = await database.write(backend)
        with frozen(writer):
            assert await answered(lambda: database.write(backend)) != writer


async def test_sessions_for_reading_that_hang_are_all_replaced_at_once(url: str) -> None:
    async with Database(url) as database:

        async def busy() -> set[int]:
            """Read with all connections of the pool at the same time."""
            return {*await asyncio.gather(*(database.read(slow) for _ in range(4)))}

        def slow(connection: Connection) -> int:
            connection.execute(sa.select(sa.func.pg_sleep(0.1)))
            return backend(connection)

        pool = await busy()
        assert len(pool) == 4
        with frozen(*pool):
            assert await answered(lambda: database.read(backend)) not in pool
            assert not await busy() & pool


def both(url: str, first: Relay, server: PostgresServer) -> str:
    """Return a URL that names a relay first, and then the server itself.

    So do addresses of a primary and its standby, which the standby answers once it is promoted.
    """
    return re.sub(r"(127\.0\.0\.1):\d+/", rf"\1:{first.port},\1:{server.port}/", url)


async def test_a_commit_that_is_not_answered_counts_once(url: str, server: PostgresServer) -> None:
    def hang_after_commit(data: bytes) -> None:
        if armed and b"COMMIT" in data:
            relay.passing.clear()

    def spend(connection: Connection) -> None:
        callers.add_spending(connection, {("alice", 1): Spent(1.0, 10)})

    armed = False
    async with (
        Relay(server.port, forth=hang_after_commit) as relay,
        Database(both(url, relay, server)) as database,
    ):
        armed = True
        await database.write_until_stored(spend)
        assert not relay.passing.is_set()
        armed = False
        relay.passing.set()
        spent = await database.read(callers.spending_of, "alice", 1)

    assert spent == Spent(1.0, 10)


async def test_a_server_that_hangs_is_left_for_one_that_answers(
    url: str, server: PostgresServer
) -> None:
    async with Relay(server.port) as relay, Database(both(url, relay, server)) as database:
        listening = asyncio.create_task(database.listen())
        await heard(listening)
        first = await database.write(backend)
        relay.passing.clear()
        metrics.LISTEN_UP.set(-1)  # the listener sets it when it has another connection

        second = await answered(lambda: database.write(backend))
        await answered(lambda: database.read(backend))
        await heard(listening)
        listening.cancel()

    assert first != second


async def heard(listening: "asyncio.Task[None]") -> None:
    """Wait until the process hears its own notifications."""
    async with asyncio.timeout(PATIENCE):
        while metrics.LISTEN_UP._value.get() != 1:  # noqa: SLF001 - no other way  # pyright: ignore[reportPrivateUsage]
            assert not listening.done()
            await asyncio.sleep(0.01)


async def test_a_start_before_a_server_that_hangs_ends_with_one_line(
    url: str, server: PostgresServer
) -> None:
    async with Relay(server.port) as relay:
        relay.passing.clear()
        with pytest.raises(DatabaseError) as caught:
            async with asyncio.timeout(PATIENCE), Database(relay.url(url)):
                pass

    assert "timeout expired; check that it runs" in str(caught.value)


async def test_a_server_that_is_frozen_as_a_whole_is_used_again_when_it_wakes(
    tmp_path: Path,
) -> None:
    with PostgresServer() as own:
        url = own.url("frozen").replace("search_path", QUICK)
        async with Database(url) as database:
            before = await database.write(backend)
            with own.admin() as admin:
                found = admin.execute("SELECT pid FROM pg_stat_activity").fetchall()
            with frozen(own.pid, *(pid for (pid,) in found)):
                with pytest.raises(StoreUnavailableError):
                    await database.write(backend)
                with pytest.raises(StoreUnavailableError):
                    await database.read(backend)
            after = await answered(lambda: database.write(backend))

    assert after != before


async def test_a_replica_whose_transaction_hangs_does_not_hold_up_others(
    url: str, server: PostgresServer
) -> None:
    """It is not declared gone before its transaction is over; nobody waits for that."""
    async with (
        Database(url, Replica("one", 0.1)) as one,
        Database(url, Replica("two", 0.1)) as two,
    ):
        assert one.replica is not None
        with psycopg.connect(url) as hung:
            hung.execute("UPDATE replicas SET commits = commits WHERE no = %s", (one.replica,))
            held = await two.write(replicas.declare_gone, {one.replica: 0})
            hung.rollback()
        gone = await two.write(replicas.declare_gone, {one.replica: 0})

    assert (held, gone) == ([], [one.replica])
