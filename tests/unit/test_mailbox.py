"""Calls at another replica: who does what is asked, what comes back, and what is left behind."""

import asyncio
import re
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import orjson
import pytest
import pytest_asyncio
import sqlalchemy as sa
from pydantic import TypeAdapter
from sqlalchemy.engine import Connection

from opencode_a2a.a2a.types import Version
from opencode_a2a.clock import now_ms
from opencode_a2a.cluster import mailbox as module
from opencode_a2a.cluster.fleet import Fleet, Here, Member, MovedError, There
from opencode_a2a.cluster.mailbox import (
    Mailbox,
    OwnerCall,
    SessionQuery,
    dump_error,
    load_error,
)
from opencode_a2a.config import LimitSettings, PushSettings, UpstreamEntry, load
from opencode_a2a.errors import (
    AuthorizationForbiddenError,
    BudgetExhaustedError,
    InternalError,
    InvalidFieldError,
    MaybeRunError,
    MethodNotFoundError,
    NotRunError,
    ServiceError,
    UpstreamError,
    UpstreamNotFoundError,
    UpstreamUnreachableError,
    Violation,
)
from opencode_a2a.extensions import EXTENSIONS
from opencode_a2a.extensions.call import Deps
from opencode_a2a.extensions.dispatch import Dispatcher, MethodRequest
from opencode_a2a.ids import Caller, ContextId, MessageId, ModelRef, Principal, SessionId, TaskId
from opencode_a2a.log.log import LogWriter
from opencode_a2a.log.state import Accepted, TaskRef, TaskState, dump_entries
from opencode_a2a.messages import Message, Part, PromptPart, PushConfig, Routing, TurnRequest
from opencode_a2a.opencode.upstream import OpenCodeServer
from opencode_a2a.rights import Budget, Rights
from opencode_a2a.store import replicas
from opencode_a2a.store import tasks as task_rows
from opencode_a2a.store.database import Database
from opencode_a2a.store.engine import Replica
from opencode_a2a.store.mail import SentRow
from opencode_a2a.store.replicas import MAIL_FORMAT, Census
from opencode_a2a.store.tasks import Segment, TaskRow
from opencode_a2a.tasks import service as service_module
from opencode_a2a.tasks.command import SendCommand
from opencode_a2a.tasks.service import NewWebhook, TaskName, TaskService, WebhookName
from opencode_a2a.tasks.webhooks import Webhooks
from opencode_a2a.turns.errands import Errands
from opencode_a2a.turns.job import SharedTurns
from opencode_a2a.turns.sessions import WorkspaceRoot
from tests.support import stores

pytestmark = pytest.mark.postgresql_only


def fleet_of(database: Database, *, owned: bool) -> Fleet:
    """Return the OpenCode ``x``, which cannot be reached."""
    away = SimpleNamespace(feed=SimpleNamespace(up=asyncio.Event()))
    behind = OpenCodeServer("http://127.0.0.1:9", "", None)
    entry = UpstreamEntry(name="x", url=behind.url)
    member = Member(entry, behind, lambda: cast("tuple[SharedTurns, Errands]", (away, None)))
    member.owned = owned
    return Fleet([member], database, 0)


