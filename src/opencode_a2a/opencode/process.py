"""A local ``opencode serve`` that belongs to this program: found, started, watched, stopped.

``app`` and the tests open a ``ManagedOpenCode`` and point an ``OpenCode`` client at its URL,
which stays the same when OpenCode dies and is started again. Nothing of it outlives an orderly
end, tools' processes included, unless it is to be kept. With a record of it on disk the next
start takes over an OpenCode that was kept, or whose owner was killed. Nothing here knows what
OpenCode is used for.
"""

import asyncio
import contextlib
import logging
import os
import re
import secrets
import signal
import sys
import time
from asyncio.subprocess import PIPE
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from subprocess import DEVNULL, STDOUT, Popen
from typing import Final, Self
from urllib.parse import urlsplit

from opencode_a2a.errors import (
    ServiceError,
    UpstreamError,
    UpstreamHttpError,
    UpstreamUnreachableError,
)
from opencode_a2a.opencode import versions
from opencode_a2a.opencode.client import Location, OpenCode
from opencode_a2a.opencode.launch import (
    MARKER,
    USERNAME,
    WITHHELD,
    Launch,
    OpenCodeStartError,
    find_command,
    free_port,
)
from opencode_a2a.opencode.survivor import Claim, Process, Record, birth

log = logging.getLogger(__name__)

TAIL_LINES: Final = 40
STOP_SECONDS: Final = 5.0
LAST_WORDS_SECONDS: Final = 1.0
FIRST_DELAY: Final = 0.5
LONGEST_DELAY: Final = 30.0
STEADY_SECONDS: Final = 60.0
"""After so long a life, the next death starts again with the shortest delay."""
PORT_ATTEMPTS: Final = 3
LEFTOVER_ROUNDS: Final = 100
HEALTHY_SECONDS: Final = 10.0
RECORDED: Final = ".recorded"
"""End of a marker whose OpenCode has a record: only the reader of that record may end it."""


def listening_url(line: str) -> str | None:
    """Return the URL to call in OpenCode's line about it, if this line is that one."""
    found = re.search(r"listening on (https?://\S+)", line)
    if found is None:
        return None
    url = found.group(1).rstrip("/")
    return url.replace("//0.0.0.0", "//127.0.0.1").replace("//[::]", "//[::1]")


class _Life:
    """One process from its start to its end: its last lines, and the URL in one of them."""

    def __init__(self, process: Process, read_end: int | None) -> None:
        self.process = process
        self.tail: deque[str] = deque(maxlen=TAIL_LINES)
        self.url: asyncio.Future[str | None] = asyncio.get_running_loop().create_future()
        """Where it listens; None if it never will."""
        self.withheld = asyncio.Event()
        """Set once no process that it starts inherits the password."""
        self._drain = asyncio.create_task(self._read(read_end), name="opencode output")
        self._watch = asyncio.create_task(self._settle(), name="opencode exit")

    async def _read(self, read_end: int | None) -> None:
        """Read to the end, whatever is printed: a full pipe would stop OpenCode."""
        if read_end is None:
            return
        stream = asyncio.StreamReader()
        pipe = os.fdopen(read_end, "rb", 0)
        try:
            transport, _ = await asyncio.get_running_loop().connect_read_pipe(
                lambda: asyncio.StreamReaderProtocol(stream), pipe
            )
        except BaseException:
            pipe.close()
            raise
        rest = b""
        try:
            while chunk := await stream.read(65536):
                *lines, rest = (rest + chunk).split(b"\n")
                rest = rest[-65536:]
                for line in lines:
                    self._take(line)
            self._take(rest)
        finally:
            transport.close()

    def _take(self, printed: bytes) -> None:
        line = printed.decode(errors="replace").rstrip()
        if not line:
            return
        self.tail.append(line[:1000])
        log.debug("opencode: %s", line)
        if line == WITHHELD:
            self.withheld.set()
        url = listening_url(line)
        if url and not self.url.done():
            self.url.set_result(url)

    async def _settle(self) -> None:
        await self.process.wait()
        # Its children may hold the pipe open, so that the end of the output proves nothing.
        await asyncio.wait([self._drain], timeout=LAST_WORDS_SECONDS)
        if not self.url.done():
            self.url.set_result(None)

    async def end(self) -> None:
        """Ask the process and its group to end, and give it time."""
        _signal_group(self.process.pid, signal.SIGTERM)
        try:
            async with asyncio.timeout(STOP_SECONDS):
                await self.process.wait()
        except TimeoutError:
            log.warning("OpenCode does not stop; killing it")

    async def clear(self) -> None:
        """Leave nothing of the process behind, dead or alive."""
        _signal_group(self.process.pid, signal.SIGKILL)
        await self.process.wait()
        await self.let_go()

    async def let_go(self) -> None:
        """Watch the process no longer."""
        self._drain.cancel()
        self._watch.cancel()
        await asyncio.wait([self._drain, self._watch])


