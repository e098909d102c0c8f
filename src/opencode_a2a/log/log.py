"""The log of a task: its owner appends events, any number of readers follow it.

``TaskLog`` is the log of a task that this process runs, ``remote.RemoteLog`` that of a task that
another replica runs. Readers follow both alike, as a ``ReadableLog``. ``LogReader`` is the position
of one live reader, and ``LogWriter`` stores the entries of all logs.

The life of an entry:

- *appended*: it has a number, is folded into the state of the task, stands in the tail, which holds
  the latest entries for all readers, and waits for the ``LogWriter``.
- *shown*: live readers may have it. Text is shown at once. A *firm* entry (``state.FIRM``, or one
  with another write in its transaction, or appended as such) is shown once it is stored, and those
  after it not before.
- *stored*: its transaction is committed. Until then a crash loses it, and its number is used again.
- *dropped* from the tail, when it is stored and ``TAIL`` later ones are there. A reader that is
  still behind reads it from the store, so that a slow reader costs nothing and slows nobody.
- *forgotten*: some time after the end of the task the stored log is deleted; the result stays.

A task *stops* when it ends or begins to wait for a person. A log *moves* when another replica takes
the task over: reading ends here, and clients come again.

How reading ends before the task does:

- ``stop_waiting``: the service stops. Those who wait for a stop are released; ``server.sse`` ends
  the streams.
- ``end_reading``: this replica is cut off from the database. All who read or wait get an error, and
  may come again.
- ``move``: the log has moved. Readers get what is left of it, and then an error; so does everyone
  who comes later.
- ``close``: this replica has given the task up. As ``move``, and nothing can be appended.
"""

import asyncio
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import orjson
import structlog
from sqlalchemy.engine import Connection

from opencode_a2a import metrics
from opencode_a2a.clock import now_ms
from opencode_a2a.errors import StoreUnavailableError, StreamEndedError
from opencode_a2a.events import (
    Failure,
    FailureType,
    Finished,
    Grew,
    Outcome,
    TextGrew,
    Usage,
    UsageCounted,
)
from opencode_a2a.ids import MAIN
from opencode_a2a.log.seen import SeenRequests, Settlements
from opencode_a2a.log.state import (
    FIRM,
    OPEN,
    TERMINAL,
    Cursor,
    Entry,
    LogEvent,
    State,
    Status,
    TaskRef,
    TaskState,
    TerminalError,
    bounded,
    dump_archive,
    dump_entries,
    encode,
)
from opencode_a2a.log.stored import Replay
from opencode_a2a.messages import TurnRequest
from opencode_a2a.store import callers, webhooks
from opencode_a2a.store import tasks as task_rows
from opencode_a2a.store.callers import Spent
from opencode_a2a.store.database import Database, Write
from opencode_a2a.store.engine import UnstorableError
from opencode_a2a.store.tasks import Segment, StatusChange, TaskRow
from opencode_a2a.telemetry import ROUTINE, Trace

logger = structlog.get_logger(__name__)

GROUP_SECONDS = 0.05
"""How long text waits to be stored together with other text."""
GROUP_ENTRIES = 2_000
"""Entries that are stored at once, without waiting."""
TAIL = 128
"""Stored entries kept in memory for readers that are close behind."""
BATCH = 256
"""Entries handed to a reader at once."""
PIECE = 64 * 1024
"""Characters of text in one entry. OpenCode may send all of an answer at once, and an entry is
written to a reader as one."""
LOGS_PER_NOTIFICATION = 390
"""A task number has up to 19 digits, and a notification has room for 7,900."""
STORE_SECONDS = 4.0
"""How long a caller waits for the store to take the state that it is about to read."""
UNSTORABLE = Failure(
    FailureType.UNSTORABLE,
    "Something that belongs to the task cannot be stored, so that it was stopped. The log of the "
    "service says what. Send the message again.",
)
DRAINED = "The service is shutting down. The task is kept; fetch it later, or send it again."

WriteEntries = Callable[[list[Entry]], bool]
"""Writes entries to a client at once; False if the client cannot take them now."""

