"""Every operation through a replica that does not run the task: it is done, and told, as there."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2
import orjson
import psycopg
import pytest
import pytest_asyncio

from opencode_a2a.events import Json, JsonObject
from opencode_a2a.ids import Principal
from opencode_a2a.log.seen import UNREAD_SECONDS
from opencode_a2a.store.replicas import MAIL_FORMAT
from opencode_a2a.tasks.open import OpenTasks
from tests.support import stores
from tests.support.answers import NOT_CANCELABLE, NOT_FOUND, PARAMS, UNSUPPORTED, Wire
from tests.support.caller import Caller, stray
from tests.support.opencode import FakeOpenCode
from tests.support.receiver import receiving
from tests.support.replicas import RunningReplica, cluster, until

pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.postgresql_only,
    pytest.mark.requirement("ours-any-replica"),
]

ANSWER = "one two three four"


@dataclass
class Pair:
    """Two replicas: ``a`` runs the OpenCode, and ``b`` is asked."""

    opencode: FakeOpenCode
    a: RunningReplica
    b: RunningReplica

    async def running(self, caller: Caller) -> str:
        """Begin a task that works until it is released."""
        hold = self.opencode.hold(count=2)
        task = await caller.begin("hello")
        async with asyncio.timeout(60):
            await hold.reached.wait()
        return task.id


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def replicas(tmp_path_factory: pytest.TempPathFactory) -> AsyncGenerator[Pair]:
    home = tmp_path_factory.mktemp("calls")
    (home / "workspace" / "sub").mkdir(parents=True)
    async with (
        FakeOpenCode(home / "workspace").running() as opencode,
        cluster([opencode], home, "a", "b", A2A_PUSH_ALLOW_PRIVATE_HOSTS="true") as made,
    ):
        named = ("build", "plan")
        opencode.agents[:] = [{"name": name, "mode": "primary"} for name in named]
        yield Pair(opencode, await made.runs("one"), made.replicas["b"])


@pytest.fixture
def pair(replicas: Pair) -> Pair:
    opencode = replicas.opencode
    opencode.release()
    opencode.prompts.clear()
    opencode.play("plain-text")
    return replicas


@pytest.fixture
def here(pair: Pair) -> Caller:
    """A caller of the replica that runs everything."""
    return Caller(pair.a)


@pytest.fixture
def there(pair: Pair) -> Caller:
    """The same caller at the other replica."""
    return Caller(pair.b)


async def test_a_message_is_answered_and_the_next_goes_on(here: Caller, there: Caller) -> None:
    task = await there.send("hello", message_id="first")
    again = await there.send("hello", message_id="first")
    more = await there.send("more", context=task.context_id)

    assert (task.state, task.text) == ("completed", ANSWER)
    assert (await here.get(task.id)).raw == task.raw == again.raw
    assert (more.state, more.session_id) == ("completed", task.session_id)


async def test_a_message_is_streamed(pair: Pair) -> None:
    async with Caller(pair.b, Wire.REST).stream("hello") as following:
        await following.rest()

    assert (following.task.state, following.task.text) == ("completed", ANSWER)
    assert [update.id for update in following.updates][-1]
    assert len(pair.opencode.prompts) == 1


async def test_one_message_at_both_at_once_is_one_task(
    pair: Pair, here: Caller, there: Caller
) -> None:
    sent = [caller.begin("twice", message_id="twice") for caller in (here, there) * 3]
    tasks = await asyncio.gather(*sent)
    await here.ended(tasks[0].id)

    assert len({task.id for task in tasks}) == 1
    assert pair.opencode.texts == ["twice"]


async def test_a_permission_is_answered_once(pair: Pair, here: Caller, there: Caller) -> None:
    pair.opencode.play("permission-once")
    asked = await there.send("run it")
    done = await there.send("once", task=asked.id, message_id="yes")
    again = await there.send("once", task=asked.id, message_id="yes")

    assert "ls -la" in asked.said
    assert (done.id, done.state, done.text) == (asked.id, "completed", "after")
    assert again.raw == done.raw
    assert done.history == ["run it", "once"]


async def test_what_one_replica_showed_is_answered_at_the_other(
    pair: Pair, here: Caller, there: Caller
) -> None:
    pair.opencode.play("permission-once")
    shown_there = await there.send("run it")
    first = await here.send("once", context=shown_there.context_id)
    shown_here = await here.send("run it")
    second = await there.send("once", context=shown_here.context_id)

    assert [first.id, second.id] == [shown_there.id, shown_here.id]
    assert (first.state, second.state) == ("completed", "completed")


@pytest.mark.requirement("I23")
async def test_a_doubled_yes_by_context_is_not_for_the_next_task(pair: Pair, there: Caller) -> None:
    pair.opencode.play("permission-once")
    first = await there.send("run it")
    beside: JsonObject = {"opencode": {"new_task": True}}
    queued = await there.begin("run it", context=first.context_id, metadata=beside)
    done = await there.send("yes", context=first.context_id)
    asked = await there.wait(queued.id, "input_required")
    doubled = await there.ask("send", there.message("yes", contextId=first.context_id))
    left = await there.get(queued.id)
    await asyncio.sleep(UNREAD_SECONDS)
    read = await there.send("yes", context=first.context_id)

    assert (done.id, done.state) == (first.id, "completed")
    assert "ls -la" in asked.said
    doubled.refuses(UNSUPPORTED)
    assert (left.state, left.history) == ("input_required", ["run it"])
    assert (read.id, read.state) == (queued.id, "completed")


async def test_an_answer_that_is_not_understood_is_refused_alike(
    pair: Pair, here: Caller, there: Caller
) -> None:
    pair.opencode.play("permission-once")
    asked = await here.send("run it")
    named = await there.ask("send", there.message("what is this?", taskId=asked.id))
    unnamed = there.message("what is this?", contextId=asked.context_id)
    elsewhere, local = await there.ask("send", unnamed), await here.ask("send", unnamed)
    await here.cancel(asked.id)

    assert named.refuses(PARAMS) == ["message.parts"]
    elsewhere.refuses(UNSUPPORTED)
    assert asked.id.encode() in elsewhere.content
    assert elsewhere.body["error"] == local.body["error"]


async def test_a_yes_for_one_of_several_tasks_is_refused(
    pair: Pair, here: Caller, there: Caller
) -> None:
    pair.opencode.play("permission-once")
    first = await there.send("run it")
    place: JsonObject = {"opencode": {"directory": "sub"}}
    second = await there.send("run it", context=first.context_id, metadata=place)
    elsewhere, local = [
        await caller.ask("send", caller.message("yes", contextId=first.context_id))
        for caller in (there, here)
    ]
    done = [await there.send("yes", task=task.id) for task in (first, second)]

    elsewhere.refuses(UNSUPPORTED)
    assert elsewhere.body["error"] == local.body["error"]
    assert [task.state for task in done] == ["completed", "completed"]


async def test_a_plan_is_approved(pair: Pair, there: Caller) -> None:
    planned = await there.send("do it", metadata={"opencode": {"plan": True}})
    done = await there.send("go", context=planned.context_id)

    assert planned.state == "input_required"
    assert (done.id, done.state, done.text) == (planned.id, "completed", ANSWER)


async def test_a_task_that_works_takes_another_message(
    pair: Pair, here: Caller, there: Caller
) -> None:
    task_id = await pair.running(here)
    queue: JsonObject = {"shared": {"delivery": "queue"}}
    added = await there.begin("more", task=task_id, message_id="more", metadata=queue)
    again = await there.begin("more", task=task_id, message_id="more", metadata=queue)
    pair.opencode.release()
    ended = await there.ended(task_id)

    assert added.id == again.id == task_id
    assert pair.opencode.texts == ["hello", "more"]
    assert (ended.state, ended.text) == ("completed", f"{ANSWER}\n\n{ANSWER}")


async def test_a_message_for_a_task_that_ends_meanwhile_starts_one_where_that_belongs(
    pair: Pair, here: Caller, there: Caller, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair.opencode.play("permission-once")
    asked = await there.send("run it")
    loop, locate = asyncio.get_running_loop(), OpenTasks.find_with_owner

    async def locate_late(self: OpenTasks, principal: Principal, task_id: str) -> Any:
        with monkeypatch.context() as patch:  # only once
            patch.setattr(OpenTasks, "find_with_owner", locate)
            canceled = asyncio.run_coroutine_threadsafe(here.cancel(asked.id), loop)
            await asyncio.wrap_future(canceled)
            return await locate(self, principal, task_id)

    pair.opencode.play("plain-text")
    hold = pair.opencode.hold(count=2)
    with monkeypatch.context() as patch:
        patch.setattr(OpenTasks, "find_with_owner", locate_late)
        next_one = await there.begin("hello", context=asked.context_id)
    await hold.reached.wait()
    async with asyncio.timeout(30):
        canceled = await here.cancel(next_one.id)

    assert next_one.id != asked.id
    assert (canceled.state, canceled.history) == ("canceled", ["hello"])


async def test_another_try_after_a_sign_in_is_taken(pair: Pair, there: Caller) -> None:
    pair.opencode.play("error-401")
    asked = await there.send("hello")
    pair.opencode.play("plain-text")
    done = await there.send("again", task=asked.id)

    assert asked.state == "auth_required"
    assert (done.id, done.state, done.text) == (asked.id, "completed", ANSWER)


async def test_a_task_is_canceled(pair: Pair, here: Caller, there: Caller) -> None:
    task_id = await pair.running(here)
    canceled = await there.cancel(task_id)
    pair.opencode.release()
    again = await there.cancel(task_id)
    missing = await there.ask("cancel", {"id": "nothing"})
    done = await there.send("hello")
    late = await there.ask("cancel", {"id": done.id})

    assert canceled.state == "canceled"
    assert again.raw == canceled.raw == (await here.get(task_id)).raw
    missing.refuses(NOT_FOUND)
    late.refuses(NOT_CANCELABLE)


async def test_an_ended_task_takes_no_message(here: Caller, there: Caller) -> None:
    done = await here.send("hello")
    late = await there.ask("send", there.message("more", taskId=done.id))
    wrong = await there.ask("send", there.message("more", taskId=done.id, contextId="other"))

    late.refuses(UNSUPPORTED)
    assert wrong.refuses(PARAMS) == ["message.contextId"]


async def test_a_session_is_named(pair: Pair, here: Caller, there: Caller) -> None:
    task = await here.send("hello")
    named: JsonObject = {"shared": {"session": {"id": task.session_id}}}
    more = await there.send("more", metadata=named)
    unknown: Any = {"shared": {"session": {"id": "ses_000000000000unknownunkno"}}}
    refused = await there.ask("send", there.message("more", metadata=unknown))

    assert (more.state, more.session_id) == ("completed", task.session_id)
    assert refused.refuses(PARAMS) == ["metadata.shared.session.id"]


async def test_a_webhook_is_set_and_deleted(pair: Pair, here: Caller, there: Caller) -> None:
    task_id = await pair.running(here)
    async with receiving() as receiver:
        made = (await there.ask("push create", {"taskId": task_id, "url": receiver.url})).result
        other = {"taskId": task_id, "id": "mine", "url": receiver.url, "token": "secret"}
        await there.ask("push create", other)
        listed = (await there.ask("push list", {"taskId": task_id})).result["configs"]
        gone = await there.ask("push delete", {"taskId": task_id, "id": "mine"})
        left = (await there.ask("push list", {"taskId": task_id})).result["configs"]
        pair.opencode.release()
        told = await receiver.ended()
        retried = await there.method(
            "opencode.webhooks.retry", {"task_id": task_id, "id": made["id"]}
        )
        missing = await there.refused("opencode.webhooks.retry", {"task_id": task_id, "id": "no"})

    assert [one["id"] for one in listed] == [made["id"], "mine"]
    assert gone.status == 200
    assert [one["id"] for one in left] == [made["id"]]
    assert [one.state for one in told] == ["completed"]
    assert retried["ok"]
    assert missing.reason == "WEBHOOK_NOT_FOUND"


async def test_a_webhook_of_a_message_is_served_where_the_task_runs(
    pair: Pair, there: Caller
) -> None:
    async with receiving() as receiver:
        config: JsonObject = {"taskPushNotificationConfig": {"url": receiver.url}}
        params = there.message("hello") | {"configuration": config}
        await there.ask("send", params)
        told = await receiver.ended()

    assert told[-1].state == "completed"


async def test_methods_about_a_session_are_called_where_it_is(
    pair: Pair, here: Caller, there: Caller
) -> None:
    task = await here.send("hello")
    named = {"session_id": task.session_id}
    for method, params in (
        ("opencode.sessions.get", named),
        ("opencode.sessions.messages.list", named),
        ("opencode.sessions.children", named),
        ("opencode.sessions.list", {"limit": 3}),
        ("opencode.sessions.status", {}),
    ):
        assert await there.method(method, params) == await here.method(method, params), method
    renamed = {"session_id": task.session_id, "request": {"title": "Another"}}
    assert (await there.method("opencode.sessions.update", renamed))["item"]["title"] == "Another"
    made = await there.method("opencode.sessions.create", {"request": {"title": "New"}})
    assert (await there.method("opencode.sessions.get", {"session_id": made["item"]["id"]}))["item"]


async def test_methods_are_refused_alike(here: Caller, there: Caller) -> None:
    for method, params in (
        ("opencode.sessions.get", {"session_id": "ses_000000000000unknownunkno"}),
        ("opencode.sessions.get", {}),
        ("opencode.sessions.get", {"session_id": "wrong"}),
        ("opencode.sessions.diff", {"session_id": "ses_000000000000unknownunkno"}),
        ("a2a.interrupt.permission.reply", {"request_id": "per_unknown", "reply": "once"}),
    ):
        refusal = await here.answer(method, params)
        assert "error" in refusal, method
        assert await there.answer(method, params) == refusal, method


async def test_a_permission_is_listed_and_answered_by_method(
    pair: Pair, here: Caller, there: Caller
) -> None:
    pair.opencode.play("permission-once")
    asked = await here.send("run it")
    (listed,) = (await there.method("opencode.permissions.list", {}))["items"]
    reply = {"request_id": listed["request_id"], "reply": "once"}
    wrong = await there.refused(
        "a2a.interrupt.question.reply", {"request_id": listed["request_id"], "answers": [["x"]]}
    )
    answered = await there.method("a2a.interrupt.permission.reply", reply)
    again = await there.method("a2a.interrupt.permission.reply", reply)
    done = await there.ended(asked.id)

    assert listed["task_id"] == asked.id
    assert wrong.reason == "INTERRUPT_TYPE_MISMATCH"
    assert answered == again == {"ok": True, "request_id": listed["request_id"]}
    assert (done.state, done.text) == ("completed", "after")


async def test_aborting_a_session_cancels_its_task(pair: Pair, here: Caller, there: Caller) -> None:
    task_id = await pair.running(here)
    session_id = (await here.get(task_id)).session_id
    await there.method("opencode.sessions.abort", {"session_id": session_id})

    assert (await there.ended(task_id)).state == "canceled"


async def test_an_abort_is_repeated_at_the_next_owner_if_its_replica_stops(tmp_path: Path) -> None:
    (tmp_path / "workspace").mkdir()
    async with (
        FakeOpenCode(tmp_path / "workspace").running() as opencode,
        cluster([opencode], tmp_path, "a", "b") as made,
    ):
        a, b = await made.runs("one"), made.replicas["b"]
        hold = opencode.hold(count=2)
        task = await Caller(a).begin("hello")
        await hold.reached.wait()
        session_id = (await Caller(a).get(task.id)).session_id
        opencode.stopping.clear()
        aborting = asyncio.create_task(
            Caller(a).answer("opencode.sessions.abort", {"session_id": session_id})
        )
        await opencode.asked("abort", 1)
        stopping = asyncio.create_task(a.stop())
        await until(lambda: b.service.fleet is not None and b.service.fleet.first.owned)
        opencode.stopping.set()
        answer, ended = await aborting, await Caller(b).ended(task.id)
        await stopping

    assert answer["result"] == {"ok": True, "session_id": session_id}
    assert ended.state == "canceled"


async def test_the_next_owner_gives_the_answer_that_the_one_before_was_giving(
    tmp_path: Path,
) -> None:
    (tmp_path / "workspace").mkdir()
    async with (
        FakeOpenCode(tmp_path / "workspace").running() as opencode,
        cluster([opencode], tmp_path, "a", "b") as made,
    ):
        a, caller = await made.runs("one"), Caller(made.replicas["b"])
        opencode.play("permission-once")
        opencode.failing_reply = held = asyncio.Event()
        asked = await caller.send("run it")
        answering = asyncio.create_task(caller.send("yes", task=asked.id))
        await until(lambda: opencode.failing_reply is None)  # it is being given
        await a.kill()
        done = await answering
        held.set()

    assert (done.id, done.state, done.text) == (asked.id, "completed", "after")
    assert done.history == ["run it", "yes"]
    assert len(opencode.replies) == 1


async def test_what_must_not_be_done_twice_may_have_been_done(tmp_path: Path) -> None:
    (tmp_path / "workspace").mkdir()
    async with (
        FakeOpenCode(tmp_path / "workspace").running() as opencode,
        cluster([opencode], tmp_path, "a", "b") as made,
    ):
        a, caller = await made.runs("one"), Caller(made.replicas["b"])
        task = await caller.send("hello")
        opencode.changing.clear()
        renamed = {"session_id": task.session_id, "request": {"title": "Another"}}
        changing = asyncio.create_task(caller.answer("opencode.sessions.update", renamed))
        await opencode.asked("change", 1)
        await a.kill()
        error = (await changing)["error"]
        opencode.changing.set()

    assert error["data"][0]["reason"] == "UPSTREAM_UNREACHABLE"
    assert error["data"][0]["metadata"]["method"] == "opencode.sessions.update"
    assert "may have been done" in error["message"]


@dataclass
class Sides:
    """Two replicas that run an OpenCode each, and only that one."""

    opencodes: list[FakeOpenCode]
    replicas: list[RunningReplica]
    database: str

    @property
    def callers(self) -> list[Caller]:
        return [Caller(replica) for replica in self.replicas]


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def sides(tmp_path_factory: pytest.TempPathFactory) -> AsyncGenerator[Sides]:
    home = tmp_path_factory.mktemp("sides")
    (home / "workspace").mkdir()
    async with AsyncExitStack() as stack:
        opencodes = [
            await stack.enter_async_context(FakeOpenCode(home / "workspace").running())
            for _ in "ab"
        ]
        made = await stack.enter_async_context(cluster(opencodes, home))
        for name, (upstream, opencode) in zip("ab", made.opencodes.items(), strict=True):
            entry: Json = {"name": upstream, "url": opencode.url, "shared": True}
            await made.start(name, OPENCODE_UPSTREAMS=orjson.dumps([entry]).decode())
        replicas = [await made.runs("one"), await made.runs("two")]
        yield Sides(opencodes, replicas, stores.url(home))


async def test_the_next_message_follows_the_first_before_that_has_a_session(sides: Sides) -> None:
    one, two = sides.opencodes
    here, there = sides.callers
    one.creating.clear()
    first = await here.begin("first", context="a-new-one")
    second = await there.begin("second", context="a-new-one")
    one.creating.set()
    ended = [await there.ended(task.id) for task in (first, second)]

    assert [task.state for task in ended] == ["completed", "completed"]
    assert ended[0].session_id == ended[1].session_id
    assert (one.texts, two.texts) == (["first", "second"], [])
    for opencode in sides.opencodes:
        opencode.prompts.clear()


async def test_lists_show_what_all_replicas_have(sides: Sides) -> None:
    here, there = sides.callers
    for opencode in sides.opencodes:
        opencode.play("permission-once")
    asked = [await here.send("run it"), await there.send("run it")]
    sessions = [task.session_id for task in asked]
    for caller in (here, there):
        waiting = (await caller.method("opencode.permissions.list", {}))["items"]
        listed = (await caller.method("opencode.sessions.list", {}))["items"]
        newest = (await caller.method("opencode.sessions.list", {"limit": 1}))["items"]
        busy = (await caller.method("opencode.sessions.status", {}))["items"]

        assert [one["task_id"] for one in waiting] == [task.id for task in asked]
        assert {*sessions} <= {one["id"] for one in listed}
        times = [one["status"]["timestamp"] for one in listed]
        assert times == sorted(times, reverse=True)
        assert newest == listed[:1]
        assert sorted(one["session_id"] for one in busy) == sorted(sessions)
    done = [await there.send("yes", task=asked[0].id), await here.send("yes", task=asked[1].id)]

    assert [task.state for task in done] == ["completed", "completed"]
    assert [opencode.texts for opencode in sides.opencodes] == [["run it"], ["run it"]]


async def test_a_session_of_nobody_is_found_where_it_is(sides: Sides) -> None:
    here, there = sides.callers
    async with httpx2.AsyncClient(base_url=sides.opencodes[1].url, trust_env=False) as terminal:
        session_id = (await terminal.post("/session", json={"title": "By hand"})).json()["id"]
    named = {"session_id": session_id}
    found, there_too = [await one.method("opencode.sessions.get", named) for one in (here, there)]
    sides.opencodes[1].play("plain-text")
    done = await here.send("go on", context=found["item"]["contextId"])

    assert found == there_too
    assert (done.state, done.session_id) == ("completed", session_id)
    assert sides.opencodes[1].texts[-1] == "go on"


async def test_what_nobody_follows_is_listed_and_answered_where_it_is(sides: Sides) -> None:
    here, there = sides.callers
    two = sides.opencodes[1]
    two.play("permission-once")
    request_id = await stray(two.url, there)
    listed = (await here.method("opencode.permissions.list", {}))["items"]
    reply = {"request_id": request_id, "reply": "once"}
    answered = await here.method("a2a.interrupt.permission.reply", reply)
    await two.idle()
    unknown = await here.refused("a2a.interrupt.permission.reply", reply | {"request_id": "per_x"})

    assert [(one["request_id"], one.get("task_id")) for one in listed] == [(request_id, None)]
    assert answered == {"ok": True, "request_id": request_id}
    assert two.replies[-1:] == [request_id]
    assert unknown.reason == "INTERRUPT_REQUEST_NOT_FOUND"


async def test_a_workspace_is_where_it_was_made(sides: Sides) -> None:
    here = sides.callers[0]
    workspace = "wrk_1deb3fc6b000iKn0wo4MZ7ksDZ"
    with psycopg.connect(sides.database) as connection:
        (principal,) = connection.execute("SELECT DISTINCT principal FROM tasks").fetchall()
        made = (workspace, *principal, "two")
        connection.execute(
            "INSERT INTO places (name, principal, upstream) VALUES (%s, %s, %s)", made
        )
    named: Any = {"metadata": {"opencode": {"workspace": {"id": workspace}}}}
    asked = asyncio.create_task(sides.opencodes[1].asked("agents", 1))
    await asyncio.sleep(0)  # it counts from now on
    listed = await here.method("opencode.agents.list", named)
    await asked

    assert listed == {"items": []}


async def test_two_first_messages_of_a_context_at_once_share_a_session(sides: Sides) -> None:
    callers, context = sides.callers, "one-for-both"
    for opencode in sides.opencodes:
        opencode.play("plain-text")
    await callers[0].send("hello")
    for opencode in sides.opencodes:
        opencode.prompts.clear()
    with psycopg.connect(sides.database) as connection:
        (principal,) = connection.execute("SELECT DISTINCT principal FROM tasks").fetchall()
        # Both replicas have chosen an OpenCode, and are about to store their task.
        connection.execute(
            "SELECT pg_advisory_xact_lock(hashtextextended(current_schema() || '/' || %s, 0))",
            principal,
        )
        sent = [asyncio.create_task(one.send("hello", context=context)) for one in callers]
        waiting = "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND NOT granted"
        await until(lambda: connection.execute(waiting).fetchall() == [(2,)])
    first, second = [await one for one in sent]
    third = [await one.send("more", context=context) for one in callers]

    assert [one.state for one in (first, second, *third)] == ["completed"] * 4
    assert len({one.session_id for one in (first, second, *third)}) == 1
    assert sorted(len(opencode.prompts) for opencode in sides.opencodes) == [0, 4]


async def test_a_message_for_a_replica_of_an_earlier_version_can_be_sent_again(
    sides: Sides,
) -> None:
    later, earlier = sides.callers
    for opencode in sides.opencodes:
        opencode.play("plain-text")
        opencode.prompts.clear()
    there, here = await earlier.send("begin there"), await later.send("begin here")
    fleet = sides.replicas[0].service.fleet
    assert fleet is not None

    def say_format(number: int) -> None:
        with psycopg.connect(sides.database) as connection:
            connection.execute("UPDATE replicas SET format = %s WHERE name = 'b'", (number,))

    say_format(0)
    await until(lambda: not fleet.census.reads_mail("two"))
    rest = Caller(sides.replicas[0], Wire.REST)
    refused = await rest.ask("send", rest.message("on", contextId=there.context_id))
    new = [await later.send("new") for _ in range(4)]
    on = await earlier.send("on", context=there.context_id)
    back = await earlier.send("on", context=here.context_id)
    say_format(MAIL_FORMAT)
    await until(lambda: fleet.census.reads_mail("two"))
    again = await later.send("on and on", context=there.context_id)

    assert (refused.status, refused.headers["retry-after"]) == (503, "1")
    assert b"UPSTREAM_UNREACHABLE" in refused.content
    assert b"another version of the service" in refused.content
    assert {task.state for task in (*new, on, back, again)} == {"completed"}
    assert {on.session_id, again.session_id} == {there.session_id}
    assert back.session_id == here.session_id
    assert [opencode.texts for opencode in sides.opencodes] == [
        ["begin here", *["new"] * 4, "on"],
        ["begin there", "on", "on and on"],
    ]


async def test_workspaces_and_worktrees_of_all_replicas_are_listed(sides: Sides) -> None:
    for number, opencode in enumerate(sides.opencodes):
        one: Json = {"id": f"wrk_{number}", "type": "worktree", "name": "x", "branch": None}
        opencode.workspaces[:] = [one]
        opencode.worktrees[:] = ["/srv/both", f"/srv/only-{number}"]
    workspaces, worktrees = [
        [(await caller.method(f"opencode.{kind}.list", {}))["items"] for caller in sides.callers]
        for kind in ("workspaces", "worktrees")
    ]

    assert [[one["id"] for one in listed] for listed in workspaces] == [["wrk_0", "wrk_1"]] * 2
    assert worktrees == [["/srv/both", "/srv/only-0", "/srv/only-1"]] * 2


async def test_lists_leave_out_a_replica_that_does_not_answer(sides: Sides) -> None:
    there = sides.callers[1]
    own = (await there.send("run it")).session_id
    everything = (await there.method("opencode.sessions.list", {}))["items"]
    await sides.replicas[0].kill()
    left = (await there.method("opencode.sessions.list", {}))["items"]

    assert own in {one["id"] for one in left}
    assert len(left) < len(everything)
