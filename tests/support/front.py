"""The service in front of the OpenCode that replays recordings, and the SDK's client for it."""

import asyncio
import socket
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import orjson
from a2a.client import A2ACardResolver, Client, ClientConfig, ClientFactory
from a2a.client.auth import AuthInterceptor, CredentialService

from tests.support import stores
from tests.support.answers import Wire
from tests.support.caller import Caller
from tests.support.opencode import FakeOpenCode
from tests.support.service import TOKEN, Running, serving, settings_for

STRANGERS = [f"a-token-for-the-tests-of-stranger-{number:03}" for number in range(100)]
_CREDENTIALS = [
    {"scheme": "bearer", "principal": f"stranger {number}", "token": token}
    for number, token in enumerate(STRANGERS)
]

Serve = Callable[..., Awaitable[Running]]
"""Starts a service with changed settings, for the length of the test."""


@asynccontextmanager
async def started(opencode: FakeOpenCode, state: Path, **changes: str) -> AsyncGenerator[Running]:
    """Run a service that says in its card where it really is."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    variables = {
        "A2A_TASK_STORE_BACKEND": "database" if stores.postgresql() else "memory",
        "A2A_STATIC_AUTH_CREDENTIALS": orjson.dumps(_CREDENTIALS).decode(),
        "A2A_PUBLIC_URL": f"http://127.0.0.1:{port}",
        **changes,
    }
    async with serving(settings_for(opencode, state, **variables), port=port) as running:
        yield running


@asynccontextmanager
async def sdk_client(
    service: Running,
    wire: Wire,
    token: str = TOKEN,
    *,
    by_card: CredentialService | None = None,
) -> AsyncGenerator[Client]:
    """Yield a client; ``by_card`` has the SDK itself choose how to send which credential."""
    headers = {} if by_card else {"Authorization": f"Bearer {token}"}
    async with httpx.AsyncClient(headers=headers, timeout=30, trust_env=False) as http:
        card = await A2ACardResolver(http, service.url).get_agent_card()
        line = "1.0" if wire.modern else "0.3"
        spoken = [one for one in card.supported_interfaces if one.protocol_version == line]
        del card.supported_interfaces[:]
        card.supported_interfaces.extend(spoken)
        bindings = ["JSONRPC" if wire.rpc else "HTTP+JSON"]
        config = ClientConfig(httpx_client=http, supported_protocol_bindings=bindings)
        interceptors = [AuthInterceptor(by_card)] if by_card else None
        yield ClientFactory(config).create(card, interceptors)  # type: ignore[arg-type] # a list of them


async def begin_held(caller: Caller, opencode: FakeOpenCode) -> str:
    """Begin a task that stops in the middle of its answer; return its id."""
    hold = opencode.hold(count=2)
    task = await caller.begin("hello")
    async with asyncio.timeout(60):
        await hold.reached.wait()
    return task.id
