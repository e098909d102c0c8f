"""The HTTP server: uvicorn, with what it lacks.

By itself uvicorn waits for ever for the rest of a header and 60 s for a TLS handshake, keeps
headers of any length, stops only after every stream has ended by itself, and ends the process with
the signal that stopped it. The layers between the server and the application are in ``edge``.
"""

import asyncio
import contextlib
import ctypes
import gc
import os
import resource
import signal
import socket
import time
from collections.abc import AsyncGenerator, Callable, Generator

import orjson
import uvicorn
from starlette.types import ASGIApp
from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from opencode_a2a.a2a.errors import rest_error
from opencode_a2a.a2a.types import Version
from opencode_a2a.errors import (
    BadHttpError,
    HeadersTooLargeError,
    RequestTimeoutError,
    ServiceError,
)
from opencode_a2a.server.sse import WRITE_NOW
from opencode_a2a.web.tls import HANDSHAKE_SECONDS, ServerTls

HEADER_SECONDS = 15.0
HEADER_BYTES = 64 * 1024
ABORT_SECONDS = 60.0
"""When a connection is cut off whose body does not arrive; ``BodyGuard`` has refused it by then."""
COLLECT_SECONDS = 1.0
COLLECT_AT_LEAST_SECONDS = 300.0
COLLECT_BYTES = 32 * 2**20
"""How often the size of the process is looked at, and when garbage is collected: all of it after so
long, and that of young objects when the process has grown by so much since."""
_M_MMAP_THRESHOLD = -3
"""The name of the setting in glibc's malloc.h."""


