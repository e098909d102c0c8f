"""Writes the entries of all tasks, in groups.

Text waits up to 50 ms for company; a change of state is written at once and waited for. A
database that is away only delays: what it has not taken stays here, in order, until it does.
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from sqlalchemy.engine import Connection

from opencode_a2a.ids import Principal
from opencode_a2a.store import tasks as rows
from opencode_a2a.store.database import Database
from opencode_a2a.store.tasks import Move, Segment
from opencode_a2a.tasks.codec import dump_archive, dump_entries, dump_status
from opencode_a2a.tasks.state import Entry, State, TaskState

GROUP_SECONDS = 0.05
GROUP_ENTRIES = 2_000


Write = Callable[[Connection], None]


class Writer(Protocol):
    """Whoever has entries to store; told when they are."""

    no: int
    state: TaskState

    def stored(self, seq: int) -> None: ...


@dataclass(slots=True)
class _Share:
    """What one task has waiting."""

    writer: Writer
    before: State
    entries: list[Entry] = field(default_factory=list[Entry])
    also: list[Write] = field(default_factory=list[Write])

    def segment(self) -> Segment:
        return Segment(
            self.writer.no, self.entries[0].seq, self.entries[-1].seq, dump_entries(self.entries)
        )

    def move(self, principal: Principal) -> Move | None:
        status = next((e.status for e in reversed(self.entries) if e.status is not None), None)
        if status is None:
            return None
        ended = status.state.terminal
        return Move(
            self.writer.no,
            principal,
            self.before,
            status.state,
            status.at,
            dump_status(status),
            dump_archive(self.writer.state) if ended else None,
        )


class _Batch:
    """What goes into one transaction."""

    def __init__(self, shares: list[_Share], group: asyncio.Future[None] | None) -> None:
        self.shares = shares
        self._group = group

    def write(self, connection: Connection) -> None:
        moves = [share.move(share.writer.state.ref.principal) for share in self.shares]
        rows.append(
            connection,
            [share.segment() for share in self.shares],
            [move for move in moves if move is not None],
        )
        for share in self.shares:
            for also in share.also:
                also(connection)

    def stored(self) -> None:
        for share in self.shares:
            share.writer.stored(share.entries[-1].seq)
        if self._group is not None and not self._group.done():
            self._group.set_result(None)


class LogWriter:
    """The one writer of logs. It needs ``run`` beside it for the days the database is away."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._loop = asyncio.get_running_loop()
        self._waiting: dict[int, _Share] = {}
        self._count = 0
        self._group: asyncio.Future[None] | None = None
        """Done when all that waits now is stored."""
        self._due: asyncio.Handle | None = None
        """The next write, as soon as the one under way is done."""
        self._hurry = False
        self._writing: _Batch | None = None
        self._refused = asyncio.Event()

    def add(
        self,
        writer: Writer,
        before: State,
        entries: Sequence[Entry],
        also: Write | None = None,
    ) -> None:
        """Queue entries of a task whose stored state is ``before`` what they lead to."""
        share = self._waiting.get(writer.no)
        if share is None:
            share = self._waiting[writer.no] = _Share(writer, before)
        share.entries += entries
        if also is not None:
            share.also.append(also)
        self._count += len(entries)
        if self._due is None:
            self._due = self._loop.call_later(GROUP_SECONDS, self._write)
        if self._count >= GROUP_ENTRIES:
            self._hasten()

    def commit(self) -> asyncio.Future[None]:
        """Write at once; the future is done when all that was queued is stored."""
        if self._group is None:
            self._group = self._loop.create_future()
        self._hasten()
        return self._group

    def _hasten(self) -> None:
        if not self._hurry:
            self._hurry = True
            if self._due is not None:
                self._due.cancel()
            self._due = self._loop.call_soon(self._write)

    def _write(self) -> None:
        if self._writing is not None:
            self._hurry = True  # it is done as soon as that is
            return
        if self._due is not None:
            self._due.cancel()
        self._due, self._hurry, self._count = None, False, 0
        batch = _Batch(list(self._waiting.values()), self._group)
        self._waiting, self._group = {}, None
        if not batch.shares:
            batch.stored()
            return
        self._writing = batch
        self._database.post(batch.write).add_done_callback(self._written)

    def _written(self, done: asyncio.Future[None]) -> None:
        if done.exception() is None:
            self._settle()
        else:
            self._refused.set()

    def _settle(self) -> None:
        batch, self._writing = self._writing, None
        if batch is not None:
            batch.stored()
        if self._hurry:
            self._write()

    async def run(self) -> None:
        """Write what was refused, again and again until it is taken."""
        while True:
            await self._refused.wait()
            self._refused.clear()
            if self._writing is not None:
                await self._database.insist(self._writing.write)
                self._settle()
