"""The settings: each written once, with its name, its default and what it does.

First the kinds of values and how each is read from text, then the groups, then ``Settings`` with
what follows from several of them, and the checks that need more than one. ``load`` builds it from
the outside world; tests may build one directly. Flags, messages and the reference page are made
from ``SETTINGS``. Nothing here reads the environment.
"""

import base64
import binascii
import hashlib
import importlib.util
import ipaddress
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
from typing import (
    Annotated,
    ClassVar,
    Literal,
    NamedTuple,
    Self,
    TypeAlias,
    TypeVar,
    cast,
    get_args,
    get_origin,
)
from urllib.parse import urlsplit

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    SecretStr,
    model_validator,
)
from pydantic.fields import FieldInfo

from opencode_a2a.ids import MAIN, ModelRef
from opencode_a2a.rights import (
    CAPABILITIES,
    PROFILES,
    Action,
    Budget,
    Capability,
    Profile,
    Rights,
)

T = TypeVar("T")


# The kinds of values


def _split(value: object) -> object:
    """Take ``a,b`` and ``["a", "b"]`` alike."""
    if not isinstance(value, str):
        return value
    if value.lstrip().startswith("["):
        return _decode(value)
    return [item.strip() for item in value.split(",") if item.strip()]


def _asks(value: object) -> object:
    """Take also ``all``, ``none``, and what a flag without a value stands for."""
    if isinstance(value, str) and value.strip().lower() in ("all", "true"):
        return ("bash", "edit", "webfetch")
    asks = () if value == "none" else _split(value)
    # Left to pydantic, the text would not name ``all`` and ``none``.
    if isinstance(asks, list):
        known, given = get_args(Ask), cast("list[object]", asks)
        if any(ask not in known for ask in given):
            raise ValueError("should be all, none, or some of bash, edit and webfetch")
        return given
    return asks


def _decode(value: object) -> object:
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except ValueError:
        raise ValueError("should be a JSON array") from None  # the parser's text quotes the value


def _decode_object(value: object) -> object:
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except ValueError:
        raise ValueError("should be a JSON object") from None


def _http_url(value: str) -> str:
    try:
        parts = urlsplit(value)
        usable = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # its text quotes the value, which may hold a password
        usable = False
    if not usable:
        raise ValueError("should be an http:// or https:// URL")
    if "@" in urlsplit(value).netloc:
        raise ValueError("should not hold a user name or password; there are settings for these")
    return value.rstrip("/")


def _secure_url(value: str) -> str:
    """Return the URL as it is written; on the network it has to be https."""
    _http_url(value)
    parts = urlsplit(value)
    if parts.scheme != "https" and not loopback(parts.hostname or ""):
        raise ValueError("should be an https:// URL; http:// is for this machine only")
    return value


def _issuer(value: str) -> str:
    if {"?", "#"} & set(value):
        raise ValueError("should be the issuer's URL, without a query or fragment")
    return value


def _host(value: str) -> str:
    # It becomes part of URLs, so it must not change how they are read.
    try:
        usable = bool(re.fullmatch(r"[\w.:%-]+", value))
        if ":" in value or "%" in value:
            ipaddress.IPv6Address(value)
    except ValueError:
        usable = False
    if not usable:
        raise ValueError("should be an IP address or a host name")
    return value


def _database_url(value: str) -> str:
    scheme, separator, rest = value.partition("://")
    if separator and scheme in ("postgresql", "postgres", "postgresql+psycopg"):
        return f"postgresql://{rest}"
    if scheme not in ("sqlite", "sqlite+aiosqlite", "sqlite+pysqlite") or not separator:
        raise ValueError(
            "should be a URL of SQLite, such as sqlite:////var/lib/opencode-a2a/tasks.db, "
            "or of PostgreSQL, such as postgresql://user@host:5432/database"
        )
    if rest.startswith("/file:"):  # a second syntax for paths, which could hide where a file is
        raise ValueError("should name a file as it is, not as file:…")
    return f"sqlite://{rest}"


def database_file(url: str) -> Path | None:
    """Return the file that a SQLite URL names; None for a database in memory or on a server."""
    if is_postgresql(url):
        return None
    name = url.partition("://")[2].partition("?")[0].removeprefix("/")
    return None if name in ("", ":memory:") else Path(name).absolute()


def is_postgresql(url: str) -> bool:
    return url.startswith("postgresql:")


def _path(value: Path) -> Path:
    if "\0" in str(value):
        raise ValueError("should not contain a null character")
    try:
        return Path(os.path.abspath(value.expanduser()))
    except RuntimeError:
        raise ValueError("begins with the home directory of a user who does not exist") from None
    except FileNotFoundError:
        raise ValueError("should be absolute, since the current directory is gone") from None


def _log_level(value: object) -> object:
    """Unknown levels mean WARNING, as they always did; ``load`` adds a warning."""
    level = value.upper() if isinstance(value, str) else value
    return level if level in get_args(LogLevel) else "WARNING"


def _path_prefix(value: str) -> str:
    """Return a path without a slash at its end; ``/`` is none."""
    path = value.strip().rstrip("/")
    if path and not re.fullmatch(r"(/[A-Za-z0-9._~-]+)+", path):
        raise ValueError("should be a path of letters, digits, dots and dashes, such as /agent")
    if {".", "..", ".well-known"} & set(path.split("/")):
        raise ValueError("should not contain ., .. or .well-known")
    return path


