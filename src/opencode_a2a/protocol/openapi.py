"""The OpenAPI document, and a page that shows it.

Made from the declared methods and routes on first request and kept. Both are behind the
credential like everything that is not discovery; the page carries the document and needs nothing
else from anywhere.
"""

import html
from collections.abc import Iterator
from functools import cached_property

import orjson
from pydantic import BaseModel
from pydantic.json_schema import JsonSchemaMode, models_json_schema
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from opencode_a2a import __version__
from opencode_a2a.config import Settings
from opencode_a2a.events import Json, JsonObject
from opencode_a2a.extensions.payloads import DEFAULT_LIMIT
from opencode_a2a.extensions.registry import Method
from opencode_a2a.protocol.contracts import Contracts, core_methods, declared, enabled, spoken
from opencode_a2a.protocol.handler import METHODS
from opencode_a2a.protocol.handler import Method as CoreMethod
from opencode_a2a.protocol.rest import CARDS, PREFIXES, ROUTES
from opencode_a2a.protocol.schema import send_model
from opencode_a2a.protocol.versions import HEADER, Dialect, Line

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
    def document(self) -> JsonObject:
        return document(self._settings, self._published)

    @cached_property
    def _encoded(self) -> bytes:
        return orjson.dumps(self.document)

    async def _document(self, request: Request) -> Response:
        return Response(self._encoded, media_type=_JSON, headers=_CACHE)

    async def _page(self, request: Request) -> Response:
        title = html.escape(self._settings.a2a.title)
        # inside a script element, so that no text of the document can end it
        content = self._encoded.decode().replace("<", "\\u003c")
        body = _PAGE.replace("TITLE", title).replace("DOCUMENT", content)
        return Response(body, media_type="text/html", headers=_CACHE)


_CACHE = {"cache-control": "private, max-age=300"}


def document(settings: Settings, published: Contracts) -> JsonObject:
    """Return the whole document."""
    schemas = _schemas()
    return {
        "openapi": "3.1.0",
        "info": {
            "title": settings.a2a.title,
            "version": settings.a2a.version or __version__,
            "description": "A2A 1.0 and 0.3 over JSON-RPC and HTTP+JSON, and the methods of "
            "OpenCode. Everything but discovery, /livez and /readyz needs the credential, this "
            "document too.",
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        },
        "servers": [{"url": settings.public_url}],
        "security": [*_security(settings)],
        "paths": {
            "/": {"post": _rpc(settings, published)},
            **_rest(settings),
            **_cards(settings),
            **_pages(settings),
        },
        "components": {
            "schemas": schemas,
            "parameters": {"version": _version_parameter(settings)},
            "securitySchemes": {
                "bearerAuth": {"type": "http", "scheme": "bearer"},
                "basicAuth": {"type": "http", "scheme": "basic"},
            },
        },
    }


def _security(settings: Settings) -> Iterator[JsonObject]:
    yield {"bearerAuth": []}
    entries = settings.auth.static_auth_credentials or ()
    if any(entry.scheme == "basic" for entry in entries):
        yield {"basicAuth": []}


def _version_parameter(settings: Settings) -> JsonObject:
    return {
        "name": HEADER,
        "in": "header",
        "required": False,
        "description": f"The protocol line; {settings.a2a.protocol_version} when left out.",
        "schema": {"type": "string", "enum": [line.value for line in spoken(settings)]},
    }


# --- JSON-RPC ---------------------------------------------------------------------------------


