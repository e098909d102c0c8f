"""One connection for all turns: each gets its own session tree, and a gap for what it missed."""

import asyncio
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager, closing

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from structlog.testing import capture_logs

from opencode_a2a.errors import UpstreamUnreachableError
from opencode_a2a.ids import SessionId
from opencode_a2a.opencode import feed as feed_module
from opencode_a2a.opencode import heard as heard_module
from opencode_a2a.opencode.events import Decoder1, HeardText, PartDelta, decode
from opencode_a2a.opencode.feed import (
    MAX_FRAME,
    Feed,
    FeedItem,
    Frames,
    FrameTooLargeError,
    Gap,
    Subscription,
)
from opencode_a2a.opencode.heard import HeardTexts
from tests.support.opencode_state import frames, recording

CONNECTED = b'data: {"payload":{"id":"evt_0","type":"server.connected","properties":{}}}\n\n'
HEARTBEAT = b'data: {"payload":{"type":"server.heartbeat","properties":{}}}\n\n'
ROOT = SessionId("ses_root")
CHILD = SessionId("ses_child")


def sse(kind: str, session: str, event_id: str = "evt_1", **properties: object) -> bytes:
    payload = {"id": event_id, "type": kind, "properties": {"sessionID": session, **properties}}
    return b"data: " + orjson.dumps({"directory": "/workspace", "payload": payload}) + b"\n\n"


def delta(session: str, text: str, event_id: str = "evt_1") -> bytes:
    return sse(
        "message.part.delta",
        session,
        event_id,
        messageID="msg_1",
        partID="prt_1",
        field="text",
        delta=text,
    )


def created(session: str, parent: str) -> bytes:
    info = {
        "id": session,
        "title": "sub",
        "directory": "/workspace",
        "projectID": "p",
        "version": "1",
        "time": {"created": 1, "updated": 1},
        "parentID": parent,
    }
    return sse("session.created", session, info=info)


class Stream:
    """OpenCode's end of the event stream: says what it is told to, and can be cut."""

    def __init__(self) -> None:
        self.opened = 0
        self.refuse = 0
        self._chunks: asyncio.Queue[bytes | None] = asyncio.Queue()

    def say(self, *chunks: bytes) -> None:
        for chunk in chunks:
            self._chunks.put_nowait(chunk)

    def cut(self) -> None:
        self._chunks.put_nowait(None)

    async def __call__(self, sink: Callable[[bytes], object]) -> None:
        self.opened += 1
        if self.opened <= self.refuse:
            raise UpstreamUnreachableError
        while (chunk := await self._chunks.get()) is not None:
            sink(chunk)


@asynccontextmanager
async def running(feed: Feed) -> AsyncGenerator[Feed]:
    async with asyncio.timeout(60), asyncio.TaskGroup() as group:
        task = group.create_task(feed.run())
        yield feed
        task.cancel()


class SlowStream(Stream):
    """An OpenCode that gets little time: it greets each connection late."""

    async def __call__(self, sink: Callable[[bytes], object]) -> None:
        await asyncio.sleep(0.3)
        self.say(CONNECTED)
        await super().__call__(sink)


def quick(stream: Stream, *, silence: float = 5, inbox: int = 100) -> Feed:
    return Feed(stream, Decoder1, silence=silence, first_delay=0.001, last_delay=0.002, inbox=inbox)


def part(text: str, *, end: int | None = None) -> bytes:
    shown = {"id": "prt_1", "messageID": "msg_1", "sessionID": ROOT, "type": "text", "text": text}
    times = {"start": 1} | ({"end": end} if end else {})
    return sse("message.part.updated", ROOT, part={**shown, "time": times})


async def until(subscription: Subscription, text: str) -> list[FeedItem]:
    """Collect items up to the delta with this text."""
    items: list[FeedItem] = []
    while not any(isinstance(item, PartDelta) and item.delta == text for item in items):
        items += await subscription.batch()
    return items


def texts(items: list[FeedItem]) -> list[str]:
    return [item.delta for item in items if isinstance(item, PartDelta)]


