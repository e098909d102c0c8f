"""Where the files are that a request is about."""

from pathlib import Path

import pytest

from opencode_a2a.events import Interrupted, Json, JsonObject
from opencode_a2a.ids import RequestId, SessionId
from opencode_a2a.turns.files import links


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
