"""What OpenCode 2 does otherwise than OpenCode 1, as a caller meets it."""

import asyncio
from pathlib import Path
from typing import Any

import orjson
import pytest

from opencode_a2a.events import JsonObject
from opencode_a2a.ids import SessionId
from opencode_a2a.opencode import connect
from opencode_a2a.opencode.driver import Driver, Location
from opencode_a2a.opencode.upstream import facts
from tests.live.conftest import Serve
from tests.support.answers import RefusedError
from tests.support.backstage import Backstage, past_service, script
from tests.support.caller import Caller
from tests.support.service import Running, settings_for

pytestmark = [pytest.mark.live, pytest.mark.opencode2_only]

BASH = {"tool": "bash", "input": {"command": "echo ran", "description": "d"}}


async def test_what_opencode_2_lacks_is_refused_with_its_reason(caller: Caller) -> None:
    task = await caller.send(script({"say": "here"}))
    named: JsonObject = {"session_id": task.session_id}
    listed = await caller.method("opencode.sessions.messages.list", named)
    part = {"messageID": listed["items"][0]["messageId"], "partID": "prt_1"}
    schema = {"type": "object", "properties": {"name": {"type": "string"}}}

    for method, params in (
        ("opencode.sessions.todo", named),
        ("opencode.sessions.share", named),
        ("opencode.sessions.unshare", named),
        ("opencode.worktrees.list", {}),
        ("opencode.workspaces.list", {}),
    ):
        refused = (await caller.answer(method, params))["error"]
        told = f"There is no method {method} here: this version of OpenCode has nothing for it"
        assert (refused["code"], refused["message"]) == (-32601, told)
    calls: list[tuple[str, JsonObject]] = [
        ("opencode.sessions.update", {**named, "request": {"archived": True}}),
        ("opencode.sessions.create", {"request": {"parentID": task.session_id}}),
        ("opencode.sessions.revert", {**named, "request": part}),
        ("opencode.files.find", {"query": "x", "type": "text"}),
        ("opencode.files.list", {"metadata": {"opencode": {"workspace": {"id": "wrk_1"}}}}),
    ]
    for method, params in calls:
        refused = (await caller.answer(method, params))["error"]
        assert (refused["code"], refused["data"][0]["reason"]) == (-31022, "NOT_IN_OPENCODE")
        assert refused["message"].startswith("OpenCode 2 has no"), method
    for metadata in (
        {"shared": {"output": {"schema": schema}}},
        {"opencode": {"profile": "read-only"}},
    ):
        answer = await caller.send(script({"say": "no"}), metadata=metadata)
        assert answer.state in ("failed", "rejected"), answer.raw
        assert answer.text == ""
        assert "OpenCode" in answer.said
        assert "check the model" not in answer.said


async def test_the_system_text_of_a_prompt_is_for_that_prompt_alone(
    caller: Caller, opencode: Driver
) -> None:
    task = await caller.send(script({"say": "here"}))
    entries = f"/api/session/{task.session_id}/instructions/entries"
    request: JsonObject = {
        "parts": [{"type": "text", "text": "Remember this."}],
        "system": "Be brief.",
        "noReply": True,
    }

    given: JsonObject = {"session_id": task.session_id, "request": request}
    await caller.method("opencode.sessions.prompt_async", given)
    told = orjson.loads((await opencode.raw_response(entries)).body)
    await caller.send(script({"say": "there"}), context=task.context_id)
    later = orjson.loads((await opencode.raw_response(entries)).body)

    assert [one["value"] for one in told["data"]] == ["Be brief."]
    assert later["data"] == []


@pytest.mark.requirement("I25")
async def test_an_answer_without_a_tool_call_is_whole_whatever_its_provider_says(
    caller: Caller,
) -> None:
    task = await caller.send(script({"say": "whole"}, {"finish": "tool_calls"}))

    assert (task.state, task.text) == ("completed", "whole")
    assert task.opencode["finish"] == "other"


async def test_readiness_takes_one_call(service: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: object) -> None:
        pytest.fail("the contract was read again")

    monkeypatch.setattr(connect, "probe", never)
    monkeypatch.setattr(connect, "response_at", never)

    ready = await service.http.get("/readyz")

    assert (ready.status_code, ready.json()["checks"]["opencode"]) == (200, "ok")


