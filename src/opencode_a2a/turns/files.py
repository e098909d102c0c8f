"""Which files a request is about, what happens to them, and where they are.

OpenCode follows symbolic links, and names the link alone. Its record of a patch calls a file new
that is overwritten, and, on 2.x, names of a file that is moved only where it goes to. A person who
approves has to know more, as far as the call tells it and this machine has the same files.
Its parsers of patches differ, and both take some that say one thing and do another.
"""

import errno
import os
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from stat import S_ISDIR
from typing import Final, Literal

from opencode_a2a.events import Interrupted, Json, JsonObject, PatchedFile
from opencode_a2a.printable import visible_line

Kind = Literal["add", "change", "delete", "move"]

_HEAD: Final = re.compile(r"\*\*\* (Add|Update|Delete) File: *(.*)")
"""A line of a patch, as the model sends it, that says what happens to a file."""
_TRIMMED: Final = (
    "\t\n\v\f\r \u00a0\u1680\u2000\u2001\u2002\u2003\u2004\u2005\u2006\u2007\u2008\u2009\u200a"
    "\u2028\u2029\u202f\u205f\u3000\ufeff"
)
"""What ``trim`` of JavaScript takes from a line. ``strip`` of Python takes others: \\x1c, \\x85."""
_MOVES: Final = "*** Move to:"
_INDEX: Final = re.compile(r"Index: (/.*)\n")
"""The first line of the change that OpenCode makes of a patch to a file."""
_KINDS: Final[dict[str, Kind]] = {
    **dict.fromkeys(("Add", "add", "added"), "add"),
    **dict.fromkeys(("Delete", "delete", "deleted"), "delete"),
    "move": "move",
}
"""The kinds in a patch, and in OpenCode's record by its ``type`` (1.x) or ``status`` (2.x)."""
_NO_SUCH_NAME: Final = frozenset({errno.ENOENT, errno.ENOTDIR, errno.ENAMETOOLONG, errno.ELOOP})
"""The errors which say that there is no file by a name."""


def changes(asked: Interrupted) -> list[PatchedFile]:
    """Return what a patch does to each of its files.

    OpenCode's record decides. That of 2.x does not tell a move: there the patch itself is read, and
    counts if it says the same as the record otherwise.
    """
    told = [one for file in _recorded(asked) if (one := _by_record(asked, file)) is not None]
    sent = (asked.tool_input or {}).get("patchText")
    if not isinstance(sent, str) or any("filePath" in file for file in _recorded(asked)):
        return told
    read = _by_patch(sent)
    kinds = [[_as_recorded(one) for one in listed] for listed in (read, told)]
    return read if not told or kinds[0] == kinds[1] else told


def _as_recorded(change: PatchedFile) -> Kind:
    return "change" if change.kind == "move" else change.kind


def _by_record(asked: Interrupted, file: JsonObject) -> PatchedFile | None:
    match file:
        case {"filePath": str(path)}:
            kind = _KINDS.get(str(file.get("type")), "change")
            to = file.get("movePath")
            return PatchedFile(
                kind, _short(asked, path), _short(asked, to) if isinstance(to, str) else None
            )
        case {"file": str(path)}:  # below the root of the project, which is not known here
            kind = _KINDS.get(str(file.get("status")), "change")
            index = _INDEX.match(str(file.get("patch")))
            if index is None:
                return PatchedFile(kind, path)
            if index[1].endswith(f"/{path}"):
                return PatchedFile(kind, _short(asked, index[1]))
            return PatchedFile("move", _short(asked, index[1]), path)
        case _:
            return None


def _by_patch(sent: str) -> list[PatchedFile]:
    """Read a patch as OpenCode 2 does."""
    found: list[PatchedFile] = []
    before: re.Match[str] | None = None
    for line in sent.split("\n"):
        head = _HEAD.match(line.strip(_TRIMMED))
        if line.startswith(" ") and found and found[-1].kind in ("change", "move"):
            head = None  # a line of the file
        if head is not None:
            found.append(PatchedFile(_KINDS.get(head[1], "change"), head[2]))
        elif before is not None and before[1] == "Update" and line.startswith(_MOVES):
            to = line.removeprefix(_MOVES).strip(_TRIMMED)
            same = os.path.normpath(to) == os.path.normpath(found[-1].path)
            found[-1] = replace(found[-1], kind="move", to=found[-1].path if same else to)
        before = head
    return found


