"""An OpenCode that asks for whatever a test wants approved, in the form of OpenCode 1.x."""

import re
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import orjson

from opencode_a2a.events import JsonObject
from tests.support.opencode import FakeOpenCode, recorded


@dataclass(frozen=True)
class Request:
    """A permission that OpenCode asks for, and the tool call that it is for."""

    permission: str
    patterns: tuple[str, ...] = ("*",)
    metadata: dict[str, Any] = field(default_factory=dict[str, Any])
    always: tuple[str, ...] = ("*",)
    tool: str | None = None
    input: dict[str, Any] = field(default_factory=dict[str, Any])
    untold: bool = False
    """Whether OpenCode never tells the input of the tool call."""
    earlier: dict[str, Any] | None = None
    """The input of an earlier call by the same id, which some providers give to each step's first
    call."""


class AskingOpenCode(FakeOpenCode):
    """Asks for the request that a prompt names, and goes on when it is answered."""

    def __init__(self, workspace: Path, requests: dict[str, Request]) -> None:
        super().__init__(workspace)
        self._requests = requests

    def played(self, prompt: JsonObject) -> list[tuple[bytes, bytes]]:
        parts: Any = prompt["parts"]
        asked = self._requests[parts[0]["text"]]
        frames = recorded("permission-once")
        played = [(kind, _asking(frame, asked)) for kind, frame in frames]
        if asked.earlier is None:
            return played
        at, step = _first_step(frames)
        before = replace(asked, input=asked.earlier)
        return [
            *played[:at],
            *((kind, _earlier(_asking(frame, before))) for kind, frame in step),
            *played[at:],
        ]


def _first_step(frames: list[tuple[bytes, bytes]]) -> tuple[int, list[tuple[bytes, bytes]]]:
    """Return the events of the message that calls the tool, without those that ask."""
    asked = next(frame for kind, frame in frames if kind == b"permission.asked")
    message = orjson.loads(asked)["payload"]["properties"]["tool"]["messageID"].encode()
    found = [at for at, (_, frame) in enumerate(frames) if message in frame]
    step = [frames[at] for at in found if not frames[at][0].startswith(b"permission.")]
    return found[0], step


def _earlier(frame: bytes) -> bytes:
    """Return an event of a message as one of another message, with the same call."""
    prompt = orjson.loads(frame)["payload"]["properties"].get("info", {}).get("parentID", "")
    kept = prompt.encode()
    return re.sub(
        rb"\b(?:msg|prt|evt)_\w+", lambda one: one[0] + (b"" if one[0] == kept else b"E"), frame
    )


def _asking(frame: bytes, asked: Request) -> bytes:
    event = orjson.loads(frame)
    properties = event["payload"]["properties"]
    part = properties.get("part", {})
    if event["payload"]["type"] == "permission.asked":
        properties |= {
            "permission": asked.permission,
            "patterns": asked.patterns,
            "metadata": asked.metadata,
            "always": asked.always,
        }
        if asked.tool is None:
            del properties["tool"]
    elif part.get("type") == "tool" and asked.tool is not None:
        part["tool"] = asked.tool
        if asked.untold and part["state"]["status"] != "completed":
            part["state"] = {"status": "pending", "input": {}, "raw": ""}
        elif part["state"]["status"] != "pending":
            part["state"]["input"] = asked.input
    return orjson.dumps(event)
