"""Load settings from flags of ``serve``, the environment, one TOML file and defaults.

Never from a ``.env`` file or the workspace. No other module reads the environment.
"""

import difflib
import os
import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple, cast
from urllib.parse import urlsplit

from pydantic import SecretStr, ValidationError

from opencode_a2a.config.groups import Group, Problem
from opencode_a2a.config.settings import (
    CONFIG_VARIABLE,
    FILE_VARIABLES,
    GROUPS,
    SETTINGS,
    VARIABLES,
    Setting,
    Settings,
    SettingsError,
    conflicts,
    exposed,
    show,
    within,
)
from opencode_a2a.config.values import (
    UNGUESSABLE,
    default_state_dir,
    is_loopback,
    loopback,
    sendable,
)
from opencode_a2a.databases import is_shared, kind_of
from opencode_a2a.rights import never_asked, unmatched

_FORMER = (
    "a2a.version",
    "a2a.expose_workspace_root_in_card",
    "a2a.fetch_files_max_count",
    "a2a.fetch_files_timeout_seconds",
    "a2a.peers_wait_seconds",
    "a2a.http_gzip_minimum_size",
    "oidc.clock_skew_seconds",
    "tasks.pending_session_claim_ttl_seconds",
    "push.timeout_seconds",
    "push.max_per_task",
    "push.max_per_principal",
    "replica.poll_seconds",
    "interrupts.interrupt_request_tombstone_ttl_seconds",
    "interrupts.cancel_abort_timeout_seconds",
    "turn.max_retry_wait_seconds",
    "client.cache_ttl_seconds",
    "client.cache_maxsize",
    "client.polling_fallback_initial_interval_seconds",
    "client.polling_fallback_max_interval_seconds",
    "client.polling_fallback_backoff_multiplier",
    "client.polling_fallback_timeout_seconds",
)
"""Settings that are constants now, by the keys that they had."""
_WORDS = {
    "missing": "is missing",
    "tuple_type": "should be an array",
    "model_type": "should be an object",
    "model_attributes_type": "should be an object",
    "union_tag_not_found": "{discriminator} is missing",
    "union_tag_invalid": "{discriminator} should be one of {expected_tags}",
}
"""Our text for errors of pydantic that speak of Python; any other error keeps pydantic's text."""


class Retired(NamedTuple):
    """A setting that is a constant now: its names, and what to say of it at the start."""

    variable: str
    flag: str
    text: str


def _retired(key: str) -> Retired:
    group, _, field = key.partition(".")
    value = show(getattr(GROUPS[group], field))
    return Retired(
        GROUPS[group].prefix + field.upper(),
        f"--{group}-{field}".replace("_", "-"),
        f"has no effect any more: it is always {value}",
    )


RETIRED: Mapping[str, Retired] = {key: _retired(key) for key in _FORMER}
"""Former settings by their keys."""
_RETIRED = {
    **{one.variable: one.text for one in RETIRED.values()},
    "OPENCODE_DIRECTORY": "is no longer read; set OPENCODE_WORKSPACE_ROOT",
    "A2A_SESSION_CACHE_TTL_SECONDS": "has no effect: the sessions of contexts are stored",
    "A2A_SESSION_CACHE_MAXSIZE": "has no effect: the sessions of contexts are stored",
    "A2A_STREAM_SSE_PING_SECONDS": "is no longer read; set A2A_STREAM_KEEPALIVE_SECONDS",
    "A2A_STREAMING": "has no effect: streaming is always on",
}
_PROVIDER_VARIABLE = re.compile(
    r"(ANTHROPIC|AZURE|CEREBRAS|COHERE|DEEPSEEK|FIREWORKS|GEMINI|GOOGLE|GOOGLE_GENERATIVE_AI|GROQ|"
    r"MISTRAL|MOONSHOT|NVIDIA|OPENAI|OPENCODE|OPENROUTER|PERPLEXITY|TOGETHER|XAI|ZHIPU)_API_KEY|"
    r"AWS_(ACCESS_KEY_ID|BEARER_TOKEN_BEDROCK|PROFILE)|CLOUDFLARE_API_TOKEN|HF_TOKEN|GITLAB_TOKEN|"
    r"GOOGLE_APPLICATION_CREDENTIALS|OPENCODE_(AUTH_CONTENT|CONFIG|CONFIG_CONTENT|CONFIG_DIR)"
)
"""Variables from which OpenCode learns of a provider."""


