"""What an OpenCode 2 has beside its sessions: agents, models, projects, files, MCP servers.

Each method is a call and its translation. Nothing here is remembered.
"""

import asyncio
import base64
import mimetypes
from contextlib import suppress
from typing import Final, Literal
from urllib.parse import quote

from opencode_a2a.errors import (
    UpstreamHttpError,
    UpstreamNotFoundError,
)
from opencode_a2a.events import JsonObject
from opencode_a2a.opencode.calls import Query, Request
from opencode_a2a.opencode.driver import HERE, Location
from opencode_a2a.opencode.types import (
    Agent,
    Command,
    CommandSource,
    Config,
    ConnectedProviders,
    FileBody,
    FileDiff,
    FileNode,
    McpServer,
    McpStatus,
    Paths,
    Project,
    Provider,
    ProviderCatalogue,
    ProviderModel,
    Readable,
    TextMatch,
    Vcs,
    Workspace,
    WorkspaceDraft,
    Worktree,
)
from opencode_a2a.opencode.v2.calls import Calls2, missing
from opencode_a2a.opencode.v2.contract import CONFIG, DEFAULT_MODEL, VCS
from opencode_a2a.opencode.v2.messages import rule_of
from opencode_a2a.opencode.v2.types import (
    Agent2,
    Chosen2,
    Document2,
    Entry2,
    Mcp2,
    Model2,
    Project2,
    Provider2,
    Vcs2,
)

AGENT_SECONDS: Final = 15.0
"""Seconds in which OpenCode may load its agents after the first call about a directory."""
POLL_SECONDS: Final = 0.2


