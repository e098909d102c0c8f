"""Web Push: messages to browsers that a person has subscribed in the console.

A message is encrypted for the browser (RFC 8291), so that its push service sees none of it, and
signed with a key of ours (VAPID, RFC 8292). The address of a subscription comes from a caller: it
is called by the rules for webhooks. Needs the extra ``security``.
"""

import asyncio
import hashlib
import os
import time
from base64 import urlsafe_b64decode, urlsafe_b64encode
from contextlib import suppress
from typing import Annotated
from urllib.parse import urlsplit

import jwt
import orjson
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from opencode_a2a.clock import now_ms
from opencode_a2a.errors import InvalidParamsError, LimitExceededError, StoreUnavailableError
from opencode_a2a.ids import SCOPE_KEY, Caller
from opencode_a2a.net.egress import Egress, EgressError, check
from opencode_a2a.notices.targets import Http, Note
from opencode_a2a.push.notification import Receipt, Skipped, Taken
from opencode_a2a.server.http import OrjsonResponse
from opencode_a2a.store import subscriptions
from opencode_a2a.store.database import Database
from opencode_a2a.store.subscriptions import SubscriptionRow
from opencode_a2a.telemetry import AUDIT

SUBSCRIPTION = "/notices/subscription"
MOST = 20
"""Browsers that one caller may subscribe."""
RECORD = 4096
"""Size of the one record of a message."""
TOKEN_SECONDS = 12 * 3600
MESSAGE_SECONDS = 24 * 3600
"""How long a push service keeps a message for a browser that is offline."""
_CURVE = ec.SECP256R1()


def encode(data: bytes) -> str:
    return urlsafe_b64encode(data).decode().rstrip("=")


def decode(text: str) -> bytes:
    return urlsafe_b64decode(text + "=" * (-len(text) % 4))


def point(key: ec.EllipticCurvePublicKey) -> bytes:
    return key.public_bytes(Encoding.X962, PublicFormat.UncompressedPoint)


def encrypt(
    content: bytes,
    browser: bytes,
    secret: bytes,
    *,
    key: ec.EllipticCurvePrivateKey | None = None,
    salt: bytes | None = None,
) -> bytes:
    """Encrypt a message for a browser's public key and its authentication secret (RFC 8291).

    ``key`` and ``salt`` are made for each message.
    """
    key, salt = key or ec.generate_private_key(_CURVE), salt or os.urandom(16)
    theirs = ec.EllipticCurvePublicKey.from_encoded_point(_CURVE, browser)
    ours = point(key.public_key())

    def derive(size: int, salt: bytes, info: bytes, material: bytes) -> bytes:
        return HKDF(SHA256(), size, salt, info).derive(material)

    shared = key.exchange(ec.ECDH(), theirs)
    material = derive(32, secret, b"WebPush: info\0" + browser + ours, shared)
    content_key = derive(16, salt, b"Content-Encoding: aes128gcm\0", material)
    nonce = derive(12, salt, b"Content-Encoding: nonce\0", material)
    # One record, which is the last: its padding begins with a 2.
    sealed = AESGCM(content_key).encrypt(nonce, content + b"\2", None)
    return salt + RECORD.to_bytes(4, "big") + bytes([len(ours)]) + ours + sealed


