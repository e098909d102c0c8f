"""Interrupts: permissions and questions that stop a turn until somebody answers.

``WorkInterrupts`` holds the interrupts of one turn, or of one errand (see ``errands``), from the
request to its end. It calls ``SharedInterrupts``, which all turns and errands share: the interrupts
that are open now, the table, and the way to OpenCode. ``tasks`` and ``extensions`` bring the answer
of a person to the ``WorkInterrupts`` that asked. An ``Interrupt`` goes through these stages:

=========  ============================================================  ====================
stage      what happens                                                  next stage
=========  ============================================================  ====================
NEW        it is stored with number and deadline: a person is asked      WAITING
           it is stored: a rule or a grant has the answer                DUE
WAITING    a person answers                                              SENDING
           a person gives a grant that covers it                         DUE
           the deadline passes: a person's answer that could not be
           delivered is given, otherwise the default answer              SENDING
           the deadline passes, and the default is to end the turn       EXPIRED
DUE        the turn gives the answers that are due                       SENDING
           a person answers before that, if OpenCode was given nothing   SENDING
SENDING    OpenCode takes the answer, or does not know the request       DELIVERED
           OpenCode cannot be reached with a person's answer             WAITING
           its caller leaves before OpenCode has taken it                DUE
           OpenCode cannot be reached with an answer that was due        DUE
DELIVERED  OpenCode does not confirm a person's answer in time           WAITING
any        OpenCode says that it is settled, or no longer lists it       SETTLED
=========  ============================================================  ====================

An answer is stored before OpenCode is given it, and counts when OpenCode confirms it. After a
restart an interrupt is WAITING, with the rest of its time, or DUE if an answer is stored. Each
interrupt leaves one audit record when it is settled.
"""

import asyncio
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum, auto
from fnmatch import fnmatchcase

import orjson
import structlog
from sqlalchemy.engine import Connection

from opencode_a2a import metrics
from opencode_a2a.bounds import wait
from opencode_a2a.clock import now_ms
from opencode_a2a.config import InterruptSettings, Settings
from opencode_a2a.errors import (
    AuthorizationForbiddenError,
    InterruptNotFoundError,
    InterruptTypeMismatchError,
    InvalidParamsError,
    ServiceError,
    UpstreamError,
    UpstreamNotFoundError,
    UpstreamPayloadError,
    UpstreamUnreachableError,
)
from opencode_a2a.events import Finished, Interrupted, Progressed, Resumed, ToolChanged, TurnEvent
from opencode_a2a.ids import ContextId, Owner, Principal, RequestId, SessionId
from opencode_a2a.messages import Answered, Message
from opencode_a2a.opencode.client import Location, OpenCode
from opencode_a2a.opencode.translate import interrupted
from opencode_a2a.rights import NARROWEST, QUESTION, Action, Rights
from opencode_a2a.store import interrupts as interrupt_rows
from opencode_a2a.store.database import Database, Write
from opencode_a2a.store.interrupts import InterruptRow
from opencode_a2a.telemetry import AUDIT
from opencode_a2a.turns import snapshot
from opencode_a2a.turns.answers import (
    Answer,
    PermissionReply,
    QuestionRejection,
    QuestionReply,
    Reply,
)
from opencode_a2a.turns.grants import Grant, Grants, Scope, give

logger = structlog.get_logger(__name__)

CONFIRM_SECONDS = 10.0
"""Seconds in which OpenCode has to confirm an answer that it took."""
CONNECT_SECONDS = 10.0
"""Seconds that an answer waits for its turn to be connected after a restart of the service."""
RULE, CLOCK, ELSEWHERE = "rule", "deadline", "elsewhere"
"""Recorded as ``by`` when an interrupt was not settled by a principal or a grant."""
EXPIRED_MESSAGE = "Nobody answered in time. Go on without it, or say what you could not do."
DENIED_MESSAGE = "A rule of this service forbids it. Go on without it."
STOPPED_MESSAGE = "The turn stopped before OpenCode confirmed the answer; try again"
UNATTENDED_MESSAGE = (
    "Nobody is there to answer. Decide by yourself if you can, or say what you could not do."
)


