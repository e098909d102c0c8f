"""What the programs that OpenCode starts can see: the operator's variables, no secret of ours."""

import asyncio
import os
from collections.abc import Callable
from pathlib import Path

import httpx2
import orjson
import pytest

from opencode_a2a.config import OpenCodeSettings
from opencode_a2a.events import JsonObject
from opencode_a2a.opencode.client import Location, OpenCode
from opencode_a2a.opencode.managed import USERNAME, ManagedOpenCode, passed_environment
from opencode_a2a.opencode.types import Prompt, SessionDraft, ShellCall, TextInput
from opencode_a2a_demo.server import DemoModel, opencode_config
from tests.support.backstage import script
from tests.support.caller import Caller
from tests.support.program import Program
from tests.support.service import TOKEN

pytestmark = pytest.mark.live

CANARY = "canary-of-a-peer"
THEIRS = {
    "JAVA_HOME": "/opt/java",
    "VIRTUAL_ENV": "/opt/venv",
    "DATABASE_URL": "postgres://somewhere",
}


def bash(command: str) -> JsonObject:
    return {"tool": "bash", "input": {"command": command, "description": "d"}}


def seen(file: Path) -> dict[str, str]:
    """Return the variables that a program has written down."""
    pairs = (line.partition("=") for line in file.read_text().splitlines())
    return {name: value for name, _, value in pairs}


async def test_the_agent_sees_the_operators_variables_and_no_secret_of_the_service(
    variables: dict[str, str], model: DemoModel, tmp_path: Path
) -> None:
    workspace = tmp_path / "workspace"
    config = opencode_config("{env:LLM_BASE}")
    (workspace / "opencode.json").write_bytes(orjson.dumps(config))
    peer = {"name": "other", "url": "https://other.example", "credential": "PEER_TOKEN"}
    more = {"A2A_PEERS": orjson.dumps([peer]).decode(), "PEER_TOKEN": CANARY, "LLM_BASE": model.url}
    look = "env > seen.txt; tr '\\0' '\\n' < /proc/$PPID/environ > parent.txt"
    async with Program({**variables, **more, **THEIRS}, "--managed") as program:
        task = await Caller(program).send(script(bash(look), {"say": "done"}))
        assert (task.state, task.text) == ("completed", "done")
        assert await program.stop() == 0

    inside = seen(workspace / "seen.txt")
    assert THEIRS.items() <= inside.items()
    assert [name for name in inside if name.startswith("A2A_")] == []
    for file in ("seen.txt", "parent.txt"):
        text = (workspace / file).read_text()
        assert "JAVA_HOME" in text
        assert TOKEN not in text
        assert CANARY not in text
        assert seen(workspace / file).get("OPENCODE_SERVER_PASSWORD", "") == ""
        assert "Bearer" not in text  # the token of the tool endpoint


async def test_no_program_that_opencode_starts_inherits_its_password(
    opencode_command: str, model: DemoModel, workspace: Path, tmp_path: Path
) -> None:
    def noting(name: str) -> list[str]:
        return ["sh", "-c", f"env > {tmp_path}/{name}"]

    config: JsonObject = {
        **opencode_config(model.url),
        "mcp": {"noting": {"type": "local", "command": [*noting("mcp")]}},
        "lsp": {"noting": {"command": [*noting("lsp")], "extensions": [".txt"]}},
        "formatter": {"noting": {"command": [*noting("formatter")], "extensions": [".txt"]}},
    }
    at = Location(str(workspace))
    write: JsonObject = {
        "tool": "write",
        "input": {"filePath": str(workspace / "a.txt"), "content": "a"},
    }
    async with (
        ManagedOpenCode(
            OpenCodeSettings(command=opencode_command, startup_timeout=60),
            passed_environment(os.environ),
            config=config,
            state=tmp_path / "state",
            directory=workspace,
        ) as managed,
        OpenCode(managed.url, password=managed.password) as opencode,
        httpx2.AsyncClient(base_url=managed.url, trust_env=False) as http,
    ):
        session = await opencode.create_session(SessionDraft(title="T"), at=at)
        command = f"env > {tmp_path}/shell"
        await opencode.run_shell(session.id, ShellCall(command=command, agent="build"), at=at)
        answer = await http.post(
            "/pty",
            params={"directory": str(workspace)},
            auth=(USERNAME, managed.password),
            json={"command": "sh", "args": ["-c", f"env > {tmp_path}/pty"]},
        )
        assert answer.status_code == 200
        # The turn would wait long for this language server, which says nothing.
        text = script(bash(f"env > {tmp_path}/bash"), write, {"say": "done"})
        prompt = Prompt(parts=[TextInput(text=text)])
        turn = asyncio.create_task(opencode.prompt(session.id, prompt, at=at))
        names = ("bash", "shell", "mcp", "lsp", "formatter", "pty")
        await until(lambda: all(_written(tmp_path / name) for name in names))
        turn.cancel()
        for name in names:
            assert managed.password not in (tmp_path / name).read_text(), name


def _written(file: Path) -> bool:
    return file.exists() and "OPENCODE_A2A_INSTANCE" in file.read_text()


async def until(true: Callable[[], bool]) -> None:
    """Wait for what other programs do."""
    async with asyncio.timeout(60):
        while not true():  # noqa: ASYNC110 - nobody tells
            await asyncio.sleep(0.05)
