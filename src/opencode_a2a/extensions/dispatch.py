"""From a name and params to a declared method, and its result or error.

``server.jsonrpc`` asks here for every method that is not A2A's own.
"""

import asyncio
from collections.abc import Iterable, Mapping

import structlog
from structlog.typing import FilteringBoundLogger

from opencode_a2a import errors
from opencode_a2a.callers import Caller
from opencode_a2a.config import Settings
from opencode_a2a.errors import InvalidFieldError, InvalidParamsError, ServiceError, UpstreamError
from opencode_a2a.events import Json, JsonObject
from opencode_a2a.extensions.calls import Call, Catalogue, Deps
from opencode_a2a.extensions.contracts import nearest
from opencode_a2a.extensions.payloads import read, write
from opencode_a2a.extensions.registry import Extension, Method
from opencode_a2a.telemetry import AUDIT
from opencode_a2a.turns.sessions import DERIVED_CONTEXT

log: FilteringBoundLogger = structlog.get_logger(__name__)


class Dispatcher:
    """The methods that this deployment offers."""

    def __init__(self, extensions: Iterable[Extension], deps: Deps, settings: Settings) -> None:
        declared = [method for extension in extensions for method in extension.methods.values()]
        self._methods = {m.name: m for m in declared if m.state(settings) == "enabled"}
        self.names: Iterable[str] = self._methods
        self.disabled: Mapping[str, Mapping[str, str]] = {
            method.name: {"toggle": method.condition.variable, "reason": method.state(settings)}
            for method in declared
            if method.condition and method.name not in self._methods
        }
        """Methods that are declared but switched off: by which setting, and why."""
        self._deps = deps
        self._catalogue = Catalogue(deps.opencode)

    async def call(self, caller: Caller, method: str, params: JsonObject, line: str) -> Json:
        """Call a method; raise what it declares."""
        declared = self._methods[method]
        try:
            result = await self._run(declared, caller, params, line)
        except ServiceError as error:
            outcome = nearest(_OUTCOMES, type(error)) or "internal_error"
            _record(declared, caller, params, outcome)
            raise _told(declared, error) from None
        except asyncio.CancelledError:
            _record(declared, caller, params, "canceled")
            raise
        except Exception:
            _record(declared, caller, params, "internal_error")
            raise
        _record(declared, caller, params, "success")
        return result

    async def _run(self, method: Method, caller: Caller, sent: JsonObject, line: str) -> JsonObject:
        wanted = method.capability
        if wanted is not None and wanted not in caller.capabilities:
            raise errors.AuthorizationForbiddenError(
                f"The credential lacks the capability {wanted}",
                method=method.name,
                capability=wanted,
                credential_id=caller.credential_id,
            )
        params = read(method.params, sent, line)
        call = Call(caller, line, self._deps, self._catalogue, params)
        await call.enter()
        return write(await method.handler(call, params))


def _told(method: Method, error: ServiceError) -> ServiceError:
    """Return an error as a method of ours tells it."""
    if type(error) is InvalidParamsError:
        first = error.violations[0].field if error.violations else None
        error = InvalidFieldError(error.message, violations=error.violations, field=first)
    if isinstance(error, UpstreamError) and not isinstance(error, errors.UpstreamBackpressureError):
        error.data = {"method": method.name, **error.data}
        if error.detail and not isinstance(error, errors.UpstreamUnreachableError):
            error.data["detail"] = error.detail
    if not isinstance(error, method.all_errors):
        log.error("undeclared error", method=method.name, reason=error.reason)
    return error


# --- audit ------------------------------------------------------------------------------------

_OUTCOMES: dict[type[ServiceError], str] = {
    errors.AuthorizationForbiddenError: "authorization_forbidden",
    errors.SessionNotFoundError: "upstream_404",
    errors.UpstreamNotFoundError: "upstream_404",
    errors.UpstreamHttpError: "upstream_http_error",
    errors.UpstreamUnreachableError: "upstream_unreachable",
    errors.UpstreamBackpressureError: "upstream_backpressure",
    errors.UpstreamPayloadError: "upstream_payload_error",
    errors.InvalidParamsError: "invalid_params",
}


def _record(method: Method, caller: Caller, params: JsonObject, outcome: str) -> None:
    if method.audit is None:
        return
    session_id = params.get("session_id")
    known = session_id[:128] if isinstance(session_id, str) else None
    AUDIT.info(
        method.audit,
        method=method.name,
        identity=caller.principal,
        credential_id=caller.credential_id,
        task_id=None,
        context_id=f"{DERIVED_CONTEXT}{known}" if known else None,
        session_id=known,
        outcome=outcome,
    )
