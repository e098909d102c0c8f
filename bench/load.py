"""The load generator: one process, one job on stdin, one result on stdout, both JSON.

``bench.measure`` starts it. It reads streams over raw sockets, checks every answer, and takes the
delay of each delta from the stamp in its text. It knows nothing about the server but its port.
"""

import asyncio
import contextlib
import itertools
import resource
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass, field, replace
from typing import Literal

import orjson
import uvloop

from bench import a2a
from bench.a2a import Answer, Dialect
from bench.feed import END, Feed
from bench.script import Script
from bench.wire import BrokenError, Connection, Response

CONNECTING = 64
"""Connections that are opened at the same time."""


@dataclass(frozen=True, slots=True)
class Job:
    port: int
    token: str
    operation: Literal["stream", "unary", "get", "readers", "resume", "hold", "direct"]
    dialect: Dialect = "rpc10"
    streams: int = 1
    """Clients at work at the same time."""
    turns: int = 1
    """Turns of each client, one after the other."""
    context_turns: int = 1
    """How many of them share a context."""
    script: Script = field(default_factory=Script)
    seconds: float = 0.0
    """For unary and get: go on for so long, whatever the number of turns."""
    paths: tuple[str, ...] = ()
    """What get asks for, one after the other."""
    timeout: float = 60.0

    @staticmethod
    def parse(data: bytes) -> "Job":
        value = orjson.loads(data)
        value["script"] = Script(**value["script"])
        return Job(**value)


@dataclass(slots=True)
class Result:
    asked: int = 0
    complete: int = 0
    deltas: int = 0
    wall: float = 0.0
    cpu: float = 0.0
    faults: Counter[str] = field(default_factory=Counter[str])
    delays: list[int] = field(default_factory=list[int])

    def add(self, answer: Answer) -> None:
        answer.close(time.monotonic_ns())
        self.deltas += answer.seen
        self.delays += answer.delays
        if answer.fault:
            self.faults[answer.fault] += 1
        else:
            self.complete += 1

    def json(self) -> bytes:
        delays = sorted(self.delays)
        value = asdict(replace(self, faults=Counter(), delays=[]))
        del value["delays"]
        value["faults"] = dict(self.faults)
        for name, share in (("p50", 0.5), ("p99", 0.99), ("max", 1.0)):
            at = min(len(delays) - 1, int(len(delays) * share))
            value[name] = delays[at] / 1e6 if delays else None
        return orjson.dumps(value)


