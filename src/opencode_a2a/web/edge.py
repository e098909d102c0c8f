"""The layers that a request passes before A2A reads it.

``edge`` puts them around the application; their order is written there and nowhere else. Each is
one small ASGI class, which refuses a request by raising a ``ServiceError``; only ``Authentication``
is in a module of its own. The limits of the JSON in a body are checked where it is parsed
(``jsonguard``), those of tasks in ``tasks``.
"""

import asyncio
import contextlib
import logging
import re
import sys
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Mapping, Sequence
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
from opencode_a2a.a2a.operations import CORE_METHODS, RPC_PATH
from opencode_a2a.a2a.types import DEFAULT_VERSION, Version
from opencode_a2a.clock import now_ms
from opencode_a2a.config import HttpBinding, LimitSettings, Settings, loopback
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
from opencode_a2a.log.log import DRAINED
from opencode_a2a.server.contracts import (
    DISCOVERY,
    HEALTH_PATH,
    METRICS_PATH,
    PROBES,
    READY_PATH,
    RESOURCE_PATH,
    metadata_url,
)
from opencode_a2a.server.http import OPERATION, refused, without_origin
from opencode_a2a.store import callers
from opencode_a2a.store.database import Database
from opencode_a2a.telemetry import OPERATOR, begin_trace, current_trace, draw_id, redact
from opencode_a2a.web.auth import OPEN_PATHS, Authentication, Authenticator, peer_address
from opencode_a2a.web.browser import REFUSES_GZIP, StaticFile, page, static_files

logger: FilteringBoundLogger = structlog.get_logger()

RESPONSE_HEADERS = "response_headers"
"""In the scope: headers that every response to this request gets, a refusal too."""
RESPONDED = "responded"
"""In the scope once a response has begun: its status."""
_KNOWN_PATHS = frozenset({RPC_PATH, *PROBES, HEALTH_PATH, METRICS_PATH, *DISCOVERY})
_KNOWN_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
BODY_SECONDS = 30.0
"""How long a body may take to arrive."""
_WITH_BODY = frozenset({"POST", "PUT", "PATCH"})
_LOOPBACK_NAMES = frozenset({"localhost", "127.0.0.1", "::1"})
_DEFAULT_PORTS = {"http": 80, "https": 443}
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
_UNCOMPRESSED = ("text/event-stream",)
"""The types that are served and not compressed; Starlette reads its list with each request."""
_ONLY_HTTPS = (b"strict-transport-security", b"max-age=31536000")


def edge(
    app: ASGIApp,
    settings: Settings,
    authenticator: Authenticator,
    requests: "RequestRates",
    files: Mapping[str, StaticFile] | None = None,
    anonymous: Collection[str] = (),
) -> ASGIApp:
    """Return the application inside all its layers.

    ``files`` are served beside those of the console, and ``anonymous`` are requests, as method and
    path, that need no credential.
    """
    secure = settings.tls.cert_file and not loopback(settings.a2a.host)
    layers: list[Callable[[ASGIApp], ASGIApp] | None] = [  # the outermost first
        partial(AccessLog, always=[_ONLY_HTTPS] if secure else []),
        partial(Refusals, default=Version(settings.a2a.protocol_version)),
        partial(
            Compression,
            minimum_size=settings.a2a.http_gzip_minimum_size,
            compresslevel=_GZIP_LEVEL,
            exclude_content_types=_UNCOMPRESSED,
        ),
        partial(Boundary, settings=settings),
        partial(Pages, files={**static_files(), **(files or {})}),
        partial(Authentication, authenticator=authenticator, anonymous=anonymous),
        partial(RateLimit, requests=requests) if settings.limits.rate_limit_enabled else None,
        partial(BodyGuard, limits=settings.limits),
        partial(PayloadLog, limit=settings.log.body_limit) if settings.log.payloads else None,
    ]
    for layer in filter(None, reversed(layers)):
        app = layer(app)
    return app


