"""What is left of tasks when the service is stopped and started again."""

import asyncio
import sqlite3
import uuid
from collections.abc import Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import httpx2
import pytest
import sqlalchemy as sa
from structlog.testing import capture_logs

from opencode_a2a.cluster.ownership import Ownership
from opencode_a2a.config import InterruptSettings
from opencode_a2a.errors import SessionNotFoundError, UpstreamUnreachableError
from opencode_a2a.events import JsonObject
from opencode_a2a.ids import SessionId
from opencode_a2a.log.log import TaskLog
from opencode_a2a.log.state import LogEvent
from opencode_a2a.opencode.client import OpenCode1
from opencode_a2a.store.database import Database, Write
from opencode_a2a.store.schema import tasks
from opencode_a2a.tasks import recovery
from opencode_a2a.tasks.open import OpenTask, OpenTasks
from opencode_a2a.turns.interrupts import WorkInterrupts
from opencode_a2a.turns.job import Log
from opencode_a2a.turns.sessions import Sessions, TurnLock, TurnSession
from opencode_a2a.turns.shared_interrupts import SharedInterrupts
from opencode_a2a.turns.turn import Turn
from tests.support import stores
from tests.support.answers import UNSUPPORTED, Answer, RefusedError, Update, Wire, fold
from tests.support.caller import Caller
from tests.support.front import started
from tests.support.opencode import FakeOpenCode
from tests.support.replicas import until

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.both_databases]

FIRST_SCHEMA = Path(__file__).parent.parent / "support" / "schema-1.sql"
STORED = {"A2A_TASK_STORE_BACKEND": "database"}


@pytest.mark.requirement("I1")
@pytest.mark.requirement("I4")
@pytest.mark.requirement("I6")
async def test_a_damaged_task_is_named_and_left_out_of_the_list(
    opencode: FakeOpenCode, tmp_path: Path
) -> None:
    lasting = {"A2A_TASK_STORE_BACKEND": "database"}
    async with started(opencode, tmp_path, **lasting) as service:
        sent = [(await Caller(service).send("hello")).id for _ in range(3)]

    def damage(connection: sa.Connection) -> None:
        values = {"status": b"{", "archive": b"{"}
        connection.execute(tasks.update().where(tasks.c.id == sent[1]).values(values))

    async with Database(stores.url(tmp_path)) as database:
        await database.write(damage)
    with capture_logs() as records:
        async with started(opencode, tmp_path, **lasting) as service:
            listed = await Caller(service).answer("ListTasks", {})

    assert {task["id"] for task in listed["result"]["tasks"]} == {sent[0], sent[2]}
    assert [one["row"] for one in records if one["event"] == "task could not be read"] == [sent[1]]


async def test_an_ended_task_is_the_same_after_a_restart(
    opencode: FakeOpenCode, tmp_path: Path
) -> None:
    opencode.play("tool-completed")
    streams: dict[Wire, list[Update]] = {}
    async with started(opencode, tmp_path, **STORED) as service:
        for wire in Wire:
            name = f"kept {wire.value}"
            async with Caller(service, wire).stream("run it", message_id=name) as following:
                streams[wire] = await following.rest()
        before = {wire: await Caller(service, wire).get(_id(streams[wire])) for wire in Wire}

    async with started(opencode, tmp_path, **STORED) as service:
        for wire, updates in streams.items():
            caller = Caller(service, wire)
            task = before[wire]
            assert (await caller.get(task.id)).raw == task.raw
            again = await caller.send("run it", message_id=f"kept {wire.value}")
            assert (again.id, again.text) == (task.id, task.text)
            middle = len(updates) // 2
            async with caller.subscribe(task.id, updates[middle].id) as following:
                rest = await following.rest()
            assert [u.id for u in rest] == [u.id for u in updates[middle + 1 :]]
            assert fold([*updates[: middle + 1], *rest]).text == task.text
            more = await caller.send("run it", context=task.context_id)
            assert more.session_id == task.session_id

    assert len(opencode.prompts) == 2 * len(Wire)


@pytest.mark.requirement("I6")
@pytest.mark.parametrize("waits", ["for a sign-in", "for a go"])
async def test_a_message_that_ends_a_pause_is_not_lost_in_a_crash_before_its_turn(
    opencode: FakeOpenCode, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, waits: str
) -> None:
    planned = {"opencode": {"plan": True}} if waits == "for a go" else None
    opencode.agents[:] = [{"name": name, "mode": "primary"} for name in ("build", "plan")]
    opencode.play("plain-text" if planned else "error-401")
    async with started(opencode, tmp_path, **STORED) as service:
        caller = Caller(service)
        paused = await caller.send("do it", metadata=planned)

        async def crash(turn: Turn, log: Log) -> None:
            await asyncio.get_running_loop().create_future()

        monkeypatch.setattr(Turn, "run", crash)
        await caller.begin("go", task=paused.id, message_id="m")
    monkeypatch.undo()
    opencode.play("plain-text")
    prompts = len(opencode.prompts)
    async with started(opencode, tmp_path, **STORED) as service:
        ended = await Caller(service).ended(paused.id)
        again = await Caller(service).send("go", task=paused.id, message_id="m")
    opencode.agents.clear()

    assert paused.state == ("input_required" if planned else "auth_required")
    assert (ended.state, ended.text) == ("completed", "one two three four")
    assert (again.raw, len(opencode.prompts) - prompts) == (ended.raw, 1)


