"""Tokens of an identity provider: the keys it signs with, and the callers its tokens stand for.

``auth`` asks ``Issuer`` about bearer tokens that it does not know itself. Keys are fetched in the
background, kept while the provider is unreachable, and fetched again for a token with an unknown
key; a request waits only for the latter. The settings alone decide what a token may do. What a
token says about where to find its key is never read.
"""

import asyncio
import math
import time
from collections.abc import Iterator
from functools import cache
from hashlib import sha256
from typing import NoReturn
from urllib.parse import urlsplit

import httpx2
import jwt
import structlog

from opencode_a2a import metrics
from opencode_a2a.bounds import Recent
from opencode_a2a.config import ISSUED_PRINCIPAL, OidcSettings, loopback
from opencode_a2a.errors import (
    AuthorizationForbiddenError,
    InvalidTokenError,
    IssuerUnavailableError,
    ParseError,
    UnauthenticatedError,
)
from opencode_a2a.events import JsonObject
from opencode_a2a.ids import Caller, Principal
from opencode_a2a.jsonguard import as_object, decode, text_in
from opencode_a2a.net.egress import Egress, EgressError
from opencode_a2a.net.http import client, read
from opencode_a2a.net.trust import machine_trust
from opencode_a2a.rights import CAPABILITIES, PROFILES, UNLIMITED, Budget, Rights
from opencode_a2a.server.contracts import openid_configuration
from opencode_a2a.signing import VerificationKey, verification_keys
from opencode_a2a.telemetry import AUDIT

logger = structlog.get_logger(__name__)

REFRESH_SECONDS = 900.0
RETRY_SECONDS = 5.0
"""The pause after the first failure; it doubles with each further one, up to a minute."""
KEPT_SECONDS = 86_400.0
"""How long keys are used while the provider is unreachable."""
UNKNOWN_KEY_SECONDS = 30.0
"""The shortest time between two fetches because of unknown keys."""
FETCH_SECONDS = 5.0
FETCH_BYTES = 256 * 1024
MOST_VERIFIED = 4096
VERIFIED_SECONDS = 60.0
"""How long a token that was verified is accepted without being verified again."""
_TYPES = frozenset({"jwt", "at+jwt", "application/at+jwt"})
_OAUTH = "/.well-known/oauth-authorization-server"


class KeysError(Exception):
    """The provider's keys could not be fetched; the text says why, for the operator."""


