"""A2A 0.3 as a pure adapter around 1.0.

The ``read_*`` functions check requests in the form of 0.3, so that an error names the fields that
the caller sent, and return the values of ``types``. ``downgrade`` rewrites results and events of
1.0 as 0.3. For ``peers``, which call servers of 0.3, ``downgrade_send`` rewrites a request and
``upgrade`` a result.

0.3 has two spellings: the JSON of its specification, and the ProtoJSON that clients of its REST
binding send and expect.
"""

import base64
from collections.abc import Callable
from enum import StrEnum
from typing import Annotated, Literal, Self

from pydantic import AliasChoices, Field, StrictBool, model_validator

from opencode_a2a.a2a.types import (
    MAX_PARTS,
    STATE_NAMES,
    AuthenticationParams,
    Base64,
    ConfigurationBase,
    Content,
    MessageBase,
    Never,
    Object,
    Params,
    PushListParams,
    PushParams,
    PushRef,
    PushRequest,
    Scheme,
    SendBase,
    SendRequest,
    TaskListParams,
    TaskParams,
    Version,
    check,
    foreign,
    send_request,
    state_named,
    user_role,
)
from opencode_a2a.events import Json, JsonObject
from opencode_a2a.jsonguard import as_object, items_in, text_in
from opencode_a2a.log.state import Query, State
from opencode_a2a.messages import Part, PushConfig
from opencode_a2a.validation import wrong


class Spelling(StrEnum):
    JSON = "json"
    PROTO = "proto"


def rest_spelling(body: JsonObject) -> Spelling:
    """Return which of the two spellings the body of a REST request uses."""
    message = body.get("message", body.get("request"))
    if isinstance(message, dict) and "content" not in message and "parts" in message:
        return Spelling.JSON
    return Spelling.PROTO


# --- requests ---------------------------------------------------------------------------------


def read_send(params: JsonObject) -> SendRequest:
    sent = check(_Send03, params)
    given = sent.configuration or _Configuration03()
    push = given.push_notification_config
    return send_request(
        sent.message,
        [part.part() for part in sent.message.parts],
        given,
        metadata=sent.metadata,
        blocking=given.blocking is not False,
        push=push and push.config("configuration.pushNotificationConfig."),
    )


def read_send_proto(params: JsonObject) -> SendRequest:
    sent = check(_SendProto, params)
    # ProtoJSON omits false: in a configuration, a missing field means false. Without any
    # configuration the caller still waits.
    given = sent.configuration or _ConfigurationProto(blocking=True)
    push = given.push_notification
    return send_request(
        sent.message,
        [part.part() for part in sent.message.parts],
        given,
        metadata=sent.metadata,
        blocking=bool(given.blocking),
        push=push and push.config("configuration.pushNotification."),
    )


def read_list(params: JsonObject) -> Query:
    return check(_ListParams03, params).query()


def read_push(params: JsonObject) -> PushRequest:
    sent = check(_PushOfTask03, params)
    return PushRequest(
        sent.task_id, sent.push_notification_config.config("pushNotificationConfig.")
    )


def read_push_proto(params: JsonObject) -> PushRequest:
    """Read the body of a REST request: ``{configId, config: {pushNotificationConfig}}``.

    Clients omit one or the other of the objects around the configuration.
    """
    sent, within = params, ""
    for name in ("config", "pushNotificationConfig", "push_notification_config"):
        if isinstance(inner := sent.get(name), dict):
            sent, within = inner, f"{within}{name}."
    named = params.get("configId", params.get("config_id"))
    if named and not sent.get("id"):
        sent = {**sent, "id": named}
    task_id = check(PushListParams, params).task_id
    return PushRequest(task_id, check(_Push03, sent, within).config(within))


def read_push_ref(params: JsonObject) -> PushRef:
    sent = check(PushRefParams03, params)
    return PushRef(sent.task_id, sent.push_notification_config_id)


def read_push_list(params: JsonObject) -> PushListParams:
    return PushListParams(task_id=check(TaskParams, params).task_id)


_STATE_NAMES = (
    {state.value.replace("_", "-"): state for state in State}
    | {state.name: state for state in State}
    | STATE_NAMES
    | {"cancelled": State.CANCELED, "TASK_STATE_CANCELLED": State.CANCELED}
)
_Part1 = Annotated[Never, foreign("is A2A 1.0; in 0.3 write kind file with a file object")]
_Returns = Annotated[Never, foreign("is A2A 1.0; in 0.3 write blocking")]
_Scheme1 = Annotated[Never, foreign("is A2A 1.0; in 0.3 write schemes")]
_Flat = Annotated[Never, foreign("is A2A 1.0; in 0.3 it stands in pushNotificationConfig")]


