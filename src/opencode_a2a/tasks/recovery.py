"""What was open when the service stopped is taken up again; what is old is forgotten."""

import asyncio

import structlog
from sqlalchemy.engine import Connection

from opencode_a2a.clock import now_ms
from opencode_a2a.errors import StoreUnavailableError
from opencode_a2a.events import Emitted, Failure, Finished, Outcome
from opencode_a2a.messages import Answered
from opencode_a2a.store import tasks as rows
from opencode_a2a.store.database import Database
from opencode_a2a.store.tasks import TaskRow
from opencode_a2a.tasks.codec import load_request, ref_of
from opencode_a2a.tasks.log import Replay, TaskLog
from opencode_a2a.tasks.service import TaskService
from opencode_a2a.tasks.state import OPEN, TERMINAL, Accepted, Recovered, State
from opencode_a2a.tasks.writer import LogWriter

log = structlog.get_logger(__name__)

LOG_SECONDS = 3600
"""How long the log of an ended task can be replayed; its result stays."""
SWEEP_SECONDS = 600
SWEEP_TASKS = 500

RESTARTED = "The service was restarted; the task goes on."
LOST = Failure(
    "REQUEST_LOST", "The service was restarted and no longer knows the request. Send it again."
)


async def recover(database: Database, journal: LogWriter, board: TaskService) -> int:
    """Take up every open task; return how many there were."""

    def read(connection: Connection) -> list[TaskRow]:
        return rows.load_open(connection, list(OPEN))

    found = await database.read(read)
    for row in found:
        await _take_up(row, database, journal, board)
    return len(found)


async def _take_up(
    row: TaskRow, database: Database, journal: LogWriter, board: TaskService
) -> None:
    replay = Replay(database, row.no, ref_of(row))
    emitted = Emitted()
    while entries := await replay.next(replay.state.seq):
        for entry in entries:
            match entry.event:
                case Finished():
                    emitted = Emitted()
                case Accepted() | Answered() | Recovered():
                    pass
                case event:
                    emitted.add(event)
    task = TaskLog(row.no, replay.state, journal, database)
    job = board.adopt(task)
    if task.state.status.state is State.AUTH_REQUIRED:
        board.await_sign_in(job)
        return
    await task.tell([Recovered(RESTARTED)])
    if row.request is None:
        await task.tell([Finished(Outcome.FAILED, failure=LOST)])
        board.closed(job)
        return
    board.run(job, load_request(row.request), emitted)


async def sweep(database: Database, retention_seconds: float) -> None:
    """Forget, every few minutes, the logs and the tasks that have been kept long enough."""
    while True:
        try:
            await _forget(database, retention_seconds)
        except StoreUnavailableError:
            log.warning("old tasks not removed, trying again later")
        await asyncio.sleep(SWEEP_SECONDS)


async def _forget(database: Database, retention_seconds: float) -> None:
    ended = list(TERMINAL)
    now = now_ms()

    def logs(connection: Connection) -> int:
        return rows.forget_logs(connection, ended, now - LOG_SECONDS * 1000, SWEEP_TASKS)

    def whole(connection: Connection) -> int:
        before = now - int(retention_seconds * 1000)
        return rows.forget_tasks(connection, ended, before, SWEEP_TASKS)

    while await database.write(logs) == SWEEP_TASKS:
        pass
    if retention_seconds > 0:
        while await database.write(whole) == SWEEP_TASKS:
            pass
