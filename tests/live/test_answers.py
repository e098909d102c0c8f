"""An answer counts once, for the request it was given to, whatever happens on the way.

The service is a process of its own, killed at exact and at random moments; OpenCode lives on.
"""

import asyncio
import contextlib
import random
import uuid
from collections.abc import AsyncGenerator
from pathlib import Path
from signal import Signals
from typing import Any

import httpx2
import pytest
from structlog.testing import capture_logs

from opencode_a2a.config import load
from opencode_a2a.events import JsonObject
from opencode_a2a.ids import RequestId
from opencode_a2a.opencode.driver import Location
from tests.live.conftest import KILLS, SEED, Serve, kill_at
from tests.support.answers import RefusedError, Task, Update
from tests.support.backstage import Backstage, past_service, script
from tests.support.caller import Caller
from tests.support.event_stream import listening
from tests.support.forked import ForkedProgram
from tests.support.program import Program
from tests.support.proxy import Moment, Proxy
from tests.support.service import TOKEN, serving, variables_for

pytestmark = pytest.mark.live

BROKEN = (httpx2.TransportError, ConnectionError)
DONE: JsonObject = {"say": "done"}


@pytest.fixture
async def wire(asking_backstage: Backstage) -> AsyncGenerator[Proxy]:
    async with Proxy(asking_backstage.url) as proxy:
        yield proxy


@pytest.fixture
async def program(
    asking_backstage: Backstage, wire: Proxy, tmp_path: Path
) -> AsyncGenerator[Program]:
    variables = variables_for(asking_backstage, tmp_path, OPENCODE_BASE_URL=wire.url)
    async with ForkedProgram(variables) as running:
        yield running


class Commands:
    """Two commands that OpenCode asks about one after the other, and that leave a trace."""

    def __init__(self, workspace: Path) -> None:
        self._files = [workspace / uuid.uuid4().hex for _ in range(2)]

    @property
    def prompt(self) -> str:
        return script(*[[_touch(file.name)] for file in self._files], [DONE])

    @property
    def ran(self) -> list[bool]:
        return [file.exists() for file in self._files]


def _touch(name: str) -> JsonObject:
    return {"tool": "bash", "input": {"command": f"touch {name}", "description": "d"}}


@pytest.fixture
def commands(asking_backstage: Backstage) -> Commands:
    return Commands(asking_backstage.workspace)


async def answer_and_lose(caller: Caller, task: Task, message_id: str) -> None:
    """Say yes, and never hear what came of it."""
    try:
        await caller.send("yes", task=task.id, message_id=message_id)
    except BROKEN:
        return


@pytest.mark.parametrize("moment", list(Moment), ids=lambda moment: moment.value)
async def test_an_answer_repeated_after_a_kill_does_not_approve_the_next_permission(
    program: Program, wire: Proxy, commands: Commands, moment: Moment
) -> None:
    caller, answer = Caller(program), str(uuid.uuid4())
    first = await caller.send(commands.prompt)
    await kill_at(moment, wire, program, answer_and_lose(caller, first, answer))

    again = await caller.send("yes", task=first.id, message_id=answer)
    second = await caller.wait(first.id, "input_required")

    assert again.state == "input_required"
    assert again.interrupt["request_id"] == second.interrupt["request_id"]
    assert second.interrupt["request_id"] != first.interrupt["request_id"]
    assert commands.ran == [True, False]
    assert second.history.count("yes") == 1
    ended = await caller.send("2 no", task=first.id)
    assert (ended.state, ended.history[1:]) == ("rejected", ["yes", "2 no"])
    assert commands.ran == [True, False]


async def test_a_reply_without_the_task_repeated_after_a_kill_is_the_same_reply(
    program: Program, wire: Proxy, commands: Commands
) -> None:
    caller, answer = Caller(program), str(uuid.uuid4())
    first = await caller.send(commands.prompt)

    async def reply() -> None:
        with contextlib.suppress(*BROKEN):
            await caller.send("yes", context=first.context_id, message_id=answer)

    await kill_at(Moment.TAKEN, wire, program, reply())

    again = await caller.send("yes", context=first.context_id, message_id=answer)
    await asked_after(caller, first)

    assert (again.id, again.state) == (first.id, "input_required")
    assert commands.ran == [True, False]
    ended = await caller.send("2 no", context=first.context_id)
    assert (ended.id, ended.state, ended.history[1:]) == (first.id, "rejected", ["yes", "2 no"])


