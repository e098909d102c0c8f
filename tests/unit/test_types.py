"""Params of both versions, as values or as a list of everything that is wrong."""

import base64
from collections.abc import Mapping
from typing import cast

import pytest
from a2a.compat.v0_3 import a2a_v0_3_pb2, conversions, proto_utils
from a2a.types import Message as SdkMessage
from a2a.types import Part as SdkPart
from a2a.types import Role, SendMessageConfiguration, SendMessageRequest
from google.protobuf.json_format import MessageToDict
from hypothesis import given
from hypothesis import strategies as st

from opencode_a2a.a2a.encoding import V03, V03_PROTO, V1, Encoding
from opencode_a2a.a2a.types import SendRequest, TaskParams, check, read_push_ref
from opencode_a2a.a2a.v03 import Spelling, rest_spelling
from opencode_a2a.errors import InvalidParamsError
from opencode_a2a.events import Json, JsonObject
from opencode_a2a.log.state import Query, State
from opencode_a2a.messages import Message, Part, PushConfig

BIG = 2**53 + 1
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


def message(**fields: Json) -> JsonObject:
    return {"messageId": "m1", "role": "ROLE_USER", "parts": [{"text": "hi"}], **fields}


def message03(**fields: Json) -> JsonObject:
    whole: JsonObject = {"messageId": "m1", "role": "user", "kind": "message"}
    return {**whole, "parts": [{"kind": "text", "text": "hi"}], **fields}


def read_send(form: Encoding, params: JsonObject) -> SendRequest:
    sent = form.read[SendRequest](params)
    assert isinstance(sent, SendRequest)
    return sent


def read_list(form: Encoding, params: JsonObject) -> Query:
    listing = form.read[Query](params)
    assert isinstance(listing, Query)
    return listing


def wrong(params: JsonObject, form: Encoding = V1) -> dict[str, str]:
    with pytest.raises(InvalidParamsError) as refused:
        read_send(form, params)
    return {v.field: v.description for v in refused.value.violations}


def test_a_message_of_1_0_is_read_in_either_case_of_names() -> None:
    sent = read_send(
        V1,
        {
            "message": {
                "message_id": "m1",
                "task_id": "t1",
                "contextId": "c1",
                "role": "ROLE_USER",
                "parts": [{"text": "hi", "unknown": 1}],
                "reference_task_ids": ["t0"],
            },
            "configuration": {"return_immediately": True, "historyLength": 2},
            "unknown": {},
        },
    )

    assert sent.message == Message("m1", "user", [Part("text", "hi")], reference_task_ids=["t0"])
    assert (sent.task_id, sent.context_id) == ("t1", "c1")
    assert (sent.blocking, sent.history_length, sent.push) == (False, 2, None)


@given(JSON, st.dictionaries(st.text(), JSON, max_size=3))
def test_data_and_metadata_are_kept_as_they_came(data: Json, metadata: JsonObject) -> None:
    part: JsonObject = {"data": data, "metadata": metadata}
    sent = read_send(V1, {"message": message(parts=[part]), "metadata": metadata})

    assert sent.message.parts == [Part("data", data=data, metadata=metadata)]
    assert sent.metadata == metadata
    assert repr(sent.message.parts[0].data) == repr(data)


@given(st.binary(), st.booleans())
def test_bytes_are_taken_in_both_alphabets_of_base64(data: bytes, padded: bool) -> None:
    text = base64.urlsafe_b64encode(data).decode()
    part: JsonObject = {"raw": text if padded else text.rstrip("="), "mediaType": "image/png"}

    sent = read_send(V1, {"message": message(parts=[part])})

    raw = base64.b64encode(data).decode()
    assert sent.message.parts == [Part("raw", raw=raw, media_type="image/png")]


def test_every_violation_is_told_at_once_by_its_path() -> None:
    assert wrong(
        {
            "message": {
                "messageId": "",
                "role": "ROLE_AGENT",
                "parts": [{}, {"raw": "!"}, {"text": 1}, {"text": "a", "url": "b"}],
            },
            "configuration": {"historyLength": -1, "returnImmediately": "yes"},
            "metadata": [],
        }
    ) == {
        "message.messageId": "must not be empty",
        "message.role": "must be ROLE_USER: a caller cannot speak for the agent",
        "message.parts[0]": "must have exactly one of text, raw, url and data",
        "message.parts[1].raw": "is not base64",
        "message.parts[2].text": "must be a string",
        "message.parts[3]": "must have exactly one of text, raw, url and data, not text and url",
        "configuration.historyLength": "must be from 0 to 2147483647",
        "configuration.returnImmediately": "must be true or false",
        "metadata": "must be an object",
    }


