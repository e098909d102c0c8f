"""Decodes JSON that comes from outside.

Request bodies and the cards of other agents are decoded here. Beyond what JSON forbids, this
refuses documents that two readers could understand differently (a repeated key, an integer that
does not fit into 64 bits) and documents nested deeper than any honest one.

The common case costs one parse, one encoding and a few scans at the speed of C: about 5 µs
for a body of 1 kB. Only if a scan finds something suspicious is the document parsed again.
"""

import json
import re
from collections.abc import Sequence
from dataclasses import fields, is_dataclass
from itertools import accumulate
from typing import Any, NoReturn, cast

import orjson
from pydantic_core import from_json

from opencode_a2a.errors import ParseError
from opencode_a2a.events import Json, JsonObject

MAX_DEPTH = 64
SHOWN_DEPTH = 40
"""How deep a value may be that a model chose. The SDK's decoder (protobuf) gives up beyond 100
levels, of which it counts two for each of these: the whole task could not be read."""
_LARGEST = 2**64 - 1
_SMALLEST = -(2**63)
_DIGITS = bytes(48 if 48 <= byte <= 57 else 32 for byte in range(256))
"""Translation table that turns every digit into 0 and every other byte into a space."""
_LONG_NUMBER = b"0" * 19
_STRINGS = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"?')
"""Also one that does not end: otherwise each of its quotes would be tried as a beginning."""
_STRING_OR_BRACKET = re.compile(_STRINGS.pattern + rb"|[\[\]{}]")
_NOT_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))
_STEPS = bytes.maketrans(b"[{]}", b"\x01\x01\xff\xff")
"""Translation table that turns opening brackets into 1 and closing ones into -1 (as int8)."""
TOO_DEEP = "(nested too deeply to be shown)"
"""Stands for what is left out of a document, so that nobody takes the rest for all of it."""
_NO_NUMBERS = ("NaN", "Infinity", "-Infinity")
_SURROGATE = re.compile(rb"\\u[dD]([89a-fA-F])[0-9a-fA-F]{2}")


def whole_characters(body: bytes) -> bytes:
    """Replace each unpaired half of a surrogate pair by the character U+FFFD.

    JavaScript cuts text anywhere and writes such a half as an escape, which JSON allows, but no
    decoder here accepts. For documents that must not be lost: answers of OpenCode and of peers.
    """
    if b"\\ud" not in body and b"\\uD" not in body:
        return body
    halves: list[int] = []
    first = -1
    """The end of a first half, if the next escape may complete it."""
    last = 0
    for found in _SURROGATE.finditer(body):
        start = found.start()
        between, last = body[last:start], found.end()
        if (len(between) - len(between.rstrip(b"\\"))) % 2:
            continue  # its own backslash is escaped: it is plain text
        if start == first and found[1] in b"cdefCDEF":
            halves.pop()
        else:
            halves.append(start)
        first = found.end() if found[1] in b"89abAB" else -1
    begins = [0, *(start + 6 for start in halves)]
    ends = [*halves, len(body)]
    return rb"\ufffd".join(body[a:b] for a, b in zip(begins, ends, strict=True))


def _too_deep(body: bytes, depth: int = MAX_DEPTH) -> bool:
    if body.count(b"[") + body.count(b"{") <= depth:
        return False
    steps = _STRINGS.sub(b"", body).translate(_STEPS, _NOT_BRACKETS)
    return max(accumulate(memoryview(steps).cast("b")), default=0) > depth


def _shallow(body: bytes) -> bytes:
    """Put a text in place of everything that is nested too deeply in a document."""
    kept, depth, start = list[bytes](), 0, 0
    for found in _STRING_OR_BRACKET.finditer(body):
        if found[0] in b"[{":
            depth += 1
            if depth == MAX_DEPTH + 1:
                kept += body[start : found.start()], orjson.dumps(TOO_DEEP)
        elif found[0] in b"]}":
            if depth == MAX_DEPTH + 1:
                start = found.end()
            depth -= 1
    return b"".join([*kept, body[start:]]) if depth == 0 else body


def loads(body: bytes) -> Any:
    """Return the value of a document of a trusted program; ValueError if it is not JSON.

    What other decoders accept and ours do not is mended: halves of characters are replaced, what is
    nested too deeply is ``TOO_DEEP``, and a number beyond all bounds is infinite.
    """
    try:
        return orjson.loads(body)
    except orjson.JSONDecodeError:
        return from_json(_shallow(whole_characters(body)))


