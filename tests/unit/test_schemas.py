"""Schemas that callers want an answer by."""

import time
from typing import Any

import pytest

from opencode_a2a.schemas import MAX_BYTES, SchemaError, check_schema, mismatches

PERSON: dict[str, Any] = {
    "type": "object",
    "properties": {"name": {"type": "string", "pattern": "^[A-Z]"}, "age": {"$ref": "#/$defs/age"}},
    "required": ["name"],
    "additionalProperties": False,
    "$defs": {"age": {"type": "integer", "minimum": 0}},
}


def test_an_answer_that_fits_has_nothing_wrong() -> None:
    check_schema(PERSON)

    assert mismatches(PERSON, {"name": "Ann", "age": 3}) == []


def test_what_is_wrong_is_told_with_its_place_in_the_validators_words() -> None:
    assert mismatches(PERSON, {"name": 5, "age": -1}) == [
        'name: 5 is not of type "string"',
        "age: -1 is less than the minimum of 0",
    ]
    assert mismatches(PERSON, "Ann") == ['"Ann" is not of type "object"']


def nested(depth: int) -> dict[str, Any]:
    inner: dict[str, Any] = {"type": "string"}
    for _ in range(depth):
        inner = {"type": "object", "properties": {"a": inner}}
    return inner


def doubling(levels: int) -> dict[str, Any]:
    """A small schema that stands for two to the power of the levels."""
    twice = {
        f"d{n}": {"allOf": [{"$ref": f"#/$defs/d{n + 1}"}, {"$ref": f"#/$defs/d{n + 1}"}]}
        for n in range(levels)
    }
    ends = {f"d{levels}": {"type": "object"}}
    return {"type": "object", "$ref": "#/$defs/d0", "$defs": {**twice, **ends}}


@pytest.mark.parametrize(
    ("schema", "path"),
    [
        ({"type": "array"}, ("type",)),
        ({}, ("type",)),
        ({"type": "object", "properties": {"a": {"type": "strin"}}}, ("properties", "a", "type")),
        ({"type": "object", "properties": {"a": {"pattern": "("}}}, ("properties", "a", "pattern")),
        # Patterns with look-around, or with references back, can take for ever.
        (
            {"type": "object", "properties": {"a": {"pattern": "(?=a)a"}}},
            ("properties", "a", "pattern"),
        ),
        ({"type": "object", "$ref": "https://example.org/s.json"}, ("$ref",)),
        ({"type": "object", "$ref": "#/$defs/none"}, ("$ref",)),
        *(
            ({"type": "object", "allOf": [{"$ref": f"#/allOf/{number}"}]}, ("allOf", 0, "$ref"))
            for number in ("1", "²", "9" * 5000)
        ),
        ({"type": "object", "properties": {"a": {"$ref": "#"}}}, ("properties", "a", "$ref")),
        ({"type": "object", "$dynamicRef": "#a"}, ("$dynamicRef",)),
        ({"type": "object", "description": "x" * MAX_BYTES}, ()),
        (nested(40), ("properties", "a") * 28),
    ],
)
def test_a_schema_that_cannot_be_used_is_refused_with_the_place(
    schema: dict[str, Any], path: tuple[str | int, ...]
) -> None:
    with pytest.raises(SchemaError) as refused:
        check_schema(schema)

    assert refused.value.path[: len(path)] == path


@pytest.mark.parametrize("levels", [20, 25])
def test_a_schema_that_stands_for_too_much_is_refused_at_once(levels: int) -> None:
    began = time.process_time()

    with pytest.raises(SchemaError, match="must not"):
        check_schema(doubling(levels))

    assert time.process_time() - began < 5


def test_a_pattern_is_matched_in_linear_time() -> None:
    schema: dict[str, Any] = {"type": "object", "properties": {"a": {"pattern": "^(a+)+$"}}}
    check_schema(schema)

    assert mismatches(schema, {"a": "a" * 5000 + "!"})
