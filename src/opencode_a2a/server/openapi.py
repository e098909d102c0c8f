"""The OpenAPI document; the console has a page that shows it.

It is made from the operations of A2A and the declared methods on the first request, and kept. It
needs a credential, like everything that is not discovery.
"""

from collections.abc import Callable, Mapping
from functools import lru_cache

import orjson
from pydantic.json_schema import models_json_schema
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import BaseRoute, Route

from opencode_a2a.a2a import render, types, v03
from opencode_a2a.a2a.operations import (
    CARD_PATHS,
    GET_TASK,
    PREFIXES,
    ROUTES,
    SEND_MESSAGE,
    Operation,
)
from opencode_a2a.a2a.types import (
    VERSION_HEADER,
    NoParams,
    Params,
    PushListParams,
    PushRef,
    PushRequest,
    SendRequest,
    TaskParams,
    Version,
)
from opencode_a2a.a2a.v03 import Spelling
from opencode_a2a.config import Settings
from opencode_a2a.errors import Missing
from opencode_a2a.events import Json, JsonObject
from opencode_a2a.extensions import METHODS
from opencode_a2a.extensions.interrupts import permission_replies
from opencode_a2a.extensions.params import OfSession, PublishedSchema, schema_name
from opencode_a2a.log.state import Query
from opencode_a2a.messages import Part
from opencode_a2a.server.contracts import (
    CARD_PATH,
    CATALOG_PATH,
    EARLIER_CARD_PATH,
    HEALTH_PATH,
    LIVE_PATH,
    METRICS_PATH,
    PING_PATH,
    PROBES,
    READY_PATH,
    RESOURCE_PATH,
    core_methods,
    declared,
    discovery,
    offered,
    security_requirements,
    security_schemes,
    spoken_versions,
)
from opencode_a2a.signing import JWKS_PATH

_REF = "#/components/schemas/"
_JSON = "application/json"
DOCS_PATH = "/docs"
_CACHE = {"cache-control": "private, max-age=300"}


def openapi_routes(
    settings: Settings, missing: Callable[[], Missing] = frozenset
) -> list[BaseRoute]:
    """Return the routes of the document; ``missing`` is what OpenCode cannot do."""

    @lru_cache(maxsize=1)
    def encoded(missing: Missing) -> bytes:
        return orjson.dumps(_openapi(settings, missing))

    async def document(_: Request) -> Response:
        return Response(encoded(missing()), media_type=_JSON, headers=_CACHE)

    async def page(_: Request) -> Response:
        return RedirectResponse("console#/docs")

    return [
        Route("/openapi.json", document, methods=["GET"]),
        Route(DOCS_PATH, page, methods=["GET"]),
    ]


def _openapi(settings: Settings, missing: Missing) -> JsonObject:
    schemes, versions = security_schemes(settings), spoken_versions(settings)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": settings.a2a.title,
            "version": settings.a2a.version,
            "description": f"A2A {' and '.join(versions)} over JSON-RPC and HTTP+JSON, "
            "and the methods of OpenCode. Everything but discovery, /livez, /readyz and the "
            "page of the console, which signs in by itself, needs the credential, this document "
            "too.",
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        },
        "servers": [{"url": settings.public_url}],
        "security": [
            {name: [*scopes] for name, scopes in way.items()}
            for way in security_requirements(settings)
        ],
        "paths": {
            "/": {"post": _rpc(settings, missing)},
            **{
                (at := PREFIXES[version] + path): {
                    verb.lower(): _operation(operation, version, verb, at)
                    for verb, operation in verbs.items()
                }
                for version in versions
                for path, verbs in ROUTES.items()
                if any(operation in offered(settings) for operation in verbs.values())
            },
            **_documents(settings),
        },
        "components": {
            "schemas": _schemas(settings),
            "parameters": {
                "version": {
                    "name": VERSION_HEADER,
                    "in": "header",
                    "required": False,
                    "description": "The version of A2A; when left out, that of the method or path, "
                    f"and {settings.a2a.protocol_version} for methods of both.",
                    "schema": {"type": "string", "enum": [*versions]},
                }
            },
            "securitySchemes": {name: one.v03 for name, one in schemes.items()},
        },
    }


