"""Webhooks: where the changes of a task's state are sent, and how far that has come.

Functions of a connection, to be given to ``Database``. A row is in one of these states, all but
the last two of which have ``state = 'active'``. The functions named lead from one to another:

=======  ==================================  =======================================================
state    columns                             what is next
=======  ==================================  =======================================================
current  ``acked >= changed``                due, with the next change of the task:
                                             ``note_changes``, in the transaction that stores it
unknown  ``changed = UNKNOWN_CHANGE``: put   claimed, as if it were due; then current or due, when
         on a task that existed, or          the log has been read: ``store_last_changes``
         nobody noted the changes of its
         task (``forget_last_changes``)
due      ``acked < changed``, ``next_at``    claimed: ``claim``
         not in the future, no claim
waiting  likewise, ``next_at`` in the        due, when that time has come or another attempt is
         future                              asked for: ``try_again``
claimed  ``claimed_by`` this process, or a   current, due, waiting, done or failed, by the outcome
         replica that is not gone            of an attempt: ``update``; still claimed, if it waits
                                             for a receiver that cannot be reached, which also moves
                                             ``next_at``; due without an attempt: ``release``,
                                             ``release_all``, or as soon as the replica is gone
failed   ``state = 'failed'``                unknown: ``try_again``
done     ``state = 'done'``: the receiver    nothing; it holds no secret any more
         has taken the end of the task, or
         wants no more notifications
=======  ==================================  =======================================================

``_statements`` decides which rows are due to this process, ``Deliveries._after`` in
``push.loop`` what an attempt leads to. A webhook is claimed before anything is sent to it, so that
one replica at a time serves it.
"""

from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Literal, NamedTuple

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from opencode_a2a.clock import now_ms
from opencode_a2a.store.database import Prepared, engine_of
from opencode_a2a.store.schema import BEHIND, UNKNOWN_CHANGE, tasks, webhooks

HookState = Literal["active", "done", "failed"]
NOTICE = "notice"
"""The version of a row that no caller has set: a target by which the deployment tells a person of
the task. Its URL has the name of that target for a host."""


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
    changed: int = UNKNOWN_CHANGE
    """Sequence number of the last stored entry that changed the state of the task;
    ``UNKNOWN_CHANGE`` if that has to be found in the log."""
    no: int = 0

    @property
    def unknown(self) -> bool:
        return self.changed == UNKNOWN_CHANGE

    def __repr__(self) -> str:
        return f"HookRow({self.no}, {self.state})"


class Backlog(NamedTuple):
    """What is left to send."""

    pending: int
    """Webhooks with a change that their receiver has not taken."""
    failing_since: int | None
    """When the one of them that has failed for the longest time began to fail."""
    due_at: int | None
    """When the next of them that this process may claim is due; None if there is none."""


ALONE = 0
"""The number that marks the claims of a process that has the database to itself."""
_SET = webhooks.c.version != NOTICE
_COLUMNS = [webhooks.c[field.name] for field in fields(HookRow)]
_ROW = ", ".join(field.name for field in fields(HookRow))
_FREE = """(w.claimed_by IS NULL OR NOT EXISTS
   (SELECT 1 FROM replicas r WHERE r.no = w.claimed_by AND r.gone IS NULL))"""
# For 2.0, until 3.0: such a replica does not claim, but serves all webhooks of its own tasks.
_OURS = """NOT EXISTS (SELECT 1 FROM tasks t JOIN upstreams u ON u.name = t.upstream
   JOIN replicas o ON o.no = u.owner
   WHERE t.no = w.task_no AND o.gone IS NULL AND o.claims = 0)"""


class _Statements(NamedTuple):
    """What depends on whether one process uses the database or several (True) share it."""

    claim: Prepared
    due: Prepared
    claimed: Prepared


