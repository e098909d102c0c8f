"""Reading a task that another process writes: what it stores is shown here, told of or not."""

import asyncio
import gc
import re
import time
import weakref
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import orjson
import pytest
from psycopg import sql
from sqlalchemy.engine import Connection

from opencode_a2a import metrics
from opencode_a2a.a2a.encoding import V1
from opencode_a2a.errors import StreamEndedError
from opencode_a2a.events import Finished, Interrupted, Outcome, Started, TextGrew
from opencode_a2a.ids import ContextId, MessageId, Principal, RequestId, SessionId, TaskId
from opencode_a2a.log import log as live
from opencode_a2a.log import remote as remote_module
from opencode_a2a.log.log import LogReader, LogWriter, TaskLog
from opencode_a2a.log.remote import KEPT_SECONDS, RemoteLogs
from opencode_a2a.log.state import (
    Accepted,
    Cursor,
    Entry,
    Recovered,
    State,
    TaskRef,
    TaskState,
    Unknown,
    dump_entries,
)
from opencode_a2a.log.stored import Replay, ref_of
from opencode_a2a.messages import Message, Part
from opencode_a2a.store import postgres_listener
from opencode_a2a.store import tasks as task_rows
from opencode_a2a.store.database import Database, make_engine
from opencode_a2a.store.engine import ConnectionOptions, Replica
from opencode_a2a.store.postgres import TIMEOUTS
from opencode_a2a.store.replicas import Census
from opencode_a2a.store.tasks import Segment, TaskRow
from tests.support import stores
from tests.support.postgres import PGBOUNCER, ROLE, PgBouncer
from tests.support.relay import Relay

pytestmark = pytest.mark.postgresql_only

FOR_EVER = ConnectionOptions(poll_seconds=60.0)
"""What is not heard is not found."""


