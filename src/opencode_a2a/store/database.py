"""The database: one writer thread, a few readers, SQLite by default.

Everything above asks with plain functions of a connection: ``await db.write(fn)`` and
``await db.read(fn)``. Writes that wait at the same time share one transaction. The driver is
used from our own threads, synchronously: the asynchronous drivers cost several times as much
per statement. Nothing above this module sees a driver's error.
"""

import asyncio
import fcntl
import os
import queue
import sqlite3
import stat
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self, TypeVar

import sqlalchemy as sa
import structlog
from sqlalchemy import event
from sqlalchemy.engine import Connection, make_url
from sqlalchemy.exc import DBAPIError, SQLAlchemyError
from sqlalchemy.pool import NullPool, QueuePool

from opencode_a2a.errors import StoreUnavailableError
from opencode_a2a.store.earlier import Form, form_of
from opencode_a2a.store.schema import SchemaTooNewError, metadata, migrate

logger = structlog.get_logger(__name__)

READERS = 3
RETRY_SECONDS = (0.1, 0.5, 1.0, 2.0)
BUSY_SECONDS = 1.5
"""How long a statement waits for a lock that another process holds. A write may have to wait for
the one before it as well; whoever sent it has an answer within 5 s all the same. A reader does
not wait: the write-ahead log has its own copy for it."""
T = TypeVar("T")


class Prepared:
    """A statement that runs often: compiled once for a driver, and run by the driver itself.

    SQLAlchemy's own execution costs eight times what SQLite needs for a small statement (730
    against 90 µs for the five statements of an admission).
    """

    def __init__(self, sql: str) -> None:
        self._text = sa.text(sql)
        self._compiled: dict[str, tuple[str, Sequence[str] | None]] = {}
        """By driver: its spelling, and the names of the values where it takes them by place."""

    def run(self, connection: Connection, values: Mapping[str, object]) -> Any:
        """Run it in the transaction of the connection; return the driver's cursor."""
        sql, order = self._compile(connection)
        cursor = connection.connection.cursor()
        cursor.execute(sql, values if order is None else [values[name] for name in order])
        return cursor

    def run_many(self, connection: Connection, rows: Sequence[Mapping[str, object]]) -> None:
        if rows:
            sql, order = self._compile(connection)
            cursor = connection.connection.cursor()
            cursor.executemany(
                sql, rows if order is None else [[row[name] for name in order] for row in rows]
            )

    def _compile(self, connection: Connection) -> tuple[str, Sequence[str] | None]:
        dialect = connection.dialect
        found = self._compiled.get(dialect.driver)
        if found is None:
            made = self._text.compile(dialect=dialect)
            order = made.positiontup if made.positional else None
            found = self._compiled[dialect.driver] = (made.string, order)
        return found


class MovedError(SQLAlchemyError):
    """The file is no longer where it was; what is written to it now would not be found again."""

    def __init__(self) -> None:
        super().__init__("the file was moved or replaced; put it back, or restart the service")


class DatabaseError(Exception):
    """The database cannot be opened; the text says why and what to do."""


class EarlierDatabaseError(DatabaseError):
    """The file was written by the earlier adapter, and stays as it is; it can be imported."""

    def __init__(self, file: Path) -> None:
        super().__init__(f"the database {file} was written by {Form.EARLIER.value}")
        self.file = file


@dataclass(slots=True)
class _Call:
    """A function that the writer thread is to run, and who waits for its result."""

    fn: Callable[[Connection], Any]
    done: asyncio.Future[Any]


_Result = tuple[_Call, Any, Exception | None]


