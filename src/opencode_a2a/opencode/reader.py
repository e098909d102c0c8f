"""One turn, read: OpenCode's events and its stored state in, turn events out.

``turns.turn`` feeds it. The events are a hint, the store is the truth: after a gap the
turn reads the store and calls ``reconcile``, at the end ``finish``; what was told before is
never repeated, and what turned out to be void is replaced. Pure: no clock, no input, no output.

A snapshot must have been asked for after the last ``gap``. It may still be older or newer
than the events fed since: they win over it, and those that it has overtaken change nothing.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from opencode_a2a.events import (
    Channel,
    ChannelClosed,
    Emitted,
    Failure,
    Finished,
    Interrupted,
    JsonObject,
    Outcome,
    Progressed,
    Resolution,
    Resumed,
    SessionBound,
    ToolChanged,
    TurnEvent,
    Usage,
    UsageCounted,
    merged,
)
from opencode_a2a.ids import MessageId, RequestId, SessionId
from opencode_a2a.opencode.events import (
    Event,
    MessageRemoved,
    MessageUpdated,
    PartDelta,
    PartRemoved,
    PartUpdated,
    PermissionAsked,
    PermissionReplied,
    QuestionAsked,
    QuestionRejected,
    QuestionReplied,
    SessionChanged,
    SessionDeleted,
    SessionFailed,
    SessionIdle,
    SessionInfo,
    StatusChanged,
    TodoUpdated,
    child_session,
)
from opencode_a2a.opencode.outcome import Ending, judge, redact, refused
from opencode_a2a.opencode.text import ChannelText, ended
from opencode_a2a.opencode.translate import (
    Call,
    behind,
    diff,
    interrupted,
    tool_changed,
    usage,
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
)

MAX_LATER = 5_000
RECENT = 256
_REPLIES: dict[str, Resolution] = {"once": "once", "always": "always", "reject": "rejected"}
_ATTACHED = "[Attached "
"""How the text begins that takes the place of a file when a prompt is put anew."""


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
    """Pending ones, None when it is not known; those of other session trees are left aside."""
    diffs: Sequence[FileDiff] = ()
    session: SessionInfo | None = None
    directory: str | None = None


@dataclass(frozen=True, slots=True)
class RetryNotice:
    """A provider failed, and OpenCode tries again at ``next`` (milliseconds since 1970)."""

    session_id: SessionId
    attempt: int
    message: str
    next: int


@dataclass(slots=True)
class _Ask:
    interrupted: Interrupted
    message_id: MessageId | None
    fresh: bool


class Reader:
    """The state of one turn: which messages are its own, and what of them was told."""

    def __init__(
        self, root: SessionId, user_message: MessageId, emitted: Emitted | None = None
    ) -> None:
        self.root = root
        self.user_message = user_message
        self.user_message_seen = False
        self.finished = False
        self.idle_seen = False
        self.last_error: TurnError | None = None
        self.needs_reconcile = emitted is not None
        emitted = emitted or Emitted()
        self._channels = {
            channel: ChannelText(channel, emitted.channels.get(channel)) for channel in Channel
        }
        self._tools = dict(emitted.tools)
        self._unstarted: dict[str, ToolChanged] = {}
        """Calls that are not told yet: in preparation, waiting for a person, or just begun."""
        self._asks = {key: _Ask(value, None, fresh=False) for key, value in emitted.open.items()}
        self._settled = set(emitted.settled)
        self._progress = set(emitted.progress)
        self._todos = emitted.todos
        self._title = emitted.title
        self._sessions = {root}
        self._retries: dict[SessionId, RetryNotice] = {}
        self._retrying = False
        self._status_fresh = True
        self._calls: dict[str, Call] = {}
        self._chain = {user_message}
        self._users: set[MessageId] = {user_message}
        self._foreign = False
        self._prompted: set[str] = set()
        self._compactions: dict[MessageId, str] = {}
        self._run: dict[MessageId, AssistantMessage] = {}
        self._fresh_messages: set[MessageId] = set()
        self._others: set[MessageId] = set()
        self._refused: set[MessageId] = set()
        self._later: dict[MessageId, list[PartUpdated | PartDelta | MessageUpdated]] = {}
        self._heard: dict[str, None] = {}
        """The latest events by their ids, oldest first: some are told twice."""
        if self.needs_reconcile:
            self._recall(emitted)

    # What the turn needs to know

    @property
    def complete(self) -> bool:
        """Whether the last message of the run is complete and its session idle."""
        last = self._newest
        done = last is not None and last.time.completed is not None
        return done and self.idle_seen and not self.needs_reconcile

    def ends_with(self, answer: MessageWithParts) -> bool:
        """Whether the answer to the prompt is all that the store could tell of the turn's end."""
        unsure = self._later or self._foreign or self._asks or self.children
        changed = any(isinstance(part, PatchPart) for part in answer.parts)
        return self.complete and list(self._run) == [answer.info.id] and not (unsure or changed)

    @property
    def steps(self) -> int:
        """How often the model was asked."""
        return len(self._run)

    @property
    def retry(self) -> RetryNotice | None:
        """The latest retry that the tree waits for."""
        return max(self._retries.values(), key=lambda notice: notice.next, default=None)

    @property
    def pending(self) -> list[Interrupted]:
        """The interrupts that wait for an answer."""
        return [ask.interrupted for ask in self._asks.values()]

    @property
    def starting(self) -> list[ToolChanged]:
        """Calls that have just begun to run, and may be about to ask for a permission."""
        waiting = {ask.interrupted.call_id for ask in self._asks.values()}
        held = self._unstarted.values()
        return [t for t in held if t.status == "running" and t.call_id not in waiting]

    @property
    def children(self) -> frozenset[SessionId]:
        """The sessions of the turn's sub-agents."""
        return frozenset(self._sessions - {self.root})

    # What the turn says

    def feed(self, event: Event) -> list[TurnEvent]:
        """Return what an event tells."""
        out: list[TurnEvent] = []
        self._hear(event, out)
        return out

    def feed_all(self, events: Iterable[Event]) -> list[TurnEvent]:
        """Return what several events tell, neighbouring growth of a part in one piece."""
        out: list[TurnEvent] = []
        for event in events:
            self._hear(event, out)
        return merged(out)

    def start(self) -> list[TurnEvent]:
        """Tell the calls that are starting: they have had the time to ask."""
        out: list[TurnEvent] = []
        for tool in self.starting:
            self._show(tool, out)
        return out

    def gap(self) -> None:
        """Note that events may be missing: the store has to be read before text goes on."""
        self.needs_reconcile = True
        self._status_fresh = False
        self._fresh_messages.clear()
        self._later.clear()
        for ask in self._asks.values():
            ask.fresh = False
        for channel in self._channels.values():
            channel.freeze()

    def reconcile(self, stored: Snapshot) -> list[TurnEvent]:
        """Return what the store has and was not told yet."""
        out: list[TurnEvent] = []
        if not self.finished:
            self._absorb(stored, out, final=False)
        return merged(out)

    def finish(
        self,
        stored: Snapshot | None,
        *,
        aborted: bool = False,
        failure: Failure | None = None,
    ) -> list[TurnEvent]:
        """Return the untold rest and the end.

        ``aborted`` says that the caller canceled the turn, ``failure`` why the turn was given
        up; ``stored`` is None when OpenCode cannot be asked any more.
        """
        out: list[TurnEvent] = []
        if self.finished:
            return out
        if stored is not None:
            self._absorb(stored, out, final=True)
        for request_id in list(self._asks):
            self._settle(request_id, "void", out)
        for tool in list(self._unstarted.values()):
            self._show(tool, out)
        texts = ((channel, text.emitted) for channel, text in self._channels.items())
        out.extend(ChannelClosed(c, t.message_id) for c, t in texts if t and not t.closed)
        self._count(stored, out)
        out.append(self._end(aborted=aborted, failure=failure))
        self.finished = True
        return merged(out)

    # Events

    def _hear(self, event: Event, out: list[TurnEvent]) -> None:
        if self.finished or event.event_id in self._heard:
            return
        if event.event_id:
            self._heard[event.event_id] = None
            if len(self._heard) > RECENT:
                del self._heard[next(iter(self._heard))]
        if type(event) is PartDelta:
            self._delta(event, out)
        elif event.session_id == self.root:
            self._root_event(event, out)
        elif event.session_id in self._sessions or self._joins(event):
            self._child_event(event, out)

    def _joins(self, event: Event) -> bool:
        match event:
            case SessionChanged(info=SessionInfo(parent_id=parent)) if parent in self._sessions:
                self._sessions.add(event.session_id)
                return True
            case _:
                return False

    def _root_event(self, event: Event, out: list[TurnEvent]) -> None:
        match event:
            case PartUpdated():
                self._part_event(event, out)
            case MessageUpdated():
                self._message_event(event, out)
            case StatusChanged():
                self._status_fresh = True
                self._status(self.root, event.status, out)
            case SessionIdle():
                self._status_fresh = True
                self._status(self.root, StatusIdle(), out)
            case SessionFailed(error=TurnError() as error):
                # The second of two says the same with a stack trace.
                self.last_error = self.last_error or error
            case SessionChanged():
                self._session(event.info, out)
            case TodoUpdated():
                self._todo([todo.model_dump(exclude_none=True) for todo in event.todos], out)
            case PartRemoved() | MessageRemoved():
                self._removed(event, out)
            case SessionDeleted():
                self.needs_reconcile = True
            case _:
                self._interrupt_event(event, out)

    def _child_event(self, event: Event, out: list[TurnEvent]) -> None:
        match event:
            case PartUpdated(part=ToolPart() as part):
                self._call(part)
            case StatusChanged():
                self._status(event.session_id, event.status, out)
            case SessionIdle():
                self._status(event.session_id, StatusIdle(), out)
            case _:
                self._interrupt_event(event, out)

    def _interrupt_event(self, event: Event, out: list[TurnEvent]) -> None:
        match event:
            case PermissionAsked() | QuestionAsked():
                self._ask(event, event.directory, out, fresh=True)
            case PermissionReplied():
                self._settle(event.request_id, _REPLIES[event.reply], out)
            case QuestionReplied():
                self._settle(event.request_id, "replied", out)
            case QuestionRejected():
                self._settle(event.request_id, "rejected", out)
            case _:
                pass

    def _delta(self, event: PartDelta, out: list[TurnEvent]) -> None:
        if event.session_id != self.root:
            return
        if event.message_id in self._later:
            self._postpone(event.message_id, event)
            return
        for channel in self._channels.values():
            if channel.grow(event.part_id, event.delta, out):
                return

    def _part_event(self, event: PartUpdated, out: list[TurnEvent]) -> None:
        message_id = event.part.message_id
        if message_id in self._run:
            self._own_part(event.part, out)
        elif message_id in self._users:
            self._user_part(event.part, out)
        elif message_id not in self._others:
            self._postpone(message_id, event)

    def _message_event(self, event: MessageUpdated, out: list[TurnEvent]) -> None:
        info = event.info
        if not self._place(info, sure=not self.needs_reconcile):
            self._postpone(info.id, event)
            return
        self._fresh_messages.add(info.id)
        self._message(info, out)
        for later in self._later.pop(info.id, ()):
            self._replay(later, out)

    def _postpone(
        self, message_id: MessageId, event: PartUpdated | PartDelta | MessageUpdated
    ) -> None:
        """Keep an event until it is known whose message it is about."""
        if sum(map(len, self._later.values())) >= MAX_LATER:
            self.gap()
            return
        self._later.setdefault(message_id, []).append(event)

    def _replay(
        self, event: PartUpdated | PartDelta | MessageUpdated, out: list[TurnEvent]
    ) -> None:
        match event:
            case PartUpdated():
                self._part_event(event, out)
            case MessageUpdated():
                self._message_event(event, out)
            case PartDelta():
                self._delta(event, out)

    # Messages: which are the turn's own

    def _place(self, info: Message, *, sure: bool) -> bool:
        """Note whose message this is; False if that cannot be said before the store is read."""
        match info:
            case UserMessage():
                self._users.add(info.id)
                self.user_message_seen |= info.id == self.user_message
            case AssistantMessage(parent_id=parent) if parent in self._chain:
                self._others.discard(info.id)
                self._run[info.id] = info
            case AssistantMessage(parent_id=parent) if sure or parent in self._users:
                self._others.add(info.id)
            case _:
                return False
        return True

    def _message(self, info: Message, out: list[TurnEvent]) -> None:
        if info.id not in self._run or info.role == "user" or info.time.completed is None:
            return
        if info.summary:
            part_id = self._compactions.get(info.parent_id)
            self._tell_progress(Progressed("compaction", "completed", part_id), out)
        elif any(channel.open_in(info.id) for channel in self._channels.values()):
            self.needs_reconcile = True

    def _user_part(self, part: Part, out: list[TurnEvent]) -> None:
        """Follow the run from prompt to prompt: OpenCode adds some of its own (compaction)."""
        if part.message_id == self.user_message:
            self._prompted.update([part.text] if isinstance(part, TextPart) else ())
            return
        if not self.user_message_seen or self._is_replay(part):
            return
        match part:
            case CompactionPart() | TextPart(synthetic=True):
                if self._foreign:
                    return
                self._chain.add(part.message_id)
                if part.type == "compaction":
                    self._compactions[part.message_id] = part.id
                    self._tell_progress(Progressed("compaction", "running", part.id), out)
            case _:
                self._foreign = True
                self._chain.discard(part.message_id)

    def _is_replay(self, part: Part) -> bool:
        """Whether OpenCode puts the prompt anew, which it does when a compaction made it fit."""
        if self._foreign or not self._compactions:
            return False
        match part:
            case TextPart(synthetic=False, text=text) if text in self._prompted or text.startswith(
                _ATTACHED
            ):
                self._chain.add(part.message_id)
                return True
            case _:
                return False

    def _own_part(self, part: Part, out: list[TurnEvent]) -> None:
        if self._run[part.message_id].summary:
            return
        match part:
            case TextPart() | ReasoningPart():
                channel = self._channels[Channel(part.type)]
                channel.update(part)
                channel.emit(out)
            case ToolPart():
                self._call(part)
                self._tool(tool_changed(part), out)
                self._subagent(part, out)
            case StepStartPart():
                self._step(part, out)
            case StepFinishPart():
                self._tell_progress(
                    Progressed("step-finish", "completed", part.id, reason=part.reason), out
                )
            case _:
                pass

    def _step(self, part: StepStartPart, out: list[TurnEvent]) -> None:
        """A second start in one message means that the provider failed in between."""
        if not self._tell_progress(Progressed("step-start", "running", part.id), out):
            return
        for channel in self._channels.values():
            if channel.open_in(part.message_id):
                channel.kill_open(part.message_id)
                channel.emit(out)

    def _removed(self, event: PartRemoved | MessageRemoved, out: list[TurnEvent]) -> None:
        for channel in self._channels.values():
            match event:
                case PartRemoved():
                    channel.remove([event.part_id])
                case MessageRemoved():
                    channel.remove_message(event.message_id)
                    self._run.pop(event.message_id, None)
            channel.emit(out)

    # Tools, progress, interrupts

    def _call(self, part: ToolPart) -> None:
        child = child_session(part)
        if child is not None:
            self._sessions.add(child)
        if part.state.status != "pending":
            self._calls[part.call_id] = (part.tool, part.state.input)

    def _tool(self, new: ToolChanged, out: list[TurnEvent]) -> None:
        """Tell a call from when it runs: before, it may ask, and a client would show the call
        in place of the question. OpenCode calls it running a moment before it asks, or after.
        """
        old = self._tools.get(new.part_id) or self._unstarted.get(new.part_id)
        if old is not None and (new == old or behind(new, old)):
            return
        self._unstarted[new.part_id] = new
        shows = new.title or new.output or new.metadata
        ended = new.status in ("completed", "error")
        if ended or new.part_id in self._tools or (shows and new in self.starting):
            self._show(new, out)

    def _show(self, tool: ToolChanged, out: list[TurnEvent]) -> None:
        del self._unstarted[tool.part_id]
        self._tools[tool.part_id] = tool
        out.append(tool)

    def _subagent(self, part: ToolPart, out: list[TurnEvent]) -> None:
        if child_session(part) is None:
            return
        changed = self._tools.get(part.id) or self._unstarted[part.id]
        described = changed.input.get("description") if changed.input else None
        title = changed.title or (str(described) if described is not None else None)
        self._tell_progress(Progressed("subagent", changed.status, part.id, title=title), out)

    def _tell_progress(self, progress: Progressed, out: list[TurnEvent]) -> bool:
        key = (progress.type, progress.status, progress.part_id)
        if key in self._progress:
            return False
        self._progress.add(key)
        out.append(progress)
        return True

    def _todo(self, todos: list[JsonObject], out: list[TurnEvent]) -> None:
        if todos != self._todos:
            self._todos = todos
            out.append(Progressed("todo", "updated", todos=todos))

    def _session(self, info: SessionInfo, out: list[TurnEvent]) -> None:
        # OpenCode's own placeholder until the model has found a title.
        if info.title != self._title and not info.title.startswith("New session - "):
            self._title = info.title
            out.append(SessionBound(self.root, info.directory, info.title))

    def _status(self, session: SessionId, status: SessionStatus, out: list[TurnEvent]) -> None:
        match status:
            case StatusRetry():
                self._retry(session, status, out)
            case _:
                self._retries.pop(session, None)
        if session == self.root:
            self._root_status(status, out)

    def _root_status(self, status: SessionStatus, out: list[TurnEvent]) -> None:
        self.idle_seen = status.type == "idle"
        match status:
            case StatusRetry():
                self._retrying = True
                for channel in self._channels.values():
                    channel.kill_open()
                    channel.emit(out)
            case StatusBusy():
                self._retrying = False
                self.last_error = None
            case StatusIdle():
                pass

    def _retry(self, session: SessionId, status: StatusRetry, out: list[TurnEvent]) -> None:
        notice = RetryNotice(session, status.attempt, redact(status.message), status.next)
        if notice != self._retries.get(session):
            self._retries[session] = notice
            attempt = f"attempt {notice.attempt}"
            out.append(Progressed("retry", "waiting", title=notice.message, subtitle=attempt))

    def _ask(
        self,
        request: PermissionRequest | QuestionRequest,
        directory: str | None,
        out: list[TurnEvent],
        *,
        fresh: bool,
    ) -> None:
        known = self._asks.get(request.id)
        if known is not None:
            known.fresh |= fresh
        if known is not None or request.id in self._settled:
            return
        message_id = request.tool.message_id if request.tool else None
        if message_id is None and request.session_id == self.root and self._newest:
            message_id = self._newest.id
        call = self._calls.get(request.tool.call_id) if request.tool else None
        asked = interrupted(request, call, directory)
        self._asks[request.id] = _Ask(asked, message_id, fresh)
        out.append(asked)

    def _settle(self, request_id: RequestId, resolution: Resolution, out: list[TurnEvent]) -> None:
        self._settled.add(request_id)
        ask = self._asks.pop(request_id, None)
        if ask is None:
            return
        if resolution == "rejected" and ask.message_id is not None:
            self._refused.add(ask.message_id)
        out.append(Resumed(request_id, ask.interrupted.type, resolution))

    # The store

    def _absorb(self, stored: Snapshot, out: list[TurnEvent], *, final: bool) -> None:
        for session, messages in stored.children.items():
            self._sessions.add(session)
            for message in messages:
                for part in message.parts:
                    if isinstance(part, ToolPart):
                        self._call(part)
        messages = self._from_prompt(stored.messages)
        if final:
            self._fresh_messages.clear()
        self._stored_messages(messages, out, final=final)
        self._stored_status(stored, out, final=final)
        self._stored_interrupts(stored, out)
        if stored.session is not None:
            self._session(stored.session, out)
        self.needs_reconcile = False
        for channel in self._channels.values():
            channel.frozen = False
            channel.emit(out)
        later, self._later = self._later, {}
        for events in later.values():
            for event in events:
                self._replay(event, out)

    def _from_prompt(self, messages: Sequence[MessageWithParts]) -> Sequence[MessageWithParts]:
        """Return the messages from the turn's prompt on; none if the store does not have it."""
        if messages and messages[0].info.id in self._run:
            return messages
        for place, message in enumerate(messages):
            if message.info.id == self.user_message:
                return messages[place:]
        return ()

    def _stored_messages(
        self, messages: Sequence[MessageWithParts], out: list[TurnEvent], *, final: bool
    ) -> None:
        order: dict[Channel, list[str]] = {channel: [] for channel in Channel}
        foreign, self._foreign = self._foreign, False
        for message in messages:
            if message.info.id not in self._fresh_messages:
                self._place(message.info, sure=True)
                self._message(message.info, out)
            for part in message.parts:
                self._stored_part(part, order, out)
            self._bury(message, out_of_time=final)
        self._foreign |= foreign
        if not messages:
            return
        stored = [m.info.id for m in messages if m.info.id in self._run]
        self._run = {message_id: self._run[message_id] for message_id in stored} | self._run
        for channel, part_ids in order.items():
            self._channels[channel].arrange(part_ids)
            if final:
                self._channels[channel].kill_open()

    def _stored_part(
        self, part: Part, order: dict[Channel, list[str]], out: list[TurnEvent]
    ) -> None:
        if part.message_id in self._users:
            self._user_part(part, out)
            return
        info = self._run.get(part.message_id)
        if info is None or info.summary:
            return
        match part:
            case TextPart() | ReasoningPart():
                channel = Channel(part.type)
                order[channel].append(part.id)
                self._channels[channel].update_stored(part)
            case ToolPart():
                self._call(part)
                self._tool(tool_changed(part), out)
                self._subagent(part, out)
            case StepStartPart():
                self._tell_progress(Progressed("step-start", "running", part.id), out)
            case StepFinishPart():
                self._own_part(part, out)
            case _:
                pass

    def _bury(self, message: MessageWithParts, *, out_of_time: bool) -> None:
        """Give up text parts that the store shows as unfinished and that will stay so.

        Those of a message that OpenCode never completed, because it died, keep what was told.
        """
        completed = message.info.time.completed is not None
        starts = [i for i, part in enumerate(message.parts) if part.type == "step-start"]
        latest = (starts or [0])[-1]
        for place, part in enumerate(message.parts):
            if not isinstance(part, TextPart | ReasoningPart) or ended(part):
                continue
            channel = self._channels[Channel(part.type)]
            if place < latest or (completed and not part.text):
                channel.kill([part.id])
            elif completed:
                # Before 1.2 a text is stored as it grows, and an abort does not end it.
                channel.end(part.id, part.text)
        if out_of_time and not completed:
            for channel in self._channels.values():
                channel.keep_open(message.info.id)

    def _stored_status(self, stored: Snapshot, out: list[TurnEvent], *, final: bool) -> None:
        status = stored.statuses.get(self.root, StatusIdle())
        if final or not self._status_fresh:
            self._status(self.root, status, out)
        for child in self.children:
            if child not in stored.statuses:
                self._retries.pop(child, None)

    def _stored_interrupts(self, stored: Snapshot, out: list[TurnEvent]) -> None:
        requests = [
            request
            for request in (*(stored.permissions or ()), *(stored.questions or ()))
            if request.session_id in self._sessions
        ]
        pending = {request.id for request in requests}
        known = {"permission": stored.permissions, "question": stored.questions}
        for request_id, ask in list(self._asks.items()):
            listed = known[ask.interrupted.type] is not None
            if listed and request_id not in pending and not ask.fresh:
                self._settle(request_id, "void", out)
        for request in requests:
            self._ask(request, stored.directory, out, fresh=False)

    def _recall(self, emitted: Emitted) -> None:
        """Take up what another process told: everything in it may be out of date."""
        for tool in emitted.tools.values():
            child = (tool.metadata or {}).get("sessionId")
            if tool.tool == "task" and child is not None:
                self._sessions.add(SessionId(str(child)))
        self.gap()

    # The end

    @property
    def _newest(self) -> AssistantMessage | None:
        return next(reversed(self._run.values()), None)

    def _count(self, stored: Snapshot | None, out: list[TurnEvent]) -> None:
        if self._run:
            children = self._children_usage(stored) if stored else None
            own = sum(map(usage, self._run.values()), Usage())
            out.append(UsageCounted(own, children))
        if stored is not None and stored.diffs:
            out.append(diff(stored.diffs))

    def _children_usage(self, stored: Snapshot) -> Usage | None:
        if not stored.children:
            return None
        # A sub-agent may go on in a session of an earlier turn, which has been counted.
        since = min((info.time.created for info in self._run.values()), default=0)
        infos = (m.info for messages in stored.children.values() for m in messages)
        steps = (i for i in infos if isinstance(i, AssistantMessage) and i.time.created >= since)
        return sum(map(usage, steps), Usage())

    def _end(self, *, aborted: bool, failure: Failure | None) -> Finished:
        answers = [info for info in self._run.values() if not info.summary]
        last = answers[-1] if answers else None
        outcome, reason = judge(
            Ending(
                self._newest,
                self.last_error,
                refused=self._was_refused(),
                retrying=self._retrying,
                overtaken=self._foreign,
            )
        )
        if failure is not None:
            outcome, reason = Outcome.FAILED, failure
        elif aborted:
            outcome, reason = Outcome.CANCELED, None
        return Finished(
            outcome,
            last.id if last else None,
            last.finish if last else None,
            last.structured if last else None,
            reason,
        )

    def _was_refused(self) -> bool:
        last = self._newest
        return last is not None and (
            last.id in self._refused
            or any(tool.message_id == last.id and refused(tool) for tool in self._tools.values())
        )
