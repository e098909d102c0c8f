"""Values in the database that cannot be read: what they do not concern goes on."""

from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from opencode_a2a.store import schema
from opencode_a2a.store.database import Database
from tests.support import stores
from tests.support.caller import Caller
from tests.support.front import started
from tests.support.opencode import FakeOpenCode

pytestmark = [pytest.mark.asyncio(loop_scope="module")]

STORED = {"A2A_TASK_STORE_BACKEND": "database"}
VALUES: list[tuple[sa.Table, str, bytes | str]] = [
    *(
        (table, column.name, damaged)
        for table in (schema.tasks, schema.entries, schema.interrupts)
        for column in table.columns
        if isinstance(column.type, sa.LargeBinary)
        for damaged in ([b"{", b"[]"] if table is schema.entries else [b"{"])
    ),
    *((table, "state", "strange") for table in (schema.tasks, schema.webhooks)),
]


@pytest.mark.parametrize(("table", "column", "damaged"), VALUES)
async def test_a_value_that_cannot_be_read_stops_nothing_else(
    opencode: FakeOpenCode, tmp_path: Path, table: sa.Table, column: str, damaged: bytes | str
) -> None:
    async with started(opencode, tmp_path, **STORED) as service:
        caller = Caller(service)
        ended = await caller.send("hello")
        webhook = {"taskId": ended.id, "url": "https://no-such-host.invalid/"}
        await caller.method("CreateTaskPushNotificationConfig", webhook)
        opencode.play("permission-once")
        waiting = await caller.send("hello")
        assert (ended.state, waiting.state) == ("completed", "input_required")
    async with Database(stores.url(tmp_path)) as database:
        await database.write(
            lambda connection: connection.execute(table.update().values({column: damaged}))
        )

    opencode.play("plain-text")
    async with started(opencode, tmp_path, **STORED) as service:
        caller = Caller(service)
        calls: list[tuple[str, Any]] = [
            ("ListTasks", {}),
            ("opencode.permissions.list", {}),
            ("opencode.webhooks.list", {}),
            *(("GetTask", {"id": task.id}) for task in (ended, waiting)),
            ("CancelTask", {"id": waiting.id}),
        ]
        answers = [await caller.answer(method, params) for method, params in calls]
        sent = await caller.send("hello")

    assert sent.state == "completed"
    wrong = {a["error"]["data"][0]["reason"] for a in answers if "error" in a}
    assert wrong <= {"TASK_UNREADABLE", "TASK_NOT_CANCELABLE"}
    assert "error" not in answers[0]
