"""The settings, in groups: each is declared once, with its type, its default and what it does.

Names of variables, flags and keys of the settings file, their help and `docs/settings.md` follow
from these declarations. To add a setting, add a field here and use it. If it contradicts another
setting of its group, say so in the group's ``conflicts``.

What an operator has no reason to change is a constant of its group (``ClassVar``); ``load`` names
those that were settings once.
"""

import importlib.util
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, TypeVar

from pydantic import BaseModel, Field

from opencode_a2a import __version__
from opencode_a2a.config.values import (
    STRICT,
    Asks,
    BasicAuth,
    Bindings,
    CapabilityScopes,
    CardForm,
    Count,
    CountOrZero,
    Credentials,
    DatabaseUrl,
    HeaderName,
    Host,
    Hours,
    HttpBinding,
    HttpUrl,
    IssuerUrl,
    Level,
    LocalPath,
    MoneyOrZero,
    NoticeEntries,
    PathAliases,
    PathPrefix,
    Paths,
    PeerEntries,
    PermissionRules,
    Port,
    ProfileScopes,
    ProtocolVersion,
    ProtocolVersions,
    Quiet,
    ReplicaName,
    Scopes,
    Seconds,
    SecondsOrZero,
    Secret,
    SecureUrl,
    SentToken,
    Text,
    Texts,
    Token,
    TokenAlgorithms,
    UpstreamEntries,
    default_state_dir,
)
from opencode_a2a.ids import ModelRef
from opencode_a2a.rights import PROFILES, Budget, Capability, Profile, Rights

T = TypeVar("T")


def setting(default: T, description: str) -> T:
    """Declare a setting: a field with its default and its description."""
    return Field(default=default, description=description)


@dataclass(frozen=True, slots=True)
class Problem:
    """A problem with a setting; ``name`` is its variable, and its source if that is another."""

    name: str
    text: str

    def __str__(self) -> str:
        return f"{self.name}: {self.text}"


class Group(BaseModel):
    """Related settings. The variable of a field is the prefix and the field's name in capitals."""

    model_config = STRICT
    prefix: ClassVar[str]
    _taken: ClassVar[set[str]] = set()
    """The variables of all groups."""

    def __init_subclass__(cls, *, prefix: str) -> None:
        super().__init_subclass__()
        cls.prefix = prefix

    @classmethod
    def __pydantic_init_subclass__(cls, **_: Any) -> None:
        variables = {cls.prefix + field.upper() for field in cls.model_fields}
        if twice := variables & Group._taken:
            raise TypeError(f"{', '.join(sorted(twice))}: two settings have the same variable")
        Group._taken |= variables

    def conflicts(self) -> Iterator[Problem]:
        """Yield the conflicts between settings of this group that are each valid."""
        yield from ()


def _repeated(values: Iterable[object]) -> list[object]:
    """Return the values that occur more than once."""
    found = Counter(value for value in values if value is not None)
    return [value for value, number in found.items() if number > 1]


