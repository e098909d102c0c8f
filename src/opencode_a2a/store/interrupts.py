"""Queries of interrupts. A row keeps the deadline over a restart, and stays as a record."""

from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass, replace

import sqlalchemy as sa
from sqlalchemy.engine import Connection
from sqlalchemy.sql import ColumnElement

from opencode_a2a.events import AskedType, Resolution
from opencode_a2a.ids import Principal
from opencode_a2a.store.schema import interrupts, owners, tasks


@dataclass(frozen=True, slots=True)
class InterruptRow:
    request_id: str
    task_id: str
    """Empty for work of an extension method, which has no task."""
    context_id: str
    principal: str
    type: AskedType
    asked: bytes
    expires_at: int
    resolution: Resolution | None = None
    settled_at: int | None = None
    settled_by: str | None = None
    answer: bytes | None = None
    """The latest answer, which is stored before OpenCode gets it."""
    number: int | None = None
    rights: bytes | None = None
    """The rights of the work that asks; None in a row of 2.0 (for 2.0, until 3.0)."""


def add(connection: Connection, row: InterruptRow, *, numbered: bool) -> InterruptRow:
    """Store an interrupt and return it; if it is stored already, return that row.

    ``numbered`` gives it the next number of its task, unless it has one.
    """
    earlier = find(connection, row.request_id)
    number = earlier and earlier.number
    answer = row.answer or (earlier and earlier.answer)
    if numbered and number is None:
        highest = sa.select(sa.func.max(interrupts.c.number)).where(
            interrupts.c.task_id == row.task_id
        )
        number = (connection.scalar(highest) or 0) + 1
    if earlier is not None:
        # Before the restart it was asked by an earlier version, or a rule decided otherwise.
        if (number, answer) != (earlier.number, earlier.answer):
            connection.execute(_unsettled(row.request_id).values(number=number, answer=answer))
        return replace(earlier, number=number, answer=answer)
    row = replace(row, number=number)
    connection.execute(interrupts.insert().values(asdict(row)))
    return row


def store_asked(connection: Connection, request_id: str, asked: bytes) -> None:
    connection.execute(_unsettled(request_id).values(asked=asked))


def store_answer(connection: Connection, request_id: str, answer: bytes) -> None:
    connection.execute(_unsettled(request_id).values(answer=answer))


def settle(
    connection: Connection, request_id: str, resolution: str, at: int, by: str | None
) -> bool:
    """Settle an interrupt; False if it is settled already."""
    values = {"resolution": resolution, "settled_at": at, "settled_by": by}
    return connection.execute(_unsettled(request_id).values(values)).rowcount > 0


def void(connection: Connection, task_id: str, at: int) -> Sequence[InterruptRow]:
    """Settle and return the pending interrupts of a task that ended before anybody answered."""
    return _void(connection, interrupts.c.task_id == task_id, at)


def void_errand(connection: Connection, context_id: str, at: int) -> Sequence[InterruptRow]:
    """Settle and return the pending interrupts of work without a task that nobody follows."""
    mine = sa.and_(interrupts.c.task_id == "", interrupts.c.context_id == context_id)
    return _void(connection, mine, at)


def _void(connection: Connection, mine: ColumnElement[bool], at: int) -> Sequence[InterruptRow]:
    pending = (mine, interrupts.c.resolution.is_(None))
    found = _select(connection, *pending)
    if found:
        update = interrupts.update().where(*pending)
        connection.execute(update.values(resolution="void", settled_at=at))
    return found


def _unsettled(request_id: str) -> sa.Update:
    """Return an update of one interrupt, which changes nothing if that is settled."""
    return interrupts.update().where(
        interrupts.c.request_id == request_id, interrupts.c.resolution.is_(None)
    )


def find(connection: Connection, request_id: str) -> InterruptRow | None:
    rows = _select(connection, interrupts.c.request_id == request_id)
    return rows[0] if rows else None


def upstream(connection: Connection, request_id: str, derived: str) -> str | None:
    """Return the OpenCode in which an interrupt waits: that of its task, or of its session.

    The context of work without a task is ``derived`` followed by the id of its session.
    """
    session_id = sa.func.substr(interrupts.c.context_id, len(derived) + 1)
    where = interrupts.outerjoin(tasks, tasks.c.id == interrupts.c.task_id)
    where = where.outerjoin(owners, owners.c.session_id == session_id)
    waits = (interrupts.c.request_id == request_id, interrupts.c.resolution.is_(None))
    query = sa.select(sa.func.coalesce(tasks.c.upstream, owners.c.upstream))
    return connection.scalar(query.select_from(where).where(*waits))


def of_work(connection: Connection, task_id: str, context_id: str) -> Sequence[InterruptRow]:
    """Return the interrupts of the turns of a task, or of work without a task."""
    mine = (interrupts.c.task_id == task_id, interrupts.c.context_id == context_id)
    return _select(connection, *mine, interrupts.c.type != "plan")


def left(connection: Connection) -> Sequence[InterruptRow]:
    """Return the pending interrupts of work without a task."""
    return _select(connection, interrupts.c.task_id == "", interrupts.c.resolution.is_(None))


def pending(
    connection: Connection, principal: Principal | None, kind: str, among: Collection[str]
) -> Sequence[InterruptRow]:
    """Return those among some interrupts that are pending, of a principal or of all.

    The most urgent come first.
    """
    mine = sa.true() if principal is None else interrupts.c.principal == principal
    asked = (interrupts.c.type == kind, interrupts.c.request_id.in_(among))
    return _select(connection, mine, interrupts.c.resolution.is_(None), *asked)


def _select(connection: Connection, *where: ColumnElement[bool]) -> list[InterruptRow]:
    query = sa.select(interrupts).where(*where)
    ordered = query.order_by(interrupts.c.expires_at, interrupts.c.request_id)
    return [InterruptRow(**row) for row in connection.execute(ordered).mappings()]
