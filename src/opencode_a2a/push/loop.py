"""Deliver the changes of tasks to their webhooks: one loop in each replica, for the tasks of all.

The transaction that stores a change of state makes the webhooks of the task due
(``webhooks.note_changes``). ``Deliveries.run`` claims webhooks that are due, sends each its next
change, and stores the outcome, which ends the claim. So a webhook gets the changes of its task in
the order of the log, one at a time, each once it is stored. A crash can repeat a notification,
under the same id, and so can a stop if the receiver is slow (``CLOSE_SECONDS``). None is lost: the
claims of a replica that stops are released, and those of one that is gone are void.

The replica that stores a change knows of it first, and usually delivers it. Others find by the
clock what was left. Webhooks slow nobody: growing text does not wake the loop, and changes that a
receiver has not taken stay in the log.

A ``Sender`` decides how a notification looks and how it is sent (``push.sender``). Rows that no
caller has set tell a person, by a sender of their own (``notices``).
"""

import asyncio
import random
import weakref
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol
from urllib.parse import urlsplit

import structlog
from sqlalchemy.engine import Connection

from opencode_a2a import metrics
from opencode_a2a.bounds import Recent, wait
from opencode_a2a.clock import now_ms
from opencode_a2a.config import PushSettings
from opencode_a2a.errors import StoreUnavailableError
from opencode_a2a.log.log import LogForgottenError, LogWriter, TaskLog
from opencode_a2a.log.state import Entry, State, TaskRef, TaskState
from opencode_a2a.log.stored import Replay, load_task, ref_of, stored_changes
from opencode_a2a.store import tasks, webhooks
from opencode_a2a.store.database import Database
from opencode_a2a.store.schema import UNKNOWN_CHANGE
from opencode_a2a.store.tasks import TaskRow
from opencode_a2a.store.webhooks import HookRow
from opencode_a2a.tasks.open import OpenTasks
from opencode_a2a.tasks.webhooks import SNAPSHOTS
from opencode_a2a.telemetry import AUDIT, Trace, current_trace

logger = structlog.get_logger(__name__)

AT_ONCE = 32
AT_ONCE_PER_PRINCIPAL = 16
AT_ONCE_PER_RECEIVER = 4
"""Notifications under way in all, for one caller, and for one caller to one host: a receiver that
hangs hardly delays other webhooks of its caller, and none of other callers."""
CLAIMS = 200
"""Webhooks that one statement claims."""
LEFT_SECONDS = 5.0
"""How often to look for webhooks that another replica has left."""
CLOSE_SECONDS = 1.0
"""How long notifications that are under way may take when the service stops."""
BUSY_SECONDS = 0.5
"""How long to wait if a webhook that is due could not be claimed."""
REMEMBERED = 256
"""Tasks whose latest changes are remembered, so that they need not be read from the log."""


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
    """What became of one attempt to send a notification, or a notice to a person.

    Senders and targets make it; ``Deliveries._after`` says what follows from it for the row.
    """

    name: str
    """``ok``, ``http_503``, ``timeout``, …"""
    ok: bool = False
    gone: bool = False
    """The receiver wants no more notifications."""
    away: bool = False
    """The host could not be reached, so another notification would fail too."""
    retry_after: float | None = None
    """Seconds that the receiver wants us to wait."""
    hold: float | None = None
    """Nothing was sent, which is no failure: seconds until it may be."""
    tried: bool = True
    """Whether the receiver was called at all."""


class Sender(Protocol):
    async def send(
        self, row: HookRow, notification: Notification, shown: Callable[[], None], /
    ) -> Receipt:
        """Make one attempt to send a notification, within a time limit.

        If it shows what the task asks, ``shown`` is called as soon as it was sent: a person may
        answer before the receiver has replied.
        """
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
        if not outcome.tried:
            return
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


