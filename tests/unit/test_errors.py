"""Errors as bodies, read back as the SDK's clients read them."""

import ast
from pathlib import Path
from typing import cast

import orjson
import pytest
from a2a.client.transports.rest import _parse_rest_error  # pyright: ignore[reportPrivateUsage]  # the very code that reads our errors
from a2a.utils.errors import (
    A2A_ERROR_MAPPING,
    A2A_REASON_TO_ERROR,
    JSON_RPC_ERROR_CODE_MAP,
)
from google.protobuf.json_format import ParseDict
from google.rpc import error_details_pb2  # pyright: ignore[reportMissingTypeStubs]  # it has none

from opencode_a2a import errors
from opencode_a2a.a2a.errors import rest_error, rest_error_frame, rpc_error, rpc_error_frame
from opencode_a2a.a2a.types import Version
from opencode_a2a.errors import InvalidParamsError, ServiceError, TaskNotFoundError, Violation
from opencode_a2a.events import Json, JsonObject

SOURCE = Path(__file__).parents[2] / "src" / "opencode_a2a"
ALL = [
    kind
    for kind in vars(errors).values()
    if isinstance(kind, type) and issubclass(kind, ServiceError)
]
BAD = InvalidParamsError(
    "Two fields are wrong",
    violations=(Violation("b", "is required"), Violation("a.x", "must be a string")),
    max_size=5,
    known=["x", "y"],
)


@pytest.mark.parametrize("kind", ALL, ids=lambda kind: kind.__name__)
def test_every_error_has_all_four_shapes(kind: type[ServiceError]) -> None:
    error = kind()

    modern = cast(JsonObject, rpc_error(error, 7, Version.V1)["error"])
    rest = cast(JsonObject, rest_error(error, Version.V1)["error"])
    old = cast(JsonObject, rpc_error(error, 7, Version.V03)["error"])
    flat = rest_error(error, Version.V03)

    details = cast(list[JsonObject], modern["data"])
    assert details == rest["details"]
    info = {name: value for name, value in details[0].items() if name != "@type"}
    parsed = ParseDict(info, error_details_pb2.ErrorInfo())
    domain = "a2a-protocol.org" if kind.reason in A2A_REASON_TO_ERROR else "opencode-a2a"
    assert (parsed.reason, parsed.domain) == (kind.reason, domain)
    assert (modern["code"], modern["message"]) == (kind.code, error.message)
    assert (rest["code"], rest["status"]) == (kind.http, kind.status)
    assert cast(JsonObject, old["data"])["type"] == kind.reason
    assert flat["message"] == error.message
    assert flat["code"] == old["code"]


def test_numbers_and_statuses_are_those_of_the_specification() -> None:
    ours = {kind.code: kind for kind in ALL}
    for sdk, code in JSON_RPC_ERROR_CODE_MAP.items():
        # Nothing here answers for an agent, nothing is required, and the extended card is there.
        if code in (-32006, -32007, -32008) or sdk not in A2A_ERROR_MAPPING:
            continue
        expected = A2A_ERROR_MAPPING[sdk]
        kinds = [kind for kind in ALL if kind.code == code]
        assert code in ours
        assert expected.http_code in {kind.http for kind in kinds}
        assert expected.grpc_status in {kind.status for kind in kinds}


def test_the_rest_client_of_the_sdk_knows_our_errors() -> None:
    for kind in (TaskNotFoundError, errors.PushNotSupportedError, errors.VersionNotSupportedError):
        parsed = _parse_rest_error(rest_error(kind("no"), Version.V1), "")

        assert parsed is not None
        assert JSON_RPC_ERROR_CODE_MAP[type(parsed)] == kind.code  # type: ignore[index]  # pyright: ignore[reportArgumentType]  # it is one of them


def test_the_rest_client_of_0_3_finds_the_names_it_knows() -> None:
    names = {kind.__name__ for kind in JSON_RPC_ERROR_CODE_MAP}

    for kind in (TaskNotFoundError, errors.PushNotSupportedError, errors.ParseError):
        assert rest_error(kind(), Version.V03)["type"] in names


@pytest.mark.requirement("A2A-3.3.2")
def test_wrong_fields_are_listed_in_every_shape() -> None:
    listed: list[Json] = [
        {"field": "b", "description": "is required"},
        {"field": "a.x", "description": "must be a string"},
    ]

    assert cast(JsonObject, rpc_error(BAD, "r", Version.V1)["error"])["data"] == [
        {
            "@type": "type.googleapis.com/google.rpc.ErrorInfo",
            "reason": "INVALID_PARAMS",
            "domain": "a2a-protocol.org",
            "metadata": {"maxSize": "5", "known": "x, y"},
        },
        {"@type": "type.googleapis.com/google.rpc.BadRequest", "fieldViolations": listed},
    ]
    assert rest_error(BAD, Version.V03) == {
        "code": -32602,
        "type": "InvalidParamsError",
        "message": "Two fields are wrong",
        "data": {
            "type": "INVALID_PARAMS",
            "max_size": 5,
            "known": ["x", "y"],
            "field": "b",
            "fields": ["a.x", "b"],
            "violations": listed,
        },
    }


def test_a_store_failure_is_stable_and_says_what_was_being_done() -> None:
    error = errors.StoreUnavailableError(
        "Task store unavailable while loading task state", operation="loading"
    )

    body = cast(JsonObject, rpc_error(error, 1, Version.V03)["error"])

    assert body["data"] == {"type": "TASK_STORE_UNAVAILABLE", "operation": "loading"}
    assert (body["code"], error.http) == (-32603, 503)


def test_an_error_in_a_stream_is_an_event_of_its_own() -> None:
    for frame, body in (
        (rpc_error_frame(BAD, 1, Version.V1), rpc_error(BAD, 1, Version.V1)),
        (rest_error_frame(BAD, Version.V03), rest_error(BAD, Version.V03)),
    ):
        event, data, *rest = frame.split(b"\n")
        assert event == b"event: error"
        assert orjson.loads(data.removeprefix(b"data: ")) == body
        assert rest == [b"", b""]


def test_errors_carry_no_data_but_what_they_declare() -> None:
    kinds = {name: kind for name, kind in vars(errors).items() if isinstance(kind, type)}
    undeclared = [
        f"{path.name}:{node.lineno} {node.func.id} {keyword.arg}"
        for path in SOURCE.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and issubclass(kind := kinds.get(node.func.id, object), errors.ServiceError)
        for keyword in node.keywords
        if keyword.arg not in (None, "violations", "detail", *kind.data_fields)
    ]

    assert undeclared == []
