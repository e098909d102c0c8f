"""JSON-RPC: one URL for the core methods of both versions and for all extension methods.

``app`` mounts it at ``POST /``. Errors are answered with HTTP status 200, as is usual for JSON-RPC
over HTTP. A request without an id (a notification) is executed and answered with 204. An error of a
0.3 method that streams is sent as a stream of one event: clients of 0.3 read nothing else there.
"""

from dataclasses import dataclass
from typing import Self

import orjson
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp

from opencode_a2a.a2a.encoding import V03, V1
from opencode_a2a.a2a.errors import RpcId, rpc_error, rpc_error_frame
from opencode_a2a.a2a.operations import CORE_METHODS, OPERATIONS, RPC_PATH
from opencode_a2a.a2a.types import VERSION_HEADER, Version, negotiate, only_v1
from opencode_a2a.errors import (
    InvalidParamsError,
    InvalidRequestError,
    MethodNotFoundError,
    Violation,
)
from opencode_a2a.events import Json
from opencode_a2a.extensions.dispatch import Dispatcher
from opencode_a2a.server.http import (
    OPERATION,
    BindingOptions,
    Endpoint,
    OrjsonResponse,
    as_service_error,
    asked_version,
    call_of,
    event_stream,
    read_body,
    refusal_version,
    success_headers,
)
from opencode_a2a.server.operations import HANDLERS, NOTIFIED, Operations, TaskStream
from opencode_a2a.server.sse import EVENT_STREAM
from opencode_a2a.validation import listed


@dataclass(frozen=True, slots=True)
class _Envelope:
    """A JSON-RPC request; one without an id is a notification."""

    method: str
    params: Json
    id: RpcId
    notification: bool

    @classmethod
    def read(cls, sent: Json) -> Self:
        if isinstance(sent, list):
            raise InvalidRequestError("Batches are not supported; send one request at a time")
        if not isinstance(sent, dict):
            raise InvalidRequestError
        wrong = [
            Violation(field, "belongs to HTTP+JSON; here it goes into params of a request")
            for field in ("message", "configuration")
            if field in sent
        ]
        method, request_id = sent.get("method"), sent.get("id")
        if sent.get("jsonrpc") != "2.0":
            wrong.append(Violation("jsonrpc", 'must be "2.0"'))
        if not isinstance(method, str):
            wrong.append(Violation("method", "must be a string"))
        if isinstance(request_id, bool) or not isinstance(request_id, str | int | None):
            wrong.append(Violation("id", "must be a string, an integer or null"))
        if wrong or not isinstance(method, str) or not isinstance(request_id, str | int | None):
            raise InvalidRequestError(
                f"The body is not a JSON-RPC request: {listed(wrong)}", violations=tuple(wrong)
            )
        return cls(method, sent.get("params"), request_id, "id" not in sent)


_ENCODINGS = {Version.V1: V1, Version.V03: V03}


class RpcBinding:
    def __init__(
        self, operations: Operations, methods: Dispatcher, options: BindingOptions
    ) -> None:
        self._operations = operations
        self._methods = methods
        """The methods beyond A2A."""
        self._options = options

    def routes(self) -> list[BaseRoute]:
        return [Route(RPC_PATH, Endpoint(self._respond), methods=["POST"], name="rpc")]

    async def _respond(self, request: Request) -> ASGIApp:
        """Answer one request; the outermost edge of the binding, where nothing may escape."""
        envelope, request_id = None, None
        default, supported = self._options.default, self._options.supported
        version = refusal_version(request, default, supported)
        try:
            sent = await read_body(request)
            match sent:  # the id is echoed even if the rest is not a valid request
                case {"id": str() | int() as request_id} if not isinstance(request_id, bool):
                    pass
                case _:
                    request_id = None
            envelope = _Envelope.read(sent)
            asked, what = asked_version(request), f"The method {envelope.method[:128]}"
            _, belongs = CORE_METHODS.get(envelope.method, (None, None))
            version = belongs or version  # the one in which a wrong header is refused
            if belongs and not asked and Version.V1 in supported and only_v1(envelope.params):
                belongs = Version.V1
            version = negotiate(asked, default, supported, belongs=belongs, what=what)
            result = await self._run(request, envelope, version)
        except Exception as raised:
            method = envelope.method if envelope else "JSON-RPC"
            error = as_service_error(raised, method)
            operation, _ = CORE_METHODS.get(method, (None, None))
            headers = {VERSION_HEADER: version.value, **dict(error.headers)}
            if envelope and envelope.notification:
                return Response(status_code=204, headers=headers)
            if operation and operation.streams and version is Version.V03:
                frame = rpc_error_frame(error, request_id, version)
                return Response(frame, headers=headers | EVENT_STREAM)
            return OrjsonResponse(rpc_error(error, request_id, version), headers=headers)
        if envelope.notification:
            return Response(status_code=204, headers={VERSION_HEADER: version.value})
        headers = success_headers(request, version, self._options)
        if not isinstance(result, TaskStream):
            body = {"jsonrpc": "2.0", "id": envelope.id, "result": result}
            return OrjsonResponse(body, headers=headers)
        head = b'{"jsonrpc":"2.0","id":%b,"result":' % orjson.dumps(envelope.id)
        return event_stream(
            self._options,
            result,
            _ENCODINGS[version],
            lambda error: rpc_error_frame(error, request_id, version),
            headers,
            head,
            b"}",
        )

    async def _run(
        self, request: Request, envelope: _Envelope, version: Version
    ) -> Json | TaskStream:
        name, params = envelope.method, envelope.params
        if params is None:
            params = {}
        if not isinstance(params, dict):
            raise InvalidParamsError.of("params", "must be an object")
        call = call_of(request, version, self._options)
        if name not in CORE_METHODS:
            if name in self._methods.names:
                request.scope[OPERATION] = name
                return await self._methods.call(call.caller, name, params, version)
            core = [known for one in OPERATIONS if (known := one.named(version))]
            supported: list[Json] = [*core, *sorted(self._methods.names)]
            off = self._methods.disabled.get(name)
            raise MethodNotFoundError.named(name, off, version.value, supported)
        operation, _ = CORE_METHODS[name]
        request.scope[OPERATION] = operation.name
        encoding = _ENCODINGS[version]
        run = (NOTIFIED if envelope.notification else HANDLERS)[operation]
        result = await run(self._operations, call, encoding.read[operation.takes](params))
        return result if isinstance(result, TaskStream) else encoding.result(result)
