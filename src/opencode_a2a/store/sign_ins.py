"""Queries of sign-ins to the console that have ended, and of the secret that signs them."""

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from opencode_a2a.store.engine import Prepared
from opencode_a2a.store.schema import sign_ins

_SECRET = b"secret"
"""The key of the row with the secret; digests are longer."""
_NEVER = 2**62
_ADD = Prepared(
    "INSERT INTO sign_ins (digest, until, secret) VALUES (:digest, :until, :secret)"
    " ON CONFLICT (digest) DO NOTHING"
)


def shared_secret(connection: Connection, proposed: bytes) -> bytes:
    """Return the secret that signs sessions: the one that was proposed first."""
    _ADD.run(connection, {"digest": _SECRET, "until": _NEVER, "secret": proposed})
    query = sa.select(sign_ins.c.secret).where(sign_ins.c.digest == _SECRET)
    return connection.execute(query).scalar_one()


def end(connection: Connection, digest: bytes, until: int) -> bool:
    """Store that a code or a session has ended, for as long as it would have lasted.

    False if that was stored before.
    """
    added = _ADD.run(connection, {"digest": digest, "until": until, "secret": None})
    return bool(added.rowcount)


def ended(connection: Connection) -> dict[bytes, int]:
    """Return the digests of what has ended, and until when in ms that must be remembered."""
    query = sa.select(sign_ins.c.digest, sign_ins.c.until).where(sign_ins.c.digest != _SECRET)
    return {row.digest: row.until for row in connection.execute(query)}


def forget(connection: Connection, before: int) -> None:
    connection.execute(sign_ins.delete().where(sign_ins.c.until < before))
