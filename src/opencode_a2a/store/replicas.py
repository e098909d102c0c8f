"""Replicas, and which of them runs an OpenCode: functions of a connection of PostgreSQL.

A row of ``replicas`` is one life of a process; its number is never used again. Whoever was declared
gone can commit nothing any more (see ``postgres``), so that what it ran can be taken: the owner of
an upstream is the only one to write the logs of its tasks. Times are compared by the database's
clock alone.
"""

from collections.abc import Collection, Sequence
from typing import NamedTuple

import orjson
import sqlalchemy as sa
from sqlalchemy.engine import Connection

UNKNOWN = 0
"""The owner of an upstream that is new here: no replica has this number, and tasks that an earlier
program left may have lost something."""


class ReplicaRow(NamedTuple):
    """A process that was not declared gone."""

    no: int
    name: str
    version: str
    silent: float
    """Seconds since its last commit."""
    lists: frozenset[str]
    """The upstreams in its settings."""


class UpstreamRow(NamedTuple):
    name: str
    owner: int | None
    state: str
    drain: bool
    serves: tuple[str, ...]
    """Directories; none: all of them."""
    room: int


_LIVE = sa.text(
    "SELECT no, name, version, extract(epoch FROM clock_timestamp() - seen)::float8, lists"
    " FROM replicas WHERE gone IS NULL ORDER BY no"
)
_UPSTREAMS = sa.text("SELECT name, owner, state, drain, serves, room FROM upstreams ORDER BY name")
_LIST = sa.text("UPDATE replicas SET lists = :lists WHERE no = :me")
_ENROLL = sa.text(
    "INSERT INTO upstreams (name, owner, state, drain, serves, room, changed)"
    " VALUES (:name, :owner, 'away', :drain, :serves, :room, clock_timestamp())"
    " ON CONFLICT (name) DO UPDATE SET drain = excluded.drain, serves = excluded.serves,"
    " room = excluded.room"
)
_DECLARE_GONE = sa.text(
    "UPDATE replicas SET gone = clock_timestamp() WHERE gone IS NULL AND no = ANY(:numbers)"
    " AND seen < clock_timestamp() - make_interval(secs => :lease) RETURNING no"
)
_FREE = sa.text(
    "SELECT u.name, u.owner FROM upstreams u LEFT JOIN replicas r ON r.no = u.owner"
    " WHERE u.name = ANY(:names) AND (r.no IS NULL OR r.gone IS NOT NULL)"
    " ORDER BY u.name FOR UPDATE OF u SKIP LOCKED"
)
_TAKE = sa.text(
    "UPDATE upstreams SET owner = :me, changed = clock_timestamp() WHERE name = ANY(:names)"
)
_HAND_OVER = sa.text(
    "UPDATE upstreams SET owner = NULL, changed = clock_timestamp()"
    " WHERE owner = :me AND name = ANY(:names)"
)


def live(connection: Connection) -> list[ReplicaRow]:
    """Return all that were not declared gone, oldest first."""
    return [
        ReplicaRow(no, name, version, silent, frozenset(orjson.loads(lists or b"[]")))
        for no, name, version, silent, lists in connection.execute(_LIVE)
    ]


def upstreams(connection: Connection) -> list[UpstreamRow]:
    return [
        UpstreamRow(name, owner, state, bool(drain), tuple(orjson.loads(serves or b"[]")), room)
        for name, owner, state, drain, serves, room in connection.execute(_UPSTREAMS)
    ]


def enroll(connection: Connection, me: int, listed: Sequence[UpstreamRow]) -> None:
    """Note what a replica has in its settings; upstreams that are new have no owner."""
    names = orjson.dumps([row.name for row in listed])
    connection.execute(_LIST, {"me": me, "lists": names})
    for row in sorted(listed):
        values = {"name": row.name, "owner": UNKNOWN, "room": row.room, "drain": int(row.drain)}
        serves = orjson.dumps(row.serves) if row.serves else None
        connection.execute(_ENROLL, {**values, "serves": serves})


def declare_gone(connection: Connection, numbers: Collection[int], lease: float) -> list[int]:
    """Let silent replicas write no more; return those that are still silent, and now gone."""
    values = {"numbers": list(numbers), "lease": lease}
    return list(connection.scalars(_DECLARE_GONE, values))


def take(connection: Connection, me: int, names: Collection[str]) -> dict[str, bool]:
    """Become the owner of those that have no live one.

    Return them, and of each whether it was handed over: then all that was shown is stored.
    """
    free = connection.execute(_FREE, {"names": list(names)}).all()
    connection.execute(_TAKE, {"me": me, "names": [row.name for row in free]})
    return {row.name: row.owner is None for row in free}


def hand_over(connection: Connection, me: int, names: Collection[str]) -> None:
    """Let another replica go on with these, whose logs are stored to the end."""
    connection.execute(_HAND_OVER, {"me": me, "names": list(names)})
