"""A synthetic OpenCode: replays a recorded turn for any number of sessions at once.

``python -m bench.upstream`` prints its port and serves until it is terminated. Every event goes to
every subscriber, as with the real one; what is stored is the fold of what was told. Each
delta carries its number and the monotonic time at which it was sent (``<seq>:<ns>``), so that a
reader can tell loss, order, doubling and delay from the text alone. A raw protocol over bytes
that were prepared beforehand: it must never be what a benchmark measures.
"""

import asyncio
import itertools
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, cast
from urllib.parse import parse_qs, unquote, urlsplit

import orjson
import uvloop

from bench.script import Fields, Recording, Script, Step

HEARTBEAT_SECONDS = 10.0
CONSTANTS: dict[str, bytes] = {
    "/global/health": b'{"healthy":true,"version":"1.18.33"}',
    "/permission": b"[]",
    "/question": b"[]",
    "/command": b"[]",
    "/config": b'{"model":"fake/fake-1"}',
    "/config/providers": b'{"providers":[],"default":{}}',
    "/provider": b'{"all":[],"default":{},"connected":[]}',
    "/agent": b'[{"name":"build","mode":"primary","native":true,"permission":[],"options":{}}]',
    "/mcp": b"{}",
    "/project": b"[]",
    "/path": b'{"home":"/workspace","state":"/workspace","config":"/workspace",'
    b'"worktree":"/workspace","directory":"/workspace"}',
}
_counter = itertools.count(1)


