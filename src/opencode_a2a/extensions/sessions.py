"""``opencode.sessions.*``: OpenCode's sessions, as far as they are the caller's or nobody's."""

from typing import Annotated

from pydantic import AfterValidator, ConfigDict, Field, RootModel, model_validator

from opencode_a2a.clock import now_ms
from opencode_a2a.errors import (
    PaginationModeError,
    SessionBusyError,
    SessionNotFoundError,
    UpstreamHttpError,
    UpstreamNotFoundError,
)
from opencode_a2a.events import Json
from opencode_a2a.execution.sessions import DERIVED_CONTEXT
from opencode_a2a.extensions.calls import Call
from opencode_a2a.extensions.payloads import (
    DEFAULT_LIMIT,
    FREE_OBJECT,
    MAX_LIMIT,
    Body,
    Flag,
    Id,
    Listing,
    Number,
    OfSession,
    Payload,
    Placed,
    SessionDone,
    Text,
    invalid,
    wrong,
)
from opencode_a2a.extensions.prompting import (
    CommandRequest,
    MessageIdText,
    Model,
    PromptRequest,
    ShellRequest,
)
from opencode_a2a.extensions.registry import (
    UPSTREAM,
    Access,
    Condition,
    Extension,
    Rules,
    aliases,
)
from opencode_a2a.extensions.transcript import read_message
from opencode_a2a.ids import MessageId, SessionId
from opencode_a2a.messages import ModelChoice
from opencode_a2a.upstream.client import Location, well_formed
from opencode_a2a.upstream.models import (
    ArchiveTime,
    MessageWithParts,
    Session,
    SessionChanges,
    SessionDraft,
    SessionModel,
    StatusRetry,
)

SCAN_LIMIT = 3200
"""How many sessions are looked through for one page of a caller's own."""

SESSIONS = Extension(
    key="session_query",
    title="OpenCode session management",
    anchor="opencode-session-management-v1",
    summary="List, read, prompt, change and end the sessions of OpenCode.",
    aliases=(
        *aliases("urn:opencode-a2a:session-query/v1", "session-management"),
        "urn:opencode-a2a:extension:session-query:v1",
    ),
    extended={
        "context_semantics": {
            "a2a_context_id_field": "contextId",
            "a2a_context_id_prefix": DERIVED_CONTEXT,
            "upstream_session_id_field": "metadata.shared.session.id",
        },
        "pagination": {
            "mode": "limit_and_optional_cursor",
            "default_limit": DEFAULT_LIMIT,
            "max_limit": MAX_LIMIT,
            "behavior": "passthrough",
            "params": ["limit", "before"],
            "cursor_param": "before",
            "result_cursor_field": "next_cursor",
            "applies_to": ["opencode.sessions.list", "opencode.sessions.messages.list"],
            "cursor_applies_to": ["opencode.sessions.messages.list"],
        },
        "prompt_async_part_contracts": {
            "text": {"required": ["type", "text"]},
            "file": {"required": ["type", "mime", "url"], "optional": ["filename"]},
            "agent": {"required": ["type", "name"]},
            "subtask": {
                "required": ["type", "prompt", "description", "agent"],
                "optional": ["model", "command"],
            },
        },
        "subtask_support": {
            "support_level": "passthrough-compatible",
            "invocation_path": "opencode.sessions.prompt_async",
            "part_type": "subtask",
            "subagent_selector_field": "request.parts[].agent",
            "execution_model": "upstream-provider-runtime",
            "notes": ["Parts are checked and forwarded; sub-agents are run by OpenCode."],
        },
    },
    notes=(
        "A session that belongs to another caller, or to a sub-agent of theirs, is not found.",
        "A session that belongs to nobody becomes the caller's when the caller changes it.",
        "File parts are data: URLs; no other URL is passed on.",
        "While a task of this service runs in a session, prompts, commands, shell commands and "
        "summaries are refused as busy.",
    ),
    errors=UPSTREAM,
)

_MUTATIONS = Rules(
    condition=Condition(
        "A2A_ENABLE_SESSION_MUTATIONS", lambda s: s.a2a.enable_session_mutations, default=True
    )
)
_SHELL = Rules(
    condition=Condition(
        "A2A_ENABLE_SESSION_SHELL",
        lambda settings: settings.a2a.enable_session_shell,
        permitted=lambda settings: (
            settings.environment.sandbox_mode != "read-only"
            and settings.environment.write_access_scope != "none"
        ),
    ),
    capability="session_shell",
    audit="session_shell_audit",
)

# --- results ----------------------------------------------------------------------------------


