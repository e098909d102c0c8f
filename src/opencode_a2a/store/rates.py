"""How often callers asked lately, as each replica counted it: functions of a connection.

Only PostgreSQL has rows here, and only while several replicas live.
"""

from collections.abc import Collection, Mapping

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from opencode_a2a.store.schema import rates
from opencode_a2a.store.statements import Prepared

FRESH_MS = 10_000
"""A replica that says nothing more for so long is not counted."""
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
    """Write down what a replica has counted, and take back what it does not count any more."""
    slot = _slot(replica)
    _PUT.run(
        connection,
        *({"key": key, "slot": slot, "at": now, "n": n} for key, n in sorted(counts.items())),
    )
    if withdrawn:
        connection.execute(rates.delete().where(rates.c.slot == slot, rates.c.key.in_(withdrawn)))


def elsewhere(connection: Connection, replica: int, now: int) -> dict[bytes, int]:
    """Return what the other replicas have counted."""
    fresh = (rates.c.slot != _slot(replica), rates.c.at > now - FRESH_MS)
    query = sa.select(rates.c.key, sa.func.sum(rates.c.n)).where(*fresh).group_by(rates.c.key)
    return {key: int(n) for key, n in connection.execute(query)}


def forget(connection: Connection, before: int) -> None:
    connection.execute(rates.delete().where(rates.c.at < before))


def _slot(replica: int) -> int:
    return replica % 2**31  # the column is an integer
