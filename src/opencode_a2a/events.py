"""What a turn can report.

This is the vocabulary between OpenCode and A2A: ``opencode.reader`` produces most of these
values, ``turns`` adds what it alone knows and passes them on, ``log`` numbers and
stores them, ``a2a.render`` turns them into A2A events. Nothing here knows either wire
format. Every field is plain JSON, so that a stored event is its own encoding.

The name of a class is stored with its events: after a rename, logs that are stored need a loader
under the old name (``_LOADERS`` in ``log.state``).
"""

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, ClassVar, Literal, Protocol, Self, TypeVar, assert_never

from opencode_a2a.ids import MessageId, RequestId, SessionId

Json = None | bool | int | float | str | list["Json"] | dict[str, "Json"]
JsonObject = dict[str, Json]


class _Dataclass(Protocol):
    __dataclass_fields__: ClassVar[dict[str, Any]]


_DataclassT = TypeVar("_DataclassT", bound=_Dataclass)


def load_known(kind: type[_DataclassT], fields: dict[str, Any]) -> _DataclassT:
    """Build a dataclass from its stored fields, without those that only a later version has.

    During an upgrade, processes of the version before read what the new version stores. If they
    must not ignore a new field, the new version has to raise ``store.schema.OLDEST``.
    """
    known = kind.__dataclass_fields__
    return kind(**{name: value for name, value in fields.items() if name in known})


class Channel(StrEnum):
    """The running texts of a turn: what it answers, or what it plans, and how it came to that."""

    __hash__ = str.__hash__  # an enum's own is written in Python, and channels are looked up a lot

    TEXT = "text"
    REASONING = "reasoning"
    PLAN = "plan"


@dataclass(frozen=True, slots=True)
class SessionBound:
    """The session that the turn runs in; reported again when OpenCode gives it a title."""

    session_id: SessionId
    directory: str | None = None
    title: str | None = None
    model: str | None = None
    """``provider/model`` if it is known: the one that was requested, or the one that answers."""
    agent: str | None = None


@dataclass(frozen=True, slots=True)
class Started:
    """The session is ours; the prompt is sent next."""


@dataclass(slots=True)
class Grew:
    """New text of a channel; never a repeat of what an earlier event carried.

    The texts of one channel, joined as they are, are the channel's text: what separates two parts
    of an answer is already in ``text``. ``opens`` marks the first event of the channel. ``ends_at``
    is the id of OpenCode's event that the text ends with: a process that resumes the turn continues
    after it. It is empty if the part has ended with the text, or OpenCode gave no id. Nobody
    changes one; it is not frozen because that would triple the time to make it.
    """

    channel: ClassVar[Channel]
    message_id: MessageId
    part_id: str
    text: str
    opens: bool = False
    ends_at: str = ""


@dataclass(slots=True)
class TextGrew(Grew):
    """New text of the answer."""

    channel: ClassVar = Channel.TEXT


@dataclass(slots=True)
class ReasoningGrew(Grew):
    """New text of the reasoning."""

    channel: ClassVar = Channel.REASONING


@dataclass(slots=True)
class PlanGrew(Grew):
    """New text of a plan: what a turn answers that only plans."""

    channel: ClassVar = Channel.PLAN


GREW = {grew.channel: grew for grew in (TextGrew, ReasoningGrew, PlanGrew)}


@dataclass(frozen=True, slots=True)
class ChannelReplaced:
    """The whole text of a channel anew: a provider's retry made part of the earlier text void."""

    channel: Channel
    message_id: MessageId
    parts: list[tuple[str, str]]
    """(part id, text) in order; joined they are the channel's text."""


@dataclass(frozen=True, slots=True)
class ChannelClosed:
    """Nothing more will come in this channel."""

    channel: Channel
    message_id: MessageId


class ArtifactChanged:
    """The base of what readers are shown as an artifact of its own, beside the texts.

    Each is given in full and replaces what was there before. It says which artifact of the task it
    is (``artifact``), and whether that is ``complete``.
    """

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class ToolChanged(ArtifactChanged):
    """The state of one tool call."""

    message_id: MessageId
    part_id: str
    call_id: str
    tool: str
    status: Literal["pending", "running", "completed", "error"]
    title: str | None = None
    input: JsonObject | None = None
    output: str | None = None
    error: str | None = None
    metadata: JsonObject | None = None

    @property
    def artifact(self) -> str:
        return f"tool:{self.part_id}"

    @property
    def complete(self) -> bool:
        return self.status in ("completed", "error")


