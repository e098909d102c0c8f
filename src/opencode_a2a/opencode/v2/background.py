"""The work that a session of OpenCode 2 has in the background: commands and sub-agents.

A tool call that puts work there is completed at once, and its state in the store stays as it was.
When the work ends, OpenCode gives the session a message that reports it, and asks the model again.
Pure.
"""

import re
from collections.abc import Mapping, Sequence

from opencode_a2a.events import JsonObject
from opencode_a2a.opencode.types import MessageWithParts, TextPart, ToolCompleted, ToolPart
from opencode_a2a.opencode.v2.messages import OURS


def work_left(messages: Sequence[MessageWithParts]) -> dict[str, str]:
    """Return the work that messages have put there, and whose end none of them reports.

    It is given by the ids of its commands or sessions, with those of its tool calls.
    """
    left = dict[str, str]()
    for part in (part for message in messages for part in message.parts):
        match part:
            case ToolPart(state=ToolCompleted(metadata=metadata)):
                if work := left_in_background(part.tool, metadata):
                    left[work] = part.call_id
            case TextPart(synthetic=True):
                left = unreported(left, part.text)
            case _:
                pass
    return left


def left_in_background(tool: str, metadata: JsonObject | None) -> str | None:
    """Return the command or session that a completed call has put into the background, if any.

    ``tool`` is its name in either generation, and empty if that was not heard. A command that has
    ended tells how; previews have no ``status``.
    """
    match OURS.get(tool, tool), metadata:
        case _, {"exit": _} | {"timeout": True}:
            return None
        case "bash" | "", {"shellID": str(work)}:
            return work
        case "task" | "", {"status": "running", "sessionID": str(work)}:
            return work
        case _:
            return None


def unreported(background: Mapping[str, str], report: str) -> dict[str, str]:
    """Return what is left of the work in the background after a message that reports its end.

    The report of a command names the call, that of a sub-agent its session. Some providers give
    calls of several steps the same id; then a report is for the earliest.
    """
    left = dict(background)
    for work, call in background.items():
        named = re.compile(rf"(?<![\w-])({re.escape(work)}|{re.escape(call)})(?![\w-])")
        if named.search(report):
            del left[work]
            report = named.sub("", report, count=1)
    return left
