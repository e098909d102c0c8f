"""A task is read on a replica that does not run it as on the one that does."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack
from pathlib import Path

import orjson
import pytest
import pytest_asyncio

from opencode_a2a.log import remote
from tests.support.answers import Answer, Update, Wire
from tests.support.caller import Caller, Following
from tests.support.opencode import FakeOpenCode
from tests.support.replicas import Cluster, RunningReplica, cluster

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.postgresql_only]

TEXT = "one two three four"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def replicas(
    tmp_path_factory: pytest.TempPathFactory, database: str
) -> AsyncGenerator[Cluster]:
    """Two replicas, one of which runs the OpenCode ``one``; neither is killed."""
    async with FakeOpenCode(tmp_path_factory.mktemp("workspace")).running() as fake:
        async with cluster([fake], tmp_path_factory.mktemp("state"), "a", "b") as made:
            yield made
        fake.release()


@pytest.fixture
def opencode(replicas: Cluster) -> FakeOpenCode:
    fake = replicas.opencodes["one"]
    fake.play("plain-text")
    return fake


async def pair(replicas: Cluster) -> tuple[RunningReplica, RunningReplica]:
    """Return the one that runs the OpenCode, and the other."""
    owner = await replicas.runs("one")
    [other] = [one for one in replicas.replicas.values() if one is not owner]
    return owner, other


async def held(opencode: FakeOpenCode, owner: RunningReplica, text: str = "hello") -> str:
    """Begin a task that stops in the middle of its text, and return its id."""
    hold = opencode.hold(count=2)
    begun = await Caller(owner).begin(text)
    async with asyncio.timeout(60):
        await hold.reached.wait()
    return begun.id


def told(updates: list[Update]) -> list[tuple[str, bytes]]:
    return [(update.id, orjson.dumps(update.raw)) for update in updates]


@pytest.mark.requirement("I19")
@pytest.mark.parametrize("wire", [Wire.RPC, Wire.REST03])
async def test_a_stream_on_another_replica_has_the_same_events_and_numbers(
    replicas: Cluster, opencode: FakeOpenCode, wire: Wire
) -> None:
    owner, other = await pair(replicas)
    task_id = await held(opencode, owner)
    here, there = Caller(owner, wire), Caller(other, wire)
    async with AsyncExitStack() as stack:
        follow = stack.enter_async_context
        streams = [await follow(one.subscribe(task_id, "1")) for one in (here, there)]
        late = await follow(there.subscribe(task_id))
        first = await late.until(lambda _: True)
        opencode.release()
        near, far = [await stream.rest() for stream in streams]
        joined = await late.rest()

    async with here.subscribe(task_id, "1") as again, there.subscribe(task_id, "1") as elsewhere:
        replayed = await again.rest(), await elsewhere.rest()
    assert told(far) == told(near) == told(replayed[0]) == told(replayed[1])
    assert near[-1].state == "completed"
    assert told(joined)[1:] == [one for one in told(near) if int(one[0]) > int(first.id)]


async def test_a_stream_goes_on_where_it_was_left_on_another_replica(
    replicas: Cluster, opencode: FakeOpenCode, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote, "AHEAD_SECONDS", 30.0)  # however slow the machine is
    owner, other = await pair(replicas)
    hold = opencode.hold(count=2)
    async with Caller(owner).stream("hello") as stream:
        async with asyncio.timeout(60):
            await hold.reached.wait()
        # What was shown just now may not be stored yet.
        await stream.until(lambda update: update.artifact is not None)
        seen = stream.updates
    async with Caller(other).subscribe(seen[0].raw["task"]["id"], seen[-1].id) as stream:
        opencode.release()
        rest = await stream.rest()

    assert not any(update.task for update in rest)  # it is not given anew
    numbers = [int(update.id) for update in [*seen, *rest]]
    assert numbers == sorted(set(numbers))
    assert Following(nothing(), [*seen, *rest]).task.text == TEXT


async def nothing() -> AsyncGenerator[Update]:
    for update in list[Update]():
        yield update


async def test_a_task_is_fetched_and_listed_as_it_is_where_it_runs(
    replicas: Cluster, opencode: FakeOpenCode
) -> None:
    owner, other = await pair(replicas)
    task_id = await held(opencode, owner)
    here, there = Caller(owner), Caller(other)

    async def read(caller: Caller) -> list[Answer]:
        every = {"includeArtifacts": True, "historyLength": 5, "pageSize": 5}
        asked = [("get", {"id": task_id}), ("list", every), ("list", {"pageSize": 5})]
        return [await caller.ask(operation, params) for operation, params in asked]

    await there.get(task_id)  # from then on it is followed there
    # What the turn shows is read once it is stored.
    async with here.subscribe(task_id) as stream:
        shown = await stream.until(lambda update: update.task is not None)
        async with there.subscribe(task_id, shown.id):
            pass
    half = await read(here), await read(there)
    await here.cancel(task_id)
    canceled = await there.get(task_id)  # at once: nothing was waited for
    opencode.release()
    ended = await read(here), await read(there)

    for near, far in (half, ended):
        assert [one.result for one in far] == [one.result for one in near]
    assert half[1][0].result["artifacts"]
    assert canceled.state == "canceled"


async def test_what_is_asked_is_shown_there_and_answered_where_the_task_runs(
    replicas: Cluster, opencode: FakeOpenCode
) -> None:
    opencode.play("permission-once")
    owner, other = await pair(replicas)
    begun = await Caller(owner).begin("ask me")
    waited = asyncio.create_task(Caller(other).wait(begun.id, "input_required"))
    asked = await waited
    async with Caller(other).subscribe(begun.id) as stream:
        await stream.until(lambda _: True)
        # No reader of the owner was ever shown it.
        answered = await Caller(owner).send("yes", task=begun.id)
        await stream.until_state("completed")

    assert asked.interrupt["type"] == "permission"
    assert answered.state == "completed"


@pytest.mark.requirement("I20")
@pytest.mark.parametrize("end", ["kill", "stop"])
async def test_a_reader_goes_on_over_the_end_of_the_replica_that_ran_the_task(
    tmp_path: Path, end: str
) -> None:
    """On the one that takes over, and on one that never runs it."""
    (tmp_path / "workspace").mkdir()
    async with FakeOpenCode(tmp_path / "workspace").running() as fake:
        fake.play("plain-text")
        async with cluster([fake], tmp_path, "a", "b", "c") as replicas:
            owner = await replicas.runs("one")
            others = [one for one in replicas.replicas.values() if one is not owner]
            task_id = await held(fake, owner)
            async with AsyncExitStack() as stack:
                streams = [
                    await stack.enter_async_context(Caller(one).subscribe(task_id, "1"))
                    for one in others
                ]
                for stream in streams:
                    await stream.until(lambda update: update.artifact is not None)
                await (owner.kill() if end == "kill" else owner.stop())
                await replicas.runs("one", but=owner)
                fake.release()
                first, second = [await stream.rest() for stream in streams]
            ends = [await Caller(one).get(task_id) for one in others]
        fake.release()

    assert told(first) == told(second)
    assert first[-1].state == "completed"
    numbers = [update.id.partition(".") for update in first]
    assert [int(number) for number, *_ in numbers] == sorted({int(n) for n, *_ in numbers})
    # What was handed over has lost nothing; else it was recovered.
    assert {suffix for *_, suffix in numbers} == ({"", "1"} if end == "kill" else {""})
    assert ends[0].text == TEXT
    assert ends[0].raw == ends[1].raw
