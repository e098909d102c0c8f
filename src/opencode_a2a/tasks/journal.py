"""Writes the entries of all tasks, in groups.

Text waits up to 50 ms for company; a change of state is written at once and waited for. A
database that is away only delays: what it has not taken stays here, in order, until it does.
"""

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Protocol

import structlog
from sqlalchemy.engine import Connection

from opencode_a2a.ids import Principal
from opencode_a2a.store import tasks as rows
from opencode_a2a.store.database import Database
from opencode_a2a.store.tasks import Move, Segment
from opencode_a2a.tasks.codec import dump_archive, dump_entries, dump_status
from opencode_a2a.tasks.lifecycle import Entry, State, TaskState

log = structlog.get_logger(__name__)

GROUP_SECONDS = 0.05
GROUP_ENTRIES = 2_000


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


class Journal:
    """The one writer of logs; ``run`` is its task."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._waiting: dict[int, _Share] = {}
        self._count = 0
        self._work = asyncio.Event()
        self._hurry = asyncio.Event()
        self._group: asyncio.Future[None] | None = None

    def add(self, writer: Writer, before: State, entries: Sequence[Entry]) -> None:
        """Queue entries of a task whose stored state is ``before`` what they lead to."""
        share = self._waiting.get(writer.no)
        if share is None:
            share = self._waiting[writer.no] = _Share(writer, before)
        share.entries.extend(entries)
        self._count += len(entries)
        self._work.set()
        if self._count >= GROUP_ENTRIES:
            self._hurry.set()

    def commit(self) -> asyncio.Future[None]:
        """Write at once; the future is done when all that was queued is stored."""
        if self._group is None:
            self._group = asyncio.get_running_loop().create_future()
        self._work.set()
        self._hurry.set()
        return self._group

    async def run(self) -> None:
        while True:
            await self._work.wait()
            with suppress(TimeoutError):
                async with asyncio.timeout(GROUP_SECONDS):
                    await self._hurry.wait()
            await self.flush()

    async def flush(self) -> None:
        """Store what waits now, however long the database takes."""
        self._work.clear()
        self._hurry.clear()
        shares, self._waiting, self._count = list(self._waiting.values()), {}, 0
        group, self._group = self._group, None
        if shares:
            await self._store(shares)
        for share in shares:
            share.writer.stored(share.entries[-1].seq)
        if group is not None:
            group.set_result(None)

    async def _store(self, shares: list[_Share]) -> None:
        def write(connection: Connection) -> None:
            moves = [share.move(share.writer.state.ref.principal) for share in shares]
            rows.append(
                connection,
                [share.segment() for share in shares],
                [move for move in moves if move is not None],
            )

        await self._database.insist(write)
