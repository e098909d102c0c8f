"""Queries of what the turns of each principal have used, by day.

It is added in the transaction that ends a turn, so that a crash neither loses nor doubles it, and
read in the transaction that admits the next message, in whichever process.
"""

from collections.abc import Mapping
from typing import NamedTuple

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from opencode_a2a.store.engine import Prepared, Totals
from opencode_a2a.store.schema import spending

DAY_MS = 86_400_000


class Spent(NamedTuple):
    """Used on one day (UTC)."""

    cost: float = 0.0
    tokens: int = 0


_SPENDING = Totals("spending", ("principal", "day"), Spent._fields)
_READ = Prepared("SELECT cost, tokens FROM spending WHERE principal = :principal AND day = :day")


def day_of(at: int) -> int:
    """Return the day of a time in milliseconds, counted from the epoch."""
    return at // DAY_MS


def add(connection: Connection, spent: Mapping[tuple[str, int], Spent]) -> None:
    """Add what turns have used, by principal and day; a negative figure counts as none."""
    used = {of: Spent(max(0.0, one.cost), max(0, one.tokens)) for of, one in spent.items()}
    _SPENDING.add(connection, used)


def read(connection: Connection, principal: str, day: int) -> Spent:
    """Return what a principal has used on a day."""
    row = _READ.run(connection, {"principal": principal, "day": day}).fetchone()
    cost, tokens = _SPENDING.deferred(connection).get((principal, day), Spent())
    before = Spent(*row) if row else Spent()
    return Spent(before.cost + cost, before.tokens + int(tokens))


def read_all(connection: Connection, day: int) -> Spent:
    """Return what all principals have used on a day."""
    sums = sa.select(sa.func.sum(spending.c.cost), sa.func.sum(spending.c.tokens))
    cost, tokens = connection.execute(sums.where(spending.c.day == day)).one()
    return Spent(cost or 0.0, int(tokens or 0))


def forget(connection: Connection, before: int) -> None:
    connection.execute(spending.delete().where(spending.c.day < before))