class Stage(Enum):
    """How far an interrupt has come; the table above says how it moves on."""

    NEW = auto()
    WAITING = auto()
    DUE = auto()
    SENDING = auto()
    DELIVERED = auto()
    EXPIRED = auto()
    SETTLED = auto()


ANSWERABLE = (Stage.WAITING, Stage.DUE)
"""Stages in which OpenCode is being given no answer."""


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
    """The answer to give in the stage DUE."""
    answer: Answer | None = None
    """The latest answer that OpenCode may have; when SETTLED, the one that counted, if any."""
    implied: Answer | None = None
    """An answer to another request by which OpenCode may settle this one too."""
    timer: asyncio.TimerHandle | None = None
    logged: asyncio.Event = field(default_factory=asyncio.Event)
    """Set once the log of the task says how it was settled, or the work stopped before that."""

    @property
    def waits(self) -> bool:
        """Whether it stops the turn until a person has answered."""
        return self.for_person and self.stage not in (Stage.NEW, Stage.SETTLED)

    @property
    def name(self) -> str:
        return str(self.asked.number or self.asked.request_id)


def rule_action(settings: InterruptSettings, asked: Interrupted) -> Action:
    """Return what the rules do with a permission; they allow it only if they allow each pattern."""
    if asked.type != "permission" or asked.permission is None:
        return "ask"
    actions: set[Action] = set()
    for pattern in asked.patterns or ["*"]:
        action: Action = "ask"
        for rule in settings.permission_rules:  # the last rule that fits decides
            if fnmatchcase(asked.permission, rule.permission) and fnmatchcase(
                pattern, rule.pattern
            ):
                action = rule.action
        actions.add(action)
    if "deny" in actions:
        return "deny"
    return "ask" if "ask" in actions else "allow"


def expiry(settings: InterruptSettings, asked: Interrupted) -> Reply | None:
    """Return the answer to give at the deadline; None if the turn ends instead."""
    if settings.interrupt_default_action == "end-turn":
        return None
    if asked.type == "question":
        return QuestionReply([[EXPIRED_MESSAGE] for _ in asked.questions])
    return PermissionReply("reject", EXPIRED_MESSAGE)


@dataclass(frozen=True, slots=True)
class Settlement:
    """How an interrupt ended, and by whose answer."""

    resumed: Resumed
    """The event, completed for the log."""
    answer: Answer | None = None
    """The answer that counted."""
    answered_past_us: bool = False
    """Whether OpenCode was answered by nobody that this service knows of."""


