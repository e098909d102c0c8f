"""What a turn of a real OpenCode looks like from outside, on every line and binding."""

import base64
import uuid
from typing import Any

import pytest

from tests.live.conftest import Serve, two_wires
from tests.support.answers import Task, Wire
from tests.support.backstage import Backstage, script
from tests.support.caller import Caller, Following
from tests.support.service import Running

pytestmark = pytest.mark.live


@pytest.fixture
def backstage(tracking_backstage: Backstage) -> Backstage:
    return tracking_backstage


def named(task: Task) -> dict[str, Any]:
    """Return the last state of each tool call, by the tool's name."""
    return {tool["tool"]: tool for tool in task.tools}


async def told_and_stored(caller: Caller, following: Following) -> tuple[Task, Task]:
    """Return a task as its stream told it, and as it is stored, once it has ended."""
    await following.rest()
    told = following.task
    return told, await caller.get(told.id)


def same(told: Task, stored: Task) -> bool:
    """Whether a client that followed the stream has what a client that reads the task gets."""

    def shown(task: Task) -> Any:
        channels = (task.text, task.reasoning)
        tools = [(t["call_id"], t["status"], t.get("output")) for t in task.tools]
        # What a task says twice, for clients that look in one place only, a stream says once.
        said = task.said if task.state != "completed" else None
        names = sorted(a["artifactId"] for a in task.artifacts if a["name"] != "notice")
        return channels, tools, task.state, said, names

    return shown(told) == shown(stored)


@two_wires
async def test_a_blocking_send_returns_the_whole_answer(service: Running, wire: Wire) -> None:
    task = await Caller(service, wire).send(script({"think": "hm"}, {"say": "one\ntwo  three"}))

    assert task.state == "completed"
    assert (task.reasoning, task.text) == ("hm", "one\ntwo  three")
    assert [artifact["name"] for artifact in task.artifacts] == ["reasoning", "text"]


@pytest.mark.both_drivers
@two_wires
async def test_a_background_task_ends_by_itself(
    service: Running, backstage: Backstage, wire: Wire
) -> None:
    caller, gate = Caller(service, wire), str(uuid.uuid4())

    begun = await caller.begin(script({"say": "before "}, {"gate": gate}, {"say": "after"}))
    await backstage.reached(gate)
    waiting = await caller.get(begun.id)
    await backstage.open(gate)
    ended = await caller.ended(begun.id)

    assert begun.state in ("submitted", "working")
    assert waiting.state == "working"
    assert ended.text == "before after"


@pytest.mark.both_drivers
@two_wires
async def test_a_stream_tells_exactly_what_is_stored(service: Running, wire: Wire) -> None:
    caller = Caller(service, wire)
    actions = (
        {"think": "let me\n  see"},
        {"say": "First"},
        {"tool": "bash", "input": {"command": "echo out", "description": "d"}},
        {"say": " then\n\n done"},
    )

    async with caller.stream(script(*actions)) as following:
        told, stored = await told_and_stored(caller, following)

    assert following.states == ["submitted", "working", "completed"]
    assert stored.text == "First\n\n then\n\n done"
    assert stored.reasoning == "let me\n  see"
    assert same(told, stored)


@pytest.mark.both_drivers
async def test_text_grows_word_by_word_before_the_model_has_ended(
    caller: Caller, backstage: Backstage
) -> None:
    gate = str(uuid.uuid4())

    async with caller.stream(script({"say": "half "}, {"gate": gate}, {"say": "whole"})) as heard:
        await heard.until_text("half ")
        await backstage.open(gate)
        await heard.rest()

    assert heard.task.text == "half whole"


async def test_whitespace_is_kept_to_the_last_character(caller: Caller) -> None:
    text = "  \n\tindented\n\n\n    code  \r\n  "

    task = await caller.send(script({"say": text, "chunk": 3}))

    assert task.text == text


