"""The kinds of database that can hold tasks: a table with a row for each.

Everything that the program has to know of a kind before it opens a database is in its row.
Everything else is in the ``Engine`` that the row names (``store/engine.py``).
"""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class DatabaseKind:
    name: str
    """For people."""
    schemes: tuple[str, ...]
    """How its URLs may begin. Settings rewrite the others to the first."""
    example: str
    """A URL, shown to somebody who wrote one that cannot be used."""
    engine: str
    """The subclass of ``Engine``, as ``module:class``; imported when a database is opened."""
    shared: bool
    """Whether it is a server, which several processes on several machines can use at the same time.
    If not, a URL names a file that one process has to itself, or a database in memory."""
    driver: str | None = None
    """The optional package that it needs, as ``pip install`` takes it."""
    extra: str | None = None
    """The extra of this program that brings the driver."""
    secret_variables: frozenset[str] = frozenset()
    """Environment variables from which the driver may read a password."""
    copied_by: str | None = None
    """The program of the database that copies one elsewhere, if it is shared."""


KINDS = (
    DatabaseKind(
        "SQLite",
        ("sqlite", "sqlite+aiosqlite", "sqlite+pysqlite"),
        "sqlite:////var/lib/opencode-a2a/tasks.db",
        "opencode_a2a.store.sqlite:Sqlite",
        shared=False,
    ),
    DatabaseKind(
        "PostgreSQL",
        ("postgresql", "postgres", "postgresql+psycopg"),
        "postgresql://user@host:5432/database",
        "opencode_a2a.store.postgres:Postgres",
        shared=True,
        driver="psycopg[binary]",
        extra="postgres",
        secret_variables=frozenset({"PGPASSWORD"}),
        copied_by="pg_dump",
    ),
)
_BY_SCHEME = {scheme: kind for kind in KINDS for scheme in kind.schemes}


def kind_of(url: str) -> DatabaseKind:
    """Return the kind of database that a URL names; raise ValueError if it names none."""
    scheme, separator, _ = url.partition("://")
    if not separator or scheme not in _BY_SCHEME:
        known = (f"of {kind.name}, such as {kind.example}" for kind in KINDS)
        raise ValueError(f"should be a URL {', or '.join(known)}")
    return _BY_SCHEME[scheme]


def normalize(url: str) -> str:
    """Return the URL with the first of the schemes of its kind; raise ValueError."""
    kind, rest = kind_of(url), url.partition("://")[2]
    if not kind.shared and rest.startswith("/file:"):
        # A second syntax for paths, which could hide where a file is.
        raise ValueError("should name a file as it is, not as file:…")
    return f"{kind.schemes[0]}://{rest}"


def is_shared(url: str) -> bool:
    """Whether a text is the URL of a database that several processes can share."""
    scheme, separator, _ = url.partition("://")
    return bool(separator) and scheme in _BY_SCHEME and _BY_SCHEME[scheme].shared


def database_file(url: str) -> Path | None:
    """Return the file that a URL names; None for a database in memory or on a server."""
    if is_shared(url):
        return None
    name = url.partition("://")[2].partition("?")[0].removeprefix("/")
    return None if name in ("", ":memory:") else Path(name).absolute()
