"""The text that asks a person for an answer.

``render`` puts it into the status message of an input-required task, so that a client that does not
know our metadata can show it and send the answer as a plain message. What would be approved comes
from OpenCode's record of the request first, and whatever the agent wrote is indented, so that none
of its lines can be mistaken for one of ours.
"""

import re
from collections.abc import Iterable, Iterator

import orjson

from opencode_a2a.a2a.types import timestamp
from opencode_a2a.events import Interrupted, Json, JsonObject, PatchedFile
from opencode_a2a.printable import visible, visible_line
from opencode_a2a.turns.answers import accepted, groups, in_program, wider_grant
from opencode_a2a.turns.shell import BLANKS, can_be_wider, command_line

TITLES = {
    "bash": "run a command",
    "edit": "change a file",
    "write": "write a file",
    "read": "read a file",
    "external_directory": "use files outside of its directory",
    "webfetch": "fetch a web page",
    "task": "start a sub-agent",
    "doom_loop": "repeat the same tool call once more",
}
"""What OpenCode's own permissions are for."""
_SHOWN = {"command": "Command", "url": "URL", "diff": "Change"}
_HEAD = re.compile(r"Index: (.+)\n=+\n--- \1\t?\n\+\+\+ \1\t?\n(?=@@ )")
"""The head of a patch as OpenCode makes it, which names the file three times."""
_IN_DIFF = {"filePath", "replaceAll"}
"""Fields of the tools that change files, whose effect the patch shows."""
_LINES_IN_DIFF = {"oldString", "newString", "content"}
"""The same, if the patch has each of their lines: OpenCode takes common indentation away."""
_SAYING = {"bash", "shell", "task"}
"""Tools whose ``description`` is what the agent says about the call."""


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
        use = visible_line(asked.permission or asked.tool or "something")
        repeated = f", {times} times" if times > 1 else ""
        action = TITLES.get(use, f"use {use}")
        lines = [f"{name}OpenCode asks for permission to {action} ({use}){repeated}."]
        lines += _permission(asked)
    elif asked.type == "plan":
        lines = [f"{name}OpenCode asks whether to carry out the plan. Nothing was changed so far."]
    else:
        many = len(asked.questions) > 1
        asks = f"asks {len(asked.questions)} questions." if many else "asks:"
        lines = [f"{name}OpenCode {asks}"]
        for number, question in enumerate(asked.questions, 1):
            label = f"Question {number}: " if many else "  "
            lines.append(label + _hanging(question.question or question.header))
            for place, option in enumerate(question.options, 1):
                detail = f" - {option.description}" if option.description else ""
                lines.append(f"  {place}. {_hanging(option.label + detail)}")
    if asked.origin is not None:
        lines.append(_block("Asked by the sub-agent", visible_line(asked.origin)))
    lines += ["", accepted(asked)]
    if first.expires_at is not None:
        then = asked.default or "the request is rejected"
        lines.append(f"If nobody answers by {timestamp(first.expires_at)}, {then}.")
    return "\n".join(lines)


def _permission(asked: Interrupted) -> Iterator[str]:
    """Yield what would be allowed, all of it."""
    record, given = asked.metadata, asked.tool_input or {}
    if command_line(asked) is not None and "command" not in record:
        record = {**record, "command": given["command"]}  # 2.x has it in the input alone
    if asked.changes:
        yield "\n".join(["Files:", *(f"    {_change(one)}" for one in asked.changes)])
    for key, label in _SHOWN.items():
        value = record.get(key)
        if key == "diff" and isinstance(value, str) and (head := _head(value, record)):
            yield _block(f"Change of {visible_line(_short(head[1], asked))}", value[head.end() :])
        elif value:
            yield _block(label, value)
    yield from _links(asked)
    rest = [(key, value) for key, value in record.items() if key not in {*_SHOWN, "description"}]
    match record:
        case {"files": [*files]} if files and asked.changes:
            rest = [one for one in rest if one[0] not in {"files", "filepath"}]
            rest += [("file", one) for one in files if not _is_named(one)]
        case {"diff": str(patch), "files": [*files]} if patch:
            rest = [one for one in rest if one[0] not in {"files", "filepath"}]
            told = (one for one in files if isinstance(one, dict))
            rest += [("file", {k: v for k, v in one.items() if k != "patch"}) for one in told]
        case {"diff": str(patch)} if patch:
            rest = [one for one in rest if one[0] != "filepath"]  # the patch begins with it
        case _:
            pass
    if rest:
        yield _fields("OpenCode's record", rest)
    yield from _sent(asked, record)
    said = given.get("description") if asked.tool in _SAYING else None
    if words := record.get("description") or said:
        yield _block("The agent says", words)
    if asked.allows_always and asked.always:
        yield _block("Always would mean", ", ".join(map(visible_line, asked.always)))
    if can_be_wider(asked):
        allowed, has_room = wider_grant(asked)
        if not has_room:
            yield _block('"yes for this task" would mean', allowed)


