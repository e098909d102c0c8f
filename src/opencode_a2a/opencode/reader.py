"""Reads one turn: OpenCode's events and its stored state in, turn events out.

``turns.turn`` feeds it. A ``TurnState`` is the turn as OpenCode has it, as far as it is known:
events and snapshots both update it. The events are a hint, the store is the truth. A snapshot must
have been asked for after the last ``gap``. It may still be older or newer than the events since:
they win over it, and those that it has overtaken change nothing. An ``Emitted`` is what was
emitted, and after each update the ``Reader`` emits the difference. Nothing is emitted twice, and
text that turned out to be void is replaced. Pure: no clock, no input, no output.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from opencode_a2a.events import (
    Channel,
    ChannelClosed,
    DiffChanged,
    Emitted,
    Failure,
    FileChange,
    Finished,
    Grew,
    Outcome,
    Progressed,
    Resolution,
    Resumed,
    SessionBound,
    ToolChanged,
    TurnEvent,
    Usage,
    UsageCounted,
)
from opencode_a2a.ids import MessageId, ModelRef, RequestId, SessionId
from opencode_a2a.opencode.events import (
    Event,
    MessageRemoved,
    MessageUpdated,
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
    TodoUpdated,
    child_session,
)
from opencode_a2a.opencode.outcome import REFUSALS, UNANSWERED, judge, redact
from opencode_a2a.opencode.text import ChannelText, ended
from opencode_a2a.opencode.translate import ToolCall, interrupted, overtaken, tool_changed, usage
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

MessageEvent = PartDelta | PartUpdated | PartRemoved | MessageUpdated | MessageRemoved

MAX_POSTPONED = 5_000
"""How many events wait at most for it to be known whose message they are about."""
ATTACHED = "[Attached "
"""How the text begins that replaces a file when OpenCode repeats a prompt."""
RECENT = 256
"""How many event ids are remembered: OpenCode sends some events twice."""
MAX_PATCH = 256 * 1024
UNTITLED = "New session - "
"""How OpenCode's placeholder begins that a session has until the model has found a title."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What OpenCode has stored about a turn, as far as it was read."""

    messages: Sequence[MessageWithParts] = ()
    """Of the root session, in order, at least from the turn's prompt or the answer to it on."""
    children: Mapping[SessionId, Sequence[MessageWithParts]] = field(
        default_factory=dict[SessionId, Sequence[MessageWithParts]]
    )
    statuses: Mapping[SessionId, SessionStatus] = field(
        default_factory=dict[SessionId, SessionStatus]
    )
    """Sessions that are missing are idle."""
    permissions: Sequence[PermissionRequest] | None = ()
    questions: Sequence[QuestionRequest] | None = ()
    """Pending requests, None when they are not known; other session trees are ignored."""
    diffs: Sequence[FileDiff] = ()
    session: SessionInfo | None = None
    directory: str | None = None


