"""Both official clients of A2A 0.3, unchanged: the Python and the JavaScript SDK."""

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import AbstractAsyncContextManager

import pytest
import pytest_asyncio

from tests.support.answers import Task, Wire
from tests.support.foreign import (
    SECONDS,
    ForeignClient,
    RefusedError,
    javascript_client,
    python03_client,
    states,
    text,
)
from tests.support.front import Serve
from tests.support.opencode import FakeOpenCode
from tests.support.receiver import receiving
from tests.support.service import Running

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.live]

Run = Callable[[Running, Wire], AbstractAsyncContextManager[ForeignClient]]
CLIENTS = {"python": python03_client, "javascript": javascript_client}


@pytest.fixture(params=[Wire.RPC03, Wire.REST03], ids=lambda wire: wire.value)
def wire(request: pytest.FixtureRequest) -> Wire:
    return request.param


@pytest.fixture(params=CLIENTS)
def run(request: pytest.FixtureRequest) -> Run:
    return CLIENTS[request.param]


@pytest_asyncio.fixture(loop_scope="module")
async def client(
    run: Run, service: Running, opencode: FakeOpenCode, wire: Wire
) -> AsyncGenerator[ForeignClient]:
    async with run(service, wire) as running:
        yield running


@pytest.mark.parametrize("run", ["python"], indirect=True)  # JavaScript has a file of its own
async def test_it_sends_streams_reads_and_cancels(
    client: ForeignClient, opencode: FakeOpenCode
) -> None:
    sent = Task(await client.call("send", text="hello"))
    assert (sent.state, sent.text) == ("completed", "one two three four")

    events = [event async for event in client.stream("stream", text="hello")]
    assert (states(events)[-1], text(events)) == ("completed", "one two three four")

    hold = opencode.hold(count=2)
    begun = Task(await client.call("send", text="hello", background=True))
    async with asyncio.timeout(SECONDS):
        await hold.reached.wait()
    canceled = Task(await client.call("cancel", taskId=begun.id))
    assert canceled.state == "canceled"


@pytest.mark.parametrize("run", ["python"], indirect=True)
@pytest.mark.requirement("3.1.7-push-config")
async def test_it_sets_a_webhook_that_is_told(
    run: Run, wire: Wire, serve: Serve, opencode: FakeOpenCode
) -> None:
    service = await serve(A2A_PUSH_ALLOW_PRIVATE_HOSTS="true")
    async with run(service, wire) as client, receiving() as receiver:
        task = Task(await client.call("send", text="hello"))
        config = {"id": "c", "url": receiver.url, "token": "t"}
        made = await client.call("set_push", taskId=task.id, config=config)
        read = await client.call("get_push", taskId=task.id, configId="c")
        (told,) = await receiver.ended()

    assert made == read
    assert made["taskId"] == task.id
    config = made["pushNotificationConfig"]
    assert (config["id"], config["url"], config.get("token") or None) == ("c", receiver.url, None)
    assert (Task(told.content).id, Task(told.content).text) == (task.id, task.text)


@pytest.mark.requirement("ours-keep-alive")
async def test_it_outlasts_a_silence(
    run: Run, wire: Wire, serve: Serve, opencode: FakeOpenCode
) -> None:
    service = await serve(A2A_STREAM_KEEPALIVE_SECONDS="0.05")
    hold = opencode.hold(count=2)

    async with run(service, wire) as client:
        begun = Task(await client.call("send", text="hello", background=True))
        async with asyncio.timeout(SECONDS):
            await hold.reached.wait()
        following = client.stream("resubscribe", taskId=begun.id)
        events = [await anext(following)]
        await _pings(service, begun.id, 4)
        opencode.release()
        events += [event async for event in following]

    assert states(events)[-1] == "completed"


async def _pings(service: Running, task_id: str, count: int) -> None:
    """Wait until a stream that began now was sent so many keep-alive comments."""
    call = {"jsonrpc": "2.0", "id": 1, "method": "tasks/resubscribe", "params": {"id": task_id}}
    async with (
        asyncio.timeout(SECONDS),
        service.http.stream("POST", "/", json=call, headers={"A2A-Version": "0.3"}) as response,
    ):
        async for line in response.aiter_lines():
            count -= line.startswith(":")
            if not count:
                return


@pytest.mark.parametrize("wire", [Wire.RPC03], indirect=True, ids=lambda wire: wire.value)
async def test_it_reads_why_a_stream_was_refused(client: ForeignClient) -> None:
    with pytest.raises(RefusedError, match="Task not found") as unknown:
        _ = [event async for event in client.stream("resubscribe", taskId="no-such-task")]
    with pytest.raises(RefusedError, match="Task not found") as foreign:
        _ = [event async for event in client.stream("stream", text="hi", taskId="no-such-task")]
    with pytest.raises(RefusedError, match="blank") as blank:
        _ = [event async for event in client.stream("stream", text=" ")]

    assert "-32001" in str(unknown.value)
    assert "-32001" in str(foreign.value)
    assert "-32602" in str(blank.value)
