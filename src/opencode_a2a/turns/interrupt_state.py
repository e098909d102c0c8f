"""What an interrupt is: its stages, and how its end is judged. Nothing here waits or stores.

``turns.interrupts`` moves an ``Interrupt`` through these stages:

========  =============================================================  =======================
stage     what happens                                                   next stage
========  =============================================================  =======================
NEW       it is stored with number and deadline: a person is asked       WAITING
          it is stored with the answer of a rule or a grant              DUE
WAITING   a person answers, or gives a grant that covers it              ANSWERED
          the deadline passes: a person's answer that could not be
          delivered is taken again, otherwise the default answer         ANSWERED
          the deadline passes, and the default is to end the turn        EXPIRED
          the sender of an answer that could not be delivered repeats
          it                                                             SENDING
ANSWERED  the answer cannot be stored                                    the stage before
          it is stored, and OpenCode is given it                         SENDING
          that of a grant is stored                                      DUE
          it is stored, and its sender leaves before OpenCode is given
          it                                                             RETRY
DUE       the turn gives the answer                                      SENDING
RETRY     the turn gives the answer again, or its sender repeats it      SENDING
          somebody answers the same once more                            ANSWERED
SENDING   OpenCode takes the answer, or does not know the request        GIVEN
          OpenCode was sent it, and its response is lost or takes too
          long, or the sender leaves before that                         RETRY
          OpenCode cannot be reached, or refuses it, after WAITING       WAITING
          the same, after DUE or RETRY                                   RETRY
          OpenCode finds fault with a person's answer, after RETRY or
          the deadline                                                   WAITING
          the same with words to a question by the clock or a rule       DUE
          the same with a refusal by the clock or a rule                 EXPIRED
GIVEN     OpenCode does not confirm a person's answer in time            RETRY
          nor has it taken that answer or one before                     WAITING
any       OpenCode says that it is settled, or no longer lists it        SETTLED
========  =============================================================  =======================

``WorkInterrupts._give`` alone leads into SENDING, and out of it unless that is to SETTLED;
``WorkInterrupts._replace_refused`` then has another answer follow one with which OpenCode finds
fault: that of a person or the default at the deadline, and after words to a question its dismissal.

An answer is stored before OpenCode is given it, and counts when OpenCode confirms it. Each
interrupt leaves one audit record when it is settled.
"""

import asyncio
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum, auto
from typing import Protocol

from opencode_a2a.events import Emitted, Interrupted, Resumed
from opencode_a2a.ids import Owner
from opencode_a2a.messages import Answered
from opencode_a2a.turns.answers import Answer, PermissionReply

CLOCK, ELSEWHERE = "deadline", "elsewhere"
"""Recorded as ``by`` when an interrupt was settled by no principal, grant or rule."""


class Asker(Protocol):
    """The interrupts of the turn or errand that an interrupt stops: ``WorkInterrupts``."""

    changed: asyncio.Event

    @property
    def owner(self) -> Owner: ...

    @property
    def waiting(self) -> bool: ...

    async def answer(self, request_ids: Sequence[str], answer: Answer) -> None: ...


class Stage(Enum):
    """How far an interrupt has come; the table above says how it moves on."""

    NEW = auto()
    WAITING = auto()
    ANSWERED = auto()
    """Its answer is being stored, or is stored and goes to other requests first: nobody else can
    answer it."""
    DUE = auto()
    """Its answer is known, and OpenCode has not been given it."""
    RETRY = auto()
    """OpenCode may have been given its answer, and is given it once more."""
    SENDING = auto()
    GIVEN = auto()
    """OpenCode will say no more about it except that it is settled."""
    EXPIRED = auto()
    SETTLED = auto()


