"""Starts, watches, restarts and stops a local ``opencode serve`` that belongs to this program.

``opencode.upstream`` and the tests enter a ``ManagedOpenCode`` and point an ``OpenCodeConnection``
at its URL, which stays the same when OpenCode dies and is started again. At an orderly end nothing
of it stays behind, not even the processes of its tools, unless it is to be kept. A record on disk
lets the next start take over an OpenCode that was kept, or whose owner was killed. Nothing here
knows what OpenCode is used for.
"""

import asyncio
import contextlib
import hashlib
import os
import secrets
import shutil
import socket
from collections.abc import Collection, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from subprocess import DEVNULL
from tempfile import TemporaryFile
from typing import Final, Self
from urllib.parse import urlsplit

import orjson
import structlog

from opencode_a2a.bounds import wait
from opencode_a2a.config import OpenCodeSettings
from opencode_a2a.errors import ServiceError, UpstreamError
from opencode_a2a.events import JsonObject
from opencode_a2a.opencode.calls import Calls
from opencode_a2a.opencode.connect import OpenCodeConnection
from opencode_a2a.opencode.data import conflict, database_of, owner_of, packaged
from opencode_a2a.opencode.driver import Location
from opencode_a2a.opencode.kinds import Found, Kind, of_version, probe, problem_of, untested
from opencode_a2a.opencode.process import (
    INSTALL,
    LAST_OUTPUT_SECONDS,
    MARKER,
    STOP_SECONDS,
    OpenCodeMissingError,
    OpenCodeProcess,
    OpenCodeStartError,
    Record,
    RecordLock,
    UnsupportedOpenCodeError,
    birth,
    ends_with_us,
    kill_abandoned,
    kill_leftovers,
    recorded_in,
)
from opencode_a2a.opencode.withholding import withholding

logger = structlog.get_logger(__name__)

USERNAME: Final = "opencode"
FIRST_DELAY: Final = 0.5
LONGEST_DELAY: Final = 30.0
STEADY_SECONDS: Final = 60.0
"""Seconds that OpenCode must have run to be started again after the shortest delay."""
PORT_ATTEMPTS: Final = 3
HEALTHY_SECONDS: Final = 10.0
VERSION_SECONDS: Final = 15.0


# Command, port, environment and configuration

_BASIC: Final = (
    "PATH", "HOME", "USER", "LOGNAME", "SHELL", "TERM", "TZ", "TMPDIR", "LANG",
    "LANGUAGE", "LC_*", "XDG_*",
)  # fmt: skip
"""Variables that are always passed: hardly any program works without them."""
_OWN: Final = (
    "A2A_*", "OPENCODE_A2A_*", "OPENCODE_SERVER_USERNAME", "OPENCODE_SERVER_PASSWORD*",
    "NOTIFY_SOCKET", "WATCHDOG_*", "LISTEN_*", "CREDENTIALS_DIRECTORY",
)  # fmt: skip
"""Our variables, and those with which systemd speaks to this process alone."""
_PASSING: Final = (
    "_", "PWD", "OLDPWD", "SHLVL", "TERM*", "COLORTERM", "COLUMNS", "LINES", "WINDOWID",
    "SSH_*", "XDG_SESSION_*", "XDG_RUNTIME_DIR", "DBUS_*", "DISPLAY", "WAYLAND_*", "GPG_TTY",
    "TMUX*", "STY", "ZELLIJ*", "KITTY_*", "ALACRITTY_*", "WEZTERM_*", "KONSOLE_*", "ITERM_*",
    "LC_TERMINAL*", "VTE_VERSION", "VSCODE_*", "PS?", "PROMPT*", "HIST*", "LS_COLORS", "LESSOPEN",
    "LESSCLOSE", "MAIL", "MOTD_SHOWN", "XAUTHORITY", "SESSION_MANAGER", "DESKTOP_*", "GNOME_*",
    "INVOCATION_ID", "JOURNAL_STREAM", "SYSTEMD_*", "MEMORY_PRESSURE_*",
)  # fmt: skip
"""Variables of one shell, terminal or desktop, or of one run of a systemd unit, which do not count
as configuration."""


