"""Tasks that wait for a person: what they ask, and what may be answered."""

import asyncio
import re
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import orjson
import pytest

from opencode_a2a.events import JsonObject
from opencode_a2a.store.replicas import Census
from tests.support.answers import PARAMS, UNSUPPORTED, RefusedError
from tests.support.caller import Caller
from tests.support.forward import Line
from tests.support.front import Serve, started
from tests.support.opencode import FakeOpenCode
from tests.support.service import Running

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.both_databases]

ANN = "a-token-for-the-tests-of-ann-alone"
ANN_NARROW = "a-narrow-token-for-the-tests-of-ann"


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many recordings lack an event that confirms an answer: count it as lost at once."""
    monkeypatch.setattr("opencode_a2a.turns.interrupts.LOST_SECONDS", 0.1)


@pytest.mark.requirement("3.4.3-input-required")
@pytest.mark.requirement("ours-interrupts")
async def test_a_permission_is_asked_for_and_given_by_a_message(
    caller: Caller, opencode: FakeOpenCode
) -> None:
    opencode.play("permission-once")

    asked = await caller.send("run it")
    done = await caller.send("once", task=asked.id)

    assert asked.state == "input_required"
    assert "ls -la" in asked.said
    assert asked.interrupt["type"] == "permission"
    assert (asked.interrupt["phase"], asked.interrupt["details"]["patterns"]) == (
        "asked",
        ["ls -la"],
    )
    assert (done.id, done.state, done.text) == (asked.id, "completed", "after")
    assert done.history == ["run it", "once"]


@pytest.mark.requirement("ours-interrupts")
async def test_an_answer_counts_though_the_event_that_confirms_it_is_lost(
    caller: Caller, opencode: FakeOpenCode
) -> None:
    opencode.play("permission-once")
    opencode.lost.add("RequestSettled")
    hold = opencode.hold("permission.replied")
    asked = await caller.send("run it")

    async with asyncio.timeout(60), asyncio.TaskGroup() as group:
        answering = group.create_task(caller.send("once", task=asked.id))
        await hold.reached.wait()
        while (await caller.get(asked.id)).state == "input_required":
            pass
        opencode.release()

    assert (answering.result().state, answering.result().text) == ("completed", "after")


@pytest.mark.requirement("3.4.3-input-required")
async def test_a_question_is_answered_by_data(caller: Caller, opencode: FakeOpenCode) -> None:
    opencode.play("question-answered")
    asked = await caller.send("ask me")
    label = asked.interrupt["details"]["questions"][0]["options"][0]["label"]

    answers = [[label] for _ in asked.interrupt["details"]["questions"]]
    answer = caller.message(caller.data({"answers": answers}), taskId=asked.id)
    done = (await caller.ask("send", answer)).task

    assert asked.interrupt["type"] == "question"
    assert label in asked.said
    assert done["status"]["state"] in ("TASK_STATE_COMPLETED", "completed")


@pytest.mark.requirement("3.4.3-input-required")
async def test_an_answer_that_is_not_understood_changes_nothing(
    caller: Caller, opencode: FakeOpenCode
) -> None:
    opencode.play("permission-once")
    asked = await caller.get((await caller.send("run it")).id)

    answer = await caller.ask("send", caller.message("what is this?", taskId=asked.id))

    assert answer.refuses(PARAMS) == ["message.parts"]
    assert (await caller.get(asked.id)).raw == asked.raw


@pytest.mark.requirement("3.1.2-follow-up-task-first")
async def test_a_stream_of_an_answer_begins_with_the_task(
    caller: Caller, opencode: FakeOpenCode
) -> None:
    opencode.play("permission-once")
    asked = await caller.send("run it")

    async with caller.stream("once", task=asked.id) as following:
        updates = await following.rest()

    assert updates[0].task is not None
    assert updates[0].task.id == asked.id
    assert updates[-1].state == "completed"
    assert following.task.text == "after"


@pytest.mark.requirement("3.3.1-same-message-id")
async def test_a_repeated_answer_is_taken_once(caller: Caller, opencode: FakeOpenCode) -> None:
    opencode.play("permission-once")
    asked = await caller.send("run it")
    name = f"answer {caller.wire.value}"

    done = await caller.send("once", task=asked.id, message_id=name)
    again = await caller.send("once", task=asked.id, message_id=name)

    assert again.raw == done.raw


@pytest.mark.requirement("I6")
async def test_a_repeated_answer_may_name_the_context_that_the_client_has_learnt(
    caller: Caller, opencode: FakeOpenCode
) -> None:
    opencode.play("permission-once")
    name = f"with the context {caller.wire.value}"
    asked = await caller.send("run it")
    done = await caller.send("once", task=asked.id, message_id=name)

    again = await caller.send("once", task=asked.id, context=asked.context_id, message_id=name)

    assert again.raw == done.raw


@pytest.mark.requirement("3.3.1-same-message-id")
async def test_an_answer_may_reuse_the_id_of_the_message_that_it_follows(
    caller: Caller, opencode: FakeOpenCode
) -> None:
    opencode.play("permission-once")
    name = f"one id for both {caller.wire.value}"
    asked = await caller.send("run it", message_id=name)

    done = await caller.send("once", task=asked.id, message_id=name)

    assert (done.id, done.state, done.text) == (asked.id, "completed", "after")


@pytest.mark.requirement("7.6-auth-required")
async def test_a_provider_that_wants_a_sign_in_is_told_and_another_try_is_taken(
    caller: Caller, opencode: FakeOpenCode
) -> None:
    opencode.play("error-401")

    asked = await caller.send("hello")
    opencode.play("plain-text")
    done = await caller.send("again", task=asked.id)

    assert (asked.state, asked.error_type) == ("auth_required", "UPSTREAM_UNAUTHORIZED")
    assert "The model provider fake refused its credentials" in asked.said
    assert (done.id, done.state, done.text) == (asked.id, "completed", "one two three four")
    assert done.history == ["hello", "again"]


@pytest.mark.requirement("I23")
async def test_another_try_counts_only_for_the_sign_in_that_it_names(
    caller: Caller, opencode: FakeOpenCode
) -> None:
    opencode.play("error-401")
    task = await caller.send("hello")
    again = await caller.send("again", task=task.id)
    waits = [one.raw["status"]["timestamp"] for one in (task, again)]
    first, second = (JsonObject(opencode={"sign_in": one}) for one in waits)

    with pytest.raises(RefusedError, match="INTERRUPT_REQUEST_NOT_FOUND"):
        await caller.send("too late", task=task.id, metadata=first)
    nowhere = await caller.ask("send", caller.message("x", metadata=second))
    opencode.play("plain-text")
    done = await caller.send("once more", task=task.id, metadata=second)

    nowhere.refuses(PARAMS)
    assert task.state == again.state == "auth_required"
    assert (done.state, done.history) == ("completed", ["hello", "again", "once more"])


@pytest.mark.sqlite_only
@pytest.mark.requirement("7.6-auth-required")
@pytest.mark.requirement("I23")
@pytest.mark.parametrize("restarted", [False, True], ids=["at once", "after a restart"])
async def test_another_try_after_a_sign_in_keeps_what_the_task_was_to_run_with(
    opencode: FakeOpenCode, tmp_path: Path, restarted: bool
) -> None:
    opencode.agents[:] = [{"name": name, "mode": "primary"} for name in ("build", "docs")]
    for name in ("sub", "other"):
        (opencode.workspace / name).mkdir(exist_ok=True)
    narrow = {"scheme": "bearer", "principal": "ann", "token": ANN_NARROW, "profile": "read-only"}
    wide = {"scheme": "bearer", "principal": "ann", "token": ANN}
    listed = orjson.dumps([narrow, wide]).decode()
    variables = {"A2A_STATIC_AUTH_CREDENTIALS": listed, "A2A_TASK_STORE_BACKEND": "database"}
    model: JsonObject = {"providerID": "p", "modelID": "m"}
    first: JsonObject = {
        "opencode": {"directory": "sub", "agent": "docs"},
        "shared": {"model": model},
    }
    elsewhere: JsonObject = {"opencode": {"directory": "other"}}
    opencode.play("error-401")
    async with AsyncExitStack() as stack:
        service = await stack.enter_async_context(started(opencode, tmp_path, **variables))
        asked = await Caller(service, token=ANN_NARROW).send("hello", metadata=first)
        if restarted:
            await stack.aclose()
            service = await stack.enter_async_context(started(opencode, tmp_path, **variables))
        ann = Caller(service, token=ANN)
        rules = opencode.rules(asked.session_id)
        refused = await ann.ask("send", ann.message("x", taskId=asked.id, metadata=elsewhere))
        opencode.play("plain-text")
        done = await ann.send("again", task=asked.id)
        beside = await ann.send("in the root", context=asked.context_id)

    refused.refuses(PARAMS)
    assert b"metadata.opencode.directory" in refused.content
    assert (asked.state, done.state) == ("auth_required", "completed")
    again: Any = opencode.prompts[1]
    assert (again["agent"], again["model"]) == ("docs", model)
    assert done.session_id == asked.session_id != beside.session_id
    assert opencode.rules(asked.session_id) == rules  # still read-only
    opencode.agents.clear()


@pytest.mark.requirement("7.6-auth-required")
async def test_nobody_is_waited_for_without_end_to_sign_in(
    opencode: FakeOpenCode, serve: Serve
) -> None:
    opencode.play("error-401")
    caller = Caller(await serve(A2A_INTERRUPT_REQUEST_TTL_SECONDS="0.2"))

    asked = await caller.send("hello")
    ended = await caller.wait(asked.id, "failed")

    assert asked.state == "auth_required"
    assert ended.error_type == "SIGN_IN_EXPIRED"


async def test_a_deadline_that_passes_while_an_answer_fails_is_not_forgotten(
    opencode: FakeOpenCode, serve: Serve
) -> None:
    opencode.play("permission-once")
    opencode.failing_reply = gate = asyncio.Event()
    caller = Caller(await serve(A2A_INTERRUPT_REQUEST_TTL_SECONDS="0.5"))

    asked = await caller.send("run it")
    answering = asyncio.create_task(caller.send("once", task=asked.id))
    await asyncio.sleep(1)
    gate.set()
    await asyncio.gather(answering, return_exceptions=True)

    await caller.wait(asked.id, "completed")


@pytest.mark.parametrize(
    "name", ["permission-once", "permission-external-directory", "mcp-tool-permission"]
)
async def test_a_call_that_waits_for_a_person_is_no_artifact_yet(
    caller: Caller, opencode: FakeOpenCode, name: str
) -> None:
    opencode.play(name)

    async with caller.stream("run it") as following:
        await following.until_state("input_required")
    asked = await caller.get(following.task.id)
    done = await caller.send("once", task=asked.id)

    assert following.task.tools == []
    assert asked.tools == []
    assert [tool["status"] for tool in done.tools] == ["completed"]


@pytest.mark.requirement("I23")
async def test_parallel_permissions_are_named_by_number_or_all_at_once(
    caller: Caller, service: Running, opencode: FakeOpenCode
) -> None:
    opencode.play("permission-two-parallel-always-first")
    opencode.said[b'"reply":"always"'] = b'"reply":"once"'
    begun = await caller.begin("run both")
    async with Caller(service).subscribe(begun.id) as following:  # 0.3 would stop at the first
        await following.until(lambda update: "2 requests" in str(update.raw))
    task = await caller.get(begun.id)

    unclear = await caller.ask("send", caller.message("yes", taskId=task.id))
    unknown = await caller.ask("send", caller.message("yes 1 and 7", taskId=task.id))
    await caller.begin("yes to all", task=task.id)
    ended = await caller.ended(task.id)

    assert "Request 1:" in task.said
    assert "Request 2:" in task.said
    assert task.interrupt["number"] == 1
    assert unclear.refuses(PARAMS) == ["message.parts"]
    assert "the number of the one you mean (1, 2), such as " in unclear.content.decode()
    assert unknown.refuses(UNSUPPORTED) == []
    assert ended.state == "completed"
    assert ended.history == ["run both", "yes to all"]


async def both_asked(service: Running, opencode: FakeOpenCode, caller: Caller) -> str:
    """Run a task that asks for two permissions at once; return its id."""
    opencode.play("permission-two-parallel-always-first")
    opencode.said[b'"reply":"always"'] = b'"reply":"once"'
    begun = await caller.begin("run both")
    async with Caller(service).subscribe(begun.id) as following:
        await following.until(lambda update: "2 requests" in str(update.raw))
    return begun.id


@pytest.mark.requirement("I6")
@pytest.mark.requirement("I23")
async def test_a_refused_answer_stays_refused_whatever_is_asked_later(
    service: Running, opencode: FakeOpenCode
) -> None:
    caller = Caller(service)
    task_id = await both_asked(service, opencode, caller)
    unclear = caller.message("yes", taskId=task_id)
    first = await caller.ask("send", unclear)
    await caller.begin("1 yes", task=task_id)
    await caller.wait(task_id, "input_required")

    again = await caller.ask("send", unclear)
    left = await caller.get(task_id)

    assert first.refuses(PARAMS) == ["message.parts"]
    assert (again.status, again.content) == (first.status, first.content)
    assert (left.state, left.history) == ("input_required", ["run both", "1 yes"])
    assert (await caller.send("2 yes", task=task_id)).state == "completed"


@pytest.mark.requirement("I23")
async def test_a_late_yes_is_not_for_what_is_asked_next(
    service: Running, opencode: FakeOpenCode
) -> None:
    caller = Caller(service)
    opencode.play("permission-once")
    hold = opencode.hold("message.part.updated")
    begun = await caller.begin("run it")
    await hold.reached.wait()
    early = caller.message("yes", taskId=begun.id)
    refused = await caller.ask("send", early)
    opencode.release()
    await caller.wait(begun.id, "input_required")

    again = await caller.ask("send", early)

    assert refused.refuses(UNSUPPORTED) == []
    assert again.content == refused.content
    assert (await caller.get(begun.id)).state == "input_required"


@pytest.mark.requirement("I23")
async def test_a_doubled_yes_is_not_for_a_request_that_was_shown_a_moment_ago(
    service: Running, opencode: FakeOpenCode, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("UNREAD_SECONDS", "SETTLED_SECONDS"):  # however slow the machine is
        monkeypatch.setattr(f"opencode_a2a.log.seen.{name}", 600.0)
    caller = Caller(service)
    task_id = await both_asked(service, opencode, caller)
    await caller.begin("1 yes", task=task_id)
    await caller.wait(task_id, "input_required")

    doubled = [
        await caller.ask("send", caller.message("yes", taskId=task_id)),
        await caller.ask("send", caller.message(caller.data({"reply": "once"}), taskId=task_id)),
        await caller.ask("send", caller.message("yes to all", taskId=task_id)),
    ]
    left = await caller.get(task_id)
    done = await caller.send("2 yes", task=task_id)

    for refusal in doubled:
        assert refusal.refuses(UNSUPPORTED) == []
        assert b"only a moment before" in refusal.content
        assert b"Request 2" in refusal.content or b"number" in refusal.content
    assert (left.state, left.history) == ("input_required", ["run both", "1 yes"])
    assert done.state == "completed"


@pytest.mark.sqlite_only
@pytest.mark.requirement("I9")
async def test_a_request_that_is_settled_while_its_answer_waits_is_too_late_to_answer(
    opencode: FakeOpenCode, serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another replica may have shown the request, and its notice may be on the way."""
    opencode.play("permission-once")
    caller, waits = Caller(await serve()), asyncio.Event()
    begun = await caller.begin("run it")
    waiting: list[Any] = []
    while not waiting:
        waiting = (await caller.method("opencode.permissions.list"))["items"]

    def has_others(_: Census) -> bool:
        waits.set()
        return True

    monkeypatch.setattr("opencode_a2a.tasks.continuing.SEEN_SECONDS", 60)
    monkeypatch.setattr(Census, "has_others", property(has_others))
    late = asyncio.create_task(caller.ask("send", caller.message("1 yes", taskId=begun.id)))
    async with asyncio.timeout(60):
        await waits.wait()
    monkeypatch.undo()
    reply = {"request_id": waiting[0]["request_id"], "reply": "once"}
    await caller.method("a2a.interrupt.permission.reply", reply)

    assert (await late).refuses(UNSUPPORTED) == []
    assert (await caller.ended(begun.id)).history == ["run it"]