def _rpc(settings: Settings, published: Contracts) -> JsonObject:
    methods = enabled(settings)
    core = core_methods(settings)
    refs: list[Json] = [_ref(_request_name(name)) for name in core]
    refs += [_ref(_request_name(method.name)) for method in methods]
    listed = "\n".join(
        [f"- `{name}`" for name in core]
        + [f"- `{method.name}` ({method.access}): {method.summary}" for method in methods]
    )
    return {
        "operationId": "jsonrpc",
        "summary": "JSON-RPC 2.0: all methods of A2A and of the extensions",
        "description": f"One request in, one answer or a stream of events out. Errors have HTTP "
        f"status 200; a request without id is answered with 204.\n\n{listed}",
        "parameters": [{"$ref": "#/components/parameters/version"}],
        "requestBody": {
            "required": True,
            "content": {
                _JSON: {"schema": {"oneOf": refs}, "examples": dict(_rpc_examples(core, methods))}
            },
        },
        "responses": {
            "200": {
                "description": "The result, the error, or a stream of results",
                "content": {
                    _JSON: {"schema": _ref("JsonRpcResponse")},
                    "text/event-stream": {"schema": {"type": "string"}},
                },
            },
            "204": {"description": "Nothing: the request had no id"},
            **_refusals(),
        },
        "x-a2a-extension-contracts": {**published.by_key},
    }


def _rpc_examples(core: list[str], methods: list[Method]) -> Iterator[tuple[str, Json]]:
    for line, name in ((Line.V1, "SendMessage"), (Line.V03, "message/send")):
        if name not in core:
            continue
        yield name, _example(name, _send_example(line), f"A2A {line}: send a message")
    for method in methods:
        yield method.name, _example(method.name, example_params(method), method.summary)


def _example(method: str, params: JsonObject, summary: str) -> JsonObject:
    value: JsonObject = {"jsonrpc": "2.0", "id": 1, "method": method, "params": params}
    return {"summary": summary, "value": value}


_EXAMPLES: dict[str, Json] = {
    "session_id": "ses_e222241e6ffeQZbiYrXEPgqFtd",
    "message_id": "msg_1deb3fc6b000iKn0wo4MZ7ksDZ",
    "workspace_id": "wrk_1deb3fc6b000iKn0wo4MZ7ksDZ",
    "limit": DEFAULT_LIMIT,
}
_REQUESTS: dict[str, JsonObject] = {
    "opencode.sessions.prompt_async": {"parts": [{"type": "text", "text": "hello"}]},
    "opencode.sessions.command": {"command": "review", "arguments": ""},
    "opencode.sessions.shell": {"agent": "build", "command": "git status"},
    "opencode.sessions.update": {"title": "A better title"},
    "opencode.sessions.revert": {"messageID": "msg_1deb3fc6b000iKn0wo4MZ7ksDZ"},
    "opencode.workspaces.create": {"type": "worktree"},
    "opencode.worktrees.remove": {"directory": "/srv/worktrees/one"},
    "opencode.worktrees.reset": {"directory": "/srv/worktrees/one"},
}


def example_params(method: Method) -> JsonObject:
    """Return params that a method would take."""
    if method.example:
        return method.example
    params: JsonObject = {
        name: _EXAMPLES[name]
        for name, info in method.params.model_fields.items()
        if info.is_required() and name in _EXAMPLES
    }
    if method.name in _REQUESTS:
        params["request"] = _REQUESTS[method.name]
    return params


def _send_example(line: Line, **metadata: Json) -> JsonObject:
    if line is Line.V1:
        message: JsonObject = {"role": "ROLE_USER", "parts": [{"text": "list the files here"}]}
    else:
        part: JsonObject = {"kind": "text", "text": "list the files here"}
        message = {"kind": "message", "role": "user", "parts": [part]}
    params: JsonObject = {"message": {"messageId": "m-1", **message}}
    if metadata:
        params["metadata"] = metadata
    return params


# --- HTTP+JSON --------------------------------------------------------------------------------


def _rest(settings: Settings) -> JsonObject:
    return {
        (at := PREFIXES[line] + path): {verb.lower(): _operation(line, verb, at) for verb in verbs}
        for line in spoken(settings)
        for path, verbs, _, _ in ROUTES
    }