def find_command(command: str, path: str | None = None) -> str:
    """Return the absolute path of an executable, searched for in ``path``."""
    executable = shutil.which(os.path.expanduser(command), path=path)
    if executable is None:
        raise OpenCodeMissingError(
            f"OpenCode's command {command!r} was not found, or cannot be run; install it with "
            f"{INSTALL}, or set OPENCODE_COMMAND to its path"
        )
    return os.path.abspath(executable)


def free_port(host: str) -> int:
    """Return a port that was free a moment ago. Given port 0, OpenCode would listen on 4096."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.bind((host, 0))
        port: int = probe.getsockname()[1]
    return port


def passed_environment(
    source: Mapping[str, str], withheld: Collection[str] = (), only: Sequence[str] = ("*",)
) -> dict[str, str]:
    """Return the variables for OpenCode and its tools: those that match ``only``, none of ours.

    ``withheld`` are names too, in which ``*`` matches anything.
    """
    hidden = (*_OWN, *withheld)
    return {
        name: value
        for name, value in source.items()
        if _matches(name, (*only, *_BASIC)) and not _matches(name, hidden)
    }


def _matches(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def install_nothing(config: Path) -> None:
    """Keep OpenCode from installing packages into a new configuration directory.

    Before it loads the first plugin, and even without any, OpenCode 1.18 installs 60 MB of packages
    that plugins may import. It skips this if the two entries that are made here exist, and still
    installs what a ``package.json`` in the directory requires.
    """
    lock = config / "opencode" / "package-lock.json"
    if not lock.parent.exists():
        (lock.parent / "node_modules").mkdir(mode=0o700, parents=True)
        installed: JsonObject = {"dependencies": {"@opencode-ai/plugin": "*"}}
        lock.write_bytes(orjson.dumps({"lockfileVersion": 3, "packages": {"": installed}}))


async def _version_of(executable: str, variables: Mapping[str, str]) -> str:
    """Return what a program prints for ``--version``; an empty text if it prints nothing."""
    # Not through a pipe: a process that the program leaves behind could keep that open.
    with TemporaryFile() as output:
        process = await asyncio.create_subprocess_exec(
            executable, "--version", stdin=DEVNULL, stdout=output, stderr=DEVNULL, env=variables
        )
        try:
            async with asyncio.timeout(VERSION_SECONDS):
                await process.wait()
        except TimeoutError:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()
        output.seek(0)
        return output.read(1000).decode(errors="replace").strip()


async def _check_data(executable: str, variables: Mapping[str, str]) -> None:
    """Raise UnsupportedOpenCodeError if the program would spoil data of the other generation."""
    database = database_of(variables)
    owner = await asyncio.to_thread(owner_of, database)
    if owner is not None:
        program = packaged(executable) or of_version(await _version_of(executable, variables))
        if (why := conflict(owner, program, database)) is not None:
            raise UnsupportedOpenCodeError(why)


class ManagedOpenCode:
    """OpenCode as a child process; ``async with`` starts it and leaves nothing behind.

    ``url``, ``username`` and ``password`` never change while it is entered. When OpenCode dies, it
    is started again. The turns that ran in it are lost; that the event stream ends (``feed.Gap``)
    has their tasks compared with OpenCode's stored state.

    ``environment`` holds the variables that OpenCode gets from this program, see
    ``passed_environment``. ``config`` overrides OpenCode's own files, and every tool can read it.
    ``state`` is a directory for OpenCode's home and data; without one, those of the user are used.
    OpenCode runs in ``directory``, and its configuration has to be valid there. ``record`` is the
    file that the next start reads; one service owns it at a time.
    """

    def __init__(
        self,
        settings: OpenCodeSettings,
        environment: Mapping[str, str],
        *,
        config: JsonObject | None = None,
        state: Path | None = None,
        directory: Path | None = None,
        record: Path | None = None,
    ) -> None:
        self._settings = settings
        self._environment = environment
        self._config = config or {}
        self._state = state
        self._directory = directory.absolute() if directory else None
        self._record = record
        self._lock = RecordLock(record) if record else None
        self._marker = f"{os.getpid()}.{secrets.token_hex(8)}" + (
            recorded_in(record) if record else ""
        )
        self._process: OpenCodeProcess | None = None
        self._port = 0
        self._keeper: asyncio.Task[None] | None = None
        self._taken = False
        """Whether an earlier run of this program started it."""
        self.ends_with_us = ends_with_us()
        """Whether it cannot outlive this process, as in a container."""
        self.username = USERNAME
        self.password = secrets.token_urlsafe(32)
        self.url = ""
        self.version = ""
        self.keep = False
        """Whether to leave it running on exit, for the next start to take over."""

    @property
    def pid(self) -> int | None:
        """The process id, while OpenCode runs."""
        return self._process.pid if self._process and self._process.running else None

    @property
    def running(self) -> bool:
        return self.pid is not None

    @property
    def keepable(self) -> bool:
        """Whether the next start could take it over."""
        if self.ends_with_us:
            return False
        left = Record.read(self._record) if self._record is not None else None
        return self.running and left is not None and left.birth is not None

    async def __aenter__(self) -> Self:
        if self._lock is not None and not self._lock.take():
            logger.warning(
                "another running service uses the record of the managed OpenCode; the OpenCode of "
                "this service will not be taken over after a restart",
                record=str(self._record),
            )
            self._record = self._lock = None
        try:
            if abandoned := await asyncio.to_thread(kill_abandoned, self._record):
                logger.warning("ended an OpenCode whose owner is gone", processes=abandoned)
            if not await self._adopt():
                await self._start_on_a_port()
        except BaseException:
            await self._leave(keep=self._taken)
            raise
        if doubt := untested(self.version):
            logger.warning(doubt)
        self._keeper = asyncio.create_task(self._keep_running(), name="opencode keeper")
        return self

    async def __aexit__(self, kind: type[BaseException] | None = None, *_exc: object) -> None:
        if self._keeper is not None:
            self._keeper.cancel()
            await asyncio.wait([self._keeper])
        # If the rest of a start fails, an OpenCode that was taken over still has work to do.
        await self._leave(keep=self.keep or (self._taken and kind is not None))

    async def _leave(self, *, keep: bool) -> None:
        try:
            if keep and self.keepable and self._process is not None:
                await self._process.let_go()
            else:
                await self._stop()
        finally:
            if self._lock is not None:
                self._lock.release()

    # Adopt

    async def _adopt(self) -> bool:
        """Adopt the OpenCode of an earlier run if a new one would be the same; else end it."""
        left = Record.read(self._record) if self._record is not None else None
        if left is None:
            return False
        process = None
        if left.pid is not None and left.birth is not None:
            process = OpenCodeProcess(left.pid)  # holds a handle before the pid is checked
        if process is None or birth(process.pid) != left.birth:
            await asyncio.to_thread(kill_leftovers, left.marker)
            return False
        fresh = self._marker, self.password
        process.watch()
        self._process = process
        self._marker, self.password = left.marker, left.password
        self.url, self.version = left.url or "", left.version
        self._port = urlsplit(self.url).port or 0
        self._taken = True
        before, now = left.setup, self.setup()
        if changed := sorted(name for name in {*before, *now} if before.get(name) != now.get(name)):
            more = f" and {len(changed) - 5} more" if len(changed) > 5 else ""
            reason = f"these differ from its start: {', '.join(changed[:5])}{more}"
        else:
            reason = "it does not answer as it should"
            with contextlib.suppress(TimeoutError, ServiceError):
                async with asyncio.timeout(HEALTHY_SECONDS), self._client() as opencode:
                    version = (await opencode.choose()).version
                    await opencode.driver.config(at=self._at)
                if version == self.version:
                    logger.info(
                        "adopted the OpenCode of an earlier run",
                        version=version,
                        url=self.url,
                        pid=process.pid,
                    )
                    return True
        logger.warning("ending the OpenCode of an earlier run", pid=process.pid, reason=reason)
        self._taken = False
        await self._stop()
        self._marker, self.password = fresh
        return False

    def setup(self) -> dict[str, str]:
        """Return digests of everything that OpenCode is started with, by the names of the parts."""
        settings = self._settings
        program = os.path.realpath(find_command(settings.command, self._environment.get("PATH")))
        file = os.stat(program)
        variables = self.variables() | {"OPENCODE_SERVER_PASSWORD": "", MARKER: ""}
        parts = {
            "the program": f"{program} {file.st_size} {file.st_mtime_ns}",
            "the address": f"{settings.managed_server_host} {settings.managed_server_port}",
            "the directory": str(self._directory),
            **{name: value for name, value in variables.items() if not _matches(name, _PASSING)},
        }
        return {
            name: hashlib.sha256(part.encode(errors="surrogateescape")).hexdigest()
            for name, part in parts.items()
        }

    # Start

    def variables(self) -> dict[str, str]:
        """Return the whole environment of the process."""
        variables = dict(self._environment)
        if self._state is not None:
            places = {"HOME": self._state / "home"}
            for kind in ("DATA", "CONFIG", "STATE", "CACHE"):
                places[f"XDG_{kind}_HOME"] = self._state / kind.lower()
            for name, place in places.items():
                place.mkdir(mode=0o700, parents=True, exist_ok=True)
                variables[name] = str(place.absolute())
            install_nothing(self._state / "config")
        return withholding(variables, self._config) | {
            "OPENCODE_SERVER_USERNAME": USERNAME,
            "OPENCODE_SERVER_PASSWORD": self.password,
            MARKER: self._marker,
        }

    async def _start_on_a_port(self) -> None:
        """Start on the configured port or on a free one, which another program may take first."""
        given = self._settings.managed_server_port
        attempts = 1 if given else PORT_ATTEMPTS
        while True:
            self._port = given or free_port(self._settings.managed_server_host)
            try:
                return await self._start()
            except OpenCodeStartError as error:
                attempts -= 1
                if not attempts or not any("ServeError" in line for line in error.output):
                    raise

    async def _start(self) -> None:
        self._taken = False
        settings, variables = self._settings, self.variables()
        executable = find_command(settings.command, variables.get("PATH"))
        await _check_data(executable, variables)
        address = ("--hostname", settings.managed_server_host, "--port", str(self._port))
        command = [executable, "serve", *address]
        record = Record(marker=self._marker, password=self.password, setup=self.setup())
        if self._record is not None:
            record.write(self._record)  # first: if we are killed now, the marker must be known
        process = await OpenCodeProcess.spawn(command, self._directory, variables)
        self._process = process
        found, reason = Found(Kind.NOTHING), "OpenCode ended at once"
        try:
            async with asyncio.timeout(settings.startup_timeout):
                found = await self._wait_until_known(process)
            if found.usable:
                self.version = found.version or ""
                pid = process.pid
                known = {"url": self.url, "version": self.version, "pid": pid, "birth": birth(pid)}
                if self._record is not None:
                    record.model_copy(update=known).write(self._record)
                logger.info("OpenCode started", version=self.version, url=self.url, pid=pid)
                return
            if found.kind is not Kind.NOTHING and (why := problem_of(found)):
                reason = f"OpenCode does not work: {why.what}"
        except TimeoutError:
            seconds = f"{settings.startup_timeout:g} s"
            reason = f"OpenCode was not ready after {seconds}; raise OPENCODE_STARTUP_TIMEOUT"
        except UpstreamError as error:
            words = filter(None, ("OpenCode does not work", error.message, error.detail))
            reason = ": ".join(words)
        if found.version is None and not any("ServeError" in line for line in process.tail):
            # 1.0 has no health check, and others may not print where they listen, or may want other
            # flags or another password: only the program itself can tell its version.
            told = of_version(await _version_of(executable, variables))
            found = told if told.kind is not Kind.V1 else found
        await self._stop()
        if found.kind is Kind.V1_0:
            raise UnsupportedOpenCodeError(f"{executable} cannot be used: {problem_of(found)}")
        raise OpenCodeStartError(reason, command, process.tail)

    async def _wait_until_known(self, process: OpenCodeProcess) -> Found:
        """Wait until OpenCode can be used, or is none that can; ``NOTHING`` if it exits before."""
        url = await process.url
        if url is None:
            return Found(Kind.NOTHING)
        self.url = url
        async with self._client() as opencode:
            while process.running:
                found = await opencode.choose(seconds=self._settings.startup_timeout)
                if found.kind is Kind.NOTHING or found.status == 503:
                    await asyncio.sleep(0.05)  # it prints its URL a moment before it answers
                    continue
                if found.usable:
                    # With a broken configuration OpenCode listens, but refuses all other calls.
                    await opencode.driver.config(at=self._at)
                    await self._check_password(process)
                return found
        return Found(Kind.NOTHING)

    async def _check_password(self, process: OpenCodeProcess) -> None:
        """Check that OpenCode requires its password, and that its tools do not get it."""
        async with Calls(self.url) as stranger:
            found = await probe(stranger.raw_response, seconds=self._settings.startup_timeout)
            if found.kind is not Kind.LOCKED:
                raise UpstreamError("it does not ask for its password")
        if not await wait(process.withheld, LAST_OUTPUT_SECONDS):
            logger.warning(
                "the agent's tools can see OpenCode's password, and could answer the agent's "
                "permissions: OpenCode did not load the plugin that withholds it; unset "
                "OPENCODE_PURE"
            )
        elif process.shows(self.password):
            logger.warning(
                "the agent's tools can read OpenCode's password in the environment of a process, "
                "and could answer the agent's permissions: the command is a launcher that keeps "
                "it; set OPENCODE_COMMAND to the OpenCode program itself",
                pid=process.pid,
            )

    @property
    def _at(self) -> Location:
        return Location.of(self._directory)

    def _client(self) -> OpenCodeConnection:
        return OpenCodeConnection(self.url, username=self.username, password=self.password)

    # Keep running

    async def _keep_running(self) -> None:
        """Start OpenCode again whenever it exits."""
        clock = asyncio.get_running_loop().time
        delay = FIRST_DELAY
        while self._process is not None:
            since = clock()
            status = await self._process.wait()
            logger.error("OpenCode ended; starting it again", status=status)
            if clock() - since > STEADY_SECONDS:
                delay = FIRST_DELAY
            await self._clear()
            while True:
                await asyncio.sleep(delay)
                delay = min(delay * 2, LONGEST_DELAY)
                try:
                    await self._start()
                    break
                except (OpenCodeStartError, OSError) as error:
                    logger.error(
                        "OpenCode could not be started; trying again",
                        seconds=delay,
                        error=str(error),
                    )

    # Stop

    async def _stop(self) -> None:
        if self.running and self.url:
            # A signal alone would leave the tools of its turns running.
            with contextlib.suppress(TimeoutError, ServiceError):
                async with asyncio.timeout(STOP_SECONDS), self._client() as opencode:
                    await opencode.choose()
                    await opencode.driver.dispose()
        if self._process is not None:
            await self._process.end()
        await self._clear()
        self._process = None
        if self._record is not None:
            with contextlib.suppress(OSError):  # it must not hide the error of a failed start
                self._record.unlink()

    async def _clear(self) -> None:
        if self._process is not None:
            await self._process.clear()
        if leftovers := await asyncio.to_thread(kill_leftovers, self._marker):
            logger.warning("ended processes that OpenCode left behind", processes=leftovers)
