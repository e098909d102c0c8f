"""The running service in front of an OpenCode that replays recordings, and clients for it.

One service and one event loop for all tests of a module: starting both takes longer than most
tests. A test that looks at all tasks of a caller is a stranger, who has none.
"""

import itertools
from collections.abc import AsyncGenerator, Iterator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
import pytest_asyncio
from a2a.client import Client

from tests.support.answers import Wire
from tests.support.caller import Caller
from tests.support.front import STRANGERS, Serve, sdk_client, started
from tests.support.issuer import LocalIssuer, local_issuer
from tests.support.opencode import FakeOpenCode
from tests.support.service import Running

_strangers = itertools.cycle(STRANGERS)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared_opencode(tmp_path_factory: pytest.TempPathFactory) -> AsyncGenerator[FakeOpenCode]:
    async with FakeOpenCode(tmp_path_factory.mktemp("workspace")).running() as fake:
        yield fake


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def service(
    shared_opencode: FakeOpenCode, tmp_path_factory: pytest.TempPathFactory, database: str
) -> AsyncGenerator[Running]:
    async with started(shared_opencode, tmp_path_factory.mktemp("state")) as running:
        yield running


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def provider() -> AsyncGenerator[LocalIssuer]:
    """An identity provider."""
    async with local_issuer() as issuer:
        yield issuer


@pytest.fixture
def opencode(shared_opencode: FakeOpenCode) -> Iterator[FakeOpenCode]:
    """What stands behind the service; it plays plain text unless told otherwise."""
    shared_opencode.play("plain-text")
    shared_opencode.prompts.clear()
    shared_opencode.said.clear()
    shared_opencode.refusing.clear()
    shared_opencode.figures.clear()
    shared_opencode.lost.clear()
    yield shared_opencode
    shared_opencode.starved = False
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
def stranger() -> str:
    """The token of somebody who has no tasks yet."""
    return next(_strangers)


@pytest_asyncio.fixture(loop_scope="module")
async def agent(service: Running, opencode: FakeOpenCode, wire: Wire) -> AsyncGenerator[Client]:
    """The SDK's own client, on one line and binding."""
    async with sdk_client(service, wire) as client:
        yield client