async def test_the_texts_of_all_steps_are_told_with_a_blank_line_between(caller: Caller) -> None:
    step = {"tool": "bash", "input": {"command": "true", "description": "d"}}

    task = await caller.send(script({"say": "one"}, step, {"say": "two"}, step, {"say": "three"}))

    assert task.text == "one\n\ntwo\n\nthree"
    assert [tool["status"] for tool in task.tools] == ["completed", "completed"]


@pytest.mark.both_drivers
async def test_a_tool_call_shows_its_input_and_its_output(caller: Caller) -> None:
    call = {"tool": "bash", "input": {"command": "echo hi; exit 3", "description": "Say hi"}}

    task = await caller.send(script(call, {"say": "done"}))

    (tool,) = task.tools
    assert tool["tool"] == "bash"
    assert tool["status"] == "completed"
    assert tool["input"]["command"] == "echo hi; exit 3"
    assert tool["output"] == "hi\n"


async def test_live_output_of_a_running_tool_is_told(caller: Caller, backstage: Backstage) -> None:
    flag = backstage.workspace / str(uuid.uuid4())
    command = f"echo begun; until [ -e {flag.name} ]; do sleep 0.05; done; echo ended"
    call = {"tool": "bash", "input": {"command": command, "description": "d"}}

    async with caller.stream(script(call, {"say": "done"})) as following:
        await following.until(
            lambda u: bool(u.artifact) and following.task.tools[0].get("output") == "begun\n"
        )
        flag.touch()
        await following.rest()

    assert following.task.tools[0]["output"] == "begun\nended\n"


async def test_a_failing_tool_is_told_as_an_error_and_the_turn_goes_on(caller: Caller) -> None:
    call = {"tool": "read", "input": {"filePath": "missing.txt"}}

    task = await caller.send(script(call, {"say": "not there"}))

    assert task.state == "completed"
    assert task.tools[0]["status"] == "error"
    assert "missing.txt" in task.tools[0]["error"]
    assert task.text == "not there"


@pytest.mark.parametrize(
    "call",
    [{"tool": "no_such_tool", "input": {}}, {"tool": "bash", "raw": "{broken"}],
    ids=["unknown", "unparsable"],
)
async def test_a_call_that_makes_no_sense_is_told_as_invalid(caller: Caller, call: Any) -> None:
    task = await caller.send(script(call, {"say": "sorry"}))

    assert task.tools[0]["tool"] == "invalid"
    assert task.tools[0]["status"] == "completed"
    assert task.text == "sorry"


@pytest.mark.both_drivers
async def test_parallel_calls_keep_an_artifact_each(caller: Caller) -> None:
    calls = [
        {"tool": "bash", "input": {"command": f"echo {n}", "description": "d"}} for n in range(3)
    ]

    async with caller.stream(script(*calls, {"say": "done"})) as following:
        told, stored = await told_and_stored(caller, following)

    assert sorted(tool["output"] for tool in stored.tools) == ["0\n", "1\n", "2\n"]
    assert same(told, stored)


async def test_todos_are_told_as_progress(caller: Caller) -> None:
    todos = [{"content": "look", "status": "pending", "priority": "high"}]
    call = {"tool": "todowrite", "input": {"todos": todos}}

    async with caller.stream(script(call, {"say": "planned"})) as following:
        await following.rest()

    told = [progress["todos"] for progress in following.progress if progress["type"] == "todo"]
    assert told == [todos]


async def test_steps_are_told_as_progress_once(caller: Caller) -> None:
    call = {"tool": "bash", "input": {"command": "true", "description": "d"}}

    async with caller.stream(script(call, {"say": "done"})) as following:
        await following.rest()

    steps = [(p["type"], p["part_id"]) for p in following.progress if "step" in p["type"]]
    assert len(steps) == len(set(steps)) == 4


