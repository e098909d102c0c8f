"""Webhooks that several replicas share: who may send, and that no change is missed."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import psycopg
import pytest

from opencode_a2a.clock import now_ms
from opencode_a2a.store import replicas, webhooks
from opencode_a2a.store import tasks as task_rows
from opencode_a2a.store.database import Database
from opencode_a2a.store.engine import Replica
from opencode_a2a.store.replicas import UpstreamRow
from opencode_a2a.store.schema import UNKNOWN_CHANGE
from opencode_a2a.store.tasks import StatusChange, TaskRow
from opencode_a2a.store.webhooks import HookRow
from tests.support import stores
from tests.support.replicas import until

pytestmark = [pytest.mark.postgresql_only, pytest.mark.requirement("I21")]

LATEST = 2**61
TASK = TaskRow("t", "p", "c", "working", 0, 0, b"{}", upstream="x")


@dataclass
class Shared:
    """Two replicas, of which the first runs the OpenCode of a task."""

    owner: Database
    other: Database
    task_no: int
    hook: HookRow

    async def claim(self, database: Database) -> list[int]:
        claim = webhooks.claim
        rows = await database.write(claim, database.replica, 1_000, LATEST, 10)
        return [row.no for row in rows]

    async def sql(self, statement: str) -> None:
        await self.other.write(lambda connection: connection.exec_driver_sql(statement))


@asynccontextmanager
async def shared(state: Path, changed: int = 2) -> AsyncGenerator[Shared]:
    url = stores.url(state)
    async with Database(url, Replica("a")) as owner, Database(url, Replica("b")) as other:
        me, rows = owner.replica or 0, [UpstreamRow("x", None, "up", False, (), 0)]
        await owner.write(replicas.enroll, me, rows)
        await owner.write(replicas.become_owner, me, ["x"])
        no = await owner.write(task_rows.add_task, TASK)
        hook = HookRow(no, "h", "key", "p", "1.0", "https://hook.test", 1, changed=changed)
        row, _ = await owner.write(webhooks.put, hook)
        yield Shared(owner, other, no, row)


async def test_a_webhook_is_claimed_by_one_replica_until_the_outcome_is_stored_or_it_is_gone(
    tmp_path: Path,
) -> None:
    async with shared(tmp_path) as it:
        no, me = it.hook.no, it.other.replica
        first, second = await it.claim(it.other), await it.claim(it.owner)
        # Another change meanwhile: still one at a time, then the next.
        await it.owner.write(webhooks.note_changes, {it.task_no: 7})
        meanwhile = await it.claim(it.owner)
        taken = replace(it.hook, acked=2)
        stored = await it.other.write(webhooks.update, me, taken, it.hook)
        next_one = await it.claim(it.owner)
        late = await it.other.write(webhooks.update, me, taken, it.hook)
        await it.sql("UPDATE replicas SET gone = clock_timestamp() WHERE name = 'a'")
        left = await it.claim(it.other)
        backlog = await it.other.read(webhooks.backlog, me, LATEST)

    assert (first, second, meanwhile) == ([no], [], [])
    assert (stored, next_one) == (True, [no])
    assert not late
    assert left == [no]
    assert backlog == (1, None, None)


async def test_a_receiver_that_is_away_is_tried_when_the_replica_that_held_it_back_is_gone(
    tmp_path: Path,
) -> None:
    async with shared(tmp_path) as it:
        later = replace(it.hook, next_at=500_000)
        await it.claim(it.owner)
        await it.owner.write(webhooks.update, it.owner.replica, later, it.hook, keep=True)
        held = await it.claim(it.other)
        await it.sql("UPDATE replicas SET gone = clock_timestamp() WHERE name = 'a'")

        assert (held, await it.claim(it.other)) == ([], [it.hook.no])


@pytest.mark.parametrize("state", ["active", "failed"])
async def test_a_retry_that_is_asked_for_during_an_attempt_is_not_undone_by_its_failure(
    tmp_path: Path, state: webhooks.HookState
) -> None:
    async with shared(tmp_path) as it:
        me = it.owner.replica
        failed = replace(it.hook, state=state, attempts=1, failing_since=1, next_at=500_000)
        await it.claim(it.owner)
        await it.other.write(webhooks.try_again, it.hook.no)
        stored = await it.owner.write(webhooks.update, me, failed, it.hook)
        await it.owner.write(webhooks.release, me, it.hook.no)
        (row,) = await it.owner.read(webhooks.of_task, it.task_no)

    assert not stored
    assert (row.state, row.attempts, row.failing_since) == ("active", 0, None)
    assert (row.next_at or 0) <= now_ms()


async def test_webhooks_at_a_replica_that_does_not_claim_are_left_to_it(tmp_path: Path) -> None:
    async with shared(tmp_path) as it:
        no, me = it.hook.no, it.other.replica
        await it.claim(it.other)
        await it.sql("UPDATE replicas SET claims = 0 WHERE name = 'a'")  # an earlier version
        ours = await it.other.read(webhooks.claimed, me, no)
        await it.other.write(webhooks.release, me, no)
        beside = await it.claim(it.other)
        due = (await it.other.read(webhooks.backlog, me, LATEST)).due_at
        # It has sent something, and has stored changes without a note, when it is replaced.
        await it.sql("UPDATE webhooks SET acked = 9")
        await it.sql("UPDATE replicas SET gone = clock_timestamp() WHERE name = 'a'")
        unknown = await it.claim(it.other)
        await it.other.write(webhooks.forget_last_changes, ["x"])
        looked = await it.claim(it.other)
        await it.other.write(webhooks.store_last_changes, me, {no: 11})
        (row,) = await it.other.write(webhooks.claim, me, 1_000, LATEST, 10)

    assert (ours, beside, due) == (None, [], None)
    assert (unknown, looked, row.changed) == ([], [no], 11)


async def test_a_row_of_an_earlier_version_is_looked_at(tmp_path: Path) -> None:
    async with shared(tmp_path) as it:
        await it.sql(
            "INSERT INTO webhooks (task_no, config_id, key, principal, version, url, acked, state,"
            " attempts) SELECT task_no, 'old', key, principal, version, url, 5, state, 0"
            " FROM webhooks"
        )
        rows = await it.other.write(webhooks.claim, it.other.replica, 1_000, LATEST, 10)
        old = rows[-1].no
        # A change is stored while the log is looked at: what was found is older.
        await it.owner.write(webhooks.note_changes, {it.task_no: 8})
        await it.other.write(webhooks.store_last_changes, it.other.replica, {old: 5})
        found = {row.config_id: row.changed for row in await it.other.read(webhooks.of_task, 1)}

    assert [row.changed for row in rows] == [2, UNKNOWN_CHANGE]
    assert found == {"h": 8, "old": 8}


async def until_locked(state: Path) -> None:
    """Wait until somebody waits for a lock."""
    waiting = "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock'"
    with psycopg.connect(stores.url(state), autocommit=True) as watch:
        await until(lambda: watch.execute(waiting).fetchall() == [(1,)])


async def test_a_webhook_that_is_set_while_a_change_is_stored_is_told_of_it(tmp_path: Path) -> None:
    async with shared(tmp_path) as it:
        change = StatusChange(it.task_no, "p", "working", "completed", 1, b"{}", b"{}")
        new = replace(it.hook, config_id="new", changed=UNKNOWN_CHANGE)
        with psycopg.connect(stores.url(tmp_path)) as owner:
            # As the owner's transaction does it, which has not been committed yet.
            owner.execute("UPDATE tasks SET status = '' WHERE no = %s", (it.task_no,))
            owner.execute("UPDATE webhooks SET changed = 3 WHERE task_no = %s", (it.task_no,))
            setting = asyncio.create_task(it.other.write(webhooks.put, new))
            await until_locked(tmp_path)
            owner.commit()
        row, _ = await setting  # whoever looks at the log now finds the change
        await it.owner.write(task_rows.append, [], [change])
        await it.owner.write(webhooks.note_changes, {it.task_no: 4})
        found = {one.no: one.changed for one in await it.other.read(webhooks.of_task, it.task_no)}

    assert row.changed == UNKNOWN_CHANGE
    assert found == {it.hook.no: 4, row.no: 4}


async def test_who_deletes_a_webhook_learns_who_has_claimed_it_meanwhile(tmp_path: Path) -> None:
    async with shared(tmp_path) as it:
        with psycopg.connect(stores.url(tmp_path)) as claiming:
            claiming.execute("UPDATE webhooks SET claimed_by = 7")
            deleting = asyncio.create_task(it.other.write(webhooks.delete, it.task_no, "h"))
            await until_locked(tmp_path)
            claiming.commit()

        assert await deleting == (it.hook.no, 7)
