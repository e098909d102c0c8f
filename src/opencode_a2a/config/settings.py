"""All settings together: how they fit each other, and what is known of each.

``loading`` builds ``Settings`` from the outside world; tests and ``app`` may build one directly.
``SETTINGS`` is what flags, the reference page and messages are made from.
"""

import hashlib
import ipaddress
import os
import re
import shlex
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Self, cast, get_args, get_origin
from urllib.parse import urlsplit

from pydantic import BaseModel, SecretStr, model_validator
from pydantic.fields import FieldInfo

from opencode_a2a.config import groups
from opencode_a2a.config.values import STRICT, UNGUESSABLE, Ask, database_file


class Settings(BaseModel):
    """All settings, checked; ``sources`` and ``warnings`` say where they came from."""

    model_config = STRICT

    a2a: groups.ServiceSettings = groups.ServiceSettings()
    auth: groups.AccessSettings = groups.AccessSettings()
    opencode: groups.OpenCodeSettings = groups.OpenCodeSettings()
    tasks: groups.TaskSettings = groups.TaskSettings()
    interrupts: groups.InterruptSettings = groups.InterruptSettings()
    turn: groups.TurnSettings = groups.TurnSettings()
    stream: groups.StreamSettings = groups.StreamSettings()
    limits: groups.LimitSettings = groups.LimitSettings()
    log: groups.LogSettings = groups.LogSettings()
    client: groups.ClientSettings = groups.ClientSettings()
    environment: groups.EnvironmentSettings = groups.EnvironmentSettings()
    sources: Mapping[str, str] = {}
    """For each key that was given: the flag, variable or file that it came from."""
    warnings: tuple[str, ...] = ()

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if problems := tuple(conflicts(self)):
            raise ValueError("; ".join(map(str, problems)))
        return self

    @property
    def public_url(self) -> str:
        """The base URL for the card, without a slash at the end."""
        return self.a2a.public_url or self._url(self.a2a.host)

    @property
    def local_url(self) -> str:
        """The base URL for what runs on this machine."""
        everywhere = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # noqa: S104 - not bound here
        return self._url(everywhere.get(self.a2a.host, self.a2a.host))

    def _url(self, host: str) -> str:
        return f"http://{f'[{host}]' if ':' in host else host}:{self.a2a.port}"

    @property
    def opencode_is_here(self) -> bool:
        """Whether OpenCode runs on this machine and so can call a loopback address."""
        host = urlsplit(self.opencode.base_url).hostname or ""
        return self.opencode.managed_server or loopback(host)

    @property
    def offers_peers(self) -> bool:
        """Whether there is any agent that the `a2a_call` tool could ask."""
        a2a = self.a2a
        return bool(a2a.peers or a2a.peers_allow_urls or self.client.allowed_hosts)

    @property
    def asked_for(self) -> tuple[Ask, ...]:
        """What a managed OpenCode is told to ask for; its own configuration decides on the rest."""
        if self.opencode.ask is None and self.a2a.demo:
            return get_args(Ask)
        return self.opencode.ask or ()

    @property
    def console_answers(self) -> bool:
        """Whether OpenCode may be answered past this service, by a person at its own terminal."""
        given = self.interrupts.console_answers
        return not self.opencode.managed_server if given is None else given

    @property
    def workspace(self) -> Path | None:
        """The directory that sessions work in; None leaves it to an OpenCode of its own."""
        if self.opencode.workspace_root or not self.opencode.managed_server:
            return self.opencode.workspace_root
        try:
            return Path.cwd()
        except FileNotFoundError:
            text = "is not set, and the current directory is gone"
            raise SettingsError((Problem("OPENCODE_WORKSPACE_ROOT", text),)) from None

    @property
    def guarded_workspace(self) -> Path | None:
        """The workspace that no file of ours may be in; none if it is elsewhere, or everything."""
        workspace = self.workspace if self.opencode_is_here else None
        return None if workspace is None or _is_root(workspace) else workspace

    @property
    def database_url(self) -> str:
        """The database; two services share one only if they are told to."""
        if self.tasks.task_store_backend == "memory":
            return "sqlite://"
        return self.tasks.task_store_database_url or self.default_database_url

    @property
    def default_database_url(self) -> str:
        """The database in the state directory for the workspace, or for an OpenCode without."""
        serves = str(self.workspace or self.opencode.base_url)
        name = re.sub(r"\W+", "-", serves.rpartition("/")[2]).strip("-")[:40] or "root"
        digest = hashlib.sha256(serves.encode()).hexdigest()[:8]
        return f"sqlite:///{self.a2a.state_dir}/tasks/{name}-{digest}.db"


