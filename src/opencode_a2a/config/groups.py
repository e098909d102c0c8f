"""The settings themselves: each written once, with its name, its default and what it does.

``settings`` puts the groups together. Checks here look at one value; what needs two is there.
"""

from collections.abc import Iterator
from typing import Annotated, ClassVar, Literal, NamedTuple, TypeVar

from pydantic import BaseModel, Field

from opencode_a2a.config.values import (
    STRICT,
    Asks,
    BasicAuth,
    Count,
    CountOrOff,
    Credentials,
    DatabaseUrl,
    HttpUrl,
    Level,
    Lines,
    LocalPath,
    Paths,
    PeerEntries,
    PermissionRules,
    Port,
    ProtocolLine,
    Seconds,
    SecondsOrOff,
    Secret,
    SentToken,
    Text,
    Texts,
    Token,
    Transports,
    default_state_dir,
)
from opencode_a2a.ids import ModelRef

T = TypeVar("T")


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

    host: Text = setting("127.0.0.1", "Address to listen on.")
    port: Port = setting(8000, "Port to listen on.")
    public_url: HttpUrl | None = setting(
        None, "Base URL that clients reach, as told in the card; by default http://HOST:PORT."
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
    protocol_version: ProtocolLine = setting("0.3", "Protocol line of a request that names none.")
    supported_protocol_versions: Lines = setting(("0.3", "1.0"), "Protocol lines that are spoken.")
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
        False, "Tell the workspace directory in the extended card."
    )
    fetch_files: bool = setting(True, "Fetch file parts that are given by http or https URL.")
    fetch_files_max_count: Count = setting(10, "Files that are fetched for one message.")
    fetch_files_max_bytes: Count = setting(10 * 2**20, "Largest file that is fetched.")
    fetch_files_max_total_bytes: Count = setting(
        10 * 2**20, "Size of all files together that are fetched for one message."
    )
    fetch_files_timeout_seconds: Seconds = setting(20, "Time to fetch the files of one message.")
    peers: PeerEntries = setting(
        (),
        "Agents that the `a2a_call` tool may call, by name or URL: a list of "
        "`{name, url, credential}`; `credential` names the variable with the bearer token.",
    )
    peers_allow_urls: bool = setting(
        False, "Let the `a2a_call` tool call any URL; one that is not listed gets no credential."
    )
    peers_wait_seconds: Annotated[float, Field(gt=0, le=280)] = setting(
        240, "Time that the tool waits for an agent before it gives the model a handle."
    )
    http_gzip_minimum_size: CountOrOff = setting(
        8192, "Answers of this size and more are compressed; 0 = never."
    )
    metrics_enabled: bool = setting(True, "Offer `/metrics`.")
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
        "Several credentials: a list of `{scheme, principal, token}` (bearer) or "
        "`{scheme, username, password}` (basic), each with optional `credential_id`, "
        "`capabilities` (`session_shell`, `workspace_mutation`) and `enabled`.",
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


class LogSettings(Group, prefix="A2A_LOG_"):
    """What is written to the log."""

    level: Level = setting("WARNING", "Lowest level that is logged.")
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
    """When a turn is given up: it has no total time limit."""

    silence_seconds: Seconds = setting(
        600, "Silence of OpenCode after which a turn is checked and ended."
    )
    max_steps: Count = setting(200, "Model calls in one turn.")
    max_retry_wait_seconds: Seconds = setting(
        600, "Longest wait for a provider's retry that is sat out."
    )


class InterruptSettings(Group, prefix="A2A_"):
    """Permissions and questions that stop a turn, and how a turn is stopped."""

    interrupt_request_ttl_seconds: Seconds = setting(
        10800, "Time to answer a permission or question."
    )
    interrupt_request_tombstone_ttl_seconds: SecondsOrOff = setting(
        600, "Time for which an expired one is still told from an unknown one."
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
        "Database: a SQLite URL, whatever driver it names; by default a file for each "
        "workspace in the state directory.",
    )
    task_retention_days: CountOrOff = setting(
        30, "Days for which a finished task is kept; 0 = for ever."
    )
    pending_session_claim_ttl_seconds: Seconds = setting(
        30, "Time for which a session named by a request is reserved."
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
    managed_server: bool = setting(False, "Start and own an `opencode serve`.")
    managed_server_host: Text = setting("127.0.0.1", "Address of the managed OpenCode.")
    managed_server_port: Port | None = setting(
        None, "Port of the managed OpenCode; by default a free one."
    )
    command: Text = setting("opencode", "Program of the managed OpenCode.")
    startup_timeout: Seconds = setting(20, "Seconds for the managed OpenCode to start.")
    ask: Asks | None = setting(
        None,
        "What the managed OpenCode asks for before it does it: `bash`, `edit`, `webfetch`, `all` "
        "or `none`. By default the demo asks for all, and otherwise OpenCode's own "
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
        "the current directory when OpenCode is managed, else OpenCode's own.",
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
        0, "Requests to OpenCode at once, refused beyond; 0 = no limit."
    )
    max_concurrent_streams: CountOrOff = setting(
        0, "Turns in OpenCode at once, refused beyond; 0 = no limit."
    )

    @property
    def model(self) -> ModelRef | None:
        """The default model; None leaves it to OpenCode."""
        if self.provider_id is None or self.model_id is None:
            return None
        return ModelRef(self.provider_id, self.model_id)


class EnvironmentSettings(Group, prefix="A2A_"):
    """The execution environment as the operator declares it: told to clients, not enforced."""

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

    timeout_seconds: Seconds = setting(30, "Time for one call.")
    card_fetch_timeout_seconds: Seconds = setting(5, "Time to fetch an agent's card.")
    use_client_preference: bool = setting(
        False, "Choose the binding by our order instead of the agent's."
    )
    supported_transports: Transports = setting(
        ("JSONRPC", "HTTP+JSON"), "Bindings to use, in this order."
    )
    bearer_token: SentToken | None = setting(
        None, "Bearer token for other agents; wins over Basic."
    )
    basic_auth: BasicAuth | None = setting(
        None, "`user:password` for other agents, plain or in base64."
    )
    protocol_version: ProtocolLine | None = setting(
        None, "Protocol line to speak; by default the agent's newest."
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
