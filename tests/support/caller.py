"""A caller of the running service: sends, streams, answers and cancels on any line and binding.

What comes back is shown the same way whatever the wire was, and every object is read by the
SDK's own types of its line on the way. Every wait is bounded.
"""

import asyncio
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import httpx2
import orjson
from a2a.compat.v0_3 import a2a_v0_3_pb2
from a2a.compat.v0_3 import types as v03
from a2a.server.tasks.task_manager import append_artifact_to_task
from a2a.types import SendMessageResponse, StreamResponse
from a2a.types import Task as SdkTask
from google.protobuf.json_format import MessageToDict, ParseDict
from pydantic import TypeAdapter

from opencode_a2a.events import JsonObject
from tests.support.service import TOKEN, Reachable

PATIENCE = 60.0
"""Seconds after which a test gives up waiting."""
_EVENT03: TypeAdapter[Any] = TypeAdapter(
    v03.Task | v03.TaskStatusUpdateEvent | v03.TaskArtifactUpdateEvent | v03.Message
)


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


@dataclass
class Following:
    """A stream that is being read."""

    _updates: AsyncIterator[Update]
    updates: list[Update] = field(default_factory=list[Update])

    async def until(self, wanted: Callable[[Update], bool]) -> Update:
        """Read up to an update; fail when the stream ends before."""
        async with asyncio.timeout(PATIENCE):
            async for update in self._updates:
                self.updates.append(update)
                if wanted(update):
                    return update
        raise AssertionError(f"the stream ended before: {self.updates[-3:]}")

    async def until_state(self, state: str) -> Update:
        return await self.until(lambda update: update.state == state)

    async def until_text(self, text: str) -> None:
        """Read until the answer, as it was told so far, is this."""
        await self.until(lambda _: fold(self.updates).text == text)

    async def rest(self) -> list[Update]:
        """Read to the end, and return everything since the beginning."""
        async with asyncio.timeout(PATIENCE):
            async for update in self._updates:
                self.updates.append(update)
        return self.updates

    @property
    def progress(self) -> list[Any]:
        return [update.progress for update in self.updates if update.progress]

    @property
    def states(self) -> list[str]:
        """The states in the order they were told, without repeats."""
        told = [update.state for update in self.updates if update.state]
        return [s for at, s in enumerate(told) if at == 0 or told[at - 1] != s]

    @property
    def task(self) -> Task:
        """The task as the stream told it."""
        return fold(self.updates)


