"""What a request must keep to."""

import asyncio
import gzip
from collections.abc import AsyncIterator

import httpx2
import orjson
import pytest
from pydantic import SecretStr
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from opencode_a2a.config import AccessSettings, LimitSettings, ServiceSettings, Settings
from opencode_a2a.ids import Caller, Principal
from opencode_a2a.rights import FULL
from opencode_a2a.telemetry import Trace, begin_trace, current_trace, trace_headers
from opencode_a2a.web import socket
from opencode_a2a.web.auth import AcceptedCredential, Authenticator
from opencode_a2a.web.edge import (
    BodyGuard,
    Boundary,
    Compression,
    RateLimit,
    Refusals,
    RequestRates,
    edge,
)
from tests.support.running import answer, raw, running

TOKEN = "a-token-that-nobody-can-guess"  # noqa: S105 - made up here
LOCAL = Settings(
    a2a=ServiceSettings(public_url="https://agent.example"),
    auth=AccessSettings(
        allowed_hosts=("*.lan.example",), allowed_origins=("https://app.example:8443",)
    ),
)
JSON = {"content-type": "application/json"}


async def echo(scope: Scope, receive: Receive, send: Send) -> None:
    """Answer with the body, as the first message brings it."""
    message = await receive()
    assert scope["method"] == "GET" or not message.get("more_body")
    await answer(send, 200, message.get("body", b""), b"application/octet-stream")


def client(app: ASGIApp) -> httpx2.AsyncClient:
    transport = httpx2.ASGITransport(Refusals(app))  # type: ignore[arg-type] # the libraries spell ASGI apart
    return httpx2.AsyncClient(transport=transport, base_url="http://127.0.0.1:8000")


def reason(response: httpx2.Response) -> str:
    """Return why a request to the JSON-RPC URL, in 0.3, or to a page was refused."""
    body = response.json()
    if "jsonrpc" in body:
        return body["error"]["data"]["type"]
    assert body["error"]["code"] == response.status_code
    return body["error"]["details"][0]["reason"]


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("127.0.0.1:8000", 200),
        ("localhost", 200),
        ("LOCALHOST.:1", 200),
        ("[::1]:8000", 200),
        ("agent.example", 200),
        ("a.lan.example", 200),
        ("lan.example", 421),
        ("evil.example", 421),
        ("127.0.0.1.evil.example", 421),
        ("127.0.0.1@evil.example", 421),
        ("evil.example/127.0.0.1", 421),
        ("", 421),
        ("[::1", 421),
        ("localhost:port", 421),
    ],
)
async def test_a_name_that_is_not_ours_is_refused_on_loopback(host: str, status: int) -> None:
    async with client(Boundary(echo, LOCAL)) as http:
        response = await http.get("/", headers={"host": host})

    assert response.status_code == status
    assert status == 200 or reason(response) == "HOST_NOT_ALLOWED"


@pytest.mark.parametrize(
    ("bind", "allowed", "status"),
    [("0.0.0.0", (), 200), ("0.0.0.0", ("a.example",), 421), ("::1", (), 421)],  # noqa: S104 # not bound
)
async def test_names_are_checked_on_loopback_or_when_listed(
    bind: str, allowed: tuple[str, ...], status: int
) -> None:
    settings = Settings(
        a2a=ServiceSettings(host=bind, public_url="http://agent.example"),
        auth=AccessSettings(allowed_hosts=allowed, bearer_token=SecretStr(TOKEN)),
    )

    async with client(Boundary(echo, settings)) as http:
        response = await http.get("/", headers={"host": "evil.example"})

    assert response.status_code == status


