"""Logs of tasks that another replica runs, for readers of this one.

A ``RemoteLog`` is folded from the stored entries of a task. Readers follow it as they follow a log
that this replica writes: numbers, entries and cursors are the same.

``RemoteLogs`` feeds all of them with entries as they are stored. One query at a time reads the new
entries of the logs that a notification named, or of all logs when no notification came for a while.
A log is fed for as long as anything refers to it, and kept ``KEPT_SECONDS`` longer, since clients
often come back soon.
"""

import asyncio
import time
from collections.abc import Callable, Iterable
from weakref import WeakValueDictionary

import structlog

from opencode_a2a import metrics
from opencode_a2a.bounds import wait
from opencode_a2a.clock import now_ms
from opencode_a2a.errors import StoreUnavailableError, StreamEndedError
from opencode_a2a.log.log import ReadableLog, TaskLog
from opencode_a2a.log.state import Cursor, Entry, LogEvent, TaskState
from opencode_a2a.log.stored import load_segment, ref_of
from opencode_a2a.store import tasks as task_rows
from opencode_a2a.store.database import Database
from opencode_a2a.store.tasks import Segment, TaskRow

logger = structlog.get_logger(__name__)

KEPT_SECONDS = 60.0
"""How long a log is kept after its last reader has left."""
RELEASE_SECONDS = 10.0
"""How often ``RemoteLogs.run`` looks for logs that need not be kept any more."""
AHEAD_SECONDS = 1.0
"""How long a reader waits for an entry that another replica has shown to be stored."""
RETRY_SECONDS = 0.25
LOOKED, TOLD, ASKED = "looked", "told", "asked"
"""Why a query is made: by the clock, by a notification, for a caller. Metrics count them apart, and
one by the clock also looks for stored entries that disappeared."""
TAIL_SEGMENTS = 1_000
"""Segments that one query reads, of all the logs that it is about."""
LOGS = 500
"""Logs that one query is about."""


