"""What a caller may spend: refused before anything is stored, counted when a turn ends."""

import asyncio
from pathlib import Path
from typing import Any

import httpx2
import orjson
import pytest

from opencode_a2a.events import JsonObject
from opencode_a2a.store import callers
from opencode_a2a.tasks import budget
from tests.support.answers import BUDGET, Wire
from tests.support.caller import Caller
from tests.support.front import Serve, started
from tests.support.opencode import FakeOpenCode
from tests.support.service import Running

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.both_databases]

ANN = "a-token-for-the-tests-of-ann-alone"
BOB = "a-token-for-the-tests-of-bob-alone"
CREDENTIALS: list[dict[str, Any]] = [
    {"scheme": "bearer", "principal": "ann", "token": ANN},
    {
        "scheme": "bearer",
        "principal": "bob",
        "token": BOB,
        "budget": {"cost_per_day": 0, "tokens_per_day": 1},
    },
]
LISTED = orjson.dumps(CREDENTIALS).decode()


async def health(service: Running, token: str = ANN) -> Any:
    answer = await service.http.get("/health", headers={"Authorization": f"Bearer {token}"})
    return answer.json()


@pytest.mark.requirement("ours-budgets")
@pytest.mark.parametrize("wire", [Wire.RPC, Wire.REST03], ids=lambda wire: wire.value)
async def test_a_spent_budget_refuses_new_messages_alone(serve: Serve, wire: Wire) -> None:
    service = await serve(A2A_STATIC_AUTH_CREDENTIALS=LISTED, A2A_BUDGET_COST_PER_DAY="0.000001")
    ann = Caller(service, wire, token=ANN)
    bob = Caller(service, wire, token=BOB)

    message = ann.message("hello")
    first = await ann.ask("send", message)
    answer = await ann.ask("send", ann.message("hello"))
    again = await ann.ask("send", message)
    await bob.send("hello")
    other = await bob.ask("send", bob.message("hello"))

    answer.refuses(BUDGET)
    assert int(answer.headers["retry-after"]) > 0
    assert b"resets at 20" in answer.content
    assert (first.status, again.status) == (200, 200)
    assert b"BUDGET" not in again.content
    other.refuses(BUDGET)
    assert b"tokens are used" in other.content
    figures = (await health(service))["budget"]
    assert figures["cost_per_day"] == 0.000001
    assert figures["cost"] > 0
    assert figures["tokens"] > 0
    assert figures["resets_at"].endswith("T00:00:00Z")
    assert (await health(service, BOB))["budget"]["tokens_per_day"] == 1
    metrics = (await service.http.get("/metrics")).text
    assert 'a2a_budget_rejected_total{limit="cost_per_day"}' in metrics


