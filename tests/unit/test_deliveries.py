"""Webhooks: what is sent when, what is stored of it, and how a notification proves itself."""

import asyncio
import hashlib
import itertools
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import jwt
import pytest
import sqlalchemy as sa
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from sqlalchemy.engine import Connection
from sqlalchemy.exc import SQLAlchemyError
from structlog.testing import capture_logs

from opencode_a2a.clock import now_ms
from opencode_a2a.cluster.fleet import Fleet, Member
from opencode_a2a.config import LimitSettings, PushSettings, SigningSettings, UpstreamEntry
from opencode_a2a.errors import StoreUnavailableError
from opencode_a2a.events import Finished, Interrupted, Outcome, Resumed, Started, TextGrew
from opencode_a2a.ids import MAIN, MessageId, Principal, RequestId, SessionId
from opencode_a2a.log.log import LogWriter, TaskLog
from opencode_a2a.log.state import TERMINAL, Entry
from opencode_a2a.log.stored import load_task
from opencode_a2a.messages import Message, Part, PromptPart, PushConfig, TurnRequest
from opencode_a2a.opencode.feed import Feed
from opencode_a2a.opencode.upstream import OpenCodeServer
from opencode_a2a.push import changes
from opencode_a2a.push import loop as module
from opencode_a2a.push.destination import Destination, RetryTimes
from opencode_a2a.push.loop import Deliveries
from opencode_a2a.push.notification import (
    Away,
    Failed,
    Held,
    Notification,
    Receipt,
    Skipped,
    Taken,
)
from opencode_a2a.push.sender import WebhookSender
from opencode_a2a.signing import signing_keys
from opencode_a2a.store import tasks as task_rows
from opencode_a2a.store.database import Database
from opencode_a2a.store.replicas import Census
from opencode_a2a.store.schema import webhooks as table
from opencode_a2a.store.webhooks import HookRow
from opencode_a2a.tasks import recovery
from opencode_a2a.tasks.command import SendCommand
from opencode_a2a.tasks.open import OpenTask
from opencode_a2a.tasks.service import TaskService
from opencode_a2a.tasks.webhooks import Webhooks
from opencode_a2a.turns.errands import Errands
from opencode_a2a.turns.job import SharedTurns
from opencode_a2a.turns.sessions import SessionRights
from opencode_a2a.turns.shared_interrupts import SharedInterrupts
from tests.support import stores
from tests.support.receiver import receiving

CONFIG = PushConfig("https://hooks.test/x", "c", "Bearer", "secret", "token")
DONE = Finished(Outcome.COMPLETED)
QUICK = RetryTimes(first=0.001, longest=0.01, shortest=0.001)
SLOW = RetryTimes(first=3600.0)
"""Nothing is tried again within a test unless it is asked for."""


class Sent:
    """A sender that keeps what it is given, and answers as it is told."""

    def __init__(self) -> None:
        self.told: list[Notification] = []
        self.outcome: Receipt = Taken()
        self.faults: list[Exception] = []
        """Raised by what is sent next."""
        self.gate = asyncio.Event()
        """While it is cleared, nothing is answered."""
        self.gate.set()
        self.changed = asyncio.Condition()

    async def send(self, row: HookRow, told: Notification, _: Callable[[], None], /) -> Receipt:
        async with self.changed:
            self.told.append(told)
            self.changed.notify_all()
        await self.gate.wait()
        if self.faults:
            raise self.faults.pop()
        return self.outcome

    async def until(self, count: int) -> list[int]:
        async with asyncio.timeout(60), self.changed:
            await self.changed.wait_for(lambda: len(self.told) >= count)
        return [one.seq for one in self.told]


