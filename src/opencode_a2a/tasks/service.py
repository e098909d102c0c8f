"""``TaskService``: what ``server`` and ``extensions`` may ask of tasks.

It answers for every task, wherever that runs. What only the replica that runs a task can do is an
``OwnerCall``; what became of it is in the log of the task, which every replica reads. Messages are
accepted by ``tasks.sending`` and ``tasks.continuing``, the tasks that this process runs are in
``tasks.open``. A task of another principal is not found.
"""

import asyncio
import base64
import time
from contextlib import suppress
from dataclasses import dataclass

import orjson
from pydantic import TypeAdapter
from sqlalchemy.engine import Connection

from opencode_a2a import metrics
from opencode_a2a.cluster.fleet import Fleet, Member, MovedError
from opencode_a2a.cluster.mailbox import PATIENCE_SECONDS, Mailbox, OwnerCall, SessionSearch
from opencode_a2a.config import LimitSettings
from opencode_a2a.errors import (
    InvalidParamsError,
    MaybeRunError,
    NotRunError,
    StreamEndedError,
    TaskNotCancelableError,
    TaskUnreadableError,
    UpstreamUnreachableError,
)
from opencode_a2a.ids import Principal
from opencode_a2a.log.log import LogReader, LogWriter, ReadableLog
from opencode_a2a.log.remote import RemoteLogs
from opencode_a2a.log.state import Cursor, Query, State, TaskState
from opencode_a2a.log.stored import readable_tasks, state_of
from opencode_a2a.messages import PushConfig
from opencode_a2a.store import tasks as task_rows
from opencode_a2a.store.database import Database
from opencode_a2a.store.tasks import Key, TaskRow
from opencode_a2a.store.webhooks import HookRow
from opencode_a2a.tasks.budget import Budgets
from opencode_a2a.tasks.continuing import Continuing
from opencode_a2a.tasks.open import OpenTasks
from opencode_a2a.tasks.recovery import end_unowned
from opencode_a2a.tasks.sending import Sending
from opencode_a2a.tasks.webhooks import Webhooks
from opencode_a2a.telemetry import ROUTINE

_SEARCHED_AT_ONCE = 2000
"""Rows that a search reads in one transaction."""


@dataclass(frozen=True, slots=True)
class Page:
    tasks: list[TaskState]
    next_token: str
    """Empty on the last page."""
    size: int
    total: int


@dataclass(frozen=True, slots=True)
class TaskName:
    """A task that a call is about."""

    principal: Principal
    task_id: str


@dataclass(frozen=True, slots=True)
class WebhookName(TaskName):
    """A webhook that a call is about."""

    config_id: str


@dataclass(frozen=True, slots=True)
class NewWebhook(TaskName):
    """A webhook to set for a task."""

    config: PushConfig
    anew: bool
    """Whether it is to begin anew if one just like it is served; see ``Webhooks.put``."""


