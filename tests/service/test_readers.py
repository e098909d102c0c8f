"""Where a client looks for what the agent says: four habits, over every kind of turn.

Some read what the agent says to the state of a task, some the first artifact, some the last, some
all text there is. Whatever the habit, a person should meet the answer, the question, or why the
turn failed.
"""

from typing import Any

import pytest

from tests.support.answers import Task
from tests.support.caller import Caller
from tests.support.opencode import FakeOpenCode

pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.requirement("ours-four-readers"),
]


def words(parts: list[Any]) -> str:
    return "".join(part.get("text", "") for part in parts)


def read(task: Task) -> tuple[str, str, str, str]:
    """Return what the four readers see: status message, first artifact, last, all text."""
    texts = [words(artifact["parts"]) for artifact in task.artifacts] or [""]
    return task.said, texts[0], texts[-1], "".join(texts)


def names(task: Task) -> list[str]:
    return [artifact["name"] for artifact in task.artifacts]


@pytest.mark.parametrize(
    ("turn", "artifacts", "first", "answer", "everything"),
    [
        ("plain-text", ["text"], "one two three four", "one two three four", "one two three four"),
        (
            "reasoning-text",
            ["reasoning", "text"],
            "let me think",
            "the answer",
            "let me thinkthe answer",
        ),
        (
            "tool-completed",
            ["bash", "reasoning", "text"],
            "",
            "Running. \n\nFinished.",
            "runRunning. \n\nFinished.",
        ),
        ("write-edit", ["write", "edit", "diff", "text"], "", "ok", "ok"),
    ],
)
async def test_a_finished_task_ends_with_its_answer(
    caller: Caller,
    opencode: FakeOpenCode,
    turn: str,
    artifacts: list[str],
    first: str,
    answer: str,
    everything: str,
) -> None:
    opencode.play(turn)

    sent = await caller.send("do it")
    got = await caller.get(sent.id)

    for task in (sent, got):
        assert task.state == "completed"
        assert names(task) == artifacts
        # Clients that join the status and the artifacts show it once if there is nothing else.
        said = answer if len(artifacts) > 1 else ""
        assert read(task) == (said, first, answer, everything)


async def test_a_stream_ends_with_the_answer_and_does_not_repeat_it(
    caller: Caller, opencode: FakeOpenCode
) -> None:
    opencode.play("write-edit")

    async with caller.stream("do it") as following:
        updates = await following.rest()

    told = [update.artifact["artifact"] for update in updates if update.artifact]
    assert [artifact["name"] for artifact in told][-2:] == ["diff", "text"]
    assert "".join(words(artifact["parts"]) for artifact in told) == "ok"
    assert "message" not in updates[-1].status["status"]


@pytest.mark.parametrize(
    ("turn", "calls"),
    [("permission-once", []), ("question-answered", []), ("doom-loop", ["bash"] * 3)],
)
async def test_a_waiting_task_ends_with_its_question(
    caller: Caller, opencode: FakeOpenCode, turn: str, calls: list[str]
) -> None:
    opencode.play(turn)

    sent = await caller.send("do it")
    got = await caller.get(sent.id)

    for task in (sent, got):
        said, first, last, everything = read(task)
        assert task.state == "input_required"
        assert "OpenCode asks" in said
        assert names(task) == ([*calls, "notice"] if calls else [])  # no call that has not started
        repeated = said if calls else ""
        assert (first, last, everything) == ("", repeated, repeated)


async def test_the_question_is_gone_once_it_is_answered(
    caller: Caller, opencode: FakeOpenCode
) -> None:
    opencode.play("permission-once")
    asked = await caller.send("do it")

    async with caller.subscribe(asked.id) as following:
        waiting = await following.until_state("input_required")
        done = await caller.send("once", task=asked.id)

    assert waiting.task is not None
    assert names(waiting.task) == []
    assert names(done) == ["bash", "text"]
    assert read(done) == ("after", "", "after", "after")


@pytest.mark.parametrize(
    ("turn", "artifacts", "partly"),
    [("error-400", [], ""), ("error-malformed-chunk", ["text", "notice"], "partial ")],
)
async def test_a_failed_task_ends_with_the_reason(
    caller: Caller, opencode: FakeOpenCode, turn: str, artifacts: list[str], partly: str
) -> None:
    opencode.play(turn)

    sent = await caller.send("do it")
    got = await caller.get(sent.id)

    for task in (sent, got):
        said, first, last, everything = read(task)
        assert task.state == "failed"
        assert said
        assert names(task) == artifacts
        repeated = said if artifacts else ""
        assert (first, last, everything) == (partly, repeated, partly + repeated)


async def test_who_accepts_plain_text_alone_gets_no_reasoning(
    caller: Caller, opencode: FakeOpenCode
) -> None:
    opencode.play("reasoning-text")
    plain = {"configuration": {"acceptedOutputModes": ["text/plain"]}}
    both = {"configuration": {"acceptedOutputModes": ["text/plain", "application/json"]}}

    task = Task((await caller.ask("send", caller.message("do it") | plain)).task)
    other = Task((await caller.ask("send", caller.message("do it") | both)).task)
    async with caller.subscribe(task.id, "1") as following:
        updates = await following.rest()

    assert read(task) == ("", *("the answer",) * 3)
    assert names(other) == ["reasoning", "text"]
    told = {update.artifact["artifact"]["name"] for update in updates if update.artifact}
    assert told == {"text"}
