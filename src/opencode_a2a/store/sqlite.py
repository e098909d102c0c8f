"""SQLite: a file that one process has for itself, or a database in memory."""

import fcntl
import os
import sqlite3
import stat
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import sqlalchemy as sa
from sqlalchemy import event
from sqlalchemy.engine import Connection, make_url
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.pool import NullPool, QueuePool

from opencode_a2a.databases import kind_of
from opencode_a2a.store.authorship import Author, author_of
from opencode_a2a.store.database import run_group
from opencode_a2a.store.engine import (
    ConnectionOptions,
    DatabaseError,
    Engine,
    PendingWrite,
    Replica,
    WriteResult,
    cause,
    driver_error,
)
from opencode_a2a.store.schema import Number, SchemaTooNewError, migrate

T = TypeVar("T")

READERS = 3
SECURE_DELETE = "FAST"
"""Overwrites what is deleted where that costs no more writing; ``Sqlite.erase`` has all of it
overwritten."""
BUSY_SECONDS = 1.5
"""How long a statement waits for a lock that another process holds. A write may have to wait for
the one before it as well, and its caller still has an answer within 5 s. Readers do not wait: the
write-ahead log keeps the last committed state for them."""


class FileMovedError(SQLAlchemyError):
    """The file is no longer at its path, so that nobody would find what is written to it now."""

    def __init__(self) -> None:
        super().__init__("the file was moved or replaced; put it back, or restart the service")


class EarlierDatabaseError(DatabaseError):
    """The file was written by the earlier adapter. It is left unchanged, and can be imported."""

    def __init__(self, file: Path) -> None:
        super().__init__(f"the database {file} was written by {Author.EARLIER.value}", status=2)
        self.file = file


@compiles(Number, "sqlite")
def _number(*_: object, **_options: object) -> str:
    return "INTEGER"  # SQLite numbers rows by itself only in a column of this type


class Sqlite(Engine):
    kind = kind_of("sqlite://")
    failures = (SQLAlchemyError, sqlite3.Error)
    data_errors = (sqlite3.DataError, sqlite3.IntegrityError, sqlite3.InterfaceError)

    def __init__(self, url: str, _replica: Replica, _options: ConnectionOptions) -> None:
        # The URL may name an asynchronous driver; the driver is always the synchronous one.
        self._url = make_url(url).set(drivername="sqlite")
        self._memory = self._url.database in (None, "", ":memory:")
        self.readers = 0 if self._memory else READERS
        self.name = "memory" if self._memory else self._url.render_as_string()
        self._path = Path(self._url.database or "")
        self._lock: int | None = None
        self._file: os.stat_result | None = None
        self._connection: Connection | None = None
        self._erasing = False
        """Whether the write-ahead log may hold what was to be erased."""
        # With values by name, ``Prepared`` passes them on as they are.
        self._engine = sa.create_engine(self._url, poolclass=NullPool, paramstyle="named")
        self._read_engine = sa.create_engine(
            self._url, poolclass=QueuePool, pool_size=READERS, max_overflow=0, paramstyle="named"
        )
        self.mark_connections(self._engine, self._read_engine)
        for engine in (self._engine, self._read_engine):
            event.listen(engine, "connect", _prepare)

    def open(self) -> None:
        if not self._memory:
            self._lock = _claim(self._path)
            self._file = self._path.stat()
        try:
            self._connection = self._engine.connect()
            with self._connection.begin():
                # The driver itself begins a transaction only before the first change of a row,
                # which is after the tables were created.
                self._connection.exec_driver_sql("BEGIN")
                migrate(self._connection, self.spelling)
        except SchemaTooNewError as error:
            raise DatabaseError(str(error)) from None
        except self.failures as error:
            raise DatabaseError(f"cannot open {self.name}: {cause(error)}") from None

    def write(self, calls: list[PendingWrite[Any]]) -> list[WriteResult]:
        try:
            self._check_path()
            self._connection = self._connection or self._engine.connect()
            with self._connection.begin():
                results = run_group(self._connection, calls)
        except FileMovedError as error:
            return [WriteResult(call, None, error) for call in calls]
        except Exception as error:  # a call may raise anything, which is for its caller
            if self._connection and isinstance(error, self.failures) and not self._memory:
                # The connection may be to blame, so the next write makes a new one.
                self._connection.close()
                self._connection = None
            raised = driver_error(error)
            locked = isinstance(raised, sqlite3.OperationalError) and (
                # The low byte is the kind of error; the rest says more about it.
                raised.sqlite_errorcode & 0xFF in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED)
            )
            # The lock of another process concerns them all; they must not wait for it one after
            # the other.
            if len(calls) == 1 or locked:
                return [WriteResult(call, None, error) for call in calls]
            # One of them is the cause, and must not harm the others.
            return [result for call in calls for result in self.write([call])]
        if self._erasing:
            self._empty_log(self._connection)
        return results

    def read(self, fn: Callable[[Connection], T]) -> T:
        self._check_path()
        with self._read_engine.connect() as connection:
            return fn(connection)

    def erase(self, connection: Connection) -> None:
        _run(connection, "PRAGMA secure_delete=ON")
        self._erasing = True

    def _empty_log(self, connection: Connection) -> None:
        """Empty the write-ahead log; if that cannot be done just now, after the next write.

        What was written before is committed: nothing here makes that a failure.
        """
        with suppress(sqlite3.Error):
            _run(connection, f"PRAGMA secure_delete={SECURE_DELETE}")
            busy, *_ = _run(connection, "PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
            self._erasing = bool(busy)

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
        self._read_engine.dispose()
        if self._lock is not None:
            os.close(self._lock)

    def _check_path(self) -> None:
        """Raise FileMovedError unless the path leads to the file that was opened."""
        if self._file is None:
            return
        try:
            now = self._path.stat()
        except OSError:
            raise FileMovedError from None
        if not os.path.samestat(now, self._file):
            raise FileMovedError


def _run(connection: Connection, statement: str) -> sqlite3.Cursor:
    """Run a statement past SQLAlchemy, which would begin a transaction for it."""
    driver: Any = connection.connection.driver_connection
    return driver.execute(statement)


def _prepare(connection: Any, _record: object) -> None:
    cursor = connection.cursor()
    for pragma in (
        f"busy_timeout={BUSY_SECONDS * 1000:.0f}",
        "journal_mode=WAL",
        "synchronous=NORMAL",
        "temp_store=MEMORY",
        "journal_size_limit=67108864",
        f"secure_delete={SECURE_DELETE}",
    ):
        cursor.execute(f"PRAGMA {pragma}")
    cursor.close()


def _claim(path: Path) -> int:
    """Open a file that is ours or new, and hold its lock for as long as the process lives."""
    # A file of another program is recognised before anything in it is touched.
    try:
        author = author_of(path)
    except (OSError, sqlite3.Error):
        author = None  # opening it will say what is wrong
    if author is Author.EARLIER:
        raise EarlierDatabaseError(path)
    if author is Author.FOREIGN:
        raise DatabaseError(
            f"the database {path} was written by {author.value}; "
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
