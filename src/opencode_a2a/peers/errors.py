"""What can go wrong when another agent is called, as one error with a code.

Raised by all of ``peers``; commands print the message, the tool hands code and message to the
model. The codes are the contract, the messages are for people. Text that came from a peer is
cut and cleaned before it gets in here.
"""

from enum import StrEnum

from opencode_a2a.events import JsonObject
from opencode_a2a.peers.hints import as_object, items_in, text_in
from opencode_a2a.printable import one_line

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


class LostError(PeerError):
    """The peer can no longer be reached; its task may still be running."""


_NUMBERS = {
    ErrorCode.AUTH_FAILED: (401,),
    ErrorCode.PERMISSION_DENIED: (403,),
    ErrorCode.UNSUPPORTED: (404, 405, 409, 501, -32003, -32004, -32009, -32601),
    ErrorCode.TIMEOUT: (408,),
    ErrorCode.INVALID_INPUT: (400, 413, -32005, -32602),
    ErrorCode.RETRYABLE: (429, 502, 503, 504, -32603),
    ErrorCode.CALL_FAILED: (-32001, -32002),
    ErrorCode.UNEXPECTED: (-32006,),
    ErrorCode.PROTOCOL: (-32600, -32700),
}
"""The HTTP statuses and JSON-RPC codes that mean each."""
_BY_NUMBER = {number: code for code, numbers in _NUMBERS.items() for number in numbers}
_RPC_CODE_BY_REASON = {
    "TASK_NOT_FOUND": -32001,
    "TASK_NOT_CANCELABLE": -32002,
    "UNSUPPORTED_OPERATION": -32004,
    "CONTENT_TYPE_NOT_SUPPORTED": -32005,
    "INVALID_AGENT_RESPONSE": -32006,
    "VERSION_NOT_SUPPORTED": -32009,
    "INVALID_PARAMS": -32602,
}


def in_answer(status: int, value: JsonObject) -> PeerError | None:
    """Return the error that an answer of either binding is; None when it is none."""
    error = value.get("error")
    if status < 400 and not error:
        return None
    inner = as_object(error) or value
    text = error if isinstance(error, str) else text_in(inner, "message", "detail")
    code = inner.get("code")
    number = code if isinstance(code, int) else 0
    if status < 400 and number < 400:
        return from_rpc(number, text)
    details = [*items_in(inner, "details"), *items_in(inner, "data")]
    reason = next((r for item in details if (r := text_in(item, "reason"))), None)
    return from_status(status if status >= 400 else number, text, reason)


def from_status(status: int, text: str | None, reason: str | None = None) -> PeerError:
    """Return the error for an HTTP status; a reason of the specification says more than it."""
    rpc_code = _RPC_CODE_BY_REASON.get(reason or "")
    number, name = (status, f"HTTP {status}") if rpc_code is None else (rpc_code, reason)
    code = _BY_NUMBER.get(number, ErrorCode.UNAVAILABLE)
    return PeerError(code, _said(text, f"{name}"), http_status=status, rpc_code=rpc_code)


def from_rpc(number: int, text: str | None) -> PeerError:
    """Return the error for a JSON-RPC error object."""
    code = _BY_NUMBER.get(number, ErrorCode.CALL_FAILED)
    return PeerError(code, _said(text, f"error {number}"), rpc_code=number)


def _said(text: str | None, name: str) -> str:
    if not text or text.isspace():
        return f"the agent answered {name}"
    return f"the agent says: {one_line(text, _TEXT_LIMIT)}"