def _ref(name: str) -> JsonObject:
    return {"$ref": f"{_REF}{name}"}


def _content(name: str) -> JsonObject:
    return {_JSON: {"schema": _ref(name)}}


_VERSION: JsonObject = {"$ref": "#/components/parameters/version"}
_OBJECT: JsonObject = {_JSON: {"schema": {"type": "object"}}}
_KEYS: JsonObject = {"application/jwk-set+json": {"schema": {"type": "object"}}}
_CATALOG: JsonObject = {"application/ai-catalog+json": {"schema": {"type": "object"}}}
_EVENTS: JsonObject = {"text/event-stream": {"schema": {"type": "string"}}}
_ERROR: JsonObject = {
    "description": "The request cannot be taken as it is",
    "content": _content("Error"),
}
_REFUSALS: JsonObject = {
    "401": {"description": "No valid credential"},
    "429": {"description": "Too many requests"},
}


# --- JSON-RPC ---------------------------------------------------------------------------------


def _rpc(settings: Settings, missing: Missing) -> JsonObject:
    """Return the one operation of JSON-RPC, whose body is a request for any method."""
    core = core_methods(settings)
    methods = [method for method in METHODS if method.off(settings, missing) is None]
    listed = [f"- `{name}`" for name in core]
    listed += [f"- `{method.name}` ({method.access}): {method.summary}" for method in methods]
    examples: dict[str, tuple[str, JsonObject]] = {
        name: (f"A2A {version}: send a message", _send_example(version))
        for version in spoken_versions(settings)
        if (name := SEND_MESSAGE.named(version))
    }
    examples |= {method.name: (method.summary, method.example) for method in methods}
    contracts: JsonObject = {
        extension.key: {
            "uri": extension.uri,
            **extension.public_params(settings, missing),
            **extension.extended_params(settings, missing),
        }
        for extension in declared(missing)
    }
    return {
        "operationId": "jsonrpc",
        "summary": "JSON-RPC 2.0: all methods of A2A and of the extensions",
        "description": "One request in, one answer or a stream of events out. Errors have HTTP "
        "status 200; a request without id is answered with 204.\n\n" + "\n".join(listed),
        "parameters": [_VERSION],
        "requestBody": {
            "required": True,
            "content": {
                _JSON: {
                    "schema": {
                        "oneOf": [
                            _ref(_request_name(name))
                            for name in (*core, *(method.name for method in methods))
                        ]
                    },
                    "examples": {
                        name: {
                            "summary": summary,
                            "value": {"jsonrpc": "2.0", "id": 1, "method": name, "params": params},
                        }
                        for name, (summary, params) in examples.items()
                    },
                }
            },
        },
        "responses": {
            "200": {
                "description": "The result, the error, or a stream of results",
                "content": _content("JsonRpcResponse") | _EVENTS,
            },
            "204": {"description": "Nothing: the request had no id"},
            **_REFUSALS,
        },
        "x-a2a-extension-contracts": contracts,
    }


def _request_name(method: str) -> str:
    return "Request." + method.replace("/", ".")


# --- HTTP+JSON --------------------------------------------------------------------------------


