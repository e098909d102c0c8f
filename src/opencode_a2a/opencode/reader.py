"""Reads one turn: OpenCode's events and stored state in, turn events out.

``turns.attempt`` feeds a ``TurnReader``. Three things make it up: the ``TurnState``, which events
and snapshots update (``opencode.turn_state``); the ``Emitted``, everything that was emitted before;
and ``TurnReader._emit``, which emits the difference after each update. Nothing is emitted twice,
and text that turned out to be void is replaced. Pure: no clock, no I/O.
"""

from collections.abc import Iterable
from typing import assert_never

from opencode_a2a.events import (
    Channel,
    ChannelClosed,
    Emitted,
    Failure,
    Finished,
    Grew,
    Outcome,
    Progressed,
    Resumed,
    SessionBound,
    ToolChanged,
    TurnEvent,
    Usage,
    UsageCounted,
)
from opencode_a2a.ids import MessageId, SessionId
from opencode_a2a.opencode.events import Event, HeardText, PartDelta
from opencode_a2a.opencode.text import ChannelText
from opencode_a2a.opencode.translate import LOST, UNANSWERED, diff_changed, judge, usage
from opencode_a2a.opencode.turn_state import (
    AskedRequests,
    SessionTree,
    Snapshot,
    TurnMessages,
    TurnState,
)
from opencode_a2a.opencode.types import ReasoningPart, TextPart

MAX_REMEMBERED_IDS = 256
"""Event ids that are remembered: OpenCode sends some events twice."""
HELD = (
    "The connection to OpenCode was interrupted while it wrote this text; the rest follows when "
    "the text is complete"
)
UNTITLED = "New session - "
"""The beginning of the placeholder title that a session has until the model has found one."""