@dataclass(frozen=True, slots=True)
class Setting:
    """One setting as declared: what flags, pages and messages are made from."""

    group: str
    field: str
    variable: str
    info: FieldInfo

    @property
    def key(self) -> str:
        """Its name in the TOML file."""
        return f"{self.group}.{self.field}"

    @property
    def flag(self) -> str:
        return f"--{self.group}-{self.field}".replace("_", "-")

    @property
    def help(self) -> str:
        return self.info.description or ""

    @property
    def secret(self) -> bool:
        """Whether the value holds a secret, and so must not stand on a command line or be shown."""
        return _holds_secret(self.info.annotation)

    @property
    def switch(self) -> bool:
        return self.info.annotation is bool

    @property
    def choices(self) -> tuple[str, ...]:
        """The allowed values, where there is a list of them."""
        return _choices(self.info.annotation)

    @property
    def default(self) -> str:
        """The default as a person would write it; empty when there is none."""
        if self.info.default_factory:
            return self.info.default_factory.__doc__ or ""
        return show(self.info.default)


def show(value: object) -> str:
    """Return a value in the form in which it can be given; secrets are masked."""
    match value:
        case None:
            return ""
        case SecretStr():
            return "********"
        case bool():
            return str(value).lower()
        case float():
            return f"{value:g}"
        case tuple():
            return ",".join(show(item) for item in cast("tuple[object, ...]", value))
        case BaseModel():
            return value.model_dump_json(exclude_none=True)
        case _:
            return str(value)


def _holds_secret(annotation: object) -> bool:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return any(_holds_secret(info.annotation) for info in annotation.model_fields.values())
    return annotation is SecretStr or any(map(_holds_secret, get_args(annotation)))


def _choices(annotation: object) -> tuple[str, ...]:
    if get_origin(annotation) is Literal:
        return get_args(annotation)
    found = (_choices(argument) for argument in get_args(annotation))
    return next(filter(None, found), ())


GROUPS: Mapping[str, type[groups.Group]] = {
    name: kind
    for name, info in Settings.model_fields.items()
    if isinstance(kind := info.annotation, type) and issubclass(kind, groups.Group)
}
SETTINGS: Mapping[str, Setting] = {
    f"{name}.{field}": Setting(name, field, group.prefix + field.upper(), info)
    for name, group in GROUPS.items()
    for field, info in group.model_fields.items()
}
"""Every setting by its key."""
VARIABLES: Mapping[str, Setting] = {setting.variable: setting for setting in SETTINGS.values()}
"""Every setting by the name of its variable."""
CONFIG_VARIABLE = "A2A_CONFIG"


# --- checks that need more than one setting --------------------------------------------------


@dataclass(frozen=True, slots=True)
class Problem:
    """Something wrong with a setting; ``name`` is its variable, and where else it came from."""

    name: str
    text: str

    def __str__(self) -> str:
        return f"{self.name}: {self.text}"


class SettingsError(Exception):
    """The settings are wrong; ``problems`` has all there is to mend."""

    def __init__(self, problems: tuple[Problem, ...]) -> None:
        super().__init__("\n".join(map(str, problems)))
        self.problems = problems


class StateError(Exception):
    """A file of the state directory cannot be used; the text says which, and what to do."""


