"""What a replica hears of others, when its own clock has run on without it."""

import asyncio
from collections.abc import AsyncGenerator
from types import SimpleNamespace
from typing import Any, Self

import pytest

from opencode_a2a.clock import Lease
from opencode_a2a.store import postgres_listener
from opencode_a2a.store.postgres_listener import Listener

BEAT_SECONDS = 0.01


class LateConnection:
    """Gives the beat after its time is over, as ``wait_for`` of Python 3.11 can do."""

    opened = 0
    again = asyncio.Event()
    beats: list[str]

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        pass

    @classmethod
    async def connect(cls, _: str, *, autocommit: bool) -> Self:
        cls.opened += 1
        if cls.opened > 1:
            cls.again.set()
        return cls()

    async def execute(self, _: object, __: object = ()) -> Self:
        return self

    async def fetchone(self) -> tuple[str]:
        return ("channel",)

    async def notifies(self) -> AsyncGenerator[Any, None]:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            if self.again.is_set():
                raise
            yield SimpleNamespace(payload=self.beats[0])


class Heard:
    census: Any = SimpleNamespace(has_others=True)
    lease = Lease(4 * BEAT_SECONDS)
    replica = 1

    def notify(self, text: str, /, *, alone: bool = False) -> None:
        LateConnection.beats.append(text)

    def dispatch(self, text: str, /) -> None:
        pass


async def test_a_beat_that_comes_when_its_time_is_over_opens_another_connection(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    LateConnection.again, LateConnection.beats = asyncio.Event(), []
    monkeypatch.setattr(postgres_listener, "AsyncConnection", LateConnection)
    listening = asyncio.create_task(Listener("", 60.0, Heard()).run())
    heard = asyncio.create_task(LateConnection.again.wait())
    async with asyncio.timeout(60):
        await asyncio.wait({listening, heard}, return_when=asyncio.FIRST_COMPLETED)

    assert heard.done()
    assert not listening.done()
    listening.cancel()
    await asyncio.wait({listening})
