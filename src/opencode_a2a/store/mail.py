"""Mail between replicas: calls to the owner of an OpenCode, and the replies.

Functions of a connection, to be given to ``Database``; ``cluster.mailbox`` uses them. Only
PostgreSQL has several replicas, so this is its SQL. A call may contain a secret; it is erased as
soon as it was carried out. Who may run a call, and what its caller is told if no reply comes in
time (``NotRunError``: nothing was done; ``MaybeRunError``: it may have been done):

=================  ===========================  =======================  ===========================
``again``          taker                        who may run it           the caller is told
=================  ===========================  =======================  ===========================
any                none: not collected, or      the owner: ``collect``   ``NotRunError``, or
                   given back                                            ``MaybeRunError`` if begun
any                a live replica               that one                 its reply
``_ONCE``          a replica that is gone       nobody                   ``MaybeRunError``, at once
any but ``_ONCE``  a replica that is gone       the owner: ``collect``   ``MaybeRunError``
any                unknown: the row is lost     who has collected it     ``MaybeRunError``, at once
=================  ===========================  =======================  ===========================

A taker gives back (``give_back``) what it began and another may run again, and what it has not
begun, unless that is too old.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from sqlalchemy.engine import Connection

from opencode_a2a.store.database import Prepared
from opencode_a2a.store.replicas import MAIL_FORMAT


@dataclass(frozen=True, slots=True)
class MailRow:
    """A call that this replica has collected to carry it out."""

    no: int
    upstream: str
    kind: str
    body: bytes
    begun: bool
    """Whether an earlier owner began it, and gave the OpenCode up."""

    def __repr__(self) -> str:
        return f"MailRow({self.no}, {self.kind})"


@dataclass(frozen=True, slots=True)
class SentRow:
    """How far a call that was sent has come."""

    no: int
    reply: bytes | None
    collected: bool
    """Whether a live replica has collected it."""
    broken: bool
    """Whether the replica that collected it is gone, and no other may carry it out again."""


_ONCE, _REPEATABLE, _BEGUN = 0, 1, 2
"""The values of ``again``: a call is run once at most, may be run again, or was begun already and
may be run again."""
_SEND = Prepared(
    "INSERT INTO mail (upstream, sender, again, kind, body, at)"
    " VALUES (:upstream, :sender, :again, :kind, :body, clock_timestamp()) RETURNING no"
)
# If the sender is gone, its caller has lost the connection: the call is not carried out any more.
# One of a later format is left for an owner that can read it.
_FREE = """FROM mail m
  JOIN upstreams u ON u.name = m.upstream AND u.owner = :me
  JOIN replicas s ON s.no = m.sender AND s.gone IS NULL AND s.format <= :format
  LEFT JOIN replicas t ON t.no = m.taker
 WHERE m.upstream = ANY(:upstreams) AND m.reply IS NULL
   AND (m.taker IS NULL OR (m.again > 0 AND (t.no IS NULL OR t.gone IS NOT NULL)))"""
_WAITS = Prepared(f"SELECT EXISTS (SELECT 1 {_FREE})")
_COLLECT = Prepared(
    "UPDATE mail SET taker = :me WHERE no IN"  # noqa: S608 - constants
    f" (SELECT m.no {_FREE} ORDER BY m.no FOR UPDATE OF m SKIP LOCKED)"
    f" RETURNING no, upstream, kind, body, again = {_BEGUN}"
)
_STORE_REPLY = Prepared(
    "UPDATE mail SET reply = :reply, body = '' WHERE no = :no AND taker = :me RETURNING no"
)
_RETURN = Prepared(
    "UPDATE mail SET taker = NULL, upstream = :upstream WHERE no = :no AND taker = :me"
    " AND at > clock_timestamp() - :seconds * interval '1 second' RETURNING no"
)
_RETURN_BEGUN = Prepared(
    f"UPDATE mail SET taker = NULL, upstream = :upstream, again = {_BEGUN},"  # noqa: S608 - a constant
    " at = clock_timestamp() WHERE no = :no AND taker = :me RETURNING no"
)
_SENT = Prepared(
    "SELECT m.no, m.reply, m.taker IS NOT NULL AND t.no IS NOT NULL AND t.gone IS NULL,"
    " m.taker IS NOT NULL AND (t.no IS NULL OR t.gone IS NOT NULL) AND m.again = 0"
    " FROM mail m LEFT JOIN replicas t ON t.no = m.taker WHERE m.no = ANY(:numbers)"
)
_DELETE = Prepared(
    f"DELETE FROM mail WHERE no = :no RETURNING taker IS NOT NULL OR again = {_BEGUN}"  # noqa: S608 - a constant
)
_FORGET = Prepared(
    "DELETE FROM mail m WHERE (sender = :me AND no <> ALL(:numbers)"
    " AND at < clock_timestamp() - interval '1 minute') OR (NOT EXISTS"
    " (SELECT 1 FROM replicas s WHERE s.no = m.sender AND s.gone IS NULL)"
    " AND (m.reply IS NOT NULL OR NOT EXISTS"
    " (SELECT 1 FROM replicas t WHERE t.no = m.taker AND t.gone IS NULL)))"
)


def send(
    connection: Connection,
    upstream: str,
    sender: int,
    kind: str,
    body: bytes,
    *,
    again: bool,
    begun: bool = False,
) -> int:
    """Send a call to the owner of an OpenCode; return the number of the mail.

    With ``again``, a new owner may carry it out once more if the one that collected it is gone.
    ``begun`` says that the sender was the owner, and began it.
    """
    how = _BEGUN if begun else _REPEATABLE if again else _ONCE
    values = {"upstream": upstream, "sender": sender, "kind": kind, "body": body, "again": how}
    no: int = _SEND.run(connection, values).fetchone()[0]
    return no


def _values(me: int, upstreams: Sequence[str]) -> dict[str, object]:
    return {"me": me, "upstreams": [*upstreams], "format": MAIL_FORMAT}


def waits(connection: Connection, me: int, upstreams: Sequence[str]) -> bool:
    """Whether there is mail to collect for the owner of some OpenCodes."""
    found = _WAITS.run(connection, _values(me, upstreams)).fetchone()
    return bool(found[0])


def collect(connection: Connection, me: int, upstreams: Sequence[str]) -> list[MailRow]:
    """Collect the mail to the owner of some OpenCodes; no other replica carries it out then."""
    found = _COLLECT.run(connection, _values(me, upstreams)).fetchall()
    return sorted((MailRow(*row) for row in found), key=lambda row: row.no)


def store_reply(connection: Connection, no: int, me: int, reply: bytes) -> bool:
    """Store a reply, and erase the call; False if nobody waits for it any more."""
    found = _STORE_REPLY.run(connection, {"no": no, "me": me, "reply": reply}).fetchone()
    return found is not None


def give_back(
    connection: Connection, no: int, me: int, upstream: str, seconds: float, *, begun: bool
) -> bool:
    """Give back a mail that was not carried out, to the owner of an OpenCode; False if too old.

    One that was begun here, and may be run again, is as young as a new one.
    """
    values = {"no": no, "me": me, "upstream": upstream}
    if begun:
        return _RETURN_BEGUN.run(connection, values).fetchone() is not None
    return _RETURN.run(connection, values | {"seconds": seconds}).fetchone() is not None


def sent(connection: Connection, numbers: Sequence[int]) -> list[SentRow]:
    """Return how far these mails have come, without those that were deleted."""
    return [SentRow(*row) for row in _SENT.run(connection, {"numbers": [*numbers]}).fetchall()]


def delete(connection: Connection, no: int) -> bool:
    """Delete a mail whose sender no longer waits; return whether a replica may have begun it.

    So it may if the mail is lost: a failover, to a server without the last commits.
    """
    found = _DELETE.run(connection, {"no": no}).fetchone()
    return found is None or bool(found[0])


def forget(connection: Connection, me: int, numbers: Sequence[int]) -> None:
    """Delete mail of replicas that are gone, and this replica's own except for these numbers."""
    _FORGET.run(connection, {"me": me, "numbers": [*numbers]})
