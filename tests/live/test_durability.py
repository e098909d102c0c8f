"""A task is never lost: the service is killed at any moment, started again, and goes on.

The invariants I1 to I6 are DESIGN's; the service is a process of its own, OpenCode and the
model behind it live on.
"""

import asyncio
import random
import uuid
from pathlib import Path
from typing import Any

import httpx
import httpx2
import pytest
from a2a.client import ClientConfig, create_client
from a2a.types import Message, Part, Role, SendMessageRequest, TaskState

from opencode_a2a.events import JsonObject
from opencode_a2a.ids import SessionId
from opencode_a2a.opencode.driver import Driver
from opencode_a2a.opencode.types import TextPart
from tests.live.conftest import KILLS, SEED, two_wires
from tests.support.answers import Task, Update, Wire, fold
from tests.support.backstage import Backstage, script
from tests.support.caller import Caller, Following
from tests.support.event_stream import listening
from tests.support.forked import ForkedProgram
from tests.support.program import Program
from tests.support.proxy import Proxy
from tests.support.service import TOKEN, variables_for

pytestmark = [pytest.mark.live, pytest.mark.both_databases]

BROKEN = (httpx2.TransportError, ConnectionError)
TRUE: JsonObject = {"tool": "bash", "input": {"command": "true", "description": "d"}}
ANSWER = " ".join(f"word{number}" for number in range(40))


async def cut(following: Following) -> list[Update]:
    """Read a stream to its violent end, and return what it told."""
    with pytest.raises(BROKEN):
        await following.rest()
    return following.updates


async def prompts(opencode: Driver, task: Task) -> list[list[str]]:
    """Return the texts of every user message in the session of a task."""
    messages = (await opencode.messages(SessionId(task.session_id))).items
    return [
        [part.text for part in message.parts if isinstance(part, TextPart)]
        for message in messages
        if message.info.role == "user"
    ]


async def working(program: Program) -> list[Any]:
    """Return the tasks that are neither ended nor waiting for a person."""
    answer = await Caller(program).answer("ListTasks", {"pageSize": 100})
    states = {"TASK_STATE_SUBMITTED", "TASK_STATE_WORKING"}
    return [t for t in answer["result"]["tasks"] if t["status"]["state"] in states]


# A stream in the middle


@pytest.mark.sqlite_only  # on PostgreSQL one wire is resumed below, over several kills
@two_wires
async def test_a_reader_goes_on_with_its_last_id_after_a_kill(
    program: Program, backstage: Backstage, opencode: Driver, gate: str, wire: Wire
) -> None:
    caller = Caller(program, wire)
    prompt = script({"say": "first half, "}, {"gate": gate}, {"say": "second half"})
    async with caller.stream(prompt) as before:
        await before.until_text("first half, ")
        await backstage.reached(gate)
        last = before.updates[-1].id
        await program.kill()
        await cut(before)
    await program.start()

    async with caller.subscribe(before.task.id, after=last) as after:
        await backstage.open(gate)
        updates = before.updates + await after.rest()

    task = await caller.get(before.task.id)
    assert after.updates[-1].state == task.state == "completed"
    assert fold(updates).text == task.text == "first half, second half"
    assert len(await prompts(opencode, task)) == 1
    assert await working(program) == []


async def test_a_reader_whose_last_words_were_lost_is_given_the_task_anew(
    program: Program, backstage: Backstage, gate: str
) -> None:
    """I4: what was told within the last 50 ms may be lost, and is then not built upon."""
    caller = Caller(program)
    prompt = script({"say": "first half, "}, {"gate": gate}, {"say": "second half"})
    async with caller.stream(prompt) as before:
        await before.until_text("first half, ")
        await program.kill()
    await program.start()

    async with caller.subscribe(before.task.id, after=f"{10**6}") as after:
        await backstage.open(gate)
        await after.rest()

    assert after.updates[0].task is not None
    assert after.task.text == "first half, second half"


async def test_a_stream_may_be_resumed_over_several_kills(
    program: Program, backstage: Backstage
) -> None:
    gates = [uuid.uuid4().hex for _ in range(3)]
    caller = Caller(program)
    async with caller.stream(script(*[[{"say": g}, {"gate": g}, TRUE] for g in gates])) as reading:
        await reading.until_text(gates[0])
        task_id, updates = reading.task.id, reading.updates
        await program.kill()

    for passed, gate in enumerate(gates[:-1], 2):
        await program.start()
        async with caller.subscribe(task_id, updates[-1].id) as reading:
            await backstage.open(gate)
            told = "\n\n".join(gates[:passed])
            await reading.until(lambda _: fold(updates + reading.updates).text == told)  # noqa: B023
            updates += reading.updates
            await program.kill()

    await program.start()
    async with caller.subscribe(task_id, updates[-1].id) as reading:
        await backstage.open(gates[-1])
        whole = fold(updates + await reading.rest())
    assert whole.state == "completed"
    assert (
        whole.text == (await caller.get(task_id)).text == "\n\n".join([*gates, "(end of script)"])
    )
    assert [tool["status"] for tool in whole.tools] == ["completed"] * len(gates)