def _operation(line: Line, verb: str, path: str) -> JsonObject:
    names = [part[1:-1] for part in path.replace(":", "/").split("/") if part.startswith("{")]
    parameters: list[Json] = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
        for name in names
    ]
    parameters.append({"$ref": "#/components/parameters/version"})
    operation: JsonObject = {
        "operationId": f"{verb.lower()}_{path}_{line}",
        "summary": f"A2A {line}: {verb} {path}",
        "parameters": parameters + (_query(path) if verb == "GET" else []),
        "responses": {"200": _answer(path), "4XX": _error(), **_refusals()},
    }
    if "message:" in path:
        operation["requestBody"] = _send_body(line)
    return operation


def _query(path: str) -> list[Json]:
    known: dict[str, JsonObject] = {"historyLength": {"type": "integer", "minimum": 0}}
    if path.endswith("/tasks"):
        known |= {
            "pageSize": {"type": "integer", "minimum": 1, "maximum": 100},
            "pageToken": {"type": "string"},
            "contextId": {"type": "string"},
            "status": {"type": "string"},
            "statusTimestampAfter": {"type": "string", "format": "date-time"},
            "includeArtifacts": {"type": "boolean"},
        }
    elif not path.endswith("{id}"):
        return []
    return [{"name": name, "in": "query", "schema": schema} for name, schema in known.items()]


def _answer(path: str) -> JsonObject:
    if path.endswith((":stream", ":subscribe")):
        events: JsonObject = {"text/event-stream": {"schema": {"type": "string"}}}
        return {"description": "Events", "content": events}
    name = "TaskPage" if path.endswith("/tasks") else "A2ATask"
    if "message:send" in path:
        name = "SendResponse"
    return {"description": "The answer", "content": {_JSON: {"schema": _ref(name)}}}


def _send_body(line: Line) -> JsonObject:
    named: dict[str, JsonObject] = {
        "basic_message": _send_example(line),
        "message_with_file_input": _file_example(line),
        "continue_session": _send_example(
            line, shared={"session": {"id": "ses_e222241e6ffeQZbiYrXEPgqFtd"}}
        ),
        "message_with_model_override": _send_example(
            line, shared={"model": {"providerID": "demo", "modelID": "demo"}}
        ),
    }
    # bodies of 0.3 REST are ProtoJSON or plain; both are declared
    names = ["SendMessage"] if line is Line.V1 else ["SendMessage03Proto", "SendMessage03"]
    schema: JsonObject = {"anyOf": [_ref(name) for name in names]}
    examples: JsonObject = {name: {"value": value} for name, value in named.items()}
    return {"required": True, "content": {_JSON: {"schema": schema, "examples": examples}}}


def _file_example(line: Line) -> JsonObject:
    if line is Line.V1:
        file: JsonObject = {"raw": "aGVsbG8K", "mediaType": "text/plain", "filename": "a.txt"}
        text: JsonObject = {"text": "what does it say?"}
        message: JsonObject = {"role": "ROLE_USER", "parts": [text, file]}
    else:
        content: JsonObject = {"bytes": "aGVsbG8K", "mimeType": "text/plain", "name": "a.txt"}
        text = {"kind": "text", "text": "what does it say?"}
        message = {"role": "user", "parts": [text, {"kind": "file", "file": content}]}
    return {"message": {"messageId": "m-2", **message}}


def _cards(settings: Settings) -> JsonObject:
    card: JsonObject = {"description": "The card", "content": {_JSON: {"schema": _ref("Card")}}}
    version: JsonObject = {"$ref": "#/components/parameters/version"}
    told: JsonObject = {
        path: {
            "get": {
                "operationId": f"card_{path}",
                "summary": f"A2A {line}: the extended card",
                "parameters": [version],
                "responses": {"200": card, "304": _nothing("Not changed"), "4XX": _error()},
            }
        }
        for path, line in CARDS
        if line in spoken(settings)
    }
    for path in ("/.well-known/agent-card.json", "/.well-known/agent.json"):
        told[path] = {
            "get": {
                "operationId": f"card_{path}",
                "summary": "The public card",
                "security": [],
                "responses": {"200": card, "304": _nothing("Not changed")},
            }
        }
    return told


