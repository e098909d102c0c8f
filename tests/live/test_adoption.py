"""A managed OpenCode outlives a service that was killed, and the next start takes it over."""

import asyncio
import os
import signal
import uuid
from collections.abc import AsyncGenerator
from pathlib import Path

import orjson
import pytest

from opencode_a2a.events import JsonObject
from opencode_a2a_demo.server import DemoModel, opencode_config
from tests.support.answers import Task, fold
from tests.support.backstage import script
from tests.support.caller import Caller
from tests.support.program import Program

pytestmark = [pytest.mark.live, pytest.mark.linux_only]


@pytest.fixture
async def program(variables: dict[str, str], model: DemoModel) -> AsyncGenerator[Program]:
    """A service that starts OpenCode in front of a model that nobody kills."""
    config = orjson.dumps(opencode_config(model.url)).decode()
    async with Program(variables | {"OPENCODE_CONFIG_CONTENT": config}, "--managed") as running:
        yield running


def opencode_pid(program: Program) -> int:
    """Return the process that the service says is its OpenCode."""
    return [one["opencode_pid"] for one in program.records() if one["event"] == "started"][-1]


def outside(path: Path) -> JsonObject:
    """Read a file for which OpenCode asks first."""
    (path / "outside.txt").write_text("from outside")
    return {"tool": "read", "input": {"filePath": str(path / "outside.txt")}}


async def asked(caller: Caller, path: Path) -> Task:
    task = await caller.send(script(outside(path), {"say": "allowed"}))
    assert task.state == "input_required"
    return task


@pytest.mark.both_drivers
async def test_text_tools_and_permissions_go_on_after_a_kill(
    program: Program, model: DemoModel, tmp_path: Path
) -> None:
    caller, gate = Caller(program), uuid.uuid4().hex
    wait = "touch began; until test -e go; do sleep 0.1; done; echo the tool ran"
    tool: JsonObject = {"tool": "bash", "input": {"command": wait, "description": "d"}}
    text = await caller.begin(script({"say": "half "}, {"gate": gate}, {"say": "whole"}))
    tooled = await caller.begin(script(tool, {"say": "ran"}))
    waiting = await asked(caller, tmp_path)
    async with asyncio.timeout(60):
        await model.gate(gate).reached.wait()
        while not (tmp_path / "workspace" / "began").exists():  # noqa: ASYNC110 - a tool's
            await asyncio.sleep(0.05)
    first = opencode_pid(program)

    await program.restart()

    assert opencode_pid(program) == first
    model.gate(gate).opened.set()
    (tmp_path / "workspace" / "go").touch()
    assert (await caller.ended(text.id)).text == "half whole"
    ran = await caller.ended(tooled.id)
    assert (ran.state, ran.text, ran.tools[0]["status"]) == ("completed", "ran", "completed")
    again = await caller.get(waiting.id)
    assert again.interrupt["request_id"] == waiting.interrupt["request_id"]
    answered = await caller.send("once", task=waiting.id)
    assert (answered.state, answered.text) == ("completed", "allowed")
    record = next((tmp_path / "state" / "managed").iterdir())
    assert record.stat().st_mode & 0o077 == 0

    # An OpenCode that would be started otherwise now is ended, as is all that it runs.
    lost = await asked(caller, tmp_path)
    before = len(program.lines)
    await program.restart(JAVA_HOME="/opt/java")
    assert opencode_pid(program) != first
    ending = await program.record("ending the OpenCode of an earlier run", before)
    assert ending["reason"] == "these differ from its start: JAVA_HOME"
    assert first not in program.left()
    assert (await caller.ended(lost.id)).state == "failed"
    assert await program.stop() == 0
    assert program.left() == []
    assert list((tmp_path / "state" / "managed").iterdir()) == []


async def test_a_stop_says_what_is_open_and_keeps_what_waits_for_a_person(
    program: Program, model: DemoModel, tmp_path: Path
) -> None:
    caller, gate = Caller(program), uuid.uuid4().hex
    waiting = await asked(caller, tmp_path)
    working = await caller.begin(script({"say": "half "}, {"gate": gate}, {"say": "whole"}))
    await model.gate(gate).reached.wait()
    queued = await caller.begin(script({"say": "later"}), context=working.context_id)
    errand = uuid.uuid4().hex
    session = (await caller.send("hello")).session_id
    prompt = script({"gate": errand}, {"say": "nobody watches"})
    params: JsonObject = {
        "session_id": session,
        "request": {"parts": [{"type": "text", "text": prompt}]},
    }
    assert "result" in await Caller(program).answer("opencode.sessions.prompt_async", params)
    await model.gate(errand).reached.wait()
    first, before = opencode_pid(program), len(program.lines)

    assert await program.stop(signal.SIGINT) == 0

    told = await program.record("stopping", before)
    assert (told["waiting"], told["working"]) == ([waiting.id], [working.id, queued.id])
    notes = "\n".join(told["notes"])
    assert "opencode-a2a task --follow TASK" in notes
    assert f"kill {first}" in notes
    assert first in program.left()

    await program.start()
    assert opencode_pid(program) == first
    statuses = await Caller(program).answer("opencode.sessions.status", {})
    assert session not in orjson.dumps(statuses).decode()
    model.gate(gate).opened.set()
    assert (await caller.ended(working.id)).state != "completed"  # nobody watched it
    later = await caller.ended(queued.id)
    assert (later.state, later.text) == ("completed", "later")
    again = await caller.get(waiting.id)
    assert again.state == "input_required"
    assert again.interrupt["request_id"] == waiting.interrupt["request_id"]
    answered = await caller.send("once", task=waiting.id)
    assert (answered.state, answered.text) == ("completed", "allowed")

    # Who closes the terminal does not read what is said there.
    await asked(caller, tmp_path)
    assert await program.stop(signal.SIGHUP) == 0
    assert program.left() == []


