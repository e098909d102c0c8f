"""HTTP+JSON: the routes of 1.0 at the root, those of 0.3 under ``/v1``.

``app`` mounts them. A route belongs to one line; a request that speaks another is told which
header to send. Bodies of 0.3 come in two spellings, and are answered in the one they came in.
"""

from collections.abc import Awaitable, Callable, Mapping
from http import HTTPStatus

import orjson
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp, Scope

from opencode_a2a.a2a.errors import rest_error, rest_error_frame, rpc_error
from opencode_a2a.a2a.schema import rest_dialect
from opencode_a2a.a2a.versions import DEFAULT_LINE, HEADER, Dialect, Version, negotiate, require
from opencode_a2a.errors import (
    InvalidRequestError,
    ServiceError,
    VersionNotSupportedError,
)
from opencode_a2a.events import Json, JsonObject
from opencode_a2a.jsonguard import decode
from opencode_a2a.server.card import Cards
from opencode_a2a.server.exchange import (
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
from opencode_a2a.server.operations import METHODS, Call, Feed, Operations, Run

_MEDIA_TYPES = {Version.V1: "application/a2a+json", Version.V03: "application/json"}
_FLAGS: dict[str, Json] = {"true": True, "false": False}
_KINDS = {"task": "task", "status-update": "statusUpdate", "artifact-update": "artifactUpdate"}

Params = Callable[[Request], Awaitable[JsonObject]]


async def _body(request: Request) -> JsonObject:
    check_content_type(request)
    match decode(await request.body()):
        case dict() as sent:
            return sent
        case _:
            raise InvalidRequestError("The body must be a JSON object")


async def _query(request: Request) -> JsonObject:
    """Return query and path parameters as one object, flags as flags."""
    query: JsonObject = dict(request.query_params.items())
    for name in ("includeArtifacts", "include_artifacts"):
        given = query.get(name)
        if isinstance(given, str):
            query[name] = _FLAGS.get(given, given)
    return query | request.path_params


# Paths below the root of a line, their verbs, and what they do.
ROUTES: tuple[tuple[str, tuple[str, ...], Run, Params], ...] = (
    ("/message:send", ("POST",), Operations.send, _body),
    ("/message:stream", ("POST",), Operations.stream, _body),
    ("/tasks", ("GET",), Operations.list_tasks, _query),
    ("/tasks/{id}:cancel", ("POST",), Operations.cancel, _query),
    ("/tasks/{id}:subscribe", ("GET", "POST"), Operations.subscribe, _query),
    ("/tasks/{id}", ("GET",), Operations.get, _query),
    ("/tasks/{id}/pushNotificationConfigs", ("GET", "POST"), Operations.push, _query),
    ("/tasks/{id}/pushNotificationConfigs/{config}", ("GET", "DELETE"), Operations.push, _query),
)
CARDS = (
    ("/extendedAgentCard", Version.V1),
    ("/v1/card", Version.V03),
    ("/agent/authenticatedExtendedCard", Version.V03),
)


_OPERATIONS = {method.run: method.v1 for method in METHODS if method.run is not Operations.push}
"""What the access log calls a route; the four operations of push notifications share one."""
RPC_PATH = "/"
PREFIXES = {Version.V1: "", Version.V03: "/v1"}


class RestBinding:
    def __init__(self, operations: Operations, cards: Cards, terms: Terms) -> None:
        self._operations = operations
        self._cards = cards
        self._terms = terms

    def routes(self) -> list[BaseRoute]:
        routes: list[BaseRoute] = [
            Route(path, self._card(line), methods=["GET"]) for path, line in CARDS
        ]
        for line, prefix in PREFIXES.items():
            for path, verbs, run, params in ROUTES:
                endpoint = Endpoint(self._endpoint(line, run, params))
                routes.append(Route(prefix + path, endpoint, methods=[*verbs], name=path))
        return routes

    def _endpoint(
        self, line: Version, run: Run, params: Params
    ) -> Callable[[Request], Awaitable[ASGIApp]]:
        async def endpoint(request: Request) -> ASGIApp:
            try:
                return await self._answer(request, line, run, params)
            except HTTPException:
                raise
            except Exception as error:
                return _refused(as_service_error(error, request.url.path), line)

        return endpoint

    async def _answer(self, request: Request, line: Version, run: Run, read: Params) -> ASGIApp:
        if operation := _OPERATIONS.get(run):
            request.scope[OPERATION] = operation
        self._require(request, line)
        _refuse_verbs(request)
        params = await read(request)
        dialect = _dialect(line, params)
        call = Call(caller_of(request), dialect, params, cursor_of(request), hops_of(request))
        result = await run(self._operations, call)
        headers = success_headers(request, line, self._terms.announced)
        if isinstance(result, Feed):
            return self._terms.serve(_stream(result, dialect, headers))
        if run is Operations.send and dialect is Dialect.V03:
            result = {"task": result}
        return _json(result, line, headers)

    def _card(self, line: Version) -> Callable[[Request], Awaitable[Response]]:
        async def endpoint(request: Request) -> Response:
            request.scope[OPERATION] = "GetExtendedAgentCard"
            try:
                self._require(request, line)
            except ServiceError as error:
                return _refused(error, line)
            return self._cards.respond_extended(request, line)

        return endpoint

    def _require(self, request: Request, line: Version) -> None:
        what = f"The route {request.method} {request.url.path[:200]}"
        require(line, line_of(request, self._terms), what, self._terms.spoken)


def _dialect(line: Version, params: JsonObject) -> Dialect:
    return Dialect.V1 if line is Version.V1 else rest_dialect(params)


def _refuse_verbs(request: Request) -> None:
    """Tell a read of ``…:cancel`` from the read of a task with such a name."""
    if request.method != "POST" and request.path_params.get("id", "").endswith(":cancel"):
        raise HTTPException(HTTPStatus.METHOD_NOT_ALLOWED, headers={"Allow": "POST"})


def _stream(feed: Feed, dialect: Dialect, headers: dict[str, str]) -> Stream:
    def error_frame(error: ServiceError) -> bytes:
        return rest_error_frame(error, dialect.line)

    wrap = _by_kind if dialect is Dialect.V03 else bytes
    return Stream(framed(feed, error_frame, wrap), error_frame, headers)


def _by_kind(body: bytes) -> bytes:
    """Put an object of the 0.3 JSON under the name that a REST stream has for its kind."""
    kind = body[9 : body.index(b'"', 9)].decode()
    return b'{"%b":%b}' % (_KINDS[kind].encode(), body)


def _json(body: Json, line: Version, headers: Mapping[str, str], status: int = 200) -> Response:
    return Response(
        orjson.dumps(body), status_code=status, headers=headers, media_type=_MEDIA_TYPES[line]
    )


def _refused(error: ServiceError, line: Version) -> Response:
    return _json(rest_error(error, line), line, headers_of(line), error.http)


def refused(error: ServiceError, scope: Scope) -> Response:
    """Refuse what reaches no method and no route, in the form of the version and binding called."""
    path: str = scope["path"]
    if path == RPC_PATH:
        line = _asked(scope)
        body = orjson.dumps(rpc_error(error, None, line))
        return Response(body, error.http, headers_of(line), "application/json")
    old = path.startswith(f"{PREFIXES[Version.V03]}/") or (path, Version.V03) in CARDS
    return _refused(error, Version.V03 if old else Version.V1)


def _asked(scope: Scope) -> Version:
    """Return the version that a request asks for; the default one if that is not one of ours."""
    request, default = Request(scope), scope.get(DEFAULT_LINE, Version.V03)
    try:
        return negotiate(request.headers.get(HEADER), request.query_params.get(HEADER), default)
    except VersionNotSupportedError:
        return default
