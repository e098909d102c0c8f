"""A message on a task that is working: seen at the next step, after the turn, or at once."""

import asyncio
import random
import uuid
from typing import Any

import pytest

from opencode_a2a.ids import SessionId
from opencode_a2a.opencode.driver import Driver
from tests.live.conftest import KILLS, SEED
from tests.support.answers import Task
from tests.support.backstage import Backstage, script
from tests.support.caller import Caller
from tests.support.program import Program

pytestmark = pytest.mark.live

READ = {"tool": "read", "input": {"filePath": "notes.txt"}}


def delivered(how: str) -> dict[str, Any]:
    return {"shared": {"delivery": how}}


def marked(text: str) -> tuple[str, str]:
    """Return a prompt whose beginning can be found again, and that beginning."""
    mark = f"mark-{uuid.uuid4()}"
    return f"{mark} {script({'say': text})}", mark


async def calls(backstage: Backstage, mark: str) -> list[int]:
    """Return how often each call of the model that has a prompt has it, in order."""
    found = [sum(mark in prompt for prompt in one.prompts) for one in backstage.model.requests]
    return [count for count in found if count]


async def stored(opencode: Driver, task: Task, mark: str) -> int:
    """Return how many parts of OpenCode's messages have a mark."""
    messages = (await opencode.messages(SessionId(task.session_id))).items
    texts = [part for m in messages for part in m.parts if part.type == "text"]
    return sum(mark in getattr(part, "text", "") for part in texts)


async def taken(opencode: Driver, task: Task, mark: str) -> None:
    """Wait until OpenCode has a message: in its store, or in the inbox that some have before it."""
    waiting = [f"/api/session/{task.session_id}/{name}" for name in ("inbox", "pending")]
    async with asyncio.timeout(60):
        while not await stored(opencode, task, mark):
            bodies = [(await opencode.raw_response(path)).body for path in waiting]
            if any(mark.encode() in body for body in bodies):
                return
            await asyncio.sleep(0.02)


@pytest.fixture(autouse=True)
def notes(backstage: Backstage) -> None:
    (backstage.workspace / "notes.txt").write_text("notes\n")


async def test_a_message_on_a_working_task_is_seen_at_the_next_step(
    caller: Caller, backstage: Backstage, opencode: Driver
) -> None:
    gate, message_id = str(uuid.uuid4()), str(uuid.uuid4())
    prompt, mark = marked("as you wish")

    async with caller.stream(script([{"gate": gate}, READ], {"say": "not this"})) as following:
        await following.until_state("working")
        task = following.task.id
        await backstage.reached(gate)
        first = await caller.begin(prompt, task=task, message_id=message_id)
        again = await caller.begin(prompt, task=task, message_id=message_id)
        await taken(opencode, first, mark)
        await backstage.open(gate)
        await following.rest()

    ended = await caller.get(task)
    assert first.id == again.id == task
    assert (ended.state, ended.text) == ("completed", "as you wish")
    assert await calls(backstage, mark) == [1]
    assert await stored(opencode, ended, mark) == 1
    progress = [one["status"] for one in following.progress if one["type"] == "message"]
    assert progress == ["accepted", "delivered"]


@pytest.mark.both_drivers
async def test_queued_messages_run_after_the_turn_in_their_order(
    caller: Caller, backstage: Backstage, opencode: Driver
) -> None:
    gate = str(uuid.uuid4())
    prompt, mark = marked("second")

    async with caller.stream(script([{"gate": gate}, READ], {"say": "first"})) as following:
        await following.until_state("working")
        task = following.task.id
        await backstage.reached(gate)
        await caller.begin(prompt, task=task, metadata=delivered("queue"))
        await caller.begin(script({"say": "third"}), task=task, metadata=delivered("queue"))
        await backstage.open(gate)
        await following.rest()

    ended = await caller.get(task)
    assert (ended.state, ended.text) == ("completed", "first\n\nsecond\n\nthird")
    assert following.task.text == ended.text
    assert set(await calls(backstage, mark)) == {1}
    assert await stored(opencode, ended, mark) == 1
    assert len(ended.raw["history"]) == 3


@pytest.mark.both_drivers
async def test_a_message_takes_the_place_of_what_is_running(
    caller: Caller, backstage: Backstage
) -> None:
    gate = str(uuid.uuid4())

    async with caller.stream(script([{"say": "begun"}, {"gate": gate}, {"say": " not this"}])) as s:
        await s.until_state("working")
        task = s.task.id
        await s.until_text("begun")
        await caller.begin(script({"say": "new"}), task=task, metadata=delivered("interrupt"))
        await s.rest()
    await backstage.open(gate)

    ended = await caller.get(task)
    assert (ended.state, ended.text) == ("completed", "begun\n\nnew")
    assert s.task.text == ended.text


async def test_a_failed_turn_does_not_go_on_with_what_was_queued(
    caller: Caller, backstage: Backstage
) -> None:
    gate = str(uuid.uuid4())

    async with caller.stream(script([{"gate": gate}, READ], {"error": 400})) as following:
        await following.until_state("working")
        task = following.task.id
        await backstage.reached(gate)
        await caller.begin(script({"say": "no"}), task=task, metadata=delivered("queue"))
        await backstage.open(gate)
        await following.rest()

    progress = [one["status"] for one in following.progress if one["type"] == "message"]
    assert (await caller.get(task)).state == "failed"
    assert progress == ["accepted", "dropped"]


@pytest.mark.parametrize("how", ["steer", "queue", "interrupt"])
async def test_a_message_survives_a_kill_and_is_never_doubled(
    program: Program, backstage: Backstage, opencode: Driver, how: str
) -> None:
    chance = random.Random(f"{how}{SEED}")  # noqa: S311 - the moments are to be the same in every run
    caller = Caller(program)
    for number in range(KILLS):
        gate = str(uuid.uuid4())
        prompt, mark = marked(f"answer {number}")
        begun = await caller.begin(script([{"gate": gate}, READ], {"say": "first"}))
        await backstage.reached(gate)

        # The service dies somewhere between the message and its answer.
        sent = asyncio.create_task(
            caller.begin(prompt, task=begun.id, message_id=mark, metadata=delivered(how))
        )
        await asyncio.sleep(chance.uniform(0, 0.06))
        await program.kill()
        await asyncio.gather(sent, return_exceptions=True)
        await program.start()
        again = await caller.begin(prompt, task=begun.id, message_id=mark, metadata=delivered(how))
        if how == "steer":
            await taken(opencode, again, mark)
        if how != "interrupt":
            await backstage.open(gate)
        ended = await caller.ended(begun.id)
        await backstage.open(gate)

        wanted = {"steer": f"answer {number}", "queue": f"first\n\nanswer {number}"}
        assert ended.state == "completed", ended.raw
        assert ended.text == wanted.get(how, f"answer {number}"), (number, ended.raw)
        assert await stored(opencode, ended, mark) == 1
        assert set(await calls(backstage, mark)) == {1}
        assert len(ended.raw["history"]) == 2
