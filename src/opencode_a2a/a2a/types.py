"""The versions of A2A, and the params of its operations in the form of 1.0.

The ``read_*`` functions check the params of a 1.0 request and return values, or raise one
InvalidParamsError that lists every wrong field. ``v03`` does the same for requests of 0.3 and
returns the same values, so that nothing behind the bindings knows which version a caller speaks.
Messages and parts (``messages``), states and queries (``tasks``) belong to lower layers, which
store them.

Field names may be camelCase or snake_case. Unknown fields are ignored, but fields of the other
version or binding are refused by name. The values of data parts and metadata are kept unchanged.
"""

import base64
import re
from collections.abc import Collection
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from enum import StrEnum
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
from pydantic_core import PydanticCustomError

from opencode_a2a.errors import InvalidParamsError, VersionNotSupportedError
from opencode_a2a.events import Json, JsonObject
from opencode_a2a.log.state import Query, State
from opencode_a2a.messages import Kind, Message, Part, PushConfig
from opencode_a2a.validation import FREE, FREE_OBJECT, listed, violations, wrong

MAX_PARTS = 1000
"""Parts of a message; checking one takes 10 µs of the event loop."""
_ID_LIMIT = 256
_URL_LIMIT = 2048
_TOKEN = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]{1,64}")
SIGNING_KEY = "whsec_"
"""The beginning of a token that is not sent to the webhook, but signs the notifications."""
_KINDS: tuple[Kind, ...] = get_args(Kind)
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
M = TypeVar("M", bound=BaseModel)


# --- versions ---------------------------------------------------------------------------------

VERSION_HEADER = "A2A-Version"
HOPS_HEADER = "A2A-Hops"
"""The number of agents that a message went through; each agent adds one when it calls another."""
DEFAULT_VERSION = "default_version"
"""Key in the scope of a request: the version that applies if the request names none."""
_VERSION = re.compile(r"(\d{1,4}\.\d{1,4})(?:\.\d{1,9})?")


class Version(StrEnum):
    """A version of the protocol, as Major.Minor in the header ``A2A-Version``."""

    V1 = "1.0"
    V03 = "0.3"


EVERY_VERSION = tuple(Version)


def negotiate(
    asked: str,
    default: Version,
    supported: Collection[Version] = EVERY_VERSION,
    *,
    belongs: Version | None = None,
    what: str = "The request",
) -> Version:
    """Return the version of a request; ``asked`` is the version it names, or empty.

    Most methods and routes belong to one version (``belongs``): a request that names no version has
    that one, and a request that names the other is refused. The rest have the default version.
    """
    number = _VERSION.fullmatch(asked)
    version = next((known for known in Version if number and number[1] == known.value), None)
    if not asked:
        version = belongs or default
    if version is None or (belongs is None and version not in supported):
        raise VersionNotSupportedError(
            f"A2A version {asked[:32]} is not supported; "
            f"send the header {VERSION_HEADER}: {' or '.join(supported)}",
            requested_version=asked[:32],
            supported_protocol_versions=[version.value for version in supported],
            default_protocol_version=default.value,
            header=VERSION_HEADER,
        )
    if belongs is None or (belongs is version and version in supported):
        return version
    if belongs in supported:
        why = f"but this request uses {version}; send the header {VERSION_HEADER}: {belongs}"
    else:
        why = f"and only {' and '.join(supported)} is supported here"
    raise VersionNotSupportedError(
        f"{what} belongs to A2A {belongs}, {why}",
        requested_version=version.value,
        required_version=belongs.value,
        supported_protocol_versions=[each.value for each in supported],
        header=VERSION_HEADER,
    )


# --- requests ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SendRequest:
    """A message, and how its sender wants the answer."""

    message: Message
    task_id: str | None
    context_id: str | None
    metadata: JsonObject | None
    accepted_output_modes: tuple[str, ...]
    history_length: int | None
    blocking: bool
    push: PushConfig | None = None


@dataclass(frozen=True, slots=True)
class PushRequest:
    """A push notification configuration for a task that exists."""

    task_id: str
    config: PushConfig


@dataclass(frozen=True, slots=True)
class PushRef:
    """The ids of a push notification configuration."""

    task_id: str
    config_id: str | None
    """None, which only 0.3 allows, means the oldest."""


