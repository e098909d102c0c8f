"""Canceling a task, and failing one: what runs for it in OpenCode is stopped."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
import structlog

from opencode_a2a.config import InterruptSettings
from opencode_a2a.errors import SessionNotFoundError, UpstreamUnreachableError
from opencode_a2a.ids import SessionId
from opencode_a2a.opencode.client import OpenCode1
from opencode_a2a.opencode.driver import HERE, Location
from opencode_a2a.opencode.reader import TurnReader
from opencode_a2a.opencode.types import SessionStatus, StatusBusy
from opencode_a2a.turns import attempt
from opencode_a2a.turns.turn import Turn
from tests.support.answers import NOT_CANCELABLE, NOT_FOUND
from tests.support.caller import Caller
from tests.support.forward import Line
from tests.support.front import Serve, begin_held, started
from tests.support.opencode import FakeOpenCode
from tests.support.service import Running

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.both_databases]


@pytest.mark.requirement("3.1.5-returns-the-task")
@pytest.mark.requirement("3.1.5-idempotent")
@pytest.mark.requirement("I2")
async def test_cancel_ends_the_task_for_good_and_again(
    caller: Caller, opencode: FakeOpenCode
) -> None:
    task_id = await begin_held(caller, opencode)

    canceled = await caller.cancel(task_id)
    again = await caller.cancel(task_id)
    opencode.release()
    read = await caller.get(task_id)

    assert canceled.state == "canceled"
    assert (canceled.text, canceled.said) == ("one two ", "Canceled by the caller.")
    assert read.raw["status"] == again.raw["status"] == canceled.raw["status"]


@pytest.mark.requirement("3.1.5-returns-the-task")
async def test_many_cancels_at_once_are_one(caller: Caller, opencode: FakeOpenCode) -> None:
    task_id = await begin_held(caller, opencode)

    tasks = await asyncio.gather(*(caller.cancel(task_id) for _ in range(5)))

    assert {task.state for task in tasks} == {"canceled"}
    assert len({task.raw["status"]["timestamp"] for task in tasks}) == 1


@pytest.mark.requirement("3.1.5-terminal")
@pytest.mark.parametrize("name", ["plain-text", "error-400"])
async def test_a_task_that_ended_otherwise_cannot_be_canceled(
    caller: Caller, opencode: FakeOpenCode, name: str
) -> None:
    opencode.play(name)
    task = await caller.get((await caller.send("hello")).id)

    (await caller.ask("cancel", {"id": task.id})).refuses(NOT_CANCELABLE)

    assert (await caller.get(task.id)).raw == task.raw


@pytest.mark.requirement("3.1.5-unknown")
async def test_a_task_that_does_not_exist_cannot_be_canceled(caller: Caller) -> None:
    (await caller.ask("cancel", {"id": "no-such-task"})).refuses(NOT_FOUND)


@pytest.mark.requirement("3.1.5-streams-told")
@pytest.mark.requirement("I5")
async def test_whoever_follows_or_waits_is_told_of_a_cancel(
    caller: Caller, opencode: FakeOpenCode
) -> None:
    hold = opencode.hold(count=2)
    name = f"canceled {caller.wire.value}"
    async with asyncio.TaskGroup() as group, caller.stream("hello", message_id=name) as following:
        first = await following.until(lambda update: update.task is not None)
        waiting = group.create_task(caller.send("hello", message_id=name))
        async with asyncio.timeout(60):
            await hold.reached.wait()
        assert first.task is not None
        await caller.cancel(first.task.id)
        updates = await following.rest()

    assert updates[-1].state == "canceled"
    assert updates[-1].status["status"]["message"]
    assert waiting.result().state == "canceled"


async def test_a_waiting_task_can_be_canceled(caller: Caller, opencode: FakeOpenCode) -> None:
    opencode.play("permission-once")
    asked = await caller.send("run it")

    canceled = await caller.cancel(asked.id)

    assert canceled.state == "canceled"
    assert canceled.said == "Canceled by the caller."


async def test_the_context_goes_on_after_a_cancel(caller: Caller, opencode: FakeOpenCode) -> None:
    task_id = await begin_held(caller, opencode)
    canceled = await caller.cancel(task_id)
    opencode.release()

    task = await caller.send("hello", context=canceled.context_id)

    assert (task.state, task.session_id) == ("completed", canceled.session_id)


async def test_a_cancel_in_the_moment_in_which_it_is_a_tasks_turn_lets_the_next_one_run(
    service: Running, opencode: FakeOpenCode, monkeypatch: pytest.MonkeyPatch
) -> None:
    queued, its_turn, never = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def report(*_: object) -> None:
        queued.set()
        try:
            await never.wait()
        except asyncio.CancelledError:
            if its_turn.is_set():
                raise
            its_turn.set()
            await never.wait()

    monkeypatch.setattr(Turn, "_report_queue", report)
    caller = Caller(service)
    first = await caller.get(await begin_held(caller, opencode))
    second = await caller.begin("hello", context=first.context_id)
    async with asyncio.timeout(60):
        await queued.wait()
        third = await caller.begin("hello", context=first.context_id)
        opencode.release()
        await its_turn.wait()

    canceled = await caller.cancel(second.id)

    assert canceled.state == "canceled"
    assert (await caller.ended(third.id)).state == "completed"


@pytest.mark.sqlite_only
async def test_a_session_that_does_not_stop_is_not_aborted_without_a_pause(
    serve: Serve, opencode: FakeOpenCode, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(InterruptSettings, "cancel_abort_timeout_seconds", 1)
    service = await serve()
    caller, aborts = Caller(service), list[str]()
    task_id = await begin_held(caller, opencode)

    async def ignored(_: OpenCode1, session_id: SessionId) -> None:
        aborts.append(session_id)

    monkeypatch.setattr(OpenCode1, "abort_session", ignored)
    canceled = await caller.cancel(task_id)

    assert canceled.state == "canceled"
    assert 2 <= len(aborts) <= 7


@pytest.mark.sqlite_only
@pytest.mark.requirement("I7")
@pytest.mark.parametrize(
    ("call", "recording"),
    [
        ("session_status", "plain-text"),  # is it still at work?
        ("messages", "plain-text"),  # were events lost?
        ("messages", "permission-once"),  # what does it ask for?
        ("reply_permission", "permission-once"),
    ],
)
async def test_a_cancel_does_not_wait_for_an_opencode_that_hangs(
    tmp_path: Path,
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
    call: str,
    recording: str,
) -> None:
    """A process that was stopped keeps its connections, and never answers."""
    monkeypatch.setattr(attempt, "TICK_SECONDS", 0.1)
    monkeypatch.setattr(InterruptSettings, "cancel_abort_timeout_seconds", 0.5)
    asked, ask = asyncio.Event(), getattr(OpenCode1, call)
    async with (
        FakeOpenCode(tmp_path_factory.mktemp("workspace")).running() as opencode,
        Line("127.0.0.1", int(opencode.url.rpartition(":")[2])) as line,
    ):

        async def hang(*given: Any, **more: Any) -> Any:
            if not asked.is_set():
                line.passing.clear()
                asyncio.get_running_loop().call_later(0.1, asked.set)  # it has been sent
            return await ask(*given, **more)

        monkeypatch.setattr(OpenCode1, call, hang)
        opencode.play(recording)
        opencode.hold()
        settings = {
            "OPENCODE_BASE_URL": f"http://127.0.0.1:{line.port}",
            "A2A_PERMISSION_RULES": '[{"permission": "bash", "action": "allow"}]',
        }
        async with started(opencode, tmp_path, **settings) as service:
            caller = Caller(service)
            task = await caller.begin("hello")
            async with asyncio.timeout(60):
                await asked.wait()
            async with asyncio.timeout(10):
                canceled = await caller.cancel(task.id)

    assert canceled.state == "canceled"
    assert "did not confirm in time" in canceled.said


@pytest.mark.sqlite_only
async def test_a_sub_agent_that_is_deleted_meanwhile_does_not_keep_a_turn_from_being_stopped(
    service: Running, opencode: FakeOpenCode, monkeypatch: pytest.MonkeyPatch
) -> None:
    opencode.play("subagent")
    hold = opencode.hold("message.updated", count=12)  # the sub-agent is known
    caller, aborted = Caller(service), set[SessionId]()
    task = await caller.begin("hello")
    async with asyncio.timeout(60):
        await hold.reached.wait()
    root = SessionId((await caller.get(task.id)).session_id)
    abort, status = OpenCode1.abort_session, OpenCode1.session_status

    async def of_children_fails(opencode: OpenCode1, session_id: SessionId) -> bool:
        aborted.add(session_id)
        if session_id != root:
            raise SessionNotFoundError(session_id=session_id)
        return await abort(opencode, session_id)

    async def late(opencode: OpenCode1, *, at: Location = HERE) -> dict[SessionId, SessionStatus]:
        """List the sub-agent as busy until it was not found."""
        listed = await status(opencode, at=at)
        if aborted - {root}:
            return {busy: one for busy, one in listed.items() if busy == root}
        children = await opencode.session_children(root)
        return listed | {child.id: StatusBusy(type="busy") for child in children}

    monkeypatch.setattr(OpenCode1, "abort_session", of_children_fails)
    monkeypatch.setattr(OpenCode1, "session_status", late)
    canceled = await caller.cancel(task.id)

    assert (canceled.state, canceled.said) == ("canceled", "Canceled by the caller.")
    assert aborted > {root}


@pytest.mark.sqlite_only
async def test_a_prompt_that_is_given_up_does_not_begin_later(
    service: Running, opencode: FakeOpenCode, monkeypatch: pytest.MonkeyPatch
) -> None:
    """OpenCode 2 may have it in its inbox, which an abort empties."""

    async def waits(*_: object, **__: object) -> None:
        raise UpstreamUnreachableError

    monkeypatch.setattr(OpenCode1, "prompt", waits)
    before = len(opencode.aborts)
    task = await Caller(service).send("hello")

    assert (task.state, task.error_type) == ("failed", "UPSTREAM_UNREACHABLE")
    assert opencode.aborts[before:] == [task.session_id]


@pytest.mark.sqlite_only
@pytest.mark.requirement("I15")
async def test_a_turn_that_fails_by_a_fault_of_the_service_is_stopped_in_opencode(
    service: Running, opencode: FakeOpenCode, monkeypatch: pytest.MonkeyPatch
) -> None:
    opencode.play("permission-once")
    caller = Caller(service)
    asked = await caller.send("run it")

    def fail(*_: object) -> None:
        raise LookupError

    monkeypatch.setattr(TurnReader, "feed", fail)
    with structlog.testing.capture_logs() as records:
        opencode.tell_event("session.idle", {"sessionID": asked.session_id})
        failed = await caller.ended(asked.id)
        working = opencode.at_work

    settled = [one["resolution"] for one in records if one["event"] == "interrupt settled"]
    assert (failed.state, failed.error_type, working) == ("failed", "INTERNAL_ERROR", False)
    assert settled == ["void"]
