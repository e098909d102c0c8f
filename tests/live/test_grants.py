"""Permissions that a person gives for a task or a conversation, before a real OpenCode."""

import contextlib
import uuid
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import httpx2
import orjson
import pytest
from structlog.testing import capture_logs

from tests.live.conftest import kill_at
from tests.support.answers import Task
from tests.support.backstage import Backstage, script
from tests.support.caller import Caller
from tests.support.forked import ForkedProgram
from tests.support.proxy import Moment, Proxy
from tests.support.service import Running, serving, settings_for, variables_for

pytestmark = [pytest.mark.live, pytest.mark.requirement("I23")]

BOB = "a-token-for-the-tests-of-another-caller"
BOBS = orjson.dumps([{"scheme": "bearer", "principal": "bob", "token": BOB}]).decode()
DONE = {"say": "done"}
LIST = "a2a.interrupt.grants.list"
REVOKE = "a2a.interrupt.grants.revoke"


def git(*arguments: str) -> list[Any]:
    """Return a step of the model for each command, one after the other."""
    return [
        [{"tool": "bash", "input": {"command": f"git log {argument}", "description": "d"}}]
        for argument in arguments
    ]


@pytest.fixture
async def shared(asking_backstage: Backstage, tmp_path: Path) -> AsyncGenerator[Running]:
    settings = settings_for(asking_backstage, tmp_path, A2A_STATIC_AUTH_CREDENTIALS=BOBS)
    async with serving(settings) as running:
        yield running


@pytest.fixture
def ann(shared: Running) -> Caller:
    return Caller(shared)


@pytest.fixture
def bob(shared: Running) -> Caller:
    return Caller(shared, token=BOB)


def outputs(task: Task) -> list[str]:
    return [tool["status"] for tool in task.tools]


async def test_twenty_commands_need_one_answer(ann: Caller) -> None:
    with capture_logs() as logs:
        asked = await ann.send(script(*git(*(f"-{n}" for n in range(1, 21))), [DONE]))
        ended = await ann.send("yes for this task", task=asked.id)

    assert '"yes for this task"' in asked.said
    assert "git log *" in asked.said
    assert (ended.state, ended.text) == ("completed", "done")
    assert outputs(ended) == ["completed"] * 20
    assert ended.history[1:] == ["yes for this task"]
    settled = [one for one in logs if one["event"] == "interrupt settled"]
    (given,) = [one for one in logs if one["event"] == "grant given"]
    assert [one["resolution"] for one in settled] == ["once"] * 20
    assert {one["by"] for one in settled[1:]} == {f"grant:{given['grant_id']}"}
    assert (given["permission"], given["patterns"]) == ("bash", ["git log *"])
    assert (await ann.method(LIST))["items"] == []  # it has ended with the task


async def test_a_grant_for_the_task_ends_with_it(ann: Caller) -> None:
    first = await ann.send(script(*git("-1"), [DONE]))
    await ann.send("yes for this task", task=first.id)

    second = await ann.send(script(*git("-1"), [DONE]), context=first.context_id)

    assert (second.state, second.id != first.id) == ("input_required", True)
    await ann.cancel(second.id)


async def test_a_grant_for_the_conversation_is_for_its_tasks_and_no_others(
    ann: Caller, bob: Caller
) -> None:
    first = await ann.send(script(*git("-1"), [DONE]))
    await ann.send("yes for this conversation", task=first.id)

    second = await ann.send(script(*git("-2"), [DONE]), context=first.context_id)
    others = [
        await ann.send(script(*git("-1"), [DONE])),
        await bob.send(script(*git("-1"), [DONE])),
        await bob.send(script(*git("-1"), [DONE]), context=first.context_id),
        await ann.send(
            script([{"tool": "bash", "input": {"command": "git status", "description": "d"}}]),
            context=first.context_id,
        ),
    ]

    (grant,) = (await ann.method(LIST))["items"]
    assert (grant["scope"], grant["context_id"]) == ("context", first.context_id)
    assert (grant["permission"], grant["patterns"]) == ("bash", ["git log *"])
    assert (await bob.method(LIST))["items"] == []
    foreign = await bob.refused(REVOKE, {"grant_id": grant["grant_id"]})
    assert (foreign.code, foreign.reason) == (-31020, "GRANT_NOT_FOUND")
    assert second.state == "completed"
    assert [task.state for task in others] == ["input_required"] * 4
    for task in others:
        await (bob if task in others[1:3] else ann).cancel(task.id)


