"""Recorded events decode, foreign ones are ignored, malformed ones are named as such."""

import orjson
import pytest

from opencode_a2a.events import Emitted, Progressed
from opencode_a2a.ids import MessageId, SessionId
from opencode_a2a.opencode.events import (
    EVENTS,
    FOLLOWED,
    MalformedEventError,
    PartDelta,
    PartUpdated,
    PermissionAsked,
    SessionStatusChanged,
    decode,
    head_of,
)
from opencode_a2a.opencode.types import StatusRetry, ToolRef, UnknownPart
from tests.support.opencode_state import NAMES, frames

DELTA = {
    "sessionID": "ses_1",
    "messageID": "msg_1",
    "partID": "prt_1",
    "field": "text",
    "delta": 'a "b"\n',
}


def frame(kind: str, properties: object) -> bytes:
    return orjson.dumps(
        {
            "directory": '/a "sessionID":"ses_9" b',
            "payload": {"id": "evt_1", "type": kind, "properties": properties},
        }
    )


@pytest.mark.parametrize("name", NAMES)
def test_every_recorded_event_is_decoded_or_foreign(name: str) -> None:
    for data in frames(name):
        payload = orjson.loads(data)["payload"]
        kind, session = head_of(data)
        event = decode(data)

        assert kind.decode() == payload["type"]
        assert (event is not None) == (kind in FOLLOWED)
        if event is not None:
            assert session.decode() == event.session_id
            assert event.event_id == payload.get("id", "")


def test_a_delta_is_taken_as_it_is() -> None:
    assert decode(frame("message.part.delta", DELTA)) == PartDelta(
        "evt_1", SessionId("ses_1"), MessageId("msg_1"), "prt_1", 'a "b"\n'
    )


def test_growth_of_another_field_is_no_text() -> None:
    assert decode(frame("message.part.delta", DELTA | {"field": "raw"})) is None


def test_no_text_inside_a_string_is_taken_for_a_key() -> None:
    data = frame("message.part.delta", DELTA)
    assert head_of(data) == (b"message.part.delta", b"ses_1")


def test_a_frame_of_the_server_has_no_session() -> None:
    data = b'{"payload":{"id":"evt_1","type":"server.heartbeat","properties":{}}}'
    assert head_of(data) == (b"server.heartbeat", b"")


def test_the_second_copy_of_a_durable_event_is_foreign() -> None:
    copies = [data for data in frames("plain-text-global") if head_of(data)[0] == b"sync"]

    assert copies
    assert [decode(data) for data in copies] == [None] * len(copies)


def test_an_event_of_one_directory_has_no_envelope() -> None:
    status = {"type": "retry", "attempt": 2, "message": "busy", "next": 5}
    event = decode(
        orjson.dumps(
            {
                "id": "evt_1",
                "type": "session.status",
                "properties": {"sessionID": "ses_1", "status": status, "new": 1},
            }
        )
    )

    assert isinstance(event, SessionStatusChanged)
    assert event.status == StatusRetry(attempt=2, message="busy", next=5)


def test_an_interrupt_knows_the_directory_that_its_answer_needs() -> None:
    asked = {"id": "per_1", "sessionID": "ses_1", "permission": "bash"}

    event = decode(frame("permission.asked", asked))

    assert isinstance(event, PermissionAsked)
    assert event.directory == '/a "sessionID":"ses_9" b'


@pytest.mark.parametrize("patterns", [{}, {"patterns": None}, {"patterns": ["ls", 5]}])
def test_a_permission_that_cannot_be_read_whole_is_asked_with_what_is_known(
    patterns: dict[str, object],
) -> None:
    asked = {"id": "per_1", "sessionID": "ses_1", "permission": "bash", "tool": {"callID": "c"}}

    event = decode(frame("permission.asked", asked | patterns))

    assert isinstance(event, PermissionAsked)
    assert (event.permission, event.patterns) == ("bash", [])  # which no rule and no grant allows
    assert event.tool == ToolRef(message_id=MessageId(""), call_id="")  # of an unknown call


def test_a_part_of_a_new_kind_is_no_error() -> None:
    part = {"id": "prt_1", "sessionID": "ses_1", "messageID": "msg_1", "type": "hologram"}

    event = decode(frame("message.part.updated", {"sessionID": "ses_1", "part": part}))

    assert isinstance(event, PartUpdated)
    assert isinstance(event.part, UnknownPart)


@pytest.mark.parametrize("kind", ["message.part.delta", *EVENTS])
@pytest.mark.parametrize(
    "properties", [None, [], {}, {"sessionID": 5}, {"sessionID": "ses_1"} | {"delta": 5}]
)
def test_a_known_event_of_another_shape_is_malformed(kind: str, properties: object) -> None:
    if kind in ("session.idle", "session.error", "session.deleted") and properties:
        properties = {"sessionID": 5}

    with pytest.raises(MalformedEventError):
        decode(frame(kind, properties))


@pytest.mark.parametrize("data", [b"", b"{", b"null", b"[]", b'"x"', b"{}", b'{"payload":5}'])
def test_what_is_no_event_is_malformed(data: bytes) -> None:
    with pytest.raises(MalformedEventError):
        decode(data)


def test_half_a_character_is_replaced() -> None:
    properties = {"sessionID": "ses_1", "messageID": "msg_1", "partID": "prt_1", "field": "text"}
    data = frame("message.part.delta", {**properties, "delta": "half"})

    event = decode(data.replace(b"half", rb"a \ud83d b"))

    assert isinstance(event, PartDelta)
    assert event.delta == "a \N{REPLACEMENT CHARACTER} b"


@pytest.mark.parametrize(
    ("before", "after", "again"),
    [
        (Progressed("step-start", "running", "a"), Progressed("step-start", "running", "b"), True),
        (Progressed("subagent", "running", "a"), Progressed("subagent", "completed", "a"), True),
        (
            Progressed("subagent", "running", "a"),
            Progressed("subagent", "running", "a", title="New"),
            False,
        ),
        (Progressed("retry", "waiting"), Progressed("retry", "waiting"), True),
        (
            Progressed("todo", "updated", todos=[{"content": "1"}]),
            Progressed("todo", "updated", todos=[{"content": "1"}]),
            False,
        ),
        (
            Progressed("todo", "updated", todos=[{"content": "1"}]),
            Progressed("todo", "updated", todos=[]),
            True,
        ),
    ],
)
def test_progress_is_emitted_again_only_if_it_is_news(
    before: Progressed, after: Progressed, again: bool
) -> None:
    emitted = Emitted()
    assert emitted.is_news(before)

    emitted.add(before)

    assert emitted.is_news(after) is again
