"""Finding tasks among all that are kept: by their titles, by short ids, and those that wait."""

from pathlib import Path

import pytest

from tests.support.answers import Wire
from tests.support.caller import Caller
from tests.support.copies import add_copies
from tests.support.front import started
from tests.support.opencode import FakeOpenCode
from tests.support.program import run
from tests.support.service import TOKEN, Running
from tests.support.terminal import Terminal

pytestmark = pytest.mark.asyncio(loop_scope="module")


async def found(caller: Caller, text: str, **more: int) -> list[str]:
    result = await caller.method("opencode.tasks.search", {"text": text, **more})
    return [task["id"] for task in result["items"]]


@pytest.mark.both_databases
async def test_tasks_are_found_by_words_of_their_titles_and_beginnings_of_their_ids(
    service: Running, opencode: FakeOpenCode, stranger: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("opencode_a2a.tasks.service._SEARCHED_AT_ONCE", 2)
    caller = Caller(service, Wire.RPC, stranger)
    titles = ("Mend the FLAKY test", 'say "hi" to ÄRGER', "100% \\ done_", "mend it", "last")
    tasks = [(await caller.send(title)).id for title in titles]
    other = Caller(service, Wire.RPC)
    theirs = await other.send("mend the flaky test of another")

    assert await found(caller, "flaky") == [tasks[0]]
    assert await found(caller, "  test   mend ") == [tasks[0]]
    assert await found(caller, "MEND") == [tasks[3], tasks[0]]
    assert await found(caller, "mend", limit=1) == [tasks[3]]
    assert await found(caller, '"HI" ärger') == [tasks[1]]
    assert await found(caller, "100% \\") == [tasks[2]]
    assert await found(caller, "done_") == [tasks[2]]
    assert await found(caller, "%") == [tasks[2]]
    # What is stored beside the title is not searched.
    assert await found(caller, "subject") == []
    assert await found(caller, tasks[4][:12]) == [tasks[4]]
    assert await found(caller, theirs.id) == []
    assert theirs.id in await found(other, "flaky")


async def test_a_search_for_nothing_is_refused(service: Running) -> None:
    caller = Caller(service, Wire.RPC)

    for wrong in ({}, {"text": " "}, {"text": "x" * 201}, {"text": "x", "limit": 101}):
        refusal = await caller.refused("opencode.tasks.search", wrong)
        assert refusal.code == -32602


async def test_what_waits_stands_first_at_the_terminal_whatever_came_after_it(
    opencode: FakeOpenCode, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("A2A_CLIENT_BEARER_TOKEN", TOKEN)
    async with started(opencode, tmp_path, A2A_TASK_STORE_BACKEND="database") as service:
        caller = Caller(service, Wire.RPC)
        done = await caller.send("an old one")
        opencode.play("permission-once")
        waiting = await caller.send("may I?")
        add_copies(tmp_path, done.id, [f"newer {number}" for number in range(500)])
        secret = {"A2A_CLIENT_BEARER_TOKEN": TOKEN}

        _, listed = await run("tasks", service.url, **secret)
        _, waits = await run("tasks", service.url, "--state", "waiting", **secret)
        status, shown = await run("task", service.url, done.id[:8], **secret)
        async with Terminal("tasks", service.url, "--watch") as watching:
            await watching.sees("newer 499")
            watched = watching.seen
            await watching.interrupt()
            await watching.ended()

    rows = [line.split() for line in listed.splitlines()]
    assert (rows[0][0], len(rows)) == (waiting.id, 20)
    assert [row[-1] for row in rows[1:3]] == ["499", "498"]
    assert [line.split()[0] for line in waits.splitlines()] == [waiting.id]
    assert 0 < watched.index("may I?") < watched.index("newer 499")
    assert status == 0, shown
    assert shown.startswith(done.id)
