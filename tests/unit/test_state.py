"""A task is the fold of its log."""

from dataclasses import replace
from typing import get_args

import orjson
import pytest
from hypothesis import Phase, example, find, given, settings
from hypothesis import strategies as st

from opencode_a2a.a2a import render
from opencode_a2a.events import (
    ArtifactChanged,
    Channel,
    ChannelClosed,
    ChannelReplaced,
    DiffChanged,
    Failure,
    FileChange,
    Finished,
    Grew,
    Interrupted,
    Json,
    Outcome,
    Progressed,
    Question,
    QuestionOption,
    ResultGiven,
    Resumed,
    Started,
    TextGrew,
    ToolChanged,
    TurnEvent,
    Usage,
    UsageCounted,
)
from opencode_a2a.ids import ContextId, MessageId, ModelRef, Principal, RequestId, SessionId, TaskId
from opencode_a2a.log.log import resumable
from opencode_a2a.log.state import (
    STATUS_EVENTS,
    Cursor,
    Entry,
    LogEvent,
    Recovered,
    State,
    Status,
    TaskRef,
    TaskState,
    TerminalError,
    Unknown,
    dump_archive,
    dump_entries,
    load_entries,
    load_request,
    load_state,
    load_status,
)
from opencode_a2a.log.stored import load_task
from opencode_a2a.messages import Added, Answered, Message, Part, PromptPart, Routing, TurnRequest
from opencode_a2a.rights import Rights
from opencode_a2a.store.tasks import TaskRow
from opencode_a2a.turns.answers import Answer, PermissionReply
from tests.support.events import ANY_EVENT, FINISHED, UNFINISHED

REF = TaskRef(TaskId("t"), ContextId("c"), Principal("p"), created_at=1)


def asked(request_id: str) -> Interrupted:
    return Interrupted(RequestId(request_id), "permission", SessionId("ses_1"))


def test_a_task_waits_until_the_last_prompt_is_settled() -> None:
    state = TaskState(REF)
    states = [
        state.apply(event, at).status
        for at, event in enumerate(
            [
                Started(),
                asked("per_1"),
                asked("per_2"),
                Resumed(RequestId("per_1"), "permission", "once"),
                Resumed(RequestId("per_2"), "permission", "rejected"),
            ]
        )
    ]

    assert [status.state for status in states if status] == [
        State.WORKING,
        State.INPUT_REQUIRED,
        State.INPUT_REQUIRED,
        State.INPUT_REQUIRED,
        State.WORKING,
    ]
    assert state.status.pending == ()
    assert list(state.settled) == ["per_1", "per_2"]


@pytest.mark.requirement("I2")
@given(st.lists(UNFINISHED, max_size=5), FINISHED, ANY_EVENT)
def test_nothing_follows_a_terminal_state(
    events: list[TurnEvent], end: Finished, late: LogEvent
) -> None:
    state = TaskState(REF)
    for event in [*events, end]:
        state.apply(event, 2)
    status, seq = state.status, state.seq

    with pytest.raises(TerminalError):
        state.apply(late, 3)

    assert (state.status, state.seq) == (status, seq)


@pytest.mark.requirement("I4")
@given(st.lists(UNFINISHED, max_size=8))
def test_numbers_have_no_gap_and_every_change_of_state_has_its_time(
    events: list[TurnEvent],
) -> None:
    state = TaskState(REF)
    entries = [state.apply(event, at) for at, event in enumerate(events, 10)]

    assert [entry.seq for entry in entries] == list(range(1, len(events) + 1))
    before = State.SUBMITTED
    for entry in entries:
        if entry.status and entry.status.state is not before:
            assert entry.status.at == entry.at
            before = entry.status.state


TRY_AGAIN = Answered(Message("m", "user", [Part("text", text="again")]))


MODES = (None, ("text/plain",), ("application/json",), ("text/plain", "text/x-diff"))