class TaskService:
    def __init__(
        self,
        database: Database,
        writer: LogWriter,
        fleet: Fleet,
        limits: LimitSettings,
        webhooks: Webhooks,
    ) -> None:
        self._database = database
        self._fleet = fleet
        self._webhooks = webhooks
        self.remote_logs = RemoteLogs(database)
        """The logs of tasks that other replicas run, as far as they are read here."""
        self.open = OpenTasks(database, writer, fleet, self.remote_logs)
        """The open tasks that this process runs."""
        self.budgets = Budgets(database, fleet)
        self.mailbox = Mailbox(database, fleet.owned)
        """Carries calls between replicas."""
        self.continuing = Continuing(database, webhooks, self.open, self.budgets)
        """Handles messages on the tasks that this process runs."""
        self.sending = Sending(
            database, writer, fleet, limits, webhooks, self.open, self.mailbox, self.continuing
        )
        """Accepts messages."""
        fleet.find_session_elsewhere = SessionSearch(self.mailbox, fleet).find
        self._canceling = OwnerCall(
            self.mailbox,
            "cancel",
            fleet,
            self._order_to_stop,
            lambda: TypeAdapter(TaskName),
            lambda: TypeAdapter(type(None)),
        )
        # For 2.0, until 3.0: made only to be registered, since such replicas make these calls.
        OwnerCall(
            self.mailbox,
            "webhook",
            fleet,
            self._put_webhook_for_other,
            lambda: TypeAdapter(NewWebhook),
            lambda: TypeAdapter(str),
        )
        OwnerCall(
            self.mailbox,
            "delete webhook",
            fleet,
            self._delete_webhook_for_other,
            lambda: TypeAdapter(WebhookName),
            lambda: TypeAdapter(type(None)),
        )

    # Reading

    async def task(
        self, principal: Principal, task_id: str, *, supervised: bool = False
    ) -> TaskState:
        """Return a task; what a supervisor reads is not shown to its principal."""
        log = await self.open.log(principal, task_id)
        if not supervised:
            log.note_seen(log.state.status)
        return log.state

    async def principal_of(self, task_id: str) -> Principal | None:
        """Return whose task this is; for those who may know of all tasks."""
        task = self.open.get(task_id)
        if task is not None:
            return task.log.ref.principal
        found = await self._database.read(task_rows.owner_of_task, task_id)
        return None if found is None else Principal(found)

    async def page(self, principal: Principal | None, query: Query) -> Page:
        """Return a page of the tasks of a principal, or of everybody's."""
        whole = query.artifacts or query.history_length > 0
        after = _read_token(query.token) if query.token else None

        def read(connection: Connection) -> tuple[list[TaskRow], int]:
            return task_rows.page(
                connection,
                principal,
                context_id=query.context_id,
                state=query.state,
                since=query.since,
                after=after,
                most=query.size + 1,
                brief=not whole,
            )

        found, total = await self._database.read(read)
        tasks: list[TaskState] = []
        for row in found[: query.size]:
            task = self.open.get(row.id)
            if not whole:
                tasks += readable_tasks([row])
            elif task is not None:
                tasks.append(await task.log.firm_state())
            else:
                with suppress(TaskUnreadableError):
                    tasks.append((await self.open.log_of(row)).state)
        token = ""
        if len(found) > query.size:
            last = found[query.size - 1]
            place = orjson.dumps([last.updated_at, last.no])
            token = base64.urlsafe_b64encode(place).decode().rstrip("=")
        return Page(tasks, token, query.size, total)

    async def search(self, principal: Principal | None, text: str, most: int) -> list[TaskState]:
        """Return the newest tasks whose titles have all words of a text, or ids that begin with it.

        All tasks of a principal, or of everybody, are looked at in their brief form, a chunk at a
        time so that other reads get in between.
        """
        words = text.casefold().split()
        # As they stand in a stored status: most rows need not be decoded.
        stored = [orjson.dumps(word)[1:-1].decode() for word in words]

        def matches(row: TaskRow) -> bool:
            if row.id.startswith(text):
                return True
            raw = row.status.decode(errors="replace").casefold()
            if not all(word in raw for word in stored):
                return False
            for task in readable_tasks([row]):
                titles = f"{task.status.subject}\n{task.status.title}".casefold()
                return all(word in titles for word in words)
            return False

        def read(connection: Connection, after: Key | None) -> tuple[list[TaskRow], Key | None]:
            rows, _ = task_rows.page(
                connection, principal, after=after, most=_SEARCHED_AT_ONCE, brief=True
            )
            last = Key(rows[-1].updated_at, rows[-1].no) if len(rows) == _SEARCHED_AT_ONCE else None
            return [row for row in rows if matches(row)], last

        found: list[TaskRow] = []
        after: Key | None = None
        while len(found) < most:
            rows, after = await self._database.read(read, after)
            found += rows
            if after is None:
                break
        return [*readable_tasks(found[:most])]

    async def follow(
        self,
        principal: Principal,
        task_id: str,
        after: Cursor | None = None,
        *,
        until_asked: bool = False,
        supervised: bool = False,
    ) -> LogReader:
        """Return a reader of a task's log; see ``LogReader``."""
        log = await self.open.log(principal, task_id)
        if after is not None:
            await log.reach(after)
        return LogReader(log, after, until_asked=until_asked, supervises=supervised)

    async def log(self, principal: Principal, task_id: str) -> ReadableLog:
        """Return the log of a task, with nothing in its state that waits to be stored."""
        return await self.open.log(principal, task_id)

    # Ending

    async def cancel(self, principal: Principal, task_id: str) -> TaskState:
        """End a task; an ended one is returned if it was canceled before, else refused.

        The owner is ordered to stop the task; how that ends is read from the log. The order is
        stored in the log, so the next owner follows it; it is given again if nothing comes of it.
        The loop ends with the task. It also ends if two orders in turn reach no owner, or one is
        refused: that is raised.
        """
        metrics.CANCEL_REQUESTS.inc()
        began, named = time.monotonic(), TaskName(principal, task_id)
        unanswered: NotRunError | MaybeRunError | None = None
        """What became of the first order that nobody replied to."""
        log, where = await self.open.find_with_owner(principal, task_id)
        while where is not None:
            try:
                await self._canceling.run(where, named, begun=isinstance(unanswered, MaybeRunError))
                async with asyncio.timeout(PATIENCE_SECONDS):
                    await log.until_ended()
            except (TimeoutError, StreamEndedError):
                pass  # only the waiting is over, here or at the owner; what is stored says more
            except UpstreamUnreachableError as error:
                if not await self._end_unowned(principal, task_id):
                    # It has an owner, who may have come only now.
                    if unanswered is not None or not isinstance(error, NotRunError | MaybeRunError):
                        raise
                    unanswered = error
            log, where = await self.open.find_with_owner(principal, task_id)
        state = await log.firm_state()
        if state.status.state is not State.CANCELED:
            raise TaskNotCancelableError("The task has ended and cannot be canceled")
        sure = "success" if state.status.failure is None else "timeout"
        metrics.CANCEL_SECONDS.labels(sure).observe(time.monotonic() - began)
        return state

    async def _order_to_stop(self, _: Member, named: TaskName) -> None:
        """Order a task to stop, if it has not ended meanwhile; raise MovedError if it runs
        elsewhere."""
        task = self.open.of(named.principal, named.task_id)
        if task is None:
            row = await self.open.row(named.principal, named.task_id)
            if not state_of(row).terminal:
                raise MovedError(row.upstream)
            return
        # Without a database the cancel is refused at once, and the turn still runs.
        await self._database.check_writable()
        ROUTINE.info("cancel requested", task_id=named.task_id, principal=named.principal)
        await task.cancel()
        # For 2.0, until 3.0: such a replica reads the task as soon as it has the reply.
        await task.log.until_ended()

    async def _end_unowned(self, principal: Principal, task_id: str) -> bool:
        """Cancel a task whose OpenCode has no live owner; return whether it has ended now."""
        row = await self.open.row(principal, task_id)
        if not await end_unowned(self._database, row):
            return False
        self._database.tell_all(f"l,{row.no}")
        self._database.dispatch("w")
        return True

    # Webhooks

    async def put_webhook(
        self, principal: Principal, task_id: str, config: PushConfig, *, anew: bool = True
    ) -> HookRow:
        """Have a task's changes sent to a webhook from now on; see ``Webhooks.put``."""
        log = await self.log(principal, task_id)
        return await self._webhooks.put(log, config, anew=anew)

    async def _put_webhook_for_other(self, _: Member, new: NewWebhook) -> str:
        """Set a webhook for another replica; return its id."""
        row = await self.put_webhook(new.principal, new.task_id, new.config, anew=new.anew)
        return row.config_id

    async def _delete_webhook_for_other(self, _: Member, named: WebhookName) -> None:
        log = await self.log(named.principal, named.task_id)
        await self._webhooks.delete(log, named.config_id)


def _read_token(token: str) -> Key:
    with suppress(ValueError):
        padded = token.encode() + b"=" * (-len(token) % 4)
        match orjson.loads(base64.b64decode(padded, altchars=b"-_", validate=True)):
            case [int(updated_at), int(no)] if 0 <= updated_at < 2**62 and 0 <= no < 2**62:
                return Key(updated_at, no)
            case _:
                pass
    text = "is not a page token returned by this method; omit it to start from the first page"
    raise InvalidParamsError.of("pageToken", text)
