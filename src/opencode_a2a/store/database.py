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
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self, TypeVar

import sqlalchemy as sa
import structlog
from sqlalchemy import event
from sqlalchemy.engine import URL, Connection, make_url
from sqlalchemy.exc import DBAPIError, SQLAlchemyError
from sqlalchemy.pool import NullPool, QueuePool

from opencode_a2a.errors import StoreUnavailableError
from opencode_a2a.store.earlier import Form, form_of
from opencode_a2a.store.schema import SchemaTooNewError, metadata, migrate

log = structlog.get_logger(__name__)

READERS = 3
RETRY_SECONDS = (0.1, 0.5, 1.0, 2.0)
BUSY_SECONDS = 1.5
"""How long a statement waits for a lock that another process holds. A write may have to wait for
the one before it as well; whoever sent it has an answer within 5 s all the same. A reader does
not wait: the write-ahead log has its own copy for it."""
T = TypeVar("T")
_LOOK = sa.select(*(sa.select(table).exists() for table in metadata.sorted_tables))


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
class _Job:
    fn: Callable[[Connection], Any]
    done: asyncio.Future[Any]


_Result = tuple[_Job, Any, Exception | None]


class Database:
    """An open database, from ``async with`` to its end."""

    def __init__(self, url: str) -> None:
        self._url = _normalised(url)
        self._memory = self._url.database in (None, "", ":memory:")
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="store-writer", daemon=True)
        self._readers = ThreadPoolExecutor(READERS, thread_name_prefix="store-reader")
        self._lock: int | None = None
        self._file: os.stat_result | None = None

    async def __aenter__(self) -> Self:
        self._loop = asyncio.get_running_loop()
        if not self._memory:
            self._path = Path(self._url.database or "")
            _recognise(self._path)
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
        self._jobs.put(None)
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
                log.warning("not stored, trying again", wait=wait)
                attempt += 1
                await asyncio.sleep(wait)

    async def read(self, fn: Callable[[Connection], T], operation: str = "loading") -> T:
        """Run ``fn`` on a connection of its own, beside the writer."""
        try:
            if self._memory:
                return await self.post(fn)
            return await self._loop.run_in_executor(self._readers, self._read, fn)
        except self._failures as error:
            raise _unavailable(operation, error) from None

    async def check(self) -> None:
        """Raise StoreUnavailableError unless the database takes a write now."""
        await self.write(_touch, "checking")

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

    def _read(self, fn: Callable[[Connection], T]) -> T:
        self._check_place()
        with self._read_engine.connect() as connection:
            return fn(connection)

    def post(self, fn: Callable[[Connection], T]) -> asyncio.Future[T]:
        """Have ``fn`` written; the future says how it went, in the driver's words."""
        job = _Job(fn, self._loop.create_future())
        self._jobs.put(job)
        return job.done

    def _work(self) -> None:
        connection: Connection | None = None
        while jobs := self._waiting():
            try:
                self._check_place()
                connection = connection or self._engine.connect()
                results = _transact(connection, jobs)
            except self._failures as error:
                results: list[_Result] = [(job, None, error) for job in jobs]
            self._loop.call_soon_threadsafe(_deliver, results)
            if connection and not self._memory and any(self._broken(e) for *_, e in results):
                connection.close()
                connection = None
        if connection:
            connection.close()

    def _broken(self, error: Exception | None) -> bool:
        """Whether a failure may be the connection's: the next write then gets a new one."""
        return isinstance(error, self._failures) and not isinstance(error, MovedError)

    def _waiting(self) -> list[_Job]:
        """Wait for a job, and take all others that are there by then; empty at the end."""
        jobs: list[_Job] = []
        while not jobs or not self._jobs.empty():
            job = self._jobs.get()
            if job is None:
                if jobs:
                    self._jobs.put(None)
                break
            jobs.append(job)
        return jobs


def _transact(connection: Connection, jobs: list[_Job]) -> list[_Result]:
    """Run all jobs in one transaction; if one of them fails, each in its own.

    If the database is locked, it is for all of them: they must not wait one after the other.
    """
    try:
        with connection.begin():
            return [(job, job.fn(connection), None) for job in jobs]
    except Exception as error:  # a job may raise anything: it belongs to whoever waits for it
        if len(jobs) == 1 or _locked(error):
            return [(job, None, error) for job in jobs]
    return [result for job in jobs for result in _transact(connection, [job])]


def _locked(error: Exception) -> bool:
    """Whether another process holds the lock of the database."""
    origin = error.orig if isinstance(error, DBAPIError) else error
    if not isinstance(origin, sqlite3.OperationalError):
        return False
    return origin.sqlite_errorcode & 0xFF in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED)


def _deliver(results: list[_Result]) -> None:
    for job, value, error in results:
        if job.done.done():
            continue
        if error is None:
            job.done.set_result(value)
        else:
            job.done.set_exception(error)


def _touch(connection: Connection) -> None:
    """Write something small, and look into every table."""
    connection.execute(sa.text("UPDATE schema_version SET checked = checked + 1"))
    connection.execute(_LOOK)


def _normalised(url: str) -> URL:
    parsed = make_url(url)
    if parsed.drivername.startswith("sqlite"):
        return parsed.set(drivername="sqlite")
    return parsed


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


def _recognise(path: Path) -> None:
    """Raise unless the file is ours or new, before anything of it is touched."""
    try:
        form = form_of(path)
    except (OSError, sqlite3.Error):
        return  # opening it will say what is wrong
    if form is Form.EARLIER:
        raise EarlierDatabaseError(path)
    if form is Form.FOREIGN:
        raise DatabaseError(
            f"the database {path} was written by {form.value}; "
            "set A2A_TASK_STORE_DATABASE_URL to another file"
        )


def _claim(path: Path) -> int:
    """Create the file for nobody but us, and hold its lock for as long as the process lives."""
    try:
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
    log.error("store failed", operation=operation, cause=_cause(error))
    return StoreUnavailableError(
        f"Task store unavailable while {operation} task state; try again", operation=operation
    )
