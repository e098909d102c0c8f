"""The state of one turn as OpenCode has it, as far as it is known.

Events and snapshots both update a ``TurnState``, and ``opencode.reader`` emits what changed. Events
are a hint, the store is the truth. A snapshot must have been requested after the last gap, but it
may still be older or newer than the events received since: those events win over it, and events
that it already contains change nothing. Pure: no clock, no I/O.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from opencode_a2a.events import (
    Emitted,
    Interrupted,
    JsonObject,
    Progressed,
    Resolution,
    ToolChanged,
    TurnEvent,
)
from opencode_a2a.ids import MessageId, ModelRef, RequestId, SessionId
from opencode_a2a.opencode.events import (
    Event,
    HeardText,
    MessageRemoved,
    MessageUpdated,
    Missed,
    PartDelta,
    PartRemoved,
    PartUpdated,
    PermissionAsked,
    QuestionAsked,
    RequestSettled,
    SessionChanged,
    SessionDeleted,
    SessionFailed,
    SessionInfo,
    SessionStatusChanged,
    child_session,
)
from opencode_a2a.opencode.text import ChannelText, ended
from opencode_a2a.opencode.translate import (
    REFUSALS,
    TODO_TOOL,
    ToolCall,
    interrupted,
    is_outdated,
    redact,
    todos_written,
    tool_changed,
)
from opencode_a2a.opencode.types import (
    AssistantMessage,
    CompactionPart,
    FileDiff,
    Message,
    MessageWithParts,
    Part,
    PatchPart,
    PermissionRequest,
    QuestionRequest,
    ReasoningPart,
    SessionStatus,
    StatusBusy,
    StatusIdle,
    StatusRetry,
    StepFinishPart,
    StepStartPart,
    TextPart,
    ToolPart,
    TurnError,
    UserMessage,
    UserSummary,
)

MessageEvent = PartDelta | HeardText | PartUpdated | PartRemoved | MessageUpdated | MessageRemoved
RootEvent = SessionChanged | SessionFailed | SessionDeleted | Missed | PartRemoved | MessageRemoved
"""Events of which only those of the root session are applied."""

MAX_POSTPONED = 5_000
"""Events that may wait until it is known whether their message belongs to the turn."""
ATTACHED = "[Attached "
"""The beginning of the text that replaces a file when OpenCode repeats a prompt."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The part of OpenCode's stored state that was read for a turn."""

    messages: Sequence[MessageWithParts] = ()
    """Messages of the root session in order, from the turn's prompt, or the answer to it, on."""
    children: Mapping[SessionId, Sequence[MessageWithParts]] = field(
        default_factory=dict[SessionId, Sequence[MessageWithParts]]
    )
    """Messages of the sub-agents' sessions."""
    statuses: Mapping[SessionId, SessionStatus] = field(
        default_factory=dict[SessionId, SessionStatus]
    )
    """A session that is missing here is idle."""
    permissions: Sequence[PermissionRequest] | None = ()
    questions: Sequence[QuestionRequest] | None = ()
    """Pending requests, those of other turns included; None when they could not be read."""
    diffs: Sequence[FileDiff] = ()
    directory: str | None = None
    leaves_work: bool = False
    """Whether the turn has left work in the background, of which no message reports the end."""


