"""Which directories are worktrees of a project, by what real git leaves on the disk."""

import shutil
import subprocess
from pathlib import Path

import pytest

from opencode_a2a.extensions.worktrees import is_worktree, unsaved
from tests.conftest import make_repository


def git(directory: Path, *arguments: str) -> None:
    identity = ["-c", "user.name=Test", "-c", "user.email=test@example.org"]
    subprocess.run(["git", *identity, *arguments], cwd=directory, check=True)  # noqa: S603, S607


@pytest.fixture
def project(tmp_path: Path) -> Path:
    directory = tmp_path / "project"
    directory.mkdir()
    make_repository(directory)
    return directory


@pytest.fixture
def worktree(project: Path, tmp_path: Path) -> Path:
    git(project, "worktree", "add", "-q", "-b", "own", str(tmp_path / "worktree"))
    return tmp_path / "worktree"


def worktree_of(directory: Path, project: Path) -> bool | None:
    return is_worktree(str(directory), str(project))


def test_a_worktree_is_known_from_the_project_and_from_its_other_worktrees(
    project: Path, worktree: Path, tmp_path: Path
) -> None:
    git(project, "worktree", "add", "-q", "-b", "other", str(tmp_path / "other"))
    (tmp_path / "link").symlink_to(worktree)

    assert worktree_of(worktree, project) is True
    assert worktree_of(worktree, tmp_path / "other") is True
    assert worktree_of(tmp_path / "link", project) is True


def test_nothing_else_is_a_worktree(project: Path, worktree: Path, tmp_path: Path) -> None:
    git(tmp_path, "clone", "-q", str(project), "clone")
    git(tmp_path / "clone", "worktree", "add", "-q", "-b", "b", str(tmp_path / "of-the-clone"))
    git(tmp_path, "clone", "-q", f"--separate-git-dir={tmp_path / 'git'}", str(project), "apart")
    shutil.copytree(worktree, tmp_path / "copy")
    (tmp_path / "plain").mkdir()
    (tmp_path / "odd").mkdir()
    (tmp_path / "odd" / ".git").write_bytes(b"\xff\xfe")
    (worktree / "below").mkdir()

    for name in ("project", "clone", "of-the-clone", "apart", "copy", "plain", "odd"):
        assert worktree_of(tmp_path / name, project) is False, name
    assert worktree_of(worktree / "below", project) is False
    assert worktree_of(worktree, tmp_path / "plain") is False


def test_what_is_not_on_this_machine_is_unknown(project: Path, worktree: Path) -> None:
    nowhere = Path("/nowhere/at/all")

    assert worktree_of(nowhere, project) is None
    assert worktree_of(worktree, nowhere) is None


async def test_what_would_be_lost_is_worktree_of(project: Path, worktree: Path) -> None:
    assert await unsaved(str(worktree)) is None

    (worktree / "new.txt").write_text("new\n")
    assert await unsaved(str(worktree)) == "has changes that are not committed"
    git(worktree, "add", "-A")
    git(worktree, "commit", "-q", "-m", "New")
    assert await unsaved(str(worktree)) == "has commits that are on no other branch"
    git(worktree, "checkout", "-q", "--detach")
    git(project, "branch", "-q", "-D", "own")
    assert await unsaved(str(worktree)) == "has commits that are on no other branch"
    git(worktree, "tag", "kept")
    assert await unsaved(str(worktree)) is None


async def test_a_worktree_that_git_cannot_read_is_not_taken_for_clean(tmp_path: Path) -> None:
    assert await unsaved(str(tmp_path)) == "cannot be checked for changes: git fails there"
