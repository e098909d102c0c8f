"""The HTTP server under the application: uvicorn, with what it lacks.

uvicorn waits for ever for the rest of a header, keeps headers of any length, stops only after
every stream has ended by itself, and ends the process by the signal that stopped it. ``serve``
and the tests run the service through this module; it knows nothing of what is served.
"""

import asyncio
import contextlib
import socket
from collections.abc import Generator
from typing import Literal

import orjson
import uvicorn
from starlette.types import ASGIApp
from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from opencode_a2a.a2a.errors import rest_error
from opencode_a2a.a2a.versions import Version
from opencode_a2a.errors import (
    BadHttpError,
    HeadersTooLargeError,
    RequestTimeoutError,
    ServiceError,
)
from opencode_a2a.web.answers import WRITE_NOW
from opencode_a2a.web.sse import Drain

HEADER_SECONDS = 15.0
HEADER_BYTES = 64 * 1024
BODY_SECONDS = 60.0
"""A last resort behind ``guards.BodyLimits``, which answers politely."""


class Connection(HttpToolsProtocol):
    """One connection: the head of a request and its rest must arrive in time and in bounds."""

    _timer: asyncio.TimerHandle | None = None
    _in_head = True
    _head_bytes = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override] # as the base does
        super().connection_made(transport)
        self._arm(HEADER_SECONDS)

    def connection_lost(self, exc: Exception | None) -> None:
        self._disarm()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._in_head:
            self._head_bytes += len(data)
            if self._timer is None:
                self._arm(HEADER_SECONDS)
        super().data_received(data)
        if self._in_head and self._head_bytes > HEADER_BYTES and not self.transport.is_closing():
            self._refuse(_LONG_HEAD)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        # Lets a stream cut off a reader that does not read.
        self.scope["abort"] = self.transport.abort  # type: ignore[typeddict-unknown-key] # ours
        self.scope[WRITE_NOW] = self._write_now  # type: ignore[literal-required] # ours

    def on_headers_complete(self) -> None:
        self._in_head = False
        self._head_bytes = 0
        self._arm(BODY_SECONDS)
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        self._in_head = True
        self._disarm()
        super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        self._refuse(_GARBAGE)

    def _write_now(self, body: bytes) -> bool:
        if self.flow.write_paused or self.transport.is_closing():
            return False
        self.transport.write(b"%x\r\n%b\r\n" % (len(body), body))
        return True

    def _arm(self, seconds: float) -> None:
        self._disarm()
        self._timer = self.loop.call_later(seconds, self._late)

    def _disarm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _late(self) -> None:
        self._timer = None
        if self._answering:
            # An answer is on its way; its sender has deadlines of its own.
            self._arm(HEADER_SECONDS)
        elif self._in_head and self._head_bytes:
            self._refuse(_SLOW_HEAD)
        else:
            self.transport.abort()

    @property
    def _answering(self) -> bool:
        # uvicorn declares the cycle and sets it to None until the first request.
        return bool(self.cycle) and not self.cycle.response_complete

    def _refuse(self, error: ServiceError) -> None:
        """Answer below ASGI, where there is no request yet, and hang up."""
        if not (self._answering and self.cycle.response_started):
            body = orjson.dumps(rest_error(error, Version.V1))
            head = (
                b"content-type: application/json\r\ncache-control: no-store\r\n"
                b"connection: close\r\ncontent-length: %d\r\n\r\n"
            )
            self.transport.write(STATUS_LINE[error.http] + head % len(body) + body)
        self.transport.close()


class BindError(Exception):
    """The address cannot be had; the text says why and what to do."""


def bind(host: str, port: int) -> list[socket.socket]:
    """Take the address before anything is started behind it; nobody can connect yet."""
    sockets: list[socket.socket] = []
    try:
        for family, _, _, _, address in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM):
            sockets.append(one := socket.socket(family))
            one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                one.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            one.bind(address)
    except (OSError, UnicodeError) as error:  # the latter for what cannot be a name
        for one in sockets:
            one.close()
        raise _bind_error(host, port, error) from None
    return sockets


def _bind_error(host: str, port: int, error: OSError | UnicodeError) -> BindError:
    why = error.strerror if isinstance(error, OSError) else "not a host name"
    return BindError(
        f"cannot listen on {host}:{port}: {why}; stop what uses it, or set A2A_HOST and A2A_PORT"
    )


class Server(uvicorn.Server):
    """uvicorn that tells open streams to end before it waits for them."""

    def __init__(self, config: Config, drain: Drain) -> None:
        super().__init__(config)
        self._drain = drain
        self.listening = asyncio.Event()
        """Set once requests are answered."""

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        try:
            await super().startup(sockets)
        except OSError as error:  # another process was faster between `bind` and now
            raise _bind_error(self.config.host, self.config.port, error) from None
        if self.started:
            self.listening.set()

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None]:
        """Leave signals to whoever serves: there is more to end than this server."""
        yield

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._drain.begin()
        await super().shutdown(sockets)


def server(
    app: ASGIApp,
    host: str,
    port: int,
    drain: Drain,
    *,
    grace: float = 10.0,
    loop: Literal["auto", "asyncio", "uvloop"] = "auto",
    lifespan: Literal["auto", "on", "off"] = "on",
) -> Server:
    """Return a server for the application; ``grace`` bounds the wait for what is running."""
    config = Config(
        app,  # type: ignore[arg-type] # starlette's and uvicorn's ASGI types are spelt apart
        host=host,
        port=port,
        http=Connection,
        ws="none",
        loop=loop,
        lifespan=lifespan,
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_keep_alive=30,
        timeout_graceful_shutdown=max(1, round(grace)),
    )
    return Server(config, drain)


_GARBAGE = BadHttpError()
_LONG_HEAD = HeadersTooLargeError(f"The headers are larger than {HEADER_BYTES} bytes")
_SLOW_HEAD = RequestTimeoutError(f"The headers did not arrive within {HEADER_SECONDS:g} s")
