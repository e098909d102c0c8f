"""Which database the services and stores of the tests use.

Most tests run on SQLite. Those marked with ``both_databases`` run on PostgreSQL too, in a schema
for each state directory, on one server for each process that runs tests.
``OPENCODE_A2A_TEST_DATABASE=postgresql`` runs the others there as well.
"""

import hashlib
import os
import sqlite3
from collections.abc import Generator
from contextlib import closing, contextmanager
from pathlib import Path

import psycopg

from tests.support.postgres import PostgresServer

ENGINES = ("sqlite", "postgresql")
OLDER = "postgresql-16"
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
    return _engine != "sqlite"


def url(state: Path) -> str:
    """Return the URL of the database that belongs to a state directory."""
    if not postgresql():
        return f"sqlite:///{state / 'tasks.db'}"
    name = hashlib.sha256(str(state).encode()).hexdigest()[:16]
    return server(16 if _engine == OLDER else 18).url(f"test_{name}")


@contextmanager
def locked(state: Path) -> Generator[None]:
    """Keep the service from writing; it can read."""
    if postgresql():
        with psycopg.connect(url(state)) as other:
            other.execute("LOCK TABLE messages, entries IN EXCLUSIVE MODE")
            yield
            other.rollback()
    else:
        with closing(sqlite3.connect(state / "tasks.db", isolation_level=None)) as other:
            other.execute("BEGIN IMMEDIATE")
            yield
            other.execute("ROLLBACK")


def server(version: int = 18) -> PostgresServer:
    """Return the server of this process; it is started when it is first needed."""
    found = _servers.get(version)
    if found is None:
        found = _servers[version] = PostgresServer(version)
        found.__enter__()
    return found


def close() -> None:
    for server in _servers.values():
        server.__exit__()
