"""Tasks and entries on the wire, read back by the SDK's own types of each line."""

import base64
from dataclasses import replace
from typing import cast

import orjson
import pytest
from a2a.compat.v0_3 import a2a_v0_3_pb2, conversions, proto_utils
from a2a.compat.v0_3 import types as v03
from a2a.types import StreamResponse, Task
from google.protobuf.json_format import ParseDict
from google.protobuf.message import Message as ProtoMessage
from hypothesis import given
from hypothesis import strategies as st

from opencode_a2a.a2a import render
from opencode_a2a.a2a.encoding import V03, V03_PROTO, V1, Encoding
from opencode_a2a.events import (
    Channel,
    ChannelClosed,
    ChannelReplaced,
    DiffChanged,
    Failure,
    FailureType,
    FileChange,
    Finished,
    Interrupted,
    Json,
    JsonObject,
    Outcome,
    Progressed,
    Question,
    QuestionOption,
    ReasoningGrew,
    ResultGiven,
    Resumed,
    SessionBound,
    Started,
    TextGrew,
    ToolChanged,
    Usage,
    UsageCounted,
)
from opencode_a2a.ids import ContextId, MessageId, Principal, RequestId, SessionId, TaskId
from opencode_a2a.log.state import (
    Accepted,
    Entry,
    LogEvent,
    Recovered,
    TaskRef,
    TaskState,
)
from opencode_a2a.messages import Added, Answered, Message, Part, TurnRequest
from opencode_a2a.opencode.reader import TurnReader
from tests.support.opencode_state import recording, recordings

FORMS = (V1, V03, V03_PROTO)
AT = 1_794_733_200_123
TIME = "2026-11-15T09:00:00.123Z"
MSG = MessageId("msg_1")
REF = TaskRef(TaskId("t1"), ContextId("c1"), Principal("p"), created_at=AT)
ASKED = Interrupted(
    RequestId("per_1"),
    "permission",
    SessionId("ses_1"),
    permission="bash",
    patterns=["rm -rf x"],
    always=["rm *"],
    metadata={"command": "rm -rf x"},
    call_id="call_1",
    tool="bash",
    tool_input={"command": "rm -rf x"},
    asked_at=AT,
    expires_at=AT + 600_000,
    default="reject",
    number=1,
)
QUESTION = Interrupted(
    RequestId("que_1"),
    "question",
    SessionId("ses_1"),
    questions=[Question("Which?", "Color", [QuestionOption("Red", "r")], multiple=True)],
)
USER = Message(
    "m1",
    "user",
    [
        Part("text", "do it"),
        Part("raw", raw="QUJD", media_type="image/png", filename="a.png"),
        Part("url", url="https://x/y"),
        Part("data", data=[2**53 + 1], metadata={"a": 1}),
    ],
    metadata={"n": 5},
    extensions=["urn:x"],
    reference_task_ids=["t0"],
)
TOOL = ToolChanged(
    MSG, "prt_2", "call_1", "bash", "completed", "Remove x", {"command": "rm"}, "done"
)
DIFF = DiffChanged([FileChange("a.py", "modified", 2, 1)], "--- a.py\n+++ a.py\n")
USAGE = UsageCounted(Usage(90, 15, 5, 10, 0, 0.5), Usage(1, 2))
TURN: tuple[LogEvent, ...] = (
    Accepted(USER),
    SessionBound(SessionId("ses_1"), title="Fix"),
    Started(),
    ReasoningGrew(MSG, "prt_0", "hm", opens=True),
    ChannelClosed(Channel.REASONING, MSG),
    TextGrew(MSG, "prt_1", 'I "will"\n', opens=True),
    ToolChanged(MSG, "prt_2", "call_1", "bash", "running", input={"command": "rm"}),
    Progressed("step-start", "running", part_id="prt_9", todos=[{"content": "x"}]),
    ASKED,
    QUESTION,
    Answered(Message("m2", "user", [Part("text", "once")])),
    Resumed(RequestId("per_1"), "permission", "once", by="p"),
    Resumed(RequestId("que_1"), "question", "replied"),
    Recovered("restart"),
    TOOL,
    TextGrew(MSG, "prt_3", "Done."),
    ChannelReplaced(Channel.TEXT, MSG, [("prt_1", "I will.\n"), ("prt_3", "Done.")]),
    ChannelClosed(Channel.TEXT, MSG),
    DIFF,
    USAGE,
    Finished(Outcome.COMPLETED, MSG, "stop"),
)
ENDINGS = (
    Finished(Outcome.COMPLETED, MSG, "stop", structured={"a": 1}),
    Finished(Outcome.FAILED, failure=Failure("UPSTREAM_QUOTA_EXCEEDED", "Wait.", 429)),
    Finished(Outcome.CANCELED),
    Finished(Outcome.REJECTED, failure=Failure("PERMISSION_REJECTED", "No.")),
    Finished(Outcome.AUTH_REQUIRED, failure=Failure("UPSTREAM_UNAUTHORIZED", "Sign in.", 401)),
)


