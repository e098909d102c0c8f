"""Replies that do not name their task: which question they answer, and when they are refused."""

import asyncio
import gc
from pathlib import Path
from typing import Any

import pytest

from opencode_a2a.errors import UpstreamUnreachableError
from opencode_a2a.turns.attempt import Attempt
from opencode_a2a.turns.interrupts import WorkInterrupts
from opencode_a2a.turns.turn import Turn
from tests.support.answers import PARAMS, UNSUPPORTED, Answer, Task
from tests.support.caller import Caller
from tests.support.front import started
from tests.support.opencode import FakeOpenCode
from tests.support.service import Running

pytestmark = pytest.mark.asyncio(loop_scope="module")

NEW_TASK = {"opencode": {"new_task": True}}


async def asked(caller: Caller, opencode: FakeOpenCode) -> Task:
    opencode.play("permission-once")
    task = await caller.send("run it")
    assert task.state == "input_required"
    return await caller.get(task.id)  # where it is spelled as in every later reading


def data(refusal: Answer) -> Any:
    """Return what an error carries for programs, spelled as in 0.3."""
    body = refusal.body
    error = body.get("error", body)
    if not refusal.wire.modern:
        return error["data"]
    (info, *_) = error["data" if refusal.wire.rpc else "details"]
    return {"task_id": info["metadata"].get("taskId"), **info["metadata"]}


@pytest.mark.requirement("ours-reply-without-task")
async def test_a_reply_in_the_context_answers_the_task_that_waits_there(
    caller: Caller, opencode: FakeOpenCode
) -> None:
    task = await asked(caller, opencode)

    done = await caller.send("yes", context=task.context_id)

    assert (done.id, done.state, done.text) == (task.id, "completed", "after")
    assert done.history == ["run it", "yes"]
    assert len(opencode.prompts) == 1


@pytest.mark.requirement("ours-reply-without-task")
async def test_a_reply_that_refers_to_the_task_answers_it(
    caller: Caller, opencode: FakeOpenCode
) -> None:
    task = await asked(caller, opencode)

    reply = caller.message("yes", referenceTaskIds=["another", task.id])
    done = Task((await caller.ask("send", reply)).task)

    assert (done.id, done.state) == (task.id, "completed")
    assert len(opencode.prompts) == 1


@pytest.mark.requirement("ours-reply-without-task")
async def test_a_streamed_reply_and_one_in_the_background_answer_too(
    caller: Caller, opencode: FakeOpenCode
) -> None:
    first, second = await asked(caller, opencode), await asked(caller, opencode)

    async with caller.stream("yes", context=first.context_id) as following:
        await following.rest()
    begun = await caller.begin("yes", context=second.context_id)
    ended = await caller.ended(second.id)

    assert (following.task.id, following.states[-1]) == (first.id, "completed")
    assert (begun.id, ended.state) == (second.id, "completed")
    assert len(opencode.prompts) == 2


@pytest.mark.requirement("ours-reply-without-task")
@pytest.mark.parametrize("operation", ["send", "stream"])
async def test_what_is_no_answer_is_refused_at_once_with_the_task_and_the_question(
    caller: Caller, opencode: FakeOpenCode, operation: str
) -> None:
    task = await asked(caller, opencode)

    message = caller.message("now do something else", contextId=task.context_id)
    refusal = await caller.ask(operation, message)

    assert refusal.refuses(UNSUPPORTED) == []
    assert data(refusal)["task_id"] == task.id
    assert "ls -la" in data(refusal)["question"]
    assert task.id.encode() in refusal.content
    assert (await caller.get(task.id)).raw == task.raw
    assert len(opencode.prompts) == 1


@pytest.mark.requirement("I23")
@pytest.mark.parametrize(
    ("metadata", "place"),
    [
        ({"shared": {"delivery": "steer"}}, "taskId"),
        ({"shared": {"delivery": "queue"}}, "contextId"),
        ({"shared": {"delivery": "interrupt"}}, "taskId"),
        (NEW_TASK, "taskId"),
        ({"opencode": {"command": "review"}}, "contextId"),
    ],
)
async def test_what_is_declared_to_be_for_the_agent_is_no_answer(
    service: Running, opencode: FakeOpenCode, metadata: dict[str, Any], place: str
) -> None:
    caller = Caller(service)
    task = await asked(caller, opencode)
    where = {"taskId": task.id, "contextId": task.context_id}[place]

    of_params = {**caller.message("ok", **{place: where}), "metadata": metadata}
    of_message = caller.message("ok", metadata=metadata, **{place: where})
    refusals = [await caller.ask("send", message) for message in (of_params, of_message)]

    for refusal in refusals:
        assert refusal.refuses(UNSUPPORTED) == []
        assert "ls -la" in data(refusal)["question"]
    assert (await caller.get(task.id)).raw == task.raw
    assert len(opencode.prompts) == 1
    # Without the declaration, the same message is an answer.
    assert (await caller.send("ok", task=task.id)).state == "completed"


