"""Keys for signatures: the service's own, and those that others publish.

``server.card`` signs cards, and ``push.sender`` the tokens for webhooks; the public keys are
published as a JSON Web Key Set (RFC 7517). ``web.oidc`` and ``peers.proof`` verify with the keys of
others. PyJWT comes with the extra ``security`` and is imported only if there is a key. Nothing here
knows what is signed.
"""

import base64
import hashlib
import os
import stat
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import orjson

from opencode_a2a.config import SettingsError, SigningSettings
from opencode_a2a.events import Json, JsonObject
from opencode_a2a.jsonguard import items_in, text_in

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa

    PrivateKey = ec.EllipticCurvePrivateKey | ed25519.Ed25519PrivateKey | rsa.RSAPrivateKey
    PublicKey = ec.EllipticCurvePublicKey | ed25519.Ed25519PublicKey | rsa.RSAPublicKey

JWKS_PATH = "/.well-known/jwks.json"
VERIFIED_ALGORITHMS = ("ES256", "ES384", "RS256", "PS256", "EdDSA")
"""Algorithms that are accepted for signatures of others; none with a shared secret."""
KEY_FILE = "A2A_SIGNING_KEY_FILE"
PREVIOUS_KEY_FILES = "A2A_SIGNING_PREVIOUS_KEY_FILES"
MOST_KEYS = 100
"""Keys of a set that are looked at."""
SHORTEST_RSA = 2048
_KEY_BYTES = 64 * 1024
_RSA = frozenset({"RS256", "RS384", "RS512", "PS256", "PS384", "PS512"})
_CURVES = {"secp256r1": "ES256", "secp384r1": "ES384", "secp521r1": "ES512"}
_MAKE_ONE = "make one with `openssl genpkey -algorithm EC -pkeyopt ec_paramgen_curve:P-256`"


@dataclass(frozen=True, slots=True)
class PublishedKey:
    """A public key as the key set shows it."""

    algorithm: str
    kid: str
    """The thumbprint of RFC 7638, which is the same for the same key everywhere."""
    jwk: JsonObject


@dataclass(frozen=True, slots=True)
class SigningKey:
    """The key that the service signs with."""

    published: PublishedKey
    _private: "PrivateKey" = field(repr=False)

    def jws(self, payload: bytes, header: Mapping[str, str]) -> tuple[str, str]:
        """Return the protected header and the signature of a JWS, each in base64url.

        The header consists of ``header``, ``alg`` and ``kid``.
        """
        from jwt.api_jws import PyJWS

        published = self.published
        whole = PyJWS().encode(
            payload, self._private, published.algorithm, {**header, "kid": published.kid}
        )
        protected, _, signature = whole.split(".")
        return protected, signature

    def jwt(self, claims: Mapping[str, Json]) -> str:
        """Return a JSON Web Token with these claims."""
        import jwt

        published = self.published
        return jwt.encode({**claims}, self._private, published.algorithm, {"kid": published.kid})


@dataclass(frozen=True, slots=True)
class SigningKeys:
    """The current key, and earlier keys that are still published."""

    current: SigningKey
    previous: tuple[PublishedKey, ...] = ()

    @property
    def jwks(self) -> JsonObject:
        keys = {key.kid: key.jwk for key in (self.current.published, *self.previous)}
        return {"keys": [*keys.values()]}


def signing_keys(settings: SigningSettings) -> SigningKeys | None:
    """Read the keys that the settings name; None if there is no key to sign with.

    Raises SettingsError that names the remedy.
    """
    if settings.key_file is None:
        return None
    require_security(KEY_FILE)
    private = _private_key(settings.key_file, read_private_file(settings.key_file, KEY_FILE))
    current = SigningKey(_published(private.public_key(), KEY_FILE, settings.key_file), private)
    return SigningKeys(current, _previous(settings.previous_key_files))


def require_security(variable: str) -> None:
    """Raise SettingsError if the packages that a setting needs are not installed."""
    try:
        import cryptography
        import jwt
        import rfc8785

        _ = cryptography, jwt, rfc8785
    except ImportError:
        raise SettingsError.of(
            variable,
            "needs packages that are not installed; install this program with its extra "
            "`security`, or run `pip install 'pyjwt[crypto]' rfc8785`",
        ) from None


def read_private_file(file: Path, variable: str) -> bytes:
    """Return the content of a file with a private key; refuse one that everybody can read.

    Its group may read it: containers and Debian's ``ssl-cert`` provide keys in this way.
    """
    try:
        descriptor = os.open(file, os.O_RDONLY | os.O_NONBLOCK)
        with os.fdopen(descriptor, "rb") as opened:
            mode = os.fstat(opened.fileno()).st_mode
            if not stat.S_ISREG(mode):
                raise SettingsError.of(variable, f"{file} is not a file")
            if mode & 0o007:
                raise SettingsError.of(
                    variable, f"everybody can read {file}; run `chmod o= {file}`"
                )
            return opened.read(_KEY_BYTES)
    except OSError as error:
        raise SettingsError.of(variable, f"cannot read {file}: {error.strerror}") from None


