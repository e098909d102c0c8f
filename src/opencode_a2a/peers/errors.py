"""What can go wrong when another agent is called, as one error with a code.

Raised by all of ``peers``; commands print the message, the tool hands code and message to the
model. The codes are the contract, the messages are for people. Text that came from a peer is
cut and cleaned before it gets in here.
"""

from enum import StrEnum

_TEXT_LIMIT = 500


class ErrorCode(StrEnum):
    INVALID_INPUT = "a2a_invalid_input"
    AUTH_FAILED = "a2a_peer_auth_failed"
    PERMISSION_DENIED = "a2a_peer_permission_denied"
    TIMEOUT = "a2a_timeout"
    UNSUPPORTED = "a2a_unsupported_operation"
    RETRYABLE = "a2a_retryable_unavailable"
    INVALID_CARD = "a2a_invalid_agent_card"
    PROTOCOL = "a2a_peer_protocol_error"
    UNAVAILABLE = "a2a_unavailable"
    CALL_FAILED = "a2a_call_failed"
    UNEXPECTED = "a2a_unexpected_response"


class PeerError(Exception):
    """The call did not come to an end at the peer; the code says what kind of failure it is."""

    def __init__(
        self,
        code: ErrorCode,
        message: str,
        *,
        http_status: int | None = None,
        rpc_code: int | None = None,
    ) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.http_status = http_status
        self.rpc_code = rpc_code

    @property
    def retryable(self) -> bool:
        return self.code in (ErrorCode.RETRYABLE, ErrorCode.TIMEOUT)


_BY_STATUS = {
    401: ErrorCode.AUTH_FAILED,
    403: ErrorCode.PERMISSION_DENIED,
    404: ErrorCode.UNSUPPORTED,
    405: ErrorCode.UNSUPPORTED,
    408: ErrorCode.TIMEOUT,
    409: ErrorCode.UNSUPPORTED,
    413: ErrorCode.INVALID_INPUT,
    429: ErrorCode.RETRYABLE,
    501: ErrorCode.UNSUPPORTED,
    502: ErrorCode.RETRYABLE,
    503: ErrorCode.RETRYABLE,
    504: ErrorCode.RETRYABLE,
}
_BY_RPC_CODE = {
    -32001: ErrorCode.CALL_FAILED,
    -32002: ErrorCode.CALL_FAILED,
    -32003: ErrorCode.UNSUPPORTED,
    -32004: ErrorCode.UNSUPPORTED,
    -32005: ErrorCode.INVALID_INPUT,
    -32006: ErrorCode.UNEXPECTED,
    -32009: ErrorCode.UNSUPPORTED,
    -32600: ErrorCode.PROTOCOL,
    -32601: ErrorCode.UNSUPPORTED,
    -32602: ErrorCode.INVALID_INPUT,
    -32603: ErrorCode.RETRYABLE,
    -32700: ErrorCode.PROTOCOL,
}
_RPC_CODE_BY_REASON = {
    "TASK_NOT_FOUND": -32001,
    "TASK_NOT_CANCELABLE": -32002,
    "UNSUPPORTED_OPERATION": -32004,
    "CONTENT_TYPE_NOT_SUPPORTED": -32005,
    "INVALID_AGENT_RESPONSE": -32006,
    "VERSION_NOT_SUPPORTED": -32009,
    "INVALID_PARAMS": -32602,
}


def from_status(status: int, text: str | None, reason: str | None = None) -> PeerError:
    """Return the error for an HTTP status; a reason of the specification says more than it."""
    known = _RPC_CODE_BY_REASON.get(reason or "")
    if known is not None:
        return PeerError(
            _BY_RPC_CODE[known],
            _said(text, f"the agent answered {reason}"),
            http_status=status,
            rpc_code=known,
        )
    default = ErrorCode.INVALID_INPUT if status == 400 else ErrorCode.UNAVAILABLE
    message = _said(text, f"the agent answered HTTP {status}")
    return PeerError(_BY_STATUS.get(status, default), message, http_status=status)


def from_rpc(code: int, text: str | None) -> PeerError:
    """Return the error for a JSON-RPC error object."""
    message = _said(text, f"the agent answered error {code}")
    return PeerError(_BY_RPC_CODE.get(code, ErrorCode.CALL_FAILED), message, rpc_code=code)


def _said(text: str | None, otherwise: str) -> str:
    if not text or text.isspace():
        return otherwise
    printable = "".join(c if c.isprintable() else " " for c in text[:_TEXT_LIMIT])
    return f"the agent says: {printable.strip()}"