class KnownChanges(NamedTuple):
    """Consecutive changes of a task's state."""

    after: int
    """Sequence number of the change before them."""
    entries: Sequence[Entry]

    def next(self, acked: int, stored: int) -> Entry | None:
        """Return the first change after an entry; None if it is not among these, or not stored."""
        if acked < self.after:
            return None
        return next((entry for entry in self.entries if acked < entry.seq <= stored), None)


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
        self._changes: Recent[int, KnownChanges] = Recent(REMEMBERED)
        """The latest changes of tasks that have webhooks, by the number of the task."""
        self._failing_since: int | None = None
        metrics.PUSH_OLDEST.set_function(
            lambda: (now_ms() - since) / 1000 if (since := self._failing_since) else 0.0
        )
        if self._serves:
            writer.on_due = self._on_due
            database.listeners.append(self._on_notification)

    # What there is to do

    def _on_due(self, logs: Sequence[TaskLog]) -> None:
        for log in logs:
            state = log.state
            self._changes[log.no] = KnownChanges(state.unremembered, [*state.state_changes])
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
                    delivery.row = _afresh(delivery.row)  # as it is stored
                    delivery.destination.hurry()
            case _:
                pass

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
                        await self._find_retries(me)
                    seconds = await self._claim(me)
                except StoreUnavailableError:
                    seconds = RETRIES.first
                await wait(self._wake, seconds)
        finally:
            await self._stop(me)

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

    async def _find_retries(self, me: int | None) -> None:
        """Find what another replica was asked to retry, while this one waits for its receiver."""
        self._may_have_missed = False
        waiting = {no for no, one in self._deliveries.items() if one.row.failing_since is not None}
        if waiting:
            for no in waiting.intersection(await self._database.read(webhooks.retried, me)):
                self._on_notification(f"w,{no}")

    async def _claim(self, me: int | None) -> float | None:
        """Begin the deliveries that are due; return how long to wait for more, None for ever."""
        while True:
            now = now_ms()
            latest = now + int(RETRIES.longest * 1000)
            left = await self._database.read(webhooks.backlog, me, latest)
            metrics.PUSH_PENDING.set(left.pending)
            self._failing_since = left.failing_since
            if left.due_at is None or left.due_at > now:
                longest = None if me is None else LEFT_SECONDS
                if left.due_at is None:
                    return longest
                # By the wall clock, which may be set.
                return min((left.due_at - now) / 1000, longest or RETRIES.longest)
            rows = await self._database.write(webhooks.claim, me, now, latest, CLAIMS)
            if not rows:  # another replica has it in a transaction
                return BUSY_SECONDS
            for row in rows:
                if row.changed != UNKNOWN_CHANGE:
                    self._begin(row)
            if unknown := [row for row in rows if row.changed == UNKNOWN_CHANGE]:
                finding = asyncio.create_task(self._find_last_changes(unknown), name="webhooks")
                self._finding.add(finding)
                finding.add_done_callback(self._finding.discard)

    async def _find_last_changes(self, rows: Sequence[HookRow]) -> None:
        """Find the last changes of tasks, for webhooks of which nobody has noted them."""
        found = dict[int, int]()
        for row in rows:
            try:
                found[row.no] = await self._last_change(row)
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

    async def _last_change(self, row: HookRow) -> int:
        """Return the number of the last change of a webhook's task that is stored."""
        task = await self._database.read_until_available(tasks.load_by_number, row.task_no)
        if task is None:
            return row.acked
        if State(task.state).terminal:  # and the webhook has not been told yet
            return max(load_task(task).seq, row.acked + 1)
        return (await self._state(task)).last_change

    async def _state(self, task: TaskRow) -> TaskState:
        """Return a task with nothing in it that is not stored."""
        if (running := self._open.get(task.id)) is not None:
            return await running.log.firm_state()
        if State(task.state).terminal:
            return load_task(task)
        return await Replay(self._database, task.no, ref_of(task)).all()

    # Deliveries

    def _begin(self, row: HookRow) -> None:
        url = urlsplit(row.url)
        delivery = Delivery(
            row,
            self._destinations.setdefault(
                (row.principal, f"{url.scheme}://{url.netloc}"), Destination()
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
        database, destination, no = self._database, delivery.destination, delivery.row.no
        me = database.replica
        delivery.sending = False
        async with AsyncExitStack() as slot:
            if not await self._wait_for_slot(delivery, slot):
                return await self._release(no)
            delivery.sending = True
            failures = destination.failures
            row, task = await database.read(_load, me, no)
            if row is None or task is None or row.changed == UNKNOWN_CHANGE:
                return await self._release(no)
            try:
                notification = await self._next_notification(row, task)
                status = notification.what.status
                current_trace.set(Trace.load(status.trace) if status is not None else None)
                if database.census.has_others:
                    # A replica that was suspended while another took over must not repeat the
                    # notifications of its successor.
                    await database.check_writable("telling of")
                outcome = await self._send(row, notification)
                destination.note(outcome, failures)
            except StoreUnavailableError:
                raise
            except Exception:
                logger.exception("notification not sent, trying again", webhook=no)
                notification, outcome = None, Receipt("error")
        # One label for a hundred HTTP statuses.
        name = outcome.name
        metrics.PUSH_ATTEMPTS.labels(f"{name[:6]}xx" if name.startswith("http_") else name).inc()
        after = self._after(row, notification, outcome, destination)
        waits = outcome.away and after.state == "active"
        if not await database.write_until_stored(webhooks.update, me, after, row, keep=waits):
            return await self._release(no)
        delivery.row = after
        if waits:
            await self._postpone(delivery)
        if after.state != "active":
            ended = "stopped" if outcome.gone else after.state
            metrics.PUSH_ENDED.labels(ended).inc()
            if ended != "done":
                what = "notices" if row.version == webhooks.NOTICE else "webhook"
                AUDIT.info(
                    f"{what} {ended}", principal=row.principal, task_id=task.id, outcome=name
                )
        return not waits

    async def _send(self, row: HookRow, notification: Notification) -> Receipt:
        """Have a notification sent by the sender for its row."""

        def shown() -> None:
            if (status := notification.what.status) is not None:
                self._open.note_seen(row.task_no, notification.ref.id, status)

        if row.version != webhooks.NOTICE:
            if not self._settings.enabled:  # since the webhook was set
                return Receipt("disabled", hold=RETRIES.longest, tried=False)
            return await self._sender.send(row, notification, shown)
        if self._notices is None:  # another replica may have later settings, and targets
            gone = not self._database.census.has_others
            return Receipt("no_target", gone=gone, tried=False)
        return await self._notices.send(row, notification, shown)

    async def _release(self, no: int) -> bool:
        """End a claim without an attempt: the webhook is gone, or not this replica's to serve."""
        me = self._database.replica
        await self._database.write_until_stored(webhooks.release, me, no)
        return True

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

    async def _next_notification(self, row: HookRow, task: TaskRow) -> Notification:
        """Return the next notification of a webhook."""
        ref, whole = ref_of(task), row.version == SNAPSHOTS
        if whole and row.failing_since is not None:  # what it has missed is in the present state
            state = await self._state(task)
            ends, seq = state.status.state.terminal, state.last_change or state.seq
            return Notification(ref, seq, ends, state, whole)
        entry = self._remembered(task).next(row.acked, row.changed)
        if entry is None:
            changes = await stored_changes(self._database, task.no, ref, row.acked)
            if not changes:
                if not State(task.state).terminal:
                    raise LogForgottenError(task.id)
                state = load_task(task)
                return Notification(ref, max(state.seq, row.changed), True, state, whole)
            self._changes[task.no] = KnownChanges(row.acked, changes)
            entry = changes[0]
        status = entry.status
        ends = status is not None and status.state.terminal
        if whole and status is not None:
            task_then = replace(await self._state(task), status=status)
            return Notification(ref, entry.seq, ends, task_then, whole)
        return Notification(ref, entry.seq, ends, entry)

    def _remembered(self, task: TaskRow) -> KnownChanges:
        if (running := self._open.get(task.id)) is not None:
            state = running.log.state
            return KnownChanges(state.unremembered, state.state_changes)
        return self._changes.get(task.no, KnownChanges(UNKNOWN_CHANGE, ()))

    async def _wait_for_slot(self, delivery: Delivery, stack: AsyncExitStack) -> bool:
        """Wait until a notification may be sent, and occupy slots until the stack is closed.

        Return False if the webhook was deleted, or another attempt was asked for.
        """
        database, destination = self._database, delivery.destination
        while True:
            row = delivery.row
            if destination.failures and row.failing_since is None:
                before = row
                # The webhook counts as failing from now on, without an attempt of its own. A new
                # notification is a reason to try a receiver that may be back, for all that wait.
                destination.hurry(RETRIES.first)
                now = now_ms()
                row = replace(
                    row,
                    failing_since=now,
                    next_at=now + int(destination.wait * 1000),
                    last_outcome=destination.outcome,
                )
                if not await database.write_until_stored(
                    webhooks.update, database.replica, row, before, keep=True
                ):
                    return False
                delivery.row = row
            seconds = None
            if row.failing_since is not None:
                given = self._settings.give_up_hours * 3600
                seconds = max(0.0, given - (now_ms() - row.failing_since) / 1000)
            try:
                async with asyncio.timeout(seconds):
                    if await destination.enter(stack):
                        break
            except TimeoutError:  # out of time: make one final attempt
                break
        await stack.enter_async_context(delivery.slots)
        await stack.enter_async_context(self._slots)
        return True

    def _after(
        self,
        row: HookRow,
        notification: Notification | None,
        outcome: Receipt,
        destination: Destination,
    ) -> HookRow:
        """Return the row after an attempt."""
        row = replace(row, last_outcome=outcome.name, next_at=None)
        ends = outcome.gone
        if outcome.ok and notification is not None:
            row = replace(row, acked=notification.seq, attempts=0, failing_since=None)
            ends = notification.ends
        if ends:
            return replace(row, state="done", credentials=None, token=None)
        if outcome.ok:
            return row
        now = now_ms()
        if outcome.hold is not None:
            return replace(row, next_at=now + int(min(outcome.hold, RETRIES.longest) * 1000))
        since = row.failing_since or now
        row = replace(row, attempts=row.attempts + 1, failing_since=since)
        if now - since >= self._settings.give_up_hours * 3_600_000:
            return replace(row, state="failed")
        if outcome.away:  # ``Destination.enter`` waits
            pause = destination.wait
        else:
            pause = outcome.retry_after
            pause = RETRIES.after(row.attempts) if pause is None else pause
            pause = min(max(pause, RETRIES.shortest), RETRIES.longest)
        return replace(row, next_at=now + int(pause * 1000))


def _load(connection: Connection, me: int | None, no: int) -> tuple[HookRow | None, TaskRow | None]:
    """Return a claimed webhook and its task."""
    row = webhooks.claimed(connection, me, no)
    return row, row and tasks.load_by_number(connection, row.task_no)


def _afresh(row: HookRow) -> HookRow:
    """Return a webhook as if it had not failed yet."""
    return replace(row, state="active", attempts=0, failing_since=None, next_at=None)
