"""The composition root: settings become a running service.

Alone in knowing every layer. ``create_app`` is the service as an ASGI application whose
lifespan starts and stops everything; ``serve`` runs it on a socket until a signal.
"""

import asyncio
import gc
import hashlib
import os
import signal
import socket
import sys
import time
from collections.abc import AsyncGenerator, Callable, Coroutine, Generator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryFile

import structlog
from starlette.applications import Starlette
from starlette.routing import BaseRoute, Router
from starlette.types import ASGIApp, Receive, Scope, Send

from opencode_a2a import __version__, telemetry
from opencode_a2a.a2a.types import Version
from opencode_a2a.clock import now_ms
from opencode_a2a.config import VARIABLES, Settings, database_file, import_hint, misplaced
from opencode_a2a.errors import (
    ServiceError,
    SessionNotFoundError,
    UpstreamError,
    UpstreamUnreachableError,
)
from opencode_a2a.events import JsonObject
from opencode_a2a.extensions import EXTENSIONS
from opencode_a2a.extensions.call import Deps
from opencode_a2a.extensions.dispatch import Dispatcher
from opencode_a2a.opencode.client import Location, OpenCode
from opencode_a2a.opencode.feed import Feed
from opencode_a2a.opencode.managed import (
    ManagedOpenCode,
    passed_environment,
    too_old,
    untested,
)
from opencode_a2a.opencode.process import OpenCodeStartError
from opencode_a2a.opencode.types import Agent, McpServer
from opencode_a2a.peers.network import EgressError, Fetch, Fetcher, FetchResult
from opencode_a2a.peers.tool import SERVER, PeerTool
from opencode_a2a.printable import program
from opencode_a2a.server.card import Cards
from opencode_a2a.server.contracts import EXTENSION_NAMES, spoken_versions
from opencode_a2a.server.exchange import Terms
from opencode_a2a.server.jsonrpc import RpcBinding
from opencode_a2a.server.openapi import OpenApi
from opencode_a2a.server.operations import Operations
from opencode_a2a.server.rest import RestBinding
from opencode_a2a.services import announced
from opencode_a2a.store.database import Database, DatabaseError, EarlierDatabaseError
from opencode_a2a.tasks.log import LogWriter
from opencode_a2a.tasks.recovery import recover, sweep
from opencode_a2a.tasks.service import TaskService
from opencode_a2a.turns.errands import Errands
from opencode_a2a.turns.interrupts import Interrupts
from opencode_a2a.turns.sessions import Sessions
from opencode_a2a.turns.tools import Tools
from opencode_a2a.turns.turn import Turns
from opencode_a2a.turns.workspace import WorkspaceRoot
from opencode_a2a.web.auth import StateError, accepted_credentials, generate_token
from opencode_a2a.web.observe import Readiness, pages
from opencode_a2a.web.server import BindError, Server, bind, edge, server
from opencode_a2a.web.sse import EventStream, Streams

log = structlog.get_logger(__name__)

FEED_SILENCE_SECONDS = 35.0
"""Heartbeats come every 10 s, before 1.4 every 30 s."""
HEALTH_SECONDS = 2.0
_M_MMAP_THRESHOLD = -3
"""The name of the setting in glibc's malloc.h."""
FACTS_SECONDS = 30.0
ASKED = {"bash": "commands", "edit": "edits", "webfetch": "web requests"}
"""The permissions of OpenCode that are told at the start."""
WORKERS = ("build", "plan", "general", "explore")
"""The agents of OpenCode itself that use tools."""
TASKS_NAMED = 10
"""How many of the open tasks are named at the end, of each kind."""


@dataclass(frozen=True, slots=True)
class Upstream:
    """The OpenCode behind the service: how to reach it, and what to say of it."""

    url: str
    username: str
    password: str | None
    managed: ManagedOpenCode | None = None
    version: str | None = None


