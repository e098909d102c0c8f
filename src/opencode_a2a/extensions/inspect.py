"""Agents, commands, files and version control of a workspace: read only, and inside of it."""

import os
from pathlib import Path as FilePath
from typing import Annotated, Literal

from pydantic import Field

from opencode_a2a.extensions.calls import Call
from opencode_a2a.extensions.payloads import (
    DEFAULT_LIMIT,
    Limit,
    Path,
    Payload,
    Placed,
    Text,
    invalid,
)
from opencode_a2a.extensions.providers import PROVIDERS
from opencode_a2a.extensions.registry import Access
from opencode_a2a.extensions.sessions import DiffItem
from opencode_a2a.extensions.workspaces import WORKSPACES
from opencode_a2a.upstream.client import Location
from opencode_a2a.upstream.models import TextMatch

MAX_CONTENT = 1024 * 1024
"""Characters of a file that are told."""


class ModelName(Payload):
    provider_id: str
    model_id: str


class AgentItem(Payload):
    name: str
    mode: str
    selectable: bool
    native: bool
    hidden: bool
    description: str | None = None
    model: ModelName | None = None


class Agents(Payload):
    items: list[AgentItem]


@PROVIDERS.method("opencode.agents.list", Access.READ)
async def list_agents(call: Call, params: Placed) -> Agents:
    """List the agents; ``selectable`` ones can be named in a prompt."""
    found = await call.opencode.agents(at=call.location(params))
    return Agents(
        items=[
            AgentItem(
                name=agent.name,
                mode=agent.mode,
                selectable=agent.selectable,
                native=agent.native,
                hidden=agent.hidden,
                description=agent.description,
                model=ModelName(provider_id=agent.model.provider_id, model_id=agent.model.model_id)
                if agent.model
                else None,
            )
            for agent in found
        ]
    )


class CommandItem(Payload):
    name: str
    description: str | None = None
    agent: str | None = None
    model: str | None = None
    source: str | None = None
    subtask: bool
    hints: list[str]


class Commands(Payload):
    items: list[CommandItem]


@PROVIDERS.method("opencode.commands.list", Access.READ)
async def list_commands(call: Call, params: Placed) -> Commands:
    """List the commands that ``opencode.sessions.command`` can run."""
    found = await call.opencode.commands(at=call.location(params))
    return Commands(
        items=[
            CommandItem(
                name=command.name,
                description=command.description,
                agent=command.agent,
                model=command.model,
                source=command.source,
                subtask=command.subtask,
                hints=command.hints,
            )
            for command in found
        ]
    )


# --- files ------------------------------------------------------------------------------------


class FileItem(Payload):
    name: str
    path: str
    type: Literal["file", "directory"]
    ignored: bool


class Files(Payload):
    items: list[FileItem]


class FilesParams(Placed):
    path: Path = ""


@WORKSPACES.method("opencode.files.list", Access.READ, example={"path": "."})
async def list_files(call: Call, params: FilesParams) -> Files:
    """List a directory of the workspace."""
    location = call.location(params)
    path = _inside(call, location, params.path, "path")
    if path.exists and not path.real.is_dir():
        raise invalid("path", "must be a directory")
    found = await call.opencode.list_files(path.relative, at=location)
    items = [
        FileItem(name=node.name, path=node.path, type=node.type, ignored=node.ignored)
        for node in found
    ]
    return Files(items=items)


class FileContent(Payload):
    path: str
    type: Literal["text", "binary"]
    content: str
    encoding: str | None = None
    mime_type: str | None = None
    truncated: bool


class ReadParams(Placed):
    path: Text


@WORKSPACES.method("opencode.files.read", Access.READ, example={"path": "README.md"})
async def read_file(call: Call, params: ReadParams) -> FileContent:
    """Return a file of the workspace: text, without the white space around it, or base64."""
    location = call.location(params)
    path = _inside(call, location, params.path, "path")
    if path.exists and not path.real.is_file():
        raise invalid("path", "must be a file")
    found = await call.opencode.read_file(path.relative, at=location)
    return FileContent(
        path=path.relative,
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


class Matches(Payload):
    items: list[Match]


class FindParams(Placed):
    query: Text
    type: Literal["name", "text"] = "name"
    limit: Limit = DEFAULT_LIMIT


@WORKSPACES.method("opencode.files.find", Access.READ, example={"query": "TODO", "type": "text"})
async def find_files(call: Call, params: FindParams) -> Matches:
    """Find files by a part of their name, or lines by a regular expression."""
    location = call.location(params)
    if params.type == "name":
        names = await call.opencode.find_files(params.query, limit=params.limit, at=location)
        return Matches(items=[Match(path=name) for name in names[: params.limit]])
    found = await call.opencode.find_text(params.query, at=location)
    return Matches(items=[_match(match) for match in found[: params.limit]])


def _match(match: TextMatch) -> Match:
    return Match(
        path=match.path.text, line=match.line_number, text=match.lines.text.rstrip("\n")[:2000]
    )


class _Inside:
    """A path that a caller named, inside the place of the call."""

    def __init__(self, real: FilePath, relative: str, *, exists: bool) -> None:
        self.real = real
        self.relative = relative
        self.exists = exists
        """Whether this machine has the workspace, so that the path can be looked at."""


def _inside(call: Call, location: Location, named: str, field: str) -> _Inside:
    """Refuse a path that leads out of the workspace, be it through a link."""
    base = location.directory
    if base is None:
        # Somebody else's disk: OpenCode itself keeps to its directory; no way up or to the root.
        if FilePath(named).is_absolute() or ".." in FilePath(named).parts:
            raise invalid(field, "must be inside the workspace")
        return _Inside(FilePath(named), named or ".", exists=False)
    real = os.path.realpath(FilePath(base) / named)
    if not call.deps.workspace.holds(real) or not FilePath(real).is_relative_to(base):
        raise invalid(field, "must be inside the workspace")
    exists = FilePath(base).is_dir()
    if exists and not FilePath(real).exists():
        raise invalid(field, "does not exist")
    return _Inside(FilePath(real), os.path.relpath(real, base), exists=exists)


# --- version control --------------------------------------------------------------------------


class VcsParams(Placed):
    mode: Literal["git", "branch"] = "git"
    context: Annotated[int, Field(ge=0, le=1000)] | None = None


class VcsDiff(Payload):
    items: list[DiffItem]
    branch: str | None = None
    default_branch: str | None = None


@WORKSPACES.method("opencode.vcs.diff", Access.READ, example={"mode": "git"})
async def vcs_diff(call: Call, params: VcsParams) -> VcsDiff:
    """Compare the working tree with its last commit, or with the default branch."""
    location = call.location(params)
    vcs = await call.opencode.vcs(at=location)
    found = await call.opencode.vcs_diff(params.mode, context=params.context, at=location)
    items = [
        DiffItem(
            file=change.file,
            patch=change.patch,
            additions=change.additions,
            deletions=change.deletions,
            status=change.status,
        )
        for change in found
    ]
    return VcsDiff(items=items, branch=vcs.branch, default_branch=vcs.default_branch)
