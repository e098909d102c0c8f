"""Small answers of the edge: refusals and pages.

Every guard refuses through ``refuse``, which answers in the form of the version and binding that
was called; ``server`` knows those.
"""

from dataclasses import dataclass
from http import HTTPStatus

from starlette.types import Scope, Send

from opencode_a2a.errors import ServiceError
from opencode_a2a.server.rest import refused

Header = tuple[bytes, bytes]

_CLOSE: Header = (b"connection", b"close")
_NEVER_CACHED: Header = (b"cache-control", b"no-store")


DIRECT_SEND = "direct_send"
"""In the scope: the server's own ``send``. What comes between looks at the start of an answer only,
so that the frames of a stream may go past it."""
WRITE_NOW = "write_now"
"""In the scope: writes a piece of an answer in pieces without waiting; False when it has to wait.
To wake the task of a stream for each frame takes longer than to write the frame."""


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a request goes no further."""

    error: ServiceError
    headers: tuple[Header, ...] = ()


async def refuse(scope: Scope, send: Send, refusal: Refusal) -> None:
    """Answer with a refusal; a socket of another kind is closed."""
    error = refusal.error
    if scope["type"] == "websocket":
        await send({"type": "websocket.close", "code": 1008, "reason": error.reason})
        return
    response = refused(error, scope)
    headers = (*response.raw_headers, _NEVER_CACHED, *refusal.headers)
    await send({"type": "http.response.start", "status": error.http, "headers": headers})
    await send({"type": "http.response.body", "body": response.body})


def closing(refusal: Refusal) -> Refusal:
    """Return the refusal for a request whose body nobody will read."""
    return Refusal(refusal.error, (*refusal.headers, _CLOSE))


async def answer(
    send: Send, status: int, body: bytes, media_type: bytes, headers: tuple[Header, ...] = ()
) -> None:
    """Send a whole response; what the edge says about the moment is never cached."""
    start = [
        (b"content-type", media_type),
        (b"content-length", str(len(body)).encode()),
        _NEVER_CACHED,
        *headers,
    ]
    await send({"type": "http.response.start", "status": int(HTTPStatus(status)), "headers": start})
    await send({"type": "http.response.body", "body": body})


def header(scope: Scope, name: bytes) -> str | None:
    """Return the first value of a header, or None."""
    for key, value in scope["headers"]:
        if key == name:
            return value.decode("latin-1")
    return None


def headers_of(scope: Scope, name: bytes) -> list[bytes]:
    """Return all values of a header."""
    return [value for key, value in scope["headers"] if key == name]