class Service:
    """The service as an ASGI application; its parts exist from lifespan start to end."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.streams = Streams()
        self.upstream: Upstream | None = None
        self.failed = False
        """A part without which the service cannot go on has failed."""
        self.tool = _peer_tool(settings)
        """What OpenCode's model asks other agents with."""
        self.trouble: str | None = None
        """Why OpenCode cannot be used, with the remedy; as it was at the start."""
        self._opencode: OpenCode | None = None
        self._board: TaskService | None = None
        self._errands: Errands | None = None
        self._app: ASGIApp | None = None
        self._lifespan = Starlette(lifespan=lambda _: self.running())

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan" or self._app is None:
            await self._lifespan(scope, receive, send)
        elif self.tool is not None and scope.get("path") == self.tool.server.path:
            await self.tool.server(scope, receive, send)  # it has a credential of its own
        else:
            await self._app(scope, receive, send)

    @property
    def token_file(self) -> Path:
        return self.settings.a2a.state_dir / "token"

    @asynccontextmanager
    async def running(self) -> AsyncGenerator[None]:
        """Have all parts of the service at work."""
        async with AsyncExitStack() as stack:
            await self._start(stack)
            yield

    def banner(self) -> list[str]:
        """Say in a few lines what runs here, where it is, and what to try."""
        settings, url = self.settings, self.settings.public_url
        parts = [
            f"opencode-a2a {__version__}",
            f"A2A {' and '.join(spoken_versions(settings))}",
            self._opencode_line(),
        ]
        if settings.a2a.demo:
            parts.append("demo model")
        lines = ["  ·  ".join(parts), f"card     {url}/.well-known/agent-card.json"]
        if not settings.auth.configured:
            lines.append(f"token    in {self.token_file} (mode 0600)")
        if self.trouble is None:
            lines.append(f'try      {program()} call {url} "list the files here"')
        else:
            lines.append(f"problem  {self.trouble}")
        return lines

    async def facts(self) -> list[str]:
        """Say which model works here, and what it does unasked; OpenCode may take a while."""
        if self._opencode is None or self.trouble is not None:
            return []
        return await _facts(self._opencode, self.settings)

    async def farewell(self, *, keep: bool) -> list[str]:
        """Say what is still open at an orderly end, and how to go on with it.

        A managed OpenCode in which a person is waited for is kept if it may be: its permission
        or question would end with it. What else works there is stopped, since nobody would
        watch it.
        """
        if self._board is None or not (open_tasks := self._board.open_tasks()):
            return []
        url = self.settings.public_url
        tasks = [task.log.state for task in open_tasks]
        waiting = [task for task in tasks if task.status.state.interrupted]
        working = [task for task in tasks if not task.status.state.interrupted]
        lines = [f"waiting  {task.ref.id}" for task in waiting[:TASKS_NAMED]]
        lines += [f"working  {task.ref.id}" for task in working[:TASKS_NAMED]]
        if len(tasks) > len(lines):
            lines.append(f"and {len(tasks) - len(lines)} more")
        lasting = self.settings.tasks.task_store_backend == "database"
        if lasting:
            then = f"{program()} task {url} TASK --follow"
            lines.append(f"After the next start, follow a task: {then}")
        if waiting and lasting:
            lines.append(f'Answer one that waits: {program()} call {url} "yes" --task TASK')
        managed = self.upstream.managed if self.upstream else None
        if managed is None:
            return lines
        asked = {task.status.session_id for task in waiting}
        if not (keep and managed.keepable and asked):
            return [*lines, "OpenCode is stopped; its turns end as failed."]
        managed.keep = True
        unwatched = {task.status.session_id for task in working} - asked
        if self._errands is not None:
            unwatched |= self._errands.working() - asked
        async with OpenCode(managed.url, password=managed.password) as opencode:
            for session_id in filter(None, unwatched):
                with suppress(TimeoutError, UpstreamError, SessionNotFoundError):
                    async with asyncio.timeout(HEALTH_SECONDS):
                        await opencode.abort_session(session_id)
        return [
            *lines,
            f"OpenCode (pid {managed.pid}) keeps running for what waits, and the next start takes "
            f"it over. To end it instead: kill {managed.pid}",
        ]

    def _opencode_line(self) -> str:
        upstream = self.upstream
        if upstream is None or upstream.managed is None:
            return f"OpenCode at {telemetry.mask_url(self.settings.opencode.base_url)}"
        return f"OpenCode {upstream.version} (managed, pid {upstream.managed.pid})"

    async def _start(self, stack: AsyncExitStack) -> None:
        settings = self.settings
        database = await stack.enter_async_context(Database(settings.database_url))
        tool: JsonObject | None = None
        if self.tool is not None:
            stack.push_async_callback(self.tool.aclose)
            tool = self.tool.server.config(settings.local_url)
        upstream = self.upstream = await stack.enter_async_context(_upstream(settings))
        opencode = self._opencode = await stack.enter_async_context(
            OpenCode(
                upstream.url,
                username=upstream.username,
                password=upstream.password,
                timeout=settings.opencode.timeout,
                max_concurrent_requests=settings.opencode.max_concurrent_requests,
            )
        )
        feed = Feed(opencode.events, silence=FEED_SILENCE_SECONDS)
        writer = LogWriter(database)
        turns = _turns(settings, database, opencode, feed)
        if self.tool is not None and tool is not None:
            turns.tools = Tools(
                opencode,
                SERVER,
                McpServer.model_validate(tool),
                self.tool.calling_turns,
            )
        board = self._board = TaskService(database, writer, turns, settings.limits)
        await stack.enter_async_context(self._beside(feed.run(), "feed"))
        await stack.enter_async_context(self._beside(writer.run(), "writer"))
        stack.push_async_callback(self._close, board)
        self.streams.on_drain.append(board.leave)
        taken_up = await recover(database, writer, board)
        if taken_up:
            log.warning("tasks taken up after a restart", count=taken_up)
        retention = settings.tasks.task_retention_days * 86_400.0
        await stack.enter_async_context(self._beside(sweep(database, retention), "sweep"))
        errands = self._errands = Errands(feed, turns.interrupts)
        stack.push_async_callback(errands.close)
        await errands.recover()
        fetch = _fetcher(settings)
        deps = _deps(settings, turns, board, errands, fetch)
        methods = Dispatcher(EXTENSIONS, deps, settings)
        if upstream.managed is None:
            self.trouble = await _trouble(opencode, settings)
            if self.trouble is None:
                await _check_directory(opencode, settings)

        async def check_opencode() -> None:
            async with asyncio.timeout(HEALTH_SECONDS):
                await opencode.health()

        readiness = Readiness({"database": database.check, "opencode": check_opencode})
        about = pages(readiness, self._health, figures=settings.a2a.metrics_enabled)
        router = Router([*self._protocol(board, methods, fetch), *about], redirect_slashes=False)
        credentials = accepted_credentials(settings.auth, self.token_file)
        self._app = edge(router, settings, credentials)

    async def _close(self, board: TaskService) -> None:
        """Store what was told; a database that is away is waited for, but not for ever."""
        try:
            async with asyncio.timeout(self.settings.a2a.shutdown_grace_seconds):
                await board.close()
        except TimeoutError:
            log.error("not all that was told could be stored before the end")

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
            part = task.get_name()
            log.critical("a part of the service failed", part=part, exc_info=task.exception())
            self.failed = True
            signal.raise_signal(signal.SIGTERM)

    def _protocol(self, board: TaskService, methods: Dispatcher, fetch: Fetch) -> list[BaseRoute]:
        settings = self.settings
        cards = Cards(settings, now_ms())

        operations = Operations(board, cards, fetch)
        terms = Terms(
            Version(settings.a2a.protocol_version),
            lambda stream: EventStream(stream, settings.stream, self.streams),
            EXTENSION_NAMES,
            spoken_versions(settings),
        )
        return [
            RpcBinding(operations, terms, [methods]).route(),
            *cards.routes(),
            *OpenApi(settings).routes(),
            *RestBinding(operations, cards, terms).routes(),
        ]

    def _health(self) -> JsonObject:
        settings = self.settings
        return {
            "status": "ok",
            "service": "opencode-a2a",
            "version": __version__,
            "opencode": {
                "managed": settings.opencode.managed_server,
                "version": self.upstream.version if self.upstream else None,
            },
            "demo": settings.a2a.demo,
            "protocol_versions": list(settings.a2a.supported_protocol_versions),
            "task_store": settings.tasks.task_store_backend,
            "streams": len(self.streams),
        }


