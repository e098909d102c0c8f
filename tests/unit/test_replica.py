"""Which OpenCodes a replica may run at all, and which tasks it may end without running them."""

import asyncio
from contextlib import nullcontext
from pathlib import Path

import orjson
import pytest
import sqlalchemy as sa
from sqlalchemy.engine import Connection

from opencode_a2a.config import UpstreamEntry
from opencode_a2a.ids import MAIN, ContextId, Principal, TaskId
from opencode_a2a.messages import Message
from opencode_a2a.opencode.managed import ManagedOpenCode
from opencode_a2a.opencode.upstream import Upstream
from opencode_a2a.store import replicas
from opencode_a2a.store import tasks as task_rows
from opencode_a2a.store.database import Database
from opencode_a2a.store.engine import DatabaseError, Replica
from opencode_a2a.store.replicas import UpstreamRow
from opencode_a2a.store.tasks import Segment, TaskRow
from opencode_a2a.tasks.caretaker import UNOWNED, UNSTOPPED, end_unowned
from opencode_a2a.tasks.log import LogWriter
from opencode_a2a.tasks.open import OpenTasks
from opencode_a2a.tasks.replica import Ownership
from opencode_a2a.tasks.state import (
    Accepted,
    Recovered,
    TaskRef,
    TaskState,
    dump_entries,
    load_entries,
)
from opencode_a2a.telemetry import now_ms
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


async def test_only_a_task_that_no_live_replica_runs_is_ended_without_its_owner(
    tmp_path: Path,
) -> None:
    url = stores.url(tmp_path)
    ref = TaskRef(TaskId("t"), ContextId("c"), Principal("p"), None, now_ms())
    state = TaskState(ref)
    accepted = dump_entries([state.apply(Accepted(Message("m", "user", [])), ref.created_at)])
    status = orjson.dumps(state.status)
    row = TaskRow(
        ref.id, ref.principal, ref.context_id, state.status.state, 0, 0, status, upstream="x"
    )
    async with Database(url, Replica("a")) as owner, Database(url, Replica("b")) as other:
        number = owner.replica or 0

        def admit(connection: Connection) -> int:
            replicas.enroll(connection, number, [UpstreamRow("x", None, "up", False, (), 0)])
            replicas.take(connection, number, ["x"])
            no = task_rows.add_task(connection, row)
            task_rows.append(connection, [Segment(no, 1, 1, accepted)], [])
            return no

        row = row._replace(no=await owner.write(admit))
        while_it_lives = await end_unowned(other, row, UNSTOPPED)
        before = await other.read(lambda c: task_rows.load_segments(c, row.no, 1))
        gone = sa.text("UPDATE replicas SET gone = clock_timestamp() WHERE no = :no")
        await other.write(lambda c: c.execute(gone, {"no": number}))
        afterwards = await end_unowned(other, row, UNSTOPPED)
        again = await end_unowned(other, row, UNSTOPPED)
        log = await other.read(lambda c: task_rows.load_segments(c, row.no, 1))
        tallied = await other.read(lambda c: task_rows.tally(c, ["canceled"], "p"))

    assert (while_it_lives, afterwards, again) == (False, True, True)
    assert [segment.first_seq for segment in before] == [1]
    events = [event for segment in log for _, event in load_entries(segment.data)]
    assert events[1:] == [Recovered(UNOWNED), UNSTOPPED]
    assert tallied == 1