async def test_a_grant_that_is_revoked_in_the_middle_allows_nothing_more(
    ann: Caller, asking_backstage: Backstage
) -> None:
    gate = uuid.uuid4().hex
    steps = (*git("-1", "-2"), [{"gate": gate}, *git("-3")[0]], [DONE])
    asked = await ann.send(script(*steps))
    await ann.begin("yes for this task", task=asked.id)
    await asking_backstage.reached(gate)

    (grant,) = (await ann.method(LIST))["items"]
    await ann.method(REVOKE, {"grant_id": grant["grant_id"]})
    again = await ann.refused(REVOKE, {"grant_id": grant["grant_id"]})
    await asking_backstage.open(gate)
    third = await ann.wait(asked.id, "input_required")

    assert again.reason == "GRANT_NOT_FOUND"
    assert (await ann.method(LIST))["items"] == []
    assert "git log -3" in third.said
    ended = await ann.send(f"{third.interrupt['number']} no", task=asked.id)
    assert outputs(ended) == ["completed", "completed", "error"]


async def test_what_waits_already_and_is_covered_is_allowed_with_it(ann: Caller) -> None:
    calls = [call for step in git("-1", "-2") for call in step]
    begun = await ann.begin(script(calls, [DONE]))
    async with ann.subscribe(begun.id) as following:
        await following.until(lambda u: bool(u.status) and "2 requests" in str(u.status))

    ended = await ann.send("1 yes for this task", task=begun.id)
    ended = await ann.ended(ended.id)

    assert (ended.state, outputs(ended)) == ("completed", ["completed"] * 2)


async def test_a_method_gives_a_grant_too_and_only_with_once(ann: Caller) -> None:
    asked = await ann.send(script(*git("-1", "-2"), [DONE]))
    reply = {"request_id": asked.interrupt["request_id"], "reply": "reject", "scope": "task"}

    wrong = await ann.refused("a2a.interrupt.permission.reply", reply)
    await ann.method("a2a.interrupt.permission.reply", {**reply, "reply": "once"})
    ended = await ann.ended(asked.id)

    assert wrong.fields == ("scope",)
    assert (ended.state, outputs(ended)) == ("completed", ["completed"] * 2)


@pytest.mark.parametrize("moment", list(Moment), ids=lambda moment: moment.value)
async def test_a_grant_survives_a_kill_between_the_answer_and_its_use(
    asking_backstage: Backstage, tmp_path: Path, moment: Moment
) -> None:
    async with Proxy(asking_backstage.url) as wire:
        variables = variables_for(asking_backstage, tmp_path, OPENCODE_BASE_URL=wire.url)
        async with ForkedProgram(variables) as program:
            ann, answer = Caller(program), str(uuid.uuid4())
            asked = await ann.send(script(*git("-1", "-2", "-3"), [DONE]))

            async def allow() -> None:
                with contextlib.suppress(httpx2.TransportError, ConnectionError):
                    await ann.send("yes for this task", task=asked.id, message_id=answer)

            await kill_at(moment, wire, program, allow())

            again = await ann.send("yes for this task", task=asked.id, message_id=answer)
            ended = await ann.ended(asked.id)

    assert again.id == asked.id
    assert (ended.state, outputs(ended)) == ("completed", ["completed"] * 3)
    assert ended.history[1:] == ["yes for this task"]
