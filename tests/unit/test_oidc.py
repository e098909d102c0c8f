"""Tokens of an identity provider: which are taken, and for whom."""

import asyncio
import base64
import hmac
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import jwt
import orjson
import pytest
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from jwt.algorithms import ECAlgorithm, OKPAlgorithm, RSAAlgorithm

from opencode_a2a.config import OidcSettings
from opencode_a2a.errors import (
    AuthorizationForbiddenError,
    InvalidTokenError,
    IssuerUnavailableError,
    ServiceError,
    UnauthenticatedError,
)
from opencode_a2a.events import Json, JsonObject
from opencode_a2a.ids import Caller
from opencode_a2a.jsonguard import items_in
from opencode_a2a.rights import FULL, PROFILES
from opencode_a2a.signing import verification_keys
from opencode_a2a.web import oidc
from opencode_a2a.web.oidc import Issuer, KeysError, scopes_of
from tests.support.certificates import Authority, breaking_tls
from tests.support.issuer import AUDIENCE, LocalIssuer, Mode, local_issuer, new_key

RSA = rsa.generate_private_key(public_exponent=65537, key_size=2048)
SHORT = rsa.generate_private_key(public_exponent=65537, key_size=1024)  # noqa: S505 # it is refused


@pytest.fixture
async def provider() -> AsyncGenerator[LocalIssuer]:
    async with local_issuer() as issuer:
        yield issuer


@asynccontextmanager
async def following(provider: LocalIssuer, **settings: Any) -> AsyncGenerator[Issuer]:
    """Accept its tokens."""
    given = {"issuer": provider.url, "audience": [AUDIENCE], **settings}
    issuer = Issuer(OidcSettings.model_validate(given), FULL)
    running = asyncio.create_task(issuer.run())
    try:
        async with asyncio.timeout(60):
            await issuer.tried.wait()
        yield issuer
    finally:
        running.cancel()
        await asyncio.wait([running])


async def refused(issuer: Issuer, token: str) -> ServiceError:
    with pytest.raises(ServiceError) as error:
        await issuer.verify(token.encode())
    return error.value


def forged(header: Json, claims: Json, signature: bytes = b"x" * 64) -> str:
    """Return a token with whatever is given, signed by nobody."""
    parts = (orjson.dumps(header), orjson.dumps(claims), signature)
    return ".".join(base64.urlsafe_b64encode(part).rstrip(b"=").decode() for part in parts)


async def test_a_token_stands_for_its_issuer_and_subject(provider: LocalIssuer) -> None:
    async with following(provider) as issuer:
        caller = await issuer.verify(provider.mint("ann").encode())
        listed = await issuer.verify(provider.mint("ann", aud=["other", AUDIENCE]).encode())

    assert caller == listed == Caller(caller.principal)
    assert caller.principal == f"oidc:{provider.url}#ann"


@pytest.mark.parametrize("mode", ["well", "oauth"])
async def test_both_kinds_of_discovery_are_known(provider: LocalIssuer, mode: Mode) -> None:
    provider.mode = mode

    async with following(provider) as issuer:
        assert await issuer.verify(provider.mint().encode())
        await issuer.check()


async def test_keys_can_be_named_instead_of_discovered(provider: LocalIssuer) -> None:
    provider.mode = "oauth"

    async with following(provider, jwks_url=f"{provider.url}/keys") as issuer:
        assert await issuer.verify(provider.mint().encode())


def soon() -> int:
    return int(time.time()) + 300


async def test_a_signed_token_that_is_not_for_us_is_refused(provider: LocalIssuer) -> None:
    now = int(time.time())
    not_for_us: list[dict[str, Json]] = [
        {"aud": "https://another.example"},
        {"aud": [], "nonce": "of a sign-in elsewhere"},
        {"aud": None},
        {"iss": "https://another.example"},
        {"iss": None},
        {"exp": None},
        {"exp": now - 100},
        {"nbf": now + 1000},
        {"iat": now + 1000},
        {"sub": None},
        {"sub": ""},
        {"sub": "a" * 257},
        {"sub": "a\nb"},
        {"cnf": {"jkt": "a key of the client"}},
    ]

    async with following(provider) as issuer:
        for claims in not_for_us:
            error = await refused(issuer, provider.mint(**claims))
            assert type(error) is InvalidTokenError, claims


