"""``Engine``, the base class of ``Sqlite`` and ``Postgres``, and the values that it is given.

``Database`` (``database.py``) calls an engine from its own threads, synchronously: the asynchronous
drivers cost several times as much per statement.

A new kind of database is a subclass of ``Engine`` in a module of its own, and a row in ``KINDS``
(``databases.py``). That works only for databases that speak PostgreSQL's SQL.
"""

import asyncio
import os
import secrets
import socket
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, Protocol, Self, TypeVar

import sqlalchemy as sa
from sqlalchemy import event
from sqlalchemy.engine import Connection
from sqlalchemy.exc import DBAPIError, SQLAlchemyError

from opencode_a2a import __version__
from opencode_a2a.clock import Lease
from opencode_a2a.databases import DatabaseKind
from opencode_a2a.store.replicas import MAIL_FORMAT, Census, ReplicaRow, UpstreamRow

T = TypeVar("T")


class DatabaseError(Exception):
    """The database cannot be used; the text says why and what to do."""

    def __init__(self, text: str, *, status: int = 1) -> None:
        super().__init__(text)
        self.status = status
        """The exit status of the program if it cannot start for this reason."""


class UnstorableError(Exception):
    """The database will never take these values, however often they are written."""


class Replica(NamedTuple):
    """This process among those that share a database."""

    name: str
    lease_seconds: float = 8.0
    """Seconds without a commit after which other replicas may declare it gone, at the earliest: one
    with a longer lease waits for that."""
    version: str = __version__
    mail_format: int = MAIL_FORMAT

    @classmethod
    def anonymous(cls) -> Self:
        """Return one for a program that nobody named, such as an import."""
        return cls(f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(2)}")


class ConnectionOptions(NamedTuple):
    """How to connect to a shared database, beside its URL."""

    pooled: bool = False
    """The URL leads to a pooler that lends a connection for one transaction at a time."""
    listen_url: str | None = None
    """A URL past the pooler, for the connection that listens for notifications."""
    poll_seconds: float = 0.25
    """How often to look for the changes of other replicas while notifications do not arrive."""


DIRECT = ConnectionOptions()


@dataclass(eq=False, slots=True)
class PendingWrite(Generic[T]):
    """A function that the writer thread is to run, and the future of its result."""

    fn: Callable[..., T]
    args: tuple[Any, ...]
    """Its arguments after the connection."""
    kwargs: Mapping[str, Any]
    done: asyncio.Future[T]
    on_late_commit: Callable[[T], None] | None = None
    """Called with the result if it was committed after its caller had stopped waiting."""
    lock_order: tuple[str, ...] = ()
    """Its position in a group. Functions that lock rows which other processes lock too must come in
    the same order everywhere, or two processes wait for each other."""
    begun: bool = False
    abandoned: bool = False

    def begin(self) -> bool:
        """Note, in the writer thread, that it is run now; False if its caller has abandoned it."""
        self.begun = True
        return not self.abandoned

    def abandon(self) -> bool:
        """Abandon it, in the event loop; True if it may have been run all the same.

        ``begin`` and ``abandon`` each set their own mark before they read the other's, so at
        least one of the two threads sees the other's mark.
        """
        self.abandoned = True
        return self.begun


class WriteResult(NamedTuple):
    """The outcome of a ``PendingWrite``: a value that is committed, or an error."""

    call: PendingWrite[Any]
    value: Any
    error: Exception | None = None


ABANDONED = SQLAlchemyError("the caller has abandoned this write")


class Examined(NamedTuple):
    """A description of a shared database, for ``doctor``."""

    about: str
    """Its name, its version, and the timeouts in force."""
    ahead: float
    """Seconds by which its clock is ahead of this machine's."""
    hears: bool
    """Whether notifications arrive."""
    live: list[ReplicaRow]
    upstreams: list[UpstreamRow]


class Notifications(Protocol):
    """What ``Engine.listen`` needs of the database."""

    census: Census
    lease: Lease

    @property
    def replica(self) -> int | None: ...

    def notify(self, text: str, /, *, alone: bool = False) -> None: ...

    def dispatch(self, text: str, /) -> None: ...


