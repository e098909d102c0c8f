"""The mapping that forgets its oldest entries, and waits that end."""

import asyncio

import pytest

from opencode_a2a.bounds import Recent, Stop, StoppedError


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
