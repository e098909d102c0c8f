"""How an extension and its methods are declared, and what follows from a declaration.

A method is declared once, by a decorator on its handler (``Extension.method``): name, access,
possible errors, an example, and what is particular about it. Params and result are read from the
annotations, the summary from the docstring. Dispatch, validation, cards, OpenAPI and the reference
pages are all computed from that.
"""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from enum import StrEnum
from inspect import getdoc
from typing import Any, Final, Literal, TypeVar, get_args, get_type_hints

from opencode_a2a.config import Settings
from opencode_a2a.errors import (
    AuthorizationForbiddenError,
    DisabledReason,
    Feature,
    InvalidFieldError,
    InvalidParamsError,
    MethodNotFoundError,
    Missing,
    MissingFieldError,
    NotInOpenCodeError,
    Off,
    ServiceError,
    SessionNotFoundError,
    StoreUnavailableError,
    UpstreamBackpressureError,
    UpstreamHttpError,
    UpstreamPayloadError,
    UpstreamUnreachableError,
)
from opencode_a2a.events import Json, JsonObject
from opencode_a2a.extensions.call import Call
from opencode_a2a.extensions.params import Payload, Routed, schema_name
from opencode_a2a.rights import Action, Capability, at_least

PAGE = "https://github.com/Intelligent-Internet/opencode-a2a/blob/main/docs/extension-specifications.md"
PROFILE = "opencode-a2a-single-tenant-coding-v1"
PROFILE_VARIABLE = "A2A_PROFILE"
"""The setting of the deployment's profile, which limits what every caller may change."""

Errors = tuple[type[ServiceError], ...]
Handler = Callable[[Call, Any], Awaitable[Payload]]
"""Takes a call, which is about one OpenCode, and its params; returns the result."""
Merge = Callable[[Any, list[Any]], Payload]
"""Takes the params and the results of all OpenCodes, in this order; returns one result."""
H = TypeVar("H", bound=Handler)
Description = Callable[[Settings, Missing], JsonObject]
"""Makes the params of an extension on a card from the settings of the deployment, and from what its
OpenCode cannot do."""
NOTHING: Final[Missing] = frozenset()
Availability = Literal["enabled", DisabledReason]
Stability = Literal["stable", "experimental"]

_ALWAYS: Errors = (
    NotInOpenCodeError,
    UpstreamUnreachableError,
    UpstreamHttpError,
    UpstreamPayloadError,
    UpstreamBackpressureError,
    StoreUnavailableError,
)
"""Errors of every method: OpenCode is asked, or the replica that runs it, and the database. An
OpenCode may not have what a call names, such as a workspace."""


class Access(StrEnum):
    """How far a method reaches: whether it reads, steers, changes, or acts on the machine."""

    READ = "read"
    CONTROL = "control"
    """Starts or stops work in a session, or answers it."""
    MUTATE = "mutation"
    """Changes sessions."""
    OPERATE = "operate"
    """Acts on the machine without a model or a permission in between."""


@dataclass(frozen=True, slots=True)
class Condition:
    """The setting that a deployment enables a method by."""

    variable: str
    enabled: Callable[[Settings], bool]
    default: bool = False
    permitted: Callable[[Settings], bool] = lambda _: True
    """Whether the method is compatible with the declared execution environment."""


