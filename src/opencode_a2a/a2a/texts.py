"""The text that asks a person for an answer.

``render`` puts it into the status message of an input-required task, so that a client that does not
know our metadata can show it and send the answer as a plain message.
"""

import orjson

from opencode_a2a.a2a.types import timestamp
from opencode_a2a.events import Interrupted, Json
from opencode_a2a.turns.answers import accepted, groups

_LONGEST = 4000
"""Characters of a command, a patch or the like that are shown."""
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
    """Describe all pending requests, and how to answer them.

    Identical requests are shown once, with the number of the latest.
    """
    shown = groups(pending)
    if len(shown) == 1:
        return _describe(shown[0])
    numbers = [str(group[-1].number or group[-1].request_id) for group in shown]
    head = (
        f"{len(shown)} requests wait for an answer. Begin your message with the number of the one "
        f'that you answer, such as "{numbers[0]} yes"'
    )
    permissions = sum(group[0].type == "permission" for group in shown)
    head += '; "yes to all" allows all of these.' if permissions > 1 else "."
    return "\n\n".join([head, *map(_describe, shown)])


def _describe(group: tuple[Interrupted, ...]) -> str:
    first, asked, times = group[0], group[-1], len(group)
    name = f"Request {asked.number}: " if asked.number else f"{asked.request_id}: "
    if asked.type == "permission":
        use = asked.permission or asked.tool or "something"
        repeated = f", {times} times" if times > 1 else ""
        action = _TITLES.get(use, f"use {use}")
        lines = [f"{name}OpenCode asks for permission to {action} ({use}){repeated}."]
        shown = [(label, asked.metadata.get(key)) for key, label in _SHOWN.items()]
        lines += [_block(label, value) for label, value in shown if value]
        if asked.patterns and asked.patterns != ["*"]:
            lines.append("For: " + _short(", ".join(asked.patterns)))
        if asked.tool_input and not any(value for _, value in shown):
            lines.append(_block(f"Input of {asked.tool or use}", asked.tool_input))
        if asked.always and asked.allows_always:
            lines.append("Always would mean: " + _short(", ".join(asked.always)))
    elif asked.type == "plan":
        lines = [f"{name}OpenCode asks whether to carry out the plan. Nothing was changed so far."]
    else:
        many = len(asked.questions) > 1
        asks = f"asks {len(asked.questions)} questions." if many else "asks:"
        lines = [f"{name}OpenCode {asks}"]
        for number, question in enumerate(asked.questions, 1):
            label = f"Question {number}: " if many else ""
            lines.append(f"{label}{question.question or question.header}")
            for place, option in enumerate(question.options, 1):
                detail = f" - {option.description}" if option.description else ""
                lines.append(f"  {place}. {option.label}{detail}")
    lines += ["", accepted(asked)]
    if first.expires_at is not None:
        then = asked.default or "the request is rejected"
        lines.append(f"If nobody answers by {timestamp(first.expires_at)}, {then}.")
    return "\n".join(lines)


def _block(label: str, value: Json) -> str:
    text = value if isinstance(value, str) else orjson.dumps(value).decode()
    indented = "\n".join(f"    {line}" for line in _short(text).splitlines())
    return f"{label}:\n{indented}"


def _short(text: str) -> str:
    if len(text) <= _LONGEST:
        return text
    return f"{text[:_LONGEST]}\n[{len(text) - _LONGEST} more characters, see the metadata]"
