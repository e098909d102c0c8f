"""Keeps the password of an OpenCode from the tools of its agent, and finds out whether it is kept.

An agent that knows the password can answer its own permissions. ``opencode.managed`` and the
command ``opencode-a2a opencode`` start OpenCode with the plugin ``withhold.js``; ``app`` and
``doctor`` ask an OpenCode that somebody else started.
"""

import asyncio
import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from secrets import token_hex
from typing import Final

import orjson

from opencode_a2a.errors import ServiceError
from opencode_a2a.events import Json, JsonObject
from opencode_a2a.opencode.driver import Driver, Location
from opencode_a2a.opencode.process import OpenCodeStartError
from opencode_a2a.opencode.types import SessionDraft, ShellCall, ToolCompleted, ToolPart

PLUGIN: Final = Path(__file__).with_name("withhold.js")
PASSWORD: Final = "OPENCODE_SERVER_PASSWORD"  # noqa: S105 - the name of a variable
CONTENT: Final = "OPENCODE_CONFIG_CONTENT"
LOOK_SECONDS: Final = 60.0
UNTOLD: Final = (
    "OpenCode 2 does not say whether anything keeps its tools from seeing its password; a "
    "permission that is answered past this service ends the turn"
)
STARTED_BY_US: Final = "start it with `opencode-a2a opencode`"

_IN_ENVIRONMENT: Final = "in their environment"
_IN_PROC: Final = "in the environment of a process, under /proc"
_DIGEST: Final = "sha256sum || shasum -a 256"


def withholding(variables: Mapping[str, str], more: JsonObject | None = None) -> dict[str, str]:
    """Return variables with the plugin in OpenCode's configuration, and ``more`` over the rest."""
    try:
        theirs: Json = orjson.loads(variables.get(CONTENT) or "{}")
    except orjson.JSONDecodeError as error:
        raise OpenCodeStartError(f"{CONTENT} is not JSON: {error}") from None
    config = _merged(theirs, more or {})
    if isinstance(config, dict):
        plugins = config.get("plugin")
        config["plugin"] = [*(plugins if isinstance(plugins, list) else ()), PLUGIN.as_uri()]
    return {
        **variables,
        CONTENT: orjson.dumps(config).decode(),
        "OPENCODE_DISABLE_AUTOUPDATE": "1",
        "OPENCODE_DISABLE_MODELS_FETCH": "1",
    }


def _merged(under: Json, over: Json) -> Json:
    if not (isinstance(under, dict) and isinstance(over, dict)):
        return over
    return under | {key: _merged(under.get(key), value) for key, value in over.items()}


def processes_showing(secret: str) -> Iterator[str]:
    """Yield the name of each other process whose environment this user can read and has a secret.

    None on a system without ``/proc``.
    """
    own, wanted = str(os.getpid()), secret.encode()
    for place in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if place.name != own and wanted in (place / "environ").read_bytes():
                yield f"{place.joinpath('comm').read_text().strip()} ({place.name})"


async def not_withheld(opencode: Driver, at: Location, *, password: bool) -> str | None:
    """Return why the agent may be able to answer its own permissions, as OpenCode's settings say.

    None if its password is withheld, or if OpenCode does not say.
    """
    if not password:
        return f"it has no password; {STARTED_BY_US}"
    if not opencode.features.lists_plugins:
        return UNTOLD
    try:
        async with asyncio.timeout(LOOK_SECONDS):
            plugins = (await opencode.config(at=at)).plugin
    except (TimeoutError, ServiceError):
        return None
    if any(plugin.endswith(f"/{PLUGIN.name}") for plugin in plugins):
        return None
    return f"nothing keeps its tools from seeing its password; {STARTED_BY_US}"


async def password_exposed(opencode: Driver, at: Location, password: str) -> str | None:
    """Return where the agent's shell sees OpenCode's password, in words; None if it does not.

    Runs a command in a session of its own, which is deleted again. Raises ServiceError or
    TimeoutError if that could not be done.
    """
    salt = token_hex()
    async with asyncio.timeout(LOOK_SECONDS):
        session = await opencode.create_session(SessionDraft(title="Check of the password"), at=at)
        try:
            call = ShellCall(command=_look(salt), agent="build")
            done = await opencode.run_shell(session.id, call, at=at)
        finally:
            with suppress(ServiceError):
                await opencode.delete_session(session.id, at=at)
    printed = {
        word
        for part in done.parts
        if isinstance(part, ToolPart) and isinstance(part.state, ToolCompleted)
        for word in part.state.output.split()
    }
    if _digest(salt) not in printed:
        raise TimeoutError("the command did not run to its end")
    if "environment" in printed:
        return _IN_ENVIRONMENT
    return _IN_PROC if _digest(salt + password) in printed else None


def _look(salt: str) -> str:
    """Return a command that prints digests of the passwords in sight, and last that of the salt.

    A digest says that a password is this OpenCode's, and not that of another one on the machine.
    OpenCode expands variables in a command before it runs it, so there are none.
    """
    every = "cat /proc/[0-9]*/environ 2>/dev/null | tr '\\000' '\\n'"
    return (
        f"env | grep -q '^{PASSWORD}=.' && echo environment; "
        f"({every} | sed -n 's/^{PASSWORD}=/{salt}/p' | sort -u; echo {salt}) | "
        f"""awk '{{ print | "{_DIGEST}"; close("{_DIGEST}") }}'"""
    )


def _digest(line: str) -> str:
    return sha256(f"{line}\n".encode()).hexdigest()
