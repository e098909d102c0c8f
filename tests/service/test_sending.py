"""Sending a message: when it is answered, which task it belongs to, and what comes of it."""

import asyncio

import pytest
from sqlalchemy.engine import Connection

from opencode_a2a.errors import StoreUnavailableError
from opencode_a2a.ids import SessionId
from opencode_a2a.store import tasks as task_rows
from tests.support.answers import NOT_FOUND, PARAMS, UNSUPPORTED, RefusedError, Wire
from tests.support.caller import Caller
from tests.support.opencode import FakeOpenCode
from tests.support.service import Running

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.both_databases]


@pytest.mark.requirement("3.1.1-blocking")
@pytest.mark.requirement("3.7-results-are-artifacts")
async def test_a_send_waits_for_the_end_and_brings_all_artifacts(
    caller: Caller, opencode: FakeOpenCode
) -> None:
    opencode.play("tool-completed")

    task = await caller.send("run it")

    assert (task.state, task.text) == ("completed", "Running. \n\nFinished.")
    assert [tool["status"] for tool in task.tools] == ["completed"]


@pytest.mark.requirement("3.1.1-blocking")
@pytest.mark.requirement("0.3-blocking-unset")
async def test_a_send_without_configuration_waits(caller: Caller) -> None:
    answer = await caller.ask("send", caller.message("hello"))

    assert answer.task["status"]["state"] in ("TASK_STATE_COMPLETED", "completed")


@pytest.mark.requirement("3.1.1-blocking-interrupted")
async def test_a_send_returns_when_the_task_begins_to_wait_for_a_person(
    caller: Caller, opencode: FakeOpenCode
) -> None:
    opencode.play("permission-once")

    task = await caller.send("run it")

    assert task.state == "input_required"
    assert "ls -la" in task.said


@pytest.mark.requirement("3.1.1-return-immediately")
async def test_a_background_send_returns_a_task_that_ends_by_itself(
    caller: Caller, opencode: FakeOpenCode
) -> None:
    opencode.hold()

    begun = await caller.begin("hello")
    assert begun.state in ("submitted", "working")
    opencode.release()
    ended = await caller.ended(begun.id)

    assert (ended.state, ended.text) == ("completed", "one two three four")


async def test_a_second_message_of_a_new_context_goes_to_the_same_session(
    caller: Caller, opencode: FakeOpenCode
) -> None:
    opencode.creating.clear()
    first = await caller.begin("one")
    second = await caller.begin("two", context=first.context_id)
    opencode.creating.set()

    ended = [await caller.ended(task.id) for task in (first, second)]

    assert [task.state for task in ended] == ["completed", "completed"]
    assert ended[0].session_id == ended[1].session_id


@pytest.mark.requirement("3.1.1-return-immediately")
async def test_a_running_task_can_be_read_while_nobody_waits_for_it(
    caller: Caller, opencode: FakeOpenCode
) -> None:
    hold = opencode.hold(count=2)

    begun = await caller.begin("hello")
    async with asyncio.timeout(60):
        await hold.reached.wait()
    async with caller.subscribe(begun.id) as following:
        await following.until_text("one two ")
    task = await caller.get(begun.id)

    assert (task.state, task.text, task.history) == ("working", "one two ", ["hello"])


@pytest.mark.requirement("3.1.1-return-immediately")
async def test_a_stream_is_a_stream_even_if_the_answer_is_wanted_at_once(caller: Caller) -> None:
    async with caller.stream("hello", blocking=False) as following:
        await following.rest()

    assert following.task.state == "completed"


@pytest.mark.requirement("3.1.1-task-id-unknown")
async def test_a_task_that_does_not_exist_takes_no_message(caller: Caller) -> None:
    params = caller.message("hello", taskId="no-such-task")

    for operation in ("send", "stream"):
        (await caller.ask(operation, params)).refuses(NOT_FOUND)