class ServiceSettings(Group, prefix="A2A_"):
    """The service: its address, its card and the methods it offers."""

    host: Host = setting("127.0.0.1", "Address to listen on.")
    port: Port = setting(8000, "Port to listen on.")
    public_url: HttpUrl | None = setting(
        None, "Base URL that clients use, published in the card. Default: made from HOST and PORT."
    )
    path_prefix: PathPrefix = setting(
        "",
        "Path prefix of the service, such as `/agents/coder`; it is part of every published "
        "URL. Requests are accepted with and without it, so a proxy may strip it.",
    )
    path_aliases: PathAliases = setting(
        (),
        "Further roots, for platforms that want them: `rpc` is JSON-RPC at `/rpc`, `rest` is "
        "HTTP+JSON below `/rest`. The card then names these addresses.",
    )
    context_header: HeaderName | None = setting(
        None,
        "Name of a header with the context ID of messages that name no context and no task, for "
        "platforms that keep a conversation by a header of their own.",
    )
    card_form: CardForm = setting(
        "hybrid",
        "Form of the public card for clients that ask for no version: `hybrid` has the fields of "
        "both. Choose one version behind a gateway that rewrites the addresses of that one alone.",
    )
    title: Text = setting("OpenCode A2A", "Name of the agent in its card.")
    description: Text = setting(
        "The OpenCode coding agent, over the A2A protocol.", "Description of the agent in its card."
    )
    version: ClassVar[str] = __version__
    """Version of the agent in its card."""
    documentation_url: HttpUrl | None = setting(
        None, "URL of the agent's documentation, published in its card."
    )
    project: Text | None = setting(
        None, "Name of the project that the agent works on, added to its description."
    )
    protocol_version: ProtocolVersion = setting(
        "0.3", "Protocol version of a request that names none and whose method exists in both."
    )
    supported_protocol_versions: ProtocolVersions = setting(
        ("0.3", "1.0"), "Supported protocol versions."
    )
    demo: bool = setting(
        False, "Use the built-in scripted model instead of a real one. Implies a managed OpenCode."
    )
    state_dir: LocalPath = Field(
        default_factory=default_state_dir,
        description="Directory for the database, the generated token and the data of a managed "
        "OpenCode. It must be outside the workspace.",
    )
    allow_directory_override: bool = setting(
        True,
        "Allow a request to choose a directory inside the workspace. Without a workspace root, as "
        "with an external OpenCode and none set, no directory can be chosen.",
    )
    enable_session_shell: bool = setting(False, "Offer `opencode.sessions.shell`.")
    enable_session_mutations: bool = setting(
        True, "Offer the methods that create, change and delete sessions."
    )
    enable_workspace_mutations: bool = setting(
        False, "Offer the methods that create and remove workspaces."
    )
    expose_workspace_root_in_card: ClassVar[bool] = False
    """Whether the workspace directory is published in the extended card."""
    fetch_files: bool = setting(True, "Fetch the files of parts that name an http or https URL.")
    fetch_files_max_count: ClassVar[int] = 10
    """Maximum number of files fetched for one message."""
    fetch_files_max_bytes: Count = setting(10 * 2**20, "Maximum size of a fetched file, in bytes.")
    fetch_files_max_total_bytes: Count = setting(
        10 * 2**20, "Maximum total size of the files fetched for one message, in bytes."
    )
    fetch_files_timeout_seconds: ClassVar[float] = 20
    """Time limit for fetching the files of one message."""
    peers: PeerEntries = setting(
        (),
        "Agents that the `a2a_call` tool may call by name or URL: a list of "
        "`{name, url, credential, card_keys}`. `credential` names the variable that holds the "
        "bearer token; `card_keys` is the file or URL of the keys that must have signed the card.",
    )
    peers_allow_urls: bool = setting(
        False, "Allow the `a2a_call` tool to call any URL. Unlisted agents get no credential."
    )
    peers_wait_seconds: ClassVar[float] = 240
    """How long the `a2a_call` tool waits for an agent before it returns a handle to the model."""
    http_gzip_minimum_size: ClassVar[int] = 8192
    """Responses of at least this many bytes are compressed."""
    metrics_enabled: bool = setting(True, "Offer `/metrics`.")
    audit_file: LocalPath | None = setting(
        None,
        "File to which audit records are appended as lines of JSON, in addition to the log. "
        "It may be renamed at any time; a new file is then started.",
    )
    shutdown_grace_seconds: SecondsOrZero = setting(
        10, "How long a shutdown waits for open work to settle."
    )

    def conflicts(self) -> Iterator[Problem]:
        if self.protocol_version not in self.supported_protocol_versions:
            yield Problem("A2A_PROTOCOL_VERSION", "is not among A2A_SUPPORTED_PROTOCOL_VERSIONS")
        if self.card_form not in ("hybrid", *self.supported_protocol_versions):
            yield Problem("A2A_CARD_FORM", "is not among A2A_SUPPORTED_PROTOCOL_VERSIONS")
        for name in _repeated(peer.name for peer in self.peers):
            yield Problem("A2A_PEERS", f"has the same name twice, {name}; give each its own")


class AcceptedSecret(NamedTuple):
    """A secret that callers may send: its variable, its owner and its length."""

    variable: str
    kind: Literal["token", "password"]
    owner: str | None
    length: int


