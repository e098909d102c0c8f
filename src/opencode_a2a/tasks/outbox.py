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
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, field, replace
from typing import Protocol
from urllib.parse import urlsplit
from uuid import uuid4

import structlog
from sqlalchemy.engine import Connection

from opencode_a2a import metrics
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
from opencode_a2a.tasks.log import TaskLog, load_task
from opencode_a2a.tasks.readers import Begin, DurableReader, Replay
from opencode_a2a.tasks.state import STATE_CHANGES, Entry, TaskRef, TaskState
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
    away: bool = False
    """Nobody could be reached there, so that another notification would fare no better now."""
    retry_after: float | None = None


class Sender(Protocol):
    async def send(self, row: HookRow, notification: Notification, /) -> Receipt:
        """Send a notification, within the time that one may take."""
        ...


class Destination:
    """Where webhooks of one caller go: a host and its port.

    While nobody can be reached there, one of them tries it now and then, and all others wait for
    that: a thousand webhooks to a dead receiver cost no more than one.
    """

    def __init__(self) -> None:
        self.failures = 0
        """How often in a row nobody was reached; the next one to try does so alone."""
        self.outcome = ""
        self._room = asyncio.Semaphore(AT_ONCE_PER_RECEIVER)
        self._alone = asyncio.Lock()
        self._tried_at = self._next_at = 0.0
        self._sooner = asyncio.Event()

    @property
    def wait(self) -> float:
        """How long nobody is to try it."""
        return max(0.0, self._next_at - asyncio.get_running_loop().time())

    async def enter(self, stack: AsyncExitStack) -> bool:
        """Wait for a place, to be given back by the stack; False if it went away meanwhile."""
        while self.failures:
            # First come, first served; who gives up here makes way for the next.
            async with AsyncExitStack() as place:
                await place.enter_async_context(self._alone)
                while self.failures and (wait := self.wait):
                    self._sooner.clear()
                    with suppress(TimeoutError):
                        async with asyncio.timeout(wait):
                            await self._sooner.wait()
                if self.failures:
                    stack.push_async_exit(place.pop_all())
                    return True
        async with AsyncExitStack() as place:
            await place.enter_async_context(self._room)
            if not self.failures:
                stack.push_async_exit(place.pop_all())
            return not self.failures

    def note(self, outcome: Receipt, failures: int) -> None:
        """Note how an attempt ended that began after so many failures."""
        self._tried_at = asyncio.get_running_loop().time()
        if not outcome.away:
            self.failures = 0
        elif self.failures == failures:  # several that were under way count once
            self.failures += 1
            self.outcome = outcome.name
            self._next_at = self._tried_at + _backoff(self.failures)

    def hurry(self, after: float = 0.0) -> None:
        """Have it tried so long after the last attempt, if that is earlier."""
        self._next_at = min(self._next_at, self._tried_at + after)
        self._sooner.set()


@dataclass(eq=False, slots=True)
class Delivery:
    """A webhook that is being served, and how far that has come."""

    row: HookRow
    destination: Destination
    log: Callable[[], TaskLog | None]
    """The log of a task that is open."""
    ahead: deque[Entry] = field(default_factory=deque[Entry])
    """Changes that were read from the store before their turn."""
    hurry: asyncio.Event = field(default_factory=asyncio.Event)
    """Whether the next attempt is to be made at once."""
    running: asyncio.Task[None] | None = None

    def cancel(self) -> None:
        if self.running is not None:
            self.running.cancel()

    async def pause(self, seconds: float) -> None:
        if seconds > 0:
            with suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    await self.hurry.wait()
        self.hurry.clear()


