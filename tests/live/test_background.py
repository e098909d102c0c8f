"""Work that the model of an OpenCode 2 puts into the background."""

import asyncio
import os
import uuid
from collections.abc import Generator
from pathlib import Path
from typing import Any

import orjson
import pytest

from opencode_a2a.ids import SessionId
from opencode_a2a.opencode.driver import Driver, Location
from opencode_a2a_demo.server import DemoModel, opencode_config
from tests.conftest import UNTRACKED, Stages
from tests.live.conftest import Serve
from tests.support.backstage import Backstage, script
from tests.support.caller import Caller
from tests.support.program import Program

pytestmark = [pytest.mark.live, pytest.mark.opencode2_only]


def in_background(command: str) -> dict[str, Any]:
    return {"tool": "bash", "input": {"command": command, "background": True}}


def waiting_for(flag: Path) -> dict[str, Any]:
    """Have a command wait in the background until a file is there."""
    return in_background(f"until [ -e {flag.name} ]; do sleep 0.05; done; echo late")


def sub_agent(*replies: Any) -> dict[str, Any]:
    """Have a sub-agent work in the background."""
    return {
        "tool": "task",
        "input": {
            "description": "d",
            "prompt": "p",
            "subagent_type": "general",
            "background": True,
        },
        "script": [*replies],
    }


async def answered(opencode: Driver, session_id: str) -> None:
    """Wait until the model has answered, by OpenCode's own word."""
    async with asyncio.timeout(60):
        session = session_id.encode()
        while session in (await opencode.raw_response("/api/session/active")).body:  # noqa: ASYNC110 - no event here
            await asyncio.sleep(0.05)


def running(word: str) -> list[str]:
    """Return the processes with a word on their command line."""
    found: list[str] = []
    for place in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            line = place.read_bytes()
        except OSError:
            continue
        if word.encode() in line and place.parent.name != str(os.getpid()):
            found.append(place.parent.name)
    return found


async def test_a_task_lasts_until_its_work_in_the_background_is_reported(
    caller: Caller, opencode: Driver, backstage: Backstage
) -> None:
    flag = backstage.workspace / str(uuid.uuid4())
    said = script([waiting_for(flag)], [{"say": "It has begun."}], [{"say": "It has ended."}])

    async with caller.stream(said) as following:
        await following.until_text("It has begun.")
        await answered(opencode, following.task.session_id)
        meanwhile = await caller.get(following.task.id)
        flag.touch()
        await following.rest()

    task = await caller.get(meanwhile.id)
    assert meanwhile.state == "working"
    assert (task.state, task.text) == ("completed", "It has begun.\n\nIt has ended.")
    assert following.task.text == task.text


async def test_a_cancel_leaves_neither_a_process_nor_a_wake_up(
    caller: Caller, opencode: Driver, backstage: Backstage, gate: str
) -> None:
    word = f"word-{uuid.uuid4()}"
    command = in_background(f"sleep 300; echo {word}")
    # The end of the command wakes the session; a model that answers at once could be faster.
    said = script([command], [{"say": "begun"}], [{"gate": gate}, {"say": "never"}])

    async with caller.stream(said) as following:
        await following.until_text("begun")
        assert running(word)
        canceled = await caller.cancel(following.task.id)
        await following.rest()

    at = Location(str(backstage.workspace))
    assert canceled.state == "canceled"
    assert running(word) == []
    assert canceled.session_id not in await opencode.session_status(at=at)
    assert (await caller.get(canceled.id)).text == "begun"
    # A wake-up that was still to come would be answered first.
    await backstage.open(gate)
    again = await caller.send(script({"say": "on"}), context=canceled.context_id)
    assert again.text == "on"
    messages = await opencode.messages(SessionId(canceled.session_id))
    assert "text='begun'" in str(messages)
    assert "text='never'" not in str(messages)


async def test_a_cancel_of_work_in_the_background_is_confirmed(
    caller: Caller, opencode: Driver, backstage: Backstage
) -> None:
    """Although the session may stay idle: the preview does not wake it."""
    flag = backstage.workspace / str(uuid.uuid4())
    said = script([waiting_for(flag)], [{"say": "begun"}], [{"say": "never"}])

    async with caller.stream(said) as following:
        await following.until_text("begun")
        await answered(opencode, following.task.session_id)
        canceled = await caller.cancel(following.task.id)

    assert (canceled.state, canceled.error_type, canceled.text) == ("canceled", None, "begun")


async def test_a_cancel_ends_a_sub_agent_and_adds_nothing_to_the_task(
    caller: Caller, backstage: Backstage, gate: str
) -> None:
    """The end of the sub-agent wakes the session, and the model is faster than the service."""
    later = f"{gate}-later"
    child = sub_agent([{"gate": gate}, {"say": "found"}])
    said = script([child], [{"say": "begun"}], [{"say": "too late"}, {"gate": later}])

    async with caller.stream(said) as following:
        await following.until_text("begun")
        await backstage.reached(gate)
        canceled = await caller.cancel(following.task.id)
        await following.rest()

    await backstage.open(gate)
    await backstage.open(later)
    task = await caller.get(canceled.id)
    assert (task.state, task.error_type, task.text) == ("canceled", None, "begun")
    assert following.task.text == "begun"


async def test_a_sub_agent_in_the_background_is_of_the_task(
    caller: Caller, backstage: Backstage, gate: str
) -> None:
    child = sub_agent([{"gate": gate}, {"say": "found"}])
    said = script([child], [{"say": "It has begun."}], [{"say": "It has ended."}])

    async with caller.stream(said) as following:
        await following.until_text("It has begun.")
        await backstage.reached(gate)
        meanwhile = await caller.get(following.task.id)
        await backstage.open(gate)
        await following.rest()

    task = await caller.get(meanwhile.id)
    assert meanwhile.state == "working"
    assert (task.state, task.text) == ("completed", "It has begun.\n\nIt has ended.")


