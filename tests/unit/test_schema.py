"""The steps of the schema stay as they are, and what starts does not read all that was kept."""

import hashlib
import sqlite3
from collections.abc import Callable, Generator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import psycopg
import pytest
import sqlalchemy as sa
from sqlalchemy import event
from sqlalchemy.engine import Connection

from opencode_a2a.ids import Principal, SessionId
from opencode_a2a.log.state import OPEN, TERMINAL
from opencode_a2a.store import interrupts, replicas, schema, webhooks
from opencode_a2a.store import tasks as task_rows
from opencode_a2a.store.database import Database, Prepared, make_engine
from opencode_a2a.store.schema import STEPS
from tests.support import stores

SUPPORT = Path(__file__).parent.parent / "support"
RECORD = SUPPORT / "steps.txt"
FIRST = {"sqlite": (1, "schema-1.sql"), "postgresql": (5, "schema-5-postgresql.sql")}
"""The oldest schema of each database, as it was released."""


# Steps


def digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def recorded() -> dict[int, list[str]]:
    lines = [line.split() for line in RECORD.read_text().splitlines() if line[0] != "#"]
    return {int(number): digests for number, *digests in lines}


def test_a_step_never_changes() -> None:
    """Databases have taken it. Add a step, and its line to the record, instead."""
    steps = {number: digest("\n".join(step)) for number, step in enumerate(STEPS, 1)}

    assert steps == {number: digests[0] for number, digests in recorded().items()}


def first_schema(database: str, state: Path) -> str:
    """Make a database with the oldest schema; return its URL for SQLAlchemy."""
    place, dump = stores.url(state), SUPPORT / FIRST[database][1]
    if database == "sqlite":
        with closing(sqlite3.connect(state / "tasks.db")) as connection:
            connection.executescript(dump.read_text())
    else:
        with psycopg.connect(place) as connection:
            connection.execute(dump.read_bytes())
    return place.replace("postgresql:", "postgresql+psycopg:")


def shape(connection: Connection) -> str:
    """Return the columns and indexes of the tables, one in a line."""
    if connection.dialect.name == "sqlite":
        queries = ["SELECT type, name, sql FROM sqlite_master ORDER BY 1, 2"]
    else:
        queries = [
            "SELECT table_name, column_name, data_type, is_nullable, collation_name"
            " FROM information_schema.columns WHERE table_schema = current_schema() ORDER BY 1, 2",
            "SELECT tablename, replace(indexdef, current_schema(), '') FROM pg_indexes"
            " WHERE schemaname = current_schema() ORDER BY 1, 2",
        ]
    rows = (row for query in queries for row in connection.exec_driver_sql(query))
    return "\n".join(str(tuple(row)) for row in rows)


def shapes_by_step(database: str, state: Path) -> dict[int, str]:
    """Return the digest of the tables after each step, by its number."""
    spelling, first = make_engine(stores.url(state)).spelling, FIRST[database][0]
    found = dict.fromkeys(range(1, first), "-")
    engine = sa.create_engine(first_schema(database, state))
    with engine.begin() as connection:
        found[first] = digest(shape(connection))
        for number in range(first + 1, len(STEPS) + 1):
            schema.take_step(connection, STEPS[number - 1], spelling)
            found[number] = digest(shape(connection))
    engine.dispose()
    return found


@pytest.mark.both_databases
async def test_each_step_leads_to_the_tables_that_it_led_to_before(
    database: str, tmp_path: Path
) -> None:
    column = 1 + [*FIRST].index(database)
    expected = {step: digests[column] for step, digests in recorded().items()}

    assert shapes_by_step(database, tmp_path) == expected


async def test_the_first_schema_is_taken_to_what_a_new_database_gets(tmp_path: Path) -> None:
    with stores.using("postgresql"):
        first = first_schema("postgresql", tmp_path)
        new = stores.url(tmp_path / "new").replace("postgresql:", "postgresql+psycopg:")
        spelling = make_engine(stores.url(tmp_path)).spelling

    shapes = list[str]()
    for place in (first, new):
        engine = sa.create_engine(place)
        with engine.begin() as connection:
            schema.migrate(connection, spelling)
            shapes.append(shape(connection))
        engine.dispose()

    assert shapes[0] == shapes[1]


# What a start looks at


def test_the_states_of_the_index_are_those_of_open_tasks() -> None:
    assert set(schema.OPEN_STATES) == OPEN


