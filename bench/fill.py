"""Many stored tasks without running them: copies of tasks that went through the API.

A unary turn of the existing adapter takes its CPU for 20 ms, so that 100,000 of them would take
the better part of an hour. Instead some hundred turns are run, the server is stopped, and the rows
they left behind are copied with new ids, for every system by the same code: all rows of a task in
all tables that have some. What is read afterwards is read through the API.
"""

import sqlite3
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path

Value = str | bytes | int | float | None
Row = dict[str, Value]


@dataclass(frozen=True, slots=True)
class Layout:
    """Where a system keeps a task."""

    key: str = "id"
    """Column of ``tasks`` by which its other rows refer to it."""
    time: str = "last_updated"
    others: tuple[tuple[str, str], ...] = ()
    """Further tables, each with the column that names the task."""
    counted: bool = False
    """Whether the number of tasks is kept in a table as well."""


LAYOUTS = {
    "ours": Layout("no", "updated_at", (("messages", "task_no"), ("entries", "task_no")), True),
    "adapter": Layout(others=(("task_versions", "task_id"), ("task_events", "task_id"))),
    "sdk": Layout(),
}


def grow(database: Path, system: str, size: int) -> None:
    """Copy tasks until there are as many as asked for."""
    layout = LAYOUTS[system]
    with closing(sqlite3.connect(database)) as connection:
        connection.row_factory = sqlite3.Row
        originals = [Original(connection, layout, row) for row in _rows(connection, "tasks", 200)]
        count = connection.execute("SELECT count(*) FROM tasks").fetchone()[0]
        for number in range(count, size):
            originals[number % len(originals)].copy(connection, number)
        if layout.counted:
            connection.execute(
                "UPDATE tallies SET n = (SELECT count(*) FROM tasks t WHERE"
                " t.principal = tallies.principal AND t.state = tallies.state)"
            )
        connection.commit()
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")


def settled_size(database: Path) -> int:
    """Return the size of the database of a stopped server, with nothing left in its log."""
    with closing(sqlite3.connect(database)) as connection:
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    return database.stat().st_size


def _rows(connection: sqlite3.Connection, table: str, limit: int) -> Iterator[Row]:
    for row in connection.execute(f"SELECT * FROM {table} LIMIT {limit}"):  # noqa: S608  constants
        yield dict(row)


class Original:
    """The rows of one task, ready to be copied under new ids of the same form and length."""

    def __init__(self, connection: sqlite3.Connection, layout: Layout, task: Row) -> None:
        self.layout = layout
        self.task = task
        self.ids = [value for value in (task["id"], task["context_id"]) if isinstance(value, str)]
        self.others = [
            (table, column, dict(row))
            for table, column in layout.others
            for row in connection.execute(
                f"SELECT * FROM {table} WHERE {column} = ?",  # noqa: S608  constants
                (task[layout.key],),
            )
        ]

    def copy(self, connection: sqlite3.Connection, number: int) -> None:
        task = self.renamed(self.task, number)
        task[self.layout.time] = _earlier(task[self.layout.time], number)
        key = _insert(connection, "tasks", {**task, "no": None} if "no" in task else task)
        for table, column, row in self.others:
            other = self.renamed(row, number)
            if self.layout.key == "no":
                other[column] = key
            message = other.get("message_id")
            if isinstance(message, str):
                other["message_id"] = _numbered(message, number)
            _insert(
                connection, table, {k: None if k in ("no", "seq") else v for k, v in other.items()}
            )

    def renamed(self, row: Row, number: int) -> Row:
        return {name: self._value(value, number) for name, value in row.items()}

    def _value(self, value: Value, number: int) -> Value:
        for old in self.ids:
            if isinstance(value, str):
                value = value.replace(old, _numbered(old, number))
            elif isinstance(value, bytes):
                value = value.replace(old.encode(), _numbered(old, number).encode())
        return value


def _numbered(old: str, number: int) -> str:
    return f"{old[:-12]}{number:012x}"


def _earlier(value: Value, number: int) -> Value:
    """Spread the copies over time: a list is ordered by it."""
    if isinstance(value, int):
        return value - number
    if isinstance(value, str):
        moment = datetime.fromisoformat(value) - timedelta(milliseconds=number)
        return moment.isoformat(sep=" ", timespec="microseconds")
    return value


def _insert(connection: sqlite3.Connection, table: str, row: Row) -> int | None:
    marks = ",".join("?" * len(row))
    return connection.execute(
        f"INSERT INTO {table} ({','.join(row)}) VALUES ({marks})",  # noqa: S608  names from the table
        list(row.values()),
    ).lastrowid
