"""Work that was begun by method: what it may do, and what it asks."""

import asyncio

import pytest
from structlog.testing import capture_logs

from opencode_a2a.events import Json, JsonObject
from opencode_a2a.turns.errands import Errand
from tests.support.caller import Caller
from tests.support.opencode import FakeOpenCode
from tests.support.service import Running

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest.mark.requirement("I23")
async def test_nothing_begins_in_a_session_before_its_rules_are_set(
    service: Running, opencode: FakeOpenCode
) -> None:
    caller = Caller(service)
    made = await caller.method("opencode.sessions.create", {"request": {"title": "t"}})
    parts: list[Json] = [{"type": "text", "text": "hello"}]
    params: JsonObject = {"session_id": made["item"]["id"], "request": {"parts": parts}}
    limited: JsonObject = {**params, "metadata": {"opencode": {"profile": "read-only"}}}
    opencode.changing.clear()

    async with asyncio.TaskGroup() as calls:
        reached = calls.create_task(opencode.asked("change", 1))
        calls.create_task(caller.method("opencode.sessions.prompt_async", limited))
        await reached
        wide = calls.create_task(caller.method("opencode.sessions.prompt_async", params))
        await asyncio.wait([wide], timeout=0.5)
        before = [*opencode.prompts]
        opencode.changing.set()

    assert before == []
    assert len(opencode.prompts) == 2


async def pending(caller: Caller, count: int) -> None:
    """Wait until so many permissions are pending."""
    async with asyncio.timeout(60):
        while len((await caller.method("opencode.permissions.list"))["items"]) != count:
            pass


@pytest.mark.requirement("I15")
async def test_work_that_nobody_can_follow_any_more_is_stopped_in_opencode(
    service: Running, opencode: FakeOpenCode, monkeypatch: pytest.MonkeyPatch
) -> None:
    opencode.play("permission-once")
    caller = Caller(service)
    made = await caller.method("opencode.sessions.create", {"request": {"title": "t"}})
    session_id = made["item"]["id"]
    parts: list[Json] = [{"type": "text", "text": "run it"}]
    begin: JsonObject = {"session_id": session_id, "request": {"parts": parts}}
    await caller.method("opencode.sessions.prompt_async", begin)
    await pending(caller, 1)

    async def fail(*_: object) -> bool:
        raise LookupError

    monkeypatch.setattr(Errand, "_hear", fail)
    with capture_logs() as records:
        opencode.tell_event("session.idle", {"sessionID": session_id})
        await opencode.idle()
        await pending(caller, 0)

    settled = [one["resolution"] for one in records if one["event"] == "interrupt settled"]
    assert settled == ["void"]


@pytest.mark.requirement("I17")
async def test_work_without_a_task_offers_only_what_can_be_answered(
    service: Running, opencode: FakeOpenCode
) -> None:
    opencode.play("permission-once")
    caller = Caller(service)
    made = await caller.method("opencode.sessions.create", {"request": {"title": "t"}})
    parts: list[Json] = [{"type": "text", "text": "run it"}]
    begin: JsonObject = {"session_id": made["item"]["id"], "request": {"parts": parts}}
    await caller.method("opencode.sessions.prompt_async", begin)
    await pending(caller, 1)
    (item,) = (await caller.method("opencode.permissions.list"))["items"]
    reply: JsonObject = {"request_id": item["request_id"], "reply": "once"}

    method = "a2a.interrupt.permission.reply"
    wrong = await caller.answer(method, reply | {"reply": "perhaps"})
    for_task = await caller.answer(method, reply | {"scope": "task"})
    await caller.method(method, reply | {"scope": item["details"]["scopes"][0]})

    assert item["details"]["scopes"] == ["context"]
    assert "must be 'once' or 'reject'" in str(wrong)
    assert "cannot be given for a task" in str(for_task)
