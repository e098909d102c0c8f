"""Webhooks: each change of a task's state is sent to whoever asked to be told.

A webhook is one more reader of the log, and its place is stored. A change is sent once it is
stored, in the order of the log, one at a time, until the receiver takes it; only then does the
place move on. So a crash can repeat a notification, under the same id, and lose none. Whoever
writes the log waits for nobody: growing text wakes no webhook, and what a receiver has not taken
stays in the log.

What a notification looks like and how it is sent is the ``Sender``'s business. One process runs
all webhooks of the tasks it runs; after a restart it takes up those that were under way.
"""

import asyncio
import random
import secrets
import time
import weakref
from collections import deque
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Protocol
from urllib.parse import urlsplit
from uuid import uuid4

import structlog
from sqlalchemy.engine import Connection

from opencode_a2a import metrics
from opencode_a2a.config import PushSettings
from opencode_a2a.errors import LimitExceededError, StoreUnavailableError, TaskNotFoundError
from opencode_a2a.ids import Principal
from opencode_a2a.store import tasks, webhooks
from opencode_a2a.store.database import Database
from opencode_a2a.store.webhooks import HookRow
from opencode_a2a.tasks.log import Replay, TaskLog, load_task
from opencode_a2a.tasks.state import CHANGES, Entry, TaskRef, TaskState
from opencode_a2a.telemetry import AUDIT, now_ms

logger = structlog.get_logger(__name__)

FIRST_RETRY_SECONDS = 5.0
"""Each further try waits four times as long."""
LAST_RETRY_SECONDS = 3600.0
SHORTEST_WAIT_SECONDS = 1.0
"""Before another try, whatever a receiver asks for."""
AT_ONCE = 32
AT_ONCE_PER_PRINCIPAL = 16
AT_ONCE_PER_RECEIVER = 4
"""Notifications under way, in all, for one caller, and for one caller to one host: a receiver that
hangs delays its own caller's others little, and nobody else's."""
SNAPSHOTS = "0.3"
"""The version whose notifications show the whole task, and so only its present state."""


@dataclass(frozen=True, slots=True)
class PushConfig:
    """Where a caller wants to be told about a task, and what the receiver is to be shown."""

    url: str
    id: str | None = None
    """Chosen for the caller if it names none."""
    scheme: str | None = None
    credentials: str | None = field(default=None, repr=False)
    token: str | None = field(default=None, repr=False)
    version: str = "1.0"
    within: str = field(default="", compare=False)
    """Where its fields stand in the request, for those who refuse one."""


@dataclass(frozen=True, slots=True)
class Notification:
    """A change of state to be told: the entry, or the task as it is, if that is what is shown."""

    ref: TaskRef
    seq: int
    ends: bool
    """Whether nothing can follow it."""
    what: Entry | TaskState
    whole: bool = False
    """Whether all of the task is shown, and not its status alone."""


@dataclass(frozen=True, slots=True)
class Receipt:
    """What became of one attempt: ``ok``, ``http_503``, ``timeout``, …"""

    name: str
    ok: bool = False
    gone: bool = False
    """The receiver wants nothing any more."""
    retry_after: float | None = None


class Sender(Protocol):
    async def send(self, row: HookRow, told: Notification, /) -> Receipt:
        """Send a notification, within the time that one may take."""
        ...