@pytest.mark.sqlite_only
@pytest.mark.requirement("I6")
async def test_a_plan_that_a_word_cancels_is_canceled_or_not_answered_after_a_crash(
    opencode: FakeOpenCode, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opencode.agents[:] = [{"name": name, "mode": "primary"} for name in ("build", "plan")]
    async with started(opencode, tmp_path, **STORED) as service:
        caller = Caller(service)
        waiting = await caller.send("do it", metadata={"opencode": {"plan": True}})
        append = TaskLog.append

        async def crash(
            log: TaskLog, events: Sequence[LogEvent], in_same_commit: Write | None = None
        ) -> bool:
            await append(log, events, in_same_commit)
            raise ConnectionAbortedError

        monkeypatch.setattr(TaskLog, "append", crash)
        await caller.ask("send", caller.message("cancel", taskId=waiting.id))
    monkeypatch.undo()
    async with started(opencode, tmp_path, **STORED) as service:
        found = await Caller(service).get(waiting.id)
    opencode.agents.clear()

    assert (found.state, found.history) == ("canceled", ["do it", "cancel"])


@pytest.mark.sqlite_only
@pytest.mark.requirement("I1")
@pytest.mark.requirement("I6")
async def test_a_database_of_the_first_schema_is_upgraded(
    opencode: FakeOpenCode, tmp_path: Path
) -> None:
    with closing(sqlite3.connect(tmp_path / "tasks.db")) as connection:
        connection.executescript(FIRST_SCHEMA.read_text())

    for _ in range(2):
        async with started(opencode, tmp_path, **STORED) as service:
            caller = Caller(service)
            again = await caller.send("hello", message_id="m")
            other = await caller.send("not hello", message_id="m")

            assert (again.state, again.text) == ("completed", "one two three four")
            assert (await caller.get(again.id)).raw == again.raw
            assert other.id != again.id

    assert len(opencode.prompts) == 1


@pytest.mark.sqlite_only
@pytest.mark.requirement("I6")
@pytest.mark.parametrize(
    "damage",
    [
        "UPDATE tasks SET request = CAST('{}' AS BLOB) WHERE id = ?",
        "UPDATE interrupts SET asked = CAST('{}' AS BLOB) WHERE task_id = ?",
        "UPDATE entries SET data = CAST('x' AS BLOB) WHERE task_no ="
        " (SELECT no FROM tasks WHERE id = ?)",
    ],
    ids=["request", "interrupt", "log"],
)
async def test_a_task_that_cannot_be_read_ends_and_the_others_go_on(
    opencode: FakeOpenCode, tmp_path: Path, damage: str
) -> None:
    opencode.play("permission-once")
    async with started(opencode, tmp_path, **STORED) as service:
        unreadable, other = [await Caller(service).send("run it") for _ in range(2)]
    with closing(sqlite3.connect(tmp_path / "tasks.db")) as connection, connection:
        assert connection.execute(damage, (unreadable.id,)).rowcount

    with capture_logs() as records:
        async with started(opencode, tmp_path, **STORED) as service:
            caller = Caller(service)
            lost = await caller.ended(unreadable.id)
            answered = await caller.send("yes", task=other.id)
    opencode.leave()

    assert (lost.state, lost.error_type) == ("failed", "REQUEST_LOST")
    assert answered.state == "completed"
    assert [one["task_id"] for one in records if one["event"] == "task could not be read"] == [
        unreadable.id
    ]
    async with started(opencode, tmp_path, **STORED) as service:  # it has ended for good
        assert (await Caller(service).get(unreadable.id)).raw == lost.raw


@pytest.mark.requirement("I9")
async def test_a_locked_database_holds_nobody_for_long(
    opencode: FakeOpenCode, tmp_path: Path
) -> None:
    async with started(opencode, tmp_path, **STORED) as service:
        known = await Caller(service).send("before")
        caller = Caller(service, Wire.REST)
        with stores.locked(tmp_path):

            async def send(number: int) -> Answer:
                await asyncio.sleep(number / 15)  # some come while others are waiting already
                # Together they wait for 1.5 to 3 s; one after the other it would be a minute.
                async with asyncio.timeout(40):
                    return await caller.ask("send", caller.message(f"message {number}"))

            answers = await asyncio.gather(*(send(number) for number in range(40)))
            read = await Caller(service).get(known.id)
        after = await Caller(service).send("after")

    assert {answer.status for answer in answers} == {503}
    assert all(b'"TASK_STORE_UNAVAILABLE"' in answer.content for answer in answers)
    assert read.raw == known.raw
    assert after.state == "completed"
    assert len(opencode.prompts) == 2


async def test_many_background_tasks_all_end(opencode: FakeOpenCode, tmp_path: Path) -> None:
    async with started(opencode, tmp_path, **STORED) as service:
        caller = Caller(service)
        contexts = [str(uuid.uuid4()) for _ in range(20)]
        begun = [
            await caller.begin(f"message {n}", context=contexts[n % 20], message_id=f"many {n}")
            for n in range(80)
        ]

        ended = [await caller.ended(task.id) for task in begun]

    assert [(task.state, task.text) for task in ended] == [("completed", "one two three four")] * 80
    for place in range(20):
        wanted = [f"message {n}" for n in range(80) if n % 20 == place]
        assert [text for text in opencode.texts if text in wanted] == wanted


def _id(updates: list[Update]) -> str:
    assert updates[0].task is not None
    return updates[0].task.id


@pytest.mark.requirement("ours-output-modes")
async def test_output_modes_outlive_the_service(opencode: FakeOpenCode, tmp_path: Path) -> None:
    opencode.play("tool-completed")
    tasks: dict[Wire, str] = {}
    async with started(opencode, tmp_path, **STORED) as service:
        for wire in Wire:
            caller = Caller(service, wire)
            params = caller.message("run it")
            params["configuration"] = {"acceptedOutputModes": ["text/plain"]}
            tasks[wire] = (await caller.ask("send", params)).task["id"]

    async with started(opencode, tmp_path, **STORED) as service:
        for wire, task_id in tasks.items():
            task = await Caller(service, wire).get(task_id)
            parts = [part for artifact in task.artifacts for part in artifact["parts"]]
            assert parts
            assert all("data" not in part for part in parts)


@pytest.mark.requirement("I1")
@pytest.mark.requirement("I5")
@pytest.mark.requirement("I14")
async def test_a_stopped_service_tells_its_readers_and_takes_the_turn_up_again(
    opencode: FakeOpenCode, tmp_path: Path
) -> None:
    hold = opencode.hold(count=2)
    wire = Wire.RPC
    async with httpx2.AsyncClient(trust_env=False) as http:
        async with started(opencode, tmp_path, **STORED) as service:
            caller = Caller(service, wire)
            caller.http = http
            body = caller.encode("stream", caller.message("hello"))
            stream = asyncio.create_task(caller.post(body, service.url))
            async with asyncio.timeout(60):
                await hold.reached.wait()
        answer = await stream
    frames = answer.content.decode().strip().split("\n\n")
    assert "STREAM_ENDED" in frames[-1]
    ids = [line[4:] for line in answer.content.decode().splitlines() if line.startswith("id: ")]

    async with started(opencode, tmp_path, **STORED) as service:
        caller = Caller(service, wire)
        listed = (await Caller(service, wire).ask("list", {})).result
        (task,) = listed["tasks"]
        async with caller.subscribe(task["id"], ids[-1]) as following:
            # Nobody has heard what OpenCode may have said meanwhile.
            await following.until(lambda update: "'held'" in str(update.progress))
            opencode.release()
            updates = await following.rest()
        ended = await caller.get(task["id"])

    assert updates[-1].state == "completed"
    assert (ended.state, ended.text) == ("completed", "one two three four")
    assert len(opencode.prompts) == 1


@pytest.mark.requirement("I4")
@pytest.mark.sqlite_only
async def test_text_of_a_turn_that_ended_meanwhile_is_whole_though_opencode_fails_once(
    opencode: FakeOpenCode, tmp_path: Path
) -> None:
    hold = opencode.hold()
    async with started(opencode, tmp_path, **STORED) as service:
        task = await Caller(service).begin("hello")
        async with asyncio.timeout(60):
            await hold.reached.wait()
    opencode.release()
    await opencode.idle()
    # The first list is read together with the messages, the second to be sure of the end.
    opencode.statuses_before_failure = 1

    async with started(opencode, tmp_path, **STORED) as service:
        ended = await Caller(service).ended(task.id)

    assert opencode.statuses_before_failure is None
    assert (ended.state, ended.text) == ("completed", "one two three four")


@pytest.mark.requirement("I23")
async def test_what_an_always_settles_while_the_service_is_away_is_not_forged(
    opencode: FakeOpenCode, tmp_path: Path
) -> None:
    opencode.play("permission-two-parallel-always-first")
    hold = opencode.hold("permission.replied", 2)
    settings = {**STORED, "A2A_ALLOW_ALWAYS": "true", "A2A_CONSOLE_ANSWERS": "false"}
    async with started(opencode, tmp_path, **settings) as service:
        caller = Caller(service)
        begun = await caller.begin("run both")
        async with caller.subscribe(begun.id) as following:
            await following.until(lambda update: "2 requests" in str(update.raw))
        second = [one["request_id"] for one in (await _pending(caller)) if one["number"] == 2]
        await caller.begin("1 always", task=begun.id)

    # OpenCode settles the other one by itself, and goes on.
    async with httpx2.AsyncClient(trust_env=False) as http:
        await http.post(f"{opencode.url}/permission/{second[0]}/reply", json={"reply": "always"})
    await hold.reached.wait()
    async with started(opencode, tmp_path, **settings) as service:
        caller = Caller(service)
        await caller.wait(begun.id, "working")
        opencode.release()
        ended = await caller.ended(begun.id)

    assert (ended.state, ended.error_type) == ("completed", None)


def crashing(
    monkeypatch: pytest.MonkeyPatch, request: int = 1, *, stored: bool = False
) -> asyncio.Event:
    """Stop the service where it settles its nth interrupt, before or after that is stored."""
    crashed, settle, settled = asyncio.Event(), SharedInterrupts.store_settled, list[object]()

    async def crash(interrupts: SharedInterrupts, *how: Any) -> Any:
        settled.append(how)
        result = None
        if len(settled) < request or stored:
            result = await settle(interrupts, *how)
        if len(settled) == request:
            crashed.set()
            await asyncio.get_running_loop().create_future()
        return result

    monkeypatch.setattr(SharedInterrupts, "store_settled", crash)
    return crashed


@pytest.mark.sqlite_only
@pytest.mark.requirement("I6")
async def test_the_database_is_named_if_it_goes_away_after_opencode_has_confirmed_an_answer(
    opencode: FakeOpenCode, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opencode.play("permission-once")
    locks, confirmed, settle = ExitStack(), asyncio.Event(), SharedInterrupts.store_settled

    async def lock_and_settle(interrupts: SharedInterrupts, *how: Any) -> Any:
        locks.enter_context(stores.locked(tmp_path))
        confirmed.set()
        return await settle(interrupts, *how)

    async def wait(event: asyncio.Event, _: float) -> bool:
        """Wait in vain, but no longer than the test needs."""
        if not event.is_set():
            await confirmed.wait()
        return event.is_set()

    async with started(opencode, tmp_path, **STORED) as service:
        caller = Caller(service, Wire.REST)
        asked = await caller.send("run it")
        monkeypatch.setattr(SharedInterrupts, "store_settled", lock_and_settle)
        monkeypatch.setattr("opencode_a2a.turns.interrupts.wait", wait)
        yes = caller.message("yes", taskId=asked.id)
        with locks:
            refused = await caller.ask("send", yes)
        monkeypatch.undo()
        again = await caller.ask("send", yes)
        ended = await caller.ended(asked.id)

    assert (refused.status, again.status) == (503, 200)
    assert b'"TASK_STORE_UNAVAILABLE"' in refused.content
    assert (ended.state, ended.history) == ("completed", ["run it", "yes"])


@pytest.mark.sqlite_only
@pytest.mark.requirement("I15")
@pytest.mark.parametrize("answered_by", ["rule", "bearer"])
async def test_an_interrupt_leaves_one_record_if_the_service_dies_when_it_is_settled(
    opencode: FakeOpenCode, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answered_by: str
) -> None:
    opencode.play("permission-once")
    by_rule, settings = answered_by == "rule", {**STORED, "A2A_CONSOLE_ANSWERS": "false"}
    if by_rule:
        settings["A2A_PERMISSION_RULES"] = '[{"permission": "bash", "action": "allow"}]'
    crashed = crashing(monkeypatch, stored=not by_rule)
    with capture_logs() as records:
        async with started(opencode, tmp_path, **settings) as service:
            caller = Caller(service)
            begun = await caller.begin("run it")
            answering: list[asyncio.Task[Answer]] = []
            if not by_rule:
                await caller.wait(begun.id, "input_required")
                yes = caller.message("yes", taskId=begun.id)
                answering.append(asyncio.create_task(caller.ask("send", yes)))
            await crashed.wait()
        await asyncio.gather(*answering, return_exceptions=True)
        monkeypatch.undo()
        async with started(opencode, tmp_path, **settings) as service:
            ended = await Caller(service).ended(begun.id)

    settled = [one for one in records if one["event"] == "interrupt settled"]
    assert [(one["resolution"], one["by"].split(":")[0]) for one in settled] == [
        ("once", answered_by)
    ]
    assert (ended.state, ended.error_type) == ("completed", None)
    assert ended.history == (["run it"] if by_rule else ["run it", "yes"])


@pytest.mark.sqlite_only
@pytest.mark.requirement("I23")
async def test_what_a_refusal_settles_while_the_service_is_away_is_not_forged(
    opencode: FakeOpenCode, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opencode.play("permission-two-parallel-reject-first")
    hold = opencode.hold("permission.replied", 2)
    settings = {**STORED, "A2A_CONSOLE_ANSWERS": "false"}
    crashed = crashing(monkeypatch, request=2)
    async with started(opencode, tmp_path, **settings) as service:
        caller = Caller(service)
        begun = await caller.begin("run both")
        async with caller.subscribe(begun.id) as following:
            await following.until(lambda update: "2 requests" in str(update.raw))
        second = [one["request_id"] for one in (await _pending(caller)) if one["number"] == 2]
        await caller.begin("1 no", task=begun.id)
        # OpenCode refuses the other one by itself, and goes on.
        async with httpx2.AsyncClient(trust_env=False) as http:
            await http.post(f"{opencode.url}/permission/{second[0]}/reply", json={})
        await crashed.wait()
    monkeypatch.undo()
    await hold.reached.wait()
    async with started(opencode, tmp_path, **settings) as service:
        caller = Caller(service)
        await caller.wait(begun.id, "working")
        opencode.release()
        ended = await caller.ended(begun.id)

    assert (ended.state, ended.error_type) == ("rejected", "UPSTREAM_REQUEST_REJECTED")


async def _pending(caller: Caller) -> list[Any]:
    return (await caller.method("opencode.permissions.list"))["items"]


def answer_waiting(monkeypatch: pytest.MonkeyPatch) -> asyncio.Event:
    """Return an event that is set when an answer waits for its turn to be taken up again."""
    waits, wait_connected = asyncio.Event(), WorkInterrupts._wait_connected  # noqa: SLF001 # pyright: ignore[reportPrivateUsage]

    async def wait(interrupts: WorkInterrupts) -> None:
        waits.set()
        await wait_connected(interrupts)

    monkeypatch.setattr(WorkInterrupts, "_wait_connected", wait)
    return waits


@pytest.mark.sqlite_only
@pytest.mark.requirement("I6")
@pytest.mark.requirement("I15")
async def test_an_answer_whose_response_was_lost_is_not_replaced_by_a_contrary_one(
    opencode: FakeOpenCode, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opencode.play("permission-once")
    opencode.lost.add("RequestSettled")
    hold = opencode.hold("permission.replied")
    crashed = crashing(monkeypatch)
    with capture_logs() as records:
        async with started(opencode, tmp_path, **STORED) as service:
            caller = Caller(service)
            asked = await caller.send("run it")
            opencode.loses_reply = True
            with pytest.raises(RefusedError, match="UPSTREAM_UNREACHABLE"):
                await caller.begin("yes", task=asked.id, message_id="first")
            await hold.reached.wait()
            no = asyncio.create_task(caller.begin("no", task=asked.id, message_id="second"))
            await crashed.wait()
        await asyncio.gather(no, return_exceptions=True)
        monkeypatch.undo()
        async with started(opencode, tmp_path, **STORED) as service:
            caller = Caller(service)
            await caller.wait(asked.id, "working")
            opencode.release()
            ended = await caller.ended(asked.id)

    settled = [one["resolution"] for one in records if one["event"] == "interrupt settled"]
    assert (settled, ended.state) == (["once"], "completed")
    assert [message["messageId"] for message in ended.raw["history"]][1:] == ["first"]


@pytest.mark.requirement("I6")
@pytest.mark.requirement("I23")
async def test_a_second_answer_just_after_a_restart_finds_the_request_settled_by_the_first(
    opencode: FakeOpenCode, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opencode.play("permission-once")
    hold = opencode.hold("permission.replied")
    connect = asyncio.Event()
    settings = {**STORED, "A2A_CONSOLE_ANSWERS": "false"}

    async def lose(*_: object) -> None:
        raise UpstreamUnreachableError

    async with started(opencode, tmp_path, **settings) as service:
        caller = Caller(service)
        asked = await caller.send("run it")
        (request,) = await _pending(caller)
        monkeypatch.setattr(SharedInterrupts, "reply", lose)
        with pytest.raises(RefusedError, match="UPSTREAM_UNREACHABLE"):
            await caller.begin("yes", task=asked.id, message_id="first")
    monkeypatch.undo()
    # OpenCode has taken it, and the service did not live to hear so.
    async with httpx2.AsyncClient(trust_env=False) as http:
        path = f"/permission/{request['request_id']}/reply"
        await http.post(f"{opencode.url}{path}", json={"reply": "once"})
    await hold.reached.wait()

    waits = answer_waiting(monkeypatch)
    opencode.held_session = connect
    async with started(opencode, tmp_path, **settings) as service:
        caller = Caller(service)
        second = asyncio.create_task(caller.begin("no", task=asked.id, message_id="second"))
        await waits.wait()
        connect.set()
        with pytest.raises(RefusedError, match="INTERRUPT_REQUEST_NOT_FOUND"):
            await second
        opencode.release()
        ended = await caller.ended(asked.id)

    assert (ended.state, ended.error_type) == ("completed", None)
    assert [message["messageId"] for message in ended.raw["history"]][1:] == ["first"]


@pytest.mark.requirement("I6")
async def test_the_turns_of_a_session_go_on_in_their_order_after_a_restart(
    opencode: FakeOpenCode, tmp_path: Path
) -> None:
    hold = opencode.hold(count=2)
    async with started(opencode, tmp_path, **STORED) as service:
        caller = Caller(service)
        first = await caller.begin("one")
        await hold.reached.wait()
        async with caller.stream("two", context=first.context_id) as following:
            await following.until(lambda update: "queue" in str(update.progress))
        second, seen = following.task, following.updates[-1].id

    slow = opencode.held_session = asyncio.Event()
    async with started(opencode, tmp_path, **STORED) as service:
        caller = Caller(service)
        async with caller.subscribe(second.id, seen) as following:
            taken_up = await following.until(
                lambda update: update.state == "working" or "queue" in str(update.progress)
            )
        slow.set()
        opencode.release()
        ended = [await caller.ended(one.id) for one in (first, second)]

    assert taken_up.state == "submitted"
    assert opencode.texts == ["one", "two"]
    assert [one.state for one in ended] == ["completed", "completed"]


@pytest.mark.sqlite_only
@pytest.mark.requirement("I3")
async def test_turns_from_before_a_restart_go_on_whatever_the_limit_of_turns_is_now(
    opencode: FakeOpenCode, tmp_path: Path
) -> None:
    hold = opencode.hold(count=2)
    async with started(opencode, tmp_path, **STORED) as service:
        caller = Caller(service)
        tasks = [await caller.begin("hello") for _ in range(2)]
        await opencode.prompted(2)
        await hold.reached.wait()

    async with started(
        opencode, tmp_path, **STORED, OPENCODE_MAX_CONCURRENT_STREAMS="1"
    ) as service:
        caller = Caller(service)
        refused = await caller.send("one more")
        opencode.release()
        ended = [await caller.ended(task.id) for task in tasks]

    assert [task.state for task in ended] == ["completed", "completed"]
    assert refused.error_type == "UPSTREAM_BACKPRESSURE"
    assert (opencode.texts, opencode.at_work) == (["hello", "hello"], False)


@pytest.mark.sqlite_only
@pytest.mark.requirement("I3")
async def test_a_turn_that_the_settings_no_longer_allow_is_stopped_in_opencode(
    opencode: FakeOpenCode, tmp_path: Path
) -> None:
    (opencode.workspace / "below").mkdir()
    hold = opencode.hold(count=2)
    async with started(opencode, tmp_path, **STORED) as service:
        directory = {"opencode": {"directory": "below"}}
        begun = await Caller(service).begin("hello", metadata=directory)
        await hold.reached.wait()

    settings = {**STORED, "A2A_ALLOW_DIRECTORY_OVERRIDE": "false"}
    async with started(opencode, tmp_path, **settings) as service:
        ended = await Caller(service).ended(begun.id)
        at_work = opencode.at_work

    assert (ended.state, at_work) == ("failed", False)


@pytest.mark.sqlite_only
@pytest.mark.requirement("I5")
async def test_an_answer_to_a_turn_that_cannot_be_taken_up_again_is_refused_at_once(
    opencode: FakeOpenCode, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("opencode_a2a.turns.interrupts.CONNECT_SECONDS", 600)
    opencode.play("permission-once")
    async with started(opencode, tmp_path, **STORED) as service:
        asked = await Caller(service).send("run it")

    waits = answer_waiting(monkeypatch)

    async def bind(*_: object, **__: object) -> None:
        await waits.wait()
        raise SessionNotFoundError

    monkeypatch.setattr(Sessions, "bind", bind)
    async with started(opencode, tmp_path, **STORED) as service:
        caller = Caller(service)
        async with asyncio.timeout(60):
            with pytest.raises(RefusedError, match="INTERRUPT_REQUEST_NOT_FOUND"):
                await caller.begin("yes", task=asked.id)
        ended = await caller.ended(asked.id)
    opencode.leave()

    assert (ended.state, ended.error_type) == ("failed", "SESSION_NOT_FOUND")


@pytest.mark.requirement("I6")
async def test_a_further_message_that_was_refused_is_not_sent_after_a_restart(
    opencode: FakeOpenCode, tmp_path: Path
) -> None:
    opencode.refusing.add("more")
    hold = opencode.hold(count=2)
    async with started(opencode, tmp_path, **STORED) as service:
        caller = Caller(service)
        async with caller.stream("hello") as following:
            await hold.reached.wait()
            await following.until_state("working")
            await caller.begin("more", task=following.task.id)
            await following.until(lambda update: "refused" in str(update.progress))

    async with started(opencode, tmp_path, **STORED) as service:
        opencode.release()
        ended = await Caller(service).ended(following.task.id)

    prompts: list[Any] = [*opencode.prompts]
    assert ended.state == "completed"
    assert [prompt["parts"][0]["text"] for prompt in prompts] == ["hello", "more"]


@pytest.mark.sqlite_only
@pytest.mark.requirement("I7")
@pytest.mark.requirement("I15")
@pytest.mark.parametrize("opencode_is", ["there", "away", "at another turn of the session"])
async def test_a_cancel_before_a_turn_is_taken_up_again_stops_it_in_opencode(
    opencode: FakeOpenCode, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, opencode_is: str
) -> None:
    opencode.play("permission-once")
    async with started(opencode, tmp_path, **STORED) as service:
        asked = await Caller(service).send("run it")

    other = TurnLock()
    if opencode_is == "at another turn of the session":
        await other.acquire()

    async def bind(*_: object, **__: object) -> None:
        await asyncio.get_running_loop().create_future()

    run = Turn.run

    async def run_after_other(turn: Turn, log: Log) -> None:
        turn.shared.sessions.turn_locks[SessionId(asked.session_id)] = other
        await run(turn, log)

    monkeypatch.setattr(Sessions, "bind", bind)
    monkeypatch.setattr(Turn, "run", run_after_other)
    monkeypatch.setattr(InterruptSettings, "cancel_abort_timeout_seconds", 0.5)
    settings = dict(STORED)
    if opencode_is == "away":
        settings["OPENCODE_BASE_URL"] = "http://127.0.0.1:9"
    with capture_logs() as records:
        async with started(opencode, tmp_path, **settings) as service:
            canceled = await Caller(service).cancel(asked.id)
            at_work = opencode.at_work
    opencode.leave()

    settled = [one["resolution"] for one in records if one["event"] == "interrupt settled"]
    assert (asked.state, canceled.state, settled) == ("input_required", "canceled", ["void"])
    stopped = opencode_is == "there"
    assert canceled.error_type == (None if stopped else "UPSTREAM_ABORT_UNCONFIRMED")
    assert at_work != stopped


@pytest.mark.sqlite_only
@pytest.mark.requirement("I7")
@pytest.mark.parametrize("recording", ["permission-once", "tool-completed"])
async def test_a_cancel_is_completed_though_the_service_dies_after_it_told_opencode_to_stop(
    opencode: FakeOpenCode, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, recording: str
) -> None:
    opencode.play(recording)
    if recording != "permission-once":
        opencode.hold()
    told = asyncio.Event()

    monkeypatch.setattr(InterruptSettings, "cancel_abort_timeout_seconds", 600)
    abort = OpenCode1.abort_session

    async def abort_and_die(client: OpenCode1, session_id: SessionId) -> None:
        await abort(client, session_id)
        told.set()
        await asyncio.get_running_loop().create_future()

    async with started(opencode, tmp_path, **STORED) as service:
        caller = Caller(service)
        begun = await caller.begin("run it")
        await caller.wait(begun.id, "working", "input_required")
        monkeypatch.setattr(OpenCode1, "abort_session", abort_and_die)
        canceling = asyncio.create_task(caller.ask("cancel", {"id": begun.id}))
        async with asyncio.timeout(60):
            await told.wait()
    monkeypatch.undo()
    canceling.cancel()
    await asyncio.gather(canceling, return_exceptions=True)
    opencode.release()
    async with started(opencode, tmp_path, **STORED) as service:
        ended = await Caller(service).ended(begun.id)

    assert (ended.state, ended.error_type) == ("canceled", None)
    assert len(opencode.prompts) == 1


@pytest.mark.sqlite_only
@pytest.mark.requirement("I23")
async def test_a_doubled_yes_by_context_is_not_for_the_next_task_after_a_restart_either(
    opencode: FakeOpenCode, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("UNREAD_SECONDS", "SETTLED_SECONDS"):  # however slow the machine is
        monkeypatch.setattr(f"opencode_a2a.log.seen.{name}", 600.0)
    opencode.play("permission-once")
    async with started(opencode, tmp_path, **STORED) as service:
        caller = Caller(service)
        first = await caller.send("run it")
        beside: JsonObject = {"opencode": {"new_task": True}}
        queued = await caller.begin("run it", context=first.context_id, metadata=beside)
        done = await caller.send("yes", context=first.context_id)
        await caller.wait(queued.id, "input_required")

    async with started(opencode, tmp_path, **STORED) as service:
        caller = Caller(service)
        doubled = await caller.ask("send", caller.message("yes", contextId=first.context_id))
        left = await caller.get(queued.id)
        read = await caller.send("yes", task=queued.id)  # it says what it is for

    assert (done.id, done.state) == (first.id, "completed")
    doubled.refuses(UNSUPPORTED)
    assert (left.state, left.history) == ("input_required", ["run it"])
    assert (read.id, read.state) == (queued.id, "completed")


@pytest.mark.sqlite_only
@pytest.mark.requirement("I3")
async def test_a_fault_while_a_turn_is_taken_up_again_stops_it_in_opencode(
    opencode: FakeOpenCode, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opencode.play("permission-once")
    async with started(opencode, tmp_path, **STORED) as service:
        asked = await Caller(service).send("run it")

    async def fail(*_: object, **__: object) -> None:
        raise LookupError

    monkeypatch.setattr(Sessions, "bind", fail)
    async with started(opencode, tmp_path, **STORED) as service:
        failed = await Caller(service).ended(asked.id)
        at_work = opencode.at_work

    assert (failed.state, failed.error_type, at_work) == ("failed", "INTERNAL_ERROR", False)


@pytest.mark.sqlite_only
@pytest.mark.requirement("I7")
async def test_a_queued_task_that_is_canceled_after_a_restart_does_not_stop_the_one_before_it(
    opencode: FakeOpenCode, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hold = opencode.hold(count=2)
    async with started(opencode, tmp_path, **STORED) as service:
        caller = Caller(service)
        first = await caller.begin("hello")
        await hold.reached.wait()
        async with caller.stream("hello", context=first.context_id) as following:
            await following.until(lambda update: "queue" in str(update.progress))

    binding, bind = asyncio.Event(), Sessions.bind

    async def bind_later(self: Sessions, *place: Any, **how: Any) -> TurnSession:
        await binding.wait()
        return await bind(self, *place, **how)

    monkeypatch.setattr(Sessions, "bind", bind_later)
    async with started(opencode, tmp_path, **STORED) as service:
        caller = Caller(service)
        canceled = await caller.cancel(following.task.id)
        binding.set()
        opencode.release()
        ended = await caller.ended(first.id)

    assert (canceled.state, canceled.error_type) == ("canceled", None)
    assert (ended.state, len(opencode.prompts)) == ("completed", 1)


@pytest.mark.sqlite_only
@pytest.mark.requirement("I7")
async def test_a_task_that_was_being_canceled_is_stopped_before_the_next_of_its_session_begins(
    opencode: FakeOpenCode, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hold, told = opencode.hold(count=2), asyncio.Event()

    async def die(*_: object) -> None:
        told.set()
        await asyncio.get_running_loop().create_future()

    monkeypatch.setattr(InterruptSettings, "cancel_abort_timeout_seconds", 10)
    async with started(opencode, tmp_path, **STORED) as service:
        caller = Caller(service)
        first = await caller.begin("one")
        await hold.reached.wait()
        async with caller.stream("two", context=first.context_id) as following:
            await following.until(lambda update: "queue" in str(update.progress))
        monkeypatch.setattr(OpenCode1, "abort_session", die)
        canceling = asyncio.create_task(caller.ask("cancel", {"id": first.id}))
        async with asyncio.timeout(60):
            await told.wait()
    monkeypatch.undo()
    canceling.cancel()
    await asyncio.gather(canceling, return_exceptions=True)
    async with started(opencode, tmp_path, **STORED) as service:
        caller = Caller(service)
        ended = await caller.ended(first.id)
        opencode.release()
        later = await caller.ended(following.task.id)

    assert (ended.state, ended.error_type) == ("canceled", None)
    assert (later.state, opencode.texts) == ("completed", ["one", "two"])


@pytest.mark.sqlite_only
@pytest.mark.requirement("I7")
async def test_a_cancel_in_the_moment_in_which_a_task_is_taken_up_stops_it_in_opencode(
    opencode: FakeOpenCode, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hold = opencode.hold(count=2)
    async with started(opencode, tmp_path, **STORED) as service:
        begun = await Caller(service).begin("hello")
        await hold.reached.wait()

    canceling: list[asyncio.Task[None]] = []
    add = OpenTasks.add

    async def cancel(task: OpenTask) -> None:
        await task.cancel()
        await task.log.until_ended()

    def add_and_cancel(self: OpenTasks, *of: Any) -> OpenTask:
        task = add(self, *of)
        canceling.append(asyncio.create_task(cancel(task)))
        return task

    monkeypatch.setattr(OpenTasks, "add", add_and_cancel)
    async with started(opencode, tmp_path, **STORED) as service:
        async with asyncio.timeout(60):
            await asyncio.gather(*canceling)
        at_work = opencode.at_work
        canceled = await Caller(service).get(begun.id)

    assert (len(canceling), at_work, len(opencode.prompts)) == (1, False, 1)
    assert (canceled.state, canceled.error_type) == ("canceled", None)


@pytest.mark.sqlite_only
@pytest.mark.requirement("I3")
async def test_a_queued_turn_whose_session_was_deleted_during_a_restart_goes_on_in_a_new_one(
    opencode: FakeOpenCode, tmp_path: Path
) -> None:
    """OpenCode may have carried out the prompt of the turn before it, which therefore fails."""
    hold = opencode.hold(count=2)
    async with started(opencode, tmp_path, **STORED) as service:
        caller = Caller(service)
        first = await caller.begin("one")
        await hold.reached.wait()
        async with caller.stream("two", context=first.context_id) as following:
            await following.until(lambda update: "queue" in str(update.progress))
        session_id = (await caller.get(first.id)).session_id

    opencode.delete(SessionId(session_id))
    async with started(opencode, tmp_path, **STORED) as service:
        caller = Caller(service)
        failed = await caller.ended(first.id)
        opencode.release()
        ended = await caller.ended(following.task.id)

    assert (failed.state, opencode.texts) == ("failed", ["one", "two"])
    assert (ended.state, ended.session_id != session_id) == ("completed", True)


async def test_a_stop_stores_what_is_open_whatever_goes_wrong_before(
    opencode: FakeOpenCode, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored: list[int] = []

    async def fail(self: Ownership, seconds: float) -> None:
        raise RuntimeError("broken")

    async def close(self: OpenTasks) -> None:
        stored.append(len(self.all()))
        await whole(self)

    whole = OpenTasks.close
    monkeypatch.setattr(OpenTasks, "close", close)
    monkeypatch.setattr(Ownership, "let_go", fail)
    hold = opencode.hold()
    with capture_logs() as logs:
        async with started(opencode, tmp_path, **STORED) as service:
            task = await Caller(service).begin("hello")
            async with asyncio.timeout(60):
                await hold.reached.wait()
    monkeypatch.undo()
    opencode.release()

    assert stored == [1]
    assert "a step of the stop failed" in [log["event"] for log in logs]
    async with started(opencode, tmp_path, **STORED) as service:
        assert (await Caller(service).ended(task.id)).state == "completed"


@pytest.mark.sqlite_only
async def test_a_session_that_is_deleted_meanwhile_does_not_keep_turns_of_no_task_running(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recovery, "UNKNOWN_AFTER_SECONDS", 0.0)
    async with FakeOpenCode(tmp_path_factory.mktemp("workspace")).running() as opencode:
        opencode.play("permission-once")
        async with started(opencode, tmp_path, **STORED) as service:
            sent = [await Caller(service).send("run it") for _ in range(4)]
        unread, unlisted, unstopped, last = [SessionId(one.session_id) for one in sent]
        with closing(sqlite3.connect(tmp_path / "tasks.db")) as connection, connection:
            for table in ("tasks", "links", "owners", "messages", "entries", "interrupts"):
                connection.execute(f"DELETE FROM {table}")  # noqa: S608 - names from here

        def delete(session: SessionId, call: str) -> None:
            """Have a session be deleted when OpenCode gets a call about it."""
            ask = getattr(OpenCode1, call)

            async def asked(of: OpenCode1, session_id: SessionId, *how: Any, **more: Any) -> Any:
                found = await ask(of, session_id, *how, **more)
                if session_id == session:
                    raise SessionNotFoundError(session_id=session_id)
                return found

            monkeypatch.setattr(OpenCode1, call, asked)

        delete(unread, "session")
        delete(unlisted, "messages")
        delete(unstopped, "abort_session")
        with capture_logs() as records:
            async with started(opencode, tmp_path, **STORED):
                await until(lambda: any("for no task" in one["event"] for one in records))

    [told] = [one for one in records if "for no task" in one["event"]]
    assert opencode.aborts == told["stopped"] == [unstopped, last]