@pytest.mark.parametrize("moment", [Moment.SENT, Moment.TAKEN], ids=lambda moment: moment.value)
async def test_a_stored_answer_is_given_after_a_restart_to_the_request_it_was_for(
    program: Program, wire: Proxy, commands: Commands, moment: Moment
) -> None:
    caller, answer = Caller(program), str(uuid.uuid4())
    first = await caller.send(commands.prompt)
    await kill_at(moment, wire, program, answer_and_lose(caller, first, answer))

    second = await asked_after(caller, first)
    again = await caller.send("yes", task=first.id, message_id=answer)

    assert again.raw == second.raw
    assert commands.ran == [True, False]
    [settled] = [one for one in program.records() if one["event"] == "interrupt settled"]
    assert settled["request_id"] == first.interrupt["request_id"]
    assert (settled["resolution"], settled["by"]) == ("once", settled["principal"])
    await caller.cancel(first.id)


async def asked_after(caller: Caller, earlier: Task) -> Task:
    """Wait until a task asks for something else than it did."""
    known = earlier.interrupt["request_id"]

    def other(update: Update) -> bool:
        asked = (update.task or update).shared.get("interrupt", {})
        return asked.get("phase") == "asked" and asked["request_id"] != known

    async with caller.subscribe(earlier.id) as following:
        await following.until(other)
    return await caller.get(earlier.id)


async def test_no_answer_counts_twice_whenever_the_service_is_killed(
    program: Program, asking_backstage: Backstage
) -> None:
    """Kills at seeded random moments around an answer; the client repeats it each time."""
    chance = random.Random(SEED)  # noqa: S311 - no secret
    caller = Caller(program)
    for _ in range(KILLS):
        commands, answer = Commands(asking_backstage.workspace), str(uuid.uuid4())
        first = await caller.send(commands.prompt)
        async with asyncio.TaskGroup() as group:
            group.create_task(answer_and_lose(caller, first, answer))
            # The moment of the kill is what is tried here.
            await asyncio.sleep(chance.uniform(0.0, 0.15))
            await program.kill()
        await program.start()

        second = await caller.send("yes", task=first.id, message_id=answer)

        assert second.state == "input_required"
        assert second.interrupt["request_id"] != first.interrupt["request_id"]
        assert commands.ran == [True, False]
        ended = await caller.send("2 no", task=first.id)
        assert (ended.state, ended.history[1:]) == ("rejected", ["yes", "2 no"])
        assert commands.ran == [True, False]


# Copies


async def test_copies_of_one_answer_at_once_get_the_same_good_answer(
    program: Program, commands: Commands
) -> None:
    caller, answer = Caller(program), str(uuid.uuid4())
    first = await caller.send(commands.prompt)

    copies = await asyncio.gather(
        *(caller.send("yes", task=first.id, message_id=answer) for _ in range(10))
    )

    assert {copy.state for copy in copies} == {"input_required"}
    assert len({copy.interrupt["request_id"] for copy in copies}) == 1
    assert copies[0].interrupt["request_id"] != first.interrupt["request_id"]
    assert commands.ran == [True, False]
    assert copies[0].history[1:] == ["yes"]
    await caller.cancel(first.id)


async def test_of_two_answers_at_once_only_the_one_that_counted_is_in_the_history(
    program: Program, commands: Commands
) -> None:
    caller, ids = Caller(program), {word: str(uuid.uuid4()) for word in ("yes", "no")}
    first = await caller.send(commands.prompt)

    answers = await asyncio.gather(
        *(caller.send(word, task=first.id, message_id=ids[word]) for word in ids),
        return_exceptions=True,
    )

    [taken] = [word for word, got in zip(ids, answers, strict=True) if isinstance(got, Task)]
    [refused] = [word for word in ids if word != taken]
    assert (await caller.get(first.id)).history[1:] == [taken]
    with pytest.raises(RefusedError):
        await caller.send(refused, task=first.id, message_id=ids[refused])
    assert (await caller.get(first.id)).history[1:] == [taken]
    assert commands.ran == [taken == "yes", False]
    if taken == "yes":
        await caller.cancel(first.id)


# Answers that came past the service