def _signal_group(leader: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(leader, number)


def marked_processes() -> Iterator[tuple[int, str]]:
    """Yield (pid, marker) of everything started by an OpenCode of ours; Linux only.

    A tool's process may be in a group of its own, and outlive OpenCode. It has inherited
    the marker, and that is how it is found.
    """
    if sys.platform != "linux":
        return
    prefix = f"{MARKER}=".encode()
    for entry in os.scandir("/proc"):
        if not entry.name.isdigit():
            continue
        with contextlib.suppress(OSError):
            variables = Path(entry.path, "environ").read_bytes().split(b"\0")
            for variable in variables:
                if variable.startswith(prefix):
                    yield int(entry.name), variable[len(prefix) :].decode(errors="replace")


def kill_leftovers(marker: str) -> int:
    """Kill what carries this marker until nothing does; return how many. It may block a while."""
    killed: set[int] = set()
    for _ in range(LEFTOVER_ROUNDS):
        found = {pid for pid, value in marked_processes() if value == marker}
        if not found:
            break
        for pid in found - killed:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        killed |= found
        time.sleep(0.02)  # the kernel takes a moment, and they may have started more
    return len(killed)


def kill_abandoned() -> int:
    """Kill what an earlier run of this program left, having been killed itself."""
    marked = list(marked_processes())
    if not marked:
        return 0
    running = set(os.listdir("/proc"))
    # This very process may have been started by some OpenCode's shell.
    inherited = {marker for pid, marker in marked if pid == os.getpid()}
    abandoned = {
        marker
        for _, marker in marked
        if marker.partition(".")[0] not in running and not marker.endswith(RECORDED)
    }
    return sum(kill_leftovers(marker) for marker in abandoned - inherited)


class ManagedOpenCode:
    """OpenCode as a child process; ``async with`` starts it and leaves nothing behind.

    ``url``, ``username`` and ``password`` hold for the whole time. When OpenCode dies it is
    started again, and every function in ``on_restart`` is called: what ran in it is lost,
    and has to be compared with what is stored.

    ``record`` is a file that the next start reads; it belongs to one service at a time.
    """

    def __init__(self, launch: Launch, record: Path | None = None) -> None:
        self._launch = launch
        self._record = record
        self._claim = Claim(record) if record else None
        self._marker = f"{os.getpid()}.{secrets.token_hex(8)}" + (RECORDED if record else "")
        self._life: _Life | None = None
        self._keeper: asyncio.Task[None] | None = None
        self.username = USERNAME
        self.password = secrets.token_urlsafe(32)
        self.url = ""
        self.version = ""
        self.on_restart: list[Callable[[], None]] = []
        self.keep = False
        """Whether to leave it running at the end, for the next start to take over."""
        self._taken = False
        """Whether it is one that an earlier run has started."""

    @property
    def pid(self) -> int | None:
        """The process, while it runs."""
        return self._life.process.pid if self.running and self._life else None

    @property
    def running(self) -> bool:
        return self._life is not None and self._life.process.running

    @property
    def keepable(self) -> bool:
        """Whether the next start could take it over."""
        left = Record.read(self._record) if self._record is not None else None
        return self.running and left is not None and left.birth is not None

    async def __aenter__(self) -> Self:
        if self._claim is not None and not self._claim.take():
            log.warning(
                "another service that runs has written its OpenCode down in %s; this one is "
                "not taken over after a restart",
                self._record,
            )
            self._record = self._claim = None
        try:
            if abandoned := await asyncio.to_thread(kill_abandoned):
                log.warning("ended %d processes of an OpenCode whose owner is gone", abandoned)
            if not await self._take_over():
                await self._start_somewhere()
        except BaseException:
            await self._leave(keep=self._taken)
            raise
        if doubt := versions.doubt(self.version):
            log.warning("%s", doubt)
        self._keeper = asyncio.create_task(self._keep(), name="opencode keeper")
        return self

    async def __aexit__(self, kind: type[BaseException] | None = None, *_exc: object) -> None:
        if self._keeper is not None:
            self._keeper.cancel()
            await asyncio.wait([self._keeper])
        # What was taken over is still waited for when a start is broken off or fails.
        await self._leave(keep=self.keep or (self._taken and kind is not None))

    async def _leave(self, *, keep: bool) -> None:
        try:
            if keep and self.keepable and self._life is not None:
                await self._life.let_go()
            else:
                await self._stop()
        finally:
            if self._claim is not None:
                self._claim.release()

    # Take over

    async def _take_over(self) -> bool:
        """Go on with what an earlier run left if it is as a new one would be; else end it."""
        left = Record.read(self._record) if self._record is not None else None
        if left is None:
            return False
        process = left.process()
        if process is None:
            await asyncio.to_thread(kill_leftovers, left.marker)
            return False
        fresh = self._marker, self.password
        self._life = _Life(process, _output_of(process.pid))
        self._marker, self.password = left.marker, left.password
        self.url, self.version = left.url or "", left.version
        self._port = urlsplit(self.url).port or 0
        self._taken = True
        if left.setup != self._launch.digest():
            reason = "it was started with another configuration, environment or program"
        elif not await self._healthy():
            reason = "it does not answer as it should"
        else:
            log.info("took over OpenCode %s at %s, pid %d", self.version, self.url, process.pid)
            return True
        log.warning("ending the OpenCode of an earlier run (pid %d): %s", process.pid, reason)
        self._taken = False
        await self._stop()
        self._marker, self.password = fresh
        return False

    async def _healthy(self) -> bool:
        try:
            async with asyncio.timeout(HEALTHY_SECONDS), self._client() as opencode:
                version = (await opencode.health()).version
                await opencode.config(at=self._at)
        except (TimeoutError, ServiceError):
            return False
        return version == self.version

    # Start

    async def _start_somewhere(self) -> None:
        """Start on the given port, or on a free one; a free one may be taken meanwhile."""
        attempts = 1 if self._launch.port else PORT_ATTEMPTS
        while True:
            self._port = self._launch.port or free_port(self._launch.host)
            try:
                return await self._start()
            except OpenCodeStartError as error:
                attempts -= 1
                if not attempts or not any("ServeError" in line for line in error.output):
                    raise

    async def _start(self) -> None:
        launch, self._taken = self._launch, False
        variables = launch.variables(self.password, self._marker)
        executable = find_command(launch.command, variables.get("PATH"))
        command = [executable, "serve", "--hostname", launch.host, "--port", str(self._port)]
        record = Record(marker=self._marker, password=self.password, setup=launch.digest())
        self._write(record)  # first: if we are killed now, its marker has to be known
        self._life = life = await _spawn(command, launch.directory, variables)
        try:
            async with asyncio.timeout(launch.startup_timeout):
                usable = await self._wait_until_usable(life)
        except TimeoutError:
            seconds = f"{launch.startup_timeout:g} s"
            reason = f"OpenCode was not ready after {seconds}; raise OPENCODE_STARTUP_TIMEOUT"
        except UpstreamError as error:
            reason = await _too_old(executable) or (
                f"OpenCode does not work: {error.message}: {error.detail}"
            )
        else:
            if usable:
                pid = life.process.pid
                known = {"url": self.url, "version": self.version, "pid": pid, "birth": birth(pid)}
                self._write(record.model_copy(update=known))
                log.info("OpenCode %s at %s, pid %d", self.version, self.url, pid)
                return
            reason = "OpenCode ended at once"
        await self._stop()
        raise OpenCodeStartError(reason, command, life.tail)

    async def _wait_until_usable(self, life: _Life) -> bool:
        """Return when OpenCode answers, or False if it ends before."""
        url = await life.url
        if url is None:
            return False
        self.url = url
        async with self._client() as opencode:
            while self.running:
                try:
                    self.version = (await opencode.health()).version
                except UpstreamUnreachableError:
                    await asyncio.sleep(0.05)  # the line comes a moment before the first answer
                    continue
                if reason := versions.refusal(self.version):
                    raise OpenCodeStartError(reason)
                # A broken configuration lets OpenCode listen and refuse everything else.
                await opencode.config(at=self._at)
                await self._check_password(life)
                return True
        return False

    async def _check_password(self, life: _Life) -> None:
        """Make sure that the password is still asked for, and no longer passed on."""
        async with OpenCode(self.url) as stranger:
            try:
                await stranger.health()
            except UpstreamHttpError:
                pass
            else:
                raise UpstreamError("it does not ask for its password")
        if not life.withheld.is_set():
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LAST_WORDS_SECONDS):
                    await life.withheld.wait()
        if not life.withheld.is_set():
            log.warning(
                "the agent's tools can see OpenCode's password, and so answer the agent's "
                "permissions: OpenCode does not load plugins; unset OPENCODE_PURE"
            )
        elif _shows(life.process.pid, self.password):
            log.warning(
                "the agent's tools can read OpenCode's password in the environment of process %d, "
                "and so answer the agent's permissions: the command is a launcher that keeps it; "
                "set OPENCODE_COMMAND to the OpenCode program itself",
                life.process.pid,
            )

    def _write(self, record: Record) -> None:
        if self._record is not None:
            record.write(self._record)

    @property
    def _at(self) -> Location:
        directory = self._launch.directory
        return Location(str(directory.absolute()) if directory else None)

    def _client(self) -> OpenCode:
        return OpenCode(self.url, username=self.username, password=self.password)

    # Watch

    async def _keep(self) -> None:
        """Start OpenCode again whenever it ends."""
        clock = asyncio.get_running_loop().time
        delay = FIRST_DELAY
        while self._life is not None:
            since = clock()
            status = await self._life.process.wait()
            log.error("OpenCode ended with status %s; starting it again", status)
            if clock() - since > STEADY_SECONDS:
                delay = FIRST_DELAY
            await self._clear()
            delay = await self._start_again(delay)
            for listener in self.on_restart:
                listener()

    async def _start_again(self, delay: float) -> float:
        """Try until it runs; return the delay for the next time."""
        while True:
            await asyncio.sleep(delay)
            delay = min(delay * 2, LONGEST_DELAY)
            try:
                await self._start()
            except (OpenCodeStartError, OSError) as error:
                log.error("OpenCode cannot be started, next try in %g s: %s", delay, error)
            else:
                return delay

    # Stop

    async def _stop(self) -> None:
        if self.running and self.url:
            # A signal alone would orphan the tools of its turns.
            with contextlib.suppress(TimeoutError, ServiceError):
                async with asyncio.timeout(STOP_SECONDS), self._client() as opencode:
                    await opencode.dispose()
        if self._life is not None:
            await self._life.end()
        await self._clear()
        self._life = None
        if self._record is not None:
            with contextlib.suppress(OSError):  # it is not worth the error of a start that failed
                self._record.unlink()

    async def _clear(self) -> None:
        if self._life is not None:
            await self._life.clear()
        if leftovers := await asyncio.to_thread(kill_leftovers, self._marker):
            log.warning("ended %d processes that OpenCode had left", leftovers)


