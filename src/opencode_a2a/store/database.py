"""The database: one writer thread, a few readers, SQLite by default.

Everything above asks with plain functions of a connection: ``await db.write(fn)`` and
``await db.read(fn)``. Writes that wait at the same time share one transaction. The driver is
used from our own threads, synchronously: the asynchronous drivers cost several times as much
per statement. Nothing above this module sees a driver's error, or knows which engine there is:
``sqlite`` and ``postgres`` do what an ``Engine`` has to do.
"""

import asyncio
import math
import queue
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, Self, TypeVar

import sqlalchemy as sa
import structlog
from sqlalchemy.engine import Connection
from sqlalchemy.exc import DBAPIError, SQLAlchemyError

from opencode_a2a import __version__, metrics
from opencode_a2a.errors import StoreUnavailableError
from opencode_a2a.store.schema import metadata

if TYPE_CHECKING:
    from opencode_a2a.store.postgres import Examined, Postgres

logger = structlog.get_logger(__name__)

RETRY_SECONDS = (0.1, 0.5, 1.0, 2.0)
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


class Link(NamedTuple):
    """How such a database is reached."""

    pooled: bool = False
    """The URL leads to a pooler that gives out a connection for one transaction at a time."""
    listen_url: str | None = None
    """A way past the pooler, for the connection that listens."""
    poll_seconds: float = 0.25
    """How often to look for what others have done while they are not heard."""


@dataclass(eq=False, slots=True)
class PendingWrite(Generic[T]):
    """A function that the writer thread is to run, and who waits for its result."""

    fn: Callable[[Connection], T]
    done: asyncio.Future[T]
    late: Callable[[T], None] | None = None
    """Is told the result if it was committed after the one who waited had given up."""
    order: tuple[str, ...] = ()
    """Its place among those of one transaction, where several processes write: what locks rows
    that others lock too does so in one order."""
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
    fenced: DatabaseError | None = None
    """Why this process may not use the database any more."""
    replica: int | None = None
    """The number of this process among those that use the database, where there are several."""
    lease_seconds = 0.0
    """Silence after which a process counts as dead, where there are several."""
    lease_until = math.inf
    """Until when nobody else can have taken what this process runs; by the monotonic clock."""

    @abstractmethod
    def open(self) -> None:
        """Bring the database to the newest schema, in the writer thread; raise DatabaseError."""

    @abstractmethod
    def write(self, calls: list[PendingWrite[Any]]) -> list[Result]:
        """Run all calls in one transaction; if one of them fails, each in its own."""

    @abstractmethod
    def read(self, fn: Callable[[Connection], T]) -> T:
        """Run a function that only reads, in one of the reading threads."""

    def notify(self, texts: list[str]) -> None:  # noqa: B027 - not every engine has anybody to tell
        """Notify all processes that listen, in the writer thread; it may be lost."""

    async def listen(self, database: "Database") -> None:  # noqa: B027 - likewise
        """Have the database hear what is told, until this is cancelled."""

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

    def run(self, connection: Connection, *rows: Mapping[str, object]) -> Any:
        """Run it for each row of values, in the transaction of the connection.

        Returns the driver's cursor, which has what a statement for one row returned.
        """
        driver = connection.dialect.driver
        if driver not in self._compiled:
            made = self._text.compile(dialect=connection.dialect)
            self._compiled[driver] = made.string, made.positiontup if made.positional else None
        sql, order = self._compiled[driver]
        cursor = connection.connection.cursor(**_CURSOR.get(driver, {}))
        if len(rows) > 1 and self._copy and driver == "psycopg":
            # 50 rows of a log: 1.8 ms, 0.33 of it here; by a statement for each 6.0 and 0.98.
            table, types = self._copy
            into = f"COPY {table} ({', '.join(types)}) FROM STDIN (FORMAT BINARY)"
            with cursor.copy(into) as copy:
                copy.set_types(list(types.values()))
                for row in rows:
                    copy.write_row([row[name] for name in types])
        else:
            values: list[Any] = [
                row if order is None else [row[name] for name in order] for row in rows
            ]
            if len(values) == 1:
                cursor.execute(sql, values[0])
            elif values:
                cursor.executemany(sql, values)
        return cursor


