"""The wording of validation errors, shared by A2A and the extension methods.

``a2a`` and ``extensions`` validate params with pydantic and describe its errors with this; each
raises errors of its own. Nothing here knows either protocol.
"""

from collections.abc import Collection, Sequence

from pydantic import GetPydanticSchema
from pydantic_core import ErrorDetails, PydanticCustomError, core_schema

from opencode_a2a.errors import MAX_VIOLATIONS, Violation

# Free-form JSON is not validated: walking through it would cost more than the rest of a request.
FREE = GetPydanticSchema(lambda _type, _next: core_schema.any_schema())
FREE_OBJECT = GetPydanticSchema(
    lambda _type, _next: core_schema.dict_schema(core_schema.str_schema())
)

_WORDS = {
    "missing": "is required",
    "union_tag_not_found": "is required",
    "union_tag_invalid": "must be one of {expected_tags}",
    "extra_forbidden": "is not a known field",
    "string_type": "must be a string",
    "bool_type": "must be true or false",
    "int_type": "must be an integer",
    "int_parsing": "must be an integer",
    "int_from_float": "must be an integer",
    "dict_type": "must be an object",
    "model_type": "must be an object",
    "model_attributes_type": "must be an object",
    "list_type": "must be an array",
    "too_short": "must not be empty",
    "too_long": "must not have more than {max_length} entries",
    "string_too_short": "must not be empty",
    "string_too_long": "must not be longer than {max_length} characters",
    "less_than_equal": "must be at most {le}",
    "greater_than_equal": "must be at least {ge}",
    "literal_error": "must be {expected}",
}
"""Our text for each of pydantic's error types; any other error keeps pydantic's text."""


def wrong(description: str, *inner: str) -> PydanticCustomError:
    """Return the error that a validator raises for its value, or for fields inside the value."""
    text = description.replace("{", "(").replace("}", ")")  # braces are placeholders there
    return PydanticCustomError("wrong", text, {"inner": inner})  # pyright: ignore[reportArgumentType]  # a literal is wanted, any text works


def violations(
    details: Sequence[ErrorDetails], tags: Collection[str] = ()
) -> tuple[Violation, ...]:
    """Return a violation for each wrong field; ``tags`` are the tags of unions in lists."""
    found: list[Violation] = []
    for detail in details[:MAX_VIOLATIONS]:
        context = detail.get("ctx", {})
        path, before = "", None
        for step in detail["loc"]:
            if isinstance(step, int):
                path += f"[{step}]"
            elif not (isinstance(before, int) and step in tags):  # pydantic's step, not a field
                path += f".{step}" if path else step
            before = step
        words = _WORDS.get(detail["type"], detail["msg"].replace("{", "("))
        inner: Sequence[str] = context.get("inner") or [context.get("discriminator", "").strip("'")]
        for name in inner:
            field = ".".join(step for step in (path, name) if step)
            found.append(Violation(field or "params", words.format_map(context)))
    return tuple(found)


def listed(found: Sequence[Violation], total: int | None = None) -> str:
    """Return the first few violations as a sentence."""
    text = "; ".join(f"{one.field} {one.description}" for one in found[:3])
    more = (len(found) if total is None else total) - 3
    return f"{text}; and {more} more" if more > 0 else text
