"""The checks of a chaos run find what they are for: each rule is violated by a made-up history."""

from collections.abc import Callable
from dataclasses import replace

import orjson
import pytest

from tests.chaos.history import (
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
    violations,
)


def status(state: str) -> bytes:
    update = {"status": {"state": f"TASK_STATE_{state.upper()}"}}
    return orjson.dumps({"statusUpdate": update})


def text(piece: str) -> bytes:
    return orjson.dumps({"artifactUpdate": {"artifact": {"parts": [{"text": piece}]}}})


def told(at: float, cursor: str, body: bytes, reading: int = 1, replica: str = "r1") -> Told:
    return Told(at, 7, reading, replica, "task", cursor, body)


SNAPSHOT = b'{"task":{"id":"task"}}'
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
        written=[
            Written(1, 1, 1, 1, 1, False, 1, True),
            Written(2, 1, 2, 3, 1, False, 1, True),
            Written(12, 1, 4, 6, 2, False, 2, True),
        ],
        moved=[Moved(1, 1, "submitted"), Moved(2, 1, "working"), Moved(12, 1, "completed")],
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


def spoil(what: str) -> Callable[[Callable[[History], None]], Callable[[History], None]]:
    def name(change: Callable[[History], None]) -> Callable[[History], None]:
        SPOILT.append((what, change))
        return change

    return name


SPOILT: list[tuple[str, Callable[[History], None]]] = []


@spoil("one task")
def two_tasks_for_a_message(h: History) -> None:
    h.sent.append(replace(h.sent[0], task="other"))
    h.tasks.append(StoredTask(2, "other", "failed", "a"))
    h.tallies["failed"] = 1


@spoil("one task")
def a_task_that_is_gone(h: History) -> None:
    h.sent.append(Sent(1, 7, "r1", "m3", "more", "text", "lost"))


@spoil("one end")
def a_task_without_end(h: History) -> None:
    h.tasks.append(StoredTask(2, "other", "working", "b"))
    h.tallies["working"] = 1


@spoil("one end")
def another_end_in_a_stream(h: History) -> None:
    h.told.append(told(30, "7.1", status("failed"), 9))


@spoil("one end")
def another_end_in_a_read(h: History) -> None:
    h.reads.append(Read(1, 1, 7, "r1", "task", "canceled", ""))


@spoil("one end")
def not_ended_any_more(h: History) -> None:
    h.reads.append(Read(23, 24, 7, "r1", "task", "working", "one two "))


@spoil("one prompt")
def two_turns(h: History) -> None:
    h.prompted.append(Prompted(9, "a", "ses", "another", "token", again=False))


@spoil("one prompt")
def no_turn(h: History) -> None:
    h.prompted.clear()
    h.replied.clear()


@spoil("one prompt")
def two_answers(h: History) -> None:
    h.replied.append(h.replied[0])


@spoil("same bytes")
def other_bytes_on_another_replica(h: History) -> None:
    h.told.append(told(30, "2", text("other "), 5, "r3"))


@spoil("same bytes")
def other_bytes_in_the_log(h: History) -> None:
    h.logs = {"task": [*LOG[:2], told(0, "3", text("other ")), *LOG[3:]]}


@spoil("no gap")
def a_gap_between_entries(h: History) -> None:
    h.told += [told(30, "1", status("submitted"), 5), told(31, "3", text("two "), 5)]


@spoil("no gap")
def a_gap_after_the_task(h: History) -> None:
    h.told += [told(30, "1", SNAPSHOT, 5), told(31, "3", text("two "), 5)]


@spoil("no gap")
def an_entry_twice(h: History) -> None:
    h.told += [told(30, "2", text("one "), 5), told(31, "2", text("one "), 5)]


@spoil("no gap")
def an_unstored_entry_before_a_stored_one(h: History) -> None:
    h.told += [told(30, "4", text("lost "), 5), told(31, "5.1", text("two "), 5)]


@spoil("same text")
def text_that_opencode_did_not_say(h: History) -> None:
    h.reads.append(Read(1, 1, 7, "r1", "task", "working", "two "))


@spoil("same text")
def completed_without_all_text(h: History) -> None:
    h.reads.append(Read(23, 24, 7, "r1", "task", "completed", "one "))


@spoil("asked first")
def approved_by_nobody(h: History) -> None:
    h.sent.pop()


@spoil("not fenced")
def written_without_a_fence(h: History) -> None:
    h.written.append(Written(12, 1, 7, 7, None, False, 2, True))


@spoil("not fenced")
def written_by_one_that_is_gone(h: History) -> None:
    h.written.append(Written(12, 1, 7, 7, 1, True, 2, True))


@spoil("not fenced")
def written_by_one_that_does_not_run_it(h: History) -> None:
    h.written.append(Written(12, 1, 7, 7, 3, False, 2, True))


@spoil("tallies")
def wrong_tallies(h: History) -> None:
    h.tallies["completed"] = 2


@spoil("taken over")
def taken_over_late(h: History) -> None:
    h.written[-1] = replace(h.written[-1], at=25)
    h.moved[-1] = replace(h.moved[-1], at=25)


@spoil("taken over")
def never_taken_over(h: History) -> None:
    h.written.pop()
    h.moved.pop()


@spoil("back at the start")
def memory_that_grew(h: History) -> None:
    h.memory.append(("r2", 80, 400))


@spoil("back at the start")
def connections_that_were_left(h: History) -> None:
    h.connections = (18, 30)


@spoil("nothing unexpected")
def an_internal_error(h: History) -> None:
    h.unexpected.append(Unexpected(3, "client 7", "500", "task"))


@pytest.mark.parametrize(("rule", "change"), SPOILT, ids=[change.__name__ for _, change in SPOILT])
def test_what_should_not_be_is_found(rule: str, change: Callable[[History], None]) -> None:
    spoilt = history()
    change(spoilt)
    assert {violation.rule for violation in violations(spoilt)} == {rule}


def test_a_further_fault_gives_more_time() -> None:
    late = history()
    taken_over_late(late)
    late.faults.append(Fault(14, 16, "database", "postgresql"))
    assert violations(late) == []


def test_the_history_of_a_task_is_told_in_order() -> None:
    about = history().about("task")
    times = [float(line.split()[0]) for line in about]
    assert times == sorted(times)
    assert any("kill r1" in line for line in about)
    assert any("stored 4-6 by replica 2" in line for line in about)
