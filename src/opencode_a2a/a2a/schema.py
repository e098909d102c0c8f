"""Incoming params of both lines: what may be sent, and what it means.

``handler`` calls the ``read_*`` functions with plain JSON objects and gets neutral values, or
one InvalidParamsError that lists the fields that are wrong. Field names are taken in camelCase
and snake_case, unknown ones are ignored, but fields that belong to the other line or binding
are refused by name. Values of data parts and metadata are kept as they came.
"""

import base64
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Annotated, Literal, Self, TypeVar, get_args

from pydantic import (
    AfterValidator,
    AliasChoices,
    AliasGenerator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    StrictBool,
    ValidationError,
    model_validator,
)
from pydantic.alias_generators import to_camel
from pydantic.json_schema import SkipJsonSchema

from opencode_a2a.a2a.versions import Dialect
from opencode_a2a.errors import InvalidParamsError
from opencode_a2a.events import Json, JsonObject
from opencode_a2a.messages import Kind, Message, Part
from opencode_a2a.tasks.state import Query, State
from opencode_a2a.validation import FREE, FREE_OBJECT, listed, violations, wrong

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_ID_LIMIT = 256
_MAX_PARTS = 1000
"""Checking a part takes 10 µs of the event loop."""
_M = TypeVar("_M", bound=BaseModel)


@dataclass(frozen=True, slots=True)
class Send:
    """A message, and how its sender wants to be answered."""

    message: Message
    task_id: str | None
    context_id: str | None
    metadata: JsonObject | None
    accepted_output_modes: tuple[str, ...]
    history_length: int | None
    blocking: bool
    push: bool
    """A push configuration came with it."""


@dataclass(frozen=True, slots=True)
class Listing:
    query: Query
    history_length: int


def read_send(params: JsonObject, dialect: Dialect) -> Send:
    model = _check(_SEND[dialect], params)
    # nothing said is the same as a 1.0 configuration that says nothing
    sent, given = model.message, model.configuration or _Configuration()
    blocking, push = given.wishes()
    message = Message(
        message_id=sent.message_id,
        role="user",
        parts=[part.neutral() for part in sent.parts],
        metadata=sent.metadata,
        extensions=sent.extensions or [],
        reference_task_ids=sent.reference_task_ids or [],
    )
    return Send(
        message=message,
        task_id=sent.task_id,
        context_id=sent.context_id,
        metadata=model.metadata,
        accepted_output_modes=tuple(given.accepted_output_modes or ()),
        history_length=given.history_length,
        blocking=blocking,
        push=push,
    )


def read_get(params: JsonObject) -> "Get":
    return _check(Get, params)


def read_list(params: JsonObject, dialect: Dialect) -> Listing:
    model = _check(_List if dialect is Dialect.V1 else _List03, params)
    query = Query(
        context_id=model.context_id,
        state=model.status,
        since=model.status_timestamp_after,
        size=model.page_size or 50,
        token=model.page_token or None,
        artifacts=bool(model.include_artifacts),
        history=bool(model.history_length),
    )
    return Listing(query, model.history_length or 0)


def send_model(dialect: Dialect) -> type[BaseModel]:
    """Return the declaration of a send's params, for those who describe it."""
    return _SEND[dialect]


def rest_dialect(body: JsonObject) -> Dialect:
    """Tell which of its two spellings the body of a 0.3 REST request uses."""
    message = body.get("message", body.get("request"))
    if isinstance(message, dict) and "content" not in message and "parts" in message:
        return Dialect.V03
    return Dialect.PROTO03


def _check(model: type[_M], params: JsonObject) -> _M:
    try:
        return model.model_validate(params)
    except ValidationError as error:
        details = error.errors(include_url=False, include_input=False)
    found = violations(details)
    raise InvalidParamsError(f"Invalid parameters: {listed(found, len(details))}", violations=found)


# --- values -----------------------------------------------------------------------------------


def _identifier(value: str) -> str:
    if not value.strip():
        raise wrong("must not be empty")
    if len(value) > _ID_LIMIT:
        raise wrong(f"must not be longer than {_ID_LIMIT} characters")
    if not value.isprintable():
        raise wrong("must not hold control characters")
    return value


