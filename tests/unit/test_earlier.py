"""Databases of the earlier adapter, made by hand: what its own database cannot show."""

import json
import shutil
import sqlite3
from collections import Counter
from contextlib import closing
from pathlib import Path

import pytest

from opencode_a2a.ids import ContextId, Principal
from opencode_a2a.log.stored import load_task
from opencode_a2a.store import tasks as task_rows
from opencode_a2a.store.authorship import Author, SourceChangedError, author_of, reading
from opencode_a2a.store.database import Database
from opencode_a2a.store.engine import DatabaseError
from opencode_a2a.store.sqlite import EarlierDatabaseError
from opencode_a2a_import import ImportFailedError, import_database
from tests.support import stores
from tests.support.program import run

# As 0.5 to 0.8 wrote it: tasks have no owner, JSON has the form of protocol 0.3.
SCHEMA = """
CREATE TABLE tasks (id VARCHAR(36) PRIMARY KEY, context_id VARCHAR(36), kind VARCHAR(16),
    status JSON, artifacts JSON, history JSON, metadata JSON);
CREATE TABLE a2a_session_bindings (identity VARCHAR, context_id VARCHAR, session_id VARCHAR);
CREATE TABLE a2a_session_owners (session_id VARCHAR, identity VARCHAR);
CREATE TABLE a2a_interrupt_requests (request_id VARCHAR, tombstone_expires_at FLOAT);
"""


def make(file: Path, *statements: str) -> Path:
    with closing(sqlite3.connect(file)) as connection:
        connection.executescript(";".join(statements))
    return file


def add_task(
    file: Path, task_id: str, context_id: str, state: str = "completed", **columns: object
) -> None:
    stored = {"status": {"state": state}, "artifacts": None, "history": None, "metadata": None}
    values = [json.dumps(value) for value in (stored | columns).values()]
    with closing(sqlite3.connect(file)) as connection, connection:
        connection.execute(
            "INSERT INTO tasks VALUES (?, ?, 'task', ?, ?, ?, ?)", [task_id, context_id, *values]
        )


def add_session(file: Path, principal: str, context_id: str, session_id: str) -> None:
    with closing(sqlite3.connect(file)) as connection, connection:
        binding = (principal, context_id, session_id)
        connection.execute("INSERT INTO a2a_session_bindings VALUES (?, ?, ?)", binding)
        owner = (session_id, principal)
        connection.execute("INSERT INTO a2a_session_owners VALUES (?, ?)", owner)


def files(directory: Path) -> list[Path]:
    return sorted(directory.iterdir())


@pytest.fixture
def old(tmp_path: Path) -> Path:
    return make(tmp_path / "old.db", SCHEMA)


async def test_a_database_is_recognised_by_its_tables(tmp_path: Path, old: Path) -> None:
    async with Database(f"sqlite:///{tmp_path / 'ours.db'}"):
        pass
    foreign = make(tmp_path / "foreign.db", "CREATE TABLE tasks (id INTEGER, todo TEXT)")
    damaged = make(tmp_path / "damaged.db", SCHEMA, "CREATE TABLE schema_version (version INTEGER)")
    (tmp_path / "empty.db").touch()

    authors = {name: author_of(tmp_path / f"{name}.db") for name in ("ours", "empty", "missing")}

    assert authors == {"ours": Author.OURS, "empty": Author.EMPTY, "missing": Author.EMPTY}
    assert [author_of(file) for file in (old, damaged, foreign)] == [
        Author.EARLIER,
        Author.EARLIER,
        Author.FOREIGN,
    ]


def crashed(tmp_path: Path, *statements: str) -> Path:
    """Return a database as a crash leaves it: all that was written is in its journal."""
    directory = tmp_path / "crashed"
    directory.mkdir()
    with closing(sqlite3.connect(tmp_path / "running.db")) as connection:
        connection.execute("PRAGMA journal_mode=WAL")
        connection.executescript(";".join(statements))
        for file in tmp_path.glob("running.db*"):
            shutil.copyfile(file, directory / file.name)
    return directory / "running.db"


def test_a_database_whose_tables_are_only_in_the_journal_is_recognised(tmp_path: Path) -> None:
    file = crashed(tmp_path, SCHEMA)
    before = {path.name: path.read_bytes() for path in file.parent.iterdir()}

    assert author_of(file) is Author.EARLIER
    assert {path.name: path.read_bytes() for path in file.parent.iterdir()} == before


@pytest.mark.parametrize("kind", ["earlier", "foreign"])
async def test_a_database_that_is_not_ours_is_not_touched(tmp_path: Path, kind: str) -> None:
    schema = SCHEMA if kind == "earlier" else "CREATE TABLE notes (text TEXT)"
    file = make(tmp_path / "file.db", schema)
    file.chmod(0o644)
    before = file.read_bytes()

    with pytest.raises(EarlierDatabaseError if kind == "earlier" else DatabaseError):
        async with Database(f"sqlite:///{file}"):
            pass

    assert (file.read_bytes(), file.stat().st_mode & 0o777) == (before, 0o644)
    assert files(tmp_path) == [file]


def test_a_source_that_changes_while_it_is_read_is_noticed(old: Path) -> None:
    with pytest.raises(SourceChangedError), reading(old):
        add_task(old, "t", "c")


async def imported(old: Path, target: Path) -> tuple[Counter[str], Counter[str]]:
    report = await import_database(old, stores.url(target), 30)
    return report.taken, report.left