def run(*events: LogEvent, ref: TaskRef = REF) -> tuple[TaskState, list[Entry]]:
    state = TaskState(ref)
    return state, [state.apply(event, AT) for event in events]


def last(*events: LogEvent, ref: TaskRef = REF, form: Encoding = V1) -> JsonObject:
    """Return the last of some events as a stream carries it."""
    _, entries = run(*events, ref=ref)
    encoded = form.entry(entries[-1], ref)
    assert encoded is not None
    return orjson.loads(encoded)


def artifact(update: JsonObject) -> JsonObject:
    return cast(JsonObject, cast(JsonObject, update["artifactUpdate"])["artifact"])


def at(value: Json, *path: str | int) -> Json:
    for step in path:
        value = cast(dict[str | int, Json], value)[step]
    return value


def reads(rendered: Json, proto: ProtoMessage) -> ProtoMessage:
    assert isinstance(rendered, dict)
    return ParseDict(rendered, proto, ignore_unknown_fields=False)


def read_event03(rendered: JsonObject) -> object:
    models = {
        "status-update": v03.TaskStatusUpdateEvent,
        "artifact-update": v03.TaskArtifactUpdateEvent,
    }
    event = models[str(rendered["kind"])].model_validate(rendered, extra="forbid")
    response = v03.SendStreamingMessageSuccessResponse(result=event)
    return conversions.to_core_stream_response(response)


@pytest.mark.parametrize("length", range(1, len(TURN) + 1))
def test_the_sdk_reads_the_task_of_every_line_at_any_moment(length: int) -> None:
    state, _ = run(*TURN[:length])

    reads(render.task(state), Task())
    old = v03.Task.model_validate(V03.result(render.task(state)), extra="forbid")
    conversions.to_core_task(old)
    proto = reads(V03_PROTO.result(render.task(state)), a2a_v0_3_pb2.Task())
    proto_utils.FromProto.task(cast(a2a_v0_3_pb2.Task, proto))


@pytest.mark.parametrize("ending", ENDINGS, ids=lambda ending: ending.outcome.value)
def test_the_sdk_reads_every_ending(ending: Finished) -> None:
    state, entries = run(Accepted(USER), Started(), ending)
    reads(render.task(state), Task())
    conversions.to_core_task(v03.Task.model_validate(V03.result(render.task(state))))
    reads(V03_PROTO.result(render.task(state)), a2a_v0_3_pb2.Task())
    assert [entry.stops for entry in entries] == [False, False, True]


def test_the_sdk_reads_every_entry_of_every_line() -> None:
    _, entries = run(*TURN)
    silent = [type(e.event) for e in entries if V1.entry(e, REF) is None]
    assert silent == [Accepted, Answered, UsageCounted]

    for entry in entries:
        for form in FORMS:
            encoded = form.entry(entry, REF)
            if encoded is None:
                continue
            rendered: JsonObject = orjson.loads(encoded)
            if form is V1:
                reads(rendered, StreamResponse())
            elif form is V03:
                read_event03(rendered)
            else:
                proto = reads(rendered, a2a_v0_3_pb2.StreamResponse())
                proto_utils.FromProto.stream_response(cast(a2a_v0_3_pb2.StreamResponse, proto))


