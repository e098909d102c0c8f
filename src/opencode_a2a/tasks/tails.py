"""Tasks that another replica runs, as they are read here.

A ``RemoteLog`` is folded from the stored entries of a task, and followed by any number of readers
as a log of this replica is: numbers, entries and cursors are those of the replica that writes it.
``Tails`` feeds them: one query at a time asks for what is new in all logs that a notification
named, or in all of them when nothing was heard for a while. A log is fed for as long as somebody
refers to it, and kept a while longer, since many who read a task come back soon.
"""

import asyncio
import time
from collections.abc import Callable, Iterable
from weakref import WeakValueDictionary

import structlog
from sqlalchemy.engine import Connection

from opencode_a2a import metrics
from opencode_a2a.errors import StoreUnavailableError, StreamEndedError
from opencode_a2a.ids import Principal, TaskId
from opencode_a2a.store import tasks as task_rows
from opencode_a2a.store.database import Database, Write
from opencode_a2a.store.tasks import Segment, TaskRow
from opencode_a2a.tasks.log import LogWriter, TaskLog, ref_of
from opencode_a2a.tasks.state import Cursor, Entry, LogEvent, Status, TaskState, load_entries
from opencode_a2a.telemetry import now_ms

logger = structlog.get_logger(__name__)

KEPT_SECONDS = 60.0
"""How long a log is kept after its last reader."""
RELEASE_SECONDS = 10.0
"""How often those are looked for that need not be kept any more."""
AHEAD_SECONDS = 1.0
"""Time for what a reader was shown elsewhere to be stored."""
RETRY_SECONDS = 0.25
LOOKED, TOLD, ASKED = "looked", "told", "asked"
"""Why there is a query."""
SEGMENTS = 1_000
"""Runs of entries that are read at once."""
LOGS = 500
"""Logs that are looked at at once."""


