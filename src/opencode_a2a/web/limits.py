"""What a request must keep to before anyone reads it.

Each guard is one ASGI class: which names the service is called by and which pages may call it
(``Boundary``), how often (``RateLimit``), and how large, how slow and of which kind a body may be
(``BodyGuard``). A guard raises a ``ServiceError``, and ``server.Refusals`` turns it into an answer.
None of them knows A2A. What the JSON inside may look like is checked by whoever parses the body.
"""

import asyncio
import sys
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from functools import lru_cache
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from opencode_a2a import metrics
from opencode_a2a.config import LimitSettings, Settings, loopback
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
from opencode_a2a.ids import SCOPE_KEY, Caller
from opencode_a2a.server.contracts import DISCOVERY
from opencode_a2a.web.auth import OPEN_PATHS, peer_address
from opencode_a2a.web.observe import ANSWER_HEADERS

BODY_SECONDS = 30.0
"""How long a body may take to arrive."""
_LOOPBACK_NAMES = frozenset({"localhost", "127.0.0.1", "::1"})
_DEFAULT_PORTS = {"http": 80, "https": 443}
_PROBES = frozenset({"/livez", "/readyz"})
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
            # A page may also come from the name of ours that was just checked. A proxy may have
            # ended the TLS of an https page.
            schemes = () if self._hosts is None else (scope["scheme"], "https")
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
        scope.setdefault(ANSWER_HEADERS, []).extend((granting, *_READABLE))
        await self._app(scope, receive, send)


class RateLimit:
    """At most so many requests in a sliding window, per credential, principal or address."""

    def __init__(
        self,
        app: ASGIApp,
        limits: LimitSettings,
        *,
        max_keys: int = 10_000,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._app = app
        self._limits = limits
        self._max_keys = max_keys
        self._clock = clock
        self._seen: OrderedDict[str, deque[float]] = OrderedDict()
        """The moments of each key's recent requests; the key that was quiet longest first."""

    def __len__(self) -> int:
        return len(self._seen)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] in _PROBES:  # a probe that is refused would have the service restarted
            await self._app(scope, receive, send)
            return
        caller: Caller | None = scope.get(SCOPE_KEY)
        if caller is None:
            key = f"address:{peer_address(scope)}"
        elif caller.credential_id is not None:
            key = f"credential:{caller.credential_id}"
        else:
            key = f"principal:{caller.principal}"
        if wait := self.take(key):
            metrics.RATE_LIMIT_REJECTED.inc()
            seconds = int(wait) + 1
            raise RateLimitError(
                f"Too many requests; try again in {seconds} s",
                retry_after_seconds=seconds,
            ).with_headers(("Retry-After", str(seconds)))
        await self._app(scope, receive, send)

    def take(self, key: str) -> float:
        """Count one request; return 0, or the seconds to wait when it is one too many."""
        now = self._clock()
        passed = now - self._limits.rate_limit_window_seconds
        while self._seen and next(iter(self._seen.values()))[-1] <= passed:
            self._seen.popitem(last=False)  # its last request has left the window
        moments = self._seen.setdefault(key, deque())
        while moments and moments[0] <= passed:
            moments.popleft()
        if len(moments) >= self._limits.rate_limit_max_requests:
            return moments[0] - passed
        moments.append(now)
        self._seen.move_to_end(key)
        if len(self._seen) > self._max_keys:
            self._seen.popitem(last=False)
        return 0.0


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
