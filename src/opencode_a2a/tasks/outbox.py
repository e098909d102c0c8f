"""Webhooks: each change of a task's state is sent to the URLs that its caller has set.

``Outbox`` is a durable reader of the logs (``readers.DurableReader``). A webhook gets the changes
of a task in the order of the log, one at a time, each once it is stored. Its position moves on when
the receiver has taken a change, so a crash can repeat a notification, under the same id, and loses
none. Webhooks slow nobody: growing text does not wake them, and changes that a receiver has not
taken stay in the log.

A ``Sender`` decides how a notification looks and how it is sent (``server.push``).
"""

import asyncio
import random
import secrets
import time
import weakref
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, field, replace
from typing import Protocol
from urllib.parse import urlsplit
from uuid import uuid4

import sqlalchemy as sa
import structlog
from sqlalchemy import ColumnElement
from sqlalchemy.engine import Connection

from opencode_a2a import metrics
from opencode_a2a.bounds import wait
from opencode_a2a.clock import now_ms
from opencode_a2a.config import PushSettings
from opencode_a2a.errors import (
    LimitExceededError,
    StoreUnavailableError,
    StreamEndedError,
    TaskNotFoundError,
)
from opencode_a2a.ids import Principal
from opencode_a2a.messages import PushConfig
from opencode_a2a.store import tasks, webhooks
from opencode_a2a.store.database import Database
from opencode_a2a.store.webhooks import HookRow
from opencode_a2a.tasks.log import ChangesInStoreError, ReadableLog, load_task, stored_changes
from opencode_a2a.tasks.readers import Begin, DurableReader
from opencode_a2a.tasks.state import Entry, TaskRef, TaskState
from opencode_a2a.telemetry import AUDIT

logger = structlog.get_logger(__name__)

AT_ONCE = 32
AT_ONCE_PER_PRINCIPAL = 16
AT_ONCE_PER_RECEIVER = 4
"""Notifications under way in all, for one caller, and for one caller to one host: a receiver that
hangs hardly delays other webhooks of its caller, and none of other callers."""
SNAPSHOTS = "0.3"
"""The version whose notifications show the whole task, and so only its present state."""


@dataclass(frozen=True, slots=True)
class RetryTimes:
    """How many seconds pass between two attempts."""

    first: float = 5.0
    """After the first failure; each further one waits four times as long."""
    longest: float = 3600.0
    shortest: float = 1.0
    """Even if the receiver asks for less."""

    def after(self, failures: int) -> float:
        """Return how long to wait after so many failures in a row."""
        # A limit to the exponent: after hundreds of failures the power would overflow.
        wait = self.first * 4.0 ** min(failures - 1, 10)
        return min(wait, self.longest) * random.uniform(0.5, 1.0)  # noqa: S311 - no secret


RETRIES = RetryTimes()


@dataclass(frozen=True, slots=True)
class Notification:
    """A change of state to send."""

    ref: TaskRef
    seq: int
    """The position of the webhook once the receiver has taken it."""
    ends: bool
    """Whether it is the last one of the task."""
    what: Entry | TaskState
    """The entry that changed the state; the task as it is now if the whole task is shown, or if
    the log with that entry is no longer kept."""
    whole: bool = False
    """Whether to show the whole task, or its status alone."""


@dataclass(frozen=True, slots=True)
class Receipt:
    """The outcome of one attempt."""

    name: str
    """``ok``, ``http_503``, ``timeout``, …"""
    ok: bool = False
    gone: bool = False
    """The receiver wants no more notifications."""
    away: bool = False
    """The host could not be reached, so that another notification would fare no better now."""
    retry_after: float | None = None
    """Seconds that the receiver wants us to wait."""


class Sender(Protocol):
    async def send(self, row: HookRow, notification: Notification, /) -> Receipt:
        """Make one attempt to send a notification, within a time limit."""
        ...