@pytest.mark.requirement("I23")
@pytest.mark.parametrize(
    "parts",
    [
        ("no", {"reply": "once"}),
        ({"reply": "once"}, "no"),
        ({"reply": "once"}, {"reply": "reject"}),
        ("no", "yes"),
        ({"reply": "once", "number": 1, "all": True},),
    ],
)
async def test_a_message_that_contradicts_itself_is_refused_with_the_question(
    service: Running, opencode: FakeOpenCode, parts: tuple[str | dict[str, Any], ...]
) -> None:
    caller = Caller(service)
    task = await asked(caller, opencode)

    spelled = [part if isinstance(part, str) else caller.data(part) for part in parts]
    refusal = await caller.ask("send", caller.message(*spelled, taskId=task.id))

    assert refusal.refuses(UNSUPPORTED) == []
    assert "ls -la" in data(refusal)["question"]
    assert (await caller.get(task.id)).raw == task.raw


@pytest.mark.requirement("I6")
async def test_a_repeated_reply_is_the_same_reply_whatever_it_names_by_then(
    caller: Caller, opencode: FakeOpenCode
) -> None:
    task = await asked(caller, opencode)
    name = f"without the task {caller.wire.value}"
    done = await caller.send("yes", context=task.context_id, message_id=name)

    again = await caller.send("yes", context=task.context_id, message_id=name)
    named = await caller.send("yes", task=task.id, message_id=name)

    assert again.raw == named.raw == done.raw
    assert len(opencode.prompts) == 1


@pytest.mark.requirement("I6")
async def test_a_reply_that_named_its_task_may_be_repeated_without_it(
    caller: Caller, opencode: FakeOpenCode
) -> None:
    task = await asked(caller, opencode)
    name = f"with the task first {caller.wire.value}"
    done = await caller.send("yes", task=task.id, message_id=name)

    again = await caller.send("yes", context=task.context_id, message_id=name)

    assert again.raw == done.raw
    assert len(opencode.prompts) == 1


@pytest.mark.requirement("I6")
async def test_copies_of_a_reply_at_once_are_one_reply(
    caller: Caller, opencode: FakeOpenCode
) -> None:
    task = await asked(caller, opencode)
    name = f"at once {caller.wire.value}"

    copies = await asyncio.gather(
        *(caller.send("yes", context=task.context_id, message_id=name) for _ in range(3))
    )

    assert [copy.raw for copy in copies] == [copies[0].raw] * 3
    assert copies[0].history == ["run it", "yes"]
    assert len(opencode.prompts) == 1


@pytest.mark.requirement("ours-reply-without-task")
async def test_a_task_that_was_demanded_says_what_it_waits_for(
    caller: Caller, opencode: FakeOpenCode
) -> None:
    task = await asked(caller, opencode)
    opencode.play("plain-text")

    begun = await caller.begin("something else", context=task.context_id, metadata=NEW_TASK)
    async with caller.subscribe(begun.id) as following:
        if task.id not in (await caller.get(begun.id)).said:
            await following.until(lambda update: bool(update.progress))
    queued = await caller.get(begun.id)
    done = await caller.send("yes", task=task.id)
    ended = await caller.ended(begun.id)

    assert begun.id != task.id
    assert queued.state == "submitted"
    assert task.id in queued.said
    assert (done.state, ended.state) == ("completed", "completed")
    assert (ended.said, ended.text != "") == ("", True)  # and nothing about the queue


@pytest.mark.requirement("ours-reply-without-task")
async def test_a_task_that_was_queued_before_the_question_says_what_it_waits_for_then(
    caller: Caller, opencode: FakeOpenCode
) -> None:
    opencode.play("permission-once")
    hold = opencode.hold("message.updated")
    first = await caller.begin("run it")
    async with asyncio.timeout(60):
        await hold.reached.wait()
    second = await caller.begin("and then?", context=first.context_id)

    async with caller.subscribe(second.id) as following:
        opencode.release()
        await caller.wait(first.id, "input_required")
        await following.until(lambda update: first.id in str(update.status))
    queued = await caller.get(second.id)
    answered = await caller.begin("yes", context=first.context_id)
    await caller.ended(first.id)
    asked_too = await caller.wait(second.id, "input_required")

    assert queued.state == "submitted"
    assert first.id in queued.said
    assert answered.id == first.id
    assert "ls -la" in asked_too.said


