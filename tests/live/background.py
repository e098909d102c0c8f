"""Work that the model of an OpenCode 2 puts into the background; run by `make test-opencode2`."""

import asyncio
import os
import uuid
from pathlib import Path
from typing import Any

import pytest

from opencode_a2a.opencode.driver import Driver, Location
from tests.support.backstage import Backstage, script
from tests.support.caller import Caller

pytestmark = pytest.mark.live


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


async def test_a_task_lasts_until_its_work_in_the_background_is_reported(caller: Caller) -> None:
    said = script(
        [in_background("sleep 4; echo late")],
        [{"say": "It has begun."}],
        [{"say": "It has ended."}],
    )

    task = await caller.send(said)

    assert task.state == "completed"
    assert task.text == "It has begun.\n\nIt has ended."


async def test_a_cancel_leaves_neither_a_process_nor_a_wake_up(
    caller: Caller, opencode: Driver, backstage: Backstage
) -> None:
    word = f"word-{uuid.uuid4()}"
    command = in_background(f"sleep 300; echo {word}")
    said = script([command], [{"say": "begun"}], [{"say": "never"}])

    async with caller.stream(said) as following:
        await following.until_text("begun")
        assert running(word)
        canceled = await caller.cancel(following.task.id)
        await following.rest()

    at = Location(str(backstage.workspace))
    assert canceled.state == "canceled"
    assert running(word) == []
    await asyncio.sleep(3)  # a wake-up would come now
    assert canceled.session_id not in await opencode.session_status(at=at)
    assert (await caller.get(canceled.id)).text == "begun"
    again = await caller.send(script({"say": "on"}), context=canceled.context_id)
    assert again.text == "on"
