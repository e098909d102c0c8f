"""How the query modules run SQL that runs often, and how the functions of a transaction are run."""

from collections.abc import Mapping, Sequence
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from opencode_a2a.store.engine import PendingWrite, WriteResult, engine_of


class Prepared:
    """A statement that runs often: compiled once for a driver, and run by the driver itself.

    SQLAlchemy's own execution costs eight times what SQLite needs for a small statement (730
    against 90 µs for the five statements of an admission).
    """

    def __init__(self, sql: str, inserts: tuple[str, Mapping[str, str]] | None = None) -> None:
        """``inserts`` is the table into which rows are inserted, and the types of its columns, if
        that is worth the fastest way that the database has: see ``Engine.insert_rows``."""
        self._text = sa.text(sql)
        self._inserts = inserts
        self._compiled: dict[str, tuple[str, Sequence[str] | None]] = {}
        """By driver: the SQL, and the names of the values if the driver takes them by position."""

    def run(self, connection: Connection, *rows: Mapping[str, object]) -> Any:
        """Run it for each row of values, in the transaction of the connection.

        Returns the driver's cursor, from which the result for a single row can be fetched.
        """
        engine = engine_of(connection)
        cursor = engine.cursor(connection)
        if (
            len(rows) > 1
            and self._inserts is not None
            and engine.insert_rows(cursor, *self._inserts, rows)
        ):
            return cursor
        driver = connection.dialect.driver
        if driver not in self._compiled:
            made = self._text.compile(dialect=connection.dialect)
            self._compiled[driver] = made.string, made.positiontup if made.positional else None
        sql, order = self._compiled[driver]
        values: list[Any] = [
            row if order is None else [row[name] for name in order] for row in rows
        ]
        if len(values) == 1:
            cursor.execute(sql, values[0])
        elif values:
            cursor.executemany(sql, values)
        return cursor


Changes = Mapping[tuple[str | int, ...], tuple[float, ...]]
"""What is added to the figures of a row, by the key of the row."""
_DEFERRED = "deferred totals"


class Totals(Prepared):
    """A table of figures to which several processes add at the same time.

    A row that is added to is locked until the transaction ends. Therefore all figures are added to
    at the end of a transaction, and in one order: processes never wait for each other in a
    circle, nor for longer than a commit takes.
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
        """Add to figures at the end of the transaction."""
        mine = connection.info[_DEFERRED].setdefault(self, {})
        for key, change in changes.items():
            before = mine.get(key, (0,) * len(change))
            mine[key] = tuple(map(sum, zip(before, change, strict=True)))

    def deferred(self, connection: Connection) -> Changes:
        """Return what this transaction will add; no query sees it yet."""
        return connection.info.get(_DEFERRED, {}).get(self, {})

    def flush(self, connection: Connection, changes: Changes) -> None:
        rows = [(*key, *change) for key, change in sorted(changes.items()) if any(change)]
        self.run(connection, *(dict(zip(self._names, row, strict=True)) for row in rows))


def run_group(connection: Connection, calls: Sequence[PendingWrite[Any]]) -> list[WriteResult]:
    """Run the functions of a group in the transaction of the connection, and add to the totals."""
    info = connection.info  # a connection that breaks meanwhile has none
    deferred: dict[Totals, Changes] = {}
    info[_DEFERRED] = deferred
    try:
        results = [
            WriteResult(call, call.fn(connection, *call.args, **call.kwargs)) for call in calls
        ]
        for totals in sorted(deferred, key=lambda one: one.table):
            totals.flush(connection, deferred[totals])
    finally:
        del info[_DEFERRED]
    return results
