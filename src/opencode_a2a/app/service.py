"""The parts of the service, and the order in which they start and stop.

``Service`` is an ASGI application. ``Service._start`` starts its parts one after the other, and
they are stopped in the reverse order; requests are answered in between. A part that runs all the
time is a coroutine, and the service ends if one of them fails (``Service._beside``).
"""

import asyncio
import signal
from collections.abc import AsyncGenerator, Coroutine
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import structlog
from starlette.applications import Starlette
from starlette.routing import BaseRoute, Router
from starlette.types import ASGIApp, Receive, Scope, Send

from opencode_a2a.a2a.types import Version
from opencode_a2a.app.report import ServiceReport
from opencode_a2a.clock import now_ms
from opencode_a2a.config import (
    Settings,
    UpstreamEntry,
)
from opencode_a2a.errors import (
    StoreUnavailableError,
)
from opencode_a2a.extensions import EXTENSIONS
from opencode_a2a.extensions.call import Deps
from opencode_a2a.extensions.dispatch import Dispatcher
from opencode_a2a.opencode.client import Location, OpenCode
from opencode_a2a.opencode.feed import Feed
from opencode_a2a.opencode.types import McpServer
from opencode_a2a.opencode.upstream import check_directory, trouble, upstream, withheld
from opencode_a2a.peers.network import Egress, Fetcher
from opencode_a2a.peers.tool import SERVER, PeerTool
from opencode_a2a.server.card import Cards, OpenCodeSkill
from opencode_a2a.server.contracts import (
    EXTENSION_NAMES,
    RESOURCE_PATH,
    metadata_url,
    spoken_versions,
)
from opencode_a2a.server.http import BindingOptions
from opencode_a2a.server.jsonrpc import RpcBinding
from opencode_a2a.server.openapi import openapi_routes
from opencode_a2a.server.operations import Operations
from opencode_a2a.server.push import WebhookSender
from opencode_a2a.server.rest import RestBinding
from opencode_a2a.server.sse import Streams
from opencode_a2a.signing import signing_keys
from opencode_a2a.store.database import Database
from opencode_a2a.store.engine import ConnectionOptions, DatabaseError, Replica
from opencode_a2a.tasks.log import LogWriter
from opencode_a2a.tasks.open import OpenTasks
from opencode_a2a.tasks.outbox import Outbox
from opencode_a2a.tasks.ownership import Ownership
from opencode_a2a.tasks.readers import DurableReader
from opencode_a2a.tasks.recovery import sweep
from opencode_a2a.tasks.service import TaskService
from opencode_a2a.turns.errands import Errands
from opencode_a2a.turns.fleet import Fleet, Member
from opencode_a2a.turns.interrupts import SharedInterrupts
from opencode_a2a.turns.sessions import Sessions, WorkspaceRoot
from opencode_a2a.turns.tools import Tools
from opencode_a2a.turns.turn import SharedTurns
from opencode_a2a.web.auth import accepted_credentials
from opencode_a2a.web.browser import SharedRecords, SignIns, StateRecords
from opencode_a2a.web.edge import RequestRates, edge
from opencode_a2a.web.observe import Readiness, pages
from opencode_a2a.web.server import (
    listening_here,
)
from opencode_a2a.web.tls import ServerTls

if TYPE_CHECKING:
    from opencode_a2a.web.oidc import Issuer

logger = structlog.get_logger(__name__)

FEED_SILENCE_SECONDS = 35.0
"""Longer than the pause between OpenCode's heartbeats: 10 s, before 1.4 30 s."""


