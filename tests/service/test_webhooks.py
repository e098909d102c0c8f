"""Push notifications: configured on every line and binding, and what a receiver then gets."""

import asyncio
import base64
import hashlib
import sys
import time
from collections.abc import AsyncGenerator, Generator
from contextlib import closing, suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from uuid import uuid4

import jwt
import pytest
import pytest_asyncio
from a2a.client import Client
from a2a.compat.v0_3.types import Task as Task03
from a2a.types import (
    AuthenticationInfo,
    DeleteTaskPushNotificationConfigRequest,
    GetTaskPushNotificationConfigRequest,
    ListTaskPushNotificationConfigsRequest,
    Message,
    Part,
    Role,
    SendMessageRequest,
    StreamResponse,
    TaskPushNotificationConfig,
)
from a2a.utils.errors import TaskNotFoundError
from google.protobuf.json_format import Parse

from opencode_a2a.config import PushSettings
from opencode_a2a.push import loop
from opencode_a2a.push.destination import RetryTimes
from tests.support import stores
from tests.support.answers import NOT_FOUND, PARAMS, UNSUPPORTED, Expected, Wire
from tests.support.caller import Caller
from tests.support.certificates import private_key
from tests.support.front import STRANGERS, Serve, started
from tests.support.opencode import FakeOpenCode
from tests.support.ports import free_port
from tests.support.receiver import Receiver, receiving
from tests.support.service import Running

pytestmark = pytest.mark.asyncio(loop_scope="module")

PRIVATE = {"A2A_PUSH_ALLOW_PRIVATE_HOSTS": "true"}
TOO_MANY = Expected(-32603, 429, "RESOURCE_EXHAUSTED", "LIMIT_EXCEEDED")
ASKED = ["working", "input_required", "working", "completed"]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def service(
    shared_opencode: FakeOpenCode, tmp_path_factory: pytest.TempPathFactory, database: str
) -> AsyncGenerator[Running]:
    async with started(shared_opencode, tmp_path_factory.mktemp("state"), **PRIVATE) as running:
        yield running


@pytest_asyncio.fixture(loop_scope="module")
async def receiver() -> AsyncGenerator[Receiver]:
    async with receiving() as one:
        yield one


