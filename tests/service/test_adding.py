"""A message on a task that is working, on every version and binding."""

import asyncio
from typing import Any

import httpx2
import pytest

from opencode_a2a.errors import UpstreamHttpError, UpstreamUnansweredError
from opencode_a2a.events import JsonObject
from opencode_a2a.opencode.client import OpenCode1
from opencode_a2a.opencode.types import MessageWithParts
from opencode_a2a.tasks import open as open_tasks
from opencode_a2a.turns import attempt
from tests.support.answers import PARAMS, UNSUPPORTED, Wire
from tests.support.caller import Caller
from tests.support.front import Serve, begin_held
from tests.support.opencode import FakeOpenCode

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.both_databases]

QUEUE = {"shared": {"delivery": "queue"}}
ANSWER = "one two three four"


def is_message(progress: Any) -> bool:
    return progress is not None and progress["type"] == "message"


@pytest.mark.requirement("I6")
async def test_a_queued_message_goes_on_with_the_task_and_is_sent_once(
    caller: Caller, opencode: FakeOpenCode
) -> None:
    task_id = await begin_held(caller, opencode)

    added = await caller.begin("more", task=task_id, message_id="more", metadata=QUEUE)
    again = await caller.begin("more", task=task_id, message_id="more", metadata=QUEUE)
    before = opencode.texts
    opencode.release()
    ended = await caller.ended(task_id)
    late = await caller.send("more", task=task_id, message_id="more", metadata=QUEUE)

    assert added.id == again.id == late.id == task_id
    assert (before, opencode.texts) == (["hello"], ["hello", "more"])
    assert (ended.state, ended.text) == ("completed", f"{ANSWER}\n\n{ANSWER}")
    assert len(ended.raw["history"]) == 2


@pytest.mark.parametrize("wire", [Wire.RPC])
async def test_a_message_with_narrower_rights_does_not_steer_a_task_with_wider_ones(
    caller: Caller, opencode: FakeOpenCode
) -> None:
    task_id = await begin_held(caller, opencode)
    narrow: JsonObject = {"opencode": {"profile": "read-only"}}

    refused = await caller.ask("send", caller.message("more", taskId=task_id, metadata=narrow))
    opencode.release()
    ended = await caller.ended(task_id)

    refused.refuses(UNSUPPORTED)
    assert b"narrower" in refused.content
    assert opencode.texts == ended.history == ["hello"]


@pytest.mark.parametrize("wire", [Wire.RPC])
async def test_a_task_no_longer_says_that_it_waits_for_wider_work_once_it_is_prompted(
    caller: Caller, opencode: FakeOpenCode
) -> None:
    before = await caller.send("hello")
    narrow: JsonObject = {"opencode": {"profile": "read-only"}}
    hold = opencode.hold()
    # As from OpenCode's own terminal.
    async with httpx2.AsyncClient(base_url=opencode.url, trust_env=False) as http:
        prompt = {"parts": [{"type": "text", "text": "elsewhere"}]}
        await http.post(f"/session/{before.session_id}/prompt_async", json=prompt)
    async with asyncio.timeout(60):
        await hold.reached.wait()

    async with caller.stream("more", context=before.context_id, metadata=narrow) as following:
        await following.until(lambda update: "wider rights" in str(update.progress))
        waiting = await caller.get(following.task.id)
        opencode.release()
        hold = opencode.hold()
        async with asyncio.timeout(60):
            await hold.reached.wait()
        await following.until(lambda _: following.task.text != "")
        prompted = await caller.get(following.task.id)
        opencode.release()
        await following.rest()

    assert "wider rights" in str(waiting.raw["status"])
    assert "message" not in prompted.raw["status"]