class TurnReader:
    """Emits everything that a turn reports, once and in order."""

    def __init__(
        self,
        root: SessionId,
        prompt: MessageId,
        emitted_before: Emitted | None = None,
        channel: Channel = Channel.TEXT,
    ) -> None:
        """Begin a turn, or resume one of which an earlier process emitted ``emitted_before``.

        ``channel`` is that of the turn's text: the answer, or a plan.
        """
        self._emitted = emitted_before or Emitted()
        self._channel = channel
        channels = self._emitted.channels
        self.state = TurnState(
            TurnMessages(prompt, sent=[prompt], user_messages={prompt}),
            SessionTree(root),
            AskedRequests(root),
            {
                TextPart: ChannelText(channel, channels),
                ReasoningPart: ChannelText(Channel.REASONING, channels),
            },
        )
        self.finished = False
        self._held: dict[str, ToolChanged] = {}
        """Tool calls not shown yet: being prepared, waiting for a person, or just begun. While the
        store has to be read, every new one is held: the store may have an earlier one."""
        self._event_ids: dict[str, None] = {}
        """The ids of the latest events, oldest first."""
        if emitted_before is not None:
            self.state.resume(emitted_before)

    @property
    def text(self) -> str:
        """The text of the turn's channel so far."""
        text = self._emitted.channels.get(self._channel)
        return text.text if text is not None else ""

    @property
    def starting(self) -> list[ToolChanged]:
        """Tool calls that have just begun to run, and may be about to ask for a permission.

        The turn calls ``show_starting`` a moment later.
        """
        if self.state.needs_reconcile:
            return []
        return [tool for tool in self._in_order() if self._is_starting(tool)]

    def show_starting(self) -> list[TurnEvent]:
        """Emit the calls that are starting: they had the time to ask for a permission."""
        out: list[TurnEvent] = []
        for tool in self.starting:
            self._show(tool, out)
        return out

    def feed(self, events: Iterable[Event]) -> list[TurnEvent]:
        """Apply events and return what they change; consecutive text of a part is joined."""
        out: list[TurnEvent] = []
        state, known_ids = self.state, self._event_ids
        root = state.tree.root
        for event in events:
            if self.finished or event.event_id in known_ids:
                continue
            if event.event_id:  # before 1.4 events have none
                known_ids[event.event_id] = None
                if len(known_ids) > MAX_REMEMBERED_IDS:
                    del known_ids[next(iter(known_ids))]
            elif type(event) is HeardText:
                known_ids |= dict.fromkeys(list(event.pieces)[-MAX_REMEMBERED_IDS // 2 :])
            if type(event) is PartDelta:
                if event.session_id != root:
                    continue  # the text of a sub-agent
                # Nearly always it continues the part that is being emitted: nothing to compare.
                grew = state.stream(event.part_id, event.delta, event.event_id)
                if grew is not None:
                    out.append(grew)
                    continue
            state.apply_event(event)
            self._emit(out)
        return merged(out)

    def reconcile(self, stored: Snapshot) -> list[TurnEvent]:
        """Apply a snapshot and return what it has that was not emitted yet."""
        out: list[TurnEvent] = []
        if not self.finished:
            self.state.apply_snapshot(stored)
            self._emit(out)
            for text in self.state.texts.values():
                if text.held_back is not None:
                    self._emit_news(Progressed("text", "held", text.held_back, title=HELD), out)
        return merged(out)

    def finish(
        self,
        stored: Snapshot | None,
        *,
        aborted: bool = False,
        failure: Failure | None = None,
    ) -> list[TurnEvent]:
        """Return everything that is left to emit, and the end of the turn.

        ``aborted``: the caller canceled the turn. ``failure``: why this service gave the turn up.
        ``stored`` is None if OpenCode could not be reached any more.
        """
        out: list[TurnEvent] = []
        if self.finished:
            return out
        state = self.state
        if stored is not None:
            state.apply_snapshot(stored, final=True)
            self._emit(out)
        state.void_requests()
        self._emit(out)
        for tool in self._in_order():
            self._show(tool, out)
        texts = {c: t for c, t in self._emitted.channels.items() if not t.closed}
        if (reasoning := texts.get(Channel.REASONING)) is not None:
            out.append(ChannelClosed(Channel.REASONING, reasoning.message_id))
        answers = state.messages.assistant
        if answers:
            own = sum(map(usage, answers.values()), Usage())
            children: Usage | None = None
            if stored is not None and stored.children:
                children = sum(map(usage, state.steps_of(stored.children)), Usage())
            out.append(UsageCounted(own, children, *state.messages.answered_by))
        if stored is not None and stored.diffs:
            out.append(diff_changed(stored.diffs))
        # The answer is closed last, for clients that take the last artifact for the answer.
        if (text := texts.get(self._channel)) is not None:
            out.append(ChannelClosed(self._channel, text.message_id))
        outcome, reason = judge(
            state.messages.newest,
            state.tree.last_error,
            refused=state.refused,
            forgotten=state.forgotten,
            unheard=state.ended_unheard,
            stepped=state.stepped,
            retrying=state.tree.retrying,
            overtaken=state.messages.overtaken,
        )
        if outcome is Outcome.COMPLETED and state.messages.unanswered:
            outcome, reason = Outcome.FAILED, UNANSWERED
        if outcome is Outcome.COMPLETED and stored is not None and stored.leaves_work:
            outcome, reason = Outcome.FAILED, LOST
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
        """Emit the difference between the state and what was emitted before."""
        state, emitted, pending = self.state, self._emitted, self.state.requests.pending
        for request_id, interrupt in [*emitted.open.items()]:
            if request_id not in pending:
                resolution = state.requests.settled[request_id]
                self._add(Resumed(request_id, interrupt.type, resolution), out)
        if state.reports:
            tools = [one for one in state.reports if isinstance(one, ToolChanged)]
            self._held |= {tool.part_id: tool for tool in tools}
        if self._held:
            self._show_due(out)
        if state.reports:
            self._emit_reports(out)
        for asked in pending.values():
            if asked.request_id not in emitted.open:
                self._add(asked, out)
        if state.todos is not None:
            self._emit_news(Progressed("todo", "updated", todos=state.todos), out)
        session = state.tree.info
        renamed = session is not None and session.title != emitted.title
        if session is not None and renamed and not session.title.startswith(UNTITLED):
            by = state.messages.answered_by
            self._add(SessionBound(state.tree.root, session.directory, session.title, *by), out)
        for text in state.texts.values():
            text.emit(out)

    def _emit_reports(self, out: list[TurnEvent]) -> None:
        for report in self.state.reports:
            match report:
                case ToolChanged():
                    pass  # it is held, and shown when it is due
                case Progressed():
                    self._emit_news(report, out)
                case _:
                    assert_never(report)
        self.state.reports.clear()

    def _emit_news(self, progress: Progressed, out: list[TurnEvent]) -> None:
        if self._emitted.is_news(progress):
            self._add(progress, out)

    def _add(self, event: TurnEvent, out: list[TurnEvent]) -> None:
        self._emitted.add(event)
        out.append(event)

    def _in_order(self) -> list[ToolChanged]:
        """Return the calls that are held, in the order in which OpenCode began them."""
        held = self._held
        return [held[part_id] for part_id in self.state.tools if part_id in held]

    def _show_due(self, out: list[TurnEvent]) -> None:
        """Show the calls that run, unless the store has to be read: it may have earlier ones.

        Before a call runs it may ask for a permission, and a client would show the call in place of
        the request. OpenCode reports it as running a moment before it asks, or a moment after.
        """
        for tool in self._in_order():
            shown = tool.part_id in self._emitted.tools
            works = tool.title or tool.output or tool.metadata
            runs = tool.complete or (works and self._is_starting(tool))
            if shown or (runs and not self.state.needs_reconcile):
                self._show(tool, out)

    def _is_starting(self, tool: ToolChanged) -> bool:
        return tool.status == "running" and not self.state.requests.blocks(tool.call_id)

    def _show(self, tool: ToolChanged, out: list[TurnEvent]) -> None:
        del self._held[tool.part_id]
        self._add(tool, out)


def merged(events: list[TurnEvent]) -> list[TurnEvent]:
    """Join consecutive text of one part, and drop tool states that are replaced at once."""
    if len(events) < 2:
        return events
    out: list[TurnEvent] = []
    texts: list[str] = []
    ends_at = ""
    for event in events:
        last = out[-1] if out else None
        match last, event:
            case Grew(), Grew():
                if last.part_id == event.part_id:
                    texts.append(event.text)
                    ends_at = event.ends_at
                    continue
            case ToolChanged(), ToolChanged():
                if (last.part_id, last.status) == (event.part_id, event.status):
                    out[-1] = event
                    continue
            case _:
                pass
        _append_texts(out, texts, ends_at)
        out.append(event)
    _append_texts(out, texts, ends_at)
    return out


def _append_texts(out: list[TurnEvent], texts: list[str], ends_at: str) -> None:
    """Append the texts to that of the last event, which then ends at another place."""
    if not texts:
        return
    match out[-1]:
        case Grew() as last:
            joined = last.text + "".join(texts)
            out[-1] = type(last)(last.message_id, last.part_id, joined, last.opens, ends_at)
        case _:
            pass
    texts.clear()
