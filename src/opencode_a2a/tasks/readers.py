"""Readers of the logs of tasks.

A live reader follows one task for a client that is connected. ``LogReader`` is its place in the
log: a binding asks it for entries, or gives it a function that writes new ones at once. What a log
demands of a live reader is ``log.LiveReader``.

A durable reader follows tasks for a receiver that need not be connected, such as a webhook. Its
place in each log is stored, so that it outlives the process. ``DurableReader`` is what the service
demands of it.

``Replay`` reads a log that nobody has in memory.
"""

import asyncio
from collections.abc import Callable, Mapping
from typing import Protocol

from sqlalchemy import ColumnElement
from sqlalchemy.engine import Connection

from opencode_a2a.errors import StreamEndedError
from opencode_a2a.messages import PushConfig
from opencode_a2a.store import tasks as task_rows
from opencode_a2a.store.database import Database
from opencode_a2a.tasks.log import TaskLog
from opencode_a2a.tasks.state import STATE_CHANGES, Cursor, Entry, TaskRef, TaskState, load_entries

Push = Callable[[list[Entry]], bool]
"""Writes entries to a client at once; False if the client cannot take them now."""
Begin = Callable[[TaskLog], None]
"""Begins to follow a task, given its log."""


class LogForgottenError(Exception):
    """The log of an ended task is no longer kept; its result is."""


def resumable(state: TaskState, cursor: Cursor) -> bool:
    """Whether a reader with this cursor has seen nothing but entries that still exist."""
    if cursor.epoch > state.epoch or cursor.seq > state.seq:
        return False
    return cursor.epoch == state.epoch or cursor.seq < state.epochs[cursor.epoch]


