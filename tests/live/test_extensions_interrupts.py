"""Prompts answered by method, against a real OpenCode."""

import asyncio
import time
import uuid
from collections.abc import AsyncGenerator
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import orjson
import pytest
from structlog.testing import capture_logs

from opencode_a2a.config import InterruptSettings
from opencode_a2a.events import Json, JsonObject
from opencode_a2a.ids import SessionId
from opencode_a2a.opencode.driver import Driver
from opencode_a2a.opencode.events import PermissionAsked
from opencode_a2a.opencode.feed import Feed
from tests.support.answers import Task
from tests.support.backstage import Backstage, past_service, script
from tests.support.caller import Caller
from tests.support.event_stream import listening
from tests.support.service import TOKEN, Running, serving, settings_for

pytestmark = pytest.mark.live

ANN, BOB = "ann-" + "a" * 28, "bob-" + "b" * 28
CREDENTIALS = orjson.dumps(
    [
        {"scheme": "bearer", "principal": "ann", "token": ANN},
        {"scheme": "bearer", "principal": "bob", "token": BOB},
    ]
).decode()
FETCH: JsonObject = {
    "tool": "webfetch",
    "input": {"url": "http://127.0.0.1:9/x", "format": "text"},
}
TIMED: JsonObject = {
    "tool": "webfetch",
    "input": {"url": "http://127.0.0.1:9/x", "format": "text", "timeout": 5},
}
QUESTION: JsonObject = {
    "tool": "question",
    "input": {
        "questions": [
            {
                "question": "Which colour?",
                "header": "Colour",
                "options": [
                    {"label": "Red", "description": "warm"},
                    {"label": "Blue", "description": "cold"},
                ],
            }
        ]
    },
}


@pytest.fixture
async def shared(backstage: Backstage, tmp_path: Path) -> AsyncGenerator[Running]:
    settings = settings_for(backstage, tmp_path, A2A_STATIC_AUTH_CREDENTIALS=CREDENTIALS)
    async with serving(settings) as running:
        yield running


@pytest.fixture
def ann(shared: Running) -> Caller:
    return Caller(shared, token=ANN)


@pytest.fixture
def bob(shared: Running) -> Caller:
    return Caller(shared, token=BOB)


def request_of(task: Task) -> str:
    return task.interrupt["request_id"]


async def ended(service: Running, task: Task, token: str = ANN) -> Any:
    """Follow a task to its end and return it."""
    return (await Caller(service, token=token).ended(task.id)).raw


async def permissions(caller: Caller) -> Any:
    """Return the list of permissions once there is one with a deadline."""
    async with asyncio.timeout(60):
        while True:
            listed = await caller.method("opencode.permissions.list")
            if any("expires_at" in item for item in listed["items"]):
                return listed


async def test_a_permission_is_listed_and_allowed_by_method(
    shared: Running, ann: Caller, bob: Caller
) -> None:
    task = await ann.send(script(FETCH, {"say": "done"}))
    request_id = request_of(task)

    listed = await ann.method("opencode.permissions.list")
    others = await bob.method("opencode.permissions.list")
    questions = await ann.method("opencode.questions.list")
    reply: JsonObject = {"request_id": request_id, "reply": " Once "}
    foreign = await bob.refused("a2a.interrupt.permission.reply", reply)
    mismatch = await ann.refused("a2a.interrupt.question.reject", {"request_id": request_id})
    always = await ann.refused("a2a.interrupt.permission.reply", {**reply, "reply": "always"})
    done = await ann.method("a2a.interrupt.permission.reply", reply)
    again = await ann.method("a2a.interrupt.permission.reply", reply)
    other = await ann.refused("a2a.interrupt.permission.reply", {**reply, "reply": "reject"})

    waiting = listed["items"][0]
    interrupt = task.interrupt
    assert waiting == {
        "request_id": request_id,
        "number": 1,
        "session_id": task.session_id,
        "interrupt_type": "permission",
        "task_id": task.id,
        "context_id": task.context_id,
        "details": interrupt["details"],
        "asked_at": interrupt["asked_at"],
        "expires_at": interrupt["expires_at"],
        "default": interrupt["default"],
    }
    assert waiting["details"]["permission"] == "webfetch"
    assert (others, questions) == ({"items": []}, {"items": []})
    assert (foreign.code, foreign.reason) == (-31004, "INTERRUPT_REQUEST_NOT_FOUND")
    assert (mismatch.code, mismatch.data) == (
        -31008,
        {
            "requestId": request_id,
            "expectedInterruptType": "question",
            "actualInterruptType": "permission",
        },
    )
    assert (always.code, always.reason, always.fields) == (-32602, "INVALID_FIELD", ("reply",))
    assert done == again == {"ok": True, "request_id": request_id}
    assert other.code == -31004
    assert (await ended(shared, task))["status"]["state"] == "TASK_STATE_COMPLETED"
    assert await ann.method("opencode.permissions.list") == {"items": []}


