"""Find out who wrote a SQLite file, and read a file of the earlier adapter without changing it.

The earlier adapter (0.4 to 1.4) kept tasks in the table of the A2A SDK. ``store.sqlite`` refuses
to open such a file, and ``opencode_a2a_import`` imports it. Nothing is ever written to it, nor
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
"""The suffixes of files that SQLite leaves beside its own while that lacks changes."""
_SDK_COLUMNS = {"id", "context_id", "kind", "status", "artifacts", "history", "metadata"}


class Author(Enum):
    """Who wrote a database."""

    EMPTY = "nobody yet"
    OURS = "this program"
    EARLIER = "the earlier adapter"
    FOREIGN = "another program"


class SourceChangedError(Exception):
    """A program wrote to the database while it was being read."""


def author_of(file: Path) -> Author:
    """Return who wrote a database; raise ``sqlite3.Error`` if the file is not one."""
    if not file.exists():
        return Author.EMPTY
    with closing(_immutable(file)) as connection:
        author = _author(connection)
    if author is Author.EMPTY and _unfinished(file):  # its tables may be in the journal
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
    """Return the columns of a table; an empty set if there is no such table."""
    return {row[0] for row in connection.execute("SELECT name FROM pragma_table_info(?)", [table])}


def _immutable(file: Path) -> sqlite3.Connection:
    """Open a file without locks, and without the changes in its journal."""
    return sqlite3.connect(f"file:{quote(str(file.absolute()))}?mode=ro&immutable=1", uri=True)


def _unfinished(file: Path) -> list[Path]:
    beside = [file.with_name(file.name + suffix) for suffix in JOURNALS]
    return [path for path in beside if path.exists() and path.stat().st_size]


@contextmanager
def reading(file: Path) -> Generator[sqlite3.Connection]:
    """Open a database to read all of it; raise ``SourceChangedError`` if it changed meanwhile.

    To apply a journal is to write, so that is done in a private copy.
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
