"""An HTTP client that calls only what the rules of ``egress`` permit.

A name is resolved once, all its addresses are checked, and the connection goes to one of these: a
later change of the name does not matter. TLS and the Host header still use the name.
"""

import ssl
from collections.abc import Callable
from http.cookiejar import CookieJar, DefaultCookiePolicy
from typing import Any

import httpcore2
import httpx2

from opencode_a2a.net.egress import Egress, EgressError, check, check_name, resolve
from opencode_a2a.net.trust import machine_trust


def client(
    rules: Egress, *, timeout: float = 30.0, tls: ssl.SSLContext | None = None
) -> httpx2.AsyncClient:
    """Return an HTTP client that calls only what the rules permit and follows no redirect."""
    return _Client(
        transport=VettedTransport(rules, tls),
        timeout=timeout,
        follow_redirects=False,
        # A proxy of the environment would connect in our place, and could not be checked.
        trust_env=False,
        # Cookies are not kept: neither another server nor the server's next caller may see them.
        cookies=CookieJar(DefaultCookiePolicy(allowed_domains=())),
    )


class _Client(httpx2.AsyncClient):
    """A client that raises InvalidURL for every URL that cannot be read.

    httpx2 raises what its library for names raises, a UnicodeError, and looks where a redirect
    leads even if it is not followed: to a port without a host (``//:1/``) is a ValueError.
    """

    def build_request(self, *args: Any, **options: Any) -> httpx2.Request:
        try:
            return super().build_request(*args, **options)
        except ValueError as error:
            raise httpx2.InvalidURL(f"The URL is malformed: {error}") from error

    async def send(self, *args: Any, **options: Any) -> httpx2.Response:
        try:
            return await super().send(*args, **options)
        except ValueError as error:
            raise httpx2.InvalidURL(f"The URL is malformed: {error}") from error


class VettedTransport(httpx2.AsyncHTTPTransport):
    """httpx2's transport, with connections to permitted addresses only."""

    def __init__(self, rules: Egress, tls: ssl.SSLContext | None = None) -> None:
        context = tls or machine_trust()
        super().__init__(verify=context, trust_env=False)
        self._rules = rules
        self._pool = httpcore2.AsyncConnectionPool(
            ssl_context=context,
            max_connections=None,
            max_keepalive_connections=20,
            keepalive_expiry=30.0,
            network_backend=VettedNetwork(rules),
        )

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        check(str(request.url), self._rules)
        return await super().handle_async_request(request)


class VettedNetwork(httpcore2.AsyncNetworkBackend):
    """Resolves a name, checks all its addresses, and connects to one that was checked."""

    def __init__(self, rules: Egress) -> None:
        self._rules = rules
        # The library declares a stub of that name for when anyio is missing.
        self._plain: httpcore2.AsyncNetworkBackend = httpcore2.AnyIOBackend()  # type: ignore[assignment] # ditto

    async def connect_tcp(
        self, host: str, port: int, *args: Any, **options: Any
    ) -> httpcore2.AsyncNetworkStream:
        check_name(host, self._rules)
        failure: Exception | None = None
        for address in await resolve(host, self._rules):
            try:
                connected = await self._plain.connect_tcp(str(address), port, *args, **options)
                return _Stream(connected)
            except (httpcore2.ConnectError, httpcore2.ConnectTimeout) as error:
                failure = error
        raise failure or EgressError("The host cannot be found")


class _Stream(httpcore2.AsyncNetworkStream):
    """A connection that is also closed if a TLS handshake is cancelled, and whose faults are known.

    httpcore closes it after a timeout of its own, but not on cancellation; it would then stay open
    for as long as the other side likes. And what is wrong with TLS after the handshake it raises as
    it is, no error of its own: nobody who calls would expect it.
    """

    def __init__(self, connected: httpcore2.AsyncNetworkStream) -> None:
        self._connected = connected

    async def read(self, max_bytes: int, timeout: float | None = None) -> bytes:  # noqa: ASYNC109 # httpcore's
        try:
            return await self._connected.read(max_bytes, timeout)
        except ssl.SSLError as error:
            raise httpcore2.ReadError(str(error)) from error

    async def write(self, buffer: bytes, timeout: float | None = None) -> None:  # noqa: ASYNC109 # httpcore's
        try:
            await self._connected.write(buffer, timeout)
        except ssl.SSLError as error:
            raise httpcore2.WriteError(str(error)) from error

    async def aclose(self) -> None:
        await self._connected.aclose()

    async def start_tls(self, *args: Any, **options: Any) -> httpcore2.AsyncNetworkStream:
        try:
            return _Stream(await self._connected.start_tls(*args, **options))
        except BaseException:
            await self._connected.aclose()
            raise

    def get_extra_info(self, info: str) -> Any:
        return self._connected.get_extra_info(info)


async def read(
    response: httpx2.Response, limit: int, arrived: Callable[[int], None] | None = None
) -> bytes | None:
    """Return the body of a response, or None if it is larger than the limit.

    ``arrived`` is called with the size of each piece, and may raise.
    """
    announced = response.headers.get("content-length", "")
    if announced.isdecimal() and int(announced) > limit:
        return None
    data = bytearray()
    async for piece in response.aiter_bytes():
        data += piece
        if len(data) > limit:
            return None
        if arrived is not None:
            arrived(len(piece))
    return bytes(data)


def media_type(response: httpx2.Response) -> str:
    return response.headers.get("content-type", "").partition(";")[0].strip().lower()
