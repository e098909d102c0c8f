"""The law of the reader: what was emitted is what OpenCode has stored, whatever broke between."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from opencode_a2a.events import (
    Channel,
    ChannelClosed,
    ChannelReplaced,
    Emitted,
    Failure,
    Finished,
    Grew,
    Interrupted,
    JsonObject,
    Outcome,
    Progressed,
    ReasoningGrew,
    Resumed,
    TextGrew,
    ToolChanged,
    TurnEvent,
    UsageCounted,
)
from opencode_a2a.opencode.events import (
    PartDelta,
    PartUpdated,
    PermissionAsked,
    SessionStatusChanged,
)
from opencode_a2a.opencode.heard import HeardTexts
from opencode_a2a.opencode.reader import TurnReader, merged
from opencode_a2a.opencode.translate import ABORTED, STOPPED_UNHEARD, tool_changed
from opencode_a2a.opencode.turn_state import Snapshot
from opencode_a2a.opencode.types import AssistantMessage, ToolCompleted, ToolFailed, ToolPart
from tests.support.opencode_state import NAMES, OLDER, Recording, recording, recordings

# By name and number, since a failing example is printed.
TURNS = {
    f"{name} {number}": turn
    for name in NAMES
    for number, turn in enumerate([r for r in recordings() if r.name == name], 1)
}
Move = tuple[str, int]
MOVES = st.lists(
    st.one_of(
        st.tuples(st.just("play"), st.integers(1, 12)),
        st.tuples(st.just("repeat"), st.integers(1, 12)),
        st.tuples(st.just("lose"), st.integers(0, 12)),
        st.tuples(st.just("start"), st.just(0)),
        st.tuples(st.just("snapshot"), st.integers(-6, 12)),
        st.tuples(st.just("restart"), st.integers(0, 6)),
        st.tuples(st.just("listen"), st.just(0)),
        st.tuples(st.just("take over"), st.integers(0, 6)),
        st.tuples(st.just("take over late"), st.integers(0, 6)),
    ),
    max_size=12,
)


@dataclass
class Play:
    """Drives a reader through a recording, the way a turn and its accidents would."""

    recording: Recording
    emitted: list[TurnEvent] = field(default_factory=list[TurnEvent])
    at: int = 0
    since: int = 0
    """A snapshot is never older than the last loss, nor than the snapshot before."""
    lossless: bool = True
    loss: int = 0
    """Where the last loss ended. OpenCode sends events twice, but none from before a loss."""
    before_loss: int = 0
    """How much had been emitted at the last loss."""
    listening: int | None = None
    """Since when another replica has been listening. It loses nothing."""

    def __post_init__(self) -> None:
        self.reader = self._reader(None)

    def _reader(self, emitted: Emitted | None) -> TurnReader:
        return TurnReader(self.recording.root, self.recording.prompt, emitted)

    def move(self, move: Move) -> None:
        kind, count = move
        events = self.recording.events
        match kind:
            case "play":
                self.emitted += self.reader.feed(events[self.at : self.at + count])
                self.at = min(self.at + count, len(events))
            case "repeat":
                self.emitted += self.reader.feed(events[max(self.loss, self.at - count) : self.at])
            case "lose":
                self._lose(count)
                self.reader.state.require_reconcile()
            case "start":
                self.emitted += self.reader.show_starting()
            case "restart":
                self._lose(count)
                self.reader = self._reader(self._logged())
            case "listen":
                self.listening = self.at
            case "take over":
                # The owner was killed before it had stored the text that it emitted last.
                while count and self.emitted and isinstance(self.emitted[-1], Grew):
                    self.emitted.pop()
                    count -= 1
                self._take_over(self.at)
            case "take over late":
                # The owner had heard events that have not reached the other replica yet.
                self._take_over(max(self.loss, self.at - count))
            case _:
                self.since = min(max(self.at + count, self.since), len(events))
                self.emitted += self.reader.reconcile(self.recording.states[self.since])

    def _logged(self) -> Emitted:
        emitted = Emitted()
        for event in self.emitted:
            emitted.add(event)
        return emitted

    def _take_over(self, at: int) -> None:
        """Go on as a replica that has heard the events up to ``at``."""
        self._lose(0)
        heard = HeardTexts()
        for event in self.recording.events[at if self.listening is None else self.listening : at]:
            heard.hear(event)
        self.reader = self._reader(self._logged())
        self.loss = self.at = at
        self.emitted += self.reader.feed(heard.of(self.recording.root))

    def _lose(self, count: int) -> None:
        self.at = min(self.at + count, len(self.recording.events))
        self.since = max(self.since, self.at)
        self.loss = self.at
        self.lossless = False
        self.before_loss = len(self.emitted)

    def end(self) -> list[TurnEvent]:
        self.move(("play", len(self.recording.events)))
        self.emitted += self.reader.finish(self.recording.states[-1])
        return self.emitted


def text(emitted: Sequence[TurnEvent], channel: Channel) -> str:
    """Join what was emitted in a channel."""
    whole = ""
    for event in emitted:
        match event:
            case TextGrew() if channel is Channel.TEXT:
                whole += event.text
            case ReasoningGrew() if channel is Channel.REASONING:
                whole += event.text
            case ChannelReplaced() if event.channel is channel:
                whole = "".join(text for _, text in event.parts)
            case _:
                pass
    return whole


def assert_todos(emitted: Sequence[TurnEvent], stored: Recording) -> None:
    """Assert that no todo list came twice or late, and that the last one came."""
    done = [part.state for part in stored.tools().values() if part.tool == "todowrite"]
    written = [
        (state.metadata or {})["todos"] for state in done if isinstance(state, ToolCompleted)
    ]
    told = [event.todos for event in emitted if isinstance(event, Progressed)]
    told = [todos for todos in told if todos is not None]
    assert told == [todos for todos in written if todos in told]
    assert told[-1:] == written[-1:]


def assert_law(play: Play) -> None:
    emitted, stored = play.emitted, play.recording
    assert [e for e in emitted if isinstance(e, Finished)] == emitted[-1:]
    assert play.reader.feed(stored.events) == []
    if stored.deleted:
        return
    for channel in Channel:
        kept = text(emitted, channel)
        assert kept.startswith(stored.text(channel))
        # Text that is not stored may be lost with the events that were.
        assert stored.said(channel).startswith(kept)
        assert kept == stored.said(channel) or not play.lossless
        assert_channel_opens_once_and_closes(emitted, channel)
    # Older versions cut the spaces at the end of a text off when it is complete.
    if not stored.dead_parts() and not stored.name.startswith(OLDER):
        assert not [event for event in emitted if isinstance(event, ChannelReplaced)]
    assert_tools(emitted, stored)
    assert_todos(emitted, stored)
    assert_interrupts(play)
    assert_end(emitted, stored)


def assert_end(emitted: Sequence[TurnEvent], stored: Recording) -> None:
    infos = [message.info for message in stored.run()]
    last = infos[-1] if infos else None
    ends = [(e.message_id, e.finish) for e in emitted if isinstance(e, Finished)]
    assert ends == [(last and last.id, last.finish if isinstance(last, AssistantMessage) else None)]


def assert_channel_opens_once_and_closes(emitted: Sequence[TurnEvent], channel: Channel) -> None:
    grown = [event for event in emitted if isinstance(event, TextGrew | ReasoningGrew)]
    opens = [event.opens for event in grown if event.channel is channel]
    assert opens == [place == 0 for place in range(len(opens))]
    closed = [
        event for event in emitted if isinstance(event, ChannelClosed) and event.channel is channel
    ]
    assert len(closed) == bool(opens)


def assert_tools(emitted: Sequence[TurnEvent], stored: Recording) -> None:
    last = {event.part_id: event for event in emitted if isinstance(event, ToolChanged)}
    assert {key: seen(tool) for key, tool in last.items()} == {
        key: kept(part) for key, part in stored.tools().items()
    }
    changes = [event for event in emitted if isinstance(event, ToolChanged)]
    assert all(before != after for before, after in pairwise(changes))


def seen(tool: ToolChanged) -> tuple[object, ...]:
    output = tool.output if tool.status == "completed" else None
    return tool.tool, tool.call_id, tool.status, tool.input or {}, output, tool.error


def kept(part: ToolPart) -> tuple[object, ...]:
    output = part.state.output if isinstance(part.state, ToolCompleted) else None
    error = part.state.error if isinstance(part.state, ToolFailed) else None
    return part.tool, part.call_id, part.state.status, part.state.input, output, error


def assert_interrupts(play: Play) -> None:
    asked = [e.request_id for e in play.emitted if isinstance(e, Interrupted)]
    settled = [e.request_id for e in play.emitted if isinstance(e, Resumed)]
    assert len(set(asked)) == len(asked)
    assert sorted(settled) == sorted(asked)
    if play.lossless:
        assert sorted(asked) == sorted(play.recording.requests())
    # How a request was settled that was still pending after the last loss was heard.
    since = play.emitted[play.before_loss :]
    pending = [e.request_id for e in since if isinstance(e, Interrupted)]
    resolutions = {e.request_id: e.resolution for e in since if isinstance(e, Resumed)}
    recorded = play.recording.resolutions()
    assert {key: resolutions[key] for key in pending} == {key: recorded[key] for key in pending}


@settings(max_examples=400)
@given(st.sampled_from(list(TURNS)), MOVES)
@example("abort-during-tool 1", [("play", 3), ("snapshot", 12)])
@example(
    "compaction-auto 1",
    [("play", 27), ("lose", 12), ("play", 8), ("lose", 1), ("snapshot", 0)],
)
@example("plain-text 1", [("play", 14), ("repeat", 2)])
@example("permission-once 1", [("play", 16), ("snapshot", -2)])
@example(
    "permission-external-directory 1",
    [("play", 2), ("snapshot", 12), ("play", 1), ("snapshot", 12)],
)
@example(
    "permission-external-directory 1",
    [("lose", 2), ("snapshot", 12), ("play", 1), ("snapshot", 12)],
)
@example(
    "permission-two-parallel-always-first 1",
    [("play", 1), ("lose", 11), ("snapshot", 7), ("start", 0)],
)
@example(
    "error-context-length 1",
    [("play", 26), ("lose", 12), ("play", 1), ("repeat", 2), ("snapshot", 0)],
)
@example("todo 1", [("play", 2), ("lose", 12)])
@example("error-in-stream 1", [("play", 14), ("restart", 0), ("snapshot", 6)])
@example("error-in-stream 1", [("play", 16), ("restart", 6), ("play", 12), ("snapshot", 0)])
def test_what_was_emitted_is_what_is_stored_whatever_broke(turn: str, moves: list[Move]) -> None:
    play = Play(TURNS[turn])

    for move in moves:
        play.move(move)
    play.end()

    assert_law(play)


ACCIDENTS: list[list[Move]] = [
    [("lose", 3), ("snapshot", 0)],
    [("restart", 0), ("snapshot", 2)],
    [("snapshot", -3)],
    [("lose", 2), ("play", 3), ("snapshot", -1)],
    [("take over", 2), ("play", 1), ("snapshot", 1)],
    [("take over late", 2), ("snapshot", 0)],
]


@pytest.mark.parametrize("turn", TURNS)
def test_every_turn_obeys_the_law_wherever_it_breaks(turn: str) -> None:
    for at in range(len(TURNS[turn].events) + 1):
        # Each accident at every second place: all of them everywhere would take too long.
        for accident in ACCIDENTS[at % 2 :: 2]:
            play = Play(TURNS[turn])
            for move in [("play", at // 2), ("listen", 0), ("play", at - at // 2), *accident]:
                play.move(move)
            play.end()
            assert_law(play)


HEARD = [turn for turn, stored in TURNS.items() if not (turn.startswith(OLDER) or stored.deleted)]
"""The turns whose events have ids."""


@pytest.mark.parametrize("turn", HEARD)
def test_a_replica_that_was_listening_goes_on_with_the_text_at_once(turn: str) -> None:
    """Whether it was since before the part began, or since the last piece that was stored."""
    stored = TURNS[turn]
    pieces = [place for place, event in enumerate(stored.events) if isinstance(event, PartDelta)]
    for piece in pieces:
        for since, taking in (
            (0, ("take over", 0)),
            (0, ("take over", 1)),
            (0, ("take over late", 1)),
            (piece, ("take over", 0)),
            (piece, ("take over late", 1)),
        ):
            play, unbroken = Play(stored), Play(stored)
            play.move(("play", since))
            play.move(("listen", 0))
            play.move(("play", piece + 1 - since))

            play.move(taking)
            play.move(("snapshot", 0))
            play.move(("play", piece + 2 - play.at))
            unbroken.move(("play", play.at))

            for channel in Channel:
                assert text(play.emitted, channel) == text(unbroken.emitted, channel)
            play.end()
            assert_law(play)


@pytest.mark.parametrize("turn", TURNS)
def test_an_answer_never_shrinks_when_opencode_dies(turn: str) -> None:
    """What is stored then has the parts that were growing, without their text."""
    recording = TURNS[turn]
    if recording.deleted:
        return
    for at in range(len(recording.events) + 1):
        play = Play(recording)
        play.move(("play", at))
        before = {channel: text(play.emitted, channel) for channel in Channel}

        play.reader.state.require_reconcile()
        play.emitted += play.reader.finish(recording.states[at])

        for channel in Channel:
            assert text(play.emitted, channel).startswith(before[channel])


@pytest.mark.parametrize("turn", TURNS)
def test_an_unbroken_stream_tells_everything_before_the_end(turn: str) -> None:
    stored = TURNS[turn]
    play = Play(stored)

    for _ in stored.events:
        play.move(("play", 1))

    assert play.reader.state.needs_reconcile == stored.deleted
    if not stored.deleted:
        assert [text(play.emitted, channel) for channel in Channel] == [
            stored.said(channel) for channel in Channel
        ]


@pytest.mark.parametrize("turn", TURNS)
def test_a_batch_says_the_same_as_its_events_one_by_one(turn: str) -> None:
    batch, single = Play(TURNS[turn]), Play(TURNS[turn])

    batch.move(("play", len(TURNS[turn].events)))
    for _ in TURNS[turn].events:
        single.move(("play", 1))

    assert batch.emitted == merged(single.emitted)


ENDINGS = {
    "plain-text": (Outcome.COMPLETED, "stop", None),
    "compaction-auto": (Outcome.COMPLETED, "stop", None),
    "error-context-length": (Outcome.COMPLETED, "stop", None),
    "error-drop-mid-stream": (Outcome.COMPLETED, "stop", None),
    "finish-length": (Outcome.COMPLETED, "length", None),
    "shell": (Outcome.COMPLETED, None, None),
    "structured-output": (Outcome.COMPLETED, "tool-calls", None),
    "concurrent-prompt-during-tools": (Outcome.COMPLETED, "tool-calls", None),
    "permission-reject-message": (Outcome.COMPLETED, "stop", None),
    "permission-reject": (Outcome.REJECTED, "tool-calls", "UPSTREAM_REQUEST_REJECTED"),
    "question-rejected": (Outcome.REJECTED, "tool-calls", "UPSTREAM_REQUEST_REJECTED"),
    "error-401": (Outcome.AUTH_REQUIRED, None, "UPSTREAM_UNAUTHORIZED"),
    "error-400": (Outcome.FAILED, None, "UPSTREAM_BAD_REQUEST"),
    "error-404-model": (Outcome.FAILED, None, "UPSTREAM_RESOURCE_NOT_FOUND"),
    "error-500-exhausted": (Outcome.FAILED, None, "UPSTREAM_SERVER_ERROR"),
    "error-malformed-chunk": (Outcome.FAILED, None, "UPSTREAM_EXECUTION_ERROR"),
    "async-unknown-agent": (Outcome.FAILED, None, "UPSTREAM_EXECUTION_ERROR"),
    "async-unknown-model": (Outcome.FAILED, None, "UPSTREAM_EXECUTION_ERROR"),
    "delete-while-busy": (Outcome.FAILED, None, "UPSTREAM_EXECUTION_ERROR"),
    "finish-content-filter": (Outcome.FAILED, "content-filter", "UPSTREAM_CONTENT_FILTERED"),
    "structured-output-missing": (Outcome.FAILED, "stop", "UPSTREAM_STRUCTURED_OUTPUT"),
    "abort-mid-stream": (Outcome.FAILED, None, "UPSTREAM_ABORTED"),
    "abort-during-retry": (Outcome.FAILED, None, "UPSTREAM_ABORTED"),
    "doom-loop": (Outcome.FAILED, None, "UPSTREAM_INTERRUPTED"),
    "finish-missing-loop": (Outcome.FAILED, "unknown", "UPSTREAM_INTERRUPTED"),
    "prompt-async-three": (Outcome.FAILED, None, "UPSTREAM_INTERRUPTED"),
}


@pytest.mark.parametrize("name", ENDINGS)
def test_a_turn_ends_as_its_stored_messages_say(name: str) -> None:
    end = Play(recording(name)).end()[-1]

    assert isinstance(end, Finished)
    assert (end.outcome, end.finish, end.failure and end.failure.type) == ENDINGS[name]


@pytest.mark.parametrize("name", NAMES)
def test_no_failure_tells_a_path_an_address_or_a_second_line(name: str) -> None:
    for event in Play(recording(name)).end():
        match event:
            case (
                Finished(failure=Failure(message=words))
                | Progressed(type="retry", title=str(words))
            ):
                secrets = ("\n", "bunfs", "://", "127.0.0.1", "/workspace", "insert into")
                assert not [secret for secret in secrets if secret in words]
            case _:
                pass


def test_a_canceled_turn_keeps_its_partial_text() -> None:
    play = Play(recording("abort-mid-stream"))
    play.move(("play", 100))

    emitted = play.emitted + play.reader.finish(play.recording.states[-1], aborted=True)

    assert text(emitted, Channel.TEXT) == "slow " * 6
    assert isinstance(emitted[-1], Finished)
    assert emitted[-1].outcome is Outcome.CANCELED


@pytest.mark.parametrize("heard", [False, True])
def test_a_turn_that_was_stopped_while_nobody_listened_does_not_blame_somebody(heard: bool) -> None:
    """A start of the service that ends the OpenCode of an earlier run leaves the same behind."""
    play = Play(recording("abort-mid-stream"))
    play.move(("play", play.recording.first(PartDelta) + 2))
    play.move(("restart", 0 if heard else len(play.recording.events)))
    play.move(("snapshot", 0))

    end = play.end()[-1]

    assert isinstance(end, Finished)
    assert end.failure is (ABORTED if heard else STOPPED_UNHEARD)


def test_a_turn_that_is_given_up_says_why() -> None:
    play = Play(recording("finish-missing-loop"))
    play.move(("play", 15))
    why = Failure("UPSTREAM_LOOP", "The model was asked too often")

    emitted = play.reader.finish(None, failure=why)

    assert emitted[-1:] == [
        Finished(Outcome.FAILED, play.recording.run()[0].info.id, "unknown", None, why)
    ]


@pytest.mark.parametrize("restarted", [False, True])
def test_a_command_that_was_run_in_the_session_before_the_end_is_read_breaks_no_turn(
    restarted: bool,
) -> None:
    turn, command = recording("plain-text"), recording("shell")
    play = Play(turn)
    play.move(("play", len(turn.events)))
    if restarted:
        play.move(("restart", 0))

    stored = [*turn.states[-1].messages, *command.states[-1].messages]
    end = play.reader.finish(Snapshot(messages=stored))[-1]

    assert isinstance(end, Finished)
    assert (end.outcome, end.failure) == (Outcome.COMPLETED, None)


@pytest.mark.parametrize("begun", [False, True])
def test_an_answer_after_a_tool_call_that_was_broken_off_is_not_completed(begun: bool) -> None:
    """OpenCode was ended before, or while, the model began to answer."""
    play = Play(recording("tool-completed"))
    [*before, last] = play.recording.states[-1].messages
    assert isinstance(last.info, AssistantMessage)
    info = last.info.model_copy(update={"finish": None})
    parts = [part for part in last.parts if begun and part.type == "step-start"]
    broken = last.model_copy(update={"info": info, "parts": parts})

    end = play.reader.finish(Snapshot(messages=[*before, broken]))[-1]

    assert isinstance(end, Finished)
    assert (end.outcome, end.failure and end.failure.type) == (
        Outcome.FAILED,
        "UPSTREAM_INTERRUPTED",
    )


def test_structured_output_comes_with_the_end() -> None:
    end = Play(recording("structured-output")).end()[-1]

    assert isinstance(end, Finished)
    assert end.structured == {"n": 5, "s": "x"}


def test_text_of_a_failed_attempt_is_replaced_when_the_next_attempt_begins() -> None:
    play = Play(recording("error-drop-mid-stream"))
    play.move(("play", retry_of(play.recording) + 1))
    assert text(play.emitted, Channel.TEXT) == "partial words here "

    play.end()

    story = [e for e in play.emitted if isinstance(e, TextGrew | ChannelReplaced)]
    replaced = [place for place, event in enumerate(story) if isinstance(event, ChannelReplaced)]
    assert replaced == [1]
    assert [e.parts for e in story if isinstance(e, ChannelReplaced)] == [[]]
    assert [e.text for e in story if isinstance(e, TextGrew)] == [
        "partial words here ",
        "partial words here and the rest",
    ]


def test_text_of_a_part_that_was_open_in_a_gap_waits_for_its_end() -> None:
    play = Play(recording("plain-text"))
    first = play.recording.first(PartDelta)
    play.move(("play", first + 1))
    play.move(("lose", 1))
    play.move(("snapshot", 0))

    play.move(("play", 1))
    before = text(play.emitted, Channel.TEXT)
    play.move(("play", 2))

    assert before == "one "
    assert [e.text for e in play.emitted if isinstance(e, TextGrew)] == ["one ", "two three four"]


def test_a_part_that_begins_after_a_gap_is_emitted_as_it_grows() -> None:
    play = Play(recording("plain-text"))
    first = play.recording.first(PartDelta)
    play.move(("play", first - 3))
    play.move(("lose", 1))
    play.move(("snapshot", 0))

    play.move(("play", 3))

    assert text(play.emitted, Channel.TEXT) == "one "


def test_a_part_that_begins_before_an_older_snapshot_comes_is_emitted_as_it_grows() -> None:
    play = Play(recording("plain-text"))
    first = play.recording.first(PartDelta)
    play.move(("play", first - 3))
    play.move(("lose", 1))
    play.move(("play", 3))

    play.move(("snapshot", -3))
    play.move(("play", 1))

    assert text(play.emitted, Channel.TEXT) == "one two "


def test_a_part_that_was_missed_is_emitted_before_the_next_one() -> None:
    play = Play(recording("error-drop-after-tool-call"))
    places = [i for i, event in enumerate(play.recording.events) if isinstance(event, PartDelta)]
    play.move(("play", places[0]))
    play.move(("lose", places[-1] - 3 - play.at))
    play.move(("play", 4))

    play.move(("snapshot", 0))

    assert text(play.emitted, Channel.TEXT) == "going \n\ndone"


def retry_of(stored: Recording) -> int:
    """Return the place of the first event that announces a retry."""
    return next(
        place
        for place, event in enumerate(stored.events)
        if isinstance(event, SessionStatusChanged) and event.status.type == "retry"
    )


@pytest.mark.parametrize("restarted", [False, True])
@pytest.mark.parametrize("completed", [False, True])
def test_text_of_the_last_attempt_stays_when_opencode_ends_without_another(
    completed: bool, restarted: bool
) -> None:
    """OpenCode has given up, or was ended while it waited for the next attempt."""
    play = Play(recording("error-drop-mid-stream"))
    play.move(("play", retry_of(play.recording) + 1))
    [*before, last] = play.recording.states[play.at].messages
    time = last.info.time.model_copy(update={"completed": 1 if completed else None})
    left = last.model_copy(update={"info": last.info.model_copy(update={"time": time})})
    stored = Snapshot(messages=[*before, left])
    if restarted:
        play.move(("restart", 0))

    emitted = play.emitted + play.reader.reconcile(stored) + play.reader.finish(stored)

    assert text(emitted, Channel.TEXT) == "partial words here "
    assert not [event for event in emitted if isinstance(event, ChannelReplaced)]
    assert isinstance(emitted[-1], Finished)
    assert emitted[-1].outcome is Outcome.FAILED


def test_text_that_comes_after_the_store_has_completed_its_message_is_emitted() -> None:
    play = Play(recording("error-drop-mid-stream"))
    deltas = [i for i, event in enumerate(play.recording.events) if isinstance(event, PartDelta)]
    play.move(("play", deltas[1]))
    [*before, last] = play.recording.states[play.at].messages
    time = last.info.time.model_copy(update={"completed": 1})
    ended = last.model_copy(update={"info": last.info.model_copy(update={"time": time})})
    play.emitted += play.reader.reconcile(Snapshot(messages=[*before, ended]))

    play.move(("play", 1))

    late = play.recording.events[deltas[1]]
    assert isinstance(late, PartDelta)
    assert text(play.emitted, Channel.TEXT).endswith(late.delta)


def test_a_retry_that_was_missed_is_found_in_the_store() -> None:
    play = Play(recording("error-drop-mid-stream"))
    play.move(("play", retry_of(play.recording)))
    play.move(("lose", 3))

    play.move(("snapshot", 0))
    replaced = [event for event in play.emitted if isinstance(event, ChannelReplaced)]
    play.move(("play", 2))

    assert [event.parts for event in replaced] == [[]]
    assert text(play.emitted, Channel.TEXT) == "partial "


@pytest.mark.parametrize("back", range(1, 8))
def test_an_older_snapshot_does_not_undo_the_end(back: int) -> None:
    play = Play(recording("plain-text"))
    play.move(("play", len(play.recording.events)))
    before = list(play.emitted)

    play.move(("snapshot", -back))

    assert play.emitted == before
    assert play.reader.state.complete


def test_two_prompts_in_one_session_get_their_own_answers() -> None:
    emitted = [
        text(Play(stored).end(), Channel.TEXT)
        for stored in recordings()
        if stored.name == "concurrent-two-prompts"
    ]

    assert emitted == ["AAA " * 20, "BBB done"]


def test_a_compaction_is_progress_and_its_summary_no_answer() -> None:
    emitted = Play(recording("compaction-auto")).end()

    compactions = [
        e.status for e in emitted if isinstance(e, Progressed) and e.type == "compaction"
    ]
    assert compactions == ["running", "completed"]
    assert "Objective" not in text(emitted, Channel.TEXT)


def test_a_sub_agents_interrupt_belongs_to_the_turn() -> None:
    emitted = Play(recording("subagent-permission")).end()

    asked = [event for event in emitted if isinstance(event, Interrupted)]
    assert [(e.permission, e.patterns, e.directory) for e in asked] == [
        ("bash", ["whoami"], "/workspace")
    ]
    assert [e.resolution for e in emitted if isinstance(e, Resumed)] == ["once"]
    subagents = [e for e in emitted if isinstance(e, Progressed) and e.type == "subagent"]
    assert [(e.status, e.title) for e in subagents] == [
        ("running", "do sub"),
        ("completed", "do sub"),
    ]


def test_usage_is_summed_over_steps_and_sub_agents_apart() -> None:
    emitted = Play(recording("subagent")).end()

    counted = [event for event in emitted if isinstance(event, UsageCounted)]
    assert [(c.own.total, c.children and c.children.total) for c in counted] == [(240, 240)]


def test_an_interrupt_that_vanished_is_void() -> None:
    stored = recording("permission-once")
    play = Play(stored)
    asked = 1 + stored.first(PermissionAsked)
    play.move(("play", asked))

    play.reader.state.require_reconcile()
    emitted = play.reader.reconcile(stored.states[asked + 2])

    assert [e.resolution for e in emitted if isinstance(e, Resumed)] == ["void"]
    assert play.reader.state.requests.pending == {}


def test_an_interrupt_names_the_input_of_its_tool_when_it_is_known() -> None:
    stored = recording("mcp-tool-permission")
    play = Play(stored)
    asked = 1 + stored.first(PermissionAsked)
    play.move(("lose", asked))

    emitted = play.reader.reconcile(stored.states[asked + 1])

    assert [(e.tool, e.tool_input) for e in emitted if isinstance(e, Interrupted)] == [
        ("bridge_a2a_call", {"agent": "planner", "message": "hello"})
    ]


def test_a_retry_is_announced_with_its_time() -> None:
    play = Play(recording("abort-during-retry"))
    while play.reader.state.tree.retry is None:
        play.move(("play", 1))

    assert (play.reader.state.tree.retry.attempt, play.reader.state.tree.retry.message) == (
        1,
        "fake http 429",
    )
    assert play.reader.state.tree.retry.next == 1794725426894
    play.end()
    assert play.reader.state.tree.retry is None


def test_the_turn_is_complete_only_when_the_message_is_and_the_session_idle() -> None:
    play = Play(recording("error-401"))
    story: list[tuple[bool, bool]] = []

    for _ in play.recording.events:
        play.move(("play", 1))
        state = (play.reader.state.tree.idle, play.reader.state.complete)
        story += [] if story[-1:] == [state] else [state]

    assert story == [(False, False), (True, False), (True, True)]


def test_growth_of_one_part_in_a_batch_is_one_event() -> None:
    play = Play(recording("command"))

    play.move(("play", 1000))

    assert len([event for event in play.emitted if isinstance(event, TextGrew)]) == 1


def test_metadata_of_a_tool_that_is_too_large_is_left_out_and_named() -> None:
    part = next(
        event.part
        for event in recording("write-edit").events
        if isinstance(event, PartUpdated) and isinstance(event.part, ToolPart)
        if isinstance(event.part.state, ToolCompleted) and event.part.tool == "edit"
    )
    large: JsonObject = {**(part.state.metadata or {}), "diff": "+" * 300_000, "count": 2**70}
    state = part.state.model_copy(update={"metadata": large})

    tool = tool_changed(part.model_copy(update={"state": state}))

    assert tool.metadata is not None
    assert tool.metadata["omitted"] == ["diff", "count"]
    assert set(tool.metadata) & {"diff", "count", "filediff"} == {"filediff"}
