"""The replicas, and which of them owns each OpenCode: functions of a connection of PostgreSQL.

A row of ``replicas`` is one life of a process; its number is never used again. A replica that was
declared gone can commit nothing any more (``store.postgres``), so another may take what it owned.
Only the owner of an OpenCode ("upstream") writes the logs of its tasks. Times are compared by the
database's clock alone.
"""

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import orjson
import sqlalchemy as sa
from sqlalchemy.engine import Connection

UNKNOWN = 0
"""The owner of an upstream that is new in the table; no replica has this number. It does not count
as handed over: an earlier program may have left tasks there without storing all it had shown."""


class ReplicaRow(NamedTuple):
    """A replica that was not declared gone."""

    no: int
    name: str
    version: str
    silent_seconds: float
    """Since its last commit."""
    lists: frozenset[str]
    """The names of the upstreams in its settings."""


class UpstreamRow(NamedTuple):
    """An OpenCode, as its owner last described it."""

    name: str
    owner: int | None
    """The number of a replica, live or gone; None once it was handed over."""
    state: str
    """``up``, ``away`` or ``lost``."""
    drain: bool
    directories: tuple[str, ...]
    """What it serves; empty: every directory."""
    max_turns: int
    """0: no limit."""
    open_tasks: int = 0
    away_seconds: float | None = None
    """How long no live owner has reached it; None while one does."""
    free: bool = False
    """Whether it has no live owner."""

    def serves(self, directory: str | None) -> bool:
        if not self.directories:
            return True
        return directory is not None and any(
            Path(directory).is_relative_to(one) for one in self.directories
        )


_LIVE = sa.text(
    "SELECT no, name, version, lists,"
    " extract(epoch FROM clock_timestamp() - seen)::float8 AS silent_seconds"
    " FROM replicas WHERE gone IS NULL ORDER BY no"
)
# An owner that left it up reached it until it was declared gone. The row of an owner is missing if
# an earlier program has deleted it.
_UPSTREAMS = sa.text(
    "SELECT u.name, u.owner, u.state, u.drain, u.serves, u.room, u.tasks,"
    " extract(epoch FROM clock_timestamp()"
    " - CASE WHEN u.state = 'up' AND r.no IS NOT NULL THEN r.gone ELSE u.changed END)::float8"
    " AS away_seconds,"
    " r.no IS NULL OR r.gone IS NOT NULL AS free"
    " FROM upstreams u LEFT JOIN replicas r ON r.no = u.owner ORDER BY u.name"
)
_LIST = sa.text("UPDATE replicas SET lists = :lists WHERE no = :me")
_ENROLL = sa.text(
    "INSERT INTO upstreams (name, owner, state, drain, serves, room, tasks, changed)"
    " VALUES (:name, :owner, 'away', :drain, :serves, :room, 0, clock_timestamp())"
    " ON CONFLICT (name) DO UPDATE SET drain = excluded.drain, serves = excluded.serves,"
    " room = excluded.room"
)
_ENROLL_LEFT = sa.text(
    "INSERT INTO upstreams (name, owner, state, drain, room, tasks, changed)"
    " SELECT DISTINCT upstream, cast(:owner AS bigint), 'away', 0, 0, 0, clock_timestamp()"
    " FROM tasks WHERE state = ANY(:states) ON CONFLICT (name) DO NOTHING"
)
_FORGET = sa.text(
    "DELETE FROM upstreams WHERE state = 'lost' AND owner IS NULL"
    " AND changed < clock_timestamp() - interval '1 day'"
)
_FORGET_GONE = sa.text(
    "DELETE FROM replicas WHERE gone < clock_timestamp() - interval '1 day'"
    " AND NOT EXISTS (SELECT 1 FROM upstreams WHERE owner = replicas.no)"
)
_DECLARE_GONE = sa.text(
    "UPDATE replicas SET gone = clock_timestamp() WHERE gone IS NULL AND no = ANY(:numbers)"
    " AND seen < clock_timestamp() - make_interval(secs => :lease) RETURNING no"
)
# The owner is looked at by a second statement, after the lock: if another replica becomes the owner
# while the lock is waited for, PostgreSQL joins the new row with the replica of the old one.
_LOCK = sa.text(
    "SELECT name FROM upstreams WHERE name = ANY(:names) ORDER BY name FOR UPDATE SKIP LOCKED"
)
_LOCK_ONE = sa.text("SELECT name FROM upstreams WHERE name = :name FOR UPDATE")
_UNOWNED = sa.text(
    "SELECT u.name, u.owner FROM upstreams u LEFT JOIN replicas r ON r.no = u.owner"
    " WHERE u.name = ANY(:names) AND (r.no IS NULL OR r.gone IS NOT NULL) ORDER BY u.name"
)
_BECOME_OWNER = sa.text("UPDATE upstreams SET owner = :me WHERE name = ANY(:names)")
# Without an owner nobody reaches it, so it is away from now on.
_HAND_OVER = sa.text(
    "UPDATE upstreams SET owner = NULL, state = CASE state WHEN 'up' THEN 'away' ELSE state END,"
    " changed = CASE state WHEN 'up' THEN clock_timestamp() ELSE changed END"
    " WHERE owner = :me AND name = ANY(:names)"
)
_PUBLISH = sa.text(
    "UPDATE upstreams SET state = cast(:state AS text), tasks = :tasks,"
    " changed = CASE state WHEN cast(:state AS text) THEN changed ELSE clock_timestamp() END"
    " WHERE owner = :me AND name = :name"
)
_LOSE = sa.text(
    "UPDATE upstreams SET state = 'lost', changed = clock_timestamp() WHERE name = ANY(:names)"
)