class _ListParams03(TaskListParams):
    status: Annotated[State | None, state_named(_STATE_NAMES)] = None


class _File03(Params):
    name: str | None = None
    mime_type: str | None = None
    bytes: Base64 = None
    uri: str | None = None

    @model_validator(mode="after")
    def _exactly_one(self) -> Self:
        if (self.bytes is None) == (self.uri is None):
            raise wrong("must have exactly one of bytes and uri")
        return self


class _Part03(Params):
    kind: Literal["text", "file", "data"]
    text: str | None = None
    file: _File03 | None = None
    data: Object | None = None
    metadata: Object | None = None
    raw: _Part1 = None
    url: _Part1 = None
    media_type: _Part1 = None

    @model_validator(mode="after")
    def _fits_kind(self) -> Self:
        if self.__dict__[self.kind] is None:
            raise wrong(f"is required in a part of kind {self.kind}", self.kind)
        return self

    def part(self) -> Part:
        if self.kind == "file" and (file := self.file) is not None:
            return _file(file.bytes, file.uri, file.mime_type, file.name, self.metadata)
        if self.kind == "text":
            return Part("text", text=self.text, metadata=self.metadata)
        return Part("data", data=self.data, metadata=self.metadata)


class _Message03(MessageBase):
    role: Annotated[str, user_role("user")]
    parts: list[_Part03] = Field(min_length=1, max_length=MAX_PARTS)
    content: Content = None


class _Authentication03(AuthenticationParams):
    schemes: list[Scheme] | None = Field(default=None, max_length=20)
    scheme: _Scheme1 = None


class _Push03(PushParams):
    authentication: _Authentication03 | None = None

    def config(self, within: str) -> PushConfig:
        sent = self.authentication or _Authentication03()
        known = {scheme.lower(): scheme for scheme in reversed(sent.schemes or []) if scheme}
        # Bearer or Basic if they are among the schemes, else the first one.
        scheme = known.get("bearer") or known.get("basic") or next(reversed(known.values()), None)
        return PushConfig(
            self.url, self.id, scheme, sent.credentials, self.token, Version.V03.value, within
        )


class _PushOfTask03(PushListParams):
    push_notification_config: _Push03
    url: _Flat = None


class PushRefParams03(TaskParams):
    push_notification_config_id: str | None = None


class _PushProto(Params):
    push_notification_config: _Push03


class _PushBodyProto(Params):
    config_id: str | None = None
    config: _PushProto


PUSH_PARAMS: type[Params] = _PushOfTask03
PUSH_BODY: type[Params] = _PushBodyProto
"""The types of a push notification configuration, for the OpenAPI document."""


class _Configuration03(ConfigurationBase):
    blocking: StrictBool | None = None
    push_notification_config: _Push03 | None = None
    return_immediately: _Returns = None


class _Send03(SendBase):
    message: _Message03
    configuration: _Configuration03 | None = None


class _FileProto(Params):
    file_with_uri: str | None = None
    file_with_bytes: Base64 = None
    mime_type: str | None = None
    name: str | None = None

    @model_validator(mode="after")
    def _exactly_one(self) -> Self:
        if (self.file_with_bytes is None) == (self.file_with_uri is None):
            raise wrong("must have exactly one of fileWithBytes and fileWithUri")
        return self


class _DataProto(Params):
    data: Object


class _PartProto(Params):
    text: str | None = None
    file: _FileProto | None = None
    data: _DataProto | None = None
    metadata: Object | None = None
    raw: _Part1 = None
    url: _Part1 = None

    @model_validator(mode="after")
    def _exactly_one(self) -> Self:
        if [self.text, self.file, self.data].count(None) != 2:
            raise wrong("must have exactly one of text, file and data")
        return self

    def part(self) -> Part:
        if (file := self.file) is not None:
            raw = file.file_with_bytes and _decoded_once(file.file_with_bytes)
            return _file(raw, file.file_with_uri, file.mime_type, file.name, self.metadata)
        if self.data is not None:
            return Part("data", data=self.data.data, metadata=self.metadata)
        return Part("text", text=self.text, metadata=self.metadata)


class _MessageProto(MessageBase):
    role: Annotated[str, user_role("ROLE_USER")]
    parts: list[_PartProto] = Field(
        validation_alias="content", title="Content", min_length=1, max_length=MAX_PARTS
    )


class _ConfigurationProto(ConfigurationBase):
    blocking: StrictBool | None = None
    push_notification: _Push03 | None = None
    return_immediately: _Returns = None


class _SendProto(SendBase):
    message: _MessageProto = Field(validation_alias=AliasChoices("message", "request"))
    configuration: _ConfigurationProto | None = None