@pytest.mark.requirement("ours-budgets")
async def test_what_was_spent_outlives_the_service_and_ends_with_the_day(
    serve: Serve, opencode: FakeOpenCode, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    variables = {
        "A2A_STATIC_AUTH_CREDENTIALS": LISTED,
        "A2A_BUDGET_COST_PER_DAY": "0.000001",
        "A2A_TASK_STORE_BACKEND": "database",
    }
    async with started(opencode, tmp_path, **variables) as earlier:
        spent = await Caller(earlier, token=ANN).send("hello")
    service = await serve(**variables)
    ann = Caller(service, token=ANN)

    (await ann.ask("send", ann.message("hello"))).refuses(BUDGET)
    tomorrow = budget.now_ms() + callers.DAY_MS
    with monkeypatch.context() as patched:
        patched.setattr(budget, "now_ms", lambda: tomorrow)
        later = await ann.send("hello")

    cost = spent.raw["metadata"]["shared"]["usage"]["cost"]
    assert later.state == "completed"
    assert (await health(service))["budget"]["cost"] >= round(cost, 6)


@pytest.mark.requirement("ours-budgets")
async def test_turns_at_once_are_limited(serve: Serve, opencode: FakeOpenCode) -> None:
    service = await serve(A2A_STATIC_AUTH_CREDENTIALS=LISTED, A2A_MAX_TURNS_PER_PRINCIPAL="2")
    ann, hold = Caller(service, token=ANN), opencode.hold(count=2)

    begun = [await ann.send("hello", blocking=False) for _ in range(2)]
    async with asyncio.timeout(60):
        await hold.reached.wait()
    many = await asyncio.gather(*(ann.ask("send", ann.message("hello")) for _ in range(5)))
    opencode.release()
    for task in begun:
        await ann.wait(task.id, "completed")

    for one in many:
        one.refuses(BUDGET)
        assert b"turns running" in one.content
    assert (await ann.send("hello")).state == "completed"


@pytest.mark.requirement("ours-budgets")
async def test_a_turn_that_costs_too_much_is_stopped(serve: Serve, opencode: FakeOpenCode) -> None:
    service = await serve(A2A_TURN_MAX_COST="0.000001", A2A_STATIC_AUTH_CREDENTIALS=LISTED)
    opencode.play("permission-once")
    opencode.hold(count=1)  # in the second step, when the first has been paid for
    ann = Caller(service, token=ANN)

    asked = await ann.send("hello")
    task = await ann.send("once", task=asked.id)

    assert asked.state == "input_required"
    failure = task.raw["status"]["message"]["parts"][0]["text"]
    assert task.state == "failed"
    assert "may cost 1e-06; it was stopped" in failure
    assert (await health(service))["budget"]["cost"] > 0


@pytest.mark.sqlite_only
@pytest.mark.requirement("ours-budgets")
async def test_what_sub_agents_cost_before_a_restart_counts(
    opencode: FakeOpenCode, tmp_path: Path
) -> None:
    variables = {"A2A_STATIC_AUTH_CREDENTIALS": LISTED, "A2A_TASK_STORE_BACKEND": "database"}
    opencode.play("subagent")
    hold = opencode.hold("message.updated", count=12)  # only the sub-agent has been paid for
    async with started(opencode, tmp_path, **variables) as service:
        begun = await Caller(service, token=ANN).begin("hello")
        async with asyncio.timeout(60):
            await hold.reached.wait()

    async with started(opencode, tmp_path, **variables, A2A_TURN_MAX_COST="0.001") as service:
        task = await Caller(service, token=ANN).ended(begun.id)

    assert task.state == "failed"
    assert "may cost 0.001; it was stopped" in task.said


@pytest.mark.requirement("ours-budgets")
async def test_methods_give_no_work_beyond_the_budget(serve: Serve) -> None:
    service = await serve(A2A_STATIC_AUTH_CREDENTIALS=LISTED, A2A_BUDGET_COST_PER_DAY="0.000001")
    ann = Caller(service, token=ANN)
    task = await ann.send("hello")
    session = task.raw["metadata"]["shared"]["session"]["id"]

    async with httpx2.AsyncClient(base_url=service.url, trust_env=False) as http:
        call = {
            "jsonrpc": "2.0",
            "id": 1,
            "method": "opencode.sessions.prompt_async",
            "params": {
                "session_id": session,
                "request": {"parts": [{"type": "text", "text": "more"}]},
            },
        }
        answer = await http.post("/", json=call, headers={"Authorization": f"Bearer {ANN}"})

    assert "BUDGET_EXHAUSTED" in answer.text
    assert answer.headers["retry-after"]


async def test_a_spent_budget_refuses_another_turn_of_a_plan(
    serve: Serve, opencode: FakeOpenCode
) -> None:
    opencode.agents[:] = [{"name": name, "mode": "primary"} for name in ("build", "plan")]
    service = await serve(A2A_STATIC_AUTH_CREDENTIALS=LISTED, A2A_BUDGET_COST_PER_DAY="0.000001")
    ann = Caller(service, token=ANN)
    task = await ann.send("do it", metadata={"opencode": {"plan": True}})

    for text in ("only the first file", "go"):
        answer = await ann.ask("send", ann.message(text, taskId=task.id))
        answer.refuses(BUDGET)
    opencode.agents.clear()
    assert len(opencode.prompts) == 1
    assert (await ann.cancel(task.id)).state == "canceled"


async def given(caller: Caller) -> JsonObject:
    """Return params that give a new session a prompt."""
    made = await caller.method("opencode.sessions.create", {"request": {"title": "t"}})
    parts: list[Any] = [{"type": "text", "text": "hello"}]
    return {"session_id": made["item"]["id"], "request": {"parts": parts}}


async def figures(caller: Caller) -> Any:
    return await caller.method("opencode.budget.get")


@pytest.mark.requirement("ours-budgets")
async def test_callers_see_what_they_have_used_and_what_is_left(serve: Serve) -> None:
    service = await serve(A2A_STATIC_AUTH_CREDENTIALS=LISTED, A2A_BUDGET_COST_PER_DAY="0.001")
    ann, bob = Caller(service, token=ANN), Caller(service, token=BOB)

    fresh = await figures(ann)
    # Both are admitted, and cross the limit together.
    tasks = await asyncio.gather(ann.send("hello"), ann.send("hello"))
    spent, other = await figures(ann), await figures(bob)

    cost = sum(task.raw["metadata"]["shared"]["usage"]["cost"] for task in tasks)
    assert (fresh["cost"], fresh["cost_left"], fresh["running"]) == (0, 0.001, 0)
    assert (spent["cost"], spent["cost_left"]) == (pytest.approx(cost), 0)
    assert (spent["tokens_per_day"], spent["tokens_left"], spent["turns"]) == (None, None, None)
    assert spent["tokens"] > 0
    assert spent["resets_at"].endswith("T00:00:00Z")
    assert (other["cost"], other["cost_per_day"], other["tokens_left"]) == (0, None, 1)
    assert spent == (await health(service))["budget"]
    (await ann.ask("send", ann.message("hello"))).refuses(BUDGET)


@pytest.mark.sqlite_only
@pytest.mark.requirement("ours-budgets")
async def test_work_begun_by_method_is_a_turn_that_runs(
    serve: Serve, opencode: FakeOpenCode
) -> None:
    service = await serve(A2A_STATIC_AUTH_CREDENTIALS=LISTED, A2A_MAX_TURNS_PER_PRINCIPAL="2")
    ann, hold = Caller(service, token=ANN), opencode.hold()
    params = [await given(ann) for _ in range(4)]

    method = "opencode.sessions.prompt_async"
    begun = await asyncio.gather(
        *(ann.method(method, one) for one in params), return_exceptions=True
    )
    async with asyncio.timeout(60):
        await hold.reached.wait()
    full = await figures(ann)
    message = await ann.ask("send", ann.message("hello"))
    joined = next(p for p, done in zip(params, begun, strict=True) if isinstance(done, dict))
    await ann.method(method, joined)
    opencode.release()
    async with asyncio.timeout(60):
        while (await figures(ann))["running"]:
            pass

    refused = [str(one) for one in begun if isinstance(one, Exception)]
    assert len(refused) == 2
    assert all("turns running" in one for one in refused)
    assert (full["running"], full["turns"]) == (2, 2)
    message.refuses(BUDGET)
    assert (await ann.send("hello")).state == "completed"


@pytest.mark.sqlite_only
@pytest.mark.requirement("ours-budgets")
async def test_work_begun_by_method_is_counted_by_the_step(
    serve: Serve, opencode: FakeOpenCode
) -> None:
    service = await serve(A2A_STATIC_AUTH_CREDENTIALS=LISTED)
    opencode.play("permission-once")
    hold = opencode.hold()  # in the second step
    ann = Caller(service, token=ANN)

    await ann.method("opencode.sessions.prompt_async", await given(ann))
    async with asyncio.timeout(60):
        while not (waiting := (await ann.method("opencode.permissions.list"))["items"]):
            pass
        reply: JsonObject = {"request_id": waiting[0]["request_id"], "reply": "once"}
        await ann.method("a2a.interrupt.permission.reply", reply)
        await hold.reached.wait()
        while not (running := await figures(ann))["cost"]:
            pass

    assert running["running"] == 1
