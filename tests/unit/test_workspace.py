"""Which directories a caller may name."""

from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from opencode_a2a.errors import InvalidParamsError
from opencode_a2a.turns.sessions import WorkspaceRoot

FIELD = "metadata.opencode.directory"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A workspace with a folder, a file, and links that lead in and out of it."""
    root = tmp_path / "root"
    (root / "inside" / "deep").mkdir(parents=True)
    (root / "file").touch()
    (tmp_path / "root-other").mkdir()
    (root / "out").symlink_to(tmp_path / "root-other")
    (root / "in").symlink_to(root / "inside")
    (root / "loop").symlink_to(root / "loop")
    return root


@pytest.mark.parametrize(
    ("named", "meant"),
    [
        (None, ""),
        ("", ""),
        (" ", ""),
        (".", ""),
        ("inside", "inside"),
        ("inside/../inside/deep/", "inside/deep"),
        ("in", "inside"),
    ],
)
def test_a_directory_inside_is_found_by_its_real_path(
    root: Path, named: str | None, meant: str
) -> None:
    workspace = WorkspaceRoot(root, allow_override=True)

    assert workspace.directory(named, FIELD) == str(root / meant)


def test_an_absolute_path_inside_is_accepted(root: Path) -> None:
    workspace = WorkspaceRoot(root, allow_override=True)

    assert workspace.directory(str(root / "inside"), FIELD) == str(root / "inside")


@pytest.mark.parametrize(
    "named", ["..", "/", "/etc", "out", "out/..", "../root-other", "file", "none", "loop", "a\0b"]
)
def test_whatever_leads_out_or_nowhere_is_refused(root: Path, named: str) -> None:
    with pytest.raises(InvalidParamsError) as refused:
        WorkspaceRoot(root, allow_override=True).directory(named, FIELD)

    assert refused.value.violations[0].field == FIELD
    assert str(root) not in refused.value.message


def test_a_root_that_is_a_link_is_the_directory_it_means(root: Path, tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to(root)

    workspace = WorkspaceRoot(link, allow_override=True)

    assert workspace.root == str(root)
    assert workspace.directory(str(link / "inside"), FIELD) == str(root / "inside")


def test_only_the_root_may_be_named_where_choosing_is_switched_off(root: Path) -> None:
    workspace = WorkspaceRoot(root, allow_override=False)

    assert workspace.directory(str(root), FIELD) == str(root)
    with pytest.raises(InvalidParamsError):
        workspace.directory("inside", FIELD)


def test_without_a_root_nothing_can_be_chosen() -> None:
    workspace = WorkspaceRoot(None, allow_override=True)

    assert workspace.directory(None, FIELD) is None
    assert workspace.holds("/anywhere")
    with pytest.raises(InvalidParamsError):
        workspace.directory("inside", FIELD)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.sampled_from(["..", ".", "inside", "deep", "out", "in", "/", "none"])))
def test_no_path_whatever_leads_out(root: Path, steps: list[str]) -> None:
    workspace = WorkspaceRoot(root, allow_override=True)

    try:
        found = workspace.directory("/".join(steps), FIELD)
    except InvalidParamsError:
        return
    assert found is not None
    assert Path(found).resolve().is_relative_to(root)
