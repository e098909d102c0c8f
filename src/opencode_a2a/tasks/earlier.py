"""Tasks of the earlier adapter, taken over.

``store.earlier`` reads its database; here its JSON becomes events, and these become a task as if it
had run here. Only what is finished is taken: an open task has no turn that could go on.
"""

import sqlite3
from collections import Counter
from collections.abc import Iterator
from contextlib import closing, suppress
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Annotated, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    GetPydanticSchema,
    TypeAdapter,
    ValidationError,
)
from pydantic import Json as Encoded
from pydantic_core import core_schema
from sqlalchemy.engine import Connection
from sqlalchemy.exc import SQLAlchemyError

from opencode_a2a.clock import now_ms
from opencode_a2a.events import (
    Channel,
    ChannelClosed,
    Failure,
    Finished,
    Json,
    JsonObject,
    Outcome,
    ReasoningGrew,
    SessionBound,
    Started,
    TextGrew,
    ToolChanged,
)
from opencode_a2a.ids import ContextId, MessageId, Principal, SessionId, TaskId
from opencode_a2a.messages import Message, Part
from opencode_a2a.store import earlier
from opencode_a2a.store import links as session_links
from opencode_a2a.store import tasks as rows
from opencode_a2a.store.database import Database
from opencode_a2a.tasks.codec import dump_archive, dump_status
from opencode_a2a.tasks.state import (
    Accepted,
    Answered,
    LogEvent,
    State,
    TaskRef,
    TaskState,
    fold,
)


@dataclass(slots=True)
class Report:
    """What an import took, and what it left for which reason; both by kind."""

    taken: Counter[str] = field(default_factory=Counter[str])
    left: Counter[str] = field(default_factory=Counter[str])


class ImportFailedError(Exception):
    """Nothing was imported; the text says why and what to do."""


async def import_database(file: Path, url: str, retention_days: int) -> Report:
    """Import a database of the earlier adapter, or copy one of ours, into the one at ``url``."""
    try:
        form = earlier.form_of(file)
        if form is earlier.Form.OURS:
            return await _copy(file, url)
        if form is not earlier.Form.EARLIER:
            raise ImportFailedError(f"{file} is not a database of opencode-a2a")
        async with Database(url) as database:
            return await database.post(lambda target: _import(file, target, retention_days))
    except earlier.SourceChangedError:
        raise ImportFailedError(
            f"{file} changed while it was read; stop the program that writes it, and try again"
        ) from None
    except (OSError, sqlite3.Error) as error:
        raise ImportFailedError(f"cannot read {file}: {error}") from None
    except SQLAlchemyError as error:
        raise ImportFailedError(f"cannot write {url}: {error}") from None


def _import(file: Path, target: Connection, retention_days: int) -> Report:
    now = now_ms()
    oldest = now - retention_days * 86_400_000 if retention_days else None
    with earlier.reading(file) as source:
        return take(source, target, now, oldest)


async def _copy(file: Path, url: str) -> Report:
    async with Database(url) as database:
        if await database.read(rows.any_task):
            raise ImportFailedError(
                f"{file} is in today's form, and there are tasks in {database.name} already; "
                "to use it as it is, name it as A2A_TASK_STORE_DATABASE_URL"
            )
    with earlier.reading(file) as source, closing(sqlite3.connect(database.file)) as target:
        source.backup(target)
        number = target.execute("SELECT count(*) FROM tasks").fetchone()[0]
    async with Database(url):
        return Report(Counter({"tasks, with everything that belongs to them": number}))


