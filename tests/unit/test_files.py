"""Where the files are that a request is about."""

import errno
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

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


def patch(*lines: str) -> str:
    return "\n".join(["*** Begin Patch", *lines, "*** End Patch"])


SENT = (
    *(" *** Delete File: out/x.py", "*** Update File: src/a.py", "@@", " *** Move to: b.py", "+x"),
    *("\t*** Update File: b.py", "*** Move to: out/old.py", "@@", "+*** Delete File: c.py"),
    *("*** Add File: src/a.py", "+new", "*** Update File: c.py", "*** Move to: ./c.py"),
)
TOLD: list[Json] = [
    {"file": "w/out/x.py", "status": "deleted"},
    {"file": "w/src/a.py", "status": "modified"},
    {"file": "w/out/old.py", "status": "modified"},
    {"file": "w/src/a.py", "status": "added"},
    {"file": "w/c.py", "status": "modified"},
]


@pytest.mark.requirement("I24")
def test_every_file_of_a_patch_is_named_with_what_happens_to_it(root: Path) -> None:
    (root / "out" / "old.py").touch()

    request = asked(str(root), {"files": TOLD}, {"patchText": patch(*SENT)})

    assert seen(request).changes == [
        PatchedFile("delete", "out/x.py"),
        PatchedFile("change", "src/a.py"),
        PatchedFile("move", "b.py", "out/old.py", replaces=True),
        PatchedFile("add", "src/a.py", replaces=True),
        PatchedFile("move", "c.py", "c.py", replaces=False),
    ]
    assert [*links(request)] == ["out/x.py", "b.py", "out/old.py"]
    elsewhere = replace(request, directory="/no/such/directory")
    assert {one.replaces for one in seen(elsewhere).changes} == {None}


@pytest.mark.requirement("I24")
def test_the_record_decides_where_the_patch_says_something_else() -> None:
    sent: JsonObject = {"patchText": patch("*** Delete File: x", "*** Update File: b.py")}
    first: list[Json] = [
        {"filePath": "/w/b.py", "type": "update"},
        {"filePath": "/w/c", "type": "move", "movePath": "/w/d"},
        {"filePath": "/else/e", "type": "add"},
    ]
    second: list[Json] = [
        {"file": "b.py", "status": "modified", "patch": "Index: /w/b.py\n===\n"},
        {"file": "d", "status": "modified", "patch": "Index: /w/c\n===\n"},
        {"file": "e", "status": 7},
        {"name": "f"},
    ]

    assert changes(asked("/w", {"files": first}, sent)) == [
        PatchedFile("change", "b.py"),
        PatchedFile("move", "c", "d"),
        PatchedFile("add", "/else/e"),
    ]
    assert changes(asked("/w", {"files": second}, sent)) == [
        PatchedFile("change", "b.py"),
        PatchedFile("move", "c", "d"),
        PatchedFile("change", "e"),
    ]
    assert changes(asked("/w", {}, {})) == []


@pytest.mark.requirement("I24")
@pytest.mark.parametrize("kept", ["\x1c", "\x1f", "\x85"])
def test_a_name_in_a_patch_ends_where_javascript_ends_it(root: Path, kept: str) -> None:
    (root / "out" / f"a{kept}").touch()
    lines = (
        f"*** Add File: out/a{kept}",
        f"*** Update File: b\n*** Move to: out/a{kept}\ufeff\u00a0 ",
    )

    found = seen(asked(str(root), {}, {"patchText": patch(*lines)}))

    assert found.changes == [
        PatchedFile("add", f"out/a{kept}", replaces=True),
        PatchedFile("move", "b", f"out/a{kept}", replaces=True),
    ]
    assert [*found.links] == [f"out/a{kept}"]


@pytest.mark.requirement("I24")
@pytest.mark.parametrize("unreadable", ["", "src", "src/b.py"])
def test_what_cannot_be_read_is_not_taken_for_what_is_not_there(
    root: Path, monkeypatch: pytest.MonkeyPatch, unreadable: str
) -> None:
    given: JsonObject = {"patchText": patch("*** Add File: src/b.py")}
    request = asked(str(root), {}, given)
    readable = seen(request)
    whole, stat, lstat = str(root.resolve()), os.stat, os.lstat
    blocked = f"{whole}/{unreadable}".rstrip("/")

    def refuse(path: Any, **more: Any) -> os.stat_result:
        if f"{path}/".replace(str(root), whole).startswith(f"{blocked}/"):
            raise PermissionError(errno.EACCES, "denied")
        return (stat if more else lstat)(path, **more)

    monkeypatch.setattr(os, "lstat", refuse)
    if not unreadable:
        monkeypatch.setattr(os, "stat", refuse)
    found = seen(request)

    assert (readable.links_unknown, found.links_unknown) == (False, True)
    assert [one.replaces for one in readable.changes] == [False]
    assert [one.replaces for one in found.changes] == [None]
