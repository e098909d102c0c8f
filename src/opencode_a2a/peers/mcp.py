"""An MCP server that is just large enough for OpenCode: tools over HTTP, answered in plain JSON.

``peers.tool`` offers its tools through it; ``app`` mounts it on the service's own port. It is
written by hand because OpenCode uses only six messages of the protocol. Its path and token are
generated for each run and known to OpenCode alone, and only this machine may connect. It keeps no
sessions: the session id that a client gets only tells its request ids from those of other clients.
"""

import asyncio
import hmac
import secrets
from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from ipaddress import ip_address

import orjson
import structlog
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from opencode_a2a import __version__
from opencode_a2a.errors import ParseError
from opencode_a2a.events import Json, JsonObject
from opencode_a2a.jsonguard import as_object, decode, text_in, whole_characters

logger = structlog.get_logger(__name__)

PROTOCOL = "2025-11-25"
TIMEOUT_SECONDS = 600
"""How long OpenCode waits for a tool, though its HTTP client gives up after 300 s of silence."""
_BODY_BYTES = 4 * 1024 * 1024
_INVALID_REQUEST, _NO_METHOD, _INVALID_PARAMS, _CANCELED = -32600, -32601, -32602, -32800


@dataclass(frozen=True, slots=True)
class ToolResult:
    """The text that the model is given."""

    text: str
    failed: bool = False


@dataclass(frozen=True, slots=True)
class Tool:
    name: str
    description: str
    schema: JsonObject
    run: Callable[[JsonObject], Awaitable[ToolResult]]
    """Takes the arguments of the model. It is cancelled when OpenCode no longer waits."""


class ToolServer:
    """The endpoint: an ASGI application for the one path ``path``."""

    def __init__(self, tools: Iterable[Tool]) -> None:
        self.path = f"/mcp/{secrets.token_urlsafe(24)}"
        self._authorization = f"Bearer {secrets.token_urlsafe(32)}"
        self._tools = {tool.name: tool for tool in tools}
        self._calls: dict[tuple[str, Json], asyncio.Task[ToolResult]] = {}

    def config(self, base_url: str) -> JsonObject:
        """Return the entry for this server in OpenCode's configuration."""
        return {
            "type": "remote",
            "url": base_url + self.path,
            "headers": {"Authorization": self._authorization},
            "oauth": False,
            "timeout": TIMEOUT_SECONDS * 1000,
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        response = await self._respond(Request(scope, receive), receive)
        await response(scope, receive, send)

    async def _respond(self, request: Request, receive: Receive) -> Response:
        sent = request.headers.get("authorization", "").encode("latin-1")
        expected = self._authorization.encode()
        if not _is_local(request.scope) or not hmac.compare_digest(sent, expected):
            return Response(status_code=404)
        if request.method != "POST":
            # GET would open a stream of messages from the server, and there are none.
            return Response(status_code=405, headers={"allow": "POST"})
        body = bytearray()
        try:
            async for chunk in request.stream():
                body += chunk
                if len(body) > _BODY_BYTES:
                    return Response(status_code=413)
            message = as_object(decode(whole_characters(bytes(body))))
        except (ClientDisconnect, ParseError):
            return Response(status_code=400)
        return await self._handle(request.headers.get("mcp-session-id", ""), message, receive)

    async def _handle(self, session: str, message: JsonObject, receive: Receive) -> Response:
        params = as_object(message.get("params"))
        if "id" not in message:
            # OpenCode sends a cancellation for every finished call too.
            if message.get("method") == "notifications/cancelled":
                request_id = params.get("requestId")
                if isinstance(request_id, str | int) and (session, request_id) in self._calls:
                    self._calls[session, request_id].cancel()
            return Response(status_code=202)
        headers: dict[str, str] = {}
        outcome: JsonObject
        match message.get("method"):
            case "initialize":
                introduction: JsonObject = {
                    "protocolVersion": text_in(params, "protocolVersion") or PROTOCOL,
                    "capabilities": {"tools": {}},
                    "serverInfo": {"name": "opencode-a2a", "version": __version__},
                }
                outcome = {"result": introduction}
                headers["mcp-session-id"] = secrets.token_hex(16)
            case "ping":
                outcome = {"result": {}}
            case "tools/list":
                listed: list[Json] = [
                    {"name": tool.name, "description": tool.description, "inputSchema": tool.schema}
                    for tool in self._tools.values()
                ]
                outcome = {"result": {"tools": listed}}
            case "tools/call":
                outcome = await self._call(session, message["id"], params, receive)
            case str():
                outcome = _error(_NO_METHOD, "there is no such method")
            case _:
                outcome = _error(_INVALID_REQUEST, "this is not a request")
        reply = orjson.dumps({"jsonrpc": "2.0", "id": message["id"], **outcome})
        return Response(reply, headers=headers, media_type="application/json")

    async def _call(
        self, session: str, request_id: Json, params: JsonObject, receive: Receive
    ) -> JsonObject:
        """Run a tool until it is done, cancelled by a notification, or the connection closes."""
        tool = self._tools.get(text_in(params, "name") or "")
        if tool is None or not isinstance(request_id, str | int):
            return _error(_INVALID_PARAMS, "there is no such tool")

        async def run() -> ToolResult:
            try:
                return await tool.run(as_object(params.get("arguments")))
            except Exception:  # the outermost edge of a call: nothing may escape
                logger.exception("tool failed", tool=tool.name)
                return ToolResult("The tool failed; the log of the service says why.", failed=True)

        async def disconnected() -> None:
            while (await receive())["type"] != "http.disconnect":
                pass

        call, gone = asyncio.ensure_future(run()), asyncio.ensure_future(disconnected())
        self._calls[session, request_id] = call
        try:
            await asyncio.wait({call, gone}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            del self._calls[session, request_id]
            for task in (call, gone):
                task.cancel()
                with suppress(asyncio.CancelledError):
                    await task
        if call.cancelled():
            return _error(_CANCELED, "the call was given up")
        content: JsonObject = {"type": "text", "text": call.result().text}
        return {"result": {"content": [content], "isError": call.result().failed}}


def _error(code: int, message: str) -> JsonObject:
    return {"error": {"code": code, "message": message}}


def _is_local(scope: Scope) -> bool:
    """Whether the client is on this machine: at a loopback address, or the one we listen on."""
    client: tuple[str, int] | None = scope.get("client")
    server: tuple[str, int] | None = scope.get("server")
    if client is None:
        return False
    with suppress(ValueError):
        if ip_address(client[0]).is_loopback:
            return True
    return server is not None and client[0] == server[0]
