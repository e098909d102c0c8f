"""What is published, taken literally: everything declared answers, nothing else does."""

import json
import re
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import httpx2
import orjson
import pytest
import schemathesis
import schemathesis.specs.openapi.schemas  # pyright: ignore[reportUnusedImport] # else it is compiled in the middle of a test
from a2a.compat.v0_3 import types as v03
from a2a.types import AgentCard
from google.protobuf.json_format import ParseDict
from hypothesis import HealthCheck, Phase, given, settings

from opencode_a2a.extensions.registry import Extension
from opencode_a2a.server.contracts import ALL_EXTENSIONS
from tests.support.backstage import Backstage
from tests.support.caller import Caller
from tests.support.service import Running, serving, settings_for

pytestmark = pytest.mark.live

KEYS = {
    *("session_binding", "model_selection", "streaming", "session_query", "provider_discovery"),
    *("workspace_control", "interrupt_recovery", "interrupt_callback"),
    *("compatibility_profile", "wire_contract", "rights", "output_schema", "webhooks"),
    *("budget", "tasks"),
}
ONE = {"A2A-Version": "1.0"}
NOT_FOUND = -32601
HANDLERS = {"opencode.worktrees.create"}
"""Would change the workspace when called without params."""


@pytest.fixture(params=["default", "everything on"])
async def running(
    request: pytest.FixtureRequest, backstage: Backstage, tmp_path: Path
) -> AsyncGenerator[Running]:
    on = {"A2A_ENABLE_SESSION_SHELL": "true", "A2A_ENABLE_WORKSPACE_MUTATIONS": "true"}
    changes = {} if request.param == "default" else on
    async with serving(settings_for(backstage, tmp_path, **changes)) as service:
        yield service


@pytest.fixture
def caller(running: Running) -> Caller:
    return Caller(running)


async def fetch(http: httpx2.AsyncClient, path: str) -> Any:
    answer = await http.get(path, headers=ONE)
    assert answer.status_code == 200, path
    return orjson.loads(answer.content)


def lacking(running: Running) -> list[Extension]:
    """Return the extensions that this OpenCode has nothing for."""
    parts = running.service.parts
    assert parts is not None
    return [one for one in ALL_EXTENSIONS if one.requires in parts.fleet.missing]


def params_of(card: Any) -> dict[str, Any]:
    """Return what a card says of each extension, by the anchor of its URI."""
    listed = card["capabilities"]["extensions"]
    found = {one["uri"].partition("#")[2]: one["params"] for one in listed}
    return {anchor: params for anchor, params in found.items() if anchor}


async def number(caller: Caller, method: str) -> int | None:
    """Return the error number of a call without params; None when it has a result."""
    version = "0.3" if "/" in method else "1.0"
    answer = await caller.answer(method, {}, version)
    return answer["error"]["code"] if "error" in answer else None


async def test_everything_declared_answers_and_nothing_else_does(
    running: Running, caller: Caller
) -> None:
    extended = params_of(await fetch(running.http, "/extendedAgentCard"))
    document = await fetch(running.http, "/openapi.json")
    wire = extended["a2a-wire-contract-v1"]
    listed = {name for told in extended.values() for name in told.get("methods", [])}
    conditional = set(wire["extensions"]["conditionally_available_methods"])
    contracts = {n for told in extended.values() for n in told.get("method_contracts", {})}

    examples = document["paths"]["/"]["post"]["requestBody"]["content"]["application/json"]
    shown = set(examples["examples"]) - {"SendMessage", "message/send"}
    assert listed == set(wire["extensions"]["jsonrpc_methods"]) == shown
    assert contracts == listed | conditional
    assert not listed & conditional

    for method in sorted(set(wire["all_jsonrpc_methods"]) - HANDLERS):
        assert await number(caller, method) != NOT_FOUND, method
    for method in sorted(conditional):
        assert await number(caller, method) == NOT_FOUND, method
    for method in ("opencode.sessions", "opencode.nope", "a2a.interrupt", "SendMessage2"):
        refused = await caller.answer(method, {}, "0.3")
        assert refused["error"]["code"] == NOT_FOUND
        supported = set(refused["error"]["data"]["supported_methods"])
        assert supported <= set(wire["all_jsonrpc_methods"])
        assert listed <= supported


async def test_every_endpoint_of_the_contract_is_there(running: Running) -> None:
    extended = params_of(await fetch(running.http, "/extendedAgentCard"))
    document = await fetch(running.http, "/openapi.json")

    declared = extended["a2a-wire-contract-v1"]["core"]["http_endpoints"]

    for endpoint in declared:
        verb, path = endpoint.split(" ")
        if path == "/":
            continue
        version = "0.3" if path.startswith(("/v1/", "/agent/")) else "1.0"
        concrete = path.replace("{id}", "none").replace("{config}", "none")
        answer = await running.http.request(verb, concrete, headers={"A2A-Version": version})
        assert answer.status_code != 405, endpoint
        if answer.status_code == 404:
            assert "nothing at this path" not in answer.text, endpoint
        assert verb.lower() in document["paths"][path], endpoint
    nowhere = await running.http.get("/v2/tasks", headers=ONE)
    assert nowhere.status_code == 404


