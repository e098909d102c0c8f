"""Replicas, and which of them runs an OpenCode: functions of a connection of PostgreSQL.

A row of ``replicas`` is one life of a process; its number is never used again. Whoever was declared
gone can commit nothing any more (see ``postgres``), so that what it ran can be taken: the owner of
an upstream is the only one to write the logs of its tasks. Times are compared by the database's
clock alone.
"""

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
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
    tasks: int = 0
    """Open ones, as its owner counts them."""
    away: float | None = None
    """Seconds for which nobody has run and reached it; None while somebody does."""
    free: bool = False
    """Whether it has no live owner."""

    def serves_directory(self, directory: str | None) -> bool:
        if not self.serves:
            return True
        return directory is not None and any(
            Path(directory).is_relative_to(one) for one in self.serves
        )


_LIVE = sa.text(
    "SELECT no, name, version, extract(epoch FROM clock_timestamp() - seen)::float8, lists"
    " FROM replicas WHERE gone IS NULL ORDER BY no"
)
_UPSTREAMS = sa.text(
    "SELECT u.name, u.owner, u.state, u.drain, u.serves, u.room, u.tasks,"
    " extract(epoch FROM clock_timestamp()"
    " - CASE u.state WHEN 'up' THEN r.gone ELSE u.changed END)::float8,"
    " r.no IS NULL OR r.gone IS NOT NULL"
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
_FREE = sa.text(
    "SELECT u.name, u.owner FROM upstreams u LEFT JOIN replicas r ON r.no = u.owner"
    " WHERE u.name = ANY(:names) AND (r.no IS NULL OR r.gone IS NOT NULL)"
    " ORDER BY u.name FOR UPDATE OF u SKIP LOCKED"
)
_LOCK_UNOWNED = sa.text(
    "SELECT u.name FROM upstreams u LEFT JOIN replicas r ON r.no = u.owner"
    " WHERE u.name = :name AND (r.no IS NULL OR r.gone IS NOT NULL) FOR UPDATE OF u"
)
_TAKE = sa.text("UPDATE upstreams SET owner = :me WHERE name = ANY(:names)")
# Nobody sees it until there is another owner.
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
    """Delete the rows of replicas that have been gone for long."""
    connection.execute(_FORGET_GONE)


def live(connection: Connection) -> list[ReplicaRow]:
    """Return all that were not declared gone, oldest first."""
    return [
        ReplicaRow(no, name, version, silent, frozenset(orjson.loads(lists or b"[]")))
        for no, name, version, silent, lists in connection.execute(_LIVE)
    ]


def upstreams(connection: Connection) -> list[UpstreamRow]:
    return [
        UpstreamRow(name, owner, state, bool(drain), tuple(orjson.loads(serves or b"[]")), *counted)
        for name, owner, state, drain, serves, *counted in connection.execute(_UPSTREAMS)
    ]


def enroll(
    connection: Connection, me: int, listed: Sequence[UpstreamRow], states: Sequence[str] = ()
) -> None:
    """Note what a replica has in its settings; upstreams that are new have no owner.

    So are those of tasks in these states that nobody has noted.
    """
    connection.execute(_FORGET)
    connection.execute(_ENROLL_LEFT, {"owner": UNKNOWN, "states": list(states)})
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


def lock_unowned(connection: Connection, name: str) -> bool:
    """Keep an OpenCode without a live owner until the end of the transaction.

    False if it has a live owner, or is not known.
    """
    return connection.scalar(_LOCK_UNOWNED, {"name": name}) is not None


def hand_over(connection: Connection, me: int, names: Collection[str]) -> None:
    """Let another replica go on with these, whose logs are stored to the end."""
    connection.execute(_HAND_OVER, {"me": me, "names": list(names)})


def hand_over_listed(connection: Connection, me: int, names: Collection[str]) -> None:
    """Let others go on with these, as far as one of them can; the rest waits for our return."""
    listed = {name for row in live(connection) if row.no != me for name in row.lists}
    hand_over(connection, me, listed.intersection(names))


def publish(connection: Connection, me: int, seen: Mapping[str, tuple[str, int]]) -> None:
    """Let others know the state and the number of open tasks of what this replica runs."""
    for name, (state, tasks) in sorted(seen.items()):
        connection.execute(_PUBLISH, {"me": me, "name": name, "state": state, "tasks": tasks})


def lose(connection: Connection, me: int, names: Collection[str]) -> dict[str, bool]:
    """Take what nobody will run any more, to end what is left of it."""
    taken = take(connection, me, names)
    connection.execute(_LOSE, {"names": list(taken)})
    return taken