@pytest.mark.parametrize("wrong", ['"iss": ["%s"]', '"sub": 5', '"exp": "soon"', '"exp": 1e400'])
async def test_claims_of_a_wrong_kind_are_refused(provider: LocalIssuer, wrong: str) -> None:
    claims = f'"iss": "{provider.url}", "aud": "{AUDIENCE}", "sub": "ann", "exp": {soon()}'
    wrong = wrong.replace("%s", provider.url)
    key = provider.keys["first"]
    token = jwt.PyJWS().encode(f"{{{claims}, {wrong}}}".encode(), key, "ES256", {"kid": "first"})

    async with following(provider) as issuer:
        error = await refused(issuer, token)

    assert isinstance(error, UnauthenticatedError)


async def test_clocks_may_be_apart_by_what_is_allowed(provider: LocalIssuer) -> None:
    now = int(time.time())

    async with following(provider) as issuer:
        await issuer.verify(provider.mint(exp=now - 20).encode())
        await issuer.verify(provider.mint(nbf=now + 20).encode())
        late = await refused(issuer, provider.mint(exp=now - 40))
        early = await refused(issuer, provider.mint(nbf=now + 60))

    assert {type(late), type(early)} == {InvalidTokenError}


def _headers(provider: LocalIssuer) -> list[JsonObject]:
    public = items_in(provider.document(), "keys")[0]
    return [
        {"alg": "none", "kid": "first"},
        {"alg": "None"},
        {"alg": "nOnE"},
        {"alg": ""},
        {"alg": 5},
        {"alg": ["ES256"]},
        {},
        {"alg": "ES256"},
        {"alg": "ES384", "kid": "first"},
        {"alg": "RS256", "kid": "first"},
        {"alg": "ES256", "kid": 5},
        {"alg": "ES256", "kid": "../../etc/passwd"},
        {"alg": "ES256", "kid": "first' OR 1=1 --"},
        {"alg": "ES256", "kid": "k" * 5000},
        {"alg": "ES256", "kid": "first", "crit": ["exp"]},
        {"alg": "ES256", "kid": "first", "b64": False, "crit": ["b64"]},
        {"alg": "ES256", "kid": "first", "b64": False},
        {"alg": "ES256", "kid": "first", "typ": "dpop+jwt"},
        {"alg": "ES256", "kid": "first", "typ": 5},
        {"alg": "ES256", "kid": "first", "jwk": public},
        {"alg": "ES256", "kid": "x", "jku": f"{provider.url}/keys", "x5u": f"{provider.url}/keys"},
    ]


async def test_no_header_makes_a_forged_token_good(provider: LocalIssuer) -> None:
    claims: JsonObject = {"iss": provider.url, "aud": AUDIENCE, "sub": "ann", "exp": soon()}
    mallory = new_key()
    async with following(provider) as issuer:
        fetched = provider.fetches
        for header in _headers(provider):
            for signature in (b"", b"x" * 64):
                error = await refused(issuer, forged(header, claims, signature))
                assert type(error) is UnauthenticatedError, header
            if header.get("alg") == "ES256" and "b64" not in header:
                # With a right signature of a key that the token itself brings.
                own = {**header, "jwk": orjson.loads(ECAlgorithm.to_jwk(mallory.public_key()))}
                signed = forged(own, claims).rpartition(".")[0]
                made = ECAlgorithm(ECAlgorithm.SHA256).sign(signed.encode(), mallory)
                good = base64.urlsafe_b64encode(made).rstrip(b"=").decode()
                error = await refused(issuer, f"{signed}.{good}")
                assert type(error) is UnauthenticatedError, header

    assert provider.fetches <= fetched + 1


