"""Our client against agents made with the SDK, in both versions and bindings, and crooked ones."""

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import aclosing, asynccontextmanager
from pathlib import Path

import orjson
import pytest
from starlette.types import Receive, Scope, Send

from opencode_a2a.a2a.types import HOPS_HEADER
from opencode_a2a.config import VARIABLES, ClientSettings
from opencode_a2a.events import JsonObject
from opencode_a2a.log.state import State
from opencode_a2a.messages import Message, Part
from opencode_a2a.net.egress import Egress, OriginCredential
from opencode_a2a.peers.client import MAX_HOPS, Peer, Report
from opencode_a2a.peers.received import (
    AnswerGrew,
    ErrorCode,
    PeerError,
    PeerEvent,
    PeerTask,
    TaskOpened,
    TaskStatusChanged,
)
from opencode_a2a.peers.tool import Pool
from tests.support.certificates import Authority, breaking_tls
from tests.support.peer import ANSWER, Answer, Stranger, card_json, reply, sdk_agent, stranger

LOCAL = Egress(allow_private=True)
QUICK = ClientSettings(timeout_seconds=5, polling_fallback_enabled=True).model_copy(
    update={
        "polling_fallback_initial_interval_seconds": 0.01,
        "polling_fallback_max_interval_seconds": 0.05,
    }
)
WAYS = [(b, v) for b in ("JSONRPC", "HTTP+JSON") for v in ("1.0", "0.3")]
CANARY = "canary-5f1e"

every_way = pytest.mark.parametrize(("binding", "version"), WAYS)


def words(text: str) -> Message:
    return Message(f"m-{text}", "user", [Part("text", text=text)])


@asynccontextmanager
async def peer_at(url: str, credential: OriginCredential | None = None) -> AsyncGenerator[Peer]:
    async with asyncio.timeout(60):
        async with aclosing(await Peer.open(url, LOCAL, credential, QUICK)) as peer:
            yield peer


async def heard(ask: Callable[[Report], Coroutine[None, None, None]]) -> tuple[str, PeerEvent]:
    """Return the answer as it grew, and the last event."""
    told: list[PeerEvent] = []
    await ask(told.append)
    return "".join(e.text for e in told if isinstance(e, AnswerGrew)), told[-1]


@every_way
@pytest.mark.parametrize("stream", [True, False])
async def test_an_answer_comes_whole_by_stream_and_by_polling(
    binding: str, version: str, stream: bool
) -> None:
    async with sdk_agent(binding, version) as agent, peer_at(agent.url) as peer:
        answer = await heard(lambda report: peer.ask(words("say"), report, stream=stream))

    assert answer == (ANSWER, TaskStatusChanged(State.COMPLETED, None))


@every_way
async def test_an_agent_without_streaming_is_polled(binding: str, version: str) -> None:
    async with sdk_agent(binding, version, streaming=False) as agent, peer_at(agent.url) as peer:
        answer = await heard(lambda report: peer.ask(words("say"), report))

    assert answer == (ANSWER, TaskStatusChanged(State.COMPLETED, None))
    assert not any("stream" in path for path in agent.paths())


@every_way
@pytest.mark.parametrize("cleanly", [True, False])
@pytest.mark.parametrize("cuts", [(4,), (3, 1), (4, 2, 1)])
async def test_a_dropped_connection_neither_loses_nor_repeats_text(
    binding: str, version: str, cleanly: bool, cuts: tuple[int, ...]
) -> None:
    async with sdk_agent(binding, version) as agent, peer_at(agent.url) as peer:
        agent.cuts, agent.cut_cleanly = [*cuts], cleanly
        agent.gate.clear()
        answer = await heard(lambda report: peer.ask(words("say"), report))

    assert answer == (ANSWER, TaskStatusChanged(State.COMPLETED, None))


@every_way
async def test_a_question_is_answered_on_its_task_and_nothing_is_told_twice(
    binding: str, version: str
) -> None:
    async with sdk_agent(binding, version) as agent, peer_at(agent.url) as peer:
        task = PeerTask()
        asked = await heard(lambda report: peer.ask(words("ask"), report, task=task))
        same = await heard(
            lambda report: peer.ask(words("red"), report, task_id=task.task_id, task=task)
        )

    assert asked == ("before ", TaskStatusChanged(State.INPUT_REQUIRED, "which one?"))
    assert same == ("got red", TaskStatusChanged(State.COMPLETED, None))
    assert task.answer == "before got red"


