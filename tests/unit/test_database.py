"""The database file, its lock, its schema and its failures."""

import asyncio
import random
import sqlite3
import threading
from contextlib import closing
from pathlib import Path

import pytest
import sqlalchemy as sa
from sqlalchemy import event

from opencode_a2a.databases import KINDS
from opencode_a2a.errors import StoreUnavailableError
from opencode_a2a.ids import MAIN, ContextId, Principal, SessionId
from opencode_a2a.store import database as database_module
from opencode_a2a.store import tasks as task_rows
from opencode_a2a.store.database import Database, engine_of, make_engine
from opencode_a2a.store.engine import DatabaseError, WriteResult
from opencode_a2a.store.schema import STEPS, version
from opencode_a2a.store.tasks import TaskRow
from tests.support import stores


def url(path: Path) -> str:
    return f"sqlite+aiosqlite:///{path}"


def select_version(connection: sa.Connection) -> int:
    return connection.execute(sa.select(version.c.version)).scalar_one()


def test_every_kind_of_database_is_tested_and_has_an_engine() -> None:
    assert {kind.schemes[0] for kind in KINDS} == {*stores.ENGINES}
    for kind in KINDS:
        assert make_engine(kind.example).kind is kind


async def test_the_file_is_for_its_owner_only(tmp_path: Path) -> None:
    path = tmp_path / "new" / "tasks.db"
    async with Database(url(path)) as database:
        await database.check()

        modes = {file.name: file.stat().st_mode & 0o777 for file in path.parent.iterdir()}
        assert set(modes.values()) == {0o600}
        assert path.parent.stat().st_mode & 0o777 == 0o700


async def test_a_second_process_is_refused_with_a_clear_text(tmp_path: Path) -> None:
    path = tmp_path / "tasks.db"
    async with Database(url(path)):
        with pytest.raises(DatabaseError, match="in use by another process"):
            async with Database(url(path)):
                pass


async def test_a_file_that_cannot_be_opened_is_refused_with_a_remedy(tmp_path: Path) -> None:
    with pytest.raises(DatabaseError, match="A2A_TASK_STORE_DATABASE_URL"):
        async with Database(url(tmp_path)):
            pass


async def test_a_write_is_stored_although_the_log_of_the_file_cannot_be_emptied(
    tmp_path: Path,
) -> None:
    """It is emptied after something was erased; on a full disk, for one, it cannot be."""

    def forbid(action: int, name: str | None, *_: object) -> int:
        refused = action == sqlite3.SQLITE_PRAGMA and name == "wal_checkpoint"
        return sqlite3.SQLITE_DENY if refused else sqlite3.SQLITE_OK

    def erase(connection: sa.Connection) -> int:
        driver = connection.connection.driver_connection
        assert isinstance(driver, sqlite3.Connection)
        driver.set_authorizer(forbid)
        engine_of(connection).erase(connection)
        return select_version(connection)

    async with Database(url(tmp_path / "tasks.db")) as database:
        assert await database.write(erase) == len(STEPS)
        assert await database.write(select_version) == len(STEPS)


async def test_a_symbolic_link_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "link.db").symlink_to(tmp_path / "elsewhere.db")

    with pytest.raises(DatabaseError):
        async with Database(url(tmp_path / "link.db")):
            pass
    assert not (tmp_path / "elsewhere.db").exists()


async def test_a_file_that_is_no_database_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "tasks.db"
    path.write_text("no database at all, but long enough to look at it" * 40)

    with pytest.raises(DatabaseError, match="cannot open"):
        async with Database(url(path)):
            pass


@pytest.mark.both_databases(stores.OLDER)
async def test_a_newer_schema_is_refused_unless_it_says_that_this_program_may_use_it(
    tmp_path: Path,
) -> None:
    newer = "UPDATE schema_version SET version = 99, oldest = {}"
    async with Database(stores.url(tmp_path)) as database:
        await database.write(lambda c: c.execute(sa.text(newer.format(len(STEPS)))).close())
    async with Database(stores.url(tmp_path)) as database:
        await database.check()
        assert await database.read(select_version) == 99
        await database.write(lambda c: c.execute(sa.text(newer.format(98))).close())

    with pytest.raises(DatabaseError, match="99"):
        async with Database(stores.url(tmp_path)):
            pass


@pytest.mark.both_databases(stores.OLDER)
async def test_what_was_written_is_there_after_a_restart(tmp_path: Path) -> None:
    for _ in range(2):
        async with Database(stores.url(tmp_path)) as database:
            assert await database.read(select_version) == len(STEPS)


async def test_an_upgrade_that_fails_leaves_the_database_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "tasks.db"
    first = Path(__file__).parent.parent / "support" / "schema-1.sql"
    with closing(sqlite3.connect(path)) as connection:
        connection.executescript(first.read_text())
        connection.execute("CREATE TABLE messages_before (in_the_way)")
        before = list(connection.iterdump())

    with pytest.raises(DatabaseError, match="messages_before"):
        async with Database(url(path)):
            pass

    with closing(sqlite3.connect(path)) as connection:
        assert list(connection.iterdump()) == before


