"""How calls to an OpenCode are made, whatever its generation: one request, one checked response.

The drivers (``opencode.client`` for 1.x, ``opencode.v2.client`` for 2.x) build on it. An id is put
into a path only if it has the shape of an id, so that it cannot lead to another endpoint. The
status, content type, size and shape of every response are checked. All errors are those of
``opencode_a2a.errors`` and never quote a driver. Nothing here knows an endpoint.
"""

import asyncio
import base64
import re
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from functools import cache
from types import NoneType
from typing import Final, Self, TypeVar
from urllib.parse import quote, unquote, urlencode, urlsplit

import orjson
from pydantic import Field, TypeAdapter, ValidationError

from opencode_a2a.errors import (
    ServiceError,
    SessionBusyError,
    UpstreamAwayError,
    UpstreamBackpressureError,
    UpstreamError,
    UpstreamHttpError,
    UpstreamNotFoundError,
    UpstreamPayloadError,
    UpstreamTimeoutError,
    UpstreamUnreachableError,
)
from opencode_a2a.events import JsonObject
from opencode_a2a.jsonguard import loads
from opencode_a2a.net.exchange import (
    Exchange,
    ExchangeError,
    HttpResponse,
    NotConnectedError,
    NotHttpError,
    TooLargeError,
)
from opencode_a2a.opencode.driver import HERE, Location
from opencode_a2a.opencode.translate import mask_paths
from opencode_a2a.opencode.types import Wire
from opencode_a2a.telemetry import trace_headers

T = TypeVar("T")
Query = Mapping[str, str | int | bool | None]

MAX_RESPONSE_BYTES: Final = 64 * 1024 * 1024
MAX_DETAIL_CHARS: Final = 512
"""Characters of OpenCode's error text that an error keeps as its ``detail``."""


@dataclass(frozen=True, slots=True)
class Request:
    method: str
    path: str
    at: Location = HERE
    query: Query | None = None
    body: bytes | None = None
    endless: bool = False
    """Whether the call runs a turn, which may take any time: it has no timeout."""
    urgent: bool = False
    """Whether the call is exempt from the limit on concurrent requests. Calls that end or unblock
    a turn are: refusing them under load would keep the load up."""

    @property
    def name(self) -> str:
        return f"{self.method} {self.path}"


class Calls:
    """Calls to one OpenCode server; open it with ``async with``."""

    def __init__(
        self,
        base_url: str,
        *,
        username: str = "opencode",
        password: str | None = None,
        timeout: float = 120.0,
        max_concurrent_requests: int = 0,
        max_response_bytes: int = MAX_RESPONSE_BYTES,
    ) -> None:
        url = urlsplit(base_url)
        if password is None and url.password:
            username, password = unquote(url.username or ""), unquote(url.password)
        host = url.netloc.rpartition("@")[2]
        self.base_url = f"{url.scheme}://{host}{url.path}".rstrip("/")
        self._timeout = timeout
        self._limit = max_concurrent_requests
        self._running = 0
        """Requests whose responses are not complete yet."""
        self.before_change: Callable[[], Awaitable[None]] | None = None
        """Awaited before each request that changes something, and again when it can be written:
        another replica may own this OpenCode by now."""
        self.version: str | None = None
        """The version that answered last, if it is known."""
        self.has_password = password is not None
        headers = {"accept-encoding": "identity", "user-agent": "opencode-a2a"}
        if password is not None:
            token = base64.b64encode(f"{username}:{password}".encode()).decode()
            headers["authorization"] = f"Basic {token}"
        self._exchange = Exchange(self.base_url, headers, max_response_bytes)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections; running calls continue."""
        self._exchange.close()

    async def raw_response(self, path: str) -> HttpResponse:
        """Return what is at a path, whatever it is; ``opencode.kinds`` judges it."""
        request = Request("GET", path)
        try:
            return await self._exchange.send("GET", path, None, {})
        except NotHttpError as error:
            raise UpstreamPayloadError(detail=f"{request.name}: {error}") from None
        except ExchangeError as error:
            raise upstream_error(request, error) from None

    async def read_stream(self, path: str, sink: Callable[[bytes], object]) -> None:
        """Pass the event stream to ``sink`` in chunks, cut anywhere, until the stream ends."""
        request = Request("GET", path)
        try:
            async with self._exchange.stream(
                request.path, {**trace_headers(), "accept": "text/event-stream"}
            ) as stream:
                response = stream.response
                if response.status >= 300:
                    body = bytearray()
                    await stream.read(body.extend)
                    raise self.refusal(request.path, response.status, bytes(body))
                if not response.headers.get("content-type", "").startswith("text/event-stream"):
                    raise _wrong_media_type(request, response)
                await stream.read(sink)
        except ExchangeError as error:
            raise upstream_error(request, error) from None

    # How a call is made

    async def call(
        self,
        kind: type[T],
        method: str,
        path: str,
        at: Location = HERE,
        *,
        query: Query | None = None,
        body: Wire | JsonObject | None = None,
        endless: bool = False,
        urgent: bool = False,
    ) -> T:
        """Send a request and return the response as ``kind``; a None in the body is left out."""
        encoded = None
        if isinstance(body, Wire):
            encoded = body.__pydantic_serializer__.to_json(body, by_alias=True, exclude_none=True)
        elif body is not None:
            encoded = orjson.dumps({key: value for key, value in body.items() if value is not None})
        del body  # it may hold large files, and the call may last as long as a turn
        request = Request(method, path, at, query, encoded, endless, urgent)
        return decode(kind, request, await self.send(request))

    async def send(self, request: Request) -> HttpResponse:
        """Send a request and return the response; raise the error that a refusal stands for."""
        if self._limit and not request.urgent and self._running >= self._limit:
            raise UpstreamBackpressureError(limit=self._limit)
        query = self.place(request.at)
        for key, value in (request.query or {}).items():
            if value is not None:
                query[key] = str(value).lower() if isinstance(value, bool) else str(value)
        target = f"{request.path}?{urlencode(query, quote_via=quote)}" if query else request.path
        headers = trace_headers()
        if request.body is not None:
            headers["content-type"] = "application/json"
        self._running += 1
        try:
            before_change = None if request.method == "GET" else self.before_change
            if before_change is not None:
                await before_change()
            async with asyncio.timeout(None if request.endless else self._timeout):
                response = await self._exchange.send(
                    request.method, target, request.body, headers, before_change
                )
        except ExchangeError as error:
            raise upstream_error(request, error) from None
        except TimeoutError:
            detail = f"{request.name}: no response in {self._timeout:g} s"
            raise UpstreamTimeoutError(detail=detail) from None
        finally:
            self._running -= 1
        if response.status >= 300:
            raise self.refusal(request.path, response.status, response.body)
        return response

    # What differs between the generations

    def place(self, at: Location) -> dict[str, str]:
        """Return the query that names a location."""
        raise NotImplementedError

    def not_found(self, path: str, refused: "Refusal", detail: str) -> ServiceError:
        """Return the error for a response with status 404."""
        raise NotImplementedError

    def refusal(self, path: str, status: int, body: bytes) -> ServiceError:
        """Return the error for a response whose status is not a success.

        Its ``detail`` is OpenCode's text: shortened, without paths, and without a provider's body.
        """
        try:
            refused = Refusal.model_validate_json(body)
            text = refused.text
        except ValidationError:
            refused, text = Refusal(), body[: 4 * MAX_DETAIL_CHARS].decode(errors="replace")
        detail = mask_paths(text.strip())[:MAX_DETAIL_CHARS]
        match status:
            case 404:
                return self.not_found(path, refused, detail)
            case 409:
                return SessionBusyError(upstream_status=status, detail=detail)
            case 401 | 403:
                message = (
                    "OpenCode refuses the credentials; "
                    "check OPENCODE_AUTH_USERNAME and OPENCODE_AUTH_PASSWORD"
                )
                return UpstreamHttpError(message, upstream_status=status, detail=detail)
            case _:
                return UpstreamHttpError(upstream_status=status, detail=detail)


def upstream_error(request: Request, error: ExchangeError) -> UpstreamError:
    match error:
        case TooLargeError():
            kind = UpstreamPayloadError
        case NotConnectedError():
            kind = UpstreamAwayError
        case _:
            kind = UpstreamUnreachableError
    return kind(detail=f"{request.name}: {error}")


# Requests

_REST: Final = "[A-Za-z0-9]{1,128}"
_SHAPE: Final = re.compile(rf"(ses|msg|prt|per|que|frm|wrk|sh)_{_REST}\Z")


def id_pattern(prefix: str) -> str:
    """Return the shape of OpenCode's ids with this prefix, as a JSON schema has it."""
    return f"^{prefix}_{_REST}$"


