"""What the A2A SDK gives for nothing: its default handler, its SQLite store, the same upstream.

Runs in its own environment (``bench/.env/sdk``). ``python -m bench.sdk_server PORT UPSTREAM DB``.
"""

# pyright: basic, reportMissingImports=false
# The SDK's optional parts are installed in that environment only.

import asyncio
import contextlib
import json
import sys

import uvicorn
from a2a.server.agent_execution import AgentExecutor, RequestContext
from a2a.server.events import EventQueue
from a2a.server.request_handlers import DefaultRequestHandler
from a2a.server.routes import (
    create_agent_card_routes,
    create_jsonrpc_routes,
    create_rest_routes,
)
from a2a.server.tasks import DatabaseTaskStore, TaskUpdater
from a2a.types import (
    AgentCapabilities,
    AgentCard,
    AgentInterface,
    AgentSkill,
    Part,
    Task,
    TaskState,
    TaskStatus,
)
from sqlalchemy.ext.asyncio import create_async_engine
from starlette.applications import Starlette

from bench.feed import END, Feed


class Bridge(AgentExecutor):
    def __init__(self, feed: Feed) -> None:
        self.feed = feed

    async def execute(self, context: RequestContext, event_queue: EventQueue) -> None:
        task_id, context_id = context.task_id or "", context.context_id or ""
        updater = TaskUpdater(event_queue, task_id, context_id)
        working = TaskStatus(state=TaskState.TASK_STATE_WORKING)
        history = [context.message] if context.message else []
        await event_queue.enqueue_event(
            Task(id=task_id, context_id=context_id, status=working, history=history)
        )
        deltas: asyncio.Queue[bytes] = asyncio.Queue()
        session = await self.feed.run(context.get_user_input(), deltas.put_nowait)
        first = True
        while (delta := await deltas.get()) is not END:
            part = Part(text=json.loads(b'"' + delta + b'"'))
            await updater.add_artifact([part], artifact_id="text", append=not first)
            first = False
        del self.feed.readers[session]
        await updater.complete()

    async def cancel(self, context: RequestContext, event_queue: EventQueue) -> None:
        raise NotImplementedError


def application(port: int, upstream: int, database: str) -> Starlette:
    feed = Feed(upstream)
    url = f"http://127.0.0.1:{port}"
    card = AgentCard(
        name="sdk",
        description="The SDK's own server",
        version="1",
        capabilities=AgentCapabilities(streaming=True),
        default_input_modes=["text/plain"],
        default_output_modes=["text/plain"],
        skills=[AgentSkill(id="chat", name="Chat", description="Answers", tags=["chat"])],
        supported_interfaces=[
            AgentInterface(url=url, protocol_binding=binding, protocol_version=version)
            for binding in ("JSONRPC", "HTTP+JSON")
            for version in ("1.0", "0.3")
        ],
    )
    store = DatabaseTaskStore(create_async_engine(f"sqlite+aiosqlite:///{database}"))
    handler = DefaultRequestHandler(Bridge(feed), store, card)

    @contextlib.asynccontextmanager
    async def lifespan(app: Starlette):
        await feed.start()
        yield
        await feed.stop()

    routes = [
        *create_agent_card_routes(card),
        *create_jsonrpc_routes(handler, "/", enable_v0_3_compat=True),
        *create_rest_routes(handler, enable_v0_3_compat=True),
    ]
    return Starlette(routes=routes, lifespan=lifespan)


if __name__ == "__main__":
    port, upstream = int(sys.argv[1]), int(sys.argv[2])
    uvicorn.run(application(port, upstream, sys.argv[3]), port=port, log_level="warning")
