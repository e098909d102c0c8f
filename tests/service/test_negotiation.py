"""Which version a request speaks, on the running service."""

import orjson
import pytest

from tests.support.answers import PARAMS, VERSION, Wire
from tests.support.caller import Caller
from tests.support.front import Serve
from tests.support.service import Running

pytestmark = pytest.mark.asyncio(loop_scope="module")

OTHER = {Wire.RPC: "0.3", Wire.REST: "0.3", Wire.RPC03: "1.0", Wire.REST03: "1.0"}


@pytest.mark.requirement("3.6-major-minor")
@pytest.mark.requirement("3.6-patch-ignored")
@pytest.mark.parametrize("patch", ["", ".0", ".7", ".123"])
async def test_major_and_minor_choose_the_line_whatever_the_patch(
    caller: Caller, patch: str
) -> None:
    line = caller.headers["A2A-Version"]

    answer = await caller.ask("send", caller.message("hello"), A2A_Version=line + patch)

    assert answer.task["id"]
    assert answer.headers["a2a-version"] == line


@pytest.mark.requirement("3.6-unsupported")
@pytest.mark.parametrize("version", ["2.0", "1.1", "1.9", "0.2", "0.30", "1", "v1.0", "1.0-x", "*"])
async def test_every_other_version_is_refused_with_the_ones_there_are(
    caller: Caller, version: str
) -> None:
    answer = await caller.ask("send", caller.message("hello"), A2A_Version=version)

    answer.refuses(VERSION)
    assert b"1.0" in answer.content
    assert b"0.3" in answer.content


@pytest.mark.requirement("3.6-absent-is-0.3")
@pytest.mark.parametrize("empty", [True, False])
async def test_a_request_without_version_speaks_that_of_its_method_or_route(
    caller: Caller, empty: bool
) -> None:
    version = caller.headers.pop("A2A-Version")
    sent = {"A2A_Version": ""} if empty else {}

    answer = await caller.ask("send", caller.message("hello"), **sent)

    assert answer.task["id"]
    assert answer.headers["a2a-version"] == version


@pytest.mark.requirement("3.6-absent-is-0.3")
async def test_a_method_of_both_versions_is_taken_as_0_3_without_a_version(
    service: Running,
) -> None:
    caller = Caller(service, Wire.RPC)
    caller.headers.pop("A2A-Version")
    body = b'{"jsonrpc":"2.0","id":1,"method":"opencode.sessions.status"}'

    answer = await caller.post(body, "/")

    assert answer.headers["a2a-version"] == "0.3"


@pytest.mark.parametrize("wire", [Wire.RPC03, Wire.REST03])
async def test_a_body_that_can_only_be_1_0_is_answered_in_1_0(service: Running, wire: Wire) -> None:
    old, modern = Caller(service, wire), Caller(service, Wire.RPC)
    old.headers.pop("A2A-Version")
    sent = modern.message("hello")

    answer = await old.ask("send", sent)
    refused = await old.ask("send", sent, A2A_Version="0.3")

    assert answer.headers["a2a-version"] == "1.0"
    result = answer.body if wire is Wire.REST03 else answer.body["result"]
    assert result["task"]["status"]["state"] == "TASK_STATE_COMPLETED"
    refused.refuses(PARAMS)  # whoever says 0.3 means it


async def test_the_error_of_such_a_body_is_in_1_0_too(service: Running) -> None:
    caller = Caller(service, Wire.RPC03)
    caller.headers.pop("A2A-Version")
    sent = Caller(service, Wire.RPC).message("hello", taskId="nobody-has-this")

    answer = await caller.ask("send", sent)

    assert answer.headers["a2a-version"] == "1.0"
    assert answer.body["error"]["data"][0]["reason"] == "TASK_NOT_FOUND"


@pytest.mark.requirement("3.6-unsupported")
async def test_a_method_or_route_of_one_line_refuses_the_version_of_the_other(
    caller: Caller,
) -> None:
    other = OTHER[caller.wire]

    answer = await caller.ask("send", caller.message("hello"), A2A_Version=other)

    answer.refuses(VERSION)


@pytest.mark.requirement("3.6-query-parameter")
async def test_the_version_may_come_as_a_query_parameter(service: Running, wire: Wire) -> None:
    caller = Caller(service, wire)
    line = caller.headers.pop("A2A-Version")
    target = caller.target("send", {})[1]

    answer = await caller.post(
        caller.encode("send", caller.message("hello")), f"{target}?A2A-Version={line}"
    )

    assert answer.task["id"]
    assert answer.headers["a2a-version"] == line


@pytest.mark.requirement("3.6-query-parameter")
async def test_the_header_wins_over_the_query_parameter(caller: Caller) -> None:
    target = caller.target("send", {})[1]
    body = caller.encode("send", caller.message("hello"))

    answer = await caller.post(body, f"{target}?A2A-Version=2.0")

    assert answer.task["id"]


@pytest.mark.requirement("I17")
@pytest.mark.parametrize("line", ["1.0", "0.3"])
async def test_a_service_of_one_line_says_so_and_keeps_to_it(serve: Serve, line: str) -> None:
    service = await serve(A2A_SUPPORTED_PROTOCOL_VERSIONS=line, A2A_PROTOCOL_VERSION=line)

    card = orjson.loads((await service.http.get("/.well-known/agent-card.json")).content)
    listed = {one["protocolVersion"] for one in card.get("supportedInterfaces", [])}
    for wire in Wire:
        caller = Caller(service, wire)
        own = caller.headers["A2A-Version"] == line
        answer = await caller.ask("send", caller.message("hello"))
        if own:
            assert answer.task["id"]
            caller.headers["A2A-Version"] = ""
            assert (await caller.ask("send", caller.message("hello"))).task["id"]
        else:
            answer.refuses(VERSION)

    assert listed == ({"1.0"} if line == "1.0" else set())
    assert ("url" in card) == (line == "0.3")
