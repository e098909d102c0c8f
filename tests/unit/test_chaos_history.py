"""The rules of a chaos run: each one is broken by a made-up history."""

from copy import deepcopy
from dataclasses import replace
from typing import Any

import orjson
import pytest

from tests.chaos.cluster import tracebacks
from tests.chaos.history import (
    AbortAsked,
    CancelAsked,
    Ended,
    Fault,
    History,
    Moved,
    Owned,
    Prompted,
    Read,
    Registered,
    Replied,
    Sent,
    StoredTask,
    Told,
    Unexpected,
    Written,
    take_overs,
    violations,
)


def status(state: str, said: str = "") -> bytes:
    update = {"status": {"state": f"TASK_STATE_{state.upper()}", "message": said}}
    return orjson.dumps({"statusUpdate": update})


def text(piece: str) -> bytes:
    return orjson.dumps({"artifactUpdate": {"artifact": {"parts": [{"text": piece}]}}})


def told(at: float, cursor: str, body: bytes, reading: int = 1, replica: str = "r1") -> Told:
    return Told(at, 7, reading, replica, "task", cursor, body)


SNAPSHOT = b'{"task":{"id":"task"}}'
BEFORE_THE_KILL: dict[str, Any] = {
    "written": [Written(1, 1, 1, 1, 1, False, 1, True), Written(2, 1, 2, 3, 1, False, 1, True)],
    "moved": [Moved(1, 1, "submitted"), Moved(2, 1, "working")],
}
LOG = [
    told(0, "1", status("submitted"), 0),
    told(0, "2", text("one ")),
    told(0, "3", text("two ")),
    told(0, "5.1", text("two ")),
    told(0, "6.1", status("completed")),
]


def history() -> History:
    """A task whose replica is killed, and which another one takes over, as it should be."""
    return History(
        seed=1,
        sent=[
            Sent(1, 7, "r1", "m1", "token", "one two ", "task"),
            Sent(2, 7, "r2", "m2", "token", "one two ", "task", answers=True),
        ],
        reads=[
            Read(3, 3, 7, "r2", "task", "working", "one "),
            Read(21, 22, 7, "r3", "task", "completed", "one two "),
        ],
        told=[
            told(1, "1", SNAPSHOT),
            told(2, "2", text("one ")),
            told(3, "3", text("two ")),
            told(4, "4", text("lost ")),
            told(18, "5.1", SNAPSHOT, 2, "r2"),
            told(20, "6.1", status("completed"), 2, "r2"),
        ],
        faults=[Fault(5, 6, "kill", "r1")],
        prompted=[
            Prompted(1, "a", "ses", "msg", "token", again=False),
            Prompted(9, "a", "ses", "msg", "token", again=True),
        ],
        replied=[Replied(3, "a", "ses", "per", "once")],
        written=[*BEFORE_THE_KILL["written"], Written(12, 1, 4, 6, 2, False, 2, True)],
        moved=[*BEFORE_THE_KILL["moved"], Moved(12, 1, "completed")],
        owned=[Owned(0, "a", 1), Owned(10, "a", 2)],
        registered=[Registered(0, 1, "r1"), Registered(0, 2, "r2"), Registered(7, 3, "r1")],
        tasks=[StoredTask(1, "task", "completed", "a")],
        logs={"task": LOG},
        tallies={"completed": 1},
        memory=[("r1", 80, 90)],
        connections=(18, 18),
    )


def test_what_should_be_violates_nothing() -> None:
    assert violations(history()) == []