class Destination:
    """A host and port to which webhooks of one caller go.

    While it cannot be reached, one webhook at a time tries, and the others wait for the result: a
    thousand webhooks to a dead receiver cost no more than one.
    """

    def __init__(self) -> None:
        self.failures = 0
        """How many attempts in a row did not reach the host; above 0 one tries at a time."""
        self.outcome = ""
        """The name of the last such attempt's outcome."""
        self._slots = asyncio.Semaphore(AT_ONCE_PER_RECEIVER)
        self._alone = asyncio.Lock()
        """Held by the webhook that tries."""
        self._tried_at = self._next_at = 0.0
        """When the last attempt ended and when the next begins, by the clock of the event loop."""
        self._sooner = asyncio.Event()
        """Set when ``_next_at`` has changed."""

    @property
    def wait(self) -> float:
        """Seconds until the next attempt."""
        return max(0.0, self._next_at - asyncio.get_running_loop().time())

    async def enter(self, stack: AsyncExitStack) -> bool:
        """Wait until a notification may be sent, and occupy a slot until the stack is closed.

        Return False if the host became unreachable meanwhile.
        """
        while self.failures:
            # First come, first served; a webhook that gives up here makes way for the next.
            async with AsyncExitStack() as slot:
                await slot.enter_async_context(self._alone)
                while self.failures and (seconds := self.wait):
                    self._sooner.clear()
                    await wait(self._sooner, seconds)
                if self.failures:
                    stack.push_async_exit(slot.pop_all())
                    return True
        async with AsyncExitStack() as slot:
            await slot.enter_async_context(self._slots)
            if not self.failures:
                stack.push_async_exit(slot.pop_all())
            return not self.failures

    def note(self, outcome: Receipt, failures: int) -> None:
        """Note the outcome of an attempt that began after so many failures."""
        self._tried_at = asyncio.get_running_loop().time()
        if not outcome.away:
            self.failures = 0
        elif self.failures == failures:  # several that were under way count once
            self.failures += 1
            self.outcome = outcome.name
            self._next_at = self._tried_at + RETRIES.after(self.failures)

    def hurry(self, after: float = 0.0) -> None:
        """Bring the next attempt forward to so many seconds after the last one."""
        self._next_at = min(self._next_at, self._tried_at + after)
        self._sooner.set()


