"""The log of a task: one writer, any number of readers, nothing lost and nothing twice."""

import asyncio
import random
import time
import uuid
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import orjson
import pytest
import sqlalchemy as sa
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from opencode_a2a.a2a import render
from opencode_a2a.a2a.encoding import V1
from opencode_a2a.clock import Lease
from opencode_a2a.cluster.fleet import Fleet, Member, MovedError
from opencode_a2a.config import LimitSettings, PushSettings, UpstreamEntry
from opencode_a2a.errors import (
    LimitExceededError,
    TaskUnreadableError,
    UpstreamUnreachableError,
)
from opencode_a2a.events import (
    DiffChanged,
    Finished,
    Interrupted,
    Outcome,
    Progressed,
    Resolution,
    ResultGiven,
    Resumed,
    SessionBound,
    Started,
    TextGrew,
    ToolChanged,
)
from opencode_a2a.ids import MAIN, MessageId, Principal, RequestId, SessionId
from opencode_a2a.log import log as live
from opencode_a2a.log.log import LogReader, LogWriter, ReadableLog, TaskLog
from opencode_a2a.log.seen import SETTLED_SECONDS, UNREAD_SECONDS
from opencode_a2a.log.state import (
    BATCH_BYTES,
    Cursor,
    Entry,
    LogEvent,
    State,
    TaskState,
    dump_entries,
)
from opencode_a2a.log.stored import Replay
from opencode_a2a.messages import (
    Answered,
    Message,
    Part,
    PromptPart,
    TurnRequest,
)
from opencode_a2a.opencode.client import OpenCode1
from opencode_a2a.opencode.feed import Feed
from opencode_a2a.opencode.upstream import OpenCodeServer
from opencode_a2a.server.operations import Events, TaskStream
from opencode_a2a.store.database import Database
from opencode_a2a.store.schema import entries, tasks
from opencode_a2a.store.tasks import TaskRow, load_segments
from opencode_a2a.tasks.command import SendCommand
from opencode_a2a.tasks.open import OpenTask
from opencode_a2a.tasks.service import TaskService
from opencode_a2a.tasks.webhooks import Webhooks
from opencode_a2a.turns.errands import Errands
from opencode_a2a.turns.job import SharedTurns
from opencode_a2a.turns.sessions import SessionRights, Sessions, WorkspaceRoot
from opencode_a2a.turns.shared_interrupts import SharedInterrupts
from tests.support import stores

pytestmark = pytest.mark.both_databases(stores.OLDER)


def order(message_id: str, text: str = "hello", principal: str = "alice") -> SendCommand:
    message = Message(message_id, "user", [Part("text", text=text)])
    request = TurnRequest((PromptPart(text=text),), MessageId("msg_1"))
    return SendCommand(Principal(principal), message, request)


class Office:
    """A store with a writer, and tasks in it."""

    def __init__(self, database: Database, limits: LimitSettings) -> None:
        self.database = database
        self.writer = LogWriter(database)
        # No task is started, so that no turns are needed.
        entry, behind = UpstreamEntry(name=MAIN, managed=1), OpenCodeServer("", "", None)
        errands = Errands(
            database,
            Feed.__new__(Feed),
            SharedInterrupts.__new__(SharedInterrupts),
            SessionRights.__new__(SessionRights),
        )
        # Where a context runs is found by its directory.
        turns, root = SharedTurns.__new__(SharedTurns), WorkspaceRoot(None, allow_override=False)
        turns.sessions = Sessions(database, OpenCode1.__new__(OpenCode1), root, 30, MAIN)
        self.member = Member(entry, behind, lambda: (turns, errands))
        self.member.owned = True
        fleet = Fleet([self.member], database, 0)
        webhooks = Webhooks(database, PushSettings())
        self.tasks = TaskService(database, self.writer, fleet, limits, webhooks)

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


class Watch:
    """An observer that keeps what it is shown."""

    def __init__(self) -> None:
        self.noted: list[str] = []

    def note(self, log: TaskLog, entries: Sequence[Entry]) -> None:
        self.noted += (type(entry.event).__name__ for entry in entries)

    def trace(self, log: TaskLog) -> None:
        return None

    def left(self, log: TaskLog) -> None:
        self.noted.append("left")


async def test_an_observer_is_not_called_for_growing_text() -> None:
    async with office() as desk:
        desk.writer.observer = watch = Watch()
        log = await desk.task()
        await log.append([Started()])
        await log.append([grew("a", opens=True)])
        for _ in range(10_000):
            log.append_now([grew("a")])
        await log.append([Finished(Outcome.COMPLETED)])

    assert watch.noted == ["Started", "TextGrew", "Finished"]


@pytest.mark.both_databases
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


