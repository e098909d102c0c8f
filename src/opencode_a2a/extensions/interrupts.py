"""Methods that answer and list interrupts; a plain message on the task can answer as well.

An answer goes to the turn that waits, or to the errand that follows a command or prompt of an
extension method. Only an interrupt that no part of the service follows (a stray) is answered in
OpenCode directly.
"""

import asyncio
from contextlib import suppress
from typing import Annotated, Literal

from pydantic import BeforeValidator, ConfigDict, Field

from opencode_a2a.a2a import render
from opencode_a2a.a2a.types import timestamp
from opencode_a2a.clock import now_ms
from opencode_a2a.config import Settings
from opencode_a2a.errors import (
    GrantNotFoundError,
    InterruptChangedError,
    InterruptExpiredError,
    InterruptNotFoundError,
    InterruptTypeMismatchError,
    SessionNotFoundError,
    UpstreamHttpError,
    UpstreamNotFoundError,
)
from opencode_a2a.events import Interrupted, Json, JsonObject, Resumed
from opencode_a2a.extensions.call import Call, NotHereError
from opencode_a2a.extensions.params import Done, Id, Items, Payload, Routed, Text
from opencode_a2a.extensions.registry import Access, Extension, aliases
from opencode_a2a.ids import ContextId, Owner, RequestId
from opencode_a2a.log.state import TERMINAL
from opencode_a2a.opencode.calls import well_formed
from opencode_a2a.opencode.driver import Location
from opencode_a2a.opencode.translate import interrupted
from opencode_a2a.opencode.types import PermissionRequest, QuestionRequest
from opencode_a2a.turns.answers import (
    Answer,
    PermissionReply,
    QuestionRejection,
    QuestionReply,
    Reply,
    Scope,
    check_allowed,
)
from opencode_a2a.turns.sessions import DERIVED_CONTEXT
from opencode_a2a.turns.shared_interrupts import audit_settled
from opencode_a2a.validation import FREE_OBJECT, wrong

Kind = Literal["permission", "question"]
MOST_GRANTS = 1000


def permission_replies(settings: Settings) -> list[Json]:
    """Return the replies that this deployment accepts."""
    return ["once", "always", "reject"] if settings.interrupts.allow_always else ["once", "reject"]


INTERRUPTS = Extension(
    key="interrupt_callback",
    title="Shared interactive interrupt",
    anchor="shared-interactive-interrupt-v1",
    summary="Answer the permissions and questions that a task waits for.",
    aliases=aliases("urn:a2a:interactive-interrupt/v1", "interactive-interrupt"),
    public=lambda _, __: {
        "supported_interrupt_events": ["permission.asked", "question.asked"],
        "request_id_field": "metadata.shared.interrupt.request_id",
    },
    public_methods=True,
    extended=lambda settings, _: {
        "question_reply_contract": {
            "answers": "array of arrays of strings",
            "order": "one array for each question, in their order",
        },
        "permission_reply_values": permission_replies(settings),
        "permission_scopes": ["task", "context"],
    },
    skill="opencode.interrupt.callback",
    tags=("permissions", "questions"),
    notes=(
        "A message on the task answers as well: a word, an option, or a data part.",
        'With a scope, "once" also allows what comes later in the task or context and fits the '
        "patterns that details.always names. Such a grant is listed, and can be revoked.",
        "What a scope allows is described, for people, in details.scope_text.",
        '"always" is refused unless the deployment allows it: it holds for every session.',
        "A request of another caller looks like one that does not exist.",
        "Nothing is allowed whose details.links or details.changes are no longer what was shown: "
        "INTERRUPT_REQUEST_CHANGED. The task shows them anew, and the next answer counts.",
    ),
    errors=(
        InterruptNotFoundError,
        InterruptChangedError,
        InterruptExpiredError,
        InterruptTypeMismatchError,
    ),
)
_SCOPE: JsonObject = {
    "data_source": "local_interrupt_binding_registry_and_upstream",
    "identity_scope": "current_authenticated_caller",
    "empty_result_when_identity_unavailable": True,
}
_ITEM_FIELDS = (
    "request_id", "number", "session_id", "interrupt_type", "task_id", "context_id",
    "details", "asked_at", "expires_at", "default",
)  # fmt: skip
RECOVERY = Extension(
    key="interrupt_recovery",
    title="OpenCode interrupt recovery",
    anchor="opencode-interrupt-recovery-v1",
    summary="List the permissions and questions that wait, after a lost connection for example.",
    aliases=aliases("urn:opencode-a2a:interrupt-recovery/v1", "interrupt-recovery"),
    extended=lambda _, __: {
        "recovery_scope": _SCOPE,
        "item_fields": [*_ITEM_FIELDS],
    },
    scope={
        "implementation_scope": _SCOPE["data_source"],
        "identity_scope": _SCOPE["identity_scope"],
    },
    skill="opencode.interrupt.recovery",
    tags=("permissions", "questions"),
    notes=(
        "The most urgent comes first.",
        "What a command or a prompt of an extension method asks is listed without a task.",
    ),
)


class InterruptDone(Done):
    model_config = ConfigDict(title="Answered")

    request_id: str


