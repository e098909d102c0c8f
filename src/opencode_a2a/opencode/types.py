"""The types of OpenCode's payloads, as version 1.18 sends and takes them.

``opencode.client`` returns these values; ``opencode.events`` and ``opencode.turn_state`` build on
the messages and parts. Attributes have Python names, the wire has OpenCode's. Fields that this
service does not need are left out, and with them everything secret: no field here could hold a
provider's key, option or header. Nothing here knows A2A.
"""

import re
from fnmatch import fnmatchcase
from typing import Annotated, Any, Literal, TypeVar, cast, get_args

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    OnErrorOmit,
    PlainSerializer,
    ValidationError,
    ValidatorFunctionWrapHandler,
    WithJsonSchema,
    WrapValidator,
)
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import PydanticOmit, core_schema

from opencode_a2a.events import Json, JsonObject, Question
from opencode_a2a.ids import MessageId, ModelRef, RequestId, SessionId
from opencode_a2a.jsonguard import showable, storable
from opencode_a2a.rights import Action
from opencode_a2a.validation import FREE, FREE_OBJECT


def wire_name(name: str) -> str:
    """Return OpenCode's spelling of a field: ``session_id`` is ``sessionID``."""
    first, *rest = name.split("_")
    return first + "".join("ID" if word == "id" else word.capitalize() for word in rest)


class Wire(BaseModel):
    """Base of every OpenCode payload: immutable, and unknown fields are ignored.

    The title of a type that extension methods return as it is names its published schema.
    """

    model_config = ConfigDict(
        frozen=True,
        extra="ignore",
        populate_by_name=True,
        alias_generator=wire_name,
        defer_build=True,
    )


AnyJson = Annotated[Json, FREE, AfterValidator(storable)]
AnyObject = Annotated[JsonObject, FREE_OBJECT, AfterValidator(storable)]
ShownObject = Annotated[JsonObject, FREE_OBJECT, AfterValidator(showable)]
"""What a model or a tool wrote, and clients are given."""


# Tolerant fields. What is only shown never makes a message, a part or a list unreadable: a provider
# or a plugin may have written anything there, and OpenCode stores and repeats it.


def _omit_malformed(value: object, validate: ValidatorFunctionWrapHandler) -> object:
    try:
        return validate(value)
    except ValidationError:
        raise PydanticOmit from None


Lenient = WrapValidator(_omit_malformed)
"""Marks the entries of a map: a malformed entry is left out, and the others stay."""
T = TypeVar("T")
Readable = list[Annotated[T, Lenient]]
"""A list without the entries that are malformed."""


