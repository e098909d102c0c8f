"""Interrupts: permissions and questions that stop a turn until somebody answers.

``WorkInterrupts`` holds the interrupts of one turn, or of one errand (see ``errands``), from the
request to its end. It calls ``SharedInterrupts``, which all turns and errands share: the interrupts
that are open now, the table, and the way to OpenCode. ``tasks`` and ``extensions`` bring the answer
of a person to the ``WorkInterrupts`` that asked. An ``Interrupt`` goes through these stages:

=======  ==============================================================  =======================
stage    what happens                                                    next stage
=======  ==============================================================  =======================
NEW      it is stored with number and deadline: a person is asked        WAITING
         it is stored with the answer of a rule or a grant               DUE
WAITING  a person answers                                                SENDING
         a person gives a grant that covers it                           DUE
         the deadline passes: a person's answer that could not be
         delivered is given, otherwise the default answer                SENDING
         the deadline passes, and the default is to end the turn         EXPIRED
DUE      the turn gives the answer                                       SENDING
RETRY    the turn gives the answer again, or its sender repeats it       SENDING
SENDING  OpenCode takes the answer, or does not know the request         GIVEN
         OpenCode cannot be reached with a person's answer               WAITING
         the sender leaves before OpenCode has taken the answer          RETRY
         OpenCode cannot be reached with an answer that was due          RETRY
GIVEN    OpenCode does not confirm a person's answer in time             WAITING
any      OpenCode says that it is settled, or no longer lists it         SETTLED
=======  ==============================================================  =======================

An answer is stored before OpenCode is given it, and counts when OpenCode confirms it. Each
interrupt leaves one audit record when it is settled.

A request that is open is known in these places. After a crash, each is filled from the log of the
task or from the row:

==========================  ============================  =====================  ===============
place                       added by                      removed by             after a crash
==========================  ============================  =====================  ===============
the row in the table        ``store_asked``               ``store_settled``      is kept
``Status.pending``          an entry of the log           an entry of the log    by the log
``Emitted.open``            ``Reader._emit``              ``Reader._emit``       by the log [1]_
``TurnRequests.pending``    an event or a snapshot        an event, a snapshot   ``Emitted.open``
``WorkInterrupts.open``     ``ask_and_settle``            ``ask_and_settle``     by the row
``SharedInterrupts.open``   together with the one above   with the one above     by the row
==========================  ============================  =====================  ===============

.. [1] Requests that a rule or a grant answers are not in the log: they are added by the row.

The row is written first and the log last, when a request is asked and when it is settled. What a
crash kept from the log is written to it after the restart (``unlogged``).
"""

import asyncio
from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum, auto

import orjson
import structlog
from sqlalchemy.engine import Connection

from opencode_a2a import metrics
from opencode_a2a.bounds import wait
from opencode_a2a.clock import now_ms
from opencode_a2a.config import Settings
from opencode_a2a.errors import (
    InterruptNotFoundError,
    ServiceError,
    SessionNotFoundError,
    StoreUnavailableError,
    UpstreamError,
    UpstreamNotFoundError,
    UpstreamPayloadError,
    UpstreamUnreachableError,
)
from opencode_a2a.events import (
    Emitted,
    Finished,
    Interrupted,
    Resumed,
    ToolChanged,
    TurnEvent,
    load_known,
)
from opencode_a2a.ids import ContextId, Owner, Principal, RequestId, SessionId
from opencode_a2a.messages import Answered, Message
from opencode_a2a.opencode.driver import Driver, Location
from opencode_a2a.opencode.translate import interrupted
from opencode_a2a.rights import NARROWEST, Rights
from opencode_a2a.store import interrupts as interrupt_rows
from opencode_a2a.store.database import Database, Write, readable
from opencode_a2a.store.interrupts import InterruptRow
from opencode_a2a.telemetry import AUDIT
from opencode_a2a.turns import snapshot
from opencode_a2a.turns.answers import (
    Answer,
    PermissionReply,
    QuestionRejection,
    QuestionReply,
    Reply,
    Scope,
    check_allowed,
)
from opencode_a2a.turns.policy import (
    Grant,
    Grants,
    expiry,
    expiry_text,
    give,
    known_answer,
    progress,
    record_given,
)

logger = structlog.get_logger(__name__)