@every_way
async def test_a_task_continued_by_a_stranger_to_it_tells_only_news(
    binding: str, version: str
) -> None:
    async with sdk_agent(binding, version) as agent, peer_at(agent.url) as peer:
        task = PeerTask()
        await heard(lambda report: peer.ask(words("ask"), report, task=task))
        answer = await heard(lambda report: peer.ask(words("red"), report, task_id=task.task_id))

    assert answer == ("got red", TaskStatusChanged(State.COMPLETED, None))


@every_way
async def test_a_running_task_can_be_read_followed_and_canceled(binding: str, version: str) -> None:
    async with sdk_agent(binding, version) as agent, peer_at(agent.url) as peer:
        told: asyncio.Queue[PeerEvent] = asyncio.Queue()
        asking = asyncio.create_task(peer.ask(words("hang"), told.put_nowait))
        opened = await told.get()
        assert isinstance(opened, TaskOpened)
        task_id = opened.task_id
        await agent.working.wait()
        assert (await peer.task(task_id)).status.state is not State.COMPLETED
        async with asyncio.TaskGroup() as group:
            following = group.create_task(heard(lambda report: peer.follow(task_id, report)))
            canceled = await peer.cancel(task_id)
        asking.cancel()
        await asyncio.wait({asking})

    assert canceled.status.state is State.CANCELED
    assert following.result() == ("hanging", TaskStatusChanged(State.CANCELED, None))


@every_way
async def test_an_unknown_task_is_an_error_of_the_call(binding: str, version: str) -> None:
    async with sdk_agent(binding, version) as agent, peer_at(agent.url) as peer:
        with pytest.raises(PeerError) as caught:
            await peer.task("no-such-task")

    assert caught.value.code in (ErrorCode.CALL_FAILED, ErrorCode.UNSUPPORTED)


async def test_tasks_are_listed_on_the_line_that_has_a_list() -> None:
    async with sdk_agent("HTTP+JSON") as agent, peer_at(agent.url) as peer:
        await heard(lambda report: peer.ask(words("say"), report))
        listed = await peer.tasks()

    assert [task.status.state for task in listed] == [State.COMPLETED]


async def test_a_line_without_a_list_says_so() -> None:
    async with sdk_agent("JSONRPC", "0.3") as agent, peer_at(agent.url) as peer:
        with pytest.raises(PeerError) as caught:
            await peer.tasks()
    assert caught.value.code is ErrorCode.UNSUPPORTED


async def test_files_arrive_with_name_type_and_content() -> None:
    file = Part("raw", raw="AAEC", media_type="image/png", filename="a.png")
    message = Message("m", "user", [Part("text", text="files"), file])
    for binding, version in WAYS:
        async with sdk_agent(binding, version) as agent, peer_at(agent.url) as peer:
            answer, _ = await heard(lambda report: peer.ask(message, report))
        assert answer == "a.png:image/png:3"


async def test_hops_are_counted_and_a_circle_is_not_entered() -> None:
    async with sdk_agent() as agent, peer_at(agent.url) as peer:
        await heard(lambda report: peer.ask(words("say"), report, hops=1))
        with pytest.raises(PeerError, match="circle"):
            await heard(lambda report: peer.ask(words("say"), report, hops=MAX_HOPS))

    sent = [
        headers.get(HOPS_HEADER.lower()) for _, path, headers in agent.requests if path == "/rpc"
    ]
    assert sent == ["2"]


async def test_the_card_is_found_by_its_own_url_and_from_a_deeper_path() -> None:
    async with sdk_agent() as agent:
        for url in ("/.well-known/agent-card.json", "/rpc", "/"):
            async with peer_at(agent.url + url) as peer:
                assert peer.card.name == "Scripted"


