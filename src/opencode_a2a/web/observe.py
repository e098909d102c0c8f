"""For operators: the log of requests, and the pages of the service about itself.

``AccessLog`` and ``PayloadLog`` are layers that ``edge`` puts around the application. ``pages``
returns the routes of ``/livez``, ``/readyz``, ``/health`` and ``/metrics``; the checks and the
facts behind them come from ``app``.
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
from opencode_a2a.a2a.operations import METHODS, RPC_PATH
from opencode_a2a.events import Json, JsonObject
from opencode_a2a.ids import SCOPE_KEY, Caller
from opencode_a2a.server.contracts import (
    DISCOVERY,
    HEALTH_PATH,
    LIVE_PATH,
    METRICS_PATH,
    PROBES,
    READY_PATH,
)
from opencode_a2a.server.http import OPERATION, OrjsonResponse
from opencode_a2a.telemetry import OPERATOR, begin_trace, current_trace, redact
from opencode_a2a.web.auth import peer_address

logger: FilteringBoundLogger = structlog.get_logger()

ANSWER_HEADERS = "answer_headers"
"""In the scope: headers that every answer to this request gets, a refusal too."""
ANSWERED = "answered"
"""In the scope once an answer has begun: its status."""
_KNOWN_PATHS = frozenset({RPC_PATH, *PROBES, HEALTH_PATH, METRICS_PATH, *DISCOVERY})
_KNOWN_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
_SIGN_IN = "/console/"
"""The beginning of paths whose answers hold a sign-in code or a session token."""
_NEVER_CACHED = {"cache-control": "no-store"}


# --- the log of requests ----------------------------------------------------------------------


class AccessLog:
    """Trace every request, log who asked for what and how it ended, and count it for ``/metrics``.

    A request gets an id and a trace, which appear in its log records, in its answer and in the
    calls that it leads to. The router leaves the chosen route in the scope, and the bindings leave
    the operation there. Unknown paths and methods never become a label.
    """

    def __init__(self, app: ASGIApp, always: Sequence[tuple[bytes, bytes]] = ()) -> None:
        self._app = app
        self._always = always
        """Headers that every answer gets."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        began, status = time.monotonic(), 0
        headers = Headers(scope=scope)
        parent = headers.get("traceparent")
        trace = begin_trace(parent, headers.get("tracestate") if parent else None)
        # Each request runs in a task, hence in a context, of its own: nothing has to be reset.
        current_trace.set(trace)
        structlog.contextvars.bind_contextvars(
            request_id=os.urandom(8).hex(), trace_id=trace.trace_id
        )
        traced = (b"traceparent", trace.traceparent.encode())
        added = scope[ANSWER_HEADERS] = [traced, *self._always]

        async def note(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = scope[ANSWERED] = message["status"]
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
    """Return the template of the path, or ``other`` for a path that nothing serves."""
    route: BaseRoute | None = scope.get("route")
    if isinstance(route, Route):
        return route.path
    path: str = scope["path"]
    return path if path in _KNOWN_PATHS else "other"


class PayloadLog:
    """Log the bodies of requests and answers, at any log level.

    Secrets are removed, and long bodies are cut. Streams, sign-ins and the methods beyond A2A,
    which carry a person's work, are logged without their bodies. It stands behind ``BodyGuard``,
    so that no body is unbounded.
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
            sensitive = method is not None and method not in METHODS
            sensitive = sensitive or scope["path"].startswith(_SIGN_IN)
            hidden = "omitted: sensitive method" if sensitive else ""
            if media_type.startswith("text/event-stream"):
                answer = "streaming"
            elif "json" not in media_type:
                answer = f"omitted: {media_type or 'no content type'}"
            else:
                answer = hidden or self._preview(bytes(response))
            OPERATOR.info(
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


# --- pages ------------------------------------------------------------------------------------


Check = Callable[[], Awaitable[None]]
"""Returns if the dependency works, and raises if not; the error is logged, never shown."""


class Readiness:
    """Checks everything that the service depends on, at most once in ``fresh`` seconds.

    A check that takes longer than ``bound`` seconds has failed.
    """

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
        """Return for each check whether it passed."""

        async def passes(name: str, check: Check) -> bool:
            try:
                async with asyncio.timeout(self._bound):
                    await check()
            except Exception as error:  # any failure means "not ready"
                if self._results.get(name, True):
                    logger.warning("not ready", check=name, error=repr(error))
                return False
            return True

        async with self._asking:
            if self._clock() >= self._until:
                async with asyncio.TaskGroup() as group:
                    asked = {n: group.create_task(passes(n, c)) for n, c in self._checks.items()}
                self._results = {name: task.result() for name, task in asked.items()}
                self._until = self._clock() + self._fresh
            return self._results


def pages(
    readiness: Readiness,
    health: Callable[[Caller], Awaitable[JsonObject]],
    *,
    figures: bool = True,
) -> list[BaseRoute]:
    """Return the routes of the pages; ``health`` makes the body of ``/health`` for a caller."""

    def page(body: JsonObject, status: int = 200) -> Response:
        return OrjsonResponse(body, status, _NEVER_CACHED)

    async def livez(_: Request) -> Response:
        return page({"status": "ok"})

    async def readyz(_: Request) -> Response:
        results = await readiness.ask()
        checks: JsonObject = {
            name: "ok" if passed else "failed" for name, passed in results.items()
        }
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
        Route(LIVE_PATH, livez),
        Route(READY_PATH, readyz),
        Route(HEALTH_PATH, healthy),
    ]
    return [*routes, Route(METRICS_PATH, exposition)] if figures else routes