SEND_PARAMS: dict[Spelling, type[SendBase]] = {Spelling.JSON: _Send03, Spelling.PROTO: _SendProto}
"""The types of a send's params, for the OpenAPI document."""


def _file(
    raw: str | None,
    url: str | None,
    media_type: str | None,
    name: str | None,
    metadata: JsonObject | None,
) -> Part:
    kind = "url" if raw is None else "raw"
    return Part(kind, None, raw, url, None, media_type or None, name or None, metadata)


_MAGIC = (b"\x89PNG", b"\xff\xd8\xff", b"GIF8", b"RIFF", b"%PDF-")


def _decoded_once(raw: str) -> str:
    """Remove the second layer of base64 that the Python client of 0.3 REST puts around bytes.

    It counts as such a layer only if the decoded bytes are text, an image or a PDF.
    """
    try:
        inner = base64.b64decode(raw).decode("ascii")
        data = base64.b64decode(inner, validate=True)
        known = data.startswith(_MAGIC) or "\0" not in data.decode()
    except ValueError:
        return raw
    return inner if known else raw


# --- results and events -----------------------------------------------------------------------

_KINDS = {
    "task": "task",
    "tasks": "task",
    "statusUpdate": "status-update",
    "artifactUpdate": "artifact-update",
    "message": "message",
    "history": "message",
}
"""The ``kind`` of an object in 0.3, by the name of the field that holds it in 1.0."""
_OBJECTS = frozenset({*_KINDS, "status", "artifact", "artifacts", "parts", "content"})
_FILE_NAMES = {"mediaType": "mimeType", "filename": "name"}


def downgrade(
    result: JsonObject, spelling: Spelling, *, bare: bool = False, final: bool = False
) -> Json:
    """Return the result of an operation, or an event of a stream, in the form of 0.3.

    ``bare`` is the form of JSON-RPC: the object itself, whose field ``kind`` says what it is, and
    not an object that holds it under a name. ``final``: the stream ends with this status update.
    """
    match result:
        case {"statusUpdate": dict() as update}:
            result = {"statusUpdate": {**update, "final": final}}
        case {"id": _, "status": _}:
            return downgrade_object("task", result, spelling)
        case {"taskId": str(), "url": str()}:
            return _push_config(result, spelling)
        case {"configs": [*configs]}:
            made: list[Json] = [_push_config(as_object(one), spelling) for one in configs]
            return made if bare else {"configs": made}
        case {} if not result and bare:
            return None  # the result of a deletion
        case _:
            pass
    changed = downgrade_object("", result, spelling)
    if bare and len(changed) == 1:
        (inner,) = changed.values()
        if isinstance(inner, dict):
            return inner
    return changed


def _push_config(config: JsonObject, spelling: Spelling) -> JsonObject:
    inner: JsonObject = {"id": config["id"], "url": config["url"]}
    if scheme := text_in(as_object(config.get("authentication")), "scheme"):
        inner["authentication"] = {"schemes": [scheme]}
    if spelling is Spelling.JSON:
        return {"taskId": config["taskId"], "pushNotificationConfig": inner}
    name = f"tasks/{config['taskId']}/pushNotificationConfigs/{config['id']}"
    return {"name": name, "pushNotificationConfig": inner}


def downgrade_object(name: str, value: JsonObject, spelling: Spelling) -> JsonObject:
    """Return an object of 1.0 in the form of 0.3; ``name`` is the field that holds it."""
    if name == "parts":
        return part(value, spelling)
    changed = _inside(value, lambda inner, one: downgrade_object(inner, one, spelling))
    if spelling is Spelling.JSON and name in _KINDS:
        changed = {"kind": _KINDS[name], **changed}
    if name == "status":
        changed["state"] = state_name(STATE_NAMES[str(value["state"])], spelling)
    elif name in ("message", "history") and spelling is Spelling.JSON:
        changed["role"] = str(value["role"]).removeprefix("ROLE_").lower()
    elif name in ("message", "history"):
        changed["content"] = changed.pop("parts")
        changed.pop("referenceTaskIds", None)
    return changed


def _inside(value: JsonObject, rewrite: Callable[[str, JsonObject], JsonObject]) -> JsonObject:
    """Rewrite the objects in the fields that A2A defines for them, and keep everything else."""
    changed: JsonObject = {}
    for name, inner in value.items():
        if name in _OBJECTS and isinstance(inner, dict):
            changed[name] = rewrite(name, inner)
        elif name in _OBJECTS and isinstance(inner, list):
            changed[name] = [rewrite(name, one) for one in inner if isinstance(one, dict)]
        else:
            changed[name] = inner
    return changed


