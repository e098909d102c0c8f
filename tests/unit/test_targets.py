"""The targets of notices: what becomes of one that is slow, away, or wants no more."""

import asyncio
import socket
import threading
from collections.abc import AsyncGenerator
from contextlib import ExitStack, asynccontextmanager, closing
from dataclasses import replace

import pytest
from cryptography.hazmat.primitives.asymmetric import ec

from opencode_a2a.config import EmailEntry
from opencode_a2a.errors import StoreUnavailableError
from opencode_a2a.net.egress import Egress
from opencode_a2a.notices import targets
from opencode_a2a.notices.targets import EmailTarget, Http, Note
from opencode_a2a.notices.webpush import BrowserTarget, encode, point
from opencode_a2a.push.notification import Away, Failed, Gone, Taken
from opencode_a2a.store import subscriptions
from opencode_a2a.store.database import Database
from opencode_a2a.store.subscriptions import SubscriptionRow
from tests.support.receiver import Receiver, receiving
from tests.support.smtp import mail_server

pytestmark = pytest.mark.asyncio

NOTE = Note("title", "text", "https://agent.test/link", "See", urgent=True, key="key-1")
BRIEF = 0.3


async def test_a_server_that_is_slow_is_there_and_one_that_takes_no_connection_is_away() -> None:
    http = Http(BRIEF)
    with ExitStack() as stack:
        full = stack.enter_context(socket.socket())
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        for _ in range(4):  # until further ones are dropped unanswered
            waiting = stack.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(full.getsockname())
        async with receiving() as slow:
            slow.gate.clear()
            outcomes = [
                await http.post(url, {})
                for url in (slow.url, f"http://127.0.0.1:{full.getsockname()[1]}")
            ]
            slow.gate.set()
    await http.aclose()

    assert outcomes == [Failed("timeout"), Away("timeout")]


