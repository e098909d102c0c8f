"""The database as the rest of the program uses it: functions of a connection, run in threads.

``await database.read(fn, *args)`` runs a function in one of a few reading threads, and
``await database.write(fn, *args)`` in the one writer thread; the function is given a connection,
then its arguments. Nobody above sees a driver's error, or knows which database there is: an
``Engine`` (``store/engine.py``) does what databases do differently.

Query modules have ``Prepared`` and ``Totals`` for the statements that run often, and ask
``engine_of(connection)`` where databases differ.

The life of a write:

1. ``submit`` puts a ``PendingWrite`` into the queue of the writer thread. ``write`` does so and
   waits; ``write_until_stored`` writes again until the database takes it.
2. The writer thread takes everything that is queued as one group, and hands it to the engine.
3. The engine runs the functions of the group in one transaction (``run_group``). If one of them
   fails, each is run again in a transaction of its own, so that only the one that fails has an
   error. A function can therefore run more than once, and must do nothing but use its connection.
4. After the commit the results of the group are handed to the event loop in one call, which
   sets the futures.
5. A caller of ``write`` waits no longer than ``Engine.patience``. A function that the writer thread
   has not begun by then never runs. Of one that has begun, nobody knows yet whether it will be
   committed, and so its caller waits on. A caller of ``write_in_time`` has its error now, and its
   ``on_late_commit`` is called with the result if there was a commit after all; also if the caller
   was canceled.
"""

import asyncio
import math
import pkgutil
import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import Any, Concatenate, ParamSpec, Self, TypeVar

import sqlalchemy as sa
import structlog
from sqlalchemy.engine import Connection

from opencode_a2a import metrics
from opencode_a2a.bounds import Recent
from opencode_a2a.databases import kind_of
from opencode_a2a.errors import StoreUnavailableError
from opencode_a2a.store.engine import (
    DIRECT,
    ConnectionOptions,
    DatabaseError,
    Engine,
    PendingWrite,
    Replica,
    UnstorableError,
    WriteResult,
    cause,
    driver_error,
)
from opencode_a2a.store.replicas import Census
from opencode_a2a.store.schema import metadata, version

logger = structlog.get_logger(__name__)

RETRY_SECONDS = (0.1, 0.5, 1.0, 2.0)
COMPLAINT_SECONDS = 10.0
"""How often the same failure is logged: while the database is unreachable, everything fails."""
P = ParamSpec("P")
T = TypeVar("T")
OnConnection = Callable[Concatenate[Connection, P], T]
"""A function that is given a connection, then its own arguments."""
Write = Callable[[Connection], None]
"""A part of a transaction that somebody else begins and commits."""


def make_engine(
    url: str, replica: Replica | None = None, options: ConnectionOptions = DIRECT
) -> Engine:
    """Return the engine for a URL, which is not opened yet; raise DatabaseError."""
    kind = kind_of(url)
    try:
        engine: type[Engine] = pkgutil.resolve_name(kind.engine)
    except ImportError:
        raise DatabaseError(
            f"{kind.name} needs a driver that is not installed; install this program with its "
            f"extra `{kind.extra}`, or run `pip install '{kind.driver}'`",
            status=2,
        ) from None
    return engine(url, replica or Replica.anonymous(), options)


