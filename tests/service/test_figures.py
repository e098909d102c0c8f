"""Odd figures of a model provider: the turn ends as OpenCode ended it, and nobody pays for them."""

from typing import Any

import orjson
import pytest

from tests.support.answers import Wire
from tests.support.caller import Caller
from tests.support.opencode import FakeOpenCode
from tests.support.service import Running

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.both_databases]

UNKNOWN = [
    "-7",
    str(2**63),
    str(2**64),
    "1e30",
    "1e400",
    "NaN",
    "null",
    '"12"',
    "[1]",
    "{}",
    "true",
]


async def method(caller: Caller, name: str, **params: Any) -> Any:
    body = {"jsonrpc": "2.0", "id": 1, "method": name, "params": params}
    answer = await caller.http.post("/", content=orjson.dumps(body), headers=caller.headers)
    return answer.json()


async def budget(caller: Caller) -> Any:
    return (await caller.http.get("/health", headers=caller.headers)).json()["budget"]


@pytest.mark.parametrize("figure", [*UNKNOWN, "1.5"])
async def test_a_turn_with_odd_figures_ends_as_opencode_ended_it(
    service: Running, opencode: FakeOpenCode, stranger: str, figure: str
) -> None:
    caller = Caller(service, Wire.RPC, token=stranger)
    opencode.figures = {"cost": figure, "input": figure, "read": figure, "output": "3"}
    opencode.figures |= {"reasoning": "0", "write": "0"}

    task = await caller.send("hello")
    again = await caller.send("hello", context=task.context_id)
    listed = await method(
        caller, "opencode.sessions.messages.list", session_id=task.shared["session"]["id"]
    )

    assert (task.state, again.state) == ("completed", "completed")
    known = figure == "1.5"
    used = task.shared["usage"]
    assert used["cost"] == (1.5 if known else 0)
    assert used["input_tokens"] == (2 if known else 0)
    assert used["output_tokens"] == 3
    assert len(listed["result"]["items"]) == 4
    spent = await budget(caller)
    assert spent["cost"] == (3.0 if known else 0)
    assert spent["tokens"] == (14 if known else 6)
    assert (await service.http.get("/readyz")).status_code == 200
