"""What can be seen of the service: traces, the access log, payloads, and the pages about itself.

``AccessLog`` stands outermost, so that refused requests are traced and counted too.
``PayloadLog``, when switched on, stands behind the guards and shows bodies. ``pages`` returns the
routes for alive, ready, healthy and figures. Of A2A only the names that the bindings leave in the
scope and the paths of the cards are known; what is ready or healthy is asked of others.
"""

import asyncio
import contextlib
import logging
import os
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence

import orjson
import structlog
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from structlog.typing import FilteringBoundLogger

from opencode_a2a import metrics
from opencode_a2a.events import Json, JsonObject
from opencode_a2a.ids import SCOPE_KEY, Caller
from opencode_a2a.server.contracts import DISCOVERY
from opencode_a2a.server.http import OPERATION
from opencode_a2a.telemetry import PAYLOADS, begin_trace, current_trace, redact
from opencode_a2a.web.auth import peer_address

logger: FilteringBoundLogger = structlog.get_logger()

ANSWER_HEADERS = "answer_headers"
"""In the scope: headers that every answer to this request gets, also one that refuses it."""
_KNOWN_PATHS = frozenset(
    {
        "/",
        "/livez",
        "/readyz",
        "/health",
        "/metrics",
        *DISCOVERY,
    }
)
_KNOWN_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
_SECRET_WORK = ("opencode.", "a2a.interrupt.")
"""Methods that carry a person's work."""
_SIGN_IN = "/console/"
"""Paths whose answers hold a code or a session of a person."""
_NEVER_CACHED = {"cache-control": "no-store"}


class AccessLog:
    """Trace every request, log who asked for what and how it ended, and count it for ``/metrics``.

    A request gets an id and a trace: in its log records, its answer, and calls onward. The router
    leaves the route it chose in the scope, and the bindings leave the operation there. Paths and
    methods as they came never become a label.
    """

    def __init__(self, app: ASGIApp, always: Sequence[tuple[bytes, bytes]] = ()) -> None:
        self._app = app
        self._always = always
        """Headers of every answer."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        began, status = time.monotonic(), 0
        headers = Headers(scope=scope)
        parent = headers.get("traceparent")
        trace = begin_trace(parent, headers.get("tracestate") if parent else None)
        # A request runs in a task, hence in a context, of its own: there is nothing to undo.
        current_trace.set(trace)
        structlog.contextvars.bind_contextvars(
            request_id=os.urandom(8).hex(), trace_id=trace.trace_id
        )
        traced = (b"traceparent", trace.traceparent.encode())
        added = scope[ANSWER_HEADERS] = [traced, *self._always]

        async def note(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                duration = time.monotonic() - began
                metrics.REQUEST_SECONDS.labels(_route(scope)).observe(duration)
                message = {**message, "headers": [*message.get("headers", ()), *added]}
            await send(message)

        try:
            await self._app(scope, receive, note)
        finally:
            method = scope["method"] if scope["method"] in _KNOWN_METHODS else "other"
            metrics.REQUESTS.labels(method, _route(scope), str(status)).inc()
            level = logging.ERROR if status >= 500 else logging.INFO
            if logger.is_enabled_for(level):
                caller: Caller | None = scope.get(SCOPE_KEY)
                logger.log(
                    level,
                    "request",
                    principal=caller.principal if caller else None,
                    address=peer_address(scope),
                    method=method,
                    route=_route(scope),
                    operation=scope.get(OPERATION),
                    status=status,
                    duration_ms=round((time.monotonic() - began) * 1000, 1),
                )


def _route(scope: Scope) -> str:
    """Return the template of the path, or a word for those nobody serves."""
    found: BaseRoute | None = scope.get("route")
    if isinstance(found, Route):
        return found.path
    path: str = scope["path"]
    return path if path in _KNOWN_PATHS else "other"


class PayloadLog:
    """Log the bodies of requests and answers, at any log level.

    Without secrets, cut at a limit, never those of methods that carry a person's work, and never a
    stream. Stands where bodies are already bounded.
    """

    def __init__(self, app: ASGIApp, limit: int = 0) -> None:
        self._app = app
        self._limit = limit
        """Bytes shown of a body; 0 shows all of it."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request, response, media_type, size = b"", bytearray(), "", 0

        async def read(receive: Receive = receive) -> Message:
            nonlocal request
            message = await receive()
            if message["type"] == "http.request":
                request += message.get("body", b"")
            return message

        async def write(message: Message) -> None:
            nonlocal media_type, size
            if message["type"] == "http.response.start":
                media_type = Headers(raw=message["headers"]).get("content-type", "")
            elif message["type"] == "http.response.body":
                body: bytes = message.get("body", b"")
                size += len(body)
                if "json" in media_type:
                    response.extend(body)
            await send(message)

        try:
            await self._app(scope, read, write)
        finally:
            method: str | None = None
            with contextlib.suppress(orjson.JSONDecodeError):
                called: Json = orjson.loads(request)
                if isinstance(called, dict) and isinstance(name := called.get("method"), str):
                    method = name
            secret = method is not None and method.startswith(_SECRET_WORK)
            secret = secret or scope["path"].startswith(_SIGN_IN)
            hidden = "omitted: sensitive method" if secret else ""
            if media_type.startswith("text/event-stream"):
                answer = "streaming"
            elif "json" not in media_type:
                answer = f"omitted: {media_type or 'no content type'}"
            else:
                answer = hidden or self._preview(bytes(response))
            PAYLOADS.info(
                "payload",
                route=_route(scope),
                method=method,
                request=hidden or self._preview(request),
                response=answer,
                response_bytes=size,
            )

    def _preview(self, body: bytes) -> str:
        try:
            shown = orjson.dumps(redact(orjson.loads(body)))
        except orjson.JSONDecodeError:
            return f"omitted: {len(body)} bytes, not JSON"
        if self._limit and len(shown) > self._limit:
            return shown[: self._limit].decode(errors="ignore") + "…"
        return shown.decode()


