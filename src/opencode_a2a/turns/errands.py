"""Errands: work that a method began, such as ``opencode.sessions.prompt_async``.

No task reports the result of an errand. Its session is followed for the permissions and questions
that it raises, which have an owner, rules, a deadline and an audit record like those of a task,
and for what it spends. ``extensions`` has a session followed before giving it a prompt or a
command; ``fleet`` recovers the errands of an earlier process.
"""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager, suppress

import structlog

from opencode_a2a.clock import now_ms
from opencode_a2a.errors import ServiceError, UpstreamError
from opencode_a2a.events import Resumed, TurnEvent, Usage
from opencode_a2a.ids import ContextId, MessageId, Owner, Principal, SessionId
from opencode_a2a.opencode.driver import Location
from opencode_a2a.opencode.events import (
    MessageUpdated,
    PermissionAsked,
    QuestionAsked,
    RequestSettled,
    SessionStatusChanged,
)
from opencode_a2a.opencode.feed import Feed, FeedItem, Gap
from opencode_a2a.opencode.translate import interrupted, usage
from opencode_a2a.opencode.types import AssistantMessage, Session, StatusIdle
from opencode_a2a.rights import FULL, Rights
from opencode_a2a.store import callers
from opencode_a2a.store.callers import Spent, day_of
from opencode_a2a.store.database import Database
from opencode_a2a.turns import snapshot
from opencode_a2a.turns.attempt import TICK_SECONDS, UNBEGUN_SECONDS
from opencode_a2a.turns.interrupt_state import StoredInterrupt
from opencode_a2a.turns.interrupts import AfterAttend, WorkInterrupts
from opencode_a2a.turns.sessions import DERIVED_CONTEXT, SessionRights, Work
from opencode_a2a.turns.shared_interrupts import SharedInterrupts

logger = structlog.get_logger(__name__)


class Errand:
    """A session that works without a task, and its interrupts."""

    def __init__(
        self,
        database: Database,
        interrupts: SharedInterrupts,
        feed: Feed,
        owner: Owner,
        root: SessionId,
        location: Location,
    ) -> None:
        self._database = database
        self._shared = interrupts
        self._opencode = interrupts.opencode
        self._root = root
        self.location = location
        self.works: list[Work] = []
        """Everything that the session was given to do, and that has to keep to rights."""
        self.principal = owner.principal
        self._used: dict[MessageId, Usage] = {}
        """What each step has used so far, sub-agents' steps included."""
        self.subscription = feed.follow(root)
        self.interrupts = WorkInterrupts(interrupts, owner, self.subscription.wake, location)
        self.interrupts.connected.set()
        self.expect()

    def conclude(self) -> None:
        """Expect no further work: the errand is over as soon as the session is idle."""
        self._latest = asyncio.get_running_loop().time()
        self.subscription.wake()

    def expect(self) -> None:
        """Expect work to begin: an idle session does not end the errand yet."""
        self._begun = False
        """Whether OpenCode was seen working."""
        self._latest = asyncio.get_running_loop().time() + UNBEGUN_SECONDS
        """When an idle session ends the errand though it was never seen working: with a prompt that
        wants no reply, OpenCode never begins."""

    async def run(self) -> None:
        """Follow the session until its work is done."""
        needs_reconcile = True
        try:
            while True:
                try:
                    given = len(self.works)
                    # It is done, unless it was given more to do meanwhile.
                    if needs_reconcile and await self._reconcile() and len(self.works) == given:
                        return
                    items: list[FeedItem] = []
                    with suppress(TimeoutError):
                        async with asyncio.timeout(TICK_SECONDS):
                            items = await self.subscription.batch(lambda _: None)
                    needs_reconcile = await self._hear(items) or not items
                    match await self.interrupts.attend():
                        case AfterAttend.STOP_EXPIRED | AfterAttend.STOP_FORGED:
                            await self._opencode.abort_session(self._root)
                            self.interrupts.note_stopped()
                            needs_reconcile = True
                        case AfterAttend.RECONCILE:
                            needs_reconcile = True
                        case AfterAttend.GO_ON:
                            pass
                except UpstreamError as error:
                    logger.warning(
                        "could not read OpenCode's state; will retry", error=error.message
                    )
                    await asyncio.sleep(TICK_SECONDS)
                    needs_reconcile = True
        except Exception:  # nobody would follow the work any more, and show what it asks
            if self._root not in self._shared.sessions_with_turn:
                with suppress(TimeoutError, ServiceError):
                    async with asyncio.timeout(self._shared.settings.cancel_abort_timeout_seconds):
                        await self._opencode.abort_session(self._root)
                        await self.interrupts.reject_leftovers(self.subscription.sessions)
            await self._ask_and_settle([*self.interrupts.voided()])
            raise
        finally:
            self.subscription.close()
            self.interrupts.close()

    async def _hear(self, items: list[FeedItem]) -> bool:
        """Handle events; return whether to reconcile."""
        events: list[TurnEvent] = []
        needs_reconcile, spent = False, Spent()
        for item in items:
            match item:
                case PermissionAsked() | QuestionAsked():
                    # A turn in the same session asks for both.
                    if self._root not in self._shared.sessions_with_turn:
                        events.append(interrupted(item, None, item.directory))
                case RequestSettled():
                    events.append(Resumed(item.request_id, item.type, item.resolution))
                case SessionStatusChanged(session_id=self._root, status=status):
                    idle = isinstance(status, StatusIdle)
                    needs_reconcile, self._begun = needs_reconcile or idle, self._begun or not idle
                case MessageUpdated(info=AssistantMessage() as info):
                    if self._root not in self._shared.sessions_with_turn:  # which counts it itself
                        now, before = usage(info), self._used.get(info.id, Usage())
                        self._used[info.id] = now
                        more = max(0.0, now.cost - before.cost), max(0, now.total - before.total)
                        spent = Spent(spent.cost + more[0], spent.tokens + more[1])
                case Gap(connected=True):
                    needs_reconcile = True
                case _:
                    pass
        await self._ask_and_settle(events)
        if spent != Spent():
            # At once: it counts whatever becomes of the errand, and of this process.
            used: dict[tuple[str, int], Spent] = {(self.principal, day_of(now_ms())): spent}
            await self._database.write_until_stored(callers.add_spending, used)
        return needs_reconcile

    async def _reconcile(self) -> bool:
        """Compare with OpenCode's pending requests and status; return whether the work is done."""
        statuses = await self._opencode.session_status(at=self.location)
        permissions, questions = await snapshot.pending(self._opencode, self.location)
        self.interrupts.busy = busy = self._root in statuses
        pending = {
            request.id: request
            for request in (*(permissions or ()), *(questions or ()))
            if request.session_id in self.subscription.sessions
        }
        listed = {"permission": permissions is not None, "question": questions is not None}
        asked = [one.asked for one in self.interrupts.open.values()]
        gone = [one for one in asked if listed[one.type] and one.request_id not in pending]
        events: list[TurnEvent] = [Resumed(one.request_id, one.type, "void") for one in gone]
        if self._root not in self._shared.sessions_with_turn:
            # Those that are open already are not asked again.
            directory = self.location.directory
            events += [interrupted(request, None, directory) for request in pending.values()]
        await self._ask_and_settle(events)
        if busy:
            self._begun = True
        over = not busy and (self._begun or asyncio.get_running_loop().time() >= self._latest)
        if over:
            # OpenCode itself keeps requests pending when the work that asked is over.
            await self.interrupts.reject_leftovers(self.subscription.sessions)
            await self._ask_and_settle([*self.interrupts.voided()])
        return over

    async def _ask_and_settle(self, events: list[TurnEvent]) -> None:
        await self.interrupts.ask_and_settle([*self.interrupts.asked_anew(), *events])
        self.interrupts.note_logged()  # an errand has no log


