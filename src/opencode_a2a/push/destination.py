"""The hosts that notifications go to, and when one that cannot be reached is tried again."""

import asyncio
import random
from contextlib import AsyncExitStack
from dataclasses import dataclass

from opencode_a2a.bounds import wait
from opencode_a2a.push.notification import Away, Failed, Gone, Held, Receipt, Skipped, Taken

AT_ONCE_PER_RECEIVER = 4
"""Notifications under way for one caller to one host: a receiver that hangs hardly delays other
webhooks of its caller."""


@dataclass(frozen=True, slots=True)
class RetryTimes:
    """How many seconds pass between two attempts."""

    first: float = 5.0
    """After the first failure; each further one waits four times as long."""
    longest: float = 3600.0
    shortest: float = 1.0
    """Even if the receiver asks for less."""

    def after(self, failures: int) -> float:
        """Return how long to wait after so many failures in a row."""
        # A limit to the exponent: after hundreds of failures the power would overflow.
        wait = self.first * 4.0 ** min(failures - 1, 10)
        return min(wait, self.longest) * random.uniform(0.5, 1.0)  # noqa: S311 - no secret


class Destination:
    """A host and port to which webhooks of one caller go.

    While it cannot be reached, one webhook at a time tries, and the others wait for the result: a
    thousand webhooks to a dead receiver cost no more than one.
    """

    def __init__(self, retries: RetryTimes) -> None:
        self.failures = 0
        """How many attempts in a row did not reach the host; above 0 one tries at a time."""
        self.outcome = ""
        """The name of the last such attempt's receipt."""
        self._retries = retries
        self._slots = asyncio.Semaphore(AT_ONCE_PER_RECEIVER)
        self._alone = asyncio.Lock()
        """Held by the webhook that tries."""
        self._tried_at = self._next_at = 0.0
        """When the last attempt ended and when the next begins, by the clock of the event loop."""
        self._sooner = asyncio.Event()
        """Set when ``_next_at`` has changed."""

    @property
    def wait(self) -> float:
        """Seconds until the next attempt."""
        return max(0.0, self._next_at - asyncio.get_running_loop().time())

    async def enter(self, stack: AsyncExitStack) -> bool:
        """Wait until a notification may be sent, and occupy a slot until the stack is closed.

        Return False if the host became unreachable meanwhile.
        """
        while self.failures:
            # First come, first served; a webhook that gives up here makes way for the next.
            async with AsyncExitStack() as slot:
                await slot.enter_async_context(self._alone)
                while self.failures and (seconds := self.wait):
                    self._sooner.clear()
                    await wait(self._sooner, seconds)
                if self.failures:
                    stack.push_async_exit(slot.pop_all())
                    return True
        async with AsyncExitStack() as slot:
            await slot.enter_async_context(self._slots)
            if not self.failures:
                stack.push_async_exit(slot.pop_all())
            return not self.failures

    def note(self, receipt: Receipt, failures: int) -> None:
        """Note what became of an attempt that began after so many failures."""
        match receipt:
            case Skipped() | Held():  # nothing was sent
                return
            case Taken() | Failed() | Gone():
                self.failures = 0
                self._tried_at = asyncio.get_running_loop().time()
            case Away(name):
                self._tried_at = asyncio.get_running_loop().time()
                if self.failures == failures:  # several that were under way count once
                    self.failures += 1
                    self.outcome = name
                    self._next_at = self._tried_at + self._retries.after(self.failures)

    def hurry(self, after: float = 0.0) -> None:
        """Bring the next attempt forward to so many seconds after the last one."""
        self._next_at = min(self._next_at, self._tried_at + after)
        self._sooner.set()
