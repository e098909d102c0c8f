"""Requests that are wrong: each is refused exactly, on every line and binding."""

import asyncio
import copy
import time
from collections.abc import Iterator
from typing import Any

import orjson
import pytest

from opencode_a2a.events import Json, JsonObject
from tests.support.answers import (
    CONTENT_TYPE,
    MEDIA_TYPE,
    METHOD,
    PARAMS,
    PARSE,
    PUSH,
    REQUEST,
    UNSUPPORTED,
    Answer,
    Wire,
)
from tests.support.caller import Caller
from tests.support.front import Serve
from tests.support.opencode import FakeOpenCode
from tests.support.service import Running

pytestmark = pytest.mark.asyncio(loop_scope="module")

RPC = pytest.mark.parametrize("wire", [Wire.RPC, Wire.RPC03], ids=lambda wire: wire.value)
MODERN = pytest.mark.parametrize("wire", [Wire.RPC, Wire.REST], ids=lambda wire: wire.value)
REST = pytest.mark.parametrize("wire", [Wire.REST, Wire.REST03], ids=lambda wire: wire.value)


@pytest.mark.requirement("I9")
@pytest.mark.requirement("5.4-error-codes")
@pytest.mark.requirement("ours-not-utf-8")
@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"nonsense",
        b'{"a": 1,}',
        b"\xff\xfe{}",
        b'{"a": "\xe9"}',
        b"\xef\xbb\xbf{}",
        b'{"jsonrpc": "2.0", "jsonrpc": "2.0"}',
        b'{"message": {"parts": [], "parts": []}}',
        b"[" * 100 + b"]" * 100,
        b'{"a":' * 5000 + b"1" + b"}" * 5000,
        b'{"a": 123456789012345678901234567890}',
        b'{"a": NaN}',
        b'{"a": 1e999}',
    ],
    ids=lambda body: body[:24],
)
async def test_what_is_no_json_is_a_parse_error(caller: Caller, body: bytes) -> None:
    (await caller.post(body)).refuses(PARSE)


@pytest.mark.requirement("I9")
@pytest.mark.requirement("13-limits")
@pytest.mark.parametrize("count", [500, 50_000])
async def test_many_wrong_parts_are_refused_briefly_and_at_once(caller: Caller, count: int) -> None:
    parts: list[Json] = [{"text": 1}] * count
    took: list[float] = []
    for _ in range(3):
        began = time.process_time()  # what else the machine does is not asked here
        answer = await caller.ask("send", caller.message(*parts))
        took.append(time.process_time() - began)

        assert 1 <= len(answer.refuses(PARAMS)) <= 20
        assert len(answer.content) < 10_000
    assert min(took) < 0.3


@pytest.mark.requirement("I9")
@pytest.mark.parametrize("field", ["extensions", "referenceTaskIds"])
async def test_many_wrong_entries_of_a_list_are_refused_briefly(caller: Caller, field: str) -> None:
    wrong: list[Json] = [1] * 50_000
    answer = await caller.ask("send", caller.message("hello", **{field: wrong}))

    assert answer.refuses(PARAMS) == [f"message.{field}[0]"]


@pytest.mark.requirement("I9")
@pytest.mark.parametrize("place", ["params", "metadata"])
async def test_many_unknown_params_of_a_method_are_refused_briefly(
    service: Running, place: str
) -> None:
    unknown: JsonObject = {f"x{number}": number for number in range(50_000)}
    params: JsonObject = {"metadata": {"opencode": unknown}} if place == "metadata" else unknown
    loop, took = asyncio.get_running_loop(), list[float]()
    for _ in range(3):
        began = loop.time()
        answer = await Caller(service).answer("opencode.files.list", params)
        took.append(loop.time() - began)

        error: Any = answer["error"]
        assert error["code"] == -32602
        assert 1 <= len(error["data"][1]["fieldViolations"]) <= 20
        assert len(orjson.dumps(answer)) < 10_000
    assert min(took) < 0.3


@pytest.mark.requirement("13-limits")
async def test_more_files_than_are_fetched_for_a_message_are_refused_at_once(
    caller: Caller,
) -> None:
    parts = [caller.file("https://files.invalid/a", "text/plain", url=True)] * 60

    answer = await caller.ask("send", caller.message("look", *parts))

    assert answer.refuses(PARAMS) == ["message.parts"]


@pytest.mark.requirement("I9")
@pytest.mark.parametrize("name", ["a" * 256, "é" * 128, "a/" * 2500], ids=["ascii", "é", "path"])
async def test_a_directory_with_a_name_that_cannot_exist_is_refused(
    caller: Caller, name: str
) -> None:
    params = caller.message("hello") | {"metadata": {"opencode": {"directory": name}}}

    assert (await caller.ask("send", params)).refuses(PARAMS) == ["metadata.opencode.directory"]


