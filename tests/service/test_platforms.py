"""Platforms that host agents or route to them: a test for each row of docs/platforms.md.

The requests follow the platforms' own pages as they were in November 2026, which the page links
to; nothing here was run on a platform.
"""

from collections.abc import AsyncGenerator
from typing import Any
from uuid import uuid4

import orjson
import pytest
import pytest_asyncio
from a2a.compat.v0_3 import types as v03
from a2a.types import AgentCard
from google.protobuf.json_format import ParseDict

from opencode_a2a.config import CardForm, Settings
from opencode_a2a.server.card import Cards
from tests.support.front import Serve, started
from tests.support.opencode import FakeOpenCode
from tests.support.service import Running

pytestmark = pytest.mark.asyncio(loop_scope="module")

CARD, CARD_03 = "/.well-known/agent-card.json", "/.well-known/agent.json"
SESSION = "X-Amzn-Bedrock-AgentCore-Runtime-Session-Id"
V1 = {"A2A-Version": "1.0"}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def hosted(
    shared_opencode: FakeOpenCode, tmp_path_factory: pytest.TempPathFactory
) -> AsyncGenerator[Running]:
    """A service with everything that platforms need set at once."""
    async with started(
        shared_opencode, tmp_path_factory.mktemp("hosted"),
        A2A_PATH_ALIASES="rpc,rest", A2A_CONTEXT_HEADER=SESSION, A2A_CARD_FORM="1.0",
    ) as running:  # fmt: skip
        yield running


def rpc(method: str, message: dict[str, Any], **params: Any) -> dict[str, Any]:
    given = {"messageId": uuid4().hex, **message}
    return {"jsonrpc": "2.0", "id": 1, "method": method, "params": {"message": given, **params}}


def said(text: str) -> dict[str, Any]:
    return {"messageId": uuid4().hex, "role": "ROLE_USER", "parts": [{"text": text}]}


async def post(to: Running, path: str, body: object, **headers: str) -> Any:
    answer = await to.http.post(path, json=body, headers=headers)
    assert answer.status_code == 200, answer.text
    return answer.json()


async def test_bedrock_agentcore_keeps_a_session_that_works_or_waits(
    hosted: Running, opencode: FakeOpenCode
) -> None:
    """AWS, "Service contract: A2A" of AgentCore Runtime."""
    session = f"session-{uuid4().hex}"
    hello = {"role": "user", "parts": [{"kind": "text", "text": "hello"}]}

    async def ping() -> dict[str, Any]:
        answer = await hosted.http.get("/ping", headers={"Authorization": ""})
        assert answer.status_code == 200
        return answer.json()

    idle = await ping()
    first = await post(hosted, "/", rpc("message/send", hello), **{SESSION: session})
    opencode.play("permission-once")
    asked = await post(hosted, "/", rpc("message/send", hello), **{SESSION: session})
    busy, again = await ping(), await ping()
    reply = {"role": "user", "taskId": asked["result"]["id"], "parts": hello["parts"]}
    reply["parts"] = [{"kind": "text", "text": "once"}]
    done = await post(hosted, "/", rpc("message/send", reply), **{SESSION: f"other-{session}"})

    assert idle["status"] == "Healthy"
    assert isinstance(idle["time_of_last_update"], int)
    assert first["result"]["contextId"] == asked["result"]["contextId"] == session
    assert asked["result"]["status"]["state"] == "input-required"
    assert busy == again
    assert busy["status"] == "HealthyBusy"
    assert done["result"]["contextId"] == session
    assert (await ping())["status"] == "Healthy"


async def test_the_header_of_a_session_gives_way_to_what_a_message_says(
    hosted: Running, opencode: FakeOpenCode
) -> None:
    named = {**said("hello"), "contextId": f"named-{uuid4().hex}"}

    task = (await post(hosted, "/message:send", {"message": named}, **{SESSION: "other"}))["task"]
    refused = await hosted.http.post(
        "/message:send", json={"message": said("hello")}, headers={**V1, SESSION: "x" * 257}
    )

    assert task["contextId"] == named["contextId"]
    assert refused.status_code == 400
    assert SESSION in refused.text