class TurnMessages:
    """Which messages of the root session belong to the turn.

    Its prompt, the prompts that OpenCode adds on its own (around a compaction), and the
    assistant messages that answer any of these.
    """

    def __init__(self, prompt: MessageId) -> None:
        self.prompt = prompt
        self.prompt_seen = False
        self.answers: dict[MessageId, AssistantMessage] = {}
        """In order; summaries of a compaction are among them."""
        self.overtaken = False
        """Another prompt came into the session."""
        self.users = {prompt}
        self.sent = [prompt]
        """The prompts of the turn, in the order in which OpenCode gets them."""
        self.others: set[MessageId] = set()
        """Assistant messages that answer somebody else's prompt."""
        self.compactions: dict[MessageId, str] = {}
        """The compaction part of each message that asks for one."""
        self._own = {prompt}
        """The prompts of the turn, those that may not have been sent included."""
        self._prompts = {prompt}
        """The user messages whose answers belong to the turn."""
        self._prompt_texts: set[str] = set()
        self._patched = False
        """Some step changed files."""
        self._steps: set[MessageId] = set()
        self._summaries = 0
        """How often OpenCode has said what changed."""

    @property
    def newest(self) -> AssistantMessage | None:
        return next(reversed(self.answers.values()), None)

    @property
    def unanswered(self) -> bool:
        """Whether the latest prompt of the turn has no answer yet.

        The answer to several prompts names the last of them.
        """
        newest, (*earlier, latest) = self.newest, self.sent
        return newest is None or latest not in self.users or newest.parent_id in earlier

    def claim(self, prompt: MessageId) -> None:
        """Take a prompt for one of the turn, whenever OpenCode is given it."""
        self._own.add(prompt)
        self._prompts.add(prompt)

    @property
    def answered_by(self) -> tuple[str | None, str | None]:
        """The model and the agent of the newest answer that is not a summary."""
        for answer in reversed(self.answers.values()):
            if not answer.summary:
                model = ModelRef(answer.provider_id or "", answer.model_id or "")
                return (str(model) if answer.model_id else None), answer.agent
        return None, None

    def hear(self, event: PartUpdated | MessageUpdated) -> None:
        """Note how far OpenCode is in working out what the turn changed."""
        match event:
            case PartUpdated(part=PatchPart()):
                self._patched = True
            case MessageUpdated(info=AssistantMessage(summary=False, id=step)):
                self._steps.add(step)
            case MessageUpdated(info=UserMessage(summary=UserSummary())):
                self._summaries += 1
            case _:
                pass

    @property
    def diff_known(self) -> bool:
        """Whether nothing changed, or the diff can be read.

        OpenCode works it out anew after every step and once more after the turn, without waiting
        for it: a diff that is read too early lacks the last changes. Each time ends with an update
        of the prompt's message.
        """
        return not self._patched or self._summaries > len(self._steps)

    def place(self, info: Message, *, sure: bool) -> bool:
        """Note whose message this is; False if that cannot be said before the store is read.

        It can be said of an answer to a prompt that was heard of, or if no event is missing
        (``sure``): the prompt is then from before the turn.
        """
        match info:
            case UserMessage():
                self.users.add(info.id)
                self.prompt_seen |= info.id == self.prompt
                if info.id in self._own and info.id not in self.sent:
                    self.sent.append(info.id)
            case AssistantMessage(parent_id=parent) if parent in self._prompts:
                self.others.discard(info.id)
                self.answers[info.id] = info
            case AssistantMessage(parent_id=parent) if sure or parent in self.users:
                self.others.add(info.id)
            case _:
                return False
        return True

    def add_user_part(self, part: Part) -> None:
        """Learn from a part of a user's message whether the message belongs to the turn."""
        if part.message_id in self._own:
            self._prompt_texts.update([part.text] if isinstance(part, TextPart) else ())
            return
        if not self.prompt_seen:
            return
        match part:
            case CompactionPart() | TextPart(synthetic=True):
                if not self.overtaken:
                    self._prompts.add(part.message_id)
                    if isinstance(part, CompactionPart):
                        self.compactions[part.message_id] = part.id
            case TextPart(text=text) if (
                # OpenCode repeats the prompt when a compaction has made it fit.
                self.compactions
                and not self.overtaken
                and (text in self._prompt_texts or text.startswith(ATTACHED))
            ):
                self._prompts.add(part.message_id)
            case _:
                self.overtaken = True
                self._prompts.discard(part.message_id)

    def since_prompt(self, stored: Sequence[MessageWithParts]) -> Sequence[MessageWithParts]:
        """Return the messages from the turn's prompt on; none if the store does not have it."""
        if stored and stored[0].info.id in self.answers:
            return stored
        for place, message in enumerate(stored):
            if message.info.id == self.prompt:
                return stored[place:]
        return ()