def _statements(free: str, ours: str, lock: str) -> _Statements:
    """``free``: nobody has claimed a row; ``ours``: this process may claim it."""
    # Webhooks that a replica held back when it died, since their receiver was away, are due at
    # once. So is one that would have to wait for too long: the clock was set back.
    due_at = "CASE WHEN w.claimed_by IS NULL AND w.next_at <= :latest THEN w.next_at ELSE 0 END"
    wanted = f"(:only_notices = 0 OR w.version = '{NOTICE}')"
    claimable = f"FROM webhooks w WHERE {BEHIND} AND {free} AND {ours} AND {wanted}"
    return _Statements(
        Prepared(
            f"UPDATE webhooks SET claimed_by = :me WHERE no IN (SELECT w.no {claimable}"  # noqa: S608 - constants
            f" AND {due_at} <= :now ORDER BY w.no LIMIT :most {lock}) RETURNING {_ROW}"
        ),
        Prepared(f"SELECT min({due_at}) {claimable}"),
        Prepared(
            f"SELECT {_ROW} FROM webhooks w WHERE w.no = :no AND w.claimed_by = :me"  # noqa: S608 - constants
            f" AND w.state = 'active' AND {ours}"
        ),
    )


_STATEMENTS = {
    False: _statements("w.claimed_by IS NULL", "1 = 1", ""),
    True: _statements(_FREE, _OURS, "FOR UPDATE OF w SKIP LOCKED"),
}
_PENDING = Prepared(f"SELECT count(*), min(failing_since) FROM webhooks WHERE {BEHIND}")  # noqa: S608 - a constant
_CHANGED = Prepared("UPDATE webhooks SET changed = :seq WHERE task_no = :task_no")
_STORE_LAST_CHANGE = Prepared(
    "UPDATE webhooks SET claimed_by = NULL, changed = CASE"  # noqa: S608 - a constant
    f" WHEN changed = {UNKNOWN_CHANGE} THEN :changed ELSE changed END"
    " WHERE no = :no AND claimed_by = :me"
)
_UPDATE = Prepared(
    "UPDATE webhooks SET acked = :acked, state = :state, attempts = :attempts,"
    " failing_since = :failing_since, next_at = :next_at, last_outcome = :last_outcome,"
    " credentials = :credentials, token = :token, claimed_by = :claimed_by"
    " WHERE no = :no AND claimed_by = :me AND acked = :acked_before"
    " AND (:acked > acked OR :state = 'done' OR coalesce(next_at, 0) = :next_before) RETURNING no"
)
_POSTPONE = Prepared(
    "UPDATE webhooks SET next_at = :next_at, last_outcome = :outcome"
    " WHERE no = :no AND claimed_by = :me"
)
_RELEASE = Prepared("UPDATE webhooks SET claimed_by = NULL WHERE no = :no AND claimed_by = :me")
# What is claimed is active: the index of these is enough.
_RELEASE_ALL = Prepared(
    "UPDATE webhooks SET claimed_by = NULL, next_at = NULL"
    " WHERE claimed_by = :me AND state = 'active'"
)
_RETRIED = Prepared(
    "SELECT no FROM webhooks WHERE claimed_by = :me AND state = 'active' AND failing_since IS NULL"
)


# Setting and finding


def add(connection: Connection, row: HookRow) -> None:
    """Store a webhook of a task that is stored in the same transaction."""
    values = asdict(row)
    del values["no"]
    connection.execute(webhooks.insert().values(values))


class Replaced(NamedTuple):
    """A webhook that was deleted."""

    no: int
    claimed_by: int | None


def put(connection: Connection, row: HookRow) -> tuple[HookRow, Replaced | None]:
    """Store a webhook in place of one with the same id; return it with its number, and that one."""
    # Whoever changes the state of the task meanwhile either waits, and then finds the webhook, or
    # has committed, so that a look at the log finds the change.
    connection.execute(sa.select(tasks.c.no).where(tasks.c.no == row.task_no).with_for_update())
    replaced = delete(connection, row.task_no, row.config_id)
    values = asdict(row)
    del values["no"]
    no = connection.scalar(webhooks.insert().values(values).returning(webhooks.c.no))
    return replace(row, no=no or 0), replaced


