"""OpenCode's agents and commands as skills of the extended card, and chosen for a message."""

from collections.abc import AsyncGenerator
from typing import Any

import orjson
import pytest

from opencode_a2a.events import JsonObject
from opencode_a2a.server import card as cards
from tests.support.answers import PARAMS, Wire
from tests.support.caller import Caller
from tests.support.front import Serve
from tests.support.opencode import FakeOpenCode
from tests.support.service import Running

pytestmark = pytest.mark.asyncio(loop_scope="module")

BUILD: JsonObject = {"name": "build", "mode": "primary", "description": "The default agent."}
PLAN: JsonObject = {"name": "plan", "mode": "primary", "description": "Disallows all edits."}
GENERAL: JsonObject = {"name": "general", "mode": "subagent"}
HIDDEN: JsonObject = {"name": "title", "mode": "primary", "hidden": True}


@pytest.fixture
async def agents(opencode: FakeOpenCode) -> AsyncGenerator[list[Any]]:
    opencode.agents[:] = [BUILD, PLAN, GENERAL, HIDDEN]
    yield opencode.agents
    opencode.agents.clear()


async def skills(service: Running, wire: Wire) -> list[str]:
    """Return the agents and commands among the skills of the extended card."""
    caller = Caller(service, wire)
    if wire.rpc:
        method = "GetExtendedAgentCard" if wire.modern else "agent/getAuthenticatedExtendedCard"
        body = orjson.dumps({"jsonrpc": "2.0", "id": 1, "method": method})
        card = (await caller.post(body, "/")).body["result"]
    else:
        path = "/extendedAgentCard" if wire.modern else "/v1/card"
        card = orjson.loads((await service.http.get(path, headers=caller.headers)).content)
    offered = ("opencode.agent.", "opencode.command.")
    return [skill["id"] for skill in card["skills"] if skill["id"].startswith(offered)]


@pytest.mark.requirement("I17")
async def test_the_agents_that_can_be_chosen_are_skills_of_the_extended_card(
    serve: Serve, agents: list[Any]
) -> None:
    service = await serve()

    public = await service.http.get("/.well-known/agent-card.json")

    for wire in Wire:
        assert await skills(service, wire) == ["opencode.agent.build", "opencode.agent.plan"]
    assert b"opencode.agent." not in public.content


async def test_the_card_follows_opencode_and_is_right_while_it_is_away(
    serve: Serve, agents: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cards, "SKILLS_SECONDS", 0.0)
    service = await serve()
    before = await skills(service, Wire.REST)

    agents[:] = [PLAN]
    changed = await skills(service, Wire.REST)
    agents[:] = [object()]  # it cannot answer
    away = await skills(service, Wire.REST)

    assert before == ["opencode.agent.build", "opencode.agent.plan"]
    assert (changed, away) == (["opencode.agent.plan"], ["opencode.agent.plan"])


@pytest.mark.parametrize("named", ["plan", "opencode.agent.plan"])
async def test_a_message_chooses_its_agent(
    caller: Caller, opencode: FakeOpenCode, agents: list[Any], named: str
) -> None:
    sent = caller.message("hello", metadata={"opencode": {"agent": named}})

    await caller.ask("send", sent)
    await caller.ask("send", caller.message("hello"))

    assert [prompt.get("agent") for prompt in opencode.prompts[-2:]] == ["plan", None]


async def test_the_settings_give_every_prompt_an_agent_a_text_and_a_variant(
    serve: Serve, opencode: FakeOpenCode
) -> None:
    given = {"OPENCODE_AGENT": "plan", "OPENCODE_SYSTEM": "Be brief.", "OPENCODE_VARIANT": "high"}

    await Caller(await serve(**given)).send("hello")

    prompt = opencode.prompts[-1]
    assert (prompt["agent"], prompt["system"], prompt["variant"]) == tuple(given.values())


@pytest.mark.parametrize("named", ["general", "title", "nobody"])
async def test_an_agent_that_cannot_be_chosen_is_refused_with_those_that_can(
    caller: Caller, opencode: FakeOpenCode, agents: list[Any], named: str
) -> None:
    prompts = len(opencode.prompts)

    answer = await caller.ask(
        "send", caller.message("hello", metadata={"opencode": {"agent": named}})
    )

    answer.refuses(PARAMS)
    assert b"metadata.opencode.agent" in answer.content
    assert b"build, plan" in answer.content
    assert len(opencode.prompts) == prompts


@pytest.fixture
async def commands(opencode: FakeOpenCode) -> AsyncGenerator[list[Any]]:
    opencode.commands[:] = [
        {"name": "review", "description": "Reviews changes", "template": "Review $ARGUMENTS"},
        {"name": "show", "template": "Show !`cat $1`"},
    ]
    yield opencode.commands
    opencode.commands.clear()


@pytest.mark.requirement("I17")
async def test_the_commands_are_skills_of_the_extended_card_too(
    serve: Serve, agents: list[Any], commands: list[Any]
) -> None:
    service = await serve()

    listed = await skills(service, Wire.REST)

    assert listed[-2:] == ["opencode.command.review", "opencode.command.show"]
    assert len(listed) == 4


@pytest.mark.requirement("ours-request-metadata")
@pytest.mark.parametrize(
    ("wanted", "text", "field", "says"),
    [
        ({"command": "nothing"}, "x", "metadata.opencode.command", "review, show"),
        ({"command": "show"}, "x; rm -r .", "message.parts", "shell command"),
        ({"command": "review", "plan": True}, "x", "metadata.opencode.command", "plan"),
        ({"command": "review", "profile": "ask"}, "x", "", "without permission"),
    ],
    ids=["unknown", "unsafe", "planned", "narrow"],
)
@pytest.mark.parametrize("wire", [Wire.RPC])
async def test_a_command_that_cannot_be_run_is_refused(
    caller: Caller,
    opencode: FakeOpenCode,
    agents: list[Any],
    commands: list[Any],
    wanted: JsonObject,
    text: str,
    field: str,
    says: str,
) -> None:
    refused = await caller.ask("send", caller.message(text, metadata={"opencode": wanted}))

    assert "error" in refused.body
    assert field.encode() in refused.content
    assert says.encode() in refused.content
    assert not opencode.prompts
