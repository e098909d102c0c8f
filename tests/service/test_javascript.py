"""The JavaScript SDK's own clients of both lines, unchanged, on both bindings."""

import asyncio
import itertools
import shutil
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import orjson
import pytest
import pytest_asyncio

from tests.support.caller import Task, Wire
from tests.support.opencode import FakeOpenCode
from tests.support.service import TOKEN, Running

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.live]

ROOT = Path(__file__).parent.parent.parent
SCRIPT = ROOT / "tests" / "support" / "js" / "client.mjs"
SECONDS = 20


class RefusedError(Exception):
    """The client raised an error; its name is the first argument."""


class JavaScript:
    """A client in a process of its own."""

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


@pytest_asyncio.fixture(loop_scope="module")
async def javascript(
    service: Running, opencode: FakeOpenCode, wire: Wire
) -> AsyncGenerator[JavaScript]:
    async with running(service, wire) as client:
        yield client


@asynccontextmanager
async def running(service: Running, wire: Wire) -> AsyncGenerator[JavaScript]:
    node = shutil.which("node")
    if node is None or not (ROOT / "node_modules" / "a2a-sdk-1.0").exists():
        pytest.fail("The JavaScript SDK is not installed: run `make test`", pytrace=False)
    line, binding = "1.0" if wire.modern else "0.3", "JSONRPC" if wire.rpc else "HTTP+JSON"
    process = await asyncio.create_subprocess_exec(
        *(node, str(SCRIPT), line, binding, service.url, TOKEN),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        limit=2**20,
    )
    client = JavaScript(process)
    async with asyncio.TaskGroup() as group:
        try:
            await client.ready()
            group.create_task(client.read())
            yield client
        finally:
            process.kill()
            await process.wait()


def told(event: Any) -> Any:
    """Return what an event is about, whatever the line calls it."""
    if "kind" in event:
        return event
    (content,) = event.values()
    return content


def states(events: list[Any]) -> list[str]:
    return [Task(told(event)).state for event in events if "status" in told(event)]


def text(events: list[Any]) -> str:
    artifacts = [told(event)["artifact"] for event in events if "artifact" in told(event)]
    return "".join(part["text"] for artifact in artifacts for part in artifact["parts"])


@pytest.mark.requirement("5-same-results")
async def test_it_sends_streams_reads_resubscribes_and_cancels(
    javascript: JavaScript, opencode: FakeOpenCode
) -> None:
    sent = Task(await javascript.call("send", text="hello"))
    assert (sent.state, sent.text) == ("completed", "one two three four")

    events = [event async for event in javascript.stream("stream", text="hello")]
    assert states(events)[-1] == "completed"
    assert text(events) == "one two three four"

    read = Task(await javascript.call("get", taskId=told(events[0])["id"]))
    assert (read.state, read.text, read.history) == ("completed", "one two three four", ["hello"])

    hold = opencode.hold(count=2)
    begun = Task(await javascript.call("send", text="hello", background=True))
    async with asyncio.timeout(SECONDS):
        await hold.reached.wait()
    following = javascript.stream("resubscribe", taskId=begun.id)
    joined = [await anext(following)]
    opencode.release()
    joined += [event async for event in following]
    assert Task(told(joined[0])).id == begun.id
    assert states(joined)[-1] == "completed"

    hold = opencode.hold(count=2)
    begun = Task(await javascript.call("send", text="hello", background=True))
    async with asyncio.timeout(SECONDS):
        await hold.reached.wait()
    canceled = Task(await javascript.call("cancel", taskId=begun.id))
    assert canceled.state == "canceled"


@pytest.mark.requirement("5-same-results")
async def test_it_answers_prompts_reads_the_card_and_knows_errors(
    javascript: JavaScript, opencode: FakeOpenCode
) -> None:
    card = await javascript.call("card")
    assert card["name"] == "OpenCode A2A"

    opencode.play("permission-once")
    asked = Task(await javascript.call("send", text="run it"))
    done = Task(await javascript.call("send", text="once", taskId=asked.id))
    assert (asked.state, done.state, done.text) == ("input_required", "completed", "after")

    for call, error in (("get", "TaskNotFoundError"), ("cancel", "TaskNotFoundError")):
        with pytest.raises(RefusedError, match=error):
            await javascript.call(call, taskId="no-such-task")
    with pytest.raises(RefusedError, match="TaskNotCancelableError"):
        await javascript.call("cancel", taskId=done.id)
    with pytest.raises(RefusedError, match="UnsupportedOperationError"):
        await javascript.call("send", text="more", taskId=done.id)