async def test_the_public_key_is_no_shared_secret(provider: LocalIssuer) -> None:
    claims: JsonObject = {"iss": provider.url, "aud": AUDIENCE, "sub": "ann", "exp": soon()}
    public = next(iter(provider.keys.values())).public_key()
    async with following(provider) as issuer:
        for written in (
            public.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo),
            orjson.dumps(provider.document()),
        ):
            unsigned = forged({"alg": "HS256", "kid": "first"}, claims).rpartition(".")[0]
            made = hmac.new(written, unsigned.encode(), "sha256").digest()
            signature = base64.urlsafe_b64encode(made)
            error = await refused(issuer, f"{unsigned}.{signature.rstrip(b'=').decode()}")
            assert type(error) is UnauthenticatedError


async def test_what_is_no_token_is_refused(provider: LocalIssuer) -> None:
    deep = base64.urlsafe_b64encode(b"[" * 6000).decode()
    junk = ["..", "a.b.c", "e30.e30.e30", "\x00.\xff.", "." * 500, "W10.W10.W10", "[" * 900 + ".."]
    async with following(provider) as issuer:
        for sent in (*junk, f"{deep}.{deep}.x", "x" * 1_000_000 + ".x.x"):
            assert type(await refused(issuer, sent)) is UnauthenticatedError, sent[:50]


async def test_keys_are_followed_without_an_outage(provider: LocalIssuer) -> None:
    async with following(provider) as issuer:
        old = provider.mint().encode()
        await issuer.verify(old)
        provider.keys["second"] = new_key()
        await issuer.verify(provider.mint().encode())
        await issuer.verify(old)

    assert provider.fetches == 2