_OPEN = {state: metrics.TASKS.labels(state) for state in OPEN}
_ENDED = {state: metrics.TASKS_ENDED.labels(state) for state in TERMINAL}


class LiveReader(Protocol):
    """A reader that has every entry that its log can give it so far.

    That is a ``LogReader``, or a ``RemoteLog`` whose task this replica has taken over.
    """

    def offer(self, entries: list[Entry], /) -> None:
        """Take the next entries, one at least."""
        ...

    def wake(self) -> None:
        """Look at the log again: it has moved."""
        ...

    def end(self, error: StreamEndedError, /) -> None:
        """Stop reading, with an error that tells the client to come again."""
        ...


class Observer(Protocol):
    """Sees what the tasks that this process runs report; ``otel`` makes spans of it."""

    def note(self, log: "TaskLog", entries: Sequence[Entry], /) -> None:
        """Take entries that were appended. Text that only grows is left out."""
        ...

    def trace(self, log: "TaskLog", /) -> Trace | None:
        """Return the trace in which the present turn makes its calls."""
        ...

    def left(self, log: "TaskLog", /) -> None:
        """Take note that another replica continues the task."""
        ...


@dataclass(slots=True)
class Waiters:
    """The coroutines that wait for something to happen in a log."""

    _futures: set[asyncio.Future[None]] = field(default_factory=set[asyncio.Future[None]])

    def __len__(self) -> int:
        return len(self._futures)

    async def wait(self) -> None:
        future = asyncio.get_running_loop().create_future()
        self._futures.add(future)
        try:
            await future
        finally:
            self._futures.discard(future)

    def wake(self, error: Exception | None = None) -> None:
        """Let all of them look again, or have them raise an error."""
        for future in self._futures:
            if future.done():
                continue
            if error is None:
                future.set_result(None)
            else:
                future.set_exception(error)


def in_pieces(events: Sequence[LogEvent]) -> Iterator[LogEvent]:
    """Yield events, a text that is too long for one entry as several."""
    for event in events:
        if not isinstance(event, Grew) or len(event.text) <= PIECE:
            yield event
            continue
        for at in range(0, len(event.text), PIECE):
            last = at + PIECE >= len(event.text)
            yield replace(
                event,
                text=event.text[at : at + PIECE],
                opens=event.opens and not at,
                ends_at=event.ends_at if last else "",
            )