class Engine(ABC):
    """A database, as the threads of ``Database`` and the query modules use it.

    ``open``, ``write``, ``notify`` and ``close`` are called in the writer thread, ``read`` in
    several others at the same time.
    """

    # Every engine

    kind: DatabaseKind
    name: str
    """The name of the database for people, without a password."""
    readers: int
    """How many threads may read at a time; 0 if only the writer thread can."""
    failures: tuple[type[Exception], ...]
    """The errors of the driver. A caller is told only that the database is unavailable."""
    data_errors: tuple[type[Exception], ...]
    """Those among them that are about the values of a statement, so that they never pass."""

    @abstractmethod
    def __init__(self, url: str, replica: Replica, options: ConnectionOptions) -> None:
        """Connect nothing yet; raise DatabaseError if the URL cannot be used."""

    @abstractmethod
    def open(self) -> None:
        """Connect, and bring the tables to the newest schema; raise DatabaseError."""

    @abstractmethod
    def write(self, calls: list[PendingWrite[Any]]) -> list[WriteResult]:
        """Run all calls in one transaction (``run_group`` in ``database.py``) and commit it.

        If one of them fails, each is run again in a transaction of its own, so that it harms no
        other. Raises nothing: an error is the result of the calls that it belongs to.

        A caller that was told that nothing is written has to be right (I6). An engine with
        ``patience``, whose callers may abandon a call, therefore calls ``PendingWrite.begin``
        before each attempt; if that returns False, the result is ``ABANDONED``, and the call does
        not run. Before the commit it rolls back if a call was ``abandoned`` meanwhile.

        An engine for several processes begins each transaction with a statement that fails once
        this process was declared gone; it then sets ``fenced`` and writes nothing any more. It
        reads the time of the database with that (``SHARED_CLOCK.follow``), and calls
        ``lease.renew`` after each commit, with the time at which the transaction began.
        """

    @abstractmethod
    def read(self, fn: Callable[[Connection], T]) -> T:
        """Run a function that only reads, on a connection of its own."""

    @abstractmethod
    def close(self) -> None:
        """Close all connections; called after ``open`` has failed, too."""

    def mark_connections(self, *engines: sa.Engine) -> None:
        """Record this engine in each new connection; ``engine_of`` (``database.py``) reads it.

        Every subclass calls this for all the engines of SQLAlchemy that it makes.
        """

        def mark(_: object, record: Any) -> None:
            record.info[Engine] = self

        for engine in engines:
            event.listen(engine, "connect", mark)

    # SQL that databases spell or limit differently. The defaults do for SQLite.

    spelling: Mapping[str, str] = {}
    """Words in the steps of ``schema.py``, and the words of this database for them."""
    longest_key: int | None = None
    """Bytes that a text in an index may have."""
    cursor_options: Mapping[str, Any] = {}
    """Arguments with which the driver makes a cursor that returns binary columns as bytes."""
    has_unnest = False
    """Whether its SQL has ``unnest`` and ``LATERAL`` as PostgreSQL's has."""

    def insert_rows(
        self, cursor: Any, table: str, types: Mapping[str, str], rows: Iterable[Mapping[str, Any]]
    ) -> bool:
        """Insert many rows faster than a statement for each does; False if there is no such way.

        ``types`` holds the columns and their types in PostgreSQL.
        """
        return False

    def continue_numbering(self, connection: Connection, table: sa.Table) -> None:  # noqa: B027 - see above
        """Number new rows after those that were inserted with a number of their own."""

    def erase(self, connection: Connection) -> None:  # noqa: B027 - see above
        """Have no file hold what this transaction deletes or overwrites, once it is committed."""

    # Several processes on one database. The defaults are those of a process that is alone.

    patience: float | None = None
    """Seconds after which a caller is told that the database is unreachable; None if ``write``
    never takes much longer than it waits for a lock."""
    lease = Lease()
    fenced: DatabaseError | None = None
    """Why this process may not write any more: it was declared gone, or its commits were lost."""
    replica: int | None = None
    """The number of this process among those that share the database."""

    def lock(self, connection: Connection, name: str) -> None:  # noqa: B027 - see above
        """Keep other processes from taking the lock of this name until the transaction ends."""

    def try_lock(self, connection: Connection, name: str) -> bool:
        """Take a lock as ``lock`` does; False if another process has it."""
        return True

    def notify(self, texts: list[str]) -> None:  # noqa: B027 - see above
        """Send these texts to all processes that listen; they may be lost."""

    async def listen(self, database: Notifications) -> None:  # noqa: B027 - see above
        """Dispatch the notifications of other processes, until this is cancelled."""

    def stop(self) -> None:  # noqa: B027 - see above
        """End the waiting inside of ``write``; called from another thread."""

    def examine(self) -> Examined:
        """Describe the database without changing anything in it; raise DatabaseError."""
        raise NotImplementedError(f"{self.kind.name} is not shared")


def driver_error(error: Exception) -> BaseException:
    """Return the error of the driver, if this is SQLAlchemy's error about it."""
    return error.orig or error if isinstance(error, DBAPIError) else error


def cause(error: Exception) -> str:
    """Return the driver's own words, in one line."""
    raised = driver_error(error)
    return (str(raised).splitlines() or [type(raised).__name__])[0]
