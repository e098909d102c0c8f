"""Reads from OpenCode what it has stored about a turn."""

import asyncio
import time
from collections.abc import Coroutine, Iterable
from typing import TypeVar

import structlog

from opencode_a2a.errors import SessionNotFoundError, UpstreamHttpError
from opencode_a2a.ids import MessageId, SessionId
from opencode_a2a.upstream.client import Location, OpenCode
from opencode_a2a.upstream.models import (
    FileDiff,
    MessageWithParts,
    PatchPart,
    PermissionRequest,
    QuestionRequest,
    SessionStatus,
    ToolPart,
)
from opencode_a2a.upstream.reader import Stored

log = structlog.get_logger(__name__)
R = TypeVar("R", PermissionRequest, QuestionRequest)

PAGE = 40
STATUS_SECONDS = 1.0
"""Turns of one directory share the answer to who is busy for this long."""


class Statuses:
    """Who is busy, asked once for all turns of a directory."""

    def __init__(self, opencode: OpenCode) -> None:
        self._opencode = opencode
        self._asked: dict[Location, tuple[float, asyncio.Task[dict[SessionId, SessionStatus]]]] = {}

    async def of(self, location: Location) -> dict[SessionId, SessionStatus]:
        now = time.monotonic()
        asked = self._asked.get(location)
        if asked is None or now - asked[0] > STATUS_SECONDS:
            self._asked = {k: v for k, v in self._asked.items() if now - v[0] <= STATUS_SECONDS}
            asked = now, asyncio.create_task(self._opencode.session_status(at=location))
            self._asked[location] = asked
        return await asyncio.shield(asked[1])


async def messages_since(
    opencode: OpenCode, session_id: SessionId, message_id: MessageId
) -> list[MessageWithParts]:
    """Return a session's messages from one on, which is looked for from the end; else all."""
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
            return found


async def read(
    opencode: OpenCode, session_id: SessionId, message_id: MessageId, location: Location
) -> Stored:
    """Return all that is needed to go on after a gap."""
    messages, statuses, (permissions, questions) = await asyncio.gather(
        messages_since(opencode, session_id, message_id),
        opencode.session_status(at=location),
        pending(opencode, location),
    )
    return Stored(
        messages=messages,
        statuses=statuses,
        permissions=permissions,
        questions=questions,
        directory=location.directory,
    )


async def pending(
    opencode: OpenCode, location: Location
) -> tuple[list[PermissionRequest] | None, list[QuestionRequest] | None]:
    """Return the prompts of a directory; None for a list that OpenCode cannot write.

    One request that it cannot encode, such as a ``webfetch`` without a timeout, spoils the
    whole list for as long as it is pending.
    """
    return await asyncio.gather(
        _listed(opencode.permissions(at=location)), _listed(opencode.questions(at=location))
    )


async def _listed(asked: Coroutine[None, None, list[R]]) -> list[R] | None:
    try:
        return await asked
    except UpstreamHttpError as error:
        log.warning("prompts not listed", error=error.message)
        return None


async def tool_call(opencode: OpenCode, session_id: SessionId, call_id: str) -> ToolPart | None:
    """Return a call of a session's latest messages."""
    for message in (await opencode.messages(session_id, limit=2)).items:
        for part in message.parts:
            if isinstance(part, ToolPart) and part.call_id == call_id:
                return part
    return None


async def read_end(
    opencode: OpenCode,
    session_id: SessionId,
    message_id: MessageId,
    children: Iterable[SessionId],
) -> Stored:
    """Return all that is needed to end a turn whose sessions are idle."""
    messages = await messages_since(opencode, session_id, message_id)
    changed = any(isinstance(part, PatchPart) for m in messages for part in m.parts)
    diffs: list[FileDiff] = []
    if changed:
        diffs = await opencode.session_diff(session_id, message_id)
    return Stored(
        messages=messages,
        children={child: await _child(opencode, child) for child in children},
        diffs=diffs,
    )


async def _child(opencode: OpenCode, session_id: SessionId) -> list[MessageWithParts]:
    try:
        return (await opencode.messages(session_id)).items
    except SessionNotFoundError:
        return []
