"""The OpenCode behind the service: the one that is started, or the one that runs already.

``app`` enters ``upstream``, talks to what it yields, and prints what an operator is told here:
whether it can be used, which model works there, and what it does without asking. A managed
OpenCode gets its environment, permissions and, for a demo, its model here; ``managed`` starts and
keeps it.
"""

import asyncio
import hashlib
import os
import shutil
import socket
from collections.abc import AsyncGenerator, Collection, Generator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path

import structlog

from opencode_a2a.config import (
    VARIABLES,
    Settings,
    StateError,
    database_file,
    is_postgresql,
    misplaced,
)
from opencode_a2a.errors import ServiceError, UpstreamError, UpstreamUnreachableError
from opencode_a2a.events import JsonObject
from opencode_a2a.ids import MAIN
from opencode_a2a.opencode.client import Location, OpenCode
from opencode_a2a.opencode.managed import (
    ManagedOpenCode,
    another_api,
    passed_environment,
    untested,
    unusable,
)
from opencode_a2a.opencode.process import UnsupportedOpenCodeError
from opencode_a2a.opencode.types import Agent
from opencode_a2a.rights import never_asked, outside, unmatched
from opencode_a2a.telemetry import mask_url
from opencode_a2a.terminal import listed

logger = structlog.get_logger(__name__)

HEALTH_SECONDS = 2.0
FACTS_SECONDS = 30.0
ASKED = {"bash": "commands", "edit": "edits", "webfetch": "web requests"}
"""The permissions of OpenCode that are told at the start."""
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
async def upstream(settings: Settings, hidden: Collection[str]) -> AsyncGenerator[Upstream]:
    """Start OpenCode, with a demo model behind it if asked for, or find the one that runs.

    It does not get the ``hidden`` variables.
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
        # Two servers must not share what they store.
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
                state=state,
                directory=settings.workspace,
                record=record,
            )
        )
        yield Upstream(managed.url, managed.username, managed.password, managed, managed.version)


def _own_data(place: Path, environment: Mapping[str, str]) -> dict[str, str]:
    """Give an OpenCode a place of its own for its data; it signs in as the user's own does."""
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
    """Return the variables that OpenCode does not get: our settings, and our secrets."""
    named = [peer.credential for peer in settings.a2a.peers]
    named += [entry.password_variable for entry in settings.opencode.upstreams]
    names = {*VARIABLES, *filter(None, named)}
    # The driver reads the password from there if the URL has none.
    return names | {"PGPASSWORD"} if is_postgresql(settings.database_url) else names


def managed_record(settings: Settings) -> Path | None:
    """Return where a managed OpenCode is written down: one file for each database and name.

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
    if settings.upstream != MAIN:
        place += b"\0" + settings.upstream.encode()
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


# --- what an operator is told -----------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Facts:
    """What the operator should know of the model, and of what it may do unasked."""

    model: str | None
    """``provider/model``; several where OpenCode has not chosen yet, None without a provider."""
    hosted: bool
    """Whether OpenCode's makers run it: what is sent to it leaves this machine."""
    asks: list[str]
    unasked: list[str]
    notes: list[str]
    """What else is worth a look: agents with more freedom, rules without effect."""


