"""What the commands of an OpenCode 2 print while they run.

An event of 2.x names the command of a tool call, but what it prints has to be asked for.
``v2.events`` notes the running commands of followed sessions; ``v2.client`` looks at each about
once a second, and puts what is new into the event stream, as progress of the tool call. Pure.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import orjson

from opencode_a2a.ids import MessageId, SessionId

LOOK_SECONDS: Final = 1.0
"""Seconds between two looks at the output of a running command."""
MAX_OUTPUT: Final = 30_000
"""Characters of the output of a running command that are told: the last ones, as in 1.x."""


@dataclass(slots=True)
class Running:
    """A running command: its tool call, and what it has printed so far."""

    session: SessionId
    message: MessageId
    call: str
    directory: str | None
    output: str = ""
    cursor: int = 0

    def printed(self, shell: str, text: str, cursor: int) -> bytes:
        """Add what was printed up to ``cursor``; return the frame that tells it."""
        self.output, self.cursor = (self.output + text)[-MAX_OUTPUT:], cursor
        data = {
            "sessionID": self.session,
            "assistantMessageID": self.message,
            "id": self.call,
            "metadata": {"shellID": shell, "output": self.output},
        }
        event = {
            "id": f"evt_{shell}_{cursor}",
            "type": "session.tool.progress",
            "location": {"directory": self.directory},
            "data": data,
        }
        return b"data: %b\n\n" % orjson.dumps(event)


class Inserted:
    """A stream of events into which frames can be put, between two of its own."""

    def __init__(self, sink: Callable[[bytes], object]) -> None:
        self._sink = sink
        self._between = True
        self._waiting: list[bytes] = []
        self.fresh = False
        """Whether OpenCode itself has sent anything since this was last set to False."""

    def take(self, chunk: bytes) -> None:
        """Pass on a chunk of the stream, which may be cut anywhere."""
        self.fresh = True
        self._sink(chunk)
        self._between = chunk.endswith((b"\n\n", b"\r\n\r\n"))
        while self._between and self._waiting:
            self._sink(self._waiting.pop(0))

    def put(self, frame: bytes) -> None:
        """Pass on a whole frame as soon as possible."""
        self._waiting.append(frame)
        while self._between and self._waiting:
            self._sink(self._waiting.pop(0))