class Caller:
    def __init__(self, service: Reachable, wire: Wire = Wire.RPC, token: str = TOKEN) -> None:
        self.wire = wire
        self._http = service.http
        self._headers = {
            "A2A-Version": "1.0" if wire.modern else "0.3",
            "Authorization": f"Bearer {token}",
        }

    async def send(self, *content: Any, blocking: bool = True, **fields: Any) -> Task:
        """Send a message: each text or data value is a part; return the task."""
        params = self._params(content, blocking=blocking, **fields)
        return _answered(await self._call("send", params), self.wire)

    async def begin(self, *content: Any, **fields: Any) -> Task:
        """Send a message without waiting for the end."""
        return await self.send(*content, blocking=False, **fields)

    async def get(self, task_id: str) -> Task:
        return _task(await self._call("get", {"id": task_id}), self.wire)

    async def cancel(self, task_id: str) -> Task:
        return _task(await self._call("cancel", {"id": task_id}), self.wire)

    @asynccontextmanager
    async def stream(self, *content: Any, **fields: Any) -> AsyncGenerator[Following]:
        async with self._stream("stream", self._params(content, **fields)) as following:
            yield following

    @asynccontextmanager
    async def subscribe(self, task_id: str, after: str | None = None) -> AsyncGenerator[Following]:
        async with self._stream("subscribe", {"id": task_id}, after) as following:
            yield following

    async def wait(self, task_id: str, *states: str) -> Task:
        """Wait until a task is in one of the states, and return it."""
        task = await self.get(task_id)
        if task.state in states:
            return task
        try:
            async with self.subscribe(task_id) as following:
                await following.until(lambda update: update.state in states)
        except (RefusedError, AssertionError):
            pass  # it ended meanwhile, or a stream of the older line stopped at another prompt
        task = await self.get(task_id)
        assert task.state in states, task.raw
        return task

    async def ended(self, task_id: str) -> Task:
        return await self.wait(task_id, "completed", "failed", "canceled", "rejected")

    def _params(
        self,
        content: tuple[Any, ...],
        *,
        task: str | None = None,
        context: str | None = None,
        message_id: str | None = None,
        metadata: Any = None,
        blocking: bool = True,
    ) -> JsonObject:
        message: JsonObject = {
            "messageId": message_id or str(uuid.uuid4()),
            "role": "ROLE_USER" if self.wire.modern else "user",
            "parts": [self._part(one) for one in content],
        }
        if not self.wire.modern:
            message["kind"] = "message"
        if task is not None:
            message["taskId"] = task
        if context is not None:
            message["contextId"] = context
        configuration: JsonObject = (
            {"returnImmediately": not blocking} if self.wire.modern else {"blocking": blocking}
        )
        params: JsonObject = {"message": message, "configuration": configuration}
        if metadata is not None:
            params["metadata"] = metadata
        return params

    def _part(self, content: Any) -> JsonObject:
        text = isinstance(content, str)
        part: JsonObject = {"text": content} if text else {"data": content}
        return part if self.wire.modern else {"kind": "text" if text else "data", **part}

    async def _call(self, operation: str, params: JsonObject) -> Any:
        async with asyncio.timeout(PATIENCE):
            if self.wire.rpc:
                body = self._envelope(operation, params)
                answer = await self._http.post("/", json=body, headers=self._headers)
            else:
                verb, path = self._route(operation, params)
                body = params if operation == "send" else None
                answer = await self._http.request(verb, path, json=body, headers=self._headers)
        return _result(orjson.loads(answer.content))

    @asynccontextmanager
    async def _stream(
        self, operation: str, params: JsonObject, after: str | None = None
    ) -> AsyncGenerator[Following]:
        headers = self._headers | ({"Last-Event-ID": after} if after else {})
        verb, path, body = "POST", "/", self._envelope(operation, params)
        if not self.wire.rpc:
            verb, path = self._route(operation, params)
            body = params
        async with (
            asyncio.timeout(3 * PATIENCE),
            self._http.stream(verb, path, json=body, headers=headers) as response,
        ):
            if "text/event-stream" not in response.headers["content-type"]:
                _result(orjson.loads(await response.aread()))
                raise AssertionError("neither a stream nor an error")
            yield Following(_updates(response, self.wire))

    def _envelope(self, operation: str, params: JsonObject) -> JsonObject:
        modern, old = _METHODS[operation]
        method = modern if self.wire.modern else old
        return {"jsonrpc": "2.0", "id": 1, "method": method, "params": params}

    def _route(self, operation: str, params: JsonObject) -> tuple[str, str]:
        verb, path = _ROUTES[operation]
        return verb, ("" if self.wire.modern else "/v1") + path.format(id=params.get("id"))


_METHODS = {
    "send": ("SendMessage", "message/send"),
    "stream": ("SendStreamingMessage", "message/stream"),
    "get": ("GetTask", "tasks/get"),
    "cancel": ("CancelTask", "tasks/cancel"),
    "subscribe": ("SubscribeToTask", "tasks/resubscribe"),
}
_ROUTES = {
    "send": ("POST", "/message:send"),
    "stream": ("POST", "/message:stream"),
    "get": ("GET", "/tasks/{id}"),
    "cancel": ("POST", "/tasks/{id}:cancel"),
    "subscribe": ("POST", "/tasks/{id}:subscribe"),
}
_KINDS = {"task": "task", "status-update": "statusUpdate", "artifact-update": "artifactUpdate"}


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


def _result(body: Any) -> Any:
    if "error" in body:
        raise RefusedError(body["error"])
    if "code" in body:  # the whole body is the error in HTTP+JSON of 0.3
        raise RefusedError(body)
    return body["result"] if body.get("jsonrpc") else body


def _answered(result: Any, wire: Wire) -> Task:
    if wire is Wire.RPC03:
        return _task(result, wire)
    if wire.modern:
        ParseDict(result, SendMessageResponse())
    return _task(result["task"], wire)


def _task(raw: Any, wire: Wire) -> Task:
    if wire.modern:
        ParseDict(raw, SdkTask())
    elif raw.get("kind") == "task":
        v03.Task.model_validate(raw)
    else:  # a GET of the 0.3 line cannot tell which of its two spellings is wanted
        ParseDict(raw, a2a_v0_3_pb2.Task())
    return Task(raw)


async def _updates(response: httpx2.Response, wire: Wire) -> AsyncIterator[Update]:
    event_id = ""
    async for line in response.aiter_lines():
        if line.startswith("id: "):
            event_id = line[4:]
        if line.startswith("data: "):
            yield Update(event_id, _update(_result(orjson.loads(line[6:])), wire))


def _update(result: Any, wire: Wire) -> Any:
    if wire.modern:
        ParseDict(result, StreamResponse())
        return result
    told = result if wire is Wire.RPC03 else next(iter(result.values()))
    if "kind" not in told:
        ParseDict(result, a2a_v0_3_pb2.StreamResponse())
        return result
    _EVENT03.validate_python(told)
    return {_KINDS[told["kind"]]: told}
