"""The errors of the service, each with its codes on the wire.

Every layer raises these; only ``a2a.errors`` turns them into bodies. Messages are for people and
name the remedy; ``data`` is for programs and never holds a path, a secret or the text of a driver.
"""

from dataclasses import dataclass
from typing import ClassVar, Literal, Self, TypeAlias

from opencode_a2a.events import Json

MAX_VIOLATIONS = 20
"""Wrong fields that an error lists at most."""


@dataclass(frozen=True, slots=True)
class Violation:
    """A wrong field, and what it has to be."""

    field: str
    description: str


VIOLATIONS = ("field", "fields", "violations")
"""The data of every error that names wrong fields."""


class ServiceError(Exception):
    """An error with a JSON-RPC code, an HTTP status, a gRPC status and a reason.

    A subclass declares what differs from its base; its ``message`` is the default.
    """

    code: ClassVar[int] = -32603
    http: ClassVar[int] = 500
    status: ClassVar[str] = "INTERNAL"
    reason: ClassVar[str] = "INTERNAL_ERROR"
    message: str = "Internal error"
    data_fields: ClassVar[tuple[str, ...]] = ()
    """The names that ``data`` can have; published in ``docs/errors.md``."""
    name03: ClassVar[str | None] = None
    """The name of the error for clients of 0.3 over HTTP+JSON, if it is not that of the class."""
    outcome: ClassVar[str] = "internal_error"
    """The outcome in the audit record of a call that ends with this error."""
    headers: tuple[tuple[str, str], ...] = ()
    """HTTP headers of the response, such as ``Retry-After``."""

    def __init__(
        self, message: str | None = None, *, violations: tuple[Violation, ...] = (), **data: Json
    ) -> None:
        self.message = message or self.message
        self.violations = violations[:MAX_VIOLATIONS]
        self.data = {key: value for key, value in data.items() if value is not None}
        super().__init__(self.message)

    def with_headers(self, *headers: tuple[str, str]) -> Self:
        self.headers = headers
        return self


class TaskUnreadableError(ServiceError):
    """The stored task is damaged, or was written by a later version of the service."""

    reason = "TASK_UNREADABLE"
    message = "The stored task cannot be read; the log of the service names it"


class ParseError(ServiceError):
    """The body is not JSON, or not UTF-8, or nested too deeply."""

    code, http, status, reason = -32700, 400, "INVALID_ARGUMENT", "PARSE_ERROR"
    message = "The body is not valid JSON"
    data_fields = ("problem", "max_depth")
    name03 = "JSONParseError"


class InvalidRequestError(ServiceError):
    """The JSON is not a request: a batch, no method, a wrong envelope."""

    code, http, status, reason = -32600, 400, "INVALID_ARGUMENT", "INVALID_REQUEST"
    message = "The body is not a JSON-RPC request"
    data_fields = VIOLATIONS


Feature = Literal["rules", "schemas", "todos", "sharing", "workspaces", "worktrees"]
"""What callers may ask for and not every OpenCode has: rules of a session, answers by a schema."""
Missing = frozenset[Feature]
DisabledReason: TypeAlias = Literal[
    "disabled_by_configuration", "disabled_by_policy", "not_in_opencode"
]

_WHY: dict[DisabledReason, str] = {
    "disabled_by_configuration": "it is switched off",
    "disabled_by_policy": "a rule of this deployment excludes it",
    "not_in_opencode": "this version of OpenCode has nothing for it",
}


@dataclass(frozen=True, slots=True)
class Off:
    """Why a deployment does not offer a method: the reason, and the setting behind it, if any."""

    reason: DisabledReason
    toggle: str | None = None


