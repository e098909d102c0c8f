"""What is in messages and artifacts: data as it came, files, output modes."""

import asyncio
from typing import Any

import orjson
import pytest

from opencode_a2a.events import Json, JsonObject
from tests.support.answers import Task, Wire
from tests.support.caller import Caller
from tests.support.opencode import FakeOpenCode
from tests.support.service import Running

pytestmark = pytest.mark.asyncio(loop_scope="module")

DATA: JsonObject = {
    "zero": 0,
    "answer": 42,
    "large": 2**53 + 1,
    "largest": 2**64 - 1,
    "least": -(2**63),
    "real": 1.5,
    "whole": 2.0,
    "deep": {"list": [1, "1", None, True, {"n": 7}]},
    "text": "é \u2028 😀",
}
PNG = (
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9"
    "awAAAABJRU5ErkJggg=="
)
TEXT_ONLY: JsonObject = {"acceptedOutputModes": ["TEXT/plain", "text/plain;q=1"]}


def first_part(task: Any) -> Any:
    message = task["history"][0]
    return (message.get("parts") or message["content"])[0]


@pytest.mark.requirement("ours-integers")
async def test_data_and_metadata_come_back_as_they_were_sent(
    caller: Caller, opencode: FakeOpenCode
) -> None:
    params = caller.message(caller.data(DATA), metadata={"n": 7, "f": 1.0})

    sent = (await caller.ask("send", params)).task
    read = (await caller.ask("get", {"id": sent["id"]})).result

    for task in (sent, read):
        data = first_part(task)["data"]
        data = data["data"] if set(data) == {"data"} else data
        assert orjson.dumps(data) == orjson.dumps(DATA)
        metadata = task["history"][0]["metadata"]
        assert orjson.dumps(metadata) == b'{"n":7,"f":1.0}'
    prompt: Any = opencode.prompts[0]["parts"]
    assert '"large": 9007199254740993' in prompt[0]["text"]


@pytest.mark.requirement("ours-files")
async def test_files_reach_opencode_and_stay_in_the_history(
    caller: Caller, opencode: FakeOpenCode
) -> None:
    sent = await caller.ask("send", caller.message("look", caller.file(PNG, "image/png")))

    prompt: Any = opencode.prompts[0]["parts"]
    text, image = prompt
    assert (text["type"], text["text"]) == ("text", "look")
    assert (image["type"], image["mime"]) == ("file", "image/png")
    assert image["url"] == f"data:image/png;base64,{PNG}"
    kept = sent.task["history"][0]["parts"][1]
    assert kept == caller.file(PNG, "image/png")


@pytest.mark.requirement("3.2.2-output-modes")
@pytest.mark.requirement("ours-output-modes")
@pytest.mark.parametrize("modes", [None, [], ["*/*"], ["*"], ["image/png", "*/*"]])
async def test_without_a_restriction_tool_calls_are_data(
    caller: Caller, opencode: FakeOpenCode, modes: Json
) -> None:
    opencode.play("tool-completed")
    params = caller.message("run it")
    if modes is not None:
        params["configuration"] = {"acceptedOutputModes": modes}

    task = Task((await caller.ask("send", params)).task)

    assert task.tools[0]["tool"] == "bash"
    assert "output_negotiation" not in task.opencode


def names(artifacts: list[Any]) -> set[str]:
    return {artifact["artifactId"].rpartition(":")[2] for artifact in artifacts}


@pytest.mark.requirement("3.2.2-output-modes")
@pytest.mark.requirement("ours-output-modes")
async def test_output_modes_hold_for_the_task_wherever_it_is_read(
    service: Running, wire: Wire, opencode: FakeOpenCode, stranger: str
) -> None:
    opencode.play("tool-completed")
    caller = Caller(service, wire, stranger)
    params = caller.message("run it") | {"configuration": TEXT_ONLY}

    sent = (await caller.ask("send", params)).task
    read = (await caller.ask("get", {"id": sent["id"]})).result
    lists = Caller(service, Wire.REST if wire.modern else Wire.REST03, stranger)
    listed = (await lists.ask("list", {"includeArtifacts": "true"})).result["tasks"][0]
    async with caller.subscribe(sent["id"], "1") as following:
        updates = await following.rest()

    # A client that takes text alone shows every text: a tool call would stand amid the answer.
    for task in (sent, read, listed):
        assert names(task["artifacts"]) == {"text"}
        negotiated = task["metadata"]["opencode"]["output_negotiation"]
        assert negotiated == {"accepted_output_modes": ["text/plain"]}
    assert names([update.artifact["artifact"] for update in updates if update.artifact]) == {"text"}


@pytest.mark.requirement("3.2.2-output-modes")
@pytest.mark.parametrize("modes", [["application/json"], ["text/markdown"]])
async def test_whoever_does_not_list_plain_text_is_answered_in_it_anyway(
    caller: Caller, opencode: FakeOpenCode, modes: Json
) -> None:
    opencode.play("tool-completed")
    params = caller.message("run it") | {"configuration": {"acceptedOutputModes": modes}}

    task = Task((await caller.ask("send", params)).task)

    assert (task.state, task.text != "") == ("completed", True)
    assert task.reasoning == ""
    assert len(task.tools) == (1 if "application/json" in str(modes) else 0)


@pytest.mark.requirement("ours-output-modes")
async def test_a_diff_is_left_out_for_those_who_do_not_take_one(
    caller: Caller, opencode: FakeOpenCode
) -> None:
    opencode.play("write-edit")

    whole = Task((await caller.ask("send", caller.message("write"))).task)
    params = caller.message("write") | {"configuration": TEXT_ONLY}
    plain = Task((await caller.ask("send", params)).task)

    assert whole.diff is not None
    assert len(whole.diff["parts"]) == 2
    assert plain.diff is None


@pytest.mark.requirement("I10")
async def test_changes_of_others_in_the_directory_are_not_the_diff_of_a_turn_that_only_read(
    service: Running, opencode: FakeOpenCode
) -> None:
    opencode.play("write-edit")
    for tool in (b"write", b"edit"):  # the directory changed, but not by this turn
        for form in (b'"tool":"%s"', b'"tool": "%s"'):
            opencode.said[form % tool] = form % b"read"

    task = await Caller(service).send("read it")

    assert [tool["tool"] for tool in task.tools] == ["read", "read"]
    assert (task.state, task.diff) == ("completed", None)


@pytest.mark.requirement("ours-output-modes")
async def test_output_modes_hold_in_a_live_stream(caller: Caller, opencode: FakeOpenCode) -> None:
    opencode.play("tool-completed")
    hold = opencode.hold("permission.asked")
    configuration = TEXT_ONLY | (
        {"returnImmediately": True} if caller.wire.modern else {"blocking": False}
    )
    params = caller.message("run it") | {"configuration": configuration}
    task = (await caller.ask("send", params)).task

    async with asyncio.timeout(60):
        async with caller.subscribe(task["id"], "1") as following:
            updates = await following.rest()

    assert not hold.reached.is_set()
    parts = [
        part
        for update in updates
        if update.artifact
        for part in update.artifact["artifact"]["parts"]
    ]
    assert parts
    assert all("data" not in part for part in parts)
