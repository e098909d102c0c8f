"""Any request to the running service, right or wrong, and the answer exactly as it came.

``Caller`` is for those who talk to the service; this is for those who look at how it answers.
The errors of the specification stand here with their form on every line and binding.
"""

import asyncio
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import httpx2
import orjson
from a2a.utils.errors import A2A_REASON_TO_ERROR

from opencode_a2a.events import Json, JsonObject
from tests.support.caller import PATIENCE, Wire
from tests.support.service import TOKEN, Running

_INFO = "type.googleapis.com/google.rpc.ErrorInfo"
_BAD = "type.googleapis.com/google.rpc.BadRequest"


@dataclass(frozen=True)
class Expected:
    """An error as the specification has it."""

    code: int
    http: int
    status: str
    reason: str
    at_edge: bool = False
    """Refused before the body was read: JSON-RPC too has the HTTP status then."""


PARSE = Expected(-32700, 400, "INVALID_ARGUMENT", "PARSE_ERROR")
REQUEST = Expected(-32600, 400, "INVALID_ARGUMENT", "INVALID_REQUEST")
METHOD = Expected(-32601, 404, "NOT_FOUND", "METHOD_NOT_SUPPORTED")
PARAMS = Expected(-32602, 400, "INVALID_ARGUMENT", "INVALID_PARAMS")
LISTING = Expected(-32602, 400, "INVALID_ARGUMENT", "INVALID_LIST_TASKS_REQUEST")
NOT_FOUND = Expected(-32001, 404, "NOT_FOUND", "TASK_NOT_FOUND")
NOT_CANCELABLE = Expected(-32002, 400, "FAILED_PRECONDITION", "TASK_NOT_CANCELABLE")
PUSH = Expected(-32003, 400, "FAILED_PRECONDITION", "PUSH_NOTIFICATION_NOT_SUPPORTED")
UNSUPPORTED = Expected(-32004, 400, "FAILED_PRECONDITION", "UNSUPPORTED_OPERATION")
CONTENT_TYPE = Expected(-32005, 400, "INVALID_ARGUMENT", "CONTENT_TYPE_NOT_SUPPORTED")
UNAUTHENTICATED = Expected(-31012, 401, "UNAUTHENTICATED", "UNAUTHENTICATED", at_edge=True)
RATE = Expected(-31013, 429, "RESOURCE_EXHAUSTED", "RATE_LIMIT_EXCEEDED", at_edge=True)
LARGE = Expected(-31014, 413, "RESOURCE_EXHAUSTED", "REQUEST_BODY_TOO_LARGE", at_edge=True)
HOST = Expected(-31016, 421, "INVALID_ARGUMENT", "HOST_NOT_ALLOWED", at_edge=True)
MEDIA_TYPE = Expected(-32005, 415, "INVALID_ARGUMENT", "MEDIA_TYPE_NOT_SUPPORTED", at_edge=True)
VERSION = Expected(-32009, 400, "FAILED_PRECONDITION", "VERSION_NOT_SUPPORTED")


@dataclass(frozen=True)
class Answer:
    wire: Wire
    status: int
    headers: httpx2.Headers
    content: bytes

    @property
    def body(self) -> Any:
        if self.headers["content-type"] != "text/event-stream":
            return orjson.loads(self.content)
        # An error of a 0.3 method that streams: one event.
        (event,) = self.content.decode().removesuffix("\n\n").split("\n\n")
        return orjson.loads(event.removeprefix("data: "))

    @property
    def result(self) -> Any:
        assert self.status == 200, self.content
        body = self.body
        assert "error" not in body, body
        return body["result"] if self.wire.rpc else body

    @property
    def task(self) -> Any:
        """The task that was the answer to a message."""
        return self.result if self.wire is Wire.RPC03 else self.result["task"]

    def refuses(self, expected: Expected) -> list[str]:
        """Check that this is the error, in the shape of its wire; return the wrong fields."""
        fields = _SHAPES[self.wire](self, expected)
        assert b"Traceback" not in self.content
        assert b"pydantic" not in self.content
        return fields


def _rpc(answer: Answer, expected: Expected) -> list[str]:
    body = answer.body
    error = body["error"]
    status = expected.http if expected.at_edge else 200
    assert (answer.status, body["jsonrpc"], error["code"]) == (status, "2.0", expected.code)
    assert set(error) == {"code", "message", "data"}
    return _details(error["data"], expected)


def _rest(answer: Answer, expected: Expected) -> list[str]:
    error = answer.body["error"]
    assert (answer.status, error["code"]) == (expected.http, expected.http), answer.body
    assert error["status"] == expected.status
    assert set(error) == {"code", "status", "message", "details"}
    assert answer.headers["content-type"] == "application/a2a+json"
    return _details(error["details"], expected)


def _details(details: Any, expected: Expected) -> list[str]:
    info, *more = details
    domain = "a2a-protocol.org" if expected.reason in A2A_REASON_TO_ERROR else "opencode-a2a"
    assert (info["@type"], info["domain"]) == (_INFO, domain)
    assert info["reason"] == expected.reason, details
    assert all(isinstance(value, str) for value in info["metadata"].values())
    assert all(one["@type"] == _BAD for one in more)
    return [violation["field"] for one in more for violation in one["fieldViolations"]]


def _rpc03(answer: Answer, expected: Expected) -> list[str]:
    error = answer.body["error"]
    status = expected.http if expected.at_edge else 200
    assert (answer.status, error["code"]) == (status, expected.code), error
    return _flat(error, expected)