class MethodNotFoundError(ServiceError):
    """No such method, or it is switched off."""

    code, http, status, reason = -32601, 404, "NOT_FOUND", "METHOD_NOT_SUPPORTED"
    message = "Method not found"
    data_fields = (
        "method", "supported_methods", "protocol_version", "conditional", "toggle", "disabled",
    )  # fmt: skip

    @classmethod
    def named(
        cls,
        method: str,
        off: Off | None,
        protocol_version: str,
        supported_methods: list[Json] | None = None,
    ) -> Self:
        """Return the error for an unknown method, or one that is switched off."""
        text = f"There is no method {method[:128]}"
        if off is not None:
            text += f" here: {_WHY[off.reason]}" + (f" ({off.toggle})" if off.toggle else "")
        return cls(
            text,
            method=method[:128],
            supported_methods=supported_methods,
            protocol_version=protocol_version,
            conditional=None if off is None else True,
            toggle=off.toggle if off else None,
            disabled=off.reason if off else None,
        )


class MethodNotAllowedError(MethodNotFoundError):
    """The path exists, but not for this HTTP method."""

    http, status, reason = 405, "UNIMPLEMENTED", "METHOD_NOT_ALLOWED"
    message = "This path does not take this HTTP method"


class InvalidParamsError(ServiceError):
    """A field is missing, unknown or wrong; ``violations`` says which."""

    code, http, status, reason = -32602, 400, "INVALID_ARGUMENT", "INVALID_PARAMS"
    message = "Invalid parameters"
    data_fields = VIOLATIONS
    outcome = "invalid_params"

    @classmethod
    def of(cls, field: str, text: str, message: str | None = None) -> Self:
        """Return the error for one wrong field; the default message is the field and the text."""
        return cls(message or f"{field} {text}", violations=(Violation(field, text),))


class InvalidListingError(InvalidParamsError):
    """A filter or page of the 0.3 task list is wrong."""

    reason = "INVALID_LIST_TASKS_REQUEST"


class MissingFieldError(InvalidParamsError):
    """The params of an extension method lack a field; ``field`` names it."""

    reason = "MISSING_FIELD"


class InvalidFieldError(InvalidParamsError):
    """Fields of an extension method are unknown or wrong; ``field`` and ``fields`` name them."""

    reason = "INVALID_FIELD"
    data_fields = (*VIOLATIONS, "max")


class PaginationModeError(InvalidParamsError):
    """A page or cursor was given to an extension method that only has a limit."""

    reason = "INVALID_PAGINATION_MODE"
    data_fields = (*VIOLATIONS, "supported", "unsupported")


class ContentTypeNotSupportedError(ServiceError):
    """A part has a media type that the agent does not accept."""

    code, http, status, reason = -32005, 400, "INVALID_ARGUMENT", "CONTENT_TYPE_NOT_SUPPORTED"
    message = "Content type not supported"
    data_fields = ("supported_media_types", *VIOLATIONS)


class MediaTypeNotSupportedError(ContentTypeNotSupportedError):
    """The body is not declared as JSON in UTF-8."""

    http, reason = 415, "MEDIA_TYPE_NOT_SUPPORTED"
    message = "Send JSON in UTF-8, as application/json or application/a2a+json"
    data_fields = ()
    headers = (("Accept-Post", "application/json, application/a2a+json"),)


class ContentEncodingNotSupportedError(ContentTypeNotSupportedError):
    """The body is compressed."""

    http, reason = 415, "CONTENT_ENCODING_NOT_SUPPORTED"
    message = "The body is compressed; send it uncompressed"
    data_fields = ()
    headers = (("Accept-Encoding", "identity"),)


class VersionNotSupportedError(ServiceError):
    """The requested A2A version is not supported, or does not have the method."""

    code, http, status, reason = -32009, 400, "FAILED_PRECONDITION", "VERSION_NOT_SUPPORTED"
    message = "Protocol version not supported"
    data_fields = (
        "requested_version", "required_version", "supported_protocol_versions",
        "default_protocol_version", "header",
    )  # fmt: skip


class TaskNotFoundError(ServiceError):
    """The task does not exist or belongs to another caller; the two look alike."""

    code, http, status, reason = -32001, 404, "NOT_FOUND", "TASK_NOT_FOUND"
    message = "Task not found"


