"""The layers that a request passes before A2A reads it.

``edge`` puts them around the application; their order is written there and nowhere else. Each is
one small ASGI class, which refuses a request by raising a ``ServiceError``. The layers of
``observe``, ``auth`` and ``limits`` are in those modules; those that concern browsers and the form
of a refusal are here.
"""

import asyncio
from collections.abc import Callable, Iterable
from functools import lru_cache, partial
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.middleware.gzip import GZipMiddleware
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from opencode_a2a.a2a.types import DEFAULT_VERSION, Version
from opencode_a2a.config import Settings, loopback
from opencode_a2a.errors import (
    BadHttpError,
    HostNotAllowedError,
    MethodNotAllowedError,
    MethodNotFoundError,
    OriginNotAllowedError,
    ServiceError,
    StreamEndedError,
)
from opencode_a2a.server.contracts import DISCOVERY, metadata_url
from opencode_a2a.server.http import refused
from opencode_a2a.tasks.log import DRAINED
from opencode_a2a.web.auth import OPEN_PATHS, AcceptedCredential, Authentication, Verify
from opencode_a2a.web.browser import REFUSES_GZIP, SignIns, page
from opencode_a2a.web.limits import BodyGuard, RateLimit, RequestRates
from opencode_a2a.web.observe import ANSWER_HEADERS, ANSWERED, AccessLog, PayloadLog

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
_ONLY_HTTPS = (b"strict-transport-security", b"max-age=31536000")


def edge(
    app: ASGIApp,
    settings: Settings,
    credentials: Iterable[AcceptedCredential],
    sign_ins: SignIns | None = None,
    verify: Verify | None = None,
    requests: RequestRates | None = None,
) -> ASGIApp:
    """Return the application inside all its layers."""
    limits, gzip_from = settings.limits, settings.a2a.http_gzip_minimum_size
    secure = settings.tls.cert_file and not loopback(settings.a2a.host)
    layers: list[Callable[[ASGIApp], ASGIApp] | None] = [  # the outermost first
        partial(AccessLog, always=[_ONLY_HTTPS] if secure else []),
        partial(Refusals, default=Version(settings.a2a.protocol_version)),
        partial(Compression, minimum_size=gzip_from, compresslevel=_GZIP_LEVEL)
        if gzip_from
        else None,
        partial(Boundary, settings=settings),
        Pages if sign_ins else None,
        partial(
            Authentication,
            credentials=credentials,
            find_issued=sign_ins.find if sign_ins else None,
            verify=verify,
            metadata_url=metadata_url(settings),
        ),
        partial(RateLimit, requests=RequestRates(limits) if requests is None else requests)
        if limits.rate_limit_enabled
        else None,
        partial(BodyGuard, limits=limits),
        partial(PayloadLog, limit=settings.log.body_limit) if settings.log.payloads else None,
    ]
    for layer in filter(None, reversed(layers)):
        app = layer(app)
    return app


class Refusals:
    """Answer a refusal of a layer or the router in the form of the version and binding called."""

    def __init__(self, app: ASGIApp, default: Version = Version.V03) -> None:
        self._app = app
        self._default = default
        """The version of an answer to a request that names none."""

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
            if ANSWERED in scope:
                raise
            error = StreamEndedError(DRAINED, cause="drained")
        response = refused(error, scope)
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
        if loopback(settings.a2a.host):
            # A page can make a domain of its own resolve to 127.0.0.1, and then call the service as
            # if it were the page's own server (DNS rebinding); the Host header gives it away.
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
        scope.setdefault(ANSWER_HEADERS, []).extend((granting, *_READABLE))
        await self._app(scope, receive, send)


class Pages:
    """Answer with the page that a browser opens; pass everything else on.

    It stands before authentication: a browser cannot send a credential when it opens a page.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        response = page(scope) if scope["method"] in ("GET", "HEAD") else None
        await (response or self._app)(scope, receive, send)


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