class RemoteLog(TaskLog):
    """The log of a task that another replica writes: all that is stored of it.

    When this replica takes the task over it has a log of its own for it, and this one goes on for
    the readers that it has: it is one of the new log's ``readers_of_stored``.
    """

    def __init__(self, row: TaskRow, tails: "Tails", writer: LogWriter) -> None:
        super().__init__(row.no, TaskState(ref_of(row)), writer, tails.database)
        self._tails = tails
        self.kept_until = 0.0
        self.last: Segment | None = None
        """What was read last."""
        self.own: TaskLog | None = None
        """The log that this replica has of the task since it took it over."""

    def append_now(self, events: Iterable[LogEvent], also: Write | None = None) -> bool:
        raise AssertionError("the log of a task is written by the replica that runs it")

    def take(self, events: Iterable[tuple[int, LogEvent]]) -> None:
        """Fold entries that follow those that are here, and show them."""
        self._tail += [self.state.apply(event, at) for at, event in events]
        self.stored(self.state.seq)

    def take_segment(self, segment: Segment) -> int | None:
        """Take a run of entries unless it is here; return the time of its first."""
        if segment.first_seq <= self.state.seq:
            return None
        events = load_entries(segment.data)
        self.take(events)
        self.last = segment
        return events[0][0]

    def offer(self, entries: list[Entry]) -> None:
        """Take what this replica itself has stored, which runs the task now."""
        if entries and entries[0].seq == self.state.seq + 1:
            self.take((entry.at, entry.event) for entry in entries)
        else:
            self._tails.want([self.no])

    def end(self, error: StreamEndedError) -> None:
        """Do nothing: ``Tails.end_reading`` ends the readers of this log."""

    def note_seen(self, status: Status) -> None:
        """Note it, and tell the replica that runs the task: a plain answer may come to it."""
        before = self._seen
        super().note_seen(status)
        if self.own is not None:  # without other replicas nothing is told
            self.own.note_seen(status)
        if self._seen > before:
            self.database.notify(f"t,{self._seen},{self.ref.id}")

    @property
    def in_use(self) -> bool:
        """Whether somebody waits for what comes next."""
        return bool(self.readers or self.readers_of_stored or self._stopping or self._changing)

    async def firm_state(self) -> TaskState:
        """Return the state with all that is stored by now; valid until the next await."""
        if not self.state.status.state.terminal:
            await self._tails.catch_up(self)
        return self.state

    async def reach(self, cursor: Cursor) -> None:
        """Wait a moment for what a reader has seen where the task runs, and is not stored yet."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + AHEAD_SECONDS
        while self.state.seq < cursor.seq and self.state.epoch == cursor.epoch:
            if loop.time() > deadline:  # it is lost, and the reader is given the task anew
                return
            await asyncio.sleep(0.05)
            await self.firm_state()


class Tails:
    def __init__(
        self,
        database: Database,
        writer: LogWriter,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.database = database
        self._writer = writer
        self._clock = clock
        self.logs: WeakValueDictionary[int, RemoteLog] = WeakValueDictionary()
        """All that are followed, by the number of the task."""
        self._kept: dict[int, RemoteLog] = {}
        self._wanted: set[int] = set()
        """Those in which there is something new, as far as is known."""
        self._cause = TOLD
        self._wake = asyncio.Event()
        self._stopping_soon = False
        database.listeners.append(self._on_notification)

    async def log(self, row: TaskRow) -> RemoteLog:
        """Return the log of a task, with all that is stored of it by now."""
        log = self.logs.get(row.no)
        if log is None:
            log = self.logs[row.no] = RemoteLog(row, self, self._writer)
            if self._stopping_soon:
                log.stop_waiting()
        self._keep(log)
        await log.firm_state()
        return log

    def seen(self, principal: Principal) -> dict[TaskId, int]:
        """Return what readers here were shown of what tasks ask: see ``TaskLog.seen_number``."""
        return {
            log.ref.id: log.seen_number
            for log in list(self.logs.values())
            if log.ref.principal == principal and log.state.status.pending
        }

    def taken_over(self, log: TaskLog) -> None:
        """Go on with the readers of a task that this replica runs from now on."""
        if (remote := self.logs.get(log.no)) is not None:
            remote.own = log
            log.readers_of_stored.add(remote)
            self.want([log.no])

    def end_reading(self) -> None:
        """End all reading that is under way."""
        for log in list(self.logs.values()):
            log.end_reading()

    def stop_waiting(self) -> None:
        """Let nobody wait any longer for a task: the service is about to stop."""
        self._stopping_soon = True
        for log in list(self.logs.values()):
            log.stop_waiting()

    # What is new

    def _on_notification(self, text: str) -> None:
        if not text:
            self._cause = LOOKED
            self.want(self.logs.keys())
        elif text.startswith("l,"):
            self.want(int(no) for no in text[2:].split(",") if no.isdecimal())

    def want(self, numbers: Iterable[int]) -> None:
        """Look at the logs of these tasks, if they are followed."""
        if self.logs:
            self._wanted.update(no for no in numbers if no in self.logs)
            if self._wanted:
                self._wake.set()

    async def run(self) -> None:
        """Feed the logs that are followed, and let go of those that nobody reads any more."""
        while True:
            try:
                async with asyncio.timeout(RELEASE_SECONDS if self._kept else None):
                    await self._wake.wait()
            except TimeoutError:
                self.release()
                continue
            self._wake.clear()
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
        """Whether what was read last is read again, to see that it is still there."""
        while logs := {no: log for no, log in logs.items() if not log.end_shown}:
            after = {no: log.state.seq for no, log in logs.items()}
            known = {no: log.last for no, log in logs.items() if log.last is not None}
            if again:
                after |= {no: last.first_seq - 1 for no, last in known.items()}
            metrics.TAIL_QUERIES.labels(cause).inc()
            found = await self.database.read(
                lambda connection, after=after: task_rows.load_tails(connection, after, SEGMENTS)
            )
            whole = len(found) < SEGMENTS
            if again and whole:
                for no in known.keys() - {last.task_no for last in {*known.values()} & {*found}}:
                    # A database that took over from another can lack what that had committed.
                    logger.warning("a log is not what it was", task_no=no)
                    self._forget(logs.pop(no))
            began: list[int] = []
            for segment in found:
                if (log := logs.get(segment.task_no)) is None:
                    continue
                try:
                    at = log.take_segment(segment)
                except Exception:  # one log that cannot be read must not end the others
                    logger.exception("log not read", task_no=log.no)
                    self._forget(logs.pop(log.no))
                else:
                    began += [] if at is None else [at]
            if began:
                metrics.TAIL_SECONDS.observe(max(0, now_ms() - min(began)) / 1000)
            if whole:
                return
            again = False  # there is too much to do both at once

    async def catch_up(self, log: RemoteLog) -> None:
        """Read all that is stored of a log by now."""
        while True:
            first = log.state.seq + 1

            def read(connection: Connection, first: int = first) -> list[Segment]:
                return task_rows.load_segments(connection, log.no, first, SEGMENTS)

            metrics.TAIL_QUERIES.labels(ASKED).inc()
            segments = await self.database.read(read)
            for segment in segments:
                log.take_segment(segment)
            if len(segments) < SEGMENTS:
                return

    # What is kept

    def _keep(self, log: RemoteLog) -> None:
        log.kept_until = self._clock() + KEPT_SECONDS
        self._kept[log.no] = log

    def release(self) -> None:
        """Let go of what nobody has read for a while; whoever still refers to it is fed."""
        now = self._clock()
        for log in list(self._kept.values()):
            if log.in_use:
                self._keep(log)
            elif log.end_shown or log.kept_until <= now:
                del self._kept[log.no]

    def _forget(self, log: RemoteLog) -> None:
        """Have the readers of a log come again, for one that is read anew."""
        self._kept.pop(log.no, None)
        self.logs.pop(log.no, None)
        log.move()