async def test_copies_of_one_answer_by_method_get_the_same_good_answer(
    shared: Running, ann: Caller
) -> None:
    task = await ann.send(script(FETCH, {"say": "done"}))
    reply = {"request_id": request_of(task), "reply": "once"}

    answers = await asyncio.gather(
        *(ann.method("a2a.interrupt.permission.reply", reply) for _ in range(10))
    )

    assert answers == [{"ok": True, "request_id": request_of(task)}] * 10
    assert (await ended(shared, task))["status"]["state"] == "TASK_STATE_COMPLETED"


@pytest.mark.requirement("I16")
async def test_a_clock_that_jumps_by_a_day_does_not_expire_what_was_just_asked(
    shared: Running, ann: Caller, monkeypatch: pytest.MonkeyPatch
) -> None:
    task = await ann.send(script(FETCH, {"say": "done"}))

    later = time.time_ns() + 24 * 3600 * 10**9
    monkeypatch.setattr("opencode_a2a.clock.time", SimpleNamespace(time_ns=lambda: later))
    reply = {"request_id": request_of(task), "reply": "once"}
    done = await ann.method("a2a.interrupt.permission.reply", reply)

    assert done == {"ok": True, "request_id": request_of(task)}
    assert (await ended(shared, task))["status"]["state"] == "TASK_STATE_COMPLETED"


async def test_a_refusal_with_a_message_lets_the_model_go_on(shared: Running, ann: Caller) -> None:
    task = await ann.send(script(FETCH, {"say": "without it"}))
    reply: JsonObject = {"request_id": request_of(task), "reply": "reject", "message": "not now"}

    await ann.method("a2a.interrupt.permission.reply", reply)

    last = await ended(shared, task)
    assert last["status"]["state"] == "TASK_STATE_COMPLETED"
    assert "without it" in orjson.dumps(last["artifacts"]).decode()


async def test_questions_are_answered_and_dismissed_by_method(shared: Running, ann: Caller) -> None:
    task = await ann.send(script(QUESTION, {"say": "{{result}}"}))
    request_id = request_of(task)
    listed = await ann.method("opencode.questions.list")
    many: JsonObject = {"request_id": request_id, "answers": [["Red"], ["Blue"]]}
    refused = await ann.refused("a2a.interrupt.question.reply", many)
    mismatch = await ann.refused(
        "a2a.interrupt.permission.reply", {"request_id": request_id, "reply": "once"}
    )

    answers: list[Json] = [[" Blue ", ""]]
    done = await ann.method(
        "a2a.interrupt.question.reply", {"request_id": request_id, "answers": answers}
    )

    assert listed["items"][0]["details"]["questions"][0]["question"] == "Which colour?"
    assert refused.fields == ("answers",)
    assert mismatch.code == -31008
    assert done == {"ok": True, "request_id": request_id}
    last = await ended(shared, task)
    assert last["status"]["state"] == "TASK_STATE_COMPLETED"
    assert "Blue" in orjson.dumps(last["artifacts"]).decode()

    other = await ann.send(script(QUESTION, {"say": "never"}))
    await ann.method("a2a.interrupt.question.reject", {"request_id": request_of(other)})
    assert str((await ended(shared, other))["status"]["state"]) in (
        "TASK_STATE_REJECTED",
        "TASK_STATE_COMPLETED",
    )


