"""How an extension and its methods are declared.

One declaration per method: name, access and possible errors; params and result from the
annotations, the summary from the docstring. Dispatch, validation, cards, OpenAPI, contracts and
the reference pages are all read from it.
"""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from enum import StrEnum
from inspect import getdoc
from typing import Any, Literal, TypedDict, TypeVar, Unpack, get_type_hints

from opencode_a2a.config import Settings
from opencode_a2a.errors import (
    AuthorizationForbiddenError,
    InvalidFieldError,
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
from opencode_a2a.extensions.calls import Call
from opencode_a2a.extensions.payloads import Payload, Routed

PAGE = "https://github.com/Intelligent-Internet/opencode-a2a/blob/main/docs/extension-specifications.md"

Errors = tuple[type[ServiceError], ...]
Handler = Callable[[Call, Any], Awaitable[Payload]]
"""Takes a call and params, and returns a result."""
H = TypeVar("H", bound=Handler)

_ALWAYS: Errors = (
    UpstreamUnreachableError,
    UpstreamHttpError,
    UpstreamPayloadError,
    UpstreamBackpressureError,
    StoreUnavailableError,
)
"""What any method can end in: all of them call OpenCode and look up whose things are."""


class Access(StrEnum):
    """What a method does to what it touches."""

    READ = "read"
    CONTROL = "control"
    """Starts or stops work in a session, or answers it."""
    MUTATE = "mutation"
    """Changes sessions."""
    OPERATE = "operate"
    """Acts on the machine without a model or a permission in between."""


Availability = Literal["enabled", "disabled_by_configuration", "disabled_by_policy"]


@dataclass(frozen=True, slots=True)
class Condition:
    """What a deployment has to say for a method to be there."""

    variable: str
    enabled: Callable[[Settings], bool]
    default: bool = False
    permitted: Callable[[Settings], bool] = lambda _: True
    """Whether the declared execution environment leaves room for it."""

    def state(self, settings: Settings) -> Availability:
        if not self.enabled(settings):
            return "disabled_by_configuration"
        return "enabled" if self.permitted(settings) else "disabled_by_policy"


Stability = Literal["stable", "experimental"]


class Rules(TypedDict, total=False):
    """What is particular about a method, as in ``Method``."""

    condition: Condition
    capability: str
    stability: Stability
    audit: str


@dataclass(frozen=True, slots=True)
class Method:
    """A method as declared."""

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
    capability: str | None = None
    """What the caller's credential has to grant."""
    stability: Stability = "stable"
    """What OpenCode promises about what is behind it."""
    audit: str | None = None
    """The audit record that every call leaves."""

    @property
    def all_errors(self) -> Errors:
        """The declared errors and those that follow from the rest of the declaration."""
        implied: list[type[ServiceError]] = [MissingFieldError, InvalidFieldError]
        implied += [AuthorizationForbiddenError] if self.capability else []
        implied += [MethodNotFoundError] if self.condition else []
        return tuple(dict.fromkeys((*self.errors, *implied)))

    def state(self, settings: Settings) -> Availability:
        return self.condition.state(settings) if self.condition else "enabled"


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
    public: JsonObject = field(default_factory=dict[str, Json])
    """What the public card says of it."""
    extended: JsonObject = field(default_factory=dict[str, Json])
    """What the extended card says in addition."""
    public_here: Callable[[Settings], JsonObject] = lambda _: {}
    """What the public card says of it in one deployment but not in another."""
    extended_here: Callable[[Settings], JsonObject] = lambda _: {}
    """The same for the extended card."""
    public_methods: bool = False
    """Whether the public card names its methods."""
    notes: tuple[str, ...] = ()
    errors: Errors = ()
    """What any of its methods can end in, besides what any method can."""
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
        """Declare a method; one that names a session can always end in there being none."""

        def declare(handler: H) -> H:
            hints = get_type_hints(handler)
            params: type[Routed] = hints["params"]
            summary, _, details = (getdoc(handler) or "").replace("``", "`").partition("\n\n")
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
                example=example or {},
                **rules,
            )
            return handler

        return declare


def aliases(founding: str, later: str) -> tuple[str, ...]:
    """Return the two earlier names of an extension."""
    return founding, f"urn:opencode-a2a:extension:{later}:v1"
