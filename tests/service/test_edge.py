"""The edge of the running service: who may come in, with what, and what it says of itself."""

import asyncio
import base64
from collections.abc import AsyncGenerator

import httpx2
import orjson
import pytest
import pytest_asyncio

from tests.support.answers import HOST, LARGE, MEDIA_TYPE, ORIGIN, RATE, UNAUTHENTICATED, Wire
from tests.support.caller import Caller
from tests.support.front import STRANGERS, Serve
from tests.support.opencode import FakeOpenCode
from tests.support.service import TOKEN, Running

pytestmark = pytest.mark.asyncio(loop_scope="module")

HOSTILE = ["", "Bearer", "Bearer ", "Bearer  x", "Basic !!!", "Digest x", "Bearer " + "x" * 9000]


def reason(answer: httpx2.Response) -> str:
    return orjson.loads(answer.content)["error"]["details"][0]["reason"]


@pytest_asyncio.fixture(loop_scope="module")
async def anyone(service: Running) -> AsyncGenerator[httpx2.AsyncClient]:
    """A client without a credential."""
    async with httpx2.AsyncClient(base_url=service.url, trust_env=False) as http:
        yield http


@pytest.mark.requirement("7-authenticated")
@pytest.mark.requirement("13-every-request-authenticated")
@pytest.mark.parametrize("sent", [None, "Bearer wrong-but-long-enough-to-be-one"])
async def test_every_operation_wants_a_credential(
    caller: Caller, anyone: httpx2.AsyncClient, sent: str | None
) -> None:
    caller.http = anyone
    del caller.headers["Authorization"]
    every = ["send", "stream", "get", "list", "cancel", "subscribe", "card", "push list"]
    headers = {"Authorization": sent} if sent else {}

    for operation in ["send"] if sent else every:
        params = caller.message("hello") | {"id": "any"}
        answer = await caller.ask(operation, params, **headers)
        answer.refuses(UNAUTHENTICATED)
        assert answer.headers["www-authenticate"].startswith("Bearer")
        assert answer.headers["a2a-version"] == caller.headers["A2A-Version"]


@pytest.mark.requirement("7-authenticated")
@pytest.mark.parametrize("path", ["/health", "/metrics", "/", "/no/such/path", "/docs"])
async def test_nothing_else_is_open(anyone: httpx2.AsyncClient, path: str) -> None:
    for method in ("GET", "POST", "OPTIONS", "DELETE"):
        assert (await anyone.request(method, path)).status_code == 401


@pytest.mark.requirement("7-authenticated")
async def test_hostile_credentials_are_refused_and_throttled(serve: Serve) -> None:
    service = await serve(A2A_BEARER_TOKEN="guessed")  # noqa: S106 - not a secret
    url = f"{service.url}/health"

    async with httpx2.AsyncClient(trust_env=False) as http:
        early = [await http.get(url, headers={"Authorization": v.strip()}) for v in HOSTILE]
        guesses = [{"Authorization": f"Bearer no{n}"} for n in range(25)]
        later = [await http.get(url, headers=guess) for guess in guesses]
        right = await http.get(url, headers={"Authorization": "Bearer guessed"})
        unguessable = await http.get(url, headers={"Authorization": f"Bearer {STRANGERS[0]}"})
        probe = await http.get(f"{service.url}/livez")

    assert {answer.status_code for answer in early} == {401}
    assert (later[-1].status_code, reason(later[-1])) == (429, "TOO_MANY_FAILED_ATTEMPTS")
    assert int(later[-1].headers["retry-after"]) >= 1
    assert (right.status_code, unguessable.status_code, probe.status_code) == (429, 200, 200)


@pytest.mark.requirement("ours-principals")
async def test_basic_credentials_have_a_principal_of_their_own(serve: Serve) -> None:
    entry = {"scheme": "basic", "username": "ann", "password": "a-password-of-some-length"}
    service = await serve(A2A_STATIC_AUTH_CREDENTIALS=orjson.dumps([entry]).decode())
    mine = await Caller(service, Wire.RPC).send("hello")
    value = base64.b64encode(b"ann:a-password-of-some-length").decode()
    theirs = Caller(service, Wire.RPC)

    answer = await theirs.ask("get", {"id": mine.id}, Authorization=f"Basic {value}")

    assert answer.body["error"]["code"] == -32001


