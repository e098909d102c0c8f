"""Limits of a request: how often a caller may send one, how large and slow its body may be.

``edge`` puts ``RateLimit`` and ``BodyGuard`` around the application. The limits of JSON inside a
body are checked where it is parsed (``jsonguard``), those of tasks in ``tasks``.
"""

import asyncio
import contextlib
import sys
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from functools import lru_cache
from hashlib import sha256

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from opencode_a2a import metrics
from opencode_a2a.clock import now_ms
from opencode_a2a.config import LimitSettings
from opencode_a2a.errors import (
    ContentEncodingNotSupportedError,
    MediaTypeNotSupportedError,
    RateLimitError,
    RequestTimeoutError,
    RequestTooLargeError,
    StoreUnavailableError,
)
from opencode_a2a.ids import SCOPE_KEY, Caller
from opencode_a2a.server.contracts import PROBES
from opencode_a2a.store import rates
from opencode_a2a.store.database import Database
from opencode_a2a.web.auth import peer_address

BODY_SECONDS = 30.0
"""How long a body may take to arrive."""
_WITH_BODY = frozenset({"POST", "PUT", "PATCH"})


class RequestRates:
    """Counts the requests of each caller in a sliding window.

    Replicas that share a database also share the counts of frequent callers, every second: what the
    others counted is added to what was counted here.
    """

    SHARE_SECONDS = 1.0
    OFTEN = 0.1
    """The fraction of the limit from which on the count of a caller is shared."""

    def __init__(
        self,
        limits: LimitSettings,
        *,
        max_keys: int = 10_000,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._most = limits.rate_limit_max_requests
        self._window = limits.rate_limit_window_seconds
        self._max_keys = max_keys
        self._clock = clock
        self._seen: OrderedDict[str, deque[float]] = OrderedDict()
        """The times of each key's recent requests; the key with the oldest last request first."""
        self._shared: set[bytes] = set()
        """The digests of the keys whose counts the other replicas can see."""
        self._elsewhere: dict[bytes, int] = {}
        """The requests that the other replicas counted, by the digest of the key."""

    def __len__(self) -> int:
        return len(self._seen)

    def take(self, key: str) -> float:
        """Count one request; return 0, or the seconds to wait if it exceeds the limit."""
        now = self._clock()
        passed = now - self._window
        while self._seen and next(iter(self._seen.values()))[-1] <= passed:
            self._seen.popitem(last=False)  # its last request has left the window
        moments = self._seen.get(key) or deque()
        while moments and moments[0] <= passed:
            moments.popleft()
        if len(moments) >= self._most:
            return moments[0] - passed
        if self._elsewhere and len(moments) + self._elsewhere.get(_digest(key), 0) >= self._most:
            if not moments:
                self._seen.pop(key, None)
            return self.SHARE_SECONDS
        moments.append(now)
        self._seen[key] = moments
        self._seen.move_to_end(key)
        if len(self._seen) > self._max_keys:
            self._seen.popitem(last=False)
        return 0.0

    async def run(self, database: Database) -> None:
        """Share the counts of frequent callers with the other replicas."""
        replica = database.replica
        while replica is not None:
            await asyncio.sleep(self.SHARE_SECONDS)
            if not database.has_other_replicas:
                self._elsewhere, self._shared = {}, set()
                continue
            passed, now = self._clock() - self._window, now_ms()
            often: dict[bytes, int] = {}
            for key, moments in self._seen.items():
                if len(moments) >= self._most * self.OFTEN:
                    while moments[0] <= passed and len(moments) > 1:
                        moments.popleft()
                    if len(moments) >= self._most * self.OFTEN:
                        often[_digest(key)] = len(moments)
            withdrawn = self._shared - often.keys()
            with contextlib.suppress(StoreUnavailableError):  # each limits for itself meanwhile
                if often or withdrawn:
                    await database.write(rates.put, replica, often, withdrawn, now)
                    self._shared = set(often)
                self._elsewhere = await database.read(rates.elsewhere, replica, now)


def _digest(key: str) -> bytes:
    return sha256(key.encode()).digest()[:16]


class RateLimit:
    """Refuse the requests of a credential, principal or address that exceed the limit."""

    def __init__(self, app: ASGIApp, requests: RequestRates) -> None:
        self._app = app
        self._requests = requests

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] in PROBES:  # refusing one could have the service restarted
            await self._app(scope, receive, send)
            return
        caller: Caller | None = scope.get(SCOPE_KEY)
        if caller is None:
            key = f"address:{peer_address(scope)}"
        elif caller.credential_id is not None:
            key = f"credential:{caller.credential_id}"
        else:
            key = f"principal:{caller.principal}"
        if wait := self._requests.take(key):
            metrics.RATE_LIMIT_REJECTED.inc()
            seconds = int(wait) + 1
            raise RateLimitError(
                f"Too many requests; try again in {seconds} s",
                retry_after_seconds=seconds,
            ).with_headers(("Retry-After", str(seconds)))
        await self._app(scope, receive, send)


class BodyGuard:
    """Read the body within limits of size and time, and pass it on in one piece."""

    def __init__(
        self, app: ASGIApp, limits: LimitSettings, *, seconds: float = BODY_SECONDS
    ) -> None:
        self._app = app
        self._most = limits.max_request_body_bytes or sys.maxsize  # 0 is no limit
        self._seconds = seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["method"] not in _WITH_BODY:
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        for encoding in headers.getlist("content-encoding"):
            if encoding.strip().lower() not in ("", "identity"):
                raise ContentEncodingNotSupportedError
        length = headers.get("content-length")
        if length != "0" and (length is not None or "transfer-encoding" in headers):
            kinds = headers.getlist("content-type")
            if kinds and not (len(kinds) == 1 and _is_json(kinds[0])):
                raise MediaTypeNotSupportedError
        # The announced size, unless more arrives.
        size = int(length) if length is not None and length.isdecimal() else 0
        pieces: list[bytes] = []
        received = 0
        message: Message = {"more_body": True}
        try:
            async with asyncio.timeout(self._seconds):
                while size <= self._most and message.get("more_body", False):
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        return  # the caller has hung up
                    pieces.append(message.get("body", b""))
                    received += len(pieces[-1])
                    size = max(size, received)
        except TimeoutError:
            raise RequestTimeoutError(
                f"The body did not arrive within {self._seconds:g} s; send it again"
            ).with_headers(("Connection", "close")) from None  # the rest will not be read
        if size > self._most:
            raise RequestTooLargeError(
                f"The body is larger than {self._most} bytes; send large files by URL",
                max_bytes=self._most,
                actual_size=size,
            )
        body: bytes | None = b"".join(pieces)
        del pieces, message  # they hold the body too

        async def replay() -> Message:
            """Return the body as one message, then what the connection sends."""
            nonlocal body
            if body is None:
                return await receive()
            whole, body = body, None  # do not hold a large body while the answer is made
            return {"type": "http.request", "body": whole, "more_body": False}

        await self._app(scope, replay, send)


@lru_cache(maxsize=1024)
def _is_json(content_type: str) -> bool:
    media_type, _, parameters = content_type.lower().partition(";")
    family, _, kind = media_type.strip().partition("/")
    if kind != "json" and not kind.endswith("+json"):
        return False
    if family not in ("application", "text"):
        return False
    pairs = (parameter.partition("=") for parameter in parameters.split(";"))
    charsets = [value.strip().strip('"') for name, _, value in pairs if name.strip() == "charset"]
    return all(charset in ("utf-8", "utf8", "us-ascii") for charset in charsets)