class Writer:
    """The writer thread and its queue; see the life of a write above."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._loop = asyncio.get_running_loop()
        self.queue: queue.SimpleQueue[PendingWrite[Any] | str | None] = queue.SimpleQueue()
        """Writes, texts to send to all processes, and None as the last."""
        self._opened: Future[None] = Future()
        self._committed_at = time.monotonic()
        metrics.STORE_COMMIT_AGE.set_function(lambda: time.monotonic() - self._committed_at)
        self._thread = threading.Thread(target=self._run, name="store-writer", daemon=True)

    async def start(self) -> None:
        """Open the database in the thread; raise DatabaseError."""
        self._thread.start()
        await asyncio.wrap_future(self._opened)

    async def stop(self) -> None:
        """Close the database, after everything that is queued."""
        self.queue.put(None)
        await asyncio.to_thread(self._thread.join)

    def _run(self) -> None:
        # Whoever starts it may stop waiting; the future stays, to be set.
        self._opened.set_running_or_notify_cancel()
        try:
            self._engine.open()
        except Exception as error:  # raised where the database is opened
            self._engine.close()
            self._opened.set_exception(error)
            return
        self._opened.set_result(None)
        ended = False
        while not ended:
            # Wait for something, and take all that is queued by then.
            calls: list[PendingWrite[Any]] = []
            texts: list[str] = []
            while not ended and not ((calls or texts) and self.queue.empty()):
                match self.queue.get():
                    case None:
                        ended = True
                    case str(text):
                        texts.append(text)
                    case call:
                        calls.append(call)
            if texts:  # about earlier commits, so they do not wait for the next one
                self._engine.notify(texts)
            if calls:
                calls.sort(key=lambda call: call.lock_order)
                with metrics.STORE_COMMIT_SECONDS.time():
                    results = self._engine.write(calls)
                metrics.STORE_GROUP_SIZE.observe(len(calls))
                if any(error is None for _, _, error in results):
                    self._committed_at = time.monotonic()
                self._loop.call_soon_threadsafe(_deliver, results)
        self._engine.close()


def _deliver(results: list[WriteResult]) -> None:
    for call, value, error in results:
        if call.done.done():
            if call.on_late_commit is not None and error is None:
                call.on_late_commit(value)
        elif error is None:
            call.done.set_result(value)
        else:
            call.done.set_exception(error)
            call.done.exception()  # it counts as seen: whoever waited for it may have ended


class Complaints:
    """Log failures, but each no more often than every few seconds."""

    def __init__(self) -> None:
        self._logged = Recent[tuple[str, str], float](20)
        self._left_out = 0

    def log(self, operation: str, why: str) -> None:
        now, last = time.monotonic(), self._logged.get((operation, why), -math.inf)
        if now - last < COMPLAINT_SECONDS:
            self._left_out += 1
            return
        self._logged[operation, why] = now
        left_out = {"left_out": self._left_out} if self._left_out else {}
        self._left_out = 0
        logger.error("store failed", operation=operation, cause=why, **left_out)


class Database:
    """An open database, for as long as its ``async with`` lasts."""

    def __init__(
        self, url: str, replica: Replica | None = None, options: ConnectionOptions = DIRECT
    ) -> None:
        self._engine = make_engine(url, replica, options)
        self.lease = self._engine.lease
        self._readers = ThreadPoolExecutor(
            self._engine.readers or 1, thread_name_prefix="store-reader"
        )
        self._complaints = Complaints()
        self.census = Census()
        """Which replicas there were, and what they owned, when ``Ownership.look_and_act``
        (``cluster.ownership``), which sets this, last looked."""
        self.listeners: list[Callable[[str], None]] = []
        """Called in the event loop with each text that a process sends, this one included. An empty
        text means that notifications may have been lost: look at the database itself."""

    async def __aenter__(self) -> Self:
        self._loop = asyncio.get_running_loop()
        self._writer = Writer(self._engine)
        try:
            await self._writer.start()
        except BaseException:
            await self.__aexit__()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        self._engine.stop()
        await asyncio.to_thread(self._readers.shutdown)  # they have connections in use
        await self._writer.stop()

    @property
    def name(self) -> str:
        """The name of the database for people, without a password."""
        return self._engine.name

    # Reading and writing

    async def read(self, fn: OnConnection[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        """Run ``fn`` on a connection of its own, beside the writer."""
        return await self._read(self._engine.patience, fn, *args, **kwargs)

    async def read_much(self, fn: OnConnection[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        """Read as ``read`` does, but wait for as long as the database allows.

        For what a start or a take-over cannot do without, and no client is waiting for.
        """
        return await self._read(None, fn, *args, **kwargs)

    async def _read(
        self, patience: float | None, fn: OnConnection[P, T], /, *args: P.args, **kwargs: P.kwargs
    ) -> T:
        def run(connection: Connection) -> T:
            return fn(connection, *args, **kwargs)

        try:
            if not self._engine.readers:
                return await self.submit(run).done
            async with asyncio.timeout(patience):
                return await self._loop.run_in_executor(self._readers, self._engine.read, run)
        except (TimeoutError, *self._engine.failures) as error:
            raise self._unavailable("loading", error) from None

    def submit(
        self, fn: OnConnection[P, T], /, *args: P.args, **kwargs: P.kwargs
    ) -> PendingWrite[T]:
        """Queue ``fn`` for the writer; ``done`` will hold its result, or the driver's own error."""
        call = PendingWrite(fn, args, kwargs, self._loop.create_future())
        self._writer.queue.put(call)
        return call

    async def write(self, fn: OnConnection[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        """Run ``fn`` in a transaction, and return its result once that is committed.

        Raises StoreUnavailableError if the database is unreachable; then nothing was written.
        Raises UnstorableError if it will never take the values, such as a text with a NUL in
        PostgreSQL.
        """
        return await self._committed(self.submit(fn, *args, **kwargs))

    async def write_in_time(
        self,
        fn: Callable[[Connection], T],
        on_late_commit: Callable[[T], None],
        lock_order: tuple[str, ...] = (),
    ) -> T:
        """Write, but never wait longer than ``Engine.patience``.

        If this raises StoreUnavailableError, or is canceled, ``fn`` may still be committed later;
        ``on_late_commit`` is then called with its result. ``lock_order`` is that of
        ``PendingWrite``.
        """
        call = PendingWrite(fn, (), {}, self._loop.create_future(), on_late_commit, lock_order)
        self._writer.queue.put(call)
        return await self._committed(call)

    async def _committed(self, call: PendingWrite[T], operation: str = "persisting") -> T:
        """Wait for a write that is queued, and return its result: step 5 of its life."""
        patience = self._engine.patience
        try:
            if patience is not None:
                await asyncio.wait([call.done], timeout=patience)
                if not call.done.done():
                    may_have_run = call.abandon()
                    if not may_have_run or call.on_late_commit is not None:
                        call.done.cancel()
                        late = TimeoutError(f"no answer in {patience:.0f} s")
                        raise self._unavailable(operation, late)
            return await call.done
        except asyncio.CancelledError:
            # The result is for ``on_late_commit``; it may have come just now.
            if call.on_late_commit is not None:
                call.done.cancel()
                if not call.done.cancelled() and call.done.exception() is None:
                    call.on_late_commit(call.done.result())
            raise
        except (TypeError, ValueError, OverflowError) as error:  # of the driver, or of an encoder
            raise UnstorableError(cause(error)) from error
        except self._engine.failures as error:
            if isinstance(driver_error(error), self._engine.data_errors):
                raise UnstorableError(cause(error)) from error
            raise self._unavailable(operation, error) from None

    async def write_until_stored(
        self, fn: OnConnection[P, T], /, *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """Write, however long the database is unreachable: for things that have already happened.

        Raises UnstorableError as ``write`` does.
        """
        attempt = 0
        while True:
            try:
                return await self.write(fn, *args, **kwargs)
            except StoreUnavailableError:
                if self.fenced:
                    await asyncio.Future()  # until this task is cancelled: the service is ending
                wait = RETRY_SECONDS[min(attempt, len(RETRY_SECONDS) - 1)]
                logger.debug("not stored, trying again", wait=wait)  # the failure was logged
                attempt += 1
                await asyncio.sleep(wait)

    async def read_until_available(
        self, fn: OnConnection[P, T], /, *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """Read after all writes that are queued, however long the database is unreachable."""
        # In the writer thread, which keeps the order.
        return await self.write_until_stored(fn, *args, **kwargs)

    async def check_writable(self, operation: str = "persisting") -> None:
        """Raise StoreUnavailableError unless a transaction can be committed now."""

        def write_nothing(_: Connection) -> None:
            pass

        await self._committed(self.submit(write_nothing), operation)

    async def check(self) -> None:
        """Raise StoreUnavailableError unless rows can be written, and all tables be read."""

        def touch(connection: Connection) -> None:
            connection.execute(version.update().values(checked=version.c.checked + 1))
            tables = metadata.sorted_tables
            connection.execute(sa.select(*(sa.select(table).exists() for table in tables)))

        await self._committed(self.submit(touch), "checking")

    def _unavailable(self, operation: str, error: Exception) -> StoreUnavailableError:
        metrics.STORE_FAILURES.inc()
        self._complaints.log(operation, cause(error))
        return StoreUnavailableError(
            f"Task store unavailable while {operation} task state; try again", operation=operation
        )

    @property
    def went_away(self) -> DatabaseError:
        """The error of a start during which the database became unavailable."""
        text = "went away during the start; check that it runs, and start again"
        return DatabaseError(f"{self.name} {text}")

    # A process among several

    @property
    def replica(self) -> int | None:
        """The number of this process among those that share the database; None if it is alone."""
        return self._engine.replica

    async def wait_for_lease(self) -> None:
        """Wait until the lease is held; for ever if this process was declared gone."""
        while not self.lease.held:
            with suppress(StoreUnavailableError):
                await self.check_writable("holding")
                continue
            if self.fenced:
                await asyncio.Future()  # until this task is cancelled: the service is ending
            await asyncio.sleep(RETRY_SECONDS[0])

    async def keep_lease(self) -> None:
        """Commit regularly; raise DatabaseError once this process was declared gone."""
        while self.replica is not None:
            await asyncio.sleep(self.lease.beat_seconds)
            try:
                await self.check_writable("holding")
            except StoreUnavailableError:
                if self._engine.fenced is not None:
                    raise self._engine.fenced from None

    @property
    def fenced(self) -> bool:
        """Whether this process was declared gone, and can write nothing any more."""
        return self._engine.fenced is not None

    # Notifications

    def notify(self, text: str, *, alone: bool = False) -> None:
        """Tell all processes to look at something that was committed. It may be lost.

        This process hears its own texts too, a moment later, with those of the others. But while
        there are no other processes, nothing is sent, unless ``alone``: what this one has to do is
        told it by ``dispatch``.

        A text has at most 7,900 bytes, and begins with its kind:
        ``l,NO,NO…`` new entries in the logs of the tasks with these numbers;
        ``t,NUMBER,TASK`` a reader of a task was shown the interrupt of that number;
        ``m`` new mail; ``r,NO`` the reply to a mail; ``u`` replicas or upstreams changed;
        ``w`` a webhook may be due, ``w,NO`` try this one now, ``d,NO`` it was deleted.
        """
        if alone or self.census.has_others:
            self._writer.queue.put(text)

    def dispatch(self, text: str) -> None:
        """Hand a notification to every listener of this process, at once."""
        for call in self.listeners:
            call(text)

    def tell_all(self, text: str) -> None:
        """Hand a notification to every listener of this process at once, and to other processes."""
        self.dispatch(text)
        self.notify(text)

    async def listen(self) -> None:
        """Dispatch the notifications of all processes, until this is cancelled."""
        await self._engine.listen(self)


R = TypeVar("R")


def readable(what: str, rows: Iterable[R], load: Callable[[R], T]) -> Iterator[T]:
    """Make values of the rows of a list; one that is damaged is named in the log, and left out."""
    for row in rows:
        try:
            value = load(row)
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            name = getattr(row, "id", None) or getattr(row, "request_id", None)
            logger.error(f"{what} could not be read", row=name, cause=type(error).__name__)
        else:
            yield value


# How the functions of a transaction and the query modules run SQL


def engine_of(connection: Connection) -> Engine:
    """Return the engine that made a connection."""
    engine: Engine = connection.info[Engine]
    return engine


class Prepared:
    """A statement that runs often: compiled once for a driver, and run by the driver itself.

    SQLAlchemy's own execution costs eight times what SQLite needs for a small statement (730
    against 90 µs for the five statements of an admission).
    """

    def __init__(self, sql: str, inserts: tuple[str, Mapping[str, str]] | None = None) -> None:
        """``inserts`` is the table into which rows are inserted, and the types of its columns, if
        that is worth the fastest way that the database has: see ``Engine.insert_rows``."""
        self.sql = sql
        self._inserts = inserts
        self._compiled: dict[str, str] = {}
        """The SQL by driver; all of them take the values by name."""

    def run(self, connection: Connection, *rows: Mapping[str, object]) -> Any:
        """Run it for each row of values, of which there is at least one.

        It runs in the transaction of the connection. Returns the driver's cursor, from which the
        result for a single row can be fetched.
        """
        pooled = connection.connection
        engine: Engine = pooled.info[Engine]
        cursor = pooled.cursor(**engine.cursor_options)
        if (
            len(rows) > 1
            and self._inserts is not None
            and engine.insert_rows(cursor, *self._inserts, rows)
        ):
            return cursor
        driver = connection.dialect.driver
        sql = self._compiled.get(driver)
        if sql is None:
            compiled = sa.text(self.sql).compile(dialect=connection.dialect)
            sql = self._compiled[driver] = compiled.string
        if len(rows) == 1:
            cursor.execute(sql, rows[0])
        else:
            cursor.executemany(sql, rows)
        return cursor


Increments = Mapping[tuple[str | int, ...], tuple[float, ...]]
"""The amounts to add to the figures of a row, by the key of the row."""
_DEFERRED = "deferred totals"


class Totals(Prepared):
    """A table of figures to which several processes add at the same time.

    A row that is added to is locked until the transaction ends. Therefore all figures are added to
    at the end of a transaction, and in one order: processes never wait for each other in a
    circle, nor for longer than a commit takes.
    """

    def __init__(self, table: str, key: Sequence[str], figures: Sequence[str]) -> None:
        self.table = table
        self.columns = (*key, *figures)
        added = ", ".join(f"{name} = {table}.{name} + excluded.{name}" for name in figures)
        super().__init__(
            f"INSERT INTO {table} ({', '.join(self.columns)}) VALUES (:{', :'.join(self.columns)})"  # noqa: S608 - names of our tables
            f" ON CONFLICT ({', '.join(key)}) DO UPDATE SET {added}"
        )

    def add(self, connection: Connection, changes: Increments) -> None:
        """Add to figures at the end of the transaction."""
        mine = connection.info[_DEFERRED].setdefault(self, {})
        for key, change in changes.items():
            before = mine.get(key, (0,) * len(change))
            mine[key] = tuple(map(sum, zip(before, change, strict=True)))

    def deferred(self, connection: Connection) -> Increments:
        """Return the amounts that this transaction will add; no query sees them yet."""
        return connection.info.get(_DEFERRED, {}).get(self, {})


def run_group(connection: Connection, calls: Sequence[PendingWrite[Any]]) -> list[WriteResult]:
    """Run the functions of a group in the transaction of the connection, and add to the totals."""
    info = connection.info  # a connection that breaks meanwhile has none
    deferred: dict[Totals, Increments] = {}
    info[_DEFERRED] = deferred
    try:
        results = [
            WriteResult(call, call.fn(connection, *call.args, **call.kwargs)) for call in calls
        ]
        for totals in sorted(deferred, key=lambda one: one.table):
            changes = sorted(deferred[totals].items())
            rows = [(*key, *change) for key, change in changes if any(change)]
            values = [dict(zip(totals.columns, row, strict=True)) for row in rows]
            if values:
                totals.run(connection, *values)
    finally:
        del info[_DEFERRED]
    return results
