"""``opencode.projects.*``, ``opencode.workspaces.*`` and ``opencode.worktrees.*``.

What is told stays inside the workspace root; what is changed has to be one of the project's own.
"""

from pathlib import Path as FilePath
from typing import Annotated

from opencode_a2a.errors import UpstreamNotFoundError
from opencode_a2a.events import Json
from opencode_a2a.extensions.calls import Call
from opencode_a2a.extensions.payloads import (
    FREE,
    Body,
    Done,
    Id,
    Path,
    Payload,
    Routed,
    Text,
    invalid,
)
from opencode_a2a.extensions.registry import (
    UPSTREAM,
    Access,
    Condition,
    Extension,
    Rules,
    aliases,
)
from opencode_a2a.upstream import models as upstream
from opencode_a2a.upstream.client import well_formed
from opencode_a2a.upstream.models import WorkspaceDraft

WORKSPACES = Extension(
    key="workspace_control",
    title="OpenCode workspace control",
    anchor="opencode-workspace-control-v1",
    summary="Projects, workspaces and worktrees; files and changes, read only.",
    aliases=aliases("urn:opencode-a2a:workspace-control/v1", "workspace-control"),
    notes=(
        "Files are those below the workspace root, after symbolic links are followed.",
        "Workspaces and worktrees are experimental in OpenCode.",
    ),
    errors=UPSTREAM,
)

_EXPERIMENTAL = Rules(stability="experimental")
_MUTATION = Rules(
    condition=Condition(
        "A2A_ENABLE_WORKSPACE_MUTATIONS", lambda s: s.a2a.enable_workspace_mutations
    ),
    capability="workspace_mutation",
    stability="experimental",
    audit="workspace_mutation_audit",
)


class ProjectItem(Payload):
    id: str
    name: str | None = None
    vcs: str | None = None
    worktree: str | None = None


class Projects(Payload):
    items: list[ProjectItem]


class OneProject(Payload):
    item: ProjectItem


class WorkspaceItem(Payload):
    id: str
    type: str
    name: str
    branch: str | None = None


class Workspaces(Payload):
    items: list[WorkspaceItem]


class OneWorkspace(Payload):
    item: WorkspaceItem


class MaybeWorkspace(Payload):
    nullable = frozenset({"item"})

    item: WorkspaceItem | None = None


class Directories(Payload):
    items: list[str]


class WorktreeItem(Payload):
    name: str
    directory: str
    branch: str | None = None


class OneWorktree(Payload):
    item: WorktreeItem


@WORKSPACES.method("opencode.projects.list", Access.READ)
async def list_projects(call: Call, params: Routed) -> Projects:
    """List the projects that lie in the workspace, or around it."""
    found = await call.opencode.projects(at=call.location(params))
    return Projects(items=[_project(call, one) for one in found if _related(call, one)])


@WORKSPACES.method("opencode.projects.current", Access.READ)
async def current_project(call: Call, params: Routed) -> OneProject:
    """Return the project that the workspace belongs to."""
    found = await call.opencode.current_project(at=call.location(params))
    return OneProject(item=_project(call, found))


def _related(call: Call, project: upstream.Project) -> bool:
    root = call.deps.workspace.root
    if root is None or call.deps.workspace.holds(project.worktree):
        return True
    return project.worktree != "/" and FilePath(root).is_relative_to(project.worktree)


def _project(call: Call, project: upstream.Project) -> ProjectItem:
    inside = call.deps.workspace.holds(project.worktree)
    return ProjectItem(
        id=project.id,
        name=project.name,
        vcs=project.vcs,
        worktree=project.worktree if inside else None,
    )


@WORKSPACES.method("opencode.workspaces.list", Access.READ, rules=_EXPERIMENTAL)
async def list_workspaces(call: Call, params: Routed) -> Workspaces:
    """List the workspaces of the project."""
    found = await call.opencode.workspaces(at=call.location(params))
    return Workspaces(items=[_workspace(one) for one in found])


