"""Turns that do not come to their end: the model fails, hangs or loops, or somebody cancels."""

import time
import uuid
from types import SimpleNamespace
from typing import Any

import pytest

from opencode_a2a.config.groups import TurnSettings
from opencode_a2a.ids import SessionId
from opencode_a2a.opencode.driver import Driver, Location
from tests.live.conftest import Serve, two_wires
from tests.support.answers import RefusedError, Wire
from tests.support.backstage import Backstage, script
from tests.support.caller import Caller
from tests.support.service import Running

pytestmark = pytest.mark.live

LOOP = {"tool": "bash", "input": {"command": "true", "description": "d"}}


async def busy(opencode: Driver, backstage: Backstage) -> set[SessionId]:
    at = Location(directory=str(backstage.workspace))
    return set(await opencode.session_status(at=at))


# The model fails


@pytest.mark.both_drivers
@pytest.mark.parametrize(
    ("failure", "kind", "remedy"),
    [
        ({"error": 400, "message": "no such option"}, "UPSTREAM_BAD_REQUEST", "no such option"),
        ({"error": 404}, "UPSTREAM_RESOURCE_NOT_FOUND", "choose another"),
        ({"malformed": True}, "UPSTREAM_EXECUTION_ERROR", "OpenCode could not run the turn"),
    ],
    ids=["400", "404", "malformed"],
)
async def test_a_failing_model_fails_the_task_with_a_remedy(
    caller: Caller, failure: Any, kind: str, remedy: str
) -> None:
    task = await caller.send(script(failure))

    assert task.state == "failed"
    assert task.error_type == kind
    assert remedy in task.said
    assert task.history  # the user's message is kept


@pytest.mark.parametrize("status", [429, 500, 503])
async def test_a_passing_failure_is_told_as_a_retry_and_sat_out(
    caller: Caller, status: int
) -> None:
    failure = {"error": status, "times": 1, "retry_after": 0}

    async with caller.stream(script(failure, {"say": "recovered"})) as following:
        await following.rest()

    assert following.task.state == "completed"
    assert following.task.text == "recovered"
    retries = [progress for progress in following.progress if progress["type"] == "retry"]
    assert [retry["status"] for retry in retries] == ["waiting"]
    assert retries[0]["subtitle"] == "attempt 1"


@pytest.mark.parametrize(
    "actions",
    [
        [{"drop": True, "times": 1}, {"say": "whole answer"}],
        [{"say": "whole "}, {"drop": True, "times": 1}, {"say": "answer"}],
        [{"say": "whole "}, {"stream_error": "broken", "times": 1}, {"say": "answer"}],
    ],
    ids=["before any output", "in the middle", "error in the stream"],
)
async def test_text_of_a_dropped_reply_is_replaced_and_not_repeated(
    caller: Caller, actions: Any
) -> None:
    async with caller.stream(script(*actions)) as following:
        await following.rest()

    stored = await caller.get(following.task.id)
    assert stored.text == "whole answer"
    assert following.task.text == "whole answer"


async def test_text_of_a_dropped_reply_stays_when_no_other_attempt_follows(caller: Caller) -> None:
    actions = [{"say": "half an answer", "delay": 0.2}, {"drop": True}]

    async with caller.stream(script(*actions)) as following:
        await following.until(lambda u: bool(u.progress) and u.progress["type"] == "retry")
        waiting = await caller.get(following.task.id)
        canceled = await caller.cancel(following.task.id)

    assert (waiting.state, waiting.text) == ("working", "half an answer")
    assert (canceled.state, canceled.text) == ("canceled", "half an answer")


@pytest.mark.both_drivers
async def test_text_stays_when_the_reply_breaks_off_for_good(caller: Caller) -> None:
    task = await caller.send(script({"say": "half an answer"}, {"malformed": True}))

    assert (task.state, task.text) == ("failed", "half an answer")


async def test_a_reply_dropped_after_a_tool_call_keeps_both_calls(caller: Caller) -> None:
    actions = [
        [{"say": "calling"}, LOOP, {"drop": True, "times": 1}],
        [{"say": "done"}],
    ]

    async with caller.stream(script(*actions)) as following:
        await following.rest()

    stored = await caller.get(following.task.id)
    assert stored.state == "completed"
    assert stored.text == following.task.text == "calling\n\ndone"
    assert {tool["status"] for tool in stored.tools} <= {"completed", "error"}


async def test_a_filtered_answer_fails_and_keeps_its_text(caller: Caller) -> None:
    task = await caller.send(script({"say": "some"}, {"finish": "content_filter"}))

    assert task.state == "failed"
    assert task.error_type == "UPSTREAM_CONTENT_FILTERED"
    assert task.text == "some"


