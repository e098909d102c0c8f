"""The pages about the service itself, and what it writes down."""

import asyncio
import json

import httpx2
import pytest
import structlog
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route, Router
from starlette.types import ASGIApp, Receive, Scope, Send
from structlog.testing import capture_logs

from opencode_a2a.events import JsonObject
from opencode_a2a.ids import SCOPE_KEY, Caller, Principal
from opencode_a2a.web.edge import AccessLog, PayloadLog, Refusals
from opencode_a2a.web.observe import Busyness, Readiness, pages
from tests.support.running import answer, running


async def well() -> None:
    """Nothing is wrong."""


async def broken() -> None:
    raise ConnectionError("postgresql://me:secret@db failed")


async def hanging() -> None:
    await asyncio.Event().wait()


def client(app: ASGIApp) -> httpx2.AsyncClient:
    transport = httpx2.ASGITransport(app)  # type: ignore[arg-type] # the libraries spell ASGI apart
    return httpx2.AsyncClient(transport=transport, base_url="http://test")


def site(readiness: Readiness, *, figures: bool = True) -> ASGIApp:
    async def health(caller: Caller) -> JsonObject:
        return {"service": "s", "for": caller.principal}

    router = Router(pages(readiness, Busyness(lambda: 0), health, figures=figures))

    async def known(scope: Scope, receive: Receive, send: Send) -> None:
        scope[SCOPE_KEY] = Caller(Principal("ann"))
        await router(scope, receive, send)

    return Refusals(known)


async def test_the_service_is_ready_when_all_it_needs_is_well() -> None:
    async with client(site(Readiness({"database": well, "opencode": well}))) as http:
        response = await http.get("/readyz")

    assert response.status_code == 200
    assert response.json() == {
        "status": "ok",
        "checks": {"database": "ok", "opencode": "ok"},
    }


@pytest.mark.requirement("I13")
@pytest.mark.requirement("I12")
async def test_what_is_not_well_is_named_without_its_secrets() -> None:
    readiness = Readiness({"database": broken, "opencode": hanging, "x": well}, bound=0.02)
    async with client(site(readiness)) as http:
        ready, live = await http.get("/readyz"), await http.get("/livez")

    assert (ready.status_code, live.status_code) == (503, 200)
    assert ready.json() == {
        "status": "unavailable",
        "checks": {"database": "failed", "opencode": "failed", "x": "ok"},
    }


async def test_many_probes_ask_once_and_recovery_shows_after_a_second() -> None:
    now, asked, down = 0.0, 0, True

    async def check() -> None:
        nonlocal asked
        asked += 1
        await asyncio.sleep(0)
        if down:
            raise OSError

    readiness = Readiness({"database": check}, clock=lambda: now)
    first = await asyncio.gather(*(readiness.ask() for _ in range(10)))
    down = False
    cached = await readiness.ask()
    now = 1.0
    fresh = await readiness.ask()

    assert first == [{"database": False}] * 10
    assert (cached, fresh, asked) == ({"database": False}, {"database": True}, 2)


async def test_health_and_metrics_are_pages_to_be_read() -> None:
    async with client(AccessLog(site(Readiness({})))) as http:
        health = await http.get("/health")
        posted = await http.post("/metrics")
        other = await http.get("/secret-path-42")
        figures = await http.get("/metrics")

    assert health.json() == {"status": "ok", "service": "s", "for": "ann"}
    assert (posted.status_code, posted.headers["allow"]) == (405, "GET, HEAD")
    assert other.status_code == 404
    assert figures.headers["content-type"].startswith("text/plain; version=0.0.4")
    assert 'a2a_requests_total{method="GET",route="/health",status="200"}' in figures.text
    assert 'route="other",status="404"' in figures.text
    assert "a2a_request_duration_seconds_bucket" in figures.text
    assert "a2a_stream_active" in figures.text
    assert "secret-path-42" not in figures.text