class Desk:
    def __init__(self, database: Database, settings: PushSettings) -> None:
        self.database, self.sent = database, Sent()
        self.webhooks = Webhooks(database, settings)
        self.writer = LogWriter(database)
        self._numbers = itertools.count()
        # No task is started, so that no turns are needed.
        entry, behind = UpstreamEntry(name=MAIN, managed=1), OpenCodeServer("", "", None)
        errands = Errands(
            database,
            Feed.__new__(Feed),
            SharedInterrupts.__new__(SharedInterrupts),
            SessionRights.__new__(SessionRights),
        )
        self.member = Member(entry, behind, lambda: (SharedTurns.__new__(SharedTurns), errands))
        self.member.owned = True
        fleet = Fleet([self.member], database, 0)
        self.tasks = TaskService(database, self.writer, fleet, LimitSettings(), self.webhooks)
        self.deliveries = Deliveries(database, self.writer, self.tasks.open, settings, self.sent)
        self.running: list[asyncio.Task[None]] = []
        """The writer of the logs and the deliveries."""

    async def task(self, push: PushConfig | None = CONFIG) -> TaskLog:
        message = Message(f"m-{next(self._numbers)}", "user", [Part("text", text="hello")])
        request = TurnRequest((PromptPart(text="hello"),), MessageId("msg_1"))
        command = SendCommand(Principal("ann"), message, request, push=push)
        task = await self.tasks.sending.admit(command, self.member)
        assert isinstance(task, OpenTask)
        return task.log

    async def row(self, log: TaskLog, state: str) -> HookRow:
        """Wait for a state of the one webhook of a task."""
        async with asyncio.timeout(60):
            while True:
                for row in await self.webhooks.of_task(log):
                    if row.state == state:
                        return row

    async def waiting(self, log: TaskLog) -> HookRow:
        """Wait until the webhook of a task is known to fail."""
        async with asyncio.timeout(60):
            while True:
                for row in await self.webhooks.of_task(log):
                    if row.failing_since is not None:
                        return row


@asynccontextmanager
async def desk(retries: RetryTimes = QUICK, **settings: float) -> AsyncGenerator[Desk]:
    async with Database("sqlite://") as database:
        one = Desk(database, PushSettings.model_validate(settings))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(module, "RETRIES", retries)
            one.running = [
                asyncio.create_task(part) for part in (one.writer.run(), one.deliveries.run())
            ]
            try:
                yield one
            finally:
                for part in one.running:
                    part.cancel()
                await asyncio.wait(one.running)


def asked(number: int) -> Interrupted:
    return Interrupted(RequestId(f"per_{number}"), "permission", SessionId("ses_1"), "bash")


def grew(text: str) -> TextGrew:
    return TextGrew(MessageId("msg_1"), "prt_1", text)


@pytest.mark.requirement("I21")
@pytest.mark.requirement("I22")
async def test_changes_are_told_once_each_and_the_last_erases_the_secrets() -> None:
    async with desk() as it:
        log = await it.task()
        await log.append([Started()])
        log.append_now([grew("a"), grew("b")])
        await log.append([asked(1)])
        await log.append([Resumed(RequestId("per_1"), "permission", "once")])
        await log.append([grew("c"), DONE])
        seqs = await it.sent.until(4)
        row = await it.row(log, "done")

        assert seqs == [2, 5, 6, 8]
        assert [type(one.what) for one in it.sent.told] == [Entry] * 4
        assert (row.acked, row.credentials, row.token, row.attempts) == (8, None, None, 0)


@pytest.mark.requirement("I21")
async def test_what_is_too_much_to_remember_is_read_from_the_log() -> None:
    async with desk() as it:
        it.sent.outcome = Failed("http_503")
        log = await it.task()
        await log.append([Started()])
        await it.sent.until(1)
        for number in range(50):
            request = RequestId(f"per_{number}")
            await log.append([asked(number)])
            await log.append([Resumed(request, "permission", "once")])
        await log.append([DONE])
        it.sent.told.clear()
        it.sent.outcome = Taken()
        await it.row(log, "done")

        told = [one.seq for one in it.sent.told]
        assert list(dict.fromkeys(told)) == list(range(2, 104))
        assert told == sorted(told)


@pytest.mark.requirement("I21")
async def test_a_webhook_that_is_given_up_goes_on_where_it_was() -> None:
    async with desk(give_up_hours=1e-9) as it:
        it.sent.outcome = Failed("timeout")
        log = await it.task()
        await log.append([Started()])
        row = await it.row(log, "failed")
        assert (row.acked, row.last_outcome, row.token) == (0, "timeout", "token")
        assert row.attempts >= 1

        it.sent.outcome = Taken()
        it.sent.told.clear()
        await log.append([DONE])
        await it.webhooks.retry(log, "c")
        await it.row(log, "done")

        assert [one.seq for one in it.sent.told] == [2, 3]