# Tasks that nobody looks at


@pytest.mark.requirement("I1")
@pytest.mark.requirement("I3")
async def test_a_background_task_ends_by_itself_after_a_kill(
    program: Program, backstage: Backstage, opencode: Driver, gate: str
) -> None:
    caller = Caller(program)
    begun = await caller.begin(script({"say": "half "}, {"gate": gate}, {"say": "whole"}))
    await backstage.reached(gate)

    await program.restart()
    assert (await caller.get(begun.id)).state == "working"
    await backstage.open(gate)

    task = await caller.ended(begun.id)
    assert (task.state, task.text) == ("completed", "half whole")
    assert len(await prompts(opencode, task)) == 1


async def test_a_turn_that_ended_while_the_service_was_down_is_taken_up(
    program: Program, backstage: Backstage, opencode: Driver, gate: str
) -> None:
    caller = Caller(program)
    call: JsonObject = {
        "tool": "bash",
        "input": {"command": "echo from the tool", "description": "d"},
    }
    prompt = script([{"say": "half "}, {"gate": gate}, call], [{"say": "whole"}])
    begun = await caller.begin(prompt)
    await backstage.reached(gate)
    bound = await caller.get(begun.id)
    await program.kill()

    async with listening(opencode) as heard:
        await backstage.open(gate)
        await heard.until_idle(bound.session_id)
    await program.start()

    task = await caller.ended(begun.id)
    assert (task.state, task.text) == ("completed", "half \n\nwhole")
    assert [tool["status"] for tool in task.tools] == ["completed"]
    assert len(await prompts(opencode, task)) == 1


async def test_a_task_that_waits_for_its_turn_is_prompted_once_after_a_kill(
    program: Program, backstage: Backstage, opencode: Driver, gate: str
) -> None:
    """I6: the second message of a context waits for the first, and is not yet in OpenCode."""
    caller = Caller(program)
    first = await caller.begin(script({"gate": gate}, {"say": "one"}))
    await backstage.reached(gate)
    second = await caller.begin(script({"say": "two"}), context=first.context_id)

    await program.restart()
    await backstage.open(gate)

    ended = [await caller.ended(task.id) for task in (first, second)]
    assert [task.text for task in ended] == ["one", "two"]
    assert len(await prompts(opencode, ended[1])) == 2


async def test_a_task_admitted_while_opencode_was_away_is_run_after_a_restart(
    program: Program, backstage: Backstage, opencode: Driver
) -> None:
    caller = Caller(program)
    async with Proxy(backstage.url) as wire:
        await program.restart(OPENCODE_BASE_URL=wire.url)
        await caller.send(script({"say": "it has answered once"}))
    begun = await caller.begin(script({"say": "at last"}))
    assert begun.state == "submitted"

    await program.restart(OPENCODE_BASE_URL=backstage.url)

    task = await caller.ended(begun.id)
    assert (task.state, task.text) == ("completed", "at last")
    assert len(await prompts(opencode, task)) == 1


async def test_a_message_sent_again_after_a_kill_is_the_same_task(
    program: Program, backstage: Backstage, opencode: Driver, gate: str
) -> None:
    """I6: a client that never saw the answer sends again, and nothing runs twice."""
    caller = Caller(program)
    message_id = str(uuid.uuid4())
    prompt = script({"gate": gate}, {"say": "once"})
    begun = await caller.begin(prompt, message_id=message_id)
    await backstage.reached(gate)

    await program.restart()
    await backstage.open(gate)
    again = await caller.send(prompt, message_id=message_id)

    assert again.id == begun.id
    assert again.text == "once"
    assert len(await prompts(opencode, again)) == 1


# Prompts


