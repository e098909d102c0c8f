"""Messages to a person: what each target gets, and what the link in them is good for."""

import asyncio
import os
import time
from collections.abc import AsyncGenerator, Callable, Coroutine, Generator
from contextlib import AsyncExitStack
from datetime import UTC, datetime, timedelta
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import httpx2
import orjson
import pytest
import pytest_asyncio
import sqlalchemy as sa
from click.testing import CliRunner
from sqlalchemy.engine import Connection
from structlog.testing import capture_logs

from opencode_a2a.app.parts import Parts
from opencode_a2a.cli import main
from opencode_a2a.cli.doctor import check_notices
from opencode_a2a.clock import SHARED_CLOCK
from opencode_a2a.cluster import mailbox
from opencode_a2a.cluster.mailbox import Mailbox
from opencode_a2a.config import load
from opencode_a2a.errors import InterruptNotFoundError
from opencode_a2a.events import JsonObject
from opencode_a2a.extensions.dispatch import Dispatcher
from opencode_a2a.ids import TaskId
from opencode_a2a.notices import pages
from opencode_a2a.notices.links import Signer, Subject
from opencode_a2a.push import loop
from opencode_a2a.push.destination import RetryTimes
from opencode_a2a.store import interrupts
from opencode_a2a.store.schema import webhooks
from tests.support.caller import Caller
from tests.support.front import STRANGERS, started
from tests.support.opencode import FakeOpenCode
from tests.support.ports import free_port
from tests.support.receiver import Receiver, receiving
from tests.support.replicas import RunningReplica, cluster
from tests.support.service import Running
from tests.support.smtp import MailServer, mail_server

pytestmark = pytest.mark.asyncio(loop_scope="module")

SECRETS = {"ntfy": "tk_of_the_topic", "telegram": "123:bot-secret", "email": "password of the mail"}
PLAN: JsonObject = {"opencode": {"plan": True}}
ALL = ["*"]


def targets(receiver: Receiver, mail: MailServer) -> list[dict[str, Any]]:
    base = receiver.url.removesuffix("/hook")
    return [
        {"kind": "ntfy", "url": f"{base}/topic", "token": SECRETS["ntfy"]},
        {"kind": "slack", "url": f"{base}/services/T0/B0/slack-secret"},
        {"kind": "telegram", "token": SECRETS["telegram"], "chat": -100, "api_url": base},
        {"kind": "webhook", "url": f"{base}/plain", "token": "the-token-of-a-webhook"},
        {
            "kind": "email",
            "server": "127.0.0.1",
            "port": mail.port,
            "security": "none",
            "username": "me",
            "password": SECRETS["email"],
            "sender": "agent@example.org",
            "to": ["me@example.org", "you@example.org"],
        },
    ]