def create_app(settings: Settings) -> Service:
    """Return the service; its lifespan has to be run for it to answer."""
    return Service(settings)


async def _facts(opencode: OpenCode, settings: Settings) -> list[str]:
    """Return what the operator should know of the model and of what it may do unasked."""
    own, at = settings.opencode, Location(str(settings.workspace) if settings.workspace else None)
    try:
        async with asyncio.timeout(FACTS_SECONDS):
            config = await opencode.config(at=at)
            connected = await opencode.connected_providers(at=at)
            agents = {agent.name: agent for agent in await opencode.agents(at=at)}
    except (TimeoutError, ServiceError) as error:
        log.warning("OpenCode could not be asked for its model", error=type(error).__name__)
        return []
    agent = agents.get(own.agent or config.default_agent or "build")
    model = config.model or ""
    if own.provider_id and own.model_id:
        model = f"{own.provider_id}/{own.model_id}"
    elif agent is not None and agent.model is not None:
        model = f"{agent.model.provider_id}/{agent.model.model_id}"
    candidates = [model] if model else [f"{p}/{m}" for p, m in connected.default.items()]
    shown = [f"{name} (hosted by OpenCode)" if _hosted(name) else name for name in candidates]
    lines = [f"model    {' or '.join(shown) if shown else 'none: no provider is set up'}"]
    unasked = _unasked(agent, settings) if agent else []
    asked = [word for name, word in ASKED.items() if agent and "ask" in agent.actions(name)]
    if asked := [word for word in asked if word not in unasked]:
        lines.append(f"asks     before {_listed(asked)}")
    if unasked:
        remedy = "; --ask makes it ask" if own.managed_server and not settings.asked_for else ""
        lines.append(f"unasked  {_listed(unasked)}{remedy}")
    # The model hands work to other agents, and a project may have given these more freedom.
    freer = {
        one.name: more
        for one in agents.values()
        if not one.hidden and (more := set(_unasked(one, settings)) - {*unasked})
    }
    if freer:
        words = [word for word in ASKED.values() if any(word in more for more in freer.values())]
        names = f"agent{'s' if len(freer) > 1 else ''} {_listed(sorted(freer))}"
        lines.append(
            f"unasked  {_listed(words)} by the {names}; OpenCode's configuration allows it"
        )
    return lines