@dataclass(frozen=True, eq=False, slots=True)
class Method:
    """A method as declared; compared by identity."""

    name: str
    access: Access
    summary: str
    details: str
    params: type[Routed]
    result: type[Payload]
    errors: Errors
    handler: Handler
    example: JsonObject
    condition: Condition | None = None
    capability: Capability | None = None
    """The capability that the caller's credential has to grant."""
    stability: Stability = "stable"
    """How stable OpenCode declares the feature behind it to be."""
    audit: str | None = None
    """The event of the audit record that every call writes."""
    needs: Action = "deny"
    """The least that a call has to be allowed to change: ``ask`` for a method that changes files
    itself, ``allow`` for one that runs what the agent would have to ask for. ``Access.OPERATE``
    implies at least ``ask``."""
    repeatable: bool = False
    """Whether the next owner may make a call again if a replica dies over it, as for any read."""
    local: bool = False
    """Whether it asks no OpenCode: the service's own database has all it needs, on any replica."""
    requires: Feature | None = None
    """What an OpenCode has to have for it; without that, calls are refused."""
    merge: Merge | None = None
    """Combines the results of all OpenCodes; None for a method about one of them. Only for methods
    that read: servers that are unreachable, slow or return an error are silently omitted."""

    @property
    def all_errors(self) -> Errors:
        """The declared errors, and those that the rest of the declaration implies."""
        implied: list[type[ServiceError]] = [MissingFieldError, InvalidFieldError]
        limited = self.needs != "deny"
        implied += [AuthorizationForbiddenError] if self.capability or limited else []
        implied += [MethodNotFoundError] if self.condition or limited else []
        return tuple(dict.fromkeys((*self.errors, *implied)))

    def off(self, settings: Settings, missing: Missing = NOTHING) -> Off | None:
        """Return why a deployment does not offer the method; None if it does."""
        condition = self.condition
        if condition and not condition.enabled(settings):
            return Off("disabled_by_configuration", condition.variable)
        if condition and not condition.permitted(settings):
            return Off("disabled_by_policy", condition.variable)
        # No credential and no message widens the profile of the deployment.
        if not at_least(settings.auth.rights.changes, self.needs):
            return Off("disabled_by_policy", PROFILE_VARIABLE)
        return Off("not_in_opencode") if self.requires in missing else None

    def state(self, settings: Settings, missing: Missing = NOTHING) -> Availability:
        off = self.off(settings, missing)
        return off.reason if off else "enabled"

    def routing_fields(self, settings: Settings) -> list[str]:
        """Return the names of the fields that choose where the method runs."""
        fields = ["metadata.opencode.workspace.id"]
        if settings.directory_override:
            fields.append("metadata.opencode.directory")
            fields += ["directory"] if "directory" in self.params.model_fields else []
        return fields

    def contract(self, settings: Settings, missing: Missing) -> JsonObject:
        """Return the method's entry on the extended card."""
        names: dict[bool, list[Json]] = {True: [], False: []}
        for name, info in self.params.model_fields.items():
            names[info.is_required()].append(info.alias or name)
        fields = self.result.model_fields
        result: JsonObject = {"fields": [*fields]}
        for name in ("items", "item"):
            if name in fields:
                result["items_type"] = _type_name(fields[name].annotation)
        params: JsonObject = {
            "required": names[True],
            "optional": names[False],
            "unsupported": [*self.params.foreign],
        }
        if self.params.only03 and "0.3" in settings.a2a.supported_protocol_versions:
            params["optional_in_0.3"] = [*self.params.only03]
        contract: JsonObject = {
            "summary": self.summary,
            "access": self.access.value,
            "availability": self.state(settings, missing),
            "params": params,
            "result": result,
            "routing_fields": [*self.routing_fields(settings)],
            "errors": [*sorted({error.reason for error in self.all_errors})],
            "notification_response_status": 204,
        }
        return contract | ({"capability": self.capability} if self.capability else {})


def _type_name(annotation: object) -> str:
    """Return the published name of a type; for a list, that of its items."""
    inner = [kind for kind in get_args(annotation) if kind is not type(None)]
    if inner:
        return _type_name(inner[0])
    return schema_name(annotation) if isinstance(annotation, type) else "object"


