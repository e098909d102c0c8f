"""The agent card in its three forms, read back by the SDK."""

import secrets
from collections.abc import AsyncIterator
from typing import cast

import httpx
import orjson
import pytest
from a2a.client.card_resolver import parse_agent_card
from a2a.compat.v0_3 import a2a_v0_3_pb2, conversions, proto_utils
from a2a.compat.v0_3 import types as v03
from a2a.types import AgentCard
from google.protobuf.json_format import ParseDict
from starlette.applications import Starlette

from opencode_a2a.a2a.types import Version
from opencode_a2a.config import load
from opencode_a2a.errors import Feature
from opencode_a2a.events import JsonObject
from opencode_a2a.server.card import Cards

OURS = {"A2A_PUBLIC_URL": "https://agent.example", "A2A_BEARER_TOKEN": secrets.token_hex()}
ANN = {"scheme": "basic", "username": "ann", "password": secrets.token_hex()}
SETTINGS = load(
    {},
    {
        **OURS,
        "A2A_STATIC_AUTH_CREDENTIALS": orjson.dumps([ANN]).decode(),
        "A2A_DOCUMENTATION_URL": "https://agent.example/docs",
        "A2A_PROJECT": "demo",
    },
)
PATH = "/.well-known/agent-card.json"


@pytest.fixture
async def discovery() -> AsyncIterator[httpx.AsyncClient]:
    app = Starlette(routes=Cards(SETTINGS, 1_794_733_200_123).routes())
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://agent") as client:
        yield client


async def test_the_public_card_is_readable_by_clients_of_both_lines(
    discovery: httpx.AsyncClient,
) -> None:
    answer = await discovery.get(PATH)
    sent: JsonObject = orjson.loads(answer.content)

    card = parse_agent_card(orjson.loads(answer.content))
    assert [(i.protocol_binding, i.protocol_version) for i in card.supported_interfaces] == [
        ("HTTP+JSON", "1.0"),
        ("JSONRPC", "1.0"),
        ("HTTP+JSON", "0.3"),
        ("JSONRPC", "0.3"),
    ]
    old = v03.AgentCard.model_validate(sent)
    assert (old.url, old.preferred_transport) == ("https://agent.example", "JSONRPC")
    assert old.protocol_version == "0.3.0"
    assert old.supports_authenticated_extended_card
    assert old.security == [{"bearerAuth": []}, {"basicAuth": []}]
    assert len(answer.content) < 10_000


@pytest.mark.requirement("A2A-4.4.1")
async def test_with_the_header_the_card_is_pure_1_0(discovery: httpx.AsyncClient) -> None:
    answer = await discovery.get(PATH, headers={"A2A-Version": "1.0"})

    card = ParseDict(orjson.loads(answer.content), AgentCard(), ignore_unknown_fields=False)

    assert card.capabilities.extended_agent_card
    assert card.capabilities.push_notifications
    assert card.security_schemes["bearerAuth"].http_auth_security_scheme.scheme == "bearer"
    assert [list(r.schemes) for r in card.security_requirements] == [["bearerAuth"], ["basicAuth"]]
    assert answer.headers["a2a-version"] == "1.0"


async def test_the_old_address_has_the_pure_0_3_form(discovery: httpx.AsyncClient) -> None:
    answer = await discovery.get("/.well-known/agent.json")

    card = v03.AgentCard.model_validate(orjson.loads(answer.content), extra="forbid")

    assert card.capabilities.streaming
    assert conversions.to_core_agent_card(card).name == "OpenCode A2A"


async def test_a_card_that_has_not_changed_is_not_sent_again(
    discovery: httpx.AsyncClient,
) -> None:
    first = await discovery.get(PATH)
    tag, modified = first.headers["etag"], first.headers["last-modified"]
    assert first.headers["cache-control"] == "public, max-age=300"
    assert first.headers["vary"] == "A2A-Version"
    assert modified == "Sun, 15 Nov 2026 09:00:00 GMT"

    for headers in (
        {"If-None-Match": tag},
        {"If-None-Match": f'"other", {tag.removeprefix("W/")}'},
        {"If-None-Match": "*"},
        {"If-Modified-Since": modified},
    ):
        again = await discovery.get(PATH, headers=headers)
        assert (again.status_code, again.content) == (304, b"")

    for headers in (
        {"If-None-Match": '"other"'},
        {"If-None-Match": '"other"', "If-Modified-Since": modified},
        {"If-Modified-Since": "Sun, 15 Nov 2026 08:00:00 GMT"},
        {"If-Modified-Since": "never"},
    ):
        assert (await discovery.get(PATH, headers=headers)).status_code == 200


def test_the_extended_card_says_more_in_the_form_of_its_line() -> None:
    cards = Cards(SETTINGS, 0)

    modern = ParseDict(cards.extended(Version.V1), AgentCard(), ignore_unknown_fields=False)
    old = v03.AgentCard.model_validate(cards.extended(Version.V03), extra="forbid")

    assert modern.skills[0].examples
    params = (old.capabilities.extensions or [])[2].params or {}
    assert "block_contracts" in params


async def test_cards_follow_what_opencode_can_do() -> None:
    missing: set[Feature] = set()
    cards = Cards(SETTINGS, 0, missing=lambda: frozenset(missing))
    transport = httpx.ASGITransport(Starlette(routes=cards.routes()))

    async def told() -> tuple[bool, bool, str, str]:
        """Whether profiles and plans are offered, and how the method for todo lists stands."""
        async with httpx.AsyncClient(transport=transport, base_url="http://agent") as client:
            public = (await client.get(PATH)).text
        await cards.refresh()
        extended = cards.extended(Version.V1)
        described = cast(JsonObject, extended["capabilities"])["extensions"]
        params = {
            str(one["uri"]).partition("#")[2]: one["params"]
            for one in cast(list[dict[str, JsonObject]], described)
        }
        method = "opencode.sessions.todo"
        contracts = cast(JsonObject, params["opencode-session-management-v1"]["method_contracts"])
        wire = cast(JsonObject, params["a2a-wire-contract-v1"]["extensions"])
        conditions = cast(JsonObject, wire["conditionally_available_methods"])
        state = cast(JsonObject, contracts[method])["availability"]
        listed = method in cast(list[str], wire["jsonrpc_methods"])
        return (
            '"read-only"' in public,
            '"opencode.plan"' in public,
            str(state),
            "offered" if listed else str(conditions[method]),
        )

    before = await told()
    missing.update({"rules", "todos"})
    then = await told()

    assert before == (True, True, "enabled", "offered")
    assert then == (False, False, "not_in_opencode", "{'reason': 'not_in_opencode'}")


def test_the_hybrid_form_is_right_for_rest_clients_of_0_3() -> None:
    hybrid = Cards(SETTINGS, 0).shown("hybrid", extended=True)

    proto = ParseDict(hybrid, a2a_v0_3_pb2.AgentCard(), ignore_unknown_fields=True)
    card = conversions.to_core_agent_card(proto_utils.FromProto.agent_card(proto))

    assert card.security_schemes["bearerAuth"].http_auth_security_scheme.scheme == "bearer"


def test_a_demo_says_so() -> None:
    demo = load({}, {**OURS, "A2A_DEMO": "true"})

    card = Cards(demo, 0).extended(Version.V1)

    assert "demo" in str(card["name"])
    assert "scripted demo model" in str(card["description"])


def test_only_schemes_that_are_configured_are_declared() -> None:
    bearer = load({}, OURS)

    card = Cards(bearer, 0).extended(Version.V1)

    assert list(cast(JsonObject, card["securitySchemes"])) == ["bearerAuth"]
