"""The processes of a managed OpenCode, and the record of an OpenCode that may outlive this program.

``opencode.managed`` uses both. Nothing here knows how OpenCode is configured.
"""

import asyncio
import contextlib
import fcntl
import os
import re
import signal
import sys
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from hashlib import sha256
from pathlib import Path
from subprocess import DEVNULL, STDOUT, Popen
from typing import Annotated, Final, Self
from urllib.parse import urlsplit

import structlog
from pydantic import AfterValidator, BaseModel, Field, ValidationError, field_validator

logger = structlog.get_logger(__name__)

MARKER: Final = "OPENCODE_A2A_INSTANCE"
"""The variable that marks OpenCode and every process it starts: ``<our pid>.<random>``."""
RECORDED: Final = ".recorded"
"""The end of the marker of an OpenCode with a record: only the record's owner may end it."""
WITHHELD: Final = "opencode-a2a: the password is withheld from tools"
"""The line that the plugin `withhold.js` prints when it is done."""
TAIL_LINES: Final = 40
"""Lines of output that are kept for the error of a failed start."""
STOP_SECONDS: Final = 5.0
LAST_OUTPUT_SECONDS: Final = 1.0
"""Seconds to wait for lines that OpenCode may still print."""
POLL_SECONDS: Final = 0.2
SUPERVISORS: Final = (
    "systemd", "init", "openrc-init", "runit", "runsvdir", "s6-svscan", "supervisord", "dinit",
    "procd", "shepherd",
)  # fmt: skip
"""Names of first processes that keep running when a child ends."""


class OpenCodeStartError(Exception):
    """OpenCode is missing or did not start; the text ends with the last lines that it printed."""

    def __init__(self, reason: str, command: Sequence[str] = (), output: Sequence[str] = ()):
        self.reason = reason
        self.command = tuple(command)
        self.output = tuple(output)
        lines = [reason]
        if command:
            lines.append(f"command: {' '.join(command)}")
        lines += [f"  {line}" for line in output]
        super().__init__("\n".join(lines))


class OpenCodeMissingError(OpenCodeStartError):
    """There is no OpenCode to start. Trying again does not help: a person has to install it."""


class UnsupportedOpenCodeError(OpenCodeStartError):
    """This service cannot use what answers, or what was started, until a person acts."""


# The version that is recommended; `opencode.kinds` judges the others

QUALIFIED: Final = "1.18.33"
"""The newest version that has passed the live tests; see ``tools/qualify.py``."""
PREVIEW: Final = "0.0.0-next-16350"
"""The preview of OpenCode 2 that the tests run on; nobody could run a release here."""
INSTALL: Final = f"`npm install -g opencode-ai@{QUALIFIED}`"


# Processes


def birth(pid: int) -> str | None:
    """Return what distinguishes a process from others with the same pid; None if it is gone."""
    if sys.platform != "linux":
        return None
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        # The second field is the program's name in brackets, which may contain anything.
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    state, started = fields[0], fields[19]
    return None if state in "ZX" else f"{boot}/{started}"


def ends_all(pid: int, parent: int, first: str) -> bool:
    """Whether all other processes end with this one, as those of a container do.

    So it is for the first process of a container, and for the child of a first process that only
    waits for it, such as ``tini`` or a shell. ``first`` is the name of process 1. The parent of a
    process that a container runtime starts in a namespace of its own is 0.
    """
    return pid == 1 or parent == 0 or (parent == 1 and first not in SUPERVISORS)


def ends_with_us() -> bool:
    """Whether a process that this one leaves behind is ended with it."""
    try:
        first = Path("/proc/1/comm").read_text().strip()
    except OSError:
        first = "init"
    return ends_all(os.getpid(), os.getppid(), first)


