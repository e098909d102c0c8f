"""Whose answer settled an interrupt, as far as OpenCode lets one know."""

from typing import Any, cast

import pytest

from opencode_a2a.events import Interrupted, Resolution, Resumed
from opencode_a2a.ids import RequestId, SessionId
from opencode_a2a.turns.answers import Answer, PermissionReply
from opencode_a2a.turns.interrupts import (
    CLOCK,
    ELSEWHERE,
    Interrupt,
    Settlement,
    Stage,
    WorkInterrupts,
    settlement,
)

ASKED = Interrupted(
    RequestId("per_1"), "permission", SessionId("ses_1"), call_id="call", permission="bash"
)
YES, NO = (Answer(PermissionReply(reply), "ann") for reply in ("once", "reject"))
ALWAYS = Answer(PermissionReply("always"), "ann")
LATE = Answer(PermissionReply("reject"), CLOCK)


def ended(resolution: Resolution, by: str | None = None) -> Resumed:
    return Resumed(ASKED.request_id, ASKED.type, resolution, by)


def settle(
    heard: Resolution,
    answer: Answer | None = None,
    *,
    implied: Answer | None = None,
    stage: Stage = Stage.DELIVERED,
    ran: bool = False,
    ending: bool = False,
    busy: bool = True,
) -> Settlement:
    asker = cast(WorkInterrupts, None)
    interrupt = Interrupt(ASKED, asker, stage, answer=answer, implied=implied)
    return settlement(interrupt, ended(heard), ran=ran, ending=ending, busy=busy)


@pytest.mark.parametrize(
    ("heard", "answer", "resolution"),
    [("once", YES, "once"), ("rejected", NO, "rejected"), ("rejected", LATE, "expired")],
)
def test_an_answer_that_opencode_confirms_counts(
    heard: Resolution, answer: Answer, resolution: Resolution
) -> None:
    assert settle(heard, answer) == Settlement(ended(resolution, answer.by), answer)


def test_a_confirmation_of_another_answer_is_not_ours() -> None:
    expected = Settlement(ended("once", ELSEWHERE), answered_past_us=True)

    assert settle("once", NO) == expected
    assert settle("once") == expected


@pytest.mark.parametrize("stage", [Stage.SENDING, Stage.DELIVERED])
def test_a_request_that_vanished_has_taken_the_answer_that_was_on_its_way(stage: Stage) -> None:
    assert settle("void", YES, stage=stage) == Settlement(ended("once", "ann"), YES)


def test_at_the_end_of_the_turn_only_an_answer_that_opencode_took_counts() -> None:
    assert settle("void", NO, ending=True).answer == NO
    assert settle("void", NO, ending=True, stage=Stage.SENDING) == Settlement(ended("void"))


@pytest.mark.parametrize("how", [{"ending": True}, {"busy": False}])
def test_a_request_that_nobody_answered_may_end_with_its_turn(how: dict[str, Any]) -> None:
    assert settle("void", **how) == Settlement(ended("void"))


def test_a_request_that_vanishes_while_opencode_works_on_was_answered_past_us() -> None:
    assert settle("void") == Settlement(ended("void"), answered_past_us=True)


def test_a_call_that_was_carried_out_was_allowed_by_somebody() -> None:
    past_us = Settlement(ended("once", ELSEWHERE), answered_past_us=True)

    assert settle("void", ran=True, ending=True) == past_us
    assert settle("void", YES, ran=True, ending=True, stage=Stage.SENDING).answer == YES
    assert settle("void", NO, ran=True, ending=True, stage=Stage.SENDING) == past_us


def test_an_answer_to_another_request_may_settle_this_one() -> None:
    assert settle("rejected", implied=NO) == Settlement(ended("rejected", "ann"), NO)
    assert settle("always", implied=ALWAYS) == Settlement(ended("always", "ann"))
    assert settle("void", implied=ALWAYS) == Settlement(ended("void", "ann"))


def test_the_turn_that_ends_at_the_deadline_leaves_an_expired_request() -> None:
    assert settle("void", stage=Stage.EXPIRED) == Settlement(ended("expired", CLOCK))