async def test_a_task_that_comes_while_the_session_passes_to_the_next_says_that_it_waits(
    service: Running, opencode: FakeOpenCode, monkeypatch: pytest.MonkeyPatch
) -> None:
    arrived, passing = asyncio.Event(), asyncio.Event()
    close, wait_for_lock = Attempt.close, Turn._wait_for_lock  # noqa: SLF001 # pyright: ignore[reportPrivateUsage]

    def close_and_pass(attempt: Attempt) -> None:
        close(attempt)
        passing.set()

    async def wait(turn: Turn, *of: Any) -> None:
        if turn.request.text == "three":
            arrived.set()
            await passing.wait()
        await wait_for_lock(turn, *of)

    monkeypatch.setattr(Turn, "_wait_for_lock", wait)
    caller = Caller(service)
    hold = opencode.hold()
    first = await caller.begin("one")
    async with asyncio.timeout(60):
        await hold.reached.wait()
        async with caller.stream("two", context=first.context_id) as following:
            await following.until(lambda update: "queue" in str(update.progress))
        async with caller.stream("three", context=first.context_id) as following:
            await arrived.wait()
            monkeypatch.setattr(Attempt, "close", close_and_pass)
            opencode.release()
            updates = await following.rest()

    assert any("queue" in str(update.progress) for update in updates)
    assert opencode.texts[-3:] == ["one", "two", "three"]


@pytest.mark.requirement("ours-request-metadata")
async def test_what_demands_a_new_task_is_true_or_false(
    caller: Caller, opencode: FakeOpenCode
) -> None:
    wrong = {**caller.message("hello"), "metadata": {"opencode": {"new_task": "yes"}}}

    assert (await caller.ask("send", wrong)).refuses(PARAMS) == ["metadata.opencode.new_task"]


@pytest.mark.requirement("ours-reply-without-task")
async def test_with_several_that_wait_the_reply_has_to_name_one(
    caller: Caller, opencode: FakeOpenCode
) -> None:
    first = await asked(caller, opencode)
    (opencode.workspace / "elsewhere").mkdir(exist_ok=True)
    place = {"opencode": {"directory": "elsewhere"}}
    second = await caller.send("run it", context=first.context_id, metadata=place)

    refusal = await caller.ask("send", caller.message("yes", contextId=first.context_id))
    reply = caller.message("yes", contextId=first.context_id, referenceTaskIds=[second.id])
    done = Task((await caller.ask("send", reply)).task)

    assert second.id != first.id
    assert refusal.refuses(UNSUPPORTED) == []
    assert first.id.encode() in refusal.content
    assert second.id.encode() in refusal.content
    assert (done.id, done.state) == (second.id, "completed")
    assert (await caller.get(first.id)).state == "input_required"


@pytest.mark.requirement("I10")
async def test_the_context_of_another_caller_is_not_touched(
    caller: Caller, service: Running, opencode: FakeOpenCode, stranger: str
) -> None:
    task = await asked(caller, opencode)
    opencode.play("plain-text")
    other = Caller(service, caller.wire, stranger)

    in_context = await other.send("yes", context=task.context_id)
    reply = other.message("yes", referenceTaskIds=[task.id])
    referring = Task((await other.ask("send", reply)).task)

    assert {in_context.id, referring.id}.isdisjoint({task.id})
    assert (in_context.state, referring.state) == ("completed", "completed")
    assert (await caller.get(task.id)).raw == task.raw


@pytest.mark.sqlite_only
async def test_an_answer_that_fails_when_the_service_has_stopped_is_no_error_of_its_own(
    opencode: FakeOpenCode, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    came, stopped, over = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def answer(*_: object) -> None:
        came.set()
        try:
            await stopped.wait()
            raise UpstreamUnreachableError("the turn stopped")
        finally:
            over.set()

    opencode.play("permission-once")
    unheard = list[object]()
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _, context: unheard.append(context))
    async with started(opencode, tmp_path, A2A_SHUTDOWN_GRACE_SECONDS="0") as service:
        caller = Caller(service)
        task = await caller.send("hello")
        monkeypatch.setattr(WorkInterrupts, "answer", answer)
        sending = asyncio.create_task(caller.send("yes", task=task.id))
        await came.wait()
    await asyncio.wait([sending])
    stopped.set()
    await over.wait()
    await asyncio.sleep(0)
    gc.collect()
    loop.set_exception_handler(None)

    assert sending.exception() is not None
    assert unheard == []
