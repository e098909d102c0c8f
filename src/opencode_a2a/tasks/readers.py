"""Durable readers of the logs of tasks.

A durable reader follows tasks for a receiver that need not be connected, such as a webhook. Its
position in each log is stored, so that it outlives the process. ``DurableReader`` is what the
service demands of it. For a client that is connected, see ``log.LogReader``.
"""

from collections.abc import Callable, Collection, Mapping
from typing import Protocol, runtime_checkable

from sqlalchemy import ColumnElement
from sqlalchemy.engine import Connection

from opencode_a2a.tasks.log import ReadableLog
from opencode_a2a.tasks.state import TaskRef

Begin = Callable[[ReadableLog], None]
"""Begins to follow a task, given its log."""


class DurableReader(Protocol):
    """Follows tasks, and keeps its position in each of their logs in the database.

    ``app.parts`` lists the durable readers; ``outbox.Outbox`` is one. The replica that runs a task
    follows it, so that a task is followed once at a time. For each task that somebody wants
    followed, a reader runs an asyncio task of its own. That

    - holds the log by a weak reference: a log holds the whole task, and is not kept for a receiver
      that is away;
    - waits in ``ReadableLog.next_change``, and calls ``stored_changes`` if that raises
      ChangesInStoreError;
    - reads the row of the task first if there is no log in memory. If the task has ended, it calls
      ``stored_changes``. If the task is open, this replica has given it up: it ends, and leaves its
      stored position to the next owner;
    - tries again later if the database raises StoreUnavailableError;
    - calls ``ReadableLog.note_seen`` for what it shows to a person;
    - calls ``Database.check_writable`` before it sends anything, if there are other replicas: this
      one may have been suspended while another took over;
    - stores its position when the receiver has taken an entry, so that a crash can repeat an entry
      and loses none;
    - ends after the entry that ends the task, and when StreamEndedError says that the log has
      moved: then another replica continues.

    The code that sends, and knows the form of what is sent, lives in ``server``; the reader is
    given it by a protocol of its own (``outbox.Sender``, ``server.push``).

    ``tests/unit/test_log.py`` has a small one, ``StateList``. For something that is to happen once
    for each ended task, in whatever order, a loop may be all that is needed: each replica looks at
    ended rows whose upstream it owns.
    """

    async def recover(
        self, logs: Mapping[int, ReadableLog], upstreams: Collection[str] | None
    ) -> None:
        """Continue from the stored positions in the tasks of these OpenCodes; None means all tasks.

        The service calls it when it starts, and when it has become the owner of OpenCodes.
        ``logs`` are those of open tasks, by number; the logs of ended tasks are in the store: a
        task may have ended while nobody followed it.
        A task without a stored position is not found. If the database goes away in between it is
        called again, and finds tasks that are followed already.
        """
        ...

    def unread(self) -> ColumnElement[bool]:
        """Return the condition that this reader has yet to read the log of a row of ``tasks``.

        While it holds, an ended task is kept, with its log. So it must not hold forever, and has to
        be false for all rows while the reader is switched off.
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


@runtime_checkable
class NewTaskReader(DurableReader, Protocol):
    """A durable reader that follows every new task, or decides about each whether to follow it."""

    def admit(self, connection: Connection, task_no: int, ref: TaskRef) -> Begin | None:
        """Store the first position in a new task, in the transaction that stores the task.

        Return the function that begins to follow the task once it is stored; None if nobody wants
        it followed. An error refuses the message.

        It runs in the thread that writes, and may run again if the transaction does: change nothing
        but the database here.
        """
        ...
