"""The two lines and two bindings of A2A as a load generator needs them.

Builds requests, and folds what a server tells about one task into an ``Answer`` that knows
whether the text is complete, ordered and told once. Parses as little as that takes.
"""

import asyncio
import uuid
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import orjson

Dialect = Literal["rpc10", "rest10", "rpc03", "rest03"]
Call = tuple[str, str, bytes]
"""Method, path and body of a request."""

COMPLETED = ("TASK_STATE_COMPLETED", "completed")
OPEN = ("TASK_STATE_SUBMITTED", "TASK_STATE_WORKING", "submitted", "working")
_SEND = {
    ("rpc10", True): "SendStreamingMessage",
    ("rpc10", False): "SendMessage",
    ("rpc03", True): "message/stream",
    ("rpc03", False): "message/send",
    ("rest10", True): "/message:stream",
    ("rest10", False): "/message:send",
    ("rest03", True): "/v1/message:stream",
    ("rest03", False): "/v1/message:send",
}
_SUBSCRIBE = {"rpc10": "SubscribeToTask", "rpc03": "tasks/resubscribe"}


def headers(dialect: Dialect, token: str) -> bytes:
    version = b"a2a-version: 1.0\r\n" if dialect.endswith("10") else b""
    return version + f"authorization: Bearer {token}\r\naccept: */*\r\n".encode()


def send(dialect: Dialect, text: str, *, stream: bool, context: str | None = None) -> Call:
    message: dict[str, Any]
    if dialect == "rpc03":
        part = {"kind": "text", "text": text}
        message = {"kind": "message", "role": "user", "parts": [part]}
    else:
        parts = "content" if dialect == "rest03" else "parts"
        message = {"role": "ROLE_USER", parts: [{"text": text}]}
    message["messageId"] = str(uuid.uuid4())
    if context:
        message["contextId"] = context
    params: dict[str, Any] = {"message": message}
    if dialect == "rest03":
        params["configuration"] = {"blocking": True}
    return _call(dialect, _SEND[dialect, stream], params)


def subscribe(dialect: Dialect, task: str) -> Call:
    if dialect in _SUBSCRIBE:
        return _call(dialect, _SUBSCRIBE[dialect], {"id": task})
    prefix = "/v1" if dialect == "rest03" else ""
    return "POST", f"{prefix}/tasks/{task}:subscribe", b""


def _call(dialect: Dialect, name: str, params: dict[str, Any]) -> Call:
    if dialect.startswith("rest"):
        return "POST", name, orjson.dumps(params)
    body = {"jsonrpc": "2.0", "id": 1, "method": name, "params": params}
    return "POST", "/", orjson.dumps(body)


class RefusedError(Exception):
    """The server answered with an error."""


def unwrap(data: bytes) -> dict[str, Any]:
    value: dict[str, Any] = orjson.loads(data)
    if "error" in value:
        raise RefusedError(f"error {value['error']}"[:160])
    return value.get("result", value)


@dataclass(slots=True)
class Text:
    """Numbered, stamped deltas as they come out of the text of one artifact."""

    next: int = 0
    lost: int = 0
    doubled: int = 0
    rest: str = ""

    def feed(self, text: str) -> list[tuple[int, int]]:
        """Return number and stamp of the deltas that this text completes."""
        *tokens, self.rest = (self.rest + text).split(" ")
        found: list[tuple[int, int]] = []
        for token in tokens:
            number, _, stamp = token.partition(":")
            seq = int(number)
            if seq < self.next:
                self.doubled += 1
                continue
            self.lost += seq - self.next
            self.next = seq + 1
            found.append((seq, int(stamp.rstrip("."))))
        return found


@dataclass(slots=True)
class Answer:
    """What one reader was told about one task."""

    deltas: int
    """How many it must become."""
    task: str = ""
    context: str = ""
    state: str = ""
    refused: str = ""
    events: int = 0
    seen: int = 0
    texts: dict[str, Text] = field(default_factory=dict[str, Text])
    delays: list[int] = field(default_factory=list[int])
    milestone: Callable[["Answer"], bool] | None = None
    """What to wait for; once it holds, ``reached`` is set."""
    reached: asyncio.Event = field(default_factory=asyncio.Event)

    def take(self, data: bytes, now: int) -> None:
        self._take(data, now)
        if self.milestone and self.milestone(self):
            self.reached.set()

    def _take(self, data: bytes, now: int) -> None:
        self.events += 1
        try:
            event = unwrap(data)
        except RefusedError as error:
            self.refused = str(error)
            return
        kind = event.get("kind")
        name, value = (kind, event) if kind else next(iter(event.items()))
        match name:
            case "task":
                self.fold(value, now)
            case "artifactUpdate" | "artifact-update":
                self._artifact(value["artifact"], now, append=bool(value.get("append")))
            case "statusUpdate" | "status-update":
                self.state = value["status"]["state"]
            case _:
                self.refused = f"unexpected {name}"

    def fold(self, task: dict[str, Any], now: int) -> None:
        self.task, self.context = task["id"], task["contextId"]
        self.state = task["status"]["state"]
        for artifact in task.get("artifacts", ()):
            self._artifact(artifact, now, append=False)

    def _artifact(self, artifact: dict[str, Any], now: int, *, append: bool) -> None:
        text = "".join(part["text"] for part in artifact.get("parts", ()) if "text" in part)
        known = artifact["artifactId"]
        if not append or known not in self.texts:
            self.texts[known] = Text()
        self._told(self.texts[known], text, now)

    def close(self, now: int) -> None:
        """Take the end of each text as the end of its last delta: trimming a space is no fault."""
        for text in self.texts.values():
            self._told(text, " " if text.rest else "", now)

    def _told(self, known: Text, text: str, now: int) -> None:
        for seq, stamp in known.feed(text):
            if seq >= self.seen:  # an artifact that is sent anew repeats nothing to the reader
                self.seen = seq + 1
                self.delays.append(now - stamp)

    @property
    def fault(self) -> str | None:
        """What is wrong with the finished answer."""
        if self.refused:
            return self.refused
        if self.state in OPEN or not self.state:
            return "no final state"
        if self.state not in COMPLETED:
            return self.state
        told = Counter(lost=0, doubled=0)
        for text in self.texts.values():
            told.update(lost=text.lost, doubled=text.doubled, whole=text.next)
        if told["lost"] or told["whole"] < self.deltas:
            return "text lost"
        if told["doubled"] or told["whole"] > self.deltas:
            return "text doubled"
        return None
