"""The client of OpenCode's HTTP API: one method per endpoint, with typed requests and responses.

``turns`` and ``extensions`` call it; ``opencode.feed`` reads the event stream through it. An id is
put into a path only if it has the shape of an id, so that it cannot lead to another endpoint. The
status, content type, size and shape of every response are checked. All errors are those of
``opencode_a2a.errors`` and never quote a driver. Nothing here knows about turns or A2A.
"""

import asyncio
import base64
import re
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import NoneType
from typing import Final, Literal, Self, TypeVar
from urllib.parse import quote, unquote, urlencode, urlsplit

import orjson
from pydantic import Field, TypeAdapter, ValidationError

from opencode_a2a.errors import (
    SessionBusyError,
    SessionNotFoundError,
    UpstreamBackpressureError,
    UpstreamError,
    UpstreamHttpError,
    UpstreamNotFoundError,
    UpstreamPayloadError,
    UpstreamTimeoutError,
    UpstreamUnreachableError,
)
from opencode_a2a.events import JsonObject
from opencode_a2a.ids import MessageId, ModelRef, RequestId, SessionId
from opencode_a2a.jsonguard import whole_characters
from opencode_a2a.opencode.exchange import Exchange, ExchangeError, HttpResponse, TooLargeError
from opencode_a2a.opencode.translate import mask_paths
from opencode_a2a.opencode.types import (
    Agent,
    Command,
    CommandCall,
    CommandSource,
    Config,
    ConnectedProviders,
    FileBody,
    FileDiff,
    FileNode,
    Health,
    McpServer,
    McpStatus,
    MessageWithParts,
    Paths,
    PermissionRequest,
    Project,
    Prompt,
    ProviderCatalogue,
    QuestionRequest,
    Session,
    SessionChanges,
    SessionDraft,
    SessionStatus,
    ShellCall,
    TextMatch,
    Todo,
    Vcs,
    Wire,
    Workspace,
    WorkspaceDraft,
    Worktree,
)
from opencode_a2a.telemetry import trace_headers

T = TypeVar("T")
Query = Mapping[str, str | int | bool | None]

MAX_RESPONSE_BYTES: Final = 64 * 1024 * 1024
MAX_DETAIL_CHARS: Final = 512
"""Characters of OpenCode's error text that an error keeps as its ``detail``."""


@dataclass(frozen=True, slots=True)
class Location:
    """Where in OpenCode a call runs: in a workspace, by its id, or else in a directory.

    Without either, the call runs in the directory that OpenCode was started in. Calls about one
    session always run in that session's own directory.
    """

    directory: str | None = None
    workspace: str | None = None

    @classmethod
    def of(cls, directory: Path | None) -> Self:
        return cls(None if directory is None else str(directory))


HERE: Final = Location()


@dataclass(frozen=True, slots=True)
class MessagePage:
    """Messages from old to new; ``next_cursor`` leads to the page of older messages."""

    items: list[MessageWithParts]
    next_cursor: str | None = None


@dataclass(frozen=True, slots=True)
class _Request:
    method: str
    path: str
    at: Location = HERE
    query: Query | None = None
    body: bytes | None = None
    endless: bool = False
    """Whether the call runs a turn, which may take any time: it has no timeout."""
    urgent: bool = False
    """Whether the call is exempt from the limit on concurrent requests. Calls that end or unblock
    a turn are: refusing them under load would keep the load up."""

    @property
    def name(self) -> str:
        return f"{self.method} {self.path}"


def _read(kind: type[T], path: str):
    """Make the method for an endpoint whose only argument is a location."""

    async def read(self: "OpenCode", *, at: Location = HERE) -> T:
        return await self.call(kind, "GET", path, at)

    return read


def _on_session(kind: type[T], method: str, rest: str = "", *, urgent: bool = False):
    """Make the method for an endpoint whose only argument is a session."""

    async def call(self: "OpenCode", session_id: SessionId, *, at: Location = HERE) -> T:
        return await self.call(kind, method, _session(session_id, rest), at, urgent=urgent)

    return call