def _major_minor(value: object) -> object:
    return ".".join(value.split(".")[:2]) if isinstance(value, str) else value


class Binding(StrEnum):
    """A binding of A2A that is spoken here, as server and as caller of other agents."""

    HTTP_JSON = "HTTP+JSON"
    JSONRPC = "JSONRPC"

    @classmethod
    def spelled(cls, text: str) -> "Binding | None":
        """Return the binding that is meant: ``http_json``, ``REST``, ``json-rpc``."""
        known = {"JSONRPC": cls.JSONRPC, "HTTPJSON": cls.HTTP_JSON, "REST": cls.HTTP_JSON}
        return known.get(re.sub(r"[^A-Z]", "", text.upper()))


def _binding(value: object) -> object:
    return (Binding.spelled(value) or value) if isinstance(value, str) else value


def _token(value: SecretStr) -> SecretStr:
    """Refuse a token that no caller can send: the header's value is stripped and one line."""
    plain = value.get_secret_value()
    if plain != plain.strip() or not plain.isprintable():
        raise ValueError("should be one line of printable characters without spaces around it")
    return value


def sendable(value: SecretStr) -> SecretStr:
    """Refuse a secret that cannot be sent in a header."""
    plain = value.get_secret_value().strip()
    if not plain or not plain.isprintable() or not plain.isascii():
        raise ValueError("should be one line of printable ASCII")
    return value


def _basic_user(value: str) -> str:
    if ":" in value:
        raise ValueError("should not contain a colon")
    return value


def _basic_auth(value: SecretStr) -> SecretStr:
    """Return ``user:password``, also when it came in base64."""
    plain = value.get_secret_value()
    if ":" in plain:
        return value
    try:
        plain = base64.b64decode(plain, validate=True).decode()
    except (binascii.Error, UnicodeDecodeError):
        plain = ""
    if ":" not in plain:
        raise ValueError("should be user:password, or that in base64")
    return SecretStr(plain)


UNGUESSABLE = 20
"""Minimum length at which a secret is considered unguessable."""

LogLevel: TypeAlias = Literal["DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL"]
Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]
SecondsOrOff = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=1)]
CountOrOff = Annotated[int, Field(ge=0)]
Money = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Port = Annotated[int, Field(ge=1, le=65535)]
Text = Annotated[str, Field(min_length=1)]
MOST_NAME = 100
"""Characters in the name of a replica, which is part of the names of its OpenCodes."""
Secret = Annotated[SecretStr, Field(min_length=1)]
Token = Annotated[Secret, AfterValidator(_token)]
SentToken = Annotated[Secret, AfterValidator(sendable)]
BasicAuth = Annotated[Secret, AfterValidator(_basic_auth), AfterValidator(sendable)]
DatabaseUrl = Annotated[str, AfterValidator(_database_url)]
Level = Annotated[LogLevel, BeforeValidator(_log_level)]
Host = Annotated[str, AfterValidator(_host)]
HttpUrl = Annotated[str, AfterValidator(_http_url)]
SecureUrl = Annotated[str, AfterValidator(_secure_url)]
IssuerUrl = Annotated[SecureUrl, AfterValidator(_issuer), Field(max_length=512)]
PathPrefix = Annotated[str, AfterValidator(_path_prefix)]
LocalPath = Annotated[Path, AfterValidator(_path)]
Texts = Annotated[tuple[Text, ...], BeforeValidator(_split)]
Paths = Annotated[tuple[LocalPath, ...], BeforeValidator(_split)]
ProtocolVersion = Annotated[Literal["0.3", "1.0"], BeforeValidator(_major_minor)]
ProtocolVersions = Annotated[
    tuple[ProtocolVersion, ...], BeforeValidator(_split), Field(min_length=1)
]
Bindings = Annotated[
    tuple[Annotated[Binding, BeforeValidator(_binding)], ...],
    BeforeValidator(_split),
    Field(min_length=1),
]
TokenAlgorithm: TypeAlias = Literal[
    "RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384", "ES512", "EdDSA"
]
TokenAlgorithms = Annotated[
    tuple[TokenAlgorithm, ...], BeforeValidator(_split), Field(min_length=1)
]
Granted: TypeAlias = Literal[Capability, "supervise"]
Scopes = Annotated[
    tuple[Annotated[str, Field(pattern=r"^[ !#-\[\]-~]+$")], ...], BeforeValidator(_split)
]
CapabilityScopes = Annotated[dict[Text, Granted], BeforeValidator(_decode_object)]
ProfileScopes = Annotated[dict[Text, Profile], BeforeValidator(_decode_object)]
Ask: TypeAlias = Literal["bash", "edit", "webfetch"]
Asks = Annotated[tuple[Ask, ...], BeforeValidator(_asks)]

STRICT = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)


class BudgetEntry(BaseModel):
    """What one credential may spend; what is left out is as for everybody."""

    model_config = STRICT

    cost_per_day: Money | None = None
    tokens_per_day: CountOrOff | None = None