class TaskNotCancelableError(ServiceError):
    """The task has ended."""

    code, http, status, reason = -32002, 400, "FAILED_PRECONDITION", "TASK_NOT_CANCELABLE"
    message = "Task cannot be canceled"


class PushNotSupportedError(ServiceError):
    """Push notifications are switched off here (`A2A_PUSH_ENABLED`)."""

    code, http, status = -32003, 400, "FAILED_PRECONDITION"
    reason = "PUSH_NOTIFICATION_NOT_SUPPORTED"
    name03 = "PushNotificationNotSupportedError"
    message = "Push notifications are not offered here; subscribe to the task, or get it later"


class UnsupportedOperationError(ServiceError):
    """The task in its state, or the agent, does not support the operation.

    If the message is not an answer to the tasks of its context that wait for one, ``task_id`` or
    ``task_ids`` name these tasks, and ``question`` is what they ask.
    """

    code, http, status, reason = -32004, 400, "FAILED_PRECONDITION", "UNSUPPORTED_OPERATION"
    message = "This operation is not supported"
    data_fields = (
        "accepted_output_modes", "required_output_modes", "supported_output_modes",
        "task_id", "task_ids", "question",
    )  # fmt: skip


class StoreUnavailableError(ServiceError):
    """The database did not answer; ``operation`` says what was being done."""

    code, http, status, reason = -32603, 503, "UNAVAILABLE", "TASK_STORE_UNAVAILABLE"
    message = "Task store unavailable; try again"
    data_fields = ("operation",)


class LimitExceededError(ServiceError):
    """A limit of this caller or of the whole service is reached."""

    code, http, status, reason = -32603, 429, "RESOURCE_EXHAUSTED", "LIMIT_EXCEEDED"
    message = "Too much at once; try again later"
    data_fields = ("limit",)


class BudgetExhaustedError(LimitExceededError):
    """The caller has spent its budget for today, or has as many turns running as it may have."""

    reason = "BUDGET_EXHAUSTED"
    message = "The budget of this caller is exhausted"
    data_fields = ("budget", "limit", "cost", "tokens", "resets_at", "retry_after_seconds")


class StreamEndedError(ServiceError):
    """The service is shutting down, or the stream reached a limit: ``cause``."""

    code, http, status, reason = -31011, 503, "UNAVAILABLE", "STREAM_ENDED"
    message = "The stream ended before the task; subscribe again with the header Last-Event-ID"
    data_fields = ("cause", "task_id")


class InternalError(ServiceError):
    """A defect of this program. The details are in the log; the caller does not get them."""


class UpstreamError(ServiceError):
    """OpenCode did not do what was asked.

    ``detail`` is OpenCode's text without paths, for the log and to tell cases apart.
    """

    http, status = 502, "UNAVAILABLE"

    def __init__(
        self, message: str | None = None, *, detail: str | None = None, **data: Json
    ) -> None:
        super().__init__(message, violations=(), **data)
        self.detail = detail


class UpstreamUnreachableError(UpstreamError):
    """There was no connection, or it broke before the answer was complete."""

    code, http, reason = -31002, 503, "UPSTREAM_UNREACHABLE"
    message = "OpenCode cannot be reached"
    data_fields = ("method",)
    outcome = "upstream_unreachable"


class UpstreamAwayError(UpstreamUnreachableError):
    """There was no connection: OpenCode was not sent anything."""


class NotRunError(UpstreamUnreachableError):
    """Nobody ran a call: no replica owns the OpenCode."""

    message = (
        "No replica of the service runs this OpenCode at the moment, so nothing was done; try again"
    )


class OtherVersionError(UpstreamUnreachableError):
    """Nobody ran a call: the owner of the OpenCode cannot read it, or this replica cannot."""

    message = (
        "The replica that runs this OpenCode is of another version of the service and cannot be "
        "asked, so nothing was done; try again when all replicas have been upgraded, or at once: "
        "another replica may be able to"
    )
    headers = (("Retry-After", "1"),)


