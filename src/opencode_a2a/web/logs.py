"""One record per request, and on demand what was said.

``AccessLog`` writes who asked for what, how it ended and how long it took, and counts it for
``/metrics``. ``PayloadLog``, when switched on, shows bodies at any log level: without secrets, cut
at a limit, never those of methods that carry a person's work, and never a stream.

The router leaves the route it chose in ``scope["route"]``, and the bindings put the name of a known
operation into the scope; paths and methods as they came never become a label.
"""

import logging
import time
from collections.abc import Callable
from functools import lru_cache

import orjson
import structlog
from prometheus_client import Counter, Histogram
from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from structlog.typing import FilteringBoundLogger

from opencode_a2a import metrics
from opencode_a2a.callers import Caller
from opencode_a2a.events import Json
from opencode_a2a.server.exchange import OPERATION
from opencode_a2a.telemetry import PAYLOADS, redact
from opencode_a2a.web.answers import header
from opencode_a2a.web.auth import peer_address

log: FilteringBoundLogger = structlog.get_logger()

_KNOWN_PATHS = frozenset(
    {
        "/",
        "/livez",
        "/readyz",
        "/health",
        "/metrics",
        "/.well-known/agent-card.json",
        "/.well-known/agent.json",
    }
)
_KNOWN_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
_SECRET_WORK = ("opencode.", "a2a.interrupt.")


class AccessLog:
    """Log and count every request."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began = time.monotonic()
        status = 0

        async def note(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                _seconds(route(scope)).observe(time.monotonic() - began)
            await send(message)

        try:
            await self._app(scope, receive, note)
        finally:
            _record(scope, status, time.monotonic() - began)


class PayloadLog:
    """Log the bodies of requests and answers; stands where bodies are already bounded."""

    def __init__(
        self, app: ASGIApp, limit: int = 0, sensitive: Callable[[str], bool] | None = None
    ) -> None:
        self._app = app
        self._limit = limit
        """Bytes shown of a body; 0 shows all of it."""
        self._sensitive = sensitive or _is_sensitive

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        exchange = _Exchange(scope, receive, send)
        try:
            await self._app(scope, exchange.receive, exchange.send)
        finally:
            self._show(scope, exchange)

    def _show(self, scope: Scope, exchange: "_Exchange") -> None:
        method = _rpc_method(exchange.request)
        hidden = method is not None and self._sensitive(method)
        PAYLOADS.info(
            "payload",
            route=route(scope),
            method=method,
            request="omitted: sensitive method" if hidden else self._preview(exchange.request),
            response=self._answer(exchange, hidden=hidden),
            response_bytes=exchange.response_bytes,
        )

    def _answer(self, exchange: "_Exchange", *, hidden: bool) -> str:
        if exchange.media_type.startswith("text/event-stream"):
            return "streaming"
        if hidden:
            return "omitted: sensitive method"
        if "json" not in exchange.media_type:
            return f"omitted: {exchange.media_type or 'no content type'}"
        return self._preview(bytes(exchange.response))

    def _preview(self, body: bytes) -> str:
        try:
            shown = orjson.dumps(redact(orjson.loads(body)))
        except orjson.JSONDecodeError:
            return f"omitted: {len(body)} bytes, not JSON"
        if self._limit and len(shown) > self._limit:
            return shown[: self._limit].decode(errors="ignore") + "…"
        return shown.decode()


class _Exchange:
    """Listens to both directions of one request."""

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._receive = receive
        self._send = send
        self.request = b""
        self.media_type = ""
        self.response = bytearray()
        self.response_bytes = 0

    async def receive(self) -> Message:
        message = await self._receive()
        if message["type"] == "http.request":
            self.request += message.get("body", b"")
        return message

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.media_type = header({"headers": message["headers"]}, b"content-type") or ""
        elif message["type"] == "http.response.body":
            body: bytes = message.get("body", b"")
            self.response_bytes += len(body)
            if "json" in self.media_type:
                self.response += body
        await self._send(message)


def route(scope: Scope) -> str:
    """Return the template of the path, or a word for those nobody serves."""
    found: BaseRoute | None = scope.get("route")
    if isinstance(found, Route):
        return found.path
    path: str = scope["path"]
    return path if path in _KNOWN_PATHS else "other"


@lru_cache(maxsize=1024)
def _requests(method: str, template: str, status: int) -> Counter:
    return metrics.REQUESTS.labels(method, template, str(status))


@lru_cache(maxsize=256)
def _seconds(template: str) -> Histogram:
    return metrics.REQUEST_SECONDS.labels(template)


def _record(scope: Scope, status: int, seconds: float) -> None:
    method = scope["method"] if scope["method"] in _KNOWN_METHODS else "other"
    _requests(method, route(scope), status).inc()
    level = logging.ERROR if status >= 500 else logging.INFO
    if not log.is_enabled_for(level):
        return
    caller: Caller | None = scope.get("caller")
    operation: str | None = scope.get(OPERATION)
    log.log(
        level,
        "request",
        principal=caller.principal if caller else None,
        address=peer_address(scope),
        method=method,
        route=route(scope),
        operation=operation,
        status=status,
        duration_ms=round(seconds * 1000, 1),
    )


def _rpc_method(body: bytes) -> str | None:
    try:
        value: Json = orjson.loads(body)
    except orjson.JSONDecodeError:
        return None
    method = value.get("method") if isinstance(value, dict) else None
    return method if isinstance(method, str) else None


def _is_sensitive(method: str) -> bool:
    return method.startswith(_SECRET_WORK)