class CredentialEntry(BaseModel):
    """One entry of ``A2A_STATIC_AUTH_CREDENTIALS``."""

    model_config = STRICT

    scheme: Literal["bearer", "basic", "api_key"]
    credential_id: Text | None = None
    principal: Text | None = None
    token: Token | None = None
    username: Annotated[Text, AfterValidator(_basic_user)] | None = None
    password: Secret | None = None
    capabilities: frozenset[Granted] | None = None
    profile: Profile = "auto"
    budget: BudgetEntry | None = None
    enabled: bool = True

    @model_validator(mode="after")
    def _complete(self) -> Self:
        token = (self.principal, self.token)
        basic = (self.username, self.password)
        if self.scheme != "basic" and (None in token or any(basic)):
            raise ValueError(
                f"{self.scheme} needs principal and token, and neither username nor password"
            )
        if self.scheme == "basic" and (None in basic or any(token)):
            raise ValueError("basic needs username and password, and neither principal nor token")
        return self

    @property
    def owner(self) -> str:
        """Who the caller is: the principal, or the user name."""
        return self.principal or self.username or ""

    @property
    def granted(self) -> frozenset[Capability]:
        """What the caller may do beyond reading and prompting."""
        if self.capabilities is not None:
            return frozenset(one for one in self.capabilities if one != "supervise")
        return CAPABILITIES if self.scheme == "basic" else frozenset()

    @property
    def supervises(self) -> bool:
        """Whether the tasks of all callers are open to this one; never without being named."""
        return self.capabilities is not None and "supervise" in self.capabilities


class AnswerRule(BaseModel):
    """One entry of ``A2A_PERMISSION_RULES``; the last rule that fits decides."""

    model_config = STRICT

    permission: Text
    pattern: Text = "*"
    action: Action


class PeerEntry(BaseModel):
    """One entry of ``A2A_PEERS``; ``credential`` names the variable that holds the token."""

    model_config = STRICT

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,63}$")]
    url: HttpUrl
    credential: Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")] | None = None
    card_keys: Text | None = None
    token: Secret | None = None


class UpstreamEntry(BaseModel):
    """One entry of ``OPENCODE_UPSTREAMS``: an OpenCode that runs, or several that are started."""

    model_config = STRICT

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,63}$")]
    url: HttpUrl | None = None
    username: Text = "opencode"
    password_variable: Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")] | None = None
    password: Secret | None = None
    managed: Annotated[int, Field(ge=1, le=16)] | None = None
    """How many are started; they are called by the name and a number."""
    shared: bool = False
    """Every replica reaches the same OpenCode at the URL, though it is a loopback address."""
    directories: Paths = ()
    """What it serves; empty: every directory."""
    max_turns: CountOrOff = 0
    drain: bool = False
    """Conversations go on there, and new ones begin elsewhere."""

    @model_validator(mode="after")
    def _one_kind(self) -> Self:
        if (self.url is None) == (self.managed is None):
            raise ValueError("should have either url or managed")
        if self.managed and (self.password_variable or self.password or self.shared):
            raise ValueError("password_variable and shared are for an entry with a url")
        return self


def default_state_dir(environ: Mapping[str, str] = os.environ) -> Path:
    """$XDG_STATE_HOME/opencode-a2a"""
    home = Path(environ["HOME"]) if environ.get("HOME") else Path.home()
    base = environ.get("XDG_STATE_HOME")
    return (Path(base) if base else home / ".local" / "state") / "opencode-a2a"


Credentials = Annotated[
    tuple[CredentialEntry, ...] | None, BeforeValidator(_decode), Field(min_length=1)
]
PermissionRules = Annotated[tuple[AnswerRule, ...], BeforeValidator(_decode)]
PeerEntries = Annotated[tuple[PeerEntry, ...], BeforeValidator(_decode)]
UpstreamEntries = Annotated[tuple[UpstreamEntry, ...], BeforeValidator(_decode)]


# The groups


def setting(default: T, description: str) -> T:
    """Declare a setting: a field with its default and what it does."""
    return Field(default=default, description=description)


class Group(BaseModel):
    """Settings that belong together; a field's variable is the prefix and its name in capitals."""

    model_config = STRICT
    prefix: ClassVar[str]

    def __init_subclass__(cls, *, prefix: str) -> None:
        super().__init_subclass__()
        cls.prefix = prefix