@pytest.mark.requirement("I9")
@pytest.mark.parametrize("method", ["opencode.files.read", "opencode.files.list"])
@pytest.mark.parametrize("field", ["path", "directory"])
async def test_a_file_with_a_name_that_cannot_exist_is_refused(
    service: Running, method: str, field: str
) -> None:
    answer: Any = await Caller(service).answer(method, {"path": ".", field: "é" * 128})

    assert answer["error"]["code"] == -32602
    assert [one["field"] for one in answer["error"]["data"][1]["fieldViolations"]] == [field]


@pytest.mark.requirement("5.4-error-codes")
@pytest.mark.requirement("I9")
@pytest.mark.parametrize("body", [b"5", b'"text"', b'"%b"' % (b"[" * 100), b"null", b"[]", b"true"])
async def test_json_that_is_no_object_is_no_request(caller: Caller, body: bytes) -> None:
    (await caller.post(body)).refuses(REQUEST)


@RPC
@pytest.mark.requirement("5.4-error-codes")
async def test_batches_are_refused(caller: Caller) -> None:
    request = orjson.loads(caller.encode("send", caller.message("hello")))

    (await caller.post(orjson.dumps([request]))).refuses(REQUEST)


@pytest.mark.requirement("I9")
@pytest.mark.parametrize(
    "sent", ["text/plain", "application/xml", "application/json; charset=utf-16", "json"]
)
async def test_a_body_of_another_type_is_refused(caller: Caller, sent: str) -> None:
    body = caller.encode("send", caller.message("hello"))

    answer = await caller.post(body, Content_Type=sent)

    answer.refuses(MEDIA_TYPE)


@RPC
@pytest.mark.requirement("5.4-error-codes")
@pytest.mark.parametrize("wrong", [{"jsonrpc": "1.0"}, {"method": 5}, {"message": {}}])
async def test_a_wrong_request_is_answered_with_its_id(caller: Caller, wrong: Any) -> None:
    request = orjson.loads(caller.encode("get", {"id": "any"}))

    ids: list[tuple[Json, Json]] = [("seven", "seven"), (7, 7), (None, None), (True, None)]
    for request_id, told in [*ids, ({}, None)]:
        answer = await caller.post(orjson.dumps(request | wrong | {"id": request_id}))

        answer.refuses(REQUEST)
        assert answer.body["id"] == told
        assert type(answer.body["id"]) is type(told)


@RPC
@pytest.mark.requirement("ours-notifications")
async def test_a_notification_is_carried_out_and_not_answered(
    caller: Caller, opencode: FakeOpenCode
) -> None:
    request = orjson.loads(caller.encode("send", caller.message("hello")))
    unknown = {"jsonrpc": "2.0", "method": "no.such.method"}
    del request["id"]

    answers = [await caller.post(orjson.dumps(one)) for one in (request, unknown)]
    await caller.ask("send", caller.message("hello"))

    assert [(answer.status, answer.content) for answer in answers] == [(204, b"")] * 2
    assert len(opencode.prompts) == 2


@RPC
@pytest.mark.requirement("5.4-error-codes")
@pytest.mark.parametrize("method", ["no/such", "", "sendmessage", "__init__", "x" * 5000])
async def test_an_unknown_method_is_refused(caller: Caller, method: str) -> None:
    body: Json = {"jsonrpc": "2.0", "id": "7", "method": method, "params": {}}

    answer = await caller.post(orjson.dumps(body))

    answer.refuses(METHOD)
    assert answer.body["id"] == "7"
    assert len(answer.content) < 5000


@REST
@pytest.mark.requirement("5.4-error-codes")
@pytest.mark.parametrize("path", ["/no/such", "/tasks/", "/tasks/a/b", "/message:ask"])
async def test_an_unknown_path_is_refused(caller: Caller, path: str) -> None:
    prefix = "" if caller.wire.modern else "/v1"

    answer = await caller.post(b"{}", prefix + path)

    answer.refuses(METHOD)


# --- shapes -----------------------------------------------------------------------------------

