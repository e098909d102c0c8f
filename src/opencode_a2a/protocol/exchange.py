"""What both bindings take from a request and give to a response."""

from collections.abc import AsyncGenerator, Callable, Mapping
from dataclasses import dataclass

import structlog
from starlette.requests import Request
from starlette.types import ASGIApp
from structlog.typing import FilteringBoundLogger

from opencode_a2a.callers import SCOPE_KEY, Caller
from opencode_a2a.errors import ContentTypeNotSupportedError, InternalError, ServiceError
from opencode_a2a.peers.client import HOPS_HEADER
from opencode_a2a.protocol.announced import Announcement, activated
from opencode_a2a.protocol.handler import Feed
from opencode_a2a.protocol.versions import EVERY, HEADER, Line, negotiate

log: FilteringBoundLogger = structlog.get_logger(__name__)

_JSON_TYPES = frozenset({"", "application/json", "application/a2a+json"})
_EXTENSION_HEADERS = {Line.V1: "A2A-Extensions", Line.V03: "X-A2A-Extensions"}


@dataclass(frozen=True, slots=True)
class Stream:
    """A stream of whole, encoded server-sent events, and the event to break it off with."""

    frames: AsyncGenerator[bytes, None]
    error_frame: Callable[[ServiceError], bytes]
    headers: Mapping[str, str]


Serve = Callable[[Stream], ASGIApp]
"""Makes a response of a stream; the edge knows how."""


@dataclass(frozen=True, slots=True)
class Terms:
    """What a binding is configured with."""

    default: Line
    """The line of a request that names none."""
    serve: Serve
    announced: tuple[Announcement, ...] = ()
    spoken: tuple[Line, ...] = EVERY


def caller_of(request: Request) -> Caller:
    caller: Caller = request.scope[SCOPE_KEY]
    return caller


def line_of(request: Request, terms: Terms) -> Line:
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


def headers_of(line: Line) -> dict[str, str]:
    return {HEADER: line.value}


def success_headers(
    request: Request, line: Line, announced: tuple[Announcement, ...]
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


async def framed(
    feed: Feed, error_frame: Callable[[ServiceError], bytes], wrap: Callable[[bytes], bytes]
) -> AsyncGenerator[bytes, None]:
    """Write events as frames, a batch at once; an error becomes the last frame."""
    try:
        async for events in feed.batches:
            yield b"".join(b"id: %b\ndata: %b\n\n" % (at, wrap(body)) for at, body in events)
    except ServiceError as error:
        yield error_frame(error)
    finally:
        await feed.batches.aclose()
