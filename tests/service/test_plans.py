"""Messages that are planned first: how the plan is shown, and what may be answered to it."""

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

import pytest
from structlog.testing import capture_logs

from opencode_a2a.events import Finished, JsonObject, Outcome
from opencode_a2a.tasks.open import OpenTask
from tests.support.answers import PARAMS, UNSUPPORTED, RefusedError, Wire
from tests.support.caller import Caller
from tests.support.front import Serve
from tests.support.opencode import FakeOpenCode

pytestmark = pytest.mark.asyncio(loop_scope="module")

ANSWER = "one two three four"
PLAN: JsonObject = {"opencode": {"plan": True}}


@pytest.fixture(autouse=True)
async def agents(opencode: FakeOpenCode) -> AsyncGenerator[list[Any]]:
    named = ("build", "plan", "docs")
    opencode.agents[:] = [{"name": name, "mode": "primary"} for name in named]
    yield opencode.agents
    opencode.agents.clear()


def prompted(opencode: FakeOpenCode) -> list[tuple[Any, str]]:
    """Return the agent and the text of each prompt."""
    found: list[Any] = opencode.prompts
    return [(prompt.get("agent"), prompt["parts"][0]["text"]) for prompt in found]


@pytest.mark.requirement("3.4.3-input-required")
async def test_a_plan_is_streamed_as_an_artifact_and_go_continues_the_task(
    caller: Caller, opencode: FakeOpenCode
) -> None:
    async with caller.stream("do it", metadata=PLAN) as planning:
        await planning.rest()
    waiting = await caller.get(planning.task.id)
    done = await caller.send("Go: gently", context=waiting.context_id)

    (streamed,) = [one for one in planning.task.artifacts if one["name"] == "plan"]
    (plan,) = [one for one in done.artifacts if one["name"] == "plan"]
    assert planning.states[-1] == waiting.state == "input_required"
    assert "".join(part["text"] for part in streamed["parts"]) == ANSWER
    assert [part["text"] for part in plan["parts"]] == [ANSWER]
    if caller.wire.modern:
        assert plan["parts"][0]["mediaType"] == "text/markdown"
    # A reader of the status alone has the plan too; one of a stream has seen it.
    assert waiting.said == f"{ANSWER}\n\n{planning.task.said}"
    assert 'Answer "go"' in planning.task.said
    assert (done.id, done.state, done.text) == (waiting.id, "completed", ANSWER)
    assert done.history == ["do it", "Go: gently"]
    assert prompted(opencode) == [
        ("plan", "do it"),
        ("build", "The plan is approved. Carry it out.\n\ngently"),
    ]


@pytest.mark.parametrize("wire", [Wire.RPC])
async def test_every_other_text_revises_the_plan_with_what_was_asked_for_before(
    caller: Caller, opencode: FakeOpenCode
) -> None:
    asked: JsonObject = {"opencode": {"plan": True, "agent": "docs"}}
    task = await caller.send("do it", metadata=asked)

    revised = await caller.send("yes, but only the first file", task=task.id)
    done = await caller.send("2 yes", task=task.id)

    assert (revised.id, revised.state, done.state) == (task.id, "input_required", "completed")
    assert revised.interrupt["number"] == 2
    assert prompted(opencode) == [
        ("plan", "do it"),
        ("plan", "yes, but only the first file"),
        ("docs", "The plan is approved. Carry it out."),
    ]


@pytest.mark.parametrize("wire", [Wire.RPC])
async def test_a_second_go_is_refused_and_a_plan_can_be_canceled_by_a_word(
    caller: Caller, opencode: FakeOpenCode
) -> None:
    first = await caller.send("do it", metadata=PLAN)
    second = await caller.send("do it too", metadata=PLAN)
    hold = opencode.hold()
    await caller.begin("go", task=first.id)
    async with asyncio.timeout(60):
        await hold.reached.wait()

    again = await caller.ask("send", caller.message("go", taskId=first.id))
    canceled = await caller.send("Cancel.", task=second.id, message_id="c")
    repeated = await caller.send("Cancel.", task=second.id, message_id="c")
    opencode.release()
    done = await caller.ended(first.id)

    again.refuses(UNSUPPORTED)
    assert (canceled.state, done.state) == ("canceled", "completed")
    assert repeated.raw == canceled.raw
    assert len(opencode.prompts) == 3


