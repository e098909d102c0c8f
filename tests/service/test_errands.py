"""Work that was begun by method: what it may do, and what it asks."""

import asyncio

import pytest

from opencode_a2a.events import Json, JsonObject
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