async def test_a_binding_may_read_a_stream_without_being_woken_for_each_piece_of_text() -> None:
    async with office() as desk, asyncio.timeout(60):
        log = await desk.task()
        stream = TaskStream(LogReader(log), render.task_event(log.state))
        batches: list[Events] = [await stream.next(V1)]
        waiting = asyncio.create_task(stream.next(V1))
        await asyncio.sleep(0)  # it waits now
        log.append_now([grew("Hel", opens=True)])
        for text in ("l", "o"):
            log.append_now([grew(text)])
        batches.append(await waiting)
        await log.append([Finished(Outcome.COMPLETED)])
        while events := await stream.next(V1):
            batches.append(events)

        assert [[cursor for cursor, _ in events] for events in batches] == [
            [b"1"],
            [b"2", b"3", b"4"],
            [b"5"],
        ]
        assert [list(orjson.loads(body)) for events in batches for _, body in events] == [
            ["task"],
            ["artifactUpdate"],
            ["artifactUpdate"],
            ["artifactUpdate"],
            ["statusUpdate"],
        ]


@pytest.mark.requirement("I8")
async def test_a_reader_is_given_large_texts_a_few_at_a_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(live, "TAIL", 70)
    piece = live.PIECE
    async with office() as desk:
        log = await desk.task()
        for _ in range(40):
            await log.append([grew("x" * piece), Started()])
        near = LogReader(log, Cursor(log.state.seq - 60))
        far = LogReader(log, Cursor(1))
        assert log.after(1) is None  # it is no longer in memory

        for reader, wanted in ((near, 30), (far, 40)):
            batches: list[int] = []
            while sum(batches) < wanted * piece:
                texts = [e.event.text for e in await reader.next() if isinstance(e.event, TextGrew)]
                batches.append(sum(map(len, texts)))
            assert sum(batches) == wanted * piece
            assert max(batches) <= BATCH_BYTES + 8 * piece


@pytest.mark.requirement("I8")
async def test_events_are_read_and_stored_a_few_at_a_time_whatever_is_large_in_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(live, "TAIL", 1000)
    large = "x" * live.PIECE
    tool = ToolChanged(MessageId("msg_1"), "prt_1", "call_1", "write", "running")
    asked = Interrupted(RequestId("per_1"), "permission", SessionId("ses_1"))
    events: list[LogEvent] = [
        replace(tool, input={"content": large}),
        replace(tool, metadata={"diff": large}),
        DiffChanged([], large),
        ResultGiven({"rows": [large]}),
        Progressed("todo", "updated", todos=[{"content": large}]),
        Answered(order("m2", large).message),
        replace(asked, metadata={"diff": large}),
    ]

    async with office() as desk, asyncio.timeout(60):
        log = await desk.task()
        await log.append([event for event in events for _ in range(20)])
        reader, read = LogReader(log, Cursor(1)), list[list[Entry]]()
        while sum(map(len, read)) < 20 * len(events):
            read.append(await reader.next())
        stored = await desk.database.read(load_segments, log.no, 2, 1000)

    assert max(len(dump_entries(entries)) for entries in read) < 2 * BATCH_BYTES
    assert max(len(segment.data) for segment in stored) < 2 * BATCH_BYTES


@pytest.mark.requirement("I8")
@pytest.mark.parametrize("reads", [True, False], ids=["reads", "does not read"])
async def test_one_huge_text_is_written_in_pieces(reads: bool) -> None:
    huge, offered = "0123456789" * 200_000, list[list[Entry]]()

    def write(entries: list[Entry]) -> bool:
        offered.append(entries)
        return reads

    async with office() as desk, asyncio.timeout(60):
        log = await desk.task()
        reader = LogReader(log, Cursor(log.state.seq))
        waiting = asyncio.create_task(reader.next(write))
        await asyncio.sleep(0)  # it waits now
        await log.append([replace(grew(huge, opens=True), ends_at="evt_1")])
        await log.append([Finished(Outcome.COMPLETED)])
        returned = [await waiting]
        while batch := await reader.next(write):
            returned.append(batch)
        replay, stored = Replay(desk.database, log.no, log.ref), list[int]()
        while batch := await replay.next(0):
            texts = [one.event.text for one in batch if isinstance(one.event, TextGrew)]
            stored.append(sum(map(len, texts)))

    batches = [
        [entry.event for entry in batch if isinstance(entry.event, TextGrew)]
        for batch in (*(offered if reads else ()), *returned)
    ]
    grown = [event for batch in batches for event in batch]
    assert "".join(event.text for event in grown) == huge
    assert [event.opens for event in grown] == [True] + [False] * (len(grown) - 1)
    assert [event.ends_at for event in grown] == [""] * (len(grown) - 1) + ["evt_1"]
    most = max(sum(len(event.text) for event in batch) for batch in batches)
    assert most < 2 * BATCH_BYTES
    assert sum(stored) == len(huge)
    assert max(stored[1:]) < 2 * BATCH_BYTES  # how large they are is known with the first
    assert max(map(len, offered), default=0) < len(grown)


