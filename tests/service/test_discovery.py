"""The card: what it says, to whom, and that it is true."""

import gzip
from dataclasses import replace
from uuid import uuid4

import orjson
import pytest
from a2a.client.card_resolver import parse_agent_card
from a2a.compat.v0_3 import types as v03
from a2a.types import AgentCard, Message, Part, Role, SendMessageRequest
from google.protobuf.json_format import ParseDict

from opencode_a2a.errors import NotInOpenCodeError
from opencode_a2a.extensions import EXTENSIONS
from opencode_a2a.opencode.client import OpenCode1
from tests.support.answers import Wire
from tests.support.caller import Caller
from tests.support.front import Serve, sdk_client
from tests.support.opencode import FakeOpenCode
from tests.support.service import Running

pytestmark = pytest.mark.asyncio(loop_scope="module")

CARD = "/.well-known/agent-card.json"
OLD_CARD = "/.well-known/agent.json"
REQUIRED = {
    *("name", "description", "version", "supportedInterfaces", "capabilities"),
    *("defaultInputModes", "defaultOutputModes", "skills"),
}


@pytest.mark.requirement("8-well-known-path")
@pytest.mark.requirement("0.3-card")
@pytest.mark.requirement("I17")
async def test_one_card_is_readable_by_both_lines_without_a_credential(service: Running) -> None:
    answer = await service.http.get(CARD, headers={"Authorization": ""})
    body = orjson.loads(answer.content)

    assert (answer.status_code, len(answer.content) < 10_000) == (200, True)
    assert answer.headers["content-type"] == "application/json"
    modern, old = parse_agent_card(orjson.loads(answer.content)), v03.AgentCard.model_validate(body)
    assert modern.name == old.name
    assert (old.url, old.protocol_version) == (service.url, "0.3.0")
    assert (modern.capabilities.streaming, modern.capabilities.push_notifications) == (True, True)
    assert modern.capabilities.extended_agent_card
    assert old.supports_authenticated_extended_card


@pytest.mark.requirement("4.4.1-required-fields")
@pytest.mark.requirement("3.6-card-interfaces")
@pytest.mark.requirement("8-absolute-urls")
@pytest.mark.requirement("4.4.1-security")
async def test_with_its_header_the_card_is_pure_1_0(service: Running) -> None:
    answer = await service.http.get(CARD, headers={"A2A-Version": "1.0"})
    body = orjson.loads(answer.content)

    card = ParseDict(body, AgentCard())
    assert set(body) >= REQUIRED
    assert "url" not in body
    interfaces = [(i.protocol_binding, i.protocol_version) for i in card.supported_interfaces]
    assert sorted(interfaces) == sorted(set(interfaces))
    assert [version for _, version in interfaces] == ["1.0", "1.0", "0.3", "0.3"]
    assert {binding for binding, _ in interfaces} == {"JSONRPC", "HTTP+JSON"}
    assert {i.url for i in card.supported_interfaces} == {service.url}
    skills = body["skills"]
    assert skills
    assert all(s[name] for s in skills for name in ("id", "name", "description", "tags"))
    schemes = body["securitySchemes"]
    wanted = [name for one in body["securityRequirements"] for name in one["schemes"]]
    assert wanted
    assert set(wanted) <= set(schemes)


@pytest.mark.requirement("0.3-card")
async def test_the_old_address_has_the_form_of_0_3(service: Running) -> None:
    body = orjson.loads((await service.http.get(OLD_CARD)).content)

    card = v03.AgentCard.model_validate(body)
    assert card.preferred_transport in ("JSONRPC", "HTTP+JSON")
    assert "supportedInterfaces" not in body
    assert len(card.additional_interfaces or []) == 2