@given(st.text(), st.integers(1, 2**53), st.text(), st.text(min_size=1), st.booleans())
def test_growing_text_is_framed_as_json_would_be(
    text: str, seq: int, context: str, message_id: str, opens: bool
) -> None:
    ref = TaskRef(TaskId("t1"), ContextId(context), Principal("p"))
    entry = Entry(seq, AT, TextGrew(MessageId(message_id), "prt_1", text, opens))

    encoded = V1.entry(entry, ref)

    assert encoded is not None
    assert orjson.loads(encoded) == {
        "artifactUpdate": {
            "taskId": "t1",
            "contextId": context,
            "artifact": {
                "artifactId": "t1:stream:text",
                "name": "text",
                "parts": [{"text": text}],
                "metadata": {
                    "shared": {
                        "stream": {
                            "block_type": "text",
                            "source": "stream",
                            "message_id": message_id,
                            "event_id": f"t1:{context}:t1:stream:{seq}",
                            "sequence": seq,
                        }
                    }
                },
            },
            "append": not opens,
            "lastChunk": False,
        }
    }


def test_growing_text_of_0_3_has_its_kinds() -> None:
    update = last(TextGrew(MSG, "prt_1", "x", opens=True), form=V03)

    assert (update["kind"], update["append"]) == ("artifact-update", False)
    assert at(update, "artifact", "parts") == [{"kind": "text", "text": "x"}]


def flags(update: JsonObject) -> tuple[Json, Json]:
    inner = cast(JsonObject, update["artifactUpdate"])
    return inner["append"], inner["lastChunk"]


@pytest.mark.requirement("A2A-3.5.2")
def test_append_and_last_chunk_are_true_to_what_happens() -> None:
    text = TextGrew(MSG, "prt_1", "x", opens=True)
    more = TextGrew(MSG, "prt_1", "y")
    running = ToolChanged(MSG, "prt_2", "call_1", "bash", "running")
    failed = ToolChanged(MSG, "prt_2", "call_1", "bash", "error", error="no")

    assert flags(last(text)) == (False, False)
    assert flags(last(text, more)) == (True, False)
    assert flags(last(text, ChannelReplaced(Channel.TEXT, MSG, [("p", "z")]))) == (False, False)
    assert flags(last(text, ChannelClosed(Channel.TEXT, MSG))) == (True, True)
    assert artifact(last(text, ChannelClosed(Channel.TEXT, MSG)))["parts"] == [{"text": ""}]
    assert flags(last(running)) == (False, False)
    assert flags(last(running, TOOL)) == (False, True)
    assert flags(last(running, failed)) == (False, True)
    assert flags(last(DIFF)) == (False, True)


CHUNKS = st.lists(
    st.tuples(st.sampled_from(["grow", "replace"]), st.text(max_size=4)), min_size=1, max_size=12
)


@given(CHUNKS)
def test_a_reader_of_the_stream_ends_with_the_text_of_the_stored_task(
    chunks: list[tuple[str, str]],
) -> None:
    events: list[LogEvent] = []
    for kind, text in chunks:
        if kind == "grow":
            events.append(TextGrew(MSG, "prt_1", text, opens=not events))
        else:
            events.append(ChannelReplaced(Channel.TEXT, MSG, [("prt_1", text)]))
    state, entries = run(*events, ChannelClosed(Channel.TEXT, MSG))

    seen = ""
    for entry in entries:
        update = at(orjson.loads(V1.entry(entry, REF) or b""), "artifactUpdate")
        text = str(at(update, "artifact", "parts", 0, "text"))
        seen = seen + text if at(update, "append") else text

    stored = render.task(state)
    assert at(stored, "artifacts", 0, "parts") == [{"text": seen}]


