"""Pending and settled interrupts: the deadline survives a restart, the record stays."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import sqlalchemy as sa
from sqlalchemy.engine import Connection
from sqlalchemy.sql import ColumnElement

from opencode_a2a.ids import Principal
from opencode_a2a.store.schema import interrupts, owners, tasks


@dataclass(frozen=True, slots=True)
class InterruptRow:
    request_id: str
    task_id: str
    """Empty when the work was begun by method and no task follows it."""
    context_id: str
    principal: str
    type: str
    asked: bytes
    expires_at: int
    resolution: str | None = None
    settled_at: int | None = None
    settled_by: str | None = None
    answer: bytes | None = None
    """The latest answer, stored before OpenCode was given it."""
    number: int | None = None
    rights: bytes | None = None
    """What the work may do; an earlier version did not store it."""


def add(connection: Connection, row: InterruptRow, *, numbered: bool) -> InterruptRow:
    """Store an interrupt and return it; one that is stored already is returned as it was.

    If it is to be numbered, it gets the next number of its task.
    """
    earlier = find(connection, row.request_id)
    number = earlier and earlier.number
    if numbered and number is None:
        highest = sa.select(sa.func.max(interrupts.c.number)).where(
            interrupts.c.task_id == row.task_id
        )
        number = (connection.scalar(highest) or 0) + 1
    if earlier is not None:
        if number != earlier.number:  # asked by an earlier program, or answered by a rule then
            connection.execute(_unsettled(row.request_id).values(number=number))
        return replace(earlier, number=number)
    row = replace(row, number=number)
    connection.execute(
        interrupts.insert().values(
            request_id=row.request_id,
            task_id=row.task_id,
            context_id=row.context_id,
            principal=row.principal,
            type=row.type,
            asked=row.asked,
            expires_at=row.expires_at,
            number=row.number,
            rights=row.rights,
        )
    )
    return row


def store_answer(connection: Connection, request_id: str, answer: bytes) -> None:
    connection.execute(_unsettled(request_id).values(answer=answer))


def settle(
    connection: Connection, request_id: str, resolution: str, at: int, by: str | None
) -> None:
    values = {"resolution": resolution, "settled_at": at, "settled_by": by}
    connection.execute(_unsettled(request_id).values(values))


def void(connection: Connection, task_id: str, at: int) -> None:
    """Settle what a task asked that ended while nobody could answer."""
    pending = interrupts.update().where(
        interrupts.c.task_id == task_id, interrupts.c.resolution.is_(None)
    )
    connection.execute(pending.values(resolution="void", settled_at=at))


def _unsettled(request_id: str) -> sa.Update:
    """Return an update of one interrupt: what is settled is never changed."""
    return interrupts.update().where(
        interrupts.c.request_id == request_id, interrupts.c.resolution.is_(None)
    )


def find(connection: Connection, request_id: str) -> InterruptRow | None:
    found = _select(connection, interrupts.c.request_id == request_id)
    return found[0] if found else None


def upstream(connection: Connection, request_id: str, derived: str) -> str | None:
    """Return the OpenCode in which an interrupt waits: that of its task, or of its session.

    The context of work without a task is that of its session: ``derived`` and its id.
    """
    session_id = sa.func.substr(interrupts.c.context_id, len(derived) + 1)
    where = interrupts.outerjoin(tasks, tasks.c.id == interrupts.c.task_id)
    where = where.outerjoin(owners, owners.c.session_id == session_id)
    waits = (interrupts.c.request_id == request_id, interrupts.c.resolution.is_(None))
    query = sa.select(sa.func.coalesce(tasks.c.upstream, owners.c.upstream))
    return connection.scalar(query.select_from(where).where(*waits))


def answered(connection: Connection, task_id: str, context_id: str) -> Sequence[InterruptRow]:
    """Return what a task asked, or work without one in a context, and what has an answer."""
    mine = (interrupts.c.task_id == task_id, interrupts.c.context_id == context_id)
    return _select(connection, *mine, interrupts.c.answer.is_not(None))


def left(connection: Connection) -> Sequence[InterruptRow]:
    """Return what is open and belongs to no task."""
    return _select(connection, interrupts.c.task_id == "", interrupts.c.resolution.is_(None))


def pending(
    connection: Connection, principal: Principal | None, kind: str
) -> Sequence[InterruptRow]:
    """Return what a principal is asked, or everybody, the most urgent first."""
    mine = sa.true() if principal is None else interrupts.c.principal == principal
    return _select(connection, mine, interrupts.c.resolution.is_(None), interrupts.c.type == kind)


def _select(connection: Connection, *where: ColumnElement[bool]) -> list[InterruptRow]:
    query = sa.select(interrupts).where(*where)
    ordered = query.order_by(interrupts.c.expires_at, interrupts.c.request_id)
    return [InterruptRow(**row) for row in connection.execute(ordered).mappings()]
