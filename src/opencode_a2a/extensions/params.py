"""Params and results of the methods beyond A2A: how they are read, refused and written.

Every method's params and result are a ``Payload``. Reading is strict, and one error lists every
field that is wrong. The methods themselves are not known here.
"""

import re
from typing import Annotated, ClassVar, Generic, Self, TypeVar

import orjson
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    WithJsonSchema,
    model_validator,
)
from pydantic.json_schema import GenerateJsonSchema
from pydantic_core import PydanticCustomError

from opencode_a2a.errors import (
    InvalidFieldError,
    InvalidParamsError,
    MissingFieldError,
    PaginationModeError,
    Violation,
)
from opencode_a2a.events import Json, JsonObject
from opencode_a2a.ids import MessageId
from opencode_a2a.opencode.client import well_formed
from opencode_a2a.opencode.types import wire_name
from opencode_a2a.validation import FREE_OBJECT, listed, violations, wrong

P = TypeVar("P", bound="Payload")
T = TypeVar("T")
E = TypeVar("E", bound=InvalidParamsError)

DEFAULT_LIMIT = 20
MAX_LIMIT = 100
MAX_ID = 256
MAX_TEXT = 4096
MAX_FIELDS = 5000
"""An unknown field is an error of its own, and takes 10 µs of the event loop."""


class Payload(BaseModel):
    """Base of all params and results; unknown fields are refused.

    What is published under a name of ours has a class here even if OpenCode's own type is much
    alike: that one has more fields, and defaults for what some version of OpenCode leaves out.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, defer_build=True)
    example: ClassVar[JsonObject] = {}
    """Params that a method with no more than these would take."""
    nullable: ClassVar[frozenset[str]] = frozenset()
    """Fields of a result that are there even when they are null."""
    foreign: ClassVar[tuple[str, ...]] = ()
    """Params that other services have here, refused by name."""

    @classmethod
    def of(cls, **values: object) -> Self:
        """Make a result of what OpenCode sent, by the fields that have the same names."""
        return cls.model_validate(values, from_attributes=True)


class Body(Payload):
    """An object that OpenCode is given much as it came: its fields have OpenCode's spelling."""

    model_config = ConfigDict(alias_generator=wire_name)


class Item(Payload, Generic[T]):
    item: T


class Items(Payload, Generic[T]):
    items: list[T]


class Done(Payload):
    ok: bool = True


class SessionDone(Done):
    session_id: str


class PublishedSchema(GenerateJsonSchema):
    """Names schemas as they are published: ``OneTask`` for ``Item[Task]``, ``Todos`` for a list."""

    def normalize_name(self, name: str) -> str:
        generic = re.fullmatch(r"(Items?)\[(\w+?)(?:Item|Summary)?\]", name)
        if generic is None:
            return super().normalize_name(name)
        wrapper, kind = generic.groups()
        if wrapper == "Item":
            return f"One{kind}"
        if kind == "Interrupt":
            return wrapper  # as it was published first
        return kind + ("es" if kind.endswith(("s", "ch")) else "s")


# --- values -----------------------------------------------------------------------------------


def _number(value: object) -> object:
    """Take numbers that a query string would have as text."""
    if isinstance(value, str) and value.isascii() and value.isdigit() and len(value) < 16:
        return int(value)
    return value


def _flag(value: object) -> object:
    known = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}
    return known.get(value.strip().lower(), value) if isinstance(value, str) else value


def _filled(value: str) -> str:
    if not value.strip():
        raise wrong("must not be blank")
    return value.strip()


def _plain(value: str) -> str:
    if "\0" in value:
        raise wrong("must not hold zero bytes")
    return value


Text = Annotated[
    str, Field(min_length=1, max_length=MAX_TEXT), AfterValidator(_plain), AfterValidator(_filled)
]
Id = Annotated[str, Field(min_length=1, max_length=MAX_ID), AfterValidator(_filled)]
Path = Annotated[str, Field(max_length=MAX_TEXT), AfterValidator(_plain)]
LongText = Annotated[str, AfterValidator(_plain)]
Number = Annotated[
    int,
    Field(ge=0, le=2**53),
    BeforeValidator(_number),
    WithJsonSchema({"type": "integer", "minimum": 0}),
]
Limit = Annotated[int, Field(ge=1, le=MAX_LIMIT), BeforeValidator(_number)]
Flag = Annotated[bool, BeforeValidator(_flag)]


def shaped(prefix: str, what: str) -> AfterValidator:
    """Require the shape that OpenCode's ids of a kind have."""

    def check(value: str) -> str:
        if not well_formed(prefix, value):
            raise wrong(f"must be an id of a {what}: {prefix}_ and letters or digits")
        return value

    return AfterValidator(check)