ProgressKey = tuple[str, str, str | None]
"""The type, the status and the part of progress."""
ProgressType = Literal[
    "step-start",
    "step-finish",
    "retry",
    "compaction",
    "subagent",
    "todo",
    "queue",
    "text",
    "session",
    "message",
    "permission",
    "question",
    "peer",
    "recovered",
    "cancel",
]
"""The subjects of progress; ``docs/guide.md`` lists them for clients."""


@dataclass(frozen=True, slots=True)
class Progressed:
    """A sign of life that is neither text nor tool: a step, a retry, a compaction, a wait.

    ``Emitted.is_news`` says when OpenCode's are emitted once more.
    """

    type: ProgressType
    status: str
    """The current status in one word; the possible words depend on the type."""
    part_id: str | None = None
    title: str | None = None
    subtitle: str | None = None
    reason: str | None = None
    todos: list[JsonObject] | None = None

    @property
    def key(self) -> ProgressKey:
        return self.type, self.status, self.part_id


AskedType = Literal["permission", "question", "plan"]


@dataclass(frozen=True, slots=True)
class QuestionOption:
    label: str
    description: str = ""


@dataclass(frozen=True, slots=True)
class Question:
    question: str
    header: str = ""
    options: list[QuestionOption] = field(default_factory=list[QuestionOption])
    multiple: bool = False
    custom: bool = True


@dataclass(frozen=True, slots=True)
class PatchedFile:
    """What a patch does to a file."""

    kind: Literal["add", "change", "delete", "move"]
    path: str
    to: str | None = None
    """Where the file is moved to."""
    replaces: bool | None = None
    """Whether a file is there already that the added or moved one takes the place of; None if that
    cannot be told from here."""


@dataclass(frozen=True, slots=True)
class Interrupted:
    """A person is asked and waited for: a permission, one or more questions, or a plan to approve.

    A plan is asked about when its turn is over, by ``turns`` itself.

    The reader fills what OpenCode said; ``asked_at``, ``expires_at`` (milliseconds), ``default``,
    ``allows_always`` and ``number`` are added by ``turns``, which owns the deadline and the policy.
    """

    request_id: RequestId
    type: AskedType
    session_id: SessionId
    permission: str | None = None
    patterns: list[str] = field(default_factory=list[str])
    always: list[str] = field(default_factory=list[str])
    metadata: JsonObject = field(default_factory=dict[str, Json])
    call_id: str | None = None
    """The tool call that it is for; known together with ``call_message_id``."""
    tool: str | None = None
    tool_input: JsonObject | None = None
    questions: list[Question] = field(default_factory=list[Question])
    directory: str | None = None
    asked_at: int | None = None
    expires_at: int | None = None
    default: str | None = None
    allows_always: bool = False
    origin: str | None = None
    """The title of the sub-agent that asks; None when it is the agent itself."""
    number: int | None = None
    """Its number among the requests of the task, by which a person answers it; never used twice."""
    call_message_id: MessageId | None = None
    """The message of the tool call: a provider may use the id of a call again in another one."""
    links: dict[str, str] = field(default_factory=dict[str, str])
    """Where the files really are that the request names by a symbolic link."""
    links_unknown: bool = False
    """Whether that could not be found out, though this machine has the same files."""
    changes: list[PatchedFile] = field(default_factory=list[PatchedFile])
    """What a patch does to each of its files."""
    tells_reason: bool = True
    """Whether the model is given the reason of a refusal."""

    @property
    def summary(self) -> str:
        """The permission or type and what it is for, on one line."""
        if self.type == "permission":
            return f"{self.permission}: {', '.join(self.patterns) or '(could not be read)'}"
        return f"{self.type}: {' / '.join(question.question for question in self.questions)}"

    @classmethod
    def load(cls, fields: dict[str, Any]) -> "Interrupted":
        """Build an interrupt from the JSON object that it was stored as."""
        questions: list[Question] = []
        for question in fields["questions"]:
            options = [load_known(QuestionOption, option) for option in question["options"]]
            questions.append(load_known(Question, {**question, "options": options}))
        changes = [load_known(PatchedFile, change) for change in fields.get("changes", ())]
        return load_known(cls, {**fields, "questions": questions, "changes": changes})


