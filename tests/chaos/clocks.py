"""Time in a chaos run: how slow the machine is, and replicas whose clocks are wrong."""

import mmap
import struct
import time
from functools import partial
from multiprocessing import get_context
from pathlib import Path

from tests.chaos.history import History

WORK_SECONDS = 0.02
"""CPU time of the work whose duration is measured."""
REST_SECONDS = 0.4
_forks = get_context("forkserver")


class Pulse:
    """A process that measures how much longer work takes than its CPU time: 1 on an idle machine.

    A limit that grows with the load average says nothing, since the run itself is most of the load.
    This is what one more process really gets.
    """

    def __init__(self, history: History, directory: Path) -> None:
        self._history = history
        self._path = directory / "pulse"
        self._path.touch()
        self._process = _forks.Process(target=_beat, args=(self._path,), daemon=True)

    def __enter__(self) -> None:
        self._process.start()

    def __exit__(self, *_: object) -> None:
        self.read()
        self._process.kill()
        self._process.join()

    def read(self) -> None:
        """Note what was measured since the last time."""
        *lines, _ = self._path.read_text().split("\n")
        measured = [tuple(map(float, line.split())) for line in lines[len(self._history.pulses) :]]
        self._history.pulses += [(at, factor) for at, factor in measured]


def _beat(path: Path) -> None:
    with path.open("a") as out:
        while True:
            began, end = time.monotonic(), time.thread_time() + WORK_SECONDS
            while time.thread_time() < end:
                pass
            factor = (time.monotonic() - began) / WORK_SECONDS
            print(time.time(), factor, file=out, flush=True)
            time.sleep(REST_SECONDS)


class WrongClock:
    """The time of day of one replica, as far as its program reads it by ``time``.

    A library that sets the clock of a whole process is not on every machine. The program takes the
    time of day from ``time.time`` and ``time.time_ns`` alone, and decides nothing by it.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        path.write_bytes(struct.pack("d", 0.0))

    def set(self, seconds: float) -> None:
        """Put the clock forward, or back, from the right time."""
        with self._path.open("r+b") as file:  # which is never shorter: it is mapped
            file.write(struct.pack("d", seconds))

    @property
    def prepare(self) -> "partial[None]":
        return partial(_shift, self._path)


def _shift(path: Path) -> None:
    with path.open("rb") as file:
        shared = mmap.mmap(file.fileno(), 8, prot=mmap.PROT_READ)
    right, right_ns = time.time, time.time_ns

    def ahead() -> float:
        return struct.unpack("d", shared)[0]

    time.time = lambda: right() + ahead()
    time.time_ns = lambda: right_ns() + int(ahead() * 1e9)