@pytest.fixture(autouse=True)
def _no_looking(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(postgres_listener, "LOOK_SECONDS", 60.0)


def grew(text: str, *, opens: bool = False) -> TextGrew:
    return TextGrew(MessageId("msg_1"), "prt_1", text, opens)


GREW = orjson.dumps([(1, "TextGrew", grew("after a gap"))])


class Both:
    """A database, in which one side writes logs and the other reads them."""

    def __init__(self, database: Database, options: ConnectionOptions) -> None:
        self.database = database
        self.options = options
        self.now = 0.0
        self.writer = LogWriter(database)
        self.remote = RemoteLogs(database, lambda: self.now)

    async def task(self, name: str = "task") -> tuple[TaskLog, TaskRow]:
        """Return the log of a new task as its writer has it, and its row."""
        ref = TaskRef(TaskId(name), ContextId("context"), Principal("alice"), None, 1)
        state = TaskState(ref)
        segment = dump_entries([state.apply(Accepted(message("hello")), 1)])
        row = TaskRow(ref.id, ref.principal, ref.context_id, "submitted", 1, 1, b"{}")

        def write(connection: Connection) -> int:
            no = task_rows.add_task(connection, row)
            task_rows.append(connection, [Segment(no, 1, 1, segment)], [])
            return no

        no = await self.database.write(write)
        return TaskLog(no, state, self.writer, self.database), row._replace(no=no)

    async def replayed(self, row: TaskRow) -> Replay:
        replay = Replay(self.database, row.no, ref_of(row))
        while await replay.next(replay.state.seq):
            pass
        return replay

    async def stored(self, row: TaskRow) -> list[Entry]:
        replay, entries = Replay(self.database, row.no, ref_of(row)), list[Entry]()
        while more := await replay.next(replay.state.seq):
            entries += more
        return entries


def message(text: str) -> Message:
    return Message(text, "user", [Part("text", text=text)])


@asynccontextmanager
async def both(
    state: Path,
    options: ConnectionOptions = FOR_EVER,
    url: str | None = None,
    replica: Replica | None = None,
) -> AsyncGenerator[Both]:
    async with Database(url or stores.url(state), replica, options) as database:
        database.census = stores.SHARED
        sides = Both(database, options)
        work = [
            asyncio.create_task(part)
            for part in (sides.writer.run(), sides.remote.run(), database.listen())
        ]
        try:
            async with asyncio.timeout(60):
                if options.poll_seconds == FOR_EVER.poll_seconds:
                    await heard(database, "probe")
                yield sides
        finally:
            for task in work:
                task.cancel()
            await asyncio.gather(*work, return_exceptions=True)


async def heard(database: Database, text: str) -> None:
    """Tell something until it is heard."""
    came = asyncio.Event()

    def hear(what: str) -> None:
        if what == text:
            came.set()

    database.listeners.append(hear)
    while not came.is_set():
        database.notify(text)
        await asyncio.sleep(0.02)
    database.listeners.remove(hear)


async def read_all(reader: LogReader) -> list[Entry]:
    entries: list[Entry] = []
    while batch := await reader.next():
        entries += batch
    return entries


async def told(reader: LogReader, count: int) -> list[Entry]:
    entries: list[Entry] = []
    while len(entries) < count:
        entries += await reader.next()
    return entries


def seen(entries: list[Entry]) -> list[tuple[int, int, object, object]]:
    return [(one.seq, one.at, one.event, one.status) for one in entries]


@pytest.mark.requirement("I19")
async def test_readers_elsewhere_are_given_what_the_writer_stores(tmp_path: Path) -> None:
    async with both(tmp_path) as sides:
        log, row = await sides.task()
        remote = await sides.remote.opened(row)
        near, far = LogReader(log, Cursor(1)), LogReader(remote, Cursor(1))
        reading = asyncio.gather(read_all(near), read_all(far))
        pushed = list[Entry]()
        pushing = asyncio.create_task(pushed_all(LogReader(remote, Cursor(1)), pushed))

        await log.append([Started()])
        for place in range(30):
            log.append_now([grew(str(place), opens=place == 0)])
            await asyncio.sleep(0)
        await log.append([Finished(Outcome.COMPLETED)])
        here, there = await reading
        await pushing

        assert seen(there) == seen(here) == seen(pushed) == seen(await sides.stored(row))[1:]
        assert remote.state.status == log.state.status


async def pushed_all(reader: LogReader, entries: list[Entry]) -> None:
    def push(new: list[Entry]) -> bool:
        entries.extend(new)
        return True

    while batch := await reader.next(push):
        entries += batch


async def test_what_was_stored_before_is_there_when_the_log_is_asked_for(tmp_path: Path) -> None:
    async with both(tmp_path) as sides:
        log, row = await sides.task()
        await log.append([Started(), grew("a", opens=True), Started()])

        first = await sides.remote.opened(row)
        again = await sides.remote.opened(row)
        before = first.state.seq
        await log.append([Started()])  # of which nothing is heard here yet
        await first.firm_state()

        assert first is again
        assert (before, first.state.seq) == (4, 5)
        assert first.state.status == log.state.status


async def test_a_reader_may_resume_with_what_is_shown_where_the_task_runs_but_not_stored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote_module, "AHEAD_SECONDS", 15.0)
    async with both(tmp_path) as sides:
        log, row = await sides.task()
        await log.append([Started()])
        remote = await sides.remote.opened(row)
        log.append_now([grew("shown", opens=True)])
        ahead, lost = Cursor(log.state.seq), Cursor(log.state.seq + 5)

        await remote.reach(ahead)
        reader = LogReader(remote, ahead)
        monkeypatch.setattr(remote_module, "AHEAD_SECONDS", 0.1)
        await remote.reach(lost)

        assert not reader.resync
        assert LogReader(remote, lost).resync


async def test_a_slow_reader_falls_behind_the_tail_and_catches_up(tmp_path: Path) -> None:
    async with both(tmp_path) as sides:
        log, row = await sides.task()
        remote = await sides.remote.opened(row)
        slow = LogReader(remote, Cursor(1))
        for place in range(live.TAIL * 3):
            await log.append([grew(str(place), opens=place == 0)])
        await log.append([Finished(Outcome.COMPLETED)])
        await remote.until_stopped(0)

        assert remote.after(1) is None  # the tail does not reach back so far
        assert seen(await read_all(slow)) == seen(await sides.stored(row))[1:]