async def test_an_answer_that_was_cut_for_length_completes_and_says_so(caller: Caller) -> None:
    task = await caller.send(script({"say": "some"}, {"finish": "length"}))

    assert task.state == "completed"
    assert task.opencode["finish"] == "length"


# The provider wants a sign-in


@pytest.mark.both_drivers
@two_wires
async def test_a_refused_key_asks_for_a_sign_in_and_the_next_message_tries_again(
    service: Running, wire: Wire
) -> None:
    caller = Caller(service, wire)

    waiting = await caller.send(script({"error": 401}))
    again = await caller.send(script({"say": "signed in"}), task=waiting.id)

    assert waiting.state == "auth_required"
    assert waiting.error_type == "UPSTREAM_UNAUTHORIZED"
    assert "sign in" in waiting.said
    assert again.id == waiting.id
    assert again.state == "completed"
    assert again.text == "signed in"
    assert again.session_id == waiting.session_id
    assert len(again.history) == 2
    assert again.error_type is None


async def test_a_task_that_waits_for_a_sign_in_can_be_canceled(caller: Caller) -> None:
    waiting = await caller.send(script({"error": 401}))

    canceled = await caller.cancel(waiting.id)

    assert canceled.state == "canceled"


async def test_a_stream_ends_where_a_sign_in_is_wanted(caller: Caller) -> None:
    async with caller.stream(script({"error": 401})) as following:
        await following.rest()

    assert following.states[-1] == "auth_required"


# Nothing ends by itself


async def test_a_model_that_never_finishes_is_stopped_after_so_many_steps(serve: Serve) -> None:
    caller = Caller(await serve(A2A_TURN_MAX_STEPS="5"))

    task = await caller.send(script({"finish": None}))

    assert task.state == "failed"
    assert task.error_type == "UPSTREAM_ENDLESS"


async def test_a_retry_a_day_ahead_is_not_waited_for(
    serve: Serve, opencode: Driver, backstage: Backstage
) -> None:
    caller = Caller(await serve())

    task = await caller.send(script({"error": 429, "retry_after": 86_400}))

    assert task.state == "failed"
    assert task.error_type == "UPSTREAM_QUOTA_EXCEEDED"
    assert task.session_id not in await busy(opencode, backstage)


