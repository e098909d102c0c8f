"""Whose data a managed OpenCode would find: the two generations must not share a database.

By reports, OpenCode 2 rewrites the database of OpenCode 1, which then fails. ``opencode.managed``
asks here before it starts a program. Previews of OpenCode 2 keep to a database of their own.
"""

import sqlite3
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import Final

import orjson

from opencode_a2a.jsonguard import as_object, text_in
from opencode_a2a.opencode.kinds import Found, Kind, of_version

_OF_2: Final = frozenset({"session_pending", "session_inbox", "instruction_state"})
_OF_1: Final = frozenset({"todo", "session_input"})
"""Tables that only one of the generations has."""


def database_of(variables: Mapping[str, str]) -> Path:
    """Return the database that OpenCode uses in an environment."""
    share = Path(variables.get("HOME") or Path.home(), ".local", "share")
    return Path(variables.get("XDG_DATA_HOME") or share, "opencode", "opencode.db")


def owner_of(database: Path) -> Kind | None:
    """Return which generation has written a database; None if there is none, or it does not tell.

    Blocks for a moment.
    """
    if not database.is_file():
        return None
    try:
        with closing(sqlite3.connect(f"{database.as_uri()}?mode=ro", uri=True)) as opened:
            found = opened.execute("SELECT name FROM sqlite_master WHERE type = 'table'")
            tables = {name for (name,) in found}
    except sqlite3.Error:
        return None
    if tables & _OF_2:
        return Kind.V2
    return Kind.V1 if tables & _OF_1 else None


def packaged(executable: str) -> Found | None:
    """Return what a program is by the npm package that it is in; None if that does not tell."""
    for place in [*Path(executable).resolve().parents][1:4]:
        try:
            package = as_object(orjson.loads((place / "package.json").read_bytes()))
        except (OSError, orjson.JSONDecodeError):
            continue
        name, version = text_in(package, "name") or "", text_in(package, "version") or ""
        if name == "opencode-ai" or name.startswith("opencode-"):
            return of_version(version)
        if name.startswith(("@opencode-ai/cli", "@opencode/cli")):
            return Found(Kind.V2, version)
    return None


def conflict(owner: Kind, program: Found, database: Path) -> str | None:
    """Return why a program must not be started on a database; None if it may."""
    preview = program.version is None or program.version.startswith("0.0.0")
    if preview or not program.usable or owner is program.kind:
        return None
    theirs, other = ("1", "2") if owner is Kind.V1 else ("2", "1")
    return (
        f"{database} belongs to OpenCode {theirs}, and OpenCode {other} would spoil it or fail on "
        "it; set XDG_DATA_HOME to another directory, or move the file away"
    )
