"""What replicas share beside tasks: limits, messages, rates and sign-ins.

Each replica runs an OpenCode of its own.
"""

import asyncio
import re
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import httpx2
import orjson
import pytest
import pytest_asyncio

from opencode_a2a.events import Json
from tests.support.answers import RefusedError, Task
from tests.support.caller import Caller
from tests.support.opencode import FakeOpenCode
from tests.support.program import run
from tests.support.replicas import LEASE_SECONDS, Cluster, cluster

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.postgresql_only]

TOKENS = {name: f"{name}-has-a-token-that-nobody-can-guess" for name in ("ann", "eve")}
CREDENTIALS = [
    {"scheme": "bearer", "principal": name, "token": token} for name, token in TOKENS.items()
]
MOST_TASKS, MOST_REQUESTS = 4, 300


@asynccontextmanager
async def sharing(place: Path, *names: str, **changes: str) -> AsyncGenerator[Cluster]:
    """Run replicas that know of each other, each with an OpenCode of its own."""
    (place / "workspace").mkdir()
    async with AsyncExitStack() as stack:
        fakes = [FakeOpenCode(place / "workspace") for _ in names]
        for fake in fakes:
            await stack.enter_async_context(fake.running())
            stack.callback(fake.release)
        replicas = await stack.enter_async_context(cluster(fakes, place / "state"))
        for name, (upstream, fake) in zip(names, replicas.opencodes.items(), strict=True):
            entry: Json = {"name": upstream, "url": fake.url, "shared": True}
            changes["OPENCODE_UPSTREAMS"] = orjson.dumps([entry]).decode()
            await replicas.start(name, lease=LEASE_SECONDS, **changes)
        for replica, upstream in zip(names, replicas.opencodes, strict=True):
            assert (await replicas.runs(upstream)).name == replica
        for replica in replicas.replicas.values():
            async with asyncio.timeout(60):
                while len((await replica.http.get("/health")).json()["replicas"]) < len(names):  # noqa: ASYNC110 - no event
                    await asyncio.sleep(0.1)
        yield replicas


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared(tmp_path_factory: pytest.TempPathFactory) -> AsyncGenerator[Cluster]:
    async with sharing(
        tmp_path_factory.mktemp("sharing"),
        "a",
        "b",
        "c",
        A2A_STATIC_AUTH_CREDENTIALS=orjson.dumps(CREDENTIALS).decode(),
        A2A_MAX_TASKS_PER_PRINCIPAL=str(MOST_TASKS),
        A2A_RATE_LIMIT_ENABLED="true",
        A2A_RATE_LIMIT_MAX_REQUESTS=str(MOST_REQUESTS),
    ) as replicas:
        yield replicas


async def crowd(replicas: Cluster, token: str, each: int) -> tuple[list[Task], list[str]]:
    """Begin tasks at all replicas at once; return them, after they have ended, and refusals."""
    for opencode in replicas.opencodes.values():
        opencode.play("plain-text")
        opencode.hold()
    callers = [Caller(replica, token=token) for replica in replicas.replicas.values()]
    begun, refusals = list[Task](), list[str]()

    async def begin(caller: Caller) -> None:
        try:
            begun.append(await caller.begin("hello"))
        except RefusedError as error:
            refusals.append(str(error))

    await asyncio.gather(*(begin(caller) for _ in range(each) for caller in callers))
    for opencode in replicas.opencodes.values():
        opencode.release()
    for task in begun:
        assert (await callers[0].ended(task.id)).state == "completed"
    return begun, refusals


async def test_open_tasks_are_limited_over_all_replicas(shared: Cluster) -> None:
    begun, refusals = await crowd(shared, TOKENS["ann"], 3)
    others, _ = await crowd(shared, TOKENS["eve"], 1)

    assert (len(begun), len(refusals), len(others)) == (MOST_TASKS, 9 - MOST_TASKS, 3)
    assert all(f"has {MOST_TASKS} tasks" in text for text in refusals)


