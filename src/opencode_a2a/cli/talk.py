"""The connection of a command to an agent: its address, the credential, and one turn at a time.

A ``Talk`` is driven from synchronous code, so that Ctrl-C and line editing work as usual. Secrets
come only from the environment, or, for the user's own service on this machine, from the token in
its state directory. ``screen`` does the printing.
"""

import asyncio
import base64
import mimetypes
import os
import select
import ssl
import sys
import time
import uuid
from collections.abc import AsyncGenerator, Callable, Collection, Coroutine, Generator
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from ipaddress import ip_address
from pathlib import Path
from typing import IO, Any, TypeVar
from urllib.parse import urlsplit

import click

from opencode_a2a.announcement import running
from opencode_a2a.cli.screen import Output
from opencode_a2a.config import Settings, SettingsError, load_for_calls
from opencode_a2a.events import JsonObject
from opencode_a2a.log.state import TERMINAL, State
from opencode_a2a.messages import Message, Part
from opencode_a2a.net.egress import (
    Egress,
    EgressError,
    HostNotFoundError,
    OriginCredential,
    check,
    origin,
    trust,
    vet,
)
from opencode_a2a.peers.client import Peer, configured_credential
from opencode_a2a.peers.proof import Proof
from opencode_a2a.peers.received import (
    WAITING,
    ErrorCode,
    LostError,
    PeerError,
    PeerTask,
    ReceivedTask,
    state_word,
)
from opencode_a2a.printable import command, one_line, program
from opencode_a2a.turns.answers import only_an_answer

PASTE_SECONDS = 0.05
"""Time in which the next line of a paste arrives, where the terminal does not mark pastes."""
_FILE_LIMIT = 20 * 1024 * 1024
_WHOLE_ID = 32
"""Ids of this length are complete: those of our services are longer."""
_T = TypeVar("_T")


class CanceledError(click.ClickException):
    """The user stopped the turn; the text says what became of the task."""

    exit_code = 130

    def show(self, file: IO[Any] | None = None) -> None:
        click.echo(self.message, file, err=True)


class RefusedError(click.ClickException):
    """The agent refuses our credential: nothing else will work either."""


@dataclass(frozen=True, slots=True)
class Callee:
    """The agent that a command talks to: its address, and the credential for it."""

    url: str
    settings: Settings
    credential: OriginCredential | None
    tls: ssl.SSLContext


def find(url: str | None) -> Callee:
    """Return the agent at a URL; default: A2A_CLIENT_URL, else the user's running service.

    The credential for the user's own service on this machine is the token that it generated.
    """
    try:
        settings = load_for_calls(os.environ)
        tls = trust(settings.client)
    except SettingsError as error:
        raise click.UsageError("; ".join(map(str, error.problems))) from error
    services = sorted(running(settings.a2a.state_dir), key=lambda service: service.url)
    url = url or settings.client.url
    if url is None and len(services) > 1:
        listed = "".join(f"\n  {service.url}" for service in services)
        raise click.UsageError(
            f"you have several running services here; give the URL of one:{listed}"
        )
    if url is None and not services:
        raise click.ClickException(
            f"you have no running service here; start one with `{program()} serve`, "
            "or give the URL of an agent (also as A2A_CLIENT_URL)"
        )
    url = services[0].url if url is None else url
    if "://" not in url:
        try:
            host = urlsplit(f"http://{url}").hostname or ""
            local = host == "localhost" or ip_address(host).is_loopback
        except ValueError:
            local = False
        url = f"http://{url}" if local else f"https://{url}"
    # A service of our own is called by its address: at "localhost" another program might
    # answer, on the other loopback address.
    by_address = url.replace("//localhost", "//127.0.0.1", 1).rstrip("/")
    known = [by_address, url.rstrip("/")]
    known += [other.replace("http:", "https:", 1) for other in known]  # it may speak only that
    url = next((one for one in known if any(one == service.url for service in services)), url)
    try:
        check(url, Egress())
    except EgressError as error:
        raise click.UsageError(f"{one_line(url)} cannot be called: {error}") from error
    credential = configured_credential(url, settings.client)
    ours = (origin(service.url) for service in services if service.accepts_token)
    if credential is None and origin(url) in ours:
        # If the token cannot be read or sent, call without it: the service says what is missing.
        with suppress(OSError, ValueError):
            token = (settings.a2a.state_dir / "token").read_text().strip()
            credential = OriginCredential.bearer(url, token)
    return Callee(url, settings, credential, tls)


