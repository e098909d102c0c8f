"""The floor: the least code that answers A2A 1.0 from OpenCode's events.

Plain ASGI on uvicorn with uvloop and httptools, one upstream subscription, no storage, no
authentication, no validation, text only. What any other server spends above this is the price of
what it does more. ``python -m bench.relay PORT UPSTREAM_PORT``.
"""

import asyncio
import json
import sys
import uuid
from collections.abc import Awaitable, Callable
from typing import Any

import uvicorn

from bench.feed import END, Feed

Send = Callable[[dict[str, Any]], Awaitable[None]]
Receive = Callable[[], Awaitable[dict[str, Any]]]

CARD = json.dumps(
    {
        "name": "relay",
        "description": "The floor of the benchmark",
        "version": "1",
        "supportedInterfaces": [
            {"url": "http://127.0.0.1", "protocolBinding": "JSONRPC", "protocolVersion": "1.0"}
        ],
        "capabilities": {"streaming": True},
        "defaultInputModes": ["text/plain"],
        "defaultOutputModes": ["text/plain"],
        "skills": [],
    }
).encode()


class Relay:
    def __init__(self, feed: Feed) -> None:
        self.feed = feed

    async def __call__(self, scope: dict[str, Any], receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self.lifespan(receive, send)
        elif scope["method"] == "GET":
            await answer(send, CARD)
        else:
            await self.message(scope["path"], json.loads(await read(receive)), send)

    async def lifespan(self, receive: Receive, send: Send) -> None:
        await receive()
        await self.feed.start()
        await send({"type": "lifespan.startup.complete"})
        await receive()
        await self.feed.stop()
        await send({"type": "lifespan.shutdown.complete"})

    async def message(self, path: str, asked: dict[str, Any], send: Send) -> None:
        rpc = path == "/"
        streams = path == "/message:stream" or asked.get("method") == "SendStreamingMessage"
        prompt = (asked["params"] if rpc else asked)["message"]["parts"][0]["text"]
        head, tail = (b'{"jsonrpc":"2.0","id":1,"result":', b"}") if rpc else (b"", b"")
        task, context = (str(uuid.uuid4()).encode() for _ in range(2))
        deltas: asyncio.Queue[bytes] = asyncio.Queue()
        session = await self.feed.run(prompt, deltas.put_nowait)
        try:
            if streams:
                await self.stream(send, deltas, b"data: " + head, tail + b"\n\n", task, context)
            else:
                text = b""
                while (delta := await deltas.get()) is not END:
                    text += delta
                await answer(send, head + b'{"task":' + finished(task, context, text) + b"}" + tail)
        finally:
            del self.feed.readers[session]

    async def stream(
        self, send: Send, deltas: asyncio.Queue[bytes], head: bytes, tail: bytes, *ids: bytes
    ) -> None:
        await send(start(b"text/event-stream"))
        state = b'"id":"%b","contextId":"%b","status":{"state":"TASK_STATE_WORKING"}}}' % ids
        await send(body(head + b'{"task":{' + state + tail, more=True))
        around = b'{"artifactUpdate":{"taskId":"%b","contextId":"%b",' % ids
        around += b'"artifact":{"artifactId":"text","parts":[{"text":"'
        close = b'"}]},"append":true}}' + tail
        while True:
            # What has piled up goes out in one write, as with any stream under load.
            batch = [await deltas.get()]
            while not deltas.empty():
                batch.append(deltas.get_nowait())
            frames = [head + around + delta + close for delta in batch if delta is not END]
            if batch[-1] is END:
                done = b'{"statusUpdate":{"taskId":"%b","contextId":"%b",' % ids
                done += b'"status":{"state":"TASK_STATE_COMPLETED"}}}'
                await send(body(b"".join(frames) + head + done + tail, more=False))
                return
            await send(body(b"".join(frames), more=True))


def finished(task: bytes, context: bytes, text: bytes) -> bytes:
    return (
        b'{"id":"%b","contextId":"%b","status":{"state":"TASK_STATE_COMPLETED"},'
        b'"artifacts":[{"artifactId":"text","parts":[{"text":"%b"}]}]}' % (task, context, text)
    )


def start(kind: bytes) -> dict[str, Any]:
    return {
        "type": "http.response.start",
        "status": 200,
        "headers": [(b"content-type", kind)],
    }


def body(data: bytes, *, more: bool) -> dict[str, Any]:
    return {"type": "http.response.body", "body": data, "more_body": more}


async def answer(send: Send, data: bytes) -> None:
    head = start(b"application/json")
    head["headers"].append((b"content-length", b"%d" % len(data)))
    await send(head)
    await send(body(data, more=False))


async def read(receive: Receive) -> bytes:
    data = b""
    while True:
        message = await receive()
        data += message["body"]
        if not message["more_body"]:
            return data


if __name__ == "__main__":
    port, upstream = map(int, sys.argv[1:])
    uvicorn.run(
        Relay(Feed(upstream)),  # pyright: ignore[reportArgumentType]  plain ASGI, looser types
        port=port,
        loop="uvloop",
        http="httptools",
        log_level="warning",
    )
