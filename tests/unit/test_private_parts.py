"""The inner parts of other packages that this program builds on.

Each is named here, so that a new version without it fails with its name, and not somewhere in a
request. Raise the upper bounds in pyproject.toml only when these tests pass with the new version.
"""

import inspect

import httpcore2
import httpx2
import pytest
import uvicorn
from uvicorn.protocols.http import httptools_impl
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

PROTOCOL = (
    "connection_made", "connection_lost", "data_received", "on_message_begin",
    "on_headers_complete", "on_message_complete", "send_400_response", "shutdown",
)  # fmt: skip
"""What ``web.socket.Connection`` and the demo model override or call."""


@pytest.mark.parametrize("name", PROTOCOL)
def test_the_protocol_of_uvicorn_has_the_method(name: str) -> None:
    assert inspect.isfunction(getattr(HttpToolsProtocol, name))


def test_the_protocol_of_uvicorn_is_made_as_we_make_it() -> None:
    parameters = [*inspect.signature(HttpToolsProtocol.__init__).parameters]

    assert parameters[:5] == ["self", "config", "server_state", "app_state", "_loop"]
    made = inspect.getsource(HttpToolsProtocol)
    for attribute in ("scope", "cycle", "flow", "transport", "loop", "app"):
        assert f"self.{attribute}" in made, attribute
    assert {"response_complete", "response_started"} <= set(
        inspect.getsource(RequestResponseCycle).replace("self.", " ").split()
    )
    assert "write_paused" in inspect.getsource(FlowControl)
    assert httptools_impl.STATUS_LINE[404] == b"HTTP/1.1 404 Not Found\r\n"


def test_the_server_of_uvicorn_has_what_we_replace() -> None:
    assert inspect.iscoroutinefunction(uvicorn.Server.startup)
    assert inspect.iscoroutinefunction(uvicorn.Server.shutdown)
    assert inspect.iscoroutinefunction(uvicorn.Server._serve)  # noqa: SLF001 # pyright: ignore[reportPrivateUsage] - the tests serve by it
    assert hasattr(uvicorn.Server, "capture_signals")
    made = inspect.getsource(uvicorn.Server)
    for attribute in ("server_state", "servers", "started", "should_exit", "lifespan", "config"):
        assert f"self.{attribute}" in made, attribute
    assert "ssl_context_factory" in inspect.signature(uvicorn.Config.__init__).parameters


def test_the_transport_of_httpx2_keeps_its_connections_in_a_pool_that_can_be_replaced() -> None:
    transport = httpx2.AsyncHTTPTransport()

    assert isinstance(transport._pool, httpcore2.AsyncConnectionPool)  # noqa: SLF001 # pyright: ignore[reportPrivateUsage] - net.http replaces it
    assert "self._pool.handle_async_request" in inspect.getsource(
        httpx2.AsyncHTTPTransport.handle_async_request
    )
    assert "network_backend" in inspect.signature(httpcore2.AsyncConnectionPool).parameters
    assert issubclass(httpcore2.AnyIOBackend, httpcore2.AsyncNetworkBackend)
