"""Proves who wrote an agent's card, by its signatures (A2A 1.0, 8.4) and trusted keys.

``peers.client`` calls ``proven`` before it reads a card that has to be proven. Nothing unsigned is
used: the card that is read afterwards consists of the signed bytes. Needs the extra ``security``.
"""

import asyncio
import base64
import binascii
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple
from urllib.parse import urlsplit

from opencode_a2a.a2a.signatures import SIGNATURES, canonical, without_empty
from opencode_a2a.config import loopback
from opencode_a2a.errors import ParseError
from opencode_a2a.events import Json, JsonObject
from opencode_a2a.jsonguard import as_object, decode, text_in
from opencode_a2a.net.egress import origin
from opencode_a2a.peers.received import ErrorCode, PeerError
from opencode_a2a.signing import VERIFIED_ALGORITHMS, VerificationKey, verification_keys

MOST_SIGNATURES = 10
KEYS_BYTES = 64 * 1024

ReadKeys = Callable[[str], Awaitable[JsonObject]]
"""Reads the JSON document at a URL, without a credential."""


@dataclass(frozen=True, slots=True)
class Proof:
    """How a card has to be proven: by whose signature."""

    keys: str | None = None
    """File or URL of the trusted keys; None trusts those that the card's origin publishes, which
    prove only that the card comes from there."""


class CardField(NamedTuple):
    """A field of the card's schema."""

    kind: str | None = None
    """The message that it holds; ``*`` for any JSON, None for a plain value."""
    shape: Literal["one", "list", "map"] = "one"
    always: bool = False
    """Whether it counts as present even if it has the default of its type."""


_TEXT, _TEXTS = CardField(), CardField(None, "list")
_NEEDED, _NEEDED_TEXTS = CardField(always=True), CardField(None, "list", True)
_SCOPES = CardField(None, "map")
_NEEDED_SCOPES = CardField(None, "map", True)


def _message(kind: str) -> CardField:
    return CardField(kind, "one", always=True)


FIELDS: dict[str, dict[str, CardField]] = {
    "AgentCard": {
        "name": _NEEDED,
        "description": _NEEDED,
        "supportedInterfaces": CardField("AgentInterface", "list", True),
        "provider": _message("AgentProvider"),
        "version": _NEEDED,
        "documentationUrl": _NEEDED,
        "capabilities": _message("AgentCapabilities"),
        "securitySchemes": CardField("SecurityScheme", "map"),
        "securityRequirements": CardField("SecurityRequirement", "list"),
        "defaultInputModes": _NEEDED_TEXTS,
        "defaultOutputModes": _NEEDED_TEXTS,
        "skills": CardField("AgentSkill", "list", True),
        "signatures": CardField("AgentCardSignature", "list"),
        "iconUrl": _NEEDED,
    },
    "AgentInterface": {
        "url": _NEEDED,
        "protocolBinding": _NEEDED,
        "tenant": _TEXT,
        "protocolVersion": _NEEDED,
    },
    "AgentProvider": {"url": _NEEDED, "organization": _NEEDED},
    "AgentCapabilities": {
        "streaming": _NEEDED,
        "pushNotifications": _NEEDED,
        "extensions": CardField("AgentExtension", "list"),
        "extendedAgentCard": _NEEDED,
    },
    "AgentExtension": {
        "uri": _TEXT,
        "description": _TEXT,
        "required": _TEXT,
        "params": _message("*"),
    },
    "SecurityScheme": {
        "apiKeySecurityScheme": _message("APIKeySecurityScheme"),
        "httpAuthSecurityScheme": _message("HTTPAuthSecurityScheme"),
        "oauth2SecurityScheme": _message("OAuth2SecurityScheme"),
        "openIdConnectSecurityScheme": _message("OpenIdConnectSecurityScheme"),
        "mtlsSecurityScheme": _message("MutualTlsSecurityScheme"),
    },
    "APIKeySecurityScheme": {"description": _TEXT, "location": _NEEDED, "name": _NEEDED},
    "HTTPAuthSecurityScheme": {"description": _TEXT, "scheme": _NEEDED, "bearerFormat": _TEXT},
    "OAuth2SecurityScheme": {
        "description": _TEXT,
        "flows": _message("OAuthFlows"),
        "oauth2MetadataUrl": _TEXT,
    },
    "OAuthFlows": {
        "authorizationCode": _message("AuthorizationCodeOAuthFlow"),
        "clientCredentials": _message("ClientCredentialsOAuthFlow"),
        "implicit": _message("ImplicitOAuthFlow"),
        "password": _message("PasswordOAuthFlow"),
        "deviceCode": _message("DeviceCodeOAuthFlow"),
    },
    "AuthorizationCodeOAuthFlow": {
        "authorizationUrl": _NEEDED,
        "tokenUrl": _NEEDED,
        "refreshUrl": _TEXT,
        "scopes": _NEEDED_SCOPES,
        "pkceRequired": _TEXT,
    },
    "ClientCredentialsOAuthFlow": {
        "tokenUrl": _NEEDED,
        "refreshUrl": _TEXT,
        "scopes": _NEEDED_SCOPES,
    },
    "ImplicitOAuthFlow": {"authorizationUrl": _TEXT, "refreshUrl": _TEXT, "scopes": _SCOPES},
    "PasswordOAuthFlow": {"tokenUrl": _TEXT, "refreshUrl": _TEXT, "scopes": _SCOPES},
    "DeviceCodeOAuthFlow": {
        "deviceAuthorizationUrl": _NEEDED,
        "tokenUrl": _NEEDED,
        "refreshUrl": _TEXT,
        "scopes": _NEEDED_SCOPES,
    },
    "OpenIdConnectSecurityScheme": {"description": _TEXT, "openIdConnectUrl": _NEEDED},
    "MutualTlsSecurityScheme": {"description": _TEXT},
    "SecurityRequirement": {"schemes": CardField("StringList", "map")},
    "StringList": {"list": _TEXTS},
    "AgentSkill": {
        "id": _NEEDED,
        "name": _NEEDED,
        "description": _NEEDED,
        "tags": _NEEDED_TEXTS,
        "examples": _TEXTS,
        "inputModes": _TEXTS,
        "outputModes": _TEXTS,
        "securityRequirements": CardField("SecurityRequirement", "list"),
    },
    "AgentCardSignature": {"protected": _NEEDED, "signature": _NEEDED, "header": _message("*")},
}
"""The schema of a 1.0 card; a test compares it with the SDK's."""


