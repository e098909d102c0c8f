"""From a name and params to a declared method, and to its result or error.

``server.jsonrpc`` calls ``Dispatcher.call`` for every method that is not A2A's own. A handler is
written for one OpenCode, that of its ``Call``. Which one that is, and on which replica it runs, is
decided here, before anything runs:

- A method about one OpenCode, which is the rule: ``Deps.where`` finds it by the session,
  request, workspace or directory that the params name. If another replica owns it, the whole call
  runs there. A request that nobody has stored may wait in any OpenCode: the handler raises
  ``NotHereError``, and the others are tried in turn.
- A method about every OpenCode declares ``merge``: the handler is run for each OpenCode of this
  replica, the other replicas are asked at the same time to run it for theirs, and ``merge`` makes
  one result of all.
- A method that asks no OpenCode declares ``local``: it is run here.

A call that names an OpenCode in ``only`` is about that one alone, and nobody else is asked.
"""

import asyncio
from collections.abc import Generator, Iterable, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Annotated

import structlog
from pydantic import TypeAdapter, ValidationError
from structlog.typing import FilteringBoundLogger

from opencode_a2a.a2a.types import Version
from opencode_a2a.cluster.fleet import Anywhere, Member, MovedError, Where
from opencode_a2a.cluster.mailbox import OTHERS_SECONDS, OwnerCall
from opencode_a2a.config import Settings
from opencode_a2a.errors import (
    AuthorizationForbiddenError,
    InvalidFieldError,
    InvalidParamsError,
    MaybeRunError,
    MethodNotFoundError,
    Off,
    ServiceError,
    UpstreamError,
    UpstreamTimeoutError,
)
from opencode_a2a.events import Json, JsonObject
from opencode_a2a.extensions.call import Call, Deps, NotHereError
from opencode_a2a.extensions.params import Payload, Routed, read, read_result, write
from opencode_a2a.extensions.registry import Access, Extension, Method
from opencode_a2a.ids import Caller
from opencode_a2a.rights import Action, at_least
from opencode_a2a.telemetry import AUDIT
from opencode_a2a.turns.sessions import DERIVED_CONTEXT
from opencode_a2a.validation import FREE_OBJECT

logger: FilteringBoundLogger = structlog.get_logger(__name__)


_LIMITED: Mapping[Action, str] = {
    "ask": "This method can change files, and the call is limited to reading",
    "allow": "This method runs without asking for permission, and the call has to ask for, or "
    "refrain from, changes; send a message instead",
}
"""The refusal of a method by what it needs."""


@dataclass(frozen=True, slots=True)
class MethodRequest:
    """A call of a method as it came, which is also the form in which it is forwarded.

    The replica that forwards it has authenticated the caller.
    """

    method: str
    caller: Caller
    params: Annotated[JsonObject, FREE_OBJECT]
    version: Version
    only: str | None = None
    """The OpenCode that the call is about alone; None if the others are asked too."""


