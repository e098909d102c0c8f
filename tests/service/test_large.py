"""Answers of many megabytes: the service as a process of its own stays answerable."""

import json
import time
from pathlib import Path

import pytest

from tests.support.caller import Caller
from tests.support.forked import ForkedProgram
from tests.support.opencode import FakeOpenCode
from tests.support.probe import probing
from tests.support.service import variables_for

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.both_databases]

MEGABYTE = 2**20
ANSWER = "word " * (4 * MEGABYTE)


def seconds_to_copy(text: str) -> float:
    """Return the processor time that JSON of the text takes here and now, written and read once."""
    began = time.process_time()
    json.loads(json.dumps(text))
    return time.process_time() - began


@pytest.mark.requirement("I8")
@pytest.mark.requirement("I13")
async def test_the_service_answers_while_an_answer_of_20_megabytes_arrives(
    opencode: FakeOpenCode, tmp_path: Path
) -> None:
    copy = seconds_to_copy(ANSWER)
    async with ForkedProgram(variables_for(opencode, tmp_path)) as program:
        caller = Caller(program)
        await caller.send("hello")
        opencode.said = {b"three ": ANSWER.encode()}
        async with probing(program.url, program.pid) as probe:
            # Nobody reads the answer: what it costs to write it is not asked here.
            begun = await caller.begin("hello")
            state = begun.state
            while state != "completed":
                listed = await Caller(program).answer("ListTasks", {"pageSize": 1})
                (task,) = listed["result"]["tasks"]
                assert task["id"] == begun.id
                state = task["status"]["state"].removeprefix("TASK_STATE_").lower()

    # How fast the machine is depends on what else it does. Two to four copies are seen here; work
    # that grows with the square of the answer would be hundreds.
    copy = max(copy, seconds_to_copy(ANSWER))
    assert 0 < probe.longest < 20 * copy