def take(
    source: sqlite3.Connection, target: Connection, now: int, oldest: int | None = None
) -> Report:
    """Import what is not here yet; tasks that ended before ``oldest`` would be deleted at once."""
    report = Report()
    known = {(link.principal, link.context_id): link.session_id for link in earlier.links(source)}
    for task in earlier.tasks(source):
        report_as = _take_task(task, known, target, now, oldest)
        if report_as:
            report.left[report_as] += 1
        else:
            report.taken["tasks"] += 1
    for session_id, principal in earlier.owners(source):
        owner = session_links.owner(target, SessionId(session_id), now)
        if owner is None:
            session_links.own(target, Principal(principal), SessionId(session_id))
            report.taken["session owners"] += 1
        else:
            report.left["session owners that are here already"] += 1
    for link in earlier.links(source):
        place = f"workspace:{link.workspace_id}" if link.workspace_id else ""
        context = (Principal(link.principal), ContextId(link.context_id), place)
        owner = session_links.owner(target, SessionId(link.session_id), now)
        if session_links.linked(target, *context):
            report.left["context links that are here already"] += 1
        elif owner not in (None, link.principal):
            report.left["context links to a session of somebody else"] += 1
        else:
            session_links.link(target, *context, SessionId(link.session_id), now)
            report.taken["context links"] += 1
    if waiting := earlier.interrupts(source):
        report.left["permissions and questions, whose turns are over"] += waiting
    return report


def _take_task(
    task: earlier.EarlierTask,
    known: dict[tuple[str, str], str],
    target: Connection,
    now: int,
    oldest: int | None,
) -> str | None:
    """Import one task; return why it was left, if it was."""
    if task.owner is None:
        return "tasks of an unknown owner"
    try:
        record = _Record.model_validate(task, from_attributes=True)
    except ValidationError:
        return "tasks that cannot be read"
    if record.status.state not in _OUTCOMES:
        return "tasks that are not finished"
    at = record.status.at or now
    if oldest is not None and at < oldest:
        return "tasks older than A2A_TASK_RETENTION_DAYS"
    if rows.exists(target, task.id):
        return "tasks that are here already"
    ref = TaskRef(TaskId(task.id), ContextId(task.context_id), Principal(task.owner), created_at=at)
    session_id = record.session_id or known.get((task.owner, task.context_id))
    state, _ = fold(ref, ((at, event) for event in _events(record, session_id)))
    _store(target, state, at)
    return None


def _store(target: Connection, state: TaskState, at: int) -> None:
    ref, status = state.ref, dump_status(state.status)
    begun = rows.TaskRow(
        ref.id, ref.principal, ref.context_id, State.SUBMITTED, at, at, status=status
    )
    no = rows.add_task(target, begun)
    ended = rows.Move(
        *(no, ref.principal, State.SUBMITTED, state.status.state, at, status, dump_archive(state))
    )
    rows.append(target, [], [ended])  # no log: it would be deleted after an hour anyway


# --- the JSON of the SDK, protocol 0.3 and 1.0 alike -------------------------------------------


_AnyValue = Annotated[Json, GetPydanticSchema(lambda _type, _next: core_schema.any_schema())]
_AnyObject = Annotated[
    JsonObject, GetPydanticSchema(lambda _type, _next: core_schema.dict_schema())
]


class _Stored(BaseModel):
    model_config = ConfigDict(extra="ignore", from_attributes=True)


class _File(_Stored):
    bytes: str | None = None
    uri: str | None = None
    mimeType: str | None = None  # noqa: N815 - as it is stored
    name: str | None = None


class _Part(_Stored):
    text: str | None = None
    data: _AnyValue = None
    raw: str | None = None
    url: str | None = None
    mediaType: str | None = None  # noqa: N815 - as it is stored
    filename: str | None = None
    file: _File | None = None
    metadata: _AnyObject | None = None

    def content(self) -> Part:
        if self.text is not None:
            return Part("text", text=self.text, metadata=self.metadata)
        file = self.file or _File(
            bytes=self.raw, uri=self.url, mimeType=self.mediaType, name=self.filename
        )
        named = {"media_type": file.mimeType, "filename": file.name}
        if file.bytes is not None:
            return Part("raw", raw=file.bytes, metadata=self.metadata, **named)
        if file.uri is not None:
            return Part("url", url=file.uri, metadata=self.metadata, **named)
        return Part("data", data=self.data, metadata=self.metadata)