CONFIRM_SECONDS = 10.0
"""Seconds in which OpenCode has to confirm an answer that it took."""
LOST_SECONDS = 1.5
"""Seconds after which the event that confirms an answer counts as lost: OpenCode (1.18) says that a
connection to its events is open a moment before it is."""
CONNECT_SECONDS = 10.0
"""Seconds that an answer waits for its turn to be connected after a restart of the service."""
CLOCK, ELSEWHERE = "deadline", "elsewhere"
"""Recorded as ``by`` when an interrupt was settled by no principal, grant or rule."""
STOPPED_MESSAGE = "The turn stopped before OpenCode confirmed the answer; try again"


class Stage(Enum):
    """How far an interrupt has come; the table above says how it moves on."""

    NEW = auto()
    WAITING = auto()
    DUE = auto()
    """Its answer is known, and OpenCode has not been given it."""
    RETRY = auto()
    """OpenCode may have been given its answer, and is given it once more."""
    SENDING = auto()
    GIVEN = auto()
    """OpenCode will say no more about it except that it is settled."""
    EXPIRED = auto()
    SETTLED = auto()


class AfterAttend(Enum):
    """What the work that asks has to do next."""

    GO_ON = auto()
    COMPARE = auto()
    """Read OpenCode's state: OpenCode does not know an interrupt that is open here."""
    STOP_EXPIRED = auto()
    """Stop OpenCode: nobody answered in time."""
    STOP_FORGED = auto()
    """Stop OpenCode: an interrupt was answered past this service, where that is not allowed."""


@dataclass(eq=False, slots=True)
class Interrupt:
    """A permission or question on whose answer OpenCode waits."""

    asked: Interrupted
    asker: "WorkInterrupts"
    """The interrupts of the turn or errand that it stops."""
    stage: Stage = Stage.NEW
    for_person: bool = True
    """Whether a person is asked, since neither a rule nor a grant had the answer."""
    due: Answer | None = None
    """The answer that OpenCode is given in the stage DUE."""
    given: Answer | None = None
    """The latest answer that OpenCode may have: also in WAITING, if it could not be delivered."""
    counted: Answer | None = None
    """The answer that settled it, if any."""
    implied: Answer | None = None
    """An answer to another request by which OpenCode may settle this one too."""
    timer: asyncio.TimerHandle | None = None
    logged: asyncio.Event = field(default_factory=asyncio.Event)
    """Set once the log of the task says how it was settled, or the work stopped before that."""

    @property
    def waits(self) -> bool:
        """Whether it stops the turn until a person has answered."""
        return self.for_person and self.stage not in (Stage.NEW, Stage.SETTLED)

    def answerable(self, answer: Answer) -> bool:
        """Whether a person may answer it now, with this answer."""
        # One that OpenCode is given once more can only be repeated: OpenCode may have acted on it.
        repeats = self.stage is Stage.RETRY and self.given == answer
        return self.for_person and (self.stage is Stage.WAITING or repeats)

    def leave_sending(self, to: Stage) -> None:
        """Go to a stage after sending, unless an event has settled it meanwhile."""
        if self.stage is Stage.SENDING:
            self.stage = to

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
    ``ending``: the turn is over; ``busy``: OpenCode was at work when its state was last read. The
    first row that applies decides:

    =======================================================  =====================================
    case                                                     settled
    =======================================================  =====================================
    the turn ends at the deadline (EXPIRED)                  expired, by the clock
    reported, and our answer says the same                   by our answer
    void, it ran, and our answer is not a refusal            by our answer
    void, and our answer was GIVEN or the turn goes on       by our answer
    an answer to another request explains it                 by that answer
    void, but a permission whose call ran                    once, past us
    void, while OpenCode is busy and the turn goes on        void, past us
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
        elif allowed and answer.resolution != "rejected":
            taken = True
        else:
            # A request that vanished has taken the answer that was on its way to it.
            taken = interrupt.stage is Stage.GIVEN or not ending
        if taken:
            resolution = "expired" if answer.by == CLOCK else answer.resolution
            return Settlement(replace(event, by=answer.by, resolution=resolution), answer)
    if implied is not None and event.resolution in (implied.resolution, "void"):
        counted = implied if implied.resolution == "rejected" else None
        return Settlement(replace(event, by=implied.by), counted)
    if void and allowed:
        event, void = replace(event, resolution="once"), False
    if void:
        # It was dropped with the end of the turn, or, while OpenCode works on, answered.
        return Settlement(event, answered_past_us=busy and not ending)
    return Settlement(replace(event, by=ELSEWHERE), answered_past_us=True)


