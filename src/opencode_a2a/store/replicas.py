"""The replicas, and which of them owns each OpenCode: functions of a connection of PostgreSQL.

A row of ``replicas`` is one life of a process; its number is never used again. A replica that was
declared gone can commit nothing any more (``store.postgres``), so another may take what it owned.
Only the owner of an OpenCode ("upstream") writes the logs of its tasks.

Whoever declares another gone goes by its own monotonic clock and the commits of the other, which
it has seen not to change: clocks of machines, the database's included, may be set.
"""

import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from itertools import chain
from typing import NamedTuple

import orjson
import sqlalchemy as sa
from sqlalchemy.engine import Connection

from opencode_a2a.store import schema

UNKNOWN = 0
"""The owner of an upstream that is new in the table; no replica has this number. It does not count
as handed over: an earlier program may have left tasks there without storing all it had shown."""
MAIL_FORMAT = 2
"""The format of the calls that this program sends to other replicas (``cluster.mailbox``).

A program reads calls of its own format and of earlier ones, and sends none to a replica of an
earlier one. A field that an earlier program may ignore does not need a new format; one that it must
not ignore, a field that is gone, or a new kind of call does. The recorded calls in
``tests/support/mail`` say what each format looks like. 0 is a program from before formats.
"""


class LastOwner(StrEnum):
    """What became of the owner that an OpenCode had before; the values are labels of a metric."""

    NONE = "new"
    HANDED_OVER = "handed over"
    """It handed the OpenCode over, so that all that it showed is stored."""
    GONE = "gone"
    """It was declared gone: something that it showed may not be stored."""


class ReplicaRow(NamedTuple):
    """A replica that was not declared gone."""

    no: int
    name: str
    version: str
    silent_seconds: float
    """Since its last commit."""
    lists: frozenset[str]
    """The names of the upstreams in its settings."""
    mail_format: int = MAIL_FORMAT
    """The format of the calls that it sends, and the latest that it reads."""
    commits: int = 0
    """How often it has committed."""
    short_lease: float | None = None
    """Seconds without a commit after which it may be declared gone if its lock is free; None if
    it has not promised that, so that only its whole lease counts."""
    lease: float | None = None
    """Seconds without a commit after which it may be declared gone; None for a replica of
    2.0 (for 2.0, until 3.0)."""


class UpstreamRow(NamedTuple):
    """An OpenCode, as its owner last described it."""

    name: str
    owner: int | None
    """The number of a replica, live or gone; None once it was handed over."""
    state: str
    """``up``, ``away`` or ``lost``; an abandoned one is ``lost`` too."""
    drain: bool
    directories: tuple[str, ...]
    """What it serves; empty: every directory."""
    max_turns: int
    """0: no limit."""
    open_tasks: int = 0
    free: bool = False
    """Whether it has no live owner."""

    @property
    def away(self) -> bool:
        """Whether no live owner reaches it."""
        return self.free or self.state != "up"


@dataclass(frozen=True)
class Census:
    """The live replicas and the OpenCodes that they run or could run, as read at one moment.

    ``Database.census`` is the latest one; ``cluster.ownership`` reads it. Whoever wants to know
    which replicas there are and what they own asks that. With SQLite it is empty.
    """

    me: int = 0
    """The number of this replica."""
    live: Sequence[ReplicaRow] = ()
    upstreams: Sequence[UpstreamRow] = ()

    @cached_property
    def has_others(self) -> bool:
        """Whether other replicas use the database too."""
        return any(one.no != self.me for one in self.live)

    @cached_property
    def elsewhere(self) -> Mapping[str, UpstreamRow]:
        """The OpenCodes that this replica does not own, by name, without lost ones."""
        rows = (row for row in self.upstreams if row.owner != self.me and row.state != "lost")
        return {row.name: row for row in rows}

    @cached_property
    def listings(self) -> Counter[str]:
        """How many live replicas list each OpenCode in their settings."""
        return Counter(chain.from_iterable(one.lists for one in self.live))

    def spare(self, replica: ReplicaRow) -> int:
        """Return how many more OpenCodes a replica should own; negative if it owns too many.

        Its fair share: each OpenCode is shared by all replicas that list it.
        """
        share = math.ceil(sum(1 / self.listings[name] for name in replica.lists) - 1e-9)
        owned = (row for row in self.upstreams if row.owner == replica.no)
        return share - sum(row.name in replica.lists for row in owned)

    def reads_mail(self, upstream: str) -> bool:
        """Whether the owner of an OpenCode can read the calls of this program.

        While it has no live owner, its next one may be able to.
        """
        owner = next((row.owner for row in self.upstreams if row.name == upstream), None)
        return all(one.mail_format >= MAIL_FORMAT for one in self.live if one.no == owner)

    @cached_property
    def this_replica(self) -> ReplicaRow | None:
        """None once it was declared gone."""
        return next((one for one in self.live if one.no == self.me), None)

    @property
    def others(self) -> list[ReplicaRow]:
        return [one for one in self.live if one.no != self.me]

    @property
    def any_up(self) -> bool:
        """Whether a live replica owns an OpenCode that it can reach."""
        return any(row.state == "up" and not row.free for row in self.upstreams)

    @property
    def unowned(self) -> int:
        """How many OpenCodes have no live owner, without those that were given up for lost."""
        return sum(row.free and row.state != "lost" for row in self.upstreams)

    def abandoned(self, long_away: Collection[str]) -> list[str]:
        """Return the OpenCodes that no live replica lists, of those that were away for too long.

        One that was abandoned before is abandoned again if the replica that ended its tasks is
        gone before it was done.
        """
        return [
            row.name
            for row in self.upstreams
            if row.free and not self.listings[row.name]
            if (row.owner is not None if row.state == "lost" else row.name in long_away)
        ]

    def without(self, gone: Collection[int]) -> "Census":
        """Return it after some replicas were declared gone."""
        return Census(
            self.me,
            [one for one in self.live if one.no not in gone],
            [row._replace(free=row.free or row.owner in gone) for row in self.upstreams],
        )

    def after_taking(self, names: Collection[str], *, abandoned: bool = False) -> "Census":
        """Return it after this replica became the owner of some OpenCodes, to end their tasks if
        they are abandoned."""
        mine = {"owner": self.me, "free": False, **({"state": "lost"} if abandoned else {})}
        rows = [row._replace(**mine) if row.name in names else row for row in self.upstreams]
        return Census(self.me, self.live, rows)


