"""PostgreSQL, 14 and later: one connection that writes, a few that read.

Each process that uses the database has a row in ``replicas``. Every write transaction begins by
moving the commit counter in that row. This one statement is the fence (a process that was declared
gone writes nothing any more) and the heartbeat. It also tells whether a COMMIT took effect whose
connection broke: the next transaction waits for the row until the broken one is over, and then
reads the counter.

``store/replicas.py`` says which process runs what. This module is imported only when a URL names
PostgreSQL, since its driver is optional.
"""

import itertools
import secrets
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from typing import Any, TypeVar, cast

import psycopg
import sqlalchemy as sa
import structlog
from psycopg.conninfo import conninfo_to_dict, make_conninfo
from psycopg.types.numeric import Int8BinaryDumper, Int8Dumper
from sqlalchemy.engine import Connection, RootTransaction
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.pool import NullPool, QueuePool

from opencode_a2a import metrics
from opencode_a2a.clock import SHARED_CLOCK, Lease
from opencode_a2a.databases import kind_of
from opencode_a2a.store import replicas, schema
from opencode_a2a.store.database import Prepared, run_group
from opencode_a2a.store.engine import (
    ABANDONED,
    ConnectionOptions,
    DatabaseError,
    Engine,
    Examined,
    Notifications,
    PendingWrite,
    Replica,
    WriteResult,
    cause,
    driver_error,
)
from opencode_a2a.store.postgres_connections import (
    SPARE_SECONDS,
    BoundedConnection,
    SilentServerError,
)
from opencode_a2a.store.postgres_listener import CHANNEL, Listener
from opencode_a2a.store.replicas import ReplicaRow, UpstreamRow
from opencode_a2a.store.schema import (
    STEPS,
    ForeignTablesError,
    SchemaTooNewError,
    Text,
    check_version,
    migrate,
)

logger = structlog.get_logger(__name__)

T = TypeVar("T")

OLDEST = 14
READERS = 4
TIMEOUTS = {
    "statement_timeout": "10s",
    "lock_timeout": "3s",
    # A process that is frozen inside a transaction must not block the one that takes over.
    "idle_in_transaction_session_timeout": "4s",
    "synchronous_commit": "on",
}
CONNECTION = {
    "connect_timeout": "3",
    "keepalives_idle": "5",
    "keepalives_interval": "2",
    "keepalives_count": "2",
    "tcp_user_timeout": "6000",
    "target_session_attrs": "read-write",
}
"""Parameters of libpq, unless the URL sets them."""
ATTEMPTS = 3
"""How often a group is tried before each of its functions is run in a transaction of its own."""
AGAIN = frozenset({"40001", "40P01", "55P03", "23505"})
"""SQL states after which a group is run again: it conflicted with another transaction, or waited
too long for a lock. After a violated unique key the second run finds the other's row."""
MIGRATION_SECONDS = 3600
"""How long a statement may take that brings the tables up to date."""
STARTING_SECONDS = 15.0
"""How long the first connection waits for a server that is starting."""
ECHO_SECONDS = 2.0
"""How long ``examine`` waits for its own notification."""
RESOLVE_SECONDS = (0.05, 1.0)
"""The first and the longest wait between attempts to find out whether a commit took effect."""
MIGRATION_LOCK = 72013
"""The advisory lock of a start: without it, most of several simultaneous first starts fail."""

