"""Calls of extension methods, as a client makes them."""

import uuid
from dataclasses import dataclass
from typing import Any

import httpx2
import orjson

from opencode_a2a.events import JsonObject
from tests.support.service import Running

Credentials = dict[str, str]


@dataclass(frozen=True, slots=True)
class Refusal:
    """An error as the 1.0 line tells it."""

    code: int
    reason: str
    data: JsonObject
    fields: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Client:
    """One caller of a service."""

    http: httpx2.AsyncClient
    credentials: Credentials

    async def answer(self, method: str, params: Any = None, version: str = "1.0") -> Any:
        """Call a method and return the whole answer."""
        body: JsonObject = {"jsonrpc": "2.0", "id": 1, "method": method}
        if params is not None:
            body["params"] = params
        headers = {"A2A-Version": version, **self.credentials}
        answer = await self.http.post("/", json=body, headers=headers)
        assert answer.status_code == 200
        # An error of a 0.3 method that streams is an event.
        return orjson.loads(answer.content.removeprefix(b"data: "))

    async def call(self, method: str, params: Any = None, version: str = "1.0") -> Any:
        """Call a method and return its result."""
        answer = await self.answer(method, params, version)
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

    async def send(self, text: str, **fields: Any) -> Any:
        """Send a message, wait for the task to stop, and return it."""
        message: JsonObject = {
            "messageId": str(uuid.uuid4()),
            "role": "ROLE_USER",
            "parts": [{"text": text}],
        }
        sent = await self.call("SendMessage", {"message": message, **fields})
        return sent["task"]


def client(service: Running, token: str | None = None) -> Client:
    """Return a caller: the one of the service, or the one with another token."""
    credentials = {"Authorization": f"Bearer {token}"} if token else {}
    return Client(service.http, credentials)


def session_of(task: Any) -> str:
    return task["metadata"]["shared"]["session"]["id"]
