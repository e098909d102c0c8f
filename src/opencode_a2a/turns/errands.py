"""Work that was begun by method: followed for the permissions and questions it raises.

``extensions`` has a session followed before it gives it a prompt or a command; ``app`` takes up
what an earlier process left. No task tells what comes of such work, but what it asks has the
same owner, rules, deadline and audit record as what a task asks.
"""

import asyncio
from collections.abc import AsyncGenerator, Iterable
from contextlib import asynccontextmanager, suppress

import structlog

from opencode_a2a.errors import UpstreamError
from opencode_a2a.events import Interrupted, Resumed
from opencode_a2a.ids import ContextId, Principal, RequestId, SessionId
from opencode_a2a.opencode.client import Location, OpenCode
from opencode_a2a.opencode.events import (
    PermissionAsked,
    QuestionAsked,
    RequestSettled,
    StatusChanged,
)
from opencode_a2a.opencode.feed import Feed, FeedItem, Gap
from opencode_a2a.opencode.translate import interrupted
from opencode_a2a.opencode.types import StatusIdle
from opencode_a2a.turns import snapshot
from opencode_a2a.turns.answers import Answer
from opencode_a2a.turns.desk import TurnInterrupts
from opencode_a2a.turns.interrupts import Interrupts, Owner
from opencode_a2a.turns.sessions import DERIVED_CONTEXT

log = structlog.get_logger(__name__)

TICK_SECONDS = 5.0
UNBEGUN_SECONDS = 15.0
"""How long a starved OpenCode may take to begin; a prompt that wants no reply never does."""


class Errand:
    """A session at work for which there is no task."""

    def __init__(
        self,
        opencode: OpenCode,
        feed: Feed,
        interrupts: Interrupts,
        owner: Owner,
        root: SessionId,
        location: Location,
    ) -> None:
        self._opencode = opencode
        self._interrupts = interrupts
        self._root = root
        self._location = location
        self._loop = asyncio.get_running_loop()
        self._begun = False
        """OpenCode was seen at work."""
        self._latest = self._loop.time() + UNBEGUN_SECONDS
        """When it counts as done though it was not seen at work."""
        self._open: dict[RequestId, Interrupted] = {}
        self._subscription = feed.follow(root)
        self.desk = TurnInterrupts(opencode, interrupts, owner, location, self._subscription.wake)

    @property
    def waits(self) -> bool:
        """Whether something was asked that is not answered."""
        return bool(self._open)

    def prolong(self) -> None:
        """Expect more work to begin."""
        self._begun, self._latest = False, self._loop.time() + UNBEGUN_SECONDS

    def restore(self, asked: Interrupted, answer: Answer | None) -> None:
        """Take up what was asked before a restart."""
        self._open[asked.request_id] = asked
        self._subscription.adopt(asked.session_id)
        self.desk.restore([asked], {asked.request_id: answer} if answer else {})
        self._subscription.wake()

    async def run(self) -> None:
        """Follow the session until it has done its work."""
        look = True
        try:
            while True:
                try:
                    if look and await self._look():
                        return
                    look = await self._step()
                except UpstreamError as error:
                    log.warning("OpenCode could not be asked", error=error.message)
                    await asyncio.sleep(TICK_SECONDS)
                    look = True
        finally:
            self._subscription.close()
            self.desk.close()

    async def _step(self) -> bool:
        """Deal with what is heard next; return whether the store has to be looked at."""
        items: list[FeedItem] = []
        with suppress(TimeoutError):
            async with asyncio.timeout(TICK_SECONDS):
                items = await self._subscription.batch(lambda _: None)
        look = await self._hear(items) or not items
        if not await self.desk.act() or self.desk.forged is not None:
            self.desk.forged = None
            await self._opencode.abort_session(self._root)
            look = True
        stale, self.desk.stale = self.desk.stale, False
        return look or stale

    async def _hear(self, items: list[FeedItem]) -> bool:
        events: list[Interrupted | Resumed] = []
        look = False
        for item in items:
            match item:
                case PermissionAsked() | QuestionAsked():
                    # A turn that runs in the session asks for itself.
                    if item.id not in self._open and self._root not in self._interrupts.turns:
                        events.append(interrupted(item, None, item.directory))
                case RequestSettled():
                    events.append(Resumed(item.request_id, item.type, item.resolution))
                case StatusChanged(session_id=self._root, status=status):
                    idle = isinstance(status, StatusIdle)
                    look, self._begun = look or idle, self._begun or not idle
                case Gap(connected=True):
                    look = True
                case _:
                    pass
        await self._screen(events)
        return look

    async def _look(self) -> bool:
        """Compare with what OpenCode has pending; return whether the session is done."""
        statuses = await self._opencode.session_status(at=self._location)
        permissions, questions = await snapshot.pending(self._opencode, self._location)
        self.desk.busy = busy = self._root in statuses
        pending = {
            request.id: request
            for request in (*(permissions or ()), *(questions or ()))
            if request.session_id in self._subscription.sessions
        }
        known = {"permission": permissions is not None, "question": questions is not None}
        gone = [a for a in self._open.values() if known[a.type] and a.request_id not in pending]
        events: list[Interrupted | Resumed] = _voids(gone)
        if self._root not in self._interrupts.turns:
            events += [
                interrupted(request, None, self._location.directory)
                for request in pending.values()
                if request.id not in self._open
            ]
        await self._screen(events)
        if busy:
            self._begun = True
        if busy or not (self._begun or self._loop.time() >= self._latest):
            return False
        # OpenCode forgets nothing that was asked in a turn that is over.
        await self.desk.reject_all(self._subscription.sessions)
        await self._screen(_voids(self._open.values()))
        return True

    async def _screen(self, events: list[Interrupted | Resumed]) -> None:
        for event in events:
            match event:
                case Interrupted():
                    self._open[event.request_id] = event
                case Resumed():
                    self._open.pop(event.request_id, None)
        await self.desk.screen([*events])
        self.desk.told()