@pytest.mark.parametrize(
    ("bind", "method", "path", "status"),
    [
        ("0.0.0.0", "GET", "/livez", 200),  # noqa: S104 # not bound
        ("0.0.0.0", "GET", "/readyz", 200),  # noqa: S104 # not bound
        ("0.0.0.0", "POST", "/readyz", 421),  # noqa: S104 # not bound
        ("0.0.0.0", "GET", "/health", 421),  # noqa: S104 # not bound
        ("127.0.0.1", "GET", "/readyz", 421),
    ],
)
async def test_a_supervisor_probes_by_an_address_that_is_not_listed(
    bind: str, method: str, path: str, status: int
) -> None:
    settings = Settings(
        a2a=ServiceSettings(host=bind, public_url="http://agent.example"),
        auth=AccessSettings(allowed_hosts=("a.example",), bearer_token=SecretStr(TOKEN)),
    )

    async with client(Boundary(echo, settings)) as http:
        response = await http.request(method, path, headers={"host": "10.1.2.3:8000"})

    assert response.status_code == status


@pytest.mark.parametrize(
    ("origin", "status"),
    [
        ("https://agent.example", 200),
        ("https://agent.example:443", 200),
        ("https://app.example:8443", 200),
        ("http://127.0.0.1:8000", 200),
        ("http://agent.example", 403),
        ("https://app.example", 403),
        ("http://127.0.0.1:9999", 403),
        ("https://evil.example", 403),
        ("null", 403),
        ("", 403),
        ("https://[", 403),
    ],
)
async def test_only_our_own_and_listed_pages_may_call(origin: str, status: int) -> None:
    async with client(Boundary(echo, LOCAL)) as http:
        response = await http.get("/", headers={"origin": origin})

    assert response.status_code == status
    assert status == 200 or reason(response) == "ORIGIN_NOT_ALLOWED"


@pytest.mark.parametrize(
    ("host", "origin", "status"),
    [
        ("a.lan.example", "https://a.lan.example", 200),
        ("a.lan.example", "http://a.lan.example", 200),
        ("a.lan.example:8443", "https://a.lan.example:8443", 200),
        ("a.lan.example", "https://b.lan.example", 403),
        ("a.lan.example", "https://a.lan.example:8443", 403),
        ("evil.example", "https://evil.example", 421),
    ],
)
async def test_a_page_of_ours_is_known_behind_a_proxy_that_ends_tls(
    host: str, origin: str, status: int
) -> None:
    async with client(Boundary(echo, LOCAL)) as http:
        response = await http.get("/", headers={"host": host, "origin": origin})

    assert response.status_code == status


async def test_a_body_arrives_in_one_piece_up_to_the_limit() -> None:
    async def pieces() -> AsyncIterator[bytes]:
        for _ in range(10):
            yield b"0123456789"

    async with client(BodyGuard(echo, LimitSettings(max_request_body_bytes=100))) as http:
        whole = await http.post("/", content=pieces(), headers=JSON)
        empty = await http.post("/", content=b"")

    assert (whole.content, empty.content) == (b"0123456789" * 10, b"")


@pytest.mark.requirement("CONTRACT-7.7")
@pytest.mark.parametrize("announced", [True, False])
async def test_a_body_over_the_limit_is_refused_announced_or_not(announced: bool) -> None:
    async def pieces() -> AsyncIterator[bytes]:
        for _ in range(20):
            yield b"0123456789"

    body = b"0123456789" * 20 if announced else pieces()
    async with client(BodyGuard(echo, LimitSettings(max_request_body_bytes=100))) as http:
        response = await http.post("/", content=body, headers=JSON)

    assert (response.status_code, reason(response)) == (413, "REQUEST_BODY_TOO_LARGE")
    assert response.json()["error"]["data"]["max_bytes"] == 100