MIXED_UP: list[tuple[JsonObject, Encoding, set[str]]] = [
    ({}, V1, {"message"}),
    ({"message": message(parts=[])}, V1, {"message.parts"}),
    ({"message": message(role="ROLE_BOSS")}, V1, {"message.role"}),
    ({"message": message(messageId="x" * 257)}, V1, {"message.messageId"}),
    ({"message": message(taskId="a\nb")}, V1, {"message.taskId"}),
    ({"message": message03()}, V1, {"message.role", "message.parts[0].kind"}),
    (
        {"message": message(parts=[{"file": {"uri": "http://x"}}])},
        V1,
        {"message.parts[0].file"},
    ),
    (
        {"message": message(content=[{"text": "hi"}])},
        V1,
        {"message.content"},
    ),
    (
        {"message": message(), "configuration": {"blocking": True}},
        V1,
        {"configuration.blocking"},
    ),
    (
        {"jsonrpc": "2.0", "id": 1, "method": "SendMessage", "params": {}},
        V1,
        {"jsonrpc", "method", "params", "message"},
    ),
    ({"message": message()}, V03, {"message.role", "message.parts[0].kind"}),
    (
        {"message": message03(parts=[{"kind": "file"}, {"kind": "video"}])},
        V03,
        {"message.parts[0].file", "message.parts[1].kind"},
    ),
    (
        {"message": message03(parts=[{"kind": "file", "file": {"bytes": "AA", "uri": "x"}}])},
        V03,
        {"message.parts[0].file"},
    ),
    (
        {"message": message03(), "configuration": {"returnImmediately": True}},
        V03,
        {"configuration.returnImmediately"},
    ),
    (
        {"message": {"messageId": "m", "role": "ROLE_USER", "content": [{}]}},
        V03_PROTO,
        {"message.content[0]"},
    ),
]


@pytest.mark.parametrize(("params", "form", "fields"), MIXED_UP)
def test_wrong_and_mixed_up_shapes_are_named_by_field(
    params: JsonObject, form: Encoding, fields: set[str]
) -> None:
    assert set(wrong(params, form)) == fields


def test_a_message_of_0_3_means_the_same_as_one_of_1_0() -> None:
    sent = read_send(
        V03,
        {
            "message": message03(
                parts=[
                    {"kind": "text", "text": "hi"},
                    {"kind": "file", "file": {"bytes": "QUJD", "mimeType": "text/plain"}},
                    {"kind": "file", "file": {"uri": "https://x/y", "name": "y"}},
                    {"kind": "data", "data": {"n": BIG}},
                ]
            ),
            "configuration": {"blocking": False, "pushNotificationConfig": {"url": "https://x"}},
        },
    )

    assert sent.message.parts == [
        Part("text", "hi"),
        Part("raw", raw="QUJD", media_type="text/plain"),
        Part("url", url="https://x/y", filename="y"),
        Part("data", data={"n": BIG}),
    ]
    within = "configuration.pushNotificationConfig."
    assert sent.push == PushConfig("https://x", version="0.3", within=within)
    assert sent.blocking is False


@pytest.mark.parametrize("return_immediately", [True, False])
@pytest.mark.parametrize("rest", [True, False])
def test_what_the_sdk_client_of_0_3_sends_is_understood(
    return_immediately: bool, rest: bool
) -> None:
    request = SendMessageRequest(
        message=SdkMessage(
            message_id="m1",
            context_id="c1",
            role=Role.ROLE_USER,
            parts=[
                SdkPart(text="hi"),
                SdkPart(raw=b"ABC", media_type="image/png", filename="a.png"),
                SdkPart(url="https://x/y"),
            ],
        ),
        configuration=SendMessageConfiguration(
            accepted_output_modes=["text/plain"], return_immediately=return_immediately
        ),
    )
    compat = conversions.to_compat_send_message_request(request, request_id=1)
    if rest:
        proto = a2a_v0_3_pb2.SendMessageRequest(
            request=proto_utils.ToProto.message(compat.params.message),
            configuration=proto_utils.ToProto.message_send_configuration(
                compat.params.configuration
            ),
        )
        params = cast(JsonObject, MessageToDict(proto, preserving_proto_field_name=True))
    else:
        params = cast(JsonObject, compat.params.model_dump(mode="json", exclude_none=True))
    spelling = rest_spelling(params)

    sent = read_send(V03_PROTO if rest else V03, params)

    assert spelling is (Spelling.PROTO if rest else Spelling.JSON)
    assert sent.message.parts == [
        Part("text", "hi"),
        Part("raw", raw="QUJD", media_type="image/png", filename="a.png"),
        Part("url", url="https://x/y"),
    ]
    assert sent.context_id == "c1"
    assert sent.blocking is not return_immediately
    assert sent.accepted_output_modes == ("text/plain",)


