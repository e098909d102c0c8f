"""The driver of OpenCode 2: recordings of a preview and of the public branch under its reader."""

import ast
import asyncio
import inspect
import os
import random
import re
import sqlite3
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import closing
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Event, Thread
from typing import Any
from urllib.parse import unquote

import orjson
import pytest
from structlog.testing import capture_logs

from opencode_a2a.cli.doctor import check_rules, judge
from opencode_a2a.config import OpenCodeSettings, load
from opencode_a2a.errors import (
    Feature,
    NotInOpenCodeError,
    UpstreamBackpressureError,
    UpstreamError,
    UpstreamHttpError,
    UpstreamNotFoundError,
    UpstreamUnansweredError,
    UpstreamUnreachableError,
)
from opencode_a2a.events import (
    Channel,
    ChannelReplaced,
    Emitted,
    Finished,
    Interrupted,
    JsonObject,
    Outcome,
    Progressed,
    Resumed,
    TextGrew,
    ToolChanged,
    TurnEvent,
    UsageCounted,
)
from opencode_a2a.ids import MessageId, ModelRef, RequestId, SessionId
from opencode_a2a.jsonguard import items_in
from opencode_a2a.net.exchange import HttpResponse
from opencode_a2a.opencode.connect import OpenCodeConnection, examine
from opencode_a2a.opencode.data import conflict, owner_of
from opencode_a2a.opencode.driver import Location
from opencode_a2a.opencode.events import (
    MalformedEventError,
    MessageUpdated,
    PartUpdated,
    PermissionAsked,
    SessionStatusChanged,
    head_of,
)
from opencode_a2a.opencode.feed import Feed
from opencode_a2a.opencode.kinds import CONTRACT, Found, Kind, of_version
from opencode_a2a.opencode.managed import ManagedOpenCode
from opencode_a2a.opencode.process import UnsupportedOpenCodeError
from opencode_a2a.opencode.reader import TurnReader
from opencode_a2a.opencode.translate import tool_changed
from opencode_a2a.opencode.turn_state import Snapshot
from opencode_a2a.opencode.types import (
    AssistantMessage,
    FilePart,
    MessageWithParts,
    OutputFormat,
    PermissionRule,
    Prompt,
    SessionChanges,
    SessionDraft,
    StatusBusy,
    StatusIdle,
    ToolCompleted,
    ToolFailed,
    ToolPart,
    ToolRef,
    ToolRunning,
    ToolState,
    WorkspaceDraft,
)
from opencode_a2a.opencode.v2 import catalogues, client, events
from opencode_a2a.opencode.v2 import contract as contracts
from opencode_a2a.opencode.v2.background import left_in_background, unreported
from opencode_a2a.opencode.v2.client import IDLE_LOOKS, MISSING, OpenCode2
from opencode_a2a.opencode.v2.contract import INBOX, OPTIONAL, TAKE_BACK, Contract
from opencode_a2a.opencode.v2.events import EVENTS, Decoder2, Memory
from opencode_a2a.opencode.v2.messages import (
    Call2,
    Form2,
    Message2,
    question_of,
    stored,
    tool_state,
)
from opencode_a2a.opencode.v2.outputs import MAX_OUTPUT, Inserted, Running
from opencode_a2a.turns.policy import EXPIRED_MESSAGE
from opencode_a2a.turns.snapshot import PAGE, messages_since

TRANSCRIPTS = Path(__file__).parent.parent / "transcripts"
BUILDS = ("2-preview", "2-branch")
RECORDED = sorted(
    path.relative_to(TRANSCRIPTS)
    for build in BUILDS
    for path in (TRANSCRIPTS / build).glob("*.jsonl")
)
ADMITTED = ("session.inbox.enqueued", "session.input.admitted")
DELIVERED = ("inbox.delivered", "input.promoted")
BLOCKS = ("tool.", "text.")
ENDS = ("tool.success", "tool.failed", "text.ended")
SEVERAL_STEPS = [
    Path("2-branch", "permission-edit.jsonl"),
    Path("2-branch", "tool-errors.jsonl"),
    *(Path(build, "write-edit.jsonl") for build in BUILDS),
]
"""Those of one prompt with a tool call in more than one step."""

every_recording = pytest.mark.parametrize("recorded", RECORDED, ids=str)
every_build = pytest.mark.parametrize("build", BUILDS)


class Recording:
    """One scenario: its events, and the messages that were stored at the end."""

    def __init__(self, recorded: Path) -> None:
        lines = [orjson.loads(line) for line in (TRANSCRIPTS / recorded).read_bytes().splitlines()]
        self.events: list[dict[str, Any]] = lines[:-1]
        self.listed: list[dict[str, Any]] = lines[-1]["stored"]
        made = (e for e in self.events if e["type"] == "session.created")
        self.root = SessionId(next(made)["data"]["sessionID"])
        own = (e["data"] for e in self.events if e["type"] in ADMITTED)
        first = next(data for data in own if data["sessionID"] == self.root)
        self.prompt = MessageId(first.get("inboxID") or first["inputID"])
        self.finish_unnamed = False

    @property
    def stored(self) -> list[MessageWithParts]:
        listed = [Message2.model_validate(one) for one in self.listed]
        return [*stored(self.root, listed, finish_unnamed=self.finish_unnamed)]

    @property
    def text(self) -> str:
        answers = (one for one in self.listed if one["type"] == "assistant")
        blocks = (block for one in answers for block in one["content"] if block["type"] == "text")
        return "\n\n".join(block["text"] for block in blocks if block["text"])

    def followed(self, start: int, end: int) -> list[bytes]:
        """Return the events from one moment to another, as far as turns follow them."""
        frames = map(orjson.dumps, self.events[start:end])
        return [frame for frame in frames if head_of(frame)[0].decode() in EVENTS]

    def listed_at(self, moment: int) -> list[dict[str, Any]]:
        """Return what was stored when the first events had been sent."""
        sent = set[tuple[str, ...]]()
        for event in self.events[:moment]:
            kind, data = event["type"].removeprefix("session."), event["data"]
            message = data.get("assistantMessageID") or data.get("inboxID") or data.get("inputID")
            block = str(data.get("callID") or data.get("id") or data.get("ordinal"))
            sent.add((kind, message, block) if kind.startswith(BLOCKS) else (kind, message))
        listed = list[dict[str, Any]]()
        for one in self.listed:
            message = one["id"]
            if one["type"] != "assistant":
                listed += [one] if {(kind, message) for kind in DELIVERED} & sent else []
            elif ("step.started", message) in sent:
                content = list[dict[str, Any]]()
                for number, block in enumerate(one["content"]):
                    known = block.get("id", str(number))
                    if {(kind, message, known) for kind in ENDS} & sent:
                        content.append(block)
                    elif ("tool.called", message, known) in sent:
                        state = {"status": "running", "input": block["state"]["input"]}
                        content.append(block | {"state": state})
                over = ("step.ended", message) in sent
                now = one if over else one | {"time": {"created": 1}, "finish": None}
                listed.append(now | {"content": content})
        return listed

    def read(self, lost: float = 0.0, seed: int = 0) -> list[TurnEvent]:
        """Return what the turn reader makes of it, with a share of the events lost at random."""
        wire = Decoder2(Memory(), finish_unnamed=self.finish_unnamed)
        reader = TurnReader(self.root, self.prompt)
        for one in self.listed:
            if one["type"] == "user" and one["id"] != self.prompt:
                reader.state.messages.claim(MessageId(one["id"]))
        chance = random.Random(seed)  # noqa: S311 - only a choice
        missing, out = False, list[TurnEvent]()
        for event in self.events:
            data = orjson.dumps(event)
            if wire.head(data)[0] not in wire.followed:
                continue
            if chance.random() < lost:
                missing = True
                continue
            if missing:
                reader.state.require_reconcile()
            missing = False
            out += reader.feed(wire.decode(data))
        if reader.state.needs_reconcile:
            out += reader.reconcile(Snapshot(messages=self.stored))
        return out + reader.finish(Snapshot(messages=self.stored))


def told(events: list[TurnEvent]) -> str:
    text = ""
    for event in events:
        match event:
            case TextGrew():
                text += event.text
            case ChannelReplaced(channel=Channel.TEXT):
                text = "".join(part for _, part in event.parts)
            case _:
                pass
    return text


def ending(events: list[TurnEvent]) -> Finished:
    assert isinstance(events[-1], Finished)
    return events[-1]


@every_recording
def test_the_text_is_that_of_the_store(recorded: Path) -> None:
    recording = Recording(recorded)

    assert told(recording.read()) == recording.text


@every_recording
def test_lost_events_change_neither_text_nor_end(recorded: Path) -> None:
    recording = Recording(recorded)
    whole = ending(recording.read())

    for seed in range(5):
        events = recording.read(0.25, seed)
        assert told(events) == recording.text
        assert ending(events).finish == whole.finish


@every_build
@pytest.mark.parametrize(
    ("name", "outcome", "failure"),
    [
        ("plain-text", Outcome.COMPLETED, None),
        ("permission-reject", Outcome.REJECTED, "UPSTREAM_REQUEST_REJECTED"),
        ("question-cancelled", Outcome.REJECTED, "UPSTREAM_REQUEST_REJECTED"),
        ("permission-reject-message", Outcome.COMPLETED, None),
        ("permission-interrupt", Outcome.FAILED, "UPSTREAM_ABORTED"),
        ("interrupt-mid-stream", Outcome.FAILED, "UPSTREAM_ABORTED"),
        ("error-500-exhausted", Outcome.FAILED, "UPSTREAM_SERVER_ERROR"),
        ("error-401", Outcome.AUTH_REQUIRED, "UPSTREAM_UNAUTHORIZED"),
        ("error-500-retry", Outcome.COMPLETED, None),
        ("finish-length", Outcome.COMPLETED, None),
        ("unknown-model", Outcome.FAILED, "UPSTREAM_EXECUTION_ERROR"),
    ],
)
def test_a_turn_ends_as_on_1(build: str, name: str, outcome: Outcome, failure: str | None) -> None:
    end = ending(Recording(Path(build, f"{name}.jsonl")).read())

    assert end.outcome is outcome
    assert (end.failure and end.failure.type) == failure


