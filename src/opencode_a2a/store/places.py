"""Whom the workspaces and worktrees belong to that were made by method."""

from collections.abc import Iterable, Sequence

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from opencode_a2a.ids import Principal
from opencode_a2a.store.schema import places


def own(connection: Connection, principal: Principal, names: Iterable[str]) -> None:
    forget(connection, names)
    for name in names:
        connection.execute(places.insert().values(name=name, principal=principal))


def strangers(connection: Connection, principal: Principal, names: Sequence[str]) -> set[str]:
    """Return which of these belong to somebody else."""
    rows = connection.execute(
        sa.select(places.c.name).where(places.c.name.in_(names), places.c.principal != principal)
    )
    return {row.name for row in rows}


def forget(connection: Connection, names: Iterable[str]) -> None:
    connection.execute(places.delete().where(places.c.name.in_([*names])))