async def test_what_is_told_and_not_heard_is_found_by_looking(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(postgres_listener, "LOOK_SECONDS", 0.1)

    def notify(_: LogWriter, numbers: list[int]) -> None:
        """Lose it."""

    monkeypatch.setattr(LogWriter, "notify", notify)
    async with both(tmp_path) as sides:
        log, row = await sides.task()
        remote = await sides.remote.opened(row)
        reading = asyncio.create_task(read_all(LogReader(remote, Cursor(1))))
        for place in range(5):
            await log.append([Started(), grew(str(place), opens=place == 0)])
        await log.append([Finished(Outcome.COMPLETED)])

        assert seen(await reading) == seen(await sides.stored(row))[1:]


async def test_a_deaf_listener_is_noticed_and_looked_for_until_it_hears_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A notification is all that is in the bytes, when nothing was asked."""
    deaf = True

    def back(data: bytes) -> bytes:
        return b"" if deaf and data.startswith(b"A\0") else data

    async with Relay(stores.server().port, back=back) as relay:
        url = relay.url(stores.url(tmp_path))
        replica = Replica("one", lease_seconds=0.4)  # beats every 0.1 s
        async with both(tmp_path, ConnectionOptions(poll_seconds=0.05), url, replica) as sides:
            log, row = await sides.task()
            remote = await sides.remote.opened(row)
            reader = LogReader(remote, Cursor(1))
            await log.append([Started()])
            assert len(await told(reader, 1)) == 1
            assert not hears()

            deaf = False
            while not hears():  # noqa: ASYNC110 - no event
                await asyncio.sleep(0.02)
            await log.append([Finished(Outcome.COMPLETED)])
            assert len(await read_all(reader)) == 1


def hears() -> bool:
    return metrics.REGISTRY.get_sample_value("a2a_listen_up") == 1


async def test_a_broken_connection_is_made_anew_and_all_is_looked_at(tmp_path: Path) -> None:
    async with both(tmp_path) as sides:
        log, row = await sides.task()
        remote = await sides.remote.opened(row)
        reading = asyncio.create_task(read_all(LogReader(remote, Cursor(1))))
        looked = asyncio.Event()
        sides.database.listeners.append(lambda text: None if text else looked.set())

        with stores.server().admin() as admin:
            listening = "SELECT pid FROM pg_locks WHERE locktype = 'advisory'"
            ended = admin.execute(f"SELECT pg_terminate_backend(pid) FROM ({listening})")  # noqa: S608 - a constant
            assert ended.fetchall() == [(True,)]
        await looked.wait()
        await log.append([Started()])
        await log.append([Finished(Outcome.COMPLETED)])

        assert seen(await reading) == seen(await sides.stored(row))[1:]


async def test_a_log_that_nobody_reads_is_let_go_after_a_minute(tmp_path: Path) -> None:
    async with both(tmp_path) as sides:
        log, row = await sides.task()
        kept = weakref.ref(await sides.remote.opened(row))
        reading = asyncio.create_task(
            read_all(LogReader(await sides.remote.opened(row), Cursor(1)))
        )
        await asyncio.sleep(0)
        sides.now += KEPT_SECONDS + 1
        sides.remote.release()
        assert kept() is not None  # it is being read

        reading.cancel()
        await asyncio.wait([reading])
        del reading
        sides.now += KEPT_SECONDS - 1
        sides.remote.release()
        assert kept() is not None  # whoever has left may come back

        while kept() is not None:
            sides.now += 2  # it may have been looked at just before
            sides.database.dispatch("")  # as every few seconds: these looks do not keep it
            await asyncio.sleep(0.01)
            gc.collect()
        await log.append([Finished(Outcome.COMPLETED)])
        assert (await sides.remote.opened(row)).end_shown


async def test_those_who_wait_for_a_task_elsewhere_wait_as_for_one_here(tmp_path: Path) -> None:
    async with both(tmp_path) as sides:
        log, row = await sides.task()
        await log.append([Started()])
        remote = await sides.remote.opened(row)
        asked = asyncio.create_task(remote.until_stopped(log.state.seq))
        drained = asyncio.create_task(remote.until_stopped(log.state.seq + 1))
        await asyncio.sleep(0)

        await log.append([asks(1)])
        state = await asked
        sides.remote.stop_waiting()
        with pytest.raises(StreamEndedError) as ended:
            await drained

        assert (state.seq, state.status.state) == (3, State.INPUT_REQUIRED)
        assert ended.value.data["cause"] == "drained"
        _, other = await sides.task("another")
        with pytest.raises(StreamEndedError):
            await (await sides.remote.opened(other)).until_stopped(0)


def asks(number: int) -> Interrupted:
    asked = Interrupted(RequestId("per_1"), "permission", SessionId("ses_1"), permission="bash")
    return replace(asked, number=number)


async def test_what_a_reader_elsewhere_was_shown_is_told_to_the_one_who_runs_the_task(
    tmp_path: Path,
) -> None:
    async with both(tmp_path) as sides:
        heard_of = list[str]()
        sides.database.listeners.append(heard_of.append)
        log, row = await sides.task()
        await log.append([Started(), asks(1)])

        remote = await sides.remote.opened(row)
        unread = remote.seen.newest
        LogReader(remote)  # is given the task as it is
        await heard(sides.database, "then")

        assert unread == 0
        assert remote.seen.newest_in_time(time.monotonic()) == 1
        assert "t,1,task" in heard_of


async def test_readers_go_on_when_another_process_takes_the_task_over(tmp_path: Path) -> None:
    async with both(tmp_path) as sides:
        log, row = await sides.task()
        await log.append([Started()])
        remote = await sides.remote.opened(row)
        reader = LogReader(remote, Cursor(1))
        reading = asyncio.create_task(read_all(reader))
        pushed = list[Entry]()
        pushing = asyncio.create_task(pushed_all(LogReader(remote, Cursor(1)), pushed))
        # The owner shows this and dies; another one knows only what is stored.
        replay = await sides.replayed(row)
        next_owner = TaskLog(row.no, replay.state, sides.writer, sides.database)

        await next_owner.append([Recovered("taken over")])
        await next_owner.append([grew("more", opens=True), Finished(Outcome.COMPLETED)])
        await pushing

        assert seen(await reading) == seen(pushed) == seen(await sides.stored(row))[1:]
        assert reader.state.epoch == 1


@pytest.mark.parametrize("alone", [False, True])
async def test_readers_go_on_when_this_process_takes_the_task_over(
    tmp_path: Path, alone: bool
) -> None:
    async with both(tmp_path) as sides:
        log, row = await sides.task()
        await log.append([Started()])
        remote = await sides.remote.opened(row)
        reading = asyncio.create_task(read_all(LogReader(remote, Cursor(1))))
        waiting = asyncio.create_task(remote.until_stopped(0))
        await asyncio.sleep(0)
        sides.database.census = Census() if alone else stores.SHARED  # nothing is told any more
        replay = await sides.replayed(row)

        own = TaskLog(row.no, replay.state, sides.writer, sides.database)
        sides.remote.logs[own.no].taken_over(own)
        await own.append([Recovered("taken over")])
        own.append_now([grew("more", opens=True)])
        await own.append([Finished(Outcome.COMPLETED)])

        assert seen(await reading) == seen(await sides.stored(row))[1:]
        assert (await waiting).status == own.state.status


async def test_a_log_that_is_fed_by_this_process_is_not_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with both(tmp_path) as sides:
        log, row = await sides.task()
        await log.append([Started()])
        remote, read = await sides.remote.opened(row), list[int]()
        own = TaskLog(row.no, (await sides.replayed(row)).state, sides.writer, sides.database)
        sides.remote.logs[own.no].taken_over(own)
        await own.append([Recovered("taken over")])
        await own.append([asks(1)])
        assert remote.state.seq == own.state.seq

        load_tails = task_rows.load_tails

        def counted(*arguments: Any) -> list[Segment]:
            found = load_tails(*arguments)
            read.append(len(found))
            return found

        monkeypatch.setattr(task_rows, "load_tails", counted)
        while not read:
            sides.database.dispatch("")
            await asyncio.sleep(0.01)

    # Of three: the last one, if a query was quicker than the log that had just stored it.
    assert max(read) <= 1


async def test_what_is_shown_after_the_last_other_replica_is_gone_can_be_answered(
    tmp_path: Path,
) -> None:
    async with both(tmp_path) as sides:
        log, row = await sides.task()
        await log.append([Started()])
        remote = await sides.remote.opened(row)
        reading = asyncio.create_task(told(LogReader(remote, Cursor(2)), 2))
        await asyncio.sleep(0)
        sides.database.census = Census()
        replay = await sides.replayed(row)
        own = TaskLog(row.no, replay.state, sides.writer, sides.database)
        sides.remote.logs[own.no].taken_over(own)

        unread = own.seen.newest
        await own.append([Recovered("taken over"), asks(1)])
        await reading

        assert (unread, own.seen.newest) == (0, 1)


@pytest.mark.parametrize("unreadable", [(2, 2, b"{"), (3, 3, GREW)], ids=["damaged", "one lost"])
async def test_a_log_that_cannot_be_read_ends_its_readers_alone(
    tmp_path: Path, unreadable: tuple[int, int, bytes]
) -> None:
    async with both(tmp_path) as sides:
        log, row = await sides.task()
        bad, bad_row = await sides.task("bad")
        readers = [LogReader(await sides.remote.opened(one), Cursor(1)) for one in (row, bad_row)]
        good, broken = [asyncio.create_task(read_all(reader)) for reader in readers]
        await asyncio.sleep(0)
        segment = Segment(bad.no, *unreadable)
        await sides.database.write(task_rows.append, [segment], [])

        sides.database.notify(f"l,{bad.no},x,,{log.no}")
        with pytest.raises(StreamEndedError) as ended:
            await broken
        await log.append([Finished(Outcome.COMPLETED)])

        assert ended.value.data == {"cause": "moved", "task_id": "bad"}
        assert seen(await good) == seen(await sides.stored(row))[1:]


async def test_more_than_is_read_at_once_is_read_one_after_the_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote_module, "TAIL_SEGMENTS", 3)
    monkeypatch.setattr(remote_module, "LOGS", 4)
    async with both(tmp_path) as sides:
        tasks = [await sides.task(str(number)) for number in range(6)]
        readers = [LogReader(await sides.remote.opened(row), Cursor(1)) for _, row in tasks]
        reading = [asyncio.create_task(read_all(reader)) for reader in readers]
        for _ in range(5):
            sides.database.dispatch("")
            for log, _ in tasks:
                await log.append([Started()])
        for (log, _), task in reversed(list(zip(tasks, reading, strict=True))):
            sides.database.dispatch("")
            await log.append([Finished(Outcome.COMPLETED)])
            assert len(await task) == 6


async def test_what_a_later_version_wrote_shows_nothing_and_has_its_number(tmp_path: Path) -> None:
    async with both(tmp_path) as sides:
        log, row = await sides.task()
        remote = await sides.remote.opened(row)
        reading = asyncio.create_task(read_all(LogReader(remote, Cursor(1))))
        later = [
            [1, "Unheard", {"of": 1}],
            [2, "Recovered", {"reason": "x", "new": [1]}],
            [3, "Finished", {"outcome": "completed", "failure": {"new": 1}}],
            [4, "Finished", {"outcome": "completed", "failure": None, "why": None}],
        ]
        written = Segment(log.no, 2, 5, orjson.dumps(later))
        await sides.database.write(task_rows.append, [written], [])
        sides.writer.notify([log.no])
        entries = await reading

        assert [(entry.seq, entry.event) for entry in entries] == [
            (2, Unknown("Unheard")),
            (3, Recovered("x")),
            (4, Unknown("Finished")),
            (5, Finished(Outcome.COMPLETED)),
        ]
        assert V1.entry(entries[0], remote.ref) is None


async def test_a_task_that_is_seen_before_its_own_process_has_it_is_followed_on(
    tmp_path: Path,
) -> None:
    """With SQLite too, a list may find a row before whoever stored it is told so."""
    async with both(tmp_path, ConnectionOptions(), "sqlite://") as sides:
        log, row = await sides.task()
        remote = await sides.remote.opened(row)
        reading = asyncio.create_task(read_all(LogReader(remote, Cursor(1))))
        remote.taken_over(log)
        await log.append([Started()])
        await log.append([Finished(Outcome.COMPLETED)])

        assert seen(await reading) == seen(await sides.stored(row))[1:]


async def test_a_log_that_lost_what_was_read_is_read_anew(tmp_path: Path) -> None:
    """As after a failover to a server that had not got all."""
    async with both(tmp_path) as sides:
        log, row = await sides.task()
        await log.append([Started()])
        reading = asyncio.create_task(
            read_all(LogReader(await sides.remote.opened(row), Cursor(1)))
        )
        await log.append([Finished(Outcome.COMPLETED)])
        ended_before = len(await reading)
        other, other_row = await sides.task("other")
        await other.append([grew("lost", opens=True), Started()])
        readers = [LogReader(await sides.remote.opened(other_row), Cursor(1)) for _ in range(2)]
        await told(readers[0], 2)
        waiting = asyncio.create_task(readers[0].next())
        await asyncio.sleep(0)

        def lose(connection: Connection) -> None:
            connection.exec_driver_sql("DELETE FROM entries WHERE first_seq > 1")
            again = TaskState(ref_of(other_row))
            again.apply(Accepted(message("hello")), 1)
            entries = [again.apply(Recovered("failover"), 2), again.apply(Started(), 2)]
            task_rows.append(connection, [Segment(other.no, 2, 3, dump_entries(entries))], [])

        await sides.database.write(lose)
        sides.database.dispatch("")
        with pytest.raises(StreamEndedError) as ended:
            await waiting
        anew = await sides.remote.opened(other_row)

        assert ended.value.data["cause"] == "moved"
        assert (anew.state.seq, anew.state.epoch) == (3, 1)
        assert (
            await sides.remote.opened(row)
        ).end_shown  # it had ended, so that nothing can change
        assert ended_before == 2


async def test_a_notification_names_as_many_logs_as_there_is_room_for(tmp_path: Path) -> None:
    async with both(tmp_path) as sides:
        largest = [2**63 - 1 - place for place in range(1000)]
        heard_of = list[str]()
        sides.database.listeners.append(heard_of.append)

        sides.writer.notify(largest)
        await heard(sides.database, "then")

        named = [text for text in heard_of if text.startswith("l,")]
        assert [int(no) for text in named for no in text.split(",")[1:]] == largest
        assert max(map(len, named)) <= 7_900


async def test_who_is_alone_tells_and_hears_nothing(tmp_path: Path) -> None:
    async with both(tmp_path) as sides:
        heard_of = list[str]()
        sides.database.listeners.append(heard_of.append)
        sides.database.census = Census()
        log, _ = await sides.task()
        await log.append([Started()])
        sides.database.census = stores.SHARED
        await heard(sides.database, "then")

        assert set(heard_of) - {""} == {"then"}


# Behind a pooler


@pytest.mark.parametrize("real", [False, True] if PGBOUNCER else [False])
async def test_behind_a_pooler_nothing_is_prepared_and_nothing_is_left_in_a_connection(
    tmp_path: Path, real: bool
) -> None:
    server, refused = stores.server(), list[bytes]()

    def forth(data: bytes) -> None:
        """Note what a pooler in transaction mode would refuse, or what breaks behind it."""
        refused.extend(re.findall(rb"\0options\0|P.{4}_pg3_|LISTEN", data, re.DOTALL))

    direct = stores.url(tmp_path)
    schema = direct.rpartition("search_path%3D")[2]
    with server.admin() as admin:
        role, path = sql.Identifier(f"pooled_{schema}"), sql.Identifier(schema)
        admin.execute(sql.SQL("CREATE ROLE {} LOGIN PASSWORD 'x'").format(role))
        admin.execute(sql.SQL("GRANT ALL ON SCHEMA {} TO {}").format(path, role))
        admin.execute(sql.SQL("ALTER ROLE {} SET search_path = {}").format(role, path))
        admin.execute(sql.SQL("GRANT {} TO {}").format(role, sql.Identifier(ROLE)))
    name = f"pooled_{schema}"
    place = f"{name}:x@127.0.0.1:{server.port}/postgres"
    async with AsyncExitStack() as stack:
        pooler = PgBouncer(server, name, "x") if real else nullcontext(server)
        behind = stack.enter_context(pooler)
        relay = await stack.enter_async_context(Relay(behind.port, forth=forth))
        url = f"postgresql://{name}:x@127.0.0.1:{relay.port}/postgres"
        for listen_url in (None, f"postgresql://{place}"):
            poll_seconds = 0.1 if listen_url is None else FOR_EVER.poll_seconds
            options = ConnectionOptions(True, listen_url, poll_seconds)
            async with both(tmp_path, options, url) as sides:
                log, row = await sides.task(f"task {listen_url is None}")
                remote = await sides.remote.opened(row)
                reading = asyncio.create_task(read_all(LogReader(remote, Cursor(1))))
                for place_in_log in range(8):  # the driver prepares what comes for the sixth time
                    await log.append([Started(), grew("x", opens=place_in_log == 0)])
                await log.append([Finished(Outcome.COMPLETED)])
                assert seen(await reading) == seen(await sides.stored(row))[1:]

                def timeouts(connection: Connection) -> list[str]:
                    names = (name for name in TIMEOUTS if name.endswith("timeout"))
                    shown = (connection.exec_driver_sql(f"SHOW {name}").scalar() for name in names)
                    return [str(value) for value in shown]

                for ask in (sides.database.read, sides.database.write):
                    assert await ask(timeouts) == ["10s", "3s", "4s"]
            found = await asyncio.to_thread(make_engine(url, options=options).examine)
            assert ", PostgreSQL 18.4; statement_timeout 10s" in found.about

    assert refused == []