class ReadableLog:
    """The log of one task as readers follow it, and the state that it leads to.

    The log of an ended task is nothing else; others grow: see ``TaskLog`` and ``RemoteLog``.
    """

    def __init__(
        self, no: int, state: TaskState, database: Database, settlements: Settlements | None = None
    ) -> None:
        self.no = no
        """The number of the task in the database."""
        self.ref = state.ref
        self.state = state
        """The task after the last entry that was appended."""
        self.database = database
        self._tail: list[Entry] = []
        self._tail_seq = state.seq + 1
        """Sequence number of the first entry in the tail."""
        self._shown = self._stored = state.seq
        """Sequence numbers of the last entry that is shown, and of the last that is stored."""
        self._firm = 0
        """Sequence number of the last firm entry that ``TaskLog`` has appended; 0 in other logs,
        whose entries are all stored."""
        self._stopped_at = state.seq if state.status.state.interrupted else 0
        """Sequence number of the shown entry with which the task last stopped."""
        self.stops = Waiters()
        """Who waits for the next stop to be shown, for the log to move, or for the service to
        stop."""
        self._draining = self._moved = False
        self.readers: set[LiveReader] = set()
        """Readers that have every entry that is shown."""
        self.readers_of_stored: set[LiveReader] = set()
        """Readers that have every entry that is stored, and get the others once they are."""
        self.seen = SeenRequests(state, settlements or Settlements())

    # Reading

    def after(self, seq: int) -> list[Entry] | None:
        """Return shown entries after a number; None when the tail no longer reaches back so far."""
        start = seq + 1 - self._tail_seq
        if start < 0:
            return None
        return bounded(self._tail[start : min(start + BATCH, self._shown + 1 - self._tail_seq)])

    async def firm_state(self) -> TaskState:
        """Return the state once every firm entry in it is stored; valid until the next await.

        A ``RemoteLog`` reads the store for it: the state then has every entry that is stored.
        """
        return self.state

    async def reach(self, cursor: Cursor) -> None:
        """Wait until the entry of a cursor is here, if it may still come."""

    @property
    def end_shown(self) -> bool:
        """Whether the end of the task is shown."""
        return self.state.status.state.terminal and self._shown == self.state.seq

    def stopped(self, since: int) -> bool:
        """Whether the task has ended, or waits for a person since an entry after ``since``."""
        state = self.state.status.state
        return state.terminal or (state.interrupted and self._stopped_at > since)

    async def until_stopped(self, since: int) -> TaskState:
        """Wait until ``stopped``; raise StreamEndedError if the service stops or the log moves."""
        while True:
            state = await self.firm_state()
            if self.stopped(since):
                return state
            self.check_moved()
            if self._draining:
                raise StreamEndedError(DRAINED, cause="drained", task_id=self.ref.id)
            await self.stops.wait()

    async def until_ended(self) -> TaskState:
        """Wait until the task has ended; raise StreamEndedError if the log moves.

        For a cancel, which OpenCode confirms soon: a stop of the service does not release it.
        """
        while not (state := await self.firm_state()).status.state.terminal:
            self.check_moved()
            await self.stops.wait()
        return state

    def note_seen(self, status: Status) -> None:
        """Note that a reader was given this status, with the requests in it.

        Whatever shows a status to a person has to call this: a plain "yes" counts only for
        requests that somebody has seen.
        """
        if status.pending:
            self.note_seen_number(max(one.number or 0 for one in status.pending))

    def note_seen_number(self, newest: int) -> None:
        """Note that a reader, here or in another replica, was given the requests up to a number."""
        self.seen.note(newest)

    # Growing

    def mark_stored(self, seq: int) -> None:
        """Note that the log is stored up to an entry, and show the entries that waited for it."""
        before, self._stored = self._stored, seq
        # Entries after the last firm one may be shown before they are stored, but not without the
        # lease: see ``append_now``.
        ahead = self._firm <= seq and self.database.lease.held
        self._show(self.state.seq if ahead else seq)
        if self.readers_of_stored:
            entries = self._tail[before + 1 - self._tail_seq : seq + 1 - self._tail_seq]
            for reader in self.readers_of_stored:
                reader.offer(entries)
        spare = min(len(self._tail) - TAIL, seq + 1 - self._tail_seq)
        if spare > 0:
            del self._tail[:spare]
            self._tail_seq += spare

    def _show(self, seq: int) -> None:
        """Show the entries up to a number."""
        if seq <= self._shown:
            return
        entries = self._tail[self._shown + 1 - self._tail_seq : seq + 1 - self._tail_seq]
        self._shown = seq
        for entry in entries:
            if entry.stops:
                self._stopped_at = entry.seq
                self.stops.wake()
        for reader in self.readers:
            reader.offer(entries)

    # Ending

    def stop_waiting(self) -> None:
        """Release everyone who waits for the task to stop: the service is stopping."""
        self._draining = True
        self.stops.wake()

    def move(self) -> None:
        """End all reading for good: another replica, or another log here, continues."""
        self._moved = True
        self.stops.wake()
        for reader in [*self.readers, *self.readers_of_stored]:
            reader.wake()

    def end_reading(self) -> None:
        """End all reading that is under way; a client may come again, here or elsewhere."""
        error = StreamEndedError(cause="moved", task_id=self.ref.id)
        for reader in [*self.readers, *self.readers_of_stored]:
            reader.end(error)
        self.stops.wake(error)

    def check_moved(self) -> None:
        """Raise StreamEndedError if the log has moved."""
        if self._moved:
            raise StreamEndedError(cause="moved", task_id=self.ref.id)