class TurnState:
    """What is known of one turn, whichever way it was learned."""

    def __init__(
        self,
        root: SessionId,
        prompt: MessageId,
        emitted: Emitted,
        answer: Channel = Channel.TEXT,
    ) -> None:
        """Begin with what an earlier process has emitted, if there was one."""
        self.root = root
        self.messages = TurnMessages(prompt)
        self.texts = {
            TextPart: ChannelText(answer, emitted.channels),
            ReasoningPart: ChannelText(Channel.REASONING, emitted.channels),
        }
        """The channels, by the kind of the parts that they are made of."""
        self.tools = dict(emitted.tools)
        self.asked = dict(emitted.open)
        """The requests that wait for an answer."""
        self.settled: dict[RequestId, Resolution] = dict.fromkeys(emitted.settled, "void")
        self.todos = emitted.todos
        self.session: SessionInfo | None = None
        self._costs: dict[MessageId, float] = {}
        """Of the steps of sub-agents."""
        self.sessions: dict[SessionId, StatusRetry | None] = {root: None}
        """The tree of the turn's sessions, and the retry that each of them waits for."""
        for tool in emitted.tools.values():
            if (child := child_session(tool.tool, tool.metadata)) is not None:
                self.sessions[child] = None
        self.reports: list[ToolChanged | Progressed] = []
        """What is new among tools, steps and the like; whoever emits it takes it away."""
        self.idle_seen = False
        self.retrying = False
        """The last that was heard of the root session, before it went idle, was a retry."""
        self.last_error: TurnError | None = None
        self.needs_reconcile = False
        """Events may be missing: the store has to be read."""
        self._fresh: set[str] = {root}
        """The messages, requests and sessions that were heard of since the last gap. What is known
        of them may be newer than the next snapshot. Also the requests that were pending then:
        without a gap only an event or the end of the turn settles a request."""
        self._calls: dict[str, ToolCall] = {}
        self._refused: MessageId | None = None
        """The last message that asked for something which a person refused."""
        self._steps = {part_id for _, _, part_id in emitted.progress}
        self._postponed: dict[MessageId, list[MessageEvent]] = {}
        """Events that wait until it is known whose message they are about."""

    # What the turn needs to know

    @property
    def complete(self) -> bool:
        """Whether the last message of the turn is complete and its session idle."""
        last = self.messages.newest
        done = last is not None and last.time.completed is not None
        return done and self.idle_seen and not (self.needs_reconcile or self.messages.unanswered)

    def ends_with(self, answer: MessageWithParts) -> bool:
        """Whether the answer to the prompt is all that the store has about the turn's end."""
        unsure = self._postponed or self.messages.overtaken or self.asked or self.children
        changed = any(isinstance(part, PatchPart) for part in answer.parts)
        alone = list(self.messages.answers) == [answer.info.id]
        return self.complete and alone and not (unsure or changed)

    @property
    def retry(self) -> StatusRetry | None:
        """The latest retry that the tree waits for."""
        retries = [retry for retry in self.sessions.values() if retry is not None]
        return max(retries, key=lambda retry: retry.next, default=None)

    @property
    def children(self) -> frozenset[SessionId]:
        """The sessions of the turn's sub-agents."""
        return frozenset(self.sessions) - {self.root}

    @property
    def refused(self) -> bool:
        """Whether a person refused what the last message asked for."""
        last = self.messages.newest
        return last is not None and (
            last.id == self._refused
            or any(
                tool.message_id == last.id and (tool.error or "").startswith(REFUSALS)
                for tool in self.tools.values()
            )
        )

    def expect(self, prompt: MessageId) -> None:
        """Note that OpenCode is given a further prompt: what was its end is not."""
        self.messages.claim(prompt)
        if prompt not in self.messages.sent:  # or it is another try
            self.messages.sent.append(prompt)
        self.idle_seen = False

    @property
    def cost(self) -> float:
        """What the turn has cost so far, with that of its sub-agents."""
        own = sum(answer.cost for answer in self.messages.answers.values())
        return own + sum(self._costs.values())

    # Events

    def stream(self, part_id: str, text: str) -> TurnEvent | None:
        """Take over growing text; return it as emitted if nothing else has to be looked at."""
        for channel in self.texts.values():
            grew = channel.stream(part_id, text)
            if grew is not None:
                return grew
        return None

    def hear(self, event: Event) -> None:  # noqa: C901 - a case for each kind of event
        """Update the state with an event."""
        session = event.session_id
        match event:
            case PartUpdated() | MessageUpdated() if session == self.root:
                self.messages.hear(event)
                self._hear_message(event)
            case PartDelta() if session == self.root:
                self._hear_message(event)
            case SessionChanged(info=SessionInfo(parent_id=parent)) if parent in self.sessions:
                self.sessions.setdefault(session)
            case _ if session not in self.sessions:
                pass
            case SessionStatusChanged():
                self._fresh.add(session)
                self._status(session, event.status)
            case PermissionAsked() | QuestionAsked():
                self._fresh.add(event.id)
                self._ask(event, event.directory)
            case RequestSettled():
                self._settle(event.request_id, event.resolution)
            case PartUpdated(part=ToolPart() as part):
                self._call(part)
            case MessageUpdated(info=AssistantMessage(id=step, cost=cost)):
                self._costs[step] = cost
            case _ if session != self.root:
                pass
            case SessionChanged(info=info):
                self.session = info
            case SessionFailed(error=error):
                # The second of two says the same with a stack trace.
                self.last_error = self.last_error or error
            case SessionDeleted():
                # The store will say that it is gone, which ends the turn.
                self.needs_reconcile = True
            case TodoUpdated():
                self.todos = [todo.model_dump(exclude_none=True) for todo in event.todos]
            case PartRemoved() | MessageRemoved():
                self._hear_message(event)
            case _:
                pass

    def _hear_message(self, event: MessageEvent) -> None:
        match event:
            case PartDelta():
                if event.message_id in self._postponed:
                    self._postpone(event.message_id, event)
                else:
                    for text in self.texts.values():
                        text.grow(event.part_id, event.delta)
            case PartUpdated(part=part):
                if not self._part(part) and part.message_id not in self.messages.others:
                    self._postpone(part.message_id, event)
            case MessageUpdated(info=info):
                if not self._message(info, sure=not self.needs_reconcile):
                    self._postpone(info.id, event)
                    return
                self._fresh.add(info.id)
                for postponed in self._postponed.pop(info.id, ()):
                    self._hear_message(postponed)
            case PartRemoved():
                for text in self.texts.values():
                    text.remove([event.part_id])
            case MessageRemoved():
                self.messages.answers.pop(event.message_id, None)
                for text in self.texts.values():
                    text.remove_message(event.message_id)

    def _postpone(self, message_id: MessageId, event: MessageEvent) -> None:
        if sum(map(len, self._postponed.values())) >= MAX_POSTPONED:
            self.gap()
            return
        self._postponed.setdefault(message_id, []).append(event)

    def gap(self) -> None:
        """Note that events may be missing: the store has to be read before text continues."""
        self.needs_reconcile = True
        self._fresh.clear()
        self._postponed.clear()
        for text in self.texts.values():
            text.freeze()

    # Messages and parts, from events and from the store

    def _message(self, info: Message, *, sure: bool) -> bool:
        """Take over a message; False if it cannot be said yet whose it is."""
        if not self.messages.place(info, sure=sure):
            return False
        answer = self.messages.answers.get(info.id)
        if answer is None or answer.time.completed is None:
            return True
        if answer.summary:
            part_id = self.messages.compactions.get(answer.parent_id)
            self.reports.append(Progressed("compaction", "completed", part_id))
        elif any(text.open_in(info.id) for text in self.texts.values()):
            # The end of a part was missed.
            self.needs_reconcile = True
        return True

    def _part(self, part: Part, *, stored: bool = False) -> bool:
        """Take over a part; False if it is not of a message that is known to matter."""
        if part.message_id in self.messages.users:
            self.messages.add_user_part(part)
            if self.messages.compactions.get(part.message_id) == part.id:
                self.reports.append(Progressed("compaction", "running", part.id))
            return True
        answer = self.messages.answers.get(part.message_id)
        if answer is None:
            return False
        if answer.summary:
            return True
        match part:
            case TextPart() | ReasoningPart():
                self.texts[type(part)].update(part, stored=stored)
            case ToolPart():
                self._call(part)
                tool, known = tool_changed(part), self.tools.get(part.id)
                if known is None or not (tool == known or overtaken(tool, known)):
                    self.tools[part.id] = known = tool
                    self.reports.append(tool)
                if child_session(part.tool, part.state.metadata) is not None:
                    described = (known.input or {}).get("description")
                    title = known.title or (str(described) if described is not None else None)
                    self.reports.append(Progressed("subagent", known.status, part.id, title=title))
            case StepStartPart():
                if part.id not in self._steps and not stored:
                    # A second start in one message means that the provider failed in between.
                    for text in self.texts.values():
                        text.kill_open(part.message_id)
                self._steps.add(part.id)
                self.reports.append(Progressed("step-start", "running", part.id))
            case StepFinishPart():
                step = Progressed("step-finish", "completed", part.id, reason=part.reason)
                self.reports.append(step)
            case _:
                pass
        return True

    def _call(self, part: ToolPart) -> None:
        if (child := child_session(part.tool, part.state.metadata)) is not None:
            self.sessions.setdefault(child)
        if part.state.status != "pending":
            self._calls[part.call_id] = (part.tool, part.state.input)

    # Statuses and interrupts, from events and from the store

    def _status(self, session: SessionId, status: SessionStatus) -> None:
        match status:
            case StatusRetry():
                retry = status.model_copy(update={"message": redact(status.message)})
                if retry != self.sessions[session]:
                    self.sessions[session] = retry
                    attempt = f"attempt {retry.attempt}"
                    self.reports.append(
                        Progressed("retry", "waiting", title=retry.message, subtitle=attempt)
                    )
            case _:
                self.sessions[session] = None
        if session != self.root:
            return
        self.idle_seen = isinstance(status, StatusIdle)
        match status:
            case StatusRetry():
                # What the provider had written is void; the next attempt begins new parts.
                self.retrying = True
                for text in self.texts.values():
                    text.kill_open()
                # So is what waits for it to be known whose message it is.
                for events in self._postponed.values():
                    events[:] = [event for event in events if not _grows_text(event)]
            case StatusBusy():
                # An error was not the end after all.
                self.retrying = False
                self.last_error = None
            case StatusIdle():
                pass

    def _ask(self, request: PermissionRequest | QuestionRequest, directory: str | None) -> None:
        if request.id not in self.asked and request.id not in self.settled:
            call = self._calls.get(request.tool.call_id) if request.tool else None
            asked = interrupted(request, call, directory)
            if request.session_id != self.root:
                asked = replace(asked, origin=self._sub_agent(request.session_id))
            self.asked[request.id] = asked

    def _sub_agent(self, session: SessionId) -> str:
        """Return the title of a sub-agent: what the call that started it says."""
        for tool in self.tools.values():
            if child_session(tool.tool, tool.metadata) == session:
                return str((tool.input or {}).get("description") or tool.title or "sub-agent")
        return "sub-agent"

    def _settle(self, request_id: RequestId, resolution: Resolution) -> None:
        self.settled[request_id] = resolution
        asked, newest = self.asked.pop(request_id, None), self.messages.newest
        if asked and asked.session_id == self.root and newest and resolution == "rejected":
            self._refused = newest.id

    def void_requests(self) -> None:
        """Give up what is still asked: the turn is over."""
        for request_id in list(self.asked):
            self._settle(request_id, "void")

    # The store

    def absorb(self, stored: Snapshot, *, final: bool = False) -> None:
        """Update the state with a snapshot; ``final`` if nothing will follow."""
        for session, messages in stored.children.items():
            self.sessions.setdefault(session)
            for message in messages:
                for part in message.parts:
                    if isinstance(part, ToolPart):
                        self._call(part)
        if final:
            self._fresh.clear()
        self._absorb_messages(self.messages.since_prompt(stored.messages), final=final)
        if self.root not in self._fresh:
            self._status(self.root, stored.statuses.get(self.root, StatusIdle()))
        for child in self.children - set(stored.statuses):
            self.sessions[child] = None
        listed = {"permission": stored.permissions, "question": stored.questions}
        pending = {
            request.id: request
            for request in (*(stored.permissions or ()), *(stored.questions or ()))
            if request.session_id in self.sessions
        }
        for request_id, asked in list(self.asked.items()):
            known = request_id in pending or request_id in self._fresh
            if not known and listed[asked.type] is not None:
                self._settle(request_id, "void")
        for request in pending.values():
            # It was pending after the last gap: how it is settled will be heard, but the next
            # snapshot may be without it before.
            self._fresh.add(request.id)
            self._ask(request, stored.directory)
        self.session = stored.session or self.session
        self.needs_reconcile = False
        for text in self.texts.values():
            text.frozen = False
        postponed, self._postponed = self._postponed, {}
        for events in postponed.values():
            for event in events:
                self._hear_message(event)

    def _absorb_messages(self, messages: Sequence[MessageWithParts], *, final: bool) -> None:
        own = self.messages
        # The order of the store decides what came before somebody else's prompt.
        overtaken_before, own.overtaken = own.overtaken, False
        order: dict[type[TextPart | ReasoningPart], list[str]] = {kind: [] for kind in self.texts}
        for message in messages:
            if message.info.id not in self._fresh:
                self._message(message.info, sure=True)
            answer = own.answers.get(message.info.id)
            for part in message.parts:
                self._part(part, stored=True)
                if answer and not answer.summary and isinstance(part, TextPart | ReasoningPart):
                    order[type(part)].append(part.id)
            if answer and not answer.summary:
                self._bury(message, final=final)
        own.overtaken |= overtaken_before
        if not messages:
            return
        # Answers that the snapshot does not have yet follow those that it has.
        stored = [m.info.id for m in messages if m.info.id in own.answers]
        own.answers = {message_id: own.answers[message_id] for message_id in stored} | own.answers
        for kind, part_ids in order.items():
            self.texts[kind].arrange(part_ids)
            if final:
                self.texts[kind].kill_open()

    def _bury(self, message: MessageWithParts, *, final: bool) -> None:
        """Give up text parts that the store shows as unfinished and that will stay so.

        Those of a message that OpenCode never completed, because it died, keep what was emitted.
        """
        completed = message.info.time.completed is not None
        # What comes before the latest start of a step is of an attempt that failed.
        starts = [i for i, part in enumerate(message.parts) if part.type == "step-start"]
        latest = (starts or [0])[-1]
        for place, part in enumerate(message.parts):
            if not isinstance(part, TextPart | ReasoningPart) or ended(part):
                continue
            text = self.texts[type(part)]
            if place < latest or (completed and not part.text):
                text.kill([part.id])
            elif completed:
                # Before 1.2 a text is stored as it grows, and an abort does not end it.
                text.end(part)
        if final and not completed:
            for text in self.texts.values():
                text.keep_open(message.info.id)


