"""The service as a process: on a socket, until a signal, with an exit status."""

import asyncio
import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from contextlib import AsyncExitStack, suppress
from urllib.parse import urlsplit

from opencode_a2a import telemetry
from opencode_a2a.announcement import announced, running
from opencode_a2a.app.service import Service
from opencode_a2a.config import Settings, SettingsError, StateError, import_hint
from opencode_a2a.opencode.process import (
    OpenCodeMissingError,
    OpenCodeStartError,
    UnsupportedOpenCodeError,
)
from opencode_a2a.printable import program
from opencode_a2a.service_manager import ServiceManager
from opencode_a2a.store.engine import DatabaseError
from opencode_a2a.store.sqlite import EarlierDatabaseError
from opencode_a2a.terminal import STATUS
from opencode_a2a.web.auth import check_state
from opencode_a2a.web.socket import BindError, bind, ended_by_signals, prepare_process
from opencode_a2a.web.tls import ServerTls

ANSWER_SECONDS = 3.0
"""How long a terminal waits for what OpenCode answers, to show it together with the rest."""


def serve(settings: Settings, ready: Callable[[], None] | None = None) -> int:
    """Run the service on its socket until a signal; return the exit status.

    ``ready`` is called in a thread of its own once the service answers.
    """
    try:
        audit = telemetry.configure(settings.log.level, audit=settings.a2a.audit_file)
    except SettingsError as error:
        print(f"opencode-a2a: {error}", file=sys.stderr)
        return 2
    for warning in settings.warnings:
        telemetry.OPERATOR.warning(warning)
    loop_factory = prepare_process()
    try:
        check_state(settings)
        tls = ServerTls(settings.tls) if settings.tls.cert_file else None
        listeners = bind(settings.a2a.host, settings.a2a.port)
        with asyncio.Runner(loop_factory=loop_factory) as runner:
            return runner.run(_serve(settings, listeners, ready, tls))
    except (
        SettingsError,
        StateError,
        OpenCodeMissingError,
        UnsupportedOpenCodeError,
    ) as error:
        print(f"opencode-a2a: {error}", file=sys.stderr)
        return 2
    except EarlierDatabaseError as error:
        print(f"opencode-a2a: {error}; {import_hint(settings, error.file)}", file=sys.stderr)
        return error.status
    except DatabaseError as error:
        print(f"opencode-a2a: {error}", file=sys.stderr)
        return error.status
    except BindError as error:
        services = running(settings.a2a.state_dir)
        ours = [one.url for one in services if urlsplit(one.url).port == settings.a2a.port]
        there = (
            f"your service runs at {ours[0]} already; `{program()} console` opens it, "
            "and --port with another --workspace starts one beside it"
            if ours
            else error
        )
        print(f"opencode-a2a: {there}", file=sys.stderr)
        return 1
    except OpenCodeStartError as error:
        print(f"opencode-a2a: {error}", file=sys.stderr)
        return 1
    finally:
        if audit is not None:
            audit.close()


async def _serve(
    settings: Settings,
    listeners: list[socket.socket],
    ready: Callable[[], None] | None,
    tls: ServerTls | None,
) -> int:
    service, began = Service(settings, tls), time.monotonic()
    server, manager = service.server, ServiceManager(os.environ)

    async def announce() -> None:
        """Log where the service is once it listens, and what OpenCode answers."""
        await server.listening.wait()
        seconds = round(time.monotonic() - began, 3)
        # OpenCode has been found or started by now, or it is known why not.
        manager.ready(f"Serving at {settings.public_url}")
        asking = asyncio.create_task(service.report.opencode_answers())
        try:
            if STATUS.output is not None:
                # One text for a person, though a slow OpenCode must not hide where the service is.
                await asyncio.wait([asking], timeout=ANSWER_SECONDS)
            telemetry.OPERATOR.info("started", seconds=seconds, **service.report.started())
            if facts := await asking:
                telemetry.OPERATOR.info("opencode answers", **facts)
        finally:
            asking.cancel()
        if ready is not None:
            await asyncio.to_thread(ready)

    def reread() -> None:
        manager.reloading()
        if tls is not None:
            tls.look()
        manager.ready(f"Serving at {settings.public_url}")
        # Nothing to do for the audit file, which is looked at before every record: with one,
        # SIGHUP after a rotation must not end the service.

    try:
        with ended_by_signals(
            server, reread if tls or settings.a2a.audit_file else None
        ) as received:
            async with AsyncExitStack() as stack:
                waits = "Starting OpenCode" if settings.opencode.managed_server else "Starting"
                async with STATUS.waiting(waits):
                    await stack.enter_async_context(service.running())
                generated = not settings.knows_callers
                with suppress(OSError):  # if it cannot be written, the commands need the URL
                    # With TLS it has to be the name in the certificate.
                    url = settings.public_url if tls else settings.local_url
                    stack.enter_context(
                        announced(settings.a2a.state_dir, url, accepts_token=generated)
                    )
                for work in (announce(), manager.keep_alive()):
                    stack.callback(asyncio.create_task(work).cancel)
                await server.accept(listeners)
                manager.stopping()
                # After SIGHUP nobody reads which process is left.
                service.keeps_waiting = signal.SIGHUP not in received
    except asyncio.CancelledError:
        if not server.should_exit:  # the start was not stopped by a signal
            raise
    with suppress(OSError):
        telemetry.OPERATOR.info("stopped")
    return 1 if service.failed else 0