class TaskLog(ReadableLog):
    """The log of a task that this process runs, and therefore writes."""

    def __init__(self, no: int, state: TaskState, writer: "LogWriter", database: Database) -> None:
        super().__init__(no, state, database, writer.settlements)
        self._writer = writer
        self._closed: Exception | None = None
        """Raised for every further entry: another replica writes the log now."""

    @property
    def trace(self) -> Trace | None:
        """The trace in which the present turn makes its calls."""
        observer = self._writer.observer
        return Trace.load(self.state.status.trace) if observer is None else observer.trace(self)

    async def append(
        self,
        events: Sequence[LogEvent],
        in_same_commit: Write | None = None,
        *,
        firm: bool = False,
    ) -> bool:
        """Append events, and wait until firm ones are stored; False if the task had ended.

        ``in_same_commit`` is written in the same transaction. That makes the events firm, and so
        does ``firm``, whatever they are.
        """
        if not events:
            return True
        if not self.append_now(events, in_same_commit, firm=firm):
            return False
        if self._firm == self.state.seq:
            await asyncio.shield(self._writer.commit())
        return True

    def append_now(
        self,
        events: Sequence[LogEvent],
        in_same_commit: Write | None = None,
        *,
        firm: bool = False,
    ) -> bool:
        """Append events without waiting; False if the task had ended."""
        if self._closed is not None and not self.state.status.state.terminal:
            raise self._closed
        before, first, at = self.state.status, self.state.seq + 1, now_ms()
        entries: list[Entry] = []
        for event in in_pieces(events):
            try:
                entries.append(self.state.apply(event, at))
            except TerminalError:
                logger.info(
                    "event ignored after the end of its task",
                    task_id=self.ref.id,
                    what=type(event).__name__,
                )
                break
        if not entries:
            return False
        self._tail += entries
        self._writer.add(self, before, entries, in_same_commit)
        after = self.state.status
        if after is not before:
            self.seen.note_entries(before, entries)
            if after.state is not before.state:
                _OPEN[before.state].dec()
                (_ENDED if after.state.terminal else _OPEN)[after.state].inc()
            if after.state is not before.state or logger.is_enabled_for(logging.INFO):
                _report(self.ref, before, after, at)
        # Without the lease another replica may be writing this log: nothing is shown before it is
        # stored.
        holds_lease = self.database.lease.held
        if (
            after is before
            and len(entries) == 1
            and self._shown == first - 1
            and isinstance(entries[0].event, Grew)
            and not entries[0].event.opens
            and holds_lease
        ):
            # Most appends are one piece of text. It stops nothing, so that of ``_show`` only this
            # is left; it is written out here because it runs for each piece.
            self._shown = first
            for reader in self.readers:
                reader.offer(entries)
            return True
        if self._writer.observer is not None:
            self._writer.observer.note(self, entries)
        # What a person took to answer is no sign of a slow service.
        asked = after.pending or self.state.settled or self.state.history[1:]
        opens = (isinstance(entry.event, TextGrew) and entry.event.opens for entry in entries)
        if not asked and any(opens):
            metrics.FIRST_TEXT_SECONDS.observe((at - self.ref.created_at) / 1000)
        firm = firm or not FIRM.isdisjoint(type(entry.event) for entry in entries)
        if firm or in_same_commit is not None:
            self._firm = entries[-1].seq
        elif self._firm <= self._stored and holds_lease:
            self._show(self.state.seq)
        return True

    async def firm_state(self) -> TaskState:
        """Return the state once every firm entry in it is stored; valid until the next await."""
        while self._firm > self._stored or not self.database.lease.held:
            try:
                async with asyncio.timeout(STORE_SECONDS):
                    if not self.database.lease.held:
                        await self.database.wait_for_lease()
                    await asyncio.shield(self._writer.commit())
            except TimeoutError:
                raise StoreUnavailableError(operation="loading") from None
        return self.state

    def close(self, error: Exception) -> None:
        """Leave the log to another replica; ``error`` refuses entries that are still appended."""
        self._closed = error
        if self._writer.observer is not None:
            self._writer.observer.left(self)
        self.move()


def _report(ref: TaskRef, before: Status, after: Status, at: int) -> None:
    """Log the start of a task, its requests to a person, and its end."""
    if after.state is State.WORKING and before.state is State.SUBMITTED:
        ROUTINE.info("task started", task_id=ref.id, principal=ref.principal, title=after.subject)
    for asked in after.pending:
        if asked not in before.pending:
            logger.info("task asks", task_id=ref.id, what=asked.summary, until=asked.expires_at)
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


