"""The synthetic OpenCode of the benchmark tells and stores what a recorded one does."""

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator
from typing import Any, cast

import httpx2
import pytest

from bench.a2a import Answer
from bench.script import RECORDINGS, Script
from bench.upstream import Http, World

RECORDED_DELTAS = 4


def shape(value: Any) -> Any:
    """Return keys and value types at every depth; event types, roles and states as they are."""
    named = {"type", "role", "finish", "reason", "field"}
    match value:
        case dict():
            items = cast("dict[str, Any]", value)
            return {k: v if k in named else shape(v) for k, v in items.items()}
        case list():
            return [shape(entry) for entry in cast("list[Any]", value)]
        case _:
            return type(value).__name__


def recorded(name: str) -> list[Any]:
    lines = (RECORDINGS / name).read_text().splitlines()
    return [{k: v for k, v in json.loads(line).items() if k != "_t"} for line in lines]


@contextlib.asynccontextmanager
async def upstream() -> AsyncGenerator[httpx2.AsyncClient]:
    loop = asyncio.get_running_loop()
    world = World(loop)
    server = await loop.create_server(lambda: Http(world), "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    async with server, httpx2.AsyncClient(base_url=f"http://127.0.0.1:{port}") as client:
        yield client


async def read(response: httpx2.Response, count: int) -> list[Any]:
    """Return the next events of a stream."""
    events: list[Any] = []
    async for line in response.aiter_lines():
        if line.startswith("data: "):
            events.append(json.loads(line[6:]))
        if len(events) == count:
            break
    return events


async def prompt(client: httpx2.AsyncClient, script: Script, **body: object) -> tuple[str, Any]:
    session: Any = (await client.post("/session", json={"title": "plain"})).json()
    parts = [{"type": "text", "text": script.prompt}]
    path = f"/session/{session['id']}/message"
    answer = await client.post(path, json={"parts": parts, **body})
    return session["id"], answer.json()


@pytest.mark.parametrize(
    ("path", "recording"),
    [("/event", "plain-text.jsonl"), ("/global/event", "plain-text-global.jsonl")],
)
async def test_a_turn_tells_the_recorded_events_in_the_recorded_order(
    path: str, recording: str
) -> None:
    expected = recorded(recording)

    async with asyncio.timeout(60), upstream() as client, client.stream("GET", path) as stream:
        await prompt(client, Script(deltas=RECORDED_DELTAS))
        events = await read(stream, len(expected))

    assert [shape(event) for event in events] == [shape(event) for event in expected]


async def test_what_is_stored_is_what_was_streamed() -> None:
    async with asyncio.timeout(60), upstream() as client, client.stream("GET", "/event") as stream:
        session_id, answer = await prompt(client, Script(deltas=7, interval=1))
        events = await read(stream, len(recorded("plain-text.jsonl")) - RECORDED_DELTAS + 7)
        stored: Any = (await client.get(f"/session/{session_id}/message")).json()

    deltas = [e["properties"]["delta"] for e in events if e["type"] == "message.part.delta"]
    assert [delta.split(":")[0] for delta in deltas] == [str(n) for n in range(7)]
    texts = [part["text"] for part in stored[1]["parts"] if part["type"] == "text"]
    assert texts == ["".join(deltas)]
    assert stored[1] == answer
    assert [message["info"]["role"] for message in stored] == ["user", "assistant"]


async def test_the_message_id_of_the_caller_is_kept() -> None:
    async with asyncio.timeout(60), upstream() as client:
        _, answer = await prompt(client, Script(), messageID="msg_mine")

    assert answer["info"]["parentID"] == "msg_mine"


async def test_a_page_of_messages_names_the_next() -> None:
    async with asyncio.timeout(60), upstream() as client:
        session_id, _ = await prompt(client, Script())
        path = f"/session/{session_id}/message"
        newest = await client.get(path, params={"limit": 1})
        before = newest.headers["x-next-cursor"]
        oldest = await client.get(path, params={"limit": 1, "before": before})

    assert [page.json()[0]["info"]["role"] for page in (newest, oldest)] == ["assistant", "user"]
    assert "x-next-cursor" not in oldest.headers


@pytest.mark.parametrize(
    ("chunks", "fault"),
    [
        (["0:5.. 1:5.. ", "2:5.. "], None),
        (["0:5.. 1:", "5.. 2:5.. "], None),
        (["0:5.. 1:5.. 2:5.."], None),
        (["0:5.. 2:5.. "], "text lost"),
        (["0:5.. 1:5.. "], "text lost"),
        (["0:5.. 1:5.. ", "1:5.. 2:5.. "], "text doubled"),
    ],
)
def test_a_reader_tells_whole_text_from_lost_and_doubled(
    chunks: list[str], fault: str | None
) -> None:
    answer = Answer(deltas=3)

    for chunk in chunks:
        artifact = {"artifactId": "a", "parts": [{"text": chunk}]}
        answer.take(
            json.dumps({"artifactUpdate": {"artifact": artifact, "append": True}}).encode(), 9
        )
    answer.take(b'{"statusUpdate":{"status":{"state":"TASK_STATE_COMPLETED"}}}', 9)
    answer.close(9)

    assert answer.fault == fault


def test_a_script_survives_its_prompt() -> None:
    script = Script(deltas=200, interval=0.5, size=32)

    assert Script.parse(script.prompt) == script
