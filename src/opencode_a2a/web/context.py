"""The outermost layer: what a request is called in logs and traces.

``Tracing`` gives every request an id and a trace, also those that are refused at the door, and
keeps them in ``scope["request_id"]`` and ``scope["trace"]``, in every log record, and in
``tracing.current_trace`` for whatever calls onward.
"""

import structlog
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from opencode_a2a.ids import new_hex
from opencode_a2a.tracing import begin_trace, current_trace
from opencode_a2a.web.answers import DIRECT_SEND, header


class Tracing:
    """Continue the caller's trace or begin one, and tell it with the answer."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        trace = begin_trace(header(scope, b"traceparent"), header(scope, b"tracestate"))
        scope["trace"] = trace
        scope["request_id"] = new_hex(8)
        scope[DIRECT_SEND] = send
        mine = (b"traceparent", trace.traceparent.encode())

        async def tell(message: Message) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message.get("headers", ()), mine]}
            await send(message)

        # A request runs in a task, hence in a context, of its own: there is nothing to undo.
        current_trace.set(trace)
        structlog.contextvars.bind_contextvars(
            request_id=scope["request_id"], trace_id=trace.trace_id
        )
        await self._app(scope, receive, tell)
