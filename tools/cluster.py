"""``make serve-cluster``: two replicas, two OpenCodes and a PostgreSQL on this machine.

Made for killing a process and watching a stream continue. Both replicas list both OpenCodes: only
then can one replica continue the tasks of the other. One port stands in front of both replicas, as
a load balancer would: a client that lost its connection reconnects to the same address and reaches
whichever replica is up. A replica that ends is restarted after a while, so that the other has time
to take over; so is PostgreSQL, for which both wait.
"""

import argparse
import asyncio
import itertools
import logging
import os
import secrets
import signal
import socket
import sys
import tempfile
import time
from contextlib import AsyncExitStack, ExitStack, suppress
from pathlib import Path
from typing import Any

import orjson
import structlog

from opencode_a2a.events import JsonObject
from opencode_a2a.opencode.client import Location, OpenCode1
from opencode_a2a.opencode.managed import OpenCodeStartError
from tests.conftest import make_repository
from tests.support.pool import pool
from tests.support.postgres import PostgresServer

HOST = "127.0.0.1"
LEASE_SECONDS = 4
RESTART_SECONDS = 12.0
"""Longer than the lease, so that the other replica has taken over by then."""
DATABASE_RESTART_SECONDS = 5.0
"""Long enough to see what the replicas do without a database."""
WATCH_SECONDS = 0.2
ROUTINE = {"request", "opencode answers"}
"""Log records that are not shown."""
UNSAID = {"timestamp", "level", "logger", "event"}
"""Fields of log records that are not shown."""
WORDS = " ".join(map(str, range(1, 61)))


def say(name: str, text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')}  {name:<10} {text}", flush=True)


class ReplicaProcess:
    """One ``opencode-a2a serve``, restarted whenever it ends."""

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
                start_new_session=True,  # Ctrl-C reaches this program only, which ends the others
            )
            self.pid = process.pid
            async for line in process.stdout or asyncio.StreamReader():
                self._show(line.decode(errors="replace").rstrip())
            status = await process.wait()
            self.listening.clear()
            say(self.name, f"ended ({_how(status)}); restarting in {RESTART_SECONDS:.0f} s")
            await asyncio.sleep(RESTART_SECONDS)

    def _show(self, line: str) -> None:
        if not line.startswith("{"):
            say(self.name, line)
            return
        record: dict[str, Any] = orjson.loads(line)
        if record["event"] == "started":
            self.listening.set()
            say(
                self.name, f"listens on http://{HOST}:{self.port}; kill it with: kill -9 {self.pid}"
            )
        elif record["event"] not in ROUTINE:
            said = [f"{key}={value}" for key, value in record.items() if key not in UNSAID]
            say(self.name, " ".join([record["event"], *said]))

    async def end(self) -> None:
        process = self._process
        if process is not None and process.returncode is None:
            with suppress(ProcessLookupError):
                process.send_signal(signal.SIGCONT)  # the user may have stopped it
                process.terminate()
            with suppress(TimeoutError):
                async with asyncio.timeout(15):
                    await process.wait()
                return
            process.kill()
            await process.wait()


async def keep_running(database: PostgresServer) -> None:
    """Start PostgreSQL again whenever it ends, and say so."""
    while True:
        while (status := database.status) is None:  # noqa: ASYNC110 - nothing announces it
            await asyncio.sleep(WATCH_SECONDS)
        say("PostgreSQL", f"ended ({_how(status)}); restarting in {DATABASE_RESTART_SECONDS:.0f} s")
        await asyncio.sleep(DATABASE_RESTART_SECONDS)
        await asyncio.to_thread(database.start)
        say("PostgreSQL", f"runs again; kill it with: kill -9 {database.pid}")


def _how(status: int) -> str:
    return signal.Signals(-status).name if status < 0 else f"with status {status}"


class Front:
    """One address for all replicas: a connection goes to the next one that accepts it."""

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


async def serve(port: int, workspace: Path, place: Path) -> None:
    """Run everything until Ctrl-C."""
    token = os.environ.get("A2A_BEARER_TOKEN") or secrets.token_urlsafe(16)
    async with AsyncExitStack() as stack:
        asking: JsonObject = {"permission": {"bash": "ask", "edit": "ask"}}
        database = stack.enter_context(PostgresServer())
        where = f"{HOST}:{database.port}"
        say("PostgreSQL", f"runs on {where}; kill it with: kill -9 {database.pid}")
        behind = await stack.enter_async_context(pool(workspace, place, asking))
        for name, opencode in behind.opencodes.items():
            # The first request for a directory takes OpenCode seconds, in which it answers nobody.
            async with OpenCode1(
                opencode.url, username=opencode.username, password=opencode.password
            ) as client:
                await client.config(at=Location(str(workspace)))
            say(f"OpenCode {name}", f"runs on {opencode.url}; kill it with: kill -9 {opencode.pid}")
        variables = {
            **behind.variables,
            "A2A_BEARER_TOKEN": token,
            "A2A_PUBLIC_URL": f"http://{HOST}:{port}",
            "A2A_TASK_STORE_DATABASE_URL": database.url("opencode_a2a"),
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
        watched.append(asyncio.create_task(keep_running(database)))
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
Two replicas, two OpenCodes and one PostgreSQL, with the demo model (scripted, no AI).

In a second terminal, start a stream of one minute at the address in front of both replicas:

  export A2A_CLIENT_BEARER_TOKEN={token}
  {program} call http://{HOST}:{port} '@@{prompt}@@'

In a third terminal, kill a replica while the stream runs. The other replica takes the task over
within {LEASE_SECONDS + 2} seconds. Text that the model produces in between appears once OpenCode
has stored it, at the end of the answer.

  kill -9 {replicas[0].pid}     # {replicas[0].name}, or {replicas[1].pid} for {replicas[1].name}

If the stream does not pause, the other replica was running the task.
Every replica knows every task, whichever answers: {program} tasks http://{HOST}:{port}
A replica that ends is restarted after {RESTART_SECONDS:.0f} s, PostgreSQL after
{DATABASE_RESTART_SECONDS:.0f} s. Ctrl-C ends everything.
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
    parser.add_argument("--port", type=int, default=8000, help="the replicas use the next two")
    parser.add_argument("--workspace", help="where the agent works; default: a new directory")
    given = parser.parse_args()
    # What this program does itself is told by ``say``; the replicas log for themselves.
    quiet = structlog.make_filtering_bound_logger(logging.WARNING)
    structlog.configure(wrapper_class=quiet)
    for port in range(given.port, given.port + 3):
        try:
            socket.create_server((HOST, port)).close()
        except OSError as error:
            remedy = 'choose another: make serve-cluster ARGS="--port 8010"'
            raise SystemExit(f"Cannot listen on port {port}: {error.strerror}; {remedy}") from None
    with ExitStack() as stack:
        place = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="opencode-a2a-")))
        workspace = Path(given.workspace or place / "workspace")
        if not given.workspace:
            workspace.mkdir()
            make_repository(workspace)
        try:
            asyncio.run(serve(given.port, workspace, place))
        except OpenCodeStartError as error:
            raise SystemExit(str(error)) from None


if __name__ == "__main__":
    main()