async def facts(opencode: OpenCode, settings: Settings) -> Facts | None:
    """Ask OpenCode what there is to know; None when it does not answer."""
    own, at = settings.opencode, Location(str(settings.workspace) if settings.workspace else None)
    try:
        async with asyncio.timeout(FACTS_SECONDS):
            config = await opencode.config(at=at)
            connected = await opencode.connected_providers(at=at)
            agents = {agent.name: agent for agent in await opencode.agents(at=at)}
    except (TimeoutError, ServiceError) as error:
        logger.warning("OpenCode could not be asked for its model", error=type(error).__name__)
        return None
    notes = await _ineffective(opencode, settings, at)
    agent = agents.get(own.agent or config.default_agent or "build")
    model = config.model or ""
    if own.provider_id and own.model_id:
        model = f"{own.provider_id}/{own.model_id}"
    elif agent is not None and agent.model is not None:
        model = f"{agent.model.provider_id}/{agent.model.model_id}"
    candidates = [model] if model else [f"{p}/{m}" for p, m in connected.default.items()]
    unasked = _unasked(agent, settings) if agent else []
    asked = [word for name, word in ASKED.items() if agent and "ask" in agent.actions(name)]
    # The model hands work to other agents, and a project may have given these more freedom.
    freer = {
        one.name: more
        for one in agents.values()
        if not one.hidden and (more := set(_unasked(one, settings)) - {*unasked})
    }
    if freer:
        words = [word for word in ASKED.values() if any(word in more for more in freer.values())]
        names = f"agent{'s' if len(freer) > 1 else ''} {listed(sorted(freer))}"
        notes.append(f"{listed(words)} unasked by the {names}; OpenCode's configuration allows it")
    # What is sent to a model that OpenCode's makers run leaves this machine.
    hosted = any(one.partition("/")[0] in ("opencode", "opencode-go") for one in candidates)
    return Facts(
        " or ".join(candidates) or None,
        hosted,
        [word for word in asked if word not in unasked],
        unasked,
        notes,
    )


async def _ineffective(opencode: OpenCode, settings: Settings, at: Location) -> list[str]:
    """Return the rules for permissions that OpenCode has no tool for; some were named before."""
    rules = [rule.permission for rule in settings.interrupts.permission_rules]
    found = [name for name, meant in unmatched(rules) if meant is None]
    if not found:
        return []
    try:
        async with asyncio.timeout(FACTS_SECONDS):
            tools = outside(await opencode.tool_ids(at=at), await opencode.mcp_status(at=at))
    except (TimeoutError, ServiceError) as error:
        logger.warning("OpenCode could not be asked for its tools", error=type(error).__name__)
        return []
    return [
        f"A2A_PERMISSION_RULES: {never_asked(name, meant)}"
        for name, meant in unmatched(found, tools)
    ]


def _unasked(agent: Agent, settings: Settings) -> list[str]:
    """Return what an agent does unasked; where it was told to ask, an exception counts too."""
    found = {name: agent.actions(name) for name in ASKED}
    return [
        word
        for name, word in ASKED.items()
        if found[name] == {"allow"} or (name in settings.asked_for and "allow" in found[name])
    ]


async def trouble(opencode: OpenCode, settings: Settings) -> str | None:
    """Return in one sentence why OpenCode cannot be used, and what to do; None if it can."""
    where = f"OpenCode at {mask_url(settings.opencode.base_url)}"
    try:
        async with asyncio.timeout(HEALTH_SECONDS):
            version = (await opencode.health()).version
    except (TimeoutError, UpstreamUnreachableError):
        return (
            f"{where} does not answer: start it with `opencode serve`, set OPENCODE_BASE_URL, "
            "or let this program start one with --managed."
        )
    except UpstreamError as error:
        if error.data.get("upstream_status") in (401, 403):
            return (
                f"{where} refuses the password: set OPENCODE_AUTH_PASSWORD to the "
                "OPENCODE_SERVER_PASSWORD that it was started with."
            )
        if found := await opencode.health_of_2():
            raise UnsupportedOpenCodeError(
                f"{where} cannot be used: {another_api(found.version)}"
            ) from None
        return f"{where} does not work: {error.message}. Version 1.1 or later is needed."
    if reason := unusable(version):
        raise UnsupportedOpenCodeError(f"{where} cannot be used: {reason}")
    if doubt := untested(version):
        logger.warning(doubt)
    return None


async def check_directory(opencode: OpenCode, settings: Settings) -> None:
    """Raise StateError if files of ours are in the directory that a running OpenCode works in."""
    if settings.workspace is not None or not settings.opencode_is_here:
        return  # the settings were checked against the one, and the other is not our disk
    try:
        directory = Path((await opencode.paths()).directory)
    except UpstreamError:
        return
    if settings.opencode.allow_root_workspace and directory == Path(directory.anchor):
        return
    for problem in misplaced(settings, directory):
        raise StateError(str(problem))