class Outbox:
    def __init__(self, database: Database, settings: PushSettings, sender: Sender) -> None:
        self.settings = settings
        self._database = database
        self._sender = sender
        self._deliveries: dict[tuple[int, str], asyncio.Task[None]] = {}
        """What runs for each webhook, by its task and id."""
        self._pending: dict[int, float] = {}
        """Since when each webhook has something that its receiver has not taken."""
        self._room = asyncio.Semaphore(AT_ONCE)
        self._rooms: weakref.WeakValueDictionary[object, asyncio.Semaphore] = (
            weakref.WeakValueDictionary()
        )
        metrics.PUSH_PENDING.set_function(lambda: len(self._pending))
        metrics.PUSH_OLDEST.set_function(
            lambda: time.monotonic() - min(self._pending.values(), default=time.monotonic())
        )

    # Configurations

    def store(
        self, connection: Connection, task_no: int, ref: TaskRef, config: PushConfig, acked: int = 0
    ) -> HookRow:
        """Store a webhook in the transaction of the connection; raise LimitExceededError."""
        config_id = _config_id(config, ref) or str(uuid4())
        self._check_room(connection, task_no, ref, config_id)
        row = HookRow(
            task_no=task_no,
            config_id=config_id,
            key=secrets.token_hex(8),
            principal=ref.principal,
            version=config.version,
            url=config.url,
            acked=acked,
            scheme=config.scheme,
            credentials=config.credentials,
            token=config.token,
        )
        return webhooks.put(connection, row)

    async def check_room(self, log: TaskLog, config: PushConfig) -> None:
        """Raise LimitExceededError if there is no room for another webhook of a task."""
        named = _config_id(config, log.ref) or ""
        await self._database.read(lambda c: self._check_room(c, log.no, log.ref, named))

    def _check_room(
        self, connection: Connection, task_no: int, ref: TaskRef, config_id: str
    ) -> None:
        of_task, mine = webhooks.counts(connection, task_no, config_id, ref.principal)
        if of_task >= self.settings.max_per_task:
            raise LimitExceededError(
                "The task has as many push notification configurations as it may have; "
                "delete one, or replace one by its id",
                limit=self.settings.max_per_task,
            )
        if mine >= self.settings.max_per_principal:
            raise LimitExceededError(
                "Too many push notification configurations are in use; wait for tasks to end, or "
                "delete some",
                limit=self.settings.max_per_principal,
            )

    async def put(self, log: TaskLog, config: PushConfig) -> HookRow:
        """Have a task's changes sent from now on.

        Of a task that waits for a person or has ended the present state is sent at once: it may
        have come to that just before.
        """
        state = await log.steady()
        last = state.changes[-1].seq if state.changes else state.unremembered
        present = state.status.state.terminal or state.status.state.interrupted
        acked = last - 1 if present else last
        row = await self._database.write(
            lambda connection: self.store(connection, log.no, log.ref, config, acked)
        )
        self.begin(row, log)
        return row

    async def of_task(self, log: TaskLog) -> list[HookRow]:
        """Return the webhooks of a task, oldest first."""
        return await self._database.read(lambda connection: webhooks.of_task(connection, log.no))

    async def find(self, log: TaskLog, config_id: str | None) -> HookRow:
        """Return a webhook of a task, or its oldest; raise TaskNotFoundError."""
        return _named(await self.of_task(log), config_id)

    async def delete(self, log: TaskLog, config_id: str) -> None:
        """Forget a webhook, and what is being sent to it; there may be none."""
        if await self._database.write(lambda c: webhooks.delete(c, log.no, config_id)):
            AUDIT.info("webhook deleted", principal=log.ref.principal, task_id=log.ref.id)
        if (delivery := self._deliveries.pop((log.no, config_id), None)) is not None:
            delivery.cancel()

    async def page(
        self, principal: Principal, task_id: str | None, most: int
    ) -> list[tuple[str, HookRow]]:
        """Return the webhooks of a caller with the ids of their tasks, newest first."""
        return await self._database.read(lambda c: webhooks.page(c, principal, task_id, most))

    async def retry(self, log: TaskLog, config_id: str) -> None:
        """Try a webhook again that was given up, or is to be tried later."""
        if (delivery := self._deliveries.pop((log.no, config_id), None)) is not None:
            delivery.cancel()

        def again(connection: Connection) -> HookRow:
            # In one transaction: what the delivery still had to store is stored before it.
            row = _named(webhooks.of_task(connection, log.no), config_id)
            if row.state != "done":
                row = replace(row, state="active", attempts=0, failing_since=None, next_at=None)
                webhooks.update(connection, row)
            return row

        row = await self._database.write(again)
        if row.state != "done":
            self._begin(row, log)

    # Receipt

    def begin(self, row: HookRow, log: TaskLog) -> None:
        """Serve a webhook that was set, in place of one with the same id."""
        host = urlsplit(row.url).hostname
        AUDIT.info("webhook set", principal=row.principal, task_id=log.ref.id, host=host)
        self._begin(row, log)

    async def recover(self, logs: Mapping[int, TaskLog]) -> int:
        """Take up what was not told when the service stopped; ``logs`` are those of open tasks."""
        found = await self._database.read(webhooks.active)
        for row in found:
            self._begin(row, logs.get(row.task_no))
        return len(found)

    def _begin(self, row: HookRow, log: TaskLog | None) -> None:
        place = (row.task_no, row.config_id)
        if place in self._deliveries:
            self._deliveries[place].cancel()
        # The log of an ended task is not kept for a receiver that is away: it holds the whole task.
        following = None if log is None else weakref.ref(log)
        delivery = asyncio.create_task(self._deliver(row, following), name=f"webhook {row.no}")
        self._deliveries[place] = delivery

        def ended(done: asyncio.Task[None]) -> None:
            self._pending.pop(row.no, None)
            if self._deliveries.get(place) is done:
                del self._deliveries[place]

        delivery.add_done_callback(ended)

    async def close(self) -> None:
        """Stop sending; what was not taken is sent after the next start."""
        deliveries = list(self._deliveries.values())
        for delivery in deliveries:
            delivery.cancel()
        await asyncio.gather(*deliveries, return_exceptions=True)

    async def _deliver(self, row: HookRow, log: weakref.ref[TaskLog] | None) -> None:
        """Send one change after the other, until the last was taken or the receiver is given up."""
        wait = 0.0
        if row.next_at is not None:  # by the clock of the day, which may have been set since
            wait = min(max(0.0, (row.next_at - now_ms()) / 1000), LAST_RETRY_SECONDS)
        ahead: deque[Entry] = deque()
        while row.state == "active":
            await asyncio.sleep(wait)
            try:
                attempt = await self._attempt(row, log or _no_log, ahead)
            except StoreUnavailableError:
                wait = FIRST_RETRY_SECONDS
                continue
            except Exception:
                logger.exception("webhook not served until the next start", webhook=row.no)
                return
            if attempt is None:
                return
            row, wait = attempt

    async def _attempt(
        self, row: HookRow, log: Callable[[], TaskLog | None], ahead: deque[Entry]
    ) -> tuple[HookRow, float] | None:
        """Send the next change; return how far it has come, and how long to wait.

        None if the webhook, or its task, was deleted. ``ahead`` are changes that were read from the
        store before their turn.
        """
        entry, following = (ahead[0] if ahead else None), log()
        if entry is None and following is not None:
            entry = await following.next_change(row.acked)
        del following
        self._pending.setdefault(row.no, time.monotonic())
        async with self._place(row):
            told = await self._notification(row, log(), entry, ahead)
            if told is None:
                return None
            ref, status, following = told.ref, told.what.status, log()
            if following is not None and status is not None and not row.attempts:
                # A person may answer before the receiver has said thanks. One that fails shows
                # nothing to anybody.
                following.note_told(status)
            del following
            outcome = await self._sender.send(row, told)
        metrics.PUSH_ATTEMPTS.labels(_kind(outcome)).inc()
        row, wait = self._after(row, told, outcome)
        if not await self._database.insist(lambda connection: webhooks.update(connection, row)):
            return None
        if outcome.ok:
            self._pending.pop(row.no, None)
            while ahead and ahead[0].seq <= row.acked:
                ahead.popleft()
        if row.state != "active":
            ended = "stopped" if outcome.gone else row.state
            metrics.PUSH_ENDED.labels(ended).inc()
            if ended != "done":
                AUDIT.info(
                    f"webhook {ended}",
                    principal=ref.principal,
                    task_id=ref.id,
                    outcome=outcome.name,
                )
        return row, wait

    async def _notification(
        self, row: HookRow, log: TaskLog | None, entry: Entry | None, ahead: deque[Entry]
    ) -> Notification | None:
        """Return what to send next; None if the task was deleted."""
        if log is not None:
            state = await log.steady()
        else:
            found = await self._database.read(lambda c: tasks.load_by_number(c, row.task_no))
            if found is None:
                return None
            state = load_task(found)
        if row.version == SNAPSHOTS:
            seq = state.changes[-1].seq if state.changes else state.seq
            return Notification(state.ref, seq, state.status.state.terminal, state, whole=True)
        if entry is None:
            replay = Replay(self._database, row.task_no, state.ref)
            while len(ahead) < CHANGES and (entries := await replay.next(replay.state.seq)):
                ahead.extend(one for one in entries if one.changes and one.seq > row.acked)
            if not ahead:  # the log is no longer kept, so the task has ended
                return Notification(state.ref, state.seq, True, state)
            entry = ahead[0]
        ends = entry.status is not None and entry.status.state.terminal
        return Notification(state.ref, entry.seq, ends, entry)

    @asynccontextmanager
    async def _place(self, row: HookRow) -> AsyncGenerator[None]:
        """Wait for a place among the notifications that are under way."""
        host = urlsplit(row.url).netloc
        limits = (
            ((row.principal, host), AT_ONCE_PER_RECEIVER),
            (row.principal, AT_ONCE_PER_PRINCIPAL),
        )
        async with AsyncExitStack() as stack:
            for key, most in limits:
                room = self._rooms.setdefault(key, asyncio.Semaphore(most))
                await stack.enter_async_context(room)
            await stack.enter_async_context(self._room)
            yield

    def _after(self, row: HookRow, told: Notification, outcome: Receipt) -> tuple[HookRow, float]:
        """Return what to store of an attempt, and how long to wait before the next."""
        row = replace(row, last_outcome=outcome.name, next_at=None)
        if outcome.ok:
            row = replace(row, acked=told.seq, attempts=0, failing_since=None)
        if outcome.gone or (outcome.ok and told.ends):
            return replace(row, state="done", credentials=None, token=None), 0.0
        if outcome.ok:
            return row, 0.0
        now = now_ms()
        since = row.failing_since or now
        row = replace(row, attempts=row.attempts + 1, failing_since=since)
        if now - since >= self.settings.give_up_hours * 3_600_000:
            return replace(row, state="failed"), 0.0
        wait = outcome.retry_after
        if wait is None:
            # Beyond the tenth the power only grows.
            wait = FIRST_RETRY_SECONDS * 4.0 ** min(row.attempts - 1, 10)
            wait = min(wait, LAST_RETRY_SECONDS) * random.uniform(0.5, 1.0)  # noqa: S311 - no secret
        wait = min(max(wait, SHORTEST_WAIT_SECONDS), LAST_RETRY_SECONDS)
        return replace(row, next_at=now + int(wait * 1000)), wait


def _config_id(config: PushConfig, ref: TaskRef) -> str | None:
    """Return the id that a webhook is to have: in 0.3 a task has one, with the task's own id."""
    return config.id or (ref.id if config.version == SNAPSHOTS else None)


def _named(rows: Sequence[HookRow], config_id: str | None) -> HookRow:
    for row in rows:
        if config_id in (None, row.config_id):
            return row
    raise TaskNotFoundError("The task has no push notification configuration with this id")


def _no_log() -> None:
    """The task had ended when its webhook was taken up."""


def _kind(outcome: Receipt) -> str:
    """Return an outcome as a label: receivers can think of many statuses."""
    return f"{outcome.name[:6]}xx" if outcome.name.startswith("http_") else outcome.name