async def test_what_a_prompt_given_by_method_asks_is_answered_by_method(
    ann: Caller, bob: Caller, backstage: Backstage
) -> None:
    made = await ann.method("opencode.sessions.create", {"request": {"title": "Asked"}})
    session_id = made["item"]["id"]
    parts = [{"type": "text", "text": script([TIMED], [{"gate": "stray"}, {"say": "done"}])}]
    params = {"session_id": session_id, "request": {"parts": parts}}
    async with past_service(backstage.url, backstage.password) as opencode:
        feed = Feed(opencode.events, opencode.begin_decoding)
        listening = asyncio.create_task(feed.run())
        async with asyncio.timeout(60):
            await feed.up.wait()
            with closing(feed.follow(SessionId(session_id))) as heard:
                await ann.method("opencode.sessions.prompt_async", params)
                while not any(isinstance(one, PermissionAsked) for one in await heard.batch()):
                    pass
        listening.cancel()

    listed = await permissions(ann)
    others = await bob.method("opencode.permissions.list")
    reply = {"request_id": listed["items"][0]["request_id"], "reply": "once"}
    foreign = await bob.refused("a2a.interrupt.permission.reply", reply)
    always = await ann.refused("a2a.interrupt.permission.reply", {**reply, "reply": "always"})
    mismatch = await ann.refused(
        "a2a.interrupt.question.reject", {"request_id": reply["request_id"]}
    )
    await ann.method("a2a.interrupt.permission.reply", reply)

    asked = listed["items"][0]
    assert (asked["session_id"], asked["details"]["permission"]) == (session_id, "webfetch")
    assert asked["context_id"] == f"ctx:opencode-session:{session_id}"
    assert "task_id" not in asked
    assert {"asked_at", "expires_at", "default"} <= set(asked)
    assert others == {"items": []}
    assert (foreign.code, always.fields, mismatch.code) == (-31004, ("reply",), -31008)
    async with asyncio.timeout(60):
        await backstage.reached("stray")
    assert await ann.method("opencode.permissions.list") == {"items": []}
    assert (await ann.method("a2a.interrupt.permission.reply", reply))["ok"]
    await ann.method("opencode.sessions.abort", {"session_id": session_id})


RULES = '[{"permission": "webfetch", "pattern": "*", "action": "deny"}]'


@pytest.mark.parametrize(
    ("setting", "by"),
    [
        ({"A2A_INTERRUPT_REQUEST_TTL_SECONDS": "0.5"}, "deadline"),
        ({"A2A_PERMISSION_RULES": RULES}, "rule"),
    ],
    ids=["deadline", "rule"],
)
@pytest.mark.parametrize("method", ["prompt_async", "command"])
async def test_what_is_asked_without_a_task_has_a_deadline_rules_and_an_audit_record(
    backstage: Backstage, tmp_path: Path, method: str, setting: dict[str, str], by: str
) -> None:
    gate = uuid.uuid4().hex
    told = script([TIMED], [{"say": "went on"}, {"gate": gate}])
    requests: dict[str, JsonObject] = {
        "prompt_async": {"parts": [{"type": "text", "text": told}]},
        "command": {"command": "init", "arguments": told},
    }
    with capture_logs() as logs:
        async with (
            serving(settings_for(backstage, tmp_path, **setting)) as running,
            asyncio.TaskGroup() as group,
        ):
            caller = Caller(running)
            made = await caller.method("opencode.sessions.create", {})
            params = {"session_id": made["item"]["id"], "request": requests[method]}
            group.create_task(caller.method(f"opencode.sessions.{method}", params))
            await backstage.reached(gate)
            await backstage.open(gate)

    [record] = [one for one in logs if one["event"] == "interrupt settled"]
    assert (record["by"], record["task_id"], record["permission"]) == (by, None, "webfetch")
    assert record["resolution"] == ("expired" if by == "deadline" else "rejected")
    assert record["principal"]