class ServiceSettings(Group, prefix="A2A_"):
    """The service: where it listens, what it is called, what it offers."""

    host: Host = setting("127.0.0.1", "Address to listen on.")
    port: Port = setting(8000, "Port to listen on.")
    public_url: HttpUrl | None = setting(
        None, "Base URL that clients use, published in the card; by default that of HOST and PORT."
    )
    path_prefix: PathPrefix = setting(
        "",
        "Path below which the service is reached, such as `/agents/coder`; part of every address "
        "that is told. Requests with and without it are answered, so a proxy may strip it.",
    )
    title: Text = setting("OpenCode A2A", "Name of the agent in its card.")
    description: Text = setting(
        "The OpenCode coding agent, over the A2A protocol.", "Description of the agent in its card."
    )
    version: Text | None = setting(
        None, "Version of the agent in its card; by default this package's."
    )
    documentation_url: HttpUrl | None = setting(None, "Documentation named in the card.")
    project: Text | None = setting(
        None, "Project that the agent works on, named in its description."
    )
    protocol_version: ProtocolVersion = setting(
        "0.3", "Protocol version of a request that names none and whose method belongs to both."
    )
    supported_protocol_versions: ProtocolVersions = setting(
        ("0.3", "1.0"), "Supported protocol versions."
    )
    demo: bool = setting(
        False, "Serve the built-in scripted model instead of a real one; starts OpenCode."
    )
    state_dir: LocalPath = Field(
        default_factory=default_state_dir,
        description="Directory for the database, the generated token and the data of a managed "
        "OpenCode; never inside the workspace.",
    )
    allow_directory_override: bool = setting(
        True, "Let a request choose a directory inside the workspace."
    )
    enable_session_shell: bool = setting(False, "Offer `opencode.sessions.shell`.")
    enable_session_mutations: bool = setting(
        True, "Offer the methods that create, change and delete sessions."
    )
    enable_workspace_mutations: bool = setting(
        False, "Offer the methods that create and remove workspaces."
    )
    expose_workspace_root_in_card: bool = setting(
        False, "Publish the workspace directory in the extended card."
    )
    fetch_files: bool = setting(True, "Fetch file parts that are given by http or https URL.")
    fetch_files_max_count: Count = setting(10, "Maximum number of files fetched for one message.")
    fetch_files_max_bytes: Count = setting(10 * 2**20, "Largest file that is fetched.")
    fetch_files_max_total_bytes: Count = setting(
        10 * 2**20, "Total size of the files fetched for one message."
    )
    fetch_files_timeout_seconds: Seconds = setting(20, "Time to fetch the files of one message.")
    peers: PeerEntries = setting(
        (),
        "Agents that the `a2a_call` tool may call, by name or URL: a list of "
        "`{name, url, credential, card_keys}`; `credential` names the variable with the bearer "
        "token, `card_keys` the file or URL of the keys that its card has to be signed with.",
    )
    peers_allow_urls: bool = setting(
        False, "Let the `a2a_call` tool call any URL; one that is not listed gets no credential."
    )
    peers_wait_seconds: Annotated[float, Field(gt=0, le=280)] = setting(
        240, "How long the tool waits for an agent before it gives the model a handle."
    )
    http_gzip_minimum_size: CountOrOff = setting(
        8192, "Responses of this size and above are compressed; 0 means never."
    )
    metrics_enabled: bool = setting(True, "Offer `/metrics`.")
    audit_file: LocalPath | None = setting(
        None,
        "File that audit records are appended to, as lines of JSON, besides the log. It may be "
        "renamed at any time; a new one is begun.",
    )
    shutdown_grace_seconds: SecondsOrOff = setting(10, "Time for open work to settle at shutdown.")


class AcceptedSecret(NamedTuple):
    """A secret that callers may send: where it was given, whose it is, and how long."""

    variable: str
    kind: Literal["token", "password"]
    owner: str | None
    length: int


class AccessSettings(Group, prefix="A2A_"):
    """Who may call. Without a credential one is generated, on a loopback address only."""

    bearer_token: Token | None = setting(None, "The one bearer token.")
    static_auth_credentials: Credentials | None = setting(
        None,
        "Several credentials: a list of `{scheme, principal, token}` (`bearer`, or `api_key` for "
        "the header `X-API-Key`) or `{scheme, username, password}` (`basic`), each with optional "
        "`credential_id`, "
        "`capabilities` (`session_shell`, `workspace_mutation`, `supervise`), `profile`, "
        "`budget` (`{cost_per_day, tokens_per_day}`) and `enabled`.",
    )
    profile: Profile = setting(
        "auto",
        "What the agent may do for any caller: `auto` (what OpenCode's configuration allows), "
        "`ask` (changes only after a person's yes), `unattended` (nobody is waited for: what "
        "would be asked is refused), `read-only` (no changes). Credentials and messages can "
        "narrow it.",
    )
    allow_short_tokens: bool = setting(
        False, "Accept a bearer token below 20 characters on an address that others can reach."
    )
    allowed_origins: Texts = setting(
        (), "Browser origins that may call (CORS), besides the public URL's."
    )
    allowed_hosts: Texts = setting(
        (), "Host names under which the service may be called; empty = all."
    )

    @property
    def rights(self) -> Rights:
        """What the agent may do for a caller whose credential says nothing else."""
        return PROFILES[self.profile]

    @property
    def configured(self) -> bool:
        """Whether there is any credential that works."""
        return bool(self.bearer_token) or any(c.enabled for c in self.static_auth_credentials or ())

    @property
    def secrets(self) -> Iterator[AcceptedSecret]:
        """What is known of each secret that is accepted."""
        if self.bearer_token:
            yield AcceptedSecret("A2A_BEARER_TOKEN", "token", None, len(self.bearer_token))
        for entry in self.static_auth_credentials or ():
            if entry.enabled:
                kind = "token" if entry.token else "password"
                length = len(entry.token or entry.password or "")
                yield AcceptedSecret("A2A_STATIC_AUTH_CREDENTIALS", kind, entry.owner, length)


class TlsSettings(Group, prefix="A2A_TLS_"):
    """TLS on the service's own port. The files are read again when they change, or at SIGHUP."""

    cert_file: LocalPath | None = setting(
        None, "Certificate with its chain, in PEM. With one, the service speaks only https."
    )
    key_file: LocalPath | None = setting(
        None, "Its private key, in PEM; by default in the file of the certificate."
    )
    key_password: Secret | None = setting(None, "Password of that key.")
    client_ca_file: LocalPath | None = setting(
        None,
        "Certificate authorities of callers, in PEM. With one, a connection needs a client "
        "certificate of theirs, besides the credential of each request.",
    )


