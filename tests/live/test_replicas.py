"""Two replicas before two real OpenCodes, and a kill of one in the middle of everything."""

import asyncio
import uuid
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack
from pathlib import Path

import httpx2
import pytest

from opencode_a2a.events import JsonObject
from tests.conftest import UNTRACKED, make_repository
from tests.support import stores
from tests.support.answers import fold
from tests.support.backstage import script
from tests.support.caller import Caller
from tests.support.forked import ForkedProgram
from tests.support.pool import Pool, pool
from tests.support.program import Program
from tests.support.service import TOKEN

pytestmark = pytest.mark.live

RULES: JsonObject = {"*": "allow", "sh asked.sh*": "ask"}


@pytest.fixture
async def behind(opencode_command: str, tmp_path: Path) -> AsyncGenerator[Pool]:
    workspace = tmp_path / "workspace"
    workspace.mkdir()
    make_repository(workspace)
    (workspace / "run.sh").write_text("echo ran >> $1; until test -e go; do sleep 0.1; done\n")
    (workspace / "asked.sh").write_text("echo ran >> $1\n")
    config: JsonObject = {"permission": {"bash": RULES}, **UNTRACKED}
    async with pool(workspace, tmp_path, config, command=opencode_command) as running:
        yield running


@pytest.fixture
async def replicas(behind: Pool, tmp_path: Path) -> AsyncGenerator[tuple[Program, Program]]:
    """Two of them, each of which runs one of the OpenCodes."""
    database = stores.server().url(f"test_{uuid.uuid4().hex[:12]}")
    async with AsyncExitStack() as stack:
        started = [
            await stack.enter_async_context(
                ForkedProgram(
                    {
                        **behind.variables,
                        "A2A_BEARER_TOKEN": TOKEN,
                        "A2A_STATE_DIR": str(tmp_path / name),
                        "A2A_TASK_STORE_DATABASE_URL": database,
                        "A2A_REPLICA_NAME": name,
                        "A2A_REPLICA_LEASE_SECONDS": "4",
                    }
                )
            )
            for name in ("one", "two")
        ]
        yield started[0], started[1]


def tool(command: str) -> JsonObject:
    return {"tool": "bash", "input": {"command": command, "description": "Run it"}}


@pytest.mark.requirement("I19")
@pytest.mark.requirement("I20")
async def test_text_tool_and_permission_of_a_killed_replica_go_on(
    behind: Pool, replicas: tuple[Program, Program], tmp_path: Path
) -> None:
    one, two = replicas
    caller, other, gate = Caller(one), Caller(two), uuid.uuid4().hex
    workspace = tmp_path / "workspace"
    text = await caller.begin(script({"say": "half "}, {"gate": gate}, {"say": "whole"}))
    async with caller.stream(script(tool("sh run.sh ran.txt"), {"say": "ran it"})) as following:
        await following.until(lambda update: "'running'" in str(update.artifact))
        ran = following.task
    asks = await caller.send(script(tool("sh asked.sh asked.txt"), {"say": "was allowed"}))
    async with asyncio.timeout(60):
        await behind.model.gate(gate).reached.wait()

    async with other.subscribe(text.id) as following:
        await following.until_text("half ")
        seen = following.updates[-1].id
        await one.kill()
        behind.model.gate(gate).opened.set()
        (workspace / "go").touch()
        with pytest.raises(httpx2.TransportError):
            await caller.get(text.id)
        updates = await following.rest()
    ended = [await other.ended(task.id) for task in (text, ran)]
    allowed = await other.send("yes", task=asks.id)
    await one.start()
    again = [await caller.get(task.id) for task in (text, ran, asks)]
    async with caller.subscribe(text.id, after=seen) as following:
        replayed = await following.rest()

    assert asks.state == "input_required"
    assert fold(updates).text == "half whole"
    assert [(task.state, task.text) for task in [*ended, allowed]] == [
        ("completed", "half whole"),
        ("completed", "ran it"),
        ("completed", "was allowed"),
    ]
    assert [task.raw for task in again] == [
        (await other.get(task.id)).raw for task in (text, ran, asks)
    ]
    told = {update.id: update.raw for update in updates}
    assert replayed
    assert all(told.get(one.id, one.raw) == one.raw for one in replayed)
    for name in ("ran.txt", "asked.txt"):
        assert (workspace / name).read_text().split() == ["ran"]