def _pages(settings: Settings) -> JsonObject:
    pages: dict[str, tuple[str, bool]] = {
        "/livez": ("Whether the process lives", True),
        "/readyz": ("Whether database and OpenCode can be used", True),
        "/health": ("What runs here", False),
        "/openapi.json": ("This document", False),
        "/docs": ("This document as a page", False),
    }
    if settings.a2a.metrics_enabled:
        pages["/metrics"] = ("Figures for Prometheus", False)
    told: JsonObject = {}
    for path, (summary, is_open) in pages.items():
        responses: JsonObject = {"200": _nothing(summary)}
        responses |= {"503": _nothing("Not now")} if path == "/readyz" else {}
        responses |= {} if is_open else _refusals()
        page: JsonObject = {"operationId": path, "summary": summary, "responses": responses}
        told[path] = {"get": page | ({"security": []} if is_open else {})}
    return told


def _nothing(text: str) -> JsonObject:
    return {"description": text}


def _error() -> JsonObject:
    return {
        "description": "The request cannot be taken as it is",
        "content": {_JSON: {"schema": _ref("Error")}},
    }


def _refusals() -> JsonObject:
    return {"401": _nothing("No valid credential"), "429": _nothing("Too many requests")}


# --- schemas ----------------------------------------------------------------------------------

_SENDS = {
    "SendMessage": Dialect.V1,
    "SendMessage03": Dialect.V03,
    "SendMessage03Proto": Dialect.PROTO03,
}
_ROLES = {Dialect.V1: "ROLE_USER", Dialect.V03: "user", Dialect.PROTO03: "ROLE_USER"}


def _ref(name: str) -> JsonObject:
    return {"$ref": f"{_REF}{name}"}


def _request_name(method: str) -> str:
    return "Request." + method.replace("/", ".")


def _schemas() -> JsonObject:
    models: list[tuple[type[BaseModel], JsonSchemaMode]] = []
    for _, method in declared():
        models.append((method.params, "validation"))
        models.append((method.result, "serialization"))
    refs, generated = models_json_schema(models, ref_template=_REF + "{model}")
    schemas: JsonObject = {**generated["$defs"], **_basic_schemas()}
    for name, dialect in _SENDS.items():
        schemas |= _send_schema(name, dialect)
    for line in Line:
        for method in METHODS:
            if known := method.name(line):
                schemas[_request_name(known)] = _request(known, _core_params(method, line))
    for _, method in declared():
        request = _request(method.name, refs[method.params, "validation"])
        request["description"] = method.summary
        request["x-result"] = refs[method.result, "serialization"]
        schemas[_request_name(method.name)] = request
    return schemas


def _send_schema(name: str, dialect: Dialect) -> JsonObject:
    """Return the schema of a send's params, its parts under names of their own."""
    made = send_model(dialect).model_json_schema(ref_template=f"{_REF}{name}.{{model}}")
    # the models are private to their module; their names here are not
    own = orjson.loads(orjson.dumps(made).replace(f"{name}._".encode(), f"{name}.".encode()))
    own["title"] = name
    parts = {key.removeprefix("_"): value for key, value in own.pop("$defs", {}).items()}
    for inner, schema in parts.items():
        properties = schema.get("properties", {})
        if "role" in properties:
            properties["role"] = {"type": "string", "enum": [_ROLES[dialect]]}
        _drop_foreign(schema)
        schema["title"] = f"{name}.{inner}"
    _drop_foreign(own)
    return {name: own, **{f"{name}.{inner}": schema for inner, schema in parts.items()}}


def _drop_foreign(schema: dict[str, JsonObject]) -> None:
    """Leave out the fields that are only there to be refused by name."""
    properties = schema.get("properties", {})
    for name in [n for n, told in properties.items() if _is_foreign(told)]:
        del properties[name]