async def proven(card: JsonObject, place: str, proof: Proof, fetch: ReadKeys) -> JsonObject:
    """Return the signed part of the card found at an address; raise unless it is proven."""
    signatures = card.get(SIGNATURES)
    if not isinstance(signatures, list) or not signatures:
        raise _unproven("it is not signed")
    if len(signatures) > MOST_SIGNATURES:
        raise _unproven("it has too many signatures")
    reduced = reduce(card)
    # Encoded once for all keys, and in a thread, since a card may be large.
    payloads = await asyncio.to_thread(_bodies, [reduced, without_empty(reduced), card])
    trusted: dict[str, list[VerificationKey]] = {}
    """The keys by their source; each is read once."""
    reason = "no signature is by a key that is trusted"
    for signature in map(as_object, signatures):
        protected, signed = text_in(signature, "protected"), text_in(signature, "signature")
        header = _header(protected or "")
        if not protected or not signed or header is None:
            continue
        source = proof.keys
        if source is None:
            source = text_in(header, "jku") or ""
            try:
                same = origin(source) == origin(place)
                safe = source.startswith("https:") or loopback(urlsplit(source).hostname or "")
            except ValueError:
                same = safe = False
            if not (same and safe):
                reason = "its key is published elsewhere; name the keys that you trust"
                continue
        if source not in trusted:
            trusted[source] = await _keys(source, fetch)
        kid, alg = header.get("kid"), str(header["alg"])
        for key in trusted[source]:
            if alg not in key.algorithms or (kid is not None and key.kid not in (kid, None)):
                continue
            reason = "its signature is not valid"
            for payload, body in payloads:
                if await asyncio.to_thread(_valid, protected, signed, body, key, alg):
                    return {k: v for k, v in payload.items() if k != SIGNATURES}
    raise _unproven(reason)


def reduce(value: JsonObject, kind: str = "AgentCard") -> JsonObject:
    """Return the fields that the schema of 1.0 has for a message, without those at a default."""
    kept: JsonObject = {}
    for name, field in FIELDS[kind].items():
        if name not in value or value[name] is None:
            continue
        found: Json = value[name]
        if field.kind not in (None, "*"):
            inner = field.kind or ""
            if field.shape == "list" and isinstance(found, list):
                found = list[Json]([reduce(as_object(one), inner) for one in found])
            elif field.shape == "map":
                entries = as_object(found).items()
                found = dict[str, Json]({k: reduce(as_object(v), inner) for k, v in entries})
            else:
                found = reduce(as_object(found), inner)
        if field.always or found not in ("", [], {}, False, 0):
            kept[name] = found
    return kept


def _header(protected: str) -> JsonObject | None:
    """Return the protected header of a signature, if such a signature can be accepted."""
    try:
        header = decode(base64.urlsafe_b64decode(protected + "=" * (-len(protected) % 4)))
    except (ValueError, binascii.Error, ParseError):
        return None
    if not isinstance(header, dict) or "crit" in header or "b64" in header:
        return None
    return header if header.get("alg") in VERIFIED_ALGORITHMS else None


async def _keys(source: str, fetch: ReadKeys) -> list[VerificationKey]:
    # The reason may show the name of a file, but not the folder where the operator keeps it.
    name = Path(urlsplit(source).path if "://" in source else source).name
    if "://" in source:
        found: Json = await fetch(source)
    else:
        try:
            found = decode(await asyncio.to_thread(Path(source).read_bytes))
        except OSError as error:
            raise _unproven(f"the keys in {name} cannot be read: {error.strerror}") from error
        except ParseError as error:
            raise _unproven(f"{name} should be a JSON Web Key Set") from error
    document = as_object(found)
    if not isinstance(document.get("keys"), list):
        raise _unproven(f"{name} should be a JSON Web Key Set")
    return verification_keys(document)


def _bodies(payloads: list[JsonObject]) -> list[tuple[JsonObject, str]]:
    """Return the documents that may have been signed, each with the bytes of its signature."""
    import rfc8785

    found: list[tuple[JsonObject, str]] = []
    for payload in payloads:
        with suppress(rfc8785.CanonicalizationError):
            body = base64.urlsafe_b64encode(canonical(payload)).rstrip(b"=").decode()
            found.append((payload, body))
    return found


def _valid(
    protected: str, signature: str, body: str, key: "VerificationKey", algorithm: str
) -> bool:
    import jwt

    try:
        jwt.PyJWS().decode(f"{protected}.{body}.{signature}", key.public, [algorithm])
    except (jwt.PyJWTError, ValueError):  # the latter for what is not base64
        return False
    return True


def _unproven(reason: str) -> PeerError:
    return PeerError(ErrorCode.INVALID_CARD, f"the agent card is not proven: {reason}")