LATE = [Written(25, 1, 4, 6, 2, False, 2, True), Moved(25, 1, "completed")]
CANCELED = [
    Sent(11, 7, "r2", "m3", "more", "three ", "b"),
    Prompted(11, "a", "ses2", "msg2", "more", again=False),
    CancelAsked(12, 7, "r2", "b"),
    *(Moved(11, 2, "submitted"), Moved(13, 2, "canceled")),
    StoredTask(2, "b", "canceled", "a"),
]
LISTS = {
    Sent: "sent",
    Read: "reads",
    Told: "told",
    Prompted: "prompted",
    Replied: "replied",
    Ended: "ended",
    AbortAsked: "aborts",
    CancelAsked: "cancels",
    Fault: "faults",
    Written: "written",
    Moved: "moved",
    StoredTask: "tasks",
    Unexpected: "unexpected",
}
WRONG: dict[str, tuple[str, list[Any], dict[str, Any]]] = {
    # what is wrong: the rule, records that are added, and fields that are replaced before
    "a message has two tasks": (
        "one task",
        [Sent(1, 7, "r1", "m1", "token", "", "b"), StoredTask(2, "b", "completed", "a")],
        {"tallies": {"completed": 2}},
    ),
    "a task is gone": ("one task", [Sent(1, 7, "r1", "m3", "more", "text", "lost")], {}),
    "a task never ends": (
        "one end",
        [StoredTask(2, "other", "working", "b")],
        {"tallies": {"completed": 1, "working": 1}},
    ),
    "a stream has another end": ("one end", [told(30, "7.1", status("failed"), 9)], {}),
    "a read has another end": ("one end", [Read(1, 1, 7, "r1", "task", "canceled", "")], {}),
    "an ended task works": ("one end", [Read(23, 24, 7, "r1", "task", "working", "one ")], {}),
    "a message starts two turns": (
        "one prompt",
        [Prompted(9, "a", "ses", "another", "token", again=False)],
        {},
    ),
    "a completed task had no turn": ("one prompt", [], {"prompted": [], "replied": []}),
    "a request is answered twice": ("one reply", [Replied(4, "a", "ses", "per", "once")], {}),
    "a request is answered again when it is settled": (
        "one reply",
        [Replied(4, "a", "ses", "per", "once", taken=False)],
        {},
    ),
    "a replica died and its task failed": (
        "a reason",
        [Moved(12, 2, "submitted"), Moved(13, 2, "failed"), StoredTask(2, "b", "failed", "a")],
        {"tallies": {"completed": 1, "failed": 1}},
    ),
    "another OpenCode died and a task failed": (
        "a reason",
        [
            Fault(11, 12, "opencode", "b"),
            *(Moved(12, 2, "submitted"), Moved(13, 2, "failed")),
            StoredTask(2, "b", "failed", "a"),
        ],
        {"tallies": {"completed": 1, "failed": 1}},
    ),
    "a task was canceled by nobody": (
        "a reason",
        [Moved(12, 2, "canceled"), StoredTask(2, "b", "canceled", "a")],
        {"tallies": {"completed": 1, "canceled": 1}},
    ),
    "a task was rejected by nobody": (
        "a reason",
        [Moved(12, 2, "rejected"), StoredTask(2, "b", "rejected", "a")],
        {"tallies": {"completed": 1, "rejected": 1}},
    ),
    "a canceled turn goes on": ("stopped", CANCELED, {"tallies": {"completed": 1, "canceled": 1}}),
    "a canceled turn ends by itself later": (
        "stopped",
        [*CANCELED, Ended(20, "a", "msg2", "more", aborted=False)],
        {"tallies": {"completed": 1, "canceled": 1}},
    ),
    "another replica says something else": ("same bytes", [told(30, "2", text("x "), 5, "r3")], {}),
    "another replica words it differently": (
        "same bytes",
        [told(30, "6.1", status("completed", "in other words"), 5, "r3")],
        {"earlier": "r2"},
    ),
    "an earlier version says something else": (
        "same bytes",
        [told(30, "2", text("x "), 5, "r3")],
        {"earlier": "r3"},
    ),
    "the log says something else": (
        "same bytes",
        [],
        {"logs": {"task": [*LOG[:2], told(0, "3", text("other ")), *LOG[3:]]}},
    ),
    "an entry is missing": (
        "no gap",
        [told(30, "1", status("submitted"), 5), told(31, "3", text("two "), 5)],
        {},
    ),
    "an entry after the task is missing": (
        "no gap",
        [told(30, "1", SNAPSHOT, 5), told(31, "3", text("two "), 5)],
        {},
    ),
    "an entry comes twice": (
        "no gap",
        [told(30, "2", text("one "), 5), told(31, "2", text("one "), 5)],
        {},
    ),
    "an entry that was not stored precedes a stored one": (
        "no gap",
        [told(30, "4", text("lost "), 5), told(31, "5.1", text("two "), 5)],
        {},
    ),
    "OpenCode did not say that": (
        "same text",
        [Read(1, 1, 7, "r1", "task", "working", "two ")],
        {},
    ),
    "text is missing in the end": (
        "same text",
        [Read(23, 24, 7, "r1", "task", "completed", "one ")],
        {},
    ),
    "nobody approved": (
        "asked first",
        [],
        {"sent": [Sent(1, 7, "r1", "m1", "token", "one two ", "task")]},
    ),
    "written without a fence": ("not fenced", [Written(12, 1, 7, 7, None, False, 2, True)], {}),
    "written by a replica that is gone": (
        "not fenced",
        [Written(12, 1, 7, 7, 1, True, 2, True)],
        {},
    ),
    "written by a replica that is not the owner": (
        "not fenced",
        [Written(12, 1, 7, 7, 3, False, 2, True)],
        {},
    ),
    "wrong tallies": ("tallies", [], {"tallies": {"completed": 2}}),
    "taken over late": ("taken over", LATE, BEFORE_THE_KILL),
    "taken over late, when the killed replica was back": (
        "taken over",
        LATE,
        {**BEFORE_THE_KILL, "faults": [Fault(5, 24, "kill", "r1")]},
    ),
    "taken over late, though the killed replica had stored something last": (
        "taken over",
        [Written(5.1, 1, 4, 4, 1, False, 1, True), *LATE],
        BEFORE_THE_KILL,
    ),
    "never taken over": ("taken over", [], BEFORE_THE_KILL),
    "memory grew": ("back at the start", [], {"memory": [("r2", 80, 400)]}),
    "connections are left": ("back at the start", [], {"connections": (18, 30)}),
    "an internal error": ("nothing unexpected", [Unexpected(3, "client 7", "500", "task")], {}),
}