def _is_foreign(told: Json) -> bool:
    return isinstance(told, dict) and told.get("type") == "null"


def _core_params(method: CoreMethod, line: Line) -> JsonObject:
    name = method.v1
    if name in ("SendMessage", "SendStreamingMessage"):
        return _ref("SendMessage" if line is Line.V1 else "SendMessage03")
    if name == "ListTasks":
        return _ref("ListTasksParams")
    if name == "GetExtendedAgentCard":
        return {"type": "object"}
    return _ref("TaskParams")


def _request(method: str, params: JsonObject) -> JsonObject:
    return {
        "type": "object",
        "required": ["jsonrpc", "method"],
        "properties": {
            "jsonrpc": {"const": "2.0"},
            "id": {"type": ["string", "integer"]},
            "method": {"const": method},
            "params": params,
        },
    }


def _basic_schemas() -> JsonObject:
    text: JsonObject = {"type": "string"}
    count: JsonObject = {"type": "integer", "minimum": 0}
    free: JsonObject = {"type": "object"}
    rpc_error = _object(("code", "message"), code={"type": "integer"}, message=text, data={})
    response = _object(("jsonrpc",), jsonrpc={"const": "2.0"}, id={}, result={}, error=rpc_error)
    listing: JsonObject = {
        "type": "object",
        "properties": {
            "pageSize": {"type": "integer", "minimum": 1, "maximum": 100},
            **dict.fromkeys(("pageToken", "contextId", "status", "statusTimestampAfter"), text),
            "historyLength": count,
            "includeArtifacts": {"type": "boolean"},
        },
    }
    task = _object(("id", "contextId", "status"), id=text, contextId=text, status=free)
    pages = _object(("tasks",), tasks={"type": "array", "items": _ref("A2ATask")})
    return {
        "JsonRpcResponse": response,
        "Error": free,
        "Card": _object(("name", "version", "skills"), name=text, version=text),
        "TaskParams": _object(("id",), id=text, historyLength=count),
        "ListTasksParams": listing,
        "A2ATask": task,
        "TaskPage": pages,
        "SendResponse": _object((), task=_ref("A2ATask"), message=free),
    }


def _object(required: tuple[str, ...], **properties: JsonObject) -> JsonObject:
    told: JsonObject = {"type": "object", "properties": {**properties}}
    if required:
        told["required"] = [*required]
    return told


_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>TITLE</title>
<meta name="viewport" content="width=device-width, initial-scale=1">
<style>
body{font:15px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem}
details{border-bottom:1px solid #8885;padding:.4rem 0}summary{cursor:pointer}
pre{background:#8881;padding:.8rem;overflow:auto}code{font:13px ui-monospace,monospace}
</style></head><body><h1>TITLE</h1><main></main>
<script type="application/json" id="document">DOCUMENT</script>
<script>
const doc = JSON.parse(document.getElementById("document").textContent);
const main = document.querySelector("main");
function add(to, tag, text) {
  const made = document.createElement(tag);
  if (text !== undefined) made.textContent = text;
  return to.appendChild(made);
}
function fold(to, title, value) {
  const box = add(to, "details");
  add(add(box, "summary"), "code", title);
  const fill = () => add(add(box, "pre"), "code", JSON.stringify(value, null, 2));
  box.addEventListener("toggle", fill, { once: true });
}
add(main, "p", doc.info.description);
add(main, "h2", "Methods");
const rpc = doc.paths["/"].post;
for (const [name, example] of Object.entries(rpc.requestBody.content["application/json"].examples))
  fold(main, name + ": " + example.summary, example.value);
add(main, "h2", "Paths");
for (const [path, verbs] of Object.entries(doc.paths))
  for (const [verb, operation] of Object.entries(verbs))
    fold(main, verb.toUpperCase() + " " + path, operation);
add(main, "h2", "Schemas");
for (const [name, schema] of Object.entries(doc.components.schemas)) fold(main, name, schema);
</script></body></html>
"""
