"""The JavaScript SDK's own clients of both versions, unchanged, on both bindings."""

import asyncio
from collections.abc import AsyncGenerator

import pytest
import pytest_asyncio

from tests.support.answers import Task, Wire
from tests.support.foreign import (
    SECONDS,
    ForeignClient,
    RefusedError,
    javascript_client,
    states,
    text,
    told,
)
from tests.support.opencode import FakeOpenCode
from tests.support.service import Running

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.live]


@pytest_asyncio.fixture(loop_scope="module")
async def javascript(
    service: Running, opencode: FakeOpenCode, wire: Wire
) -> AsyncGenerator[ForeignClient]:
    async with javascript_client(service, wire) as client:
        yield client


@pytest.mark.requirement("5-same-results")
async def test_it_sends_streams_reads_resubscribes_and_cancels(
    javascript: ForeignClient, opencode: FakeOpenCode
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
    javascript: ForeignClient, opencode: FakeOpenCode
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