def _operation(operation: Operation, version: Version, verb: str, path: str) -> JsonObject:
    names = [part[1:-1] for part in path.replace(":", "/").split("/") if part.startswith("{")]
    query: Mapping[str, Json] = {}
    if operation.takes is Query:
        query = _LISTING
    elif operation is GET_TASK:
        query = {"historyLength": _LISTING["historyLength"]}
    answer: JsonObject = {"description": "Events", "content": _EVENTS}
    if not operation.streams:
        name = "A2ATask" if operation.returns == "Task" else operation.returns
        if version is Version.V03 and f"{name}03" in _BASIC:
            name += "03"
        answer = {"description": "The answer", "content": _content(name)}
    described: JsonObject = {
        "operationId": f"{verb.lower()}_{path}_{version}",
        "summary": f"A2A {version}: {verb} {path}",
        "parameters": [
            *({"name": n, "in": "path", "required": True, "schema": _TEXT} for n in names),
            _VERSION,
            *({"name": n, "in": "query", "schema": schema} for n, schema in query.items()),
        ],
        "responses": {"200": answer, "4XX": _ERROR, **_REFUSALS},
    }
    if operation.takes is SendRequest:
        file = Part("raw", raw="aGVsbG8K", media_type="text/plain", filename="a.txt")
        examples: dict[str, JsonObject] = {
            "basic_message": _send_example(version),
            "message_with_file_input": {
                "message": _message(version, "m-2", Part("text", text="what does it say?"), file)
            },
            "continue_session": _send_example(
                version, shared={"session": {"id": OfSession.example["session_id"]}}
            ),
            "message_with_model_override": _send_example(
                version, shared={"model": {"providerID": "demo", "modelID": "demo"}}
            ),
        }
        forms = ["SendMessage"]
        if version is Version.V03:  # its bodies have two spellings, and both are declared
            forms = ["SendMessage03Proto", "SendMessage03"]
        schema: JsonObject = {"anyOf": [_ref(form) for form in forms]}
        named: JsonObject = {name: {"value": value} for name, value in examples.items()}
        content: JsonObject = {_JSON: {"schema": schema, "examples": named}}
        described["requestBody"] = {"required": True, "content": content}
    elif operation.takes is PushRequest:
        form = "PushConfigBody" if version is Version.V1 else "PushConfigBody03"
        described["requestBody"] = {"required": True, "content": _content(form)}
    return described


def _send_example(version: Version, **metadata: Json) -> JsonObject:
    message = _message(version, "m-1", Part("text", text="list the files here"))
    if version is Version.V03:
        message["kind"] = "message"
    return {"message": message, **({"metadata": metadata} if metadata else {})}


def _message(version: Version, message_id: str, *parts: Part) -> JsonObject:
    role, rendered = "ROLE_USER", [render.part(part) for part in parts]
    if version is Version.V03:
        role, rendered = "user", [v03.part(part, Spelling.JSON) for part in rendered]
    return {"messageId": message_id, "role": role, "parts": [*rendered]}


def _reading(name: str, summary: str, responses: JsonObject, **rest: Json) -> JsonObject:
    return {"get": {"operationId": name, "summary": summary, "responses": responses, **rest}}


def _documents(settings: Settings) -> JsonObject:
    """Return the paths of cards, of discovery, and of the pages about the service."""
    card: JsonObject = {"description": "The card", "content": _content("Card")}
    found: JsonObject = {"200": card, "304": {"description": "Not changed"}}
    paths: JsonObject = {
        path: _reading(
            f"card_{path}",
            f"A2A {version}: the extended card",
            {**found, "4XX": _ERROR},
            parameters=[_VERSION],
        )
        for path, version in CARD_PATHS
        if version in spoken_versions(settings)
    }
    opened: dict[str, tuple[str, str, JsonObject]] = {
        CARD_PATH: (f"card_{CARD_PATH}", "The public card", found),
        EARLIER_CARD_PATH: (f"card_{EARLIER_CARD_PATH}", "The public card", found),
        CATALOG_PATH: (
            "catalog",
            "The AI Catalog: where the card is",
            {"200": {"description": "The catalog", "content": _CATALOG}},
        ),
        RESOURCE_PATH: (
            "protected_resource",
            "Who gives tokens for this service (RFC 9728)",
            {"200": {"description": "The metadata", "content": _OBJECT}},
        ),
        JWKS_PATH: (
            "jwks",
            "The public keys that cards and notifications are signed with",
            {"200": {"description": "The keys", "content": _KEYS}},
        ),
    }
    paths |= {path: _reading(*opened[path], security=[]) for path in discovery(settings)}
    pages = {
        LIVE_PATH: "Whether the process lives",
        READY_PATH: "Whether database and OpenCode can be used",
        PING_PATH: "Whether a task works or waits for somebody, as some platforms ask",
        HEALTH_PATH: "What runs here",
        "/openapi.json": "This document",
        DOCS_PATH: "This document as a page of the console",
    }
    if settings.a2a.metrics_enabled:
        pages[METRICS_PATH] = "Figures for Prometheus"
    for path, summary in pages.items():
        responses: JsonObject = {"200": {"description": summary}}
        if path == DOCS_PATH:
            responses = {"307": {"description": "The address of the page"}}
        if path == READY_PATH:
            responses["503"] = {"description": "Not now"}
        if path in PROBES:
            paths[path] = _reading(path, summary, responses, security=[])
        else:
            paths[path] = _reading(path, summary, responses | _REFUSALS)
    return paths