class _Loading:
    """The values found so far by key, with their sources and problems."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        self.environ = environ
        self.values: dict[str, object] = {"a2a.state_dir": default_state_dir(environ)}
        self.sources: dict[str, str] = {}
        self.problems: list[Problem] = []
        self.warnings: list[str] = []
        self.secret_files: dict[str, Path] = {}

    def take(self, key: str, value: object, source: str) -> None:
        self.values[key], self.sources[key] = value, source

    def report(self, name: str, text: str) -> None:
        self.problems.append(Problem(name, text))

    def problem(self, key: str, text: str) -> None:
        variable, source = SETTINGS[key].variable, self.sources.get(key)
        self.report(variable if source in (variable, None) else f"{variable} ({source})", text)

    def read_file(self, path: Path) -> None:
        try:
            tables = tomllib.loads(path.read_text())
        except OSError as error:
            self.report(CONFIG_VARIABLE, f"cannot read {path}: {error.strerror}")
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            self.report(CONFIG_VARIABLE, f"{path} is not TOML: {error}")
        else:
            given: list[tuple[str, object]] = []
            for group, table in tables.items():
                if isinstance(table, dict):
                    fields = cast("dict[str, object]", table)
                    given += [(f"{group}.{field}", value) for field, value in fields.items()]
                else:
                    given.append((group, table))
            for key, value in given:
                if key in SETTINGS:
                    self.take(key, value, str(path))
                    continue
                if key in RETIRED:
                    self.warnings.append(f"{key} ({path}): {RETIRED[key].text}")
                    continue
                name = key.rpartition(".")[2]
                elsewhere = [one.key for one in SETTINGS.values() if one.field == name]
                close = elsewhere or difflib.get_close_matches(key, SETTINGS, n=1, cutoff=0.75)
                hint = f"; did you mean {' or '.join(close)}?" if close else ""
                if elsewhere:
                    hint = f"; did you mean {name} in [{close[0].partition('.')[0]}]?"
                self.report(f"{key} ({path})", f"no such setting{hint}")

    def read_environment(self) -> None:
        # Names count in lower case too; of two spellings the one in capitals is taken.
        for name, value in sorted(self.environ.items(), reverse=True):
            if not value:
                continue  # an empty variable is how many tools write "not set"
            spelled = name.upper() if name.islower() else name
            if setting := VARIABLES.get(spelled):
                self.take(setting.key, value, name)
            elif setting := FILE_VARIABLES.get(spelled):
                self.read_secret(setting, Path(value), name)
            elif spelled in _RETIRED or spelled.startswith("A2A_OAUTH_"):
                self.warnings.append(f"{name}: {_RETIRED.get(spelled, 'has no effect')}")

    def read_secret(self, setting: Setting, path: Path, name: str) -> None:
        """Take a secret from the file that a variable names."""
        self.secret_files[name] = path
        try:
            text = path.read_text().strip()
        except OSError as error:
            self.report(name, f"cannot read {path}: {error.strerror}")
        except UnicodeDecodeError:
            self.report(name, f"{path} is not text")
        else:
            if not text:
                self.report(name, f"{path} is empty")
            elif self.environ.get(setting.variable):
                self.report(name, f"set either this or {setting.variable}")
            else:
                self.take(setting.key, text, name)

    def report_strangers(self, named: Iterable[str | None]) -> None:
        """Report misspelt settings, and warn about variables that may be meant for this service.

        OpenCode has variables of its own with the prefix ``OPENCODE_``, which change with its
        versions. With that prefix, a name that looks misspelt is only a warning, and other names
        are ignored. ``named`` are the variables that settings refer to.
        """
        known = {*VARIABLES, *FILE_VARIABLES, *_RETIRED, CONFIG_VARIABLE, *named}
        for name in sorted(self.environ.keys() - known):
            if not name.startswith(("A2A_", "OPENCODE_")) or name.startswith("A2A_OAUTH_"):
                continue
            meant = _misspelt(name)
            if meant and name.startswith("A2A_"):
                self.report(name, f"no such setting; did you mean {meant}?")
            elif meant:
                self.warnings.append(f"{name}: not a setting of this service; is it {meant}?")
            elif name.startswith("A2A_"):
                # Other programs use the prefix too; their variables must not prevent a start.
                nearest = difflib.get_close_matches(name, VARIABLES, n=1, cutoff=0)[0]
                text = f"not a setting of this service; the nearest is {nearest}"
                self.warnings.append(f"{name}: {text}")

    def build(self) -> Settings:
        """Return the valid settings; an invalid one is reported and keeps its default."""
        groups: dict[str, Group] = {}
        for name, kind in GROUPS.items():
            keys = [key for key in self.values if key.startswith(f"{name}.")]
            given = {SETTINGS[key].field: self.values[key] for key in keys}
            try:
                groups[name] = kind.model_validate(given)
            except ValidationError as error:
                for detail in error.errors(include_url=False, include_input=False):
                    field, *inner = map(str, detail["loc"])
                    if inner and inner[0].isdecimal():
                        inner[0] = f"entry {int(inner[0]) + 1}"
                    where = f"{', '.join(inner)}: " if inner else ""
                    text = detail["msg"].removeprefix("Value error, ").removeprefix("Input ")
                    text = text.partition(", unable to parse")[0]
                    text = text[:1].lower() + text[1:]
                    if own := _WORDS.get(detail["type"]):
                        text = own.format_map(detail.get("ctx", {}))
                    self.problem(f"{name}.{field}", where + text)
                    given.pop(field, None)
                groups[name] = kind.model_validate(given)
        settings = Settings.model_construct(None, **groups, sources=self.sources)
        opencode, a2a = settings.opencode, settings.a2a
        if opencode.upstreams:
            started = any(entry.managed for entry in opencode.upstreams)
            if opencode.managed_server and not started:
                self.problem("opencode.managed_server", "OPENCODE_UPSTREAMS says what is started")
            entries = list(opencode.upstreams)
            for index, entry in enumerate(entries):
                password = self.secret("opencode.upstreams", entry.name, entry.password_variable)
                if password is not None:
                    entries[index] = entry.model_copy(update={"password": password})
            opencode = opencode.model_copy(
                update={"managed_server": started, "upstreams": tuple(entries)}
            )
        if opencode.managed_server is None:
            managed = a2a.demo or "opencode.base_url" not in self.sources
            opencode = opencode.model_copy(update={"managed_server": managed})
        peers = list(a2a.peers)
        for index, peer in enumerate(peers):
            token = self.secret("a2a.peers", peer.name, peer.credential)
            try:
                if token is not None:
                    peers[index] = peer.model_copy(update={"token": sendable(token)})
            except ValueError as error:
                self.problem("a2a.peers", f"{peer.name}: the variable {peer.credential} {error}")
        a2a = a2a.model_copy(update={"peers": tuple(peers)})
        return settings.model_copy(update={"opencode": opencode, "a2a": a2a})

    def secret(self, key: str, owner: str, variable: str | None) -> SecretStr | None:
        """Return the secret in the variable that an entry of a setting names, if it names one."""
        if variable is None:
            return None
        if not self.environ.get(variable):
            self.problem(key, f"{owner}: the variable {variable} is not set")
            return None
        return SecretStr(self.environ[variable])

    def check(self, settings: Settings, file: Path | None, *, served: bool) -> None:
        """Report the conflicts between settings that are each valid."""
        workspace = settings.guarded_workspace if served else None
        if file and workspace and within(file, workspace):
            self.report(CONFIG_VARIABLE, f"{exposed(file, workspace)}; move it elsewhere")
        for name, path in self.secret_files.items():
            if workspace and within(path, workspace):
                self.report(name, f"{exposed(path, workspace)}; move it elsewhere")
        wrong = {problem.name.partition(" ")[0] for problem in self.problems}
        for conflict in conflicts(settings, served=served):
            if not any(name in str(conflict) for name in wrong):
                self.problem(VARIABLES[conflict.name].key, conflict.text)

    def advice(self, settings: Settings) -> Iterator[str]:
        """Yield warnings about settings that work but may not be intended."""
        rules = [rule.permission for rule in settings.interrupts.permission_rules]
        for name, meant in unmatched(rules):
            if meant is not None:  # else it may be an external tool: OpenCode is asked
                yield f"A2A_PERMISSION_RULES: {never_asked(name, meant)}"
        level = self.values.get("log.level")
        if isinstance(level, str) and level.upper() != settings.log.level:
            yield "A2A_LOG_LEVEL: not a level, WARNING is used"
        if settings.opencode.managed_server and "opencode.base_url" in self.sources:
            yield "OPENCODE_BASE_URL: unused, since OpenCode is managed"
        if settings.offers_peers and not settings.opencode_is_here:
            yield "A2A_PEERS: unused, since OpenCode is on another machine"
        for peer in settings.a2a.peers:
            if is_loopback(peer.url) and not settings.client.allow_private_hosts:
                remedy = "so set A2A_CLIENT_ALLOW_PRIVATE_HOSTS"
                yield f"A2A_PEERS: {peer.name} is on this machine, {remedy}"
        if settings.tls.cert_file and settings.public_url.startswith("http:"):
            yield "A2A_PUBLIC_URL: begins with http:, though the service speaks https"
        if not loopback(settings.a2a.host):
            if not settings.a2a.public_url:
                yield "A2A_PUBLIC_URL: not set, the card names the bind address"
            if not settings.auth.allowed_hosts:
                yield "A2A_ALLOWED_HOSTS: not set, any Host header is accepted"
        pooled, listen_url = settings.tasks.task_store_pooled, settings.tasks.task_store_listen_url
        if (pooled or listen_url) and not is_shared(settings.database_url):
            kept = kind_of(settings.database_url).name
            unused = "POOLED" if pooled else "LISTEN_URL"
            yield f"A2A_TASK_STORE_{unused}: unused, since tasks are kept in {kept}"

    def secret_advice(self, settings: Settings, file: Path | None) -> Iterator[str]:
        """Yield warnings about secrets that can be guessed or seen."""
        for secret in settings.auth.secrets:
            if secret.length < UNGUESSABLE:
                whose = f" of {secret.owner}" if secret.owner else ""
                yield (
                    f"{secret.variable}: the {secret.kind}{whose} is shorter than {UNGUESSABLE} "
                    "characters: it can be guessed, and guessing slows its owner down"
                )
        secrets = {key for key, setting in SETTINGS.items() if setting.secret}
        tasks = settings.tasks
        urls = {
            "task_store_database_url": tasks.task_store_database_url,
            "task_store_listen_url": tasks.task_store_listen_url,
        }
        for name, url in urls.items():
            try:
                has_password = url and is_shared(url) and urlsplit(url).password is not None
            except ValueError:  # opening the database will say what is wrong
                continue
            if has_password:
                secrets.add(key := f"tasks.{name}")
                if self.sources[key].startswith("--"):
                    others = "which everybody on this machine can see; give it as a variable"
                    yield f"A2A_{name.upper()}: has a password and is a flag, {others}"
        if file and os.name == "posix":
            from_file = [key for key, source in self.sources.items() if source == str(file)]
            # Others may read the file unless it holds a secret.
            if not secrets.isdisjoint(from_file) and file.stat().st_mode & 0o077:
                yield f"A2A_CONFIG: {file} holds secrets and others can read it"


def load(
    flags: Mapping[str, str],
    environ: Mapping[str, str],
    file: Path | None = None,
    typed: Mapping[str, str] | None = None,
    *,
    served: bool = True,
) -> Settings:
    """Return the settings from all sources; ``flags`` are by key, such as ``a2a.port``.

    ``typed`` has the flags as they were typed where that is not their usual name. A command that
    only shows settings may be run anywhere: ``served`` is false, and the workspace not looked at.

    Raises ``SettingsError`` with every problem, not only the first.
    """
    loading = _Loading(environ)
    path = file or _named_file(environ)
    if path:
        loading.read_file(path)
    loading.read_environment()
    for key, value in flags.items():
        if key in RETIRED:
            loading.warnings.append(f"{RETIRED[key].flag}: {RETIRED[key].text}")
            continue
        loading.take(key, value, (typed or {}).get(key) or SETTINGS[key].flag)
    settings = loading.build()
    named = [peer.credential for peer in settings.a2a.peers]
    named += [entry.password_variable for entry in settings.opencode.upstreams]
    loading.report_strangers(named)
    loading.check(settings, path, served=served)
    if loading.problems:
        raise SettingsError(tuple(loading.problems))
    loading.warnings += loading.advice(settings)
    loading.warnings += loading.secret_advice(settings, path)
    return settings.model_copy(update={"warnings": tuple(loading.warnings)})


def load_for_calls(environ: Mapping[str, str]) -> Settings:
    """Return the settings for calling an agent: ``client`` and the state directory.

    The settings of a service, and problems with them, do not matter to a caller, who may be in a
    directory that no service could work in.
    """
    ours = ("A2A_CLIENT_", "A2A_STATE_DIR", "XDG_STATE_HOME", "HOME")
    loading = _Loading({name: environ[name] for name in environ if name.startswith(ours)})
    if path := _named_file(environ):
        loading.read_file(path)
        theirs = [key for key in loading.sources if not key.startswith(("client.", "a2a.state_"))]
        for key in theirs:
            del loading.values[key], loading.sources[key]
    loading.read_environment()
    settings = loading.build()
    loading.report_strangers(())
    for conflict in settings.client.conflicts():
        loading.problem(VARIABLES[conflict.name].key, conflict.text)
    if loading.problems:
        raise SettingsError(tuple(loading.problems))
    return settings


def load_for_opencode(environ: Mapping[str, str], file: Path | None = None) -> Settings:
    """Return the settings for starting an OpenCode that runs by itself.

    Conflicts between the settings of a service do not matter to it: it may be in a directory that
    no service could work in.
    """
    loading = _Loading(environ)
    if path := file or _named_file(environ):
        loading.read_file(path)
    loading.read_environment()
    settings = loading.build()
    if loading.problems:
        raise SettingsError(tuple(loading.problems))
    return settings


def default_file(environ: Mapping[str, str]) -> Path | None:
    """Return the path of the user's own settings file; None without a home directory."""
    home, config = environ.get("HOME"), environ.get("XDG_CONFIG_HOME")
    base = Path(config) if config else Path(home) / ".config" if home else None
    return base and base / "opencode-a2a" / "config.toml"


