"""The log of a task: one writer, any number of readers, nothing lost and nothing twice."""

import asyncio
import random
import uuid
import weakref
from bisect import bisect_right
from collections.abc import AsyncGenerator, Callable, Collection, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from sqlalchemy.schema import CreateTable

from opencode_a2a.clock import now_ms
from opencode_a2a.config import LimitSettings, UpstreamEntry
from opencode_a2a.errors import (
    LimitExceededError,
    StoreUnavailableError,
    StreamEndedError,
    UpstreamUnreachableError,
)
from opencode_a2a.events import (
    Finished,
    Interrupted,
    Outcome,
    Progressed,
    ReasoningGrew,
    Resolution,
    Resumed,
    SessionBound,
    Started,
    TextGrew,
    TurnEvent,
    Usage,
    UsageCounted,
)
from opencode_a2a.ids import MAIN, MessageId, Principal, RequestId, SessionId
from opencode_a2a.messages import (
    Added,
    Answered,
    Message,
    Part,
    PromptPart,
    TurnRequest,
)
from opencode_a2a.opencode.feed import Feed
from opencode_a2a.opencode.upstream import Upstream
from opencode_a2a.store import tasks as task_rows
from opencode_a2a.store.database import Database
from opencode_a2a.store.schema import tasks
from opencode_a2a.store.tasks import TaskRow
from opencode_a2a.tasks import log as live
from opencode_a2a.tasks.log import (
    ChangesInStoreError,
    LogReader,
    LogWriter,
    ReadableLog,
    Replay,
    TaskLog,
    ref_of,
    stored_changes,
)
from opencode_a2a.tasks.open import OpenTask
from opencode_a2a.tasks.outbox import Outbox
from opencode_a2a.tasks.readers import Begin, DurableReader, NewTaskReader
from opencode_a2a.tasks.sending import SendCommand
from opencode_a2a.tasks.service import TaskService
from opencode_a2a.tasks.state import TERMINAL, Cursor, Entry, Recovered, State, TaskRef, TaskState
from opencode_a2a.turns.answers import Answer, PermissionReply
from opencode_a2a.turns.errands import Errands
from opencode_a2a.turns.fleet import Fleet, Member, NotOwnerError
from opencode_a2a.turns.interrupts import SharedInterrupts
from opencode_a2a.turns.sessions import SessionRights
from opencode_a2a.turns.turn import SharedTurns
from tests.support import stores

pytestmark = pytest.mark.both_databases(stores.OLDER)


def order(message_id: str, text: str = "hello", principal: str = "alice") -> SendCommand:
    message = Message(message_id, "user", [Part("text", text=text)])
    return SendCommand(Principal(principal), message, TurnRequest((PromptPart(text=text),)))


class Office:
    """A store with a writer, and tasks in it."""

    def __init__(self, database: Database, limits: LimitSettings) -> None:
        self.database = database
        self.readers: list[DurableReader] = []
        self.writer = LogWriter(database)
        # No task is started, so that no turns are needed; nor are webhooks.
        entry, behind = UpstreamEntry(name=MAIN, managed=1), Upstream("", "", None)
        errands = Errands(
            database,
            Feed.__new__(Feed),
            SharedInterrupts.__new__(SharedInterrupts),
            SessionRights.__new__(SessionRights),
        )
        self.member = Member(entry, behind, lambda: (SharedTurns.__new__(SharedTurns), errands))
        self.member.owned = True
        fleet = Fleet([self.member], database, 0)
        outbox = Outbox.__new__(Outbox)
        self.tasks = TaskService(database, self.writer, fleet, limits, outbox, self.readers)

    async def admit(self, command: SendCommand) -> OpenTask | TaskRow:
        return await self.tasks.sending.admit(command, self.member)

    async def task(self, message_id: str = "m1") -> TaskLog:
        task = await self.admit(order(message_id))
        assert isinstance(task, OpenTask)
        return task.log

    async def stored(self, log: TaskLog) -> list[Entry]:
        replay, entries = Replay(self.database, log.no, log.ref), list[Entry]()
        while more := await replay.next(replay.state.seq):
            entries += more
        return entries


