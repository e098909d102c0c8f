"""What a request passes before anything of A2A reads it, from the outside in.

``edge`` puts the layers in their order; each is one small ASGI class, and stands here in that
order: the access log with the trace (``AccessLog``), what a refusal looks like (``Refusals``),
compression, which names the service is called by and which pages may call it (``Boundary``), how
often it is called (``RateLimit``, which ``RequestRates`` counts for), and how large, how slow and
of which kind a body may be (``BodyGuard``). The pages of the console (``browser``) and
authentication (``auth``) stand between them. A layer refuses by raising a ``ServiceError``. What
the JSON inside may look like is checked by whoever parses the body.
"""

import asyncio
import contextlib
import logging
import os
import sys
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache, partial
from hashlib import sha256
from urllib.parse import urlsplit

import orjson
import structlog
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.middleware.gzip import GZipMiddleware
from starlette.responses import Response
from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from structlog.typing import FilteringBoundLogger

from opencode_a2a import metrics
from opencode_a2a.a2a.operations import RPC_PATH
from opencode_a2a.a2a.types import DEFAULT_VERSION, Version
from opencode_a2a.config import LimitSettings, Settings, loopback
from opencode_a2a.errors import (
    BadHttpError,
    ContentEncodingNotSupportedError,
    HostNotAllowedError,
    MediaTypeNotSupportedError,
    MethodNotAllowedError,
    MethodNotFoundError,
    OriginNotAllowedError,
    RateLimitError,
    RequestTimeoutError,
    RequestTooLargeError,
    ServiceError,
    StoreUnavailableError,
    StreamEndedError,
)
from opencode_a2a.events import Json
from opencode_a2a.ids import SCOPE_KEY, Caller
from opencode_a2a.server.contracts import (
    DISCOVERY,
    HEALTH_PATH,
    METRICS_PATH,
    PROBES,
    metadata_url,
)
from opencode_a2a.server.http import OPERATION, refused
from opencode_a2a.store import rates
from opencode_a2a.store.database import Database
from opencode_a2a.tasks.log import LEFT
from opencode_a2a.telemetry import PAYLOADS, begin_trace, current_trace, now_ms, redact
from opencode_a2a.web.auth import (
    OPEN_PATHS,
    AcceptedCredential,
    Authentication,
    Verify,
    peer_address,
)
from opencode_a2a.web.browser import REFUSES_GZIP, SignIns, page

logger: FilteringBoundLogger = structlog.get_logger()

BODY_SECONDS = 30.0
"""How long a body may take to arrive."""
_LOOPBACK_NAMES = frozenset({"localhost", "127.0.0.1", "::1"})
_DEFAULT_PORTS = {"http": 80, "https": 443}
_WITH_BODY = frozenset({"POST", "PUT", "PATCH"})
_PREFLIGHT = {
    "access-control-allow-methods": "GET, HEAD, POST, DELETE",
    "access-control-allow-headers": (
        "Authorization, X-API-Key, Content-Type, A2A-Version, A2A-Extensions, X-A2A-Extensions, "
        "Last-Event-ID, If-None-Match, Traceparent, Tracestate"
    ),
    "access-control-max-age": "600",
    "vary": "Origin",
}
_READABLE = (
    (
        b"access-control-expose-headers",
        b"A2A-Version, A2A-Extensions, X-A2A-Extensions, WWW-Authenticate, Retry-After, ETag, "
        b"Traceparent",
    ),
    (b"vary", b"Origin"),
)
_GZIP_LEVEL = 5
_ONLY_HTTPS = (b"strict-transport-security", b"max-age=31536000")
_ANSWER_HEADERS = "answer_headers"
_ANSWERED = "answered"
"""In the scope once an answer has begun."""
"""In the scope: headers that every answer to this request gets, also one that refuses it."""
_KNOWN_PATHS = frozenset({RPC_PATH, *PROBES, HEALTH_PATH, METRICS_PATH, *DISCOVERY})
_KNOWN_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
_SECRET_WORK = ("opencode.", "a2a.interrupt.")
"""Methods that carry a person's work."""
_SIGN_IN = "/console/"
"""Paths whose answers hold a code or a session of a person."""


