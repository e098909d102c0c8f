"""Ports for programs that tests start, also more than once."""

import random
import socket
from contextlib import suppress


def free_port() -> int:
    """Return a port that is free, and is given to nobody who does not ask for it by number.

    The system takes ports for connections from 32768 on: one of those could be taken while a
    program is started, or between two of its lives.
    """
    for port in random.sample(range(12_000, 32_000), 100):
        with suppress(OSError), socket.socket() as probe:
            probe.bind(("127.0.0.1", port))
            return port
    raise AssertionError("no free port")