@dataclass(eq=False, slots=True)
class Interrupt:
    """A permission or question on whose answer OpenCode waits.

    Its answers; what sets and reads them is in ``WorkInterrupts``, apart from ``judge_end``,
    ``accepts`` and ``sends`` here:

    =======  ===================================  ======================  =========================
    field    set                                  cleared                 read
    =======  ===================================  ======================  =========================
    due      ``_make_due``: a rule, a grant, or   never, but only the     ``_answer_due``
             the dismissal of a question          stage DUE has it read
    joint    ``answer``, once it is stored        never                   ``judge_end``
    given    ``_give``, just before it is sent;   ``_replace_refused``;   ``_answer_due``,
             ``restore``; ``answer``, if its      ``_give`` puts the      ``accepts``, ``sends``,
             sender leaves before that            earlier one back if     ``answer``, ``repeat``,
                                                  OpenCode does not know  ``judge_end``,
                                                  the request             ``_give_and_confirm``,
                                                                          ``_close_interrupt``,
                                                                          ``_wait_confirmed``
    counted  ``_close_interrupt``, which settles  never                   ``_wait_confirmed``,
             it                                                           ``_give_and_confirm``,
                                                                          ``repeat``
    implied  ``_note_implied``, with the answer   ``_give`` of the        ``judge_end``, ``_give``,
             to another; ``_ask`` and             other, if OpenCode      ``_give_and_confirm``
             ``refuse_all``, when a person has    never got its "always"
             the turn stopped
    =======  ===================================  ======================  =========================
    """

    asked: Interrupted
    asker: Asker
    stage: Stage = Stage.NEW
    for_person: bool = True
    """Whether a person is asked, since neither a rule nor a grant had the answer."""
    due: Answer | None = None
    """In the stage DUE: the answer of a rule or a grant, which OpenCode is to be given."""
    joint: Answer | None = None
    """The latest answer of a person that is stored. If it is for several requests, OpenCode is
    given it for one after the other, and may settle this one together with another."""
    given: Answer | None = None
    """The latest answer that OpenCode may have: also in WAITING, if it could not be delivered."""
    counted: Answer | None = None
    """The answer that settled it, if any."""
    implied: Answer | None = None
    """An answer to another request by which OpenCode may settle this one too."""
    timer: asyncio.TimerHandle | None = None
    changed: Interrupted | None = None
    """The request as it is now, if that is not what the log shows yet."""
    shown: asyncio.Event = field(default_factory=asyncio.Event)
    """Set once the log shows what has changed, or never will."""
    logged: asyncio.Event = field(default_factory=asyncio.Event)
    """Set once the log of the task says how it was settled, or the work stopped before that."""

    @property
    def waits(self) -> bool:
        """Whether it stops the turn until a person has answered."""
        return self.for_person and self.stage not in (Stage.NEW, Stage.SETTLED)

    @property
    def late(self) -> bool:
        """Whether its deadline has passed."""
        now = asyncio.get_running_loop().time()
        return self.timer is not None and self.timer.when() <= now

    def accepts(self, answer: Answer) -> bool:
        """Whether a person may answer it now, with this answer."""
        # One that OpenCode is given once more can only be repeated: OpenCode may have acted on it.
        repeated = self.stage is Stage.RETRY and self._given_is(answer)
        return self.for_person and (self.stage is Stage.WAITING or repeated)

    def sends(self, answer: Answer) -> bool:
        """Whether OpenCode is being sent the same answer by the same person at the moment."""
        return self.stage is Stage.SENDING and self._given_is(answer)

    def _given_is(self, answer: Answer) -> bool:
        given = self.given
        return given is not None and (given.reply, given.by) == (answer.reply, answer.by)

    @property
    def name(self) -> str:
        return str(self.asked.number or self.asked.request_id)


@dataclass(frozen=True, slots=True)
class Settlement:
    """How an interrupt ended, and by whose answer."""

    resumed: Resumed
    """The event, completed for the log."""
    answer: Answer | None = None
    """The answer that counted."""
    answered_past_us: bool = False
    """Whether OpenCode was answered by nobody that this service knows of."""