@every_build
@pytest.mark.requirement("I25")
def test_a_turn_is_completed_whatever_the_reason_of_its_end_is_called(build: str) -> None:
    recording = Recording(Path(build, "plain-text.jsonl"))
    for one in [*recording.listed, *(event["data"] for event in recording.events)]:
        one.pop("finish", None)
    recording.finish_unnamed = True

    assert ending(recording.read()).outcome is Outcome.COMPLETED


@pytest.mark.parametrize("heard", [True, False])
@pytest.mark.parametrize("said", ["unknown", "tool-calls"])
@pytest.mark.parametrize(
    ("name", "outcome"),
    [("plain-text", Outcome.COMPLETED), ("tool-shell", Outcome.FAILED)],
)
@every_build
@pytest.mark.requirement("I25")
def test_only_a_tool_call_leaves_a_step_unfinished_whatever_the_provider_says(
    build: str, name: str, outcome: Outcome, said: str, heard: bool
) -> None:
    recording = Recording(Path(build, f"{name}.jsonl"))
    ended = next(n for n, event in enumerate(recording.events) if "step.ended" in event["type"])
    message = recording.events[ended]["data"]["assistantMessageID"]
    recording.events = recording.events[: ended + 1]
    recording.events[ended]["data"]["finish"] = said
    number = [one["id"] for one in recording.listed].index(message)
    recording.listed = recording.listed[: number + 1]
    recording.listed[-1]["finish"] = said
    wire, reader = Decoder2(Memory()), TurnReader(recording.root, recording.prompt)

    for frame in recording.followed(0, ended + 1) if heard else ():
        reader.feed(wire.decode(frame))
    end = ending(reader.finish(None if heard else Snapshot(messages=recording.stored)))

    assert end.outcome is outcome


@pytest.mark.parametrize("heard", [True, False])
@pytest.mark.parametrize(
    ("error", "failure"),
    [
        ({"type": "provider.auth", "message": "no"}, "UPSTREAM_UNAUTHORIZED"),
        ({"type": "provider.unknown", "message": "no"}, "UPSTREAM_EXECUTION_ERROR"),
        ("odd", "UPSTREAM_INTERRUPTED"),
    ],
)
def test_a_turn_whose_compaction_fails_is_not_completed(
    error: Any, failure: str, heard: bool
) -> None:
    recording = Recording(Path("2-branch", "compaction-auto.jsonl"))
    before = next(n for n, e in enumerate(recording.events) if "compaction.ended" in e["type"])
    failed = recording.events[before]
    failed |= {"type": "session.compaction.failed", "data": failed["data"] | {"error": error}}
    recording.events = [*recording.events[: before + 1], recording.events[-1]]
    [*others, compaction, _] = recording.listed
    recording.listed = [*others, compaction | {"status": "failed", "error": error}]
    prompt = MessageId(others[-1]["id"])
    wire, reader = Decoder2(Memory()), TurnReader(recording.root, prompt)

    for frame in recording.followed(0, len(recording.events)) if heard else ():
        reader.feed(wire.decode(frame))
    end = ending(reader.finish(None if heard else Snapshot(messages=recording.stored)))

    assert (end.failure and end.failure.type) == failure


