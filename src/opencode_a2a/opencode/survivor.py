"""A managed OpenCode that outlives this program: its record on disk, and its process.

``opencode.process`` writes the record while OpenCode runs and reads it at the next start. A pid
alone is never trusted: the system gives it to another process some day.
"""

import asyncio
import contextlib
import fcntl
import os
import sys
from pathlib import Path
from subprocess import Popen
from typing import Annotated, Final, Self
from urllib.parse import urlsplit

from pydantic import AfterValidator, BaseModel, Field, ValidationError

from opencode_a2a.opencode.launch import OpenCodeStartError

POLL_SECONDS: Final = 0.2


def birth(pid: int) -> str | None:
    """Return what tells a process from all others that had its pid; None if there is none."""
    if sys.platform != "linux":
        return None
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        # The second field is the program's name in brackets, and may hold anything.
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    state, started = fields[0], fields[19]
    return None if state in "ZX" else f"{boot}/{started}"


def _reachable(url: str) -> str:
    parts = urlsplit(url)  # it raises ValueError itself for some of what is no URL
    if parts.scheme not in ("http", "https") or not parts.hostname or not parts.port:
        raise ValueError("not the URL of a server")
    return url


class Record(BaseModel):
    """What the next start has to know of a managed OpenCode."""

    marker: str
    """In the environment of OpenCode and of all that it started."""
    password: str
    pid: Annotated[int, Field(gt=0, lt=2**31)] | None = None
    """None until it has been started."""
    birth: str | None = None
    url: Annotated[str, AfterValidator(_reachable)] | None = None
    """None until it has been of use."""
    version: str = ""
    setup: str = ""
    """What it was started with, as ``Launch.digest`` tells it."""

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

    def process(self) -> "Process | None":
        """Return the process if it still runs, and is the one that was written down."""
        if self.pid is None or self.birth is None:
            return None
        process = Process(self.pid)  # holds on to it before it is looked at
        return process if birth(self.pid) == self.birth else None


class Claim:
    """A record is one service's for as long as it runs: the lock beside it says so."""

    def __init__(self, record: Path) -> None:
        self._file = record.with_suffix(".lock")
        self._lock: int | None = None

    def take(self) -> bool:
        """Return whether the record is ours now, and not that of a service that runs."""
        try:
            self._file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            while self._lock is None:
                lock = os.open(self._file, os.O_CREAT | os.O_RDWR, 0o600)
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    # Who had it may have removed the file meanwhile: that lock is worth nothing.
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


def _unwritable(file: Path, error: OSError) -> OpenCodeStartError:
    return OpenCodeStartError(
        f"cannot write {file}: {error.strerror}; remove what is there, or set A2A_STATE_DIR"
    )


class Process:
    """A running process, our child or not. It goes on when this program ends."""

    def __init__(self, pid: int, child: "Popen[bytes] | None" = None) -> None:
        self.pid = pid
        self._child = child
        self._birth = birth(pid)
        self._handle: int | None = None
        # Old kernels and other systems have no handles of processes.
        with contextlib.suppress(OSError, AttributeError):
            self._handle = os.pidfd_open(pid)

    def __del__(self) -> None:
        if self._handle is not None:
            os.close(self._handle)

    @property
    def running(self) -> bool:
        if self._child is not None:
            return self._child.poll() is None
        return self._birth is not None and birth(self.pid) == self._birth

    async def wait(self) -> int | None:
        """Wait for its end; return its exit status, which only a parent is told."""
        if self._handle is None:
            while self.running:  # noqa: ASYNC110 - nobody tells
                await asyncio.sleep(POLL_SECONDS)
        elif self.running:
            ended, loop = asyncio.Event(), asyncio.get_running_loop()
            # A handle of its own for each that waits: the loop knows one reader per descriptor.
            handle = os.dup(self._handle)
            loop.add_reader(handle, ended.set)
            try:
                await ended.wait()
            finally:
                loop.remove_reader(handle)
                os.close(handle)
        return self._child.poll() if self._child is not None else None