class SigningSettings(Group, prefix="A2A_SIGNING_"):
    """The key that cards and webhooks are signed with; needs the extra `security`."""

    key_file: LocalPath | None = setting(
        None,
        "Private key in PEM (P-256, Ed25519, or RSA of 2048 bits or more). With one, cards are "
        "signed and its public half is at `/.well-known/jwks.json`.",
    )
    previous_key_files: Paths = setting(
        (), "Earlier keys, public or private, that are still published there."
    )


class OidcSettings(Group, prefix="A2A_OIDC_"):
    """Tokens of an identity provider (OpenID Connect), accepted beside other credentials."""

    issuer: IssuerUrl | None = setting(
        None,
        "The provider's issuer, exactly as its tokens name it; its JWTs are accepted as bearer "
        "tokens. Needs the extra `security`.",
    )
    audience: Texts = setting(
        (), "Audiences (`aud`) of which a token must name one; required with an issuer."
    )
    jwks_url: SecureUrl | None = setting(
        None, "Where the provider's keys are; by default its discovery document says so."
    )
    algorithms: TokenAlgorithms = setting(
        ("RS256", "PS256", "ES256", "ES384", "EdDSA"), "Algorithms a token may be signed with."
    )
    clock_skew_seconds: Annotated[float, Field(ge=0, le=300)] = setting(
        30, "How far the clocks of provider and service may be apart."
    )
    principal_claim: Text = setting(
        "sub", "Claim that says who calls; one that never passes to another person."
    )
    scope_claim: Text | None = setting(
        None,
        "Claim with the scopes, roles or groups: words or a list; a path such as "
        "`realm_access.roles` is possible. By default `scope`, else `scp`.",
    )
    required_scopes: Scopes = setting((), "Scopes without which a token is refused.")
    capability_scopes: CapabilityScopes = setting(
        {"a2a:session_shell": "session_shell", "a2a:workspace_mutation": "workspace_mutation"},
        "What a scope grants: scopes, and for each `session_shell`, `workspace_mutation` or "
        "`supervise`.",
    )
    profile: Profile = setting("auto", "Profile of callers whose token says nothing else.")
    profile_scopes: ProfileScopes = setting(
        {}, "Profile by scope; the first scope of the list that the token has decides."
    )
    token_url: SecureUrl | None = setting(
        None, "Where clients get tokens by client credentials; the card then says so."
    )

    def granting(self, capability: Capability) -> list[str]:
        """Return the scopes of which each grants a capability."""
        return [scope for scope, what in self.capability_scopes.items() if what == capability]

    @property
    def scopes(self) -> tuple[str, ...]:
        """All scopes that mean something here."""
        named = (*self.required_scopes, *self.capability_scopes, *self.profile_scopes)
        return tuple(dict.fromkeys(named))


class LogSettings(Group, prefix="A2A_LOG_"):
    """What is written to the log."""

    level: Level | None = setting(
        None, "Lowest level that is logged; by default INFO at a terminal, WARNING otherwise."
    )
    payloads: bool = setting(
        False, "Log request and answer bodies, at any level; they may hold what callers work on."
    )
    body_limit: CountOrOff = setting(0, "Characters of a body that are logged; 0 = all.")


class LimitSettings(Group, prefix="A2A_"):
    """How much one caller, and all together, may ask for."""

    max_request_body_bytes: CountOrOff = setting(2**20, "Largest request body; 0 = no limit.")
    rate_limit_enabled: bool = setting(True, "Limit the requests of a caller.")
    rate_limit_window_seconds: Seconds = setting(60, "Window of the rate limit.")
    rate_limit_max_requests: Count = setting(6000, "Requests of one caller in that window.")
    max_tasks_per_principal: Count = setting(1000, "Open tasks of one caller.")
    max_open_tasks: Count = setting(2000, "Open tasks of all callers.")
    max_turns_per_principal: CountOrOff = setting(
        0, "Turns of one caller that run at the same time; more are refused. 0 = no limit."
    )
    budget_cost_per_day: Money = setting(
        0, "What one caller may spend in a day (UTC), by OpenCode's prices; 0 = no limit."
    )
    budget_tokens_per_day: CountOrOff = setting(
        0, "Tokens that one caller may use in a day (UTC); 0 = no limit."
    )

    @property
    def budget(self) -> Budget:
        """What a caller may spend whose credential says nothing else."""
        return Budget(
            self.budget_cost_per_day, self.budget_tokens_per_day, self.max_turns_per_principal
        )


class StreamSettings(Group, prefix="A2A_STREAM_"):
    """Streams of events to a client."""

    keepalive_seconds: Seconds = setting(
        3, "Silence after which a comment is sent to keep the stream open."
    )
    max_bytes: CountOrOff = setting(
        64 * 2**20, "Bytes after which a stream is ended; 0 = no limit."
    )
    max_duration_seconds: SecondsOrOff = setting(
        3600, "Time after which a stream is ended; 0 = no limit."
    )
    idle_timeout_seconds: SecondsOrOff = setting(
        0, "Time without an event after which a stream is ended; 0 = no limit."
    )