@pytest.mark.requirement("13-limits")
async def test_a_body_over_the_limit_is_refused(serve: Serve) -> None:
    service = await serve(A2A_MAX_REQUEST_BODY_BYTES="4096")
    for wire in Wire:
        caller = Caller(service, wire)
        answer = await caller.ask("send", caller.message("x" * 5000))
        answer.refuses(LARGE)
        assert b"4096" in answer.content


@pytest.mark.requirement("13-limits")
async def test_too_many_requests_are_told_to_wait(serve: Serve) -> None:
    service = await serve(A2A_RATE_LIMIT_ENABLED="true", A2A_RATE_LIMIT_MAX_REQUESTS="3")

    answers = [await service.http.get("/health") for _ in range(4)]
    probe = await service.http.get("/livez")

    assert [answer.status_code for answer in answers] == [200, 200, 200, 429]
    assert reason(answers[-1]) == "RATE_LIMIT_EXCEEDED"
    assert int(answers[-1].headers["retry-after"]) >= 1
    assert probe.status_code == 200
    for wire in Wire:
        caller = Caller(service, wire)
        (await caller.ask("send", caller.message("hello"))).refuses(RATE)


@pytest.mark.requirement("5-same-errors")
async def test_the_edge_answers_in_the_form_of_what_was_called(caller: Caller) -> None:
    body = caller.encode("send", caller.message("hello"))

    (await caller.post(body, Host="evil.example")).refuses(HOST)
    (await caller.post(body, Origin="https://evil.example")).refuses(ORIGIN)
    (await caller.post(body, Content_Type="text/plain")).refuses(MEDIA_TYPE)


async def test_without_a_version_the_edge_answers_in_the_default_one(serve: Serve) -> None:
    for version, wire in (("0.3", Wire.RPC03), ("1.0", Wire.RPC)):
        service = await serve(A2A_PROTOCOL_VERSION=version)
        caller = Caller(service, wire)
        del caller.headers["A2A-Version"]

        answer = await caller.ask("send", caller.message("hi"), Authorization="Bearer no")

        answer.refuses(UNAUTHENTICATED)
        assert answer.headers["a2a-version"] == version


async def test_another_verb_on_the_json_rpc_url_is_refused_in_json_rpc(service: Running) -> None:
    answer = await service.http.get("/", headers={"A2A-Version": "1.0"})

    body = orjson.loads(answer.content)
    assert (answer.status_code, body["jsonrpc"], body["error"]["code"]) == (405, "2.0", -32601)
    assert answer.headers["allow"] == "POST"


@pytest.mark.both_databases
@pytest.mark.requirement("13-limits")
async def test_open_tasks_of_a_caller_are_limited(serve: Serve, opencode: FakeOpenCode) -> None:
    service = await serve(A2A_MAX_TASKS_PER_PRINCIPAL="1")
    opencode.hold()
    caller = Caller(service, Wire.RPC)
    task = await caller.begin("hello")

    for wire in Wire:
        caller = Caller(service, wire)
        answer = await caller.ask("send", caller.message("hello"))
        assert b"LIMIT_EXCEEDED" in answer.content
        assert b"has 1 tasks that have not ended, which is the limit" in answer.content
        assert answer.status == (200 if wire.rpc else 429)
    opencode.release()
    await caller.ended(task.id)

    assert (await caller.send("hello")).state == "completed"


@pytest.mark.both_databases
@pytest.mark.requirement("13-limits")
@pytest.mark.parametrize("limit", ["A2A_MAX_TASKS_PER_PRINCIPAL", "A2A_MAX_OPEN_TASKS"])
async def test_exactly_as_many_tasks_are_admitted_at_once_as_there_is_room_for(
    serve: Serve, opencode: FakeOpenCode, limit: str
) -> None:
    service = await serve(**{limit: "5"}, A2A_TASK_STORE_BACKEND="database")
    opencode.hold()
    caller = Caller(service, Wire.REST)
    now = {"configuration": {"returnImmediately": True}}

    for _ in range(2):
        answers = await asyncio.gather(
            *(caller.ask("send", caller.message(f"task {n}") | now) for n in range(60))
        )

        admitted = [answer.task["id"] for answer in answers if answer.status == 200]
        refused = [answer for answer in answers if answer.status == 429]
        assert (len(admitted), len(refused)) == (5, 55)
        assert all(b'"LIMIT_EXCEEDED"' in answer.content for answer in refused)
        for task_id in admitted:
            await caller.ask("cancel", {"id": task_id})


