"""Where the files are that a request is about."""

from dataclasses import replace
from pathlib import Path

import pytest

from opencode_a2a.events import Interrupted, Json, JsonObject, PatchedFile
from opencode_a2a.ids import RequestId, SessionId
from opencode_a2a.turns.files import changes, looked_up


def asked(directory: str | None, metadata: JsonObject, given: JsonObject) -> Interrupted:
    return Interrupted(
        RequestId("per_1"),
        "permission",
        SessionId("ses_1"),
        permission="edit",
        metadata=metadata,
        tool="edit",
        tool_input=given,
        directory=directory,
    )


def seen(request: Interrupted) -> Interrupted:
    return looked_up(replace(request, changes=changes(request)))


def links(request: Interrupted) -> dict[str, str]:
    return seen(request).links


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A workspace that is itself reached by a link, with links in it."""
    real, outside = tmp_path / "real", tmp_path / "outside"
    for one in (real / "src", outside):
        one.mkdir(parents=True)
    (real / "src" / "a.py").touch()
    (real / "b.py").symlink_to("src/a.py")
    (real / "out").symlink_to(outside)
    (real / "loop").symlink_to("loop")
    made = tmp_path / "workspace"
    made.symlink_to(real)
    return made


def test_links_are_followed_to_the_file(root: Path) -> None:
    outside = str(root.parent / "outside")

    def leads(*paths: str) -> list[str | None]:
        found = links(asked(str(root), {}, {"filePath": paths[0]}))
        return [found.get(path) for path in paths]

    assert leads(f"{root}/src/a.py") == leads("src/a.py") == leads("new/x.py") == [None]
    assert leads("b.py") == [f"{root.resolve()}/src/a.py"]
    assert leads(f"{root}/out/new/x.py") == [f"{outside}/new/x.py"]
    assert leads("out/../src/a.py") == [None]  # as OpenCode reads it
    assert leads("/etc/../etc/no-such-file") == [None]
    assert leads("src/\0") == leads("\ud800") == leads("a" * 5000) == [None]


def test_every_path_of_a_request_is_looked_at(root: Path) -> None:
    out = f"{root}/out"
    files: list[Json] = [{"filePath": f"{out}/1", "movePath": f"{out}/2"}, 5]
    record: JsonObject = {"filepath": "a list of names", "files": files}

    found = links(asked(str(root), record, {"path": "out", "workdir": f"{out}/3", "x": out}))

    assert [*found] == [f"{out}/1", f"{out}/2", "out", f"{out}/3"]
    assert [*links(asked(str(root), {"filepath": out}, {}))] == [out]
    assert links(asked("/no/such/directory", {"filepath": out}, {})) == {}
    assert links(asked(None, {"filepath": out}, {})) == {}


PATCH = "\n".join(
    [
        "*** Begin Patch",
        "*** Update File: src/a.py",
        "@@",
        "-x",
        "+*** Delete File: not/a/head.py",
        "*** Update File: b.py",
        "*** Move to: out/old.py",
        "*** Add File: src/a.py",
        "+new",
        "*** Delete File: out/x.py",
        "*** End Patch",
    ]
)


@pytest.mark.requirement("I24")
def test_every_file_of_a_patch_is_named_with_what_happens_to_it(root: Path) -> None:
    (root / "out" / "old.py").touch()
    told: list[Json] = [
        {"file": "src/a.py", "status": "modified"},
        {"file": "out/old.py", "status": "modified"},
        {"file": "src/more.py", "status": "added"},
    ]

    request = asked(str(root), {"files": told}, {"patchText": PATCH})

    assert seen(request).changes == [
        PatchedFile("change", "src/a.py"),
        PatchedFile("move", "b.py", "out/old.py", replaces=True),
        PatchedFile("add", "src/a.py", replaces=True),
        PatchedFile("delete", "out/x.py"),
        PatchedFile("add", "src/more.py", replaces=False),  # OpenCode names it, and the patch not
    ]
    assert [*links(request)] == ["out/old.py", "b.py", "out/x.py"]
    elsewhere = replace(request, directory="/no/such/directory")
    assert {one.replaces for one in seen(elsewhere).changes} == {None}


def test_the_record_tells_what_happens_where_the_patch_is_not_known(root: Path) -> None:
    told: list[Json] = [
        {"filePath": "/w/a", "type": "update"},
        {"filePath": "/w/b", "type": "move", "movePath": "/w/c"},
        {"filePath": "/w/d", "type": "delete"},
        {"file": "e", "status": "deleted"},
        {"file": "f", "status": 7},
    ]

    assert changes(asked(str(root), {"files": told}, {})) == [
        PatchedFile("change", "/w/a"),
        PatchedFile("move", "/w/b", "/w/c"),
        PatchedFile("delete", "/w/d"),
        PatchedFile("delete", "e"),
        PatchedFile("change", "f"),
    ]