@pytest.mark.parametrize("content", [b"test", b"abcd1234", bytes(range(256)), "grüße".encode()])
def test_bytes_that_are_base64_once_are_not_decoded_twice(content: bytes) -> None:
    raw = base64.b64encode(content).decode()
    file: JsonObject = {"file": {"fileWithBytes": raw, "mimeType": "text/plain"}}
    proto: JsonObject = {"messageId": "m", "role": "ROLE_USER", "content": [file]}

    sent = read_send(V03_PROTO, {"message": proto})

    assert sent.message.parts == [Part("raw", raw=raw, media_type="text/plain")]


def test_what_the_sdk_client_of_1_0_sends_is_understood() -> None:
    request = SendMessageRequest(
        message=SdkMessage(message_id="m1", role=Role.ROLE_USER, parts=[SdkPart(text="hi")])
    )
    for keep in (True, False):
        params = cast(JsonObject, MessageToDict(request, preserving_proto_field_name=keep))
        assert read_send(V1, params).message == Message("m1", "user", [Part("text", "hi")])


def test_the_body_of_a_0_3_rest_request_tells_its_spelling() -> None:
    assert rest_spelling({"message": message03()}) is Spelling.JSON
    assert rest_spelling({"message": {"content": []}}) is Spelling.PROTO
    assert rest_spelling({"request": {"content": []}}) is Spelling.PROTO
    assert rest_spelling({}) is Spelling.PROTO


def test_unset_blocking_means_what_the_spelling_says() -> None:
    proto: JsonObject = {"messageId": "m", "role": "ROLE_USER", "content": [{"text": "x"}]}

    assert read_send(V03, {"message": message03(), "configuration": {}}).blocking
    assert read_send(V03_PROTO, {"message": proto}).blocking
    assert not read_send(V03_PROTO, {"message": proto, "configuration": {}}).blocking


def test_filters_of_a_list_are_read_from_json_and_from_query_parameters() -> None:
    listing = read_list(
        V1,
        {
            "pageSize": "100",
            "status": "TASK_STATE_INPUT_REQUIRED",
            "statusTimestampAfter": "1970-01-01T00:00:01.0001Z",
            "historyLength": "3",
            "includeArtifacts": True,
            "contextId": "",
        },
    )

    assert listing.history_length == 3
    assert (listing.size, listing.state) == (100, State.INPUT_REQUIRED)
    assert listing.since == 1001
    assert listing.artifacts
    assert listing.context_id is None


@pytest.mark.parametrize(
    "status", ["input-required", "INPUT_REQUIRED", "TASK_STATE_INPUT_REQUIRED"]
)
def test_the_list_of_0_3_takes_states_in_every_spelling(status: str) -> None:
    listing = read_list(V03_PROTO, {"status": status})

    assert listing.state is State.INPUT_REQUIRED


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("pageSize", 0),
        ("pageSize", 101),
        ("pageSize", "ten"),
        ("status", "TASK_STATE_RUNNING"),
        ("status", "working"),
        ("historyLength", -1),
        ("statusTimestampAfter", "yesterday"),
        ("statusTimestampAfter", "2026-11-15T09:00:00"),
        ("statusTimestampAfter", 5),
        ("includeArtifacts", "1"),
    ],
)
@pytest.mark.requirement("A2A-3.1.4")
def test_a_wrong_filter_is_refused_by_name(field: str, value: Json) -> None:
    with pytest.raises(InvalidParamsError) as refused:
        read_list(V1, {field: value})

    assert [violation.field for violation in refused.value.violations] == [field]


def test_a_task_is_asked_for_by_an_id() -> None:
    assert check(TaskParams, {"id": "t1", "historyLength": 0}).history_length == 0
    for params in cast(list[Mapping[str, Json]], [{}, {"id": ""}, {"id": 5}]):
        with pytest.raises(InvalidParamsError):
            check(TaskParams, dict(params))


def test_an_empty_id_of_a_push_configuration_is_refused_by_name() -> None:
    with pytest.raises(InvalidParamsError) as caught:
        read_push_ref({"taskId": "task", "id": ""})

    assert [one.field for one in caught.value.violations] == ["id"]