@pytest.mark.parametrize("wire", [Wire.RPC])
async def test_a_plan_that_nobody_approves_in_time_ends_the_task(serve: Serve, wire: Wire) -> None:
    caller = Caller(await serve(A2A_INTERRUPT_REQUEST_TTL_SECONDS="0.3"), wire)

    async with caller.stream("do it", metadata=PLAN) as planning:
        await planning.rest()
    ended = await caller.ended(planning.task.id)

    assert (ended.state, ended.error_type) == ("failed", "INTERRUPT_EXPIRED")
    assert "nothing was changed" in ended.said


@pytest.mark.requirement("ours-request-metadata")
@pytest.mark.parametrize("wire", [Wire.RPC])
@pytest.mark.parametrize("case", ["unattended", "no plan agent", "not a flag"])
async def test_what_cannot_be_planned_is_refused_by_field(
    caller: Caller, opencode: FakeOpenCode, agents: list[Any], case: str
) -> None:
    wanted: JsonObject = {"plan": True}
    if case == "unattended":
        wanted["profile"] = "unattended"
    elif case == "no plan agent":
        del agents[1]
    else:
        wanted["plan"] = "yes"

    refused = await caller.ask("send", caller.message("do it", metadata={"opencode": wanted}))

    refused.refuses(PARAMS)
    assert b"metadata.opencode.plan" in refused.content
    assert not opencode.prompts


@pytest.mark.parametrize("wire", [Wire.RPC])
async def test_a_task_that_works_is_not_planned_any_more(
    caller: Caller, opencode: FakeOpenCode
) -> None:
    hold = opencode.hold()
    task = await caller.begin("do it")
    async with asyncio.timeout(60):
        await hold.reached.wait()

    refused = await caller.ask("send", caller.message("plan it", taskId=task.id, metadata=PLAN))
    opencode.release()
    await caller.ended(task.id)

    refused.refuses(PARAMS)
    assert len(opencode.prompts) == 1


@pytest.mark.parametrize("wire", [Wire.RPC])
async def test_another_try_after_a_sign_in_is_planned_too(
    caller: Caller, opencode: FakeOpenCode
) -> None:
    opencode.play("error-401")
    unsigned = await caller.send("do it", metadata=PLAN)
    opencode.play("plain-text")

    planned = await caller.send("now do it", task=unsigned.id)

    assert (unsigned.state, planned.state) == ("auth_required", "input_required")
    assert prompted(opencode) == [("plan", "do it"), ("plan", "now do it")]


@pytest.mark.parametrize("wire", [Wire.RPC])
async def test_a_go_for_a_plan_that_changed_meanwhile_approves_nothing(
    caller: Caller, opencode: FakeOpenCode
) -> None:
    task = await caller.send("do it", metadata=PLAN)
    named: JsonObject = {"opencode": {"agent": "docs"}}
    # The "go" has been understood, and its agent is looked up.
    held = opencode.held_agents = asyncio.Event()

    listed = asyncio.create_task(opencode.asked("agents", 1))
    await asyncio.sleep(0)  # it counts from now on
    going = asyncio.create_task(caller.send("go", task=task.id, metadata=named))
    await listed
    revised = await caller.send("only the first file", task=task.id)
    held.set()

    with pytest.raises(RefusedError, match=r"is running"):
        await going
    assert revised.state == "input_required"
    assert [agent for agent, _ in prompted(opencode)] == ["plan", "plan"]


@pytest.mark.parametrize("wire", [Wire.RPC])
async def test_a_go_that_comes_in_the_moment_of_a_cancel_approves_nothing(
    caller: Caller, monkeypatch: pytest.MonkeyPatch
) -> None:
    task = await caller.send("do it", metadata=PLAN)
    start = OpenTask.start

    def start_after_a_cancel(open_task: OpenTask, *args: Any, **options: Any) -> None:
        open_task.log.append_now([Finished(Outcome.CANCELED)])
        start(open_task, *args, **options)

    monkeypatch.setattr(OpenTask, "start", start_after_a_cancel)
    with capture_logs() as records, pytest.raises(RefusedError, match=r"has ended"):
        await caller.send("go", task=task.id)
    found = await caller.get(task.id)

    assert not [one for one in records if one.get("resolution") == "approved"]
    assert (found.state, found.history) == ("canceled", ["do it"])
