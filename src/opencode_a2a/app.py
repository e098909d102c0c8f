"""The composition root: settings become a running service.

Alone in knowing every layer. ``create_app`` is the service as an ASGI application whose
lifespan starts and stops everything; ``serve`` runs it on a socket until a signal.
"""

import asyncio
import signal
import socket
import sys
import time
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import structlog
from starlette.applications import Starlette
from starlette.routing import BaseRoute, Router
from starlette.types import ASGIApp, Receive, Scope, Send

from opencode_a2a import __version__, telemetry
from opencode_a2a.a2a.types import Version
from opencode_a2a.announcement import announced
from opencode_a2a.config import (
    Settings,
    SettingsError,
    StateError,
    UpstreamEntry,
    database_file,
    import_hint,
    show,
)
from opencode_a2a.errors import (
    ServiceError,
    SessionNotFoundError,
    StoreUnavailableError,
    UpstreamError,
)
from opencode_a2a.events import JsonObject
from opencode_a2a.extensions import EXTENSIONS
from opencode_a2a.extensions.call import Deps
from opencode_a2a.extensions.dispatch import Dispatcher
from opencode_a2a.ids import Caller
from opencode_a2a.opencode.client import Location, OpenCode
from opencode_a2a.opencode.feed import Feed
from opencode_a2a.opencode.inspection import HEALTH_SECONDS, check_directory, facts, trouble
from opencode_a2a.opencode.process import OpenCodeStartError, UnsupportedOpenCodeError
from opencode_a2a.opencode.types import McpServer
from opencode_a2a.opencode.upstream import upstream, withheld
from opencode_a2a.peers.network import Egress, Fetcher
from opencode_a2a.peers.tool import SERVER, PeerTool
from opencode_a2a.printable import program
from opencode_a2a.server.card import Cards, OpenCodeSkill
from opencode_a2a.server.contracts import (
    EXTENSION_NAMES,
    RESOURCE_PATH,
    metadata_url,
    spoken_versions,
)
from opencode_a2a.server.http import Terms
from opencode_a2a.server.jsonrpc import RpcBinding
from opencode_a2a.server.openapi import OpenApi
from opencode_a2a.server.operations import Operations
from opencode_a2a.server.push import WebhookSender
from opencode_a2a.server.rest import RestBinding
from opencode_a2a.server.sse import Streams
from opencode_a2a.signing import signing_keys
from opencode_a2a.store.database import Database, DatabaseError, Link, Replica
from opencode_a2a.store.spending import Spent
from opencode_a2a.store.sqlite import EarlierDatabaseError
from opencode_a2a.tasks.budget import figures
from opencode_a2a.tasks.log import LogWriter
from opencode_a2a.tasks.open import OpenTasks
from opencode_a2a.tasks.outbox import Outbox
from opencode_a2a.tasks.readers import DurableReader
from opencode_a2a.tasks.recovery import sweep
from opencode_a2a.tasks.replica import Ownership
from opencode_a2a.tasks.service import TaskService
from opencode_a2a.tasks.state import TaskState
from opencode_a2a.telemetry import now_ms
from opencode_a2a.turns.errands import Errands
from opencode_a2a.turns.fleet import Fleet, Member
from opencode_a2a.turns.interrupts import Interrupts
from opencode_a2a.turns.sessions import Sessions, WorkspaceRoot
from opencode_a2a.turns.tools import Tools
from opencode_a2a.turns.turn import Turns
from opencode_a2a.web.auth import accepted_credentials, check_state
from opencode_a2a.web.browser import SharedRecords, SignIns, StateRecords
from opencode_a2a.web.edge import edge
from opencode_a2a.web.limits import RequestRates
from opencode_a2a.web.observe import Readiness, pages
from opencode_a2a.web.server import (
    BindError,
    bind,
    ended_by_signals,
    listening_here,
    prepare_process,
    server,
)
from opencode_a2a.web.tls import ServerTls

if TYPE_CHECKING:
    from opencode_a2a.web.oidc import Issuer

logger = structlog.get_logger(__name__)