@pytest.mark.requirement("I23")
async def test_a_yes_for_one_of_several_tasks_stays_refused_when_one_is_left(
    service: Running, opencode: FakeOpenCode
) -> None:
    caller = Caller(service)
    opencode.play("permission-once")
    first = await caller.send("run it")
    place = {"opencode": {"new_task": True, "directory": "sub"}}
    (opencode.workspace / "sub").mkdir(exist_ok=True)
    second = await caller.send("run it", context=first.context_id, metadata=place)
    unclear = caller.message("yes", contextId=first.context_id)
    refused = await caller.ask("send", unclear)
    await caller.cancel(first.id)

    again = await caller.ask("send", unclear)

    assert refused.refuses(UNSUPPORTED) == []
    named = re.search(rb"Name one with taskId \((\S+), (\S+)\), or set ", refused.content)
    assert {*(named.groups() if named else ())} == {first.id.encode(), second.id.encode()}
    assert again.refuses(UNSUPPORTED) == []
    assert (await caller.get(second.id)).state == "input_required"


@pytest.mark.requirement("I6")
@pytest.mark.requirement("I23")
async def test_an_answer_that_fails_for_one_of_several_says_for_which_and_repeats_nothing(
    service: Running, opencode: FakeOpenCode
) -> None:
    caller = Caller(service)
    task_id = await both_asked(service, opencode, caller)
    opencode.replies.clear()
    opencode.failing_reply, opencode.replies_before_failure = asyncio.Event(), 1
    opencode.failing_reply.set()
    answer = caller.message("yes to all", taskId=task_id)

    failed = await caller.ask("send", answer)
    left = await caller.get(task_id)
    done = await caller.ask("send", answer)

    assert "counted for 1; not for 2: " in failed.body["error"]["message"]
    assert (left.state, left.interrupt["number"]) == ("input_required", 2)
    assert done.task["status"]["state"] == "TASK_STATE_COMPLETED"
    assert len(opencode.replies) == len({*opencode.replies}) == 2


