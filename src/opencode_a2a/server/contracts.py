"""What is published about the whole service: two contracts, all extensions, and the skills.

Computed from the declared methods of A2A (``handler``, ``rest``) and of the extensions, and from
the settings of the deployment. The card and the OpenAPI document carry the same values.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from opencode_a2a import __version__
from opencode_a2a.a2a.operations import CARD_PATHS, OPERATIONS, PREFIXES, ROUTES
from opencode_a2a.a2a.render import known
from opencode_a2a.a2a.types import Version
from opencode_a2a.config import EnvironmentSettings, Settings
from opencode_a2a.errors import (
    MethodNotFoundError,
    RequestTooLargeError,
    UnsupportedOperationError,
)
from opencode_a2a.events import Json, JsonObject
from opencode_a2a.extensions import EXTENSIONS, SKILLS
from opencode_a2a.extensions.registry import PROFILE, Extension, Method, aliases
from opencode_a2a.server.announced import Announcement
from opencode_a2a.server.card import BINDINGS, DISCOVERY, CardFacts

COMPATIBILITY_PROFILE = Extension(
    key="compatibility_profile",
    title="A2A compatibility profile",
    anchor="a2a-compatibility-profile-v1",
    summary="What this deployment runs as, what it keeps stable, and how it behaves.",
    aliases=aliases("urn:a2a:compatibility-profile/v1", "compatibility-profile"),
    surface="discovery",
)
WIRE_CONTRACT = Extension(
    key="wire_contract",
    title="A2A wire contract",
    anchor="a2a-wire-contract-v1",
    summary="Every method and endpoint that answers, and those that could be switched on.",
    aliases=aliases("urn:a2a:wire-contract/v1", "wire-contract"),
    surface="discovery",
)
ALL_EXTENSIONS = (*EXTENSIONS, COMPATIBILITY_PROFILE, WIRE_CONTRACT)


@dataclass(frozen=True, slots=True)
class Contracts:
    """All that is published, for one deployment."""

    announcements: tuple[Announcement, ...]
    skills: tuple[JsonObject, ...]
    by_key: dict[str, JsonObject]
    """The whole params of each extension, by its name in the OpenAPI document."""


def contracts(settings: Settings) -> Contracts:
    """Return everything that is to be published about a deployment."""
    told = {extension.key: extension.extended_params(settings) for extension in EXTENSIONS}
    told[COMPATIBILITY_PROFILE.key] = profile(settings)
    told[WIRE_CONTRACT.key] = wire_contract(settings)
    announced = tuple(
        Announcement(e.uri, e.summary, e.aliases, e.public_params(settings), told[e.key])
        for e in ALL_EXTENSIONS
    )
    whole = {
        e.key: {"uri": e.uri, **e.public_params(settings), **told[e.key]} for e in ALL_EXTENSIONS
    }
    return Contracts(announced, tuple(_skills(settings)), whole)


def declared() -> Iterable[tuple[Extension, Method]]:
    """Yield every extension method with its extension."""
    for extension in EXTENSIONS:
        for method in extension.methods.values():
            yield extension, method


def enabled(settings: Settings) -> list[Method]:
    return [method for _, method in declared() if method.state(settings) == "enabled"]


def spoken(settings: Settings) -> tuple[Version, ...]:
    """Return the protocol lines that this service speaks, newest first."""
    return tuple(line for line in Version if line.value in settings.a2a.supported_protocol_versions)


def schemes(settings: Settings) -> list[str]:
    """Return the schemes of the credentials that are accepted."""
    auth = settings.auth
    found = {entry.scheme for entry in auth.static_auth_credentials or () if entry.enabled}
    if auth.bearer_token or not found:
        found.add("bearer")
    return sorted(found, reverse=True)


def card_facts(settings: Settings, published: Contracts) -> CardFacts:
    """Return what the cards are made of."""
    a2a, offered = settings.a2a, schemes(settings)
    return CardFacts(
        name=a2a.title,
        description=a2a.description,
        version=a2a.version or __version__,
        public_url=settings.public_url,
        documentation_url=a2a.documentation_url,
        bearer="bearer" in offered,
        basic="basic" in offered,
        demo=a2a.demo,
        project=a2a.project,
        lines=spoken(settings),
        extensions=published.announcements,
        skills=published.skills,
    )


# --- what both contracts say ------------------------------------------------------------------


def core_methods(settings: Settings) -> list[str]:
    """Return A2A's own methods, in the lines that are spoken."""
    return [name for line in spoken(settings) for m in OPERATIONS if (name := m.named(line))]