class AccessSettings(Group, prefix="A2A_"):
    """Who may call. On a loopback address, a token is generated if no credential is set."""

    bearer_token: Token | None = setting(None, "Bearer token that callers must send.")
    static_auth_credentials: Credentials | None = setting(
        None,
        "Several credentials: a list of `{scheme, principal, token}` (`bearer`, or `api_key` for "
        "the header `X-API-Key`) or `{scheme, username, password}` (`basic`). Each may also have "
        "`credential_id`, `capabilities` (`session_shell`, `workspace_mutation`, `supervise`), "
        "`profile`, `budget` (`{cost_per_day, tokens_per_day}`) and `enabled`.",
    )
    profile: Profile = setting(
        "auto",
        "What the agent may do for any caller: `auto` (whatever OpenCode's configuration allows), "
        "`ask` (changes need a person's approval), `unattended` (never wait for a person: "
        "requests for permission are refused), `read-only` (no changes). Credentials and "
        "messages can only narrow it.",
    )
    allow_short_tokens: bool = setting(
        False, "Accept bearer tokens of fewer than 20 characters on a public address."
    )
    allowed_origins: Texts = setting(
        (), "Browser origins that may call (CORS), in addition to that of the public URL."
    )
    allowed_hosts: Texts = setting(
        (),
        "Host names that requests may use, except for `/livez` and `/readyz`. Empty: any, except "
        "that a service on a loopback address accepts only loopback names.",
    )

    def conflicts(self) -> Iterator[Problem]:
        entries, variable = self.static_auth_credentials or (), "A2A_STATIC_AUTH_CREDENTIALS"
        if entries and not any(entry.enabled for entry in entries):
            yield Problem(variable, "should have at least one enabled entry")
        if _repeated(entry.credential_id for entry in entries):
            yield Problem(variable, "has the same credential_id twice")
        if _repeated(entry.username or entry.token for entry in entries):
            yield Problem(variable, "has the same token or username twice")

    @property
    def rights(self) -> Rights:
        """What the agent may do for a caller whose credential does not narrow it."""
        return PROFILES[self.profile]

    @property
    def configured(self) -> bool:
        """Whether any enabled credential is configured."""
        return bool(self.bearer_token) or any(c.enabled for c in self.static_auth_credentials or ())

    @property
    def secrets(self) -> Iterator[AcceptedSecret]:
        """A description of each accepted secret."""
        if self.bearer_token:
            yield AcceptedSecret("A2A_BEARER_TOKEN", "token", None, len(self.bearer_token))
        for entry in self.static_auth_credentials or ():
            if entry.enabled:
                kind = "token" if entry.token else "password"
                length = len(entry.token or entry.password or "")
                yield AcceptedSecret("A2A_STATIC_AUTH_CREDENTIALS", kind, entry.owner, length)


class TlsSettings(Group, prefix="A2A_TLS_"):
    """TLS on the service's own port. The files are reloaded when they change, and on SIGHUP."""

    cert_file: LocalPath | None = setting(
        None, "Certificate and chain (PEM). If set, the service accepts only https."
    )
    key_file: LocalPath | None = setting(
        None, "Private key of the certificate (PEM). Default: in the certificate's file."
    )
    key_password: Secret | None = setting(None, "Password of the private key.")
    client_ca_file: LocalPath | None = setting(
        None,
        "Certificate authorities of callers (PEM). If set, each connection needs a client "
        "certificate from one of them, in addition to the credential of each request.",
    )

    def conflicts(self) -> Iterator[Problem]:
        alone = {
            "A2A_TLS_KEY_FILE": self.key_file,
            "A2A_TLS_KEY_PASSWORD": self.key_password,
            "A2A_TLS_CLIENT_CA_FILE": self.client_ca_file,
        }
        for variable, given in alone.items():
            if given and not self.cert_file:
                yield Problem(variable, "should come with A2A_TLS_CERT_FILE")


class SigningSettings(Group, prefix="A2A_SIGNING_"):
    """The key that signs cards and webhooks; needs the extra `security`."""

    key_file: LocalPath | None = setting(
        None,
        "Private key (PEM; P-256, Ed25519, or RSA of at least 2048 bits). If set, cards are "
        "signed, and the public key is published at `/.well-known/jwks.json`.",
    )
    previous_key_files: Paths = setting(
        (), "Earlier keys, public or private, that stay published there."
    )

    def conflicts(self) -> Iterator[Problem]:
        if self.previous_key_files and not self.key_file:
            yield Problem("A2A_SIGNING_PREVIOUS_KEY_FILES", "should come with A2A_SIGNING_KEY_FILE")