FEED_SILENCE_SECONDS = 35.0
"""Heartbeats come every 10 s, before 1.4 every 30 s."""
MODEL_SECONDS = 60.0
"""How long the name of OpenCode's model is kept."""


class Service:
    """The service as an ASGI application; its parts exist from lifespan start to end."""

    def __init__(self, settings: Settings, tls: ServerTls | None = None) -> None:
        self.settings = settings
        self.streams = Streams()
        self.tls = tls
        self.keys = signing_keys(settings.signing)
        """What cards and webhooks are signed with."""
        self.fleet: Fleet | None = None
        self.failed = False
        """A part without which the service cannot go on has failed."""
        self.tool: PeerTool | None = None
        """What OpenCode's model asks other agents with."""
        if settings.offers_peers and settings.opencode_is_here:
            self.tool = PeerTool(settings)
        self.issuer = _issuer(settings)
        self.trouble: str | None = None
        """Why OpenCode cannot be used, with the remedy; as it was at the start."""
        self._tasks: TaskService | None = None
        self._ownership: Ownership | None = None
        self._app: ASGIApp | None = None
        self._metadata_path = urlsplit(metadata_url(settings)).path
        """Where the metadata for tokens are too, if the service is below a path."""
        self._named_model: str | None = None
        self._model_until = 0.0
        """When OpenCode is asked again which model it uses."""
        self._lifespan = Starlette(lifespan=lambda _: self.running())

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan" or self._app is None:
            await self._lifespan(scope, receive, send)
            return
        if scope["path"] == self._metadata_path:
            scope["path"] = RESOURCE_PATH
        # With the prefix or without: a proxy may have stripped it.
        if (prefix := self.settings.a2a.path_prefix) and scope["path"].startswith(prefix):
            path: str = scope["path"].removeprefix(prefix)
            if not path or path.startswith("/"):
                scope["path"] = path or "/"
        if self.tool is not None and scope["path"] == self.tool.server.path:
            await self.tool.server(scope, receive, send)  # it has a credential of its own
        else:
            await self._app(scope, receive, send)

    @property
    def token_file(self) -> Path:
        return self.settings.a2a.state_dir / "token"

    @asynccontextmanager
    async def running(self) -> AsyncGenerator[None]:
        """Run all parts of the service."""
        async with AsyncExitStack() as stack:
            await self._start(stack)
            yield

    def about(self) -> dict[str, object]:
        """Return what runs here and where it is, for the record of the start."""
        settings, url = self.settings, self.settings.public_url
        members = list(self.fleet.members.values()) if self.fleet else []
        behind = members[0].upstream if members else None
        managed = behind.managed if behind else None
        tasks = (
            [task.log.state.status.state for task in self._tasks.open.all()] if self._tasks else []
        )
        waiting = sum(state.interrupted for state in tasks)
        file = database_file(settings.database_url)
        return {
            "version": __version__,
            "url": url,
            "card": f"{url}/.well-known/agent-card.json",
            "protocol_versions": spoken_versions(settings),
            "opencode": behind.version if behind else None,
            "opencode_url": telemetry.mask_url(behind.url) if behind and not managed else None,
            "opencode_pid": managed.pid if managed else None,
            "upstreams": [member.name for member in members],
            "workspace": str(settings.workspace) if settings.workspace else None,
            "token_file": None if settings.knows_callers else str(self.token_file),
            "database": str(file) if file else show(settings.database_url),
            "waiting": waiting,
            "running": len(tasks) - waiting,
            "problem": self.trouble,
            "program": program(),
        }

    async def facts(self) -> dict[str, object] | None:
        """Return which model works here, and what it does unasked; OpenCode may take a while."""
        if self.fleet is None or self.trouble is not None:
            return None
        turns, settings = self.fleet.first.turns, self.settings
        found = await facts(turns.opencode, turns.settings)
        can_ask = {"demo": settings.a2a.demo, "can_ask": settings.opencode.managed_server}
        return found and {**asdict(found), **can_ask, "try": f"{program()} chat"}

    async def farewell(self, *, keep: bool) -> dict[str, object]:
        """Return the tasks still open at shutdown, and how to continue them.

        A managed OpenCode in which a person is waited for is kept if it may be: its permission
        or question would end with it. What else works there is stopped, since nobody would
        watch it.
        """
        if self._tasks is None or not (open_tasks := self._tasks.open.all()):
            return {}
        tasks = [task.log.state for task in open_tasks]
        waiting = [task for task in tasks if task.status.state.interrupted]
        working = [task for task in tasks if not task.status.state.interrupted]
        notes: list[str] = []
        lasting = self.settings.tasks.task_store_backend == "database"
        if lasting:
            notes.append(f"After the next start, follow a task: {program()} task --follow TASK")
        if waiting and lasting:
            notes.append(f'Answer one that waits: {program()} call "yes" --task TASK')
        for member in self.fleet.members.values() if self.fleet else ():
            own = [task for task in open_tasks if task.member is member]
            notes += await _farewell(member, [task.log.state for task in own], keep=keep)
        return {
            "waiting": [task.ref.id for task in waiting],
            "working": [task.ref.id for task in working],
            "notes": notes,
        }

    async def _start(self, stack: AsyncExitStack) -> None:
        settings = self.settings
        database = await stack.enter_async_context(
            Database(
                settings.database_url,
                Replica(settings.replica_name, settings.replica.lease_seconds),
                Link(
                    settings.tasks.task_store_pooled,
                    settings.tasks.task_store_listen_url,
                    settings.replica.poll_seconds,
                ),
            )
        )
        await stack.enter_async_context(self._beside(database.keep_lease(), "database"))
        await stack.enter_async_context(self._beside(database.listen(), "listener"))
        if self.tls is not None:
            await stack.enter_async_context(self._beside(self.tls.watch(), "certificate"))
        if self.issuer is not None:
            await stack.enter_async_context(self._beside(self.issuer.run(), "issuer"))
        if self.tool is not None:
            stack.push_async_callback(self.tool.aclose)
        writer = LogWriter(database)
        workspace = WorkspaceRoot(
            settings.workspace, allow_override=settings.a2a.allow_directory_override
        )
        offered: McpServer | None = None
        if self.tool is not None:
            url = settings.local_url
            if settings.tls.cert_file:
                # OpenCode cannot be made to trust a certificate of a private authority.
                url = await stack.enter_async_context(listening_here(self.tool.server))
            offered = McpServer.model_validate(self.tool.server.config(url))
        members = [
            await self._member(stack, database, workspace, entry, own, offered)
            for entry, own in settings.fleet
        ]
        fleet = self.fleet = Fleet(members, database, settings.opencode.upstream_lost_seconds)
        key = self.keys.current if self.keys else None
        sender = WebhookSender(settings.push, settings.public_url, key)
        stack.push_async_callback(sender.aclose)
        outbox = Outbox(database, settings.push, sender)
        readers: list[DurableReader] = [outbox]
        limits = settings.limits
        tasks = self._tasks = TaskService(database, writer, fleet, limits, outbox, readers)
        await stack.enter_async_context(self._beside(writer.run(), "writer"))
        await stack.enter_async_context(self._beside(tasks.tails.run(), "tails"))
        ownership = Ownership(database, writer, fleet, tasks.open, readers, self._beside)
        self._ownership = ownership
        stack.push_async_callback(ownership.close)
        stack.push_async_callback(self._close, tasks.open, database, ownership)
        self.streams.on_drain.append(tasks.open.stop_waiting)
        for reader in readers:
            stack.push_async_callback(reader.close)
        stack.push_async_callback(ownership.close_errands)
        try:
            await ownership.start()
        except StoreUnavailableError:
            text = "went away during the start; check that it runs, and start again"
            raise DatabaseError(f"{database.name} {text}") from None
        retention = settings.tasks.task_retention_days * 86_400.0
        await stack.enter_async_context(self._beside(sweep(database, retention), "sweep"))
        await stack.enter_async_context(self._beside(ownership.run(), "replica"))
        await stack.enter_async_context(self._beside(ownership.guard(), "guard"))
        await stack.enter_async_context(self._beside(fleet.watch(tasks.open.lose), "watch"))
        await stack.enter_async_context(self._beside(tasks.mailbox.run(), "mailbox"))
        self.trouble = await self._trouble(members)

        async def check_opencode() -> None:
            """One that answers is enough: new tasks start there."""
            failed: list[ServiceError | TimeoutError] = []
            for member in members:
                try:
                    async with asyncio.timeout(HEALTH_SECONDS):
                        await member.turns.opencode.health()
                    return
                except (ServiceError, TimeoutError) as error:
                    failed.append(error)
            if not ownership.any_up:  # else another replica can start them
                raise failed[0]

        checks = {"database": database.check, "opencode": check_opencode}
        if self.issuer is not None:
            # Asked for at the beginning, beside everything else; whether it answers or not.
            await self.issuer.tried.wait()
            checks["issuer"] = self.issuer.check
        readiness = Readiness(checks)
        about = pages(readiness, self._health, figures=settings.a2a.metrics_enabled)
        protocol = self._protocol(fleet, workspace, tasks, outbox, sender)
        self._app = await self._edge(stack, database, [*protocol, *about])

    async def _edge(
        self, stack: AsyncExitStack, database: Database, routes: list[BaseRoute]
    ) -> ASGIApp:
        """Return the routes behind their guards, which replicas of the service share."""
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
        return edge(router, settings, credentials, sign_ins, verify, requests)

    async def _member(
        self,
        stack: AsyncExitStack,
        database: Database,
        workspace: WorkspaceRoot,
        entry: UpstreamEntry,
        settings: Settings,
        offered: McpServer | None,
    ) -> Member:
        """Start or find one OpenCode, and make what runs in it; the settings are its own.

        It is offered a tool if it can reach it.
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

        def make() -> tuple[Turns, Errands]:
            feed = Feed(opencode.events, silence=FEED_SILENCE_SECONDS)
            claim = settings.tasks.pending_session_claim_ttl_seconds
            sessions = Sessions(database, opencode, workspace, claim, entry.name)
            interrupts = Interrupts(database, opencode, settings)
            turns = Turns(settings, opencode, feed, sessions, interrupts)
            if self.tool is not None and offered is not None and settings.opencode_is_here:
                turns.tools = Tools(opencode, SERVER, offered, self.tool.calling_turns)
            return turns, Errands(database, feed, interrupts, sessions.rights)

        return Member(entry, behind, make)

    async def _trouble(self, members: list[Member]) -> str | None:
        """Return why no OpenCode can be used; if others can, it is only logged."""
        found: list[str] = []
        for member in members:
            turns = member.turns
            if member.upstream.managed is None:
                problem = await trouble(turns.opencode, turns.settings)
                if problem is None:
                    await check_directory(turns.opencode, turns.settings)
                    continue
                found.append(problem)
                if len(members) > 1:
                    logger.warning("OpenCode cannot be used", upstream=member.name, cause=problem)
        return found[0] if len(found) == len(members) else None

    async def _close(self, tasks: OpenTasks, database: Database, ownership: Ownership) -> None:
        """Store what is not stored yet, and let other replicas go on.

        A database that is away is waited for, but not for ever.
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
        """Run something for as long as the context lasts; without it the service cannot go on."""
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
            if isinstance(error, DatabaseError):  # which says all that there is to say
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
        """Return the routes of the cards, of A2A in both bindings, and of the methods beyond it."""
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
        terms = Terms(
            Version(settings.a2a.protocol_version),
            settings.stream,
            self.streams,
            EXTENSION_NAMES,
            spoken_versions(settings),
        )
        return [
            RpcBinding(operations, terms, [methods]).route(),
            *cards.routes(),
            *OpenApi(settings).routes(),
            *RestBinding(operations, cards, terms).routes(),
        ]

    async def _health(self, caller: Caller) -> JsonObject:
        settings = self.settings
        whose = None if caller.supervises else caller.principal
        spent, budget = Spent(), figures(Spent(), 0, caller.budget)
        if self._tasks is not None:
            spent = await self._tasks.spent(whose)
            budget = await self._tasks.budget_of(caller.principal, caller.budget)
        members = list(self.fleet.members.values()) if self.fleet else []
        return {
            "status": "ok",
            "service": "opencode-a2a",
            "version": __version__,
            "opencode": {
                "managed": settings.opencode.managed_server,
                "version": members[0].upstream.version if members else None,
            },
            **self._replicas(),
            "workspace": str(settings.workspace) if settings.workspace else None,
            "model": await self._model(),
            "cost_today": round(spent.cost, 6),
            "budget": asdict(budget),
            "demo": settings.a2a.demo,
            "protocol_versions": list(settings.a2a.supported_protocol_versions),
            "task_store": settings.tasks.task_store_backend,
            "streams": len(self.streams),
        }

    def _replicas(self) -> JsonObject:
        """Return every OpenCode, and the replicas that run them where there can be several."""
        members = self.fleet.members if self.fleet else {}
        upstreams: dict[str, JsonObject] = {
            member.name: {
                "name": member.name,
                "state": member.state,
                "running": member.turns.running,
                "tasks": self.fleet.tasks[member.name] if self.fleet else 0,
                "drain": member.drain,
            }
            for member in members.values()
        }
        if self._ownership is None or not (live := self._ownership.live):
            return {"upstreams": [*upstreams.values()]}
        me, names = self.settings.replica_name, {one.no: one.name for one in live}
        for row in self._ownership.upstreams:
            if row.name in members and members[row.name].owned:
                upstreams[row.name]["owner"] = me
                continue
            owner = names.get(row.owner or 0)
            upstreams[row.name] = {
                "name": row.name,
                "state": row.state if owner or row.state == "lost" else "away",
                "running": None,  # its owner knows
                "tasks": row.tasks,
                "drain": row.drain,
                "owner": owner,
            }
        return {
            "replica": me,
            "replicas": [{"name": one.name, "version": one.version} for one in live],
            "upstreams": [upstreams[name] for name in sorted(upstreams)],
        }

    async def _model(self) -> str | None:
        """Return the model that answers unless a message names another; None if not known."""
        if self.settings.opencode.model is not None:
            return str(self.settings.opencode.model)
        now = time.monotonic()
        if self.fleet is not None and now >= self._model_until:
            at = Location(str(self.settings.workspace) if self.settings.workspace else None)
            opencode = self.fleet.serving(at.directory).turns.opencode
            with suppress(TimeoutError, ServiceError):
                async with asyncio.timeout(HEALTH_SECONDS):
                    self._named_model = (await opencode.config(at=at)).model
                    if self._named_model is None:
                        connected = await opencode.connected_providers(at=at)
                        names = (f"{p}/{m}" for p, m in connected.default.items())
                        self._named_model = next(names, None)
            self._model_until = now + MODEL_SECONDS
        return self._named_model


