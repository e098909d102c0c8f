"""The pages of the service about itself: alive, ready, healthy, and figures.

``pages`` returns their routes. What is ready or healthy is asked of others.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping

import orjson
import structlog
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route
from structlog.typing import FilteringBoundLogger

from opencode_a2a import metrics
from opencode_a2a.events import JsonObject
from opencode_a2a.ids import SCOPE_KEY, Caller
from opencode_a2a.server.contracts import HEALTH_PATH, LIVE_PATH, METRICS_PATH, READY_PATH

logger: FilteringBoundLogger = structlog.get_logger()

_NEVER_CACHED = {"cache-control": "no-store"}


Check = Callable[[], Awaitable[None]]
"""Returns when all is well and raises otherwise; the exception is logged, never shown."""


class Readiness:
    """Asks everything the service depends on, at most once in ``fresh`` seconds."""

    def __init__(
        self,
        checks: Mapping[str, Check],
        *,
        bound: float = 2.0,
        fresh: float = 1.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._checks = checks
        self._bound = bound
        self._fresh = fresh
        self._clock = clock
        self._results: dict[str, bool] = {}
        self._until = float("-inf")
        self._asking = asyncio.Lock()

    async def ask(self) -> dict[str, bool]:
        """Return which checks are well."""
        async with self._asking:
            if self._clock() >= self._until:
                async with asyncio.TaskGroup() as group:
                    asked = {n: group.create_task(self._one(n, c)) for n, c in self._checks.items()}
                self._results = {name: task.result() for name, task in asked.items()}
                self._until = self._clock() + self._fresh
            return self._results

    async def _one(self, name: str, check: Check) -> bool:
        try:
            async with asyncio.timeout(self._bound):
                await check()
        except Exception as error:  # whatever is wrong, the answer is "not ready"
            if self._results.get(name, True):
                logger.warning("not ready", check=name, error=repr(error))
            return False
        return True


def pages(
    readiness: Readiness,
    health: Callable[[Caller], Awaitable[JsonObject]],
    *,
    figures: bool = True,
) -> list[BaseRoute]:
    """Return the routes of the pages about the service; ``health`` tells a caller what runs."""

    def page(body: JsonObject, status: int = 200) -> Response:
        return Response(orjson.dumps(body), status, _NEVER_CACHED, "application/json")

    async def livez(_: Request) -> Response:
        return page({"status": "ok"})

    async def readyz(_: Request) -> Response:
        results = await readiness.ask()
        checks: JsonObject = {name: "ok" if well else "failed" for name, well in results.items()}
        if all(results.values()):
            return page({"status": "ok", "checks": checks})
        return page({"status": "unavailable", "checks": checks}, 503)

    async def healthy(request: Request) -> Response:
        return page({"status": "ok", **await health(request.scope[SCOPE_KEY])})

    async def exposition(_: Request) -> Response:
        return Response(
            metrics.exposition(), headers=_NEVER_CACHED | {"content-type": metrics.CONTENT_TYPE}
        )

    routes: list[BaseRoute] = [
        Route(LIVE_PATH, livez),
        Route(READY_PATH, readyz),
        Route(HEALTH_PATH, healthy),
    ]
    return [*routes, Route(METRICS_PATH, exposition)] if figures else routes