def _unasked(agent: Agent, settings: Settings) -> list[str]:
    """Return what an agent does unasked; where it was told to ask, an exception counts too."""
    found = {name: agent.actions(name) for name in ASKED}
    return [
        word
        for name, word in ASKED.items()
        if found[name] == {"allow"} or (name in settings.asked_for and "allow" in found[name])
    ]


def _hosted(model: str) -> bool:
    """Whether a model is one that OpenCode's makers run: what is sent to it leaves this machine."""
    return model.partition("/")[0] in ("opencode", "opencode-go")


def _listed(words: list[str]) -> str:
    return f"{', '.join(words[:-1])} and {words[-1]}" if words[1:] else words[0]


async def _trouble(opencode: OpenCode, settings: Settings) -> str | None:
    """Return in one sentence why OpenCode cannot be used, and what to do; None if it can."""
    where = f"OpenCode at {telemetry.mask_url(settings.opencode.base_url)}"
    try:
        async with asyncio.timeout(HEALTH_SECONDS):
            version = (await opencode.health()).version
    except (TimeoutError, UpstreamUnreachableError):
        return (
            f"{where} does not answer: start it with `opencode serve`, set OPENCODE_BASE_URL, "
            "or let this program start one with --managed."
        )
    except UpstreamError as error:
        if error.data.get("upstream_status") in (401, 403):
            return (
                f"{where} refuses the password: set OPENCODE_AUTH_PASSWORD to the "
                "OPENCODE_SERVER_PASSWORD that it was started with."
            )
        return f"{where} does not work: {error.message}. Version 1.1 or later is needed."
    if reason := too_old(version):
        raise OpenCodeStartError(f"{where} cannot be used: {reason}")
    if doubt := untested(version):
        log.warning(doubt)
    return None


async def _check_directory(opencode: OpenCode, settings: Settings) -> None:
    """Raise StateError if files of ours are in the directory that a running OpenCode works in."""
    if settings.workspace is not None or not settings.opencode_is_here:
        return  # the settings were checked against the one, and the other is not our disk
    try:
        directory = Path((await opencode.paths()).directory)
    except UpstreamError:
        return
    if settings.opencode.allow_root_workspace and directory == Path(directory.anchor):
        return
    for problem in misplaced(settings, directory):
        raise StateError(str(problem))


def _fetcher(settings: Settings) -> Fetch:
    """Return what fetches the files that messages and prompts name by URL."""

    async def refuse(urls: Sequence[str]) -> list[FetchResult]:
        return [EgressError("files are not fetched here; send the bytes instead")] * len(urls)

    return Fetcher(settings.a2a) if settings.a2a.fetch_files else refuse


