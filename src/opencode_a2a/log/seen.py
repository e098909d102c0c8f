"""What readers of a task were shown of its requests, and when.

A plain "yes" counts only for requests that somebody had the time to read. Each log has a
``SeenRequests``, also that of a task which another replica runs (``RemoteLog``).

Who notes that a request was shown, always by ``note_seen`` or ``note_seen_number`` of the log:

- ``LogReader``, for streams; ``server.operations`` and ``TaskService``, for tasks in responses
- ``push.loop``, once a notification is written (``OpenTasks.note_seen``), and ``notices.pages``
- ``tasks.continuing``, for a request that a refusal shows

Who tells the replica that runs the task, where the answer is judged:

- ``RemoteLog.note_seen_number`` and ``OpenTasks.note_seen``, by a notification (``t``), which
  ``OpenTasks`` takes there; it may be late or lost
- a forwarded message itself, with ``SendCommand.seen_at_sender``

Who asks: ``tasks.continuing``, where the task runs, up to which number an answer counts that names
no request (``newest_in_time``).
"""

import time
from collections.abc import Iterable

from opencode_a2a.events import Interrupted, Resumed
from opencode_a2a.ids import ContextId, Principal
from opencode_a2a.log.state import Entry, Status, TaskRef, TaskState

UNREAD_SECONDS = 1.5
"""Nobody reads a request and answers it in less time; an answer that comes sooner may be a late or
doubled answer to an earlier request."""
SETTLED_SECONDS = 5.0
"""How long an answer to a request that was settled may still be on its way, or be sent again."""


class Settlements:
    """When a request of each context was last settled, by the monotonic clock."""

    def __init__(self) -> None:
        self._at: dict[tuple[Principal, ContextId], float] = {}

    def note(self, ref: TaskRef, now: float) -> None:
        self._at = {key: at for key, at in self._at.items() if now - at < SETTLED_SECONDS}
        self._at[ref.principal, ref.context_id] = now

    def last(self, ref: TaskRef) -> float:
        return self._at.get((ref.principal, ref.context_id), -SETTLED_SECONDS)


class SeenRequests:
    """Which requests to a person (see ``Interrupted.number``) a reader of the task has seen.

    An answer that names no request is for what was seen when it came. But an answer to a request
    that was settled a moment ago may be late, or be sent twice: then it counts only for requests
    that somebody had the time to read.
    """

    def __init__(self, state: TaskState, settlements: Settlements) -> None:
        self._state = state
        self._settlements = settlements
        self._began = time.monotonic()
        self._settled_at = self._recovered_at = self._began - SETTLED_SECONDS
        self.newest = 0
        """The highest number that a reader was given."""
        self._read = 0
        """The highest number that a reader was given more than ``UNREAD_SECONDS`` ago."""
        self._seen_at: dict[int, float] = {}
        """When a reader was given those after it, by number."""

    def recover(self) -> None:
        """After a restart, assume that readers were given the requests that are open just now.

        But if nobody answered the request before them in time, they must be seen again: a late
        answer to the earlier one may still arrive.
        """
        # Nobody knows how long ago a request of the task, or of its context, was settled.
        self._recovered_at = time.monotonic()
        if self._state.settled:
            self._settled_at = self._recovered_at
        if not self._unanswered:
            pending = (one.number or 0 for one in self._state.status.pending)
            self.note(max(pending, default=0))

    def note(self, number: int) -> bool:
        """Note that a reader was given the requests up to a number; False if it was known."""
        if number <= self.newest:
            return False
        now = time.monotonic()
        self._read = self._read_by(now)
        self._seen_at = {one: at for one, at in self._seen_at.items() if one > self._read}
        self._seen_at[number] = now
        self.newest = number
        return True

    def note_entries(self, before: Status, entries: Iterable[Entry]) -> None:
        """Note what new entries say of requests; ``before`` is the status before them."""
        pending = {one.request_id for one in before.pending}
        for entry in entries:
            match entry.event:
                case Resumed():
                    self.note_settled()
                case Interrupted(request_id=request_id) if request_id in pending:
                    self._note_changed(entry.event.number or 0)
                case _:
                    pass

    def _note_changed(self, number: int) -> None:
        """Note that a request is no longer what was shown: it has to be shown again, and read."""
        self.newest = min(self.newest, number - 1)
        self._read = min(self._read, self.newest)
        self._seen_at = {one: at for one, at in self._seen_at.items() if one < number}
        self.note_settled()

    def note_settled(self) -> None:
        """Note that a request of the task is settled."""
        self._settled_at = time.monotonic()
        self._settlements.note(self._state.ref, self._settled_at)

    def newest_in_time(self, came: float, *, by_context: bool = False) -> int:
        """Return the highest number shown in time for an answer that names none and came then.

        An answer may be late for any request of its context if it names only that
        (``by_context``), except for tasks that began since.
        """
        settled = [self._settled_at]
        if by_context:
            settled.append(self._recovered_at)
            if (of_context := self._settlements.last(self._state.ref)) > self._began:
                settled.append(of_context)
        doubtful = self._unanswered or came - max(settled) < SETTLED_SECONDS
        return self._read_by(came) if doubtful else self.newest

    def _read_by(self, came: float) -> int:
        read = (one for one, at in self._seen_at.items() if came - at >= UNREAD_SECONDS)
        return max(read, default=self._read)

    @property
    def _unanswered(self) -> bool:
        """Whether nobody answered the request before the present one."""
        last = next(reversed(self._state.settled.values()), None)
        return last is not None and last.resolution in ("expired", "void")
