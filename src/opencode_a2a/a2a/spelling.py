"""Messages, parts and states as each dialect spells them. Pure.

``render`` decides what is told, this module how it is written.
"""

import base64

import orjson

from opencode_a2a.a2a.metadata import known
from opencode_a2a.a2a.versions import Dialect
from opencode_a2a.events import JsonObject
from opencode_a2a.media import accepts
from opencode_a2a.messages import Message, Part
from opencode_a2a.tasks.state import State, TaskRef


def fit(parts: list[Part], modes: tuple[str, ...] | None) -> list[Part]:
    """Return what of the parts the caller accepts; data becomes text rather than nothing."""
    if modes is None:
        return parts
    fitted = [_fit(part, modes) for part in parts]
    return [part for part in fitted if part is not None]


def _fit(part: Part, modes: tuple[str, ...]) -> Part | None:
    usual = {"text": "text/plain", "data": "application/json"}
    media_type = usual.get(part.kind, "application/octet-stream")
    if part.kind != "data":
        media_type = part.media_type or media_type
    if accepts(modes, media_type):
        return part
    if part.kind != "data":
        return None
    text = orjson.dumps(part.data, option=orjson.OPT_SORT_KEYS).decode()
    return Part("text", text=text, metadata=part.metadata)


def spell_part(part: Part, dialect: Dialect) -> JsonObject:
    spelled = _PARTS[dialect](part)
    if part.metadata is not None:
        spelled["metadata"] = part.metadata
    return spelled


def _part(part: Part) -> JsonObject:
    content: JsonObject = {
        "text": part.text,
        "raw": part.raw,
        "url": part.url,
        "data": part.data,
    }
    named = known(mediaType=part.media_type, filename=part.filename)
    return {part.kind: content[part.kind], **named}


def _part03(part: Part) -> JsonObject:
    part = _as_file(part)
    match part.kind:
        case "text":
            return {"kind": "text", "text": part.text}
        case "data":
            return {"kind": "data", "data": _as_object(part)}
        case _:
            rest = known(mimeType=part.media_type, name=part.filename)
            return {"kind": "file", "file": known(bytes=part.raw, uri=part.url) | rest}


def _part_proto(part: Part) -> JsonObject:
    match part.kind:
        case "text":
            return {"text": part.text}
        case "data":
            return {"data": {"data": _as_object(part)}}
        case _:
            # Clients disagree whether bytes are base64 once or twice here, and some choke on
            # the other way; a caller knows the bytes that it sent.
            raw = None if part.raw is None else ""
            rest = known(mimeType=part.media_type, name=part.filename)
            return {"file": known(fileWithBytes=raw, fileWithUri=part.url) | rest}


_PARTS = {Dialect.V1: _part, Dialect.V03: _part03, Dialect.PROTO03: _part_proto}


def _as_file(part: Part) -> Part:
    """Make a file of text with a name and a type of its own: a text part has no place for them."""
    if part.text is None or part.filename is None or part.media_type in (None, "text/plain"):
        return part
    raw = base64.b64encode(part.text.encode()).decode()
    return Part("raw", raw=raw, media_type=part.media_type, filename=part.filename)


def _as_object(part: Part) -> JsonObject:
    # 0.3 knows data only as an object
    return part.data if isinstance(part.data, dict) else {"value": part.data}


def spell_message(message: Message, ref: TaskRef, dialect: Dialect) -> JsonObject | None:
    """Return a message of a task; None when the caller accepts nothing of it."""
    parts = [spell_part(part, dialect) for part in fit(message.parts, ref.output_modes)]
    if not parts:
        return None
    spelled: JsonObject = {
        "messageId": message.message_id,
        "contextId": ref.context_id,
        "taskId": ref.id,
        "role": message.role if dialect is Dialect.V03 else f"ROLE_{message.role.upper()}",
        "content" if dialect is Dialect.PROTO03 else "parts": [*parts],
    }
    if dialect is Dialect.V03:
        spelled["kind"] = "message"
    if message.metadata is not None:
        spelled["metadata"] = message.metadata
    if message.extensions:
        spelled["extensions"] = [*message.extensions]
    if message.reference_task_ids and dialect is not Dialect.PROTO03:
        spelled["referenceTaskIds"] = [*message.reference_task_ids]
    return spelled


def spell_state(state: State, dialect: Dialect) -> str:
    match dialect:
        case Dialect.V1:
            return f"TASK_STATE_{state.name}"
        case Dialect.V03:
            return state.value.replace("_", "-")
        case Dialect.PROTO03:
            name = "CANCELLED" if state is State.CANCELED else state.name
            return f"TASK_STATE_{name}"