_FENCE = (
    "UPDATE replicas SET commits = %s, seen = clock_timestamp()"
    " WHERE no = %s AND key = %s AND commits = %s AND gone IS NULL"
    " RETURNING (extract(epoch FROM clock_timestamp()) * 1000)::bigint"
)
_TIME = "SELECT (extract(epoch FROM clock_timestamp()) * 1000)::bigint"
# Nobody waits until it is on disk.
_NOTIFY = (
    "SELECT set_config('synchronous_commit', 'off', true), "  # noqa: S608 - a constant
    f"pg_notify({CHANNEL}, text) FROM unnest(%s::text[]) AS text"
)
_LIMIT = "SELECT " + ", ".join(
    f"set_config('{name}', '{value}', true)" for name, value in TIMEOUTS.items()
)
_GRANT = "as its owner run GRANT USAGE, CREATE ON SCHEMA public TO <role> (or the schema in use)"
_NAMESAKE = "SELECT no FROM replicas WHERE name = %s AND no > %s AND gone IS NULL LIMIT 1"
_OWN_ROW = "SELECT commits, gone IS NOT NULL FROM replicas WHERE no = %s AND key = %s FOR UPDATE"
_LOCK_KEY = "hashtextextended(current_schema() || '/' || :name, 0)"
_LOCK = Prepared(f"SELECT pg_advisory_xact_lock({_LOCK_KEY})")
_TRY_LOCK = Prepared(f"SELECT pg_try_advisory_xact_lock({_LOCK_KEY})")


class FencedError(DatabaseError):
    """This process was declared gone, or the database lost what it had committed."""


class _InDoubtError(Exception):
    """The connection broke during COMMIT; the results are valid if it took effect."""

    def __init__(self, number: int, results: list[WriteResult], cause: Exception) -> None:
        super().__init__(number)
        self.number = number
        self.results = results
        self.cause = cause


class _AbandonedError(Exception):
    """The caller of one of the functions has given up; the others are run without it."""


# An update then stays on its page.
schema.replicas.dialect_options["postgresql"]["with"] = {"fillfactor": 50}


@compiles(Text, "postgresql")
def _text(*_: object, **_options: object) -> str:
    # Compared by its bytes: the order of a language changes with the system's library, and an
    # index that was built with another order finds nothing.
    return 'VARCHAR COLLATE "C"'


