"""What an operator is told about OpenCode when the service starts.

Whether it can be used, which model works there, and what it does without asking. ``app`` asks, and
prints the lines.
"""

import asyncio
from pathlib import Path

import structlog

from opencode_a2a.config import Settings, StateError, misplaced
from opencode_a2a.errors import ServiceError, UpstreamError, UpstreamUnreachableError
from opencode_a2a.opencode.client import Location, OpenCode
from opencode_a2a.opencode.managed import too_old, untested
from opencode_a2a.opencode.process import OpenCodeStartError
from opencode_a2a.opencode.types import Agent
from opencode_a2a.telemetry import mask_url

logger = structlog.get_logger(__name__)

HEALTH_SECONDS = 2.0
FACTS_SECONDS = 30.0
ASKED = {"bash": "commands", "edit": "edits", "webfetch": "web requests"}
"""The permissions of OpenCode that are told at the start."""


async def facts(opencode: OpenCode, settings: Settings) -> list[str]:
    """Return what the operator should know of the model and of what it may do unasked."""
    own, at = settings.opencode, Location(str(settings.workspace) if settings.workspace else None)
    try:
        async with asyncio.timeout(FACTS_SECONDS):
            config = await opencode.config(at=at)
            connected = await opencode.connected_providers(at=at)
            agents = {agent.name: agent for agent in await opencode.agents(at=at)}
    except (TimeoutError, ServiceError) as error:
        logger.warning("OpenCode could not be asked for its model", error=type(error).__name__)
        return []
    agent = agents.get(own.agent or config.default_agent or "build")
    model = config.model or ""
    if own.provider_id and own.model_id:
        model = f"{own.provider_id}/{own.model_id}"
    elif agent is not None and agent.model is not None:
        model = f"{agent.model.provider_id}/{agent.model.model_id}"
    candidates = [model] if model else [f"{p}/{m}" for p, m in connected.default.items()]
    shown = [f"{name} (hosted by OpenCode)" if _hosted(name) else name for name in candidates]
    lines = [f"model    {' or '.join(shown) if shown else 'none: no provider is set up'}"]
    unasked = _unasked(agent, settings) if agent else []
    asked = [word for name, word in ASKED.items() if agent and "ask" in agent.actions(name)]
    if asked := [word for word in asked if word not in unasked]:
        lines.append(f"asks     before {_listed(asked)}")
    if unasked:
        remedy = "; --ask makes it ask" if own.managed_server and not settings.asked_for else ""
        lines.append(f"unasked  {_listed(unasked)}{remedy}")
    # The model hands work to other agents, and a project may have given these more freedom.
    freer = {
        one.name: more
        for one in agents.values()
        if not one.hidden and (more := set(_unasked(one, settings)) - {*unasked})
    }
    if freer:
        words = [word for word in ASKED.values() if any(word in more for more in freer.values())]
        names = f"agent{'s' if len(freer) > 1 else ''} {_listed(sorted(freer))}"
        lines.append(
            f"unasked  {_listed(words)} by the {names}; OpenCode's configuration allows it"
        )
    return lines


def _unasked(agent: Agent, settings: Settings) -> list[str]:
    """Return what an agent does unasked; where it was told to ask, an exception counts too."""
    found = {name: agent.actions(name) for name in ASKED}
    return [
        word
        for name, word in ASKED.items()
        if found[name] == {"allow"} or (name in settings.asked_for and "allow" in found[name])
    ]


def _hosted(model: str) -> bool:
    """Whether a model is one that OpenCode's makers run: what is sent to it leaves this machine."""
    return model.partition("/")[0] in ("opencode", "opencode-go")


def _listed(words: list[str]) -> str:
    return f"{', '.join(words[:-1])} and {words[-1]}" if words[1:] else words[0]


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
        return f"{where} does not work: {error.message}. Version 1.1 or later is needed."
    if reason := too_old(version):
        raise OpenCodeStartError(f"{where} cannot be used: {reason}")
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