def _workspace(settings: Settings) -> WorkspaceRoot:
    return WorkspaceRoot(settings.workspace, allow_override=settings.a2a.allow_directory_override)


def _deps(
    settings: Settings, turns: Turns, board: TaskService, errands: Errands, fetch: Fetch
) -> Deps:
    return Deps(
        opencode=turns.opencode,
        sessions=turns.sessions,
        workspace=_workspace(settings),
        interrupts=turns.interrupts,
        tasks=board,
        errands=errands,
        defaults=settings.opencode,
        fetch=fetch,
    )


def _turns(settings: Settings, database: Database, opencode: OpenCode, feed: Feed) -> Turns:
    claim = settings.tasks.pending_session_claim_ttl_seconds
    return Turns(
        settings,
        opencode,
        feed,
        Sessions(database, opencode, _workspace(settings), claim),
        Interrupts(database, opencode, settings),
    )


def _peer_tool(settings: Settings) -> PeerTool | None:
    """Return the tool for asking other agents, if there are any and OpenCode can reach it."""
    if not settings.offers_peers or not settings.opencode_is_here:
        return None
    return PeerTool(settings)


def _opencode_environment(settings: Settings) -> dict[str, str]:
    """Return the variables of a managed OpenCode: none of our settings, none of our secrets."""
    credentials = (peer.credential for peer in settings.a2a.peers if peer.credential)
    only = settings.opencode.env_passthrough
    return passed_environment(os.environ, {*VARIABLES, *credentials}, only)


def managed_record(settings: Settings) -> Path | None:
    """Return where a managed OpenCode is written down: one file for each database.

    Its turns belong to the tasks of one database, which one service at a time has.
    """
    file = database_file(settings.database_url)
    if file is None:
        return None
    name = hashlib.sha256(os.fsencode(os.path.realpath(file))).hexdigest()[:16]
    return settings.a2a.state_dir / "managed" / f"{name}.json"


def _known_port(file: Path | None) -> int:
    """Return the port in a file if it is free; 0 for any."""
    try:
        port = int(file.read_text()) if file else 0
        for one in bind("127.0.0.1", port):
            one.close()
    except (OSError, ValueError, BindError):
        return 0
    return port


def _forget_port(port: Path, record: Path | None) -> None:
    """Remove the file with the demo model's port, unless an OpenCode was kept that calls it."""
    if record is None or not record.exists():
        port.unlink(missing_ok=True)


def _write_port(file: Path, port: int) -> None:
    try:
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        file.write_text(str(port))
    except OSError as error:
        raise StateError(
            f"cannot write {file}: {error.strerror}; remove what is there, or set A2A_STATE_DIR"
        ) from error


@asynccontextmanager
async def _upstream(settings: Settings) -> AsyncGenerator[Upstream]:
    """Start OpenCode, with a demo model behind it if asked for, or find the one that runs."""
    own = settings.opencode
    if not own.managed_server:
        password = own.auth_password.get_secret_value() if own.auth_password else None
        yield Upstream(own.base_url, own.auth_username, password)
        return
    record = managed_record(settings)
    async with AsyncExitStack() as stack:
        config: JsonObject = {}
        if settings.a2a.demo:
            from opencode_a2a_demo.server import DemoModel, opencode_config  # only for demos

            # An OpenCode that outlived a killed service looks for the model where it was.
            port = record.with_suffix(".port") if record else None
            model = await stack.enter_async_context(DemoModel(port=_known_port(port)))
            if port is not None:
                _write_port(port, model.port)
                stack.callback(_forget_port, port, record)
            config |= opencode_config(model.url)
        if settings.asked_for:
            asks: JsonObject = dict.fromkeys(settings.asked_for, "ask")
            # A project's file may set permissions for an agent alone, and these would win.
            workers = dict.fromkeys((*WORKERS, own.agent or "build"))
            agents: JsonObject = {name: {"permission": asks} for name in workers}
            config |= {"permission": asks, "agent": agents}
        managed = await stack.enter_async_context(
            ManagedOpenCode(
                own,
                _opencode_environment(settings),
                config=config,
                state=settings.a2a.state_dir / "opencode" if settings.a2a.demo else None,
                directory=settings.workspace,
                record=record,
            )
        )
        yield Upstream(managed.url, managed.username, managed.password, managed, managed.version)


# On a socket


