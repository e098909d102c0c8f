"""Reads one turn: OpenCode's events and its stored state in, turn events out.

``turns.turn`` feeds it. A ``TurnState`` holds what is known of the turn, an ``Emitted`` what was
emitted; after each update the reader emits the difference. Nothing is emitted twice, and text
that turned out to be void is replaced. Pure: no clock, no input, no output.
"""

from collections.abc import Iterable
from dataclasses import replace

from opencode_a2a.events import (
    Channel,
    ChannelClosed,
    DiffChanged,
    Emitted,
    Failure,
    FileChange,
    Finished,
    Outcome,
    Progressed,
    ReasoningGrew,
    Resumed,
    SessionBound,
    TextGrew,
    ToolChanged,
    TurnEvent,
    Usage,
    UsageCounted,
)
from opencode_a2a.ids import MessageId, SessionId
from opencode_a2a.opencode.events import Event, PartDelta
from opencode_a2a.opencode.outcome import UNANSWERED, judge
from opencode_a2a.opencode.state import Snapshot, TurnState
from opencode_a2a.opencode.translate import usage
from opencode_a2a.opencode.types import AssistantMessage

RECENT = 256
"""How many event ids are remembered: OpenCode sends some events twice."""
MAX_PATCH = 256 * 1024
UNTITLED = "New session - "
"""How OpenCode's placeholder begins that a session has until the model has found a title."""


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
        for change in state.changes:
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
                    ended = change.status in ("completed", "error")
                    says = change.title or change.output or change.metadata
                    if known or ended or (says and change in self.starting):
                        self._show(change, out)
        state.changes.clear()
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
            case (TextGrew(), TextGrew()) | (ReasoningGrew(), ReasoningGrew()):
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
        case TextGrew() | ReasoningGrew() as last:
            joined = last.text + "".join(texts)
            out[-1] = type(last)(last.message_id, last.part_id, joined, last.opens)
        case _:
            pass
    texts.clear()