@pytest.mark.requirement("ours-host-and-origin")
@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Host": "evil.example"}, 421),
        ({"Host": "localhost"}, 200),
        ({"Origin": "https://evil.example"}, 403),
        ({"Origin": "null"}, 403),
    ],
)
async def test_foreign_names_and_pages_are_refused(
    service: Running, headers: dict[str, str], status: int
) -> None:
    assert (await service.http.get("/health", headers=headers)).status_code == status


CARD = "/.well-known/agent-card.json"
PAGE = "https://app.example"


@pytest.mark.requirement("ours-host-and-origin")
@pytest.mark.parametrize("path", [CARD, "/.well-known/agent.json"])
async def test_any_page_may_read_the_public_card(anyone: httpx2.AsyncClient, path: str) -> None:
    for origin in ("https://any.example", "null"):
        asks = {"Origin": origin, "Access-Control-Request-Method": "GET"}
        asks["Access-Control-Request-Headers"] = "a2a-version, a2a-extensions"
        preflight = await anyone.options(path, headers=asks)
        card = await anyone.get(path, headers={"Origin": origin, "A2A-Version": "1.0"})

        assert (preflight.status_code, card.status_code) == (204, 200)
        for answer in (preflight, card):
            assert answer.headers["access-control-allow-origin"] == "*"
        assert "a2a-version" in preflight.headers["access-control-allow-headers"].lower()
    for probe in ("/livez", "/readyz"):
        answer = await anyone.get(probe, headers={"Origin": "https://any.example"})
        assert (answer.status_code, answer.headers.get("access-control-allow-origin")) == (
            200,
            None,
        )


@pytest.mark.requirement("ours-host-and-origin")
async def test_a_listed_page_calls_as_a_browser_does(serve: Serve) -> None:
    service = await serve(A2A_ALLOWED_ORIGINS=PAGE)
    wanted = {"authorization", "content-type", "a2a-version", "a2a-extensions", "last-event-id"}
    asks = {
        "Origin": PAGE,
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": ", ".join(sorted(wanted)),
    }

    async with httpx2.AsyncClient(base_url=service.url, trust_env=False) as http:
        preflight = await http.options("/", headers=asks)
        foreign = await http.options("/", headers=asks | {"Origin": "https://evil.example"})
        unknown = await http.post("/", json={}, headers={"Origin": PAGE})

    assert preflight.status_code == 204
    allowed = preflight.headers["access-control-allow-headers"].lower().split(", ")
    assert wanted <= set(allowed)
    assert "POST" in preflight.headers["access-control-allow-methods"].split(", ")
    assert foreign.status_code == 403
    assert "access-control-allow-origin" not in foreign.headers
    assert unknown.status_code == 401
    for wire in Wire:
        caller = Caller(service, wire)
        answer = await caller.ask("stream", caller.message("hello"), Origin=PAGE)
        assert answer.status == 200
        for told in (answer, preflight, unknown):
            assert told.headers["access-control-allow-origin"] == PAGE
            assert "origin" in told.headers["vary"].lower()
        exposed = answer.headers["access-control-expose-headers"].lower().split(", ")
        assert {"a2a-version", "www-authenticate", "retry-after"} <= set(exposed)


@pytest.mark.requirement("ours-pages")
@pytest.mark.requirement("I13")
async def test_the_service_says_how_it_is(service: Running, anyone: httpx2.AsyncClient) -> None:
    alive = await anyone.get("/livez")
    ready = await anyone.get("/readyz")
    health = orjson.loads((await service.http.get("/health")).content)
    figures = await service.http.get("/metrics")

    assert alive.status_code == 200
    assert orjson.loads(ready.content)["checks"] == {"database": "ok", "opencode": "ok"}
    assert (health["status"], health["service"]) == ("ok", "opencode-a2a")
    assert health["opencode"] == {"managed": False, "version": "1.18.33"}
    assert figures.headers["content-type"].startswith("text/plain")
    assert b"a2a_stream_requests_total" in figures.content


