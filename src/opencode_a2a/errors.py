"""What can go wrong, each with its form on the wire.

ServiceError
|-- ProtocolError            the request itself is wrong: JSON, method, params, version
|   |-- ParseError, InvalidRequestError, MethodNotFoundError, MethodNotAllowedError
|   |-- InvalidParamsError        `-- InvalidListingError, MissingFieldError, InvalidFieldError,
|   |                                 PaginationModeError
|   `-- VersionNotSupportedError, ExtensionSupportRequiredError, ContentTypeNotSupportedError
|-- TaskNotFoundError, TaskNotCancelableError, UnsupportedOperationError
|-- PushNotSupportedError, ExtendedCardNotConfiguredError
|-- StoreUnavailableError, LimitExceededError, StreamEndedError, InternalError
|-- UpstreamError            OpenCode did not do what was asked
|   |-- UpstreamUnreachableError  `-- UpstreamTimeoutError
|   |-- UpstreamHttpError         `-- UpstreamNotFoundError, SessionBusyError
|   `-- UpstreamPayloadError, UpstreamBackpressureError
|-- SessionNotFoundError, AuthorizationForbiddenError
`-- InterruptNotFoundError, InterruptTypeMismatchError, InterruptExpiredError

Every layer raises these; ``protocol.wire`` alone turns them into bodies. Messages are for
people and name the remedy; ``data`` is for programs and holds no path, secret or driver text.
"""

from dataclasses import dataclass
from typing import ClassVar

from opencode_a2a.events import Json


@dataclass(frozen=True, slots=True)
class Violation:
    """One field that is wrong, and what would be right."""

    field: str
    description: str


class ServiceError(Exception):
    """An error with a number, an HTTP status, a gRPC status and a reason."""

    code: ClassVar[int] = -32603
    http: ClassVar[int] = 500
    status: ClassVar[str] = "INTERNAL"
    reason: ClassVar[str] = "INTERNAL_ERROR"
    default_message: ClassVar[str] = "Internal error"

    def __init_subclass__(
        cls,
        *,
        code: int | None = None,
        http: int | None = None,
        status: str | None = None,
        reason: str | None = None,
        message: str | None = None,
    ) -> None:
        super().__init_subclass__()
        cls.code = cls.code if code is None else code
        cls.http = cls.http if http is None else http
        cls.status = cls.status if status is None else status
        cls.reason = cls.reason if reason is None else reason
        cls.default_message = cls.default_message if message is None else message

    def __init__(
        self, message: str | None = None, *, violations: tuple[Violation, ...] = (), **data: Json
    ) -> None:
        self.message = message or self.default_message
        self.violations = violations
        self.data = {key: value for key, value in data.items() if value is not None}
        super().__init__(self.message)


class ProtocolError(ServiceError):
    """The request cannot be taken as it is."""


class ParseError(
    ProtocolError,
    code=-32700,
    http=400,
    status="INVALID_ARGUMENT",
    reason="PARSE_ERROR",
    message="The body is not valid JSON",
):
    """The body is not JSON, or not UTF-8, or nested too deeply."""


class InvalidRequestError(
    ProtocolError,
    code=-32600,
    http=400,
    status="INVALID_ARGUMENT",
    reason="INVALID_REQUEST",
    message="The body is not a JSON-RPC request",
):
    """The JSON is no request: a batch, no method, a wrong envelope."""


class MethodNotFoundError(
    ProtocolError,
    code=-32601,
    http=404,
    status="NOT_FOUND",
    reason="METHOD_NOT_SUPPORTED",
    message="Method not found",
):
    """No such method, or it is switched off."""


class MethodNotAllowedError(
    MethodNotFoundError,
    http=405,
    status="UNIMPLEMENTED",
    reason="METHOD_NOT_ALLOWED",
    message="This path does not take this HTTP method",
):
    """The path exists, for other HTTP methods."""


class InvalidParamsError(
    ProtocolError,
    code=-32602,
    http=400,
    status="INVALID_ARGUMENT",
    reason="INVALID_PARAMS",
    message="Invalid parameters",
):
    """A field is missing, unknown or wrong; ``violations`` says which."""


class InvalidListingError(InvalidParamsError, reason="INVALID_LIST_TASKS_REQUEST"):
    """A filter or page of the 0.3 task list is wrong."""


class MissingFieldError(InvalidParamsError, reason="MISSING_FIELD"):
    """A method of ours lacks a field; ``field`` names it."""


class InvalidFieldError(InvalidParamsError, reason="INVALID_FIELD"):
    """A method of ours got unknown or wrong fields; ``field`` and ``fields`` name them."""


class PaginationModeError(InvalidParamsError, reason="INVALID_PAGINATION_MODE"):
    """A list of ours was asked for by page or cursor where it only has a limit."""


class ContentTypeNotSupportedError(
    ProtocolError,
    code=-32005,
    http=400,
    status="INVALID_ARGUMENT",
    reason="CONTENT_TYPE_NOT_SUPPORTED",
    message="Content type not supported",
):
    """A part has a media type that the agent does not take."""


class VersionNotSupportedError(
    ProtocolError,
    code=-32009,
    http=400,
    status="FAILED_PRECONDITION",
    reason="VERSION_NOT_SUPPORTED",
    message="Protocol version not supported",
):
    """The A2A version asked for is not spoken here, or does not fit the method."""


class ExtensionSupportRequiredError(
    ProtocolError,
    code=-32008,
    http=400,
    status="FAILED_PRECONDITION",
    reason="EXTENSION_SUPPORT_REQUIRED",
    message="Extension support required",
):
    """A required extension was not asked for."""


