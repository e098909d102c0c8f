"""Where a task is: open in this process, open in another replica, or ended."""

from opencode_a2a.errors import TaskNotFoundError
from opencode_a2a.ids import Principal
from opencode_a2a.store import tasks as task_rows
from opencode_a2a.store.database import Database
from opencode_a2a.store.tasks import TaskRow
from opencode_a2a.tasks.log import LogWriter, TaskLog, load_task
from opencode_a2a.tasks.open import OpenTasks
from opencode_a2a.tasks.remote import RemoteLogs
from opencode_a2a.tasks.state import State
from opencode_a2a.turns.fleet import Fleet, NotOwnerError


class TaskLookup:
    """Finds the rows and logs of tasks. A task of another principal is not found."""

    def __init__(
        self,
        database: Database,
        writer: LogWriter,
        fleet: Fleet,
        open_tasks: OpenTasks,
        remote_logs: RemoteLogs,
    ) -> None:
        self._database = database
        self._writer = writer
        self._fleet = fleet
        self._open = open_tasks
        self._remote_logs = remote_logs

    async def row(self, principal: Principal, task_id: str) -> TaskRow:
        """Return a task as it is stored; raise TaskNotFoundError."""
        row = await self._database.read(
            lambda connection: task_rows.load(connection, principal, task_id)
        )
        if row is None:
            raise TaskNotFoundError
        return row

    async def log(self, principal: Principal, task_id: str) -> TaskLog:
        """Return the log of a task, with nothing in its state that waits to be stored."""
        task = self._open.of(principal, task_id)
        if task is None:
            return await self.log_of(await self.row(principal, task_id))
        await task.log.firm_state()
        return task.log

    async def log_of(self, row: TaskRow) -> TaskLog:
        """Return the log of a task whose row was read."""
        task = self._open.get(row.id)
        if task is not None:
            await task.log.firm_state()
            return task.log
        if not State(row.state).terminal:  # another replica runs it, or it has just ended
            return await self._remote_logs.log(row)
        return TaskLog(row.no, load_task(row), self._writer, self._database)

    def check_owned(self, row: TaskRow) -> None:
        """Raise NotOwnerError if another replica runs a task."""
        if (task := self._open.get(row.id)) is not None:
            task.check_owned()
        elif not self._fleet.owns(row.upstream) and not State(row.state).terminal:
            raise NotOwnerError(row.upstream)
