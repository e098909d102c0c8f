"""Interrupts: when they are answered, and whose answer settled them."""

import asyncio
from dataclasses import replace
from typing import Any, cast

import pytest

from opencode_a2a.config import Settings
from opencode_a2a.errors import (
    InterruptNotFoundError,
    SessionNotFoundError,
    StoreUnavailableError,
    UpstreamAwayError,
    UpstreamError,
    UpstreamHttpError,
    UpstreamNotFoundError,
    UpstreamPayloadError,
    UpstreamTimeoutError,
    UpstreamUnreachableError,
)
from opencode_a2a.events import Emitted, Interrupted, Question, Resolution, Resumed, TurnEvent
from opencode_a2a.ids import ContextId, Owner, Principal, RequestId, SessionId, TaskId
from opencode_a2a.messages import Answered, Message, Part
from opencode_a2a.opencode.client import Location, OpenCode1
from opencode_a2a.opencode.driver import Features
from opencode_a2a.rights import FULL, Rights
from opencode_a2a.store.database import Database
from opencode_a2a.turns import interrupts, shared_interrupts
from opencode_a2a.turns.answers import Answer, PermissionReply, QuestionRejection
from opencode_a2a.turns.interrupt_state import (
    CLOCK,
    ELSEWHERE,
    Interrupt,
    Settlement,
    Stage,
    StoredInterrupt,
    judge_end,
    unlogged,
)
from opencode_a2a.turns.interrupts import AfterAttend, WorkInterrupts
from opencode_a2a.turns.policy import EXPIRED_MESSAGE, RULE
from opencode_a2a.turns.shared_interrupts import SharedInterrupts

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
    stage: Stage = Stage.GIVEN,
    ran: bool = False,
    ending: bool = False,
    busy: bool = True,
) -> Settlement:
    asker = cast(WorkInterrupts, None)
    interrupt = Interrupt(ASKED, asker, stage, given=answer, implied=implied)
    return judge_end(interrupt, ended(heard), ran=ran, ending=ending, busy=busy)


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


@pytest.mark.parametrize("stage", [Stage.SENDING, Stage.GIVEN])
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
    for stage in (Stage.WAITING, Stage.RETRY, Stage.SENDING, Stage.GIVEN):
        for ending in (True, False):
            assert settle("void", NO, ran=True, ending=ending, stage=stage) == past_us
            assert settle("void", NO, implied=NO, ran=True, ending=ending, stage=stage) == past_us
    assert settle("void", implied=NO, ran=True) == past_us


def test_an_answer_to_another_request_may_settle_this_one() -> None:
    assert settle("rejected", implied=NO) == Settlement(ended("rejected", "ann"), NO)
    assert settle("always", implied=ALWAYS) == Settlement(ended("always", "ann"))
    assert settle("void", implied=ALWAYS) == Settlement(ended("void", "ann"))


def test_the_turn_that_ends_at_the_deadline_leaves_an_expired_request() -> None:
    assert settle("void", stage=Stage.EXPIRED) == Settlement(ended("expired", CLOCK))


class ReplyingOpenCode:
    """Takes the replies to permissions, and holds them until it is ``free``."""

    features = Features()

    def __init__(self) -> None:
        self.replies: list[str] = []
        self.free, self.asked, self.missed = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self.fails: dict[str, UpstreamError] = {}
        """The replies that fail, each with its error."""
        self.unknown: str | None = None
        """The request that is not pending."""

    async def reply_permission(self, request: str, reply: str, *_: object, at: Location) -> None:
        if (error := self.fails.get(reply)) is not None:
            raise error
        if request == self.unknown:
            self.missed.set()
            raise UpstreamNotFoundError
        self.asked.set()
        await self.free.wait()
        self.replies.append(reply)

    async def reply_question(self, *_: object, at: Location) -> None:
        await self.reply_permission("", "answers", at=at)

    async def reject_question(self, request: str, at: Location) -> None:
        await self.reply_permission(request, "rejection", at=at)

    async def messages(self, *_: object, **__: object) -> None:
        raise SessionNotFoundError


