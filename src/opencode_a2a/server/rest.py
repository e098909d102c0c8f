"""HTTP+JSON: the routes of 1.0 at the root, those of 0.3 under ``/v1``.

``app`` mounts them. A route belongs to one version; a request for another version is refused with
the header to send. Bodies of 0.3 have two spellings, and are answered in the one they came in.
"""

from collections.abc import Mapping
from functools import partial
from http import HTTPStatus

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp

from opencode_a2a.a2a.encoding import V03_PROTO, V03_REST, V1
from opencode_a2a.a2a.errors import rest_error_frame
from opencode_a2a.a2a.operations import (
    CARD_PATHS,
    GET_EXTENDED_CARD,
    GET_TASK,
    LIST_TASKS,
    PREFIXES,
    ROUTES,
    Operation,
)
from opencode_a2a.a2a.types import Version, negotiate, only_v1
from opencode_a2a.a2a.v03 import Spelling, rest_spelling
from opencode_a2a.errors import (
    InvalidListingError,
    InvalidParamsError,
    InvalidRequestError,
)
from opencode_a2a.events import Json, JsonObject
from opencode_a2a.server.card import Cards
from opencode_a2a.server.http import (
    OPERATION,
    REST_TYPES,
    BindingOptions,
    Endpoint,
    OrjsonResponse,
    as_service_error,
    asked_version,
    call_of,
    event_stream,
    read_body,
    rest_refusal,
    success_headers,
)
from opencode_a2a.server.operations import HANDLERS, Operations, TaskStream

_FLAGS: dict[str, Json] = {"true": True, "false": False}


class RestBinding:
    def __init__(self, operations: Operations, cards: Cards, options: BindingOptions) -> None:
        self._operations = operations
        self._cards = cards
        self._options = options

    def routes(self) -> list[BaseRoute]:
        card = {"GET": GET_EXTENDED_CARD}
        routes: list[BaseRoute] = [
            Route(path, Endpoint(partial(self._respond, version, card)), methods=["GET"])
            for path, version in CARD_PATHS
        ]
        for version, prefix in PREFIXES.items():
            for path, by_verb in ROUTES.items():
                endpoint = Endpoint(partial(self._respond, version, by_verb))
                routes.append(Route(prefix + path, endpoint, methods=[*by_verb], name=path))
        return routes

    async def _respond(
        self, version: Version, by_verb: Mapping[str, Operation], request: Request
    ) -> ASGIApp:
        """Answer one request; the outermost edge of the binding, where nothing may escape."""
        operation = by_verb["GET" if request.method == "HEAD" else request.method]
        request.scope[OPERATION] = operation.name
        try:
            what = f"The route {request.method} {request.scope['path'][:200]}"
            asked, supported = asked_version(request), self._options.supported
            negotiate(asked, self._options.default, supported, belongs=version, what=what)
            if operation is GET_EXTENDED_CARD:  # a document made at the start, with an ETag
                await self._cards.refresh()
                return self._cards.respond_extended(request, version)
            # ``GET /tasks/ID:cancel`` would look like the read of a task with such an id.
            if operation is GET_TASK and request.path_params["id"].endswith(":cancel"):
                raise HTTPException(HTTPStatus.METHOD_NOT_ALLOWED, headers={"Allow": "POST"})
            params: JsonObject
            if operation.body:
                body = await read_body(request)
                if not isinstance(body, dict):
                    raise InvalidRequestError("The body must be a JSON object")
                params = body | request.path_params
            else:
                params = dict(request.query_params.items())
                for name in ("includeArtifacts", "include_artifacts"):
                    given = params.get(name)
                    if isinstance(given, str):
                        params[name] = _FLAGS.get(given, given)
                params |= request.path_params
            if not asked and Version.V1 in supported and only_v1(params):
                version = Version.V1  # some clients of 1.0 have a base URL that ends in /v1
            encoding = V1
            if version is Version.V03:
                json = rest_spelling(params) is Spelling.JSON
                encoding = V03_REST if json else V03_PROTO
            call, run = call_of(request, version, self._options), HANDLERS[operation]
            result = await run(self._operations, call, encoding.read[operation.takes](params))
            headers = success_headers(request, version, self._options)
            if not isinstance(result, TaskStream):
                body = encoding.result(result)
                return OrjsonResponse(body, headers=headers, media_type=REST_TYPES[version])
        except HTTPException:
            raise
        except Exception as raised:
            error = as_service_error(raised, request.url.path)
            if (operation, version, type(error)) == (LIST_TASKS, Version.V03, InvalidParamsError):
                # 0.3 has a reason of its own for invalid params of a list.
                error = InvalidListingError(error.message, violations=error.violations)
            refusal = rest_refusal(error, version)
            refusal.headers.update(dict(error.headers))
            return refusal
        return event_stream(
            self._options, result, encoding, lambda error: rest_error_frame(error, version), headers
        )
