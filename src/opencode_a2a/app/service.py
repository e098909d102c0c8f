"""The service: its parts, with the routes in front of them.

To follow it from the settings on: ``process.serve`` makes a ``Service`` and runs it.
``Service._start`` and ``Service._stop`` begin and end everything in order: ``parts`` does the work,
``routes`` answers requests, and ``report`` is what the service says about itself.
"""

import asyncio
import signal
from collections.abc import AsyncGenerator, Coroutine, Generator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import structlog
from starlette.routing import Router

from opencode_a2a import metrics, telemetry
from opencode_a2a.app.parts import OfferTools, Parts, make_parts, running_beside, start_parts
from opencode_a2a.app.report import ServiceReport
from opencode_a2a.app.routes import (
    make_cards,
    make_operations,
    method_dispatcher,
    protocol_routes,
)
from opencode_a2a.cluster.fleet import Fleet
from opencode_a2a.config import Settings
from opencode_a2a.errors import StoreUnavailableError
from opencode_a2a.opencode.types import McpServer
from opencode_a2a.server.contracts import metadata_url
from opencode_a2a.server.sse import Streams
from opencode_a2a.signing import signing_keys
from opencode_a2a.store.engine import DatabaseError
from opencode_a2a.turns.tools import Tools
from opencode_a2a.web.auth import Authenticator, accepted_credentials
from opencode_a2a.web.browser import SharedRecords, SignIns, StateRecords
from opencode_a2a.web.edge import Entrance, RequestRates, edge
from opencode_a2a.web.observe import Busyness, Readiness, pages
from opencode_a2a.web.socket import collect_garbage, listening_here, server
from opencode_a2a.web.tls import ServerTls

if TYPE_CHECKING:
    from opencode_a2a.peers.tool import PeerTool
    from opencode_a2a.web.oidc import Issuer

logger = structlog.get_logger(__name__)


@contextmanager
def _whatever_happens(what: str) -> Generator[None]:
    """Go on with the next step of the stop, whatever goes wrong in this one."""
    try:
        yield
    except Exception:
        logger.exception("a step of the stop failed", step=what)