@pytest.mark.requirement("8-caching")
@pytest.mark.parametrize("path", [CARD, OLD_CARD])
async def test_the_card_is_cached_and_compressed(service: Running, path: str) -> None:
    first = await service.http.get(path, headers={"Accept-Encoding": "identity"})
    tag = first.headers["etag"]

    again = await service.http.get(path, headers={"If-None-Match": tag})
    other = await service.http.get(path, headers={"If-None-Match": '"x"'})
    raw = await service.http.send(
        service.http.build_request("GET", path, headers={"Accept-Encoding": "gzip"}), stream=True
    )
    packed = b"".join([chunk async for chunk in raw.aiter_raw()])
    await raw.aclose()

    assert (again.status_code, again.content, again.headers["etag"]) == (304, b"", tag)
    assert other.status_code == 200
    assert "max-age" in first.headers["cache-control"]
    assert "Accept-Encoding" in first.headers["vary"]
    assert raw.headers["content-encoding"] == "gzip"
    assert gzip.decompress(packed) == first.content


async def test_the_extended_card_has_the_agents_of_an_opencode_that_lists_no_commands(
    serve: Serve, opencode: FakeOpenCode, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def missing(*_: object, **__: object) -> None:
        raise NotInOpenCodeError("OpenCode 2 has no GET /api/command")

    monkeypatch.setattr(OpenCode1, "commands", missing)
    monkeypatch.setattr(opencode, "agents", [{"name": "build", "mode": "primary"}])
    card = await Caller(await serve()).ask("card", {})

    assert "opencode.agent.build" in [skill["id"] for skill in card.result["skills"]]


@pytest.mark.requirement("3.1.11-extended-card")
async def test_the_extended_card_is_for_those_with_a_credential(
    service: Running, caller: Caller
) -> None:
    answer = await caller.ask("card", {})
    refused = await caller.ask("card", {}, Authorization="Bearer wrong-token-altogether")

    body = answer.result
    if caller.wire is Wire.RPC03:
        assert v03.AgentCard.model_validate(body).url == service.url
    else:
        assert len(parse_agent_card(body).supported_interfaces) == 4
    public = orjson.loads((await service.http.get(CARD)).content)
    assert len(orjson.dumps(body)) > len(orjson.dumps(public))
    assert refused.status == 401


@pytest.mark.requirement("3.1.11-extended-card")
async def test_the_founding_address_of_the_extended_card_works(service: Running) -> None:
    answer = await service.http.get("/agent/authenticatedExtendedCard")

    assert answer.status_code == 200
    assert "private" in answer.headers["cache-control"]


@pytest.mark.requirement("4.6-echo")
@pytest.mark.requirement("4.6-unknown-ignored")
async def test_active_extensions_are_echoed_by_the_names_they_were_asked_for(
    caller: Caller, opencode: FakeOpenCode
) -> None:
    known = EXTENSIONS[0]
    asked = f"{known.uri}, urn:unknown , {known.aliases[0]}"
    header = "A2A-Extensions" if caller.wire.modern else "X-A2A-Extensions"
    spelled = header.replace("-", "_")

    results = [
        await caller.ask(operation, caller.message("hello"), **{spelled: asked})
        for operation in ("send", "stream")
    ]
    error = await caller.ask("get", {"id": "no-such-task"}, **{spelled: asked})

    active = f"{known.uri}, {known.aliases[0]}"
    assert [answer.headers.get(header) for answer in results] == [active, active]
    assert header not in error.headers


@pytest.mark.requirement("4.6-echo")
@pytest.mark.requirement("I17")
async def test_every_extension_of_the_card_can_be_asked_for(
    service: Running, caller: Caller
) -> None:
    card = orjson.loads((await service.http.get(CARD)).content)
    uris = [one["uri"] for one in card["capabilities"]["extensions"]]
    header = "A2A-Extensions" if caller.wire.modern else "X-A2A-Extensions"

    answer = await caller.ask(
        "send", caller.message("hello"), **{header.replace("-", "_"): ",".join(uris)}
    )

    assert uris
    assert not any(one.get("required") for one in card["capabilities"]["extensions"])
    assert answer.headers[header] == ", ".join(uris)


@pytest.mark.requirement("ours-metadata-without-asking")
async def test_metadata_are_there_whether_or_not_they_were_asked_for(caller: Caller) -> None:
    answer = await caller.ask("send", caller.message("hello"))

    shared = answer.task["metadata"]["shared"]
    assert {"session", "usage"} <= set(shared)


@pytest.mark.requirement("I17")
async def test_every_interface_of_the_card_answers(service: Running, caller: Caller) -> None:
    card = orjson.loads((await service.http.get(CARD, headers={"A2A-Version": "1.0"})).content)
    urls = {
        (one["protocolBinding"], one["protocolVersion"]): one["url"]
        for one in card["supportedInterfaces"]
    }

    target = urls[caller.wire.interface].rstrip("/") + caller.target("send", {})[1]
    answer = await caller.post(caller.encode("send", caller.message("hello")), target)

    assert answer.task["id"]
    assert set(urls) == {wire.interface for wire in Wire}


async def test_the_ai_catalog_leads_to_the_card_without_a_credential(service: Running) -> None:
    answer = await service.http.get(
        "/.well-known/ai-catalog.json",
        headers={"Authorization": "", "Origin": "https://anywhere.example"},
    )
    catalog = orjson.loads(answer.content)

    assert answer.headers["content-type"] == "application/ai-catalog+json"
    assert answer.headers["access-control-allow-origin"] == "*"
    card = f"{service.url}{CARD}"
    assert catalog == {
        "specVersion": "1.0",
        "entries": [
            {"identifier": service.url, "type": "application/a2a-agent-card+json", "url": card}
        ],
    }
    assert (await service.http.get(card, headers={"Authorization": ""})).status_code == 200


PREFIX = "/agents/coder"


@pytest.mark.requirement("8-absolute-urls")
async def test_below_a_path_prefix_every_address_leads_back(serve: Serve) -> None:
    service = await serve(A2A_PATH_PREFIX=f"{PREFIX}/")
    base = service.url + PREFIX

    card = orjson.loads((await service.http.get(f"{PREFIX}{CARD}")).content)
    catalog = orjson.loads(
        (await service.http.get(f"{PREFIX}/.well-known/ai-catalog.json")).content
    )
    document = orjson.loads((await service.http.get(f"{PREFIX}/openapi.json")).content)

    assert {one["url"] for one in card["supportedInterfaces"]} == {card["url"]} == {base}
    assert [entry["url"] for entry in catalog["entries"]] == [base + CARD]
    assert [server["url"] for server in document["servers"]] == [base]
    page = await service.http.get(f"{PREFIX}/docs")  # on to the console, relative to where it is
    leads = page.url.join(page.headers["location"])
    assert (page.status_code, leads.path) == (307, f"{PREFIX}/console")
    assert (await service.http.get(str(leads))).status_code == 200


@pytest.mark.parametrize("prefix", [PREFIX, ""])
async def test_with_or_without_its_prefix_a_request_is_answered(serve: Serve, prefix: str) -> None:
    """A proxy may pass the path on as it is, or strip the prefix."""
    service = await serve(A2A_PATH_PREFIX=PREFIX)

    for wire in Wire:
        caller = Caller(service, wire)
        target = prefix + caller.target("send", {})[1]
        answer = await caller.post(caller.encode("send", caller.message("hello")), target)
        assert answer.task["id"]
    guarded = await service.http.get(f"{prefix}/tasks", headers={"Authorization": ""})
    elsewhere = await service.http.get(f"{PREFIX}s/tasks")

    assert (guarded.status_code, elsewhere.status_code) == (401, 404)


async def test_the_stock_client_works_below_a_prefix(serve: Serve) -> None:
    service = await serve(A2A_PATH_PREFIX=PREFIX)
    below = replace(service, url=service.url + PREFIX)

    for wire in Wire:
        async with sdk_client(below, wire) as client:
            events = [event async for event in client.send_message(user_message("hello"))]
        assert events


def user_message(text: str) -> SendMessageRequest:
    message = Message(message_id=str(uuid4()), role=Role.ROLE_USER, parts=[Part(text=text)])
    return SendMessageRequest(message=message)
