"""What a service manager is told: that the service is ready, reloads, stops, and is still alive.

The protocol of systemd, ``sd_notify(3)``: datagrams to the socket in ``NOTIFY_SOCKET``. Without
that variable nothing is sent. ``app`` tells it.
"""

import asyncio
import os
import socket
import time
from collections.abc import Mapping
from contextlib import suppress


class ServiceManager:
    """The manager that started this process, if it listens."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        place = environ.get("NOTIFY_SOCKET", "")
        # A name that begins with @ is that of an abstract socket, which is in no directory.
        self._address = f"\0{place[1:]}" if place.startswith("@") else place
        self._beat = 0.0
        if environ.get("WATCHDOG_PID", str(os.getpid())) == str(os.getpid()):
            with suppress(ValueError):
                self._beat = int(environ.get("WATCHDOG_USEC", "0")) / 2e6

    def ready(self, status: str) -> None:
        """Say that requests are answered, and what to show of the service."""
        self._send("READY=1", f"STATUS={status}")

    def reloading(self) -> None:
        """Say that settings are read again; ``ready`` has to follow."""
        self._send("RELOADING=1", f"MONOTONIC_USEC={time.monotonic_ns() // 1000}")

    def stopping(self) -> None:
        self._send("STOPPING=1")

    async def keep_alive(self) -> None:
        """Say twice per period that the event loop runs; return if nobody wants to know."""
        while self._beat > 0 and self._address:
            self._send("WATCHDOG=1")
            await asyncio.sleep(self._beat)

    def _send(self, *lines: str) -> None:
        if not self._address:
            return
        with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
            sender.setblocking(False)  # a manager that does not read must not stop the service
            sender.sendto("\n".join(lines).encode(), self._address)
