"""Envelopes, versions, routes and shapes: everything that is decided before a task is touched."""

from collections.abc import AsyncIterator, Sequence
from typing import cast

import httpx
import orjson
import pytest
from starlette.routing import Router
from starlette.types import Receive, Scope, Send

from opencode_a2a.a2a.types import Version
from opencode_a2a.config import PushSettings, Settings, StreamSettings
from opencode_a2a.errors import Off, SessionNotFoundError
from opencode_a2a.events import Json, JsonObject
from opencode_a2a.extensions.dispatch import Dispatcher
from opencode_a2a.ids import SCOPE_KEY, Caller, Principal
from opencode_a2a.messages import MessageIds
from opencode_a2a.net.egress import FetchResult
from opencode_a2a.push.sender import WebhookSender
from opencode_a2a.server.card import Cards
from opencode_a2a.server.contracts import EXTENSION_NAMES
from opencode_a2a.server.http import BindingOptions
from opencode_a2a.server.jsonrpc import RpcBinding
from opencode_a2a.server.operations import Operations
from opencode_a2a.server.rest import RestBinding
from opencode_a2a.server.sse import Streams
from opencode_a2a.tasks.service import TaskService
from opencode_a2a.tasks.webhooks import Webhooks
from opencode_a2a.web.edge import Refusals

ONE = {"A2A-Version": "1.0"}