class OidcSettings(Group, prefix="A2A_OIDC_"):
    """Tokens of an identity provider (OpenID Connect), accepted in addition to credentials."""

    issuer: IssuerUrl | None = setting(
        None,
        "URL of the issuer, exactly as in its tokens. Its JWTs are then accepted as bearer "
        "tokens. Needs the extra `security`.",
    )
    audience: Texts = setting(
        (), "Accepted audiences (`aud`); a token must name one. Required with an issuer."
    )
    jwks_url: SecureUrl | None = setting(
        None, "URL of the provider's keys. Default: taken from its discovery document."
    )
    algorithms: TokenAlgorithms = setting(
        ("RS256", "PS256", "ES256", "ES384", "EdDSA"), "Accepted signature algorithms."
    )
    clock_skew_seconds: ClassVar[float] = 30
    """Tolerated difference between the clocks of provider and service."""
    principal_claim: Text = setting(
        "sub", "Claim that identifies the caller. It must never be reassigned to another person."
    )
    scope_claim: Text | None = setting(
        None,
        "Claim with the scopes, roles or groups, as words or a list. It may be a path, such as "
        "`realm_access.roles`. Default: `scope`, else `scp`.",
    )
    required_scopes: Scopes = setting((), "Scopes that every token must have.")
    capability_scopes: CapabilityScopes = setting(
        {"a2a:session_shell": "session_shell", "a2a:workspace_mutation": "workspace_mutation"},
        "Capability granted by each scope: `session_shell`, `workspace_mutation` or `supervise`.",
    )
    profile: Profile = setting(
        "auto", "Profile of callers whose token has none of the scopes below."
    )
    profile_scopes: ProfileScopes = setting(
        {}, "Profile for each scope; the first scope in this list that the token has decides."
    )
    token_url: SecureUrl | None = setting(
        None, "Token endpoint for client credentials, published in the card."
    )

    def conflicts(self) -> Iterator[Problem]:
        if self.issuer and not self.audience:
            yield Problem(
                "A2A_OIDC_AUDIENCE",
                "should be set with A2A_OIDC_ISSUER: a token for another service must not be good "
                "here",
            )
        needed = ("jwt", "cryptography")
        if self.issuer and any(importlib.util.find_spec(name) is None for name in needed):
            yield Problem(
                "A2A_OIDC_ISSUER",
                "needs packages that are not installed; install this program with its extra "
                "`security`, or run `pip install 'pyjwt[crypto]'`",
            )

    def granting(self, capability: Capability) -> list[str]:
        """Return the scopes that grant a capability."""
        return [scope for scope, what in self.capability_scopes.items() if what == capability]

    @property
    def scopes(self) -> tuple[str, ...]:
        """All scopes that the settings name."""
        named = (*self.required_scopes, *self.capability_scopes, *self.profile_scopes)
        return tuple(dict.fromkeys(named))


