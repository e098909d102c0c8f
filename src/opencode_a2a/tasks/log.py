"""An open task: the only writer of its log, and any number of readers.

Readers share one tail of recent entries and keep nothing but their position, so that a slow
one costs nothing and slows nobody; one that has fallen behind the tail reads from the store.
"""

import asyncio
from collections.abc import Callable, Sequence

import structlog
from sqlalchemy.engine import Connection

from opencode_a2a import metrics
from opencode_a2a.clock import now_ms
from opencode_a2a.errors import StoreUnavailableError, StreamEndedError
from opencode_a2a.events import (
    Finished,
    Interrupted,
    ReasoningGrew,
    Resumed,
    SessionBound,
    Started,
    TextGrew,
)
from opencode_a2a.messages import Answered
from opencode_a2a.store import tasks as rows
from opencode_a2a.store.database import Database
from opencode_a2a.tasks.codec import load_entries
from opencode_a2a.tasks.commands import Cursor
from opencode_a2a.tasks.state import (
    OPEN,
    TERMINAL,
    Accepted,
    Entry,
    LogEvent,
    Recovered,
    State,
    TaskRef,
    TaskState,
    TerminalError,
)
from opencode_a2a.tasks.writer import LogWriter, Write

log = structlog.get_logger(__name__)

TAIL = 128
"""Entries kept in memory for readers that are close behind."""
BATCH = 256
"""Entries handed to a reader at once."""
STORE_SECONDS = 4.0
"""How long a reader waits for the store to take what it is about to read."""
LEFT = "The service stops, the task goes on; get it later, or send the same message again"

# Told only once they are stored; everything else may be told first.
_FIRM = frozenset(
    {Accepted, Answered, Recovered, SessionBound, Started, Interrupted, Resumed, Finished}
)

_GROWTH = frozenset({TextGrew, ReasoningGrew})

Serve = Callable[[list[Entry] | None], bool]
"""Deals with new entries for one who waits, or returns False to have them woken. It is given the
entries when they are all that is new and none changes the status."""


class TaskLog:
    """One open task."""

    def __init__(self, no: int, state: TaskState, journal: LogWriter, database: Database) -> None:
        self.no = no
        self.state = state
        self.database = database
        self._journal = journal
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
        self._waiters: dict[asyncio.Future[None], Serve | None] = {}
        self._left = False
        self.encoded: tuple[tuple[int, int, str], list[tuple[bytes, bytes]]] | None = None
        """What readers last made of entries: the first and how many, dialect, cursor and body."""

    @property
    def ref(self) -> TaskRef:
        return self.state.ref

    @property
    def over(self) -> bool:
        return self.state.status.state.terminal and self._shown == self.state.seq

    async def tell(self, events: Sequence[LogEvent], also: Write | None = None) -> bool:
        """Append events; return once they may be relied on. False when the task had ended.

        ``also`` is written in the same transaction.
        """
        if not events:
            return True
        if not self.say(events, also):
            return False
        if self._firm == self.state.seq:
            await asyncio.shield(self._journal.commit())
        return True

    def say(self, events: Sequence[LogEvent], also: Write | None = None) -> bool:
        """Append events that nobody waits for. False when the task had ended."""
        before, first, at = self.state.status, self.state.seq + 1, now_ms()
        entries: list[Entry] = []
        for event in events:
            try:
                entries.append(self.state.apply(event, at))
            except TerminalError:
                log.info("told after the end", task_id=self.ref.id, what=type(event).__name__)
                break
        if not entries:
            return False
        self._tail += entries
        self._journal.add(self, before.state, entries, also)
        if self.state.status is not before:
            _count(before.state, self.state.status.state)
        elif len(entries) == 1 and self._shown == first - 1 and type(entries[0].event) in _GROWTH:
            # Most of the time: there is no more to it.
            self._shown = first
            self._wake(entries)
            return True
        if not _FIRM.isdisjoint(type(entry.event) for entry in entries):
            self._firm = entries[-1].seq
        elif self._firm <= self._stored:
            self._show(self.state.seq)
        return True

    def stored(self, seq: int) -> None:
        """Take the journal's word that the log is stored up to here."""
        self._stored = seq
        # Entries after the last firm one are text, which may be shown before it is stored.
        self._show(self.state.seq if self._firm <= seq else seq)
        spare = min(len(self._tail) - TAIL, seq - self._base + 1)
        if spare > 0:
            del self._tail[:spare]
            self._base += spare

    def _show(self, seq: int) -> None:
        if seq <= self._shown:
            return
        for entry in self._tail[self._shown - self._base + 1 : seq - self._base + 1]:
            status = entry.status
            if status and (status.state.terminal or status.state.interrupted):
                self._stop = entry.seq
        self._shown = seq
        self._wake()

    def _wake(self, entries: list[Entry] | None = None) -> None:
        for waiter, serve in self._waiters.items():
            if waiter.done():
                continue
            try:
                if serve is None or not serve(entries):
                    waiter.set_result(None)
            except Exception as error:  # it is the reader's own, and must not hit the others
                waiter.set_exception(error)

    async def changed(self, serve: Serve | None = None) -> None:
        """Wait for the next entries that readers may see, and that ``serve`` did not deal with."""
        waiter = asyncio.get_running_loop().create_future()
        self._waiters[waiter] = serve
        try:
            await waiter
        finally:
            del self._waiters[waiter]

    @property
    def crowded(self) -> bool:
        """Whether several wait for what is new."""
        return len(self._waiters) > 1

    async def steady(self) -> TaskState:
        """Return the state once nothing in it waits to be stored; valid until the next await."""
        while self._firm > self._stored:
            try:
                async with asyncio.timeout(STORE_SECONDS):
                    await asyncio.shield(self._journal.commit())
            except TimeoutError:
                raise StoreUnavailableError(operation="loading") from None
        return self.state

    async def settled(self, since: int) -> TaskState:
        """Wait until the task has ended, or waits for a person by an entry after ``since``."""
        while True:
            state = await self.steady()
            if self.stopped(since):
                return state
            if self._left:
                raise StreamEndedError(LEFT, cause="drained", task_id=self.ref.id)
            await self.changed(lambda _: not (self._left or self.stopped(since)))

    def leave(self) -> None:
        """Let nobody wait any longer until the task stops: the service ends before."""
        self._left = True
        self._wake()

    def stopped(self, since: int) -> bool:
        """Whether the task has ended, or waits for a person by an entry after ``since``."""
        state = self.state.status.state
        return state.terminal or (state.interrupted and self._stop > since)

    def after(self, seq: int) -> list[Entry] | None:
        """Return shown entries after a number; None when the tail no longer reaches back so far."""
        start = seq + 1 - self._base
        if start < 0:
            return None
        return self._tail[start : min(start + BATCH, self._shown - self._base + 1)]

    def tap(self, cursor: Cursor | None = None) -> "LogReader":
        """Return a reader that goes on where another ended, or begins with the task as it is.

        Render the task before the next await: what is appended later follows as entries.
        """
        if cursor is not None and resumable(self.state, cursor):
            return LogReader(self, cursor.seq, resync=False)
        return LogReader(self, self.state.seq, resync=True)


