"""The log of a task: one owner appends to it, any number of readers follow it.

A reader is a place in the log. New entries are pushed to the readers that can take them at once;
all share one tail of recent entries, so that a slow reader costs nothing and slows nobody: it
catches up from the tail, or from the store if it has fallen behind the tail.
"""

import asyncio
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import orjson
import structlog
from sqlalchemy.engine import Connection

from opencode_a2a import metrics
from opencode_a2a.errors import StoreUnavailableError, StreamEndedError
from opencode_a2a.events import Grew, Usage, UsageCounted
from opencode_a2a.ids import ContextId, Principal, TaskId
from opencode_a2a.store import spending
from opencode_a2a.store import tasks as task_rows
from opencode_a2a.store.database import Database, Write
from opencode_a2a.store.spending import Spent
from opencode_a2a.store.tasks import Move, Segment, TaskRow
from opencode_a2a.tasks.state import (
    FIRM,
    OPEN,
    TERMINAL,
    Entry,
    LogEvent,
    State,
    Status,
    TaskRef,
    TaskState,
    TerminalError,
    dump_archive,
    dump_entries,
    load_state,
)
from opencode_a2a.telemetry import ROUTINE, now_ms

logger = structlog.get_logger(__name__)

GROUP_SECONDS = 0.05
GROUP_ENTRIES = 2_000
TAIL = 128
"""Entries kept in memory for readers that are close behind."""
BATCH = 256
"""Entries handed to a reader at once."""
TELL_AT_ONCE = 390
"""Logs that one notification names: a number has up to 19 digits, and there is room for 7,900."""
STORE_SECONDS = 4.0
"""How long a reader waits for the store to take what it is about to read."""
LEFT = "The service is shutting down. The task continues; fetch it later, or send it again."

_OPEN = {state: metrics.TASKS.labels(state) for state in OPEN}
_ENDED = {state: metrics.TASKS_ENDED.labels(state) for state in TERMINAL}

UNREAD_SECONDS = 1.5
"""Time in which nobody reads a request and answers it, and an answer to an earlier one may come."""


class LiveReader(Protocol):
    """A reader that has every entry that its log can give it so far: ``readers.LogReader``."""

    def offer(self, entries: list[Entry], /) -> None:
        """Take the next entries; without any, find out what has happened to the log."""
        ...

    def end(self, error: StreamEndedError, /) -> None:
        """Stop reading, with an error that tells the client to come again."""
        ...


def _note(ref: TaskRef, before: Status, after: Status, at: int) -> None:
    """Log what an operator follows of a task: its start, what it asks, its end."""
    if after.state is State.WORKING and before.state is State.SUBMITTED:
        ROUTINE.info("task started", task_id=ref.id, principal=ref.principal, title=after.subject)
    for asked in after.pending:
        if asked not in before.pending:
            what = ", ".join(asked.patterns) or " / ".join(q.question for q in asked.questions)
            name = asked.permission or asked.type
            logger.info("task asks", task_id=ref.id, what=f"{name}: {what}", until=asked.expires_at)
    if after.state is State.AUTH_REQUIRED is not before.state:
        logger.info("task asks", task_id=ref.id, what="a sign-in to the model provider")
    if after.state.terminal:
        usage = after.usage and after.usage.own + (after.usage.children or Usage())
        ROUTINE.info(
            "task ended",
            task_id=ref.id,
            context_id=ref.context_id,
            principal=ref.principal,
            state=after.state.value,
            seconds=(at - ref.created_at) / 1000,
            input_tokens=usage.read if usage else 0,
            output_tokens=usage.written if usage else 0,
            cost=usage.cost if usage else 0.0,
            reason=after.failure and after.failure.message,
        )