class Connection(HttpToolsProtocol):
    """One connection: bounds the size and the time of the head of a request, and of its body."""

    _timer: asyncio.TimerHandle | None = None
    _in_head = True
    _head_bytes = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override] # as the base does
        super().connection_made(transport)
        self._wait(HEADER_SECONDS)

    def connection_lost(self, exc: Exception | None) -> None:
        self._wait(None)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._in_head:
            self._head_bytes += len(data)
            if self._timer is None:
                self._wait(HEADER_SECONDS)
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
        self._wait(ABORT_SECONDS)
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        self._in_head = True
        self._wait(None)
        super().on_message_complete()

    def shutdown(self) -> None:
        idle = not (self._responding or self.transport.get_write_buffer_size())
        if idle and self.transport.get_extra_info("ssl_object") is not None:
            # Closing TLS properly waits for the other side, which may not respond.
            self.transport.abort()
        else:
            super().shutdown()

    def send_400_response(self, msg: str) -> None:
        self._refuse(_GARBAGE)

    def _write_now(self, body: bytes) -> bool:
        if self.flow.write_paused or self.transport.is_closing():
            return False
        self.transport.write(b"%x\r\n%b\r\n" % (len(body), body))
        return True

    def _wait(self, seconds: float | None) -> None:
        """Set the deadline for what the client has yet to send; None if that is nothing."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None if seconds is None else self.loop.call_later(seconds, self._late)

    def _late(self) -> None:
        self._timer = None
        if self._responding:
            # A response is being sent, which has deadlines of its own.
            self._wait(HEADER_SECONDS)
        elif self._in_head and self._head_bytes:
            self._refuse(_SLOW_HEAD)
        else:
            self.transport.abort()

    @property
    def _responding(self) -> bool:
        # uvicorn declares the cycle and sets it to None until the first request.
        return bool(self.cycle) and not self.cycle.response_complete

    def _refuse(self, error: ServiceError) -> None:
        """Answer without ASGI, since there is no complete request yet, and hang up."""
        if not (self._responding and self.cycle.response_started):
            body = orjson.dumps(rest_error(error, Version.V1))
            head = (
                b"content-type: application/json\r\ncache-control: no-store\r\n"
                b"connection: close\r\ncontent-length: %d\r\n\r\n"
            )
            self.transport.write(STATUS_LINE[error.http] + head % len(body) + body)
        self.transport.close()


class BindError(Exception):
    """The address cannot be used; the text says why and what to do."""


def bind(host: str, port: int) -> list[socket.socket]:
    """Reserve the address before anything is started behind it; nobody can connect yet."""
    sockets: list[socket.socket] = []
    try:
        for family, _, _, _, address in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM):
            sockets.append(one := socket.socket(family))
            one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                one.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            one.bind(address)
    except (OSError, UnicodeError) as error:  # the latter if it cannot be a host name
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
    """uvicorn that leaves it to its caller when to stop, and what to do about signals."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.listening = asyncio.Event()
        """Set once the server accepts connections."""
        self.hurried = asyncio.Event()
        """Set by a second signal: requests under way are not waited for."""

    async def accept(self, sockets: list[socket.socket]) -> None:
        """Accept connections until ``should_exit``; then ``shutdown`` is called."""
        self.config.load()
        self.lifespan = self.config.lifespan_class(self.config)
        await self.startup(sockets)
        if not self.should_exit:
            await self.main_loop()

    def hurry(self) -> None:
        self.force_exit = True
        self.hurried.set()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen, as uvicorn does, but with a limit for the handshake of TLS."""
        config, loop = self.config, asyncio.get_running_loop()

        def connection() -> Connection:
            return Connection(config, self.server_state, self.lifespan.state, loop)

        self.servers = []
        try:
            for one in sockets or []:
                listening = await loop.create_server(
                    connection,
                    sock=one,
                    ssl=config.ssl,
                    ssl_handshake_timeout=HANDSHAKE_SECONDS if config.ssl else None,
                    backlog=config.backlog,
                )
                self.servers.append(listening)
        except OSError as error:  # another process was faster between `bind` and now
            raise _bind_error(config.host, config.port, error) from None
        self.started = True
        self.listening.set()

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None]:
        """Leave the signals to ``ended_by_signals``: there is more to end than this server."""
        yield


def server(
    app: ASGIApp,
    host: str,
    port: int,
    *,
    tls: ServerTls | None = None,
    grace: float = 10.0,
) -> Server:
    """Return a server for the application.

    When it stops, requests that are running have ``grace`` seconds to end.
    """
    config = Config(
        app,  # type: ignore[arg-type] # starlette's and uvicorn's ASGI types are spelt apart
        host=host,
        port=port,
        http=Connection,
        ws="none",
        lifespan="off",  # the application runs before it is served
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_keep_alive=30,
        timeout_graceful_shutdown=max(1, round(grace)),
        ssl_context_factory=(lambda _, __: tls.context) if tls else None,
    )
    return Server(config)


@contextlib.asynccontextmanager
async def listening_here(app: ASGIApp) -> AsyncGenerator[str]:
    """Serve an application to this machine only, on a free port and without TLS; yield its URL."""
    (listener,) = bind("127.0.0.1", 0)
    port = listener.getsockname()[1]
    runner = server(app, "127.0.0.1", port, grace=1)
    running = asyncio.create_task(runner.serve([listener]))
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        runner.should_exit = True
        await running


@contextlib.contextmanager
def ended_by_signals(
    runner: Server, reread: Callable[[], object] | None = None
) -> Generator[set[signal.Signals]]:
    """Let SIGINT, SIGTERM and SIGHUP end the server, or cancel its start; yield those received.

    SIGHUP calls ``reread`` instead, if there is one and the process has no terminal. With a
    terminal it means that the terminal was closed.
    """
    loop, main = asyncio.get_running_loop(), asyncio.current_task()
    received: set[signal.Signals] = set()
    terminals = [number for number in (1, 2) if os.isatty(number)]
    # A process has a controlling terminal even if its output goes elsewhere.
    with contextlib.suppress(OSError):
        os.close(os.open("/dev/tty", os.O_RDWR | os.O_NOCTTY))
        reread = None

    def end(number: signal.Signals) -> None:
        if number is signal.SIGHUP and reread is not None:
            reread()
            return
        received.add(number)
        if number is signal.SIGHUP:
            # The terminal was closed. Printing to it would fail, and with it the orderly end.
            nowhere = os.open(os.devnull, os.O_WRONLY)
            for terminal in terminals:
                os.dup2(nowhere, terminal)
            os.close(nowhere)
        if runner.should_exit:
            runner.hurry()  # the second signal: do not wait for open requests
        elif main is not None and not runner.started:
            main.cancel()
        runner.should_exit = True

    signals = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    for number in signals:
        loop.add_signal_handler(number, end, number)
    try:
        yield received
    finally:
        for number in signals:
            loop.remove_signal_handler(number)


def prepare_process() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """Tune memory for a long-running service; return the factory of its event loop."""
    # All that is loaded now stays: the garbage collector can skip it, and run less often. What it
    # then finds too late, ``collect_garbage`` finds by the memory that it takes.
    gc.freeze()
    gc.set_threshold(50_000, 20, 100)
    # Have the C library return the memory of large buffers as soon as they are freed. By default
    # glibc keeps all buffers up to the size of the largest that was ever freed, at most 32 MB: one
    # message with files of 10 MB then takes 105 MB for good, instead of 70 MB for a moment.
    with contextlib.suppress(OSError, AttributeError):  # another C library has no such setting
        ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, 512 * 1024)
    try:
        import uvloop
    except ImportError:  # not on every platform
        return None
    return uvloop.new_event_loop


async def collect_garbage() -> None:
    """Collect young garbage whenever the process has grown, and all of it once in a while.

    Then memory that is free is returned to the system, too.

    The collector counts objects, not bytes: a few that refer to each other can hold any amount of
    memory, and its own thresholds are high. What makes a process grow at once is young. To look
    through all objects instead would take 5 % of the CPU of a busy service, whose tasks in memory
    make it grow too.
    """
    collected, size = time.monotonic(), _resident_bytes()
    while True:
        await asyncio.sleep(COLLECT_SECONDS)
        if time.monotonic() - collected >= COLLECT_AT_LEAST_SECONDS:
            gc.collect()
            # What was freed between things that stay is kept for later: 20 MB after 250,000
            # requests of all kinds. To return 100 MB takes 13 ms.
            with contextlib.suppress(OSError, AttributeError):  # as in ``prepare_process``
                ctypes.CDLL(None).malloc_trim(0)
            collected, size = time.monotonic(), _resident_bytes()
        elif _resident_bytes() - size >= COLLECT_BYTES:
            gc.collect(1)
            size = _resident_bytes()


def _resident_bytes() -> int:
    """Return how much memory the process has now; the most that it ever had without ``/proc``."""
    try:
        with open("/proc/self/statm", "rb") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


_GARBAGE = BadHttpError()
_LONG_HEAD = HeadersTooLargeError(f"The headers are larger than {HEADER_BYTES} bytes")
_SLOW_HEAD = RequestTimeoutError(f"The headers did not arrive within {HEADER_SECONDS:g} s")