class Office:
    """A replica, as far as its post is concerned."""

    def __init__(self, url: str, name: str) -> None:
        self.database = Database(url, Replica(name))
        self.mine: list[str] = []
        self.mailbox = Mailbox(self.database, lambda: self.mine)
        self.asked: list[bytes] = []
        self.begun = asyncio.Event()
        self.held = asyncio.Event()
        """What is kept from ending."""
        self.held.set()
        self.mailbox.register("echo", self.handle)
        self._running: asyncio.Task[None] | None = None

    async def handle(self, upstream: str, body: bytes) -> bytes:
        self.asked.append(body)
        self.begun.set()
        await self.held.wait()
        return body.upper()

    async def begin(self) -> None:
        self.database.census = stores.SHARED
        self._running = asyncio.create_task(self.mailbox.run())

    async def end(self) -> None:
        if self._running is not None:
            self._running.cancel()
            await asyncio.wait([self._running])

    async def own(self, *names: str) -> None:
        """Become the owner of some OpenCodes."""

        def write(connection: Connection) -> None:
            for name in names:
                connection.execute(
                    sa.text(
                        "INSERT INTO upstreams (name, owner, state, drain, room, tasks, changed)"
                        " VALUES (:name, :me, 'up', 0, 0, 0, now())"
                        " ON CONFLICT (name) DO UPDATE SET owner = excluded.owner"
                    ),
                    {"name": name, "me": self.database.replica},
                )

        await self.database.write(write)
        self.mine += names

    async def ask(self, upstream: str, body: bytes = b"hi", *, again: bool = True) -> bytes:
        async with asyncio.timeout(60):
            return await self.mailbox.forward(upstream, "echo", body, repeatable=again)

    async def mail(self) -> list[tuple[bytes, bytes | None]]:
        """Return all the mail there is: what is asked, and the reply."""
        query = sa.text("SELECT body, reply FROM mail ORDER BY no")
        found = await self.database.read(lambda c: c.execute(query).all())
        return [(row[0], row[1]) for row in found]

    async def until(self, *wanted: tuple[bytes, bytes | None]) -> None:
        """Wait until this is all the mail there is."""
        async with asyncio.timeout(60):
            while await self.mail() != [*wanted]:  # noqa: ASYNC110 - no event
                await asyncio.sleep(0.02)

    async def bury(self, other: "Office") -> None:
        """Declare another replica gone."""
        query = sa.text("UPDATE replicas SET gone = clock_timestamp() WHERE no = :no")
        await self.database.write(lambda c: c.execute(query, {"no": other.database.replica}))