@dataclass(frozen=True, slots=True)
class StoredInterrupt:
    """An interrupt of a turn or an errand as the table has it."""

    asked: Interrupted
    answer: Answer | None
    """The latest answer, if it has settled the interrupt or may yet do so."""
    resumed: Resumed | None
    """How it was settled; None if it is not."""
    settled_at: int | None


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
        elif resumed is not None and resumed.by not in (None, ELSEWHERE):
            if one.answer is None and resumed.by == CLOCK:
                continue  # the turn has to end because of it
            if one.answer is not None and one.answer.message is not None:
                missing.append(Answered(one.answer.message))
            missing.append(resumed)
    return missing


class SharedInterrupts:
    """What all turns and errands share: the interrupts that are open, their table, OpenCode."""

    def __init__(self, database: Database, opencode: Driver, settings: Settings) -> None:
        self._database = database
        self.opencode = opencode
        self.grants = Grants(database)
        self.settings = settings.interrupts
        self.console_answers = settings.console_answers
        """Whether people may answer past this service, at OpenCode's own terminal."""
        self._rights = settings.auth.rights
        self.sessions_with_turn: dict[SessionId, WorkInterrupts] = {}
        """The turn that runs in a session: it is asked everything that the session asks."""
        self.open: dict[RequestId, Interrupt] = {}
        """Interrupts that are not settled. A turn and an errand may follow the same session; the
        first of them to hear of a request asks it, and the other does not."""

    @property
    def allows_always(self) -> bool:
        return self.settings.allow_always and self.opencode.features.always

    async def reply(self, asked: Interrupted, reply: Reply, at: Location) -> None:
        """Send OpenCode a reply."""
        match reply:
            case PermissionReply():
                await self.opencode.reply_permission(
                    asked.request_id, reply.reply, reply.message, at=at
                )
            case QuestionReply():
                await self.opencode.reply_question(asked.request_id, reply.answers, at=at)
            case QuestionRejection():
                await self.opencode.reject_question(asked.request_id, at=at)

    async def store_asked(
        self, owner: Owner, asked: Interrupted, known: Answer | None = None
    ) -> Interrupted:
        """Store an interrupt; return it with its number, its deadline and the default then.

        If its answer is ``known``, that is stored with it, and nobody is asked.
        """
        settings, now = self.settings, now_ms()
        expires_at = now + int(settings.interrupt_request_ttl_seconds * 1000)
        asked = replace(
            asked,
            asked_at=now,
            expires_at=expires_at,
            default=expiry_text(settings, asked),
            allows_always=self.allows_always and asked.type == "permission",
        )
        new = InterruptRow(
            asked.request_id,
            owner.task_id or "",
            owner.context_id,
            owner.principal,
            asked.type,
            orjson.dumps(asked),
            expires_at,
            answer=None if known is None else known.dump(),
            rights=orjson.dumps(owner.rights),
        )
        # Only a request that a task puts to a person has a number: nobody has to name others.
        numbered = known is None and owner.task_id is not None
        # One that was asked before a restart keeps its deadline.
        row = await self._database.write_until_stored(interrupt_rows.add, new, numbered=numbered)
        metrics.INTERRUPT_REQUESTS.labels(asked.type).inc()
        return replace(asked, expires_at=row.expires_at, number=row.number)

    async def store_answer(
        self,
        request_ids: Sequence[str],
        answer: Answer,
        in_same_commit: Write | None = None,
        *,
        insist: bool = False,
    ) -> None:
        """Store an answer, and run ``in_same_commit`` with that, before OpenCode is given it.

        Otherwise a service that is killed in between would take the caller's repeat for the
        answer to the next interrupt. ``insist`` waits for a database that is away.
        """

        def write(connection: Connection) -> None:
            for request_id in request_ids:
                interrupt_rows.store_answer(connection, request_id, answer.dump())
            if in_same_commit is not None:
                in_same_commit(connection)

        await (self._database.write_until_stored(write) if insist else self._database.write(write))

    async def store_settled(
        self, owner: Owner, asked: Interrupted, resumed: Resumed, scope: Scope | None = None
    ) -> Grant | None:
        """Record in the table and in the audit log how an interrupt ended.

        With a scope the person has allowed more than this request: store and return the grant.
        """
        now = now_ms()

        def write(connection: Connection) -> tuple[bool, Grant | None]:
            settled = interrupt_rows.settle(
                connection, resumed.request_id, resumed.resolution, now, resumed.by
            )
            if not settled or scope is None:
                return settled, None
            return settled, give(connection, owner, asked, scope, now)

        settled, grant = await self._database.write_until_stored(write)
        if not settled:  # an earlier process did, and recorded it
            return None
        if grant is not None and grant.request_id == asked.request_id:
            record_given(grant)
        record_settled(owner, asked, resumed)
        return grant

    async def stored(self, task_id: str, context_id: str) -> list[StoredInterrupt]:
        """Return all interrupts of a task, or of an errand, for which the task id is empty."""
        found: list[StoredInterrupt] = []
        # The work may be running, and cannot go on without: wait for a database that is away.
        for row in await self._database.read_until_available(
            interrupt_rows.of_work, task_id, context_id
        ):
            asked = Interrupted.load(orjson.loads(row.asked))
            asked = replace(asked, expires_at=row.expires_at, number=row.number)
            resumed, answer = None, Answer.load(row.answer) if row.answer else None
            if row.resolution is not None:
                resumed = Resumed(asked.request_id, asked.type, row.resolution, row.settled_by)
                answer = answer if answer and answer.by == row.settled_by else None
            found.append(StoredInterrupt(asked, answer, resumed, row.settled_at))
        return found

    async def errand_owners(self) -> list[Owner]:
        """Return the owners of the errands whose interrupts an earlier process left open."""

        def load(row: InterruptRow) -> Owner:
            # An earlier version did not store the rights; the deployment may allow less now.
            rights = load_known(Rights, orjson.loads(row.rights)) if row.rights else NARROWEST
            context_id, principal = ContextId(row.context_id), Principal(row.principal)
            return Owner(None, context_id, principal, rights & self._rights)

        owners: dict[str, Owner] = {}
        left = await self._database.read(interrupt_rows.left)
        for owner in readable("a permission or question", left, load):
            owners.setdefault(owner.context_id, owner)
        return [*owners.values()]

    async def pending(self, principal: Principal | None, kind: str) -> list[Interrupt]:
        """Return the interrupts that a principal is asked now, or everybody; most urgent first."""
        found = await self._database.read(interrupt_rows.pending, principal, kind)
        waiting = (self.open.get(RequestId(row.request_id)) for row in found)
        return [one for one in waiting if one is not None and one.waits]

    async def find(self, request_id: str) -> InterruptRow | None:
        """Return the row of an interrupt, also of a settled one."""
        return await self._database.read(interrupt_rows.find, request_id)