async def test_what_is_asked_without_a_task_keeps_its_deadline_over_a_restart(
    backstage: Backstage, tmp_path: Path, opencode: Driver
) -> None:
    gate = uuid.uuid4().hex
    parts = [{"type": "text", "text": script([TIMED], [{"say": "went on"}, {"gate": gate}])}]
    settings = settings_for(backstage, tmp_path)
    async with serving(settings) as running, listening(opencode) as heard:
        caller = Caller(running)
        made = await caller.method("opencode.sessions.create", {})
        params = {"session_id": made["item"]["id"], "request": {"parts": parts}}
        await caller.method("opencode.sessions.prompt_async", params)
        await heard.until(b'"permission.asked"')
        before = await permissions(caller)

    with capture_logs() as logs:
        async with serving(settings) as running:
            caller = Caller(running)
            after = await caller.method("opencode.permissions.list")
            reply = {"request_id": after["items"][0]["request_id"], "reply": "once"}
            await caller.method("a2a.interrupt.permission.reply", reply)
            await backstage.reached(gate)
            await caller.method("opencode.sessions.abort", {"session_id": made["item"]["id"]})

    assert before["items"][0]["expires_at"]
    assert after == before
    [record] = [one for one in logs if one["event"] == "interrupt settled"]
    assert (record["resolution"], record["by"]) == ("once", record["principal"])


async def test_an_expired_request_says_so_for_a_while(backstage: Backstage, tmp_path: Path) -> None:
    settings = settings_for(backstage, tmp_path, A2A_INTERRUPT_REQUEST_TTL_SECONDS="1")
    async with serving(settings) as running:
        caller = Caller(running)
        task = await caller.send(script(FETCH, {"say": "went on"}))
        request_id = request_of(task)
        last = await ended(running, task, TOKEN)
        reply: JsonObject = {"request_id": request_id, "reply": "once"}
        refused = await caller.refused("a2a.interrupt.permission.reply", reply)

    assert last["status"]["state"] == "TASK_STATE_COMPLETED"
    assert (refused.code, refused.reason) == (-31009, "INTERRUPT_REQUEST_EXPIRED")
    assert refused.data == {"requestId": request_id}


async def test_without_a_tombstone_an_expired_request_is_missing(
    backstage: Backstage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(InterruptSettings, "interrupt_request_tombstone_ttl_seconds", 0.001)
    settings = settings_for(
        backstage,
        tmp_path,
        A2A_INTERRUPT_REQUEST_TTL_SECONDS="1",
    )
    async with serving(settings) as running:
        caller = Caller(running)
        task = await caller.send(script(FETCH, {"say": "went on"}))
        await ended(running, task, TOKEN)
        reply: JsonObject = {"request_id": request_of(task), "reply": "once"}
        refused = await caller.refused("a2a.interrupt.permission.reply", reply)

    assert refused.reason == "INTERRUPT_REQUEST_NOT_FOUND"


@pytest.mark.parametrize(
    ("method", "params", "fields"),
    [
        ("a2a.interrupt.permission.reply", {}, ("request_id", "reply")),
        ("a2a.interrupt.permission.reply", {"request_id": "per_1", "reply": "maybe"}, ("reply",)),
        (
            "a2a.interrupt.permission.reply",
            {"requestID": "per_1", "decision": "once"},
            ("request_id", "reply", "requestID", "decision"),
        ),
        ("a2a.interrupt.question.reply", {"request_id": "que_1"}, ("answers",)),
        ("a2a.interrupt.question.reply", {"request_id": "que_1", "answers": "x"}, ("answers",)),
        (
            "a2a.interrupt.question.reply",
            {"request_id": "que_1", "answers": ["x", [1]]},
            ("answers[0]", "answers[1][0]"),
        ),
        ("a2a.interrupt.question.reject", {"request_id": ""}, ("request_id",)),
        (
            "a2a.interrupt.question.reject",
            {"request_id": "que_1", "metadata": {"directory": "x"}},
            ("metadata.directory",),
        ),
        ("opencode.permissions.list", {"limit": 1}, ("limit",)),
    ],
)
async def test_wrong_params_are_named(
    service: Running, method: str, params: JsonObject, fields: tuple[str, ...]
) -> None:
    refused = await Caller(service).refused(method, params)

    assert (refused.code, refused.fields) == (-32602, fields)


@pytest.mark.parametrize("request_id", ["per_none", "../config", "per_1?x=", "x/../per_1"])
async def test_unknown_and_hostile_ids_are_missing(service: Running, request_id: str) -> None:
    refused = await Caller(service).refused(
        "a2a.interrupt.permission.reply", {"request_id": request_id, "reply": "once"}
    )

    assert (refused.code, refused.data) == (-31004, {"requestId": request_id})