def judge_end(
    interrupt: Interrupt, event: Resumed, *, ran: bool, ending: bool, busy: bool
) -> Settlement:
    """Find out whose answer settled an interrupt.

    OpenCode reports how a request was settled, but not by whom. A request that is only missing from
    its list (``void``) comes without either. ``ran``: the tool call that asked was carried out;
    ``ending``: the turn is over; ``busy``: OpenCode was working when its state was last read. The
    first row that applies decides:

    =======================================================  =====================================
    case                                                     settled
    =======================================================  =====================================
    the turn ends at the deadline (EXPIRED)                  expired, by the clock
    reported, and our answer says the same                   by our answer
    void, it ran, and our answer is not a refusal            by our answer
    void, it did not run, and our answer was GIVEN or the
    turn continues                                           by our answer
    an answer to several requests, given to another one      by our answer
    an answer to another request explains it: no refusal
    explains a call that ran                                 by that answer
    void, but a permission whose call ran                    once, past us
    void, while OpenCode is busy and the turn continues      void, past us
    void                                                     void, by nobody
    reported                                                 as reported, past us
    =======================================================  =====================================

    Our answer is the one that OpenCode was ``given``, not one that is only ``due``.
    """
    answer, implied, void = interrupt.given, interrupt.implied, event.resolution == "void"
    if interrupt.stage is Stage.EXPIRED:
        return Settlement(replace(event, by=CLOCK, resolution="expired"))
    # A call that has asked and was carried out was allowed to by somebody.
    allowed = interrupt.asked.type == "permission" and ran
    if answer is not None:
        if not void:
            taken = answer.resolution == event.resolution
        elif allowed:
            taken = answer.resolution != "rejected"
        else:
            # A request that vanished has taken the answer that was on its way to it.
            taken = interrupt.stage is Stage.GIVEN or not ending
        if taken:
            resolution = "expired" if answer.by == CLOCK else answer.resolution
            return Settlement(replace(event, by=answer.by, resolution=resolution), answer)
    if implied is not None and allowed and implied.resolution == "rejected":
        implied = None
    if implied is not None and event.resolution in (implied.resolution, "void"):
        event = replace(event, by=implied.by)
        if implied is interrupt.joint:  # a person gave it to this request as well
            return Settlement(replace(event, resolution=implied.resolution), implied)
        return Settlement(event, implied if implied.resolution == "rejected" else None)
    if void and allowed:
        event, void = replace(event, resolution="once"), False
    if void:
        # It was dropped with the end of the turn, or, while OpenCode works on, answered.
        return Settlement(event, answered_past_us=busy and not ending)
    return Settlement(replace(event, by=ELSEWHERE), answered_past_us=True)


def told_by(resumed: Resumed, answer: Answer | None) -> Resumed:
    """Return the end of an interrupt with what a person said besides yes or no."""
    match answer:
        case Answer(reply=PermissionReply(scope=scope, message=reason)):
            by_person = answer.by == resumed.by and resumed.resolution != "expired"
            return replace(resumed, scope=scope, reason=reason) if by_person else resumed
        case _:
            return resumed


@dataclass(frozen=True, slots=True)
class StoredInterrupt:
    """An interrupt of a turn or an errand as the table has it."""

    asked: Interrupted
    answer: Answer | None
    """The latest answer, if it has settled the interrupt or may yet do so."""
    resumed: Resumed | None
    """How it was settled; None if it is not."""
    settled_at: int | None


def _files(asked: Interrupted) -> tuple[object, ...]:
    """Return what can change about a request while it waits."""
    return asked.links, asked.links_unknown, asked.changes


def unlogged(
    emitted: Emitted, stored: Iterable[StoredInterrupt]
) -> list[Interrupted | Answered | Resumed]:
    """Return what the table has and the log lacks of a turn whose process was killed.

    An end that names no answer of ours is left out: OpenCode's state says what it means.
    """
    missing: list[Interrupted | Answered | Resumed] = []
    for one in stored:
        resumed, request_id = one.resumed, one.asked.request_id
        if request_id not in emitted.open:
            # Only requests that a person is asked have a number.
            if resumed is None and one.asked.number and request_id not in emitted.settled:
                missing.append(one.asked)
        elif (
            resumed is None
            and one.asked.number
            and _files(one.asked) != _files(emitted.open[request_id])
        ):
            missing.append(one.asked)
        elif resumed is not None and resumed.by not in (None, ELSEWHERE):
            if one.answer is None and resumed.by == CLOCK:
                continue  # the turn has to end because of it
            if one.answer is not None and one.answer.message is not None:
                missing.append(Answered(one.answer.message))
            missing.append(resumed)
    return missing
