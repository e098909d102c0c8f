"""Methods on OpenCode's sessions that belong to the caller or to nobody."""

from collections.abc import Mapping
from contextlib import AsyncExitStack, suppress
from typing import Annotated

from pydantic import AliasPath, ConfigDict, Field, model_validator

from opencode_a2a.clock import now_ms
from opencode_a2a.cluster.fleet import MovedError
from opencode_a2a.errors import (
    AuthorizationForbiddenError,
    BudgetExhaustedError,
    InvalidParamsError,
    PaginationModeError,
    SessionBusyError,
    SessionNotFoundError,
    StreamEndedError,
    UpstreamHttpError,
    UpstreamNotFoundError,
)
from opencode_a2a.extensions.call import Call
from opencode_a2a.extensions.messages import (
    A2AMessage,
    A2ATask,
    CommandRequest,
    PromptModel,
    PromptRequest,
    PromptSubtask,
    ShellRequest,
)
from opencode_a2a.extensions.params import (
    DEFAULT_LIMIT,
    MAX_LIMIT,
    Body,
    Flag,
    Id,
    Item,
    Items,
    Listing,
    MessageRef,
    Number,
    OfSession,
    PartRef,
    Payload,
    Placed,
    SessionDone,
    Text,
)
from opencode_a2a.extensions.registry import Access, Condition, Extension, aliases
from opencode_a2a.ids import MessageId, ModelRef, SessionId, scoped_id
from opencode_a2a.opencode import types as wire
from opencode_a2a.opencode.translate import could_change_files
from opencode_a2a.turns.sessions import DERIVED_CONTEXT
from opencode_a2a.validation import wrong

_MESSAGE = "msg_1deb3fc6b000iKn0wo4MZ7ksDZ"
"""The id of a message, for examples."""
SCAN_LIMIT = 3200
"""How many sessions are searched for one page of those that the caller may see."""

