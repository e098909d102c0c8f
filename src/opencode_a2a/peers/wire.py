"""The A2A wire as a caller meets it: both protocol lines, JSON-RPC and HTTP+JSON.

``peers.client`` builds its requests and reads the answers here. Reading is tolerant: unknown
fields are ignored, and 0.3 is understood as its text writes it and as its protobuf does, since
servers of both kinds exist. Nothing here knows HTTP or what an answer is used for.
"""

from base64 import b64encode
from dataclasses import dataclass, field
from enum import Enum, StrEnum
from urllib.parse import quote, urlencode

import orjson

from opencode_a2a.errors import ParseError
from opencode_a2a.events import Json, JsonObject
from opencode_a2a.jsonguard import decode, whole_characters
from opencode_a2a.messages import Message, Part
from opencode_a2a.peers.errors import ErrorCode, PeerError
from opencode_a2a.peers.hints import as_object, items_in, text_in


class Binding(StrEnum):
    JSONRPC = "JSONRPC"
    HTTP_JSON = "HTTP+JSON"


class Version(StrEnum):
    V1 = "1.0"
    V03 = "0.3"


class State(StrEnum):
    """The states of both lines, in the words of 0.3."""

    SUBMITTED = "submitted"
    WORKING = "working"
    INPUT_REQUIRED = "input-required"
    AUTH_REQUIRED = "auth-required"
    COMPLETED = "completed"
    FAILED = "failed"
    CANCELED = "canceled"
    REJECTED = "rejected"
    UNKNOWN = "unknown"

    @property
    def ended(self) -> bool:
        return self in (State.COMPLETED, State.FAILED, State.CANCELED, State.REJECTED)

    @property
    def waits(self) -> bool:
        return self in (State.INPUT_REQUIRED, State.AUTH_REQUIRED)

    @property
    def settled(self) -> bool:
        return self.ended or self.waits


@dataclass(frozen=True, slots=True)
class Interface:
    """One address of an agent, and how it is spoken to there."""

    url: str
    binding: Binding
    line: Version
    tenant: str | None = None

    @property
    def proto03(self) -> bool:
        """The 0.3 servers that exist read protobuf's JSON on HTTP, and the text's JSON on RPC."""
        return self.line is Version.V03 and self.binding is Binding.HTTP_JSON


@dataclass(frozen=True, slots=True)
class Card:
    name: str
    description: str
    version: str
    streaming: bool
    interfaces: tuple[Interface, ...]
    """Those that can be spoken here, in the agent's order of preference."""


@dataclass(frozen=True, slots=True)
class Status:
    state: State
    message: Message | None = None
    timestamp: str | None = None

    @property
    def text(self) -> str | None:
        return (self.message.text or None) if self.message else None


@dataclass(frozen=True, slots=True)
class Artifact:
    artifact_id: str
    parts: list[Part]
    name: str | None = None
    metadata: JsonObject = field(default_factory=dict[str, Json])


@dataclass(frozen=True, slots=True)
class Task:
    task_id: str
    context_id: str | None
    status: Status
    artifacts: list[Artifact] = field(default_factory=list[Artifact])
    history: list[Message] = field(default_factory=list[Message])
    metadata: JsonObject = field(default_factory=dict[str, Json])


@dataclass(frozen=True, slots=True)
class Update:
    """What is new of a task; an answer that is a message and makes no task has no task id."""

    task_id: str | None
    context_id: str | None
    status: Status | None = None
    artifact: Artifact | None = None
    append: bool = False
    metadata: JsonObject = field(default_factory=dict[str, Json])


Event = Task | Update


class Operation(Enum):
    """Method of 1.0, method of 0.3, verb, path."""

    SEND = ("SendMessage", "message/send", "POST", "/message:send")
    STREAM = ("SendStreamingMessage", "message/stream", "POST", "/message:stream")
    GET = ("GetTask", "tasks/get", "GET", "/tasks/{id}")
    LIST = ("ListTasks", "tasks/list", "GET", "/tasks")
    CANCEL = ("CancelTask", "tasks/cancel", "POST", "/tasks/{id}:cancel")
    SUBSCRIBE = ("SubscribeToTask", "tasks/resubscribe", "POST", "/tasks/{id}:subscribe")


@dataclass(frozen=True, slots=True)
class Request:
    verb: str
    url: str
    body: bytes | None


class MalformedError(PeerError):
    """The peer sent something that is not A2A."""

    def __init__(self, problem: str) -> None:
        super().__init__(ErrorCode.PROTOCOL, f"the agent's answer is no A2A: {problem}")