NUMBERED = [
    {"kind": "task", "id": "t", "contextId": "c", "status": {"state": "working"}},
    *(
        {
            "kind": "artifact-update",
            "taskId": "t",
            "contextId": "c",
            "artifact": {"artifactId": "a", "parts": [{"kind": "text", "text": text}]},
            "append": number > 0,
        }
        for number, text in enumerate("12341")
    ),
    {"kind": "status-update", "taskId": "t", "contextId": "c", "status": {"state": "completed"}},
]


async def numbered(made: Stranger, scope: Scope, receive: Receive, send: Send) -> None:
    """A server that numbers its events, goes on after any of them, and sends two at a time."""
    if scope["method"] == "GET":
        await reply(send, card_json(made.url))
        return
    last = made.requests[-1][2].get("last-event-id")
    start = 0 if last is None else int(last) + 1
    frames = [
        b"id: %d\ndata: %s\n\n" % (number, orjson.dumps({"jsonrpc": "2.0", "result": event}))
        for number, event in enumerate(NUMBERED)
    ]
    await reply(send, b"".join(frames[start : start + 2]), kind="text/event-stream")


async def test_a_server_that_numbers_its_events_is_resumed_after_the_last() -> None:
    async with stranger(numbered) as made, peer_at(made.url) as peer:
        answer = await heard(lambda report: peer.ask(words("count"), report))

    assert answer == ("12341", TaskStatusChanged(State.COMPLETED, None))
    assert [headers.get("last-event-id") for _, _, headers in made.requests[1:]] == [
        None, "1", "3", "5",
    ]  # fmt: skip


UNAVAILABLE = {"code": -32603, "message": "x", "data": [{"reason": "TASK_STORE_UNAVAILABLE"}]}


@pytest.mark.parametrize(
    ("status", "body"),
    [(200, {"jsonrpc": "2.0", "error": UNAVAILABLE}), (503, {}), (502, {})],
)
async def test_a_server_that_is_away_for_a_while_is_resumed(status: int, body: JsonObject) -> None:
    async def away(made: Stranger, scope: Scope, receive: Receive, send: Send) -> None:
        if 3 <= len(made.requests) <= 10:  # after the card and the first two events
            await reply(send, orjson.dumps(body), status)
        else:
            await numbered(made, scope, receive, send)

    async with stranger(away) as made, peer_at(made.url) as peer:
        answer = await heard(lambda report: peer.ask(words("count"), report))

    assert answer == ("12341", TaskStatusChanged(State.COMPLETED, None))
    assert len(made.requests) == 4 + 8 + 1


async def test_a_stranger_is_not_asked_again_after_a_connection_lost_before_the_first_event() -> (
    None
):
    async def empty(made: Stranger, scope: Scope, receive: Receive, send: Send) -> None:
        kind = "application/json" if scope["method"] == "GET" else "text/event-stream"
        await reply(send, card_json(made.url) if scope["method"] == "GET" else b"", kind=kind)

    async with stranger(empty) as made, peer_at(made.url) as peer:
        with pytest.raises(PeerError) as caught:
            await heard(lambda report: peer.ask(words("once"), report))

    assert caught.value.code is ErrorCode.RETRYABLE
    assert [method for method, _, _ in made.requests] == ["GET", "POST"]


async def test_a_secret_does_not_follow_the_card_to_another_origin(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.DEBUG)

    async def greedy(made: Stranger, scope: Scope, receive: Receive, send: Send) -> None:
        await reply(send, b"{}", 401)

    async with stranger(greedy) as foreign:

        async def misleading(made: Stranger, scope: Scope, receive: Receive, send: Send) -> None:
            await reply(send, card_json(foreign.url))

        async with stranger(misleading) as made:
            credential = OriginCredential.bearer(made.url, CANARY)
            async with peer_at(made.url, credential) as peer:
                with pytest.raises(PeerError) as caught:
                    await heard(lambda report: peer.ask(words("hello"), report))

    assert made.requests[0][2]["authorization"] == f"Bearer {CANARY}"
    assert foreign.requests
    assert CANARY not in str(foreign.requests)
    assert CANARY not in caplog.text
    assert caught.value.code is ErrorCode.AUTH_FAILED
    assert "belongs to" in caught.value.message
    assert CANARY not in caught.value.message