@given(st.lists(ANY_EVENT, max_size=12), st.sampled_from(MODES))
@example([Started(), Finished(Outcome.AUTH_REQUIRED), TRY_AGAIN], None)
@example([Started(), Recovered("restart")], None)
def test_what_readers_are_shown_and_what_the_status_says_agree(
    events: list[LogEvent], modes: tuple[str, ...] | None
) -> None:
    state = TaskState(replace(REF, output_modes=modes))
    for event in events:
        if isinstance(event, ChannelClosed) and event.channel not in state.channels:
            continue
        if state.status.state.terminal:
            break
        before = state.status
        entry = state.apply(event, 5)

        visible = state.ref.visible(event)
        assert visible is (render.update(entry, state.ref) is not None)
        if type(event) in STATUS_EVENTS:
            assert entry.status is state.status
            moved = state.status.state is not before.state
            assert entry.changes_state is (moved or isinstance(event, Interrupted))
        elif isinstance(event, Grew | ChannelReplaced | ChannelClosed | ArtifactChanged):
            assert (entry.status, entry.changes_state) == (None, False)
            assert state.status is before
        else:
            assert not entry.changes_state
            assert entry.status is (None if state.status is before else state.status)
            if state.status.state is not before.state:
                assert before.state is State.AUTH_REQUIRED


def test_a_channel_that_opens_again_begins_anew() -> None:
    state = TaskState(REF)
    for text, opens in (("first", True), (" more", False), ("second", True)):
        state.apply(TextGrew(MessageId("m"), "p", text, opens), 1)

    assert state.channels[Channel.TEXT].text == "second"


@given(st.lists(ANY_EVENT, min_size=1, max_size=5))
def test_what_is_stored_is_read_back_equal(events: list[LogEvent]) -> None:
    entries = [Entry(seq, seq * 7, event) for seq, event in enumerate(events, 1)]

    assert load_entries(dump_entries(entries)) == [(e.at, e.event) for e in entries]


@pytest.mark.parametrize("kind", [kind for kind in get_args(LogEvent) if kind is not Unknown])
def test_every_kind_of_event_can_be_read_back(kind: type[LogEvent]) -> None:
    any_will_do = settings(phases=[Phase.generate], max_examples=2000)
    event = find(ANY_EVENT, lambda one: type(one) is kind, settings=any_will_do)

    assert load_entries(dump_entries([Entry(1, 7, event)])) == [(7, event)]


@given(st.lists(UNFINISHED, max_size=8), FINISHED)
def test_an_archived_task_is_the_task(events: list[TurnEvent], end: Finished) -> None:
    state = TaskState(REF)
    for event in [*events, end]:
        state.apply(event, 5)
    status = orjson.dumps(state.status)
    row = TaskRow("t", "p", "c", state.status.state, 1, 5, status, archive=dump_archive(state))

    loaded = load_task(row)

    assert load_status(status) == state.status == loaded.status
    assert {k: v.text for k, v in loaded.channels.items()} == {
        k: v.text for k, v in state.channels.items()
    }
    assert loaded.settled == state.settled
    assert [*loaded.artifacts.items()] == [*state.artifacts.items()]
    assert loaded.seq == state.seq
    assert loaded.ref == replace(REF, created_at=1)


def test_an_archive_of_an_earlier_version_is_read() -> None:
    tool = ToolChanged(MessageId("m"), "p1", "c1", "bash", "completed")
    diff, result = DiffChanged([FileChange("a", "added")], "+a"), ResultGiven({"x": 1})
    state = TaskState(REF)
    state.apply(Finished(Outcome.COMPLETED), 5)
    archive = orjson.loads(dump_archive(state)) | {
        "artifacts": ["tool:p1", "diff", "text", "result"],
        "tools": [tool],
        "diff": diff,
        "result": result,
    }

    loaded = load_state(REF, orjson.dumps(state.status), orjson.dumps(archive))

    assert loaded.artifacts == {"tool:p1": tool, "diff": diff, "result": result}


MESSAGE = Message("m", "user", [Part("text", text="go on")])
REQUEST = TurnRequest(
    (PromptPart("hello"),),
    MessageId("msg_1"),
    Routing(model=ModelRef("p", "m"), rights=Rights("ask"), plan=True),
    rights=Rights("deny", waits=False),
)


def test_a_request_that_is_asked_anew_takes_the_place_of_the_one_before() -> None:
    state = TaskState(REF)
    first, second = asked("per_1"), asked("per_2")
    changed = replace(first, links={"a": "/etc/b"})
    for event in (first, second, changed):
        entry = state.apply(event, 1)

    assert state.status.pending == (changed, second)
    assert entry.stops