_LIVE = sa.text(
    "SELECT no, name, version, lists, format, commits, short_lease, lease,"
    " extract(epoch FROM clock_timestamp() - seen)::float8 AS silent_seconds"
    " FROM replicas WHERE gone IS NULL ORDER BY no"
)
# The row of an owner is missing if an earlier program has deleted it.
_UPSTREAMS = sa.text(
    "SELECT u.name, u.owner, u.state, u.drain, u.serves, u.room, u.tasks,"
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
    "INSERT INTO upstreams (name, owner, state, drain, room, tasks, changed)"  # noqa: S608 - a constant
    " SELECT DISTINCT upstream, cast(:owner AS bigint), 'away', 0, 0, 0, clock_timestamp()"
    f" FROM tasks WHERE {schema.OPEN} ON CONFLICT (name) DO NOTHING"
)
_LONG_LOST = sa.text(
    "SELECT name FROM upstreams WHERE state = 'lost'"
    " AND changed < clock_timestamp() - interval '1 day'"
)
_FORGET_GONE = sa.text(
    "DELETE FROM replicas WHERE gone < clock_timestamp() - interval '1 day'"
    " AND NOT EXISTS (SELECT 1 FROM upstreams WHERE owner = replicas.no)"
)
LIFE_LOCK = "hashtextextended(current_schema() || '/replica/' || {}, 0)"
"""The key of the lock that a connection of a replica holds for as long as it lasts, in SQL."""
_TRY_LIFE_LOCK = sa.text(f"SELECT pg_try_advisory_xact_lock({LIFE_LOCK.format(':no')})")
_PROMISE = sa.text("UPDATE replicas SET short_lease = :seconds WHERE no = :me")
# The row of a replica is locked while it is inside of a transaction. One that hangs there is not
# waited for: all who tried would be held up for as long.
_DECLARE_GONE = sa.text(
    "UPDATE replicas SET gone = clock_timestamp() WHERE no IN (SELECT r.no FROM replicas r"
    " JOIN unnest(cast(:numbers AS bigint[]), cast(:commits AS bigint[])) AS silent (no, commits)"
    " ON r.no = silent.no AND r.commits = silent.commits"
    " WHERE r.gone IS NULL ORDER BY r.no FOR UPDATE OF r SKIP LOCKED) RETURNING no"
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
_MARK_ABANDONED = sa.text(
    "UPDATE upstreams SET state = 'lost',"
    " changed = CASE state WHEN 'lost' THEN changed ELSE clock_timestamp() END"
    " WHERE name = ANY(:names)"
)


def forget(connection: Connection) -> None:
    """Delete OpenCodes that were lost a day ago, and replicas that were gone then and own nothing.

    An OpenCode stays while a live replica lists it.
    """
    listed = {name for row in live(connection) for name in row.lists}
    lost = [name for name in connection.scalars(_LONG_LOST) if name not in listed]
    known = schema.upstreams
    connection.execute(known.delete().where(known.c.name.in_(lost)))
    connection.execute(_FORGET_GONE)


def live(connection: Connection) -> list[ReplicaRow]:
    """Return the replicas that were not declared gone, oldest first."""
    return [
        ReplicaRow(
            no=row.no,
            name=row.name,
            version=row.version,
            silent_seconds=row.silent_seconds,
            lists=frozenset(_names(row.lists)),
            mail_format=row.format,
            commits=row.commits,
            short_lease=row.short_lease,
            lease=row.lease,
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
            directories=_names(row.serves),
            max_turns=row.room,
            open_tasks=row.tasks,
            free=row.free,
        )
        for row in connection.execute(_UPSTREAMS)
    ]


def _names(data: bytes | None) -> tuple[str, ...]:
    """Return the names of a stored list; none of one that is damaged."""
    try:
        return tuple(orjson.loads(data or b"[]"))
    except (TypeError, ValueError):
        return ()


def enroll(connection: Connection, me: int, listed: Sequence[UpstreamRow]) -> None:
    """Write down which OpenCodes a replica lists in its settings.

    One that is new in the table belongs to nobody; neither does one that is only known by tasks
    that have not ended.
    """
    connection.execute(_ENROLL_LEFT, {"owner": UNKNOWN})
    names = orjson.dumps([row.name for row in listed])
    connection.execute(_LIST, {"me": me, "lists": names})
    for row in sorted(listed):
        values = {"name": row.name, "owner": UNKNOWN, "room": row.max_turns}
        values["drain"] = int(row.drain)
        serves = orjson.dumps(row.directories) if row.directories else None
        connection.execute(_ENROLL, {**values, "serves": serves})


def promise(connection: Connection, me: int, seconds: float | None) -> None:
    """Tell others to go by a short lease of this replica once its lock is free, or not to."""
    connection.execute(_PROMISE, {"me": me, "seconds": seconds})


def declare_gone(connection: Connection, silent: Mapping[int, int]) -> list[int]:
    """Declare replicas gone that have committed as often as given here, and not since.

    They can write nothing any more. Return the numbers of those that were declared gone; one whose
    transaction is still open in the database is not among them.
    """
    values = {"numbers": [*silent], "commits": [*silent.values()]}
    return list(connection.scalars(_DECLARE_GONE, values))


def declare_gone_if_unlocked(
    connection: Connection, me: int, silent: Mapping[int, int]
) -> list[int]:
    """Declare gone those of these replicas whose lock is also free.

    None, if that of this replica looks free as well, which holds one: the server was restarted, or
    it is another one, and the locks are not back yet.
    """
    if connection.scalar(_TRY_LIFE_LOCK, {"no": str(me)}):
        return []
    # Nobody can take the lock back before the end of this transaction.
    unlocked = [no for no in silent if connection.scalar(_TRY_LIFE_LOCK, {"no": str(no)})]
    return declare_gone(connection, {no: silent[no] for no in unlocked})


def become_owner(connection: Connection, me: int, names: Collection[str]) -> dict[str, LastOwner]:
    """Become the owner of those of these OpenCodes that have no live owner.

    Return those that this replica owns now, each with what became of its last owner.
    """
    locked = list(connection.scalars(_LOCK, {"names": list(names)}))
    free = connection.execute(_UNOWNED, {"names": locked}).all()
    connection.execute(_BECOME_OWNER, {"me": me, "names": [row.name for row in free]})
    known = {None: LastOwner.HANDED_OVER, UNKNOWN: LastOwner.NONE}
    return {row.name: known.get(row.owner, LastOwner.GONE) for row in free}


def lock_unowned(connection: Connection, name: str) -> bool:
    """Keep an OpenCode without a live owner until the end of the transaction.

    False if it has a live owner, or is not known.
    """
    connection.execute(_LOCK_ONE, {"name": name})
    return connection.execute(_UNOWNED, {"names": [name]}).first() is not None


def hand_over(connection: Connection, me: int, names: Collection[str]) -> None:
    """Leave OpenCodes to other replicas; everything that was shown of their tasks is stored."""
    connection.execute(_HAND_OVER, {"me": me, "names": list(names)})


def hand_over_and_unlist(connection: Connection, me: int, names: Collection[str]) -> None:
    """Hand OpenCodes over because this replica stops, and list none, so that it has no share."""
    hand_over(connection, me, names)
    connection.execute(_LIST, {"me": me, "lists": orjson.dumps([])})


def publish(connection: Connection, me: int, published: Mapping[str, tuple[str, int]]) -> None:
    """Write the state and the number of open tasks of OpenCodes that this replica owns."""
    for name, (state, tasks) in sorted(published.items()):
        connection.execute(_PUBLISH, {"me": me, "name": name, "state": state, "tasks": tasks})


def take_abandoned(connection: Connection, me: int, names: Collection[str]) -> dict[str, LastOwner]:
    """Become the owner of OpenCodes that nobody lists, to end their tasks."""
    taken = become_owner(connection, me, names)
    connection.execute(_MARK_ABANDONED, {"names": list(taken)})
    return taken
