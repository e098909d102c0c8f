"""How OpenCode is started: its command, its address, and the environment it may see.

``opencode.process`` starts it so; ``app`` fills in a ``Launch`` from the settings. OpenCode gets
the environment of this program without its settings and secrets. Nothing here starts anything.
"""

import hashlib
import os
import shutil
import socket
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Final

import orjson

from opencode_a2a.events import Json, JsonObject
from opencode_a2a.opencode.versions import INSTALL

INSTALL_HINT: Final = f"install it with {INSTALL}, or set OPENCODE_COMMAND to its path"
USERNAME: Final = "opencode"
MARKER: Final = "OPENCODE_A2A_INSTANCE"
"""In the environment of OpenCode and of all that it starts: ``<our pid>.<random>``."""


_WITHHOLD: Final = Path(__file__).with_name("withhold.js").as_uri()
WITHHELD: Final = "opencode-a2a: the password is withheld from tools"
"""What that plugin prints when it has done its work."""


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


_BASIC: Final = (
    *("PATH", "HOME", "USER", "LOGNAME", "SHELL", "TERM", "TZ", "TMPDIR", "LANG"),
    *("LANGUAGE", "LC_*", "XDG_*"),
)
"""What no program can do without, whatever else is passed."""
_OWN: Final = ("A2A_*", "OPENCODE_A2A_*", "OPENCODE_SERVER_USERNAME", "OPENCODE_SERVER_PASSWORD")


_PASSING: Final = (
    *("_", "PWD", "OLDPWD", "SHLVL", "TERM*", "COLORTERM", "COLUMNS", "LINES", "WINDOWID"),
    *("SSH_*", "XDG_SESSION_*", "XDG_RUNTIME_DIR", "DBUS_*", "DISPLAY", "WAYLAND_*", "GPG_TTY"),
    *("TMUX*", "STY", "VSCODE_*", "INVOCATION_ID", "JOURNAL_STREAM", "SYSTEMD_*", "NOTIFY_SOCKET"),
    *("LISTEN_*", "MEMORY_PRESSURE_*", "WATCHDOG_*"),
)
"""Variables of one terminal or one run of a unit: another value is no other configuration."""


def passed_environment(
    source: Mapping[str, str], withheld: Collection[str] = (), only: Sequence[str] = ("*",)
) -> dict[str, str]:
    """Return what OpenCode and its tools may see: what matches ``only``, and nothing of ours."""
    return {
        name: value
        for name, value in source.items()
        if _matches(name, (*only, *_BASIC)) and not _matches(name, _OWN) and name not in withheld
    }


def _matches(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """How OpenCode is to be started."""

    environment: Mapping[str, str]
    """Its variables, to which those are added that make it ours; see ``passed_environment``."""
    command: str = "opencode"
    host: str = "127.0.0.1"
    port: int | None = None
    startup_timeout: float = 20.0
    state: Path | None = None
    """A directory for its home and data; without one, those of the user are used."""
    directory: Path | None = None
    """Where it runs, and the directory that it has to be usable in."""
    config: JsonObject = field(default_factory=dict[str, Json])
    """Configuration that goes over all of OpenCode's own files. Every tool can read it."""

    def variables(self, password: str, marker: str) -> dict[str, str]:
        """Return the whole environment of the process."""
        variables = dict(self.environment)
        if self.state is not None:
            variables |= _own_directories(self.state)
        return variables | {
            "OPENCODE_CONFIG_CONTENT": self._config(variables),
            "OPENCODE_DISABLE_AUTOUPDATE": "1",
            "OPENCODE_DISABLE_MODELS_FETCH": "1",
            "OPENCODE_SERVER_USERNAME": USERNAME,
            "OPENCODE_SERVER_PASSWORD": password,
            MARKER: marker,
        }

    def digest(self) -> str:
        """Return what tells this way of starting OpenCode from others, its version included."""
        program = os.path.realpath(find_command(self.command, self.environment.get("PATH")))
        found = os.stat(program)
        variables = self.variables("", "")
        parts = (
            *(program, str(found.st_size), str(found.st_mtime_ns)),
            *(self.host, str(self.port), str(self.directory)),
            *(f"{k}={v}" for k, v in sorted(variables.items()) if not _matches(k, _PASSING)),
        )
        return hashlib.sha256("\0".join(parts).encode(errors="surrogateescape")).hexdigest()

    def _config(self, variables: Mapping[str, str]) -> str:
        try:
            theirs: Json = orjson.loads(variables.get("OPENCODE_CONFIG_CONTENT", "{}"))
        except orjson.JSONDecodeError as error:
            raise OpenCodeStartError(f"OPENCODE_CONFIG_CONTENT is not JSON: {error}") from None
        merged = _merged(theirs, self.config)
        if isinstance(merged, dict):
            plugins = merged.get("plugin")
            merged["plugin"] = [*(plugins if isinstance(plugins, list) else ()), _WITHHOLD]
        return orjson.dumps(merged).decode()


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
