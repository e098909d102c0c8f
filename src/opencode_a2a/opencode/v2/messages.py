"""Values of OpenCode 2 as those that the rest of the service knows.

Messages with their content, tool calls, errors, permissions and forms. ``v2.events`` uses the same
functions for what events tell piece by piece, so that a part has the same id and content wherever
it is read. Pure.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import isfinite
from typing import Annotated, Final, Literal

from pydantic import BeforeValidator, Field

from opencode_a2a.events import Json, JsonObject, Question, QuestionOption
from opencode_a2a.ids import MessageId, RequestId, SessionId
from opencode_a2a.jsonguard import as_object, loads, text_in
from opencode_a2a.opencode.types import (
    UNREAD_CALL,
    AnyObject,
    AssistantMessage,
    CompactionPart,
    Cost,
    Fields,
    FilePart,
    MessageTime,
    MessageWithParts,
    Moment,
    Otherwise,
    Part,
    PartTime,
    PatchPart,
    Patterns,
    PermissionRequest,
    PermissionRule,
    QuestionRequest,
    Readable,
    ReasoningPart,
    Shown,
    ShownObject,
    ShownText,
    StepFinishPart,
    StepStartPart,
    TextPart,
    Tokens,
    ToolCompleted,
    ToolFailed,
    ToolPart,
    ToolPending,
    ToolRef,
    ToolRunning,
    ToolState,
    TurnError,
    TurnErrorData,
    UserMessage,
    Wire,
)
from opencode_a2a.rights import Action

OURS: Final = {"shell": "bash", "subagent": "task"}
"""The names in OpenCode 1, and in our rules, for actions and tools that 2.x calls otherwise."""
THEIRS: Final = {ours: theirs for theirs, ours in OURS.items()}
_FILE: Final = {"path": "filePath", "filePath": "filePath (not used)"}
_FIELDS: Final = {
    "read": _FILE,
    "write": _FILE,
    "edit": _FILE,
    "subagent": {"agent": "subagent_type", "subagent_type": "subagent_type (not used)"},
}
"""The names in OpenCode 1 for fields of tools. The name that 2.x does not use may be in a call too,
and must not be taken for what the tool does."""
REFUSED: Final = {
    "The user declined this tool call": "The user rejected permission to use this tool",
    "The user dismissed this question": "The user dismissed this question",
}
"""The error of a tool that a person refused, with that of 1.x, by which a refusal is known."""
UNKNOWN: Final = MessageId("msg_unknown")
"""The prompt of an answer whose prompt was not heard of; the store will tell."""
_ERRORS: Final = {
    "aborted": "MessageAbortedError",
    "provider.auth": "ProviderAuthError",
    "provider.content-filter": "ContentFilterError",
    "provider.context-overflow": "ContextOverflowError",
}
_WHOLE: Final = re.compile(r"Provider request failed with HTTP (\d{3}):? ?(.*)", re.DOTALL)
"""How previews tell an error of the provider: with its whole answer in place of its words."""
_NOTE: Final = re.compile(r"(Warnings:.*?)?Command exited with code -?\d+\.$", re.DOTALL)
"""A second text that the tool `shell` adds for the model; the code is in the metadata."""


_INTEGERS: Final = range(-(2**63), 2**63)
"""Those that can be sent."""
_FLAGS: Final[Mapping[str, bool]] = {
    **dict.fromkeys(("yes", "true", "y", "1"), True),
    **dict.fromkeys(("no", "false", "n", "0"), False),
}
"""What a person may answer to a question that takes a yes or a no."""


class Failure2(Wire):
    type: ShownText = ""
    message: ShownText = ""
    status: Annotated[int | None, Shown] = None


class Content2(Wire):
    """What a tool returned: a text or a file."""

    type: str
    text: ShownText = ""
    uri: ShownText = ""
    mime: ShownText = ""


def _unwrapped(value: Json) -> Json:
    """Take the metadata of a sub-agent out of the second pair of braces that previews have."""
    if isinstance(value, dict) and [*value] == ["metadata"]:
        return value["metadata"]
    return value


class Call2(Wire):
    """The state of a tool call."""

    status: str = ""
    input: Annotated[ShownObject, Fields] = Field(default_factory=dict[str, Json])
    content: Readable[Content2] = Field(default_factory=list[Content2])
    metadata: Annotated[ShownObject | None, Shown, BeforeValidator(_unwrapped)] = None
    error: Annotated[Failure2 | None, Shown] = None


class Block2(Wire):
    """A piece of an answer: text, reasoning or a tool call."""

    type: str
    text: ShownText = ""
    id: ShownText = ""
    name: ShownText = ""
    state: Annotated[Call2, Fields] = Call2()


class ModelRef2(Wire):
    id: ShownText = ""
    provider_id: ShownText = ""


class Snapshot2(Wire):
    files: Readable[str] = Field(default_factory=list[str])


class File2(Wire):
    """A file of a prompt; 2.x has read it, wherever it came from."""

    data: ShownText = ""
    mime: ShownText = ""
    name: Annotated[str | None, Shown] = None

    def part(self, session: SessionId, message: MessageId, number: int) -> FilePart:
        return FilePart(
            id=f"{message}:{number}",
            session_id=session,
            message_id=message,
            mime=self.mime,
            filename=self.name,
            url=f"data:{self.mime};base64,{self.data}",
        )


class Message2(Wire):
    """A message of any type; each type has some of the fields."""

    id: MessageId
    type: str
    time: Annotated[MessageTime, Fields] = MessageTime()
    text: ShownText = ""
    files: Readable[File2] = Field(default_factory=list[File2])
    status: ShownText = ""
    agent: Annotated[str | None, Shown] = None
    model: Annotated[ModelRef2, Fields] = ModelRef2()
    content: Readable[Block2] = Field(default_factory=list[Block2])
    finish: Annotated[str | None, Shown] = None
    cost: Cost = 0.0
    tokens: Annotated[Tokens, Fields] = Tokens()
    error: Annotated[Failure2 | None, Shown] = None
    retry: Annotated[AnyObject | None, Shown] = None
    snapshot: Annotated[Snapshot2, Fields] = Snapshot2()
    command: ShownText = ""
    output: Annotated[AnyObject, Fields] = Field(default_factory=dict[str, Json])

    @property
    def refused(self) -> bool:
        """Whether a person refused a tool call of it."""
        errors = (block.state.error for block in self.content)
        return any(error is not None and error.message in REFUSED for error in errors)


def turn_error(error: Failure2) -> TurnError:
    data = TurnErrorData(message=error.message, status_code=error.status)
    if (whole := _WHOLE.match(error.message)) is not None:
        try:
            body = as_object(as_object(loads(whole[2].encode())).get("error"))
        except ValueError:
            body = {}
        data = TurnErrorData(message=text_in(body, "message"), status_code=int(whole[1]))
    return TurnError(name=_ERRORS.get(error.type, "APIError"), data=data)


# Tool calls

_Status = Literal["running", "completed", "error"]


def tool_state(name: str, call: Call2, *, otherwise: _Status = "running") -> ToolState:
    """Return the state of a call of the tool that 2.x calls ``name``.

    ``otherwise`` is what a state with an unknown name counts as: a call has ended with its message,
    by whatever word a release says that.
    """
    metadata: JsonObject = dict(call.metadata or {})
    named = _FIELDS.get(name, {})
    given: JsonObject = {named.get(key, key): value for key, value in call.input.items()}
    if name == "subagent" and "sessionID" in metadata:
        metadata["sessionId"] = metadata["sessionID"]
    if isinstance(files := metadata.get("files"), list):
        metadata["diff"] = patches(files)
    status = call.status
    if status not in ("streaming", "running", "completed", "error") and call.error is None:
        status = otherwise
    match status:
        case "streaming":
            return ToolPending()
        case "running":
            return ToolRunning(input=given, metadata=metadata or None)
        case "completed":
            shown = (one.text for one in call.content if one.type == "text")
            text = "\n".join(one for one in shown if not _NOTE.match(one))
            return ToolCompleted(input=given, output=text, metadata=metadata or None)
        case _:
            message = call.error.message if call.error else ""
            error = REFUSED.get(message, message)
            return ToolFailed(input=given, error=error, metadata=metadata or None)


def tool_part(
    session: SessionId,
    message: MessageId,
    call_id: str,
    name: str,
    call: Call2,
    *,
    otherwise: _Status = "running",
) -> ToolPart:
    state = tool_state(name, call, otherwise=otherwise)
    if isinstance(state, ToolCompleted):
        files = [
            FilePart(
                id=f"{message}:{call_id}:{number}",
                session_id=session,
                message_id=message,
                mime=one.mime,
                url=one.uri,
            )
            for number, one in enumerate(call.content)
            if one.type == "file"
        ]
        state = state.model_copy(update={"attachments": files})
    return ToolPart(
        id=f"{message}:{call_id}",
        session_id=session,
        message_id=message,
        call_id=call_id,
        tool=OURS.get(name, name),
        state=state,
    )


def patches(files: Sequence[Json]) -> str:
    """Return the changes to several files as one text, as 1.x has them."""
    found = (file.get("patch") for file in files if isinstance(file, dict))
    return "\n".join(patch for patch in found if isinstance(patch, str))


# Messages


def stored(
    session: SessionId,
    listed: Iterable[Message2],
    parent: MessageId = UNKNOWN,
    *,
    finish_unnamed: bool = False,
) -> Iterator[MessageWithParts]:
    """Yield messages, oldest first, as 1.x has them.

    An answer of 2.x does not name its prompt: it belongs to the last one before it. ``parent`` is
    the prompt before the first message. ``finish_unnamed``: see ``finish_of``.
    """
    for message in listed:
        match message.type:
            case "user" | "synthetic":
                parent = message.id
                synthetic = message.type == "synthetic"
                prompt = prompt_message(
                    session, parent, message.time.created, message.text, synthetic
                )
                prompt.parts.extend(
                    file.part(session, parent, number)
                    for number, file in enumerate(message.files, start=1)
                )
                yield prompt
            case "compaction":
                yield from compaction(
                    session, message.id, message.time.created, message.status, message.error
                )
            case "assistant":
                yield _answer(session, parent, message, finish_unnamed)
            case "shell":
                yield _shell(session, message)
            case _:
                pass


def prompt_message(
    session: SessionId, message: MessageId, created: Moment, text: str, synthetic: bool
) -> MessageWithParts:
    info = UserMessage(id=message, session_id=session, time=MessageTime(created=created))
    part = TextPart(
        id=f"{message}:0", session_id=session, message_id=message, text=text, synthetic=synthetic
    )
    return MessageWithParts(info=info, parts=[part])


def compaction(
    session: SessionId,
    message: MessageId,
    created: Moment,
    status: str,
    error: Failure2 | None = None,
) -> Iterator[MessageWithParts]:
    """Yield the request for a compaction, and the summary if it is over, as 1.x has them.

    One that failed is a summary with an error: without one the turn would look complete.
    """
    info = UserMessage(id=message, session_id=session, time=MessageTime(created=created))
    part = CompactionPart(id=f"{message}:c", session_id=session, message_id=message)
    yield MessageWithParts(info=info, parts=[part])
    if status in ("completed", "failed"):
        summary = AssistantMessage(
            id=MessageId(f"{message}s"),
            session_id=session,
            parent_id=message,
            summary=True,
            finish="stop" if status == "completed" else None,
            error=turn_error(error) if error else None,
            time=MessageTime(created=created, completed=created),
        )
        yield MessageWithParts(info=summary, parts=[])


def text_part(
    session: SessionId, message: MessageId, number: int, text: str, *, growing: bool
) -> TextPart:
    return TextPart(
        id=f"{message}:t{number}",
        session_id=session,
        message_id=message,
        text=text,
        time=PartTime(end=None if growing else 1),
    )


def reasoning_part(
    session: SessionId, message: MessageId, number: int, text: str, *, growing: bool
) -> ReasoningPart:
    return ReasoningPart(
        id=f"{message}:r{number}",
        session_id=session,
        message_id=message,
        text=text,
        time=PartTime(end=None if growing else 1),
    )


def step_start(session: SessionId, message: MessageId, number: int) -> StepStartPart:
    return StepStartPart(id=f"{message}:s{number}", session_id=session, message_id=message)


def finish_of(told: str | None, *, called: bool, unnamed: bool = False) -> str | None:
    """Return why a step ended, in the words of 1.x.

    2.x asks the model again if it has ``called`` a tool, whatever reason the provider gives; 1.x
    does for two reasons, so that these say here whether it did.

    A step that ended without an error and without a reason was broken off: OpenCode was killed, and
    repaired it at the next prompt. ``unnamed`` is for a release whose contract does not name the
    reason (``Contract.finish_unnamed``), and so may call it otherwise.
    """
    if told in ("tool-calls", "unknown"):
        return "tool-calls" if called else "other"
    if not told and unnamed:
        return "tool-calls" if called else "stop"
    return told if told and told != "error" else None


def step_finish(session: SessionId, message: MessageId, reason: str) -> StepFinishPart:
    return StepFinishPart(id=f"{message}:f", session_id=session, message_id=message, reason=reason)


def _answer(
    session: SessionId, parent: MessageId, message: Message2, finish_unnamed: bool
) -> MessageWithParts:
    parts: list[Part] = [step_start(session, message.id, 1)]
    texts = thoughts = 0
    otherwise: _Status = "running"
    if message.time.completed is not None:
        otherwise = "error" if message.error else "completed"
    for block in message.content:
        # A text is stored when it is complete.
        growing = not (message.time.completed or block.text)
        match block.type:
            case "text":
                parts.append(text_part(session, message.id, texts, block.text, growing=growing))
                texts += 1
            case "reasoning":
                parts.append(
                    reasoning_part(session, message.id, thoughts, block.text, growing=growing)
                )
                thoughts += 1
            case "tool":
                call_id, name, call = block.id, block.name, block.state
                part = tool_part(session, message.id, call_id, name, call, otherwise=otherwise)
                parts.append(part)
            case _:
                pass
    if message.finish and message.finish != "error":
        parts.append(step_finish(session, message.id, message.finish))
    if message.snapshot.files:
        files = message.snapshot.files
        parts.append(
            PatchPart(id=f"{message.id}:p", session_id=session, message_id=message.id, files=files)
        )
    called = any(block.type == "tool" for block in message.content)
    unnamed = finish_unnamed and otherwise == "completed"
    finish = finish_of(message.finish, called=called, unnamed=unnamed)
    error = turn_error(message.error) if message.error else None
    if message.refused:
        finish, error = "tool-calls", None
    info = AssistantMessage(
        id=message.id,
        session_id=session,
        parent_id=parent,
        provider_id=message.model.provider_id or None,
        model_id=message.model.id or None,
        agent=message.agent,
        time=message.time,
        cost=message.cost,
        tokens=message.tokens,
        finish=finish,
        error=error,
    )
    return MessageWithParts(info=info, parts=parts)


def _shell(session: SessionId, message: Message2) -> MessageWithParts:
    """Return a command that a person ran, as the answer with a tool call that it is in 1.x."""
    text = message.output.get("output")
    call = Call2(
        status="completed" if message.time.completed else "running",
        input={"command": message.command},
        content=[Content2(type="text", text=text if isinstance(text, str) else "")],
    )
    info = AssistantMessage(
        id=message.id, session_id=session, parent_id=UNKNOWN, finish="stop", time=message.time
    )
    return MessageWithParts(
        info=info, parts=[tool_part(session, message.id, message.id, "shell", call)]
    )


# Permissions and questions


class Source2(Wire):
    message_id: MessageId
    id: ShownText = ""
    call_id: ShownText = ""

    def ref(self) -> ToolRef:
        return ToolRef(message_id=self.message_id, call_id=self.id or self.call_id)


UNREAD: Final = Source2(message_id=UNREAD_CALL.message_id)
"""See ``UNREAD_CALL``."""


class Permission2(Wire):
    id: RequestId
    session_id: SessionId
    action: str
    resources: Patterns = Field(default_factory=list[str])
    save: Patterns = Field(default_factory=list[str])
    metadata: Annotated[ShownObject, Fields] = Field(default_factory=dict[str, Json])
    source: Annotated[Source2 | None, Otherwise(UNREAD)] = None


def permission_of(asked: Permission2) -> PermissionRequest:
    metadata = dict(asked.metadata)
    if isinstance(files := metadata.get("files"), list):
        metadata["diff"] = patches(files)
        match files:
            case [{"file": str(file)}, *_]:
                metadata["filepath"] = file
            case _:
                pass
    return PermissionRequest(
        id=asked.id,
        session_id=asked.session_id,
        permission=OURS.get(asked.action, asked.action),
        patterns=asked.resources,
        always=asked.save,
        metadata=metadata,
        tool=asked.source.ref() if asked.source else None,
        tells_reason=False,  # up to 2.0.11, by reports
    )


class Option2(Wire):
    value: ShownText = ""
    label: ShownText = ""
    description: ShownText = ""


class Field2(Wire):
    """A field of a form; the tool `question` makes one for each question."""

    key: str
    type: str
    title: ShownText = ""
    description: ShownText = ""
    options: Readable[Option2] = Field(default_factory=list[Option2])
    custom: bool | None = None

    def answer(self, given: Sequence[str]) -> Json:
        """Return the value for what a person answered: labels of options, or free texts.

        There is at least one. A text that is no value of the field, or a number that JSON does not
        have, stays a text: OpenCode refuses it and says what is wrong with it. So does what is
        answered for nobody, which must not count as a "no".
        """
        values = {option.label: option.value for option in self.options}
        chosen = [values.get(one, one) for one in given]
        match self.type:
            case "multiselect":
                return [*chosen]
            case "boolean":
                return _FLAGS.get(chosen[0].strip().lower(), chosen[0])
            case "number" | "integer":
                try:
                    number = int(chosen[0]) if self.type == "integer" else float(chosen[0])
                except ValueError:
                    return chosen[0]
                fits = isfinite(number) if isinstance(number, float) else number in _INTEGERS
                return number if fits else chosen[0]
            case _:
                return chosen[0]


class FormMetadata2(Wire):
    tool: Annotated[Source2 | None, Shown] = None


class Form2(Wire):
    id: RequestId
    session_id: SessionId
    fields: Readable[Field2] = Field(default_factory=list[Field2])
    metadata: Annotated[FormMetadata2, Fields] = FormMetadata2()

    def answer(self, answers: Sequence[Sequence[str]]) -> JsonObject:
        pairs = zip(self.fields, answers, strict=False)
        return {field.key: field.answer(given) for field, given in pairs if given}


def question_of(form: Form2) -> QuestionRequest:
    questions = [
        Question(
            field.description or field.title or field.key,
            field.title,
            [QuestionOption(one.label or one.value, one.description) for one in field.options],
            field.type == "multiselect",
            not field.options if field.custom is None else field.custom,
        )
        for field in form.fields
    ]
    tool = form.metadata.tool
    return QuestionRequest(
        id=form.id,
        session_id=form.session_id,
        questions=questions,
        tool=tool.ref() if tool else None,
    )


class Rule2(Wire):
    action: str
    resource: str
    effect: Action


def rule_of(rule: Rule2) -> PermissionRule:
    name = OURS.get(rule.action, rule.action)
    return PermissionRule(permission=name, pattern=rule.resource, action=rule.effect)


def rule_to(rule: PermissionRule) -> JsonObject:
    name = THEIRS.get(rule.permission, rule.permission)
    return {"action": name, "resource": rule.pattern, "effect": rule.action}