# --- schemas ----------------------------------------------------------------------------------

_DECLARED: tuple[tuple[str, Version, type[Params], str | None], ...] = (
    ("SendMessage", Version.V1, types.SEND_PARAMS, "ROLE_USER"),
    ("SendMessage03", Version.V03, v03.SEND_PARAMS[Spelling.JSON], "user"),
    ("SendMessage03Proto", Version.V03, v03.SEND_PARAMS[Spelling.PROTO], "ROLE_USER"),
    ("PushConfigParams", Version.V1, types.PUSH_PARAMS, None),
    ("PushConfigBody", Version.V1, types.PUSH_BODY, None),
    ("PushRefParams", Version.V1, types.PushRefParams, None),
    ("PushListParams", Version.V1, types.PushListParams, None),
    ("PushConfigParams03", Version.V03, v03.PUSH_PARAMS, None),
    ("PushConfigBody03", Version.V03, v03.PUSH_BODY, None),
    ("PushRefParams03", Version.V03, v03.PushRefParams03, None),
)
"""The params of A2A: name of the schema, version, model, and the role that a caller may have."""
_PARAMS: dict[tuple[type, Version], str | None] = {
    (SendRequest, Version.V1): "SendMessage",
    (SendRequest, Version.V03): "SendMessage03",
    (PushRequest, Version.V1): "PushConfigParams",
    (PushRequest, Version.V03): "PushConfigParams03",
    (PushRef, Version.V1): "PushRefParams",
    (PushRef, Version.V03): "PushRefParams03",
    (PushListParams, Version.V1): "PushListParams",
    (PushListParams, Version.V03): "TaskParams",
    **dict.fromkeys([(Query, version) for version in Version], "ListTasksParams"),
    **dict.fromkeys([(TaskParams, version) for version in Version], "TaskParams"),
    **dict.fromkeys([(NoParams, version) for version in Version]),
}
"""The name of the schema of an operation's params, by their type; None accepts anything."""


def _schemas(settings: Settings) -> JsonObject:
    versions = spoken_versions(settings)
    schemas = _method_schemas(settings) | _BASIC
    for name, version, model, role in _DECLARED:
        if version not in versions:
            continue
        made = model.model_json_schema(ref_template=f"{_REF}{name}.{{model}}")
        # Published names do not have the underscore of models that are private to their module.
        own = orjson.loads(orjson.dumps(made).replace(f"{name}._".encode(), f"{name}.".encode()))
        parts = own.pop("$defs", {})
        schemas[name] = own | {"title": name}
        for private, schema in parts.items():
            inner = f"{name}.{private.removeprefix('_')}"
            schemas[inner] = schema | {"title": inner}
            if role and "role" in schema["properties"]:
                schema["properties"]["role"] = {"type": "string", "enum": [role]}
    for version in versions:
        for operation in offered(settings):
            if name := operation.named(version):
                params = _PARAMS[operation.takes, version]
                schemas[_request_name(name)] = _request(name, _ref(params) if params else _FREE)
    for method in METHODS:
        request = _request(method.name, _ref(schema_name(method.params)))
        request["description"] = method.summary
        request["x-result"] = _ref(schema_name(method.result))
        schemas[_request_name(method.name)] = request
    return schemas


