"""Which OpenCodes a replica may run at all, and which tasks it may end without running them."""

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Coroutine, Mapping
from contextlib import ExitStack, asynccontextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import orjson
import psycopg
import pytest
import sqlalchemy as sa
from sqlalchemy.engine import Connection
from structlog.testing import capture_logs

from opencode_a2a import clock
from opencode_a2a.clock import Lease, now_ms
from opencode_a2a.cluster import fleet as fleet_module
from opencode_a2a.cluster import ownership as ownership_module
from opencode_a2a.cluster.fleet import Fleet, Member
from opencode_a2a.cluster.ownership import Ownership
from opencode_a2a.config import UpstreamEntry
from opencode_a2a.errors import StoreUnavailableError
from opencode_a2a.ids import MAIN, ContextId, Principal, TaskId
from opencode_a2a.log.log import LogWriter
from opencode_a2a.log.state import (
    Accepted,
    Recovered,
    TaskRef,
    TaskState,
    dump_entries,
    load_entries,
)
from opencode_a2a.messages import Message
from opencode_a2a.opencode.feed import Feed
from opencode_a2a.opencode.managed import ManagedOpenCode
from opencode_a2a.opencode.upstream import OpenCodeServer
from opencode_a2a.store import replicas
from opencode_a2a.store import tasks as task_rows
from opencode_a2a.store.database import Database
from opencode_a2a.store.engine import DatabaseError, Replica
from opencode_a2a.store.replicas import Census, LastOwner, UpstreamRow
from opencode_a2a.store.tasks import Segment, TaskRow
from opencode_a2a.tasks.open import OpenTasks
from opencode_a2a.tasks.recovery import UNOWNED, UNSTOPPED, Recovery, end_unowned
from opencode_a2a.turns.errands import Errands
from opencode_a2a.turns.job import SharedTurns
from opencode_a2a.turns.sessions import Sessions
from tests.support import stores
from tests.support.postgres import PostgresServer
from tests.support.relay import Relay

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
        own = OpenCodeServer("", "", None, managed=ManagedOpenCode.__new__(ManagedOpenCode))
        member = Member(
            UpstreamEntry(name=MAIN, managed=1),
            own,
            lambda: (SharedTurns.__new__(SharedTurns), Errands.__new__(Errands)),
        )
        ownership = Ownership(
            second,
            Fleet([member], second, 0),
            Recovery.__new__(Recovery),
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
    database: Database, *names: str, taking: Taking = _nothing, lost_seconds: float = 60.0
) -> tuple[Ownership, Fleet]:
    """Return what decides for a replica whose OpenCodes are away and have no open tasks."""

    class Away:
        up = asyncio.Event()

        async def run(self) -> None: ...

    class Nothing:
        """No errands, tasks or links."""

        def all(self) -> list[object]:
            return []

        def forget_links(self) -> None: ...

        async def close(self) -> None: ...

        async def give_up(self, _: Member) -> None: ...

    def make() -> tuple[SharedTurns, Errands]:
        turns = SharedTurns.__new__(SharedTurns)
        turns.feed = cast("Feed", Away())
        turns.sessions = cast("Sessions", Nothing())
        turns.running = 0
        return turns, cast("Errands", Nothing())

    async def errands(members: Collection[Member]) -> None:
        await taking([member.name for member in members])

    @asynccontextmanager
    async def beside(work: Coroutine[None, None, None], _: str) -> AsyncGenerator[None]:
        work.close()
        yield

    behind = OpenCodeServer("http://127.0.0.1:9", "", None)
    entries = [UpstreamEntry(name=name, url=behind.url) for name in names]
    fleet = Fleet([Member(entry, behind, make) for entry in entries], database, lost_seconds)
    fleet.recover_errands = errands
    tasks, writer = cast("OpenTasks", Nothing()), LogWriter(database)
    recovery = Recovery(database, writer, fleet, tasks, lambda _: False)
    ownership = Ownership(database, fleet, recovery, beside)
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


