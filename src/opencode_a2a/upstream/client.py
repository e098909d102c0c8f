"""OpenCode's HTTP interface: one method per endpoint, typed both ways.

``execution`` and ``extensions`` call it, ``upstream.feed`` reads the event stream through it.
An id goes into a path only if it has the shape of one, so that no id can reach another
endpoint. What comes back is checked: status, content type, size, shape. Errors are those of
``opencode_a2a.errors`` and never carry a driver's text. Nothing here knows turns or A2A.
"""

import asyncio
import base64
import re
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
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
from opencode_a2a.tracing import trace_headers
from opencode_a2a.upstream.exchange import (
    Exchange,
    ExchangeError,
    TooLargeError,
)
from opencode_a2a.upstream.models import (
    Agent,
    Command,
    CommandCall,
    Config,
    ConnectedProviders,
    FileContent,
    FileDiff,
    FileNode,
    FileStatus,
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
from opencode_a2a.upstream.refusals import refusal

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


@dataclass(frozen=True, slots=True)
class _Answer:
    media_type: str
    next_cursor: str | None
    body: bytes


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
        headers = _headers(username, password)
        self._calls = Exchange(self.base_url, headers, max_response_bytes)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_exc: object) -> None:
        self._calls.close()

    # Sessions

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

    async def session(self, session_id: SessionId, *, at: Location = HERE) -> Session:
        return await self._get(Session, _session(session_id), at)

    async def create_session(self, draft: SessionDraft, *, at: Location = HERE) -> Session:
        return await self._post(Session, "/session", at, _wire(draft))

    async def update_session(
        self, session_id: SessionId, changes: SessionChanges, *, at: Location = HERE
    ) -> Session:
        return await self._call(
            Session, _Request("PATCH", _session(session_id), at, body=_wire(changes))
        )

    async def delete_session(self, session_id: SessionId, *, at: Location = HERE) -> None:
        """Delete a session and its children. A running turn goes on: abort it first."""
        await self._call(bool, _Request("DELETE", _session(session_id), at))

    async def session_children(
        self, session_id: SessionId, *, at: Location = HERE
    ) -> list[Session]:
        return await self._get(list[Session], _session(session_id, "/children"), at)

    async def session_todo(self, session_id: SessionId, *, at: Location = HERE) -> list[Todo]:
        return await self._get(list[Todo], _session(session_id, "/todo"), at)

    async def session_diff(
        self,
        session_id: SessionId,
        message_id: MessageId | None = None,
        *,
        at: Location = HERE,
    ) -> list[FileDiff]:
        """List the files that the answer to one *user* message changed; without it, none."""
        return await self._get(
            list[FileDiff], _session(session_id, "/diff"), at, {"messageID": message_id}
        )

    async def fork_session(
        self,
        session_id: SessionId,
        message_id: MessageId | None = None,
        *,
        at: Location = HERE,
    ) -> Session:
        """Copy the messages before ``message_id`` into a new session, without its permissions."""
        body = _json(messageID=message_id)
        return await self._post(Session, _session(session_id, "/fork"), at, body)

    async def share_session(self, session_id: SessionId, *, at: Location = HERE) -> Session:
        return await self._post(Session, _session(session_id, "/share"), at)

    async def unshare_session(self, session_id: SessionId, *, at: Location = HERE) -> Session:
        return await self._call(Session, _Request("DELETE", _session(session_id, "/share"), at))

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
        await self._turn(bool, _session(session_id, "/summarize"), at, body)

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

    async def unrevert_session(self, session_id: SessionId, *, at: Location = HERE) -> Session:
        return await self._post(Session, _session(session_id, "/unrevert"), at)

    async def abort_session(self, session_id: SessionId, *, at: Location = HERE) -> None:
        """Stop the session's turn; returns after it. Idle and unknown sessions do not object."""
        path = _session(session_id, "/abort")
        await self._call(bool, _Request("POST", path, at, urgent=True))

    async def session_status(self, *, at: Location = HERE) -> dict[SessionId, SessionStatus]:
        """Return the sessions of this location that are not idle."""
        return await self._get(dict[SessionId, SessionStatus], "/session/status", at)

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
        answer = await self._exchange(request)
        return MessagePage(_decode(list[MessageWithParts], request, answer), answer.next_cursor)

    async def message(
        self, session_id: SessionId, message_id: MessageId, *, at: Location = HERE
    ) -> MessageWithParts:
        path = _session(session_id, "/message/") + _checked("msg", message_id)
        return await self._get(MessageWithParts, path, at)

    async def prompt(
        self, session_id: SessionId, prompt: Prompt, *, at: Location = HERE
    ) -> MessageWithParts:
        """Run a turn and return its last message. An error may be inside: ``info.error``."""
        return await self._turn(
            MessageWithParts, _session(session_id, "/message"), at, _wire(prompt)
        )

    async def prompt_async(
        self, session_id: SessionId, prompt: Prompt, *, at: Location = HERE
    ) -> None:
        """Start a turn; whatever becomes of it is told by events alone."""
        path = _session(session_id, "/prompt_async")
        request = _Request("POST", path, at, body=_wire(prompt))
        answer = await self._exchange(request)
        if answer.body:
            raise UpstreamPayloadError(detail=f"{request.name}: expected no content")

    async def run_command(
        self, session_id: SessionId, command: CommandCall, *, at: Location = HERE
    ) -> MessageWithParts:
        return await self._turn(
            MessageWithParts, _session(session_id, "/command"), at, _wire(command)
        )

    async def run_shell(
        self, session_id: SessionId, command: ShellCall, *, at: Location = HERE
    ) -> MessageWithParts:
        return await self._turn(
            MessageWithParts, _session(session_id, "/shell"), at, _wire(command)
        )

    # Interrupts

    async def permissions(self, *, at: Location = HERE) -> list[PermissionRequest]:
        """List what waits for an answer in this location, and only there."""
        return await self._get(list[PermissionRequest], "/permission", at)

    async def reply_permission(
        self,
        request_id: RequestId,
        reply: PermissionReply,
        message: str | None = None,
        *,
        at: Location = HERE,
    ) -> None:
        """Answer a permission; the location has to be the one that asked."""
        path = f"/permission/{_checked('per', request_id)}/reply"
        body = _json(reply=reply, message=message)
        await self._call(bool, _Request("POST", path, at, body=body, urgent=True))

    async def questions(self, *, at: Location = HERE) -> list[QuestionRequest]:
        return await self._get(list[QuestionRequest], "/question", at)

    async def reply_question(
        self,
        request_id: RequestId,
        answers: Sequence[Sequence[str]],
        *,
        at: Location = HERE,
    ) -> None:
        """Answer the questions of one request, a list of labels or free texts for each."""
        path = f"/question/{_checked('que', request_id)}/reply"
        body = _json(answers=[list(answer) for answer in answers])
        await self._call(bool, _Request("POST", path, at, body=body, urgent=True))

    async def reject_question(self, request_id: RequestId, *, at: Location = HERE) -> None:
        path = f"/question/{_checked('que', request_id)}/reject"
        await self._call(bool, _Request("POST", path, at, urgent=True))

    # Catalogues

    async def connected_providers(self, *, at: Location = HERE) -> ConnectedProviders:
        """Return the providers that can be used now, without their keys."""
        return await self._get(ConnectedProviders, "/config/providers", at)

    async def provider_catalogue(self, *, at: Location = HERE) -> ProviderCatalogue:
        """Return every provider OpenCode knows: seven megabytes, worth keeping for a while."""
        request = _Request("GET", "/provider", at)
        answer = await self._exchange(request)
        # A quarter of a second of work that would otherwise stop every stream for that long.
        return await asyncio.to_thread(_decode, ProviderCatalogue, request, answer)

    async def agents(self, *, at: Location = HERE) -> list[Agent]:
        return await self._get(list[Agent], "/agent", at)

    async def commands(self, *, at: Location = HERE) -> list[Command]:
        return await self._get(list[Command], "/command", at)

    async def config(self, *, at: Location = HERE) -> Config:
        """Return what may be known of the configuration; an invalid one is an HTTP error."""
        return await self._get(Config, "/config", at)

    # Projects, worktrees, workspaces

    async def projects(self, *, at: Location = HERE) -> list[Project]:
        return await self._get(list[Project], "/project", at)

    async def current_project(self, *, at: Location = HERE) -> Project:
        return await self._get(Project, "/project/current", at)

    async def worktrees(self, *, at: Location = HERE) -> list[str]:
        """List the directories of the project's worktrees."""
        return await self._get(list[str], "/experimental/worktree", at)

    async def create_worktree(
        self,
        name: str | None = None,
        start_command: str | None = None,
        *,
        at: Location = HERE,
    ) -> Worktree:
        """Make a worktree; its files come later, with the event ``worktree.ready``."""
        body = _json(name=name, startCommand=start_command)
        return await self._post(Worktree, "/experimental/worktree", at, body)

    async def remove_worktree(self, directory: str, *, at: Location = HERE) -> bool:
        body = _json(directory=directory)
        return await self._call(bool, _Request("DELETE", "/experimental/worktree", at, body=body))

    async def reset_worktree(self, directory: str, *, at: Location = HERE) -> bool:
        body = _json(directory=directory)
        return await self._post(bool, "/experimental/worktree/reset", at, body)

    async def workspaces(self, *, at: Location = HERE) -> list[Workspace]:
        return await self._get(list[Workspace], "/experimental/workspace", at)

    async def create_workspace(self, draft: WorkspaceDraft, *, at: Location = HERE) -> Workspace:
        return await self._post(Workspace, "/experimental/workspace", at, _wire(draft))

    async def remove_workspace(self, workspace_id: str, *, at: Location = HERE) -> Workspace | None:
        """Remove a workspace; None when there was none."""
        path = f"/experimental/workspace/{_checked('wrk', workspace_id)}"
        request = _Request("DELETE", path, at)
        answer = await self._exchange(request)
        return _decode(Workspace, request, answer) if answer.body.strip() not in _NOTHING else None

    # Files and version control

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

    async def file_status(self, *, at: Location = HERE) -> list[FileStatus]:
        return await self._get(list[FileStatus], "/file/status", at)

    async def vcs(self, *, at: Location = HERE) -> Vcs:
        return await self._get(Vcs, "/vcs", at)

    async def vcs_diff(
        self,
        mode: Literal["git", "branch"] = "git",
        *,
        context: int | None = None,
        at: Location = HERE,
    ) -> list[FileDiff]:
        """Compare the working tree with its last commit, or with the default branch."""
        return await self._get(list[FileDiff], "/vcs/diff", at, {"mode": mode, "context": context})

    async def paths(self, *, at: Location = HERE) -> Paths:
        return await self._get(Paths, "/path", at)

    # The server itself

    async def mcp_status(self, *, at: Location = HERE) -> dict[str, McpStatus]:
        return await self._get(dict[str, McpStatus], "/mcp", at)

    async def add_mcp(
        self, name: str, server: McpServer, *, at: Location = HERE
    ) -> dict[str, McpStatus]:
        """Offer an MCP server's tools in this location, from the next prompt until a restart."""
        config = server.model_dump(mode="json", by_alias=True, exclude_none=True)
        return await self._post(dict[str, McpStatus], "/mcp", at, _json(name=name, config=config))

    async def health(self) -> Health:
        return await self._call(Health, _Request("GET", "/global/health", urgent=True))

    async def dispose(self) -> None:
        """Abort every turn and end every tool process of the whole server."""
        await self._call(bool, _Request("POST", "/global/dispose", urgent=True))

    async def dispose_instance(self, *, at: Location = HERE) -> None:
        await self._call(bool, _Request("POST", "/instance/dispose", at, urgent=True))

    @asynccontextmanager
    async def events(self, *, read_timeout: float) -> AsyncGenerator[AsyncIterator[bytes]]:
        """Open the server's event stream; chunks come as they arrive, cut anywhere.

        OpenCode sends a heartbeat every ten seconds, so that silence for ``read_timeout``
        means a dead connection: it ends with UpstreamTimeoutError.
        """
        request = _Request("GET", "/global/event")
        with _translated(request):
            opened = self._calls.stream(request.target, trace_headers(), read_timeout)
            async with opened as (reply, chunks):
                if reply.status >= 300:
                    body = b"".join([chunk async for chunk in chunks])
                    raise refusal(request.path, reply.status, body)
                media_type = reply.headers.get("content-type", "")
                if not media_type.startswith("text/event-stream"):
                    raise _wrong_media_type(request, media_type)
                yield _patient(chunks, read_timeout)

    # How a call is made

    async def _get(self, kind: type[T], path: str, at: Location, query: Query | None = None) -> T:
        return await self._call(kind, _Request("GET", path, at, query))

    async def _post(self, kind: type[T], path: str, at: Location, body: bytes | None = None) -> T:
        return await self._call(kind, _Request("POST", path, at, body=body))

    async def _turn(self, kind: type[T], path: str, at: Location, body: bytes) -> T:
        return await self._call(kind, _Request("POST", path, at, body=body, endless=True))

    async def _call(self, kind: type[T], request: _Request) -> T:
        return _decode(kind, request, await self._exchange(request))

    async def _exchange(self, request: _Request) -> _Answer:
        """Send a request and read the whole answer, or raise what OpenCode's refusal means."""
        with self._slot(request):
            try:
                async with asyncio.timeout(None if request.endless else self._timeout):
                    return await self._send(request)
            except TimeoutError:
                detail = f"{request.name}: no answer in {self._timeout:g} s"
                raise UpstreamTimeoutError(detail=detail) from None

    @contextmanager
    def _slot(self, request: _Request):
        if self._limit and not request.urgent and self._under_way >= self._limit:
            raise UpstreamBackpressureError(limit=self._limit)
        self._under_way += 1
        try:
            yield
        finally:
            self._under_way -= 1

    async def _send(self, request: _Request) -> _Answer:
        headers = trace_headers()
        if request.body is not None:
            headers["content-type"] = "application/json"
        with _translated(request):
            reply = await self._calls.send(request.method, request.target, request.body, headers)
        if reply.status >= 300:
            raise refusal(request.path, reply.status, reply.body)
        media_type = reply.headers.get("content-type", "")
        return _Answer(media_type, reply.headers.get("x-next-cursor"), reply.body)


