"""OpenCode's HTTP interface: one method per endpoint, typed both ways.

``turns`` and ``extensions`` call it, ``opencode.feed`` reads the event stream through it.
An id goes into a path only if it has the shape of one, so that no id can reach another
endpoint. What comes back is checked: status, content type, size, shape. Errors are those of
``opencode_a2a.errors`` and never carry a driver's text. Nothing here knows turns or A2A.
"""

import asyncio
import base64
import re
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Final, Literal, Self, TypeVar
from urllib.parse import quote, unquote, urlencode, urlsplit

import orjson
from pydantic import TypeAdapter, ValidationError

from opencode_a2a.errors import (
    SessionNotFoundError,
    UpstreamBackpressureError,
    UpstreamNotFoundError,
    UpstreamPayloadError,
    UpstreamTimeoutError,
    UpstreamUnreachableError,
)
from opencode_a2a.events import Json
from opencode_a2a.ids import MessageId, RequestId, SessionId
from opencode_a2a.jsonguard import whole_characters
from opencode_a2a.opencode.exchange import Exchange, ExchangeError, Reply, TooLargeError
from opencode_a2a.opencode.refusals import refusal
from opencode_a2a.opencode.types import (
    Agent,
    Command,
    CommandCall,
    Config,
    ConnectedProviders,
    FileContent,
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
from opencode_a2a.tracing import trace_headers

T = TypeVar("T")
Query = Mapping[str, str | int | bool | None]
PermissionReply = Literal["once", "always", "reject"]

MAX_RESPONSE_BYTES: Final = 64 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class Location:
    """Which of OpenCode's instances a call means: a workspace by id, else a directory.

    Neither is the directory that OpenCode was started in. Calls about one session run in
    that session's own directory whatever is said here.
    """

    directory: str | None = None
    workspace: str | None = None


HERE: Final = Location()


@dataclass(frozen=True, slots=True)
class MessagePage:
    """Messages from old to new; ``next_cursor`` leads to the ones before them."""

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
    """A turn: it ends when it ends."""
    urgent: bool = False
    """It ends or unblocks a turn; refusing it under load would keep the load up."""

    @property
    def name(self) -> str:
        return f"{self.method} {self.path}"

    @property
    def target(self) -> str:
        """Path and query, encoded."""
        pairs: dict[str, str] = {}
        if self.at.workspace is not None:
            pairs["workspace"] = _checked("wrk", self.at.workspace)
        elif self.at.directory is not None:
            pairs["directory"] = self.at.directory
        for key, value in (self.query or {}).items():
            if value is not None:
                pairs[key] = str(value).lower() if isinstance(value, bool) else str(value)
        return f"{self.path}?{urlencode(pairs, quote_via=quote)}" if pairs else self.path


def _read(kind: type[T], path: str):
    """Make the method for an endpoint that takes nothing but a location."""

    async def read(self: "OpenCode", *, at: Location = HERE) -> T:
        return await self.call(kind, _Request("GET", path, at))

    return read


def _on_session(kind: type[T], method: str, rest: str = "", *, urgent: bool = False):
    """Make the method for an endpoint that takes nothing but a session."""

    async def call(self: "OpenCode", session_id: SessionId, *, at: Location = HERE) -> T:
        path = _session(session_id, rest)
        return await self.call(kind, _Request(method, path, at, urgent=urgent))

    return call


class OpenCode:
    """A connection to one OpenCode server; open it with ``async with``."""

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
        self._under_way = 0
        headers = {"accept-encoding": "identity", "user-agent": "opencode-a2a"}
        if password is not None:
            token = base64.b64encode(f"{username}:{password}".encode()).decode()
            headers["authorization"] = f"Basic {token}"
        self._calls = Exchange(self.base_url, headers, max_response_bytes)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_exc: object) -> None:
        self._calls.close()

    # Sessions

    session = _on_session(Session, "GET")
    session_children = _on_session(list[Session], "GET", "/children")
    session_todo = _on_session(list[Todo], "GET", "/todo")
    share_session = _on_session(Session, "POST", "/share")
    unshare_session = _on_session(Session, "DELETE", "/share")
    unrevert_session = _on_session(Session, "POST", "/unrevert")
    delete_session = _on_session(bool, "DELETE")
    """Delete a session and its children. A running turn goes on: abort it first."""
    abort_session = _on_session(bool, "POST", "/abort", urgent=True)
    """Stop the session's turn; returns after it. Idle and unknown sessions do not object."""
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
        """List sessions, newest first; OpenCode's own limit is 100. It knows no cursor here."""
        query: Query = {"limit": limit, "roots": roots, "search": search, "start": start}
        return await self._get(list[Session], "/session", at, query)

    async def create_session(self, draft: SessionDraft, *, at: Location = HERE) -> Session:
        return await self._post(Session, "/session", at, _wire(draft))

    async def update_session(
        self, session_id: SessionId, changes: SessionChanges, *, at: Location = HERE
    ) -> Session:
        request = _Request("PATCH", _session(session_id), at, body=_wire(changes))
        return await self.call(Session, request)

    async def session_diff(
        self, session_id: SessionId, message_id: MessageId | None = None, *, at: Location = HERE
    ) -> list[FileDiff]:
        """List the files that the answer to one *user* message changed; without it, none."""
        query: Query = {"messageID": message_id}
        return await self._get(list[FileDiff], _session(session_id, "/diff"), at, query)

    async def fork_session(
        self, session_id: SessionId, message_id: MessageId | None = None, *, at: Location = HERE
    ) -> Session:
        """Copy the messages before ``message_id`` into a new session, without its permissions."""
        body = _json(messageID=message_id)
        return await self._post(Session, _session(session_id, "/fork"), at, body)

    async def summarize_session(
        self,
        session_id: SessionId,
        *,
        provider_id: str,
        model_id: str,
        auto: bool | None = None,
        at: Location = HERE,
    ) -> None:
        """Replace a session's history by a summary; returns when the model has written it."""
        body = _json(providerID=provider_id, modelID=model_id, auto=auto)
        await self._post(bool, _session(session_id, "/summarize"), at, body, endless=True)

    async def revert_session(
        self,
        session_id: SessionId,
        message_id: MessageId,
        part_id: str | None = None,
        *,
        at: Location = HERE,
    ) -> Session:
        """Take back a message, and the files with it; busy sessions refuse."""
        body = _json(messageID=message_id, partID=part_id)
        return await self._post(Session, _session(session_id, "/revert"), at, body)

    # Messages

    async def messages(
        self,
        session_id: SessionId,
        *,
        limit: int | None = None,
        before: str | None = None,
        at: Location = HERE,
    ) -> MessagePage:
        """Return the newest ``limit`` messages, or all; ``before`` is an earlier page's cursor."""
        path = _session(session_id, "/message")
        request = _Request("GET", path, at, {"limit": limit, "before": before})
        reply = await self._exchange(request)
        items = _decode(list[MessageWithParts], request, reply)
        return MessagePage(items, reply.headers.get("x-next-cursor"))

    async def message(
        self, session_id: SessionId, message_id: MessageId, *, at: Location = HERE
    ) -> MessageWithParts:
        path = _session(session_id, "/message/") + _checked("msg", message_id)
        return await self._get(MessageWithParts, path, at)

    def prompt(
        self, session_id: SessionId, prompt: Prompt, *, at: Location = HERE
    ) -> Coroutine[None, None, MessageWithParts]:
        """Run a turn and return its last message. An error may be inside: ``info.error``."""
        return self._run(_session(session_id, "/message"), at, prompt)

    async def prompt_async(
        self, session_id: SessionId, prompt: Prompt, *, at: Location = HERE
    ) -> None:
        """Start a turn; whatever becomes of it is told by events alone."""
        path = _session(session_id, "/prompt_async")
        request = _Request("POST", path, at, body=_wire(prompt))
        if (await self._exchange(request)).body:
            raise UpstreamPayloadError(detail=f"{request.name}: expected no content")

    async def run_command(
        self, session_id: SessionId, command: CommandCall, *, at: Location = HERE
    ) -> MessageWithParts:
        return await self._run(_session(session_id, "/command"), at, command)

    async def run_shell(
        self, session_id: SessionId, command: ShellCall, *, at: Location = HERE
    ) -> MessageWithParts:
        return await self._run(_session(session_id, "/shell"), at, command)

    # Interrupts; the location has to be the one that asked

    permissions = _read(list[PermissionRequest], "/permission")
    questions = _read(list[QuestionRequest], "/question")

    async def reply_permission(
        self,
        request_id: RequestId,
        reply: PermissionReply,
        message: str | None = None,
        *,
        at: Location = HERE,
    ) -> None:
        path = f"/permission/{_checked('per', request_id)}/reply"
        await self._post(bool, path, at, _json(reply=reply, message=message), urgent=True)

    async def reply_question(
        self, request_id: RequestId, answers: Sequence[Sequence[str]], *, at: Location = HERE
    ) -> None:
        """Answer the questions of one request, a list of labels or free texts for each."""
        path = f"/question/{_checked('que', request_id)}/reply"
        body = _json(answers=[list(answer) for answer in answers])
        await self._post(bool, path, at, body, urgent=True)

    async def reject_question(self, request_id: RequestId, *, at: Location = HERE) -> None:
        path = f"/question/{_checked('que', request_id)}/reject"
        await self._post(bool, path, at, urgent=True)

    # Catalogues

    agents = _read(list[Agent], "/agent")
    commands = _read(list[Command], "/command")
    config = _read(Config, "/config")
    """Return what may be known of the configuration; an invalid one is an HTTP error."""
    connected_providers = _read(ConnectedProviders, "/config/providers")

    async def provider_catalogue(self, *, at: Location = HERE) -> ProviderCatalogue:
        request = _Request("GET", "/provider", at)
        reply = await self._exchange(request)
        # A quarter of a second of work that would otherwise stop every stream for that long.
        return await asyncio.to_thread(_decode, ProviderCatalogue, request, reply)

    # Projects, worktrees, workspaces

    projects = _read(list[Project], "/project")
    current_project = _read(Project, "/project/current")
    workspaces = _read(list[Workspace], "/experimental/workspace")
    worktrees = _read(list[str], "/experimental/worktree")
    """List the directories of the project's worktrees."""

    async def create_worktree(
        self, name: str | None = None, start_command: str | None = None, *, at: Location = HERE
    ) -> Worktree:
        """Make a worktree; its files come later, with the event ``worktree.ready``."""
        body = _json(name=name, startCommand=start_command)
        return await self._post(Worktree, "/experimental/worktree", at, body)

    async def remove_worktree(self, directory: str, *, at: Location = HERE) -> bool:
        body = _json(directory=directory)
        return await self.call(bool, _Request("DELETE", "/experimental/worktree", at, body=body))

    async def reset_worktree(self, directory: str, *, at: Location = HERE) -> bool:
        body = _json(directory=directory)
        return await self._post(bool, "/experimental/worktree/reset", at, body)

    async def create_workspace(self, draft: WorkspaceDraft, *, at: Location = HERE) -> Workspace:
        return await self._post(Workspace, "/experimental/workspace", at, _wire(draft))

    async def remove_workspace(self, workspace_id: str, *, at: Location = HERE) -> Workspace | None:
        """Remove a workspace; None when there was none."""
        path = f"/experimental/workspace/{_checked('wrk', workspace_id)}"
        request = _Request("DELETE", path, at)
        reply = await self._exchange(request)
        nothing = reply.body.strip() in (b"", b"null")
        return None if nothing else _decode(Workspace, request, reply)

    # Files and version control

    vcs = _read(Vcs, "/vcs")

    async def list_files(self, path: str, *, at: Location = HERE) -> list[FileNode]:
        return await self._get(list[FileNode], "/file", at, {"path": path})

    async def read_file(self, path: str, *, at: Location = HERE) -> FileContent:
        return await self._get(FileContent, "/file/content", at, {"path": path})

    async def find_text(self, pattern: str, *, at: Location = HERE) -> list[TextMatch]:
        """Search the files of the location with ripgrep, which has to be there."""
        return await self._get(list[TextMatch], "/find", at, {"pattern": pattern})

    async def find_files(
        self, query: str, *, limit: int | None = None, at: Location = HERE
    ) -> list[str]:
        return await self._get(list[str], "/find/file", at, {"query": query, "limit": limit})

    async def vcs_diff(
        self, mode: Literal["git", "branch"], *, context: int | None = None, at: Location = HERE
    ) -> list[FileDiff]:
        """Compare the working tree with its last commit, or with the default branch."""
        return await self._get(list[FileDiff], "/vcs/diff", at, {"mode": mode, "context": context})

    # The server itself

    mcp_status = _read(dict[str, McpStatus], "/mcp")

    async def add_mcp(
        self, name: str, server: McpServer, *, at: Location = HERE
    ) -> dict[str, McpStatus]:
        """Offer an MCP server's tools in this location, from the next prompt until a restart."""
        config = server.model_dump(mode="json", by_alias=True, exclude_none=True)
        return await self._post(dict[str, McpStatus], "/mcp", at, _json(name=name, config=config))

    async def paths(self) -> Paths:
        return await self._get(Paths, "/path", HERE)

    async def health(self) -> Health:
        return await self.call(Health, _Request("GET", "/global/health", urgent=True))

    async def dispose(self) -> None:
        """Abort every turn and end every tool process of the whole server."""
        await self._post(bool, "/global/dispose", HERE, urgent=True)

    async def events(self, sink: Callable[[bytes], object]) -> None:
        """Hand on the server's event stream as it arrives, cut anywhere, until it ends."""
        request = _Request("GET", "/global/event")
        with _translated(request):
            async with self._calls.stream(request.target, trace_headers()) as stream:
                reply = stream.reply
                if reply.status >= 300:
                    body = bytearray()
                    await stream.read(body.extend)
                    raise refusal(request.path, reply.status, bytes(body))
                media_type = reply.headers.get("content-type", "")
                if not media_type.startswith("text/event-stream"):
                    raise _wrong_media_type(request, media_type)
                await stream.read(sink)

    # How a call is made

    async def _get(self, kind: type[T], path: str, at: Location, query: Query | None = None) -> T:
        return await self.call(kind, _Request("GET", path, at, query))

    async def _post(
        self,
        kind: type[T],
        path: str,
        at: Location,
        body: bytes | None = None,
        *,
        endless: bool = False,
        urgent: bool = False,
    ) -> T:
        return await self.call(kind, _Request("POST", path, at, None, body, endless, urgent))

    def _run(self, path: str, at: Location, body: Wire) -> Coroutine[None, None, MessageWithParts]:
        # No coroutine itself: it would keep the body, with all its files, as long as the turn runs.
        request = _Request("POST", path, at, body=_wire(body), endless=True)
        return self.call(MessageWithParts, request)

    async def call(self, kind: type[T], request: _Request) -> T:
        return _decode(kind, request, await self._exchange(request))

    async def _exchange(self, request: _Request) -> Reply:
        """Send a request and read the whole answer, or raise what OpenCode's refusal means."""
        if self._limit and not request.urgent and self._under_way >= self._limit:
            raise UpstreamBackpressureError(limit=self._limit)
        headers = trace_headers()
        if request.body is not None:
            headers["content-type"] = "application/json"
        self._under_way += 1
        try:
            with _translated(request):
                async with asyncio.timeout(None if request.endless else self._timeout):
                    reply = await self._calls.send(
                        request.method, request.target, request.body, headers
                    )
        except TimeoutError:
            detail = f"{request.name}: no answer in {self._timeout:g} s"
            raise UpstreamTimeoutError(detail=detail) from None
        finally:
            self._under_way -= 1
        if reply.status >= 300:
            raise refusal(request.path, reply.status, reply.body)
        return reply


