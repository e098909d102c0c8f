"""The time of day: of this machine, or of the database that several processes share."""

import time


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