class OpenCodeSettings(Group, prefix="OPENCODE_"):
    """The OpenCode server behind this service."""

    base_url: HttpUrl = setting(
        "http://127.0.0.1:4096", "URL of OpenCode; unused if OpenCode is managed."
    )
    auth_username: Text = setting("opencode", "User name for OpenCode.")
    auth_password: Secret | None = setting(
        None, "Password for OpenCode: the OPENCODE_SERVER_PASSWORD it was started with."
    )
    managed_server: bool | None = setting(
        None,
        "Start and supervise `opencode serve`. Default: true, unless OPENCODE_BASE_URL is set.",
    )
    upstreams: UpstreamEntries = setting(
        (),
        "Several OpenCodes instead of the one at `OPENCODE_BASE_URL`: a JSON list of objects with "
        "`name`, and either `url`, `username`, `password_variable` and `shared`, or `managed` "
        "(how many to start); also `directories`, `max_turns` and `drain`. See "
        "[scaling](scaling.md).",
    )
    upstream_lost_seconds: SecondsOrZero = setting(
        120,
        "Seconds that one of several OpenCodes may be unreachable before its tasks fail and its "
        "conversations continue in another; 0 = wait forever.",
    )
    managed_server_host: Host = setting("127.0.0.1", "Address of the managed OpenCode.")
    managed_server_port: Port | None = setting(
        None, "Port of the managed OpenCode. Default: a free port."
    )
    command: Text = setting("opencode", "Command that starts the managed OpenCode.")
    startup_timeout: Seconds = setting(
        120, "Time limit for the managed OpenCode to start, in seconds."
    )
    ask: Asks | None = setting(
        None,
        "What the managed OpenCode asks permission for: `bash`, `edit`, `webfetch`, `all` "
        "or `none`. Default: `all` with the demo model; otherwise OpenCode's own "
        "configuration decides, which allows everything unless changed.",
    )
    env_passthrough: Texts = setting(
        ("*",),
        "Environment variables passed to the managed OpenCode and its tools: names, in which "
        "`*` matches anything. The settings and secrets of this service are never passed, nor its "
        "OTEL_* and what systemd tells it (NOTIFY_SOCKET and the like).",
    )
    workspace_root: LocalPath | None = setting(
        None,
        "Directory that sessions work in and that no request can leave. Default: the current "
        "directory if OpenCode is managed, a sample project with the demo model, otherwise the "
        "directory that OpenCode was started in.",
    )
    allow_root_workspace: bool = setting(
        False, "Allow `/` as the workspace. The agent can then change every file on the machine."
    )
    provider_id: Text | None = setting(None, "Default provider; set it together with the model.")
    model_id: Text | None = setting(None, "Default model; set it together with the provider.")
    agent: Text | None = setting(None, "OpenCode agent used by every turn.")
    system: Text | None = setting(None, "System text added to every turn.")
    variant: Text | None = setting(None, "Model variant used by every turn.")
    timeout: Seconds = setting(120, "Time limit for one request to OpenCode, in seconds.")
    timeout_stream: SecondsOrZero = setting(
        0,
        "Time limit for a whole turn, in seconds; a restart of the service begins it again. "
        "0 = no limit.",
    )
    max_concurrent_requests: CountOrZero = setting(
        0, "Maximum concurrent requests to OpenCode; more are refused. 0 = no limit."
    )
    max_concurrent_streams: CountOrZero = setting(
        0, "Maximum concurrent turns in OpenCode; more are refused. 0 = no limit."
    )

    def conflicts(self) -> Iterator[Problem]:
        if self.provider_id and not self.model_id:
            yield Problem("OPENCODE_PROVIDER_ID", "should be given together with OPENCODE_MODEL_ID")
        if self.model_id and not self.provider_id:
            yield Problem("OPENCODE_MODEL_ID", "should be given together with OPENCODE_PROVIDER_ID")
        if self.ask is not None and not self.managed_server:
            remedy = "so start it with --managed, or set `permission` in its configuration"
            yield Problem("OPENCODE_ASK", f"is for an OpenCode that this program starts, {remedy}")
        entries, variable, root = self.upstreams, "OPENCODE_UPSTREAMS", self.workspace_root
        # An entry that starts several names each with a number.
        names = [
            f"{one.name}-{number}" if (one.managed or 1) > 1 else one.name
            for one in entries
            for number in range(1, (one.managed or 1) + 1)
        ]
        for name in _repeated(names):
            yield Problem(variable, f"has the same name twice, {name}; give each its own")
        if _repeated(one.url and one.url.rstrip("/") for one in entries):
            text = "has the same url twice, but an OpenCode is run by one entry; remove one"
            yield Problem(variable, text)
        if entries and all(one.drain for one in entries):
            yield Problem(variable, "drains every entry, so that no conversation could begin")
        if self.managed_server_port and sum(one.managed or 0 for one in entries) > 1:
            text = "is one port, and OPENCODE_UPSTREAMS starts several; leave it out"
            yield Problem("OPENCODE_MANAGED_SERVER_PORT", text)
        served = (directory for one in entries for directory in one.directories)
        if outside := [one for one in served if root and not one.is_relative_to(root)]:
            yield Problem(variable, f"{outside[0]} is outside of OPENCODE_WORKSPACE_ROOT")
        if self.managed_server and root and not root.is_dir():
            yield Problem("OPENCODE_WORKSPACE_ROOT", f"{root} is not a directory")

    @property
    def model(self) -> ModelRef | None:
        """The default model; None leaves it to OpenCode."""
        if self.provider_id is None or self.model_id is None:
            return None
        return ModelRef(self.provider_id, self.model_id)