@pytest.mark.parametrize("rules", [Egress(("allowed.test",), allow_private=True), Egress()])
async def test_an_address_outside_the_rules_is_never_asked_for_a_card(rules: Egress) -> None:
    async with stranger(nameless) as made:
        with pytest.raises(PeerError) as caught:
            await Peer.open(made.url, rules, None, QUICK)

    assert caught.value.code is ErrorCode.INVALID_INPUT
    assert made.requests == []


async def test_the_interface_inside_a_card_is_checked_like_the_cards_own_address() -> None:
    rules = Egress(("127.0.0.1",), allow_private=True)
    async with stranger(nameless) as foreign:
        elsewhere = foreign.url.replace("127.0.0.1", "localhost")

        async def misleading(made: Stranger, scope: Scope, receive: Receive, send: Send) -> None:
            await reply(send, card_json(elsewhere))

        async with stranger(misleading) as made:
            with pytest.raises(PeerError) as caught:
                await Peer.open(made.url, rules, OriginCredential.bearer(made.url, CANARY), QUICK)

    assert caught.value.code is ErrorCode.INVALID_INPUT
    assert foreign.requests == []


async def huge(made: Stranger, scope: Scope, receive: Receive, send: Send) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": []})
    for _ in range(1024):
        await send({"type": "http.response.body", "body": b" " * 1024 * 1024, "more_body": True})


async def deep(made: Stranger, scope: Scope, receive: Receive, send: Send) -> None:
    await reply(send, b'{"name":"x","skills":' + b"[" * 500 + b"]" * 500 + b"}")


async def redirecting(made: Stranger, scope: Scope, receive: Receive, send: Send) -> None:
    await reply(send, b"", 302, headers={"location": "http://127.0.0.1:1/"})


async def compressed(made: Stranger, scope: Scope, receive: Receive, send: Send) -> None:
    await reply(send, b"\x1f\x8b", headers={"content-encoding": "gzip"})


async def a_page(made: Stranger, scope: Scope, receive: Receive, send: Send) -> None:
    await reply(send, b"<html>", kind="text/html")


async def nameless(made: Stranger, scope: Scope, receive: Receive, send: Send) -> None:
    await reply(send, b"{}")


@pytest.mark.parametrize("answer", [huge, deep, redirecting, compressed, a_page, nameless])
async def test_a_hostile_card_is_an_invalid_card(answer: Answer) -> None:
    async with stranger(answer) as made, asyncio.timeout(60):
        with pytest.raises(PeerError) as caught:
            await Peer.open(made.url, LOCAL, OriginCredential.bearer(made.url, CANARY), QUICK)

    assert caught.value.code is ErrorCode.INVALID_CARD
    assert len(made.requests) == 1


async def test_a_card_that_never_comes_is_given_up() -> None:
    async def silent(made: Stranger, scope: Scope, receive: Receive, send: Send) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    async with stranger(silent) as made:
        with pytest.raises(PeerError) as caught:
            await Peer.open(made.url, LOCAL, None, ClientSettings(card_fetch_timeout_seconds=0.05))

    assert caught.value.code is ErrorCode.TIMEOUT


