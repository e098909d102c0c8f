"""What a request must keep to before anyone reads it.

Each guard is one ASGI class with its own limits: which names the service is called by and
which pages may call it (``Boundary``), how often (``RateLimit``), and how large, how slow and
of which kind a body may be (``BodyGuard``). None of them knows A2A. What the JSON inside may
look like is the business of ``jsonguard``, which is asked by whoever parses the body.
"""

import asyncio
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from ipaddress import ip_address
from urllib.parse import urlsplit

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from opencode_a2a import metrics
from opencode_a2a.callers import Caller
from opencode_a2a.errors import (
    BadHttpError,
    ContentEncodingNotSupportedError,
    HostNotAllowedError,
    MediaTypeNotSupportedError,
    OriginNotAllowedError,
    RateLimitError,
    RequestTimeoutError,
    RequestTooLargeError,
)
from opencode_a2a.server.card import DISCOVERY
from opencode_a2a.web.answers import Header, Refusal, closing, header, headers_of, refuse
from opencode_a2a.web.auth import OPEN_PATHS, peer_address

_LOOPBACK_NAMES = frozenset({"localhost", "127.0.0.1", "::1"})
_WITH_BODY = frozenset({"POST", "PUT", "PATCH"})
_PROBES = frozenset({"/livez", "/readyz"})
_ASKED_METHOD = b"access-control-request-method"
_ANY_ORIGIN: Header = (b"access-control-allow-origin", b"*")
_PREFLIGHT: tuple[Header, ...] = (
    (b"access-control-allow-methods", b"GET, HEAD, POST, DELETE"),
    (
        b"access-control-allow-headers",
        b"Authorization, Content-Type, A2A-Version, A2A-Extensions, X-A2A-Extensions, "
        b"Last-Event-ID, If-None-Match, Traceparent, Tracestate",
    ),
    (b"access-control-max-age", b"600"),
    (b"vary", b"Origin"),
)
_READABLE: tuple[Header, ...] = (
    (
        b"access-control-expose-headers",
        b"A2A-Version, A2A-Extensions, X-A2A-Extensions, WWW-Authenticate, Retry-After, ETag, "
        b"Traceparent",
    ),
    (b"vary", b"Origin"),
)
_DEFAULT_PORTS = {"http": 80, "https": 443}


@dataclass(frozen=True, slots=True)
class BoundaryRules:
    """By which names the service may be called, and from which pages."""

    hosts: frozenset[str] | None
    """Names or ``*.suffix``; None when any will do."""
    origins: frozenset[str] = frozenset()

    @classmethod
    def for_bind(
        cls,
        bind_host: str,
        public_url: str,
        allowed_hosts: tuple[str, ...] = (),
        allowed_origins: tuple[str, ...] = (),
    ) -> "BoundaryRules":
        """Return the rules of a service: on a loopback address the names are always checked.

        A page in a browser can let a name of its own point to 127.0.0.1 and would then speak to
        the service as if it were its own server; the Host header gives it away.
        """
        public = urlsplit(public_url).hostname
        named = {_plain_host(name) for name in allowed_hosts}
        if public:
            named.add(public)
        hosts: frozenset[str] | None = None
        if is_loopback(bind_host):
            hosts = frozenset(named | _LOOPBACK_NAMES)
        elif allowed_hosts:
            hosts = frozenset(named)
        origins = (_origin(url) for url in (public_url, *allowed_origins))
        return cls(hosts, frozenset(origin for origin in origins if origin))


