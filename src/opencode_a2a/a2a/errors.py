"""Encodes errors: one encoder for each binding, with the shapes of both versions.

Nothing else in the program knows what an error looks like on the wire. Only the fields of a
ServiceError are sent, never the text of another exception.
"""

import orjson
from pydantic.alias_generators import to_camel

from opencode_a2a.a2a.types import Version
from opencode_a2a.errors import ServiceError
from opencode_a2a.events import Json, JsonObject

RpcId = str | int | None

# The reasons that the specification defines; all others are specific to this service.
_A2A_REASONS = frozenset(
    {
        "TASK_NOT_FOUND", "TASK_NOT_CANCELABLE", "PUSH_NOTIFICATION_NOT_SUPPORTED",
        "UNSUPPORTED_OPERATION", "CONTENT_TYPE_NOT_SUPPORTED",
        "VERSION_NOT_SUPPORTED", "INVALID_PARAMS", "INVALID_REQUEST", "INTERNAL_ERROR",
    }
)  # fmt: skip
_TYPE = "type.googleapis.com/google.rpc."


def rpc_error(error: ServiceError, request_id: RpcId, version: Version) -> JsonObject:
    """Return the JSON-RPC response for an error."""
    data: Json = _details(error) if version is Version.V1 else _flat(error)
    body: JsonObject = {"code": error.code, "message": error.message, "data": data}
    return {"jsonrpc": "2.0", "id": request_id, "error": body}


def rest_error(error: ServiceError, version: Version) -> JsonObject:
    """Return the body of the HTTP+JSON response for an error; its status is ``error.http``."""
    if version is Version.V1:
        return {
            "error": {
                "code": error.http,
                "status": error.status,
                "message": error.message,
                "details": _details(error),
            }
        }
    return {
        "code": error.code,
        "type": error.name03 or type(error).__name__,
        "message": error.message,
        "data": _flat(error),
    }


def rpc_error_frame(error: ServiceError, request_id: RpcId, version: Version) -> bytes:
    """Return the event that ends a JSON-RPC stream with an error.

    In 0.3 the event has no name: clients of 0.3 find the error only in an unnamed event.
    """
    return _frame(rpc_error(error, request_id, version), named=version is Version.V1)


def rest_error_frame(error: ServiceError, version: Version) -> bytes:
    """Return the event that ends an HTTP+JSON stream with an error."""
    return _frame(rest_error(error, version))


def _frame(body: JsonObject, *, named: bool = True) -> bytes:
    name = b"event: error\n" if named else b""
    return name + b"data: " + orjson.dumps(body) + b"\n\n"


def _details(error: ServiceError) -> list[Json]:
    info: JsonObject = {
        "@type": f"{_TYPE}ErrorInfo",
        "reason": error.reason,
        "domain": "a2a-protocol.org" if error.reason in _A2A_REASONS else "opencode-a2a",
        "metadata": {to_camel(name): _as_text(value) for name, value in error.data.items()},
    }
    if not error.violations:
        return [info]
    return [info, {"@type": f"{_TYPE}BadRequest", "fieldViolations": _violations(error)}]


def _as_text(value: Json) -> str:
    """Return a value for the metadata of ErrorInfo, which may only be strings."""
    if isinstance(value, str):
        return value
    if isinstance(value, list):
        return ", ".join(_as_text(item) for item in value)
    return orjson.dumps(value).decode()


def _flat(error: ServiceError) -> JsonObject:
    data: JsonObject = {"type": error.reason, **error.data}
    if error.violations:
        fields: list[Json] = [*sorted({violation.field for violation in error.violations})]
        data |= {"field": error.violations[0].field, "fields": fields}
        data["violations"] = _violations(error)
    return data


def _violations(error: ServiceError) -> list[Json]:
    return [
        {"field": violation.field, "description": violation.description}
        for violation in error.violations
    ]
