"""How OpenCode is started: its command, its address, and the environment it may see.

``upstream.process`` starts it so; ``cli`` and ``app`` fill in a ``Launch`` from the settings.
OpenCode gets what it and its providers need, and none of this program's secrets. Nothing here
starts anything.
"""

import os
import re
import shutil
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import orjson

from opencode_a2a.events import Json, JsonObject

INSTALL_HINT: Final = (
    "install it with `npm install -g opencode-ai@1.18.33`, or set OPENCODE_COMMAND to its path"
)
USERNAME: Final = "opencode"
MARKER: Final = "OPENCODE_A2A_INSTANCE"
"""In the environment of OpenCode and of all that it starts: ``<our pid>.<random>``."""


class OpenCodeStartError(Exception):
    """OpenCode is not there, or did not come up; the text says what it said last."""

    def __init__(self, reason: str, command: Sequence[str] = (), output: Sequence[str] = ()):
        self.reason = reason
        self.command = tuple(command)
        self.output = tuple(output)
        lines = [reason]
        if command:
            lines.append(f"command: {' '.join(command)}")
        lines += [f"  {line}" for line in output]
        super().__init__("\n".join(lines))


def find_command(command: str, path: str | None = None) -> str:
    """Return the absolute path of an executable, searched for in ``path``."""
    found = shutil.which(os.path.expanduser(command), path=path)
    if found is None:
        raise OpenCodeStartError(f"OpenCode's command {command!r} was not found; {INSTALL_HINT}")
    return os.path.abspath(found)


def free_port(host: str) -> int:
    """Return a port that was free a moment ago. OpenCode itself would take 4096 for 0."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.bind((host, 0))
        port: int = probe.getsockname()[1]
    return port


_PASSED: Final = re.compile(
    r"""
      PATH|HOME|USER|LOGNAME|SHELL|TERM|COLORTERM|TZ|TMPDIR|LANG|LANGUAGE|LC_\w+|XDG_\w+
    | (?:HTTPS?|ALL|NO)_PROXY
    | SSL_CERT_(?:FILE|DIR)|NODE_EXTRA_CA_CERTS|CURL_CA_BUNDLE|REQUESTS_CA_BUNDLE
    | SSH_AUTH_SOCK|GIT_\w+|NPM_CONFIG_\w+
    | \w+_(?:API_?KEY|API_TOKEN|ACCESS_TOKEN|ACCESS_KEY|SERVICE_KEY|GATEWAY_(?:KEY|TOKEN)|PAT)
    | (?:GITHUB|GITLAB|HF|FRIENDLI|DATABRICKS|MODAL_PROXY)_TOKEN
    | (?:AWS|AZURE|GOOGLE|VERTEX|CLOUDFLARE|SNOWFLAKE|AICORE|DATABRICKS|WATSONX)_\w+
    | (?:ANTHROPIC|OPENAI|OLLAMA|GEMINI|MISTRAL|OPENROUTER|INFOMANIAK|NEON|PRIVATEMODE)_\w+
    | (?:ABLIT|ZENIFRA_AI)_KEY
    | OPENCODE_\w+
    """,
    re.VERBOSE | re.IGNORECASE,
)
_WITHHELD: Final = re.compile(
    r"""
      A2A_\w*
    | OPENCODE_(?:A2A_\w+|MANAGED_SERVER\w*|BASE_URL|COMMAND|STARTUP_TIMEOUT|TIMEOUT\w*)
    | OPENCODE_(?:WORKSPACE_ROOT|PROVIDER_ID|MODEL_ID|DIRECTORY|AGENT|SYSTEM|VARIANT)
    | OPENCODE_(?:MAX_CONCURRENT_\w+|AUTH_USERNAME|AUTH_PASSWORD|SERVER_USERNAME|SERVER_PASSWORD)
    """,
    re.VERBOSE | re.IGNORECASE,
)


def passed_environment(source: Mapping[str, str]) -> dict[str, str]:
    """Return what OpenCode may see of an environment: providers' keys, none of our settings."""
    return {
        name: value
        for name, value in source.items()
        if _PASSED.fullmatch(name) and not _WITHHELD.fullmatch(name)
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """How OpenCode is to be started."""

    environment: Mapping[str, str]
    """Where its variables are taken from, under the rules of ``passed_environment``."""
    command: str = "opencode"
    host: str = "127.0.0.1"
    port: int | None = None
    startup_timeout: float = 20.0
    state: Path | None = None
    """A directory for its home and data; without one, those of the user are used."""
    directory: Path | None = None
    """Where it runs, and the directory that it has to be usable in."""
    config: JsonObject | None = None
    """Configuration that goes over all of OpenCode's own files."""

    def variables(self, password: str, marker: str) -> dict[str, str]:
        """Return the whole environment of the process."""
        variables = passed_environment(self.environment)
        if self.state is not None:
            variables |= _own_directories(self.state)
        if self.config is not None:
            variables["OPENCODE_CONFIG_CONTENT"] = self._config(variables)
        return variables | {
            "OPENCODE_DISABLE_AUTOUPDATE": "1",
            "OPENCODE_DISABLE_MODELS_FETCH": "1",
            "OPENCODE_SERVER_USERNAME": USERNAME,
            "OPENCODE_SERVER_PASSWORD": password,
            MARKER: marker,
        }

    def _config(self, variables: Mapping[str, str]) -> str:
        try:
            theirs: Json = orjson.loads(variables.get("OPENCODE_CONFIG_CONTENT", "{}"))
        except orjson.JSONDecodeError as error:
            raise OpenCodeStartError(f"OPENCODE_CONFIG_CONTENT is not JSON: {error}") from None
        return orjson.dumps(_merged(theirs, self.config)).decode()


def _own_directories(state: Path) -> dict[str, str]:
    places = {"HOME": state / "home"} | {
        f"XDG_{kind}_HOME": state / kind.lower() for kind in ("DATA", "CONFIG", "STATE", "CACHE")
    }
    for place in places.values():
        place.mkdir(mode=0o700, parents=True, exist_ok=True)
    return {name: str(place.absolute()) for name, place in places.items()}


def _merged(under: Json, over: Json) -> Json:
    if not (isinstance(under, dict) and isinstance(over, dict)):
        return over
    return under | {key: _merged(under.get(key), value) for key, value in over.items()}
