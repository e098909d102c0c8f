"""PostgreSQL as the database: what is refused at the start, and who may use it."""

import asyncio
import gc
import os
import random
import subprocess
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Generator
from contextlib import AsyncExitStack, suppress
from pathlib import Path
from signal import Signals

import psycopg
import pytest
import sqlalchemy as sa
from psycopg import sql
from sqlalchemy.engine import Connection
from structlog.testing import capture_logs

from opencode_a2a.errors import StoreUnavailableError
from opencode_a2a.metrics import REGISTRY
from opencode_a2a.store import callers, replicas, schema
from opencode_a2a.store import tasks as task_rows
from opencode_a2a.store.callers import Spent
from opencode_a2a.store.database import Database, engine_of, make_engine
from opencode_a2a.store.engine import DatabaseError, Replica
from opencode_a2a.store.replicas import LastOwner, UpstreamRow
from opencode_a2a.store.tasks import TaskRow
from tests.support import stores
from tests.support.ports import free_port
from tests.support.postgres import PASSWORD, ROLE, PostgresServer
from tests.support.program import Program, run
from tests.support.relay import Cut, Relay

QUIET = {"OPENCODE_BASE_URL": "http://127.0.0.1:1"}
"""No OpenCode is there, and none is needed."""


@pytest.fixture
def server() -> PostgresServer:
    return stores.server()


@pytest.fixture
def url(tmp_path: Path) -> Generator[str]:
    with stores.using("postgresql"):
        yield stores.url(tmp_path)


def variables(url: str) -> dict[str, str]:
    return {
        "A2A_TASK_STORE_DATABASE_URL": url,
        "A2A_BEARER_TOKEN": "x" * 32,
        "A2A_PORT": str(free_port()),
        "OPENCODE_MANAGED_SERVER": "false",
        "HOME": "/nowhere",
    }


async def refusal(url: str) -> str:
    """Return why `serve` does not start, after checking that it is one line and status 2."""
    status, output = await run("serve", **variables(url))
    assert status == 2, output
    [line] = output.splitlines()
    assert PASSWORD not in line
    return line


@pytest.mark.parametrize("statement", [b"INSERT INTO upstreams", b"INSERT INTO sign_ins"])
async def test_a_database_that_goes_away_during_the_start_is_one_line(
    url: str, statement: bytes
) -> None:
    def look(data: bytes) -> None:
        if statement in data:  # after it was opened, and found in order
            relay.down = True
            relay.break_off()

    async with Relay(stores.server().port, forth=look) as relay:
        status, output = await run("serve", **variables(relay.url(url)))

    assert relay.down
    assert status == 1, output
    line = output.splitlines()[-1]
    assert line.startswith("opencode-a2a: postgresql://")
    assert line.endswith(" went away during the start; check that it runs, and start again")
    assert PASSWORD not in output
    assert "Traceback" not in output


async def test_a_wrong_password_is_told_without_the_password(url: str) -> None:
    wrong = url.replace("a%20pass", "another%20pass")
    assert wrong != url

    line = await refusal(wrong)

    assert line.endswith(
        f'/postgres: password authentication failed for user "{ROLE}"; check the user name and the '
        "password in A2A_TASK_STORE_DATABASE_URL"
    )
    assert "another" not in line


async def test_a_server_that_is_not_there_is_told_with_the_remedy() -> None:
    line = await refusal("postgresql://somebody@127.0.0.1:1/tasks")

    assert line == (
        "opencode-a2a: cannot use postgresql://somebody@127.0.0.1:1/tasks: connection to server at "
        '"127.0.0.1", port 1 failed: Connection refused; check that it runs, and '
        "A2A_TASK_STORE_DATABASE_URL"
    )


async def test_a_database_that_does_not_exist_is_told_with_the_remedy(url: str) -> None:
    line = await refusal(url.replace("/postgres?", "/missing?"))

    assert line.endswith(
        'database "missing" does not exist; create it, or name another in '
        "A2A_TASK_STORE_DATABASE_URL"
    )


