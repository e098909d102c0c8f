"""The driver of OpenCode 1: one method per endpoint, with typed requests and responses.

``turns`` and ``extensions`` call it as a ``Driver``; ``opencode.feed`` reads the event stream
through it. ``opencode.calls`` makes the calls. Nothing here knows about turns or A2A.
"""

import asyncio
import re
from collections.abc import Callable, Coroutine, Sequence
from types import NoneType
from typing import Literal, TypeVar

from opencode_a2a.errors import ServiceError, SessionNotFoundError, UpstreamNotFoundError
from opencode_a2a.events import JsonObject
from opencode_a2a.ids import MessageId, ModelRef, RequestId, SessionId
from opencode_a2a.opencode.calls import (
    Calls,
    Query,
    Refusal,
    Request,
    checked,
    decode,
    well_formed,
)
from opencode_a2a.opencode.driver import HERE, Decoder, Features, Location, MessagePage
from opencode_a2a.opencode.events import Decoder1
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
    Readable,
    Session,
    SessionChanges,
    SessionDraft,
    SessionStatus,
    ShellCall,
    TextMatch,
    Todo,
    Vcs,
    Workspace,
    WorkspaceDraft,
    Worktree,
)

T = TypeVar("T")


def _read(kind: type[T], path: str, *, urgent: bool = False):
    """Make the method for an endpoint whose only argument is a location."""

    async def read(self: "OpenCode1", *, at: Location = HERE) -> T:
        return await self.call(kind, "GET", path, at, urgent=urgent)

    return read


def _on_session(kind: type[T], method: str, rest: str = "", *, urgent: bool = False):
    """Make the method for an endpoint whose only argument is a session."""

    async def call(self: "OpenCode1", session_id: SessionId, *, at: Location = HERE) -> T:
        return await self.call(kind, method, _session(session_id, rest), at, urgent=urgent)

    return call


class OpenCode1(Calls):
    """The driver of an OpenCode 1; open it with ``async with``."""

    features = Features()

    def place(self, at: Location) -> dict[str, str]:
        if at.workspace is not None:
            return {"workspace": checked("wrk", at.workspace)}
        return {} if at.directory is None else {"directory": at.directory}

    def not_found(self, path: str, refused: Refusal, detail: str) -> ServiceError:
        session = re.match(r"/session/(ses_[^/]*)", path)
        if session is not None and not detail.startswith("Message not found"):
            return SessionNotFoundError(session_id=session[1])
        return UpstreamNotFoundError(upstream_status=404, detail=detail)

    # Sessions

    session = _on_session(Session, "GET")
    session_children = _on_session(Readable[Session], "GET", "/children")
    session_todo = _on_session(Readable[Todo], "GET", "/todo")
    share_session = _on_session(Session, "POST", "/share")
    unshare_session = _on_session(Session, "DELETE", "/share")
    unrevert_session = _on_session(Session, "POST", "/unrevert")
    delete_session = _on_session(bool, "DELETE")
    """Delete a session and its children. This does not stop a running turn: abort it first."""
    abort_session = _on_session(bool, "POST", "/abort", urgent=True)
    """Stop the session's turn and return when it has ended. An idle session stays as it is."""
    session_status = _read(dict[SessionId, SessionStatus], "/session/status", urgent=True)
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
        return await self.call(Readable[Session], "GET", "/session", at, query=query)

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
        return await self.call(Readable[FileDiff], "GET", path, at, query=query)

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
        request = Request("GET", _session(session_id, "/message"), at, query)
        response = await self.send(request)
        items = decode(list[MessageWithParts], request, response)
        return MessagePage(items, response.headers.get("x-next-cursor"))

    async def message(
        self, session_id: SessionId, message_id: MessageId, *, at: Location = HERE
    ) -> MessageWithParts:
        path = _session(session_id, "/message/") + checked("msg", message_id)
        return await self.call(MessageWithParts, "GET", path, at)

    def leave_work(self, messages: Sequence[MessageWithParts]) -> bool:
        """Whether messages have put work into the background whose end none of them reports.

        OpenCode 1 has no such work.
        """
        return False

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
        """Start a turn and return at once; only events tell how it continues."""
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
        path = f"/permission/{checked('per', request_id)}/reply"
        body: JsonObject = {"reply": reply, "message": message}
        await self.call(bool, "POST", path, at, body=body, urgent=True)

    async def reply_question(
        self, request_id: RequestId, answers: Sequence[Sequence[str]], *, at: Location = HERE
    ) -> None:
        """Answer the questions of one request, each with a list of labels or free texts."""
        path = f"/question/{checked('que', request_id)}/reply"
        body: JsonObject = {"answers": [list(answer) for answer in answers]}
        await self.call(bool, "POST", path, at, body=body, urgent=True)

    async def reject_question(self, request_id: RequestId, *, at: Location = HERE) -> None:
        path = f"/question/{checked('que', request_id)}/reject"
        await self.call(bool, "POST", path, at, urgent=True)

    # Catalogues

    agents = _read(Readable[Agent], "/agent")
    commands = _read(Readable[Command], "/command")
    command_sources = _read(Readable[CommandSource], "/command")
    config = _read(Config, "/config")
    """Return the configuration without its secrets. If it is invalid, OpenCode refuses the call."""
    connected_providers = _read(ConnectedProviders, "/config/providers")

    async def provider_catalogue(self, *, at: Location = HERE) -> ProviderCatalogue:
        request = Request("GET", "/provider", at)
        response = await self.send(request)
        # Decoding takes a quarter of a second, during which no stream would move.
        return await asyncio.to_thread(decode, ProviderCatalogue, request, response)

    # Projects, worktrees, workspaces

    projects = _read(Readable[Project], "/project")
    current_project = _read(Project, "/project/current")
    workspaces = _read(Readable[Workspace], "/experimental/workspace")
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
        path = f"/experimental/workspace/{checked('wrk', workspace_id)}"
        request = Request("DELETE", path, at)
        response = await self.send(request)
        nothing = response.body.strip() in (b"", b"null")
        return None if nothing else decode(Workspace, request, response)

    # Files and version control

    vcs = _read(Vcs, "/vcs")

    async def list_files(self, path: str, *, at: Location = HERE) -> list[FileNode]:
        return await self.call(Readable[FileNode], "GET", "/file", at, query={"path": path})

    async def read_file(self, path: str, *, at: Location = HERE) -> FileBody:
        return await self.call(FileBody, "GET", "/file/content", at, query={"path": path})

    async def find_text(self, pattern: str, *, at: Location = HERE) -> list[TextMatch]:
        """Search the files of the location with ripgrep, which must be installed."""
        return await self.call(Readable[TextMatch], "GET", "/find", at, query={"pattern": pattern})

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
        return await self.call(Readable[FileDiff], "GET", "/vcs/diff", at, query=query)

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

    async def dispose(self) -> None:
        """Abort every turn and end every tool process of the server."""
        await self.call(bool, "POST", "/global/dispose", urgent=True)

    async def events(self, sink: Callable[[bytes], object]) -> None:
        """Pass the event stream to ``sink`` in chunks, cut anywhere, until the stream ends."""
        await self.read_stream("/global/event", sink)

    def begin_decoding(self) -> Decoder:
        return Decoder1()


def _session(session_id: SessionId, rest: str = "") -> str:
    if not well_formed("ses", session_id):
        raise SessionNotFoundError(session_id=session_id)
    return f"/session/{session_id}{rest}"
