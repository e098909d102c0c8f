"""Checks the JSON schemas that callers want answers to follow, and answers against them.

``server`` refuses an unusable schema before anything runs, and ``turns`` validates the answer. Both
take bounded time for any schema: it has no recursion, no references to other documents, and its
patterns are matched in linear time.
"""

import re
from collections.abc import Iterator
from urllib.parse import unquote

import orjson

from opencode_a2a.events import Json, JsonObject

MAX_BYTES = 64 * 1024
MAX_DEPTH = 56
"""Less than any JSON body may be nested: the request around the schema counts too."""
MAX_NODES = 10_000
"""Values in the schema, where a reference counts as many as it refers to."""
MAX_PROBLEMS = 10
"""Problems of one answer that are reported."""
MAX_WORDS = 300
"""Characters of each problem."""
_INDEX = re.compile("[0-9]{1,6}")


class SchemaError(ValueError):
    """The schema cannot be used; the text says why, and ``path`` leads to the fault."""

    def __init__(self, text: str, path: tuple[str | int, ...] = ()) -> None:
        super().__init__(text)
        self.path = path


def check_schema(schema: JsonObject) -> None:
    """Raise SchemaError if the schema cannot be used for an answer."""
    if schema.get("type") != "object":
        raise SchemaError('must have the type "object": wrap other values in one', ("type",))
    if len(orjson.dumps(schema)) > MAX_BYTES:
        raise SchemaError(f"must not have more than {MAX_BYTES} bytes")
    _walk(schema, schema, (), (), 0, {})
    from jsonschema_rs import RegexOptions, ValidationError, validator_for  # not for most callers

    try:
        validator_for(schema, pattern_options=RegexOptions(), offline=True)
    except ValidationError as error:
        raise SchemaError(
            f"is not a JSON schema: {error.message}", tuple(error.instance_path)
        ) from None
    except ValueError as error:  # such as a reference to a missing definition
        raise SchemaError(f"is not a JSON schema: {error}") from None


def _walk(
    root: JsonObject,
    value: Json,
    path: tuple[str | int, ...],
    within: tuple[str, ...],
    depth: int,
    sizes: dict[str, int],
) -> int:
    """Return the number of values in a part of the schema; raise if it exceeds a limit."""
    if depth > MAX_DEPTH:
        raise SchemaError(f"must not be nested more than {MAX_DEPTH} levels deep", path)
    count = 1
    match value:
        case dict():
            children: Iterator[tuple[str | int, Json]] = iter(value.items())
        case list():
            children = iter(enumerate(value))
        case _:
            return 1
    for key, child in children:
        here = (*path, key)
        if key in ("$dynamicRef", "$recursiveRef"):
            raise SchemaError("is not supported; use $ref", here)
        if key == "$ref" and isinstance(child, str):
            if not child.startswith("#"):
                raise SchemaError("must refer to a place in the schema itself: #/…", here)
            if child in within:
                raise SchemaError("must not refer to what it stands in: recursion", here)
            if child not in sizes:
                target = _resolve(root, child, here)
                sizes[child] = _walk(root, target, here, (*within, child), depth + 1, sizes)
            count += sizes[child]
        else:
            count += _walk(root, child, here, within, depth + 1, sizes)
        if count > MAX_NODES:
            raise SchemaError(f"must not stand for more than {MAX_NODES} values", path)
    return count


def _resolve(root: JsonObject, reference: str, path: tuple[str | int, ...]) -> Json:
    """Return the part of the schema that a reference points to."""
    value: Json = root
    for step in unquote(reference).removeprefix("#").split("/")[1:]:
        name = step.replace("~1", "/").replace("~0", "~")
        if isinstance(value, dict) and name in value:
            value = value[name]
        elif isinstance(value, list) and _INDEX.fullmatch(name) and int(name) < len(value):
            value = value[int(name)]
        else:
            raise SchemaError("refers to what is not in the schema", path)
    if value is root and reference not in ("#", "#/"):
        raise SchemaError("must be a path such as #/$defs/name", path)
    return value


def mismatches(schema: JsonObject, answer: Json) -> list[str]:
    """Return what is wrong with an answer, in the validator's words; empty if it is valid."""
    from jsonschema_rs import RegexOptions, validator_for

    validator = validator_for(schema, pattern_options=RegexOptions(), offline=True)
    problems: list[str] = []
    for error in validator.iter_errors(answer):
        where = "/".join(map(str, error.instance_path))
        # The message repeats the value, which may be long.
        text = error.message if len(error.message) <= MAX_WORDS else f"{error.message[:MAX_WORDS]}…"
        problems.append(f"{where}: {text}" if where else text)
        if len(problems) == MAX_PROBLEMS:
            break
    return problems