class TaskLog:
    """The log of one task, and the state that it leads to."""

    def __init__(self, no: int, state: TaskState, writer: "LogWriter", database: Database) -> None:
        self.no = no
        self.ref = state.ref
        self.state = state
        self.database = database
        self._writer = writer
        self._tail: list[Entry] = []
        self._base = state.seq + 1
        """Sequence number of the first entry in the tail."""
        self._shown = state.seq
        """Readers see entries up to here."""
        self._stored = state.seq
        self._firm = 0
        """Sequence number of the last entry that has to be stored before it is shown."""
        self._stop = state.seq if state.status.state.interrupted else 0
        """Where the task last stopped: ended, or began to wait for a person."""
        self._stopping: set[asyncio.Future[None]] = set()
        self._changing: set[asyncio.Future[None]] = set()
        """Those who wait for a change of state to be stored, and for nothing else."""
        self._stopping_soon = False
        self._moved = False
        self.readers: set[LiveReader] = set()
        """Those that have seen all there is."""
        self.readers_of_stored: set[LiveReader] = set()
        """The same of those that are shown nothing before it is stored."""
        # What was asked before a restart was shown then, as far as anybody knows. After a request
        # that nobody answered in time it is shown once more: the late answer may be on its way.
        self._seen = self._seen_before = (
            0
            if self._unanswered
            else max((one.number or 0 for one in state.status.pending), default=0)
        )
        self._told_at = -UNREAD_SECONDS

    def note_seen(self, status: Status) -> None:
        """Note that a reader was given this status, with what it asks."""
        if status.pending:
            self.note_seen_number(max(one.number or 0 for one in status.pending))

    def note_seen_number(self, newest: int) -> None:
        """Note that a reader was given what is asked up to a number, here or in another replica."""
        if newest > self._seen:
            self._seen_before, self._seen = self._seen, newest
            self._told_at = asyncio.get_running_loop().time()

    @property
    def seen_number(self) -> int:
        """The highest number of a request that a reader was given, and had the time to read.

        After a request that nobody answered in time, an answer that comes at once may well be the
        late one; after an answer, the next one can only be for what is asked now.
        """
        unread = asyncio.get_running_loop().time() - self._told_at < UNREAD_SECONDS
        return self._seen_before if unread and self._unanswered else self._seen

    @property
    def _unanswered(self) -> bool:
        """Whether nobody answered what was asked last, before what is asked now."""
        last = next(reversed(self.state.settled.values()), None)
        return last is not None and last.resolution in ("expired", "void")

    @property
    def end_shown(self) -> bool:
        """Whether readers have been shown the end."""
        return self.state.status.state.terminal and self._shown == self.state.seq

    async def append(self, events: Sequence[LogEvent], also: Write | None = None) -> bool:
        """Append events; return once they may be relied on. False when the task had ended.

        ``also`` is written in the same transaction.
        """
        if not events:
            return True
        if not self.append_now(events, also):
            return False
        if self._firm == self.state.seq:
            await asyncio.shield(self._writer.commit())
        return True

    def append_now(self, events: Sequence[LogEvent], also: Write | None = None) -> bool:
        """Append events that nobody waits for. False when the task had ended."""
        before, first, at = self.state.status, self.state.seq + 1, now_ms()
        entries: list[Entry] = []
        for event in events:
            try:
                entries.append(self.state.apply(event, at))
            except TerminalError:
                logger.info("event after the end", task_id=self.ref.id, what=type(event).__name__)
                break
        if not entries:
            return False
        self._tail += entries
        self._writer.add(self, before, entries, also)
        after = self.state.status
        if after is not before:
            if after.state is not before.state:
                _OPEN[before.state].dec()
                (_ENDED if after.state.terminal else _OPEN)[after.state].inc()
            if after.state is not before.state or logger.is_enabled_for(logging.INFO):
                _note(self.ref, before, after, at)
        held = time.monotonic() < self.database.lease_until
        if (
            after is before
            and len(entries) == 1
            and self._shown == first - 1
            and isinstance(entries[0].event, Grew)
            and held
        ):
            # Most of the time: there is no more to it.
            self._shown = first
            for reader in self.readers:
                reader.offer(entries)
            return True
        if also is not None or not FIRM.isdisjoint(type(entry.event) for entry in entries):
            self._firm = entries[-1].seq
        elif self._firm <= self._stored and held:
            self._show(self.state.seq)
        return True

    def stored(self, seq: int) -> None:
        """Take the writer's word that the log is stored up to here."""
        before, self._stored = self._stored, seq
        # Entries after the last firm one are text, which may be shown before it is stored.
        self._show(self.state.seq if self._firm <= seq else seq)
        if self.readers_of_stored:
            entries = self._tail[before - self._base + 1 : seq - self._base + 1]
            for reader in self.readers_of_stored:
                reader.offer(entries)
        if (
            self._changing
            and self.state.state_changes
            and self.state.state_changes[-1].seq > before
        ):
            for waiter in self._changing:
                if not waiter.done():
                    waiter.set_result(None)
        spare = min(len(self._tail) - TAIL, seq - self._base + 1)
        if spare > 0:
            del self._tail[:spare]
            self._base += spare

    def _show(self, seq: int) -> None:
        """Let readers see the entries up to a number."""
        if seq <= self._shown:
            return
        entries = self._tail[self._shown - self._base + 1 : seq - self._base + 1]
        self._shown = seq
        for entry in entries:
            status = entry.status
            if status and (status.state.terminal or status.state.interrupted):
                self._stop = entry.seq
        if self._stop >= entries[0].seq:
            self._wake()
        for reader in self.readers:
            reader.offer(entries)

    def _wake(self) -> None:
        for waiter in self._stopping:
            if not waiter.done():
                waiter.set_result(None)

    async def next_stop(self) -> None:
        """Wait until the task ends, or waits for a person, or the service leaves it."""
        waiter = asyncio.get_running_loop().create_future()
        self._stopping.add(waiter)
        try:
            await waiter
        finally:
            self._stopping.discard(waiter)

    async def next_change(self, after: int) -> Entry | None:
        """Wait until a change of state after an entry is stored, and return the first one.

        None if the log does not have it: it is too old to be remembered here, or the task has
        ended and there is none. Raise StreamEndedError when the log moves. Growing text wakes
        nobody who waits.
        """
        while after >= self.state.unremembered:
            for entry in self.state.state_changes:
                if after < entry.seq <= self._stored:
                    return entry
            if self.state.status.state.terminal and self._stored == self.state.seq:
                break
            self.check_moved()
            waiter = asyncio.get_running_loop().create_future()
            self._changing.add(waiter)
            try:
                await waiter
            finally:
                self._changing.discard(waiter)
        return None

    async def firm_state(self) -> TaskState:
        """Return the state once nothing in it waits to be stored; valid until the next await."""
        while self._firm > self._stored or time.monotonic() >= self.database.lease_until:
            try:
                async with asyncio.timeout(STORE_SECONDS):
                    if time.monotonic() >= self.database.lease_until:
                        await self.database.wait_for_lease()
                    await asyncio.shield(self._writer.commit())
            except TimeoutError:
                raise StoreUnavailableError(operation="loading") from None
        return self.state

    async def until_stopped(self, since: int) -> TaskState:
        """Wait until the task has ended, or waits for a person by an entry after ``since``."""
        while True:
            state = await self.firm_state()
            if self.stopped(since):
                return state
            self.check_moved()
            if self._stopping_soon:
                raise StreamEndedError(LEFT, cause="drained", task_id=self.ref.id)
            await self.next_stop()

    def stop_waiting(self) -> None:
        """Release everyone who waits for the task: the service is stopping."""
        self._stopping_soon = True
        self._wake()

    def move(self) -> None:
        """End all reading here: another replica goes on with the log. Readers can come again."""
        self._moved = True
        self._wake()
        for waiter in self._changing:
            if not waiter.done():
                waiter.set_result(None)
        for reader in [*self.readers, *self.readers_of_stored]:
            reader.offer([])

    def close(self, writer: "LogWriter") -> None:
        """Let nothing more be written here, since another replica writes it, and end all reading.

        Whoever still tries to write is told by the writer that is given.
        """
        self._writer = writer
        self.move()

    def end_reading(self) -> None:
        """End all reading that is under way: it may go on elsewhere, or here later."""
        error = StreamEndedError(cause="moved", task_id=self.ref.id)
        for reader in [*self.readers]:
            reader.end(error)
        for waiter in self._stopping:
            if not waiter.done():
                waiter.set_exception(error)

    def check_moved(self) -> None:
        """Raise StreamEndedError if the log goes on elsewhere."""
        if self._moved:
            raise StreamEndedError(cause="moved", task_id=self.ref.id)

    def stopped(self, since: int) -> bool:
        """Whether the task has ended, or waits for a person by an entry after ``since``."""
        state = self.state.status.state
        return state.terminal or (state.interrupted and self._stop > since)

    def after(self, seq: int, *, stored_only: bool = False) -> list[Entry] | None:
        """Return shown entries after a number; None when the tail no longer reaches back so far.

        ``stored_only`` leaves out those that may yet be lost.
        """
        start, last = seq + 1 - self._base, self._stored if stored_only else self._shown
        if start < 0:
            return None
        return self._tail[start : min(start + BATCH, last - self._base + 1)]


