"""What the service asks of an OpenCode, whatever its generation.

``turns`` and ``extensions`` work with a ``Driver`` and the values of ``opencode.types`` and
``opencode.events``, which are those of OpenCode 1. ``opencode.client`` drives 1.x; what drives
another generation translates at its own wire. Nothing above this layer asks which generation it is.
"""

from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal, Protocol, Self

from opencode_a2a.errors import Missing
from opencode_a2a.ids import MessageId, ModelRef, RequestId, SessionId
from opencode_a2a.net.exchange import HttpResponse
from opencode_a2a.opencode.events import Event
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
    Workspace,
    WorkspaceDraft,
    Worktree,
)
from opencode_a2a.rights import PERMISSIONS


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
class Features:
    """What an OpenCode can do that another cannot."""

    always: bool = True
    """Whether the answer `always` to a permission ends with OpenCode: elsewhere it holds for good,
    for everybody, and is not sent."""
    lists_plugins: bool = True
    """Whether it says which plugins it has loaded, and so whether one withholds its password."""
    permissions: frozenset[str] = PERMISSIONS
    """The permissions of its own tools that it may ask for, in the names of OpenCode 1."""
    missing: Missing = frozenset()
    """What callers may ask for in vain; cards leave it out."""


class Decoder(Protocol):
    """Decodes the events of one connection; it may remember earlier ones."""

    @property
    def connected(self) -> bytes:
        """The type of the event with which a connection begins, as it stands in a frame."""
        ...

    @property
    def disposed(self) -> frozenset[bytes]:
        """The types of the events after which others may be missing."""
        ...

    @property
    def followed(self) -> frozenset[bytes]:
        """The types of the events that matter to turns."""
        ...

    @property
    def overheard(self) -> frozenset[bytes]:
        """Those of them that matter to a replica that may take the turn over.

        They are decoded for ``opencode.heard``, even if nobody follows the session.
        """
        ...

    def head(self, data: bytes) -> tuple[bytes, bytes]:
        """Return the type and the session of an undecoded frame; the session may be empty."""
        ...

    def parent(self, kind: bytes, data: bytes) -> bytes:
        """Return the session whose child an undecoded frame is about; empty if it names none."""
        ...

    def decode(self, data: bytes) -> Sequence[Event]:
        """Return the events that a frame stands for; raise MalformedEventError."""
        ...


