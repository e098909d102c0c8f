"""The capability to supervise: everybody's tasks are open to whoever has it, on record."""

import base64
from collections.abc import AsyncGenerator
from pathlib import Path

import orjson
import pytest
import pytest_asyncio

from tests.support.answers import RefusedError, Wire
from tests.support.caller import Caller
from tests.support.forked import ForkedProgram
from tests.support.opencode import FakeOpenCode
from tests.support.program import Program
from tests.support.service import variables_for

pytestmark = pytest.mark.asyncio(loop_scope="module")

ANN, BOSS, BASIC = (f"a-token-for-the-tests-of-{name}-000" for name in ("ann", "boss", "basic"))
CREDENTIALS = [
    {"scheme": "bearer", "principal": "ann", "token": ANN},
    {"scheme": "bearer", "principal": "boss", "token": BOSS, "capabilities": ["supervise"]},
    {"scheme": "basic", "username": "user", "password": BASIC},
]


@pytest_asyncio.fixture(loop_scope="module")
async def program(opencode: FakeOpenCode, tmp_path: Path) -> AsyncGenerator[Program]:
    credentials = orjson.dumps(CREDENTIALS).decode()
    changes = {"A2A_STATIC_AUTH_CREDENTIALS": credentials}
    async with ForkedProgram(variables_for(opencode, tmp_path, **changes)) as running:
        yield running


async def test_a_supervisor_reads_answers_and_cancels_the_tasks_of_everybody(
    program: Program, opencode: FakeOpenCode
) -> None:
    ann, boss = Caller(program, token=ANN), Caller(program, Wire.REST, token=BOSS)
    opencode.play("permission-once")
    asked, other = await ann.send("run it"), await ann.send("run that")

    listed = (await boss.ask("list", {})).result["tasks"]
    read = await boss.get(asked.id)
    (waiting, _) = (await boss.method("opencode.permissions.list"))["items"]
    await boss.method(
        "a2a.interrupt.permission.reply", {"request_id": waiting["request_id"], "reply": "once"}
    )
    async with boss.subscribe(asked.id) as following:
        await following.until_state("completed")
    canceled = await boss.cancel(other.id)

    assert {task["id"] for task in listed} == {asked.id, other.id}
    assert {task["metadata"]["opencode"]["principal"] for task in listed} == {"ann"}
    assert read.raw["metadata"]["opencode"]["principal"] == "ann"
    assert canceled.state == "canceled"
    assert "principal" not in (await ann.get(asked.id)).raw["metadata"]["opencode"]
    assert await program.stop() == 0
    records = [record for record in program.records() if record.get("audit")]
    supervised = [r for r in records if r["event"] in ("task supervised", "tasks supervised")]
    operations = [record["operation"] for record in supervised]
    assert operations == ["ListTasks", "GetTask", "SubscribeToTask", "CancelTask"]
    assert {record["by"] for record in supervised} == {"boss"}
    (settled, _) = [record for record in records if record["event"] == "interrupt settled"]
    assert (settled["principal"], settled["by"]) == ("ann", "boss")


@pytest.mark.requirement("I23")
async def test_what_a_supervisor_reads_was_not_shown_to_the_caller_and_is_not_granted_for_them(
    program: Program, opencode: FakeOpenCode
) -> None:
    ann, boss = Caller(program, token=ANN), Caller(program, token=BOSS)
    opencode.play("permission-once")
    begun = await ann.begin("run it")
    async with boss.subscribe(begun.id) as following:
        await following.until_state("input_required")
    asked = await boss.get(begun.id)
    await boss.ask("list", {})
    reply = {"request_id": asked.interrupt["request_id"], "reply": "once", "scope": "task"}

    refused = await boss.refused("a2a.interrupt.permission.reply", reply)
    with pytest.raises(RefusedError) as unread:
        await ann.send("yes", task=begun.id)
    done = await ann.send("yes", task=begun.id)

    assert refused.fields == ("scope",)
    assert unread.value.code == -32004
    assert done.state == "completed"


@pytest.mark.requirement("I10")
async def test_nobody_supervises_without_being_told_to(
    program: Program, opencode: FakeOpenCode
) -> None:
    opencode.play("permission-once")
    asked = await Caller(program, token=ANN).send("run it")
    request_id = asked.interrupt["request_id"]

    # Neither the only token, nor basic credentials that may do everything else.
    basic = "Basic " + base64.b64encode(f"user:{BASIC}".encode()).decode()
    for stranger in (Caller(program), Caller(program, authorization=basic)):
        assert (await stranger.ask("list", {})).result["tasks"] == []
        assert (await stranger.method("opencode.permissions.list"))["items"] == []
        for attempt in (stranger.get, stranger.cancel):
            with pytest.raises(RefusedError):
                await attempt(asked.id)
        answer = {"request_id": request_id, "reply": "once"}
        refusal = await stranger.refused("a2a.interrupt.permission.reply", answer)
        assert refusal.reason == "INTERRUPT_REQUEST_NOT_FOUND"
    assert (await Caller(program, token=ANN).get(asked.id)).state == "input_required"
