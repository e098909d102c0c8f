"""Every extension method in front of an OpenCode that fails: each error is one it declares."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

import orjson
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from structlog.testing import capture_logs

from opencode_a2a.config import Settings, load
from opencode_a2a.errors import UpstreamError
from opencode_a2a.events import JsonObject
from opencode_a2a.extensions import INTERRUPTS, METHODS, RECOVERY
from opencode_a2a.extensions.registry import Method
from tests.support.caller import Caller
from tests.support.running import running
from tests.support.service import TOKEN, Running, serving

TRANSCRIPTS = Path(__file__).parent.parent / "transcripts"
NOWHERE = "http://127.0.0.1:9"
INTERRUPT_METHODS = {*INTERRUPTS.methods, *RECOVERY.methods}
"""Need OpenCode only for what nobody follows, and list what they know without it."""
FORCE: JsonObject = {"force": True}


async def garbage(_: Request) -> Response:
    return Response("<html>", media_type="text/html")


async def odd_json(_: Request) -> Response:
    return JSONResponse({"surprise": True})


async def broken(_: Request) -> Response:
    return JSONResponse({"name": "UnknownError", "data": {"message": "/secret/path"}}, 500)


async def healthy(_: Request) -> Response:
    """Answer as OpenCode does at the start of a service, which refuses to serve anything else."""
    return JSONResponse({"healthy": True, "version": "1.18.33"})


HEALTH = Route("/global/health", healthy)
FAILURES = {
    "UPSTREAM_PAYLOAD_ERROR": odd_json,
    "UPSTREAM_HTTP_ERROR": broken,
    "UPSTREAM_UNREACHABLE": None,
}


@asynccontextmanager
async def failing(state: Path, reason: str) -> AsyncGenerator[Running]:
    """Run a service whose OpenCode fails in one way."""
    answer = FAILURES[reason]
    verbs = ["GET", "POST", "PATCH", "DELETE"]
    routes = [HEALTH, Route("/{path:path}", answer or garbage, methods=verbs)]
    async with (
        running(Starlette(routes=routes)) as url,
        serving(settings_for(url if answer else NOWHERE, state)) as service,
    ):
        yield service


def settings_for(url: str, state: Path, **changes: str) -> Settings:
    workspace = state / "workspace"
    workspace.mkdir(exist_ok=True)
    (workspace / "README.md").touch()  # which the example of opencode.files.read names
    variables = {
        "A2A_BEARER_TOKEN": TOKEN,
        "A2A_STATE_DIR": str(state),
        "A2A_TASK_STORE_DATABASE_URL": f"sqlite:///{state / 'tasks.db'}",
        "A2A_ENABLE_SESSION_SHELL": "true",
        "A2A_ENABLE_WORKSPACE_MUTATIONS": "true",
        "OPENCODE_BASE_URL": url,
        "OPENCODE_WORKSPACE_ROOT": str(workspace),
        **changes,
    }
    return load({}, variables)


def expected(method: Method, reason: str) -> set[str]:
    """Return what a method may end in when OpenCode fails in this way."""
    if method.local:
        return {"OK"} | {e.reason for e in method.errors if not issubclass(e, UpstreamError)}
    known = ["OK", "INTERRUPT_REQUEST_NOT_FOUND"] if method.name in INTERRUPT_METHODS else []
    return {reason, *known}


@pytest.mark.parametrize("reason", FAILURES)
async def test_a_failing_opencode_is_told_by_a_declared_error(tmp_path: Path, reason: str) -> None:
    async with failing(tmp_path, reason) as service:
        caller = Caller(service)
        for method in METHODS:
            answer = await caller.answer(method.name, method.example, "0.3")
            error = answer.get("error", {"code": 0, "data": {"type": "OK"}})
            told = error["data"]["type"]

            assert told in expected(method, reason), (method.name, answer)
            declared_ = {one.reason: one.code for one in method.all_errors} | {"OK": 0}
            assert declared_[told] == error["code"], method.name
            assert "/secret" not in str(answer), method.name
            if told == reason:
                assert error["data"]["method"] == method.name


async def test_too_many_calls_at_once_are_refused_by_name(tmp_path: Path) -> None:
    entered, leave = asyncio.Event(), asyncio.Event()

    async def slow(_: Request) -> Response:
        entered.set()
        await leave.wait()
        return JSONResponse([])

    routes = [HEALTH, Route("/agent", slow), Route("/{path:path}", garbage)]
    async with (
        running(Starlette(routes=routes)) as url,
        serving(settings_for(url, tmp_path, OPENCODE_MAX_CONCURRENT_REQUESTS="1")) as service,
        asyncio.timeout(60),
    ):
        caller = Caller(service)
        first = asyncio.create_task(caller.method("opencode.agents.list"))
        await entered.wait()
        refused = await caller.refused("opencode.commands.list")
        leave.set()

        assert (refused.code, refused.reason) == (-31010, "UPSTREAM_BACKPRESSURE")
        assert refused.data == {"limit": "1"}
        assert await first == {"items": []}


async def test_an_opencode_2_that_comes_back_without_a_needed_call_makes_nothing_ready(
    tmp_path: Path,
) -> None:
    """Such as a release that somebody installed while the service ran."""
    contract = orjson.loads((TRANSCRIPTS / "2-branch" / "openapi.json").read_bytes())
    replaced = asyncio.Event()

    async def info(_: Request) -> Response:
        return JSONResponse({"version": "2.9.0", "pid": 1})

    async def described(_: Request) -> Response:
        return JSONResponse(contract)

    async def active(_: Request) -> Response:
        return JSONResponse({"data": {}})

    async def told() -> AsyncGenerator[str]:
        yield 'data: {"id":"evt_1","type":"server.connected","data":{}}\n\n'
        await replaced.wait()

    async def events(_: Request) -> Response:
        return StreamingResponse(told(), media_type="text/event-stream")

    async def status() -> int:
        return (await service.http.get("/readyz")).status_code

    routes = [
        Route("/api/info", info),
        Route("/openapi.json", described),
        Route("/api/session/active", active),
        Route("/api/event", events),
    ]
    with capture_logs() as logs:
        async with (
            running(Starlette(routes=routes)) as url,
            serving(settings_for(url, tmp_path)) as service,
            asyncio.timeout(60),
        ):
            assert await status() == 200
            del contract["paths"]["/api/session/{sessionID}/prompt"]
            replaced.set()
            while await status() == 200:  # noqa: ASYNC110 - no event
                await asyncio.sleep(0.1)

    broke = [one["error"] for one in logs if one["event"] == "feed broke"]
    assert "its API has no POST /api/session/{}/prompt" in broke[0]


async def test_a_worktree_on_another_machine_is_listed_but_not_touched(tmp_path: Path) -> None:
    """What would be lost with it cannot be seen from here."""
    touched: list[str] = []

    async def listed(_: Request) -> Response:
        return JSONResponse(["/elsewhere/one"])

    async def project(_: Request) -> Response:
        return JSONResponse({"id": "p", "worktree": "/elsewhere/project"})

    async def touch(request: Request) -> Response:
        touched.append(request.url.path)
        return JSONResponse(True)

    routes = [
        HEALTH,
        Route("/experimental/worktree", listed),
        Route("/project/current", project),
        Route("/{path:path}", touch, methods=["POST", "DELETE"]),
    ]
    request: JsonObject = {"directory": "/elsewhere/one"}
    async with (
        running(Starlette(routes=routes)) as url,
        serving(settings_for(url, tmp_path)) as service,
    ):
        caller = Caller(service)
        for method, sent in (("remove", request), ("remove", request | FORCE), ("reset", request)):
            refused = await caller.refused(f"opencode.worktrees.{method}", {"request": sent})
            assert refused.fields == ("request.directory",)
        assert await caller.method("opencode.worktrees.list") == {"items": ["/elsewhere/one"]}

    assert touched == []