async def _farewell(member: Member, tasks: list[TaskState], *, keep: bool) -> list[str]:
    """Keep a managed OpenCode in which a person is waited for; say what becomes of it."""
    managed = member.upstream.managed
    if managed is None:
        return []
    asked = {task.status.session_id for task in tasks if task.status.state.interrupted}
    if not (keep and managed.keepable and asked):
        return ["OpenCode is stopped; its turns end as failed."] if tasks else []
    managed.keep = True
    unwatched = {task.status.session_id for task in tasks} | member.errands.working()
    async with OpenCode(managed.url, password=managed.password) as opencode:
        for session_id in filter(None, unwatched - asked):
            with suppress(TimeoutError, UpstreamError, SessionNotFoundError):
                async with asyncio.timeout(HEALTH_SECONDS):
                    await opencode.abort_session(session_id)
    return [
        f"OpenCode (pid {managed.pid}) keeps running for the tasks that wait, and the next start "
        f"takes it over. To end it instead: kill {managed.pid}"
    ]


def _issuer(settings: Settings) -> "Issuer | None":
    """Return the identity provider whose tokens are accepted."""
    if settings.oidc.issuer is None:
        return None
    from opencode_a2a.web.oidc import Issuer  # what it needs is optional

    return Issuer(settings.oidc, settings.auth.rights, settings.limits.budget)


