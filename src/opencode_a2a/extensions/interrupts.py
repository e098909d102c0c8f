"""Prompts answered and listed by method; a plain message on the task does the same.

Answers take the way of any answer: through the board to the turn that waits.
"""

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, WithJsonSchema

from opencode_a2a.clock import now_ms
from opencode_a2a.errors import (
    InterruptExpiredError,
    InterruptNotFoundError,
    InterruptTypeMismatchError,
    TaskNotFoundError,
    UnsupportedOperationError,
)
from opencode_a2a.events import Interrupted, Json, JsonObject
from opencode_a2a.execution.answers import (
    NotUnderstoodError,
    PermissionReply,
    QuestionRejection,
    QuestionReply,
    Reply,
    strings,
)
from opencode_a2a.extensions.calls import Call
from opencode_a2a.extensions.payloads import FREE_OBJECT, Id, Metadata, Payload, Text, invalid
from opencode_a2a.extensions.registry import UPSTREAM, Access, Extension, aliases
from opencode_a2a.store.interrupts import InterruptRow
from opencode_a2a.tasks.runner import Job

Kind = Literal["permission", "question"]

INTERRUPTS = Extension(
    key="interrupt_callback",
    title="Shared interactive interrupt",
    anchor="shared-interactive-interrupt-v1",
    summary="Answer the permissions and questions that a task waits for.",
    aliases=aliases("urn:a2a:interactive-interrupt/v1", "interactive-interrupt"),
    public={
        "supported_interrupt_events": ["permission.asked", "question.asked"],
        "request_id_field": "metadata.shared.interrupt.request_id",
    },
    public_methods=True,
    extended={
        "permission_reply_values": ["once", "always", "reject"],
        "question_reply_contract": {
            "answers": "array of arrays of strings",
            "order": "one array for each question, in their order",
        },
    },
    notes=(
        "A message on the task answers as well: a word, an option, or a data part.",
        '"always" is refused unless the deployment allows it: it holds for every session.',
        "A request of another caller looks like one that does not exist.",
    ),
    errors=(
        InterruptNotFoundError,
        InterruptExpiredError,
        InterruptTypeMismatchError,
        *UPSTREAM,
    ),
)
RECOVERY = Extension(
    key="interrupt_recovery",
    title="OpenCode interrupt recovery",
    anchor="opencode-interrupt-recovery-v1",
    summary="List the prompts that wait for the caller, after a lost connection for example.",
    aliases=aliases("urn:opencode-a2a:interrupt-recovery/v1", "interrupt-recovery"),
    extended={
        "recovery_scope": {
            "data_source": "local_interrupt_binding_registry",
            "identity_scope": "current_authenticated_caller",
            "empty_result_when_identity_unavailable": True,
        },
        "item_fields": [
            *("request_id", "session_id", "interrupt_type", "task_id", "context_id"),
            *("details", "asked_at", "expires_at", "default"),
        ],
    },
    notes=("The most urgent comes first.",),
)


class Answered(Payload):
    ok: bool = True
    request_id: str


class InterruptParams(Payload):
    request_id: Id
    metadata: Metadata | None = None


def _word(value: object) -> object:
    return value.strip().lower() if isinstance(value, str) else value


class PermissionParams(InterruptParams):
    reply: Annotated[
        Literal["once", "always", "reject"],
        BeforeValidator(_word),
        WithJsonSchema({"type": "string", "enum": ["once", "always", "reject"]}),
    ]
    message: Text | None = None


class QuestionParams(InterruptParams):
    answers: Annotated[list[Annotated[list[str], Field(max_length=100)]], Field(max_length=100)]


@INTERRUPTS.method(
    "a2a.interrupt.permission.reply",
    Access.CONTROL,
    example={"request_id": "per_f00", "reply": "once"},
)
async def reply_permission(call: Call, params: PermissionParams) -> Answered:
    """Allow or refuse what a task asks for; a refusal with a message lets the model go on."""
    asked, job = await _pending(call, params.request_id, "permission")
    return await _answer(call, job, asked, PermissionReply(params.reply, params.message))


