"""The service as a process: on a socket, until a signal, with an exit status."""

import asyncio
import signal
import socket
import sys
import time
from collections.abc import Callable
from contextlib import AsyncExitStack, suppress

from opencode_a2a import telemetry
from opencode_a2a.announcement import announced
from opencode_a2a.app.service import Service
from opencode_a2a.config import Settings, SettingsError, StateError, import_hint
from opencode_a2a.opencode.process import OpenCodeStartError, UnsupportedOpenCodeError
from opencode_a2a.store.engine import DatabaseError
from opencode_a2a.store.sqlite import EarlierDatabaseError
from opencode_a2a.web.auth import check_state
from opencode_a2a.web.server import BindError, bind, ended_by_signals, prepare_process, server
from opencode_a2a.web.tls import ServerTls


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
    except (SettingsError, StateError, UnsupportedOpenCodeError) as error:
        print(f"opencode-a2a: {error}", file=sys.stderr)
        return 2
    except EarlierDatabaseError as error:
        print(f"opencode-a2a: {error}; {import_hint(settings, error.file)}", file=sys.stderr)
        return error.status
    except DatabaseError as error:
        print(f"opencode-a2a: {error}", file=sys.stderr)
        return error.status
    except (BindError, OpenCodeStartError) as error:
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
    runner = server(
        service.entrance,
        settings.a2a.host,
        settings.a2a.port,
        service.streams,
        tls=tls,
        grace=settings.a2a.shutdown_grace_seconds,
    )

    async def announce() -> None:
        """Log where the service is once it listens, and then what OpenCode answers."""
        await runner.listening.wait()
        seconds = round(time.monotonic() - began, 3)
        telemetry.OPERATOR.info("started", seconds=seconds, **service.report.started())
        if facts := await service.report.opencode_answers():
            telemetry.OPERATOR.info("opencode answers", **facts)
        if ready is not None:
            await asyncio.to_thread(ready)

    def reread() -> None:
        if tls is not None:
            tls.look()
        # Nothing to do for the audit file, which is looked at before every record: with one,
        # SIGHUP after a rotation must not end the service.

    try:
        with ended_by_signals(
            runner, reread if tls or settings.a2a.audit_file else None
        ) as received:
            async with AsyncExitStack() as stack:
                await stack.enter_async_context(service.running())
                generated = not settings.knows_callers
                with suppress(OSError):  # if it cannot be written, the commands need the URL
                    # With TLS it has to be the name in the certificate.
                    url = settings.public_url if tls else settings.local_url
                    stack.enter_context(
                        announced(settings.a2a.state_dir, url, accepts_token=generated)
                    )
                announcing = asyncio.create_task(announce())
                stack.callback(announcing.cancel)
                await runner.serve(listeners)
                open_tasks = await service.report.stopping(keep=signal.SIGHUP not in received)
                with suppress(OSError):  # the terminal may be gone
                    telemetry.OPERATOR.info("stopping", **open_tasks)
        with suppress(OSError):
            telemetry.OPERATOR.info("stopped")
    except asyncio.CancelledError:
        if not runner.should_exit:
            raise
    return 1 if service.failed else 0