def kept(state: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [{"type": "tool", "id": "call_1", "name": "shell", "state": state}]


@pytest.mark.parametrize(
    "content",
    [
        [{"type": "text", "text": ""}],
        [{"type": "text", "text": "half of"}],
        kept({"status": "error", "error": {"message": "Tool execution interrupted: shell"}}),
    ],
    ids=["no text", "text", "tool"],
)
def test_an_answer_that_opencode_repairs_after_a_kill_is_not_completed(
    content: list[dict[str, Any]],
) -> None:
    """It gets a time of its end, and neither a reason nor an error."""
    root, prompt = SessionId("ses_1"), MessageId("msg_1")
    time = {"created": 1, "completed": 2}
    listed: list[Document] = [
        {"id": prompt, "type": "user", "text": "hello", "time": {"created": 1}},
        {"id": "msg_2", "type": "assistant", "content": content, "time": time},
    ]
    messages = [*stored(root, [Message2.model_validate(one) for one in listed])]

    end = ending(TurnReader(root, prompt, Emitted()).finish(Snapshot(messages=messages)))

    assert (end.outcome, end.failure and end.failure.type) == (
        Outcome.FAILED,
        "UPSTREAM_INTERRUPTED",
    )


@pytest.mark.parametrize(
    ("ended", "state"),
    [
        ({"time": {"created": 1}}, ToolRunning(input={})),
        ({}, ToolCompleted(input={}, output="done", metadata=None)),
        ({"error": {"type": "aborted"}}, ToolFailed(input={}, error="", metadata=None)),
    ],
)
def test_a_tool_call_whose_state_is_called_otherwise_ends_with_its_message(
    ended: dict[str, Any], state: ToolState
) -> None:
    call = {"status": "succeeded", "content": [{"type": "text", "text": "done"}]}
    answer: Document = {
        "id": "msg_2",
        "type": "assistant",
        "content": kept(call),
        "time": {"created": 1, "completed": 2},
        "finish": "tool-calls",
        **ended,
    }

    [message] = stored(SessionId("ses_1"), [Message2.model_validate(answer)])

    assert [part.state for part in message.parts if isinstance(part, ToolPart)] == [state]


@pytest.mark.parametrize("unnamed", [False, True])
@pytest.mark.parametrize("error", [None, {}])
def test_a_step_that_failed_without_an_error_that_can_be_read_is_not_completed(
    error: Any, unnamed: bool
) -> None:
    recording = Recording(Path("2-branch", "plain-text.jsonl"))
    wire = Decoder2(Memory(), finish_unnamed=unnamed)
    reader = TurnReader(recording.root, recording.prompt)
    for event in recording.events:
        if event["type"] == "session.step.ended":
            message = event["data"]["assistantMessageID"]
            failed = {"sessionID": recording.root, "assistantMessageID": message, "error": error}
            event |= {"type": "session.step.failed", "data": failed}
    for event in recording.followed(0, len(recording.events)):
        reader.feed(wire.decode(event))

    assert ending(reader.finish(None)).outcome is Outcome.FAILED


@every_build
def test_names_of_permissions_and_tools_are_those_of_1(build: str) -> None:
    events = Recording(Path(build, "permission-once.jsonl")).read()

    asked = next(event for event in events if isinstance(event, Interrupted))
    assert (asked.permission, asked.directory) == ("bash", "/workspace")
    assert asked.tool == "bash"
    assert isinstance((asked.tool_input or {})["command"], str)
    answered = next(event for event in events if isinstance(event, Resumed))
    assert (answered.request_id, answered.resolution) == (asked.request_id, "once")
    tools = [event for event in events if isinstance(event, ToolChanged)]
    assert (tools[-1].tool, tools[-1].status) == ("bash", "completed")


def test_an_edit_shows_its_change_before_it_is_allowed() -> None:
    events = Recording(Path("2-branch", "permission-edit.jsonl")).read()

    asked = next(event for event in events if isinstance(event, Interrupted))
    assert asked.permission == "edit"
    assert "@@" in str(asked.metadata["diff"])
    # Each file has its own patch and name, which cannot be taken for a part of another's.
    (file,) = items_in(asked.metadata, "files")
    assert (file["file"], file["status"]) == ("a.txt", "modified")


@pytest.mark.requirement("I24")
@pytest.mark.parametrize(
    ("name", "given", "known"),
    [
        (
            "edit",
            {"path": ".env", "filePath": "README.md", "oldString": "a"},
            {"filePath": ".env", "filePath (not used)": "README.md", "oldString": "a"},
        ),
        ("read", {"path": "/etc/passwd"}, {"filePath": "/etc/passwd"}),
        (
            "subagent",
            {"agent": "build", "subagent_type": "explore", "prompt": "p"},
            {"subagent_type": "build", "subagent_type (not used)": "explore", "prompt": "p"},
        ),
        ("grep", {"pattern": "x", "path": "/etc"}, {"pattern": "x", "path": "/etc"}),
    ],
)
def test_fields_of_tools_are_told_by_what_the_tool_uses(
    name: str, given: JsonObject, known: JsonObject
) -> None:
    state = tool_state(name, Call2(status="running", input=given))

    assert state == ToolRunning(input=known)


@every_build
def test_a_form_is_asked_as_questions_and_answered_by_its_keys(build: str) -> None:
    recording = Recording(Path(build, "question-answered.jsonl"))
    created = next(e for e in recording.events if e["type"] == "form.created")
    form = Form2.model_validate(created["data"]["form"])

    questions = question_of(form).questions
    labels = [[question.options[0].label] for question in questions]
    answer = form.answer(labels)

    assert [*answer] == [field.key for field in form.fields]
    for field, question in zip(form.fields, questions, strict=True):
        expected = [question.options[0].label]
        assert answer[field.key] == (expected if question.multiple else expected[0])


@every_build
def test_a_sub_agent_asks_through_the_turn(build: str) -> None:
    recording = Recording(Path(build, "subagent-permission.jsonl"))
    # The feed does not pass on how a session that nobody follows yet was created.
    recording.events = [
        event
        for event in recording.events
        if event["type"] != "session.created" or event["data"]["sessionID"] == recording.root
    ]

    asked = next(event for event in recording.read() if isinstance(event, Interrupted))

    assert asked.session_id != recording.root
    assert (asked.permission, asked.origin) == ("bash", "look")


def test_a_sub_agent_is_of_the_turn() -> None:
    events = Recording(Path("2-branch", "subagent.jsonl")).read()

    told_of = [e for e in events if isinstance(e, Progressed) and e.type == "subagent"]
    assert told_of[-1].status == "completed"
    assert any(isinstance(event, UsageCounted) for event in events)


@pytest.mark.parametrize("name", ["background-shell", "background-subagent"])
def test_a_session_is_not_idle_while_its_work_goes_on_in_the_background(name: str) -> None:
    recording = Recording(Path("2-branch", f"{name}.jsonl"))
    wire, ends, idle = Decoder2(Memory()), 0, list[int]()
    for event in recording.events:
        data = orjson.dumps(event)
        kind, session = wire.head(data)
        if kind not in wire.followed or session.decode() != recording.root:
            continue
        ends += kind == b"session.execution.succeeded"
        for one in wire.decode(data):
            if isinstance(one, SessionStatusChanged) and isinstance(one.status, StatusIdle):
                idle.append(ends)

    assert ends == 2
    assert idle == [2]


@pytest.mark.requirement("I25")
@pytest.mark.parametrize(
    ("tool", "left"),
    [("shell", "sh_1"), ("bash", "sh_1"), ("", "sh_1"), ("plugin", None), ("subagent", None)],
)
def test_only_commands_and_sub_agents_are_left_in_the_background(
    tool: str, left: str | None
) -> None:
    assert left_in_background(tool, {"shellID": "sh_1", "status": "running"}) == left
    assert left_in_background(tool, {"shellID": "sh_1", "exit": 0}) is None


@every_build
def test_the_files_of_a_prompt_are_parts_of_its_message(build: str) -> None:
    prompt = Recording(Path(build, "files.jsonl")).stored[0]

    files = [part for part in prompt.parts if isinstance(part, FilePart)]
    shown = [(file.filename, file.mime) for file in files]
    assert shown == [("dot.png", "image/png"), ("n.txt", "text/plain"), ("a.txt", "text/plain")]
    assert files[2].url == "data:text/plain;base64,aGVsbG8K"
    assert len({part.id for part in prompt.parts}) == len(prompt.parts)


def test_what_a_running_command_prints_is_put_between_two_events() -> None:
    heard = list[bytes]()
    stream = Inserted(heard.append)
    running = dict[str, Running]()
    wire, told = Decoder2(Memory(running=running)), list[ToolChanged]()
    recording = Recording(Path("2-preview", "tool-shell.jsonl"))
    for event in recording.events:
        data = orjson.dumps(event)
        if wire.head(data)[0] in wire.followed:
            wire.decode(data)
        if event["type"] == "session.tool.progress":
            break

    [(shell, command)] = running.items()
    stream.take(b"data: {half")
    stream.put(command.printed(shell, "1\n", 2))
    stream.put(command.printed(shell, "2\n" * MAX_OUTPUT, 60_002))
    stream.take(b" a frame}\n\n")
    for frame in heard[2:]:
        [event] = wire.decode(frame.removeprefix(b"data: "))
        assert isinstance(event, PartUpdated)
        assert isinstance(event.part, ToolPart)
        told.append(tool_changed(event.part))

    assert heard[:2] == [b"data: {half", b" a frame}\n\n"]
    outputs = [(one.tool, one.status, one.output) for one in told]
    assert outputs[0] == ("bash", "running", "1\n")
    assert outputs[1] == ("bash", "running", "2\n" * (MAX_OUTPUT // 2))
    for event in recording.events:
        if event["type"] == "session.tool.success":
            wire.decode(orjson.dumps(event))
    assert running == {}


@pytest.mark.requirement("I25")
@pytest.mark.parametrize("odd", [-1, 1.5, 2**63, 1e30, None, "7", [1], {"input": "x"}, "Infinity"])
def test_a_step_ends_whatever_its_figures_are(odd: Any) -> None:
    recording = Recording(Path("2-branch", "plain-text.jsonl"))
    for event in recording.events:
        if event["type"] == "session.step.ended":
            event["data"] |= {"tokens": odd, "cost": odd}

    end = ending(recording.read())

    assert end.outcome is Outcome.COMPLETED


def test_an_event_of_an_unknown_type_is_logged_once_for_each_connection() -> None:
    frame = b'{"id":"evt_1","type":"session.turn.started","data":{"sessionID":"ses_1"}}'

    with capture_logs() as records:
        for wire in (Decoder2(Memory()), Decoder2(Memory())):
            for data in (frame, frame, b'{"type":"shell.created"}'):
                wire.head(data)

    assert [record["type"] for record in records] == ["session.turn.started"] * 2


def test_a_known_event_that_names_no_session_is_logged_once_for_each_connection() -> None:
    frame = b'{"id":"evt_1","type":"session.text.delta","data":{"session":"ses_1"}}'

    with capture_logs() as records:
        for wire in (Decoder2(Memory()), Decoder2(Memory())):
            for data in (frame, frame, b'{"type":"server.connected"}'):
                wire.head(data)

    assert [record["type"] for record in records] == ["session.text.delta"] * 2


@every_recording
def test_every_event_that_was_recorded_is_known(recorded: Path) -> None:
    wire = Decoder2(Memory())

    with capture_logs() as records:
        for event in Recording(recorded).events:
            wire.head(orjson.dumps(event))

    assert records == []


NEVER_RECORDED = {"session.compaction.failed", "session.deleted"}


@pytest.mark.parametrize("name", sorted(EVENTS.keys() - NEVER_RECORDED))
def test_an_event_that_a_release_renames_needs_one_line(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    told_in = (one for one in RECORDED if f'"{name}"' in (TRANSCRIPTS / one).read_text())
    recording = Recording(next(told_in))
    expected = recording.read()
    known = {"" if one == name else one: translate for one, translate in EVENTS.items()}
    for event in recording.events:
        event["type"] = event["type"] if event["type"] != name else "session.something.new"

    monkeypatch.setattr(events, "EVENTS", known | {"session.something.new": EVENTS[name]})

    assert recording.read() == expected


def test_a_known_event_that_is_malformed_is_an_error() -> None:
    data = b'{"id":"evt_1","type":"session.step.started","data":{"sessionID":"ses_1"}}'

    with pytest.raises(MalformedEventError):
        Decoder2(Memory()).decode(data)


# Contracts


Document = dict[str, Any]
ONE = "/api/session/{sessionID}"
REPLY = f"{ONE}/permission/{{requestID}}/reply"


def document(build: str = "2-branch") -> Document:
    """Return a recorded contract."""
    return orjson.loads((TRANSCRIPTS / build / "openapi.json").read_bytes())


def changed(found: Document, paths: Mapping[str, Document | None]) -> Document:
    """Return a contract with other calls at some paths, or none."""
    kept = {path: calls for path, calls in found["paths"].items() if path not in paths}
    given = {path: calls for path, calls in paths.items() if calls is not None}
    return {**found, "paths": kept | given}


def taking(*fields: str) -> Document:
    """Return a call whose body has these fields."""
    body = {"type": "object", "properties": dict.fromkeys(fields, True)}
    return {"requestBody": {"content": {"application/json": {"schema": body}}}}


def released(version: str) -> Document:
    """Return the contract of a release, as far as it is known: read about, never run.

    Each is the one before, changed as users and maintainers report.
    """
    known = changed(
        document(),
        {
            "/api/health": None,
            "/api/status": {"get": {}},
            "/api/session": {
                "get": {},
                "post": taking("id", "agent", "model", "location", "title", "metadata"),
            },
            f"{ONE}/permissions": {"post": taking("permissions")},
            f"{ONE}/diff": {"get": {}},
        },
    )
    if version == "2.0.4":
        return known
    update = {"get": {}, "delete": {}, "patch": taking("title", "permissions")}
    known = changed(known, {f"{ONE}/rename": None, f"{ONE}/permissions": None, ONE: update})
    if version == "2.0.5":
        return known
    assert version == "2.0.10"
    later: dict[str, Document | None] = {
        "/api/status": None,
        "/api/info": {"get": {}},
        f"{ONE}/revert/clear": None,
        f"{ONE}/revert": {"delete": {}},
        REPLY: {"post": taking("decision", "message")},
    }
    return changed(known, later)


def contract(build: str = "2-branch") -> Contract:
    return Contract.of(document(build))


RELEASES = ("2.0.4", "2.0.5", "2.0.10")


@every_build
def test_both_builds_have_all_that_turns_need(build: str) -> None:
    assert contract(build).missing == []


@pytest.mark.parametrize("version", RELEASES)
def test_releases_have_all_that_turns_need_as_far_as_they_are_known(version: str) -> None:
    assert Contract.of(released(version)).missing == []


@every_build
def test_every_field_of_messages_that_is_read_is_named(build: str) -> None:
    assert contract(build).unnamed == ()


def test_a_contract_without_schemas_of_messages_doubts_no_field() -> None:
    whole = document()
    del whole["components"]

    assert Contract.of(whole).unnamed == ()


def test_a_field_is_found_wherever_the_contract_describes_it() -> None:
    call: Document = {"requestBody": {"content": {"application/json": {"schema": {"anyOf": [
        {"$ref": "#/components/schemas/Decision"}, {"properties": {"message": {}}},
    ]}}}}}  # fmt: skip
    described: Document = {"Decision": {"allOf": [{"properties": {"decision": {}}}]}}
    found = Contract.of({"paths": {REPLY: {"post": call}}, "components": {"schemas": described}})

    named = "/api/session/{}/permission/{}/reply"
    assert [found.takes("post", named, one) for one in ("decision", "message", "reply")] == [
        True,
        True,
        False,
    ]


def test_what_is_sent_differs_between_the_builds() -> None:
    assert contract("2-preview").has("get", "/api/session/{}/pending")
    assert contract("2-branch").takes("post", "/api/session/{}/fork", "boundary")


# Calls, to a stand-in that has one answer for each


class Standin(ThreadingHTTPServer):
    """Answers as it is told, and keeps what it was sent."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), StandinHandler)
        self.answers: dict[str, Any] = {}
        self.failing: set[str] = set()
        """What is answered with an error of the server."""
        self.hanging: set[str] = set()
        """What is not answered before the end."""
        self.hangs = Event()
        self.sent: list[tuple[str, Any]] = []
        self.over = Event()


class StandinHandler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    wbufsize = -1  # one packet for head and body: a second would wait for the answer to the first
    server: Standin  # pyright: ignore[reportIncompatibleVariableOverride] -- it serves only this one

    def handle_any(self) -> None:
        body = self.rfile.read(int(self.headers.get("content-length", 0)))
        named = f"{self.command} {unquote(self.path)}"
        self.server.sent.append((named, orjson.loads(body) if body else None))
        if self.path == "/api/event":
            self.send_response_only(200)
            self.send_header("content-type", "text/event-stream")
            self.end_headers()
            self.wfile.flush()
            self.close_connection = self.server.over.wait()
            return
        known = named in self.server.answers
        content = orjson.dumps(self.server.answers.get(named, {"_tag": "SessionNotFoundError"}))
        if named in self.server.hanging:
            self.server.hangs.set()
            self.server.over.wait()
        failing = named in self.server.failing
        self.send_response_only(500 if failing else 200 if known else 404)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    do_GET = do_POST = do_PATCH = do_DELETE = do_PUT = handle_any  # noqa: N815 -- the base class's names

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 -- the base class's name
        """Stay quiet."""


@pytest.fixture
def standin() -> Iterator[Standin]:
    with Standin() as server:
        thread = Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield server
        server.over.set()
        server.shutdown()
        thread.join()


@pytest.fixture
async def driver(standin: Standin) -> AsyncIterator[OpenCode2]:
    async with OpenCode2(f"http://127.0.0.1:{standin.server_address[1]}") as driver:
        driver.contract = contract()
        yield driver


SES, PER = SessionId("ses_1"), RequestId("per_1")
ASKED = {"data": [{"id": PER, "sessionID": SES, "action": "shell", "resources": ["ls"]}]}
DENIED = {"action": "shell", "resource": "*", "effect": "deny"}
SESSION = {"id": SES, "projectID": "p", "time": {}, "location": {"directory": "/w"}}


ANSWERED = f"POST /api/session/{SES}/permission/{PER}/reply"
NAMES: dict[str, list[tuple[str, Any]]] = {
    "2.0.4": [
        (f"POST /api/session/{SES}/rename", {"title": "New"}),
        (f"POST /api/session/{SES}/permissions", {"permissions": [DENIED]}),
        (f"POST /api/session/{SES}/revert/clear", None),
        (ANSWERED, {"reply": "reject", "message": "no"}),
    ],
    "2.0.5": [
        (f"PATCH /api/session/{SES}", {"title": "New"}),
        (f"PATCH /api/session/{SES}", {"permissions": [DENIED]}),
        (f"POST /api/session/{SES}/revert/clear", None),
        (ANSWERED, {"reply": "reject", "message": "no"}),
    ],
    "2.0.10": [
        (f"PATCH /api/session/{SES}", {"title": "New"}),
        (f"PATCH /api/session/{SES}", {"permissions": [DENIED]}),
        (f"DELETE /api/session/{SES}/revert", None),
        (
            f"POST /api/session/{SES}/permission/{PER}/reply",
            {"decision": "reject", "message": "no"},
        ),
    ],
}
"""What is sent to each release to rename a session, to set its rules, and so on."""


@pytest.mark.parametrize("version", RELEASES)
async def test_calls_and_fields_are_those_of_the_contract(
    standin: Standin, driver: OpenCode2, version: str
) -> None:
    driver.contract = Contract.of(released(version))
    rule = PermissionRule(permission="bash", pattern="*", action="deny")
    standin.answers |= {named: None for named, _ in NAMES[version]}
    standin.answers |= {
        "GET /api/permission/request?location[directory]=/w": ASKED,
        f"GET /api/session/{SES}": {"data": SESSION},
        "POST /api/session": {"data": SESSION},
        f"GET /api/session/{SES}/diff?from=msg_1": {"data": []},
    }

    await driver.create_session(SessionDraft(title="First", metadata={"a": 1}))
    await driver.session_diff(SES, MessageId("msg_1"))
    await driver.update_session(SES, SessionChanges(title="New"))
    await driver.update_session(SES, SessionChanges(permission=[rule]))
    await driver.unrevert_session(SES)
    await driver.reply_permission(PER, "reject", "no", at=Location("/w"))

    sent = [(named, body) for named, body in standin.sent if not named.startswith("GET")]
    made = sent.pop(0)
    assert (made[0], made[1]["title"], made[1]["metadata"]) == (
        "POST /api/session",
        "First",
        {"a": 1},
    )
    assert sent == NAMES[version]
    assert (f"GET /api/session/{SES}/diff?from=msg_1", None) in standin.sent


async def test_a_call_that_the_contract_does_not_have_is_refused_by_name(
    standin: Standin, driver: OpenCode2
) -> None:
    driver.contract = Contract.of(
        changed(document(), {f"{ONE}/compact": None, f"{ONE}/rename": None})
    )

    with pytest.raises(NotInOpenCodeError, match=r"has no POST /api/session/\{\}/compact$"):
        await driver.summarize_session(SES, ModelRef("p", "m"))
    with pytest.raises(NotInOpenCodeError, match=r"has no POST /api/session/\{\}/rename$"):
        await driver.update_session(SES, SessionChanges(title="New"))

    assert standin.sent == []


async def test_a_file_is_read_wherever_it_lies(standin: Standin, driver: OpenCode2) -> None:
    standin.answers["GET /api/fs/read/src/a b.txt"] = {}

    assert (await driver.read_file("src/a b.txt")).content == "{}"


async def test_a_missing_path_that_turns_need_is_one_sentence_at_the_start(
    standin: Standin,
) -> None:
    standin.answers |= {
        "GET /api/info": {"version": "2.9.0", "pid": 1},
        "GET /openapi.json": changed(document(), {f"{ONE}/prompt": None}),
    }
    there = OpenCodeConnection(f"http://127.0.0.1:{standin.server_address[1]}")

    async with there:
        _, why = await examine(there.driver.raw_response, password=False)
        with pytest.raises(UpstreamError, match="OpenCode cannot be used: it is OpenCode 2"):
            await there.choose()

    assert why is not None
    assert why.what == "it is OpenCode 2 (2.9.0), and its API has no POST /api/session/{}/prompt"
    assert "npm install -g opencode-ai@" in why.remedy


async def test_a_renamed_field_of_messages_is_said_once(standin: Standin) -> None:
    contract = orjson.dumps(document())
    renamed = contract.replace(b'"cost":', b'"price":').replace(b'"write":', b'"w":')
    standin.answers |= {
        "GET /api/info": {"version": "2.9.0", "pid": 1},
        "GET /openapi.json": orjson.loads(renamed),
    }
    there = OpenCodeConnection(f"http://127.0.0.1:{standin.server_address[1]}")

    async with there:
        with capture_logs() as records:
            found = await there.choose()
            await there.choose()

    [said, _] = [record["event"] for record in records]
    assert found.unnamed == ("cost", "tokens.cache.write")
    assert said.startswith(
        "OpenCode 2.9.0 does not name what is read of its messages: cost, tokens"
    )
    finding = judge(found, None, "here")
    assert (said in (finding.remedy or ""), finding.failed) == (True, False)


async def test_a_missing_call_that_turns_can_do_without_is_said_once(standin: Standin) -> None:
    standin.answers |= {
        "GET /api/info": {"version": "2.9.0", "pid": 1},
        "GET /openapi.json": changed(document(), {"/api/shell/{id}": None}),
    }
    there = OpenCodeConnection(f"http://127.0.0.1:{standin.server_address[1]}")

    async with there:
        with capture_logs() as records:
            found = await there.choose()
            await there.choose()

    [said] = [record["event"] for record in records]
    assert said == (
        "OpenCode 2.9.0 lacks calls that turns can do without: "
        "DELETE /api/shell/{} (a cancel does not end commands in the background), "
        "GET /api/session/{}/diff (of the files that a turn changed, only those of edit and patch "
        "are told)"
    )
    remedy = judge(found, None, "here").remedy or ""
    assert remedy.startswith(f"{said}. OpenCode 2.9.0 was not tested with this service")


@pytest.mark.parametrize(
    ("build", "lacking"),
    [
        (
            "2-preview",
            [
                "DELETE /api/session/{}/pending/{}",
                "GET /api/session/{}/diff",
                "GET /api/config",
                "GET /api/vcs",
            ],
        ),
        ("2-branch", ["GET /api/session/{}/diff"]),
    ],
)
def test_what_the_recorded_contracts_lack_of_what_is_optional(
    build: str, lacking: list[str]
) -> None:
    assert [one.partition(" (")[0] for one in contract(build).lacking] == lacking


def test_what_is_left_out_without_a_call_is_said_to_be_off() -> None:
    sources = inspect.getsource(client) + inspect.getsource(catalogues)
    asked = set(re.findall(r"contract\.has\((.*?)\)", sources))
    optional = {call for names, _ in OPTIONAL for call in names}

    # Without rules of a session, profiles that need them are refused.
    constants = asked - {"*inbox", "*take_back", "*self._rules_call"}
    assert {getattr(contracts, name.removeprefix("*")) for name in constants} == {
        call for call in optional if call not in (*INBOX, *TAKE_BACK)
    }


async def test_the_version_is_kept_while_nothing_answers(standin: Standin) -> None:
    standin.answers |= {
        "GET /api/info": {"version": "2.9.0", "pid": 1},
        "GET /openapi.json": document(),
    }
    there = OpenCodeConnection(f"http://127.0.0.1:{standin.server_address[1]}")

    async with there:
        await there.choose()
        standin.shutdown()
        standin.server_close()
        found = await there.choose()

        assert (found.kind, there.driver.version) == (Kind.NOTHING, "2.9.0")


@pytest.mark.parametrize(("status", "kind"), [(None, Kind.NOTHING), (503, Kind.FAILING)])
async def test_a_contract_that_cannot_be_had_just_now_is_asked_for_again(
    standin: Standin, status: int | None, kind: Kind
) -> None:
    standin.answers["GET /api/info"] = {"version": "2.9.0", "pid": 1}
    there = OpenCodeConnection(f"http://127.0.0.1:{standin.server_address[1]}")

    async def answer(path: str) -> HttpResponse:
        if path != CONTRACT:
            return await there.driver.raw_response(path)
        if status is None:
            await asyncio.Event().wait()
        return HttpResponse(status or 0, {}, b'{"message": "starting"}')

    async with there:
        found, why = await examine(answer, password=False, seconds=0.5)

    assert (found.kind, found.lasting, why is None) == (kind, False, False)


async def test_always_is_never_sent(standin: Standin, driver: OpenCode2) -> None:
    with pytest.raises(NotInOpenCodeError, match="answer `once`"):
        await driver.reply_permission(PER, "always", at=Location("/w"))

    assert standin.sent == []
    assert not driver.features.always


@pytest.mark.parametrize(
    "read", [{}, {"resources": None}, {"resources": ["ls", 5]}, {"targets": ["rm x"]}]
)
async def test_a_permission_that_cannot_be_read_whole_is_asked_with_what_is_known(
    standin: Standin, driver: OpenCode2, read: Document
) -> None:
    given = {"id": PER, "sessionID": SES, "action": "shell", "source": {"id": "call_1"}, **read}
    standin.answers["GET /api/permission/request?location[directory]=/w"] = {"data": [given]}
    told = {"id": "evt_1", "type": "permission.asked", "data": given}

    [listed] = await driver.permissions(at=Location("/w"))
    [event] = Decoder2(Memory()).decode(orjson.dumps(told))

    assert isinstance(event, PermissionAsked)
    for asked in (listed, event):
        assert (asked.permission, asked.patterns) == ("bash", [])  # no rule or grant allows that
        assert asked.tool == ToolRef(message_id=MessageId(""), call_id="")  # of an unknown call


async def test_a_permission_that_is_not_pending_is_not_found(
    standin: Standin, driver: OpenCode2
) -> None:
    standin.answers["GET /api/permission/request?location[directory]=/w"] = {"data": []}

    with pytest.raises(UpstreamNotFoundError):
        await driver.reply_permission(PER, "once", at=Location("/w"))


SWITCHED = {"id": "msg_s", "type": "model-switched", "time": {"created": 1}}


@pytest.mark.parametrize("oldest", [[], [SWITCHED]])
async def test_an_answer_finds_its_prompt_on_an_earlier_page(
    standin: Standin, driver: OpenCode2, oldest: list[dict[str, Any]]
) -> None:
    prompt = {"id": "msg_0", "type": "user", "text": "hello", "time": {"created": 1}}
    answers: list[dict[str, Any]] = [
        {"id": f"msg_{n}", "type": "assistant", "content": [], "time": {"created": n}}
        for n in (2, 1)
    ]
    answers += oldest
    size = len(answers)
    path = f"GET /api/session/{SES}/message"
    standin.answers[f"{path}?limit={size}&order=desc"] = {
        "data": answers,
        "cursor": {"next": "older"},
    }
    standin.answers[f"{path}?cursor=older"] = {"data": [prompt], "cursor": {"next": None}}

    page = await driver.messages(SES, limit=size)

    assert [(one.info.id, getattr(one.info, "parent_id", None)) for one in page.items] == [
        ("msg_1", "msg_0"),
        ("msg_2", "msg_0"),
    ]
    assert page.next_cursor == "older"


@pytest.mark.parametrize("recorded", SEVERAL_STEPS, ids=str)
async def test_tool_calls_keep_their_order_when_the_service_is_restarted(
    standin: Standin, driver: OpenCode2, recorded: Path
) -> None:
    """At any moment. OpenCode goes on while its store is read, and an event leaves out what an
    earlier one said: the end of a call names neither tool nor input, an answer not its prompt."""
    recording, chance = Recording(recorded), random.Random(1)  # noqa: S311 - only a choice
    for at, event in reversed([*enumerate(recording.events)]):
        if event["type"] == "session.tool.called":  # a command says more before it has ended
            progress = {"id": f"{event['id']}-2", "type": "session.tool.progress"}
            data = {key: value for key, value in event["data"].items() if key != "input"}
            recording.events.insert(at + 1, event | progress | {"data": data})
    query = f"GET /api/session/{recording.root}/message?limit={PAGE}&order=desc"

    def calls(at: int) -> list[tuple[str, str]]:
        blocks = [block for one in recording.listed_at(at) for block in one.get("content", ())]
        tools = [block for block in blocks if block["type"] == "tool"]
        return [(one["id"], one["state"]["status"]) for one in tools]

    def shown(out: list[TurnEvent]) -> list[tuple[str, str]]:
        tools = [one for one in out if isinstance(one, ToolChanged)]
        return [*{one.call_id: one.status for one in tools}.items()]

    async def read(at: int) -> Snapshot:
        page = {"data": recording.listed_at(at)[::-1], "cursor": {"next": None}}
        standin.answers[query] = page
        messages = await messages_since(driver, recording.root, recording.prompt)
        return Snapshot(messages=messages, statuses={recording.root: StatusBusy()})

    for restarted in [*range(len(recording.events))] * 5:
        reader, emitted = TurnReader(recording.root, recording.prompt), Emitted()
        wire, out = driver.begin_decoding(), list[TurnEvent]()
        for event in recording.followed(0, restarted):
            out += reader.feed(wire.decode(event))
        for one in out:
            emitted.add(one)
        reader = TurnReader(recording.root, recording.prompt, emitted)
        wire, now = driver.begin_decoding(), restarted
        while now < len(recording.events):
            before, now = now, now + chance.randint(0, 8)
            for event in recording.followed(before, now):
                out += reader.feed(wire.decode(event))
            if reader.state.needs_reconcile:
                asked, now = now, now + chance.randint(0, 8)
                heard = [wire.decode(event) for event in recording.followed(asked, now)]
                out += reader.reconcile(await read(asked))
                for events in heard:
                    out += reader.feed(events)
            if not reader.state.needs_reconcile:
                ended = [one for one in calls(now) if one[1] != "running"]
                assert [one for one in shown(out) if one[1] != "running"] == ended
                began = [one for one in recording.listed_at(now) if one["type"] == "assistant"]
                known = reader.state.messages.assistant.values()
                assert [(one.id, one.finish, one.model_id) for one in known] == [
                    (one["id"], one["finish"], one["model"]["id"]) for one in began
                ]
        out += reader.finish(await read(now))

        assert shown(out) == calls(now)
        assert told(out) == recording.text


EARLIER = {"id": "msg_0", "type": "user", "text": "before", "time": {"created": 1}}


@every_build
async def test_a_turn_is_followed_when_a_new_connection_begins_before_its_delivery(
    standin: Standin, driver: OpenCode2, build: str
) -> None:
    """The store then has the prompt before it only."""
    recording = Recording(Path(build, "plain-text.jsonl"))
    query = f"GET /api/session/{recording.root}/message?limit={PAGE}&order=desc"
    reader, out = TurnReader(recording.root, recording.prompt), list[TurnEvent]()
    kinds = [event["type"].removeprefix("session.") for event in recording.events]
    delivered = next(at for at, kind in enumerate(kinds) if kind in DELIVERED)

    async def read(at: int) -> Snapshot:
        page = {"data": [*recording.listed_at(at)[::-1], EARLIER], "cursor": {"next": None}}
        standin.answers[query] = page
        messages = await messages_since(driver, recording.root, recording.prompt)
        return Snapshot(messages=messages, statuses={recording.root: StatusBusy()})

    wire = driver.begin_decoding()
    reader.state.require_reconcile()
    out += reader.reconcile(await read(delivered))
    for at in range(delivered, len(recording.events)):
        for event in recording.followed(at, at + 1):
            out += reader.feed(wire.decode(event))
        # Only the event before the first step has the store read.
        if kinds[at] in DELIVERED:
            out += reader.reconcile(await read(at + 1))

    assert told(out) == recording.text


@every_build
async def test_a_replica_that_takes_a_turn_over_knows_its_prompt(
    standin: Standin, driver: OpenCode2, build: str
) -> None:
    recording = Recording(Path(build, "plain-text.jsonl"))
    query = f"GET /api/session/{recording.root}/message?limit={PAGE}&order=desc"
    standin.answers[query] = {"data": [EARLIER], "cursor": {"next": None}}
    kinds = [event["type"].removeprefix("session.") for event in recording.events]
    started = kinds.index("step.started")
    begun, taken = asyncio.Event(), asyncio.Event()

    async def stream(sink: Callable[[bytes], object]) -> None:
        frames = [b"data: %b\n\n" % orjson.dumps(event) for event in recording.events]
        sink(frames[0])
        await driver.messages(recording.root, limit=PAGE)  # somebody lists them meanwhile
        sink(b"".join(frames[1:started]))
        begun.set()
        await taken.wait()
        sink(frames[started])
        await asyncio.Event().wait()

    feed = Feed(stream, driver.begin_decoding, keeps_texts=True)
    async with asyncio.timeout(10), asyncio.TaskGroup() as group:
        running = group.create_task(feed.run())
        await begun.wait()
        following = feed.follow(recording.root, recovered=True)
        taken.set()
        items = await following.batch()
        running.cancel()

    [answer] = [item.info for item in items if isinstance(item, MessageUpdated)]
    assert getattr(answer, "parent_id", None) == recording.prompt


async def test_work_of_an_earlier_turn_that_was_reported_does_not_delay_an_answer(
    standin: Standin, driver: OpenCode2
) -> None:
    recording = Recording(Path("2-branch", "background-shell.jsonl"))
    new: list[Document] = [
        {"id": "msg_new", "type": "user", "text": "again", "time": {"created": 1}},
        {"id": "msg_end", "type": "assistant", "content": [], "time": {"created": 2}},
    ]
    listed = [*recording.listed, *new][::-1]
    path = f"/api/session/{SES}"
    standin.answers |= {
        f"GET {path}": {"data": SESSION},
        f"DELETE {path}/instructions/entries/a2a": None,
        f"POST {path}/prompt": None,
        f"POST {path}/wait": None,
        f"GET {path}/message?limit=20&order=desc": {"data": listed},
    }

    answer = await driver.prompt(SES, Prompt(parts=[], message_id=MessageId("msg_new")))

    assert answer.info.id == "msg_end"
    assert "GET /api/session/active" not in [named for named, _ in standin.sent]


def shell_in_background(call: str, shell: str) -> Document:
    """Return an answer that has put a command into the background."""
    state: Document = {"status": "completed", "metadata": {"shellID": shell}}
    tool = {"type": "tool", "id": call, "name": "shell", "state": state}
    return {"id": f"msg_{call}", "type": "assistant", "content": [tool], "time": {"created": 1}}


async def prompted(
    standin: Standin,
    driver: OpenCode2,
    pages: Mapping[str, list[Document]],
    answers: Mapping[str, Any] | None = None,
) -> int:
    """Prompt a session with these messages, oldest first, by the cursors of their pages.

    Return how often OpenCode was asked what it runs; that is nothing.
    """
    path, cursors = f"/api/session/{SES}", [*pages, None]
    standin.answers |= {
        f"GET {path}": {"data": SESSION},
        f"GET {path}/inbox": {"data": []},
        f"DELETE {path}/instructions/entries/a2a": None,
        f"POST {path}/prompt": None,
        f"POST {path}/wait": None,
        "GET /api/session/active": {"data": {}},
        "GET /api/shell": {"data": []},
        **(answers or {}),
    }
    for number, (query, listed) in enumerate(pages.items()):
        older = cursors[number + 1]
        cursor = {"next": older and older.removeprefix("cursor=")}
        standin.answers[f"GET {path}/message?{query}"] = {"data": listed[::-1], "cursor": cursor}
    answer = await driver.prompt(SES, Prompt(parts=[], message_id=MessageId("msg_new")))
    assert answer.info.id == "msg_end"
    return [named for named, _ in standin.sent].count("GET /api/session/active")


NEW: Document = {"id": "msg_new", "type": "user", "text": "again", "time": {"created": 1}}
END: Document = {"id": "msg_end", "type": "assistant", "content": [], "time": {"created": 2}}


@pytest.mark.parametrize("listed", [[NEW], []])
async def test_a_prompt_without_an_answer_is_not_given_that_of_an_earlier_turn(
    standin: Standin, driver: OpenCode2, listed: list[Document], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "POLL_SECONDS", 1.0)
    monkeypatch.setattr(client, "AGENT_SECONDS", 1.0)

    with pytest.raises(UpstreamUnansweredError):
        await prompted(standin, driver, {"limit=20&order=desc": [EARLIER, END, *listed]})


async def test_a_prompt_that_is_given_up_does_not_run_with_the_next(
    standin: Standin, driver: OpenCode2, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "POLL_SECONDS", 0.01)
    monkeypatch.setattr(client, "AGENT_SECONDS", 0.02)
    inbox = f"/api/session/{SES}/inbox"
    waiting: Document = {"data": [{"id": "msg_other"}, {"id": "msg_new"}]}
    taken_back = {f"DELETE {inbox}/{one['id']}": None for one in waiting["data"]}
    pages, answers = (
        {"limit=20&order=desc": [EARLIER, END]},
        {f"GET {inbox}": waiting, **taken_back},
    )

    with pytest.raises(UpstreamUnansweredError):
        await prompted(standin, driver, pages, answers)

    deleted = [named for named, _ in standin.sent if named.startswith(f"DELETE {inbox}")]
    assert deleted == [f"DELETE {inbox}/msg_new"]


async def test_the_contract_says_whether_a_missing_reason_is_one_by_another_name(
    standin: Standin, driver: OpenCode2
) -> None:
    page: Document = {"data": [END | {"time": {"created": 2, "completed": 3}}], "cursor": {}}
    standin.answers[f"GET /api/session/{SES}/message?limit=1&order=desc"] = page
    found = list[str | None]()

    for unnamed in ((), ("finish",)):
        driver.contract = replace(driver.contract, unnamed=unnamed)
        [message] = (await driver.messages(SES, limit=1)).items
        assert isinstance(message.info, AssistantMessage)
        found.append(message.info.finish)

    assert found == [None, "stop"]


@pytest.mark.parametrize("failing", ["POST /wait", "GET /message?limit=20&order=desc"])
async def test_a_prompt_whose_answer_cannot_be_read_was_not_refused(
    standin: Standin, driver: OpenCode2, failing: str
) -> None:
    """The turn may well run: OpenCode has taken the prompt."""
    standin.failing = {failing.replace("/", f"/api/session/{SES}/", 1)}

    with pytest.raises(UpstreamUnreachableError):
        await prompted(standin, driver, {"limit=20&order=desc": [NEW, END]})


async def test_a_prompt_that_is_not_taken_is_refused(standin: Standin, driver: OpenCode2) -> None:
    standin.failing = {f"POST /api/session/{SES}/prompt"}

    with pytest.raises(UpstreamHttpError):
        await prompted(standin, driver, {"limit=20&order=desc": []})


async def test_lost_work_of_an_earlier_turn_delays_an_answer_by_one_look(
    standin: Standin, driver: OpenCode2
) -> None:
    lost = shell_in_background("call_1", "sh_1")

    looks = await prompted(standin, driver, {"limit=20&order=desc": [EARLIER, lost, NEW, END]})

    assert looks == 1


async def test_work_in_the_background_of_a_long_turn_is_found_on_an_earlier_page(
    standin: Standin, driver: OpenCode2
) -> None:
    """It is no longer run here; its end could be reported for some looks more."""
    pages = {"limit=20&order=desc": [END], "cursor=older": [NEW, shell_in_background("c", "sh_1")]}

    looks = await prompted(standin, driver, pages)

    assert looks == IDLE_LOOKS


async def test_work_in_the_background_that_was_stopped_is_not_waited_for(
    standin: Standin, driver: OpenCode2
) -> None:
    recording = Recording(Path("2-branch", "background-shell.jsonl"))
    root = recording.root
    kinds = [event["type"] for event in recording.events]
    end = kinds.index("session.execution.succeeded")
    standin.answers |= {
        f"POST /api/session/{root}/interrupt": None,
        f"GET /api/session/{root}": {"data": SESSION},
        f"GET /api/session?parentID={root}&limit=200": {"data": []},
        "GET /api/shell?location[directory]=/w": {"data": []},
        "GET /api/session/active": {"data": {}},
        f"GET /api/session/{root}/inbox": {"data": []},
    }
    decoder = driver.begin_decoding()
    for event in recording.followed(0, end + 1):
        decoder.decode(event)
    ended = orjson.dumps(recording.events[end] | {"id": "evt_later"})

    assert decoder.decode(ended) == []
    await driver.abort_session(root)

    [told] = decoder.decode(ended)
    assert isinstance(told, SessionStatusChanged)


@pytest.mark.requirement("I25")
async def test_an_odd_command_does_not_end_what_is_told_of_others(
    standin: Standin, driver: OpenCode2, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "LOOK_SECONDS", 0.01)
    output = "GET /api/shell/sh_1/output?location[directory]=/w&cursor=0"
    standin.answers[output] = {"data": {"output": "hello", "cursor": 5}}
    for shell in ("../../odd", "sh_1"):
        driver.memory.running[shell] = Running(SES, MessageId("msg_1"), "call_1", "/w")
    told = asyncio.Queue[bytes]()

    async with asyncio.timeout(10), asyncio.TaskGroup() as group:
        listening = group.create_task(driver.events(told.put_nowait))
        frame = await told.get()
        listening.cancel()

    assert b'"output":"hello"' in frame
    assert [named for named, _ in standin.sent if "odd" in named] == []


@pytest.mark.parametrize(("tool", "noted"), [("shell", ["sh_1"]), ("plugin", [])])
def test_only_the_tool_for_commands_names_one(tool: str, noted: list[str]) -> None:
    running = dict[str, Running]()
    data = {
        "sessionID": SES,
        "assistantMessageID": "msg_1",
        "id": "call_1",
        "name": tool,
        "metadata": {"shellID": "sh_1"},
    }
    event = {"id": "evt_1", "type": "session.tool.progress", "data": data}

    Decoder2(Memory(running=running)).decode(orjson.dumps(event))

    assert [*running] == noted


MODEL = {"id": "m", "providerID": "p"}
INSTRUCTIONS = f"/api/session/{SES}/instructions/entries/a2a"


@pytest.mark.parametrize(
    ("now", "prompt", "sent"),
    [
        ({}, {"system": "Be brief."}, [(f"PUT {INSTRUCTIONS}", {"value": "Be brief."})]),
        ({}, {}, [(f"DELETE {INSTRUCTIONS}", None)]),
        (
            MODEL | {"variant": "high"},
            {"model": MODEL},
            [
                (f"POST /api/session/{SES}/model", {"model": MODEL}),
                (f"DELETE {INSTRUCTIONS}", None),
            ],
        ),
        (MODEL | {"variant": "default"}, {"model": MODEL}, [(f"DELETE {INSTRUCTIONS}", None)]),
        (
            MODEL | {"variant": "high"},
            {"model": MODEL, "variant": "high"},
            [(f"DELETE {INSTRUCTIONS}", None)],
        ),
        (
            MODEL,
            {"variant": "high"},
            [
                (f"POST /api/session/{SES}/model", {"model": MODEL | {"variant": "high"}}),
                (f"DELETE {INSTRUCTIONS}", None),
            ],
        ),
        (
            None,
            {"variant": "high"},
            [
                (
                    f"POST /api/session/{SES}/model",
                    {"model": {"id": "default", "providerID": "p", "variant": "high"}},
                ),
                (f"DELETE {INSTRUCTIONS}", None),
            ],
        ),
    ],
)
async def test_what_an_earlier_prompt_set_does_not_hold_for_a_later_one(
    standin: Standin,
    driver: OpenCode2,
    now: Document | None,
    prompt: Document,
    sent: list[tuple[str, Any]],
) -> None:
    path = f"/api/session/{SES}"
    standin.answers |= {
        f"GET {path}": {"data": SESSION | ({"model": now} if now else {})},
        "GET /api/model/default": {"data": {"id": "default", "providerID": "p"}},
        f"POST {path}/prompt": None,
    }
    standin.answers |= {named: None for named, _ in sent}

    await driver.prompt_async(SES, Prompt.model_validate({"parts": [], **prompt}))

    assert [one for one in standin.sent if not one[0].startswith("GET")][:-1] == sent


async def test_nothing_but_a_variant_needs_to_know_the_default_model(
    standin: Standin, driver: OpenCode2
) -> None:
    driver.contract = Contract.of(changed(document(), {"/api/model/default": None}))
    info = {"default_agent": "mine"}
    standin.answers |= {
        f"GET /api/session/{SES}": {"data": SESSION},
        "GET /api/config": [{"type": "document", "info": info}],
        "GET /api/provider": {"data": [{"id": "p"}]},
        "GET /api/model": {"data": [{"id": "m", "providerID": "p"}]},
    }

    config = await driver.config()
    catalogue = await driver.provider_catalogue()
    with pytest.raises(NotInOpenCodeError):
        await driver.prompt_async(SES, Prompt(parts=[], variant="high"))

    assert (config.model, config.default_agent) == (None, "mine")
    assert catalogue.default == {"p": "m"}


async def test_rules_of_a_session_are_set_where_the_contract_has_them(
    standin: Standin, driver: OpenCode2
) -> None:
    rule = PermissionRule(permission="bash", pattern="*", action="deny")
    theirs = DENIED
    standin.answers[f"GET /api/session/{SES}"] = {"data": SESSION}
    standin.answers[f"POST /api/session/{SES}/permissions"] = None
    changes = SessionChanges(permission=[rule])

    without = await driver.update_session(SES, changes)
    driver.contract = Contract.of(released("2.0.4"))
    standin.answers[f"GET /api/session/{SES}"] = {"data": {**SESSION, "permissions": [theirs]}}
    reported = await driver.update_session(SES, changes)

    assert without.permission == []  # by which the profile is refused
    assert reported.permission == [rule]
    assert (
        f"POST /api/session/{SES}/permissions",
        {"permissions": [theirs, theirs]},
    ) in standin.sent


@pytest.mark.parametrize(
    ("kind", "given", "sent"),
    [
        ("integer", "42", 42),
        ("integer", str(-(2**63)), -(2**63)),
        ("integer", "9" * 25, "9" * 25),
        ("integer", "9" * 5000, "9" * 5000),
        ("integer", "many", "many"),
        ("number", "1e300", 1e300),
        ("number", "1e999", "1e999"),
        ("number", "-inf", "-inf"),
        ("number", "nan", "nan"),
    ],
)
async def test_a_number_that_json_does_not_have_is_sent_as_it_was_written(
    standin: Standin, driver: OpenCode2, kind: str, given: str, sent: Any
) -> None:
    form = {"id": "frm_1", "sessionID": SES, "fields": [{"key": "q0", "type": kind}]}
    reply = f"POST /api/session/{SES}/form/frm_1/reply"
    standin.answers |= {"GET /api/form/request": {"data": [form]}, reply: None}

    await driver.reply_question(RequestId("frm_1"), [[given]])

    assert standin.sent[-1] == (reply, {"answer": {"q0": sent}})


@pytest.mark.parametrize(
    ("given", "sent"),
    [("Yes ", True), ("no", False), ("maybe", "maybe"), (EXPIRED_MESSAGE, EXPIRED_MESSAGE)],
)
async def test_a_yes_or_no_that_nobody_gave_is_not_sent(
    standin: Standin, driver: OpenCode2, given: str, sent: Any
) -> None:
    """OpenCode refuses a text here, and the question is dismissed."""
    form = {"id": "frm_1", "sessionID": SES, "fields": [{"key": "q0", "type": "boolean"}]}
    reply = f"POST /api/session/{SES}/form/frm_1/reply"
    standin.answers |= {"GET /api/form/request": {"data": [form]}, reply: None}

    await driver.reply_question(RequestId("frm_1"), [[given]])

    assert standin.sent[-1] == (reply, {"answer": {"q0": sent}})


async def test_sessions_that_name_each_other_as_parents_are_all_busy(
    standin: Standin, driver: OpenCode2
) -> None:
    parents = {"ses_1": "ses_2", "ses_2": "ses_1"}
    standin.answers |= {
        "GET /api/session/active": {"data": {"ses_1": {}}},
        "GET /api/shell": {"data": []},
        **{
            f"GET /api/session/{one}": {"data": {**SESSION, "id": one, "parentID": parent}}
            for one, parent in parents.items()
        },
    }

    assert set(await driver.session_status()) == {"ses_1", "ses_2"}


async def test_a_turn_is_answered_and_stopped_although_no_more_calls_are_allowed(
    standin: Standin,
) -> None:
    place, child = "location[directory]=/w", {**SESSION, "id": "ses_child", "parentID": SES}
    fields = [{"key": "q0", "type": "string"}]
    forms = [{"id": f"frm_{n}", "sessionID": SES, "fields": fields} for n in (1, 2)]
    standin.answers |= {
        f"POST /api/session/{SES}/compact": None,
        f"POST /api/session/{SES}/wait": None,
        f"GET /api/permission/request?{place}": ASKED,
        f"GET /api/form/request?{place}": {"data": forms},
        ANSWERED: None,
        f"POST /api/session/{SES}/form/frm_1/reply": None,
        f"POST /api/session/{SES}/form/frm_2/cancel": None,
        f"POST /api/session/{SES}/interrupt": None,
        "POST /api/session/ses_child/interrupt": None,
        f"GET /api/session/{SES}": {"data": SESSION},
        f"GET /api/session?parentID={SES}&limit=200": {"data": [child]},
        "GET /api/session?parentID=ses_child&limit=200": {"data": []},
        f"GET /api/shell?{place}": {"data": []},
        "GET /api/session/active": {"data": {"ses_child": {}, SES: {}}},
        f"GET /api/session/{SES}/inbox": {"data": [{"id": "msg_9"}]},
        f"DELETE /api/session/{SES}/inbox/msg_9": None,
    }
    standin.hanging = {f"POST /api/session/{SES}/wait"}
    url, at = f"http://127.0.0.1:{standin.server_address[1]}", Location("/w")
    async with OpenCode2(url, max_concurrent_requests=1) as driver:
        driver.contract = contract()
        turn = asyncio.create_task(driver.summarize_session(SES, ModelRef("p", "m")))
        assert await asyncio.to_thread(standin.hangs.wait, 10)

        with pytest.raises(UpstreamBackpressureError):
            await driver.session(SES)
        await driver.reply_permission(PER, "once", at=at)
        await driver.reply_question(RequestId("frm_1"), [["a"]], at=at)
        await driver.reject_question(RequestId("frm_2"), at=at)
        await driver.health()
        assert SES in await driver.session_status(at=at)
        await driver.abort_session(SES)

        turn.cancel()
    done = [named for named, _ in standin.sent if not named.startswith("GET")]
    assert done[2:] == [
        ANSWERED,
        f"POST /api/session/{SES}/form/frm_1/reply",
        f"POST /api/session/{SES}/form/frm_2/cancel",
        f"POST /api/session/{SES}/interrupt",
        "POST /api/session/ses_child/interrupt",
        f"POST /api/session/{SES}/interrupt",
        f"DELETE /api/session/{SES}/inbox/msg_9",
    ]


async def test_an_abort_ends_work_in_the_background_and_takes_waiting_prompts_back(
    standin: Standin, driver: OpenCode2
) -> None:
    shells = [
        {"id": "sh_1", "status": "running", "metadata": {"sessionID": SES}},
        {"id": "sh_2", "status": "exited", "metadata": {"sessionID": SES}},
        {"id": "sh_3", "status": "running", "metadata": {"sessionID": "ses_other"}},
        {"id": "sh_4", "status": "running", "metadata": {"sessionID": "ses_grandchild"}},
    ]
    child = {**SESSION, "id": "ses_child", "parentID": SES}
    grandchild = {**SESSION, "id": "ses_grandchild", "parentID": "ses_child"}
    place = "location[directory]=/w"
    standin.answers |= {
        f"POST /api/session/{SES}/interrupt": None,
        "POST /api/session/ses_child/interrupt": None,
        f"GET /api/session/{SES}": {"data": SESSION},
        "POST /api/session/ses_grandchild/interrupt": None,
        f"GET /api/session?parentID={SES}&limit=200": {"data": [child]},
        "GET /api/session?parentID=ses_child&limit=200": {"data": [grandchild]},
        "GET /api/session?parentID=ses_grandchild&limit=200": {"data": []},
        f"GET /api/shell?{place}": {"data": shells},
        f"DELETE /api/shell/sh_1?{place}": None,
        f"DELETE /api/shell/sh_4?{place}": None,
        "GET /api/session/active": {"data": {SES: {"type": "running"}}},
        f"GET /api/session/{SES}/inbox": {"data": [{"id": "msg_9"}]},
        f"DELETE /api/session/{SES}/inbox/msg_9": None,
    }
    ended, lasting = (
        [*stored(SES, [Message2.model_validate(shell_in_background("call", shell))])]
        for shell in ("sh_1", "sh_3")
    )
    assert driver.leave_work(ended)

    await driver.abort_session(SES)

    assert (driver.leave_work(ended), driver.leave_work(lasting)) == (False, True)

    done = [named for named, _ in standin.sent if not named.startswith("GET")]
    assert done == [
        f"POST /api/session/{SES}/interrupt",
        "POST /api/session/ses_child/interrupt",
        "POST /api/session/ses_grandchild/interrupt",
        f"DELETE /api/shell/sh_1?{place}",
        f"DELETE /api/shell/sh_4?{place}",
        f"POST /api/session/{SES}/interrupt",  # the end of a command wakes the session
        f"DELETE /api/session/{SES}/inbox/msg_9",
    ]


@pytest.mark.requirement("I7")
async def test_an_abort_takes_prompts_back_although_commands_cannot_be_ended(
    standin: Standin, driver: OpenCode2
) -> None:
    driver.contract = Contract.of(changed(document(), {"/api/shell/{id}": None}))
    shell = {"id": "sh_1", "status": "running", "metadata": {"sessionID": SES}}
    standin.answers |= {
        f"POST /api/session/{SES}/interrupt": None,
        f"GET /api/session/{SES}": {"data": SESSION},
        f"GET /api/session?parentID={SES}&limit=200": {"data": []},
        "GET /api/shell?location[directory]=/w": {"data": [shell]},
        "GET /api/session/active": {"data": {}},
        f"GET /api/session/{SES}/inbox": {"data": [{"id": "msg_9"}]},
        f"DELETE /api/session/{SES}/inbox/msg_9": None,
    }
    running = [*stored(SES, [Message2.model_validate(shell_in_background("call", "sh_1"))])]

    await driver.abort_session(SES)

    done = [named for named, _ in standin.sent if not named.startswith("GET")]
    assert done == [
        f"POST /api/session/{SES}/interrupt",
        f"DELETE /api/session/{SES}/inbox/msg_9",
    ]
    assert {*await driver.session_status(at=Location("/w"))} == {SES}
    assert driver.leave_work(running)


async def test_a_request_of_a_sub_agent_that_was_deleted_is_gone_but_not_the_turns_session(
    standin: Standin, driver: OpenCode2
) -> None:
    asked = ASKED["data"][0] | {"sessionID": "ses_child"}
    field = {"key": "q0", "type": "string"}
    form = {"id": "frm_1", "sessionID": "ses_child", "fields": [field]}
    standin.answers |= {
        "GET /api/permission/request": {"data": [asked]},
        "GET /api/form/request": {"data": [form]},
    }

    with pytest.raises(UpstreamNotFoundError):
        await driver.reply_permission(PER, "once")
    with pytest.raises(UpstreamNotFoundError):
        await driver.reply_question(RequestId("frm_1"), [["a"]])
    with pytest.raises(UpstreamNotFoundError):
        await driver.reject_question(RequestId("frm_1"))


@pytest.mark.parametrize("inbox", ["inbox", "pending"])
async def test_an_abort_goes_on_past_a_sub_agent_that_was_deleted(
    standin: Standin, driver: OpenCode2, inbox: str
) -> None:
    known = driver.contract.endpoints.items()
    named = {(how, path.replace("/inbox", f"/{inbox}")): fields for (how, path), fields in known}
    driver.contract = replace(driver.contract, endpoints=named)
    gone = {**SESSION, "id": "ses_child", "parentID": SES}
    taken_back = f"DELETE /api/session/{SES}/{inbox}/msg_9"
    standin.answers |= {
        f"POST /api/session/{SES}/interrupt": None,
        f"GET /api/session/{SES}": {"data": SESSION},
        f"GET /api/session?parentID={SES}&limit=200": {"data": [gone]},
        "GET /api/session?parentID=ses_child&limit=200": {"data": []},
        "GET /api/session/active": {"data": {SES: {}}},
        "GET /api/shell?location[directory]=/w": {"data": []},
        f"GET /api/session/{SES}/{inbox}": {"data": [{"id": "msg_9"}]},
        taken_back: None,
    }

    assert await driver.abort_session(SES)
    assert standin.sent[-1] == (taken_back, None)


async def test_a_session_is_busy_while_a_command_or_a_sub_agent_works_for_it(
    standin: Standin, driver: OpenCode2
) -> None:
    shell = {"id": "sh_1", "status": "running", "metadata": {"sessionID": "ses_3"}}
    child = {**SESSION, "id": "ses_child", "parentID": SES}
    standin.answers |= {
        "GET /api/session/active": {"data": {"ses_child": {"type": "running"}}},
        "GET /api/shell?location[directory]=/w": {"data": [shell]},
        "GET /api/session/ses_child": {"data": child},
        f"GET /api/session/{SES}": {"data": SESSION},
    }

    busy = await driver.session_status(at=Location("/w"))

    assert {*busy} == {SES, "ses_child", "ses_3"}


MSG = MessageId("msg_1")
BY_SCHEMA = Prompt(parts=[], format=OutputFormat(json_schema={}))
LACKS: dict[Feature | None, list[tuple[str, tuple[object, ...]]]] = {
    "schemas": [("prompt", (SES, BY_SCHEMA)), ("prompt_async", (SES, BY_SCHEMA))],
    "todos": [("session_todo", (SES,))],
    "sharing": [("share_session", (SES,)), ("unshare_session", (SES,))],
    "workspaces": [
        ("workspaces", ()),
        ("create_workspace", (WorkspaceDraft(type="worktree"),)),
        ("remove_workspace", ("wrk_1",)),
    ],
    "worktrees": [
        ("worktrees", ()),
        ("create_worktree", ()),
        ("remove_worktree", ("/w",)),
        ("reset_worktree", ("/w",)),
    ],
    None: [
        ("find_text", ("x",)),
        ("tool_ids", ()),
        ("revert_session", (SES, MSG, "prt_1")),
        ("create_session", (SessionDraft(parent_id=SES),)),
    ],
}
"""What callers may ask for in vain, with the methods of the driver that refuse it."""


@pytest.mark.parametrize(("name", "given"), [call for calls in LACKS.values() for call in calls])
async def test_what_2_cannot_do_is_refused_by_name(
    standin: Standin, driver: OpenCode2, name: str, given: tuple[object, ...]
) -> None:
    with pytest.raises(NotInOpenCodeError, match="OpenCode 2 has no"):
        await getattr(driver, name)(*given)

    assert standin.sent == []


def test_cards_leave_out_just_what_the_driver_always_refuses() -> None:
    sources = inspect.getsource(client) + inspect.getsource(catalogues)
    refusing = {
        one.name
        for one in ast.walk(ast.parse(sources))
        if isinstance(one, ast.AsyncFunctionDef) and isinstance(one.body[-1], ast.Raise)
        if len(one.body) == 1
    }

    assert {*LACKS} - {None} == MISSING
    assert refusing <= {name for calls in LACKS.values() for name, _ in calls}


def test_a_rule_for_a_tool_that_may_exist_is_not_doubted(standin: Standin) -> None:
    standin.answers |= {
        "GET /api/info": {"version": "2.9.0"},
        "GET /openapi.json": document(),
        "GET /api/mcp": {"data": []},
    }
    variables = {
        "OPENCODE_BASE_URL": f"http://127.0.0.1:{standin.server_address[1]}",
        "A2A_PERMISSION_RULES": '[{"permission": "plugin_tool", "action": "allow"}]',
    }

    assert [*check_rules(load({}, variables))] == []


# Data


def database(path: Path, *tables: str) -> Path:
    with closing(sqlite3.connect(path)) as made:
        for table in tables:
            made.execute(f"CREATE TABLE {table} (id TEXT)")
    return path


def test_data_of_the_other_generation_is_not_touched(tmp_path: Path) -> None:
    first = database(tmp_path / "1.db", "session", "todo", "session_input")
    second = database(tmp_path / "2.db", "session", "session_pending")
    one, two = of_version("1.18.33"), of_version("2.2.6")
    preview = Found(Kind.V2, "0.0.0-next-16350")

    assert (owner_of(first), owner_of(second)) == (Kind.V1, Kind.V2)
    assert owner_of(tmp_path / "none.db") is None
    assert conflict(Kind.V1, one, first) is conflict(Kind.V2, two, second) is None
    assert conflict(Kind.V1, preview, first) is None
    refused = conflict(Kind.V1, two, first)
    assert refused is not None
    assert refused.startswith(f"{first} belongs to OpenCode 1, and OpenCode 2 would spoil it")
    assert conflict(Kind.V2, one, second) is not None


@pytest.mark.linux_only
async def test_a_managed_opencode_2_is_not_started_on_the_data_of_1(tmp_path: Path) -> None:
    program, place = tmp_path / "opencode", tmp_path / "data" / "opencode"
    started = tmp_path / "started"
    program.write_text(f"#!/bin/sh\n[ $1 = --version ] && echo 2.2.6 || touch {started}\n")
    program.chmod(0o755)
    place.mkdir(parents=True)
    database(place / "opencode.db", "todo")
    variables = {**os.environ, "XDG_DATA_HOME": str(tmp_path / "data")}

    with pytest.raises(UnsupportedOpenCodeError, match="belongs to OpenCode 1"):
        async with ManagedOpenCode(OpenCodeSettings(command=str(program)), variables):
            pass

    assert not started.exists()


@pytest.mark.parametrize(
    ("report", "left"),
    [
        ('<shell id="call_1" state="completed">', ["sh_2", "sh_3", "ses_4"]),
        ('<shell id="call_12" state="completed">', ["sh_1", "sh_2", "ses_4"]),
        ('<shell id="call_1"></shell><shell id="call_1"></shell>', ["sh_3", "ses_4"]),
        ('<subagent sessionID="ses_4" state="completed">', ["sh_1", "sh_2", "sh_3"]),
        ("Command sh_2 has ended.", ["sh_1", "sh_3", "ses_4"]),
        ("call_123", ["sh_1", "sh_2", "sh_3", "ses_4"]),
    ],
)
def test_a_report_ends_the_work_that_it_names_and_no_other(report: str, left: list[str]) -> None:
    background = {"sh_1": "call_1", "sh_2": "call_1", "sh_3": "call_12", "ses_4": "call_4"}

    assert [*unreported(background, report)] == left
