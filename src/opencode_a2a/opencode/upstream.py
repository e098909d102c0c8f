"""The OpenCode behind the service: the one that is started, or the one that runs already.

``app`` enters ``upstream`` and talks to what it yields. A managed OpenCode gets its environment,
permissions and, for a demo, its model here; ``managed`` starts and keeps it.
"""

import hashlib
import os
import socket
from collections.abc import AsyncGenerator, Generator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path

from opencode_a2a.config import VARIABLES, Settings, StateError, database_file, is_postgresql
from opencode_a2a.events import JsonObject
from opencode_a2a.opencode.managed import ManagedOpenCode, passed_environment

WORKERS = ("build", "plan", "general", "explore")
"""The agents of OpenCode itself that use tools."""


@dataclass(frozen=True, slots=True)
class Upstream:
    """The OpenCode behind the service: how to reach it, and what to say of it."""

    url: str
    username: str
    password: str | None
    managed: ManagedOpenCode | None = None
    version: str | None = None


@asynccontextmanager
async def upstream(settings: Settings) -> AsyncGenerator[Upstream]:
    """Start OpenCode, with a demo model behind it if asked for, or find the one that runs."""
    own = settings.opencode
    if not own.managed_server:
        password = own.auth_password.get_secret_value() if own.auth_password else None
        yield Upstream(own.base_url, own.auth_username, password)
        return
    record = managed_record(settings)
    # None of our settings, and none of our secrets.
    credentials = (peer.credential for peer in settings.a2a.peers if peer.credential)
    environment = passed_environment(os.environ, {*VARIABLES, *credentials}, own.env_passthrough)
    async with AsyncExitStack() as stack:
        config: JsonObject = {}
        if settings.a2a.demo:
            from opencode_a2a_demo.server import DemoModel, opencode_config  # only for demos

            # An OpenCode that outlived a killed service looks for the model where it was.
            file = record.with_suffix(".port") if record else None
            model = await stack.enter_async_context(DemoModel(port=_known_port(file)))
            if file is not None:
                stack.enter_context(_noted_port(file, model.port, record))
            config |= opencode_config(model.url)
        if settings.asked_for:
            asks: JsonObject = dict.fromkeys(settings.asked_for, "ask")
            # A project's file may set permissions for an agent alone, and these would win.
            workers = dict.fromkeys((*WORKERS, own.agent or "build"))
            agents: JsonObject = {name: {"permission": asks} for name in workers}
            config |= {"permission": asks, "agent": agents}
        managed = await stack.enter_async_context(
            ManagedOpenCode(
                own,
                environment,
                config=config,
                state=settings.a2a.state_dir / "opencode" if settings.a2a.demo else None,
                directory=settings.workspace,
                record=record,
            )
        )
        yield Upstream(managed.url, managed.username, managed.password, managed, managed.version)


def managed_record(settings: Settings) -> Path | None:
    """Return where a managed OpenCode is written down: one file for each database.

    Its turns belong to the tasks of one database, which one service at a time has.
    """
    url, file = settings.database_url, database_file(settings.database_url)
    if is_postgresql(url):
        # A password that is changed does not make it another database.
        place = url.rpartition("@")[2].encode()
    elif file is not None:
        place = os.fsencode(os.path.realpath(file))
    else:
        return None
    name = hashlib.sha256(place).hexdigest()[:16]
    return settings.a2a.state_dir / "managed" / f"{name}.json"


def _known_port(file: Path | None) -> int:
    """Return the port in a file if it is free; 0 for any."""
    try:
        port = int(file.read_text()) if file else 0
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(("127.0.0.1", port))
    except (OSError, OverflowError, ValueError):
        return 0
    return port


@contextmanager
def _noted_port(file: Path, port: int, record: Path | None) -> Generator[None]:
    """Keep the demo model's port in a file, and after the end if an OpenCode was kept."""
    try:
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        file.write_text(str(port))
    except OSError as error:
        raise StateError(
            f"cannot write {file}: {error.strerror}; remove what is there, or set A2A_STATE_DIR"
        ) from error
    try:
        yield
    finally:
        if record is None or not record.exists():
            file.unlink(missing_ok=True)