class Talk:
    """One agent at the other end of a command."""

    def __init__(self, url: str | None, runner: asyncio.Runner, proof: Proof | None = None) -> None:
        target = find(url)
        self.url = target.url
        self.named = [target.url] if url else []
        """The URL as an argument of suggested commands; empty if they do not need it."""
        self.state_dir = target.settings.a2a.state_dir
        self._began = time.monotonic()
        self._runner = runner
        self.peer = self.run(_open(target, proof))

    @property
    def seconds(self) -> float:
        """Seconds since the last turn began."""
        return time.monotonic() - self._began

    def run(self, work: Coroutine[None, None, _T]) -> _T:
        """Run a call to the agent; a failure ends the command with one line."""
        try:
            return self._runner.run(work)
        except PeerError as error:
            raise _failure(error) from error

    def whole_id(self, task_id: str) -> str:
        """Return the whole id of a task, given its beginning."""
        if len(task_id) >= _WHOLE_ID:
            return task_id
        found: list[str] = []
        try:
            for limit in (100, None):  # mostly it is a recent one
                listed = self._runner.run(self.peer.tasks(None, limit))
                found = [task.task_id for task in listed if task.task_id.startswith(task_id)]
                if found or len(listed) < 100:
                    break
        except PeerError:
            return task_id  # not every agent lists its tasks
        if len(found) > 1 and task_id not in found:
            ids = ", ".join(one_line(one, 40) for one in found[:5])
            raise click.UsageError(f"{one_line(task_id)} matches several task IDs: {ids}")
        return found[0] if len(found) == 1 else task_id

    def tasks(
        self, context_id: str | None, limit: int | None, states: Collection[State] = ()
    ) -> list[ReceivedTask]:
        """Return the tasks that wait for a person, then the newest others; or those in some states.

        Those that wait are asked for by their state: they may be older than all that are listed.
        Without a limit all tasks are returned.
        """

        async def read() -> list[ReceivedTask]:
            newest = [] if states else await self.peer.tasks(context_id, limit)
            found = {task.task_id: task for task in newest}
            for state in states or (WAITING if limit and len(newest) >= limit else ()):
                listed = await self.peer.tasks(context_id, limit if states else None, state)
                found |= {task.task_id: task for task in listed if task.status.state is state}
            return [*found.values()]

        def order(task: ReceivedTask) -> str:
            return task.status.timestamp or ""

        found = sorted(self.run(read()), key=order, reverse=True)
        waiting = [task for task in found if task.status.state in WAITING]
        others = [task for task in found if task.status.state not in WAITING]
        return waiting + (others if limit is None else others[: max(0, limit - len(waiting))])

    def ask(
        self,
        parts: list[Part],
        task: PeerTask,
        output: Output,
        *,
        task_id: str | None = None,
        context_id: str | None = None,
        metadata: JsonObject | None = None,
        stream: bool = True,
        seconds: float | None = None,
        steers: bool = False,
    ) -> None:
        """Send a message and show the turn; Ctrl-C cancels the task.

        With ``steers``, lines that a person enters meanwhile are sent to the working agent.
        """
        asking = self.peer.ask(
            Message(str(uuid.uuid4()), "user", parts, metadata),
            output.show,
            task_id=task_id,
            context_id=context_id,
            task=task,
            stream=stream,
        )
        self._began = time.monotonic()
        try:
            add = partial(self._add, task=task) if steers else None
            self._runner.run(_shown(output, asking, seconds, add))
        except (TimeoutError, PeerError) as error:
            raise self._unfinished(task, error, seconds) from error
        except KeyboardInterrupt as stop:
            raise CanceledError(self.cancel(task)) from stop

    async def _add(self, text: str, task: PeerTask) -> None:
        """Send what was typed while a task works; say so if it is not taken.

        It says that it is for the agent: a task that asks for something by the time it arrives
        must not take it as the answer.
        """
        metadata: JsonObject = {"shared": {"delivery": "steer"}}
        message = Message(str(uuid.uuid4()), "user", [Part("text", text=text)], metadata)
        try:
            if task.task_id is None:
                raise PeerError(ErrorCode.CALL_FAILED, "the agent has not begun yet")
            if only_an_answer(message):
                raise PeerError(ErrorCode.CALL_FAILED, "the agent did not ask anything")
            await self.peer.add(message, task.task_id)
        except PeerError as error:
            click.echo(f"Not sent: {one_line(error.message, 500)}", err=True)

    def follow(self, task_id: str, task: PeerTask, output: Output) -> None:
        """Show the events of a task until it ends or waits."""
        self._began = time.monotonic()
        self.run(_shown(output, self.peer.follow(task_id, output.show, task)))

    def cancel(self, task: PeerTask) -> str:
        """Cancel a task that has not ended, and say what became of it."""
        if task.task_id is None or task.status.state in TERMINAL:
            return "stopped"
        try:
            return state_word(self._runner.run(self.peer.cancel(task.task_id)).status.state)
        except PeerError as error:
            return f"stopped, but not canceled: {one_line(error.message, 500)}"

    def _unfinished(
        self, task: PeerTask, error: TimeoutError | PeerError, seconds: float | None
    ) -> click.ClickException:
        """Say why a turn ended early, and how to follow its task if it may continue."""
        if isinstance(error, PeerError) and not error.retryable:
            return _failure(error)
        # After the dashes an id is not read as an option, whatever the agent called it.
        then = task.task_id and command("task", "--follow", *self.named, "--", task.task_id)
        if isinstance(error, LostError) and then:
            return click.ClickException(
                f"The connection to {self.url} was lost; the task may still be running. "
                f"Follow it with: {then}"
            )
        if isinstance(error, PeerError):
            message = one_line(error.message, 500)
        else:
            why = f" ({one_line(task.last_words)})" if task.last_words else ""
            message = f"the turn did not end within {seconds:g} s{why}"
        return click.ClickException(
            f"{message}; the task continues, see: {then}" if then else message
        )