class TaskNotFoundError(
    ServiceError,
    code=-32001,
    http=404,
    status="NOT_FOUND",
    reason="TASK_NOT_FOUND",
    message="Task not found",
):
    """The task does not exist, or belongs to another caller: both look alike."""


class TaskNotCancelableError(
    ServiceError,
    code=-32002,
    http=400,
    status="FAILED_PRECONDITION",
    reason="TASK_NOT_CANCELABLE",
    message="Task cannot be canceled",
):
    """The task has ended."""


class PushNotSupportedError(
    ServiceError,
    code=-32003,
    http=400,
    status="FAILED_PRECONDITION",
    reason="PUSH_NOTIFICATION_NOT_SUPPORTED",
    message="Push notifications are not supported",
):
    """Push configuration is not offered."""


class UnsupportedOperationError(
    ServiceError,
    code=-32004,
    http=400,
    status="FAILED_PRECONDITION",
    reason="UNSUPPORTED_OPERATION",
    message="This operation is not supported",
):
    """The operation does not fit the state of the task, or the agent."""


class ExtendedCardNotConfiguredError(
    ServiceError,
    code=-32007,
    http=400,
    status="FAILED_PRECONDITION",
    reason="EXTENDED_AGENT_CARD_NOT_CONFIGURED",
    message="No extended agent card",
):
    """There is no extended card."""


class StoreUnavailableError(
    ServiceError,
    code=-32603,
    http=503,
    status="UNAVAILABLE",
    reason="TASK_STORE_UNAVAILABLE",
    message="Task store unavailable; try again",
):
    """The database did not answer; ``operation`` says during what."""


class LimitExceededError(
    ServiceError,
    code=-32603,
    http=429,
    status="RESOURCE_EXHAUSTED",
    reason="LIMIT_EXCEEDED",
    message="Too many tasks at once; wait for one to end",
):
    """A limit of this caller or of the whole service is reached."""


class StreamEndedError(
    ServiceError,
    code=-31011,
    http=503,
    status="UNAVAILABLE",
    reason="STREAM_ENDED",
    message="The stream ended before the task; subscribe again with the header Last-Event-ID",
):
    """The service stops, or a budget of the stream is used up: ``cause``."""


class InternalError(ServiceError, code=-32603, http=500, status="INTERNAL"):
    """A defect of this program; the log has the details, the caller does not."""


class UpstreamError(ServiceError, http=502, status="UNAVAILABLE"):
    """OpenCode did not do what was asked.

    ``detail`` is what OpenCode said, without paths: for the log and for telling cases apart.
    """

    def __init__(
        self, message: str | None = None, *, detail: str | None = None, **data: Json
    ) -> None:
        super().__init__(message, violations=(), **data)
        self.detail = detail


class UpstreamUnreachableError(
    UpstreamError,
    code=-31002,
    http=503,
    reason="UPSTREAM_UNREACHABLE",
    message="OpenCode cannot be reached",
):
    """No connection, or it broke before the answer was complete."""


class UpstreamTimeoutError(UpstreamUnreachableError, message="OpenCode did not answer in time"):
    """The time for one call has passed."""


class UpstreamHttpError(
    UpstreamError,
    code=-31003,
    reason="UPSTREAM_HTTP_ERROR",
    message="OpenCode answered with an error",
):
    """OpenCode answered with an error status: ``upstream_status``."""


class UpstreamNotFoundError(
    UpstreamHttpError, http=404, status="NOT_FOUND", message="OpenCode does not know this id"
):
    """A message, permission, question or workspace that is not there (a session has its own)."""


class SessionBusyError(
    UpstreamHttpError,
    http=409,
    status="FAILED_PRECONDITION",
    message="The session is busy; wait for its turn to end",
):
    """OpenCode refuses this while a turn runs in the session."""


class UpstreamPayloadError(
    UpstreamError,
    code=-31005,
    reason="UPSTREAM_PAYLOAD_ERROR",
    message="OpenCode answered in an unexpected form",
):
    """The answer is not what this version of OpenCode should send."""


class UpstreamBackpressureError(
    UpstreamError,
    code=-31010,
    http=429,
    status="RESOURCE_EXHAUSTED",
    reason="UPSTREAM_BACKPRESSURE",
    message="Too many calls to OpenCode at once; try again",
):
    """The limit on simultaneous calls to OpenCode is reached."""


class SessionNotFoundError(
    ServiceError,
    code=-31001,
    http=404,
    status="NOT_FOUND",
    reason="SESSION_NOT_FOUND",
    message="Session not found",
):
    """The session does not exist, or belongs to another caller: both look alike."""


class InterruptNotFoundError(
    ServiceError,
    code=-31004,
    http=404,
    status="NOT_FOUND",
    reason="INTERRUPT_REQUEST_NOT_FOUND",
    message="No such pending request",
):
    """The request is unknown, settled, or another caller's: all look alike."""


class AuthorizationForbiddenError(
    ServiceError,
    code=-31007,
    http=403,
    status="PERMISSION_DENIED",
    reason="AUTHORIZATION_FORBIDDEN",
    message="The credential lacks a capability",
):
    """The caller is known but may not do this."""


class InterruptTypeMismatchError(
    ServiceError,
    code=-31008,
    http=400,
    status="FAILED_PRECONDITION",
    reason="INTERRUPT_TYPE_MISMATCH",
    message="The request is of another type",
):
    """A permission was answered as a question, or the other way round."""


class InterruptExpiredError(
    ServiceError,
    code=-31009,
    http=400,
    status="FAILED_PRECONDITION",
    reason="INTERRUPT_REQUEST_EXPIRED",
    message="The request has expired",
):
    """The deadline passed before the answer came."""