@asynccontextmanager
async def office(
    state: Path | None = None, limits: LimitSettings | None = None
) -> AsyncGenerator[Office]:
    """Open a store in a directory, or one for this once."""
    if state is None and stores.postgresql():
        state = Path(uuid.uuid4().hex)
    async with Database("sqlite://" if state is None else stores.url(state)) as database:
        desk = Office(database, limits or LimitSettings())
        writing = asyncio.create_task(desk.writer.run())
        try:
            yield desk
        finally:
            writing.cancel()
            await asyncio.wait([writing])


def grew(text: str, *, opens: bool = False) -> TextGrew:
    return TextGrew(MessageId("msg_1"), "prt_1", text, opens)


async def read_all(reader: LogReader) -> list[Entry]:
    entries: list[Entry] = []
    while batch := await reader.next():
        entries += batch
    return entries


def seen(entries: list[Entry]) -> list[tuple[int, object, object]]:
    return [(entry.seq, entry.event, entry.status) for entry in entries]


@pytest.mark.requirement("I4")
@given(
    texts=st.lists(st.text("ab ", min_size=1, max_size=3), max_size=40),
    taps=st.lists(st.integers(0, 40), min_size=1, max_size=4),
    seed=st.integers(0, 2**32),
)
@settings(max_examples=25, suppress_health_check=[HealthCheck.too_slow])
def test_every_reader_sees_the_log_whenever_it_comes_and_however_often_it_leaves(
    texts: list[str], taps: list[int], seed: int
) -> None:
    """Readers leave after any batch and resume with their last number; the tail is short."""
    tail, live.TAIL = live.TAIL, 3
    try:
        asyncio.run(read_and_write(texts, taps, seed))
    finally:
        live.TAIL = tail


async def read_and_write(texts: list[str], taps: list[int], seed: int) -> None:
    async with office() as desk:
        log = await desk.task()
        starts = [asyncio.Event() for _ in taps]
        async with asyncio.timeout(60), asyncio.TaskGroup() as group:
            readers = [
                group.create_task(restless(log, start, random.Random(seed + place)))  # noqa: S311
                for place, start in enumerate(starts)
            ]
            for place, text in enumerate(texts):
                for start in (s for s, reader in zip(starts, taps, strict=True) if reader <= place):
                    start.set()
                event = grew(text) if place % 7 else Progressed("step-start", str(place))
                await log.append([event] if place % 5 else [Started(), event])
            await log.append([Finished(Outcome.COMPLETED)])
            for start in starts:
                start.set()
        stored = seen(await desk.stored(log))
        assert [seq for seq, *_ in stored] == list(range(1, len(stored) + 1))
        for task in readers:
            assert seen(task.result()) == stored[1:]


async def stored_task(log: ReadableLog) -> TaskState:
    return await Replay(log.database, log.no, log.ref).all()


async def restless(log: TaskLog, start: asyncio.Event, patience: random.Random) -> list[Entry]:
    """Read the log, leaving and coming back at random, and not always ready to take what is new."""
    await start.wait()
    entries: list[Entry] = []

    def push(new: list[Entry]) -> bool:
        ready = patience.random() < 0.7
        entries.extend(new if ready else ())
        return ready

    while True:
        reader = LogReader(log, Cursor(entries[-1].seq if entries else 1))
        while batch := await reader.next(push):
            entries += batch
            if patience.random() < 0.3:
                break
        else:
            return entries


