"""The messages of a session, in both directions.

In: prompts, commands and shell commands of callers, in OpenCode's spelling but checked more
strictly. OpenCode gets files as bytes only, in a form that it can handle: those behind http(s) URLs
are fetched here, and no other kind of URL is passed on. Out: OpenCode's stored sessions and
messages as tasks and messages of A2A.
"""

import base64
from collections.abc import Iterator, Sequence
from typing import Annotated, Literal, Self

from pydantic import ConfigDict, Field, RootModel, model_validator

from opencode_a2a.a2a import render, v03
from opencode_a2a.a2a.types import Version, timestamp
from opencode_a2a.a2a.v03 import Spelling
from opencode_a2a.config import OpenCodeSettings
from opencode_a2a.errors import MAX_VIOLATIONS, InvalidFieldError, InvalidParamsError, Violation
from opencode_a2a.events import Json, JsonObject
from opencode_a2a.extensions.params import (
    Body,
    LongText,
    MessageRef,
    Number,
    PartRef,
    Text,
    refusal,
)
from opencode_a2a.ids import ContextId, Principal, SessionId, TaskId, scoped_id
from opencode_a2a.log.state import TaskRef
from opencode_a2a.media import UnfitError, fit_file, read_data_url
from opencode_a2a.messages import Message
from opencode_a2a.messages import Part as MessagePart
from opencode_a2a.net.egress import Fetch, Fetched, TooManyFilesError
from opencode_a2a.opencode import types as wire
from opencode_a2a.turns.sessions import DERIVED_CONTEXT
from opencode_a2a.validation import FREE_OBJECT, wrong

MAX_PARTS = 256


class PromptModel(Body):
    model_config = ConfigDict(title="Model")

    provider_id: Text
    model_id: Text


class Mention(Body):
    """Where in the prompt something was mentioned."""

    value: LongText
    start: Number
    end: Number


class Position(Body):
    line: Number
    character: Number


class Range(Body):
    start: Position
    end: Position


class Source(Body):
    """What a file was attached for. OpenCode keeps it and reads nothing for it.

    A ``resource`` is refused: OpenCode would read it from an MCP server without permission.
    """

    type: Literal["file", "symbol"]
    path: Text
    text: Mention
    name: Text | None = None
    kind: Number | None = None
    range: Range | None = None

    @model_validator(mode="after")
    def _fits(self) -> "Source":
        symbol = [self.name, self.kind, self.range]
        if self.type == "symbol" and None in symbol:
            raise wrong("must have name, kind and range when its type is symbol")
        if self.type == "file" and symbol != [None, None, None]:
            raise wrong("must not have name, kind or range when its type is file")
        return self


class PromptInput(Body):
    id: PartRef | None = None


class Times(Body):
    start: Number
    end: Number | None = None


class PromptText(PromptInput):
    model_config = ConfigDict(title="TextPart")

    type: Literal["text"]
    text: LongText
    synthetic: bool | None = None
    ignored: bool | None = None
    time: Times | None = None
    metadata: Annotated[dict[str, Json], FREE_OBJECT] | None = None


class PromptFile(PromptInput):
    """A file as a ``data:`` or http(s) URL: text, PNG, JPEG, GIF, WebP or PDF."""

    model_config = ConfigDict(title="FilePart")

    type: Literal["file"]
    mime: Text
    url: Annotated[str, Field(min_length=1)]
    filename: Text | None = None
    source: Source | None = None

    @property
    def linked(self) -> bool:
        """Whether the file has to be fetched."""
        return self.url.lower().startswith(("http://", "https://"))


class PromptAgent(PromptInput):
    """Asks the model to use a sub-agent."""

    model_config = ConfigDict(title="AgentPart")

    type: Literal["agent"]
    name: Text
    source: Mention | None = None


class PromptSubtask(PromptInput):
    """Runs a sub-agent before the model is asked; forwarded as it is."""

    model_config = ConfigDict(title="SubtaskPart")

    type: Literal["subtask"]
    prompt: Text
    description: Text
    agent: Text
    model: PromptModel | None = None
    command: Text | None = None


Part = Annotated[PromptText | PromptFile | PromptAgent | PromptSubtask, Field(discriminator="type")]


class Format(Body):
    """The form of the answer: text, or JSON of a schema."""

    type: Literal["text", "json_schema"]
    json_schema: Annotated[dict[str, Json], FREE_OBJECT] | None = Field(
        default=None, alias="schema"
    )
    retry_count: Annotated[int, Field(ge=0, le=100)] | None = None

    @model_validator(mode="after")
    def _fits(self) -> "Format":
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise wrong("must have a schema if, and only if, its type is json_schema")
        if self.type == "text" and self.retry_count is not None:
            raise wrong("must not have retryCount when its type is text")
        return self