class Outbox(DurableReader):
    """Serves the webhooks of the tasks that this replica runs."""

    def __init__(self, database: Database, settings: PushSettings, sender: Sender) -> None:
        self.settings = settings
        self._database = database
        self._sender = sender
        self._deliveries: dict[tuple[int, str], Delivery] = {}
        """The webhooks that are being served, by task and id."""
        self._pending: dict[int, float] = {}
        """Since when each webhook has something that its receiver has not taken."""
        self._room = asyncio.Semaphore(AT_ONCE)
        self._rooms: weakref.WeakValueDictionary[str, asyncio.Semaphore] = (
            weakref.WeakValueDictionary()
        )
        """Those of callers."""
        self._destinations: weakref.WeakValueDictionary[tuple[str, str], Destination] = (
            weakref.WeakValueDictionary()
        )
        """By caller, scheme, host and port, for as long as there is a webhook to tell."""
        metrics.PUSH_PENDING.set_function(lambda: len(self._pending))
        metrics.PUSH_OLDEST.set_function(
            lambda: time.monotonic() - min(self._pending.values(), default=time.monotonic())
        )

    # Configurations

    def _store(
        self, connection: Connection, task_no: int, ref: TaskRef, config: PushConfig, acked: int = 0
    ) -> HookRow:
        """Store a webhook in the transaction of the connection; raise LimitExceededError."""
        self._check_room(connection, task_no, ref, _config_id(config, ref) or "")
        return self._put(connection, task_no, ref, config, acked)

    def _put(
        self, connection: Connection, task_no: int, ref: TaskRef, config: PushConfig, acked: int
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

    async def check_room(self, log: TaskLog, config: PushConfig) -> None:
        """Raise LimitExceededError if there is no room for the webhook that a message brings."""

        def check(connection: Connection) -> None:
            if _served(connection, log, config) is None:
                named = _config_id(config, log.ref) or ""
                self._check_room(connection, log.no, log.ref, named)

        await self._database.read(check)

    def storing(self, log: TaskLog, config: PushConfig) -> Callable[[Connection], Begin | None]:
        """Return the write that stores, with a message on a task, the webhook that it brings.

        That is told what follows the message. The write returns what begins to serve it, None if a
        webhook just like it is served. It raises nothing, since entries of other tasks are stored
        by the same transaction: call ``check_room`` before.
        """
        acked = _last_change(log.state)

        def write(connection: Connection) -> Begin | None:
            if _served(connection, log, config) is not None:
                return None
            row = self._put(connection, log.no, log.ref, config, acked)
            return lambda log: self._begin(row, log)

        return write

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

    async def put(self, log: TaskLog, config: PushConfig, *, anew: bool = True) -> HookRow:
        """Have a task's changes sent from now on.

        Of a task that waits for a person or has ended the present state is sent at once: it may
        have come to that just before. Unless it is to begin ``anew``, a webhook that is just like
        it goes on, with what its receiver has not taken yet.
        """
        state = await log.firm_state()
        last = _last_change(state)
        present = state.status.state.terminal or state.status.state.interrupted
        acked = last - 1 if present else last

        def write(connection: Connection) -> tuple[HookRow, bool]:
            served = None if anew else _served(connection, log, config)
            if served is not None:
                return served, False
            return self._store(connection, log.no, log.ref, config, acked), True

        def serve(stored: tuple[HookRow, bool]) -> None:
            row, new = stored
            if new:
                self._begin(row, log)

        # Its caller may be gone by the time it is stored.
        stored = await self._database.write(write, on_late_commit=serve)
        serve(stored)
        return stored[0]

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
        found = await self._database.read(lambda c: webhooks.page(c, principal, task_id, most))

        def shown(row: HookRow) -> HookRow:
            it = self._deliveries.get((row.task_no, row.config_id))
            if row.state != "active" or it is None or not it.destination.failures:
                return row
            at = now_ms() + int(it.destination.wait * 1000)
            return replace(row, next_at=at, last_outcome=it.destination.outcome)

        return [(task_id, shown(row)) for task_id, row in found]

    async def retry(self, log: TaskLog, config_id: str) -> None:
        """Try a webhook again that was given up, or is to be tried later."""
        delivery = self._deliveries.get((log.no, config_id))
        if delivery is not None and delivery.row.state == "active":
            delivery.row = _afresh(delivery.row)  # stored with the next outcome
            delivery.hurry.set()
            delivery.destination.hurry()
            return

        def again(connection: Connection) -> HookRow:
            # In one transaction: what the delivery still had to store is stored before it.
            row = _named(webhooks.of_task(connection, log.no), config_id)
            if row.state != "done":
                row = _afresh(row)
                webhooks.update(connection, row)
            return row

        def serve(row: HookRow) -> None:
            if row.state != "done":
                self._serve(row, log)

        serve(await self._database.write(again, on_late_commit=serve))

    # The life of a durable reader

    def admit(
        self, connection: Connection, task_no: int, ref: TaskRef, push: PushConfig | None
    ) -> Begin | None:
        if push is None:
            return None
        row = self._store(connection, task_no, ref, push)
        return lambda log: self._begin(row, log)

    async def recover(self, logs: Mapping[int, TaskLog], upstreams: Collection[str] | None) -> None:
        if self.settings.enabled:
            for row in await self._database.read(lambda c: webhooks.active(c, upstreams)):
                self._serve(row, logs.get(row.task_no))

    async def give_up(self, upstream: str) -> None:
        # Without a time limit: no other replica may continue before these have stopped.
        rows = await self._database.write_until_stored(lambda c: webhooks.active(c, [upstream]))
        places = {(row.task_no, row.config_id) for row in rows}
        await self._stop([it for place, it in self._deliveries.items() if place in places])

    async def close(self) -> None:
        await self._stop(self._deliveries.values())

    async def _stop(self, deliveries: Iterable[Delivery]) -> None:
        running = [it.running for it in deliveries if it.running is not None]
        for one in running:
            one.cancel()
        await asyncio.gather(*running, return_exceptions=True)

    # Receipt

    def _begin(self, row: HookRow, log: TaskLog) -> None:
        """Serve a webhook that was set, in place of one with the same id."""
        host = urlsplit(row.url).hostname
        AUDIT.info("webhook set", principal=row.principal, task_id=log.ref.id, host=host)
        self._serve(row, log)

    def _serve(self, row: HookRow, log: TaskLog | None) -> None:
        place = (row.task_no, row.config_id)
        if place in self._deliveries:
            self._deliveries[place].cancel()
        # The log of an ended task is not kept for a receiver that is away: it holds the whole task.
        parts = urlsplit(row.url)
        where = (row.principal, f"{parts.scheme}://{parts.netloc}")
        destination = self._destinations.setdefault(where, Destination())
        it = Delivery(row, destination, _no_log if log is None else weakref.ref(log))
        it.running = asyncio.create_task(self._deliver(it), name=f"webhook {row.no}")
        self._deliveries[place] = it

        def ended(_: asyncio.Task[None]) -> None:
            self._pending.pop(row.no, None)
            if self._deliveries.get(place) is it:
                del self._deliveries[place]

        it.running.add_done_callback(ended)

    async def _deliver(self, it: Delivery) -> None:
        """Send one change after the other, until the last was taken or the receiver is given up."""
        wait, faults = 0.0, 0
        if it.row.next_at is not None:  # by the clock of the day, which may have been set since
            wait = min(max(0.0, (it.row.next_at - now_ms()) / 1000), LAST_RETRY_SECONDS)
        while it.row.state == "active":
            await it.pause(wait)
            try:
                attempt = await self._attempt(it)
            except StreamEndedError:  # the log has moved, and so has this webhook
                return
            except StoreUnavailableError:
                wait = FIRST_RETRY_SECONDS
            except Exception:
                # Whatever is wrong, what the receiver is still to be told must not be lost with it.
                logger.exception("webhook not served, trying again", webhook=it.row.no)
                faults += 1
                wait = _backoff(faults)
            else:
                if attempt is None:
                    return
                wait, faults = attempt, 0

    async def _attempt(self, it: Delivery) -> float | None:
        """Send the next change; return how long to wait before another.

        None if the webhook, or its task, was deleted.
        """
        entry, log = (it.ahead[0] if it.ahead else None), it.log()
        if entry is None and log is not None:
            entry = await log.next_change(it.row.acked)
        del log
        self._pending.setdefault(it.row.no, time.monotonic())
        notification = None
        async with AsyncExitStack() as place:
            if not await self._enter(it, place):
                return None
            failures = it.destination.failures
            try:
                notification = await self._notification(it, entry)
                if notification is None:
                    return None
                log = it.log()
                if log is not None and notification.what.status is not None and not it.row.attempts:
                    # A person may answer before the receiver has said thanks. One that fails shows
                    # nothing to anybody.
                    log.note_seen(notification.what.status)
                del log
                if self._database.has_other_replicas:
                    # A replica that slept while another took over must not repeat what its
                    # successor has sent.
                    await self._database.check_writable("telling of")
                outcome = await self._sender.send(it.row, notification)
                it.destination.note(outcome, failures)
            except StoreUnavailableError:
                raise
            except Exception:
                logger.exception("notification not sent, trying again", webhook=it.row.no)
                outcome = Receipt("error")
        metrics.PUSH_ATTEMPTS.labels(_kind(outcome)).inc()
        before = it.row
        row, wait = self._after(before, notification, outcome)
        if not await self._database.write_until_stored(
            lambda connection: webhooks.update(connection, row)
        ):
            return None
        # Whoever asked for a retry meanwhile did not know of this.
        it.row = row if it.row is before or row.state == "done" else _afresh(row)
        if outcome.ok:
            self._pending.pop(row.no, None)
            while it.ahead and it.ahead[0].seq <= row.acked:
                it.ahead.popleft()
        if row.state != "active":
            ended = "stopped" if outcome.gone else row.state
            metrics.PUSH_ENDED.labels(ended).inc()
            if ended != "done":
                task = None
                with suppress(StoreUnavailableError):
                    task = await self._database.read(lambda c: tasks.load_by_number(c, row.task_no))
                AUDIT.info(
                    f"webhook {ended}",
                    principal=row.principal,
                    task_id=task and task.id,
                    outcome=outcome.name,
                )
        return wait

    async def _notification(self, it: Delivery, entry: Entry | None) -> Notification | None:
        """Return what to send next; None if the task was deleted."""
        row, ahead = it.row, it.ahead
        if (log := it.log()) is not None:
            state = await log.firm_state()
        else:
            found = await self._database.read(lambda c: tasks.load_by_number(c, row.task_no))
            if found is None:
                return None
            state = load_task(found)
        if row.version == SNAPSHOTS:
            seq = state.state_changes[-1].seq if state.state_changes else state.seq
            return Notification(state.ref, seq, state.status.state.terminal, state, whole=True)
        if entry is None:
            replay = Replay(self._database, row.task_no, state.ref)
            while len(ahead) < STATE_CHANGES and (entries := await replay.next(replay.state.seq)):
                ahead.extend(one for one in entries if one.changes_state and one.seq > row.acked)
            if not ahead:  # the log is no longer kept, so the task has ended
                return Notification(state.ref, state.seq, True, state)
            entry = ahead[0]
        ends = entry.status is not None and entry.status.state.terminal
        return Notification(state.ref, entry.seq, ends, entry)

    async def _enter(self, it: Delivery, place: AsyncExitStack) -> bool:
        """Wait for a place among the notifications under way; False if the webhook was deleted."""
        while True:
            if it.destination.failures and it.row.failing_since is None:
                # From here on its time runs, and it can be seen that it fails, without an attempt.
                # It is news of a receiver that may be back: others do not wait for long then.
                it.destination.hurry(FIRST_RETRY_SECONDS)
                row = replace(it.row, failing_since=now_ms(), last_outcome=it.destination.outcome)
                it.row = row
                if not await self._database.write_until_stored(lambda c: webhooks.update(c, row)):  # noqa: B023
                    return False
            try:
                async with asyncio.timeout(self._left(it.row)):
                    if await it.destination.enter(place):
                        break
            except TimeoutError:  # one attempt of its own is the last
                break
        mine = self._rooms.setdefault(it.row.principal, asyncio.Semaphore(AT_ONCE_PER_PRINCIPAL))
        await place.enter_async_context(mine)
        await place.enter_async_context(self._room)
        return True

    def _left(self, row: HookRow) -> float | None:
        """Return how many seconds are left until a webhook that fails is given up."""
        if row.failing_since is None:
            return None
        return max(0.0, self.settings.give_up_hours * 3600 - (now_ms() - row.failing_since) / 1000)

    def _after(
        self, row: HookRow, notification: Notification | None, outcome: Receipt
    ) -> tuple[HookRow, float]:
        """Return what to store of an attempt, and how long to wait before the next."""
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
        if now - since >= self.settings.give_up_hours * 3_600_000:
            return replace(row, state="failed"), 0.0
        if outcome.away:  # it waits at its destination
            return row, 0.0
        wait = _backoff(row.attempts) if outcome.retry_after is None else outcome.retry_after
        wait = min(max(wait, SHORTEST_WAIT_SECONDS), LAST_RETRY_SECONDS)
        return replace(row, next_at=now + int(wait * 1000)), wait


def _backoff(attempts: int) -> float:
    """Return how long to wait after so many failures in a row."""
    # Beyond the tenth the power only grows.
    wait = FIRST_RETRY_SECONDS * 4.0 ** min(attempts - 1, 10)
    return min(wait, LAST_RETRY_SECONDS) * random.uniform(0.5, 1.0)  # noqa: S311 - no secret


def _afresh(row: HookRow) -> HookRow:
    """Return a webhook as if it had not failed yet."""
    return replace(row, state="active", attempts=0, failing_since=None, next_at=None)


def _config_id(config: PushConfig, ref: TaskRef) -> str | None:
    """Return the id that a webhook is to have: in 0.3 a task has one, with the task's own id."""
    return config.id or (ref.id if config.version == SNAPSHOTS else None)


def _last_change(state: TaskState) -> int:
    return state.state_changes[-1].seq if state.state_changes else state.unremembered


def _served(connection: Connection, log: TaskLog, config: PushConfig) -> HookRow | None:
    """Return the webhook of a task that is being told what this one would be, and like it."""
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


def _no_log() -> None:
    """The task had ended when its webhook was taken up."""


def _kind(outcome: Receipt) -> str:
    """Return an outcome as a label: receivers can think of many statuses."""
    return f"{outcome.name[:6]}xx" if outcome.name.startswith("http_") else outcome.name
