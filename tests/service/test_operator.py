"""What whoever runs the service meets: its log, and a start that fails.

The program runs as a process of its own, in front of an OpenCode that replays recordings.
"""

from pathlib import Path
from typing import Any

import orjson
import pytest

from opencode_a2a.events import JsonObject
from tests.support.opencode import FakeOpenCode
from tests.support.program import Program
from tests.support.service import message, variables_for

pytestmark = pytest.mark.asyncio(loop_scope="module")


async def test_payloads_are_logged_at_the_default_level(
    opencode: FakeOpenCode, tmp_path: Path
) -> None:
    variables = variables_for(opencode, tmp_path, A2A_LOG_PAYLOADS="true")
    async with Program(variables) as program:
        answer = await program.rpc("SendMessage", message("hello"))
        await program.stop()

    [record] = [record for record in program.records() if record["event"] == "payload"]
    assert record["method"] == "SendMessage"
    assert orjson.loads(record["request"])["params"]["message"]["parts"] == [{"text": "hello"}]
    assert orjson.loads(record["response"])["result"] == answer["result"]
    assert not [record for record in program.records() if record["event"] == "request"]


async def test_the_access_log_names_the_operation(opencode: FakeOpenCode, tmp_path: Path) -> None:
    async with Program(variables_for(opencode, tmp_path, A2A_LOG_LEVEL="INFO")) as program:
        sent = await program.rpc("SendMessage", message("hello"))
        task_id = sent["result"]["task"]["id"]
        await program.rpc("opencode.agents.list", {})
        await program.rpc("\x1b[31mnobody", {})
        modern, old = {"A2A-Version": "1.0"}, {"A2A-Version": "0.3"}
        await program.http.post("/", json=old_get(task_id), headers=old)
        await program.http.get(f"/tasks/{task_id}", headers=modern)
        await program.http.get("/extendedAgentCard", headers=modern)
        await program.http.get("/nothing", headers=modern)
        await program.stop()

    seen: list[Any] = [r["operation"] for r in program.records() if r["event"] == "request"]
    assert seen == [
        "SendMessage", "opencode.agents.list", None, "GetTask", "GetTask", "GetExtendedAgentCard",
        None,
    ]  # fmt: skip


def old_get(task_id: str) -> JsonObject:
    return {"jsonrpc": "2.0", "id": 1, "method": "tasks/get", "params": {"id": task_id}}