def counts(connection: Connection, task_no: int, config_id: str, principal: str) -> tuple[int, int]:
    """Return how many other webhooks the task has, and how many active ones the principal."""
    count = sa.select(sa.func.count()).select_from(webhooks).where(_SET)
    other = sa.not_(sa.and_(*_named(task_no, config_id)))
    mine = (webhooks.c.principal == principal, webhooks.c.state == "active", other)
    of_task = connection.scalar(count.where(webhooks.c.task_no == task_no, other))
    return of_task or 0, connection.scalar(count.where(*mine)) or 0


def of_task(connection: Connection, task_no: int) -> list[HookRow]:
    """Return the webhooks that callers have set for a task, oldest first."""
    query = sa.select(*_COLUMNS).where(webhooks.c.task_no == task_no, _SET)
    query = query.order_by(webhooks.c.no)
    return [HookRow(*row) for row in connection.execute(query)]


def page(
    connection: Connection, principal: str, task_id: str | None, limit: int
) -> list[tuple[str, HookRow]]:
    """Return the webhooks of a principal, newest first, each with the id of its task."""
    query = sa.select(tasks.c.id, *_COLUMNS).join(tasks, tasks.c.no == webhooks.c.task_no)
    mine = query.where(webhooks.c.principal == principal, tasks.c.principal == principal, _SET)
    if task_id is not None:
        mine = mine.where(tasks.c.id == task_id)
    found = connection.execute(mine.order_by(webhooks.c.no.desc()).limit(limit))
    return [(task_id, HookRow(*row)) for task_id, *row in found]


def delete(connection: Connection, task_no: int, config_id: str) -> Replaced | None:
    where = _named(task_no, config_id)
    query = sa.select(webhooks.c.no, webhooks.c.claimed_by).where(*where)
    found = connection.execute(query.with_for_update()).one_or_none()  # a claim waits, or is seen
    if found is None:
        return None
    engine_of(connection).erase(connection)
    connection.execute(webhooks.delete().where(*where))
    return Replaced(*found)


def try_again(connection: Connection, no: int) -> int | None:
    """Make a webhook due, as if it had not failed yet; return whose claim it is."""
    # The time tells ``update`` that this was asked for.
    fresh = {"state": "active", "attempts": 0, "failing_since": None, "next_at": now_ms()}
    undone = webhooks.update().where(webhooks.c.no == no, webhooks.c.state != "done")
    # ``forget_last_changes`` leaves out what has failed.
    changed = sa.case((webhooks.c.state == "failed", UNKNOWN_CHANGE), else_=webhooks.c.changed)
    again = undone.values(**fresh, changed=changed).returning(webhooks.c.claimed_by)
    return connection.scalar(again)


def unread() -> sa.ColumnElement[bool]:
    """Return the condition that a row of ``tasks`` has an active webhook."""
    active = sa.exists().where(webhooks.c.task_no == tasks.c.no, webhooks.c.state == "active")
    return active.correlate(tasks)


# What is due


def note_changes(connection: Connection, changes: Mapping[int, int]) -> bool:
    """Make the webhooks of tasks due, in the transaction that stores the changes of their states.

    ``changes`` has the number of the last change of each task. Return whether there are webhooks.
    """
    rows = ({"task_no": no, "seq": seq} for no, seq in changes.items())
    return _CHANGED.run(connection, *rows).rowcount > 0


def forget_last_changes(connection: Connection, upstreams: Collection[str] | None) -> None:
    """Have the last changes of the tasks of some OpenCodes, or of all, found in their logs.

    For 2.0, until 3.0: the owner before may have been of a version without ``note_changes``.
    """
    where = [webhooks.c.state == sa.literal_column("'active'")]  # as in the index of them
    if upstreams is not None:
        # Asked for each of the few that are active.
        task = sa.exists().where(tasks.c.no == webhooks.c.task_no, tasks.c.upstream.in_(upstreams))
        where.append(task)
    connection.execute(webhooks.update().where(*where).values(changed=UNKNOWN_CHANGE))


