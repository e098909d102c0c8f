"""Queries of the sessions that contexts use, and of the owners of sessions and workspaces.

A session that a caller names is at first only *claimed*. The claim ends by itself unless the turn
that it was made for confirms it.
"""

import hashlib
from collections.abc import Sequence
from typing import NamedTuple

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from opencode_a2a.ids import ContextId, Principal, SessionId
from opencode_a2a.store.database import Prepared, engine_of
from opencode_a2a.store.schema import links, owners, places


class LinkedSession(NamedTuple):
    """The session of a context."""

    session_id: SessionId
    upstream: str
    """The OpenCode that has it."""


_LINKED = Prepared(
    "SELECT links.session_id, owners.upstream FROM links"
    " JOIN owners ON owners.session_id = links.session_id"
    " WHERE links.principal = :principal AND context_id = :context_id AND place = :place"
)
_LINK = Prepared(
    "INSERT INTO links (principal, context_id, place, session_id, updated_at)"
    " VALUES (:principal, :context_id, :place, :session_id, :now)"
    " ON CONFLICT (principal, context_id, place)"
    " DO UPDATE SET session_id = excluded.session_id, updated_at = excluded.updated_at"
)
_OWN = Prepared(
    "INSERT INTO owners (session_id, principal, claimed_until, upstream)"
    " VALUES (:session_id, :principal, :until, :upstream)"
    " ON CONFLICT (session_id)"
    " DO UPDATE SET principal = excluded.principal, claimed_until = excluded.claimed_until"
)
_UPSTREAM = Prepared("SELECT upstream FROM owners WHERE session_id = :session_id")
_OWNER = Prepared("SELECT principal, claimed_until FROM owners WHERE session_id = :session_id")


def index_key(connection: Connection, text: str) -> str:
    """Return a text as it is stored in an index: a digest if it is too long for that."""
    data, longest = text.encode(errors="surrogatepass"), engine_of(connection).longest_key
    if longest is None or len(data) <= longest:
        return text
    return f"sha256:{hashlib.sha256(data).hexdigest()}"


def linked(
    connection: Connection, principal: Principal, context_id: ContextId, place: str
) -> LinkedSession | None:
    """Return the session that a context uses in a place."""
    key = index_key(connection, place)
    values = {"principal": principal, "context_id": context_id, "place": key}
    row = _LINKED.run(connection, values).fetchone()
    return LinkedSession(*row) if row else None


def upstream(connection: Connection, session_id: SessionId) -> str | None:
    """Return the OpenCode that has a session, if the session belongs to anybody."""
    row = _UPSTREAM.run(connection, {"session_id": session_id}).fetchone()
    return row[0] if row else None


def link(
    connection: Connection,
    principal: Principal,
    context_id: ContextId,
    place: str,
    session_id: SessionId,
    upstream: str,
    now: int,
) -> None:
    """Have a context use a session, and make the principal its owner."""
    key = index_key(connection, place)
    where = {"principal": principal, "context_id": context_id, "place": key}
    _LINK.run(connection, {**where, "session_id": session_id, "now": now})
    own(connection, principal, session_id, upstream)


def own(
    connection: Connection,
    principal: Principal,
    session_id: SessionId,
    upstream: str,
    until: int | None = None,
) -> None:
    """Make a principal the owner of a session, for good or until a time in ms."""
    whose = {"session_id": session_id, "principal": principal, "upstream": upstream}
    _OWN.run(connection, {**whose, "until": until})


def owner(connection: Connection, session_id: SessionId, now: int) -> Principal | None:
    """Return the owner of a session, or the principal that claims it at the moment."""
    row = _OWNER.run(connection, {"session_id": session_id}).fetchone()
    if row is None or (row[1] is not None and row[1] <= now):
        return None
    return Principal(row[0])


def strangers(
    connection: Connection, principal: Principal, session_ids: Sequence[SessionId], now: int
) -> set[SessionId]:
    """Return those of the sessions that somebody else owns or claims."""
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
    upstream: str,
    now: int,
    until: int | None,
) -> bool:
    """Claim a session and its ancestors, for good or until a time, unless somebody else has one.

    They belong together: OpenCode deletes a session with all its descendants.
    """
    if strangers(connection, principal, lineage, now):
        return False
    for session_id in lineage:
        if until is None or owner(connection, session_id, now) is None:
            own(connection, principal, session_id, upstream, until)
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
    """Delete the links and the owner of a session that no longer exists."""
    connection.execute(links.delete().where(links.c.session_id == session_id))
    connection.execute(owners.delete().where(owners.c.session_id == session_id))


def upstream_of_place(connection: Connection, name: str) -> str | None:
    """Return the OpenCode in which a workspace or worktree was made by method."""
    key = index_key(connection, name)
    return connection.scalar(sa.select(places.c.upstream).where(places.c.name == key))


def own_places(
    connection: Connection, principal: Principal, upstream: str, names: Sequence[str]
) -> None:
    """Make a principal the owner of workspaces (by id) and worktrees (by directory)."""
    forget_places(connection, names)
    for name in names:
        key = index_key(connection, name)
        values = {"name": key, "principal": principal, "upstream": upstream}
        connection.execute(places.insert().values(values))


def visible_places(connection: Connection, principal: Principal, names: Sequence[str]) -> list[str]:
    """Return the places that a principal may see: their own, and those without an owner."""
    keys = {name: index_key(connection, name) for name in names}
    others = sa.select(places.c.name).where(
        places.c.name.in_(keys.values()), places.c.principal != principal
    )
    hidden = {row.name for row in connection.execute(others)}
    return [name for name in names if keys[name] not in hidden]


def forget_places(connection: Connection, names: Sequence[str]) -> None:
    keys = [index_key(connection, name) for name in names]
    connection.execute(places.delete().where(places.c.name.in_(keys)))
