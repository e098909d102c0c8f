"""``python -m bench.replicas``: what a client notices of several replicas.

Two replicas share one PostgreSQL and one synthetic OpenCode. Measured are: the time to the first
event of a task that is started on the replica that does not own the OpenCode, against the owner;
and how long it takes until the other replica goes on with all turns when the owner is stopped with
SIGTERM, and when it is killed. The run fails if a target is missed or a stream is not whole. (Text
of a part that was open meanwhile follows when the part ends: OpenCode stores it only then.)
"""

import argparse
import asyncio
import signal
import statistics
import sys
import time

from bench import a2a
from bench.a2a import Answer
from bench.scenarios import warm_up
from bench.script import Script
from bench.systems import SYSTEMS, TOKEN, Running
from bench.wire import BrokenError, Connection

HEADERS = a2a.headers("rpc10", TOKEN)
FIRST_EVENT_MS = 15.0
HAND_OVER_SECONDS = 2.0
TAKE_OVER_SECONDS = 15.0
STEADY_SECONDS = 3.0
"""How long streams run before their owner is stopped."""
TAKEN_UP = "tasks taken up after a restart"
"""What the new owner logs when it follows all turns."""


async def first_event(port: int) -> float:
    """Return the milliseconds from a request to the first event of its stream."""
    connection = await Connection.open(port)
    began, seen = time.monotonic_ns(), list[int]()
    call = a2a.send("rpc10", Script(2, 1).prompt, stream=True)
    await connection.request(*call, HEADERS, sink=lambda data, now: seen.append(now))
    connection.close()
    return (seen[0] - began) / 1e6


async def compare_first_events(system: Running, count: int) -> float:
    """Return by how many milliseconds the other replica's first event is later, at the median."""
    owner, other = list[float](), list[float]()
    for _ in range(count):
        owner.append(await first_event(system.first_port))
        other.append(await first_event(system.port))
    medians = statistics.median(owner), statistics.median(other)
    print(f"first event: {medians[0]:.1f} ms on the owner, {medians[1]:.1f} ms on the other")
    return medians[1] - medians[0]


async def follow(port: int, prompt: str, answer: Answer) -> None:
    """Read a stream to its end; where it breaks off, continue where it was left."""
    connection = await Connection.open(port)
    call, extra = a2a.send("rpc10", prompt, stream=True), b""
    try:
        while not answer.state or answer.state in a2a.OPEN:
            await connection.request(*call, HEADERS + extra, sink=answer.take)
            extra = b"last-event-id: %b\r\n" % connection.last_event_id
            call = a2a.subscribe("rpc10", answer.task)
    except BrokenError as error:
        answer.refused = str(error)
    answer.close(time.monotonic_ns())


async def stop_owner(number: signal.Signals, streams: int, limit: float) -> tuple[float, int]:
    """Return after how many seconds the other replica goes on with all turns of a stopped one.

    The second figure is the number of streams that were not whole in the end.
    """
    script = Script(int((STEADY_SECONDS + limit + 5) * 10), 100)
    with Running(SYSTEMS["other"]) as system:
        await asyncio.to_thread(warm_up, system)
        if system.first is None:
            raise RuntimeError("there is no replica to stop")
        answers = [Answer(script.deltas) for _ in range(streams)]
        following = asyncio.gather(*(follow(system.port, script.prompt, one) for one in answers))
        await asyncio.sleep(STEADY_SECONDS)
        stopped = time.monotonic()
        system.first.send_signal(number)
        while TAKEN_UP not in system.output() and not following.done():  # noqa: ASYNC110  a log file
            await asyncio.sleep(0.02)
        seconds = time.monotonic() - stopped
        await following
    broken = [one.fault for one in answers if one.fault]
    if broken:
        print(*dict.fromkeys(broken), sep="\n")
    return seconds, len(broken)


async def run(count: int, streams: int) -> bool:
    with Running(SYSTEMS["other"]) as system:
        await asyncio.to_thread(warm_up, system)
        added = await compare_first_events(system, count)
    handed, lost = await stop_owner(signal.SIGTERM, streams, HAND_OVER_SECONDS)
    taken, broken = await stop_owner(signal.SIGKILL, streams, TAKE_OVER_SECONDS)
    for text, value, limit in (
        ("first event on another replica, added, ms", added, FIRST_EVENT_MS),
        ("hand-over at SIGTERM, s", handed, HAND_OVER_SECONDS),
        ("take-over after kill -9, s", taken, TAKE_OVER_SECONDS),
        ("streams that were not whole", lost + broken, 0),
    ):
        print(f"{text}: {value:.3g}, at most {limit:g}{'' if value <= limit else '  MISSED'}")
    met = added <= FIRST_EVENT_MS and handed <= HAND_OVER_SECONDS and taken <= TAKE_OVER_SECONDS
    return met and not lost and not broken


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.replicas", description=__doc__)
    parser.add_argument("--count", type=int, default=100, help="tasks started on each replica")
    parser.add_argument("--streams", type=int, default=128, help="read while their owner stops")
    options = parser.parse_args()
    return 0 if asyncio.run(run(options.count, options.streams)) else 1


if __name__ == "__main__":
    sys.exit(main())
