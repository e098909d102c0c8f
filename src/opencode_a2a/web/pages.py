"""The pages about the service itself: alive, ready, healthy, and its figures.

``Pages`` answers these paths and passes everything else on. What is to be asked before the
service calls itself ready is given to it; it knows neither the database nor OpenCode.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass

import orjson
import structlog
from starlette.types import ASGIApp, Receive, Scope, Send
from structlog.typing import FilteringBoundLogger

from opencode_a2a import metrics
from opencode_a2a.errors import MethodNotAllowedError
from opencode_a2a.events import JsonObject
from opencode_a2a.web.answers import Refusal, answer, refuse

log: FilteringBoundLogger = structlog.get_logger()

Check = Callable[[], Awaitable[None]]
"""Returns when all is well and raises otherwise; the exception is logged, never shown."""

_JSON = b"application/json"
_READ = frozenset({"GET", "HEAD"})


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
                log.warning("not ready", check=name, error=repr(error))
            return False
        return True


@dataclass(frozen=True, slots=True)
class PageContent:
    """What the pages show."""

    readiness: Readiness
    health: Callable[[], JsonObject]
    """Service, version and runtime profile."""
    metrics: bool = True


class Pages:
    """Answer ``/livez``, ``/readyz``, ``/health`` and ``/metrics``."""

    def __init__(self, app: ASGIApp, content: PageContent) -> None:
        self._app = app
        self._content = content
        self._pages: dict[str, Callable[[Send], Awaitable[None]]] = {
            "/livez": self._livez,
            "/readyz": self._readyz,
            "/health": self._health,
        }
        if content.metrics:
            self._pages["/metrics"] = self._metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        page = self._pages.get(scope["path"]) if scope["type"] == "http" else None
        if page is None:
            await self._app(scope, receive, send)
        elif scope["method"] in _READ:
            await page(send)
        else:
            await refuse(scope, send, _READ_ONLY)

    async def _livez(self, send: Send) -> None:
        await answer(send, 200, b'{"status":"ok"}', _JSON)

    async def _readyz(self, send: Send) -> None:
        results = await self._content.readiness.ask()
        well = all(results.values())
        checks = {name: "ok" if good else "failed" for name, good in results.items()}
        body = orjson.dumps({"status": "ok" if well else "unavailable", "checks": checks})
        await answer(send, 200 if well else 503, body, _JSON)

    async def _health(self, send: Send) -> None:
        await answer(send, 200, orjson.dumps({"status": "ok", **self._content.health()}), _JSON)

    async def _metrics(self, send: Send) -> None:
        await answer(send, 200, metrics.exposition(), metrics.CONTENT_TYPE.encode())


_READ_ONLY = Refusal(
    MethodNotAllowedError("This page can only be read"), headers=((b"allow", b"GET, HEAD"),)
)
