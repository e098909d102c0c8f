"""JSON-RPC: one URL for the core methods of both lines and for all extension methods.

``app`` mounts it at ``POST /``. Errors are answers with HTTP status 200, as JSON-RPC over HTTP
has it; a call without id is executed and answered with 204 and nothing. An error of a 0.3 method
that streams is a stream of one event: clients of 0.3 read nothing else there.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import orjson
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from opencode_a2a.a2a.errors import RpcId, rpc_error, rpc_error_frame
from opencode_a2a.a2a.versions import Dialect, Version, require
from opencode_a2a.callers import Caller
from opencode_a2a.errors import (
    InvalidParamsError,
    InvalidRequestError,
    MethodNotFoundError,
    ServiceError,
    VersionNotSupportedError,
    Violation,
)
from opencode_a2a.events import Json, JsonObject
from opencode_a2a.jsonguard import decode
from opencode_a2a.server.exchange import (
    EVENT_STREAM,
    OPERATION,
    Endpoint,
    Stream,
    Terms,
    as_service_error,
    caller_of,
    check_content_type,
    cursor_of,
    framed,
    headers_of,
    hops_of,
    line_of,
    success_headers,
)
from opencode_a2a.server.operations import METHODS, Call, Feed, Method, Operations


class ExtensionMethods(Protocol):
    """Methods beyond A2A."""

    @property
    def names(self) -> Iterable[str]: ...

    @property
    def disabled(self) -> Mapping[str, Mapping[str, str]]:
        """Methods that are declared but switched off: by which setting, and why."""
        ...

    async def call(
        self, caller: Caller, method: str, params: JsonObject, line: Version, /
    ) -> Json: ...


@dataclass(frozen=True, slots=True)
class _Envelope:
    method: str
    params: Json
    id: RpcId
    notification: bool


_CORE = {
    name: (method, line) for method in METHODS for line in Version if (name := method.name(line))
}
_STREAMS03 = frozenset(
    method.v03 for method in METHODS if method.run in (Operations.stream, Operations.subscribe)
)
_DIALECTS = {Version.V1: Dialect.V1, Version.V03: Dialect.V03}


class RpcBinding:
    def __init__(
        self, operations: Operations, terms: Terms, extensions: Sequence[ExtensionMethods] = ()
    ) -> None:
        self._operations = operations
        self._terms = terms
        self._extensions = {name: methods for methods in extensions for name in methods.names}
        self._disabled = {name: why for one in extensions for name, why in one.disabled.items()}

    def route(self) -> Route:
        return Route("/", Endpoint(self.answer), methods=["POST"], name="rpc")

    async def answer(self, request: Request) -> ASGIApp:
        """Answer one request; the outermost edge of the binding, where nothing may escape."""
        envelope, request_id = None, None
        try:
            check_content_type(request)
            sent = decode(await request.body())
            request_id = _readable_id(sent)
            envelope = _read(sent)
            line = line_of(request, self._terms)
            result = await self._call(request, envelope, line)
        except Exception as error:
            told = as_service_error(error, envelope.method if envelope else "JSON-RPC")
            return self._refuse(request, envelope, request_id, told)
        return self._respond(request, envelope, result, line)

    def _refuse(
        self,
        request: Request,
        envelope: _Envelope | None,
        request_id: RpcId,
        error: ServiceError,
    ) -> Response:
        """Answer in the shape of the method's line: whoever sent the wrong header speaks it."""
        if envelope and envelope.method in _CORE:
            line = _CORE[envelope.method][1]
        else:
            line = _line_or_default(request, self._terms)
        if envelope and envelope.notification:
            return Response(status_code=204, headers=headers_of(line))
        if envelope and envelope.method in _STREAMS03:
            frame = rpc_error_frame(error, request_id, line)
            return Response(frame, headers=headers_of(line) | EVENT_STREAM)
        return _json(rpc_error(error, request_id, line), headers_of(line))

    async def _call(self, request: Request, envelope: _Envelope, line: Version) -> Json | Feed:
        name, params = envelope.method, _params(envelope)
        if name in self._extensions:
            request.scope[OPERATION] = name
            return await self._extensions[name].call(caller_of(request), name, params, line)
        if name not in _CORE:
            raise self._unknown(name, line)
        method, needed = _CORE[name]
        request.scope[OPERATION] = method.v1
        require(needed, line, f"The method {name}", self._terms.spoken)
        cursor, hops = cursor_of(request), hops_of(request)
        call = Call(caller_of(request), _DIALECTS[line], params, cursor, hops)
        return await _run(self._operations, method, call, envelope.notification)

    def _unknown(self, name: str, line: Version) -> MethodNotFoundError:
        core = [known for method in METHODS if (known := method.name(line))]
        off = self._disabled.get(name)
        text = f"There is no method {name[:128]}"
        return MethodNotFoundError(
            text if off is None else f"{text} here: {off['reason']} ({off['toggle']})",
            method=name[:128],
            supported_methods=[*core, *sorted(self._extensions)],
            protocol_version=line.value,
            conditional=None if off is None else True,
            toggle=off["toggle"] if off else None,
            disabled=off["reason"] if off else None,
        )

    def _respond(
        self, request: Request, envelope: _Envelope, result: Json | Feed, line: Version
    ) -> ASGIApp:
        if envelope.notification:
            return Response(status_code=204, headers=headers_of(line))
        headers = success_headers(request, line, self._terms.announced)
        if not isinstance(result, Feed):
            body: JsonObject = {"jsonrpc": "2.0", "id": envelope.id, "result": result}
            return _json(body, headers)
        return self._terms.serve(_stream(result, envelope.id, line, headers))