def loopback(host: str) -> bool:
    """Whether only this machine can reach the address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def conflicts(settings: Settings) -> Iterator[Problem]:
    yield from _access_conflicts(settings.a2a, settings.auth)
    yield from _short_tokens(settings)
    yield from _opencode_conflicts(settings.a2a, settings.opencode)
    workspace = settings.workspace
    if workspace and _is_root(workspace) and not settings.opencode.allow_root_workspace:
        yield Problem(
            "OPENCODE_WORKSPACE_ROOT",
            "the agent could change every file of this machine; choose a directory, or set "
            "OPENCODE_ALLOW_ROOT_WORKSPACE",
        )
    yield from _environment_conflicts(settings.environment, workspace)
    if settings.guarded_workspace:
        yield from misplaced(settings, settings.guarded_workspace)
    first = settings.client.polling_fallback_initial_interval_seconds
    if settings.client.polling_fallback_max_interval_seconds < first:
        yield Problem(
            "A2A_CLIENT_POLLING_FALLBACK_MAX_INTERVAL_SECONDS",
            "should not be below A2A_CLIENT_POLLING_FALLBACK_INITIAL_INTERVAL_SECONDS",
        )


def _access_conflicts(
    a2a: groups.ServiceSettings, auth: groups.AccessSettings
) -> Iterator[Problem]:
    entries, variable = auth.static_auth_credentials or (), "A2A_STATIC_AUTH_CREDENTIALS"
    if entries and not any(entry.enabled for entry in entries):
        yield Problem(variable, "should have at least one enabled entry")
    if _repeated(entry.credential_id for entry in entries):
        yield Problem(variable, "has the same credential_id twice")
    if _repeated(entry.username or entry.token for entry in entries):
        yield Problem(variable, "has the same token or username twice")
    if not loopback(a2a.host) and not auth.configured:
        remedy = f"so set A2A_BEARER_TOKEN or {variable}"
        yield Problem("A2A_HOST", f"can be reached from other machines, {remedy}")
    if a2a.protocol_version not in a2a.supported_protocol_versions:
        yield Problem("A2A_PROTOCOL_VERSION", "is not among A2A_SUPPORTED_PROTOCOL_VERSIONS")
    if _repeated(peer.name for peer in a2a.peers):
        yield Problem("A2A_PEERS", "has the same name twice")


def _short_tokens(settings: Settings) -> Iterator[Problem]:
    """Yield the tokens that others could find by trying, unless the operator allows them."""
    public = urlsplit(settings.public_url).hostname or ""
    if settings.auth.allow_short_tokens or (loopback(settings.a2a.host) and loopback(public)):
        return
    for secret in settings.auth.secrets:
        if secret.kind == "token" and secret.length < UNGUESSABLE:
            whose = f"{secret.owner}: " if secret.owner else ""
            yield Problem(
                secret.variable,
                f"{whose}a token of {secret.length} characters can be guessed; use {UNGUESSABLE} "
                "or more, or set A2A_ALLOW_SHORT_TOKENS",
            )


def _is_root(directory: Path) -> bool:
    return directory.resolve() == Path(directory.anchor)


def _repeated(values: Iterable[object]) -> bool:
    given = [value for value in values if value is not None]
    return len(set(given)) < len(given)


def _opencode_conflicts(
    a2a: groups.ServiceSettings, opencode: groups.OpenCodeSettings
) -> Iterator[Problem]:
    if opencode.provider_id and not opencode.model_id:
        yield Problem("OPENCODE_PROVIDER_ID", "should be given together with OPENCODE_MODEL_ID")
    if opencode.model_id and not opencode.provider_id:
        yield Problem("OPENCODE_MODEL_ID", "should be given together with OPENCODE_PROVIDER_ID")
    if a2a.demo and not opencode.managed_server:
        yield Problem("A2A_DEMO", "starts OpenCode, so leave OPENCODE_MANAGED_SERVER on")
    if a2a.demo and opencode.provider_id:
        yield Problem("A2A_DEMO", "uses its own model, so leave OPENCODE_PROVIDER_ID out")
    if opencode.ask is not None and not opencode.managed_server:
        remedy = "so start it with --managed, or set `permission` in its configuration"
        yield Problem("OPENCODE_ASK", f"is for an OpenCode that this program starts, {remedy}")
    root = opencode.workspace_root
    if opencode.managed_server and root and not root.is_dir():
        yield Problem("OPENCODE_WORKSPACE_ROOT", "is not a directory")


def _environment_conflicts(
    declared: groups.EnvironmentSettings, workspace: Path | None
) -> Iterator[Problem]:
    roots, variable = declared.sandbox_writable_roots, "A2A_SANDBOX_WRITABLE_ROOTS"
    if roots and declared.write_access_scope == "none":
        yield Problem(variable, "should be empty when A2A_WRITE_ACCESS_SCOPE is none")
    confined = "workspace_only" in (declared.write_access_scope, declared.sandbox_filesystem_scope)
    if confined and workspace and not all(root.is_relative_to(workspace) for root in roots):
        scope = "when the declared scope is workspace_only"
        yield Problem(variable, f"should lie in the workspace {scope}")


def within(path: Path, directory: Path) -> bool:
    """Whether a path lies in a directory, as it is written or where its links lead.

    Directories are compared as the file system knows them: a mount or another spelling of a name
    leads to the same one.
    """
    if Path(os.path.abspath(path)).is_relative_to(os.path.abspath(directory)):
        return True
    real = path.resolve()
    return any(_same(parent, directory) for parent in (real, *real.parents))


def _same(one: Path, other: Path) -> bool:
    try:
        return os.path.samefile(one, other)
    except OSError:  # one of them is not there yet
        return one == other.resolve()


def import_command(settings: Settings, file: Path) -> str:
    """Return the command that takes a database over into the default one."""
    source, target = f"sqlite:///{file.absolute()}", settings.default_database_url
    return shlex.join(["opencode-a2a", "migrate", "--from", source, "--to", target])


def import_hint(settings: Settings, file: Path) -> str:
    """Say how to take over the database that is configured, and cannot be used as it is."""
    command = import_command(settings, file)
    return f"run `{command}`, then take A2A_TASK_STORE_DATABASE_URL out"


def exposed(path: Path, workspace: Path) -> str:
    """Say why a file may not be where it is."""
    return f"{path} is in the workspace {workspace}, where the agent can read and change it"


def misplaced(settings: Settings, workspace: Path) -> Iterator[Problem]:
    """Refuse files of ours that the agent, or a caller who lists files, would come across."""
    state = settings.a2a.state_dir
    if within(state, workspace):
        remedy = (
            "serve the directory of one project (OPENCODE_WORKSPACE_ROOT), "
            "or set A2A_STATE_DIR to a directory outside"
        )
        yield Problem("A2A_STATE_DIR", f"{exposed(state, workspace)}; {remedy}")
    file = database_file(settings.database_url)
    if settings.tasks.task_store_database_url and file and within(file, workspace):
        remedy = "leave it out, or name a file outside"
        yield Problem("A2A_TASK_STORE_DATABASE_URL", f"{exposed(file, workspace)}; {remedy}")
