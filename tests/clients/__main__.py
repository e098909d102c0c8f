"""Run other people's clients against the service, in front of a real OpenCode.

usage: python -m tests.clients [PART OF A CLIENT'S ID...]

``make clients`` installs them first. Writes what a person sees in each (see ``matrix``), and fails
when that is neither what it should be nor a fault of the client that is known.
"""

import asyncio
import os
import shutil
import socket
import sys
import tempfile
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import asdict
from pathlib import Path

import orjson
import structlog

from tests.clients.matrix import (
    CLIENTS,
    HERE,
    ID,
    SEEN,
    TABLE,
    TIME,
    Client,
    Expected,
    Seen,
    judge,
    load,
    table,
)
from tests.conftest import make_repository
from tests.support.answers import Task, Update, Wire, fold
from tests.support.backstage import Backstage, script
from tests.support.caller import Caller
from tests.support.foreign import javascript_client, python03_client
from tests.support.service import TOKEN, Running, serving, settings_for

ROOT = HERE.parent.parent
SECONDS = 60
Say = Callable[[str, bool], Awaitable[str]]
"""Says a text, in a new conversation or in the one before, and returns what is shown."""

_KINDS = {"task": "task", "status-update": "statusUpdate", "artifact-update": "artifactUpdate"}


def scripts(workspace: Path, name: str) -> dict[str, tuple[str, bool]]:
    """Return what is said in each scene, and whether a new conversation begins with it."""
    file = {"filePath": str(workspace / f"{name}.txt"), "content": "hi\n"}
    command = {"command": "echo ran", "description": "Say it"}
    return {
        "plain": (script({"say": "Hello."}, {"wait": 0.2}, {"say": " How are you?"}), True),
        "answer": (
            script({"think": "Let me think."}, {"tool": "write", "input": file}, {"say": "Done."}),
            True,
        ),
        "question": (
            script(
                {"think": "A command."},
                {"say": "I will run it."},
                {"tool": "bash", "input": command},
                {"say": "It ran."},
            ),
            True,
        ),
        "reply": ("yes", False),
        "failure": (script({"error": 400, "message": "The model does not want to."}), True),
    }


async def expected(caller: Caller, workspace: Path) -> Expected:
    """Return what the service says itself."""
    says = scripts(workspace, "expected")
    # The first turn of an OpenCode can take minutes on a busy machine; no client would wait.
    async with caller.stream(says["plain"][0]) as following:
        await following.rest()
    plain = await caller.send(says["plain"][0])
    answer = await caller.send(says["answer"][0])
    asked = await caller.send(says["question"][0])
    reply = await caller.send(says["reply"][0], task=asked.id)
    failed = await caller.send(says["failure"][0])
    assert answer.diff is not None
    assert answer.reasoning
    # A stream shows only what is new since the question.
    replies = (reply.text, reply.text.removeprefix("I will run it.").strip())
    return Expected(plain.text, answer.text, TIME.sub("TIME", asked.said), replies, failed.said)


@asynccontextmanager
async def talking(client: Client, service: Running, state: Path) -> AsyncGenerator[Say]:
    """Run a client."""
    if client.driver is None:
        async with _by_sdk(client, service) as by_sdk:
            yield by_sdk
        return
    tools = ROOT / ".tools" / "clients"
    driver = HERE / "drivers" / client.driver
    if driver.suffix == ".mjs":
        # Node looks for packages beside the script.
        program, place = shutil.which("node"), tools / "javascript"
        for script in driver.parent.glob("*.mjs"):
            shutil.copy(script, place)
        driver = place / client.driver
    elif client.program or client.environment == "a2a-sdk":
        program = sys.executable
    else:
        program = str(tools / client.environment / "bin" / "python")
    assert program is not None, "Node is missing"
    process = await asyncio.create_subprocess_exec(
        program,
        str(driver),
        service.url,
        TOKEN,
        *client.arguments,
        cwd=state,
        env=os.environ | {"HOME": str(state), "OTEL_SDK_DISABLED": "true", "PYTHONWARNINGS": ""},
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=(state / "stderr").open("w"),
    )
    assert process.stdin is not None
    assert process.stdout is not None
    given, told = process.stdin, process.stdout

    async def read(seconds: int = 2 * SECONDS) -> dict[str, str]:
        async with asyncio.timeout(seconds):
            line = await told.readline()
        if not line:
            raise RuntimeError(f"{client.id} ended:\n{(state / 'stderr').read_text()[-2000:]}")
        return orjson.loads(line)

    async def say(text: str, fresh: bool) -> str:
        given.write(orjson.dumps({"text": text, "fresh": fresh}) + b"\n")
        answer = await read()
        return answer["shown"] if "shown" in answer else answer["error"]

    try:
        await read(15 * SECONDS)  # some frameworks take minutes to import on a busy machine
        yield say
    finally:
        process.kill()
        await process.wait()


