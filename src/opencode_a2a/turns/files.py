"""Which files a request is about, what happens to them, and where they are.

OpenCode follows symbolic links, and names the link alone. Its record of a patch calls a file new
that is overwritten, and, on 2.x, names of a file that is moved only where it goes to. A person who
approves has to know more, as far as the call tells it and this machine has the same files.
"""

import os
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Final, Literal

from opencode_a2a.events import Interrupted, Json, JsonObject, PatchedFile

Kind = Literal["add", "change", "delete", "move"]

_HEAD: Final = re.compile(r"\s*\*\*\* (Add File|Update File|Delete File|Move to):(.*)")
"""A line of a patch, as the model sends it, that says what happens to a file."""
_SENT: Final[dict[str, Kind]] = {
    "Add File": "add",
    "Update File": "change",
    "Delete File": "delete",
}
_RECORDED: Final[dict[str, Kind]] = {
    **dict.fromkeys(("add", "added"), "add"),
    **dict.fromkeys(("delete", "deleted"), "delete"),
    "move": "move",
}
"""The kinds in OpenCode's record, by its ``type`` (1.x) or ``status`` (2.x)."""


def changes(asked: Interrupted) -> list[PatchedFile]:
    """Return what a patch does to each of its files: by the patch itself, then by the record."""
    found: list[PatchedFile] = []
    sent = (asked.tool_input or {}).get("patchText")
    for line in sent.split("\n") if isinstance(sent, str) else ():
        head = _HEAD.match(line)
        if head is None:
            continue
        name, path = head[1], head[2].strip()
        if name != "Move to":
            found.append(PatchedFile(_SENT[name], path))
        elif found:
            found[-1] = replace(found[-1], kind="move", to=path)
    named = {_whole(asked, path) for one in found for path in (one.path, one.to) if path}
    for file in _recorded(asked):
        match file:
            case {"filePath": str(path)} | {"file": str(path)} if _whole(asked, path) not in named:
                kind = _RECORDED.get(str(file.get("type", file.get("status"))), "change")
                to = file.get("movePath")
                found.append(PatchedFile(kind, path, to if isinstance(to, str) else None))
            case _:
                pass
    return found


def looked_up(asked: Interrupted) -> Interrupted:
    """Return a request with what the file system tells about its files.

    That may take long: call it in a thread.
    """
    if asked.directory is None or not Path(asked.directory).is_dir():  # it is on another machine
        return asked
    seen = [
        replace(one, replaces=os.path.lexists(_whole(asked, one.to or one.path)))
        if one.kind in ("add", "move")
        else one
        for one in asked.changes
    ]
    return replace(asked, links=_links(asked, asked.directory), changes=seen)


def _links(asked: Interrupted, root: str) -> dict[str, str]:
    """Return the real paths of the files that a request names by a symbolic link."""
    found: dict[str, str] = {}
    seen: set[str] = set()
    for path in _named(asked):
        whole = Path(_whole(asked, path))
        if str(whole) in seen:
            continue
        seen.add(str(whole))
        try:
            real = os.path.realpath(whole)
            inside = whole.is_relative_to(root)
            plain = Path(os.path.realpath(root)) / whole.relative_to(root) if inside else whole
        except (OSError, ValueError):  # there is no such name
            continue
        if real != str(plain):
            found[path] = real
    return found


def _whole(asked: Interrupted, path: str) -> str:
    """Return a whole path as OpenCode makes it: ".." goes before links are followed."""
    return os.path.normpath(os.path.join(asked.directory or "", path))


def _named(asked: Interrupted) -> Iterator[str]:
    """Yield the paths of the record, of the tool call, and of the patch in it."""
    told, given = _recorded(asked), asked.tool_input or {}
    values: list[Json] = [
        asked.metadata.get("filepath") if not told else None,  # else it is a list of names
        *(one.get(name) for one in told for name in ("filePath", "movePath", "file")),
        *(given.get(name) for name in ("filePath", "path", "workdir")),
        *(path for one in asked.changes for path in (one.path, one.to)),
    ]
    yield from dict.fromkeys(one for one in values if isinstance(one, str) and one)


def _recorded(asked: Interrupted) -> list[JsonObject]:
    """Return OpenCode's record of each file."""
    files = asked.metadata.get("files")
    return [one for one in files if isinstance(one, dict)] if isinstance(files, list) else []
