"""Several replicas on one database: who runs an OpenCode, and what becomes of its tasks."""

import asyncio
from collections.abc import AsyncGenerator
from pathlib import Path

import pytest
import pytest_asyncio

from tests.support.caller import Caller
from tests.support.opencode import FakeOpenCode
from tests.support.replicas import cluster

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.postgresql_only]

TEXT = "one two three four"


@pytest_asyncio.fixture(loop_scope="module")
async def fake(tmp_path: Path) -> AsyncGenerator[FakeOpenCode]:
    workspace = tmp_path / "workspace"
    workspace.mkdir()
    async with FakeOpenCode(workspace).running() as opencode:
        opencode.play("plain-text")
        yield opencode
        opencode.release()


async def test_a_task_goes_on_elsewhere_when_its_replica_is_gone(
    fake: FakeOpenCode, tmp_path: Path
) -> None:
    async with cluster([fake], tmp_path, "a", "b") as replicas:
        a = await replicas.runs("one")
        hold = fake.hold(count=2)
        begun = await Caller(a).begin("hello")
        async with asyncio.timeout(10):
            await hold.reached.wait()

        await a.kill()
        b = await replicas.runs("one", but=a)
        fake.release()
        ended = await Caller(b).ended(begun.id)

    assert (a.name, b.name) == ("a", "b")
    assert (ended.state, ended.text) == ("completed", TEXT)
    assert len(fake.prompts) == 1
