"""What a session can be told to do: prompt, command and shell command, as callers write them.

Fields have OpenCode's spelling. Files come as bytes only, in a form that OpenCode survives; no
URL of any other kind is passed on.
"""

from typing import Annotated, Literal

from pydantic import AfterValidator, Field, model_validator

from opencode_a2a.errors import InvalidFieldError, Violation
from opencode_a2a.events import Json
from opencode_a2a.execution.turn import PromptDefaults
from opencode_a2a.extensions.payloads import FREE_OBJECT, Body, Id, LongText, Text, wrong
from opencode_a2a.ids import MessageId
from opencode_a2a.media import UnfitError, fit_file, read_data_url
from opencode_a2a.upstream import models as upstream
from opencode_a2a.upstream.client import well_formed
from opencode_a2a.upstream.models import InputPart, ModelRef, Prompt

MAX_PARTS = 256


def _message_id(value: str) -> str:
    if not well_formed("msg", value):
        raise wrong("must be an id of a message: msg_ and letters or digits")
    return value


MessageIdText = Annotated[Id, AfterValidator(_message_id)]


class Model(Body):
    provider_id: Text
    model_id: Text

    def ref(self) -> ModelRef:
        return ModelRef(provider_id=self.provider_id, model_id=self.model_id)


class TextPart(Body):
    type: Literal["text"]
    text: LongText


class FilePart(Body):
    """A file as a ``data:`` URL: text, PNG, JPEG, GIF, WebP or PDF."""

    type: Literal["file"]
    mime: Text
    url: Annotated[str, Field(min_length=1)]
    filename: Text | None = None


class AgentPart(Body):
    """Asks the model to use a sub-agent."""

    type: Literal["agent"]
    name: Text


class SubtaskPart(Body):
    """Runs a sub-agent before the model is asked; forwarded as it is."""

    type: Literal["subtask"]
    prompt: Text
    description: Text
    agent: Text
    model: Model | None = None
    command: Text | None = None


Part = Annotated[TextPart | FilePart | AgentPart | SubtaskPart, Field(discriminator="type")]


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
    message_id: MessageIdText | None = None
    model: Model | None = None
    agent: Text | None = None
    system: LongText | None = None
    variant: Text | None = None
    no_reply: bool | None = None
    tools: dict[str, bool] | None = None
    format: Format | None = None

    def prompt(self, defaults: PromptDefaults) -> Prompt:
        """Return what OpenCode is given; what the request leaves open is as in any turn."""
        model = self.model.ref() if self.model else None
        if model is None and defaults.model is not None:
            chosen = defaults.model
            model = ModelRef(provider_id=chosen.provider_id, model_id=chosen.model_id)
        answer = self.format and upstream.OutputFormat(
            type=self.format.type,
            json_schema=self.format.json_schema,
            retry_count=self.format.retry_count,
        )
        return Prompt(
            parts=_inputs(self.parts),
            message_id=MessageId(self.message_id) if self.message_id else None,
            model=model,
            agent=self.agent or defaults.agent,
            system=self.system or defaults.system,
            variant=self.variant or defaults.variant,
            format=answer,
            no_reply=self.no_reply,
            tools=self.tools,
        )


class CommandRequest(Body):
    command: Text
    arguments: LongText
    message_id: MessageIdText | None = None
    agent: Text | None = None
    model: Model | None = None
    variant: Text | None = None
    parts: Annotated[list[FilePart], Field(max_length=MAX_PARTS)] | None = None

    def call(self, defaults: PromptDefaults) -> upstream.CommandCall:
        model = self.model
        return upstream.CommandCall(
            command=self.command,
            arguments=self.arguments,
            message_id=MessageId(self.message_id) if self.message_id else None,
            agent=self.agent or defaults.agent,
            model=f"{model.provider_id}/{model.model_id}" if model else None,
            variant=self.variant or defaults.variant,
            parts=_files(self.parts) if self.parts else None,
        )


class ShellRequest(Body):
    agent: Text
    command: Text
    model: Model | None = None

    def call(self) -> upstream.ShellCall:
        model = self.model.ref() if self.model else None
        return upstream.ShellCall(command=self.command, agent=self.agent, model=model)


def _inputs(parts: list[Part]) -> list[InputPart]:
    files = iter(_files([part for part in parts if isinstance(part, FilePart)], parts))
    return [next(files) if isinstance(part, FilePart) else _input(part) for part in parts]


def _input(part: TextPart | AgentPart | SubtaskPart) -> InputPart:
    match part:
        case TextPart():
            return upstream.TextInput(text=part.text)
        case AgentPart():
            return upstream.AgentInput(name=part.name)
        case SubtaskPart():
            return upstream.SubtaskInput(
                prompt=part.prompt,
                description=part.description,
                agent=part.agent,
                model=part.model.ref() if part.model else None,
                command=part.command,
            )


def _files(files: list[FilePart], among: list[Part] | None = None) -> list[upstream.FileInput]:
    """Return files in a form that OpenCode survives; list all that have none."""
    inputs: list[upstream.FileInput] = []
    refused: list[Violation] = []
    for file in files:
        try:
            inputs.append(_file(file))
        except UnfitError as error:
            index = [*(among or files)].index(file)
            refused.append(Violation(f"request.parts[{index}].url", str(error)))
    if refused:
        text = "; ".join(f"{v.field} {v.description}" for v in refused[:3])
        raise InvalidFieldError(
            text,
            violations=tuple(refused),
            field=refused[0].field,
            fields=[violation.field for violation in refused],
        )
    return inputs


def _file(part: FilePart) -> upstream.FileInput:
    data, declared = read_data_url(part.url)
    fitted = fit_file(data, part.mime or declared, part.filename)
    return upstream.FileInput(
        mime=fitted.media_type or "text/plain",
        url=f"data:{fitted.media_type};base64,{fitted.data}",
        filename=part.filename,
    )
