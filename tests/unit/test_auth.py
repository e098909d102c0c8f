"""Who a request comes from."""

import base64
import os
from pathlib import Path

import httpx2
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import SecretStr
from starlette.types import Receive, Scope, Send

from opencode_a2a.config import CredentialEntry, StateError
from opencode_a2a.errors import ServiceError, UnauthenticatedError
from opencode_a2a.ids import Caller, Principal
from opencode_a2a.rights import FULL
from opencode_a2a.web.auth import (
    AcceptedCredential,
    Authentication,
    Authenticator,
    Throttle,
    generate_token,
    peer_address,
)
from opencode_a2a.web.edge import Refusals
from tests.support.running import answer, raw, running

TOKEN = "a-token-that-nobody-can-guess"  # noqa: S105 # made up here
ANN = AcceptedCredential.of_entry(
    CredentialEntry(scheme="basic", username="ann", password=SecretStr("pässword:1")), FULL
)
SERVICE = AcceptedCredential.of_token(TOKEN, FULL)
ROBOT = AcceptedCredential.of_entry(
    CredentialEntry(
        scheme="bearer", principal="robot", token=SecretStr("robot-token"), credential_id="r1"
    ),
    FULL,
)


async def whoami(scope: Scope, receive: Receive, send: Send) -> None:
    caller: Caller | None = scope.get("caller")
    await answer(send, 200, repr(caller).encode(), b"text/plain")


def client(throttle: Throttle | None = None) -> httpx2.AsyncClient:
    app = Refusals(Authentication(whoami, Authenticator((SERVICE, ROBOT, ANN), throttle)))
    transport = httpx2.ASGITransport(app)  # type: ignore[arg-type] # the libraries spell ASGI apart
    return httpx2.AsyncClient(transport=transport, base_url="http://test")


def basic_value(text: str) -> str:
    return "Basic " + base64.b64encode(text.encode()).decode()


@pytest.mark.parametrize(
    ("value", "caller"),
    [
        (f"Bearer {TOKEN}", SERVICE.caller),
        (f"bearer  {TOKEN} ", SERVICE.caller),
        ("Bearer robot-token", Caller(Principal("robot"), frozenset(), "r1")),
        (
            basic_value("ann:pässword:1"),
            Caller(Principal("ann"), frozenset({"session_shell", "workspace_mutation"})),
        ),
    ],
)
async def test_a_good_credential_names_its_caller(value: str, caller: Caller) -> None:
    async with client() as http:
        response = await http.get("/tasks", headers={"authorization": value})

    assert (response.status_code, response.text) == (200, repr(caller))


def test_the_single_token_is_a_principal_of_its_own_that_does_not_show_it() -> None:
    assert AcceptedCredential.of_token("abc", FULL).caller.principal == "bearer:ba7816bf8f01"


@pytest.mark.requirement("I9")
@pytest.mark.parametrize(
    "value",
    [
        b"",
        b"Bearer",
        b"Bearer ",
        TOKEN.encode(),
        f"Basic {TOKEN}".encode(),
        b"Basic !!!",
        b"Basic " + base64.b64encode(b"ann"),
        b"Basic " + base64.b64encode(b"ann:wrong"),
        b"Basic " + base64.b64encode(b"\xff\xfe:\x00"),
        b"Bearer " + "tökén".encode(),
        b"Bearer \xff\xfe",
        b"Bearer " + b"x" * 20_000,
        b"Digest username=ann",
        b"Bearer " + base64.b64encode(b"ann:p\xc3\xa4ssword:1"),
    ],
)
async def test_a_bad_credential_is_refused_with_a_challenge(value: bytes) -> None:
    async with client() as http:
        response = await http.get("/tasks", headers=[(b"authorization", value)])

    error = response.json()["error"]
    assert (response.status_code, error["code"], error["status"]) == (401, 401, "UNAUTHENTICATED")
    assert response.headers.get_list("www-authenticate") == [
        'Bearer realm="opencode-a2a"',
        'Basic realm="opencode-a2a", charset="UTF-8"',
    ]


@given(st.binary(max_size=80))
async def test_no_value_whatever_is_more_than_refused(value: bytes) -> None:
    authenticator = Authenticator((SERVICE, ANN))

    with pytest.raises(ServiceError) as refused:
        await authenticator.admit([(b"authorization", value)], "192.0.2.1")

    assert refused.value.http in (401, 429)


async def test_no_other_header_says_who_calls() -> None:
    said = {
        **dict.fromkeys(("remote-user", "x-remote-user", "x-forwarded-user", "x-user"), "ann"),
        **dict.fromkeys(("x-principal", "x-auth-request-user", "x-goog-iap-jwt-assertion"), "ann"),
        "x-ssl-client-verify": "SUCCESS",
        "x-ssl-client-s-dn": "CN=ann",
        "x_api_key": TOKEN,
        "proxy-authorization": f"Bearer {TOKEN}",
        "cookie": f"authorization=Bearer {TOKEN}",
        "forwarded": "for=127.0.0.1;by=ann",
    }
    async with client() as http:
        alone = await http.get("/tasks", headers=said)
        robot = await http.get("/tasks", headers={**said, "authorization": "Bearer robot-token"})

    assert alone.status_code == 401
    assert robot.text == repr(ROBOT.caller)


async def test_two_credentials_at_once_are_none() -> None:
    twice = [("authorization", f"Bearer {TOKEN}"), ("authorization", f"Bearer {TOKEN}")]

    async with client() as http:
        response = await http.get("/tasks", headers=twice)

    assert response.status_code == 401