def test_a_finished_task_tells_it_all() -> None:
    state, _ = run(*TURN)

    task = render.task(state)

    artifacts = cast(list[JsonObject], task["artifacts"])
    assert [(a["artifactId"], a["name"]) for a in artifacts] == [
        ("t1:stream:tool:prt_2", "bash"),
        ("t1:stream:reasoning", "reasoning"),
        ("t1:diff", "diff"),
        ("t1:stream:text", "text"),
    ]
    assert artifacts[3]["parts"] == [{"text": "I will.\nDone."}]
    assert artifacts[1]["parts"] == [{"text": "hm", "metadata": {"adk_thought": True}}]
    assert artifacts[0]["parts"] == [
        {
            "data": {
                "call_id": "call_1",
                "tool": "bash",
                "status": "completed",
                "title": "Remove x",
                "input": {"command": "rm"},
                "output": "done",
            },
            "mediaType": "application/json",
        }
    ]
    assert artifacts[2]["parts"] == [
        {
            "raw": base64.b64encode(b"--- a.py\n+++ a.py\n").decode(),
            "mediaType": "text/x-diff",
            "filename": "changes.diff",
        },
        {
            "data": {
                "files": [{"file": "a.py", "status": "modified", "additions": 2, "deletions": 1}],
                "truncated": False,
            },
            "mediaType": "application/json",
        },
    ]
    assert task["status"] == {
        "state": "TASK_STATE_COMPLETED",
        "timestamp": TIME,
        "message": {
            "messageId": "t1:answer",
            "contextId": "c1",
            "taskId": "t1",
            "role": "ROLE_AGENT",
            "parts": [{"text": "I will.\nDone."}],
        },
    }
    assert task["metadata"] == {
        "shared": {
            "session": {"id": "ses_1", "title": "Fix"},
            "usage": {
                "input_tokens": 90,
                "output_tokens": 15,
                "total_tokens": 120,
                "reasoning_tokens": 5,
                "cache_tokens": {"read_tokens": 10, "write_tokens": 0},
                "cost": 0.5,
                "children": {
                    "input_tokens": 1,
                    "output_tokens": 2,
                    "total_tokens": 3,
                    "reasoning_tokens": 0,
                    "cache_tokens": {"read_tokens": 0, "write_tokens": 0},
                    "cost": 0.0,
                },
            },
        },
        "opencode": {
            "created_at": TIME,
            "title": "do it",
            "finish": "stop",
        },
    }
    assert [at(m, "messageId") for m in cast(list[Json], task["history"])] == ["m1", "m2"]
    assert at(task, "history", 0, "parts", 3, "data") == [2**53 + 1]


@pytest.mark.requirement("A2A-3.2.4")
def test_history_is_cut_to_the_newest_and_left_out_when_none_is_wanted() -> None:
    state, _ = run(*TURN)

    assert [at(m, "messageId") for m in cast(list[Json], render.task(state, 1)["history"])] == [
        "m2"
    ]
    assert "history" not in render.task(state, 0)
    assert "artifacts" not in render.task(state, artifacts=False)


def test_a_prompt_is_told_with_a_message_and_in_full_detail() -> None:
    update = at(last(Started(), ASKED), "statusUpdate")

    status = cast(JsonObject, at(update, "status"))
    assert status["state"] == "TASK_STATE_INPUT_REQUIRED"
    message = cast(JsonObject, status["message"])
    assert (message["messageId"], message["role"]) == ("t1:prompt:per_1", "ROLE_AGENT")
    assert (message["taskId"], message["contextId"]) == ("t1", "c1")
    assert "rm -rf x" in str(at(message, "parts", 0, "text"))
    assert at(update, "metadata", "shared", "interrupt") == {
        "request_id": "per_1",
        "number": 1,
        "waiting": [1],
        "type": "permission",
        "phase": "asked",
        "session_id": "ses_1",
        "details": {
            "replies": ["once", "reject"],
            "scopes": ["task", "context"],
            "scope_text": "plain commands (no redirection, pipe, …) that fit rm *",
            "permission": "bash",
            "patterns": ["rm -rf x"],
            "always": ["rm *"],
            "metadata": {"command": "rm -rf x"},
            "tool": {"call_id": "call_1", "name": "bash", "input": {"command": "rm -rf x"}},
        },
        "asked_at": TIME,
        "expires_at": "2026-11-15T09:10:00.123Z",
        "default": "reject",
    }
    assert at(update, "metadata", "shared", "stream") == {
        "source": "interrupt",
        "message_id": "t1:c1:assistant",
        "event_id": "t1:c1:t1:stream:2",
        "sequence": 2,
    }


def test_a_question_is_told_with_its_options() -> None:
    update = last(Started(), QUESTION)

    assert at(update, "statusUpdate", "metadata", "shared", "interrupt", "details") == {
        "questions": [
            {
                "header": "Color",
                "question": "Which?",
                "options": [{"label": "Red", "value": "Red", "description": "r"}],
                "multiple": True,
                "custom": True,
            }
        ]
    }