@pytest.mark.requirement("I23")
async def test_a_list_of_tasks_does_not_count_as_shown(
    service: Running, opencode: FakeOpenCode
) -> None:
    caller = Caller(service)
    opencode.play("permission-once")
    begun = await caller.begin("run it")
    listing = {"contextId": begun.context_id}
    async with asyncio.timeout(60):
        while "INPUT_REQUIRED" not in str((await caller.ask("list", listing)).body):  # noqa: ASYNC110 - nothing may tell it
            await asyncio.sleep(0.05)

    blind = await caller.ask("send", caller.message("yes", taskId=begun.id))
    done = await caller.send("yes", task=begun.id)

    assert blind.refuses(UNSUPPORTED) == []
    assert done.state == "completed"


async def test_no_to_all_refuses_each_of_them(
    caller: Caller, service: Running, opencode: FakeOpenCode
) -> None:
    opencode.play("permission-two-parallel-reject-first")
    begun = await caller.begin("run both")
    async with Caller(service).subscribe(begun.id) as following:  # 0.3 would stop at the first
        await following.until(lambda update: "2 requests" in str(update.raw))

    ended = await caller.send("no to all", task=begun.id)

    assert (ended.state, ended.history) == ("rejected", ["run both", "no to all"])


@pytest.mark.requirement("I9")
async def test_an_id_that_no_database_can_hold_is_refused(service: Running) -> None:
    params = {"request_id": "per_\0", "reply": "once"}
    answer = await Caller(service).answer("a2a.interrupt.permission.reply", params)

    assert answer["error"]["data"][0]["reason"] == "INVALID_FIELD"


