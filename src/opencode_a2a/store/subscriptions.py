"""Browsers to which messages for a principal are pushed."""

from dataclasses import asdict, dataclass, fields

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from opencode_a2a.store.schema import subscriptions


@dataclass(frozen=True, slots=True)
class SubscriptionRow:
    """A subscription of a browser. Its keys are neither shown nor logged."""

    endpoint: str
    principal: str
    public_key: str
    secret: str
    created_at: int

    def __repr__(self) -> str:
        return f"SubscriptionRow({self.principal})"


_COLUMNS = [subscriptions.c[field.name] for field in fields(SubscriptionRow)]


def put(connection: Connection, row: SubscriptionRow, most: int) -> bool:
    """Store a subscription in place of an earlier one of the same browser.

    False if the principal has too many; then nothing changes.
    """
    others = [o for o in of_principal(connection, row.principal) if o.endpoint != row.endpoint]
    if len(others) >= most:
        return False
    connection.execute(subscriptions.delete().where(subscriptions.c.endpoint == row.endpoint))
    connection.execute(subscriptions.insert().values(asdict(row)))
    return True


def of_principal(connection: Connection, principal: str) -> list[SubscriptionRow]:
    query = sa.select(*_COLUMNS).where(subscriptions.c.principal == principal)
    found = connection.execute(query.order_by(subscriptions.c.created_at))
    return [SubscriptionRow(*row) for row in found]


def delete(connection: Connection, principal: str, endpoint: str) -> None:
    mine = (subscriptions.c.principal == principal, subscriptions.c.endpoint == endpoint)
    connection.execute(subscriptions.delete().where(*mine))
