"""The contracts about the whole service: the compatibility profile and the wire contract.

Both are computed from the operations of A2A, the declared methods of the extensions, and the
settings of the deployment. The cards and the OpenAPI document carry the same values.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from urllib.parse import urlsplit

from opencode_a2a.a2a import operations
from opencode_a2a.a2a.operations import (
    CARD_PATHS,
    OPERATIONS,
    PREFIXES,
    PUSH_OPERATIONS,
    ROUTES,
    RPC_PATH,
    Operation,
)
from opencode_a2a.a2a.types import Version
from opencode_a2a.config import HttpBinding, Settings
from opencode_a2a.errors import (
    MethodNotFoundError,
    Missing,
    Off,
    RequestTooLargeError,
    UnsupportedOperationError,
)
from opencode_a2a.events import Json, JsonObject
from opencode_a2a.extensions import EXTENSIONS, METHODS
from opencode_a2a.extensions.registry import NOTHING, PROFILE, Extension, aliases
from opencode_a2a.rights import Capability
from opencode_a2a.signing import JWKS_PATH


@dataclass(frozen=True, slots=True)
class Binding:
    """A binding as cards and contracts show it."""

    name: str
    """Its name on a card."""
    label: str
    """Its name in a sentence."""
    url: Callable[[Settings], str]


_HTTP_JSON = Binding("HTTP+JSON", "HTTP+JSON", lambda s: s.interface_url(HttpBinding.HTTP_JSON))
_JSONRPC = Binding("JSONRPC", "JSON-RPC", lambda s: s.interface_url(HttpBinding.JSONRPC))
BINDINGS: Mapping[Version, tuple[Binding, ...]] = {
    Version.V1: (_HTTP_JSON, _JSONRPC),
    # Over HTTP+JSON, the JavaScript client of 0.3 loses ``append`` of artifact updates: each piece
    # of text replaces the one before it.
    Version.V03: (_JSONRPC, _HTTP_JSON),
}
"""The bindings of each version, in the order of preference of its card."""
CARD_PATH = "/.well-known/agent-card.json"
EARLIER_CARD_PATH = "/.well-known/agent.json"
CATALOG_PATH = "/.well-known/ai-catalog.json"
RESOURCE_PATH = "/.well-known/oauth-protected-resource"
DISCOVERY = (CARD_PATH, EARLIER_CARD_PATH, CATALOG_PATH, RESOURCE_PATH, JWKS_PATH)
"""Paths that need no credential: the public card, its earlier path, the AI Catalog, the metadata
for tokens (RFC 9728; if an identity provider is configured), and our public keys, if there are
any."""
LIVE_PATH, READY_PATH, PING_PATH = PROBES = ("/livez", "/readyz", "/ping")
"""Liveness and readiness, for supervisors of the process; they need no credential."""
HEALTH_PATH = "/health"
METRICS_PATH = "/metrics"
API_KEY_HEADER = "X-API-Key"
_CLIENT_CERTIFICATE = "mutualTLS"
_ISSUED = frozenset({"oidc", "jwtAuth", "oauth2"})
"""The security schemes for tokens of an identity provider."""


def spoken_versions(settings: Settings) -> tuple[Version, ...]:
    """Return the versions of A2A that this deployment speaks, newest first."""
    return tuple(one for one in Version if one.value in settings.a2a.supported_protocol_versions)


def discovery(settings: Settings) -> list[str]:
    """Return the open paths that this deployment answers."""
    conditions = {RESOURCE_PATH: settings.oidc.issuer, JWKS_PATH: settings.signing.key_file}
    return [path for path in DISCOVERY if conditions.get(path, True)]


@dataclass(frozen=True, slots=True)
class SecurityScheme:
    """A way to authenticate, as each version of A2A writes it; OpenAPI writes it as 0.3 does."""

    kind: str
    """The name of the field in 1.0."""
    v1: JsonObject
    v03: JsonObject
    scopes: tuple[str, ...] = ()
    """The scopes that every call needs."""

    @classmethod
    def http(cls, scheme: str, form: str | None = None) -> "SecurityScheme":
        written: JsonObject = {"scheme": scheme, **({"bearerFormat": form} if form else {})}
        return cls("httpAuthSecurityScheme", written, {"type": "http", **written})


def security_schemes(settings: Settings) -> dict[str, SecurityScheme]:
    """Return how callers may authenticate, by name; ``security_requirements`` combines them."""
    auth, oidc = settings.auth, settings.oidc
    static = {entry.scheme for entry in auth.static_auth_credentials or () if entry.enabled}
    found: dict[str, SecurityScheme] = {}
    if oidc.issuer and oidc.jwks_url is None:
        url: JsonObject = {"openIdConnectUrl": openid_configuration(oidc.issuer)}
        found["oidc"] = SecurityScheme(
            "openIdConnectSecurityScheme",
            url,
            {"type": "openIdConnect", **url},
            oidc.required_scopes,
        )
    elif oidc.issuer:  # there may be no document to discover
        jwt = SecurityScheme.http("bearer", "JWT")
        found["jwtAuth"] = replace(jwt, scopes=oidc.required_scopes)
    if oidc.issuer and oidc.token_url:
        scopes: JsonObject = {scope: f"Scope {scope}" for scope in oidc.scopes}
        credentials: JsonObject = {"tokenUrl": oidc.token_url, "scopes": scopes}
        flows: JsonObject = {"flows": {"clientCredentials": credentials}}
        found["oauth2"] = SecurityScheme(
            "oauth2SecurityScheme", flows, {"type": "oauth2", **flows}, oidc.required_scopes
        )
    if auth.bearer_token or "bearer" in static or not settings.knows_callers:
        found["bearerAuth"] = SecurityScheme.http("bearer", "opaque")
    if "basic" in static:
        found["basicAuth"] = SecurityScheme.http("basic")
    if "api_key" in static:
        named: JsonObject = {"name": API_KEY_HEADER}
        found["apiKeyAuth"] = SecurityScheme(
            "apiKeySecurityScheme",
            {"location": "header", **named},
            {"type": "apiKey", "in": "header", **named},
        )
    if settings.tls.client_ca_file:
        found[_CLIENT_CERTIFICATE] = SecurityScheme("mtlsSecurityScheme", {}, {"type": "mutualTLS"})
    return found


def security_requirements(
    settings: Settings, capability: Capability | None = None
) -> list[dict[str, tuple[str, ...]]]:
    """Return the alternatives for a caller: each names schemes, all needed, with their scopes.

    For a method that needs a capability, tokens need one more scope; whether a credential of the
    settings has the capability does not show here.
    """
    oidc, schemes = settings.oidc, security_schemes(settings)
    # A client certificate is needed in addition to each credential, not instead of it.
    certificate: dict[str, tuple[str, ...]] = (
        {_CLIENT_CERTIFICATE: ()} if schemes.pop(_CLIENT_CERTIFICATE, None) else {}
    )
    ways: list[dict[str, tuple[str, ...]]] = []
    for name, scheme in schemes.items():
        if capability is None or name not in _ISSUED:
            ways.append({name: scheme.scopes, **certificate})
            continue
        for scope in oidc.granting(capability):
            needed = tuple(dict.fromkeys((*scheme.scopes, scope)))
            ways.append({name: needed, **certificate})
    return ways


def openid_configuration(issuer: str) -> str:
    """Return the address of an issuer's discovery document."""
    return f"{issuer.rstrip('/')}/.well-known/openid-configuration"


