"""Hand spans to OpenTelemetry's SDK, which sends them by OTLP over HTTP from a thread of its own.

Where they go, which are sampled and how long they may be is said by the standard variables
``OTEL_*``. A collector that is down or slow costs spans, and nothing else: the queue is bounded.
"""

import asyncio
import logging
import os
import threading
from collections.abc import Sequence

import structlog
from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.id_generator import IdGenerator
from opentelemetry.trace import (
    Link,
    NonRecordingSpan,
    SpanContext,
    SpanKind,
    StatusCode,
    TraceFlags,
    TraceState,
    set_span_in_context,
)

from opencode_a2a import __version__, metrics
from opencode_a2a.otel import names
from opencode_a2a.otel.spans import Span
from opencode_a2a.telemetry import Trace

logger = structlog.get_logger(__name__)

SERVICE = "opencode-a2a"
DELAY, DELAY_MS = "OTEL_BSP_SCHEDULE_DELAY", 1000.0
"""Spans that wait are lost by a kill, so that they wait less than the SDK's 5 seconds."""
FLUSH_SECONDS = 2.0
_SAMPLED = 1


class Export:
    """Sends spans to a collector."""

    def __init__(self, instance: str) -> None:
        ours = {
            "service.name": SERVICE,
            "service.version": __version__,
            "service.instance.id": instance,
        }
        self._ids = _Ids()
        self._provider = TracerProvider(
            resource=Resource.create(ours).merge(OTELResourceDetector().detect()),
            id_generator=self._ids,
            shutdown_on_exit=False,
        )
        delay = None if os.environ.get(DELAY) else DELAY_MS
        self._provider.add_span_processor(
            BatchSpanProcessor(_Counted(OTLPSpanExporter()), schedule_delay_millis=delay)
        )
        self._tracer = self._provider.get_tracer(SERVICE, __version__, schema_url=names.SCHEMA_URL)

    def sampled(self, trace: Trace) -> bool:
        """Whether the spans of a trace are sent; every process with these settings says the same.

        That holds for the samplers of the specification, which go by the trace and its parent.
        """
        parent, trace_id = _context(trace, trace.span_id), int(trace.trace_id, 16)
        decided = self._provider.sampler.should_sample(parent, trace_id, names.INVOKE_AGENT)
        return decided.decision.is_sampled()

    def send(self, span: Span, trace: Trace, kind: SpanKind = SpanKind.INTERNAL) -> None:
        """Queue a span that has ended; ``trace`` is that of its task, which is sampled."""
        self._ids.trace_id, self._ids.span_id = int(trace.trace_id, 16), int(span.id, 16)
        # A span of our own is sampled as its turn is; a turn as its caller and the settings want.
        inner = Trace(trace.trace_id, span.parent, f"{_SAMPLED:02x}", trace.state)
        links = () if span.link is None else (Link(_place(inner, span.link)),)
        made = self._tracer.start_span(
            span.name,
            _context(trace, trace.span_id) if span.parent is None else _context(inner, span.parent),
            kind,
            span.attributes,
            links,
            start_time=span.start * 1_000_000,
        )
        for name, at in span.events:
            made.add_event(name, timestamp=at * 1_000_000)
        if span.error:
            made.set_status(StatusCode.ERROR)
        made.end(span.end * 1_000_000)

    async def aclose(self) -> None:
        """Send what is queued, for a short time."""
        loop, done = asyncio.get_running_loop(), asyncio.Event()

        def close() -> None:
            self._provider.shutdown()
            if not loop.is_closed():
                loop.call_soon_threadsafe(done.set)

        # Not in a pool of the loop, whose threads are waited for at the end of the process.
        threading.Thread(target=close, name="otel-close", daemon=True).start()
        try:
            async with asyncio.timeout(FLUSH_SECONDS):
                await done.wait()
        except TimeoutError:
            logger.warning("some traces could not be sent before the end")


class _Ids(IdGenerator):
    """The ids of the span that is made next."""

    trace_id = span_id = 0

    def generate_trace_id(self) -> int:
        return self.trace_id

    def generate_span_id(self) -> int:
        return self.span_id


class _Counted(SpanExporter):
    """Counts what is sent, and tells of a collector that goes away once, and of its return."""

    def __init__(self, inner: SpanExporter) -> None:
        self._inner = inner
        self._fails = False
        # It logs every attempt, and would fill the log while the collector is down.
        logging.getLogger("opentelemetry.exporter").setLevel(logging.CRITICAL)

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        try:
            result = self._inner.export(spans)
        except Exception as error:  # a fault of the exporter must not end its thread
            logger.warning("traces could not be sent", cause=type(error).__name__)
            result = SpanExportResult.FAILURE
        fails = result is not SpanExportResult.SUCCESS
        metrics.OTEL_SPANS.labels("failed" if fails else "sent").inc(len(spans))
        if fails != self._fails:
            self._fails = fails
            if fails:
                logger.warning("traces could not be sent; see OTEL_EXPORTER_OTLP_ENDPOINT")
            else:
                logger.warning("traces sent again")
        return result

    def shutdown(self) -> None:
        self._inner.shutdown()

    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        return self._inner.force_flush(timeout_millis)


def _place(trace: Trace, span_id: str, *, remote: bool = False) -> SpanContext:
    state = TraceState.from_header([trace.state]) if trace.state else TraceState()
    flags = TraceFlags(int(trace.flags, 16) & 0xFF)
    return SpanContext(int(trace.trace_id, 16), int(span_id, 16), remote, flags, state)


def _context(trace: Trace, parent: str | None) -> Context:
    """Return the context of a span whose parent this is; an empty one for a root."""
    if parent is None:
        return Context()
    return set_span_in_context(NonRecordingSpan(_place(trace, parent, remote=True)), Context())
