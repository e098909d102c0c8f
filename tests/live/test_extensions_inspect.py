"""Providers, workspaces, files and version control against a real OpenCode."""

import os
from collections.abc import AsyncGenerator
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from opencode_a2a.events import JsonObject
from tests.support.backstage import Backstage
from tests.support.caller import Caller
from tests.support.service import Running, serving, settings_for

pytestmark = pytest.mark.live


@pytest.fixture
def caller(service: Running) -> Caller:
    return Caller(service)


@pytest.fixture
async def operator(backstage: Backstage, tmp_path: Path) -> AsyncGenerator[Caller]:
    """A caller of a service that lets workspaces be changed."""
    settings = settings_for(backstage, tmp_path, A2A_ENABLE_WORKSPACE_MUTATIONS="true")
    async with serving(settings) as running:
        yield Caller(running)


async def test_providers_and_models_are_told_without_keys(caller: Caller) -> None:
    providers = await caller.method("opencode.providers.list", {"connected": True})
    models = await caller.method("opencode.models.list", {"provider_id": "demo"})

    assert providers == {
        "items": [
            {
                "provider_id": "demo",
                "name": "Demo model (scripted)",
                "connected": True,
                "model_count": 1,
                "source": "config",
                "default_model_id": "demo",
            }
        ],
        "default_by_provider": {"demo": "demo"},
        "connected": ["demo"],
    }
    assert models["items"][0] == {
        "provider_id": "demo",
        "model_id": "demo",
        "name": "Demo model (scripted)",
        "default": True,
        "connected": True,
        "status": "active",
        "context_window": 100000,
        "max_output_tokens": 8000,
        "supports_reasoning": True,
        "supports_tool_call": True,
        "supports_attachments": True,
    }
    none = await caller.method("opencode.models.list", {"provider_id": "nope"})
    assert none["items"] == []
    blank = await caller.refused("opencode.models.list", {"provider_id": " "})
    assert blank.fields == ("provider_id",)
    place: JsonObject = {"metadata": {"opencode": {"directory": "/etc"}}}
    outside = await caller.refused("opencode.providers.list", place)
    assert outside.fields == ("metadata.opencode.directory",)


async def test_agents_and_commands_are_listed(caller: Caller) -> None:
    agents = await caller.method("opencode.agents.list")
    commands = await caller.method("opencode.commands.list")

    modes = {agent["name"]: (agent["mode"], agent["selectable"]) for agent in agents["items"]}
    assert modes["build"] == ("primary", True)
    assert modes["general"] == ("subagent", False)
    assert {"init", "review"} <= {command["name"] for command in commands["items"]}


async def test_projects_of_the_workspace_are_listed(caller: Caller, backstage: Backstage) -> None:
    current = await caller.method("opencode.projects.current")
    listed = await caller.method("opencode.projects.list")

    assert current["item"]["worktree"] == str(backstage.workspace)
    assert current["item"]["vcs"] == "git"
    assert current["item"] in listed["items"]
    assert await caller.method("opencode.workspaces.list") == {"items": []}


async def test_files_are_listed_read_and_found(caller: Caller, backstage: Backstage) -> None:
    (backstage.workspace / "sub").mkdir(exist_ok=True)
    (backstage.workspace / "sub" / "inner.bin").write_bytes(b"\x00\x01\x02")
    (backstage.workspace / ".hidden").write_text("of a dot\n")

    top = await caller.method("opencode.files.list")
    sub = await caller.method("opencode.files.list", {"directory": "sub"})
    read = await caller.method("opencode.files.read", {"path": "hello.txt"})
    binary = await caller.method("opencode.files.read", {"path": "sub/inner.bin"})
    hidden = await caller.method("opencode.files.read", {"path": "./.hidden"})
    names = await caller.method("opencode.files.find", {"query": "hello"})

    kinds = {one["name"]: one["type"] for one in top["items"]}
    assert (kinds["hello.txt"], kinds["sub"]) == ("file", "directory")
    assert [one["name"] for one in sub["items"]] == ["inner.bin"]
    assert read == {"path": "hello.txt", "type": "text", "content": "hello", "truncated": False}
    assert (binary["type"], binary["encoding"], binary["content"]) == ("binary", "base64", "AAEC")
    assert hidden["content"] == "of a dot"
    assert {"path": "hello.txt"} in names["items"]


async def test_lines_are_found_by_a_pattern_that_is_no_option(caller: Caller) -> None:
    answer = await caller.answer("opencode.files.find", {"query": "hel+o", "type": "text"})
    hostile = await caller.answer(
        "opencode.files.find", {"query": "--pre=touch pwned", "type": "text"}
    )

    if "error" in answer:  # without ripgrep OpenCode cannot search
        assert answer["error"]["code"] == -31003
    else:
        assert {"path": "hello.txt", "line": 1, "text": "hello"} in answer["result"]["items"]
        assert hostile.get("result", {"items": []})["items"] == []


