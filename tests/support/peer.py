"""Agents of somebody else: one made with the SDK, and crooked ones made by hand.

The SDK's agent runs its default handler, so that what our client speaks is measured by what
other people's servers understand. What it does is in the words it is sent.
"""

import asyncio
import os
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

# The SDK's tracing wraps every coroutine, and complains when one is cancelled.
os.environ["OTEL_INSTRUMENTATION_A2A_SDK_ENABLED"] = "false"

import orjson
from a2a.helpers import (
    new_data_part,
    new_task_from_user_message,
    new_text_message,
    new_text_part,
)
from a2a.server.agent_execution import AgentExecutor, RequestContext
from a2a.server.events.event_queue import EventQueue
from a2a.server.request_handlers import DefaultRequestHandlerV2
from a2a.server.routes import (
    create_agent_card_routes,
    create_jsonrpc_routes,
    create_rest_routes,
)
from a2a.server.tasks import InMemoryTaskStore, TaskUpdater
from a2a.types import AgentCapabilities, AgentCard, AgentInterface, AgentSkill, Role
from a2a.types import Message as SdkMessage
from starlette.applications import Starlette
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tests.support.running import running

CHUNKS = ["Hel", "lo ", "wor", "ld"]
ANSWER = "".join(CHUNKS)


@dataclass
class Agent:
    """A running agent, what it was asked, and the gate before the second half of its answer."""

    card: AgentCard
    url: str = ""
    requests: list[tuple[str, str, dict[str, str]]] = field(
        default_factory=list[tuple[str, str, dict[str, str]]]
    )
    gate: asyncio.Event = field(default_factory=asyncio.Event)
    cuts: list[int] = field(default_factory=list[int])
    """After how many frames each stream to come breaks off; the streams after that do not."""
    cut_cleanly: bool = True
    working: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when a task that hangs has told so."""
    contexts: list[str] = field(default_factory=list[str])

    def paths(self) -> list[str]:
        return [path for _, path, _ in self.requests]


class Scripted(AgentExecutor):
    """Does what the first word of the message says."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent

    async def execute(self, context: RequestContext, event_queue: EventQueue) -> None:
        text = context.get_user_input()
        task_id, context_id = context.task_id or "", context.context_id or ""
        self._agent.contexts.append(context_id)
        if text == "message":
            reply = new_text_message("only words", context_id=context_id, role=Role.ROLE_AGENT)
            await event_queue.enqueue_event(reply)
            return
        told = TaskUpdater(event_queue, task_id, context_id)
        if context.current_task is None:
            assert context.message is not None
            await event_queue.enqueue_event(new_task_from_user_message(context.message))
        await told.start_work()
        await self._act(text, told, context)

    async def _act(self, text: str, told: TaskUpdater, context: RequestContext) -> None:
        match text.split():
            case ["say", *_]:
                await self._say(told)
                await told.complete()
            case ["channels"]:
                await self._channels(told)
                await told.complete()
            case ["status"]:
                await told.complete(_message("told at the end"))
            case ["fail"]:
                await told.failed(_message("it broke"))
            case ["ask"]:
                await _artifact(told, "a", "before ")
                await told.requires_input(_message("which one?"))
            case ["signin"]:
                await told.requires_auth(_message("sign in at the provider"))
            case ["hostile"]:
                await _artifact(told, "a", "a\x1b]0;owned\x07b\x1b[2Jc\r\x9bd\u202ee\tf\n")
                await told.failed(_message("\x1b[31mred"))
            case ["hang"]:
                await _artifact(told, "a", "hanging")
                self._agent.working.set()
                await asyncio.Event().wait()
            case ["files"]:
                assert context.message is not None
                names = [
                    f"{p.filename}:{p.media_type}:{len(p.raw)}" for p in context.message.parts[1:]
                ]
                await _artifact(told, "a", " ".join(names))
                await told.complete()
            case _:
                await _artifact(told, "a", f"got {text}", append=context.current_task is not None)
                await told.complete()

    async def _say(self, told: TaskUpdater) -> None:
        for number, chunk in enumerate(CHUNKS):
            if number == 2:
                await self._agent.gate.wait()
            await _artifact(told, "a", chunk, append=number > 0)

    async def _channels(self, told: TaskUpdater) -> None:
        def channel(name: str) -> dict[str, object]:
            return {"shared": {"stream": {"block_type": name}}}

        tool = {"call_id": "c1", "tool": "bash", "status": "running", "title": "list files"}
        await told.add_artifact(
            [new_text_part("let me think")], "r", metadata=channel("reasoning"), append=False
        )
        await told.add_artifact([new_data_part(tool)], "t", metadata=channel("tool_call"))
        await told.add_artifact([new_text_part("the answer")], "x", metadata=channel("text"))

    async def cancel(self, context: RequestContext, event_queue: EventQueue) -> None:
        await TaskUpdater(event_queue, context.task_id or "", context.context_id or "").cancel()