class OpenCode:
    """The client of one OpenCode server; open it with ``async with``."""

    def __init__(
        self,
        base_url: str,
        *,
        username: str = "opencode",
        password: str | None = None,
        timeout: float = 120.0,
        max_concurrent_requests: int = 0,
        max_response_bytes: int = MAX_RESPONSE_BYTES,
    ) -> None:
        url = urlsplit(base_url)
        if password is None and url.password:
            username, password = unquote(url.username or ""), unquote(url.password)
        host = url.netloc.rpartition("@")[2]
        self.base_url = f"{url.scheme}://{host}{url.path}".rstrip("/")
        self._timeout = timeout
        self._limit = max_concurrent_requests
        self._running = 0
        """Requests whose responses are not complete yet."""
        self.before_change: Callable[[], Awaitable[None]] | None = None
        """Awaited before each request that changes something: another replica may own this
        OpenCode by now."""
        headers = {"accept-encoding": "identity", "user-agent": "opencode-a2a"}
        if password is not None:
            token = base64.b64encode(f"{username}:{password}".encode()).decode()
            headers["authorization"] = f"Basic {token}"
        self._exchange = Exchange(self.base_url, headers, max_response_bytes)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_exc: object) -> None:
        self._exchange.close()

    # Sessions

    session = _on_session(Session, "GET")
    session_children = _on_session(list[Session], "GET", "/children")
    session_todo = _on_session(list[Todo], "GET", "/todo")
    share_session = _on_session(Session, "POST", "/share")
    unshare_session = _on_session(Session, "DELETE", "/share")
    unrevert_session = _on_session(Session, "POST", "/unrevert")
    delete_session = _on_session(bool, "DELETE")
    """Delete a session and its children. This does not stop a running turn: abort it first."""
    abort_session = _on_session(bool, "POST", "/abort", urgent=True)
    """Stop the session's turn and return when it has ended. An idle session stays as it is."""
    session_status = _read(dict[SessionId, SessionStatus], "/session/status")
    """Return the sessions of this location that are not idle."""

    async def sessions(
        self,
        *,
        at: Location = HERE,
        limit: int | None = None,
        roots: bool | None = None,
        search: str | None = None,
        start: int | None = None,
    ) -> list[Session]:
        """List sessions, newest first: 100 unless ``limit`` is given. There is no cursor."""
        query: Query = {"limit": limit, "roots": roots, "search": search, "start": start}
        return await self.call(list[Session], "GET", "/session", at, query=query)

    async def create_session(self, draft: SessionDraft, *, at: Location = HERE) -> Session:
        return await self.call(Session, "POST", "/session", at, body=draft)

    async def update_session(
        self, session_id: SessionId, changes: SessionChanges, *, at: Location = HERE
    ) -> Session:
        return await self.call(Session, "PATCH", _session(session_id), at, body=changes)

    async def session_diff(
        self, session_id: SessionId, message_id: MessageId | None = None, *, at: Location = HERE
    ) -> list[FileDiff]:
        """List the files that the answer to a *user* message changed; none without a message."""
        path, query = _session(session_id, "/diff"), {"messageID": message_id}
        return await self.call(list[FileDiff], "GET", path, at, query=query)

    async def fork_session(
        self, session_id: SessionId, message_id: MessageId | None = None, *, at: Location = HERE
    ) -> Session:
        """Copy the messages before ``message_id`` into a new session, without its permissions."""
        body: JsonObject = {"messageID": message_id}
        return await self.call(Session, "POST", _session(session_id, "/fork"), at, body=body)

    async def summarize_session(
        self,
        session_id: SessionId,
        model: ModelRef,
        *,
        auto: bool | None = None,
        at: Location = HERE,
    ) -> None:
        """Replace a session's history by a summary; return when the model has written it."""
        body: JsonObject = {
            "providerID": model.provider_id,
            "modelID": model.model_id,
            "auto": auto,
        }
        path = _session(session_id, "/summarize")
        await self.call(bool, "POST", path, at, body=body, endless=True)

    async def revert_session(
        self,
        session_id: SessionId,
        message_id: MessageId,
        part_id: str | None = None,
        *,
        at: Location = HERE,
    ) -> Session:
        """Revert a message and its changes to files. A busy session refuses this."""
        body: JsonObject = {"messageID": message_id, "partID": part_id}
        return await self.call(Session, "POST", _session(session_id, "/revert"), at, body=body)

    # Messages

    async def messages(
        self,
        session_id: SessionId,
        *,
        limit: int | None = None,
        before: str | None = None,
        at: Location = HERE,
    ) -> MessagePage:
        """Return the newest ``limit`` messages, or all; ``before`` is the cursor of a page."""
        query: Query = {"limit": limit, "before": before}
        request = _Request("GET", _session(session_id, "/message"), at, query)
        response = await self._send(request)
        items = _decode(list[MessageWithParts], request, response)
        return MessagePage(items, response.headers.get("x-next-cursor"))

    async def message(
        self, session_id: SessionId, message_id: MessageId, *, at: Location = HERE
    ) -> MessageWithParts:
        path = _session(session_id, "/message/") + _checked("msg", message_id)
        return await self.call(MessageWithParts, "GET", path, at)

    def prompt(
        self, session_id: SessionId, prompt: Prompt, *, at: Location = HERE
    ) -> Coroutine[None, None, MessageWithParts]:
        """Run a turn and return its last message, which may hold an error: ``info.error``."""
        # Not `async`: that would keep the prompt with all its files in memory during the turn.
        path = _session(session_id, "/message")
        return self.call(MessageWithParts, "POST", path, at, body=prompt, endless=True)

    async def prompt_async(
        self, session_id: SessionId, prompt: Prompt, *, at: Location = HERE
    ) -> None:
        """Start a turn and return at once; only events tell how it goes on."""
        path = _session(session_id, "/prompt_async")
        await self.call(NoneType, "POST", path, at, body=prompt)

    async def run_command(
        self, session_id: SessionId, command: CommandCall, *, at: Location = HERE
    ) -> MessageWithParts:
        path = _session(session_id, "/command")
        return await self.call(MessageWithParts, "POST", path, at, body=command, endless=True)

    async def run_shell(
        self, session_id: SessionId, command: ShellCall, *, at: Location = HERE
    ) -> MessageWithParts:
        path = _session(session_id, "/shell")
        return await self.call(MessageWithParts, "POST", path, at, body=command, endless=True)

    # Interrupts; the location has to be that of the session that asks

    permissions = _read(list[PermissionRequest], "/permission")
    questions = _read(list[QuestionRequest], "/question")

    async def reply_permission(
        self,
        request_id: RequestId,
        reply: Literal["once", "always", "reject"],
        message: str | None = None,
        *,
        at: Location = HERE,
    ) -> None:
        path = f"/permission/{_checked('per', request_id)}/reply"
        body: JsonObject = {"reply": reply, "message": message}
        await self.call(bool, "POST", path, at, body=body, urgent=True)

    async def reply_question(
        self, request_id: RequestId, answers: Sequence[Sequence[str]], *, at: Location = HERE
    ) -> None:
        """Answer the questions of one request, each with a list of labels or free texts."""
        path = f"/question/{_checked('que', request_id)}/reply"
        body: JsonObject = {"answers": [list(answer) for answer in answers]}
        await self.call(bool, "POST", path, at, body=body, urgent=True)

    async def reject_question(self, request_id: RequestId, *, at: Location = HERE) -> None:
        path = f"/question/{_checked('que', request_id)}/reject"
        await self.call(bool, "POST", path, at, urgent=True)

    # Catalogues

    agents = _read(list[Agent], "/agent")
    commands = _read(list[Command], "/command")
    command_sources = _read(list[CommandSource], "/command")
    config = _read(Config, "/config")
    """Return the configuration without its secrets. If it is invalid, OpenCode refuses the call."""
    connected_providers = _read(ConnectedProviders, "/config/providers")

    async def provider_catalogue(self, *, at: Location = HERE) -> ProviderCatalogue:
        request = _Request("GET", "/provider", at)
        response = await self._send(request)
        # Decoding takes a quarter of a second, during which no stream would move.
        return await asyncio.to_thread(_decode, ProviderCatalogue, request, response)

    # Projects, worktrees, workspaces

    projects = _read(list[Project], "/project")
    current_project = _read(Project, "/project/current")
    workspaces = _read(list[Workspace], "/experimental/workspace")
    worktrees = _read(list[str], "/experimental/worktree")
    """List the directories of the project's worktrees."""

    async def create_worktree(
        self, name: str | None = None, start_command: str | None = None, *, at: Location = HERE
    ) -> Worktree:
        """Create a worktree; its files are there once the event ``worktree.ready`` comes."""
        body: JsonObject = {"name": name, "startCommand": start_command}
        return await self.call(Worktree, "POST", "/experimental/worktree", at, body=body)

    async def remove_worktree(self, directory: str, *, at: Location = HERE) -> bool:
        body: JsonObject = {"directory": directory}
        return await self.call(bool, "DELETE", "/experimental/worktree", at, body=body)

    async def reset_worktree(self, directory: str, *, at: Location = HERE) -> bool:
        body: JsonObject = {"directory": directory}
        return await self.call(bool, "POST", "/experimental/worktree/reset", at, body=body)

    async def create_workspace(self, draft: WorkspaceDraft, *, at: Location = HERE) -> Workspace:
        return await self.call(Workspace, "POST", "/experimental/workspace", at, body=draft)

    async def remove_workspace(self, workspace_id: str, *, at: Location = HERE) -> Workspace | None:
        """Remove a workspace and return it; None if it does not exist."""
        path = f"/experimental/workspace/{_checked('wrk', workspace_id)}"
        request = _Request("DELETE", path, at)
        response = await self._send(request)
        nothing = response.body.strip() in (b"", b"null")
        return None if nothing else _decode(Workspace, request, response)

    # Files and version control

    vcs = _read(Vcs, "/vcs")

    async def list_files(self, path: str, *, at: Location = HERE) -> list[FileNode]:
        return await self.call(list[FileNode], "GET", "/file", at, query={"path": path})

    async def read_file(self, path: str, *, at: Location = HERE) -> FileBody:
        return await self.call(FileBody, "GET", "/file/content", at, query={"path": path})

    async def find_text(self, pattern: str, *, at: Location = HERE) -> list[TextMatch]:
        """Search the files of the location with ripgrep, which must be installed."""
        return await self.call(list[TextMatch], "GET", "/find", at, query={"pattern": pattern})

    async def find_files(
        self, query: str, *, limit: int | None = None, at: Location = HERE
    ) -> list[str]:
        given: Query = {"query": query, "limit": limit}
        return await self.call(list[str], "GET", "/find/file", at, query=given)

    async def vcs_diff(
        self, mode: Literal["git", "branch"], *, context: int | None = None, at: Location = HERE
    ) -> list[FileDiff]:
        """Compare the working tree with its last commit, or with the default branch."""
        query: Query = {"mode": mode, "context": context}
        return await self.call(list[FileDiff], "GET", "/vcs/diff", at, query=query)

    # The server itself

    tool_ids = _read(list[str], "/experimental/tool/ids")
    """Return the names of the tools, without those of MCP servers."""
    mcp_status = _read(dict[str, McpStatus], "/mcp")

    async def add_mcp(
        self, name: str, server: McpServer, *, at: Location = HERE
    ) -> dict[str, McpStatus]:
        """Offer an MCP server's tools in this location, from the next prompt until a restart."""
        config = server.model_dump(mode="json", by_alias=True, exclude_none=True)
        body: JsonObject = {"name": name, "config": config}
        return await self.call(dict[str, McpStatus], "POST", "/mcp", at, body=body)

    async def paths(self) -> Paths:
        return await self.call(Paths, "GET", "/path")

    async def health(self) -> Health:
        return await self.call(Health, "GET", "/global/health", urgent=True)

    async def health_of_2(self) -> Health | None:
        """Return the health of an OpenCode 2; None if the server is not one.

        Call it only if the server does not answer ``health``, where OpenCode 2 has its web page or
        nothing: 1.x answers at this path too.
        """
        try:
            return await self.call(Health, "GET", "/api/health", urgent=True)
        except UpstreamError:
            return None

    async def dispose(self) -> None:
        """Abort every turn and end every tool process of the server."""
        await self.call(bool, "POST", "/global/dispose", urgent=True)

    async def events(self, sink: Callable[[bytes], object]) -> None:
        """Pass the event stream to ``sink`` in chunks, cut anywhere, until the stream ends."""
        request = _Request("GET", "/global/event")
        try:
            async with self._exchange.stream(request.path, trace_headers()) as stream:
                response = stream.response
                if response.status >= 300:
                    body = bytearray()
                    await stream.read(body.extend)
                    raise _refusal(request.path, response.status, bytes(body))
                if not response.headers.get("content-type", "").startswith("text/event-stream"):
                    raise _wrong_media_type(request, response)
                await stream.read(sink)
        except ExchangeError as error:
            raise _upstream_error(request, error) from None

    # How a call is made

    async def call(
        self,
        kind: type[T],
        method: str,
        path: str,
        at: Location = HERE,
        *,
        query: Query | None = None,
        body: Wire | JsonObject | None = None,
        endless: bool = False,
        urgent: bool = False,
    ) -> T:
        """Send a request and return the response as ``kind``; a None in the body is left out."""
        encoded = None
        if isinstance(body, Wire):
            encoded = body.__pydantic_serializer__.to_json(body, by_alias=True, exclude_none=True)
        elif body is not None:
            encoded = orjson.dumps({key: value for key, value in body.items() if value is not None})
        del body  # it may hold large files, and the call may last as long as a turn
        request = _Request(method, path, at, query, encoded, endless, urgent)
        return _decode(kind, request, await self._send(request))

    async def _send(self, request: _Request) -> HttpResponse:
        """Send a request and return the response; raise the error that a refusal stands for."""
        if self._limit and not request.urgent and self._running >= self._limit:
            raise UpstreamBackpressureError(limit=self._limit)
        query: dict[str, str] = {}
        if request.at.workspace is not None:
            query["workspace"] = _checked("wrk", request.at.workspace)
        elif request.at.directory is not None:
            query["directory"] = request.at.directory
        for key, value in (request.query or {}).items():
            if value is not None:
                query[key] = str(value).lower() if isinstance(value, bool) else str(value)
        target = f"{request.path}?{urlencode(query, quote_via=quote)}" if query else request.path
        headers = trace_headers()
        if request.body is not None:
            headers["content-type"] = "application/json"
        self._running += 1
        try:
            if self.before_change is not None and request.method != "GET":
                await self.before_change()
            async with asyncio.timeout(None if request.endless else self._timeout):
                response = await self._exchange.send(request.method, target, request.body, headers)
        except ExchangeError as error:
            raise _upstream_error(request, error) from None
        except TimeoutError:
            detail = f"{request.name}: no response in {self._timeout:g} s"
            raise UpstreamTimeoutError(detail=detail) from None
        finally:
            self._running -= 1
        if response.status >= 300:
            raise _refusal(request.path, response.status, response.body)
        return response


