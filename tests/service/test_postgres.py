"""What clients see while PostgreSQL is killed and comes back."""

import asyncio
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path
from signal import Signals
from types import SimpleNamespace

import orjson
import psycopg
import pytest

from opencode_a2a import clock
from tests.support import stores
from tests.support.answers import Answer, Update, Wire, fold
from tests.support.caller import Caller
from tests.support.forked import ForkedProgram
from tests.support.front import started
from tests.support.opencode import FakeOpenCode
from tests.support.relay import Cut, Relay
from tests.support.service import variables_for

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.postgresql_only]

TEXT = "one two three four"


def numbers(updates: list[Update]) -> list[int]:
    return [int(update.id) for update in updates if update.id]


def stored(state: Path, task_id: str) -> list[int]:
    """Return the numbers of the entries in the stored log of a task."""
    query = (
        "SELECT first_seq, last_seq FROM entries JOIN tasks ON tasks.no = task_no"
        " WHERE id = %s ORDER BY first_seq"
    )
    with psycopg.connect(stores.url(state)) as connection:
        found = connection.execute(query, (task_id,)).fetchall()
    return [number for first, last in found for number in range(first, last + 1)]


@pytest.mark.requirement("I4")
@pytest.mark.requirement("I5")
@pytest.mark.requirement("I13")
async def test_streams_go_on_when_the_killed_database_is_back(
    opencode: FakeOpenCode, tmp_path: Path
) -> None:
    server, loop = stores.server(), asyncio.get_running_loop()
    hold = opencode.hold(count=2)
    async with started(opencode, tmp_path) as service:
        callers = [Caller(service, wire) for wire in Wire]

        async def follow(caller: Caller, message_id: str) -> list[Update]:
            async with caller.stream("hello", message_id=message_id) as following:
                return await following.rest()

        async def send(number: int) -> tuple[float, Answer]:
            began, caller = loop.time(), callers[number % len(callers)]
            answer = await caller.ask("send", caller.message(f"meanwhile {number}"))
            return loop.time() - began, answer

        streams = [asyncio.create_task(follow(caller, caller.wire.value)) for caller in callers]
        background = await callers[0].begin("in the background")
        async with asyncio.timeout(60):
            await hold.reached.wait()
        await asyncio.to_thread(server.kill)
        try:
            meanwhile = await asyncio.gather(*(send(number) for number in range(8)))
            ready = await service.http.get("/readyz")
            async with asyncio.timeout(60):
                canceled = await callers[0].ask("cancel", {"id": background.id})
            opencode.release()  # the turns end while there is no database
            early = await asyncio.wait(streams, timeout=0.5)
        finally:
            await asyncio.to_thread(server.start)
        async with asyncio.timeout(60):
            told = await asyncio.gather(*streams)
            while (await service.http.get("/readyz")).status_code != 200:  # noqa: ASYNC110 - no event
                await asyncio.sleep(0.05)
        after = await callers[0].send("after")
        again = [await c.send("hello", message_id=c.wire.value) for c in callers]
        listed = await callers[0].ask("list", {"pageSize": 50})

    assert all(seconds < 5 for seconds, _ in meanwhile)
    assert all(b"TASK_STORE_UNAVAILABLE" in answer.content for _, answer in meanwhile)
    assert b"TASK_STORE_UNAVAILABLE" in canceled.content
    assert (ready.status_code, orjson.loads(ready.content)["checks"]["database"]) == (503, "failed")
    assert not early[0]
    for updates, task in zip(told, again, strict=True):
        assert (fold(updates).id, fold(updates).text, updates[-1].state) == (
            task.id,
            TEXT,
            "completed",
        )
        assert task.text == TEXT
        assert numbers(updates) == sorted(set(numbers(updates)))
        assert stored(tmp_path, task.id) == [*range(1, 1 + numbers(updates)[-1])]
    assert after.state == "completed"
    assert len(opencode.prompts) == len(callers) + 2
    assert listed.result["totalSize"] == len(listed.result["tasks"]) == len(callers) + 2


async def test_a_turn_in_a_named_session_goes_on_when_the_killed_database_is_back(
    opencode: FakeOpenCode, tmp_path: Path
) -> None:
    server = stores.server()
    async with started(opencode, tmp_path) as service:
        caller = Caller(service)
        first = await caller.send("hello")
        hold = opencode.hold("session.status")  # before the session is known to have the prompt
        named = {"shared": {"session": {"id": first.session_id}}}
        running = asyncio.create_task(caller.send("more", metadata=named))
        async with asyncio.timeout(60):
            await hold.reached.wait()
        await asyncio.to_thread(server.kill)
        try:
            opencode.release()
            early = await asyncio.wait([running], timeout=6)  # longer than a write is waited for
        finally:
            await asyncio.to_thread(server.start)
        async with asyncio.timeout(60):
            ended = await running

    assert not early[0]
    assert (ended.state, ended.text, ended.session_id) == ("completed", TEXT, first.session_id)
    assert len(opencode.prompts) == 2