@pytest.mark.requirement("I23")
async def test_a_permission_for_the_conversation_is_not_asked_for_again_until_it_is_revoked(
    caller: Caller, service: Running, opencode: FakeOpenCode
) -> None:
    opencode.play("permission-once")
    methods = Caller(service)
    first = await caller.send("run it")

    done = await caller.send("yes for this conversation", task=first.id)
    second = await caller.send("run it again", context=first.context_id)
    elsewhere = await caller.send("run it")
    held = (await methods.method("a2a.interrupt.grants.list"))["items"]
    (grant,) = [one for one in held if one["context_id"] == first.context_id]
    await methods.method("a2a.interrupt.grants.revoke", {"grant_id": grant["grant_id"]})
    third = await caller.send("run it once more", context=first.context_id)

    assert '"yes for this conversation"' in first.said
    assert (done.state, second.state) == ("completed", "completed")
    assert (elsewhere.state, third.state) == ("input_required", "input_required")
    assert (grant["scope"], grant["permission"], grant["patterns"]) == ("context", "bash", ["ls *"])


@pytest.mark.requirement("I23")
async def test_a_permission_for_the_task_as_data_is_for_that_task(
    caller: Caller, opencode: FakeOpenCode
) -> None:
    opencode.play("permission-once")
    first = await caller.send("run it")
    scoped = caller.data({"reply": "once", "scope": "task", "number": 1})

    done = await caller.ask("send", caller.message(scoped, taskId=first.id))
    second = await caller.send("run it again", context=first.context_id)

    assert done.task["id"] == first.id
    assert second.state == "input_required"


