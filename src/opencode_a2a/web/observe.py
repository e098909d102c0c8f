"""The pages of the service about itself: probes, ``/health`` and ``/metrics``.

The checks and the facts behind them come from ``app``.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping

import structlog
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route
from structlog.typing import FilteringBoundLogger

from opencode_a2a import metrics
from opencode_a2a.clock import now_ms
from opencode_a2a.events import JsonObject
from opencode_a2a.ids import SCOPE_KEY, Caller
from opencode_a2a.server.contracts import (
    HEALTH_PATH,
    LIVE_PATH,
    METRICS_PATH,
    PING_PATH,
    READY_PATH,
)
from opencode_a2a.server.http import OrjsonResponse

logger: FilteringBoundLogger = structlog.get_logger()

FRESH_SECONDS = 1.0
"""How long the results of the checks are shown."""
_NEVER_CACHED = {"cache-control": "no-store"}
Check = Callable[[], Awaitable[None]]
"""Returns if the dependency works, and raises if not; the error is logged, never shown."""


class Readiness:
    """Checks everything that the service depends on, at most once a second.

    A check that takes longer than ``bound`` seconds has failed.
    """

    def __init__(
        self,
        checks: Mapping[str, Check],
        *,
        bound: float = 2.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._checks = checks
        self._bound = bound
        self._clock = clock
        self._results: dict[str, bool] = {}
        self._told: dict[str, str] = {}
        """Why a check fails, as it was logged last."""
        self._until = float("-inf")
        self._asking = asyncio.Lock()

    async def ask(self) -> dict[str, bool]:
        """Return for each check whether it passed."""

        async def passes(name: str, check: Check) -> bool:
            try:
                async with asyncio.timeout(self._bound):
                    await check()
            except Exception as error:  # any failure means "not ready"
                # What was away may come back as something else, which is worth another line.
                if self._told.get(name) != repr(error):
                    self._told[name] = repr(error)
                    logger.warning("not ready", check=name, error=repr(error))
                return False
            self._told.pop(name, None)
            return True

        async with self._asking:
            if self._clock() >= self._until:
                async with asyncio.TaskGroup() as group:
                    asked = {n: group.create_task(passes(n, c)) for n, c in self._checks.items()}
                self._results = {name: task.result() for name, task in asked.items()}
                self._until = self._clock() + FRESH_SECONDS
            return self._results


class Busyness:
    """Whether there is an open task, and since when that has been so, for ``/ping``.

    A platform that stops idle containers must not take one for idle whose task waits for a person.
    """

    def __init__(self, open_tasks: Callable[[], int]) -> None:
        self._open_tasks = open_tasks
        self._status = ""
        self._since = 0

    def show(self) -> JsonObject:
        status = "HealthyBusy" if self._open_tasks() else "Healthy"
        if status != self._status:
            self._status, self._since = status, now_ms() // 1000
        return {"status": status, "time_of_last_update": self._since}


def pages(
    readiness: Readiness,
    busyness: Busyness,
    health: Callable[[Caller], Awaitable[JsonObject]],
    *,
    figures: bool = True,
) -> list[BaseRoute]:
    """Return the routes of the pages; ``health`` makes the body of ``/health`` for a caller."""

    def page(body: JsonObject, status: int = 200) -> Response:
        return OrjsonResponse(body, status, _NEVER_CACHED)

    async def livez(_: Request) -> Response:
        return page({"status": "ok"})

    async def readyz(_: Request) -> Response:
        results = await readiness.ask()
        checks: JsonObject = {
            name: "ok" if passed else "failed" for name, passed in results.items()
        }
        if all(results.values()):
            return page({"status": "ok", "checks": checks})
        return page({"status": "unavailable", "checks": checks}, 503)

    async def ping(_: Request) -> Response:
        return page(busyness.show())

    async def healthy(request: Request) -> Response:
        return page({"status": "ok", **await health(request.scope[SCOPE_KEY])})

    async def exposition(_: Request) -> Response:
        return Response(
            metrics.exposition(), headers=_NEVER_CACHED | {"content-type": metrics.CONTENT_TYPE}
        )

    routes: list[BaseRoute] = [
        Route(LIVE_PATH, livez),
        Route(READY_PATH, readyz),
        Route(PING_PATH, ping),
        Route(HEALTH_PATH, healthy),
    ]
    return [*routes, Route(METRICS_PATH, exposition)] if figures else routes