def test_an_answer_is_told_with_its_resolution() -> None:
    resumed = Resumed(RequestId("per_1"), "permission", "rejected", by="p")
    update = at(last(Started(), ASKED, resumed), "statusUpdate")

    assert at(update, "status") == {"state": "TASK_STATE_WORKING", "timestamp": TIME}
    assert at(update, "metadata", "shared", "interrupt") == {
        "request_id": "per_1",
        "type": "permission",
        "phase": "resolved",
        "resolution": "rejected",
        "by": "p",
    }


def test_a_failure_names_its_remedy_type_and_upstream_status() -> None:
    update = at(last(Started(), ENDINGS[1]), "statusUpdate")

    assert at(update, "status", "state") == "TASK_STATE_FAILED"
    assert at(update, "status", "message", "parts") == [{"text": "Wait."}]
    assert at(update, "metadata", "opencode", "error") == {
        "type": "UPSTREAM_QUOTA_EXCEEDED",
        "upstream_status": 429,
    }
    assert at(update, "metadata", "shared", "stream") == {
        "source": "status",
        "message_id": "t1:c1:assistant",
        "event_id": "t1:c1:t1:stream:status",
    }


def test_a_recovery_is_told_as_progress() -> None:
    update = at(last(Started(), Recovered("The service was restarted")), "statusUpdate")

    assert at(update, "status", "state") == "TASK_STATE_WORKING"
    assert at(update, "metadata", "shared", "progress") == {
        "type": "recovered",
        "status": "resumed",
        "reason": "The service was restarted",
    }


@pytest.mark.requirement("A2A-0.3-final")
def test_final_of_0_3_is_set_where_a_stream_ends() -> None:
    _, entries = run(*TURN)

    final = {
        type(entry.event)
        for entry in entries
        if entry.status
        and (encoded := V03.entry(entry, REF))
        and orjson.loads(encoded).get("final")
    }

    # The first answer leaves the question open: the task still waits.
    assert final == {Interrupted, Resumed, Finished}
    assert last(Started(), Progressed("step-start", "running"), form=V03)["final"] is False


def test_states_are_spelled_as_each_line_has_them() -> None:
    state, _ = run(Started(), Finished(Outcome.CANCELED))
    assert [at(form.result(render.task(state)), "status", "state") for form in FORMS] == [
        "TASK_STATE_CANCELED",
        "canceled",
        "TASK_STATE_CANCELLED",
    ]


TEXT_ONLY = TaskRef(TaskId("t1"), ContextId("c1"), Principal("p"), ("text/plain",), AT)
WITH_JSON = TaskRef(
    TaskId("t1"), ContextId("c1"), Principal("p"), ("application/json", "text/plain"), AT
)


def test_a_caller_that_takes_only_text_gets_neither_tool_calls_nor_the_diff() -> None:
    state, entries = run(*TURN, ref=TEXT_ONLY)

    task = render.task(state)

    artifacts = cast(list[JsonObject], task["artifacts"])
    assert [a["name"] for a in artifacts] == ["text"]
    told = [update for entry in entries if (update := render.update(entry, TEXT_ONLY))]
    updates = [one for one in told if "artifactUpdate" in one]
    assert {str(at(one, "artifactUpdate", "artifact", "name")) for one in updates} == {"text"}
    assert at(task, "metadata", "opencode", "output_negotiation") == {
        "accepted_output_modes": ["text/plain"]
    }
    assert at(task, "history", 0, "parts") == [
        {"text": "do it"},
        {"text": f"[{2**53 + 1}]", "metadata": {"a": 1}},
    ]


def test_a_caller_that_takes_only_text_gets_an_answer_that_is_data_as_sorted_json() -> None:
    state, _ = run(Started(), ResultGiven({"b": 1, "a": 2}), ref=TEXT_ONLY)

    (result,) = cast(list[JsonObject], render.task(state)["artifacts"])

    assert result["parts"] == [{"text": '{"a":2,"b":1}'}]


