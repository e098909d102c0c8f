"""Which session a context uses, and whom a session belongs to.

A session named by a caller is first only *claimed*: the claim ends by itself unless the turn
that it was made for confirms it.
"""

from collections.abc import Sequence

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from opencode_a2a.ids import ContextId, Principal, SessionId
from opencode_a2a.store.schema import links, owners


def linked(
    connection: Connection, principal: Principal, context_id: ContextId, place: str
) -> SessionId | None:
    found = connection.scalar(
        sa.select(links.c.session_id).where(
            links.c.principal == principal,
            links.c.context_id == context_id,
            links.c.place == place,
        )
    )
    return SessionId(found) if found else None


def link(
    connection: Connection,
    principal: Principal,
    context_id: ContextId,
    place: str,
    session_id: SessionId,
    now: int,
) -> None:
    """Let a context use a session that belongs to the principal."""
    key = (
        links.c.principal == principal,
        links.c.context_id == context_id,
        links.c.place == place,
    )
    values = {"session_id": session_id, "updated_at": now}
    if connection.execute(links.update().where(*key).values(**values)).rowcount == 0:
        connection.execute(
            links.insert().values(principal=principal, context_id=context_id, place=place, **values)
        )
    own(connection, principal, session_id)


def own(connection: Connection, principal: Principal, session_id: SessionId) -> None:
    """Write down that a session belongs to a principal, for good."""
    values = {"principal": principal, "claimed_until": None}
    done = connection.execute(
        owners.update().where(owners.c.session_id == session_id).values(**values)
    )
    if done.rowcount == 0:
        connection.execute(owners.insert().values(session_id=session_id, **values))


def owner(connection: Connection, session_id: SessionId, now: int) -> Principal | None:
    """Return whom a session belongs to, or who has claimed it at the moment."""
    row = connection.execute(
        sa.select(owners.c.principal, owners.c.claimed_until).where(
            owners.c.session_id == session_id
        )
    ).first()
    if row is None or (row.claimed_until is not None and row.claimed_until <= now):
        return None
    return Principal(row.principal)


def strangers(
    connection: Connection, principal: Principal, session_ids: Sequence[SessionId], now: int
) -> set[SessionId]:
    """Return which of these sessions belong to, or are claimed by, somebody else."""
    rows = connection.execute(
        sa.select(owners.c.session_id).where(
            owners.c.session_id.in_(session_ids),
            owners.c.principal != principal,
            sa.or_(owners.c.claimed_until.is_(None), owners.c.claimed_until > now),
        )
    )
    return {SessionId(row.session_id) for row in rows}


def claim(
    connection: Connection, principal: Principal, session_id: SessionId, now: int, until: int
) -> bool:
    """Claim a session that nobody has; tell whether the principal may use it."""
    holder = owner(connection, session_id, now)
    if holder is not None:
        return holder == principal
    connection.execute(owners.delete().where(owners.c.session_id == session_id))
    connection.execute(
        owners.insert().values(session_id=session_id, principal=principal, claimed_until=until)
    )
    return True


def release(connection: Connection, principal: Principal, session_id: SessionId) -> None:
    """Give up a claim that was not confirmed."""
    connection.execute(
        owners.delete().where(
            owners.c.session_id == session_id,
            owners.c.principal == principal,
            owners.c.claimed_until.is_not(None),
        )
    )


def forget(connection: Connection, session_id: SessionId) -> None:
    """Remove every trace of a session that no longer exists."""
    connection.execute(links.delete().where(links.c.session_id == session_id))
    connection.execute(owners.delete().where(owners.c.session_id == session_id))
