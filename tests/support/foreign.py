"""Stock clients that run in a process of their own, driven by lines of JSON.

``js/client.mjs`` and ``sdk03/client.py`` say what the lines are.
"""

import asyncio
import itertools
import shutil
from collections.abc import AsyncGenerator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import orjson
import pytest

from tests.support.answers import Task, Wire
from tests.support.service import TOKEN, Running

ROOT = Path(__file__).parent.parent.parent
SECONDS = 60


class RefusedError(Exception):
    """The client raised an error: its name and its message."""


class ForeignClient:
    def __init__(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        self._stdin, self._stdout = process.stdin, process.stdout
        self._ids = itertools.count(1)
        self._answers: dict[int, asyncio.Queue[Any]] = {}

    async def read(self) -> None:
        """Sort what the client tells by the call it belongs to."""
        async for line in self._stdout:
            told = orjson.loads(line)
            self._answers[told["id"]].put_nowait(told)

    async def ready(self) -> None:
        async with asyncio.timeout(SECONDS):
            assert orjson.loads(await self._stdout.readline()) == {"ready": True}

    async def stream(self, call: str, **asked: Any) -> AsyncGenerator[Any]:
        number = next(self._ids)
        answers = self._answers[number] = asyncio.Queue()
        self._stdin.write(orjson.dumps({"id": number, "call": call, **asked}) + b"\n")
        while True:
            async with asyncio.timeout(SECONDS):
                told = await answers.get()
            if "event" in told:
                yield told["event"]
            elif "error" in told:
                raise RefusedError(told["error"]["name"], told["error"]["message"])
            else:
                return

    async def call(self, call: str, **asked: Any) -> Any:
        (answer,) = [event async for event in self.stream(call, **asked)]
        return answer


def javascript_client(
    service: Running, wire: Wire, token: str = TOKEN, *, by_card: bool = False
) -> AbstractAsyncContextManager[ForeignClient]:
    """Run the JavaScript SDK of a version; ``by_card``: over the binding that the card prefers."""
    node = shutil.which("node")
    if node is None or not (ROOT / "node_modules" / "a2a-sdk-1.0").exists():
        pytest.fail("The JavaScript SDK is not installed: run `make test`", pytrace=False)
    script = str(ROOT / "tests" / "support" / "js" / "client.mjs")
    version = "1.0" if wire.modern else "0.3"
    binding = "ANY" if by_card else _binding(wire)
    return _running(node, script, version, binding, service.url, token)


def python03_client(service: Running, wire: Wire) -> AbstractAsyncContextManager[ForeignClient]:
    """Run the last Python SDK that speaks 0.3 by itself."""
    python = ROOT / ".tools" / "a2a-sdk-0.3" / "bin" / "python"
    if not python.exists():
        pytest.fail("The Python SDK of A2A 0.3 is not installed: run `make test`", pytrace=False)
    script = str(ROOT / "tests" / "support" / "sdk03" / "client.py")
    return _running(str(python), script, _binding(wire), service.url, TOKEN)


def _binding(wire: Wire) -> str:
    return "JSONRPC" if wire.rpc else "HTTP+JSON"


@asynccontextmanager
async def _running(*command: str) -> AsyncGenerator[ForeignClient]:
    process = await asyncio.create_subprocess_exec(
        *command, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, limit=2**20
    )
    client = ForeignClient(process)
    async with asyncio.TaskGroup() as group:
        try:
            await client.ready()
            group.create_task(client.read())
            yield client
        finally:
            process.kill()
            await process.wait()


def told(event: Any) -> Any:
    """Return what an event is about, whatever the version calls it."""
    if "kind" in event:
        return event
    (content,) = event.values()
    return content


def states(events: list[Any]) -> list[str]:
    return [Task(told(event)).state for event in events if "status" in told(event)]


def text(events: list[Any]) -> str:
    artifacts = [told(event)["artifact"] for event in events if "artifact" in told(event)]
    return "".join(part["text"] for artifact in artifacts for part in artifact["parts"])