def ref_of(row: TaskRow) -> TaskRef:
    modes = tuple(orjson.loads(row.output_modes)) if row.output_modes is not None else None
    return TaskRef(
        TaskId(row.id), ContextId(row.context_id), Principal(row.principal), modes, row.created_at
    )


def load_task(row: TaskRow) -> TaskState:
    """Build a task from its row; that of an open one has a status and nothing else."""
    return load_state(ref_of(row), row.status, row.archive)


@dataclass(slots=True)
class _Unstored:
    """What one task has waiting to be stored."""

    log: TaskLog
    before: Status
    """The status that is stored now."""
    entries: list[Entry] = field(default_factory=list[Entry])
    also: list[Write] = field(default_factory=list[Write])


@dataclass(frozen=True, slots=True)
class _Batch:
    """What goes into one transaction."""

    shares: list[_Unstored]
    done: asyncio.Future[None] | None

    def write(self, connection: Connection) -> None:
        segments: list[Segment] = []
        moves: list[Move] = []
        used: dict[tuple[str, int], Spent] = {}
        for share in self.shares:
            no, entries = share.log.no, share.entries
            for entry in entries:
                if type(entry.event) is UsageCounted:
                    whole = entry.event.own + (entry.event.children or Usage())
                    of = (share.log.ref.principal, spending.day_of(entry.at))
                    before = used.get(of, Spent())
                    used[of] = Spent(before.cost + whole.cost, before.tokens + whole.total)
            segments.append(Segment(no, entries[0].seq, entries[-1].seq, dump_entries(entries)))
            status = next((e.status for e in reversed(entries) if e.status is not None), None)
            if status is not None and status != share.before:
                log, before = share.log, share.before
                at = None if (status.state, status.at) == (before.state, before.at) else status.at
                archive = dump_archive(log.state) if status.state.terminal else None
                change = (log.ref.principal, before.state, status.state, at)
                moves.append(Move(no, *change, orjson.dumps(status), archive))
        task_rows.append(connection, segments, moves)
        if used:
            spending.add(connection, used)
        for share in self.shares:
            for also in share.also:
                also(connection)