def endpoints(settings: Settings) -> list[str]:
    """Return every verb and path of A2A that answers."""
    lines = spoken(settings)
    found = [
        f"{verb} {PREFIXES[line]}{path}"
        for line in lines
        for path, verbs in ROUTES.items()
        for verb in verbs
    ]
    cards = [path for path, line in CARD_PATHS if line in lines]
    return [*found, *(f"GET {path}" for path in (*cards, *DISCOVERY)), "POST /"]


def protocol_summary(settings: Settings) -> JsonObject:
    """Return which lines are spoken and what answers; the same in both contracts."""
    a2a = settings.a2a
    supported: list[Json] = [*a2a.supported_protocol_versions]
    versions: JsonObject = {
        line.value: {
            "enabled": True,
            "default": line.value == a2a.protocol_version,
            "status": "supported",
            "supported_features": [
                *("JSON-RPC", "HTTP+JSON", "streaming", "resubscription with Last-Event-ID"),
                "task list" if line is Version.V1 else "task list over HTTP+JSON only",
                *("cancellation", "extended agent card", "extension methods"),
            ],
            "known_gaps": ["push notifications are refused"],
        }
        for line in spoken(settings)
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


_METHOD_BEHAVIORS: dict[str, JsonObject] = {
    "CancelTask": {
        "idempotency": {
            "already_canceled": {
                "behavior": "return_current_terminal_task",
                "state": "canceled",
                "error": None,
            }
        }
    },
    "SubscribeToTask": {"resumption": "Last-Event-ID, or the query parameter after"},
    "SendMessage": {"idempotency": "one principal and message id make one task"},
}
_ENDED: dict[Version, JsonObject] = {
    Version.V03: {
        "behavior": "replay_terminal_task_once_then_close",
        "delivery": "single_task_snapshot",
        "closes_stream": True,
    },
    Version.V1: {"behavior": "refused", "error_type": UnsupportedOperationError.reason},
}
"""What a subscription to an ended task gets."""


def _behaviors(settings: Settings) -> JsonObject:
    """Return how the service behaves where A2A leaves room."""

    def named(operation: str, *lines: Version) -> list[Json]:
        method = next(each for each in OPERATIONS if each.name == operation)
        return [name for line in lines if (name := method.named(line))]

    lines = spoken(settings)
    methods: JsonObject = {}
    for line in lines:
        for operation, told in _METHOD_BEHAVIORS.items():
            for name in named(operation, line):
                ended: JsonObject = {"terminal_state_behavior": _ENDED[line]}
                extra = ended if operation == "SubscribeToTask" else {}
                methods[str(name)] = {**told, **extra}
    most = settings.limits.max_request_body_bytes or None
    return {
        "classification": "service-level-semantic-enhancement",
        "methods": methods,
        "terminal_states": {
            "behavior": "first_terminal_state_wins",
            "later_changes": "refused",
        },
        "accepted_output_modes": {
            "persistence": "stored_with_the_task",
            "applied_to": [
                name
                for operation in ("GetTask", "ListTasks", "SubscribeToTask")
                for name in named(operation, *lines)
            ],
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
                    *named("SendStreamingMessage", *lines),
                    *(named("SubscribeToTask", Version.V03) if Version.V03 in lines else ()),
                ],
                **({"final": True} if Version.V03 in lines else {}),
                "continue_with": named("SubscribeToTask", *lines),
            }
        },
    }


# --- the compatibility profile ----------------------------------------------------------------

_CORE_RETENTION: JsonObject = {"surface": "core", "availability": "always", "retention": "required"}


def profile(settings: Settings) -> JsonObject:
    return {
        "profile_id": PROFILE,
        "deployment": {
            "id": "single_tenant_shared_workspace",
            "single_tenant": True,
            "shared_workspace_across_consumers": True,
            "tenant_isolation": "none",
        },
        "runtime_features": _runtime_features(settings),
        "runtime_context": _runtime_context(settings),
        **protocol_summary(settings),
        "extension_retention": {e.uri: _extension_retention(e) for e in ALL_EXTENSIONS},
        "method_retention": {
            **dict.fromkeys(core_methods(settings), _CORE_RETENTION),
            **{m.name: _method_retention(e, m, settings) for e, m in declared()},
        },
        "consumer_guidance": [
            "Rely on the core methods; take extension methods from the wire contract.",
            "Treat methods that are deployment-conditional as absent until they are listed.",
            "Ignore metadata that you do not know: text, artifacts and states are right without.",
            "Separate tenants by separate deployments; callers here share one workspace.",
        ],
    }


