"""Work that the model of an OpenCode 2 puts into the background."""

import asyncio
import os
import uuid
from pathlib import Path
from typing import Any

import pytest

from opencode_a2a.ids import SessionId
from opencode_a2a.opencode.driver import Driver, Location
from tests.support.backstage import Backstage, script
from tests.support.caller import Caller
from tests.support.program import Program

pytestmark = [pytest.mark.live, pytest.mark.opencode2_only]


def in_background(command: str) -> dict[str, Any]:
    return {"tool": "bash", "input": {"command": command, "background": True}}


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
    wait = in_background(f"until [ -e {flag.name} ]; do sleep 0.05; done; echo late")
    said = script([wait], [{"say": "It has begun."}], [{"say": "It has ended."}])

    async with caller.stream(said) as following:
        await following.until_text("It has begun.")
        async with asyncio.timeout(60):
            session = following.task.session_id.encode()
            while session in (await opencode.raw_response("/api/session/active")).body:  # noqa: ASYNC110 - no event here
                await asyncio.sleep(0.05)
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


async def test_a_sub_agent_in_the_background_is_of_the_task(
    caller: Caller, backstage: Backstage, gate: str
) -> None:
    child: dict[str, Any] = {
        "tool": "task",
        "input": {
            "description": "d",
            "prompt": "p",
            "subagent_type": "general",
            "background": True,
        },
        "script": [[{"gate": gate}, {"say": "found"}]],
    }
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
    wait = in_background(f"until [ -e {flag.name} ]; do sleep 0.05; done; echo late")
    said = script([wait], [{"say": "It has begun."}], [{"say": "It has ended."}])

    async with caller.stream(said) as following:
        await following.until_text("It has begun.")
        async with asyncio.timeout(60):
            session = following.task.session_id.encode()
            while session in (await opencode.raw_response("/api/session/active")).body:  # noqa: ASYNC110 - no event here
                await asyncio.sleep(0.05)
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