class MaybeRunError(UpstreamUnreachableError):
    """A call was begun, and it is not known whether it was completed."""

    message = (
        "The replica of the service that was asked stopped before it answered. It may have been "
        "done; look before you try again"
    )


class UpstreamTimeoutError(UpstreamUnreachableError):
    """OpenCode took longer than one call may take."""

    message = "OpenCode did not answer in time"


class UpstreamHttpError(UpstreamError):
    """OpenCode answered with an error status: ``upstream_status``."""

    code, reason = -31003, "UPSTREAM_HTTP_ERROR"
    message = "OpenCode answered with an error"
    data_fields = ("method", "upstream_status", "detail", "session_id")
    outcome = "upstream_http_error"


class UpstreamNotFoundError(UpstreamHttpError):
    """No such message, permission, question or workspace; a session has its own error."""

    http, status = 404, "NOT_FOUND"
    message = "OpenCode does not know this id"
    outcome = "upstream_404"


class SessionBusyError(UpstreamHttpError):
    """This is not possible while a turn runs in the session."""

    code, http, status, reason = -31006, 409, "FAILED_PRECONDITION", "SESSION_BUSY"
    message = "The session is busy; wait for its turn to end"
    data_fields = ("method", "session_id", "upstream_status", "detail")


class UpstreamPayloadError(UpstreamError):
    """OpenCode's answer does not have the expected form."""

    code, reason = -31005, "UPSTREAM_PAYLOAD_ERROR"
    message = "OpenCode answered in an unexpected form"
    data_fields = ("method", "detail")
    outcome = "upstream_payload_error"


class UpstreamUnansweredError(UpstreamPayloadError):
    """OpenCode is done with a prompt that it has not answered: it was stopped before it began."""

    message = "OpenCode did not answer the prompt"


class UpstreamBackpressureError(UpstreamError):
    """The limit on simultaneous calls to OpenCode is reached."""

    code, http, status, reason = -31010, 429, "RESOURCE_EXHAUSTED", "UPSTREAM_BACKPRESSURE"
    message = "Too many calls to OpenCode at once; try again"
    data_fields = ("limit",)
    outcome = "upstream_backpressure"


class NotInOpenCodeError(ServiceError):
    """This OpenCode has no such thing, while another version or generation has."""

    code, http, status, reason = -31022, 400, "FAILED_PRECONDITION", "NOT_IN_OPENCODE"
    message = "This OpenCode cannot do that"
    data_fields = ("method",)
    outcome = "not_in_opencode"


class SessionNotFoundError(ServiceError):
    """The session does not exist or belongs to another caller; the two look alike."""

    code, http, status, reason = -31001, 404, "NOT_FOUND", "SESSION_NOT_FOUND"
    message = "Session not found"
    data_fields = ("session_id",)
    outcome = "upstream_404"


class InterruptNotFoundError(ServiceError):
    """The request is unknown, settled or another caller's; the three look alike."""

    code, http, status, reason = -31004, 404, "NOT_FOUND", "INTERRUPT_REQUEST_NOT_FOUND"
    message = "No such pending request"
    data_fields = ("request_id",)


class GrantNotFoundError(ServiceError):
    """The grant is unknown, has ended, or is another caller's; the three look alike."""

    code, http, status, reason = -31020, 404, "NOT_FOUND", "GRANT_NOT_FOUND"
    message = "No such grant"
    data_fields = ("grant_id",)


class WebhookNotFoundError(ServiceError):
    """The webhook, or its task, is unknown or another caller's; the three look alike."""

    code, http, status, reason = -31021, 404, "NOT_FOUND", "WEBHOOK_NOT_FOUND"
    message = "The task has no webhook with this id"
    data_fields = ("task_id", "id")


class AuthorizationForbiddenError(ServiceError):
    """The caller is authenticated but not allowed to do this."""

    code, http, status, reason = -31007, 403, "PERMISSION_DENIED", "AUTHORIZATION_FORBIDDEN"
    message = "The credential does not allow this"
    data_fields = ("method", "capability", "credential_id")
    outcome = "authorization_forbidden"