class Task(RootModel[Annotated[dict[str, Json], FREE_OBJECT]]):
    """A Task of A2A, in the spelling of the request's protocol line."""

    model_config = ConfigDict(frozen=True, json_schema_extra={"required": ["id", "contextId"]})


class Message(RootModel[Annotated[dict[str, Json], FREE_OBJECT]]):
    """A Message of A2A, in the spelling of the request's protocol line."""

    model_config = ConfigDict(frozen=True, json_schema_extra={"required": ["messageId", "parts"]})


class Tasks(Payload):
    items: list[Task]


class OneTask(Payload):
    item: Task


class Messages(Payload):
    nullable = frozenset({"next_cursor"})

    items: list[Message]
    next_cursor: str | None = None


class OneMessage(Payload):
    item: Message


class StatusItem(Payload):
    session_id: str
    type: str
    attempt: int | None = None
    message: str | None = None
    next: int | None = None


class Statuses(Payload):
    items: list[StatusItem]


class TodoItem(Payload):
    id: str
    content: str
    status: str
    priority: str


class Todos(Payload):
    items: list[TodoItem]


class DiffItem(Payload):
    file: str
    patch: str
    additions: int
    deletions: int
    status: str | None = None


class Diffs(Payload):
    items: list[DiffItem]


class RevertState(Payload):
    message_id: str | None = None
    part_id: str | None = None
    snapshot: str | None = None
    diff: str | None = None


class SessionSummary(Payload):
    id: str
    title: str
    project_id: str | None = None
    directory: str | None = None
    parent_id: str | None = None
    version: str | None = None
    share_url: str | None = None
    revert: RevertState | None = None


class OneSession(Payload):
    item: SessionSummary


def _message(call: Call, stored: MessageWithParts, session: Session) -> Message:
    return Message(call.message(read_message(stored), session.id))


def summarise(session: Session) -> SessionSummary:
    revert = session.revert
    return SessionSummary(
        id=session.id,
        title=session.title,
        project_id=session.project_id,
        directory=session.directory,
        parent_id=session.parent_id,
        version=session.version,
        share_url=session.share.url if session.share else None,
        revert=RevertState(
            message_id=revert.message_id,
            part_id=revert.part_id,
            snapshot=revert.snapshot,
            diff=revert.diff,
        )
        if revert
        else None,
    )


# --- reading ----------------------------------------------------------------------------------


class ListParams(Listing):
    roots: Flag | None = None
    start: Number | None = None
    search: Annotated[str, Field(max_length=256)] | None = None


@SESSIONS.method("opencode.sessions.status", Access.READ)
async def status(call: Call, params: Placed) -> Statuses:
    """List the sessions that are busy, or wait for their provider."""
    location = call.location(params)
    found = await call.opencode.session_status(at=location)
    mine = await _visible_ids(call, sorted(found))
    items: list[StatusItem] = []
    for session_id in mine:
        state = found[session_id]
        if isinstance(state, StatusRetry):
            retry = (state.attempt, state.message, state.next)
        else:
            retry = (None, None, None)
        items.append(
            StatusItem(
                session_id=session_id,
                type=state.type,
                attempt=retry[0],
                message=retry[1],
                next=retry[2],
            )
        )
    return Statuses(items=items)


async def _visible_ids(call: Call, session_ids: list[SessionId]) -> list[SessionId]:
    sessions: list[Session] = []
    for session_id in session_ids:
        try:
            sessions.append(await call.opencode.session(session_id))
        except SessionNotFoundError:
            continue
    return [session.id for session in await call.visible(sessions)]


@SESSIONS.method(
    "opencode.sessions.list", Access.READ, PaginationModeError, example={"limit": DEFAULT_LIMIT}
)
async def list_sessions(call: Call, params: ListParams) -> Tasks:
    """List sessions, newest first, each as the completed task that stands for it.

    Their contextId continues them: a message with it goes on in the session.
    """
    location = call.location(params)
    wanted = params.limit
    while True:
        found = await call.opencode.sessions(
            at=location,
            limit=wanted,
            roots=params.roots,
            search=params.search,
            start=params.start,
        )
        mine = await call.visible(found)
        if len(mine) >= params.limit or len(found) < wanted or wanted >= SCAN_LIMIT:
            return Tasks(items=[Task(call.task(session)) for session in mine[: params.limit]])
        wanted *= 4


@SESSIONS.method("opencode.sessions.get", Access.READ, SessionNotFoundError)
async def get(call: Call, params: OfSession) -> OneTask:
    """Return a session as the completed task that stands for it."""
    call.location(params)
    return OneTask(item=Task(call.task(await call.session(params.session_id))))