def _named_file(environ: Mapping[str, str]) -> Path | None:
    if environ.get(CONFIG_VARIABLE):
        return Path(environ[CONFIG_VARIABLE])
    own = default_file(environ)
    return own if own and os.path.isfile(own) else None  # false also where it cannot be looked for


def provider_configured(settings: Settings, environ: Mapping[str, str]) -> bool:
    """Whether OpenCode would find a provider: a key, a login, or a configuration.

    That is the configuration of the user, of the workspace, or of a directory above it.
    """
    variables = (name for name, value in environ.items() if value)
    if settings.opencode.provider_id or any(map(_PROVIDER_VARIABLE.fullmatch, variables)):
        return True
    home = Path(environ["HOME"]) if environ.get("HOME") else Path.home()
    data = Path(environ.get("XDG_DATA_HOME") or home / ".local" / "share") / "opencode"
    config = Path(environ.get("XDG_CONFIG_HOME") or home / ".config") / "opencode"
    workspace = Path(settings.workspace or ".").absolute()
    above = (workspace, *workspace.parents)
    folders = (config, *above, *(folder / ".opencode" for folder in above))
    files = [folder / name for folder in folders for name in ("opencode.json", "opencode.jsonc")]
    files += [config / "config.json"]
    files += [Path(environ["OPENCODE_CONFIG"])] if environ.get("OPENCODE_CONFIG") else []
    # OpenCode creates an empty configuration by itself, so the file alone proves nothing.
    return _mentions(data / "auth.json", '"type"') or any(
        _mentions(file, '"provider"', '"model"') for file in files
    )


def _mentions(file: Path, *words: str) -> bool:
    try:
        text = file.read_text(errors="replace")
    except OSError:
        return False
    return any(word in text for word in words)


def _misspelt(name: str) -> str | None:
    """Return the setting that was probably meant: a few letters off, or its words reordered.

    One letter in four may be wrong, not counting the prefix that foreign names share with ours.
    """
    words = sorted(name.split("_"))
    length = len(name.partition("_")[2])
    names = (*VARIABLES, CONFIG_VARIABLE)
    for known in names:
        if sorted(known.split("_")) == words:
            return known
    distance, nearest = min((_distance(name, known), known) for known in names)
    return nearest if distance <= max(1, length // 4) else None


def _distance(one: str, other: str) -> int:
    """Return the number of letters to add, remove, change or swap with the next."""
    above: list[int] = []
    row = list(range(len(other) + 1))
    for i, a in enumerate(one, 1):
        before, above, row = above, row, [i]
        for j, b in enumerate(other, 1):
            best = min(above[j] + 1, row[j - 1] + 1, above[j - 1] + (a != b))
            if i > 1 and j > 1 and a == other[j - 2] and one[i - 2] == b:
                best = min(best, before[j - 2] + 1)
            row.append(best)
    return row[-1]
