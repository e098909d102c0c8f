"""A played OpenCode as a process of its own, which can be killed and comes back with its state.

What the real one stores is written to a journal before it is told, so that a ``kill -9`` loses
what it would lose there: running turns, waiting permissions, text of parts that have not ended.
The journal is also the record of what was asked of it, for the checks after the run.
"""

import asyncio
import os
import re
import time
from dataclasses import dataclass
from functools import cache
from multiprocessing import get_context
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import orjson
from starlette.requests import Request
from starlette.responses import Response

from opencode_a2a.events import JsonObject
from opencode_a2a.ids import SessionId
from opencode_a2a.opencode.events import Event, PartDelta, SessionChanged, decode
from tests.support.opencode import FakeOpenCode, recorded
from tests.support.ports import free_port

PACE_SECONDS = 0.12
_TEXT = re.compile(r"chaos (?P<token>\w+) words=(?P<words>\d+)(?P<asks> ask)?")
_DELTA = b"message.part.delta"
_forks = get_context("forkserver")


@dataclass(frozen=True, slots=True)
class Script:
    """What a prompt asks for: so many words, after a permission or not."""

    token: str
    words: int
    asks: bool = False

    @property
    def prompt(self) -> str:
        return f"chaos {self.token} words={self.words}{' ask' if self.asks else ''}"

    @property
    def pieces(self) -> list[str]:
        return [f"{self.token}-{number} " for number in range(self.words)]

    @property
    def text(self) -> str:
        return "".join(self.pieces)

    @classmethod
    def read(cls, prompt: str) -> "Script":
        found = _TEXT.search(prompt)
        if found is None:
            raise ValueError(f"not a prompt of this run: {prompt[:80]}")
        return cls(found["token"], int(found["words"]), found["asks"] is not None)


@cache
def _frames(script: Script) -> list[tuple[bytes, bytes]]:
    """Return a recording that says the words of the script in place of its own."""
    played = recorded("permission-once" if script.asks else "plain-text")
    deltas = [orjson.loads(frame) for kind, frame in played if kind == _DELTA]
    said = "".join(event["payload"]["properties"]["delta"] for event in deltas)
    spoken: list[tuple[bytes, bytes]] = []
    told = False
    for kind, frame in played:
        if kind != _DELTA:
            spoken.append((kind, frame.replace(orjson.dumps(said), orjson.dumps(script.text))))
        elif not told:
            told = True
            event: dict[str, Any] = orjson.loads(frame)
            first: str = event["payload"]["id"]
            for number, piece in enumerate(script.pieces):
                event["payload"]["id"] = f"{first}w{number}"
                event["payload"]["properties"]["delta"] = piece
                spoken.append((kind, orjson.dumps(event)))
    return spoken


class PlayedOpenCode(FakeOpenCode):
    """Plays what a prompt's script says, one turn for each message id, as the real one does."""

    def __init__(self, workspace: Path, journal: Path) -> None:
        super().__init__(workspace)
        self.pace = PACE_SECONDS
        self._running: dict[str, asyncio.Task[None]] = {}
        self._known: set[str] = set()
        """The ids of messages that were prompted, in earlier lives too."""
        self._ended: set[str] = set()
        """Those whose turns were played to the end; a kill ends a turn before it."""
        for line in journal.read_bytes().splitlines() if journal.exists() else []:
            record: dict[str, Any] = orjson.loads(line)
            if "frame" in record:
                self._restore(record["frame"].encode())
            elif "prompt" in record:
                self._known.add(record["prompt"]["message"])
            elif "ended" in record:
                self._ended.add(record["ended"]["message"])
        self._journal = os.open(journal, os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    def _restore(self, frame: bytes) -> None:
        event = decode(frame)
        if isinstance(event, SessionChanged):
            self._sessions[event.session_id] = orjson.loads(frame)["payload"]["properties"]["info"]
        if event is not None:
            self._state.apply(event)
        # These were in the memory of the one that was killed.
        self._state.statuses.clear()
        self._state.permissions.clear()

    def _note(self, **record: object) -> None:
        os.write(self._journal, orjson.dumps({"at": time.time(), **record}) + b"\n")

    def played(self, prompt: JsonObject) -> list[tuple[bytes, bytes]]:
        return _frames(Script.read(_text(prompt)))

    def tell(self, frame: bytes) -> Event | None:
        if not isinstance(decode(frame), PartDelta):
            self._note(frame=frame.decode())
        return super().tell(frame)

    async def _play(self, session_id: SessionId, prompt: JsonObject) -> None:
        """Play a message once; whoever sends it again waits for the same turn."""
        message, token = str(prompt["messageID"]), Script.read(_text(prompt)).token
        again = message in self._known
        self._note(
            prompt={"session": session_id, "message": message, "token": token, "again": again}
        )
        self._known.add(message)
        if message not in self._ended and message not in self._running:
            self._running[message] = asyncio.create_task(super()._play(session_id, prompt))
        if (turn := self._running.get(message)) is not None:
            await asyncio.shield(turn)
        aborted = self._turns[session_id].aborted.is_set() if session_id in self._turns else True
        if aborted:
            self._drop_permissions(session_id)
        self._ended.add(message)
        self._note(ended={"message": message, "token": token, "aborted": aborted})

    def _drop_permissions(self, session_id: SessionId) -> None:
        waiting = self._state.permissions
        for request_id in [key for key, one in waiting.items() if one.session_id == session_id]:
            del waiting[request_id]

    async def _reply(self, request: Request) -> Response:
        body: dict[str, Any] = orjson.loads(await request.body())
        asked = self._state.permissions.get(request.path_params["id"])
        replied = await super()._reply(request)
        taken = replied.status_code == 200 and asked is not None
        # One that comes when the request is settled is noted too: it was given all the same.
        self._note(
            reply={
                "session": asked.session_id if asked else "",
                "request": request.path_params["id"],
                "reply": body.get("reply", ""),
                "taken": taken,
            }
        )
        if taken:
            # The turn tells so in a moment; another reply must not count until then.
            self._state.permissions.pop(request.path_params["id"], None)
        return replied

    async def _abort(self, request: Request) -> Response:
        self._note(abort={"session": request.path_params["id"]})
        return await super()._abort(request)


def _text(prompt: JsonObject) -> str:
    parts: Any = prompt["parts"]
    return "".join(part.get("text", "") for part in parts)


class OpenCodeProcess:
    """Runs a played OpenCode, always on the same port and journal."""

    def __init__(self, name: str, directory: Path, workspace: Path) -> None:
        self.name = name
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.journal = directory / f"{name}.jsonl"
        self._workspace = workspace
        self._process: BaseProcess | None = None

    def start(self) -> None:
        arguments = (self.port, self._workspace, self.journal)
        self._process = _forks.Process(target=_run, args=arguments, daemon=True)
        self._process.start()

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.join()

    def records(self) -> list[dict[str, Any]]:
        """Return what was asked of it in all its lives."""
        if not self.journal.exists():
            return []
        return [orjson.loads(line) for line in self.journal.read_bytes().splitlines()]


def _run(port: int, workspace: Path, journal: Path) -> None:
    async def play() -> None:
        async with PlayedOpenCode(workspace, journal).running(port):
            await asyncio.Event().wait()

    asyncio.run(play())