OWNER = Owner(TaskId("task"), ContextId("context"), Principal("ann"))
PENDING = Interrupted(
    RequestId("per_1"),
    "permission",
    SessionId("ses_1"),
    permission="bash",
    patterns=["ls"],
    always=["ls *"],
    directory="/w",
)


async def test_a_deadline_from_before_a_restart_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """The service was killed when the interrupt was in its table, and not in the task's log."""
    opencode = ReplyingOpenCode()
    opencode.free.set()
    async with Database("sqlite://") as database:
        shared = SharedInterrupts(database, cast(OpenCode1, opencode), Settings())
        with monkeypatch.context() as earlier:
            earlier.setattr(shared_interrupts, "now_ms", lambda: 1)
            await shared.store_asked(OWNER, PENDING)
        work = WorkInterrupts(shared, OWNER, lambda: None)
        work.connected.set()

        await work.ask_and_settle([PENDING])
        await asyncio.sleep(0)
        await work.attend()

    assert opencode.replies == ["reject"]


async def test_a_stored_answer_is_given_though_its_caller_left() -> None:
    opencode = ReplyingOpenCode()
    async with Database("sqlite://") as database:
        shared = SharedInterrupts(database, cast(OpenCode1, opencode), Settings())
        work = WorkInterrupts(shared, OWNER, lambda: None)
        work.connected.set()
        await work.ask_and_settle([PENDING])
        answering = asyncio.create_task(work.answer([PENDING.request_id], YES))
        await opencode.asked.wait()

        answering.cancel()
        await asyncio.wait([answering])
        opencode.free.set()
        await work.attend()

    assert opencode.replies == ["once"]


async def test_a_sub_agent_whose_session_is_deleted_right_after_it_asked_is_asked_for() -> None:
    async with Database("sqlite://") as database:
        shared = SharedInterrupts(database, cast(OpenCode1, ReplyingOpenCode()), Settings())
        work = WorkInterrupts(shared, OWNER, lambda: None)
        work.connected.set()

        (asked,) = await work.ask_and_settle([replace(PENDING, call_id="call")])

    assert isinstance(asked, Interrupted)
    assert (asked.number, asked.tool_input, [*work.open]) == (1, None, [PENDING.request_id])


def stored(
    asked: Interrupted, answer: Answer | None = None, resumed: Resumed | None = None
) -> StoredInterrupt:
    return StoredInterrupt(asked, answer, resumed, None if resumed is None else 1)


def test_the_log_is_completed_from_the_table_after_a_crash() -> None:
    message = Message("m", "user", [Part("text", text="yes")])
    yes, numbered = replace(YES, message=message), replace(ASKED, number=1)
    logged, empty = Emitted(open={ASKED.request_id: ASKED}), Emitted()

    # Asked, and killed before the log said so: nothing is missing if a rule has answered it.
    assert unlogged(empty, [stored(numbered)]) == [numbered]
    assert unlogged(empty, [stored(ASKED, YES)]) == []
    assert unlogged(empty, [stored(numbered, YES, ended("once", "ann"))]) == []
    assert unlogged(Emitted(settled={ASKED.request_id}), [stored(numbered)]) == []
    # It has changed while it waited, and the log does not show it.
    changed = replace(numbered, links={"a": "/etc/b"})
    assert unlogged(Emitted(open={ASKED.request_id: numbered}), [stored(changed)]) == [changed]
    assert unlogged(Emitted(open={ASKED.request_id: changed}), [stored(changed)]) == []
    # Settled, and killed before the log said so.
    by_yes = stored(ASKED, yes, ended("once", "ann"))
    assert unlogged(logged, [by_yes]) == [Answered(message), ended("once", "ann")]
    by_another = stored(ASKED, None, ended("rejected", "ann"))
    assert unlogged(logged, [by_another]) == [ended("rejected", "ann")]
    # What it means for the turn has to be found out again.
    for resumed in (ended("void"), ended("once", ELSEWHERE), ended("expired", CLOCK)):
        assert unlogged(logged, [stored(ASKED, None, resumed)]) == []
    assert unlogged(logged, [stored(ASKED)]) == []


