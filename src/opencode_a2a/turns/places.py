"""Workspaces and worktrees: whose they are, and what would be lost with one.

OpenCode removes any directory of a project that it ever visited, an ordinary clone with unsaved
work included, and says that it went well. So a directory is handed to it only after a look at the
disk. Where that cannot be done, because OpenCode runs on another machine, nothing is removed.
"""

import asyncio
import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from sqlalchemy.engine import Connection

from opencode_a2a.ids import Principal
from opencode_a2a.store import places
from opencode_a2a.store.database import Database

GIT_SECONDS = 30.0
_QUIET = {"GIT_OPTIONAL_LOCKS": "0", "GIT_TERMINAL_PROMPT": "0", "LC_ALL": "C"}


class Places:
    """The owners of workspaces (by id) and worktrees (by directory) that callers made."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def own(self, principal: Principal, *names: str) -> None:
        def write(connection: Connection) -> None:
            places.own(connection, principal, names)

        await self._database.write(write)

    async def visible(self, principal: Principal, names: Iterable[str]) -> list[str]:
        """Return those that the caller may know of: their own, and those that nobody made here."""
        asked = [*names]

        def read(connection: Connection) -> set[str]:
            return places.strangers(connection, principal, asked)

        hidden = await self._database.read(read) if asked else set[str]()
        return [name for name in asked if name not in hidden]

    async def forget(self, *names: str) -> None:
        def write(connection: Connection) -> None:
            places.forget(connection, names)

        await self._database.write(write)


def is_worktree(directory: str, project: str) -> bool | None:
    """Whether a directory is a git worktree of a project's repository; None if it is not here."""
    if not Path(directory).is_dir() or not Path(project).is_dir():
        return None
    git, main = _git_directory(Path(directory)), _git_directory(Path(project))
    if git is None or main is None or (Path(directory) / ".git").is_dir():
        return False
    # git keeps the way back as well: a copy of a worktree has none.
    back = _first_line(git / "gitdir") or ""
    return (
        git.parent == _shared(main) / "worktrees"
        and Path(os.path.realpath(git / back)) == Path(os.path.realpath(directory)) / ".git"
    )


def _git_directory(directory: Path) -> Path | None:
    """Return where git keeps what it knows of a working tree."""
    entry = directory / ".git"
    if entry.is_dir():
        return Path(os.path.realpath(entry))
    line = _first_line(entry) or ""
    if not line.startswith("gitdir: "):
        return None
    return Path(os.path.realpath(directory / line.removeprefix("gitdir: ")))


def _shared(git: Path) -> Path:
    """Return what all worktrees of a repository have in common."""
    return Path(os.path.realpath(git / (_first_line(git / "commondir") or ".")))


def _first_line(file: Path) -> str | None:
    with suppress(OSError, UnicodeDecodeError):
        return file.read_text()[:4096].partition("\n")[0]
    return None


async def unsaved(directory: str) -> str | None:
    """Return what would be lost with a worktree and its branch, or None if nothing would be."""
    try:
        if await _git(directory, "status", "--porcelain", "--untracked-files=normal"):
            return "has changes that are not committed"
        branch = await _git(directory, "branch", "--show-current")
        others = [f"--exclude={branch}"] if branch else []
        elsewhere = ["--not", *others, "--branches", "--remotes", "--tags"]
        if await _git(directory, "rev-list", "--max-count=1", "HEAD", *elsewhere):
            return "has commits that are on no other branch"
    except (OSError, TimeoutError):
        return "cannot be checked for changes: git fails there"
    return None


async def _git(directory: str, *arguments: str) -> str:
    """Run git, with nothing in its environment that its configuration could give away."""
    known = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}
    process = await asyncio.create_subprocess_exec(
        *("git", "-c", "core.fsmonitor=false", "-C", directory, *arguments),
        env=known | _QUIET,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
    )
    try:
        async with asyncio.timeout(GIT_SECONDS):
            output, _ = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if process.returncode:
        raise OSError(f"git ended with status {process.returncode}")
    return output.decode(errors="replace").strip()