def serve(settings: Settings) -> int:
    """Run the service until a signal; return the exit status."""
    telemetry.configure(settings.log.level)
    # What is loaded now stays: the collector need not look at it, nor look so often.
    gc.freeze()
    gc.set_threshold(50_000, 20, 100)
    _return_large_buffers()
    try:
        _check_state(settings)
        listeners = bind(settings.a2a.host, settings.a2a.port)
        with asyncio.Runner(loop_factory=_loop_factory()) as runner:
            return runner.run(_serve(settings, listeners))
    except StateError as error:
        print(f"opencode-a2a: {error}", file=sys.stderr)
        return 2
    except EarlierDatabaseError as error:
        print(f"opencode-a2a: {error}; {import_hint(settings, error.file)}", file=sys.stderr)
        return 2
    except (BindError, DatabaseError, OpenCodeStartError) as error:
        print(f"opencode-a2a: {error}", file=sys.stderr)
        return 1


def _check_state(settings: Settings) -> None:
    """Raise StateError if the state directory cannot serve, before anything is started."""
    directory = settings.a2a.state_dir
    if settings.auth.configured and not settings.opencode.managed_server:
        return
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        with TemporaryFile(dir=directory):
            pass
    except OSError as error:
        raise StateError(
            f"cannot write to the state directory {directory}: {error.strerror}; "
            "set A2A_STATE_DIR to one that can be written"
        ) from error
    if not settings.auth.configured:
        generate_token(directory / "token")


def _return_large_buffers() -> None:
    """Have the C library give the memory of large buffers back as soon as they are free.

    Left alone, glibc keeps all below the size of the largest that was ever freed, up to 32 MB: one
    message with files of 10 MB then takes 105 MB for good, instead of 70 MB for a moment.
    """
    import ctypes

    with suppress(OSError, AttributeError):  # another C library has no such setting
        ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, 512 * 1024)


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    try:
        import uvloop
    except ImportError:  # not on every platform
        return None
    return uvloop.new_event_loop


async def _serve(settings: Settings, listeners: list[socket.socket]) -> int:
    service = create_app(settings)
    began = time.monotonic()
    runner = server(
        service,
        settings.a2a.host,
        settings.a2a.port,
        service.streams,
        grace=settings.a2a.shutdown_grace_seconds,
        lifespan="off",
    )
    try:
        with _ended_by_signals(runner) as received:
            async with AsyncExitStack() as stack:
                await stack.enter_async_context(service.running())
                if not settings.auth.configured:
                    stack.enter_context(announced(settings.a2a.state_dir, settings.local_url))
                announce = asyncio.create_task(_announce(service, runner.listening, began))
                stack.callback(announce.cancel)
                await runner.serve(listeners)
                farewell = await service.farewell(keep=signal.SIGHUP not in received)
                with suppress(OSError):  # the terminal may be gone
                    for line in farewell:
                        print(line, file=sys.stderr, flush=True)
    except asyncio.CancelledError:
        if not runner.should_exit:
            raise
    return 1 if service.failed else 0


@contextmanager
def _ended_by_signals(runner: Server) -> Generator[set[signal.Signals]]:
    """Let a signal end the serving, or break off the start; what was begun is ended in order.

    Yields the signals that have come.
    """
    loop, main = asyncio.get_running_loop(), asyncio.current_task()
    received: set[signal.Signals] = set()
    terminals = [number for number in (1, 2) if os.isatty(number)]

    def end(number: signal.Signals) -> None:
        received.add(number)
        if number is signal.SIGHUP:
            # The terminal was closed. What is still printed would fail, and with it the exit.
            nowhere = os.open(os.devnull, os.O_WRONLY)
            for terminal in terminals:
                os.dup2(nowhere, terminal)
            os.close(nowhere)
        if runner.should_exit:
            runner.force_exit = True  # asked twice: open requests are not waited for
        elif main is not None and not runner.started:
            main.cancel()
        runner.should_exit = True

    signals = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    for number in signals:
        loop.add_signal_handler(number, end, number)
    try:
        yield received
    finally:
        for number in signals:
            loop.remove_signal_handler(number)


async def _announce(service: Service, listening: asyncio.Event, began: float) -> None:
    """Say where the service is, once it is there."""
    await listening.wait()
    for line in service.banner():
        print(line, file=sys.stderr, flush=True)
    log.info("started", seconds=round(time.monotonic() - began, 3))
    for line in await service.facts():
        print(line, file=sys.stderr, flush=True)