@pytest.fixture(scope="module", autouse=True)
def quick() -> Generator[None]:
    """Have the services of this module try again soon."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "RETRIES", RetryTimes(first=0.01, shortest=0.01))
        yield


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def mail() -> AsyncGenerator[MailServer]:
    async with mail_server() as made:
        yield made


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def receiver() -> AsyncGenerator[Receiver]:
    async with receiving() as made:
        yield made


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def service(
    shared_opencode: FakeOpenCode,
    tmp_path_factory: pytest.TempPathFactory,
    database: str,
    receiver: Receiver,
    mail: MailServer,
) -> AsyncGenerator[Running]:
    told = [{**one, "principals": ["stranger 0"]} for one in targets(receiver, mail)]
    told[0]["principals"] = ALL
    notify = {"A2A_NOTIFY": orjson.dumps(told).decode(), "A2A_PROJECT": "shop"}
    async with started(shared_opencode, tmp_path_factory.mktemp("state"), **notify) as running:
        yield running


@pytest.fixture
def person(service: Running, opencode: FakeOpenCode, receiver: Receiver) -> Caller:
    """Whose tasks ntfy alone tells of."""
    receiver.received.clear()
    return Caller(service)


class Phone:
    """Somebody who has a link, and nothing else."""

    def __init__(self, service: Running | RunningReplica, url: str) -> None:
        self.link = url.partition("#")[2]
        self.page = ""
        self._http = service.http

    async def post(self, path: str, **content: Any) -> httpx2.Response:
        without = httpx2.AsyncClient(base_url=self._http.base_url, trust_env=False)
        async with asyncio.timeout(60), without as http:
            return await http.post(path, json=content)

    async def show(self) -> Any:
        answer = await self.post("/link/show", link=self.link)
        assert answer.headers["cache-control"] == "no-store"
        shown = answer.json()
        self.page = shown.get("page", self.page)
        return shown

    async def answer(self, method: str, **content: Any) -> tuple[int, Any]:
        sent = {"link": self.link, "page": self.page, "method": method, **content}
        answer = await self.post("/link/answer", **sent)
        return answer.status_code, answer.json()


async def waits(receiver: Receiver, count: int = 1) -> list[str]:
    """Return the links of the requests that ntfy was told of."""

    def links() -> list[str]:
        told = [one.content for one in receiver.received if one.path == "/"]
        return [one["click"] for one in told if "/link#" in one["click"]]

    await receiver.until(lambda _: len(links()) >= count)
    return links()


async def ends(receiver: Receiver, task_id: str) -> None:
    """Wait until ntfy was told that a task has ended."""

    def told(one: Any) -> bool:
        return one.path == "/" and one.content["click"].endswith(f"/console#/task/{task_id}")

    await receiver.until(lambda _: any(map(told, receiver.received)))


@pytest.mark.requirement("I21")
@pytest.mark.requirement("I22")
async def test_every_target_is_told_once_of_a_request_and_once_of_the_end(
    service: Running, opencode: FakeOpenCode, receiver: Receiver, mail: MailServer
) -> None:
    opencode.play("permission-once")
    receiver.received.clear()
    caller = Caller(service, token=STRANGERS[0])

    task = await caller.send("a prompt that nobody else may read")
    await receiver.until(lambda it: len(it.received) == 4)
    await mail.until(1)
    (url,) = await waits(receiver)
    phone = Phone(service, url)
    shown = await phone.show()
    with capture_logs() as records:
        answered = await phone.answer("permission.reply", reply="once")
    done = await caller.ended(task.id)
    await receiver.until(lambda it: len(it.received) == 8)
    await mail.until(2)

    ntfy, slack, telegram, plain = sorted(
        receiver.received[:4], key=lambda one: ["/", "/serv", "/bot1", "/plai"].index(one.path[:5])
    )
    text = "OpenCode asks for permission to run a command. Answer by "
    title = "OpenCode A2A: shop"
    assert ntfy.headers["authorization"] == f"Bearer {SECRETS['ntfy']}"
    assert (ntfy.content["topic"], ntfy.content["title"]) == ("topic", title)
    assert ntfy.content["message"].startswith(text)
    assert ntfy.content["actions"][0]["url"] == ntfy.content["click"] == url
    assert slack.path == "/services/T0/B0/slack-secret"
    assert slack.content["text"].startswith(f"*{title}*\n{text}")
    assert slack.content["text"].endswith(f"<{url}|See and answer>")
    assert slack.content["unfurl_links"] is False
    assert telegram.path == f"/bot{SECRETS['telegram']}/sendMessage"
    assert telegram.content["chat_id"] == "-100"
    assert telegram.content["link_preview_options"] == {"is_disabled": True}
    assert telegram.content["reply_markup"]["inline_keyboard"][0][0]["url"] == url
    assert plain.headers["authorization"] == "Bearer the-token-of-a-webhook"
    assert plain.content["url"] == url
    assert (plain.content["principal"], plain.content["urgent"]) == ("stranger 0", True)
    (to, first), (_, last) = mail.mails
    assert to == ["me@example.org", "you@example.org"]
    assert mail.logins[0] == ("me", SECRETS["email"])
    assert (first["Subject"], first["From"]) == (title, "agent@example.org")
    assert url in first.get_payload(decode=True).decode()  # type: ignore[union-attr] # not in parts
    assert "A task is completed." in last.get_payload(decode=True).decode()  # type: ignore[union-attr] # ditto

    assert shown["asked"]["details"]["metadata"] == {"command": "ls -la"}
    assert shown["asked"]["details"]["replies"] == ["once", "reject"]
    assert "scopes" not in shown["asked"]["details"]
    assert answered[0] == 200
    assert answered[1]["settled"]["resolution"] == "once"
    assert done.state == "completed"
    sent = b"".join(one.body for one in receiver.received) + b"".join(
        bytes(mail) for _, mail in mail.mails
    )
    for secret in (b"ls -la", b"nobody else", *(one.encode() for one in SECRETS.values())):
        assert secret not in sent
    assert not [one for one in records if url.partition("#")[2] in str(one)]
    (by_link,) = [one for one in records if one["event"] == "answered by link"]
    assert (by_link["principal"], by_link["credential_id"]) == ("stranger 0", "link")
    assert (by_link["resolution"], by_link["outcome"]) == ("once", "success")
    (settled,) = [one for one in records if one["event"] == "interrupt settled"]
    assert (settled["by"], settled["resolution"]) == ("stranger 0", "once")
    # A caller knows nothing of these rows, and can neither count nor delete them.
    assert await caller.method("opencode.webhooks.list", {}) == {"items": []}


@pytest.mark.requirement("I23")
async def test_a_link_shows_no_request_but_its_own(
    service: Running, person: Caller, opencode: FakeOpenCode, receiver: Receiver
) -> None:
    opencode.play("permission-two-parallel-always-first")
    begun = await person.begin("run both")
    first, second = [Phone(service, url) for url in await waits(receiver, 2)]
    running = parts_of(service).tasks.open.get(TaskId(begun.id))
    assert running is not None

    seen = list[int]()
    for phone in (second, first, second):
        assert "asked" in await phone.show()
        seen.append(running.log.seen.newest)
    await person.cancel(begun.id)

    assert seen == [0, 1, 2]


@pytest.mark.requirement("I23")
async def test_a_link_answers_its_request_once_and_nothing_else(
    service: Running, person: Caller, opencode: FakeOpenCode, receiver: Receiver
) -> None:
    opencode.play("permission-once")
    one, other = await person.send("hello"), await person.send("hello")
    first, second = [Phone(service, url) for url in await waits(receiver, 2)]
    assert (await second.show())["asked"]["details"]["metadata"] == {"command": "ls -la"}

    # Whoever only follows the link, as previews and scanners do, gets the same page as everybody.
    for verb in ("GET", "HEAD"):
        page = await service.http.request(verb, "/link", headers={"Authorization": ""})
        assert page.status_code == 200
        assert "require-trusted-types-for 'script'" in page.headers["content-security-policy"]
        assert "default-src 'none'" in page.headers["content-security-policy"]
    for path in ("/link/show", "/link/answer"):
        with_token = await service.http.get(path, params={"link": second.link})
        assert with_token.status_code == 405
    # Without having been shown, forged, or for something else.
    assert (await first.answer("permission.reply", reply="once"))[0] == 400
    forged = Phone(service, f"#{first.link[:-1]}{'A' if first.link[-1] != 'A' else 'B'}")
    crossed = Phone(service, f"#{first.link.rpartition('.')[0]}.{second.link.rpartition('.')[2]}")
    row = await row_of(service, first)
    notices = parts_of(service).notices
    assert notices is not None
    for subject in (
        Subject(row.request_id, "stranger 1", row.expires_at),
        Subject(row.request_id, row.principal, row.expires_at + 1),
        Subject("in_" + one.id + "_0", row.principal, row.expires_at),
        Subject("per_unknown", row.principal, row.expires_at),
    ):
        unfit = Phone(service, notices.signer.link(subject))
        assert "error" in await unfit.show()
    another_key = Phone(service, Signer(b"another", "").link(subject_of(row)))
    in_ages = Phone(service, f"#in_{one.id}_{'f' * 3900}.x")
    strange = (Phone(service, "#"), Phone(service, "#%00.x"), in_ages)
    for phone in (forged, crossed, another_key, *strange):
        phone.page = second.page
        refused = await phone.show()
        assert refused == {"error": {"message": refused["error"]["message"]}}
        assert (await phone.answer("permission.reply", reply="once"))[0] == 404
    first.page = second.page
    assert (await first.answer("permission.reply", reply="once"))[0] == 400
    await first.show()
    assert (await first.answer("permission.reply"))[0] == 400
    assert (await first.answer("permission.reply", reply="always"))[0] == 400
    assert (await first.answer("permission.reply", reply="once", scope="task"))[0] == 400
    assert (await first.answer("question.reply", answers=[["yes"]]))[0] == 400
    assert (await first.answer("plan.go"))[0] == 400
    waiting = [(await person.get(task.id)).state for task in (one, other)]
    assert waiting == ["input_required", "input_required"]

    # The same tap twice at the same moment is one answer; the opposite tap is told what happened.
    taps = [first.answer("permission.reply", reply="once") for _ in range(2)]
    both = await asyncio.gather(*taps)
    assert [status for status, _ in both] == [200, 200]
    assert (await person.ended(one.id)).state == "completed"
    assert (await first.answer("permission.reply", reply="once"))[0] == 200
    status, said = await first.answer("permission.reply", reply="reject")
    assert (status, said["over"]["resolution"]) == (409, "once")
    over = await first.show()
    assert over["over"]["resolution"] == "once"
    assert "asked" not in over
    assert "page" not in over
    assert (await person.get(other.id)).state == "input_required"
    await second.answer("permission.reply", reply="reject", message="not now")
    assert (await person.ended(other.id)).state in ("completed", "failed")
    assert len(await waits(receiver, 2)) == 2


def parts_of(service: Running) -> Parts:
    assert service.service.parts is not None
    return service.service.parts


async def row_of(service: Running, phone: Phone) -> interrupts.InterruptRow:
    database = parts_of(service).database
    found = await database.read(interrupts.find, phone.link.rpartition(".")[0])
    assert found is not None
    return found


def subject_of(row: interrupts.InterruptRow) -> Subject:
    return Subject(row.request_id, row.principal, row.expires_at)


async def test_questions_plans_and_sign_ins_are_answered_by_link(
    service: Running, person: Caller, opencode: FakeOpenCode, receiver: Receiver
) -> None:
    opencode.agents[:] = [{"name": name, "mode": "primary"} for name in ("build", "plan")]
    opencode.play("question-answered")
    asked = await person.send("hello")
    opencode.play("plain-text")
    planned, dropped = [await person.send("do it", metadata=PLAN) for _ in range(2)]
    opencode.play("error-401")
    unsigned = await person.send("hello")
    question, plan, drop, sign_in = [Phone(service, one) for one in await waits(receiver, 4)]
    opencode.play("plain-text")

    shown = await question.show()
    questions = shown["asked"]["details"]["questions"]
    labels = [[one["options"][0]["label"]] for one in questions]
    assert (await question.answer("question.reply", answers=[]))[0] == 400
    assert (await question.answer("question.reply", answers=labels))[0] == 200
    assert (await question.answer("question.reject"))[0] == 409
    assert (await person.ended(asked.id)).state == "completed"

    assert (await plan.show())["plan"] == "one two three four"
    taps = await asyncio.gather(*(plan.answer("plan.go") for _ in range(2)))
    assert [status for status, _ in taps] == [200, 200]
    assert (await person.ended(planned.id)).state == "completed"
    status, said = await plan.answer("plan.drop")
    assert (status, said["over"]["resolution"]) == (409, "approved")
    await drop.show()
    assert (await drop.answer("plan.drop"))[0] == 200
    assert (await person.get(dropped.id)).state == "canceled"
    assert (await drop.answer("plan.go"))[0] in (409, 410)

    shown = await sign_in.show()
    assert set(shown["task"]) == {"status"}
    taps = await asyncio.gather(*(sign_in.answer("retry") for _ in range(2)))
    assert [status for status, _ in taps] == [200, 200]
    assert (await person.ended(unsigned.id)).state == "completed"
    assert (await sign_in.show())["over"] == {"resolution": "retried"}
    assert (await sign_in.answer("retry"))[0] == 200
    opencode.agents.clear()
    prompts: list[Any] = opencode.prompts
    assert [one["parts"][0]["text"] for one in prompts].count("Try again") == 1


async def test_a_page_answers_only_what_it_has_shown() -> None:
    signer, subject = Signer(b"a key", ""), Subject("per_1", "ann", 1)

    token = signer.page_token(subject, "leads to a")

    assert signer.fits_page(token, subject, "leads to a")
    assert not signer.fits_page(token, subject, "leads to b")
    assert not signer.fits_page(token, subject)


@pytest.mark.parametrize("meanwhile", ["works", "asks", "plans", "waits again"])
async def test_another_try_by_link_counts_only_for_the_sign_in_that_was_shown(
    service: Running,
    person: Caller,
    opencode: FakeOpenCode,
    receiver: Receiver,
    monkeypatch: pytest.MonkeyPatch,
    meanwhile: str,
) -> None:
    opencode.agents[:] = [{"name": name, "mode": "primary"} for name in ("build", "plan")]
    opencode.play("error-401")
    task = await person.send("hello", metadata=PLAN if meanwhile == "plans" else {})
    phone = Phone(service, (await waits(receiver))[0])
    await phone.show()
    plays = {"asks": "question-answered", "waits again": "error-401"}
    opencode.play(plays.get(meanwhile, "plain-text"))

    async def try_again() -> None:
        if meanwhile == "works":
            hold = opencode.hold(count=2)
            await person.begin("now", task=task.id)
            await hold.reached.wait()
        else:
            await person.send("now", task=task.id)

    tapped_late(monkeypatch, try_again)
    status, said = await phone.answer("retry")
    before = await person.get(task.id)
    opencode.release()
    if meanwhile == "works":
        await person.ended(task.id)
    else:
        await person.cancel(task.id)
    after = await person.get(task.id)
    texts = list(opencode.texts)
    opencode.agents.clear()

    assert (status, said["over"]["resolution"]) == (409, "retried")
    assert before.state == {
        "works": "working",
        "waits again": "auth_required",
    }.get(meanwhile, "input_required")
    assert after.history == ["hello", "now"]
    assert len(texts) == 2
    assert "Try again" not in texts


async def test_a_plan_that_is_carried_out_meanwhile_is_not_dropped_by_link(
    service: Running,
    person: Caller,
    opencode: FakeOpenCode,
    receiver: Receiver,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    opencode.agents[:] = [{"name": name, "mode": "primary"} for name in ("build", "plan")]
    opencode.play("plain-text")
    task = await person.send("do it", metadata=PLAN)
    phone = Phone(service, (await waits(receiver))[0])
    await phone.show()

    async def approve() -> None:
        hold = opencode.hold(count=2)
        await person.begin("go", task=task.id)
        await hold.reached.wait()

    tapped_late(monkeypatch, approve)
    status, said = await phone.answer("plan.drop")
    opencode.release()
    ended = await person.ended(task.id)
    opencode.agents.clear()

    assert (status, said["over"]["resolution"]) == (409, "approved")
    assert ended.state == "completed"


@pytest.mark.postgresql_only
async def test_a_tap_at_another_replica_is_too_late_alike(
    opencode: FakeOpenCode, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opencode.agents[:] = [{"name": name, "mode": "primary"} for name in ("build", "plan")]
    async with AsyncExitStack() as stack:
        receiver = await stack.enter_async_context(receiving())
        base = receiver.url.removesuffix("/hook")
        told = [{"kind": "ntfy", "url": f"{base}/topic", "principals": ALL}]
        made = await stack.enter_async_context(cluster([opencode], tmp_path))
        start = partial(
            made.start,
            A2A_NOTIFY=orjson.dumps(told).decode(),
            A2A_PUBLIC_URL="https://agent.test",
        )
        await start("a")
        person = Caller(await made.runs("one"))
        opencode.play("error-401")
        unsigned = await person.send("hello")
        opencode.play("plain-text")
        planned, dropped = [await person.send("do it", metadata=PLAN) for _ in range(2)]
        opencode.play("permission-once")
        allowed = await person.send("run it")
        urls = await waits(receiver, 4)
        # While settings are rolled out, replicas differ.
        other = await start("b", A2A_INTERRUPT_REQUEST_TTL_SECONDS="7200")
        sign_in, plan, drop, permission = phones = [Phone(other, url) for url in urls]
        for phone in phones:
            assert "page" in await phone.show()
        dropping = await drop.answer("plan.drop")
        await person.send("yes", task=allowed.id)
        with monkeypatch.context() as patch:  # nobody has to be asked
            patch.delattr(Mailbox, "forward")
            settled = await permission.answer("permission.reply", reply="reject")
        opencode.play("plain-text")
        late = list[tuple[int, str]]()
        for task, phone, word, method in (
            (unsigned, sign_in, "now", "retry"),
            (planned, plan, "go", "plan.drop"),
        ):

            async def begin(task_id: str = task.id, word: str = word) -> None:
                hold = opencode.hold(count=2)
                await person.begin(word, task=task_id)
                await hold.reached.wait()

            with monkeypatch.context() as patch:
                tapped_late(patch, begin)
                status, said = await phone.answer(method)
            late.append((status, said["over"]["resolution"]))
            opencode.release()
        ended = [await person.ended(task.id) for task in (unsigned, planned, dropped)]
        opencode.agents.clear()

    assert dropping[0] == 200
    assert (settled[0], settled[1]["over"]["resolution"]) == (409, "once")
    assert late == [(409, "retried"), (409, "approved")]
    assert [task.state for task in ended] == ["completed", "completed", "canceled"]
    assert ended[0].history == ["hello", "now"]


@pytest.mark.postgresql_only
async def test_a_replica_without_webhooks_leaves_those_of_callers_to_others(
    opencode: FakeOpenCode, tmp_path: Path
) -> None:
    async with AsyncExitStack() as stack:
        phone, receiver = [await stack.enter_async_context(receiving()) for _ in range(2)]
        base = phone.url.removesuffix("/hook")
        told = [{"kind": "ntfy", "url": f"{base}/topic", "principals": ALL}]
        made = await stack.enter_async_context(cluster([opencode], tmp_path))
        start = partial(
            made.start,
            A2A_NOTIFY=orjson.dumps(told).decode(),
            A2A_PUBLIC_URL="https://agent.test",
            A2A_PUSH_ALLOW_PRIVATE_HOSTS="true",
        )
        # While settings are rolled out, replicas differ.
        owner = Caller(await start("a", A2A_PUSH_ENABLED="false"))
        await made.runs("one")
        other = Caller(await start("b"))
        hold = opencode.hold(count=2)
        task = await owner.begin("hello")
        await hold.reached.wait()
        await other.ask("push create", {"taskId": task.id, "url": receiver.url})
        opencode.release()
        await ends(phone, task.id)
        await receiver.ended()

    assert receiver.states == ["completed"]


@pytest.mark.postgresql_only
async def test_a_request_still_waits_while_no_replica_runs_its_opencode(
    opencode: FakeOpenCode, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mailbox, "PATIENCE_SECONDS", 0.5)
    async with AsyncExitStack() as stack:
        receiver = await stack.enter_async_context(receiving())
        base = receiver.url.removesuffix("/hook")
        told = [{"kind": "ntfy", "url": f"{base}/topic", "principals": ALL}]
        second = await stack.enter_async_context(FakeOpenCode(opencode.workspace).running())
        made = await stack.enter_async_context(cluster([second], tmp_path))
        start = partial(
            made.start,
            A2A_NOTIFY=orjson.dumps(told).decode(),
            A2A_PUBLIC_URL="https://agent.test",
        )
        a = await start("a")
        second.play("permission-once")
        await Caller(a).send("run it")
        (url,) = await waits(receiver)
        await a.stop()
        made.opencodes = {"two": opencode}
        b = await start("b")
        phone = Phone(b, url)
        shown = await phone.show()
        status, said = await phone.answer("permission.reply", reply="once")
        request_id = shown["asked"]["request_id"]
        by_method = await Caller(b).refused(
            "a2a.interrupt.permission.reply", {"request_id": request_id, "reply": "once"}
        )
        again = await phone.show()

    assert (status, "over" in said) == (503, False)
    assert by_method.reason == "UPSTREAM_UNREACHABLE"
    assert again["asked"]["request_id"] == request_id


async def test_an_answer_that_was_not_taken_is_not_called_late(
    service: Running,
    person: Caller,
    opencode: FakeOpenCode,
    receiver: Receiver,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    opencode.play("permission-once")
    task = await person.send("run it")
    phone = Phone(service, (await waits(receiver))[0])
    await phone.show()

    async def being_taken_up(*_: object) -> None:
        raise InterruptNotFoundError

    with monkeypatch.context() as patch:
        patch.setattr(Dispatcher, "call", being_taken_up)
        not_taken = await phone.answer("permission.reply", reply="once")
    taken = await phone.answer("permission.reply", reply="once")

    assert not_taken == (503, {"error": {"message": pages.STILL_WAITS}})
    assert taken[0] == 200
    assert (await person.ended(task.id)).state == "completed"


def tapped_late(
    monkeypatch: pytest.MonkeyPatch, meanwhile: Callable[[], Coroutine[Any, Any, None]]
) -> None:
    """Have something happen just after a page found that its request still waits."""
    looks, loop = count(1), asyncio.get_running_loop()
    look = pages.LinkPages._linked  # noqa: SLF001 # pyright: ignore[reportPrivateUsage] - the moment after it

    async def linked(self: pages.LinkPages, link: str) -> Any:
        found = await look(self, link)
        if next(looks) == 2:
            # A replica of a test has a loop of its own.
            await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(meanwhile(), loop))
        return found

    monkeypatch.setattr(pages.LinkPages, "_linked", linked)


async def test_a_late_answer_is_told_so_and_a_settled_request_is_not_told(
    opencode: FakeOpenCode, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opencode.play("permission-once")
    async with AsyncExitStack() as stack:
        receiver = await stack.enter_async_context(receiving())
        base = receiver.url.removesuffix("/hook")
        told = [{"kind": "ntfy", "url": f"{base}/topic", "principals": ALL}]
        changes = {"A2A_NOTIFY": orjson.dumps(told).decode(), "A2A_PUSH_ENABLED": "false"}
        service = await stack.enter_async_context(started(opencode, tmp_path, **changes))
        person = Caller(service)

        late = await person.send("hello")
        (url,) = await waits(receiver)
        phone = Phone(service, url)
        await phone.show()
        with monkeypatch.context() as patch:
            patch.setattr(pages, "now_ms", lambda: 2**50)
            status, said = await phone.answer("permission.reply", reply="once")
            shown = await phone.show()
        waiting = await person.get(late.id)
        database, row = parts_of(service).database, await row_of(service, phone)
        await database.write(interrupts.settle, row.request_id, "expired", 1, "deadline")
        expired = await phone.show()
        await person.cancel(late.id)
        await ends(receiver, late.id)
        # The first attempt fails, and meanwhile somebody answers: nobody has to know any more.
        receiver.received.clear()
        receiver.gate.clear()
        receiver.answers.append((503, {}))
        missed = await person.send("hello")
        await receiver.until(lambda it: len(it.received) == 1)
        await person.send("yes", task=missed.id)
        receiver.gate.set()
        await ends(receiver, missed.id)
        assert len(await waits(receiver)) == 1
        assert len(receiver.received) == 2
        # The task ends without an answer.
        receiver.received.clear()
        dropped = await person.send("hello")
        (url,) = await waits(receiver)
        phone = Phone(service, url)
        await phone.show()
        await person.cancel(dropped.id)
        void = await phone.answer("permission.reply", reply="once")

        assert void == (410, {"error": {"message": pages.VOID}, "over": void[1]["over"]})
        assert void[1]["over"]["resolution"] == "void"
        assert (status, said["over"]["resolution"]) == (410, "expired")
        assert shown["over"]["resolution"] == expired["over"]["resolution"] == "expired"
        assert "asked" not in shown
        assert waiting.state == "input_required"


async def test_a_request_is_told_though_the_clock_of_this_machine_is_ahead(
    opencode: FakeOpenCode, tmp_path: Path, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    opencode.play("permission-once")
    receiver.received.clear()
    hour_ago = (time.time_ns() - time.monotonic_ns()) // 1_000_000 - 3_600_000
    monkeypatch.setattr(SHARED_CLOCK, "ahead", hour_ago)  # as a database would have it
    places = [{"kind": "ntfy", "url": receiver.url, "principals": ALL}]
    changes = {"A2A_NOTIFY": orjson.dumps(places).decode()}
    async with started(
        opencode, tmp_path, A2A_INTERRUPT_REQUEST_TTL_SECONDS="1800", **changes
    ) as service:
        await Caller(service).send("hello")
        async with asyncio.timeout(30):
            (url,) = await waits(receiver)

        assert "asked" in await Phone(service, url).show()


async def test_nobody_is_told_in_quiet_hours(
    opencode: FakeOpenCode, tmp_path: Path, receiver: Receiver
) -> None:
    opencode.play("permission-once")
    receiver.received.clear()
    places = [{"kind": "ntfy", "url": receiver.url, "principals": ALL}]
    now = datetime.now(UTC)
    begins, ends = now - timedelta(hours=1), now + timedelta(hours=2)
    hours = f"{begins:%H:%M}-{ends:%H:%M} UTC"
    changes = {"A2A_NOTIFY": orjson.dumps(places).decode(), "A2A_NOTIFY_QUIET": hours}
    async with started(opencode, tmp_path, **changes) as service:
        task = await Caller(service).send("hello")
        database = parts_of(service).database
        columns = sa.select(webhooks.c.last_outcome, webhooks.c.failing_since)

        def outcome(connection: Connection) -> tuple[str | None, int | None]:
            found = connection.execute(columns.order_by(webhooks.c.no.desc())).first()
            return (None, None) if found is None else tuple(found)

        async with asyncio.timeout(60):
            while (told := await database.read(outcome))[0] in (None, "skipped"):
                pass

        assert task.state == "input_required"
        assert told == ("quiet", None)
        assert receiver.received == []


async def test_a_test_message_is_sent_by_a_command_and_doctor_names_the_targets(
    receiver: Receiver, mail: MailServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    receiver.received.clear()
    before = len(mail.mails)
    away = {"kind": "webhook", "name": "away", "url": f"http://127.0.0.1:{free_port()}/"}
    told = [*targets(receiver, mail), away]
    monkeypatch.setenv("A2A_NOTIFY", orjson.dumps(told).decode())
    monkeypatch.setenv("A2A_NOTIFY_QUIET", "00:00-23:59 Europe/Berlin")
    monkeypatch.setenv("A2A_PUBLIC_URL", "http://192.0.2.1")
    monkeypatch.setenv("A2A_STATE_DIR", str(tmp_path))

    sent = await asyncio.to_thread(CliRunner().invoke, main, ["notify", "--test"])
    one = await asyncio.to_thread(
        CliRunner().invoke, main, ["notify", "--test", "--target", "slack"]
    )
    wrong = CliRunner().invoke(main, ["notify", "--test", "--target", "pager"])
    found = check_notices(load({}, os.environ))

    for name in ("ntfy", "slack", "telegram", "webhook", "email"):
        assert f"{name}: sent\n" in sent.output
    assert "away: not sent (unreachable); it cannot be reached" in sent.output
    assert (sent.exit_code, one.exit_code, wrong.exit_code) == (1, 0, 2)
    assert (len(receiver.received), len(mail.mails)) == (5, before + 1)
    assert "there is no target pager" in wrong.output
    assert found.found.startswith("ntfy, slack, telegram, webhook, email, away; quiet 00:00-23:59")
    assert found.advice
    assert "https://" in (found.remedy or "")
    shown = sent.output + one.output + str(found)
    assert not [secret for secret in (*SECRETS.values(), "slack-secret") if secret in shown]
