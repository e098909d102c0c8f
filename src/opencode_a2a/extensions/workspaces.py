"""Projects, workspaces and worktrees; files and version control, read only.

Only what lies inside the workspace root is shown, and only workspaces and worktrees of the project
can be changed.
"""

import asyncio
import os
from collections.abc import Iterable
from functools import partial
from pathlib import Path as FilePath
from typing import Annotated, Literal

from pydantic import ConfigDict, Field

from opencode_a2a.errors import InvalidParamsError, UpstreamHttpError, UpstreamNotFoundError
from opencode_a2a.events import Json
from opencode_a2a.extensions.call import Call
from opencode_a2a.extensions.params import (
    DEFAULT_LIMIT,
    Body,
    Done,
    Item,
    Items,
    Limit,
    Path,
    Payload,
    Placed,
    Routed,
    Text,
    WorkspaceId,
)
from opencode_a2a.extensions.registry import Access, Condition, Extension, aliases
from opencode_a2a.extensions.worktrees import is_worktree, unsaved
from opencode_a2a.opencode.types import (
    FileDiff,
    FileNode,
    Project,
    Workspace,
    WorkspaceDraft,
    Worktree,
)
from opencode_a2a.validation import FREE

MAX_CONTENT = 1024 * 1024
"""Characters of a file that are returned."""

WORKSPACES = Extension(
    key="workspace_control",
    title="OpenCode workspace control",
    anchor="opencode-workspace-control-v1",
    summary="Projects, workspaces and worktrees; files and changes, read only.",
    aliases=aliases("urn:opencode-a2a:workspace-control/v1", "workspace-control"),
    skill="opencode.workspace.control",
    tags=("files", "worktrees", "git"),
    notes=(
        "Files are those below the workspace root, after symbolic links are followed.",
        "Workspaces and worktrees are experimental in OpenCode.",
        "Workspaces and worktrees that another caller made do not exist for the caller.",
        "A worktree can be removed and reset only where the service sees its directory: OpenCode "
        "would delete an ordinary clone as well.",
    ),
)

_mutation = partial(
    WORKSPACES.method,
    condition=Condition(
        "A2A_ENABLE_WORKSPACE_MUTATIONS", lambda s: s.a2a.enable_workspace_mutations
    ),
    capability="workspace_mutation",
    stability="experimental",
    audit="workspace_mutation_audit",
)
"""Declares a method that makes or removes workspaces or worktrees."""


class ProjectItem(Payload):
    id: str
    name: str | None = None
    vcs: str | None = None
    worktree: str | None = None


class MaybeWorkspace(Payload):
    nullable = frozenset({"item"})

    item: Workspace | None = None


class Directories(Payload):
    items: list[str]


@WORKSPACES.method("opencode.projects.list", Access.READ)
async def list_projects(call: Call, params: Routed) -> Items[ProjectItem]:
    """List the projects that lie in the workspace, or around it."""
    workspace, items = call.deps.workspace, list[ProjectItem]()
    for project in await call.opencode.projects(at=call.at):
        place = project.worktree  # "/" for what is in no repository
        if (
            workspace.root is None
            or workspace.holds(place)
            or (place != "/" and FilePath(workspace.root).is_relative_to(place))
        ):
            items.append(_project(call, project))
    return Items(items=items)


@WORKSPACES.method("opencode.projects.current", Access.READ)
async def current_project(call: Call, params: Routed) -> Item[ProjectItem]:
    """Return the project that the workspace belongs to."""
    found = await call.opencode.current_project(at=call.at)
    return Item(item=_project(call, found))


def _project(call: Call, project: Project) -> ProjectItem:
    inside = call.deps.workspace.holds(project.worktree)
    return ProjectItem(
        id=project.id,
        name=project.name,
        vcs=project.vcs,
        worktree=project.worktree if inside else None,
    )


def _merge_workspaces(_: Routed, lists: list[Items[Workspace]]) -> Items[Workspace]:
    found = {item.id: item for one in lists for item in one.items}
    # In one order on all replicas, each of which lists its own first.
    return Items(items=[found[one] for one in (sorted(found) if len(lists) > 1 else found)])