def settlement(
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
    void, and our answer was DELIVERED or the turn goes on   by our answer
    an answer to another request explains it                 by that answer
    void, but a permission whose call ran                    once, past us
    void, while OpenCode is busy and the turn goes on        void, past us
    void                                                     void, by nobody
    reported                                                 as reported, past us
    =======================================================  =====================================
    """
    answer, implied, void = interrupt.answer, interrupt.implied, event.resolution == "void"
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
            taken = interrupt.stage is Stage.DELIVERED or not ending
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


class SharedInterrupts:
    """What all turns and errands share: the interrupts that are open, their table, OpenCode."""

    def __init__(self, database: Database, opencode: OpenCode, settings: Settings) -> None:
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

    def check(self, owner: Owner | None, asked: Interrupted, answer: Answer) -> None:
        """Raise an error if a person may not give this answer to an interrupt."""
        reply = answer.reply
        kind = "permission" if isinstance(reply, PermissionReply) else "question"
        if kind != asked.type:
            raise InterruptTypeMismatchError(
                request_id=asked.request_id,
                expected_interrupt_type=kind,
                actual_interrupt_type=asked.type,
            )
        permission = asked.permission or QUESTION
        granted = kind == "permission" and answer.resolution != "rejected"
        if granted and answer.rights.narrow(permission, "ask") == "deny":
            raise AuthorizationForbiddenError(
                "This credential may not allow it; it can only be used to answer no"
            )
        match reply:
            case PermissionReply(reply="always") if not self.settings.allow_always:
                text = '"always" is switched off here, since it holds for everybody; answer "once"'
                raise InvalidParamsError.of("reply", text, text)
            case PermissionReply(scope=str(scope)):
                problem = None
                if not asked.always:
                    problem = "OpenCode does not say what else this would allow"
                elif owner is None or (scope == "task" and owner.task_id is None):
                    problem = "the work was not begun by a task"
                elif answer.by != owner.principal:
                    problem = "only the caller of the task can do that"
                elif reply.reply != "once":
                    problem = f'it goes with "once", not with "{reply.reply}"'
                if problem is not None:
                    text = f'The permission cannot be given for a {scope}: {problem}; answer "once"'
                    raise InvalidParamsError.of("scope", text, text)
            case QuestionReply(answers=answers) if len(answers) > len(asked.questions):
                text = f"There are only {len(asked.questions)} questions."
                raise InvalidParamsError.of("answers", text, text)
            case _:
                pass

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

    async def store_asked(self, owner: Owner, asked: Interrupted, *, numbered: bool) -> Interrupted:
        """Store an interrupt; return it with its number, its deadline and the default then."""
        settings, now = self.settings, now_ms()
        default = "the request is rejected and the turn continues"
        if expiry(settings, asked) is None:
            default = "the turn ends"
        elif asked.type == "question":
            default = "the question is dismissed and the turn continues"
        if asked.type == "plan":
            default = "the task ends and nothing is changed"
        expires_at = now + int(settings.interrupt_request_ttl_seconds * 1000)
        asked = replace(
            asked,
            asked_at=now,
            expires_at=expires_at,
            default=default,
            allows_always=settings.allow_always and asked.type == "permission",
        )
        new = InterruptRow(
            asked.request_id,
            owner.task_id or "",
            owner.context_id,
            owner.principal,
            asked.type,
            orjson.dumps(asked),
            expires_at,
            rights=orjson.dumps(owner.rights),
        )
        # One that was asked before a restart keeps its deadline.
        row = await self._database.write_until_stored(interrupt_rows.add, new, numbered=numbered)
        metrics.INTERRUPT_REQUESTS.labels(asked.type).inc()
        return replace(asked, expires_at=row.expires_at, number=row.number)

    async def store_answer(
        self,
        request_ids: Sequence[str],
        answer: Answer,
        also: Write | None = None,
        *,
        insist: bool = False,
    ) -> None:
        """Store an answer before OpenCode is given it, and run ``also`` in the same transaction.

        Otherwise a service that is killed in between would take the caller's repeat for the
        answer to the next interrupt. ``insist`` waits for a database that is away.
        """

        def write(connection: Connection) -> None:
            for request_id in request_ids:
                interrupt_rows.store_answer(connection, request_id, answer.dump())
            if also is not None:
                also(connection)

        await (self._database.write_until_stored(write) if insist else self._database.write(write))

    async def settle(
        self, owner: Owner, asked: Interrupted, resumed: Resumed, scope: Scope | None = None
    ) -> Grant | None:
        """Record in the table and in the audit log how an interrupt ended.

        With a scope the person has allowed more than this request: store and return the grant.
        """
        now = now_ms()

        def write(connection: Connection) -> Grant | None:
            interrupt_rows.settle(
                connection, resumed.request_id, resumed.resolution, now, resumed.by
            )
            return give(connection, owner, asked, scope, now) if scope else None

        grant = await self._database.write_until_stored(write)
        if grant is not None and grant.request_id == asked.request_id:
            AUDIT.info(
                "grant given",
                grant_id=grant.id,
                principal=grant.principal,
                context_id=grant.context_id,
                task_id=grant.task_id,
                permission=grant.permission,
                patterns=[*grant.patterns],
                request_id=grant.request_id,
            )
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
            settled_at=now,
        )
        return grant

    async def stored_answers(self, owner: Owner) -> list[tuple[Interrupted, Answer]]:
        """Return the interrupts of a task or an errand whose stored answer counts, or may yet.

        That includes answers which have settled their interrupt: the service may have been killed
        before the log of the task said so, or before others were settled by them too.
        """
        where = (owner.task_id or "", owner.context_id)
        found: list[tuple[Interrupted, Answer]] = []
        # The work may be running, and cannot go on without: wait for a database that is away.
        for row in await self._database.read_until_available(interrupt_rows.answered, *where):
            answer = Answer.load(row.answer) if row.answer else None
            if answer and (row.resolution is None or row.settled_by == answer.by):
                found.append((Interrupted.load(orjson.loads(row.asked)), answer))
        return found

    async def of_errands(self) -> list[tuple[Owner, Interrupted]]:
        """Return the interrupts of errands that an earlier process left open, and their owners."""
        found: list[tuple[Owner, Interrupted]] = []
        for row in await self._database.read(interrupt_rows.left):
            # An earlier version did not store the rights; the deployment may allow less now.
            rights = Rights(**orjson.loads(row.rights)) if row.rights else NARROWEST
            context_id, principal = ContextId(row.context_id), Principal(row.principal)
            owner = Owner(None, context_id, principal, rights & self._rights)
            found.append((owner, Interrupted.load(orjson.loads(row.asked))))
        return found

    async def pending(self, principal: Principal | None, kind: str) -> list[Interrupt]:
        """Return the interrupts that a principal is asked now, or everybody; most urgent first."""
        found = await self._database.read(interrupt_rows.pending, principal, kind)
        waiting = (self.open.get(RequestId(row.request_id)) for row in found)
        return [one for one in waiting if one is not None and one.waits]

    async def find(self, request_id: str) -> InterruptRow | None:
        """Return the row of an interrupt, also of a settled one."""
        return await self._database.read(interrupt_rows.find, request_id)


class WorkInterrupts:
    """The interrupts of one turn, or of one errand.

    The turn begins with ``restore`` and ``connect``, and ends with ``close``. In between it passes
    all events of the session through ``ask_and_settle``, says with ``note_logged`` that they are in
    the log, has due answers given with ``give_due_answers``, and looks at ``stale`` and ``forged``
    afterwards. If it stops OpenCode, it says so with ``refuse_all``, ``go_on`` and
    ``reject_leftovers``. Other tasks of asyncio call ``answer`` and ``repeat`` for a person.
    """

    def __init__(
        self, interrupts: SharedInterrupts, owner: Owner, wake: Callable[[], None]
    ) -> None:
        self._interrupts = interrupts
        self.owner = owner
        self.changed = asyncio.Event()
        """Set when the turn begins or ceases to wait for a person, and replaced by a new event."""
        self._wake = wake
        self._location = Location()
        self._connected = asyncio.Event()
        """Set once answers can be given, or when the work ends without that."""
        self._closed = False
        self.open: dict[RequestId, Interrupt] = {}
        """Interrupts that are not settled, whether a person is asked or not."""
        self._settled: list[Interrupt] = []
        """Interrupts that are settled, but not yet in the log."""
        self._refusing: Answer | None = None
        """The refusal by the person who has the turn stopped; it is also for requests that are
        heard of only afterwards."""
        self.busy = False
        """Whether OpenCode was at work when its state was last read."""
        self.stale = False
        """OpenCode does not know an interrupt that is open here: its state has to be read."""
        self.forged: Interrupted | None = None
        """An interrupt that was answered past this service, where that is not allowed: the turn
        has to be stopped."""

    @property
    def waiting(self) -> bool:
        """Whether the turn is waiting for a person."""
        return any(interrupt.waits for interrupt in self.open.values())

    def restore(self, asked: Interrupted) -> None:
        """Reopen an interrupt from before a restart, with the rest of its time."""
        interrupt = Interrupt(asked, self, Stage.WAITING)
        self.open[asked.request_id] = self._interrupts.open[asked.request_id] = interrupt
        self._arm(interrupt)

    def connect(
        self,
        location: Location,
        stored_answers: Sequence[tuple[Interrupted, Answer]] = (),
        *,
        answering: bool = True,
    ) -> None:
        """Begin to give answers, first those that an earlier process stored.

        Nobody knows whether OpenCode got these. They are given once more, to the same requests:
        OpenCode refuses an answer to a request that is not pending. Without ``answering`` the turn
        is about to be stopped: no answer is given, and callers of ``answer`` wait until it has
        ended.
        """
        self._location = location
        for asked, answer in stored_answers:
            interrupt = self.open.get(asked.request_id)
            if interrupt is not None and interrupt.stage is Stage.WAITING:
                interrupt.answer = answer
                self._make_due(interrupt, answer)
            if answer.resolution == "always":
                self._note_implied(asked, answer)
        if answering:
            self._connected.set()

    def close(self) -> None:
        """Stop; interrupts that are open stay open in OpenCode, and for the next process."""
        self._closed = True
        for request_id, interrupt in self.open.items():
            self._interrupts.open.pop(request_id, None)
            if interrupt.timer is not None:
                interrupt.timer.cancel()
        # Nothing will confirm the answers that callers of ``answer`` wait for.
        self._connected.set()
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
                    if event.request_id not in self._interrupts.open:  # else it is asked already
                        out.append(await self._ask(event))
                case Resumed():
                    interrupt = self.open.pop(event.request_id, None)
                    if interrupt is not None:  # else other work asked
                        asked = interrupt.asked
                        settled = settlement(
                            interrupt,
                            event,
                            ran=asked.call_id in ran,
                            ending=ending,
                            busy=self.busy,
                        )
                        out += await self._settle(interrupt, settled)
                case _:
                    out.append(event)
        self.changed.set()
        self.changed = asyncio.Event()
        return out

    async def _ask(self, asked: Interrupted) -> TurnEvent:
        """Ask a person, unless the answer is known; return the event for the log."""
        # A grant is for one directory, so that it has to be known.
        asked = replace(asked, directory=asked.directory or self._location.directory)
        interrupt = Interrupt(asked, self, implied=self._refusing)
        # Before anything is awaited: an errand in the same session must not ask it as well.
        self._interrupts.open[asked.request_id] = interrupt
        known = await self._known_answer(asked)
        if asked.call_id is not None and asked.tool_input is None:
            # OpenCode stores the input of the tool call a moment after it asks.
            try:
                called = await snapshot.tool_call(
                    self._interrupts.opencode, asked.session_id, asked.call_id
                )
                if called is not None:
                    asked = replace(asked, tool=called.tool, tool_input=called.state.input)
            except UpstreamError as error:
                logger.warning("input of a tool call not known", error=error.message)
        # Only a request that a task puts to a person has a number: nobody has to name others.
        interrupt.for_person = known is None
        numbered = interrupt.for_person and self.owner.task_id is not None
        asked = await self._interrupts.store_asked(self.owner, asked, numbered=numbered)
        interrupt.asked, self.open[asked.request_id] = asked, interrupt
        if known is None:
            interrupt.stage = Stage.WAITING
            self._arm(interrupt)
            return asked
        self._make_due(interrupt, known)
        status = "allowed" if known.resolution == "once" else "denied"
        reason = "answered by a rule of this service"
        if known.by != RULE:
            reason = f"allowed before, by {known.by}"
        if asked.type == "question":
            subject = " ".join(question.question for question in asked.questions)
            return Progressed("question", status, asked.request_id, subject, reason=reason)
        subject = f"{asked.permission}: {', '.join(asked.patterns)}"
        return Progressed("permission", status, asked.request_id, subject, reason=reason)

    async def _known_answer(self, asked: Interrupted) -> Answer | None:
        """Return the answer by a rule, the rights of the work, or a grant; None asks a person."""
        rights, action = self.owner.rights, rule_action(self._interrupts.settings, asked)
        action = rights.narrow(asked.permission or QUESTION, action)
        if action == "ask":
            grant = await self._interrupts.grants.covering(self.owner, asked)
            return None if grant is None else Answer(PermissionReply("once"), grant.by)
        if asked.type == "question":
            return Answer(QuestionReply([[UNATTENDED_MESSAGE] for _ in asked.questions]), RULE)
        if action == "allow":
            return Answer(PermissionReply("once"), RULE)
        message = DENIED_MESSAGE if rights.waits else UNATTENDED_MESSAGE
        return Answer(PermissionReply("reject", message), RULE)

    def _arm(self, interrupt: Interrupt) -> None:
        """Wake the turn at the deadline of an interrupt, to give the default answer."""
        left = ((interrupt.asked.expires_at or 0) - now_ms()) / 1000
        if not self.owner.rights.waits:
            left = 0.0
        interrupt.timer = asyncio.get_running_loop().call_later(max(0.0, left), self._wake)

    def _make_due(self, interrupt: Interrupt, answer: Answer) -> None:
        interrupt.stage, interrupt.due = Stage.DUE, answer
        self._wake()

    # Answered

    async def give_due_answers(self) -> bool:
        """Give OpenCode the answers that are due; False if the turn has to end instead.

        At the deadline, a person's answer that could not be delivered goes before the default.
        """
        now = asyncio.get_running_loop().time()
        for interrupt in [*self.open.values()]:
            asked, before, answer = interrupt.asked, interrupt.stage, interrupt.due
            if before is Stage.WAITING and interrupt.timer and interrupt.timer.when() <= now:
                answer = interrupt.answer  # of a person, which could not be delivered
                if answer is None:
                    reply = expiry(self._interrupts.settings, asked)
                    if reply is None:
                        interrupt.stage = Stage.EXPIRED
                        return False
                    answer = Answer(reply, CLOCK)
            elif before is not Stage.DUE:
                continue
            if answer is None:
                continue
            interrupt.stage = Stage.SENDING
            try:
                await self._interrupts.store_answer([asked.request_id], answer, insist=True)
                await self._send(interrupt, answer)
            except UpstreamNotFoundError:
                pass  # OpenCode's state, which is read next, says why
            except UpstreamError as error:
                logger.warning(
                    "interrupt not answered", request_id=asked.request_id, error=error.message
                )
            finally:
                if interrupt.stage is Stage.SENDING:
                    interrupt.stage = before
        return True

    async def answer(
        self, request_ids: Sequence[str], answer: Answer, also: Write | None = None
    ) -> None:
        """Answer for a person; return once OpenCode has confirmed the answer to each request.

        ``also`` runs in the transaction that stores the answer, before OpenCode gets it.
        """
        await self._wait_connected()  # then the answers that an earlier process stored are known
        found: list[Interrupt] = []
        for request_id in request_ids:
            interrupt = self.open.get(RequestId(request_id))
            if interrupt is None or not interrupt.waits or interrupt.stage not in ANSWERABLE:
                raise InterruptNotFoundError(request_id=request_id[:128])
            if interrupt.stage is Stage.DUE and interrupt.answer not in (None, answer):
                # OpenCode may have acted on that one already, and gets it once more.
                raise InterruptNotFoundError(request_id=request_id[:128])
            self._interrupts.check(self.owner, interrupt.asked, answer)
            found.append(interrupt)
        before = [(interrupt, interrupt.stage) for interrupt in found]
        for interrupt in found:
            interrupt.stage = Stage.SENDING  # from here on nobody else can answer
        try:
            await self._interrupts.store_answer(request_ids, answer, also)
        except BaseException:
            for interrupt, stage in before:
                if interrupt.stage is Stage.SENDING:
                    interrupt.stage = stage
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
                    self._make_due(interrupt, answer)
            self._wake()  # the deadline may have passed meanwhile
        if failed:
            raise _outcome(found, failed)

    async def repeat(self, message: Message) -> None:
        """Make sure that OpenCode gets the answer in a message that was accepted before."""
        await self._wait_connected()
        # Those that are settled but not in the log yet are no longer open; wait for these too.
        for interrupt in (*self._settled, *self.open.values()):
            known = (interrupt.answer, interrupt.due)
            answer = next((one for one in known if one and one.message == message), None)
            if answer is None:
                continue
            if interrupt.stage in ANSWERABLE:
                interrupt.stage = Stage.SENDING
                await self._send_and_confirm(interrupt, answer)
            else:
                await self._wait_confirmed(interrupt, answer)

    async def _wait_connected(self) -> None:
        """Wait until answers can be given, which takes a moment after a restart of the service."""
        if not await wait(self._connected, CONNECT_SECONDS):
            raise UpstreamUnreachableError("The turn is not connected to OpenCode yet; try again")
        if self._closed and self.open:
            raise UpstreamUnreachableError(STOPPED_MESSAGE)

    async def _send_and_confirm(self, interrupt: Interrupt, answer: Answer) -> None:
        """Give OpenCode an answer, and wait until OpenCode confirms that it counts."""
        try:
            if interrupt.stage is Stage.SENDING:  # else it was settled together with another one
                await self._send(interrupt, answer)
        except UpstreamNotFoundError:
            if answer not in (interrupt.answer, interrupt.implied):
                raise InterruptNotFoundError(request_id=interrupt.asked.request_id) from None
        except ServiceError:
            if interrupt.stage is Stage.SENDING:
                interrupt.stage = Stage.WAITING
            raise
        except BaseException:  # the caller has left; the answer is stored, and has to be given
            if interrupt.stage is Stage.SENDING:
                self._make_due(interrupt, answer)
            raise
        await self._wait_confirmed(interrupt, answer)

    async def _send(self, interrupt: Interrupt, answer: Answer) -> None:
        """Give OpenCode an answer that is stored."""
        asked, earlier, interrupt.answer = interrupt.asked, interrupt.answer, answer
        self._note_implied(asked, answer)
        try:
            await self._interrupts.reply(asked, answer.reply, self._at(asked))
        except UpstreamNotFoundError:
            # It is not pending: OpenCode took an earlier try, or an answer from elsewhere.
            if interrupt.stage is Stage.SENDING:
                interrupt.answer, interrupt.stage = earlier, Stage.DELIVERED
            for other in self.open.values():
                if earlier is None and other.implied is answer and answer.resolution == "always":
                    other.implied = None
            self.stale = True
            self._wake()
            raise
        if interrupt.stage is Stage.SENDING:
            interrupt.stage = Stage.DELIVERED

    async def _wait_confirmed(self, interrupt: Interrupt, answer: Answer) -> None:
        """Wait until an interrupt is settled; raise an error if not by this answer."""
        if not await wait(interrupt.logged, CONFIRM_SECONDS):
            if interrupt.stage is Stage.DELIVERED:
                interrupt.stage = Stage.WAITING
            raise UpstreamPayloadError(
                "OpenCode accepted the answer but did not confirm it. Try again."
            )
        if self._closed and interrupt.stage is not Stage.SETTLED:
            raise UpstreamUnreachableError(STOPPED_MESSAGE)
        if interrupt.answer != answer:
            raise InterruptNotFoundError(request_id=interrupt.asked.request_id)

    # Settled

    async def _settle(
        self, interrupt: Interrupt, settled: Settlement
    ) -> list[TurnEvent | Answered]:
        """Record how an interrupt ended, and its consequences; return the events for the log."""
        asked, resumed, counted = interrupt.asked, settled.resumed, settled.answer
        self._interrupts.open.pop(asked.request_id, None)
        if interrupt.timer is not None:
            interrupt.timer.cancel()
        if counted is not None and counted is interrupt.answer:
            self._note_implied(asked, counted)  # also for requests that came since it was sent
        if settled.answered_past_us and not self._interrupts.console_answers:
            self.forged = asked
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
        interrupt.stage, interrupt.answer = Stage.SETTLED, counted
        self._settled.append(interrupt)
        scope = None
        if counted is not None and isinstance(counted.reply, PermissionReply):
            scope = counted.reply.scope
        grant = await self._interrupts.settle(self.owner, asked, resumed, scope)
        for other in self.open.values() if grant is not None else ():
            if other.stage is Stage.WAITING and grant and grant.covers(self.owner, other.asked):
                self._make_due(other, Answer(PermissionReply("once"), grant.by))
        if not interrupt.for_person:
            return []
        message = counted and counted.message
        return [resumed] if message is None else [Answered(message), resumed]

    def note_logged(self) -> None:
        """Note that these events are in the log: callers of ``answer`` may return."""
        for interrupt in self._settled:
            interrupt.logged.set()
        self._settled.clear()

    def _note_implied(self, asked: Interrupted, answer: Answer) -> None:
        """Note which other interrupts OpenCode may settle with the answer to one.

        After a refusal OpenCode refuses all that is pending in the session; after its own "always"
        it allows what that covers.
        """
        if answer.resolution not in ("rejected", "always"):
            return
        for other in self.open.values():
            same = answer.resolution == "rejected" or other.asked.permission == asked.permission
            if same and other.asked.session_id == asked.session_id:
                other.implied = answer

    # Stopped

    def refuse_all(self, by: Principal) -> None:
        """Note that a person has the turn stopped, and so refuses everything that it asks."""
        self._refusing = Answer(PermissionReply("reject"), by)
        for interrupt in self.open.values():
            interrupt.implied = self._refusing

    def go_on(self) -> None:
        """Note that the turn goes on after it was stopped: new requests are asked again."""
        self._refusing = None

    async def reject_leftovers(self, sessions: Container[SessionId]) -> None:
        """Reject the requests that are pending after the turn was stopped: OpenCode does not."""
        for interrupt in [*self.open.values()]:
            await self._reject(interrupt.asked)
        permissions, questions = await snapshot.pending(self._interrupts.opencode, self._location)
        for request in (*(permissions or ()), *(questions or ())):
            if request.session_id in sessions:  # asked at the last moment, and not heard of
                await self._reject(interrupted(request, None, self._location.directory))

    async def _reject(self, asked: Interrupted) -> None:
        reply = PermissionReply("reject") if asked.type == "permission" else QuestionRejection()
        try:
            await self._interrupts.reply(asked, reply, self._at(asked))
        except UpstreamError as error:
            logger.debug("leftover not rejected", error=error.message)

    def _at(self, asked: Interrupted) -> Location:
        return Location(directory=asked.directory) if asked.directory else self._location


def _outcome(found: Sequence[Interrupt], failed: dict[Interrupt, ServiceError]) -> ServiceError:
    """Return the error for an answer that did not count for all its requests.

    An error that passes if the answer is sent again decides.
    """
    errors = [*failed.values()]
    error = next((one for one in errors if isinstance(one, UpstreamError)), errors[0])
    if len(found) == 1:
        return error
    counted = ", ".join(one.name for one in found if one not in failed) or "none"
    missed = "; ".join(f"not for {one.name}: {why.message}" for one, why in failed.items())
    error.message = f"The answer counted for {counted}; {missed}"
    return error
