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
DEFAULT = os.environ.get("OPENCODE_A2A_TEST_DATABASE", "sqlite")

_engine = DEFAULT
_server: PostgresServer | None = None


@contextmanager
def using(engine: str) -> Generator[None]:
    global _engine
    before, _engine = _engine, engine
    try:
        yield
    finally:
        _engine = before


def postgresql() -> bool:
    return _engine == "postgresql"


def url(state: Path) -> str:
    """Return the URL of the database that belongs to a state directory."""
    if not postgresql():
        return f"sqlite:///{state / 'tasks.db'}"
    name = hashlib.sha256(str(state).encode()).hexdigest()[:16]
    return server().url(f"test_{name}")


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


def server() -> PostgresServer:
    """Return the server of this process; it is started when it is first needed."""
    global _server
    if _server is None:
        _server = PostgresServer()
        _server.__enter__()
    return _server


def close() -> None:
    if _server is not None:
        _server.__exit__()