async def test_a_reader_far_behind_goes_back_to_the_store() -> None:
    async with office() as desk, asyncio.timeout(60):
        log = await desk.task()
        reader = LogReader(log, Cursor(1))
        for place in range(live.TAIL * 3):
            await log.append([grew(str(place), opens=place == 0)])
        await log.append([Finished(Outcome.COMPLETED)])

        entries = await read_all(reader)

        assert log.after(1) is None  # the tail does not reach back so far
        assert seen(entries) == seen(await desk.stored(log))[1:]


async def test_text_is_told_at_once_and_a_state_only_when_stored(tmp_path: Path) -> None:
    async with office(tmp_path) as desk, asyncio.timeout(60):
        log = await desk.task()
        await log.append([grew("now", opens=True)])
        assert [entry.event for entry in log.after(1) or []] == [grew("now", opens=True)]

        ended = asyncio.create_task(log.append([Finished(Outcome.COMPLETED)]))
        await asyncio.sleep(0)
        told_early = log.end_shown
        await ended

        assert not told_early
        assert log.end_shown
        assert len(await desk.stored(log)) == 3


async def test_a_session_is_told_with_its_link_stored_and_a_title_at_once() -> None:
    async with office() as desk, asyncio.timeout(60):
        log = await desk.task()
        bound = SessionBound(SessionId("ses_1"))
        titled = replace(bound, title="Named")
        told = asyncio.create_task(log.append([bound], lambda _: None))
        await asyncio.sleep(0)
        shown_early = log.after(1)
        await told
        log.append_now([titled])

        assert shown_early == []
        assert [entry.event for entry in log.after(1) or []] == [bound, titled]


async def test_an_answer_is_stored_before_it_is_relied_on() -> None:
    async with office() as desk, asyncio.timeout(60):
        log = await desk.task()
        answer = Answered(order("m2", "yes").message)
        told = asyncio.create_task(log.append([answer]))
        await asyncio.sleep(0)
        shown_early = log.after(1)
        await told

        assert shown_early == []
        assert [entry.event for entry in await desk.stored(log)][1:] == [answer]


async def test_a_blocking_reader_waits_for_the_next_stop() -> None:
    async with office() as desk, asyncio.timeout(60):
        log = await desk.task()
        waiting = asyncio.create_task(log.until_stopped(0))
        await log.append([Started(), grew("x", opens=True)])
        assert not waiting.done()
        await log.append([Finished(Outcome.FAILED)])

        assert (await waiting).status.state is State.FAILED


async def test_progress_while_a_person_is_waited_for_is_no_further_stop() -> None:
    asked = Interrupted(RequestId("per_1"), "permission", SessionId("ses_1"))
    async with office() as desk, asyncio.timeout(20):
        log = await desk.task()
        await log.append([Started(), asked])
        answered = asyncio.create_task(log.until_stopped(log.state.seq))
        await log.append([Progressed("step-start", "1")])
        await log.append([SessionBound(SessionId("ses_1"), title="Named")])
        waits = not log.stopped(3)
        await log.append([Resumed(asked.request_id, "permission", "once")])
        await log.append([Finished(Outcome.COMPLETED)])

        assert waits
        assert (await answered).status.state is State.COMPLETED


async def test_who_waits_for_a_change_is_woken_when_the_log_ends_or_moves() -> None:
    async with office() as desk, asyncio.timeout(20):
        moving, ending = await desk.task("m1"), await desk.task("m2")
        for log in (moving, ending):
            await log.append([Started()])
        waiting = asyncio.create_task(moving.next_change(2))
        await asyncio.sleep(0)
        moving.move()
        with pytest.raises(StreamEndedError) as moved:
            await waiting
        await ending.append([grew("x", opens=True), Finished(Outcome.COMPLETED)])
        ended = [await ending.next_change(seq) for seq in (2, 4)]

        assert moved.value.data["cause"] == "moved"
        assert [entry and entry.seq for entry in ended] == [4, None]