async def test_a_limit_of_zero_means_none() -> None:
    async with client(BodyGuard(echo, LimitSettings(max_request_body_bytes=0))) as http:
        response = await http.post("/", content=b"x" * 3_000_000, headers=JSON)

    assert len(response.content) == 3_000_000


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"content-type": "application/json; charset=UTF-8"}, 200),
        ({"content-type": "application/a2a+json"}, 200),
        ({"content-type": "text/json"}, 200),
        ({}, 200),
        ({"content-type": "application/json", "content-encoding": "identity"}, 200),
        ({"content-type": "text/plain"}, 415),
        ({"content-type": "application/x-www-form-urlencoded"}, 415),
        ({"content-type": "application/json; charset=latin-1"}, 415),
        ({"content-type": "json"}, 415),
        ({"content-type": "image/svg+json"}, 415),
        ({"content-type": "application/json", "content-encoding": "gzip"}, 415),
        ({"content-type": "application/json", "content-encoding": "br, x"}, 415),
    ],
)
async def test_only_plain_json_is_taken(headers: dict[str, str], status: int) -> None:
    async with client(BodyGuard(echo, LimitSettings())) as http:
        response = await http.post("/", content=gzip.compress(b"{}"), headers=headers)

    assert response.status_code == status


async def test_no_body_is_of_no_kind() -> None:
    async with client(BodyGuard(echo, LimitSettings())) as http:
        response = await http.post("/tasks/1:cancel", headers={"content-type": "text/plain"})

    assert response.status_code == 200


