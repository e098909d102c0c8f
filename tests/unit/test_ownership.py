"""Which OpenCodes a replica may run at all, and which tasks it may end without running them."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Coroutine
from contextlib import asynccontextmanager, nullcontext
from pathlib import Path
from typing import cast

import orjson
import pytest
import sqlalchemy as sa
from sqlalchemy.engine import Connection

from opencode_a2a.clock import now_ms
from opencode_a2a.config import UpstreamEntry
from opencode_a2a.ids import MAIN, ContextId, Principal, TaskId
from opencode_a2a.messages import Message
from opencode_a2a.opencode.feed import Feed
from opencode_a2a.opencode.managed import ManagedOpenCode
from opencode_a2a.opencode.upstream import Upstream
from opencode_a2a.store import replicas
from opencode_a2a.store import tasks as task_rows
from opencode_a2a.store.database import Database
from opencode_a2a.store.engine import DatabaseError, Replica
from opencode_a2a.store.replicas import Census, UpstreamRow
from opencode_a2a.store.tasks import Segment, TaskRow
from opencode_a2a.tasks.log import LogWriter
from opencode_a2a.tasks.open import OpenTasks
from opencode_a2a.tasks.ownership import Ownership
from opencode_a2a.tasks.recovery import UNOWNED, UNSTOPPED, end_unowned
from opencode_a2a.tasks.state import (
    Accepted,
    Recovered,
    TaskRef,
    TaskState,
    dump_entries,
    load_entries,
)
from opencode_a2a.turns.errands import Errands
from opencode_a2a.turns.fleet import Fleet, Member
from opencode_a2a.turns.job import SharedTurns
from tests.support import stores

pytestmark = pytest.mark.postgresql_only

LONG_GONE = "UPDATE replicas SET gone = clock_timestamp() - interval '2 days' WHERE name = 'a'"


async def test_a_managed_opencode_is_not_taken_for_that_of_another_replica(tmp_path: Path) -> None:
    url = stores.url(tmp_path)
    async with (
        Database(url, Replica("a", 2.0)) as first,
        Database(url, Replica("b", 2.0)) as second,
    ):
        alive, me = asyncio.create_task(first.keep_lease()), first.replica or 0
        main = [UpstreamRow(MAIN, None, "away", False, (), 0)]
        await first.write(replicas.enroll, me, main)
        own = Upstream("", "", None, managed=ManagedOpenCode.__new__(ManagedOpenCode))
        member = Member(
            UpstreamEntry(name=MAIN, managed=1),
            own,
            lambda: (SharedTurns.__new__(SharedTurns), Errands.__new__(Errands)),
        )
        ownership = Ownership(
            second,
            LogWriter(second),
            Fleet([member], second, 0),
            OpenTasks.__new__(OpenTasks),
            lambda work, name: nullcontext(),
            lambda prompt: False,
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
            replicas.become_owner(connection, number, ["x"])
            no = task_rows.add_task(connection, row)
            task_rows.append(connection, [Segment(no, 1, 1, accepted)], [])
            return no

        row = row._replace(no=await owner.write(admit))
        while_it_lives = await end_unowned(other, row)
        before = await other.read(task_rows.load_segments, row.no, 1)
        gone = sa.text("UPDATE replicas SET gone = clock_timestamp() WHERE no = :no")
        await other.write(lambda c: c.execute(gone, {"no": number}))
        afterwards = await end_unowned(other, row)
        again = await end_unowned(other, row)
        log = await other.read(task_rows.load_segments, row.no, 1)
        tallied = await other.read(task_rows.tally, ["canceled"], "p")

    assert (while_it_lives, afterwards, again) == (False, True, True)
    assert [segment.first_seq for segment in before] == [1]
    events = [event for segment in log for _, event in load_entries(segment.data)]
    assert events[1:] == [Recovered(UNOWNED), UNSTOPPED]
    assert tallied == 1


Taking = Callable[[Collection[str]], Awaitable[None]]
"""Called when a replica takes up the work of OpenCodes."""


async def _nothing(names: Collection[str]) -> None: ...


def _ownership(
    database: Database, *names: str, taking: Taking = _nothing
) -> tuple[Ownership, Fleet]:
    """Return what decides for a replica whose OpenCodes are away and have no open tasks."""

    class Away:
        up = asyncio.Event()

        async def run(self) -> None: ...

    def make() -> tuple[SharedTurns, Errands]:
        turns = SharedTurns.__new__(SharedTurns)
        turns.feed = cast("Feed", Away())
        return turns, Errands.__new__(Errands)

    class NoTasks:
        def all(self) -> list[object]:
            return []

    async def errands(members: Collection[Member]) -> None:
        await taking([member.name for member in members])

    @asynccontextmanager
    async def beside(work: Coroutine[None, None, None], _: str) -> AsyncGenerator[None]:
        work.close()
        yield

    behind = Upstream("http://127.0.0.1:9", "", None)
    entries = [UpstreamEntry(name=name, url=behind.url) for name in names]
    fleet = Fleet([Member(entry, behind, make) for entry in entries], database, 60.0)
    fleet.recover_errands = errands
    tasks, writer = cast("OpenTasks", NoTasks()), LogWriter(database)
    ownership = Ownership(database, writer, fleet, tasks, beside, lambda _: False)
    return ownership, fleet


async def _own(database: Database, *names: str) -> None:
    """Become the owner of OpenCodes that can be reached."""
    me, rows = database.replica or 0, [UpstreamRow(one, None, "up", False, (), 0) for one in names]

    def write(connection: Connection) -> None:
        replicas.enroll(connection, me, rows)
        replicas.become_owner(connection, me, names)
        replicas.publish(connection, me, dict.fromkeys(names, ("up", 1)))

    await database.write(write)


async def _owners(database: Database) -> dict[str, int | None]:
    return {row.name: row.owner for row in await database.read(replicas.upstreams)}


async def _run(database: Database, statement: str) -> None:
    await database.write(lambda connection: connection.execute(sa.text(statement)))


async def test_an_opencode_is_abandoned_however_long_its_owner_is_gone(tmp_path: Path) -> None:
    url = stores.url(tmp_path)
    async with Database(url, Replica("a")) as first, Database(url, Replica("b")) as second:
        await _own(first, "x")
        reached = await second.read(replicas.upstreams)
        await _run(second, LONG_GONE)
        async with Database(url, Replica("c")) as third:  # as a start does it
            kept = await third.read(replicas.upstreams)
        # As versions before this one have left it.
        await _run(second, "DELETE FROM replicas WHERE name = 'a'")
        await _run(second, "UPDATE upstreams SET changed = clock_timestamp() - interval '2 days'")
        forgotten = await second.read(replicas.upstreams)

    assert [row.away_seconds for row in reached] == [None]
    assert [Census(2, (), rows).unowned for rows in (reached, kept, forgotten)] == [0, 1, 1]
    assert Census(2, (), kept).abandoned(86_400.0) == ["x"]
    assert Census(2, (), forgotten).abandoned(86_400.0) == ["x"]


async def test_a_death_during_a_take_over_is_noticed_right_after_it(tmp_path: Path) -> None:
    url, lease = stores.url(tmp_path), 3.0
    silence = "UPDATE replicas SET seen = clock_timestamp() - interval '1 hour' WHERE name = "
    async with (
        Database(url, Replica("a", lease)) as first,
        Database(url, Replica("b", lease)) as second,
        Database(url, Replica("c", lease)) as third,
    ):

        async def slowly(names: Collection[str]) -> None:
            if "x" in names:
                await _run(third, f"{silence} 'b'")
                until = third.lease.until + lease / 2
                while third.lease.until <= until:  # noqa: ASYNC110 - no event
                    await asyncio.sleep(lease / 16)

        await _own(first, "x")
        await _own(second, "y")
        ownership, fleet = _ownership(third, "x", "y", taking=slowly)
        beating, me = asyncio.create_task(third.keep_lease()), third.replica or 0
        await ownership.start()
        await _run(first, f"{silence} 'a'")
        async with asyncio.timeout(60):
            while not fleet.owned():
                await second.check_writable()
                await ownership.look_and_act(me)
                await asyncio.sleep(lease / 16)
        after_the_first = fleet.owned()
        await ownership.look_and_act(me)
        after_the_second = fleet.owned()
        beating.cancel()

    assert (after_the_first, after_the_second) == (["x"], ["x", "y"])


async def test_the_tasks_of_an_abandoned_opencode_end_although_the_replica_that_ends_them_dies(
    tmp_path: Path,
) -> None:
    url = stores.url(tmp_path)
    async with Database(url, Replica("a")) as first, Database(url, Replica("b")) as second:
        await _own(first, "x")
        await _run(second, LONG_GONE)
        # It is killed between this transaction and those that end the tasks.
        abandoned = await second.write(
            lambda c: replicas.take_abandoned(c, second.replica or 0, ["x"])
        )
        async with Database(url, Replica("c")) as third:
            ownership, _ = _ownership(third, "y")
            await ownership.start()
            while_it_lives = await _owners(third)
            await _run(third, LONG_GONE.replace("'a'", "'b'"))
            await ownership.look_and_act(third.replica or 0)
            afterwards = await _owners(third)

    assert set(abandoned) == {"x"}
    assert while_it_lives == {"x": second.replica, "y": third.replica}
    assert afterwards == {"x": None, "y": third.replica}


async def test_an_abandoned_opencode_is_left_to_whoever_lists_it_again_and_then_forgotten(
    tmp_path: Path,
) -> None:
    url = stores.url(tmp_path)
    async with Database(url, Replica("a")) as first:
        await _own(first, "x")
    async with Database(url, Replica("b")) as second:
        await _run(second, LONG_GONE)
        keeper, _ = _ownership(second, "y")
        await keeper.start()
        ended = await _owners(second)
        async with Database(url, Replica("c")) as third:
            finder, fleet = _ownership(third, "x")
            await finder.start()
            found = fleet.owned()
        await _run(
            second,
            "UPDATE upstreams SET state = 'lost', changed = clock_timestamp() - interval '2 days'",
        )
        await second.write(replicas.forget)
        left = await _owners(second)

    assert ended == {"x": None, "y": second.replica}
    assert found == ["x"]
    assert left == {"y": second.replica}