def _within(lowest: int, highest: int) -> AfterValidator:
    def check(value: int | None) -> int | None:
        if value is not None and not lowest <= value <= highest:
            raise wrong(f"must be from {lowest} to {highest}")
        return value

    return AfterValidator(check)


def _standard_base64(value: str | None) -> str | None:
    """Take base64 in either alphabet, padded or not, and return the standard form."""
    if value is None:
        return None
    text = value.translate({45: "+", 95: "/"}).rstrip("=")
    text += "=" * (-len(text) % 4)
    try:
        base64.b64decode(text, validate=True)
    except ValueError:
        raise wrong("is not base64") from None
    return text


def _milliseconds(value: object) -> int | None:
    if value is None or value == "":
        return None
    try:
        moment = datetime.fromisoformat(value) if isinstance(value, str) else None
    except ValueError:
        moment = None
    if moment is None or moment.tzinfo is None:
        raise wrong("must be a time with a time zone, such as 2026-11-15T09:00:00.000Z")
    return -((_EPOCH - moment) // timedelta(milliseconds=1))


def _role(spelling: Literal["ROLE_USER", "user"]) -> BeforeValidator:
    agent, other = ("ROLE_AGENT", "user") if spelling == "ROLE_USER" else ("agent", "ROLE_USER")

    def check(value: object) -> str:
        if value == spelling or (value == 1 and spelling == "ROLE_USER" and value is not True):
            return spelling
        if value == agent:
            raise wrong(f"must be {spelling}: a caller cannot speak for the agent")
        if value == other:
            raise wrong(f"must be {spelling}: {other} is the spelling of another line or binding")
        raise wrong(f"must be {spelling}")

    return BeforeValidator(check)


def _state(names: dict[str, State]) -> BeforeValidator:
    def check(value: object) -> State | None:
        if value in (None, "", "TASK_STATE_UNSPECIFIED"):
            return None
        if isinstance(value, str) and value in names:
            return names[value]
        raise wrong(f"must be one of {', '.join(names)}")

    return BeforeValidator(check)


def _foreign(hint: str) -> BeforeValidator:
    """Make a field that must not be there, since it belongs to another line or binding."""

    def refuse(_: object) -> None:
        raise wrong(hint)

    return BeforeValidator(refuse)


_Any = Annotated[Json, FREE]
_Object = Annotated[JsonObject, FREE_OBJECT]
_Texts = Annotated[list[str], Field(fail_fast=True)]
_Id = Annotated[str, AfterValidator(_identifier)]
_OptionalId = Annotated[str | None, AfterValidator(lambda v: _identifier(v) if v else None)]
_Count = Annotated[int | None, _within(0, 2**31 - 1)]
_Base64 = Annotated[str | None, AfterValidator(_standard_base64)]

_NAMES1 = {f"TASK_STATE_{state.name}": state for state in State}
_NAMES03 = (
    {state.value.replace("_", "-"): state for state in State}
    | {state.name: state for state in State}
    | _NAMES1
    | {"cancelled": State.CANCELED, "TASK_STATE_CANCELLED": State.CANCELED}
)

_Never = SkipJsonSchema[None]
_ENVELOPE = "belongs to a JSON-RPC request; post those to the root URL, here send the params alone"
_Envelope = Annotated[_Never, _foreign(_ENVELOPE)]
_Kind = Annotated[_Never, _foreign("is A2A 0.3; in 1.0 a part is told by text, raw, url or data")]
_File = Annotated[
    _Never, _foreign("is A2A 0.3; in 1.0 write raw or url, with mediaType and filename")
]
_Content = Annotated[_Never, _foreign("is the ProtoJSON of A2A 0.3; here the field is named parts")]
_Blocking = Annotated[_Never, _foreign("is A2A 0.3; in 1.0 write returnImmediately")]
_Push03 = Annotated[_Never, _foreign("is A2A 0.3; in 1.0 write taskPushNotificationConfig")]
_Part1 = Annotated[_Never, _foreign("is A2A 1.0; in 0.3 write kind file with a file object")]
_Returns = Annotated[_Never, _foreign("is A2A 1.0; in 0.3 write blocking")]


class _Wire(BaseModel):
    """Base of all params."""

    model_config = ConfigDict(
        frozen=True,
        extra="ignore",
        defer_build=True,
        alias_generator=AliasGenerator(
            validation_alias=lambda name: AliasChoices(to_camel(name), name)
        ),
    )


class Get(_Wire):
    task_id: _Id = Field(validation_alias="id")
    history_length: _Count = None


class _List(_Wire):
    context_id: _OptionalId = None
    status: Annotated[State | None, _state(_NAMES1)] = None
    page_size: Annotated[int | None, _within(1, 100)] = None
    page_token: str | None = None
    history_length: _Count = None
    status_timestamp_after: Annotated[int | None, BeforeValidator(_milliseconds)] = None
    include_artifacts: StrictBool | None = None


class _List03(_List):
    status: Annotated[State | None, _state(_NAMES03)] = None


class _MessageBase(_Wire):
    message_id: _Id
    context_id: _OptionalId = None
    task_id: _OptionalId = None
    metadata: _Object | None = None
    extensions: _Texts | None = None
    reference_task_ids: _Texts | None = None


class _ConfigurationBase(_Wire):
    accepted_output_modes: _Texts | None = None
    history_length: _Count = None


class _SendBase(_Wire):
    metadata: _Object | None = None
    jsonrpc: _Envelope = None
    method: _Envelope = None
    params: _Envelope = None


# --- 1.0 --------------------------------------------------------------------------------------


class _Part(_Wire):
    text: str | None = None
    raw: _Base64 = None
    url: str | None = None
    data: _Any = None
    metadata: _Object | None = None
    filename: str | None = None
    media_type: str | None = None
    kind: _Kind = None
    type: _Kind = None
    file: _File = None

    @model_validator(mode="after")
    def _exactly_one(self) -> Self:
        given = self._given()
        if len(given) != 1:
            told = f", not {' and '.join(given)}" if given else ""
            raise wrong(f"must have exactly one of text, raw, url and data{told}")
        return self

    def _given(self) -> list[Kind]:
        # null is a value of data, and leaves the others out
        given = [kind for kind in get_args(Kind) if self.__dict__[kind] is not None]
        return [*given, "data"] if self.data is None and "data" in self.model_fields_set else given

    def neutral(self) -> Part:
        (kind,) = self._given()
        content = (self.text, self.raw, self.url, self.data)
        return Part(kind, *content, self.media_type or None, self.filename or None, self.metadata)


class _Message(_MessageBase):
    role: Annotated[str, _role("ROLE_USER")]
    parts: list[_Part] = Field(min_length=1, max_length=_MAX_PARTS)
    content: _Content = None


class _Configuration(_ConfigurationBase):
    return_immediately: StrictBool | None = None
    task_push_notification_config: _Object | None = None
    blocking: _Blocking = None
    push_notification_config: _Push03 = None

    def wishes(self) -> tuple[bool, bool]:
        """Return whether to wait for the task, and whether to call back."""
        return not self.return_immediately, self.task_push_notification_config is not None


class _Send(_SendBase):
    message: _Message
    configuration: _Configuration | None = None


# --- 0.3, the JSON of its text ----------------------------------------------------------------


class _File03(_Wire):
    name: str | None = None
    mime_type: str | None = None
    bytes: _Base64 = None
    uri: str | None = None

    @model_validator(mode="after")
    def _exactly_one(self) -> Self:
        if (self.bytes is None) == (self.uri is None):
            raise wrong("must have exactly one of bytes and uri")
        return self


class _Part03(_Wire):
    kind: Literal["text", "file", "data"]
    text: str | None = None
    file: _File03 | None = None
    data: _Object | None = None
    metadata: _Object | None = None
    raw: _Part1 = None
    url: _Part1 = None
    media_type: _Part1 = None

    @model_validator(mode="after")
    def _fits_kind(self) -> Self:
        if self.__dict__[self.kind] is None:
            raise wrong(f"is required in a part of kind {self.kind}", self.kind)
        return self

    def neutral(self) -> Part:
        if self.file is not None and self.kind == "file":
            return _file_part(self.file, self.file.bytes, self.file.uri, self.metadata)
        if self.kind == "text":
            return Part("text", text=self.text, metadata=self.metadata)
        return Part("data", data=self.data, metadata=self.metadata)


class _Message03(_MessageBase):
    role: Annotated[str, _role("user")]
    parts: list[_Part03] = Field(min_length=1, max_length=_MAX_PARTS)
    content: _Content = None


class _Configuration03(_ConfigurationBase):
    blocking: StrictBool | None = None
    push_notification_config: _Object | None = None
    return_immediately: _Returns = None

    def wishes(self) -> tuple[bool, bool]:
        return self.blocking is not False, self.push_notification_config is not None


class _Send03(_SendBase):
    message: _Message03
    configuration: _Configuration03 | None = None


# --- 0.3, the ProtoJSON of its REST clients ---------------------------------------------------


class _FileProto(_Wire):
    file_with_uri: str | None = None
    file_with_bytes: _Base64 = None
    mime_type: str | None = None
    name: str | None = None

    @model_validator(mode="after")
    def _exactly_one(self) -> Self:
        if (self.file_with_bytes is None) == (self.file_with_uri is None):
            raise wrong("must have exactly one of fileWithBytes and fileWithUri")
        return self


class _DataProto(_Wire):
    data: _Object


class _PartProto(_Wire):
    text: str | None = None
    file: _FileProto | None = None
    data: _DataProto | None = None
    metadata: _Object | None = None
    raw: _Part1 = None
    url: _Part1 = None

    @model_validator(mode="after")
    def _exactly_one(self) -> Self:
        if [self.text, self.file, self.data].count(None) != 2:
            raise wrong("must have exactly one of text, file and data")
        return self

    def neutral(self) -> Part:
        if (file := self.file) is not None:
            raw = file.file_with_bytes and _once(file.file_with_bytes)
            return _file_part(file, raw, file.file_with_uri, self.metadata)
        if self.data is not None:
            return Part("data", data=self.data.data, metadata=self.metadata)
        return Part("text", text=self.text, metadata=self.metadata)


class _MessageProto(_MessageBase):
    role: Annotated[str, _role("ROLE_USER")]
    parts: list[_PartProto] = Field(
        validation_alias="content", title="Content", min_length=1, max_length=_MAX_PARTS
    )


class _ConfigurationProto(_ConfigurationBase):
    blocking: StrictBool | None = None
    push_notification: _Object | None = None
    return_immediately: _Returns = None

    def wishes(self) -> tuple[bool, bool]:
        # ProtoJSON leaves false out: a configuration without the field says false
        return bool(self.blocking), self.push_notification is not None


class _SendProto(_SendBase):
    message: _MessageProto = Field(validation_alias=AliasChoices("message", "request"))
    configuration: _ConfigurationProto | None = None


_SEND: dict[Dialect, type[_Send | _Send03 | _SendProto]] = {
    Dialect.V1: _Send,
    Dialect.V03: _Send03,
    Dialect.PROTO03: _SendProto,
}


def _file_part(
    file: _File03 | _FileProto, raw: str | None, url: str | None, metadata: JsonObject | None
) -> Part:
    kind = "url" if raw is None else "raw"
    return Part(kind, None, raw, url, None, file.mime_type or None, file.name or None, metadata)


_MAGIC = (b"\x89PNG", b"\xff\xd8\xff", b"GIF8", b"RIFF", b"%PDF-")


def _once(raw: str) -> str:
    """Undo the second base64 that the Python client of 0.3 REST puts around bytes.

    It is taken for one only when what comes out is text, an image or a PDF.
    """
    try:
        inner = base64.b64decode(raw).decode("ascii")
        data = base64.b64decode(inner, validate=True)
        known = data.startswith(_MAGIC) or "\0" not in data.decode()
    except ValueError:
        return raw
    return inner if known else raw
