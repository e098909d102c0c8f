"""A message becomes a task, once: committed before anything runs.

A message with the same id and the same content is a repeat and finds the task it led to; with
other content it is a new message. What a caller may have open at once is limited.
"""

import hashlib
from collections import Counter
from dataclasses import dataclass

import orjson
from sqlalchemy.engine import Connection

from opencode_a2a.clock import now_ms
from opencode_a2a.config import LimitSettings
from opencode_a2a.errors import LimitExceededError
from opencode_a2a.ids import ContextId, Principal, TaskId, new_message_id, new_uuid
from opencode_a2a.store import tasks as rows
from opencode_a2a.store.database import Database
from opencode_a2a.store.tasks import Segment, TaskRow
from opencode_a2a.tasks.codec import Request, dump_entries, dump_request, dump_status
from opencode_a2a.tasks.commands import SendCommand
from opencode_a2a.tasks.state import Accepted, TaskRef, TaskState


@dataclass(frozen=True, slots=True)
class Admitted:
    """A new task: its number, its state after the first entry, and what it is to prompt."""

    no: int
    state: TaskState
    request: Request
    new_context: bool


def digest(order: SendCommand) -> bytes:
    """Return what identifies a message's content: a repeat has the same id and digest.

    A message on a task is an answer. It stays the same answer whatever else the request says: a
    client that repeats it may have learnt the context meanwhile.
    """
    content: tuple[object, ...] = (order.message, order.task_id)
    if order.task_id is None:
        content += (order.context_id, order.routing, order.output_modes)
    return hashlib.sha256(orjson.dumps(content, option=orjson.OPT_SORT_KEYS)).digest()


class Admission:
    def __init__(self, database: Database, limits: LimitSettings) -> None:
        self._database = database
        self._limits = limits
        self._open: Counter[Principal] = Counter()
        self._total = 0

    def opened(self, principal: Principal) -> None:
        self._open[principal] += 1
        self._total += 1

    def closed(self, principal: Principal) -> None:
        self._open[principal] -= 1
        self._total -= 1
        if self._open[principal] <= 0:
            del self._open[principal]

    async def repeated(self, order: SendCommand) -> TaskRow | None:
        """Return the task that this very message led to before."""
        known = digest(order)

        def read(connection: Connection) -> TaskRow | None:
            return _earlier(connection, order, known)

        return await self._database.read(read)

    async def admit(self, order: SendCommand) -> Admitted | TaskRow:
        """Store a new task; return the earlier one if the message was here before."""
        ref = TaskRef(
            TaskId(new_uuid()),
            ContextId(order.context_id or new_uuid()),
            order.principal,
            order.output_modes,
            now_ms(),
        )
        state = TaskState(ref)
        entry = state.apply(Accepted(order.message), ref.created_at)
        request = Request(order.prompt, order.routing, new_message_id())
        row = TaskRow(
            id=ref.id,
            principal=ref.principal,
            context_id=ref.context_id,
            state=state.status.state,
            created_at=ref.created_at,
            updated_at=ref.created_at,
            status=dump_status(state.status),
            output_modes=None if ref.output_modes is None else orjson.dumps(ref.output_modes),
            request=dump_request(request),
        )
        segment, known = dump_entries([entry]), digest(order)
        room = self._room(order.principal)

        def write(connection: Connection) -> int | TaskRow:
            earlier = _earlier(connection, order, known)
            if earlier is not None:
                return earlier
            if not room:
                raise LimitExceededError(limit=self._limits.max_tasks_per_principal)
            no = rows.add_task(connection, row)
            rows.add_message(connection, order.principal, order.message.message_id, no, known)
            rows.append(connection, [Segment(no, 1, 1, segment)], [])
            return no

        # The place is held during the write, in which others ask for room. When it is given back,
        # the caller counts the task before anything else can run.
        if room:
            self.opened(order.principal)
        try:
            outcome = await self._database.write(write)
        finally:
            if room:
                self.closed(order.principal)
        if isinstance(outcome, TaskRow):
            return outcome
        return Admitted(outcome, state, request, new_context=order.context_id is None)

    def _room(self, principal: Principal) -> bool:
        limits = self._limits
        return (
            self._open[principal] < limits.max_tasks_per_principal
            and self._total < limits.max_open_tasks
        )


def _earlier(connection: Connection, order: SendCommand, known: bytes) -> TaskRow | None:
    task_no = rows.find_message(connection, order.principal, order.message.message_id, known)
    return None if task_no is None else rows.load_number(connection, task_no)