def _message(text: str) -> SdkMessage:
    return new_text_message(text, role=Role.ROLE_AGENT)


async def _artifact(told: TaskUpdater, name: str, text: str, *, append: bool = False) -> None:
    await told.add_artifact([new_text_part(text)], name, append=append)


class Edge:
    """In front of the agent: notes requests, and breaks streams off."""

    def __init__(self, app: ASGIApp, agent: Agent) -> None:
        self._app = app
        self._agent = agent

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = {name.decode(): value.decode() for name, value in scope["headers"]}
        self._agent.requests.append((scope["method"], scope["path"], headers))
        await self._app(scope, receive, self._cutting(send))

    def _cutting(self, send: Send) -> Send:
        left: int | None = None

        async def cut(message: Message) -> None:
            nonlocal left
            if message["type"] == "http.response.start":
                kind = dict(message["headers"]).get(b"content-type", b"")
                if kind.startswith(b"text/event-stream") and self._agent.cuts:
                    left = self._agent.cuts.pop(0)
            await send(message)
            if message["type"] == "http.response.body" and left is not None:
                left -= 1
                if left == 0:
                    await self._cut(send)

        return cut

    async def _cut(self, send: Send) -> None:
        self._agent.gate.set()
        if self._agent.cut_cleanly:
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        raise ConnectionError("cut by the test")


@asynccontextmanager
async def sdk_agent(
    binding: str = "JSONRPC", version: str = "1.0", *, streaming: bool = True
) -> AsyncGenerator[Agent]:
    """Run an agent made with the SDK that offers one binding in one version."""
    interface = AgentInterface(url="", protocol_binding=binding, protocol_version=version)
    card = AgentCard(
        name="Scripted",
        description="does as it is told",
        version="1.2.3",
        supported_interfaces=[interface],
        capabilities=AgentCapabilities(streaming=streaming),
        default_input_modes=["text/plain"],
        default_output_modes=["text/plain"],
        skills=[AgentSkill(id="s", name="s", description="s", tags=["s"])],
    )
    agent = Agent(card)
    handler = DefaultRequestHandlerV2(Scripted(agent), InMemoryTaskStore(), card)
    routes = [
        *create_agent_card_routes(card),
        *create_jsonrpc_routes(handler, "/rpc", enable_v0_3_compat=True),
        *create_rest_routes(handler, enable_v0_3_compat=True),
    ]
    before = asyncio.all_tasks()
    try:
        async with running(Edge(Starlette(routes=routes), agent)) as url:
            agent.url = url
            card.supported_interfaces[0].url = f"{url}/rpc" if binding == "JSONRPC" else url
            agent.gate.set()
            yield agent
    finally:
        # The SDK keeps tasks for work that is not finished.
        left = asyncio.all_tasks() - before
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)


@dataclass
class Stranger:
    """A server that answers as the test says, and what it was sent."""

    url: str = ""
    requests: list[tuple[str, str, dict[str, str]]] = field(
        default_factory=list[tuple[str, str, dict[str, str]]]
    )


Answer = Callable[[Stranger, Scope, Receive, Send], Awaitable[None]]


@asynccontextmanager
async def stranger(answer: Answer) -> AsyncGenerator[Stranger]:
    """Run a server of which every answer is made by hand."""
    made = Stranger()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        headers = {name.decode(): value.decode() for name, value in scope["headers"]}
        made.requests.append((scope["method"], scope["path"], headers))
        await answer(made, scope, receive, send)

    async with running(app) as url:
        made.url = url
        yield made


def card_json(url: str, **more: object) -> bytes:
    """A card of 0.3 with one interface, as small as it can be."""
    card = {
        "name": "Stranger",
        "url": url,
        "protocolVersion": "0.3.0",
        "preferredTransport": "JSONRPC",
        "capabilities": {"streaming": True},
    }
    return orjson.dumps(card | more)


async def reply(
    send: Send,
    body: bytes,
    status: int = 200,
    *,
    kind: str = "application/json",
    headers: dict[str, str] | None = None,
) -> None:
    listed = {"content-type": kind} | (headers or {})
    encoded = [(name.encode(), value.encode()) for name, value in listed.items()]
    await send({"type": "http.response.start", "status": status, "headers": encoded})
    await send({"type": "http.response.body", "body": body})