class Outbox(DurableReader):
    """The webhooks of the tasks that this replica runs: sets them, and starts their delivery."""

    def __init__(self, database: Database, settings: PushSettings, sender: Sender) -> None:
        self.settings = settings
        self.database = database
        self.sender = sender
        self.pending: dict[int, float] = {}
        """When each webhook got a notification that its receiver has not taken, by its number."""
        self.slots = asyncio.Semaphore(AT_ONCE)
        self._slots_by_principal: weakref.WeakValueDictionary[str, asyncio.Semaphore] = (
            weakref.WeakValueDictionary()
        )
        self._destinations: weakref.WeakValueDictionary[tuple[str, str], Destination] = (
            weakref.WeakValueDictionary()
        )
        """By caller and origin (scheme, host and port), for as long as a webhook goes there."""
        self._deliveries: dict[tuple[int, str], WebhookDelivery] = {}
        """By task number and id of the webhook."""
        metrics.PUSH_PENDING.set_function(lambda: len(self.pending))
        metrics.PUSH_OLDEST.set_function(
            lambda: time.monotonic() - min(self.pending.values(), default=time.monotonic())
        )

    # Configurations

    async def put(self, log: ReadableLog, config: PushConfig, *, anew: bool = True) -> HookRow:
        """Set a webhook, and send it the changes of the task from now on.

        If the task has ended or waits for a person, its present state is sent at once: that may
        have happened just before. Without ``anew`` an equal webhook stays as it is, with the
        changes that its receiver has not taken yet.
        """
        state = await log.firm_state()
        last = _last_change(state)
        present = state.status.state.terminal or state.status.state.interrupted
        acked = last - 1 if present else last

        def write(connection: Connection) -> tuple[HookRow, bool]:
            equal = None if anew else _find_equal(connection, log, config)
            if equal is not None:
                return equal, False
            self._check_limits(connection, log.no, log.ref, config)
            return _insert(connection, log.no, log.ref, config, acked), True

        def start(stored: tuple[HookRow, bool]) -> None:
            row, new = stored
            # An equal one that is not delivered was stored by a message that failed afterwards.
            if new or not self._is_delivering(row):
                self._start_new(row, log)

        # The caller may have gone away by the time it is stored.
        stored = await self.database.write_in_time(write, start)
        start(stored)
        return stored[0]

    def insert(
        self, connection: Connection, task_no: int, ref: TaskRef, config: PushConfig
    ) -> Begin:
        """Store a webhook with a new task; return the function that starts its delivery.

        Raise LimitExceededError, which refuses the task.
        """
        self._check_limits(connection, task_no, ref, config)
        row = _insert(connection, task_no, ref, config, acked=0)
        return lambda log: self._start_new(row, log)

    def inserting(
        self, log: ReadableLog, config: PushConfig
    ) -> Callable[[Connection], Begin | None]:
        """Return the write that stores a webhook with a message on an existing task.

        The webhook is sent the changes after the message. The write returns the function that
        starts its delivery, or None if an equal webhook is being delivered. It raises nothing,
        since the same transaction stores entries of other tasks: call ``check_limits`` before.
        """
        acked = _last_change(log.state)

        def write(connection: Connection) -> Begin | None:
            row = _find_equal(connection, log, config)
            if row is None:
                row = _insert(connection, log.no, log.ref, config, acked)
            elif self._is_delivering(row):
                return None
            return lambda log: self._start_new(row, log)

        return write

    async def check_limits(self, log: ReadableLog, config: PushConfig) -> None:
        """Raise LimitExceededError if a message may not bring this webhook to its task."""

        def check(connection: Connection) -> None:
            if _find_equal(connection, log, config) is None:
                self._check_limits(connection, log.no, log.ref, config)

        await self.database.read(check)

    def _check_limits(
        self, connection: Connection, task_no: int, ref: TaskRef, config: PushConfig
    ) -> None:
        config_id = _config_id(config, ref) or ""
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

    async def of_task(self, log: ReadableLog) -> list[HookRow]:
        """Return the webhooks of a task, oldest first."""
        return await self.database.read(webhooks.of_task, log.no)

    async def find(self, log: ReadableLog, config_id: str | None) -> HookRow:
        """Return a webhook of a task, or its oldest; raise TaskNotFoundError."""
        return _named(await self.of_task(log), config_id)

    async def delete(self, log: ReadableLog, config_id: str) -> None:
        """Delete a webhook, if it is there, and stop sending to it."""
        if await self.database.write(webhooks.delete, log.no, config_id):
            AUDIT.info("webhook deleted", principal=log.ref.principal, task_id=log.ref.id)
        if (delivery := self._deliveries.pop((log.no, config_id), None)) is not None:
            delivery.cancel()

    async def page(
        self, principal: Principal, task_id: str | None, most: int
    ) -> list[tuple[str, HookRow]]:
        """Return the webhooks of a caller with the ids of their tasks, newest first."""
        found = await self.database.read(webhooks.page, principal, task_id, most)

        def shown(row: HookRow) -> HookRow:
            delivery = self._deliveries.get((row.task_no, row.config_id))
            if row.state != "active" or delivery is None or not delivery.destination.failures:
                return row
            at = now_ms() + int(delivery.destination.wait * 1000)
            return replace(row, next_at=at, last_outcome=delivery.destination.outcome)

        return [(task_id, shown(row)) for task_id, row in found]

    async def retry(self, log: ReadableLog, config_id: str) -> None:
        """Try a webhook at once that was given up, or waits for its next attempt."""
        delivery = self._deliveries.get((log.no, config_id))
        if delivery is not None and delivery.row.state == "active":
            delivery.row = _afresh(delivery.row)  # stored with the next outcome
            delivery.hurry()
            return

        def again(connection: Connection) -> HookRow:
            # In one transaction, after whatever the delivery still had to store.
            row = _named(webhooks.of_task(connection, log.no), config_id)
            if row.state != "done":
                row = _afresh(row)
                webhooks.update(connection, row)
            return row

        def start(row: HookRow) -> None:
            if row.state != "done":
                self._start_delivery(row, log)

        start(await self.database.write_in_time(again, start))

    # The life of a durable reader

    async def recover(
        self, logs: Mapping[int, ReadableLog], upstreams: Collection[str] | None
    ) -> None:
        if self.settings.enabled:
            for row in await self.database.read(webhooks.active, upstreams):
                self._start_delivery(row, logs.get(row.task_no))

    async def give_up(self, upstream: str) -> None:
        # Without a time limit: no other replica may continue before these have stopped.
        rows = await self.database.read_until_available(webhooks.active, [upstream])
        keys = {(row.task_no, row.config_id) for row in rows}
        await self._stop([one for key, one in self._deliveries.items() if key in keys])

    def unread(self) -> ColumnElement[bool]:
        return webhooks.unread() if self.settings.enabled else sa.false()

    async def close(self) -> None:
        await self._stop(self._deliveries.values())

    async def _stop(self, deliveries: Iterable["WebhookDelivery"]) -> None:
        running = [one.running for one in deliveries if one.running is not None]
        for one in running:
            one.cancel()
        await asyncio.gather(*running, return_exceptions=True)

    # Deliveries

    async def start_stored(self, log: ReadableLog) -> None:
        """Start the delivery of webhooks of a task that are stored and not delivered yet."""
        for row in await self.of_task(log):
            if row.state == "active" and not self._is_delivering(row):
                self._start_new(row, log)

    def _is_delivering(self, row: HookRow) -> bool:
        delivery = self._deliveries.get((row.task_no, row.config_id))
        return delivery is not None and delivery.row.no == row.no

    def _start_new(self, row: HookRow, log: ReadableLog) -> None:
        """Start the delivery of a webhook that was just set, in place of one with the same id."""
        host = urlsplit(row.url).hostname
        AUDIT.info("webhook set", principal=row.principal, task_id=log.ref.id, host=host)
        self._start_delivery(row, log)

    def _start_delivery(self, row: HookRow, log: ReadableLog | None) -> None:
        key = (row.task_no, row.config_id)
        if key in self._deliveries:
            self._deliveries[key].cancel()
        url = urlsplit(row.url)
        receiver = (row.principal, f"{url.scheme}://{url.netloc}")
        delivery = WebhookDelivery(
            self,
            row,
            # A weak reference: a log holds the whole task, and is not kept for a receiver that is
            # away.
            (lambda: None) if log is None else weakref.ref(log),
            self._destinations.setdefault(receiver, Destination()),
            self._slots_by_principal.setdefault(
                row.principal, asyncio.Semaphore(AT_ONCE_PER_PRINCIPAL)
            ),
        )
        delivery.running = asyncio.create_task(delivery.run(), name=f"webhook {row.no}")
        self._deliveries[key] = delivery

        def ended(_: asyncio.Task[None]) -> None:
            self.pending.pop(row.no, None)
            if self._deliveries.get(key) is delivery:
                del self._deliveries[key]

        delivery.running.add_done_callback(ended)


