"""A command at a terminal of its own: what a person sees, and what a person types."""

import asyncio
import codecs
import fcntl
import os
import signal
import struct
import sys
import termios
from pathlib import Path
from typing import Self

import pyte

PATIENCE = 60.0
"""Seconds after which a test gives up waiting for something on the screen."""


class Terminal:
    """``opencode-a2a`` with a pseudo-terminal for all three streams; it ends with the test."""

    def __init__(self, *arguments: str, size: tuple[int, int] = (200, 50)) -> None:
        self._size = size
        """Columns and lines."""
        self.screen = ""
        """All that was printed."""
        self._arguments = arguments
        self._position = 0
        self._news = asyncio.Event()
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._ours = -1
        self._process: asyncio.subprocess.Process | None = None

    async def __aenter__(self) -> Self:
        self._ours, theirs = os.openpty()
        columns, lines = self._size
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))
        self._process = await asyncio.create_subprocess_exec(
            *("setsid", "--ctty"),  # so that Ctrl-C reaches it
            *(sys.executable, "-m", "opencode_a2a", *self._arguments),
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            env={**os.environ, "TERM": "xterm", "COLUMNS": str(columns)},
        )
        os.close(theirs)
        asyncio.get_running_loop().add_reader(self._ours, self._read)
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._process is not None
        if self._process.returncode is None:
            self._process.kill()
            await self._process.wait()
        asyncio.get_running_loop().remove_reader(self._ours)
        os.close(self._ours)
        print(self.screen)  # shown when a test fails

    @property
    def seen(self) -> str:
        """What a person sees: the text after all movements of the cursor."""
        shown = pyte.Screen(*self._size)
        pyte.Stream(shown).feed(self.screen)
        return "\n".join(shown.display)

    def _read(self) -> None:
        try:
            self.screen += self._decoder.decode(os.read(self._ours, 65536))
        except OSError:  # the other side is closed
            asyncio.get_running_loop().remove_reader(self._ours)
        self._news.set()

    async def sees(self, text: str) -> str:
        """Wait for text after what was waited for last; return what came before it."""
        async with asyncio.timeout(PATIENCE):
            while (at := self.screen.find(text, self._position)) < 0:
                self._news.clear()
                await self._news.wait()
        before = self.screen[self._position : at]
        self._position = at + len(text)
        return before

    def type(self, text: str) -> None:
        os.write(self._ours, text.encode())

    def signal(self, number: signal.Signals) -> None:
        assert self._process is not None
        self._process.send_signal(number)

    async def interrupt(self) -> None:
        """Press Ctrl-C once the command sleeps.

        A signal between Python's last look at its signals and readline's wait for a key is
        seen only with the next key. A person is never that fast; a test is.
        """
        assert self._process is not None
        status = Path(f"/proc/{self._process.pid}/stat")

        def asleep() -> bool:
            return status.read_text().rpartition(")")[2].split()[0] == "S"

        async with asyncio.timeout(PATIENCE):
            while not asleep():  # noqa: ASYNC110 - nothing tells it
                await asyncio.sleep(0.01)
        self.type("\x03")

    async def ended(self) -> int:
        """Wait for the end of the command and return its exit status."""
        assert self._process is not None
        async with asyncio.timeout(PATIENCE):
            return await self._process.wait()