@pytest.mark.parametrize("asked_at", [1, 3])
async def test_a_refusal_before_a_restart_explains_only_what_was_asked_before_it_counted(
    asked_at: int,
) -> None:
    other = replace(PENDING, request_id=RequestId("per_2"), asked_at=asked_at)
    refused = StoredInterrupt(PENDING, NO, ended("rejected", "ann"), settled_at=2)
    async with Database("sqlite://") as database:
        shared = SharedInterrupts(database, cast(OpenCode1, ReplyingOpenCode()), Settings())
        work = WorkInterrupts(shared, OWNER, lambda: None)
        work.connected.set()

        work.restore([stored(other), refused], [other.request_id])
        work.close()

    assert work.open[other.request_id].implied == (NO if asked_at == 1 else None)


async def test_a_grant_does_not_overrule_a_refusal_that_could_not_be_delivered() -> None:
    opencode = ReplyingOpenCode()
    opencode.free.set()
    first = replace(PENDING, always=["*"], patterns=["ls"], tool_input={})
    second = replace(first, request_id=RequestId("per_2"))
    granted = Answer(PermissionReply("once", scope="task"), "ann")
    async with Database("sqlite://") as database:
        shared = SharedInterrupts(database, cast(OpenCode1, opencode), Settings())
        work = WorkInterrupts(shared, OWNER, lambda: None)
        work.connected.set()
        await work.ask_and_settle([first, second])
        opencode.fails["reject"] = UpstreamAwayError()
        with pytest.raises(UpstreamUnreachableError):
            await work.answer([second.request_id], NO)
        opencode.fails.clear()

        answering = asyncio.create_task(work.answer([first.request_id], granted))
        await opencode.asked.wait()
        await work.ask_and_settle([Resumed(first.request_id, "permission", "once")])
        work.note_logged()
        await answering
        await work.attend()
        work.close()

    assert (opencode.replies, work.open[second.request_id].given) == (["once"], NO)