def _workspace(found: upstream.Workspace) -> WorkspaceItem:
    return WorkspaceItem(id=found.id, type=found.type, name=found.name, branch=found.branch)


@WORKSPACES.method("opencode.worktrees.list", Access.READ, rules=_EXPERIMENTAL)
async def list_worktrees(call: Call, params: Routed) -> Directories:
    """List the directories of the project's worktrees."""
    return Directories(items=await call.opencode.worktrees(at=call.location(params)))


# --- changes ----------------------------------------------------------------------------------


class WorkspaceRequest(Body):
    type: Text
    id: Id | None = None
    branch: Text | None = None
    extra: Annotated[Json, FREE] = None


class CreateWorkspaceParams(Routed):
    request: WorkspaceRequest


@WORKSPACES.method("opencode.workspaces.create", Access.OPERATE, rules=_MUTATION)
async def create_workspace(call: Call, params: CreateWorkspaceParams) -> OneWorkspace:
    """Make a workspace; OpenCode has to be started with workspaces switched on."""
    request = params.request
    if request.id is not None and not well_formed("wrk", request.id):
        raise invalid("request.id", "is no id of a workspace: wrk_ and letters or digits")
    draft = WorkspaceDraft(
        type=request.type, id=request.id, branch=request.branch, extra=request.extra
    )
    made = await call.opencode.create_workspace(draft, at=call.location(params))
    return OneWorkspace(item=_workspace(made))


class RemoveWorkspaceParams(Routed):
    workspace_id: Id


@WORKSPACES.method(
    "opencode.workspaces.remove", Access.OPERATE, UpstreamNotFoundError, rules=_MUTATION
)
async def remove_workspace(call: Call, params: RemoveWorkspaceParams) -> MaybeWorkspace:
    """Remove a workspace; ``item`` is null when there was none."""
    if not well_formed("wrk", params.workspace_id):
        raise invalid("workspace_id", "is no id of a workspace: wrk_ and letters or digits")
    removed = await call.opencode.remove_workspace(params.workspace_id, at=call.location(params))
    return MaybeWorkspace(item=_workspace(removed) if removed else None)


class WorktreeRequest(Body):
    name: Text | None = None
    start_command: Text | None = None


class CreateWorktreeParams(Routed):
    request: WorktreeRequest = WorktreeRequest()


@WORKSPACES.method("opencode.worktrees.create", Access.OPERATE, rules=_MUTATION)
async def create_worktree(call: Call, params: CreateWorktreeParams) -> OneWorktree:
    """Make a git worktree of the project; its files are there a moment later."""
    request = params.request
    made = await call.opencode.create_worktree(
        request.name, request.start_command, at=call.location(params)
    )
    return OneWorktree(
        item=WorktreeItem(name=made.name, directory=made.directory, branch=made.branch)
    )


class DirectoryRequest(Body):
    directory: Path


class WorktreeParams(Routed):
    request: DirectoryRequest


@WORKSPACES.method("opencode.worktrees.remove", Access.OPERATE, rules=_MUTATION)
async def remove_worktree(call: Call, params: WorktreeParams) -> Done:
    """Remove a worktree of the project and its branch."""
    directory = await _worktree(call, params)
    return Done(ok=await call.opencode.remove_worktree(directory, at=call.location(params)))


@WORKSPACES.method("opencode.worktrees.reset", Access.OPERATE, rules=_MUTATION)
async def reset_worktree(call: Call, params: WorktreeParams) -> Done:
    """Bring a worktree of the project back to its branch point."""
    directory = await _worktree(call, params)
    return Done(ok=await call.opencode.reset_worktree(directory, at=call.location(params)))


async def _worktree(call: Call, params: WorktreeParams) -> str:
    """Return the directory if it is one that OpenCode made for this project, and no other."""
    directory = params.request.directory
    if directory not in await call.opencode.worktrees(at=call.location(params)):
        raise invalid("request.directory", "is no worktree; opencode.worktrees.list has them")
    return directory