async def test_wso2_calls_each_binding_at_a_root_of_its_own(
    hosted: Running, opencode: FakeOpenCode
) -> None:
    """WSO2 Agent Manager, "A2A agents": neither prefix is configurable."""
    card = ParseDict((await hosted.http.get(CARD)).json(), AgentCard())
    where = {i.protocol_binding: i.url for i in card.supported_interfaces}

    by_rpc = await post(hosted, "/rpc", rpc("SendMessage", said("hello")), **V1)
    by_rest = await post(hosted, "/rest/message:send", {"message": said("hello")}, **V1)
    read = await hosted.http.get(f"/rest/tasks/{by_rpc['result']['task']['id']}", headers=V1)

    assert where == {"JSONRPC": f"{hosted.url}/rpc", "HTTP+JSON": f"{hosted.url}/rest"}
    assert by_rpc["result"]["task"]["status"]["state"] == "TASK_STATE_COMPLETED"
    assert by_rest["task"]["status"]["state"] == "TASK_STATE_COMPLETED"
    assert read.json()["id"] == by_rpc["result"]["task"]["id"]


async def test_wso2_finds_the_paths_of_an_external_agent_below_its_card(
    serve: Serve, opencode: FakeOpenCode
) -> None:
    """WSO2, "Register an external A2A agent": the same paths as on the agent, under the gateway."""
    running = await serve(A2A_CARD_FORM="1.0", A2A_PATH_PREFIX="/team")
    at = f"{running.url}/team"
    card = (await running.http.get(f"/team{CARD}")).json()

    paths = {i["protocolBinding"]: i["url"].partition(at) for i in card["supportedInterfaces"]}
    rpc_path, rest_path = paths["JSONRPC"][2], paths["HTTP+JSON"][2]
    by_rpc = await post(running, f"/team{rpc_path}", rpc("SendMessage", said("hello")), **V1)
    sent = {"message": said("hello")}
    by_rest = await post(running, f"/team{rest_path}/message:send", sent, **V1)

    assert {begin + base for begin, base, _ in paths.values()} == {at}
    assert by_rpc["result"]["task"]["status"]["state"] == "TASK_STATE_COMPLETED"
    assert by_rest["task"]["status"]["state"] == "TASK_STATE_COMPLETED"


async def test_without_the_setting_there_are_no_further_roots(service: Running) -> None:
    answer = await service.http.post("/rpc", json=rpc("SendMessage", said("hello")), headers=V1)

    assert answer.status_code == 404


async def test_agentgateway_leaves_no_address_of_the_agent_behind(hosted: Running) -> None:
    """agentgateway, a2a/mod.rs: it rewrites ``supportedInterfaces`` and nothing else."""
    card = (await hosted.http.get(CARD)).json()

    for interface in card["supportedInterfaces"]:
        interface["url"] = interface["url"].replace(hosted.url, "https://gateway.example/agent")

    assert hosted.url not in orjson.dumps(card).decode()


async def test_mulesoft_rewrites_the_interfaces_of_both_cards(hosted: Running) -> None:
    """MuleSoft, "A2A v1 Agent Card": bare cards, and the one in an answer of JSON-RPC."""
    asked = {"jsonrpc": "2.0", "id": 1, "method": "GetExtendedAgentCard"}
    cards = [
        (await hosted.http.get(CARD)).json(),
        (await hosted.http.get("/extendedAgentCard", headers=V1)).json(),
        (await post(hosted, "/", asked, **V1))["result"],
    ]

    for card in cards:
        for interface in card["supportedInterfaces"]:
            interface["url"] = "https://gateway.example/agent"
        assert hosted.url not in orjson.dumps(card).decode()


async def test_azure_api_management_takes_the_further_interfaces_away(
    service: Running, opencode: FakeOpenCode
) -> None:
    """Microsoft, "Import an A2A agent API": JSON-RPC only, behind its own host."""
    card = (await service.http.get(CARD)).json()
    del card["additionalInterfaces"]
    card |= {"url": "https://apim.example/agent", "preferredTransport": "JSONRPC"}
    hello = {"role": "user", "parts": [{"kind": "text", "text": "hello"}]}

    assert v03.AgentCard.model_validate(card).preferred_transport == "JSONRPC"
    done = await post(service, "/", rpc("message/send", hello))
    assert done["result"]["status"]["state"] == "completed"


