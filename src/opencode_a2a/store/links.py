"""Which session a context uses, and whom a session belongs to.

A session named by a caller is first only *claimed*: the claim ends by itself unless the turn
that it was made for confirms it.
"""

from collections.abc import Sequence

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from opencode_a2a.ids import ContextId, Principal, SessionId
from opencode_a2a.store.prepared import Prepared
from opencode_a2a.store.schema import links, owners

_PLACE = (
    links.c.principal == sa.bindparam("who"),
    links.c.context_id == sa.bindparam("context"),
    links.c.place == sa.bindparam("where"),
)
_SESSION = owners.c.session_id == sa.bindparam("session")
_LINKED = Prepared(sa.select(links.c.session_id).where(*_PLACE))
_RELINK = Prepared(
    links.update()
    .where(*_PLACE)
    .values(session_id=sa.bindparam("session"), updated_at=sa.bindparam("now"))
)
_LINK = Prepared(
    links.insert().values(
        principal=sa.bindparam("who"),
        context_id=sa.bindparam("context"),
        place=sa.bindparam("where"),
        session_id=sa.bindparam("session"),
        updated_at=sa.bindparam("now"),
    )
)
_REOWN = Prepared(
    owners.update()
    .where(_SESSION)
    .values(principal=sa.bindparam("who"), claimed_until=sa.bindparam("until"))
)
_OWN = Prepared(
    owners.insert().values(
        session_id=sa.bindparam("session"),
        principal=sa.bindparam("who"),
        claimed_until=sa.bindparam("until"),
    )
)
_OWNER = Prepared(sa.select(owners.c.principal, owners.c.claimed_until).where(_SESSION))


def linked(
    connection: Connection, principal: Principal, context_id: ContextId, place: str
) -> SessionId | None:
    found = _LINKED.first(connection, who=principal, context=context_id, where=place)
    return SessionId(found[0]) if found else None


def link(
    connection: Connection,
    principal: Principal,
    context_id: ContextId,
    place: str,
    session_id: SessionId,
    now: int,
) -> None:
    """Let a context use a session, which then belongs to the principal."""
    values = {
        "who": principal,
        "context": context_id,
        "where": place,
        "session": session_id,
        "now": now,
    }
    if _RELINK.run(connection, **values) == 0:
        _LINK.run(connection, **values)
    own(connection, principal, session_id)


def own(
    connection: Connection, principal: Principal, session_id: SessionId, until: int | None = None
) -> None:
    """Write down that a session belongs to a principal: for good, or until a time."""
    values = {"session": session_id, "who": principal, "until": until}
    if _REOWN.run(connection, **values) == 0:
        _OWN.run(connection, **values)


def owner(connection: Connection, session_id: SessionId, now: int) -> Principal | None:
    """Return whom a session belongs to, or who has claimed it at the moment."""
    row = _OWNER.first(connection, session=session_id)
    if row is None or (row[1] is not None and row[1] <= now):
        return None
    return Principal(row[0])


def strangers(
    connection: Connection, principal: Principal, session_ids: Sequence[SessionId], now: int
) -> set[SessionId]:
    """Return those sessions that belong to somebody else, or are claimed by somebody else."""
    rows = connection.execute(
        sa.select(owners.c.session_id).where(
            owners.c.session_id.in_(session_ids),
            owners.c.principal != principal,
            sa.or_(owners.c.claimed_until.is_(None), owners.c.claimed_until > now),
        )
    )
    return {SessionId(row.session_id) for row in rows}


def claim(
    connection: Connection,
    principal: Principal,
    lineage: Sequence[SessionId],
    now: int,
    until: int | None,
) -> bool:
    """Claim a session and its ancestors, for good or until a time, unless one is another's.

    They go together: OpenCode deletes a session with all that came from it.
    """
    if strangers(connection, principal, lineage, now):
        return False
    for session_id in lineage:
        if until is None or owner(connection, session_id, now) is None:
            own(connection, principal, session_id, until)
    return True


def release(connection: Connection, principal: Principal, lineage: Sequence[SessionId]) -> None:
    """Give up claims that were not confirmed."""
    connection.execute(
        owners.delete().where(
            owners.c.session_id.in_(lineage),
            owners.c.principal == principal,
            owners.c.claimed_until.is_not(None),
        )
    )


def forget(connection: Connection, session_id: SessionId) -> None:
    """Remove every trace of a session that no longer exists."""
    connection.execute(links.delete().where(links.c.session_id == session_id))
    connection.execute(owners.delete().where(owners.c.session_id == session_id))
