"""Streams of a sent message: what they begin with, carry, and end with."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

import orjson
import pytest

from tests.support.answers import Update, Wire, fold
from tests.support.caller import Caller
from tests.support.opencode import FakeOpenCode
from tests.support.opencode_state import OLDER
from tests.support.service import Running

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.both_databases]

TURNS = [
    *("plain-text", "reasoning-text", "tool-completed", "write-edit", "subagent", "todo"),
    *("error-400", "error-401", "error-500", "tool-error-bash-exit", "structured-output"),
    *("permission-once", "question-answered", "compaction-auto"),
]


async def heard(caller: Caller) -> list[Update]:
    async with caller.stream("hello") as following:
        return await following.rest()


def told(update: Update) -> Any:
    return update.status or update.artifact or update.raw["task"]


@pytest.mark.requirement("3.1.2-task-first")
@pytest.mark.requirement("3.1.2-closes")
@pytest.mark.requirement("proto-ids-in-updates")
@pytest.mark.requirement("proto-append")
@pytest.mark.requirement("5-objects-of-the-line")
@pytest.mark.requirement("I4")
@pytest.mark.parametrize("name", TURNS)
async def test_every_stream_is_a_task_and_updates_that_amount_to_it(
    caller: Caller, opencode: FakeOpenCode, name: str
) -> None:
    opencode.play(name)

    updates = await heard(caller)

    first, *rest = updates
    assert first.task is not None
    assert first.task.state in ("submitted", "working")
    names = {(told(u)["taskId"], told(u)["contextId"]) for u in rest}
    assert names == {(first.task.id, first.task.context_id)}
    stops = [u.state not in ("submitted", "working", None) for u in updates]
    assert stops == [False] * len(rest) + [True]
    assert_artifacts_are_opened_and_closed(updates)
    folded, task = fold(updates), await caller.get(first.task.id)
    assert folded.state == task.state
    assert (folded.text, folded.reasoning) == (task.text, task.reasoning)
    # A task with several artifacts says some things twice; a stream does not.
    answered = folded.text if len(task.artifacts) > 1 else ""
    assert task.said == (answered if task.state == "completed" else folded.said)
    once = [a["artifactId"] for a in task.artifacts if a["name"] != "notice"]
    assert sorted(a["artifactId"] for a in folded.artifacts) == sorted(once)
    assert len(folded.tools) == len(task.tools)


def assert_artifacts_are_opened_and_closed(updates: list[Update]) -> None:
    last: dict[str, Any] = {}
    for chunk in (update.artifact for update in updates if update.artifact):
        name = chunk["artifact"]["artifactId"]
        assert not chunk["append"] or name in last
        last[name] = chunk
    if updates[-1].state == "completed":
        assert all(chunk["lastChunk"] for chunk in last.values())


@pytest.mark.requirement("3.5.2-order")
async def test_the_text_of_a_stream_is_the_answer_in_order(caller: Caller) -> None:
    updates = await heard(caller)

    parts = [u.artifact["artifact"]["parts"][0]["text"] for u in updates if u.artifact]
    assert "".join(parts) == "one two three four"
    sequence = [int(update.id) for update in updates]
    assert sequence == sorted(set(sequence))


@pytest.mark.parametrize("version", OLDER)
async def test_an_older_opencode_is_heard_word_by_word(
    caller: Caller, opencode: FakeOpenCode, version: str
) -> None:
    opencode.play(f"{version}/plain-text")
    grows = "message.part.updated" if version == "1.1.65" else "message.part.delta"
    hold = opencode.hold(grows, count=4)

    async with caller.stream("hello") as following:
        await following.until_text("one two " if version == "1.1.65" else "one two three four")
        early = hold.reached.is_set()
        opencode.release()
        await following.rest()

    assert early
    assert (following.task.state, following.task.text) == ("completed", "one two three four")


@pytest.mark.requirement("11.7-framing")
async def test_frames_are_whole_events_with_an_id(caller: Caller) -> None:
    answer = await caller.ask("stream", caller.message("hello"))

    assert answer.headers["content-type"] == "text/event-stream"
    ping, frames = answer.content[:7], answer.content[7:].removesuffix(b"\n\n").split(b"\n\n")
    assert ping == b": ping\n"
    for frame in frames:
        first, second = frame.split(b"\n")
        assert first.startswith(b"id: ")
        body = orjson.loads(second.removeprefix(b"data: "))
        if caller.wire.rpc:
            assert (body["jsonrpc"], body["id"], set(body)) == (
                "2.0",
                1,
                {"jsonrpc", "id", "result"},
            )
        else:
            assert len(body) == 1
            assert set(body) <= {"task", "statusUpdate", "artifactUpdate"}


@pytest.mark.requirement("3.1.2-no-event-after-the-end")
@pytest.mark.requirement("0.3-final")
@pytest.mark.parametrize("name", ["plain-text", "permission-once", "error-401", "error-400"])
async def test_final_is_said_on_the_older_line_and_only_at_the_stop(
    caller: Caller, opencode: FakeOpenCode, name: str
) -> None:
    opencode.play(name)

    updates = await heard(caller)

    finals = [update.status.get("final") for update in updates if update.status]
    if caller.wire.modern:
        assert set(finals) == {None}
    else:
        assert finals == [False] * (len(finals) - 1) + [True]


@pytest.mark.requirement("3.5.2-all-streams-equal")
@pytest.mark.requirement("3.5.2-independent")
async def test_readers_see_the_same_and_none_disturbs_the_task(
    caller: Caller, opencode: FakeOpenCode
) -> None:
    opencode.hold()
    async with caller.stream("hello") as first:
        begun = await first.until(lambda update: update.task is not None)
        assert begun.task is not None
        await first.until_text("one ")
        async with (
            caller.subscribe(begun.task.id) as second,
            caller.subscribe(begun.task.id) as third,
        ):
            joined = [await one.until(lambda u: u.task is not None) for one in (second, third)]
            async with caller.subscribe(begun.task.id) as leaver:
                await leaver.until(lambda update: update.task is not None)
            opencode.release()
            told = [await one.rest() for one in (first, second, third)]

    assert [fold(updates).text for updates in told] == ["one two three four"] * 3
    since = [u.id for u in told[0]].index(joined[0].id)
    events = [u.id for u in told[0]][since + 1 :]
    assert [u.id for u in told[1]][1:] == events
    assert [u.raw for u in told[1]][1:] == [u.raw for u in told[2]][1:]
    assert (await caller.get(begun.task.id)).state == "completed"


@pytest.mark.requirement("3.5.2-independent")
@pytest.mark.requirement("I1")
async def test_a_task_goes_on_when_its_only_reader_leaves(
    caller: Caller, opencode: FakeOpenCode
) -> None:
    hold = opencode.hold(count=2)
    async with caller.stream("hello") as following:
        first = await following.until(lambda update: update.task is not None)
        async with asyncio.timeout(60):
            await hold.reached.wait()
    opencode.release()

    assert first.task is not None
    ended = await caller.ended(first.task.id)
    assert (ended.state, ended.text) == ("completed", "one two three four")


async def test_a_repeated_message_streams_the_task_it_belongs_to(caller: Caller) -> None:
    name = f"streamed {caller.wire.value}"
    first = await caller.send("hello", message_id=name)

    async with caller.stream("hello", message_id=name) as following:
        updates = await following.rest()

    assert [update.task.id for update in updates if update.task] == [first.id]
    assert len(updates) == 1


@pytest.mark.requirement("ours-usage")
@pytest.mark.requirement("ours-integers")
async def test_usage_and_numbers_are_integers_on_the_last_status(caller: Caller) -> None:
    last = (await heard(caller))[-1]

    usage = last.shared["usage"]
    numbers = [usage[name] for name in ("input_tokens", "output_tokens", "total_tokens")]
    assert all(type(number) is int and number > 0 for number in numbers)
    assert last.shared["session"]["id"].startswith("ses_")
    assert "sequence" not in last.shared["stream"]


@asynccontextmanager
async def unread(url: str, caller: Caller, body: bytes) -> AsyncGenerator[None]:
    """A reader that asks for a stream and then reads nothing."""
    host, port = url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port), limit=1024)
    head = [f"POST {caller.target('stream', {})[1]} HTTP/1.1", f"Host: {host}"]
    head += [f"{name}: {value}" for name, value in caller.headers.items()]
    writer.write("\r\n".join([*head, f"Content-Length: {len(body)}", "", ""]).encode() + body)
    await writer.drain()
    await reader.readuntil(b"data: ")
    try:
        yield
    finally:
        writer.transport.abort()


@pytest.mark.parametrize("wire", [Wire.RPC, Wire.REST03], ids=lambda wire: wire.value)
@pytest.mark.requirement("3.5.2-independent")
async def test_a_reader_that_does_not_read_slows_nobody(
    service: Running, caller: Caller, opencode: FakeOpenCode
) -> None:
    name = f"unread {caller.wire.value}"
    opencode.hold()
    body = caller.encode("stream", caller.message("hello", messageId=name, contextId=name))
    async with unread(service.url, caller, body):
        opencode.release()
        async with caller.stream("hello", message_id=name, context=name) as following:
            await following.rest()

    assert following.task.text == "one two three four"


async def test_todos_that_were_written_during_a_gap_are_told(
    service: Running, opencode: FakeOpenCode
) -> None:
    opencode.play("todo")
    hold = opencode.hold("todo.updated")

    async with Caller(service).stream("hello") as following:
        async with asyncio.timeout(60):
            await hold.reached.wait()
        opencode.cut()
        opencode.release()
        updates = await following.rest()

    told = [u.progress["todos"] for u in updates if u.progress and u.progress["type"] == "todo"]
    assert [[todo["status"] for todo in todos] for todos in told][-1:] == [
        ["completed", "in_progress"]
    ]


@pytest.mark.parametrize(
    ("name", "recorded", "field"),
    [
        ("tool-error-read-missing", b"File not found: /workspace/nope.txt", "error"),
        ("tool-completed", b"out1\\nout2\\n", "output"),
    ],
)
async def test_a_tool_that_says_too_much_is_cut_short_with_a_mark(
    service: Running, opencode: FakeOpenCode, name: str, recorded: bytes, field: str
) -> None:
    opencode.play(name)
    opencode.said = {recorded: b"x" * 1_000_000}

    task = await Caller(service).send("hello")

    (tool,) = task.tools
    head, _, mark = tool[field].partition("\n")
    assert set(head) == {"x"}
    assert len(head) == 256 * 1024
    assert mark.startswith("[cut short by opencode-a2a: ")