async def test_figures_can_be_switched_off(serve: Serve) -> None:
    service = await serve(A2A_METRICS_ENABLED="false")

    figures = await service.http.get("/metrics")
    described = orjson.loads((await service.http.get("/openapi.json")).content)

    assert figures.status_code == 404
    assert "/metrics" not in described["paths"]


@pytest.mark.requirement("I13")
async def test_without_opencode_the_service_is_alive_and_not_ready(serve: Serve) -> None:
    service = await serve(OPENCODE_BASE_URL="http://127.0.0.1:1")

    ready = await service.http.get("/readyz")
    alive = await service.http.get("/livez")

    assert (ready.status_code, alive.status_code) == (503, 200)
    assert orjson.loads(ready.content)["checks"] == {"database": "ok", "opencode": "failed"}
    assert b"127.0.0.1" not in ready.content


@pytest.mark.requirement("ours-trace-on-refusals")
async def test_every_answer_carries_a_trace(service: Running) -> None:
    trace = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    for headers in ({"Authorization": "Bearer no"}, {"Host": "evil.example"}, {}):
        answer = await service.http.get("/health", headers=headers | {"traceparent": trace})
        assert answer.headers["traceparent"].split("-")[1] == trace.split("-")[1]


async def test_ids_of_a_gateway_come_back_as_they_were_sent(service: Running) -> None:
    sent = {"X-Request-Id": "gw-1", "X-Amzn-Trace-Id": "Root=1-5759e988-bd862e3fe1be46a994272793"}
    for headers in ({"Authorization": "Bearer no"}, {}):
        answer = await service.http.get("/health", headers=headers | sent)
        assert {name: answer.headers.get(name) for name in sent} == sent
    odd = {"X-Request-Id": "two words", "X-Correlation-Id": "x" * 257}
    answer = await service.http.get("/health", headers=odd)
    assert not {name.lower() for name in odd} & answer.headers.keys()


@pytest.mark.requirement("ours-keep-alive")
async def test_a_quiet_stream_is_kept_alive(serve: Serve, opencode: FakeOpenCode) -> None:
    service = await serve(A2A_STREAM_KEEPALIVE_SECONDS="0.05")
    opencode.hold()
    for wire in Wire:
        caller = Caller(service, wire)
        verb, target = caller.target("stream", {})
        body = caller.encode("stream", caller.message("hello"))
        async with (
            asyncio.timeout(60),
            caller.http.stream(verb, target, content=body, headers=caller.headers) as response,
        ):
            pings = 0
            async for line in response.aiter_lines():
                pings += line.startswith(":")
                if pings == 4:
                    break


@pytest.mark.requirement("I5")
@pytest.mark.requirement("I14")
async def test_a_stream_that_is_cut_off_says_how_to_come_back(
    serve: Serve, opencode: FakeOpenCode
) -> None:
    service = await serve(A2A_STREAM_MAX_DURATION_SECONDS="0.3")
    opencode.hold()
    for wire in Wire:
        caller = Caller(service, wire)
        answer = await caller.ask("stream", caller.message("hello"))
        last = answer.content.decode().strip().split("\n\n")[-1]
        *kind, data = last.splitlines()
        # Clients of 0.3 JSON-RPC want a plain event.
        assert ("event: error" in kind) == (wire is not Wire.RPC03)
        told = orjson.loads(data.removeprefix("data: "))
        assert "STREAM_ENDED" in data
        assert "Last-Event-ID" in data
        assert ("jsonrpc" in told) == wire.rpc


@pytest.mark.requirement("I12")
async def test_no_answer_shows_a_secret(service: Running) -> None:
    paths = ["/health", "/metrics", "/readyz", "/extendedAgentCard", "/.well-known/agent-card.json"]
    for path in paths:
        answer = await service.http.get(path, headers={"A2A-Version": "1.0"})
        assert answer.status_code == 200
        assert TOKEN.encode() not in answer.content
        assert b"not-asked-for" not in answer.content