@pytest.mark.requirement("I9")
async def test_a_body_that_does_not_come_is_not_waited_for() -> None:
    app = Refusals(BodyGuard(echo, LimitSettings(), seconds=0.05))
    async with running(app) as url, raw(url) as connection, asyncio.timeout(60):
        await connection.send(b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\n{")
        status, headers, body = await connection.answer()
        rest = await connection.reader.read()

    assert (status, headers["connection"], rest) == (408, "close", b"")
    told = orjson.loads(body)
    assert (told["jsonrpc"], told["error"]["data"]["type"]) == ("2.0", "REQUEST_TIMEOUT")


async def test_a_sender_who_leaves_in_the_middle_reaches_nobody() -> None:
    reached = asyncio.Event()
    left = asyncio.Event()

    async def inner(scope: Scope, receive: Receive, send: Send) -> None:
        reached.set()

    guard = BodyGuard(inner, LimitSettings())

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await guard(scope, receive, send)
        left.set()

    async with running(app) as url, asyncio.timeout(60):
        async with raw(url) as connection:
            await connection.send(b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\n{")
        await left.wait()

    assert not reached.is_set()


@pytest.mark.requirement("I9")
async def test_headers_that_do_not_come_are_not_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(socket, "HEADER_SECONDS", 0.05)
    async with running(echo) as url, asyncio.timeout(60):
        async with raw(url) as started:
            await started.send(b"GET / HTTP/1.1\r\nhost: ")
            status, _, _ = await started.answer()
        async with raw(url) as silent:
            silence = await _until_closed(silent.reader)
        async with raw(url) as second:
            await second.send(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
            first_answer, _, _ = await second.answer()
            await second.send(b"\r\n")
            stray = await _until_closed(second.reader)

    assert (status, silence, first_answer, stray[:12]) == (408, b"", 200, b"HTTP/1.1 408")


async def test_endless_headers_are_refused() -> None:
    async with running(echo) as url, raw(url) as connection, asyncio.timeout(60):
        await connection.send(b"GET / HTTP/1.1\r\nhost: x\r\nx: " + b"y" * 300_000)
        status, _, body = await connection.answer()

    assert (status, b'"REQUEST_HEADERS_TOO_LARGE"' in body) == (431, True)


@pytest.mark.parametrize(
    "request_bytes",
    [
        b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: -1\r\n\r\n",
        b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 1\r\ncontent-length: 2\r\n\r\n{}",
        b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 2\r\ntransfer-encoding: chunked\r\n\r\n{}",
        b"POST / HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n",
        b"GET /\x00 HTTP/1.1\r\nhost: x\r\n\r\n",
        b"GET / HTTP/1.1\r\nbad header\r\n\r\n",
    ],
)
async def test_broken_http_is_a_bad_request(request_bytes: bytes) -> None:
    app = Refusals(BodyGuard(echo, LimitSettings()))
    async with running(app) as url, raw(url) as connection, asyncio.timeout(60):
        await connection.send(request_bytes)
        status, _, body = await connection.answer()

    assert (status, b'"BAD_REQUEST"' in body) == (400, True)


def rate(requests: int) -> LimitSettings:
    return LimitSettings(rate_limit_max_requests=requests, rate_limit_window_seconds=60)


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


async def test_requests_over_the_rate_wait_until_the_window_has_moved_on() -> None:
    clock = Clock()
    async with client(RateLimit(echo, RequestRates(rate(2), clock=clock))) as http:
        first = await http.get("/")
        clock.now += 30
        second, third = await http.get("/"), await http.get("/")
        clock.now += 30
        fourth, fifth = await http.get("/"), await http.get("/")

    statuses = [response.status_code for response in (first, second, third, fourth, fifth)]
    assert statuses == [200, 200, 429, 200, 429]
    assert (third.headers["retry-after"], third.headers["cache-control"]) == ("31", "no-store")
    assert reason(third) == "RATE_LIMIT_EXCEEDED"


async def test_each_credential_has_a_rate_of_its_own_and_probes_have_none() -> None:
    statuses: list[int] = []

    async def inner(scope: Scope, receive: Receive, send: Send) -> None:
        await answer(send, 200, b"", b"text/plain")

    async def note(message: Message) -> None:
        if message["type"] == "http.response.start":
            statuses.append(message["status"])

    async def nothing() -> Message:
        raise AssertionError

    limit = Refusals(RateLimit(inner, RequestRates(rate(1))))
    ann, bob = Principal("ann"), Principal("bob")
    for caller in (Caller(ann), Caller(bob), Caller(ann, credential_id="1"), Caller(ann), None):
        scope: Scope = {"type": "http", "path": "/", "headers": [], "query_string": b""}
        await limit({**scope, "client": ("192.0.2.1", 1), "caller": caller}, nothing, note)
    for _ in range(3):
        await limit({"type": "http", "path": "/livez", "client": None}, nothing, note)

    assert statuses == [200, 200, 200, 429, 200, 200, 200, 200]


@pytest.mark.requirement("CONTRACT-8.2-36")
def test_the_table_of_rates_is_bounded_and_keeps_no_empty_keys() -> None:
    clock = Clock()
    limit = RequestRates(rate(5), max_keys=10, clock=clock)
    for number in range(50):
        limit.take(f"key {number}")

    full = len(limit)
    clock.now += 60
    limit.take("another")

    assert (full, len(limit)) == (10, 1)


def test_a_trace_is_taken_up_or_begun() -> None:
    sent = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"

    trace = begin_trace(sent, "vendor=1")
    token = current_trace.set(trace)
    onward = trace_headers()
    current_trace.reset(token)

    assert (trace.traceparent, trace.state) == (sent, "vendor=1")
    assert onward == {"traceparent": sent, "tracestate": "vendor=1"}
    assert Trace.load(trace.stored) == trace
    for bad in (
        None,
        "",
        "x",
        sent.upper(),
        "ff" + sent[2:],
        sent + "-x",
        f"00-{'0' * 32}-{'1' * 16}-00",
    ):
        begun = begin_trace(bad)
        assert begun.trace_id not in ("0" * 32, trace.trace_id)
        assert Trace.load(begun.stored) == begun
        assert begin_trace(begun.traceparent).trace_id == begun.trace_id


def service(app: ASGIApp = echo, *, most: int = 100) -> ASGIApp:
    limits = LimitSettings(max_request_body_bytes=1000, rate_limit_max_requests=most)
    settings = LOCAL.model_copy(update={"limits": limits})
    authenticator = Authenticator([AcceptedCredential.of_token(TOKEN, FULL)])
    return edge(app, settings, authenticator, RequestRates(limits))


@pytest.mark.requirement("CONTRACT-8.2-32")
async def test_every_refusal_tells_its_trace_and_its_reason() -> None:
    sent = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
    traced = {"traceparent": sent}
    good = {"authorization": "Bearer a-token-that-nobody-can-guess", **traced}
    async with client(service(most=2)) as http:
        refusals = [
            await http.post("/", headers={**good, "host": "evil.example"}),
            await http.post("/", headers={**good, "origin": "https://evil.example"}),
            await http.post("/", headers=traced),
            await http.post("/", headers=good, content=b"x" * 2000),
            await http.post("/", headers={**good, "content-type": "text/plain"}, content=b"x"),
            await http.post("/", headers=good),
        ]

    assert [response.status_code for response in refusals] == [421, 403, 401, 413, 415, 429]
    assert {response.headers["traceparent"] for response in refusals} == {sent}
    assert all(reason(response) for response in refusals)


@pytest.mark.requirement("I9")
@pytest.mark.parametrize(
    ("target", "version"),
    [
        ("/?A2A-Version=1.0", "1.0"),
        ("/", "0.3"),
        ("/?A2A-Version=9", "0.3"),
        ("/?" + "a&" * 500, "0.3"),
        ("/tasks", "1.0"),
        ("/v1/tasks", "0.3"),
        ("/v1/card", "0.3"),
        ("/agent/authenticatedExtendedCard", "0.3"),
    ],
)
async def test_a_refusal_is_of_the_version_that_was_called(target: str, version: str) -> None:
    async with client(service()) as http:
        response = await http.get(target)

    assert (response.status_code, response.headers["a2a-version"]) == (401, version)


async def test_large_answers_are_compressed_and_small_ones_are_not() -> None:
    async def inner(scope: Scope, receive: Receive, send: Send) -> None:
        await answer(send, 200, b"x" * int(scope["path"][1:]), b"application/json")

    good = {"authorization": "Bearer a-token-that-nobody-can-guess"}
    async with client(service(inner)) as http:
        small, large = await http.get("/100", headers=good), await http.get("/9000", headers=good)

    assert "content-encoding" not in small.headers
    assert (large.headers["content-encoding"], len(large.content)) == ("gzip", 9000)


async def _until_closed(reader: asyncio.StreamReader) -> bytes:
    """Read to the end, however the other side ends it."""
    try:
        return await reader.read()
    except ConnectionResetError:
        return b""


@pytest.mark.parametrize(
    ("accepted", "length", "packed"),
    [
        ("gzip", 9000, True),
        ("deflate, gzip;q=0.5", 9000, True),
        ("br, gzip;q=0.5", 9000, True),
        ("gzip;q=0", 9000, False),
        ("gzip;q=0.0, br", 9000, False),
        ("identity", 9000, False),
        ("gzip", 8191, False),
        ("gzip", 200_000, True),
    ],
)
async def test_answers_are_packed_only_for_those_who_unpack(
    accepted: str, length: int, packed: bool
) -> None:
    async def inner(scope: Scope, receive: Receive, send: Send) -> None:
        await answer(send, 200, b"x" * length, b"application/json")

    async with client(Compression(inner, 8192)) as http:
        response = await http.get("/", headers={"accept-encoding": accepted})

    assert ("content-encoding" in response.headers, len(response.content)) == (packed, length)


async def test_a_stream_is_never_held_back_for_packing() -> None:
    sent: list[Message] = []

    async def inner(scope: Scope, receive: Receive, send: Send) -> None:
        kind = [(b"content-type", b"text/event-stream")]
        await send({"type": "http.response.start", "status": 200, "headers": kind})
        await send({"type": "http.response.body", "body": b"x" * 9000, "more_body": True})
        assert len(sent) == 2
        await send({"type": "http.response.body", "body": b"x" * 9000})

    async def nothing() -> Message:
        raise AssertionError

    async def note(message: Message) -> None:
        sent.append(message)

    headers = [(b"accept-encoding", b"gzip")]
    await Compression(inner, 8192)({"type": "http", "headers": headers}, nothing, note)

    assert [message.get("body") for message in sent] == [None, b"x" * 9000, b"x" * 9000]
