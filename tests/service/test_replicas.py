"""Several replicas on one database: who runs an OpenCode, and what becomes of its tasks."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

import httpx2
import orjson
import psycopg
import pytest
import pytest_asyncio
from structlog.testing import capture_logs

from opencode_a2a.cluster import mailbox, ownership
from opencode_a2a.errors import UpstreamBackpressureError
from opencode_a2a.events import JsonObject
from opencode_a2a.ids import MessageId, SessionId
from opencode_a2a.opencode.driver import Driver
from opencode_a2a.store.database import Database
from opencode_a2a.store.tasks import TaskRow
from opencode_a2a.tasks import recovery, service
from opencode_a2a.turns.snapshot import messages_since
from tests.support import stores
from tests.support.answers import UNSUPPORTED, RefusedError, Task, fold
from tests.support.caller import Caller, Following
from tests.support.collector import attributes, collecting
from tests.support.opencode import FakeOpenCode
from tests.support.ports import free_port
from tests.support.proxy import Proxy
from tests.support.receiver import receiving
from tests.support.relay import Relay
from tests.support.replicas import Cluster, RunningReplica, cluster, until

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.postgresql_only]

TEXT = "one two three four"


@pytest_asyncio.fixture(loop_scope="module")
async def fake(tmp_path: Path) -> AsyncGenerator[FakeOpenCode]:
    workspace = tmp_path / "workspace"
    workspace.mkdir()
    async with FakeOpenCode(workspace).running() as opencode:
        opencode.play("plain-text")
        yield opencode
        opencode.release()


class Stored(NamedTuple):
    """A run of entries in the stored log of a task."""

    first: int
    last: int
    data: bytes


def stored(replicas: Cluster, task_id: str) -> list[Stored]:
    query = (
        "SELECT first_seq, last_seq, data FROM entries JOIN tasks ON tasks.no = task_no"
        " WHERE id = %s ORDER BY first_seq"
    )
    with psycopg.connect(stores.url(replicas.state)) as connection:
        return [Stored(*row) for row in connection.execute(query, (task_id,)).fetchall()]


async def begin(opencode: FakeOpenCode, replica: RunningReplica) -> Task:
    """Begin a task that has told half of its answer, and goes on when OpenCode is released."""
    hold = opencode.hold(count=2)
    begun = await Caller(replica).begin("hello")
    async with asyncio.timeout(60):
        await hold.reached.wait()
    return begun


@asynccontextmanager
async def streaming(opencode: FakeOpenCode, replica: RunningReplica) -> AsyncGenerator[Following]:
    """Read such a task up to there."""
    opencode.hold(count=2)
    async with Caller(replica).stream("hello") as following:
        await following.until(lambda _: "two" in fold(following.updates).text)
        yield following


async def until_ready(replica: RunningReplica, status: int) -> JsonObject:
    """Wait until ``/readyz`` answers with a status; return its checks."""
    async with asyncio.timeout(60):
        while True:
            answer = await replica.http.get("/readyz")
            if answer.status_code == status:
                return answer.json()["checks"]
            await asyncio.sleep(0.1)


async def until_listed(caller: Caller, count: int) -> list[JsonObject]:
    """Wait until so many permissions are listed; return them."""
    async with asyncio.timeout(60):
        while True:
            listed = (await caller.method("opencode.permissions.list", {}))["items"]
            if len(listed) == count:
                return listed
            await asyncio.sleep(0.05)


@pytest.mark.requirement("I20")
async def test_a_task_goes_on_elsewhere_when_its_replica_is_gone(
    fake: FakeOpenCode, tmp_path: Path
) -> None:
    async with cluster([fake], tmp_path, "a", "b") as replicas:
        a = await replicas.runs("one")
        begun = await begin(fake, a)

        await a.kill()
        b = await replicas.runs("one", but=a)
        fake.release()
        ended = await Caller(b).ended(begun.id)

    assert (a.name, b.name) == ("a", "b")
    assert (ended.state, ended.text) == ("completed", TEXT)
    assert len(fake.prompts) == 1


async def test_at_a_stop_another_goes_on_with_the_next_number(
    fake: FakeOpenCode, tmp_path: Path
) -> None:
    async with cluster([fake], tmp_path, "a", "b") as replicas:
        a, b = await replicas.runs("one"), replicas.replicas["b"]
        async with streaming(fake, a) as before:
            stopping = asyncio.create_task(a.stop())
            with pytest.raises(RefusedError, match="STREAM_ENDED"):
                await before.rest()
        await stopping
        async with Caller(b).subscribe(before.task.id, before.updates[-1].id) as after:
            await replicas.runs("one", but=a)
            fake.release()
            await after.rest()

    told = [*before.updates, *after.updates]
    numbers = [
        [int(one.id) for one in updates if one.id] for updates in (before.updates, after.updates)
    ]
    assert numbers[1][0] == numbers[0][-1] + 1  # an id like 7.1 would be no number
    assert (told[-1].state, fold(told).text) == ("completed", TEXT)
    assert len(fake.prompts) == 1


async def until_heard(replica: RunningReplica) -> None:
    """Wait until a replica listens to the OpenCode, whoever runs it."""
    fleet = replica.service.fleet
    assert fleet is not None
    await until(lambda: fleet.members["one"].up)


@pytest.mark.parametrize("killed", [False, True], ids=["stopped", "killed"])
async def test_open_text_goes_on_at_the_next_owner_before_it_is_complete(
    killed: bool, fake: FakeOpenCode, tmp_path: Path
) -> None:
    async with cluster([fake], tmp_path, "a", "b") as replicas:
        a, b = await replicas.runs("one"), replicas.replicas["b"]
        await until_heard(b)
        begun = await begin(fake, a)

        await (a.kill() if killed else a.stop())
        await replicas.runs("one", but=a)
        async with Caller(b).subscribe(begun.id) as following:
            fake.step()
            await following.until_text("one two three ")
            fake.release()
            updates = await following.rest()

    assert fold(updates).text == TEXT
    assert not [one for one in following.progress if one["type"] == "text"]


async def test_a_turn_that_is_handed_over_is_one_trace_with_a_link(
    fake: FakeOpenCode, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with collecting() as collector:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.url)
        async with cluster([fake], tmp_path, "a", "b", A2A_OTEL_ENABLED="true") as replicas:
            a, b = await replicas.runs("one"), replicas.replicas["b"]
            begun = await begin(fake, a)

            await a.stop()
            await replicas.runs("one", but=a)
            fake.release()
            await Caller(b).ended(begun.id)
            await collector.until(lambda it: bool(it.named("invoke_agent")))

    (turn,), (resume,) = collector.named("invoke_agent"), collector.named("a2a.resume")
    assert [link.span_id for link in resume.links] == [resume.parent_span_id] == [turn.span_id]
    assert attributes(resume)["a2a.link"] == "taken_over"
    assert attributes(turn)["a2a.task.state"] == "completed"


async def test_a_replica_that_came_in_the_middle_of_a_text_can_go_on_with_it(
    fake: FakeOpenCode, tmp_path: Path
) -> None:
    async with cluster([fake], tmp_path, "a") as replicas:
        a = await replicas.runs("one")
        async with streaming(fake, a) as before:
            b = await replicas.start("b")
            await until_heard(b)
            fake.step()
            await before.until_text("one two three ")
            stopping = asyncio.create_task(a.stop())
            with pytest.raises(RefusedError, match="STREAM_ENDED"):
                await before.rest()
        await stopping
        await replicas.runs("one", but=a)
        async with Caller(b).subscribe(before.task.id, before.updates[-1].id) as after:
            fake.step()
            await after.until(lambda _: fold([*before.updates, *after.updates]).text == TEXT)
            growing = fake.at_work
            fake.release()
            await after.rest()

    assert growing
    assert not [one for one in after.progress if one["type"] == "text"]
    assert fold([*before.updates, *after.updates]).text == TEXT


async def test_text_that_nobody_heard_is_said_to_wait_for_its_end(
    fake: FakeOpenCode, tmp_path: Path
) -> None:
    async with cluster([fake], tmp_path, "a") as replicas:
        a = await replicas.runs("one")
        async with streaming(fake, a) as before:
            stopping = asyncio.create_task(a.stop())
            with pytest.raises(RefusedError, match="STREAM_ENDED"):
                await before.rest()
        await stopping
        fake.step()

        b = await replicas.start("b")
        async with Caller(b).subscribe(before.task.id, before.updates[-1].id) as after:
            held = await after.until(lambda one: "'held'" in str(one.progress))
            fake.release()
            await after.rest()

    assert held.progress["status"] == "held"
    assert [one["type"] for one in after.progress].count("text") == 1
    assert fold([*before.updates, *after.updates]).text == TEXT


@pytest.mark.requirement("I18")
async def test_a_frozen_replica_changes_nothing_when_it_wakes_and_ends(
    fake: FakeOpenCode, tmp_path: Path
) -> None:
    async with cluster([fake], tmp_path, "a", "b") as replicas:
        a = await replicas.runs("one")
        begun = await begin(fake, a)
        await a.freeze()
        b = await replicas.runs("one", but=a)
        before = stored(replicas, begun.id)

        fake.release()  # what the woken one hears first is the rest of the turn
        ended = await Caller(b).ended(begun.id)
        after = stored(replicas, begun.id)
        a.thaw()
        await a.ended()
        finally_stored = stored(replicas, begun.id)

    assert a.service.failed
    assert "counts as gone; restart it" in a.service.why
    assert (ended.state, ended.text) == ("completed", TEXT)
    assert before == after[: len(before)]
    assert finally_stored == after
    assert len(fake.prompts) == 1


async def test_a_new_replica_gets_its_share_and_one_that_stops_leaves_all(
    fake: FakeOpenCode, tmp_path: Path
) -> None:
    async with (
        FakeOpenCode(fake.workspace).running() as second,
        cluster([fake, second], tmp_path, "a") as replicas,
    ):
        await replicas.runs("one")
        await replicas.runs("two")
        alone = replicas.owners()
        b = await replicas.start("b")
        await until(lambda: set(replicas.owners().values()) == {"a", "b"})
        await b.stop()
        await until(lambda: set(replicas.owners().values()) == {"a"})

    assert alone == {"one": "a", "two": "a"}


async def test_one_that_cannot_be_reached_is_left_to_another(
    fake: FakeOpenCode, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ownership, "UNREACHED_SECONDS", 0.5)
    async with cluster([fake], tmp_path) as replicas:
        wire = await Proxy(fake.url).__aenter__()
        entry = {"name": "one", "url": wire.url, "shared": True}
        await replicas.start("a", OPENCODE_UPSTREAMS=orjson.dumps([entry]).decode())
        a = await replicas.runs("one")
        await replicas.start("b")
        async with streaming(fake, a) as before:
            await wire.__aexit__(None, None, None)
            with pytest.raises(RefusedError, match="STREAM_ENDED"):
                await before.rest()
        b = await replicas.runs("one", but=a)
        fake.release()
        async with Caller(b).subscribe(before.task.id, before.updates[-1].id) as after:
            await after.rest()

    told = [*before.updates, *after.updates]
    assert (told[-1].state, fold(told).text) == ("completed", TEXT)
    assert len(fake.prompts) == 1


async def test_webhooks_and_work_without_a_task_go_on_at_the_next_owner(
    fake: FakeOpenCode, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ownership, "UNREACHED_SECONDS", 0.5)
    async with receiving() as receiver, cluster([fake], tmp_path) as replicas:
        wire = await Proxy(fake.url).__aenter__()
        entry = {"name": "one", "url": wire.url, "shared": True}
        upstreams = orjson.dumps([entry]).decode()
        a = await replicas.start(
            "a", OPENCODE_UPSTREAMS=upstreams, A2A_PUSH_ALLOW_PRIVATE_HOSTS="true"
        )
        await replicas.runs("one")
        await replicas.start("b", A2A_PUSH_ALLOW_PRIVATE_HOSTS="true")
        caller = Caller(a)
        fake.play("permission-once")
        session = (await caller.method("opencode.sessions.create", {}))["item"]["id"]
        work = {"parts": [{"type": "text", "text": "run it"}]}
        await caller.method(
            "opencode.sessions.prompt_async", {"session_id": session, "request": work}
        )
        await until_listed(caller, 1)
        fake.play("plain-text")
        begun = await begin(fake, a)
        await caller.ask("push create", {"taskId": begun.id, "url": receiver.url})
        await wire.__aexit__(None, None, None)
        caller = Caller(await replicas.runs("one", but=a))
        [asked] = await until_listed(caller, 1)
        reply = {"request_id": asked["request_id"], "reply": "once"}
        await caller.method("a2a.interrupt.permission.reply", reply)
        await until_listed(caller, 0)
        fake.release()
        ended = await caller.ended(begun.id)
        told = await receiver.ended()

    assert asked["session_id"] == session
    assert len(fake.replies) == 1
    assert ended.state == "completed"
    assert [one.state for one in told] == ["completed"]


@pytest.mark.requirement("I21")
async def test_what_a_replica_was_sending_when_it_died_is_sent_again_by_another(
    fake: FakeOpenCode, tmp_path: Path
) -> None:
    async with (
        receiving() as receiver,
        cluster([fake], tmp_path, "a", "b", A2A_PUSH_ALLOW_PRIVATE_HOSTS="true") as replicas,
    ):
        a = await replicas.runs("one")
        caller = Caller(a)
        fake.hold(count=2)
        receiver.gate.clear()
        config: JsonObject = {
            "returnImmediately": True,
            "taskPushNotificationConfig": {"url": receiver.url},
        }
        sent = caller.message("hello") | {"configuration": config}
        task = (await caller.ask("send", sent)).task["id"]
        await receiver.until(lambda it: it.states == ["working"])
        await a.kill()
        receiver.gate.set()
        b = Caller(await replicas.runs("one", but=a))
        fake.release()
        ended = await b.ended(task)
        told = await receiver.ended()
        listed = (await b.method("opencode.webhooks.list", {"task_id": task}))["items"]

    assert ended.state == "completed"
    assert [one.state for one in told] == ["working", "working", "completed"]
    assert told[0].id == told[1].id != told[2].id
    assert [one["url"] for one in listed] == [receiver.url]


async def test_a_turn_whose_task_was_lost_is_stopped_and_no_other(
    fake: FakeOpenCode, tmp_path: Path
) -> None:
    async with cluster([fake], tmp_path, "a", "b") as replicas:
        a = await replicas.runs("one")
        # A person at OpenCode's own terminal.
        hold = fake.hold(count=2)
        async with httpx2.AsyncClient(base_url=fake.url, trust_env=False) as terminal:
            own = (await terminal.post("/session", json={})).json()["id"]
            typed: JsonObject = {"parts": [{"type": "text", "text": "by hand"}]}
            await terminal.post(f"/session/{own}/prompt_async", json=typed)
        async with asyncio.timeout(60):
            await hold.reached.wait()
        lost, kept = await begin(fake, a), await begin(fake, a)

        # A failover to a server that lacks the last second.
        await a.kill()
        with psycopg.connect(stores.url(tmp_path)) as connection:
            row = (lost.context_id,)
            query = "DELETE FROM links WHERE context_id = %s RETURNING session_id"
            [session] = connection.execute(query, row).fetchall()[0]
            connection.execute("DELETE FROM owners WHERE session_id = %s", (session,))
            [no] = connection.execute(
                "DELETE FROM tasks WHERE id = %s RETURNING no", (lost.id,)
            ).fetchall()[0]
            connection.execute("DELETE FROM messages WHERE task_no = %s", (no,))
            connection.execute("DELETE FROM entries WHERE task_no = %s", (no,))
        with capture_logs() as records:
            b = await replicas.runs("one", but=a)
            await until(lambda: any("for no task" in one["event"] for one in records))
        fake.release()
        hold.released.set()
        ended = await Caller(b).ended(kept.id)
        await fake.idle()

    [told] = [one for one in records if "for no task" in one["event"]]
    assert (told["count"], told["stopped"], told["left_alone"]) == (2, [session], [own])
    assert {*fake.aborts} == {session}
    assert (ended.state, ended.text) == ("completed", TEXT)


async def test_a_replica_is_ready_as_long_as_any_replica_reaches_an_opencode(
    fake: FakeOpenCode, tmp_path: Path
) -> None:
    async with cluster([fake], tmp_path, "a") as replicas:
        a = await replicas.runs("one")
        nobody = f"http://127.0.0.1:{free_port()}"
        entry = {"name": "two", "url": nobody, "shared": True}
        b = await replicas.start("b", OPENCODE_UPSTREAMS=orjson.dumps([entry]).decode())
        with_the_other = await until_ready(b, 200)
        await a.stop()
        alone = await until_ready(b, 503)

    assert with_the_other == {"database": "ok", "opencode": "ok"}
    assert alone == {"database": "ok", "opencode": "failed"}


async def test_what_nobody_will_run_any_more_is_lost(fake: FakeOpenCode, tmp_path: Path) -> None:
    async with FakeOpenCode(fake.workspace).running() as second:
        second.play("plain-text")
        async with cluster([second], tmp_path) as replicas:
            replicas.opencodes = {"two": second}
            begun = await begin(second, a := await replicas.start("a"))
            await a.stop()
            unstored = stored(replicas, begun.id)[-1].last + 1
            replicas.opencodes = {"one": fake}
            b = await replicas.start("b", OPENCODE_UPSTREAM_LOST_SECONDS="1")
            ended = await Caller(b).ended(begun.id)
            # As the last owner may have numbered an entry that it showed, and died over.
            async with Caller(b).subscribe(begun.id, str(unstored)) as after:
                await after.rest()
            again = await Caller(b).send("again", context=begun.context_id)
        second.release()

    assert ended.state == "failed"
    assert "UPSTREAM_LOST" in str(ended.raw)
    assert after.task.state == "failed"
    assert (again.state, again.text) == ("completed", TEXT)


async def test_work_without_a_task_of_an_opencode_that_is_gone_is_looked_for_no_more(
    fake: FakeOpenCode, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    searched, find = list[SessionId](), mailbox.SessionSearch.find

    async def counted(search: mailbox.SessionSearch, session_id: SessionId) -> str | None:
        searched.append(session_id)
        return await find(search, session_id)

    monkeypatch.setattr(mailbox.SessionSearch, "find", counted)
    async with (
        FakeOpenCode(fake.workspace).running() as second,
        cluster([second], tmp_path) as replicas,
    ):
        second.play("permission-once")
        replicas.opencodes = {"two": second}
        a = await replicas.start("a")
        caller = Caller(a)
        session = (await caller.method("opencode.sessions.create", {}))["item"]["id"]
        work = {"parts": [{"type": "text", "text": "run it"}]}
        await caller.method(
            "opencode.sessions.prompt_async", {"session_id": session, "request": work}
        )
        [asked] = await until_listed(caller, 1)
        await a.stop()
        replicas.opencodes = {"one": fake}
        await replicas.start("b", OPENCODE_UPSTREAM_LOST_SECONDS="1")

        def resolution() -> str | None:
            query = "SELECT resolution FROM interrupts WHERE request_id = %s"
            with psycopg.connect(stores.url(replicas.state)) as connection:
                [row] = connection.execute(query, (asked["request_id"],)).fetchall()
                return row[0]

        await until(lambda: resolution() == "void")
        replicas.opencodes = {"three": fake}
        await replicas.start("c")

    assert searched == []


@pytest.mark.requirement("I7")
async def test_a_task_that_no_replica_runs_is_canceled_and_stopped_by_the_next_owner(
    fake: FakeOpenCode, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tries = list[str]()

    async def busy_at_first(opencode: Driver, session: SessionId, prompt: MessageId) -> Any:
        tries.append(session)
        if len(tries) == 1:
            raise UpstreamBackpressureError
        return await messages_since(opencode, session, prompt)

    monkeypatch.setattr(mailbox, "PATIENCE_SECONDS", 0.5)
    monkeypatch.setattr(recovery, "messages_since", busy_at_first)
    async with (
        FakeOpenCode(fake.workspace).running() as second,
        cluster([second], tmp_path) as replicas,
    ):
        second.play("permission-once")
        replicas.opencodes = {"two": second}
        a = await replicas.start("a")
        asked = await Caller(a).send("run it")
        await a.stop()
        replicas.opencodes = {"one": fake}
        b = Caller(await replicas.start("b"))
        async with b.subscribe(asked.id) as following:
            canceled = await b.cancel(asked.id)
            again = await b.cancel(asked.id)
            await following.rest()
        late = await b.ask("send", b.message("once", taskId=asked.id))
        waiting = (await b.method("opencode.permissions.list", {}))["items"]
        replicas.opencodes = {"two": second}
        stopped = asyncio.create_task(second.asked("abort", 1))
        await asyncio.sleep(0)  # it counts from now on
        back = await replicas.start("a")
        await stopped
        await second.idle()
        later = await Caller(back).get(asked.id)
        replied = len(second.replies)

    assert len(tries) == 2
    assert (asked.state, canceled.state) == ("input_required", "canceled")
    assert "UPSTREAM_ABORT_UNCONFIRMED" in str(canceled.raw)
    assert following.task.state == "canceled"
    assert canceled.raw == again.raw == later.raw
    late.refuses(UNSUPPORTED)
    assert waiting == []
    assert replied == 0


@pytest.mark.requirement("I7")
async def test_a_canceled_turn_with_a_further_message_is_stopped_by_the_next_owner(
    fake: FakeOpenCode, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mailbox, "PATIENCE_SECONDS", 0.5)
    async with (
        FakeOpenCode(fake.workspace).running() as second,
        cluster([second], tmp_path) as replicas,
    ):
        second.play("plain-text")
        replicas.opencodes = {"two": second}
        begun = await begin(second, a := await replicas.start("a"))
        # Turns of no task are looked for in the default directory only, and would be stopped too.
        monkeypatch.setattr(recovery, "UNKNOWN_AFTER_SECONDS", 3600.0)
        await Caller(a).begin("more", task=begun.id)
        await second.prompted(2)
        await a.stop()
        replicas.opencodes = {"one": fake}
        canceled = await Caller(await replicas.start("b")).cancel(begun.id)
        replicas.opencodes = {"two": second}
        stopped = asyncio.create_task(second.asked("abort", 1))
        await asyncio.sleep(0)  # it counts from now on
        await replicas.start("a")
        await stopped
        second.release()

    assert canceled.state == "canceled"
    assert second.texts == ["hello", "more"]


async def test_a_cancel_is_followed_by_an_owner_that_comes_at_the_last_moment(
    fake: FakeOpenCode, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop, end_unowned = asyncio.get_running_loop(), service.end_unowned
    async with (
        FakeOpenCode(fake.workspace).running() as second,
        cluster([second], tmp_path) as replicas,
    ):

        async def come_back() -> None:
            replicas.opencodes = {"two": second}
            await replicas.start("a")
            await replicas.runs("two")

        async def end_late(database: Database, row: TaskRow) -> bool:
            patches.undo()  # only once
            coming = asyncio.run_coroutine_threadsafe(come_back(), loop)
            await asyncio.wrap_future(coming)
            return await end_unowned(database, row)

        second.play("permission-once")
        replicas.opencodes = {"two": second}
        a = await replicas.start("a")
        asked = await Caller(a).send("run it")
        await a.stop()
        replicas.opencodes = {"one": fake}
        b = Caller(await replicas.start("b"))
        with monkeypatch.context() as patches:
            patches.setattr(mailbox, "PATIENCE_SECONDS", 0.5)
            patches.setattr(service, "end_unowned", end_late)
            canceled = await b.cancel(asked.id)

    assert canceled.state == "canceled"
    assert "UPSTREAM_ABORT_UNCONFIRMED" not in str(canceled.raw)


async def test_one_that_is_cut_off_from_the_database_shows_and_changes_nothing(
    fake: FakeOpenCode, tmp_path: Path
) -> None:
    async with Relay(stores.server().port) as relay, cluster([fake], tmp_path) as replicas:
        url = relay.url(stores.url(replicas.state))
        a = await replicas.start("a", A2A_TASK_STORE_DATABASE_URL=url)
        await replicas.runs("one")
        await replicas.start("b")
        async with streaming(fake, a) as before:
            relay.down = True
            relay.break_off()
            with pytest.raises(RefusedError, match="STREAM_ENDED"):
                await before.rest()
        b = await replicas.runs("one", but=a)
        fake.release()  # the one that is cut off hears it as well
        async with Caller(b).subscribe(before.task.id, before.updates[-1].id) as after:
            await after.rest()
        log = stored(replicas, before.task.id)
        relay.down = False
        await a.ended()
        later = stored(replicas, before.task.id)

    assert "counts as gone" in a.service.why
    assert (after.task.state, after.task.text) == ("completed", TEXT)
    assert later == log
    assert len(fake.prompts) == 1


async def test_a_cancel_is_answered_though_the_owner_was_cut_off_meanwhile(
    fake: FakeOpenCode, tmp_path: Path
) -> None:
    async with Relay(stores.server().port) as relay, cluster([fake], tmp_path) as replicas:
        url = relay.url(stores.url(replicas.state))
        a = await replicas.start("a", A2A_TASK_STORE_DATABASE_URL=url)
        await replicas.runs("one")
        # It does not take over before a is back.
        b = await replicas.start("b", lease=30.0)
        fake.stopping.clear()
        async with streaming(fake, a) as following:
            stopping = asyncio.create_task(fake.asked("abort", 1))
            canceling = asyncio.create_task(Caller(b).cancel(following.task.id))
            await stopping
            relay.down = True
            relay.break_off()
            with pytest.raises(RefusedError, match="STREAM_ENDED"):
                await following.rest()
        relay.down = False
        fake.stopping.set()
        canceled = await canceling

    assert (canceled.state, canceled.text) == ("canceled", "one two ")


async def test_of_two_with_one_name_the_first_is_told_so_and_ends(
    fake: FakeOpenCode, tmp_path: Path
) -> None:
    async with cluster([fake], tmp_path, "a") as replicas:
        first = await replicas.runs("one")
        second = await replicas.start("a")
        await first.ended()
        await replicas.runs("one")
        ended = await Caller(second).send("hello")

    [why] = first.service.why.splitlines()
    assert "another replica is called a; give each its own A2A_REPLICA_NAME" in why
    assert ended.state == "completed"


async def test_replicas_that_list_the_opencodes_in_another_order_agree_which_one_to_ask(
    fake: FakeOpenCode, tmp_path: Path
) -> None:
    async with (
        FakeOpenCode(fake.workspace).running() as second,
        cluster([fake, second], tmp_path) as replicas,
    ):
        second.play("plain-text")
        workspace = {"id": "wrk_1deb3fc6b000iKn0wo4MZ7ksDZ"}  # which no method has made
        for opencode in (fake, second):
            opencode.workspaces[:] = [{**workspace, "type": "worktree", "name": "x"}]
        entries = [
            {"name": name, "url": opencode.url, "shared": True}
            for name, opencode in reversed(replicas.opencodes.items())
        ]
        # The first to start owns both and leaves the other the first in its own list. So neither
        # owns the OpenCode that is the first in its settings.
        await replicas.start("b", OPENCODE_UPSTREAMS=orjson.dumps(entries).decode())
        a = Caller(await replicas.start("a"))
        await until(lambda: replicas.owners() == {"one": "b", "two": "a"})
        await replicas.runs("two")
        named = {"opencode": {"workspace": workspace}}
        task = await a.send("hello", metadata=named)
        again = await a.send("more", context=task.context_id, metadata=named)
        unknown = {"session_id": "ses_1deb3fc6bffeKn0wo4MZ7ksDZA"}
        refused = await a.refused("opencode.sessions.get", unknown)

    assert (task.state, again.state) == ("completed", "completed")
    assert again.session_id == task.session_id
    assert refused.reason == "SESSION_NOT_FOUND"


async def test_new_contexts_begin_here_until_another_replica_has_more_room(
    fake: FakeOpenCode, tmp_path: Path
) -> None:
    async with (
        FakeOpenCode(fake.workspace).running() as second,
        cluster([fake, second], tmp_path, "a") as replicas,
    ):
        second.play("plain-text")
        await replicas.runs("one")
        await replicas.start("b")
        await until(lambda: set(replicas.owners().values()) == {"a", "b"})
        names = {name: upstream for upstream, name in replicas.owners().items()}
        here, there = replicas.opencodes[names["a"]], replicas.opencodes[names["b"]]
        await replicas.runs(names["b"])
        fleet = replicas.replicas["a"].service.fleet
        assert fleet is not None
        up = {names["b"]: "up"}
        await until(lambda: {r.name: r.state for r in fleet.census.elsewhere.values()} == up)
        holds = here.hold(), there.hold()
        caller = Caller(replicas.replicas["a"])
        tasks = [await caller.begin(f"task {number}") for number in range(4)]
        for hold in holds:
            async with asyncio.timeout(60):
                await hold.reached.wait()
        prompts = len(here.prompts), len(there.prompts)
        here.release()
        there.release()
        ended = [await caller.ended(task.id) for task in tasks]

    assert prompts == (3, 1)
    assert [task.state for task in ended] == ["completed"] * 4


async def test_new_contexts_begin_here_if_the_replica_with_more_room_is_gone(
    fake: FakeOpenCode, tmp_path: Path
) -> None:
    async with (
        FakeOpenCode(fake.workspace).running() as second,
        cluster([fake, second], tmp_path) as replicas,
    ):
        for name, (upstream, opencode) in zip("ab", replicas.opencodes.items(), strict=True):
            entry = {"name": upstream, "url": opencode.url, "shared": True}
            await replicas.start(name, OPENCODE_UPSTREAMS=orjson.dumps([entry]).decode())
        a, b = await replicas.runs("one"), await replicas.runs("two")
        fleet = a.service.fleet
        assert fleet is not None
        up = {"two": "up"}
        await until(lambda: {r.name: r.state for r in fleet.census.elsewhere.values()} == up)
        await b.kill()
        await until(lambda: not fleet.census.has_others)
        hold = fake.hold()
        tasks = [await Caller(a).begin(f"task {number}") for number in range(4)]
        async with asyncio.timeout(60):
            await hold.reached.wait()
        fake.release()
        ended = [await Caller(a).ended(task.id) for task in tasks]

    assert [task.state for task in ended] == ["completed"] * 4
    assert second.prompts == []


async def test_first_messages_of_a_context_that_come_to_several_replicas_run_in_one_session(
    fake: FakeOpenCode, tmp_path: Path
) -> None:
    async with (
        FakeOpenCode(fake.workspace).running() as second,
        cluster([fake, second], tmp_path, "a", "b") as replicas,
    ):
        second.play("plain-text")
        await until(lambda: set(replicas.owners().values()) == {"a", "b"})
        for upstream in replicas.opencodes:
            await replicas.runs(upstream)
        callers = [Caller(replica) for replica in replicas.replicas.values()]
        torn = dict[str, set[str]]()
        for number in range(20):
            context = f"context {number}"
            tasks = await asyncio.gather(
                *(caller.send(f"{n}", context=context) for n in range(2) for caller in callers)
            )
            if len(sessions := {str(task.session_id) for task in tasks}) > 1:
                torn[context] = sessions

    assert torn == {}
    assert fake.prompts
    assert second.prompts