def _rest03(answer: Answer, expected: Expected) -> list[str]:
    body = answer.body
    assert (answer.status, body["code"]) == (expected.http, expected.code), body
    assert body["type"].endswith("Error")
    return _flat(body, expected)


def _flat(error: Any, expected: Expected) -> list[str]:
    assert error["message"]
    assert error["data"]["type"] == expected.reason, error
    return [violation["field"] for violation in error["data"].get("violations", [])]


_SHAPES = {Wire.RPC: _rpc, Wire.REST: _rest, Wire.RPC03: _rpc03, Wire.REST03: _rest03}

METHODS = {
    "send": ("SendMessage", "message/send"),
    "stream": ("SendStreamingMessage", "message/stream"),
    "get": ("GetTask", "tasks/get"),
    "list": ("ListTasks", ""),
    "cancel": ("CancelTask", "tasks/cancel"),
    "subscribe": ("SubscribeToTask", "tasks/resubscribe"),
    "card": ("GetExtendedAgentCard", "agent/getAuthenticatedExtendedCard"),
    "push create": ("CreateTaskPushNotificationConfig", "tasks/pushNotificationConfig/set"),
    "push get": ("GetTaskPushNotificationConfig", "tasks/pushNotificationConfig/get"),
    "push list": ("ListTaskPushNotificationConfigs", "tasks/pushNotificationConfig/list"),
    "push delete": ("DeleteTaskPushNotificationConfig", "tasks/pushNotificationConfig/delete"),
}
ROUTES = {
    "send": ("POST", "/message:send"),
    "stream": ("POST", "/message:stream"),
    "get": ("GET", "/tasks/{id}"),
    "list": ("GET", "/tasks"),
    "cancel": ("POST", "/tasks/{id}:cancel"),
    "subscribe": ("POST", "/tasks/{id}:subscribe"),
    "card": ("GET", "/extendedAgentCard"),
    "push create": ("POST", "/tasks/{id}/pushNotificationConfigs"),
    "push get": ("GET", "/tasks/{id}/pushNotificationConfigs/c"),
    "push list": ("GET", "/tasks/{id}/pushNotificationConfigs"),
    "push delete": ("DELETE", "/tasks/{id}/pushNotificationConfigs/c"),
}


class Exchange:
    """Requests on one line and binding."""

    def __init__(self, service: Running, wire: Wire, token: str = TOKEN) -> None:
        self.wire = wire
        self.http = service.http
        self.headers = {
            "A2A-Version": "1.0" if wire.modern else "0.3",
            "Authorization": f"Bearer {token}",
            "Content-Type": "application/json",
        }

    async def call(self, operation: str, params: Mapping[str, Any], **headers: str) -> Answer:
        """Ask for an operation; query parameters are what a route has no body for."""
        verb, target = self.target(operation, params)
        if verb == "POST":
            return await self.post(self.encode(operation, params), target, **headers)
        sent = {**self.headers, **_spelled(headers)}
        query = {k: v for k, v in params.items() if k != "id" and isinstance(v, str | int)}
        async with asyncio.timeout(PATIENCE):
            answer = await self.http.request(verb, target, params=query, headers=sent)
        return Answer(self.wire, answer.status_code, answer.headers, answer.content)

    async def post(self, content: bytes, target: str | None = None, **headers: str) -> Answer:
        """Post a body as it is; to where messages are sent, unless told otherwise."""
        where = target or self.target("send", {})[1]
        sent = {**self.headers, **_spelled(headers)}
        async with asyncio.timeout(PATIENCE):
            answer = await self.http.post(where, content=content, headers=sent)
        return Answer(self.wire, answer.status_code, answer.headers, answer.content)

    def encode(self, operation: str, params: Any) -> bytes:
        if not self.wire.rpc:
            return orjson.dumps(params)
        method = METHODS[operation][0 if self.wire.modern else 1]
        return orjson.dumps({"jsonrpc": "2.0", "id": 1, "method": method, "params": params})

    def target(self, operation: str, params: Mapping[str, Any]) -> tuple[str, str]:
        if self.wire.rpc:
            return "POST", "/"
        verb, path = ROUTES[operation]
        if operation == "card" and not self.wire.modern:
            return verb, "/v1/card"
        return verb, ("" if self.wire.modern else "/v1") + path.format(id=params.get("id"))

    def message(self, *parts: Json, **fields: Json) -> dict[str, Any]:
        """Return params of a message in the spelling of the line; text and data are parts."""
        spelled: JsonObject = {
            "messageId": str(uuid.uuid4()),
            "role": "ROLE_USER" if self.wire.modern else "user",
            "parts": [self.part(part) for part in parts],
            **fields,
        }
        return {"message": spelled if self.wire.modern else {"kind": "message", **spelled}}

    def part(self, content: Json) -> Json:
        """Spell text; what is an object is taken for a part that is spelled already."""
        if not isinstance(content, str):
            return content
        return {"text": content} if self.wire.modern else {"kind": "text", "text": content}

    def data(self, content: Any) -> JsonObject:
        return {"data": content} if self.wire.modern else {"kind": "data", "data": content}

    def file(self, content: str, media_type: str, *, url: bool = False) -> JsonObject:
        """Spell a file by its base64 or its URL."""
        if self.wire.modern:
            return {"url" if url else "raw": content, "mediaType": media_type}
        return {
            "kind": "file",
            "file": {"uri" if url else "bytes": content, "mimeType": media_type},
        }


def _spelled(headers: dict[str, str]) -> dict[str, str]:
    return {name.replace("_", "-"): value for name, value in headers.items()}