Resolution = Literal["once", "always", "rejected", "replied", "approved", "expired", "void"]


@dataclass(frozen=True, slots=True)
class Resumed:
    """An interrupt is settled; ``void`` if OpenCode no longer knows it."""

    request_id: RequestId
    type: AskedType
    resolution: Resolution
    by: str | None = None
    """The principal that settled it, or the rule, grant or deadline that did."""
    reason: str | None = None
    """What the person gave as the reason of a refusal."""
    scope: Literal["task", "context"] | None = None
    """Where the person has allowed later requests of the kind, too."""


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens and money: ``input`` excludes what came from the cache, ``output`` the reasoning."""

    input: int = 0
    output: int = 0
    reasoning: int = 0
    cache_read: int = 0
    cache_write: int = 0
    cost: float = 0.0

    @property
    def read(self) -> int:
        """Tokens that the model was given."""
        return self.input + self.cache_read + self.cache_write

    @property
    def written(self) -> int:
        """Tokens that the model wrote, reasoning included."""
        return self.output + self.reasoning

    @property
    def total(self) -> int:
        return self.read + self.written

    def __add__(self, other: "Usage") -> "Usage":
        return Usage(
            self.input + other.input,
            self.output + other.output,
            self.reasoning + other.reasoning,
            self.cache_read + other.cache_read,
            self.cache_write + other.cache_write,
            self.cost + other.cost,
        )


@dataclass(frozen=True, slots=True)
class UsageCounted:
    """The tokens and the cost of a turn: of its own steps, and separately of its sub-agents."""

    own: Usage
    children: Usage | None = None
    model: str | None = None
    """The model that answered last, as ``provider/model``; ``agent`` is the agent that used it."""
    agent: str | None = None

    def __add__(self, later: "UsageCounted") -> "UsageCounted":
        """Return what two turns used, the later of which answered last."""
        children = (self.children or Usage()) + (later.children or Usage())
        both = None if self.children is later.children is None else children
        return UsageCounted(self.own + later.own, both, later.model, later.agent)


@dataclass(frozen=True, slots=True)
class FileChange:
    file: str
    status: str
    additions: int = 0
    deletions: int = 0


@dataclass(frozen=True, slots=True)
class DiffChanged(ArtifactChanged):
    """The files that the turn changed, and one unified diff of all of them."""

    artifact: ClassVar = "diff"
    complete: ClassVar = True
    files: list[FileChange]
    patch: str
    truncated: bool = False


@dataclass(frozen=True, slots=True)
class ResultGiven(ArtifactChanged):
    """The answer by schema, which fits the schema that was asked for."""

    artifact: ClassVar = "result"
    complete: ClassVar = True
    data: Json


class Outcome(StrEnum):
    """How a turn ended."""

    COMPLETED = "completed"
    FAILED = "failed"
    CANCELED = "canceled"
    REJECTED = "rejected"
    """A person refused what the turn needed, and it stopped there."""
    AUTH_REQUIRED = "auth_required"
    """The provider wants a sign-in; the turn is over, the task waits for another try."""


class FailureType(StrEnum):
    """The types of failures, each with what it means; ``docs/errors.md`` lists them."""

    meaning: str

    def __new__(cls, name: str, meaning: str) -> Self:
        member = str.__new__(cls, name)
        member._value_ = name
        member.meaning = meaning
        return member

    UPSTREAM_UNREACHABLE = "UPSTREAM_UNREACHABLE", "OpenCode did not take the prompt."
    UPSTREAM_TIMEOUT = (
        "UPSTREAM_TIMEOUT",
        "OpenCode was silent for too long, or the turn took too long; it was stopped.",
    )
    UPSTREAM_LOST = (
        "UPSTREAM_LOST",
        "One of several OpenCodes was away for too long, or is no longer among the settings.",
    )
    UPSTREAM_ENDLESS = (
        "UPSTREAM_ENDLESS",
        "The model was asked too often without coming to an end; the turn was stopped.",
    )
    BUDGET_EXHAUSTED = (
        "BUDGET_EXHAUSTED",
        "The turn cost more than one turn may cost; it was stopped.",
    )
    UPSTREAM_INTERRUPTED = (
        "UPSTREAM_INTERRUPTED",
        "OpenCode stopped, or another prompt took its place, before the answer was complete, or "
        "before work in the background was.",
    )
    UPSTREAM_ABORTED = "UPSTREAM_ABORTED", "The turn was stopped inside OpenCode."
    UPSTREAM_ABORT_UNCONFIRMED = (
        "UPSTREAM_ABORT_UNCONFIRMED",
        "The task was canceled, but OpenCode did not confirm that it has stopped.",
    )
    UPSTREAM_REQUEST_REJECTED = (
        "UPSTREAM_REQUEST_REJECTED",
        "A person refused what OpenCode asked for; the task is `rejected`.",
    )
    UPSTREAM_EXECUTION_ERROR = "UPSTREAM_EXECUTION_ERROR", "OpenCode could not run the turn."
    UPSTREAM_BAD_REQUEST = (
        "UPSTREAM_BAD_REQUEST",
        "OpenCode or the model provider refused the request.",
    )
    UPSTREAM_UNAUTHORIZED = (
        "UPSTREAM_UNAUTHORIZED",
        "The model provider refused its credentials; the task is `auth-required`.",
    )
    UPSTREAM_PERMISSION_DENIED = (
        "UPSTREAM_PERMISSION_DENIED",
        "The model provider denies access.",
    )
    UPSTREAM_RESOURCE_NOT_FOUND = (
        "UPSTREAM_RESOURCE_NOT_FOUND",
        "The model does not exist, or the session was deleted inside OpenCode.",
    )
    UPSTREAM_QUOTA_EXCEEDED = (
        "UPSTREAM_QUOTA_EXCEEDED",
        "The model provider's limit is reached.",
    )
    UPSTREAM_CLIENT_ERROR = (
        "UPSTREAM_CLIENT_ERROR",
        "The model provider refused the request in another way (4xx).",
    )
    UPSTREAM_SERVER_ERROR = "UPSTREAM_SERVER_ERROR", "The model provider failed (5xx)."
    UPSTREAM_HTTP_ERROR = (
        "UPSTREAM_HTTP_ERROR",
        "The model provider answered with an unexpected status.",
    )
    UPSTREAM_CONTEXT_OVERFLOW = (
        "UPSTREAM_CONTEXT_OVERFLOW",
        "The conversation no longer fits the model.",
    )
    UPSTREAM_CONTENT_FILTERED = (
        "UPSTREAM_CONTENT_FILTERED",
        "The model provider's content filter blocked the answer.",
    )
    UPSTREAM_OUTPUT_LENGTH = (
        "UPSTREAM_OUTPUT_LENGTH",
        "The answer was longer than the model may write.",
    )
    UPSTREAM_NO_PLAN = "UPSTREAM_NO_PLAN", "The agent was to plan, and ended without a plan."
    UPSTREAM_STRUCTURED_OUTPUT = (
        "UPSTREAM_STRUCTURED_OUTPUT",
        "The model did not answer in the form that was asked for.",
    )
    UNSTORABLE = (
        "UNSTORABLE",
        "Something that belongs to the task can never be stored; the turn was stopped.",
    )
    INTERRUPT_EXPIRED = (
        "INTERRUPT_EXPIRED",
        "Nobody answered a permission or question, or approved a plan, in time.",
    )
    INTERRUPT_FORGED = (
        "INTERRUPT_FORGED",
        "A permission or question was answered past this service.",
    )
    SIGN_IN_EXPIRED = "SIGN_IN_EXPIRED", "Nobody signed in to the model provider in time."
    REQUEST_LOST = (
        "REQUEST_LOST",
        "The service was restarted and no longer knows the request.",
    )
    INTERNAL_ERROR = "INTERNAL_ERROR", "The service failed while running the turn."


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a turn did not complete: a stable type, and a text that names the remedy."""

    type: str
    """A ``FailureType``, or the reason of the ``ServiceError`` that ended the turn."""
    message: str
    upstream_status: int | None = None


