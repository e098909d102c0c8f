"""Follow the tasks that this process runs, and send a span for everything that ends in their logs.

``log.log`` calls ``Tracing.note`` with what is appended, except for text that only grows, and
``push.loop`` sends notifications through ``Tracing.sending``. A task that an earlier process began
is read from its log first, beside the turn, which waits for nothing here.
"""

import asyncio
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from urllib.parse import urlsplit

import structlog
from opentelemetry.trace import SpanKind

from opencode_a2a.clock import now_ms
from opencode_a2a.config import Settings
from opencode_a2a.log.log import TaskLog
from opencode_a2a.log.state import Entry, Recovered
from opencode_a2a.log.stored import Replay
from opencode_a2a.otel import names
from opencode_a2a.otel.export import Export
from opencode_a2a.otel.spans import Span, TaskSpans, turn_id
from opencode_a2a.push.notification import Notification, Receipt, Sender
from opencode_a2a.store.database import Database
from opencode_a2a.store.webhooks import HookRow
from opencode_a2a.telemetry import Trace, current_trace, draw_id

logger = structlog.get_logger(__name__)

UNSENT_MS = 30_000
"""What ended so shortly before a process died may not have been sent, and is sent again."""
_SAMPLED = 1


@dataclass(eq=False, slots=True)
class _Followed:
    """A task that runs here, whose trace is sampled."""

    spans: TaskSpans
    trace: Trace
    behind: list[Entry] | None = None
    """Entries that wait until the earlier ones were read; None once they were."""
    reading: asyncio.Task[None] | None = None
    unsent: list[Span] = field(default_factory=list[Span])


class Tracing:
    """Makes spans of the logs of tasks; an ``Observer`` of them (``log.log``)."""

    def __init__(self, settings: Settings, database: Database) -> None:
        self._content = settings.otel.content
        self._database = database
        self._export = Export(settings.replica_name)
        self._followed: dict[int, _Followed] = {}
        """By the number of the task."""

    # What ``log.log`` tells

    def note(self, log: TaskLog, entries: Sequence[Entry]) -> None:
        try:
            followed = self._follow(log, entries[0].seq - 1)
            if followed is None:
                return
            if followed.behind is not None:
                followed.behind += entries
            else:
                self._apply(log, followed, entries)
        except Exception:  # no turn may fail because of its trace
            logger.exception("a trace is incomplete", task_id=log.ref.id)
            self._followed.pop(log.no, None)

    def trace(self, log: TaskLog) -> Trace | None:
        trace = Trace.load(log.state.status.trace)
        if trace is None:
            return None
        sampled = self._follow(log, log.state.seq) is not None
        return _inside(trace, turn_id(log.ref.id, log.state.turn), sampled=sampled)

    def left(self, log: TaskLog) -> None:
        followed = self._followed.pop(log.no, None)
        if followed is not None and followed.behind is None:
            self._send(followed.spans.leave(now_ms()), followed.trace)

    def _follow(self, log: TaskLog, known: int) -> _Followed | None:
        """Return the spans of a task, of which ``known`` entries were there before.

        None if its trace is not sampled, or it began before traces were stored.
        """
        followed = self._followed.get(log.no)
        if followed is not None or log.state.status.trace is None:
            return followed
        trace = Trace.load(log.state.status.trace)
        if trace is None or not self._export.sampled(trace):
            return None
        followed = _Followed(TaskSpans(log.ref, content=self._content), trace)
        self._followed[log.no] = followed
        if known <= 1:  # it begins here
            followed.spans.begin(log.ref.created_at, log.state.history[:1])
        else:
            followed.behind = []
            followed.reading = asyncio.create_task(
                self._catch_up(log, followed, known), name=f"trace of {log.ref.id}"
            )
        return followed

    async def _catch_up(self, log: TaskLog, followed: _Followed, known: int) -> None:
        """Read what earlier processes logged of a task, and continue from there."""
        spans, at = followed.spans, now_ms()
        try:
            replay = Replay(self._database, log.no, log.ref)
            while replay.state.seq < known and (entries := await replay.next(replay.state.seq)):
                for entry in entries:
                    if entry.seq <= known:
                        followed.unsent += spans.apply(entry, replay.state)
                if not self._content:
                    replay.forget_contents()
            behind, followed.behind = followed.behind or [], None
            if any(isinstance(entry.event, Recovered) for entry in behind):
                recent = spans.last - UNSENT_MS
                self._send((one for one in followed.unsent if one.end >= recent), followed.trace)
            else:
                self._send(spans.resume(at, f"taken over {at}", "taken_over"), followed.trace)
            followed.unsent = []
            self._apply(log, followed, behind)
        except Exception:  # as above
            logger.exception("a trace is incomplete", task_id=log.ref.id)
            self._followed.pop(log.no, None)

    def _apply(self, log: TaskLog, followed: _Followed, entries: Iterable[Entry]) -> None:
        for entry in entries:
            self._send(followed.spans.apply(entry, log.state), followed.trace)
            if entry.status is not None and entry.status.state.terminal:
                self._followed.pop(log.no, None)

    def _send(self, spans: Iterable[Span], trace: Trace) -> None:
        for span in spans:
            self._export.send(span, trace)

    # Webhooks

    def sending(self, sender: Sender) -> Sender:
        """Return a sender that makes a span of every attempt."""
        return _TracedSender(sender, self._export)

    async def aclose(self) -> None:
        """Send what is queued; spans that are open are made by whoever takes their tasks up."""
        reading = [one.reading for one in self._followed.values() if one.reading is not None]
        for task in reading:
            task.cancel()
        await asyncio.gather(*reading, return_exceptions=True)
        await self._export.aclose()


class _TracedSender:
    def __init__(self, inner: Sender, export: Export) -> None:
        self._inner = inner
        self._export = export

    async def send(
        self, row: HookRow, notification: Notification, shown: Callable[[], None]
    ) -> Receipt:
        status = notification.what.status
        trace = Trace.load(status.trace) if status is not None else None
        if trace is None or not self._export.sampled(trace):
            return await self._inner.send(row, notification, shown)
        ref, url = notification.ref, urlsplit(row.url)
        # Whatever turn it was, the first is there.
        span = Span(names.WEBHOOK, draw_id(8), turn_id(ref.id, 1), now_ms())
        span.attributes |= {
            names.CONVERSATION: ref.context_id,
            names.TASK: ref.id,
            names.HTTP_METHOD: "POST",
            names.SERVER_ADDRESS: url.hostname or "",
        }
        if url.port is not None:
            span.attributes[names.SERVER_PORT] = url.port
        if row.attempts:
            span.attributes[names.HTTP_RESENT] = row.attempts
        if status is not None:
            span.attributes[names.TASK_STATE] = status.state.value
        current_trace.set(_inside(trace, span.id, sampled=True))
        outcome = "canceled"
        try:
            receipt = await self._inner.send(row, notification, shown)
            outcome = receipt.name
            return receipt
        finally:
            span.attributes[names.DELIVERY_OUTCOME] = outcome
            code = outcome.removeprefix("http_")
            if code.isdecimal():
                span.attributes[names.HTTP_STATUS] = int(code)
            error = None if outcome == "ok" else code
            self._export.send(span.ended(now_ms(), error), trace, SpanKind.CLIENT)


def _inside(trace: Trace, span_id: str, *, sampled: bool) -> Trace:
    """Return the position of a span of ours in a trace."""
    flags = int(trace.flags, 16) & ~_SAMPLED | (_SAMPLED if sampled else 0)
    return Trace(trace.trace_id, span_id, f"{flags:02x}", trace.state)