async def test_odd_figures_of_a_provider_do_not_change_how_a_turn_ends(caller: Caller) -> None:
    for figure in (2**63, 1e30, 1.5, -7):
        raw = {"prompt_tokens": figure, "completion_tokens": figure, "total_tokens": figure}
        task = await caller.send(script({"say": f"said {figure}"}, {"usage": {"raw": raw}}))

        # OpenCode believes such a figure, and may compact the session and go on.
        assert task.state == "completed"
        assert task.text.startswith(f"said {figure}")
        assert 0 <= task.shared["usage"]["total_tokens"] < 100_000

    again = await caller.send(script({"say": "still here"}))
    assert again.text == "still here"


@pytest.mark.both_drivers
async def test_a_sub_agent_is_one_tool_call_and_its_usage_is_counted_apart(caller: Caller) -> None:
    task_call = {
        "tool": "task",
        "input": {"description": "look", "subagent_type": "general", "prompt": "look"},
        "script": [
            {"say": "child result"},
            {"usage": {"prompt": 1000, "completion": 100, "cached": 0, "reasoning": 0}},
        ],
    }
    own = {"usage": {"prompt": 100, "completion": 10, "cached": 0, "reasoning": 0}}

    async with caller.stream(script(task_call, own, {"say": "parent done"}, own)) as following:
        told, stored = await told_and_stored(caller, following)

    assert stored.text == "parent done"
    assert "child result" in named(stored)["task"]["output"]
    usage = stored.shared["usage"]
    assert (usage["input_tokens"], usage["output_tokens"]) == (200, 20)
    assert usage["children"]["input_tokens"] == 1000
    assert usage["children"]["output_tokens"] == 100
    assert same(told, stored)


@pytest.mark.both_drivers
async def test_usage_and_cost_are_whole_numbers_on_the_last_status(caller: Caller) -> None:
    used = {"usage": {"prompt": 100, "completion": 20, "cached": 10, "reasoning": 5}}

    async with caller.stream(script({"say": "x"}, used)) as following:
        updates = await following.rest()

    assert updates[-1].shared["usage"] == {
        "input_tokens": 90,
        "output_tokens": 15,
        "total_tokens": 120,
        "reasoning_tokens": 5,
        "cache_tokens": {"read_tokens": 10, "write_tokens": 0},
        "cost": pytest.approx((90 + 20 * 2 + 10 * 0.1) / 1e6),
    }
    assert isinstance(updates[-1].shared["usage"]["input_tokens"], int)


async def test_changed_files_end_in_a_diff(caller: Caller, backstage: Backstage) -> None:
    name = f"{uuid.uuid4()}.txt"
    path = str(backstage.workspace / name)
    actions = [
        [{"tool": "write", "input": {"filePath": path, "content": "one\ntwo\n"}}],
        [{"tool": "edit", "input": {"filePath": path, "oldString": "two", "newString": "2"}}],
        [{"say": "written"}],
    ]

    async with caller.stream(script(*actions)) as following:
        told, stored = await told_and_stored(caller, following)

    assert (backstage.workspace / name).read_text() == "one\n2\n"
    patch, listing = stored.diff["parts"]
    assert b"+one\n+2" in base64.b64decode(patch["raw"])
    assert listing["data"]["files"] == [
        {"file": name, "status": "added", "additions": 2, "deletions": 0}
    ]
    assert same(told, stored)


async def test_a_turn_that_changes_nothing_has_no_diff(caller: Caller) -> None:
    call = {"tool": "read", "input": {"filePath": "hello.txt"}}

    task = await caller.send(script(call, {"say": "read"}))

    assert task.diff is None


async def test_a_compaction_is_progress_and_its_summary_is_no_answer(caller: Caller) -> None:
    actions = ({"error": "context_length", "times": 1}, {"say": "after the compaction"})
    first = await caller.send(script({"say": "something to compact"}))

    async with caller.stream(script(*actions), context=first.context_id) as following:
        told, stored = await told_and_stored(caller, following)

    assert stored.state == "completed"
    assert stored.text == "after the compaction"
    phases = [p["status"] for p in following.progress if p["type"] == "compaction"]
    assert phases == ["running", "completed"]
    assert same(told, stored)


