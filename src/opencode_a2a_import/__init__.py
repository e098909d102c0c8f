"""Import of the tasks of the earlier adapter; only the command ``migrate`` uses it.

Its database has the tasks table of the A2A SDK, with JSON columns in the form of protocol 0.3 or
1.0, and some tables of its own; no other module knows their names. The JSON is turned into events,
and the events into a task as if it had run here. Only finished tasks are imported: an open one has
no turn that could continue.
"""

import sqlite3
from collections import Counter
from collections.abc import Iterator
from contextlib import closing, suppress
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Literal, NamedTuple

import sqlalchemy as sa
from pydantic import AliasPath, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError
from pydantic import Json as Encoded
from pydantic.alias_generators import to_camel
from sqlalchemy.engine import Connection
from sqlalchemy.exc import SQLAlchemyError

from opencode_a2a.clock import now_ms
from opencode_a2a.databases import database_file
from opencode_a2a.events import (
    GREW,
    Channel,
    ChannelClosed,
    Failure,
    Finished,
    Json,
    JsonObject,
    Outcome,
    SessionBound,
    Started,
    ToolChanged,
)
from opencode_a2a.ids import MAIN, ContextId, MessageId, Principal, SessionId, TaskId
from opencode_a2a.log.log import new_row, status_change
from opencode_a2a.log.state import (
    Accepted,
    LogEvent,
    TaskRef,
    TaskState,
)
from opencode_a2a.messages import Answered, Message, Part
from opencode_a2a.store import replicas
from opencode_a2a.store import tasks as task_rows
from opencode_a2a.store.authorship import Author, SourceChangedError, author_of, columns_of, reading
from opencode_a2a.store.database import Database, engine_of
from opencode_a2a.store.engine import cause
from opencode_a2a.store.schema import links, metadata, places, version
from opencode_a2a.validation import FREE, FREE_OBJECT

_OWNER_UNKNOWN = (None, "", "legacy_v03_no_user_info")
"""The owners in rows that were written before the SDK stored owners."""
LONGEST_BEAT_SECONDS = 15.0
"""A running service writes to the database at least this often, whatever its lease."""
_OUTCOMES = {
    name: outcome
    for outcome in (Outcome.COMPLETED, Outcome.FAILED, Outcome.CANCELED, Outcome.REJECTED)
    for name in (outcome.value, f"TASK_STATE_{outcome.name}")
}


@dataclass(slots=True)
class Report:
    """How many things an import took, by kind, and how many it left, by reason."""

    taken: Counter[str] = field(default_factory=Counter[str])
    left: Counter[str] = field(default_factory=Counter[str])
    target: str = ""
    """The name of the database that was imported into."""


class ImportFailedError(Exception):
    """Nothing was imported; the text says why and what to do."""


async def import_database(file: Path, url: str, retention_days: int) -> Report:
    """Import a database of the earlier adapter, or copy one of ours, into the one at ``url``."""
    now = now_ms()
    oldest = now - retention_days * 86_400_000 if retention_days else None

    def write(target: Connection) -> Report:
        with reading(file) as source:
            return _import_all(source, target, now, oldest)

    try:
        author = author_of(file)
        if author is Author.OURS:
            async with Database(url) as database:
                await _check_unused(database)
                if await database.read(task_rows.any_task):
                    raise ImportFailedError(
                        f"{file} is in today's form, and there are tasks in {database.name} "
                        "already; to use it as it is, name it as A2A_TASK_STORE_DATABASE_URL"
                    )
            with TemporaryDirectory(prefix="opencode-a2a-") as directory:
                into = database_file(url)
                copy = into or Path(directory) / "copy.db"
                with reading(file) as source, closing(sqlite3.connect(copy)) as target:
                    source.backup(target)
                    number = target.execute("SELECT count(*) FROM tasks").fetchone()[0]
                async with Database(f"sqlite:///{copy}"):
                    pass  # opening it upgrades the copy to the newest schema
                if into is None:
                    async with Database(url) as database:
                        await database.submit(copy_tables, copy).done
            taken = Counter({"tasks, with everything that belongs to them": number})
            return Report(taken, target=database.name)
        if author is not Author.EARLIER:
            raise ImportFailedError(f"{file} is not a database of opencode-a2a")
        async with Database(url) as database:
            await _check_unused(database)
            report = await database.submit(write).done
            report.target = database.name
            return report
    except SourceChangedError:
        raise ImportFailedError(
            f"{file} changed while it was read; stop the program that writes it, and try again"
        ) from None
    except (OSError, sqlite3.Error) as error:
        raise ImportFailedError(f"cannot read {file}: {error}") from None
    except SQLAlchemyError as error:
        raise ImportFailedError(f"cannot write the tasks: {cause(error)}") from None


class _Link(NamedTuple):
    principal: Principal
    context_id: ContextId
    place: str
    session_id: SessionId