async def test_a_log_that_lacks_a_row_cannot_be_read() -> None:
    async with office() as desk, asyncio.timeout(60):
        log = await desk.task()
        for part in range(4):
            log.append_now([grew(str(part), opens=part == 0)])
            await log.append([Started()])  # stores it
        lost = entries.delete().where(entries.c.task_no == log.no, entries.c.first_seq == 4)
        await desk.database.write(lambda connection: connection.execute(lost))

        with pytest.raises(TaskUnreadableError):
            await desk.stored(log)


async def test_without_the_lease_nothing_is_shown_that_is_not_stored(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with office() as desk, asyncio.timeout(60):
        log, submit = await desk.task(), desk.database.submit

        def text_follows(*args: Any) -> Any:
            patch.setattr(desk.database, "submit", submit)
            log.append_now([grew("not stored yet", opens=True)])
            return submit(*args)

        with monkeypatch.context() as patch:
            patch.setattr(Lease, "held", False)
            patch.setattr(desk.database, "submit", text_follows)
            await log.append([Started()])
            shown = log.after(1) or []
        await desk.writer.commit()

        assert [entry.event for entry in shown] == [Started()]
        assert len(log.after(1) or []) == 2


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
    async with office() as desk, asyncio.timeout(60):
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


async def test_a_request_counts_as_seen_when_the_reader_has_taken_it() -> None:
    async with office() as desk, asyncio.timeout(60):
        log = await desk.task()
        asked = Interrupted(RequestId("per_1"), "permission", SessionId("ses_1"), number=1)
        when_refused: list[int] = []

        def refuse(_: list[Entry]) -> bool:
            when_refused.append(log.seen.newest)
            return False

        reader = LogReader(log)
        reading = asyncio.create_task(reader.next(refuse))
        await asyncio.sleep(0)
        await log.append([Started(), asked])
        entries = await reading

        assert when_refused == [0]
        assert [entry.event for entry in entries] == [Started(), asked]
        assert log.seen.newest == 1


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
@pytest.mark.parametrize("refused", [2**63, None])
async def test_what_can_never_be_stored_fails_its_task_alone(refused: int | None) -> None:
    async with office() as desk:
        wrong, right = await desk.task("m1"), await desk.task("m2")

        def write(connection: sa.Connection) -> None:
            values = {tasks.c.created_at: refused}
            connection.execute(tasks.update().where(tasks.c.no == wrong.no).values(values))

        async with asyncio.timeout(60):
            assert right.append_now([grew("right"), Started()])
            await wrong.append([grew("wrong"), Started()], write)
            await wrong.until_stopped(0)
            await right.append([Finished(Outcome.COMPLETED)])

        failed, whole = await stored_task(wrong), await stored_task(right)
        assert failed.status.state is State.FAILED
        assert failed.status.failure == live.UNSTORABLE
        assert seen(await desk.stored(wrong))[1][1] == grew("wrong")
        assert whole.status.state is State.COMPLETED


async def test_a_value_that_has_no_place_in_json_is_mended_and_stored() -> None:
    deep: Any = []
    for _ in range(500):
        deep = [deep]
    odd: Any = {"number": 2**70, "deep": deep, "half": "\ud800", "inf": float("inf")}
    async with office() as desk:
        log = await desk.task()

        call = ToolChanged(MessageId("msg_1"), "prt_1", "call_1", "bash", "completed", input=odd)
        async with asyncio.timeout(60):
            await log.append([Started(), call, Finished(Outcome.COMPLETED)])

        stored = await desk.stored(log)
        (kept,) = [one.event for one in stored if isinstance(one.event, ToolChanged)]
        assert kept.input is not None
        assert kept.input["number"] == float(2**70)
        assert (kept.input["half"], kept.input["inf"]) == ("\ufffd", None)


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

        # Else a late "yes" would approve what nobody was shown, or had no time to read.
        now = time.monotonic()
        assert again.seen.newest_in_time(now) == 0
        assert again.seen.newest_in_time(now + UNREAD_SECONDS) == told


def asking(number: int) -> Interrupted:
    return Interrupted(RequestId(f"per_{number}"), "permission", SessionId("ses_1"), number=number)


@pytest.mark.requirement("I23")
@pytest.mark.parametrize("resolution", ["once", "rejected", "always", "replied", "expired", "void"])
async def test_a_request_has_to_be_read_before_a_plain_answer_after_another_was_settled(
    resolution: Resolution,
) -> None:
    async with office() as desk:
        log = await desk.task()
        await log.append([Started(), asking(1)])
        log.note_seen(log.state.status)
        first = log.seen.newest_in_time(time.monotonic())  # nothing was settled: it counts at once
        await log.append([Resumed(RequestId("per_1"), "permission", resolution, "alice")])
        settled = time.monotonic()
        await log.append([asking(2)])
        unseen = log.seen.newest_in_time(settled + SETTLED_SECONDS)
        log.note_seen(log.state.status)
        await log.append([asking(3)])
        log.note_seen(log.state.status)
        shown = time.monotonic()

        assert (first, unseen) == (1, 1)
        # Neither the newest nor the one before it, if both were shown in this moment.
        assert log.seen.newest_in_time(settled) < 2
        assert log.seen.newest_in_time(settled + UNREAD_SECONDS) < 2
        assert log.seen.newest_in_time(shown + UNREAD_SECONDS) == 3


@pytest.mark.requirement("I23")
async def test_a_plain_answer_may_be_quick_if_nothing_was_settled_for_a_while(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("opencode_a2a.log.seen.SETTLED_SECONDS", 0.0)
    async with office() as desk:
        log = await desk.task()
        await log.append([Started(), asking(1)])
        await log.append([Resumed(RequestId("per_1"), "permission", "once", "alice"), asking(2)])
        log.note_seen(log.state.status)

        assert log.seen.newest_in_time(time.monotonic()) == 2


@pytest.mark.requirement("I23")
async def test_a_doubled_answer_by_context_is_not_for_the_next_task_of_the_context() -> None:
    async with office() as desk:

        async def task(message_id: str) -> TaskLog:
            admitted = await desk.admit(replace(order(message_id), context_id="c"))
            assert isinstance(admitted, OpenTask)
            return admitted.log

        first, queued = await task("m1"), await task("m2")
        for log in (first, queued):
            await log.append([Started(), asking(1)])
            log.note_seen(log.state.status)
        await first.append([Resumed(RequestId("per_1"), "permission", "once", "alice")])
        later = await task("m3")
        await later.append([Started(), asking(1)])
        later.note_seen(later.state.status)
        now = time.monotonic()

        assert queued.seen.newest_in_time(now, by_context=True) == 0
        assert queued.seen.newest_in_time(now) == 1  # the message names this task
        assert later.seen.newest_in_time(now, by_context=True) == 1  # it began with a later message


async def test_what_comes_for_a_task_that_is_left_to_another_replica_is_for_that_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with office() as desk:
        task, other = [await desk.admit(order(one)) for one in ("m1", "m2")]
        assert isinstance(task, OpenTask)
        assert isinstance(other, OpenTask)
        await task.log.append([Started()])
        reached, asked = asyncio.Event(), list[str]()

        async def wait_for_opencode(_: SharedTurns) -> None:
            reached.set()
            await asyncio.Event().wait()

        async def ask(upstream: str, *_: object, **__: object) -> bytes:
            asked.append(upstream)
            raise UpstreamUnreachableError

        monkeypatch.setattr(SharedTurns, "check_reachable", wait_for_opencode)
        monkeypatch.setattr(desk.tasks.mailbox, "forward", ask)
        more = replace(order("m3"), task_id=task.log.ref.id)
        inside = asyncio.create_task(desk.tasks.sending.submit(more))
        await reached.wait()
        await desk.member.let_go()
        await other.end(Finished(Outcome.COMPLETED))  # in the last moment
        for stage in ("before it is stored", "afterwards"):
            for late in (
                inside,
                desk.tasks.sending.submit(more),
                desk.tasks.cancel(more.principal, task.log.ref.id),
            ):
                with pytest.raises(UpstreamUnreachableError):
                    await late
            assert asked == [MAIN] * len(asked), stage
            await desk.tasks.open.give_up(desk.member)

        assert (len(asked), desk.tasks.open.all()) == (5, [])
        assert (await stored_task(task.log)).status.state is State.WORKING
        assert (await stored_task(other.log)).status.state is State.COMPLETED


@pytest.mark.parametrize("service_stops", [True, False])
async def test_nothing_is_appended_once_a_task_is_stored_and_left_to_another_replica(
    service_stops: bool,
) -> None:
    async with office() as desk:
        task = await desk.admit(order("m1"))
        assert isinstance(task, OpenTask)
        if service_stops:
            await desk.tasks.open.close()
        else:
            await desk.tasks.open.give_up(desk.member)

        with pytest.raises(MovedError):
            await task.log.append([Started()])

        assert (await stored_task(task.log)).status.state is State.SUBMITTED