async def test_running_turns_are_limited_over_all_replicas(tmp_path: Path) -> None:
    async with sharing(
        tmp_path,
        *("a", "b"),
        A2A_STATIC_AUTH_CREDENTIALS=orjson.dumps(CREDENTIALS).decode(),
        A2A_MAX_TURNS_PER_PRINCIPAL="1",
    ) as replicas:
        begun, refusals = await crowd(replicas, TOKENS["ann"], 3)

    assert (len(begun), len(refusals)) == (1, 5)
    assert all("has 1 turns running" in text for text in refusals)


@pytest.mark.requirement("I6")
async def test_a_message_that_all_replicas_get_at_once_is_one_task(shared: Cluster) -> None:
    callers = [Caller(replica) for replica in shared.replicas.values()]
    for opencode in shared.opencodes.values():
        opencode.play("plain-text")
    before = sum(len(opencode.prompts) for opencode in shared.opencodes.values())

    for number in range(30):
        tasks = await asyncio.gather(
            *(caller.send("hello", message_id=f"all {number}") for caller in callers)
        )
        assert len({task.id for task in tasks}) == 1
        assert {(task.state, task.text) for task in tasks} == {("completed", "one two three four")}

    prompted = sum(len(opencode.prompts) for opencode in shared.opencodes.values())
    assert prompted - before == 30


async def test_the_rate_of_a_caller_counts_at_all_replicas(shared: Cluster) -> None:
    busy, other, _ = shared.replicas.values()
    headers = {"Authorization": f"Bearer {TOKENS['eve']}"}

    async def ask(http: httpx2.AsyncClient) -> int:
        return (await http.get("/no/such/path", headers=headers)).status_code

    answers = await asyncio.gather(*(ask(busy.http) for _ in range(MOST_REQUESTS)))
    passed = 0
    async with asyncio.timeout(60):
        while await ask(other.http) != 429:
            passed += 1
            await asyncio.sleep(0.1)

    assert answers.count(429) <= MOST_REQUESTS // 10  # what this caller asked before
    assert passed < MOST_REQUESTS // 2


async def test_doctor_and_health_tell_who_runs_what(shared: Cluster) -> None:
    replica = shared.replicas["b"]
    health = (await replica.http.get("/health")).json()
    ready = await replica.http.get("/readyz")
    figures = (await replica.http.get("/metrics")).text
    _, output = await run("doctor", **shared.variables("b"))

    assert health["replica"] == "b"
    assert [one["name"] for one in health["replicas"]] == ["a", "b", "c"]
    owners = {one["name"]: one["owner"] for one in health["upstreams"]}
    assert owners == {"one": "a", "two": "b", "three": "c"}
    assert ready.status_code == 200
    assert "a2a_replicas 3.0" in figures
    assert 'a2a_upstream_owned{upstream="two"} 1.0' in figures
    assert "a2a_upstreams_unowned 0.0" in figures
    assert "a2a_post_oldest_seconds 0.0" in figures
    assert "ok      notifications: replicas hear each other" in output
    assert re.search(r"(?m)^ok      clock: 0\.\d s (behind|ahead of) the database's$", output)
    assert re.search(r"(?m)^ok      replicas: a \(.+\), b \(.+\), c \(.+\)$", output)
    for name, owner in owners.items():
        assert f"ok      upstream: {name} run by {owner}, " in output


async def test_a_person_who_signs_in_at_one_replica_is_signed_in_at_all(shared: Cluster) -> None:
    first, second, third = (replica.http for replica in shared.replicas.values())
    code = (await first.post("/console/codes")).json()["code"]
    headers = {"Authorization": f"Bearer {code}"}

    begun, again = [await one.post("/console/session", headers=headers) for one in (second, third)]
    session = {"Authorization": f"Bearer {begun.json()['token']}"}
    used = [await http.get("/health", headers=session) for http in (first, third)]
    ended = await first.delete("/console/session", headers=session)
    async with asyncio.timeout(60):
        while (await third.get("/health", headers=session)).status_code != 401:  # noqa: ASYNC110 - no event
            await asyncio.sleep(0.1)

    assert (begun.status_code, again.status_code) == (200, 401)
    assert [answer.status_code for answer in used] == [200, 200]
    assert ended.status_code == 204