@SESSIONS.method("opencode.sessions.children", Access.READ, SessionNotFoundError)
async def children(call: Call, params: OfSession) -> Tasks:
    """List the sessions that sub-agents of a session ran in."""
    location = call.location(params)
    session = await call.session(params.session_id)
    found = await call.opencode.session_children(session.id, at=location)
    return Tasks(items=[Task(call.task(child)) for child in await call.visible(found)])


@SESSIONS.method("opencode.sessions.todo", Access.READ, SessionNotFoundError)
async def todo(call: Call, params: OfSession) -> Todos:
    """Return the plan that the agent keeps in a session."""
    location = call.location(params)
    session = await call.session(params.session_id)
    found = await call.opencode.session_todo(session.id, at=location)
    items = [
        # OpenCode's own have no id; their place in the plan is what tells them apart.
        TodoItem(
            id=item.id or str(number),
            content=item.content,
            status=item.status,
            priority=item.priority,
        )
        for number, item in enumerate(found, 1)
    ]
    return Todos(items=items)


class DiffParams(OfSession):
    message_id: MessageIdText | None = None


@SESSIONS.method("opencode.sessions.diff", Access.READ, SessionNotFoundError, UpstreamNotFoundError)
async def diff(call: Call, params: DiffParams) -> Diffs:
    """List the file changes that the answer to one user message made.

    Without a message it is the last user message whose answer changed a file.
    """
    location = call.location(params)
    session = await call.session(params.session_id)
    if params.message_id is not None:
        named = [MessageId(params.message_id)]
    else:
        messages = (await call.opencode.messages(session.id, at=location)).items
        named = [message.info.id for message in reversed(messages) if message.info.role == "user"]
    for message_id in named:
        changes = await call.opencode.session_diff(session.id, message_id, at=location)
        if changes:
            return Diffs(
                items=[
                    DiffItem(
                        file=change.file,
                        patch=change.patch,
                        additions=change.additions,
                        deletions=change.deletions,
                        status=change.status,
                    )
                    for change in changes
                ]
            )
    return Diffs(items=[])


class MessagesParams(Listing):
    session_id: Id
    before: Annotated[str, Field(min_length=1, max_length=1024)] | None = None


@SESSIONS.method(
    "opencode.sessions.messages.list", Access.READ, SessionNotFoundError, PaginationModeError
)
async def list_messages(call: Call, params: MessagesParams) -> Messages:
    """Return the newest messages of a session, oldest first; ``next_cursor`` leads further back."""
    location = call.location(params)
    session = await call.session(params.session_id)
    try:
        page = await call.opencode.messages(
            session.id, limit=params.limit, before=params.before, at=location
        )
    except UpstreamHttpError as error:
        if params.before is None or error.data.get("upstream_status") != 400:
            raise
        raise invalid("before", "is no cursor of this list") from None
    items = [_message(call, stored, session) for stored in page.items]
    return Messages(items=items, next_cursor=page.next_cursor)


class MessageParams(OfSession):
    message_id: MessageIdText


@SESSIONS.method(
    "opencode.sessions.messages.get", Access.READ, SessionNotFoundError, UpstreamNotFoundError
)
async def get_message(call: Call, params: MessageParams) -> OneMessage:
    """Return one message of a session."""
    location = call.location(params)
    session = await call.session(params.session_id)
    stored = await call.opencode.message(session.id, MessageId(params.message_id), at=location)
    return OneMessage(item=_message(call, stored, session))


# --- control ----------------------------------------------------------------------------------


class PromptParams(OfSession):
    request: PromptRequest


@SESSIONS.method(
    "opencode.sessions.prompt_async", Access.CONTROL, SessionNotFoundError, SessionBusyError
)
async def prompt_async(call: Call, params: PromptParams) -> SessionDone:
    """Give a session a prompt and return at once; nothing tells how it ends.

    A message of A2A does the same and follows the answer.
    """
    location = call.location(params)
    prompt = params.request.prompt(call.deps.defaults)
    async with call.working(params.session_id, briefly=True) as session:
        await call.opencode.prompt_async(session.id, prompt, at=location)
    return SessionDone(session_id=session.id)


class CommandParams(OfSession):
    request: CommandRequest


