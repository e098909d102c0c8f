"""Web Push: a browser that is subscribed gets a message that only it can read."""

import asyncio
import hmac
import os
from base64 import urlsafe_b64decode, urlsafe_b64encode
from collections.abc import AsyncGenerator
from typing import Any

import jwt
import orjson
import pytest
import pytest_asyncio
import sqlalchemy as sa
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from sqlalchemy.engine import Connection
from structlog.testing import capture_logs

from opencode_a2a.store.schema import tasks, webhooks
from tests.support.caller import Caller
from tests.support.front import STRANGERS, started
from tests.support.opencode import FakeOpenCode
from tests.support.receiver import Receiver, receiving
from tests.support.service import Running

pytestmark = pytest.mark.asyncio(loop_scope="module")

CURVE = ec.SECP256R1()


def encode(data: bytes) -> str:
    return urlsafe_b64encode(data).decode().rstrip("=")


def decode(text: str) -> bytes:
    return urlsafe_b64decode(text + "=" * (-len(text) % 4))


class Browser:
    """The part of a browser that has the keys of a subscription; written from RFC 8188 and 8291."""

    def __init__(self, endpoint: str) -> None:
        self._key = ec.generate_private_key(CURVE)
        self._point = self._key.public_key().public_bytes(
            Encoding.X962, PublicFormat.UncompressedPoint
        )
        self._secret = os.urandom(16)
        keys = {"p256dh": encode(self._point), "auth": encode(self._secret)}
        self.subscription: dict[str, Any] = {"endpoint": endpoint, "keys": keys}

    def read(self, body: bytes) -> Any:
        salt, size, rest = body[:16], int.from_bytes(body[16:20], "big"), body[20:]
        theirs, sealed = rest[1 : 1 + rest[0]], rest[1 + rest[0] :]
        assert len(sealed) <= size
        public = ec.EllipticCurvePublicKey.from_encoded_point(CURVE, theirs)
        shared = self._key.exchange(ec.ECDH(), public)

        def derive(salt: bytes, material: bytes, info: bytes, size: int) -> bytes:
            extracted = hmac.digest(salt, material, "sha256")
            return hmac.digest(extracted, info + b"\1", "sha256")[:size]

        info = b"WebPush: info\0" + self._point + theirs
        material = derive(self._secret, shared, info, 32)
        key = derive(salt, material, b"Content-Encoding: aes128gcm\0", 16)
        nonce = derive(salt, material, b"Content-Encoding: nonce\0", 12)
        plain = AESGCM(key).decrypt(nonce, sealed, None)
        content, delimiter, padding = plain.rpartition(b"\2")
        assert (delimiter, padding.strip(b"\0")) == (b"\2", b"")
        return orjson.loads(content)


@pytest_asyncio.fixture(loop_scope="module")
async def receiver() -> AsyncGenerator[Receiver]:
    async with receiving() as made:
        yield made


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def service(
    shared_opencode: FakeOpenCode, tmp_path_factory: pytest.TempPathFactory, database: str
) -> AsyncGenerator[Running]:
    told = [{"kind": "webpush", "contact": "mailto:me@example.org", "principals": ["*"]}]
    changes = {
        "A2A_NOTIFY": orjson.dumps(told).decode(),
        "A2A_PUSH_ALLOW_PRIVATE_HOSTS": "true",
    }
    state = tmp_path_factory.mktemp("state")
    async with started(shared_opencode, state, **changes) as running:
        yield running


async def subscribe(service: Running, token: str, subscription: object) -> int:
    headers = {"Authorization": f"Bearer {token}", "A2A-Version": "1.0"}
    path = "/notices/subscription"
    return (await service.http.post(path, json=subscription, headers=headers)).status_code


