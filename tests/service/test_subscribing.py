"""Coming back to a task: from now on, or from the last event that was seen."""

import asyncio

import pytest

from tests.support.answers import NOT_FOUND, PARAMS, UNSUPPORTED, RefusedError, Update, Wire, fold
from tests.support.caller import Caller
from tests.support.opencode import FakeOpenCode, Hold
from tests.support.service import Running

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.both_databases]


async def begun(caller: Caller, hold: Hold) -> str:
    """Start a task in the background and wait until it is held."""
    task = await caller.begin("hello")
    async with asyncio.timeout(60):
        await hold.reached.wait()
    return task.id


def ids(updates: list[Update]) -> list[str]:
    return [update.id for update in updates]


@pytest.mark.requirement("3.1.6-task-first")
@pytest.mark.requirement("3.1.6-no-gap")
@pytest.mark.requirement("3.1.6-closes")
async def test_a_subscription_is_the_task_as_it_is_and_all_that_follows(
    caller: Caller, opencode: FakeOpenCode
) -> None:
    task_id = await begun(caller, opencode.hold(count=2))

    async with caller.subscribe(task_id) as following:
        first = await following.until(lambda update: update.task is not None)
        opencode.release()
        updates = await following.rest()

    assert updates[0] is first
    assert (following.task.state, following.task.text) == ("completed", "one two three four")
    numbers = [int(update.id) for update in updates]
    assert numbers == sorted(set(numbers))


@pytest.mark.requirement("3.1.6-terminal")
@pytest.mark.requirement("0.3-resubscribe-snapshot")
async def test_an_ended_task_is_an_error_in_1_0_and_a_snapshot_in_0_3(caller: Caller) -> None:
    task = await caller.send("hello")

    answer = await caller.ask("subscribe", {"id": task.id})

    if caller.wire.modern:
        answer.refuses(UNSUPPORTED)
        assert answer.headers["content-type"] != "text/event-stream"
        return
    async with caller.subscribe(task.id) as following:
        (update,) = await following.rest()
    assert update.task is not None
    assert (update.task.state, update.task.text) == ("completed", "one two three four")


@pytest.mark.requirement("3.1.6-unknown")
async def test_a_task_that_does_not_exist_is_a_plain_error(caller: Caller) -> None:
    (await caller.ask("subscribe", {"id": "no-such-task"})).refuses(NOT_FOUND)


@pytest.mark.requirement("3.1.6-input-required")
async def test_a_waiting_task_can_be_followed(caller: Caller, opencode: FakeOpenCode) -> None:
    """A stream of 1.0 lives on until the end; one of 0.3 has said its final word."""
    opencode.play("permission-once")
    asked = await caller.send("run it")

    async with caller.subscribe(asked.id) as following:
        first = await following.until(lambda update: update.task is not None)
        await caller.send("once", task=asked.id)
        updates = await following.rest()

    assert first.state == "input_required"
    assert updates[-1].state == "completed"


@pytest.mark.requirement("I4")
@pytest.mark.requirement("I5")
async def test_a_reader_resumes_exactly_after_every_event(
    caller: Caller, opencode: FakeOpenCode
) -> None:
    opencode.play("tool-completed")
    async with caller.stream("run it") as following:
        every = await following.rest()
    task = following.task

    for place, update in enumerate(every):
        async with caller.subscribe(task.id, update.id) as resumed:
            again = await resumed.rest()
        assert ids(again) == ids(every)[place + 1 :]
        folded = fold([*every[: place + 1], *again])
        assert (folded.state, folded.text, folded.tools) == (task.state, task.text, task.tools)


@pytest.mark.requirement("I4")
async def test_the_query_parameter_resumes_where_the_header_does(caller: Caller) -> None:
    async with caller.stream("hello") as following:
        every = await following.rest()
    target = caller.target("subscribe", {"id": following.task.id})[1]
    body = caller.encode("subscribe", {"id": following.task.id})

    for place, update in enumerate(every):
        answer = await caller.post(body, f"{target}?after={update.id}")
        lines = answer.content.decode().splitlines()
        told = [line.removeprefix("id: ") for line in lines if line.startswith("id: ")]
        assert told == ids(every)[place + 1 :]


@pytest.mark.requirement("I4")
async def test_a_reader_resumes_a_running_task_without_gap_or_repeat(
    caller: Caller, opencode: FakeOpenCode
) -> None:
    hold = opencode.hold(count=2)
    async with caller.stream("hello") as following:
        async with asyncio.timeout(60):
            await hold.reached.wait()
        await following.until_text("one two ")
    seen = following.updates

    async with caller.subscribe(seen[0].raw["task"]["id"], seen[-1].id) as resumed:
        opencode.release()
        rest = await resumed.rest()

    assert all(update.task is None for update in rest)
    assert fold([*seen, *rest]).text == "one two three four"
    numbers = [int(update.id) for update in [*seen, *rest]]
    assert numbers == sorted(set(numbers))


@pytest.mark.requirement("I4")
async def test_an_id_from_the_future_gives_the_task_anew(caller: Caller) -> None:
    task = await caller.send("hello")

    async with caller.subscribe(task.id, "99999") as following:
        updates = await following.rest()

    assert updates[0].task is not None
    assert updates[0].task.text == "one two three four"


@pytest.mark.requirement("I9")
@pytest.mark.parametrize("wrong", ["x", "-1", "1.2.3", "1e3", "9" * 40, "1.x"])
async def test_what_is_no_event_id_is_refused(caller: Caller, wrong: str) -> None:
    task = await caller.send("hello")

    answer = await caller.ask("subscribe", {"id": task.id}, Last_Event_ID=wrong)

    assert answer.refuses(PARAMS) == ["Last-Event-ID"]


async def test_subscribing_by_get_is_the_same(service: Running, opencode: FakeOpenCode) -> None:
    for wire in (Wire.REST, Wire.REST03):
        caller = Caller(service, wire)
        task_id = await begun(caller, opencode.hold())
        target = caller.target("subscribe", {"id": task_id})[1]
        async with (
            asyncio.timeout(60),
            caller.http.stream("GET", target, headers=caller.headers) as response,
        ):
            opencode.release()
            body = await response.aread()

        assert response.headers["content-type"] == "text/event-stream"
        assert body.count(b'"task":') == 1
        assert b"COMPLETED" in body.split(b"\n\n")[-2]


async def test_a_stream_of_somebody_else_is_not_resumed(
    service: Running, caller: Caller, wire: Wire, stranger: str
) -> None:
    task = await caller.send("hello")

    with pytest.raises(RefusedError):
        async with Caller(service, wire, stranger).subscribe(task.id, "1") as following:
            await following.rest()
