"""Queries of grants: permissions that a person gave for a task or a context."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from opencode_a2a.store.schema import grants, tasks


@dataclass(frozen=True, slots=True)
class GrantRow:
    id: str
    principal: str
    context_id: str
    task_id: str
    """Empty for a grant for the whole context."""
    directory: str
    permission: str
    patterns: bytes
    request_id: str
    given_at: int
    revoked_at: int | None = None


def add(connection: Connection, row: GrantRow) -> GrantRow:
    """Store a grant and return it; if an equal one holds already, return that instead."""
    same = ("principal", "context_id", "task_id", "directory", "permission", "patterns")
    query = sa.select(grants).where(grants.c.revoked_at.is_(None))
    values = asdict(row)
    equal = connection.execute(query.where(*(grants.c[name] == values[name] for name in same)))
    earlier = equal.mappings().first()
    if earlier is not None:
        return GrantRow(**earlier)
    connection.execute(grants.insert().values(values))
    return row


def of_context(connection: Connection, principal: str, context_id: str) -> Sequence[GrantRow]:
    """Return the grants of a principal that hold in a context or in one of its tasks."""
    mine = (grants.c.principal == principal, grants.c.context_id == context_id)
    query = sa.select(grants).where(*mine, grants.c.revoked_at.is_(None))
    return [GrantRow(**row) for row in connection.execute(query).mappings()]


def listed(
    connection: Connection, principal: str, ended: Sequence[str], most: int
) -> Sequence[GrantRow]:
    """Return the grants of a principal that hold, newest first, without those of ended tasks."""
    over = sa.exists().where(tasks.c.id == grants.c.task_id, tasks.c.state.in_(ended))
    query = sa.select(grants).where(
        grants.c.principal == principal, grants.c.revoked_at.is_(None), ~over
    )
    ordered = query.order_by(grants.c.given_at.desc(), grants.c.id).limit(most)
    return [GrantRow(**row) for row in connection.execute(ordered).mappings()]


def revoke(connection: Connection, principal: str, grant_id: str, at: int) -> bool:
    """Revoke a grant; False if the principal has no grant of this id that holds."""
    which = (grants.c.id == grant_id, grants.c.principal == principal)
    update = grants.update().where(*which, grants.c.revoked_at.is_(None))
    return connection.execute(update.values(revoked_at=at)).rowcount > 0
