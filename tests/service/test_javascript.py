"""The JavaScript SDK's own clients of both versions, unchanged, on both bindings."""

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

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
from tests.support.front import started
from tests.support.opencode import FakeOpenCode
from tests.support.receiver import receiving
from tests.support.service import Running

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.live]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def service(
    shared_opencode: FakeOpenCode, tmp_path_factory: pytest.TempPathFactory, database: str
) -> AsyncGenerator[Running]:
    state = tmp_path_factory.mktemp("state")
    async with started(shared_opencode, state, A2A_PUSH_ALLOW_PRIVATE_HOSTS="true") as running:
        yield running


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


def reassembled(events: list[Any]) -> dict[str, str]:
    """Return the text of each artifact, folded as Gemini CLI does (``A2AResultReassembler``)."""
    pieces: dict[str, list[str]] = {}
    for event in map(told, events):
        if "artifact" in event:
            artifact = event["artifact"]
            known = pieces.setdefault(artifact["artifactId"].rpartition(":")[2], [])
            if not event.get("append"):
                known.clear()
            known.append("".join(part.get("text", "") for part in artifact["parts"]))
    return {name: "".join(texts) for name, texts in pieces.items()}


@pytest.mark.parametrize("wire", [Wire.RPC03, Wire.RPC], indirect=True)
async def test_a_stream_folds_to_the_answer_over_the_binding_that_the_card_prefers(
    service: Running, opencode: FakeOpenCode, wire: Wire
) -> None:
    async with javascript_client(service, wire, by_card=True) as client:
        events = [event async for event in client.stream("stream", text="hello")]

    assert reassembled(events) == {"text": "one two three four"}


@pytest.mark.parametrize("wire", [Wire.REST03], indirect=True)
async def test_over_rest_the_client_of_0_3_does_not_say_which_pieces_are_to_be_appended(
    javascript: ForeignClient, opencode: FakeOpenCode
) -> None:
    events = [event async for event in javascript.stream("stream", text="hello")]

    # Why the card of 0.3 prefers JSON-RPC: what was appended replaces what was there.
    pieces = [event for event in map(told, events) if "artifact" in event]
    assert [one.get("append") for one in pieces] == [None] * len(pieces)
    assert reassembled(events)["text"] != "one two three four"


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


@pytest.mark.requirement("3.1.7-push-config")
@pytest.mark.requirement("4.3.3-push-delivery")
@pytest.mark.requirement("I22")
async def test_it_sets_reads_lists_and_deletes_webhooks_and_brings_one_with_a_message(
    javascript: ForeignClient, opencode: FakeOpenCode, wire: Wire
) -> None:
    async with receiving() as receiver:
        secret = {"url": receiver.url, "token": "t-1"}
        task = Task(await javascript.call("send", text="hello", push={"id": "inline", **secret}))
        inline = list(await receiver.until(lambda it: "completed" in it.states))
        made = await javascript.call("set_push", taskId=task.id, config={"id": "c", **secret})
        (again,) = (await receiver.until(lambda it: len(it.states) > len(inline)))[len(inline) :]
        read = await javascript.call("get_push", taskId=task.id, configId="c")
        listed = await javascript.call("list_push", taskId=task.id)
        await javascript.call("delete_push", taskId=task.id, configId="c")
        left = await javascript.call("list_push", taskId=task.id)
        with pytest.raises(RefusedError, match="TaskNotFoundError"):
            await javascript.call("get_push", taskId=task.id, configId="c")
        with pytest.raises(RefusedError, match="TaskNotFoundError"):
            await javascript.call("set_push", taskId="no-such-task", config={"id": "c", **secret})

    assert [one.state for one in inline] == ["working", "completed"]
    for one in (*inline, again):
        assert one.headers["x-a2a-notification-token"] == "t-1"
        content = one.content.get("statusUpdate", one.content)
        assert content.get("taskId", content.get("id")) == task.id
    assert made == read
    config = made if wire.modern else made["pushNotificationConfig"]
    assert (made["taskId"], config["id"], config["url"]) == (task.id, "c", receiver.url)
    assert not config.get("token")

    def ids(found: list[Any]) -> list[str]:
        return [(one.get("pushNotificationConfig") or one)["id"] for one in found]

    assert (ids(listed), ids(left)) == (["inline", "c"], ["inline"])