@WORKSPACES.method(
    "opencode.workspaces.list",
    Access.READ,
    merge=_merge_workspaces,
    stability="experimental",
    requires="workspaces",
)
async def list_workspaces(call: Call, params: Routed) -> Items[Workspace]:
    """List the workspaces of the project, without those that other callers made."""
    found = {one.id: one for one in await call.opencode.workspaces(at=call.at)}
    return Items(items=[found[one] for one in await _visible(call, found)])


def _merge_worktrees(_: Routed, lists: list[Directories]) -> Directories:
    found = dict.fromkeys(item for one in lists for item in one.items)
    return Directories(items=sorted(found) if len(lists) > 1 else [*found])


@WORKSPACES.method(
    "opencode.worktrees.list",
    Access.READ,
    merge=_merge_worktrees,
    stability="experimental",
    requires="worktrees",
)
async def list_worktrees(call: Call, params: Routed) -> Directories:
    """List the directories of the project's worktrees, without those that other callers made."""
    project = await call.opencode.current_project(at=call.at)
    found = await _visible(call, await call.opencode.worktrees(at=call.at))
    # OpenCode also lists ordinary clones that it was once started in.
    real = [await asyncio.to_thread(is_worktree, one, project.worktree) for one in found]
    items = [one for one, known in zip(found, real, strict=True) if known is not False]
    return Directories(items=items)


async def _visible(call: Call, names: Iterable[str]) -> list[str]:
    return await call.places.visible(call.principal, names)


# --- changes ----------------------------------------------------------------------------------


class WorkspaceRequest(Body):
    type: Text
    id: WorkspaceId | None = None
    branch: Text | None = None
    extra: Annotated[Json, FREE] = None


class CreateWorkspaceParams(Routed):
    request: WorkspaceRequest


@_mutation(
    "opencode.workspaces.create",
    Access.OPERATE,
    example={"request": {"type": "worktree"}},
    requires="workspaces",
)
async def create_workspace(call: Call, params: CreateWorkspaceParams) -> Item[Workspace]:
    """Make a workspace; OpenCode has to be started with `OPENCODE_EXPERIMENTAL_WORKSPACES=1`."""
    draft = WorkspaceDraft(**dict(params.request))
    try:
        made = await call.opencode.create_workspace(draft, at=call.at)
    except UpstreamHttpError as error:
        if not (error.detail or "").startswith("Timed out waiting"):
            raise
        # An OpenCode without workspaces says so, after five seconds.
        raise UpstreamHttpError(
            "OpenCode has no workspaces; start it with OPENCODE_EXPERIMENTAL_WORKSPACES=1",
            detail=error.detail,
            **error.data,
        ) from None
    directories = [made.directory] if made.directory else []
    await call.places.own(call.principal, made.id, *directories)
    return Item(item=made)


class RemoveWorkspaceParams(Routed):
    workspace_id: WorkspaceId
    force: bool = False

    @property
    def named_place(self) -> str | None:
        return self.workspace_id


@_mutation(
    "opencode.workspaces.remove",
    Access.OPERATE,
    UpstreamNotFoundError,
    example={"workspace_id": "wrk_1deb3fc6b000iKn0wo4MZ7ksDZ"},
    requires="workspaces",
)
async def remove_workspace(call: Call, params: RemoveWorkspaceParams) -> MaybeWorkspace:
    """Remove a workspace and its worktree; ``item`` is null when there was none.

    One with changes, or with commits that are on no other branch, is removed with `force` only.
    """
    workspace_id = params.workspace_id
    if not await _visible(call, [workspace_id]):
        return MaybeWorkspace()
    found = {one.id: one.directory for one in await call.opencode.workspaces(at=call.at)}
    directory = found.get(workspace_id)
    if directory is not None:
        await _check_removable(call, "workspace_id", directory, force=params.force)
    removed = await call.opencode.remove_workspace(workspace_id, at=call.at)
    await call.places.forget(workspace_id, *([directory] if directory else []))
    return MaybeWorkspace(item=removed)


