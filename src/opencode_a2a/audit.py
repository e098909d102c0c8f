"""The audit file: one JSON object per line, appended by a thread of its own.

``telemetry`` passes every rendered audit record to it. A record that cannot be written, because the
disk is full or too many are waiting, goes to the log instead and is counted: none is lost silently.
"""

import os
import queue
import stat
import threading
from collections.abc import Callable
from pathlib import Path

from opencode_a2a import metrics
from opencode_a2a.config import SettingsError

WAITING = 10_000
"""Records that may wait to be written."""
CLOSE_SECONDS = 5.0
"""How long to wait for the file to close."""


class AuditFile:
    """Appends records, and opens a new file when the old one is renamed or removed."""

    def __init__(self, path: Path, instead: Callable[[str], None]) -> None:
        """Open the file, readable for its owner alone; raise SettingsError if that fails.

        ``instead`` is called with each line that could not be written.
        """
        self._path = path
        self._instead = instead
        self._waiting: queue.Queue[str | None] = queue.Queue(WAITING)
        self._failing = False
        self._torn = False
        """Whether the last line is incomplete, so that the next one needs a line break first."""
        try:
            self._file = self._open()
        except OSError as error:
            raise SettingsError.of(
                "A2A_AUDIT_FILE", f"cannot append to {path}: {error.strerror}"
            ) from None
        self._thread = threading.Thread(target=self._run, name="audit", daemon=True)
        self._thread.start()

    def take(self, line: str) -> bool:
        """Queue a record for writing; return False if too many are waiting."""
        try:
            self._waiting.put_nowait(line)
        except queue.Full:
            metrics.AUDIT_LOST.inc()
            return False
        return True

    def close(self) -> None:
        """Write the waiting records, for a few seconds at most, and close the file."""
        try:
            self._waiting.put(None, timeout=CLOSE_SECONDS)
        except queue.Full:
            return
        self._thread.join(CLOSE_SECONDS)

    def _run(self) -> None:
        while (line := self._waiting.get()) is not None:
            try:
                self._reopen_if_moved()
                data = (b"\n" if self._torn else b"") + line.encode() + b"\n"
                while data:
                    written = os.write(self._file, data)
                    data = data[written:]
                    self._torn = bool(data)
            except OSError as error:
                metrics.AUDIT_LOST.inc()
                self._instead(line)
                if not self._failing:
                    why = f"the audit file cannot be written: {error.strerror}"
                    self._instead(f'{{"event":"{why}"}}')
                self._failing = True
            else:
                self._failing = False
        os.close(self._file)

    def _reopen_if_moved(self) -> None:
        """Open a new file if the old one was moved away; the check takes microseconds."""
        ours = os.fstat(self._file)
        try:
            there = os.stat(self._path, follow_symlinks=False)
            same = (there.st_dev, there.st_ino) == (ours.st_dev, ours.st_ino)
        except FileNotFoundError:
            same = False
        if not same:
            fresh = self._open()
            os.close(self._file)
            self._file, self._torn = fresh, False

    def _open(self) -> int:
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_NONBLOCK
        opened = os.open(self._path, flags | os.O_CLOEXEC, 0o600)
        if not stat.S_ISREG(os.fstat(opened).st_mode):
            os.close(opened)
            raise OSError(0, "not a regular file")
        return opened
