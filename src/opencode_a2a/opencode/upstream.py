"""The OpenCode behind the service: one that runs already, or a managed one.

``app`` enters ``opencode_server`` for each OpenCode and connects to what it yields. A managed
OpenCode gets its environment, its permissions and, for a demo, its model here; ``opencode.managed``
starts it and keeps it running.

At the start ``app`` also logs what the operator should know: whether OpenCode can be used
(``trouble``), which model works there and what it does without asking for permission (``facts``).
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

from opencode_a2a.config import FILE_VARIABLES, VARIABLES, Settings, StateError, misplaced
from opencode_a2a.databases import database_file, is_shared, kind_of
from opencode_a2a.errors import NotInOpenCodeError, ServiceError, UpstreamError
from opencode_a2a.events import JsonObject
from opencode_a2a.ids import MAIN
from opencode_a2a.opencode.connect import examine
from opencode_a2a.opencode.driver import Driver, Location
from opencode_a2a.opencode.kinds import untested
from opencode_a2a.opencode.managed import ManagedOpenCode, passed_environment
from opencode_a2a.opencode.types import Agent
from opencode_a2a.printable import joined
from opencode_a2a.rights import PERMISSIONS, never_asked, outside, unmatched
from opencode_a2a.telemetry import mask_url

logger = structlog.get_logger(__name__)

HEALTH_SECONDS = 2.0
FACTS_SECONDS = 30.0
ASKED = {"bash": "commands", "edit": "edits", "webfetch": "web requests"}
"""The permissions of OpenCode that the banner mentions, with the words for them."""
TELEMETRY = "OTEL_*"
"""Where the service reports to, and with which key; a managed OpenCode would report there too."""
WORKERS = ("build", "plan", "general", "explore")
"""OpenCode's built-in agents that use tools."""


@dataclass(frozen=True, slots=True)
class OpenCodeServer:
    """The address and credentials of an OpenCode; ``managed`` and ``version`` if it is managed."""

    url: str
    username: str
    password: str | None
    managed: ManagedOpenCode | None = None
    version: str | None = None


@asynccontextmanager
async def opencode_server(
    settings: Settings, hidden: Collection[str]
) -> AsyncGenerator[OpenCodeServer]:
    """Start a managed OpenCode, in a demo with the scripted model, or yield one that runs already.

    A managed OpenCode does not get the environment variables in ``hidden``.
    """
    own = settings.opencode
    if not own.managed_server:
        password = own.auth_password.get_secret_value() if own.auth_password else None
        yield OpenCodeServer(own.base_url, own.auth_username, password)
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
        yield OpenCodeServer(
            managed.url, managed.username, managed.password, managed, managed.version
        )


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
    """Return the names of the variables that OpenCode does not get: our settings and secrets.

    ``*`` in a name matches anything.
    """
    named = [peer.credential for peer in settings.a2a.peers]
    named += [entry.password_variable for entry in settings.opencode.upstreams]
    ours = (*VARIABLES, *FILE_VARIABLES)
    names = {*ours, *map(str.lower, ours), *filter(None, named), TELEMETRY}
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


# What the operator should know at the start


@dataclass(frozen=True, slots=True)
class Facts:
    """The model, and what the agent may do without asking for permission."""

    model: str | None
    """``provider/model``; several if OpenCode has not chosen yet, None without a provider."""
    hosted: bool
    """Whether OpenCode's makers run the model, so that prompts leave this machine."""
    asks: list[str]
    """What the agent asks a permission for, in words of ``ASKED``."""
    unasked: list[str]
    """What it does without asking."""
    notes: list[str]
    """Warnings: profiles that cannot be kept, agents with more freedom, rules without effect."""