async def _unavailable(*_: object) -> None:
    raise StoreUnavailableError


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

    assert [row.away for rows in (reached, kept, forgotten) for row in rows] == [False, True, True]
    assert [Census(2, (), rows).unowned for rows in (reached, kept, forgotten)] == [0, 1, 1]
    assert Census(2, (), kept).abandoned({"x"}) == ["x"]
    assert Census(2, (), forgotten).abandoned({"x"}) == ["x"]


async def test_nothing_is_asked_of_an_opencode_any_more_when_it_is_handed_over(
    tmp_path: Path,
) -> None:
    asking = asyncio.Event()

    class Leftovers:
        """What the last owner has left takes long to stop."""

        async def recover(self, taken: Mapping[str, LastOwner], members: Collection[Member]) -> int:
            return 0

        def stop_leftovers(
            self, member: Member, last_owner: LastOwner
        ) -> list[Coroutine[None, None, None]]:
            return [self._stop()]

        async def _stop(self) -> None:
            asking.set()
            try:
                await asyncio.Event().wait()
            finally:
                asking.clear()

        async def leave(self, member: Member) -> None: ...

        def end_reading(self) -> None: ...

    @asynccontextmanager
    async def beside(work: Coroutine[None, None, None], _: str) -> AsyncGenerator[None]:
        running = asyncio.create_task(work)
        yield
        running.cancel()
        await asyncio.wait([running])

    async with Database(stores.url(tmp_path), Replica("a")) as database, asyncio.timeout(60):
        _, fleet = _ownership(database, "x")
        ownership = Ownership(database, fleet, Leftovers(), beside)
        await ownership.start()
        await asking.wait()
        await ownership.let_go(0)
        await ownership.stop_following()
        asks, owners = asking.is_set(), await _owners(database)
        await ownership.hand_over()
        await ownership.close()

    assert owners == {"x": database.replica}
    assert not asks


async def test_what_a_replica_leaves_when_it_stops_is_taken_before_it_is_gone(
    tmp_path: Path,
) -> None:
    url = stores.url(tmp_path)
    async with Database(url, Replica("a")) as first, Database(url, Replica("b")) as second:
        await _own(second, "y")
        leaving, _ = _ownership(first, "x", "y")
        staying, _ = _ownership(second, "x", "y")
        await leaving.start()
        await staying.start()
        shared = await _owners(second)
        await leaving.let_go(0)
        await leaving.hand_over()
        await staying.look_and_act(second.replica or 0)
        left = await _owners(second)

    assert shared == {"x": first.replica, "y": second.replica}
    assert left == {"x": second.replica, "y": second.replica}


async def test_a_death_during_a_take_over_is_noticed_right_after_it(tmp_path: Path) -> None:
    url, lease = stores.url(tmp_path), 3.0
    async with (
        Database(url, Replica("a", lease)) as first,
        Database(url, Replica("b", lease)) as second,
        Database(url, Replica("c", lease)) as third,
    ):

        async def slowly(names: Collection[str]) -> None:
            if "x" in names:
                until = third.lease.cut_off_at + 2 * lease
                while third.lease.cut_off_at <= until:  # noqa: ASYNC110 - no event
                    await asyncio.sleep(lease / 16)

        await _own(first, "x")
        await _own(second, "y")
        ownership, fleet = _ownership(third, "x", "y", taking=slowly)
        beating, me = asyncio.create_task(third.keep_lease()), third.replica or 0
        await ownership.start()
        watching = asyncio.create_task(ownership.count_commits())
        async with asyncio.timeout(60):
            while not fleet.owned():
                await second.check_writable()
                await ownership.look_and_act(me)
                await asyncio.sleep(lease / 16)
        after_the_first = fleet.owned()
        await ownership.look_and_act(me)
        after_the_second = fleet.owned()
        beating.cancel()
        watching.cancel()

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