def forget(connection: Connection) -> None:
    """Delete the rows of replicas that have been gone for a day and own nothing."""
    connection.execute(_FORGET_GONE)


def live(connection: Connection) -> list[ReplicaRow]:
    """Return the replicas that were not declared gone, oldest first."""
    return [
        ReplicaRow(
            no=row.no,
            name=row.name,
            version=row.version,
            silent_seconds=row.silent_seconds,
            lists=frozenset(orjson.loads(row.lists or b"[]")),
        )
        for row in connection.execute(_LIVE)
    ]


def upstreams(connection: Connection) -> list[UpstreamRow]:
    return [
        UpstreamRow(
            name=row.name,
            owner=row.owner,
            state=row.state,
            drain=bool(row.drain),
            directories=tuple(orjson.loads(row.serves or b"[]")),
            max_turns=row.room,
            open_tasks=row.tasks,
            away_seconds=row.away_seconds,
            free=row.free,
        )
        for row in connection.execute(_UPSTREAMS)
    ]


def enroll(
    connection: Connection, me: int, listed: Sequence[UpstreamRow], states: Sequence[str] = ()
) -> None:
    """Write down which OpenCodes a replica lists in its settings.

    One that is new in the table belongs to nobody; neither does one that is only known by tasks
    that are in these states.
    """
    connection.execute(_FORGET)
    connection.execute(_ENROLL_LEFT, {"owner": UNKNOWN, "states": list(states)})
    names = orjson.dumps([row.name for row in listed])
    connection.execute(_LIST, {"me": me, "lists": names})
    for row in sorted(listed):
        values = {"name": row.name, "owner": UNKNOWN, "room": row.max_turns}
        values["drain"] = int(row.drain)
        serves = orjson.dumps(row.directories) if row.directories else None
        connection.execute(_ENROLL, {**values, "serves": serves})


def declare_gone(connection: Connection, numbers: Collection[int], lease: float) -> list[int]:
    """Declare replicas gone, unless they have committed something within the last lease.

    They can write nothing any more. Return the numbers of those that were declared gone.
    """
    values = {"numbers": list(numbers), "lease": lease}
    return list(connection.scalars(_DECLARE_GONE, values))


def become_owner(connection: Connection, me: int, names: Collection[str]) -> dict[str, bool]:
    """Become the owner of those of these OpenCodes that have no live owner.

    Return of each that this replica owns now whether it was handed over: then everything that its
    last owner showed is stored.
    """
    locked = list(connection.scalars(_LOCK, {"names": list(names)}))
    free = connection.execute(_UNOWNED, {"names": locked}).all()
    connection.execute(_BECOME_OWNER, {"me": me, "names": [row.name for row in free]})
    return {row.name: row.owner is None for row in free}


def lock_unowned(connection: Connection, name: str) -> bool:
    """Keep an OpenCode without a live owner until the end of the transaction.

    False if it has a live owner, or is not known.
    """
    connection.execute(_LOCK_ONE, {"name": name})
    return connection.execute(_UNOWNED, {"names": [name]}).first() is not None


def hand_over(connection: Connection, me: int, names: Collection[str]) -> None:
    """Leave OpenCodes to other replicas; everything that was shown of their tasks is stored."""
    connection.execute(_HAND_OVER, {"me": me, "names": list(names)})


def hand_over_listed(connection: Connection, me: int, names: Collection[str]) -> None:
    """Leave OpenCodes to live replicas that list them; the others wait for this one to return."""
    listed = {name for row in live(connection) if row.no != me for name in row.lists}
    hand_over(connection, me, listed.intersection(names))


def publish(connection: Connection, me: int, seen: Mapping[str, tuple[str, int]]) -> None:
    """Write the state and the number of open tasks of OpenCodes that this replica owns."""
    for name, (state, tasks) in sorted(seen.items()):
        connection.execute(_PUBLISH, {"me": me, "name": name, "state": state, "tasks": tasks})


def lose(connection: Connection, me: int, names: Collection[str]) -> dict[str, bool]:
    """Become the owner of OpenCodes that nobody will run any more, to end their tasks."""
    handed_over = become_owner(connection, me, names)
    connection.execute(_LOSE, {"names": list(handed_over)})
    return handed_over
