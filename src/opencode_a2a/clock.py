"""The time of day, for what people and other programs read.

Decisions about time (deadlines, silence, back-off) use the monotonic clock of the event loop.
"""

import time


def now_ms() -> int:
    """Milliseconds since the epoch."""
    return time.time_ns() // 1_000_000
