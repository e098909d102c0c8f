"""Interrupts: when they are answered, and whose answer settled them."""

import asyncio
from typing import Any, cast

import pytest

from opencode_a2a.config import Settings
from opencode_a2a.events import Interrupted, Resolution, Resumed
from opencode_a2a.ids import ContextId, Owner, Principal, RequestId, SessionId, TaskId
from opencode_a2a.opencode.client import Location, OpenCode
from opencode_a2a.store.database import Database
from opencode_a2a.turns import interrupts
from opencode_a2a.turns.answers import Answer, PermissionReply
from opencode_a2a.turns.interrupts import (
    CLOCK,
    ELSEWHERE,
    Interrupt,
    Settlement,
    SharedInterrupts,
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


class ReplyingOpenCode:
    """Takes the replies to permissions, and holds them until it is ``free``."""

    def __init__(self) -> None:
        self.replies: list[str] = []
        self.free, self.asked = asyncio.Event(), asyncio.Event()

    async def reply_permission(self, _id: str, reply: str, *_: object, at: Location) -> None:
        self.asked.set()
        await self.free.wait()
        self.replies.append(reply)


OWNER = Owner(TaskId("task"), ContextId("context"), Principal("ann"))
PENDING = Interrupted(
    RequestId("per_1"), "permission", SessionId("ses_1"), permission="bash", directory="/w"
)


async def test_a_deadline_from_before_a_restart_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """The service was killed when the interrupt was in its table, and not in the task's log."""
    opencode = ReplyingOpenCode()
    opencode.free.set()
    async with Database("sqlite://") as database:
        shared = SharedInterrupts(database, cast(OpenCode, opencode), Settings())
        with monkeypatch.context() as earlier:
            earlier.setattr(interrupts, "now_ms", lambda: 1)
            await shared.store_asked(OWNER, PENDING, numbered=True)
        work = WorkInterrupts(shared, OWNER, lambda: None)
        work.connect(Location())

        await work.ask_and_settle([PENDING])
        await asyncio.sleep(0)
        await work.give_due_answers()

    assert opencode.replies == ["reject"]


async def test_a_stored_answer_is_given_though_its_caller_left() -> None:
    opencode = ReplyingOpenCode()
    async with Database("sqlite://") as database:
        shared = SharedInterrupts(database, cast(OpenCode, opencode), Settings())
        work = WorkInterrupts(shared, OWNER, lambda: None)
        work.connect(Location())
        await work.ask_and_settle([PENDING])
        answering = asyncio.create_task(work.answer([PENDING.request_id], YES))
        await opencode.asked.wait()

        answering.cancel()
        await asyncio.wait([answering])
        opencode.free.set()
        await work.give_due_answers()

    assert opencode.replies == ["once"]
