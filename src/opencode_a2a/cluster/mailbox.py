"""Run calls where they belong: here, or at the replica that owns the OpenCode.

What has to be decided in one place is an ``OwnerCall``: it is told where (``fleet``), and runs
the same code here or there. A call that belongs to another replica goes through a table
(``Mailbox``, ``store.mail``), so replicas need no second port, no shared secret and no network path
to each other. Its result is returned, and its error raised, as if it had run here.

A mail is addressed to an OpenCode, not to a replica, so the next owner finds it. If a replica dies
while it carries a call out, the next owner does so again if the call is repeatable; otherwise the
caller is told that it may have been done. Every ``forward`` ends: with a reply, when no owner has
collected the mail for ``PATIENCE_SECONDS``, or when the replica that collected it is gone. A live
replica may take as long as it would for a call of its own.

While replicas are upgraded, one may own an OpenCode and not be able to read the calls of a later
version. It is not asked: the caller is told to try again, new contexts begin elsewhere, and what
comes to that replica itself is served as always.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import nullcontext, suppress
from dataclasses import asdict, dataclass
from functools import cache
from typing import Generic, TypeVar

import orjson
import structlog
from pydantic import TypeAdapter, ValidationError

from opencode_a2a import metrics
from opencode_a2a.bounds import wait
from opencode_a2a.cluster.fleet import Fleet, Here, Member, MovedError, There, Where
from opencode_a2a.errors import (
    InternalError,
    MaybeRunError,
    NotRunError,
    OtherVersionError,
    ServiceError,
    SessionNotFoundError,
    StoreUnavailableError,
    UpstreamError,
    UpstreamUnreachableError,
    Violation,
)
from opencode_a2a.ids import SessionId
from opencode_a2a.store import mail, replicas
from opencode_a2a.store.database import Database
from opencode_a2a.store.mail import MailRow

logger = structlog.get_logger(__name__)

Handler = Callable[[str, bytes], Awaitable[bytes]]
"""Carries out a call about an OpenCode, from its encoded form to that of its reply.

