"""Webhooks: where the changes of a task's state are sent, and how far that has come.

Functions of a connection, to be given to ``Database``. A row that is done holds no secret: its
receiver has taken the end of the task, or wants no more notifications.
"""

from collections.abc import Collection
from dataclasses import asdict, dataclass, fields, replace
from typing import Literal

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from opencode_a2a.store.schema import tasks, webhooks

HookState = Literal["active", "done", "failed"]


@dataclass(frozen=True, slots=True)
class HookRow:
    """A webhook of a task. Its secrets are neither shown nor logged."""

    task_no: int
    config_id: str
    key: str
    principal: str
    version: str
    url: str
    acked: int
    """Sequence number of the last entry that the receiver has taken."""
    scheme: str | None = None
    credentials: str | None = None
    token: str | None = None
    state: HookState = "active"
    attempts: int = 0
    """Failed attempts since the last one that succeeded."""
    failing_since: int | None = None
    next_at: int | None = None
    last_outcome: str | None = None
    no: int = 0

    def __repr__(self) -> str:
        return f"HookRow({self.no}, {self.state})"


_CHANGING = (
    "acked", "state", "attempts", "failing_since", "next_at", "last_outcome",
    "credentials", "token",
)  # fmt: skip
_COLUMNS = [webhooks.c[field.name] for field in fields(HookRow)]


def put(connection: Connection, row: HookRow) -> HookRow:
    """Store a webhook in place of one with the same id; return it with its number."""
    connection.execute(webhooks.delete().where(*_named(row.task_no, row.config_id)))
    values = asdict(row)
    del values["no"]
    no = connection.scalar(webhooks.insert().values(values).returning(webhooks.c.no))
    return replace(row, no=no or 0)


def counts(connection: Connection, task_no: int, config_id: str, principal: str) -> tuple[int, int]:
    """Return how many other webhooks the task has, and how many active ones the principal."""
    count = sa.select(sa.func.count()).select_from(webhooks)
    other = sa.not_(sa.and_(*_named(task_no, config_id)))
    mine = (webhooks.c.principal == principal, webhooks.c.state == "active", other)
    of_task = connection.scalar(count.where(webhooks.c.task_no == task_no, other))
    return of_task or 0, connection.scalar(count.where(*mine)) or 0


def of_task(connection: Connection, task_no: int) -> list[HookRow]:
    """Return the webhooks of a task, oldest first."""
    return _rows(connection, webhooks.c.task_no == task_no)


def active(connection: Connection, upstreams: Collection[str] | None = None) -> list[HookRow]:
    """Return the active webhooks of all tasks, or of the tasks of some OpenCodes."""
    where = [webhooks.c.state == "active"]
    if upstreams is not None:
        of = sa.select(tasks.c.no).where(tasks.c.upstream.in_(upstreams))
        where.append(webhooks.c.task_no.in_(of))
    return _rows(connection, *where)


def unread() -> sa.ColumnElement[bool]:
    """Return the condition that a row of ``tasks`` has an active webhook."""
    active = sa.exists().where(webhooks.c.task_no == tasks.c.no, webhooks.c.state == "active")
    return active.correlate(tasks)


def page(
    connection: Connection, principal: str, task_id: str | None, limit: int
) -> list[tuple[str, HookRow]]:
    """Return the webhooks of a principal, newest first, each with the id of its task."""
    query = sa.select(tasks.c.id, *_COLUMNS).join(tasks, tasks.c.no == webhooks.c.task_no)
    mine = query.where(webhooks.c.principal == principal, tasks.c.principal == principal)
    if task_id is not None:
        mine = mine.where(tasks.c.id == task_id)
    found = connection.execute(mine.order_by(webhooks.c.no.desc()).limit(limit))
    return [(task_id, HookRow(*row)) for task_id, *row in found]


def update(connection: Connection, row: HookRow) -> bool:
    """Store how far a webhook has come; False if it is no longer there."""
    known = asdict(row)
    values = {name: known[name] for name in _CHANGING}
    found = connection.execute(webhooks.update().where(webhooks.c.no == row.no).values(values))
    return found.rowcount > 0


def delete(connection: Connection, task_no: int, config_id: str) -> bool:
    found = connection.execute(webhooks.delete().where(*_named(task_no, config_id)))
    return found.rowcount > 0


def _named(task_no: int, config_id: str) -> tuple[sa.ColumnElement[bool], ...]:
    return webhooks.c.task_no == task_no, webhooks.c.config_id == config_id


def _rows(connection: Connection, *where: sa.ColumnElement[bool]) -> list[HookRow]:
    query = sa.select(*_COLUMNS).where(*where).order_by(webhooks.c.no)
    return [HookRow(*row) for row in connection.execute(query)]