class TaskSettings(Group, prefix="A2A_"):
    """Storage of tasks."""

    task_store_backend: Literal["database", "memory"] = setting(
        "database", "Keep tasks in a database, or in memory until the service ends."
    )
    task_store_database_url: DatabaseUrl | None = setting(
        None,
        "URL of the database: SQLite, or PostgreSQL 14 or later with the extra `postgres`. "
        "Default: a SQLite file for each workspace in the state directory.",
    )
    task_store_pooled: bool = setting(
        False,
        "The URL leads to a pooler in transaction mode, such as PgBouncer. No statement is then "
        "prepared, and no setting stays in a connection.",
    )
    task_store_listen_url: DatabaseUrl | None = setting(
        None,
        "URL of the same PostgreSQL that bypasses the pooler, for the one connection that "
        "receives notifications from other replicas. Without it, the database is polled.",
    )
    task_retention_days: CountOrZero = setting(30, "Days to keep a finished task; 0 = forever.")
    pending_session_claim_ttl_seconds: ClassVar[float] = 30
    """How long a session that a request names stays reserved for its caller."""


class PushSettings(Group, prefix="A2A_PUSH_"):
    """Push notifications: webhooks that are called when the state of a task changes."""

    enabled: bool = setting(True, "Allow callers to register webhooks.")
    allowed_hosts: Texts = setting(
        (), "Hosts that webhooks may be on: names or `*.suffix`; empty = any."
    )
    allow_private_hosts: bool = setting(
        False, "Allow webhooks on loopback and private addresses, and over plain http."
    )
    timeout_seconds: ClassVar[float] = 15
    """Time limit for one notification."""
    give_up_hours: Hours = setting(
        24, "Hours of failed attempts after which a webhook is given up."
    )
    max_per_task: ClassVar[int] = 10
    """Maximum webhooks of one task."""
    max_per_principal: ClassVar[int] = 1000
    """Maximum active webhooks of one caller."""


class NoticeSettings(Group, prefix="A2A_"):
    """Messages to a person when a task waits or ends; see [notifications](notifications.md)."""

    notify: NoticeEntries = setting(
        (),
        "Where messages go: a JSON list of objects with `kind` (`ntfy`, `slack`, `telegram`, "
        "`email`, `webhook` or `webpush`) and what that kind needs; also `name`, `principals` "
        "(whose tasks) and `about` (`waits`, `ends`). Needs `A2A_PUBLIC_URL` for the links.",
    )
    notify_quiet: Quiet | None = setting(
        None,
        "Hours in which no message is sent, such as `22:00-07:00 Europe/Berlin`; without a zone "
        "by this machine's clock. What still waits is told when they are over.",
    )

    def conflicts(self) -> Iterator[Problem]:
        for name in _repeated(entry.name for entry in self.notify):
            yield Problem("A2A_NOTIFY", f"has the same name twice, {name}; give each its own")
        pushes = any(entry.kind == "webpush" for entry in self.notify)
        if pushes and any(importlib.util.find_spec(one) is None for one in ("jwt", "cryptography")):
            yield Problem(
                "A2A_NOTIFY",
                "webpush needs packages that are not installed; install this program with its "
                "extra `security`, or run `pip install 'pyjwt[crypto]'`",
            )
        if self.notify_quiet and not self.notify:
            yield Problem("A2A_NOTIFY_QUIET", "has no effect without A2A_NOTIFY")


class ReplicaSettings(Group, prefix="A2A_REPLICA_"):
    """This process among the replicas that share a PostgreSQL."""

    name: ReplicaName | None = setting(
        None,
        "Name of this replica. Default: HOSTNAME:PORT. A service that restarts under the same "
        "name replaces its predecessor at once.",
    )
    lease_seconds: Annotated[float, Field(ge=4, le=60)] = setting(
        8,
        "Seconds without a write after which a replica counts as dead. One that was killed is "
        "noticed sooner. Should be the same for all replicas.",
    )
    poll_seconds: ClassVar[float] = 0.25
    """Seconds between polls of the database while no notifications arrive."""


class InterruptSettings(Group, prefix="A2A_"):
    """Permissions and questions that pause a turn, and the cancellation of turns."""

    interrupt_request_ttl_seconds: Seconds = setting(
        10800, "Time limit for answering a permission or question, or approving a plan."
    )
    interrupt_request_tombstone_ttl_seconds: ClassVar[float] = 600
    """How long an expired request is reported as expired, rather than as not found."""
    interrupt_default_action: Literal["reject-and-continue", "end-turn"] = setting(
        "reject-and-continue", "What happens when nobody answers in time."
    )
    permission_rules: PermissionRules = setting(
        (),
        "Rules that settle permissions without asking: a list of `{permission, pattern, action}` "
        "with the action `allow`, `ask` or `deny`. The last rule that matches decides.",
    )
    allow_always: bool = setting(False, "Allow the answer `always`, which applies beyond the task.")
    console_answers: bool | None = setting(
        None,
        "Accept answers given to OpenCode directly, such as at its own terminal. If they are not "
        "accepted, such an answer stops the turn and the task fails. Default: accepted, except "
        "with a managed OpenCode, where only the agent itself could give them.",
    )
    cancel_abort_timeout_seconds: ClassVar[float] = 2
    """How long a cancellation waits for OpenCode to stop."""