class Catalogues2(Calls2):
    """The part of the driver that is not about sessions."""

    # Agents, commands, models

    async def agents(self, *, at: Location = HERE) -> list[Agent]:
        """List the agents; OpenCode has none until it has loaded a directory."""
        found: list[Agent2] = []
        with suppress(TimeoutError):
            async with asyncio.timeout(AGENT_SECONDS):
                while not (  # noqa: ASYNC110 - no event here
                    found := await self.data(Readable[Agent2], "GET", "/api/agent", at)
                ):
                    await asyncio.sleep(POLL_SECONDS)
        return [
            Agent(
                name=one.id,
                mode=one.mode,
                description=one.description,
                hidden=one.hidden,
                native=one.id in ("build", "plan", "general", "explore"),
                model=one.model,
                permission=[rule_of(rule) for rule in one.permissions],
            )
            for one in found
        ]

    async def commands(self, *, at: Location = HERE) -> list[Command]:
        return await self.data(Readable[Command], "GET", "/api/command", at)

    async def command_sources(self, *, at: Location = HERE) -> list[CommandSource]:
        return await self.data(Readable[CommandSource], "GET", "/api/command", at)

    async def config(self, *, at: Location = HERE) -> Config:
        """Return the default model and the default agent, where 2.x tells them."""
        chosen = await self.default_model(at)
        agent: str | None = None
        if self.contract.has(*CONFIG):
            documents = await self.call(Readable[Document2], "GET", "/api/config", at)
            named = [one.info.default_agent for one in documents if one.info.default_agent]
            agent = named[-1] if named else None
        model = f"{chosen.provider_id}/{chosen.id}" if chosen else None
        return Config.model_validate({"model": model, "default_agent": agent})

    async def default_model(self, at: Location) -> Model2 | None:
        """Return the default model, if 2.x tells it.

        OpenCode refuses the call until it has loaded a directory.
        """
        if not self.contract.has(*DEFAULT_MODEL):
            return None
        for tries_left in range(4, -1, -1):
            try:
                found = await self.call(Chosen2, "GET", "/api/model/default", at)
                return found.data
            except UpstreamHttpError as error:
                if not tries_left or "timed out" not in (error.detail or ""):
                    raise
        return None

    async def connected_providers(self, *, at: Location = HERE) -> ConnectedProviders:
        return ConnectedProviders(default=(await self.provider_catalogue(at=at)).default)

    async def provider_catalogue(self, *, at: Location = HERE) -> ProviderCatalogue:
        """Return the providers that can be used; those of 2.x come without the others."""
        providers = await self.data(Readable[Provider2], "GET", "/api/provider", at)
        listed = await self.data(Readable[Model2], "GET", "/api/model", at)
        models = [
            ProviderModel(
                id=one.id,
                name=one.name or one.id,
                provider_id=one.provider_id,
                status=one.status,
                capabilities=one.capabilities.known(),
                limit=one.limit,
            )
            for one in listed
        ]
        found = [
            Provider(
                id=one.id,
                name=one.name or one.id,
                models={model.id: model for model in models if model.provider_id == one.id},
            )
            for one in providers
        ]
        default = {one.id: next(iter(one.models)) for one in found if one.models}
        if (chosen := await self.default_model(at)) is not None:
            default[chosen.provider_id] = chosen.id
        return ProviderCatalogue(all=found, default=default, connected=[one.id for one in found])

    # Projects, worktrees, workspaces

    async def projects(self, *, at: Location = HERE) -> list[Project]:
        found = await self.call(Readable[Project2], "GET", "/api/project")
        return [_project_of(one) for one in found]

    async def current_project(self, *, at: Location = HERE) -> Project:
        return _project_of(await self.call(Project2, "GET", "/api/project/current", at))

    async def worktrees(self, *, at: Location = HERE) -> list[str]:
        raise missing("worktrees that this service can manage")

    async def create_worktree(
        self, name: str | None = None, start_command: str | None = None, *, at: Location = HERE
    ) -> Worktree:
        raise missing("worktrees that this service can manage")

    async def remove_worktree(self, directory: str, *, at: Location = HERE) -> bool:
        raise missing("worktrees that this service can manage")

    async def reset_worktree(self, directory: str, *, at: Location = HERE) -> bool:
        raise missing("worktrees that this service can manage")

    async def workspaces(self, *, at: Location = HERE) -> list[Workspace]:
        raise missing("workspaces")

    async def create_workspace(self, draft: WorkspaceDraft, *, at: Location = HERE) -> Workspace:
        raise missing("workspaces")

    async def remove_workspace(self, workspace_id: str, *, at: Location = HERE) -> Workspace | None:
        raise missing("workspaces")

    # Files and version control

    async def list_files(self, path: str, *, at: Location = HERE) -> list[FileNode]:
        query: Query = {"path": path}
        found = await self.data(Readable[Entry2], "GET", "/api/fs/list", at, query=query)
        return [
            FileNode(name=name.rpartition("/")[2], path=name, type=one.type)
            for one in found
            for name in [one.path.rstrip("/")]
        ]

    async def read_file(self, path: str, *, at: Location = HERE) -> FileBody:
        """Return a file, its text without the white space around it; an empty one if it is missing.

        2.x sends its bytes.
        """
        request = Request("GET", f"/api/fs/read/{quote(path.removeprefix('./'))}", at)
        try:
            content = (await self.send(request)).body
        except UpstreamNotFoundError:
            return FileBody(type="text", content="")
        if b"\0" not in content:
            with suppress(UnicodeDecodeError):
                return FileBody(type="text", content=content.decode().strip())
        mime = mimetypes.guess_type(path)[0]
        encoded = base64.b64encode(content).decode()
        return FileBody(type="binary", content=encoded, encoding="base64", mime_type=mime)

    async def find_text(self, pattern: str, *, at: Location = HERE) -> list[TextMatch]:
        raise missing("search for text in files")

    async def find_files(
        self, query: str, *, limit: int | None = None, at: Location = HERE
    ) -> list[str]:
        given: Query = {"query": query, "limit": limit}
        found = await self.data(Readable[Entry2], "GET", "/api/fs/find", at, query=given)
        return [one.path for one in found]

    async def vcs(self, *, at: Location = HERE) -> Vcs:
        if not self.contract.has(*VCS):
            return Vcs()
        branch = (await self.data(Vcs2, "GET", "/api/vcs", at)).branch
        return Vcs.model_validate({"branch": branch.current, "default_branch": branch.default})

    async def vcs_diff(
        self, mode: Literal["git", "branch"], *, context: int | None = None, at: Location = HERE
    ) -> list[FileDiff]:
        query: Query = {"mode": "working" if mode == "git" else mode, "context": context}
        return await self.data(Readable[FileDiff], "GET", "/api/vcs/diff", at, query=query)

    # The server itself

    async def tool_ids(self, *, at: Location = HERE) -> list[str]:
        raise missing("list of its tools")

    async def mcp_status(self, *, at: Location = HERE) -> dict[str, McpStatus]:
        found = await self.data(Readable[Mcp2], "GET", "/api/mcp", at)
        return {
            one.name: McpStatus(status=one.status.status, error=one.status.error) for one in found
        }

    async def add_mcp(
        self, name: str, server: McpServer, *, at: Location = HERE
    ) -> dict[str, McpStatus]:
        """Offer an MCP server's tools under their own names, not only to programs of the model."""
        config: JsonObject = server.model_dump(
            mode="json", by_alias=True, exclude_none=True, exclude={"enabled", "timeout"}
        )
        config["codemode"] = False
        await self.do("PUT", f"/api/mcp/{quote(name, safe='')}", {"config": config}, at)
        return await self.mcp_status(at=at)

    async def paths(self) -> Paths:
        return await self.call(Paths, "GET", "/api/location")


def _project_of(found: Project2) -> Project:
    return Project(id=found.id, worktree=found.canonical or found.directory, vcs=found.vcs)
