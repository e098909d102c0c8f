"""All settings together: what follows from several of them, and the checks between them.

``load`` builds a ``Settings`` from the outside world; tests may build one directly. Flags,
messages and the reference page are made from ``SETTINGS``. Nothing here reads the environment.
"""

import hashlib
import json
import os
import re
import shlex
import socket
from collections.abc import Iterator, Mapping
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
    NoticeSettings,
    OidcSettings,
    OpenCodeSettings,
    Problem,
    PushSettings,
    ReplicaSettings,
    ServiceSettings,
    SigningSettings,
    StreamSettings,
    TaskSettings,
    TelemetrySettings,
    TlsSettings,
    TurnSettings,
)
from opencode_a2a.config.values import (
    STRICT,
    UNGUESSABLE,
    Ask,
    HttpBinding,
    QuietHours,
    UpstreamEntry,
    is_loopback,
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
    notices: NoticeSettings = NoticeSettings()
    replica: ReplicaSettings = ReplicaSettings()
    interrupts: InterruptSettings = InterruptSettings()
    turn: TurnSettings = TurnSettings()
    stream: StreamSettings = StreamSettings()
    limits: LimitSettings = LimitSettings()
    log: LogSettings = LogSettings()
    otel: TelemetrySettings = TelemetrySettings()
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
    def groups(self) -> dict[str, Group]:
        return {name: value for name, value in self if isinstance(value, Group)}

    @property
    def public_url(self) -> str:
        """The base URL in the card: with the path prefix, without a trailing slash."""
        url, prefix = self.a2a.public_url or self._url(self.a2a.host), self.a2a.path_prefix
        return url if urlsplit(url).path.endswith(prefix) else url + prefix

    def interface_url(self, binding: HttpBinding) -> str:
        """The URL of a binding in the card: that of the service, or a root of its own."""
        own = binding.alias in self.a2a.path_aliases
        return f"{self.public_url}/{binding.alias}" if own else self.public_url

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
                here = entry.managed or (not entry.shared and is_loopback(entry.url or ""))
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
        return self.opencode.managed_server or any(is_loopback(url or "") for url in urls)

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
    def directory_override(self) -> bool:
        """Whether a request may choose a directory; without a root there is none to choose."""
        return self.a2a.allow_directory_override and self.workspace is not None

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
        case QuietHours():
            return str(value)
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
FILE_VARIABLES: Mapping[str, Setting] = {
    f"{setting.variable}_FILE": setting
    for setting in SETTINGS.values()
    if setting.secret or setting.field in ("task_store_database_url", "task_store_listen_url")
}
"""Variables that name a file with a secret, by which most supervisors hand secrets over."""
CONFIG_VARIABLE = "A2A_CONFIG"


# Checks that need more than one setting


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


ISSUED_PRINCIPAL = "oidc:"
"""Prefix of the principals of an identity provider."""


def conflicts(settings: Settings, *, served: bool = True) -> Iterator[Problem]:
    """Yield the conflicts between settings that are each valid.

    Unless they are to be served, it does not matter what lies in the workspace.
    """
    a2a, opencode = settings.a2a, settings.opencode
    for group in settings.groups.values():
        yield from group.conflicts()
    yield from _access_conflicts(settings)
    if a2a.demo and not opencode.managed_server:
        yield Problem("A2A_DEMO", "starts OpenCode, so leave OPENCODE_MANAGED_SERVER on")
    if a2a.demo and opencode.provider_id:
        yield Problem("A2A_DEMO", "uses its own model, so leave OPENCODE_PROVIDER_ID out")
    if a2a.demo and not all(entry.managed for entry in opencode.upstreams):
        text = "should have only managed entries when A2A_DEMO is on"
        yield Problem("OPENCODE_UPSTREAMS", text)
    workspace = settings.workspace if served else None
    if workspace and _is_root(workspace) and not opencode.allow_root_workspace:
        yield Problem(
            "OPENCODE_WORKSPACE_ROOT",
            "the agent could change every file of this machine; choose a directory, or set "
            "OPENCODE_ALLOW_ROOT_WORKSPACE",
        )
    declared = settings.environment
    confined = "workspace_only" in (declared.write_access_scope, declared.sandbox_filesystem_scope)
    roots = declared.sandbox_writable_roots
    if confined and workspace and not all(root.is_relative_to(workspace) for root in roots):
        scope = "when the declared scope is workspace_only"
        yield Problem("A2A_SANDBOX_WRITABLE_ROOTS", f"should lie in the workspace {scope}")
    yield from _notice_conflicts(settings)
    if served and settings.guarded_workspace:
        yield from misplaced(settings, settings.guarded_workspace)


def _notice_conflicts(settings: Settings) -> Iterator[Problem]:
    entries, auth = settings.notices.notify, settings.auth
    if entries and not settings.a2a.public_url:
        remedy = "set it to the URL at which a phone reaches the service"
        yield Problem("A2A_PUBLIC_URL", f"is needed for the links of A2A_NOTIFY; {remedy}")
    callers = {one.owner for one in auth.static_auth_credentials or () if one.enabled}
    several = len(callers) + bool(auth.bearer_token) > 1 or settings.oidc.issuer is not None
    for entry in entries if several else ():
        if not entry.principals and entry.kind != "webpush":  # which tells each of their own
            yield Problem(
                "A2A_NOTIFY",
                f"{entry.name}: there are several callers, and whoever gets a message can answer "
                "for them; name those it is for in `principals`, or write `*` for all",
            )


def _access_conflicts(settings: Settings) -> Iterator[Problem]:
    a2a, auth, oidc = settings.a2a, settings.auth, settings.oidc
    if not loopback(a2a.host) and not settings.knows_callers:
        remedy = "so set A2A_BEARER_TOKEN, A2A_STATIC_AUTH_CREDENTIALS or A2A_OIDC_ISSUER"
        yield Problem("A2A_HOST", f"can be reached from other machines, {remedy}")
    public = urlsplit(settings.public_url).hostname or ""
    only_here = loopback(a2a.host) and loopback(public)
    for secret in auth.secrets if not only_here and not auth.allow_short_tokens else ():
        if secret.kind == "token" and secret.length < UNGUESSABLE:
            whose = f"{secret.owner}: " if secret.owner else ""
            yield Problem(
                secret.variable,
                f"{whose}a token of {secret.length} characters can be guessed; use "
                f"{UNGUESSABLE} or more, or set A2A_ALLOW_SHORT_TOKENS",
            )
    for key in settings.sources if oidc.issuer is None else ():
        if key.startswith("oidc."):
            yield Problem(SETTINGS[key].variable, "has no effect without A2A_OIDC_ISSUER")
    for entry in auth.static_auth_credentials or () if oidc.issuer else ():
        if entry.owner.startswith(ISSUED_PRINCIPAL):
            yield Problem(
                "A2A_STATIC_AUTH_CREDENTIALS",
                f"{entry.owner}: names that begin with {ISSUED_PRINCIPAL} belong to the callers of "
                "A2A_OIDC_ISSUER",
            )
    if settings.signing.key_file and not loopback(a2a.host) and not a2a.public_url:
        # A signature must not vouch for a guessed address.
        remedy = "set it to the URL that clients use"
        yield Problem("A2A_PUBLIC_URL", f"is part of what A2A_SIGNING_KEY_FILE signs; {remedy}")


def _is_root(directory: Path) -> bool:
    return directory.resolve() == Path(directory.anchor)


def within(path: Path, directory: Path) -> bool:
    """Whether a path is inside a directory, as written or after following its links.

    Directories are compared by identity, since a mount or another spelling of a name may lead to
    the same one.
    """
    if Path(os.path.abspath(path)).is_relative_to(os.path.abspath(directory)):
        return True
    real = path.resolve()
    for parent in (real, *real.parents):
        try:
            if os.path.samefile(parent, directory):
                return True
        except OSError:  # one of them is not there yet
            if parent == directory.resolve():
                return True
    return False


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
    for group, values in settings.groups.items():
        for field, value in values:
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
