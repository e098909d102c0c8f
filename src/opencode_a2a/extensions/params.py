"""Params and results of the methods beyond A2A: their base classes, reading and writing.

The params and the result of every method are a ``Payload``. Reading is strict, and one error lists
all wrong fields. The methods themselves are not known here.
"""

from typing import Annotated, Any, ClassVar, Generic, Self, TypeVar

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
from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue
from pydantic_core import PydanticCustomError, core_schema

from opencode_a2a.errors import (
    InvalidFieldError,
    InvalidParamsError,
    MissingFieldError,
    PaginationModeError,
    Violation,
)
from opencode_a2a.events import Json, JsonObject
from opencode_a2a.ids import MessageId
from opencode_a2a.opencode.calls import id_pattern, well_formed
from opencode_a2a.opencode.types import Wire, wire_name
from opencode_a2a.rights import Profile
from opencode_a2a.validation import FREE_OBJECT, listed, violations, wrong

P = TypeVar("P", bound="Payload")
T = TypeVar("T")
E = TypeVar("E", bound=InvalidParamsError)

DEFAULT_LIMIT = 20
MAX_LIMIT = 100
MAX_ID = 256
MAX_TEXT = 4096
MAX_FIELDS = 5000
"""Limits the time to report unknown fields: each takes 10 µs of the event loop."""


class Payload(BaseModel):
    """Base of all params and results; unknown fields are refused.

    A result holds OpenCode's own type if callers may see all of it. Where OpenCode's type has more
    fields, or params have to be checked more strictly, there is a class of our own.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, defer_build=True)
    example: ClassVar[JsonObject] = {}
    """Valid params of this class, for tests and pages; a method adds its own."""
    nullable: ClassVar[frozenset[str]] = frozenset()
    """Fields of a result that are written even if they are null."""
    foreign: ClassVar[tuple[str, ...]] = ()
    """Params of similar services that callers may expect; the refusal names them."""
    only03: ClassVar[tuple[str, ...]] = ()
    """Params that calls of A2A 0.3 may use besides the fields."""

    @classmethod
    def of(cls, **values: object) -> Self:
        """Make a result from OpenCode's objects, by the fields that have the same names."""
        return cls.model_validate(values, from_attributes=True)


class Body(Payload):
    """An object that is passed on to OpenCode, so its fields have OpenCode's spelling."""

    model_config = ConfigDict(alias_generator=wire_name)


class Item(Payload, Generic[T]):
    item: T

    @classmethod
    def model_parametrized_name(cls, params: tuple[Any, ...]) -> str:
        """Return the name of the schema: ``Item[Task]`` is published as ``OneTask``."""
        return f"One{_noun(params)}"


class Items(Payload, Generic[T]):
    items: list[T]

    @classmethod
    def model_parametrized_name(cls, params: tuple[Any, ...]) -> str:
        """Return the name of the schema: ``Items[TodoItem]`` is published as ``Todos``."""
        noun = _noun(params)
        if noun == "Interrupt":
            return "Items"  # as it was published first
        return noun + ("es" if noun.endswith(("s", "ch")) else "s")


def schema_name(kind: type) -> str:
    """Return the name by which a type is published."""
    title = kind.model_config.get("title") if issubclass(kind, BaseModel) else None
    return title or kind.__name__


def _noun(params: tuple[type, ...]) -> str:
    return schema_name(params[0]).removesuffix("Item").removesuffix("Summary")


class Done(Payload):
    ok: bool = True


class SessionDone(Done):
    session_id: str


class PublishedSchema(GenerateJsonSchema):
    """Makes the schemas of results, which have every field that has a value (``write``).

    Defaults are for whoever makes a result: this service, or versions of OpenCode that leave a
    field out. The descriptions of OpenCode's types are for developers of this service.
    """

    def model_schema(self, schema: core_schema.ModelSchema) -> JsonSchemaValue:
        made, kind = super().model_schema(schema), schema["cls"]
        fields: dict[str, JsonObject] | None = made.get("properties")
        if fields is None:  # a task or message of A2A
            return made
        written = kind.nullable if issubclass(kind, Payload) else frozenset[str]()
        for name, field in fields.items():
            if name in written or field.get("default") is not None:
                field.pop("default", None)
        made["required"] = [name for name, field in fields.items() if "default" not in field]
        if issubclass(kind, Wire):
            made.pop("description", None)
            made["additionalProperties"] = False
        return made


# --- values -----------------------------------------------------------------------------------


