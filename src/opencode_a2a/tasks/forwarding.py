"""Calls that the owner of an OpenCode runs, whichever replica they arrive at.

Code that finds its OpenCode owned by another replica raises ``NotOwnerError``. The ``OwnerCall``
around it then has the owner run the same code, through the mailbox, and returns the result or
raises the error as if it had run here. To forward a further call, declare an ``OwnerCall``: its
kind, what runs, and how arguments and result are written.
"""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Generic, TypeVar

import orjson

from opencode_a2a.errors import ServiceError, SessionNotFoundError
from opencode_a2a.ids import SessionId
from opencode_a2a.tasks.mailbox import OTHERS_SECONDS, Mailbox, known_fields
from opencode_a2a.turns.fleet import Fleet, NotOwnerError

A = TypeVar("A")
R = TypeVar("R")


class OwnerCall(Generic[A, R]):
    """One kind of call, with its arguments as one value."""

    def __init__(
        self,
        mailbox: Mailbox,
        kind: str,
        run: Callable[[A], Awaitable[R]],
        *,
        dump: Callable[[A], bytes] = orjson.dumps,
        load: Callable[[bytes], A],
        dump_result: Callable[[R], bytes],
        load_result: Callable[[A, bytes], Awaitable[R]],
        repeatable: Callable[[A], bool] = lambda _: True,
    ) -> None:
        self._mailbox = mailbox
        self._kind = kind
        self._run = run
        self._dump = dump
        self._load = load
        self._dump_result = dump_result
        self._load_result = load_result
        """Makes the result of the arguments and the reply; it may read the database for that."""
        self._repeatable = repeatable
        """Whether the next owner may run the call again if this one dies over it."""
        mailbox.handlers[kind] = self._answer

    async def __call__(self, arguments: A) -> R:
        """Run the call here, or have the owner of its OpenCode run it."""
        try:
            return await self._run(arguments)
        except NotOwnerError as error:
            upstream = error.upstream
        return await self.ask(upstream, arguments)

    async def ask(self, upstream: str, arguments: A) -> R:
        """Have the owner of an OpenCode run the call."""
        body, repeatable = self._dump(arguments), self._repeatable(arguments)
        reply = await self._mailbox.ask(upstream, self._kind, body, repeatable=repeatable)
        return await self._load_result(arguments, reply)

    async def _answer(self, body: bytes) -> bytes:
        """Run the call for another replica."""
        return self._dump_result(await self._run(self._load(body)))


def load_fields(kind: type[A]) -> Callable[[bytes], A]:
    """Return a loader for a dataclass of JSON values; it ignores fields of a later version."""
    return lambda body: kind(**known_fields(kind, orjson.loads(body)))


@dataclass(frozen=True, slots=True)
class SessionQuery:
    upstream: str
    session_id: SessionId


class SessionSearch:
    """Finds which OpenCode of another replica has a session (``Fleet.find_session_elsewhere``)."""

    def __init__(self, mailbox: Mailbox, fleet: Fleet) -> None:
        self._mailbox = mailbox
        self._fleet = fleet

        async def load_result(_: SessionQuery, reply: bytes) -> bool:
            return orjson.loads(reply)

        self._has_session = OwnerCall(
            mailbox,
            "session",
            self._has,
            load=load_fields(SessionQuery),
            dump_result=orjson.dumps,
            load_result=load_result,
        )

    async def find(self, session_id: SessionId) -> str | None:
        """Ask the other replicas; return the name of the OpenCode that has the session."""

        async def has(upstream: str) -> bool:
            with suppress(TimeoutError, ServiceError):
                async with asyncio.timeout(OTHERS_SECONDS):
                    return await self._has_session.ask(upstream, SessionQuery(upstream, session_id))
            return False

        upstreams = await self._mailbox.others()
        answers = await asyncio.gather(*map(has, upstreams))
        return next((name for name, here in zip(upstreams, answers, strict=True) if here), None)

    async def _has(self, query: SessionQuery) -> bool:
        member = self._fleet.members[query.upstream].check_owned()
        try:
            await member.turns.opencode.session(query.session_id)
        except SessionNotFoundError:
            return False
        return True