def _upstream_error(request: _Request, error: ExchangeError) -> UpstreamError:
    kind = UpstreamPayloadError if isinstance(error, TooLargeError) else UpstreamUnreachableError
    return kind(detail=f"{request.name}: {error}")


# Requests

_SHAPE: Final = re.compile(r"(ses|msg|prt|per|que|wrk)_[A-Za-z0-9]{1,128}\Z")


def well_formed(prefix: str, value: str) -> bool:
    """Whether a value has the shape of OpenCode's ids with this prefix."""
    shape = _SHAPE.match(value)
    return shape is not None and shape.group(1) == prefix


def _checked(prefix: str, value: str) -> str:
    if not well_formed(prefix, value):
        raise UpstreamNotFoundError(upstream_status=404, detail=f"not an id: {prefix}_…")
    return value


def _session(session_id: SessionId, rest: str = "") -> str:
    if not well_formed("ses", session_id):
        raise SessionNotFoundError(session_id=session_id)
    return f"/session/{session_id}{rest}"


# Responses


@cache
def _adapter(kind: type[T]) -> TypeAdapter[T]:
    """Return the decoder of a type, built on first use: all of them would double the start time."""
    return TypeAdapter(kind)


def _decode(kind: type[T], request: _Request, response: HttpResponse) -> T:
    adapter = _adapter(kind)
    if kind is NoneType and not response.body:
        return adapter.validate_python(None)
    if not response.headers.get("content-type", "").startswith("application/json"):
        raise _wrong_media_type(request, response)
    try:
        try:
            return adapter.validate_json(response.body)
        except ValidationError:
            # OpenCode's tools cut text in the middle of a character.
            whole = whole_characters(response.body)
            if whole == response.body:
                raise
            return adapter.validate_json(whole)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        where = ".".join(str(step) for step in first["loc"])
        detail = f"{request.name}: {first['type']} at {where or 'the top'}"
        raise UpstreamPayloadError(detail=detail) from None