_PUT_OFF = "put off"


Changes = Mapping[tuple[str | int, ...], tuple[float, ...]]
"""What is to be added to figures, by the key of their row."""


class Totals(Prepared):
    """A statement that adds to figures which other processes may add to at the same time.

    A row that was added to is locked until the end of the transaction. On PostgreSQL all of them
    are therefore added to at its very end, and in one order: processes never wait for each other
    in a circle, nor for longer than a commit takes.
    """

    def __init__(self, table: str, key: Sequence[str], figures: Sequence[str]) -> None:
        self.table = table
        self._names = (*key, *figures)
        added = ", ".join(f"{name} = {table}.{name} + excluded.{name}" for name in figures)
        super().__init__(
            f"INSERT INTO {table} ({', '.join(self._names)}) VALUES (:{', :'.join(self._names)})"  # noqa: S608 - names of our tables
            f" ON CONFLICT ({', '.join(key)}) DO UPDATE SET {added}"
        )

    def add(self, connection: Connection, changes: Changes) -> None:
        """Add to figures, in the transaction of the connection."""
        put_off = connection.info.get(_PUT_OFF)
        if put_off is None:
            rows = [(*key, *change) for key, change in changes.items()]
            self.run(connection, *(dict(zip(self._names, row, strict=True)) for row in rows))
            return
        found = put_off.setdefault(self, {})
        for key, change in changes.items():
            before = found.get(key, (0,) * len(change))
            found[key] = tuple(map(sum, zip(before, change, strict=True)))

    def put_off(self, connection: Connection) -> Changes:
        """Return what this transaction is to add at its end: a query does not see that yet."""
        return connection.info.get(_PUT_OFF, {}).get(self, {})

    @staticmethod
    def begin(connection: Connection) -> None:
        """Begin a transaction that puts this off, without what an earlier one left undone."""
        connection.info[_PUT_OFF] = {}

    @staticmethod
    def finish(connection: Connection) -> None:
        """Run what was put off; right before the end of a transaction."""
        put_off: dict[Totals, Changes] = connection.info.pop(_PUT_OFF)
        for totals in sorted(put_off, key=lambda one: one.table):
            changes = sorted(put_off[totals].items())
            totals.add(connection, {key: change for key, change in changes if any(change)})


_CLAIM = sa.text(
    "SELECT pg_try_advisory_xact_lock(hashtextextended(current_schema() || '/' || :work, 0))"
)


def claim(connection: Connection, work: str) -> bool:
    """Whether to do, in this transaction, what one of several processes has to do.

    False if another is at it.
    """
    if connection.dialect.name != "postgresql":
        return True
    return bool(connection.scalar(_CLAIM, {"work": work}))


def origin(error: Exception) -> BaseException:
    """Return what the driver raised, if SQLAlchemy raised something in its place."""
    return error.orig or error if isinstance(error, DBAPIError) else error


def cause(error: Exception) -> str:
    """Return the driver's own words, in one line."""
    raised = origin(error)
    return (str(raised).splitlines() or [type(raised).__name__])[0]


DIRECT = Link()


