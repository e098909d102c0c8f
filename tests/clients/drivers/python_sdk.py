"""The Python SDK of A2A 1.0.

Shown is what the agent says to the state of the task; else its last artifact, in a stream the one
that was told of last.

usage: python python_sdk.py URL TOKEN {blocking,streaming}
"""

import asyncio
import sys
import uuid

import httpx
from a2a.client import A2ACardResolver, ClientConfig, ClientFactory
from a2a.server.tasks.task_manager import append_artifact_to_task
from a2a.types import Message, Part, Role, SendMessageRequest, Task, TaskState
from talk import Say, converse

url, token, delivery = sys.argv[1:]


async def begin() -> Say:
    http = httpx.AsyncClient(headers={"Authorization": f"Bearer {token}"}, timeout=60)
    card = await A2ACardResolver(http, url).get_agent_card()
    config = ClientConfig(httpx_client=http, streaming=delivery == "streaming")
    client = ClientFactory(config).create(card)
    task = Task()

    async def say(text: str) -> str:
        waits = task.status.state == TaskState.TASK_STATE_INPUT_REQUIRED
        message = Message(
            message_id=str(uuid.uuid4()),
            role=Role.ROLE_USER,
            parts=[Part(text=text)],
            context_id=task.context_id,
            task_id=task.id if waits else "",
        )
        last = -1
        async for event in client.send_message(SendMessageRequest(message=message)):
            match event.WhichOneof("payload"):
                case "task":
                    task.CopyFrom(event.task)
                case "artifact_update":
                    append_artifact_to_task(task, event.artifact_update)
                    ids = [artifact.artifact_id for artifact in task.artifacts]
                    last = ids.index(event.artifact_update.artifact.artifact_id)
                case "status_update":
                    task.status.CopyFrom(event.status_update.status)
                case _:
                    pass
        if task.status.HasField("message"):
            return "".join(part.text for part in task.status.message.parts)
        return "".join(part.text for part in task.artifacts[last].parts)

    return say


asyncio.run(converse(begin))
