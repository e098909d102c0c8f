"""Reads OpenCode's stored state of a turn.

``turns.attempt`` asks for it after a gap and at the end of a turn; ``opencode.reader`` compares it
with what has been emitted.
"""

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Sequence
from contextlib import suppress
from typing import Generic, TypeVar

import structlog

from opencode_a2a.errors import SessionNotFoundError, UpstreamHttpError
from opencode_a2a.events import Interrupted
from opencode_a2a.ids import MessageId, SessionId
from opencode_a2a.opencode.driver import Driver, Location
from opencode_a2a.opencode.translate import could_change_files
from opencode_a2a.opencode.turn_state import Snapshot, TurnMessages
from opencode_a2a.opencode.types import (
    FileDiff,
    MessageWithParts,
    PatchPart,
    PermissionRequest,
    QuestionRequest,
    ToolPart,
    UserMessage,
)

logger = structlog.get_logger(__name__)
T = TypeVar("T")
R = TypeVar("R", PermissionRequest, QuestionRequest)

PAGE = 40
"""Messages that are read at once."""
INPUT_TRIES, INPUT_SECONDS = 10, 0.05
"""How often, and at which interval, the input of a tool call that asks is looked for."""
SHARED_SECONDS = 1.0
"""Seconds for which turns of one directory share the result of a query."""


class DirectoryQuery(Generic[T]):
    """A query about a directory that OpenCode is sent once on behalf of many turns.

    The result covers all sessions of the directory: if each of a thousand turns asked for itself,
    a thousand times a thousand entries would have to be read.
    """

    def __init__(self, ask: Callable[[Location], Coroutine[None, None, T]]) -> None:
        self._ask = ask
        self._asked: dict[Location, tuple[float, asyncio.Task[T]]] = {}

    async def of(self, location: Location, since: float) -> T:
        """Return a result that was asked for at ``since`` or later, and at most a moment ago."""
        now = asyncio.get_running_loop().time()
        asked = self._asked.get(location)
        if asked is None or asked[0] < max(since, now - SHARED_SECONDS):
            self._asked = {k: v for k, v in self._asked.items() if v[0] >= now - SHARED_SECONDS}
            asked = self._asked[location] = now, asyncio.create_task(self._ask(location))
            asked[1].add_done_callback(_look_at)  # those who asked may have gone
        return await asyncio.shield(asked[1])


def _look_at(task: asyncio.Task[T]) -> None:
    """Take note of how a task has ended: asyncio complains of errors that nobody has looked at."""
    if not task.cancelled():
        task.exception()


class Snapshots:
    """Reads snapshots for turns."""

    def __init__(self, opencode: Driver) -> None:
        self._opencode = opencode
        self._pending = DirectoryQuery(lambda location: pending(opencode, location))
        self.statuses = DirectoryQuery(lambda location: opencode.session_status(at=location))
        """The statuses of the sessions that are busy."""

    async def read(
        self, session_id: SessionId, message_id: MessageId, location: Location, since: float
    ) -> Snapshot:
        """Return what the reader needs to continue after a gap, read at ``since`` or later."""
        messages, statuses, (permissions, questions) = await asyncio.gather(
            messages_since(self._opencode, session_id, message_id),
            self.statuses.of(location, since),
            self._pending.of(location, since),
        )
        return Snapshot(
            messages=messages,
            statuses=statuses,
            permissions=permissions,
            questions=questions,
            directory=location.directory,
        )

    async def read_end(
        self, session_id: SessionId, prompts: Sequence[MessageId], children: Iterable[SessionId]
    ) -> Snapshot:
        """Return what the reader needs to finish a turn whose sessions are idle."""
        messages = await messages_since(self._opencode, session_id, prompts[0])
        changed = any(isinstance(part, PatchPart) for one in messages for part in one.parts)
        diffs: list[FileDiff] = []
        for prompt in prompts if changed and could_change_files(messages) else ():
            diffs += await self._opencode.session_diff(session_id, prompt)
        of_children = await self.read_children(children)
        return Snapshot(
            messages=messages,
            children=of_children,
            diffs=diffs,
            leaves_work=self._opencode.leave_work(messages),
        )

    async def read_children(
        self, children: Iterable[SessionId]
    ) -> dict[SessionId, list[MessageWithParts]]:
        """Return the messages of sub-agents; none for a session that was deleted."""
        messages: dict[SessionId, list[MessageWithParts]] = {child: [] for child in children}
        for child in messages:
            with suppress(SessionNotFoundError):
                messages[child] = (await self._opencode.messages(child)).items
        return messages


async def messages_since(
    opencode: Driver, session_id: SessionId, message_id: MessageId
) -> list[MessageWithParts]:
    """Return the messages of a session from one on, or all if that one is not among them.

    Pages are read from the newest back until the message is found.
    """
    found: list[MessageWithParts] = []
    cursor: str | None = None
    while True:
        page = await opencode.messages(session_id, limit=PAGE, before=cursor)
        found[:0] = page.items
        cursor = page.next_cursor
        ids = [message.info.id for message in page.items]
        if message_id in ids:
            return found[ids.index(message_id) :]
        if cursor is None:
            break
    if len(page.items) == PAGE:
        # OpenCode 1.1 has no cursor: it returns the newest messages and no way to earlier ones.
        found = (await opencode.messages(session_id)).items
    ids = [message.info.id for message in found]
    return found[ids.index(message_id) :] if message_id in ids else found


def is_overtaken(messages: Sequence[MessageWithParts], prompts: Sequence[MessageId]) -> bool:
    """Whether a session has been given another prompt than those of a turn.

    ``messages`` begin with the first of ``prompts``; if they do not have it, nobody knows what the
    others are for. What OpenCode adds on its own, around a compaction or when work in the
    background ends, is of the turn.
    """
    turn = TurnMessages(prompts[0], [prompts[0]], {prompts[0]})
    for prompt in prompts:
        turn.claim(prompt)
    for message in messages:
        if isinstance(message.info, UserMessage):
            turn.add(message.info, gapless=True)
            for part in message.parts:
                turn.add_user_part(part)
    return turn.overtaken or not turn.prompt_stored


async def pending(
    opencode: Driver, location: Location
) -> tuple[list[PermissionRequest] | None, list[QuestionRequest] | None]:
    """Return the requests that are pending in a directory; None for a list OpenCode cannot write.

    One request that OpenCode cannot encode, such as a ``webfetch`` without a timeout (1.18), spoils
    the whole list for as long as it is pending.
    """
    return await asyncio.gather(
        _listed(opencode.permissions(at=location)), _listed(opencode.questions(at=location))
    )


async def _listed(asked: Coroutine[None, None, list[R]]) -> list[R] | None:
    try:
        return await asked
    except UpstreamHttpError as error:
        logger.warning("OpenCode could not list its pending requests", error=error.message)
        return None


async def tool_call(opencode: Driver, asked: Interrupted) -> ToolPart | None:
    """Return the tool call of a request, with its input, from the latest messages, or None.

    OpenCode stores it a moment after it asks.
    """
    wanted = (asked.call_message_id, asked.call_id)
    for _ in range(INPUT_TRIES):
        for message in (await opencode.messages(asked.session_id, limit=2)).items:
            for part in message.parts:
                if (
                    isinstance(part, ToolPart)
                    and (part.message_id, part.call_id) == wanted
                    and (part.state.status != "pending" or part.state.input)
                ):
                    return part
        await asyncio.sleep(INPUT_SECONDS)
    return None