async def test_a_full_context_is_compacted_in_the_middle_of_a_turn(caller: Caller) -> None:
    full = {"usage": {"prompt": 99_000, "completion": 500, "cached": 0, "reasoning": 0}}
    call = {"tool": "bash", "input": {"command": "true", "description": "d"}}

    async with caller.stream(script({"say": "one"}, call, full, {"say": "two"})) as following:
        told, stored = await told_and_stored(caller, following)

    assert stored.state == "completed"
    assert stored.text == "one\n\ntwo"
    assert [p["status"] for p in following.progress if p["type"] == "compaction"] == [
        "running",
        "completed",
    ]
    assert same(told, stored)


async def test_a_long_text_arrives_whole(caller: Caller) -> None:
    async with caller.stream(script({"say": " 0123456789", "repeat": 3000})) as following:
        told, stored = await told_and_stored(caller, following)

    assert stored.text == " 0123456789" * 3000
    assert same(told, stored)


async def test_the_session_and_its_title_are_told(caller: Caller) -> None:
    task = await caller.send("Please " + script({"say": "hello"}))

    assert task.session_id.startswith("ses_")
    assert task.shared["session"]["title"]


async def test_sequence_numbers_grow_and_have_no_gap_but_for_what_is_not_shown(
    caller: Caller,
) -> None:
    async with caller.stream(script({"say": "one two three"})) as following:
        updates = await following.rest()

    numbers = [int(update.id) for update in updates]
    assert numbers == sorted(set(numbers))
    assert updates[-1].state == "completed"


async def test_a_data_part_reaches_the_model_as_text(caller: Caller, backstage: Backstage) -> None:
    task = await caller.send(script({"say": "seen"}), {"answer": 42})

    assert task.text == "seen"


async def test_the_agent_of_the_settings_is_used(serve: Serve) -> None:
    service = await serve(OPENCODE_AGENT="plan")

    task = await Caller(service).send(script({"say": "planned"}))

    assert task.text == "planned"


@pytest.mark.both_drivers
async def test_a_model_named_by_the_request_is_used(caller: Caller) -> None:
    metadata = {"shared": {"model": {"providerID": "demo", "modelID": "demo"}}}

    task = await caller.send(script({"say": "same model"}), metadata=metadata)

    assert task.text == "same model"


@pytest.mark.both_drivers
async def test_two_prompts_at_once_in_two_contexts_do_not_mix(
    caller: Caller, backstage: Backstage
) -> None:
    gates = [str(uuid.uuid4()) for _ in range(2)]
    begun = [
        await caller.begin(script({"say": f"{n} "}, {"gate": gate}, {"say": f"{n}"}))
        for n, gate in enumerate(gates)
    ]
    for gate in gates:
        await backstage.reached(gate)
    for gate in gates:
        await backstage.open(gate)

    ended = [await caller.ended(task.id) for task in begun]

    assert [task.text for task in ended] == ["0 0", "1 1"]
    assert ended[0].session_id != ended[1].session_id


async def test_half_a_character_of_a_tool_harms_neither_the_turn_nor_the_session(
    serve: Serve, backstage: Backstage
) -> None:
    # OpenCode's read tool cuts long lines after 2,000 UTF-16 units: here in the middle of one.
    line = "x" * 1999 + "\N{GRINNING FACE}" * 10
    (backstage.workspace / "wide.txt").write_text(line)
    service = await serve(A2A_TURN_SILENCE_SECONDS="10")
    read = {"tool": "read", "input": {"filePath": str(backstage.workspace / "wide.txt")}}

    task = await Caller(service).send(script(read, {"say": "read"}))
    params = {"session_id": task.session_id}
    listed = await Caller(service).method("opencode.sessions.messages.list", params)

    assert (task.state, task.text) == ("completed", "read")
    assert "x\N{REPLACEMENT CHARACTER}" in named(task)["read"]["output"]
    assert "x\N{REPLACEMENT CHARACTER}" in str(listed)