class WorktreeRequest(Body):
    name: Text | None = None
    start_command: Text | None = None


class CreateWorktreeParams(Routed):
    request: WorktreeRequest = WorktreeRequest()


@_mutation("opencode.worktrees.create", Access.OPERATE, requires="worktrees")
async def create_worktree(call: Call, params: CreateWorktreeParams) -> Item[Worktree]:
    """Make a git worktree of the project; its files are there a moment later."""
    name, command = params.request.name, params.request.start_command
    made = await call.opencode.create_worktree(name, command, at=call.at)
    await call.places.own(call.principal, made.directory)
    return Item(item=made)


class DirectoryRequest(Body):
    directory: Path


class WorktreeParams(Routed):
    request: DirectoryRequest

    @property
    def named_place(self) -> str | None:
        return self.request.directory


class RemovalRequest(DirectoryRequest):
    force: bool = False


class RemoveWorktreeParams(Routed):
    request: RemovalRequest

    @property
    def named_place(self) -> str | None:
        return self.request.directory


@_mutation(
    "opencode.worktrees.remove",
    Access.OPERATE,
    example={"request": {"directory": "/srv/worktrees/one"}},
    requires="worktrees",
)
async def remove_worktree(call: Call, params: RemoveWorktreeParams) -> Done:
    """Remove a worktree of the project and its branch.

    One with changes, or with commits that are on no other branch, is removed with `force` only.
    """
    directory = await _worktree(call, params.request)
    await _check_removable(call, "request.directory", directory, force=params.request.force)
    done = await call.opencode.remove_worktree(directory, at=call.at)
    await call.places.forget(directory)
    return Done(ok=done)


@_mutation(
    "opencode.worktrees.reset",
    Access.OPERATE,
    example={"request": {"directory": "/srv/worktrees/one"}},
    requires="worktrees",
)
async def reset_worktree(call: Call, params: WorktreeParams) -> Done:
    """Bring a worktree of the project back to its branch point; changes in it are lost."""
    directory = await _worktree(call, params.request)
    await _check_worktree(call, "request.directory", directory)
    return Done(ok=await call.opencode.reset_worktree(directory, at=call.at))


async def _worktree(call: Call, request: DirectoryRequest) -> str:
    """Return the directory if OpenCode lists it and no other caller made it."""
    listed = await call.opencode.worktrees(at=call.at)
    if request.directory not in listed or not await _visible(call, [request.directory]):
        raise _no_worktree("request.directory")
    return request.directory


async def _check_worktree(call: Call, field: str, directory: str) -> None:
    """Refuse a directory that is not certain to be a worktree of the project."""
    project = await call.opencode.current_project(at=call.at)
    here = await asyncio.to_thread(is_worktree, directory, project.worktree)
    if here is None:
        raise InvalidParamsError.of(
            field,
            "is not on this machine, so it cannot be checked for work that would be lost; "
            "use git where OpenCode runs",
        )
    if not here:
        raise _no_worktree(field)


async def _check_removable(call: Call, field: str, directory: str, *, force: bool) -> None:
    await _check_worktree(call, field, directory)
    lost = None if force else await unsaved(directory)
    if lost is not None:
        raise InvalidParamsError.of(field, f"{lost}; set force to true to remove it anyway")


def _no_worktree(field: str) -> InvalidParamsError:
    return InvalidParamsError.of(field, "is not a worktree; opencode.worktrees.list lists them")


# --- files ------------------------------------------------------------------------------------


class FilesParams(Placed):
    path: Path = ""


@WORKSPACES.method("opencode.files.list", Access.READ, example={"path": "."})
async def list_files(call: Call, params: FilesParams) -> Items[FileNode]:
    """List a directory of the workspace."""
    path = _inside(call, params.path, "directory")
    return Items(items=await call.opencode.list_files(path, at=call.at))


