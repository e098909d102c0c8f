"""What a person is shown of a patch, and what it then does, on both generations of OpenCode.

OpenCode has a tool for patches with some models only, which it knows by their name.
"""

from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import Stages
from tests.live.conftest import EVERYTHING_ASKED, Serve
from tests.support.backstage import Backstage, script
from tests.support.caller import Caller

pytestmark = [pytest.mark.live, pytest.mark.both_drivers, pytest.mark.requirement("I24")]

DONE = {"say": "done"}


@pytest.fixture(scope="session")
def patching_backstage(stages: Stages) -> Generator[Backstage]:
    with stages("patching", {**EVERYTHING_ASKED, "model": "demo/gpt-5-demo"}) as running:
        yield running


@pytest.fixture
async def person(patching_backstage: Backstage, serve: Serve) -> Caller:
    return Caller(await serve(patching_backstage))


@pytest.fixture
def workspace(patching_backstage: Backstage) -> Path:
    found = patching_backstage.workspace
    (found / "old").mkdir(exist_ok=True)
    (found / "app.py").write_text("a = 1\nb = 2\n")
    (found / "old" / "app.py.bak").write_text("precious\n")
    return found


@pytest.fixture
def patch(driver: str) -> Any:
    def call(*lines: str) -> Any:
        sent = "\n".join(["*** Begin Patch", *lines, "*** End Patch"])
        tool = "patch" if driver == "opencode2" else "apply_patch"
        return script({"tool": tool, "input": {"patchText": sent}}, DONE)

    return call


async def test_a_file_that_is_moved_over_another_is_told_as_that(
    person: Caller, workspace: Path, patch: Any
) -> None:
    heads = ("*** Update File: app.py", "*** Move to: old/app.py.bak")

    asked = await person.send(patch(*heads, "@@", " a = 1"))
    done = await person.send("yes", task=asked.id)

    said = asked.said.splitlines()
    assert "    moves app.py to old/app.py.bak, which exists and is replaced" in said
    assert "        *** Move to: old/app.py.bak" in said
    assert asked.interrupt["details"]["changes"] == [
        {"kind": "move", "path": "app.py", "to": "old/app.py.bak", "replaces": True}
    ]
    assert done.state == "completed"
    assert not (workspace / "app.py").exists()
    assert (workspace / "old" / "app.py.bak").read_text() == "a = 1\nb = 2\n"


async def test_a_file_that_is_moved_to_itself_is_told_to_be_deleted(
    person: Caller, workspace: Path, patch: Any
) -> None:
    heads = ("*** Update File: app.py", "*** Move to: ./app.py")

    asked = await person.send(patch(*heads, "@@", "-a = 1", "+a = 2"))
    done = await person.send("yes", task=asked.id)

    told = "moves app.py to itself, which OpenCode does by deleting it"
    assert (asked.said.splitlines()[2].strip(), done.state) == (told, "completed")
    assert not (workspace / "app.py").exists()


async def test_a_patch_that_looks_like_another_is_told_as_what_it_does(
    person: Caller, workspace: Path, patch: Any, driver: str
) -> None:
    lines = (" *** Delete File: app.py", "*** Update File: hello.txt", "@@", "-hello", "+bye")

    asked = await person.send(patch(*lines))
    done = await person.send("yes", task=asked.id)

    deletes = driver == "opencode2"  # for 1.x it is not the begin of a line
    told = ["    deletes app.py", "    changes hello.txt"] if deletes else ["    changes hello.txt"]
    assert asked.said.splitlines()[2 : 2 + len(told)] == told
    assert (done.state, (workspace / "app.py").exists()) == ("completed", not deletes)


async def test_a_file_that_is_overwritten_is_not_told_as_new(
    person: Caller, workspace: Path, patch: Any
) -> None:
    lines = (
        "*** Add File: app.py",
        "+    if a:",
        "+        evil()",
        "*** Add File: fresh.py",
        "+x",
    )

    asked = await person.send(patch(*lines))
    await person.send("yes", task=asked.id)

    said = asked.said.splitlines()
    assert said[1:4] == ["Files:", "    replaces app.py, which exists", "    adds fresh.py"]
    assert "        +        evil()" in said  # OpenCode's own change of it has less indentation
    assert "added" not in asked.said
    assert (workspace / "app.py").read_text() == "    if a:\n        evil()\n"
    (workspace / "fresh.py").unlink()


async def test_the_links_of_a_patch_are_followed(
    person: Caller, workspace: Path, patch: Any, tmp_path: Path
) -> None:
    (tmp_path / "far").mkdir()
    (tmp_path / "far" / "linked.txt").write_text("linked\n")
    (workspace / "out").symlink_to(tmp_path / "far")
    (workspace / "linked.txt").symlink_to(tmp_path / "far" / "linked.txt")

    said = [
        (await person.send(patch(*lines))).said
        for lines in (
            ("*** Add File: out/new.txt", "+x"),
            ("*** Update File: linked.txt", "@@", "-linked", "+x"),
            ("*** Delete File: linked.txt",),
            ("*** Update File: app.py", "*** Move to: out/app.py", "@@", "-a = 1", "+a = 2"),
        )
    ]
    for name in ("out", "linked.txt"):
        (workspace / name).unlink()

    names = ("new.txt", "linked.txt", "linked.txt", "app.py")
    for text, name in zip(said, names, strict=True):
        assert text.count("A symbolic link leads from ") == 1
        assert f" to {tmp_path}/far/{name}\n" in text