async def _shown(
    output: Output,
    work: Coroutine[None, None, None],
    seconds: float | None = None,
    typed: Callable[[str], Coroutine[None, None, None]] | None = None,
) -> None:
    output.begin()
    try:
        async with asyncio.timeout(seconds), _reading(typed):
            await work
    finally:
        output.end()


@asynccontextmanager
async def _reading(
    typed: Callable[[str], Coroutine[None, None, None]] | None,
) -> AsyncGenerator[None]:
    """Hand on what a person enters at a terminal meanwhile; pasted lines are one message."""
    if typed is None or os.name != "posix" or not sys.stdin.isatty():
        yield
        return
    loop, terminal = asyncio.get_running_loop(), sys.stdin.fileno()
    sending: list[asyncio.Task[None]] = []

    def read() -> None:
        # A terminal gives one line at a time, and only whole ones.
        lines = [os.read(terminal, 65536)]
        while lines[-1] and select.select([terminal], [], [], PASTE_SECONDS)[0]:
            lines.append(os.read(terminal, 65536))
        if not lines[-1]:  # Ctrl-D ends the input for now
            loop.remove_reader(terminal)
        if text := b"".join(lines).decode(errors="replace").strip():
            sending.append(loop.create_task(typed(text)))

    loop.add_reader(terminal, read)
    try:
        yield
    finally:
        loop.remove_reader(terminal)
        await asyncio.gather(*sending)


@contextmanager
def talk_to(url: str | None, proof: Proof | None = None) -> Generator[Talk]:
    """Connect to the agent at a URL, or end the command with the reason."""
    with asyncio.Runner() as runner:
        talk = Talk(url, runner, proof)
        try:
            yield talk
        finally:
            runner.run(talk.peer.aclose())


def file_part(path: Path) -> Part:
    """Read a file to send, or end the command as for wrong usage."""
    name = os.fsencode(path.name).decode(errors="replace")
    try:
        with path.open("rb") as file:
            content = file.read(_FILE_LIMIT + 1)  # a device has no size, and no end
    except OSError as error:
        given = os.fsencode(path).decode(errors="replace")
        raise click.UsageError(f"cannot read {given}: {error.strerror}") from error
    if len(content) > _FILE_LIMIT:
        raise click.UsageError(f"{name} is larger than {_FILE_LIMIT // 1024**2} MiB")
    media_type = mimetypes.guess_type(name)[0] or "application/octet-stream"
    return Part("raw", raw=base64.b64encode(content).decode(), media_type=media_type, filename=name)


def exit_status(state: State | None) -> int:
    """0 completed, 3 when somebody has to answer or sign in, 1 for every other end."""
    if state is State.COMPLETED:
        return 0
    return 3 if state in WAITING else 1


async def _open(target: Callee, proof: Proof | None) -> Peer:
    """Find the host, and read the agent's card."""
    url, client = target.url, target.settings.client
    try:
        # The user may call any address; a public agent's card must not lead to a private one.
        await vet(url, Egress())
        rules = Egress(client.allowed_hosts)
    except HostNotFoundError as error:
        host = one_line(urlsplit(url).hostname or url)
        raise click.ClickException(f"the host {host} cannot be found; check the address") from error
    except EgressError:
        rules = Egress(client.allowed_hosts, allow_private=True)
    return await Peer.open(url, rules, target.credential, client, target.tls, proof)


def _failure(error: PeerError) -> click.ClickException:
    """A URL that cannot be called is a usage error; everything else is a failed call."""
    message = one_line(error.message, 500)
    refused_here = error.http_status is None and error.rpc_code is None
    if error.code is ErrorCode.INVALID_INPUT and refused_here:
        return click.UsageError(message)
    if error.code is ErrorCode.RETRYABLE and refused_here:
        return click.ClickException(
            f"{message}; check the address, and whether the agent is running"
        )
    if error.code is ErrorCode.AUTH_FAILED:
        return RefusedError(f"{message}; set A2A_CLIENT_BEARER_TOKEN or A2A_CLIENT_BASIC_AUTH")
    return click.ClickException(message)
