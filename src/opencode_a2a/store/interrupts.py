"""Pending and settled interrupts: the deadline survives a restart, the record stays."""

from collections.abc import Sequence
from dataclasses import dataclass

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from opencode_a2a.store.schema import interrupts


@dataclass(frozen=True, slots=True)
class InterruptRow:
    request_id: str
    task_id: str
    context_id: str
    principal: str
    type: str
    asked: bytes
    expires_at: int
    resolution: str | None = None
    settled_at: int | None = None
    settled_by: str | None = None


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
)


def add(connection: Connection, row: InterruptRow) -> None:
    """Write down that something was asked; a repeat changes nothing."""
    if find(connection, row.request_id) is None:
        connection.execute(
            interrupts.insert().values(
                request_id=row.request_id,
                task_id=row.task_id,
                context_id=row.context_id,
                principal=row.principal,
                type=row.type,
                asked=row.asked,
                expires_at=row.expires_at,
            )
        )


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
    return InterruptRow(*row) if row else None


def pending(connection: Connection, principal: str, kind: str | None) -> Sequence[InterruptRow]:
    """Return what a principal is asked, the most urgent first."""
    query = sa.select(*_ROW).where(
        interrupts.c.principal == principal, interrupts.c.resolution.is_(None)
    )
    if kind is not None:
        query = query.where(interrupts.c.type == kind)
    rows = connection.execute(query.order_by(interrupts.c.expires_at, interrupts.c.request_id))
    return [InterruptRow(*row) for row in rows]