@dataclass(frozen=True, slots=True)
class Finished:
    """The last event of a turn."""

    outcome: Outcome
    message_id: MessageId | None = None
    finish: str | None = None
    """OpenCode's own word for why the model stopped: stop, length, tool-calls, …"""
    structured: Json = None
    failure: Failure | None = None


FirmEvent = Started | Interrupted | Resumed | Finished
"""Events that readers see only once they are stored; no crash may take them back."""
ArtifactEvent = ToolChanged | DiffChanged | ResultGiven
TurnEvent = (
    FirmEvent
    | ArtifactEvent
    | SessionBound
    | TextGrew
    | ReasoningGrew
    | PlanGrew
    | ChannelReplaced
    | ChannelClosed
    | Progressed
    | UsageCounted
)
"""Everything that a turn can report. ``docs/extending.md`` says what a new event needs."""


@dataclass(slots=True)
class RunningText:
    """The text of a channel, folded from its events: pieces by part, joined only when needed."""

    message_id: MessageId
    """The message that the latest text is from."""
    parts: list[tuple[str, list[str]]] = field(default_factory=list[tuple[str, list[str]]])
    closed: bool = False
    ends_at: str = ""
    """That of the latest event, as it was logged; the turn reader keeps its own."""

    @property
    def text(self) -> str:
        return "".join(piece for _, pieces in self.parts for piece in pieces)


