"""Extensions as the cards and the OpenAPI document describe them, computed from declarations."""

from collections.abc import Iterable
from typing import get_args

from opencode_a2a.config import Settings
from opencode_a2a.errors import (
    AuthorizationForbiddenError,
    InterruptExpiredError,
    InterruptNotFoundError,
    InterruptTypeMismatchError,
    InvalidFieldError,
    InvalidParamsError,
    MethodNotFoundError,
    MissingFieldError,
    PaginationModeError,
    ServiceError,
    SessionNotFoundError,
    UpstreamBackpressureError,
    UpstreamHttpError,
    UpstreamPayloadError,
    UpstreamUnreachableError,
)
from opencode_a2a.events import Json, JsonObject
from opencode_a2a.extensions.payloads import Payload, Routed
from opencode_a2a.extensions.registry import Access, Extension, Method

PROFILE = "opencode-a2a-single-tenant-coding-v1"
ROUTING_FIELDS = ("metadata.opencode.workspace.id", "metadata.opencode.directory", "directory")
DATA_FIELDS: dict[type[ServiceError], tuple[str, ...]] = {
    SessionNotFoundError: ("session_id",),
    UpstreamUnreachableError: ("method",),
    UpstreamHttpError: ("method", "upstream_status", "detail", "session_id"),
    UpstreamPayloadError: ("method", "detail"),
    UpstreamBackpressureError: ("limit",),
    InterruptNotFoundError: ("request_id",),
    InterruptExpiredError: ("request_id",),
    InterruptTypeMismatchError: (
        *("request_id", "expected_interrupt_type", "actual_interrupt_type"),
    ),
    AuthorizationForbiddenError: ("method", "capability", "credential_id"),
    MethodNotFoundError: (
        *("method", "supported_methods", "protocol_version", "conditional", "toggle", "disabled"),
    ),
    MissingFieldError: ("field", "fields", "violations"),
    InvalidFieldError: ("field", "fields", "violations", "max"),
    PaginationModeError: ("fields", "supported", "unsupported", "violations"),
}
"""What ``data`` can hold besides ``type``."""


def public(extension: Extension) -> JsonObject:
    """Return what everybody may know of an extension."""
    if not extension.public_methods:
        return extension.public
    return {"methods": [*extension.methods], **extension.public}


def extended(extension: Extension, settings: Settings) -> JsonObject:
    """Return what callers are told in addition."""
    told: JsonObject = {"profile": PROFILE, **extension.extended}
    if extension.notes:
        told["notes"] = [*extension.notes]
    return {**told, **_methods(extension, settings)} if extension.methods else told


def _methods(extension: Extension, settings: Settings) -> JsonObject:
    methods = extension.methods.values()
    enabled = [method for method in methods if method.state(settings) == "enabled"]
    told: JsonObject = {"methods": [method.name for method in enabled]}
    for access in Access:
        names: list[Json] = [method.name for method in enabled if method.access is access]
        if names:
            told[f"{access}_methods"] = names
    flags = {method.name: flag(method) for method in methods if method.condition}
    if flags:
        told["control_method_flags"] = {**flags}
    if any(issubclass(method.params, Routed) for method in methods):
        told["routing_fields"] = [*ROUTING_FIELDS]
    told["upstream_stability"] = {method.name: method.stability for method in methods}
    told["method_contracts"] = {method.name: contract(method, settings) for method in methods}
    told["errors"] = errors(method.all_errors for method in methods)
    return told


def flag(method: Method) -> JsonObject:
    condition = method.condition
    if condition is None:
        return {}
    return {"enabled_by_default": condition.default, "config_key": condition.variable}


def contract(method: Method, settings: Settings) -> JsonObject:
    """Return one method's contract."""
    told: JsonObject = {
        "summary": method.summary,
        "access": method.access.value,
        "availability": method.state(settings),
        "params": fields(method.params),
        "result": _result(method.result),
        "errors": [*sorted({error.reason for error in method.all_errors})],
        "notification_response_status": 204,
    }
    return told | ({"capability": method.capability} if method.capability else {})


def fields(model: type[Payload]) -> JsonObject:
    required: list[Json] = []
    optional: list[Json] = []
    for name, info in model.model_fields.items():
        (required if info.is_required() else optional).append(info.alias or name)
    return {"required": required, "optional": optional, "unsupported": [*model.foreign]}


def _result(model: type[Payload]) -> JsonObject:
    told: JsonObject = {"fields": [*model.model_fields]}
    for name in ("items", "item"):
        if name in model.model_fields:
            told["items_type"] = _type_name(model.model_fields[name].annotation)
    return told


def _type_name(annotation: object) -> str:
    """Name what a list holds, or what stands alone."""
    inner = [kind for kind in get_args(annotation) if kind is not type(None)]
    if inner:
        return _type_name(inner[0])
    return annotation.__name__ if isinstance(annotation, type) else "object"


def errors(groups: Iterable[tuple[type[ServiceError], ...]]) -> JsonObject:
    """Return numbers, names and data of errors."""
    every = dict.fromkeys(error for group in groups for error in group)
    known = {error.reason: error for error in every if not issubclass(error, InvalidParamsError)}
    return {
        "business_codes": {reason: error.code for reason, error in known.items()},
        "error_types": [*known],
        "error_data_fields": {reason: [*data_fields(error)] for reason, error in known.items()},
        "invalid_params_data_fields": ["type", "field", "fields", "violations", "max"],
    }


def data_fields(error: type[ServiceError]) -> tuple[str, ...]:
    for kind in error.__mro__:
        if issubclass(kind, ServiceError) and kind in DATA_FIELDS:
            return DATA_FIELDS[kind]
    return ()
