"""JSON from strangers is read exactly, or refused with the exact reason."""

import json

import orjson
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from opencode_a2a.errors import ParseError
from opencode_a2a.events import Json
from opencode_a2a.jsonguard import MAX_DEPTH, decode, showable, whole_characters

INTEGERS = st.integers(-(2**63), 2**64 - 1)
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
SCALARS = st.none() | st.booleans() | INTEGERS | st.floats(allow_nan=False, allow_infinity=False)
VALUES = st.recursive(
    SCALARS | TEXT,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXT, inner, max_size=4),
    max_leaves=30,
)


@pytest.mark.requirement("I9")
@given(VALUES, st.booleans())
@example({"a:b": [":", {"\\": '":'}]}, True)
@example({"n": 2**64 - 1, "m": -(2**63)}, False)
def test_every_honest_document_is_read_as_it_is(value: Json, ascii_only: bool) -> None:
    assert decode(json.dumps(value, ensure_ascii=ascii_only).encode()) == value


@pytest.mark.requirement("I9")
@given(st.binary(max_size=64))
def test_any_bytes_are_read_or_refused_with_a_parse_error(body: bytes) -> None:
    try:
        value = decode(body)
    except ParseError:
        return
    assert orjson.loads(body) == value


@given(VALUES, TEXT, VALUES, st.integers(0, 15))
@example(1, ":", 2, 0)
@example({"b": 1}, "a", [], 3)
def test_a_repeated_key_is_found_at_any_depth(
    first: Json, key: str, second: Json, depth: int
) -> None:
    name = json.dumps(key)
    pair = f"{{{name}: {json.dumps(first)}, {name}: {json.dumps(second)}}}"
    body = '{"x":[' * depth + pair + "]}" * depth

    assert _problem(body.encode()) == "duplicate_key"


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        (b"", "empty"),
        (b" \n", "empty"),
        (b"{", "syntax"),
        (b"{'a': 1}", "syntax"),
        (b'{"a": 1} x', "syntax"),
        (b'"\\ud800"', "encoding"),
        (b"\xff", "encoding"),
        (b'{"a": "\xc3\x28"}', "encoding"),
        (b"\xef\xbb\xbf{}", "encoding"),
        (b'{"a": NaN}', "number"),
        (b'{"\xc3\xa4": -Infinity}', "number"),
        (b"[Infinity]", "number"),
        (b"1e999", "number_range"),
        (b"1" + b"0" * 5000, "number_range"),
        (b"18446744073709551616", "integer_range"),
        (b'{"a": -9223372036854775809}', "integer_range"),
        (b"1" + b"0" * 100, "integer_range"),
        (b'{"a": 1, "a": 2}', "duplicate_key"),
        (b'{"a": 1, "\\u0061": 2}', "duplicate_key"),
        (b'{"a": "\\u003a", "a": "x"}', "duplicate_key"),
        (b'{"a": "\\u003a:", "a": "\\u003A"}', "duplicate_key"),
        (b"[" * 65 + b"]" * 65, "depth"),
        (b'{"a":' * 65 + b"1" + b"}" * 65, "depth"),
        (b"[" * 100_000, "depth"),
        (b"[" * 100_000 + b"]" * 100_000, "depth"),
    ],
)
def test_what_is_wrong_is_named(body: bytes, problem: str) -> None:
    assert _problem(body) == problem


def test_brackets_in_texts_and_beside_each_other_do_not_count_as_depth() -> None:
    flat: Json = {"text": "[" * 200 + '\\"{', "list": [[] for _ in range(200)]}

    assert decode(json.dumps(flat).encode()) == flat
    assert decode(b"[" * MAX_DEPTH + b"]" * MAX_DEPTH)
    text = "{" * 200
    assert decode(json.dumps(text).encode()) == showable(text) == text


def test_long_digits_inside_texts_and_fractions_are_left_alone() -> None:
    value = {"id": "123456789012345678901234567890", "pi": 3.141592653589793}

    assert decode(json.dumps(value).encode()) == value


def _problem(body: bytes) -> object:
    with pytest.raises(ParseError) as caught:
        decode(body)
    return caught.value.data["problem"]


@pytest.mark.parametrize("half", [r'"\ud83d"', r'"\ude00"', r'["a", {"b": "x\uD83Dy"}]'])
def test_half_a_character_is_refused_by_that_name(half: str) -> None:
    with pytest.raises(ParseError, match="half a character"):
        decode(half.encode())


@given(st.text(st.characters(), max_size=40))
@example("\\\ud83d")
@example("\\\\\ud83d\ude00\ude00\ud83d")
@example('"\ud83d"\n\ude00')
def test_halves_of_characters_are_replaced_and_all_else_stays(text: str) -> None:
    whole = text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")

    assert decode(whole_characters(json.dumps([text]).encode())) == [whole]