@pytest.mark.both_databases
async def test_an_owner_is_found_by_the_context_or_by_being_the_only_one(
    old: Path, tmp_path: Path
) -> None:
    add_session(old, "alice", "alices", "ses_1")
    add_task(old, "in-a-context", "alices")
    add_task(old, "in-none", "unknown")

    assert await imported(old, tmp_path) == (
        {"tasks": 2, "session owners": 1, "context links": 1},
        {},
    )

    add_session(old, "bob", "bobs", "ses_2")
    add_session(old, "alice", "shared", "ses_3")
    add_session(old, "bob", "shared", "ses_4")
    add_task(old, "in-a-shared-one", "shared")
    add_task(old, "bobs", "bobs")

    assert await imported(old, tmp_path / "another") == (
        {"tasks": 2, "session owners": 4, "context links": 4},
        {"tasks of an unknown owner": 2},
    )


@pytest.mark.both_databases
async def test_the_form_of_protocol_03_is_read(old: Path, tmp_path: Path) -> None:
    add_session(old, "alice", "c::workspace:wrk_1", "ses_1")
    part = {"kind": "file", "file": {"bytes": "YWJj", "mimeType": "text/plain", "name": "a.txt"}}
    add_task(
        old,
        "t",
        "c",
        status={"state": "completed", "timestamp": "2999-01-01T00:00:00Z", "message": None},
        artifacts=[{"artifactId": "t:stream", "parts": [{"kind": "text", "text": "done"}]}],
        history=[
            {
                "kind": "message",
                "messageId": "m",
                "role": "user",
                "parts": [{"kind": "text", "text": "go"}, part],
            }
        ],
        metadata={"shared": {"session": {"id": "ses_1"}}},
    )

    await imported(old, tmp_path)

    async with Database(stores.url(tmp_path)) as database:
        row = await database.read(task_rows.load, "alice", "t")
        link = await database.read(
            task_rows.linked_session, Principal("alice"), ContextId("c"), "workspace:wrk_1"
        )
    assert row is not None
    task = load_task(row)
    assert (task.status.state, task.status.session_id, link) == (
        "completed",
        "ses_1",
        ("ses_1", "main"),
    )
    assert [channel.text for channel in task.channels.values()] == ["done"]
    [message] = task.history
    assert [(p.kind, p.text, p.raw, p.media_type, p.filename) for p in message.parts] == [
        ("text", "go", None, None, None),
        ("raw", None, "YWJj", "text/plain", "a.txt"),
    ]
    assert row.updated_at == 32472144000000


@pytest.mark.both_databases
async def test_what_cannot_be_taken_is_counted_by_its_reason(old: Path, tmp_path: Path) -> None:
    add_session(old, "alice", "c", "ses_1")
    add_task(old, "working", "c", "working")
    add_task(old, "asked", "c", "input-required")
    add_task(old, "aged", "c", status={"state": "failed", "timestamp": "2020-01-01T00:00:00Z"})
    add_task(old, "broken", "c", status="not an object")
    with closing(sqlite3.connect(old)) as connection, connection:
        connection.execute("INSERT INTO a2a_interrupt_requests VALUES ('per_1', NULL)")

    _, left = await imported(old, tmp_path)

    assert left == {
        "tasks that are not finished": 2,
        "tasks older than A2A_TASK_RETENTION_DAYS": 1,
        "tasks that cannot be read": 1,
        "permissions and questions, whose turns are over": 1,
    }


@pytest.mark.both_databases
async def test_a_database_of_ours_is_copied_if_there_is_nothing_yet(
    old: Path, tmp_path: Path
) -> None:
    add_session(old, "alice", "c", "ses_1")
    add_task(old, "t", "c")
    add_task(old, "u", "c")
    ours, target = tmp_path / "new.db", stores.url(tmp_path / "elsewhere")
    await import_database(old, f"sqlite:///{ours}", 30)

    report = await import_database(ours, target, 30)
    with pytest.raises(ImportFailedError, match="there are tasks in"):
        await import_database(ours, target, 30)

    assert report.taken == {"tasks, with everything that belongs to them": 2}
    async with Database(target) as database:
        row = await database.read(task_rows.load, "alice", "t")
        assert row is not None
        # The next task has a number of its own.
        new = row._replace(id="new", no=0)
        assert await database.write(task_rows.add_task, new) == 3


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ("--from sqlite:///{0}/none.db", "there is no database"),
        ("--from sqlite:///{0}/text.db", "cannot read"),
        ("--from sqlite:///{0}/foreign.db", "is not a database of"),
        ("--from sqlite:///{0}/old.db --to sqlite://", "in memory"),
        ("--from sqlite:///{0}/old.db --to sqlite:///{0}/old.db", "the same file"),
        ("--from postgresql://h/d", "only SQLite can be imported"),
        ("--from mysql://h/d", "should be a URL of SQLite"),
        ("", "Missing option '--from'"),
    ],
)
async def test_a_wrong_call_is_one_line_and_changes_nothing(
    old: Path, tmp_path: Path, arguments: str, text: str
) -> None:
    (tmp_path / "text.db").write_text(
        "no database at all, but long enough to be taken for one\n" * 9
    )
    make(tmp_path / "foreign.db", "CREATE TABLE notes (text TEXT)")
    before = files(tmp_path)

    status, output = await run("migrate", *arguments.format(tmp_path).split(), HOME=str(tmp_path))

    assert status == 2
    assert text in output
    assert "Traceback" not in output
    assert files(tmp_path) == before