async def test_approvals_are_as_strict_as_on_opencode_1(
    asking_backstage: Backstage, serve: Serve, tmp_path: Path
) -> None:
    stage, unknown = asking_backstage, ("todowrite", "plugin_tool")
    rules = [{"permission": name, "action": "allow"} for name in unknown]
    changes = {"A2A_ALLOW_ALWAYS": "true", "A2A_PERMISSION_RULES": orjson.dumps(rules).decode()}
    person = Caller(await serve(stage, **changes))
    edit: dict[str, Any] = {
        "tool": "edit",
        "input": {"filePath": "hello.txt", "oldString": "hello", "newString": "b" * 3_000 + "ye"},
    }

    # What is asked about is shown whole.
    change = await person.send(script(edit, {"say": "done"}))
    always: JsonObject = {"request_id": change.interrupt["request_id"], "reply": "always"}
    refused = await person.refused("a2a.interrupt.permission.reply", always)
    kept = await person.send("no", task=change.id)

    # A grant is for what OpenCode proposes, here the command itself, and ends with its task.
    env = {"tool": "bash", "input": {"command": "env", "description": "d"}}
    first = await person.send(script([env], [env], [BASH], {"say": "done"}))
    other = await person.send("yes for this task", task=first.id)
    once = {"reply": "once", "request_id": other.interrupt["request_id"]}
    granted = await person.send(once, task=other.id)

    # One that vanishes without an event leaves nothing that could be approved.
    asked = await person.send(script(BASH, {"say": "done"}))
    async with past_service(stage.url, stage.password) as opencode:
        at = Location(str(stage.workspace))
        await opencode.abort_session(SessionId(asked.session_id), at=at)
        ended = await person.ended(asked.id)
        with pytest.raises(RefusedError):
            await person.send("yes", task=asked.id)
        told = await facts(opencode, settings_for(stage, tmp_path, **changes))
        limited = await facts(opencode, settings_for(stage, tmp_path, A2A_PROFILE="read-only"))
        saved = orjson.loads((await opencode.raw_response("/api/permission/saved")).body)

    assert told is not None
    assert "todowrite" in str(told.notes)
    assert "plugin_tool" not in str(told.notes)  # OpenCode 2 does not tell whether it exists
    assert "profile" not in str(told.notes)
    assert limited is not None
    assert "messages with the profile read-only are refused" in str(limited.notes)
    assert "hello.txt" in change.said
    assert "b" * 3_000 + "ye" in change.said
    assert refused.fields == ("reply",)
    assert kept.state == "rejected"
    assert (first.state, other.state, granted.state) == (*["input_required"] * 2, "completed")
    assert "echo ran" in other.said
    assert [tool["status"] for tool in granted.tools] == ["completed"] * 3
    assert "PATH=" in granted.tools[0]["output"]
    assert stage.password not in str(granted.raw)
    assert (stage.workspace / "hello.txt").read_text() == "hello\n"
    assert (asked.state, ended.state) == ("input_required", "failed")
    assert saved["data"] == []


@pytest.mark.requirement("I24")
async def test_each_call_of_a_program_is_asked_for_by_itself(
    asking_backstage: Backstage, serve: Serve
) -> None:
    person = Caller(await serve(asking_backstage))
    calls = ", ".join(f"tools.echo.say({{ word: WORDS[{n}] }})" for n in range(3))
    code = f"const WORDS = 'abc'; return await Promise.all([{calls}])"

    asked = await person.send(script({"tool": "execute", "input": {"code": code}}, {"say": "done"}))
    async with asyncio.timeout(60):
        while len(asked.interrupt["waiting"]) < 3:
            asked = await person.get(asked.id)
    with pytest.raises(RefusedError):
        await person.send("yes", task=asked.id)
    left = await person.send("1 yes", task=asked.id)
    await person.cancel(asked.id)

    assert asked.interrupt["waiting"] == [1, 2, 3]
    assert asked.said.count("The arguments of this call are not known") == 3
    assert (left.state, left.interrupt["waiting"]) == ("input_required", [2, 3])


@pytest.mark.requirement("I24")
async def test_a_grant_for_a_command_that_ends_with_a_star_is_for_that_command(
    asking_backstage: Backstage, serve: Serve
) -> None:
    person = Caller(await serve(asking_backstage))
    commands = ("echo *", "echo *", "echo /root SECRET")
    steps = [[{"tool": "bash", "input": {"command": one, "description": "d"}}] for one in commands]

    first = await person.send(script(*steps, [{"say": "done"}]))
    other = await person.send("yes for this task", task=first.id)
    (grant,) = (await person.method("a2a.interrupt.grants.list"))["items"]
    await person.cancel(first.id)

    assert "to allow exactly this command without being asked again" in first.said
    assert first.said.count("echo *") == 1
    assert (grant["patterns"], grant["exact"]) == (["echo *"], "echo *")
    assert (other.state, "echo /root SECRET" in other.said) == ("input_required", True)


@pytest.mark.requirement("I24")
async def test_a_field_that_the_tool_ignores_is_told_as_that(
    asking_backstage: Backstage, serve: Serve
) -> None:
    person = Caller(await serve(asking_backstage))
    given = {"path": "hello.txt", "filePath": "README.md", "oldString": "hello", "newString": "x"}

    asked = await person.send(
        script({"tool": "edit", "raw": orjson.dumps(given).decode()}, {"say": "done"})
    )
    refused = await person.send("no: not now", task=asked.id)

    lines = asked.said.splitlines()
    assert lines[1:4] == [
        "Input of edit:",
        "    filePath: hello.txt",
        "    filePath (not used): README.md",
    ]
    assert "with a reason after a colon if you like (this OpenCode does not give it" in asked.said
    assert asked.interrupt["details"]["tells_reason"] is False
    assert refused.state in ("completed", "rejected")