class Issuer:
    """An identity provider whose tokens are accepted."""

    def __init__(self, settings: OidcSettings, ceiling: Rights, budget: Budget = UNLIMITED) -> None:
        self._settings = settings
        self._ceiling = ceiling
        """The rights of the deployment, which no token exceeds."""
        self._budget = budget
        self._keys: list[VerificationKey] = []
        self._document: JsonObject = {}
        """The set of keys as it was fetched last."""
        self._fetched_at = self._refetched_at = -math.inf
        """When the keys were fetched last, and when they were fetched for an unknown key."""
        self._fetching = asyncio.Lock()
        self._trouble: str | None = None
        """Why the last fetch failed; None if it succeeded."""
        self._verified = Recent[bytes, tuple[Caller, float]](MOST_VERIFIED)
        """The caller of each verified token, by its digest, and until when that is valid."""
        self._tls = cache(machine_trust)  # takes milliseconds
        self.tried = asyncio.Event()
        """Set once the keys have been fetched for the first time, with or without success."""

    async def run(self) -> NoReturn:
        """Keep the keys up to date."""
        wait = RETRY_SECONDS
        while True:
            async with self._fetching:
                fetched = await self._refresh()
            self.tried.set()
            await asyncio.sleep(REFRESH_SECONDS if fetched else wait)
            wait = RETRY_SECONDS if fetched else min(2 * wait, 60.0)

    async def check(self) -> None:
        """Raise if there are no usable keys; while there are some, the provider may be away."""
        if not self._usable():
            raise IssuerUnavailableError

    async def verify(self, token: bytes) -> Caller:
        """Return the caller that a token stands for.

        Raise InvalidTokenError if the token is signed correctly but not valid here,
        AuthorizationForbiddenError if it lacks a scope, otherwise UnauthenticatedError.
        """
        digest = sha256(token).digest()
        caller, until = self._verified.get(digest, (None, 0.0))
        if caller is not None and time.monotonic() < until:
            self._verified.move_to_end(digest)
            return caller
        if not self._usable():
            raise IssuerUnavailableError().with_headers(
                ("Retry-After", str(math.ceil(RETRY_SECONDS)))
            )
        claims: JsonObject | None = None
        while claims is None:
            key, algorithm = await self._key_of(token)
            known = self._keys
            try:
                claims = self._claims(token, key, algorithm)
            except (jwt.InvalidSignatureError, jwt.InvalidKeyError):
                # Not every provider gives a new key a new id, or any id.
                await self._refetch(known)
                if self._keys is known:
                    raise UnauthenticatedError("The token's signature is wrong") from None
        caller = self._caller(claims)
        # The library has checked that it is a number.
        left = float(str(claims["exp"])) + self._settings.clock_skew_seconds - time.time()
        self._verified[digest] = (caller, time.monotonic() + min(left, VERIFIED_SECONDS))
        return caller

    async def examine(self) -> str:
        """Fetch the keys and return a sentence about them, for ``doctor``; raise KeysError."""
        keys = self._fitting(await self._fetch())
        return f"{self._settings.issuer}: {len(keys)} keys"

    def _usable(self) -> bool:
        return bool(self._keys) and time.monotonic() - self._fetched_at < KEPT_SECONDS

    async def _key_of(self, token: bytes) -> tuple[VerificationKey, str]:
        """Return the only key that a token can be signed with, and the algorithm."""
        try:
            header = jwt.get_unverified_header(token)
        except jwt.PyJWTError:
            header = {}
        algorithm, kid, kind = header.get("alg"), header.get("kid"), header.get("typ", "JWT")
        if not isinstance(algorithm, str) or not isinstance(kid, str | None):
            raise UnauthenticatedError("The token is not a JWT")
        if not isinstance(kind, str) or kind.lower() not in _TYPES or "crit" in header:
            raise UnauthenticatedError("The token is not an access token that is understood here")
        if algorithm not in self._settings.algorithms:
            raise UnauthenticatedError("The token is signed with an algorithm that is not accepted")
        if kid is not None and all(key.kid != kid for key in self._keys):
            await self._refetch(self._keys)
        fitting = [
            key
            for key in self._keys
            if algorithm in key.algorithms and (kid is None or key.kid == kid)
        ]
        if len(fitting) != 1:
            raise UnauthenticatedError(
                "The token is not signed with a key of the identity provider"
            )
        return fitting[0], algorithm

    async def _refetch(self, known: list[VerificationKey]) -> None:
        """Fetch the keys again if none of the known ones fits a token, but not too often."""
        async with self._fetching:
            # The keys may have been fetched while this waited for the lock.
            now = time.monotonic()
            if self._keys is known and now - self._refetched_at >= UNKNOWN_KEY_SECONDS:
                self._refetched_at = now
                await self._refresh()

    def _claims(self, token: bytes, key: VerificationKey, algorithm: str) -> JsonObject:
        settings = self._settings
        try:
            claims: JsonObject = jwt.decode(
                token,
                key.public,
                algorithms=[algorithm],
                audience=settings.audience,
                issuer=settings.issuer,
                leeway=settings.clock_skew_seconds,
                options={"require": ["iss", "aud", "exp", "sub"]},
            )
        except (jwt.InvalidSignatureError, jwt.InvalidKeyError):
            raise  # another key may fit
        except jwt.ExpiredSignatureError:
            raise InvalidTokenError("The token has expired; get a new one") from None
        except jwt.ImmatureSignatureError:
            raise InvalidTokenError("The token is not valid yet; check the clocks") from None
        except jwt.InvalidAudienceError:
            raise InvalidTokenError("The token is for another audience") from None
        except jwt.InvalidIssuerError:
            raise InvalidTokenError("The token is of another issuer") from None
        except jwt.MissingRequiredClaimError as error:
            raise InvalidTokenError(f"The token lacks the claim {error.claim}") from None
        except jwt.PyJWTError:
            raise UnauthenticatedError("The token is malformed") from None
        if "cnf" in claims:  # accepted without its key, it would be of use to a thief
            raise InvalidTokenError("The token is bound to a key, which is not checked here")
        return claims

    def _caller(self, claims: JsonObject) -> Caller:
        settings = self._settings
        name = claims.get(settings.principal_claim)
        if not isinstance(name, str) or not 0 < len(name) <= 256 or not name.isprintable():
            raise InvalidTokenError(f"The claim {settings.principal_claim} names nobody")
        scopes = frozenset(scopes_of(claims, settings.scope_claim))
        if missing := [scope for scope in settings.required_scopes if scope not in scopes]:
            wanted = " ".join(settings.required_scopes)
            raise AuthorizationForbiddenError(
                f"The token lacks the scope {missing[0]}"
            ).with_headers(
                ("WWW-Authenticate", f'Bearer error="insufficient_scope", scope="{wanted}"')
            )
        granted = [name for scope, name in settings.capability_scopes.items() if scope in scopes]
        profiles = (name for scope, name in settings.profile_scopes.items() if scope in scopes)
        return Caller(
            Principal(f"{ISSUED_PRINCIPAL}{settings.issuer}#{name}"),
            CAPABILITIES.intersection(granted),
            rights=self._ceiling & PROFILES[next(profiles, settings.profile)],
            supervises="supervise" in granted,
            budget=self._budget,
        )

    async def _refresh(self) -> bool:
        """Fetch the keys and return whether that worked; if not, the old ones stay."""
        try:
            document = await self._fetch()
            keys = self._fitting(document)
        except KeysError as error:
            metrics.OIDC_REFRESHES.labels("failed").inc()
            if str(error) != self._trouble:
                self._trouble = str(error)
                logger.warning("keys of the issuer could not be fetched", cause=self._trouble)
            return False
        metrics.OIDC_REFRESHES.labels("ok").inc()
        if self._trouble is not None:
            logger.warning("keys of the issuer fetched again")
        if document != self._document:
            AUDIT.info("issuer keys changed", keys=len(keys))
            self._verified.clear()  # a withdrawn key may have signed some of them
        self._keys, self._document, self._trouble = keys, document, None
        self._fetched_at = time.monotonic()
        return True

    def _fitting(self, document: JsonObject) -> list[VerificationKey]:
        """Return the keys with an accepted algorithm; raise KeysError if there is none."""
        accepted = self._settings.algorithms
        keys = verification_keys(document)
        if fitting := [key for key in keys if not key.algorithms.isdisjoint(accepted)]:
            return fitting
        raise KeysError("no key there fits A2A_OIDC_ALGORITHMS")

    async def _fetch(self) -> JsonObject:
        """Return the provider's set of keys, from where the settings or the provider say."""
        settings = self._settings
        issuer = settings.issuer or ""
        parts = urlsplit(issuer)
        # The operator chose the provider, which may well be in a private network.
        rules = Egress(allow_private=True)
        try:
            async with (
                asyncio.timeout(FETCH_SECONDS),
                client(rules, timeout=FETCH_SECONDS, tls=self._tls()) as http,
            ):
                if settings.jwks_url:
                    return await _get(http, settings.jwks_url)
                # OpenID's path, or that of RFC 8414.
                try:
                    document = await _get(http, openid_configuration(issuer))
                except KeysError:
                    root = f"{parts.scheme}://{parts.netloc}"
                    document = await _get(http, root + _OAUTH + parts.path.rstrip("/"))
                if document.get("issuer") != issuer:
                    named = text_in(document, "issuer")
                    raise KeysError(
                        f"it calls itself {named!r}; set A2A_OIDC_ISSUER to exactly that"
                    )
                url = text_in(document, "jwks_uri") or ""
                plain = url.startswith("http://") and loopback(parts.hostname or "")
                if not url.startswith("https://") and not plain:
                    raise KeysError(
                        "its discovery document names no https address of keys (jwks_uri)"
                    )
                return await _get(http, url)
        except TimeoutError:
            raise KeysError(f"{settings.issuer} does not answer in time") from None
        except (EgressError, httpx2.HTTPError, httpx2.InvalidURL) as error:
            cause = str(error) or type(error).__name__
            raise KeysError(f"{settings.issuer} cannot be reached: {cause}") from None


async def _get(http: httpx2.AsyncClient, url: str) -> JsonObject:
    headers = {"accept": "application/json", "accept-encoding": "identity"}
    async with http.stream("GET", url, headers=headers) as response:
        if response.status_code != 200:
            raise KeysError(f"{url} answers {response.status_code}")
        body = await read(response, FETCH_BYTES)
    if body is None:
        raise KeysError(f"the answer of {url} is larger than {FETCH_BYTES} bytes")
    try:
        return as_object(decode(body))
    except ParseError:
        raise KeysError(f"{url} does not answer with JSON") from None


def scopes_of(claims: JsonObject, claim: str | None) -> Iterator[str]:
    """Yield the scopes of a token; ``claim`` may be a dotted path to a nested claim."""
    names = ("scope", "scp") if claim is None else (claim,)
    found = next((claims[name] for name in names if name in claims), None)
    if found is None and claim is not None:
        found = claims
        for step in claim.split("."):
            found = as_object(found).get(step)
    if isinstance(found, str):
        yield from found.split()
    elif isinstance(found, list):
        yield from (one for one in found if isinstance(one, str))
