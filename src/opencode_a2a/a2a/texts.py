"""What a person reads when a task waits for an answer.

``render`` puts this text into the status message of an input-required task, so that a client
that knows nothing of our metadata can show it and send the answer back as a plain message.
"""

import orjson

from opencode_a2a.a2a.types import timestamp
from opencode_a2a.events import Interrupted, Json
from opencode_a2a.turns.answers import accepted

_LONGEST = 4000
_TITLES = {
    "bash": "run a command",
    "edit": "change a file",
    "write": "write a file",
    "read": "read a file",
    "external_directory": "use files outside of its directory",
    "webfetch": "fetch a web page",
    "task": "start a sub-agent",
    "doom_loop": "repeat the same tool call once more",
}
_SHOWN = {"command": "Command", "url": "URL", "diff": "Change", "description": "Purpose"}


def interrupt_text(pending: tuple[Interrupted, ...]) -> str:
    """Describe everything that waits for an answer, and how to give it."""
    if len(pending) == 1:
        return _describe(pending[0])
    head = (
        f"{len(pending)} requests wait for an answer; "
        "begin your message with the id of the one that you answer."
    )
    return "\n\n".join([head, *(f"{one.request_id}:\n{_describe(one)}" for one in pending)])


def _describe(asked: Interrupted) -> str:
    if asked.type == "permission":
        name = asked.permission or asked.tool or "something"
        lines = [f"OpenCode asks for permission to {_TITLES.get(name, f'use {name}')} ({name})."]
        shown = [(label, asked.metadata.get(key)) for key, label in _SHOWN.items()]
        lines += [_block(label, value) for label, value in shown if value]
        if asked.patterns and asked.patterns != ["*"]:
            lines.append("For: " + _short(", ".join(asked.patterns)))
        if asked.tool_input and not any(value for _, value in shown):
            lines.append(_block(f"Input of {asked.tool or name}", asked.tool_input))
        if asked.always and asked.allows_always:
            lines.append("Always would mean: " + _short(", ".join(asked.always)))
    else:
        many = len(asked.questions) > 1
        lines = [f"OpenCode asks {len(asked.questions)} questions." if many else "OpenCode asks:"]
        for number, question in enumerate(asked.questions, 1):
            label = f"Question {number}: " if many else ""
            lines.append(f"{label}{question.question or question.header}")
            for place, option in enumerate(question.options, 1):
                detail = f" - {option.description}" if option.description else ""
                lines.append(f"  {place}. {option.label}{detail}")
    lines += ["", accepted(asked)]
    if asked.expires_at is not None:
        then = asked.default or "the request is rejected"
        lines.append(f"If nobody answers by {timestamp(asked.expires_at)}, {then}.")
    return "\n".join(lines)


def _block(label: str, value: Json) -> str:
    text = value if isinstance(value, str) else orjson.dumps(value).decode()
    indented = "\n".join(f"    {line}" for line in _short(text).splitlines())
    return f"{label}:\n{indented}"


def _short(text: str) -> str:
    if len(text) <= _LONGEST:
        return text
    return f"{text[:_LONGEST]}\n[{len(text) - _LONGEST} more characters, see the metadata]"