def read_send(params: JsonObject) -> SendRequest:
    sent = check(_Send, params)
    given = sent.configuration or _Configuration()
    push = given.task_push_notification_config
    return send_request(
        sent.message,
        [part.part() for part in sent.message.parts],
        given,
        metadata=sent.metadata,
        blocking=not given.return_immediately,
        push=push and push.config("configuration.taskPushNotificationConfig."),
    )


def send_request(
    sent: "MessageBase",
    parts: list[Part],
    given: "ConfigurationBase",
    *,
    metadata: JsonObject | None,
    blocking: bool,
    push: PushConfig | None,
) -> SendRequest:
    """Build a request; ``sent`` and ``given`` hold the fields common to all versions."""
    message = Message(
        message_id=sent.message_id,
        role="user",
        parts=parts,
        metadata=sent.metadata,
        extensions=sent.extensions or [],
        reference_task_ids=sent.reference_task_ids or [],
    )
    return SendRequest(
        message=message,
        task_id=sent.task_id,
        context_id=sent.context_id,
        metadata=metadata,
        accepted_output_modes=tuple(given.accepted_output_modes or ()),
        history_length=given.history_length,
        blocking=blocking,
        push=push,
    )


def only_v1(params: Json) -> bool:
    """Whether the params of a send are certainly 1.0: 0.3 has another role or other parts."""
    match params:
        case {"message": {"role": "ROLE_USER", "parts": [*parts]} as message}:
            return "content" not in message and not any(
                isinstance(part, dict) and not part.keys().isdisjoint(("kind", "type", "file"))
                for part in parts
            )
        case _:
            return False


def read_list(params: JsonObject) -> Query:
    return check(TaskListParams, params).query()


def read_push(params: JsonObject) -> PushRequest:
    sent = check(_PushOfTask, params)
    return PushRequest(sent.task_id, sent.config())


def read_push_ref(params: JsonObject) -> PushRef:
    sent = check(PushRefParams, params)
    return PushRef(sent.task_id, sent.config_id)


def check(model: type[M], params: JsonObject, within: str = "") -> M:
    """Return params as their declared type; raise InvalidParamsError that names wrong fields.

    ``within`` is the path of the params in the request, which begins the names of the fields.
    """
    try:
        return model.model_validate(params)
    except ValidationError as error:
        details = error.errors(include_url=False, include_input=False)
    faults = tuple(replace(each, field=f"{within}{each.field}") for each in violations(details))
    text = f"Invalid parameters: {listed(faults, len(details))}"
    raise InvalidParamsError(text, violations=faults)


# --- values -----------------------------------------------------------------------------------


def _identifier(value: str) -> str:
    if not value.strip():
        raise wrong("must not be empty")
    if len(value) > _ID_LIMIT:
        raise wrong(f"must not be longer than {_ID_LIMIT} characters")
    if not value.isprintable():
        raise wrong("must not hold control characters")
    return value


def checked_id(field: str, value: str) -> str:
    """Return an id that did not come as a param, or raise InvalidParamsError."""
    try:
        return _identifier(value)
    except PydanticCustomError as error:
        raise InvalidParamsError.of(field, error.message()) from None


def _config_id(value: str | None) -> str | None:
    if value and "/" in value:
        raise wrong("must not hold a slash")
    return _identifier(value) if value else None


def _printable(value: str) -> str:
    """Require a text without control characters, which not every database can store."""
    if not value.isprintable():
        raise wrong("must not contain control characters")
    return value


def _sendable(most: int) -> AfterValidator:
    """Require a text that can be sent in a header unchanged; an empty text counts as None."""

    def check(value: str | None) -> str | None:
        if not value:
            return None
        if len(value) > most:
            raise wrong(f"must not be longer than {most} characters")
        if not (value.isascii() and value.isprintable()) or value != value.strip():
            raise wrong("must be visible ASCII characters, without spaces around them")
        return value

    return AfterValidator(check)


def _scheme(value: str | None) -> str | None:
    if value and not _TOKEN.fullmatch(value):
        raise wrong("must be the name of an authentication scheme, such as Bearer")
    return value or None


def _signing_key(value: str | None) -> str | None:
    """Require that a token with the prefix of a signing key is one (Standard Webhooks)."""
    if value is not None and value.startswith(SIGNING_KEY):
        try:
            size = len(base64.b64decode(value.removeprefix(SIGNING_KEY), validate=True))
        except ValueError:
            size = 0
        if not 24 <= size <= 64:
            raise wrong(f"begins with {SIGNING_KEY}, so the rest must be base64 of 24 to 64 bytes")
    return value


