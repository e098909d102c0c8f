"""Logs and tasks as they are stored: reads what nobody has in memory.

``Replay`` reads a stored log, and ``load_task`` a task from its row alone.
"""

from collections.abc import Iterable, Iterator
from contextlib import suppress

import orjson
import structlog

from opencode_a2a.errors import TaskUnreadableError
from opencode_a2a.ids import ContextId, Principal, TaskId
from opencode_a2a.log.state import (
    BATCH_BYTES,
    STATE_CHANGES,
    Entry,
    LogEvent,
    State,
    TaskRef,
    TaskState,
    load_entries,
    load_state,
)
from opencode_a2a.store import tasks as task_rows
from opencode_a2a.store.database import Database
from opencode_a2a.store.tasks import Segment, TaskRow

logger = structlog.get_logger(__name__)

REPLAY_SEGMENTS = 200
"""Segments (rows of a stored log, with entries that follow one another) that are read at once."""


DAMAGED = (LookupError, TypeError, ValueError, AttributeError)
"""What goes wrong when a stored value is read that is not what was written."""


def load_segment(segment: Segment, after: int) -> list[tuple[int, LogEvent]]:
    """Return (time in ms, event) of each entry of the segment that follows an entry.

    Raise TaskUnreadableError if an entry is missing, in it or before it: with the numbers of those
    that follow, what was shown would be shown again.
    """
    try:
        events = load_entries(segment.data)
    except DAMAGED:
        events = []
    if (segment.first_seq, segment.last_seq) != (after + 1, after + len(events)):
        logger.error("part of a log could not be read", task_no=segment.task_no)
        raise TaskUnreadableError
    return events


class Replay:
    """Reads a log from the store, folding it again to know the status at each entry."""

    def __init__(self, database: Database, no: int, ref: TaskRef) -> None:
        self._database = database
        self._no = no
        self.state = TaskState(ref)
        self._most = 8
        """Segments that are read next: fewer while they are large."""

    async def next(self, after: int) -> list[Entry]:
        """Return the next stored entries after a sequence number; none when there are no more."""
        while True:
            segments = await self._database.read(
                task_rows.load_segments, self._no, self.state.seq + 1, self._most
            )
            size = sum(len(segment.data) for segment in segments)
            fitting = len(segments) * BATCH_BYTES // size if size else REPLAY_SEGMENTS
            self._most = max(1, min(REPLAY_SEGMENTS, fitting, 2 * self._most))
            entries = [
                self.state.apply(event, at)
                for segment in segments
                for at, event in load_segment(segment, self.state.seq)
            ]
            wanted = [entry for entry in entries if entry.seq > after]
            if wanted or not segments:
                return wanted

    def forget_contents(self) -> None:
        """Keep the status, which later entries build on, but no text or artifact so far."""
        self.state.artifacts.clear()
        for text in self.state.channels.values():
            text.parts.clear()

    async def all(self) -> TaskState:
        """Read the whole log, and return the task as it is stored."""
        while await self.next(self.state.seq):
            pass
        return self.state


async def stored_changes(database: Database, task_no: int, ref: TaskRef, after: int) -> list[Entry]:
    """Return the next changes of state after an entry from the stored log.

    The list is empty if there are no more, or if the log of an ended task is no longer kept.
    """
    replay, changes = Replay(database, task_no, ref), list[Entry]()
    while len(changes) < STATE_CHANGES and (entries := await replay.next(replay.state.seq)):
        changes += (entry for entry in entries if entry.changes_state and entry.seq > after)
    return changes


def ref_of(row: TaskRow) -> TaskRef:
    try:
        modes = None if row.output_modes is None else tuple(orjson.loads(row.output_modes))
    except (TypeError, ValueError):
        modes = None  # as if it had been sent without; the rest of the task counts
    return TaskRef(
        TaskId(row.id), ContextId(row.context_id), Principal(row.principal), modes, row.created_at
    )


def state_of(row: TaskRow) -> State:
    """Return the stored state of a task."""
    try:
        return State(row.state)
    except ValueError:
        logger.error("state of a task could not be read", row=row.id)
        raise TaskUnreadableError from None


def load_task(row: TaskRow) -> TaskState:
    """Build a task from its row; if it is open it has a status and nothing else."""
    try:
        return load_state(ref_of(row), row.status, row.archive)
    except DAMAGED as error:
        logger.error("task could not be read", row=row.id, cause=type(error).__name__)
        raise TaskUnreadableError from None


def readable_tasks(rows: Iterable[TaskRow]) -> Iterator[TaskState]:
    """Build tasks from their rows; one that is damaged is left out."""
    for row in rows:
        with suppress(TaskUnreadableError):
            yield load_task(row)
