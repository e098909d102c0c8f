"""Task rows and the log: functions of a connection, to be given to ``Database``.

Rows hold encoded values; what is inside them is known to ``tasks.codec`` alone.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import sqlalchemy as sa
from sqlalchemy.engine import Connection

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
_BRIEF = (*_ROW[:8], sa.null(), sa.null(), tasks.c.no)
_MOVE = (
    tasks.update()
    .where(tasks.c.no == sa.bindparam("task_no"))
    .values(
        state=sa.bindparam("to"),
        updated_at=sa.bindparam("time"),
        status=sa.bindparam("body"),
    )
)
_ARCHIVE = (
    tasks.update()
    .where(tasks.c.no == sa.bindparam("task_no"))
    .values(archive=sa.bindparam("body"), request=None)
)
_TALLY = (
    tallies.update()
    .where(tallies.c.principal == sa.bindparam("who"), tallies.c.state == sa.bindparam("what"))
    .values(n=tallies.c.n + sa.bindparam("change"))
)


def find_message(
    connection: Connection, principal: str, message_id: str
) -> tuple[int, bytes] | None:
    """Return the number of the task that a message belongs to, and the digest of its content."""
    row = connection.execute(
        sa.select(messages.c.task_no, messages.c.digest).where(
            messages.c.principal == principal, messages.c.message_id == message_id
        )
    ).first()
    return (row.task_no, row.digest) if row else None


def add_message(
    connection: Connection, principal: str, message_id: str, task_no: int, digest: bytes
) -> None:
    connection.execute(
        messages.insert().values(
            principal=principal, message_id=message_id, task_no=task_no, digest=digest
        )
    )


def add_task(connection: Connection, row: TaskRow) -> int:
    number = connection.execute(
        tasks.insert()
        .values(
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
        .returning(tasks.c.no)
    ).scalar_one()
    _count(connection, row.principal, row.state, 1)
    return number


def set_request(connection: Connection, task_no: int, request: bytes | None) -> None:
    """Keep what the task is to prompt next, for a restart in between."""
    connection.execute(tasks.update().where(tasks.c.no == task_no).values(request=request))


def append(connection: Connection, segments: Sequence[Segment], moves: Sequence[Move]) -> None:
    """Write entries of any number of tasks, and the statuses they lead to."""
    if segments:
        connection.execute(
            entries.insert(),
            [
                {
                    "task_no": s.task_no,
                    "first_seq": s.first_seq,
                    "last_seq": s.last_seq,
                    "data": s.data,
                }
                for s in segments
            ],
        )
    if moves:
        connection.execute(
            _MOVE,
            [{"task_no": m.task_no, "to": m.state, "time": m.at, "body": m.status} for m in moves],
        )
    ended = [{"task_no": m.task_no, "body": m.archive} for m in moves if m.archive is not None]
    if ended:
        connection.execute(_ARCHIVE, ended)
    for move in moves:
        if move.before != move.state:
            _count(connection, move.principal, move.before, -1)
            _count(connection, move.principal, move.state, 1)


def _count(connection: Connection, principal: str, state: str, change: int) -> None:
    done = connection.execute(_TALLY, {"who": principal, "what": state, "change": change})
    if done.rowcount == 0:
        connection.execute(tallies.insert().values(principal=principal, state=state, n=change))


def load(connection: Connection, principal: str, task_id: str) -> TaskRow | None:
    row = connection.execute(
        sa.select(*_ROW).where(tasks.c.id == task_id, tasks.c.principal == principal)
    ).first()
    return TaskRow(*row) if row else None


def load_number(connection: Connection, task_no: int) -> TaskRow:
    return TaskRow(*connection.execute(sa.select(*_ROW).where(tasks.c.no == task_no)).one())


def load_open(connection: Connection, states: Sequence[str]) -> list[TaskRow]:
    """Return every task in one of these states, oldest first."""
    rows = connection.execute(
        sa.select(*_ROW).where(tasks.c.state.in_(states)).order_by(tasks.c.no)
    )
    return [TaskRow(*row) for row in rows]


def load_segments(
    connection: Connection, task_no: int, first_seq: int, limit: int = 200
) -> list[Segment]:
    """Return the next segments of a log from the one that holds or follows ``first_seq``."""
    rows = connection.execute(
        sa.select(entries.c.task_no, entries.c.first_seq, entries.c.last_seq, entries.c.data)
        .where(entries.c.task_no == task_no, entries.c.first_seq >= first_seq)
        .order_by(entries.c.first_seq)
        .limit(limit)
    )
    return [Segment(*row) for row in rows]


def page(
    connection: Connection, which: Filter, after: Key | None, size: int, whole: bool
) -> tuple[list[TaskRow], int]:
    """Return up to ``size`` tasks after a place in the list, and how many there are in all."""
    query = sa.select(*(_ROW if whole else _BRIEF)).where(*_conditions(which))
    if after is not None:
        query = query.where(
            sa.tuple_(tasks.c.updated_at, tasks.c.no) < sa.tuple_(after.updated_at, after.no)
        )
    query = query.order_by(tasks.c.updated_at.desc(), tasks.c.no.desc()).limit(size)
    rows = [TaskRow(*row) for row in connection.execute(query)]
    return rows, _total(connection, which)


def _conditions(which: Filter) -> list[sa.ColumnElement[bool]]:
    conditions = [tasks.c.principal == which.principal]
    if which.context_id is not None:
        conditions.append(tasks.c.context_id == which.context_id)
    if which.state is not None:
        conditions.append(tasks.c.state == which.state)
    if which.since is not None:
        conditions.append(tasks.c.updated_at >= which.since)
    return conditions


def _total(connection: Connection, which: Filter) -> int:
    """Count what a filter finds; without context and time from the tallies, at no cost."""
    if which.context_id is None and which.since is None:
        query = sa.select(sa.func.sum(tallies.c.n)).where(tallies.c.principal == which.principal)
        if which.state is not None:
            query = query.where(tallies.c.state == which.state)
        return int(connection.scalar(query) or 0)
    query = sa.select(sa.func.count()).select_from(tasks).where(*_conditions(which))
    return int(connection.scalar(query) or 0)


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