class TurnSettings(Group, prefix="A2A_TURN_"):
    """When a turn is stopped."""

    silence_seconds: Seconds = setting(
        600, "Silence of OpenCode after which a turn is checked and ended."
    )
    max_steps: Count = setting(200, "Model calls in one turn.")
    max_cost: Money = setting(
        0, "What one turn may cost, by OpenCode's prices, before it is stopped; 0 = no limit."
    )
    max_retry_wait_seconds: Seconds = setting(
        600, "Longest provider retry delay that a turn waits for."
    )


class InterruptSettings(Group, prefix="A2A_"):
    """Permissions and questions that stop a turn, and how a turn is stopped."""

    interrupt_request_ttl_seconds: Seconds = setting(
        10800, "Time to answer a permission or question, or to approve a plan."
    )
    interrupt_request_tombstone_ttl_seconds: SecondsOrOff = setting(
        600, "How long an expired request is reported as expired rather than not found."
    )
    interrupt_default_action: Literal["reject-and-continue", "end-turn"] = setting(
        "reject-and-continue", "What happens when nobody answers in time."
    )
    permission_rules: PermissionRules = setting(
        (),
        "Permissions settled without asking: a list of `{permission, pattern, action}` "
        "with the action `allow`, `ask` or `deny`; the last one that fits decides.",
    )
    allow_always: bool = setting(False, "Let a caller answer `always`, which outlives the task.")
    console_answers: bool | None = setting(
        None,
        "Accept answers given to OpenCode itself, such as at its own terminal. When they are not "
        "accepted, one stops the turn and fails the task. By default they are accepted, except "
        "from a managed OpenCode, where only the agent itself could give them.",
    )
    cancel_abort_timeout_seconds: Seconds = setting(
        2, "Time for OpenCode to stop when a task is canceled."
    )


class TaskSettings(Group, prefix="A2A_"):
    """What is kept, and where."""

    task_store_backend: Literal["database", "memory"] = setting(
        "database", "Keep tasks in a database, or in memory until the end."
    )
    task_store_database_url: DatabaseUrl | None = setting(
        None,
        "Database: a URL of SQLite or PostgreSQL (14 or later, with the extra `postgres`); by "
        "default a SQLite file for each workspace in the state directory.",
    )
    task_store_pooled: bool = setting(
        False,
        "The URL leads to a pooler in transaction mode, such as pgbouncer: nothing is prepared, "
        "and no setting is left in a connection.",
    )
    task_store_listen_url: DatabaseUrl | None = setting(
        None,
        "A URL of the same PostgreSQL past the pooler, for the one connection that hears what "
        "other replicas have done; without it they are asked often.",
    )
    task_retention_days: CountOrOff = setting(30, "Days to keep a finished task; 0 means for ever.")
    pending_session_claim_ttl_seconds: Seconds = setting(
        30, "How long a session named by a request stays reserved."
    )


class PushSettings(Group, prefix="A2A_PUSH_"):
    """Push notifications: webhooks that are told when the state of a task changes."""

    enabled: bool = setting(True, "Let callers have notifications sent to a webhook.")
    allowed_hosts: Texts = setting(
        (), "Hosts that notifications may be sent to: names, or `*.suffix`; empty = all."
    )
    allow_private_hosts: bool = setting(
        False, "Send them to loopback and private addresses too, and over plain http."
    )
    timeout_seconds: Seconds = setting(15, "Time for one notification.")
    give_up_hours: Seconds = setting(24, "Hours without success after which a webhook is given up.")
    max_per_task: Count = setting(10, "Webhooks of one task.")
    max_per_principal: Count = setting(1000, "Webhooks of one caller that are still in use.")


class ReplicaSettings(Group, prefix="A2A_REPLICA_"):
    """This process among those that can reach the same PostgreSQL."""

    name: Text | None = setting(
        None,
        "Its name there; by default HOSTNAME:PORT. A service that is started again under the same "
        "name takes its predecessor's place at once.",
    )
    lease_seconds: Annotated[float, Field(ge=4, le=60)] = setting(
        8, "Seconds without a write after which a process counts as dead."
    )
    poll_seconds: Annotated[float, Field(ge=0.05, le=60)] = setting(
        0.25, "How often to look for what other replicas have done while they are not heard."
    )