@dataclass(eq=False, slots=True)
class WebhookDelivery:
    """Sends the changes of a task to one webhook, in a task of its own."""

    outbox: Outbox
    row: HookRow
    """As it is stored; ``acked`` is its position in the log."""
    log: Callable[[], ReadableLog | None]
    """Returns the log; None if it is no longer in memory: the task has ended or has moved."""
    destination: Destination
    slots: asyncio.Semaphore
    """For notifications of the same caller."""
    running: asyncio.Task[None] | None = None
    _ahead: deque[Entry] = field(default_factory=deque[Entry])
    """The next changes, if they were read from the store."""
    _hurry: asyncio.Event = field(default_factory=asyncio.Event)
    """Ends a pause: a person wants another attempt."""

    def cancel(self) -> None:
        if self.running is not None:
            self.running.cancel()

    def hurry(self) -> None:
        """Have the next attempt made at once."""
        self._hurry.set()
        self.destination.hurry()

    async def run(self) -> None:
        """Send one change after the other, until the last is taken or the receiver is given up."""
        pause, faults = 0.0, 0
        if self.row.next_at is not None:  # by the wall clock, which may have been set since
            pause = min(max(0.0, (self.row.next_at - now_ms()) / 1000), RETRIES.longest)
        while self.row.state == "active":
            if pause > 0:
                await wait(self._hurry, pause)
            self._hurry.clear()
            try:
                attempt = await self._attempt()
            except StreamEndedError:  # the log has moved, and so has this webhook
                return
            except StoreUnavailableError:
                pause = RETRIES.first
            except Exception:
                # Whatever is wrong, no notification may be lost for it.
                logger.exception("webhook not served, trying again", webhook=self.row.no)
                faults += 1
                pause = RETRIES.after(faults)
            else:
                if attempt is None:
                    return
                pause, faults = attempt, 0

    async def _attempt(self) -> float | None:
        """Make one attempt to send the next change; return how long to wait before another.

        None if the webhook or its task was deleted.
        """
        outbox, database = self.outbox, self.outbox.database
        entry, log = (self._ahead[0] if self._ahead else None), self.log()
        if entry is None and log is not None:
            with suppress(ChangesInStoreError):  # ``_notification`` reads them
                entry = await log.next_change(self.row.acked)
        del log
        outbox.pending.setdefault(self.row.no, time.monotonic())
        notification = None
        async with AsyncExitStack() as slot:
            if not await self._wait_for_slot(slot):
                return None
            failures = self.destination.failures
            try:
                notification = await self._notification(entry)
                if notification is None:
                    return None
                log, status = self.log(), notification.what.status
                if log is not None and status is not None and not self.row.attempts:
                    # Before it is sent: a person may answer before the receiver has replied. A
                    # repeated attempt shows nothing new.
                    log.note_seen(status)
                del log
                if database.census.has_others:
                    # A replica that was suspended while another took over must not repeat the
                    # notifications of its successor.
                    await database.check_writable("telling of")
                outcome = await outbox.sender.send(self.row, notification)
                self.destination.note(outcome, failures)
            except (StoreUnavailableError, StreamEndedError):
                raise
            except Exception:
                logger.exception("notification not sent, trying again", webhook=self.row.no)
                outcome = Receipt("error")
        # One label for a hundred HTTP statuses.
        name = outcome.name
        metrics.PUSH_ATTEMPTS.labels(f"{name[:6]}xx" if name.startswith("http_") else name).inc()
        before = self.row
        row, pause = self._after(before, notification, outcome)
        if not await database.write_until_stored(webhooks.update, row):
            return None
        # A retry that was asked for meanwhile counts from this outcome.
        self.row = row if self.row is before or row.state == "done" else _afresh(row)
        if outcome.ok:
            outbox.pending.pop(row.no, None)
            while self._ahead and self._ahead[0].seq <= row.acked:
                self._ahead.popleft()
        if row.state != "active":
            ended = "stopped" if outcome.gone else row.state
            metrics.PUSH_ENDED.labels(ended).inc()
            if ended != "done":
                task = None
                with suppress(StoreUnavailableError):
                    task = await database.read(tasks.load_by_number, row.task_no)
                AUDIT.info(
                    f"webhook {ended}",
                    principal=row.principal,
                    task_id=task and task.id,
                    outcome=name,
                )
        return pause

    async def _notification(self, entry: Entry | None) -> Notification | None:
        """Return the next notification; None if the task was deleted.

        Raise StreamEndedError if another replica continues an open task.
        """
        row, database = self.row, self.outbox.database
        if (log := self.log()) is not None:
            state = await log.firm_state()
        else:
            found = await database.read(tasks.load_by_number, row.task_no)
            if found is None:
                return None
            state = load_task(found)
            if not state.status.state.terminal:  # this replica has given it up
                raise StreamEndedError(cause="moved", task_id=state.ref.id)
        if row.version == SNAPSHOTS:
            seq = state.state_changes[-1].seq if state.state_changes else state.seq
            return Notification(state.ref, seq, state.status.state.terminal, state, whole=True)
        if entry is None:
            self._ahead.extend(await stored_changes(database, row.task_no, state.ref, row.acked))
            if not self._ahead:  # the log is no longer kept, so the task has ended
                return Notification(state.ref, state.seq, True, state)
            entry = self._ahead[0]
        ends = entry.status is not None and entry.status.state.terminal
        return Notification(state.ref, entry.seq, ends, entry)

    async def _wait_for_slot(self, stack: AsyncExitStack) -> bool:
        """Wait until a notification may be sent, and occupy slots until the stack is closed.

        Return False if the webhook was deleted.
        """
        while True:
            if self.destination.failures and self.row.failing_since is None:
                # The webhook counts as failing from now on, without an attempt of its own. A new
                # notification is a reason to try a receiver that may be back, for all that wait.
                self.destination.hurry(RETRIES.first)
                outcome = self.destination.outcome
                self.row = replace(self.row, failing_since=now_ms(), last_outcome=outcome)
                if not await self.outbox.database.write_until_stored(webhooks.update, self.row):
                    return False
            seconds = None
            if (since := self.row.failing_since) is not None:
                given = self.outbox.settings.give_up_hours * 3600
                seconds = max(0.0, given - (now_ms() - since) / 1000)
            try:
                async with asyncio.timeout(seconds):
                    if await self.destination.enter(stack):
                        break
            except TimeoutError:  # its time is up; it makes one attempt of its own, the last
                break
        await stack.enter_async_context(self.slots)
        await stack.enter_async_context(self.outbox.slots)
        return True

    def _after(
        self, row: HookRow, notification: Notification | None, outcome: Receipt
    ) -> tuple[HookRow, float]:
        """Return the row after an attempt, and how long to wait before the next."""
        row = replace(row, last_outcome=outcome.name, next_at=None)
        ends = outcome.gone
        if outcome.ok and notification is not None:
            row = replace(row, acked=notification.seq, attempts=0, failing_since=None)
            ends = notification.ends
        if ends:
            return replace(row, state="done", credentials=None, token=None), 0.0
        if outcome.ok:
            return row, 0.0
        now = now_ms()
        since = row.failing_since or now
        row = replace(row, attempts=row.attempts + 1, failing_since=since)
        if now - since >= self.outbox.settings.give_up_hours * 3_600_000:
            return replace(row, state="failed"), 0.0
        if outcome.away:  # ``Destination.enter`` waits
            return row, 0.0
        pause = outcome.retry_after
        pause = RETRIES.after(row.attempts) if pause is None else pause
        pause = min(max(pause, RETRIES.shortest), RETRIES.longest)
        return replace(row, next_at=now + int(pause * 1000)), pause


