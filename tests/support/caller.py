"""A caller of the running service: sends, streams, answers, cancels and calls methods on any wire.

``ask`` and ``post`` send any request, right or wrong, and return the answer exactly as it came; the
others return what a client would make of it. Every wait is bounded.
"""

import asyncio
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx2
import orjson

from opencode_a2a.events import Json, JsonObject
from tests.support.answers import (
    Answer,
    Refusal,
    RefusedError,
    Task,
    Update,
    Wire,
    fold,
    read_answer,
    read_result,
    read_task,
    read_updates,
)
from tests.support.service import TOKEN, Reachable

PATIENCE = 60.0
"""Seconds after which a test gives up waiting."""
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
    "push create": ("POST", "/tasks/{taskId}/pushNotificationConfigs"),
    "push get": ("GET", "/tasks/{taskId}/pushNotificationConfigs/{id}"),
    "push list": ("GET", "/tasks/{taskId}/pushNotificationConfigs"),
    "push delete": ("DELETE", "/tasks/{taskId}/pushNotificationConfigs/{id}"),
}


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
    """One caller on one wire."""

    def __init__(
        self,
        service: Reachable,
        wire: Wire = Wire.RPC,
        token: str = TOKEN,
        *,
        authorization: str | None = None,
    ) -> None:
        self.wire = wire
        self.http = service.http
        self.headers = {
            "A2A-Version": "1.0" if wire.modern else "0.3",
            "Authorization": authorization or f"Bearer {token}",
            "Content-Type": "application/json",
        }

    # As a client

    async def send(self, *content: Any, blocking: bool = True, **fields: Any) -> Task:
        """Send a message: each text or data value is a part; return the task."""
        params = self._params(content, blocking=blocking, **fields)
        return read_answer(await self._result("send", params), self.wire)

    async def begin(self, *content: Any, **fields: Any) -> Task:
        """Send a message without waiting for the end."""
        return await self.send(*content, blocking=False, **fields)

    async def get(self, task_id: str) -> Task:
        return read_task(await self._result("get", {"id": task_id}), self.wire)

    async def cancel(self, task_id: str) -> Task:
        return read_task(await self._result("cancel", {"id": task_id}), self.wire)

    async def _result(self, operation: str, params: JsonObject) -> Any:
        answer = await self.ask(operation, params)
        return read_result(orjson.loads(answer.content))

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

    @asynccontextmanager
    async def _stream(
        self, operation: str, params: JsonObject, after: str | None = None
    ) -> AsyncGenerator[Following]:
        headers = self.headers | ({"Last-Event-ID": after} if after else {})
        verb, path = self.target(operation, params)
        content = self.encode(operation, params)
        async with (
            asyncio.timeout(3 * PATIENCE),
            self.http.stream(verb, path, content=content, headers=headers) as response,
        ):
            if "text/event-stream" not in response.headers["content-type"]:
                read_result(orjson.loads(await response.aread()))
                raise AssertionError("neither a stream nor an error")
            yield Following(read_updates(response, self.wire))

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
        named = {"taskId": task, "contextId": context, "messageId": message_id}
        parts = [one if isinstance(one, str) else self.data(one) for one in content]
        params = self.message(*parts, **{key: value for key, value in named.items() if value})
        modern = self.wire.modern
        params["configuration"] = (
            {"returnImmediately": not blocking} if modern else {"blocking": blocking}
        )
        if metadata is not None:
            params["metadata"] = metadata
        return params

    # Methods of the extensions

    async def answer(self, method: str, params: Any = None, version: str | None = None) -> Any:
        """Call a JSON-RPC method by its name, and return the whole answer."""
        body: JsonObject = {"jsonrpc": "2.0", "id": 1, "method": method}
        if params is not None:
            body["params"] = params
        headers = self.headers | ({"A2A-Version": version} if version else {})
        async with asyncio.timeout(PATIENCE):
            answer = await self.http.post("/", json=body, headers=headers)
        assert answer.status_code == 200
        # An error of a 0.3 method that streams is an event.
        return orjson.loads(answer.content.removeprefix(b"data: "))

    async def method(self, name: str, params: Any = None, version: str | None = None) -> Any:
        """Call a method, and return its result."""
        answer = await self.answer(name, params, version)
        assert "error" not in answer, answer["error"]
        return answer["result"]

    async def refused(self, method: str, params: Any = None) -> Refusal:
        """Call a method that has to end in an error."""
        answer = await self.answer(method, params)
        assert "result" not in answer, answer["result"]
        error = answer["error"]
        info, *more = error["data"]
        fields = tuple(one["field"] for detail in more for one in detail["fieldViolations"])
        return Refusal(error["code"], info["reason"], info["metadata"], fields)

    # Any request

    async def ask(self, operation: str, params: Mapping[str, Any], **headers: str) -> Answer:
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
        return verb, ("" if self.wire.modern else "/v1") + path.format_map(
            {"id": params.get("id"), "taskId": params.get("taskId")}
        )

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


async def stray(opencode_url: str, caller: Caller) -> str:
    """Have a session of the caller's ask for a permission at OpenCode's own terminal.

    The OpenCode has to play a recording with one; its id is returned.
    """
    async with (
        asyncio.timeout(PATIENCE),
        httpx2.AsyncClient(base_url=opencode_url, trust_env=False) as terminal,
    ):
        session_id = (await terminal.post("/session", json={"title": "By hand"})).json()["id"]
        change = {"session_id": session_id, "request": {"title": "Mine"}}
        await caller.method("opencode.sessions.update", change)  # it is the caller's from now on
        prompt = {"parts": [{"type": "text", "text": "run it"}]}
        await terminal.post(f"/session/{session_id}/prompt_async", json=prompt)
        while not (pending := (await terminal.get("/permission")).json()):
            pass
    return pending[0]["id"]
