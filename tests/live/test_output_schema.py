"""Answers by schema, from a real OpenCode."""

from typing import Any

import pytest

from opencode_a2a.events import JsonObject
from tests.live.conftest import two_wires
from tests.support.answers import Wire
from tests.support.backstage import script
from tests.support.caller import Caller
from tests.support.service import Running

pytestmark = pytest.mark.live

SCHEMA: JsonObject = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
SHARED: JsonObject = {"shared": {"output": {"schema": SCHEMA}}}
FORMAT: JsonObject = {"opencode": {"format": {"type": "json_schema", "schema": SCHEMA}}}
ANN: JsonObject = {"name": "Ann", "age": 3}


def giving(answer: Any) -> str:
    return script([{"say": "Let me see."}, {"tool": "StructuredOutput", "input": answer}])


def last_data(raw: Any) -> Any:
    artifact = raw["artifacts"][-1]
    assert artifact["name"] == "result"
    (part,) = artifact["parts"]
    data = part["data"]
    return data.get("data", data) if part.get("kind") is None and "name" not in data else data


@two_wires
@pytest.mark.parametrize("metadata", [SHARED, FORMAT], ids=["shared", "opencode"])
async def test_the_answer_is_data_that_fits_the_schema(
    service: Running, wire: Wire, metadata: JsonObject
) -> None:
    caller = Caller(service, wire)

    task = await caller.send(giving(ANN), metadata=metadata)

    assert task.state == "completed"
    assert last_data(task.raw) == ANN
    names = [artifact["name"] for artifact in task.raw["artifacts"]]
    assert "StructuredOutput" not in names
    assert task.said == '{"name":"Ann","age":3}'
    assert last_data((await caller.get(task.id)).raw) == ANN


@two_wires
async def test_a_stream_ends_with_the_data(service: Running, wire: Wire) -> None:
    async with Caller(service, wire).stream(giving(ANN), metadata=SHARED) as following:
        await following.rest()

    assert following.task.state == "completed"
    assert last_data(following.task.raw) == ANN


async def test_an_answer_that_does_not_fit_fails_with_the_validators_words(
    caller: Caller,
) -> None:
    task = await caller.send(giving({"name": "Ann", "age": "three"}), metadata=SHARED)

    assert (task.state, task.error_type) == ("failed", "UPSTREAM_STRUCTURED_OUTPUT")
    assert 'age: "three" is not of type "integer"' in task.said


async def test_an_answer_in_words_alone_fails(caller: Caller) -> None:
    task = await caller.send(script({"say": "just words"}), metadata=SHARED)

    assert (task.state, task.error_type) == ("failed", "UPSTREAM_STRUCTURED_OUTPUT")


async def test_a_reader_gets_an_answer_by_schema(caller: Caller) -> None:
    metadata: JsonObject = {**SHARED, "opencode": {"profile": "read-only"}}

    task = await caller.send(giving(ANN), metadata=metadata)

    assert (task.state, last_data(task.raw)) == ("completed", ANN)


@pytest.mark.parametrize(
    ("metadata", "field"),
    [
        ({"shared": {"output": {"schema": "x"}}}, "metadata.shared.output.schema"),
        (
            {"shared": {"output": {"schema": {"type": "array"}}}},
            "metadata.shared.output.schema.type",
        ),
        (
            {"opencode": {"format": {"type": "json_schema"}}},
            "metadata.opencode.format.schema",
        ),
        ({"opencode": {"format": {"type": "xml"}}}, "metadata.opencode.format.type"),
    ],
)
async def test_a_schema_that_cannot_be_used_is_refused_at_once(
    caller: Caller, metadata: JsonObject, field: str
) -> None:
    params = {**caller.message("hello"), "metadata": metadata}

    refused = await caller.refused("SendMessage", params)

    assert refused.fields == (field,)