def create_app(settings: Settings, tls: ServerTls | None = None) -> Service:
    """Return the service; its lifespan has to be run for it to answer."""
    return Service(settings, tls)


# On a socket


def serve(settings: Settings, ready: Callable[[], None] | None = None) -> int:
    """Run the service until a signal; return the exit status.

    ``ready`` is called once the service answers, in a thread of its own.
    """
    try:
        audit = telemetry.configure(settings.log.level, audit=settings.a2a.audit_file)
    except SettingsError as error:
        print(f"opencode-a2a: {error}", file=sys.stderr)
        return 2
    for warning in settings.warnings:
        telemetry.OPERATOR.warning(warning)
    loop_factory = prepare_process()
    try:
        check_state(settings)
        tls = ServerTls(settings.tls) if settings.tls.cert_file else None
        listeners = bind(settings.a2a.host, settings.a2a.port)
        with asyncio.Runner(loop_factory=loop_factory) as runner:
            return runner.run(_serve(settings, listeners, ready, tls))
    except (SettingsError, StateError, UnsupportedOpenCodeError) as error:
        print(f"opencode-a2a: {error}", file=sys.stderr)
        return 2
    except EarlierDatabaseError as error:
        print(f"opencode-a2a: {error}; {import_hint(settings, error.file)}", file=sys.stderr)
        return error.status
    except DatabaseError as error:
        print(f"opencode-a2a: {error}", file=sys.stderr)
        return error.status
    except (BindError, OpenCodeStartError) as error:
        print(f"opencode-a2a: {error}", file=sys.stderr)
        return 1
    finally:
        if audit is not None:
            audit.close()