async def test_a_request_counts_as_seen_when_the_reader_has_taken_it() -> None:
    async with office() as desk, asyncio.timeout(20):
        log = await desk.task()
        asked = Interrupted(RequestId("per_1"), "permission", SessionId("ses_1"), number=1)
        when_refused: list[int] = []

        def refuse(_: list[Entry]) -> bool:
            when_refused.append(log.seen_number)
            return False

        reader = LogReader(log)
        reading = asyncio.create_task(reader.next(refuse))
        await asyncio.sleep(0)
        await log.append([Started(), asked])
        entries = await reading

        assert when_refused == [0]
        assert [entry.event for entry in entries] == [Started(), asked]
        assert log.seen_number == 1


async def test_readers_of_stored_entries_end_with_the_others() -> None:
    async with office() as desk, asyncio.timeout(20):
        log = await desk.task()
        readings = [
            asyncio.create_task(LogReader(log, stored_only=stored_only).next())
            for stored_only in (False, True)
        ]
        await asyncio.sleep(0)
        log.end_reading()

        for reading in readings:
            with pytest.raises(StreamEndedError):
                await reading


async def test_a_later_end_changes_nothing() -> None:
    async with office() as desk, asyncio.timeout(60):
        log = await desk.task()
        assert await log.append([Finished(Outcome.CANCELED)])
        assert not await log.append([Finished(Outcome.COMPLETED)])

        assert log.state.status.state is State.CANCELED


async def test_a_store_that_is_away_delays_and_loses_nothing(tmp_path: Path) -> None:
    async with office(tmp_path) as desk, asyncio.timeout(60):
        log = await desk.task()

        def break_it(connection: sa.Connection) -> None:
            connection.execute(sa.text("ALTER TABLE entries RENAME TO hidden"))

        def mend_it(connection: sa.Connection) -> None:
            connection.execute(sa.text("ALTER TABLE hidden RENAME TO entries"))

        await desk.database.write(break_it)
        ending = asyncio.create_task(log.append([grew("kept", opens=True), Started()]))
        await asyncio.wait([ending], timeout=0.3)
        assert not ending.done()
        assert log.after(1) == []
        await desk.database.write(mend_it)
        await ending

        assert [entry.event for entry in await desk.stored(log)][1:] == [
            grew("kept", opens=True),
            Started(),
        ]


@pytest.mark.requirement("I6")
async def test_one_message_id_is_one_task() -> None:
    async with office() as desk, asyncio.timeout(60):
        outcomes = await asyncio.gather(*(desk.admit(order("m")) for _ in range(8)))

        rows = [outcome for outcome in outcomes if isinstance(outcome, TaskRow)]
        [task] = [outcome for outcome in outcomes if isinstance(outcome, OpenTask)]
        assert [row.id for row in rows] == [task.log.ref.id] * 7


async def test_the_same_message_id_with_other_content_is_a_new_message() -> None:
    async with office() as desk, asyncio.timeout(60):
        first = await desk.admit(order("m", "one"))
        second = await desk.admit(order("m", "two"))

        assert isinstance(first, OpenTask)
        assert isinstance(second, OpenTask)


async def test_another_principal_may_use_the_same_message_id() -> None:
    async with office() as desk, asyncio.timeout(60):
        first = await desk.admit(order("m"))
        second = await desk.admit(order("m", principal="bob"))

        assert isinstance(first, OpenTask)
        assert isinstance(second, OpenTask)


async def test_too_many_open_tasks_are_refused_but_a_repeat_is_not() -> None:
    limits = LimitSettings(max_tasks_per_principal=1, max_open_tasks=10)
    async with office(limits=limits) as desk, asyncio.timeout(60):
        first = await desk.admit(order("m1"))
        assert isinstance(first, OpenTask)

        with pytest.raises(LimitExceededError):
            await desk.admit(order("m2"))
        assert isinstance(await desk.admit(order("m1")), TaskRow)

        await first.cancel()
        assert isinstance(await desk.admit(order("m2")), OpenTask)