def _afresh(row: HookRow) -> HookRow:
    """Return a webhook as if it had not failed yet."""
    return replace(row, state="active", attempts=0, failing_since=None, next_at=None)


def _insert(
    connection: Connection, task_no: int, ref: TaskRef, config: PushConfig, acked: int
) -> HookRow:
    row = HookRow(
        task_no=task_no,
        config_id=_config_id(config, ref) or str(uuid4()),
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


def _config_id(config: PushConfig, ref: TaskRef) -> str | None:
    """Return the id of a webhook, if it is decided: in 0.3 a task has one, with the task's id."""
    return config.id or (ref.id if config.version == SNAPSHOTS else None)


def _last_change(state: TaskState) -> int:
    return state.state_changes[-1].seq if state.state_changes else state.unremembered


def _find_equal(connection: Connection, log: ReadableLog, config: PushConfig) -> HookRow | None:
    """Return the active webhook of a task that equals a configuration."""
    wanted = (config.version, config.url, config.scheme, config.credentials, config.token)
    for row in webhooks.of_task(connection, log.no):
        named = _config_id(config, log.ref) in (None, row.config_id)
        alike = (row.version, row.url, row.scheme, row.credentials, row.token) == wanted
        if row.state == "active" and named and alike:
            return row
    return None


def _named(rows: Sequence[HookRow], config_id: str | None) -> HookRow:
    for row in rows:
        if config_id in (None, row.config_id):
            return row
    raise TaskNotFoundError("The task has no push notification configuration with this id")