def _within(lowest: int, highest: int) -> AfterValidator:
    def check(value: int | None) -> int | None:
        if value is not None and not lowest <= value <= highest:
            raise wrong(f"must be from {lowest} to {highest}")
        return value

    return AfterValidator(check)


def _standard_base64(value: str | None) -> str | None:
    """Accept base64 in either alphabet, padded or not, and return the standard form."""
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


def timestamp(at: int) -> str:
    """Return a time, in milliseconds since the epoch, as A2A writes it."""
    seconds, milliseconds = divmod(at, 1000)
    return f"{datetime.fromtimestamp(seconds, UTC).isoformat()[:19]}.{milliseconds:03d}Z"


def user_role(spelling: Literal["ROLE_USER", "user"]) -> BeforeValidator:
    """Require the role of a caller, in the spelling of a version."""
    agent, other = ("ROLE_AGENT", "user") if spelling == "ROLE_USER" else ("agent", "ROLE_USER")

    def check(value: object) -> str:
        # ProtoJSON allows the number of an enum value too.
        if value == spelling or (value == 1 and spelling == "ROLE_USER" and value is not True):
            return spelling
        if value == agent:
            raise wrong(f"must be {spelling}: a caller cannot speak for the agent")
        if value == other:
            raise wrong(f"must be {spelling}: {other} belongs to another version or binding")
        raise wrong(f"must be {spelling}")

    return BeforeValidator(check)


def state_named(names: dict[str, State]) -> BeforeValidator:
    def check(value: object) -> State | None:
        if value in (None, "", "TASK_STATE_UNSPECIFIED"):
            return None
        if isinstance(value, str) and value in names:
            return names[value]
        raise wrong(f"must be one of {', '.join(names)}")

    return BeforeValidator(check)


def foreign(hint: str) -> BeforeValidator:
    """Refuse a field that belongs to another version or binding."""

    def refuse(_: object) -> None:
        raise wrong(hint)

    return BeforeValidator(refuse)


_Any = Annotated[Json, FREE]
Object = Annotated[JsonObject, FREE_OBJECT]
_Texts = Annotated[list[str], Field(fail_fast=True)]
_Id = Annotated[str, AfterValidator(_identifier)]
_OptionalId = Annotated[str | None, AfterValidator(lambda v: _identifier(v) if v else None)]
_Count = Annotated[int | None, _within(0, 2**31 - 1)]
Base64 = Annotated[str | None, AfterValidator(_standard_base64)]
_ConfigId = Annotated[str | None, AfterValidator(_config_id)]
Scheme = Annotated[str | None, AfterValidator(_scheme)]
STATE_NAMES = {f"TASK_STATE_{state.name}": state for state in State}

Never = SkipJsonSchema[None]
_ENVELOPE = "belongs to a JSON-RPC request; post those to the root URL, here send the params alone"
_Envelope = Annotated[Never, foreign(_ENVELOPE)]
_Kind = Annotated[Never, foreign("is A2A 0.3; in 1.0 a part has one of text, raw, url and data")]
_File = Annotated[
    Never, foreign("is A2A 0.3; in 1.0 write raw or url, with mediaType and filename")
]
Content = Annotated[Never, foreign("is the ProtoJSON of A2A 0.3; here the field is named parts")]
_Blocking = Annotated[Never, foreign("is A2A 0.3; in 1.0 write returnImmediately")]
_Push03 = Annotated[Never, foreign("is A2A 0.3; in 1.0 write taskPushNotificationConfig")]
_Nested = Annotated[
    Never, foreign("is A2A 0.3; in 1.0 the fields of the configuration stand beside taskId")
]
_Schemes = Annotated[Never, foreign("is A2A 0.3; in 1.0 write scheme")]


# --- declarations -----------------------------------------------------------------------------


class Params(BaseModel):
    """Base of all params. Their names, without the underscore, are published in the OpenAPI."""

    model_config = ConfigDict(
        frozen=True,
        extra="ignore",
        defer_build=True,
        alias_generator=AliasGenerator(
            validation_alias=lambda name: AliasChoices(to_camel(name), name)
        ),
    )


class NoParams(Params):
    """Of an operation that takes nothing; what comes nevertheless is ignored."""