def request(at: Interface, operation: Operation, params: JsonObject) -> Request:
    """Return the HTTP request for an operation; ``params["id"]`` names the task, if any."""
    v1_method, v03_method, verb, path = operation.value
    if at.binding is Binding.JSONRPC:
        tenant: JsonObject = {"tenant": at.tenant} if at.tenant else {}
        body: JsonObject = {
            "jsonrpc": "2.0",
            "id": 1,
            "method": v1_method if at.line is Version.V1 else v03_method,
            "params": tenant | params,
        }
        return Request("POST", at.url, orjson.dumps(body))
    rest = {key: value for key, value in params.items() if key != "id"}
    url = _rest_base(at) + path.replace("{id}", quote(str(params.get("id", "")), safe=""))
    if verb == "GET":
        return Request(verb, f"{url}?{urlencode(rest)}" if rest else url, None)
    return Request(verb, url, orjson.dumps(rest) if rest else None)


def _rest_base(at: Interface) -> str:
    base = at.url.rstrip("/")
    if at.line is Version.V03:
        return base if base.endswith("/v1") else f"{base}/v1"
    return f"{base}/{quote(at.tenant, safe='')}" if at.tenant else base


def send_params(
    at: Interface, message: Message, task_id: str | None, context_id: str | None, *, waits: bool
) -> JsonObject:
    """Return the params of a send, which may have its answer wait for the end of the task."""
    text03 = at.line is Version.V03 and not at.proto03
    body: JsonObject = {
        "messageId": message.message_id,
        "role": "user" if text03 else "ROLE_USER",
        "content" if at.proto03 else "parts": [_part(at, part) for part in message.parts],
        "kind": "message" if text03 else None,
        "taskId": task_id,
        "contextId": context_id,
        "metadata": message.metadata,
    }
    waiting: JsonObject = (
        {"blocking": waits} if at.line is Version.V03 else {"returnImmediately": not waits}
    )
    return {"message": _given(body), "configuration": waiting}


def _part(at: Interface, part: Part) -> JsonObject:
    """Write a part: 1.0 has it flat, 0.3 a file in an object of its own."""
    extra = _given({"metadata": part.metadata})
    values: JsonObject = {"text": part.text, "raw": part.raw, "url": part.url, "data": part.data}
    content = values[part.kind]
    if at.line is Version.V1:
        named: JsonObject = {"mediaType": part.media_type, "filename": part.filename}
        return {part.kind: content} | _given(named) | extra
    kind = "file" if part.kind in _FILE_KEYS else part.kind
    if kind == "file":
        if at.proto03 and part.raw is not None:
            # Base64 around base64: so the SDK writes and reads it.
            content = b64encode(part.raw.encode()).decode()
        named = {"mimeType": part.media_type, "name": part.filename}
        file: JsonObject = {_FILE_KEYS[part.kind][at.proto03]: content}
        content = file | _given(named)
    elif at.proto03 and kind == "data":
        content = {"data": content}
    body: JsonObject = {kind: content} if at.proto03 else {"kind": kind, kind: content}
    return body | extra


_FILE_KEYS = {"raw": ("bytes", "fileWithBytes"), "url": ("uri", "fileWithUri")}
"""How 0.3 names what a file holds, in its text and in its protobuf."""


def _given(value: JsonObject) -> JsonObject:
    return {key: item for key, item in value.items() if item}


def read_json(data: bytes) -> JsonObject:
    """Parse one JSON object from a peer, refusing what no honest one sends."""
    try:
        value = decode(whole_characters(data))
    except ParseError as error:
        raise MalformedError(error.message) from error
    if not isinstance(value, dict):
        raise MalformedError("not a JSON object")
    return value


def read_card(value: JsonObject) -> Card:
    """Read a card of either line; a hybrid card's 1.0 list comes first."""
    listed = items_in(value, "supportedInterfaces")
    version = text_in(value, "protocolVersion")
    if not listed:
        main: JsonObject = {"url": value.get("url"), "transport": value.get("preferredTransport")}
        listed = [main, *items_in(value, "additionalInterfaces")]
    found = (_interface(item, version) for item in listed)
    name = text_in(value, "name")
    if name is None:
        raise PeerError(ErrorCode.INVALID_CARD, "the card has no name")
    return Card(
        name,
        text_in(value, "description") or "",
        text_in(value, "version") or "",
        as_object(value.get("capabilities")).get("streaming") is True,
        tuple(dict.fromkeys(interface for interface in found if interface)),
    )