def _links(asked: Interrupted) -> Iterator[str]:
    """Yield where files really are that the request names by a symbolic link."""
    for path, real in asked.links.items():
        yield f"A symbolic link leads from {visible_line(path)} to {visible_line(real)}"
    if asked.links_unknown:
        yield "Where these files really are could not be found out."


def _sent(asked: Interrupted, record: JsonObject) -> Iterator[str]:
    """Yield what the record does not tell: patterns, and the rest of the input of the call."""
    given = asked.tool_input or {}
    command = (command_line(asked) or "").strip(BLANKS)
    told = [record.get("url"), given.get("filePath")]
    told += [path for one in asked.changes for path in (one.path, one.to)]
    if not asked.patterns:
        yield "What this is for could not be read: look at it in OpenCode before you allow it."
    elif asked.patterns != ["*"] and (
        more := [one for one in asked.patterns if one not in told and one.strip(BLANKS) != command]
    ):
        yield "For: " + ", ".join(map(visible_line, more))
    covered = {key.lower(): value for key, value in record.items()}
    patch = record.get("diff")
    lines = {line[1:] for line in patch.split("\n")} if isinstance(patch, str) else set[str]()
    rest = [
        (key, value)
        for key, value in given.items()
        if covered.get(key.lower()) != value
        and not (patch and key in _IN_DIFF)
        and not (patch and key in _LINES_IN_DIFF and _all_in(lines, value))
        and not (key == "description" and asked.tool in _SAYING)
    ]
    if asked.call_id is not None and asked.tool_input is None:
        yield "The input of this call is not known: OpenCode did not tell it."
    if in_program(asked):
        yield (
            "The arguments of this call are not known: OpenCode tells only the program that makes "
            "it, and that may make it with any arguments."
        )
    if rest:
        yield _fields(
            f"Input of {visible_line(asked.tool or asked.permission or 'the tool')}", rest
        )


def _is_named(file: Json) -> bool:
    return isinstance(file, dict) and bool({"file", "filePath"} & file.keys())


def _change(change: PatchedFile) -> str:
    """Return what a patch does to a file; one that OpenCode calls new may be there already."""
    path = visible_line(change.path)
    match change:
        case PatchedFile(kind="delete"):
            return f"deletes {path}"
        case PatchedFile(kind="change"):
            return f"changes {path}"
        case PatchedFile(kind="add", replaces=False):
            return f"adds {path}"
        case PatchedFile(kind="add", replaces=True):
            return f"replaces {path}, which exists"
        case PatchedFile(kind="add"):
            return f"writes {path}, whether it exists or not"
        case PatchedFile(to=to) if to == change.path:
            return f"moves {path} to itself, which OpenCode does by deleting it"
        case PatchedFile(to=to, replaces=replaces):
            where = "" if replaces is False else ", which exists and is replaced"
            if replaces is None:
                where = ", whether that exists or not"
            return f"moves {path} to {visible_line(to or '')}{where}"


def _all_in(lines: set[str], value: Json) -> bool:
    """Whether a text is in these lines; it may begin and end within one."""
    if not isinstance(value, str):
        return False
    first, *rest = value.split("\n")
    ends = (first, *rest[-1:])
    return lines.issuperset(rest[:-1]) and all(any(end in one for one in lines) for end in ends)


def _short(path: str, asked: Interrupted) -> str:
    """Return a path without the directory of the session, if the file is really in there."""
    root = (asked.directory or "").rstrip("/")
    rest = path.removeprefix(f"{root}/")
    steps = rest.split("/")
    if not root or rest == path or path in asked.links or steps[0].startswith("~"):
        return path
    return path if {"", ".", ".."} & {*steps} else rest


def _head(patch: str, record: JsonObject) -> re.Match[str] | None:
    """Return the head of a patch; a path of several lines could be made to look like another."""
    return None if "\n" in str(record.get("filepath")) else _HEAD.match(patch)


def _hanging(text: str) -> str:
    return visible(text).strip().replace("\n", "\n    ")


def _fields(label: str, fields: Iterable[tuple[str, Json]]) -> str:
    shown = (f"    {visible_line(key)}: {_text(value, 8)}" for key, value in fields)
    return "\n".join([f"{label}:", *shown])


def _block(label: str, value: Json) -> str:
    return f"{label}:\n    {_text(value, 4)}"


def _text(value: Json, indent: int) -> str:
    text = value if isinstance(value, str) else orjson.dumps(value).decode()
    return visible(text).removesuffix("\n").replace("\n", "\n" + " " * indent)