MessageRef = Annotated[
    MessageId,
    Field(min_length=1, max_length=MAX_ID),
    AfterValidator(_filled),
    shaped("msg", "message"),
]
PartRef = Annotated[Id, shaped("prt", "part")]
WorkspaceId = Annotated[Id, shaped("wrk", "workspace")]


# --- params that several methods share --------------------------------------------------------


class WorkspaceRef(Payload):
    id: WorkspaceId


class PlaceMetadata(Payload):
    directory: Path | None = None
    workspace: WorkspaceRef | None = None


class Metadata(Payload):
    """Where a call is meant to run; other shared metadata are allowed and mean nothing here."""

    opencode: PlaceMetadata | None = None
    shared: Annotated[dict[str, Json], FREE_OBJECT] | None = None


class Routed(Payload):
    """Params of a method that runs somewhere."""

    metadata: Metadata | None = None

    @property
    def place(self) -> PlaceMetadata:
        return (self.metadata and self.metadata.opencode) or PlaceMetadata()

    @property
    def named_directory(self) -> tuple[str | None, str]:
        """The directory that was asked for, and the field that named it."""
        return self.place.directory, "metadata.opencode.directory"


class Placed(Routed):
    """Params that may also name the directory at the top."""

    directory: Path | None = None

    @property
    def named_directory(self) -> tuple[str | None, str]:
        if self.directory is not None and self.directory.strip():
            return self.directory, "directory"
        return super().named_directory


class OfSession(Placed):
    example: ClassVar[JsonObject] = {"session_id": "ses_e222241e6ffeQZbiYrXEPgqFtd"}

    session_id: Id


class Listing(Placed):
    """A list with a limit; 0.3 clients may put the filters into ``query``."""

    limit: Limit = DEFAULT_LIMIT
    foreign: ClassVar[tuple[str, ...]] = ("cursor", "page", "size")

    @model_validator(mode="before")
    @classmethod
    def _one_place(cls, sent: JsonObject, info: ValidationInfo) -> JsonObject:
        version = info.context["version"] if info.context else None
        query = sent.get("query")
        if version == "0.3" and isinstance(query, dict):
            outside = {name: value for name, value in sent.items() if name != "query"}
            for name, value in query.items():
                if name in outside and outside[name] != value:
                    raise wrong("is ambiguous: params and query differ", name)
            sent = {**query, **outside}
        if foreign := [name for name in cls.foreign if name in sent]:
            raise PydanticCustomError(
                "pagination_mode", "is not how this list is paged", {"inner": foreign}
            )
        return sent


# --- reading and writing ----------------------------------------------------------------------


def read(model: type[P], params: JsonObject, version: str) -> P:
    """Return params as their type, or raise what is wrong with them."""
    if _fields(params) > MAX_FIELDS:
        raise invalid("params", f"must not have more than {MAX_FIELDS} fields in all")
    try:
        return model.model_validate_json(orjson.dumps(params), context={"version": version})
    except ValidationError as error:
        details = error.errors(include_url=False, include_input=False)
    found = violations(details, _TAGS)
    kinds = {detail["type"] for detail in details}
    fields: list[Json] = [*sorted({one.field for one in found})]
    if kinds == {"pagination_mode"}:
        used: list[Json] = [*(one.field for one in found)]
        known: list[Json] = [name for name in ("limit", "before") if name in model.model_fields]
        raise refusal(PaginationModeError, found, supported=known, unsupported=used, fields=fields)
    kind = MissingFieldError if kinds == {"missing"} else InvalidFieldError
    bounds = (detail.get("ctx", {}).get("le") for detail in details)
    most = next((bound for bound in bounds if bound is not None), None)
    raise refusal(kind, found, field=found[0].field, fields=fields, max=most)


_TAGS = frozenset({"text", "file", "agent", "subtask"})
"""The kinds of parts of a prompt."""


def _fields(value: Json) -> int:
    """Count the fields of all objects in a value."""
    if isinstance(value, dict):
        return len(value) + sum(map(_fields, value.values()))
    return sum(map(_fields, value)) if isinstance(value, list) else 0


def write(result: Payload) -> JsonObject:
    """Return a result as JSON: what is not known has no key."""
    known: JsonObject = result.model_dump(mode="json", by_alias=True, exclude_none=True)
    return dict.fromkeys(sorted(result.nullable)) | known


def invalid(field: str, description: str) -> InvalidFieldError:
    """Return the error for one wrong value."""
    return refusal(InvalidFieldError, (Violation(field, description),), field=field)


def refusal(kind: type[E], found: tuple[Violation, ...], **data: Json) -> E:
    return kind(listed(found), violations=found, **data)