def audited(logs: list[Any]) -> list[Any]:
    return [one for one in logs if one["event"] == "interrupt answered past the service"]


async def test_an_answer_past_the_service_stops_the_turn_of_a_managed_opencode(
    opencode_command: str, tmp_path: Path
) -> None:
    """Nobody but the agent itself could have given it."""
    (tmp_path / "outside.txt").write_text("from outside")
    (tmp_path / "workspace").mkdir()
    read: JsonObject = {"tool": "read", "input": {"filePath": str(tmp_path / "outside.txt")}}
    gate = uuid.uuid4().hex
    variables = {
        "A2A_BEARER_TOKEN": TOKEN,
        "A2A_STATE_DIR": str(tmp_path / "state"),
        "A2A_TASK_STORE_DATABASE_URL": f"sqlite:///{tmp_path / 'tasks.db'}",
        "A2A_DEMO": "true",
        "OPENCODE_COMMAND": opencode_command,
        "OPENCODE_STARTUP_TIMEOUT": "90",
        "OPENCODE_WORKSPACE_ROOT": str(tmp_path / "workspace"),
    }
    with capture_logs() as logs:
        async with serving(load({}, variables)) as service:
            caller, fleet = Caller(service), service.service.fleet
            assert fleet is not None
            upstream = fleet.first.server
            asked = await caller.send(script([read], [{"say": "went on "}, {"gate": gate}]))
            async with past_service(upstream.url, upstream.password) as agent:
                at = Location(directory=str(tmp_path / "workspace"))
                request = RequestId(asked.interrupt["request_id"])
                await agent.reply_permission(request, "once", at=at)
                ended = await caller.ended(asked.id)
                busy = await agent.session_status(at=at)

    assert (ended.state, ended.error_type) == ("failed", "INTERRUPT_FORGED")
    assert "past this service" in ended.said
    assert busy == {}
    [record] = audited(logs)
    assert (record["request_id"], record["task_id"]) == (request, asked.id)
    assert (record["permission"], record["resolution"]) == ("external_directory", "once")


@pytest.mark.parametrize(
    ("allowed", "state"), [("true", "completed"), ("false", "failed")], ids=["allowed", "refused"]
)
async def test_a_setting_says_whether_opencode_may_be_answered_at_its_own_terminal(
    serve: Serve, asking_backstage: Backstage, commands: Commands, allowed: str, state: str
) -> None:
    stage = asking_backstage
    caller = Caller(await serve(stage, A2A_CONSOLE_ANSWERS=allowed))
    asked = await caller.send(commands.prompt)

    with capture_logs() as logs:
        async with past_service(stage.url, stage.password) as console:
            at = Location(directory=str(stage.workspace))
            await console.reply_permission(RequestId(asked.interrupt["request_id"]), "once", at=at)
            if allowed == "true":
                await asked_after(caller, asked)
                ended = await caller.send("2 yes", task=asked.id)
            else:
                ended = await caller.ended(asked.id)
            left = {request.session_id for request in await console.permissions(at=at)}

    assert ended.state == state, ended.raw
    assert asked.session_id not in left
    assert len(audited(logs)) == (state == "failed")


@pytest.mark.parametrize("reply", ["reject", "always"])
async def test_what_opencode_settles_by_itself_after_our_answer_is_not_taken_for_a_forgery(
    serve: Serve, asking_backstage: Backstage, reply: str
) -> None:
    """A refusal refuses all that is pending in the session, "always" grants what is like it."""
    settings = {"A2A_CONSOLE_ANSWERS": "false", "A2A_ALLOW_ALWAYS": "true"}
    caller = Caller(await serve(asking_backstage, **settings))
    directory = asking_backstage.workspace / uuid.uuid4().hex
    directory.mkdir()
    calls = [{"tool": "bash", "input": {"command": f"pwd {n}", "description": "d"}} for n in "ab"]
    begun = await caller.begin(
        script(*calls, DONE), metadata={"opencode": {"directory": str(directory)}}
    )
    async with caller.subscribe(begun.id) as following:
        await following.until(lambda u: bool(u.status) and "2 requests" in str(u.status))
        request = following.updates[-1].interrupt["request_id"]
        with capture_logs() as logs:
            await caller.send({"reply": reply, "request_id": request}, task=begun.id)
            ended = await caller.ended(begun.id)

    assert ended.state == ("rejected" if reply == "reject" else "completed")
    assert audited(logs) == []