def metadata_url(settings: Settings) -> str:
    """Return the address of ``protected_resource``.

    RFC 9728 puts its path before that of the service.
    """
    parts = urlsplit(settings.public_url)
    return parts._replace(path=RESOURCE_PATH + parts.path).geturl()


def protected_resource(settings: Settings) -> JsonObject:
    """Return who issues tokens for this service, and the scopes it knows (RFC 9728)."""
    about = settings.a2a.documentation_url
    return {
        "resource": settings.public_url,
        "resource_name": settings.a2a.title,
        "authorization_servers": [settings.oidc.issuer],
        "scopes_supported": [*settings.oidc.scopes],
        "bearer_methods_supported": ["header"],
        **({"resource_documentation": about} if about else {}),
    }


# --- shared by both contracts -----------------------------------------------------------------


PUSH_OFF = Off("disabled_by_configuration", "A2A_PUSH_ENABLED")
"""Why the push operations of A2A are refused where webhooks are off."""


def offered(settings: Settings) -> list[Operation]:
    """Return A2A's operations that this deployment does not refuse as a whole."""
    return [one for one in OPERATIONS if settings.push.enabled or one not in PUSH_OPERATIONS]


def core_methods(settings: Settings) -> list[str]:
    """Return A2A's own methods that are offered, in the versions that this deployment speaks."""
    return _named(settings, offered(settings))