class InterruptParams(Routed):
    request_id: Id

    @property
    def named_request(self) -> str | None:
        return self.request_id


def _word(value: object) -> object:
    word = value.strip().lower() if isinstance(value, str) else value
    if isinstance(word, str) and word not in ("once", "always", "reject"):
        raise wrong("must be 'once' or 'reject'; 'always' only where it is switched on")
    return word


class PermissionParams(InterruptParams):
    reply: Annotated[Literal["once", "always", "reject"], BeforeValidator(_word)]
    message: Text | None = None
    scope: Scope | None = None


class GrantParams(Routed):
    grant_id: Id


class GrantItem(Payload):
    grant_id: str
    scope: Scope
    context_id: str
    task_id: str | None = None
    permission: str
    patterns: list[str]
    exact: str | None = None
    directory: str
    request_id: str
    given_at: str


class GrantDone(Done):
    grant_id: str


class QuestionParams(InterruptParams):
    answers: Annotated[list[Annotated[list[str], Field(max_length=100)]], Field(max_length=100)]


@INTERRUPTS.method(
    "a2a.interrupt.permission.reply",
    Access.CONTROL,
    repeatable=True,
    example={"request_id": "per_f00", "reply": "once"},
)
async def reply_permission(call: Call, params: PermissionParams) -> InterruptDone:
    """Allow or refuse what a task asks for; a refusal with a message lets the model continue.

    With the `scope` `task` or `context`, `once` also allows what is asked later there and fits
    the request's `always` patterns, in the same directory.
    """
    reply = PermissionReply(params.reply, params.message, params.scope)
    return await _answer(call, params, reply)


@INTERRUPTS.method(
    "a2a.interrupt.question.reply",
    Access.CONTROL,
    repeatable=True,
    example={"request_id": "que_f00", "answers": [["Red"]]},
)
async def reply_question(call: Call, params: QuestionParams) -> InterruptDone:
    """Answer the questions of a task, a list of labels or free texts for each."""
    answers = [[text.strip() for text in texts if text.strip()] for texts in params.answers]
    return await _answer(call, params, QuestionReply(answers))


@INTERRUPTS.method(
    "a2a.interrupt.question.reject",
    Access.CONTROL,
    repeatable=True,
    example={"request_id": "que_f00"},
)
async def reject_question(call: Call, params: InterruptParams) -> InterruptDone:
    """Dismiss the questions of a task; its turn ends there."""
    return await _answer(call, params, QuestionRejection())


@INTERRUPTS.method("a2a.interrupt.grants.list", Access.READ, local=True)
async def list_grants(call: Call, params: Routed) -> Items[GrantItem]:
    """List what the caller has allowed for a task or a context and what still holds.

    The newest come first, at most a thousand. A grant ends with its task, or when it is revoked.
    Of the patterns, the one that is also `exact` is a command line, in which no star stands for
    anything else.
    """
    grants = await call.interrupts.grants.held(call.principal, [*TERMINAL], MOST_GRANTS)
    items = [
        GrantItem(
            grant_id=grant.id,
            scope="context" if grant.task_id is None else "task",
            context_id=grant.context_id,
            task_id=grant.task_id,
            permission=grant.permission,
            patterns=[*grant.patterns, *([grant.exact] if grant.exact else [])],
            exact=grant.exact,
            directory=grant.directory,
            request_id=grant.request_id,
            given_at=timestamp(grant.given_at),
        )
        for grant in grants
    ]
    return Items(items=items)


@INTERRUPTS.method(
    "a2a.interrupt.grants.revoke",
    Access.CONTROL,
    GrantNotFoundError,
    example={"grant_id": "7f3c0e6a-0d7e-4f57-9d0c-1f5a3f0f7b11"},
    local=True,
)
async def revoke_grant(call: Call, params: GrantParams) -> GrantDone:
    """End a grant: what it allowed is asked for again from now on."""
    await call.interrupts.grants.revoke(call.principal, params.grant_id)
    return GrantDone(grant_id=params.grant_id)


async def _answer(call: Call, params: InterruptParams, reply: Reply) -> InterruptDone:
    """Answer an interrupt of a task or an errand, or a stray of a session of the caller's."""
    interrupts, request_id = call.interrupts, params.request_id
    answer = Answer(reply, call.principal, rights=call.rights)
    missing = InterruptNotFoundError(request_id=request_id[:128])
    # A copy of the same answer waits for the first, and is then recognised as a repeat.
    copies = (call.principal, request_id)
    async with call.deps.tasks.continuing.message_locks.setdefault(copies, asyncio.Lock()):
        row = await interrupts.find(request_id)
        if row is None:
            await _answer_stray(call, request_id, answer)
        elif row.principal != call.principal and not call.caller.supervises:
            raise missing
        elif row.settled_by != call.principal or row.answer != answer.dump():  # else a repeat
            remembered = interrupts.settings.interrupt_request_tombstone_ttl_seconds * 1000
            if row.resolution == "expired" and now_ms() < (row.settled_at or 0) + remembered:
                raise InterruptExpiredError(request_id=request_id)
            # An interrupt that is not settled has not expired, whatever its stored deadline says:
            # its turn decides that, by a monotonic clock.
            interrupt = interrupts.open.get(RequestId(request_id))
            if interrupt is None:
                raise missing
            await interrupt.asker.answer([request_id], answer)
    return InterruptDone(request_id=request_id)


