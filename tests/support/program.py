"""The program as a process of its own: started, spoken to, killed, started again.

It sees only the variables it is given. Its port stays the same for all its lives, as a
client would have it.
"""

import asyncio
import os
import ssl
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from signal import Signals
from typing import Any, Protocol, Self

import httpx2
import orjson

from opencode_a2a.opencode.process import marked_processes
from tests.support.ports import free_port
from tests.support.service import TOKEN

PATIENCE = 60.0
"""Seconds after which a test gives up waiting for the process."""


class Process(Protocol):
    """A process that was started."""

    @property
    def pid(self) -> int: ...
    @property
    def returncode(self) -> int | None: ...
    @property
    def stdout(self) -> asyncio.StreamReader | None: ...
    async def wait(self) -> int: ...


class Program:
    """``opencode-a2a serve``; ``async with`` starts it, and ends what still runs."""

    def __init__(
        self,
        variables: Mapping[str, str],
        *arguments: str,
        directory: Path | None = None,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        """With ``tls`` it is called by https, and runs without a terminal, as a service does."""
        self.port = free_port()
        self.url = f"{'https' if tls else 'http'}://127.0.0.1:{self.port}"
        self._detached = tls is not None
        self.variables = {"A2A_PORT": str(self.port), **variables}
        self.arguments = ["serve", *arguments]
        self.directory = directory
        self.http = httpx2.AsyncClient(
            base_url=self.url,
            headers={"Authorization": f"Bearer {TOKEN}"},
            timeout=PATIENCE,
            trust_env=False,
            verify=tls or True,
        )
        self.lines: list[str] = []
        """All that was printed, by all its lives."""
        self._process: Process | None = None
        self._pids: list[int] = []
        self._printed = asyncio.Condition()
        self._reading: asyncio.Task[None] | None = None
        self._silent = False

    async def __aenter__(self) -> Self:
        try:
            await self.start()
        except BaseException:
            await self.__aexit__()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._process is not None and self._process.returncode is None:
            await self.kill()
        for pid in self.left():
            with suppress(ProcessLookupError):
                os.kill(pid, Signals.SIGKILL)
        await self.http.aclose()
        print("\n".join(self.lines))  # shown when a test fails

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def left(self) -> list[int]:
        """Return what runs of the OpenCodes that it started in any life, and of their tools."""
        owners = set(map(str, self._pids))
        return [pid for pid, marker in marked_processes() if marker.partition(".")[0] in owners]

    async def start(self, **changes: str) -> None:
        """Start it, with these variables changed for good, and wait until it listens."""
        self.variables |= changes
        before = len(self.lines)
        await self.spawn()
        await self.record("started", before)

    async def spawn(self) -> None:
        """Start it and wait for nothing."""
        self._process = await self._begin()
        self._pids.append(self._process.pid)
        assert self._process.stdout is not None
        self._silent = False
        self._reading = asyncio.create_task(self._read(self._process.stdout))

    async def _begin(self) -> Process:
        return await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "opencode_a2a",
            *self.arguments,
            env=bare(self.variables),
            cwd=self.directory,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            start_new_session=self._detached,
        )

    async def _read(self, output: asyncio.StreamReader) -> None:
        while not self._silent:
            line = await output.readline()
            async with self._printed:
                self._silent = not line
                self.lines += [line.decode().rstrip()] if line else []
                self._printed.notify_all()

    async def printed(self, wanted: Callable[[str], bool], since: int = 0) -> str:
        """Wait for a line, and return it; fail when the program ends without it."""

        def found() -> bool:
            return any(map(wanted, self.lines[since:])) or self._silent

        async with asyncio.timeout(PATIENCE), self._printed:
            await self._printed.wait_for(found)
        for line in self.lines[since:]:
            if wanted(line):
                return line
        raise AssertionError("the program ended:\n" + "\n".join(self.lines[since:]))

    async def record(self, event: str, since: int = 0) -> dict[str, Any]:
        """Wait for a log record, and return it."""
        named = f'"event":"{event}"'
        return orjson.loads(await self.printed(lambda line: named in line, since))

    def signal(self, number: Signals) -> None:
        """Send a signal and wait for nothing."""
        os.kill(self.pid, number)

    async def ended(self, patience: float | None = PATIENCE) -> int:
        """Wait for its end, and return the exit status."""
        assert self._process is not None
        assert self._reading is not None
        async with asyncio.timeout(patience):
            await asyncio.shield(self._reading)
            return await self._process.wait()

    async def stop(self, number: Signals = Signals.SIGTERM) -> int:
        """End it politely; return the exit status."""
        self.signal(number)
        return await self.ended()

    async def kill(self) -> None:
        """End it as a crash would."""
        await self.stop(Signals.SIGKILL)

    async def restart(self, **changes: str) -> None:
        """Kill it, and start it again."""
        await self.kill()
        await self.start(**changes)

    def records(self) -> list[Any]:
        """Return the log records: every line that is JSON."""
        return [orjson.loads(line) for line in self.lines if line.startswith("{")]


def bare(variables: Mapping[str, str]) -> dict[str, str]:
    """Return an environment with nothing in it but what a program cannot do without."""
    return {"PATH": os.environ["PATH"], "HOME": os.environ.get("HOME", "/"), **variables}


async def run(*arguments: str, **variables: str) -> tuple[int, str]:
    """Run the program to its end; return its status and all that it printed."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "opencode_a2a",
        *arguments,
        env=bare(variables),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    try:
        async with asyncio.timeout(PATIENCE):
            output, _ = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.communicate()
    assert process.returncode is not None
    return process.returncode, output.decode()