def _named(settings: Settings, which: Iterable[Operation]) -> list[str]:
    return [name for v in spoken_versions(settings) for one in which if (name := one.named(v))]


def _refused_methods(settings: Settings) -> list[str]:
    """Return A2A's own methods that a setting switches off."""
    return [] if settings.push.enabled else _named(settings, PUSH_OPERATIONS)


def endpoints(settings: Settings) -> list[str]:
    """Return the verb and path of every route of A2A."""
    versions = spoken_versions(settings)
    found = [
        f"{verb} {PREFIXES[version]}{path}"
        for version in versions
        for path, verbs in ROUTES.items()
        for verb, operation in verbs.items()
        if operation in offered(settings)
    ]
    cards = [path for path, version in CARD_PATHS if version in versions]
    return [*found, *(f"GET {path}" for path in (*cards, *discovery(settings))), f"POST {RPC_PATH}"]


def protocol_summary(settings: Settings) -> JsonObject:
    """Return the versions, methods and routes that the deployment offers."""
    a2a = settings.a2a
    supported: list[Json] = [*a2a.supported_protocol_versions]
    versions: JsonObject = {
        version.value: {
            "enabled": True,
            "default": version.value == a2a.protocol_version,
            "status": "supported",
            "supported_features": [
                *(one.label for one in reversed(BINDINGS[Version.V1]) if one in BINDINGS[version]),
                "streaming",
                "resubscription with Last-Event-ID",
                "task list" if version is Version.V1 else "task list over HTTP+JSON only",
                "cancellation",
                "extended agent card",
                "extension methods",
                *(("push notifications",) if settings.push.enabled else ()),
            ],
            "known_gaps": [] if settings.push.enabled else ["push notifications are refused"],
        }
        for version in spoken_versions(settings)
    }
    return {
        "protocol_version": a2a.protocol_version,
        "default_protocol_version": a2a.protocol_version,
        "supported_protocol_versions": supported,
        "protocol_compatibility": {
            "default": a2a.protocol_version,
            "supported": supported,
            "versions": versions,
        },
        "core": {
            "jsonrpc_methods": [*core_methods(settings)],
            "http_endpoints": [*endpoints(settings)],
        },
        "service_behaviors": _behaviors(settings),
    }


_ENDED: dict[Version, JsonObject] = {
    Version.V03: {
        "behavior": "replay_terminal_task_once_then_close",
        "delivery": "single_task_snapshot",
        "closes_stream": True,
    },
    Version.V1: {"behavior": "refused", "error_type": UnsupportedOperationError.reason},
}
"""The result of subscribing to an ended task."""


