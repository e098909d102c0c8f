"""The mapping that forgets its oldest entries, waits that end, and threads that may hang."""

import asyncio
import subprocess
import sys
import threading
import time

import pytest

from opencode_a2a.bounds import DaemonThreads, Recent, Stop, StoppedError


def test_the_oldest_entries_are_forgotten() -> None:
    recent = Recent[str, int](2)

    recent["a"], recent["b"] = 1, 2
    recent["a"] = 3
    recent.setdefault("c", 4)

    assert list(recent.items()) == [("a", 3), ("c", 4)]


async def test_a_wait_ends_when_what_waits_is_to_stop() -> None:
    stop, waited = Stop(), list[str]()

    async def work() -> None:
        for name in ("first", "later"):
            try:
                with stop.ends_waits():
                    await asyncio.Event().wait()
            except StoppedError:
                waited.append(name)
        await asyncio.sleep(0)  # what is not inside is not ended

    working = asyncio.create_task(work())
    await asyncio.sleep(0)
    stop.set()
    stop.set()
    await working

    assert waited == ["first", "later"]


async def test_a_task_that_is_canceled_while_it_waits_is_not_taken_for_one_that_is_to_stop() -> (
    None
):
    stop = Stop()

    async def work() -> None:
        with stop.ends_waits():
            await asyncio.Event().wait()

    working = asyncio.create_task(work())
    await asyncio.sleep(0)
    working.cancel()

    with pytest.raises(asyncio.CancelledError):
        await working


async def test_a_call_in_a_thread_returns_what_it_returns_and_raises_what_it_raises() -> None:
    threads = DaemonThreads("test", 1)

    assert await threads.run(threading.current_thread) is not threading.current_thread()
    with pytest.raises(ZeroDivisionError):
        await threads.run(lambda: 1 / 0)
    assert await threads.run(lambda: 1) == 1


async def test_calls_that_hang_take_up_their_own_room_alone() -> None:
    threads, hangs = DaemonThreads("test", 2), threading.Event()

    for _ in range(4):
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await threads.run(hangs.wait)
    hung = [one for one in threading.enumerate() if one.name == "test"]
    hangs.set()
    async with asyncio.timeout(30):
        assert await threads.run(lambda: 1) == 1

    assert len(hung) == 2


def test_the_end_of_the_process_does_not_wait_for_a_call_that_hangs() -> None:
    code = """
import asyncio, time
from opencode_a2a.bounds import DaemonThreads

async def main():
    async with asyncio.timeout(0.1):
        await DaemonThreads("test", 1).run(lambda: time.sleep(60))

try:
    asyncio.run(main())
except TimeoutError:
    print("given up")
"""
    begun = time.monotonic()
    program = [sys.executable, "-c", code]
    ended = subprocess.run(program, capture_output=True, text=True, check=True)  # noqa: S603 - our own

    assert ended.stdout == "given up\n"
    assert time.monotonic() - begun < 30