# --- what A2A 1.1 will number -----------------------------------------------------------------


class MortalWriter(LogWriter):
    """A writer that a crash can end."""

    async def die(self) -> None:
        """Lose what waits to be stored; what is on its way is stored."""
        self._waiting.clear()
        await self.commit()


@given(
    lives=st.lists(
        st.lists(
            st.tuples(st.sampled_from(["text", "reasoning", "step", "usage"]), st.booleans()),
            max_size=12,
        ),
        min_size=1,
        max_size=4,
    ),
    plain=st.booleans(),
)
@settings(max_examples=40, suppress_health_check=[HealthCheck.too_slow])
@example(lives=[[("text", True), ("text", False)], [("text", False), ("text", True)]], plain=False)
def test_the_generations_that_a_reader_of_stored_entries_gets_neither_repeat_nor_skip(
    lives: list[list[tuple[str, bool]]], plain: bool
) -> None:
    """Each life of the service ends in a crash; what it had not stored is lost."""
    asyncio.run(die_and_go_on(lives, plain=plain))


async def die_and_go_on(lives: list[list[tuple[str, bool]]], *, plain: bool) -> None:
    modes = ("text/plain",) if plain else None
    told: list[Entry] = []
    async with office() as desk, asyncio.timeout(60):
        first = log = await desk.task()
        ref = replace(first.ref, output_modes=modes)
        for life in lives:
            # As ``recover`` does it.
            replay = Replay(desk.database, first.no, ref)
            while await replay.next(replay.state.seq):
                pass
            writer = MortalWriter(desk.database)
            log = TaskLog(first.no, replay.state, writer, desk.database)
            last = told[-1].seq if told else 1
            cursor = Cursor(last, bisect_right(log.state.epochs, last))
            await log.append([Recovered("restart")])
            reader = LogReader(log, cursor, stored_only=True)
            assert not reader.resync
            reading = asyncio.create_task(read_on(reader, told))
            for number, (kind, stored) in enumerate(life):
                await log.append([happening(kind, number)])
                if stored:
                    await writer.commit()
            await writer.die()
            reading.cancel()
            await asyncio.wait([reading])
        log = TaskLog(first.no, await stored_task(log), LogWriter(desk.database), desk.database)
        await log.append([Finished(Outcome.COMPLETED)])
        last = told[-1].seq
        reader = LogReader(
            log, Cursor(last, bisect_right(log.state.epochs, last)), stored_only=True
        )
        await read_on(reader, told)

    numbers = [entry.generation for entry in told if ref.visible(entry.event)]
    assert numbers == list(range(2, len(numbers) + 2))
    assert log.state.generation == numbers[-1]


async def read_on(reader: LogReader, told: list[Entry]) -> None:
    while entries := await reader.next():
        told += entries


def happening(kind: str, number: int) -> TurnEvent:
    match kind:
        case "text":
            return grew(f"{number} ")
        case "reasoning":
            return ReasoningGrew(MessageId("msg_1"), "prt_0", "hm")
        case "usage":
            return UsageCounted(Usage(number))
        case _:
            return Progressed("step-start", str(number))


async def test_a_reader_of_shown_entries_may_get_one_that_a_crash_takes_back() -> None:
    async with office() as desk, asyncio.timeout(60):
        first = await desk.task()
        writer = MortalWriter(desk.database)
        log = TaskLog(first.no, await stored_task(first), writer, desk.database)
        eager, careful = LogReader(log), LogReader(log, stored_only=True)
        waits = asyncio.create_task(careful.next())

        await log.append([grew("told ", opens=True)])
        seen = await eager.next()
        assert not waits.done()
        await writer.die()

        assert [entry.generation for entry in seen] == [2]
        assert (await stored_task(log)).generation == 1
        waits.cancel()
        await asyncio.wait([waits])