def _grows_text(event: MessageEvent) -> bool:
    """Whether an event is about text that is not complete."""
    match event:
        case PartUpdated(part=TextPart() | ReasoningPart() as part):
            return not ended(part)
        case _:
            return isinstance(event, PartDelta)


class Reader:
    """Emits what a turn says, once and in order."""

    def __init__(
        self,
        root: SessionId,
        prompt: MessageId,
        emitted: Emitted | None = None,
        answer: Channel = Channel.TEXT,
    ) -> None:
        """Begin, or go on after what an earlier process emitted; ``answer`` names the answer."""
        self._emitted = emitted or Emitted()
        self._answer = answer
        self.state = TurnState(root, prompt, self._emitted, answer)
        self.finished = False
        self._held: dict[str, ToolChanged] = {}
        """Calls that are not emitted yet: in preparation, waiting for a person, or just begun."""
        self._heard: dict[str, None] = {}
        """The ids of the latest events, oldest first."""
        if emitted is not None:
            # All that another process emitted may be out of date.
            self.state.gap()

    @property
    def answer(self) -> str:
        """What was answered so far."""
        text = self._emitted.channels.get(self._answer)
        return text.text if text is not None else ""

    @property
    def starting(self) -> list[ToolChanged]:
        """Calls that have just begun to run, and may be about to ask for a permission.

        Whoever feeds the reader calls ``start`` a moment later.
        """
        waiting = {interrupt.call_id for interrupt in self.state.asked.values()}
        held = self._held.values()
        return [t for t in held if t.status == "running" and t.call_id not in waiting]

    def start(self) -> list[TurnEvent]:
        """Emit the calls that are starting: they have had the time to ask."""
        out: list[TurnEvent] = []
        for tool in self.starting:
            self._show(tool, out)
        return out

    def feed(self, events: Iterable[Event]) -> list[TurnEvent]:
        """Return what events say, neighbouring growth of a part in one piece."""
        out: list[TurnEvent] = []
        state, heard = self.state, self._heard
        for event in events:
            if self.finished or event.event_id in heard:
                continue
            if event.event_id:  # before 1.4 events have none
                heard[event.event_id] = None
                if len(heard) > RECENT:
                    del heard[next(iter(heard))]
            if type(event) is PartDelta:
                if event.session_id != state.root:
                    continue  # the text of a sub-agent
                # Nearly always it is of the part that is being emitted: nothing to compare then.
                grew = state.stream(event.part_id, event.delta)
                if grew is not None:
                    out.append(grew)
                    continue
            state.hear(event)
            self._emit(out)
        return merged(out)

    def reconcile(self, stored: Snapshot) -> list[TurnEvent]:
        """Return what the store has and was not emitted yet."""
        out: list[TurnEvent] = []
        if not self.finished:
            self.state.absorb(stored)
            self._emit(out)
        return merged(out)

    def finish(
        self,
        stored: Snapshot | None,
        *,
        aborted: bool = False,
        failure: Failure | None = None,
    ) -> list[TurnEvent]:
        """Return what is left to emit, and the end.

        ``aborted`` says that the caller canceled the turn, ``failure`` why the turn was given
        up; ``stored`` is None when OpenCode cannot be asked any more.
        """
        out: list[TurnEvent] = []
        if self.finished:
            return out
        state = self.state
        if stored is not None:
            state.absorb(stored, final=True)
            self._emit(out)
        state.void_requests()
        self._emit(out)
        for tool in list(self._held.values()):
            self._show(tool, out)
        texts = {c: t for c, t in self._emitted.channels.items() if not t.closed}
        if (reasoning := texts.get(Channel.REASONING)) is not None:
            out.append(ChannelClosed(Channel.REASONING, reasoning.message_id))
        answers = state.messages.answers
        if answers:
            own = sum(map(usage, answers.values()), Usage())
            children = self._children_usage(stored) if stored else None
            out.append(UsageCounted(own, children, *state.messages.answered_by))
        if stored is not None and stored.diffs:
            files: dict[str, FileChange] = {}
            for d in stored.diffs:  # a file may have changed after several prompts
                known = files.get(d.file, FileChange(d.file, d.status or "modified"))
                more, fewer = known.additions + d.additions, known.deletions + d.deletions
                files[d.file] = replace(known, additions=more, deletions=fewer)
            patch = "\n".join(d.patch for d in stored.diffs if d.patch)
            out.append(
                DiffChanged([*files.values()], patch[:MAX_PATCH], truncated=len(patch) > MAX_PATCH)
            )
        # The answer is closed last: who takes the last artifact for the answer is right then.
        if (answer := texts.get(self._answer)) is not None:
            out.append(ChannelClosed(self._answer, answer.message_id))
        outcome, reason = judge(
            state.messages.newest,
            state.last_error,
            refused=state.refused,
            retrying=state.retrying,
            overtaken=state.messages.overtaken,
        )
        if outcome is Outcome.COMPLETED and state.messages.unanswered:
            outcome, reason = Outcome.FAILED, UNANSWERED
        if failure is not None:
            outcome, reason = Outcome.FAILED, failure
        elif aborted:
            outcome, reason = Outcome.CANCELED, None
        last = next((info for info in reversed(answers.values()) if not info.summary), None)
        if last is None:
            out.append(Finished(outcome, failure=reason))
        else:
            out.append(Finished(outcome, last.id, last.finish, last.structured, reason))
        self.finished = True
        return merged(out)

    def _emit(self, out: list[TurnEvent]) -> None:
        """Emit the difference between what is known and what was emitted."""
        state, emitted, first = self.state, self._emitted, len(out)
        for request_id, interrupt in emitted.open.items():
            if request_id not in state.asked:
                resolution = state.settled[request_id]
                out.append(Resumed(request_id, interrupt.type, resolution))
        for change in state.reports:
            match change:
                case Progressed():
                    key = (change.type, change.status, change.part_id)
                    # Each attempt of a provider is worth a notice, everything else is said once.
                    if change.type == "retry" or key not in emitted.progress:
                        emitted.progress.add(key)
                        out.append(change)
                case ToolChanged():
                    # A call is shown from when it runs: before, it may ask, and a client would
                    # show the call in place of the question. OpenCode calls it running a moment
                    # before it asks, or after.
                    self._held[change.part_id] = change
                    known = change.part_id in emitted.tools
                    says = change.title or change.output or change.metadata
                    if known or change.complete or (says and change in self.starting):
                        self._show(change, out)
        state.reports.clear()
        out += [asked for asked in state.asked.values() if asked.request_id not in emitted.open]
        if state.todos is not None and state.todos != emitted.todos:
            out.append(Progressed("todo", "updated", todos=state.todos))
        title = state.session.title if state.session else UNTITLED
        if state.session and title != emitted.title and not title.startswith(UNTITLED):
            by = state.messages.answered_by
            out.append(SessionBound(state.root, state.session.directory, title, *by))
        for event in out[first:]:
            emitted.add(event)
        for text in state.texts.values():
            text.emit(out)

    def _show(self, tool: ToolChanged, out: list[TurnEvent]) -> None:
        del self._held[tool.part_id]
        self._emitted.tools[tool.part_id] = tool
        out.append(tool)

    def _children_usage(self, stored: Snapshot) -> Usage | None:
        if not stored.children:
            return None
        # A sub-agent may continue a session of an earlier turn, which has been counted.
        since = min(info.time.created for info in self.state.messages.answers.values())
        infos = (m.info for messages in stored.children.values() for m in messages)
        steps = (i for i in infos if isinstance(i, AssistantMessage) and i.time.created >= since)
        return sum(map(usage, steps), Usage())


def merged(events: list[TurnEvent]) -> list[TurnEvent]:
    """Join neighbouring growth of one part, and drop tool states that are overtaken at once."""
    if len(events) < 2:
        return events
    out: list[TurnEvent] = []
    texts: list[str] = []
    for event in events:
        last = out[-1] if out else None
        match last, event:
            case Grew(), Grew():
                if last.part_id == event.part_id:
                    texts.append(event.text)
                    continue
            case ToolChanged(), ToolChanged():
                if (last.part_id, last.status) == (event.part_id, event.status):
                    out[-1] = event
                    continue
            case _:
                pass
        _close(out, texts)
        out.append(event)
    _close(out, texts)
    return out


def _close(out: list[TurnEvent], texts: list[str]) -> None:
    """Give the last event the texts that followed it."""
    if not texts:
        return
    match out[-1]:
        case Grew() as last:
            joined = last.text + "".join(texts)
            out[-1] = type(last)(last.message_id, last.part_id, joined, last.opens)
        case _:
            pass
    texts.clear()