async def test_figures_can_be_switched_off() -> None:
    async with client(site(Readiness({}), figures=False)) as http:
        assert (await http.get("/metrics")).status_code == 404


async def test_every_request_leaves_a_record_that_names_it() -> None:
    async def task(request: Request) -> Response:
        request.scope["caller"] = Caller(Principal("ann"))
        return Response()

    app = Router([Route("/tasks/{id}", task)])
    with capture_logs(processors=[structlog.contextvars.merge_contextvars]) as records:
        async with client(AccessLog(app)) as http:
            response = await http.get("/tasks/1?token=x", headers={"X-Request-Id": "gw-1"})

    record = records[0]
    assert (record["event"], record["principal"], record["route"], record["status"]) == (
        "request",
        "ann",
        "/tasks/{id}",
        200,
    )
    assert record["trace_id"] == response.headers["traceparent"].split("-")[1]
    assert record["request_id"]
    assert record["correlation"] == {"x-request-id": "gw-1"}
    assert record["duration_ms"] >= 0


async def logged(
    body: object, answered: bytes, media_type: bytes, limit: int = 0
) -> dict[str, object]:
    """Return the record that a request and its answer leave."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await receive()
        await answer(send, 200, answered, media_type)

    with capture_logs() as records:
        async with client(PayloadLog(app, limit)) as http:
            await http.post("/", json=body)
    return dict(records[0])


@pytest.mark.requirement("CONTRACT-8.2-8")
@pytest.mark.requirement("CONTRACT-8.2-31")
async def test_payloads_are_shown_without_secrets() -> None:
    body = {"method": "SendMessage", "params": {"api_key": "s3cret", "max_tokens": 5}}

    record = await logged(body, b'{"password":"s3cret","ok":true}', b"application/json")

    assert "s3cret" not in json.dumps(record)
    assert '"max_tokens":5' in str(record["request"])
    assert '"ok":true' in str(record["response"])
    assert record["response_bytes"] == 31


@pytest.mark.parametrize("method", ["opencode.sessions.shell", "a2a.interrupt.grants.list", "new"])
async def test_methods_beyond_a2a_are_logged_by_name_only(method: str) -> None:
    body = {"method": method, "params": {"command": "rm"}}

    record = await logged(body, b'{"output":"x"}', b"application/json")

    assert record["method"] == method
    assert (record["request"], record["response"]) == ("omitted: sensitive method",) * 2


async def test_streams_and_other_media_are_not_shown_and_the_rest_is_cut() -> None:
    body = {"method": "GetTask", "text": "y" * 100}

    stream = await logged(body, b"data: 1\n\n", b"text/event-stream")
    page = await logged(body, b"<html>", b"text/html")
    cut = await logged(body, b"{}", b"application/json", limit=20)

    assert (stream["response"], page["response"]) == ("streaming", "omitted: text/html")
    assert cut["request"] == '{"method":"GetTask",…'


@pytest.mark.parametrize("depth", [300, 900])
async def test_a_payload_that_is_nested_too_deeply_is_not_shown(depth: int) -> None:
    body: list[object] = []
    for _ in range(depth):
        body = [body]

    record = await logged(body, b"{}", b"application/json")

    assert record["request"] == f"omitted: {2 * depth + 2} bytes, nested too deeply"
    assert record["response"] == "{}"


async def test_what_runs_when_the_time_to_stop_is_over_is_told_so() -> None:
    begun = asyncio.Event()

    async def endless(scope: Scope, receive: Receive, send: Send) -> None:
        begun.set()
        await hanging()

    async with httpx2.AsyncClient(trust_env=False) as http:
        async with running(AccessLog(Refusals(endless)), grace=1) as url:
            asked = asyncio.create_task(http.get(f"{url}/tasks/1"))
            await begun.wait()
        refused = await asked

    assert refused.status_code == 503
    assert "shutting down" in refused.text