def _interface(item: JsonObject, card_version: str | None) -> Interface | None:
    url = text_in(item, "url")
    binding = text_in(item, "protocolBinding", "transport") or "JSONRPC"
    version = text_in(item, "protocolVersion") or card_version or "0.3"
    line = (
        Version.V1
        if version.startswith("1.")
        else Version.V03
        if version.startswith("0.")
        else None
    )
    known = read_binding(binding)
    if not url or not line or not known:
        return None
    return Interface(url, known, line, text_in(item, "tenant"))


def read_binding(name: str) -> Binding | None:
    """Understand the usual spellings of a binding; None for one that is not spoken here."""
    letters = "".join(c for c in name.upper() if c.isalpha())
    return {
        "JSONRPC": Binding.JSONRPC,
        "HTTPJSON": Binding.HTTP_JSON,
        "REST": Binding.HTTP_JSON,
    }.get(letters)


_EVENT_KEYS = ("task", "statusUpdate", "artifactUpdate", "message", "msg")


def read_event(value: JsonObject) -> Event:
    """Read what a send or a stream carries, whichever line spelt it."""
    tag = text_in(value, "kind")
    if tag is None:
        tag = next((key for key in _EVENT_KEYS if key in value), "")
        value = as_object(value.get(tag))
    context_id, metadata = text_in(value, "contextId"), as_object(value.get("metadata"))
    match tag:
        case "task":
            return read_task(value)
        case "statusUpdate" | "status-update":
            status = _status(value.get("status"))
            return Update(_required(value, "taskId"), context_id, status, metadata=metadata)
        case "artifactUpdate" | "artifact-update":
            artifact = _artifact(as_object(value.get("artifact")), metadata)
            append = value.get("append") is True
            return Update(_required(value, "taskId"), context_id, None, artifact, append)
        case "message" | "msg":
            said = _message(value)
            whole = Artifact(said.message_id, said.parts)
            return Update(None, context_id, Status(State.COMPLETED), whole)
        case _:
            raise MalformedError("neither a task nor a message nor an update")


def read_task(value: JsonObject) -> Task:
    return Task(
        _required(value, "id"),
        text_in(value, "contextId"),
        _status(value.get("status")),
        [_artifact(item, {}) for item in items_in(value, "artifacts")],
        [_message(item) for item in items_in(value, "history")],
        as_object(value.get("metadata")),
    )


def read_tasks(value: JsonObject) -> list[Task]:
    return [read_task(item) for item in items_in(value, "tasks")]


def _status(value: Json) -> Status:
    status = as_object(value)
    message = status.get("message")
    return Status(
        _state(text_in(status, "state")),
        _message(message) if isinstance(message, dict) else None,
        text_in(status, "timestamp"),
    )


def _state(name: str | None) -> State:
    plain = (name or "").removeprefix("TASK_STATE_").lower().replace("_", "-")
    try:
        return State("canceled" if plain == "cancelled" else plain)
    except ValueError:
        return State.UNKNOWN


def _artifact(value: JsonObject, around: JsonObject) -> Artifact:
    return Artifact(
        text_in(value, "artifactId") or "",
        _parts(value, "parts"),
        text_in(value, "name"),
        around | as_object(value.get("metadata")),
    )


def _message(value: JsonObject) -> Message:
    return Message(
        text_in(value, "messageId") or "",
        "user" if value.get("role") in ("user", "ROLE_USER") else "agent",
        _parts(value, "parts", "content"),
        as_object(value.get("metadata")),
    )


def _parts(value: JsonObject, *keys: str) -> list[Part]:
    items = (item for key in keys for item in items_in(value, key))
    return [part for item in items if (part := _read_part(item))]


def _read_part(value: JsonObject) -> Part | None:
    flat = as_object(value.get("file")) | value
    named = (text_in(flat, "mediaType", "mimeType"), text_in(flat, "filename", "name"))
    metadata = as_object(value.get("metadata")) or None
    if (text := text_in(flat, "text")) is not None:
        return Part("text", text, None, None, None, *named, metadata)
    if (raw := text_in(flat, "raw", "bytes", "fileWithBytes")) is not None:
        return Part("raw", None, raw, None, None, *named, metadata)
    if (url := text_in(flat, "url", "uri", "fileWithUri")) is not None:
        return Part("url", None, None, url, None, *named, metadata)
    if "data" in value:
        return Part("data", None, None, None, value["data"], *named, metadata)
    return None


def _required(value: JsonObject, key: str) -> str:
    text = text_in(value, key)
    if not text:
        raise MalformedError(f"{key} is missing")
    return text
