"""Bounds in space and time: a mapping that forgets, and waits that end."""

import asyncio
from collections import OrderedDict
from collections.abc import Generator
from contextlib import contextmanager, suppress
from typing import TypeVar

K = TypeVar("K")
V = TypeVar("V")


class Recent(OrderedDict[K, V]):
    """The entries that were set most recently; the oldest are forgotten beyond ``most``."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self._most = most

    def __setitem__(self, key: K, value: V) -> None:
        super().__setitem__(key, value)
        self.move_to_end(key)
        if len(self) > self._most:
            self.popitem(last=False)


async def wait(event: asyncio.Event, seconds: float | None) -> bool:
    """Wait until an event is set, at most for some seconds if given; return whether it is set."""
    with suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await event.wait()
    return event.is_set()


class StoppedError(Exception):
    """A wait has ended because what waits is to stop."""


class Stop:
    """Whether the work of one asyncio task is to stop, for good."""

    def __init__(self) -> None:
        self.is_set = False
        self._waiting: asyncio.Task[object] | None = None
        """The task, while it waits for something that may never come."""

    def set(self) -> None:
        if self._waiting is not None and not self.is_set:
            self._waiting.cancel()
        self.is_set = True

    @contextmanager
    def ends_waits(self) -> Generator[None]:
        """Have ``set`` end what is awaited inside, with a StoppedError."""
        if self.is_set:
            raise StoppedError
        task = self._waiting = asyncio.current_task()
        try:
            yield
        except asyncio.CancelledError:
            if not self.is_set or task is None:
                raise  # the task itself is canceled
            task.uncancel()
            raise StoppedError from None
        finally:
            self._waiting = None