def _previous(files: Sequence[Path]) -> tuple[PublishedKey, ...]:
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
    from cryptography.hazmat.primitives.serialization import load_pem_public_key

    found: list[PublishedKey] = []
    for file in files:
        try:
            content = file.read_bytes()
        except OSError as error:
            raise SettingsError.of(
                PREVIOUS_KEY_FILES, f"cannot read {file}: {error.strerror}"
            ) from None
        try:
            key = load_pem_public_key(content)  # the private half need not be kept
        except (ValueError, UnsupportedAlgorithm):
            key = _private_key(file, content, PREVIOUS_KEY_FILES).public_key()
        if not isinstance(
            key, ec.EllipticCurvePublicKey | ed25519.Ed25519PublicKey | rsa.RSAPublicKey
        ):
            raise _unusable(PREVIOUS_KEY_FILES, file)
        found.append(_published(key, PREVIOUS_KEY_FILES, file))
    return tuple(found)


def _private_key(file: Path, content: bytes, variable: str = KEY_FILE) -> "PrivateKey":
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    try:
        key = load_pem_private_key(content, None)
    except TypeError:  # it is encrypted
        raise SettingsError.of(
            variable, f"{file} has a password; give the key without one"
        ) from None
    except (ValueError, UnsupportedAlgorithm):
        raise SettingsError.of(
            variable, f"{file} holds no private key in PEM; {_MAKE_ONE}"
        ) from None
    if not isinstance(
        key, ec.EllipticCurvePrivateKey | ed25519.Ed25519PrivateKey | rsa.RSAPrivateKey
    ):
        raise _unusable(variable, file)
    return key


def _published(key: "PublicKey", variable: str, file: Path) -> PublishedKey:
    from cryptography.hazmat.primitives.asymmetric import ec, rsa
    from jwt.algorithms import ECAlgorithm, OKPAlgorithm, RSAAlgorithm

    if isinstance(key, ec.EllipticCurvePublicKey):
        if key.curve.name != "secp256r1":
            raise _unusable(variable, file)
        algorithm, members = "ES256", ("crv", "kty", "x", "y")
        jwk = ECAlgorithm.to_jwk(key, as_dict=True)
    elif isinstance(key, rsa.RSAPublicKey):
        if key.key_size < SHORTEST_RSA:
            raise SettingsError.of(
                variable, f"the RSA key in {file} is too short; use {SHORTEST_RSA} bits or more"
            )
        algorithm, members = "RS256", ("e", "kty", "n")
        jwk = RSAAlgorithm.to_jwk(key, as_dict=True)
    else:
        algorithm, members = "EdDSA", ("crv", "kty", "x")
        jwk = OKPAlgorithm.to_jwk(key, as_dict=True)
    required: dict[str, Json] = {name: jwk[name] for name in members}
    thumbprint = hashlib.sha256(orjson.dumps(required, option=orjson.OPT_SORT_KEYS)).digest()
    kid = _base64url(thumbprint)
    return PublishedKey(algorithm, kid, {**required, "kid": kid, "alg": algorithm, "use": "sig"})


def _unusable(variable: str, file: Path) -> SettingsError:
    return SettingsError.of(
        variable, f"the key in {file} should be of P-256, Ed25519 or RSA; {_MAKE_ONE}"
    )


def _base64url(value: bytes) -> str:
    return base64.urlsafe_b64encode(value).rstrip(b"=").decode()


# --- keys of others ---------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class VerificationKey:
    """A public key for verifying signatures."""

    kid: str | None
    algorithms: frozenset[str]
    """The algorithms that it may be used with; no key may be used as one of another type."""
    public: "PublicKey"


def verification_keys(document: JsonObject) -> list[VerificationKey]:
    """Return the usable keys of a set; a shared or private key is never among them."""
    from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
    from jwt import PyJWTError
    from jwt.algorithms import ECAlgorithm, OKPAlgorithm, RSAAlgorithm

    readers = {
        "RSA": RSAAlgorithm.from_jwk,
        "EC": ECAlgorithm.from_jwk,
        "OKP": OKPAlgorithm.from_jwk,
    }
    keys: list[VerificationKey] = []
    for jwk in items_in(document, "keys")[:MOST_KEYS]:
        read = readers.get(text_in(jwk, "kty") or "")
        if read is None or jwk.get("use", "sig") != "sig":
            continue
        try:
            public = read(jwk)
        except (PyJWTError, ValueError, TypeError, AttributeError):  # whatever is wrong with it
            continue
        if isinstance(public, rsa.RSAPublicKey) and public.key_size >= SHORTEST_RSA:
            algorithms = _RSA
        elif isinstance(public, ec.EllipticCurvePublicKey) and public.curve.name in _CURVES:
            algorithms = frozenset({_CURVES[public.curve.name]})
        elif isinstance(public, ed25519.Ed25519PublicKey):
            algorithms = frozenset({"EdDSA"})
        else:
            continue
        if (named := text_in(jwk, "alg")) is not None:
            algorithms &= {named}
        if algorithms:
            keys.append(VerificationKey(text_in(jwk, "kid"), algorithms, public))
    return keys
