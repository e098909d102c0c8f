"""A receiver of push notifications: keeps what comes, and answers as it is told."""

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Self

import orjson
from starlette.requests import Request
from starlette.types import Receive, Scope, Send

from tests.support.running import running

PATIENCE = 60.0
OK: tuple[int, Mapping[str, str]] = (204, {})


@dataclass(frozen=True)
class Received:
    path: str
    headers: Mapping[str, str]
    body: bytes

    @property
    def content(self) -> Any:
        return orjson.loads(self.body)

    @property
    def state(self) -> str:
        """The state that it tells of, in the spelling of the states here."""
        content = self.content
        status = content.get("statusUpdate", content)["status"]
        return status["state"].removeprefix("TASK_STATE_").lower().replace("-", "_")

    @property
    def id(self) -> str:
        return self.headers["webhook-id"]

    @property
    def seq(self) -> int:
        return int(self.id.rpartition("-")[2])


class Receiver:
    """An ASGI application; ``url`` is where it is."""

    def __init__(self) -> None:
        self.url = ""
        self.received: list[Received] = []
        self.answers: deque[tuple[int, Mapping[str, str]]] = deque()
        """What is answered next: status and headers; then everything is taken."""
        self.gone: set[str] = set()
        """The paths at which nobody is any more (410)."""
        self.asked: Callable[[], None] = _nothing
        """Called when a notification has come, before it is answered."""
        self.answered: Callable[[], None] = _nothing
        self.gate = asyncio.Event()
        """While it is cleared, nothing is answered."""
        self.gate.set()
        self._arrived = asyncio.Condition()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        request = Request(scope, receive)
        body = await request.body()
        status, headers = self.answers.popleft() if self.answers else OK
        status = 410 if request.url.path in self.gone else status
        async with self._arrived:
            self.received.append(Received(request.url.path, request.headers, body))
            self._arrived.notify_all()
        self.asked()
        await self.gate.wait()
        raw = [(name.encode(), value.encode()) for name, value in headers.items()]
        await send({"type": "http.response.start", "status": status, "headers": raw})
        await send({"type": "http.response.body"})
        self.answered()

    async def until(self, wanted: Callable[[Self], bool]) -> list[Received]:
        """Wait for something to be true of what came, and return all of it."""
        async with asyncio.timeout(PATIENCE), self._arrived:
            await self._arrived.wait_for(lambda: wanted(self))
        return self.received

    async def ended(self) -> list[Received]:
        """Wait until the end of a task was told."""
        return await self.until(lambda _: bool(self.states) and self.states[-1] in ENDS)

    @property
    def states(self) -> list[str]:
        return [one.state for one in self.received]


def _nothing() -> None:
    """Nobody wants to know."""


ENDS = ("completed", "failed", "canceled", "rejected")


@asynccontextmanager
async def receiving() -> AsyncGenerator[Receiver]:
    receiver = Receiver()
    async with running(receiver) as url:
        receiver.url = f"{url}/hook"
        yield receiver
