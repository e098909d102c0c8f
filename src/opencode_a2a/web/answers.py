"""Small answers of the edge: refusals and pages.

Every guard refuses through ``refuse``, so that all refusals have one body: the error object of
HTTP+JSON 1.0, which a reader of either line can understand. Errors from behind the edge get
their form in ``protocol``.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from http import HTTPStatus
from urllib.parse import parse_qs

import orjson
from starlette.types import Scope, Send

from opencode_a2a.errors import VersionNotSupportedError
from opencode_a2a.protocol.versions import HEADER, Line, negotiate

Header = tuple[bytes, bytes]

_STATUS = {
    400: "INVALID_ARGUMENT",
    401: "UNAUTHENTICATED",
    403: "PERMISSION_DENIED",
    404: "NOT_FOUND",
    405: "UNIMPLEMENTED",
    408: "DEADLINE_EXCEEDED",
    413: "RESOURCE_EXHAUSTED",
    415: "INVALID_ARGUMENT",
    421: "INVALID_ARGUMENT",
    429: "RESOURCE_EXHAUSTED",
    431: "RESOURCE_EXHAUSTED",
    500: "INTERNAL",
    503: "UNAVAILABLE",
}
_CLOSE: Header = (b"connection", b"close")


DIRECT_SEND = "direct_send"
"""In the scope: the server's own ``send``. What comes between looks at the start of an answer only,
so that the frames of a stream may go past it."""
WRITE_NOW = "write_now"
"""In the scope: writes a piece of an answer in pieces without waiting; False when it has to wait.
To wake the task of a stream for each frame takes longer than to write the frame."""


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a request goes no further, and what would help."""

    http: int
    reason: str
    message: str
    metadata: Mapping[str, str] = field(default_factory=dict[str, str])
    headers: tuple[Header, ...] = ()

    @property
    def body(self) -> bytes:
        info = {
            "@type": "type.googleapis.com/google.rpc.ErrorInfo",
            "reason": self.reason,
            "domain": "a2a-protocol.org",
            "metadata": dict(self.metadata),
        }
        error = {
            "code": self.http,
            "status": _STATUS.get(self.http, "UNKNOWN"),
            "message": self.message,
            "details": [info],
        }
        return orjson.dumps({"error": error})


async def refuse(scope: Scope, send: Send, refusal: Refusal) -> None:
    """Answer with a refusal, in the version asked for; a socket of another kind is closed."""
    if scope["type"] == "websocket":
        await send({"type": "websocket.close", "code": 1008, "reason": refusal.reason})
        return
    headers = (*refusal.headers, *_version(scope))
    await answer(send, refusal.http, refusal.body, b"application/json", headers)


def closing(refusal: Refusal) -> Refusal:
    """Return the refusal for a request whose body nobody will read."""
    headers = (*refusal.headers, _CLOSE)
    return Refusal(refusal.http, refusal.reason, refusal.message, refusal.metadata, headers)


def _version(scope: Scope) -> tuple[Header, ...]:
    """Return the header with the protocol line that a request asked for, if it is one of ours."""
    try:
        query = parse_qs(scope["query_string"].decode("latin-1"), max_num_fields=100)
        line = negotiate(header(scope, b"a2a-version"), query.get(HEADER, [""])[0], Line.V03)
    except (ValueError, VersionNotSupportedError):
        return ()
    return ((b"a2a-version", line.value.encode()),)


async def answer(
    send: Send, status: int, body: bytes, media_type: bytes, headers: tuple[Header, ...] = ()
) -> None:
    """Send a whole response; what the edge says about the moment is never cached."""
    start = [
        (b"content-type", media_type),
        (b"content-length", str(len(body)).encode()),
        (b"cache-control", b"no-store"),
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
