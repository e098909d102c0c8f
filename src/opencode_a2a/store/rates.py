"""How often each replica was called lately, by key of a rate limit: functions of a connection.

A replica adds the counts of the others to its own (``web.edge``). There are rows only with
PostgreSQL, while several replicas live.
"""

from collections.abc import Collection, Mapping

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from opencode_a2a.store.engine import Prepared
from opencode_a2a.store.schema import rates

FRESH_MS = 10_000
"""After so long the count of a replica that writes no new one is ignored."""
_PUT = Prepared(
    "INSERT INTO rates (key, slot, at, n) VALUES (:key, :slot, :at, :n)"
    " ON CONFLICT (key, slot) DO UPDATE SET at = excluded.at, n = excluded.n"
)


def put(
    connection: Connection,
    replica: int,
    counts: Mapping[bytes, int],
    withdrawn: Collection[bytes],
    now: int,
) -> None:
    """Write the counts of a replica, and delete those that it has withdrawn."""
    slot = _slot(replica)
    _PUT.run(
        connection,
        *({"key": key, "slot": slot, "at": now, "n": n} for key, n in sorted(counts.items())),
    )
    if withdrawn:
        connection.execute(rates.delete().where(rates.c.slot == slot, rates.c.key.in_(withdrawn)))


def elsewhere(connection: Connection, replica: int, now: int) -> dict[bytes, int]:
    """Return the sums of what the other replicas have counted."""
    fresh = (rates.c.slot != _slot(replica), rates.c.at > now - FRESH_MS)
    query = sa.select(rates.c.key, sa.func.sum(rates.c.n)).where(*fresh).group_by(rates.c.key)
    return {key: int(n) for key, n in connection.execute(query)}


def forget(connection: Connection, before: int) -> None:
    connection.execute(rates.delete().where(rates.c.at < before))


def _slot(replica: int) -> int:
    return replica % 2**31  # the column has 32 bits
