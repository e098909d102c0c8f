"""Deliver the changes of tasks to their webhooks: one loop in each replica, for the tasks of all.

The transaction that stores a change of state makes the webhooks of the task due (the states of a
row are in ``store.webhooks``). ``Deliveries.run`` claims webhooks that are due, sends each its next
change, and stores the outcome, which ends the claim. So a webhook gets the changes of its task in
the order of the log, one at a time, each once it is stored. A crash can repeat a notification,
under the same id, and so can a stop if the receiver is slow (``CLOSE_SECONDS``). None is lost: the
claims of a replica that stops are released, and those of one that is gone are void.

The replica that stores a change knows of it first, and usually delivers it. Others find by the
clock what was left. Webhooks slow nobody: growing text does not wake the loop, and changes that a
receiver has not taken stay in the log.

Which change is next is in ``push.changes``, when a host may be called in ``push.destination``, and
what a sender is given and returns in ``push.notification``. Rows that no caller has set tell a
person, by a sender of their own (``notices``).
"""

import asyncio
import weakref
from collections.abc import Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, replace
from urllib.parse import urlsplit

import structlog
from sqlalchemy.engine import Connection

from opencode_a2a import metrics
from opencode_a2a.bounds import wait
from opencode_a2a.clock import now_ms
from opencode_a2a.config import PushSettings
from opencode_a2a.errors import StoreUnavailableError
from opencode_a2a.log.log import LogWriter, TaskLog
from opencode_a2a.push.changes import Changes
from opencode_a2a.push.destination import Destination, RetryTimes
from opencode_a2a.push.notification import (
    Away,
    Failed,
    Gone,
    Held,
    Notification,
    Receipt,
    Sender,
    Skipped,
    Taken,
)
from opencode_a2a.store import tasks, webhooks
from opencode_a2a.store.database import Database
from opencode_a2a.store.schema import UNKNOWN_CHANGE
from opencode_a2a.store.tasks import TaskRow
from opencode_a2a.store.webhooks import HookRow
from opencode_a2a.tasks.open import OpenTasks
from opencode_a2a.telemetry import AUDIT, Trace, current_trace

logger = structlog.get_logger(__name__)

RETRIES = RetryTimes()
AT_ONCE = 32
AT_ONCE_PER_PRINCIPAL = 16
"""Notifications under way in all, and for one caller: a receiver that hangs delays no webhooks of
other callers."""
CLAIMS = 200
"""Webhooks that one statement claims."""
LEFT_SECONDS = 5.0
"""How often to look for webhooks that another replica has left."""
CLOSE_SECONDS = 1.0
"""How long notifications that are under way may take when the service stops."""
BUSY_SECONDS = 0.5
"""How long to wait if a webhook that is due could not be claimed."""


@dataclass(eq=False, slots=True)
class Delivery:
    """A webhook that this process has claimed."""

    row: HookRow
    """As it was last read or stored."""
    destination: Destination
    slots: asyncio.Semaphore
    """For notifications of the same caller."""
    running: asyncio.Task[None] | None = None
    sending: bool = False
    """Whether an attempt is under way, or its outcome is being stored."""


