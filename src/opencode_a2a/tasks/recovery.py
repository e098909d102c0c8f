"""What was open when the service stopped is taken up again; what is old is forgotten."""

import asyncio
from collections.abc import Callable, Mapping

import structlog
from sqlalchemy.engine import Connection

from opencode_a2a.errors import StoreUnavailableError
from opencode_a2a.events import (
    Emitted,
    Failure,
    FailureType,
    Finished,
    Interrupted,
    Outcome,
    Progressed,
    Resumed,
)
from opencode_a2a.messages import ANYWHERE, Added, Answered
from opencode_a2a.store import interrupts, rates, replicas, sign_ins, spending
from opencode_a2a.store import tasks as task_rows
from opencode_a2a.store.database import Database, claim
from opencode_a2a.tasks.log import LogWriter, TaskLog, ref_of
from opencode_a2a.tasks.open import UPSTREAM_LOST, OpenTasks
from opencode_a2a.tasks.readers import Replay
from opencode_a2a.tasks.state import OPEN, TERMINAL, Accepted, Recovered, Unknown, load_request
from opencode_a2a.telemetry import now_ms
from opencode_a2a.turns.fleet import Fleet
from opencode_a2a.turns.turn import LoggedTurn

logger = structlog.get_logger(__name__)

LOG_SECONDS = 3600
"""How long the log of an ended task can be replayed; its result stays."""
SWEEP_SECONDS = 600
SPENDING_DAYS = 62
"""How long it is known what callers have used."""
SWEEP_TASKS = 500

RESTARTED = "The service was restarted; the task goes on."
LOST = Failure(
    FailureType.REQUEST_LOST,
    "The service was restarted and no longer knows the request. Send it again.",
)


async def recover(
    database: Database,
    writer: LogWriter,
    tasks: OpenTasks,
    fleet: Fleet,
    upstreams: Mapping[str, bool] | None = None,
) -> int:
    """Take up every open task; return how many there were.

    With ``upstreams``, only theirs; of those that were handed over (True) nothing is lost, and a
    reader goes on where it was.
    """
    found = await database.read(lambda c: task_rows.load_open(c, list(OPEN), upstreams))
    running = {task.log.no for task in tasks.all()}
    for row in found:
        if row.no in running:  # an earlier try was cut short
            continue
        replay = Replay(database, row.no, ref_of(row))
        emitted = Emitted()
        """What the log has of the turn that was running."""
        added: list[Added] = []
        while entries := await replay.next(replay.state.seq):
            for entry in entries:
                match entry.event:
                    case Finished() | Interrupted(type="plan"):  # the end of a turn
                        emitted, added = Emitted(), []
                    case Added():
                        added.append(entry.event)
                    case Progressed("message", "refused" | "dropped", message_id) as given_up:
                        # Its sender was told so, and may have sent it anew.
                        added = [one for one in added if one.message.message_id != message_id]
                        emitted.add(given_up)
                    case Accepted() | Answered() | Recovered() | Unknown() | Resumed(type="plan"):
                        pass
                    case event:
                        emitted.add(event)
        request = load_request(row.request) if row.request is not None else None
        member = fleet.members.get(row.upstream)
        log = TaskLog(row.no, replay.state, writer, database)
        task = tasks.adopt(log, member or fleet.first, request.routing if request else ANYWHERE)
        if member is None:
            await task.end(
                Finished(Outcome.FAILED, failure=UPSTREAM_LOST),
                lambda connection, task_id=row.id: interrupts.void(connection, task_id, now_ms()),
            )
            continue
        if replay.state.status.paused:
            if request is not None:
                task.routing, task.rights = request.routing, request.rights
            task.pause()
            continue
        handed_over = upstreams is not None and upstreams[row.upstream]
        events = [] if handed_over else [Recovered(RESTARTED)]
        storing = asyncio.ensure_future(task.log.append(events))
        if request is None:
            await storing
            await task.end(Finished(Outcome.FAILED, failure=LOST))
        else:
            # Before anything is awaited: whoever cancels the task meanwhile has to find the turn.
            task.start(request, LoggedTurn(emitted, added), first=storing)
            await asyncio.shield(storing)
    return len(found)


async def sweep(database: Database, retention_seconds: float) -> None:
    """Forget, every few minutes, what has been kept long enough; one of several replicas does."""
    ended = list(TERMINAL)

    def forget_logs(connection: Connection) -> int:
        return task_rows.forget_logs(connection, ended, now_ms() - LOG_SECONDS * 1000, SWEEP_TASKS)

    def forget_tasks(connection: Connection) -> int:
        oldest = now_ms() - int(retention_seconds * 1000)
        return task_rows.forget_tasks(connection, ended, oldest, SWEEP_TASKS)

    def forget_others(connection: Connection) -> int:
        spending.forget(connection, spending.day_of(now_ms()) - SPENDING_DAYS)
        sign_ins.forget(connection, now_ms())
        if database.replica is not None:
            rates.forget(connection, now_ms() - SWEEP_SECONDS * 1000)
            replicas.forget(connection)
        return 0

    def first_come(forget: Callable[[Connection], int]) -> Callable[[Connection], int]:
        # Two that delete the same tasks would count them twice.
        return lambda connection: forget(connection) if claim(connection, "sweep") else 0

    while True:
        try:
            await database.write(first_come(forget_others))
            while await database.write(first_come(forget_logs)) == SWEEP_TASKS:
                pass
            while retention_seconds > 0 and (
                await database.write(first_come(forget_tasks)) == SWEEP_TASKS
            ):
                pass
        except StoreUnavailableError:
            logger.warning("old tasks not removed, trying again later")
        await asyncio.sleep(SWEEP_SECONDS)