class _Message(_Stored):
    messageId: str  # noqa: N815 - as it is stored
    role: str
    parts: list[_Part] = []
    metadata: _AnyObject | None = None

    def message(self) -> Message:
        user = self.role in ("user", "ROLE_USER")
        parts = [part.content() for part in self.parts]
        return Message(self.messageId, "user" if user else "agent", parts, self.metadata)


class _Artifact(_Stored):
    artifactId: str  # noqa: N815 - as it is stored
    parts: list[_Part] = []


class _Status(_Stored):
    state: str
    message: _Message | None = None
    timestamp: datetime | None = None

    @property
    def at(self) -> int | None:
        return int(self.timestamp.timestamp() * 1000) if self.timestamp else None


class _Session(_Stored):
    id: str | None = None


class _Shared(_Stored):
    session: _Session = _Session()


class _Error(_Stored):
    type: str = "UPSTREAM_EXECUTION_ERROR"
    upstream_status: float | None = None


class _OpenCode(_Stored):
    error: _Error = _Error()


class _Metadata(_Stored):
    shared: _Shared = _Shared()
    opencode: _OpenCode = _OpenCode()


class _ToolCall(_Stored):
    call_id: str
    tool: str
    status: Literal["pending", "running", "completed", "error"] = "completed"
    title: str | None = None
    input: _AnyObject | None = None
    output: str | None = None
    error: str | None = None


def _null_is_empty(value: object) -> object:
    return "[]" if value in (None, "null") else value


class _Record(_Stored):
    id: str
    status: Encoded[_Status]
    artifacts: Annotated[Encoded[list[_Artifact]], BeforeValidator(_null_is_empty)]
    history: Annotated[Encoded[list[_Message]], BeforeValidator(_null_is_empty)]
    metadata: Encoded[_Metadata | None] | None

    @property
    def session_id(self) -> str | None:
        return self.metadata.shared.session.id if self.metadata else None


_OUTCOMES = {
    name: outcome
    for outcome in (Outcome.COMPLETED, Outcome.FAILED, Outcome.CANCELED, Outcome.REJECTED)
    for name in (outcome.value, f"TASK_STATE_{outcome.name}")
}
_TOOL_CALL = TypeAdapter(_ToolCall)


def _events(record: _Record, session_id: str | None) -> Iterator[LogEvent]:
    """Tell a finished task as a turn would have told it."""
    last = record.status.message
    history = [m.message() for m in record.history if last is None or m.messageId != last.messageId]
    if history:
        yield Accepted(history[0])
        yield from map(Answered, history[1:])
    if session_id:
        yield SessionBound(SessionId(session_id))
    yield Started()
    message_id = MessageId(last.messageId if last else record.id)
    opened: set[Channel] = set()
    for artifact in record.artifacts:
        thought = artifact.artifactId.endswith(":reasoning")
        channel, grew = (Channel.REASONING, ReasoningGrew) if thought else (Channel.TEXT, TextGrew)
        for part in artifact.parts:
            if part.text:
                yield grew(message_id, artifact.artifactId, part.text, opens=channel not in opened)
                opened.add(channel)
            elif part.data is not None:
                with suppress(ValidationError):
                    call = _TOOL_CALL.validate_python(part.data)
                    yield ToolChanged(message_id, call.call_id, **call.model_dump())
    for channel in opened:
        yield ChannelClosed(channel, message_id)
    outcome = _OUTCOMES[record.status.state]
    yield Finished(outcome, message_id, failure=_failure(record, outcome))


def _failure(record: _Record, outcome: Outcome) -> Failure | None:
    if outcome in (Outcome.COMPLETED, Outcome.CANCELED):
        return None
    error = record.metadata.opencode.error if record.metadata else _Error()
    status = record.status.message
    said = status.message().text if status else ""
    code = int(error.upstream_status) if error.upstream_status else None
    return Failure(error.type, said or "The task failed.", code)