class Database:
    """An open database, from ``async with`` to its end."""

    def __init__(self, url: str, replica: Replica | None = None, link: Link = DIRECT) -> None:
        self._engine = _engine(url, replica, link)
        self._calls: queue.SimpleQueue[PendingWrite[Any] | str | None] = queue.SimpleQueue()
        self._readers = ThreadPoolExecutor(
            self._engine.readers or 1, thread_name_prefix="store-reader"
        )
        self.has_other_replicas = False
        """Whether other processes use the database too, as far as is known."""
        self.listeners: list[Callable[[str], None]] = []
        """Called in the event loop for each text that a process told, this one included, and with
        an empty one when it is time to look without having been texts: something may have been
        missed."""
        self.lease_until = math.inf
        """See ``holds_lease``. It is read for each piece of text."""

    async def __aenter__(self) -> Self:
        self._loop = asyncio.get_running_loop()
        opened: Future[None] = Future()
        self._thread = threading.Thread(
            target=self._work, args=[opened], name="store-writer", daemon=True
        )
        self._thread.start()
        try:
            await asyncio.wrap_future(opened)
        except BaseException:
            await self.__aexit__()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        self._engine.stop()
        await asyncio.to_thread(self._readers.shutdown)  # which have connections in use
        self._calls.put(None)
        await asyncio.to_thread(self._thread.join)

    @property
    def name(self) -> str:
        """The database for people: no password in it."""
        return self._engine.name

    @property
    def replica(self) -> int | None:
        """The number of this process among those that use the database; None where it is alone."""
        return self._engine.replica

    @property
    def lease_seconds(self) -> float:
        """Silence after which a process counts as dead, where there are several."""
        return self._engine.lease_seconds

    @property
    def holds_lease(self) -> bool:
        """Whether nobody else can have taken what this process runs.

        While it is False, nothing may be changed in OpenCode, and nothing shown that is not stored:
        the next commit says whether this process still is who it was.
        """
        return time.monotonic() < self.lease_until

    async def wait_for_lease(self) -> None:
        """Wait until ``holds_lease``; for ever if another has taken what this process ran."""
        while not self.holds_lease:
            with suppress(StoreUnavailableError):
                await self.check_writable("holding")
                continue
            if self.fenced:
                await asyncio.Future()  # until this task is cancelled: the service is ending
            await asyncio.sleep(RETRY_SECONDS[0])

    async def keep_lease(self) -> None:
        """Show that this process lives; raise DatabaseError once it may not go on."""
        beat = self._engine.beat_seconds
        while beat is not None:
            await asyncio.sleep(beat)
            try:
                await self.check_writable("holding")
            except StoreUnavailableError:
                if self._engine.fenced is not None:
                    raise self._engine.fenced from None

    @property
    def fenced(self) -> bool:
        """Whether another process has the database now."""
        return self._engine.fenced is not None

    async def write(
        self,
        fn: Callable[[Connection], T],
        operation: str = "persisting",
        late: Callable[[T], None] | None = None,
        order: tuple[str, ...] = (),
    ) -> T:
        """Run ``fn`` in a transaction and return once it is committed.

        ``fn`` may be run a second time when another write of the same transaction fails, so it
        must do nothing but talk to the database.

        If the database is away, StoreUnavailableError says so soon, and nothing was written. There
        is one exception: while it is not known whether the commit took effect, only a caller
        with ``late`` is told so soon, and ``late`` is told the result if it did after all.
        """
        call = self.submit(fn, late, order)
        patience = self._engine.patience
        try:
            if patience is not None:
                await asyncio.wait([call.done], timeout=patience)
                if not call.done.done() and (not call.abandon() or late is not None):
                    call.done.cancel()
                    raise _unavailable(operation, TimeoutError(f"no answer in {patience:.0f} s"))
            return await call.done
        except self._engine.failures as error:
            raise _unavailable(operation, error) from None

    async def write_until_stored(self, fn: Callable[[Connection], T]) -> T:
        """Write, however long the database takes: what has happened must not be lost."""
        attempt = 0
        while True:
            try:
                return await self.write(fn)
            except StoreUnavailableError:
                if self.fenced:
                    await asyncio.Future()  # until this task is cancelled: the service is ending
                wait = RETRY_SECONDS[min(attempt, len(RETRY_SECONDS) - 1)]
                logger.warning("not stored, trying again", wait=wait)
                attempt += 1
                await asyncio.sleep(wait)

    async def read(self, fn: Callable[[Connection], T], operation: str = "loading") -> T:
        """Run ``fn`` on a connection of its own, beside the writer."""
        try:
            if not self._engine.readers:
                return await self.submit(fn).done
            async with asyncio.timeout(self._engine.patience):
                return await self._loop.run_in_executor(self._readers, self._engine.read, fn)
        except (TimeoutError, *self._engine.failures) as error:
            raise _unavailable(operation, error) from None

    async def check_writable(self, operation: str = "persisting") -> None:
        """Raise StoreUnavailableError unless a transaction can be committed now."""
        await self.write(_nothing, operation)

    async def check(self) -> None:
        """Raise StoreUnavailableError unless the database takes a write now."""

        def touch(connection: Connection) -> None:
            """Write something small, and look into every table."""
            connection.execute(sa.text("UPDATE schema_version SET checked = checked + 1"))
            tables = metadata.sorted_tables
            connection.execute(sa.select(*(sa.select(table).exists() for table in tables)))

        await self.write(touch, "checking")

    def submit(
        self,
        fn: Callable[[Connection], T],
        late: Callable[[T], None] | None = None,
        order: tuple[str, ...] = (),
    ) -> PendingWrite[T]:
        """Have ``fn`` written; its ``done`` holds the result, or the driver's own error."""
        call = PendingWrite(fn, self._loop.create_future(), late, order)
        self._calls.put(call)
        return call

    def notify(self, text: str) -> None:
        """Tell other processes that it is worth looking at what was committed.

        ``l,NO,NO…`` there are entries of tasks' logs; ``t,NUMBER,TASK`` a reader of a task was
        shown what is asked by that number; ``m`` there is mail; ``r,NO`` there is the reply to a
        mail; ``u`` replicas or upstreams changed. It may be lost. At most 7,900 bytes.
        """
        if self.has_other_replicas:
            self._calls.put(text)

    def dispatch(self, text: str) -> None:
        """Hand a notification to every listener."""
        for call in self.listeners:
            call(text)

    async def listen(self) -> None:
        """Hear what other processes tell, for as long as the database is in use."""
        await self._engine.listen(self)

    def _work(self, opened: Future[None]) -> None:
        """Run the calls that wait, as many as there are in one transaction; in the thread."""
        try:
            self._engine.open()
        except Exception as error:  # belongs to whoever wanted the database
            self._engine.close()
            opened.set_exception(error)
            return
        self.lease_until = self._engine.lease_until
        opened.set_result(None)
        ended = False
        while not ended:
            # Wait for a call, and take all others that are there by then; None comes last.
            calls: list[PendingWrite[Any]] = []
            texts: list[str] = []
            while not ended and not ((calls or texts) and self._calls.empty()):
                match self._calls.get():
                    case None:
                        ended = True
                    case str(text):
                        texts.append(text)
                    case call:
                        calls.append(call)
            if texts:  # of what is committed, so it does not wait for the next commit
                self._engine.notify(texts)
            if calls:
                with metrics.STORE_COMMIT_SECONDS.time():
                    results = self._engine.write(calls)
                metrics.STORE_GROUP_SIZE.observe(len(calls))
                self.lease_until = self._engine.lease_until
                self._loop.call_soon_threadsafe(_deliver, results)
        self._engine.close()