def _method_schemas(settings: Settings) -> JsonObject:
    """Return the schemas of the params and results of all extension methods, by title."""
    template = _REF + "{model}"
    _, params = models_json_schema(
        [(m.params, "validation") for m in METHODS], ref_template=template
    )
    _, results = models_json_schema(
        [(method.result, "serialization") for method in METHODS],
        by_alias=False,  # results are in our spelling, even where they hold OpenCode's types
        ref_template=template,
        schema_generator=PublishedSchema,
    )
    generated = {**params["$defs"], **results["$defs"]}
    generated["PermissionParams"]["properties"]["reply"]["enum"] = permission_replies(settings)
    text = orjson.dumps(generated).decode()
    for name, schema in generated.items():
        text = text.replace(f'"{_REF}{name}"', f'"{_REF}{schema["title"]}"')
    schemas: dict[str, JsonObject] = {one["title"]: one for one in orjson.loads(text).values()}
    return dict(sorted(schemas.items()))


def _request(method: str, params: JsonObject) -> JsonObject:
    return _object(
        ["jsonrpc", "method"],
        jsonrpc={"const": "2.0"},
        id={"type": ["string", "integer"]},
        method={"const": method},
        params=params,
    )


def _object(required: list[Json] | None = None, /, **properties: Json) -> JsonObject:
    needed: JsonObject = {"required": required} if required else {}
    return {"type": "object", "properties": properties, **needed}


_TEXT: JsonObject = {"type": "string"}
_FREE: JsonObject = {"type": "object"}
_LISTING: dict[str, Json] = {
    "historyLength": {"type": "integer", "minimum": 0},
    "pageSize": {"type": "integer", "minimum": 1, "maximum": 100},
    "pageToken": _TEXT,
    "contextId": _TEXT,
    "status": _TEXT,
    "statusTimestampAfter": {"type": "string", "format": "date-time"},
    "includeArtifacts": {"type": "boolean"},
}
_PUSH_CONFIG = _object(
    ["taskId", "id", "url"], taskId=_TEXT, id=_TEXT, url=_TEXT, authentication=_FREE
)
_PUSH_CONFIG03 = _object(
    ["name", "pushNotificationConfig"], name=_TEXT, pushNotificationConfig=_FREE
)
_RPC_ERROR = _object(["code", "message"], code={"type": "integer"}, message=_TEXT, data={})
_BASIC: JsonObject = {
    "JsonRpcResponse": _object(
        ["jsonrpc"], jsonrpc={"const": "2.0"}, id={}, result={}, error=_RPC_ERROR
    ),
    "Error": _FREE,
    "Card": _object(["name", "version", "skills"], name=_TEXT, version=_TEXT),
    "TaskParams": _object(["id"], id=_TEXT, historyLength=_LISTING["historyLength"]),
    "ListTasksParams": _object(**_LISTING | {"statusTimestampAfter": _TEXT}),
    "A2ATask": _object(["id", "contextId", "status"], id=_TEXT, contextId=_TEXT, status=_FREE),
    "TaskPage": _object(["tasks"], tasks={"type": "array", "items": _ref("A2ATask")}),
    "PushConfig": _PUSH_CONFIG,
    "PushConfig03": _PUSH_CONFIG03,
    "PushConfigs": _object(["configs"], configs={"type": "array", "items": _ref("PushConfig")}),
    "PushConfigs03": _object(["configs"], configs={"type": "array", "items": _ref("PushConfig03")}),
    "Nothing": _FREE,
    "SendResponse": _object(task=_ref("A2ATask"), message=_FREE),
}
