"""The lock of a session, which turns and methods hold one after the other."""

import asyncio

import pytest

from opencode_a2a.turns.sessions import TurnLock


async def test_a_lock_that_passes_to_the_next_has_users_at_every_moment() -> None:
    lock = TurnLock()
    await lock.acquire()
    waiting = asyncio.create_task(lock.acquire())
    await asyncio.sleep(0)
    assert lock.users == 2

    lock.release()
    assert (lock.locked(), lock.users) == (False, 1)  # nobody else may take it now

    await waiting
    assert (lock.locked(), lock.users) == (True, 1)
    lock.release()
    assert lock.users == 0


async def test_whoever_gives_up_waiting_for_a_lock_is_no_longer_counted() -> None:
    lock = TurnLock()
    async with lock:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0):
                await lock.acquire()
        assert lock.users == 1
    assert lock.users == 0