class Boundary:
    """Refuse foreign names of the service and foreign pages; let browsers know the others (CORS).

    Open paths may be called by every page, and the public card may be read by it.
    """

    def __init__(self, app: ASGIApp, rules: BoundaryRules) -> None:
        self._app = app
        self._rules = rules

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        refusal = self._check(scope)
        if refusal is not None:
            await refuse(scope, send, refusal)
            return
        granted = self._granted(scope)
        if granted is None:
            await self._app(scope, receive, send)
        elif scope["method"] == "OPTIONS" and header(scope, _ASKED_METHOD) is not None:
            # A browser asks without the credential before it calls with one.
            start = {"status": 204, "headers": [granted, *_PREFLIGHT]}
            await send({"type": "http.response.start", **start})
            await send({"type": "http.response.body"})
        else:
            await self._app(scope, receive, _telling(send, [granted, *_READABLE]))

    def _granted(self, scope: Scope) -> Header | None:
        """Return the header that lets the calling page read the answer."""
        if scope["type"] != "http":
            return None
        if scope["path"] in DISCOVERY:
            return _ANY_ORIGIN
        origin = headers_of(scope, b"origin")
        if origin and _origin(origin[0].decode("latin-1")) in self._rules.origins:
            return b"access-control-allow-origin", origin[0]
        return None

    def _check(self, scope: Scope) -> Refusal | None:
        sent = headers_of(scope, b"host")
        if len(sent) > 1:
            return Refusal(BadHttpError("Send exactly one Host header"))
        host = sent[0].decode("latin-1") if sent else ""
        if self._rules.hosts is not None and not _host_matches(host, self._rules.hosts):
            return _MISDIRECTED
        if scope["path"] in OPEN_PATHS:
            return None
        for origin in headers_of(scope, b"origin"):
            if not self._own_page(origin.decode("latin-1"), scope, host):
                return _FOREIGN_ORIGIN
        return None

    def _own_page(self, origin: str, scope: Scope, host: str) -> bool:
        plain = _origin(origin)
        if plain in self._rules.origins:
            return True
        # A page under a name of ours that was just checked. A proxy may have ended its TLS.
        schemes = (scope["scheme"], "https")
        own = [_origin(f"{scheme}://{host}") for scheme in schemes]
        return self._rules.hosts is not None and plain in own


def _telling(send: Send, headers: list[Header]) -> Send:
    """Return a ``send`` that adds headers to the answer."""

    async def told(message: Message) -> None:
        if message["type"] == "http.response.start":
            message = {**message, "headers": [*message.get("headers", ()), *headers]}
        await send(message)

    return told


class RateLimit:
    """At most so many requests in a sliding window, per credential, principal or address."""

    def __init__(
        self,
        app: ASGIApp,
        max_requests: int = 120,
        window: float = 60.0,
        *,
        max_keys: int = 10_000,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._app = app
        self._max_requests = max_requests
        self._window = window
        self._max_keys = max_keys
        self._clock = clock
        self._seen: OrderedDict[str, deque[float]] = OrderedDict()
        """The moments of each key's recent requests; the key that was quiet longest first."""

    def __len__(self) -> int:
        return len(self._seen)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        # A probe that is refused would have the service restarted.
        if scope["type"] == "lifespan" or scope["path"] in _PROBES:
            await self._app(scope, receive, send)
            return
        wait = self.take(_rate_key(scope))
        if not wait:
            await self._app(scope, receive, send)
            return
        metrics.RATE_LIMIT_REJECTED.inc()
        await refuse(scope, send, _over_limit(wait))

    def take(self, key: str) -> float:
        """Count one request; return 0, or the seconds to wait when it is one too many."""
        now = self._clock()
        self._forget(now)
        moments = self._seen.setdefault(key, deque())
        while moments and moments[0] <= now - self._window:
            moments.popleft()
        if len(moments) >= self._max_requests:
            return moments[0] + self._window - now
        moments.append(now)
        self._seen.move_to_end(key)
        if len(self._seen) > self._max_keys:
            self._seen.popitem(last=False)
        return 0.0

    def _forget(self, now: float) -> None:
        """Drop the keys whose last request has left the window."""
        while self._seen:
            moments = next(iter(self._seen.values()))
            if moments[-1] > now - self._window:
                return
            self._seen.popitem(last=False)


@dataclass(frozen=True, slots=True)
class BodyLimits:
    max_bytes: int = 1_048_576
    """0 means no limit."""
    seconds: float = 30.0
    """How long a body may take to arrive."""


class BodyGuard:
    """Read the body within its limits and hand it on in one piece."""

    def __init__(self, app: ASGIApp, limits: BodyLimits) -> None:
        self._app = app
        self._limits = limits

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] not in _WITH_BODY:
            await self._app(scope, receive, send)
            return
        refusal = _wrong_kind(scope) or self._announced_too_large(scope)
        if refusal is not None:
            await refuse(scope, send, refusal)
            return
        try:
            async with asyncio.timeout(self._limits.seconds):
                body = await self._read(receive)
        except TimeoutError:
            await refuse(scope, send, closing(_too_slow(self._limits.seconds)))
            return
        if isinstance(body, Refusal):
            await refuse(scope, send, body)
        elif body is not None:
            await self._app(scope, _Replay(body, receive), send)

    def _announced_too_large(self, scope: Scope) -> Refusal | None:
        length = header(scope, b"content-length")
        if not length or not length.isdecimal():
            return None
        return self._too_large(int(length))

    async def _read(self, receive: Receive) -> bytes | Refusal | None:
        """Return the body, or None when the sender has gone."""
        pieces: list[bytes] = []
        size = 0
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                return None
            piece: bytes = message.get("body", b"")
            size += len(piece)
            refusal = self._too_large(size)
            if refusal is not None:
                return refusal
            pieces.append(piece)
            if not message.get("more_body", False):
                return b"".join(pieces)

    def _too_large(self, size: int) -> Refusal | None:
        most = self._limits.max_bytes
        if not most or size <= most:
            return None
        return Refusal(
            RequestTooLargeError(
                f"The body is larger than {most} bytes; send large files by URL",
                max_bytes=most,
                actual_size=size,
            )
        )