def backlog(
    connection: Connection, me: int | None, latest: int, only_notices: bool = False
) -> Backlog:
    """Return what is left to send, by all processes; nothing has to wait beyond ``latest``.

    ``only_notices`` is for a process that serves no webhooks of callers, and claims none.
    """
    pending, since = _PENDING.run(connection, {}).fetchone()
    values = {"latest": latest, "only_notices": int(only_notices)}
    (due_at,) = _STATEMENTS[me is not None].due.run(connection, values).fetchone()
    return Backlog(pending, since, due_at)


# Claims; ``me`` is the number of the replica, or None for a process that is alone


def claim(
    connection: Connection,
    me: int | None,
    now: int,
    latest: int,
    most: int,
    only_notices: bool = False,
) -> list[HookRow]:
    """Claim webhooks that are due, oldest first; see ``backlog``."""
    values = {"me": me or ALONE, "now": now, "latest": latest, "most": most}
    values["only_notices"] = int(only_notices)
    found = _STATEMENTS[me is not None].claim.run(connection, values).fetchall()
    return sorted((HookRow(*row) for row in found), key=lambda row: row.no)


def claimed(connection: Connection, me: int | None, no: int) -> HookRow | None:
    """Return a webhook as it is now; None unless this process may still send to it."""
    named = {"me": me or ALONE, "no": no}
    found = _STATEMENTS[me is not None].claimed.run(connection, named).fetchone()
    return HookRow(*found) if found else None


def store_last_changes(connection: Connection, me: int | None, changes: Mapping[int, int]) -> None:
    """Store the last changes that this process has found in the logs, and end its claims."""
    mine = ({"me": me or ALONE, "no": no, "changed": seq} for no, seq in changes.items())
    _STORE_LAST_CHANGE.run(connection, *mine)


def update(
    connection: Connection, me: int | None, row: HookRow, before: HookRow, *, keep: bool = False
) -> bool:
    """Store how far a webhook has come, and end the claim, unless it is to be kept.

    False if it is no longer there, or is no longer where it was ``before``. So is a failure of a
    webhook that is to be tried again at once, which was asked for meanwhile.
    """
    if row.state == "done":  # its secrets are no longer needed
        engine_of(connection).erase(connection)
        row = replace(row, credentials=None, token=None)
    mine = me or ALONE
    values = {
        **asdict(row),
        "me": mine,
        "acked_before": before.acked,
        "next_before": before.next_at or 0,
        "claimed_by": mine if keep else None,
    }
    return _UPDATE.run(connection, values).fetchone() is not None


def postpone(
    connection: Connection, me: int | None, numbers: Collection[int], next_at: int, outcome: str
) -> None:
    """Store for webhooks that wait for the same receiver when it is tried again."""
    mine = {"me": me or ALONE, "next_at": next_at, "outcome": outcome}
    _POSTPONE.run(connection, *({**mine, "no": no} for no in numbers))


def release(connection: Connection, me: int | None, no: int) -> None:
    """End a claim."""
    _RELEASE.run(connection, {"me": me or ALONE, "no": no})


def release_all(connection: Connection, me: int | None) -> None:
    """End all claims of this process, or of its earlier run if it has the database to itself.

    What was held back is due at once, as if the process had died.
    """
    _RELEASE_ALL.run(connection, {"me": me or ALONE})


def retried(connection: Connection, me: int | None) -> set[int]:
    """Return those claimed by this process of which no failure is stored (``try_again``)."""
    return {no for (no,) in _RETRIED.run(connection, {"me": me or ALONE}).fetchall()}


def _named(task_no: int, config_id: str) -> tuple[sa.ColumnElement[bool], ...]:
    return webhooks.c.task_no == task_no, webhooks.c.config_id == config_id
