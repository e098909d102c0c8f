"""The parts of the service that do its work, and the order in which they start.

``service`` starts them, puts the routes in front of them, and stops them. A part that runs all the
time is a coroutine; the service ends if one of them fails (``Service.beside``).
"""

import asyncio
import os
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import structlog

from opencode_a2a.cluster.fleet import Fleet, Member
from opencode_a2a.cluster.ownership import Ownership, RunBeside
from opencode_a2a.config import Settings, UpstreamEntry
from opencode_a2a.errors import SessionNotFoundError, StoreUnavailableError, UpstreamError
from opencode_a2a.ids import SessionId
from opencode_a2a.log.log import LogWriter
from opencode_a2a.log.state import Status
from opencode_a2a.messages import MessageIds
from opencode_a2a.opencode.connect import OpenCodeConnection
from opencode_a2a.opencode.driver import Driver
from opencode_a2a.opencode.feed import Feed
from opencode_a2a.opencode.upstream import HEALTH_SECONDS, opencode_server, withheld
from opencode_a2a.push.loop import Deliveries
from opencode_a2a.push.notification import Sender
from opencode_a2a.push.sender import WebhookSender
from opencode_a2a.signing import SigningKey
from opencode_a2a.store import callers
from opencode_a2a.store.database import Database
from opencode_a2a.store.engine import ConnectionOptions, Replica
from opencode_a2a.tasks.recovery import Recovery, sweep
from opencode_a2a.tasks.service import TaskService
from opencode_a2a.tasks.webhooks import Webhooks
from opencode_a2a.turns.errands import Errands
from opencode_a2a.turns.job import SharedTurns
from opencode_a2a.turns.sessions import Sessions, WorkspaceRoot
from opencode_a2a.turns.shared_interrupts import SharedInterrupts
from opencode_a2a.turns.tools import Tools

if TYPE_CHECKING:
    from opencode_a2a.notices.service import Notices

logger = structlog.get_logger(__name__)

FEED_SILENCE_SECONDS = 35.0
"""Longer than the pause between OpenCode's heartbeats: 10 s, before 1.4 30 s."""

Run = Callable[[Coroutine[None, None, None], str], Awaitable[None]]
"""Has a part of this name run from now on."""
OfferTools = Callable[[Driver], Tools]
"""Offers an OpenCode the tools for asking other agents."""


@dataclass(frozen=True, slots=True)
class Parts:
    database: Database
    workspace: WorkspaceRoot
    fleet: Fleet
    sender: WebhookSender
    webhooks: Webhooks
    tasks: TaskService
    ownership: Ownership
    new_message_id: MessageIds
    deliveries: Deliveries
    notices: "Notices | None" = None
    _errands: dict[str, set[SessionId]] = field(default_factory=dict[str, set[SessionId]])
    """Sessions that work without a task in an OpenCode that is kept, by its name."""

    def turns_in(self, member: Member) -> list[Status]:
        """Return the states of the tasks whose turn runs, or is queued, in an OpenCode."""
        found = (task.log.state.status for task in self.tasks.open.all() if task.member is member)
        return [status for status in found if not status.between_turns]

    def keep_opencodes(self) -> None:
        """Leave a managed OpenCode running if a turn in it waits for a person.

        The permission or question would end with it. Its other work is stopped (``stop_unwatched``)
        when nothing can follow on it any more, such as the next turn of a session.
        """
        for member in self.fleet.members.values():
            asks = any(status.state.interrupted for status in self.turns_in(member))
            managed = member.server.managed
            if managed is not None and asks and managed.keepable:
                managed.keep, self._errands[member.name] = True, member.errands.working()

    async def stop_unwatched(self) -> None:
        """Stop what works in an OpenCode that is kept: nobody would follow it."""
        for member in self.fleet.members.values():
            if member.server.managed is None or not member.server.managed.keep:
                continue
            turns = self.turns_in(member)
            asking = {status.session_id for status in turns if status.state.interrupted}
            errands = self._errands.get(member.name, set())
            working = {status.session_id for status in turns} | errands
            for session_id in filter(None, working - asking):
                with suppress(TimeoutError, UpstreamError, SessionNotFoundError):
                    async with asyncio.timeout(HEALTH_SECONDS):
                        await member.turns.opencode.abort_session(session_id)


def running_beside(stack: AsyncExitStack, beside: RunBeside) -> Run:
    """Return what has a part run until a stack is closed."""

    async def run(work: Coroutine[None, None, None], name: str) -> None:
        await stack.enter_async_context(beside(work, name))

    return run