async def test_a_plan_that_waits_needs_no_opencode_to_outlive_a_stop(program: Program) -> None:
    caller = Caller(program)
    planned = await caller.send(script({"say": "1. Do it."}), metadata={"opencode": {"plan": True}})
    assert planned.state == "input_required"
    before = len(program.lines)

    assert await program.stop(signal.SIGINT) == 0

    told = await program.record("stopping", before)
    assert told["waiting"] == [planned.id]
    assert not [note for note in told["notes"] if "OpenCode" in note]
    assert program.left() == []
    await program.start()
    ended = await caller.send("go", task=planned.id)
    assert ended.state == "completed"


async def test_a_request_that_ended_with_its_opencode_is_named_and_asked_again(
    program: Program, tmp_path: Path
) -> None:
    caller = Caller(program)
    waiting = await asked(caller, tmp_path)

    # As when a container ends: the service and its OpenCode at once.
    program.signal(signal.SIGKILL)
    os.kill(opencode_pid(program), signal.SIGKILL)
    await program.ended()
    await program.start()

    ended = await caller.ended(waiting.id)
    assert (ended.state, ended.error_type) == ("failed", "UPSTREAM_INTERRUPTED")
    assert "what it asked ended with it. Send the message again, and it asks again." in ended.said
    again = await caller.send(
        script(outside(tmp_path), {"say": "allowed"}), context=waiting.context_id
    )
    assert (again.state, again.session_id) == ("input_required", waiting.session_id)
    answered = await caller.send("once", task=again.id)
    assert (answered.state, answered.text) == ("completed", "allowed")


@pytest.mark.both_drivers
async def test_half_an_answer_is_not_called_completed_when_model_and_opencode_ended(
    variables: dict[str, str], driver: str
) -> None:
    async with Program(variables, "--demo") as program:
        caller = Caller(program)
        words = " ".join(f"word{number}" for number in range(60))
        async with caller.stream(script({"say": words, "delay": 0.05})) as before:
            await before.until(lambda _: "word5" in fold(before.updates).text)
            first = opencode_pid(program)
            await program.kill()

        # The model ended with the service. Asked to end as well, OpenCode 2 stores the half that it
        # has with an error. OpenCode 1 stores none, and has noticed or not that the model was gone.
        await program.start(JAVA_HOME="/opt/java")

        assert opencode_pid(program) != first
        ended = await caller.ended(before.task.id)
        errors = {"opencode1": {"UPSTREAM_INTERRUPTED", "UPSTREAM_ABORTED"}}
        assert ended.state == "failed"
        assert ended.error_type in errors.get(driver, {"UPSTREAM_EXECUTION_ERROR"})
        assert words.startswith(ended.text)
        assert "word3" in ended.text  # what came after it may not have been stored


async def test_a_stop_of_the_service_that_ends_opencode_is_not_blamed_on_opencode(
    program: Program,
) -> None:
    caller = Caller(program)
    words = " ".join(f"word{number}" for number in range(200))
    async with caller.stream(script({"say": words, "delay": 0.05})) as before:
        await before.until(lambda _: "word3" in fold(before.updates).text)
        assert await program.stop(signal.SIGINT) == 0

    await program.start()
    ended = await caller.ended(before.task.id)

    assert (ended.state, ended.error_type) == ("failed", "UPSTREAM_ABORTED")
    assert "while this service was not connected to OpenCode" in ended.said
    assert words.startswith(ended.text)
    assert "word3" in ended.text


async def test_the_demo_goes_on_after_a_kill_in_the_middle_of_text(
    variables: dict[str, str],
) -> None:
    words = " ".join(f"word{number}" for number in range(60))
    async with Program(variables, "--demo") as program:
        caller = Caller(program)
        async with caller.stream(script({"say": words, "delay": 0.05})) as before:
            await before.until(lambda _: "word3" in fold(before.updates).text)
            first = opencode_pid(program)
            await program.kill()
        await program.start()

        task = await caller.ended(before.task.id)
        assert (task.state, task.text) == ("completed", words)
        assert opencode_pid(program) == first
        assert await program.stop() == 0
        assert program.left() == []


async def test_the_demo_keeps_what_waits_even_when_the_next_start_is_broken_off(
    variables: dict[str, str], tmp_path: Path
) -> None:
    async with Program(variables | {"A2A_LOG_LEVEL": "INFO"}, "--demo") as program:
        caller = Caller(program)
        waiting = await asked(caller, tmp_path)
        first = opencode_pid(program)
        assert await program.stop(signal.SIGINT) == 0

        before = len(program.lines)
        await program.spawn()
        await program.printed(lambda line: "adopted the OpenCode" in line, before)
        assert await program.stop(signal.SIGINT) == 0
        assert first in program.left()

        await program.start()
        assert opencode_pid(program) == first
        answered = await caller.send("once", task=waiting.id)
        assert (answered.state, answered.text) == ("completed", "allowed")
        assert await program.stop() == 0
        assert program.left() == []
        assert list((tmp_path / "state" / "managed").iterdir()) == []