WRONG: list[tuple[Any, list[str]]] = [
    ({"messageId": None}, ["message.messageId"]),
    ({"messageId": ""}, ["message.messageId"]),
    ({"messageId": "x" * 300}, ["message.messageId"]),
    ({"messageId": 5}, ["message.messageId"]),
    ({"role": None}, ["message.role"]),
    ({"role": "ROLE_AGENT"}, ["message.role"]),
    ({"role": "agent"}, ["message.role"]),
    ({"role": "ROLE_SYSTEM"}, ["message.role"]),
    ({"role": 0}, ["message.role"]),
    ({"parts": None}, ["message.parts"]),
    ({"parts": []}, ["message.parts"]),
    ({"parts": "hello"}, ["message.parts"]),
    ({"parts": ["hello"]}, ["message.parts[0]"]),
    ({"taskId": 5}, ["message.taskId"]),
    ({"contextId": ["x"]}, ["message.contextId"]),
    ({"metadata": "x"}, ["message.metadata"]),
    ({"extensions": "x"}, ["message.extensions"]),
    ({"referenceTaskIds": [5]}, ["message.referenceTaskIds[0]"]),
]


@pytest.mark.requirement("13-input-validated")
@pytest.mark.requirement("5.4-bad-request-fields")
@pytest.mark.requirement("13-wrong-role")
@pytest.mark.parametrize(("change", "fields"), WRONG, ids=lambda value: str(value)[:40])
async def test_a_wrong_field_of_a_message_is_named(
    caller: Caller, opencode: FakeOpenCode, change: Any, fields: list[str]
) -> None:
    params = caller.message("hello")
    params["message"] |= change

    answers = [await caller.ask(operation, params) for operation in ("send", "stream")]

    assert [answer.refuses(PARAMS) for answer in answers] == [fields, fields]
    assert opencode.prompts == []


@pytest.mark.requirement("13-empty-part")
@pytest.mark.requirement("13-input-validated")
async def test_a_part_must_have_exactly_one_content(caller: Caller) -> None:
    modern: list[Json] = [{}, {"text": "a", "data": {}}, {"text": None}, {"raw": "*"}, {"text": 5}]
    old: list[Json] = [
        {},
        {"kind": "text"},
        {"kind": "tune", "text": "a"},
        {"kind": "file", "file": {}},
        {"kind": "file", "file": {"bytes": "*"}},
        {"kind": "data", "data": 5},
    ]
    for part in modern if caller.wire.modern else old:
        answer = await caller.ask("send", caller.message("hello", part))
        assert all(field.startswith("message.parts[1]") for field in answer.refuses(PARAMS))


@pytest.mark.requirement("13-empty-part")
@pytest.mark.parametrize("text", ["", "  ", "\n\t"])
async def test_a_blank_message_is_refused(caller: Caller, text: str) -> None:
    assert (await caller.ask("send", caller.message(text))).refuses(PARAMS) == ["message.parts"]


@pytest.mark.requirement("ours-mixed-shapes")
async def test_shapes_of_the_other_line_are_named(caller: Caller) -> None:
    message = caller.message("hello")["message"]
    modern: list[tuple[Json, str]] = [
        ({"message": message | {"role": "user"}}, "message.role"),
        ({"message": message | {"content": []}}, "message.content"),
        (
            {"message": message | {"parts": [{"kind": "text", "text": "a"}]}},
            "message.parts[0].kind",
        ),
        (
            {"message": message | {"parts": [{"file": {"uri": "http://a/b"}}]}},
            "message.parts[0].file",
        ),
        ({"message": message, "configuration": {"blocking": True}}, "configuration.blocking"),
    ]
    old: list[tuple[Json, str]] = [
        ({"message": message | {"role": "ROLE_USER"}}, "message.role"),
        ({"message": message | {"parts": [{"text": "a"}]}}, "message.parts[0].kind"),
        (
            {"message": message | {"parts": [{"kind": "file", "raw": "YQ=="}]}},
            "message.parts[0].raw",
        ),
        (
            {"message": message, "configuration": {"returnImmediately": True}},
            "configuration.returnImmediately",
        ),
    ]
    for params, field in modern if caller.wire.modern else old:
        answer = await caller.post(caller.encode("send", params))
        assert field in answer.refuses(PARAMS)


@pytest.mark.requirement("ours-mixed-shapes")
async def test_requests_for_the_other_binding_are_told_where_they_belong(
    service: Running, caller: Caller
) -> None:
    twin = {
        Wire.RPC: Wire.REST,
        Wire.REST: Wire.RPC,
        Wire.RPC03: Wire.REST03,
        Wire.REST03: Wire.RPC03,
    }
    other = Caller(service, twin[caller.wire])
    body = other.encode("send", other.message("hello"))

    answer = await caller.post(body)

    if caller.wire.rpc:
        assert "message" in answer.refuses(REQUEST)
    else:
        assert {"jsonrpc", "method", "params"} <= set(answer.refuses(PARAMS))