def new_id(prefix: str) -> bytes:
    """Ids sort by time; those of sessions the other way round, as OpenCode's do."""
    stamp = (time.time_ns() // 1_000_000 * 4096 + next(_counter)) % 2**48
    stamp = 2**48 - 1 - stamp if prefix == "ses" else stamp
    return f"{prefix}_{stamp:012x}BenchBenchBenc".encode()


@dataclass(slots=True)
class Message:
    role: str
    info: bytes = b""
    parts: dict[bytes, bytes] = field(default_factory=dict[bytes, bytes])

    def json(self) -> bytes:
        return b'{"info":%b,"parts":[%b]}' % (self.info, b",".join(self.parts.values()))


@dataclass(slots=True)
class Session:
    id: bytes
    title: bytes
    info: bytes = b""
    busy: bool = False
    messages: dict[bytes, Message] = field(default_factory=dict[bytes, Message])
    turn: "Turn | None" = None

    def apply(self, step: Step, fields: Fields) -> None:
        """Fold one event into the stored state; deltas are not stored, as with the real one."""
        if step.kind == "session":
            self.info = step.fragment % fields
        elif step.kind == "status":
            self.busy = step.status != "idle"
        elif step.kind == "message":
            message = self.messages.setdefault(step.key % fields, Message(step.role))
            message.info = step.fragment % fields
        elif step.kind == "part":
            parts = self.messages[fields[step.role.encode()]].parts
            parts[step.key % fields] = step.fragment % fields


class Broadcast:
    """Sends each event to all subscribers; what arises in one turn of the loop is one write."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self.plain: set[asyncio.WriteTransport] = set()
        self.wide: set[asyncio.WriteTransport] = set()
        self._pending: tuple[list[bytes], list[bytes]] = ([], [])

    def send(self, step: Step, fields: Fields) -> None:
        fields[b"evt"] = new_id("evt")
        self.write(
            step.frame % fields if self.plain else b"", step.wide % fields if self.wide else b""
        )

    def write(self, plain: bytes, wide: bytes) -> None:
        if not self._pending[0]:
            self.loop.call_soon(self._flush)
        self._pending[0].append(plain)
        self._pending[1].append(wide)

    def _flush(self) -> None:
        for frames, readers in zip(self._pending, (self.plain, self.wide), strict=True):
            data = b"".join(frames)
            frames.clear()
            for transport in readers if data else ():
                transport.write(b"%x\r\n%b\r\n" % (len(data), data))


class Turn:
    """One prompt being answered: the head at once, the deltas in their rhythm, then the tail."""

    def __init__(self, session: Session, script: Script, world: "World", fields: Fields) -> None:
        self.session = session
        self.script = script
        self.world = world
        self.fields = fields
        self.sent: list[str] = []
        self.done: list[Callable[[bytes], None]] = []
        self.started = 0.0
        self.timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        self.session.turn = self
        self._tell(self.world.recording.head)
        # The part of a delta that is the same all along the turn is made only once.
        mark = {**self.fields, b"evt": b"\0", b"delta": b"\0"}
        self.plain = (self.world.recording.delta.frame % mark).split(b"\0")
        self.wide = (self.world.recording.delta.wide % mark).split(b"\0")
        self.started = self.world.loop.time()
        self._tick()

    def finish(self) -> None:
        if self.timer is not None:
            self.timer.cancel()
        self.session.turn = None
        self.fields[b"text"] = orjson.dumps("".join(self.sent))
        self._tell(self.world.recording.tail)
        answer = self.session.messages[self.fields[b"assistant"]].json()
        for reply in self.done:
            self.world.loop.call_soon(reply, answer)

    def _tell(self, steps: Iterable[Step]) -> None:
        self.fields[b"now"] = str(time.time_ns() // 1_000_000).encode()
        for step in steps:
            self.session.apply(step, self.fields)
            self.world.broadcast.send(step, self.fields)

    def _tick(self) -> None:
        """Send the deltas that are due: a late timer does not lower the rate."""
        loop, script = self.world.loop, self.script
        due = script.deltas
        if script.interval:
            due = min(due, int((loop.time() - self.started) * 1000 / script.interval))
        while len(self.sent) < due:
            self._delta()
        if len(self.sent) >= script.deltas:
            self.finish()
            return
        after = self.started + (len(self.sent) + 1) * script.interval / 1000
        self.timer = loop.call_at(max(after, loop.time() + 0.001), self._tick)

    def _delta(self) -> None:
        text = f"{len(self.sent)}:{time.monotonic_ns()}"
        text = text.ljust(self.script.size - 1, ".") + " "
        self.sent.append(text)
        event, delta = new_id("evt"), text.encode()
        broadcast = self.world.broadcast
        broadcast.write(
            _around(self.plain, event, delta) if broadcast.plain else b"",
            _around(self.wide, event, delta) if broadcast.wide else b"",
        )


def _around(frame: list[bytes], event: bytes, delta: bytes) -> bytes:
    return b"".join((frame[0], event, frame[1], delta, frame[2]))


class World:
    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self.recording = Recording.load()
        self.broadcast = Broadcast(loop)
        self.sessions: dict[bytes, Session] = {}
        self.unknown: Counter[str] = Counter()
        loop.call_later(HEARTBEAT_SECONDS, self._beat)

    def _beat(self) -> None:
        self.loop.call_later(HEARTBEAT_SECONDS, self._beat)
        self.broadcast.write(*greeting("server.heartbeat"))

    def create(self, body: bytes) -> Session:
        asked: dict[str, Any] = orjson.loads(body or b"{}")
        title = orjson.dumps(asked.get("title") or "plain")
        if "metadata" in asked:  # it belongs to the session and follows its title in every event
            title += b',"metadata":' + orjson.dumps(asked["metadata"])
        session = Session(new_id("ses"), title)
        self.sessions[session.id] = session
        fields = {b"session": session.id, b"title": title, b"now": b"%d" % (time.time() * 1000)}
        session.apply(self.recording.created, fields)
        self.broadcast.send(self.recording.created, fields)
        return session

    def prompt(self, session: Session, body: bytes) -> Turn:
        asked = orjson.loads(body)
        text = " ".join(part.get("text", "") for part in asked["parts"])
        fields = {
            b"session": session.id,
            b"title": session.title,
            b"user": asked["messageID"].encode() if "messageID" in asked else new_id("msg"),
            b"assistant": new_id("msg"),
            b"ask": orjson.dumps(text),
            **{f"part{i}".encode(): new_id("prt") for i in range(4)},
        }
        return Turn(session, Script.parse(text), self, fields)


def greeting(kind: str) -> tuple[bytes, bytes]:
    event = b'{"id":"%b","type":"%b","properties":{}}' % (new_id("evt"), kind.encode())
    return b"data: %b\n\n" % event, b'data: {"payload":%b}\n\n' % event


class Http(asyncio.Protocol):
    """One connection of a client; requests are answered in the order in which they came."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.buffer = b""
        self.transport: asyncio.WriteTransport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.WriteTransport", transport)  # uvloop's is not a subclass

    def connection_lost(self, exc: Exception | None) -> None:
        self.world.broadcast.plain.discard(self.transport)
        self.world.broadcast.wide.discard(self.transport)

    def data_received(self, data: bytes) -> None:
        self.buffer += data
        while (end := self.buffer.find(b"\r\n\r\n")) >= 0:
            head = self.buffer[:end].lower()
            at = head.find(b"content-length:")
            length = int(head[at + 15 :].split(b"\r\n", 1)[0]) if at >= 0 else 0
            if len(self.buffer) < end + 4 + length:
                return
            line = self.buffer[: self.buffer.index(b"\r\n")].decode()
            body = self.buffer[end + 4 : end + 4 + length]
            self.buffer = self.buffer[end + 4 + length :]
            method, target, _ = line.split(" ")
            self.route(method, target, body)

    def route(self, method: str, target: str, body: bytes) -> None:
        url = urlsplit(target)
        match [method, *unquote(url.path).strip("/").split("/")]:
            case ["GET", "event"]:
                self.subscribe(self.world.broadcast.plain, greeting("server.connected")[0])
            case ["GET", "global", "event"]:
                self.subscribe(self.world.broadcast.wide, greeting("server.connected")[1])
            case ["POST", "session"]:
                self.reply(self.world.create(body).info)
            case ["GET", "session"]:
                infos = b",".join(s.info for s in list(self.world.sessions.values())[:-101:-1])
                self.reply(b"[%b]" % infos)
            case ["GET", "session", "status"]:
                busy = [s.id for s in self.world.sessions.values() if s.busy]
                self.reply(b"{%b}" % b",".join(b'"%b":{"type":"busy"}' % i for i in busy))
            case [_, "session", session_id, *rest]:
                self.session(method, session_id, rest, parse_qs(url.query), body)
            case ["GET", "bench", "stats"]:
                self.reply(orjson.dumps({"unknown": self.world.unknown}))
            case _ if url.path in CONSTANTS:
                self.reply(CONSTANTS[url.path])
            case _:
                self.world.unknown[f"{method} {url.path}"] += 1
                self.reply(b"<!doctype html>", kind=b"text/html")

    def session(
        self,
        method: str,
        session_id: str,
        rest: list[str],
        query: dict[str, list[str]],
        body: bytes,
    ) -> None:
        session = self.world.sessions.get(session_id.encode())
        if session is None:
            self.reply(b'{"name":"NotFoundError","data":{"message":"no such session"}}', b"404")
            return
        match [method, *rest]:
            case ["GET" | "PATCH"]:
                self.reply(session.info)
            case ["GET", "message"]:
                self.messages(session, query)
            case ["GET", "message", message_id] if message_id.encode() in session.messages:
                self.reply(session.messages[message_id.encode()].json())
            case ["POST", "message"]:
                turn = self.world.prompt(session, body)
                turn.done.append(self.reply)
                turn.start()
            case ["POST", "prompt_async"]:
                self.world.prompt(session, body).start()
                self.reply(b"", b"204")
            case ["POST", "abort"] | ["DELETE"]:
                if session.turn:
                    session.turn.finish()
                self.reply(b"true")
            case _ if method == "GET" and rest in (["children"], ["diff"], ["todo"]):
                self.reply(b"[]")
            case _:
                self.world.unknown[f"{method} /session/:id/{'/'.join(rest)}"] += 1
                self.reply(b"{}", b"404")

    def messages(self, session: Session, query: dict[str, list[str]]) -> None:
        every = list(session.messages.values())
        end = int(query["before"][0]) if "before" in query else len(every)
        start = max(0, end - (int(query.get("limit", ["0"])[0]) or end))
        extra = b"x-next-cursor: %d\r\n" % start if start else b""
        self.reply(b"[%b]" % b",".join(m.json() for m in every[start:end]), extra=extra)

    def subscribe(self, readers: set[asyncio.WriteTransport], hello: bytes) -> None:
        self.transport.write(
            b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ncache-control: no-cache\r\n"
            b"transfer-encoding: chunked\r\n\r\n%x\r\n%b\r\n" % (len(hello), hello)
        )
        readers.add(self.transport)

    def reply(
        self,
        body: bytes,
        status: bytes = b"200",
        kind: bytes = b"application/json",
        extra: bytes = b"",
    ) -> None:
        if self.transport.is_closing():
            return
        head = b"HTTP/1.1 %b OK\r\ncontent-type: %b\r\n%b" % (status, kind, extra)
        size = b"" if status == b"204" else b"content-length: %d\r\n" % len(body)
        self.transport.write(b"%b%b\r\n%b" % (head, size, body))


async def main() -> None:
    loop = asyncio.get_running_loop()
    world = World(loop)
    server = await loop.create_server(lambda: Http(world), "127.0.0.1", 0, backlog=4096)
    print(server.sockets[0].getsockname()[1], flush=True)
    stop = asyncio.Event()
    loop.add_signal_handler(signal.SIGTERM, stop.set)
    await stop.wait()


if __name__ == "__main__":
    uvloop.run(main())