def edge(
    app: ASGIApp,
    settings: Settings,
    credentials: Iterable[AcceptedCredential],
    sign_ins: SignIns | None = None,
    verify: Verify | None = None,
    requests: "RequestRates | None" = None,
) -> ASGIApp:
    """Return the application behind all its guards, the outermost last."""
    if settings.log.payloads:
        app = PayloadLog(app, settings.log.body_limit)
    app = BodyGuard(app, settings.limits)
    if settings.limits.rate_limit_enabled:
        app = RateLimit(app, RequestRates(settings.limits) if requests is None else requests)
    also = sign_ins.find if sign_ins else None
    where = metadata_url(settings)
    app = Authentication(app, credentials, also=also, verify=verify, metadata_url=where)
    if sign_ins is not None:
        app = Pages(app)
    app = Boundary(app, settings)
    if settings.a2a.http_gzip_minimum_size:
        app = Compression(app, settings.a2a.http_gzip_minimum_size, _GZIP_LEVEL)
    app = Refusals(app, Version(settings.a2a.protocol_version))
    secure = settings.tls.cert_file and not loopback(settings.a2a.host)
    return AccessLog(app, [_ONLY_HTTPS] if secure else [])


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
        added = scope[_ANSWER_HEADERS] = [traced, *self._always]

        async def note(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = scope[_ANSWERED] = message["status"]
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


class Refusals:
    """Answer what a guard or the router refuses, in the form of the version and binding called."""

    def __init__(self, app: ASGIApp, default: Version = Version.V03) -> None:
        self._app = app
        self._default = default
        """The version in which those are answered who name none."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope[DEFAULT_VERSION] = self._default
        scope["app"] = self  # so that Starlette's router raises what it refuses
        try:
            await self._app(scope, receive, send)
            return
        except ServiceError as raised:
            error = raised
        except HTTPException as raised:
            if raised.status_code == 405:
                allowed = sorted((raised.headers or {}).get("Allow", "").split(", "))
                error = MethodNotAllowedError().with_headers(("Allow", ", ".join(allowed)))
            else:
                error = MethodNotFoundError("There is nothing at this path")
        except asyncio.CancelledError:
            # The server cancels what still runs when its time to stop is over, and nobody else
            # does. What was asked may have been done.
            if _ANSWERED in scope:
                raise
            error = StreamEndedError(LEFT, cause="drained")
        response = refused(error, scope)
        response.headers["Cache-Control"] = "no-store"
        for name, value in error.headers:
            response.headers.append(name, value)
        await response(scope, receive, send)


class Compression(GZipMiddleware):
    """Starlette's, which would take ``gzip;q=0`` for a yes.

    It leaves streams of events alone, and compresses large bodies in a thread.
    """

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if REFUSES_GZIP.search(Headers(scope=scope).get("accept-encoding", "")):
            await self.app(scope, receive, send)
        else:
            await super().__call__(scope, receive, send)


class Boundary:
    """Refuse foreign names of the service and foreign pages; tell browsers of the others (CORS).

    Every page may call the open paths, and read the public card. Starlette's middleware for hosts
    and for CORS knows neither exceptions for paths nor a refusal of foreign pages.
    """

    def __init__(self, app: ASGIApp, settings: Settings) -> None:
        self._app = app
        named = {_plain_host(name) for name in settings.auth.allowed_hosts}
        if public := urlsplit(settings.public_url).hostname:
            named.add(public)
        self._hosts: frozenset[str] | None = None
        """Names or ``*.suffix``; None when any will do."""
        if loopback(settings.a2a.host):
            # A page in a browser can let a name of its own point to 127.0.0.1 and would then speak
            # to the service as if it were its own server; the Host header gives it away.
            self._hosts = frozenset(named | _LOOPBACK_NAMES)
        elif settings.auth.allowed_hosts:
            self._hosts = frozenset(named)
        listed = map(_origin, (settings.public_url, *settings.auth.allowed_origins))
        self._origins = {origin for origin in listed if origin}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = Headers(scope=scope)
        hosts = headers.getlist("host")
        if len(hosts) > 1:
            raise BadHttpError("Send exactly one Host header")
        host = hosts[0] if hosts else ""
        if self._hosts is not None:
            name = _plain_host(host)
            suffixes = [allowed[1:] for allowed in self._hosts if allowed.startswith("*.")]
            if name not in self._hosts and not any(name.endswith(suffix) for suffix in suffixes):
                raise HostNotAllowedError
        origins = headers.getlist("origin")
        if origins and scope["path"] not in OPEN_PATHS:
            # A page may also come from the name that it calls: that was just checked, or any will
            # do, and a name that a stranger points here brings no credential. A proxy may have
            # ended the TLS of an https page.
            schemes = (scope["scheme"], "https")
            known = self._origins.union(_origin(f"{scheme}://{host}") for scheme in schemes)
            if not known.issuperset(map(_origin, origins)):
                raise OriginNotAllowedError
        if scope["path"] in DISCOVERY:
            reader = "*"
        elif origins and _origin(origins[0]) in self._origins:
            reader = origins[0]
        else:
            await self._app(scope, receive, send)
            return
        if scope["method"] == "OPTIONS" and "access-control-request-method" in headers:
            # A browser asks without the credential before it calls with one.
            granted = {"access-control-allow-origin": reader, **_PREFLIGHT}
            await Response(status_code=204, headers=granted)(scope, receive, send)
            return
        granting = (b"access-control-allow-origin", reader.encode("latin-1"))
        scope.setdefault(_ANSWER_HEADERS, []).extend((granting, *_READABLE))
        await self._app(scope, receive, send)


class Pages:
    """Answer what a browser opens, and hand on everything else.

    It stands before authentication: a browser cannot send a credential when it opens a page.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        response = page(scope) if scope["method"] in ("GET", "HEAD") else None
        await (response or self._app)(scope, receive, send)


class RequestRates:
    """Counts the requests of each caller in a sliding window.

    Where several replicas share a database, they tell each other about those who ask often:
    what others have counted is added, as it was at most a second or two ago.
    """

    SHARE_SECONDS = 1.0
    OFTEN = 0.1
    """The part of the limit from which on a caller is told of."""

    def __init__(
        self,
        limits: LimitSettings,
        *,
        max_keys: int = 10_000,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._most = limits.rate_limit_max_requests
        self._window = limits.rate_limit_window_seconds
        self._max_keys = max_keys
        self._clock = clock
        self._seen: OrderedDict[str, deque[float]] = OrderedDict()
        """The moments of each key's recent requests; the key that was quiet longest first."""
        self._told: set[bytes] = set()
        """The digests of the keys that others know of."""
        self._elsewhere: dict[bytes, int] = {}
        """Requests that other replicas have counted, by the digest of the key."""

    def __len__(self) -> int:
        return len(self._seen)

    def take(self, key: str) -> float:
        """Count one request; return 0, or the seconds to wait when it is one too many."""
        now = self._clock()
        passed = now - self._window
        while self._seen and next(iter(self._seen.values()))[-1] <= passed:
            self._seen.popitem(last=False)  # its last request has left the window
        moments = self._seen.get(key) or deque()
        while moments and moments[0] <= passed:
            moments.popleft()
        if len(moments) >= self._most:
            return moments[0] - passed
        if self._elsewhere and len(moments) + self._elsewhere.get(_digest(key), 0) >= self._most:
            if not moments:
                self._seen.pop(key, None)
            return self.SHARE_SECONDS
        moments.append(now)
        self._seen[key] = moments
        self._seen.move_to_end(key)
        if len(self._seen) > self._max_keys:
            self._seen.popitem(last=False)
        return 0.0

    async def run(self, database: Database) -> None:
        """Tell the other replicas who asks often here, and learn from them."""
        replica = database.replica
        while replica is not None:
            await asyncio.sleep(self.SHARE_SECONDS)
            if not database.has_other_replicas:
                self._elsewhere, self._told = {}, set()
                continue
            passed, now = self._clock() - self._window, now_ms()
            often: dict[bytes, int] = {}
            for key, moments in self._seen.items():
                if len(moments) >= self._most * self.OFTEN:
                    while moments[0] <= passed and len(moments) > 1:
                        moments.popleft()
                    if len(moments) >= self._most * self.OFTEN:
                        often[_digest(key)] = len(moments)
            withdrawn = self._told - often.keys()
            with contextlib.suppress(StoreUnavailableError):  # each then limits for itself
                if often or withdrawn:
                    put = partial(
                        rates.put, replica=replica, counts=often, withdrawn=withdrawn, now=now
                    )
                    await database.write(put)
                    self._told = set(often)
                self._elsewhere = await database.read(
                    lambda connection: rates.elsewhere(connection, replica, now)  # noqa: B023 - awaited here
                )


def _digest(key: str) -> bytes:
    return sha256(key.encode()).digest()[:16]


class RateLimit:
    """At most so many requests in a sliding window, per credential, principal or address."""

    def __init__(self, app: ASGIApp, requests: RequestRates) -> None:
        self._app = app
        self._requests = requests

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] in PROBES:  # a probe that is refused would have the service restarted
            await self._app(scope, receive, send)
            return
        caller: Caller | None = scope.get(SCOPE_KEY)
        if caller is None:
            key = f"address:{peer_address(scope)}"
        elif caller.credential_id is not None:
            key = f"credential:{caller.credential_id}"
        else:
            key = f"principal:{caller.principal}"
        if wait := self._requests.take(key):
            metrics.RATE_LIMIT_REJECTED.inc()
            seconds = int(wait) + 1
            raise RateLimitError(
                f"Too many requests; try again in {seconds} s",
                retry_after_seconds=seconds,
            ).with_headers(("Retry-After", str(seconds)))
        await self._app(scope, receive, send)


class BodyGuard:
    """Read the body within its limits and hand it on in one piece."""

    def __init__(
        self, app: ASGIApp, limits: LimitSettings, *, seconds: float = BODY_SECONDS
    ) -> None:
        self._app = app
        self._most = limits.max_request_body_bytes or sys.maxsize  # 0 is no limit
        self._seconds = seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["method"] not in _WITH_BODY:
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        for encoding in headers.getlist("content-encoding"):
            if encoding.strip().lower() not in ("", "identity"):
                raise ContentEncodingNotSupportedError
        length = headers.get("content-length")
        if length != "0" and (length is not None or "transfer-encoding" in headers):
            kinds = headers.getlist("content-type")
            if kinds and not (len(kinds) == 1 and _is_json(kinds[0])):
                raise MediaTypeNotSupportedError
        # As it is announced, unless more comes.
        size = int(length) if length is not None and length.isdecimal() else 0
        pieces: list[bytes] = []
        received = 0
        message: Message = {"more_body": True}
        try:
            async with asyncio.timeout(self._seconds):
                while size <= self._most and message.get("more_body", False):
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        return  # the sender has gone
                    pieces.append(message.get("body", b""))
                    received += len(pieces[-1])
                    size = max(size, received)
        except TimeoutError:
            raise RequestTimeoutError(
                f"The body did not arrive within {self._seconds:g} s; send it again"
            ).with_headers(("Connection", "close")) from None  # nobody will read the rest
        if size > self._most:
            raise RequestTooLargeError(
                f"The body is larger than {self._most} bytes; send large files by URL",
                max_bytes=self._most,
                actual_size=size,
            )
        body: bytes | None = b"".join(pieces)
        del pieces, message  # they hold it too

        async def replay() -> Message:
            """Return the body as one message, then whatever the connection says."""
            nonlocal body
            if body is None:
                return await receive()
            whole, body = body, None  # a large one is not kept for as long as the answer takes
            return {"type": "http.request", "body": whole, "more_body": False}

        await self._app(scope, replay, send)


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


@lru_cache(maxsize=1024)
def _plain_host(sent: str) -> str:
    """Return the name without port, brackets, case and final dot; nothing when malformed."""
    try:
        parts = urlsplit(f"//{sent}")
        _ = parts.port
    except ValueError:
        return ""
    if parts.username is not None or parts.path or parts.query or parts.fragment:
        return ""
    return (parts.hostname or "").removesuffix(".")


def _origin(url: str) -> str:
    """Return scheme, name and port of a URL in one spelling; nothing when malformed."""
    try:
        parts = urlsplit(url)
        port = parts.port or _DEFAULT_PORTS.get(parts.scheme)
    except ValueError:
        return ""
    if not parts.hostname or parts.username is not None:
        return ""
    return f"{parts.scheme}://{parts.hostname}:{port}"


@lru_cache(maxsize=1024)
def _is_json(content_type: str) -> bool:
    media_type, _, parameters = content_type.lower().partition(";")
    family, _, kind = media_type.strip().partition("/")
    if kind != "json" and not kind.endswith("+json"):
        return False
    if family not in ("application", "text"):
        return False
    pairs = (parameter.partition("=") for parameter in parameters.split(";"))
    charsets = [value.strip().strip('"') for name, _, value in pairs if name.strip() == "charset"]
    return all(charset in ("utf-8", "utf8", "us-ascii") for charset in charsets)