@RPC
@pytest.mark.requirement("5.4-error-codes")
@pytest.mark.parametrize("params", [[], [1], "x", 5, True])
async def test_params_must_be_an_object(caller: Caller, params: Json) -> None:
    answer = await caller.post(caller.encode("send", params))

    assert answer.refuses(PARAMS) == ["params"]


ODD: list[Json] = [None, True, -(2**63), "", "\u0000/../😀", [None], {"a": {"b": []}}]


def paths(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the way to every field and item of a JSON value."""
    keys: list[Any] = []
    if isinstance(value, dict):
        keys = [*value]
    elif isinstance(value, list):
        keys = [*range(len(value))]  # pyright: ignore[reportUnknownArgumentType] # any JSON
    for key in keys:
        yield (*path, key)
        yield from paths(value[key], (*path, key))


def mutations(params: Any) -> Iterator[Any]:
    """Yield the params with every field replaced by every odd value, one at a time."""
    for *path, last in paths(params):
        for odd in ODD:
            changed = copy.deepcopy(params)
            place = changed
            for step in path:
                place = place[step]
            place[last] = odd
            yield changed


@pytest.mark.requirement("I9")
async def test_no_odd_value_anywhere_is_a_failure_of_ours(
    caller: Caller, opencode: FakeOpenCode
) -> None:
    params = caller.message(
        "hello",
        caller.data({"a": 1}),
        caller.file("aGk=", "text/plain"),
        taskId="no-such-task",
        contextId="c",
        metadata={"shared": {"session": {"id": "ses_x"}, "model": {"providerID": "p"}}},
        extensions=["x"],
        referenceTaskIds=["y"],
    )
    params["configuration"] = {"acceptedOutputModes": ["text/plain"], "historyLength": 1}
    params["metadata"] = {"opencode": {"directory": "d", "workspace": {"id": "w"}}}
    sent = list(mutations(params))

    for some in batched(sent, 25):
        answers = await asyncio.gather(*(caller.ask("send", changed) for changed in some))
        for changed, answer in zip(some, answers, strict=True):
            assert answer.status < 500, (changed, answer.content)
            assert code_of(answer) in (-32602, -32001, -32004, -32005, 400, 404, None), changed
            assert b"Traceback" not in answer.content


def batched(items: list[Any], size: int) -> Iterator[list[Any]]:
    for start in range(0, len(items), size):
        yield items[start : start + size]


def code_of(answer: Answer) -> int | None:
    body = answer.body
    error = body.get("error", body if "code" in body else {})
    return error.get("code")


@pytest.mark.requirement("I9")
async def test_no_odd_id_is_a_failure_of_ours(caller: Caller) -> None:
    operations = ("get", "cancel", "subscribe")
    odd: list[Json] = [one for one in ODD if caller.wire.rpc or isinstance(one, str)]
    if not caller.wire.rpc:
        odd = ["%00", "%2e%2e%2f", "a%0d%0ab", "x" * 300, "%ff%fe", "é😀"]

    for operation in operations:
        for one in odd:
            answer = await caller.ask(operation, {"id": one})
            assert answer.status < 500
            assert code_of(answer) in (-32601, -32602, -32001, 400, 404)


# --- what is not offered, not taken ------------------------------------------------------------


@pytest.mark.requirement("3.1.7-push-unsupported")
async def test_push_configuration_can_be_switched_off(serve: Serve, opencode: FakeOpenCode) -> None:
    service = await serve(A2A_PUSH_ENABLED="false")
    config: JsonObject = {"url": "https://example.org"}

    for caller in (Caller(service, wire) for wire in Wire):
        field = "taskPushNotificationConfig" if caller.wire.modern else "pushNotificationConfig"
        params: JsonObject = {"id": "any", "taskId": "any"}
        params |= config if caller.wire.modern else {"pushNotificationConfig": config}
        for operation in ("push create", "push get", "push list", "push delete"):
            (await caller.ask(operation, params)).refuses(PUSH)
        sent = caller.message("hello") | {"configuration": {field: config}}
        for operation in ("send", "stream"):
            (await caller.ask(operation, sent)).refuses(PUSH)
    assert opencode.prompts == []


@pytest.mark.requirement("3.1.1-content-type")
@pytest.mark.parametrize("media_type", ["application/zip", "audio/mpeg", "video/mp4", "image/tiff"])
async def test_a_media_type_that_the_agent_does_not_take_is_refused(
    caller: Caller, opencode: FakeOpenCode, media_type: str
) -> None:
    part = caller.file("AAECAw==", media_type)

    for operation in ("send", "stream"):
        answer = await caller.ask(operation, caller.message("look", part))
        assert answer.refuses(CONTENT_TYPE) == ["message.parts[1]"]
    assert opencode.prompts == []


@MODERN
@pytest.mark.requirement("3.1.1-content-type")
@pytest.mark.parametrize(
    "part",
    [
        {"text": "hello", "mediaType": "image/png"},
        {"text": "hello", "mediaType": "nonsense"},
        {"data": {"a": 1}, "mediaType": "image/png"},
        {"data": {"a": 1}, "mediaType": "text/plain"},
    ],
)
async def test_text_and_data_of_another_media_type_are_refused(
    caller: Caller, opencode: FakeOpenCode, part: Json
) -> None:
    for operation in ("send", "stream"):
        answer = await caller.ask(operation, caller.message("look", part))
        assert answer.refuses(CONTENT_TYPE) == ["message.parts[1]"]
    assert opencode.prompts == []


@MODERN
@pytest.mark.requirement("3.1.1-content-type")
async def test_text_and_data_may_say_what_they_are(caller: Caller, opencode: FakeOpenCode) -> None:
    parts: list[Json] = [
        {"text": "# hello", "mediaType": "text/markdown; charset=utf-8"},
        {"text": "{}", "mediaType": "application/json"},
        {"text": "<p/>", "mediaType": "Text/HTML"},
        {"data": {"a": 1}, "mediaType": "application/json"},
        {"data": {"a": 1}, "mediaType": "application/vnd.example+json"},
        {"text": "plain", "mediaType": ""},
    ]

    answer = await caller.ask("send", caller.message(*parts))

    assert answer.task["status"]["state"] == "TASK_STATE_COMPLETED"


@pytest.mark.requirement("ours-no-file-urls")
@pytest.mark.requirement("I11")
@pytest.mark.parametrize(
    "url",
    [
        "file:///etc/passwd",
        "FILE:/etc/passwd",
        "ftp://example.org/a",
        "data:text/plain;base64,aGk=",
        "/etc/passwd",
        "http://127.0.0.1:1/a",
        "http://localhost/a",
        "http://[::1]/a",
        "http://169.254.169.254/latest",
        "http://10.0.0.1/a",
        "http://user:secret@10.0.0.1/a",
        "http://[",
    ],
)
async def test_urls_that_must_not_be_read_are_refused(
    caller: Caller, opencode: FakeOpenCode, url: str
) -> None:
    part = caller.file(url, "text/plain", url=True)

    answer = await caller.ask("send", caller.message("look", part))

    expected = PARAMS if url.startswith("http:") else CONTENT_TYPE
    assert answer.refuses(expected) == ["message.parts[1]"]
    assert b"secret" not in answer.content
    assert opencode.prompts == []


@pytest.mark.requirement("ours-text-is-required")
@pytest.mark.parametrize("modes", [["image/png"], ["audio/*", "video/mp4"], ["text/html"]])
async def test_output_modes_that_the_agent_has_none_of_are_refused(
    caller: Caller, modes: Json
) -> None:
    params = caller.message("hello") | {"configuration": {"acceptedOutputModes": modes}}

    (await caller.ask("send", params)).refuses(UNSUPPORTED)


@pytest.mark.requirement("ours-request-metadata")
@pytest.mark.parametrize(
    ("metadata", "field"),
    [
        ({"shared": {"model": {"providerID": "p"}}}, "metadata.shared.model.modelID"),
        ({"shared": {"model": {"modelID": "m"}}}, "metadata.shared.model.providerID"),
        ({"shared": "x"}, "metadata.shared"),
        ({"shared": {"session": {"id": 5}}}, "metadata.shared.session.id"),
        ({"shared": {"session": {"id": "../config"}}}, "metadata.shared.session.id"),
        ({"shared": {"session": {"id": "ses_unknown"}}}, "metadata.shared.session.id"),
        ({"opencode": {"directory": "/etc"}}, "metadata.opencode.directory"),
        ({"opencode": {"directory": "../.."}}, "metadata.opencode.directory"),
        ({"opencode": {"workspace": {"id": "x?y"}}}, "metadata.opencode.workspace.id"),
    ],
)
async def test_wrong_metadata_is_refused_before_it_is_a_task(
    caller: Caller, opencode: FakeOpenCode, metadata: Json, field: str
) -> None:
    params = caller.message("hello") | {"metadata": metadata}

    answer = await caller.ask("send", params)

    assert answer.refuses(PARAMS) == [field]
    assert opencode.prompts == []