@pytest.mark.parametrize(
    "wrong",
    ["postgresql://some:secret%body@host/db", "postgresql://u:secret@[::1/db"],
)
async def test_a_url_that_cannot_be_read_is_not_repeated(wrong: str) -> None:
    line = await refusal(wrong)

    assert "is not a URL of PostgreSQL" in line
    assert "secret" not in line


async def test_an_unknown_parameter_is_named(url: str) -> None:
    line = await refusal(f"{url}&sslmod=require")

    assert '"sslmod"' in line


async def test_another_kind_of_database_is_refused() -> None:
    line = await refusal("mysql://root:secret@localhost/tasks")

    assert line.startswith("A2A_TASK_STORE_DATABASE_URL: should be a URL of SQLite, such as ")
    assert "postgresql://user@host:5432/database" in line


async def test_a_role_that_may_not_create_tables_is_told_what_to_grant(
    server: PostgresServer, url: str
) -> None:
    with server.admin() as admin:
        schema_name = sql.Identifier(f"closed_{os.getpid()}")
        admin.execute(sql.SQL("CREATE SCHEMA {}").format(schema_name))
        admin.execute(
            sql.SQL("GRANT USAGE ON SCHEMA {} TO {}").format(schema_name, sql.Identifier(ROLE))
        )
    closed = url.partition("options=")[0] + f"options=-csearch_path%3Dclosed_{os.getpid()}"

    line = await refusal(closed)
    with pytest.raises(DatabaseError, match="GRANT USAGE, CREATE ON SCHEMA"):
        make_engine(closed).examine()

    assert "permission denied for schema closed_" in line
    assert "GRANT USAGE, CREATE ON SCHEMA" in line


async def test_a_version_below_14_is_refused(server: PostgresServer, url: str) -> None:
    def older(data: bytes) -> bytes:
        return data.replace(b"server_version\x0018.4\x00", b"server_version\x0013.9\x00")

    async with Relay(server.port, back=older) as relay:
        with pytest.raises(DatabaseError) as caught:
            async with Database(relay.url(url)):
                pass

    assert str(caught.value).endswith("it is PostgreSQL 13; upgrade it to 14 or later")
    assert caught.value.status == 2


