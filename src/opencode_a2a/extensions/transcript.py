"""OpenCode's stored messages as A2A messages, free of either line's spelling.

Text, files, tool calls and what was given to sub-agents are kept; reasoning, steps and patches are
not part of what was said.
"""

import base64
from collections.abc import Iterator

from opencode_a2a.events import Json, JsonObject
from opencode_a2a.media import UnfitError, read_data_url
from opencode_a2a.messages import Message, Part
from opencode_a2a.opencode.types import (
    AgentPart,
    AssistantMessage,
    FilePart,
    MessageWithParts,
    SubtaskPart,
    TextPart,
    ToolCompleted,
    ToolPart,
    UserMessage,
)


def read_message(stored: MessageWithParts) -> Message:
    parts = [part for one in stored.parts for part in _parts(one)]
    if not parts:
        # Nothing but what OpenCode added itself; a message without parts is none.
        texts = [part.text for part in stored.parts if isinstance(part, TextPart)]
        parts = [Part("text", text="\n".join(texts))]
    info = stored.info
    return Message(
        message_id=info.id,
        role="user" if isinstance(info, UserMessage) else "agent",
        parts=parts,
        metadata={"shared": _shared(info), "opencode": _about(info)},
    )


def _parts(part: object) -> Iterator[Part]:
    match part:
        case TextPart() if not part.synthetic and not part.ignored and part.text:
            yield Part("text", text=part.text)
        case FilePart():
            yield _file(part)
        case AgentPart() | SubtaskPart():
            yield Part("data", data=_given(part), media_type="application/json")
        case ToolPart():
            yield Part(
                "data",
                data=_tool(part),
                media_type="application/json",
                metadata={"shared": {"stream": {"block_type": "tool_call"}}},
            )
            if isinstance(part.state, ToolCompleted):
                yield from map(_file, part.state.attachments)
        case _:
            pass


def _file(part: FilePart) -> Part:
    if part.url.startswith(("http://", "https://")):
        return Part("url", url=part.url, media_type=part.mime, filename=part.filename)
    try:
        data = read_data_url(part.url)
    except UnfitError:
        # A file of OpenCode's machine: its name may be known, its place not.
        known: JsonObject = {"type": "file", "filename": part.filename, "mime": part.mime}
        return Part("data", data=known, media_type="application/json")
    raw = base64.b64encode(data).decode()
    return Part("raw", raw=raw, media_type=part.mime, filename=part.filename)


def _given(part: AgentPart | SubtaskPart) -> JsonObject:
    """Return a part as prompts have it, without the ids that OpenCode adds."""
    own = {"id", "session_id", "message_id"}
    return part.model_dump(mode="json", by_alias=True, exclude=own, exclude_none=True)


def _tool(part: ToolPart) -> JsonObject:
    state = dict(part.state)
    fields = ("title", "input", "output", "error")
    known = {name: state[name] for name in fields if state.get(name) is not None}
    return {"call_id": part.call_id, "tool": part.tool, "status": part.state.status, **known}


def _shared(info: UserMessage | AssistantMessage) -> JsonObject:
    shared: JsonObject = {"session": {"id": info.session_id}}
    model = info if isinstance(info, AssistantMessage) else info.model
    if model and model.provider_id and model.model_id:
        shared["model"] = {"providerID": model.provider_id, "modelID": model.model_id}
    return shared


def _about(info: UserMessage | AssistantMessage) -> JsonObject:
    about: dict[str, Json] = {"agent": info.agent, "created": info.time.created}
    if isinstance(info, AssistantMessage):
        about |= {
            "parent_id": info.parent_id,
            "completed": info.time.completed,
            "finish": info.finish,
            "error": info.error and {"type": info.error.name, "message": info.error.data.message},
            "summary": info.summary or None,
        }
    return {name: value for name, value in about.items() if value is not None}