async def test_a_key_that_was_taken_back_opens_nothing(
    provider: LocalIssuer, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with following(provider) as issuer:
        old = provider.mint()
        await issuer.verify(old.encode())
        provider.rotate("second")
        await issuer.verify(provider.mint().encode())
        error = await refused(issuer, old)

    assert type(error) is UnauthenticatedError


async def test_a_key_that_changes_under_its_name_is_followed(provider: LocalIssuer) -> None:
    async with following(provider) as issuer:
        old = provider.mint().encode()
        await issuer.verify(old)
        provider.rotate("first")
        for _ in range(3):
            assert await issuer.verify(provider.mint().encode())
        assert provider.fetches == 2
        for n in range(100):  # whoever forges a signature causes no further fetch
            forged_one = forged({"alg": "ES256", "kid": "first"}, {"n": n}, b"x" * 64)
            assert type(await refused(issuer, forged_one)) is UnauthenticatedError
        error = await refused(issuer, old.decode())

    assert type(error) is UnauthenticatedError
    assert provider.fetches == 2


async def test_ten_thousand_unknown_keys_cause_one_fetch(provider: LocalIssuer) -> None:
    strangers = [forged({"alg": "ES256", "kid": f"k{n}"}, {}) for n in range(10_000)]

    async with following(provider) as issuer:
        assert provider.fetches == 1
        results = await asyncio.gather(
            *(issuer.verify(token.encode()) for token in strangers), return_exceptions=True
        )
        assert await issuer.verify(provider.mint().encode())

    assert {type(one) for one in results} == {UnauthenticatedError}
    assert provider.fetches == 2


@pytest.mark.parametrize(
    "mode", ["broken", "garbage", "huge", "another", "redirect", "misnamed", "stalled"]
)
async def test_without_keys_no_token_can_be_verified(
    provider: LocalIssuer, mode: Mode, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(oidc, "FETCH_SECONDS", 0.2 if mode == "stalled" else 5.0)
    monkeypatch.setattr(oidc, "RETRY_SECONDS", 0.01)
    provider.mode = mode

    async with following(provider) as issuer:
        error = await refused(issuer, provider.mint())
        with pytest.raises(IssuerUnavailableError):
            await issuer.check()
        with pytest.raises(KeysError):
            await issuer.examine()
        provider.mode = "well"
        async with asyncio.timeout(60):
            while not await _verifies(issuer, provider.mint()):  # noqa: ASYNC110 - it goes on by itself
                await asyncio.sleep(0.01)
        await issuer.check()

    assert isinstance(error, IssuerUnavailableError)
    assert dict(error.headers)["Retry-After"].isdecimal()


@pytest.mark.requirement("I25")
@pytest.mark.parametrize("said", [b"", b"HTTP/1.1 200 OK\r\ncontent-length: 10\r\n\r\n{"])
async def test_a_provider_that_breaks_tls_does_not_end_the_service(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, said: bytes
) -> None:
    authority = Authority(tmp_path)
    monkeypatch.setenv("SSL_CERT_FILE", str(authority.file))
    async with breaking_tls(authority, said) as breaking:
        provider = LocalIssuer(url=breaking)
        async with following(provider) as issuer:
            with pytest.raises(KeysError, match="cannot be reached"):
                await issuer.examine()
            assert isinstance(await refused(issuer, provider.mint()), IssuerUnavailableError)


async def _verifies(issuer: Issuer, token: str) -> bool:
    try:
        await issuer.verify(token.encode())
    except IssuerUnavailableError:
        return False
    return True


@pytest.mark.parametrize("mode", ["broken", "garbage", "huge"])
async def test_keys_stay_while_the_provider_is_away(provider: LocalIssuer, mode: Mode) -> None:
    async with following(provider) as issuer:
        provider.mode = mode
        unknown = await refused(issuer, forged({"alg": "ES256", "kid": "new"}, {}))
        caller = await issuer.verify(provider.mint().encode())
        await issuer.check()

    assert type(unknown) is UnauthenticatedError
    assert caller.principal.endswith("#ann")


async def test_keys_do_not_stay_for_ever(
    provider: LocalIssuer, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with following(provider) as issuer:
        monkeypatch.setattr(oidc, "KEPT_SECONDS", 0.0)
        error = await refused(issuer, provider.mint())

    assert isinstance(error, IssuerUnavailableError)


async def test_verified_tokens_are_remembered_and_forgotten(
    provider: LocalIssuer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(oidc, "MOST_VERIFIED", 2)
    decoded: list[object] = []
    decode: Callable[..., Any] = jwt.decode

    def counting(*args: Any, **options: Any) -> Any:
        decoded.append(args)
        return decode(*args, **options)

    monkeypatch.setattr(jwt, "decode", counting)
    tokens = [provider.mint(f"caller {n}").encode() for n in range(3)]
    async with following(provider) as issuer:
        for token in (*tokens, tokens[2], tokens[1], tokens[0]):
            await issuer.verify(token)
        monkeypatch.setattr(oidc, "VERIFIED_SECONDS", 0.0)
        brief = provider.mint("brief").encode()
        await issuer.verify(brief)
        await issuer.verify(brief)

    assert len(decoded) == 3 + 1 + 2


async def test_scopes_decide_what_a_caller_may_do(provider: LocalIssuer) -> None:
    settings = {
        "required_scopes": ["a2a"],
        "capability_scopes": {"shell": "session_shell", "boss": "supervise"},
        "profile": "read-only",
        "profile_scopes": {"write": "auto", "careful": "ask"},
    }
    async with following(provider, **settings) as issuer:
        plain = await issuer.verify(provider.mint(scope="a2a shellx xshell").encode())
        much = await issuer.verify(provider.mint(scp=["a2a", "shell", "careful", "boss"]).encode())
        both = await issuer.verify(provider.mint(scope="careful a2a write").encode())
        lacking = await refused(issuer, provider.mint(scope="a2ax"))
        none = await refused(issuer, provider.mint(scope={"a2a": True}))

    assert (plain.capabilities, plain.supervises) == (frozenset(), False)
    assert plain.rights == PROFILES["read-only"]
    assert (much.capabilities, much.supervises) == ({"session_shell"}, True)
    assert much.rights == PROFILES["ask"]
    assert both.rights == PROFILES["auto"]
    assert isinstance(lacking, AuthorizationForbiddenError)
    assert isinstance(none, AuthorizationForbiddenError)
    assert dict(lacking.headers)["WWW-Authenticate"] == (
        'Bearer error="insufficient_scope", scope="a2a"'
    )


def test_the_ceiling_of_the_service_holds_for_every_token() -> None:
    claims: JsonObject = {"sub": "ann", "scope": "write"}
    settings = OidcSettings(
        issuer="https://login.example", audience=("x",), profile_scopes={"write": "auto"}
    )

    caller = Issuer(settings, PROFILES["ask"])._caller(claims)  # noqa: SLF001 # pyright: ignore[reportPrivateUsage] # no provider is needed

    assert caller.rights == PROFILES["ask"]


@pytest.mark.parametrize(
    ("claim", "claims", "scopes"),
    [
        (None, {"scope": "a b", "scp": "c"}, ["a", "b"]),
        (None, {"scp": "a b"}, ["a", "b"]),
        (None, {"scp": ["a", 5, "b"]}, ["a", "b"]),
        (None, {}, []),
        (None, {"scope": 5}, []),
        ("roles", {"roles": ["a b"], "scope": "c"}, ["a b"]),
        ("realm_access.roles", {"realm_access": {"roles": ["a"]}}, ["a"]),
        ("realm_access.roles", {"realm_access": ["roles"]}, []),
        ("https://x.example/roles", {"https://x.example/roles": ["a"]}, ["a"]),
    ],
)
def test_scopes_are_found(claim: str | None, claims: JsonObject, scopes: list[str]) -> None:
    assert list(scopes_of(claims, claim)) == scopes


def _jwk(text: str, **more: Json) -> Json:
    return {**orjson.loads(text), **more}


def test_only_keys_that_are_safe_are_used() -> None:
    elliptic, other = new_key(), ec.generate_private_key(ec.SECP256K1())
    edwards = ed25519.Ed25519PrivateKey.generate()
    keys: list[Json] = [
        _jwk(RSAAlgorithm.to_jwk(RSA.public_key()), kid="rsa"),
        _jwk(RSAAlgorithm.to_jwk(RSA.public_key()), kid="named", alg="PS256", use="sig"),
        _jwk(ECAlgorithm.to_jwk(elliptic.public_key()), kid="ec"),
        _jwk(OKPAlgorithm.to_jwk(edwards.public_key()), kid="ed"),
        _jwk(RSAAlgorithm.to_jwk(SHORT.public_key()), kid="short"),
        _jwk(RSAAlgorithm.to_jwk(RSA), kid="private"),
        _jwk(RSAAlgorithm.to_jwk(RSA.public_key()), kid="encrypts", use="enc"),
        _jwk(RSAAlgorithm.to_jwk(RSA.public_key()), kid="hmac", alg="HS256"),
        _jwk(ECAlgorithm.to_jwk(other.public_key()), kid="other curve"),
        {"kty": "oct", "k": "c2VjcmV0", "kid": "shared", "alg": "HS256"},
        {"kty": "RSA", "n": 5, "e": "AQAB", "kid": "broken"},
        {"kty": "EC", "crv": "P-256", "x": "!", "y": [], "kid": "broken"},
        {"kty": "OKP", "crv": "Ed25519", "x": "AA", "kid": "broken"},
        {"kty": ["RSA"]},
        "not a key",
    ]

    found = {key.kid: set(key.algorithms) for key in verification_keys({"keys": keys})}

    rsa_kinds = {f"{kind}{bits}" for kind in ("RS", "PS") for bits in (256, 384, 512)}
    assert found == {"rsa": rsa_kinds, "named": {"PS256"}, "ec": {"ES256"}, "ed": {"EdDSA"}}


def test_a_set_has_an_end() -> None:
    key: Json = _jwk(ECAlgorithm.to_jwk(new_key().public_key()))
    assert len(verification_keys({"keys": [key] * 1000})) == 100
    assert verification_keys({"keys": "none"}) == verification_keys({}) == []


async def test_a_token_without_a_key_id_needs_a_single_key(provider: LocalIssuer) -> None:
    def unnamed() -> str:
        _, claims, _ = provider.mint().split(".")
        header = base64.urlsafe_b64encode(b'{"alg":"ES256"}').rstrip(b"=").decode()
        signed = f"{header}.{claims}"
        key = next(reversed(provider.keys.values()))
        made = ECAlgorithm(ECAlgorithm.SHA256).sign(signed.encode(), key)
        return f"{signed}.{base64.urlsafe_b64encode(made).rstrip(b'=').decode()}"

    async with following(provider) as issuer:
        await issuer.verify(unnamed().encode())
        provider.keys["second"] = new_key()
        await issuer.verify(provider.mint().encode())
        error = await refused(issuer, unnamed())

    assert type(error) is UnauthenticatedError