Raises ServiceError, or MovedError if the call belongs to another OpenCode or to its next owner."""

PATIENCE_SECONDS = 15.0
"""How long a mail may wait to be collected: an OpenCode has its next owner by then."""
POLL_SECONDS = 1.0
"""How often to look for mail and replies if no notification comes."""
RETURN_SECONDS = 0.1
"""Pause before a mail is given back: two replicas that disagree about the owner of an OpenCode must
not pass it on at full speed."""
SWEEP_SECONDS = 30.0
ALONE_SECONDS = 300.0
"""How often to look for mail of replicas that are gone while there is no other replica."""
CLOSE_SECONDS = 1.0
OTHERS_SECONDS = 3.0
"""How long a replica may take to answer a call that goes to all of them, such as a list."""

_DONE, _FAILED = b"=", b"!"
"""The first byte of a reply: a result follows, or an error."""


@dataclass(eq=False, slots=True)
class _Waiting:
    """A ``forward`` that has no reply yet."""

    reply: asyncio.Future[bytes]
    since: float
    """When it was sent, by the monotonic clock."""
    until: float
    """When it is given up unless a live replica has collected the mail; by the monotonic clock."""


class Mailbox:
    """Sends the calls of this replica to others, and carries out those of others.

    ``owned`` returns the names of the OpenCodes that this replica owns.
    """

    def __init__(self, database: Database, owned: Callable[[], Sequence[str]]) -> None:
        self.handlers: dict[str, Handler] = {}
        """By the kind of call; see ``register``."""
        self._began = False
        self._database = database
        self._owned = owned
        self._waiting: dict[int, _Waiting] = {}
        self._doing: set[asyncio.Task[None]] = set()
        self._wake = asyncio.Event()
        self._swept = time.monotonic()
        metrics.MAIL_OLDEST.set_function(self._longest_wait)

    def _longest_wait(self) -> float:
        now = time.monotonic()
        return max((now - one.since for one in self._waiting.values()), default=0.0)

    def register(self, kind: str, handler: Handler) -> None:
        """Have a handler carry out one kind of call.

        Raise RuntimeError once the mailbox runs: a call of this kind may have been refused already.
        """
        if kind in self.handlers:
            raise RuntimeError(f"the call {kind} is declared twice")
        if self._began:
            raise RuntimeError(f"the call {kind} is declared after the mailbox began to run")
        self.handlers[kind] = handler

    async def forward(
        self, upstream: str, kind: str, body: bytes, *, repeatable: bool, begun: bool = False
    ) -> bytes:
        """Forward a call to the owner of an OpenCode; return its reply, or raise what it raised.

        ``repeatable`` says that it does no harm to carry the call out twice, ``begun`` that it was
        begun here, and may have been done.
        """
        me, began = self._database.replica, time.monotonic()
        if me is None:
            raise MaybeRunError if begun else NotRunError
        if not self._database.census.reads_mail(upstream):
            if begun:
                raise MaybeRunError().with_headers(*OtherVersionError.headers)
            raise OtherVersionError
        no = await self._database.write(
            mail.send, upstream, me, kind, body, again=repeatable, begun=begun
        )
        reply = asyncio.get_running_loop().create_future()
        self._waiting[no] = _Waiting(reply, began, began + PATIENCE_SECONDS)
        self._database.tell_all("m")  # this replica may have become the owner meanwhile
        outcome = "given_up"
        try:
            found = await reply
            outcome = "done" if found.startswith(_DONE) else "refused"
        except TimeoutError:
            begun = await self._database.write(mail.delete, no)
            outcome = "broken" if begun else "nobody"
            raise MaybeRunError if begun else NotRunError from None
        finally:
            del self._waiting[no]
            metrics.MAIL_SECONDS.labels(outcome).observe(time.monotonic() - began)
            if outcome not in ("broken", "nobody"):
                # Nobody waits for this write; if it fails, the sweep deletes the mail.
                deleted = self._database.submit(mail.delete, no).done
                deleted.add_done_callback(lambda done: done.cancelled() or done.exception())
        if outcome == "refused":
            raise load_error(found[1:])
        return found[1:]

    async def others(self) -> list[str]:
        """Return the names of the OpenCodes that other live replicas run, as of now."""
        me = self._database.replica
        if me is None or not self._database.census.has_others:
            return []
        rows = await self._database.read(replicas.upstreams)
        return [r.name for r in rows if not r.free and r.owner != me and r.state != "lost"]

    def on_notification(self, text: str) -> None:
        """Look for mail and replies if a notification says so; see ``Database.listeners``."""
        awaited = text.startswith("r,") and text[2:].isdigit() and int(text[2:]) in self._waiting
        if text in ("", "m", "u") or awaited:
            self._wake.set()

    async def run(self) -> None:
        """Carry out the calls of other replicas, and hand replies to those who wait for them."""
        self._began = True
        if self._database.replica is None:
            return
        self._database.listeners.append(self.on_notification)
        try:
            while True:
                await wait(self._wake, POLL_SECONDS)
                self._wake.clear()
                sweep_due = time.monotonic() - self._swept >= ALONE_SECONDS
                if self._database.census.has_others or self._waiting or sweep_due:
                    with suppress(StoreUnavailableError):
                        await self._look(self._database.replica)
                    now = time.monotonic()
                    for waiting in self._waiting.values():
                        if waiting.until <= now and not waiting.reply.done():
                            waiting.reply.set_exception(TimeoutError())
        finally:
            self._database.listeners.remove(self.on_notification)
            if self._doing:
                await asyncio.wait(self._doing, timeout=CLOSE_SECONDS)
            for task in self._doing:
                task.cancel()

    async def _look(self, me: int) -> None:
        """Look once for replies, for mail to this replica, and for mail that nobody waits for."""
        numbers, owned = [*self._waiting], self._owned()
        if numbers:
            sent = await self._database.read(mail.sent, numbers)
            found = {row.no: row for row in sent}
            for no in numbers:
                row, waiting = found.get(no), self._waiting.get(no)
                if waiting is None or waiting.reply.done():
                    continue
                if row is None or row.broken:
                    waiting.reply.set_exception(TimeoutError())
                elif row.reply is not None:
                    waiting.reply.set_result(row.reply)
                elif row.collected:
                    waiting.until = time.monotonic() + PATIENCE_SECONDS
        if owned and await self._database.read(mail.waits, me, owned):
            for row in await self._database.write(mail.collect, me, owned):
                task = asyncio.create_task(self._reply_to(me, row), name=f"mail {row.no}")
                self._doing.add(task)
                task.add_done_callback(self._doing.discard)
        if time.monotonic() - self._swept >= SWEEP_SECONDS:
            self._swept, numbers = time.monotonic(), [*self._waiting]
            await self._database.write(mail.forget, me, numbers)

    async def _reply_to(self, me: int, row: MailRow) -> None:
        """Carry out a call as if it had come to this replica, and store the reply."""
        try:
            try:
                handler = self.handlers.get(row.kind)
                if handler is None:
                    raise OtherVersionError
                reply = _DONE + await handler(row.upstream, row.body)
            except MovedError as moved:
                upstream, begun = moved.upstream, moved.begun
                await asyncio.sleep(RETURN_SECONDS)
                if await self._database.write_until_stored(
                    mail.give_back, row.no, me, upstream, PATIENCE_SECONDS, begun=begun
                ):
                    self._database.notify("m")
                    return
                reply = _FAILED + dump_error(MaybeRunError() if row.begun else NotRunError())
            except ServiceError as error:
                reply = _FAILED + dump_error(error)
            stored = await self._database.write_until_stored(mail.store_reply, row.no, me, reply)
        except Exception:  # also what cannot be stored: its caller waits while this replica lives
            logger.exception("a call of another replica failed", kind=row.kind)
            reply = _FAILED + dump_error(InternalError())
            stored = await self._database.write_until_stored(mail.store_reply, row.no, me, reply)
        if stored:
            self._database.tell_all(f"r,{row.no}")


# Errors, exactly as they were raised


def dump_error(error: ServiceError) -> bytes:
    """Encode an error for ``load_error``."""
    return orjson.dumps(
        {
            "error": type(error).__name__,
            "message": error.message,
            "violations": [asdict(violation) for violation in error.violations],
            "data": error.data,
            "headers": error.headers,
            "detail": error.detail if isinstance(error, UpstreamError) else None,
        }
    )


def load_error(data: bytes) -> ServiceError:
    """Return the error that another replica raised.

    One that this version does not have counts as a call that could not be answered.
    """
    sent = orjson.loads(data)
    # By the name of its class: several errors share a reason.
    kinds = {kind.__name__: kind for kind in _kinds(ServiceError)}
    kind = kinds.get(sent["error"])
    if kind is None:
        return UpstreamUnreachableError(sent["message"])
    error = kind(sent["message"])
    error.violations = tuple(Violation(**violation) for violation in sent["violations"])
    error.data = sent["data"]
    error.headers = tuple((name, value) for name, value in sent["headers"])
    if isinstance(error, UpstreamError):
        error.detail = sent["detail"]
    return error


def _kinds(kind: type[ServiceError]) -> Iterator[type[ServiceError]]:
    yield kind
    for derived in kind.__subclasses__():
        yield from _kinds(derived)


A = TypeVar("A")
R = TypeVar("R")


class OwnerCall(Generic[A, R]):
    """One kind of call that the owner of an OpenCode runs: one value as argument, one as result.

    Between replicas both are sent as JSON, by the adapters of their types, such as a dataclass.
    Fields that a later version has added are ignored; if they must not be, see
    ``store.replicas.MAIL_FORMAT``.

    ``handler`` carries the call out, for an OpenCode that is held meanwhile (``Member.hold``). It
    raises MovedError if it finds that the call belongs to another OpenCode. Its result names what
    the caller can read from the database. Whatever it changes has to be in a log or another table:
    the OpenCode may have another owner before the result is read.

    Make it before the mailbox runs (``Mailbox.register``).
    """

    def __init__(
        self,
        mailbox: Mailbox,
        kind: str,
        fleet: Fleet,
        handler: Callable[[Member, A], Awaitable[R]],
        arguments: Callable[[], TypeAdapter[A]],
        result: Callable[[], TypeAdapter[R]],
        repeatable: Callable[[A], bool] = lambda _: True,
    ) -> None:
        """Declare a kind of call.

        ``repeatable`` says whether the next owner may run a call again if this one dies over it.
        The adapters are made with the first call: most services have no other replica.
        """
        self._mailbox = mailbox
        self._kind = kind
        self._fleet = fleet
        self._handler = handler
        self._arguments = cache(arguments)
        self._result = cache(result)
        self._repeatable = repeatable
        mailbox.register(kind, self._run_forwarded)

    async def run(self, where: Where, arguments: A, *, begun: bool = False) -> R:
        """Run the call where it belongs; ``begun`` says that it was begun before.

        If it belongs here and yet nobody runs it here, as a task that is just being stored, it is
        tried again for a while.
        """
        until: float | None = None
        while not isinstance(where, There):
            held = nullcontext()
            if isinstance(where, Here):
                held = where.member.hold(repeatable=self._repeatable(arguments))
            try:
                async with held:
                    return await self._handler(where.member, arguments)
            except MovedError as moved:
                before, where = where, self._fleet.where(moved.upstream)
                begun = begun or moved.begun
                if where == before:
                    until = until or time.monotonic() + PATIENCE_SECONDS
                    if time.monotonic() > until:
                        raise (MaybeRunError if begun else NotRunError) from None
                    await asyncio.sleep(RETURN_SECONDS)
        return await self.run_at_owner(where.upstream, arguments, begun=begun)

    async def _run_forwarded(self, upstream: str, body: bytes) -> bytes:
        """Run a call of another replica, as ``run`` does for one of our own.

        If the OpenCode is not owned here any more, ``Mailbox`` gives the call back.
        """
        try:
            arguments = self._arguments().validate_json(body)
        except ValidationError:  # its text has the values, and may have a secret
            raise OtherVersionError from None
        member = self._fleet.members[upstream]
        async with member.hold(repeatable=self._repeatable(arguments)):
            return self._result().dump_json(await self._handler(member, arguments))

    async def run_at_owner(self, upstream: str, arguments: A, *, begun: bool = False) -> R:
        """Have the owner of an OpenCode run the call, whoever that is."""
        body, again = self._arguments().dump_json(arguments), self._repeatable(arguments)
        reply = await self._mailbox.forward(
            upstream, self._kind, body, repeatable=again, begun=begun
        )
        try:
            return self._result().validate_json(reply)
        except ValidationError:
            raise MaybeRunError from None


@dataclass(frozen=True, slots=True)
class SessionQuery:
    upstream: str
    session_id: SessionId


class SessionSearch:
    """Finds which OpenCode of another replica has a session (``Fleet.find_session_elsewhere``)."""

    def __init__(self, mailbox: Mailbox, fleet: Fleet) -> None:
        self._mailbox = mailbox
        self._has_session = OwnerCall(
            mailbox,
            "session",
            fleet,
            self._has,
            lambda: TypeAdapter(SessionQuery),
            lambda: TypeAdapter(bool),
        )

    async def find(self, session_id: SessionId) -> str | None:
        """Ask the other replicas; return the name of the OpenCode that has the session."""

        async def has(upstream: str) -> bool:
            with suppress(TimeoutError, ServiceError):
                async with asyncio.timeout(OTHERS_SECONDS):
                    query = SessionQuery(upstream, session_id)
                    return await self._has_session.run_at_owner(upstream, query)
            return False

        upstreams = await self._mailbox.others()
        answers = await asyncio.gather(*map(has, upstreams))
        return next((name for name, here in zip(upstreams, answers, strict=True) if here), None)

    async def _has(self, member: Member, query: SessionQuery) -> bool:
        try:
            await member.turns.opencode.session(query.session_id)
        except SessionNotFoundError:
            return False
        return True