class TurnSettings(Group, prefix="A2A_TURN_"):
    """When a turn is stopped."""

    silence_seconds: Seconds = setting(
        600, "Seconds of silence from OpenCode after which a turn is checked and ended."
    )
    max_steps: Count = setting(200, "Maximum number of model calls in one turn.")
    max_cost: MoneyOrZero = setting(
        0, "Maximum cost of one turn, by OpenCode's prices; 0 = no limit."
    )
    max_retry_wait_seconds: ClassVar[float] = 600
    """Longest retry delay of a provider that a turn waits for."""


class StreamSettings(Group, prefix="A2A_STREAM_"):
    """Streams of events to a client."""

    keepalive_seconds: Seconds = setting(
        3, "Seconds of silence after which a comment is sent to keep the stream open."
    )
    max_bytes: CountOrZero = setting(
        64 * 2**20, "Maximum size of a stream, in bytes; 0 = no limit."
    )
    max_duration_seconds: SecondsOrZero = setting(
        3600, "Maximum duration of a stream; 0 = no limit."
    )
    idle_timeout_seconds: SecondsOrZero = setting(
        0, "Time without an event after which a stream ends; 0 = no limit."
    )


class LimitSettings(Group, prefix="A2A_"):
    """Limits for each caller and for all callers together."""

    max_request_body_bytes: CountOrZero = setting(
        2**20, "Maximum size of a request body, in bytes; 0 = no limit."
    )
    rate_limit_enabled: bool = setting(True, "Limit the number of requests of each caller.")
    rate_limit_window_seconds: Seconds = setting(60, "Window of the rate limit.")
    rate_limit_max_requests: Count = setting(6000, "Maximum requests of one caller in that window.")
    max_tasks_per_principal: Count = setting(1000, "Maximum open tasks of one caller.")
    max_open_tasks: Count = setting(2000, "Maximum open tasks of all callers together.")
    max_turns_per_principal: CountOrZero = setting(
        0, "Maximum turns of one caller at the same time; more are refused. 0 = no limit."
    )
    budget_cost_per_day: MoneyOrZero = setting(
        0, "Maximum cost of one caller per day (UTC), by OpenCode's prices; 0 = no limit."
    )
    budget_tokens_per_day: CountOrZero = setting(
        0, "Maximum tokens of one caller per day (UTC); 0 = no limit."
    )

    @property
    def budget(self) -> Budget:
        """The budget of a caller whose credential has none of its own."""
        return Budget(
            self.budget_cost_per_day, self.budget_tokens_per_day, self.max_turns_per_principal
        )


class LogSettings(Group, prefix="A2A_LOG_"):
    """What the service logs about itself."""

    level: Level | None = setting(
        None, "Lowest level that is logged. Default: INFO at a terminal, otherwise WARNING."
    )
    payloads: bool = setting(
        False, "Log the bodies of requests and responses at every level. They may be confidential."
    )
    body_limit: CountOrZero = setting(0, "Maximum number of characters logged of a body; 0 = all.")


class TelemetrySettings(Group, prefix="A2A_OTEL_"):
    """Traces for OpenTelemetry. OpenTelemetry's own variables (`OTEL_…`) say where they go."""

    enabled: bool = setting(
        False,
        "Send a trace of every turn by OTLP over HTTP to `OTEL_EXPORTER_OTLP_ENDPOINT`. Needs the "
        "extra `otel`.",
    )
    content: bool = setting(
        False,
        "Put messages, answers, and what tools are given and return into the traces. They may be "
        "confidential.",
    )

    def conflicts(self) -> Iterator[Problem]:
        needed = ("opentelemetry", "opentelemetry.sdk", "opentelemetry.exporter")
        if self.enabled and any(importlib.util.find_spec(name) is None for name in needed):
            yield Problem(
                "A2A_OTEL_ENABLED",
                "needs packages that are not installed; install this program with its extra `otel`",
            )