class LogReader:
    """The place of one live reader in a log.

    It begins after ``cursor``, the last entry that an earlier reader of the same client had, or
    with the task as it is now. Render the task before the next await: entries that are appended
    later follow.

    It ends with the task; with ``until_asked`` also when the task begins to wait for a person.
    With ``stored_only`` it gets entries once they are stored, so that no crash can take them back;
    readers of A2A 1.1 will be such (``docs/architecture.md``), and until then only tests are.
    Entries that are read with ``supervises`` do not count as seen by the person who may answer.
    """

    def __init__(
        self,
        log: TaskLog,
        cursor: Cursor | None = None,
        *,
        until_asked: bool = False,
        stored_only: bool = False,
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
        self._stored_only = stored_only
        self._ended = False
        self._push: Push | None = None
        self._waiter: asyncio.Future[None] | None = None
        """Done when ``next`` has to look for entries again."""
        self._replay: Replay | None = None

    async def next(self, push: Push | None = None) -> list[Entry]:
        """Return the next entries; none when there are no more.

        While it waits, new entries go to ``push`` as they come: waking the reader's task for each
        piece of text would cost more than writing it. Entries that ``push`` cannot take now are
        returned.
        """
        while not self._ended:
            entries = self.log.after(self._after, stored_only=self._stored_only)
            if entries is None:
                if self._replay is None:
                    self._replay = Replay(self.log.database, self.log.no, self.log.ref)
                entries = await self._replay.next(self._after)
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
            self._push, self._waiter = push, asyncio.get_running_loop().create_future()
            readers = self.log.readers_of_stored if self._stored_only else self.log.readers
            readers.add(self)
            try:
                await self._waiter
            finally:
                readers.discard(self)
                self._waiter = None
        return []

    def offer(self, entries: list[Entry]) -> None:
        """Push new entries, or wake ``next`` to get them."""
        waiter = self._waiter
        if waiter is None or waiter.done():
            return
        try:
            if self._push is not None and entries and entries[0].seq == self._after + 1:
                # Most entries are text, one at a time, and end nothing.
                text = len(entries) == 1 and entries[0].status is None
                wanted = entries if text else self._until_end(entries)
                if self._push(wanted):
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


class DurableReader(Protocol):
    """Follows tasks, and keeps its place in each of their logs in the database.

    ``app`` lists the durable readers; ``outbox.Outbox`` is one. The replica that runs a task
    serves it, so that a task is followed in one place at a time. For each task that somebody wants
    followed, a reader runs an asyncio task of its own. That

    - holds the log by a weak reference: a log holds the whole task, and is not kept for a receiver
      that is away;
    - waits in ``TaskLog.next_change``, and calls ``stored_changes`` if that raises
      ChangesInStoreError, or if there is no log in memory because the task has ended;
    - calls ``TaskLog.note_seen`` for what it shows to a person;
    - stores its place when the receiver has taken an entry, so that a crash can repeat an entry and
      loses none;
    - ends after the entry that ends the task, and when StreamEndedError says that the log has
      moved: then another replica continues.

    ``tests/unit/test_log.py`` has a small one, ``StateList``.
    """

    def admit(
        self, connection: Connection, task_no: int, ref: TaskRef, push: PushConfig | None
    ) -> Begin | None:
        """Store the first place in a new task, in the transaction that stores the task.

        ``push`` came with the message. Return what begins to follow the task once it is stored;
        None if nobody wants it followed. An error refuses the message.

        It sees new tasks only: ``recover`` finds tasks from before, imported ones, and those that
        another replica has ended (``end_unowned``). It runs in the thread that writes, and may run
        again if the transaction does: change nothing but the database here.
        """
        ...

    async def recover(
        self, logs: Mapping[int, TaskLog], handed_over: Mapping[str, bool] | None
    ) -> None:
        """Continue from all stored places, or from those in the tasks of some OpenCodes.

        The service calls it when it starts, and when it has become the owner of OpenCodes, which
        ``handed_over`` names (``recovery.recover``). ``logs`` are those of open tasks, by number;
        the logs of ended tasks are in the store. If the database goes away in between it is called
        again, and finds tasks that are followed already.
        """
        ...

    def unread(self) -> ColumnElement[bool]:
        """Return the condition that this reader has yet to read the log of a row of ``tasks``.

        While it holds, the log of an ended task is kept.
        """
        ...

    async def give_up(self, upstream: str) -> None:
        """Stop following the tasks of an OpenCode, whose logs have moved to another replica.

        That replica continues as soon as this returns.
        """
        ...

    async def close(self) -> None:
        """Stop following tasks: the service ends. The next start continues."""
        ...


class Replay:
    """Reads a log from the store, folding it again to know the status at each entry."""

    def __init__(self, database: Database, no: int, ref: TaskRef) -> None:
        self._database = database
        self._no = no
        self.state = TaskState(ref)

    async def next(self, after: int) -> list[Entry]:
        """Return the next stored entries after a sequence number; none when there are no more."""
        while True:
            segments = await self._database.read(
                task_rows.load_segments, self._no, self.state.seq + 1
            )
            entries = [
                self.state.apply(event, at)
                for segment in segments
                for at, event in load_entries(segment.data)
            ]
            wanted = [entry for entry in entries if entry.seq > after]
            if wanted or not segments:
                return wanted


async def stored_changes(database: Database, task_no: int, ref: TaskRef, after: int) -> list[Entry]:
    """Return the next changes of state after an entry from the stored log.

    None are left, or the log of an ended task is no longer kept, if the list is empty.
    """
    replay, changes = Replay(database, task_no, ref), list[Entry]()
    while len(changes) < STATE_CHANGES and (entries := await replay.next(replay.state.seq)):
        changes += (entry for entry in entries if entry.changes_state and entry.seq > after)
    return changes


async def stored_task(log: TaskLog) -> TaskState:
    """Return a task as it is stored; a reader with ``stored_only`` continues from there."""
    replay = Replay(log.database, log.no, log.ref)
    while await replay.next(replay.state.seq):
        pass
    return replay.state
