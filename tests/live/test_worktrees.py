"""Worktrees and workspaces, and what is not deleted with them: real git, a real OpenCode."""

import asyncio
import subprocess
from collections.abc import AsyncGenerator, Generator
from pathlib import Path
from typing import Any

import httpx2
import orjson
import pytest

from opencode_a2a.events import JsonObject
from opencode_a2a.opencode.managed import USERNAME
from tests.conftest import ASKING, UNTRACKED, Stages
from tests.support.backstage import Backstage, script
from tests.support.caller import Caller
from tests.support.service import serving, settings_for

pytestmark = pytest.mark.live

TOKENS = {"ann": "ann-" + "a" * 28, "bob": "bob-" + "b" * 28}
CREDENTIALS = [
    {
        "scheme": "bearer",
        "principal": name,
        "token": token,
        "capabilities": ["workspace_mutation"],
    }
    for name, token in TOKENS.items()
]
CALLERS = {
    "A2A_ENABLE_WORKSPACE_MUTATIONS": "true",
    "A2A_STATIC_AUTH_CREDENTIALS": orjson.dumps(CREDENTIALS).decode(),
}


@pytest.fixture
async def people(backstage: Backstage, tmp_path: Path) -> AsyncGenerator[tuple[Caller, Caller]]:
    """Two callers who may both change workspaces."""
    async with serving(settings_for(backstage, tmp_path / "state", **CALLERS)) as running:
        yield Caller(running, token=TOKENS["ann"]), Caller(running, token=TOKENS["bob"])


@pytest.fixture
def ann(people: tuple[Caller, Caller]) -> Caller:
    return people[0]


@pytest.fixture
def bob(people: tuple[Caller, Caller]) -> Caller:
    return people[1]


def git(directory: Path, *arguments: str) -> str:
    identity = ["-c", "user.name=Test", "-c", "user.email=test@example.org"]
    command = ["git", *identity, *arguments]
    return subprocess.run(command, cwd=directory, check=True, capture_output=True, text=True).stdout  # noqa: S603


def named(directory: Path, **more: bool) -> JsonObject:
    return {"request": {"directory": str(directory), **more}}


def opencode(backstage: Backstage) -> httpx2.AsyncClient:
    """Return a client for OpenCode itself."""
    auth = (USERNAME, backstage.password)
    return httpx2.AsyncClient(base_url=backstage.url, auth=auth, timeout=30, trust_env=False)


async def make(caller: Caller, backstage: Backstage) -> Path:
    """Make a worktree, and wait for its files."""
    async with (
        asyncio.timeout(60),
        opencode(backstage) as http,
        http.stream("GET", "/global/event") as events,
    ):
        made = await caller.method("opencode.worktrees.create", {"request": {"name": "mine"}})
        directory: str = made["item"]["directory"]
        async for line in events.aiter_lines():
            if "worktree.ready" in line and directory in line:
                break
    return Path(directory)


async def visit(backstage: Backstage, directory: Path) -> list[str]:
    """Have OpenCode look at a directory; return what it calls worktrees from then on."""
    async with opencode(backstage) as http:
        await http.get("/session", params={"directory": str(directory)})
        place = {"directory": str(backstage.workspace)}
        return (await http.get("/experimental/worktree", params=place)).json()


async def test_an_ordinary_clone_is_never_taken_for_a_worktree(
    ann: Caller, backstage: Backstage, tmp_path: Path
) -> None:
    clone = tmp_path / "clone"
    git(tmp_path, "clone", "-q", str(backstage.workspace), str(clone))
    (clone / "work.txt").write_text("a day's work\n")
    assert str(clone) in await visit(backstage, clone)

    listed = await ann.method("opencode.worktrees.list")
    refused = [
        await ann.refused("opencode.worktrees.remove", named(clone)),
        await ann.refused("opencode.worktrees.remove", named(clone, force=True)),
        await ann.refused("opencode.worktrees.reset", named(clone)),
    ]

    assert str(clone) not in listed["items"]
    assert {one.fields for one in refused} == {("request.directory",)}
    assert (clone / "work.txt").read_text() == "a day's work\n"


async def test_a_worktree_with_changes_is_removed_by_force_only(
    ann: Caller, backstage: Backstage
) -> None:
    worktree = await make(ann, backstage)
    (worktree / "work.txt").write_text("a day's work\n")

    refused = await ann.refused("opencode.worktrees.remove", named(worktree))

    assert refused.fields == ("request.directory",)
    assert (worktree / "work.txt").exists()
    assert await ann.method("opencode.worktrees.remove", named(worktree, force=True)) == {
        "ok": True
    }
    assert not worktree.exists()