def _number(value: object) -> object:
    """Accept a number as text, as in a query string."""
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
Id = Annotated[
    str, Field(min_length=1, max_length=MAX_ID), AfterValidator(_plain), AfterValidator(_filled)
]
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
    """Require the form of OpenCode's ids of a kind."""

    def check(value: str) -> str:
        if not well_formed(prefix, value):
            raise wrong(f"must be an id of a {what}: {prefix}_ and letters or digits")
        return value

    return AfterValidator(check)


def published(prefix: str) -> WithJsonSchema:
    """Publish the form of OpenCode's ids of a kind."""
    return WithJsonSchema({"type": "string", "pattern": id_pattern(prefix)})


MessageRef = Annotated[
    MessageId,
    Field(min_length=1, max_length=MAX_ID),
    AfterValidator(_plain),
    AfterValidator(_filled),
    shaped("msg", "message"),
    published("msg"),
]
PartRef = Annotated[Id, shaped("prt", "part"), published("prt")]
WorkspaceId = Annotated[Id, shaped("wrk", "workspace"), published("wrk")]


# --- params that several methods share --------------------------------------------------------


class WorkspaceRef(Payload):
    id: WorkspaceId


class PlaceMetadata(Payload):
    directory: Path | None = None
    workspace: WorkspaceRef | None = None
    profile: Profile | None = None


class Metadata(Payload):
    """Where a call is to run, and with which rights; ``shared`` metadata are ignored."""

    opencode: PlaceMetadata | None = None
    shared: Annotated[dict[str, Json], FREE_OBJECT] | None = None


class Routed(Payload):
    """Params that every method takes: where it is to run."""

    metadata: Metadata | None = None

    @property
    def place(self) -> PlaceMetadata:
        return (self.metadata and self.metadata.opencode) or PlaceMetadata()

    @property
    def named_directory(self) -> tuple[str | None, str]:
        """The directory that the params name, and the field it is in."""
        return self.place.directory, "metadata.opencode.directory"

    @property
    def named_session(self) -> str | None:
        """The session that the call is about, if it is about one."""
        return None

    @property
    def begins_context(self) -> bool:
        """Whether the method begins a context, which may do so in any OpenCode with room."""
        return False

    @property
    def named_request(self) -> str | None:
        """The permission or question that the call is about, if it is about one."""
        return None

    @property
    def named_place(self) -> str | None:
        """The workspace, or the directory of the worktree, that the call is about, if any."""
        return self.place.workspace.id if self.place.workspace else None


class Placed(Routed):
    """Params that may also name the directory in a field of their own."""

    directory: Path | None = None

    @property
    def named_directory(self) -> tuple[str | None, str]:
        if self.directory is not None and self.directory.strip():
            return self.directory, "directory"
        return super().named_directory


class OfSession(Placed):
    """Params of a method about one session."""

    example: ClassVar[JsonObject] = {"session_id": "ses_e222241e6ffeQZbiYrXEPgqFtd"}

    session_id: Id

    @property
    def named_session(self) -> str | None:
        return self.session_id


class Listing(Placed):
    """Params of a list with a limit; 0.3 clients may put the filters into ``query``."""

    limit: Limit = DEFAULT_LIMIT
    foreign: ClassVar[tuple[str, ...]] = ("cursor", "page", "size")
    only03: ClassVar[tuple[str, ...]] = ("query",)

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
                "pagination_mode", "is not supported by this method", {"inner": foreign}
            )
        return sent


# --- reading and writing ----------------------------------------------------------------------


def read(model: type[P], params: JsonObject, version: str) -> P:
    """Return params as their type, or raise an error that lists what is wrong with them."""
    if _fields(params) > MAX_FIELDS:
        raise InvalidParamsError.of("params", f"must not have more than {MAX_FIELDS} fields in all")
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
"""The types of parts of a prompt, which pydantic puts into the path of an error."""


def _fields(value: Json) -> int:
    """Count the fields of all objects in a value."""
    if isinstance(value, dict):
        return len(value) + sum(map(_fields, value.values()))
    return sum(map(_fields, value)) if isinstance(value, list) else 0


def write(result: Payload) -> JsonObject:
    """Return a result as JSON, all of it in our spelling; fields without a value are left out."""
    known: JsonObject = result.model_dump(mode="json", by_alias=False, exclude_none=True)
    return dict.fromkeys(sorted(result.nullable)) | known


def read_result(model: type[P], written: JsonObject) -> P:
    """Return a result that another replica has written with ``write``.

    Fields that a later version has added are ignored.
    """
    content = orjson.dumps(written)
    return model.model_validate_json(content, extra="ignore", by_alias=False, by_name=True)


def refusal(kind: type[E], found: tuple[Violation, ...], **data: Json) -> E:
    """Return the error for several wrong values."""
    return kind(listed(found), violations=found, **data)