class Service:
    """The service as an ASGI application; its parts exist from lifespan start to end."""

    def __init__(self, settings: Settings, tls: ServerTls | None = None) -> None:
        self.settings = settings
        self.streams = Streams()
        self.tls = tls
        self.keys = signing_keys(settings.signing)
        """The keys that sign cards and webhooks; None without a signing key."""
        self.fleet: Fleet | None = None
        self.failed = False
        """Whether a part has failed without which the service cannot go on."""
        self.tool: PeerTool | None = None
        """The tool by which OpenCode's model asks other agents, if it is offered."""
        if settings.offers_peers and settings.opencode_is_here:
            self.tool = PeerTool(settings)
        self.issuer = _issuer(settings)
        self._report: ServiceReport | None = None
        self._app: ASGIApp | None = None
        self._metadata_path = urlsplit(metadata_url(settings)).path
        """A second path of the metadata for tokens, if the service is below a path."""
        self._lifespan = Starlette(lifespan=lambda _: self.running())

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan" or self._app is None:
            await self._lifespan(scope, receive, send)
            return
        if scope["path"] == self._metadata_path:
            scope["path"] = RESOURCE_PATH
        # A proxy may have stripped the prefix or not.
        if (prefix := self.settings.a2a.path_prefix) and scope["path"].startswith(prefix):
            path: str = scope["path"].removeprefix(prefix)
            if not path or path.startswith("/"):
                scope["path"] = path or "/"
        if self.tool is not None and scope["path"] == self.tool.server.path:
            await self.tool.server(scope, receive, send)  # checks a credential of its own
        else:
            await self._app(scope, receive, send)

    @property
    def token_file(self) -> Path:
        return self.settings.a2a.state_dir / "token"

    @property
    def report(self) -> ServiceReport:
        """What the service says about itself, once it runs."""
        if self._report is None:
            raise RuntimeError("the service has not been started")
        return self._report

    @asynccontextmanager
    async def running(self) -> AsyncGenerator[None]:
        """Run all parts of the service for as long as the context lasts."""
        async with AsyncExitStack() as stack:
            await self._start(stack)
            yield

    async def _start(self, stack: AsyncExitStack) -> None:
        """Start all parts; whatever is entered into the stack is stopped in the reverse order."""
        settings = self.settings

        async def run(work: Coroutine[None, None, None], name: str) -> None:
            await stack.enter_async_context(self._beside(work, name))

        # The database, and what has to be known of certificates and of the identity provider.
        replica = Replica(settings.replica_name, settings.replica.lease_seconds)
        pooled, listen_url = settings.tasks.task_store_pooled, settings.tasks.task_store_listen_url
        options = ConnectionOptions(pooled, listen_url, settings.replica.poll_seconds)
        database = await stack.enter_async_context(
            Database(settings.database_url, replica, options)
        )
        await run(database.keep_lease(), "database")
        await run(database.listen(), "listener")
        if self.tls is not None:
            await run(self.tls.watch(), "certificate")
        if self.issuer is not None:
            await run(self.issuer.run(), "issuer")

        # Every OpenCode: found, or started and adopted, but not followed yet.
        workspace = WorkspaceRoot(
            settings.workspace, allow_override=settings.a2a.allow_directory_override
        )
        offered = await self._offer_tool(stack)
        members = [
            await self._member(stack, database, workspace, entry, own, offered)
            for entry, own in settings.fleet
        ]
        fleet = self.fleet = Fleet(members, database, settings.opencode.upstream_lost_seconds)

        # Tasks, their logs, and the webhooks that read these.
        key = self.keys.current if self.keys else None
        sender = WebhookSender(settings.push, settings.public_url, key)
        stack.push_async_callback(sender.aclose)
        writer, outbox = LogWriter(database), Outbox(database, settings.push, sender)
        readers: list[DurableReader] = [outbox]
        tasks = TaskService(database, writer, fleet, settings.limits, outbox, readers)
        await run(writer.run(), "writer")
        await run(tasks.remote_logs.run(), "remote logs")
        ownership = Ownership(database, writer, fleet, tasks.open, readers, self._beside)
        # To be read from below: first errands and webhooks are stopped, then the tasks are stored
        # and handed over to other replicas, and at last the OpenCodes are given up.
        stack.push_async_callback(ownership.close)
        stack.push_async_callback(self._close, tasks.open, database, ownership)
        self.streams.on_drain.append(tasks.open.stop_waiting)
        for reader in readers:
            stack.push_async_callback(reader.close)
        stack.push_async_callback(ownership.close_errands)

        # Take the OpenCodes: from here on their events are followed, and their tasks recovered.
        try:
            await ownership.start()
        except StoreUnavailableError:
            text = "went away during the start; check that it runs, and start again"
            raise DatabaseError(f"{database.name} {text}") from None

        # What looks after the database, the replicas and the OpenCodes from time to time.
        retention = settings.tasks.task_retention_days * 86_400.0
        await run(sweep(database, retention, readers), "sweep")
        await run(ownership.run(), "replica")
        await run(ownership.end_streams_without_lease(), "lease")
        await run(fleet.watch(tasks.open.lose), "watch")

        # Other replicas' calls, as soon as every part has declared the calls that it forwards.
        protocol = self._protocol(fleet, workspace, tasks, outbox, sender)
        await run(tasks.mailbox.run(), "mailbox")

        # The routes, inside their layers.
        trouble = await self._trouble(members)
        self._report = ServiceReport(settings, self.token_file, fleet, tasks, self.streams, trouble)
        checks = {"database": database.check, "opencode": self._report.check_opencode}
        if self.issuer is not None:
            await self.issuer.tried.wait()  # its keys were asked for at the beginning
            checks["issuer"] = self.issuer.check
        about = pages(Readiness(checks), self._report.health, figures=settings.a2a.metrics_enabled)
        self._app = await self._edge(stack, database, [*protocol, *about])

    async def _edge(
        self, stack: AsyncExitStack, database: Database, routes: list[BaseRoute]
    ) -> ASGIApp:
        """Return the routes inside the layers of the edge, whose state replicas share."""
        settings, several = self.settings, database.replica is not None
        credentials = accepted_credentials(settings, self.token_file)
        records = SharedRecords(database) if several else StateRecords(settings.a2a.state_dir)
        sign_ins, requests = SignIns(credentials, records), RequestRates(settings.limits)
        await sign_ins.start()
        if several:
            await stack.enter_async_context(self._beside(sign_ins.run(), "sign-ins"))
            if settings.limits.rate_limit_enabled:
                await stack.enter_async_context(self._beside(requests.run(database), "rates"))
        router = Router([*routes, *sign_ins.routes()], redirect_slashes=False)
        verify = self.issuer.verify if self.issuer else None
        return edge(router, settings, credentials, sign_ins, requests, verify)

    async def _offer_tool(self, stack: AsyncExitStack) -> McpServer | None:
        """Return how OpenCode reaches the tool for asking other agents, if it is offered."""
        if self.tool is None:
            return None
        stack.push_async_callback(self.tool.aclose)
        url = self.settings.local_url
        if self.settings.tls.cert_file:
            # OpenCode cannot be made to trust a certificate of a private authority.
            url = await stack.enter_async_context(listening_here(self.tool.server))
        return McpServer.model_validate(self.tool.server.config(url))

    async def _member(
        self,
        stack: AsyncExitStack,
        database: Database,
        workspace: WorkspaceRoot,
        entry: UpstreamEntry,
        settings: Settings,
        offered: McpServer | None,
    ) -> Member:
        """Start or find one OpenCode, and make the parts that work with it.

        ``settings`` are its own. It is offered the tool for other agents if it can reach that.
        """
        behind = await stack.enter_async_context(upstream(settings, withheld(self.settings)))
        opencode = await stack.enter_async_context(
            OpenCode(
                behind.url,
                username=behind.username,
                password=behind.password,
                timeout=settings.opencode.timeout,
                max_concurrent_requests=settings.opencode.max_concurrent_requests,
            )
        )
        if database.replica is not None:
            opencode.before_change = database.wait_for_lease

        def make() -> tuple[SharedTurns, Errands]:
            feed = Feed(opencode.events, silence=FEED_SILENCE_SECONDS)
            claim = settings.tasks.pending_session_claim_ttl_seconds
            sessions = Sessions(database, opencode, workspace, claim, entry.name)
            interrupts = SharedInterrupts(database, opencode, settings)
            tools: Tools | None = None
            if self.tool is not None and offered is not None and settings.opencode_is_here:
                tools = Tools(opencode, SERVER, offered, self.tool.calling_turns)
            turns = SharedTurns(settings, opencode, feed, sessions, interrupts, tools)
            return turns, Errands(database, feed, interrupts, sessions.rights)

        return Member(entry, behind, make)

    async def _trouble(self, members: list[Member]) -> str | None:
        """Return why no OpenCode can be used; if only some cannot, log that and return None."""
        problems: list[str] = []
        for member in members:
            turns = member.turns
            if member.upstream.managed is None:
                problem = await trouble(turns.opencode, turns.settings)
                if problem is None:
                    await check_directory(turns.opencode, turns.settings)
                    continue
                problems.append(problem)
                if len(members) > 1:
                    logger.warning("OpenCode cannot be used", upstream=member.name, cause=problem)
        return problems[0] if len(problems) == len(members) else None

    async def _close(self, tasks: OpenTasks, database: Database, ownership: Ownership) -> None:
        """Store what is not stored yet, and hand the tasks over to other replicas.

        A database that is away is waited for during the grace period.
        """
        grace = 0 if database.fenced else self.settings.a2a.shutdown_grace_seconds
        try:
            async with asyncio.timeout(grace):
                await tasks.close()
                await ownership.hand_over()
        except (TimeoutError, StoreUnavailableError):
            logger.error("some events could not be stored before the end")

    @asynccontextmanager
    async def _beside(self, work: Coroutine[None, None, None], name: str) -> AsyncGenerator[None]:
        """Run a part for as long as the context lasts; if it fails, end the service."""
        task = asyncio.create_task(work, name=name)
        task.add_done_callback(self._end_if_failed)
        try:
            yield
        finally:
            task.cancel()
            await asyncio.wait([task])

    def _end_if_failed(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and task.exception() is not None:
            part, error = task.get_name(), task.exception()
            if isinstance(error, DatabaseError):  # its text says it all
                logger.critical("a part of the service failed", part=part, cause=str(error))
            else:
                logger.critical("a part of the service failed", part=part, exc_info=error)
            self.failed = True
            signal.raise_signal(signal.SIGTERM)

    def _protocol(
        self,
        fleet: Fleet,
        workspace: WorkspaceRoot,
        tasks: TaskService,
        outbox: Outbox,
        sender: WebhookSender,
    ) -> list[BaseRoute]:
        """Return the routes of the cards, of A2A in both bindings, and of the extension methods."""
        settings = self.settings
        fetch = Fetcher(settings.a2a, Egress(lookups=sender.lookups))
        deps = Deps(
            fleet=fleet,
            workspace=workspace,
            tasks=tasks,
            outbox=outbox,
            defaults=settings.opencode,
            fetch=fetch,
        )
        methods = Dispatcher(EXTENSIONS, deps, settings)

        async def agents() -> list[OpenCodeSkill]:
            at = Location(str(settings.workspace) if settings.workspace else None)
            opencode = fleet.serving(at.directory).turns.opencode
            found, commands = await opencode.agents(at=at), await opencode.commands(at=at)
            return [
                *(OpenCodeSkill("agent", a.name, a.description) for a in found if a.selectable),
                *(OpenCodeSkill("command", one.name, one.description) for one in commands),
            ]

        cards = Cards(settings, now_ms(), agents, self.keys)

        operations = Operations(tasks, cards, fetch, outbox, sender)
        options = BindingOptions(
            Version(settings.a2a.protocol_version),
            settings.stream,
            self.streams,
            EXTENSION_NAMES,
            spoken_versions(settings),
        )
        return [
            RpcBinding(operations, methods, options).route(),
            *cards.routes(),
            *openapi_routes(settings),
            *RestBinding(operations, cards, options).routes(),
        ]


def _issuer(settings: Settings) -> "Issuer | None":
    """Return the identity provider whose tokens are accepted, if one is configured."""
    if settings.oidc.issuer is None:
        return None
    from opencode_a2a.web.oidc import Issuer  # it needs an optional library

    return Issuer(settings.oidc, settings.auth.rights, settings.limits.budget)


def create_app(settings: Settings, tls: ServerTls | None = None) -> Service:
    """Return the service; it answers while its lifespan runs."""
    return Service(settings, tls)
