"""The rules of ``network`` for the older client library that the SDK is written for.

``peers.client`` gives such a client to the SDK. Apart from ``network``, so that the service
itself need not load that library.
"""

import ssl

import httpcore
import httpx

from opencode_a2a.peers.network import Egress, VettedNetwork, check


def sdk_client(rules: Egress, *, timeout: float = 30.0) -> httpx.AsyncClient:
    """Return a client that calls only what the rules permit and follows no redirect."""
    return httpx.AsyncClient(
        transport=SdkTransport(rules), timeout=timeout, follow_redirects=False, trust_env=False
    )


class SdkTransport(httpx.AsyncHTTPTransport):
    """httpx's transport on connections to vetted addresses."""

    def __init__(self, rules: Egress) -> None:
        context = ssl.create_default_context()
        super().__init__(verify=context, trust_env=False)
        self._rules = rules
        # Both libraries have one interface, in classes of their own.
        network = VettedNetwork(
            rules,
            httpcore.AnyIOBackend(),  # type: ignore[arg-type] # see above
            (httpcore.ConnectError, httpcore.ConnectTimeout),
        )
        self._pool = httpcore.AsyncConnectionPool(
            ssl_context=context,
            max_connections=None,
            max_keepalive_connections=20,
            keepalive_expiry=30.0,
            network_backend=network,  # type: ignore[arg-type] # see above
        )

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        check(str(request.url), self._rules)
        return await super().handle_async_request(request)