class Driver(Protocol):
    """One OpenCode server. ``opencode.client`` documents what each method does on 1.x.

    A method that a server cannot carry out raises NotInOpenCodeError.
    """

    before_change: Callable[[], Awaitable[None]] | None
    version: str | None

    @property
    def features(self) -> Features: ...
    @property
    def has_password(self) -> bool: ...

    # Sessions

    async def session(self, session_id: SessionId, *, at: Location = HERE) -> Session: ...
    async def sessions(
        self,
        *,
        at: Location = HERE,
        limit: int | None = None,
        roots: bool | None = None,
        search: str | None = None,
        start: int | None = None,
    ) -> list[Session]: ...
    async def session_children(
        self, session_id: SessionId, *, at: Location = HERE
    ) -> list[Session]: ...
    async def session_status(self, *, at: Location = HERE) -> dict[SessionId, SessionStatus]: ...
    async def session_todo(self, session_id: SessionId, *, at: Location = HERE) -> list[Todo]: ...
    async def session_diff(
        self, session_id: SessionId, message_id: MessageId | None = None, *, at: Location = HERE
    ) -> list[FileDiff]: ...
    async def create_session(self, draft: SessionDraft, *, at: Location = HERE) -> Session: ...
    async def update_session(
        self, session_id: SessionId, changes: SessionChanges, *, at: Location = HERE
    ) -> Session: ...
    async def delete_session(self, session_id: SessionId, *, at: Location = HERE) -> bool: ...
    async def abort_session(self, session_id: SessionId, *, at: Location = HERE) -> bool: ...
    async def fork_session(
        self, session_id: SessionId, message_id: MessageId | None = None, *, at: Location = HERE
    ) -> Session: ...
    async def summarize_session(
        self,
        session_id: SessionId,
        model: ModelRef,
        *,
        auto: bool | None = None,
        at: Location = HERE,
    ) -> None: ...
    async def revert_session(
        self,
        session_id: SessionId,
        message_id: MessageId,
        part_id: str | None = None,
        *,
        at: Location = HERE,
    ) -> Session: ...
    async def unrevert_session(self, session_id: SessionId, *, at: Location = HERE) -> Session: ...
    async def share_session(self, session_id: SessionId, *, at: Location = HERE) -> Session: ...
    async def unshare_session(self, session_id: SessionId, *, at: Location = HERE) -> Session: ...

    # Messages

    async def messages(
        self,
        session_id: SessionId,
        *,
        limit: int | None = None,
        before: str | None = None,
        at: Location = HERE,
    ) -> MessagePage: ...
    async def message(
        self, session_id: SessionId, message_id: MessageId, *, at: Location = HERE
    ) -> MessageWithParts: ...
    def leave_work(self, messages: Sequence[MessageWithParts]) -> bool: ...
    def prompt(
        self, session_id: SessionId, prompt: Prompt, *, at: Location = HERE
    ) -> Coroutine[None, None, MessageWithParts]: ...
    async def prompt_async(
        self, session_id: SessionId, prompt: Prompt, *, at: Location = HERE
    ) -> None: ...
    async def run_command(
        self, session_id: SessionId, command: CommandCall, *, at: Location = HERE
    ) -> MessageWithParts: ...
    async def run_shell(
        self, session_id: SessionId, command: ShellCall, *, at: Location = HERE
    ) -> MessageWithParts: ...

    # Interrupts; the location has to be that of the session that asks

    async def permissions(self, *, at: Location = HERE) -> list[PermissionRequest]: ...
    async def questions(self, *, at: Location = HERE) -> list[QuestionRequest]: ...
    async def reply_permission(
        self,
        request_id: RequestId,
        reply: Literal["once", "always", "reject"],
        message: str | None = None,
        *,
        at: Location = HERE,
    ) -> None: ...
    async def reply_question(
        self, request_id: RequestId, answers: Sequence[Sequence[str]], *, at: Location = HERE
    ) -> None: ...
    async def reject_question(self, request_id: RequestId, *, at: Location = HERE) -> None: ...

    # Catalogues

    async def agents(self, *, at: Location = HERE) -> list[Agent]: ...
    async def commands(self, *, at: Location = HERE) -> list[Command]: ...
    async def command_sources(self, *, at: Location = HERE) -> list[CommandSource]: ...
    async def config(self, *, at: Location = HERE) -> Config: ...
    async def connected_providers(self, *, at: Location = HERE) -> ConnectedProviders: ...
    async def provider_catalogue(self, *, at: Location = HERE) -> ProviderCatalogue: ...

    # Projects, worktrees, workspaces

    async def projects(self, *, at: Location = HERE) -> list[Project]: ...
    async def current_project(self, *, at: Location = HERE) -> Project: ...
    async def worktrees(self, *, at: Location = HERE) -> list[str]: ...
    async def create_worktree(
        self, name: str | None = None, start_command: str | None = None, *, at: Location = HERE
    ) -> Worktree: ...
    async def remove_worktree(self, directory: str, *, at: Location = HERE) -> bool: ...
    async def reset_worktree(self, directory: str, *, at: Location = HERE) -> bool: ...
    async def workspaces(self, *, at: Location = HERE) -> list[Workspace]: ...
    async def create_workspace(
        self, draft: WorkspaceDraft, *, at: Location = HERE
    ) -> Workspace: ...
    async def remove_workspace(
        self, workspace_id: str, *, at: Location = HERE
    ) -> Workspace | None: ...

    # Files and version control

    async def list_files(self, path: str, *, at: Location = HERE) -> list[FileNode]: ...
    async def read_file(self, path: str, *, at: Location = HERE) -> FileBody: ...
    async def find_text(self, pattern: str, *, at: Location = HERE) -> list[TextMatch]: ...
    async def find_files(
        self, query: str, *, limit: int | None = None, at: Location = HERE
    ) -> list[str]: ...
    async def vcs(self, *, at: Location = HERE) -> Vcs: ...
    async def vcs_diff(
        self, mode: Literal["git", "branch"], *, context: int | None = None, at: Location = HERE
    ) -> list[FileDiff]: ...

    # The server itself

    async def tool_ids(self, *, at: Location = HERE) -> list[str]: ...
    async def mcp_status(self, *, at: Location = HERE) -> dict[str, McpStatus]: ...
    async def add_mcp(
        self, name: str, server: McpServer, *, at: Location = HERE
    ) -> dict[str, McpStatus]: ...
    async def paths(self) -> Paths: ...
    async def health(self) -> Health: ...
    async def dispose(self) -> None: ...
    async def raw_response(self, path: str) -> HttpResponse: ...
    async def events(self, sink: Callable[[bytes], object]) -> None: ...
    def begin_decoding(self) -> Decoder: ...
