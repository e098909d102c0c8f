"""Interrupts: permissions and questions that stop a turn until somebody answers.

``turn`` and ``errands`` pass the events of their sessions through ``TurnInterrupts``; ``tasks`` and
``extensions`` bring the answers of people to ``Interrupts``. An interrupt that waits is one
``Interrupt`` in memory and one row in the database, so that its deadline survives a restart. One
that a rule answers never stops the task. An answer is stored before OpenCode is given it, and
counts when OpenCode says so; each interrupt leaves one audit record when it is settled.
"""

import asyncio
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from uuid import uuid4

import orjson
import structlog
from sqlalchemy.engine import Connection

from opencode_a2a import metrics
from opencode_a2a.config import InterruptSettings, Settings
from opencode_a2a.errors import (
    AuthorizationForbiddenError,
    GrantNotFoundError,
    InterruptExpiredError,
    InterruptNotFoundError,
    InterruptTypeMismatchError,
    InvalidParamsError,
    UpstreamError,
    UpstreamNotFoundError,
    UpstreamPayloadError,
    UpstreamUnreachableError,
    Violation,
)
from opencode_a2a.events import Finished, Interrupted, Progressed, Resumed, ToolChanged, TurnEvent
from opencode_a2a.ids import ContextId, Principal, RequestId, SessionId, TaskId
from opencode_a2a.messages import Answered, Message
from opencode_a2a.opencode.client import Location, OpenCode
from opencode_a2a.opencode.translate import interrupted
from opencode_a2a.rights import NARROWEST, QUESTION, Action, Rights
from opencode_a2a.store import grants as grant_rows
from opencode_a2a.store import interrupts as rows
from opencode_a2a.store.database import Database, Write
from opencode_a2a.store.grants import GrantRow
from opencode_a2a.store.interrupts import InterruptRow
from opencode_a2a.telemetry import AUDIT, now_ms
from opencode_a2a.turns import snapshot
from opencode_a2a.turns.answers import (
    Answer,
    PermissionReply,
    QuestionRejection,
    QuestionReply,
    Reply,
    Scope,
)
from opencode_a2a.turns.grants import Grant, Owner

logger = structlog.get_logger(__name__)

CONFIRM_SECONDS = 10.0
"""How long OpenCode may take to say that an interrupt is settled once it took the answer."""
CONNECT_SECONDS = 10.0
"""How long an answer waits for its turn to be connected, after a restart of the service."""
RULE, CLOCK, ELSEWHERE = "rule", "deadline", "elsewhere"
"""Recorded as the one who settled an interrupt when that was not a principal."""
EXPIRED_MESSAGE = "Nobody answered in time. Go on without it, or say what you could not do."
DENIED_MESSAGE = "A rule of this service forbids it. Go on without it."
UNATTENDED_MESSAGE = (
    "Nobody is there to answer. Decide by yourself if you can, or say what you could not do."
)