def test_a_caller_that_takes_only_data_gets_the_answer_as_text_and_no_reasoning() -> None:
    state, _ = run(*TURN, ref=replace(TEXT_ONLY, output_modes=("application/json",)))

    artifacts = cast(list[JsonObject], render.task(state)["artifacts"])

    assert [a["name"] for a in artifacts] == ["bash", "diff", "text"]
    assert [next(iter(cast(JsonObject, at(a, "parts", 0)))) for a in artifacts] == [
        "data",
        "data",
        "text",
    ]


def test_why_a_task_ended_without_an_answer_is_told_where_clients_look() -> None:
    canceled = [Started(), Finished(Outcome.CANCELED)]
    failure = Failure(FailureType.UPSTREAM_EXECUTION_ERROR, "No.")
    failed = [Started(), Finished(Outcome.FAILED, failure=failure)]
    text = TextGrew(MSG, "p", "half", opens=True)

    def shown(*events: LogEvent) -> tuple[Json, list[str]]:
        task = render.task(run(*events)[0])
        artifacts = cast(list[JsonObject], task.get("artifacts", []))
        said = at(task, "status", "message", "parts", 0, "text")
        return said, [cast(str, at(a, "parts", 0, "text")) for a in artifacts]

    # Clients that join all texts would show it twice; the others need it if there are artifacts.
    assert shown(*canceled) == ("Canceled by the caller.", [])
    assert shown(canceled[0], text, canceled[1]) == (
        "Canceled by the caller.",
        ["half", "Canceled by the caller."],
    )
    assert shown(*failed) == ("No.", [])
    assert shown(failed[0], text, failed[1]) == ("No.", ["half", "No."])


def test_negotiated_modes_are_told_with_every_event_and_data_stay_data_when_accepted() -> None:
    for event in (TextGrew(MSG, "p", "x", opens=True), TOOL, DIFF):
        update = cast(JsonObject, last(event, ref=WITH_JSON)["artifactUpdate"])
        assert at(update, "metadata", "opencode", "output_negotiation") == {
            "accepted_output_modes": ["application/json", "text/plain"]
        }
    data = artifact(last(DIFF, ref=WITH_JSON))["parts"]
    assert [at(part, "mediaType") for part in cast(list[Json], data)] == ["application/json"]


def test_the_diff_is_a_file_in_0_3_as_well() -> None:
    old = cast(JsonObject, last(DIFF, form=V03)["artifact"])
    assert at(old, "parts", 0, "file", "mimeType") == "text/x-diff"

    proto = artifact(last(DIFF, form=V03_PROTO))
    encoded = base64.b64encode(DIFF.patch.encode()).decode()
    assert at(proto, "parts", 0, "file") == {
        "fileWithUri": f"data:text/x-diff;base64,{encoded}",
        "mimeType": "text/x-diff",
        "name": "changes.diff",
    }


def test_a_cursor_counts_the_recoveries_before_it() -> None:
    state, _ = run(Accepted(USER), Started(), Recovered("x"), Started())

    assert [render.cursor(seq, state) for seq in range(1, 5)] == [b"1", b"2", b"3.1", b"4.1"]
    assert render.cursor(7, TaskState(REF)) == b"7"


@pytest.mark.parametrize("modes", [None, ("text/plain",), ("application/json", "text/plain")])
@pytest.mark.parametrize("name", [one.name for one in recordings()])
def test_what_is_told_is_what_the_task_says_is_visible(
    name: str, modes: tuple[str, ...] | None
) -> None:
    turn = recording(name)
    reader = TurnReader(turn.root, turn.prompt)
    events = [told for event in turn.events for told in reader.feed([event])]
    state = TaskState(TaskRef(REF.id, REF.context_id, REF.principal, modes))

    entries = [
        state.apply(event, AT)
        for event in (
            Accepted(USER),
            SessionBound(SessionId("ses_1")),
            Started(),
            *events,
            Added(
                Message("m3", "user", [Part("text", "and this")]),
                TurnRequest((), MessageId("msg_1")),
            ),
            Recovered("restart"),
            Answered(Message("m2", "user", [Part("text", "once")])),
            *reader.finish(turn.states[-1]),
        )
    ]

    for entry in entries:
        told = [form.entry(entry, state.ref) is not None for form in FORMS]
        assert told == [state.ref.visible(entry.event)] * len(FORMS)
