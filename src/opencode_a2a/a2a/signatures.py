"""Signatures of agent cards, over their canonical bytes (A2A 1.0, 8.4; RFC 7515, RFC 8785).

``server.card`` signs cards, and ``peers.proof`` verifies them. Needs the extra ``security``.
"""

from collections.abc import Iterable

from opencode_a2a.events import Json, JsonObject
from opencode_a2a.signing import SigningKey

SIGNATURES = "signatures"


def canonical(card: JsonObject) -> bytes:
    """Return the bytes of a card that are signed: canonical JSON, without its signatures."""
    import rfc8785

    return rfc8785.dumps({name: value for name, value in card.items() if name != SIGNATURES})


def sign_card(key: SigningKey, payloads: Iterable[JsonObject], jku: str) -> list[Json]:
    """Return a signature for each distinct payload; ``jku`` is the URL of the published key."""
    signed: list[Json] = []
    for payload in dict.fromkeys(map(canonical, payloads)):
        protected, signature = key.jws(payload, {"typ": "JOSE", "jku": jku})
        signed.append({"protected": protected, "signature": signature})
    return signed


def without_empty(value: JsonObject) -> JsonObject:
    """Return an object without empty texts, lists and objects, as the SDKs canonicalize cards."""
    kept = _without_empty(value)
    return kept if isinstance(kept, dict) else {}


def _without_empty(value: Json) -> Json:
    """Return None for an empty value; a null is removed in the same way."""
    if isinstance(value, dict):
        return {
            k: kept for k, v in value.items() if (kept := _without_empty(v)) is not None
        } or None
    if isinstance(value, list):
        return [kept for v in value if (kept := _without_empty(v)) is not None] or None
    return None if value == "" else value
