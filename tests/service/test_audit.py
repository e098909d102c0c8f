"""Audit records of the real program, at the log level that it has by default."""

from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import orjson
import pytest
import pytest_asyncio

from opencode_a2a.extensions import METHODS
from tests.support.caller import Caller
from tests.support.forked import ForkedProgram
from tests.support.opencode import FakeOpenCode
from tests.support.program import Program
from tests.support.service import variables_for

pytestmark = pytest.mark.asyncio(loop_scope="module")

AUDITED = [method for method in METHODS if method.audit]


@pytest_asyncio.fixture(loop_scope="module")
async def program(opencode: FakeOpenCode, tmp_path: Path) -> AsyncGenerator[Program]:
    switched_on = {
        "A2A_ENABLE_SESSION_SHELL": "true",
        "A2A_ENABLE_WORKSPACE_MUTATIONS": "true",
    }
    async with ForkedProgram(variables_for(opencode, tmp_path, **switched_on)) as running:
        yield running


async def audited(program: Program) -> list[Any]:
    """Stop the program, so that all it logged has been read, and return its audit records."""
    assert await program.stop() == 0
    return [record for record in program.records() if record.get("audit")]


async def test_every_call_of_an_audited_method_leaves_a_record(program: Program) -> None:
    for method in AUDITED:
        await Caller(program).answer(method.name, method.example)

    records = await audited(program)

    assert {method.name for method in AUDITED} >= {
        "opencode.sessions.shell",
        "opencode.workspaces.create",
        "opencode.worktrees.remove",
    }
    told = [(record["event"], record["method"]) for record in records]
    assert told == [(method.audit, method.name) for method in AUDITED]
    assert all(record["identity"] and record["outcome"] for record in records)


@pytest.mark.requirement("I15")
async def test_every_interrupt_leaves_a_record(program: Program, opencode: FakeOpenCode) -> None:
    opencode.play("permission-once")
    caller = Caller(program)

    answered = await caller.send("run it")
    await caller.send("once", task=answered.id)
    canceled = await caller.send("run it")
    await caller.cancel(canceled.id)
    records = await audited(program)

    told = [(record["event"], record["task_id"], record["resolution"]) for record in records]
    assert told == [
        ("interrupt settled", answered.id, "once"),
        ("interrupt settled", canceled.id, "void"),
    ]


async def test_all_records_are_in_the_audit_file_also_after_it_was_moved(
    opencode: FakeOpenCode, tmp_path: Path
) -> None:
    file, moved = tmp_path / "audit.jsonl", tmp_path / "audit.jsonl.1"
    variables = variables_for(opencode, tmp_path / "state", A2A_AUDIT_FILE=str(file))
    async with Program(variables) as program:
        caller = Caller(program)
        first = await caller.send("hello")
        wrong = {"Authorization": "Bearer a-token-that-nobody-has"}
        for _ in range(3):
            assert (await program.http.get("/health", headers=wrong)).status_code == 401
        file.rename(moved)
        opencode.play("permission-once")
        second = await caller.send("run it")
        await caller.cancel(second.id)
        assert await program.stop() == 0

    assert moved.stat().st_mode & 0o777 == file.stat().st_mode & 0o777 == 0o600
    text = moved.read_text() + file.read_text()
    assert "a-token-that-nobody-has" not in text
    records = [orjson.loads(line) for line in text.splitlines()]
    assert all(record["audit"] and record["timestamp"] for record in records)
    told = [(record["event"], record.get("task_id")) for record in records]
    assert sorted(told, key=str) == sorted(
        [
            ("task started", first.id),
            ("task ended", first.id),
            ("credential refused", None),
            ("task started", second.id),
            ("cancel requested", second.id),
            ("task ended", second.id),
            ("interrupt settled", second.id),
        ],
        key=str,
    )
    started = next(record for record in records if record["event"] == "task started")
    assert started["address"] == "127.0.0.1"
    assert {"principal", "request_id", "trace_id"} <= started.keys()
    assert "title" not in started
    logged = [record["event"] for record in program.records() if record.get("audit")]
    assert logged == ["interrupt settled"]
