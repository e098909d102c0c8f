"""The OpenAPI document, and a page that shows it.

Made from the declared methods and routes on first request and kept. Both are behind the
credential like everything that is not discovery; the page carries the document and needs nothing
else from anywhere.
"""

import html
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path

import orjson
from pydantic.json_schema import models_json_schema
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from opencode_a2a import __version__
from opencode_a2a.a2a import render, types, v03
from opencode_a2a.a2a.operations import CARD_PATHS, OPERATIONS, PREFIXES, ROUTES, Operation
from opencode_a2a.a2a.types import VERSION_HEADER, SendBase, Version
from opencode_a2a.a2a.v03 import Spelling
from opencode_a2a.config import Settings
from opencode_a2a.events import Json, JsonObject
from opencode_a2a.extensions.interrupts import permission_replies
from opencode_a2a.extensions.params import OfSession, PublishedSchema, schema_name
from opencode_a2a.extensions.registry import Method
from opencode_a2a.messages import Part
from opencode_a2a.server.card import DISCOVERY
from opencode_a2a.server.contracts import (
    Contracts,
    core_methods,
    declared,
    enabled,
    schemes,
    spoken,
)

_REF = "#/components/schemas/"
_JSON = "application/json"


class OpenApi:
    """The document of one deployment."""

    def __init__(self, settings: Settings, published: Contracts) -> None:
        self._settings = settings
        self._published = published

    def routes(self) -> list[BaseRoute]:
        return [
            Route("/openapi.json", self._document, methods=["GET"]),
            Route("/docs", self._page, methods=["GET"]),
        ]

    @cached_property
    def _encoded(self) -> bytes:
        return orjson.dumps(_openapi(self._settings, self._published))

    @cached_property
    def _shown(self) -> str:
        page = Path(__file__).with_suffix(".html").read_text()
        # inside a script element, so that no text of the document can end it
        content = self._encoded.decode().replace("<", "\\u003c")
        title = html.escape(self._settings.a2a.title)
        return page.replace("TITLE", title).replace("DOCUMENT", content)

    async def _document(self, request: Request) -> Response:
        return Response(self._encoded, media_type=_JSON, headers=_CACHE)

    async def _page(self, request: Request) -> Response:
        return Response(self._shown, media_type="text/html", headers=_CACHE)


_CACHE = {"cache-control": "private, max-age=300"}


def _openapi(settings: Settings, published: Contracts) -> JsonObject:
    offered = schemes(settings)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": settings.a2a.title,
            "version": settings.a2a.version or __version__,
            "description": f"A2A {' and '.join(spoken(settings))} over JSON-RPC and HTTP+JSON, "
            "and the methods of OpenCode. Everything but discovery, /livez and /readyz needs the "
            "credential, this document too.",
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        },
        "servers": [{"url": settings.public_url}],
        "security": [{f"{scheme}Auth": []} for scheme in offered],
        "paths": {
            "/": {"post": _rpc(settings, published)},
            **_rest(settings),
            **_cards(settings),
            **_pages(settings),
        },
        "components": {
            "schemas": _schemas(settings),
            "parameters": {
                "version": {
                    "name": VERSION_HEADER,
                    "in": "header",
                    "required": False,
                    "description": f"The protocol line; {settings.a2a.protocol_version} when "
                    "left out.",
                    "schema": {"type": "string", "enum": [*spoken(settings)]},
                }
            },
            "securitySchemes": {
                f"{scheme}Auth": {"type": "http", "scheme": scheme} for scheme in offered
            },
        },
    }


def _ref(name: str) -> JsonObject:
    return {"$ref": f"{_REF}{name}"}


def _content(name: str) -> JsonObject:
    return {_JSON: {"schema": _ref(name)}}


_VERSION: JsonObject = {"$ref": "#/components/parameters/version"}
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