@pytest.mark.parametrize("form", ["0.3", "1.0"])
async def test_a_card_of_one_version_has_nothing_of_the_other(form: CardForm) -> None:
    card = Cards(Settings(), 0).shown(form)

    older = {"url", "additionalInterfaces", "preferredTransport", "protocolVersion"}
    newer = {"supportedInterfaces", "securityRequirements"}
    assert not card.keys() & (newer if form == "0.3" else older)


async def test_gemini_enterprise_reads_a_pure_card_and_a_stream_that_says_it_is_over(
    serve: Serve, opencode: FakeOpenCode
) -> None:
    """Google, "Register and manage A2A agents": version 0.3, the card pasted as JSON."""
    running = await serve(A2A_CARD_FORM="0.3")
    card = (await running.http.get(CARD)).json()
    known = {field.alias or name for name, field in v03.AgentCard.model_fields.items()}
    hello = {"role": "user", "parts": [{"kind": "text", "text": "hello"}]}

    async with running.http.stream("POST", "/", json=rpc("message/stream", hello)) as answer:
        lines = [line async for line in answer.aiter_lines()]
    events = [orjson.loads(line[6:])["result"] for line in lines if line.startswith("data: ")]

    assert set(card) <= known
    assert all(skill["tags"] for skill in card["skills"])
    assert not [key for key in card if "_" in key]
    assert events[-1]["kind"] == "status-update"
    assert events[-1]["final"] is True
    assert [event["kind"] for event in events].index("artifact-update") < len(events) - 1


async def test_google_agent_registry_posts_the_earlier_spelling(
    service: Running, opencode: FakeOpenCode
) -> None:
    """Google, "Agent Registry: call an agent": HTTP+JSON below /v1."""
    message = {"messageId": uuid4().hex, "role": "ROLE_USER", "content": [{"text": "hello"}]}

    sent = await post(service, "/v1/message:send", {"message": message})
    card = await service.http.get("/v1/card")

    assert sent["task"]["status"]["state"] == "TASK_STATE_COMPLETED"
    assert card.status_code == 200


async def test_copilot_studio_finds_the_card_at_the_earlier_address(service: Running) -> None:
    """Microsoft, "Connect to an agent over A2A": ENDPOINT/.well-known/agent.json."""
    answer = await service.http.get(CARD_03, headers={"Authorization": ""})

    assert v03.AgentCard.model_validate(answer.json()).url == service.url


async def test_microsoft_foundry_reads_the_card_without_a_credential(
    service: Running, opencode: FakeOpenCode
) -> None:
    """Microsoft, tool ``a2a_preview``: ``send_credentials_for_agent_card`` is false."""
    answer = await service.http.get(CARD, headers={"Authorization": "", **V1})
    done = await post(service, "/", rpc("SendMessage", said("hello")), **V1)

    assert ParseDict(answer.json(), AgentCard()).supported_interfaces
    assert done["result"]["task"]["status"]["state"] == "TASK_STATE_COMPLETED"


async def test_kagent_and_others_may_name_a_tenant(
    service: Running, opencode: FakeOpenCode
) -> None:
    """kagent, and the field ``tenant`` of A2A 1.0: accepted, and not looked at."""
    whole = {"tenant": "team/coder", "message": said("hello")}

    by_rest = await post(service, "/message:send", whole, **V1)
    by_rpc = await post(service, "/", rpc("SendMessage", said("hello"), tenant="team/coder"), **V1)
    task = by_rest["task"]["id"]
    read = await service.http.get(f"/tasks/{task}?tenant=team%2Fcoder", headers=V1)

    assert by_rpc["result"]["task"]["status"]["state"] == "TASK_STATE_COMPLETED"
    assert read.json()["id"] == task


async def test_bifrost_keeps_the_ids_of_task_and_context(
    service: Running, opencode: FakeOpenCode
) -> None:
    """Bifrost, "A2A gateway": version 1.0, and its own headers on every request."""
    own = {**V1, "x-bf-session-id": "s", "x-bf-agent-correlation-id": "c", "x-bf-vk": "key"}

    first = (await post(service, "/", rpc("SendMessage", said("hello")), **own))["result"]["task"]
    more = {**said("more"), "contextId": first["contextId"]}
    second = (await post(service, "/", rpc("SendMessage", more), **own))["result"]["task"]

    assert second["contextId"] == first["contextId"]
    assert second["id"] != first["id"]
