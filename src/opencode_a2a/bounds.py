"""Bounds in space and time: a mapping that forgets, waits that end, and threads that may hang."""

import asyncio
import threading
from collections import OrderedDict
from collections.abc import Callable, Generator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from typing import TypeVar

K = TypeVar("K")
V = TypeVar("V")
T = TypeVar("T")


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


class DaemonThreads:
    """Threads for calls that may hang, at most ``most`` at once; one that hangs counts.

    No pool: its threads are waited for at the end of the process, and whatever else needs a thread
    of the loop's pool would wait for them too.
    """

    def __init__(self, name: str, most: int) -> None:
        self._name = name
        self._room = asyncio.Semaphore(most)

    async def run(self, call: Callable[[], T]) -> T:
        """Return what a call returns in a thread; if that is given up, the thread continues."""
        await self._room.acquire()
        loop, result = asyncio.get_running_loop(), Future[T]()
        result.set_running_or_notify_cancel()  # the thread ends it, and nobody else

        def run() -> None:
            try:
                result.set_result(call())
            except Exception as error:
                result.set_exception(error)
            with suppress(RuntimeError):  # the loop is closed: the service has ended
                loop.call_soon_threadsafe(self._room.release)

        try:
            threading.Thread(target=run, name=self._name, daemon=True).start()
        except RuntimeError:  # there are too many
            self._room.release()
            raise
        return await asyncio.wrap_future(result)