@pytest.mark.requirement("I16")
async def test_a_clock_that_is_set_back_does_not_end_a_turn_that_waits_for_a_retry(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("opencode_a2a.turns.attempt.TICK_SECONDS", 0.2)
    monkeypatch.setattr(TurnSettings, "max_retry_wait_seconds", 60)
    caller = Caller(await serve())
    prompt = script({"error": 429, "retry_after": 2, "times": 1}, {"say": "at last"})

    async with caller.stream(prompt) as following:
        await following.until(lambda update: "retry" in str(update.progress))
        earlier = time.time_ns() - 24 * 3600 * 10**9
        monkeypatch.setattr("opencode_a2a.clock.time", SimpleNamespace(time_ns=lambda: earlier))
        await following.rest()

    assert (following.task.state, following.task.text) == ("completed", "at last")


async def test_a_model_that_hangs_is_given_up_after_silence(
    serve: Serve, opencode: Driver, backstage: Backstage
) -> None:
    caller = Caller(await serve(A2A_TURN_SILENCE_SECONDS="1"))

    task = await caller.send(script({"say": "half"}, {"hang": True}))

    assert task.state == "failed"
    assert task.error_type == "UPSTREAM_TIMEOUT"
    assert task.text == "half"
    assert task.session_id not in await busy(opencode, backstage)


async def test_a_turn_that_takes_longer_than_the_setting_is_stopped(serve: Serve) -> None:
    caller = Caller(await serve(OPENCODE_TIMEOUT_STREAM="1"))

    task = await caller.send(script({"say": "."}, {"hang": True}))

    assert task.state == "failed"
    assert task.error_type == "UPSTREAM_TIMEOUT"


async def test_a_turn_beyond_the_limit_is_refused_at_once(
    serve: Serve, backstage: Backstage
) -> None:
    caller = Caller(await serve(OPENCODE_MAX_CONCURRENT_STREAMS="1"))
    gate = str(uuid.uuid4())
    first = await caller.begin(script({"gate": gate}, {"say": "first"}))
    await backstage.reached(gate)

    second = await caller.send(script({"say": "second"}))
    await backstage.open(gate)

    assert second.state == "failed"
    assert second.error_type == "UPSTREAM_BACKPRESSURE"
    assert (await caller.ended(first.id)).text == "first"


# Wrong names


@pytest.mark.both_drivers
@pytest.mark.parametrize("model", ["demo/none", "nobody/none"])
async def test_an_unknown_model_fails_the_task(caller: Caller, model: str) -> None:
    provider, _, name = model.partition("/")
    metadata = {"shared": {"model": {"providerID": provider, "modelID": name}}}

    task = await caller.send(script({"say": "x"}), metadata=metadata)

    assert task.state == "failed"
    assert task.error_type == "UPSTREAM_EXECUTION_ERROR"
    assert "model" in task.said.lower()
    again = await caller.send(script({"say": "still here"}), context=task.context_id)
    assert again.text == "still here"


async def test_an_unknown_agent_fails_the_task(serve: Serve) -> None:
    caller = Caller(await serve(OPENCODE_AGENT="nobody"))

    task = await caller.send(script({"say": "x"}))

    assert task.state == "failed"
    assert "nobody" in task.said


# Somebody cancels


@pytest.mark.both_drivers
@two_wires
async def test_a_canceled_turn_keeps_its_text_and_its_session(
    service: Running, backstage: Backstage, opencode: Driver, wire: Wire
) -> None:
    caller = Caller(service, wire)
    async with caller.stream(script({"say": "half "}, {"hang": True})) as following:
        await following.until_text("half ")
        canceled = await caller.cancel(following.task.id)
        await following.rest()

    assert canceled.state == following.task.state == "canceled"
    assert canceled.text == following.task.text == "half "
    assert canceled.session_id not in await busy(opencode, backstage)
    repeated = await caller.cancel(canceled.id)
    assert repeated.state == "canceled"
    again = await caller.send(script({"say": "on"}), context=canceled.context_id)
    assert again.session_id == canceled.session_id
    assert again.text == "on"


@pytest.mark.requirement("I7")
async def test_a_running_tool_is_stopped_by_a_cancel(caller: Caller, backstage: Backstage) -> None:
    flag = backstage.workspace / str(uuid.uuid4())
    command = f"echo begun; sleep 60; touch {flag.name}"
    call = {"tool": "bash", "input": {"command": command, "description": "d"}}

    async with caller.stream(script(call, {"say": "never"})) as following:
        await following.until(lambda _: any(tool.get("output") for tool in following.task.tools))
        canceled = await caller.cancel(following.task.id)

    assert canceled.state == "canceled"
    assert canceled.tools[0]["status"] in ("completed", "error")
    assert not flag.exists()


async def test_a_turn_that_waits_for_a_retry_can_be_canceled(caller: Caller) -> None:
    async with caller.stream(script({"error": 503, "retry_after": 30})) as following:
        await following.until(lambda u: bool(u.progress) and u.progress["type"] == "retry")
        canceled = await caller.cancel(following.task.id)

    assert canceled.state == "canceled"
    assert canceled.error_type is None


@pytest.mark.both_drivers
async def test_sub_agents_are_stopped_with_their_turn(
    caller: Caller, backstage: Backstage, opencode: Driver
) -> None:
    gate = str(uuid.uuid4())
    call = {
        "tool": "task",
        "input": {"description": "look", "subagent_type": "general", "prompt": "look"},
        "script": [{"say": "child "}, {"gate": gate}, {"say": "never"}],
    }
    begun = await caller.begin(script(call, {"say": "never"}))
    await backstage.reached(gate)

    canceled = await caller.cancel(begun.id)

    children = await opencode.session_children(SessionId(canceled.session_id))
    assert canceled.state == "canceled"
    assert len(children) == 1
    assert not {child.id for child in children} & await busy(opencode, backstage)


async def test_canceling_a_waiting_turn_leaves_the_running_one_alone(
    caller: Caller, backstage: Backstage
) -> None:
    gate = str(uuid.uuid4())
    first = await caller.begin(script({"say": "one "}, {"gate": gate}, {"say": "two"}))
    await backstage.reached(gate)
    async with caller.stream(script({"say": "never"}), context=first.context_id) as second:
        await second.until(lambda u: bool(u.progress) and u.progress["type"] == "queue")
        canceled = await caller.cancel(second.task.id)
    await backstage.open(gate)

    assert canceled.state == "canceled"
    assert (await caller.ended(first.id)).text == "one two"


async def test_a_finished_task_cannot_be_canceled(caller: Caller) -> None:
    task = await caller.send(script({"say": "done"}))

    with pytest.raises(RefusedError) as refused:
        await caller.cancel(task.id)

    assert refused.value.code == -32002


async def test_an_answer_to_a_task_that_asks_nothing_is_refused(
    caller: Caller, backstage: Backstage
) -> None:
    gate = str(uuid.uuid4())
    task = await caller.begin(script({"gate": gate}, {"say": "done"}))
    await backstage.reached(gate)

    with pytest.raises(RefusedError) as refused:
        await caller.send("yes", task=task.id)
    await backstage.open(gate)

    assert refused.value.code == -32004
    assert (await caller.ended(task.id)).text == "done"
