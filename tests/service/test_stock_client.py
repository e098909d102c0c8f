"""The SDK's own client, unchanged, on every line and binding."""

import asyncio
import uuid
from typing import Any

import pytest
from a2a.client import Client
from a2a.types import (
    CancelTaskRequest,
    GetExtendedAgentCardRequest,
    GetTaskPushNotificationConfigRequest,
    GetTaskRequest,
    ListTasksRequest,
    Message,
    Part,
    Role,
    SendMessageConfiguration,
    SendMessageRequest,
    StreamResponse,
    SubscribeToTaskRequest,
    TaskState,
)
from a2a.utils.errors import (
    A2AError,
    ContentTypeNotSupportedError,
    InvalidParamsError,
    TaskNotCancelableError,
    TaskNotFoundError,
    UnsupportedOperationError,
)

from tests.support.answers import Wire
from tests.support.opencode import FakeOpenCode

pytestmark = pytest.mark.asyncio(loop_scope="module")

DONE = TaskState.TASK_STATE_COMPLETED


def message(*parts: Part, **fields: Any) -> SendMessageRequest:
    fields.setdefault("message_id", str(uuid.uuid4()))
    content = parts or (Part(text="hello"),)
    return SendMessageRequest(message=Message(role=Role.ROLE_USER, parts=content, **fields))


async def heard(agent: Client, request: SendMessageRequest) -> list[StreamResponse]:
    async with asyncio.timeout(60):
        return [event async for event in agent.send_message(request)]


@pytest.mark.requirement("5-same-results")
async def test_it_streams_an_answer_and_reads_it_again(agent: Client) -> None:
    events = await heard(agent, message())

    kinds = [event.WhichOneof("payload") for event in events]
    assert (kinds[0], kinds[-1]) == ("task", "status_update")
    updates = [e.artifact_update for e in events if e.HasField("artifact_update")]
    assert "".join(u.artifact.parts[0].text for u in updates) == "one two three four"
    assert events[-1].status_update.status.state == DONE
    task = await agent.get_task(GetTaskRequest(id=events[0].task.id))
    assert (task.status.state, task.artifacts[0].parts[0].text) == (DONE, "one two three four")
    assert task.history[0].parts[0].text == "hello"


@pytest.mark.requirement("5-same-results")
async def test_it_takes_files_and_data(agent: Client, opencode: FakeOpenCode) -> None:
    file = Part(raw=b"print('hi')\n", media_type="text/x-python", filename="a.py")
    data = Part()
    data.data.struct_value.update({"n": 1})

    events = await heard(agent, message(Part(text="look"), file, data))

    assert events[-1].status_update.status.state == DONE
    texts = str(opencode.prompts[0]["parts"])
    assert "a.py" in texts
    assert '"n": 1' in texts.replace("1.0", "1")


@pytest.mark.requirement("5-same-results")
async def test_it_subscribes_and_cancels(agent: Client, opencode: FakeOpenCode) -> None:
    hold = opencode.hold(count=2)
    request = message()
    request.configuration.CopyFrom(SendMessageConfiguration(return_immediately=True))
    async with asyncio.timeout(60):
        stream = aiter(agent.send_message(request))
        first = await anext(stream)
        await hold.reached.wait()
        following = aiter(agent.subscribe(SubscribeToTaskRequest(id=first.task.id)))
        told = [await anext(following)]
        canceled = await agent.cancel_task(CancelTaskRequest(id=first.task.id))
        told += [event async for event in following]
        rest = [event async for event in stream]

    assert told[0].HasField("task")
    assert canceled.status.state == TaskState.TASK_STATE_CANCELED
    for events in (told, rest):
        assert events[-1].status_update.status.state == TaskState.TASK_STATE_CANCELED


@pytest.mark.requirement("5-same-results")
async def test_it_answers_what_a_task_asks(agent: Client, opencode: FakeOpenCode) -> None:
    opencode.play("permission-once")

    asked = await heard(agent, message())
    task_id = asked[0].task.id
    done = await heard(agent, message(Part(text="once"), task_id=task_id))

    status = asked[-1].status_update.status
    assert status.state == TaskState.TASK_STATE_INPUT_REQUIRED
    assert "ls -la" in status.message.parts[0].text
    assert done[0].task.id == task_id
    assert done[-1].status_update.status.state == DONE


@pytest.mark.requirement("5-same-results")
@pytest.mark.parametrize("wire", [Wire.RPC, Wire.REST], ids=lambda wire: wire.value)
async def test_it_lists_tasks(agent: Client, wire: Wire) -> None:
    events = await heard(agent, message(context_id=f"listed {wire.value}"))

    page = await agent.list_tasks(ListTasksRequest(context_id=f"listed {wire.value}"))

    assert [task.id for task in page.tasks] == [events[0].task.id]
    assert (page.total_size, page.next_page_token) == (1, "")


@pytest.mark.requirement("3.1.11-extended-card")
async def test_it_reads_the_extended_card(agent: Client) -> None:
    card = await agent.get_extended_agent_card(GetExtendedAgentCardRequest())

    assert card.name == "OpenCode A2A"
    assert card.skills


@pytest.mark.requirement("5-same-errors")
async def test_it_recognises_every_error(agent: Client) -> None:
    ended = (await heard(agent, message()))[0].task.id
    push = GetTaskPushNotificationConfigRequest(task_id=ended, id="c")
    zipped = Part(raw=b"PK\x03\x04", media_type="application/zip")

    async def error_of(call: Any) -> type[A2AError]:
        with pytest.raises(A2AError) as raised:
            await call
        return type(raised.value)

    assert await error_of(agent.get_task(GetTaskRequest(id="no-such"))) is TaskNotFoundError
    cancel = agent.cancel_task(CancelTaskRequest(id=ended))
    assert await error_of(cancel) is TaskNotCancelableError
    config = agent.get_task_push_notification_config(push)
    assert await error_of(config) is TaskNotFoundError
    more = heard(agent, message(task_id=ended))
    assert await error_of(more) is UnsupportedOperationError
    assert await error_of(heard(agent, message(zipped))) is ContentTypeNotSupportedError
    assert await error_of(heard(agent, message(Part(text=" ")))) is InvalidParamsError
