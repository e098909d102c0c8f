"""The official command line, `a2a`, which prints what it received as JSON.

Shown is what the agent says to the state of the task; else its last artifact, in a stream the one
that was told of last. The program is built by
``go install github.com/a2aproject/a2a-cli@8dd9249`` and put on the path as `a2a`.

usage: python official_cli.py URL TOKEN {card,rest,jsonrpc} {blocking,streaming}
"""

import asyncio
import json
import sys
from collections.abc import Iterator
from typing import Any

from talk import Say, converse

url, token, by, delivery = sys.argv[1:]
OPTIONS = ["--auth", f"Bearer {token}", "--output", "json", "--timeout", "60s"]
OPTIONS += [] if by == "card" else ["--transport", by]
OPTIONS += ["--stream"] if delivery == "streaming" else []


async def begin() -> Say:
    task: dict[str, Any] = {}

    async def say(text: str) -> str:
        nonlocal task
        on = ["--context", task["contextId"]] if task else []
        if task and task["status"]["state"] == "TASK_STATE_INPUT_REQUIRED":
            on += ["--task", task["id"]]
        process = await asyncio.create_subprocess_exec(
            "a2a", "send", url, text, *OPTIONS, *on,
            stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
        )  # fmt: skip
        out, complaint = await process.communicate()
        if process.returncode != 0:
            raise RuntimeError(complaint.decode())
        last = -1
        for event in documents(out.decode()):
            if "statusUpdate" in event:
                task["status"] = event["statusUpdate"]["status"]
            elif "artifactUpdate" in event:
                last = apply(task.setdefault("artifacts", []), event["artifactUpdate"])
            else:
                task = event.get("task", event)
        if message := task["status"].get("message"):
            return texts(message)
        return texts(task["artifacts"][last])

    return say


def documents(printed: str) -> Iterator[dict[str, Any]]:
    """Yield the JSON documents that were printed, one below the other."""
    decoder, at = json.JSONDecoder(), 0
    while at < len(printed):
        value, at = decoder.raw_decode(printed, at)
        yield value
        at += len(printed[at:]) - len(printed[at:].lstrip())


def apply(artifacts: list[dict[str, Any]], update: dict[str, Any]) -> int:
    """Add a piece of an artifact to those that are there, and return its place."""
    piece = update["artifact"]
    for place, known in enumerate(artifacts):
        if known["artifactId"] == piece["artifactId"]:
            parts = known["parts"] if update.get("append") else []
            known["parts"] = [*parts, *piece["parts"]]
            return place
    artifacts.append(piece)
    return len(artifacts) - 1


def texts(holder: dict[str, Any]) -> str:
    return "".join(part.get("text", "") for part in holder["parts"])


asyncio.run(converse(begin))