class Client:
    def __init__(self, job: Job) -> None:
        self.job = job
        self.result = Result()
        self.gate = asyncio.Semaphore(CONNECTING)
        self.headers = a2a.headers(job.dialect, job.token)
        self.feed = Feed(job.port)
        self.all_held = asyncio.Event()
        self.started = time.monotonic()
        self.until = self.started + job.seconds

    async def open(self) -> Connection:
        async with self.gate:
            return await Connection.open(self.job.port)

    async def run(self) -> None:
        job, work = self.job, self.workers()
        if job.operation == "direct":
            await self.feed.start()
        tasks = [asyncio.create_task(guard(work(), self.result)) for _ in range(job.streams)]
        _, late = await asyncio.wait(tasks, timeout=job.timeout)
        for task in late:
            task.cancel()
        await asyncio.gather(*late, return_exceptions=True)
        self.result.wall = time.monotonic() - self.started
        usage = resource.getrusage(resource.RUSAGE_SELF)
        self.result.cpu = usage.ru_utime + usage.ru_stime

    def workers(self) -> Callable[[], Awaitable[None]]:
        return {
            "stream": self.stream,
            "unary": self.unary,
            "get": self.get,
            "readers": self.readers,
            "resume": self.resume,
            "hold": self.hold,
            "direct": self.direct,
        }[self.job.operation]

    def turns(self) -> "Turns":
        return Turns(self.job, self.until)

    async def follow(
        self, connection: Connection, call: a2a.Call, answer: Answer, extra: bytes = b""
    ) -> None:
        method, path, body = call
        headers = self.headers + extra
        response = await connection.request(method, path, body, headers, sink=answer.take)
        explain(answer, response)

    async def stream(self) -> None:
        connection = await self.open()
        for turn in self.turns():
            answer = self.begin()
            try:
                call = a2a.send(
                    self.job.dialect, self.job.script.prompt, stream=True, context=turn.context
                )
                await self.follow(connection, call, answer)
            finally:
                turn.context = answer.context or turn.context
                self.result.add(answer)

    async def unary(self) -> None:
        connection = await self.open()
        for turn in self.turns():
            answer = self.begin()
            try:
                method, path, body = a2a.send(
                    self.job.dialect, self.job.script.prompt, stream=False, context=turn.context
                )
                response = await connection.request(method, path, body, self.headers)
                explain(answer, response)
                if not answer.refused:
                    result = a2a.unwrap(response.body)
                    answer.fold(result.get("task", result), time.monotonic_ns())
            except a2a.RefusedError as error:
                answer.refused = str(error)
            finally:
                turn.context = answer.context or turn.context
                self.result.add(answer)

    async def get(self) -> None:
        connection = await self.open()
        for _, path in zip(self.turns(), itertools.cycle(self.job.paths), strict=False):
            self.result.asked += 1
            response = await connection.request("GET", path, b"", self.headers)
            if response.status == 200 and response.body.startswith(b"{"):
                self.result.complete += 1
            else:
                self.result.faults[f"status {response.status}"] += 1

    async def readers(self) -> None:
        """One client asks, all others follow the task from its first event on."""
        asker = self.begin()
        asker.milestone = lambda answer: bool(answer.task)
        connection = await self.open()
        call = a2a.send(self.job.dialect, self.job.script.prompt, stream=True)
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self.follow(connection, call, asker))
                await asker.reached.wait()
                for _ in range(self.job.turns - 1):
                    group.create_task(guard(self.subscriber(asker.task), self.result))
        finally:
            self.result.add(asker)

    async def subscriber(self, task: str) -> None:
        answer = self.begin()
        try:
            call = a2a.subscribe(self.job.dialect, task)
            await self.follow(await self.open(), call, answer)
        finally:
            self.result.add(answer)

    async def resume(self) -> None:
        """Cut the connection in the middle of the answer, and take it up again."""
        answer = self.begin()
        half = self.job.script.deltas // 2
        answer.milestone = lambda answer: answer.seen >= half or bool(answer.refused)
        try:
            connection = await self.open()
            call = a2a.send(self.job.dialect, self.job.script.prompt, stream=True)
            first = asyncio.create_task(self.follow(connection, call, answer))
            await answer.reached.wait()
            connection.close()
            await asyncio.gather(first, return_exceptions=True)
            cursor = connection.last_event_id
            extra = b"last-event-id: %b\r\n" % cursor if cursor else b""
            call = a2a.subscribe(self.job.dialect, answer.task)
            await self.follow(await self.open(), call, answer, extra)
        finally:
            self.result.add(answer)

    async def hold(self) -> None:
        """Open a stream and keep it; it counts once the server has told something on it."""
        answer = self.begin()
        call = a2a.send(self.job.dialect, self.job.script.prompt, stream=True)

        def told(data: bytes, now: int) -> None:
            if not answer.events:
                self.result.complete += 1
                if self.result.complete == self.job.streams:
                    self.all_held.set()
            answer.take(data, now)

        method, path, body = call
        connection = await self.open()
        await connection.request(method, path, body, self.headers, sink=told)

    async def direct(self) -> None:
        """Do without a server between: one subscription to the upstream for all clients."""
        answer = self.begin()
        text = answer.texts.setdefault("text", a2a.Text())
        over = asyncio.Event()

        def told(delta: bytes) -> None:
            now = time.monotonic_ns()
            if delta is END:
                over.set()
            for seq, stamp in text.feed(delta.decode()):
                answer.seen = seq + 1
                answer.delays.append(now - stamp)

        await self.feed.run(self.job.script.prompt, told)
        await over.wait()
        answer.state = a2a.COMPLETED[0]
        self.result.add(answer)

    def begin(self) -> Answer:
        self.result.asked += 1
        return Answer(self.job.script.deltas)


class Turn:
    def __init__(self) -> None:
        self.context: str | None = None


class Turns:
    """The turns of one client: a number of them, or as many as fit into the time."""

    def __init__(self, job: Job, until: float) -> None:
        self.job = job
        self.until = until
        self.count = 0
        self.turn = Turn()

    def __iter__(self) -> "Turns":
        return self

    def __next__(self) -> Turn:
        over = self.count >= self.job.turns
        if self.job.seconds:
            over = time.monotonic() >= self.until
        if over:
            raise StopIteration
        if self.count % self.job.context_turns == 0:
            self.turn = Turn()
        self.count += 1
        return self.turn


def explain(answer: Answer, response: Response) -> None:
    if response.status != 200:
        answer.refused = f"status {response.status} {response.body[:120]!r}"
    elif not answer.events and b'"error"' in response.body:
        answer.refused = response.body[:160].decode()


async def guard(work: Awaitable[None], result: Result) -> None:
    """A client that fails is counted, and does not stop the others."""
    try:
        await work
    except (BrokenError, OSError, ExceptionGroup) as error:
        result.faults[f"{type(error).__name__}: {error}"[:120]] += 1


async def main() -> None:
    job = Job.parse(sys.stdin.buffer.readline())
    client = Client(job)
    if job.operation == "hold":
        await hold(client)
    else:
        await client.run()
    print(client.result.json().decode(), flush=True)


async def hold(client: Client) -> None:
    """Tell when all streams are open, then hold them until stdin is closed."""
    loop = asyncio.get_running_loop()
    work = asyncio.create_task(client.run())
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(client.job.timeout / 2):
            await client.all_held.wait()
    print(client.result.complete, flush=True)
    await loop.run_in_executor(None, sys.stdin.buffer.read)
    work.cancel()


if __name__ == "__main__":
    uvloop.run(main())
