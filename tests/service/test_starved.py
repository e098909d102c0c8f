"""An OpenCode that gets no time: it is late with everything, and a late sign is not the end."""

import asyncio
from pathlib import Path

import pytest

from opencode_a2a.turns import attempt
from tests.support.caller import Caller
from tests.support.front import started
from tests.support.opencode import FakeOpenCode, Hold
from tests.support.service import Running

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.both_databases]

STORED = {"A2A_TASK_STORE_BACKEND": "database"}
ANSWER = ("completed", "one two three four")


@pytest.fixture(autouse=True)
def short_ticks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Look after a silent turn often, so that many late answers fit into a short test."""
    monkeypatch.setattr(attempt, "TICK_SECONDS", 0.1)


@pytest.fixture
def caller(service: Running) -> Caller:
    return Caller(service)


@pytest.fixture
def late(opencode: FakeOpenCode) -> Hold:
    """Starve OpenCode: it stores and announces the message, and does not get on with it."""
    opencode.starved = True
    return opencode.hold("message.updated")


async def reached(hold: Hold) -> None:
    async with asyncio.timeout(60):
        await hold.reached.wait()


def feed(opencode: FakeOpenCode) -> None:
    """Let OpenCode have its time again."""
    opencode.starved = False
    opencode.release()


async def test_a_turn_that_is_not_listed_as_busy_yet_goes_on(
    caller: Caller, opencode: FakeOpenCode, late: Hold
) -> None:
    begun = await caller.begin("hello")
    await reached(late)

    await opencode.asked("status", 5)
    waiting = await caller.get(begun.id)
    feed(opencode)
    ended = await caller.ended(begun.id)

    assert waiting.state == "working"
    assert (ended.state, ended.text) == ANSWER


async def test_a_turn_that_is_not_listed_as_busy_yet_outlives_the_service(
    opencode: FakeOpenCode, tmp_path: Path, late: Hold
) -> None:
    async with started(opencode, tmp_path, **STORED) as service:
        begun = await Caller(service).begin("hello")
        await reached(late)

    async with started(opencode, tmp_path, **STORED) as service:
        caller = Caller(service)
        await opencode.asked("status", 3)
        waiting = await caller.get(begun.id)
        feed(opencode)
        ended = await caller.ended(begun.id)

    assert waiting.state == "working"
    assert (ended.state, ended.text) == ANSWER
    assert len(opencode.prompts) == 1


async def test_a_list_from_before_the_turn_began_does_not_end_it(
    opencode: FakeOpenCode, tmp_path: Path
) -> None:
    """The messages are read at the same time, and may already show its first step."""
    held = opencode.hold()
    async with started(opencode, tmp_path, **STORED) as service:
        begun = await Caller(service).begin("hello")
        await reached(held)

    opencode.starved = True
    async with asyncio.TaskGroup() as group:
        listed = group.create_task(opencode.asked("status", 1))
        listed.add_done_callback(lambda _: setattr(opencode, "starved", False))
        async with started(opencode, tmp_path, **STORED) as service:
            caller = Caller(service)
            await opencode.asked("status", 2)
            waiting = await caller.get(begun.id)
            opencode.release()
            ended = await caller.ended(begun.id)

    assert waiting.state == "working"
    assert (ended.state, ended.text) == ANSWER


async def test_a_message_that_nobody_takes_up_is_given_up_in_the_end(
    opencode: FakeOpenCode,
    tmp_path: Path,
    late: Hold,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(attempt, "UNBEGUN_SECONDS", 0.5)
    async with started(opencode, tmp_path, **STORED) as service:
        begun = await Caller(service).begin("hello")
        await reached(late)

    async with started(opencode, tmp_path, **STORED) as service:
        ended = await Caller(service).ended(begun.id)

    assert (ended.state, ended.error_type) == ("failed", "UPSTREAM_INTERRUPTED")


@pytest.mark.requirement("I7")
async def test_canceled_is_told_once_a_turn_that_was_about_to_begin_has_stopped(
    caller: Caller, opencode: FakeOpenCode, late: Hold
) -> None:
    begun = await caller.begin("hello")
    await reached(late)

    canceling = asyncio.create_task(caller.cancel(begun.id))
    await opencode.asked("abort", 2)
    early = canceling.done()
    opencode.starved = False
    canceled = await canceling

    assert not early
    assert (canceled.state, canceled.said) == ("canceled", "Canceled by the caller.")
    assert not opencode.at_work