@pytest.mark.both_databases(stores.OLDER)
async def test_a_write_that_fails_leaves_the_others_of_its_transaction_alone(
    tmp_path: Path,
) -> None:
    def good(connection: sa.Connection) -> str:
        connection.execute(sa.text("UPDATE schema_version SET checked = checked + 1"))
        return "done"

    def bad(connection: sa.Connection) -> str:
        raise LookupError("mine")

    async with Database(stores.url(tmp_path)) as database:
        results = await asyncio.gather(
            *(database.write(fn) for fn in (good, bad, good)), return_exceptions=True
        )

        assert results[0] == results[2] == "done"
        assert isinstance(results[1], LookupError)


@pytest.mark.both_databases
@pytest.mark.parametrize("late", [True, False], ids=["before the commit", "just after it"])
async def test_a_write_whose_caller_was_cancelled_is_told_of_once_it_is_committed(
    late: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told, gate, deliver = list[int](), threading.Event(), database_module._deliver  # noqa: SLF001 # pyright: ignore[reportPrivateUsage] # what the writer thread calls

    def write(connection: sa.Connection) -> int:
        gate.wait()
        return select_version(connection)

    async with Database(stores.url(tmp_path)) as database, asyncio.timeout(60):
        writing = asyncio.create_task(database.write_in_time(write, told.append))
        await asyncio.sleep(0)
        if late:
            writing.cancel()
        else:

            def deliver_and_cancel(results: list[WriteResult]) -> None:
                deliver(results)
                writing.cancel()

            monkeypatch.setattr(database_module, "_deliver", deliver_and_cancel)
            gate.set()
        await asyncio.wait([writing])
        gate.set()
        monkeypatch.undo()
        await database.write(select_version)

    assert writing.cancelled()
    assert told == [len(STEPS)]


@pytest.mark.both_databases(stores.OLDER)
async def test_keys_may_be_as_long_as_a_caller_can_make_them(tmp_path: Path) -> None:
    chance = random.Random(1)  # noqa: S311 - no secret

    def text(length: int) -> str:
        return "".join(chr(chance.randrange(0x20000, 0x2A000)) for _ in range(length))

    alice, context, session = Principal("alice"), ContextId(text(256)), SessionId("ses_1")
    message, directory = text(256), text(4096)
    row = TaskRow("t", alice, context, "submitted", 1, 1, b"{}")

    def write(connection: sa.Connection) -> None:
        no = task_rows.add_task(connection, row)
        task_rows.add_message(connection, alice, message, no, b"d" * 32)
        task_rows.link_session(connection, alice, context, directory, session, MAIN, 1)

    def read(connection: sa.Connection) -> tuple[SessionId | None, object]:
        assert task_rows.find_message(connection, alice, message, b"d" * 32)
        found = task_rows.linked_session(connection, alice, context, directory)
        other = task_rows.linked_session(connection, alice, context, directory[:-1])
        return found and found.session_id, other

    async with Database(stores.url(tmp_path)) as database:
        await database.write(write)
        await database.write(task_rows.own_places, alice, "main", [directory, "wrk_1"])

        assert await database.read(read) == (session, None)
        asked, bob = [directory, "wrk_1", directory[:-1]], Principal("bob")
        assert await database.read(task_rows.visible_places, bob, asked) == [directory[:-1]]
        for place in (directory, "wrk_1"):
            made = await database.read(task_rows.upstream_of_place, place)
            assert made == "main"
        assert await database.read(task_rows.upstream_of_place, "wrk_2") is None
        assert await database.read(task_rows.visible_places, alice, [directory]) == [directory]
        await database.write(task_rows.forget_places, [directory])
        assert await database.read(task_rows.visible_places, bob, [directory]) == [directory]


@pytest.mark.both_databases(stores.OLDER)
async def test_a_failure_of_the_driver_is_told_without_its_text(tmp_path: Path) -> None:
    def broken(connection: sa.Connection) -> None:
        connection.execute(sa.text("SELECT * FROM missing_table"))

    async with Database(stores.url(tmp_path)) as database:
        for attempt in (database.read, database.write):
            with pytest.raises(StoreUnavailableError) as caught:
                await attempt(broken)
            assert "missing_table" not in caught.value.message
        await database.check()


@pytest.mark.both_databases
async def test_any_number_of_sessions_takes_few_statements_to_ask_for_their_owners(
    tmp_path: Path,
) -> None:
    sessions = [SessionId(f"ses_{number}") for number in range(600)]
    theirs = {sessions[0], sessions[255], sessions[256], sessions[599]}
    statements: set[str] = set()

    def ask(connection: sa.Connection, count: int) -> set[SessionId]:
        def note(*told: object) -> None:
            statements.add(str(told[2]))

        event.listen(connection, "before_cursor_execute", note)
        asked = sessions[:count]
        return task_rows.sessions_of_others(connection, Principal("me"), asked, 0)

    async with Database(stores.url(tmp_path)) as database:
        for session in theirs:
            await database.write(task_rows.own_session, Principal("you"), session, MAIN)
        for count in (0, *range(1, 600, 7), 256, 257, 512, 600):
            assert await database.read(ask, count) == theirs & set(sessions[:count])
    assert len(statements) <= 9  # the driver keeps each of them
