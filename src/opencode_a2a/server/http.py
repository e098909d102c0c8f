"""Shared by the bindings over HTTP: reading requests, writing responses, refusals and streams."""

from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Mapping
from dataclasses import dataclass
from typing import TypeVar

import orjson
import structlog
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send
from structlog.typing import FilteringBoundLogger

from opencode_a2a.a2a.encoding import Encoding
from opencode_a2a.a2a.errors import rest_error, rpc_error
from opencode_a2a.a2a.operations import CARD_PATHS, PREFIXES, RPC_PATH
from opencode_a2a.a2a.types import (
    DEFAULT_VERSION,
    EVERY_VERSION,
    HOPS_HEADER,
    VERSION_HEADER,
    Version,
    checked_id,
    negotiate,
)
from opencode_a2a.config import StreamSettings
from opencode_a2a.errors import (
    ContentTypeNotSupportedError,
    InternalError,
    ServiceError,
    VersionNotSupportedError,
)
from opencode_a2a.events import Json
from opencode_a2a.ids import SCOPE_KEY, Caller
from opencode_a2a.jsonguard import decode
from opencode_a2a.server.operations import Events, OperationCall, TaskStream
from opencode_a2a.server.sse import ErrorFrame, EventStream, Streams, WriteNow

E = TypeVar("E", bound=Exception)
logger: FilteringBoundLogger = structlog.get_logger(__name__)

OPERATION = "operation"
"""In the scope: the name of the operation or method, for the access log."""
_JSON_TYPES = frozenset({"", "application/json", "application/a2a+json"})
REST_TYPES = {Version.V1: "application/a2a+json", Version.V03: "application/json"}
_EXTENSION_HEADERS = {Version.V1: "A2A-Extensions", Version.V03: "X-A2A-Extensions"}


class Endpoint:
    """The endpoint of a route; Starlette's own has five calls in between."""

    def __init__(self, respond: Callable[[Request], Awaitable[ASGIApp]]) -> None:
        self._respond = respond

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        response = await self._respond(Request(scope, receive))
        await response(scope, receive, send)


# --- requests ---------------------------------------------------------------------------------


def call_of(request: Request, version: Version, options: "BindingOptions") -> OperationCall:
    """Return what an operation has to know about a request besides its params.

    Raise InvalidParamsError if the header that names the context holds something else.
    """
    context = None
    if options.context_header and (given := request.headers.get(options.context_header)):
        context = checked_id(options.context_header, given)
    caller: Caller = request.scope[SCOPE_KEY]
    cursor = request.headers.get("last-event-id")
    if not cursor and request.scope["query_string"]:
        cursor = request.query_params.get("after")
    hops = request.headers.get(HOPS_HEADER, "")
    sane = hops.isascii() and hops.isdigit() and len(hops) < 4
    return OperationCall(caller, version, cursor, int(hops) if sane else 0, context)


def asked_version(request: Request) -> str:
    """Return the version that a request asks for in its header, or else in its query."""
    asked = request.headers.get(VERSION_HEADER, "").strip()
    return asked or request.query_params.get(VERSION_HEADER, "").strip()


def refusal_version(
    request: Request, default: Version, supported: Collection[Version] = EVERY_VERSION
) -> Version:
    """Return the version in which to refuse a request whose version is not settled yet."""
    try:
        return negotiate(asked_version(request), default, supported)
    except VersionNotSupportedError:
        return default


async def read_body(request: Request) -> Json:
    """Return the decoded body; raise an error if it is declared as something else than JSON."""
    given = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if given not in _JSON_TYPES:
        raise ContentTypeNotSupportedError(
            f"The body is declared as {given[:64]}; send application/json",
            supported_media_types=["application/json", "application/a2a+json"],
        )
    return decode(await request.body())


# --- responses --------------------------------------------------------------------------------


def success_headers(
    request: Request, version: Version, options: "BindingOptions"
) -> dict[str, str]:
    """Return the headers of a successful response: the version and the active extensions."""
    asked = [
        value for name in _EXTENSION_HEADERS.values() for value in request.headers.getlist(name)
    ]
    headers = {VERSION_HEADER: version.value}
    names = dict.fromkeys(name.strip() for name in ",".join(asked).split(","))
    if active := [name for name in names if name in options.extensions]:
        headers[_EXTENSION_HEADERS[version]] = ", ".join(active)
    return headers


class OrjsonResponse(JSONResponse):
    def render(self, content: Json) -> bytes:
        return orjson.dumps(content)


def rest_refusal(error: ServiceError, version: Version) -> Response:
    body, headers = rest_error(error, version), {VERSION_HEADER: version.value}
    return OrjsonResponse(body, error.http, headers, REST_TYPES[version])


def as_service_error(error: Exception, where: str) -> ServiceError:
    """Return an error that callers may see; any other is logged, and becomes InternalError.

    It has forgotten where it was raised: see ``without_origin``.
    """
    if isinstance(error, ServiceError):
        return without_origin(error)
    logger.error("request failed", where=where, exc_info=error)
    without_origin(error)
    return InternalError()


def without_origin(error: E) -> E:
    """Have an error forget where it was raised, and what was handled then.

    The code that makes a response of an error is itself on the way by which it came: error,
    traceback and frame refer to each other, and with them the whole request stays in memory until
    the garbage collector finds them.
    """
    error.__cause__ = error.__context__ = error.__traceback__ = None
    return error


def refused(error: ServiceError, scope: Scope) -> Response:
    """Return the refusal of a request that reached no binding.

    It has the form of the version and binding that were called, and the HTTP status of the error.
    The layers of ``web`` refuse requests with it.
    """
    path: str = scope["path"]
    if path == RPC_PATH:
        version = refusal_version(Request(scope), scope.get(DEFAULT_VERSION, Version.V03))
        body = rpc_error(error, None, version)
        return OrjsonResponse(body, error.http, {VERSION_HEADER: version.value})
    old = path.startswith(f"{PREFIXES[Version.V03]}/") or (path, Version.V03) in CARD_PATHS
    return rest_refusal(error, Version.V03 if old else Version.V1)


# --- streams ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class BindingOptions:
    """The configuration that the bindings share."""

    default: Version
    """The version of a request that names none."""
    limits: StreamSettings
    streams: Streams
    extensions: Collection[str] = ()
    """The URIs that callers may activate extensions by, though all work without that."""
    supported: tuple[Version, ...] = EVERY_VERSION
    context_header: str | None = None
    """The header with the context of messages that name none."""


_FRAME = b"id: %b\ndata: %b%b%b\n\n"
"""A server-sent event: cursor, head, object and tail."""


def event_stream(
    options: BindingOptions,
    stream: TaskStream,
    encoding: Encoding,
    error_frame: ErrorFrame,
    headers: Mapping[str, str],
    head: bytes = b"",
    tail: bytes = b"",
) -> EventStream:
    """Return the response that writes a task stream as server-sent events.

    An error becomes the last event. ``head`` and ``tail`` enclose the object of each event.
    """

    def framed(events: Events) -> bytes:
        return b"".join([_FRAME % (cursor, head, body, tail) for cursor, body in events])

    async def frames(write: WriteNow) -> AsyncGenerator[bytes, None]:
        def write_events(events: Events) -> bool:
            return write(framed(events))

        try:
            while chunk := framed(await stream.next(encoding, write_events)):
                yield chunk
                del chunk  # not to be kept while waiting for the next one
        except ServiceError as error:
            yield error_frame(error)

    return EventStream(frames, error_frame, headers, options.limits, options.streams)