def _behaviors(settings: Settings) -> JsonObject:
    """Return how the service behaves where A2A leaves room."""
    versions = spoken_versions(settings)

    def named(*which: Operation, in_: tuple[Version, ...] = versions) -> list[Json]:
        return [name for one in which for version in in_ if (name := one.named(version))]

    canceled: JsonObject = {
        "behavior": "return_current_terminal_task",
        "state": "canceled",
        "error": None,
    }
    methods: JsonObject = {}
    for version in versions:
        behaviors: dict[Operation, JsonObject] = {
            operations.CANCEL_TASK: {"idempotency": {"already_canceled": canceled}},
            operations.SUBSCRIBE_TO_TASK: {
                "resumption": "Last-Event-ID, or the query parameter after",
                "terminal_state_behavior": _ENDED[version],
            },
            operations.SEND_MESSAGE: {
                "idempotency": "one principal, message id and content make one task; the same id "
                "with other content is a new message"
            },
        }
        methods |= {one.named(version) or "": behavior for one, behavior in behaviors.items()}
    most = settings.limits.max_request_body_bytes or None
    old: JsonObject = {"final": True} if Version.V03 in versions else {}
    return {
        "classification": "service-level-semantic-enhancement",
        "methods": methods,
        "terminal_states": {"behavior": "first_terminal_state_wins", "later_changes": "refused"},
        "accepted_output_modes": {
            "persistence": "stored_with_the_task",
            "applied_to": named(
                operations.GET_TASK, operations.LIST_TASKS, operations.SUBSCRIBE_TO_TASK
            ),
        },
        "request_body": {
            "max_bytes": most,
            "behavior": "larger_is_refused" if most else "any_size_is_taken",
            "http_status": RequestTooLargeError.http,
            "error_type": RequestTooLargeError.reason,
        },
        "streams": {
            "input_required": {
                "behavior": "stream_ends",
                "applies_to": [
                    *named(operations.SEND_STREAMING_MESSAGE),
                    # A subscription of 1.0 continues until the task ends.
                    *(named(operations.SUBSCRIBE_TO_TASK, in_=(Version.V03,)) if old else ()),
                ],
                **old,
                "continue_with": named(operations.SUBSCRIBE_TO_TASK),
            }
        },
    }


# --- the compatibility profile ----------------------------------------------------------------

_DEPLOYMENT = "single_tenant_shared_workspace"
PROFILE_SUMMARY: JsonObject = {"profile_id": PROFILE, "deployment": _DEPLOYMENT}
"""Which profile this is, for the wire contract and ``/health``."""


def profile(settings: Settings, missing: Missing = NOTHING) -> JsonObject:
    """Return what this deployment runs as, what it keeps stable, and how it behaves."""
    core: JsonObject = {"surface": "core", "availability": "always", "retention": "required"}
    refused: JsonObject = {
        "surface": "core",
        "availability": "disabled",
        "retention": "deployment-conditional",
        "toggle": PUSH_OFF.toggle,
    }
    context: dict[str, str | None] = {
        "project": settings.a2a.project,
        "workspace_root": None,
        "agent": settings.opencode.agent,
        "variant": settings.opencode.variant,
    }
    return {
        "profile_id": PROFILE,
        "deployment": {
            "id": _DEPLOYMENT,
            "single_tenant": True,
            "shared_workspace_across_consumers": True,
            "tenant_isolation": "none",
        },
        "runtime_features": _runtime_features(settings, missing),
        "runtime_context": {name: value for name, value in context.items() if value is not None},
        **protocol_summary(settings),
        "extension_retention": {one.uri: one.retention for one in declared(missing)},
        "method_retention": {
            **dict.fromkeys(core_methods(settings), core),
            **dict.fromkeys(_refused_methods(settings), refused),
            **{
                method.name: extension.retention_of(method, settings, missing)
                for extension in EXTENSIONS
                for method in extension.methods.values()
            },
        },
        "consumer_guidance": [
            "Rely on the core methods; take extension methods from the wire contract.",
            "Treat methods that are deployment-conditional as absent until they are listed.",
            "Ignore metadata that you do not know: text, artifacts and states are right without.",
            "Separate tenants by separate deployments; callers here share one workspace.",
        ],
    }


