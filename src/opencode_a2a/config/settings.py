"""All settings together: what follows from several of them, and the checks between them.

``load`` builds a ``Settings`` from the outside world; tests may build one directly. Flags,
messages and the reference page are made from ``SETTINGS``. Nothing here reads the environment.
"""

import hashlib
import importlib.util
import json
import os
import re
import shlex
import socket
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Literal, Self, cast, get_args, get_origin
from urllib.parse import urlsplit

from pydantic import BaseModel, SecretStr, model_validator
from pydantic.fields import FieldInfo

from opencode_a2a.config.groups import (
    AccessSettings,
    ClientSettings,
    EnvironmentSettings,
    Group,
    InterruptSettings,
    LimitSettings,
    LogSettings,
    OidcSettings,
    OpenCodeSettings,
    PushSettings,
    ReplicaSettings,
    ServiceSettings,
    SigningSettings,
    StreamSettings,
    TaskSettings,
    TlsSettings,
    TurnSettings,
)
from opencode_a2a.config.values import (
    MOST_NAME,
    STRICT,
    UNGUESSABLE,
    Ask,
    UpstreamEntry,
    loopback,
)
from opencode_a2a.databases import database_file, is_shared
from opencode_a2a.ids import MAIN


class Settings(BaseModel):
    """All settings, checked against each other."""

    model_config = STRICT

    a2a: ServiceSettings = ServiceSettings()
    auth: AccessSettings = AccessSettings()
    tls: TlsSettings = TlsSettings()
    signing: SigningSettings = SigningSettings()
    oidc: OidcSettings = OidcSettings()
    opencode: OpenCodeSettings = OpenCodeSettings()
    tasks: TaskSettings = TaskSettings()
    push: PushSettings = PushSettings()
    replica: ReplicaSettings = ReplicaSettings()
    interrupts: InterruptSettings = InterruptSettings()
    turn: TurnSettings = TurnSettings()
    stream: StreamSettings = StreamSettings()
    limits: LimitSettings = LimitSettings()
    log: LogSettings = LogSettings()
    client: ClientSettings = ClientSettings()
    environment: EnvironmentSettings = EnvironmentSettings()
    upstream: str = MAIN
    """The name of the OpenCode that these settings are for; see ``fleet``."""
    sources: Mapping[str, str] = {}
    """The flag, variable or file of each key that was given."""
    warnings: tuple[str, ...] = ()

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if problems := tuple(conflicts(self)):
            raise ValueError("; ".join(map(str, problems)))
        return self

    @property
    def public_url(self) -> str:
        """The base URL in the card: with the path prefix, without a trailing slash."""
        url, prefix = self.a2a.public_url or self._url(self.a2a.host), self.a2a.path_prefix
        return url if urlsplit(url).path.endswith(prefix) else url + prefix

    @property
    def local_url(self) -> str:
        """The base URL for callers on this machine."""
        everywhere = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # noqa: S104 - not bound here
        return self._url(everywhere.get(self.a2a.host, self.a2a.host))

    def _url(self, host: str) -> str:
        scheme = "https" if self.tls.cert_file else "http"
        return f"{scheme}://{f'[{host}]' if ':' in host else host}:{self.a2a.port}"

    @property
    def fleet(self) -> tuple[tuple[UpstreamEntry, "Settings"], ...]:
        """Every OpenCode behind the service, each with the settings that apply to it."""
        own = self.opencode
        if not own.upstreams:
            kind = {"managed": 1} if own.managed_server else {"url": own.base_url}
            return ((UpstreamEntry.model_validate({"name": self.upstream, **kind}), self),)
        found: list[tuple[UpstreamEntry, Settings]] = []
        for entry in own.upstreams:
            count = entry.managed or 1
            for number in range(1, count + 1):
                name = f"{entry.name}-{number}" if count > 1 else entry.name
                # Only this replica can reach it, also after a restart: its name says so.
                here = entry.managed or (not entry.shared and _is_loopback(entry.url or ""))
                if here and is_shared(self.database_url):
                    name = f"{name}@{self.replica_name}"
                opencode = own.model_copy(
                    update={
                        "upstreams": (),
                        "base_url": entry.url or own.base_url,
                        "auth_username": entry.username,
                        "auth_password": entry.password,
                        "managed_server": entry.managed is not None,
                        "max_concurrent_streams": entry.max_turns or own.max_concurrent_streams,
                        "workspace_root": self.workspace,
                    }
                )
                settings = self.model_copy(update={"opencode": opencode, "upstream": name})
                found.append((entry.model_copy(update={"name": name}), settings))
        return tuple(found)

    @property
    def knows_callers(self) -> bool:
        """Whether callers are configured; if not, a token is generated."""
        return self.auth.configured or self.oidc.issuer is not None

    @property
    def opencode_is_here(self) -> bool:
        """Whether OpenCode runs on this machine and so can call a loopback address."""
        urls = [one.url for one in self.opencode.upstreams] or [self.opencode.base_url]
        return self.opencode.managed_server or any(_is_loopback(url or "") for url in urls)

    @property
    def offers_peers(self) -> bool:
        """Whether the `a2a_call` tool may call any agent."""
        a2a = self.a2a
        return bool(a2a.peers or a2a.peers_allow_urls or self.client.allowed_hosts)

    @property
    def asked_for(self) -> tuple[Ask, ...]:
        """What a managed OpenCode must ask permission for; its configuration decides the rest."""
        if self.opencode.ask is None and self.a2a.demo:
            return get_args(Ask)
        return self.opencode.ask or ()

    @property
    def console_answers(self) -> bool:
        """Whether answers given to OpenCode directly, such as at its own terminal, count."""
        given = self.interrupts.console_answers
        return not self.opencode.managed_server if given is None else given

    @property
    def workspace(self) -> Path | None:
        """The directory that sessions work in; None: the one OpenCode was started in."""
        if self.opencode.workspace_root or not self.opencode.managed_server:
            return self.opencode.workspace_root
        if self.a2a.demo:
            # A sample project, so that trying the demo changes no files that matter.
            return self.a2a.state_dir / "demo-workspace"
        try:
            return Path.cwd()
        except FileNotFoundError:
            text = "is not set, and the current directory is gone"
            raise SettingsError.of("OPENCODE_WORKSPACE_ROOT", text) from None

    @property
    def guarded_workspace(self) -> Path | None:
        """The workspace that must hold no file of ours; None if it is remote, or is ``/``."""
        workspace = self.workspace if self.opencode_is_here else None
        return None if workspace is None or _is_root(workspace) else workspace

    @property
    def database_url(self) -> str:
        """The database; two services share one only if both are configured to."""
        if self.tasks.task_store_backend == "memory":
            return "sqlite://"
        return self.tasks.task_store_database_url or self.default_database_url

    @property
    def replica_name(self) -> str:
        return self.replica.name or f"{socket.gethostname()}:{self.a2a.port}"

    @property
    def default_database_url(self) -> str:
        """The SQLite file in the state directory for this workspace, or for this OpenCode."""
        elsewhere = "upstreams" if self.opencode.upstreams else self.opencode.base_url
        serves = str(self.workspace or elsewhere)
        name = re.sub(r"\W+", "-", serves.rpartition("/")[2]).strip("-")[:40] or "root"
        digest = hashlib.sha256(serves.encode()).hexdigest()[:8]
        return f"sqlite:///{self.a2a.state_dir}/tasks/{name}-{digest}.db"


