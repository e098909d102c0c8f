"""The service's own key: which files are taken, and what others can do with its signatures."""

from pathlib import Path

import jwt
import orjson
import pytest
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from cryptography.hazmat.primitives.asymmetric.types import PrivateKeyTypes
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    KeySerializationEncryption,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
)

from opencode_a2a.config import SettingsError, load
from opencode_a2a.signing import SigningKeys, signing_keys

P256 = ec.generate_private_key(ec.SECP256R1())
ED25519 = ed25519.Ed25519PrivateKey.generate()
RSA = rsa.generate_private_key(65537, 2048)


def written(
    file: Path, key: PrivateKeyTypes, locked: KeySerializationEncryption | None = None
) -> Path:
    content = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, locked or NoEncryption())
    file.touch(0o600)
    file.write_bytes(content)
    return file


def keys_of(**variables: str | Path) -> SigningKeys:
    given = {f"A2A_SIGNING_{name}": str(value) for name, value in variables.items()}
    keys = signing_keys(load({}, given).signing)
    assert keys is not None
    return keys


def test_without_a_key_nothing_is_signed() -> None:
    assert signing_keys(load({}, {}).signing) is None


@pytest.mark.parametrize(
    ("key", "algorithm"), [(P256, "ES256"), (ED25519, "EdDSA"), (RSA, "RS256")]
)
def test_a_token_is_verified_with_the_published_key(
    tmp_path: Path, key: PrivateKeyTypes, algorithm: str
) -> None:
    keys = keys_of(KEY_FILE=written(tmp_path / "key.pem", key))

    token = keys.current.jwt({"iss": "https://agent.example", "text": "Grüße"})

    (found,) = jwt.PyJWKSet.from_dict(keys.jwks).keys
    assert jwt.decode(token, found, [algorithm]) == {
        "iss": "https://agent.example",
        "text": "Grüße",
    }
    assert jwt.get_unverified_header(token) == {
        "typ": "JWT",
        "alg": algorithm,
        "kid": keys.current.published.kid,
    }


def test_only_public_halves_are_published_and_earlier_keys_too(tmp_path: Path) -> None:
    old = tmp_path / "old.pem"
    public = RSA.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    old.write_bytes(public)
    older = written(tmp_path / "older.pem", ED25519)

    keys = keys_of(
        KEY_FILE=written(tmp_path / "key.pem", P256), PREVIOUS_KEY_FILES=f"{old},{older}"
    )

    published = orjson.loads(orjson.dumps(keys.jwks))["keys"]
    assert [set(key) for key in published] == [
        {"kty", "crv", "x", "y", "kid", "alg", "use"},
        {"kty", "n", "e", "kid", "alg", "use"},
        {"kty", "crv", "x", "kid", "alg", "use"},
    ]
    assert published[0]["kid"] == keys.current.published.kid
    assert len({key["kid"] for key in published}) == 3


def test_a_key_is_named_by_its_thumbprint(tmp_path: Path) -> None:
    """The example of RFC 8037, appendix A.3."""
    private = bytes.fromhex("9d61b19deffd5a60ba844af492ec2cc44449c5697b326919703bac031cae7f60")
    key = ed25519.Ed25519PrivateKey.from_private_bytes(private)

    keys = keys_of(KEY_FILE=written(tmp_path / "key.pem", key))

    assert keys.current.published.kid == "kPrK_qmxVWaYVA9wwBF6Iuo3vVzz7TxHCTwXBygrS4k"


def test_a_key_that_everybody_can_read_is_refused(tmp_path: Path) -> None:
    file = written(tmp_path / "key.pem", P256)
    file.chmod(0o644)

    with pytest.raises(SettingsError, match=r"A2A_SIGNING_KEY_FILE: everybody .*chmod"):
        keys_of(KEY_FILE=file)

    file.chmod(0o640)
    assert keys_of(KEY_FILE=file)


def test_files_without_a_usable_key_are_refused_with_the_remedy(tmp_path: Path) -> None:
    garbage = tmp_path / "garbage.pem"
    garbage.touch(0o600)
    short = rsa.generate_private_key(65537, 1024)  # noqa: S505 - that is the point
    wrong = {
        tmp_path / "absent.pem": "No such file",
        tmp_path: "Is a directory",
        garbage: "holds no private key in PEM; make one with `openssl",
        written(tmp_path / "p384.pem", ec.generate_private_key(ec.SECP384R1())): "P-256",
        written(tmp_path / "short.pem", short): "2048 bits",
        written(tmp_path / "locked.pem", P256, BestAvailableEncryption(b"x")): "has a password",
    }
    for file, text in wrong.items():
        with pytest.raises(SettingsError, match=text):
            keys_of(KEY_FILE=file)


def test_a_guessed_address_is_not_signed(tmp_path: Path) -> None:
    everywhere = {"A2A_HOST": "0.0.0.0", "A2A_BEARER_TOKEN": "a-token-that-is-long-enough"}  # noqa: S104

    with pytest.raises(SettingsError, match="A2A_PUBLIC_URL: is part of"):
        load({}, {**everywhere, "A2A_SIGNING_KEY_FILE": str(tmp_path / "key.pem")})
