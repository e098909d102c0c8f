"""Queries about callers: what they have used, how often they call, and their ended sign-ins."""

from collections.abc import Collection, Mapping
from typing import NamedTuple

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from opencode_a2a.store.database import Prepared, Totals
from opencode_a2a.store.schema import rates, sign_ins, spending

# What the turns of each principal have used, by day. It is added in the transaction that ends a
# turn, so that a crash neither loses nor doubles it, and read in the transaction that admits the
# next message, in any process.

DAY_MS = 86_400_000
SPENDING_DAYS = 62
"""How long the daily spending of callers is kept."""


class Spent(NamedTuple):
    """Used on one day (UTC)."""

    cost: float = 0.0
    tokens: int = 0


_SPENDING = Totals("spending", ("principal", "day"), Spent._fields)
_READ = Prepared("SELECT cost, tokens FROM spending WHERE principal = :principal AND day = :day")


def day_of(at: int) -> int:
    """Return the day of a time in milliseconds, counted from the epoch."""
    return at // DAY_MS


def add_spending(connection: Connection, spent: Mapping[tuple[str, int], Spent]) -> None:
    """Add what turns have used, by principal and day; a negative figure counts as none."""
    used = {of: Spent(max(0.0, one.cost), max(0, one.tokens)) for of, one in spent.items()}
    _SPENDING.add(connection, used)


def spending_of(connection: Connection, principal: str, day: int) -> Spent:
    """Return what a principal has used on a day."""
    row = _READ.run(connection, {"principal": principal, "day": day}).fetchone()
    cost, tokens = _SPENDING.deferred(connection).get((principal, day), Spent())
    before = Spent(*row) if row else Spent()
    return Spent(before.cost + cost, before.tokens + int(tokens))


def spending_of_all(connection: Connection, day: int) -> Spent:
    """Return what all principals have used on a day."""
    sums = sa.select(sa.func.sum(spending.c.cost), sa.func.sum(spending.c.tokens))
    cost, tokens = connection.execute(sums.where(spending.c.day == day)).one()
    return Spent(cost or 0.0, int(tokens or 0))


# How often each replica was called lately, by key of a rate limit. A replica adds the counts of the
# others to its own (``web.edge``). There are rows only while several replicas live.

FRESH_MS = 10_000
"""After so long the count of a replica that writes no new one is ignored."""
STALE_MS = 600_000
"""After so long such a count is deleted."""
_SHARE = Prepared(
    "INSERT INTO rates (key, slot, at, n) VALUES (:key, :slot, :at, :n)"
    " ON CONFLICT (key, slot) DO UPDATE SET at = excluded.at, n = excluded.n"
)


def share_counts(
    connection: Connection,
    replica: int,
    counts: Mapping[bytes, int],
    withdrawn: Collection[bytes],
    now: int,
) -> None:
    """Write the counts of a replica, and delete those that it has withdrawn."""
    slot = _slot(replica)
    _SHARE.run(
        connection,
        *({"key": key, "slot": slot, "at": now, "n": n} for key, n in sorted(counts.items())),
    )
    if withdrawn:
        connection.execute(rates.delete().where(rates.c.slot == slot, rates.c.key.in_(withdrawn)))


def counts_elsewhere(connection: Connection, replica: int, now: int) -> dict[bytes, int]:
    """Return the sums of what the other replicas have counted."""
    fresh = (rates.c.slot != _slot(replica), rates.c.at > now - FRESH_MS)
    query = sa.select(rates.c.key, sa.func.sum(rates.c.n)).where(*fresh).group_by(rates.c.key)
    return {key: int(n) for key, n in connection.execute(query)}


def _slot(replica: int) -> int:
    return replica % 2**31  # the column has 32 bits


# Sign-ins to the console that have ended, and the secret that signs them (``web.browser``)

_SECRET = b"secret"
"""The key of the row with the secret of sessions; digests are longer than any such name."""
_NEVER = 2**62
_ADD_SIGN_IN = Prepared(
    "INSERT INTO sign_ins (digest, until, secret) VALUES (:digest, :until, :secret)"
    " ON CONFLICT (digest) DO NOTHING"
)


def shared_secret(connection: Connection, proposed: bytes, name: bytes = _SECRET) -> bytes:
    """Return a secret by its name, that of sessions if it has none: the one proposed first."""
    _ADD_SIGN_IN.run(connection, {"digest": name, "until": _NEVER, "secret": proposed})
    query = sa.select(sign_ins.c.secret).where(sign_ins.c.digest == name)
    return connection.execute(query).scalar_one()


def end_sign_in(connection: Connection, digest: bytes, until: int) -> bool:
    """Store that a code or a session has ended, for as long as it would have lasted.

    False if that was stored before.
    """
    added = _ADD_SIGN_IN.run(connection, {"digest": digest, "until": until, "secret": None})
    return bool(added.rowcount)


def ended_sign_ins(connection: Connection) -> dict[bytes, int]:
    """Return the digest of each code or session that has ended, and when it may be forgotten."""
    query = sa.select(sign_ins.c.digest, sign_ins.c.until).where(sign_ins.c.secret.is_(None))
    return {row.digest: row.until for row in connection.execute(query)}


def forget(connection: Connection, now: int) -> None:
    """Delete what has been kept long enough."""
    connection.execute(spending.delete().where(spending.c.day < day_of(now) - SPENDING_DAYS))
    connection.execute(rates.delete().where(rates.c.at < now - STALE_MS))
    connection.execute(sign_ins.delete().where(sign_ins.c.until < now))