class LogForgottenError(Exception):
    """The log of an ended task is no longer kept; its result is."""


def resumable(state: TaskState, cursor: Cursor) -> bool:
    """Whether a reader with this cursor has seen nothing but entries that still exist."""
    if cursor.epoch > state.epoch or cursor.seq > state.seq:
        return False
    return cursor.epoch == state.epoch or cursor.seq < state.epochs[cursor.epoch]


class LogReader:
    """The position of one live reader in a log.

    It begins after ``cursor``, the last entry that an earlier reader of the same client had, or
    with the task as it is now. Render the task before the next await: entries that are appended
    later follow.

    It ends with the task; with ``until_asked`` also when the task begins to wait for a person.
    Entries that are read with ``supervises`` do not count as seen by the person who may answer.
    """

    def __init__(
        self,
        log: ReadableLog,
        cursor: Cursor | None = None,
        *,
        until_asked: bool = False,
        supervises: bool = False,
    ) -> None:
        self.log = log
        self.state = log.state
        self.resync = cursor is None or not resumable(log.state, cursor)
        """Whether the client needs the task as it is before the entries that follow."""
        self._supervises = supervises
        if self.resync and not supervises:
            log.note_seen(log.state.status)
        self._after = log.state.seq if cursor is None or self.resync else cursor.seq
        """Sequence number of the last entry that the client has."""
        self._until_asked = until_asked
        self._ended = False
        self._write: WriteEntries | None = None
        self._waiter: asyncio.Future[None] | None = None
        """Done when ``next`` has to look for entries again."""
        self._replay: Replay | None = None

    async def next(self, write: WriteEntries | None = None) -> list[Entry]:
        """Return the next entries; none when there are no more.

        While it waits, new entries go to ``write`` as they come: waking the reader's task for each
        piece of text would cost more than writing it. Entries that ``write`` cannot take now are
        returned.
        """
        while not self._ended:
            entries = self.log.after(self._after)
            if entries is None:
                if self._replay is None:
                    self._replay = Replay(self.log.database, self.log.no, self.log.ref)
                entries = await self._replay.next(self._after)
                self._replay.forget_contents()
                if not entries:
                    raise LogForgottenError(self.log.ref.id)
            if entries:
                self._after = entries[-1].seq
                wanted = self._until_end(entries)
                self._note_seen(wanted)
                return wanted
            if self.log.end_shown:
                break
            self.log.check_moved()
            self._write, self._waiter = write, asyncio.get_running_loop().create_future()
            self.log.readers.add(self)
            try:
                await self._waiter
            finally:
                self.log.readers.discard(self)
                self._waiter = None
        return []

    def offer(self, entries: list[Entry]) -> None:
        """Write new entries, or wake ``next`` to get them."""
        waiter = self._waiter
        if waiter is None or waiter.done():
            return
        try:
            # Most entries are text, one at a time, and end nothing.
            one = len(entries) == 1
            if (
                self._write is not None
                and entries[0].seq == self._after + 1
                and (one or len(bounded(entries)) == len(entries))
            ):
                text = one and entries[0].status is None
                wanted = entries if text else self._until_end(entries)
                if self._write(wanted):
                    self._after = entries[-1].seq
                    if not text:
                        self._note_seen(wanted)
                    if not self._ended:
                        return
                else:
                    self._ended = False
            waiter.set_result(None)
        except Exception as error:  # a fault of this reader must not reach the others
            waiter.set_exception(error)

    def wake(self) -> None:
        """Have ``next`` look at the log again if it waits."""
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def end(self, error: StreamEndedError) -> None:
        """Have ``next`` raise an error if it waits."""
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_exception(error)

    def _until_end(self, entries: list[Entry]) -> list[Entry]:
        """Return the entries up to the one that ends this reader, if it is among them."""
        for count, entry in enumerate(entries, 1):
            if entry.status is None or not entry.stops:
                continue
            # An interrupt that has been answered since, as in a replay, ends no reader.
            asked = self._until_asked and self.state.status.state.interrupted
            if entry.status.state.terminal or asked:
                self._ended = True
                return entries[:count]
        return entries

    def _note_seen(self, entries: list[Entry]) -> None:
        """Note the requests in entries that the client has been given."""
        if not self._supervises:
            for entry in entries:
                if entry.status is not None and entry.stops:
                    self.log.note_seen(entry.status)


