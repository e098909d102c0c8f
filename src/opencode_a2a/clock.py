"""Time that processes share: the time of day of their database, and the lease of each of them."""

import math
import time
from time import monotonic


def now_ms() -> int:
    """Return milliseconds since the epoch, for times that people and other programs read.

    Decisions about time (deadlines, silence, back-off) use the monotonic clock of the event loop.
    """
    ahead = SHARED_CLOCK.ahead
    return time.time_ns() // 1_000_000 if ahead is None else SHARED_CLOCK.now(ahead)


class SharedClock:
    """The clock of a database that several processes use, so that their times agree.

    Between two readings of the database it advances with the monotonic clock of this machine, whose
    time of day plays no part. One thread calls ``follow``, others call ``now``.
    """

    FOLLOWED_MS = 10_000
    """Milliseconds. A clock that is set back by more is followed at once: standing still until the
    time has passed again would delay everything that is due."""

    def __init__(self) -> None:
        self.ahead: int | None = None
        """Milliseconds from the monotonic clock to the time of day; None if no database is read."""
        self._latest = 0
        """The latest time that was returned."""

    def now(self, ahead: int) -> int:
        """Return the time of day, which a correction does not make go back."""
        now = time.monotonic_ns() // 1_000_000 + ahead
        if now < self._latest < now + self.FOLLOWED_MS:
            return self._latest
        self._latest = now
        return now

    def follow(self, database_ms: int, asked: int) -> None:
        """Adjust to a database's time, which was requested at ``asked`` (monotonic, in ns).

        The database read its clock at some moment between request and answer. As long as our time
        is possible for such a moment it stays, so that slow answers do not make it jump.
        """
        answered = time.monotonic_ns() // 1_000_000
        taken = answered - asked // 1_000_000
        ahead = self.ahead if self.ahead is not None else database_ms - answered
        self.ahead = min(max(ahead, database_ms - answered), database_ms + taken - answered)

    def reset(self) -> None:
        """Use the time of this machine again."""
        self.ahead, self._latest = None, 0


SHARED_CLOCK = SharedClock()

SHORT_SECONDS, SHORT_SHARE = 3.0, 3 / 8
"""The short lease: at least so many seconds, and this share of the whole one."""


class Lease:
    """The time in which no other process can have taken over what this one runs.

    Each commit renews it. A process that is alone on its database holds it for ever.

    A process may promise others to keep to a shorter lease (``promised``): if the lock of its
    connection is free, which PostgreSQL frees at once when a process is killed, they declare it
    gone after that time. So the lock proves nothing that this process relies on: it only keeps
    others from taking it for dead while it is frozen, or slow.
    """

    def __init__(self, seconds: float = math.inf) -> None:
        self.seconds = seconds
        """Seconds without a commit after which other processes may declare this one gone."""
        self.short_seconds = min(seconds, max(SHORT_SECONDS, seconds * SHORT_SHARE))
        """Seconds without a commit after which they may do so if its lock is free."""
        self.promised = False
        """Whether others may go by the short lease; set before they are told, and taken back after
        they were told."""
        self.locked_since: float | None = None
        """Since when one connection has held the lock and was heard; None if there is none."""
        self.commit_seconds = 0.0
        """How long the last commit took, with its transaction."""
        self.cut_off_at = self._short_until = math.inf
        """When the whole lease and the short one end, by the monotonic clock: others may then have
        declared this process gone, with or without knowing of its lock."""
        self._renewed_at = self._steady_since = -math.inf

    @property
    def held(self) -> bool:
        """Whether no other process can have taken over what this one runs.

        While it is False, nothing may be changed in OpenCode, and nothing shown that is not stored:
        the next commit shows whether this process was declared gone.
        """
        return monotonic() < (self._short_until if self.promised else self.cut_off_at)

    @property
    def beat_seconds(self) -> float:
        """How often this process commits something to keep the lease."""
        return min(self.seconds / 4, self.short_seconds / 3)

    @property
    def steady_seconds(self) -> float:
        """For how long the lease has been renewed at least every half of its length."""
        now = monotonic()
        steady = now - self._renewed_at <= self.seconds / 2
        return now - self._steady_since if steady else 0.0

    @property
    def locked_seconds(self) -> float:
        """For how long one connection of this process has held the lock without a break."""
        return 0.0 if self.locked_since is None else monotonic() - self.locked_since

    def renew(self, since: float) -> None:
        """Note that a transaction was committed, which began at that time."""
        if self.steady_seconds == 0.0:
            self._steady_since = monotonic()
        self._renewed_at = monotonic()
        self.commit_seconds = self._renewed_at - since
        # It stops a second early, so that it has stopped when another begins, however their clocks
        # differ.
        self.cut_off_at, self._short_until = (
            since + seconds - min(1.0, seconds / 4)
            for seconds in (self.seconds, self.short_seconds)
        )