class Postgres(Engine):
    kind = kind_of("postgresql://")
    failures = (SQLAlchemyError, psycopg.Error, FencedError)
    data_errors = (psycopg.DataError, psycopg.IntegrityError, psycopg.errors.ProgramLimitExceeded)
    readers = READERS
    patience = 4.0
    spelling = {  # noqa: RUF012 - as in the base class
        "BLOB": "BYTEA",
        "VARCHAR": 'VARCHAR COLLATE "C"',
        "INTEGER PRIMARY KEY AUTOINCREMENT": "BIGSERIAL PRIMARY KEY",
        ") WITHOUT ROWID": ")",
    }
    cursor_options = {"binary": True}  # noqa: RUF012 - as in the base class
    has_unnest = True
    longest_key = 512  # the row of an index ends at 2.7 kB, and may have several of them

    def __init__(self, url: str, replica: Replica, options: ConnectionOptions) -> None:
        self._replica = replica
        self.lease = Lease(replica.lease_seconds)
        self._options = options
        self._conninfo = _conninfo(url, pooled=options.pooled)
        self._listening = None if options.pooled else self._conninfo
        if options.listen_url is not None:
            self._listening = _conninfo(options.listen_url, "A2A_TASK_STORE_LISTEN_URL")
        self.name = _shown(self._conninfo)
        self._commits = 0
        """How often this process has committed, as in its row."""
        self._key = secrets.token_hex(16)
        """Tells its row from that of another process: after a failover to a server that lost rows,
        the number of this one is given again."""
        self._connection: Connection | None = None
        self._stopped = threading.Event()
        self._engine = sa.create_engine(
            "postgresql+psycopg://", creator=self._connect, poolclass=NullPool
        )
        self._read_engine = sa.create_engine(
            "postgresql+psycopg://",
            creator=self._connect,
            poolclass=QueuePool,
            pool_size=READERS,
            max_overflow=0,
            # A statement then takes one round trip, not three; but in a pooled connection nothing
            # can be set that lasts longer than a transaction.
            isolation_level="READ COMMITTED" if options.pooled else "AUTOCOMMIT",
        )
        self.mark_connections(self._engine, self._read_engine)

    # Opening and closing

    def open(self) -> None:
        try:
            connection = self._connected()
            self._check_version(connection)
            with self._begin(connection):
                # A large database takes its time, and other processes that start wait for it.
                run, session = connection.exec_driver_sql, _session(connection)
                usual, session.limit = session.limit, MIGRATION_SECONDS + SPARE_SECONDS
                run(f"SET LOCAL statement_timeout = '{MIGRATION_SECONDS}s'")
                run("SET LOCAL lock_timeout = '10min'")
                run("SET LOCAL idle_in_transaction_session_timeout = 0")
                run(f"SELECT pg_advisory_xact_lock({MIGRATION_LOCK})")
                migrate(connection, self.spelling)
                session.limit = usual
            self._register(connection)
            asked = time.monotonic_ns()
            with self._begin(connection):
                SHARED_CLOCK.follow(connection.exec_driver_sql(_TIME).scalar_one(), asked)
        except (SchemaTooNewError, ForeignTablesError) as error:
            raise DatabaseError(f"{self.name}: {error}", status=2) from None
        except self.failures as error:
            raise self._refused(*_explained(error)) from None

    def examine(self) -> Examined:
        live, upstreams = list[ReplicaRow](), list[UpstreamRow]()
        try:
            with self._engine.connect() as connection, self._begin(connection):
                self._check_version(connection)
                names = [name for name in TIMEOUTS if name.endswith("timeout")]
                shown = {n: connection.exec_driver_sql(f"SHOW {n}").scalar() for n in names}
                version = connection.exec_driver_sql("SHOW server_version").scalar()
                may_create = connection.exec_driver_sql(
                    "SELECT has_schema_privilege(current_schema(), 'CREATE')"
                ).scalar()
                at = connection.exec_driver_sql(_TIME).scalar_one()
                ahead = at / 1000 - time.time()
                known = check_version(connection)
                ours = sa.inspect(connection).has_table("schema_version")
                if known == len(STEPS):
                    live, upstreams = replicas.live(connection), replicas.upstreams(connection)
            hears = self._listening and self._hears(self._listening)
        except (SchemaTooNewError, ForeignTablesError) as error:
            raise DatabaseError(f"{self.name}: {error}", status=2) from None
        except self.failures as error:
            raise self._refused(*_explained(error)) from None
        if not may_create and not ours:
            raise self._refused("the role may not create tables", _GRANT)
        timeouts = ", ".join(f"{name} {value}" for name, value in shown.items())
        about = f"{self.name}, PostgreSQL {version}; {timeouts}"
        return Examined(about, ahead, bool(hears), live, upstreams)

    def _hears(self, listening: str) -> bool:
        """Whether a notification reaches a connection that listens."""
        channel = f"opencode_a2a_{secrets.token_hex(8)}"  # which nobody else uses
        with BoundedConnection.connect(listening, autocommit=True) as listener:
            listener.execute(f"LISTEN {channel}".encode())
            with BoundedConnection.connect(self._conninfo, autocommit=True) as other:
                other.execute("SELECT pg_notify(%s, '')", (channel,))
            return any(listener.notifies(timeout=ECHO_SECONDS, stop_after=1))

    def _check_version(self, connection: Connection) -> None:
        version = _session(connection).info.server_version
        if version < OLDEST * 10_000:
            raise self._refused(
                f"it is PostgreSQL {version // 10_000}", f"upgrade it to {OLDEST} or later"
            )

    def _refused(self, why: str, remedy: str) -> DatabaseError:
        return DatabaseError(f"cannot use {self.name}: {why}; {remedy}", status=2)

    def _register(self, connection: Connection) -> None:
        """Add the row of this process, and declare gone an earlier process of the same name.

        After a restart that is the predecessor (HOSTNAME:PORT). If it still lives, as with a chosen
        A2A_REPLICA_NAME or a recreated pod, its next commit is refused, and it ends.
        """
        mine = self._replica
        began = time.monotonic()
        with self._begin(connection):
            run = connection.exec_driver_sql
            # A predecessor that is frozen inside a transaction holds the lock until the database
            # ends that transaction.
            run("SET LOCAL lock_timeout = '8s'")
            run(f"SELECT pg_advisory_xact_lock({MIGRATION_LOCK})")
            run(
                "UPDATE replicas SET gone = clock_timestamp() WHERE gone IS NULL AND name = %s",
                (mine.name,),
            )
            new = (
                "INSERT INTO replicas"
                " (name, version, format, key, lease, claims, started, seen, commits) VALUES"
                " (%s, %s, %s, %s, %s, 1, clock_timestamp(), clock_timestamp(), 0) RETURNING no"
            )
            row = mine.name, mine.version, mine.mail_format, self._key, mine.lease_seconds
            self.replica = run(new, row).scalar_one()
        self.lease.renew(began)

    @property
    def _identity(self) -> tuple[int | None, str]:
        return self.replica, self._key

    def stop(self) -> None:
        self._stopped.set()

    def close(self) -> None:
        if self._connection is not None and self.replica:
            with suppress(*self.failures), self._begin(self._connection):
                self._connection.exec_driver_sql(
                    "UPDATE replicas SET gone = clock_timestamp() WHERE no = %s AND key = %s",
                    self._identity,
                )
        self._drop()
        self._read_engine.dispose()
        SHARED_CLOCK.reset()

    # Connections

    def _connect(self) -> BoundedConnection:
        deadline = time.monotonic() + STARTING_SECONDS
        while True:
            try:
                # A statement that is prepared in one connection of a pooler is unknown in the next.
                connection = BoundedConnection.connect(
                    self._conninfo, prepare_threshold=None if self._options.pooled else 5
                )
                if not self._options.pooled:  # else every transaction sets ours
                    connection.set_limit()
            except psycopg.OperationalError as error:
                # The server is there, and reads its log after a crash. A start waits for it;
                # later it is the callers who wait.
                starting = "the database system is " in str(error) and not self.replica
                if not starting or time.monotonic() > deadline or self._stopped.wait(0.2):
                    raise
            else:
                # Send every integer as a bigint, so that a statement has one plan.
                connection.adapters.register_dumper(int, Int8Dumper)
                connection.adapters.register_dumper(int, Int8BinaryDumper)
                return connection

    def _connected(self) -> Connection:
        if self._connection is None:
            self._connection = self._engine.connect()
            if self._commits:
                metrics.STORE_RECONNECTS.inc()
        return self._connection

    def _begin(self, connection: Connection) -> RootTransaction:
        """Begin a transaction with our timeouts."""
        transaction = connection.begin()
        if self._options.pooled:  # else the connection has them
            try:
                connection.exec_driver_sql(_LIMIT)
            except BaseException:
                with suppress(*self.failures):
                    transaction.rollback()
                raise
        return transaction

    def _drop(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            with suppress(*self.failures):
                connection.invalidate()
                connection.close()

    # Reading

    def read(self, fn: Callable[[Connection], T]) -> T:
        for attempt in itertools.count():
            with self._read_engine.connect() as connection:
                try:
                    if not self._options.pooled:
                        return fn(connection)
                    with self._begin(connection):
                        return fn(connection)
                except self.failures as error:
                    if isinstance(driver_error(error), SilentServerError):
                        # The others of the pool may hang too, and nobody should wait for each.
                        self._read_engine.dispose()
                        raise
                    # All idle connections of the pool may have broken at once.
                    if not _broken(connection) or attempt >= READERS:
                        raise
                    connection.invalidate()
        raise AssertionError  # not reached

    # Writing

    def write(self, calls: list[PendingWrite[Any]]) -> list[WriteResult]:
        results = list[WriteResult]()
        error: Exception = self.fenced or ABANDONED
        for _ in range(ATTEMPTS if self.fenced is None else 0):
            begun = [(call, call.begin()) for call in calls]
            results += [WriteResult(call, None, ABANDONED) for call, wanted in begun if not wanted]
            calls = [call for call, wanted in begun if wanted]
            if not calls:
                return results
            try:
                return results + self._transact(self._connected(), calls)
            except _InDoubtError as doubt:
                try:
                    committed = self._took_effect(doubt.number)
                    metrics.STORE_COMMITS_RESOLVED.labels("yes" if committed else "no").inc()
                    if committed:
                        return results + doubt.results
                except self.failures as raised:
                    error = raised
                    break
                error = doubt.cause
            except _AbandonedError:
                error = ABANDONED
            except Exception as raised:  # a call may raise anything
                error = raised
                if self._connection is None:
                    break  # the database is away
                if _broken(self._connection):
                    self._drop()
                elif _state(error) not in AGAIN:
                    break
        if len(calls) == 1 or self._connection is None or self.fenced is not None:
            return results + [WriteResult(call, None, error) for call in calls]
        # One of them is the cause, and must not harm the others.
        return results + [result for call in calls for result in self.write([call])]

    def _transact(
        self, connection: Connection, calls: list[PendingWrite[Any]]
    ) -> list[WriteResult]:
        number, began = self._commits + 1, time.monotonic()
        transaction = self._begin(connection)
        try:
            session, asked = _session(connection), time.monotonic_ns()
            fence = session.execute(
                _FENCE, (number, *self._identity, number - 1), prepare=not self._options.pooled
            )
            if (passed := fence.fetchone()) is None:
                raise self._fenced(connection)
            SHARED_CLOCK.follow(passed[0], asked)
            results = run_group(connection, calls)
            if any(call.abandoned for call in calls):
                # It took long. A caller that was told that nothing is written should be right.
                raise _AbandonedError
        except BaseException:
            with suppress(*self.failures):
                transaction.rollback()
            raise
        try:
            transaction.commit()
        except self.failures as error:
            if not _broken(connection):
                raise  # the database has refused it
            self._drop()
            raise _InDoubtError(number, results, error) from None
        self._commits = number
        self.lease.renew(began)
        return results

    def notify(self, texts: list[str]) -> None:
        why = ""
        for _ in range(2):  # an idle connection may be broken
            try:
                session = _session(self._connected())
                session.autocommit = True  # one round trip, not three
                session.execute(_NOTIFY, (texts,))
                session.autocommit = False
                return
            except self.failures as error:
                self._drop()
                why = cause(error)
        logger.warning("notifications not sent", cause=why)

    async def listen(self, database: Notifications) -> None:
        await Listener(self._listening, self._options.poll_seconds, database).run()

    def _fenced(self, connection: Connection) -> FencedError:
        row = connection.exec_driver_sql(_OWN_ROW, self._identity).one_or_none()
        if row is None or row[1]:
            mine = (self._replica.name, self.replica)
            if connection.exec_driver_sql(_NAMESAKE, mine).one_or_none() is not None:
                why = f"another replica is called {self._replica.name}"
                remedy = "give each its own A2A_REPLICA_NAME"
            elif row is None:
                why, remedy = "it no longer knows this process", "restart the service"
            else:
                why = "this replica was silent for too long and counts as gone"
                remedy = "restart it; if that happens often, raise A2A_REPLICA_LEASE_SECONDS"
        else:
            why = f"it has lost commits of this process (it has {row[0]} of {self._commits})"
            remedy = "restart the service"
        metrics.FENCED.inc()
        self.fenced = FencedError(f"cannot go on with {self.name}: {why}; {remedy}")
        return self.fenced

    def _took_effect(self, number: int) -> bool:
        """Whether a commit took effect; waits for the database as long as it is unreachable."""
        wait, longest = RESOLVE_SECONDS
        while True:
            try:
                connection = self._connected()
                # This waits until the transaction in question is over.
                with self._begin(connection):
                    row = connection.exec_driver_sql(_OWN_ROW, self._identity).one_or_none()
                    if row is not None and row[0] == number:
                        self._commits = number
                        return True
                    if row is None or row[0] != number - 1:
                        raise self._fenced(connection)
                    return False
            except FencedError:
                raise
            except self.failures:
                self._drop()
                if self._stopped.wait(wait):
                    raise
                wait = min(2 * wait, longest)

    # What differs from other databases

    def insert_rows(
        self, cursor: Any, table: str, types: Mapping[str, str], rows: Iterable[Mapping[str, Any]]
    ) -> bool:
        # 50 rows of a log: 1.8 ms, 0.33 of it here; by a statement for each 6.0 and 0.98.
        with cursor.copy(f"COPY {table} ({', '.join(types)}) FROM STDIN (FORMAT BINARY)") as copy:
            copy.set_types(list(types.values()))
            for row in rows:
                copy.write_row([row[name] for name in types])
        return True

    def continue_numbering(self, connection: Connection, table: sa.Table) -> None:
        if table.autoincrement_column is not None:
            last = sa.select(sa.func.coalesce(sa.func.max(table.c.no), 0) + 1)
            sequence = sa.func.pg_get_serial_sequence(table.name, "no")
            connection.execute(sa.select(sa.func.setval(sequence, last.scalar_subquery(), False)))

    def lock(self, connection: Connection, name: str) -> None:
        _LOCK.run(connection, {"name": name})

    def try_lock(self, connection: Connection, name: str) -> bool:
        return bool(_TRY_LOCK.run(connection, {"name": name}).fetchone()[0])


def _conninfo(
    url: str, variable: str = "A2A_TASK_STORE_DATABASE_URL", *, pooled: bool = False
) -> str:
    try:
        given = conninfo_to_dict(url)
    except psycopg.ProgrammingError as error:
        # The text of libpq may quote the URL, and the password in it.
        said = cause(error)
        why = said if said.startswith("invalid URI query parameter") else "it cannot be parsed"
        raise DatabaseError(
            f"{variable} is not a URL of PostgreSQL: {why}; write it like "
            "postgresql://user@host:5432/database, with special characters of the password as %XX",
            status=2,
        ) from None
    known = {"application_name": "opencode-a2a", **CONNECTION, **given}
    if not pooled:  # a pooler refuses options
        ours = " ".join(f"-c {name}={value}" for name, value in TIMEOUTS.items())
        known["options"] = f"{ours} {given.get('options') or ''}".strip()
    return make_conninfo("", **known)


def _shown(conninfo: str) -> str:
    """Return a name of the database for people, without its password."""
    known = conninfo_to_dict(conninfo)
    user = f"{known['user']}@" if known.get("user") else ""
    hosts = str(known.get("host") or known.get("hostaddr") or "").split(",")
    ports = str(known.get("port") or "").split(",")
    places = [
        f"{host}:{port}" if port else host
        for host, port in zip(hosts, itertools.cycle(ports), strict=False)
    ]
    return f"postgresql://{user}{','.join(places)}/{known.get('dbname') or ''}"


def _state(error: Exception) -> str | None:
    raised = driver_error(error)
    return raised.sqlstate if isinstance(raised, psycopg.Error) else None


def _session(connection: Connection) -> BoundedConnection:
    return cast("BoundedConnection", connection.connection.driver_connection)


def _broken(connection: Connection) -> bool:
    return connection.invalidated or _session(connection).closed


def _explained(error: Exception) -> tuple[str, str]:
    """Return the reason why a database cannot be used, and the remedy."""
    said = cause(error).removeprefix("connection failed: ")
    fatal = said.partition("FATAL:  ")[2]
    match _state(error):
        case "42501":
            remedy = _GRANT
        case "3F000":
            remedy = "create the schema that search_path names, or name another"
        case _ if "authentication failed" in said or "no password supplied" in said:
            remedy = "check the user name and the password in A2A_TASK_STORE_DATABASE_URL"
        case _ if "unsupported startup parameter" in said:
            remedy = "if it is a pooler, set A2A_TASK_STORE_POOLED, and no options in the URL"
        case _ if fatal.startswith("database ") and fatal.endswith("does not exist"):
            remedy = "create it, or name another in A2A_TASK_STORE_DATABASE_URL"
        case _:
            remedy = "check that it runs, and A2A_TASK_STORE_DATABASE_URL"
    return fatal or said, remedy
