"""What a process takes up of the one before it, and in which order."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
from sqlalchemy.engine import Connection

from opencode_a2a.clock import now_ms
from opencode_a2a.cluster.fleet import Fleet, Member
from opencode_a2a.config import Settings, UpstreamEntry
from opencode_a2a.events import Interrupted, Resumed
from opencode_a2a.ids import (
    MAIN,
    ContextId,
    MessageId,
    Owner,
    Principal,
    RequestId,
    SessionId,
    TaskId,
)
from opencode_a2a.log.log import LogWriter, TaskLog, new_row
from opencode_a2a.log.remote import RemoteLogs
from opencode_a2a.log.state import Accepted, LogEvent, TaskRef, TaskState, dump_entries
from opencode_a2a.messages import Message, PromptPart, TurnRequest
from opencode_a2a.opencode.client import OpenCode1
from opencode_a2a.opencode.upstream import OpenCodeServer
from opencode_a2a.store import tasks as task_rows
from opencode_a2a.store.database import Database
from opencode_a2a.store.replicas import LastOwner
from opencode_a2a.store.tasks import Segment
from opencode_a2a.tasks.open import CANCELING, OpenTask, OpenTasks
from opencode_a2a.tasks.recovery import Recovery
from opencode_a2a.turns.answers import Answer, PermissionReply
from opencode_a2a.turns.errands import Errands
from opencode_a2a.turns.interrupt_state import StoredInterrupt
from opencode_a2a.turns.job import SharedTurns
from opencode_a2a.turns.shared_interrupts import SharedInterrupts

ANN = Principal("ann")


class Held:
    """Stores what a LogWriter writes at once, and says so when it is told to."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self.census = database.census
        self.told: list[asyncio.Event] = []

    def submit(self, write: Callable[[Connection], bool]) -> SimpleNamespace:
        stored, told = self._database.submit(write).done, asyncio.Event()
        self.told.append(told)

        async def tell() -> bool:
            await told.wait()
            return await stored

        return SimpleNamespace(done=asyncio.create_task(tell()))


@pytest.mark.sqlite_only
@pytest.mark.requirement("I6")
async def test_turns_begin_in_the_order_of_their_tasks_though_only_the_first_has_to_be_stored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last owner left when the answer to the first was settled, and not yet in its log.

    Entries of another task are being stored, so that those of the first are not sent at once.
    """
    began, started = list[str](), asyncio.Event()

    def start(task: OpenTask, *_: object, after: asyncio.Future[bool]) -> None:
        after.add_done_callback(lambda _: began.append(task.log.ref.id))
        if task.log.ref.id == "t2":
            started.set()

    monkeypatch.setattr(OpenTask, "start", start)
    async with Database(f"sqlite:///{tmp_path / 'tasks.db'}") as database, asyncio.timeout(10):
        shared = SharedInterrupts(database, cast("OpenCode1", None), Settings())
        asked = Interrupted(RequestId("per_1"), "permission", SessionId("ses_1"), permission="edit")
        first = Owner(TaskId("t1"), ContextId("c"), ANN)
        asked = await shared.store_asked(first, asked)
        await shared.store_answer([asked.request_id], Answer(PermissionReply("once"), ANN))
        settled = Resumed(asked.request_id, "permission", "once", ANN)
        await shared.store_settled(first, asked, settled)
        await database.write(_add_task, "t1", asked)
        await database.write(_add_task, "t2")
        held, other = Held(database), TaskRef(TaskId("other"), ContextId("c"), ANN, None, 0)
        writer = LogWriter(cast("Database", held))
        no = await database.write(_add_task, other.id)
        log = TaskLog(no, TaskState(other, seq=1), writer, database)
        fleet, tasks = _parts(database, writer, shared)
        tasks.add(log, fleet.first)
        log.append_now([CANCELING])
        writer.commit()
        read = shared.stored

        async def stored(task_id: str, context_id: str) -> list[StoredInterrupt]:
            reading = asyncio.create_task(read(task_id, context_id))
            await asyncio.sleep(0)
            if task_id == "t2":  # it is read before the entries of the first are sent
                held.told[0].set()
            return await reading

        monkeypatch.setattr(shared, "stored", stored)
        recovery = Recovery(database, writer, fleet, tasks, lambda _: False)
        recovering = asyncio.create_task(recovery.recover({MAIN: LastOwner.HANDED_OVER}, ()))
        await started.wait()
        for _ in range(10):
            await asyncio.sleep(0)
        held.told[1].set()
        await recovering

    assert began == ["t1", "t2"]


def _add_task(connection: Connection, task_id: str, *more: LogEvent) -> int:
    ref = TaskRef(TaskId(task_id), ContextId("c"), ANN, None, now_ms())
    state = TaskState(ref)
    entries = [state.apply(event, 0) for event in (Accepted(Message("m", "user", [])), *more)]
    request = TurnRequest((PromptPart(text="hello"),), MessageId(f"msg_{task_id}"))
    no = task_rows.add_task(connection, new_row(state, request))
    task_rows.append(connection, [Segment(no, 1, state.seq, dump_entries(entries))], [])
    return no


def _parts(
    database: Database, writer: LogWriter, shared: SharedInterrupts
) -> tuple[Fleet, OpenTasks]:
    """Return a fleet of one OpenCode that does nothing, and no open tasks."""

    def make() -> tuple[SharedTurns, Errands]:
        turns = SharedTurns.__new__(SharedTurns)
        turns.interrupts = shared
        return turns, Errands.__new__(Errands)

    behind = OpenCodeServer("http://127.0.0.1:9", "", None)
    member = Member(UpstreamEntry(name=MAIN, url=behind.url), behind, make)
    fleet = Fleet([member], database, 0)
    return fleet, OpenTasks(database, writer, fleet, RemoteLogs(database))
