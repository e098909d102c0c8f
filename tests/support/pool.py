"""Several real OpenCodes with the scripted model that every replica of a cluster can reach."""

import os
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import orjson

from opencode_a2a.config import OpenCodeSettings
from opencode_a2a.events import Json, JsonObject
from opencode_a2a.opencode.managed import ManagedOpenCode
from opencode_a2a_demo.server import DemoModel, opencode_config


@dataclass(frozen=True)
class Pool:
    model: DemoModel
    opencodes: dict[str, ManagedOpenCode]
    variables: dict[str, str]
    """What a replica has to be told about them."""


@asynccontextmanager
async def pool(
    workspace: Path, state: Path, config: JsonObject, *, command: str = "opencode", count: int = 2
) -> AsyncGenerator[Pool]:
    """Start OpenCodes ``a``, ``b`` and so on, each with data of its own, in one workspace."""
    async with AsyncExitStack() as stack:
        model = await stack.enter_async_context(DemoModel())
        opencodes: dict[str, ManagedOpenCode] = {}
        entries: list[Json] = []
        variables = {"OPENCODE_WORKSPACE_ROOT": str(workspace)}
        for name in "abcdefgh"[:count]:
            opencodes[name] = opencode = ManagedOpenCode(
                OpenCodeSettings(command=command, startup_timeout=90),
                os.environ,
                config={**opencode_config(model.url), **config},
                state=state / f"opencode-{name}",
                directory=workspace,
            )
            await stack.enter_async_context(opencode)
            password = f"OPENCODE_{name.upper()}_PASSWORD"
            variables[password] = opencode.password
            entries.append(
                {"name": name, "url": opencode.url, "password_variable": password, "shared": True}
            )
        variables["OPENCODE_UPSTREAMS"] = orjson.dumps(entries).decode()
        yield Pool(model, opencodes, variables)