class Entrance:
    """The application as it is served: finds the path that is meant, and passes the request on.

    A proxy may have stripped the prefix of the service from the path or not. The metadata for
    tokens has a second path if the service is below one. The bindings may have roots of their own.
    """

    def __init__(self, settings: Settings, apart: Mapping[str, ASGIApp]) -> None:
        """``apart`` are the applications that are reached past all layers, by their paths."""
        self._prefix = settings.a2a.path_prefix
        self._aliases = settings.a2a.path_aliases
        self._metadata_path = urlsplit(metadata_url(settings)).path
        self._apart = apart
        self.app: ASGIApp = Response(status_code=503)
        """The application inside its layers, once the service has started."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] == self._metadata_path:
            scope["path"] = RESOURCE_PATH
        if self._prefix and scope["path"].startswith(self._prefix):
            path: str = scope["path"].removeprefix(self._prefix)
            if not path or path.startswith("/"):
                scope["path"] = path or "/"
        if self._aliases:
            first, _, rest = scope["path"][1:].partition("/")
            # ``/rest`` is the beginning of a path, ``/rpc`` the whole of it.
            if first in self._aliases and (first == HttpBinding.HTTP_JSON.alias) == bool(rest):
                scope["path"] = f"/{rest}"
        await self._apart.get(scope["path"], self.app)(scope, receive, send)


CORRELATION = frozenset(
    (b"x-request-id", b"x-correlation-id", b"x-amzn-trace-id", b"x-cloud-trace-context")
)
"""Headers by which gateways and platforms find a request again, in our log and our response."""
_CORRELATION_LIMIT = 256
_PLAIN = re.compile(rb"[\x21-\x7e]+").fullmatch


class AccessLog:
    """Trace every request, log who asked for what and how it ended, and count it for ``/metrics``.

    A request gets an id and a trace, which appear in its log records, in its response and in the
    calls that it leads to. Ids that a gateway or platform sends appear in log records and response.
    The router leaves the chosen route in the scope, and the bindings leave the operation there.
    Unknown paths and methods never become a label.
    """

    def __init__(self, app: ASGIApp, always: Sequence[tuple[bytes, bytes]] = ()) -> None:
        self._app = app
        self._always = always
        """Headers that every response gets."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        began, status = time.monotonic(), 0
        headers = Headers(scope=scope)
        parent = headers.get("traceparent")
        trace = begin_trace(parent, headers.get("tracestate") if parent else None)
        # Each request runs in a task, hence in a context, of its own: nothing has to be reset.
        current_trace.set(trace)
        structlog.contextvars.bind_contextvars(request_id=draw_id(8), trace_id=trace.trace_id)
        traced = (b"traceparent", trace.traceparent.encode())
        sent = {
            name: value
            for name, value in scope["headers"]
            if name in CORRELATION and len(value) <= _CORRELATION_LIMIT and _PLAIN(value)
        }
        if sent:
            texts = {name.decode(): value.decode() for name, value in sent.items()}
            structlog.contextvars.bind_contextvars(correlation=texts)
        added = scope[RESPONSE_HEADERS] = [traced, *sent.items(), *self._always]

        async def note(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = scope[RESPONDED] = message["status"]
                duration = time.monotonic() - began
                metrics.REQUEST_SECONDS.labels(_route(scope)).observe(duration)
                message = {**message, "headers": [*message.get("headers", ()), *added]}
            await send(message)

        try:
            await self._app(scope, receive, note)
        finally:
            method = scope["method"] if scope["method"] in _KNOWN_METHODS else "other"
            metrics.REQUESTS.labels(method, _route(scope), str(status)).inc()
            # That the service is not ready is logged once, and not with every probe.
            failed = status >= 500 and _route(scope) != READY_PATH
            level = logging.ERROR if failed else logging.INFO
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


class Refusals:
    """Answer a refusal of a layer or the router in the form of the version and binding called."""

    def __init__(self, app: ASGIApp, default: Version = Version.V03) -> None:
        self._app = app
        self._default = default
        """The version of a refusal of a request that names none."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope[DEFAULT_VERSION] = self._default
        scope["app"] = self  # makes Starlette's router raise its refusals
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
            # Only the server cancels a request: when it stops, and the grace period is over. The
            # request may have been carried out.
            if RESPONDED in scope:
                raise
            error = StreamEndedError(DRAINED, cause="drained")
        response = refused(without_origin(error), scope)
        response.headers["Cache-Control"] = "no-store"
        for name, value in error.headers:
            response.headers.append(name, value)
        await response(scope, receive, send)


class Compression(GZipMiddleware):
    """Starlette's compression, which by itself would take ``gzip;q=0`` for a yes.

    It does not compress event streams, and compresses large bodies in a thread.
    """

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if REFUSES_GZIP.search(Headers(scope=scope).get("accept-encoding", "")):
            await self.app(scope, receive, send)
        else:
            await super().__call__(scope, receive, send)


class Boundary:
    """Refuse unknown host names and pages of unknown origins; allow the others by CORS.

    Pages of any origin may call the open paths, and read the public card. Starlette's middleware
    for hosts and for CORS can neither make exceptions for paths nor refuse an origin.
    """

    def __init__(self, app: ASGIApp, settings: Settings) -> None:
        self._app = app
        named = {_plain_host(name) for name in settings.auth.allowed_hosts}
        if public := urlsplit(settings.public_url).hostname:
            named.add(public)
        self._hosts: frozenset[str] | None = None
        """The accepted names, or ``*.suffix``; None accepts every name."""
        self._local = loopback(settings.a2a.host)
        if self._local:
            # A page can make a domain of its own resolve to 127.0.0.1, and then call the service as
            # if it were the page's own server (DNS rebinding); the Host header gives it away.
            self._hosts = frozenset(named | _LOOPBACK_NAMES)
        elif settings.auth.allowed_hosts:
            self._hosts = frozenset(named)
        patterns = (name for name in self._hosts or () if name.startswith("*."))
        self._suffixes = tuple(name[1:] for name in patterns)
        listed = map(_origin, (settings.public_url, *settings.auth.allowed_origins))
        self._origins = {origin for origin in listed if origin}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = Headers(scope=scope)
        hosts = headers.getlist("host")
        if len(hosts) > 1:
            raise BadHttpError("Send exactly one Host header")
        host = hosts[0] if hosts else ""
        # A supervisor probes a container by its address, which nobody can list. On the loopback
        # interface it uses one of its names, and pages of other names stay out.
        probe = not self._local and scope["path"] in PROBES and scope["method"] in ("GET", "HEAD")
        if self._hosts is not None and not probe:
            name = _plain_host(host)
            if name not in self._hosts and not name.endswith(self._suffixes):
                raise HostNotAllowedError
        origins = headers.getlist("origin")
        if origins and scope["path"] not in OPEN_PATHS:
            # A page may call the host that it came from: that name was just checked, or every name
            # is accepted, and a page of a stranger's name has no credential. The page may be https
            # although the request is not: a proxy may have terminated TLS.
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
            # A browser asks first, without the credential.
            granted = {"access-control-allow-origin": reader, **_PREFLIGHT}
            await Response(status_code=204, headers=granted)(scope, receive, send)
            return
        granting = (b"access-control-allow-origin", reader.encode("latin-1"))
        scope.setdefault(RESPONSE_HEADERS, []).extend((granting, *_READABLE))
        await self._app(scope, receive, send)


class Pages:
    """Answer with the page that a browser opens; pass everything else on.

    It stands before authentication: a browser cannot send a credential when it opens a page.
    """

    def __init__(self, app: ASGIApp, files: Mapping[str, StaticFile]) -> None:
        self._app = app
        self._files = files

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        response = page(scope, self._files) if scope["method"] in ("GET", "HEAD") else None
        await (response or self._app)(scope, receive, send)


class RequestRates:
    """Counts the requests of each caller in a sliding window.

    Replicas that share a database also share the counts of frequent callers, every second: what the
    others counted is added to what was counted here.
    """

    SHARE_SECONDS = 1.0
    OFTEN = 0.1
    """The fraction of the limit above which the count of a caller is shared."""

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
        self._moments: OrderedDict[str, deque[float]] = OrderedDict()
        """The times of each key's recent requests; the key with the oldest last request first."""
        self._shared: set[bytes] = set()
        """The digests of the keys whose counts the other replicas can see."""
        self._elsewhere: dict[bytes, int] = {}
        """The requests that the other replicas counted, by the digest of the key."""

    def __len__(self) -> int:
        return len(self._moments)

    def take(self, key: str) -> float:
        """Count one request; return 0, or the seconds to wait if it exceeds the limit."""
        now = self._clock()
        passed = now - self._window
        while self._moments and next(iter(self._moments.values()))[-1] <= passed:
            self._moments.popitem(last=False)  # its last request has left the window
        moments = self._moments.get(key) or deque()
        while moments and moments[0] <= passed:
            moments.popleft()
        if len(moments) >= self._most:
            return moments[0] - passed
        if self._elsewhere and len(moments) + self._elsewhere.get(_digest(key), 0) >= self._most:
            if not moments:
                self._moments.pop(key, None)
            return self.SHARE_SECONDS
        moments.append(now)
        self._moments[key] = moments
        self._moments.move_to_end(key)
        if len(self._moments) > self._max_keys:
            self._moments.popitem(last=False)
        return 0.0

    async def run(self, database: Database) -> None:
        """Share the counts of frequent callers with the other replicas."""
        replica = database.replica
        while replica is not None:
            await asyncio.sleep(self.SHARE_SECONDS)
            if not database.census.has_others:
                self._elsewhere, self._shared = {}, set()
                continue
            passed, now = self._clock() - self._window, now_ms()
            often: dict[bytes, int] = {}
            for key, moments in self._moments.items():
                if len(moments) >= self._most * self.OFTEN:
                    while moments[0] <= passed and len(moments) > 1:
                        moments.popleft()
                    if len(moments) >= self._most * self.OFTEN:
                        often[_digest(key)] = len(moments)
            withdrawn = self._shared - often.keys()
            with contextlib.suppress(StoreUnavailableError):  # each limits for itself meanwhile
                if often or withdrawn:
                    await database.write(callers.share_counts, replica, often, withdrawn, now)
                    self._shared = set(often)
                self._elsewhere = await database.read(callers.counts_elsewhere, replica, now)


def _digest(key: str) -> bytes:
    return sha256(key.encode()).digest()[:16]


class RateLimit:
    """Refuse the requests of a credential, principal or address that exceed the limit."""

    def __init__(self, app: ASGIApp, requests: RequestRates) -> None:
        self._app = app
        self._requests = requests

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] in PROBES:  # refusing one could have the service restarted
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
    """Read the body within limits of size and time, and pass it on in one piece."""

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
        # The announced size, unless more arrives.
        size = int(length) if length is not None and length.isdecimal() else 0
        pieces: list[bytes] = []
        received = 0
        message: Message = {"more_body": True}
        try:
            async with asyncio.timeout(self._seconds):
                while size <= self._most and message.get("more_body", False):
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        return  # the caller has hung up
                    pieces.append(message.get("body", b""))
                    received += len(pieces[-1])
                    size = max(size, received)
        except TimeoutError:
            raise RequestTimeoutError(
                f"The body did not arrive within {self._seconds:g} s; send it again"
            ).with_headers(("Connection", "close")) from None  # the rest will not be read
        if size > self._most:
            raise RequestTooLargeError(
                f"The body is larger than {self._most} bytes; send large files by URL",
                max_bytes=self._most,
                actual_size=size,
            )
        body: bytes | None = b"".join(pieces)
        del pieces, message  # they hold the body too

        async def replay() -> Message:
            """Return the body as one message, then what the connection sends."""
            nonlocal body
            if body is None:
                return await receive()
            whole, body = body, None  # do not hold a large body while the response is made
            return {"type": "http.request", "body": whole, "more_body": False}

        await self._app(scope, replay, send)