async def _run(
    operations: Operations, method: Method, call: Call, notification: bool
) -> Json | Feed:
    run = method.notified if notification and method.notified else method.run
    return await run(operations, call)


def _line_or_default(request: Request, terms: Terms) -> Version:
    try:
        return line_of(request, terms)
    except VersionNotSupportedError:
        return terms.default


def _stream(feed: Feed, request_id: RpcId, line: Version, headers: dict[str, str]) -> Stream:
    head = b'{"jsonrpc":"2.0","id":%b,"result":' % orjson.dumps(request_id)

    def wrap(body: bytes) -> bytes:
        return head + body + b"}"

    def error_frame(error: ServiceError) -> bytes:
        return rpc_error_frame(error, request_id, line)

    return Stream(framed(feed, error_frame, wrap), error_frame, headers)


def _json(body: JsonObject, headers: dict[str, str]) -> Response:
    return Response(orjson.dumps(body), headers=headers, media_type="application/json")


# --- the envelope -----------------------------------------------------------------------------


def _readable_id(sent: Json) -> RpcId:
    """Return the id of what may not be a request: whoever sent it can tell what was refused."""
    match sent:
        case {"id": str() | int() as request_id} if not isinstance(request_id, bool):
            return request_id
        case _:
            return None


def _read(sent: Json) -> _Envelope:
    match sent:
        case list():
            raise InvalidRequestError("Batches are not supported; send one request at a time")
        case dict():
            return _envelope(sent)
        case _:
            raise InvalidRequestError


def _envelope(sent: JsonObject) -> _Envelope:
    method, request_id = sent.get("method"), sent.get("id")
    wrong = list(_violations(sent))
    if wrong or not isinstance(method, str) or not isinstance(request_id, str | int | None):
        text = "; ".join(f"{v.field} {v.description}" for v in wrong)
        raise InvalidRequestError(
            f"The body is not a JSON-RPC request: {text}", violations=tuple(wrong)
        )
    return _Envelope(method, sent.get("params"), request_id, "id" not in sent)


def _params(envelope: _Envelope) -> JsonObject:
    match envelope.params:
        case None:
            return {}
        case dict() as params:
            return params
        case _:
            wrong = Violation("params", "must be an object")
            raise InvalidParamsError("params must be an object", violations=(wrong,))


def _violations(sent: JsonObject) -> Iterator[Violation]:
    for field in ("message", "configuration"):
        if field in sent:
            yield Violation(field, "belongs to HTTP+JSON; here it goes into params of a request")
    if sent.get("jsonrpc") != "2.0":
        yield Violation("jsonrpc", 'must be "2.0"')
    if not isinstance(sent.get("method"), str):
        yield Violation("method", "must be a string")
    request_id = sent.get("id")
    if isinstance(request_id, bool) or not isinstance(request_id, str | int | None):
        yield Violation("id", "must be a string, an integer or null")
