"""The W3C trace that a request belongs to.

``web.context`` begins it, ``opencode`` and ``peers`` hand it on with ``trace_headers``. Nothing
here knows what is traced.
"""

import re
from contextvars import ContextVar
from dataclasses import dataclass

from opencode_a2a.ids import new_hex

_TRACEPARENT = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
_TRACESTATE_LIMIT = 512


@dataclass(frozen=True, slots=True)
class Trace:
    """A position in a trace."""

    trace_id: str
    span_id: str
    flags: str = "00"
    state: str | None = None

    @property
    def traceparent(self) -> str:
        return f"00-{self.trace_id}-{self.span_id}-{self.flags}"

    def child(self) -> "Trace":
        return Trace(self.trace_id, new_hex(8), self.flags, self.state)


current_trace: ContextVar[Trace | None] = ContextVar("current_trace", default=None)


def begin_trace(traceparent: str | None, tracestate: str | None = None) -> Trace:
    """Take up the caller's trace, or begin one when there is none or it is malformed."""
    found = _TRACEPARENT.fullmatch(traceparent) if traceparent else None
    if found is None:
        return _new_trace()
    version, trace_id, span_id, flags, more = found.groups()
    void = version == "ff" or (version == "00" and more)
    if void or not int(trace_id, 16) or not int(span_id, 16):
        return _new_trace()
    fits = tracestate is not None and len(tracestate) <= _TRACESTATE_LIMIT and tracestate.isascii()
    return Trace(trace_id, span_id, flags, tracestate if fits else None)


def trace_headers() -> dict[str, str]:
    """Return the headers that carry the current trace on to OpenCode or a peer."""
    trace = current_trace.get()
    if trace is None:
        return {}
    child = trace.child()
    headers = {"traceparent": child.traceparent}
    if child.state:
        headers["tracestate"] = child.state
    return headers


def _new_trace() -> Trace:
    fresh = new_hex(24)
    return Trace(fresh[:32], fresh[32:])