async def facts(opencode: Driver, settings: Settings) -> Facts | None:
    """Ask OpenCode for its ``Facts``; None if it does not answer."""
    own, at = settings.opencode, Location.of(settings.workspace)
    try:
        async with asyncio.timeout(FACTS_SECONDS):
            config = await opencode.config(at=at)
            connected = await opencode.connected_providers(at=at)
            agents = {agent.name: agent for agent in await opencode.agents(at=at)}
    except (TimeoutError, ServiceError) as error:
        logger.warning("could not ask OpenCode for its model", error=type(error).__name__)
        return None
    notes = [*_unkept(opencode, settings), *await _ineffective(opencode, settings, at)]
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
        other.name: more
        for other in agents.values()
        if not other.hidden and (more := set(_unasked(other, settings)) - {*unasked})
    }
    if freer:
        words = [word for word in ASKED.values() if any(word in more for more in freer.values())]
        names = f"agent{'s' if len(freer) > 1 else ''} {joined(sorted(freer))}"
        notes.append(f"{joined(words)} unasked by the {names}; OpenCode's configuration allows it")
    hosted = any(name.partition("/")[0] in ("opencode", "opencode-go") for name in candidates)
    return Facts(
        " or ".join(candidates) or None,
        hosted,
        [word for word in asked if word not in unasked],
        unasked,
        notes,
    )


def _unkept(opencode: Driver, settings: Settings) -> list[str]:
    """Return a note if OpenCode cannot keep to a profile of the settings: messages are refused."""
    access = settings.auth
    entries = [entry for entry in access.static_auth_credentials or () if entry.enabled]
    profiles = {access.profile, *(entry.profile for entry in entries)} - {"auto"}
    if "rules" not in opencode.features.missing or not profiles:
        return []
    return [
        "this version of OpenCode cannot limit what a session may do, so messages with the profile "
        f"{joined(sorted(profiles))} are refused; use the profile auto, or another "
        "version of OpenCode"
    ]


async def _ineffective(opencode: Driver, settings: Settings, at: Location) -> list[str]:
    """Return a note for each permission rule that matches no tool of OpenCode.

    Rules that obviously misspell a built-in permission were reported when settings were loaded.
    """
    rules = [rule.permission for rule in settings.interrupts.permission_rules]
    known = {*rules} & (PERMISSIONS - opencode.features.permissions)
    never = [f"A2A_PERMISSION_RULES: {never_asked(name, None)}" for name in sorted(known)]
    unknown = [name for name, meant in unmatched(rules) if meant is None]
    if not unknown:
        return never
    try:
        async with asyncio.timeout(FACTS_SECONDS):
            tools = outside(await opencode.tool_ids(at=at), await opencode.mcp_status(at=at))
    except NotInOpenCodeError:
        return never  # any of them may be the name of a tool
    except (TimeoutError, ServiceError) as error:
        logger.warning("could not ask OpenCode for its tools", error=type(error).__name__)
        return never
    return never + [
        f"A2A_PERMISSION_RULES: {never_asked(name, meant)}"
        for name, meant in unmatched(unknown, tools)
    ]


def _unasked(agent: Agent, settings: Settings) -> list[str]:
    """Return what an agent does without asking, in words of ``ASKED``.

    For a permission that the settings want asked for, a single exception counts.
    """
    actions = {name: agent.actions(name) for name in ASKED}
    return [
        word
        for name, word in ASKED.items()
        if actions[name] == {"allow"} or (name in settings.asked_for and "allow" in actions[name])
    ]


@dataclass(frozen=True, slots=True)
class Trouble:
    """Why an external OpenCode cannot be used, and the remedy, in one sentence."""

    sentence: str
    lasting: bool
    """Whether only a person can mend it: waiting would not help."""


async def trouble(opencode: Driver, settings: Settings) -> Trouble | None:
    """Find out what answers at the address of an external OpenCode; None if it can be used."""
    where = f"OpenCode at {mask_url(settings.opencode.base_url)}"
    found, why = await examine(
        opencode.raw_response, password=opencode.has_password, seconds=HEALTH_SECONDS
    )
    if why is not None:
        return Trouble(f"{where} cannot be used: {why}", found.usable or found.lasting)
    if doubt := untested(found.version or ""):
        logger.warning(doubt)
    return None


async def check_directory(opencode: Driver, settings: Settings) -> None:
    """Raise StateError if files of this service lie in the directory that OpenCode works in."""
    if settings.workspace is not None or not settings.opencode_is_here:
        return  # checked with the settings already, or OpenCode is on another machine
    try:
        directory = Path((await opencode.paths()).directory)
    except UpstreamError:
        return
    if settings.opencode.allow_root_workspace and directory == Path(directory.anchor):
        return
    for problem in misplaced(settings, directory):
        raise StateError(str(problem))