def _output_of(pid: int) -> int | None:
    """Return the pipe that another process writes to, to read it from now on."""
    output = Path(f"/proc/{pid}/fd/1")
    try:
        return os.open(output, os.O_RDONLY | os.O_NONBLOCK) if output.is_fifo() else None
    except OSError:
        return None


def _shows(pid: int, password: str) -> bool:
    """Return whether a process was started with the password and has not overwritten it."""
    try:
        return password.encode() in Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return False


async def _too_old(executable: str) -> str | None:
    """Return that a command is an OpenCode too old to be used; it cannot say so itself."""
    asked = await asyncio.create_subprocess_exec(executable, "--version", stdout=PIPE)
    version, _ = await asked.communicate()
    return versions.refusal(version.decode(errors="replace").strip())


async def _spawn(
    command: Sequence[str], directory: Path | None, variables: Mapping[str, str]
) -> _Life:
    read_end, write_end = os.pipe()

    def start() -> Popen[bytes]:
        return Popen(  # noqa: S603 - the operator's own command
            command,
            cwd=directory,
            env=variables,
            stdin=DEVNULL,
            stdout=write_end,
            stderr=STDOUT,
            start_new_session=True,
            # It holds the reading end too: without us there would be nobody to write to.
            pass_fds=(read_end,),
        )

    try:
        # asyncio's own processes are killed when their loop is gone; this one may have to stay.
        child = await asyncio.to_thread(start)
    except BaseException:
        os.close(read_end)
        raise
    finally:
        os.close(write_end)
    return _Life(Process(child.pid, child), read_end)
