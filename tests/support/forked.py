"""The service as a process of its own, which need not import its modules first.

To import them is most of what a start costs. ``ForkedProgram`` is for tests that are about what
outlives a process, and start many; it forks each from a process that has imported everything.
Tests that are about the process itself start a ``Program``, as users do.
"""

import asyncio
import os
import sys
from collections.abc import Callable, Sequence
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path

from tests.support.program import Program, bare

_forks = get_context("forkserver")
_forks.set_forkserver_preload(["opencode_a2a.cli.serve", "opencode_a2a.app", "uvloop"])


class ForkedProgram(Program):
    """``opencode-a2a serve`` as ``Program`` has it."""

    prepare: Callable[[], None] | None = None
    """Called in each new process before the program begins; it is pickled."""

    async def _begin(self) -> "_Forked":
        place = self.directory or Path.cwd()
        process = _Forked(self.arguments, bare(self.variables), place, self.prepare)
        await process.connect()
        return process


class _Forked:
    """As much as is needed of what asyncio says of a process."""

    def __init__(
        self,
        arguments: Sequence[str],
        variables: dict[str, str],
        place: Path,
        prepare: Callable[[], None] | None,
    ) -> None:
        self._ours, theirs = _forks.Pipe(duplex=False)
        self._process = _forks.Process(
            target=_run, args=(arguments, variables, place, theirs, prepare), daemon=True
        )
        self._process.start()
        theirs.close()
        self.stdout: asyncio.StreamReader | None = None

    async def connect(self) -> None:
        loop = asyncio.get_running_loop()
        self.stdout = reader = asyncio.StreamReader()
        pipe = os.fdopen(os.dup(self._ours.fileno()), "rb")
        self._ours.close()
        await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), pipe)

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    async def wait(self) -> int:
        loop, ended = asyncio.get_running_loop(), asyncio.Event()
        loop.add_reader(self._process.sentinel, ended.set)
        try:
            await ended.wait()
        finally:
            loop.remove_reader(self._process.sentinel)
        self._process.join()
        status = self._process.exitcode
        assert status is not None
        return status


def _run(
    arguments: Sequence[str],
    variables: dict[str, str],
    place: Path,
    output: Connection,
    prepare: Callable[[], None] | None,
) -> None:
    for stream in (1, 2):
        os.dup2(output.fileno(), stream)
    output.close()
    os.environ.clear()
    os.environ.update(variables)
    os.chdir(place)
    sys.argv = ["opencode-a2a", *arguments]
    from opencode_a2a.cli import main

    if prepare is not None:
        prepare()
    main()
