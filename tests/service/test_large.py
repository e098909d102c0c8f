"""Answers of many megabytes: the service as a process of its own stays answerable."""

import json
import time
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from tests.service.test_memory import resident
from tests.service.test_streaming import unread
from tests.support.caller import Caller
from tests.support.forked import ForkedProgram
from tests.support.opencode import FakeOpenCode
from tests.support.probe import probing
from tests.support.replicas import until
from tests.support.service import variables_for

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.both_databases]

MEGABYTE = 2**20
ANSWER = "word " * (4 * MEGABYTE)


def seconds_to_copy(text: str) -> float:
    """Return the processor time that JSON of the text takes here and now, written and read once."""
    began = time.process_time()
    json.loads(json.dumps(text))
    return time.process_time() - began


async def completed(caller: Caller, task_id: str) -> None:
    """Wait for the end of the newest task, without its text."""
    state = ""
    while state != "TASK_STATE_COMPLETED":
        listed = await caller.answer("ListTasks", {"pageSize": 1})
        (task,) = listed["result"]["tasks"]
        assert task["id"] == task_id
        state = task["status"]["state"]


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
            await completed(caller, begun.id)

    # How fast the machine is depends on what else it does. Two to four copies are seen here; work
    # that grows with the square of the answer would be hundreds.
    copy = max(copy, seconds_to_copy(ANSWER))
    assert 0 < probe.longest < 20 * copy


@pytest.mark.sqlite_only
@pytest.mark.requirement("I8")
async def test_readers_that_do_not_read_keep_no_copies_of_a_large_answer(
    opencode: FakeOpenCode, tmp_path: Path
) -> None:
    started = ForkedProgram(variables_for(opencode, tmp_path))
    async with started as program, AsyncExitStack() as stack:
        caller = Caller(program)
        await caller.send("hello")
        before = resident(program.pid)
        opencode.said = {b"three ": ANSWER.encode()}
        opencode.hold()
        task = await caller.begin("hello")
        for _ in range(4):
            body = caller.encode("subscribe", {"id": task.id})
            await stack.enter_async_context(unread(program.url, caller, body))
        opencode.release()
        await completed(caller, task.id)

        # The answer is kept once for the task, and as it was read from OpenCode for a moment.
        ceiling = before + 4 * len(ANSWER) / MEGABYTE
        await until(lambda: resident(program.pid) < ceiling)