class ReadFile(Payload):
    model_config = ConfigDict(title="FileContent")

    path: str
    type: Literal["text", "binary"]
    content: str
    encoding: str | None = None
    mime_type: str | None = None
    truncated: bool


class ReadParams(Placed):
    path: Text


@WORKSPACES.method("opencode.files.read", Access.READ, example={"path": "README.md"})
async def read_file(call: Call, params: ReadParams) -> ReadFile:
    """Return a file of the workspace: text, without the white space around it, or base64."""
    path = _inside(call, params.path, "file")
    found = await call.opencode.read_file(path, at=call.at)
    return ReadFile(
        path=path,
        type=found.type,
        content=found.content[:MAX_CONTENT],
        encoding=found.encoding,
        mime_type=found.mime_type,
        truncated=len(found.content) > MAX_CONTENT,
    )


class Match(Payload):
    path: str
    line: int | None = None
    text: str | None = None


class FindParams(Placed):
    query: Text
    type: Literal["name", "text"] = "name"
    limit: Limit = DEFAULT_LIMIT


@WORKSPACES.method("opencode.files.find", Access.READ, example={"query": "TODO", "type": "text"})
async def find_files(call: Call, params: FindParams) -> Items[Match]:
    """Find files by a part of their name, or lines by a regular expression."""
    if params.type == "name":
        names = await call.opencode.find_files(params.query, limit=params.limit, at=call.at)
        found = [Match(path=name) for name in names]
    else:
        lines = await call.opencode.find_text(params.query, at=call.at)
        found = [
            Match(path=one.path.text, line=one.line_number, text=one.lines.text.rstrip("\n")[:2000])
            for one in lines
        ]
    # OpenCode's search by name follows links that lead out of the workspace (1.18).
    inside = [match for match in found[: params.limit] if _holds(call, match.path)]
    return Items(items=inside)


def _holds(call: Call, found: str) -> bool:
    """Whether a file that was found is below the directory of the call, after following links."""
    base = call.at.directory
    return base is None or FilePath(os.path.realpath(FilePath(base) / found)).is_relative_to(base)


def _inside(call: Call, named: str, kind: Literal["file", "directory"]) -> str:
    """Return a path below the directory of the call; refuse one that leads out, even by a link."""
    base = call.at.directory
    if base is None:
        # The workspace is not ours to see: OpenCode keeps to its directory, if no path leads up.
        if FilePath(named).is_absolute() or ".." in FilePath(named).parts:
            raise InvalidParamsError.of("path", "must be inside the workspace")
        return named or "."
    real = FilePath(os.path.realpath(FilePath(base) / named))
    if not call.deps.workspace.holds(str(real)) or not real.is_relative_to(base):
        raise InvalidParamsError.of("path", "must be inside the workspace")
    # Unlike those of pathlib, these functions do not raise for a name that is too long.
    if os.path.isdir(base):  # else the workspace is on another machine
        if not os.path.exists(real):
            raise InvalidParamsError.of("path", "does not exist")
        if not (os.path.isfile(real) if kind == "file" else os.path.isdir(real)):
            raise InvalidParamsError.of("path", f"must be a {kind}")
    return os.path.relpath(real, base)


# --- version control --------------------------------------------------------------------------


class VcsParams(Placed):
    mode: Literal["git", "branch"] = "git"
    context: Annotated[int, Field(ge=0, le=1000)] | None = None


class VcsDiff(Items[FileDiff]):
    branch: str | None = None
    default_branch: str | None = None


@WORKSPACES.method("opencode.vcs.diff", Access.READ, example={"mode": "git"})
async def vcs_diff(call: Call, params: VcsParams) -> VcsDiff:
    """Compare the working tree with its last commit, or with the default branch."""
    vcs = await call.opencode.vcs(at=call.at)
    found = await call.opencode.vcs_diff(params.mode, context=params.context, at=call.at)
    return VcsDiff(items=found, branch=vcs.branch, default_branch=vcs.default_branch)
