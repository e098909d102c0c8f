"""A collector of traces: takes OTLP over HTTP, and reads it with OpenTelemetry's own types."""

import asyncio
import gzip
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from typing import Any, Self

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.trace.v1.trace_pb2 import Span
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from tests.support.running import running

PATIENCE = 60.0


class Collector:
    """An ASGI application; ``url`` is the endpoint to export to."""

    def __init__(self) -> None:
        self.url = ""
        self.bodies: list[bytes] = []
        self.requests: list[ExportTraceServiceRequest] = []
        self._arrived = asyncio.Condition()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        request = Request(scope, receive)
        assert request.url.path == "/v1/traces"
        body = await request.body()
        if request.headers.get("content-encoding") == "gzip":
            body = gzip.decompress(body)
        async with self._arrived:
            self.bodies.append(body)
            self.requests.append(ExportTraceServiceRequest.FromString(body))
            self._arrived.notify_all()
        done = ExportTraceServiceResponse().SerializeToString()
        await Response(done, media_type="application/x-protobuf")(scope, receive, send)

    async def until(self, wanted: Callable[[Self], bool]) -> None:
        """Wait for something to be true of what came."""
        async with asyncio.timeout(PATIENCE), self._arrived:
            await self._arrived.wait_for(lambda: wanted(self))

    @property
    def spans(self) -> dict[str, Span]:
        """What came, by id: a span that is sent twice is one."""
        return {
            span.span_id.hex(): span
            for request in self.requests
            for resource in request.resource_spans
            for scope in resource.scope_spans
            for span in scope.spans
        }

    def named(self, name: str) -> list[Span]:
        return [span for span in self.spans.values() if span.name.startswith(name)]


def attributes(span: Span) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for one in span.attributes:
        kind = one.value.WhichOneof("value")
        values[one.key] = getattr(one.value, kind) if kind else None
    return values


@asynccontextmanager
async def collecting() -> AsyncGenerator[Collector]:
    collector = Collector()
    async with running(collector) as url:
        collector.url = url
        yield collector