class Errands:
    """All sessions of one OpenCode that work without a task."""

    def __init__(
        self, database: Database, feed: Feed, interrupts: SharedInterrupts, rights: SessionRights
    ) -> None:
        self._database = database
        self._feed = feed
        self._interrupts = interrupts
        self._rights = rights
        self._running: dict[SessionId, tuple[Errand, asyncio.Task[None]]] = {}

    @asynccontextmanager
    async def following(
        self, principal: Principal, session: Session, rights: Rights
    ) -> AsyncGenerator[Work]:
        """Follow a session, which is given work inside, until that work is done."""
        owner = Owner(None, ContextId(f"{DERIVED_CONTEXT}{session.id}"), principal, rights)
        errand = self._follow(session.id, session.directory, owner)
        errand.expect()
        work = self._rights.register(session.id, rights)
        errand.works.append(work)
        try:
            yield work
        except BaseException:
            if work.begun is None:
                errand.works.remove(work)
                self._rights.end(work)
            # OpenCode may have begun it all the same, and it may cost something.
            errand.conclude()
            raise

    def follows(self, session_id: SessionId) -> bool:
        return session_id in self._running

    def any(self) -> bool:
        return bool(self._running)

    def working(self) -> set[SessionId]:
        """Return the sessions whose errand does not wait for a person."""
        return {
            session
            for session, (errand, _) in self._running.items()
            if not errand.interrupts.waiting
        }

    def running(self, principal: Principal) -> int:
        """Return how many errands of a caller do not wait for a person."""
        errands = (errand for errand, _ in self._running.values())
        return sum(one.principal == principal and not one.interrupts.waiting for one in errands)

    def recover(self, owner: Owner, stored: Sequence[StoredInterrupt]) -> None:
        """Follow a session again in which interrupts were open when the service stopped."""
        root = SessionId(owner.context_id.removeprefix(DERIVED_CONTEXT))
        left = {one.asked.request_id: one.asked for one in stored if one.resumed is None}
        directory = next((asked.directory for asked in left.values()), None)
        errand = self._follow(root, directory, owner)
        if not errand.works:
            work = self._rights.register(root, FULL)
            work.begun = FULL  # other work may have joined it; no narrower prompt may
            errand.works.append(work)
        for asked in left.values():
            errand.subscription.follow_child(asked.session_id)
        errand.interrupts.restore(stored, left)
        errand.subscription.wake()

    async def close(self) -> None:
        """Stop following; interrupts stay open for the next start."""
        tasks = [task for _, task in self._running.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _follow(self, session_id: SessionId, directory: str | None, owner: Owner) -> Errand:
        if session_id in self._running:
            return self._running[session_id][0]
        location = Location(directory=directory)
        errand = Errand(self._database, self._interrupts, self._feed, owner, session_id, location)

        async def run() -> None:
            try:
                await errand.run()
            except Exception:
                logger.exception("errand failed", session_id=session_id)
            finally:
                if self._running.get(session_id, (None,))[0] is errand:
                    del self._running[session_id]
                for work in errand.works:
                    self._rights.end(work)

        task = asyncio.create_task(run(), name=f"errand {session_id}")
        self._running[session_id] = errand, task
        return errand
