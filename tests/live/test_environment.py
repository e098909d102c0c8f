"""What the programs that OpenCode starts can see: the operator's variables, no secret of ours."""

import asyncio
import os
import sys
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx2
import orjson
import pytest

from opencode_a2a.config import OpenCodeSettings
from opencode_a2a.events import JsonObject
from opencode_a2a.opencode.driver import Location
from opencode_a2a.opencode.managed import (
    USERNAME,
    ManagedOpenCode,
    install_nothing,
    passed_environment,
)
from opencode_a2a.opencode.process import listening_url
from opencode_a2a.opencode.types import Prompt, SessionDraft, ShellCall, TextInput
from opencode_a2a_demo.server import DemoModel, opencode_config
from tests.support.backstage import past_service, script
from tests.support.caller import Caller
from tests.support.ports import free_port
from tests.support.program import PATIENCE, Program, bare, run
from tests.support.service import TOKEN, serving, settings_for, variables_for

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
        past_service(managed.url, managed.password) as opencode,
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


# An OpenCode that the service did not start

PASSWORD = "canary-of-an-opencode"  # noqa: S105 - not a secret
ANSWERS_ITSELF = """
import glob, json, sys, time, urllib.error, urllib.request, base64

def passwords():
    for file in glob.glob("/proc/[0-9]*/environ"):
        try:
            for variable in open(file, "rb").read().split(b"\\0"):
                name, _, value = variable.partition(b"=")
                if name == b"OPENCODE_SERVER_PASSWORD" and value:
                    yield value
        except OSError:
            pass

def call(path, password, body=None):
    key = base64.b64encode(b"opencode:" + password).decode()
    headers = {"Authorization": "Basic " + key, "Content-Type": "application/json"}
    request = urllib.request.Request(sys.argv[1] + path, body, headers)
    return json.load(urllib.request.urlopen(request))

for _ in range(40):
    for password in {b"", *passwords()}:
        try:
            for asked in call("/permission", password):
                call(f"/permission/{asked['id']}/reply", password, b'{"reply": "once"}')
                print("answered", flush=True)
        except urllib.error.HTTPError as error:
            print(error.code, flush=True)
    time.sleep(0.1)
print("done", flush=True)
"""


@dataclass(frozen=True, slots=True)
class Launched:
    """An OpenCode that runs by itself; ``Behind`` for a service."""

    url: str
    workspace: Path
    printed: list[str]
    password: str = PASSWORD


@asynccontextmanager
async def launched(
    *command: str, workspace: Path, model: DemoModel, **variables: str
) -> AsyncGenerator[Launched]:
    """Start an OpenCode that asks before it edits a file."""
    home = workspace.parent / "home"
    install_nothing(home / ".config")
    config = {
        **opencode_config(model.url),
        "permission": {"edit": "ask", "external_directory": "allow"},
    }
    given = {"HOME": str(home), "OPENCODE_CONFIG_CONTENT": orjson.dumps(config).decode()}
    port = str(free_port())
    process = await asyncio.create_subprocess_exec(
        *command, "serve", "--hostname", "127.0.0.1", "--port", port,
        env=bare(given | variables), cwd=workspace, start_new_session=True,
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
    )  # fmt: skip
    assert process.stdout is not None
    printed: list[str] = []
    try:
        async with asyncio.timeout(PATIENCE):
            while line := (await process.stdout.readline()).decode():
                printed.append(line.strip())
                if url := listening_url(line):
                    break
            else:
                raise AssertionError("\n".join(printed))
        yield Launched(url, workspace, printed)
    finally:
        process.kill()
        await process.communicate()


@pytest.mark.linux_only
async def test_an_agent_cannot_answer_its_own_permission_at_an_opencode_of_its_own(
    opencode_command: str, model: DemoModel, workspace: Path, tmp_path: Path
) -> None:
    ours = (sys.executable, "-m", "opencode_a2a", "opencode", "--")
    secrets = {"OPENCODE_COMMAND": opencode_command, "A2A_BEARER_TOKEN": TOKEN}
    (workspace / "answer.py").write_text(ANSWERS_ITSELF)
    async with (
        launched(
            *ours, workspace=workspace, model=model, OPENCODE_SERVER_PASSWORD=PASSWORD, **secrets
        ) as opencode,
        serving(settings_for(opencode, tmp_path / "state")) as service,
    ):
        look = "env > seen.txt; cat /proc/[0-9]*/environ > processes.txt 2>/dev/null; "
        look += f"{sys.executable} answer.py {opencode.url} > answers.txt 2>&1"
        file = workspace / "new.txt"
        write: JsonObject = {"tool": "write", "input": {"filePath": str(file), "content": "new"}}
        caller = Caller(service)
        task = await caller.send(script(bash(look), write, {"say": "done"}))
        assert task.state == "input_required"
        answers = workspace / "answers.txt"
        await until(lambda: answers.exists() and "done" in answers.read_text())

        told = answers.read_text().split()
        assert {*told} == {"401", "done"}
        assert (await caller.get(task.id)).state == "input_required"
        assert not file.exists()
        for name in ("seen.txt", "processes.txt"):
            text = (workspace / name).read_text(errors="replace")
            assert PASSWORD not in text, name
        assert TOKEN not in (workspace / "seen.txt").read_text()
        answered = await caller.send("once", task=task.id)
        assert (answered.state, answered.text) == ("completed", "done")

        another = await asyncio.create_subprocess_exec(
            "sleep", "600", env={"OPENCODE_SERVER_PASSWORD": "of-another-opencode"}
        )
        try:
            _, told = await run("doctor", **variables_for(opencode, tmp_path / "doctor"))
        finally:
            another.kill()
            await another.wait()
        assert f"password: that of {opencode.url} is withheld from the agent's tools" in told


@pytest.mark.linux_only
async def test_doctor_and_serve_say_that_a_plain_opencode_shows_its_password(
    opencode_command: str, model: DemoModel, workspace: Path, tmp_path: Path
) -> None:
    async with launched(
        opencode_command, workspace=workspace, model=model, OPENCODE_SERVER_PASSWORD=PASSWORD
    ) as opencode:
        variables = variables_for(opencode, tmp_path / "state")
        _, told = await run("doctor", **variables)
        assert f"the agent's tools see that of {opencode.url} in their environment" in told
        assert "start it with `opencode-a2a opencode`" in told
        assert PASSWORD not in told
        async with past_service(opencode.url, PASSWORD) as client:
            assert await client.sessions(at=Location(str(workspace))) == []

        async with Program(variables) as program:
            warned = await program.printed(lambda line: "may answer its own permissions" in line)
            assert "start it with `opencode-a2a opencode`" in warned
            assert await program.stop() == 0
