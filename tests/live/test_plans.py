"""A message that is planned first: nothing is changed on disk before "go", with a real OpenCode."""

import sys
from collections.abc import AsyncGenerator, Generator
from pathlib import Path
from typing import Any

import orjson
import pytest

from opencode_a2a.events import JsonObject
from opencode_a2a.ids import SessionId
from tests.conftest import Stages
from tests.live.conftest import ECHO
from tests.support.answers import Task
from tests.support.backstage import Backstage, on_disk, past_service, script
from tests.support.caller import Caller
from tests.support.program import Program
from tests.support.service import Running, serving, settings_for, variables_for

pytestmark = pytest.mark.live

PLAN: JsonObject = {"opencode": {"plan": True}}
TOKENS = {"wide": "wide-" + "x" * 28, "narrow": "narrow-" + "x" * 28}
CREDENTIALS: list[JsonObject] = [
    {
        "scheme": "bearer",
        "principal": "ann",  # one person, two credentials
        "token": token,
        "credential_id": name,
        **({"profile": "read-only"} if name == "narrow" else {}),
    }
    for name, token in TOKENS.items()
]


@pytest.fixture(scope="module")
def free(stages: Stages) -> Generator[Backstage]:
    """An OpenCode that does everything unasked, and asks before it runs ``date``."""
    config: JsonObject = {
        "permission": {"bash": {"*": "allow", "date *": "ask"}, "plan_exit": "allow"},
        "mcp": {"echo": {"type": "local", "command": [sys.executable, ECHO]}},
    }
    with stages("planned", config) as running:
        yield running


@pytest.fixture
async def service(free: Backstage, tmp_path: Path) -> AsyncGenerator[Running]:
    settings = settings_for(
        free,
        tmp_path,
        A2A_STATIC_AUTH_CREDENTIALS=orjson.dumps(CREDENTIALS).decode(),
        # A rule that says yes to everything by itself.
        A2A_PERMISSION_RULES=orjson.dumps([{"permission": "*", "action": "allow"}]).decode(),
    )
    async with serving(settings) as running:
        yield running


def bash(command: str) -> list[Any]:
    return [{"tool": "bash", "input": {"command": command, "description": "d"}}]


def write(workspace: Path, name: str) -> list[Any]:
    return [{"tool": "write", "input": {"filePath": str(workspace / name), "content": "x"}}]


def plan_of(task: Task) -> Any:
    (plan,) = [artifact for artifact in task.artifacts if artifact["name"] == "plan"]
    return plan["parts"]


async def agents(free: Backstage, task: Task) -> list[str | None]:
    """Return the agent of each prompt in the session of a task."""
    async with past_service(free.url, free.password) as opencode:
        messages = (await opencode.messages(SessionId(task.session_id))).items
    return [message.info.agent for message in messages if message.info.role == "user"]


@pytest.mark.requirement("I23")
async def test_a_plan_changes_nothing_and_go_carries_it_out(
    free: Backstage, service: Running
) -> None:
    caller, workspace = Caller(service, token=TOKENS["wide"]), free.workspace
    before = on_disk(workspace)
    edit = {"filePath": str(workspace / "hello.txt"), "oldString": "hello", "newString": "bye"}
    inner = script(bash("touch by-child"), [{"say": "done"}])
    child = {"description": "d", "prompt": inner, "subagent_type": "general"}

    planned = await caller.send(
        script(
            bash("touch by-bash"),
            bash("date > by-date"),
            write(workspace, "by-write"),
            write(workspace, ".opencode/plans/by-write.md"),
            [{"tool": "read", "input": {"filePath": str(workspace / "hello.txt")}}],
            [{"tool": "edit", "input": edit}],
            [{"tool": "task", "input": child}],
            [{"tool": "echo_say", "input": {"word": "hi"}}],
            [{"tool": "plan_exit", "input": {}}],
            [{"say": "1. Make a file."}],
        ),
        metadata=PLAN,
    )
    unchanged = on_disk(workspace)
    revised = await caller.send(
        script(bash("touch by-revision"), [{"say": "1. Make another file."}]), task=planned.id
    )
    still_unchanged = on_disk(workspace)
    done = await caller.send(
        # Just after the first plan was answered, the second one has to be named.
        f"{revised.interrupt['number']} go: " + script(write(workspace, "made"), [{"say": "made"}]),
        task=planned.id,
    )

    assert unchanged == still_unchanged == before
    assert [planned.state, revised.state, done.state] == [
        "input_required",
        "input_required",
        "completed",
    ]
    assert plan_of(planned)[0]["text"] == "1. Make a file."
    assert plan_of(revised)[0]["text"] == plan_of(done)[0]["text"] == "1. Make another file."
    assert plan_of(planned)[0]["mediaType"] == "text/markdown"
    assert planned.said.startswith("1. Make a file.\n\n")
    assert 'Answer "go" (or "yes") to have it carried out' in planned.said
    assert planned.interrupt["type"] == "plan"
    assert revised.interrupt["number"] == planned.interrupt["number"] + 1
    assert (done.text, done.said) == ("made", "made")
    assert set(on_disk(workspace)) == {*before, "made"}
    assert await agents(free, done) == ["plan", "plan", "build"]
    assert {planned.session_id, revised.session_id} == {done.session_id}


@pytest.mark.requirement("I23")
async def test_a_grant_does_not_allow_what_is_only_planned(free: Backstage, tmp_path: Path) -> None:
    async with serving(settings_for(free, tmp_path)) as service:
        caller = Caller(service)
        asked = await caller.send(script(bash("date -u"), [{"say": "told"}]))
        allowed = await caller.send("yes for this conversation", task=asked.id)

        planned = await caller.send(
            script(bash("date > by-grant"), [{"say": "a plan"}]),
            context=asked.context_id,
            metadata=PLAN,
        )

    assert (asked.state, allowed.state, planned.state) == (
        "input_required",
        "completed",
        "input_required",
    )
    assert not (free.workspace / "by-grant").exists()


async def test_go_works_after_a_kill_and_sent_again_it_is_the_same(
    free: Backstage, tmp_path: Path
) -> None:
    go = "go: " + script(bash("echo ran >> by-go"), [{"say": "made"}])
    async with Program(variables_for(free, tmp_path)) as program:
        caller = Caller(program)
        planned = await caller.send(script([{"say": "a plan"}]), metadata=PLAN)
        await program.kill()
        await program.start()
        waiting = await caller.get(planned.id)
        done = await caller.send(go, task=planned.id, message_id="go-1")
        again = await caller.send(go, task=planned.id, message_id="go-1")

    assert (waiting.state, waiting.said) == (planned.state, planned.said)
    assert (done.state, again.raw) == ("completed", done.raw)
    assert (free.workspace / "by-go").read_text() == "ran\n"
    assert await agents(free, done) == ["plan", "build"]


async def test_a_credential_that_may_only_read_can_plan_but_not_go(
    free: Backstage, service: Running
) -> None:
    narrow, wide = (Caller(service, token=TOKENS[name]) for name in ("narrow", "wide"))
    planned = await narrow.send(script([{"say": "a plan"}]), metadata=PLAN)

    refused = await narrow.ask("send", narrow.message("go", taskId=planned.id))
    waiting = await narrow.get(planned.id)
    done = await wide.send("go: " + script(bash("touch by-wide"), [{"say": "ok"}]), task=planned.id)

    assert b"AUTHORIZATION_FORBIDDEN" in refused.content
    assert waiting.state == "input_required"
    assert (done.state, (free.workspace / "by-wide").exists()) == ("completed", True)