def _runtime_features(settings: Settings) -> JsonObject:
    override = settings.a2a.allow_directory_override and settings.workspace is not None
    return {
        "directory_binding": {
            "allow_override": override,
            "scope": "workspace_root_or_descendant" if override else "workspace_root_only",
            "metadata_field": "metadata.opencode.directory",
        },
        "workspace_binding": {
            "enabled": True,
            "metadata_field": "metadata.opencode.workspace.id",
            "upstream_query_param": "workspace",
            "precedence": "prefer_workspace_else_directory",
        },
        "session_shell": _toggle("opencode.sessions.shell", settings),
        "session_mutations": _toggle("opencode.sessions.create", settings),
        "workspace_mutations": _toggle("opencode.workspaces.create", settings),
        "execution_environment": _environment(settings.environment),
        "service_features": {
            "streaming": True,
            "health_endpoint": True,
            "metrics_endpoint": settings.a2a.metrics_enabled,
        },
    }


def _toggle(name: str, settings: Settings) -> JsonObject:
    method = next(method for _, method in declared() if method.name == name)
    state = method.state(settings)
    return {
        "enabled": state == "enabled",
        "availability": state,
        "toggle": method.condition.variable if method.condition else None,
    }


def _environment(said: EnvironmentSettings) -> JsonObject:
    """Return the execution environment as the operator declares it."""
    roots, domains = said.sandbox_writable_roots, said.network_allowed_domains
    return {
        "sandbox": {
            "mode": said.sandbox_mode,
            "filesystem_scope": said.sandbox_filesystem_scope,
            **({"writable_roots": [str(root) for root in roots]} if roots else {}),
        },
        "network": {
            "access": said.network_access,
            **({"allowed_domains": [*domains]} if domains else {}),
        },
        "approval": {
            "policy": said.approval_policy,
            "escalation_behavior": said.approval_escalation_behavior,
        },
        "write_access": {
            "scope": said.write_access_scope,
            "outside_workspace": said.write_access_outside_workspace,
        },
    }


def _runtime_context(settings: Settings) -> JsonObject:
    root = settings.workspace if settings.a2a.expose_workspace_root_in_card else None
    return known(
        project=settings.a2a.project,
        workspace_root=str(root) if root else None,
        agent=settings.opencode.agent,
        variant=settings.opencode.variant,
    )


def _extension_retention(extension: Extension) -> JsonObject:
    methods = extension.methods.values()
    experimental = any(method.stability == "experimental" for method in methods)
    retention = "required" if extension.surface == "core-runtime-metadata" else "stable"
    if experimental or any(method.condition for method in methods):
        retention = "mixed"
    return {
        "surface": extension.surface,
        "availability": "always",
        "retention": retention,
        **({"upstream_stability": "mixed"} if experimental else {}),
        **extension.scope,
    }


def _method_retention(extension: Extension, method: Method, settings: Settings) -> JsonObject:
    told: JsonObject = {
        "surface": "extension",
        "availability": "always",
        "retention": "experimental-upstream" if method.stability == "experimental" else "stable",
        "extension_uri": extension.uri,
    }
    if method.condition:
        enabled = method.state(settings) == "enabled"
        told["availability"] = "enabled" if enabled else "disabled"
        told["retention"] = "deployment-conditional"
        told["toggle"] = method.condition.variable
    return told


# --- the wire contract ------------------------------------------------------------------------


def wire_contract(settings: Settings) -> JsonObject:
    names: list[Json] = [method.name for method in enabled(settings)]
    return {
        **protocol_summary(settings),
        "profile": {"profile_id": PROFILE, "deployment": "single_tenant_shared_workspace"},
        "preferred_transport": BINDINGS[0],
        "additional_transports": [*BINDINGS[1:]],
        "extensions": {
            "jsonrpc_methods": names,
            "conditionally_available_methods": {
                method.name: {
                    "reason": method.state(settings),
                    "toggle": method.condition.variable,
                }
                for _, method in declared()
                if method.condition and method.state(settings) != "enabled"
            },
            "extension_uris": [extension.uri for extension in ALL_EXTENSIONS],
        },
        "all_jsonrpc_methods": [*core_methods(settings), *names],
        "unsupported_method_error": {
            "code": MethodNotFoundError.code,
            "type": MethodNotFoundError.reason,
            "data_fields": [*MethodNotFoundError.data_fields],
        },
    }


# --- skills -----------------------------------------------------------------------------------


def _skills(settings: Settings) -> Iterable[JsonObject]:
    for extension in SKILLS:
        methods = extension.enabled(settings)
        yield {
            "id": extension.skill,
            "name": extension.title,
            "description": f"{extension.summary} JSON-RPC methods, listed in the extension.",
            "tags": ["opencode", *extension.tags],
            "inputModes": ["application/json"],
            "outputModes": ["application/json"],
            "examples": [f"{method.name}: {method.summary}" for method in methods[:8]],
        }
