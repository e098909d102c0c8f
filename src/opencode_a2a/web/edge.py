"""The guards in their order, around the application.

``app`` builds the service through ``edge``. Outermost first: trace and access log, so that
refusals too are traced and counted; names and origins; who calls; how often; compression; the
body; then the pages and the application itself.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

from starlette.types import ASGIApp, Receive, Scope, Send

from opencode_a2a.a2a.versions import DEFAULT_LINE, Version
from opencode_a2a.web.auth import Authentication, Credential
from opencode_a2a.web.compression import Compression
from opencode_a2a.web.context import Tracing
from opencode_a2a.web.guards import BodyGuard, BodyLimits, Boundary, BoundaryRules, RateLimit
from opencode_a2a.web.logs import AccessLog, PayloadLog
from opencode_a2a.web.pages import PageContent, Pages


@dataclass(frozen=True, slots=True)
class RateRules:
    max_requests: int = 120
    window: float = 60.0


@dataclass(frozen=True, slots=True)
class EdgeRules:
    """Everything the edge is to keep to."""

    boundary: BoundaryRules
    body: BodyLimits = field(default_factory=BodyLimits)
    rate: RateRules | None = field(default_factory=RateRules)
    """None switches the limit off."""
    gzip_minimum: int = 8192
    log_payloads: bool = False
    log_body_limit: int = 0
    default: Version = Version.V03
    """The version of a request that names none."""


def edge(
    app: ASGIApp, rules: EdgeRules, credentials: Iterable[Credential], pages: PageContent
) -> ASGIApp:
    """Return the application behind all its guards."""
    inner: ASGIApp = Pages(app, pages)
    if rules.log_payloads:
        inner = PayloadLog(inner, rules.log_body_limit)
    inner = BodyGuard(inner, rules.body)
    inner = Compression(inner, rules.gzip_minimum)
    if rules.rate is not None:
        inner = RateLimit(inner, rules.rate.max_requests, rules.rate.window)
    inner = Authentication(inner, credentials)
    inner = Boundary(inner, rules.boundary)
    return _Default(Tracing(AccessLog(inner)), rules.default)


class _Default:
    """Say in which version those are answered who name none."""

    def __init__(self, app: ASGIApp, line: Version) -> None:
        self._app = app
        self._line = line

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope[DEFAULT_LINE] = self._line
        await self._app(scope, receive, send)