class PromptRequest(Body):
    parts: Annotated[list[Part], Field(min_length=1, max_length=MAX_PARTS)]
    message_id: MessageRef | None = None
    model: PromptModel | None = None
    agent: Text | None = None
    system: LongText | None = None
    variant: Text | None = None
    no_reply: bool | None = None
    tools: dict[Annotated[str, Field(pattern=r"^(\*|[^*?]+)$")], bool] | None = None
    format: Format | None = None

    async def prompt(
        self, session_id: SessionId, defaults: OpenCodeSettings, fetch: Fetch
    ) -> wire.Prompt:
        """Return the prompt for OpenCode; fields that are not given are as in any turn."""
        defaulted = {
            "model": defaults.model,
            "agent": defaults.agent,
            "system": defaults.system,
            "variant": defaults.variant,
        }
        chosen = {name: value for name, value in given(self).items() if value != ""}
        parts = await _inputs(session_id, self.parts, fetch)
        return wire.Prompt.model_validate({**defaulted, **chosen, "parts": parts})


class CommandRequest(Body):
    command: Text
    arguments: LongText
    message_id: MessageRef | None = None
    agent: Text | None = None
    model: PromptModel | None = None
    variant: Text | None = None
    parts: Annotated[list[PromptFile], Field(max_length=MAX_PARTS)] | None = None

    async def call(
        self, session_id: SessionId, defaults: OpenCodeSettings, fetch: Fetch
    ) -> wire.CommandCall:
        call = given(self) | {
            "agent": self.agent or defaults.agent,
            "variant": self.variant or defaults.variant,
            "model": f"{self.model.provider_id}/{self.model.model_id}" if self.model else None,
            "parts": await _inputs(session_id, self.parts, fetch) if self.parts else None,
        }
        return wire.CommandCall.model_validate(call)


class ShellRequest(Body):
    agent: Text
    command: Text
    model: PromptModel | None = None

    def call(self) -> wire.ShellCall:
        return wire.ShellCall.model_validate(given(self))


def given(body: Body) -> JsonObject:
    """Return the fields of a request that were given, in OpenCode's spelling."""
    return body.model_dump(by_alias=True, exclude_none=True)


async def _inputs(session_id: SessionId, parts: Sequence[Part], fetch: Fetch) -> list[JsonObject]:
    """Return parts with files in a form that OpenCode can handle; name all that have none."""
    urls = [part.url for part in parts if isinstance(part, PromptFile) and part.linked]
    try:
        links = iter(await fetch(urls) if urls else ())
    except TooManyFilesError as error:
        raise InvalidParamsError.of("request.parts", str(error)) from None
    inputs: list[JsonObject] = []
    refused: list[Violation] = []
    for index, part in enumerate(parts):
        # OpenCode stores a part over one with the same id, be it another session's.
        named: JsonObject = {"id": scoped_id(session_id, part.id)} if part.id else {}
        try:
            file: JsonObject = {}
            if isinstance(part, PromptFile):
                fetched = next(links) if part.linked else Fetched(read_data_url(part.url), None)
                if not isinstance(fetched, Fetched):
                    raise UnfitError(f"cannot be used: {fetched}")
                fitted = fit_file(fetched.data, part.mime, part.filename)
                url = f"data:{fitted.media_type};base64,{fitted.data}"
                file = {"mime": fitted.media_type or "text/plain", "url": url}
        except UnfitError as error:
            refused.append(Violation(f"request.parts[{index}].url", str(error)))
        else:
            inputs.append(given(part) | file | named)
    if refused:
        fields: list[Json] = [violation.field for violation in refused[:MAX_VIOLATIONS]]
        raise refusal(InvalidFieldError, tuple(refused), field=fields[0], fields=fields)
    return inputs


# --- out --------------------------------------------------------------------------------------


class A2ATask(RootModel[Annotated[dict[str, Json], FREE_OBJECT]]):
    """A Task of A2A, in the spelling of the request's version."""

    model_config = ConfigDict(
        title="Task", frozen=True, json_schema_extra={"required": ["id", "contextId"]}
    )

    @classmethod
    def of(cls, session: wire.Session, version: Version) -> Self:
        """Return the completed task that stands for a session."""
        known: JsonObject = {
            "directory": session.directory,
            "project_id": session.project_id,
            "parent_id": session.parent_id,
            "share_url": session.share.url if session.share else None,
            "created": session.time.created,
            "updated": session.time.updated,
        }
        completed: JsonObject = {
            "state": "TASK_STATE_COMPLETED",
            "timestamp": timestamp(session.time.updated),
        }
        task: JsonObject = {
            "id": session.id,
            "contextId": f"{DERIVED_CONTEXT}{session.id}",
            "status": completed,
            "metadata": {
                "shared": {"session": {"id": session.id, "title": session.title}},
                "opencode": {name: value for name, value in known.items() if value is not None},
            },
        }
        return cls.spelled(task, version)

    @classmethod
    def spelled(cls, task: JsonObject, version: Version) -> Self:
        """Return a task of 1.0 in the spelling of a version."""
        older = version is Version.V03
        return cls(v03.downgrade_object("task", task, Spelling.JSON) if older else task)

    @property
    def updated(self) -> str:
        """When the session was last changed, in a form that sorts."""
        match self.root:
            case {"status": {"timestamp": str(moment)}}:
                return moment
            case _:
                return ""