def examine(url: str, link: Link = DIRECT) -> "Examined":
    """Look at a PostgreSQL without changing it, and say what it is; raise DatabaseError."""
    return _postgres(url, None, link).examine()


def _engine(url: str, replica: Replica | None, link: Link) -> Engine:
    if not url.startswith("sqlite"):
        return _postgres(url, replica, link)
    from opencode_a2a.store.sqlite import Sqlite  # which is written for this module

    return Sqlite(url)


def _postgres(url: str, replica: Replica | None, link: Link) -> "Postgres":
    try:
        from opencode_a2a.store.postgres import Postgres  # the driver is optional
    except ImportError:
        raise DatabaseError(
            "PostgreSQL needs a driver that is not installed; install this program with its extra "
            "`postgres`, or run `pip install 'psycopg[binary]'`",
            status=2,
        ) from None
    return Postgres(url, replica, link)


def _nothing(_: Connection) -> None:
    """The transaction itself is what matters."""


def _deliver(results: list[Result]) -> None:
    for call, value, error in results:
        if call.done.done():
            if call.late is not None and error is None:
                call.late(value)
        elif error is None:
            call.done.set_result(value)
        else:
            call.done.set_exception(error)


def _unavailable(operation: str, error: Exception) -> StoreUnavailableError:
    logger.error("store failed", operation=operation, cause=cause(error))
    return StoreUnavailableError(
        f"Task store unavailable while {operation} task state; try again", operation=operation
    )