class ClientSettings(Group, prefix="A2A_CLIENT_"):
    """Calls to other agents, by `opencode-a2a call` and by the `a2a_call` tool."""

    url: HttpUrl | None = setting(
        None,
        "Agent that `call`, `chat`, `tasks`, `task`, `cancel`, `ping` and `console` talk to. "
        "Default: this user's running service on this machine, if there is exactly one.",
    )
    timeout_seconds: Seconds = setting(
        30,
        "How long to wait for an answer, for the next event of a stream, and for an agent that is "
        "away in the middle of a task. The answer to a message that is sent without a stream may "
        "take as long as the work.",
    )
    card_fetch_timeout_seconds: Seconds = setting(5, "Time limit for fetching an agent's card.")
    use_client_preference: bool = setting(False, "Prefer our order of bindings to the agent's.")
    supported_transports: Bindings = setting(
        (HttpBinding.JSONRPC, HttpBinding.HTTP_JSON), "Bindings to use, in order of preference."
    )
    bearer_token: SentToken | None = setting(
        None, "Bearer token for other agents; takes precedence over Basic."
    )
    basic_auth: BasicAuth | None = setting(
        None, "`user:password` for other agents, as plain text or in base64."
    )
    ca_file: LocalPath | None = setting(
        None, "Trusted certificate authorities (PEM), in addition to the system's."
    )
    cert_file: LocalPath | None = setting(
        None, "Client certificate and private key (PEM), for agents that require one."
    )
    protocol_version: ProtocolVersion | None = setting(
        None, "Protocol version to use. Default: the newest that the agent supports."
    )
    cache_ttl_seconds: ClassVar[float] = 900
    """How long an agent's connection and card are cached."""
    cache_maxsize: ClassVar[int] = 256
    """Maximum number of cached agents."""
    allowed_hosts: Texts = setting(
        (),
        "Hosts that may be called: names or `*.suffix`; empty = any. The `a2a_call` tool may "
        "also call agents on these hosts by URL.",
    )
    allow_private_hosts: bool = setting(
        False, "Allow the `a2a_call` tool to call loopback and private addresses."
    )
    polling_fallback_enabled: bool = setting(False, "Poll a task whose answer was not final.")
    polling_fallback_initial_interval_seconds: ClassVar[float] = 0.5
    """First polling interval."""
    polling_fallback_max_interval_seconds: ClassVar[float] = 2
    """Longest polling interval."""
    polling_fallback_backoff_multiplier: ClassVar[float] = 2
    """Factor by which the polling interval grows."""
    polling_fallback_timeout_seconds: ClassVar[float] = 10
    """Time after which polling stops."""


class EnvironmentSettings(Group, prefix="A2A_"):
    """The execution environment as the operator declares it: published, not enforced."""

    sandbox_mode: Literal[
        "unknown", "read-only", "workspace-write", "danger-full-access", "custom"
    ] = setting("unknown", "Sandbox that OpenCode runs in.")
    sandbox_filesystem_scope: Literal[
        "unknown", "workspace_only", "workspace_and_declared_roots", "unrestricted", "custom"
    ] = setting("unknown", "Files that the agent can read.")
    sandbox_writable_roots: Paths = setting(
        (), "Writable directories, in addition to the workspace."
    )
    network_access: Literal["unknown", "disabled", "enabled", "restricted", "custom"] = setting(
        "unknown", "Network access of the agent."
    )
    network_allowed_domains: Texts = setting((), "Domains that the agent can reach.")
    approval_policy: Literal[
        "unknown", "never", "on-request", "on-failure", "untrusted", "custom"
    ] = setting("unknown", "When the agent asks for permission.")
    approval_escalation_behavior: Literal[
        "unknown", "manual", "automatic", "unsupported", "custom"
    ] = setting("unknown", "How refused requests can be escalated.")
    write_access_scope: Literal[
        "unknown",
        "none",
        "workspace_only",
        "workspace_and_declared_roots",
        "unrestricted",
        "custom",
    ] = setting("unknown", "Files that the agent can change.")
    write_access_outside_workspace: Literal["unknown", "allowed", "disallowed", "custom"] = setting(
        "unknown", "Whether the agent can change files outside the workspace."
    )

    def conflicts(self) -> Iterator[Problem]:
        if self.sandbox_writable_roots and self.write_access_scope == "none":
            text = "should be empty when A2A_WRITE_ACCESS_SCOPE is none"
            yield Problem("A2A_SANDBOX_WRITABLE_ROOTS", text)