async def test_a_worktree_with_commits_of_its_own_is_removed_by_force_only(
    ann: Caller, backstage: Backstage
) -> None:
    worktree = await make(ann, backstage)
    (worktree / "work.txt").write_text("a day's work\n")
    git(worktree, "add", "-A")
    git(worktree, "commit", "-q", "-m", "Work")

    refused = await ann.refused("opencode.worktrees.remove", named(worktree))
    git(worktree, "branch", "kept")
    removed = await ann.method("opencode.worktrees.remove", named(worktree))

    assert refused.fields == ("request.directory",)
    assert removed == {"ok": True}
    assert not worktree.exists()
    assert git(backstage.workspace, "show", "kept:work.txt") == "a day's work\n"
    git(backstage.workspace, "branch", "-D", "kept")


async def test_a_worktree_of_another_caller_does_not_exist(
    ann: Caller, bob: Caller, backstage: Backstage
) -> None:
    worktree = await make(ann, backstage)

    listed = await bob.method("opencode.worktrees.list")
    for method in ("opencode.worktrees.remove", "opencode.worktrees.reset"):
        foreign = await bob.answer(method, named(worktree))
        missing = await bob.answer(method, named(worktree.parent / "none"))
        assert foreign == missing

    assert str(worktree) not in listed["items"]
    assert worktree.exists()
    assert str(worktree) in (await ann.method("opencode.worktrees.list"))["items"]
    assert await ann.method("opencode.worktrees.remove", named(worktree)) == {"ok": True}


# Workspaces


@pytest.fixture(scope="module")
def with_workspaces(stages: Stages) -> Generator[Backstage]:
    """An OpenCode with workspaces switched on."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OPENCODE_EXPERIMENTAL_WORKSPACES", "1")
        with stages("project", {**ASKING, **UNTRACKED}) as running:
            yield running


def at(workspace_id: str) -> JsonObject:
    return {"metadata": {"opencode": {"workspace": {"id": workspace_id}}}}


async def test_a_workspace_of_another_caller_does_not_exist(
    with_workspaces: Backstage, tmp_path: Path
) -> None:
    async with serving(settings_for(with_workspaces, tmp_path, **CALLERS)) as running:
        ann, bob = Caller(running, token=TOKENS["ann"]), Caller(running, token=TOKENS["bob"])
        made = await ann.method("opencode.workspaces.create", {"request": {"type": "worktree"}})
        workspace_id = made["item"]["id"]
        mine: JsonObject = {"workspace_id": workspace_id}

        assert await bob.method("opencode.workspaces.list") == {"items": []}
        assert await bob.method("opencode.worktrees.list") == {"items": []}
        assert await bob.method("opencode.workspaces.remove", mine) == {"item": None}
        listing = await bob.refused("opencode.files.list", at(workspace_id))
        sending = await bob.answer("SendMessage", message(at(workspace_id)))
        own = await ann.method("SendMessage", message(at(workspace_id)))
        (directory,) = (await ann.method("opencode.worktrees.list"))["items"]
        (Path(directory) / "work.txt").write_text("a day's work\n")
        refused = await ann.refused("opencode.workspaces.remove", mine)
        removed = await ann.method("opencode.workspaces.remove", {**mine, "force": True})

    assert listing.fields == ("metadata.opencode.workspace.id",)
    assert sending["error"]["code"] == -32602
    assert own["task"]["status"]["state"] == "TASK_STATE_COMPLETED"
    assert refused.fields == ("workspace_id",)
    assert removed["item"]["id"] == workspace_id


def message(place: JsonObject) -> Any:
    text = script({"say": "here"})
    sent = {"messageId": "m", "role": "ROLE_USER", "parts": [{"text": text}]}
    return {"message": sent, **place}


async def test_making_a_workspace_names_the_flag_that_opencode_lacks(ann: Caller) -> None:
    params: JsonObject = {"request": {"type": "worktree"}}

    answer = await ann.answer("opencode.workspaces.create", params)

    assert answer["error"]["code"] == -31003
    assert "OPENCODE_EXPERIMENTAL_WORKSPACES=1" in answer["error"]["message"]