_OPEN = {state: metrics.TASKS.labels(state) for state in OPEN}
_ENDED = {state: metrics.TASKS_ENDED.labels(state) for state in TERMINAL}


def _count(before: State, after: State) -> None:
    if before is after:
        return
    _OPEN[before].dec()
    if after in _ENDED:
        _ENDED[after].inc()
    else:
        _OPEN[after].inc()


class LogForgottenError(Exception):
    """The log of an ended task is no longer kept; its result is."""


class LogReader:
    """One reader's place in a log."""

    def __init__(self, log: TaskLog, after: int, *, resync: bool) -> None:
        self.state = log.state
        self.resync = resync
        """Whether the reader has to be given the task as it is before the entries that follow."""
        self.log = log
        self._after = after
        self._replay: Replay | None = None

    async def batch(self, hear: Callable[[list[Entry]], bool] | None = None) -> list[Entry]:
        """Return the next entries; none when the log is over.

        With ``hear``, growing text is handed over while waiting: most of a log is text, and to
        wake the reader for it would cost more than to write it. A reader that cannot take it
        now returns False and gets it by the usual way.
        """

        def serve(entries: list[Entry] | None) -> bool:
            if entries is None or entries[0].seq != self._after + 1:
                return False
            if hear is None or not hear(entries):
                return False
            self._after = entries[-1].seq
            return True

        while True:
            entries = self.log.after(self._after)
            if entries is None:
                entries = await self._catch_up()
            if entries:
                self._after = entries[-1].seq
                return entries
            if self.log.over:
                return []
            await self.log.changed(serve)

    async def _catch_up(self) -> list[Entry]:
        if self._replay is None:
            self._replay = Replay(self.log.database, self.log.no, self.log.ref)
        entries = await self._replay.next(self._after)
        if not entries:
            raise LogForgottenError(self.log.ref.id)
        return entries


class Replay:
    """Reads a log from the store, folding it again to know the status at each entry."""

    def __init__(self, database: Database, no: int, ref: TaskRef) -> None:
        self._database = database
        self._no = no
        self.state = TaskState(ref)

    async def next(self, after: int) -> list[Entry]:
        """Return the next stored entries that follow a number; none when there are no more."""
        while True:
            first = self.state.seq + 1

            def read(connection: Connection, first: int = first) -> list[rows.Segment]:
                return rows.load_segments(connection, self._no, first)

            segments = await self._database.read(read)
            entries = [
                self.state.apply(event, at)
                for segment in segments
                for at, event in load_entries(segment.data)
            ]
            wanted = [entry for entry in entries if entry.seq > after]
            if wanted or not segments:
                return wanted


def resumable(state: TaskState, cursor: Cursor) -> bool:
    """Whether a reader with this cursor has seen nothing but entries that still exist."""
    if cursor.epoch > state.epoch or cursor.seq > state.seq:
        return False
    return cursor.epoch == state.epoch or cursor.seq < state.epochs[cursor.epoch]