@dataclass(eq=False, slots=True)
class Interrupt:
    """A permission or question that OpenCode waits for."""

    asked: Interrupted
    owner: Owner
    turn: "TurnInterrupts"
    by_rule: Answer | None = None
    """The answer of a rule or a grant; no person is asked then."""
    by_grant: Answer | None = None
    """The answer of a grant that was given while a person was being asked."""
    answer: Answer | None = None
    """The latest answer that OpenCode may have taken."""
    sending: bool = False
    """An answer is on its way: nobody else can answer now."""
    delivered: bool = False
    """OpenCode has confirmed that it took the answer."""
    expired: bool = False
    """Nobody answered in time, and the turn ends because of it."""
    counted: Answer | None = None
    """The answer that settled it, once it is settled."""
    settled: asyncio.Event = field(default_factory=asyncio.Event)
    """Set once the log of the task says how it was settled."""
    timer: asyncio.TimerHandle | None = None

    @property
    def waiting(self) -> bool:
        """Whether it waits for a person: it was asked, no rule answers, and it is not settled."""
        return self.by_rule is None and self.asked.request_id in self.turn.open


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
    """All interrupts: those that wait now, and the table of all that ever did."""

    def __init__(self, database: Database, opencode: OpenCode, settings: Settings) -> None:
        self._database = database
        self.opencode = opencode
        self.settings = settings.interrupts
        self._rights = settings.auth.rights
        self.console_answers = settings.console_answers
        """OpenCode may be answered past this service, by a person at its own terminal."""
        self.sessions_with_turn: dict[SessionId, TurnInterrupts] = {}
        """Sessions in which the turn of a task runs: it is asked whatever the session asks."""
        self.open: dict[RequestId, Interrupt] = {}
        """What somebody is being asked now: nobody else is asked the same."""

    # Answers of people

    async def answer(
        self,
        request_ids: Sequence[str],
        answer: Answer,
        also: Write | None = None,
        *,
        supervised: bool = False,
    ) -> None:
        """Answer interrupts of one turn for a person; return once OpenCode has taken the answer.

        ``also`` is written together with the answer, before OpenCode gets it.
        """
        found: list[Interrupt] = []
        for request_id in request_ids:
            interrupt = self.open.get(RequestId(request_id))
            mine = supervised or (interrupt and interrupt.owner.principal == answer.by)
            if interrupt is None or not mine:
                raise InterruptNotFoundError(request_id=request_id[:128])
            found.append(interrupt)
        await found[0].turn.answer(found, answer, also)

    async def answer_once(
        self, request_id: str, answer: Answer, *, supervised: bool = False
    ) -> bool:
        """Do the same for an answer that may be a repeat; False if no such interrupt was asked.

        ``supervised`` lets somebody answer who may answer for everybody.
        An interrupt that is not settled has not expired, whatever the time of day: its turn holds
        the deadline, by a clock that does not jump.
        """
        row = await self.find(request_id)
        if row is None:
            return False
        if row.principal != answer.by and not supervised:
            raise InterruptNotFoundError(request_id=request_id[:128])
        if row.settled_by == answer.by and row.answer == answer.dump():
            return True
        remembered = self.settings.interrupt_request_tombstone_ttl_seconds * 1000
        if row.resolution == "expired" and now_ms() < (row.settled_at or 0) + remembered:
            raise InterruptExpiredError(request_id=request_id)
        await self.answer([request_id], answer, supervised=supervised)
        return True

    async def answer_unfollowed(self, owner: Owner, asked: Interrupted, answer: Answer) -> None:
        """Answer what a session asks for which there is neither a task nor an errand."""
        self.check(None, asked, answer)
        try:
            await self.reply(asked, answer.reply, Location(directory=asked.directory))
        except UpstreamNotFoundError:
            raise InterruptNotFoundError(request_id=asked.request_id) from None
        settled = Resumed(asked.request_id, asked.type, answer.resolution, answer.by)
        await self.settle(owner, asked, settled)

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

    # The table

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
        row = await self._database.insist(
            lambda connection: rows.add(connection, new, numbered=numbered)
        )
        metrics.INTERRUPT_REQUESTS.labels(asked.type).inc()
        return replace(asked, expires_at=row.expires_at, number=row.number)

    async def store(
        self,
        request_ids: Sequence[RequestId],
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
                rows.answer(connection, request_id, answer.dump())
            if also is not None:
                also(connection)

        await (self._database.insist(write) if insist else self._database.write(write))

    async def settle(
        self, owner: Owner, asked: Interrupted, settled: Resumed, scope: Scope | None = None
    ) -> Grant | None:
        """Write down how an interrupt ended, in the table and in the audit log.

        With a scope the person has allowed more than this request: return the grant.
        """
        now = now_ms()
        given = scope and GrantRow(
            id=str(uuid4()),
            principal=owner.principal,
            context_id=owner.context_id,
            task_id=(owner.task_id or "") if scope == "task" else "",
            directory=asked.directory or "",
            permission=asked.permission or "",
            patterns=orjson.dumps(asked.always),
            request_id=asked.request_id,
            given_at=now,
        )

        def write(connection: Connection) -> Grant | None:
            rows.settle(connection, settled.request_id, settled.resolution, now, settled.by)
            return _grant(grant_rows.add(connection, given)) if given else None

        grant = await self._database.insist(write)
        if grant is not None and given is not None and grant.id == given.id:
            _audit_grant("grant given", grant)
        metrics.INTERRUPT_RESOLVED.labels(settled.resolution).inc()
        AUDIT.info(
            "interrupt settled",
            request_id=asked.request_id,
            type=asked.type,
            task_id=owner.task_id,
            principal=owner.principal,
            permission=asked.permission,
            patterns=asked.patterns,
            asked_at=asked.asked_at,
            resolution=settled.resolution,
            by=settled.by,
            settled_at=now,
        )
        return grant

    async def covering(self, owner: Owner, asked: Interrupted) -> Grant | None:
        """Return the grant by which a person has allowed this already.

        A database that is away is waited for: the request would be lost otherwise.
        """
        found = await self._database.insist(
            lambda connection: grant_rows.of_context(connection, owner.principal, owner.context_id)
        )
        grants = map(_grant, found)
        return next((grant for grant in grants if grant.covers(owner, asked)), None)

    async def grants(self, principal: Principal, ended: Sequence[str], most: int) -> list[Grant]:
        """Return what a principal has allowed and what still holds, newest first."""
        found = await self._database.read(
            lambda connection: grant_rows.listed(connection, principal, ended, most)
        )
        return [*map(_grant, found)]

    async def revoke(self, principal: Principal, grant_id: str) -> None:
        """End a grant: what it would have allowed is asked from now on."""
        now = now_ms()
        if not await self._database.write(
            lambda connection: grant_rows.revoke(connection, principal, grant_id, now)
        ):
            raise GrantNotFoundError(grant_id=grant_id[:128])
        AUDIT.info("grant revoked", grant_id=grant_id, principal=principal)

    async def answers(self, owner: Owner) -> dict[RequestId, Answer]:
        """Return the answers to a task's interrupts that count, or may count yet.

        One that has settled its interrupt is among them: the service may have been killed
        before the log of the task said so.
        """
        task_id, found = owner.task_id, dict[RequestId, Answer]()
        if task_id is None:
            return found
        for row in await self._database.read(lambda connection: rows.of_task(connection, task_id)):
            answer = Answer.load(row.answer) if row.answer else None
            if answer and (row.resolution is None or row.settled_by == answer.by):
                found[RequestId(row.request_id)] = answer
        return found

    async def left(self) -> list[tuple[Owner, Interrupted, Answer | None]]:
        """Return what an earlier process asked for work that no task follows."""
        return [
            (
                Owner(
                    None,
                    ContextId(row.context_id),
                    Principal(row.principal),
                    # An earlier version did not store them; the deployment may have less now.
                    (Rights(**orjson.loads(row.rights)) if row.rights else NARROWEST)
                    & self._rights,
                ),
                Interrupted.load(orjson.loads(row.asked)),
                Answer.load(row.answer) if row.answer else None,
            )
            for row in await self._database.read(rows.left)
        ]

    async def pending(self, principal: Principal | None, kind: str) -> list[Interrupt]:
        """Return what a principal is asked now, or everybody, the most urgent first."""
        found = await self._database.read(
            lambda connection: rows.pending(connection, principal, kind)
        )
        waiting = (self.open.get(RequestId(row.request_id)) for row in found)
        return [one for one in waiting if one is not None and one.waiting]

    async def find(self, request_id: str) -> InterruptRow | None:
        """Return what is stored about an interrupt, settled ones included."""
        return await self._database.read(lambda connection: rows.find(connection, request_id))


def _grant(row: GrantRow) -> Grant:
    return Grant(
        row.id,
        Principal(row.principal),
        ContextId(row.context_id),
        TaskId(row.task_id) if row.task_id else None,
        row.directory,
        row.permission,
        tuple(orjson.loads(row.patterns)),
        RequestId(row.request_id),
        row.given_at,
    )


def _audit_grant(event: str, grant: Grant) -> None:
    AUDIT.info(
        event,
        grant_id=grant.id,
        principal=grant.principal,
        context_id=grant.context_id,
        task_id=grant.task_id,
        permission=grant.permission,
        patterns=[*grant.patterns],
        request_id=grant.request_id,
    )


class TurnInterrupts:
    """The interrupts of one turn, or of a session that works without a task.

    Its owner passes all events of the session through ``register``, has due answers given with
    ``answer_due``, and looks at ``stale`` and ``forged`` afterwards.
    """

    def __init__(self, interrupts: Interrupts, owner: Owner, wake: Callable[[], None]) -> None:
        self._interrupts = interrupts
        self.owner = owner
        self.changed = asyncio.Event()
        """Set when the turn begins or ceases to wait for a person; then there is another one."""
        self._wake = wake
        self._location = Location()
        self._connected = asyncio.Event()
        self.open: dict[RequestId, Interrupt] = {}
        """Those that are not settled, of people and of rules."""
        self._due: list[Interrupt] = []
        """Past their deadline, or to be answered by a rule."""
        self._settled: list[Interrupt] = []
        """Settled, and about to be written to the log."""
        self._refused: dict[SessionId, Answer] = {}
        """Sessions in which something was refused: OpenCode then refuses all that is pending."""
        self._granted: dict[RequestId, Answer] = {}
        """What was open when an "always" was given in its session: OpenCode may grant it too."""
        self.busy = False
        """OpenCode was at work when its state was last read."""
        self.stale = False
        """OpenCode does not know an interrupt that is open here: its state has to be read."""
        self.forged: Interrupted | None = None
        """Answered past this service, where that is not allowed: the turn has to be stopped."""

    @property
    def waiting(self) -> bool:
        """Whether the turn is waiting for a person."""
        return any(one.by_rule is None for one in self.open.values())

    def restore(self, asked: Interrupted, answer: Answer | None = None) -> None:
        """Take up an interrupt from before a restart, with what is left of its time.

        Whether OpenCode got an answer that was stored is not known. It is given once more, to the
        same request: OpenCode refuses it if it is not pending.
        """
        interrupt = Interrupt(asked, self.owner, self, answer=answer)
        self.open[asked.request_id] = self._interrupts.open[asked.request_id] = interrupt
        if answer is not None:
            self._due.append(interrupt)
        left = ((asked.expires_at or 0) - now_ms()) / 1000
        self._arm(interrupt, left if self.owner.rights.waits else 0)

    def connect(self, location: Location, answers: Mapping[RequestId, Answer]) -> None:
        """Begin to answer; ``answers`` are those that an earlier process stored."""
        self._location = location
        for interrupt in self.open.values():
            if interrupt.asked.request_id in answers:
                interrupt.answer = answers[interrupt.asked.request_id]
                self._due.append(interrupt)
        self._connected.set()

    async def connected(self) -> None:
        """Wait until answers can be given; after a restart of the service it takes a moment."""
        try:
            async with asyncio.timeout(CONNECT_SECONDS):
                await self._connected.wait()
        except TimeoutError:
            raise UpstreamUnreachableError(
                "The turn is not connected to OpenCode yet; try again"
            ) from None

    def close(self) -> None:
        for request_id, interrupt in self.open.items():
            self._interrupts.open.pop(request_id, None)
            if interrupt.timer is not None:
                interrupt.timer.cancel()
        self.changed.set()

    # Asked and settled

    async def register(self, events: list[TurnEvent]) -> list[TurnEvent | Answered]:
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
                    if interrupt is None:
                        continue  # it was another's
                    self._interrupts.open.pop(event.request_id, None)
                    if interrupt.timer is not None:
                        interrupt.timer.cancel()
                    settled = self._attribute(interrupt, event, ending=ending, ran=ran)
                    self._settled.append(interrupt)
                    counted = interrupt.counted
                    scope = None
                    if counted is not None and isinstance(counted.reply, PermissionReply):
                        scope = counted.reply.scope
                    grant = await self._interrupts.settle(
                        self.owner, interrupt.asked, settled, scope
                    )
                    if grant is not None:
                        self._use(grant)
                    if interrupt.by_rule is None:
                        answer = interrupt.counted
                        if answer is not None and answer.message is not None:
                            out.append(Answered(answer.message))
                        out.append(settled)
                case _:
                    out.append(event)
        self.changed.set()
        self.changed = asyncio.Event()
        return out

    def release(self) -> None:
        """Note that all that was registered is in the log: whoever answered may go on."""
        for interrupt in self._settled:
            interrupt.settled.set()
        self._settled.clear()

    def _use(self, grant: Grant) -> None:
        """Answer what is being asked at the moment and was just allowed with something else."""
        for interrupt in self.open.values():
            if interrupt.waiting and grant.covers(self.owner, interrupt.asked):
                interrupt.by_grant = Answer(PermissionReply("once"), grant.by)
                self._expire(interrupt)

    async def _ask(self, asked: Interrupted) -> TurnEvent:
        """Put an interrupt to a person, or to a rule; return what the log says of it."""
        # A grant is for one directory, so that it has to be known.
        asked = replace(asked, directory=asked.directory or self._location.directory)
        interrupt = Interrupt(asked, self.owner, self)
        # Before anything is awaited: an errand in the same session must not ask it as well.
        self._interrupts.open[asked.request_id] = interrupt
        rights, action = self.owner.rights, rule_action(self._interrupts.settings, asked)
        action = rights.narrow(asked.permission or QUESTION, action)
        if asked.type == "question" and action != "ask":
            refusal = QuestionReply([[UNATTENDED_MESSAGE] for _ in asked.questions])
            interrupt.by_rule = Answer(refusal, RULE)
        elif action != "ask":
            message = DENIED_MESSAGE if rights.waits else UNATTENDED_MESSAGE
            denied = PermissionReply("reject", message)
            reply = PermissionReply("once") if action == "allow" else denied
            interrupt.by_rule = Answer(reply, RULE)
        grant = await self._interrupts.covering(self.owner, asked) if action == "ask" else None
        if grant is not None:
            interrupt.by_rule = Answer(PermissionReply("once"), grant.by)
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
        numbered = interrupt.by_rule is None and self.owner.task_id is not None
        asked = await self._interrupts.ask(self.owner, asked, numbered=numbered)
        interrupt.asked = asked
        self.open[asked.request_id] = interrupt
        if interrupt.by_rule is None:
            self._arm(interrupt, self._interrupts.settings.interrupt_request_ttl_seconds)
            return asked
        self._expire(interrupt)
        subject = f"{asked.permission}: {', '.join(asked.patterns)}"
        if asked.type == "question":
            subject = " ".join(question.question for question in asked.questions)
        return Progressed(
            asked.type,
            "denied" if action == "deny" else "allowed",
            part_id=asked.request_id,
            title=subject,
            reason=f"allowed before, by {grant.by}"
            if grant is not None
            else "answered by a rule of this service",
        )

    def _arm(self, interrupt: Interrupt, seconds: float) -> None:
        loop = asyncio.get_running_loop()
        interrupt.timer = loop.call_later(max(0.0, seconds), self._expire, interrupt)

    def _expire(self, interrupt: Interrupt) -> None:
        self._due.append(interrupt)
        self._wake()

    def _attribute(
        self, interrupt: Interrupt, event: Resumed, *, ending: bool, ran: Container[str | None]
    ) -> Resumed:
        """Say whose answer settled an interrupt, and how; notice answers that nobody gave here."""
        asked, answer, void = interrupt.asked, interrupt.answer, event.resolution == "void"
        if interrupt.expired:
            return replace(event, by=CLOCK, resolution="expired")
        # A call that has asked and has done its work was allowed to by somebody.
        done = asked.type == "permission" and asked.call_id in ran
        if answer is not None:
            # One that is gone without a word has taken the answer that was on its way to it.
            taken = interrupt.delivered or not ending
            if not void:
                taken = answer.resolution == event.resolution
            elif done and answer.resolution != "rejected":
                taken = True
            if taken:
                interrupt.counted = answer
                if answer.resolution == "always":
                    self._grant(asked, answer)  # also what was heard since it was sent
                resolution = "expired" if answer.by == CLOCK else answer.resolution
                return replace(event, by=answer.by, resolution=resolution)
        # The answer to another interrupt may have settled this one too.
        refused = self._refused.get(asked.session_id)
        if refused is not None and event.resolution in ("rejected", "void"):
            interrupt.counted = refused
            return replace(event, by=refused.by)
        granted = self._granted.pop(asked.request_id, None)
        if granted is not None and event.resolution in ("always", "void"):
            return replace(event, by=granted.by)
        if void and done:
            event, void = replace(event, resolution="once"), False
        if void and (ending or not self.busy):
            return event
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
        return event if void else replace(event, by=ELSEWHERE)

    def _grant(self, asked: Interrupted, answer: Answer) -> None:
        """Note which others of the session OpenCode may settle with an "always"."""
        for request_id, one in self.open.items():
            same = (one.asked.session_id, one.asked.permission)
            if same == (asked.session_id, asked.permission):
                self._granted[request_id] = answer

    # Answered

    async def answer_due(self) -> bool:
        """Give the answers that are due; False when the turn has to end instead."""
        due, self._due = self._due, []
        for interrupt in due:
            asked = interrupt.asked
            if asked.request_id not in self.open or interrupt.delivered:
                continue
            if interrupt.sending:  # a person's answer is on its way, and may yet fail
                self._due.append(interrupt)
                continue
            answer = interrupt.answer or interrupt.by_rule or interrupt.by_grant
            if answer is None:
                reply = expiry(self._interrupts.settings, asked)
                if reply is None:
                    interrupt.expired = True
                    return False
                answer = Answer(reply, CLOCK)
            interrupt.sending = True
            try:
                if answer is not interrupt.answer:
                    await self._interrupts.store([asked.request_id], answer, insist=True)
                await self._send(interrupt, answer)
            except UpstreamNotFoundError:
                pass  # OpenCode's state, which is read next, says why
            except UpstreamError as error:
                logger.warning(
                    "interrupt not answered", request_id=asked.request_id, error=error.message
                )
                self._due.append(interrupt)
            finally:
                interrupt.sending = False
        return True

    async def answer(
        self, interrupts: Sequence[Interrupt], answer: Answer, also: Write | None
    ) -> None:
        """Answer for a person; return once OpenCode has taken the answer to all of them."""
        await self.connected()
        for interrupt in interrupts:
            if not interrupt.waiting or interrupt.sending or interrupt.delivered:
                raise InterruptNotFoundError(request_id=interrupt.asked.request_id)
            self._interrupts.check(self.owner, interrupt.asked, answer)
        for interrupt in interrupts:
            interrupt.sending = True  # from here on nobody else can answer
        try:
            requests = [interrupt.asked.request_id for interrupt in interrupts]
            await self._interrupts.store(requests, answer, also)
            for interrupt in interrupts:
                await self._send_and_confirm(interrupt, answer)
        finally:
            for interrupt in interrupts:
                interrupt.sending = False
            self._wake()  # the deadline may have passed meanwhile

    async def repeat(self, message: Message) -> None:
        """Make sure that OpenCode gets the answer in a message that was taken before."""
        await self.connected()
        # What is settled but not in the log yet is no longer open; its outcome is waited for too.
        for interrupt in (*self._settled, *self.open.values()):
            answer = interrupt.answer
            if answer is None or answer.message != message:
                continue
            if interrupt.sending or interrupt.delivered or interrupt in self._settled:
                await self._confirmed(interrupt, answer)
                continue
            interrupt.sending = True
            try:
                await self._send_and_confirm(interrupt, answer)
            finally:
                interrupt.sending = False

    async def _send_and_confirm(self, interrupt: Interrupt, answer: Answer) -> None:
        try:
            await self._send(interrupt, answer)
        except UpstreamNotFoundError:
            # A refusal of another one of the session may have settled it, in the same way.
            refused = self._refused.get(interrupt.asked.session_id)
            if answer not in (interrupt.answer, refused):
                raise InterruptNotFoundError(request_id=interrupt.asked.request_id) from None
        await self._confirmed(interrupt, answer)

    async def _send(self, interrupt: Interrupt, answer: Answer) -> None:
        """Give OpenCode an answer that is stored."""
        asked, earlier, interrupt.answer = interrupt.asked, interrupt.answer, answer
        if answer.resolution == "rejected":
            self._refused[asked.session_id] = answer
        elif answer.resolution == "always":
            self._grant(asked, answer)
        try:
            await self._interrupts.reply(asked, answer.reply, self._at(asked))
        except UpstreamNotFoundError:
            # It is not pending: an earlier try got through, or an answer from elsewhere.
            interrupt.answer, interrupt.delivered = earlier, earlier is not None
            if earlier is None:
                self._granted.clear()
            self.stale = True
            self._wake()
            raise
        interrupt.delivered = True

    async def _confirmed(self, interrupt: Interrupt, answer: Answer) -> None:
        """Wait until OpenCode says that an interrupt is settled; raise if not by this answer."""
        try:
            async with asyncio.timeout(CONFIRM_SECONDS):
                await interrupt.settled.wait()
        except TimeoutError:
            interrupt.delivered = False
            raise UpstreamPayloadError(
                "OpenCode accepted the answer but did not confirm it. Try again."
            ) from None
        if interrupt.counted != answer:
            raise InterruptNotFoundError(request_id=interrupt.asked.request_id)

    def refuse_all(self, sessions: Iterable[SessionId], by: Principal) -> None:
        """Note that a person has these sessions stopped, and so refuses what they ask."""
        for session in sessions:
            self._refused[session] = Answer(PermissionReply("reject"), by)

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