class Dispatcher:
    """The methods that this deployment offers."""

    def __init__(self, extensions: Iterable[Extension], deps: Deps, settings: Settings) -> None:
        declared = [method for extension in extensions for method in extension.methods.values()]
        self.deps = deps
        self._methods = {m.name: m for m in declared if m.state(settings) == "enabled"}
        self._disabled = {m.name: off for m in declared if (off := m.off(settings))}
        self._calls = OwnerCall(
            deps.tasks.mailbox,
            "method",
            deps.fleet,
            self._run,
            lambda: TypeAdapter(MethodRequest),
            lambda: TypeAdapter[JsonObject](Annotated[JsonObject, FREE_OBJECT]),
            self._repeatable,
        )

    @property
    def names(self) -> Iterable[str]:
        missing = self.deps.fleet.missing
        return (name for name, one in self._methods.items() if one.requires not in missing)

    @property
    def disabled(self) -> Mapping[str, Off]:
        """Methods that are declared and not offered: why, and by which setting."""
        missing = self.deps.fleet.missing
        lacking = (name for name, one in self._methods.items() if one.requires in missing)
        return self._disabled | dict.fromkeys(lacking, Off("not_in_opencode"))

    def _repeatable(self, request: MethodRequest) -> bool:
        method = self._methods.get(request.method)
        return method is None or method.repeatable or method.access is Access.READ

    async def call(self, caller: Caller, name: str, params: JsonObject, version: Version) -> Json:
        """Call a method, here or at the replica that runs its OpenCode; raise what it declares."""
        request, method = MethodRequest(name, caller, params, version), self._methods[name]
        try:
            with _audited(method, request, success=False):  # else it is audited where it runs
                where = await self._where(method, request)
            return await self._calls.run(where, request)
        except ServiceError as error:
            raise _completed(error, method) from None
        except asyncio.CancelledError:  # the service stops, and the grace period is over
            raise _completed(MaybeRunError(), method) from None

    async def _where(self, method: Method, request: MethodRequest) -> Where:
        """Say where a call belongs; refuse one that could run nowhere."""
        params = _checked(method, request)
        if method.local or method.merge is not None:
            return Anywhere(self.deps.fleet.first)
        return await self.deps.where(params, changes=method.access is not Access.READ)

    async def _run(self, member: Member, request: MethodRequest) -> JsonObject:
        """Run a call for an OpenCode, or for all of them."""
        method = self._methods.get(request.method)
        if method is None:  # the replica that forwards it has other settings, or a later version
            off = self._disabled.get(request.method)
            raise MethodNotFoundError.named(request.method, off, request.version.value)
        with _audited(method, request):
            params = _checked(method, request)
            call = Call(request.caller, request.version, self.deps, params, member)
            if not at_least(call.rights.changes, method.needs):
                raise AuthorizationForbiddenError(
                    _LIMITED[method.needs], credential_id=request.caller.credential_id
                )
            await call.check_workspace()
            if method.merge is not None and request.only is None:
                return write(method.merge(params, await self._in_every(request, call)))
            try:
                return write(await method.handler(call, params))
            except NotHereError as missing:
                if request.only is not None:
                    raise missing.error from None
                return await self._in_any_other(request, call, missing.error)

    async def _in_every(self, request: MethodRequest, call: Call) -> list[Payload]:
        """Return the results of a method for all OpenCodes, those of this replica first.

        Servers that are unreachable, slow or return an error are left out. Raise what an OpenCode
        of this replica raises if there is no result at all. One that is alone is waited for as in
        every other method.
        """
        method, fleet = self._methods[request.method], self.deps.fleet
        _ = call.at  # refuses a directory that may not be named, though others are asked as well
        members = [member for member in fleet.members.values() if member.owned and member.up]
        if not members and not fleet.census.has_others:
            members = [call.member]  # to raise what is wrong with it
        upstreams = await self.deps.tasks.mailbox.others()
        seconds = OTHERS_SECONDS if len(members) + len(upstreams) > 1 else None

        async def ask_here(member: Member) -> Payload | ServiceError:
            try:
                async with asyncio.timeout(seconds):
                    return await method.handler(replace(call, member=member), call.params)
            except TimeoutError:
                return UpstreamTimeoutError()
            except ServiceError as error:  # such as for a workspace that only another one has
                return error

        async def ask_there(upstream: str) -> Payload | None:
            # A replica of another version may send what cannot be read.
            with suppress(ServiceError, TimeoutError, ValidationError):
                async with asyncio.timeout(seconds):
                    narrowed = replace(request, only=upstream)
                    result = await self._calls.run_at_owner(upstream, narrowed)
                    return read_result(method.result, result)
            return None

        replies = await asyncio.gather(*map(ask_here, members), *map(ask_there, upstreams))
        results = [reply for reply in replies if isinstance(reply, Payload)]
        failure = next((reply for reply in replies if isinstance(reply, ServiceError)), None)
        if failure is not None and not results:
            raise failure
        return results

    async def _in_any_other(
        self, request: MethodRequest, call: Call, missing: ServiceError
    ) -> JsonObject:
        """Return the result of the first OpenCode that has what the call names.

        Raise ``missing``, which the OpenCode of the call has raised, if no other has it either.
        """
        fleet = self.deps.fleet
        here = [
            member.name
            for member in fleet.members.values()
            if member is not call.member and member.owned and member.up
        ]
        for upstream in (*here, *await self.deps.tasks.mailbox.others()):
            with suppress(type(missing), UpstreamError):
                return await self._calls.run(fleet.where(upstream), replace(request, only=upstream))
        raise missing


def _checked(method: Method, request: MethodRequest) -> Routed:
    """Return the params of a call; raise an error if they are wrong, or the caller may not."""
    caller, wanted = request.caller, method.capability
    if wanted is not None and wanted not in caller.capabilities:
        raise AuthorizationForbiddenError(
            f"The credential lacks the capability {wanted}",
            capability=wanted,
            credential_id=caller.credential_id,
        )
    return read(method.params, request.params, request.version)


@contextmanager
def _audited(method: Method, request: MethodRequest, *, success: bool = True) -> Generator[None]:
    """Write the audit record of a call, if the method has one; with ``success``, also of that."""
    outcome: str | None = "internal_error"
    try:
        yield
        outcome = "success" if success else None
    except ServiceError as error:
        outcome = error.outcome
        raise
    except MovedError:
        outcome = None  # the next owner writes it
        raise
    except asyncio.CancelledError:
        outcome = "canceled"
        raise
    finally:
        if method.audit is not None and outcome is not None:
            session_id, caller = request.params.get("session_id"), request.caller
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


def _completed(error: ServiceError, method: Method) -> ServiceError:
    """Return an error with the data that it declares and that only the dispatcher knows."""
    if type(error) is InvalidParamsError:  # raised by a layer that does not know methods
        first = error.violations[0].field if error.violations else None
        error = InvalidFieldError(error.message, violations=error.violations, field=first)
    if "method" in error.data_fields:
        error.data = {"method": method.name, **error.data}
    if isinstance(error, UpstreamError) and error.detail and "detail" in error.data_fields:
        error.data["detail"] = error.detail
    # Only another replica says of a method that is offered here that it does not exist.
    if not isinstance(error, (*method.all_errors, MethodNotFoundError)):
        logger.error("undeclared error", method=method.name, reason=error.reason)
    return error