class Database:
    """An open database, from ``async with`` to its end."""

    def __init__(self, url: str) -> None:
        parsed = make_url(url)
        # Names of asynchronous drivers are understood; the driver is the synchronous one.
        sqlite = parsed.drivername.startswith("sqlite")
        self._url = parsed.set(drivername="sqlite") if sqlite else parsed
        self._memory = self._url.database in (None, "", ":memory:")
        self._calls: queue.SimpleQueue[_Call | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="store-writer", daemon=True)
        self._readers = ThreadPoolExecutor(READERS, thread_name_prefix="store-reader")
        self._lock: int | None = None
        self._file: os.stat_result | None = None

    async def __aenter__(self) -> Self:
        self._loop = asyncio.get_running_loop()
        if not self._memory:
            self._path = Path(self._url.database or "")
            self._lock = _claim(self._path)
            self._file = self._path.stat()
        self._engine = sa.create_engine(self._url, poolclass=NullPool)
        self._failures = (SQLAlchemyError, self._engine.dialect.loaded_dbapi.Error)
        self._read_engine = sa.create_engine(
            self._url, poolclass=QueuePool, pool_size=READERS, max_overflow=0
        )
        for engine in (self._engine, self._read_engine):
            event.listen(engine, "connect", _prepare)
        self._thread.start()
        try:
            await self.post(migrate)
        except SchemaTooNewError as error:
            await self.__aexit__()
            raise DatabaseError(str(error)) from None
        except SQLAlchemyError as error:
            await self.__aexit__()
            raise DatabaseError(f"cannot open {self.name}: {_cause(error)}") from None
        return self

    async def __aexit__(self, *_: object) -> None:
        self._calls.put(None)
        await asyncio.to_thread(self._thread.join)
        self._readers.shutdown()
        self._read_engine.dispose()
        if self._lock is not None:
            os.close(self._lock)

    @property
    def name(self) -> str:
        """The database for people: no password in it."""
        return "memory" if self._memory else self._url.render_as_string(hide_password=True)

    @property
    def file(self) -> Path:
        """The file of a database that is not in memory."""
        return self._path

    async def write(self, fn: Callable[[Connection], T], operation: str = "persisting") -> T:
        """Run ``fn`` in a transaction and return once it is committed.

        ``fn`` may be run a second time when another write of the same transaction fails, so it
        must do nothing but talk to the database.
        """
        try:
            return await self.post(fn)
        except self._failures as error:
            raise _unavailable(operation, error) from None

    async def insist(self, fn: Callable[[Connection], T]) -> T:
        """Write, however long the database takes: what has happened must not be lost."""
        attempt = 0
        while True:
            try:
                return await self.write(fn)
            except StoreUnavailableError:
                wait = RETRY_SECONDS[min(attempt, len(RETRY_SECONDS) - 1)]
                logger.warning("not stored, trying again", wait=wait)
                attempt += 1
                await asyncio.sleep(wait)

    async def read(self, fn: Callable[[Connection], T], operation: str = "loading") -> T:
        """Run ``fn`` on a connection of its own, beside the writer."""

        def read() -> T:
            self._check_place()
            with self._read_engine.connect() as connection:
                return fn(connection)

        try:
            if self._memory:
                return await self.post(fn)
            return await self._loop.run_in_executor(self._readers, read)
        except self._failures as error:
            raise _unavailable(operation, error) from None

    async def check(self) -> None:
        """Raise StoreUnavailableError unless the database takes a write now."""

        def touch(connection: Connection) -> None:
            """Write something small, and look into every table."""
            connection.execute(sa.text("UPDATE schema_version SET checked = checked + 1"))
            tables = metadata.sorted_tables
            connection.execute(sa.select(*(sa.select(table).exists() for table in tables)))

        await self.write(touch, "checking")

    def _check_place(self) -> None:
        """Raise unless the file is the one that was opened; an open file can be moved away."""
        if self._file is None:
            return
        try:
            now = self._path.stat()
        except OSError:
            raise MovedError from None
        if not os.path.samestat(now, self._file):
            raise MovedError

    def post(self, fn: Callable[[Connection], T]) -> asyncio.Future[T]:
        """Have ``fn`` written; the future holds its result, or the driver's own error."""
        call = _Call(fn, self._loop.create_future())
        self._calls.put(call)
        return call.done

    def _work(self) -> None:
        """Run the calls that wait, as many as there are in one transaction; in the thread."""
        connection: Connection | None = None
        ended = False
        while not ended:
            # Wait for a call, and take all others that are there by then; None comes last.
            calls: list[_Call] = []
            while not ended and not (calls and self._calls.empty()):
                call = self._calls.get()
                if call is None:
                    ended = True
                else:
                    calls.append(call)
            if not calls:
                break
            try:
                self._check_place()
                connection = connection or self._engine.connect()
                results = _transact(connection, calls)
            except self._failures as error:
                results: list[_Result] = [(call, None, error) for call in calls]
            self._loop.call_soon_threadsafe(_deliver, results)
            # A failure may be the connection's: the next write then gets a new one.
            broken = any(
                isinstance(error, self._failures) and not isinstance(error, MovedError)
                for *_, error in results
            )
            if connection and broken and not self._memory:
                connection.close()
                connection = None
        if connection:
            connection.close()


