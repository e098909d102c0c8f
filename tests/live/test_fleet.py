"""Two real OpenCodes behind one service, and a kill in the middle."""

import asyncio
import uuid
from pathlib import Path

import orjson
import pytest

from opencode_a2a_demo.server import DemoModel, opencode_config
from tests.support.backstage import script
from tests.support.caller import Caller
from tests.support.program import Program

pytestmark = [pytest.mark.live, pytest.mark.linux_only]


async def both_up(program: Program) -> None:
    async with asyncio.timeout(60):
        while True:
            health = (await program.http.get("/health")).json()
            if [one["state"] for one in health["upstreams"]] == ["up", "up"]:
                return
            await asyncio.sleep(0.1)


async def test_the_turns_of_two_managed_ones_go_on_after_a_kill(
    variables: dict[str, str], tmp_path: Path
) -> None:
    home = tmp_path / "data" / "opencode"
    home.mkdir(parents=True)
    (home / "auth.json").write_text("{}")
    async with DemoModel() as model:
        changes = {
            "OPENCODE_UPSTREAMS": '[{"name": "oc", "managed": 2}]',
            "OPENCODE_CONFIG_CONTENT": orjson.dumps(opencode_config(model.url)).decode(),
        }
        async with Program(variables | changes) as program:
            caller, gates = Caller(program), [uuid.uuid4().hex for _ in range(2)]
            await both_up(program)
            tasks = [
                await caller.begin(script({"say": "half "}, {"gate": gate}, {"say": gate}))
                for gate in gates
            ]
            async with asyncio.timeout(60):
                for gate in gates:
                    await model.gate(gate).reached.wait()
            health = (await program.http.get("/health")).json()
            await program.restart()
            for gate in gates:
                model.gate(gate).opened.set()
            ended = [await caller.ended(task.id) for task in tasks]
            more = await caller.send(script({"say": "more"}), context=ended[1].context_id)

    assert [(one["name"], one["state"], one["running"]) for one in health["upstreams"]] == [
        ("oc-1", "up", 1),
        ("oc-2", "up", 1),
    ]
    assert [one.state for one in ended] == ["completed", "completed"]
    assert [one.text for one in ended] == [f"half {gate}" for gate in gates]
    assert ended[0].session_id != ended[1].session_id == more.session_id
    own = [*(tmp_path / "state").rglob("upstreams/*/data/opencode/auth.json")]
    assert [oct(file.stat().st_mode & 0o777) for file in own] == ["0o600", "0o600"]
