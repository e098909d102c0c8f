"""Where the files are that a request is about.

OpenCode follows symbolic links, and names the link alone. A person who approves has to know where
it leads, as far as this machine has the same files as OpenCode.
"""

import os
from collections.abc import Iterator
from pathlib import Path

from opencode_a2a.events import Interrupted, Json


def links(asked: Interrupted) -> dict[str, str]:
    """Return the real paths of the files that a request names by a symbolic link.

    It looks at the file system, which may take long: call it in a thread.
    """
    root = asked.directory
    found: dict[str, str] = {}
    if root is None or not Path(root).is_dir():  # it is on another machine
        return found
    for path in _named(asked):
        try:
            # As OpenCode does it: first ".." goes, then links are followed.
            whole = Path(os.path.normpath(Path(root) / path))
            real = os.path.realpath(whole)
            inside = whole.is_relative_to(root)
            plain = Path(os.path.realpath(root)) / whole.relative_to(root) if inside else whole
        except (OSError, ValueError):  # there is no such name
            continue
        if real != str(plain):
            found[path] = real
    return found


def _named(asked: Interrupted) -> Iterator[str]:
    """Yield the paths of the record, and those of the tool call."""
    files = asked.metadata.get("files")
    told = [one for one in files if isinstance(one, dict)] if isinstance(files, list) else []
    given = asked.tool_input or {}
    values: list[Json] = [
        asked.metadata.get("filepath") if not told else None,  # else it is a list of names
        *(one.get(name) for one in told for name in ("filePath", "movePath")),
        *(given.get(name) for name in ("filePath", "path", "workdir")),
    ]
    yield from dict.fromkeys(one for one in values if isinstance(one, str) and one)
