"""The scripted model on a socket: an OpenAI-compatible server, and how OpenCode is wired to it.

``serve --demo`` and the live tests start it. It listens on loopback only, and knows nothing of
A2A.
"""

import asyncio
import contextlib
import socket
from collections import deque
from collections.abc import Callable, Coroutine, Generator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Self

import orjson
import uvicorn
from pydantic import ValidationError
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from opencode_a2a_demo import chat
from opencode_a2a_demo.answers import NOTHING_LEFT, demo_script, errand
from opencode_a2a_demo.chat import MODEL, ChatRequest
from opencode_a2a_demo.player import Gates, NamedGate, Player, Progress
from opencode_a2a_demo.script import (
    Reply,
    Script,
    ScriptError,
    digest_of,
    find_script,
    last_prompt,
    place_after,
    reason_of,
)

PROVIDER = "demo"
MODEL_NAME = "Demo model (scripted)"
_BODY_LIMIT = 32 * 1024 * 1024
_BEGINNING = 200
_SESSIONS = 1000
_DROP = "opencode_a2a_demo.drop"

Purpose = Literal["prompt", "errand"]


PRICES = {"input": 1, "output": 2, "cache_read": 0.1, "cache_write": 1}
"""Dollars for a million tokens, for tests of what a turn costs. The demo costs nothing."""


def opencode_config(url: str, prices: Mapping[str, float] | None = None) -> dict[str, Any]:
    """Return the configuration that gives OpenCode the scripted model, and no other."""
    model: dict[str, Any] = {
        "name": MODEL_NAME,
        "reasoning": True,
        "tool_call": True,
        "attachment": True,
        "modalities": {"input": ["text", "image", "pdf"], "output": ["text"]},
        "limit": {"context": 100_000, "output": 8_000},
        "cost": dict(prices or dict.fromkeys(PRICES, 0)),
    }
    provider: dict[str, Any] = {
        "npm": "@ai-sdk/openai-compatible",
        "name": MODEL_NAME,
        "options": {"baseURL": url, "apiKey": "demo"},
        "models": {MODEL: model},
    }
    return {
        "provider": {PROVIDER: provider},
        "enabled_providers": [PROVIDER],
        "model": f"{PROVIDER}/{MODEL}",
        "small_model": f"{PROVIDER}/{MODEL}",
        "share": "disabled",
        "autoupdate": False,
    }


@dataclass(frozen=True, slots=True)
class Seen:
    """A request that the model got."""

    session: str
    purpose: Purpose
    place: int
    prompts: tuple[str, ...] = ()
    """How each message of the user begins, in order."""


class _Sessions:
    """Where each session's script stands; the oldest are forgotten."""

    def __init__(self, scripts: Path | None) -> None:
        self._scripts = scripts
        self._progress: dict[str, Progress] = {}

    def turn(self, session: str, request: ChatRequest) -> tuple[Progress, int]:
        """Return the script that a request continues with, and the place of its next reply."""
        prompt = last_prompt(request.messages)
        script = find_script(prompt.text, self._scripts)
        progress = self._progress.get(session)
        if script is None and prompt.continued:
            # After a compaction the messages no longer hold the script: it is remembered.
            progress = progress or _unscripted(NOTHING_LEFT)
            return progress, progress.next_place
        script = script or demo_script(prompt.text, request.tool_names)
        if progress is None or progress.script.digest != script.digest:
            self._progress.pop(session, None)
            progress = self._progress[session] = Progress(script)
            if len(self._progress) > _SESSIONS:
                del self._progress[next(iter(self._progress))]
        return progress, place_after(prompt.answers, script.digest)

    def ended(self, session: str, progress: Progress) -> None:
        """A script that was played to its end starts afresh when it is sent again."""
        over = progress.next_place >= len(progress.script.replies)
        if over and self._progress.get(session) is progress:
            del self._progress[session]


def _unscripted(reply: Reply) -> Progress:
    return Progress(Script((reply,), digest_of("")))


Play = Callable[[Send, Callable[[], None]], Coroutine[None, None, None]]


class _Playing(Response):
    """A response that plays a reply, and stops when the client goes away."""

    def __init__(self, play: Play) -> None:
        super().__init__()
        self._play = play

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def until_gone() -> None:
            while (await receive())["type"] != "http.disconnect":
                pass

        async with asyncio.TaskGroup() as group:
            playing = group.create_task(self._play(send, scope["extensions"][_DROP]))
            gone = group.create_task(until_gone())
            await asyncio.wait({playing, gone}, return_when=asyncio.FIRST_COMPLETED)
            playing.cancel()
            gone.cancel()


class _Protocol(HttpToolsProtocol):
    """Gives the application a way to close its connection: ASGI itself has none."""

    def connection_made(self, transport: asyncio.Transport) -> None:
        super().connection_made(transport)
        inner = self.app

        async def app(scope: Scope, receive: Receive, send: Send) -> None:
            scope.setdefault("extensions", {})[_DROP] = transport.close
            await inner(scope, receive, send)

        self.app = app


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None]:
        """Signals belong to the program that runs the model."""
        yield