def _import_all(
    source: sqlite3.Connection, target: Connection, now: int, oldest: int | None = None
) -> Report:
    """Import everything that the target lacks, but no tasks that ended before ``oldest``.

    The next sweep would delete those.
    """
    report = Report()
    links: list[_Link] = []
    if columns_of(source, "a2a_session_bindings"):
        bindings = "SELECT identity, context_id, session_id FROM a2a_session_bindings"
        for principal, context, session_id in source.execute(bindings):
            context_id, marker, workspace = context.partition("::workspace:")
            place = f"workspace:{workspace}" if marker and workspace else ""
            links.append(_Link(principal, context_id, place, session_id))
    owners: list[tuple[SessionId, Principal]] = []
    if columns_of(source, "a2a_session_owners"):
        owners += source.execute("SELECT session_id, identity FROM a2a_session_owners")
    for task in _tasks(source, links, {principal for _, principal in owners}):
        reason = _import_task(task, links, target, now, oldest)
        if reason is None:
            report.taken["tasks"] += 1
        else:
            report.left[reason] += 1
    for session_id, principal in owners:
        if task_rows.owner_of_session(target, session_id, now) is None:
            task_rows.own_session(target, principal, session_id, MAIN)
            report.taken["session owners"] += 1
        else:
            report.left["session owners that are here already"] += 1
    for link in links:
        if task_rows.linked_session(target, link.principal, link.context_id, link.place):
            report.left["context links that are here already"] += 1
        elif task_rows.owner_of_session(target, link.session_id, now) not in (None, link.principal):
            report.left["context links to a session of somebody else"] += 1
        else:
            task_rows.link_session(target, *link, MAIN, now)
            report.taken["context links"] += 1
    if columns_of(source, "a2a_interrupt_requests"):
        waiting = "SELECT count(*) FROM a2a_interrupt_requests WHERE tombstone_expires_at IS NULL"
        if number := source.execute(waiting).fetchone()[0]:
            report.left["permissions and questions, whose turns are over"] += number
    return report


def _tasks(
    source: sqlite3.Connection, links: list[_Link], everybody: set[Principal]
) -> Iterator[dict[str, str | None]]:
    """Yield the columns of every task, oldest first.

    Before 1.0 tasks had no owner. The owner is then the only principal with a session in the
    context of the task, or the only principal in the database.
    """
    owner = "owner" if "owner" in columns_of(source, "tasks") else "NULL"
    names = ("id", "context_id", "owner", "status", "artifacts", "history", "metadata")
    principals: dict[str | None, set[Principal]] = {}
    for link in links:
        principals.setdefault(link.context_id, set()).add(link.principal)
    for columns in source.execute(
        f"SELECT id, context_id, {owner}, status, artifacts, history, metadata "  # noqa: S608 - one of two words
        "FROM tasks ORDER BY rowid"
    ):
        task: dict[str, str | None] = dict(zip(names, columns, strict=True))
        if task["owner"] in _OWNER_UNKNOWN:
            known = principals.get(task["context_id"], everybody)
            task["owner"] = next(iter(known)) if len(known) == 1 else None
        yield task


def _import_task(
    columns: dict[str, str | None],
    links: list[_Link],
    target: Connection,
    now: int,
    oldest: int | None,
) -> str | None:
    """Import one task; return why it was left, if it was."""
    if columns["owner"] is None:
        return "tasks of an unknown owner"
    try:
        task = _Task.model_validate(columns)
    except ValidationError:
        return "tasks that cannot be read"
    if task.status.state not in _OUTCOMES:
        return "tasks that are not finished"
    at = int(task.status.timestamp.timestamp() * 1000) if task.status.timestamp else now
    if oldest is not None and at < oldest:
        return "tasks older than A2A_TASK_RETENTION_DAYS"
    if task_rows.exists(target, task.id):
        return "tasks that are here already"
    principal, context_id = Principal(task.owner), ContextId(task.context_id)
    session_id = task.metadata.session_id if task.metadata else None
    for link in reversed(links):
        if session_id is None and (link.principal, link.context_id) == (principal, context_id):
            session_id = link.session_id
    state = TaskState(TaskRef(TaskId(task.id), context_id, principal, created_at=at))
    no, before = task_rows.add_task(target, new_row(state)), state.status
    for event in _events(task, session_id):
        state.apply(event, at)
    # Without a log, which would be deleted after an hour anyway.
    task_rows.append(target, [], [status_change(no, before, state.status, state)])
    return None


# --- the JSON of the SDK, protocol 0.3 and 1.0 alike -------------------------------------------


class _Stored(BaseModel):
    model_config = ConfigDict(extra="ignore", alias_generator=to_camel)


class _File(_Stored):
    bytes: str | None = None
    uri: str | None = None
    mime_type: str | None = None
    name: str | None = None