@pytest.mark.parametrize("status", [200, 410, 503])
async def test_the_status_of_a_response_counts_although_its_body_does_not_come_in_time(
    status: int,
) -> None:
    """The head comes just before the time is over."""
    http = Http(BRIEF)

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with closing(writer):
            await reader.readuntil(b"\r\n\r\n")
            await asyncio.sleep(BRIEF / 2)
            writer.write(b"HTTP/1.1 %d X\r\ncontent-length: 9\r\n\r\n" % status)
            await reader.read()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with server, asyncio.timeout(30):
        outcome = await http.post(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", b"")
    await http.aclose()

    assert outcome == {200: Taken(), 410: Gone("http_410"), 503: Failed("http_503")}[status]


def email_target(port: int, seconds: float = BRIEF, **login: str) -> EmailTarget:
    entry = {
        "kind": "email",
        "server": "127.0.0.1",
        "port": port,
        "security": "none",
        "sender": "agent@example.org",
        "to": ["me@example.org"],
    }
    return EmailTarget(EmailEntry.model_validate(entry | login), seconds)


async def test_a_mail_server_that_never_ends_a_step_is_given_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(targets, "SMTP_LIMITS", 1)
    given_up, closed = asyncio.Event(), asyncio.Event()

    async def drip(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"220 ready\r\n")
        await reader.readline()
        while not given_up.is_set():  # each line is in time
            writer.write(b"250-more\r\n")
            await asyncio.sleep(BRIEF / 10)
        writer.close()
        await writer.wait_closed()
        closed.set()

    server = await asyncio.start_server(drip, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    async with server, asyncio.timeout(30):
        outcome = await email_target(port).send("", NOTE)
        threads = [one for one in threading.enumerate() if one.name == "smtp"]
        given_up.set()
        await closed.wait()

    assert outcome == Away("timeout")
    assert all(one.daemon for one in threads)  # a process that ends does not wait for it


@pytest.mark.parametrize("parting", ["421 too busy", "250 what else?"])
async def test_a_mail_that_was_taken_is_not_repeated_whatever_is_said_at_parting(
    parting: str,
) -> None:
    async with mail_server() as server:
        server.parting = parting
        outcome = await email_target(server.port).send("", NOTE)

    assert outcome == Taken()
    assert len(server.mails) == 1


async def test_a_mail_that_is_not_confirmed_is_repeated_once_and_the_server_is_there() -> None:
    async with mail_server() as server:
        server.confirms = False
        target = email_target(server.port)
        outcomes = [await target.send("", NOTE), await target.send("", NOTE)]

    assert outcomes == [Failed("timeout"), Taken()]
    assert len(server.mails) == 2


async def test_mails_that_wait_for_a_slow_server_do_not_make_it_one_that_is_away(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(targets, "SMTP_THREADS", 1)
    monkeypatch.setattr(targets, "SMTP_LIMITS", 0.5)
    async with mail_server() as server:
        server.confirms = False
        target = email_target(server.port, seconds=4.0)
        notes = [replace(NOTE, key=f"key-{number}") for number in range(3)]
        outcomes = await asyncio.gather(*(target.send("", note) for note in notes))

    assert set(outcomes) == {Failed("timeout")}


async def test_a_mail_for_which_no_thread_can_begin_takes_the_place_of_no_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(targets, "SMTP_THREADS", 1)
    async with mail_server() as server:
        target = email_target(server.port, seconds=10.0)
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", refuse)
            with pytest.raises(RuntimeError):
                await target.send("", NOTE)
        async with asyncio.timeout(10):
            outcome = await target.send("", NOTE)

    assert outcome == Taken()


async def test_a_password_that_smtp_cannot_carry_is_a_refused_login() -> None:
    async with mail_server() as server:
        target = email_target(server.port, username="agent", password="pässword")  # noqa: S106 - of a test
        outcome = await target.send("", NOTE)

    assert outcome == Failed("login_refused")


@asynccontextmanager
async def browsers(*receivers: Receiver) -> AsyncGenerator[tuple[Database, BrowserTarget]]:
    """A person who has subscribed a browser at each of these push services."""
    async with Database("sqlite://") as database:
        rules = Egress((), allow_private=True)
        target = BrowserTarget(b"secret", "mailto:me@example.org", database, rules, 30.0)
        key = encode(point(ec.generate_private_key(ec.SECP256R1()).public_key()))
        for receiver in receivers:
            row = SubscriptionRow(receiver.url, "me", key, encode(b"0" * 16), 0)
            await database.write(subscriptions.put, row, 20)
        yield database, target
        await target.aclose()


async def test_a_subscription_that_is_refused_ends_no_other_of_the_same_browser() -> None:
    async with browsers() as (database, _):
        row = SubscriptionRow("https://push.example/1", "me", "key", "secret", 0)
        await database.write(subscriptions.put, row, 1)
        await database.write(subscriptions.put, replace(row, endpoint="2", principal="other"), 1)
        taken = await database.write(subscriptions.put, replace(row, principal="other"), 1)
        kept = await database.read(subscriptions.of_principal, "me")
        renewed = await database.write(subscriptions.put, replace(row, public_key="new"), 1)
        found = await database.read(subscriptions.of_principal, "me")

    assert (taken, kept) == (False, [row])
    assert (renewed, found) == (True, [replace(row, public_key="new")])


async def test_a_browser_that_wants_no_more_is_no_reason_to_tell_the_others_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with (
        receiving() as gone,
        receiving() as there,
        browsers(gone, there) as (database, target),
    ):
        gone.answers += [(410, {}), (410, {})]

        async def away(*_: object) -> None:
            raise StoreUnavailableError

        with monkeypatch.context() as patch:
            patch.setattr(database, "write", away)
            first = await target.send("me", NOTE)
        second = await target.send("me", NOTE)
        third = await target.send("me", NOTE)

    assert (first, second, third) == (Taken(),) * 3
    assert (len(there.received), len(gone.received)) == (3, 2)


async def test_a_browser_whose_push_service_hangs_holds_up_no_other() -> None:
    async with receiving() as hangs, receiving() as there, browsers(hangs, there) as (_, target):
        hangs.gate.clear()
        there.asked = hangs.gate.set  # it answers once the other was told
        async with asyncio.timeout(20):
            outcome = await target.send("me", NOTE)

    assert outcome == Taken()
    assert len(hangs.received) == len(there.received) == 1
