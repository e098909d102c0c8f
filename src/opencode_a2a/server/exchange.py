"""What both bindings take from a request and give to a response."""

from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from dataclasses import dataclass

import structlog
from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send
from structlog.typing import FilteringBoundLogger

from opencode_a2a.a2a.versions import EVERY, HEADER, Version, negotiate
from opencode_a2a.callers import SCOPE_KEY, Caller
from opencode_a2a.errors import ContentTypeNotSupportedError, InternalError, ServiceError
from opencode_a2a.peers.client import HOPS_HEADER
from opencode_a2a.server.announced import Announcement, activated
from opencode_a2a.server.operations import Event, Feed

log: FilteringBoundLogger = structlog.get_logger(__name__)

OPERATION = "operation"
"""In the scope: the operation that a request is for, as the access log names it."""
_JSON_TYPES = frozenset({"", "application/json", "application/a2a+json"})
EVENT_STREAM = {
    "content-type": "text/event-stream",
    "cache-control": "no-cache, no-transform",
    "x-accel-buffering": "no",
}
"""The headers of a stream of server-sent events."""
_EXTENSION_HEADERS = {Version.V1: "A2A-Extensions", Version.V03: "X-A2A-Extensions"}


Frames = Callable[[Callable[[bytes], bool]], AsyncGenerator[bytes, None]]
"""Makes the frames. It may write some by the function it is given while it has yielded nothing;
if that returns False, the frame has to be yielded."""


@dataclass(frozen=True, slots=True)
class Stream:
    """A stream of whole, encoded server-sent events, and the event to break it off with."""

    frames: Frames
    error_frame: Callable[[ServiceError], bytes]
    headers: Mapping[str, str]


class Endpoint:
    """What answers the requests of a route; the router's own way has five calls in between."""

    def __init__(self, answer: Callable[[Request], Awaitable[ASGIApp]]) -> None:
        self._answer = answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        response = await self._answer(Request(scope, receive))
        await response(scope, receive, send)


Serve = Callable[[Stream], ASGIApp]
"""Makes a response of a stream; the edge knows how."""


@dataclass(frozen=True, slots=True)
class Terms:
    """What a binding is configured with."""

    default: Version
    """The line of a request that names none."""
    serve: Serve
    announced: tuple[Announcement, ...] = ()
    spoken: tuple[Version, ...] = EVERY


def caller_of(request: Request) -> Caller:
    caller: Caller = request.scope[SCOPE_KEY]
    return caller


def line_of(request: Request, terms: Terms) -> Version:
    header, query = request.headers.get(HEADER), request.query_params.get(HEADER)
    return negotiate(header, query, terms.default, terms.spoken)


def cursor_of(request: Request) -> str | None:
    return request.headers.get("last-event-id") or request.query_params.get("after")


def hops_of(request: Request) -> int:
    given = request.headers.get(HOPS_HEADER, "")
    return int(given) if given.isascii() and given.isdigit() and len(given) < 4 else 0


def check_content_type(request: Request) -> None:
    given = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if given not in _JSON_TYPES:
        raise ContentTypeNotSupportedError(
            f"The body is declared as {given[:64]}; send application/json",
            supported_media_types=["application/json", "application/a2a+json"],
        )


def headers_of(line: Version) -> dict[str, str]:
    return {HEADER: line.value}


def success_headers(
    request: Request, line: Version, announced: tuple[Announcement, ...]
) -> dict[str, str]:
    """Return the headers of an answer that is no error: the version and the active extensions."""
    asked = [
        value for name in _EXTENSION_HEADERS.values() for value in request.headers.getlist(name)
    ]
    active = activated(", ".join(asked), announced)
    headers = headers_of(line)
    if active:
        headers[_EXTENSION_HEADERS[line]] = ", ".join(active)
    return headers


def as_service_error(error: Exception, where: str) -> ServiceError:
    """Return an error that may be told; a defect of ours is logged and told as nothing more."""
    if isinstance(error, ServiceError):
        return error
    log.error("request failed", where=where, exc_info=error)
    return InternalError()


def framed(
    feed: Feed, error_frame: Callable[[ServiceError], bytes], wrap: Callable[[bytes], bytes]
) -> Frames:
    """Write events as frames, a batch at once; an error becomes the last frame."""

    def joined(events: list[Event]) -> bytes:
        return b"".join([b"id: %b\ndata: %b\n\n" % (at, wrap(body)) for at, body in events])

    async def written(write: Callable[[bytes], bool]) -> AsyncGenerator[bytes, None]:
        batches = feed.batches(lambda events: not events or write(joined(events)))
        try:
            async for events in batches:
                frames = joined(events)
                del events  # not to be kept while waiting for the next ones
                yield frames
                del frames
        except ServiceError as error:
            yield error_frame(error)
        finally:
            await batches.aclose()

    return written
