"""What the database engines have in common: statements, errors, and what each has to do.

``database`` runs an engine in its threads; ``sqlite`` and ``postgres`` are the two there are.
"""

import asyncio
import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, TypeVar

import sqlalchemy as sa
from sqlalchemy.engine import Connection
from sqlalchemy.exc import DBAPIError, SQLAlchemyError

from opencode_a2a import __version__

T = TypeVar("T")
Write = Callable[[Connection], None]
"""What is to be written, for whoever has a transaction."""


class DatabaseError(Exception):
    """The database cannot be used; the text says why and what to do."""

    def __init__(self, text: str, *, status: int = 1) -> None:
        super().__init__(text)
        self.status = status
        """With which the program ends when it cannot start for this reason."""


class Replica(NamedTuple):
    """A process that uses a database which several can reach."""

    name: str
    lease_seconds: float = 8.0
    """Silence after which it counts as dead."""
    version: str = __version__


@dataclass(eq=False, slots=True)
class PendingWrite(Generic[T]):
    """A function that the writer thread is to run, and who waits for its result."""

    fn: Callable[[Connection], T]
    done: asyncio.Future[T]
    late: Callable[[T], None] | None = None
    """Is told the result if it was committed after the one who waited had given up."""
    begun: bool = False
    abandoned: bool = False

    def begin(self) -> bool:
        """Note that it is being run; False if nobody wants it any more. In the writer thread."""
        self.begun = True
        return not self.abandoned

    def abandon(self) -> bool:
        """Give it up; True if it may have been run all the same. In the event loop.

        Each side sets its own mark before it looks at the other's, so that at least one of them
        sees that the other was there.
        """
        self.abandoned = True
        return self.begun


class Result(NamedTuple):
    call: PendingWrite[Any]
    value: Any
    error: Exception | None = None


UNWANTED = SQLAlchemyError("nobody waits for this write any more")


class Engine(ABC):
    """A database as the threads of ``Database`` use it."""

    readers: int
    """How many threads may read at a time; 0 leaves reading to the writer."""
    name: str
    """The database for people: no password in it."""
    failures: tuple[type[Exception], ...]
    """What the driver raises."""
    patience: float | None = None
    """Seconds after which a caller is told that the database is away; None leaves it to locks."""
    beat_seconds: float | None = None
    """How often a process has to write something so that it does not count as dead."""
    lost: DatabaseError | None = None
    """Why this process may not use the database any more."""

    @abstractmethod
    def open(self) -> None:
        """Bring the database to the newest schema, in the writer thread; raise DatabaseError."""

    @abstractmethod
    def write(self, calls: list[PendingWrite[Any]]) -> list[Result]:
        """Run all calls in one transaction; if one of them fails, each in its own."""

    @abstractmethod
    def read(self, fn: Callable[[Connection], T]) -> T:
        """Run a function that only reads, in one of the reading threads."""

    @abstractmethod
    def stop(self) -> None:
        """End whatever ``write`` is waiting for; called from another thread."""

    @abstractmethod
    def close(self) -> None:
        """Close the connections, in the writer thread."""


_CURSOR = {"psycopg": {"binary": True}}  # else the bytes of a log come as text


class Prepared:
    """A statement that runs often: compiled once for a driver, and run by the driver itself.

    SQLAlchemy's own execution costs eight times what SQLite needs for a small statement (730
    against 90 µs for the five statements of an admission).
    """

    def __init__(self, sql: str, copy: tuple[str, Mapping[str, str]] | None = None) -> None:
        """``copy`` is the table that rows are inserted into, and the types of their columns."""
        self._text = sa.text(sql)
        self._copy = copy
        self._compiled: dict[str, tuple[str, Sequence[str] | None]] = {}
        """By driver: its spelling, and the names of the values where it takes them by place."""

    def run(self, connection: Connection, values: Mapping[str, object]) -> Any:
        """Run it in the transaction of the connection; return the driver's cursor."""
        sql, order = self._compile(connection)
        cursor = connection.connection.cursor(**_CURSOR.get(connection.dialect.driver, {}))
        cursor.execute(sql, values if order is None else [values[name] for name in order])
        return cursor

    def run_many(self, connection: Connection, rows: Sequence[Mapping[str, object]]) -> None:
        if len(rows) == 1:
            self.run(connection, rows[0])
        elif rows and self._copy and connection.dialect.driver == "psycopg":
            # 50 rows of a log: 1.8 ms, 0.33 of it here; by a statement for each 6.0 and 0.98.
            table, types = self._copy
            into = f"COPY {table} ({', '.join(types)}) FROM STDIN (FORMAT BINARY)"
            with connection.connection.cursor().copy(into) as copy:
                copy.set_types(list(types.values()))
                for row in rows:
                    copy.write_row([row[name] for name in types])
        elif rows:
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


def cause(error: Exception) -> str:
    """Return the driver's own words, in one line."""
    origin = error.orig if isinstance(error, DBAPIError) else error
    return (str(origin).splitlines() or [type(origin).__name__])[0]


LONGEST_KEY = 512


def index_key(connection: Connection, text: str) -> str:
    """Return what stands for a directory in an index, whose rows end at 2.7 kB in PostgreSQL."""
    data = text.encode(errors="surrogatepass")
    if connection.dialect.name != "postgresql" or len(data) <= LONGEST_KEY:
        return text
    return f"sha256:{hashlib.sha256(data).hexdigest()}"