SESSIONS = Extension(
    key="session_query",
    title="OpenCode session management",
    anchor="opencode-session-management-v1",
    summary="List, read, prompt, change and end the sessions of OpenCode.",
    aliases=(
        *aliases("urn:opencode-a2a:session-query/v1", "session-management"),
        "urn:opencode-a2a:extension:session-query:v1",
    ),
    extended=lambda _, __: {
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
            "text": {
                "required": ["type", "text"],
                "optional": ["id", "synthetic", "ignored", "time", "metadata"],
            },
            "file": {
                "required": ["type", "mime", "url"],
                "optional": ["id", "filename", "source"],
            },
            "agent": {"required": ["type", "name"], "optional": ["id", "source"]},
            "subtask": {
                "required": ["type", "prompt", "description", "agent"],
                "optional": ["id", "model", "command"],
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
    skill="opencode.sessions.management",
    tags=("sessions", "history"),
    notes=(
        "A session that belongs to another caller, or to a sub-agent of theirs, is not found.",
        "A session that belongs to nobody becomes the caller's when the caller changes it, and so "
        "do its ancestors.",
        "File parts are data: URLs, or http(s) URLs that are fetched as those in messages are; "
        "any other URL is refused.",
        "While a task of this service runs in a session, commands, shell commands and summaries "
        "are refused as busy; a prompt joins the turn.",
        "Ids of messages and parts that a caller chooses hold inside the session: OpenCode stores "
        "them under ids of the session's own.",
    ),
)

_MUTATIONS = Condition(
    "A2A_ENABLE_SESSION_MUTATIONS", lambda s: s.a2a.enable_session_mutations, default=True
)
_SHELL = Condition(
    "A2A_ENABLE_SESSION_SHELL",
    lambda settings: settings.a2a.enable_session_shell,
    permitted=lambda settings: (
        settings.environment.sandbox_mode != "read-only"
        and settings.environment.write_access_scope != "none"
    ),
)

# --- results ----------------------------------------------------------------------------------


class Messages(Items[A2AMessage]):
    nullable = frozenset({"next_cursor"})

    next_cursor: str | None = None


class StatusItem(Payload):
    session_id: str
    type: str
    attempt: int | None = None
    message: str | None = None
    next: int | None = None


class TodoItem(Payload):
    id: str
    content: str
    status: str
    priority: str


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
    share_url: str | None = Field(default=None, validation_alias=AliasPath("share", "url"))
    revert: RevertState | None = None


OneSession = Item[SessionSummary]


# --- reading ----------------------------------------------------------------------------------


class SessionListParams(Listing):
    model_config = ConfigDict(title="ListParams")

    roots: Flag | None = None
    start: Number | None = None
    search: Annotated[str, Field(max_length=256)] | None = None


def _merge_statuses(_: Placed, lists: list[Items[StatusItem]]) -> Items[StatusItem]:
    return Items(items=[item for one in lists for item in one.items])


@SESSIONS.method("opencode.sessions.status", Access.READ, merge=_merge_statuses)
async def status(call: Call, params: Placed) -> Items[StatusItem]:
    """List the sessions that are busy, or wait for their provider."""
    states = await call.opencode.session_status(at=call.at)
    sessions: list[wire.Session] = []
    for session_id in sorted(states):
        with suppress(SessionNotFoundError):
            sessions.append(await call.opencode.session(session_id))
    items = [
        StatusItem(session_id=session.id, **dict(states[session.id]))
        for session in await call.visible(sessions)
    ]
    return Items(items=items)


def _merge_sessions(params: SessionListParams, lists: list[Items[A2ATask]]) -> Items[A2ATask]:
    items = [item for one in lists for item in one.items]
    if len(lists) > 1:
        # By id too, so that all replicas put those of one millisecond into the same order.
        items.sort(key=lambda item: (item.updated, str(item.root["id"])), reverse=True)
    return Items(items=items[: params.limit])


@SESSIONS.method(
    "opencode.sessions.list",
    Access.READ,
    PaginationModeError,
    example={"limit": DEFAULT_LIMIT},
    merge=_merge_sessions,
)
async def list_sessions(call: Call, params: SessionListParams) -> Items[A2ATask]:
    """List sessions, newest first, each as the completed task that stands for it.

    Their contextId continues them: a message with it continues the session.
    """
    wanted = params.limit
    while True:
        found = await call.opencode.sessions(
            at=call.at, limit=wanted, roots=params.roots, search=params.search, start=params.start
        )
        visible = await call.visible(found)
        if len(visible) >= params.limit or len(found) < wanted or wanted >= SCAN_LIMIT:
            page = visible[: params.limit]
            return Items(items=[A2ATask.of(session, call.version) for session in page])
        wanted *= 4  # many of them are other callers'


@SESSIONS.method("opencode.sessions.get", Access.READ)
async def get(call: Call, params: OfSession) -> Item[A2ATask]:
    """Return a session as the completed task that stands for it."""
    return Item(item=A2ATask.of(await call.session(params.session_id), call.version))


@SESSIONS.method("opencode.sessions.children", Access.READ)
async def children(call: Call, params: OfSession) -> Items[A2ATask]:
    """List the sessions that sub-agents of a session ran in."""
    session = await call.session(params.session_id)
    found = await call.opencode.session_children(session.id, at=call.at)
    return Items(items=[A2ATask.of(child, call.version) for child in await call.visible(found)])


@SESSIONS.method("opencode.sessions.todo", Access.READ, requires="todos")
async def todo(call: Call, params: OfSession) -> Items[TodoItem]:
    """Return the agent's to-do list in a session."""
    session = await call.session(params.session_id)
    found = await call.opencode.session_todo(session.id, at=call.at)
    # OpenCode's items have no id; their position identifies them.
    items = [{**dict(item), "id": item.id or str(number)} for number, item in enumerate(found, 1)]
    return Items[TodoItem].of(items=items)


class DiffParams(OfSession):
    message_id: MessageRef | None = None


@SESSIONS.method("opencode.sessions.diff", Access.READ, UpstreamNotFoundError)
async def diff(call: Call, params: DiffParams) -> Items[wire.FileDiff]:
    """List the file changes that the answer to one user message made.

    Without a message it is the last user message whose answer changed a file. An answer that ran no
    tool that can change files made none, whatever others changed meanwhile.
    """
    session = await call.session(params.session_id)
    answers: dict[MessageId, list[wire.MessageWithParts]] = {}
    for message in (await call.opencode.messages(session.id, at=call.at)).items:
        if isinstance(message.info, wire.AssistantMessage):
            answers.setdefault(message.info.parent_id, []).append(message)
    for asked in [params.message_id] if params.message_id else reversed(answers):
        if not could_change_files(answers.get(asked, ())):
            continue
        if changes := await call.opencode.session_diff(session.id, asked, at=call.at):
            return Items(items=changes)
    return Items(items=[])


class MessagesParams(Listing, OfSession):
    before: Annotated[str, Field(min_length=1, max_length=1024)] | None = None


@SESSIONS.method("opencode.sessions.messages.list", Access.READ, PaginationModeError)
async def list_messages(call: Call, params: MessagesParams) -> Messages:
    """Return the newest messages of a session, oldest first; ``next_cursor`` leads further back."""
    session = await call.session(params.session_id)
    try:
        page = await call.opencode.messages(
            session.id, limit=params.limit, before=params.before, at=call.at
        )
    except UpstreamHttpError as error:
        if params.before is None or error.data.get("upstream_status") != 400:
            raise
        raise InvalidParamsError.of("before", "is not a cursor returned by this method") from None
    items = [A2AMessage.of(stored, call.version) for stored in page.items]
    return Messages(items=items, next_cursor=page.next_cursor)


class MessageParams(OfSession):
    message_id: MessageRef


@SESSIONS.method(
    "opencode.sessions.messages.get",
    Access.READ,
    UpstreamNotFoundError,
    example={"message_id": _MESSAGE},
)
async def get_message(call: Call, params: MessageParams) -> Item[A2AMessage]:
    """Return one message of a session."""
    session = await call.session(params.session_id)
    stored = await call.opencode.message(session.id, params.message_id, at=call.at)
    return Item(item=A2AMessage.of(stored, call.version))


# --- control ----------------------------------------------------------------------------------


class PromptParams(OfSession):
    request: PromptRequest


class PromptDone(SessionDone):
    message_id: str | None = None


@SESSIONS.method(
    "opencode.sessions.prompt_async",
    Access.CONTROL,
    AuthorizationForbiddenError,
    BudgetExhaustedError,
    SessionBusyError,
    example={"request": {"parts": [{"type": "text", "text": "hello"}]}},
)
async def prompt_async(call: Call, params: PromptParams) -> PromptDone:
    """Send a prompt without waiting for the answer.

    To follow the answer, send an A2A message instead. A busy session takes the prompt into the
    running turn, unless that has wider rights. A message with an id of the caller's is stored
    under `message_id`. `tools` takes tools away, but does not allow what needs a permission.
    """
    at, session_id = call.at, SessionId(params.session_id)
    subtasks = {
        f"request.parts[{index}]": part
        for index, part in enumerate(params.request.parts)
        if isinstance(part, PromptSubtask)
    }
    if subtasks and call.rights.changes != "allow":
        raise AuthorizationForbiddenError(
            "A sub-agent cannot be kept from changing files; send the prompt without a subtask",
            credential_id=call.caller.credential_id,
        )
    await _check_chosen(
        call,
        {"request.agent": params.request.agent}
        | {f"{field}.agent": part.agent for field, part in subtasks.items()},
        {"request.model": params.request.model}
        | {f"{field}.model": part.model for field, part in subtasks.items()},
    )
    prompt = await params.request.prompt(session_id, call.settings.opencode, call.deps.fetch)
    async with call.changing(session_id) as session:
        message_id = await _message_id(call, session, prompt.message_id)
        async with call.giving_work(session, prompt.agent, prompt.tools) as agent:
            given = {"message_id": message_id, "agent": agent, "tools": None}
            await call.opencode.prompt_async(session.id, prompt.model_copy(update=given), at=at)
    return PromptDone(session_id=session.id, message_id=message_id)


async def _check_chosen(
    call: Call,
    agents: Mapping[str, str | None],
    models: Mapping[str, PromptModel | ModelRef | None],
) -> None:
    """Refuse agents and models that OpenCode does not have; they are given by field.

    OpenCode (1.18) answers them with an error that says nothing, or runs nothing and stores none.
    """
    if any(agents.values()):
        names = [agent.name for agent in await call.opencode.agents(at=call.at)]
        for field, name in agents.items():
            if name and name not in names:
                text = f"is not one of the agents: {', '.join(names)}"
                raise InvalidParamsError.of(field, text)
    if any(models.values()):
        catalogue = await call.opencode.provider_catalogue(at=call.at)
        connected = {one.id: one.models for one in catalogue.all if one.id in catalogue.connected}
        for field, model in models.items():
            if model and model.model_id not in connected.get(model.provider_id, ()):
                text = "is not a model of a connected provider; opencode.models.list has them"
                raise InvalidParamsError.of(field, text)


async def _message_id(
    call: Call, session: wire.Session, given: MessageId | None
) -> MessageId | None:
    """Return the id under which OpenCode stores a message to which the caller gave an id.

    Ids are unique across sessions, so it is one made for the session, unless the session has a
    message with the given id already.
    """
    if given is None:
        return None
    try:
        await call.opencode.message(session.id, given, at=call.at)
    except UpstreamNotFoundError:
        return MessageId(scoped_id(session.id, given))
    return given


class CommandParams(OfSession):
    request: CommandRequest


@SESSIONS.method(
    "opencode.sessions.command",
    Access.CONTROL,
    BudgetExhaustedError,
    SessionBusyError,
    example={"request": {"command": "review", "arguments": ""}},
    needs="allow",
)
async def command(call: Call, params: CommandParams) -> Item[A2AMessage]:
    """Run one of OpenCode's commands in a session and return the answer.

    A command may hold shell commands that OpenCode runs without permission, and files that it
    reads. Those are the author's to choose: arguments cannot add any.
    """
    at, session_id = call.at, SessionId(params.session_id)
    wanted = await params.request.call(session_id, call.settings.opencode, call.deps.fetch)
    known = {one.name: one for one in await call.opencode.command_sources(at=at)}
    source = known.get(wanted.command)
    if source is None:
        raise InvalidParamsError.of(
            "request.command", "is not a command; opencode.commands.list lists them"
        )
    if problem := source.unsafe_arguments(wanted.arguments):
        raise InvalidParamsError.of("request.arguments", problem)
    chosen = params.request
    await _check_chosen(call, {"request.agent": chosen.agent}, {"request.model": chosen.model})
    async with call.working(session_id) as session:
        message_id = await _message_id(call, session, wanted.message_id)
        async with call.giving_work(session, source.agent or wanted.agent) as agent:
            wanted = wanted.model_copy(update={"message_id": message_id, "agent": agent})
            answer = await call.opencode.run_command(session.id, wanted, at=at)
    return Item(item=A2AMessage.of(answer, call.version))


class ShellParams(OfSession):
    request: ShellRequest


@SESSIONS.method(
    "opencode.sessions.shell",
    Access.OPERATE,
    SessionBusyError,
    example={"request": {"agent": "build", "command": "git status"}},
    condition=_SHELL,
    needs="allow",
    capability="session_shell",
    audit="session_shell_audit",
)
async def shell(call: Call, params: ShellParams) -> Item[A2AMessage]:
    """Run a shell command in a session's directory, without model and without permission.

    It is refused where changes have to be asked for: nobody would be asked.
    """
    chosen = params.request
    await _check_chosen(call, {"request.agent": chosen.agent}, {"request.model": chosen.model})
    async with call.working(params.session_id) as session:
        answer = await call.opencode.run_shell(session.id, chosen.call(), at=call.at)
    return Item(item=A2AMessage.of(answer, call.version))


@SESSIONS.method("opencode.sessions.abort", Access.CONTROL, repeatable=True)
async def abort(call: Call, params: OfSession) -> SessionDone:
    """Stop what runs in a session; a task of the caller's that runs in it is canceled."""
    async with call.changing(params.session_id) as session:
        await _stop(call, session)
    return SessionDone(session_id=session.id)


async def _stop(call: Call, session: wire.Session) -> None:
    for task in call.deps.tasks.open.all():
        state = task.log.state
        if state.ref.principal == call.principal and state.status.session_id == session.id:
            await task.cancel()
            try:
                await task.log.until_ended()
            except StreamEndedError:  # another replica may run the task now
                raise MovedError(call.member.name, begun=True) from None
    await call.opencode.abort_session(session.id, at=call.at)


# --- changes ----------------------------------------------------------------------------------


class CreateRequest(Body):
    title: Text | None = None
    parent_id: Id | None = None
    agent: Text | None = None
    model: PromptModel | None = None


class CreateParams(Placed):
    request: CreateRequest = CreateRequest()

    @property
    def named_session(self) -> str | None:
        return self.request.parent_id

    @property
    def begins_context(self) -> bool:
        return True


@SESSIONS.method(
    "opencode.sessions.create", Access.MUTATE, SessionNotFoundError, condition=_MUTATIONS
)
async def create(call: Call, params: CreateParams) -> OneSession:
    """Create a session, which belongs to the caller."""
    request, model = params.request, params.request.model
    await _check_chosen(call, {"request.agent": request.agent}, {"request.model": model})
    async with AsyncExitStack() as held:
        parent = None
        if request.parent_id is not None:
            parent = await held.enter_async_context(call.changing(request.parent_id))
        draft = wire.SessionDraft(
            title=request.title,
            parent_id=parent and parent.id,
            agent=request.agent,
            model=model and ModelRef(model.provider_id, model.model_id),
        )
        session = await call.opencode.create_session(draft, at=call.at)
        await call.sessions.own(call.principal, session)
    return OneSession.of(item=session)


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


@SESSIONS.method(
    "opencode.sessions.update",
    Access.MUTATE,
    example={"request": {"title": "A better title"}},
    condition=_MUTATIONS,
)
async def update(call: Call, params: UpdateParams) -> OneSession:
    """Change a session's title, or put it into the archive."""
    archived = wire.ArchiveTime(archived=now_ms()) if params.request.archived else None
    changes = wire.SessionChanges(title=params.request.title, time=archived)
    async with call.changing(params.session_id) as session:
        changed = await call.opencode.update_session(session.id, changes, at=call.at)
    return OneSession.of(item=changed)


@SESSIONS.method("opencode.sessions.delete", Access.MUTATE, condition=_MUTATIONS)
async def delete(call: Call, params: OfSession) -> SessionDone:
    """Stop what runs in a session and delete it with its children, for good."""
    async with call.changing(params.session_id) as session:
        await _stop(call, session)
        await call.opencode.delete_session(session.id, at=call.at)
    await call.sessions.forget(session.id)
    return SessionDone(session_id=session.id)


class ForkRequest(Body):
    message_id: MessageRef | None = None


class ForkParams(OfSession):
    request: ForkRequest = ForkRequest()


@SESSIONS.method(
    "opencode.sessions.fork", Access.MUTATE, UpstreamNotFoundError, condition=_MUTATIONS
)
async def fork(call: Call, params: ForkParams) -> OneSession:
    """Copy a session, or its messages before one of them, into a new one of the caller's."""
    session = await call.session(params.session_id)
    made = await call.opencode.fork_session(session.id, params.request.message_id, at=call.at)
    await call.sessions.own(call.principal, made)
    return OneSession.of(item=made)


@SESSIONS.method("opencode.sessions.share", Access.MUTATE, condition=_MUTATIONS, requires="sharing")
async def share(call: Call, params: OfSession) -> OneSession:
    """Publish a session through OpenCode's sharing service, if OpenCode is set up for it."""
    async with call.changing(params.session_id) as session:
        return OneSession.of(item=await call.opencode.share_session(session.id, at=call.at))


@SESSIONS.method(
    "opencode.sessions.unshare", Access.MUTATE, condition=_MUTATIONS, requires="sharing"
)
async def unshare(call: Call, params: OfSession) -> OneSession:
    """Stop sharing a session."""
    async with call.changing(params.session_id) as session:
        return OneSession.of(item=await call.opencode.unshare_session(session.id, at=call.at))


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
    BudgetExhaustedError,
    SessionBusyError,
    condition=_MUTATIONS,
)
async def summarize(call: Call, params: SummarizeParams) -> SessionDone:
    """Let a model replace a session's history by a summary; returns when it is written.

    With `auto` the model then continues what it was doing, within the rights of the call.
    """
    request, model = params.request, None
    if request.provider_id and request.model_id:
        model = ModelRef(request.provider_id, request.model_id)
        await _check_chosen(call, {}, {"request.modelID": model})
    async with call.working(params.session_id) as session:
        model = model or await _model(call, session)
        async with call.giving_work(session, None):
            await call.opencode.summarize_session(session.id, model, auto=request.auto, at=call.at)
    return SessionDone(session_id=session.id)


async def _model(call: Call, session: wire.Session) -> ModelRef:
    """Return the model that the next turn of a session would use."""
    if session.model is not None:
        return session.model
    if call.settings.opencode.model is not None:
        return call.settings.opencode.model
    if configured := ModelRef.parse((await call.opencode.config(at=call.at)).model):
        return configured
    for provider, model in (await call.opencode.connected_providers(at=call.at)).default.items():
        return ModelRef(provider, model)
    raise InvalidParamsError.of("request.providerID", "is needed: OpenCode has no default model")


class RevertRequest(Body):
    message_id: MessageRef
    part_id: PartRef | None = None


class RevertParams(OfSession):
    request: RevertRequest


@SESSIONS.method(
    "opencode.sessions.revert",
    Access.MUTATE,
    SessionBusyError,
    UpstreamNotFoundError,
    example={"request": {"messageID": _MESSAGE}},
    condition=_MUTATIONS,
    needs="ask",
)
async def revert(call: Call, params: RevertParams) -> OneSession:
    """Revert a message, everything after it, and the file changes they made."""
    message_id, part_id = params.request.message_id, params.request.part_id
    async with call.working(params.session_id, briefly=True) as session:
        # OpenCode accepts a message that it does not have without an error.
        await call.opencode.message(session.id, message_id, at=call.at)
        reverted = await call.opencode.revert_session(session.id, message_id, part_id, at=call.at)
    return OneSession.of(item=reverted)


@SESSIONS.method(
    "opencode.sessions.unrevert", Access.MUTATE, SessionBusyError, condition=_MUTATIONS, needs="ask"
)
async def unrevert(call: Call, params: OfSession) -> OneSession:
    """Undo a revert, provided no prompt has been sent since."""
    async with call.working(params.session_id, briefly=True) as session:
        return OneSession.of(item=await call.opencode.unrevert_session(session.id, at=call.at))