@SESSIONS.method(
    "opencode.sessions.command", Access.CONTROL, SessionNotFoundError, SessionBusyError
)
async def command(call: Call, params: CommandParams) -> OneMessage:
    """Run one of OpenCode's commands in a session and return the answer."""
    location = call.location(params)
    wanted = params.request.call(call.deps.defaults)
    known = {one.name for one in await call.opencode.commands(at=location)}
    if wanted.command not in known:
        raise invalid("request.command", "is no command; opencode.commands.list has them")
    async with call.working(params.session_id) as session:
        answer = await call.opencode.run_command(session.id, wanted, at=location)
    return OneMessage(item=_message(call, answer, session))


class ShellParams(OfSession):
    request: ShellRequest


@SESSIONS.method(
    "opencode.sessions.shell",
    Access.OPERATE,
    SessionNotFoundError,
    SessionBusyError,
    rules=_SHELL,
)
async def shell(call: Call, params: ShellParams) -> OneMessage:
    """Run a shell command in a session's directory, without model and without permission."""
    location = call.location(params)
    async with call.working(params.session_id) as session:
        answer = await call.opencode.run_shell(session.id, params.request.call(), at=location)
    return OneMessage(item=_message(call, answer, session))


@SESSIONS.method("opencode.sessions.abort", Access.CONTROL, SessionNotFoundError)
async def abort(call: Call, params: OfSession) -> SessionDone:
    """Stop what runs in a session; a task of the caller's that runs in it is canceled."""
    location = call.location(params)
    async with call.changing(params.session_id) as session:
        await _stop(call, session, location)
    return SessionDone(session_id=session.id)


async def _stop(call: Call, session: Session, location: Location) -> None:
    board = call.deps.board
    for job in board.open_tasks():
        ref = job.log.ref
        if ref.principal == call.principal and job.log.state.status.session_id == session.id:
            await board.stop(job)
    await call.opencode.abort_session(session.id, at=location)


# --- changes ----------------------------------------------------------------------------------


class CreateRequest(Body):
    title: Text | None = None
    parent_id: Id | None = None
    agent: Text | None = None
    model: Model | None = None


class CreateParams(Placed):
    request: CreateRequest = CreateRequest()


@SESSIONS.method("opencode.sessions.create", Access.MUTATE, SessionNotFoundError, rules=_MUTATIONS)
async def create(call: Call, params: CreateParams) -> OneSession:
    """Make a session, which belongs to the caller."""
    location, request = call.location(params), params.request
    parent = (await call.session(request.parent_id)).id if request.parent_id else None
    model = request.model
    draft = SessionDraft(
        title=request.title,
        parent_id=parent,
        agent=request.agent,
        model=SessionModel(id=model.model_id, provider_id=model.provider_id) if model else None,
    )
    session = await call.opencode.create_session(draft, at=location)
    await call.deps.sessions.own(call.principal, session)
    return OneSession(item=summarise(session))


class UpdateRequest(Body):
    title: Text | None = None
    archived: bool | None = None

    @model_validator(mode="after")
    def _says_something(self) -> "UpdateRequest":
        if self.title is None and self.archived is None:
            raise wrong("must have title or archived")
        if self.archived is False:
            raise wrong("cannot be archived: false, since OpenCode does not take it back")
        return self


class UpdateParams(OfSession):
    request: UpdateRequest


@SESSIONS.method("opencode.sessions.update", Access.MUTATE, SessionNotFoundError, rules=_MUTATIONS)
async def update(call: Call, params: UpdateParams) -> OneSession:
    """Change a session's title, or put it into the archive."""
    location, request = call.location(params), params.request
    changes = SessionChanges(
        title=request.title, time=ArchiveTime(archived=now_ms()) if request.archived else None
    )
    async with call.changing(params.session_id) as session:
        changed = await call.opencode.update_session(session.id, changes, at=location)
    return OneSession(item=summarise(changed))


@SESSIONS.method("opencode.sessions.delete", Access.MUTATE, SessionNotFoundError, rules=_MUTATIONS)
async def delete(call: Call, params: OfSession) -> SessionDone:
    """Stop what runs in a session and delete it with its children, for good."""
    location = call.location(params)
    async with call.changing(params.session_id) as session:
        await _stop(call, session, location)
        await call.opencode.delete_session(session.id, at=location)
    await call.deps.sessions.forget(session.id)
    return SessionDone(session_id=session.id)


class ForkRequest(Body):
    message_id: MessageIdText | None = None


class ForkParams(OfSession):
    request: ForkRequest = ForkRequest()


@SESSIONS.method(
    "opencode.sessions.fork",
    Access.MUTATE,
    SessionNotFoundError,
    UpstreamNotFoundError,
    rules=_MUTATIONS,
)
async def fork(call: Call, params: ForkParams) -> OneSession:
    """Copy a session, or its messages before one of them, into a new one of the caller's."""
    location = call.location(params)
    session = await call.session(params.session_id)
    named = params.request.message_id
    made = await call.opencode.fork_session(
        session.id, MessageId(named) if named else None, at=location
    )
    await call.deps.sessions.own(call.principal, made)
    return OneSession(item=summarise(made))


