"""Pending and settled interrupts: the deadline survives a restart, the record stays."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from opencode_a2a.store.schema import interrupts


@dataclass(frozen=True, slots=True)
class InterruptRow:
    request_id: str
    task_id: str | None
    """None when the work was begun by method and no task follows it."""
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


_ROW = (
    interrupts.c.request_id,
    interrupts.c.task_id,
    interrupts.c.context_id,
    interrupts.c.principal,
    interrupts.c.type,
    interrupts.c.asked,
    interrupts.c.expires_at,
    interrupts.c.resolution,
    interrupts.c.settled_at,
    interrupts.c.settled_by,
    interrupts.c.answer,
)


def add(connection: Connection, row: InterruptRow) -> InterruptRow:
    """Store an interrupt and return it; one that is stored already is returned as it was."""
    earlier = find(connection, row.request_id)
    if earlier is not None:
        return earlier
    connection.execute(
        interrupts.insert().values(
            request_id=row.request_id,
            task_id=row.task_id or "",
            context_id=row.context_id,
            principal=row.principal,
            type=row.type,
            asked=row.asked,
            expires_at=row.expires_at,
        )
    )
    return row


def answer(connection: Connection, request_id: str, answer: bytes) -> None:
    connection.execute(
        interrupts.update()
        .where(interrupts.c.request_id == request_id, interrupts.c.resolution.is_(None))
        .values(answer=answer)
    )


def of_task(connection: Connection, task_id: str) -> Sequence[InterruptRow]:
    rows = connection.execute(sa.select(*_ROW).where(interrupts.c.task_id == task_id))
    return [_row(row) for row in rows]


def left(connection: Connection) -> Sequence[InterruptRow]:
    """Return what is open and belongs to no task."""
    query = sa.select(*_ROW).where(interrupts.c.task_id == "", interrupts.c.resolution.is_(None))
    return [_row(row) for row in connection.execute(query)]


def settle(
    connection: Connection, request_id: str, resolution: str, at: int, by: str | None
) -> None:
    connection.execute(
        interrupts.update()
        .where(interrupts.c.request_id == request_id, interrupts.c.resolution.is_(None))
        .values(resolution=resolution, settled_at=at, settled_by=by)
    )


def find(connection: Connection, request_id: str) -> InterruptRow | None:
    row = connection.execute(sa.select(*_ROW).where(interrupts.c.request_id == request_id)).first()
    return _row(row) if row else None


def pending(connection: Connection, principal: str, kind: str | None) -> Sequence[InterruptRow]:
    """Return what a principal is asked, the most urgent first."""
    query = sa.select(*_ROW).where(
        interrupts.c.principal == principal, interrupts.c.resolution.is_(None)
    )
    if kind is not None:
        query = query.where(interrupts.c.type == kind)
    rows = connection.execute(query.order_by(interrupts.c.expires_at, interrupts.c.request_id))
    return [_row(row) for row in rows]


def _row(row: Sequence[Any]) -> InterruptRow:
    found = InterruptRow(*row)
    return found if found.task_id else replace(found, task_id=None)