def state_name(state: State, spelling: Spelling) -> str:
    if spelling is Spelling.JSON:
        return state.value.replace("_", "-")
    return "TASK_STATE_CANCELLED" if state is State.CANCELED else f"TASK_STATE_{state.name}"


def part(sent: JsonObject, spelling: Spelling) -> JsonObject:
    named: dict[str, Json] = {new: sent[old] for old, new in _FILE_NAMES.items() if old in sent}
    proto = spelling is Spelling.PROTO
    changed: JsonObject
    match sent:
        case {"text": str() as text}:
            if not proto and "name" in named and named.get("mimeType") not in (None, "text/plain"):
                # A text part has no fields for a name and a type, but a file has.
                raw = base64.b64encode(text.encode()).decode()
                changed = {"kind": "file", "file": {"bytes": raw, **named}}
            else:
                changed = {"kind": "text", "text": text}
        case {"data": data}:
            # 0.3 allows only objects as data.
            value: JsonObject = data if isinstance(data, dict) else {"value": data}
            changed = {"kind": "data", "data": {"data": value} if proto else value}
        case {"raw": raw}:
            # Clients disagree whether bytes are base64 once or twice in ProtoJSON, and some fail
            # on the other form. All of them understand a data: URL.
            url = f"data:{named.get('mimeType', 'application/octet-stream')};base64,{raw}"
            content: JsonObject = {"fileWithUri": url} if proto else {"bytes": raw}
            changed = {"kind": "file", "file": {**content, **named}}
        case _:
            content = {"fileWithUri" if proto else "uri": sent["url"]}
            changed = {"kind": "file", "file": {**content, **named}}
    if proto:
        del changed["kind"]
    return changed | ({"metadata": sent["metadata"]} if "metadata" in sent else {})


# --- calling a server of 0.3 ------------------------------------------------------------------

_NAMES = {kind: name for name, kind in reversed(_KINDS.items())}
_CONTENT_NAMES = {"bytes": "raw", "fileWithBytes": "raw", "uri": "url", "fileWithUri": "url"}
_PART_NAMES = _CONTENT_NAMES | {new: old for old, new in _FILE_NAMES.items()}


def downgrade_send(params: JsonObject, spelling: Spelling) -> JsonObject:
    """Return the params of a send in the form of 0.3, for a server of that version."""
    sent, given = as_object(params.get("message")), as_object(params.get("configuration"))
    changed = downgrade_object("message", {**sent, "parts": []}, spelling)
    parts: list[Json] = []
    for given_part in items_in(sent, "parts"):
        written = part(given_part, spelling)
        if spelling is Spelling.PROTO and (raw := text_in(given_part, "raw")) is not None:
            # The SDK writes and reads base64 within base64.
            file = {**as_object(written.get("file"))}
            file["fileWithBytes"] = base64.b64encode(raw.encode()).decode()
            del file["fileWithUri"]
            written["file"] = file
        parts.append(written)
    changed["content" if spelling is Spelling.PROTO else "parts"] = parts
    blocking = given.get("returnImmediately") is not True
    return {"message": changed, "configuration": {"blocking": blocking}}


def upgrade_event(result: JsonObject) -> JsonObject:
    """Return the answer to a send, or an event of a stream, in the form of 1.0."""
    if (name := _NAMES.get(text_in(result, "kind") or "")) is not None:
        return upgrade({name: result})
    return upgrade({"message": result["msg"]} if "msg" in result else result)


def upgrade(result: JsonObject, name: str = "") -> JsonObject:
    """Return a result of a 0.3 server in the form of 1.0; servers mix both spellings.

    ``name`` is the field that holds the object.
    """
    if name in ("parts", "content"):
        return _upgrade_part(result)
    changed = _inside(result, lambda inner, one: upgrade(one, inner))
    if name == "status":
        state = _STATE_NAMES.get(text_in(result, "state") or "")
        changed["state"] = f"TASK_STATE_{'UNSPECIFIED' if state is None else state.name}"
    elif name in ("message", "history"):
        if "content" in changed:
            changed["parts"] = changed.pop("content")
        is_user = result.get("role") in ("user", "ROLE_USER")
        changed["role"] = "ROLE_USER" if is_user else "ROLE_AGENT"
    return changed


def _upgrade_part(sent: JsonObject) -> JsonObject:
    if isinstance(file := sent.get("file"), dict):
        changed = {new: file[old] for old, new in _PART_NAMES.items() if old in file}
    else:
        changed = {name: sent[name] for name in ("text", "data") if name in sent}
        if "kind" not in sent and isinstance(data := changed.get("data"), dict) and "data" in data:
            changed["data"] = data["data"]  # ProtoJSON nests it one level deeper
    return changed | ({"metadata": sent["metadata"]} if "metadata" in sent else {})