def _wrong_media_type(request: _Request, response: HttpResponse) -> UpstreamPayloadError:
    kind = response.headers.get("content-type", "").partition(";")[0] or "no content type"
    return UpstreamPayloadError(detail=f"{request.name}: unexpected {kind[:80]}")


class _Issue(Wire):
    path: tuple[str | int, ...] = ()
    message: str = ""


class _RefusalData(Wire):
    message: str | None = None
    path: str | None = None
    issues: tuple[_Issue, ...] = ()


class _Refusal(Wire):
    """The body of an error; OpenCode uses three shapes, which have these fields among them."""

    data: _RefusalData = _RefusalData()
    message: str | None = None
    tag: str | None = Field(default=None, alias="_tag")
    name: str | None = None

    @property
    def text(self) -> str:
        if not self.data.issues:
            return self.data.message or self.message or self.tag or self.name or ""
        source = (self.data.path or "configuration").rpartition("/")[2]
        issues = (
            f"{'.'.join(str(step) for step in issue.path)}: {issue.message}"
            for issue in self.data.issues
        )
        return f"{source}: {'; '.join(issues)}"


def _refusal(path: str, status: int, body: bytes) -> UpstreamError | SessionNotFoundError:
    """Return the error for a response whose status is not a success.

    Its ``detail`` is OpenCode's text: shortened, without paths, and without a provider's body.
    """
    try:
        text = _Refusal.model_validate_json(body).text
    except ValidationError:
        text = body[: 4 * MAX_DETAIL_CHARS].decode(errors="replace")
    detail = mask_paths(text.strip())[:MAX_DETAIL_CHARS]
    match status:
        case 404:
            session = re.match(r"/session/(ses_[^/]*)", path)
            if session is not None and not detail.startswith("Message not found"):
                return SessionNotFoundError(session_id=session[1])
            return UpstreamNotFoundError(upstream_status=status, detail=detail)
        case 409:
            return SessionBusyError(upstream_status=status, detail=detail)
        case 401 | 403:
            message = (
                "OpenCode refuses the credentials; "
                "check OPENCODE_AUTH_USERNAME and OPENCODE_AUTH_PASSWORD"
            )
            return UpstreamHttpError(message, upstream_status=status, detail=detail)
        case _:
            return UpstreamHttpError(upstream_status=status, detail=detail)