@pytest.mark.parametrize(
    "path", ["/.well-known/agent-card.json", "/.well-known/agent.json", "/livez", "/readyz"]
)
async def test_discovery_and_probes_are_open_to_be_read_only(path: str) -> None:
    async with client() as http:
        statuses = [
            (await http.request(method, path)).status_code
            for method in ("GET", "HEAD", "POST", "OPTIONS")
        ]

    assert statuses == [200, 200, 401, 401]


@pytest.mark.parametrize("path", ["/", "/health", "/metrics", "/livez/", "//livez", "/v1/card"])
async def test_everything_else_needs_a_credential(path: str) -> None:
    async with client() as http:
        statuses = [(await http.request(verb, path)).status_code for verb in ("GET", "OPTIONS")]

    assert statuses == [401, 401]


@pytest.mark.requirement("CONTRACT-8.2-5")
async def test_guessing_from_one_address_is_slowed_down() -> None:
    now = 0.0
    throttle = Throttle(3, 60, clock=lambda: now)

    async with client(throttle) as http:
        wrong = [
            await http.get("/tasks", headers={"authorization": f"Bearer {n}"}) for n in range(4)
        ]
        weak = await http.get("/tasks", headers={"authorization": "Bearer robot-token"})
        strong = await http.get("/tasks", headers={"authorization": f"Bearer {TOKEN}"})
        now = 61.0
        later = await http.get("/tasks", headers={"authorization": "Bearer robot-token"})

    assert [response.status_code for response in wrong] == [401, 401, 401, 429]
    assert wrong[-1].headers["retry-after"] == "60"
    assert wrong[-1].json()["error"]["details"][0]["reason"] == "TOO_MANY_FAILED_ATTEMPTS"
    assert (weak.status_code, strong.status_code, later.status_code) == (429, 200, 200)


def test_the_table_of_failures_is_bounded_and_forgets() -> None:
    now = 0.0
    throttle = Throttle(1, 60, max_keys=10, clock=lambda: now)
    for number in range(50):
        throttle.failed(b"%d" % number, b"wrong")

    full = len(throttle)
    now = 60.0
    throttle.failed(b"another", b"wrong")

    assert (full, len(throttle)) == (10, 1)


def test_made_up_names_do_not_push_out_what_counts_against_a_guesser() -> None:
    throttle = Throttle(5, 60, max_keys=100)
    for number in range(5):
        throttle.failed(b"target", b"%d" % number)

    for number in range(1000):
        throttle.failed(b"name %d" % number, b"wrong")

    assert throttle.wait(b"target") > 0
    assert len(throttle) == 100


async def test_requests_without_credential_do_not_count_as_guesses() -> None:
    throttle = Throttle(1, 60)
    authenticator = Authenticator((SERVICE,), throttle)

    for _ in range(5):
        with pytest.raises(UnauthenticatedError):
            await authenticator.admit([], "192.0.2.1")

    assert len(throttle) == 0


@pytest.mark.parametrize(
    ("client_address", "key"),
    [
        (("192.0.2.7", 1), "192.0.2.7"),
        (("2001:db8:1:2:3:4:5:6", 1), "2001:db8:1:2::/64"),
        (("::ffff:192.0.2.7", 1), "192.0.2.7"),
        (("unix", 1), "unix"),
        (None, "local"),
    ],
)
def test_a_peer_is_known_by_its_address(client_address: object, key: str) -> None:
    assert peer_address({"client": client_address}) == key


def test_a_service_without_credentials_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one"):
        Authenticator(())


@pytest.mark.requirement("I9")
async def test_garbage_on_the_wire_gets_an_answer_and_the_service_lives_on() -> None:
    app = Refusals(Authentication(whoami, Authenticator((SERVICE,))))
    async with running(app) as url:
        async with raw(url) as connection:
            await connection.send(
                b"GET / HTTP/1.1\r\nhost: x\r\nauthorization: B\xe9arer \xff\r\n\r\n"
            )
            refused = await connection.answer()
        async with raw(url) as connection:
            await connection.send(b"\x16\x03\x01 this is not HTTP\r\n\r\n")
            garbage = await connection.answer()
        async with httpx2.AsyncClient() as http:
            good = await http.get(url, headers={"authorization": f"Bearer {TOKEN}"})

    assert (refused[0], garbage[0], good.status_code) == (401, 400, 200)
    assert b'"BAD_REQUEST"' in garbage[2]


def test_a_token_is_made_once_and_kept_for_its_owner(tmp_path: Path) -> None:
    path = tmp_path / "state" / "token"

    token = generate_token(path)

    assert generate_token(path) == token
    assert len(token) >= 43
    assert (path.stat().st_mode & 0o777, path.parent.stat().st_mode & 0o777) == (0o600, 0o700)
    assert os.listdir(path.parent) == ["token"]


def test_a_token_that_others_can_read_or_place_is_not_used(tmp_path: Path) -> None:
    readable = tmp_path / "readable"
    readable.write_text("x" * 43)
    readable.chmod(0o644)
    linked = tmp_path / "linked"
    linked.symlink_to(readable)
    empty = tmp_path / "empty"
    empty.touch(0o600)

    for path, why in ((readable, "others can read"), (empty, "no token"), (linked, "symbolic")):
        with pytest.raises(StateError, match=why):
            generate_token(path)