@dataclass(frozen=True, slots=True)
class Extension:
    """An extension of A2A: metadata, methods, or both."""

    key: str
    """Its name in the OpenAPI document."""
    title: str
    anchor: str
    """Its section of the specification page."""
    summary: str
    aliases: tuple[str, ...] = ()
    """Its earlier URIs."""
    public: Description = lambda _, __: {}
    """Makes its params on the public card."""
    extended: Description = lambda _, __: {}
    """Makes those that the extended card adds, besides notes and methods."""
    requires: Feature | None = None
    """What an OpenCode has to have for it; without that, cards do not name it."""
    public_methods: bool = False
    """Whether the public card names its methods."""
    notes: tuple[str, ...] = ()
    errors: Errors = ()
    """Errors of each of its methods, besides those of every method."""
    surface: Literal["jsonrpc-extension", "core-runtime-metadata", "discovery"] = (
        "jsonrpc-extension"
    )
    scope: JsonObject = field(default_factory=dict[str, Json])
    """Fields that the compatibility profile adds for it."""
    skill: str | None = None
    """The id of the skill that stands for it on the extended card."""
    tags: tuple[str, ...] = ()
    methods: dict[str, Method] = field(default_factory=dict[str, Method])

    @property
    def uri(self) -> str:
        return f"{PAGE}#{self.anchor}"

    @property
    def retention(self) -> JsonObject:
        """How long it stays as it is, for the compatibility profile."""
        methods = self.methods.values()
        experimental = any(method.stability == "experimental" for method in methods)
        retention = "required" if self.surface == "core-runtime-metadata" else "stable"
        if experimental or any(method.condition for method in methods):
            retention = "mixed"
        return {
            "surface": self.surface,
            "availability": "always",
            "retention": retention,
            **({"upstream_stability": "mixed"} if experimental else {}),
            **self.scope,
        }

    def retention_of(self, method: Method, settings: Settings, missing: Missing) -> JsonObject:
        """Return how long one of its methods stays as it is."""
        experimental = method.stability == "experimental"
        retention: JsonObject = {
            "surface": "extension",
            "availability": "always",
            "retention": "experimental-upstream" if experimental else "stable",
            "extension_uri": self.uri,
        }
        off = method.off(settings, missing)
        toggle = off.toggle if off else method.condition and method.condition.variable
        if off or toggle:
            retention["availability"] = "disabled" if off else "enabled"
            retention["retention"] = "deployment-conditional"
        return retention | ({"toggle": toggle} if toggle else {})

    def method(
        self,
        name: str,
        access: Access,
        *errors: type[ServiceError],
        example: JsonObject | None = None,
        condition: Condition | None = None,
        capability: Capability | None = None,
        stability: Stability = "stable",
        audit: str | None = None,
        needs: Action = "deny",
        repeatable: bool = False,
        local: bool = False,
        requires: Feature | None = None,
        merge: Merge | None = None,
    ) -> Callable[[H], H]:
        """Declare a method; ``Method`` explains what can be declared.

        Its example is that of its params' class, plus ``example``.
        """
        if merge is not None and access is not Access.READ:
            raise TypeError(f"{name}: merge is for methods that read")

        def declare(handler: H) -> H:
            hints = get_type_hints(handler)
            params: type[Routed] = hints["params"]
            summary, _, details = (getdoc(handler) or "").replace("``", "`").partition("\n\n")
            # Any session that a caller names may not exist.
            missing = (SessionNotFoundError,) if "session_id" in params.model_fields else ()
            self.methods[name] = Method(
                name=name,
                access=access,
                summary=summary,
                details=" ".join(details.split()),
                params=params,
                result=hints["return"],
                errors=(*missing, *errors, *self.errors, *_ALWAYS),
                handler=handler,
                example={**params.example, **(example or {})},
                condition=condition,
                capability=capability,
                stability=stability,
                audit=audit,
                needs="ask" if needs == "deny" and access is Access.OPERATE else needs,
                repeatable=repeatable,
                local=local,
                requires=requires,
                merge=merge,
            )
            return handler

        return declare

    def enabled(self, settings: Settings, missing: Missing = NOTHING) -> list[Method]:
        """Return the methods that a deployment offers."""
        return [one for one in self.methods.values() if one.off(settings, missing) is None]

    def public_params(self, settings: Settings, missing: Missing = NOTHING) -> JsonObject:
        """Return the extension's params on the public card."""
        named: JsonObject = {"methods": [*self.methods]} if self.public_methods else {}
        return named | self.public(settings, missing)

    def extended_params(self, settings: Settings, missing: Missing = NOTHING) -> JsonObject:
        """Return the params that the extended card adds, for authenticated callers."""
        if self.surface == "discovery":
            return self.extended(settings, missing)  # it describes the whole service
        params: JsonObject = {"profile": PROFILE, **self.extended(settings, missing)}
        if self.notes:
            params["notes"] = [*self.notes]
        if not self.methods:
            return params
        methods, enabled = self.methods.values(), self.enabled(settings, missing)
        params["methods"] = [method.name for method in enabled]
        for access in Access:
            names: list[Json] = [method.name for method in enabled if method.access is access]
            if names:
                params[f"{access}_methods"] = names
        flags: JsonObject = {
            method.name: {"enabled_by_default": on.default, "config_key": on.variable}
            for method in methods
            if (on := method.condition)
        }
        if flags:
            params["control_method_flags"] = flags
        scopes: JsonObject = {
            method.name: [*settings.oidc.granting(method.capability)]
            for method in enabled
            if method.capability and settings.oidc.issuer
        }
        if scopes:  # a token needs one of those that a method lists
            params["required_scopes"] = scopes
        every = [method.routing_fields(settings) for method in methods]
        shared = [one for one in every[0] if all(one in fields for fields in every)]
        errors = {
            error.reason: error
            for method in methods
            for error in method.all_errors
            if not issubclass(error, InvalidParamsError)
        }
        invalid = [
            name
            for method in methods
            for error in method.all_errors
            if issubclass(error, InvalidParamsError)
            for name in error.data_fields
        ]
        params |= {
            "routing_fields": [*shared],
            "upstream_stability": {method.name: method.stability for method in methods},
            "method_contracts": {one.name: one.contract(settings, missing) for one in methods},
            "errors": {
                "business_codes": {reason: error.code for reason, error in errors.items()},
                "error_types": [*errors],
                "error_data_fields": {
                    reason: [*error.data_fields] for reason, error in errors.items()
                },
                "invalid_params_data_fields": ["type", *dict.fromkeys(invalid)],
            },
        }
        return params


def aliases(founding: str, later: str) -> tuple[str, ...]:
    """Return the two earlier URIs of an extension."""
    return founding, f"urn:opencode-a2a:extension:{later}:v1"