class A2AMessage(RootModel[Annotated[dict[str, Json], FREE_OBJECT]]):
    """A Message of A2A, in the spelling of the request's version."""

    model_config = ConfigDict(
        title="Message", frozen=True, json_schema_extra={"required": ["messageId", "parts"]}
    )

    @classmethod
    def of(cls, stored: wire.MessageWithParts, version: Version) -> Self:
        """Return a stored message as one of A2A."""
        context_id = ContextId(f"{DERIVED_CONTEXT}{stored.info.session_id}")
        of_no_task = TaskRef(TaskId(""), context_id, Principal(""))
        message = render.message(_read_message(stored), of_no_task) or {}
        message.pop("taskId", None)
        if message and version is Version.V03:
            message = v03.downgrade_object("message", message, Spelling.JSON)
        return cls(message)


def _read_message(stored: wire.MessageWithParts) -> Message:
    """Return a stored message of OpenCode as one of ours.

    It has its text, files, tool calls and the work given to sub-agents, but not its reasoning,
    steps and patches.
    """
    info, assistant = stored.info, isinstance(stored.info, wire.AssistantMessage)
    parts = [part for one in stored.parts for part in _read_part(one)]
    if not parts:
        # It holds only text that OpenCode added itself; a message must have a part.
        texts = [part.text for part in stored.parts if isinstance(part, wire.TextPart)]
        parts = [MessagePart("text", text="\n".join(texts))]
    shared: JsonObject = {"session": {"id": info.session_id}}
    model = info if isinstance(info, wire.AssistantMessage) else info.model
    if model and model.provider_id and model.model_id:
        shared["model"] = {"providerID": model.provider_id, "modelID": model.model_id}
    about: dict[str, Json] = {"agent": info.agent, "created": info.time.created}
    if isinstance(info, wire.AssistantMessage):
        about |= {
            "parent_id": info.parent_id,
            "completed": info.time.completed,
            "finish": info.finish,
            "error": info.error and {"type": info.error.name, "message": info.error.data.message},
            "summary": info.summary or None,
        }
    known: JsonObject = {name: value for name, value in about.items() if value is not None}
    return Message(
        message_id=info.id,
        role="agent" if assistant else "user",
        parts=parts,
        metadata={"shared": shared, "opencode": known},
    )


def _read_part(part: wire.Part) -> Iterator[MessagePart]:
    match part:
        case wire.TextPart() if not part.synthetic and not part.ignored and part.text:
            yield MessagePart("text", text=part.text)
        case wire.FilePart():
            yield _read_file(part)
        case wire.AgentPart() | wire.SubtaskPart():
            # In the form of a prompt, without the ids that OpenCode adds.
            own = {"id", "session_id", "message_id"}
            data = part.model_dump(mode="json", by_alias=True, exclude=own, exclude_none=True)
            yield MessagePart("data", data=data, media_type="application/json")
        case wire.ToolPart(state=state):
            known, fields = dict(state), ("title", "input", "output", "error")
            yield MessagePart(
                "data",
                data={
                    "call_id": part.call_id,
                    "tool": part.tool,
                    "status": state.status,
                    **{name: known[name] for name in fields if known.get(name) is not None},
                },
                media_type="application/json",
                metadata={"shared": {"stream": {"block_type": "tool_call"}}},
            )
            if isinstance(state, wire.ToolCompleted):
                yield from map(_read_file, state.attachments)
        case _:
            pass


def _read_file(part: wire.FilePart) -> MessagePart:
    if part.url.startswith(("http://", "https://")):
        return MessagePart("url", url=part.url, media_type=part.mime, filename=part.filename)
    try:
        data = read_data_url(part.url)
    except UnfitError:
        # A file on OpenCode's machine: callers may see its name, but not its path.
        known: JsonObject = {"type": "file", "filename": part.filename, "mime": part.mime}
        return MessagePart("data", data=known, media_type="application/json")
    raw = base64.b64encode(data).decode()
    return MessagePart("raw", raw=raw, media_type=part.mime, filename=part.filename)