@dataclass(slots=True)
class TurnMessages:
    """The messages of the root session that belong to the turn.

    These are its prompts, the prompts that OpenCode adds on its own (around a compaction), and the
    assistant messages that answer any of them.
    """

    prompt: MessageId
    """The first prompt of the turn."""
    sent: list[MessageId]
    """The prompts of the turn, in the order in which OpenCode gets them."""
    user_messages: set[MessageId]
    """Every user message of the session that is known, and the first prompt."""
    prompt_stored: bool = False
    assistant: dict[MessageId, AssistantMessage] = field(
        default_factory=dict[MessageId, AssistantMessage]
    )
    """In order; the summaries that compactions write are among them."""
    overtaken: bool = False
    """Whether a prompt that is not of this turn came into the session."""
    foreign_assistant: set[MessageId] = field(default_factory=set[MessageId])
    """Assistant messages that answer the prompt of another turn."""
    compactions: dict[MessageId, str] = field(default_factory=dict[MessageId, str])
    """The id of the compaction part in each user message that requests a compaction."""
    _claimed: set[MessageId] = field(default_factory=set[MessageId])
    """The further prompts of the turn, including those that may not have been sent yet."""
    _added_by_opencode: set[MessageId] = field(default_factory=set[MessageId])
    """User messages that OpenCode wrote itself and whose answers belong to the turn."""
    _prompt_texts: set[str] = field(default_factory=set[str])
    _files_changed: bool = False
    _steps: set[MessageId] = field(default_factory=set[MessageId])
    _diff_updates: int = 0
    """How often OpenCode has finished computing the diff of the turn."""

    @property
    def newest(self) -> AssistantMessage | None:
        return next(reversed(self.assistant.values()), None)

    @property
    def unanswered(self) -> bool:
        """Whether the latest prompt of the turn has no answer yet.

        The answer to several prompts names the last of them.
        """
        newest, (*earlier, latest) = self.newest, self.sent
        return newest is None or latest not in self.user_messages or newest.parent_id in earlier

    @property
    def answered_by(self) -> tuple[str | None, str | None]:
        """The model and the agent of the newest answer that is not a summary."""
        for assistant in reversed(self.assistant.values()):
            if not assistant.summary:
                model = ModelRef(assistant.provider_id or "", assistant.model_id or "")
                return (str(model) if assistant.model_id else None), assistant.agent
        return None, None

    @property
    def diff_known(self) -> bool:
        """Whether the diff of the turn can be read, or nothing changed.

        OpenCode computes the diff in the background, after every step and once more after the turn:
        a diff that is read too early lacks the last changes. Each computation ends with an update
        of the prompt's message.
        """
        return not self._files_changed or self._diff_updates > len(self._steps)

    def claim(self, prompt: MessageId) -> None:
        """Count a prompt among those of the turn, whether or not OpenCode has it already."""
        self._claimed.add(prompt)

    def track_diff(self, event: MessageEvent) -> None:
        """Note what an event says about the diff, for ``diff_known``."""
        match event:
            case PartUpdated(part=PatchPart()):
                self._files_changed = True
            case MessageUpdated(info=AssistantMessage(summary=False, id=step)):
                self._steps.add(step)
            case MessageUpdated(info=UserMessage(summary=UserSummary())):
                self._diff_updates += 1
            case _:
                pass

    def add(self, info: Message, *, gapless: bool) -> bool:
        """Add a message; return False if only the store can tell whether it is of this turn.

        An answer to a known prompt can be placed. So can any other if no event is missing
        (``gapless``): its prompt is then from before the turn.
        """
        match info:
            case UserMessage():
                self.user_messages.add(info.id)
                self.prompt_stored |= info.id == self.prompt
                if info.id in self._claimed and info.id not in self.sent:
                    self.sent.append(info.id)
            case AssistantMessage(parent_id=parent) if (
                parent == self.prompt
                or parent in self._claimed
                or parent in self._added_by_opencode
            ):
                self.foreign_assistant.discard(info.id)
                self.assistant[info.id] = info
            case AssistantMessage(parent_id=parent) if gapless or parent in self.user_messages:
                self.foreign_assistant.add(info.id)
            case _:
                return False
        return True

    def add_user_part(self, part: Part) -> None:
        """Learn from a part of a user message whether the message belongs to the turn."""
        if part.message_id == self.prompt or part.message_id in self._claimed:
            self._prompt_texts.update([part.text] if isinstance(part, TextPart) else ())
            return
        if not self.prompt_stored:
            return
        match part:
            case CompactionPart() | TextPart(synthetic=True):
                if not self.overtaken:
                    self._added_by_opencode.add(part.message_id)
                    if isinstance(part, CompactionPart):
                        self.compactions[part.message_id] = part.id
            case TextPart(text=text) if (
                # OpenCode repeats the prompt when a compaction has made it fit.
                self.compactions
                and not self.overtaken
                and (text in self._prompt_texts or text.startswith(ATTACHED))
            ):
                self._added_by_opencode.add(part.message_id)
            case _:
                self.overtaken = True
                self._added_by_opencode.discard(part.message_id)

    def since_prompt(self, stored: Sequence[MessageWithParts]) -> Sequence[MessageWithParts]:
        """Return the messages from the turn's prompt on; none if the store does not have it."""
        if stored and stored[0].info.id in self.assistant:
            return stored
        for index, message in enumerate(stored):
            if message.info.id == self.prompt:
                return stored[index:]
        return ()