def storable(value: Any, depth: int = MAX_DEPTH) -> Any:
    """Return a value as it can be encoded, also inside of another.

    An integer of more than 64 bits becomes a float, as in every decoder that knows only those, and
    what is nested too deeply becomes ``TOO_DEEP``.
    """
    try:
        encoded = orjson.dumps(value)
    except TypeError:  # orjson says no more than that
        pass
    else:
        if not _too_deep(encoded, depth):
            return value
    return _mended(value, depth)


def showable(value: Any) -> Any:
    """Return a value as every client can read it, also inside of a task."""
    return storable(value, SHOWN_DEPTH)


def _mended(value: Any, depth: int) -> Any:
    if is_dataclass(value):
        value = {field.name: getattr(value, field.name) for field in fields(value)}
    if isinstance(value, dict | list | tuple) and not depth:
        return TOO_DEEP
    match value:
        case dict():
            known = cast("dict[str, Any]", value)
            return {_mended_text(key): _mended(one, depth - 1) for key, one in known.items()}
        case list() | tuple():
            items = cast("Sequence[Any]", value)
            return [_mended(one, depth - 1) for one in items]
        case str():
            return _mended_text(value)
        case int() if not _SMALLEST <= value <= _LARGEST:
            return float(value) if value.bit_length() < 1024 else None
        case _:
            return value


def _mended_text(text: str) -> str:
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


def decode(body: bytes) -> Json:
    """Return the value of a document; raise ParseError that says exactly what is wrong."""
    try:
        value: Json = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        _explain(body, error)
    if _too_deep(body):
        _refuse_depth()
    # Decoding drops a repeated key, and encoding then yields fewer colons. It yields more only for
    # a colon that was written as an escape.
    repeats = body.count(b":") != orjson.dumps(value).count(b":") or b"\\u003" in body
    if repeats or _LONG_NUMBER in body.translate(_DIGITS):
        json.loads(body, object_pairs_hook=_unique, parse_int=_bounded)
    return value


def as_object(value: Json) -> JsonObject:
    """Return the value if it is an object, else an empty one."""
    return value if isinstance(value, dict) else {}


def items_in(value: JsonObject, key: str) -> list[JsonObject]:
    """Return the objects in the list under a key; anything else in it is skipped."""
    listed = value.get(key)
    return [item for item in listed if isinstance(item, dict)] if isinstance(listed, list) else []


def text_in(value: JsonObject, *keys: str) -> str | None:
    """Return the first string under one of the keys."""
    return next((text for key in keys if isinstance(text := value.get(key), str)), None)


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    value: dict[str, object] = {}
    for key, item in pairs:
        if key in value:
            raise ParseError(
                f"The key {json.dumps(key[:64])} appears twice in one object; send it once",
                problem="duplicate_key",
            )
        value[key] = item
    return value


def _bounded(digits: str) -> int:
    # A 64-bit integer has at most 20 characters; int() refuses thousands of digits by itself.
    if len(digits) > 20 or not _SMALLEST <= int(digits) <= _LARGEST:
        raise ParseError(
            "An integer does not fit into 64 bits; send it as a string", problem="integer_range"
        )
    return int(digits)


def _explain(body: bytes, error: orjson.JSONDecodeError) -> NoReturn:
    """Raise ParseError that says why a body is not JSON."""
    if not body.strip():
        raise ParseError("The body is empty; send a JSON object", problem="empty") from None
    try:
        text = body.decode()
    except UnicodeDecodeError as wrong:
        raise ParseError(f"The body is not UTF-8: byte {wrong.start}", problem="encoding") from None
    if text.startswith("\ufeff"):
        raise ParseError("The body begins with a byte order mark; leave it out", problem="encoding")
    if "depth" in error.msg or "recursion" in error.msg:
        _refuse_depth()
    if "infinity" in error.msg:
        raise ParseError("A number is too large; send it as a string", problem="number_range")
    if "surrogate" in error.msg:
        raise ParseError(
            "A string holds half a character (an unpaired surrogate escape): "
            f"line {error.lineno}, column {error.colno}; send whole characters",
            problem="encoding",
        )
    rest = text[error.pos : error.pos + 9]
    for word in _NO_NUMBERS:
        if rest.startswith(word):
            raise ParseError(
                f"{word} is not a JSON number; send null or a string", problem="number"
            )
    raise ParseError(
        f"The body is not valid JSON: line {error.lineno}, column {error.colno}", problem="syntax"
    )


def _refuse_depth() -> NoReturn:
    raise ParseError(
        f"The body is nested more than {MAX_DEPTH} levels deep",
        problem="depth",
        max_depth=MAX_DEPTH,
    )