@contextmanager
def plans(connection: Connection) -> Generator[list[str]]:
    """Have each statement explained before it is run."""
    explained = list[str]()
    how = "EXPLAIN QUERY PLAN" if connection.dialect.name == "sqlite" else "EXPLAIN"

    def explain(_: object, cursor: Any, statement: str, values: Any, *__: object) -> None:
        cursor.execute(f"{how} {statement}", values)
        explained.extend(str(row[-1]) for row in cursor.fetchall())

    run = Prepared.run

    def explain_and_run(prepared: Prepared, connection: Connection, *rows: Any) -> Any:
        asked = run(Prepared(f"{how} {prepared.sql}"), connection, *rows[:1])
        explained.extend(str(row[-1]) for row in asked.fetchall())
        return run(prepared, connection, *rows)

    event.listen(connection, "before_cursor_execute", explain)
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Prepared, "run", explain_and_run)
            yield explained
    finally:
        event.remove(connection, "before_cursor_execute", explain)


KEPT = 5_000


def keep_many(connection: Connection) -> None:
    """Store many tasks that have ended, with what belongs to each, and one that is open."""
    numbers = f"WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < {KEPT})"  # noqa: S608 - constants
    for statement in (
        "INSERT INTO tasks (id, principal, context_id, state, created_at, updated_at, status,"
        " upstream) {} SELECT 't' || i, 'p', 'c' || i,"
        " CASE i WHEN 1 THEN 'working' ELSE 'completed' END, i, i, '', 'x' FROM n",
        "INSERT INTO webhooks (task_no, config_id, key, principal, version, url, acked, state,"
        " attempts) {} SELECT i, '', '', 'p', '1.0', '', 0, 'done', 0 FROM n",
        "INSERT INTO interrupts (request_id, task_id, context_id, principal, type, asked,"
        " expires_at, resolution) {} SELECT 'r' || i, 't' || i, 'c' || i, 'p', 'permission', '', i,"
        " CASE i WHEN 1 THEN NULL ELSE 'once' END FROM n",
        "INSERT INTO entries (task_no, first_seq, last_seq, data) {} SELECT 1, i, i, '' FROM n",
        "INSERT INTO links (principal, context_id, place, session_id, updated_at)"
        " {} SELECT 'p', 'c' || i, '', 's' || i, i FROM n",
    ):
        connection.exec_driver_sql(statement.format(numbers))


def entries_of_one(connection: Connection) -> None:
    task_rows.append(connection, [task_rows.Segment(2, 1, 1, b"")], [])


def forget_logs(connection: Connection) -> int:
    return task_rows.forget_logs(connection, [*TERMINAL], KEPT, 5, webhooks.unread())


def pending(connection: Connection, principal: Principal | None) -> int:
    return len(interrupts.pending(connection, principal, "permission", ["r1", "r2", "r3"]))


TABLES = ("tasks", "webhooks", "links", "entries", "interrupts")
LOOKS: dict[str, Callable[[Connection], object]] = {
    "open tasks of all": lambda connection: len(task_rows.load_open(connection)) == 1,
    "open tasks of some": lambda connection: len(task_rows.load_open(connection, ["x"])) == 1,
    "webhooks": lambda connection: webhooks.forget_last_changes(connection, ["x"]) is None,
    "due webhooks": lambda connection: webhooks.backlog(connection, None, KEPT).pending == 0,
    "changes": lambda connection: webhooks.note_changes(connection, {7: 1}),
    "claims": lambda connection: webhooks.release_all(connection, None) is None,
    "retries": lambda connection: webhooks.retried(connection, None) == set(),
    "requests": lambda connection: pending(connection, None) == 1,
    "requests of one": lambda connection: pending(connection, Principal("p")) == 1,
    "logs": lambda connection: forget_logs(connection) == 1,
    "canceled": lambda connection: task_rows.unstopped(connection, "x", KEPT) == [],
    "links": lambda connection: task_rows.forget_session(connection, SessionId("s7")) is None,
}


@pytest.mark.both_databases
async def test_what_is_looked_for_among_all_that_was_kept_is_found_by_an_index(
    database: str, tmp_path: Path
) -> None:
    async with Database(stores.url(tmp_path)) as opened:
        await opened.write(keep_many)
        await opened.write(entries_of_one)
        await opened.write(lambda connection: connection.exec_driver_sql("ANALYZE").close())

        def look(connection: Connection) -> dict[str, list[str]]:
            looks = dict(LOOKS)
            if database == "postgresql":
                looks["enroll"] = lambda connection: replicas.enroll(connection, 1, []) is None
            found = dict[str, list[str]]()
            for name, ask in looks.items():
                with plans(connection) as explained:
                    assert ask(connection), name
                found[name] = explained
            return found

        found = await opened.write(look)

    large = {"sqlite": "SCAN {}", "postgresql": "Seq Scan on {}"}[database]
    scans = [large.format(table) for table in TABLES]
    for name, explained in found.items():
        lines = [line for line in explained if any(scan in line for scan in scans)]
        # An index that has nothing but what is looked for may be read as a whole.
        assert [line for line in lines if "INDEX" not in line] == [], (name, explained)