@SESSIONS.method("opencode.sessions.share", Access.MUTATE, SessionNotFoundError, rules=_MUTATIONS)
async def share(call: Call, params: OfSession) -> OneSession:
    """Publish a session through OpenCode's sharing service, if OpenCode is set up for it."""
    location = call.location(params)
    async with call.changing(params.session_id) as session:
        shared = await call.opencode.share_session(session.id, at=location)
    return OneSession(item=summarise(shared))


@SESSIONS.method("opencode.sessions.unshare", Access.MUTATE, SessionNotFoundError, rules=_MUTATIONS)
async def unshare(call: Call, params: OfSession) -> OneSession:
    """Take a shared session back."""
    location = call.location(params)
    async with call.changing(params.session_id) as session:
        hidden = await call.opencode.unshare_session(session.id, at=location)
    return OneSession(item=summarise(hidden))


class SummarizeRequest(Body):
    provider_id: Text | None = None
    model_id: Text | None = None
    auto: bool | None = None

    @model_validator(mode="after")
    def _pair(self) -> "SummarizeRequest":
        if (self.provider_id is None) != (self.model_id is None):
            raise wrong("must have providerID and modelID together")
        return self


class SummarizeParams(OfSession):
    request: SummarizeRequest = SummarizeRequest()


@SESSIONS.method(
    "opencode.sessions.summarize",
    Access.MUTATE,
    SessionNotFoundError,
    SessionBusyError,
    rules=_MUTATIONS,
)
async def summarize(call: Call, params: SummarizeParams) -> SessionDone:
    """Let a model replace a session's history by a summary; returns when it is written."""
    location, request = call.location(params), params.request
    async with call.working(params.session_id) as session:
        if request.provider_id and request.model_id:
            model = ModelChoice(request.provider_id, request.model_id)
        else:
            model = await _model(call, session, location)
        await call.opencode.summarize_session(
            session.id,
            provider_id=model.provider_id,
            model_id=model.model_id,
            auto=request.auto,
            at=location,
        )
    return SessionDone(session_id=session.id)


async def _model(call: Call, session: Session, location: Location) -> ModelChoice:
    """Return the model that the next turn of a session would use."""
    if session.model is not None:
        return ModelChoice(session.model.provider_id, session.model.id)
    if call.deps.defaults.model is not None:
        return call.deps.defaults.model
    provider, _, model = ((await call.opencode.config(at=location)).model or "").partition("/")
    if provider and model:
        return ModelChoice(provider, model)
    for provider, model in (await call.opencode.connected_providers(at=location)).default.items():
        return ModelChoice(provider, model)
    raise invalid("request.providerID", "is needed: OpenCode has no default model")


def _part_id(value: str) -> str:
    if not well_formed("prt", value):
        raise wrong("must be an id of a part: prt_ and letters or digits")
    return value


class RevertRequest(Body):
    message_id: MessageIdText
    part_id: Annotated[Id, AfterValidator(_part_id)] | None = None


class RevertParams(OfSession):
    request: RevertRequest


@SESSIONS.method(
    "opencode.sessions.revert",
    Access.MUTATE,
    SessionNotFoundError,
    SessionBusyError,
    UpstreamNotFoundError,
    rules=_MUTATIONS,
)
async def revert(call: Call, params: RevertParams) -> OneSession:
    """Take back a message and what followed, and the file changes with it."""
    location, request = call.location(params), params.request
    async with call.working(params.session_id, briefly=True) as session:
        message_id = MessageId(request.message_id)
        # OpenCode reverts to a message that it does not have without a word.
        await call.opencode.message(session.id, message_id, at=location)
        reverted = await call.opencode.revert_session(
            session.id, message_id, request.part_id, at=location
        )
    return OneSession(item=summarise(reverted))


@SESSIONS.method(
    "opencode.sessions.unrevert",
    Access.MUTATE,
    SessionNotFoundError,
    SessionBusyError,
    rules=_MUTATIONS,
)
async def unrevert(call: Call, params: OfSession) -> OneSession:
    """Bring back what was taken back, as long as nothing was prompted since."""
    location = call.location(params)
    async with call.working(params.session_id, briefly=True) as session:
        restored = await call.opencode.unrevert_session(session.id, at=location)
    return OneSession(item=summarise(restored))