class Deliveries:
    """Claims the webhooks that are due, and sends each its next change."""

    def __init__(
        self,
        database: Database,
        writer: LogWriter,
        open_tasks: OpenTasks,
        settings: PushSettings,
        sender: Sender,
        notices: Sender | None = None,
    ) -> None:
        """``notices`` sends to the rows that no caller has set, if there are any."""
        self._database = database
        self._open = open_tasks
        self._settings = settings
        self._sender = sender
        self._notices = notices
        self._changes = Changes(database, open_tasks)
        self._serves = settings.enabled or notices is not None
        self._wake = asyncio.Event()
        self._may_have_missed = False
        """Whether notifications of other replicas may have been lost since the last look."""
        self._slots = asyncio.Semaphore(AT_ONCE)
        self._slots_by_principal: weakref.WeakValueDictionary[str, asyncio.Semaphore] = (
            weakref.WeakValueDictionary()
        )
        self._destinations: weakref.WeakValueDictionary[tuple[str, str], Destination] = (
            weakref.WeakValueDictionary()
        )
        """By caller and origin (scheme, host and port), for as long as a webhook goes there."""
        self._deliveries: dict[int, Delivery] = {}
        """By the number of the webhook."""
        self._finding: set[asyncio.Task[None]] = set()
        self._failing_since: int | None = None
        metrics.PUSH_OLDEST.set_function(
            lambda: (now_ms() - since) / 1000 if (since := self._failing_since) else 0.0
        )
        if self._serves:
            writer.on_due = self._on_due
            database.listeners.append(self._on_notification)

    # The loop: claim what is due

    async def run(self) -> None:
        """Deliver until this is cancelled."""
        if not self._serves:
            return
        me = self._database.replica
        try:
            if me is None:
                await self._database.write_until_stored(webhooks.release_all, me)
            while True:
                self._wake.clear()
                try:
                    if self._may_have_missed:
                        await self._find_requested_retries(me)
                    seconds = await self._claim(me)
                except StoreUnavailableError:
                    seconds = RETRIES.first
                await wait(self._wake, seconds)
        finally:
            await self._stop(me)

    async def _claim(self, me: int | None) -> float | None:
        """Begin the deliveries that are due; return how long to wait for more, None for ever."""
        only_notices = not self._settings.enabled  # another replica may have later settings
        while True:
            now = now_ms()
            latest = now + int(RETRIES.longest * 1000)
            left = await self._database.read(webhooks.backlog, me, latest, only_notices)
            metrics.PUSH_PENDING.set(left.pending)
            self._failing_since = left.failing_since
            if left.due_at is None or left.due_at > now:
                longest = None if me is None else LEFT_SECONDS
                if left.due_at is None:
                    return longest
                # By the wall clock, which may be set.
                return min((left.due_at - now) / 1000, longest or RETRIES.longest)
            rows = await self._database.write(webhooks.claim, me, now, latest, CLAIMS, only_notices)
            if not rows:  # another replica has it in a transaction
                return BUSY_SECONDS
            for row in rows:
                if not row.unknown:
                    self._begin(row)
            if unknown := [row for row in rows if row.unknown]:
                finding = asyncio.create_task(self._find_last_changes(unknown), name="webhooks")
                self._finding.add(finding)
                finding.add_done_callback(self._finding.discard)

    def _begin(self, row: HookRow) -> None:
        url = urlsplit(row.url)
        delivery = Delivery(
            row,
            self._destinations.setdefault(
                (row.principal, f"{url.scheme}://{url.netloc}"), Destination(RETRIES)
            ),
            self._slots_by_principal.setdefault(
                row.principal, asyncio.Semaphore(AT_ONCE_PER_PRINCIPAL)
            ),
        )
        self._deliveries[row.no] = delivery
        delivery.running = asyncio.create_task(self._deliver(delivery), name=f"webhook {row.no}")

        def ended(_: asyncio.Task[None]) -> None:
            if self._deliveries.get(row.no) is delivery:
                del self._deliveries[row.no]
            self._wake.set()

        delivery.running.add_done_callback(ended)

    # A delivery: send the next change of a webhook that is claimed

    async def _deliver(self, delivery: Delivery) -> None:
        """Send the next change until the receiver can be reached; then end the claim."""
        faults = 0
        while True:
            try:
                if await self._attempt(delivery):
                    return
                pause = 0.0
            except StoreUnavailableError:
                pause = RETRIES.first
            except Exception:
                # Whatever is wrong, no notification may be lost for it.
                logger.exception("webhook not served, trying again", webhook=delivery.row.no)
                faults += 1
                pause = RETRIES.after(faults)
            await asyncio.sleep(pause)

    async def _attempt(self, delivery: Delivery) -> bool:
        """Make one attempt to send the next change; return whether the claim has ended."""
        database, no = self._database, delivery.row.no
        me = database.replica
        delivery.sending = False
        async with AsyncExitStack() as slots:
            if not await self._admit(delivery, slots):
                await self._release(no)
                return True
            delivery.sending = True
            failures = delivery.destination.failures
            row, task = await database.read(_load, me, no)
            if row is None or task is None or row.unknown:
                await self._release(no)
                return True
            receipt, after = await self._send_next(row, task, delivery.destination, failures)
        name = receipt.name
        # One label for a hundred HTTP statuses.
        metrics.PUSH_ATTEMPTS.labels(f"{name[:6]}xx" if name.startswith("http_") else name).inc()
        waits = isinstance(receipt, Away) and after.state == "active"
        if not await database.write_until_stored(webhooks.update, me, after, row, keep=waits):
            await self._release(no)
            return True
        delivery.row = after
        if waits:
            await self._postpone(delivery)
        if after.state != "active":
            ended = "stopped" if isinstance(receipt, Gone) else after.state
            metrics.PUSH_ENDED.labels(ended).inc()
            if ended != "done":
                what = "notices" if row.version == webhooks.NOTICE else "webhook"
                AUDIT.info(
                    f"{what} {ended}", principal=row.principal, task_id=task.id, outcome=name
                )
        return not waits

    async def _admit(self, delivery: Delivery, stack: AsyncExitStack) -> bool:
        """Wait until a notification may be sent, and occupy slots until the stack is closed.

        Return False if the webhook was deleted, or another attempt was asked for.
        """
        destination = delivery.destination
        while True:
            begins_to_fail = destination.failures and delivery.row.failing_since is None
            if begins_to_fail and not await self._note_failing(delivery):
                return False
            seconds = None
            if (since := delivery.row.failing_since) is not None:
                given = self._settings.give_up_hours * 3600
                seconds = max(0.0, given - (now_ms() - since) / 1000)
            try:
                async with asyncio.timeout(seconds):
                    if await destination.enter(stack):
                        break
            except TimeoutError:  # out of time: make one final attempt
                break
        await stack.enter_async_context(delivery.slots)
        await stack.enter_async_context(self._slots)
        return True

    async def _note_failing(self, delivery: Delivery) -> bool:
        """Count a webhook as failing from now on, without an attempt: its host is unreachable.

        Return False if it was deleted, or another attempt was asked for.
        """
        destination, before, now = delivery.destination, delivery.row, now_ms()
        # A new notification is a reason to try a receiver that may be back, for all that wait.
        destination.hurry(RETRIES.first)
        delivery.row = replace(
            before,
            failing_since=now,
            next_at=now + int(destination.wait * 1000),
            last_outcome=destination.outcome,
        )
        return await self._database.write_until_stored(
            webhooks.update, self._database.replica, delivery.row, before, keep=True
        )

    async def _send_next(
        self, row: HookRow, task: TaskRow, destination: Destination, failures: int
    ) -> tuple[Receipt, HookRow]:
        """Send the next change; return the receipt, and the row as it has to be stored.

        ``failures`` are those of the destination when the attempt began.
        """
        try:
            notification = await self._changes.next_notification(row, task)
            status = notification.what.status
            current_trace.set(Trace.load(status.trace) if status is not None else None)
            if self._database.census.has_others:
                # A replica that was suspended while another took over must not repeat the
                # notifications of its successor.
                await self._database.check_writable("telling of")
            receipt = await self._send(row, notification)
            destination.note(receipt, failures)
        except StoreUnavailableError:
            raise
        except Exception:
            logger.exception("notification not sent, trying again", webhook=row.no)
            fault = Failed("error")
            return fault, self._after_failure(row, fault, RETRIES.after(row.attempts + 1))
        return receipt, self._after(row, notification, receipt, destination)

    async def _send(self, row: HookRow, notification: Notification) -> Receipt:
        """Have a notification sent by the sender for its row."""

        def shown() -> None:
            if (status := notification.what.status) is not None:
                self._open.note_seen(row.task_no, notification.ref.id, status)

        if row.version != webhooks.NOTICE:
            return await self._sender.send(row, notification, shown)
        if self._notices is None:  # another replica may have later settings, and targets
            return (Failed if self._database.census.has_others else Gone)("no_target")
        return await self._notices.send(row, notification, shown)

    def _after(
        self, row: HookRow, told: Notification, receipt: Receipt, destination: Destination
    ) -> HookRow:
        """Return the row as it is after an attempt."""
        match receipt:
            case Taken(name) | Skipped(name):
                row = replace(row, acked=told.seq, attempts=0, failing_since=None)
                state = "done" if told.ends else "active"
                return replace(row, state=state, next_at=None, last_outcome=name)
            case Gone(name):
                return replace(row, state="done", next_at=None, last_outcome=name)
            case Held(name, seconds):
                next_at = now_ms() + int(min(seconds, RETRIES.longest) * 1000)
                return replace(row, next_at=next_at, last_outcome=name)
            case Away():  # ``Destination.enter`` waits
                return self._after_failure(row, receipt, destination.wait)
            case Failed(retry_after=asked):
                pause = RETRIES.after(row.attempts + 1) if asked is None else asked
                pause = min(max(pause, RETRIES.shortest), RETRIES.longest)
                return self._after_failure(row, receipt, pause)

    def _after_failure(self, row: HookRow, receipt: Away | Failed, pause: float) -> HookRow:
        now = now_ms()
        since = row.failing_since or now
        given_up = now - since >= self._settings.give_up_hours * 3_600_000
        return replace(
            row,
            state="failed" if given_up else "active",
            attempts=row.attempts + 1,
            failing_since=since,
            next_at=None if given_up else now + int(pause * 1000),
            last_outcome=receipt.name,
        )

    async def _postpone(self, delivery: Delivery) -> None:
        """Store when the receiver is tried again, for the other webhooks that wait for it."""
        destination = delivery.destination
        others = [
            one.row.no
            for one in self._deliveries.values()
            if one.destination is destination and one is not delivery
            if one.row.failing_since is not None
        ]
        if others:
            next_at = now_ms() + int(destination.wait * 1000)
            await self._database.write_until_stored(
                webhooks.postpone, self._database.replica, others, next_at, destination.outcome
            )

    async def _release(self, no: int) -> None:
        """End a claim without an attempt: the webhook is gone, or not this replica's to serve."""
        me = self._database.replica
        await self._database.write_until_stored(webhooks.release, me, no)

    # What wakes the loop, or a delivery that waits for its receiver

    def _on_due(self, logs: Sequence[TaskLog]) -> None:
        self._changes.remember(logs)
        self._wake.set()

    def _on_notification(self, text: str) -> None:
        match text.split(","):
            case [""]:
                self._may_have_missed = True
                self._wake.set()
            case ["w"]:
                self._wake.set()
            case ["w" | "d" as kind, no] if no.isdecimal():
                delivery = self._deliveries.get(int(no))
                if delivery is None:
                    self._wake.set()
                elif kind == "d" and delivery.running is not None:
                    delivery.running.cancel()
                elif kind == "w":
                    delivery.row = replace(delivery.row, failing_since=None)  # as it is stored
                    delivery.destination.hurry()
            case _:
                pass

    async def _find_requested_retries(self, me: int | None) -> None:
        """Find what another replica was asked to retry, while this one waits for its receiver."""
        waiting = {no for no, one in self._deliveries.items() if one.row.failing_since is not None}
        self._may_have_missed = False
        try:
            retried = await self._database.read(webhooks.retried, me) if waiting else set[int]()
        except StoreUnavailableError:
            self._may_have_missed = True
            raise
        for no in waiting & retried:
            self._on_notification(f"w,{no}")

    # Webhooks of which nobody has noted the last change

    async def _find_last_changes(self, rows: Sequence[HookRow]) -> None:
        """Find the last changes of tasks, for webhooks of which nobody has noted them."""
        found = dict[int, int]()
        for row in rows:
            try:
                found[row.no] = await self._changes.last(row)
            except StoreUnavailableError:
                found[row.no] = UNKNOWN_CHANGE  # again
                await asyncio.sleep(RETRIES.first)
            except Exception:  # its task fails because of it, and the webhook is told of that end
                logger.exception("log for a webhook could not be read", webhook=row.no)
                found[row.no] = row.acked
        await self._database.write_until_stored(
            webhooks.store_last_changes, self._database.replica, found
        )
        self._wake.set()

    # The end

    async def _stop(self, me: int | None) -> None:
        """Finish what is being sent, if that is soon, and leave the rest to other replicas."""
        running = {one.running: one.sending for one in self._deliveries.values() if one.running}
        running |= dict.fromkeys(self._finding, False)
        for task, sending in running.items():
            if not sending:
                task.cancel()
        if running:
            await asyncio.wait(running, timeout=CLOSE_SECONDS)
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        # Always: this may have been stopped in ``_claim``, after a claim was written.
        with suppress(StoreUnavailableError, TimeoutError):  # until this replica is gone
            async with asyncio.timeout(CLOSE_SECONDS):
                await self._database.write(webhooks.release_all, me)
            self._database.notify("w")


def _load(connection: Connection, me: int | None, no: int) -> tuple[HookRow | None, TaskRow | None]:
    """Return a claimed webhook and its task."""
    row = webhooks.claimed(connection, me, no)
    return row, row and tasks.load_by_number(connection, row.task_no)