@dataclass(slots=True)
class SessionTree:
    """The root session of a turn and the sessions of its sub-agents."""

    root: SessionId
    info: SessionInfo | None = None
    """Title and directory of the root session, once they are known."""
    idle: bool = False
    """Whether the last known status of the root session is idle."""
    status_fresh: bool = True
    """Whether that status is of an event since the last gap: an older snapshot may lack it."""
    retrying: bool = False
    """Whether the last status of the root session other than idle was a retry."""
    last_error: TurnError | None = None
    """The error of the root session, unless it has worked on since."""
    _retries: dict[SessionId, StatusRetry | None] = field(
        default_factory=dict[SessionId, StatusRetry | None]
    )
    """The sub-agents' sessions, and the root once it had a status, each with the retry that it
    waits for."""
    _step_costs: dict[MessageId, float] = field(default_factory=dict[MessageId, float])
    """The cost of each step of a sub-agent."""

    def __contains__(self, session: object) -> bool:
        return session == self.root or session in self._retries

    @property
    def children(self) -> frozenset[SessionId]:
        """The sessions of the turn's sub-agents."""
        return frozenset(self._retries) - {self.root}

    @property
    def retry(self) -> StatusRetry | None:
        """The retry that is furthest in the future, of all that sessions of the tree wait for."""
        retries = [retry for retry in self._retries.values() if retry is not None]
        return max(retries, key=lambda retry: retry.next, default=None)

    @property
    def children_cost(self) -> float:
        return sum(self._step_costs.values())

    def add(self, child: SessionId) -> None:
        self._retries.setdefault(child)

    def set_cost(self, step: MessageId, cost: float) -> None:
        """Take over the cost of a step; it only grows, and the store may be behind the events."""
        self._step_costs[step] = max(cost, self._step_costs.get(step, 0.0))

    def set_status(self, session: SessionId, status: SessionStatus) -> StatusRetry | None:
        """Take over the status of a session; return its retry if that is a new one."""
        if session == self.root:
            self.idle = isinstance(status, StatusIdle)
            if isinstance(status, StatusRetry):
                self.retrying = True
            elif isinstance(status, StatusBusy):
                self.retrying = False
                self.last_error = None  # it was not the end after all
        if not isinstance(status, StatusRetry):
            self._retries[session] = None
            return None
        retry = status.model_copy(update={"message": redact(status.message)})
        if retry == self._retries.get(session):
            return None
        self._retries[session] = retry
        return retry


@dataclass(slots=True)
class AskedRequests:
    """The permissions and questions of a turn: which are pending, and how the others ended."""

    root: SessionId
    pending: dict[RequestId, Interrupted] = field(default_factory=dict[RequestId, Interrupted])
    settled: dict[RequestId, Resolution] = field(default_factory=dict[RequestId, Resolution])
    refused_in: MessageId | None = None
    """The newest message of the turn when a person last refused a request of its agent."""
    lost_in: MessageId | None = None
    """The same when a request was last gone without an answer: OpenCode was started anew."""
    _calls: dict[tuple[MessageId, str], ToolCall] = field(
        default_factory=dict[tuple[MessageId, str], ToolCall]
    )
    """Tool calls of all sessions: a request names the message and the call that it is for.

    The call id alone says little: some providers give the same one in every step.
    """

    def add_call(self, part: ToolPart) -> None:
        if part.state.status != "pending":
            self._calls[part.message_id, part.call_id] = (part.tool, part.state.input)

    def ask(
        self,
        request: PermissionRequest | QuestionRequest,
        directory: str | None,
        sub_agent: str | None,
    ) -> None:
        if request.id not in self.pending and request.id not in self.settled:
            ref = request.tool
            call = self._calls.get((ref.message_id, ref.call_id)) if ref else None
            self.pending[request.id] = interrupted(request, call, directory, sub_agent)

    def settle(
        self, request_id: RequestId, resolution: Resolution, newest: AssistantMessage | None
    ) -> None:
        """Note how a request ended; ``newest`` is the newest message of the turn."""
        self.settled[request_id] = resolution
        interrupt = self.pending.pop(request_id, None)
        of_root = interrupt is not None and interrupt.session_id == self.root
        if of_root and newest is not None and resolution == "rejected":
            self.refused_in = newest.id
        elif newest is not None and resolution == "void":
            self.lost_in = newest.id

    def blocks(self, call_id: str) -> bool:
        """Whether a pending request blocks this tool call."""
        return any(interrupt.call_id == call_id for interrupt in self.pending.values())