_NOTHING: Final = (b"", b"null")


def _headers(username: str, password: str | None) -> dict[str, str]:
    headers = {"accept-encoding": "identity", "user-agent": "opencode-a2a"}
    if password is not None:
        token = base64.b64encode(f"{username}:{password}".encode()).decode()
        headers["authorization"] = f"Basic {token}"
    return headers


@contextmanager
def _translated(request: _Request):
    """Turn what goes wrong on the way into this program's errors."""
    try:
        yield
    except TooLargeError as error:
        raise UpstreamPayloadError(detail=f"{request.name}: {error}") from None
    except ExchangeError as error:
        raise UpstreamUnreachableError(detail=f"{request.name}: {error}") from None
    except TimeoutError:
        raise UpstreamTimeoutError(detail=f"{request.name}: timed out") from None


async def _patient(chunks: AsyncGenerator[bytes], seconds: float) -> AsyncGenerator[bytes]:
    """Pass on what comes, until nothing comes for so long."""
    while True:
        async with asyncio.timeout(seconds):
            chunk = await anext(chunks, None)
        if chunk is None:
            return
        yield chunk


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
    return quote(value, safe="")


def _session(session_id: SessionId, rest: str = "") -> str:
    if not well_formed("ses", session_id):
        raise SessionNotFoundError(session_id=session_id)
    return f"/session/{quote(session_id, safe='')}{rest}"


# Answers


@cache
def _adapter(kind: type[T]) -> TypeAdapter[T]:
    """Built when it is first needed: all of them together would double the time to start."""
    return TypeAdapter(kind)


def _decode(kind: type[T], request: _Request, answer: _Answer) -> T:
    if not answer.media_type.startswith("application/json"):
        raise _wrong_media_type(request, answer.media_type)
    try:
        return _adapter(kind).validate_json(answer.body)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        where = ".".join(str(step) for step in first["loc"])
        detail = f"{request.name}: {first['type']} at {where or 'the top'}"
        raise UpstreamPayloadError(detail=detail) from None


def _wrong_media_type(request: _Request, media_type: str) -> UpstreamPayloadError:
    kind = media_type.partition(";")[0] or "no content type"
    return UpstreamPayloadError(detail=f"{request.name}: unexpected {kind[:80]}")
