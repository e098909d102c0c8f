"""Two replicas before two OpenCodes on one PostgreSQL, on this machine (``make serve-cluster``).

For somebody who wants to kill a process and watch a stream go on. The OpenCodes are a pool that
both replicas list, not one for each: only then does the other replica go on with what a killed
one ran. One port stands before both replicas, as a load balancer would: a client that lost its
connection comes back to the same address and is served by whichever replica is there. A replica
that ends is started again, a while later, so that one can see the other take over.
"""

import argparse
import asyncio
import itertools
import os
import secrets
import signal
import sys
import tempfile
import time
from contextlib import AsyncExitStack, ExitStack, suppress
from pathlib import Path
from typing import Any

import orjson

from opencode_a2a.events import JsonObject
from opencode_a2a.opencode.managed import OpenCodeStartError
from tests.conftest import make_repository
from tests.support.pool import pool
from tests.support.postgres import PostgresServer

HOST = "127.0.0.1"
LEASE_SECONDS = 4
RESTART_SECONDS = 12.0
"""Longer than the lease: the other replica has taken over before."""
UNSAID = {"timestamp", "level", "logger", "event"}
WORDS = " ".join(map(str, range(1, 61)))


def say(name: str, text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')}  {name:<10} {text}", flush=True)


class ReplicaProcess:
    """One ``opencode-a2a serve``, which is started again whenever it ends."""

    def __init__(self, name: str, port: int, variables: dict[str, str]) -> None:
        self.name = name
        self.port = port
        own = {"A2A_PORT": str(port), "A2A_REPLICA_NAME": name}
        self._variables = {**os.environ, **variables, **own}
        self._process: asyncio.subprocess.Process | None = None
        self.pid = 0
        self.listening = asyncio.Event()

    async def supervise(self) -> None:
        while True:
            self._process = process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "opencode_a2a",
                "serve",
                env=self._variables,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C is for this program, which ends them in turn
            )
            self.pid = process.pid
            async for line in process.stdout or asyncio.StreamReader():
                self._show(line.decode(errors="replace").rstrip())
            status = await process.wait()
            self.listening.clear()
            how = signal.Signals(-status).name if status < 0 else f"with status {status}"
            say(self.name, f"ended ({how}); it is started again in {RESTART_SECONDS:.0f} s")
            await asyncio.sleep(RESTART_SECONDS)

    def _show(self, line: str) -> None:
        if not line.startswith("{"):
            say(self.name, line)
            return
        record: dict[str, Any] = orjson.loads(line)
        if record["event"] == "started":
            self.listening.set()
            say(self.name, f"listens on http://{HOST}:{self.port}; to kill it: kill -9 {self.pid}")
        elif record["event"] != "request":
            said = [f"{key}={value}" for key, value in record.items() if key not in UNSAID]
            say(self.name, " ".join([record["event"], *said]))

    async def end(self) -> None:
        process = self._process
        if process is not None and process.returncode is None:
            with suppress(ProcessLookupError):
                process.send_signal(signal.SIGCONT)  # somebody may have stopped it
                process.terminate()
            with suppress(TimeoutError):
                async with asyncio.timeout(15):
                    await process.wait()
                return
            process.kill()
            await process.wait()


class Front:
    """One address for all replicas: a connection goes to the next one that takes it."""

    def __init__(self, ports: list[int]) -> None:
        self._ports = itertools.cycle(ports)
        self._count = len(ports)

    async def connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for _ in range(self._count):
            with suppress(OSError):
                far = await asyncio.open_connection(HOST, next(self._ports))
                await asyncio.gather(_pass(reader, far[1]), _pass(far[0], writer))
                return
        writer.close()


async def _pass(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with suppress(OSError):
        while data := await reader.read(65536):
            writer.write(data)
            await writer.drain()
    writer.close()


async def serve(port: int, workspace: Path, place: Path, database: str) -> None:
    token = os.environ.get("A2A_BEARER_TOKEN") or secrets.token_urlsafe(16)
    async with AsyncExitStack() as stack:
        asking: JsonObject = {"permission": {"bash": "ask", "edit": "ask"}}
        behind = await stack.enter_async_context(pool(workspace, place, asking))
        for name, opencode in behind.opencodes.items():
            say(f"OpenCode {name}", f"runs on {opencode.url}; to kill it: kill -9 {opencode.pid}")
        variables = {
            **behind.variables,
            "A2A_BEARER_TOKEN": token,
            "A2A_PUBLIC_URL": f"http://{HOST}:{port}",
            "A2A_TASK_STORE_DATABASE_URL": database,
            "A2A_REPLICA_LEASE_SECONDS": str(LEASE_SECONDS),
        }
        replicas = [
            ReplicaProcess(
                f"replica-{number}",
                port + number,
                {**variables, "A2A_STATE_DIR": str(place / f"replica-{number}")},
            )
            for number in (1, 2)
        ]
        front = Front([replica.port for replica in replicas])
        server = await asyncio.start_server(front.connected, HOST, port)
        stack.callback(server.close)
        for replica in replicas:
            stack.push_async_callback(replica.end)
        watched = [asyncio.create_task(replica.supervise()) for replica in replicas]
        for task in watched:
            stack.callback(task.cancel)
        for replica in replicas:
            await replica.listening.wait()
        _explain(port, token, replicas)
        await _interrupted()
        say("all", "ending")


def _explain(port: int, token: str, replicas: list[ReplicaProcess]) -> None:
    program = Path(sys.executable).with_name("opencode-a2a")
    with suppress(ValueError):
        program = program.relative_to(Path.cwd())
    prompt = orjson.dumps([{"say": WORDS, "delay": 1}]).decode()
    print(
        f"""
Two replicas before two OpenCodes on one PostgreSQL, with the demo model (scripted, no AI).

In a second terminal start a stream of a minute, at the address that stands before both:

  export A2A_CLIENT_BEARER_TOKEN={token}
  {program} call http://{HOST}:{port} '@@{prompt}@@'

In a third one kill a replica while it prints. The other goes on within {LEASE_SECONDS + 2}
seconds; what the model says meanwhile comes once OpenCode has stored it, at the end of the answer:

  kill -9 {replicas[0].pid}     # {replicas[0].name}, or {replicas[1].pid} for {replicas[1].name}

If it does not even pause, the task was run by the other one.
Any replica answers about any task: {program} tasks http://{HOST}:{replicas[1].port}
A replica that ends is started again after {RESTART_SECONDS:.0f} s. Ctrl-C ends everything.
""",
        flush=True,
    )


async def _interrupted() -> None:
    ended = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, ended.set)
    await ended.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, default=8000, help="of both; the replicas' follow it")
    parser.add_argument("--workspace", help="where the agent works; by default a new directory")
    given = parser.parse_args()
    with ExitStack() as stack:
        place = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="opencode-a2a-")))
        workspace = Path(given.workspace or place / "workspace")
        if not given.workspace:
            workspace.mkdir()
            make_repository(workspace)
        server = stack.enter_context(PostgresServer())
        say("PostgreSQL", f"runs on {HOST}:{server.port}")
        try:
            asyncio.run(serve(given.port, workspace, place, server.url("opencode_a2a")))
        except OpenCodeStartError as error:
            raise SystemExit(str(error)) from None


if __name__ == "__main__":
    main()