async def test_a_subscribed_browser_is_told_of_a_request(
    service: Running, opencode: FakeOpenCode, receiver: Receiver
) -> None:
    opencode.play("permission-once")
    base = receiver.url.removesuffix("/hook")
    mine, gone, other = (Browser(f"{base}/{name}") for name in ("mine", "gone", "other"))
    token, caller = STRANGERS[0], Caller(service, token=STRANGERS[0])
    for browser, owner in ((mine, token), (mine, token), (other, STRANGERS[1]), (gone, token)):
        assert await subscribe(service, owner, browser.subscription) == 204
    shown = await service.http.get("/notices/subscription", headers=caller.headers)

    receiver.gone.add("/gone")
    task = await caller.send("hello")
    await receiver.until(lambda it: len(it.received) == 2)
    await caller.send("yes", task=task.id)
    told = await receiver.until(lambda it: len(it.received) == 3)

    # Browsers are told at the same time.
    told[:2] = sorted(told[:2], key=lambda one: one.path, reverse=True)
    assert [one.path for one in told] == ["/mine", "/gone", "/mine"]
    message = mine.read(told[0].body)
    assert message["text"].startswith("OpenCode asks for permission to run a command.")
    assert message["url"].startswith(f"{service.url}/link#per_")
    assert message["key"] not in told[0].headers.values()
    assert mine.read(told[2].body)["text"] == "A task is completed."
    assert b"OpenCode" not in told[0].body
    scheme, _, proof = told[0].headers["authorization"].partition(" ")
    given = dict(part.strip().split("=", 1) for part in proof.split(","))
    assert (scheme, given["k"]) == ("vapid", shown.json()["public_key"])
    key = ec.EllipticCurvePublicKey.from_encoded_point(CURVE, decode(given["k"]))
    claims = jwt.decode(given["t"], key, algorithms=["ES256"], audience=base)
    assert claims["sub"] == "mailto:me@example.org"
    assert told[0].headers["content-encoding"] == "aes128gcm"
    assert told[0].headers["urgency"] == "high"


async def test_without_a_browser_nothing_is_tried_again(
    service: Running, opencode: FakeOpenCode, receiver: Receiver
) -> None:
    opencode.play("permission-once")
    token, caller = STRANGERS[2], Caller(service, token=STRANGERS[2])
    gone = Browser(f"{receiver.url}/gone")

    with capture_logs() as records:
        without = await caller.send("hello")
        await caller.send("yes", task=without.id)
        await served(service, without.id)
        assert await subscribe(service, token, gone.subscription) == 204
        receiver.answers.append((410, {}))
        withdrawn = await caller.send("hello")
        await receiver.until(lambda it: len(it.received) == 1)
        await caller.send("yes", task=withdrawn.id)
        await served(service, withdrawn.id)

    assert len(receiver.received) == 1
    assert [one for one in records if one["log_level"] in ("warning", "error")] == []


async def served(service: Running, task_id: str) -> None:
    """Wait until all that can be told of a task has been told."""
    assert service.service.parts is not None
    database = service.service.parts.database
    joined = webhooks.join(tasks, webhooks.c.task_no == tasks.c.no)
    query = sa.select(webhooks.c.state).select_from(joined).where(tasks.c.id == task_id)

    def states(connection: Connection) -> list[str]:
        return list(connection.execute(query).scalars())

    async with asyncio.timeout(60):
        while await database.read(states) != ["done"]:
            pass


async def test_only_a_subscription_of_a_browser_is_taken_and_only_from_a_caller(
    service: Running, stranger: str
) -> None:
    right = Browser("https://push.example.org/1").subscription
    for wrong in (
        {},
        {**right, "endpoint": "ftp://push.example.org/1"},
        {**right, "endpoint": "https://push.example.org/\0"},  # which PostgreSQL cannot store
        {**right, "keys": {"p256dh": "AAAA", "auth": "AAAA"}},
        {**right, "keys": {"p256dh": "☺", "auth": "☺"}},
    ):
        assert await subscribe(service, stranger, wrong) == 400
    assert await subscribe(service, "nobody", right) == 401
    unknown = await service.http.delete(
        "/notices/subscription",
        params={"endpoint": "https://push.example.org/\0"},
        headers={"Authorization": f"Bearer {stranger}"},
    )
    assert unknown.status_code == 204
    page = await service.http.get("/notices", headers={"Authorization": ""})
    assert page.headers["content-security-policy"].endswith("trusted-types worker")
    console = await service.http.get("/console", headers={"Authorization": ""})
    assert console.headers["content-security-policy"].endswith("trusted-types 'none'")