@pytest.mark.requirement("3.4.3-context-of-the-client")
async def test_a_context_that_the_client_made_up_is_kept(caller: Caller) -> None:
    task = await caller.send("hello", context=f"mine / {caller.wire.value} é")

    assert task.context_id == f"mine / {caller.wire.value} é"


@pytest.mark.requirement("3.4.3-context-of-the-client")
@pytest.mark.parametrize("wrong", ["x" * 300, "a\nb"])
async def test_a_context_that_cannot_be_kept_is_refused(caller: Caller, wrong: str) -> None:
    answer = await caller.ask("send", caller.message("hello", contextId=wrong))

    assert answer.refuses(PARAMS) == ["message.contextId"]


@pytest.mark.requirement("3.4.3-context-inferred")
async def test_a_message_on_a_task_is_in_the_context_of_the_task(
    caller: Caller, opencode: FakeOpenCode
) -> None:
    opencode.play("permission-once")
    asked = await caller.send("run it")

    async with caller.stream("once", task=asked.id) as following:
        updates = await following.rest()

    contexts = {
        (update.status or update.artifact or update.raw["task"])["contextId"] for update in updates
    }
    assert contexts == {asked.context_id}
    assert following.task.state == "completed"


@pytest.mark.requirement("3.4.3-context-mismatch")
async def test_a_context_that_does_not_fit_the_task_is_refused(
    caller: Caller, opencode: FakeOpenCode
) -> None:
    opencode.play("permission-once")
    asked = (await caller.ask("send", caller.message("run it"))).task

    answer = await caller.ask(
        "send", caller.message("once", taskId=asked["id"], contextId="another")
    )

    assert answer.refuses(PARAMS) == ["message.contextId"]


@pytest.mark.requirement("3.1.1-terminal-task")
@pytest.mark.parametrize("operation", ["send", "stream"])
async def test_an_ended_task_takes_no_message_and_its_context_goes_on(
    caller: Caller, operation: str
) -> None:
    ended = await caller.send("hello")

    answer = await caller.ask(operation, caller.message("more", taskId=ended.id))
    answer.refuses(UNSUPPORTED)
    next_task = await caller.send("more", context=ended.context_id)

    assert next_task.id != ended.id
    assert (next_task.context_id, next_task.session_id) == (ended.context_id, ended.session_id)


@pytest.mark.requirement("ours-working-task")
async def test_a_working_task_takes_no_answer(caller: Caller, opencode: FakeOpenCode) -> None:
    hold = opencode.hold()
    task = await caller.begin("hello")
    async with asyncio.timeout(60):
        await hold.reached.wait()

    for operation in ("send", "stream"):
        answer = await caller.ask(operation, caller.message("yes", taskId=task.id))
        answer.refuses(UNSUPPORTED)
    opencode.release()

    assert (await caller.ended(task.id)).history == ["hello"]
    assert len(opencode.prompts) == 1


@pytest.mark.requirement("3.3.1-same-message-id")
@pytest.mark.requirement("I6")
async def test_a_repeated_message_is_the_same_task_and_one_prompt(
    caller: Caller, opencode: FakeOpenCode
) -> None:
    hold = opencode.hold()
    name = f"the same {caller.wire.value}"
    first = await caller.begin("hello", message_id=name)
    async with asyncio.timeout(60):
        await hold.reached.wait()

    async with asyncio.TaskGroup() as group:
        waiting = group.create_task(caller.send("hello", message_id=name))
        again = await caller.begin("hello", message_id=name)
        opencode.release()
    later = await caller.send("hello", message_id=name)

    assert {first.id, again.id, waiting.result().id, later.id} == {first.id}
    assert [waiting.result().state, later.state] == ["completed", "completed"]
    assert len(opencode.prompts) == 1


@pytest.mark.requirement("3.3.1-same-message-id")
@pytest.mark.requirement("I6")
async def test_a_message_id_with_other_content_is_a_new_message(
    caller: Caller, opencode: FakeOpenCode
) -> None:
    name = f"reused {caller.wire.value}"

    first = await caller.send("hello", message_id=name)
    other = await caller.send("other", message_id=name)
    again = [await caller.send(text, message_id=name) for text in ("hello", "other")]

    assert other.state == "completed"
    assert other.id != first.id
    assert [task.id for task in again] == [first.id, other.id]
    assert len(opencode.prompts) == 2