class InterruptTypeMismatchError(ServiceError):
    """A permission was answered as a question, or the other way round."""

    code, http, status, reason = -31008, 400, "FAILED_PRECONDITION", "INTERRUPT_TYPE_MISMATCH"
    message = "The request is of another type"
    data_fields = ("request_id", "expected_interrupt_type", "actual_interrupt_type")


class InterruptChangedError(ServiceError):
    """What is asked for is not what was shown; it is shown anew, and can be answered again."""

    code, http, status, reason = -31023, 409, "FAILED_PRECONDITION", "INTERRUPT_REQUEST_CHANGED"
    message = "The request has changed since it was shown"
    data_fields = ("request_id",)


class InterruptExpiredError(ServiceError):
    """The answer came after the deadline."""

    code, http, status, reason = -31009, 400, "FAILED_PRECONDITION", "INTERRUPT_REQUEST_EXPIRED"
    message = "The request has expired"
    data_fields = ("request_id",)


# --- at the edge ------------------------------------------------------------------------------


class UnauthenticatedError(ServiceError):
    """The credential is missing or wrong."""

    code, http, status, reason = -31012, 401, "UNAUTHENTICATED", "UNAUTHENTICATED"
    message = "Send the header Authorization with a valid credential"


class InvalidTokenError(UnauthenticatedError):
    """The identity provider signed the token, but it has expired or is not for this service."""

    reason = "INVALID_TOKEN"
    message = "The token is not valid"


class IssuerUnavailableError(ServiceError):
    """No token can be verified: the keys of the identity provider have not been fetched yet."""

    code, http, status, reason = -31018, 503, "UNAVAILABLE", "ISSUER_UNAVAILABLE"
    message = "The keys of the identity provider are not available; try again in a few seconds"


class RateLimitError(ServiceError):
    """Too many requests; ``retry_after_seconds`` says how long to wait."""

    code, http, status, reason = -31013, 429, "RESOURCE_EXHAUSTED", "RATE_LIMIT_EXCEEDED"
    message = "Too many requests; try again later"
    data_fields = ("retry_after_seconds",)


class TooManyFailuresError(RateLimitError):
    """Too many wrong credentials for this name came from this address."""

    reason = "TOO_MANY_FAILED_ATTEMPTS"
    message = "Too many failed attempts; try again later"


class RequestTooLargeError(ServiceError):
    """The body is larger than ``max_bytes``."""

    code, http, status, reason = -31014, 413, "RESOURCE_EXHAUSTED", "REQUEST_BODY_TOO_LARGE"
    message = "The body is too large; send large files by URL"
    data_fields = ("max_bytes", "actual_size")


class HeadersTooLargeError(RequestTooLargeError):
    """The headers are too large."""

    http, reason = 431, "REQUEST_HEADERS_TOO_LARGE"
    message = "The headers are too large"


class RequestTimeoutError(ServiceError):
    """The request did not arrive in time."""

    code, http, status, reason = -31015, 408, "DEADLINE_EXCEEDED", "REQUEST_TIMEOUT"
    message = "The request did not arrive in time; send it again"


class HostNotAllowedError(ServiceError):
    """The Host header names another host."""

    code, http, status, reason = -31016, 421, "INVALID_ARGUMENT", "HOST_NOT_ALLOWED"
    message = (
        "This host name is not one of the service's; use the host of A2A_PUBLIC_URL or a loopback "
        "name, or list the name in A2A_ALLOWED_HOSTS"
    )


class OriginNotAllowedError(ServiceError):
    """The request comes from a web page that may not call the service."""

    code, http, status, reason = -31017, 403, "PERMISSION_DENIED", "ORIGIN_NOT_ALLOWED"
    message = (
        "Pages of this origin may not call the service; list the origin in A2A_ALLOWED_ORIGINS"
    )


class BadHttpError(InvalidRequestError):
    """The request is not valid HTTP."""

    reason = "BAD_REQUEST"
    message = "The request is not valid HTTP/1.1"