class OpenCodeSettings(Group, prefix="OPENCODE_"):
    """The OpenCode server behind this service."""

    base_url: HttpUrl = setting(
        "http://127.0.0.1:4096", "OpenCode's URL; unused when it is managed."
    )
    auth_username: Text = setting("opencode", "User name for an OpenCode with a password.")
    auth_password: Secret | None = setting(
        None, "Password of OpenCode (its OPENCODE_SERVER_PASSWORD)."
    )
    managed_server: bool | None = setting(
        None,
        "Start and own an `opencode serve`. By default this is done unless OPENCODE_BASE_URL "
        "names one that is running.",
    )
    upstreams: UpstreamEntries = setting(
        (),
        "Several OpenCodes in place of the one at `OPENCODE_BASE_URL`: a JSON list of `name` with "
        "`url`, `username`, `password_variable` and `shared`, or with `managed` (how many to "
        "start), and with `directories`, `max_turns` and `drain`. See [scaling](scaling.md).",
    )
    upstream_lost_seconds: SecondsOrOff = setting(
        120,
        "Seconds that one of several OpenCodes may be away until its tasks fail and its "
        "conversations go on in another. 0 means that they wait.",
    )
    managed_server_host: Host = setting("127.0.0.1", "Address of the managed OpenCode.")
    managed_server_port: Port | None = setting(
        None, "Port of the managed OpenCode; by default a free one."
    )
    command: Text = setting("opencode", "Program of the managed OpenCode.")
    startup_timeout: Seconds = setting(20, "Seconds for the managed OpenCode to start.")
    ask: Asks | None = setting(
        None,
        "What the managed OpenCode asks permission for: `bash`, `edit`, `webfetch`, `all` "
        "or `none`. By default the demo asks for all; otherwise OpenCode's own "
        "configuration decides, which allows everything unless told otherwise.",
    )
    env_passthrough: Texts = setting(
        ("*",),
        "Variables that the managed OpenCode and its tools get: names, in which `*` stands for "
        "anything. Never this program's settings and secrets.",
    )
    workspace_root: LocalPath | None = setting(
        None,
        "Directory that sessions work in, and that no request leaves; by default "
        "the current directory when OpenCode is managed, a sample project with the demo model, "
        "else OpenCode's own.",
    )
    allow_root_workspace: bool = setting(
        False, "Let `/` be the workspace: the agent can then change every file of the machine."
    )
    provider_id: Text | None = setting(None, "Default provider, together with the model.")
    model_id: Text | None = setting(None, "Default model, together with the provider.")
    agent: Text | None = setting(None, "OpenCode agent used by every turn.")
    system: Text | None = setting(None, "System text added to every turn.")
    variant: Text | None = setting(None, "Model variant used by every turn.")
    timeout: Seconds = setting(120, "Seconds for one request to OpenCode.")
    timeout_stream: Seconds | None = setting(
        None, "Seconds for a whole turn; by default there is no limit."
    )
    max_concurrent_requests: CountOrOff = setting(
        0, "Maximum concurrent requests to OpenCode; more are refused. 0 means no limit."
    )
    max_concurrent_streams: CountOrOff = setting(
        0, "Maximum concurrent turns in OpenCode; more are refused. 0 means no limit."
    )

    @property
    def model(self) -> ModelRef | None:
        """The default model; None leaves it to OpenCode."""
        if self.provider_id is None or self.model_id is None:
            return None
        return ModelRef(self.provider_id, self.model_id)


class EnvironmentSettings(Group, prefix="A2A_"):
    """The execution environment as declared by the operator: published to clients, not enforced."""

    sandbox_mode: Literal[
        "unknown", "read-only", "workspace-write", "danger-full-access", "custom"
    ] = setting("unknown", "Sandbox that OpenCode runs in.")
    sandbox_filesystem_scope: Literal[
        "unknown", "workspace_only", "workspace_and_declared_roots", "unrestricted", "custom"
    ] = setting("unknown", "Files that can be reached.")
    sandbox_writable_roots: Paths = setting(
        (), "Directories that can be written, besides the workspace."
    )
    network_access: Literal["unknown", "disabled", "enabled", "restricted", "custom"] = setting(
        "unknown", "Network that can be reached."
    )
    network_allowed_domains: Texts = setting((), "Domains that can be reached.")
    approval_policy: Literal[
        "unknown", "never", "on-request", "on-failure", "untrusted", "custom"
    ] = setting("unknown", "When a permission is asked for.")
    approval_escalation_behavior: Literal[
        "unknown", "manual", "automatic", "unsupported", "custom"
    ] = setting("unknown", "Who settles what was refused.")
    write_access_scope: Literal[
        "unknown",
        "none",
        "workspace_only",
        "workspace_and_declared_roots",
        "unrestricted",
        "custom",
    ] = setting("unknown", "Files that can be changed.")
    write_access_outside_workspace: Literal["unknown", "allowed", "disallowed", "custom"] = setting(
        "unknown", "Whether files outside the workspace can be changed."
    )


class ClientSettings(Group, prefix="A2A_CLIENT_"):
    """Calls to other agents: by `opencode-a2a call` and by the `a2a_call` tool."""

    url: HttpUrl | None = setting(
        None,
        "Agent that `call`, `chat`, `tasks`, `task`, `cancel`, `ping` and `console` talk to; by "
        "default the one service of this user that runs on this machine.",
    )
    timeout_seconds: Seconds = setting(30, "Time for one call.")
    card_fetch_timeout_seconds: Seconds = setting(5, "Time to fetch an agent's card.")
    use_client_preference: bool = setting(
        False, "Choose the binding by our order instead of the agent's."
    )
    supported_transports: Bindings = setting(
        (Binding.JSONRPC, Binding.HTTP_JSON), "Bindings to use, in this order."
    )
    bearer_token: SentToken | None = setting(
        None, "Bearer token for other agents; wins over Basic."
    )
    basic_auth: BasicAuth | None = setting(
        None, "`user:password` for other agents, plain or in base64."
    )
    ca_file: LocalPath | None = setting(
        None, "Certificate authorities that are trusted besides the system's, in PEM."
    )
    cert_file: LocalPath | None = setting(
        None, "Client certificate with its private key, in PEM, for agents that ask for one."
    )
    protocol_version: ProtocolVersion | None = setting(
        None, "Protocol version to speak; by default the agent's newest."
    )
    cache_ttl_seconds: SecondsOrOff = setting(900, "Time for which a connection and card are kept.")
    cache_maxsize: CountOrOff = setting(256, "Agents for which they are kept; 0 = none.")
    allowed_hosts: Texts = setting(
        (),
        "Hosts that may be called: names, or `*.suffix`; empty = all. The `a2a_call` tool calls "
        "agents on these hosts by URL too.",
    )
    allow_private_hosts: bool = setting(
        False, "Let the `a2a_call` tool call loopback and private addresses."
    )
    polling_fallback_enabled: bool = setting(False, "Poll the task when an answer was not final.")
    polling_fallback_initial_interval_seconds: Seconds = setting(0.5, "First interval of polling.")
    polling_fallback_max_interval_seconds: Seconds = setting(2, "Longest interval of polling.")
    polling_fallback_backoff_multiplier: Annotated[float, Field(ge=1, allow_inf_nan=False)] = (
        setting(2, "Growth of the interval.")
    )
    polling_fallback_timeout_seconds: Seconds = setting(10, "Time after which polling is given up.")