@dataclass(slots=True)
class TurnState:
    """Everything that is known about one turn, from events and from snapshots."""

    messages: TurnMessages
    tree: SessionTree
    requests: AskedRequests
    texts: dict[type[TextPart | ReasoningPart], ChannelText]
    """The channels, by the type of the parts that they consist of."""
    tools: dict[str, ToolChanged] = field(default_factory=dict[str, ToolChanged])
    """By the ids of their parts, in order."""
    todos: list[JsonObject] | None = None
    """As the latest call of the tool ``todowrite`` left them."""
    _todos_part: str = ""
    """The id of the part of that call; ids of parts sort by the time they were made."""
    reports: list[ToolChanged | Progressed] = field(default_factory=list[ToolChanged | Progressed])
    """News of tools, steps and the like; ``TurnReader._emit_reports`` takes them."""
    needs_reconcile: bool = False
    """Whether events may be missing, so that the store has to be read."""
    _fresh: set[str] = field(default_factory=set[str])
    """Ids of the messages and requests that events were about since the last gap. What is known of
    them may be newer than the next snapshot. Also the requests that were pending in a snapshot:
    without a gap, only an event or the end of the turn settles one."""
    _steps: set[str | None] = field(default_factory=set[str | None])
    """The starts of steps: calls of a model."""
    _stepped: set[MessageId] = field(default_factory=set[MessageId])
    """The messages in which one started."""
    _postponed: dict[MessageId, list[MessageEvent]] = field(
        default_factory=dict[MessageId, list[MessageEvent]]
    )
    """Events that wait until it is known whether their message belongs to the turn."""

    _resumed: bool = False
    """Whether an earlier process began the turn, and this one has not read the store yet."""
    _unheard: MessageId | None = None
    """The message with which the turn had ended when this process first read the store."""

    def resume(self, emitted: Emitted) -> None:
        """Continue with the events that an earlier process emitted."""
        self._resumed = True
        self.requests.pending |= emitted.open
        self.requests.settled |= dict.fromkeys(emitted.settled, "void")
        self.tools |= emitted.tools
        for tool in self.tools.values():
            if (child := child_session(tool.tool, tool.metadata)) is not None:
                self.tree.add(child)
            if tool.tool == TODO_TOOL and tool.status == "completed":
                self._todos_part = max(self._todos_part, tool.part_id)
        self.todos = emitted.todos
        self._steps |= {part_id for kind, _, part_id in emitted.progress if kind == "step-start"}
        for text in self.texts.values():
            text.resume()
        # Everything that the other process emitted may be out of date.
        self.require_reconcile()

    @property
    def complete(self) -> bool:
        """Whether the last message of the turn is complete and its session idle."""
        last = self.messages.newest
        done = last is not None and last.time.completed is not None
        return done and self.tree.idle and not (self.needs_reconcile or self.messages.unanswered)

    def ends_with(self, response: MessageWithParts) -> bool:
        """Whether the response to the prompt is all that the store has about the turn's end."""
        messages, tree = self.messages, self.tree
        unsure = self._postponed or messages.overtaken or self.requests.pending or tree.children
        files_changed = any(isinstance(part, PatchPart) for part in response.parts)
        only_message = list(messages.assistant) == [response.info.id]
        return self.complete and only_message and not (unsure or files_changed)

    @property
    def refused(self) -> bool:
        """Whether a person refused what the last message asked for."""
        last = self.messages.newest
        return last is not None and (
            last.id == self.requests.refused_in
            or any(
                tool.message_id == last.id and (tool.error or "").startswith(REFUSALS)
                for tool in self.tools.values()
            )
        )

    @property
    def forgotten(self) -> bool:
        """Whether what the last message asked for is gone without an answer."""
        last = self.messages.newest
        return last is not None and last.id == self.requests.lost_in

    @property
    def ended_unheard(self) -> bool:
        """Whether the last message ended before this process followed the turn."""
        last = self.messages.newest
        return last is not None and last.id == self._unheard

    @property
    def stepped(self) -> bool:
        """Whether a model was asked for the last message.

        A command that a person ran is a message too: a tool call without a step.
        """
        last = self.messages.newest
        if last is None:
            return False
        calls = any(tool.message_id == last.id for tool in self.tools.values())
        return last.id in self._stepped or not calls

    @property
    def cost(self) -> float:
        """The cost of the turn so far, its sub-agents included."""
        own = sum(assistant.cost for assistant in self.messages.assistant.values())
        return own + self.tree.children_cost

    def expect(self, prompt: MessageId) -> None:
        """Note that OpenCode is given a further prompt, so that the turn has not ended yet."""
        self.messages.claim(prompt)
        if prompt not in self.messages.sent:  # it may be another attempt
            self.messages.sent.append(prompt)
        self.tree.idle = False

    def look_again(self) -> None:
        """Have the store read; what was heard stays valid."""
        self.needs_reconcile = True

    def require_reconcile(self) -> None:
        """Note that events may be missing: the store has to be read before text continues."""
        self.look_again()
        self._fresh.clear()
        self.tree.status_fresh = False
        self._postponed.clear()
        for text in self.texts.values():
            text.freeze()

    def void_requests(self) -> None:
        """Settle the pending requests, because the turn is over."""
        for request_id in list(self.requests.pending):
            self.requests.settle(request_id, "void", self.messages.newest)

    # Updates from events

    def stream(self, part_id: str, text: str, event_id: str) -> TurnEvent | None:
        """Add growing text; return it as emitted if nothing else has to be compared."""
        for channel in self.texts.values():
            grew = channel.stream(part_id, text, event_id)
            if grew is not None:
                return grew
        return None

    def apply_event(self, event: Event) -> None:
        session, tree = event.session_id, self.tree
        match event:
            case PartUpdated() | MessageUpdated() | PartDelta() | HeardText() if (
                session == tree.root
            ):
                self.messages.track_diff(event)
                self._apply_message_event(event)
            case SessionChanged(info=SessionInfo(parent_id=parent)) if parent in tree:
                tree.add(session)
            case _ if session not in tree:
                pass
            case SessionStatusChanged():
                tree.status_fresh |= session == tree.root
                self._apply_status(session, event.status)
            case PermissionAsked() | QuestionAsked():
                self._fresh.add(event.id)
                self._apply_request(event, event.directory)
            case RequestSettled():
                self.requests.settle(event.request_id, event.resolution, self.messages.newest)
            case PartUpdated(part=ToolPart() as part):
                self._apply_call(part)
            case MessageUpdated(info=AssistantMessage(id=step, cost=cost)):
                tree.set_cost(step, cost)
            case PartDelta() | HeardText() | PartUpdated() | MessageUpdated():
                pass  # those of the root session were applied above
            case _:
                if session == tree.root:
                    self._apply_root_event(event)

    def _apply_root_event(self, event: RootEvent) -> None:
        match event:
            case SessionChanged(info=info):
                self.tree.info = info
            case SessionFailed(error=error):
                # The second of two errors says the same with a stack trace.
                self.tree.last_error = self.tree.last_error or error
            case SessionDeleted() | Missed():
                # Reading the store of a deleted session will fail, which ends the turn.
                self.look_again()
            case PartRemoved() | MessageRemoved():
                self._apply_message_event(event)

    def _apply_message_event(self, event: MessageEvent) -> None:
        match event:
            case PartDelta():
                if event.message_id in self._postponed:
                    self._postpone(event.message_id, event)
                else:
                    for text in self.texts.values():
                        text.grow(event.part_id, event.delta, event.event_id)
            case HeardText():
                self._apply_heard(event)
            case PartUpdated(part=part):
                known = part.message_id in self.messages.foreign_assistant
                if not self._apply_part(part) and not known:
                    self._postpone(part.message_id, event)
            case MessageUpdated(info=info):
                if not self._apply_message(info, gapless=not self.needs_reconcile):
                    self._postpone(info.id, event)
                    return
                self._fresh.add(info.id)
                for postponed in self._postponed.pop(info.id, ()):
                    self._apply_message_event(postponed)
            case PartRemoved():
                for text in self.texts.values():
                    text.remove([event.part_id])
            case MessageRemoved():
                self.messages.assistant.pop(event.message_id, None)
                for text in self.texts.values():
                    text.remove_message(event.message_id)

    def _apply_heard(self, heard: HeardText) -> None:
        assistant = self.messages.assistant.get(heard.message_id)
        if assistant is not None and not assistant.summary:
            for kind, text in self.texts.items():
                if heard.start is None or kind is type(heard.start):
                    text.catch_up(heard)
        elif assistant is None and heard.message_id not in self.messages.foreign_assistant:
            self._postpone(heard.message_id, heard)

    def _postpone(self, message_id: MessageId, event: MessageEvent) -> None:
        if sum(map(len, self._postponed.values())) >= MAX_POSTPONED:
            self.require_reconcile()
            return
        self._postponed.setdefault(message_id, []).append(event)

    # Updates from a snapshot

    def apply_snapshot(self, stored: Snapshot, *, final: bool = False) -> None:
        """Update the state with a snapshot; ``final`` if nothing will follow."""
        tree, requests = self.tree, self.requests
        self.apply_children(stored.children)
        if final:
            self._fresh.clear()
            tree.status_fresh = False
        self._apply_stored_messages(self.messages.since_prompt(stored.messages), final=final)
        newest = self.messages.newest
        if self._resumed and newest is not None and newest.time.completed is not None:
            self._unheard = newest.id
        self._resumed = False
        if not tree.status_fresh:
            self._apply_status(tree.root, stored.statuses.get(tree.root, StatusIdle()))
        for child in tree.children - set(stored.statuses):
            tree.set_status(child, StatusIdle())
        read = {"permission": stored.permissions, "question": stored.questions}
        pending = {
            request.id: request
            for request in (*(stored.permissions or ()), *(stored.questions or ()))
            if request.session_id in tree
        }
        for request_id, interrupt in list(requests.pending.items()):
            known = request_id in pending or request_id in self._fresh
            if not known and read[interrupt.type] is not None:
                requests.settle(request_id, "void", self.messages.newest)
        for request in pending.values():
            # It was pending after the last gap, so an event will tell how it is settled; the next
            # snapshot may lack it before that event arrives.
            self._fresh.add(request.id)
            self._apply_request(request, stored.directory)
        self.needs_reconcile = False
        for text in self.texts.values():
            text.frozen = False
        postponed, self._postponed = self._postponed, {}
        for events in postponed.values():
            for event in events:
                self._apply_message_event(event)

    def apply_children(self, children: Mapping[SessionId, Sequence[MessageWithParts]]) -> None:
        """Learn from the messages of sub-agents what they cost, and of their own sub-agents."""
        for session, messages in children.items():
            self.tree.add(session)
            for message in messages:
                for part in message.parts:
                    if isinstance(part, ToolPart):
                        self._apply_call(part)
        for step in self.steps_of(children):
            self.tree.set_cost(step.id, step.cost)

    def steps_of(
        self, children: Mapping[SessionId, Sequence[MessageWithParts]]
    ) -> list[AssistantMessage]:
        """Return the steps that sub-agents took for this turn.

        A sub-agent may continue a session of an earlier turn, which has been counted.
        """
        begun = [assistant.time.created for assistant in self.messages.assistant.values()]
        infos = (message.info for messages in children.values() for message in messages)
        steps = [info for info in infos if isinstance(info, AssistantMessage)]
        return [step for step in steps if begun and step.time.created >= min(begun)]

    def _apply_stored_messages(self, messages: Sequence[MessageWithParts], *, final: bool) -> None:
        own = self.messages
        # The order of the store decides what came before the prompt of another turn.
        overtaken_before, own.overtaken = own.overtaken, False
        order, calls = {kind: list[str]() for kind in self.texts}, list[str]()
        for message in messages:
            if message.info.id not in self._fresh:
                self._apply_message(message.info, gapless=True)
            assistant = own.assistant.get(message.info.id)
            speaks = assistant is not None and not assistant.summary
            for part in message.parts:
                self._apply_part(part, stored=True)
                if part.id in self.tools:
                    calls.append(part.id)
                if speaks and isinstance(part, TextPart | ReasoningPart):
                    order[type(part)].append(part.id)
            if speaks:
                self._close_unfinished(message, final=final)
        own.overtaken |= overtaken_before
        if not messages:
            return
        # Messages and calls that the snapshot does not have yet follow those that it has.
        self.tools = {part_id: self.tools[part_id] for part_id in calls} | self.tools
        stored = [m.info.id for m in messages if m.info.id in own.assistant]
        in_order = {message_id: own.assistant[message_id] for message_id in stored}
        own.assistant = in_order | own.assistant
        for kind, part_ids in order.items():
            self.texts[kind].reorder(part_ids)
            if final:
                self.texts[kind].void_open()

    def _close_unfinished(self, message: MessageWithParts, *, final: bool) -> None:
        """Close the text parts of a stored message that are unfinished and will stay so.

        If OpenCode died, or no other attempt followed the one that failed, they keep the text that
        was emitted: OpenCode stores none of it.
        """
        completed = message.info.time.completed is not None
        # Parts before the latest start of a step belong to an attempt that failed.
        starts = [i for i, part in enumerate(message.parts) if part.type == "step-start"]
        latest = (starts or [0])[-1]
        for index, part in enumerate(message.parts):
            if not isinstance(part, TextPart | ReasoningPart) or ended(part):
                continue
            text = self.texts[type(part)]
            if index < latest:
                text.void([part.id])
            elif completed and part.text:
                # Before 1.2 a text is stored as it grows, and an abort does not end it.
                text.end(part)
            elif completed:
                text.leave(part.id)
        if final:
            for text in self.texts.values():
                text.end_open(message.info.id)

    # Updates from both

    def _apply_message(self, info: Message, *, gapless: bool) -> bool:
        """Take over a message; return False if it is not known yet whose it is."""
        if not self.messages.add(info, gapless=gapless):
            return False
        assistant = self.messages.assistant.get(info.id)
        if assistant is None or assistant.time.completed is None:
            return True
        if assistant.summary:
            part_id = self.messages.compactions.get(assistant.parent_id)
            self.reports.append(Progressed("compaction", "completed", part_id))
        elif any(text.open_in(info.id) for text in self.texts.values()):
            # The event that ends a part was missed.
            self.look_again()
        return True

    def _apply_part(self, part: Part, *, stored: bool = False) -> bool:
        """Take over a part; return False if its message is not known to belong to the turn."""
        if part.message_id in self.messages.user_messages:
            self.messages.add_user_part(part)
            if self.messages.compactions.get(part.message_id) == part.id:
                self.reports.append(Progressed("compaction", "running", part.id))
            return True
        assistant = self.messages.assistant.get(part.message_id)
        if assistant is None:
            return False
        if isinstance(part, StepStartPart):
            self._stepped.add(part.message_id)
        if assistant.summary:
            return True
        match part:
            case TextPart() | ReasoningPart():
                self.texts[type(part)].update(part, stored=stored)
            case ToolPart():
                self._apply_call(part)
                tool, known = tool_changed(part), self.tools.get(part.id)
                if known is None or not (tool == known or is_outdated(tool, known)):
                    self.tools[part.id] = known = tool
                    self.reports.append(tool)
                    # Not from the event ``todo.updated``, which a gap may hide for good. A call
                    # whose events were lost may become known after a later one.
                    todos = todos_written(part)
                    if todos is not None and part.id >= self._todos_part:
                        self.todos, self._todos_part = todos, part.id
                if child_session(part.tool, part.state.metadata) is not None:
                    described = (known.input or {}).get("description")
                    title = known.title or (str(described) if described is not None else None)
                    self.reports.append(Progressed("subagent", known.status, part.id, title=title))
            case StepStartPart():
                if part.id not in self._steps and not stored:
                    # A second start in one message means that the provider failed in between. The
                    # text of the failed attempt stays until then: there may be no other attempt.
                    for text in self.texts.values():
                        text.void_open(part.message_id)
                self._steps.add(part.id)
                self.reports.append(Progressed("step-start", "running", part.id))
            case StepFinishPart():
                step = Progressed("step-finish", "completed", part.id, reason=part.reason)
                self.reports.append(step)
            case _:
                pass
        return True

    def _apply_call(self, part: ToolPart) -> None:
        if (child := child_session(part.tool, part.state.metadata)) is not None:
            self.tree.add(child)
        self.requests.add_call(part)

    def _apply_status(self, session: SessionId, status: SessionStatus) -> None:
        retry = self.tree.set_status(session, status)
        if retry is not None:
            attempt = f"attempt {retry.attempt}"
            self.reports.append(
                Progressed("retry", "waiting", title=retry.message, subtitle=attempt)
            )

    def _apply_request(
        self, request: PermissionRequest | QuestionRequest, directory: str | None
    ) -> None:
        sub_agent: str | None = None
        if request.session_id != self.tree.root:
            sub_agent = "sub-agent"
            # The call that started the sub-agent describes it.
            for tool in self.tools.values():
                if child_session(tool.tool, tool.metadata) == request.session_id:
                    sub_agent = str(
                        (tool.input or {}).get("description") or tool.title or sub_agent
                    )
                    break
        self.requests.ask(request, directory, sub_agent)
