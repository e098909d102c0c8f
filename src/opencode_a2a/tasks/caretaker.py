"""End a task whose OpenCode no live replica runs.

Only the owner of an OpenCode writes the logs of its tasks. While it has no live owner, any replica
may end one of them for a caller who does not want to wait for the next: the transaction locks the
row of the OpenCode, so nobody becomes its owner before the end is stored, and the next owner finds
a task that has ended. OpenCode itself is not asked anything.
"""

import orjson
from sqlalchemy.engine import Connection

from opencode_a2a.events import Failure, FailureType, Finished, Outcome
from opencode_a2a.store import interrupts, replicas
from opencode_a2a.store import tasks as task_rows
from opencode_a2a.store.database import Database
from opencode_a2a.store.tasks import Move, Segment, TaskRow
from opencode_a2a.tasks.log import ref_of
from opencode_a2a.tasks.readers import Replay
from opencode_a2a.tasks.state import Recovered, dump_archive, dump_entries
from opencode_a2a.telemetry import ROUTINE, now_ms

UNOWNED = "No replica of the service runs the task any more."
UNSTOPPED = Finished(
    Outcome.CANCELED,
    failure=Failure(
        FailureType.UPSTREAM_ABORT_UNCONFIRMED,
        "The task is canceled, but no replica of the service runs its OpenCode at the moment, so "
        "that could not be told to stop. It may still be working on the task.",
    ),
)
"""The end of a task that a caller cancels."""


async def end_unowned(database: Database, row: TaskRow, end: Finished) -> bool:
    """Append the end to the log of a task, unless a live replica runs its OpenCode.

    Return whether the task has ended now.
    """
    if database.replica is None:
        return False
    while True:
        replay = Replay(database, row.no, ref_of(row))
        while await replay.next(replay.state.seq):
            pass
        state, before, first, now = (
            replay.state,
            replay.state.status,
            replay.state.seq + 1,
            now_ms(),
        )
        if before.state.terminal:
            return True
        # The last owner may have shown entries that it did not store: these numbers begin anew.
        entries = [state.apply(event, now) for event in (Recovered(UNOWNED), end)]
        segment = Segment(row.no, first, state.seq, dump_entries(entries))
        change = (row.principal, before.state, state.status.state, now)
        move = Move(row.no, *change, orjson.dumps(state.status), dump_archive(state))

        def write(
            connection: Connection, segment: Segment = segment, move: Move = move
        ) -> bool | None:
            if not replicas.lock_unowned(connection, row.upstream):
                return False
            if task_rows.load_segments(connection, row.no, segment.first_seq, 1):
                return None  # an owner, or another replica like this one, wrote meanwhile
            task_rows.append(connection, [segment], [move])
            interrupts.void(connection, row.id, now_ms())
            return True

        ended = await database.write(write)
        if ended:
            ROUTINE.info("task ended without an owner", task_id=row.id, principal=row.principal)
        if ended is not None:
            return ended
