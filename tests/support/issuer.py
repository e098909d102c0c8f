"""An identity provider on this machine: real HTTP, real keys, and every way to misbehave."""

import asyncio
import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Literal

import jwt
import orjson
from cryptography.hazmat.primitives.asymmetric.ec import (
    SECP256R1,
    EllipticCurvePrivateKey,
    generate_private_key,
)
from jwt.algorithms import ECAlgorithm
from starlette.types import Receive, Scope, Send

from opencode_a2a.events import Json, JsonObject
from tests.support.running import answer, running

AUDIENCE = "https://agent.example"
Mode = Literal[
    "well", "broken", "garbage", "huge", "stalled", "another", "oauth", "redirect", "misnamed"
]


def new_key() -> EllipticCurvePrivateKey:
    return generate_private_key(SECP256R1())


@dataclass
class LocalIssuer:
    """Mints tokens, and publishes the keys they are signed with."""

    url: str = ""
    mode: Mode = "well"
    keys: dict[str, EllipticCurvePrivateKey] = field(default_factory=lambda: {"first": new_key()})
    extra: list[JsonObject] = field(default_factory=list[JsonObject])
    """Published beside them."""
    fetches: int = 0
    """How often the keys were fetched."""
    freed: asyncio.Event = field(default_factory=asyncio.Event)

    def rotate(self, kid: str) -> None:
        """Sign with a new key, and publish the old one no longer."""
        self.keys = {kid: new_key()}

    def mint(self, sub: Json = "ann", **claims: Json) -> str:
        """Return a token; a claim given as None is left out."""
        kid, key = next(reversed(self.keys.items()))
        now = int(time.time())
        standard: dict[str, Json] = {
            "iss": self.url,
            "aud": AUDIENCE,
            "sub": sub,
            "iat": now,
            "exp": now + 300,
        }
        kept = {name: one for name, one in (standard | claims).items() if one is not None}
        return jwt.encode(kept, key, "ES256", {"kid": kid})

    def document(self) -> JsonObject:
        """Return the set of keys."""
        keys: list[Json] = [
            {**orjson.loads(ECAlgorithm.to_jwk(key.public_key())), "kid": kid, "alg": "ES256"}
            for kid, key in self.keys.items()
        ]
        return {"keys": [*keys, *self.extra]}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        body: JsonObject | bytes = {}
        status, path = 200, scope["path"]
        if path == "/keys":
            self.fetches += 1
        match self.mode:
            case "broken":
                status = 500
            case "misnamed":
                await answer(send, 302, b"", b"text/plain", ((b"location", b"http://_xn--a/"),))
                return
            case "redirect":
                await answer(send, 302, b"", b"text/plain", ((b"location", b"/keys"),))
                return
            case "garbage":
                body = b"<html>" + b"[" * 5000
            case "huge":
                body = b'{"keys": [' + b" " * 1_000_000 + b"]}"
            case "stalled":
                await self.freed.wait()
                body = self.document()
            case _ if path == "/keys":
                body = self.document()
            case _:
                wanted = "oauth-authorization-server" if self.mode == "oauth" else "openid"
                status = 200 if wanted in path else 404
                name = "https://another.example" if self.mode == "another" else self.url
                body = {"issuer": name, "jwks_uri": f"{self.url}/keys"}
        whole = body if isinstance(body, bytes) else orjson.dumps(body)
        await answer(send, status, whole, b"application/json")


@asynccontextmanager
async def local_issuer() -> AsyncGenerator[LocalIssuer]:
    issuer = LocalIssuer()
    async with running(issuer, grace=0.1) as url:
        issuer.url = url
        yield issuer
        issuer.freed.set()
