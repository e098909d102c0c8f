"""Interrupts: permissions and questions that stop a turn until somebody answers.

``WorkInterrupts`` has those of one turn, or of one errand (see ``errands``), from the request to
its end. It calls ``Interrupts``, which all share: what is open now, the table, and the way to
OpenCode. Whoever brings the answer of a person (``tasks``, ``extensions``) gives it to the
``WorkInterrupts`` that asked. An ``Interrupt`` goes through these stages:

=========  ============================================================  ====================
stage      what happens                                                  next stage
=========  ============================================================  ====================
NEW        it is stored with its number and deadline, for a person       WAITING
           the same, but a rule or a grant has the answer                DUE
WAITING    a person answers                                              SENDING
           a grant is given that covers it                               DUE
           the deadline passes: the default answer is given              SENDING
           the same, but the turn is to end then                         EXPIRED
DUE        the turn looks what is due                                    SENDING
           a person answers before that, if OpenCode was given nothing   SENDING
SENDING    OpenCode takes the answer, or does not know the request       DELIVERED
           OpenCode cannot be reached with a person's answer             WAITING
           the same, with an answer that was due                         DUE
DELIVERED  OpenCode does not confirm a person's answer in time           WAITING
any        OpenCode says that it is settled, or no longer lists it       SETTLED
=========  ============================================================  ====================

An answer is stored before OpenCode is given it, and counts when OpenCode says so. After a restart
an interrupt is WAITING, with what is left of its time, or DUE if there is an answer. Each leaves
one audit record when it is settled.
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
    Violation,
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
from opencode_a2a.telemetry import AUDIT, now_ms
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
"""How long OpenCode may take to say that an interrupt is settled once it took the answer."""
CONNECT_SECONDS = 10.0
"""How long an answer waits for its turn to be connected, after a restart of the service."""
RULE, CLOCK, ELSEWHERE = "rule", "deadline", "elsewhere"
"""Recorded as the one who settled an interrupt when that was not a principal."""
EXPIRED_MESSAGE = "Nobody answered in time. Go on without it, or say what you could not do."
DENIED_MESSAGE = "A rule of this service forbids it. Go on without it."
STOPPED_MESSAGE = "The turn stopped before OpenCode confirmed the answer; try again"
UNATTENDED_MESSAGE = (
    "Nobody is there to answer. Decide by yourself if you can, or say what you could not do."
)


class Stage(Enum):
    """Where an interrupt is in its life; the table above says how it moves on."""

    NEW = auto()
    WAITING = auto()
    DUE = auto()
    SENDING = auto()
    DELIVERED = auto()
    EXPIRED = auto()
    SETTLED = auto()


ANSWERABLE = (Stage.WAITING, Stage.DUE)


@dataclass(eq=False, slots=True)
class Interrupt:
    """A permission or question that OpenCode waits for."""

    asked: Interrupted
    asker: "WorkInterrupts"
    """Whose turn or errand it stops."""
    stage: Stage = Stage.NEW
    for_person: bool = True
    """A person is asked; neither a rule nor a grant had the answer."""
    due: Answer | None = None
    """What to give when it is due."""
    answer: Answer | None = None
    """The latest answer that OpenCode may have; once it is settled, the one that settled it."""
    implied: Answer | None = None
    """An answer to another request by which OpenCode may settle this one too."""
    timer: asyncio.TimerHandle | None = None
    logged: asyncio.Event = field(default_factory=asyncio.Event)
    """Set once the log of the task says how it was settled."""

    @property
    def waits(self) -> bool:
        """Whether it stops the turn until a person has answered."""
        return self.for_person and self.stage not in (Stage.NEW, Stage.SETTLED)

    @property
    def name(self) -> str:
        return str(self.asked.number or self.asked.request_id)


def rule_action(settings: InterruptSettings, asked: Interrupted) -> Action:
    """Say what the rules do with a permission: all its patterns have to agree to allow it."""
    if asked.type != "permission" or asked.permission is None:
        return "ask"
    actions: set[Action] = set()
    for pattern in asked.patterns or ["*"]:
        action: Action = "ask"
        for rule in settings.permission_rules:  # the last one that fits decides
            if fnmatchcase(asked.permission, rule.permission) and fnmatchcase(
                pattern, rule.pattern
            ):
                action = rule.action
        actions.add(action)
    if "deny" in actions:
        return "deny"
    return "ask" if "ask" in actions else "allow"


def expiry(settings: InterruptSettings, asked: Interrupted) -> Reply | None:
    """Return the answer at the deadline; None ends the turn."""
    if settings.interrupt_default_action == "end-turn":
        return None
    if asked.type == "question":
        return QuestionReply([[EXPIRED_MESSAGE] for _ in asked.questions])
    return PermissionReply("reject", EXPIRED_MESSAGE)


class Interrupts:
    """What all turns and errands share: the interrupts that are open, their table, OpenCode."""

    def __init__(self, database: Database, opencode: OpenCode, settings: Settings) -> None:
        self._database = database
        self.opencode = opencode
        self.grants = Grants(database)
        self.settings = settings.interrupts
        self.console_answers = settings.console_answers
        """OpenCode may be answered past this service, by a person at its own terminal."""
        self._rights = settings.auth.rights
        self.sessions_with_turn: dict[SessionId, WorkInterrupts] = {}
        """Sessions in which the turn of a task runs: it is asked whatever the session asks."""
        self.open: dict[RequestId, Interrupt] = {}
        """What is not settled yet: nobody else is asked the same."""

    def check(self, owner: Owner | None, asked: Interrupted, answer: Answer) -> None:
        """Raise when a person may not answer an interrupt like this."""
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
                raise InvalidParamsError(text, violations=(Violation("reply", text),))
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
                    raise InvalidParamsError(text, violations=(Violation("scope", text),))
            case QuestionReply(answers=answers) if len(answers) > len(asked.questions):
                text = f"There are only {len(asked.questions)} questions."
                raise InvalidParamsError(text, violations=(Violation("answers", text),))
            case _:
                pass

    async def reply(self, asked: Interrupted, reply: Reply, at: Location) -> None:
        """Give OpenCode an answer."""
        match reply:
            case PermissionReply():
                await self.opencode.reply_permission(
                    asked.request_id, reply.reply, reply.message, at=at
                )
            case QuestionReply():
                await self.opencode.reply_question(asked.request_id, reply.answers, at=at)
            case QuestionRejection():
                await self.opencode.reject_question(asked.request_id, at=at)

    async def ask(self, owner: Owner, asked: Interrupted, *, numbered: bool) -> Interrupted:
        """Store an interrupt and return it with its number, its deadline and what happens then."""
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
        row = await self._database.write_until_stored(
            lambda connection: interrupt_rows.add(connection, new, numbered=numbered)
        )
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
        """Store an answer, and what belongs to it, before OpenCode is given it; all or nothing.

        Without this a service that is killed in between would take the caller's repeat for
        the answer to the next interrupt.
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
        """Write down how an interrupt ended, in the table and in the audit log.

        With a scope the person has allowed more than this request: return the grant.
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
        """Return the answers to what a task or an errand asked that count, or may count yet.

        One that has settled its interrupt is among them: the service may have been killed
        before the log of the task said so, or before others were settled by it too.
        """
        where = (owner.task_id or "", owner.context_id)
        found: list[tuple[Interrupted, Answer]] = []
        # What asks may be working, and cannot do without: however long the database is away.
        for row in await self._database.write_until_stored(
            lambda c: interrupt_rows.answered(c, *where)
        ):
            answer = Answer.load(row.answer) if row.answer else None
            if answer and (row.resolution is None or row.settled_by == answer.by):
                found.append((Interrupted.load(orjson.loads(row.asked)), answer))
        return found

    async def left(self) -> list[tuple[Owner, Interrupted]]:
        """Return what an earlier process asked for work that no task follows."""
        found: list[tuple[Owner, Interrupted]] = []
        for row in await self._database.read(interrupt_rows.left):
            # An earlier version did not store the rights; the deployment may allow less now.
            rights = Rights(**orjson.loads(row.rights)) if row.rights else NARROWEST
            context_id, principal = ContextId(row.context_id), Principal(row.principal)
            owner = Owner(None, context_id, principal, rights & self._rights)
            found.append((owner, Interrupted.load(orjson.loads(row.asked))))
        return found

    async def pending(self, principal: Principal | None, kind: str) -> list[Interrupt]:
        """Return what a principal is asked now, or everybody, the most urgent first."""
        found = await self._database.read(
            lambda connection: interrupt_rows.pending(connection, principal, kind)
        )
        waiting = (self.open.get(RequestId(row.request_id)) for row in found)
        return [one for one in waiting if one is not None and one.waits]

    async def find(self, request_id: str) -> InterruptRow | None:
        """Return what is stored about an interrupt, settled ones included."""
        return await self._database.read(
            lambda connection: interrupt_rows.find(connection, request_id)
        )


class WorkInterrupts:
    """The interrupts of one turn, or of one errand.

    Its owner passes all events of the session through ``screen``, says with ``note_logged`` that
    they are in the log, has due answers given with ``give_due_answers``, and looks at ``stale`` and
    ``forged`` afterwards.
    """

    def __init__(self, interrupts: Interrupts, owner: Owner, wake: Callable[[], None]) -> None:
        self._interrupts = interrupts
        self.owner = owner
        self.changed = asyncio.Event()
        """Set when the turn begins or ceases to wait for a person; then there is another one."""
        self._wake = wake
        self._location = Location()
        self._connected = asyncio.Event()
        """Set once answers can be given, or never will be."""
        self._closed = False
        self.open: dict[RequestId, Interrupt] = {}
        """Those that are not settled, of people and of rules."""
        self._settled: list[Interrupt] = []
        """Settled, and about to be written to the log."""
        self._refusing: Answer | None = None
        """Whoever stops what runs refuses all that it asks, also what is heard of only now."""
        self.busy = False
        """OpenCode was at work when its state was last read."""
        self.stale = False
        """OpenCode does not know an interrupt that is open here: its state has to be read."""
        self.forged: Interrupted | None = None
        """Answered past this service, where that is not allowed: the turn has to be stopped."""

    @property
    def waiting(self) -> bool:
        """Whether the turn is waiting for a person."""
        return any(interrupt.waits for interrupt in self.open.values())

    def restore(self, asked: Interrupted) -> None:
        """Take up an interrupt from before a restart, with what is left of its time."""
        interrupt = Interrupt(asked, self, Stage.WAITING)
        self.open[asked.request_id] = self._interrupts.open[asked.request_id] = interrupt
        left = ((asked.expires_at or 0) - now_ms()) / 1000
        self._arm(interrupt, left if self.owner.rights.waits else 0)

    def connect(
        self, location: Location, answered: Sequence[tuple[Interrupted, Answer]] = ()
    ) -> None:
        """Begin to answer; ``answered`` is what an earlier process stored.

        Whether OpenCode got such an answer is not known. It is given once more, to the same
        request: OpenCode refuses it if it is not pending.
        """
        self._location = location
        for asked, answer in answered:
            interrupt = self.open.get(asked.request_id)
            if interrupt is not None and interrupt.stage is Stage.WAITING:
                interrupt.answer = answer
                self._make_due(interrupt, answer)
            if answer.resolution == "always":
                self._note_implied(asked, answer)
        self._connected.set()

    def close(self) -> None:
        """Stop; what is open stays open in OpenCode, and for the next process."""
        self._closed = True
        for request_id, interrupt in self.open.items():
            self._interrupts.open.pop(request_id, None)
            if interrupt.timer is not None:
                interrupt.timer.cancel()
        # Those who answer would wait in vain.
        self._connected.set()
        for interrupt in (*self._settled, *self.open.values()):
            interrupt.logged.set()
        self.changed.set()

    # Asked

    async def screen(self, events: list[TurnEvent]) -> list[TurnEvent | Answered]:
        """Give interrupts an owner and a deadline, and name who settled them."""
        if not any(isinstance(event, Interrupted | Resumed) for event in events):
            return [*events]
        out: list[TurnEvent | Answered] = []
        ending = any(isinstance(event, Finished) for event in events)
        changed = [event for event in events if isinstance(event, ToolChanged)]
        ran = {call.call_id for call in changed if call.status == "completed"}
        for event in events:
            match event:
                case Interrupted():
                    if event.request_id not in self._interrupts.open:  # else another is asked
                        out.append(await self._ask(event))
                case Resumed():
                    interrupt = self.open.pop(event.request_id, None)
                    if interrupt is not None:  # else it was another's
                        out += await self._settle(interrupt, event, ending=ending, ran=ran)
                case _:
                    out.append(event)
        self.changed.set()
        self.changed = asyncio.Event()
        return out

    async def _ask(self, asked: Interrupted) -> TurnEvent:
        """Put an interrupt to a person, or to a rule; return what the log says of it."""
        # A grant is for one directory, so that it has to be known.
        asked = replace(asked, directory=asked.directory or self._location.directory)
        interrupt = Interrupt(asked, self, implied=self._refusing)
        # Before anything is awaited: an errand in the same session must not ask it as well.
        self._interrupts.open[asked.request_id] = interrupt
        rights, action = self.owner.rights, rule_action(self._interrupts.settings, asked)
        action, reason = rights.narrow(asked.permission or QUESTION, action), ""
        if action == "ask":
            grant = await self._interrupts.grants.covering(self.owner, asked)
            if grant is not None:
                interrupt.due = Answer(PermissionReply("once"), grant.by)
                action, reason = "allow", f"allowed before, by {grant.by}"
        else:
            reply: Reply = PermissionReply("once")
            if asked.type == "question":
                reply = QuestionReply([[UNATTENDED_MESSAGE] for _ in asked.questions])
            elif action == "deny":
                message = DENIED_MESSAGE if rights.waits else UNATTENDED_MESSAGE
                reply = PermissionReply("reject", message)
            interrupt.due = Answer(reply, RULE)
            reason = "answered by a rule of this service"
        if asked.call_id is not None and asked.tool_input is None:
            # OpenCode stores what the tool was called with a moment after it asks.
            try:
                called = await snapshot.tool_call(
                    self._interrupts.opencode, asked.session_id, asked.call_id
                )
                if called is not None:
                    asked = replace(asked, tool=called.tool, tool_input=called.state.input)
            except UpstreamError as error:
                logger.warning("input of a tool call not known", error=error.message)
        # Only what a task puts to a person has a number: nobody has to name anything else.
        interrupt.for_person = interrupt.due is None
        numbered = interrupt.for_person and self.owner.task_id is not None
        asked = interrupt.asked = await self._interrupts.ask(self.owner, asked, numbered=numbered)
        self.open[asked.request_id] = interrupt
        if interrupt.due is None:
            interrupt.stage = Stage.WAITING
            self._arm(interrupt, self._interrupts.settings.interrupt_request_ttl_seconds)
            return asked
        self._make_due(interrupt, interrupt.due)
        status = "denied" if action == "deny" else "allowed"
        if asked.type == "question":
            subject = " ".join(question.question for question in asked.questions)
            return Progressed("question", status, asked.request_id, subject, reason=reason)
        subject = f"{asked.permission}: {', '.join(asked.patterns)}"
        return Progressed("permission", status, asked.request_id, subject, reason=reason)

    def _arm(self, interrupt: Interrupt, seconds: float) -> None:
        """Have the turn look what is due when the time of an interrupt is over."""
        interrupt.timer = asyncio.get_running_loop().call_later(max(0.0, seconds), self._wake)

    def _make_due(self, interrupt: Interrupt, answer: Answer) -> None:
        interrupt.stage, interrupt.due = Stage.DUE, answer
        self._wake()

    # Answered

    async def give_due_answers(self) -> bool:
        """Give the answers that are due; False when the turn has to end instead."""
        now = asyncio.get_running_loop().time()
        for interrupt in [*self.open.values()]:
            asked, before, answer = interrupt.asked, interrupt.stage, interrupt.due
            if before is Stage.WAITING and interrupt.timer and interrupt.timer.when() <= now:
                answer = interrupt.answer  # a person's, which could not be delivered
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
        """Answer for a person; return once OpenCode has taken the answer to all of them.

        ``also`` is written together with the answer, before OpenCode gets it.
        """
        await self._wait_connected()  # then what an earlier process stored is known
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
        """Make sure that OpenCode gets the answer in a message that was taken before."""
        await self._wait_connected()
        # What is settled but not in the log yet is no longer open; its outcome is waited for too.
        for interrupt in (*self._settled, *self.open.values()):
            known = (interrupt.answer, interrupt.due)
            answer = next((one for one in known if one and one.message == message), None)
            if answer is None:
                continue
            if interrupt.stage in ANSWERABLE:
                interrupt.stage = Stage.SENDING
                await self._send_and_confirm(interrupt, answer)
            else:
                await self._confirmed(interrupt, answer)

    async def _wait_connected(self) -> None:
        """Wait until answers can be given; after a restart of the service it takes a moment."""
        try:
            async with asyncio.timeout(CONNECT_SECONDS):
                await self._connected.wait()
        except TimeoutError:
            raise UpstreamUnreachableError(
                "The turn is not connected to OpenCode yet; try again"
            ) from None
        if self._closed and self.open:
            raise UpstreamUnreachableError(STOPPED_MESSAGE)

    async def _send_and_confirm(self, interrupt: Interrupt, answer: Answer) -> None:
        """Give OpenCode an answer, and wait until it says that the answer counts."""
        try:
            if interrupt.stage is Stage.SENDING:  # else it was settled with another one
                await self._send(interrupt, answer)
        except UpstreamNotFoundError:
            if answer not in (interrupt.answer, interrupt.implied):
                raise InterruptNotFoundError(request_id=interrupt.asked.request_id) from None
        except BaseException:
            if interrupt.stage is Stage.SENDING:
                interrupt.stage = Stage.WAITING
            raise
        await self._confirmed(interrupt, answer)

    async def _send(self, interrupt: Interrupt, answer: Answer) -> None:
        """Give OpenCode an answer that is stored."""
        asked, earlier, interrupt.answer = interrupt.asked, interrupt.answer, answer
        if answer.resolution in ("rejected", "always"):
            self._note_implied(asked, answer)
        try:
            await self._interrupts.reply(asked, answer.reply, self._at(asked))
        except UpstreamNotFoundError:
            # It is not pending: an earlier try got through, or an answer from elsewhere.
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

    async def _confirmed(self, interrupt: Interrupt, answer: Answer) -> None:
        """Wait until OpenCode says that an interrupt is settled; raise if not by this answer."""
        try:
            async with asyncio.timeout(CONFIRM_SECONDS):
                await interrupt.logged.wait()
        except TimeoutError:
            if interrupt.stage is Stage.DELIVERED:
                interrupt.stage = Stage.WAITING
            raise UpstreamPayloadError(
                "OpenCode accepted the answer but did not confirm it. Try again."
            ) from None
        if self._closed and interrupt.stage is not Stage.SETTLED:
            raise UpstreamUnreachableError(STOPPED_MESSAGE)
        if interrupt.answer != answer:
            raise InterruptNotFoundError(request_id=interrupt.asked.request_id)

    # Settled

    async def _settle(
        self, interrupt: Interrupt, event: Resumed, *, ending: bool, ran: Container[str | None]
    ) -> list[TurnEvent | Answered]:
        """Write down how an interrupt ended; return what the log says of it."""
        asked = interrupt.asked
        self._interrupts.open.pop(asked.request_id, None)
        if interrupt.timer is not None:
            interrupt.timer.cancel()
        resumed, counted = self._attribute(interrupt, event, ending=ending, ran=ran)
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
        """Note that all that was screened is in the log: whoever answered may go on."""
        for interrupt in self._settled:
            interrupt.logged.set()
        self._settled.clear()

    def _attribute(
        self, interrupt: Interrupt, event: Resumed, *, ending: bool, ran: Container[str | None]
    ) -> tuple[Resumed, Answer | None]:
        """Say whose answer settled an interrupt, and how; notice answers that nobody gave here."""
        asked, answer, void = interrupt.asked, interrupt.answer, event.resolution == "void"
        if interrupt.stage is Stage.EXPIRED:
            return replace(event, by=CLOCK, resolution="expired"), None
        # A call that has asked and has done its work was allowed to by somebody.
        done = asked.type == "permission" and asked.call_id in ran
        if answer is not None:
            # One that is gone without a word has taken the answer that was on its way to it.
            taken = interrupt.stage is Stage.DELIVERED or not ending
            if not void:
                taken = answer.resolution == event.resolution
            elif done and answer.resolution != "rejected":
                taken = True
            if taken:
                if answer.resolution in ("rejected", "always"):
                    self._note_implied(asked, answer)  # also for what was heard since it was sent
                resolution = "expired" if answer.by == CLOCK else answer.resolution
                return replace(event, by=answer.by, resolution=resolution), answer
        implied = interrupt.implied
        if implied is not None and event.resolution in (implied.resolution, "void"):
            counted = implied if implied.resolution == "rejected" else None
            return replace(event, by=implied.by), counted
        if void and done:
            event, void = replace(event, resolution="once"), False
        if void and (ending or not self.busy):
            return event, None
        if not self._interrupts.console_answers:
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
                resolution=event.resolution,
            )
        return event if void else replace(event, by=ELSEWHERE), None

    def _note_implied(self, asked: Interrupted, answer: Answer) -> None:
        """Note which others OpenCode may settle with the answer to one.

        After a refusal it refuses all that is pending in the session; after its own "always" it
        allows what that covers.
        """
        for other in self.open.values():
            same = answer.resolution == "rejected" or other.asked.permission == asked.permission
            if same and other.asked.session_id == asked.session_id:
                other.implied = answer

    # Stopped

    def refuse_all(self, by: Principal) -> None:
        """Note that a person has the turn stopped, and so refuses what it asks."""
        self._refusing = Answer(PermissionReply("reject"), by)
        for interrupt in self.open.values():
            interrupt.implied = self._refusing

    def go_on(self) -> None:
        """Note that the turn goes on after it was stopped: what it asks now is asked."""
        self._refusing = None

    async def reject_all(self, sessions: Container[SessionId]) -> None:
        """Clear what is pending after the turn was stopped: OpenCode does not."""
        for interrupt in [*self.open.values()]:
            await self._reject(interrupt.asked)
        permissions, questions = await snapshot.pending(self._interrupts.opencode, self._location)
        for request in (*(permissions or ()), *(questions or ())):
            if request.session_id in sessions:  # asked in the very last moment, and not heard
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
    """Return the error to an answer that did not count for all that it was given to.

    One that may yet count if it is sent again decides.
    """
    errors = [*failed.values()]
    error = next((one for one in errors if isinstance(one, UpstreamError)), errors[0])
    if len(found) == 1:
        return error
    counted = ", ".join(one.name for one in found if one not in failed) or "none"
    missed = "; ".join(f"not for {one.name}: {why.message}" for one, why in failed.items())
    error.message = f"The answer counted for {counted}; {missed}"
    return error