# --- interrupts that no part of the service follows -------------------------------------------


async def _strays(call: Call) -> list[Interrupted]:
    """Return interrupts of the caller's sessions that no part of this service follows.

    They come from a prompt of an extension method before the service was restarted, or from
    somebody who works in the session at OpenCode's own terminal.
    """
    pending: list[PermissionRequest | QuestionRequest] = []
    for listed in (call.opencode.permissions, call.opencode.questions):
        # OpenCode cannot list anything if the metadata of one permission lack a value; those of
        # tasks are known without it.
        with suppress(UpstreamHttpError):
            pending += await listed(at=call.at)
    strays: list[Interrupted] = []
    for request in pending:
        if request.id in call.interrupts.open or await call.interrupts.find(request.id):
            continue
        with suppress(SessionNotFoundError):
            session = await call.session(request.session_id)
            # A session without an owner may belong to somebody who works without this service.
            if await call.owned([session]):
                strays.append(interrupted(request, None, session.directory))
    return strays


async def _answer_stray(call: Call, request_id: str, answer: Answer) -> None:
    missing = InterruptNotFoundError(request_id=request_id[:128])
    if not any(well_formed(kind, request_id) for kind in ("per", "que", "frm")):
        raise missing
    # Nothing is stored about a stray, so it may wait in any OpenCode.
    strays = await _strays(call)
    asked = next((stray for stray in strays if stray.request_id == request_id), None)
    if asked is None:
        raise NotHereError(missing)
    check_allowed(None, asked, answer, allow_always=call.interrupts.allows_always)
    try:
        await call.interrupts.reply(asked, answer.reply, Location(directory=asked.directory))
    except UpstreamNotFoundError:
        raise missing from None
    resumed = Resumed(asked.request_id, asked.type, answer.resolution, answer.by)
    audit_settled(_owner(call, asked), asked, resumed)


def _owner(call: Call, asked: Interrupted) -> Owner:
    return Owner(None, ContextId(f"{DERIVED_CONTEXT}{asked.session_id}"), call.principal)


# --- lists ------------------------------------------------------------------------------------


class InterruptItem(Payload):
    request_id: str
    number: int | None = None
    session_id: str
    interrupt_type: Kind
    context_id: str
    details: Annotated[dict[str, Json], FREE_OBJECT]
    task_id: str | None = None
    asked_at: str | None = None
    expires_at: str | None = None
    default: str | None = None


def _merge_interrupts(_: Routed, lists: list[Items[InterruptItem]]) -> Items[InterruptItem]:
    """Put the most urgent first, and strays, which were asked at no known time, last."""
    items = [item for one in lists for item in one.items]
    items.sort(key=lambda item: (item.asked_at is None, item.expires_at or "", item.request_id))
    return Items(items=items)


@RECOVERY.method("opencode.permissions.list", Access.READ, merge=_merge_interrupts)
async def list_permissions(call: Call, params: Routed) -> Items[InterruptItem]:
    """List the permissions that wait for the caller, the most urgent first.

    Those of commands and prompts of extension methods have no task, but a deadline as well.
    What else a session of the caller's asks, such as work begun at OpenCode's own terminal, has
    neither, and is listed for the directory that the metadata name.
    """
    return await _list(call, "permission")


@RECOVERY.method("opencode.questions.list", Access.READ, merge=_merge_interrupts)
async def list_questions(call: Call, params: Routed) -> Items[InterruptItem]:
    """List the questions that wait for the caller, as for permissions."""
    return await _list(call, "question")


async def _list(call: Call, kind: Kind) -> Items[InterruptItem]:
    strays = await _strays(call)  # first: one that a turn takes up meanwhile is then pending
    whose = None if call.caller.supervises else call.principal
    pending: list[tuple[Interrupted, Owner, tuple[Scope, ...]]] = []
    for one in await call.interrupts.pending(whose, kind):
        asked, owner = one.asked, one.asker.owner
        scopes: tuple[Scope, ...] = ()
        if owner.principal == call.principal:  # nobody else can give more than this one request
            scopes = ("context",) if owner.task_id is None else ("task", "context")
        pending.append((asked, owner, scopes))
    known = {asked.request_id for asked, _, _ in pending}
    pending += [
        (stray, _owner(call, stray), ())
        for stray in strays
        if stray.type == kind and stray.request_id not in known
    ]
    fields = ("request_id", "number", "session_id", "details", "asked_at", "expires_at", "default")
    items: list[InterruptItem] = []
    for asked, owner, scopes in pending:
        shown = render.interrupt(asked, scopes)
        item = InterruptItem.of(
            interrupt_type=asked.type,
            task_id=owner.task_id,
            context_id=owner.context_id,
            **{name: shown.get(name) for name in fields},
        )
        items.append(item)
    return Items(items=items)
