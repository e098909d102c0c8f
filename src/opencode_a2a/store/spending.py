"""What the turns of each principal have used, by day: functions of a connection for ``Database``.

A row is written in the transaction that ends the turn, so that a crash neither loses nor doubles
it, and read in the one that admits the next message: whichever process that is.
"""

from collections.abc import Mapping
from typing import NamedTuple

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from opencode_a2a.store.database import Prepared, Totals
from opencode_a2a.store.schema import spending

DAY_MS = 86_400_000


class Spent(NamedTuple):
    """What was used on one day (UTC)."""

    cost: float = 0.0
    tokens: int = 0


_SPENDING = Totals("spending", ("principal", "day"), Spent._fields)
_READ = Prepared("SELECT cost, tokens FROM spending WHERE principal = :principal AND day = :day")


def day_of(at: int) -> int:
    """Return the day of a time in milliseconds, counted from the epoch."""
    return at // DAY_MS


def add(connection: Connection, spent: Mapping[tuple[str, int], Spent]) -> None:
    """Count what turns have used, by principal and day; nothing that is used gives any back."""
    used = {of: Spent(max(0.0, one.cost), max(0, one.tokens)) for of, one in spent.items()}
    _SPENDING.add(connection, used)


def read(connection: Connection, principal: str, day: int) -> Spent:
    row = _READ.run(connection, {"principal": principal, "day": day}).fetchone()
    return Spent(*row) if row else Spent()


def read_all(connection: Connection, day: int) -> Spent:
    """Return what all principals have used on a day."""
    sums = sa.select(sa.func.sum(spending.c.cost), sa.func.sum(spending.c.tokens))
    cost, tokens = connection.execute(sums.where(spending.c.day == day)).one()
    return Spent(cost or 0.0, int(tokens or 0))


def forget(connection: Connection, before: int) -> None:
    connection.execute(spending.delete().where(spending.c.day < before))