QUESTION = Interrupted(
    RequestId("que_1"),
    "question",
    SessionId("ses_1"),
    questions=[Question("Which?", options=[QuestionOption("this")])],
)
STATUS = Status(
    State.INPUT_REQUIRED,
    7,
    pending=(QUESTION,),
    failure=Failure("X", "failed"),
    usage=UsageCounted(Usage(input=1), Usage(output=2)),
    queued=Progressed("queue", "waiting"),
)


def of_a_later_version(value: object) -> bytes:
    """Return a value as it is stored by a version in which each class has one more field."""

    def extend(value: Json) -> Json:
        match value:
            case {**fields} if fields:  # an empty one is free-form JSON
                extended: dict[str, Json] = {name: extend(one) for name, one in fields.items()}
                return extended | {"later": 1}
            case list():
                return [extend(one) for one in value]
            case _:
                return value

    return orjson.dumps(extend(orjson.loads(orjson.dumps(value))))


def test_a_request_and_a_status_of_a_later_version_are_read() -> None:
    assert load_request(of_a_later_version(REQUEST)) == REQUEST
    assert load_status(of_a_later_version(STATUS)) == STATUS


def test_an_interrupt_and_its_answer_of_a_later_version_are_read() -> None:
    answer = Answer(PermissionReply("once", scope="task"), "p", MESSAGE)

    assert Interrupted.load(orjson.loads(of_a_later_version(QUESTION))) == QUESTION
    assert Answer.load(of_a_later_version(orjson.loads(answer.dump()))) == answer


@pytest.mark.parametrize(
    "event",
    [
        Added(MESSAGE, REQUEST),
        QUESTION,
        STATUS.usage,
        DiffChanged([FileChange("a", "added")], "+a"),
        Finished(Outcome.FAILED, failure=STATUS.failure),
    ],
    ids=lambda event: type(event).__name__,
)
def test_an_event_of_a_later_version_is_read_with_the_values_in_it(event: LogEvent) -> None:
    stored = of_a_later_version(orjson.loads(dump_entries([Entry(1, 7, event)])))

    assert load_entries(stored) == [(7, event)]


def test_an_archive_of_a_later_version_is_read() -> None:
    state = TaskState(REF)
    for event in (Answered(MESSAGE), Resumed(RequestId("per_1"), "permission", "once")):
        state.apply(event, 5)
    archive = orjson.loads(dump_archive(state))
    for name in ("history", "settled"):
        archive[name] = orjson.loads(of_a_later_version(archive[name]))

    loaded = load_state(REF, of_a_later_version(STATUS), orjson.dumps(archive))

    assert (loaded.history, loaded.settled) == (state.history, state.settled)


@pytest.mark.parametrize(
    ("cursor", "exact"),
    [
        (Cursor(2), True),
        (Cursor(3), False),  # the third entry of the first life is lost
        (Cursor(9), False),
        (Cursor(3, 1), True),
        (Cursor(4, 1), True),
        (Cursor(5, 1), False),  # not told yet
        (Cursor(2, 2), False),
    ],
)
def test_a_cursor_from_before_a_restart_is_exact_only_for_what_was_stored(
    cursor: Cursor, exact: bool
) -> None:
    state = TaskState(REF)
    grew = TextGrew(MessageId("m"), "p", "x")
    for event in (Started(), grew, Recovered("restart"), grew):
        state.apply(event, 1)

    assert resumable(state, cursor) is exact


@given(st.integers(0, 10**15 - 1), st.integers(0, 10**9 - 1))
def test_a_cursor_survives_the_wire(seq: int, epoch: int) -> None:
    assert Cursor.parse(str(Cursor(seq, epoch))) == Cursor(seq, epoch)


@pytest.mark.parametrize("text", ["", "x", "-1", "1.x", "٣", "1" * 16, "1.2.3"])
def test_what_is_no_cursor_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="not a cursor"):
        Cursor.parse(text)


def test_outcomes_and_states_have_the_same_names() -> None:
    assert {outcome.value for outcome in Outcome} <= {state.value for state in State}