class _Replay:
    """The body as one message, then whatever the connection says."""

    __slots__ = ("_body", "_receive")

    def __init__(self, body: bytes, receive: Receive) -> None:
        self._body: bytes | None = body
        self._receive = receive

    async def __call__(self) -> Message:
        if self._body is None:
            return await self._receive()
        body, self._body = self._body, None
        return {"type": "http.request", "body": body, "more_body": False}


def is_loopback(host: str) -> bool:
    """Tell whether a bind address can be reached from this machine only."""
    if host == "localhost":
        return True
    try:
        return ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def _host_matches(sent: str, allowed: frozenset[str]) -> bool:
    host = _plain_host(sent)
    if host in allowed:
        return True
    return any(host.endswith(name[1:]) for name in allowed if name.startswith("*."))


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


def _rate_key(scope: Scope) -> str:
    caller: Caller | None = scope.get("caller")
    if caller is None:
        return f"address:{peer_address(scope)}"
    if caller.credential_id is not None:
        return f"credential:{caller.credential_id}"
    return f"principal:{caller.principal}"


def _wrong_kind(scope: Scope) -> Refusal | None:
    """Say why a body of this kind is not taken; no body is of any kind."""
    for encoding in headers_of(scope, b"content-encoding"):
        if encoding.strip().lower() not in (b"", b"identity"):
            return _ENCODED
    length = header(scope, b"content-length")
    if length == "0" or (length is None and header(scope, b"transfer-encoding") is None):
        return None
    sent = headers_of(scope, b"content-type")
    if sent and not (len(sent) == 1 and _is_json(sent[0].decode("latin-1"))):
        return _NOT_JSON
    return None


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


def _too_slow(seconds: float) -> Refusal:
    return Refusal(
        RequestTimeoutError(f"The body did not arrive within {seconds:g} s; send it again")
    )


def _over_limit(wait: float) -> Refusal:
    seconds = str(max(1, int(wait) + 1))
    error = RateLimitError(
        f"Too many requests; try again in {seconds} s", retry_after_seconds=int(seconds)
    )
    return Refusal(error, ((b"retry-after", seconds.encode()),))


_MISDIRECTED = Refusal(HostNotAllowedError())
_FOREIGN_ORIGIN = Refusal(OriginNotAllowedError())
_ENCODED = Refusal(ContentEncodingNotSupportedError(), headers=((b"accept-encoding", b"identity"),))
_NOT_JSON = Refusal(
    MediaTypeNotSupportedError(),
    headers=((b"accept-post", b"application/json, application/a2a+json"),),
)