async def test_a_pooler_that_was_not_announced_is_told_with_the_remedy(url: str) -> None:
    async def refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer as pgbouncer does."""
        while b"options" not in await reader.read(1000):
            writer.write(b"N")  # no encryption
        fields = b"SFATAL\0C08P01\0Munsupported startup parameter: options\0\0"
        writer.write(b"E" + (len(fields) + 4).to_bytes(4) + fields)
        await writer.drain()
        writer.close()

    async with await asyncio.start_server(refuse, "127.0.0.1", 0) as pooler:
        line = await refusal(f"postgresql://u@127.0.0.1:{pooler.sockets[0].getsockname()[1]}/tasks")

    assert line.endswith(
        "unsupported startup parameter: options; if it is a pooler, set A2A_TASK_STORE_POOLED, and "
        "no options in the URL"
    )


async def test_a_url_to_listen_at_that_cannot_be_read_is_refused(url: str) -> None:
    status, output = await run(
        "serve", **variables(url), A2A_TASK_STORE_LISTEN_URL="postgresql://u:secret@[::1/db"
    )

    assert status == 2
    assert "A2A_TASK_STORE_LISTEN_URL is not a URL of PostgreSQL" in output
    assert "secret" not in output


async def test_a_missing_driver_is_told_with_the_command_that_installs_it(url: str) -> None:
    program = (
        "import sys; sys.modules['psycopg'] = None; from opencode_a2a.cli import main; "
        "sys.argv = ['opencode-a2a', 'serve']; main()"
    )
    done = await asyncio.to_thread(
        subprocess.run,
        [sys.executable, "-c", program],
        env=variables(url),
        capture_output=True,
        text=True,
        check=False,
    )

    assert (done.returncode, done.stderr) == (
        2,
        "opencode-a2a: PostgreSQL needs a driver that is not installed; install this program with "
        "its extra `postgres`, or run `pip install 'psycopg[binary]'`\n",
    )


async def test_tables_of_another_program_are_left_alone(server: PostgresServer, url: str) -> None:
    with psycopg.connect(url) as other:
        other.execute("CREATE TABLE tasks (id integer)")

    line = await refusal(url)

    assert "the table tasks was not made by this program" in line
    with psycopg.connect(url) as other:
        assert other.execute("SELECT to_regclass('schema_version')").fetchone() == (None,)


async def test_doctor_tells_version_and_timeouts_and_changes_nothing(url: str) -> None:
    _, output = await run("doctor", **variables(url))

    [line] = [line for line in output.splitlines() if " database:" in line]
    assert line.startswith(f"ok      database: postgresql://{ROLE}@127.0.0.1:")
    assert line.endswith(
        ", PostgreSQL 18.4; statement_timeout 10s, lock_timeout 3s, "
        "idle_in_transaction_session_timeout 4s"
    )
    assert "ok      notifications: replicas hear each other" in output
    assert "ok      replicas: none runs" in output
    with psycopg.connect(url) as other:
        assert other.execute("SELECT to_regclass('schema_version')").fetchone() == (None,)


# A connection that breaks


def row(number: int) -> TaskRow:
    return TaskRow(f"task {number}", "alice", "context", "submitted", 1, 1, b"{}")


def add(number: int) -> Callable[[Connection], int]:
    return lambda connection: task_rows.add_task(connection, row(number))


async def stored(database: Database) -> dict[str, int]:
    """Return the numbers of the tasks by their ids, after checking that the tallies are right."""

    def read(connection: Connection) -> list[TaskRow]:
        found, total = task_rows.page(connection, "alice", after=None, most=1000, brief=True)
        assert len(found) == total
        return found

    found = await database.read(read)
    numbers = {row.id: row.no for row in found}
    assert len(numbers) == len(found)
    return numbers


@pytest.mark.parametrize("cut", Cut)
async def test_a_commit_whose_connection_is_cut_counts_once(
    server: PostgresServer, url: str, cut: Cut
) -> None:
    async with Relay(server.port) as relay, Database(relay.url(url)) as database:
        numbers = dict[str, int]()
        for first in range(0, 12, 4):
            relay.cut = cut
            together = range(first, first + 4)
            found = await asyncio.gather(*(database.write(add(number)) for number in together))
            numbers |= {f"task {n}": no for n, no in zip(together, found, strict=True)}

        assert relay.cuts == 3
        assert await stored(database) == numbers


async def test_cuts_at_random_moments_neither_lose_nor_repeat(
    server: PostgresServer, url: str
) -> None:
    chance = random.Random(11)  # noqa: S311 - no secret
    async with Relay(server.port) as relay, Database(relay.url(url)) as database:
        numbers = dict[str, int]()

        async def write(number: int) -> None:
            await asyncio.sleep(chance.uniform(0, 2))
            if chance.random() < 0.3:
                relay.cut = chance.choice([Cut.BEFORE, Cut.AFTER])
            # What fails for good, after too many cuts, was not written.
            with suppress(StoreUnavailableError):
                numbers[f"task {number}"] = await database.write(add(number))

        await asyncio.gather(*(write(number) for number in range(60)))

        assert relay.cuts > 3
        assert await stored(database) == numbers


async def test_a_commit_in_doubt_is_told_late_when_the_database_is_back(
    server: PostgresServer, url: str
) -> None:
    loop = asyncio.get_running_loop()
    told: asyncio.Future[int] = loop.create_future()
    async with Relay(server.port) as relay, Database(relay.url(url)) as database:
        await database.write(add(1))
        relay.cut, began = Cut.AFTER, loop.time()
        relay.on_cut = server.kill
        with pytest.raises(StoreUnavailableError):
            await database.write_in_time(add(2), told.set_result)
        assert loop.time() - began < 5
        with pytest.raises(StoreUnavailableError):
            await database.write(add(3))

        await asyncio.to_thread(server.start)
        async with asyncio.timeout(60):
            number = await told

        assert await stored(database) == {"task 1": 1, "task 2": number}


async def test_a_restart_of_the_idle_database_is_not_noticed(
    server: PostgresServer, url: str
) -> None:
    async with Database(url) as database:
        await asyncio.gather(*(database.read(task_rows.any_task) for _ in range(20)))
        await asyncio.to_thread(server.kill)
        await asyncio.to_thread(server.start)

        assert await database.write(add(1)) == 1
        assert await stored(database) == {"task 1": 1}


async def test_a_process_that_is_frozen_inside_a_transaction_is_ended(
    server: PostgresServer, url: str
) -> None:
    tries = list[int]()

    def frozen_until_it_is_gone(session: int) -> None:
        query, deadline = "SELECT FROM pg_stat_activity WHERE pid = %s", time.monotonic() + 60
        with server.admin() as admin:
            while admin.execute(query, (session,)).rowcount:
                assert time.monotonic() < deadline, "the database did not end the session"
                time.sleep(0.02)

    def freeze(connection: Connection) -> int:
        session = connection.scalar(sa.func.pg_backend_pid())
        tries.append(add(1)(connection))
        if len(tries) == 1:
            frozen_until_it_is_gone(session)
        return task_rows.add_task(connection, row(2))

    frozen = url.replace(
        "search_path", "idle_in_transaction_session_timeout%3D300%20-c%20search_path"
    )
    async with Database(frozen) as database:
        await database.write(freeze)

        assert len(tries) == 2
        assert set(await stored(database)) == {"task 1", "task 2"}


# Several writers


async def waiting(server: PostgresServer) -> None:
    """Wait until a session waits for what another has locked."""
    query = "SELECT FROM pg_stat_activity WHERE wait_event_type = 'Lock'"
    async with asyncio.timeout(60):
        with server.admin() as admin:
            while not admin.execute(query).rowcount:  # noqa: ASYNC110 - no event
                await asyncio.sleep(0.01)


async def test_figures_are_added_to_in_one_order_so_that_nobody_waits_in_a_circle(
    server: PostgresServer, url: str
) -> None:
    tries = list[str]()

    def spend(connection: Connection) -> None:
        for principal in ("bob", "alice"):
            tries.append(principal)
            task_rows.add_task(connection, row(len(tries))._replace(principal=principal))
            callers.add_spending(connection, {(principal, 1): Spent(0.5, 10)})

    async with Database(url) as database:
        await database.write(spend)
        for table in ("tallies", "spending"):
            touch = sql.SQL("UPDATE {} SET principal = principal WHERE principal = %s").format(
                sql.Identifier(table)
            )
            with psycopg.connect(url) as other:
                other.execute(touch, ("alice",))
                writing = asyncio.create_task(database.write(spend))
                await waiting(server)
                other.execute(touch, ("bob",))
            await writing

        assert tries == ["bob", "alice"] * 3
        assert await database.read(task_rows.tally, ["submitted"], "bob") == 3
        assert await database.read(task_rows.tally, ["submitted"]) == 6
        assert await database.read(callers.spending_of, "bob", 1) == Spent(1.5, 30)


async def test_principals_without_open_tasks_cost_nothing_where_open_tasks_are_counted(
    url: str,
) -> None:
    fill = (
        "INSERT INTO tallies SELECT 'p' || i, state, n FROM generate_series(1, 3000) i,"
        " (VALUES ('working', 0), ('completed', 7)) AS ended(state, n)"
    )
    looked_at = (
        "SELECT seq_tup_read + coalesce(idx_tup_fetch, 0) FROM pg_stat_xact_user_tables"
        " WHERE relid = 'tallies'::regclass"
    )

    def count(connection: Connection) -> tuple[int, int]:
        found = task_rows.tally(connection, ["submitted", "working"])
        return found, connection.exec_driver_sql(looked_at).scalar_one()

    async with Database(url) as database:
        await database.write(add(1))
        await database.write(lambda c: c.exec_driver_sql(fill).close())
        found, rows = await database.write(count)

    assert found == 1
    assert rows < 10


@pytest.mark.both_databases
async def test_a_budget_counts_what_the_same_transaction_spends(tmp_path: Path) -> None:
    def spend(connection: Connection) -> Spent:
        callers.add_spending(connection, {("alice", 1): Spent(0.5, 10)})
        return callers.spending_of(connection, "alice", 1)

    async with Database(stores.url(tmp_path)) as database:
        assert await database.write(spend) == Spent(0.5, 10)
        assert await database.write(spend) == Spent(1.0, 20)
        assert await database.read(callers.spending_of, "alice", 1) == Spent(1.0, 20)


async def test_a_transaction_counts_what_it_adds_itself(url: str) -> None:
    def admit(number: int) -> Callable[[Connection], int]:
        def write(connection: Connection) -> int:
            task_rows.add_task(connection, row(number))
            return task_rows.tally(connection, ["submitted", "working"], "alice")

        return write

    def fail(connection: Connection) -> None:
        admit(9)(connection)
        raise ValueError("no more")

    async with Database(url) as database:
        failed = database.submit(fail)
        counts = await asyncio.gather(*(database.write(admit(number)) for number in range(1, 5)))

        with pytest.raises(ValueError, match="no more"):
            await failed.done
        assert counts == [1, 2, 3, 4]
        assert set(await stored(database)) == {f"task {number}" for number in range(1, 5)}


async def test_a_message_that_another_writer_stored_at_the_same_moment_is_found(
    server: PostgresServer, url: str
) -> None:
    message = ("alice", "hello", b"digest")

    def admit(connection: Connection) -> str:
        found = task_rows.find_message(connection, *message)
        if found is not None:
            return found[0].id
        task_rows.add_task(connection, row(2), message[1:])
        return "task 2"

    insert = "INSERT INTO messages (principal, message_id, digest, task_no) VALUES (%s, %s, %s, %s)"
    async with Database(url) as database:
        number = await database.write(add(1))
        with psycopg.connect(url) as other:
            other.execute(insert, (*message, number))
            writing = asyncio.create_task(database.write(admit))
            await waiting(server)

        assert await writing == "task 1"
        assert await stored(database) == {"task 1": number}


async def test_what_one_replica_forgets_another_does_not_count_again(url: str) -> None:
    begun, over = threading.Event(), threading.Event()

    def forget(connection: Connection) -> int:
        if not engine_of(connection).try_lock(connection, "sweep"):
            return 0
        found = task_rows.forget_tasks(connection, ["completed"], 10, 10, unread=sa.false())
        begun.set()
        assert over.wait(10)
        return found

    async with Database(url, Replica("one")) as one, Database(url, Replica("two")) as two:
        ended = row(1)._replace(state="completed")
        await one.write(task_rows.add_task, ended)
        forgetting = asyncio.create_task(one.write(forget))
        await asyncio.to_thread(begun.wait, 10)
        assert await two.write(forget) == 0
        over.set()

        assert await forgetting == 1
        assert await two.write(forget) == 0
        assert await two.read(task_rows.tally, ["completed"]) == 0


# Who may use it


async def test_whoever_was_declared_gone_changes_nothing(url: str) -> None:
    async with Database(url, Replica("one", 0.6)) as first:
        assert await first.write(add(1)) == 1
        async with Database(url, Replica("one", 0.6)) as second:
            with pytest.raises(StoreUnavailableError):
                await first.write(add(2))
            with pytest.raises(DatabaseError, match="another replica is called one; give each its"):
                await first.keep_lease()

            await second.check()
            assert await stored(second) == {"task 1": 1}


async def test_several_use_it_and_one_that_was_declared_gone_is_told_so(url: str) -> None:
    one, two = Database(url, Replica("one", 0.6)), Database(url, Replica("two", 0.6))
    async with one as silent, two as other:
        await silent.write(add(1))
        await other.write(add(2))
        assert silent.replica is not None
        number = silent.replica
        before = await other.write(replicas.declare_gone, {number: 0})
        gone = await other.write(replicas.declare_gone, {number: 1})

        assert (before, gone) == ([], [number])
        with pytest.raises(StoreUnavailableError):
            await silent.write(add(3))
        with pytest.raises(DatabaseError, match="silent for too long and counts as gone; restart"):
            await silent.keep_lease()
        assert set(await stored(other)) == {"task 1", "task 2"}


async def test_one_owns_an_upstream_until_it_is_gone_or_hands_it_over(url: str) -> None:
    listed = [UpstreamRow("x", None, "away", False, ("/srv",), 3)]
    async with Database(url, Replica("one")) as one, Database(url, Replica("two")) as two:

        def taking(database: Database) -> Awaitable[dict[str, LastOwner]]:
            me = database.replica or 0
            return database.write(replicas.become_owner, me, ["x", "unknown"])

        for database in (one, two):
            me = database.replica or 0
            await database.write(replicas.enroll, me, listed)
        assert await taking(one) == {"x": LastOwner.NONE}
        assert await taking(two) == {}

        await one.write(replicas.hand_over, one.replica or 0, ["x"])
        assert await taking(two) == {"x": LastOwner.HANDED_OVER}
        found, live = await one.read(lambda c: (replicas.upstreams(c), replicas.live(c)))

    assert found == [UpstreamRow("x", two.replica, "away", False, ("/srv",), 3)]
    assert [(row.name, row.lists) for row in live] == [("one", {"x"}), ("two", {"x"})]


async def test_an_opencode_that_is_taken_while_its_lock_is_waited_for_has_an_owner(
    url: str,
) -> None:
    listed = [UpstreamRow("x", None, "away", False, (), 0)]
    taken, go_on = threading.Event(), threading.Event()
    async with AsyncExitStack() as stack:
        first, second, third = [
            await stack.enter_async_context(Database(url, Replica(name))) for name in "abc"
        ]
        numbers = [database.replica or 0 for database in (first, second, third)]
        await first.write(replicas.enroll, numbers[0], listed)
        await first.write(replicas.become_owner, numbers[0], ["x"])
        await second.write(replicas.declare_gone, {numbers[0]: 2})

        def take(connection: Connection) -> dict[str, LastOwner]:
            names = replicas.become_owner(connection, numbers[1], ["x"])
            taken.set()
            go_on.wait(30)
            return names

        def waits(connection: Connection) -> bool:
            sql = "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock'"
            return bool(connection.exec_driver_sql(sql).scalar_one())

        taking = asyncio.create_task(second.write(take))
        await asyncio.to_thread(taken.wait, 30)
        locking = asyncio.create_task(third.write(replicas.lock_unowned, "x"))
        async with asyncio.timeout(60):
            while not await third.read(waits):  # noqa: ASYNC110 - in the database
                await asyncio.sleep(0.01)
        go_on.set()

        assert await taking == {"x": LastOwner.GONE}
        assert not await locking


async def test_it_holds_what_it_runs_until_shortly_before_its_lease_is_over(url: str) -> None:
    async with Database(url, Replica("one", 0.8)) as database:
        assert database.lease.held
        async with asyncio.timeout(60):
            while database.lease.held:  # noqa: ASYNC110 - by the clock
                await asyncio.sleep(0.05)
        await database.check()
        assert database.lease.held
    async with Database("sqlite://") as database:
        assert database.lease.held
        assert database.replica is None


async def test_lost_commits_are_noticed(url: str) -> None:
    async with Database(url) as database:
        for number in range(3):
            await database.write(add(number))
        with psycopg.connect(url) as other:
            other.execute("UPDATE replicas SET commits = commits - 1")

        with pytest.raises(StoreUnavailableError):
            await database.write(add(3))
        with pytest.raises(DatabaseError, match="it has lost commits of this process"):
            await database.keep_lease()


async def test_a_start_that_is_stopped_while_the_database_opens_ends_quietly(
    server: PostgresServer, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    raised = list[object]()
    monkeypatch.setattr(threading, "excepthook", raised.append)
    opening = asyncio.Event()

    def look(data: bytes) -> None:
        if b"pg_advisory_xact_lock" in data and not opening.is_set():
            relay.passing.clear()
            opening.set()

    async with Relay(server.port, forth=look) as relay:
        start = asyncio.create_task(Database(relay.url(url)).__aenter__())
        await opening.wait()
        start.cancel()
        await asyncio.sleep(0)
        relay.passing.set()
        await asyncio.wait([start])

    assert start.cancelled()
    assert raised == []


async def test_a_failed_write_that_nobody_waits_for_is_no_error_of_the_loop(url: str) -> None:
    told = list[object]()
    asyncio.get_running_loop().set_exception_handler(lambda _, context: told.append(context))
    async with Database(url) as database:
        with psycopg.connect(url) as other:
            other.execute("UPDATE replicas SET gone = clock_timestamp()")
        await asyncio.wait([database.submit(add(1)).done])
        gc.collect()

    assert told == []


async def test_a_database_that_is_away_is_not_complained_about_for_every_call(
    server: PostgresServer, url: str
) -> None:
    def figure(name: str) -> float:
        return REGISTRY.get_sample_value(name) or 0.0

    async with Relay(server.port) as relay, Database(relay.url(url)) as database:
        await database.write(add(0))
        failed, age = figure("a2a_store_failures_total"), figure("a2a_store_commit_age_seconds")
        relay.down = True
        relay.break_off()
        with capture_logs() as logs:
            for _ in range(20):
                with pytest.raises(StoreUnavailableError):
                    await database.write(add(1))

        later = figure("a2a_store_commit_age_seconds")
        relay.down = False
        await database.write_until_stored(add(1))
        recovered = figure("a2a_store_commit_age_seconds")

    failures = [log for log in logs if log["event"] == "store failed"]
    assert len(failures) < 5
    assert figure("a2a_store_failures_total") >= failed + 20
    assert age < later > recovered


@pytest.mark.requirement("I18")
async def test_a_process_that_was_given_the_number_of_another_is_not_taken_for_it(url: str) -> None:
    """As after a failover to a server that lost the row of the first."""
    async with Database(url, Replica("one")) as first:
        await first.write(add(1))
        with psycopg.connect(url) as other:
            other.execute("DELETE FROM replicas")
            other.execute("ALTER SEQUENCE replicas_no_seq RESTART")
        async with Database(url, Replica("two")) as second:
            await second.write(add(2))  # as many commits as the first has
            assert first.replica == second.replica

            with pytest.raises(StoreUnavailableError):
                await first.write(add(3))
            with pytest.raises(DatabaseError, match="it no longer knows this process; restart"):
                await first.keep_lease()
            await second.write(add(4))
            assert set(await stored(second)) == {"task 1", "task 2", "task 4"}


async def test_five_first_starts_at_once_all_serve(url: str, tmp_path: Path) -> None:
    programs = [
        Program({**variables(url), "HOME": str(tmp_path), "A2A_PORT": str(port), **QUIET})
        for port in (free_port() for _ in range(5))
    ]
    async with AsyncExitStack() as stack:
        for program in programs:
            stack.push_async_exit(program.__aexit__)
        await asyncio.gather(*(program.spawn() for program in programs))
        await asyncio.gather(*(program.record("started") for program in programs))
        with psycopg.connect(url) as other:
            owners = other.execute(
                "SELECT count(*) FROM upstreams JOIN replicas ON no = owner AND gone IS NULL"
            ).fetchall()
        for program in programs:
            program.signal(Signals.SIGTERM)
        statuses = await asyncio.gather(*(program.ended() for program in programs))

    assert owners == [(1,)]
    assert statuses == [0] * 5


async def test_a_step_of_the_schema_is_taken_on_both_databases_and_the_program_before_goes_on(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = (
        """CREATE TABLE added (no INTEGER PRIMARY KEY AUTOINCREMENT, name VARCHAR NOT NULL,
            data BLOB, at BIGINT)""",
        "CREATE TABLE keyed (name VARCHAR NOT NULL, PRIMARY KEY (name)) WITHOUT ROWID",
    )
    for place in (url, f"sqlite:///{tmp_path}/tasks.db"):
        async with Database(place) as database:
            await database.write(add(1))
        with monkeypatch.context() as newer:
            newer.setattr(schema, "STEPS", (*schema.STEPS, step))
            async with Database(place) as database:
                new = sa.text("INSERT INTO added (name, data) VALUES ('x', :data)")
                await database.write(lambda c: c.execute(new, {"data": b"\0"}).close())  # noqa: B023
        async with Database(place) as database:
            await database.check()
            assert await stored(database) == {"task 1": 1}
