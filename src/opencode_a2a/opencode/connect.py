"""The connection to an OpenCode: which generation answers, and the driver for it.

The composition root and ``opencode.managed`` open an ``OpenCodeConnection``, and pass its
``driver`` on. An OpenCode may be away at the start, and may be of another generation when it comes
back. So the choice is made again with every connection of the event stream, before which no turn
begins.
"""

from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Self, TypeVar, cast

import structlog

from opencode_a2a.errors import UpstreamError
from opencode_a2a.jsonguard import as_object, loads
from opencode_a2a.opencode.client import OpenCode1
from opencode_a2a.opencode.driver import Decoder, Driver
from opencode_a2a.opencode.kinds import (
    CONTRACT,
    PROBE_SECONDS,
    Found,
    Kind,
    RawResponse,
    Unusable,
    doubts,
    probe,
    problem_of,
    response_at,
)
from opencode_a2a.opencode.process import INSTALL

if TYPE_CHECKING:  # which most services never need
    from opencode_a2a.opencode.v2.client import OpenCode2
    from opencode_a2a.opencode.v2.contract import Contract

    # ``OpenCodeConnection.driver`` hides from the type checker what it returns.
    _DRIVERS: tuple[type[Driver], ...] = (OpenCode1, OpenCode2)

logger = structlog.get_logger(__name__)

D = TypeVar("D", OpenCode1, "OpenCode2")


class OpenCodeConnection:
    """An OpenCode at an address; open it with ``async with``."""

    def __init__(
        self,
        base_url: str,
        *,
        username: str = "opencode",
        password: str | None = None,
        timeout: float = 120.0,
        max_concurrent_requests: int = 0,
    ) -> None:
        def make(driver: type[D]) -> D:
            return driver(
                base_url,
                username=username,
                password=password,
                timeout=timeout,
                max_concurrent_requests=max_concurrent_requests,
            )

        self._make = make
        self._chosen: OpenCode1 | OpenCode2 = make(OpenCode1)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_exc: object) -> None:
        self._chosen.close()

    @property
    def driver(self) -> Driver:
        """The driver of whichever generation was chosen last: ``OpenCode1`` or ``OpenCode2``."""
        return cast("Driver", self)  # every method that is not here is that of the chosen one

    def __getattr__(self, name: str) -> Any:
        return getattr(self._chosen, name)

    @property
    def before_change(self) -> Callable[[], Awaitable[None]] | None:
        return self._chosen.before_change

    @before_change.setter
    def before_change(self, wait: Callable[[], Awaitable[None]] | None) -> None:
        self._chosen.before_change = wait

    async def choose(self, *, seconds: float = PROBE_SECONDS) -> Found:
        """Find out what answers, and choose its driver; keep the last one if that is not known."""
        found, contract = await _look(self._chosen.raw_response, seconds)
        if contract is not None:
            from opencode_a2a.opencode.v2.client import OpenCode2

            if lacking := _contract_problem(contract, found):
                raise UpstreamError(f"OpenCode cannot be used: {lacking}")
            driver = self._become(OpenCode2)
            if contract != driver.contract:
                for doubt in doubts(found):
                    logger.warning(doubt)
            driver.contract = contract
        elif found.kind is Kind.V1:
            self._become(OpenCode1)
        if found.usable:
            self._chosen.version = found.version
        return found

    def _become(self, driver: type[D]) -> D:
        before = self._chosen
        if isinstance(before, driver):
            return before
        made = self._make(driver)
        made.before_change = before.before_change
        before.close()
        self._chosen = made
        return made

    # The feed binds the next two once: by ``__getattr__`` it would keep the driver of that moment.

    async def events(self, sink: Callable[[bytes], object]) -> None:
        await self.choose()
        await self._chosen.events(sink)

    def begin_decoding(self) -> Decoder:
        return self._chosen.begin_decoding()


async def examine(
    raw_response: RawResponse, *, password: bool, seconds: float = PROBE_SECONDS
) -> tuple[Found, Unusable | None]:
    """Find out what answers, and why it cannot be used if that is so.

    ``password`` says whether one is sent.
    """
    found, contract = await _look(raw_response, seconds)
    if contract is not None:
        return found, _contract_problem(contract, found)
    return found, problem_of(found, password=password)


async def _look(raw_response: RawResponse, seconds: float) -> tuple[Found, "Contract | None"]:
    """Find out what answers, and what it says that it offers if that is an OpenCode 2."""
    found = await probe(raw_response, seconds=seconds)
    if found.kind is not Kind.V2:
        return found, None
    from opencode_a2a.opencode.v2.contract import Contract

    response = await response_at(CONTRACT, raw_response, seconds)
    if isinstance(response, Found):
        return response, None
    if response.status >= 500:
        return Found(Kind.FAILING, status=response.status), None
    try:
        contract = Contract.of(as_object(loads(response.body)))
        return replace(found, unnamed=contract.unnamed, lacking=contract.lacking), contract
    except ValueError:
        return found, Contract({})


def _contract_problem(contract: "Contract", found: Found) -> Unusable | None:
    """Return why an OpenCode 2 cannot be used; None if turns have all that they need."""
    missing = contract.missing
    if not missing:
        return None
    version = f" ({found.version})" if found.version else ""
    remedy = f"use another version of OpenCode 2, or {INSTALL}"
    return Unusable(f"it is OpenCode 2{version}, and its API has no {missing[0]}", remedy)