Check = Callable[[], Awaitable[None]]
"""Returns when all is well and raises otherwise; the exception is logged, never shown."""


class Readiness:
    """Asks everything the service depends on, at most once in ``fresh`` seconds."""

    def __init__(
        self,
        checks: Mapping[str, Check],
        *,
        bound: float = 2.0,
        fresh: float = 1.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._checks = checks
        self._bound = bound
        self._fresh = fresh
        self._clock = clock
        self._results: dict[str, bool] = {}
        self._until = float("-inf")
        self._asking = asyncio.Lock()

    async def ask(self) -> dict[str, bool]:
        """Return which checks are well."""
        async with self._asking:
            if self._clock() >= self._until:
                async with asyncio.TaskGroup() as group:
                    asked = {n: group.create_task(self._one(n, c)) for n, c in self._checks.items()}
                self._results = {name: task.result() for name, task in asked.items()}
                self._until = self._clock() + self._fresh
            return self._results

    async def _one(self, name: str, check: Check) -> bool:
        try:
            async with asyncio.timeout(self._bound):
                await check()
        except Exception as error:  # whatever is wrong, the answer is "not ready"
            if self._results.get(name, True):
                logger.warning("not ready", check=name, error=repr(error))
            return False
        return True


def pages(
    readiness: Readiness,
    health: Callable[[Caller], Awaitable[JsonObject]],
    *,
    figures: bool = True,
) -> list[BaseRoute]:
    """Return the routes of the pages about the service; ``health`` tells a caller what runs."""

    def page(body: JsonObject, status: int = 200) -> Response:
        return Response(orjson.dumps(body), status, _NEVER_CACHED, "application/json")

    async def livez(_: Request) -> Response:
        return page({"status": "ok"})

    async def readyz(_: Request) -> Response:
        results = await readiness.ask()
        checks: JsonObject = {name: "ok" if well else "failed" for name, well in results.items()}
        if all(results.values()):
            return page({"status": "ok", "checks": checks})
        return page({"status": "unavailable", "checks": checks}, 503)

    async def healthy(request: Request) -> Response:
        return page({"status": "ok", **await health(request.scope[SCOPE_KEY])})

    async def exposition(_: Request) -> Response:
        return Response(
            metrics.exposition(), headers=_NEVER_CACHED | {"content-type": metrics.CONTENT_TYPE}
        )

    routes: list[BaseRoute] = [
        Route("/livez", livez),
        Route("/readyz", readyz),
        Route("/health", healthy),
    ]
    return [*routes, Route("/metrics", exposition)] if figures else routes
