"""Task rows and the log: functions of a connection, to be given to ``Database``.

Rows hold encoded values; what is inside them is known to ``tasks.codec`` alone.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cache
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from opencode_a2a.store.prepared import Prepared
from opencode_a2a.store.schema import entries, interrupts, messages, tallies, tasks


@dataclass(frozen=True, slots=True)
class TaskRow:
    id: str
    principal: str
    context_id: str
    state: str
    created_at: int
    updated_at: int
    status: bytes
    output_modes: bytes | None = None
    request: bytes | None = None
    archive: bytes | None = None
    no: int = 0


@dataclass(frozen=True, slots=True)
class Segment:
    """A run of entries of one task, in their encoded form."""

    task_no: int
    first_seq: int
    last_seq: int
    data: bytes


@dataclass(frozen=True, slots=True)
class Move:
    """The newest status of a task; ``before`` is the state that the row has now."""

    task_no: int
    principal: str
    before: str
    state: str
    at: int
    status: bytes
    archive: bytes | None = None


@dataclass(frozen=True, slots=True)
class Key:
    """The place of a task in a list: newest first, the number decides among equals."""

    updated_at: int
    no: int


@dataclass(frozen=True, slots=True)
class Filter:
    principal: str
    context_id: str | None = None
    state: str | None = None
    since: int | None = None


_ROW = (
    tasks.c.id,
    tasks.c.principal,
    tasks.c.context_id,
    tasks.c.state,
    tasks.c.created_at,
    tasks.c.updated_at,
    tasks.c.status,
    tasks.c.output_modes,
    tasks.c.request,
    tasks.c.archive,
    tasks.c.no,
)
_BRIEF = (*_ROW[:8], sa.null().label("request"), sa.null().label("archive"), tasks.c.no)


def _given(*names: str) -> dict[str, sa.BindParameter[Any]]:
    return {name: sa.bindparam(name) for name in names}


_MINE = tasks.c.principal == sa.bindparam("principal")
_FIND_MESSAGE = Prepared(
    sa.select(*_ROW).where(
        messages.c.task_no == tasks.c.no,
        messages.c.principal == sa.bindparam("principal"),
        messages.c.message_id == sa.bindparam("message_id"),
        messages.c.digest == sa.bindparam("digest"),
    )
)
_ADD_MESSAGE = Prepared(
    messages.insert().values(_given("principal", "message_id", "task_no", "digest"))
)
_ADD_TASK = Prepared(
    tasks.insert()
    .values(
        _given(
            *("id", "principal", "context_id", "state", "created_at", "updated_at"),
            *("output_modes", "status", "request"),
        )
    )
    .returning(tasks.c.no)
)
_ADD_ENTRIES = Prepared(entries.insert().values(_given("task_no", "first_seq", "last_seq", "data")))
_MOVE = Prepared(
    tasks.update()
    .where(tasks.c.no == sa.bindparam("task_no"))
    .values(state=sa.bindparam("to"), updated_at=sa.bindparam("time"), status=sa.bindparam("body"))
)
_END = Prepared(
    tasks.update()
    .where(tasks.c.no == sa.bindparam("task_no"))
    .values(
        state=sa.bindparam("to"),
        updated_at=sa.bindparam("time"),
        status=sa.bindparam("body"),
        archive=sa.bindparam("whole"),
        request=sa.null(),
    )
)
_REQUEST = Prepared(
    tasks.update().where(tasks.c.no == sa.bindparam("task_no")).values(request=sa.bindparam("body"))
)
_TALLY = Prepared(
    tallies.update()
    .where(tallies.c.principal == sa.bindparam("who"), tallies.c.state == sa.bindparam("what"))
    .values(n=tallies.c.n + sa.bindparam("change"))
)
_NEW_TALLY = Prepared(tallies.insert().values(_given("principal", "state", "n")))
_LOAD = Prepared(sa.select(*_ROW).where(tasks.c.id == sa.bindparam("id"), _MINE))
_LOAD_NUMBER = Prepared(sa.select(*_ROW).where(tasks.c.no == sa.bindparam("no")))
_SEGMENTS = Prepared(
    sa.select(entries.c.task_no, entries.c.first_seq, entries.c.last_seq, entries.c.data)
    .where(
        entries.c.task_no == sa.bindparam("task_no"),
        entries.c.first_seq >= sa.bindparam("first_seq"),
    )
    .order_by(entries.c.first_seq)
    .limit(sa.bindparam("most"))
)


def find_message(
    connection: Connection, principal: str, message_id: str, digest: bytes
) -> TaskRow | None:
    """Return the task that a message with this id and content belongs to."""
    row = _FIND_MESSAGE.first(connection, principal=principal, message_id=message_id, digest=digest)
    return TaskRow(*row) if row else None


def add_message(
    connection: Connection, principal: str, message_id: str, task_no: int, digest: bytes
) -> None:
    _ADD_MESSAGE.run(
        connection, principal=principal, message_id=message_id, task_no=task_no, digest=digest
    )


def add_task(connection: Connection, row: TaskRow) -> int:
    added = _ADD_TASK.all(
        connection,
        id=row.id,
        principal=row.principal,
        context_id=row.context_id,
        state=row.state,
        created_at=row.created_at,
        updated_at=row.updated_at,
        output_modes=row.output_modes,
        status=row.status,
        request=row.request,
    )
    _count(connection, row.principal, row.state, 1)
    return added[0][0]


def set_request(connection: Connection, task_no: int, request: bytes | None) -> None:
    """Keep what the task is to prompt next, for a restart in between."""
    _REQUEST.run(connection, task_no=task_no, body=request)


def append(connection: Connection, segments: Sequence[Segment], moves: Sequence[Move]) -> None:
    """Write entries of any number of tasks, and the statuses they lead to."""
    _ADD_ENTRIES.run_many(
        connection,
        [
            {"task_no": s.task_no, "first_seq": s.first_seq, "last_seq": s.last_seq, "data": s.data}
            for s in segments
        ],
    )
    changed = [
        (m, {"task_no": m.task_no, "to": m.state, "time": m.at, "body": m.status}) for m in moves
    ]
    _MOVE.run_many(connection, [row for m, row in changed if m.archive is None])
    _END.run_many(
        connection, [row | {"whole": m.archive} for m, row in changed if m.archive is not None]
    )
    changes: Counter[tuple[str, str]] = Counter()
    for move in moves:
        changes[move.principal, move.before] -= 1
        changes[move.principal, move.state] += 1
    for (principal, state), change in changes.items():
        if change:
            _count(connection, principal, state, change)


def _count(connection: Connection, principal: str, state: str, change: int) -> None:
    if _TALLY.run(connection, who=principal, what=state, change=change) == 0:
        _NEW_TALLY.run(connection, principal=principal, state=state, n=change)


def exists(connection: Connection, task_id: str) -> bool:
    """Whether there is a task of this id, whoever it belongs to."""
    return connection.scalar(sa.select(tasks.c.no).where(tasks.c.id == task_id)) is not None


def any_task(connection: Connection) -> bool:
    return connection.scalar(sa.select(tasks.c.no).limit(1)) is not None


def load(connection: Connection, principal: str, task_id: str) -> TaskRow | None:
    row = _LOAD.first(connection, principal=principal, id=task_id)
    return TaskRow(*row) if row else None


def load_number(connection: Connection, task_no: int) -> TaskRow:
    row = _LOAD_NUMBER.first(connection, no=task_no)
    if row is None:
        raise LookupError(task_no)
    return TaskRow(*row)


def load_open(connection: Connection, states: Sequence[str]) -> list[TaskRow]:
    """Return every task in one of these states, oldest first."""
    rows = connection.execute(
        sa.select(*_ROW).where(tasks.c.state.in_(states)).order_by(tasks.c.no)
    )
    return [TaskRow(*row) for row in rows]


def load_segments(
    connection: Connection, task_no: int, first_seq: int, limit: int = 200
) -> list[Segment]:
    """Return the next segments of a log, from the one that begins with ``first_seq``."""
    rows = _SEGMENTS.all(connection, task_no=task_no, first_seq=first_seq, most=limit)
    return [Segment(*row) for row in rows]


def page(
    connection: Connection, which: Filter, after: Key | None, size: int, whole: bool
) -> tuple[list[TaskRow], int]:
    """Return up to ``size`` tasks after a place in the list, and how many there are in all."""
    values = _values(which)
    query = _page(tuple(values), after is not None, whole)
    place = {} if after is None else {"after_time": after.updated_at, "after_no": after.no}
    rows = query.all(connection, **values, **place, most=size)
    total = _total(tuple(values)).first(connection, **values)
    return [TaskRow(*row) for row in rows], int(total[0] or 0) if total else 0


def _values(which: Filter) -> dict[str, object]:
    """Return the parts of a filter that are given, under the names of their parameters."""
    return {name: value for name, value in asdict(which).items() if value is not None}


def _conditions(given: tuple[str, ...]) -> list[sa.ColumnElement[bool]]:
    all_of_them: dict[str, sa.ColumnElement[bool]] = {
        "principal": _MINE,
        "context_id": tasks.c.context_id == sa.bindparam("context_id"),
        "state": tasks.c.state == sa.bindparam("state"),
        "since": tasks.c.updated_at >= sa.bindparam("since"),
    }
    return [all_of_them[name] for name in given]


@cache
def _page(given: tuple[str, ...], continued: bool, whole: bool) -> Prepared:
    query = sa.select(*(_ROW if whole else _BRIEF)).where(*_conditions(given))
    if continued:
        place = sa.tuple_(sa.bindparam("after_time"), sa.bindparam("after_no"))
        query = query.where(sa.tuple_(tasks.c.updated_at, tasks.c.no) < place)
    newest_first = query.order_by(tasks.c.updated_at.desc(), tasks.c.no.desc())
    return Prepared(newest_first.limit(sa.bindparam("most")))


@cache
def _total(given: tuple[str, ...]) -> Prepared:
    """Count what a filter finds; without context and time from the tallies, at no cost."""
    if "context_id" in given or "since" in given:
        return Prepared(sa.select(sa.func.count()).select_from(tasks).where(*_conditions(given)))
    query = sa.select(sa.func.sum(tallies.c.n)).where(
        tallies.c.principal == sa.bindparam("principal")
    )
    if "state" in given:
        query = query.where(tallies.c.state == sa.bindparam("state"))
    return Prepared(query)


def forget_logs(connection: Connection, states: Sequence[str], before: int, limit: int) -> int:
    """Delete the logs of tasks that ended before a time; the tasks themselves stay readable."""
    numbers = _ended(connection, states, before, limit, with_log=True)
    connection.execute(entries.delete().where(entries.c.task_no.in_(numbers)))
    return len(numbers)


def forget_tasks(connection: Connection, states: Sequence[str], before: int, limit: int) -> int:
    """Delete tasks that ended before a time, with everything that belongs to them."""
    numbers = _ended(connection, states, before, limit, with_log=False)
    rows = connection.execute(
        sa.select(tasks.c.id, tasks.c.principal, tasks.c.state).where(tasks.c.no.in_(numbers))
    ).all()
    for row in rows:
        _count(connection, row.principal, row.state, -1)
    connection.execute(interrupts.delete().where(interrupts.c.task_id.in_([r.id for r in rows])))
    connection.execute(  # those that never had a task
        interrupts.delete().where(interrupts.c.task_id == "", interrupts.c.settled_at < before)
    )
    for table in (entries, messages):
        connection.execute(table.delete().where(table.c.task_no.in_(numbers)))
    connection.execute(tasks.delete().where(tasks.c.no.in_(numbers)))
    return len(numbers)


def _ended(
    connection: Connection, states: Sequence[str], before: int, limit: int, with_log: bool
) -> list[int]:
    query = sa.select(tasks.c.no).where(tasks.c.updated_at < before, tasks.c.state.in_(states))
    if with_log:
        query = query.where(sa.exists().where(entries.c.task_no == tasks.c.no).correlate(tasks))
    return list(connection.scalars(query.limit(limit)))
