"""Connections of psycopg whose statements end in time, even if the server hangs.

The timeouts of PostgreSQL are those of the server. If that hangs while its kernel acknowledges what
is sent (a frozen process, a stuck disk), libpq waits for an answer for ever. These connections are
given up when a statement takes longer than the server should have allowed.
"""

import time
from collections.abc import Generator
from typing import Any, TypeVar

import psycopg
from psycopg import pq
from psycopg.abc import PQGen
from psycopg.rows import TupleRow

SPARE_SECONDS = 2.0
"""How much longer than the server's own limit the answer of a statement is waited for."""
LIMIT_SECONDS = 10.0 + SPARE_SECONDS
"""How long an answer is waited for while the server's limit is not known."""

T = TypeVar("T")


class SilentServerError(psycopg.OperationalError):
    """The server has not answered a statement; its connection was given up."""


def answered_in_time(
    waiting: PQGen[T], connection: pq.abc.PGconn, seconds: float | None
) -> Generator[Any, Any, T]:
    """Run a generator of psycopg, and give its connection up if it takes longer.

    psycopg resumes such a generator at least every tenth of a second, with a false value if there
    was nothing to read or write.
    """
    deadline = None if seconds is None else time.monotonic() + seconds
    try:
        wanted = next(waiting)
        while True:
            ready = yield wanted
            if not ready and deadline is not None and time.monotonic() > deadline:
                connection.finish()
                raise SilentServerError(f"the server has not answered for {seconds:g} s")
            wanted = waiting.send(ready)
    except StopIteration as end:
        result: T = end.value
        return result


class BoundedConnection(psycopg.Connection[TupleRow]):
    limit: float | None = LIMIT_SECONDS
    """Seconds after which the server must have answered a statement; None: there is no limit."""

    def wait(self, gen: PQGen[T], *args: Any, **kwargs: Any) -> T:
        return super().wait(answered_in_time(gen, self.pgconn, self.limit), *args, **kwargs)

    def set_limit(self) -> None:
        """Wait a little longer for an answer than the server allows for a statement."""
        self.autocommit = True  # so that no transaction begins
        query = "SELECT setting::float8 FROM pg_settings WHERE name = 'statement_timeout'"
        (milliseconds,) = self.execute(query).fetchone() or (0.0,)
        self.autocommit = False
        self.limit = milliseconds / 1000 + SPARE_SECONDS if milliseconds else None


class AsyncConnection(psycopg.AsyncConnection[TupleRow]):
    async def wait(self, gen: PQGen[T], *args: Any, **kwargs: Any) -> T:
        waiting = answered_in_time(gen, self.pgconn, LIMIT_SECONDS)
        return await super().wait(waiting, *args, **kwargs)
