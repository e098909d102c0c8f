"""Kills at random moments lose nothing, repeat nothing and approve nothing.

In every round a reader follows a long text, a turn runs a tool, a person approves one command
and refuses the next, and a webhook is told of a task, while the service is killed and started
again. Each client does what a careful client does: it sends the same message again until it gets
an answer. Another test kills it around the deliveries to webhooks, before a played OpenCode.

The suite runs a few rounds; ``make kills KILLS=200 SEED=7`` runs many.
"""

import asyncio
import random
import uuid
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import httpx2
import pytest
import sqlalchemy as sa
from sqlalchemy.engine import Connection

from opencode_a2a.events import JsonObject
from opencode_a2a.ids import SessionId
from opencode_a2a.log.stored import Replay, ref_of
from opencode_a2a.opencode import connect
from opencode_a2a.opencode.driver import Driver
from opencode_a2a.opencode.managed import USERNAME
from opencode_a2a.store import tasks as task_rows
from opencode_a2a.store.database import Database
from opencode_a2a.store.schema import tasks
from opencode_a2a.store.tasks import TaskRow
from tests.conftest import UNTRACKED, Stages
from tests.live.conftest import KILLS, SEED
from tests.support import stores
from tests.support.answers import Task, Update, fold
from tests.support.backstage import Backstage, script
from tests.support.caller import Caller
from tests.support.forked import ForkedProgram
from tests.support.opencode import FakeOpenCode
from tests.support.program import Program
from tests.support.receiver import ENDS, Received, Receiver, receiving
from tests.support.service import variables_for

pytestmark = [pytest.mark.live, pytest.mark.both_databases]

T = TypeVar("T")
PATIENCE = 120.0
BROKEN = (httpx2.TransportError, ConnectionError)
ANSWER = " ".join(f"word{number}" for number in range(60))
RUN, ASKED = "run.sh", "asked.sh"


@pytest.fixture(scope="module")
def stage(stages: Stages) -> Generator[Backstage]:
    """An OpenCode that runs one command freely and asks before the other."""
    rules: JsonObject = {"*": "allow", f"sh {ASKED} *": "ask"}
    with stages("kills", {"permission": {"bash": rules}, **UNTRACKED}) as running:
        for name in (RUN, ASKED):
            (running.workspace / name).write_text('echo ran >> "$1"\n')
        yield running


