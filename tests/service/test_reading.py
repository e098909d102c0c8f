"""Getting and listing tasks."""

import asyncio
import re
from typing import Any

import pytest
from a2a.types import ListTasksResponse
from google.protobuf.json_format import ParseDict

from opencode_a2a.events import Json
from tests.support.answers import LISTING, NOT_FOUND, PARAMS, Task, Wire
from tests.support.caller import Caller
from tests.support.opencode import FakeOpenCode
from tests.support.service import Running

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.both_databases]

WITH_LIST = pytest.mark.parametrize(
    "wire", [Wire.RPC, Wire.REST, Wire.REST03], ids=lambda wire: wire.value
)
"""JSON-RPC of 0.3 has no list."""
ABOUT = ("created_at", "title", "model", "agent", "directory")
FAR = "2100-01-01T00:00:00.000Z"


@pytest.fixture
def theirs(service: Running, opencode: FakeOpenCode, wire: Wire, stranger: str) -> Caller:
    """Somebody who has no tasks yet."""
    return Caller(service, wire, stranger)


@pytest.fixture
def lists(service: Running, wire: Wire, stranger: str) -> Caller:
    return Caller(service, wire, stranger)


async def page(lists: Caller, **params: Json) -> Any:
    result = (await lists.ask("list", params)).result
    if lists.wire.modern:
        ParseDict(result, ListTasksResponse())
    return result


def names(page: Any) -> list[str]:
    return [task["id"] for task in page["tasks"]]


# --- get --------------------------------------------------------------------------------------


@WITH_LIST
async def test_a_task_says_what_it_is_about_and_who_worked_where(theirs: Caller) -> None:
    sent = await theirs.send("fix\n the flaky   test, please " + "now " * 50)

    (listed,) = (await page(theirs))["tasks"]

    read = (await theirs.get(sent.id)).raw
    about = {name: read["metadata"]["opencode"].pop(name) for name in ABOUT}
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", about["created_at"])
    assert about["title"].startswith("fix the flaky test, please now")
    assert (len(about["title"]), about["title"][-1]) == (119, "…")
    assert (about["model"], about["agent"]) == ("fake/fake-1", "build")
    assert about["directory"]
    assert {name: listed["metadata"]["opencode"][name] for name in ABOUT} == about


@pytest.mark.requirement("3.1.3-get")
@pytest.mark.requirement("4.1-status-timestamp")
async def test_a_task_is_read_as_it_was_told(caller: Caller) -> None:
    sent = await caller.send("hello")

    task = await caller.get(sent.id)

    assert (task.state, task.text, task.history) == (sent.state, sent.text, ["hello"])
    stamp = task.raw["status"]["timestamp"]
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", stamp)


@pytest.mark.requirement("3.1.3-unknown")
@pytest.mark.parametrize("task_id", ["no-such-task", "x" * 256, "é", "%2e%2e"])
async def test_a_task_that_does_not_exist_is_not_found(caller: Caller, task_id: str) -> None:
    (await caller.ask("get", {"id": task_id})).refuses(NOT_FOUND)


@pytest.mark.requirement("3.2.4-history-length")
@pytest.mark.parametrize(
    ("length", "told"),
    [(None, ["run it", "once"]), (0, None), (1, ["once"]), (2, ["run it", "once"]), (9, ...)],
)
async def test_history_is_cut_to_the_newest(
    caller: Caller, opencode: FakeOpenCode, length: int | None, told: Any
) -> None:
    opencode.play("permission-once")
    asked = await caller.send("run it")
    await caller.send("once", task=asked.id)

    params: dict[str, Json] = {"id": asked.id}
    task = (await caller.ask("get", params | ({"historyLength": length} if length else {}))).body
    if length == 0:
        task = (await caller.ask("get", params | {"historyLength": 0})).body

    raw = task["result"] if caller.wire.rpc else task
    if told is None:
        assert "history" not in raw
    else:
        assert Task(raw).history == (["run it", "once"] if told is ... else told)


@pytest.mark.requirement("3.2.4-history-length")
async def test_the_answer_to_a_message_has_as_much_history_as_wanted(caller: Caller) -> None:
    params = caller.message("hello") | {"configuration": {"historyLength": 0}}
    if not caller.wire.modern:
        params["configuration"] = {"historyLength": 0, "blocking": True}

    answer = await caller.ask("send", params)

    assert "history" not in answer.task


@pytest.mark.requirement("3.2.4-history-length")
@pytest.mark.parametrize("length", [-1, "x", 1.5, 2**40])
async def test_a_wrong_history_length_is_refused(caller: Caller, length: Json) -> None:
    wanted = length if caller.wire.rpc else str(length)

    answer = await caller.ask("get", {"id": "any", "historyLength": wanted})

    assert answer.refuses(PARAMS) == ["historyLength"]


@pytest.mark.requirement("ours-plain-reading")
async def test_text_is_one_part_however_it_was_streamed(caller: Caller) -> None:
    task = await caller.send("hello")

    (artifact,) = task.artifacts
    assert [part["text"] for part in artifact["parts"]] == ["one two three four"]


# --- list -------------------------------------------------------------------------------------


@WITH_LIST
@pytest.mark.requirement("3.1.4-scoped")
@pytest.mark.requirement("3.1.4-envelope")
async def test_a_list_of_nothing_has_all_its_fields(lists: Caller) -> None:
    assert await page(lists) == {"tasks": [], "nextPageToken": "", "pageSize": 50, "totalSize": 0}


