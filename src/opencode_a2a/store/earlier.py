"""Database files that may not be ours: recognised, and opened to be read without a change.

The earlier adapter (0.4 to 1.4) kept tasks in the A2A SDK's table. ``database`` refuses such a
file, ``tasks.earlier`` imports it, ``cli`` says so. Nothing is ever written to the file, nor
beside it.
"""

import shutil
import sqlite3
import tempfile
from collections.abc import Generator
from contextlib import closing, contextmanager
from enum import Enum
from pathlib import Path
from urllib.parse import quote

JOURNALS = ("-wal", "-journal")
"""What SQLite leaves beside a file while changes are not yet in it, also after a crash."""
_SDK_COLUMNS = {"id", "context_id", "kind", "status", "artifacts", "history", "metadata"}


class Author(Enum):
    """Who wrote a database."""

    EMPTY = "nobody yet"
    OURS = "this program"
    EARLIER = "the earlier adapter"
    FOREIGN = "another program"


class SourceChangedError(Exception):
    """Somebody writes to the database that is being read."""


def author_of(file: Path) -> Author:
    """Look who wrote a database; raises ``sqlite3.Error`` if it is none."""
    if not file.exists():
        return Author.EMPTY
    with closing(_immutable(file)) as connection:
        author = _author(connection)
    if author is Author.EMPTY and _unfinished(file):  # even its tables are only in the journal
        with reading(file) as connection:
            author = _author(connection)
    return author


def _author(connection: sqlite3.Connection) -> Author:
    tables = {name for (name,) in connection.execute("SELECT name FROM sqlite_master")}
    columns = columns_of(connection, "tasks")
    if not tables:
        return Author.EMPTY
    if "principal" in columns and "schema_version" in tables:
        return Author.OURS
    return Author.EARLIER if columns >= _SDK_COLUMNS else Author.FOREIGN


def columns_of(connection: sqlite3.Connection, table: str) -> set[str]:
    """Return the columns of a table; none if there is no such table."""
    return {row[0] for row in connection.execute("SELECT name FROM pragma_table_info(?)", [table])}


def _immutable(file: Path) -> sqlite3.Connection:
    """Open a file without locks and without files beside it; changes in a journal are not seen."""
    return sqlite3.connect(f"file:{quote(str(file.absolute()))}?mode=ro&immutable=1", uri=True)


def _unfinished(file: Path) -> list[Path]:
    beside = [file.with_name(file.name + suffix) for suffix in JOURNALS]
    return [path for path in beside if path.exists() and path.stat().st_size]


@contextmanager
def reading(file: Path) -> Generator[sqlite3.Connection]:
    """Open a database to read all of it; raises ``SourceChangedError`` if it changed meanwhile.

    A journal has to be worked off first, and that writes; it is done in a private copy.
    """

    def mark() -> list[tuple[str, int, int]]:
        stats = [(path.name, path.stat()) for path in (file, *_unfinished(file))]
        return [(name, stat.st_size, stat.st_mtime_ns) for name, stat in stats]

    before = mark()
    with tempfile.TemporaryDirectory(prefix="opencode-a2a-") as directory:
        if journals := _unfinished(file):
            for path in (file, *journals):
                shutil.copyfile(path, Path(directory) / path.name)
            connection = sqlite3.connect(Path(directory) / file.name)
        else:
            connection = _immutable(file)
        with closing(connection):
            yield connection
    if mark() != before:
        raise SourceChangedError