async def test_a_task_lasts_over_a_kill_of_the_service_too(
    program: Program, opencode: Driver, backstage: Backstage
) -> None:
    caller = Caller(program)
    flag = backstage.workspace / str(uuid.uuid4())
    said = script([waiting_for(flag)], [{"say": "It has begun."}], [{"say": "It has ended."}])

    async with caller.stream(said) as following:
        await following.until_text("It has begun.")
        await answered(opencode, following.task.session_id)
        task_id = following.task.id
        await program.kill()
    await program.start()

    meanwhile = await caller.get(task_id)
    await asyncio.sleep(3)  # time to take it for ended
    still = await caller.get(task_id)
    flag.touch()
    task = await caller.ended(task_id)

    assert (meanwhile.state, still.state) == ("working", "working")
    assert (task.state, task.text) == ("completed", "It has begun.\n\nIt has ended.")


async def test_a_task_lasts_that_a_killed_service_knew_before_its_first_answer(
    program: Program, opencode: Driver, backstage: Backstage, gate: str
) -> None:
    caller = Caller(program)
    flag = backstage.workspace / str(uuid.uuid4())
    begin = [waiting_for(flag)], [{"say": "It has "}, {"gate": gate}, {"say": "begun."}]
    said = script(*begin, [{"say": "It has ended."}])

    async with caller.stream(said) as following:
        await following.until_text("It has ")
        await backstage.reached(gate)
        task_id, session_id = following.task.id, following.task.session_id
        await program.kill()
    await program.start()

    async with caller.subscribe(task_id) as following:
        await backstage.open(gate)
        await following.until_text("It has begun.")
        await answered(opencode, session_id)
        await asyncio.sleep(3)  # time to take it for ended
        meanwhile = await caller.get(task_id)
        flag.touch()
        await following.rest()

    task = await caller.get(task_id)
    assert meanwhile.state == "working"
    assert (task.state, task.text) == ("completed", "It has begun.\n\nIt has ended.")


async def test_a_long_turn_lasts_until_its_work_in_the_background_is_reported(
    caller: Caller, opencode: Driver, backstage: Backstage
) -> None:
    flag = backstage.workspace / str(uuid.uuid4())
    look = {"tool": "read", "input": {"filePath": str(backstage.workspace / "hello.txt")}}
    begin = [waiting_for(flag)], *[[look]] * 25, [{"say": "It has begun."}]
    said = script(*begin, [{"say": "It has ended."}])

    async with caller.stream(said) as following:
        await following.until_text("It has begun.")
        await answered(opencode, following.task.session_id)
        await asyncio.sleep(3)  # time to take it for ended
        meanwhile = await caller.get(following.task.id)
        flag.touch()
        await following.rest()

    task = await caller.get(meanwhile.id)
    assert meanwhile.state == "working"
    assert (task.state, task.text) == ("completed", "It has begun.\n\nIt has ended.")


# Work that is lost


@pytest.fixture(scope="module")
def fragile(stages: Stages) -> Generator[Backstage]:
    """An OpenCode that may be killed."""
    with stages("fragile-background", UNTRACKED) as running:
        yield running


async def lost_with_opencode(caller: Caller, fragile: Backstage, work: dict[str, Any]) -> None:
    """Begin work in the background, kill OpenCode, and look at what becomes of the task."""
    async with caller.stream(script([work], [{"say": "It has begun."}])) as following:
        await following.until_text("It has begun.")
        await fragile.kill()
        await following.rest()

    task = await caller.get(following.task.id)
    after = await caller.send(script({"say": "on"}), context=task.context_id)
    assert (task.state, task.error_type) == ("failed", "UPSTREAM_INTERRUPTED")
    assert (task.text, following.task.text) == ("It has begun.", "It has begun.")
    assert "background" in task.said
    assert (after.state, after.text) == ("completed", "on")
    assert after.session_id == task.session_id


async def test_a_task_whose_command_ended_with_opencode_fails(
    fragile: Backstage, serve: Serve
) -> None:
    flag = fragile.workspace / str(uuid.uuid4())
    try:
        await lost_with_opencode(Caller(await serve(fragile)), fragile, waiting_for(flag))
    finally:
        flag.touch()  # for a command that outlives OpenCode


async def test_a_task_whose_sub_agent_ended_with_opencode_fails(
    fragile: Backstage, serve: Serve, gate: str
) -> None:
    child = sub_agent([{"gate": gate}, {"say": "found"}])
    try:
        await lost_with_opencode(Caller(await serve(fragile)), fragile, child)
    finally:
        await fragile.open(gate)


async def test_a_task_whose_command_ended_with_the_service_fails(
    variables: dict[str, str], model: DemoModel
) -> None:
    config = orjson.dumps(opencode_config(model.url)).decode()
    work = in_background("sleep 300")
    said = script([work], [{"say": "It has begun."}])
    async with Program(variables | {"OPENCODE_CONFIG_CONTENT": config}, "--managed") as program:
        caller = Caller(program)
        async with caller.stream(said) as following:
            await following.until_text("It has begun.")
            task_id = following.task.id
            assert await program.stop() == 0
        await program.start()

        task = await caller.ended(task_id)

    assert (task.state, task.error_type) == ("failed", "UPSTREAM_INTERRUPTED")
    assert task.text == "It has begun."
    assert "background" in task.said
