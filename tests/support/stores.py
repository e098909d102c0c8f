"""The databases that the tests run on: a row in ``STORES`` for each.

Most tests run on SQLite. Those marked with ``both_databases`` run once on every kind of database;
on a server in a schema for each state directory, and on one server for each process that runs
tests. ``OPENCODE_A2A_TEST_DATABASE=postgresql`` runs the others there as well.
"""

import hashlib
import os
import sqlite3
from collections.abc import Generator
from contextlib import AbstractContextManager, closing, contextmanager
from pathlib import Path
from typing import Protocol

import psycopg

from opencode_a2a.store.replicas import Census, ReplicaRow
from tests.support.postgres import PostgresServer

SHARED = Census(live=(ReplicaRow(99, "another", "", 0.0, frozenset()),))
"""What a process knows that is not the only one on its database."""


class Store(Protocol):
    """How tests use one kind of database."""

    def url(self, state: Path) -> str:
        """Return the URL of the database that belongs to a state directory."""
        ...

    def locked(self, state: Path) -> AbstractContextManager[None]:
        """Keep the service from writing; it can read."""
        ...


class SqliteStore:
    def url(self, state: Path) -> str:
        return f"sqlite:///{state / 'tasks.db'}"

    @contextmanager
    def locked(self, state: Path) -> Generator[None]:
        with closing(sqlite3.connect(state / "tasks.db", isolation_level=None)) as other:
            other.execute("BEGIN IMMEDIATE")
            yield
            other.execute("ROLLBACK")


class PostgresStore:
    def __init__(self, version: int) -> None:
        self._version = version

    def url(self, state: Path) -> str:
        name = hashlib.sha256(str(state).encode()).hexdigest()[:16]
        return server(self._version).url(f"test_{name}")

    @contextmanager
    def locked(self, state: Path) -> Generator[None]:
        with psycopg.connect(self.url(state)) as other:
            other.execute("LOCK TABLE messages, entries IN EXCLUSIVE MODE")
            yield
            other.rollback()


OLDER = "postgresql-16"
STORES: dict[str, Store] = {
    "sqlite": SqliteStore(),
    "postgresql": PostgresStore(18),
    OLDER: PostgresStore(16),
}
"""By the scheme of a kind of database, and for older versions of it by a name of their own."""
ENGINES = tuple(name for name in STORES if name != OLDER)
DEFAULT = os.environ.get("OPENCODE_A2A_TEST_DATABASE", "sqlite")

_engine = DEFAULT
_servers: dict[int, PostgresServer] = {}


@contextmanager
def using(engine: str) -> Generator[None]:
    global _engine
    before, _engine = _engine, engine
    try:
        yield
    finally:
        _engine = before


def postgresql() -> bool:
    return isinstance(STORES[_engine], PostgresStore)


def url(state: Path) -> str:
    """Return the URL of the database that belongs to a state directory."""
    return STORES[_engine].url(state)


def locked(state: Path) -> AbstractContextManager[None]:
    """Keep the service from writing; it can read."""
    return STORES[_engine].locked(state)


def server(version: int = 18) -> PostgresServer:
    """Return the server of this process; it is started when it is first needed."""
    running = _servers.get(version)
    if running is None:
        running = _servers[version] = PostgresServer(version)
        running.__enter__()
    return running


def close() -> None:
    for server in _servers.values():
        server.__exit__()
