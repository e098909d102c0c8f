"""Reads the public keys that others publish (JWK sets, RFC 7517).

Needs the extra ``security``; imported only if a setting requires it.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePublicKey
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from cryptography.hazmat.primitives.asymmetric.rsa import RSAPublicKey
from jwt import PyJWTError
from jwt.algorithms import ECAlgorithm, OKPAlgorithm, RSAAlgorithm

from opencode_a2a.events import JsonObject
from opencode_a2a.jsonguard import items_in, text_in

MOST_KEYS = 100
SHORTEST_RSA = 2048
_RSA = frozenset({"RS256", "RS384", "RS512", "PS256", "PS384", "PS512"})
_READ: Mapping[str, Callable[[JsonObject], object]] = {
    "RSA": RSAAlgorithm.from_jwk,
    "EC": ECAlgorithm.from_jwk,
    "OKP": OKPAlgorithm.from_jwk,
}
_CURVES = {"secp256r1": "ES256", "secp384r1": "ES384", "secp521r1": "ES512"}

PublicKey = RSAPublicKey | EllipticCurvePublicKey | Ed25519PublicKey


@dataclass(frozen=True, slots=True)
class VerificationKey:
    """A public key for verifying signatures."""

    kid: str | None
    algorithms: frozenset[str]
    """The algorithms that it may be used with; no key may be used as one of another type."""
    public: PublicKey


def verification_keys(document: JsonObject) -> list[VerificationKey]:
    """Return the usable keys of a set; a shared or private key is never among them."""
    listed = items_in(document, "keys")[:MOST_KEYS]
    return [key for jwk in listed if (key := _key(jwk)) is not None]


def _key(jwk: JsonObject) -> VerificationKey | None:
    read = _READ.get(text_in(jwk, "kty") or "")
    if read is None or jwk.get("use", "sig") != "sig":
        return None
    try:
        public = read(jwk)
    except (PyJWTError, ValueError, TypeError, AttributeError):  # whatever is wrong with it
        return None
    if isinstance(public, RSAPublicKey) and public.key_size >= SHORTEST_RSA:
        fitting = _RSA
    elif isinstance(public, EllipticCurvePublicKey) and public.curve.name in _CURVES:
        fitting = frozenset({_CURVES[public.curve.name]})
    elif isinstance(public, Ed25519PublicKey):
        fitting = frozenset({"EdDSA"})
    else:
        return None
    named = text_in(jwk, "alg")
    algorithms = fitting if named is None else fitting & {named}
    return VerificationKey(text_in(jwk, "kid"), algorithms, public) if algorithms else None