def new_row(state: TaskState, request: TurnRequest | None = None, upstream: str = MAIN) -> TaskRow:
    """Return the row of a new task; ``request`` is that of its first turn."""
    ref, modes = state.ref, state.ref.output_modes
    return TaskRow(
        id=ref.id,
        principal=ref.principal,
        context_id=ref.context_id,
        state=state.status.state,
        created_at=ref.created_at,
        updated_at=ref.created_at,
        status=encode(state.status),
        output_modes=None if modes is None else orjson.dumps(modes),
        request=None if request is None else orjson.dumps(request),
        upstream=upstream,
    )


def status_change(no: int, before: Status, after: Status, state: TaskState) -> StatusChange:
    """Return how the row of a task changes; ``state`` is the task, for the archive at its end."""
    at = None if (after.state, after.at) == (before.state, before.at) else after.at
    archive = dump_archive(state) if after.state.terminal else None
    whose, status = state.ref.principal, encode(after)
    return StatusChange(no, whose, before.state, after.state, at, status, archive)


@dataclass(slots=True)
class _Unstored:
    """The entries of one task that wait to be stored."""

    log: TaskLog
    before: Status
    """The status that is stored: the one before these entries."""
    changed: int = 0
    """Sequence number of the last of these entries that changed the state; 0 if none did."""
    entries: list[Entry] = field(default_factory=list[Entry])
    writes: list[Write] = field(default_factory=list[Write])
    """Other writes for the same transaction."""


@dataclass(frozen=True, slots=True)
class _Batch:
    """The entries that are stored in one transaction."""

    shares: list[_Unstored]
    done: asyncio.Future[None] | None

    def write(self, connection: Connection) -> bool:
        """Write the entries with all that belongs to them; return whether webhooks became due."""
        self.write_entries(connection)
        used: dict[tuple[str, int], Spent] = {}
        for share in self.shares:
            for entry in share.entries:
                if type(entry.event) is UsageCounted:
                    whole = entry.event.own + (entry.event.children or Usage())
                    of = (share.log.ref.principal, callers.day_of(entry.at))
                    before = used.get(of, Spent())
                    used[of] = Spent(before.cost + whole.cost, before.tokens + whole.total)
        if used:
            callers.add_spending(connection, used)
        for share in self.shares:
            for write in share.writes:
                write(connection)
        # Last: one of these writes may have stored a webhook.
        changes = {share.log.no: share.changed for share in self.shares if share.changed}
        return bool(changes) and webhooks.note_changes(connection, changes)

    def write_entries(self, connection: Connection) -> None:
        """Write the entries, and the statuses that they lead to, but nothing with them."""
        segments: list[Segment] = []
        status_changes: list[StatusChange] = []
        for share in self.shares:
            no, entries = share.log.no, share.entries
            left = entries
            while left:  # a segment is read as one
                part = bounded(left)
                segments.append(Segment(no, part[0].seq, part[-1].seq, dump_entries(part)))
                left = left[len(part) :]
            status = next((e.status for e in reversed(entries) if e.status is not None), None)
            # With every change of state: ``webhooks.put`` relies on the lock of the row.
            if status is not None and (status != share.before or share.changed):
                status_changes.append(status_change(no, share.before, status, share.log.state))
        task_rows.append(connection, segments, status_changes)