@pytest_asyncio.fixture
async def offices(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncGenerator[tuple[Office, Office, Office]]:
    monkeypatch.setattr(module, "POLL_SECONDS", 0.02)
    monkeypatch.setattr(module, "RETURN_SECONDS", 0.01)
    monkeypatch.setattr(module, "CLOSE_SECONDS", 0.0)
    async with AsyncExitStack() as stack:
        made: list[Office] = []
        for name in ("a", "b", "c"):
            office = Office(stores.url(tmp_path), name)
            await stack.enter_async_context(office.database)
            await office.begin()
            stack.push_async_callback(office.end)
            made.append(office)
        yield made[0], made[1], made[2]


Offices = tuple[Office, Office, Office]


async def test_the_owner_does_it_and_nothing_is_left(offices: Offices) -> None:
    a, b, c = offices
    await b.own("x")
    await c.own("y")
    b.held.clear()

    asking = asyncio.create_task(a.ask("x", b"a secret"))
    async with asyncio.timeout(60):
        await b.begun.wait()
    assert await a.mail() == [(b"a secret", None)]
    b.held.set()
    assert await asking == b"A SECRET"

    await a.until()
    assert (a.asked, b.asked, c.asked) == ([], [b"a secret"], [])


async def test_what_was_asked_is_erased_as_soon_as_it_is_done(offices: Offices) -> None:
    a, b, _ = offices
    await b.own("x")
    await a.end()  # so that the reply is not read
    asking = asyncio.create_task(a.ask("x", b"a secret"))
    await b.until((b"", b"=A SECRET"))
    asking.cancel()
    await b.until()


async def test_the_owners_refusal_is_raised_as_it_was(offices: Offices) -> None:
    a, b, _ = offices
    await b.own("x")
    violations = (Violation("limit", "must be a number"),)

    async def refuse(upstream: str, body: bytes) -> bytes:
        raise InvalidFieldError("limit: must be a number", violations=violations, field="limit")

    b.mailbox.handlers["echo"] = refuse
    with pytest.raises(InvalidFieldError) as raised:
        await a.ask("x")
    assert raised.value.violations == violations
    assert raised.value.data == {"field": "limit"}


async def test_a_defect_of_the_owner_tells_nothing(offices: Offices) -> None:
    a, b, _ = offices
    await b.own("x")

    async def fail(upstream: str, body: bytes) -> bytes:
        raise KeyError("/srv/secret")

    b.mailbox.handlers["echo"] = fail
    with pytest.raises(InternalError) as raised:
        await a.ask("x")
    assert "secret" not in raised.value.message


@pytest.mark.parametrize("fails", ["dump_error", "store_reply"])
async def test_a_reply_that_cannot_be_stored_is_told_as_a_defect(
    fails: str, offices: Offices, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b, _ = offices
    await b.own("x")
    within = module if fails == "dump_error" else module.mail
    call = getattr(within, fails)

    def fail_once(*given: Any) -> Any:
        monkeypatch.setattr(within, fails, call)
        raise TypeError("no JSON")

    async def refuse(upstream: str, body: bytes) -> bytes:
        raise UpstreamNotFoundError

    b.mailbox.handlers["echo"] = refuse
    monkeypatch.setattr(within, fails, fail_once)
    with pytest.raises(InternalError):
        await a.ask("x")


async def test_what_only_a_later_version_knows_is_refused_in_plain_words(offices: Offices) -> None:
    a, b, _ = offices
    await b.own("x")
    with pytest.raises(UpstreamUnreachableError, match="another version of the service") as raised:
        await a.mailbox.forward("x", "of a later version", b"", repeatable=True)
    assert raised.value.headers == (("Retry-After", "1"),)


async def test_arguments_and_results_that_cannot_be_read_are_to_be_tried_again(
    offices: Offices,
) -> None:
    a, b, _ = offices
    await b.own("x")
    theirs, ours, number = Mailbox(b.database, list), Mailbox(a.database, list), TypeAdapter(int)

    async def double(_: Member, given: int) -> int:
        return 2 * given

    async def describe(_: Member, given: int) -> str:
        return f"{given} twice"

    owned, unowned = fleet_of(b.database, owned=True), fleet_of(a.database, owned=False)
    OwnerCall(theirs, "double", owned, double, lambda: number, lambda: number)
    b.mailbox.handlers |= theirs.handlers
    call = OwnerCall(ours, "double", unowned, describe, lambda: number, lambda: TypeAdapter(str))
    running = asyncio.create_task(ours.run())
    with pytest.raises(UpstreamUnreachableError, match="nothing was done"):
        await a.mailbox.forward("x", "double", b'"two"', repeatable=True)
    with pytest.raises(UpstreamUnreachableError, match="may have been done"):
        await call.run(unowned.where("x"), 2)
    running.cancel()
    await asyncio.wait([running])


async def test_an_owner_of_an_earlier_format_is_not_asked_and_may_ask(offices: Offices) -> None:
    a, b, _ = offices
    await b.own("x")
    await a.own("y")
    query = sa.text("UPDATE replicas SET format = 0 WHERE no = :no")
    await a.database.write(lambda c: c.execute(query, {"no": b.database.replica}))
    for office in (a, b):
        office.database.census = await office.database.read(
            lambda c: Census(office.database.replica or 0, replicas.live(c), replicas.upstreams(c))  # noqa: B023 - it is run now
        )
    with pytest.raises(UpstreamUnreachableError, match="another version") as raised:
        await a.ask("x")
    assert raised.value.headers == (("Retry-After", "1"),)
    with pytest.raises(UpstreamUnreachableError, match="may have been done"):
        await a.mailbox.forward("x", "echo", b"", repeatable=True, begun=True)
    assert (b.asked, await a.mail()) == ([], [])
    assert await b.ask("y") == b"HI"


async def test_mail_of_a_later_format_is_left_for_an_owner_that_reads_it(offices: Offices) -> None:
    a, b, c = offices
    await b.own("x")
    query = sa.text("UPDATE replicas SET format = 1000 WHERE no = :no")
    await a.database.write(lambda c: c.execute(query, {"no": a.database.replica}))
    asking = asyncio.create_task(a.ask("x"))
    await a.until((b"hi", None))
    await c.ask("x", b"after it was looked for")
    assert b.asked == [b"after it was looked for"]
    query = sa.text("UPDATE replicas SET format = 1 WHERE no = :no")
    await a.database.write(lambda c: c.execute(query, {"no": a.database.replica}))
    assert await asking == b"HI"


RECORDED = Path(__file__).parents[1] / "support" / "mail"
TASK, CALLER = (Principal("ann"), "t"), Caller(Principal("ann"))
CALLS: dict[str, tuple[TypeAdapter[Any], Any, TypeAdapter[Any], Any]] = {
    "cancel": (TypeAdapter(TaskName), TaskName(*TASK), TypeAdapter(type(None)), None),
    "delete webhook": (
        TypeAdapter(WebhookName),
        WebhookName(*TASK, "w"),
        TypeAdapter(type(None)),
        None,
    ),
    "method": (
        TypeAdapter(MethodRequest),
        MethodRequest("opencode.sessions.get", CALLER, {"session_id": "ses_1"}, Version.V1, "x"),
        TypeAdapter(dict[str, Any]),
        {"id": "ses_1"},
    ),
    "session": (
        TypeAdapter(SessionQuery),
        SessionQuery("x", SessionId("ses_1")),
        TypeAdapter(bool),
        True,
    ),
    "submit": (
        TypeAdapter(SendCommand),
        SendCommand(
            principal=Principal("ann"),
            message=Message("m", "user", [Part("text", text="hello")], {"k": []}, ["e"], ["t"]),
            request=TurnRequest(
                (PromptPart(text="hello"),),
                MessageId("msg_1"),
                Routing(model=ModelRef("p", "m"), rights=Rights("ask")),
                Rights("deny", waits=False),
                "queue",
            ),
            task_id="t",
            context_id="c",
            output_modes=("text/plain",),
            push=PushConfig("https://hooks.test/x", "w", "Bearer", "secret", "token", within="x"),
            budget=Budget(1.5, 10, 2),
            seen_at_sender={TaskId("t"): 3},
        ),
        TypeAdapter(tuple[TaskId, int, bool]),
        (TaskId("t"), 1, False),
    ),
    "webhook": (
        TypeAdapter(NewWebhook),
        NewWebhook(*TASK, PushConfig("https://hooks.test/x", "w"), True),
        TypeAdapter(str),
        "w",
    ),
}
"""An example of every call between replicas: its arguments and its result."""


def test_what_replicas_send_each_other_is_what_was_recorded_of_its_format() -> None:
    written = {
        kind: {
            "arguments": arguments.dump_python(given, mode="json"),
            "result": result.dump_python(returned, mode="json"),
        }
        for kind, (arguments, given, result, returned) in CALLS.items()
    }
    recorded = orjson.loads((RECORDED / f"{MAIL_FORMAT}.json").read_bytes())
    # A new field that an earlier program may ignore: add it to the recording. Anything else: raise
    # MAIL_FORMAT, and record the new format in a file of its own.
    assert written == recorded


@pytest.mark.parametrize("recorded", sorted(RECORDED.glob("*.json")), ids=lambda path: path.stem)
def test_calls_of_every_format_are_read(recorded: Path) -> None:
    calls: dict[str, Any] = orjson.loads(recorded.read_bytes())
    for kind, call in calls.items():
        arguments, given, _, _ = CALLS[kind]
        assert arguments.validate_json(orjson.dumps(call["arguments"])) == given


def test_every_kind_of_call_is_recorded() -> None:
    sources = "".join(path.read_text() for path in Path(module.__file__).parents[1].rglob("*.py"))
    declared = re.findall(r'OwnerCall\(\s*[\w.]+,\s*"([a-z ]+)"', sources)
    assert sorted(declared) == sorted(CALLS)


async def test_what_nobody_takes_ends_and_is_not_done(
    offices: Offices, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b, _ = offices
    with monkeypatch.context() as patch:
        patch.setattr(module, "PATIENCE_SECONDS", 0.1)
        with pytest.raises(UpstreamUnreachableError) as raised:
            await a.ask("x")
    assert type(raised.value) is NotRunError
    assert await a.mail() == []
    await b.own("x")
    assert await a.ask("x", b"next") == b"NEXT"
    assert b.asked == [b"next"]


async def test_the_next_owner_does_what_can_be_done_again(offices: Offices) -> None:
    a, b, c = offices
    await b.own("x")
    b.held.clear()
    asking = asyncio.create_task(a.ask("x", again=True))
    async with asyncio.timeout(60):
        await b.begun.wait()
    await c.own("x")
    await c.bury(b)
    assert await asking == b"HI"
    assert (b.asked, c.asked) == ([b"hi"], [b"hi"])


async def test_what_cannot_be_done_again_may_have_been_done(offices: Offices) -> None:
    a, b, c = offices
    await b.own("x")
    b.held.clear()
    asking = asyncio.create_task(a.ask("x", again=False))
    async with asyncio.timeout(60):
        await b.begun.wait()
    await c.own("x")
    await c.bury(b)
    with pytest.raises(UpstreamUnreachableError) as raised:
        await asking
    assert type(raised.value) is MaybeRunError
    assert (c.asked, await a.mail()) == ([], [])


class Begun:
    """A call that begins at an office, and never ends there."""

    def __init__(self, office: Office) -> None:
        self.began = asyncio.Event()
        self.fleet = fleet_of(office.database, owned=True)
        apart, text = Mailbox(office.database, list), TypeAdapter(str)  # that of the office runs
        self.call = OwnerCall(apart, "run", self.fleet, self._run, lambda: text, lambda: text)
        office.mailbox.handlers |= apart.handlers
        apart.forward = office.mailbox.forward

    async def _run(self, _: Member, given: str) -> str:
        self.began.set()
        await asyncio.Event().wait()
        return given

    async def given_up(self, asking: "asyncio.Task[str]") -> str:
        """Give the OpenCode up once it has begun; return what the caller is told."""
        async with asyncio.timeout(60):
            await self.began.wait()
            await self.fleet.first.let_go()
            with pytest.raises(UpstreamUnreachableError) as raised:
                await asking
        return raised.value.message


async def test_what_an_owner_began_before_it_was_given_up_may_have_been_done(
    offices: Offices, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b, _ = offices
    here, there = Begun(a), Begun(b)
    monkeypatch.setattr(module, "PATIENCE_SECONDS", 2.0)
    await b.own("x")
    asking = asyncio.create_task(here.call.run_at_owner("x", "hi"))
    await there.began.wait()
    b.mine.clear()
    monkeypatch.setattr(module, "PATIENCE_SECONDS", 0.3)

    assert await there.given_up(asking) == MaybeRunError.message


async def test_what_an_owner_began_long_ago_is_done_by_the_next(offices: Offices) -> None:
    a, b, c = offices
    there = Begun(b)
    await b.own("x")
    asking = asyncio.create_task(a.mailbox.forward("x", "run", b'"hi"', repeatable=True))
    await there.began.wait()
    query = sa.text("UPDATE mail SET at = at - interval '1 hour'")
    await a.database.write(lambda connection: connection.execute(query))
    b.mine.clear()
    c.mailbox.handlers["run"] = c.handle
    await there.fleet.first.let_go()
    await c.own("x")

    async with asyncio.timeout(60):
        assert await asking == b'"HI"'


async def test_of_a_call_whose_mail_is_lost_nobody_says_that_nothing_was_done(
    offices: Offices,
) -> None:
    a, b, _ = offices
    await b.own("x")
    b.held.clear()
    asking = asyncio.create_task(a.ask("x"))
    async with asyncio.timeout(60):
        await b.begun.wait()
    # As after a failover to a server that did not have the last commits.
    await a.database.write(lambda connection: connection.execute(sa.text("DELETE FROM mail")))

    with pytest.raises(UpstreamUnreachableError) as raised:
        await asking
    assert type(raised.value) is MaybeRunError


async def test_what_began_here_before_it_was_given_up_may_have_been_done(
    offices: Offices, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, _, _ = offices
    here = Begun(a)
    monkeypatch.setattr(module, "PATIENCE_SECONDS", 0.1)
    running = asyncio.create_task(here.call.run(Here(here.fleet.first), "hi"))

    assert await here.given_up(running) == MaybeRunError.message


async def test_the_one_who_asked_can_become_the_owner(offices: Offices) -> None:
    a, _, _ = offices
    asking = asyncio.create_task(a.ask("x"))
    await a.own("x")
    assert await asking == b"HI"


async def test_one_who_is_at_it_is_waited_for(
    offices: Offices, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b, _ = offices
    await b.own("x")
    b.held.clear()
    clock, looks, sent = 1000.0, 0, module.mail.sent

    def counted(connection: Connection, numbers: Sequence[int]) -> list[SentRow]:
        nonlocal looks
        looks += 1
        return sent(connection, numbers)

    async def looked_again() -> None:
        # The third look from now begins after the second has taken effect.
        before = looks
        async with asyncio.timeout(60):
            while looks < before + 3 and not asking.done():  # noqa: ASYNC110 - no event
                await asyncio.sleep(0.01)

    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: clock))
    monkeypatch.setattr(module.mail, "sent", counted)
    asking = asyncio.create_task(a.ask("x"))
    async with asyncio.timeout(60):
        await b.begun.wait()
    await looked_again()
    clock += 2 * module.PATIENCE_SECONDS
    await looked_again()

    assert not asking.done()
    b.held.set()
    assert await asking == b"HI"


async def test_what_belongs_to_another_is_passed_on(offices: Offices) -> None:
    a, b, c = offices
    await b.own("x")
    await c.own("y")

    async def elsewhere(upstream: str, body: bytes) -> bytes:
        raise MovedError("y")

    b.mailbox.handlers["echo"] = elsewhere
    assert await a.ask("x") == b"HI"
    assert c.asked == [b"hi"]


async def test_two_who_disagree_do_not_hold_the_caller(
    offices: Offices, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b, c = offices
    monkeypatch.setattr(module, "PATIENCE_SECONDS", 0.2)
    await b.own("x")
    await c.own("y")

    async def to_y(upstream: str, body: bytes) -> bytes:
        raise MovedError("y")

    async def to_x(upstream: str, body: bytes) -> bytes:
        raise MovedError("x")

    b.mailbox.handlers["echo"], c.mailbox.handlers["echo"] = to_y, to_x
    with pytest.raises(UpstreamUnreachableError):
        await a.ask("x")


async def test_nothing_is_done_for_a_replica_that_is_gone(
    offices: Offices, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b, c = offices
    asking = asyncio.create_task(a.ask("x"))
    await b.until((b"hi", None))
    await a.end()
    await b.bury(a)
    await b.own("x")
    for office in (b, c):
        office.database.census = Census()  # as soon as the others are seen to be gone
    monkeypatch.setattr(module, "SWEEP_SECONDS", 0.0)
    monkeypatch.setattr(module, "ALONE_SECONDS", 0.0)
    await b.until()
    assert b.asked == []
    asking.cancel()
    with suppress(asyncio.CancelledError):
        await asking


async def test_nothing_is_left_of_a_caller_that_went_away(offices: Offices) -> None:
    a, b, _ = offices
    asking = asyncio.create_task(a.ask("x", b"a secret"))
    await a.until((b"a secret", None))
    asking.cancel()
    await a.until()
    await b.own("x")
    assert await a.ask("x", b"next") == b"NEXT"
    assert b.asked == [b"next"]


async def test_without_other_replicas_there_is_no_post(tmp_path: Path) -> None:
    async with Database(f"sqlite:///{tmp_path / 'tasks.db'}") as database:
        mailbox = Mailbox(database, list[str])
        await mailbox.run()
        with pytest.raises(UpstreamUnreachableError):
            await mailbox.forward("x", "echo", b"", repeatable=True)


def kinds(kind: type[ServiceError]) -> Iterator[type[ServiceError]]:
    yield kind
    for derived in kind.__subclasses__():
        yield from kinds(derived)


async def test_every_error_is_the_same_elsewhere() -> None:
    for kind in kinds(ServiceError):
        error = kind("The text.", a=1, b=["two"])
        error.violations = (Violation("field", "is wrong"),)
        if isinstance(error, UpstreamError):
            error.detail = "what OpenCode said"
        loaded = load_error(dump_error(error))
        assert type(loaded) is kind
        assert vars(loaded) == {**vars(error), "headers": error.headers}
        assert str(loaded) == str(error)
    refused = BudgetExhaustedError("Spent.", limit=1.5).with_headers(("Retry-After", "5"))
    assert load_error(dump_error(refused)).headers == (("Retry-After", "5"),)
    missing = UpstreamNotFoundError("No.", detail="x")
    missing.data["detail"] = "for the caller"
    assert load_error(dump_error(missing)).data == {"detail": "for the caller"}
    unknown = dump_error(missing).replace(b"UpstreamNotFoundError", b"LaterError")
    assert type(load_error(unknown)) is UpstreamUnreachableError


async def test_a_message_is_the_same_elsewhere() -> None:
    part = Part("data", data={"n": 2**53, "text": "a\nb", "none": None}, metadata={"x": 1})
    message = Message("m", "user", [part, Part("raw", raw="AAA=")], {"k": []}, ["e"], ["t"])
    routing = Routing(
        "ses_1",
        "sub",
        "wrk_1",
        ModelRef("p", "m"),
        "build",
        "review",
        rights=Rights("ask"),
        output_schema={"type": "object"},
        plan=True,
        new_task=True,
        hops=2,
    )
    prompt = (PromptPart(text="hello\n"), PromptPart(media_type="image/png", data="AAA="))
    command = SendCommand(
        principal=Principal("ann"),
        message=message,
        request=TurnRequest(
            prompt,
            MessageId("msg_1"),
            routing,
            rights=Rights("deny", waits=False),
            delivery="queue",
        ),
        task_id="t",
        context_id="c",
        output_modes=("text/plain",),
        push=PushConfig("https://hooks.test/x", "c", "Bearer", "secret", "token", within="x"),
        budget=Budget(1.5, 10, 2),
        seen_at_sender={TaskId("t"): 3},
    )
    adapter = TypeAdapter(SendCommand)
    loaded = adapter.validate_json(adapter.dump_json(command))
    assert loaded == command
    assert loaded.digest == command.digest
    plain = replace(command, task_id=None, push=None, output_modes=None)
    loaded = adapter.validate_json(adapter.dump_json(plain))
    assert loaded == plain
    assert loaded.digest == plain.digest
    later = adapter.dump_json(command).replace(b'"seen":', b'"later":1,"seen":', 1)
    later = later.replace(b'"turns":2', b'"turns":2,"later":1', 1)
    assert adapter.validate_json(later) == command


async def test_an_opencode_is_given_up_when_nobody_holds_it(offices: Offices) -> None:
    a, _, _ = offices
    fleet, number = fleet_of(a.database, owned=True), TypeAdapter(int)
    member, inside = fleet.first, asyncio.Event()

    async def halve(_: Member, given: int) -> int:
        if given % 2:
            raise MovedError("y")
        inside.set()
        await asyncio.Event().wait()
        raise AssertionError

    async def ask(*_: object, **__: object) -> bytes:
        return b"-1"

    mailbox = Mailbox(a.database, list)
    call = OwnerCall(
        mailbox, "halve", fleet, halve, lambda: number, lambda: number, lambda given: given != 4
    )
    mailbox.forward = ask
    again = asyncio.create_task(call.run(Here(member), 2))
    await inside.wait()
    inside.clear()
    once = asyncio.create_task(call.run(Here(member), 4))
    await inside.wait()
    leaving = asyncio.create_task(call.run(Here(member), 6))
    await asyncio.sleep(0)
    leaving.cancel()
    elsewhere = await call.run(Here(member), 3)

    await member.let_go()

    assert (elsewhere, await again, member.held) == (-1, -1, False)
    with pytest.raises(UpstreamUnreachableError, match="may have been done"):
        await once
    with pytest.raises(asyncio.CancelledError):
        await leaving
    with pytest.raises(MovedError):
        async with member.hold():
            raise AssertionError
    assert await call.run(Here(member), 2) == -1  # it was placed before that
    assert fleet.where("x") == There("x")


@pytest.mark.parametrize("begun", [True, False])
async def test_a_call_that_nobody_runs_although_it_belongs_here_is_given_up(
    begun: bool, offices: Offices, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, _, _ = offices
    fleet, number, runs = fleet_of(a.database, owned=True), TypeAdapter(int), list[int]()

    async def find_nothing(member: Member, given: int) -> int:
        runs.append(given)
        raise MovedError(member.name, begun=begun)

    monkeypatch.setattr(module, "RETURN_SECONDS", 0.1)
    monkeypatch.setattr(module, "PATIENCE_SECONDS", 0.3)
    mailbox = Mailbox(a.database, list)
    call = OwnerCall(mailbox, "find", fleet, find_nothing, lambda: number, lambda: number)
    with pytest.raises(UpstreamUnreachableError) as raised:
        async with asyncio.timeout(60):
            await call.run(Here(fleet.first), 1)

    assert type(raised.value) is (MaybeRunError if begun else NotRunError)
    assert 1 < len(runs) < 6


async def test_the_cancel_of_a_task_that_its_owner_does_not_run_is_refused(
    offices: Offices, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, _, _ = offices
    fleet, webhooks = fleet_of(a.database, owned=True), Webhooks(a.database, PushSettings())
    await a.own("x")
    tasks = TaskService(a.database, LogWriter(a.database), fleet, LimitSettings(), webhooks)
    state = TaskState(TaskRef(TaskId("t"), ContextId("c"), Principal("ann"), None, now_ms()))
    accepted = dump_entries([state.apply(Accepted(Message("m", "user", [])), now_ms())])
    status = orjson.dumps(state.status)
    row = TaskRow("t", "ann", "c", state.status.state, 0, 0, status, upstream="x")

    def store(connection: Connection) -> None:
        no = task_rows.add_task(connection, row)
        task_rows.append(connection, [Segment(no, 1, 1, accepted)], [])

    await a.database.write(store)
    monkeypatch.setattr(module, "PATIENCE_SECONDS", 0.1)
    monkeypatch.setattr(service_module, "PATIENCE_SECONDS", 0.1)

    with pytest.raises(NotRunError):
        async with asyncio.timeout(10):
            await tasks.cancel(Principal("ann"), "t")


async def test_calls_are_declared_once_and_before_the_mailbox_runs(offices: Offices) -> None:
    a, b, _ = offices
    idle = Mailbox(a.database, list)
    idle.register("kind", a.handle)

    with pytest.raises(RuntimeError, match="call kind is declared twice"):
        idle.register("kind", b.handle)
    with pytest.raises(RuntimeError, match="call late is declared after the mailbox began to run"):
        a.mailbox.register("late", a.handle)

    assert idle.handlers == {"kind": a.handle}


async def test_a_method_that_the_owner_does_not_offer_is_refused_as_there(offices: Offices) -> None:
    a, b, _ = offices
    await b.own("x")

    async def fetch(*_: object) -> Any:
        raise AssertionError

    tasks = TaskService.__new__(TaskService)
    tasks.mailbox = Mailbox(b.database, lambda: b.mine)
    deps = Deps(
        fleet_of(b.database, owned=True),
        WorkspaceRoot.__new__(WorkspaceRoot),
        tasks,
        Webhooks.__new__(Webhooks),
        fetch,
    )
    Dispatcher(EXTENSIONS, deps, load({}, {"A2A_ENABLE_SESSION_SHELL": "true"}))
    b.mailbox.handlers |= tasks.mailbox.handlers
    full = asdict(Caller(Principal("ann")))
    who: dict[str, Any] = {
        **full,
        "capabilities": [],
        "rights": {**full["rights"], "later": 1},
        "budget": {**full["budget"], "later": 1},
        "later": 1,
    }

    async def refused(method: str) -> ServiceError:
        asked: dict[str, Any] = {
            "method": method,
            "params": {},
            "version": "1.0",
            "caller": who,
            "only": None,
        }
        with pytest.raises(ServiceError) as raised:
            await a.mailbox.forward("x", "method", orjson.dumps(asked), repeatable=True)
        return raised.value

    off, unknown = await refused("opencode.workspaces.remove"), await refused("opencode.later")
    known = await refused("opencode.sessions.shell")

    assert (type(off), type(unknown)) == (MethodNotFoundError, MethodNotFoundError)
    assert off.data["toggle"] == "A2A_ENABLE_WORKSPACE_MUTATIONS"
    assert off.data["disabled"] == "disabled_by_configuration"
    assert unknown.data == {"method": "opencode.later", "protocol_version": "1.0"}
    assert isinstance(known, AuthorizationForbiddenError)  # whatever a later version adds


async def test_a_method_that_changes_something_is_run_by_the_owner(offices: Offices) -> None:
    a, b, _ = offices
    await b.own("x")

    async def create(_: str, __: bytes) -> bytes:
        return orjson.dumps({"created": "by its owner"})

    async def fetch(*_: object) -> Any:
        raise AssertionError

    b.mailbox.handlers["method"] = create
    tasks = TaskService.__new__(TaskService)
    tasks.mailbox = Mailbox(a.database, list)
    deps = Deps(
        fleet_of(a.database, owned=False),
        WorkspaceRoot(None, allow_override=False),
        tasks,
        Webhooks.__new__(Webhooks),
        fetch,
    )
    settings = load({}, {"A2A_ENABLE_WORKSPACE_MUTATIONS": "true"})
    methods = Dispatcher(EXTENSIONS, deps, settings)
    running = asyncio.create_task(tasks.mailbox.run())

    caller = Caller(Principal("ann"), capabilities=frozenset({"workspace_mutation"}))
    async with asyncio.timeout(60):
        created = await methods.call(caller, "opencode.worktrees.create", {}, Version.V1)

    running.cancel()
    await asyncio.wait([running])
    assert created == {"created": "by its owner"}