class _EarlierPart(_Stored):
    text: str | None = None
    data: Annotated[Json, FREE] = None
    raw: str | None = None
    url: str | None = None
    media_type: str | None = None
    filename: str | None = None
    file: _File = _File()
    """Where 0.3 has the content of files, which 1.0 has in the part itself."""
    metadata: Annotated[JsonObject, FREE_OBJECT] | None = None

    def content(self) -> Part:
        named = {
            "media_type": self.media_type or self.file.mime_type,
            "filename": self.filename or self.file.name,
        }
        if self.text is not None:
            return Part("text", text=self.text, metadata=self.metadata)
        if (raw := self.raw if self.raw is not None else self.file.bytes) is not None:
            return Part("raw", raw=raw, metadata=self.metadata, **named)
        if (url := self.url if self.url is not None else self.file.uri) is not None:
            return Part("url", url=url, metadata=self.metadata, **named)
        return Part("data", data=self.data, metadata=self.metadata)


class _EarlierMessage(_Stored):
    message_id: str
    role: str
    parts: list[_EarlierPart] = []
    metadata: Annotated[JsonObject, FREE_OBJECT] | None = None

    def message(self) -> Message:
        user = self.role in ("user", "ROLE_USER")
        parts = [part.content() for part in self.parts]
        return Message(self.message_id, "user" if user else "agent", parts, self.metadata)


class _Artifact(_Stored):
    artifact_id: str
    parts: list[_EarlierPart] = []


class _Status(_Stored):
    state: str
    message: _EarlierMessage | None = None
    timestamp: datetime | None = None


class _Metadata(BaseModel):
    session_id: SessionId | None = Field(
        None, validation_alias=AliasPath("shared", "session", "id")
    )
    error: str = Field(
        "UPSTREAM_EXECUTION_ERROR", validation_alias=AliasPath("opencode", "error", "type")
    )
    upstream_status: float | None = Field(
        None, validation_alias=AliasPath("opencode", "error", "upstream_status")
    )


class _ToolCall(BaseModel):
    call_id: str
    tool: str
    status: Literal["pending", "running", "completed", "error"] = "completed"
    title: str | None = None
    input: Annotated[JsonObject, FREE_OBJECT] | None = None
    output: str | None = None
    error: str | None = None


_NullIsEmpty = BeforeValidator(lambda value: "[]" if value in (None, "null") else value)


class _Task(BaseModel):
    id: str
    context_id: str
    owner: str
    status: Encoded[_Status]
    artifacts: Annotated[Encoded[list[_Artifact]], _NullIsEmpty]
    history: Annotated[Encoded[list[_EarlierMessage]], _NullIsEmpty]
    metadata: Encoded[_Metadata | None] | None


def _events(task: _Task, session_id: SessionId | None) -> Iterator[LogEvent]:
    """Yield the events that the turn of a finished task would have reported."""
    last = task.status.message
    history = [m.message() for m in task.history if last is None or m.message_id != last.message_id]
    if history:
        yield Accepted(history[0])
        yield from map(Answered, history[1:])
    if session_id:
        yield SessionBound(session_id)
    yield Started()
    message_id = MessageId(last.message_id if last else task.id)
    opened: set[Channel] = set()
    for artifact in task.artifacts:
        thought = artifact.artifact_id.endswith(":reasoning")
        channel = Channel.REASONING if thought else Channel.TEXT
        for part in artifact.parts:
            if part.text:
                opens = channel not in opened
                yield GREW[channel](message_id, artifact.artifact_id, part.text, opens=opens)
                opened.add(channel)
            elif part.data is not None:
                with suppress(ValidationError):
                    call = _ToolCall.model_validate(part.data)
                    yield ToolChanged(message_id, call.call_id, **call.model_dump())
    for channel in opened:
        yield ChannelClosed(channel, message_id)
    outcome, failure = _OUTCOMES[task.status.state], None
    if outcome in (Outcome.FAILED, Outcome.REJECTED):
        metadata = task.metadata or _Metadata.model_validate({})
        code = int(metadata.upstream_status) if metadata.upstream_status else None
        said = last.message().text if last else ""
        failure = Failure(metadata.error, said or "The task failed.", code)
    yield Finished(outcome, message_id, failure=failure)


async def _check_unused(database: Database) -> None:
    """Refuse to write to a database that a service uses."""
    if database.replica is None:
        return  # opening a file locks out other processes
    for one in await database.read(replicas.live):
        if one.no != database.replica and one.silent_seconds < LONGEST_BEAT_SECONDS:
            raise ImportFailedError(
                f"{database.name} is in use by {one.name}; stop it first (one that was killed "
                "counts as stopped after 15 s)"
            )


def copy_tables(target: Connection, file: Path) -> None:
    """Copy all tables of a SQLite file of the newest schema into an empty database."""
    engine = sa.create_engine(f"sqlite:///{file}")
    with engine.connect() as source:
        for table in metadata.sorted_tables:
            if table is version:
                continue
            all_rows = source.execution_options(stream_results=True).execute(sa.select(table))
            for rows in all_rows.mappings().partitions(500):
                found = [dict(row) for row in rows]
                for column in {links.c.place, places.c.name} & set(table.c):
                    for row in found:
                        row[column.name] = task_rows.index_key(target, row[column.name])
                target.execute(table.insert(), found)
            engine_of(target).continue_numbering(target, table)
    engine.dispose()
