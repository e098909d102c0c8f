"""What comes back from the service, on any version and binding.

A ``Task`` and an ``Update`` read the same whatever the wire was, and every object is read by the
SDK's own types of its version on the way. An ``Answer`` is the response exactly as it came; the
errors of the specification stand here with their form on every wire.
"""

from collections.abc import AsyncIterator
from dataclasses import dataclass
from enum import Enum
from typing import Any

import httpx2
import orjson
from a2a.compat.v0_3 import a2a_v0_3_pb2
from a2a.compat.v0_3 import types as v03
from a2a.server.tasks.task_manager import append_artifact_to_task
from a2a.types import SendMessageResponse, StreamResponse
from a2a.types import Task as SdkTask
from a2a.utils.errors import A2A_REASON_TO_ERROR
from google.protobuf.json_format import MessageToDict, ParseDict
from pydantic import TypeAdapter

from opencode_a2a.events import JsonObject

_EVENT03: TypeAdapter[Any] = TypeAdapter(
    v03.Task | v03.TaskStatusUpdateEvent | v03.TaskArtifactUpdateEvent | v03.Message
)


_KINDS = {"task": "task", "status-update": "statusUpdate", "artifact-update": "artifactUpdate"}


class Wire(Enum):
    """A binding and a line."""

    RPC = "JSON-RPC 1.0"
    RPC03 = "JSON-RPC 0.3"
    REST = "HTTP+JSON 1.0"
    REST03 = "HTTP+JSON 0.3"

    @property
    def modern(self) -> bool:
        return self in (Wire.RPC, Wire.REST)

    @property
    def rpc(self) -> bool:
        return self in (Wire.RPC, Wire.RPC03)

    @property
    def interface(self) -> tuple[str, str]:
        """Its binding and version, as a card has them."""
        return "JSONRPC" if self.rpc else "HTTP+JSON", "1.0" if self.modern else "0.3"


class RefusedError(Exception):
    """The service answered with an error."""

    def __init__(self, error: Any) -> None:
        super().__init__(orjson.dumps(error).decode())
        self.error = error

    @property
    def code(self) -> int:
        return self.error["code"]

    @property
    def message(self) -> str:
        return self.error["message"]


@dataclass
class Task:
    """A task as the wire has it, read the same way on every line."""

    raw: Any

    @property
    def id(self) -> str:
        return self.raw["id"]

    @property
    def context_id(self) -> str:
        return self.raw["contextId"]

    @property
    def state(self) -> str:
        return _state(self.raw["status"])

    @property
    def said(self) -> str:
        """What the agent says to the state."""
        return _words(self.raw["status"].get("message", {}))

    @property
    def shared(self) -> Any:
        return self.raw.get("metadata", {}).get("shared", {})

    @property
    def opencode(self) -> Any:
        return self.raw.get("metadata", {}).get("opencode", {})

    @property
    def session_id(self) -> str:
        return self.shared["session"]["id"]

    @property
    def interrupt(self) -> Any:
        return self.shared["interrupt"]

    @property
    def error_type(self) -> str | None:
        return self.opencode.get("error", {}).get("type")

    @property
    def artifacts(self) -> list[Any]:
        return self.raw.get("artifacts", [])

    @property
    def text(self) -> str:
        return self._channel("text")

    @property
    def reasoning(self) -> str:
        return self._channel("reasoning")

    @property
    def tools(self) -> list[Any]:
        """The tool calls in the order they were begun."""
        return [_data(a) for a in self.artifacts if ":tool:" in a["artifactId"]]

    @property
    def diff(self) -> Any:
        return next((a for a in self.artifacts if a["artifactId"].endswith(":diff")), None)

    @property
    def history(self) -> list[str]:
        return [_words(message) for message in self.raw.get("history", [])]

    def _channel(self, name: str) -> str:
        ends = f":stream:{name}"
        found = [a for a in self.artifacts if a["artifactId"].endswith(ends)]
        return "".join(_text(artifact["parts"]) for artifact in found)


@dataclass
class Update:
    """One event of a stream."""

    id: str
    raw: Any

    @property
    def task(self) -> Task | None:
        return Task(self.raw["task"]) if "task" in self.raw else None

    @property
    def status(self) -> Any:
        return self.raw.get("statusUpdate")

    @property
    def artifact(self) -> Any:
        return self.raw.get("artifactUpdate")

    @property
    def state(self) -> str | None:
        if self.task is not None:
            return self.task.state
        return _state(self.status["status"]) if self.status else None

    @property
    def shared(self) -> Any:
        told: Any = self.status or self.artifact or {"metadata": {}}
        return told.get("metadata", {}).get("shared", {})

    @property
    def progress(self) -> Any:
        return self.shared.get("progress")

    @property
    def interrupt(self) -> Any:
        return self.shared.get("interrupt")


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
BUDGET = Expected(-32603, 429, "RESOURCE_EXHAUSTED", "BUDGET_EXHAUSTED")
NOT_FOUND = Expected(-32001, 404, "NOT_FOUND", "TASK_NOT_FOUND")
NOT_CANCELABLE = Expected(-32002, 400, "FAILED_PRECONDITION", "TASK_NOT_CANCELABLE")
PUSH = Expected(-32003, 400, "FAILED_PRECONDITION", "PUSH_NOTIFICATION_NOT_SUPPORTED")
UNSUPPORTED = Expected(-32004, 400, "FAILED_PRECONDITION", "UNSUPPORTED_OPERATION")
CONTENT_TYPE = Expected(-32005, 400, "INVALID_ARGUMENT", "CONTENT_TYPE_NOT_SUPPORTED")
UNAUTHENTICATED = Expected(-31012, 401, "UNAUTHENTICATED", "UNAUTHENTICATED", at_edge=True)
RATE = Expected(-31013, 429, "RESOURCE_EXHAUSTED", "RATE_LIMIT_EXCEEDED", at_edge=True)
LARGE = Expected(-31014, 413, "RESOURCE_EXHAUSTED", "REQUEST_BODY_TOO_LARGE", at_edge=True)
HOST = Expected(-31016, 421, "INVALID_ARGUMENT", "HOST_NOT_ALLOWED", at_edge=True)
ORIGIN = Expected(-31017, 403, "PERMISSION_DENIED", "ORIGIN_NOT_ALLOWED", at_edge=True)
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