async def test_the_tasks_of_an_abandoned_opencode_end_although_nothing_can_be_read_just_then(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url, take = stores.url(tmp_path), replicas.take_abandoned
    async with Database(url, Replica("a")) as first, Database(url, Replica("b")) as second:
        await _own(first, "x")
        await _run(second, LONG_GONE)
        ownership, _ = _ownership(second, "y", lost_seconds=0.1)
        await ownership.start()
        with monkeypatch.context() as patch:
            tried = asyncio.Event()

            def take_and_fail(*given: Any) -> dict[str, LastOwner]:
                tried.set()
                patch.setattr(second, "read", _unavailable)
                return take(*given)

            patch.setattr(replicas, "take_abandoned", take_and_fail)
            async with asyncio.timeout(60):
                while not tried.is_set():
                    with suppress(StoreUnavailableError):
                        await _look((second, ownership))
        await ownership.look_and_act(second.replica or 0)
        left = await _owners(second)
        known = {row.name: row.state for row in second.census.upstreams}

    assert left == {"x": None, "y": second.replica}
    assert known["x"] == "lost"


async def test_an_abandoned_opencode_is_left_to_whoever_lists_it_again_and_then_forgotten(
    tmp_path: Path,
) -> None:
    url = stores.url(tmp_path)
    async with Database(url, Replica("a")) as first:
        await _own(first, "x")
    async with Database(url, Replica("b")) as second:
        await _run(second, LONG_GONE)
        keeper, _ = _ownership(second, "y", lost_seconds=0.1)
        await keeper.start()
        async with asyncio.timeout(60):
            while (ended := await _owners(second))["x"] is not None:
                await _look((second, keeper))
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


@pytest.mark.parametrize("tasks", [0, 1])
async def test_a_newcomer_leaves_open_tasks_to_those_that_were_listening_for_a_while(
    tasks: int, tmp_path: Path
) -> None:
    url, lease = stores.url(tmp_path), 2.0
    async with (
        Database(url, Replica("a", lease)) as first,
        Database(url, Replica("b", lease)) as second,
        Database(url, Replica("c", lease)) as third,
    ):
        await _own(first, "x")
        await first.write(replicas.publish, first.replica or 0, {"x": ("up", tasks)})
        listed = [UpstreamRow("x", None, "up", False, (), 0)]
        await second.write(replicas.enroll, second.replica or 0, listed)
        await _run(second, LONG_GONE)
        ownership, fleet = _ownership(third, "x")
        await ownership.start()
        at_once = fleet.owned()
        async with asyncio.timeout(60):
            while not fleet.owned():
                await asyncio.sleep(lease / 8)
                await ownership.look_and_act(third.replica or 0)

    assert at_once == ([] if tasks else ["x"])


@pytest.mark.requirement("I16")
@pytest.mark.parametrize("handed_over", [True, False])
async def test_an_opencode_is_not_long_away_because_the_clock_of_the_database_was_set(
    handed_over: bool, tmp_path: Path
) -> None:
    url = stores.url(tmp_path)
    async with (
        Database(url, Replica("a")) as first,
        Database(url, Replica("b")) as second,
        Database(url, Replica("c")) as third,
    ):
        await _own(first, "x")
        looking, _ = _ownership(second, "y")
        await looking.start()
        if handed_over:
            await first.write(replicas.hand_over, first.replica or 0, ["x"])
            await _run(second, "UPDATE upstreams SET changed = changed - interval '2 days'")
        await _run(second, LONG_GONE)
        await looking.look_and_act(second.replica or 0)
        [state] = [row.state for row in await second.read(replicas.upstreams) if row.name == "x"]
        coming, fleet = _ownership(third, "x")
        await coming.start()
        away_since = fleet.members["x"].away_since
        away = asyncio.get_running_loop().time() - (away_since or 0.0)

    assert state != "lost"
    assert fleet.owned() == ["x"]
    assert away < 50  # of the 60 s after which it is lost


# What nobody reaches


async def _look(*sides: tuple[Database, Ownership]) -> None:
    for database, ownership in sides:
        await ownership.look_and_act(database.replica or 0)
    await asyncio.sleep(0.05)


@pytest.mark.requirement("I3")
async def test_an_opencode_that_was_given_up_is_taken_as_soon_as_it_is_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ownership_module, "UNREACHED_SECONDS", 0.2)
    url, lease = stores.url(tmp_path), 2.0
    async with Database(url, Replica("a", lease)) as first, Database(url, Replica("b")) as second:
        await second.write(
            replicas.enroll, second.replica or 0, [UpstreamRow("x", None, "away", False, (), 0)]
        )
        ownership, fleet = _ownership(first, "x")
        await ownership.start()
        async with asyncio.timeout(10):
            while not fleet.owned():
                await _look((first, ownership))
            fleet.members["x"].away_since = asyncio.get_running_loop().time()
            while fleet.owned():
                await _look((first, ownership))

        fleet.members["x"].turns.feed.up.set()
        async with asyncio.timeout(2 * lease):
            while not fleet.owned():
                await _look((first, ownership))