async def test_a_permission_can_be_answered_after_a_kill(
    program: Program, backstage: Backstage, opencode: Driver, tmp_path: Path
) -> None:
    (tmp_path / "outside.txt").write_text("from outside")
    call: JsonObject = {"tool": "read", "input": {"filePath": str(tmp_path / "outside.txt")}}
    caller = Caller(program)
    asked = await caller.send(script(call, {"say": "done"}))
    assert asked.state == "input_required"

    await program.restart()
    again = await caller.get(asked.id)
    assert again.state == "input_required"
    assert again.interrupt["request_id"] == asked.interrupt["request_id"]
    answered = await caller.send("once", task=asked.id)

    assert (answered.state, answered.text) == ("completed", "done")
    assert answered.tools[0]["status"] == "completed"
    assert len(await prompts(opencode, answered)) == 1


async def test_a_permission_answered_elsewhere_while_the_service_was_down_lets_the_task_end(
    program: Program, opencode: Driver, backstage: Backstage, tmp_path: Path
) -> None:
    (tmp_path / "outside.txt").write_text("from outside")
    call: JsonObject = {"tool": "read", "input": {"filePath": str(tmp_path / "outside.txt")}}
    caller = Caller(program)
    asked = await caller.send(script(call, {"say": "done"}))
    await program.kill()

    [pending] = [p for p in await opencode.permissions() if p.session_id == asked.session_id]
    await opencode.reply_permission(pending.id, "once")
    await program.start()

    task = await caller.ended(asked.id)
    assert (task.state, task.text) == ("completed", "done")


# At any moment


async def test_no_task_is_lost_or_doubled_whenever_the_service_is_killed(
    program: Program, opencode: Driver
) -> None:
    """I1, I2, I3, I5, I6, with kills at seeded random moments."""
    chance = random.Random(SEED)  # noqa: S311 - no secret
    caller = Caller(program)
    sent: dict[str, str] = {}
    for _ in range(KILLS):
        sent |= {str(uuid.uuid4()): f"{uuid.uuid4().hex} {ANSWER}" for _ in range(4)}
        async with asyncio.TaskGroup() as group:
            for message_id, answer in list(sent.items())[-4:]:
                group.create_task(send_and_drop(caller, message_id, answer))
            # The moment of the kill is what is tried here.
            await asyncio.sleep(chance.uniform(0.0, 0.8))
            await program.kill()
        await program.start()

    for message_id, answer in sent.items():
        task = await caller.send(spoken(answer), message_id=message_id)
        assert (task.state, task.text) == ("completed", answer)
        assert await prompts(opencode, task) == [[spoken(answer)]]
    assert await working(program) == []
    listed = await Caller(program).answer("ListTasks", {"pageSize": 100})
    assert listed["result"]["totalSize"] == len(sent)


def spoken(answer: str) -> str:
    return script({"say": answer, "delay": 0.01})


async def send_and_drop(caller: Caller, message_id: str, answer: str) -> None:
    """Send a message whose answer nobody may ever see."""
    try:
        await caller.send(spoken(answer), message_id=message_id)
    except BROKEN:
        return


async def test_many_background_tasks_all_end(program: Program) -> None:
    """More at once, before an OpenCode that costs less: ``tests/service/test_restarts.py``."""
    caller = Caller(program)
    contexts = [str(uuid.uuid4()) for _ in range(10)]
    begun = [
        await caller.begin(script({"say": f"answer {n}"}), context=contexts[n % 10])
        for n in range(30)
    ]

    ended = [await caller.ended(task.id) for task in begun]

    wanted = [("completed", f"answer {n}") for n in range(30)]
    assert [(task.state, task.text) for task in ended] == wanted
    assert await working(program) == []


# A stock client


async def test_a_stock_client_survives_a_turn_that_is_silent_for_long(
    backstage: Backstage, tmp_path: Path
) -> None:
    """Its read timeout is a third of the silence, and fifteen times the keep-alive."""
    variables = variables_for(backstage, tmp_path, A2A_STREAM_KEEPALIVE_SECONDS="0.1")
    headers = {"Authorization": f"Bearer {TOKEN}"}
    async with (
        ForkedProgram(variables) as program,
        httpx.AsyncClient(timeout=1.5, headers=headers, trust_env=False) as http,
    ):
        config = ClientConfig(streaming=True, httpx_client=http)
        client = await create_client(program.url, client_config=config)
        text = script({"say": "before "}, {"wait": 4.5}, {"say": "after"})
        message = Message(message_id="1", role=Role.ROLE_USER, parts=[Part(text=text)])
        told = [event async for event in client.send_message(SendMessageRequest(message=message))]

    assert told[-1].status_update.status.state == TaskState.TASK_STATE_COMPLETED
    texts = [
        part.text
        for event in told
        for part in event.artifact_update.artifact.parts
        if event.artifact_update.artifact.artifact_id.endswith(":text")
    ]
    assert "".join(texts) == "before after"