@pytest.mark.parametrize(
    "path", ["..", "../other", "/etc/passwd", "sub/../../x", "way-out", "way-out/passwd", "no\0pe"]
)
@pytest.mark.parametrize("method", ["opencode.files.list", "opencode.files.read"])
async def test_no_path_leads_out_of_the_workspace(
    caller: Caller, backstage: Backstage, path: str, method: str
) -> None:
    link = backstage.workspace / "way-out"
    if not link.is_symlink():
        os.symlink("/etc", link)
    try:
        refused = await caller.refused(method, {"path": path})
    finally:
        link.unlink()

    assert (refused.code, refused.reason, refused.fields) == (-32602, "INVALID_FIELD", ("path",))


@pytest.mark.parametrize(
    ("method", "params", "field"),
    [
        ("opencode.files.list", {"path": "hello.txt"}, "path"),
        ("opencode.files.list", {"path": "nope"}, "path"),
        ("opencode.files.read", {"path": "."}, "path"),
        ("opencode.files.read", {"path": "nope"}, "path"),
        ("opencode.files.read", {}, "path"),
        ("opencode.files.find", {"query": "x", "limit": 101}, "limit"),
        ("opencode.files.find", {"query": ""}, "query"),
        ("opencode.files.find", {"query": "x", "type": "all"}, "type"),
        ("opencode.vcs.diff", {"mode": "svn"}, "mode"),
        ("opencode.vcs.diff", {"context": 1001}, "context"),
        ("opencode.agents.list", {"directory": "../.."}, "directory"),
        ("opencode.projects.list", {"directory": "."}, "directory"),
    ],
)
async def test_wrong_params_are_named(
    caller: Caller, method: str, params: JsonObject, field: str
) -> None:
    refused = await caller.refused(method, params)

    assert (refused.code, refused.fields) == (-32602, (field,))


async def test_changes_of_the_working_tree_are_shown(caller: Caller, backstage: Backstage) -> None:
    (backstage.workspace / "hello.txt").write_text("hello\nworld\n")
    try:
        diff = await caller.method("opencode.vcs.diff", {"context": 1})
    finally:
        (backstage.workspace / "hello.txt").write_text("hello\n")

    changed = {one["file"]: one for one in diff["items"]}["hello.txt"]
    assert (changed["status"], changed["additions"], changed["deletions"]) == ("modified", 1, 0)
    assert "+world" in changed["patch"]
    assert diff["branch"] == diff["default_branch"]


async def test_worktrees_are_made_reset_and_removed(operator: Caller) -> None:
    with capture_logs() as logs:
        made = await operator.method("opencode.worktrees.create", {"request": {"name": "one two"}})
    directory = made["item"]["directory"]
    request: JsonObject = {"request": {"directory": directory}}

    listed = await operator.method("opencode.worktrees.list")
    reset = await operator.method("opencode.worktrees.reset", request)
    removed = await operator.method("opencode.worktrees.remove", request)

    assert made["item"]["name"] == "one-two"
    assert directory in listed["items"]
    assert (reset, removed) == ({"ok": True}, {"ok": True})
    assert directory not in (await operator.method("opencode.worktrees.list"))["items"]
    assert [e["outcome"] for e in logs if e["event"] == "workspace_mutation_audit"] == ["success"]


@pytest.mark.parametrize("directory", ["/tmp", "/", "..", ""])  # noqa: S108 - never touched
@pytest.mark.parametrize("method", ["opencode.worktrees.remove", "opencode.worktrees.reset"])
async def test_only_worktrees_of_the_project_can_be_touched(
    operator: Caller, directory: str, method: str
) -> None:
    refused = await operator.refused(method, {"request": {"directory": directory}})

    assert refused.fields == ("request.directory",)


async def test_a_workspace_that_is_not_there_is_removed_as_null(operator: Caller) -> None:
    gone = await operator.method("opencode.workspaces.remove", {"workspace_id": "wrk_none"})
    hostile = await operator.refused("opencode.workspaces.remove", {"workspace_id": "../config"})
    odd = await operator.refused(
        "opencode.workspaces.create", {"request": {"type": "worktree", "id": "x/../y"}}
    )

    assert gone == {"item": None}
    assert hostile.fields == ("workspace_id",)
    assert odd.fields == ("request.id",)


async def test_workspace_changes_are_off_by_default(caller: Caller) -> None:
    for name in ("workspaces.create", "workspaces.remove", "worktrees.create", "worktrees.reset"):
        refused = await caller.refused(f"opencode.{name}", {})
        assert (refused.code, refused.data["toggle"]) == (-32601, "A2A_ENABLE_WORKSPACE_MUTATIONS")
