"""An OpenCode that asks for whatever a test wants approved, in the form of OpenCode 1.x."""

from dataclasses import dataclass, field
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


class AskingOpenCode(FakeOpenCode):
    """Asks for the request that a prompt names, and goes on when it is answered."""

    def __init__(self, workspace: Path, requests: dict[str, Request]) -> None:
        super().__init__(workspace)
        self._requests = requests

    def played(self, prompt: JsonObject) -> list[tuple[bytes, bytes]]:
        parts: Any = prompt["parts"]
        asked = self._requests[parts[0]["text"]]
        return [(kind, _asking(frame, asked)) for kind, frame in recorded("permission-once")]


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
        if part["state"]["status"] != "pending":
            part["state"]["input"] = asked.input
    return orjson.dumps(event)