class LogWriter:
    """Stores the entries of all logs, in groups.

    Text is written in batches, at most 50 ms apart; a change of state is written at once. While
    the database is away, what it has not taken stays here, in order, and ``run`` tries again.
    """

    def __init__(self, database: Database) -> None:
        self._database = database
        self._loop = asyncio.get_running_loop()
        self._waiting: dict[int, _Unstored] = {}
        self._count = 0
        self._done: asyncio.Future[None] | None = None
        """Done when all that waits now is stored."""
        self._due: asyncio.Handle | None = None
        """The next write, as soon as the one under way is done."""
        self._hurry = False
        self._writing: _Batch | None = None
        self._refused = asyncio.Event()

    def add(
        self, log: TaskLog, before: Status, entries: Sequence[Entry], also: Write | None = None
    ) -> None:
        """Queue entries of a log whose task had the status ``before``."""
        share = self._waiting.get(log.no)
        if share is None:
            share = self._waiting[log.no] = _Unstored(log, before)
        share.entries += entries
        if also is not None:
            share.also.append(also)
        self._count += len(entries)
        if self._due is None:
            self._due = self._loop.call_later(GROUP_SECONDS, self._write)
        if self._count >= GROUP_ENTRIES:
            self.commit()

    def commit(self) -> asyncio.Future[None]:
        """Write at once; the future is done when all that was queued is stored."""
        if self._done is None:
            self._done = self._loop.create_future()
        if not self._hurry:
            self._hurry = True
            if self._due is not None:
                self._due.cancel()
            self._due = self._loop.call_soon(self._write)
        return self._done

    def _write(self) -> None:
        if self._writing is not None:
            self._hurry = True  # it is done as soon as that is
            return
        if self._due is not None:
            self._due.cancel()
        self._due, self._hurry, self._count = None, False, 0
        self._writing = batch = _Batch(list(self._waiting.values()), self._done)
        self._waiting, self._done = {}, None
        if batch.shares:
            self._database.submit(batch.write).done.add_done_callback(self._settle)
        else:
            self._settle()

    def _settle(self, written: asyncio.Future[None] | None = None) -> None:
        """Tell the logs that their entries are stored, unless the database has refused them."""
        if written is not None and written.exception() is not None:
            self._refused.set()
            return
        batch, self._writing = self._writing, None
        if batch is not None:
            for share in batch.shares:
                share.log.stored(share.entries[-1].seq)
            if batch.done is not None and not batch.done.done():
                batch.done.set_result(None)
            if self._database.has_other_replicas:
                self.notify([share.log.no for share in batch.shares])
        if self._hurry:
            self._write()

    def notify(self, numbers: list[int]) -> None:
        """Have readers in other replicas look at these logs."""
        for first in range(0, len(numbers), TELL_AT_ONCE):
            named = numbers[first : first + TELL_AT_ONCE]
            self._database.notify(",".join(("l", *map(str, named))))

    async def run(self) -> None:
        """Write what was refused, again and again until it is taken."""
        while True:
            await self._refused.wait()
            self._refused.clear()
            if self._writing is not None:
                await self._database.write_until_stored(self._writing.write)
                self._settle()
