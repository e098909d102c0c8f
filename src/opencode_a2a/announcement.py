"""How commands find the services that this user runs on this machine.

A service writes its URL into a file in the state directory and holds a lock on the file. Commands
read these files, and send the generated token only to a service that accepts it. The kernel drops
the lock however the process ends, so a file without a lock is a leftover and is ignored.
"""

import fcntl
import os
import secrets
from collections.abc import Generator, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

_OTHER_CREDENTIAL = "configured"
"""Written after the URL of a service that does not accept the generated token."""


@dataclass(frozen=True, slots=True)
class RunningService:
    """A service of this user, as its file describes it."""

    url: str
    accepts_token: bool
    """Whether it accepts the token in the state directory."""


@contextmanager
def announced(state: Path, url: str, *, accepts_token: bool = True) -> Generator[None]:
    """Announce the URL of this service for as long as the context lasts."""
    folder = state / "services"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    for leftover in _entries(state):
        with suppress(OSError), leftover.open() as entry:
            if not _locked(entry.fileno()):
                leftover.unlink()
    name = secrets.token_hex(8)
    # Locked before it gets its final name, so that nobody takes the new file for a leftover.
    hidden, file = folder / f".{name}", folder / name
    with os.fdopen(os.open(hidden, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "w") as entry:
        fcntl.flock(entry, fcntl.LOCK_EX)
        entry.write(f"{url}\n" if accepts_token else f"{url} {_OTHER_CREDENTIAL}\n")
        entry.flush()
        hidden.rename(file)
        try:
            yield
        finally:
            file.unlink(missing_ok=True)


def running(state: Path) -> Iterator[RunningService]:
    """Yield every service that is running."""
    for file in _entries(state):
        with suppress(OSError, UnicodeDecodeError), file.open() as entry:
            if _locked(entry.fileno()) and (words := entry.read().split()):
                yield RunningService(words[0], words[1:] != [_OTHER_CREDENTIAL])


def _entries(state: Path) -> list[Path]:
    try:
        return [file for file in (state / "services").iterdir() if not file.name.startswith(".")]
    except OSError:
        return []


def _locked(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    return False
