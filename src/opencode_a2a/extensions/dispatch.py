"""From a name and params to a declared method, and its result or error.

``server.jsonrpc`` asks here for every method that is not A2A's own.
"""

import asyncio
from collections.abc import Awaitable, Iterable, Mapping
from dataclasses import asdict

import orjson
import structlog
from structlog.typing import FilteringBoundLogger

from opencode_a2a.a2a.types import Version
from opencode_a2a.config import Settings
from opencode_a2a.errors import (
    AuthorizationForbiddenError,
    InvalidFieldError,
    InvalidParamsError,
    MethodNotFoundError,
    ServiceError,
    UpstreamError,
)
from opencode_a2a.events import Json, JsonObject
from opencode_a2a.extensions.call import Call, Deps
from opencode_a2a.extensions.params import read, write
from opencode_a2a.extensions.registry import Access, Extension, Method
from opencode_a2a.ids import Caller
from opencode_a2a.rights import Budget, Rights
from opencode_a2a.tasks.mailbox import known_fields
from opencode_a2a.telemetry import AUDIT
from opencode_a2a.turns.fleet import NotOwnerError
from opencode_a2a.turns.sessions import DERIVED_CONTEXT

logger: FilteringBoundLogger = structlog.get_logger(__name__)


class Dispatcher:
    """The methods that this deployment offers."""

    def __init__(self, extensions: Iterable[Extension], deps: Deps, settings: Settings) -> None:
        declared = [method for extension in extensions for method in extension.methods.values()]
        self._deps = deps
        self._methods = {m.name: m for m in declared if m.state(settings) == "enabled"}
        self.names: Iterable[str] = self._methods
        self.disabled: Mapping[str, Mapping[str, str]] = {
            method.name: {"toggle": method.condition.variable, "reason": method.state(settings)}
            for method in declared
            if method.condition and method.name not in self._methods
        }
        """Methods that are declared but disabled: by which setting, and why."""
        deps.tasks.mailbox.handlers["method"] = self._call_for

    async def call(self, caller: Caller, name: str, sent: JsonObject, version: Version) -> Json:
        """Call a method; raise what it declares. Every call of some methods is audited."""
        method = self._methods[name]
        try:
            return await self._call(method, caller, sent, version)
        except NotOwnerError as other:
            upstream = other.upstream
        except ServiceError as error:
            raise _completed(error, method) from None
        try:
            return await self._call_owner(method, caller, sent, version, upstream)
        except ServiceError as error:  # complete, unless the other replica could not be asked
            raise _completed(error, method) from None

    async def _call_owner(
        self,
        method: Method,
        caller: Caller,
        sent: JsonObject,
        version: Version,
        upstream: str,
        *,
        only: bool = False,
    ) -> Json:
        """Have a method called by the replica that runs an OpenCode, which trusts this one."""
        asked: JsonObject = {"method": method.name, "params": sent, "version": version.value}
        who = {**asdict(caller), "capabilities": sorted(caller.capabilities)}
        body = orjson.dumps({**asked, "caller": who, "only": upstream if only else None})
        repeatable = method.repeatable or method.access is Access.READ
        return orjson.loads(
            await self._deps.tasks.mailbox.ask(upstream, "method", body, repeatable=repeatable)
        )

    async def _call_for(self, body: bytes) -> bytes:
        """Call a method for another replica."""
        asked = orjson.loads(body)
        name, who, version = asked["method"], asked["caller"], Version(asked["version"])
        method = self._methods.get(name)
        if method is None:  # the other one is set up otherwise, or is of a later version
            off = self.disabled.get(name)
            raise MethodNotFoundError.named(name, off, version.value)
        loaded = {
            "capabilities": frozenset(who["capabilities"]),
            "rights": Rights(**known_fields(Rights, who["rights"])),
            "budget": Budget(**known_fields(Budget, who["budget"])),
        }
        caller = Caller(**known_fields(Caller, who | loaded))
        called = (method, caller, asked["params"], version)
        try:
            return orjson.dumps(await self._call(*called, asked["only"]))
        except ServiceError as error:
            raise _completed(error, method) from None

    async def _call(
        self,
        method: Method,
        caller: Caller,
        sent: JsonObject,
        version: Version,
        only: str | None = None,
    ) -> Json:
        """Call a method here; ``only`` is the OpenCode that it is about, and no other."""
        outcome: str | None = "internal_error"
        try:
            wanted = method.capability
            if wanted is not None and wanted not in caller.capabilities:
                raise AuthorizationForbiddenError(
                    f"The credential lacks the capability {wanted}",
                    method=method.name,
                    capability=wanted,
                    credential_id=caller.credential_id,
                )
            params = read(method.params, sent, version)

            def at_owner(upstream: str) -> Awaitable[Json]:
                return self._call_owner(method, caller, sent, version, upstream, only=True)

            if only is None:
                member = await self._deps.member(params)
            else:
                member = self._deps.fleet.members[only].check_owned()
            call = Call(
                caller, version, self._deps, params, member, at_owner, only=only is not None
            )
            if method.writes and call.rights.changes == "deny":
                raise AuthorizationForbiddenError(
                    "This method can change files, and the call is limited to reading",
                    method=method.name,
                    credential_id=caller.credential_id,
                )
            await call.enter()
            result = write(await method.handler(call, params))
            outcome = "success"
        except ServiceError as error:
            outcome = error.outcome
            raise
        except NotOwnerError:
            outcome = None  # the replica that does it says how it ended
            raise
        except asyncio.CancelledError:
            outcome = "canceled"
            raise
        finally:
            if method.audit is not None and outcome is not None:
                session_id = sent.get("session_id")
                known = session_id[:128] if isinstance(session_id, str) else None
                AUDIT.info(
                    method.audit,
                    method=method.name,
                    identity=caller.principal,
                    principal=caller.principal,
                    credential_id=caller.credential_id,
                    task_id=None,
                    context_id=f"{DERIVED_CONTEXT}{known}" if known else None,
                    session_id=known,
                    outcome=outcome,
                )
        return result


def _completed(error: ServiceError, method: Method) -> ServiceError:
    """Return an error with the data that it declares, as far as only the dispatcher knows it."""
    if type(error) is InvalidParamsError:  # raised below, where methods are not known
        first = error.violations[0].field if error.violations else None
        error = InvalidFieldError(error.message, violations=error.violations, field=first)
    if isinstance(error, UpstreamError):
        if "method" in error.data_fields:
            error.data = {"method": method.name, **error.data}
        if error.detail and "detail" in error.data_fields:
            error.data["detail"] = error.detail
    # Of a method that is offered here, only another replica says that there is none.
    if not isinstance(error, (*method.all_errors, MethodNotFoundError)):
        logger.error("undeclared error", method=method.name, reason=error.reason)
    return error