@pytest.mark.parametrize("wire", [Wire.RPC])
async def test_no_more_than_so_many_messages_wait_to_be_handed_on(
    caller: Caller, opencode: FakeOpenCode, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(open_tasks, "MAX_ADDITIONS", 2)
    task_id = await begin_held(caller, opencode)

    for name in ("one", "two"):
        await caller.begin(name, task=task_id, metadata=QUEUE)
    refused = await caller.ask(
        "send", caller.message("three", taskId=task_id, metadata={"shared": {"delivery": "queue"}})
    )
    opencode.release()
    ended = await caller.ended(task_id)

    assert refused.status == 200
    assert b"LIMIT_EXCEEDED" in refused.content
    assert ended.history == ["hello", "one", "two"]


@pytest.mark.requirement("I6")
async def test_a_message_on_a_working_task_is_sent_at_once_and_shown(
    caller: Caller, opencode: FakeOpenCode
) -> None:
    hold = opencode.hold(count=2)
    async with caller.stream("hello") as following:
        async with asyncio.timeout(60):
            await hold.reached.wait()
        await following.until_state("working")
        await caller.begin("more", task=following.task.id, message_id="more")
        await following.until(lambda update: is_message(update.progress))
        told = following.updates[-1].progress
        await opencode.prompted(2)
        opencode.release()

    assert opencode.texts == ["hello", "more"]
    assert (told["status"], told["part_id"], told["title"]) == ("accepted", "more", "more")


@pytest.fixture
def unanswered(opencode: FakeOpenCode, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have prompts that are stopped early end as on OpenCode 2."""
    call = OpenCode1.prompt

    async def prompt(*args: Any, **options: Any) -> MessageWithParts:
        try:
            return await call(*args, **options)
        except UpstreamHttpError:
            raise UpstreamUnansweredError from None

    monkeypatch.setattr(OpenCode1, "prompt", prompt)
    opencode.stops_without_answer = True


@pytest.mark.sqlite_only
@pytest.mark.usefixtures("unanswered")
@pytest.mark.parametrize("wire", [Wire.RPC])
async def test_a_message_takes_the_place_of_an_answer_that_has_not_begun(
    caller: Caller, opencode: FakeOpenCode
) -> None:
    hold = opencode.hold("message.part.updated")
    async with caller.stream("hello") as following:
        async with asyncio.timeout(60):
            await hold.reached.wait()
        await following.until_state("working")
        opencode.hold("none")
        await caller.begin(
            "instead", task=following.task.id, metadata={"shared": {"delivery": "interrupt"}}
        )
        await following.rest()

    ended = await caller.get(following.task.id)
    assert opencode.texts == ["hello", "instead"]
    assert (ended.state, ended.text) == ("completed", ANSWER)


@pytest.mark.sqlite_only
@pytest.mark.usefixtures("unanswered")
@pytest.mark.parametrize("wire", [Wire.RPC])
async def test_a_task_that_is_stopped_inside_opencode_before_its_answer_is_interrupted(
    caller: Caller, opencode: FakeOpenCode
) -> None:
    hold = opencode.hold("message.part.updated")
    begun = await caller.begin("hello")
    async with asyncio.timeout(60):
        await hold.reached.wait()
    session = (await caller.get(begun.id)).session_id

    async with httpx2.AsyncClient(base_url=opencode.url, trust_env=False) as http:
        await http.post(f"/session/{session}/abort")

    ended = await caller.ended(begun.id)
    assert (ended.state, ended.error_type) == ("failed", "UPSTREAM_INTERRUPTED")


@pytest.mark.sqlite_only
@pytest.mark.usefixtures("unanswered")
@pytest.mark.parametrize("wire", [Wire.RPC])
async def test_a_failure_before_the_answer_is_told_at_once(
    caller: Caller, opencode: FakeOpenCode, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attempt, "DRAIN_SECONDS", 3_600.0)
    opencode.failure_without_answer = {
        "name": "APIError",
        "data": {"message": "no such model", "statusCode": 404},
    }
    hold = opencode.hold("message.part.updated")
    begun = await caller.begin("hello")
    async with asyncio.timeout(60):
        await hold.reached.wait()
    session = (await caller.get(begun.id)).session_id

    async with httpx2.AsyncClient(base_url=opencode.url, trust_env=False) as http:
        await http.post(f"/session/{session}/abort")

    ended = await caller.ended(begun.id)
    assert (ended.state, ended.error_type) == ("failed", "UPSTREAM_RESOURCE_NOT_FOUND")


async def test_a_message_that_is_only_an_answer_is_refused(
    caller: Caller, opencode: FakeOpenCode
) -> None:
    task_id = await begin_held(caller, opencode)

    for words in ("yes", "1 yes", "yes to all", "yes for this task", "no 2: why"):
        answer = await caller.ask("send", caller.message(words, taskId=task_id))
        answer.refuses(UNSUPPORTED)
    opencode.release()
    assert (await caller.ended(task_id)).text == ANSWER


async def test_an_unknown_delivery_is_refused_by_name(
    caller: Caller, opencode: FakeOpenCode
) -> None:
    task_id = await begin_held(caller, opencode)

    params = caller.message("more", taskId=task_id) | {"metadata": {"shared": {"delivery": "now"}}}
    refusal = (await caller.ask("send", params)).refuses(PARAMS)

    assert "metadata.shared.delivery" in str(refusal)
    opencode.release()
    assert (await caller.ended(task_id)).text == ANSWER


async def test_a_message_cannot_take_a_task_elsewhere(
    caller: Caller, opencode: FakeOpenCode
) -> None:
    task_id = await begin_held(caller, opencode)

    other = {"metadata": {"shared": {"session": {"id": "ses_other"}}}}
    answer = await caller.ask("send", caller.message("more", taskId=task_id) | other)

    answer.refuses(PARAMS)
    opencode.release()
    assert (await caller.ended(task_id)).text == ANSWER


async def test_a_canceled_task_drops_what_was_queued(
    caller: Caller, opencode: FakeOpenCode
) -> None:
    task_id = await begin_held(caller, opencode)
    await caller.begin("more", task=task_id, metadata=QUEUE)

    canceled = await caller.cancel(task_id)
    opencode.release()

    assert canceled.state == "canceled"
    assert opencode.texts == ["hello"]
    (await caller.ask("send", caller.message("more", taskId=task_id))).refuses(UNSUPPORTED)


async def test_a_canceled_task_that_was_queued_drops_what_was_added(
    caller: Caller, opencode: FakeOpenCode
) -> None:
    first = await begin_held(caller, opencode)
    context = (await caller.get(first)).context_id
    async with caller.stream("later", context=context) as following:
        await following.until(lambda update: update.progress is not None)
        await caller.begin("more", task=following.task.id, metadata=QUEUE)
        await caller.cancel(following.task.id)
        await following.rest()
    opencode.release()

    told = [one.progress["status"] for one in following.updates if is_message(one.progress)]
    assert (following.task.state, told) == ("canceled", ["accepted", "dropped"])


async def test_a_message_in_place_of_the_turn_refuses_nothing_that_is_asked_later(
    opencode: FakeOpenCode, serve: Serve
) -> None:
    caller = Caller(await serve(A2A_CONSOLE_ANSWERS="false"))
    task_id = await begin_held(caller, opencode)
    opencode.play("permission-once")
    opencode.said[b'"reply":"once"'] = b'"reply":"reject"'
    metadata = {"shared": {"delivery": "interrupt"}}
    await caller.begin("instead", task=task_id, metadata=metadata)
    opencode.release()
    asked = await caller.wait(task_id, "input_required")

    # The agent refuses by itself what a person was asked.
    request = asked.interrupt["request_id"]
    async with httpx2.AsyncClient(trust_env=False) as http:
        await http.post(f"{opencode.url}/permission/{request}/reply", json={"reply": "reject"})
    ended = await caller.ended(task_id)

    assert (ended.state, ended.error_type) == ("failed", "INTERRUPT_FORGED")