def record_settled(owner: Owner, asked: Interrupted, resumed: Resumed) -> None:
    """Record in the audit log how an interrupt ended."""
    metrics.INTERRUPT_RESOLVED.labels(resumed.resolution).inc()
    AUDIT.info(
        "interrupt settled",
        request_id=asked.request_id,
        type=asked.type,
        task_id=owner.task_id,
        principal=owner.principal,
        permission=asked.permission,
        patterns=asked.patterns,
        asked_at=asked.asked_at,
        resolution=resumed.resolution,
        by=resumed.by,
        settled_at=now_ms(),
    )


def record_void(owner: Owner, rows: Iterable[InterruptRow]) -> None:
    """Record in the audit log that interrupts ended with their task."""
    for row in rows:
        try:
            asked = Interrupted.load(orjson.loads(row.asked))
        except (KeyError, TypeError, ValueError):  # its task ends because it cannot be read
            asked = Interrupted(RequestId(row.request_id), row.type, SessionId("unknown"))
        record_settled(owner, asked, Resumed(asked.request_id, asked.type, "void"))


@dataclass(eq=False, slots=True)
class WorkInterrupts:
    """The interrupts of one turn, or of one errand.

    The turn passes all events of the session through ``ask_and_settle``, says with ``note_logged``
    that they are in the log, and calls ``attend`` whenever it is woken. If it stops OpenCode, it
    says so with ``refuse_all``, ``go_on`` and ``reject_leftovers``. One that an earlier process
    began starts with ``restore``; ``close`` ends it. Other tasks of asyncio call ``answer`` and
    ``repeat`` for a person.
    """

    shared: SharedInterrupts
    owner: Owner
    wake: Callable[[], None]
    """Has the work call ``attend``."""
    location: Location = field(default_factory=Location)
    """Where the session runs."""
    connected: asyncio.Event = field(default_factory=asyncio.Event)
    """Set once answers can be given: at once for new work, and for a turn that an earlier process
    began when it follows its session. The end sets it too."""
    busy: bool = False
    """Whether OpenCode was at work when its state was last read, by the turn or errand."""
    forged: bool = False
    """Whether an interrupt was answered past this service, where that is not allowed."""
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when the turn begins or ceases to wait for a person, and replaced by a new event."""
    open: dict[RequestId, Interrupt] = field(default_factory=dict[RequestId, Interrupt])
    """Interrupts that are not settled, whether a person is asked or not."""
    _settled: list[Interrupt] = field(default_factory=list[Interrupt])
    """Interrupts that are settled, but not yet in the log."""
    _refusing: Answer | None = None
    """The refusal by the person who has the turn stopped; it is also for requests that are heard of
    only afterwards."""
    _unknown: bool = False
    """Whether OpenCode may not have an interrupt any more that is open here."""
    _closed: bool = False

    @property
    def waiting(self) -> bool:
        """Whether the turn is waiting for a person."""
        return any(interrupt.waits for interrupt in self.open.values())

    def restore(self, stored: Sequence[StoredInterrupt], asked: Container[RequestId]) -> None:
        """Take over the interrupts of an earlier process, with the rest of their time.

        ``asked`` are those that a person was asked; others are taken over only if a rule or a grant
        has answered them. Nobody knows whether OpenCode got the answers that are stored. They are
        given once more: OpenCode refuses an answer to a request that is not pending.
        """
        for one in stored:
            request_id, for_person = one.asked.request_id, one.asked.request_id in asked
            # Without an answer it is judged anew if OpenCode still asks.
            over = not for_person and (one.resumed is not None or one.answer is None)
            if over or request_id in self.open:
                continue
            stage = Stage.WAITING if one.answer is None else Stage.RETRY
            interrupt = Interrupt(one.asked, self, stage, for_person=for_person, given=one.answer)
            self.open[request_id] = self.shared.open[request_id] = interrupt
            self._arm(interrupt)
        for one in stored:
            if one.answer is not None and one.settled_at is not None:
                self._note_implied(one.asked, one.answer, one.settled_at)
        self.wake()

    def close(self) -> None:
        """Stop; interrupts that are open stay open in OpenCode, and for the next process."""
        self._closed = True
        for request_id, interrupt in self.open.items():
            self.shared.open.pop(request_id, None)
            if interrupt.timer is not None:
                interrupt.timer.cancel()
        # Nothing will confirm the answers that callers of ``answer`` wait for.
        self.connected.set()
        for interrupt in (*self._settled, *self.open.values()):
            interrupt.logged.set()
        self.changed.set()

    # Asked

    async def ask_and_settle(self, events: list[TurnEvent]) -> list[TurnEvent | Answered]:
        """Store new interrupts, settle those that have ended, and store grants.

        Return the events for the log: interrupts with number and deadline, ends with who answered.
        """
        if not any(isinstance(event, Interrupted | Resumed) for event in events):
            return [*events]
        out: list[TurnEvent | Answered] = []
        ending = any(isinstance(event, Finished) for event in events)
        changed = [event for event in events if isinstance(event, ToolChanged)]
        ran = {call.call_id for call in changed if call.status == "completed"}
        for event in events:
            match event:
                case Interrupted():
                    if event.request_id not in self.shared.open:  # else it is asked already
                        out.append(await self._ask(event))
                case Resumed():
                    interrupt = self.open.pop(event.request_id, None)
                    if interrupt is not None:  # else other work asked
                        asked = interrupt.asked
                        settled = judge_end(
                            interrupt,
                            event,
                            ran=asked.call_id in ran,
                            ending=ending,
                            busy=self.busy,
                        )
                        out += await self._close_interrupt(interrupt, settled)
                case _:
                    out.append(event)
        self.changed.set()
        self.changed = asyncio.Event()
        return out

    async def _ask(self, asked: Interrupted) -> TurnEvent:
        """Ask a person, unless the answer is known; return the event for the log."""
        # A grant is for one directory, so that it has to be known.
        asked = replace(asked, directory=asked.directory or self.location.directory)
        interrupt = Interrupt(asked, self, implied=self._refusing)
        # Before anything is awaited: an errand in the same session must not ask it as well.
        self.open[asked.request_id] = self.shared.open[asked.request_id] = interrupt
        if asked.call_id is not None and asked.tool_input is None:
            try:
                called = await snapshot.tool_call(self.shared.opencode, asked)
                if called is not None:
                    asked = replace(asked, tool=called.tool, tool_input=called.state.input)
            except (UpstreamError, SessionNotFoundError) as error:  # a sub-agent's may be deleted
                logger.warning("input of a tool call not known", error=error.message)
        known = await known_answer(self.shared.settings, self.shared.grants, self.owner, asked)
        asked = await self.shared.store_asked(self.owner, asked, known)
        interrupt.asked, interrupt.for_person = asked, known is None
        if known is None:
            interrupt.stage = Stage.WAITING
            self._arm(interrupt)
            return asked
        self._make_due(interrupt, known)
        return progress(asked, known)

    def _arm(self, interrupt: Interrupt) -> None:
        """Wake the turn at the deadline of an interrupt, to give the default answer."""
        left = ((interrupt.asked.expires_at or 0) - now_ms()) / 1000
        if not self.owner.rights.waits:
            left = 0.0
        interrupt.timer = asyncio.get_running_loop().call_later(max(0.0, left), self.wake)

    def _make_due(self, interrupt: Interrupt, answer: Answer) -> None:
        """Have the turn give an answer that is stored."""
        interrupt.stage, interrupt.due = Stage.DUE, answer
        self.wake()

    # Answered

    async def attend(self) -> AfterAttend:
        """Give OpenCode the answers that are due; return what the work has to do next.

        At the deadline, a person's answer that could not be delivered goes before the default.
        """
        now = asyncio.get_running_loop().time()
        if self.forged:
            return AfterAttend.STOP_FORGED
        for interrupt in [*self.open.values()]:
            asked, before = interrupt.asked, interrupt.stage
            answer = interrupt.due if before is Stage.DUE else interrupt.given
            late = before is Stage.WAITING and interrupt.timer and interrupt.timer.when() <= now
            if late and answer is None:
                reply = expiry(self.shared.settings, asked)
                if reply is None:
                    interrupt.stage = Stage.EXPIRED
                else:
                    answer = Answer(reply, CLOCK)
            if interrupt.stage is Stage.EXPIRED:
                return AfterAttend.STOP_EXPIRED
            if answer is None or not (late or before in (Stage.DUE, Stage.RETRY)):
                continue
            interrupt.stage = Stage.SENDING
            try:
                if late:
                    await self.shared.store_answer([asked.request_id], answer, insist=True)
                await self._send(interrupt, answer)
            except UpstreamNotFoundError:
                pass  # OpenCode's state, which is read next, says why
            except UpstreamError as error:
                logger.warning(
                    "interrupt not answered", request_id=asked.request_id, error=error.message
                )
            finally:
                interrupt.leave_sending(Stage.WAITING if late else Stage.RETRY)
        if self._unknown:
            self._unknown = False
            return AfterAttend.COMPARE
        return AfterAttend.GO_ON

    async def answer(
        self, request_ids: Sequence[str], answer: Answer, in_same_commit: Write | None = None
    ) -> None:
        """Answer for a person; return once OpenCode has confirmed the answer to each request.

        ``in_same_commit`` runs in the transaction that stores the answer, before OpenCode gets it.
        """
        await self._wait_connected()  # then the answers that an earlier process stored are known
        found: list[Interrupt] = []
        for request_id in request_ids:
            interrupt = self.open.get(RequestId(request_id))
            if interrupt is None or not interrupt.answerable(answer):
                raise InterruptNotFoundError(request_id=request_id[:128])
            allow_always = self.shared.allows_always
            check_allowed(self.owner, interrupt.asked, answer, allow_always=allow_always)
            found.append(interrupt)
        before = [(interrupt, interrupt.stage) for interrupt in found]
        for interrupt in found:
            interrupt.stage = Stage.SENDING  # from here on nobody else can answer
        try:
            await self.shared.store_answer(request_ids, answer, in_same_commit)
        except BaseException:
            for interrupt, stage in before:
                interrupt.leave_sending(stage)
            raise
        failed: dict[Interrupt, ServiceError] = {}
        try:
            for interrupt in found:
                try:
                    await self._send_and_confirm(interrupt, answer)
                except ServiceError as error:
                    failed[interrupt] = error
        finally:
            for interrupt in found:
                if interrupt.stage is Stage.SENDING:  # the turn gives it, since it is stored
                    interrupt.stage, interrupt.given = Stage.RETRY, answer
            self.wake()  # also because the deadline may have passed meanwhile
        if failed:
            raise _outcome(found, failed)

    async def repeat(self, message: Message) -> None:
        """Make sure that OpenCode gets the answer in a message that was accepted before."""
        await self._wait_connected()
        # Those that are settled but not in the log yet are no longer open; wait for these too.
        for interrupt in (*self._settled, *self.open.values()):
            settled = interrupt.stage is Stage.SETTLED
            answer = interrupt.counted if settled else interrupt.given
            if answer is None or answer.message != message:
                continue
            if interrupt.stage in (Stage.WAITING, Stage.RETRY):
                interrupt.stage = Stage.SENDING
                await self._send_and_confirm(interrupt, answer)
            else:
                await self._wait_confirmed(interrupt, answer)

    async def _wait_connected(self) -> None:
        """Wait until answers can be given, which takes a moment after a restart of the service."""
        if not await wait(self.connected, CONNECT_SECONDS):
            raise UpstreamUnreachableError("The turn is not connected to OpenCode yet; try again")
        if self._closed and self.open:
            raise UpstreamUnreachableError(STOPPED_MESSAGE)

    async def _send_and_confirm(self, interrupt: Interrupt, answer: Answer) -> None:
        """Give OpenCode an answer, and wait until OpenCode confirms that it counts."""
        try:
            if interrupt.stage is Stage.SENDING:  # else it was settled together with another one
                await self._send(interrupt, answer)
        except UpstreamNotFoundError:
            if answer not in (interrupt.counted, interrupt.given, interrupt.implied):
                raise InterruptNotFoundError(request_id=interrupt.asked.request_id) from None
        except ServiceError:
            interrupt.leave_sending(Stage.WAITING)
            raise
        except BaseException:  # the caller has left; the answer is stored, and has to be given
            interrupt.leave_sending(Stage.RETRY)
            self.wake()
            raise
        await self._wait_confirmed(interrupt, answer)

    async def _send(self, interrupt: Interrupt, answer: Answer) -> None:
        """Give OpenCode an answer that is stored."""
        asked, earlier, interrupt.given = interrupt.asked, interrupt.given, answer
        self._note_implied(asked, answer)
        try:
            await self.shared.reply(asked, answer.reply, self._at(asked))
        except UpstreamNotFoundError:
            # It is not pending: OpenCode took an earlier try, or an answer from elsewhere.
            interrupt.given = earlier
            interrupt.leave_sending(Stage.GIVEN)
            for other in self.open.values():
                if earlier is None and other.implied is answer and answer.resolution == "always":
                    other.implied = None
            self._compare()
            raise
        interrupt.leave_sending(Stage.GIVEN)
        asyncio.get_running_loop().call_later(LOST_SECONDS, self._compare_unconfirmed, interrupt)

    def _compare_unconfirmed(self, interrupt: Interrupt) -> None:
        if interrupt.stage is Stage.GIVEN and not self._closed:
            self._compare()

    def _compare(self) -> None:
        """Have OpenCode's stored state say what became of a request."""
        self._unknown = True
        self.wake()

    async def _wait_confirmed(self, interrupt: Interrupt, answer: Answer) -> None:
        """Wait until an interrupt is settled; raise an error if not by this answer."""
        if not await wait(interrupt.logged, CONFIRM_SECONDS):
            if interrupt.stage is Stage.SETTLED:
                # OpenCode has confirmed it, but the database is away.
                raise StoreUnavailableError(operation="persisting")
            if interrupt.stage is Stage.GIVEN:
                interrupt.stage = Stage.WAITING
            raise UpstreamPayloadError(
                "OpenCode accepted the answer but did not confirm it. Try again."
            )
        if self._closed and interrupt.stage is not Stage.SETTLED:
            raise UpstreamUnreachableError(STOPPED_MESSAGE)
        if interrupt.counted != answer:
            raise InterruptNotFoundError(request_id=interrupt.asked.request_id)

    # Settled

    async def _close_interrupt(
        self, interrupt: Interrupt, settled: Settlement
    ) -> list[TurnEvent | Answered]:
        """Record how an interrupt ended, and its consequences; return the events for the log."""
        asked, resumed, counted = interrupt.asked, settled.resumed, settled.answer
        self.shared.open.pop(asked.request_id, None)
        if interrupt.timer is not None:
            interrupt.timer.cancel()
        if counted is not None and counted is interrupt.given:
            self._note_implied(asked, counted)  # also for requests that came since it was sent
        if settled.answered_past_us and not self.shared.console_answers:
            self.forged = True
            AUDIT.warning(
                "interrupt answered past the service",
                request_id=asked.request_id,
                type=asked.type,
                task_id=self.owner.task_id,
                principal=self.owner.principal,
                session_id=asked.session_id,
                permission=asked.permission,
                patterns=asked.patterns,
                resolution=resumed.resolution,
            )
        interrupt.stage, interrupt.counted = Stage.SETTLED, counted
        self._settled.append(interrupt)
        scope = None
        if counted is not None and isinstance(counted.reply, PermissionReply):
            scope = counted.reply.scope
        grant = await self.shared.store_settled(self.owner, asked, resumed, scope)
        if grant is not None:
            covered = [
                other
                for other in self.open.values()
                # An answer that could not be delivered yet is that person's word on it.
                if other.stage is Stage.WAITING
                and other.given is None
                and grant.covers(self.owner, other.asked)
            ]
            allowed = Answer(PermissionReply("once"), grant.by)
            requests = [other.asked.request_id for other in covered]
            await self.shared.store_answer(requests, allowed, insist=True)
            for other in covered:
                self._make_due(other, allowed)
        if not interrupt.for_person:
            return []
        message = counted and counted.message
        return [resumed] if message is None else [Answered(message), resumed]

    def note_logged(self) -> None:
        """Note that these events are in the log: callers of ``answer`` may return."""
        for interrupt in self._settled:
            interrupt.logged.set()
        self._settled.clear()

    def _note_implied(
        self, asked: Interrupted, answer: Answer, settled_at: int | None = None
    ) -> None:
        """Note which other interrupts OpenCode may settle with the answer to one.

        After a refusal OpenCode refuses all that is pending in the session; after its own "always"
        it allows what that covers. Neither is for requests that came after it was settled.
        """
        if answer.resolution not in ("rejected", "always"):
            return
        for other in self.open.values():
            same = answer.resolution == "rejected" or other.asked.permission == asked.permission
            later = settled_at is not None and (other.asked.asked_at or 0) > settled_at
            if same and other.asked.session_id == asked.session_id and not later:
                other.implied = answer

    # Stopped

    def refuse_all(self, by: Principal) -> None:
        """Note that a person has the turn stopped, and so refuses everything that it asks."""
        self._refusing = Answer(PermissionReply("reject"), by)
        for interrupt in self.open.values():
            interrupt.implied = self._refusing

    def voided(self) -> list[Resumed]:
        """Return the events that end all open interrupts without an answer."""
        asked = [interrupt.asked for interrupt in self.open.values()]
        return [Resumed(one.request_id, one.type, "void") for one in asked]

    def note_stopped(self) -> None:
        """Note that OpenCode was stopped as ``attend`` asked, and may be given other work."""
        self.forged = False

    def go_on(self) -> None:
        """Note that the turn goes on after it was stopped: new requests are asked again."""
        self._refusing = None

    async def reject_leftovers(self, sessions: Container[SessionId]) -> None:
        """Reject the requests that are pending after the turn was stopped: OpenCode does not."""
        for interrupt in [*self.open.values()]:
            await self._reject(interrupt.asked)
        permissions, questions = await snapshot.pending(self.shared.opencode, self.location)
        for request in (*(permissions or ()), *(questions or ())):
            if request.session_id in sessions:  # asked at the last moment, and not heard of
                await self._reject(interrupted(request, None, self.location.directory))

    async def _reject(self, asked: Interrupted) -> None:
        reply = PermissionReply("reject") if asked.type == "permission" else QuestionRejection()
        try:
            await self.shared.reply(asked, reply, self._at(asked))
        except UpstreamError as error:
            logger.debug("leftover not rejected", error=error.message)

    def _at(self, asked: Interrupted) -> Location:
        return Location(directory=asked.directory) if asked.directory else self.location


def _outcome(found: Sequence[Interrupt], failed: dict[Interrupt, ServiceError]) -> ServiceError:
    """Return the error for an answer that did not count for all its requests.

    An error that passes if the answer is sent again decides.
    """
    errors, passing = [*failed.values()], (UpstreamError, StoreUnavailableError)
    error = next((one for one in errors if isinstance(one, passing)), errors[0])
    if len(found) == 1:
        return error
    counted = ", ".join(one.name for one in found if one not in failed) or "none"
    missed = "; ".join(f"not for {one.name}: {why.message}" for one, why in failed.items())
    error.message = f"The answer counted for {counted}; {missed}"
    return error
