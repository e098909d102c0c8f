"""What `serve` tells of the model and of what happens unasked, and how to change the latter."""

from pathlib import Path

import orjson
import pytest

from tests.support.caller import Caller
from tests.support.program import Program

pytestmark = pytest.mark.live


async def test_a_hosted_model_and_what_it_does_unasked_are_said_at_the_start(
    variables: dict[str, str],
) -> None:
    async with Program(variables, "--managed") as program:
        told = await program.record("opencode answers")
        assert "opencode/" in told["model"]
        assert told["hosted"]
        assert (told["asks"], told["unasked"]) == ([], ["commands", "edits", "web requests"])
        await program.stop()

        program.arguments += ["--ask=bash,edit"]
        before = len(program.lines)
        await program.start()
        told = await program.record("opencode answers", before)
        assert (told["asks"], told["unasked"]) == (["commands", "edits"], ["web requests"])
        await program.stop()


async def test_the_demo_asks_before_it_runs_a_command_whatever_the_project_says(
    variables: dict[str, str], tmp_path: Path
) -> None:
    allow = {"bash": "allow", "edit": "allow"}
    project = {"permission": allow, "agent": {"build": {"permission": allow}}}
    (tmp_path / "workspace" / "opencode.json").write_bytes(orjson.dumps(project))
    async with Program(variables, "--demo") as program:
        told = await program.record("opencode answers")
        assert (told["model"], told["demo"], told["hosted"]) == ("demo/demo", True, False)
        assert (told["asks"], told["unasked"]) == (["commands", "edits", "web requests"], [])

        asked = await Caller(program).send("list the files here")
        assert asked.state == "input_required"
        task = await Caller(program).send("once", task=asked.id)
        assert (task.state, "opencode.json" in task.text) == ("completed", True)
        await program.stop()


async def test_the_sub_agents_of_the_demo_ask_too_whatever_the_project_says(
    variables: dict[str, str], tmp_path: Path
) -> None:
    allow = {"permission": {"bash": "allow"}}
    project = {"agent": dict.fromkeys(("general", "explore", "plan"), allow)}
    (tmp_path / "workspace" / "opencode.json").write_bytes(orjson.dumps(project))
    async with Program(variables, "--demo") as program:
        told = await program.record("opencode answers")
        assert (told["asks"], told["unasked"]) == (["commands", "edits", "web requests"], [])

        asked = await Caller(program).send("use a sub-agent")
        assert asked.state == "input_required"
        await Caller(program).cancel(asked.id)
        await program.stop()


async def test_agents_of_the_project_that_do_not_ask_are_named_at_the_start(
    variables: dict[str, str], tmp_path: Path
) -> None:
    agents = {
        "free": {"mode": "subagent", "permission": {"b*": "allow"}},
        "freer": {"mode": "subagent", "permission": {"edit": {"*.md": "allow"}}},
        "tame": {"mode": "subagent", "description": "asks as it is told"},
    }
    (tmp_path / "workspace" / "opencode.json").write_bytes(orjson.dumps({"agent": agents}))
    async with Program(variables, "--demo") as program:
        told = await program.record("opencode answers")
        assert told["notes"] == [
            "commands and edits unasked by the agents free and freer; "
            "OpenCode's configuration allows it"
        ]
        await program.stop()


async def test_a_later_rule_of_the_project_for_everything_is_not_hidden_by_ask(
    variables: dict[str, str], tmp_path: Path
) -> None:
    """OpenCode keeps the order of the project's file, and the last rule that fits decides."""
    rules = {"edit": "ask", "*": "allow"}
    project = {"permission": rules, "agent": {"build": {"permission": rules}}}
    (tmp_path / "workspace" / "opencode.json").write_bytes(orjson.dumps(project))
    async with Program(variables, "--demo") as program:
        told = await program.record("opencode answers")
        assert (told["asks"], told["unasked"]) == (["commands", "web requests"], ["edits"])
        await program.stop()