class DemoModel:
    """The running model: ``async with DemoModel() as model`` listens at ``model.url``."""

    def __init__(self, *, port: int = 0, scripts: Path | None = None) -> None:
        self._port = port
        self._gates = Gates()
        self._sessions = _Sessions(scripts)
        self._open: set[Callable[[], None]] = set()
        config = uvicorn.Config(
            Starlette(
                routes=[
                    Route("/v1/models", self._models),
                    Route("/v1/chat/completions", self._complete, methods=["POST"]),
                    Route("/control/gates/{name}", self._open_gate, methods=["POST"]),
                    Route("/control/gates/{name}", self._watch_gate),
                ],
                exception_handlers={HTTPException: _http_error},
            ),
            http=_Protocol,
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_keep_alive=75,
        )
        self._server = _Server(config)
        self._serving: asyncio.Task[None] | None = None
        self.requests: deque[Seen] = deque(maxlen=1000)
        """The last requests, for tests that count them."""

    @property
    def port(self) -> int:
        return self._port

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}/v1"

    def gate(self, name: str) -> NamedGate:
        """The gate at which replies with ``{"gate": name}`` wait."""
        return self._gates[name]

    async def __aenter__(self) -> Self:
        listening = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listening.bind(("127.0.0.1", self._port))
        except OSError:
            listening.close()
            raise
        listening.listen(2048)  # from here on nobody is refused, even before the server runs
        self._port = listening.getsockname()[1]
        self._serving = asyncio.create_task(self._server.serve(sockets=[listening]))
        return self

    async def __aexit__(self, *_exc: object) -> None:
        self._server.should_exit = True
        for drop in tuple(self._open):  # a reply that hangs would keep the server for ever
            drop()
        await self.wait_closed()

    async def wait_closed(self) -> None:
        """Return when the server has ended."""
        if self._serving is not None:
            await self._serving

    async def _models(self, request: Request) -> Response:
        model = {"id": MODEL, "object": "model", "created": 0, "owned_by": "opencode-a2a"}
        return _json(orjson.dumps({"object": "list", "data": [model]}))

    async def _complete(self, request: Request) -> Response:
        body = bytearray()
        try:
            async for chunk in request.stream():
                body += chunk
                if len(body) > _BODY_LIMIT:
                    raise HTTPException(413, f"the body is larger than {_BODY_LIMIT} bytes")
            asked = ChatRequest.model_validate_json(bytes(body))
        except ClientDisconnect as error:
            raise HTTPException(400, "the body is incomplete") from error
        except ValidationError as error:
            raise HTTPException(400, reason_of(error)) from error
        # A client that names no session is known by how its conversation began.
        first = next((m.text for m in asked.messages if m.role == "user"), "")
        session = request.headers.get("x-session-id") or digest_of(first)
        reply = errand(asked.messages)
        try:
            progress, place = (
                (_unscripted(reply), 0) if reply else self._sessions.turn(session, asked)
            )
        except ScriptError as error:
            raise HTTPException(400, f"demo script: {error}") from error
        prompts = tuple(m.text[:_BEGINNING] for m in asked.messages if m.role == "user")
        self.requests.append(Seen(session, "errand" if reply else "prompt", place, prompts))

        async def play(send: Send, drop: Callable[[], None]) -> None:
            player = Player(asked, progress, place, self._gates, send, drop)
            self._open.add(drop)
            try:
                if await player.play():
                    self._sessions.ended(session, progress)
            finally:
                self._open.discard(drop)

        return _Playing(play)

    async def _open_gate(self, request: Request) -> Response:
        name = request.path_params["name"]
        self._gates[name].opened.set()
        return _gate_state(name, self._gates[name])

    async def _watch_gate(self, request: Request) -> Response:
        """Wait, at most ``?wait=`` seconds, until a reply stands at the gate."""
        name = request.path_params["name"]
        gate = self._gates[name]
        try:
            seconds = float(request.query_params.get("wait", "0"))
        except ValueError as error:
            raise HTTPException(400, "wait must be a number of seconds") from error
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(min(max(seconds, 0), 60)):
                await gate.reached.wait()
        return _gate_state(name, gate)


def _json(body: bytes, status: int = 200) -> Response:
    return Response(body, status, media_type="application/json")


def _gate_state(name: str, gate: NamedGate) -> Response:
    state = {"name": name, "reached": gate.reached.is_set(), "open": gate.opened.is_set()}
    return _json(orjson.dumps(state))


async def _http_error(request: Request, error: Exception) -> Response:
    if not isinstance(error, HTTPException):
        raise error
    return _json(chat.error_body(error.detail), error.status_code)
