"""Which cards of other agents are believed, and what of them."""

import base64
import hashlib
import hmac
from pathlib import Path
from typing import Any

import jwt
import orjson
import pytest
from a2a.types import AgentCard
from cryptography.hazmat.primitives.asymmetric.rsa import generate_private_key
from google.api import field_behavior_pb2  # pyright: ignore[reportMissingTypeStubs] # has none
from jwt.algorithms import RSAAlgorithm

from opencode_a2a.a2a.signatures import canonical, sign_card
from opencode_a2a.config import load
from opencode_a2a.events import JsonObject
from opencode_a2a.peers.proof import FIELDS, CardField, Proof, proven
from opencode_a2a.peers.received import PeerError
from opencode_a2a.server.card import Cards
from opencode_a2a.signing import SigningKeys, signing_keys
from tests.support.certificates import private_key

URL = "https://agent.example"
PLACE = f"{URL}/.well-known/agent-card.json"
KEYS = f"{URL}/.well-known/jwks.json"


def keys_in(folder: Path) -> SigningKeys:
    file = private_key(folder / "signing.pem")
    keys = signing_keys(load({}, {"A2A_SIGNING_KEY_FILE": str(file)}).signing)
    assert keys is not None
    return keys


@pytest.fixture
def keys(tmp_path: Path) -> SigningKeys:
    return keys_in(tmp_path)


def ours(keys: SigningKeys) -> JsonObject:
    return Cards(load({}, {"A2A_PUBLIC_URL": URL}), 0, keys=keys).shown("hybrid")


async def believed(card: JsonObject, keys: SigningKeys, proof: Proof | None = None) -> JsonObject:
    async def fetch(url: str) -> JsonObject:
        assert url == KEYS
        return keys.jwks

    return await proven(orjson.loads(orjson.dumps(card)), PLACE, proof or Proof(), fetch)


async def test_a_card_of_ours_is_proven_by_its_origin_and_by_pinned_keys(
    keys: SigningKeys, tmp_path: Path
) -> None:
    pinned = tmp_path / "keys.json"
    pinned.write_bytes(orjson.dumps(keys.jwks))
    for proof in (Proof(), Proof(str(pinned)), Proof(KEYS)):
        found = await believed(ours(keys), keys, proof)
        assert found["name"] == "OpenCode A2A"
        assert "signatures" not in found


async def test_what_was_not_signed_is_not_used(keys: SigningKeys) -> None:
    evil = {**ours(keys), "url": "https://evil.example", "security": []}

    found = await believed(evil, keys)

    assert "url" not in found
    assert found["supportedInterfaces"] == ours(keys)["supportedInterfaces"]


@pytest.mark.parametrize(
    "change",
    [
        {"name": "Another"},
        {"signatures": []},
        {"signatures": None},
        {"signatures": [{"protected": "e30", "signature": "AA"}]},
        {"signatures": [{"protected": "", "signature": ""}] * 1_000},
        {"signatures": "none"},
        {"supportedInterfaces": [{"url": "https://evil.example", "protocolBinding": "JSONRPC"}]},
    ],
)
async def test_a_changed_card_is_not_believed(keys: SigningKeys, change: JsonObject) -> None:
    with pytest.raises(PeerError, match="not proven"):
        await believed({**ours(keys), **change}, keys)


async def test_only_keys_of_the_cards_origin_or_pinned_ones_count(
    keys: SigningKeys, tmp_path: Path
) -> None:
    (tmp_path / "other").mkdir()
    other = keys_in(tmp_path / "other")
    pinned = tmp_path / "keys.json"
    pinned.write_bytes(orjson.dumps(keys.jwks))
    plain: JsonObject = {"name": "Evil", "description": "", "version": "1"}

    for jku in ("https://evil.example/keys", "http://agent.example/keys", "https://10.0.0.1/k", ""):
        card: JsonObject = {**plain, "signatures": sign_card(other.current, [plain], jku)}
        with pytest.raises(PeerError, match="not proven"):
            await believed(card, other)
    # Another key, whatever it is called and wherever it says that it is.
    card = JsonObject({**plain, "signatures": sign_card(other.current, [plain], KEYS)})
    with pytest.raises(PeerError, match="not proven"):
        await believed(card, keys, Proof(str(pinned)))