def fold_text(
    texts: dict[Channel, RunningText], event: Grew | ChannelReplaced | ChannelClosed
) -> None:
    """Bring the running texts of a turn up to date."""
    match event:
        case Grew():
            text = texts.get(event.channel)
            if text is None or event.opens:
                texts[event.channel] = text = RunningText(event.message_id)
            if not text.parts or text.parts[-1][0] != event.part_id:
                text.parts.append((event.part_id, []))
            text.parts[-1][1].append(event.text)
            text.message_id = event.message_id
            text.ends_at = event.ends_at
        case ChannelReplaced():
            parts = [(part_id, [text]) for part_id, text in event.parts]
            texts[event.channel] = RunningText(event.message_id, parts)
        case ChannelClosed():
            texts[event.channel].closed = True


@dataclass(slots=True)
class Emitted:
    """Everything that a turn has emitted so far, so that nothing is emitted twice."""

    channels: dict[Channel, RunningText] = field(default_factory=dict[Channel, RunningText])
    tools: dict[str, ToolChanged] = field(default_factory=dict[str, ToolChanged])
    open: dict[RequestId, Interrupted] = field(default_factory=dict[RequestId, Interrupted])
    settled: set[RequestId] = field(default_factory=set[RequestId])
    progress: set[ProgressKey] = field(default_factory=set[ProgressKey])
    todos: list[JsonObject] | None = None
    title: str | None = None
    bound: SessionBound | None = None
    """The last event that named the session; None if there was none."""
    started: bool = False
    """The prompt may have been sent."""

    def is_news(self, progress: Progressed) -> bool:
        """Whether progress is emitted: once for each key, apart from the types that have a case.

        A type that is emitted again when something else changes needs one, and a field here that
        keeps what was emitted last.
        """
        match progress.type:
            case "retry":
                return True  # each is worth a notice
            case "todo":
                return progress.todos != self.todos
            case _:
                return progress.key not in self.progress

    def add(self, event: TurnEvent) -> None:
        match event:
            case Grew() | ChannelReplaced() | ChannelClosed():
                fold_text(self.channels, event)
            case ToolChanged():
                self.tools[event.part_id] = event
            case Interrupted():
                self.open[event.request_id] = event
            case Resumed():
                self.open.pop(event.request_id, None)
                self.settled.add(event.request_id)
            case Progressed(type="todo"):
                self.todos = event.todos
            case Progressed():
                self.progress.add(event.key)
            case SessionBound():
                self.title = self.title if event.title is None else event.title
                self.bound = event
            case Started():
                self.started = True
            case UsageCounted() | DiffChanged() | ResultGiven() | Finished():
                pass  # emitted once, at the end of a turn
            case _:
                assert_never(event)