class Echo(Dispatcher):
    """An extension method that gives back what it got."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    @property
    def names(self) -> frozenset[str]:
        return frozenset({"opencode.echo", "opencode.fail", "opencode.crash"})

    @property
    def disabled(self) -> dict[str, Off]:
        return {}

    async def call(self, caller: Caller, name: str, params: JsonObject, version: Version) -> Json:
        self.calls.append(name)
        if name == "opencode.fail":
            raise SessionNotFoundError(session_id="ses_1")
        if name == "opencode.crash":
            raise RuntimeError("a secret at /root/key")
        return {"caller": caller.principal, "params": params, "version": version.value}


async def fetch(urls: Sequence[str]) -> list[FetchResult]:
    raise AssertionError(urls)


@pytest.fixture
def echo() -> Echo:
    return Echo()


@pytest.fixture
async def agent(echo: Echo) -> AsyncIterator[httpx.AsyncClient]:
    """The bindings around tasks that must not be reached."""
    cards = Cards(Settings(), 0)
    tasks, webhooks = TaskService.__new__(TaskService), Webhooks.__new__(Webhooks)
    sender = WebhookSender(PushSettings(), "https://a.test")
    operations = Operations(tasks, cards, fetch, webhooks, sender, MessageIds(b"key"))
    options = BindingOptions(Version.V03, StreamSettings(), Streams(), EXTENSION_NAMES)
    routes = [
        *RpcBinding(operations, echo, options).routes(),
        *RestBinding(operations, cards, options).routes(),
    ]
    app = Refusals(Router(routes))

    async def known(scope: Scope, receive: Receive, send: Send) -> None:
        scope[SCOPE_KEY] = Caller(Principal("ann"))
        await app(scope, receive, send)

    transport = httpx.ASGITransport(known)
    async with httpx.AsyncClient(transport=transport, base_url="http://agent") as client:
        yield client


async def call(
    agent: httpx.AsyncClient,
    method: str,
    params: Json = None,
    headers: dict[str, str] | None = None,
) -> JsonObject:
    body: JsonObject = {"jsonrpc": "2.0", "id": 1, "method": method, "params": params}
    answer = await agent.post("/", json=body, headers=headers)
    assert answer.status_code == 200
    assert answer.headers["content-type"] == "application/json"
    return orjson.loads(answer.content)


def code(answer: JsonObject) -> Json:
    return cast(JsonObject, answer["error"])["code"]


@pytest.mark.parametrize(
    ("body", "number"),
    [
        (b"{", -32700),
        (b"\xff\xfe", -32700),
        (b"", -32700),
        (b'{"jsonrpc":"2.0","jsonrpc":"2.0"}', -32700),
        (b"[" * 2000, -32700),
        (b"[]", -32600),
        (b'[{"jsonrpc":"2.0","id":1,"method":"GetTask"}]', -32600),
        (b"5", -32600),
        (b"{}", -32600),
        (b'{"jsonrpc":"1.0","id":1,"method":"GetTask"}', -32600),
        (b'{"jsonrpc":"2.0","id":1,"method":5}', -32600),
        (b'{"jsonrpc":"2.0","id":{},"method":"GetTask"}', -32600),
        (b'{"jsonrpc":"2.0","id":true,"method":"GetTask"}', -32600),
        (b'{"message":{"messageId":"m"}}', -32600),
    ],
)
@pytest.mark.parametrize("headers", [{}, ONE])
async def test_what_is_no_request_is_refused_exactly(
    agent: httpx.AsyncClient, body: bytes, number: int, headers: dict[str, str]
) -> None:
    answer = await agent.post("/", content=body, headers=headers)

    told: JsonObject = orjson.loads(answer.content)
    known = 1 if body.startswith(b"{") and b'"id":1' in body else None
    assert (answer.status_code, told["id"], code(told)) == (200, known, number)


async def test_a_rest_body_at_the_root_is_told_where_it_belongs(agent: httpx.AsyncClient) -> None:
    answer = await agent.post("/", json={"message": {}}, headers=ONE)

    assert "message belongs to HTTP+JSON" in answer.text


async def test_params_that_are_no_object_are_wrong_and_the_id_is_kept(
    agent: httpx.AsyncClient,
) -> None:
    answer = await call(agent, "tasks/get", [1])

    assert (answer["id"], code(answer)) == (1, -32602)


async def test_an_unknown_method_is_answered_with_those_there_are(
    agent: httpx.AsyncClient,
) -> None:
    old = cast(JsonObject, (await call(agent, "tasks/list"))["error"])
    new = cast(JsonObject, (await call(agent, "Nothing", headers=ONE))["error"])

    data = cast(JsonObject, old["data"])
    assert (old["code"], data["type"]) == (-32601, "METHOD_NOT_SUPPORTED")
    assert (data["method"], data["protocol_version"]) == ("tasks/list", "0.3")
    assert "message/send" in cast(list[Json], data["supported_methods"])
    assert "opencode.echo" in cast(list[Json], data["supported_methods"])
    info = cast(JsonObject, cast(list[Json], new["data"])[0])
    assert info["reason"] == "METHOD_NOT_SUPPORTED"
    assert "SendMessage" in str(cast(JsonObject, info["metadata"])["supportedMethods"])


@pytest.mark.requirement("A2A-3.6")
async def test_a_method_of_the_other_line_is_refused_in_the_shape_of_its_own(
    agent: httpx.AsyncClient,
) -> None:
    new = await call(agent, "SendMessage", {}, {"A2A-Version": "0.3"})
    old = await call(agent, "message/send", {}, ONE)
    odd = await call(agent, "SendMessage", {}, {"A2A-Version": "1.7"})

    assert (code(new), code(old), code(odd)) == (-32009, -32009, -32009)
    assert isinstance(cast(JsonObject, new["error"])["data"], list)
    assert isinstance(cast(JsonObject, old["error"])["data"], dict)
    assert "A2A-Version: 1.0" in str(cast(JsonObject, new["error"])["message"])


async def test_extension_methods_run_on_both_lines(agent: httpx.AsyncClient) -> None:
    answer = await call(agent, "opencode.echo", {"n": 2**53 + 1}, ONE)

    assert answer["result"] == {"caller": "ann", "params": {"n": 2**53 + 1}, "version": "1.0"}
    assert code(await call(agent, "opencode.fail")) == -31001


async def test_a_defect_is_an_internal_error_and_nothing_else(agent: httpx.AsyncClient) -> None:
    answer = await call(agent, "opencode.crash")

    assert code(answer) == -32603
    assert "secret" not in str(answer)


@pytest.mark.parametrize("method", ["opencode.echo", "opencode.fail", "opencode.none"])
async def test_a_notification_is_executed_and_not_answered(
    agent: httpx.AsyncClient, echo: Echo, method: str
) -> None:
    answer = await agent.post("/", json={"jsonrpc": "2.0", "method": method})

    assert (answer.status_code, answer.content) == (204, b"")
    assert echo.calls == [method] * (method in echo.names)


async def test_a_body_of_another_type_is_refused(agent: httpx.AsyncClient) -> None:
    body = b'{"jsonrpc":"2.0","id":1,"method":"opencode.echo"}'
    plain = {"content-type": "text/plain"}

    rpc = await agent.post("/", content=body, headers=plain)
    rest = await agent.post("/message:send", content=b"{}", headers={**ONE, **plain})

    assert code(orjson.loads(rpc.content)) == -32005
    assert rest.status_code == 400


REST = [
    ("POST", "/message:send"),
    ("POST", "/message:stream"),
    ("GET", "/tasks"),
    ("GET", "/tasks/t1"),
    ("POST", "/tasks/t1:cancel"),
    ("GET", "/tasks/t1:subscribe"),
    ("POST", "/tasks/t1:subscribe"),
    ("GET", "/tasks/t1/pushNotificationConfigs"),
    ("POST", "/tasks/t1/pushNotificationConfigs"),
    ("GET", "/tasks/t1/pushNotificationConfigs/c1"),
    ("DELETE", "/tasks/t1/pushNotificationConfigs/c1"),
]


@pytest.mark.parametrize(("verb", "path"), [*REST, ("GET", "/extendedAgentCard")])
async def test_a_route_of_1_0_refuses_the_header_of_0_3(
    agent: httpx.AsyncClient, verb: str, path: str
) -> None:
    answer = await agent.request(verb, path, headers={"A2A-Version": "0.3"})

    error = answer.json()["error"]
    assert (answer.status_code, error["status"]) == (400, "FAILED_PRECONDITION")
    assert error["details"][0]["reason"] == "VERSION_NOT_SUPPORTED"
    assert answer.headers["content-type"] == "application/a2a+json"


@pytest.mark.parametrize(
    ("verb", "path"),
    [*REST, ("GET", "/card")],
)
async def test_a_route_of_0_3_refuses_the_header_of_1_0(
    agent: httpx.AsyncClient, verb: str, path: str
) -> None:
    answer = await agent.request(verb, f"/v1{path}", headers=ONE)

    assert (answer.status_code, answer.json()["code"]) == (400, -32009)
    assert answer.headers["content-type"] == "application/json"


async def test_an_envelope_on_a_rest_route_is_told_where_it_belongs(
    agent: httpx.AsyncClient,
) -> None:
    body: JsonObject = {"jsonrpc": "2.0", "id": 1, "method": "SendMessage", "params": {}}

    new = await agent.post("/message:send", json=body, headers=ONE)
    old = await agent.post("/v1/message:send", json=body)

    details = new.json()["error"]["details"]
    assert details[0]["reason"] == "INVALID_PARAMS"
    fields = {violation["field"] for violation in details[1]["fieldViolations"]}
    assert fields == {"jsonrpc", "method", "params", "message"}
    assert old.json()["data"]["fields"] == ["jsonrpc", "message", "method", "params"]


async def test_wrong_filters_of_the_0_3_list_have_their_own_reason(
    agent: httpx.AsyncClient,
) -> None:
    answer = await agent.get("/v1/tasks?pageSize=0")

    assert answer.status_code == 400
    assert answer.json()["data"]["type"] == "INVALID_LIST_TASKS_REQUEST"
    assert answer.json()["data"]["field"] == "pageSize"


@pytest.mark.parametrize("path", ["/nothing", "/v1/nothing", "/tasks/t1/x"])
async def test_unknown_paths_are_answered_in_json(agent: httpx.AsyncClient, path: str) -> None:
    answer = await agent.get(path)

    assert answer.status_code == 404
    assert "json" in answer.headers["content-type"]
    assert "There is nothing at this path" in answer.text


@pytest.mark.parametrize(
    ("verb", "path", "allowed"),
    [
        ("GET", "/", "POST"),
        ("GET", "/message:send", "POST"),
        ("GET", "/tasks/t1:cancel", "POST"),
        ("DELETE", "/v1/tasks/t1", "GET"),
    ],
)
async def test_wrong_verbs_are_answered_in_json_with_the_right_ones(
    agent: httpx.AsyncClient, verb: str, path: str, allowed: str
) -> None:
    answer = await agent.request(verb, path, headers=ONE)

    assert answer.status_code == 405
    assert allowed in answer.headers["allow"]
    assert "json" in answer.headers["content-type"]


async def test_the_extended_card_is_at_all_its_addresses(agent: httpx.AsyncClient) -> None:
    new = await agent.get("/extendedAgentCard", headers=ONE)
    old = await agent.get("/v1/card")
    older = await agent.get("/agent/authenticatedExtendedCard")

    assert "supportedInterfaces" in new.json()
    assert "url" not in new.json()
    assert old.json()["url"] == Settings().public_url
    assert old.content == older.content
    assert old.headers["cache-control"] == "private, max-age=300"
    assert "Authorization" in old.headers["vary"]
