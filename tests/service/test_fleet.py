"""Several OpenCodes behind one service: where things run, and what becomes of a lost one."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import orjson
import pytest
import pytest_asyncio
from structlog.testing import capture_logs

from opencode_a2a.events import Json
from opencode_a2a.extensions import dispatch
from tests.support.answers import RefusedError
from tests.support.caller import Caller, stray
from tests.support.front import started
from tests.support.opencode import FakeOpenCode
from tests.support.service import Running

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.both_databases]

STORED = {"A2A_TASK_STORE_BACKEND": "database", "A2A_ALLOW_DIRECTORY_OVERRIDE": "true"}


class Pair:
    """Two OpenCodes of one workspace, ``a`` and ``b``, each of which can be ended on its own."""

    def __init__(self, workspace: Path, state: Path) -> None:
        self.workspace, self.state = workspace, state
        self.a, self.b = FakeOpenCode(workspace), FakeOpenCode(workspace)
        self.ends = {self.a: AsyncExitStack(), self.b: AsyncExitStack()}

    @asynccontextmanager
    async def serving(
        self, *, a: dict[str, Json] | None = None, b: dict[str, Json] | None = None, **changes: str
    ) -> AsyncGenerator[Running]:
        entries: list[Json] = [
            {"name": "a", "url": self.a.url, "shared": True, **(a or {})},
            {"name": "b", "url": self.b.url, "shared": True, **(b or {})},
        ]
        variables = {"OPENCODE_UPSTREAMS": orjson.dumps(entries).decode(), **STORED, **changes}
        async with started(self.a, self.state, **variables) as running:
            fleet = running.service.fleet
            assert fleet is not None
            for member in fleet.members.values():
                async with asyncio.timeout(60):
                    await member.turns.feed.up.wait()
            yield running

    def prompts(self) -> tuple[int, int]:
        return len(self.a.prompts), len(self.b.prompts)


@pytest_asyncio.fixture(loop_scope="module")
async def pair(tmp_path: Path) -> AsyncGenerator[Pair]:
    workspace, state = tmp_path / "workspace", tmp_path / "state"
    (workspace / "app").mkdir(parents=True)
    pair = Pair(workspace, state)
    try:
        for opencode, end in pair.ends.items():
            await end.enter_async_context(opencode.running())
        yield pair
    finally:
        for end in pair.ends.values():
            await end.aclose()


def directory(name: str) -> dict[str, Json]:
    return {"opencode": {"directory": name}}


async def test_contexts_are_spread_and_stay_where_they_are(pair: Pair) -> None:
    async with pair.serving() as service:
        caller = Caller(service)
        hold = pair.a.hold()
        async with caller.stream("one") as first:
            async with asyncio.timeout(60):
                await hold.reached.wait()
            second = await caller.send("two")
            assert pair.prompts() == (1, 1)
            pair.a.release()
            await first.rest()
        again = await caller.send("more", context=second.context_id)
        assert again.session_id == second.session_id
        assert pair.prompts() == (1, 2)

    async with pair.serving() as service:
        later = await Caller(service).send("and more", context=second.context_id)
        assert later.session_id == second.session_id
        assert pair.prompts() == (1, 3)


async def test_first_messages_of_a_context_that_come_together_run_in_one_session(
    pair: Pair,
) -> None:
    async with pair.serving() as service:
        caller, torn = Caller(service), dict[str, set[str]]()
        for number in range(20):
            context = f"context {number}"
            tasks = await asyncio.gather(*(caller.send(f"{n}", context=context) for n in range(4)))
            if len(sessions := {str(task.session_id) for task in tasks}) > 1:
                torn[context] = sessions

    assert torn == {}


async def test_a_task_is_taken_up_where_it_ran(pair: Pair) -> None:
    hold = pair.b.hold()
    async with pair.serving(a={"drain": True}) as service:
        task = await Caller(service).send("slow", blocking=False)
        async with asyncio.timeout(60):
            await hold.reached.wait()
    pair.b.release()
    async with pair.serving(a={"drain": True}) as service:
        ended = await Caller(service).ended(task.id)
    assert ended.state == "completed"
    assert pair.prompts() == (0, 1)


@pytest.mark.sqlite_only
@pytest.mark.requirement("I3")
async def test_a_task_fails_if_its_opencode_is_gone_from_the_settings(pair: Pair) -> None:
    hold = pair.b.hold()
    async with pair.serving(a={"drain": True}) as service:
        task = await Caller(service).send("slow", blocking=False)
        async with asyncio.timeout(60):
            await hold.reached.wait()
    pair.b.release()
    async with pair.serving(b={"name": "renamed"}) as service:
        ended = await Caller(service).ended(task.id)
    assert (ended.state, ended.error_type) == ("failed", "UPSTREAM_LOST")


async def test_what_nobody_follows_is_answered_in_the_opencode_that_asks(pair: Pair) -> None:
    async with pair.serving() as service:
        caller = Caller(service)
        for opencode in (pair.a, pair.b):
            opencode.play("permission-once")
        request_ids = [await stray(opencode.url, caller) for opencode in (pair.a, pair.b)]
        listed = (await caller.method("opencode.permissions.list", {}))["items"]
        for request_id in reversed(request_ids):
            reply = {"request_id": request_id, "reply": "once"}
            await caller.method("a2a.interrupt.permission.reply", reply)

    assert [one["request_id"] for one in listed] == sorted(request_ids)
    assert [pair.a.replies, pair.b.replies] == [[request_id] for request_id in request_ids]


async def test_a_directory_is_served_by_those_that_name_it(pair: Pair) -> None:
    app = str(pair.workspace / "app")
    async with pair.serving(a={"drain": True}, b={"directories": [app]}) as service:
        caller = Caller(service)
        await caller.send("here", metadata=directory("app"))
        await caller.send("at the root")
        await caller.send("at the root again")
    assert pair.prompts() == (2, 1)

    async with pair.serving(a={"directories": [app]}, b={"directories": [app]}) as service:
        with pytest.raises(RefusedError, match="is not served by any OpenCode"):
            await Caller(service).send("at the root")


async def test_one_that_drains_keeps_its_contexts_and_gets_no_new_ones(pair: Pair) -> None:
    async with pair.serving(b={"drain": True}) as service:
        task = await Caller(service).send("one")
    async with pair.serving(a={"drain": True}) as service:
        caller = Caller(service)
        await caller.send("more", context=task.context_id)
        await caller.send("new")
    assert pair.prompts() == (2, 1)


async def test_a_full_fleet_refuses(pair: Pair) -> None:
    holds = pair.a.hold(), pair.b.hold()
    async with pair.serving(a={"max_turns": 1}, b={"max_turns": 1}) as service:
        caller = Caller(service)
        for _ in holds:
            await caller.send("fill", blocking=False)
        for hold in holds:
            async with asyncio.timeout(60):
                await hold.reached.wait()
        with pytest.raises(RefusedError, match="Too many calls to OpenCode"):
            await caller.send("more")
        pair.a.release()
        pair.b.release()


@pytest.mark.sqlite_only
@pytest.mark.requirement("I15")
@pytest.mark.parametrize("asks", ["for a permission", "for a go"])
async def test_what_waits_for_a_person_in_a_lost_one_leaves_a_record(pair: Pair, asks: str) -> None:
    planned = {"opencode": {"plan": True}} if asks == "for a go" else None
    pair.b.agents[:] = [{"name": name, "mode": "primary"} for name in ("build", "plan")]
    pair.b.play("plain-text" if planned else "permission-once")
    with capture_logs() as records:
        async with pair.serving(a={"drain": True}, OPENCODE_UPSTREAM_LOST_SECONDS="0.5") as service:
            caller = Caller(service)
            asked = await caller.send("run it", metadata=planned)
            await pair.ends[pair.b].aclose()
            ended = await caller.ended(asked.id)
    pair.b.agents.clear()

    settled = [one for one in records if one["event"] == "interrupt settled"]
    assert (asked.state, ended.error_type) == ("input_required", "UPSTREAM_LOST")
    assert [(one["resolution"], one["by"]) for one in settled] == [("void", None)]


async def test_the_context_of_a_lost_one_goes_on_elsewhere_and_says_so(pair: Pair) -> None:
    hold = pair.b.hold()
    async with pair.serving(a={"drain": True}, OPENCODE_UPSTREAM_LOST_SECONDS="0.5") as service:
        caller = Caller(service)
        async with caller.stream("one") as following:
            async with asyncio.timeout(60):
                await hold.reached.wait()
            await pair.ends[pair.b].aclose()
            lost = (await following.rest())[-1]
            context = following.task.context_id
        health = (await service.http.get("/health")).json()
        async with caller.stream("again", context=context) as following:
            updates = await following.rest()

    assert lost.state == "failed"
    assert "UPSTREAM_LOST" in str(lost.raw)
    assert [one["state"] for one in health["upstreams"]] == ["up", "lost"]
    assert updates[-1].state == "completed"
    assert any("replaced" in str(one.raw) for one in updates)
    assert pair.prompts() == (1, 1)


async def test_methods_find_the_session_wherever_it_is(pair: Pair) -> None:
    async with pair.serving(a={"drain": True}) as service:
        task = await Caller(service).send("one")
        found = await Caller(service).method(
            "opencode.sessions.get", {"session_id": task.session_id}
        )
    assert task.session_id in found["item"]["contextId"]


async def test_a_permission_is_answered_where_it_was_asked(pair: Pair) -> None:
    pair.b.play("permission-once")
    async with pair.serving(a={"drain": True}) as service:
        caller = Caller(service)
        waiting = await caller.send("ask")
        listed = await caller.method("opencode.permissions.list", {})
        answered = await caller.send("yes", task=waiting.id)
    assert (waiting.state, answered.state) == ("input_required", "completed")
    assert [item["task_id"] for item in listed["items"]] == [waiting.id]


async def test_lists_leave_out_an_opencode_without_the_workspace(pair: Pair) -> None:
    workspace = "wrk_1deb3fc6b000iKn0wo4MZ7ksDZ"
    named = {"metadata": {"opencode": {"workspace": {"id": workspace}}}}
    async with pair.serving(a={"drain": True}) as service:
        caller = Caller(service)
        task = await caller.send("one")
        nowhere = await caller.refused("opencode.sessions.list", named)
        pair.b.workspaces[:] = [{"id": workspace, "type": "worktree", "name": "x"}]
        listed = await caller.method("opencode.sessions.list", named)

    assert nowhere.reason == "UPSTREAM_HTTP_ERROR"
    assert [one["id"] for one in listed["items"]] == [task.session_id]


@pytest.mark.sqlite_only
async def test_a_list_asks_all_opencodes_at_once(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dispatch, "OTHERS_SECONDS", 60.0)
    async with pair.serving() as service, asyncio.timeout(30):
        caller = Caller(service)
        task = await caller.send("one")
        pair.a.listing.clear()
        asked = asyncio.gather(pair.a.asked("sessions", 1), pair.b.asked("sessions", 1))
        listing = asyncio.create_task(caller.method("opencode.sessions.list", {}))
        await asked
        pair.a.listing.set()
        listed = await listing

    assert [one["id"] for one in listed["items"]] == [task.session_id]


@pytest.mark.sqlite_only
async def test_lists_leave_out_an_opencode_that_hangs(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dispatch, "OTHERS_SECONDS", 1.0)
    async with pair.serving(a={"drain": True}) as service, asyncio.timeout(30):
        caller = Caller(service)
        task = await caller.send("one")
        pair.a.listing.clear()
        listed = await caller.method("opencode.sessions.list", {})
        pair.b.listing.clear()
        none = await caller.refused("opencode.sessions.list", {})
        for opencode in (pair.a, pair.b):
            opencode.listing.set()

    assert [one["id"] for one in listed["items"]] == [task.session_id]
    assert none.reason == "UPSTREAM_UNREACHABLE"
