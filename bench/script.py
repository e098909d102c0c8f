"""A recorded OpenCode turn as a template, and the script that a prompt asks for.

``bench.upstream`` plays these steps for many sessions at once. The steps *are* the recording
``plain-text`` with its ids, times and texts made variable, so that order and keys of the events
cannot drift from what OpenCode sends. Nothing here knows sockets.
"""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import orjson

RECORDINGS = Path(__file__).parent.parent / "tests" / "transcripts" / "1.18.33"

Fields = dict[bytes, bytes]
Kind = Literal["session", "message", "part", "status", "other"]


@dataclass(frozen=True, slots=True)
class Script:
    """What a prompt such as ``bench deltas=200 interval=5 size=24`` asks of the model."""

    deltas: int = 4
    interval: float = 0.0
    """Milliseconds between two deltas; 0 sends all of them at once."""
    size: int = 24
    """Characters of a delta, stamp included."""

    @staticmethod
    def parse(prompt: str) -> "Script":
        found = dict(re.findall(r"(deltas|interval|size)=([\d.]+)", prompt))
        return Script(
            int(found.get("deltas", 4)),
            float(found.get("interval", 0)),
            int(found.get("size", 24)),
        )

    @property
    def prompt(self) -> str:
        return f"bench deltas={self.deltas} interval={self.interval} size={self.size}"


@dataclass(frozen=True, slots=True)
class Step:
    """One recorded event: its frames on both streams, and what it changes in the stored state."""

    kind: Kind
    frame: bytes
    """The ``data:`` line on ``/event``."""
    wide: bytes
    """The ``data:`` lines on ``/global/event``, with the sync copy when there was one."""
    key: bytes = b""
    """The id of the message or part that the fragment is stored under."""
    fragment: bytes = b""
    role: str = ""
    status: str = ""


@dataclass(frozen=True, slots=True)
class Recording:
    created: Step
    head: tuple[Step, ...]
    delta: Step
    tail: tuple[Step, ...]

    @staticmethod
    def load(directory: Path = RECORDINGS) -> "Recording":
        plain = _lines(directory / "plain-text.jsonl")[1:]
        wide = _lines(directory / "plain-text-global.jsonl")[1:]
        steps = _Template(plain).steps(wide)
        deltas = [i for i, event in enumerate(plain) if event["type"] == "message.part.delta"]
        return Recording(
            created=steps[0],
            head=tuple(steps[1 : deltas[0]]),
            delta=steps[deltas[0]],
            tail=tuple(steps[deltas[-1] + 1 :]),
        )


def _lines(path: Path) -> list[dict[str, Any]]:
    events = [orjson.loads(line) for line in path.read_bytes().splitlines()]
    for event in events:
        del event["_t"]
    return events


class _Template:
    """Replaces what varies in the recorded events by ``%(name)b`` fields."""

    def __init__(self, plain: list[dict[str, Any]]) -> None:
        self.plain = plain
        infos = [e["properties"]["info"] for e in plain if e["type"] == "message.updated"]
        parts = [e["properties"]["part"] for e in plain if e["type"] == "message.part.updated"]
        self.roles = {info["id"]: info["role"] for info in infos}
        self.part_ids = list(dict.fromkeys(part["id"] for part in parts))
        texts = [(self.roles[p["messageID"]], p["text"]) for p in parts if p.get("text")]
        self.texts = {
            plain[0]["properties"]["info"]["title"]: "title",
            next(text for role, text in texts if role == "user"): "ask",
            next(text for role, text in texts if role == "assistant"): "text",
        }

    def steps(self, wide: list[dict[str, Any]]) -> list[Step]:
        by_id: dict[str, bytes] = {}
        for event in wide:
            line = b"data: " + self.render(event) + b"\n\n"
            by_id[event["payload"]["id"]] = by_id.get(event["payload"]["id"], b"") + line
        return [self.step(event, by_id[event["id"]]) for event in self.plain]

    def step(self, event: dict[str, Any], wide: bytes) -> Step:
        frame = b"data: " + self.render(event) + b"\n\n"
        properties = event["properties"]
        match event["type"]:
            case "session.created" | "session.updated":
                return Step("session", frame, wide, fragment=self.render(properties["info"]))
            case "message.updated":
                info = properties["info"]
                return Step(
                    "message",
                    frame,
                    wide,
                    self.fields(info["id"]),
                    self.render(info),
                    role=info["role"],
                )
            case "message.part.updated":
                part = properties["part"]
                role = self.roles[part["messageID"]]
                return Step(
                    "part", frame, wide, self.fields(part["id"]), self.render(part), role=role
                )
            case "session.status":
                return Step("status", frame, wide, status=properties["status"]["type"])
            case _:
                return Step("other", frame, wide)

    def render(self, value: dict[str, Any]) -> bytes:
        return self.fields(orjson.dumps(value).decode().replace("%", "%%"))

    def fields(self, json: str) -> bytes:
        for text, name in self.texts.items():
            json = json.replace(orjson.dumps(text).decode(), f"%({name})b")
        json = re.sub(r'"delta":"[^"]*"', '"delta":"%(delta)b"', json)
        json = re.sub(r"evt_\w+", "%(evt)b", json)
        json = re.sub(r"ses_\w+", "%(session)b", json)
        json = re.sub(r"msg_\w+", lambda m: f"%({self.roles[m[0]]})b", json)
        json = re.sub(r"prt_\w+", lambda m: f"%(part{self.part_ids.index(m[0])})b", json)
        return re.sub(r"\b1794722\d{6}\b", "%(now)b", json).encode()