@pytest.mark.parametrize(("resolution", "told"), [("once", 2), ("expired", 0), ("void", 0)])
async def test_what_followed_a_request_that_nobody_answered_is_shown_again_after_a_restart(
    tmp_path: Path, resolution: Resolution, told: int
) -> None:
    def asked(number: int) -> Interrupted:
        return Interrupted(
            RequestId(f"per_{number}"), "permission", SessionId("ses_1"), number=number
        )

    async with office(tmp_path) as it:
        log = await it.task()
        first, second = asked(1), asked(2)
        await log.append([Started(), first])
        await log.append([Resumed(first.request_id, "permission", resolution, "alice"), second])
        again = TaskLog(log.no, log.state, it.writer, it.database)
        again.seen.recover()

        assert again.seen_number == told  # else a late "yes" would approve what nobody was shown


async def test_what_comes_for_a_task_that_is_left_to_another_replica_is_for_that_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with office() as desk:
        task, other = [await desk.admit(order(one)) for one in ("m1", "m2")]
        assert isinstance(task, OpenTask)
        assert isinstance(other, OpenTask)
        await task.log.append([Started()])
        left, going, commit = asyncio.Event(), asyncio.Event(), desk.writer.commit

        async def store() -> None:
            left.set()
            await going.wait()
            await commit()

        def first() -> asyncio.Future[None]:
            monkeypatch.setattr(desk.writer, "commit", commit)
            return asyncio.ensure_future(store())

        async def ask(upstream: str, *_: object, **__: object) -> bytes:
            raise UpstreamUnreachableError(upstream)

        monkeypatch.setattr(desk.writer, "commit", first)
        monkeypatch.setattr(desk.tasks.mailbox, "ask", ask)
        desk.member.owned = False
        giving_up = asyncio.create_task(desk.tasks.open.give_up(desk.member))
        await left.wait()
        await other.end(Finished(Outcome.COMPLETED))  # in the last moment
        more = order("m3")
        for stage in ("before it is stored", "afterwards"):
            yes = Answer(PermissionReply("once"), Principal("alice"), more.message)
            for late in (
                task.cancel(),
                task.answer(["per_1"], yes, lambda _: None),
                task.add(Added(more.message, more.request), lambda _: None),
                task.resume(more.message, more.request, lambda _: None, None),
                task.repeat(more.message),
            ):
                with pytest.raises(NotOwnerError):
                    await late
            with pytest.raises(UpstreamUnreachableError, match=MAIN):
                await desk.tasks.submit(replace(more, task_id=task.log.ref.id))
            going.set()
            await giving_up
            assert desk.tasks.open.all() == [], stage

        assert (await stored_task(task.log)).status.state is State.WORKING
        assert (await stored_task(other.log)).status.state is State.COMPLETED


LISTED = sa.Table(
    "listed",
    sa.MetaData(),
    sa.Column("task_no", sa.BigInteger, primary_key=True),
    sa.Column("place", sa.Integer, nullable=False),
    sa.Column("states", sa.String, nullable=False),
    sa.Column("ended", sa.Boolean, nullable=False),
)
"""The places of a ``StateList``; in the service its declaration would be in ``store/schema.py``."""


