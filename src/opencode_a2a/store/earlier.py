"""Databases that are not in today's place or form: recognised, and read without a change.

The earlier adapter (0.4 to 1.4) kept tasks in the A2A SDK's table and had tables of its own beside
it; both are named here and nowhere else. ``database`` refuses such a file, ``tasks.earlier``
imports it, ``cli`` says so. Nothing is ever written to the file, nor beside it.
"""

import shutil
import sqlite3
import tempfile
from collections.abc import Generator, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from urllib.parse import quote

JOURNALS = ("-wal", "-journal")
"""What SQLite leaves beside a file while changes are not yet in it, also after a crash."""
_OWNER_UNKNOWN = (None, "", "legacy_v03_no_user_info")
"""Owners that the SDK writes for tasks of a time when it kept none."""
_SDK_COLUMNS = {"id", "context_id", "kind", "status", "artifacts", "history", "metadata"}


class Form(Enum):
    """Who wrote a database."""

    EMPTY = "nobody yet"
    OURS = "this program"
    EARLIER = "the earlier adapter"
    FOREIGN = "another program"


class SourceChangedError(Exception):
    """Somebody writes to the database that is being read."""


@dataclass(frozen=True, slots=True)
class EarlierTask:
    """A task as the SDK stored it: columns of JSON, in the form of protocol 0.3 or 1.0."""

    id: str
    context_id: str
    owner: str | None
    status: str
    artifacts: str | None
    history: str | None
    metadata: str | None


@dataclass(frozen=True, slots=True)
class EarlierLink:
    principal: str
    context_id: str
    workspace_id: str | None
    session_id: str


def form_of(file: Path) -> Form:
    """Look who wrote a database; raises ``sqlite3.Error`` if it is none."""
    if not file.exists():
        return Form.EMPTY
    with closing(_immutable(file)) as connection:
        form = _form(connection)
    if form is Form.EMPTY and _unfinished(file):  # even its tables are only in the journal
        with reading(file) as connection:
            form = _form(connection)
    return form


def _form(connection: sqlite3.Connection) -> Form:
    tables = {name for (name,) in connection.execute("SELECT name FROM sqlite_master")}
    columns = _columns(connection, "tasks")
    if not tables:
        return Form.EMPTY
    if "principal" in columns and "schema_version" in tables:
        return Form.OURS
    return Form.EARLIER if columns >= _SDK_COLUMNS else Form.FOREIGN


def _columns(connection: sqlite3.Connection, table: str) -> set[str]:
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
    before = _mark(file)
    with tempfile.TemporaryDirectory(prefix="opencode-a2a-") as directory:
        if journals := _unfinished(file):
            for path in (file, *journals):
                shutil.copyfile(path, Path(directory) / path.name)
            connection = sqlite3.connect(Path(directory) / file.name)
        else:
            connection = _immutable(file)
        with closing(connection):
            yield connection
    if _mark(file) != before:
        raise SourceChangedError


def _mark(file: Path) -> list[tuple[str, int, int]]:
    stats = [(path.name, path.stat()) for path in (file, *_unfinished(file))]
    return [(name, stat.st_size, stat.st_mtime_ns) for name, stat in stats]


def tasks(source: sqlite3.Connection) -> Iterator[EarlierTask]:
    """Yield every task, oldest first.

    Before 1.0 tasks had no owner. The only principal with a session in the task's context is its
    owner then, or the only one that the database knows at all.
    """
    owner = "owner" if "owner" in _columns(source, "tasks") else "NULL"
    everybody = {principal for _, principal in owners(source)}
    principals: dict[str, set[str]] = {}
    for link in links(source):
        principals.setdefault(link.context_id, set()).add(link.principal)
    rows = source.execute(
        f"SELECT id, context_id, {owner}, status, artifacts, history, metadata "  # noqa: S608 - one of two words
        "FROM tasks ORDER BY rowid"
    )
    for task_id, context_id, principal, *columns in rows:
        if principal in _OWNER_UNKNOWN:
            known = principals.get(context_id, everybody)
            principal = next(iter(known)) if len(known) == 1 else None
        yield EarlierTask(task_id, context_id, principal, *columns)


def links(source: sqlite3.Connection) -> Iterator[EarlierLink]:
    """Yield which session each context of a principal has."""
    if not _columns(source, "a2a_session_bindings"):
        return
    rows = source.execute("SELECT identity, context_id, session_id FROM a2a_session_bindings")
    for principal, context, session_id in rows:
        context_id, _, workspace_id = context.partition("::workspace:")
        yield EarlierLink(principal, context_id, workspace_id or None, session_id)


def owners(source: sqlite3.Connection) -> Iterator[tuple[str, str]]:
    """Yield each session with the principal it belongs to."""
    if _columns(source, "a2a_session_owners"):
        yield from source.execute("SELECT session_id, identity FROM a2a_session_owners")


def interrupts(source: sqlite3.Connection) -> int:
    """Count the permissions and questions that wait for an answer."""
    if not _columns(source, "a2a_interrupt_requests"):
        return 0
    waiting = "SELECT count(*) FROM a2a_interrupt_requests WHERE tombstone_expires_at IS NULL"
    return source.execute(waiting).fetchone()[0]