@pytest.mark.parametrize("alg", ["none", "HS256", "ES256"])
async def test_no_algorithm_of_the_cards_choice_is_taken(keys: SigningKeys, alg: str) -> None:
    """Unsigned, signed with the public key as a secret, or with what must be understood."""
    plain: JsonObject = {"name": "Evil", "description": "", "version": "1"}
    header = {"alg": alg, "kid": keys.current.published.kid, "jku": KEYS, "typ": "JOSE"}
    if alg == "ES256":
        header["crit"] = "x"
    protected = base64.urlsafe_b64encode(orjson.dumps(header)).rstrip(b"=").decode()
    secret = orjson.dumps(keys.current.published.jwk)
    body = base64.urlsafe_b64encode(canonical(plain)).rstrip(b"=").decode()
    signed = hmac.new(secret, f"{protected}.{body}".encode(), hashlib.sha256).digest()
    signature = base64.urlsafe_b64encode(signed).rstrip(b"=").decode()
    if alg == "none":
        signature = ""

    with pytest.raises(PeerError, match="not proven"):
        await believed(
            {**plain, "signatures": [{"protected": protected, "signature": signature}]}, keys
        )


@pytest.mark.filterwarnings("ignore::jwt.warnings.InsecureKeyLengthWarning")  # that is the test
@pytest.mark.parametrize("kind", ["short", "private", "for encryption", "of another algorithm"])
async def test_only_keys_that_are_safe_prove_anything(tmp_path: Path, kind: str) -> None:
    private = generate_private_key(65537, 1024 if kind == "short" else 2048)
    half = private if kind == "private" else private.public_key()
    jwk: dict[str, Any] = {**RSAAlgorithm.to_jwk(half, as_dict=True), "kid": "k"}
    if kind == "for encryption":
        jwk["use"] = "enc"
    elif kind == "of another algorithm":
        jwk["alg"] = "PS512"
    pinned = tmp_path / "keys.json"
    pinned.write_bytes(orjson.dumps({"keys": [jwk]}))
    card: JsonObject = {"name": "Evil", "description": "", "version": "1"}
    signed = jwt.PyJWS().encode(canonical(card), private, "RS256", {"kid": "k"})
    protected, _, signature = signed.split(".")
    card["signatures"] = [{"protected": protected, "signature": signature}]

    with pytest.raises(PeerError, match="no signature is by a key that is trusted"):
        await proven(card, PLACE, Proof(str(pinned)), nothing)


async def nothing(url: str) -> JsonObject:
    raise AssertionError(url)


async def test_a_wrong_file_of_keys_is_said(keys: SigningKeys, tmp_path: Path) -> None:
    wrong = tmp_path / "wrong.json"
    wrong.write_text("[]")
    for file in (wrong, tmp_path / "absent"):
        with pytest.raises(PeerError, match=file.name) as refused:
            await believed(ours(keys), keys, Proof(str(file)))
        # The model, and perhaps a caller, reads it: where the operator's files are is not theirs.
        assert str(tmp_path) not in str(refused.value)


def test_the_table_of_fields_is_that_of_the_schema() -> None:
    found: dict[str, dict[str, CardField]] = {}
    behavior: Any = field_behavior_pb2.field_behavior

    def walk(message: Any) -> None:
        if message.name in found:
            return
        fields = found[message.name] = {}
        for field in message.fields:
            held: Any = field.message_type
            shape = "list" if field.is_repeated else "one"
            if held is not None and held.GetOptions().map_entry:
                held, shape = held.fields_by_name["value"].message_type, "map"
            extended: Any = field.GetOptions().Extensions[behavior]
            always = field_behavior_pb2.REQUIRED in extended or field.has_presence
            own = held is not None and held.full_name.startswith("lf.a2a.")
            kind = None if held is None else held.name if own else "*"
            fields[field.json_name] = CardField(kind, shape, always)
            if own:
                walk(held)

    walk(AgentCard.DESCRIPTOR)

    assert found == FIELDS
