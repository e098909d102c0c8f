"""Checks on git worktrees: whether a directory is one, and what would be lost with it.

OpenCode removes any directory of a project that it ever visited, even an ordinary clone with
unsaved work, and reports success. So it is told to remove a directory only after a check on the
disk. Where that is impossible, because OpenCode runs on another machine, nothing is removed.
"""

import asyncio
import os
from contextlib import suppress
from pathlib import Path

GIT_SECONDS = 30.0
_GIT_ENVIRONMENT = {"GIT_OPTIONAL_LOCKS": "0", "GIT_TERMINAL_PROMPT": "0", "LC_ALL": "C"}


def is_worktree(directory: str, project: str) -> bool | None:
    """Whether a directory is a git worktree of a project's repository; None if it is not here."""
    if not Path(directory).is_dir() or not Path(project).is_dir():
        return None
    git, main = _git_directory(Path(directory)), _git_directory(Path(project))
    if git is None or main is None or (Path(directory) / ".git").is_dir():
        return False
    # All worktrees of a repository share one git directory, which records where each of them is. A
    # copy of a worktree is not recorded there.
    shared = Path(os.path.realpath(main / (_first_line(main / "commondir") or ".")))
    back = _first_line(git / "gitdir") or ""
    return (
        git.parent == shared / "worktrees"
        and Path(os.path.realpath(git / back)) == Path(os.path.realpath(directory)) / ".git"
    )


def _git_directory(directory: Path) -> Path | None:
    """Return the git directory of a working tree."""
    entry = directory / ".git"
    if entry.is_dir():
        return Path(os.path.realpath(entry))
    line = _first_line(entry) or ""
    if not line.startswith("gitdir: "):
        return None
    return Path(os.path.realpath(directory / line.removeprefix("gitdir: ")))


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
    """Run git without our environment, which holds secrets that its configuration could leak."""
    known = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}
    command = ("git", "-c", "core.fsmonitor=false", "-C", directory, *arguments)
    process = await asyncio.create_subprocess_exec(
        *command,
        env=known | _GIT_ENVIRONMENT,
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