def _runtime_features(settings: Settings, missing: Missing) -> JsonObject:
    override = settings.directory_override
    declared = settings.environment
    roots, domains = declared.sandbox_writable_roots, declared.network_allowed_domains
    methods = {method.name: method for method in METHODS}

    def toggle(name: str) -> JsonObject:
        method = methods[name]
        off, condition = method.off(settings, missing), method.condition
        variable = off.toggle if off else condition.variable if condition else None
        state = method.state(settings, missing)
        return {"enabled": off is None, "availability": state, "toggle": variable}

    return {
        "directory_binding": {
            "allow_override": override,
            "scope": "workspace_root_or_descendant" if override else "workspace_root_only",
            "metadata_field": "metadata.opencode.directory",
        },
        "workspace_binding": {
            "enabled": "workspaces" not in missing,
            "metadata_field": "metadata.opencode.workspace.id",
            "upstream_query_param": "workspace",
            "precedence": "prefer_workspace_else_directory",
        },
        "session_shell": toggle("opencode.sessions.shell"),
        "session_mutations": toggle("opencode.sessions.create"),
        "workspace_mutations": toggle("opencode.workspaces.create"),
        # Declared by the operator; the service cannot check it.
        "execution_environment": {
            "sandbox": {
                "mode": declared.sandbox_mode,
                "filesystem_scope": declared.sandbox_filesystem_scope,
                **({"writable_roots": [str(root) for root in roots]} if roots else {}),
            },
            "network": {
                "access": declared.network_access,
                **({"allowed_domains": [*domains]} if domains else {}),
            },
            "approval": {
                "policy": declared.approval_policy,
                "escalation_behavior": declared.approval_escalation_behavior,
            },
            "write_access": {
                "scope": declared.write_access_scope,
                "outside_workspace": declared.write_access_outside_workspace,
            },
        },
        "service_features": {
            "streaming": True,
            "health_endpoint": True,
            "metrics_endpoint": settings.a2a.metrics_enabled,
        },
    }


# --- the wire contract ------------------------------------------------------------------------


def wire_contract(settings: Settings, missing: Missing = NOTHING) -> JsonObject:
    """Return every method and endpoint that answers, and those that could be switched on."""
    off = {method.name: method.off(settings, missing) for method in METHODS}
    names: list[Json] = [name for name, why in off.items() if why is None]
    off |= dict.fromkeys(_refused_methods(settings), PUSH_OFF)
    return {
        **protocol_summary(settings),
        "profile": PROFILE_SUMMARY,
        "preferred_transport": BINDINGS[Version.V1][0].name,
        "additional_transports": [one.name for one in BINDINGS[Version.V1][1:]],
        "extensions": {
            "jsonrpc_methods": names,
            "conditionally_available_methods": {
                name: {"reason": why.reason, **({"toggle": why.toggle} if why.toggle else {})}
                for name, why in off.items()
                if why is not None
            },
            "extension_uris": [extension.uri for extension in declared(missing)],
        },
        "all_jsonrpc_methods": [*core_methods(settings), *names],
        "unsupported_method_error": {
            "code": MethodNotFoundError.code,
            "type": MethodNotFoundError.reason,
            "data_fields": [*MethodNotFoundError.data_fields],
        },
    }


COMPATIBILITY_PROFILE = Extension(
    key="compatibility_profile",
    title="A2A compatibility profile",
    anchor="a2a-compatibility-profile-v1",
    summary="What this deployment runs as, what it keeps stable, and how it behaves.",
    aliases=aliases("urn:a2a:compatibility-profile/v1", "compatibility-profile"),
    surface="discovery",
    extended=profile,
)
WIRE_CONTRACT = Extension(
    key="wire_contract",
    title="A2A wire contract",
    anchor="a2a-wire-contract-v1",
    summary="Every method and endpoint that answers, and those that could be switched on.",
    aliases=aliases("urn:a2a:wire-contract/v1", "wire-contract"),
    surface="discovery",
    extended=wire_contract,
)
ALL_EXTENSIONS = (*EXTENSIONS, COMPATIBILITY_PROFILE, WIRE_CONTRACT)


def declared(missing: Missing) -> list[Extension]:
    """Return the extensions that cards name where an OpenCode cannot do some things."""
    return [one for one in ALL_EXTENSIONS if one.requires not in missing]


EXTENSION_NAMES = frozenset(name for one in ALL_EXTENSIONS for name in (one.uri, *one.aliases))
"""All URIs, current and earlier, that callers may activate extensions by."""