class Otherwise:
    """Marks a field with a default: a malformed value is the default, without a call of Python."""

    def __init__(self, default: object) -> None:
        self._default = default

    def __get_pydantic_core_schema__(
        self, source: Any, handler: GetCoreSchemaHandler
    ) -> core_schema.CoreSchema:
        made = handler(source)
        return core_schema.with_default_schema(made, default=self._default, on_error="default")

    def __get_pydantic_json_schema__(
        self, schema: core_schema.WithDefaultSchema, handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        return handler(schema["schema"])


Shown = Otherwise(None)
"""Marks an optional field that is only shown: a malformed value is none."""


def _number(value: object, most: float) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return 0
    return value if 0 <= value <= most else 0  # NaN is not between any two numbers


MAX_TOKENS = 10**9
MAX_COST = 10.0**6
"""A model provider that says more of a single step is wrong: such a figure, like one that is
negative or not a number, is not known. It counts as nothing, so that it spends nobody's budget,
and sums of the others stay far below what a database can hold."""
# The usual figure takes the first branch, without a call of Python code: a turn has dozens of them.
Count = Annotated[
    Annotated[int, Field(strict=True, ge=0, le=MAX_TOKENS)]
    | Annotated[int, BeforeValidator(lambda value: round(_number(value, MAX_TOKENS)))],
    Field(union_mode="left_to_right"),
    WithJsonSchema({"type": "integer"}),
]
Cost = Annotated[float, Field(strict=True, ge=0, le=MAX_COST), Otherwise(0.0)]
Moment = Annotated[
    Annotated[int, Field(strict=True, ge=0, le=2**53)]
    | Annotated[int, BeforeValidator(lambda value: round(_number(value, 2**53)))],
    Field(union_mode="left_to_right"),
    WithJsonSchema({"type": "integer"}),
]
"""A time in milliseconds; 0 if it is not known."""
Flag = Annotated[bool, Field(strict=True), Otherwise(False)]


def _object(value: object) -> object:
    return cast("object", value) if isinstance(value, dict | BaseModel) else {}


Fields = BeforeValidator(_object)
"""Marks an object whose fields all have a default: anything else is an empty one."""


def _text(value: object) -> object:
    return value if isinstance(value, str) else ""


ShownText = Annotated[str, BeforeValidator(_text)]


class CacheTokens(Wire):
    read: Count = 0
    write: Count = 0


class Tokens(Wire):
    """``input`` does not include cached tokens, nor ``output`` the reasoning."""

    input: Count = 0
    output: Count = 0
    reasoning: Count = 0
    cache: Annotated[CacheTokens, Otherwise(CacheTokens())] = CacheTokens()


class FileDiff(Wire):
    """The changes to one file: of a session, of a message, or of the working tree."""

    model_config = ConfigDict(title="DiffItem")

    file: str = ""
    patch: ShownText = ""
    additions: Count = 0
    deletions: Count = 0
    status: Annotated[str | None, Shown] = None


class PermissionRule(Wire):
    """The action for requests that match permission and pattern; the last matching rule counts."""

    permission: str
    pattern: str
    action: Action

    def covers(self, permission: str) -> bool:
        """Whether the rule is about a permission; OpenCode allows `*`, `?` and a trailing ` *`."""
        return fnmatchcase(permission, self.permission.removesuffix(" *").replace("[", "[[]"))


def _list(value: object) -> object:
    """Replace the value that old versions of OpenCode have in place of a list."""
    return cast("object", value) if isinstance(value, list) else ()


PermissionRules = Annotated[Readable[PermissionRule], BeforeValidator(_list)]


# Sessions


class SessionTime(Wire):
    created: Moment = 0
    updated: Moment = 0
    archived: Moment | None = None


class Share(Wire):
    url: str


class Revert(Wire):
    message_id: MessageId
    part_id: str | None = None
    snapshot: str | None = None
    diff: str | None = None


class Session(Wire):
    id: SessionId
    title: ShownText
    directory: str
    project_id: ShownText
    version: ShownText
    time: Annotated[SessionTime, Otherwise(SessionTime())] = SessionTime()
    parent_id: SessionId | None = None
    workspace_id: str | None = None
    model: Annotated[ModelRef | None, Shown] = None
    metadata: Annotated[ShownObject | None, Shown] = None
    share: Annotated[Share | None, Shown] = None
    revert: Annotated[Revert | None, Shown] = None
    permission: PermissionRules = []


class StatusIdle(Wire):
    type: Literal["idle"] = "idle"


class StatusBusy(Wire):
    type: Literal["busy"] = "busy"


class StatusRetry(Wire):
    """The provider failed, and OpenCode tries again at ``next`` (epoch, ms), perhaps in a day."""

    type: Literal["retry"] = "retry"
    attempt: Count = 0
    message: ShownText = ""
    next: Moment = 0


SessionStatus = Annotated[StatusIdle | StatusBusy | StatusRetry, Field(discriminator="type")]


class Todo(Wire):
    content: str
    status: str
    priority: str
    id: str | None = None


class WrittenTodos(Wire):
    """The metadata of a completed call of the tool ``todowrite``."""

    todos: Readable[Todo]


# Messages


class TurnErrorData(Wire):
    """The parts of a model error that may be shown; bodies, headers and URLs have no field."""

    message: Annotated[str | None, Shown] = None
    status_code: Annotated[int | None, Shown] = None


class TurnError(Wire):
    """The error that ended a message, or that a ``session.error`` event carries."""

    name: ShownText = ""
    data: Annotated[TurnErrorData, Fields] = TurnErrorData()


class MessageTime(Wire):
    created: Moment = 0
    completed: Moment | None = None


class UserSummary(Wire):
    diffs: Readable[FileDiff] = []


class UserMessage(Wire):
    role: Literal["user"] = "user"
    id: MessageId
    session_id: SessionId
    time: Annotated[MessageTime, Otherwise(MessageTime())] = MessageTime()
    agent: Annotated[str | None, Shown] = None
    model: Annotated[ModelRef | None, Shown] = None
    summary: Annotated[UserSummary | None, Shown] = None


class AssistantMessage(Wire):
    """One step of the model. ``summary`` marks the result of a compaction: not an answer."""

    role: Literal["assistant"] = "assistant"
    id: MessageId
    session_id: SessionId
    parent_id: MessageId
    time: Annotated[MessageTime, Otherwise(MessageTime())] = MessageTime()
    provider_id: Annotated[str | None, Shown] = None
    model_id: Annotated[str | None, Shown] = None
    agent: Annotated[str | None, Shown] = None
    summary: Flag = False
    cost: Cost = 0.0
    tokens: Annotated[Tokens, Otherwise(Tokens())] = Tokens()
    finish: Annotated[str | None, Shown] = None
    error: Annotated[TurnError, Fields] | None = None
    structured: AnyJson = None


Message = Annotated[UserMessage | AssistantMessage, Field(discriminator="role")]


# Parts


class PartBase(Wire):
    id: str
    session_id: SessionId
    message_id: MessageId


class PartTime(Wire):
    end: Moment | None = None


class TextPart(PartBase):
    """Without ``time.end`` the text is still growing, or was abandoned."""

    type: Literal["text"] = "text"
    text: str
    synthetic: Flag = False
    ignored: Flag = False
    time: Annotated[PartTime | None, Shown] = None
    metadata: Annotated[ShownObject | None, Shown] = None


class ReasoningPart(PartBase):
    type: Literal["reasoning"] = "reasoning"
    text: str
    time: Annotated[PartTime | None, Shown] = None


class FilePart(PartBase):
    type: Literal["file"] = "file"
    mime: str
    url: str
    filename: Annotated[str | None, Shown] = None


class AgentPart(PartBase):
    """A mention of a sub-agent by the user."""

    type: Literal["agent"] = "agent"
    name: str


class SubtaskPart(PartBase):
    """Work that the user assigned to a sub-agent."""

    type: Literal["subtask"] = "subtask"
    prompt: str
    description: str
    agent: str
    model: ModelRef | None = None
    command: str | None = None


class ToolStateBase(Wire):
    input: Annotated[ShownObject, Fields] = {}
    metadata: Annotated[ShownObject | None, Shown] = None


class ToolPending(ToolStateBase):
    status: Literal["pending"] = "pending"


class ToolRunning(ToolStateBase):
    status: Literal["running"] = "running"
    title: Annotated[str | None, Shown] = None


class ToolCompleted(ToolStateBase):
    status: Literal["completed"] = "completed"
    output: ShownText
    title: Annotated[str | None, Shown] = None
    attachments: Annotated[Readable[FilePart], BeforeValidator(_list)] = []


class ToolFailed(ToolStateBase):
    status: Literal["error"] = "error"
    error: ShownText


ToolState = Annotated[
    ToolPending | ToolRunning | ToolCompleted | ToolFailed, Field(discriminator="status")
]


class ToolPart(PartBase):
    type: Literal["tool"] = "tool"
    call_id: str
    tool: str
    state: ToolState


class StepStartPart(PartBase):
    type: Literal["step-start"] = "step-start"


class StepFinishPart(PartBase):
    type: Literal["step-finish"] = "step-finish"
    reason: ShownText


class PatchPart(PartBase):
    """The absolute paths of the files that a step changed."""

    type: Literal["patch"] = "patch"
    files: list[str]


class CompactionPart(PartBase):
    type: Literal["compaction"] = "compaction"


KnownPart = Annotated[
    TextPart
    | ReasoningPart
    | ToolPart
    | StepStartPart
    | StepFinishPart
    | PatchPart
    | CompactionPart
    | FilePart
    | AgentPart
    | SubtaskPart,
    Field(discriminator="type"),
]
_KNOWN = {part.model_fields["type"].default for part in get_args(get_args(KnownPart)[0])}


def _unknown(kind: str) -> str:
    if kind in _KNOWN:
        raise ValueError(f"malformed part of type {kind}")
    return kind


class UnknownPart(PartBase):
    """A part of a type that turns do not need; a malformed part of a known type is an error."""

    type: Annotated[str, AfterValidator(_unknown)]


Part = Annotated[KnownPart | UnknownPart, Field(union_mode="left_to_right")]


class MessageWithParts(Wire):
    info: Message
    parts: list[OnErrorOmit[Part]]
    """A part that a plugin or another version stored malformed must not hide the others."""


# Interrupts


class ToolRef(Wire):
    message_id: MessageId
    call_id: str


UNREAD_CALL = ToolRef(message_id=MessageId(""), call_id="")
"""Stands for a call that cannot be read: nobody may take the request for one without a call."""
Patterns = Annotated[list[str], Otherwise([])]
"""Empty if any of them cannot be read. OpenCode asks for nothing without a pattern, so that no rule
and no grant allows an empty list."""


class PermissionRequest(Wire):
    id: RequestId
    session_id: SessionId
    permission: str
    patterns: Patterns = []
    always: Patterns = []
    metadata: Annotated[ShownObject, Fields] = {}
    tool: Annotated[ToolRef | None, Otherwise(UNREAD_CALL)] = None
    tells_reason: bool = True
    """Whether the model is given the reason of a refusal; not a field of OpenCode."""


class QuestionRequest(Wire):
    id: RequestId
    session_id: SessionId
    questions: list[Question]
    tool: Annotated[ToolRef | None, Shown] = None


# Catalogues


class Capabilities(Wire):
    reasoning: Annotated[bool | None, Shown] = None
    attachment: Annotated[bool | None, Shown] = None
    toolcall: Annotated[bool | None, Shown] = None


class ModelLimit(Wire):
    context: Count | None = None
    output: Count | None = None


class ProviderModel(Wire):
    id: str
    name: str
    provider_id: str
    status: Annotated[str | None, Shown] = None
    capabilities: Annotated[Capabilities, Fields] = Capabilities()
    limit: Annotated[ModelLimit, Fields] = ModelLimit()


class Provider(Wire):
    """A provider without its keys and options, which OpenCode sends in clear."""

    id: str
    name: str
    source: str | None = None
    models: dict[str, Annotated[ProviderModel, Lenient]] = {}


class ConnectedProviders(Wire):
    """``GET /config/providers``: the default models of the providers that can be used now."""

    default: dict[str, Annotated[str, Lenient]]


class ProviderCatalogue(Wire):
    """``GET /provider``: every provider that OpenCode knows. Seven megabytes."""

    all: Readable[Provider]
    default: dict[str, Annotated[str, Lenient]]
    connected: list[str]


class Agent(Wire):
    name: str
    mode: Literal["primary", "subagent", "all"]
    description: str | None = None
    native: Annotated[bool, BeforeValidator(bool)] = False
    hidden: Annotated[bool, BeforeValidator(bool)] = False
    """Both are null for an agent that the user's configuration changes."""
    model: ModelRef | None = None
    permission: PermissionRules = []

    def actions(self, permission: str) -> set[str]:
        """Return the possible actions for a permission; empty if there is no rule for it."""
        actions: set[str] = set()
        for rule in self.permission:
            if rule.covers(permission):
                actions = {rule.action} if rule.pattern == "*" else actions | {rule.action}
        return actions

    @property
    def selectable(self) -> bool:
        """Whether a prompt may name it."""
        return self.mode != "subagent" and not self.hidden


class Command(Wire):
    model_config = ConfigDict(title="CommandItem")

    name: str
    description: str | None = None
    agent: str | None = None
    model: str | None = None
    source: str | None = None
    subtask: bool = False
    hints: list[str] = []


def _known_text(value: object) -> object:
    return value if isinstance(value, str) else None


_WORD = re.compile(r"\"[^\"]*\"|'[^']*'|[^\s\"']+")
_NUMBERED = re.compile(r"\$(\d{1,9})")
_SHELL = re.compile(r"!`([^`]+)`")
_FILE = re.compile(r"(?<![\w`])@(\.?[^\s`,.]*(?:\.[^\s`,.]+)*)")
_PLAIN = re.compile(r"[\w./:@=,+][\w./:@=,+-]*")
_JAVASCRIPT = re.compile(r"\$[$&`'<]")
"""The replacement patterns of JavaScript's ``String.replace``."""


class CommandSource(Wire):
    """A command with its template."""

    name: str
    agent: str | None = None
    template: Annotated[str | None, BeforeValidator(_known_text)] = None
    """None for a command of an MCP server, which expands it when the command is run."""

    def unsafe_arguments(self, arguments: str) -> str | None:
        """Return why the command must not get these arguments; None if they are safe.

        OpenCode (1.18) puts them into the template. It then runs everything of the form
        ``!`command``` and reads every ``@file`` in the result, both without asking for permission.
        """
        template = self.template or ""
        text = self.expanded(arguments)
        if self.template is None:
            foreign = True
        else:
            foreign = not {*_SHELL.findall(text)} <= {*_SHELL.findall(template)} or (
                "`" in template and _JAVASCRIPT.search(arguments) is not None
            )
        if foreign and not all(map(_PLAIN.fullmatch, arguments.split())):
            return (
                "would become part of a shell command that runs without permission; use plain "
                "words that do not begin with a hyphen"
            )
        for file in {*_FILE.findall(text)} - {*_FILE.findall(template)}:
            if file.startswith(("/", "~")) or ".." in file.split("/"):
                return "must not name files outside the workspace with @"
        return None

    def expanded(self, arguments: str) -> str:
        """Return the text that OpenCode makes of the template and these arguments."""
        template = self.template or ""
        words = [word.strip("\"'") for word in _WORD.findall(arguments)]
        last = max((int(number) for number in _NUMBERED.findall(template)), default=0)

        def word(numbered: re.Match[str]) -> str:
            number = int(numbered[1])
            # The last placeholder gets all words that are left.
            return " ".join(words[number - 1 : None if number == last else number])

        text = _NUMBERED.sub(word, template).replace("$ARGUMENTS", arguments)
        if not last and "$ARGUMENTS" not in template and arguments.strip():
            text += f"\n\n{arguments}"
        return text


class Paths(Wire):
    """The directory that OpenCode works in."""

    directory: str


class Project(Wire):
    id: str
    worktree: str
    vcs: str | None = None
    name: str | None = None


class Worktree(Wire):
    model_config = ConfigDict(title="WorktreeItem")

    name: str
    directory: str
    branch: str | None = None


class Workspace(Wire):
    model_config = ConfigDict(title="WorkspaceItem")

    id: str
    type: str
    name: str
    branch: str | None = None
    directory: Annotated[str | None, Field(exclude=True)] = None
    """Not shown to callers, who refer to a workspace by its id."""


class FileNode(Wire):
    model_config = ConfigDict(title="FileItem")

    name: str
    path: str
    type: Literal["file", "directory"]
    ignored: bool = False


class FileBody(Wire):
    """A file's text, or base64 when ``encoding`` says so. A missing file is an empty text."""

    type: Literal["text", "binary"]
    content: str
    encoding: str | None = None
    mime_type: str | None = None


class FoundText(Wire):
    text: str = ""


class TextMatch(Wire):
    """One line found by a text search."""

    path: FoundText
    lines: FoundText
    line_number: Count = Field(default=0, alias="line_number")


class Vcs(Wire):
    branch: str | None = None
    default_branch: str | None = Field(default=None, alias="default_branch")


class McpStatus(Wire):
    status: str
    error: str | None = None


class Health(Wire):
    healthy: bool
    version: str


class Config(Wire):
    """The part of OpenCode's merged configuration that is not secret."""

    model: str | None = None
    default_agent: str | None = Field(default=None, validation_alias="default_agent")
    share: str | None = None
    plugin: list[OnErrorOmit[str]] = []
    """Names and URLs; one with options, which is a pair, is left out."""


# Requests


class InputBase(Wire):
    id: str | None = None
    """Must be unique across all sessions: OpenCode overwrites a part that has the same id."""


class TextInput(InputBase):
    type: Literal["text"] = "text"
    text: str
    synthetic: bool | None = None
    ignored: bool | None = None
    time: AnyObject | None = None
    metadata: AnyObject | None = None


class FileInput(InputBase):
    """A file for the model. ``url`` has to be a ``data:`` URL: OpenCode would open any other URL.

    ``source`` must not name a resource: OpenCode would read that instead, without permission.
    """

    type: Literal["file"] = "file"
    mime: str
    url: str
    filename: str | None = None
    source: AnyObject | None = None


class AgentInput(InputBase):
    type: Literal["agent"] = "agent"
    name: str
    source: AnyObject | None = None


class SubtaskInput(InputBase):
    type: Literal["subtask"] = "subtask"
    prompt: str
    description: str
    agent: str
    model: ModelRef | None = None
    command: str | None = None


InputPart = Annotated[
    TextInput | FileInput | AgentInput | SubtaskInput, Field(discriminator="type")
]


class OutputFormat(Wire):
    type: Literal["text", "json_schema"] = "json_schema"
    json_schema: AnyObject | None = Field(
        default=None, validation_alias="schema", serialization_alias="schema"
    )
    retry_count: int | None = None


class Prompt(Wire):
    """The body of a prompt. The session does not remember ``agent``, so send it every time."""

    parts: list[InputPart]
    message_id: MessageId | None = None
    model: ModelRef | None = None
    agent: str | None = None
    variant: str | None = None
    system: str | None = None
    format: OutputFormat | None = None
    no_reply: bool | None = None
    tools: dict[str, bool] | None = None
    """Replaces the session's permission rules for good; sent only if the caller asks for it."""


class CommandCall(Wire):
    """One of OpenCode's commands and its arguments; ``model`` is written ``provider/model``."""

    command: str
    arguments: str = ""
    message_id: MessageId | None = None
    agent: str | None = None
    model: str | None = None
    variant: str | None = None
    parts: list[FileInput] | None = None


class ShellCall(Wire):
    """A shell command; OpenCode runs it without asking for permission."""

    command: str
    agent: str
    model: ModelRef | None = None


class SessionDraft(Wire):
    """A new session. Without a title, OpenCode asks a model for one."""

    title: str | None = None
    parent_id: SessionId | None = None
    agent: str | None = None
    model: (
        Annotated[
            ModelRef, PlainSerializer(lambda m: {"id": m.model_id, "providerID": m.provider_id})
        ]
        | None
    ) = None
    metadata: AnyObject | None = None
    permission: list[PermissionRule] | None = None


class ArchiveTime(Wire):
    archived: int


class SessionChanges(Wire):
    """Changes to a session: ``metadata`` is replaced, ``permission`` is appended to the rules."""

    title: str | None = None
    metadata: AnyObject | None = None
    permission: list[PermissionRule] | None = None
    time: ArchiveTime | None = None


class WorkspaceDraft(Wire):
    type: str
    id: str | None = None
    branch: str | None = None
    extra: AnyJson = None


class McpServer(Wire):
    """The configuration of an MCP server over HTTP; ``timeout`` is in milliseconds."""

    type: Literal["remote"] = "remote"
    url: str
    headers: dict[str, str] | None = None
    oauth: Literal[False] = False
    timeout: int | None = None
    enabled: bool = True