@given(st.binary(min_size=1), st.integers(1, 40), st.integers(1, 80))
@settings(max_examples=100)
def test_frames_do_not_depend_on_where_the_stream_is_cut(
    noise: bytes, size: int, large: int
) -> None:
    line = b"data: " + noise.replace(b"\n", b"").replace(b"\r", b"").lstrip() + b"x"
    stream = b": comment\n\nevent: x\r\n" + line + b"\r\n\r\n" + CONNECTED + line + b"\ndata:y\n\n"
    cutter = Frames(large)

    pieces = (stream[at : at + size] for at in range(0, len(stream), size))
    data = [frame for piece in pieces for frame in cutter.split(piece)]

    assert data == [line[6:], CONNECTED[6:-2], line[6:] + b"\ny"]


def test_a_large_event_takes_time_in_proportion_to_its_size() -> None:
    def seconds(size: int) -> float:
        piece, cutter = b"x" * 65536, Frames()
        began = time.thread_time()
        assert not list(cutter.split(b"data: "))
        for _ in range(size // len(piece)):
            assert not list(cutter.split(piece))
        (data,) = cutter.split(b"\n\n")
        assert len(data) == size // len(piece) * len(piece)
        return time.thread_time() - began

    # Four times the size takes four times as long, and sixteen times if all of it is copied. A busy
    # machine may be slow to provide the memory.
    sizes = (8 * 2**20, 32 * 2**20)
    pairs = [[min(seconds(size) for _ in range(5)) for size in sizes] for _ in range(3)]
    assert min(large / small for small, large in pairs) < 13


def test_an_event_without_end_is_given_up() -> None:
    cutter = Frames()
    assert not list(cutter.split(b"x" * MAX_FRAME))

    with pytest.raises(FrameTooLargeError):
        list(cutter.split(b"x"))


async def test_a_turn_gets_the_events_of_its_session_and_no_others() -> None:
    stream = Stream()
    async with running(quick(stream)) as feed:
        mine, other = feed.follow(ROOT), feed.follow(SessionId("ses_other"))
        stream.say(CONNECTED, delta(ROOT, "a"), delta("ses_other", "b"), delta(ROOT, "c"))

        assert texts(await until(mine, "c")) == ["a", "c"]
        assert texts(await until(other, "b")) == ["b"]


async def test_sub_agents_of_any_depth_belong_to_the_tree() -> None:
    stream = Stream()
    async with running(quick(stream)) as feed, asyncio.timeout(60):
        turn = feed.follow(ROOT)
        stream.say(CONNECTED, created(CHILD, ROOT), created("ses_grandchild", CHILD))
        stream.say(delta("ses_grandchild", "deep"), delta(CHILD, "near"))

        assert texts(await until(turn, "near")) == ["deep", "near"]
        assert turn.sessions == {ROOT, CHILD, "ses_grandchild"}


async def test_a_sub_agent_that_began_unheard_is_learned_from_the_task_tool() -> None:
    stream = Stream()
    part = {
        "id": "prt_1",
        "sessionID": ROOT,
        "messageID": "msg_1",
        "type": "tool",
        "tool": "task",
        "callID": "c",
        "state": {"status": "running", "input": {}, "metadata": {"sessionId": CHILD}},
    }
    async with running(quick(stream)) as feed:
        turn = feed.follow(ROOT)
        stream.say(CONNECTED, sse("message.part.updated", ROOT, part=part), delta(CHILD, "heard"))

        assert texts(await until(turn, "heard")) == ["heard"]


async def test_a_known_child_can_be_adopted() -> None:
    stream = Stream()
    async with running(quick(stream)) as feed:
        turn = feed.follow(ROOT)
        turn.follow_child(CHILD)
        stream.say(CONNECTED, delta(CHILD, "x"))

        assert texts(await until(turn, "x")) == ["x"]


async def test_many_events_are_one_batch() -> None:
    stream = Stream()
    async with running(quick(stream)) as feed:
        turn = feed.follow(ROOT)
        stream.say(CONNECTED + b"".join(delta(ROOT, str(number)) for number in range(50)))

        assert texts(await turn.batch()) == [str(number) for number in range(50)]


async def test_growing_text_is_handed_over_without_waking_who_waits() -> None:
    stream, heard = Stream(), list[str]()
    async with running(quick(stream)) as feed:
        await feed_connected(feed, stream)
        turn = feed.follow(ROOT)
        waiting = asyncio.create_task(turn.batch(lambda told: heard.extend(texts([*told]))))
        await asyncio.sleep(0)
        stream.say(delta(ROOT, "a"), delta(ROOT, "b"))
        stream.say(delta(ROOT, "c") + sse("session.idle", ROOT) + delta(ROOT, "d"))
        items = await waiting

        assert (heard, texts(items), len(items)) == (["a", "b", "c"], ["d"], 2)


async def test_a_follower_that_fails_fails_alone() -> None:
    def fail(_: list[PartDelta]) -> None:
        raise LookupError

    stream = Stream()
    async with running(quick(stream)) as feed:
        await feed_connected(feed, stream)
        broken, other = feed.follow(ROOT), feed.follow(ROOT)
        waiting = asyncio.create_task(broken.batch(fail))
        await asyncio.sleep(0)
        stream.say(delta(ROOT, "a"))

        assert texts(await until(other, "a")) == ["a"]
        with pytest.raises(LookupError):
            await waiting


async def test_a_lost_connection_is_a_gap_and_so_is_its_return() -> None:
    stream = Stream()
    stream.refuse = 3
    async with running(quick(stream)) as feed:
        await feed_connected(feed, stream)
        turn = feed.follow(ROOT)
        stream.say(delta(ROOT, "a"))
        await until(turn, "a")

        stream.cut()
        stream.say(CONNECTED, delta(ROOT, "b"))
        items = await until(turn, "b")

        assert items[:-1] == [Gap("closed", connected=False), Gap("connected")]
        assert (feed.connections, stream.opened) == (2, 5)


async def feed_connected(feed: Feed, stream: Stream) -> None:
    stream.say(CONNECTED)
    await feed.up.wait()


async def test_silence_is_a_lost_connection_and_a_heartbeat_is_none() -> None:
    stream = Stream()
    async with running(quick(stream, silence=0.05)) as feed:
        await feed_connected(feed, stream)
        turn = feed.follow(ROOT)
        stream.say(HEARTBEAT)

        assert await turn.batch() == [Gap("silence", connected=False)]


async def test_a_disposed_instance_is_a_gap() -> None:
    stream = Stream()
    async with running(quick(stream)) as feed:
        await feed_connected(feed, stream)
        turn = feed.follow(ROOT)
        stream.say(HEARTBEAT.replace(b"heartbeat", b"instance.disposed"))

        assert await turn.batch() == [Gap("disposed")]


async def test_a_slow_reader_gets_a_gap_and_blocks_nobody() -> None:
    stream = Stream()
    async with running(quick(stream, inbox=10)) as feed:
        await feed_connected(feed, stream)
        slow, other = feed.follow(ROOT), feed.follow(SessionId("ses_other"))
        stream.say(*(delta(ROOT, str(number)) for number in range(12)), delta("ses_other", "end"))

        await until(other, "end")
        items = await slow.batch()

        assert items[0] == Gap("overflow")
        assert texts(items) == ["11"]


async def test_a_malformed_event_is_a_gap_for_its_session_only() -> None:
    stream = Stream()
    async with running(quick(stream)) as feed:
        await feed_connected(feed, stream)
        mine, other = feed.follow(ROOT), feed.follow(SessionId("ses_other"))
        stream.say(sse("session.status", ROOT, status=5), delta(ROOT, "on"))
        stream.say(delta("ses_other", "on"))

        assert (await until(mine, "on"))[0] == Gap("malformed")
        assert len(await until(other, "on")) == 1


async def test_malformed_events_are_said_once_and_the_store_is_not_read_for_each(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(feed_module, "UNREAD_SECONDS", 0.1)
    stream = Stream()
    nameless = sse("message.part.delta", ROOT, messageID="msg_1", partID="prt_1", field="text")
    async with running(quick(stream)) as feed:
        await feed_connected(feed, stream)
        turn = feed.follow(ROOT)
        with capture_logs() as records:
            for connection in range(2):
                began = asyncio.get_running_loop().time()
                for _ in range(50):
                    stream.say(nameless)
                    await asyncio.sleep(0)

                [gap] = await turn.batch()

                assert gap == Gap("malformed")
                assert asyncio.get_running_loop().time() - began >= 0.09
                if connection == 0:
                    stream.cut()
                    stream.say(CONNECTED)
                    while (await turn.batch())[-1] != Gap("connected"):
                        pass

    said = [one for one in records if one["event"] == "feed sent an event that could not be read"]
    assert [(one["type"], one["error"]) for one in said] == [
        ("message.part.delta", "KeyError: 'delta'")
    ] * 2


async def test_a_closed_subscription_hears_nothing_more() -> None:
    stream = Stream()
    async with running(quick(stream)) as feed:
        await feed_connected(feed, stream)
        with closing(feed.follow(ROOT)) as turn:
            turn.follow_child(CHILD)
        other = feed.follow(CHILD)
        stream.say(delta(ROOT, "a"), delta(CHILD, "b"))

        assert texts(await until(other, "b")) == ["b"]
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0):
                await turn.batch()


async def test_a_recording_of_the_global_stream_reaches_its_turn_once() -> None:
    stored = recording("plain-text-global")
    stream = Stream()
    async with running(quick(stream)) as feed:
        turn = feed.follow(stored.root)
        stream.say(b"".join(b"data: " + data + b"\n\n" for data in frames(stored.name)))

        items = await turn.batch()

        assert [item for item in items if not isinstance(item, Gap)] == list(stored.events)


async def test_an_opencode_that_is_slow_to_greet_is_given_more_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(feed_module, "FIRST_SECONDS", 0.05)
    stream = SlowStream()

    async with running(quick(stream)) as feed:
        await feed.up.wait()

    assert stream.opened == 1


def heard(feed: Feed) -> list[tuple[dict[str, str], bool]]:
    """Return what a turn that is resumed is told first: pieces, and whether they are all."""
    with closing(feed.follow(ROOT, recovered=True)) as subscription:
        items = [*subscription._text, *subscription._inbox]  # noqa: SLF001 # pyright: ignore[reportPrivateUsage] # without waiting
    texts = [item for item in items if isinstance(item, HeardText)]
    assert len(texts) == len(items)
    return [(dict(text.pieces), text.start is not None) for text in texts]


BEGINNING = [CONNECTED, part(""), delta(ROOT, "a", "evt_2"), delta(ROOT, "b", "evt_3")]


BOTH = {"evt_2": "a", "evt_3": "b"}
KEPT: list[tuple[list[bytes], list[tuple[dict[str, str], bool]]]] = [
    (BEGINNING, [(BOTH, True)]),
    ([CONNECTED, *BEGINNING[2:]], [(BOTH, False)]),
    ([*BEGINNING, part(""), *BEGINNING[2:]], [(BOTH, True)]),
    ([CONNECTED, *BEGINNING[2:], part("")], [(BOTH, False)]),
    ([CONNECTED, part(""), delta(ROOT, "a", "")], [({}, True)]),
    ([*BEGINNING, part("ab", end=2)], []),
    ([*BEGINNING, sse("session.idle", ROOT)], []),
    ([*BEGINNING, sse("message.part.updated", ROOT, part={"type": "text"})], []),
    ([*BEGINNING, CONNECTED, delta(ROOT, "c", "evt_4")], [({"evt_4": "c"}, False)]),
]


@pytest.mark.parametrize(("said", "kept"), KEPT)
async def test_text_that_is_being_written_is_kept_for_a_turn_that_is_resumed(
    said: list[bytes], kept: list[tuple[dict[str, str], bool]]
) -> None:
    stream = Stream()
    feed = Feed(stream, Decoder1, keeps_texts=True)

    async with running(feed):
        other = feed.follow(CHILD)
        stream.say(*said, delta(CHILD, "said"))
        await until(other, "said")

        assert heard(feed) == kept


async def test_of_a_long_text_the_latest_pieces_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heard_module, "MAX_PIECES", 2)
    monkeypatch.setattr(heard_module, "MAX_CHARACTERS", 5)
    texts = HeardTexts()

    def kept(*said: bytes) -> list[HeardText]:
        for one in said:
            event = decode(one.removeprefix(b"data: "))
            assert event is not None
            texts.hear(event)
        return list(texts.of(ROOT))

    (many,) = kept(*BEGINNING[1:], delta(ROOT, "c", "evt_4"))
    (large,) = kept(delta(ROOT, "12345", "evt_5"))

    assert (many.pieces, many.start) == ({"evt_3": "b", "evt_4": "c"}, None)
    assert large.pieces == {"evt_5": "12345"}


def test_a_feed_that_keeps_no_texts_gives_none() -> None:
    assert heard(Feed(Stream(), Decoder1)) == []
