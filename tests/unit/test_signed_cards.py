"""Signed cards: every kind of verifier accepts ours, and none accepts one that was changed."""

import base64
import shutil
import subprocess
from pathlib import Path
from typing import Any

import jwt
import orjson
import pytest
import rfc8785
from a2a.types import AgentCard
from a2a.utils.signing import InvalidSignaturesError, create_signature_verifier
from google.protobuf.json_format import ParseDict
from starlette.applications import Starlette
from starlette.testclient import TestClient

from opencode_a2a.a2a.types import Version
from opencode_a2a.config import Settings, load
from opencode_a2a.events import JsonObject
from opencode_a2a.server.card import Cards, OpenCodeSkill
from opencode_a2a.server.openapi import openapi_routes
from opencode_a2a.signing import signing_keys
from tests.support.certificates import private_key

URL = "https://agent.example/coder"
ROOT = Path(__file__).parents[2]
PATH = "/.well-known/agent-card.json"


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return signed(tmp_path)


def signed(folder: Path, **more: str) -> Settings:
    variables = {
        "A2A_SIGNING_KEY_FILE": str(private_key(folder / "signing.pem")),
        "A2A_PUBLIC_URL": URL,
        "A2A_DESCRIPTION": "Schöne Grüße: 😀",
    }
    return load({}, {**variables, **more})


async def agents() -> list[OpenCodeSkill]:
    return [OpenCodeSkill("agent", "build", None)]


def cards_of(settings: Settings) -> Cards:
    return Cards(settings, 1_794_733_200_123, agents, signing_keys(settings.signing))


def fetched(settings: Settings, path: str = PATH, **headers: str) -> dict[str, Any]:
    with TestClient(Starlette(routes=cards_of(settings).routes())) as client:
        return client.get(path, headers=headers).json()


def forms(settings: Settings) -> list[JsonObject]:
    """Return every signed card: public and extended, pure and hybrid."""
    cards = cards_of(settings)
    pure = fetched(settings, **{"A2A-Version": "1.0"})
    return [
        pure,
        fetched(settings),
        cards.extended(Version.V1),
        cards.shown("hybrid", extended=True),
    ]


def accepted_by_the_sdk(settings: Settings, card: JsonObject) -> bool:
    """Verify a card as clients of the Python SDK do, with the keys that are published."""
    keys = jwt.PyJWKSet.from_dict(fetched(settings, "/.well-known/jwks.json"))

    def find(kid: str | None, jku: str | None) -> jwt.PyJWK:
        assert jku == f"{URL}/.well-known/jwks.json"
        return keys[kid or ""]

    verify = create_signature_verifier(find, ["ES256"])
    try:
        verify(ParseDict(card, AgentCard(), ignore_unknown_fields=True))
    except InvalidSignaturesError:
        return False
    return True


def accepted_as_served(settings: Settings, card: JsonObject) -> bool:
    """Verify a card by its own bytes, as clients do that know nothing of a schema."""
    keys = jwt.PyJWKSet.from_dict(fetched(settings, "/.well-known/jwks.json"))
    body = {name: value for name, value in card.items() if name != "signatures"}
    payload = base64.urlsafe_b64encode(rfc8785.dumps(body)).rstrip(b"=").decode()
    signatures: Any = card["signatures"]
    for one in signatures:
        try:
            jwt.PyJWS().decode(f"{one['protected']}.{payload}.{one['signature']}", keys.keys[0])
        except jwt.InvalidSignatureError:
            continue
        return True
    return False


def test_both_kinds_of_verifiers_accept_every_form(settings: Settings) -> None:
    for card in forms(settings):
        assert accepted_by_the_sdk(settings, card)
        assert accepted_as_served(settings, card)


@pytest.mark.live
def test_the_javascript_sdk_accepts_every_form_and_nothing_else(settings: Settings) -> None:
    node, script = shutil.which("node"), ROOT / "tests" / "support" / "js" / "verify.mjs"
    assert node is not None
    cards = forms(settings)
    asked = {
        "keys": fetched(settings, "/.well-known/jwks.json")["keys"],
        "cards": [*cards, {**cards[0], "name": "Another agent"}],
    }

    said = subprocess.run(  # noqa: S603 - a script of ours
        [node, script], input=orjson.dumps(asked), capture_output=True, check=True, timeout=60
    )

    *_, last = said.stdout.splitlines()  # before it the SDK warns of signatures that do not fit
    assert orjson.loads(last) == [True, True, True, True, False]


def test_also_with_a_client_authority_and_other_schemes(tmp_path: Path) -> None:
    entries = [{"scheme": "basic", "username": "ann", "password": "a-password-of-ann-s"}]
    settings = signed(
        tmp_path,
        A2A_STATIC_AUTH_CREDENTIALS=orjson.dumps(entries).decode(),
        A2A_TLS_CERT_FILE="/agent.crt",
        A2A_TLS_CLIENT_CA_FILE="/callers.pem",
    )

    for card in forms(settings):
        assert accepted_by_the_sdk(settings, card)
        assert accepted_as_served(settings, card)
        assert card["securityRequirements"] == [{"schemes": {"basicAuth": {}, "mutualTLS": {}}}]
    with TestClient(Starlette(routes=openapi_routes(settings))) as http:
        document = http.get("/openapi.json").json()
    assert document["security"] == [{"basicAuth": [], "mutualTLS": []}]
    assert document["components"]["securitySchemes"]["mutualTLS"] == {"type": "mutualTLS"}
    assert document["paths"]["/.well-known/jwks.json"]["get"]["security"] == []


def test_a_card_that_was_changed_is_not_accepted(settings: Settings) -> None:
    for card in forms(settings):
        changed = {**card, "name": "Another agent"}

        assert not accepted_by_the_sdk(settings, changed)
        assert not accepted_as_served(settings, changed)


def test_the_header_says_what_a_verifier_needs_and_nothing_else(settings: Settings) -> None:
    keys = fetched(settings, "/.well-known/jwks.json")["keys"]
    for card in forms(settings):
        signatures: Any = card["signatures"]
        assert 1 <= len(signatures) <= 3
        for one in signatures:
            assert jwt.get_unverified_header(f"{one['protected']}..") == {
                "alg": "ES256",
                "typ": "JOSE",
                "kid": keys[0]["kid"],
                "jku": f"{URL}/.well-known/jwks.json",
            }


def test_nothing_is_signed_without_a_key_and_nothing_of_0_3(settings: Settings) -> None:
    assert "signatures" not in fetched(settings, "/.well-known/agent.json")
    assert "signatures" not in cards_of(settings).extended(Version.V03)
    plain = Cards(load({}, {}), 0)
    assert "signatures" not in plain.shown("hybrid")
    assert [route for route in plain.routes() if "jwks" in str(route)] == []