class Service:
    """The service; its parts exist while it is ``running``, and ``server`` serves it."""

    def __init__(self, settings: Settings, tls: ServerTls | None = None) -> None:
        self.settings = settings
        self.streams = Streams()
        self.tls = tls
        self.keys = signing_keys(settings.signing)
        """The keys that sign cards and webhooks; None without a signing key."""
        self.fleet: Fleet | None = None
        self.parts: Parts | None = None
        self.failed = False
        """Whether a part that the service cannot do without has failed."""
        self.tool: PeerTool | None = None
        """The tool by which OpenCode's model asks other agents, if it is offered."""
        if settings.offers_peers and settings.opencode_is_here:
            from opencode_a2a.peers import tool as peer_tool  # not for most services

            self.tool = peer_tool.PeerTool(settings)
        self.issuer: Issuer | None = None
        """The identity provider whose tokens are accepted, if one is configured."""
        if settings.oidc.issuer is not None:
            from opencode_a2a.web import oidc  # it needs an optional library

            self.issuer = oidc.Issuer(settings.oidc, settings.auth.rights, settings.limits.budget)
        self._report: ServiceReport | None = None
        # The tool checks a credential of its own.
        apart = {self.tool.server.path: self.tool.server} if self.tool else {}
        self._entrance = Entrance(settings, apart)
        self.server = server(
            self._entrance,
            settings.a2a.host,
            settings.a2a.port,
            tls=tls,
            grace=settings.a2a.shutdown_grace_seconds,
        )
        self.keeps_waiting = False
        """Whether an OpenCode in which a task waits for a person outlives the service.

        ``process`` sets it when a service that was started is to stop, except after SIGHUP: nobody
        would read which processes are left.
        """

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
        """Start everything, and stop it when the context is left."""
        async with AsyncExitStack() as stack:
            try:
                await self._start(stack)
                yield
            finally:
                await self._stop()

    async def _start(self, stack: AsyncExitStack) -> None:
        """Start everything; what the stack closes is closed after ``_stop``."""
        settings, issuer, tool = self.settings, self.issuer, self.tool
        run = running_beside(stack, self.beside)

        # What needs no other part: certificates, identity provider, tool for other agents.
        await run(collect_garbage(), "collect garbage")
        if self.tls is not None:
            await run(self.tls.reload_if_changed(), "reload the certificate")
        if issuer is not None:
            await run(issuer.run(), "fetch the keys of the issuer")
        offer_tools: OfferTools | None = None
        if tool is not None:
            stack.push_async_callback(tool.aclose)
            url = settings.local_url
            if settings.tls.cert_file:
                # OpenCode cannot be made to trust a certificate of a private authority.
                url = await stack.enter_async_context(listening_here(tool.server))
            offered = McpServer.model_validate(tool.server.config(url))
            offer_tools = partial(
                Tools, name=tool.name, server=offered, calling_turns=tool.calling_turns
            )

        # The parts that do the work. The mailbox takes calls of other replicas as soon as
        # everything that forwards calls has declared them, as the routes do.
        key = self.keys.current if self.keys else None
        parts = await make_parts(stack, settings, self.beside, key, offer_tools)
        self.parts, self.fleet, database = parts, parts.fleet, parts.database
        await start_parts(stack, settings, self.beside, parts)
        methods = method_dispatcher(settings, parts)
        cards = make_cards(settings, parts, self.keys)
        operations = make_operations(parts, cards, methods)
        protocol = protocol_routes(settings, parts, self.streams, cards, operations, methods)
        await run(parts.tasks.mailbox.run(), "carry out calls of replicas")

        # What the service says about itself.
        self._report = ServiceReport(settings, self.token_file, parts, self.streams)
        await self._report.examine_opencodes()
        checks = {"database": database.check, "opencode": self._report.check_opencode}
        if issuer is not None:
            await issuer.tried.wait()  # its keys were asked for at the beginning
            checks["issuer"] = issuer.check
        figures = settings.a2a.metrics_enabled
        metrics.WAITING_OLDEST.set_function(self._report.longest_wait)
        busyness = Busyness(lambda: sum(parts.fleet.tasks.values()))
        about = pages(Readiness(checks), busyness, self._report.health, figures=figures)

        # All routes, inside the layers of the edge, whose state replicas share.
        several = database.replica is not None
        credentials = accepted_credentials(settings, self.token_file)
        records = SharedRecords(database) if several else StateRecords(settings.a2a.state_dir)
        sign_ins, requests = SignIns(credentials, records), RequestRates(settings.limits)
        try:
            await sign_ins.start()
        except StoreUnavailableError:
            raise database.went_away from None
        if several:
            await run(sign_ins.run(), "share sign-ins")
        if several and settings.limits.rate_limit_enabled:
            await run(requests.run(database), "share request rates")
        routes = [*protocol, *about, *sign_ins.routes()]
        authenticator = Authenticator(
            credentials,
            find_issued=sign_ins.find,
            verify=issuer.verify if issuer else None,
            metadata_url=metadata_url(settings),
        )
        notices = parts.notices
        if notices is not None:
            routes += notices.routes(parts.tasks, methods, parts.new_message_id, credentials)
        self._entrance.app = edge(
            Router(routes, redirect_slashes=False),
            settings,
            authenticator,
            requests,
            notices.files if notices else {},
            notices.anonymous if notices else (),
        )

    async def _stop(self) -> None:
        """Stop, from the first reader that is told to the last entry that is stored.

        Each step needs the ones before: nothing new begins, then nothing changes, then all of it is
        stored, and only then may others have it. A step that fails keeps no other from being taken.

        Then ``running`` ends the loops. Calls of other replicas and notifications that are under
        way get a second. What is open is closed: the OpenCodes, which end or are kept, and last the
        database, which marks this replica as gone.
        """
        parts, server = self.parts, self.server
        if parts is None:  # the start failed before anything ran
            return
        grace = max(1.0, self.settings.a2a.shutdown_grace_seconds)

        # Streams end, and nobody waits for a task any longer, except for the end of a canceled one:
        # clients come back to another replica, or after the restart.
        self.streams.drain()
        parts.tasks.open.stop_waiting()

        # No connection is accepted. Requests under way are answered while the next steps are taken.
        answering = asyncio.create_task(server.shutdown() if server.started else asyncio.sleep(0))

        # Calls that need an OpenCode end: nothing begins from here on. At a second signal, at once.
        with _whatever_happens("letting go of OpenCode"):
            letting_go = asyncio.create_task(parts.ownership.let_go(grace))
            hurried = asyncio.create_task(server.hurried.wait())
            await asyncio.wait([letting_go, hurried], return_when=asyncio.FIRST_COMPLETED)
            hurried.cancel()
            if not letting_go.cancel():
                letting_go.result()
            else:
                await parts.ownership.let_go(0)

        # What is open now stays open, and is printed.
        with _whatever_happens("telling what is open"):
            if self.keeps_waiting:
                parts.keep_opencodes()
            if self._report is not None and server.started:  # else the start has failed
                with suppress(OSError):  # the terminal may be gone
                    telemetry.OPERATOR.info("stopping", **self._report.stopping())

        # Turns are left to OpenCode, and what they have said is stored; then another replica may
        # have them. A slow database gets as long as the requests. It takes nothing from a replica
        # that was declared gone.
        with _whatever_happens("storing what is open"):
            await parts.ownership.stop_following()
        with _whatever_happens("storing what is open"):
            try:
                async with asyncio.timeout(0 if parts.database.fenced else grace):
                    await parts.tasks.open.close()
                    await parts.ownership.hand_over()  # the next owner begins at once
            except (TimeoutError, StoreUnavailableError):
                logger.error("some events could not be stored before the end")

        # What nobody follows in an OpenCode that is kept is stopped. Only now: the end of one turn
        # would have begun the next of its session.
        with _whatever_happens("answering the last requests"):
            await answering
        with _whatever_happens("stopping what nobody follows"):
            await parts.stop_unwatched()
        await parts.ownership.close()

    @asynccontextmanager
    async def beside(self, work: Coroutine[None, None, None], name: str) -> AsyncGenerator[None]:
        """Run a part for as long as the context lasts; if it fails, end the service."""

        def end_if_failed(task: asyncio.Task[None]) -> None:
            if not task.cancelled() and (error := task.exception()) is not None:
                self.end(name, error)

        task = asyncio.create_task(work, name=name)
        task.add_done_callback(end_if_failed)
        try:
            yield
        finally:
            task.cancel()
            await asyncio.wait([task])

    def end(self, part: str, error: BaseException) -> None:
        """End the process: a part that the service cannot do without has failed."""
        if isinstance(error, DatabaseError):  # its text says it all
            logger.critical("a part of the service failed", part=part, cause=str(error))
        else:
            logger.critical("a part of the service failed", part=part, exc_info=error)
        self.failed = True
        if not self.server.should_exit:  # a second signal would hurry the stop
            signal.raise_signal(signal.SIGTERM)
