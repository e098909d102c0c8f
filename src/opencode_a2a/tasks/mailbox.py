"""Calls at another replica: what only the one that runs an OpenCode can do.

Whoever is asked about something that runs elsewhere raises ``NotOwnerError``; ``TaskService`` and
``extensions.dispatch`` then have the whole call done by the owner of that OpenCode, as if it had
been asked itself. The way there is a table: there is no second port, no secret between replicas and
no network path that has to be kept open. What is asked and answered is known to the handlers, not
here.

Something that was asked is addressed to an OpenCode, not to a replica, so the next owner finds it.
If a replica dies while it is at it, the next one does it once more, provided that this does no
harm; otherwise whoever asked is told that it may have been done. Every ``ask`` ends: with a reply,
when nobody has taken it for some seconds, or when the one that has it is gone. As long as a replica
that lives is at it, it takes as long as it would take here.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from typing import Any

import orjson
import structlog

from opencode_a2a import metrics
from opencode_a2a.errors import (
    InternalError,
    ServiceError,
    StoreUnavailableError,
    UpstreamError,
    UpstreamUnreachableError,
    Violation,
)
from opencode_a2a.store import mail
from opencode_a2a.store.database import Database
from opencode_a2a.store.mail import MailRow
from opencode_a2a.turns.fleet import FORWARDED, NotOwnerError

logger = structlog.get_logger(__name__)

Handler = Callable[[bytes], Awaitable[bytes]]
"""Does what is asked here; raises ServiceError, or NotOwnerError if another has to do it."""

PATIENCE_SECONDS = 15.0
"""How long something may lie there that nobody takes: the next owner is there by then."""
POLL_SECONDS = 1.0
"""How often mail is looked for if no notification comes."""
RETURN_SECONDS = 0.1
"""Before something is left to another: two that disagree do not pass it on at full speed."""
SWEEP_SECONDS = 30.0
ALONE_SECONDS = 300.0
"""How often leftovers are looked for while there is no other replica."""
CLOSE_SECONDS = 1.0
OTHERS_SECONDS = 3.0
"""How long other replicas may take when all of them are asked."""

NOBODY = (
    "No replica of the service runs this OpenCode at the moment, so nothing was done; try again"
)
UNSURE = (
    "The replica of the service that was asked stopped before it answered. It may have been done; "
    "look before you try again"
)
_DONE, _FAILED = b"=", b"!"


@dataclass(eq=False, slots=True)
class _Waiting:
    """Who waits for a reply, and until when if nobody is at it."""

    reply: asyncio.Future[bytes]
    until: float


class Mailbox:
    """What this replica asks of others, and does for them; ``mine`` are the OpenCodes it runs."""

    def __init__(self, database: Database, mine: Callable[[], Sequence[str]]) -> None:
        self.handlers: dict[str, Handler] = {}
        self._database = database
        self._mine = mine
        self._waiting: dict[int, _Waiting] = {}
        self._doing: set[asyncio.Task[None]] = set()
        self._wake = asyncio.Event()
        self._swept = time.monotonic()

    async def ask(self, upstream: str, kind: str, body: bytes, *, repeatable: bool) -> bytes:
        """Have the owner of an OpenCode do something; return its reply, or raise what it raised.

        ``repeatable`` says that it does no harm to do it twice.
        """
        me, began = self._database.replica, time.monotonic()
        if me is None:
            raise UpstreamUnreachableError(NOBODY)
        no = await self._database.write(
            lambda connection: mail.send(connection, upstream, me, kind, body, again=repeatable)
        )
        reply = asyncio.get_running_loop().create_future()
        self._waiting[no] = _Waiting(reply, began + PATIENCE_SECONDS)
        self._database.notify("m")
        self._wake.set()  # it may have become ours meanwhile
        outcome = "given_up"
        try:
            found = await reply
            outcome = "done" if found.startswith(_DONE) else "refused"
        except TimeoutError:
            taken = await self._database.write(lambda connection: mail.delete(connection, no))
            outcome = "broken" if taken else "nobody"
            raise UpstreamUnreachableError(UNSURE if taken else NOBODY) from None
        finally:
            del self._waiting[no]
            metrics.POST_SECONDS.labels(outcome).observe(time.monotonic() - began)
            if outcome not in ("broken", "nobody"):
                # Nobody waits for that; if it fails, the sweep deletes it.
                deleted = self._database.submit(lambda connection: mail.delete(connection, no)).done
                deleted.add_done_callback(lambda done: done.cancelled() or done.exception())
        if outcome == "refused":
            raise load_error(found[1:])
        return found[1:]

    async def others(self) -> list[str]:
        """Return the OpenCodes that other replicas run, and that they can be asked about."""
        me = self._database.replica
        if me is None or not self._database.has_other_replicas:
            return []
        return await self._database.read(lambda connection: mail.others(connection, me))

    def on_notification(self, text: str) -> None:
        """Take note of a notification; see ``Database.listeners``."""
        # What is new is looked for with one query, whatever it is.
        mine = text.startswith("r,") and text[2:].isdigit() and int(text[2:]) in self._waiting
        if text in ("", "m", "u") or mine:
            self._wake.set()

    async def run(self) -> None:
        """Do what others ask, and hand replies to those who wait for them."""
        if self._database.replica is None:
            return
        self._database.listeners.append(self.on_notification)
        try:
            while True:
                with suppress(TimeoutError):
                    async with asyncio.timeout(POLL_SECONDS):
                        await self._wake.wait()
                self._wake.clear()
                left = time.monotonic() - self._swept >= ALONE_SECONDS
                if self._database.has_other_replicas or self._waiting or left:
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
        """Look once for replies, for what is asked of this replica, and for what is left over."""
        numbers, mine = [*self._waiting], self._mine()
        if numbers:
            sent = await self._database.read(lambda connection: mail.sent(connection, numbers))
            found = {row.no: row for row in sent}
            for no in numbers:
                row, waiting = found.get(no), self._waiting.get(no)
                if waiting is None or waiting.reply.done():
                    continue
                if row is None or row.broken:
                    waiting.reply.set_exception(TimeoutError())
                elif row.reply is not None:
                    waiting.reply.set_result(row.reply)
                elif row.taken:
                    waiting.until = time.monotonic() + PATIENCE_SECONDS
        if mine and await self._database.read(lambda found: mail.waits(found, me, mine)):
            for row in await self._database.write(lambda found: mail.take(found, me, mine)):
                task = asyncio.create_task(self._do(me, row), name=f"mail {row.no}")
                self._doing.add(task)
                task.add_done_callback(self._doing.discard)
        if time.monotonic() - self._swept >= SWEEP_SECONDS:
            self._swept, numbers = time.monotonic(), [*self._waiting]
            await self._database.write(lambda connection: mail.forget(connection, me, numbers))

    async def _do(self, me: int, row: MailRow) -> None:
        """Do what is asked as if it had been asked here, and store what came of it."""
        FORWARDED.set(True)
        try:
            reply = _DONE + await self.handlers[row.kind](row.body)
        except NotOwnerError as error:
            upstream = error.upstream
            await asyncio.sleep(RETURN_SECONDS)
            if await self._database.write_until_stored(
                lambda found: mail.give_back(found, row.no, me, upstream, PATIENCE_SECONDS)
            ):
                self._database.notify("m")
                return
            reply = _FAILED + dump_error(UpstreamUnreachableError(NOBODY))
        except ServiceError as error:
            reply = _FAILED + dump_error(error)
        except Exception:
            logger.exception("what another replica asked for failed", kind=row.kind)
            reply = _FAILED + dump_error(InternalError())
        if await self._database.write_until_stored(
            lambda connection: mail.answer(connection, row.no, me, reply)
        ):
            self._database.notify(f"r,{row.no}")
            if row.no in self._waiting:
                self._wake.set()


def known_fields(kind: type[Any], sent: Mapping[str, Any]) -> dict[str, Any]:
    """Return what this version knows of something that a later one may have sent."""
    return {one.name: sent[one.name] for one in fields(kind) if one.name in sent}


# Errors, exactly as they were raised


def dump_error(error: ServiceError) -> bytes:
    """Write down an error, for ``load_error``."""
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
    """Return the error that another replica raised; of an unknown one only that it failed."""
    sent = orjson.loads(data)
    # Several share a reason, so that alone does not tell which it is.
    kinds = {kind.__name__: kind for kind in _kinds(ServiceError)}
    kind = kinds.get(sent["error"])
    if kind is None:  # that of a later version
        return InternalError()
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