class StateList(NewTaskReader):
    """A durable reader beside the webhooks: it lists the states that each task goes through."""

    def __init__(self, database: Database, most: int = 10) -> None:
        self._database = database
        self._most = most
        self.following: dict[int, asyncio.Task[None]] = {}
        """By task number."""

    def admit(self, connection: sa.Connection, task_no: int, ref: TaskRef) -> Begin:
        if (connection.scalar(sa.select(sa.func.count()).select_from(LISTED)) or 0) >= self._most:
            raise LimitExceededError
        new = {"task_no": task_no, "place": 0, "states": "", "ended": False}
        connection.execute(LISTED.insert().values(new))
        return lambda log: self._begin(task_no, ref, 0, log)

    async def recover(
        self, logs: Mapping[int, ReadableLog], upstreams: Collection[str] | None
    ) -> None:
        for row, place in await self._database.read(self._unended, upstreams):
            if row.no not in self.following:
                self._begin(row.no, ref_of(row), place, logs.get(row.no))

    async def give_up(self, upstream: str) -> None:
        # Without a time limit: no other replica may continue before these have stopped.
        left = await self._database.read_until_available(self._unended, [upstream])
        await self._stop([row.no for row, _ in left])

    def unread(self) -> sa.ColumnElement[bool]:
        mine = sa.exists().where(LISTED.c.task_no == tasks.c.no, ~LISTED.c.ended)
        return mine.correlate(tasks)

    async def close(self) -> None:
        await self._stop(list(self.following))

    def _unended(
        self, connection: sa.Connection, upstreams: Collection[str] | None
    ) -> list[tuple[TaskRow, int]]:
        rows = connection.execute(sa.select(LISTED).where(~LISTED.c.ended)).all()
        found = [(task_rows.load_by_number(connection, row.task_no), row.place) for row in rows]
        return [
            (row, place)
            for row, place in found
            if row is not None and (upstreams is None or row.upstream in upstreams)
        ]

    async def _stop(self, numbers: Sequence[int]) -> None:
        stopping = [self.following[no] for no in numbers if no in self.following]
        for following in stopping:
            following.cancel()
        await asyncio.gather(*stopping, return_exceptions=True)

    def _begin(self, no: int, ref: TaskRef, place: int, log: ReadableLog | None) -> None:
        # A log holds the whole task: a reader that is behind does not keep it in memory.
        find = (lambda: None) if log is None else weakref.ref(log)
        following = asyncio.create_task(self._follow(no, ref, place, find))
        self.following[no] = following
        following.add_done_callback(lambda _: self.following.pop(no, None))

    async def _follow(
        self, no: int, ref: TaskRef, place: int, find: Callable[[], ReadableLog | None]
    ) -> None:
        ended = False
        while not ended:
            log, changes = find(), list[Entry]()
            try:
                with suppress(ChangesInStoreError):
                    if log is not None and (entry := await log.next_change(place)):
                        changes = [entry]
                if log is None:
                    row = await self._database.read(task_rows.load_by_number, no)
                    if row is None or row.state not in TERMINAL:  # deleted, or given up here
                        return
                del log
                changes = changes or await stored_changes(self._database, no, ref, place)
            except StreamEndedError:  # the log has moved: another replica continues
                return
            except StoreUnavailableError:
                await asyncio.sleep(0.01)  # in the service, longer with each failure
                continue
            new = [one.status.state for one in changes if one.status is not None]
            ended = not changes or new[-1].terminal
            place = changes[-1].seq if changes else place
            more = "".join(f"{state} " for state in new)
            values = {"place": place, "states": LISTED.c.states + more, "ended": ended}
            update = LISTED.update().where(LISTED.c.task_no == no).values(values)
            # States and place in one transaction: a crash neither loses nor repeats a state.
            await self._database.write_until_stored(sa.Connection.execute, update)


@asynccontextmanager
async def listing(state: Path, most: int = 10) -> AsyncGenerator[tuple[Office, StateList]]:
    """Run a service with a ``StateList``, which its orderly end closes."""
    async with office(state) as desk:
        if not await desk.database.read(lambda c: sa.inspect(c).has_table(LISTED.name)):
            await desk.database.write(lambda c: c.execute(CreateTable(LISTED)))
        listed = StateList(desk.database, most)
        desk.readers.append(listed)
        try:
            yield desk, listed
        finally:
            await listed.close()


async def listed_states(desk: Office) -> dict[int, list[str]]:
    query = sa.select(LISTED.c.task_no, LISTED.c.states)
    rows = await desk.database.read(lambda c: c.execute(query).all())
    return {no: states.split() for no, states in rows}