def _short(asked: Interrupted, path: str) -> str:
    """Return a whole path without the directory of the session, if it is in there."""
    root = f"{(asked.directory or '').rstrip('/')}/"
    return path.removeprefix(root) if len(root) > 1 else path


def are_named(asked: Interrupted) -> bool:
    """Whether a request names files."""
    return next(_named(asked), None) is not None


def looked_up(asked: Interrupted) -> Interrupted:
    """Return a request with what the file system tells about its files.

    That may hang: call it in a thread that nothing waits for.
    """
    try:
        # Not ``Path.is_dir``, which says no of one that cannot be looked at, from Python 3.14 on.
        if asked.directory is None or not S_ISDIR(os.stat(asked.directory).st_mode):
            return asked  # it is on another machine
    except ValueError:
        return asked
    except OSError as error:  # such as one that this user may not read
        return asked if error.errno in _NO_SUCH_NAME else replace(asked, links_unknown=True)
    seen = [
        replace(one, replaces=_exists(_whole(asked, one.to or one.path)))
        if one.kind in ("add", "move")
        else one
        for one in asked.changes
    ]
    links, unknown = _links(asked, asked.directory)
    return replace(asked, links=links, links_unknown=unknown, changes=seen)


def differences(shown: Interrupted, now: Interrupted) -> list[str]:
    """Say what has changed about the files of a request since it was shown."""
    said: list[str] = []
    for path, real in now.links.items():
        if shown.links.get(path) != real:
            said.append(f"{visible_line(path)} now leads to {visible_line(real)}")
    for path, real in shown.links.items():
        if path not in now.links:
            said.append(f"{visible_line(path)} no longer leads to {visible_line(real)}")
    if now.links_unknown and not shown.links_unknown:
        said.append("where its files really are cannot be found out")
    for before, after in zip(shown.changes, now.changes, strict=True):
        if before != after:
            name = visible_line(after.to or after.path)
            there = {True: "exists", False: "does not exist", None: "may exist or not"}
            said.append(f"{name} {there[after.replaces]} now")
    return said or ["where its files really are is known now"]


def _exists(path: str) -> bool | None:
    """Whether there is something by a name, if only a link; None if that cannot be told."""
    try:
        os.lstat(path)
    except OSError as error:
        return False if error.errno in _NO_SUCH_NAME else None
    except ValueError:
        return False
    return True


def _links(asked: Interrupted, root: str) -> tuple[dict[str, str], bool]:
    """Return the real paths of the files that a request names by a symbolic link.

    And whether some could not be found out.
    """
    found: dict[str, str] = {}
    seen: set[str] = set()
    unknown = False
    for path in _named(asked):
        whole = Path(_whole(asked, path))
        if str(whole) in seen:
            continue
        seen.add(str(whole))
        try:
            real = os.path.realpath(whole)
            inside = whole.is_relative_to(root)
            plain = Path(os.path.realpath(root)) / whole.relative_to(root) if inside else whole
        except ValueError:  # there is no such name
            continue
        except OSError:
            unknown = True
            continue
        if real != str(plain):
            found[path] = real
        unknown = unknown or _exists(real) is None  # a step that cannot be read counts as no link
    return found, unknown


def _whole(asked: Interrupted, path: str) -> str:
    """Return a whole path as OpenCode makes it: ".." goes before links are followed."""
    return os.path.normpath(os.path.join(asked.directory or "", path))


def _named(asked: Interrupted) -> Iterator[str]:
    """Yield the paths of the record, of the tool call, and of the patch in it."""
    told, given = _recorded(asked), asked.tool_input or {}
    values: list[Json] = [
        asked.metadata.get("filepath") if not told else None,  # else it is a list of names
        *(listed if isinstance(listed := asked.metadata.get("directories"), list) else ()),
        *(one.get(name) for one in told for name in ("filePath", "movePath")),
        *(given.get(name) for name in ("filePath", "path", "workdir")),
        *(path for one in asked.changes for path in (one.path, one.to)),
    ]
    yield from dict.fromkeys(one for one in values if isinstance(one, str) and one)


def _recorded(asked: Interrupted) -> list[JsonObject]:
    """Return OpenCode's record of each file."""
    files = asked.metadata.get("files")
    return [one for one in files if isinstance(one, dict)] if isinstance(files, list) else []