@pytest.mark.requirement("I23")
async def test_a_refusal_is_not_overruled_by_a_grant_that_is_being_stored(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    opencode = ReplyingOpenCode()
    opencode.free.set()
    first = replace(PENDING, always=["*"], patterns=["ls"], tool_input={})
    second = replace(first, request_id=RequestId("per_2"))
    granted = Answer(PermissionReply("once", scope="task"), "ann")
    storing, locked = asyncio.Event(), asyncio.Event()
    async with Database("sqlite://") as database:
        shared = SharedInterrupts(database, cast(OpenCode1, opencode), Settings())
        work = WorkInterrupts(shared, OWNER, lambda: None)
        work.connected.set()
        await work.ask_and_settle([first, second])
        answering = asyncio.create_task(work.answer([first.request_id], granted))
        await opencode.asked.wait()
        store_answer = shared.store_answer

        async def store_slowly(*args: Any, insist: bool = False) -> None:
            if insist:
                storing.set()
                await locked.wait()
            await store_answer(*args, insist=insist)

        monkeypatch.setattr(shared, "store_answer", store_slowly)
        settled: list[TurnEvent] = [Resumed(first.request_id, "permission", "once")]
        settling = asyncio.create_task(work.ask_and_settle(settled))
        await storing.wait()

        with pytest.raises(InterruptNotFoundError):  # at once: it is allowed already
            async with asyncio.timeout(1):
                await work.answer([second.request_id], NO)
        locked.set()
        await settling
        work.note_logged()
        await answering
        await work.attend()
        (row,) = [one for one in await shared.stored("task", "context") if one.resumed is None]
        work.close()

    assert (opencode.replies, row.answer) == (["once", "once"], work.open[second.request_id].given)


@pytest.mark.requirement("I23")
async def test_an_answer_that_opencode_may_have_is_not_replaced_though_its_repeat_fails() -> None:
    opencode = ReplyingOpenCode()
    opencode.free.set()
    message = Message("m", "user", [Part("text", text="yes")])
    yes = replace(YES, message=message)
    async with Database("sqlite://") as database:
        shared = SharedInterrupts(database, cast(OpenCode1, opencode), Settings())
        work = WorkInterrupts(shared, OWNER, lambda: None)
        work.connected.set()
        await work.ask_and_settle([PENDING])
        opencode.fails["once"] = UpstreamUnreachableError()  # its response is lost
        with pytest.raises(UpstreamUnreachableError):
            await work.answer([PENDING.request_id], yes)
        opencode.fails["once"] = UpstreamAwayError()
        with pytest.raises(UpstreamUnreachableError):
            await work.repeat(message)

        with pytest.raises(InterruptNotFoundError):
            async with asyncio.timeout(1):
                await work.answer([PENDING.request_id], NO)
        (row,) = await shared.stored("task", "context")
        work.close()

    assert row.answer == yes


@pytest.mark.requirement("I23")
async def test_an_answer_that_opencode_took_is_not_replaced_though_it_does_not_confirm_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(interrupts, "CONFIRM_SECONDS", 0.01)
    opencode = ReplyingOpenCode()
    opencode.free.set()
    async with Database("sqlite://") as database:
        shared = SharedInterrupts(database, cast(OpenCode1, opencode), Settings())
        work = WorkInterrupts(shared, OWNER, lambda: None)
        work.connected.set()
        await work.ask_and_settle([PENDING])
        with pytest.raises(UpstreamPayloadError):
            await work.answer([PENDING.request_id], YES)

        with pytest.raises(InterruptNotFoundError):
            await work.answer([PENDING.request_id], NO)
        await work.attend()
        (row,) = await shared.stored("task", "context")
        work.close()

    assert (opencode.replies, row.answer) == (["once", "once"], YES)


@pytest.mark.requirement("I23")
async def test_an_answer_to_several_requests_waits_once_for_an_opencode_that_hangs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(interrupts, "CONFIRM_SECONDS", 0.01)
    opencode = ReplyingOpenCode()
    second = replace(PENDING, request_id=RequestId("per_2"))
    requests = [PENDING.request_id, second.request_id]
    async with Database("sqlite://") as database:
        shared = SharedInterrupts(database, cast(OpenCode1, opencode), Settings())
        work = WorkInterrupts(shared, OWNER, lambda: None)
        work.connected.set()
        await work.ask_and_settle([PENDING, second])
        with pytest.raises(UpstreamTimeoutError):
            await work.answer(requests, YES)
        stages = [work.open[request_id].stage for request_id in requests]

        opencode.free.set()
        await work.attend()
        work.close()

    assert stages == [Stage.RETRY, Stage.RETRY]
    assert opencode.replies == ["once", "once"]


async def test_an_answer_that_is_repeated_while_opencode_is_sent_it_counts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    opencode = ReplyingOpenCode()
    async with Database("sqlite://") as database:
        shared = SharedInterrupts(database, cast(OpenCode1, opencode), Settings())
        work = WorkInterrupts(shared, OWNER, lambda: None)
        work.connected.set()
        await work.ask_and_settle([PENDING])
        with monkeypatch.context() as soon:
            soon.setattr(interrupts, "CONFIRM_SECONDS", 0.01)
            with pytest.raises(UpstreamTimeoutError):
                await work.answer([PENDING.request_id], YES)
        giving = asyncio.create_task(work.attend())
        while work.open[PENDING.request_id].stage is not Stage.SENDING:  # noqa: ASYNC110 - no event
            await asyncio.sleep(0)
        repeating = asyncio.create_task(work.answer([PENDING.request_id], YES))
        await asyncio.sleep(0)

        opencode.free.set()
        await giving
        await work.ask_and_settle([Resumed(PENDING.request_id, "permission", "once")])
        work.note_logged()
        await repeating
        work.close()

    assert opencode.replies == ["once"]


async def test_a_refusal_that_opencode_never_took_leaves_room_for_another_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """OpenCode does not know the request, but goes on listing it."""
    opencode = ReplyingOpenCode()
    opencode.free.set()
    opencode.unknown = PENDING.request_id
    async with Database("sqlite://") as database:
        shared = SharedInterrupts(database, cast(OpenCode1, opencode), Settings())
        work = WorkInterrupts(shared, OWNER, lambda: None)
        work.connected.set()
        await work.ask_and_settle([PENDING])
        with monkeypatch.context() as soon:
            soon.setattr(interrupts, "CONFIRM_SECONDS", 0.01)
            with pytest.raises(UpstreamPayloadError):
                await work.answer([PENDING.request_id], NO)

        opencode.unknown = None
        await _answer_and_confirm(work, YES)
        work.close()

    assert opencode.replies == ["once"]


@pytest.mark.requirement("I15")
async def test_an_answer_of_before_a_restart_that_opencode_refuses_leaves_room_for_another() -> (
    None
):
    opencode = ReplyingOpenCode()
    opencode.free.set()
    opencode.fails["once"] = UpstreamHttpError(upstream_status=400)
    async with Database("sqlite://") as database:
        shared = SharedInterrupts(database, cast(OpenCode1, opencode), Settings())
        await shared.store_asked(OWNER, PENDING)
        await shared.store_answer([PENDING.request_id], YES)
        work = WorkInterrupts(shared, OWNER, lambda: None)
        work.connected.set()
        work.restore(await shared.stored("task", "context"), [PENDING.request_id])

        await work.attend()
        await _answer_and_confirm(work, NO)
        work.close()

    assert opencode.replies == ["reject"]


async def _answer_and_confirm(work: WorkInterrupts, answer: Answer) -> None:
    """Answer for a person, and have OpenCode confirm it."""
    answering = asyncio.create_task(work.answer([PENDING.request_id], answer))
    interrupt = work.open[PENDING.request_id]
    while interrupt.stage is not Stage.GIVEN and not answering.done():  # noqa: ASYNC110 - no event
        await asyncio.sleep(0)
    await work.ask_and_settle([Resumed(PENDING.request_id, "permission", answer.resolution)])
    work.note_logged()
    await answering


@pytest.mark.requirement("I15")
@pytest.mark.parametrize("restarted", [False, True])
async def test_an_answer_that_opencode_refuses_gives_way_to_the_default_at_the_deadline(
    restarted: bool,
) -> None:
    opencode = ReplyingOpenCode()
    opencode.free.set()
    opencode.fails["once"] = UpstreamHttpError(upstream_status=400)
    settings = Settings.model_validate({"interrupts": {"interrupt_request_ttl_seconds": 0.05}})
    async with Database("sqlite://") as database:
        shared = SharedInterrupts(database, cast(OpenCode1, opencode), settings)
        woken = asyncio.Event()
        work = WorkInterrupts(shared, OWNER, woken.set)
        work.connected.set()
        await work.ask_and_settle([PENDING])
        with pytest.raises(UpstreamHttpError):
            await work.answer([PENDING.request_id], YES)
        if restarted:
            work.close()
            work = WorkInterrupts(shared, OWNER, woken.set)
            work.restore(await shared.stored("task", "context"), [PENDING.request_id])
        woken.clear()

        async with asyncio.timeout(5):
            await woken.wait()
        for _ in range(2):
            await work.attend()
        (row,) = await shared.stored("task", "context")
        work.close()

    assert opencode.replies == ["reject"]
    assert row.answer == replace(LATE, reply=PermissionReply("reject", EXPIRED_MESSAGE))


@pytest.mark.requirement("I23")
@pytest.mark.parametrize("unread", [{"patterns": []}, {"always": []}])
async def test_always_is_not_offered_for_what_could_not_be_read(
    unread: dict[str, list[str]],
) -> None:
    settings = Settings.model_validate({"interrupts": {"allow_always": True}})
    async with Database("sqlite://") as database:
        shared = SharedInterrupts(database, cast(OpenCode1, ReplyingOpenCode()), settings)
        asked = await shared.store_asked(OWNER, replace(PENDING, **unread))
        told = await shared.store_asked(OWNER, replace(PENDING, request_id=RequestId("per_2")))

    assert (asked.allows_always, told.allows_always) == (False, True)


@pytest.mark.requirement("I15")
@pytest.mark.parametrize(("by", "rights"), [(CLOCK, FULL), (RULE, Rights(waits=False))])
@pytest.mark.parametrize("dismissable", [True, False])
async def test_a_question_that_takes_no_words_is_dismissed_if_nobody_answers(
    by: str, rights: Rights, dismissable: bool
) -> None:
    """OpenCode 2 asks for numbers and closed choices, and refuses any other text."""
    opencode = ReplyingOpenCode()
    opencode.free.set()
    opencode.fails["answers"] = UpstreamHttpError(upstream_status=400)
    if not dismissable:
        opencode.fails["rejection"] = UpstreamHttpError(upstream_status=400)
    asked = Interrupted(
        RequestId("frm_1"), "question", SessionId("ses_1"), questions=[Question("How many?", "")]
    )
    settings = Settings.model_validate({"interrupts": {"interrupt_request_ttl_seconds": 0.01}})
    async with Database("sqlite://") as database:
        shared = SharedInterrupts(database, cast(OpenCode1, opencode), settings)
        woken = asyncio.Event()
        work = WorkInterrupts(shared, replace(OWNER, rights=rights), woken.set)
        work.connected.set()
        await work.ask_and_settle([asked])
        became = [AfterAttend.GO_ON]
        async with asyncio.timeout(5):
            while became[-1] is AfterAttend.GO_ON and not opencode.replies:
                await woken.wait()
                woken.clear()
                became.append(await work.attend())
        (row,) = await shared.stored("task", "context")
        work.close()

    assert opencode.replies == (["rejection"] if dismissable else [])
    assert became[-1] is (AfterAttend.GO_ON if dismissable else AfterAttend.STOP_EXPIRED)
    assert row.answer == Answer(QuestionRejection(), by)


@pytest.mark.parametrize("told", ["before the second", "after it", "by the store"])
async def test_always_to_two_requests_counts_for_both_though_the_first_settles_them(
    told: str,
) -> None:
    opencode = ReplyingOpenCode()
    second = replace(PENDING, request_id=RequestId("per_2"))
    opencode.unknown = second.request_id  # OpenCode has settled it together with the first
    resolution: Resolution = "void" if told == "by the store" else "always"
    heard = [Resumed(one.request_id, one.type, resolution) for one in (PENDING, second)]
    async with Database("sqlite://") as database:
        settings = Settings.model_validate({"interrupts": {"allow_always": True}})
        shared = SharedInterrupts(database, cast(OpenCode1, opencode), settings)
        work = WorkInterrupts(shared, OWNER, lambda: None)
        work.connected.set()
        await work.ask_and_settle([PENDING, second])

        answering = asyncio.create_task(
            work.answer([PENDING.request_id, second.request_id], ALWAYS)
        )
        await opencode.asked.wait()
        opencode.free.set()
        logged = await work.ask_and_settle([heard[0]])
        work.note_logged()
        if told != "before the second":
            await opencode.missed.wait()
        logged += await work.ask_and_settle([heard[1]])
        work.note_logged()
        await answering
        work.close()

    assert logged == [replace(one, resolution="always", by="ann") for one in heard]
    assert not work.forged


async def test_an_answer_to_two_can_be_sent_again_while_the_database_keeps_one_from_being_stored(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A refusal for good would be stored with the message, though it counts for the second."""
    opencode = ReplyingOpenCode()
    opencode.free.set()
    opencode.unknown = PENDING.request_id
    second = replace(PENDING, request_id=RequestId("per_2"))
    confirmed, locked = asyncio.Event(), asyncio.Event()

    async def store_settled(*_: object) -> None:
        confirmed.set()
        await locked.wait()

    async def wait(event: asyncio.Event, _: float) -> bool:
        if not event.is_set():
            await confirmed.wait()
        return event.is_set()

    async with Database("sqlite://") as database:
        shared = SharedInterrupts(database, cast(OpenCode1, opencode), Settings())
        work = WorkInterrupts(shared, OWNER, lambda: None)
        work.connected.set()
        await work.ask_and_settle([PENDING, second])
        monkeypatch.setattr(shared, "store_settled", store_settled)
        monkeypatch.setattr(interrupts, "wait", wait)

        answering = asyncio.create_task(work.answer([PENDING.request_id, second.request_id], YES))
        await opencode.asked.wait()
        resumed = Resumed(second.request_id, "permission", "once")
        settling = asyncio.create_task(work.ask_and_settle([resumed]))
        with pytest.raises(StoreUnavailableError):
            await answering
        locked.set()
        await settling
        work.close()