class RemoteLog(ReadableLog):
    """The log of a task that another replica writes: every entry is stored before it is here.

    When this replica takes the task over, the task gets a log that is written here. This one
    continues for the readers that it has: it becomes a reader of the new log's stored entries.
    """

    def __init__(self, row: TaskRow, logs: "RemoteLogs") -> None:
        super().__init__(row.no, TaskState(ref_of(row)), logs.database)
        self._logs = logs
        self.kept_until = 0.0
        """When it is released if it is not in use, by the clock of ``RemoteLogs``."""
        self.last: Segment | None = None
        """The segment that was read last, unless ``own`` has given later entries."""
        self.own: TaskLog | None = None
        """The log that this replica writes, since it took the task over."""

    def extend(self, events: Iterable[tuple[int, LogEvent]]) -> None:
        """Append the next stored events, each with its time, and show them."""
        before = self.state.status
        entries = [self.state.apply(event, at) for at, event in events]
        if self.state.status is not before:
            self.seen.note_entries(before, entries)
        self._tail += entries
        self.mark_stored(self.state.seq)

    def extend_by(self, segment: Segment) -> int | None:
        """Append a segment unless its entries are here already; return the time of the first.

        Two queries that run at the same time may both return it.
        """
        if segment.first_seq <= self.state.seq:
            return None
        events = load_segment(segment, self.state.seq)
        self.extend(events)
        self.last = segment
        return events[0][0]

    def taken_over(self, log: TaskLog) -> None:
        """Feed the readers of the task from the log that this replica writes now."""
        self.own = log
        log.readers_of_stored.add(self)
        self._logs.want([self.no])

    def offer(self, entries: list[Entry]) -> None:
        """Take entries of ``own``, or have them read if some before them are missing."""
        if entries[0].seq == self.state.seq + 1:
            self.extend((entry.at, entry.event) for entry in entries)
            self.last = None  # an older segment by now, and there is no need to look for it
        else:
            self.wake()

    def wake(self) -> None:
        """Have new entries read."""
        self._logs.want([self.no])

    def end(self, error: StreamEndedError) -> None:
        """Do nothing: ``RemoteLogs.end_reading`` ends the readers of this log."""

    def note_seen_number(self, newest: int) -> None:
        """Note it, and tell the replica that runs the task: the answer may come there."""
        if self.own is not None:  # without other replicas nothing is sent
            self.own.note_seen_number(newest)
        if self.seen.note(newest):
            self.database.notify(f"t,{newest},{self.ref.id}")

    @property
    def in_use(self) -> bool:
        """Whether a reader or a caller waits for further entries."""
        return bool(self.readers or self.readers_of_stored or self.stops)

    async def firm_state(self) -> TaskState:
        """Return the state with every entry that is stored by now; valid until the next await."""
        if not self.state.status.state.terminal:
            await self._logs.read_stored(self)
        return self.state

    async def reach(self, cursor: Cursor) -> None:
        """Wait a moment for the entry of a cursor, which its replica may have shown, not stored."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + AHEAD_SECONDS
        while self.state.seq < cursor.seq and self.state.epoch == cursor.epoch:
            if loop.time() > deadline:  # the entry is lost, and the reader gets the task anew
                return
            await asyncio.sleep(0.05)
            await self.firm_state()


class RemoteLogs:
    """Finds, feeds and releases the remote logs of this replica."""

    def __init__(
        self,
        database: Database,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.database = database
        self._clock = clock
        self.logs: WeakValueDictionary[int, RemoteLog] = WeakValueDictionary()
        """All remote logs that anything refers to, by the number of the task."""
        self._kept: dict[int, RemoteLog] = {}
        """Logs that are kept for clients that may come back."""
        self._wanted: set[int] = set()
        """Numbers of logs that may have new entries."""
        self._cause = TOLD
        """Why they may have."""
        self._wake = asyncio.Event()
        self._draining = False
        database.listeners.append(self._on_notification)

    async def opened(self, row: TaskRow) -> RemoteLog:
        """Return the log of a task, with every entry that is stored by now."""
        log = self.logs.get(row.no)
        if log is None:
            log = self.logs[row.no] = RemoteLog(row, self)
            if self._draining:
                log.stop_waiting()
        self._keep(log)
        await log.firm_state()
        return log

    def end_reading(self) -> None:
        """End all reading of remote logs that is under way."""
        for log in list(self.logs.values()):
            log.end_reading()

    def stop_waiting(self) -> None:
        """Release everyone who waits for a task to stop: the service is stopping."""
        self._draining = True
        for log in list(self.logs.values()):
            log.stop_waiting()

    # Feeding

    def _on_notification(self, text: str) -> None:
        if not text:
            self._cause = LOOKED
            self.want(self.logs.keys())
        elif text.startswith("l,"):
            self.want(int(no) for no in text[2:].split(",") if no.isdecimal())

    def want(self, numbers: Iterable[int]) -> None:
        """Have new entries of these logs read, if there are remote logs of them."""
        if self.logs:
            self._wanted.update(no for no in numbers if no in self.logs)
            if self._wanted:
                self._wake.set()

    async def run(self) -> None:
        """Feed the remote logs, and release those that nobody reads any more."""
        released = self._clock()
        while True:
            await wait(self._wake, RELEASE_SECONDS)
            self._wake.clear()
            if self._clock() - released >= RELEASE_SECONDS:
                self.release()
                released = self._clock()
            wanted, self._wanted = self._wanted, set()
            cause, self._cause = self._cause, TOLD
            try:
                numbers = list(wanted)
                for first in range(0, len(numbers), LOGS):
                    await self._feed(numbers[first : first + LOGS], cause)
            except StoreUnavailableError:
                self.want(wanted)
                await asyncio.sleep(RETRY_SECONDS)

    async def _feed(self, numbers: Iterable[int], cause: str) -> None:
        logs = {no: log for no in numbers if (log := self.logs.get(no)) is not None}
        again = cause == LOOKED
        """Whether the last segment of each log is read again, to see that it is still there."""
        while logs := {no: log for no, log in logs.items() if not log.end_shown}:
            after = {no: log.state.seq for no, log in logs.items()}
            known = {no: log.last for no, log in logs.items() if log.last is not None}
            if again:
                after |= {no: last.first_seq - 1 for no, last in known.items()}
            metrics.TAIL_QUERIES.labels(cause).inc()
            found = await self.database.read(task_rows.load_tails, after, TAIL_SEGMENTS)
            whole = len(found) < TAIL_SEGMENTS
            if again and whole:
                stored = {*found}
                for no in [no for no, last in known.items() if last not in stored]:
                    # After a failover the database can lack what the one before had committed.
                    logger.warning("stored entries disappeared; reading the log again", task_no=no)
                    self._forget(logs.pop(no))
            began: list[int] = []
            for segment in found:
                if (log := logs.get(segment.task_no)) is None:
                    continue
                try:
                    at = log.extend_by(segment)
                except Exception:  # one log that cannot be read must not end the others
                    logger.exception("log could not be read", task_no=log.no)
                    self._forget(logs.pop(log.no))
                else:
                    began += [] if at is None else [at]
            if began:
                metrics.TAIL_SECONDS.observe(max(0, now_ms() - min(began)) / 1000)
            if whole:
                return
            again = False  # the next query is for the segments that this one had no room for

    async def read_stored(self, log: RemoteLog) -> None:
        """Read every entry of a log that is stored by now."""
        while True:
            metrics.TAIL_QUERIES.labels(ASKED).inc()
            segments = await self.database.read(
                task_rows.load_segments, log.no, log.state.seq + 1, TAIL_SEGMENTS
            )
            for segment in segments:
                log.extend_by(segment)
            if len(segments) < TAIL_SEGMENTS:
                return

    # Keeping

    def _keep(self, log: RemoteLog) -> None:
        log.kept_until = self._clock() + KEPT_SECONDS
        self._kept[log.no] = log

    def release(self) -> None:
        """Release the logs that nobody has read for a while; one that is referred to stays fed."""
        now = self._clock()
        for log in list(self._kept.values()):
            if log.in_use:
                self._keep(log)
            elif log.end_shown or log.kept_until <= now:
                del self._kept[log.no]

    def _forget(self, log: RemoteLog) -> None:
        """Discard a log, and have its readers come again for one that is read anew."""
        self._kept.pop(log.no, None)
        self.logs.pop(log.no, None)
        log.move()