@dataclass(frozen=True, slots=True)
class Refusal:
    """An error as the 1.0 line tells it."""

    code: int
    reason: str
    data: JsonObject
    fields: tuple[str, ...] = ()


def fold(updates: list[Update]) -> Task:
    """Return the task that the updates amount to, as the SDK's own rules have it."""
    first = next(update.task for update in updates if update.task is not None)
    folded = ParseDict(_spelled(first.raw), SdkTask())
    for update in updates:
        response = ParseDict({k: _spelled(v) for k, v in update.raw.items()}, StreamResponse())
        if update.task is not None:
            folded.CopyFrom(response.task)
        elif update.artifact:
            append_artifact_to_task(folded, response.artifact_update)
        elif update.status:
            folded.status.CopyFrom(response.status_update.status)
            folded.metadata.update(MessageToDict(response.status_update.metadata))
    return Task(MessageToDict(folded))


def _spelled(value: Any) -> Any:
    """Spell what the 0.3 line has of its own as 1.0 does, as far as a fold needs it."""
    if isinstance(value, list):
        return [_spelled(one) for one in value]  # pyright: ignore[reportUnknownVariableType]
    if not isinstance(value, dict):
        return value
    left: dict[str, Any] = {k: v for k, v in value.items() if k not in ("kind", "final")}  # pyright: ignore[reportUnknownVariableType]
    spelled = {k: v if k in ("metadata", "data") else _spelled(v) for k, v in left.items()}
    if "role" in spelled and not spelled["role"].startswith("ROLE_"):
        spelled["role"] = f"ROLE_{spelled['role'].upper()}"
    if isinstance(spelled.get("state"), str):
        spelled["state"] = f"TASK_STATE_{_state(spelled).upper()}"
    if "content" in spelled:
        spelled["parts"] = spelled.pop("content")
    if "file" in spelled:
        file = spelled.pop("file")
        named = {"bytes": "raw", "fileWithBytes": "raw", "uri": "url", "fileWithUri": "url"}
        named |= {"mimeType": "mediaType", "name": "filename"}
        spelled |= {named[name]: value for name, value in file.items()}
    return spelled


def _state(status: Any) -> str:
    state: str = status["state"]
    state = state.removeprefix("TASK_STATE_").lower().replace("-", "_")
    return "canceled" if state == "cancelled" else state


def _text(parts: list[Any]) -> str:
    return "".join(part.get("text", "") for part in parts)


def _words(message: Any) -> str:
    return _text(message.get("parts") or message.get("content") or [])


def _data(artifact: Any) -> Any:
    data = artifact["parts"][0]["data"]
    return data["data"] if set(data) == {"data"} else data


def read_result(body: Any) -> Any:
    if "error" in body:
        raise RefusedError(body["error"])
    if "code" in body:  # the whole body is the error in HTTP+JSON of 0.3
        raise RefusedError(body)
    return body["result"] if body.get("jsonrpc") else body


def read_answer(result: Any, wire: Wire) -> Task:
    if wire is Wire.RPC03:
        return read_task(result, wire)
    if wire.modern:
        ParseDict(result, SendMessageResponse())
    return read_task(result["task"], wire)


def read_task(raw: Any, wire: Wire) -> Task:
    if wire.modern:
        ParseDict(raw, SdkTask())
    elif raw.get("kind") == "task":
        v03.Task.model_validate(raw)
    else:  # a GET of the 0.3 line cannot tell which of its two spellings is wanted
        ParseDict(raw, a2a_v0_3_pb2.Task())
    return Task(raw)


async def read_updates(response: httpx2.Response, wire: Wire) -> AsyncIterator[Update]:
    event_id = ""
    async for line in response.aiter_lines():
        if line.startswith("id: "):
            event_id = line[4:]
        if line.startswith("data: "):
            yield Update(event_id, _read_update(read_result(orjson.loads(line[6:])), wire))


def _read_update(result: Any, wire: Wire) -> Any:
    if wire.modern:
        ParseDict(result, StreamResponse())
        return result
    told = result if wire is Wire.RPC03 else next(iter(result.values()))
    if "kind" not in told:
        ParseDict(result, a2a_v0_3_pb2.StreamResponse())
        return result
    _EVENT03.validate_python(told)
    return {_KINDS[told["kind"]]: told}