@pytest.mark.requirement("I6")
@pytest.mark.parametrize("cut", Cut)
async def test_a_send_whose_commit_is_cut_is_one_task_and_one_prompt(
    opencode: FakeOpenCode, tmp_path: Path, cut: Cut
) -> None:
    async with Relay(stores.server().port) as relay:
        url = relay.url(stores.url(tmp_path))
        async with started(opencode, tmp_path, A2A_TASK_STORE_DATABASE_URL=url) as service:
            caller = Caller(service)
            await caller.send("before")
            relay.cut = cut
            task = await caller.send("hello", message_id="cut")
            again = await caller.send("hello", message_id="cut")
            listed = await caller.ask("list", {"pageSize": 50})

    assert relay.cuts == 1
    assert (task.state, task.text) == ("completed", TEXT)
    assert again.raw == task.raw
    assert len(opencode.prompts) == 2
    assert listed.result["totalSize"] == 2


@pytest.mark.requirement("I6")
async def test_a_send_in_doubt_is_refused_and_runs_once_when_the_database_is_back(
    opencode: FakeOpenCode, tmp_path: Path
) -> None:
    server = stores.server()
    async with Relay(server.port) as relay:
        url = relay.url(stores.url(tmp_path))
        async with started(opencode, tmp_path, A2A_TASK_STORE_DATABASE_URL=url) as service:
            caller = Caller(service)
            await caller.send("before")
            relay.on_cut, relay.cut = server.kill, Cut.AFTER
            refused = await caller.ask("send", caller.message("hello", messageId="doubt"))
            relay.on_cut = None
            await asyncio.to_thread(server.start)
            await opencode.prompted(2)
            task = await caller.send("hello", message_id="doubt")

    assert b"TASK_STORE_UNAVAILABLE" in refused.content
    assert (task.state, task.text) == ("completed", TEXT)
    assert len(opencode.prompts) == 2


async def test_stored_times_are_the_databases_whatever_the_clock_of_the_machine_says(
    opencode: FakeOpenCode, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrong = SimpleNamespace(
        time_ns=lambda: time.time_ns() - 3_600_000_000_000, monotonic_ns=time.monotonic_ns
    )
    monkeypatch.setattr(clock, "time", wrong)
    before = datetime.now(UTC)
    async with started(opencode, tmp_path) as service:
        task = await Caller(service).send("hello")

    at = datetime.fromisoformat(task.raw["status"]["timestamp"])
    assert before - timedelta(seconds=2) <= at <= datetime.now(UTC) + timedelta(seconds=2)


@pytest.mark.requirement("I3")
@pytest.mark.requirement("I6")
async def test_a_frozen_service_is_replaced_and_changes_nothing_when_it_wakes(
    opencode: FakeOpenCode, tmp_path: Path
) -> None:
    variables = variables_for(opencode, tmp_path, A2A_REPLICA_LEASE_SECONDS="4")
    hold = opencode.hold(count=2)
    async with ForkedProgram(variables) as first:
        begun = await Caller(first).begin("hello")
        async with asyncio.timeout(60):
            await hold.reached.wait()
        first.signal(Signals.SIGSTOP)

        async with ForkedProgram(variables) as second:
            await second.record("open tasks recovered")
            taken_up = await Caller(second).get(begun.id)
            first.signal(Signals.SIGCONT)
            status = await first.ended()
            opencode.release()
            ended = await Caller(second).ended(begun.id)

    assert taken_up.state == "working"
    assert status == 1
    [why] = [line for line in first.lines if "a part of the service failed" in line]
    assert "counts as gone; restart it" in why
    assert "Traceback" not in "\n".join(first.lines)
    assert (ended.state, ended.text) == ("completed", TEXT)
    assert len(opencode.prompts) == 1


async def test_a_killed_service_is_replaced_at_once_under_its_name(
    opencode: FakeOpenCode, tmp_path: Path
) -> None:
    variables = variables_for(opencode, tmp_path, A2A_REPLICA_LEASE_SECONDS="60")
    hold = opencode.hold(count=2)
    async with ForkedProgram(variables) as program:
        begun = await Caller(program).begin("hello")
        async with asyncio.timeout(60):
            await hold.reached.wait()
        await program.restart()
        opencode.release()
        ended = await Caller(program).ended(begun.id)
        status = await program.stop()

    assert (ended.state, ended.text) == ("completed", TEXT)
    assert len(opencode.prompts) == 1
    assert status == 0


async def test_a_replica_that_is_alone_knows_that_it_would_hear_others(
    opencode: FakeOpenCode, tmp_path: Path
) -> None:
    async with started(opencode, tmp_path) as service, asyncio.timeout(60):
        figures = ""
        while "\na2a_listen_up 1.0\n" not in figures:
            await asyncio.sleep(0.05)
            figures = (await service.http.get("/metrics")).text

    assert "\na2a_replicas 1.0\n" in figures