def spoilt(records: list[Any], fields: dict[str, Any]) -> History:
    changed = replace(history(), **fields)
    for record in records:
        getattr(changed, LISTS[type(record)]).append(record)
    return changed


@pytest.mark.parametrize(("rule", "records", "fields"), WRONG.values(), ids=WRONG)
def test_what_is_wrong_is_found(rule: str, records: list[Any], fields: dict[str, Any]) -> None:
    assert {one.rule for one in violations(spoilt(records, deepcopy(fields)))} == {rule}


def test_a_further_fault_gives_more_time() -> None:
    late = spoilt(LATE, deepcopy(BEFORE_THE_KILL))
    late.faults.append(Fault(12, 18, "database", "postgresql"))
    assert violations(late) == []


RIGHT: dict[str, list[Any]] = {
    "a canceled turn was stopped": [AbortAsked(12.5, "a", "ses2")],
    "a canceled turn had ended by itself": [Ended(12.9, "a", "msg2", "more", aborted=False)],
    "the OpenCode of a canceled turn died": [Fault(12, 14, "opencode", "a")],
}


@pytest.mark.parametrize("records", RIGHT.values(), ids=RIGHT)
def test_a_cancel_that_came_true_violates_nothing(records: list[Any]) -> None:
    tallies = {"completed": 1, "canceled": 1}
    assert violations(spoilt([*CANCELED, *records], {"tallies": tallies})) == []


def test_a_task_may_fail_with_its_opencode() -> None:
    records = [Moved(12, 2, "submitted"), Moved(13, 2, "failed"), StoredTask(2, "b", "failed", "a")]
    tallies = {"completed": 1, "failed": 1}
    died = spoilt([*records, Fault(12, 13, "opencode", "a")], {"tallies": tallies})
    assert violations(died) == []


def test_an_answer_may_be_given_again_by_the_next_owner() -> None:
    given = spoilt([Replied(11, "a", "ses", "per", "once", taken=False)], {})
    assert violations(given) == []


def test_an_earlier_version_may_word_a_status_differently() -> None:
    last = told(30, "6.1", status("completed", "in other words"), 5, "r3")
    assert violations(spoilt([last], {"earlier": "r3"})) == []


def test_what_a_stopped_replica_ends_itself_is_not_taken_over() -> None:
    stopped = replace(history(), faults=[Fault(5, 40, "term", "r1")])
    assert [round(one.seconds, 1) for one in take_overs(stopped)] == [7.0]
    last = [Written(7, 1, 4, 6, 1, False, 1, True), Moved(7.01, 1, "completed")]
    ended = spoilt(last, {**deepcopy(BEFORE_THE_KILL), "faults": stopped.faults})
    assert list(take_overs(ended)) == []
    assert violations(ended) == []


def test_a_slow_machine_gives_more_time_up_to_a_bound() -> None:
    late = spoilt(LATE, deepcopy(BEFORE_THE_KILL))
    late.pulses = [(at, 3.0) for at in range(5, 40)]
    assert violations(late) == []
    much_later = [Written(85, 1, 4, 6, 2, False, 2, True), Moved(85, 1, "completed")]
    stuck = spoilt(much_later, deepcopy(BEFORE_THE_KILL))
    stuck.pulses = [(at, 12.0) for at in range(5, 100)]
    assert [one.text for one in violations(stuck)] == [
        "went on only 80.0 s after kill of r1 at 5.000; 32.0 s are allowed"
    ]


def test_a_traceback_is_kept_whole() -> None:
    logged = {"event": "failed", "task_id": "task", "exception": 'Traceback\n  File "a.py"\nError'}
    chained = ["Traceback (most recent call last):", '  File "a.py"', "ValueError: 1", "", "of two"]
    printed = ["{}", *chained, orjson.dumps(logged).decode(), "{}", "Traceback: short"]

    found = tracebacks(printed)

    assert found == [
        ("\n".join(chained), None),
        ('event: failed\ntask_id: task\nexception: Traceback\n  File "a.py"\nError', "task"),
        ("Traceback: short", None),
    ]
    seen = history()
    seen.unexpected.append(Unexpected(3, "r1", *found[1]))
    (line,) = (line for line in seen.about("task") if "Traceback" in line)
    assert line.splitlines()[-2:] == [f'{"":9}  File "a.py"', f"{'':9}Error"]
    (violation,) = violations(seen)
    assert violation.text.endswith('\n  File "a.py"\nError')


def test_the_history_of_a_task_is_told_in_order() -> None:
    about = history().about("task")
    times = [float(line.split()[0]) for line in about]
    assert times == sorted(times)
    assert any("kill r1" in line for line in about)
    assert any("stored 4-6 by replica 2" in line for line in about)