async def test_another_durable_reader_follows_new_tasks_to_their_end_or_until_they_move(
    tmp_path: Path,
) -> None:
    async with listing(tmp_path, most=2) as (desk, listed), asyncio.timeout(60):
        ending, moving = await desk.task("m1"), await desk.task("m2")
        with pytest.raises(LimitExceededError):
            await desk.admit(order("m3"))
        following = [*listed.following.values()]
        for log in (ending, moving):
            await log.append([Started()])
        await ending.append([Finished(Outcome.COMPLETED)])
        await following[0]
        while not (await listed_states(desk))[moving.no]:
            pass
        await desk.tasks.open.give_up(desk.member)
        await following[1]  # its log has moved
        await listed.recover({}, [MAIN])  # as if it had not waited in the log at that moment
        await asyncio.gather(*listed.following.values())
        unended = sa.select(LISTED.c.task_no).where(~LISTED.c.ended)
        assert await desk.database.read(sa.Connection.scalar, unended) == moving.no

        assert await listed_states(desk) == {
            ending.no: ["working", "completed"],
            moving.no: ["working"],
        }


async def test_a_durable_reader_goes_on_after_a_restart_and_after_a_take_over(
    tmp_path: Path,
) -> None:
    many = [one for no in range(40) for one in asked_and_answered(no)]

    def sweep(connection: sa.Connection, reader: DurableReader) -> int:
        long_after = now_ms() + 1000
        return task_rows.forget_logs(connection, [*TERMINAL], long_after, 9, [reader.unread()])

    async with listing(tmp_path) as (desk, listed), asyncio.timeout(60):
        first = [await desk.task(f"m{no}") for no in range(3)]
        busy, ended, waiting = first
        for log in first:
            await log.append([Started()])
        await listed.close()
        # What nobody reads any more: a task that ends, and more changes than a log remembers.
        await busy.append(many)
        await ended.append([Finished(Outcome.CANCELED)])
        assert await desk.database.write(sweep, listed) == 0

    async with listing(tmp_path) as (desk, listed), asyncio.timeout(60):
        logs = {
            log.no: TaskLog(log.no, log.state, desk.writer, desk.database)
            for log in (busy, waiting)  # as ``recover`` makes them of open tasks
        }
        await listed.recover(logs, None)
        await listed.following[ended.no]
        assert await desk.database.write(sweep, listed) == 1
        await listed.give_up("another")
        assert set(listed.following) == {busy.no, waiting.no}
        await listed.give_up(MAIN)
        assert listed.following == {}

        successor = StateList(desk.database)
        await successor.recover(logs, [MAIN])
        following = [*successor.following.values()]
        for log in logs.values():
            await log.append([Finished(Outcome.COMPLETED)])
        await asyncio.gather(*following)

        assert await listed_states(desk) == {
            busy.no: ["working", *["input_required", "working"] * 40, "completed"],
            ended.no: ["working", "canceled"],
            waiting.no: ["working", "completed"],
        }


async def test_a_durable_reader_outlives_an_outage_of_the_database(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with listing(tmp_path) as (desk, listed), asyncio.timeout(60):
        log, read, outages = await desk.task("m1"), desk.database.read, iter(range(2))
        await listed.close()
        await log.append([Started(), Finished(Outcome.COMPLETED)])

        async def away(*asked: Any) -> Any:
            if next(outages, None) is not None:
                raise StoreUnavailableError(operation="reading")
            return await read(*asked)

        await listed.recover({}, None)
        monkeypatch.setattr(desk.database, "read", away)
        await listed.following[log.no]

        assert await listed_states(desk) == {log.no: ["working", "completed"]}


def asked_and_answered(no: int) -> tuple[Interrupted, Resumed]:
    asked = Interrupted(RequestId(f"per_{no}"), "permission", SessionId("ses_1"), number=no)
    return asked, Resumed(asked.request_id, "permission", "once")