class LogWriter:
    """Stores the entries of all logs, in groups.

    Text is written in batches, at most 50 ms apart; a change of state is written at once. While
    the database is unreachable, entries wait here, in order, and ``run`` tries again.
    """

    def __init__(self, database: Database) -> None:
        self._database = database
        self.settlements = Settlements()
        """Of the requests in the logs that are written here."""
        self._loop = asyncio.get_running_loop()
        self._waiting: dict[int, _Unstored] = {}
        """Entries for the next batch, by the number of their task."""
        self._count = 0
        """How many entries these are."""
        self._done: asyncio.Future[None] | None = None
        """Done when the next batch is stored; None if nobody waits for it."""
        self._due: asyncio.Handle | None = None
        """The timer of the next batch."""
        self._hurry = False
        """Whether the next batch is written as soon as the present one is stored."""
        self._writing: _Batch | None = None
        """The batch that is being written."""
        self._refused = asyncio.Event()
        """Set when the database has not taken ``_writing``."""
        self.observer: Observer | None = None
        self.on_unstorable: Callable[[TaskLog], None] = lambda log: None
        """Called when a task has failed because something of it cannot be stored; set by
        ``OpenTasks``, which stops its turn."""
        self.on_due: Callable[[list[TaskLog]], None] = lambda logs: None
        """Called when changes of state are stored of which webhooks may have to be told; set by
        ``push.loop.Deliveries``, if there are any deliveries."""

    def add(
        self,
        log: TaskLog,
        before: Status,
        entries: Sequence[Entry],
        in_same_commit: Write | None = None,
    ) -> None:
        """Queue entries of a log whose task had the status ``before``."""
        share = self._waiting.get(log.no)
        if share is None:
            share = self._waiting[log.no] = _Unstored(log, before)
        share.entries += entries
        if log.state.status is not before:
            changes = (entry.seq for entry in entries if entry.changes_state)
            share.changed = max(changes, default=share.changed)
        if in_same_commit is not None:
            share.writes.append(in_same_commit)
        self._count += len(entries)
        if self._due is None:
            self._due = self._loop.call_later(GROUP_SECONDS, self._write)
        if self._count >= GROUP_ENTRIES:
            self.commit()

    def commit(self) -> asyncio.Future[None]:
        """Write at once; the future is done when all queued entries are stored."""
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
            self._hurry = True  # ``_written`` calls this again
            return
        if self._due is not None:
            self._due.cancel()
        self._due, self._hurry, self._count = None, False, 0
        self._writing = batch = _Batch(list(self._waiting.values()), self._done)
        self._waiting, self._done = {}, None
        if batch.shares:
            self._database.submit(batch.write).done.add_done_callback(self._written)
        else:
            self._written()

    def _written(self, written: asyncio.Future[bool] | None = None) -> None:
        """Mark the entries of the batch as stored, unless the database has refused them."""
        if written is not None and written.exception() is not None:
            self._refused.set()
            return
        batch, self._writing = self._writing, None
        if batch is not None:
            for share in batch.shares:
                share.log.mark_stored(share.entries[-1].seq)
            if batch.done is not None and not batch.done.done():
                batch.done.set_result(None)
            if self._database.census.has_others:
                self.notify([share.log.no for share in batch.shares])
            changed = [share.log for share in batch.shares if share.changed]
            if changed and (written is None or written.result()):
                self.on_due(changed)
        if self._hurry:
            self._write()

    def notify(self, numbers: list[int]) -> None:
        """Tell other replicas that there are new entries in the logs of these tasks."""
        for first in range(0, len(numbers), LOGS_PER_NOTIFICATION):
            named = numbers[first : first + LOGS_PER_NOTIFICATION]
            self._database.notify(",".join(("l", *map(str, named))))

    async def run(self) -> None:
        """Write batches that the database has refused until it takes them."""
        while True:
            await self._refused.wait()
            self._refused.clear()
            if self._writing is not None:
                try:
                    await self._database.write_until_stored(self._writing.write)
                except UnstorableError:
                    for share in self._writing.shares:
                        await self._store_alone(share)
                self._written()

    async def _store_alone(self, share: _Unstored) -> None:
        """Store the entries of one task; if that can never be done, fail the task.

        Its entries, which every database takes, are then stored without what belongs to them.
        """
        try:
            await self._database.write_until_stored(_Batch([share], None).write)
            return
        except UnstorableError as error:
            logger.error("task could not be stored", task_id=share.log.ref.id, cause=str(error))
        await self._database.write_until_stored(_Batch([share], None).write_entries)
        share.log.append_now([Finished(Outcome.FAILED, failure=UNSTORABLE)])
        self.on_unstorable(share.log)