@asynccontextmanager
async def _by_sdk(client: Client, service: Running) -> AsyncGenerator[Say]:
    """Talk through an SDK.

    Shown is what the agent says to the state; else the last artifact, in a stream the one that was
    told of last.
    """
    if client.environment == "a2a-sdk-0.3":
        running = python03_client(service, Wire.RPC03)  # the binding that it takes by itself
    else:
        wire = Wire.RPC if client.environment == "js-sdk-1.0" else Wire.RPC03
        running = javascript_client(service, wire, by_card=True)
    async with running as sdk:
        task: Task | None = None

        async def say(text: str, fresh: bool) -> str:
            nonlocal task
            on = {"taskId": task.id} if task and not fresh else {}
            last = None
            if client.arguments == ("streaming",):
                events = [event async for event in sdk.stream("stream", text=text, **on)]
                kinds = [e if "kind" not in e else {_KINDS[e["kind"]]: e} for e in events]
                updates = [Update("", event) for event in kinds]
                task = fold(updates)
                told = [u.artifact["artifact"]["artifactId"] for u in updates if u.artifact]
                last = next((a for a in task.artifacts if told[-1:] == [a["artifactId"]]), None)
            else:
                task = Task(await sdk.call("send", text=text, **on))
            if task.said:
                return task.said
            return "".join(p.get("text", "") for p in (last or task.artifacts[-1])["parts"])

        yield say


def _store(seen: Seen, should: Expected) -> None:
    stored = {
        "expected": asdict(should),
        "seen": {c.id: seen[c.id] for c in CLIENTS if c.id in seen},
    }
    SEEN.write_bytes(orjson.dumps(stored, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE))
    TABLE.write_text("\n".join(table(seen, should)) + "\n")


async def main(wanted: list[str]) -> int:
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(40))
    clients = [c for c in CLIENTS if not wanted or any(part in c.id for part in wanted)]
    before: Seen = load()[0] if SEEN.exists() else {}
    seen: Seen = before if wanted else {}
    with tempfile.TemporaryDirectory() as name:
        place = Path(name)
        workspace, state, opencode = place / "workspace", place / "state", place / "opencode"
        for directory in (workspace, state, opencode):
            directory.mkdir()
        make_repository(workspace)
        command = str(ROOT / "node_modules" / ".bin" / "opencode")
        with (
            Backstage(command, opencode, workspace, {"permission": {"bash": "ask"}}) as stage,
            socket.create_server(("127.0.0.1", 0)) as listener,
        ):
            port = listener.getsockname()[1]
            listener.close()
            settings = settings_for(stage, state, A2A_PUBLIC_URL=f"http://127.0.0.1:{port}")
            async with serving(settings, port=port) as service:
                should = await expected(Caller(service), workspace)
                for number, client in enumerate(clients):
                    if client.program and not shutil.which(client.program):
                        print(
                            f"{client.id}: not run, because `{client.program}` is not on the path"
                        )
                        seen[client.id] = before.get(client.id, {})
                        continue
                    seen[client.id] = {}
                    says = scripts(workspace, f"file-{number}")
                    async with talking(client, service, state) as say:
                        for scene, (text, fresh) in says.items():
                            shown = await say(text, fresh)
                            # Paths, times and ids differ from run to run.
                            shown = TIME.sub("TIME", shown.replace(str(workspace), "/workspace"))
                            shown = ID.sub("ID", shown)
                            seen[client.id][scene] = shown
                            right = "right" if should.met(scene, shown) else repr(shown)
                            print(f"{client.id}: {scene}: {right}", flush=True)
                    _store(seen, should)  # for a run that goes on where this one ends
    wrong = list(judge(seen, should))
    print("\n".join(wrong), file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(asyncio.run(main(sys.argv[1:])))