async def make_parts(
    stack: AsyncExitStack,
    settings: Settings,
    beside: RunBeside,
    key: SigningKey | None,
    offer_tools: OfferTools | None,
) -> Parts:
    """Open the database, find or start every OpenCode, and make the parts that work with them.

    Each is made of those before it. The stack closes everything in the reverse order, so that what
    still writes at its end has a database to write to.
    """
    run = running_beside(stack, beside)

    # The database.
    replica, store = Replica(settings.replica_name, settings.replica.lease_seconds), settings.tasks
    options = ConnectionOptions(
        store.task_store_pooled, store.task_store_listen_url, settings.replica.poll_seconds
    )
    database = await stack.enter_async_context(Database(settings.database_url, replica, options))
    await run(database.keep_lease(), "keep the lease")
    await run(database.listen(), "listen for notifications")
    try:
        secret = await database.write(callers.shared_secret, os.urandom(32))
    except StoreUnavailableError:
        raise database.went_away from None
    new_message_id = MessageIds(secret)

    # Every OpenCode: found, or started and adopted, but not followed yet.
    allow_override = settings.a2a.allow_directory_override
    workspace = WorkspaceRoot(settings.workspace, allow_override=allow_override)
    hidden = withheld(settings)
    members = [
        await _start_member(stack, entry, own, hidden, database, workspace, offer_tools)
        for entry, own in settings.fleet
    ]
    fleet = Fleet(members, database, settings.opencode.upstream_lost_seconds)

    # Tasks, their logs, and their webhooks.
    sender = WebhookSender(settings.push, settings.public_url, key)
    stack.push_async_callback(sender.aclose)
    writer, webhooks = LogWriter(database), Webhooks(database, settings.push)
    webhook_sender: Sender = sender
    if settings.otel.enabled:
        from opencode_a2a.otel import Tracing  # it needs an optional library

        tracing = Tracing(settings, database)
        stack.push_async_callback(tracing.aclose)
        writer.observer, webhook_sender = tracing, tracing.sending(sender)
    tasks = TaskService(database, writer, fleet, settings.limits, webhooks)
    notices: Notices | None = None
    if settings.notices.notify:
        from opencode_a2a.notices.service import start_notices  # not for most services

        notices = await start_notices(settings, database)
        stack.push_async_callback(notices.aclose)
        webhooks.notices_for = notices.sender.names_for
    notice_sender = notices and notices.sender
    deliveries = Deliveries(
        database, writer, tasks.open, settings.push, webhook_sender, notice_sender
    )
    await run(writer.run(), "write the logs")
    await run(tasks.remote_logs.run(), "read the logs of other replicas")
    recovery = Recovery(database, writer, fleet, tasks.open, new_message_id.made)
    ownership = Ownership(database, fleet, recovery, beside)
    return Parts(
        database,
        workspace,
        fleet,
        sender,
        webhooks,
        tasks,
        ownership,
        new_message_id,
        deliveries,
        notices,
    )


async def start_parts(
    stack: AsyncExitStack, settings: Settings, beside: RunBeside, parts: Parts
) -> None:
    """Take the OpenCodes, follow their events and recover their tasks; then look after the rest."""
    database, fleet, tasks = parts.database, parts.fleet, parts.tasks
    run = running_beside(stack, beside)
    try:
        await parts.ownership.start()
    except StoreUnavailableError:
        raise database.went_away from None
    await run(parts.deliveries.run(), "tell webhooks")
    retention = settings.tasks.task_retention_days * 86_400.0
    await run(sweep(database, retention, parts.webhooks.unread()), "delete what has expired")
    await run(fleet.notice_lost(tasks.open.lose), "notice lost OpenCodes")


async def _start_member(
    stack: AsyncExitStack,
    entry: UpstreamEntry,
    settings: Settings,
    hidden: set[str],
    database: Database,
    workspace: WorkspaceRoot,
    offer_tools: OfferTools | None,
) -> Member:
    """Start or find one OpenCode, and make the parts that work with it.

    ``settings`` are its own. It is offered the tools for other agents if it can reach them.
    """
    behind = await stack.enter_async_context(opencode_server(settings, hidden))
    connection = await stack.enter_async_context(
        OpenCodeConnection(
            behind.url,
            username=behind.username,
            password=behind.password,
            timeout=settings.opencode.timeout,
            max_concurrent_requests=settings.opencode.max_concurrent_requests,
        )
    )
    with suppress(UpstreamError):  # said when it is examined
        await connection.choose(seconds=HEALTH_SECONDS)
    opencode = connection.driver
    if database.replica is not None:
        opencode.before_change = database.wait_for_lease

    # With several replicas it is heard all the time, whoever runs its turns.
    keeps = database.replica is not None
    feed = Feed(
        opencode.events, opencode.begin_decoding, silence=FEED_SILENCE_SECONDS, keeps_texts=keeps
    )

    def make() -> tuple[SharedTurns, Errands]:
        claim = settings.tasks.pending_session_claim_ttl_seconds
        sessions = Sessions(database, opencode, workspace, claim, entry.name)
        interrupts = SharedInterrupts(database, opencode, settings)
        tools = offer_tools(opencode) if offer_tools and settings.opencode_is_here else None
        turns = SharedTurns(settings, opencode, feed, sessions, interrupts, tools)
        return turns, Errands(database, feed, interrupts, sessions.rights)

    return Member(entry, behind, make)