# All of them together


class Settings(BaseModel):
    """All settings, checked; ``sources`` and ``warnings`` say where they came from."""

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
    """Which OpenCode the settings are for, where one is meant."""
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
        """The base URL for the card with the path prefix, without a slash at the end."""
        url, prefix = self.a2a.public_url or self._url(self.a2a.host), self.a2a.path_prefix
        return url if urlsplit(url).path.endswith(prefix) else url + prefix

    @property
    def local_url(self) -> str:
        """The base URL for what runs on this machine."""
        everywhere = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # noqa: S104 - not bound here
        return self._url(everywhere.get(self.a2a.host, self.a2a.host))

    def _url(self, host: str) -> str:
        scheme = "https" if self.tls.cert_file else "http"
        return f"{scheme}://{f'[{host}]' if ':' in host else host}:{self.a2a.port}"

    @property
    def fleet(self) -> tuple[tuple[UpstreamEntry, "Settings"], ...]:
        """Every OpenCode behind the service, with the settings as they are for it alone."""
        own = self.opencode
        if not own.upstreams:
            kind = {"managed": 1} if own.managed_server else {"url": own.base_url}
            return ((UpstreamEntry.model_validate({"name": self.upstream, **kind}), self),)
        found: list[tuple[UpstreamEntry, Settings]] = []
        for entry in own.upstreams:
            count = entry.managed or 1
            for number in range(1, count + 1):
                name = f"{entry.name}-{number}" if count > 1 else entry.name
                # Only this replica can reach it, and finds it again after a restart.
                here = entry.managed or (not entry.shared and _is_loopback(entry.url or ""))
                if here and is_postgresql(self.database_url):
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
        """Whether it is configured who may call; if not, a token is generated."""
        return self.auth.configured or self.oidc.issuer is not None

    @property
    def opencode_is_here(self) -> bool:
        """Whether OpenCode runs on this machine and so can call a loopback address."""
        urls = [one.url for one in self.opencode.upstreams] or [self.opencode.base_url]
        return self.opencode.managed_server or any(_is_loopback(url or "") for url in urls)

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
        if self.a2a.demo:
            # A sample project: what a newcomer tries out should not be done to files that matter.
            return self.a2a.state_dir / "demo-workspace"
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
    def replica_name(self) -> str:
        return self.replica.name or f"{socket.gethostname()}:{self.a2a.port}"

    @property
    def default_database_url(self) -> str:
        """The database in the state directory for the workspace, or for an OpenCode without."""
        elsewhere = "upstreams" if self.opencode.upstreams else self.opencode.base_url
        serves = str(self.workspace or elsewhere)
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
        return bool in (self.info.annotation, *get_args(self.info.annotation))

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
        case dict():
            return json.dumps(value)
        case tuple():
            return ",".join(show(item) for item in cast("tuple[object, ...]", value))
        case BaseModel():
            return value.model_dump_json(exclude_none=True)
        case str() if is_postgresql(value):
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
    """Yield what is wrong between settings that are right by themselves."""
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
        # A signature must not bless a guessed address.
        remedy = "set it to the URL that clients use"
        yield Problem("A2A_PUBLIC_URL", f"is part of what A2A_SIGNING_KEY_FILE signs; {remedy}")
    if signing.previous_key_files and not signing.key_file:
        yield Problem("A2A_SIGNING_PREVIOUS_KEY_FILES", "should come with A2A_SIGNING_KEY_FILE")


def _is_loopback(url: str) -> bool:
    return loopback(urlsplit(url).hostname or "")


ISSUED_PRINCIPAL = "oidc:"
"""How the principals of an identity provider begin."""


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
    """Return what is there more than once."""
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
    # A managed entry of several is called by numbers.
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
    given = {
        "A2A_AUDIT_FILE": settings.a2a.audit_file,
        "A2A_SIGNING_KEY_FILE": settings.signing.key_file,
        "A2A_TLS_KEY_FILE": settings.tls.key_file,
        "A2A_TLS_CERT_FILE": settings.tls.cert_file,
        "A2A_TLS_CLIENT_CA_FILE": settings.tls.client_ca_file,
    }
    for variable, path in given.items():
        if path and within(path, workspace):
            yield Problem(variable, f"{exposed(path, workspace)}; move it elsewhere")