@contextmanager
def _translated(request: _Request):
    """Turn what goes wrong on the way into this program's errors."""
    try:
        yield
    except TooLargeError as error:
        raise UpstreamPayloadError(detail=f"{request.name}: {error}") from None
    except ExchangeError as error:
        raise UpstreamUnreachableError(detail=f"{request.name}: {error}") from None


def _wire(value: Wire) -> bytes:
    return value.__pydantic_serializer__.to_json(value, by_alias=True, exclude_none=True)


def _json(**fields: Json) -> bytes:
    return orjson.dumps({key: value for key, value in fields.items() if value is not None})


# Ids and paths

_SHAPE: Final = re.compile(r"(ses|msg|prt|per|que|wrk)_[A-Za-z0-9]{1,128}\Z")


def well_formed(prefix: str, value: str) -> bool:
    """Tell whether a value has the shape of OpenCode's ids of this kind."""
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


# Answers


@cache
def _adapter(kind: type[T]) -> TypeAdapter[T]:
    """Built when it is first needed: all of them together would double the time to start."""
    return TypeAdapter(kind)


def _decode(kind: type[T], request: _Request, reply: Reply) -> T:
    media_type = reply.headers.get("content-type", "")
    if not media_type.startswith("application/json"):
        raise _wrong_media_type(request, media_type)
    try:
        return _validated(kind, reply.body)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        where = ".".join(str(step) for step in first["loc"])
        detail = f"{request.name}: {first['type']} at {where or 'the top'}"
        raise UpstreamPayloadError(detail=detail) from None


def _validated(kind: type[T], body: bytes) -> T:
    try:
        return _adapter(kind).validate_json(body)
    except ValidationError:
        # OpenCode's tools cut text in the middle of a character.
        whole = whole_characters(body)
        if whole == body:
            raise
        return _adapter(kind).validate_json(whole)


def _wrong_media_type(request: _Request, media_type: str) -> UpstreamPayloadError:
    kind = media_type.partition(";")[0] or "no content type"
    return UpstreamPayloadError(detail=f"{request.name}: unexpected {kind[:80]}")