def marked_processes() -> Iterator[tuple[int, str]]:
    """Yield the pid and the marker of every process that an OpenCode of ours started; Linux only.

    The process of a tool may be in a process group of its own and outlive OpenCode. It is found by
    the marker, which it has inherited.
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
    """Kill all processes with this marker and return how many there were. Blocks for a while."""
    killed: set[int] = set()
    for _ in range(100):
        marked = {pid for pid, value in marked_processes() if value == marker}
        if not marked:
            break
        for pid in marked - killed:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        killed |= marked
        time.sleep(0.02)  # the kernel takes a moment, and they may have started other processes
    return len(killed)


def recorded_in(record: Path) -> str:
    """Return the end of the marker of an OpenCode whose record is this file."""
    return f".{sha256(os.fsencode(record.absolute())).hexdigest()[:16]}{RECORDED}"


def kill_abandoned(record: Path | None = None) -> int:
    """Kill the processes of earlier runs of this program that were killed themselves.

    ``record`` is the file that this run owns. If it was deleted or damaged, this run alone can find
    the OpenCode that it described.
    """
    marked = list(marked_processes())
    if not marked:
        return 0
    running = set(os.listdir("/proc"))
    # This process itself may have been started by the shell of an OpenCode.
    inherited = {marker for pid, marker in marked if pid == os.getpid()}
    left = Record.read(record) if record is not None else None
    lost = {
        marker
        for _, marker in marked
        if record is not None and marker.endswith(recorded_in(record))
        if left is None or marker != left.marker
    }
    abandoned = {
        marker
        for _, marker in marked
        if marker.partition(".")[0] not in running
        and (marker in lost or not marker.endswith(RECORDED))
    }
    return sum(kill_leftovers(marker) for marker in abandoned - inherited)


def listening_url(line: str) -> str | None:
    """Return the URL that OpenCode announces in this line of its output, if it does."""
    announced = re.search(r"listening on (https?://\S+)", line)
    if announced is None:
        return None
    url = announced.group(1).rstrip("/")
    return url.replace("//0.0.0.0", "//127.0.0.1").replace("//[::]", "//[::1]")


class OpenCodeProcess:
    """A process of OpenCode, our child or not. It keeps running when this program exits."""

    def __init__(self, pid: int, child: "Popen[bytes] | None" = None) -> None:
        self.pid = pid
        self.tail: deque[str] = deque(maxlen=TAIL_LINES)
        """The last lines that it printed."""
        self.url: asyncio.Future[str | None] = asyncio.get_running_loop().create_future()
        """The URL where it listens; None if it exits before it listens."""
        self.withheld = asyncio.Event()
        """Set once the processes that it starts no longer inherit the password."""
        self._child = child
        self._birth = birth(pid)
        self._tasks: list[asyncio.Task[None]] = []
        self._handle: int | None = None
        # Old kernels and other systems have no handles for processes.
        with contextlib.suppress(OSError, AttributeError):
            self._handle = os.pidfd_open(pid)

    def __del__(self) -> None:
        if self._handle is not None:
            os.close(self._handle)

    @classmethod
    async def spawn(
        cls, command: Sequence[str], directory: Path | None, variables: Mapping[str, str]
    ) -> Self:
        """Start a process and read its output."""
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
                # It holds the reading end too, so that it can write when this program is gone.
                pass_fds=(read_end,),
            )

        try:
            # asyncio kills its processes when the event loop is gone; this one may have to stay.
            child = await asyncio.to_thread(start)
        except BaseException:
            os.close(read_end)
            raise
        finally:
            os.close(write_end)
        process = cls(child.pid, child)
        process.watch(read_end)
        return process

    @property
    def running(self) -> bool:
        if self._child is not None:
            return self._child.poll() is None
        return self._birth is not None and birth(self.pid) == self._birth

    async def wait(self) -> int | None:
        """Wait until it exits; return its exit status, which is known for our own child only."""
        if self._handle is None:
            while self.running:  # noqa: ASYNC110 - there is nothing to wait for
                await asyncio.sleep(POLL_SECONDS)
        elif self.running:
            ended, loop = asyncio.Event(), asyncio.get_running_loop()
            # Each waiter needs a handle of its own: the loop allows one reader per descriptor.
            handle = os.dup(self._handle)
            loop.add_reader(handle, ended.set)
            try:
                await ended.wait()
            finally:
                loop.remove_reader(handle)
                os.close(handle)
        return self._child.poll() if self._child is not None else None

    def watch(self, read_end: int | None = None) -> None:
        """Read its output, even if it is not our child, and notice when it exits."""
        if read_end is None:
            output = Path(f"/proc/{self.pid}/fd/1")
            with contextlib.suppress(OSError):
                if output.is_fifo():
                    read_end = os.open(output, os.O_RDONLY | os.O_NONBLOCK)
        reading = asyncio.create_task(self._read(read_end), name="opencode output")

        async def settle() -> None:
            await self.wait()
            # Its children may keep the pipe open, so do not wait for the end of the output.
            await asyncio.wait([reading], timeout=LAST_OUTPUT_SECONDS)
            if not self.url.done():
                self.url.set_result(None)

        self._tasks = [reading, asyncio.create_task(settle(), name="opencode exit")]

    async def _read(self, read_end: int | None) -> None:
        """Read all output to its end: a full pipe would block OpenCode."""
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
                    self._printed(line)
            self._printed(rest)
        finally:
            transport.close()

    def _printed(self, printed: bytes) -> None:
        line = printed.decode(errors="replace").rstrip()
        if not line:
            return
        self.tail.append(line[:1000])
        logger.debug("OpenCode printed", line=line)
        if line == WITHHELD:
            self.withheld.set()
        if (url := listening_url(line)) and not self.url.done():
            self.url.set_result(url)

    def shows(self, secret: str) -> bool:
        """Whether its environment in ``/proc`` still shows a secret that it was started with."""
        try:
            return secret.encode() in Path(f"/proc/{self.pid}/environ").read_bytes()
        except OSError:
            return False

    async def end(self) -> None:
        """Ask the process and its group to exit, and wait for a few seconds."""
        self._signal_group(signal.SIGTERM)
        try:
            async with asyncio.timeout(STOP_SECONDS):
                await self.wait()
        except TimeoutError:
            logger.warning("OpenCode did not stop; killing it")

    async def clear(self) -> None:
        """Kill what is left of the process and its group, and stop watching."""
        self._signal_group(signal.SIGKILL)
        await self.wait()
        await self.let_go()

    async def let_go(self) -> None:
        """Stop watching the process, which keeps running."""
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)

    def _signal_group(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, number)


# The record for the next start


def _reachable(url: str) -> str:
    parts = urlsplit(url)  # raises ValueError itself for some texts
    if parts.scheme not in ("http", "https") or not parts.hostname or not parts.port:
        raise ValueError("not the URL of a server")
    return url


def _unwritable(file: Path, error: OSError) -> OpenCodeStartError:
    return OpenCodeStartError(
        f"cannot write {file}: {error.strerror}; remove what is there, or set A2A_STATE_DIR"
    )


class Record(BaseModel):
    """The description of a managed OpenCode that is stored for the next start."""

    marker: str
    """The value of ``MARKER`` in the environment of OpenCode and of its processes."""
    password: str
    pid: Annotated[int, Field(gt=0, lt=2**31)] | None = None
    """None until OpenCode has been started."""
    birth: str | None = None
    """From ``birth``: a pid alone is not enough, since the system reuses it."""
    url: Annotated[str, AfterValidator(_reachable)] | None = None
    """None until OpenCode could be used."""
    version: str = ""
    setup: dict[str, str] = {}
    """The digests of what it was started with: ``ManagedOpenCode.setup``."""

    @field_validator("setup", mode="before")
    @classmethod
    def _of_an_earlier_version(cls, value: object) -> object:
        # Before 2.1 it was one digest of everything, which fits nothing now.
        return {} if isinstance(value, str) else value

    @classmethod
    def read(cls, file: Path) -> Self | None:
        try:
            return cls.model_validate_json(file.read_bytes())
        except (OSError, ValidationError):
            return None

    def write(self, file: Path) -> None:
        new = file.with_suffix(".new")
        try:
            file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            new.unlink(missing_ok=True)
            with os.fdopen(os.open(new, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "w") as out:
                out.write(self.model_dump_json())
            new.replace(file)
        except OSError as error:
            raise _unwritable(file, error) from error


class RecordLock:
    """The lock beside a record, which a running service holds: it owns the record."""

    def __init__(self, record: Path) -> None:
        self._file = record.with_suffix(".lock")
        self._lock: int | None = None

    def take(self) -> bool:
        """Take the lock; return False if another running service holds it."""
        try:
            self._file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            while self._lock is None:
                lock = os.open(self._file, os.O_CREAT | os.O_RDWR, 0o600)
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    # The last owner may have removed the file meanwhile, which voids this lock.
                    if os.path.samestat(os.fstat(lock), self._file.stat()):
                        self._lock, lock = lock, -1
                except FileNotFoundError:
                    continue
                finally:
                    if lock != -1:
                        os.close(lock)
        except BlockingIOError:
            return False
        except OSError as error:
            raise _unwritable(self._file, error) from error
        return True

    def release(self) -> None:
        if self._lock is not None:
            with contextlib.suppress(OSError):
                self._file.unlink()
            os.close(self._lock)
            self._lock = None
