"""Extensions as the cards and the OpenAPI document describe them, computed from declarations."""

from collections.abc import Iterable, Mapping
from typing import TypeVar, get_args

from opencode_a2a import errors
from opencode_a2a.config import Settings
from opencode_a2a.errors import InvalidParamsError, ServiceError
from opencode_a2a.events import Json, JsonObject
from opencode_a2a.extensions.payloads import Payload
from opencode_a2a.extensions.registry import Access, Extension, Method

T = TypeVar("T")

PROFILE = "opencode-a2a-single-tenant-coding-v1"
DATA_FIELDS: dict[type[ServiceError], tuple[str, ...]] = {
    errors.ContentTypeNotSupportedError: ("supported_media_types", "violations"),
    errors.MediaTypeNotSupportedError: (),
    errors.ContentEncodingNotSupportedError: (),
    errors.VersionNotSupportedError: (
        *("requested_version", "required_version", "supported_protocol_versions"),
        *("default_protocol_version", "header"),
    ),
    errors.UnsupportedOperationError: (
        *("accepted_output_modes", "required_output_modes", "supported_output_modes"),
    ),
    errors.InvalidParamsError: ("field", "fields", "violations"),
    errors.StoreUnavailableError: ("operation",),
    errors.StreamEndedError: ("cause",),
    errors.SessionBusyError: ("method", "session_id", "upstream_status", "detail"),
    errors.SessionNotFoundError: ("session_id",),
    errors.UpstreamUnreachableError: ("method",),
    errors.UpstreamHttpError: ("method", "upstream_status", "detail", "session_id"),
    errors.UpstreamPayloadError: ("method", "detail"),
    errors.UpstreamBackpressureError: ("limit",),
    errors.InterruptNotFoundError: ("request_id",),
    errors.InterruptExpiredError: ("request_id",),
    errors.InterruptTypeMismatchError: (
        *("request_id", "expected_interrupt_type", "actual_interrupt_type"),
    ),
    errors.AuthorizationForbiddenError: ("method", "capability", "credential_id"),
    errors.MethodNotFoundError: (
        *("method", "supported_methods", "protocol_version", "conditional", "toggle", "disabled"),
    ),
    errors.RateLimitError: ("retry_after_seconds",),
    errors.RequestTooLargeError: ("max_bytes", "actual_size"),
    errors.MissingFieldError: ("field", "fields", "violations"),
    errors.InvalidFieldError: ("field", "fields", "violations", "max"),
    errors.PaginationModeError: ("fields", "supported", "unsupported", "violations"),
}
"""What ``data`` can hold besides ``type``."""


def public(extension: Extension, settings: Settings) -> JsonObject:
    """Return what everybody may know of an extension."""
    told: JsonObject = {"methods": [*extension.methods]} if extension.public_methods else {}
    return {**told, **extension.public, **extension.public_here(settings)}


def extended(extension: Extension, settings: Settings) -> JsonObject:
    """Return what callers are told in addition."""
    told: JsonObject = {"profile": PROFILE, **extension.extended}
    told |= extension.extended_here(settings)
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
    flags: JsonObject = {
        method.name: {"enabled_by_default": on.default, "config_key": on.variable}
        for method in methods
        if (on := method.condition)
    }
    if flags:
        told["control_method_flags"] = flags
    every = [routing_fields(method, settings) for method in methods]
    told["routing_fields"] = [one for one in every[0] if all(one in fields for fields in every)]
    told["upstream_stability"] = {method.name: method.stability for method in methods}
    told["method_contracts"] = {method.name: _contract(method, settings) for method in methods}
    told["errors"] = _errors(error for method in methods for error in method.all_errors)
    return told


def _contract(method: Method, settings: Settings) -> JsonObject:
    told: JsonObject = {
        "summary": method.summary,
        "access": method.access.value,
        "availability": method.state(settings),
        "params": _params(method.params),
        "result": _result(method.result),
        "routing_fields": [*routing_fields(method, settings)],
        "errors": [*sorted({error.reason for error in method.all_errors})],
        "notification_response_status": 204,
    }
    return told | ({"capability": method.capability} if method.capability else {})


def routing_fields(method: Method, settings: Settings) -> list[str]:
    """Return the fields that choose where a method runs; without a root no directory can be."""
    fields = ["metadata.opencode.workspace.id"]
    if settings.workspace is not None:
        fields.append("metadata.opencode.directory")
        fields += [name for name in ("directory",) if name in method.params.model_fields]
    return fields


def _params(model: type[Payload]) -> JsonObject:
    names: dict[bool, list[Json]] = {True: [], False: []}
    for name, info in model.model_fields.items():
        names[info.is_required()].append(info.alias or name)
    return {"required": names[True], "optional": names[False], "unsupported": [*model.foreign]}


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


def _errors(kinds: Iterable[type[ServiceError]]) -> JsonObject:
    """Return numbers, names and data of errors."""
    known = {error.reason: error for error in kinds if not issubclass(error, InvalidParamsError)}
    return {
        "business_codes": {reason: error.code for reason, error in known.items()},
        "error_types": [*known],
        "error_data_fields": {reason: [*data_fields(error)] for reason, error in known.items()},
        "invalid_params_data_fields": ["type", "field", "fields", "violations", "max"],
    }


def data_fields(error: type[ServiceError]) -> tuple[str, ...]:
    return nearest(DATA_FIELDS, error) or ()


def nearest(table: Mapping[type[ServiceError], T], error: type[ServiceError]) -> T | None:
    """Return what a table has for an error, or for the kind that it is of."""
    kinds = (kind for kind in error.__mro__ if issubclass(kind, ServiceError))
    return next((table[kind] for kind in kinds if kind in table), None)