# Every setting as declared


@dataclass(frozen=True, slots=True)
class Setting:
    """One declared setting, from which flags, pages and messages are made."""

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
        """Whether the value holds a secret, which must not be shown or be given as a flag."""
        return _holds_secret(self.info.annotation)

    @property
    def switch(self) -> bool:
        return bool in (self.info.annotation, *get_args(self.info.annotation))

    @property
    def choices(self) -> tuple[str, ...]:
        """The allowed values, if they are enumerated."""
        return _choices(self.info.annotation)

    @property
    def default(self) -> str:
        """The default as a user would write it; empty if there is none."""
        if self.info.default_factory:
            return self.info.default_factory.__doc__ or ""
        return show(self.info.default)


def show(value: object) -> str:
    """Return a value as a user would write it; secrets are masked."""
    match value:
        case None:
            return ""
        case SecretStr():
            return "********"
        case bool():
            return str(value).lower()
        case float():
            return f"{value:g}"
        case dict():
            return json.dumps(value)
        case tuple():
            return ",".join(show(item) for item in cast("tuple[object, ...]", value))
        case BaseModel():
            return value.model_dump_json(exclude_none=True)
        case str() if is_shared(value):
            masked = re.sub(r"://([^:/@]*):.*@", r"://\1:********@", value)
            return re.sub(r"(password=)[^&]*", r"\1********", masked)
        case _:
            return str(value)