async def test_an_answer_given_past_the_service_while_it_was_down_stops_the_turn_too(
    program: Program, asking_backstage: Backstage, commands: Commands
) -> None:
    stage, caller = asking_backstage, Caller(program)
    asked = await caller.send(commands.prompt)
    await program.kill()
    async with past_service(stage.url, stage.password) as agent, listening(agent) as heard:
        at = Location(directory=str(stage.workspace))
        await agent.reply_permission(RequestId(asked.interrupt["request_id"]), "once", at=at)
        await heard.until(b'"permission.asked"')

    await program.start(A2A_CONSOLE_ANSWERS="false")
    ended = await caller.ended(asked.id)

    assert (ended.state, ended.error_type) == ("failed", "INTERRUPT_FORGED")
    assert commands.ran == [True, False]
    assert len(audited(program.records())) == 1


@pytest.mark.parametrize("allowed", ["true", "false"], ids=["allowed", "refused"])
async def test_an_answer_past_the_service_is_noticed_after_the_turn_has_ended_without_it(
    program: Program, asking_backstage: Backstage, allowed: str
) -> None:
    stage, caller, name = asking_backstage, Caller(program), uuid.uuid4().hex
    asked = await caller.send(script([_touch(name)], [DONE]))
    await program.kill()
    async with past_service(stage.url, stage.password) as agent, asyncio.timeout(60):
        at = Location(directory=str(stage.workspace))
        await agent.reply_permission(RequestId(asked.interrupt["request_id"]), "once", at=at)
        while asked.session_id in await agent.session_status(at=at):
            pass

    await program.start(A2A_CONSOLE_ANSWERS=allowed)
    ended = await caller.ended(asked.id)

    assert (stage.workspace / name).exists()
    [settled] = [one for one in program.records() if one["event"] == "interrupt settled"]
    assert (settled["resolution"], settled["by"]) == ("once", "elsewhere")
    if allowed == "true":
        assert (ended.state, audited(program.records())) == ("completed", [])
    else:
        assert (ended.state, ended.error_type) == ("failed", "INTERRUPT_FORGED")
        assert len(audited(program.records())) == 1


async def test_an_always_of_ours_does_not_cover_one_that_is_given_elsewhere_later(
    serve: Serve, asking_backstage: Backstage
) -> None:
    stage = asking_backstage
    settings = {"A2A_CONSOLE_ANSWERS": "false", "A2A_ALLOW_ALWAYS": "true"}
    caller = Caller(await serve(stage, **settings))
    directory = stage.workspace / uuid.uuid4().hex
    directory.mkdir()
    place: JsonObject = {"opencode": {"directory": str(directory)}}
    pwd: JsonObject = {"tool": "bash", "input": {"command": "pwd", "description": "d"}}
    first = await caller.send(script([pwd], [DONE]), metadata=place)
    granted = await caller.send({"reply": "always"}, task=first.id)
    other = await caller.send(script([_touch("forged")], [DONE]), metadata=place)

    with capture_logs() as logs:
        async with past_service(stage.url, stage.password) as agent:
            request = RequestId(other.interrupt["request_id"])
            await agent.reply_permission(request, "always", at=Location(directory=str(directory)))
            ended = await caller.ended(other.id)

    assert granted.state == "completed"
    assert (ended.state, ended.error_type) == ("failed", "INTERRUPT_FORGED")
    assert len(audited(logs)) == 1


# Waiting over an end of the service


@pytest.mark.parametrize("number", [Signals.SIGINT, Signals.SIGTERM, Signals.SIGHUP])
async def test_a_task_that_waits_for_a_person_waits_again_after_the_service_was_ended(
    program: Program, commands: Commands, number: Signals
) -> None:
    caller = Caller(program)
    asked = await caller.send(commands.prompt)

    assert await program.stop(number) == 0
    await program.start()
    again = await caller.get(asked.id)
    second = await caller.send("yes", task=asked.id)

    assert (again.state, again.interrupt) == ("input_required", asked.interrupt)
    assert again.said == asked.said
    assert second.interrupt["request_id"] != asked.interrupt["request_id"]
    assert commands.ran == [True, False]
    await caller.cancel(asked.id)
