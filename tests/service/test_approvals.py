"""What a person is shown of a request, whatever the agent and its provider send."""

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from opencode_a2a.jsonguard import TOO_DEEP
from tests.support.asking import AskingOpenCode, Request
from tests.support.caller import Caller
from tests.support.front import started


@asynccontextmanager
async def asked_for(asked: Request, directory: Path) -> AsyncGenerator[Caller]:
    """A caller of a service whose OpenCode asks for something at every prompt."""
    (directory / "workspace").mkdir()
    opencode = AskingOpenCode(directory / "workspace", {"do it": asked})
    async with opencode.running(), started(opencode, directory / "state") as running:
        yield Caller(running)


async def test_a_call_whose_id_was_used_before_is_shown_with_its_own_input(tmp_path: Path) -> None:
    asked = Request(
        "shop_pay",
        tool="shop_pay",
        input={"to": "somebody else", "amount": 1000},
        earlier={"to": "the shop", "amount": 1},
    )
    async with asked_for(asked, tmp_path) as caller:
        waiting = await caller.send("do it")

    assert waiting.interrupt["details"]["tool"]["input"] == asked.input
    assert "to: somebody else" in waiting.said
    assert "the shop" not in waiting.said


@pytest.mark.requirement("I25")
async def test_words_that_lie_too_deep_leave_the_task_readable_and_are_told(tmp_path: Path) -> None:
    listed: Any = "evil"
    held: Any = "evil"
    for _ in range(100):
        listed, held = [listed], {"in": held}
    asked = Request(
        "shop_pay", ("*",), {"of": listed}, tool="shop_pay", input={"to": "me", "x": held}
    )
    async with asked_for(asked, tmp_path) as caller:  # which reads as the SDK does
        waiting = await caller.send("do it")
        ended = await caller.send("yes", task=waiting.id)

    assert waiting.said.count(TOO_DEEP) == 2
    assert "to: me" in waiting.said
    assert ended.state == "completed"
