"""What a turn has to do, as both ``turns.turn`` and ``turns.attempt`` know it.

``Turn`` is a ``Job`` that finds its session; an ``Attempt`` carries the job out in that session.
``SharedTurns`` are the parts of the service that all turns in one OpenCode use.
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from opencode_a2a.bounds import Recent, Stop
from opencode_a2a.config import Settings
from opencode_a2a.errors import UpstreamTimeoutError
from opencode_a2a.events import Emitted, Failure, Progressed, SessionBound, TurnEvent
from opencode_a2a.ids import MessageId, ModelRef, Owner, SessionId
from opencode_a2a.messages import Added, Answered, Delivery, TurnRequest
from opencode_a2a.opencode.driver import Driver
from opencode_a2a.opencode.feed import Feed
from opencode_a2a.opencode.types import MessageWithParts
from opencode_a2a.store.database import Write
from opencode_a2a.turns.interrupt_state import StoredInterrupt
from opencode_a2a.turns.interrupts import WorkInterrupts
from opencode_a2a.turns.sessions import KNOWN_SESSIONS, PLAN_AGENT, Sessions, TurnSession
from opencode_a2a.turns.shared_interrupts import SharedInterrupts
from opencode_a2a.turns.snapshot import Snapshots
from opencode_a2a.turns.tools import Tools

FIRST_ANSWER_SECONDS = 3.0
"""Seconds that a call waits for an OpenCode that has never answered."""

PromptCall = asyncio.Task[MessageWithParts]
"""A call that takes a prompt to OpenCode, and returns OpenCode's last message."""


class SharedTurns:
    """The parts that all turns in one OpenCode use."""

    def __init__(
        self,
        settings: Settings,
        opencode: Driver,
        feed: Feed,
        sessions: Sessions,
        interrupts: SharedInterrupts,
        tools: Tools | None,
    ) -> None:
        self.settings = settings
        self.rights = settings.auth.rights
        """The most that any turn may do."""
        self.default_model = settings.opencode.model
        self.opencode = opencode
        self.feed = feed
        self.sessions = sessions
        self.interrupts = interrupts
        self.tools = tools
        self.snapshots = Snapshots(opencode)
        self.running = 0
        """Turns that were admitted and have not ended, those that wait for a session included."""
        self._models = Recent[SessionId, ModelRef | None](KNOWN_SESSIONS)
        """For each session whose last prompt named a model: the one it had before."""

    async def check_reachable(self) -> None:
        """Raise an error if OpenCode has never answered this service and does not answer now.

        Once it has answered, a turn waits for an OpenCode that is unreachable. Before that the
        address or the password may be wrong, and waiting would not help.
        """
        if self.feed.connections:
            return
        try:
            async with asyncio.timeout(FIRST_ANSWER_SECONDS):
                await self.opencode.health()
        except TimeoutError:
            raise UpstreamTimeoutError from None

    async def model(self, session: TurnSession, named: ModelRef | None) -> ModelRef | None:
        """Return the model to prompt a session with; None leaves the choice to OpenCode.

        A request names a model for itself alone, but OpenCode keeps it for the session; the prompt
        after it therefore names the earlier model again.
        """
        session_id, default = session.session_id, self.default_model
        if named is None:
            return default or self._models.pop(session_id, None)
        if default is None and session_id not in self._models:
            before = (await self.opencode.session(session_id)).model
            if before is None:
                config = await self.opencode.config(at=session.location)
                before = ModelRef.parse(config.model)
            self._models[session_id] = before
        return named


class Log(Protocol):
    """The log of a task, as its turn writes it: a ``log.log.TaskLog``."""

    async def append(
        self, events: Sequence[TurnEvent | Answered], in_same_commit: Write | None = None
    ) -> object:
        """Append events; return once firm ones are stored, and ``in_same_commit`` with them."""
        ...

    def append_now(self, events: Sequence[TurnEvent]) -> object:
        """Append growing text, without waiting until it is stored."""
        ...


@dataclass(frozen=True, slots=True)
class LoggedTurn:
    """A turn that an earlier process began, as the log of its task has it.

    OpenCode may have been sent its prompt and the messages that were added to it.
    """

    emitted: Emitted
    added: Sequence[Added] = ()
    interrupts: Sequence[StoredInterrupt] = ()
    """All interrupts of the task."""
    earlier_session: SessionId | None = None
    """The session of the task's earlier turns; None if this is the first."""
    canceled: bool = False
    """Whether it was to be canceled: OpenCode may have been told to stop."""


@dataclass(eq=False, slots=True)
class Addition:
    """A further message for a turn that runs, until OpenCode has it.

    Its delivery says when it is sent: ``steer`` at once, ``interrupt`` after the running work has
    been stopped, ``queue`` when the turn would end.
    """

    added: Added
    stored: bool = False
    """Whether it is stored, and so may be sent."""
    cleared: bool = False
    """Whether the running work has been stopped for it."""
    sent: bool = False
    call: PromptCall | None = None
    """The prompt call that it was last sent with."""
    tries: int = 0

    @property
    def prompt_id(self) -> MessageId:
        return self.added.request.user_message_id

    @property
    def delivery(self) -> Delivery:
        return self.added.request.delivery or "steer"

    def progress(self, status: str, reason: str | None = None) -> Progressed:
        """Return the event that tells the readers of the task what became of it."""
        message = self.added.message
        return Progressed(
            "message", status, message.message_id, message.subject, self.delivery, reason
        )


class Job:
    """One turn: what it is asked to do, and what it is told while it runs."""

    def __init__(
        self,
        shared: SharedTurns,
        owner: Owner,
        request: TurnRequest,
        wake: Callable[[], None],
        logged: LoggedTurn | None,
    ) -> None:
        self.shared = shared
        self.owner = owner
        self.request = request
        self.plans = request.routing.plan
        """Whether the turn only makes a plan."""
        named = PLAN_AGENT if self.plans else request.routing.agent
        self.agent = named or shared.settings.opencode.agent
        """The agent to prompt; None leaves the choice to OpenCode."""
        self.recovered = logged is not None
        """Whether an earlier process began it."""
        self.emitted = logged.emitted if logged is not None else Emitted()
        """Everything that earlier processes wrote of it to the log; the reader of a recovered turn
        continues with this object."""
        added = logged.added if logged is not None else ()
        self.additions = [Addition(one, stored=True) for one in added]
        """The messages that were added and that OpenCode is not known to have."""
        self.stop = Stop()
        """Set when the turn is canceled. It does not wait for OpenCode then, which may hang."""
        if logged is not None and logged.canceled:
            self.stop.set()
        self.refusal: Failure | None = None
        """Why a recovered turn may not continue, and is only stopped in OpenCode."""
        self.interrupts = WorkInterrupts(shared.interrupts, owner, wake, stop=self.stop)
        # A person can answer them at once; OpenCode gets the answers when it is connected.
        if logged is None:
            self.interrupts.connected.set()
        else:
            self.interrupts.restore(logged.interrupts, self.emitted.open)
            # Those that a rule or a grant has answered are not in the log.
            for request_id, interrupt in self.interrupts.open.items():
                self.emitted.open[request_id] = interrupt.asked

    @property
    def canceled(self) -> bool:
        return self.stop.is_set

    def session_bound_event(self, session: TurnSession) -> SessionBound:
        """Return the event that names the session, and the model and agent if they were chosen."""
        model = self.request.routing.model or self.shared.default_model
        return SessionBound(
            session.session_id,
            session.location.directory,
            model=str(model) if model else None,
            agent=self.agent,
        )
