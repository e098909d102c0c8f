"""Where the service keeps its files, and that no caller and no agent comes across them."""

import json
import uuid
from pathlib import Path

import pytest

from tests.support.backstage import Backstage, script
from tests.support.caller import Caller
from tests.support.program import Program, run
from tests.support.service import TOKEN, variables_for

pytestmark = pytest.mark.live

OTHER_TOKEN = "a-token-for-the-tests-of-another-caller"  # noqa: S105 - not a secret


def at_home(backstage: Backstage, home: Path, **changes: str) -> dict[str, str]:
    """Return variables that name neither a database nor a state directory."""
    variables = variables_for(backstage, home, HOME=str(home), **changes)
    return {
        name: value
        for name, value in variables.items()
        if name not in ("A2A_STATE_DIR", "A2A_TASK_STORE_DATABASE_URL")
    }


async def test_the_files_of_the_workspace_tell_nothing_about_another_callers_task(
    backstage: Backstage, tmp_path: Path
) -> None:
    credentials = [
        {"scheme": "bearer", "principal": "one", "token": TOKEN},
        {"scheme": "bearer", "principal": "two", "token": OTHER_TOKEN},
    ]
    variables = at_home(
        backstage,
        tmp_path,
        A2A_BEARER_TOKEN="",
        A2A_STATIC_AUTH_CREDENTIALS=json.dumps(credentials),
    )
    canary = f"canary{uuid.uuid4().hex}"
    before = set(backstage.workspace.iterdir())

    async with Program(variables, directory=backstage.workspace) as program:
        await Caller(program).send(script({"say": canary}))
        other = Caller(program, token=OTHER_TOKEN)
        listed = await other.answer("opencode.files.list", {"path": "."})
        found = await other.answer("opencode.files.find", {"query": canary, "type": "text"})

    assert canary in "".join(
        file.read_bytes().decode(errors="replace") for file in databases(tmp_path)
    )
    assert found["result"]["items"] == []
    assert not [item for item in listed["result"]["items"] if ".db" in item["path"]]
    assert set(backstage.workspace.iterdir()) == before


def databases(home: Path) -> list[Path]:
    """Return the files of the database in the state directory, its log of writes included."""
    return sorted((home / ".local" / "state" / "opencode-a2a" / "tasks").glob("*.db*"))


async def test_a_link_in_the_workspace_does_not_lead_to_the_database(
    backstage: Backstage, tmp_path: Path
) -> None:
    variables = at_home(backstage, tmp_path)
    canary = f"canary{uuid.uuid4().hex}"
    link = backstage.workspace / f"link-{uuid.uuid4().hex}"

    async with Program(variables, directory=tmp_path) as program:
        await Caller(program).send(script({"say": canary}))
        [file, *_] = databases(tmp_path)
        link.symlink_to(file.parent)
        caller = Caller(program)
        try:
            read = await caller.answer(
                "opencode.files.read", {"path": f"{link.name}/{file.name}-wal"}
            )
            listed = await caller.answer("opencode.files.list", {"path": link.name})
            found = await caller.answer("opencode.files.find", {"query": canary, "type": "text"})
            named = await caller.answer("opencode.files.find", {"query": file.name})
        finally:
            link.unlink()

    assert read["error"]["data"][0]["reason"] == "INVALID_FIELD"
    assert listed["error"]["data"][0]["reason"] == "INVALID_FIELD"
    assert (found["result"]["items"], named["result"]["items"]) == ([], [])


async def test_serving_the_home_directory_is_refused_with_the_remedy(
    backstage: Backstage, tmp_path: Path
) -> None:
    variables = at_home(backstage, tmp_path, OPENCODE_WORKSPACE_ROOT=str(tmp_path))

    status, output = await run("serve", **variables)

    assert status == 2
    assert output.strip() == (
        f"A2A_STATE_DIR: {tmp_path}/.local/state/opencode-a2a is in the workspace {tmp_path}, "
        "where the agent can read and change it; serve the directory of one project "
        "(OPENCODE_WORKSPACE_ROOT), or set A2A_STATE_DIR to a directory outside"
    )
    assert not (tmp_path / ".local").exists()


async def test_the_directory_of_a_running_opencode_is_a_workspace_too(
    backstage: Backstage, tmp_path: Path
) -> None:
    state = backstage.workspace / uuid.uuid4().hex
    variables = at_home(backstage, tmp_path)
    del variables["OPENCODE_WORKSPACE_ROOT"]

    status, output = await run("serve", **variables, A2A_STATE_DIR=str(state))

    assert status == 2
    [line] = output.splitlines()
    assert line.startswith(
        f"opencode-a2a: A2A_STATE_DIR: {state} is in the workspace {backstage.workspace}, "
    )


async def test_a_database_in_the_old_place_is_named_with_the_remedy(
    backstage: Backstage, tmp_path: Path
) -> None:
    (tmp_path / "opencode-a2a.db").touch()

    async with Program(at_home(backstage, tmp_path), directory=tmp_path) as program:
        warnings = [one["event"] for one in program.records() if one["level"] == "warning"]
        # What OpenCode 2 does not tell about its password is a warning too.
        [warning] = [one for one in warnings if "password" not in one]

    [target] = [file for file in databases(tmp_path) if file.suffix == ".db"]
    assert warning == (
        f"{tmp_path}/opencode-a2a.db is no longer used; to keep its tasks run "
        f"`opencode-a2a migrate --from sqlite:///{tmp_path}/opencode-a2a.db "
        f"--to sqlite:///{target}`, then delete the file"
    )