class PayloadLog:
    """Log the bodies of requests and responses, at any log level.

    Secrets are removed, and long bodies are cut. Streams, the methods beyond A2A, which carry a
    person's work, and all paths that are not A2A's are logged without their bodies. It stands
    behind ``BodyGuard``, so that no body is unbounded.
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
            # Paths that are not A2A's take sign-in codes, signed links, addresses of browsers.
            public = OPERATION in scope or scope["path"] in _KNOWN_PATHS
            sensitive = not public or (method is not None and method not in CORE_METHODS)
            hidden = "omitted: sensitive method" if sensitive else ""
            if media_type.startswith("text/event-stream"):
                shown = "streaming"
            elif "json" not in media_type:
                shown = f"omitted: {media_type or 'no content type'}"
            else:
                shown = hidden or self._preview(bytes(response))
            OPERATOR.info(
                "payload",
                route=_route(scope),
                method=method,
                request=hidden or self._preview(request),
                response=shown,
                response_bytes=size,
            )

    def _preview(self, body: bytes) -> str:
        try:
            shown = orjson.dumps(redact(orjson.loads(body)))
        except orjson.JSONDecodeError:
            return f"omitted: {len(body)} bytes, not JSON"
        except (TypeError, RecursionError):  # of the encoder, and of ``redact``
            return f"omitted: {len(body)} bytes, nested too deeply"
        if self._limit and len(shown) > self._limit:
            return shown[: self._limit].decode(errors="ignore") + "…"
        return shown.decode()


def _route(scope: Scope) -> str:
    """Return the template of the path, or ``other`` for a path that nothing serves."""
    route: BaseRoute | None = scope.get("route")
    if isinstance(route, Route):
        return route.path
    path: str = scope["path"]
    return path if path in _KNOWN_PATHS else "other"


@lru_cache(maxsize=1024)
def _plain_host(sent: str) -> str:
    """Return a Host header as a plain lower-case name; an empty one if it is malformed."""
    try:
        parts = urlsplit(f"//{sent}")
        _ = parts.port
    except ValueError:
        return ""
    if parts.username is not None or parts.path or parts.query or parts.fragment:
        return ""
    return (parts.hostname or "").removesuffix(".")


def _origin(url: str) -> str:
    """Return scheme, name and port of a URL in one spelling; nothing if it is malformed."""
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