def _transact(connection: Connection, calls: list[_Call]) -> list[_Result]:
    """Run all calls in one transaction; if one of them fails, each in its own.

    If another process has locked the database, all of them fail: they must not wait for the lock
    one after the other.
    """
    try:
        with connection.begin():
            return [(call, call.fn(connection), None) for call in calls]
    except Exception as error:  # a call may raise anything: it belongs to whoever waits for it
        origin = error.orig if isinstance(error, DBAPIError) else error
        locked = isinstance(origin, sqlite3.OperationalError) and (
            # The low byte is the kind of error; the rest says more about it.
            origin.sqlite_errorcode & 0xFF in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED)
        )
        if len(calls) == 1 or locked:
            return [(call, None, error) for call in calls]
    return [result for call in calls for result in _transact(connection, [call])]


def _deliver(results: list[_Result]) -> None:
    for call, value, error in results:
        if call.done.done():
            continue
        if error is None:
            call.done.set_result(value)
        else:
            call.done.set_exception(error)


def _prepare(connection: Any, _record: object) -> None:
    cursor = connection.cursor()
    for pragma in (
        f"busy_timeout={BUSY_SECONDS * 1000:.0f}",
        "journal_mode=WAL",
        "synchronous=NORMAL",
        "temp_store=MEMORY",
        "journal_size_limit=67108864",
    ):
        cursor.execute(f"PRAGMA {pragma}")
    cursor.close()


def _claim(path: Path) -> int:
    """Open a file that is ours or new, and hold its lock for as long as the process lives."""
    # What belongs to another program is recognised before anything of it is touched.
    try:
        form = form_of(path)
    except (OSError, sqlite3.Error):
        form = None  # opening it will say what is wrong
    if form is Form.EARLIER:
        raise EarlierDatabaseError(path)
    if form is Form.FOREIGN:
        raise DatabaseError(
            f"the database {path} was written by {form.value}; "
            "set A2A_TASK_STORE_DATABASE_URL to another file"
        )
    try:
        # Nobody but this user may read it.
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        os.close(os.open(path, flags, 0o600))
        if path.stat().st_uid == os.getuid():
            path.chmod(stat.S_IRUSR | stat.S_IWUSR)
        lock = os.open(path.with_name(f"{path.name}.lock"), flags, 0o600)
    except OSError as error:
        raise DatabaseError(
            f"cannot open the database file {path.name}: {error.strerror}; "
            "set A2A_TASK_STORE_DATABASE_URL to a file in a writable directory"
        ) from None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(lock)
        raise DatabaseError(
            f"the database file {path.name} is in use by another process; "
            "stop it, or set A2A_TASK_STORE_DATABASE_URL to another file"
        ) from None
    return lock


def _cause(error: Exception) -> str:
    origin = error.orig if isinstance(error, DBAPIError) else error
    return str(origin).splitlines()[0]


def _unavailable(operation: str, error: Exception) -> StoreUnavailableError:
    logger.error("store failed", operation=operation, cause=_cause(error))
    return StoreUnavailableError(
        f"Task store unavailable while {operation} task state; try again", operation=operation
    )
