"""Who made the workspaces (by id) and worktrees (by directory) that were made by method."""

from collections.abc import Iterable

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from opencode_a2a.ids import Principal
from opencode_a2a.store.database import Database
from opencode_a2a.store.schema import places


class Places:
    def __init__(self, database: Database) -> None:
        self._database = database

    async def own(self, principal: Principal, *names: str) -> None:
        def write(connection: Connection) -> None:
            connection.execute(places.delete().where(places.c.name.in_(names)))
            for name in names:
                connection.execute(places.insert().values(name=name, principal=principal))

        await self._database.write(write)

    async def visible(self, principal: Principal, names: Iterable[str]) -> list[str]:
        """Return those that the caller may know of: their own, and those that nobody made here."""
        asked = [*names]
        if not asked:
            return []

        def read(connection: Connection) -> set[str]:
            others = sa.select(places.c.name).where(
                places.c.name.in_(asked), places.c.principal != principal
            )
            return {row.name for row in connection.execute(others)}

        hidden = await self._database.read(read)
        return [name for name in asked if name not in hidden]

    async def forget(self, *names: str) -> None:
        def write(connection: Connection) -> None:
            connection.execute(places.delete().where(places.c.name.in_(names)))

        await self._database.write(write)
