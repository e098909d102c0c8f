"""The changes of tasks that are told: the next one for a webhook, and the last one of a task.

The latest are in memory at the replica that stored them; all others are read from the log.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from opencode_a2a.bounds import Recent
from opencode_a2a.log.log import LogForgottenError, TaskLog
from opencode_a2a.log.state import Entry, TaskState
from opencode_a2a.log.stored import Replay, load_task, ref_of, state_of, stored_changes
from opencode_a2a.push.notification import Notification
from opencode_a2a.store import tasks
from opencode_a2a.store.database import Database
from opencode_a2a.store.tasks import TaskRow
from opencode_a2a.store.webhooks import HookRow
from opencode_a2a.tasks.open import OpenTasks
from opencode_a2a.tasks.webhooks import SNAPSHOTS

REMEMBERED = 256
"""Tasks whose latest changes are remembered, so that they need not be read from the log."""


class _Known(NamedTuple):
    """Consecutive changes of a task's state."""

    after: int
    """Sequence number of the change before them."""
    entries: Sequence[Entry]

    def next(self, acked: int, stored: int) -> Entry | None:
        """Return the first change after an entry; None if it is not among these, or not stored."""
        if acked < self.after:
            return None
        return next((entry for entry in self.entries if acked < entry.seq <= stored), None)


class Changes:
    def __init__(self, database: Database, open_tasks: OpenTasks) -> None:
        self._database = database
        self._open = open_tasks
        self._known: Recent[int, _Known] = Recent(REMEMBERED)
        """By the number of the task."""

    def remember(self, logs: Sequence[TaskLog]) -> None:
        """Remember the latest changes in logs that have just been stored."""
        for log in logs:
            self._known[log.no] = _Known(log.state.unremembered, [*log.state.state_changes])

    async def next_notification(self, row: HookRow, task: TaskRow) -> Notification:
        """Return the next notification of a webhook."""
        ref, whole = ref_of(task), row.version == SNAPSHOTS
        if whole and row.failing_since is not None:  # what it has missed is in the present state
            state = await self._state(task)
            ends, seq = state.status.state.terminal, state.last_change or state.seq
            return Notification(ref, seq, ends, state, whole)
        entry = self._in_memory(task, row)
        if entry is None:
            changes = await stored_changes(self._database, task.no, ref, row.acked)
            if not changes:
                if not state_of(task).terminal:
                    raise LogForgottenError(task.id)
                state = load_task(task)
                return Notification(ref, max(state.seq, row.changed), True, state, whole)
            self._known[task.no] = _Known(row.acked, changes)
            entry = changes[0]
        status = entry.status
        ends = status is not None and status.state.terminal
        if whole and status is not None:
            task_then = replace(await self._state(task), status=status)
            return Notification(ref, entry.seq, ends, task_then, whole)
        return Notification(ref, entry.seq, ends, entry)

    def _in_memory(self, task: TaskRow, row: HookRow) -> Entry | None:
        if (running := self._open.get(task.id)) is not None:
            state = running.log.state
            return _Known(state.unremembered, state.state_changes).next(row.acked, row.changed)
        known = self._known.get(task.no)
        return known and known.next(row.acked, row.changed)

    async def last(self, row: HookRow) -> int:
        """Return the number of the last change of a webhook's task that is stored."""
        task = await self._database.read_until_available(tasks.load_by_number, row.task_no)
        if task is None:
            return row.acked
        if state_of(task).terminal:  # and the webhook has not been told yet
            return max(load_task(task).seq, row.acked + 1)
        return (await self._state(task)).last_change

    async def _state(self, task: TaskRow) -> TaskState:
        """Return a task with nothing in it that is not stored."""
        if (running := self._open.get(task.id)) is not None:
            return await running.log.firm_state()
        if state_of(task).terminal:
            return load_task(task)
        return await Replay(self._database, task.no, ref_of(task)).all()