def _rpc(settings: Settings, published: Contracts) -> JsonObject:
    methods = enabled(settings)
    core = core_methods(settings)
    names = [*core, *(method.name for method in methods)]
    listed = "\n".join(
        [f"- `{name}`" for name in core]
        + [f"- `{method.name}` ({method.access}): {method.summary}" for method in methods]
    )
    return {
        "operationId": "jsonrpc",
        "summary": "JSON-RPC 2.0: all methods of A2A and of the extensions",
        "description": f"One request in, one answer or a stream of events out. Errors have HTTP "
        f"status 200; a request without id is answered with 204.\n\n{listed}",
        "parameters": [_VERSION],
        "requestBody": {
            "required": True,
            "content": {
                _JSON: {
                    "schema": {"oneOf": [_ref(_request_name(name)) for name in names]},
                    "examples": dict(_rpc_examples(core, methods)),
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
        "x-a2a-extension-contracts": {**published.by_key},
    }


def _rpc_examples(core: list[str], methods: list[Method]) -> Iterator[tuple[str, Json]]:
    for line, name in ((Version.V1, "SendMessage"), (Version.V03, "message/send")):
        if name in core:
            yield name, _rpc_example(name, _send_example(line), f"A2A {line}: send a message")
    for method in methods:
        yield method.name, _rpc_example(method.name, method.example, method.summary)


def _rpc_example(method: str, params: JsonObject, summary: str) -> JsonObject:
    value: JsonObject = {"jsonrpc": "2.0", "id": 1, "method": method, "params": params}
    return {"summary": summary, "value": value}


def _send_example(line: Version, **metadata: Json) -> JsonObject:
    message = _message(line, "m-1", Part("text", text="list the files here"))
    if line is Version.V03:
        message["kind"] = "message"
    return {"message": message, **({"metadata": metadata} if metadata else {})}


def _file_example(line: Version) -> JsonObject:
    file = Part("raw", raw="aGVsbG8K", media_type="text/plain", filename="a.txt")
    return {"message": _message(line, "m-2", Part("text", text="what does it say?"), file)}


def _message(line: Version, message_id: str, *parts: Part) -> JsonObject:
    role, spelled = "ROLE_USER", [render.part(part) for part in parts]
    if line is Version.V03:
        role, spelled = "user", [v03.part(part, Spelling.JSON) for part in spelled]
    return {"messageId": message_id, "role": role, "parts": [*spelled]}


# --- HTTP+JSON --------------------------------------------------------------------------------


def _rest(settings: Settings) -> JsonObject:
    return {
        (at := PREFIXES[line] + path): {verb.lower(): _operation(line, verb, at) for verb in verbs}
        for line in spoken(settings)
        for path, verbs in ROUTES.items()
    }


def _operation(line: Version, verb: str, path: str) -> JsonObject:
    names = [part[1:-1] for part in path.replace(":", "/").split("/") if part.startswith("{")]
    parameters: list[Json] = [
        {"name": name, "in": "path", "required": True, "schema": _TEXT} for name in names
    ]
    operation: JsonObject = {
        "operationId": f"{verb.lower()}_{path}_{line}",
        "summary": f"A2A {line}: {verb} {path}",
        "parameters": [*parameters, _VERSION, *(_query(path) if verb == "GET" else ())],
        "responses": {"200": _answer(path), "4XX": _ERROR, **_REFUSALS},
    }
    if "message:" in path:
        operation["requestBody"] = _send_body(line)
    return operation


def _query(path: str) -> Iterator[Json]:
    known: tuple[str, ...] = ("historyLength",) if path.endswith("{id}") else ()
    for name in _LISTING if path.endswith("/tasks") else known:
        yield {"name": name, "in": "query", "schema": _LISTING[name]}


def _answer(path: str) -> JsonObject:
    if path.endswith((":stream", ":subscribe")):
        return {"description": "Events", "content": _EVENTS}
    name = "TaskPage" if path.endswith("/tasks") else "A2ATask"
    if "message:send" in path:
        name = "SendResponse"
    return {"description": "The answer", "content": _content(name)}


def _send_body(line: Version) -> JsonObject:
    examples: dict[str, JsonObject] = {
        "basic_message": _send_example(line),
        "message_with_file_input": _file_example(line),
        "continue_session": _send_example(
            line, shared={"session": {"id": OfSession.example["session_id"]}}
        ),
        "message_with_model_override": _send_example(
            line, shared={"model": {"providerID": "demo", "modelID": "demo"}}
        ),
    }
    # bodies of 0.3 REST are ProtoJSON or plain; both are declared
    names = ["SendMessage"] if line is Version.V1 else ["SendMessage03Proto", "SendMessage03"]
    schema: JsonObject = {"anyOf": [_ref(name) for name in names]}
    named: JsonObject = {name: {"value": value} for name, value in examples.items()}
    return {"required": True, "content": {_JSON: {"schema": schema, "examples": named}}}


def _reading(name: str, summary: str, responses: JsonObject, **rest: Json) -> JsonObject:
    return {"get": {"operationId": name, "summary": summary, "responses": responses, **rest}}


def _cards(settings: Settings) -> JsonObject:
    card: JsonObject = {"description": "The card", "content": _content("Card")}
    found: JsonObject = {"200": card, "304": {"description": "Not changed"}}
    extended: JsonObject = {**found, "4XX": _ERROR}
    told: JsonObject = {}
    for path, line in CARD_PATHS:
        if line in spoken(settings):
            summary = f"A2A {line}: the extended card"
            told[path] = _reading(f"card_{path}", summary, extended, parameters=[_VERSION])
    for path in DISCOVERY:
        told[path] = _reading(f"card_{path}", "The public card", found, security=[])
    return told


def _pages(settings: Settings) -> JsonObject:
    pages = {
        "/livez": "Whether the process lives",
        "/readyz": "Whether database and OpenCode can be used",
        "/health": "What runs here",
        "/openapi.json": "This document",
        "/docs": "This document as a page",
    }
    if settings.a2a.metrics_enabled:
        pages["/metrics"] = "Figures for Prometheus"
    told: JsonObject = {}
    for path, summary in pages.items():
        responses: JsonObject = {"200": {"description": summary}}
        if path == "/readyz":
            responses["503"] = {"description": "Not now"}
        if path in ("/livez", "/readyz"):
            told[path] = _reading(path, summary, responses, security=[])
        else:
            told[path] = _reading(path, summary, responses | _REFUSALS)
    return told


# --- schemas ----------------------------------------------------------------------------------

_SENDS: tuple[tuple[str, Version, type[SendBase], str], ...] = (
    ("SendMessage", Version.V1, types.SEND_PARAMS, "ROLE_USER"),
    ("SendMessage03", Version.V03, v03.SEND_PARAMS[Spelling.JSON], "user"),
    ("SendMessage03Proto", Version.V03, v03.SEND_PARAMS[Spelling.PROTO], "ROLE_USER"),
)
"""The params of a send: schema, version, declaration, and the role of a caller."""


def _request_name(method: str) -> str:
    return "Request." + method.replace("/", ".")


def _schemas(settings: Settings) -> JsonObject:
    lines = spoken(settings)
    schemas = _method_schemas(settings) | _BASIC
    for name, version, model, role in _SENDS:
        if version in lines:
            schemas |= _send_schema(name, model, role)
    for line in lines:
        for method in OPERATIONS:
            if known := method.named(line):
                schemas[_request_name(known)] = _request(known, _core_params(method, line))
    for _, method in declared():
        request = _request(method.name, _ref(schema_name(method.params)))
        request["description"] = method.summary
        request["x-result"] = _ref(schema_name(method.result))
        schemas[_request_name(method.name)] = request
    return schemas


def _method_schemas(settings: Settings) -> JsonObject:
    """Return the schemas of all params and results, each under the title that it has."""
    params, results = (
        {m.params: None for _, m in declared()},
        {m.result: None for _, m in declared()},
    )
    template = _REF + "{model}"
    _, taken = models_json_schema([(one, "validation") for one in params], ref_template=template)
    _, given = models_json_schema(
        [(one, "serialization") for one in results],
        by_alias=False,
        ref_template=template,
        schema_generator=PublishedSchema,
    )
    generated = {**taken["$defs"], **given["$defs"]}
    generated["PermissionParams"]["properties"]["reply"]["enum"] = permission_replies(settings)
    text = orjson.dumps(generated).decode()
    for name, schema in generated.items():
        text = text.replace(f'"{_REF}{name}"', f'"{_REF}{schema["title"]}"')
    schemas: dict[str, JsonObject] = {one["title"]: one for one in orjson.loads(text).values()}
    return dict(sorted(schemas.items()))


def _send_schema(name: str, model: type[SendBase], role: str) -> JsonObject:
    """Return the schema of a send's params, its parts under names of their own."""
    made = model.model_json_schema(ref_template=f"{_REF}{name}.{{model}}")
    # the models are private to their module; their names here are not
    own = orjson.loads(orjson.dumps(made).replace(f"{name}._".encode(), f"{name}.".encode()))
    own["title"] = name
    schemas: JsonObject = {name: own}
    for private, schema in own.pop("$defs").items():
        inner = f"{name}.{private.removeprefix('_')}"
        schemas[inner] = schema | {"title": inner}
        if "role" in schema["properties"]:
            schema["properties"]["role"] = {"type": "string", "enum": [role]}
    return schemas


def _core_params(method: Operation, line: Version) -> JsonObject:
    name = method.name
    if name in ("SendMessage", "SendStreamingMessage"):
        return _ref("SendMessage" if line is Version.V1 else "SendMessage03")
    if name == "ListTasks":
        return _ref("ListTasksParams")
    if name == "GetExtendedAgentCard":
        return {"type": "object"}
    return _ref("TaskParams")


def _request(method: str, params: JsonObject) -> JsonObject:
    return _object(
        *("jsonrpc", "method"),
        jsonrpc={"const": "2.0"},
        id={"type": ["string", "integer"]},
        method={"const": method},
        params=params,
    )


def _object(*required: str, **properties: Json) -> JsonObject:
    needed: JsonObject = {"required": [*required]} if required else {}
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
_RPC_ERROR = _object("code", "message", code={"type": "integer"}, message=_TEXT, data={})
_BASIC: JsonObject = {
    "JsonRpcResponse": _object(
        "jsonrpc", jsonrpc={"const": "2.0"}, id={}, result={}, error=_RPC_ERROR
    ),
    "Error": _FREE,
    "Card": _object("name", "version", "skills", name=_TEXT, version=_TEXT),
    "TaskParams": _object("id", id=_TEXT, historyLength=_LISTING["historyLength"]),
    "ListTasksParams": _object(**_LISTING | {"statusTimestampAfter": _TEXT}),
    "A2ATask": _object("id", "contextId", "status", id=_TEXT, contextId=_TEXT, status=_FREE),
    "TaskPage": _object("tasks", tasks={"type": "array", "items": _ref("A2ATask")}),
    "SendResponse": _object(task=_ref("A2ATask"), message=_FREE),
}