async def test_the_cards_name_the_extensions_and_the_sdk_reads_them(running: Running) -> None:
    public = await fetch(running.http, "/.well-known/agent-card.json")
    extended = await fetch(running.http, "/extendedAgentCard")
    old = orjson.loads((await running.http.get("/v1/card", headers={"A2A-Version": "0.3"})).content)

    declared = [extension for extension in ALL_EXTENSIONS if extension not in lacking(running)]
    assert [*params_of(public)] == [extension.anchor for extension in declared]
    assert [*params_of(extended)] == [*params_of(public)]
    assert len(orjson.dumps(public)) < 10_000
    for card in (public, extended):
        read = ParseDict(card, AgentCard())
        names = [(extension.uri, *extension.aliases) for extension in declared]
        listed = {one.uri for one in read.capabilities.extensions}
        assert listed == {name for every in names for name in every}
    assert v03.AgentCard.model_validate(old).capabilities.extensions
    only_extended = [
        name for name, told in params_of(public).items() if not told and params_of(extended)[name]
    ]
    assert "opencode-session-management-v1" in only_extended
    assert params_of(public)["shared-interactive-interrupt-v1"]["methods"] == [
        "a2a.interrupt.permission.reply",
        "a2a.interrupt.question.reply",
        "a2a.interrupt.question.reject",
        "a2a.interrupt.grants.list",
        "a2a.interrupt.grants.revoke",
    ]
    profile = params_of(extended)["a2a-compatibility-profile-v1"]
    wire = params_of(extended)["a2a-wire-contract-v1"]
    for key in ("protocol_version", "supported_protocol_versions", "protocol_compatibility"):
        assert profile[key] == wire[key]
    assert profile["service_behaviors"] == wire["service_behaviors"]
    assert set(profile["method_retention"]) == set(wire["all_jsonrpc_methods"]) | set(
        wire["extensions"]["conditionally_available_methods"]
    )


async def test_the_document_carries_the_same_contracts_and_no_loose_end(running: Running) -> None:
    extended = params_of(await fetch(running.http, "/extendedAgentCard"))
    document = await fetch(running.http, "/openapi.json")

    contracts = document["paths"]["/"]["post"]["x-a2a-extension-contracts"]
    text = orjson.dumps(document).decode()
    refs = set(re.findall(r'"#/components/(\w+)/([^"]+)"', text))

    assert set(contracts) == KEYS - {extension.key for extension in lacking(running)}
    for told in contracts.values():
        anchor = told.pop("uri").partition("#")[2]
        assert told == extended[anchor]
    assert {name for kind, name in refs if kind == "schemas"} <= set(
        document["components"]["schemas"]
    )
    assert document["openapi"] == "3.1.0"
    examples = document["paths"]["/"]["post"]["requestBody"]["content"]["application/json"]
    limit = examples["examples"]["opencode.sessions.list"]["value"]["params"]["limit"]
    assert limit == contracts["session_query"]["pagination"]["default_limit"]


async def test_document_and_page_need_the_credential_and_nothing_else(running: Running) -> None:
    for path in ("/openapi.json", "/docs"):
        assert (await running.http.get(path, headers={"Authorization": ""})).status_code == 401

    page = await running.http.get("/docs")

    assert (page.status_code, page.headers["location"]) == (307, "console#/docs")


async def test_the_examples_are_accepted_as_they_are(running: Running, caller: Caller) -> None:
    document = await fetch(running.http, "/openapi.json")
    content = document["paths"]["/"]["post"]["requestBody"]["content"]["application/json"]

    for name, example in content["examples"].items():
        if name in HANDLERS | {"SendMessage", "message/send", "opencode.workspaces.create"}:
            continue  # they do something
        answer = await caller.answer(name, example["value"]["params"])
        code = answer["error"]["code"] if "error" in answer else None
        allowed = (None, -31001, -31003, -31004, -31020, -31021, -31022)
        if "worktrees" in name or name == "opencode.files.read":
            allowed = (*allowed, -32602)  # the example names what is not there
        assert code in allowed, (name, answer)


@pytest.mark.parametrize("header", ["A2A-Extensions", "X-A2A-Extensions"])
async def test_extensions_are_echoed_by_the_names_that_were_used(
    running: Running, header: str
) -> None:
    names = [extension.uri for extension in ALL_EXTENSIONS]
    names += [alias for extension in ALL_EXTENSIONS for alias in extension.aliases]
    body = {"jsonrpc": "2.0", "id": 1, "method": "opencode.permissions.list"}

    answer = await running.http.post(
        "/", json=body, headers={**ONE, header: ", ".join([*names, "urn:unknown"])}
    )

    assert answer.headers["A2A-Extensions"].split(", ") == names


async def test_no_request_that_the_document_allows_breaks_the_service(
    backstage: Backstage, tmp_path: Path
) -> None:
    async with serving(settings_for(backstage, tmp_path)) as running:
        document = await fetch(running.http, "/openapi.json")
        schema: Any = schemathesis.openapi.from_dict(document)
        for found in schema.get_all_operations():
            operation = found.ok()
            if operation.path.endswith((":stream", "message:send")):
                continue  # every one of them would be a turn
            for case in generate(operation, 200 if operation.path == "/" else 3):
                await check(running.http, case)


async def check(http: httpx2.AsyncClient, case: Any) -> None:
    """Send a request and see that it is answered, or refused by name."""
    content = json.dumps(case.body).encode() if case.operation.body else None
    answer = await http.request(
        case.method,
        case.formatted_path,
        params=dict(case.query or {}),
        content=content,
        headers={"Content-Type": "application/json", **ONE},
    )
    assert answer.status_code < 500, (case, answer.text)
    if case.path == "/" and answer.status_code == 200:
        told = orjson.loads(answer.content.removeprefix(b"data: "))
        assert told.get("error", {}).get("code") != -32603, (case.body, answer.text)


def generate(operation: Any, count: int) -> list[Any]:
    """Return requests that a document allows."""
    made: list[Any] = []

    @settings(
        max_examples=count,
        database=None,
        derandomize=True,
        phases=[Phase.generate],
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
    )
    @given(operation.as_strategy())
    def collect(case: Any) -> None:
        made.append(case)

    collect()
    return made