@pytest.mark.requirement("I21")
async def test_a_fault_of_ours_is_an_attempt_that_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    async with desk() as it:
        update = module.webhooks.update
        broken = iter([True, True, False, True, True])  # what fails is run once more

        def fail_once(*given: Any, **named: Any) -> bool:
            if next(broken, False):
                raise RuntimeError("a fault while the outcome is stored")
            return update(*given, **named)

        monkeypatch.setattr(module.webhooks, "update", fail_once)
        it.sent.faults = [KeyError("a fault while it is sent")]
        log = await it.task()
        await log.append([Started()])
        await log.append([DONE])
        row = await it.row(log, "done")

        seqs = [one.seq for one in it.sent.told]
        assert list(dict.fromkeys(seqs)) == [2, 3]
        assert seqs == sorted(seqs)
        assert len(seqs) > 2
        assert (row.last_outcome, row.attempts, row.token) == ("ok", 0, None)


@pytest.mark.requirement("I21")
async def test_a_retry_that_cannot_be_stored_leaves_the_webhook_as_it_was(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with desk() as it:
        it.sent.outcome = Failed("http_503")
        log = await it.task()
        await log.append([Started()])
        await it.sent.until(1)

        async def away(*_: object, **__: object) -> None:
            raise StoreUnavailableError(operation="persisting")

        with monkeypatch.context() as patch:
            patch.setattr(it.database, "write", away)
            with suppress(StoreUnavailableError):
                await it.webhooks.retry(log, "c")
        it.sent.outcome = Taken()
        await log.append([DONE])
        await it.row(log, "done")

        assert list(dict.fromkeys(one.seq for one in it.sent.told)) == [2, 3]


@pytest.mark.requirement("I21")
async def test_a_webhook_is_served_though_its_caller_went_away_while_it_was_stored(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with desk() as it:
        log = await it.task(push=None)
        await log.append([DONE])
        write = it.database.write_in_time

        def leaving(*args: Any) -> Any:
            setting.cancel()
            return write(*args)

        with monkeypatch.context() as patch:
            patch.setattr(it.database, "write_in_time", leaving)
            setting = asyncio.create_task(it.webhooks.put(log, CONFIG))
            await asyncio.wait([setting])
        await it.row(log, "done")

        assert setting.cancelled()
        assert [one.seq for one in it.sent.told] == [2]


@pytest.mark.requirement("I21")
@pytest.mark.parametrize("commits", [True, False])
async def test_a_webhook_counts_as_set_if_its_transaction_was_committed(*, commits: bool) -> None:
    async with desk() as it:
        log = await it.task(push=None)
        message = Message("m-next", "user", [Part("text", text="yes")])
        request = TurnRequest((PromptPart(text="yes"),), MessageId("msg_2"))
        command = SendCommand(Principal("ann"), message, request, push=CONFIG)
        task = it.tasks.open.get(log.ref.id)
        assert task is not None
        recording = it.tasks.continuing._recording(command, task)  # noqa: SLF001 # pyright: ignore[reportPrivateUsage] - an answer that cannot be stored
        with capture_logs() as records, suppress(StoreUnavailableError):
            async with recording as write:

                def store(connection: Connection) -> None:
                    write(connection)
                    if not commits:
                        raise SQLAlchemyError("the disk is full")

                await it.database.write(store)
                raise StoreUnavailableError  # of something that comes later
        found = await it.webhooks.of_task(log)

    assert len(found) == commits
    assert [one["event"] for one in records].count("webhook set") == commits


async def test_webhooks_wait_together_for_a_receiver_that_is_away() -> None:
    async with desk(SLOW) as it:
        it.sent.outcome = Away("unreachable")
        logs = [await it.task()]
        await logs[0].append([Started()])
        await it.sent.until(1)
        for _ in range(19):
            logs.append(await it.task())
            await logs[-1].append([Started()])
        rows = [(await it.waiting(log)) for log in logs]

        # One attempt for all of them, and each says how it stands.
        assert len(it.sent.told) == 1
        assert [row.attempts for row in rows] == [1] + [0] * 19
        page = [row for _, row in await it.webhooks.page(Principal("ann"), None, 100)]
        assert {row.last_outcome for row in page} == {"unreachable"}
        assert all((row.next_at or 0) > now_ms() + 1_000_000 for row in page)

        # The one that would try next goes; the others are told all, in order, once one succeeds.
        await it.webhooks.delete(logs[0], "c")
        for log in logs:
            await log.append([DONE])
        it.sent.outcome = Taken()
        await it.webhooks.retry(logs[7], "c")
        for log in logs[1:]:
            assert (await it.row(log, "done")).failing_since is None

        told = [(one.ref.id, one.seq) for one in it.sent.told[1:]]
        assert len(told) == 38
        for log in logs[1:]:
            assert [seq for task, seq in told if task == log.ref.id] == [2, 3]


@pytest.mark.requirement("I21")
async def test_a_new_change_is_reason_enough_to_look_for_a_receiver_that_was_away() -> None:
    class Later(RetryTimes):
        def after(self, failures: int) -> float:
            return 3600.0

    async with desk(Later(first=0.001)) as it:
        it.sent.outcome = Away("unknown_host")
        first = await it.task()
        await first.append([DONE])
        await it.waiting(first)
        it.sent.outcome = Taken()
        second = await it.task()
        await second.append([DONE])

        await it.row(first, "done")
        await it.row(second, "done")


@pytest.mark.requirement("I21")
async def test_a_retry_at_another_replica_counts_though_its_notification_was_lost() -> None:
    async with desk(SLOW) as it:
        it.sent.outcome = Away("unreachable")
        log = await it.task()
        await log.append([DONE])
        row = await it.waiting(log)
        await it.database.write(module.webhooks.try_again, row.no)
        it.sent.outcome = Taken()
        it.database.dispatch("")

        assert (await it.row(log, "done")).last_outcome == "ok"


@pytest.mark.requirement("I21")
async def test_a_lost_retry_is_looked_for_again_if_the_database_was_away(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with desk(SLOW) as it:
        it.sent.outcome = Away("unreachable")
        log = await it.task()
        await log.append([DONE])
        row = await it.waiting(log)
        await it.database.write(module.webhooks.try_again, row.no)
        it.sent.outcome = Taken()
        read, failed = it.database.read, asyncio.Event()

        async def fail_once(fn: Any, *given: Any) -> Any:
            if fn is module.webhooks.retried and not failed.is_set():
                failed.set()
                raise StoreUnavailableError
            return await read(fn, *given)

        monkeypatch.setattr(it.database, "read", fail_once)
        it.database.dispatch("")
        await failed.wait()
        await asyncio.sleep(0)
        it.database.dispatch("w")

        assert (await it.row(log, "done")).last_outcome == "ok"


async def test_attempts_that_begin_together_are_one_failure_of_their_receiver(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with desk(RetryTimes(first=100.0)) as it:
        it.sent.outcome = Away("unreachable")
        read, goes_on, began = it.database.read, asyncio.Event(), 0

        async def read_slowly(fn: Any, *given: Any) -> Any:
            nonlocal began
            found = await read(fn, *given)
            if fn is module._load:  # noqa: SLF001 # pyright: ignore[reportPrivateUsage] - where an attempt begins
                began += 1
                if began == 2:
                    await goes_on.wait()
            return found

        monkeypatch.setattr(it.database, "read", read_slowly)
        first, second = await it.task(), await it.task()
        await asyncio.gather(first.append([DONE]), second.append([DONE]))
        waiting = [asyncio.create_task(it.waiting(log)) for log in (first, second)]
        await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        goes_on.set()
        rows = await asyncio.gather(*waiting)

        assert [row.attempts for row in rows] == [1, 1]
        assert all((row.next_at or 0) < now_ms() + 100_000 for row in rows)


async def test_what_was_not_sent_says_nothing_about_a_receiver_that_is_away() -> None:
    destination = Destination(RetryTimes())
    destination.note(Away("unreachable"), 0)
    destination.note(Skipped("skipped"), 1)

    assert destination.failures == 1
    assert destination.wait > 1

    destination.note(Failed("http_500"), 1)

    assert destination.failures == 0


@pytest.mark.requirement("I21")
async def test_at_a_stop_what_is_being_sent_is_finished_and_what_waits_is_left_to_others() -> None:
    async def claims(log: TaskLog) -> tuple[int | None, int | None]:
        query = sa.select(table.c.claimed_by, table.c.next_at).where(table.c.task_no == log.no)
        claim, next_at = await it.database.read(lambda one: one.execute(query).one())
        return claim, next_at

    async with desk(SLOW) as it:
        it.sent.outcome = Away("unreachable")
        waiting = await it.task(replace(CONFIG, url="https://away.test/x"))
        await waiting.append([DONE])
        await it.waiting(waiting)
        held = await claims(waiting)
        it.sent.outcome = Taken()
        it.sent.gate.clear()
        log = await it.task()
        await log.append([DONE])
        await it.sent.until(2)
        _, deliveries = it.running
        deliveries.cancel()
        await asyncio.sleep(0)
        it.sent.gate.set()
        await asyncio.wait([deliveries])

        assert held[0] is not None
        assert await claims(waiting) == (None, None)
        assert [(one.state, one.acked) for one in await it.webhooks.of_task(log)] == [("done", 2)]


@pytest.mark.requirement("I21")
async def test_a_stop_while_webhooks_are_claimed_leaves_no_claim(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    claimed, claim = asyncio.Event(), module.webhooks.claim

    def note_claim(*args: Any) -> list[HookRow]:
        found = claim(*args)
        it.running[1].get_loop().call_soon_threadsafe(claimed.set)
        return found

    async with desk() as it:
        write = it.database.write

        async def write_slowly(fn: Any, *args: Any, **kwargs: Any) -> Any:
            found = await write(fn, *args, **kwargs)
            if fn is note_claim:
                await asyncio.sleep(60)
            return found

        monkeypatch.setattr(module.webhooks, "claim", note_claim)
        monkeypatch.setattr(it.database, "write", write_slowly)
        log = await it.task()
        await log.append([DONE])
        await claimed.wait()
        _, deliveries = it.running
        deliveries.cancel()
        await asyncio.wait([deliveries])
        query = sa.select(table.c.claimed_by).where(table.c.task_no == log.no)

        assert await it.database.read(lambda one: one.scalar(query)) is None


async def test_a_webhook_that_waits_for_a_receiver_is_given_up_like_any_other() -> None:
    async with desk(SLOW, give_up_hours=1e-5) as it:
        it.sent.outcome = Away("tls")
        logs = [await it.task() for _ in range(6)]
        for log in logs:
            await log.append([DONE])
        rows = [await it.row(log, "failed") for log in logs]

        assert {row.last_outcome for row in rows} == {"tls"}
        assert {row.token for row in rows} == {"token"}


@pytest.mark.requirement("I21")
async def test_a_replica_that_may_have_been_replaced_sends_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with desk() as it:
        asked, gone = asyncio.Event(), True

        async def ready(operation: str) -> None:
            asked.set()
            if gone:
                raise StoreUnavailableError(operation=operation)

        log = await it.task()
        it.database.census = stores.SHARED
        monkeypatch.setattr(it.database, "check_writable", ready)
        await log.append([Started()])
        for _ in range(2):  # it is tried again and again
            asked.clear()
            async with asyncio.timeout(60):
                await asked.wait()
        assert it.sent.told == []

        gone = False
        await log.append([DONE])
        await it.row(log, "done")
        assert [one.seq for one in it.sent.told] == [2, 3]


@pytest.mark.requirement("I21")
async def test_a_log_is_kept_for_a_webhook_and_without_it_the_present_state_is_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(changes, "REMEMBERED", 0)

    def sweep(connection: Connection) -> int:
        unread = it.webhooks.unread()
        return task_rows.forget_logs(connection, [*TERMINAL], now_ms() + 1000, 10, unread)

    async with desk() as it:
        it.sent.outcome = Failed("http_503")
        log = await it.task()
        await log.append([Started(), DONE])
        await it.sent.until(1)
        assert await it.database.write(sweep) == 0
        it.sent.outcome = Taken()
        await it.row(log, "done")
        assert await it.database.write(sweep) == 1

        found = await it.database.read(task_rows.load_by_number, log.no)
        assert found is not None
        await it.tasks.open.give_up(it.member)
        ended = TaskLog(log.no, load_task(found), it.writer, it.database)
        it.sent.told.clear()
        await it.webhooks.put(ended, replace(CONFIG, id="late"))
        await it.sent.until(1)

        (told,) = it.sent.told
        assert (told.seq, told.ends, type(told.what).__name__) == (3, True, "TaskState")


@pytest.mark.requirement("I21")
async def test_a_task_is_kept_for_its_webhook_longer_than_the_retention_says(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(recovery, "SWEEP_SECONDS", 0.01)

    async def sweep(log: TaskLog) -> None:
        """Delete old tasks until one is gone."""
        sweeping = asyncio.create_task(recovery.sweep(it.database, 0.001, it.webhooks.unread()))
        async with asyncio.timeout(60):
            while await it.database.read(task_rows.load_by_number, log.no) is not None:
                pass
        sweeping.cancel()
        await asyncio.wait([sweeping])

    async with desk(SLOW) as it:
        it.sent.outcome = Failed("http_503")
        told, untold = await it.task(), await it.task(None)
        for log in (told, untold):
            await log.append([Started(), DONE])
        await it.waiting(told)
        await sweep(untold)
        assert await it.database.read(task_rows.load_by_number, told.no) is not None

        it.sent.outcome = Taken()
        await it.webhooks.retry(told, (await it.row(told, "active")).config_id)
        await it.row(told, "done")
        await sweep(told)


async def test_no_log_is_kept_for_webhooks_that_are_switched_off() -> None:
    async with desk() as it:
        it.sent.outcome = Failed("http_503")
        log = await it.task()
        await log.append([Started(), DONE])
        await it.sent.until(1)
        off = Webhooks(it.database, PushSettings(enabled=False))

        def sweep(connection: Connection, kept_for: Webhooks) -> int:
            later, unread = now_ms() + 1000, kept_for.unread()
            return task_rows.forget_logs(connection, [*TERMINAL], later, 10, unread)

        assert await it.database.write(sweep, it.webhooks) == 0
        assert await it.database.write(sweep, off) == 1


async def test_a_bearer_without_credentials_is_a_token_that_we_sign(tmp_path: Path) -> None:
    file = tmp_path / "key.pem"
    private = ec.generate_private_key(ec.SECP256R1())
    file.write_bytes(private.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    file.chmod(0o600)
    keys = signing_keys(SigningSettings(key_file=file))
    assert keys is not None
    sender = WebhookSender(
        PushSettings(allow_private_hosts=True), "https://agent.test", keys.current
    )
    async with desk() as it, receiving() as receiver:
        log = await it.task(push=None)
        await log.append([DONE])
        (entry,) = log.state.state_changes
        row = HookRow(log.no, "c", "k" * 16, "ann", "1.0", receiver.url, 0, "Bearer")
        outcome = await sender.send(row, Notification(log.ref, 2, True, entry), lambda: None)
        await sender.aclose()

    (told,) = receiver.received
    token = told.headers["authorization"].removeprefix("Bearer ")
    (key,) = jwt.PyJWKSet.from_dict(keys.jwks).keys
    claims = jwt.decode(token, key.key, ["ES256"], audience=receiver.url)
    assert outcome == Taken()
    named = claims["iss"], claims["jti"], claims["taskId"]
    assert named == ("https://agent.test", told.id, log.ref.id)
    assert claims["request_body_sha256"] == hashlib.sha256(told.body).hexdigest()
    assert 0 < claims["exp"] - claims["iat"] <= 300


async def test_what_is_held_back_has_not_failed_and_is_sent_later() -> None:
    async with desk(RetryTimes(first=0.01, longest=0.01, shortest=0.01)) as it:
        it.sent.outcome = Held("quiet", 3600)
        log = await it.task()
        await log.append([DONE])
        await it.sent.until(3)
        (held,) = await it.webhooks.of_task(log)
        it.sent.outcome = Taken()

        done = await it.row(log, "done")

        assert (held.failing_since, held.attempts) == (None, 0)
        assert done.acked == log.state.seq


@pytest.mark.requirement("I21")
async def test_a_retry_counts_that_is_asked_for_while_a_failure_is_being_stored(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with desk(SLOW, give_up_hours=1e-9) as it:
        it.sent.outcome = Failed("http_503")
        log = await it.task()
        store = it.database.write_until_stored

        async def late(*given: Any, **named: Any) -> Any:
            if given[0] is module.webhooks.update:
                monkeypatch.undo()
                it.sent.outcome = Taken()
                await it.webhooks.retry(log, "c")
            return await store(*given, **named)

        monkeypatch.setattr(it.database, "write_until_stored", late)
        await log.append([DONE])

        assert (await it.row(log, "done")).last_outcome == "ok"


@pytest.mark.requirement("I21")
async def test_a_notice_without_a_target_here_is_left_to_other_replicas(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with desk() as it:

        async def ready(operation: str) -> None:
            """Nobody has taken over."""

        async def notice() -> tuple[str, str | None]:
            query = sa.select(table.c.state, table.c.last_outcome)
            state, outcome = await it.database.read(lambda one: one.execute(query).one())
            return state, outcome

        monkeypatch.setattr(it.database, "check_writable", ready)
        it.webhooks.notices_for = lambda _: ["phone"]
        it.database.census = stores.SHARED
        log = await it.task(push=None)
        await log.append([Started()])
        async with asyncio.timeout(60):
            while (left := await notice())[1] is None:
                pass
        it.database.census = Census()
        async with asyncio.timeout(60):
            while (ended := await notice())[0] == "active":
                pass

        assert (left, ended) == (("active", "no_target"), ("done", "no_target"))