async def test_an_opencode_that_neither_of_two_replicas_reaches_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ownership_module, "UNREACHED_SECONDS", 0.5)
    monkeypatch.setattr(ownership_module, "AWAY_SECONDS", 0.1)
    monkeypatch.setattr(ownership_module, "AVOID_SECONDS", (0.5, 1.0))
    monkeypatch.setattr(fleet_module, "NOTICE_SECONDS", 0.05)
    url, lost, owners = stores.url(tmp_path), list[str](), set[int | None]()
    async with (
        Database(url, Replica("a", 2.0)) as first,
        Database(url, Replica("b", 2.0)) as second,
    ):
        sides, watching = list[tuple[Database, Ownership]](), list[asyncio.Task[None]]()
        for database in (first, second):
            ownership, fleet = _ownership(database, "x", "y", lost_seconds=2.0)
            await ownership.start()
            sides.append((database, ownership))
            watching.append(
                asyncio.create_task(fleet.notice_lost(lambda one: lost.append(one.name)))
            )
        with suppress(TimeoutError):
            async with asyncio.timeout(12):
                while "x" not in lost:
                    await _look(*sides)
                    owners.add((await _owners(first))["x"])
        for watch in watching:
            watch.cancel()

    assert "x" in lost
    assert {first.replica, second.replica} <= owners  # both have tried


# Who is gone

LEASE = 8.0
SHORT = 1.5
LOCKS_OF = (
    "SELECT pg_terminate_backend(l.pid) FROM pg_locks l, replicas r WHERE r.no = %s"  # noqa: S608 - a constant
    " AND l.locktype = 'advisory' AND ((l.classid::bigint << 32) | l.objid::bigint) ="
    f" {replicas.LIFE_LOCK.format('r.no')}"
)


@dataclass
class Living:
    """A replica that looks after its lease, and does nothing else."""

    database: Database
    works: list[asyncio.Task[None]]
    listening: asyncio.Task[None]

    @property
    def no(self) -> int:
        return self.database.replica or 0

    @property
    def lease(self) -> Lease:
        return self.database.lease

    async def end(self, *, connected: bool) -> None:
        """Do nothing any more, as a process that is frozen (``connected``) or was killed."""
        ended = self.works if connected else [*self.works, self.listening]
        for work in ended:
            work.cancel()
        await asyncio.wait(ended)

    async def sees(self, *others: "Living") -> bool:
        """Whether these, and no others, count as live."""
        live = await self.database.read(replicas.live)
        return {one.no for one in live} == {self.no, *(one.no for one in others)}

    async def knows_by_lock(self, other: "Living") -> bool:
        """Whether it would know at once that the other has ended."""
        live = await self.database.read(replicas.live)
        promised = {one.no for one in live if one.short_lease is not None}
        return other.no in promised and self.lease.locked_seconds > LEASE


@asynccontextmanager
async def living(url: str, name: str) -> AsyncGenerator[Living]:
    async with Database(url, Replica(name, LEASE)) as database:
        ownership, _ = _ownership(database, name)
        await ownership.start()
        works = database.keep_lease(), ownership.run(), ownership.count_commits()
        tasks = [asyncio.create_task(work) for work in works]
        one = Living(database, tasks, asyncio.create_task(database.listen()))
        try:
            yield one
        finally:
            await one.end(connected=False)


