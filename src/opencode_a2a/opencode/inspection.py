"""Asks OpenCode what the operator should know at the start of the service.

``app`` logs the answers: whether OpenCode can be used, which model works there, what it does
without asking for permission, and whether files of this service lie in its directory.
"""

import asyncio
from dataclasses import dataclass
from pathlib import Path

import structlog

from opencode_a2a.config import Settings, StateError, misplaced
from opencode_a2a.errors import ServiceError, UpstreamError, UpstreamUnreachableError
from opencode_a2a.opencode.client import Location, OpenCode
from opencode_a2a.opencode.process import UnsupportedOpenCodeError
from opencode_a2a.opencode.types import Agent
from opencode_a2a.opencode.versions import another_api, untested, unusable
from opencode_a2a.rights import never_asked, outside, unmatched
from opencode_a2a.telemetry import mask_url
from opencode_a2a.terminal import listed

logger = structlog.get_logger(__name__)

HEALTH_SECONDS = 2.0
FACTS_SECONDS = 30.0
ASKED = {"bash": "commands", "edit": "edits", "webfetch": "web requests"}
"""The permissions of OpenCode that the banner mentions, with the words for them."""


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
    """Warnings: agents with more freedom, rules without effect."""


async def facts(opencode: OpenCode, settings: Settings) -> Facts | None:
    """Ask OpenCode for its ``Facts``; None if it does not answer."""
    own, at = settings.opencode, Location(str(settings.workspace) if settings.workspace else None)
    try:
        async with asyncio.timeout(FACTS_SECONDS):
            config = await opencode.config(at=at)
            connected = await opencode.connected_providers(at=at)
            agents = {agent.name: agent for agent in await opencode.agents(at=at)}
    except (TimeoutError, ServiceError) as error:
        logger.warning("could not ask OpenCode for its model", error=type(error).__name__)
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
        other.name: more
        for other in agents.values()
        if not other.hidden and (more := set(_unasked(other, settings)) - {*unasked})
    }
    if freer:
        words = [word for word in ASKED.values() if any(word in more for more in freer.values())]
        names = f"agent{'s' if len(freer) > 1 else ''} {listed(sorted(freer))}"
        notes.append(f"{listed(words)} unasked by the {names}; OpenCode's configuration allows it")
    hosted = any(name.partition("/")[0] in ("opencode", "opencode-go") for name in candidates)
    return Facts(
        " or ".join(candidates) or None,
        hosted,
        [word for word in asked if word not in unasked],
        unasked,
        notes,
    )


async def _ineffective(opencode: OpenCode, settings: Settings, at: Location) -> list[str]:
    """Return a note for each permission rule that matches no tool of OpenCode.

    Rules that obviously misspell a built-in permission were reported when settings were loaded.
    """
    rules = [rule.permission for rule in settings.interrupts.permission_rules]
    unknown = [name for name, meant in unmatched(rules) if meant is None]
    if not unknown:
        return []
    try:
        async with asyncio.timeout(FACTS_SECONDS):
            tools = outside(await opencode.tool_ids(at=at), await opencode.mcp_status(at=at))
    except (TimeoutError, ServiceError) as error:
        logger.warning("could not ask OpenCode for its tools", error=type(error).__name__)
        return []
    return [
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


async def trouble(opencode: OpenCode, settings: Settings) -> str | None:
    """Return why OpenCode cannot be used and the remedy, in one sentence; None if it can."""
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
        if health := await opencode.health_of_2():
            raise UnsupportedOpenCodeError(
                f"{where} cannot be used: {another_api(health.version)}"
            ) from None
        return f"{where} does not work: {error.message}. Version 1.1 or later is needed."
    if reason := unusable(version):
        raise UnsupportedOpenCodeError(f"{where} cannot be used: {reason}")
    if doubt := untested(version):
        logger.warning(doubt)
    return None


async def check_directory(opencode: OpenCode, settings: Settings) -> None:
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