class TaskParams(Params):
    task_id: _Id = Field(validation_alias="id")
    history_length: _Count = None


class TaskListParams(Params):
    context_id: _OptionalId = None
    status: Annotated[State | None, state_named(STATE_NAMES)] = None
    page_size: Annotated[int | None, _within(1, 100)] = None
    page_token: str | None = None
    history_length: _Count = None
    status_timestamp_after: Annotated[int | None, BeforeValidator(_milliseconds)] = None
    include_artifacts: StrictBool | None = None

    def query(self) -> Query:
        return Query(
            context_id=self.context_id,
            state=self.status,
            since=self.status_timestamp_after,
            size=self.page_size or 50,
            token=self.page_token or None,
            artifacts=bool(self.include_artifacts),
            history_length=self.history_length or 0,
        )


class MessageBase(Params):
    message_id: _Id
    context_id: _OptionalId = None
    task_id: _OptionalId = None
    metadata: Object | None = None
    extensions: _Texts | None = None
    reference_task_ids: _Texts | None = None


class ConfigurationBase(Params):
    accepted_output_modes: _Texts | None = None
    history_length: _Count = None


class SendBase(Params):
    metadata: Object | None = None
    jsonrpc: _Envelope = None
    method: _Envelope = None
    params: _Envelope = None


class _Part(Params):
    text: str | None = None
    raw: Base64 = None
    url: str | None = None
    data: _Any = None
    metadata: Object | None = None
    filename: str | None = None
    media_type: str | None = None
    kind: _Kind = None
    type: _Kind = None
    file: _File = None

    @model_validator(mode="after")
    def _exactly_one(self) -> Self:
        given = [kind for kind in _KINDS if self.__dict__[kind] is not None]
        if self.data is None and "data" in self.model_fields_set:
            given.append("data")  # null is a valid value of data
        if len(given) != 1:
            seen = f", not {' and '.join(given)}" if given else ""
            raise wrong(f"must have exactly one of text, raw, url and data{seen}")
        return self

    def part(self) -> Part:
        content = (self.text, self.raw, self.url, self.data)
        kind: Kind = "data"  # exactly one was given, and only data may be null
        for name, value in zip(_KINDS, content, strict=True):
            if value is not None:
                kind = name
        return Part(kind, *content, self.media_type or None, self.filename or None, self.metadata)


class _Message(MessageBase):
    role: Annotated[str, user_role("ROLE_USER")]
    parts: list[_Part] = Field(min_length=1, max_length=MAX_PARTS)
    content: Content = None


class PushParams(Params):
    id: _ConfigId = None
    url: Annotated[str, Field(min_length=1, max_length=_URL_LIMIT), AfterValidator(_printable)]
    token: Annotated[str | None, _sendable(1024), AfterValidator(_signing_key)] = None


class AuthenticationParams(Params):
    credentials: Annotated[str | None, _sendable(4096)] = None


class _Authentication(AuthenticationParams):
    scheme: Scheme = None
    schemes: _Schemes = None

    @model_validator(mode="after")
    def _complete(self) -> Self:
        if self.credentials and not self.scheme:
            raise wrong("is required with credentials", "scheme")
        return self


class _Push(PushParams):
    authentication: _Authentication | None = None
    push_notification_config: _Nested = None

    def config(self, within: str = "") -> PushConfig:
        sent = self.authentication or _Authentication()
        return PushConfig(
            self.url, self.id, sent.scheme, sent.credentials, self.token, Version.V1.value, within
        )


class _PushOfTask(_Push):
    task_id: _Id


class PushListParams(Params):
    task_id: _Id


class PushRefParams(PushListParams):
    config_id: Annotated[str, AfterValidator(_identifier), AfterValidator(_config_id)] = Field(
        validation_alias="id"
    )


PUSH_PARAMS: type[Params] = _PushOfTask
PUSH_BODY: type[Params] = _Push
"""The types of a push notification configuration, for the OpenAPI document."""


class _Configuration(ConfigurationBase):
    return_immediately: StrictBool | None = None
    task_push_notification_config: _Push | None = None
    blocking: _Blocking = None
    push_notification_config: _Push03 = None


class _Send(SendBase):
    message: _Message
    configuration: _Configuration | None = None


SEND_PARAMS: type[SendBase] = _Send
"""The type of a send's params, for the OpenAPI document."""