@pytest.mark.sqlite_only
@pytest.mark.requirement("I23")
@pytest.mark.parametrize("by_method", [False, True], ids=["by message", "by method"])
async def test_an_answer_for_an_opencode_that_hangs_is_told_as_stored_and_given_once_it_goes_on(
    tmp_path: Path,
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
    by_method: bool,
) -> None:
    """A process that was stopped keeps its connections, and never answers."""
    monkeypatch.setattr("opencode_a2a.turns.interrupts.CONFIRM_SECONDS", 0.5)
    async with (
        FakeOpenCode(tmp_path_factory.mktemp("workspace")).running() as opencode,
        Line("127.0.0.1", int(opencode.url.rpartition(":")[2])) as line,
    ):
        opencode.play("permission-once")
        address = {"OPENCODE_BASE_URL": f"http://127.0.0.1:{line.port}"}
        async with started(opencode, tmp_path, **address) as service:
            caller = Caller(service)
            asked = await caller.send("run it")
            request_id = asked.interrupt["request_id"]

            async def answer(reply: str, message_id: str = "m1") -> Any:
                async with asyncio.timeout(5):
                    if by_method:
                        params = {"request_id": request_id, "reply": reply}
                        told = await caller.answer("a2a.interrupt.permission.reply", params)
                        return told.get("error")
                    sent = caller.message(reply, taskId=asked.id, messageId=message_id)
                    configured = sent | {"configuration": {"returnImmediately": True}}
                    return (await caller.ask("send", configured)).body.get("error")

            line.passing.clear()
            stored, repeated = await answer("once"), await answer("once")
            contrary = await answer("reject", "m2")
            waiting = await caller.get(asked.id)
            line.passing.set()
            done = await caller.ended(asked.id)
            after = await answer("once")

    for told in (stored, repeated):
        assert told["data"][0]["reason"] == "UPSTREAM_UNREACHABLE"
        assert "The answer is stored" in told["message"]
    assert contrary["data"][0]["reason"] == "INTERRUPT_REQUEST_NOT_FOUND"
    assert waiting.state == "input_required"
    assert (done.state, done.text) == ("completed", "after")
    assert done.history == ["run it", *([] if by_method else ["once"])]
    assert set(opencode.replies) == {request_id}
    assert after is None
