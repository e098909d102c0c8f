"""The OpenCode behind the service: one that runs already, or a managed one.

``app`` enters ``upstream`` for each OpenCode and connects to the address that it yields. A managed
OpenCode gets its environment, its permissions and, for a demo, its model here; ``opencode.managed``
starts it and keeps it running.
"""

import hashlib
import os
import shutil
import socket
from collections.abc import AsyncGenerator, Collection, Generator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path

from opencode_a2a.config import VARIABLES, Settings, StateError
from opencode_a2a.databases import database_file, is_shared, kind_of
from opencode_a2a.events import JsonObject
from opencode_a2a.ids import MAIN
from opencode_a2a.opencode.managed import ManagedOpenCode, passed_environment

WORKERS = ("build", "plan", "general", "explore")
"""OpenCode's built-in agents that use tools."""


@dataclass(frozen=True, slots=True)
class Upstream:
    """The address and credentials of an OpenCode; ``managed`` and ``version`` if it is managed."""

    url: str
    username: str
    password: str | None
    managed: ManagedOpenCode | None = None
    version: str | None = None


@asynccontextmanager
async def upstream(settings: Settings, hidden: Collection[str]) -> AsyncGenerator[Upstream]:
    """Start a managed OpenCode, in a demo with the scripted model, or yield one that runs already.

    A managed OpenCode does not get the environment variables in ``hidden``.
    """
    own = settings.opencode
    if not own.managed_server:
        password = own.auth_password.get_secret_value() if own.auth_password else None
        yield Upstream(own.base_url, own.auth_username, password)
        return
    record = managed_record(settings)
    environment = passed_environment(os.environ, hidden, own.env_passthrough)
    state = settings.a2a.state_dir / "opencode" if settings.a2a.demo else None
    if settings.upstream != MAIN:
        # Two OpenCodes must not share their data.
        place = settings.a2a.state_dir / "upstreams" / settings.upstream
        if state is not None:
            state = place
        else:
            environment |= _own_data(place, environment)
    async with AsyncExitStack() as stack:
        config: JsonObject = {}
        if settings.a2a.demo:
            from opencode_a2a_demo.sample import make_sample  # only for demos
            from opencode_a2a_demo.server import DemoModel, opencode_config

            if own.workspace_root is None and settings.workspace is not None:
                try:
                    make_sample(settings.workspace)
                except OSError as error:
                    raise StateError(
                        f"cannot write {settings.workspace}: {error.strerror}; set A2A_STATE_DIR"
                    ) from error

            # An OpenCode that outlived a killed service expects the model at its old port.
            file = record.with_suffix(".port") if record else None
            model = await stack.enter_async_context(DemoModel(port=_known_port(file)))
            if file is not None:
                stack.enter_context(_noted_port(file, model.port, record))
            config |= opencode_config(model.url)
        if settings.asked_for:
            asks: JsonObject = dict.fromkeys(settings.asked_for, "ask")
            # A project's configuration may set permissions for a single agent, which would win.
            workers = dict.fromkeys((*WORKERS, own.agent or "build"))
            agents: JsonObject = {name: {"permission": asks} for name in workers}
            config |= {"permission": asks, "agent": agents}
        managed = await stack.enter_async_context(
            ManagedOpenCode(
                own,
                environment,
                config=config,
                state=state,
                directory=settings.workspace,
                record=record,
            )
        )
        yield Upstream(managed.url, managed.username, managed.password, managed, managed.version)


def _own_data(place: Path, environment: Mapping[str, str]) -> dict[str, str]:
    """Return variables that give an OpenCode its own data directory, with the user's sign-ins."""
    share = Path(environment.get("HOME") or Path.home(), ".local", "share")
    users = Path(environment.get("XDG_DATA_HOME") or share, "opencode", "auth.json")
    try:
        for kind in ("data", "state"):
            (place / kind / "opencode").mkdir(mode=0o700, parents=True, exist_ok=True)
        if users.exists():
            target = place / "data" / "opencode" / "auth.json"
            shutil.copyfile(users, target)
            target.chmod(0o600)
    except OSError as error:
        raise StateError(
            f"cannot prepare {place}: {error.strerror}; remove what is there, or set A2A_STATE_DIR"
        ) from error
    return {"XDG_DATA_HOME": str(place / "data"), "XDG_STATE_HOME": str(place / "state")}


def withheld(settings: Settings) -> set[str]:
    """Return the names of the variables that OpenCode does not get: our settings and secrets."""
    named = [peer.credential for peer in settings.a2a.peers]
    named += [entry.password_variable for entry in settings.opencode.upstreams]
    names = {*VARIABLES, *filter(None, named)}
    # PostgreSQL's driver takes the password from this variable if the URL has none.
    return names | kind_of(settings.database_url).secret_variables


def managed_record(settings: Settings) -> Path | None:
    """Return the file of a managed OpenCode's record; there is one per database and name.

    The turns of an OpenCode belong to the tasks of one database, which one service uses at a time.
    None for a database that is only in memory.
    """
    url, file = settings.database_url, database_file(settings.database_url)
    if is_shared(url):
        # The same database stays the same when its password changes.
        place = url.rpartition("@")[2].encode()
    elif file is not None:
        place = os.fsencode(os.path.realpath(file))
    else:
        return None
    if settings.upstream != MAIN:
        place += b"\0" + settings.upstream.encode()
    name = hashlib.sha256(place).hexdigest()[:16]
    return settings.a2a.state_dir / "managed" / f"{name}.json"


def _known_port(file: Path | None) -> int:
    """Return the port that a file names if it is free; else 0, which stands for any port."""
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
    """Keep the demo model's port in a file; the file stays if an OpenCode is kept on exit."""
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