class BrowserTarget:
    """The target ``webpush``: all browsers that a caller has subscribed."""

    def __init__(
        self, secret: bytes, contact: str, database: Database, rules: Egress, seconds: float
    ) -> None:
        number = int.from_bytes(hashlib.sha512(b"vapid " + secret).digest(), "big")
        # Of the order of the curve, less the few numbers that are not a key.
        self._key = ec.derive_private_key(number % (2**256 - 2**225) + 1, _CURVE)
        self.public_key = encode(point(self._key.public_key()))
        self._contact = contact
        self._database = database
        self._rules = rules
        self._http = Http(seconds, rules)

    async def send(self, principal: str, note: Note) -> Receipt:
        """Send to all browsers; one that wants no more is forgotten.

        If some have taken it, it is not sent again to the others: they would show it twice. If
        there are none, nobody has to be told.
        """
        known = await self._database.read(subscriptions.of_principal, principal)
        sent = await asyncio.gather(*(self._send(one, note) for one in known))
        receipts = list[Receipt]()
        for one, receipt in zip(known, sent, strict=True):
            if receipt.name not in ("http_404", "http_410"):
                receipts.append(receipt)
                continue
            with suppress(StoreUnavailableError):  # else it is forgotten with the next message
                await self._database.write(subscriptions.delete, principal, one.endpoint)
        taken = [one for one in receipts if isinstance(one, Taken)]
        return (taken or receipts or [Skipped("no_browser")])[0]

    async def _send(self, one: SubscriptionRow, note: Note) -> Receipt:
        content = orjson.dumps(
            {"title": note.title, "text": note.text, "url": note.url, "key": note.key}
        )
        url = urlsplit(one.endpoint)
        claims = {
            "aud": f"{url.scheme}://{url.netloc}",
            "exp": int(time.time()) + TOKEN_SECONDS,
            "sub": self._contact,
        }
        token = jwt.encode(claims, self._key, algorithm="ES256")
        headers = {
            "Authorization": f"vapid t={token}, k={self.public_key}",
            "Content-Encoding": "aes128gcm",
            "Content-Type": "application/octet-stream",
            "TTL": str(MESSAGE_SECONDS),
            "Urgency": "high" if note.urgent else "normal",
            "Topic": encode(hashlib.sha256(note.key.encode()).digest()[:24]),
        }
        body = encrypt(content, decode(one.public_key), decode(one.secret))
        return await self._http.post(one.endpoint, body, headers=headers)

    async def aclose(self) -> None:
        await self._http.aclose()

    # What the console asks for

    def routes(self) -> list[BaseRoute]:
        return [
            Route(SUBSCRIPTION, self._show, methods=["GET"]),
            Route(SUBSCRIPTION, self._subscribe, methods=["POST"]),
            Route(SUBSCRIPTION, self._unsubscribe, methods=["DELETE"]),
        ]

    async def _show(self, request: Request) -> Response:
        return OrjsonResponse({"public_key": self.public_key})

    async def _subscribe(self, request: Request) -> Response:
        caller: Caller = request.scope[SCOPE_KEY]
        sent = _read(_Subscribed, await request.body())
        try:
            parts = check(sent.endpoint, self._rules)
            if parts.scheme != "https" and not self._rules.allow_private:
                raise EgressError("should be an https URL")
            browser, secret = decode(sent.keys.p256dh), decode(sent.keys.auth)
            encrypt(b"", browser, secret)
        except (EgressError, ValueError, UnsupportedAlgorithm):
            text = "is not a subscription of a browser"
            raise InvalidParamsError.of("endpoint", text) from None
        row = SubscriptionRow(
            sent.endpoint, caller.principal, sent.keys.p256dh, sent.keys.auth, now_ms()
        )
        if not await self._database.write(subscriptions.put, row, MOST):
            raise LimitExceededError("Too many browsers are subscribed; end one first", limit=MOST)
        AUDIT.info("browser subscribed", principal=caller.principal, host=parts.hostname)
        return Response(status_code=204)

    async def _unsubscribe(self, request: Request) -> Response:
        caller: Caller = request.scope[SCOPE_KEY]
        endpoint = request.query_params.get("endpoint", "")
        if "\0" not in endpoint:  # else it is not subscribed, and not every database takes it
            await self._database.write(subscriptions.delete, caller.principal, endpoint)
        AUDIT.info("browser unsubscribed", principal=caller.principal)
        return Response(status_code=204)


class _Keys(BaseModel):
    model_config = ConfigDict(frozen=True)

    p256dh: Annotated[str, Field(max_length=200)]
    auth: Annotated[str, Field(max_length=100)]


class _Subscribed(BaseModel):
    model_config = ConfigDict(frozen=True)

    endpoint: Annotated[str, Field(max_length=2000)]
    keys: _Keys


def _read(kind: type[_Subscribed], body: bytes) -> _Subscribed:
    try:
        return kind.model_validate_json(body)
    except ValidationError:
        raise InvalidParamsError.of("endpoint", "is not a subscription of a browser") from None