def _holds_secret(annotation: object) -> bool:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return any(_holds_secret(info.annotation) for info in annotation.model_fields.values())
    return annotation is SecretStr or any(map(_holds_secret, get_args(annotation)))


def _choices(annotation: object) -> tuple[str, ...]:
    if get_origin(annotation) is Literal:
        return get_args(annotation)
    if isinstance(annotation, type) and issubclass(annotation, StrEnum):
        return tuple(annotation)
    found = (_choices(argument) for argument in get_args(annotation))
    return next(filter(None, found), ())


GROUPS: Mapping[str, type[Group]] = {
    name: kind
    for name, info in Settings.model_fields.items()
    if isinstance(kind := info.annotation, type) and issubclass(kind, Group)
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


# Checks that need more than one setting


@dataclass(frozen=True, slots=True)
class Problem:
    """A problem with a setting; ``name`` is its variable, and its source if that is another."""

    name: str
    text: str

    def __str__(self) -> str:
        return f"{self.name}: {self.text}"


class SettingsError(Exception):
    """The settings are wrong; ``problems`` lists every problem."""

    def __init__(self, problems: tuple[Problem, ...]) -> None:
        super().__init__("\n".join(map(str, problems)))
        self.problems = problems

    @classmethod
    def of(cls, variable: str, text: str) -> Self:
        """Return the error for one setting."""
        return cls((Problem(variable, text),))


class StateError(Exception):
    """A file of the state directory cannot be used; the text names it and the remedy."""


def conflicts(settings: Settings) -> Iterator[Problem]:
    """Yield the conflicts between settings that are each valid."""
    yield from _access_conflicts(settings)
    yield from _oidc_conflicts(settings)
    public = urlsplit(settings.public_url).hostname or ""
    only_here = loopback(settings.a2a.host) and loopback(public)
    if not only_here and not settings.auth.allow_short_tokens:
        for secret in settings.auth.secrets:
            if secret.kind == "token" and secret.length < UNGUESSABLE:
                whose = f"{secret.owner}: " if secret.owner else ""
                yield Problem(
                    secret.variable,
                    f"{whose}a token of {secret.length} characters can be guessed; use "
                    f"{UNGUESSABLE} or more, or set A2A_ALLOW_SHORT_TOKENS",
                )
    yield from _signing_conflicts(settings.a2a, settings.signing)
    tls = settings.tls
    alone = {
        "A2A_TLS_KEY_FILE": tls.key_file,
        "A2A_TLS_KEY_PASSWORD": tls.key_password,
        "A2A_TLS_CLIENT_CA_FILE": tls.client_ca_file,
    }
    for variable, given in alone.items():
        if given and not tls.cert_file:
            yield Problem(variable, "should come with A2A_TLS_CERT_FILE")
    yield from _opencode_conflicts(settings.a2a, settings.opencode)
    workspace = settings.workspace
    if workspace and _is_root(workspace) and not settings.opencode.allow_root_workspace:
        yield Problem(
            "OPENCODE_WORKSPACE_ROOT",
            "the agent could change every file of this machine; choose a directory, or set "
            "OPENCODE_ALLOW_ROOT_WORKSPACE",
        )
    declared, variable = settings.environment, "A2A_SANDBOX_WRITABLE_ROOTS"
    roots = declared.sandbox_writable_roots
    if roots and declared.write_access_scope == "none":
        yield Problem(variable, "should be empty when A2A_WRITE_ACCESS_SCOPE is none")
    confined = "workspace_only" in (declared.write_access_scope, declared.sandbox_filesystem_scope)
    if confined and workspace and not all(root.is_relative_to(workspace) for root in roots):
        scope = "when the declared scope is workspace_only"
        yield Problem(variable, f"should lie in the workspace {scope}")
    if settings.guarded_workspace:
        yield from misplaced(settings, settings.guarded_workspace)
    yield from client_conflicts(settings.client)


def client_conflicts(client: ClientSettings) -> Iterator[Problem]:
    first = client.polling_fallback_initial_interval_seconds
    if client.polling_fallback_max_interval_seconds < first:
        yield Problem(
            "A2A_CLIENT_POLLING_FALLBACK_MAX_INTERVAL_SECONDS",
            "should not be below A2A_CLIENT_POLLING_FALLBACK_INITIAL_INTERVAL_SECONDS",
        )


def _access_conflicts(settings: Settings) -> Iterator[Problem]:
    a2a, auth = settings.a2a, settings.auth
    entries, variable = auth.static_auth_credentials or (), "A2A_STATIC_AUTH_CREDENTIALS"
    if entries and not any(entry.enabled for entry in entries):
        yield Problem(variable, "should have at least one enabled entry")
    if _repeated(entry.credential_id for entry in entries):
        yield Problem(variable, "has the same credential_id twice")
    if _repeated(entry.username or entry.token for entry in entries):
        yield Problem(variable, "has the same token or username twice")
    if not loopback(a2a.host) and not settings.knows_callers:
        remedy = f"so set A2A_BEARER_TOKEN, {variable} or A2A_OIDC_ISSUER"
        yield Problem("A2A_HOST", f"can be reached from other machines, {remedy}")
    if a2a.protocol_version not in a2a.supported_protocol_versions:
        yield Problem("A2A_PROTOCOL_VERSION", "is not among A2A_SUPPORTED_PROTOCOL_VERSIONS")
    for name in _repeated(peer.name for peer in a2a.peers):
        yield Problem("A2A_PEERS", f"has the same name twice, {name}; give each its own")
    name = settings.replica.name or ""
    if not name.isprintable() or " " in name or len(name) > MOST_NAME:
        yield Problem(
            "A2A_REPLICA_NAME", f"should have at most {MOST_NAME} characters, without spaces"
        )


def _signing_conflicts(a2a: ServiceSettings, signing: SigningSettings) -> Iterator[Problem]:
    if signing.key_file and not loopback(a2a.host) and not a2a.public_url:
        # A signature must not vouch for a guessed address.
        remedy = "set it to the URL that clients use"
        yield Problem("A2A_PUBLIC_URL", f"is part of what A2A_SIGNING_KEY_FILE signs; {remedy}")
    if signing.previous_key_files and not signing.key_file:
        yield Problem("A2A_SIGNING_PREVIOUS_KEY_FILES", "should come with A2A_SIGNING_KEY_FILE")


def _is_loopback(url: str) -> bool:
    return loopback(urlsplit(url).hostname or "")


ISSUED_PRINCIPAL = "oidc:"
"""Prefix of the principals of an identity provider."""


def _oidc_conflicts(settings: Settings) -> Iterator[Problem]:
    oidc = settings.oidc
    if oidc.issuer is None:
        for key in settings.sources:
            if key.startswith("oidc."):
                yield Problem(SETTINGS[key].variable, "has no effect without A2A_OIDC_ISSUER")
        return
    if not oidc.audience:
        yield Problem(
            "A2A_OIDC_AUDIENCE",
            "should be set with A2A_OIDC_ISSUER: a token for another service must not be good here",
        )
    if importlib.util.find_spec("jwt") is None or importlib.util.find_spec("cryptography") is None:
        yield Problem(
            "A2A_OIDC_ISSUER",
            "needs packages that are not installed; install this program with its extra "
            "`security`, or run `pip install 'pyjwt[crypto]'`",
        )
    for entry in settings.auth.static_auth_credentials or ():
        if entry.owner.startswith(ISSUED_PRINCIPAL):
            yield Problem(
                "A2A_STATIC_AUTH_CREDENTIALS",
                f"{entry.owner}: names that begin with {ISSUED_PRINCIPAL} belong to the callers of "
                "A2A_OIDC_ISSUER",
            )


def _is_root(directory: Path) -> bool:
    return directory.resolve() == Path(directory.anchor)


def _repeated(values: Iterable[object]) -> list[object]:
    """Return the values that occur more than once."""
    found = Counter(value for value in values if value is not None)
    return [value for value, number in found.items() if number > 1]


def _opencode_conflicts(a2a: ServiceSettings, opencode: OpenCodeSettings) -> Iterator[Problem]:
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
    if opencode.upstreams:
        yield from _fleet_conflicts(a2a, opencode)
    root = opencode.workspace_root
    if opencode.managed_server and root and not root.is_dir():
        yield Problem("OPENCODE_WORKSPACE_ROOT", "is not a directory")


def _fleet_conflicts(a2a: ServiceSettings, opencode: OpenCodeSettings) -> Iterator[Problem]:
    entries, variable = opencode.upstreams, "OPENCODE_UPSTREAMS"
    # An entry that starts several names each with a number.
    names = [
        f"{one.name}-{number}" if (one.managed or 1) > 1 else one.name
        for one in entries
        for number in range(1, (one.managed or 1) + 1)
    ]
    for name in _repeated(names):
        yield Problem(variable, f"has the same name twice, {name}; give each its own")
    if _repeated(one.url and one.url.rstrip("/") for one in entries):
        yield Problem(
            variable, "has the same url twice, but an OpenCode is run by one entry; remove one"
        )
    if all(one.drain for one in entries):
        yield Problem(variable, "drains every entry, so that no conversation could begin")
    if opencode.managed_server_port and sum(one.managed or 0 for one in entries) > 1:
        text = "is one port, and OPENCODE_UPSTREAMS starts several; leave it out"
        yield Problem("OPENCODE_MANAGED_SERVER_PORT", text)
    if a2a.demo and not all(one.managed for one in entries):
        yield Problem(variable, "should have only managed entries when A2A_DEMO is on")
    root = opencode.workspace_root
    outside = [
        str(directory)
        for one in entries
        for directory in one.directories
        if root and not directory.is_relative_to(root)
    ]
    if outside:
        yield Problem(variable, f"{outside[0]} is outside of OPENCODE_WORKSPACE_ROOT")


def within(path: Path, directory: Path) -> bool:
    """Whether a path is inside a directory, as written or after following its links.

    Directories are compared by identity, since a mount or another spelling of a name may lead to
    the same one.
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
    """Return the command that imports a database into the default one."""
    source, target = f"sqlite:///{file.absolute()}", settings.default_database_url
    return shlex.join(["opencode-a2a", "migrate", "--from", source, "--to", target])


def import_hint(settings: Settings, file: Path) -> str:
    """Say how to import the configured database, which cannot be used as it is."""
    command = import_command(settings, file)
    return f"run `{command}`, then take A2A_TASK_STORE_DATABASE_URL out"


def exposed(path: Path, workspace: Path) -> str:
    """Say why a file must not be in the workspace."""
    return f"{path} is in the workspace {workspace}, where the agent can read and change it"


_AGENT_DIRECTORIES = frozenset({"OPENCODE_WORKSPACE_ROOT", "A2A_SANDBOX_WRITABLE_ROOTS"})
"""Settings whose paths are the agent's own; all other paths are files of this service."""


def misplaced(settings: Settings, workspace: Path) -> Iterator[Problem]:
    """Yield a problem for each file of this service that the agent or a caller could read."""
    remedies = {
        "A2A_STATE_DIR": "serve the directory of one project (OPENCODE_WORKSPACE_ROOT), "
        "or set A2A_STATE_DIR to a directory outside"
    }
    for group, values in settings:
        for field, value in values if isinstance(values, Group) else ():
            variable = SETTINGS[f"{group}.{field}"].variable
            if variable in _AGENT_DIRECTORIES:
                continue
            for path in cast("tuple[object, ...]", value if isinstance(value, tuple) else (value,)):
                if isinstance(path, Path) and within(path, workspace):
                    remedy = remedies.get(variable, "move it elsewhere")
                    yield Problem(variable, f"{exposed(path, workspace)}; {remedy}")
    file = database_file(settings.database_url)
    if settings.tasks.task_store_database_url and file and within(file, workspace):
        remedy = "leave it out, or name a file outside"
        yield Problem("A2A_TASK_STORE_DATABASE_URL", f"{exposed(file, workspace)}; {remedy}")