@WITH_LIST
@pytest.mark.requirement("3.1.4-order")
@pytest.mark.requirement("3.1.4-artifacts")
async def test_the_newest_status_comes_first_and_artifacts_when_asked_for(
    lists: Caller, theirs: Caller, opencode: FakeOpenCode
) -> None:
    opencode.play("permission-once")
    waiting = await theirs.send("run it")
    opencode.play("plain-text")
    ended = [await theirs.send("hello") for _ in range(2)]
    newest_first = [ended[1].id, ended[0].id, waiting.id]

    brief = await page(lists)
    assert names(brief) == newest_first
    assert brief["totalSize"] == 3
    assert all("artifacts" not in task and "history" not in task for task in brief["tasks"])
    whole = await page(lists, includeArtifacts=True if lists.wire.rpc else "true", historyLength=1)
    assert [Task(task).text for task in whole["tasks"][:2]] == ["one two three four"] * 2
    assert [Task(task).history for task in whole["tasks"]] == [["hello"], ["hello"], ["run it"]]

    await theirs.send("once", task=waiting.id)
    assert names(await page(lists)) == [waiting.id, ended[1].id, ended[0].id]


@WITH_LIST
@pytest.mark.requirement("3.1.4-cursor")
async def test_pages_are_stable_while_tasks_are_added(lists: Caller, theirs: Caller) -> None:
    old = [(await theirs.send("hello")).id for _ in range(5)]

    first = await page(lists, pageSize=2)
    added = await theirs.send("hello")
    second = await page(lists, pageSize=2, pageToken=first["nextPageToken"])
    third = await page(lists, pageSize=2, pageToken=second["nextPageToken"])

    seen = [*names(first), *names(second), *names(third)]
    assert seen == old[::-1]
    assert added.id not in seen
    assert (first["pageSize"], first["totalSize"], third["totalSize"]) == (2, 5, 6)
    assert (bool(first["nextPageToken"]), third["nextPageToken"]) == (True, "")


@WITH_LIST
@pytest.mark.requirement("3.1.4-cursor")
async def test_the_last_full_page_says_that_it_is_the_last(lists: Caller, theirs: Caller) -> None:
    for _ in range(2):
        await theirs.send("hello")

    assert (await page(lists, pageSize=2))["nextPageToken"] == ""


@WITH_LIST
@pytest.mark.requirement("3.1.4-filters")
async def test_a_list_is_filtered_by_context_state_and_time(
    lists: Caller, theirs: Caller, opencode: FakeOpenCode
) -> None:
    hold = opencode.hold()
    running = await theirs.begin("hello", context="one")
    async with asyncio.timeout(60):
        await hold.reached.wait()
    opencode.release()
    first = await theirs.ended(running.id)
    opencode.play("error-400")
    second = await theirs.send("hello", context="two")
    modern = lists.wire.modern
    failed = "TASK_STATE_FAILED" if modern else "failed"
    at = second.raw["status"]["timestamp"]

    assert names(await page(lists, contextId="one")) == [first.id]
    assert names(await page(lists, contextId="three")) == []
    assert names(await page(lists, status=failed)) == [second.id]
    assert names(await page(lists, statusTimestampAfter=at)) == [second.id]
    assert names(await page(lists, statusTimestampAfter=FAR)) == []
    filtered = await page(lists, status=failed, contextId="one")
    assert (filtered["tasks"], filtered["totalSize"]) == ([], 0)


@WITH_LIST
@pytest.mark.requirement("3.1.4-running-tasks")
async def test_a_running_task_is_in_the_list(
    lists: Caller, theirs: Caller, opencode: FakeOpenCode
) -> None:
    hold = opencode.hold()
    running = await theirs.begin("hello")
    async with asyncio.timeout(60):
        await hold.reached.wait()

    (task,) = (await page(lists, includeArtifacts=True if lists.wire.rpc else "true"))["tasks"]

    assert (task["id"], Task(task).state) == (running.id, "working")


@WITH_LIST
@pytest.mark.requirement("3.1.4-page-size")
@pytest.mark.requirement("13-unknown-enums")
@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("pageSize", 0),
        ("pageSize", 101),
        ("pageSize", -1),
        ("pageSize", "many"),
        ("pageToken", "garbage"),
        ("pageToken", "WzEsMl0x"),
        ("status", "TASK_STATE_RUNNING"),
        ("status", "RUNNING"),
        ("historyLength", -1),
        ("statusTimestampAfter", "yesterday"),
        ("statusTimestampAfter", "2026-11-15T09:00:00"),
        ("includeArtifacts", "yes"),
    ],
)
async def test_a_wrong_filter_is_refused_by_name(lists: Caller, field: str, value: Json) -> None:
    answer = await lists.ask("list", {field: value})

    assert answer.refuses(PARAMS if lists.wire.modern else LISTING) == [field]


@WITH_LIST
@pytest.mark.requirement("5-snake-case-taken")
@pytest.mark.requirement("5-unknown-fields")
async def test_snake_case_is_taken_and_unknown_fields_are_ignored(
    lists: Caller, theirs: Caller
) -> None:
    mine = await theirs.send("hello", context="mine")
    await theirs.send("hello", context="other")

    listed = await page(lists, context_id="mine", page_size=7, something_else="x")

    assert (names(listed), listed["pageSize"]) == ([mine.id], 7)


@pytest.mark.requirement("0.3-no-list-in-json-rpc")
async def test_the_older_json_rpc_has_no_list(service: Running, opencode: FakeOpenCode) -> None:
    caller = Caller(service, Wire.RPC03)

    answer = await caller.post(b'{"jsonrpc":"2.0","id":1,"method":"tasks/list","params":{}}')

    assert answer.body["error"]["code"] == -32601
