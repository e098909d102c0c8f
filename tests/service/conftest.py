"""The running service in front of an OpenCode that replays recordings, and clients for it.

One service and one event loop for all tests of a module: starting both takes longer than most
tests. A test that looks at all tasks of a caller is a stranger, who has none.
"""

import itertools
import socket
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import httpx
import orjson
import pytest
import pytest_asyncio
from a2a.client import A2ACardResolver, Client, ClientConfig, ClientFactory

from tests.support.caller import Caller, Wire
from tests.support.exchange import Exchange
from tests.support.opencode import FakeOpenCode
from tests.support.service import TOKEN, Running, serving, settings_for

STRANGERS = [f"a-token-for-the-tests-of-stranger-{number:03}" for number in range(100)]
_CREDENTIALS = [
    {"scheme": "bearer", "principal": f"stranger {number}", "token": token}
    for number, token in enumerate(STRANGERS)
]
_strangers = itertools.cycle(STRANGERS)

Serve = Callable[..., Awaitable[Running]]
"""Starts a service with changed settings, for the length of the test."""


@asynccontextmanager
async def started(opencode: FakeOpenCode, state: Path, **changes: str) -> AsyncGenerator[Running]:
    """Run a service that says in its card where it really is."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    variables = {
        "A2A_TASK_STORE_BACKEND": "memory",
        "A2A_STATIC_AUTH_CREDENTIALS": orjson.dumps(_CREDENTIALS).decode(),
        "A2A_PUBLIC_URL": f"http://127.0.0.1:{port}",
        **changes,
    }
    async with serving(settings_for(opencode, state, **variables), port=port) as running:
        yield running


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared_opencode(tmp_path_factory: pytest.TempPathFactory) -> AsyncGenerator[FakeOpenCode]:
    async with FakeOpenCode(tmp_path_factory.mktemp("workspace")).running() as fake:
        yield fake


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def service(
    shared_opencode: FakeOpenCode, tmp_path_factory: pytest.TempPathFactory
) -> AsyncGenerator[Running]:
    async with started(shared_opencode, tmp_path_factory.mktemp("state")) as running:
        yield running


@pytest.fixture
def opencode(shared_opencode: FakeOpenCode) -> Iterator[FakeOpenCode]:
    """What stands behind the service; it plays plain text unless told otherwise."""
    shared_opencode.play("plain-text")
    shared_opencode.prompts.clear()
    yield shared_opencode
    shared_opencode.release()


@pytest_asyncio.fixture(loop_scope="module")
async def serve(opencode: FakeOpenCode, tmp_path: Path) -> AsyncGenerator[Serve]:
    """A service with settings of the test's own."""
    async with AsyncExitStack() as stack:

        async def start(**changes: str) -> Running:
            return await stack.enter_async_context(started(opencode, tmp_path, **changes))

        yield start


@pytest.fixture(params=Wire, ids=lambda wire: wire.value)
def wire(request: pytest.FixtureRequest) -> Wire:
    """Each line on each binding."""
    return request.param


@pytest.fixture
def caller(service: Running, opencode: FakeOpenCode, wire: Wire) -> Caller:
    return Caller(service, wire)


@pytest.fixture
def exchange(service: Running, opencode: FakeOpenCode, wire: Wire) -> Exchange:
    return Exchange(service, wire)


@pytest.fixture
def stranger() -> str:
    """The token of somebody who has no tasks yet."""
    return next(_strangers)


@pytest_asyncio.fixture(loop_scope="module")
async def agent(service: Running, opencode: FakeOpenCode, wire: Wire) -> AsyncGenerator[Client]:
    """The SDK's own client, on one line and binding."""
    async with sdk_client(service, wire) as client:
        yield client


@asynccontextmanager
async def sdk_client(service: Running, wire: Wire, token: str = TOKEN) -> AsyncGenerator[Client]:
    headers = {"Authorization": f"Bearer {token}"}
    async with httpx.AsyncClient(headers=headers, timeout=30, trust_env=False) as http:
        card = await A2ACardResolver(http, service.url).get_agent_card()
        line = "1.0" if wire.modern else "0.3"
        spoken = [one for one in card.supported_interfaces if one.protocol_version == line]
        del card.supported_interfaces[:]
        card.supported_interfaces.extend(spoken)
        bindings = ["JSONRPC" if wire.rpc else "HTTP+JSON"]
        config = ClientConfig(httpx_client=http, supported_protocol_bindings=bindings)
        yield ClientFactory(config).create(card)