def well_formed(prefix: str, value: str) -> bool:
    """Whether a value has the shape of OpenCode's ids with this prefix."""
    shape = _SHAPE.match(value)
    return shape is not None and shape.group(1) == prefix


def checked(prefix: str, value: str) -> str:
    if not well_formed(prefix, value):
        raise UpstreamNotFoundError(upstream_status=404, detail=f"not an id: {prefix}_…")
    return value


# Responses


@cache
def _adapter(kind: type[T]) -> TypeAdapter[T]:
    """Return the decoder of a type, built on first use: all of them would double the start time."""
    return TypeAdapter(kind)


def decode(kind: type[T], request: Request, response: HttpResponse) -> T:
    adapter = _adapter(kind)
    if kind is NoneType and not response.body:
        return adapter.validate_python(None)
    if not response.headers.get("content-type", "").startswith("application/json"):
        raise _wrong_media_type(request, response)
    try:
        try:
            return adapter.validate_json(response.body)
        except ValidationError as error:
            if error.errors(include_url=False, include_input=False)[0]["type"] != "json_invalid":
                raise
            try:
                mended = loads(response.body)
            except ValueError:
                raise error from None
            return adapter.validate_python(mended)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        where = ".".join(str(step) for step in first["loc"])
        detail = f"{request.name}: {first['type']} at {where or 'the top'}"
        raise UpstreamPayloadError(detail=detail) from None


def _wrong_media_type(request: Request, response: HttpResponse) -> UpstreamPayloadError:
    kind = response.headers.get("content-type", "").partition(";")[0] or "no content type"
    return UpstreamPayloadError(detail=f"{request.name}: unexpected {kind[:80]}")


class _Issue(Wire):
    path: tuple[str | int, ...] = ()
    message: str = ""


class _RefusalData(Wire):
    message: str | None = None
    path: str | None = None
    issues: tuple[_Issue, ...] = ()


class Refusal(Wire):
    """The body of an error; OpenCode uses three shapes, which have these fields among them."""

    data: _RefusalData = _RefusalData()
    message: str | None = None
    tag: str | None = Field(default=None, alias="_tag")
    name: str | None = None

    @property
    def text(self) -> str:
        if not self.data.issues:
            return self.data.message or self.message or self.tag or self.name or ""
        source = (self.data.path or "configuration").rpartition("/")[2]
        issues = (
            f"{'.'.join(str(step) for step in issue.path)}: {issue.message}"
            for issue in self.data.issues
        )
        return f"{source}: {'; '.join(issues)}"
