"""The Python SDK's client of A2A 0.3, driven by lines of JSON on stdin.

Runs in an environment of its own (``requirements.txt``), because that SDK cannot be installed
beside the present one. The lines are those of ``tests/support/js/client.mjs``.

usage: python client.py BINDING URL TOKEN
"""

import asyncio
import json
import sys
import uuid
from collections.abc import AsyncIterator
from typing import Any

import httpx
from a2a.client import A2ACardResolver, Client, ClientConfig, ClientFactory
from a2a.types import (
    GetTaskPushNotificationConfigParams,
    Message,
    Part,
    PushNotificationConfig,
    Role,
    TaskIdParams,
    TaskPushNotificationConfig,
    TaskQueryParams,
    TextPart,
)


def message(asked: dict[str, Any]) -> Message:
    return Message(
        role=Role.user,
        parts=[Part(root=TextPart(text=asked["text"]))],
        message_id=str(uuid.uuid4()),
        task_id=asked.get("taskId"),
    )


async def connect(http: httpx.AsyncClient, binding: str, url: str, **options: Any) -> Client:
    card = await A2ACardResolver(http, url).get_agent_card()
    # The SDK follows the preference of the card before that of its user.
    card.preferred_transport = binding
    config = ClientConfig(httpx_client=http, supported_transports=[binding], **options)
    return ClientFactory(config).create(card)


class Calls:
    def __init__(self, http: httpx.AsyncClient, binding: str, url: str) -> None:
        self._http, self._binding, self._url = http, binding, url

    async def _client(self, **options: Any) -> Client:
        return await connect(self._http, self._binding, self._url, **options)

    async def send(self, asked: dict[str, Any]) -> AsyncIterator[Any]:
        client = await self._client(streaming=False, polling=bool(asked.get("background")))
        async for task, _ in client.send_message(message(asked)):
            yield task

    async def stream(self, asked: dict[str, Any]) -> AsyncIterator[Any]:
        client = await self._client()
        async for task, update in client.send_message(message(asked)):
            yield update or task

    async def resubscribe(self, asked: dict[str, Any]) -> AsyncIterator[Any]:
        client = await self._client()
        async for task, update in client.resubscribe(TaskIdParams(id=asked["taskId"])):
            yield update or task

    async def get(self, asked: dict[str, Any]) -> AsyncIterator[Any]:
        yield await (await self._client()).get_task(TaskQueryParams(id=asked["taskId"]))

    async def cancel(self, asked: dict[str, Any]) -> AsyncIterator[Any]:
        yield await (await self._client()).cancel_task(TaskIdParams(id=asked["taskId"]))

    async def set_push(self, asked: dict[str, Any]) -> AsyncIterator[Any]:
        config = PushNotificationConfig(**asked["config"])
        params = TaskPushNotificationConfig(
            task_id=asked["taskId"], push_notification_config=config
        )
        yield await (await self._client()).set_task_callback(params)

    async def get_push(self, asked: dict[str, Any]) -> AsyncIterator[Any]:
        params = GetTaskPushNotificationConfigParams(
            id=asked["taskId"], push_notification_config_id=asked["configId"]
        )
        yield await (await self._client()).get_task_callback(params)

    async def card(self, asked: dict[str, Any]) -> AsyncIterator[Any]:
        yield await (await self._client()).get_card()


def say(**values: Any) -> None:
    print(json.dumps(values), flush=True)


async def answer(calls: Calls, asked: dict[str, Any]) -> None:
    number = asked["id"]
    try:
        async for event in getattr(calls, asked["call"])(asked):
            say(id=number, event=event.model_dump(mode="json", by_alias=True, exclude_none=True))
        say(id=number, done=True)
    except Exception as error:
        say(id=number, error={"name": type(error).__name__, "message": str(error)})


async def main(binding: str, url: str, token: str) -> None:
    headers = {"Authorization": f"Bearer {token}"}
    async with (
        httpx.AsyncClient(headers=headers, timeout=30, trust_env=False) as http,
        asyncio.TaskGroup() as group,
    ):
        calls = Calls(http, binding, url)
        say(ready=True)
        while line := await asyncio.to_thread(sys.stdin.readline):
            group.create_task(answer(calls, json.loads(line)))


asyncio.run(main(*sys.argv[1:]))
