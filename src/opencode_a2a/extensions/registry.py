"""How an extension and its methods are declared, and what follows from a declaration.

A method is declared once: name, access, possible errors and an example; params and result are read
from the annotations, the summary from the docstring. Dispatch, validation, cards, OpenAPI and the
reference pages are all computed from it.
"""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from enum import StrEnum
from inspect import getdoc
from typing import Any, Literal, TypedDict, TypeVar, Unpack, get_args, get_type_hints

from opencode_a2a.config import Settings
from opencode_a2a.errors import (
    AuthorizationForbiddenError,
    InvalidFieldError,
    InvalidParamsError,
    MethodNotFoundError,
    MissingFieldError,
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
from opencode_a2a.rights import Capability

PAGE = "https://github.com/Intelligent-Internet/opencode-a2a/blob/main/docs/extension-specifications.md"
PROFILE = "opencode-a2a-single-tenant-coding-v1"

Errors = tuple[type[ServiceError], ...]
Handler = Callable[[Call, Any], Awaitable[Payload]]
"""Takes a call and params, and returns a result."""
H = TypeVar("H", bound=Handler)
Description = Callable[[Settings], JsonObject]
"""What a card says of an extension, given the settings of the deployment."""
Availability = Literal["enabled", "disabled_by_configuration", "disabled_by_policy"]
Stability = Literal["stable", "experimental"]

_ALWAYS: Errors = (
    UpstreamUnreachableError,
    UpstreamHttpError,
    UpstreamPayloadError,
    UpstreamBackpressureError,
    StoreUnavailableError,
)
"""What any method can end in: all of them call OpenCode and look up who owns what."""


class Access(StrEnum):
    """What a method does to what it touches."""

    READ = "read"
    CONTROL = "control"
    """Starts or stops work in a session, or answers it."""
    MUTATE = "mutation"
    """Changes sessions."""
    OPERATE = "operate"
    """Acts on the machine without a model or a permission in between."""


@dataclass(frozen=True, slots=True)
class Condition:
    """What a deployment has to allow for a method to be there."""

    variable: str
    enabled: Callable[[Settings], bool]
    default: bool = False
    permitted: Callable[[Settings], bool] = lambda _: True
    """Whether the declared execution environment leaves room for it."""


class Rules(TypedDict, total=False):
    """What is particular about a method, as in ``Method``."""

    condition: Condition
    capability: Capability
    stability: Stability
    audit: str
    writes: bool
    repeatable: bool


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
    """What the caller's credential has to grant."""
    stability: Stability = "stable"
    """What OpenCode promises about what is behind it."""
    audit: str | None = None
    """The audit record that every call leaves."""
    writes: bool = False
    """Whether it changes files, or runs what can, without a permission in between."""
    repeatable: bool = False
    """Whether it does no harm to do it twice, though it does not only read."""

    @property
    def all_errors(self) -> Errors:
        """The declared errors and those that follow from the rest of the declaration."""
        implied: list[type[ServiceError]] = [MissingFieldError, InvalidFieldError]
        implied += [AuthorizationForbiddenError] if self.capability or self.writes else []
        implied += [MethodNotFoundError] if self.condition else []
        return tuple(dict.fromkeys((*self.errors, *implied)))

    def state(self, settings: Settings) -> Availability:
        condition = self.condition
        if condition is None:
            return "enabled"
        if not condition.enabled(settings):
            return "disabled_by_configuration"
        return "enabled" if condition.permitted(settings) else "disabled_by_policy"

    def routing_fields(self, settings: Settings) -> list[str]:
        """Return the fields that choose where the method runs."""
        fields = ["metadata.opencode.workspace.id"]
        if settings.workspace is not None:  # without a root no directory can be named
            fields.append("metadata.opencode.directory")
            fields += ["directory"] if "directory" in self.params.model_fields else []
        return fields

    def contract(self, settings: Settings) -> JsonObject:
        """Return what the extended card says of the method."""
        names: dict[bool, list[Json]] = {True: [], False: []}
        for name, info in self.params.model_fields.items():
            names[info.is_required()].append(info.alias or name)
        fields = self.result.model_fields
        result: JsonObject = {"fields": [*fields]}
        for name in ("items", "item"):
            if name in fields:
                result["items_type"] = _type_name(fields[name].annotation)
        contract: JsonObject = {
            "summary": self.summary,
            "access": self.access.value,
            "availability": self.state(settings),
            "params": {
                "required": names[True],
                "optional": names[False],
                "unsupported": [*self.params.foreign],
            },
            "result": result,
            "routing_fields": [*self.routing_fields(settings)],
            "errors": [*sorted({error.reason for error in self.all_errors})],
            "notification_response_status": 204,
        }
        return contract | ({"capability": self.capability} if self.capability else {})


def _type_name(annotation: object) -> str:
    """Name what a list holds, or what stands alone."""
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
    """Where the specification page describes it."""
    summary: str
    aliases: tuple[str, ...] = ()
    """Earlier names of it."""
    public: Description = lambda _: {}
    """What the public card says of it."""
    extended: Description = lambda _: {}
    """What the extended card says in addition, besides notes and methods."""
    public_methods: bool = False
    """Whether the public card names its methods."""
    notes: tuple[str, ...] = ()
    errors: Errors = ()
    """What any of its methods can end in, besides what any method can."""
    surface: Literal["jsonrpc-extension", "core-runtime-metadata", "discovery"] = (
        "jsonrpc-extension"
    )
    scope: JsonObject = field(default_factory=dict[str, Json])
    """What the compatibility profile says of it in addition."""
    skill: str | None = None
    """The id of the skill that stands for it on the extended card."""
    tags: tuple[str, ...] = ()
    methods: dict[str, Method] = field(default_factory=dict[str, Method])

    @property
    def uri(self) -> str:
        return f"{PAGE}#{self.anchor}"

    def method(
        self,
        name: str,
        access: Access,
        *errors: type[ServiceError],
        example: JsonObject | None = None,
        **rules: Unpack[Rules],
    ) -> Callable[[H], H]:
        """Declare a method; ``example`` is added to what its params have as one."""

        def declare(handler: H) -> H:
            hints = get_type_hints(handler)
            params: type[Routed] = hints["params"]
            summary, _, details = (getdoc(handler) or "").replace("``", "`").partition("\n\n")
            # A method that names a session can always end in there being none.
            missing = (SessionNotFoundError,) if "session_id" in params.model_fields else ()
            if access is Access.OPERATE:
                rules["writes"] = True
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
                **rules,
            )
            return handler

        return declare

    def enabled(self, settings: Settings) -> list[Method]:
        """Return the methods that a deployment offers."""
        return [method for method in self.methods.values() if method.state(settings) == "enabled"]

    def public_params(self, settings: Settings) -> JsonObject:
        """Return what everybody may know of the extension."""
        named: JsonObject = {"methods": [*self.methods]} if self.public_methods else {}
        return named | self.public(settings)

    def extended_params(self, settings: Settings) -> JsonObject:
        """Return what only authenticated callers get to know, in addition."""
        if self.surface == "discovery":
            return self.extended(settings)  # a contract about the whole service
        params: JsonObject = {"profile": PROFILE, **self.extended(settings)}
        if self.notes:
            params["notes"] = [*self.notes]
        if not self.methods:
            return params
        methods, enabled = self.methods.values(), self.enabled(settings)
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
        if scopes:  # of which a token needs one
            params["required_scopes"] = scopes
        every = [method.routing_fields(settings) for method in methods]
        shared = [one for one in every[0] if all(one in fields for fields in every)]
        errors = {
            error.reason: error
            for method in methods
            for error in method.all_errors
            if not issubclass(error, InvalidParamsError)
        }
        params |= {
            "routing_fields": [*shared],
            "upstream_stability": {method.name: method.stability for method in methods},
            "method_contracts": {method.name: method.contract(settings) for method in methods},
            "errors": {
                "business_codes": {reason: error.code for reason, error in errors.items()},
                "error_types": [*errors],
                "error_data_fields": {
                    reason: [*error.data_fields] for reason, error in errors.items()
                },
                "invalid_params_data_fields": ["type", *InvalidFieldError.data_fields],
            },
        }
        return params


def aliases(founding: str, later: str) -> tuple[str, ...]:
    """Return the two earlier names of an extension."""
    return founding, f"urn:opencode-a2a:extension:{later}:v1"
