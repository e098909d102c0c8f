"""Which OpenCodes a replica may run at all."""

import asyncio
from contextlib import nullcontext
from pathlib import Path

import pytest

from opencode_a2a.config import UpstreamEntry
from opencode_a2a.ids import MAIN
from opencode_a2a.opencode.managed import ManagedOpenCode
from opencode_a2a.opencode.upstream import Upstream
from opencode_a2a.store import replicas
from opencode_a2a.store.database import Database, DatabaseError, Replica
from opencode_a2a.store.replicas import UpstreamRow
from opencode_a2a.tasks.log import LogWriter
from opencode_a2a.tasks.open import OpenTasks
from opencode_a2a.tasks.replica import Ownership
from opencode_a2a.turns.errands import Errands
from opencode_a2a.turns.fleet import Fleet, Member
from opencode_a2a.turns.turn import Turns
from tests.support import stores

pytestmark = pytest.mark.postgresql_only


async def test_a_managed_opencode_is_not_taken_for_that_of_another_replica(tmp_path: Path) -> None:
    url = stores.url(tmp_path)
    async with (
        Database(url, Replica("a", 2.0)) as first,
        Database(url, Replica("b", 2.0)) as second,
    ):
        alive, me = asyncio.create_task(first.keep_lease()), first.replica or 0
        main = [UpstreamRow(MAIN, None, "away", False, (), 0)]
        await first.write(lambda connection: replicas.enroll(connection, me, main))
        own = Upstream("", "", None, managed=ManagedOpenCode.__new__(ManagedOpenCode))
        member = Member(
            UpstreamEntry(name=MAIN, managed=1),
            own,
            lambda: (Turns.__new__(Turns), Errands.__new__(Errands)),
        )
        ownership = Ownership(
            second,
            LogWriter(second),
            Fleet([member], second, 0),
            OpenTasks.__new__(OpenTasks),
            (),
            lambda work, name: nullcontext(),
        )

        with pytest.raises(DatabaseError, match="is in use by the replica a, and each") as refused:
            await ownership.start()

        alive.cancel()
        assert refused.value.status == 2
        assert not member.owned