async def _serve(
    settings: Settings,
    listeners: list[socket.socket],
    ready: Callable[[], None] | None,
    tls: ServerTls | None,
) -> int:
    service = create_app(settings, tls)
    began = time.monotonic()
    runner = server(
        service,
        settings.a2a.host,
        settings.a2a.port,
        service.streams,
        tls=tls,
        grace=settings.a2a.shutdown_grace_seconds,
        lifespan="off",
    )

    def reread() -> None:
        if tls is not None:
            tls.look()
        # The audit file is looked at before every record; who rotates it may say so nevertheless.

    try:
        with ended_by_signals(
            runner, reread if tls or settings.a2a.audit_file else None
        ) as received:
            async with AsyncExitStack() as stack:
                await stack.enter_async_context(service.running())
                generated = not settings.knows_callers
                with suppress(OSError):  # without a place to write, the commands need the URL
                    # With TLS the name counts that the certificate is for.
                    url = settings.public_url if tls else settings.local_url
                    stack.enter_context(
                        announced(settings.a2a.state_dir, url, accepts_token=generated)
                    )
                announce = asyncio.create_task(_announce(service, runner.listening, began, ready))
                stack.callback(announce.cancel)
                await runner.serve(listeners)
                farewell = await service.farewell(keep=signal.SIGHUP not in received)
                with suppress(OSError):  # the terminal may be gone
                    telemetry.OPERATOR.info("stopping", **farewell)
        with suppress(OSError):
            telemetry.OPERATOR.info("stopped")
    except asyncio.CancelledError:
        if not runner.should_exit:
            raise
    return 1 if service.failed else 0


async def _announce(
    service: Service,
    listening: asyncio.Event,
    began: float,
    ready: Callable[[], None] | None,
) -> None:
    """Say where the service is, once it is there."""
    await listening.wait()
    seconds = round(time.monotonic() - began, 3)
    telemetry.OPERATOR.info("started", seconds=seconds, **service.about())
    if facts := await service.facts():
        telemetry.OPERATOR.info("opencode answers", **facts)
    if ready is not None:
        await asyncio.to_thread(ready)