async def test_the_time_limit_is_for_an_answer_and_not_for_the_work_of_a_message() -> None:
    done: JsonObject = {
        "kind": "message",
        "role": "agent",
        "messageId": "m",
        "parts": [{"kind": "text", "text": "done"}],
    }

    async def slow(made: Stranger, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["method"] == "GET":
            await reply(send, card_json(made.url, capabilities={"streaming": False}))
            return
        body = orjson.loads((await receive())["body"])
        await asyncio.sleep(0.5)
        await reply(send, orjson.dumps({"jsonrpc": "2.0", "id": body["id"], "result": done}))

    settings = ClientSettings(timeout_seconds=0.2)
    async with (
        asyncio.timeout(60),
        stranger(slow) as made,
        aclosing(await Peer.open(made.url, LOCAL, None, settings)) as peer,
    ):
        answer, _ = await heard(lambda report: peer.ask(words("hello"), report))
        with pytest.raises(PeerError) as caught:
            await peer.cancel("t-1")

    assert answer == "done"
    assert caught.value.code is ErrorCode.TIMEOUT
    # As the page says.
    page = str(VARIABLES["A2A_CLIENT_TIMEOUT_SECONDS"].info.description)
    assert "without a stream may take as long as the work" in page


async def test_an_endless_event_ends_the_call() -> None:
    async def endless(made: Stranger, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["method"] == "GET":
            await reply(send, card_json(made.url))
            return
        head = [(b"content-type", b"text/event-stream")]
        await send({"type": "http.response.start", "status": 200, "headers": head})
        await send({"type": "http.response.body", "body": b"data: ", "more_body": True})
        for _ in range(64):
            await send({"type": "http.response.body", "body": b"x" * 1024**2, "more_body": True})

    async with stranger(endless) as made, peer_at(made.url) as peer:
        with pytest.raises(PeerError) as caught:
            await heard(lambda report: peer.ask(words("hello"), report))

    assert caught.value.code is ErrorCode.UNEXPECTED


async def test_an_unreachable_agent_is_worth_another_try() -> None:
    async with stranger(nameless) as made:
        gone = made.url
    with pytest.raises(PeerError) as caught:
        await Peer.open(gone, LOCAL, None, QUICK)
    assert caught.value.code is ErrorCode.RETRYABLE


@pytest.mark.parametrize("said", [b"", b"HTTP/1.1 200 OK\r\ncontent-length: 10\r\n\r\n{"])
async def test_an_agent_that_breaks_tls_is_worth_another_try(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, said: bytes
) -> None:
    authority = Authority(tmp_path)
    monkeypatch.setenv("SSL_CERT_FILE", str(authority.file))
    async with breaking_tls(authority, said) as breaking:
        with pytest.raises(PeerError) as caught:
            await Peer.open(breaking, LOCAL, None, QUICK)
    assert caught.value.code is ErrorCode.RETRYABLE


async def test_the_pool_opens_a_peer_once_for_many_at_a_time() -> None:
    async with sdk_agent() as agent, asyncio.timeout(60):
        pool = Pool(LOCAL, QUICK)

        async def borrow() -> Peer:
            async with pool.peer(agent.url) as peer:
                await heard(lambda report: peer.ask(words("say"), report))
                return peer

        peers = await asyncio.gather(*(borrow() for _ in range(5)))
        await pool.aclose()

    assert len(set(map(id, peers))) == 1
    assert sum("well-known" in path for path in agent.paths()) == 1
    assert len(pool) == 0


async def test_the_pool_keeps_credentials_and_urls_apart_and_stays_bounded() -> None:
    async with sdk_agent() as agent, asyncio.timeout(60):
        pool = Pool(LOCAL, QUICK.model_copy(update={"cache_maxsize": 2}))
        for token in ("a", "b", "c"):
            async with pool.peer(agent.url, OriginCredential.bearer(agent.url, token)) as peer:
                assert peer.card.name == "Scripted"
        size = len(pool)
        await pool.aclose()

    assert size == 2
    tokens = [headers["authorization"] for _, _, headers in agent.requests]
    assert tokens == ["Bearer a", "Bearer b", "Bearer c"]


async def test_the_pool_reads_an_expired_card_anew_but_closes_no_peer_in_use() -> None:
    async with sdk_agent() as agent, asyncio.timeout(60):
        pool = Pool(LOCAL, QUICK.model_copy(update={"cache_ttl_seconds": 0}))
        async with pool.peer(agent.url) as first:
            async with pool.peer(agent.url) as second:
                assert second is not first
            answer, _ = await heard(lambda report: first.ask(words("say"), report))
        await pool.aclose()

    assert answer == ANSWER
    assert len(pool) == 0


async def test_the_pool_forgets_a_peer_that_could_not_be_opened() -> None:
    async with stranger(a_page) as made, asyncio.timeout(60):
        pool = Pool(LOCAL, QUICK)
        for _ in range(2):
            with pytest.raises(PeerError):
                async with pool.peer(made.url):
                    pass

    assert len(pool) == 0
    assert len(made.requests) == 2