@INTERRUPTS.method(
    "a2a.interrupt.question.reply",
    Access.CONTROL,
    example={"request_id": "que_f00", "answers": [["Red"]]},
)
async def reply_question(call: Call, params: QuestionParams) -> Answered:
    """Answer the questions of a task, a list of labels or free texts for each."""
    asked, job = await _pending(call, params.request_id, "question")
    try:
        answers = strings([[*answer] for answer in params.answers], asked)
    except NotUnderstoodError as error:
        raise invalid("answers", str(error)) from None
    return await _answer(call, job, asked, QuestionReply(answers))


@INTERRUPTS.method(
    "a2a.interrupt.question.reject", Access.CONTROL, example={"request_id": "que_f00"}
)
async def reject_question(call: Call, params: InterruptParams) -> Answered:
    """Dismiss the questions of a task; its turn ends there."""
    asked, job = await _pending(call, params.request_id, "question")
    return await _answer(call, job, asked, QuestionRejection())


async def _pending(call: Call, request_id: str, kind: Kind) -> tuple[Interrupted, Job]:
    """Return a prompt that waits for the caller, and its task."""
    interrupts = call.deps.interrupts
    row = await interrupts.find(call.principal, request_id)
    if row is None:
        raise _missing(request_id)
    now = now_ms()
    if row.resolution is not None:
        remembered = (row.settled_at or 0) + interrupts.policy.tombstone_seconds * 1000
        if row.resolution == "expired" and now < remembered:
            raise InterruptExpiredError(request_id=request_id)
        raise _missing(request_id)
    if row.expires_at <= now:
        raise InterruptExpiredError(request_id=request_id)
    if row.type != kind:
        raise InterruptTypeMismatchError(
            request_id=request_id, expected_interrupt_type=kind, actual_interrupt_type=row.type
        )
    found = _live(call, row)
    if found is None:
        raise _missing(request_id)
    return found


async def _answer(call: Call, job: Job, asked: Interrupted, reply: Reply) -> Answered:
    try:
        await call.deps.board.reply(call.principal, job, asked.request_id, reply)
    except UnsupportedOperationError:
        raise _missing(asked.request_id) from None
    return Answered(request_id=asked.request_id)


def _live(call: Call, row: InterruptRow) -> tuple[Interrupted, Job] | None:
    try:
        job = call.deps.board.find(call.principal, row.task_id)
    except TaskNotFoundError:
        return None
    for asked in job.log.state.status.pending:
        if asked.request_id == row.request_id:
            return asked, job
    return None


def _missing(request_id: str) -> InterruptNotFoundError:
    return InterruptNotFoundError(request_id=request_id[:128])


# --- what waits -------------------------------------------------------------------------------


class InterruptItem(Payload):
    request_id: str
    session_id: str
    interrupt_type: Kind
    task_id: str
    context_id: str
    details: Annotated[dict[str, Json], FREE_OBJECT]
    asked_at: str
    expires_at: str
    default: str


class Items(Payload):
    items: list[InterruptItem]


class Nothing(Payload):
    """No params but routing metadata, which change nothing."""

    metadata: Metadata | None = None


@RECOVERY.method("opencode.permissions.list", Access.READ)
async def list_permissions(call: Call, params: Nothing) -> Items:
    """List the permissions that the caller's tasks wait for."""
    return await _list(call, "permission")


@RECOVERY.method("opencode.questions.list", Access.READ)
async def list_questions(call: Call, params: Nothing) -> Items:
    """List the questions that the caller's tasks wait for."""
    return await _list(call, "question")


async def _list(call: Call, kind: Kind) -> Items:
    rows = await call.deps.interrupts.pending(call.principal, kind)
    waiting = ((row, _live(call, row)) for row in rows)
    return Items(items=[_item(call, row, live[0]) for row, live in waiting if live is not None])


def _item(call: Call, row: InterruptRow, asked: Interrupted) -> InterruptItem:
    told: JsonObject = call.deps.spelling.interrupt(asked)
    return InterruptItem.model_validate(
        {
            "request_id": asked.request_id,
            "session_id": asked.session_id,
            "interrupt_type": asked.type,
            "task_id": row.task_id,
            "context_id": row.context_id,
            "details": told["details"],
            "asked_at": told["asked_at"],
            "expires_at": told["expires_at"],
            "default": told["default"],
        }
    )