async def until(known: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(60):
        while not await known():  # noqa: ASYNC110 - in the database
            await asyncio.sleep(0.05)


@pytest.fixture
def short_lease(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clock, "SHORT_SECONDS", SHORT)
    monkeypatch.setattr(clock, "SHORT_SHARE", 0.0)


@pytest.mark.requirement("I18")
@pytest.mark.usefixtures("short_lease")
@pytest.mark.parametrize("killed", [True, False], ids=["killed", "frozen"])
async def test_a_replica_that_was_killed_is_gone_before_its_lease_is_over_and_a_frozen_one_after_it(
    killed: bool, tmp_path: Path
) -> None:
    url = stores.url(tmp_path)
    async with living(url, "a") as a, living(url, "b") as b:
        await until(lambda: b.knows_by_lock(a))
        with capture_logs() as logs:
            await a.end(connected=not killed)
            await until(lambda: b.sees())
            at, held = time.monotonic(), a.lease.held
        with pytest.raises(StoreUnavailableError):
            await a.database.check_writable()

    assert not held
    assert killed or at > a.lease.cut_off_at
    ways = [(one["ended"], one["silent"]) for one in logs if "declared gone" in one["event"]]
    assert ways == [(["a"], []) if killed else ([], ["a"])]


@pytest.mark.requirement("I18")
async def test_a_replica_with_a_longer_lease_is_not_gone_while_it_holds_it(tmp_path: Path) -> None:
    url = stores.url(tmp_path)
    async with Database(url, Replica("a", 6.0)) as a, Database(url, Replica("b", 1.0)) as b:
        await a.check_writable()  # the last that it commits
        ownership, _ = _ownership(b, "x")
        await ownership.start()
        works = b.keep_lease(), ownership.run(), ownership.count_commits()
        tasks = [asyncio.create_task(work) for work in works]

        async def gone() -> bool:
            return [one.name for one in await b.read(replicas.live)] == ["b"]

        await until(gone)
        held = a.lease.held
        for task in tasks:
            task.cancel()

    assert not held


@pytest.mark.usefixtures("short_lease")
async def test_a_replica_whose_connection_is_ended_lives_on(tmp_path: Path) -> None:
    url = stores.url(tmp_path)
    async with living(url, "a") as a, living(url, "b") as b:
        await until(lambda: b.knows_by_lock(a))
        with psycopg.connect(url, autocommit=True) as admin:
            ended = list[object]()
            for _ in range(3):
                ended += admin.execute(LOCKS_OF, (a.no,)).fetchall()
                await asyncio.sleep(SHORT)

        assert len(ended) > 1  # it had the lock again
        assert await b.sees(a)
        await until(lambda: b.knows_by_lock(a))


@pytest.mark.usefixtures("short_lease")
@pytest.mark.parametrize("promoted", [False, True], ids=["restarted", "promoted"])
async def test_a_server_without_the_locks_of_before_has_nobody_declared_gone(
    promoted: bool, tmp_path: Path
) -> None:
    with ExitStack() as stack:
        server = stack.enter_context(PostgresServer())
        url = server.url("restarted")
        standby = stack.push(server.standby()) if promoted else server
        async with (
            Relay(server.port) as to_a,
            Relay(server.port) as to_b,
            living(to_a.url(url), "a") as a,
            living(to_b.url(url), "b") as b,
        ):
            await until(lambda: b.knows_by_lock(a))
            await asyncio.to_thread(server.kill)
            to_a.down = True
            await asyncio.to_thread(standby.promote if promoted else server.start)
            for relay in (to_a, to_b):
                relay.lead_to(standby.port)
            await until(lambda: locked(b))
            await asyncio.sleep(2 * SHORT)  # it has its lock again, and the other has not
            to_a.down = False
            await until(lambda: writes(a))

            assert await b.sees(a)


async def locked(one: Living) -> bool:
    return one.lease.locked_seconds < LEASE and one.lease.locked_since is not None


async def writes(one: Living) -> bool:
    assert not one.database.fenced
    with suppress(StoreUnavailableError):
        await one.database.check_writable()
        return True
    return False


@pytest.mark.usefixtures("short_lease")
async def test_a_replica_that_is_alone_keeps_to_its_whole_lease(tmp_path: Path) -> None:
    url = stores.url(tmp_path)

    async def promised() -> bool:
        return a.lease.promised

    async def not_promised() -> bool:
        return not a.lease.promised

    async with living(url, "a") as a:
        await asyncio.sleep(LEASE / 4)  # it looks twice
        alone = a.lease.promised
        async with living(url, "b"):
            await until(promised)
        await until(not_promised)
        live = await a.database.read(replicas.live)

    assert not alone
    assert [one.short_lease for one in live] == [None]