class Killed:
    """A service that is killed now and then, and a client that puts up with it."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.caller = Caller(program)
        self._alive = asyncio.Event()
        self._alive.set()

    async def kill(self, after: float = 0.0) -> None:
        # The moment of the kill is what is tried here.
        await asyncio.sleep(after)
        self._alive.clear()
        await self.program.kill()
        await self.program.start()
        self._alive.set()

    async def insist(self, call: Callable[[], Awaitable[T]]) -> T:
        """Make a call, and make it again for as long as the connection breaks."""
        async with asyncio.timeout(PATIENCE):
            while True:
                await self._alive.wait()
                try:
                    return await call()
                except BROKEN:
                    # The client may learn of the kill before the killer has said so.
                    await asyncio.sleep(0)

    async def send(self, text: str, task: str | None = None) -> Task:
        message_id = str(uuid.uuid4())
        return await self.insist(lambda: self.caller.send(text, task=task, message_id=message_id))


class Workshop(Killed):
    """One with a real OpenCode, and the tools that it ran."""

    def __init__(self, program: Program, stage: Backstage, opencode: Driver) -> None:
        super().__init__(program)
        self.workspace = stage.workspace
        self.opencode = opencode

    def ran(self, name: str) -> list[str]:
        """Return a line for each time a command ran."""
        path = self.workspace / name
        return path.read_text().split() if path.exists() else []

    async def tokens(self) -> int:
        """Return what all tasks say that they used."""
        used, page = 0, {"nextPageToken": ""}
        while True:
            params: JsonObject = {"pageSize": 100, "pageToken": page["nextPageToken"]}
            page = (await self.caller.ask("list", params)).body["result"]
            known = [task["metadata"]["shared"]["usage"] for task in page["tasks"]]
            used += sum(one["total_tokens"] for one in known)
            if not page["nextPageToken"]:
                return used

    async def prompts(self, task: Task) -> int:
        messages = (await self.opencode.messages(SessionId(task.session_id))).items
        return sum(message.info.role == "user" for message in messages)


@pytest.fixture
async def killed(stage: Backstage, tmp_path: Path) -> AsyncGenerator[Workshop]:
    async with (
        connect.OpenCodeConnection(stage.url, username=USERNAME, password=stage.password) as there,
        ForkedProgram(
            variables_for(stage, tmp_path, A2A_PUSH_ALLOW_PRIVATE_HOSTS="true")
        ) as program,
    ):
        await there.choose()
        yield Workshop(program, stage, there.driver)


def command(name: str, argument: str) -> Any:
    return {"tool": "bash", "input": {"command": f"sh {name} {argument}", "description": "Run it"}}


async def follow_a_text(killed: Workshop) -> None:
    """A stream that is resumed with its last id tells every word once."""
    answer, message_id = f"{uuid.uuid4().hex} {ANSWER}", str(uuid.uuid4())
    prompt = script({"say": answer, "delay": 0.02})
    updates: list[Update] = []

    async def read() -> None:
        task = fold(updates).id if updates else None
        opened = (
            killed.caller.stream(prompt, message_id=message_id)
            if task is None
            else killed.caller.subscribe(task, after=updates[-1].id)
        )
        async with opened as following:
            try:
                await following.rest()
            finally:
                updates.extend(following.updates)

    while not updates or updates[-1].state != "completed":
        await killed.insist(read)
    task = await killed.insist(lambda: killed.caller.get(fold(updates).id))
    assert (task.state, task.text) == ("completed", answer)
    assert fold(updates).text == answer
    assert await killed.prompts(task) == 1


async def run_a_tool(killed: Workshop) -> None:
    name = uuid.uuid4().hex
    task = await killed.send(script(command(RUN, name), {"say": "done"}))
    task = await killed.insist(lambda: killed.caller.ended(task.id))
    assert (task.state, task.text) == ("completed", "done")
    assert [tool["status"] for tool in task.tools] == ["completed"]
    assert killed.ran(name) == ["ran"]
    assert await killed.prompts(task) == 1


async def approve_one_and_refuse_the_next(killed: Workshop) -> None:
    """I23: what nobody approved does not run, however often the approval of another is repeated."""
    wanted, unwanted = uuid.uuid4().hex, uuid.uuid4().hex
    prompt = script([command(ASKED, wanted)], [command(ASKED, unwanted)], [{"say": "done"}])
    first = await waiting_for(killed, await killed.send(prompt), wanted)
    second = await waiting_for(killed, await killed.send("yes", task=first.id), unwanted)
    assert killed.ran(wanted) == ["ran"]
    task = await killed.send("2 reject: not this one", task=second.id)
    task = await killed.insist(lambda: killed.caller.ended(task.id))

    assert (task.state, task.text) == ("completed", "done")
    assert [tool["status"] for tool in task.tools] == ["completed", "error"]
    assert killed.ran(wanted) == ["ran"]
    assert killed.ran(unwanted) == []


async def waiting_for(killed: Killed, task: Task, name: str) -> Task:
    """Wait until the task asks about this command."""

    def asks(task: Task) -> bool:
        return task.state == "input_required" and name in str(task.interrupt["details"])

    async def read() -> Task:
        found = await killed.caller.get(task.id)
        while not asks(found):
            assert found.state in ("working", "input_required"), found.raw
            async with killed.caller.subscribe(task.id) as following:
                await following.until(lambda update: update.state == "input_required")
            found = await killed.caller.get(task.id)
        return found

    return await killed.insist(read)


async def tell_a_webhook(killed: Killed, chance: random.Random) -> None:
    """I21: every change of state is told, in order; what is told twice has the same id."""
    async with receiving() as receiver:
        name = uuid.uuid4().hex
        # An earlier receiver, which the service may not know to be gone, can have had this port.
        config: JsonObject = {"url": f"{receiver.url}/{name}", "id": "c"}

        def heard(it: Receiver) -> list[Received]:
            return [one for one in it.received if one.path.endswith(name)]

        sent = killed.caller.message(script([command(ASKED, name)], [{"say": "done"}]))
        sent["configuration"] = {"returnImmediately": True, "taskPushNotificationConfig": config}
        receiver.answers.extend((chance.choice([204, 503]), {"retry-after": "1"}) for _ in range(4))

        async def send() -> str:
            return (await killed.caller.ask("send", sent)).task["id"]

        task = await killed.insist(send)
        await receiver.until(lambda it: any(one.state == "input_required" for one in heard(it)))
        await killed.send("yes", task=task)
        await receiver.until(lambda it: any(one.state in ENDS for one in heard(it)))

    told = heard(receiver)
    every = [one.state for one in told]
    states = [state for at, state in enumerate(every) if every[at - 1 : at] != [state]]
    expected = ["working", "input_required", "working", "completed"]
    assert states == expected
    assert in_order(told)


@pytest.mark.both_drivers
@pytest.mark.requirement("I21")
@pytest.mark.requirement("I23")
async def test_nothing_is_lost_or_approved_when_the_service_is_killed(killed: Workshop) -> None:
    chance = random.Random(SEED)  # noqa: S311 - no secret
    for _ in range(KILLS):
        async with asyncio.TaskGroup() as group:
            group.create_task(follow_a_text(killed))
            group.create_task(run_a_tool(killed))
            group.create_task(approve_one_and_refuse_the_next(killed))
            group.create_task(tell_a_webhook(killed, chance))
            group.create_task(killed.kill(chance.uniform(0.0, 2.0)))

    # Every turn is in the budget, once.
    used = (await killed.caller.method("opencode.budget.get"))["tokens"]
    assert used == await killed.tokens()


def in_order(told: Sequence[Received]) -> bool:
    """Whether all are of one webhook, in order, and alike where they are repeated."""
    seqs = [one.seq for one in told]
    bodies = {(one.id, one.body) for one in told}
    return seqs == sorted(seqs) and len({one.id for one in told}) == len(bodies) == len({*seqs})


CONVERSATIONS = 3
"""Tasks that tell their webhooks at the same time."""


async def converse(killed: Killed, receiver: Receiver, name: str) -> str:
    """Have a task whose changes are told, all that it has; return its id."""

    def told(receiver: Receiver) -> list[str]:
        return [one.state for one in receiver.received if one.path.endswith(name)]

    sent = killed.caller.message("run it")
    config: JsonObject = {"url": f"{receiver.url}/{name}"}
    sent["configuration"] = {"returnImmediately": True, "taskPushNotificationConfig": config}

    async def send() -> str:
        return (await killed.caller.ask("send", sent)).task["id"]

    task = await killed.insist(send)
    await receiver.until(lambda it: "input_required" in told(it))
    await killed.send("once", task=task)
    await receiver.until(lambda it: told(it)[-1:] == ["completed"])
    return task


async def changes(database: Database, task_id: str) -> list[int]:
    """Return the numbers of the entries of a stored log that change the state of a task."""

    def find(connection: Connection) -> TaskRow | None:
        no = connection.scalar(sa.select(tasks.c.no).where(tasks.c.id == task_id))
        return task_rows.load_by_number(connection, no or 0)

    row = await database.read(find)
    assert row is not None
    replay, found = Replay(database, row.no, ref_of(row)), list[int]()
    while entries := await replay.next(replay.state.seq):
        found += [entry.seq for entry in entries if entry.changes_state]
    return found


@pytest.mark.requirement("I21")
async def test_no_change_is_kept_from_a_webhook_when_the_service_is_killed(tmp_path: Path) -> None:
    """Kills before an answer, after it, while it is stored, and at any time."""
    chance = random.Random(SEED)  # noqa: S311 - no secret
    (workspace := tmp_path / "workspace").mkdir()
    ended: dict[str, str] = {}
    over = False

    async with FakeOpenCode(workspace).running() as opencode, receiving() as receiver:
        opencode.play("permission-once")
        variables = variables_for(opencode, tmp_path, A2A_PUSH_ALLOW_PRIVATE_HOSTS="true")
        async with ForkedProgram(variables) as program:
            killed = Killed(program)

            async def talk() -> None:
                while not over:
                    name = uuid.uuid4().hex
                    ended[name] = await converse(killed, receiver, name)
                    refused = (503, {"retry-after": "1"})
                    receiver.answers.extend([refused] * chance.choice([0, 0, 0, 1]))

            async with asyncio.TaskGroup() as group:
                for _ in range(CONVERSATIONS):
                    group.create_task(talk())
                for _ in range(KILLS):
                    moment = asyncio.Event()
                    match chance.choice(["asked", "answered", "any"]):
                        case "asked":
                            receiver.asked = moment.set
                        case "answered":
                            receiver.answered = moment.set
                        case _:
                            moment.set()
                    async with asyncio.timeout(PATIENCE):
                        await moment.wait()
                    await killed.kill(
                        chance.choice([0.0, chance.uniform(0, 0.02), chance.random()])
                    )
                over = True
            await program.stop()

    async with Database(stores.url(tmp_path)) as database:
        for name, task in ended.items():
            told = [one for one in receiver.received if one.path.endswith(name)]
            assert in_order(told)
            assert list(dict.fromkeys(one.seq for one in told)) == await changes(database, task)
    assert len(ended) >= CONVERSATIONS