def _voids(asked: Iterable[Interrupted]) -> list[Interrupted | Resumed]:
    return [Resumed(one.request_id, one.type, "void") for one in asked]


class Errands:
    """All sessions that work without a task."""

    def __init__(self, opencode: OpenCode, feed: Feed, interrupts: Interrupts) -> None:
        self._opencode = opencode
        self._feed = feed
        self._interrupts = interrupts
        self._running: dict[SessionId, tuple[Errand, asyncio.Task[None]]] = {}

    @asynccontextmanager
    async def following(
        self, principal: Principal, session_id: SessionId, directory: str
    ) -> AsyncGenerator[None]:
        """Follow a session from before it is given work until it is done with it."""
        known = session_id in self._running
        self._follow(principal, session_id, directory).prolong()
        try:
            yield
        except BaseException:
            if not known:
                self._running[session_id][1].cancel()
            raise

    def find(self, request_id: str) -> tuple[Interrupted, TurnInterrupts] | None:
        """Return what waits for a person, and where it is answered."""
        for errand, _ in self._running.values():
            asked = errand.desk.find(request_id)
            if asked is not None:
                return asked, errand.desk
        return None

    def working(self) -> set[SessionId]:
        """Return the sessions that do not wait for a person."""
        return {session for session, (errand, _) in self._running.items() if not errand.waits}

    async def recover(self) -> None:
        """Take up what was asked, and not settled, when the service stopped."""
        for owner, asked, answer in await self._interrupts.left():
            root = SessionId(owner.context_id.removeprefix(DERIVED_CONTEXT))
            self._follow(owner.principal, root, asked.directory).restore(asked, answer)

    async def close(self) -> None:
        """Stop following; what is asked stays open for the next start."""
        tasks = [task for _, task in self._running.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _follow(self, principal: Principal, session_id: SessionId, directory: str | None) -> Errand:
        if session_id in self._running:
            return self._running[session_id][0]
        owner = Owner(None, ContextId(f"{DERIVED_CONTEXT}{session_id}"), principal)
        errand = Errand(
            self._opencode,
            self._feed,
            self._interrupts,
            owner,
            session_id,
            Location(directory=directory),
        )
        task = asyncio.create_task(errand.run(), name=f"errand {session_id}")
        self._running[session_id] = errand, task
        task.add_done_callback(lambda done: self._ended(session_id, done))
        return errand

    def _ended(self, session_id: SessionId, done: asyncio.Task[None]) -> None:
        self._running.pop(session_id, None)
        if not done.cancelled() and (error := done.exception()) is not None:
            log.error("errand failed", session_id=session_id, exc_info=error)