@pytest.fixture(scope="module", autouse=True)
def quick() -> Generator[None]:
    """Have the services of this module try again soon."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "RETRIES", RetryTimes(first=0.01, shortest=0.01))
        yield


def inline(caller: Caller, config: Any, *, blocking: bool = False) -> Any:
    if caller.wire.modern:
        return {"taskPushNotificationConfig": config, "returnImmediately": not blocking}
    config = dict(config)
    if "authentication" in config:
        scheme = config["authentication"].pop("scheme")
        config["authentication"] = {"schemes": [scheme], **config["authentication"]}
    return {"pushNotificationConfig": config, "blocking": blocking}


async def begin(caller: Caller, config: Any) -> str:
    """Send a message with a configuration; return the id of its task."""
    params = caller.message("hello") | {"configuration": inline(caller, config)}
    return (await caller.ask("send", params)).task["id"]


def set_params(caller: Caller, task_id: str, **config: Any) -> dict[str, Any]:
    if caller.wire.modern:
        return {"taskId": task_id, **config}
    return {"taskId": task_id, "pushNotificationConfig": config}


async def outcome_of_webhook(caller: Caller, task_id: str) -> str | None:
    """Return the outcome of the last attempt for the one webhook of a task."""
    (found,) = (await caller.method("opencode.webhooks.list", {"task_id": task_id}))["items"]
    return found.get("last_outcome")


@pytest.mark.requirement("3.1.7-push-config")
@pytest.mark.requirement("4.3.3-push-delivery")
@pytest.mark.requirement("I21")
async def test_every_change_of_state_is_told_in_order(
    caller: Caller, opencode: FakeOpenCode, receiver: Receiver
) -> None:
    opencode.play("permission-once")
    secret = {"scheme": "Bearer", "credentials": "x y.z/=+"}

    task = await begin(caller, {"url": receiver.url, "token": "t-1", "authentication": secret})
    await receiver.until(lambda it: it.states[-1:] == ["input_required"])
    await caller.send("once", task=task)
    told = await receiver.ended()

    states = receiver.states
    assert [s for at, s in enumerate(states) if states[at - 1 : at] != [s]] == ASKED
    assert [one.seq for one in told] == sorted({one.seq for one in told})
    assert len({one.id.partition("-")[0] for one in told}) == 1
    for one in told:
        assert one.headers["authorization"] == "Bearer x y.z/=+"
        assert one.headers["x-a2a-notification-token"] == "t-1"
        assert one.headers["a2a-notification-token"] == "t-1"
        assert one.headers["a2a-version"] == caller.headers["A2A-Version"]
        assert abs(int(one.headers["webhook-timestamp"]) - time.time()) < 60
        if caller.wire.modern:
            assert one.headers["content-type"] == "application/a2a+json"
            assert Parse(one.body, StreamResponse()).status_update.task_id == task
        else:
            assert one.headers["content-type"] == "application/json"
            assert Task03.model_validate_json(one.body).id == task
            assert one.content["kind"] == "task"
    if not caller.wire.modern:
        assert told[-1].content["artifacts"]


@pytest.mark.requirement("3.1.7-push-config")
@pytest.mark.requirement("I22")
async def test_the_sdks_client_brings_one_with_a_message_sets_reads_lists_and_deletes(
    agent: Client, receiver: Receiver, wire: Wire
) -> None:
    said = Message(role=Role.ROLE_USER, parts=[Part(text="hello")], message_id=str(uuid4()))
    brought = TaskPushNotificationConfig(id="i", url=f"{receiver.url}/inline")
    sent = SendMessageRequest(message=said)
    sent.configuration.task_push_notification_config.CopyFrom(brought)
    events = [event async for event in agent.send_message(sent)]
    task = events[0].task.id
    told = await receiver.ended()
    assert {one.path for one in told} == {"/hook/inline"}
    proof = AuthenticationInfo(scheme="Basic", credentials="c2VjcmV0")
    config = TaskPushNotificationConfig(
        task_id=task,
        id="c1",
        url=receiver.url,
        token="hush",  # noqa: S106 - not a secret
        authentication=proof,
    )

    made = await agent.create_task_push_notification_config(config)
    read = await agent.get_task_push_notification_config(
        GetTaskPushNotificationConfigRequest(task_id=task, id="c1")
    )
    again = await agent.create_task_push_notification_config(config)
    if wire is not Wire.REST03:  # its SDK has no list and no delete there
        found = await agent.list_task_push_notification_configs(
            ListTaskPushNotificationConfigsRequest(task_id=task)
        )
        gone = DeleteTaskPushNotificationConfigRequest(task_id=task, id="c1")
        for _ in range(2):
            await agent.delete_task_push_notification_config(gone)
        with pytest.raises(TaskNotFoundError):
            await agent.get_task_push_notification_config(
                GetTaskPushNotificationConfigRequest(task_id=task, id="c1")
            )
        assert [one.id for one in found.configs] == ["i", "c1"]
        assert found.configs[1] == made

    assert made == read == again
    assert (made.task_id, made.id, made.url) == (task, "c1", receiver.url)
    assert (made.authentication.scheme, made.authentication.credentials) == ("Basic", "")
    assert made.token == ""


@pytest.mark.requirement("4.3.3-push-delivery")
async def test_a_configuration_of_an_ended_task_gets_its_state_at_once(
    caller: Caller, receiver: Receiver
) -> None:
    task = (await caller.send("hello")).id

    answer = await caller.ask("push create", set_params(caller, task, url=receiver.url))
    (told,) = await receiver.ended()

    assert told.state == "completed"
    made = answer.result
    if caller.wire is Wire.REST03:
        assert made["name"] == f"tasks/{task}/pushNotificationConfigs/{task}"
    else:
        assert made["taskId"] == task
    if not caller.wire.modern:
        assert made["pushNotificationConfig"] == {"id": task, "url": receiver.url}
    listed = await caller.ask("push list", {"id": task, "taskId": task})
    configs = listed.result if caller.wire is Wire.RPC03 else listed.result["configs"]
    assert configs == [made]


@pytest.mark.requirement("4.3.3-push-delivery")
async def test_a_configuration_of_a_waiting_task_gets_the_question_at_once(
    service: Running, opencode: FakeOpenCode, receiver: Receiver
) -> None:
    caller = Caller(service)
    opencode.play("permission-two-parallel-reject-first")
    task = (await caller.send("hello")).id
    async with asyncio.timeout(60):
        while len((await caller.get(task)).interrupt["waiting"]) < 2:
            pass

    await caller.ask("push create", {"taskId": task, "id": "c", "url": receiver.url})
    (told,) = await receiver.until(lambda it: len(it.received) == 1)
    await caller.ask("push create", {"taskId": task, "id": "c", "url": receiver.url})
    _, again = await receiver.until(lambda it: len(it.received) == 2)
    await caller.cancel(task)
    *_, last = await receiver.ended()

    assert told.state == again.state == "input_required"
    assert told.content["statusUpdate"]["metadata"]["shared"]["interrupt"]["request_id"]
    assert told.id.partition("-")[0] != again.id.partition("-")[0] == last.id.partition("-")[0]
    assert last.state == "canceled"


@pytest.mark.requirement("I23")
async def test_a_yes_is_not_for_what_no_receiver_could_be_sent(
    service: Running, opencode: FakeOpenCode
) -> None:
    caller = Caller(service)
    opencode.play("permission-once")
    hold = opencode.hold("message.part.updated")
    async with receiving() as lost:
        task = await begin(caller, {"url": lost.url})
        await lost.until(lambda it: it.states == ["working"])
        async with asyncio.timeout(60):
            await hold.reached.wait()
    opencode.release()
    async with asyncio.timeout(60):
        while await outcome_of_webhook(caller, task) != "unreachable":
            pass

    refused = await caller.ask("send", caller.message("yes", taskId=task))
    left = await caller.get(task)
    await caller.cancel(task)

    refused.refuses(UNSUPPORTED)
    assert (left.state, left.history) == ("input_required", ["hello"])


@pytest.mark.requirement("4.3.3-push-delivery")
async def test_a_yes_counts_before_the_receiver_has_replied(
    service: Running, opencode: FakeOpenCode, receiver: Receiver
) -> None:
    caller = Caller(service)
    opencode.play("permission-once")
    hold = opencode.hold("message.part.updated")
    task = await begin(caller, {"url": receiver.url})
    await receiver.until(lambda it: it.states == ["working"])
    async with asyncio.timeout(60):
        await hold.reached.wait()
        while await outcome_of_webhook(caller, task) != "ok":
            pass
    receiver.gate.clear()
    opencode.release()
    await receiver.until(lambda it: it.states[-1] == "input_required")

    done = await caller.send("yes", task=task)
    receiver.gate.set()
    await receiver.ended()

    assert (done.state, done.history) == ("completed", ["hello", "yes"])


@pytest.mark.requirement("4.3.3-push-delivery")
async def test_a_yes_counts_for_what_a_repeated_attempt_has_shown(
    service: Running, opencode: FakeOpenCode, receiver: Receiver
) -> None:
    caller = Caller(service, Wire.RPC03)
    opencode.play("permission-once")
    hold = opencode.hold("message.part.updated")
    receiver.answers.append((503, {"retry-after": "1"}))
    task = await begin(caller, {"url": receiver.url})
    await receiver.until(lambda it: it.states == ["working"])
    async with asyncio.timeout(60):
        await hold.reached.wait()
    opencode.release()
    await receiver.until(lambda it: it.states == ["working", "input_required"])

    done = await caller.send("yes", task=task)

    assert (done.state, done.history) == ("completed", ["hello", "yes"])


@pytest.mark.requirement("4.3.3-push-delivery")
async def test_another_try_after_a_sign_in_sends_no_notification_without_a_status(
    service: Running, opencode: FakeOpenCode, receiver: Receiver
) -> None:
    caller = Caller(service)
    opencode.play("error-401")

    task = await begin(caller, {"url": receiver.url})
    await receiver.until(lambda it: it.states[-1:] == ["auth_required"])
    opencode.play("plain-text")
    await caller.send("again", task=task)
    await receiver.ended()

    assert receiver.states == ["working", "auth_required", "working", "completed"]


@pytest.mark.requirement("I21")
async def test_a_message_on_a_task_and_a_repeat_bring_a_configuration_too(
    service: Running, opencode: FakeOpenCode, receiver: Receiver
) -> None:
    caller = Caller(service)
    opencode.play("permission-once")
    task = (await caller.send("hello")).id
    config = {"taskPushNotificationConfig": {"id": "c", "url": receiver.url}}
    answer = caller.message("once", taskId=task) | {"configuration": config}

    first = await caller.ask("send", answer)
    await receiver.ended()
    again = await caller.ask("send", answer)
    *_, repeated = await receiver.until(lambda it: it.states.count("completed") == 2)

    assert first.task["id"] == again.task["id"] == task
    assert repeated.state == "completed"


async def test_nothing_more_is_sent_to_a_configuration_that_a_message_replaces(
    service: Running, opencode: FakeOpenCode, receiver: Receiver
) -> None:
    caller, sending, over = Caller(service), asyncio.Event(), asyncio.Event()
    opencode.play("permission-once")

    async def hang(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        sending.set()
        with suppress(ConnectionError):
            await reader.read(-1)
        over.set()
        writer.close()

    async with await asyncio.start_server(hang, "127.0.0.1", 0) as server:
        old = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/"
        task = (await caller.send("hello")).id
        await caller.ask("push create", {"taskId": task, "id": "c", "url": old})
        async with asyncio.timeout(5):
            await sending.wait()
        config = {"taskPushNotificationConfig": {"id": "c", "url": receiver.url}}
        answer = caller.message("once", taskId=task) | {"configuration": config}
        await caller.ask("send", answer)
        await receiver.ended()
        async with asyncio.timeout(3):  # by itself it would take 10 s
            await over.wait()


@pytest.mark.requirement("I21")
async def test_a_repeat_loses_nothing_that_the_receiver_has_not_taken(
    service: Running, opencode: FakeOpenCode, receiver: Receiver
) -> None:
    caller, hold = Caller(service), opencode.hold(count=2)
    receiver.answers.append((503, {"retry-after": "3600"}))
    sent = caller.message("hello") | {"configuration": inline(caller, {"url": receiver.url})}

    task = (await caller.ask("send", sent)).task["id"]
    await receiver.until(lambda it: it.states == ["working"])
    async with asyncio.timeout(60):
        await hold.reached.wait()
    again = (await caller.ask("send", sent)).task["id"]
    other = caller.message("hello") | {"configuration": inline(caller, {"url": receiver.url})}
    other["message"]["messageId"] = sent["message"]["messageId"]
    other["configuration"]["taskPushNotificationConfig"]["token"] = "another"  # noqa: S105
    await caller.ask("send", other)
    found = (await caller.method("opencode.webhooks.list", {"task_id": task}))["items"]
    (_, first) = [one["id"] for one in found]
    await caller.method("opencode.webhooks.retry", {"task_id": task, "id": first})
    await receiver.until(lambda it: len(it.received) == 2)
    opencode.release()
    told = await receiver.until(lambda it: it.states.count("completed") == 2)

    assert again == task
    mine = [one for one in told if "a2a-notification-token" not in one.headers]
    assert [one.state for one in mine] == ["working", "working", "completed"]
    assert len({one.id for one in mine}) == 2


@pytest.mark.requirement("I21")
async def test_a_failing_receiver_is_tried_until_it_takes_each_change(
    service: Running, opencode: FakeOpenCode, receiver: Receiver
) -> None:
    caller = Caller(service)
    receiver.answers.extend([(503, {}), (503, {"retry-after": "0"}), (301, {"location": "/"})])
    receiver.answers.extend([(204, {}), (500, {"retry-after": "soon"})])

    await begin(caller, {"url": receiver.url, "id": "c"})
    told = await receiver.until(lambda it: it.states.count("completed") == 2)

    assert receiver.states == ["working"] * 4 + ["completed"] * 2
    assert len({one.id for one in told[:4]}) == len({one.id for one in told[4:]}) == 1
    assert {one.path for one in told} == {"/hook"}


async def test_a_receiver_that_is_gone_is_left_alone(
    service: Running, opencode: FakeOpenCode, receiver: Receiver, stranger: str
) -> None:
    caller = Caller(service, token=stranger)
    receiver.answers.append((410, {}))

    task = await begin(caller, {"url": f"{receiver.url}?key=1", "id": "c"})
    await caller.ended(task)
    async with receiving() as other:  # by then the first would have been told too
        await caller.ask("push create", {"taskId": task, "url": other.url})
        await other.ended()

    assert receiver.states == ["working"]
    found = (await caller.method("opencode.webhooks.list", {"task_id": task}))["items"]
    assert [(one["url"], one["state"], one["last_outcome"]) for one in found] == [
        (other.url, "done", "ok"),
        (receiver.url, "done", "http_410"),
    ]
    assert (await caller.method("opencode.webhooks.list"))["items"] == found


@pytest.mark.requirement("I11")
async def test_hostile_receivers_hold_up_nobody(
    serve: Serve, opencode: FakeOpenCode, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(PushSettings, "timeout_seconds", 0.3)
    service = await serve(**PRIVATE)
    caller = Caller(service)
    answers = {
        "hang": b"",
        "drip": b"HTTP/1.1 200 OK\r\n",
        "huge": b"HTTP/1.1 200 OK\r\ncontent-length: 100000000\r\n\r\n",
        "redirect": b"HTTP/1.1 307 X\r\nlocation: %b\r\ncontent-length: 0\r\n\r\n"
        % receiver.url.encode(),
        "cookie": b"HTTP/1.1 200 OK\r\nset-cookie: a=b; Path=/\r\ncontent-length: 0\r\n\r\n",
        "torn": b"HTTP/1.1 200 OK\r\ncontent-le",
    }
    heads: list[str] = []

    async def hostile(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with closing(writer), suppress(ConnectionError, asyncio.IncompleteReadError):
            kind = ""
            while kind != "torn":
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                heads.append(head.lower())
                kind = head.split(" ")[1].removeprefix("/")
                writer.write(answers[kind])
                if kind == "huge":
                    writer.write(b"x" * 1_000_000)
                while kind == "drip":
                    writer.write(b"x: y\r\n")
                    await writer.drain()
                    await asyncio.sleep(0.02)
                length = int(head.lower().partition("content-length: ")[2].split("\r\n")[0])
                await reader.readexactly(length)

    server = await asyncio.start_server(hostile, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    task = (await caller.send("hello")).id
    async with server, asyncio.timeout(60):
        for kind in (*answers, "cookie"):
            config = {"taskId": task, "id": kind, "url": f"http://127.0.0.1:{port}/{kind}"}
            await caller.ask("push create", config)
        wanted = {"hang": "timeout", "drip": "timeout", "redirect": "http_307", "huge": "ok"}
        wanted |= {"cookie": "ok", "torn": "unreachable"}
        found: dict[str, str] = {}
        while found != wanted:  # each is tried again and again
            items = (await caller.method("opencode.webhooks.list", {"task_id": task}))["items"]
            found = {one["id"]: one.get("last_outcome") for one in items}

    assert receiver.received == []
    assert not [head for head in heads if "cookie: " in head]


FORBIDDEN = [
    *("https://127.0.0.1/", "http://example.com/", "https://[::ffff:7f00:1]/"),
    *("https://0x7f.1/", "https://2130706433/", "https://169.254.169.254/latest"),
    *("https://user:pw@example.com/", "https://example.com/#x", "https://example.com:0/"),
    *("https://127.0.0.1 /x", "https://%31%32%37.0.0.1/x", "https://LOCALHOST./x"),
    *("https://example.com/a b", "https://example.com\\x", f"https://{'a' * 300}.example/x"),
    *("https://a..example/", "https://-a.example/", "https://a_b!.example/", "https://\u2028/"),
    *("https://1.2.3.4.5/", "https://999999999999/", "https://example.0x7/", "https://a.256/"),
    *("https://_xn--a/", "https://xn--a[v1.a]/", "https://a%\0.1/"),
    *("ftp://example.com/", "https://", "nothing", "https://localhost:8000/", "https://[x"),
    "https://example.com/\0",  # which PostgreSQL cannot store
    "https://example.com/" + "x" * 2048,
]


@pytest.mark.requirement("I11")
async def test_an_address_that_may_not_be_called_is_refused_before_anything_is_stored(
    serve: Serve, opencode: FakeOpenCode
) -> None:
    caller = Caller(await serve())
    task = (await caller.send("hello")).id

    for url in FORBIDDEN:
        alone = await caller.ask("push create", {"taskId": task, "url": url})
        sent = caller.message("hello") | {"configuration": inline(caller, {"url": url})}
        answer = await caller.ask("send", sent)

        assert alone.refuses(PARAMS) == ["url"], url
        assert answer.refuses(PARAMS) == ["configuration.taskPushNotificationConfig.url"]
    assert len(opencode.prompts) == 1
    # A name that cannot be found now may be found when there is something to tell.
    later = {"taskId": task, "url": "https://no-such-host.invalid/"}
    assert (await caller.ask("push create", later)).result["url"] == later["url"]


@pytest.mark.requirement("I10")
async def test_configurations_are_for_the_owner_of_the_task_and_limited(
    serve: Serve, opencode: FakeOpenCode, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(PushSettings, "max_per_task", 2)
    monkeypatch.setattr(PushSettings, "max_per_principal", 1)
    service = await serve(**PRIVATE)
    caller, other = Caller(service), Caller(service, token=STRANGERS[0])
    hold = opencode.hold(count=2)
    task = (await caller.begin("hello")).id
    async with asyncio.timeout(60):
        await hold.reached.wait()
    config = {"taskId": task, "id": "c", "url": receiver.url}

    assert (await caller.ask("push create", config)).status == 200
    for operation in ("push create", "push get", "push list", "push delete"):
        (await other.ask(operation, config)).refuses(NOT_FOUND)
    (await caller.ask("push get", {**config, "id": "d"})).refuses(NOT_FOUND)
    (await caller.ask("push create", {**config, "id": "d"})).refuses(TOO_MANY)
    assert (await caller.ask("push create", config)).status == 200  # in place of the first
    full = caller.message("hello") | {"configuration": inline(caller, {"url": receiver.url})}
    (await caller.ask("send", full)).refuses(TOO_MANY)
    opencode.release()
    await receiver.ended()

    assert len(opencode.prompts) == 1
    for name in ("d", "e"):
        answer = await caller.ask("push create", {**config, "id": name})
    answer.refuses(TOO_MANY)


@pytest.mark.requirement("I21")
async def test_a_message_whose_configuration_has_no_room_is_not_taken(
    serve: Serve, opencode: FakeOpenCode, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(PushSettings, "max_per_task", 1)
    caller = Caller(await serve(**PRIVATE))
    opencode.play("permission-once")
    asked = await caller.send("hello")
    await caller.ask("push create", {"taskId": asked.id, "id": "c", "url": receiver.url})
    config = {"taskPushNotificationConfig": {"id": "d", "url": receiver.url}}
    answer = caller.message("once", contextId=asked.context_id) | {"configuration": config}

    refused = await caller.ask("send", answer)
    waiting = await caller.get(asked.id)
    config["taskPushNotificationConfig"]["id"] = "c"
    taken = await caller.ask("send", answer)

    refused.refuses(TOO_MANY)
    assert (waiting.state, waiting.history) == ("input_required", ["hello"])
    assert taken.task["id"] == asked.id
    assert (await caller.ended(asked.id)).state == "completed"


@pytest.mark.requirement("I21")
async def test_a_configuration_of_an_answer_that_opencode_does_not_take_yet_is_served(
    serve: Serve, opencode: FakeOpenCode, receiver: Receiver
) -> None:
    caller = Caller(await serve(**PRIVATE))
    opencode.play("permission-once")
    asked = await caller.send("hello")
    opencode.failing_reply = fails = asyncio.Event()
    fails.set()
    config = {"taskPushNotificationConfig": {"id": "c", "url": receiver.url}}
    answer = caller.message("once", taskId=asked.id) | {"configuration": config}

    failed = await caller.ask("send", answer)
    repeated = await caller.ask("send", answer)
    await receiver.ended()

    assert b'"error"' in failed.content
    assert repeated.task["id"] == asked.id
    assert receiver.states[-1] == "completed"
    assert (await caller.ended(asked.id)).state == "completed"


@pytest.mark.requirement("I21")
@pytest.mark.requirement("I22")
async def test_what_was_not_told_is_told_after_a_restart_and_the_secrets_are_erased(
    opencode: FakeOpenCode, tmp_path: Path, receiver: Receiver
) -> None:
    proof = {"scheme": "Bearer", "credentials": "hush-credentials"}
    secrets = {"token": "hush-hush-token", "authentication": proof}
    lasting = {**PRIVATE, "A2A_TASK_STORE_BACKEND": "database"}
    receiver.answers.extend([(503, {"retry-after": "3600"})])
    async with started(opencode, tmp_path, **lasting) as service:
        caller = Caller(service)
        task = await begin(caller, {"id": "c", "url": receiver.url, **secrets})
        await caller.ended(task)
        await receiver.until(lambda it: it.states == ["working"])

    async with started(opencode, tmp_path, **lasting) as service:
        caller = Caller(service)
        await caller.method("opencode.webhooks.retry", {"task_id": task, "id": "c"})
        await receiver.ended()
        items = (await caller.method("opencode.webhooks.list"))["items"]
        while items[0]["state"] != "done":
            items = (await caller.method("opencode.webhooks.list"))["items"]
        listed = (await caller.ask("push list", {"taskId": task})).content
        async with asyncio.timeout(60):
            # While the service runs, so that no orderly end has tidied up.
            while not stores.postgresql() and holding(tmp_path, b"hush"):
                await caller.method("opencode.webhooks.list")

    first, working, completed = receiver.received
    assert receiver.states == ["working", "working", "completed"]
    assert first.id == working.id != completed.id
    assert completed.headers["authorization"] == "Bearer hush-credentials"
    assert b"hush" not in listed
    assert stores.postgresql() or holding(tmp_path, b"hush") == []


def holding(directory: Path, secret: bytes) -> list[str]:
    """Return the files that hold a secret."""
    files = (file for file in directory.rglob("*") if file.is_file())
    return [file.name for file in files if secret in file.read_bytes()]


PAGE = Path(__file__).parent.parent.parent / "docs" / "webhooks.md"


async def test_the_receiver_in_the_docs_takes_what_is_signed_and_nothing_else(
    service: Running, opencode: FakeOpenCode
) -> None:
    program = PAGE.read_text().partition("```python\n")[2].partition("```")[0]
    port, key = free_port(), base64.b64encode(b"k" * 32).decode()
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", program),
        env={"PORT": str(port), "WEBHOOK_SECRET": f"whsec_{key}"},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    assert process.stdout
    assert process.stderr
    url, caller = f"http://127.0.0.1:{port}/", Caller(service)
    try:
        task = await begin(caller, {"url": url, "token": f"whsec_{key}"})
        async with asyncio.timeout(60):
            lines = [(await process.stdout.readline()).decode() for _ in range(2)]
            wrong = {"taskId": task, "id": "w", "url": url, "token": f"whsec_{key[:-4]}"}
            await caller.ask("push create", wrong)
            while b'"POST / HTTP/1.1" 401' not in await process.stderr.readline():
                pass
    finally:
        process.kill()
        await process.wait()

    assert lines == [f"{task} TASK_STATE_WORKING\n", f"{task} TASK_STATE_COMPLETED\n"]


async def test_a_library_of_standard_webhooks_verifies_the_signature(
    service: Running, opencode: FakeOpenCode, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    if find_spec("standardwebhooks") is None:
        pytest.fail("A package of the tests is not installed: run `make test`", pytrace=False)
    *_, block = PAGE.read_text().split("```python\n")
    page: dict[str, Any] = {}
    exec(block.partition("```")[0], page)  # noqa: S102 - from our own page
    secret, other = (f"whsec_{base64.b64encode(key * 32).decode()}" for key in (b"k", b"o"))

    task = await begin(Caller(service), {"url": receiver.url, "token": secret})
    told = await receiver.ended()

    read, signature = page["read"], "webhook-signature"
    monkeypatch.setenv("WEBHOOK_SECRET", secret)
    for one in told:
        assert read(one.body, dict(one.headers))["statusUpdate"]["taskId"] == task
        assert secret not in str(one.headers)
        wrong = "webhook-id", "webhook-timestamp", signature
        for changed in ({name: told[0].headers[name][::-1]} for name in wrong):
            with pytest.raises(Exception, match=r"[Ss]ignature|timestamp"):
                read(one.body, {**one.headers, **changed})
        with pytest.raises(Exception, match="No matching signature"):
            read(one.body + b" ", dict(one.headers))
    monkeypatch.setenv("WEBHOOK_SECRET", other)
    with pytest.raises(Exception, match="No matching signature"):
        read(told[0].body, dict(told[0].headers))


async def test_a_stock_library_verifies_the_token_with_the_keys_that_the_service_publishes(
    serve: Serve, opencode: FakeOpenCode, receiver: Receiver, tmp_path: Path
) -> None:
    key = private_key(tmp_path / "signing.pem")
    service = await serve(**PRIVATE, A2A_SIGNING_KEY_FILE=str(key))
    config = {"url": receiver.url, "authentication": {"scheme": "Bearer"}}

    task = await begin(Caller(service), config)
    told = await receiver.ended()

    published = jwt.PyJWKClient(f"{service.url}/.well-known/jwks.json")
    for one in told:
        scheme, _, token = one.headers["authorization"].partition(" ")
        signer = await asyncio.to_thread(published.get_signing_key_from_jwt, token)
        claims = jwt.decode(token, signer, ["ES256"], audience=receiver.url, issuer=service.url)
        assert (scheme, claims["jti"], claims["taskId"]) == ("Bearer", one.id, task)
        assert claims["request_body_sha256"] == hashlib.sha256(one.body).hexdigest()
        with pytest.raises(jwt.InvalidAudienceError):
            jwt.decode(token, signer, ["ES256"], audience="https://elsewhere.test/")