@pytest.mark.requirement("I10")
async def test_message_ids_and_contexts_belong_to_their_caller(
    service: Running, caller: Caller, wire: Wire, stranger: str
) -> None:
    theirs = Caller(service, wire, stranger)
    name = f"shared {wire.value}"
    mine = await caller.send("hello", message_id=name, context=name)

    task = await theirs.send("something else", message_id=name, context=name)

    assert task.context_id == name
    assert task.id != mine.id
    assert task.session_id != mine.session_id


@pytest.mark.requirement("I10")
async def test_a_task_of_somebody_else_looks_like_none(
    service: Running, wire: Wire, stranger: str, opencode: FakeOpenCode
) -> None:
    opencode.play("permission-once")
    mine = await Caller(service, wire).send("run it")
    theirs = Caller(service, wire, stranger)

    answers = [
        await theirs.ask(operation, {"id": task_id})
        for operation in ("get", "cancel", "subscribe")
        for task_id in (mine.id, "no-such-task")
    ]
    answers += [
        await theirs.ask(operation, theirs.message("once", taskId=task_id))
        for operation in ("send", "stream")
        for task_id in (mine.id, "no-such-task")
    ]

    for known, unknown in zip(answers[::2], answers[1::2], strict=True):
        known.refuses(NOT_FOUND)
        assert known.content == unknown.content


@pytest.mark.requirement("proto-message-ids")
@pytest.mark.requirement("3.2.2-reference-tasks")
async def test_messages_of_a_task_name_task_and_context(
    caller: Caller, opencode: FakeOpenCode
) -> None:
    opencode.play("permission-once")

    answer = await caller.ask("send", caller.message("run it", referenceTaskIds=["earlier"]))

    task = answer.task
    told = [*task["history"], task["status"]["message"]]
    assert [m["taskId"] for m in told] == [task["id"]] * 2
    assert [m["contextId"] for m in told] == [task["contextId"]] * 2
    assert [m["role"].removeprefix("ROLE_").lower() for m in told] == ["user", "agent"]
    assert task["history"][0]["referenceTaskIds"] == ["earlier"]


@pytest.mark.requirement("ours-failure-is-a-task")
async def test_a_failed_turn_is_a_failed_task_that_says_why(
    caller: Caller, opencode: FakeOpenCode
) -> None:
    opencode.play("error-400")

    task = await caller.send("hello")

    assert (task.state, task.error_type) == ("failed", "UPSTREAM_BAD_REQUEST")
    assert task.said
    assert task.history == ["hello"]


async def test_a_refused_message_leaves_no_task(caller: Caller, opencode: FakeOpenCode) -> None:
    with pytest.raises(RefusedError):
        await caller.send("   ")

    assert opencode.prompts == []


@pytest.mark.sqlite_only
@pytest.mark.parametrize("wire", [Wire.RPC])
async def test_a_context_goes_on_in_a_new_session_when_the_database_is_back(
    caller: Caller, opencode: FakeOpenCode, monkeypatch: pytest.MonkeyPatch
) -> None:
    """OpenCode has deleted the session, and the database is away when that is to be stored."""
    first = await caller.send("hello")
    opencode.delete(SessionId(first.session_id))
    forget, away = task_rows.forget_session, [True, True]

    def forget_at_the_third_try(connection: Connection, session_id: SessionId) -> None:
        if away:
            away.pop()
            raise StoreUnavailableError(operation="persisting")
        forget(connection, session_id)

    monkeypatch.setattr(task_rows, "forget_session", forget_at_the_third_try)
    second = await caller.send("hello", context=first.context_id)

    assert (second.state, away) == ("completed", [])
    assert second.session_id != first.session_id
