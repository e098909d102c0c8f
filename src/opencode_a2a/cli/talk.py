"""What the commands that talk to an agent share: who we are to it, and one turn with it.

A ``Talk`` is driven from synchronous code, so that Ctrl-C and line editing work as people know
them. Secrets come from the environment only, or for a service of our own on this machine from
the token that it left in its state directory. ``screen`` does the printing.
"""

import asyncio
import os
import uuid
from collections.abc import Coroutine, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path
from typing import IO, Any, TypeVar
from urllib.parse import urlsplit

import click

from opencode_a2a.cli.screen import Shown
from opencode_a2a.messages import Message, Part
from opencode_a2a.peers.answer import PeerTask
from opencode_a2a.peers.client import Options, Peer
from opencode_a2a.peers.credential import Credential, origin
from opencode_a2a.peers.errors import ErrorCode, LostError, PeerError
from opencode_a2a.peers.network import Egress, EgressError, HostNotFoundError, check, vet
from opencode_a2a.peers.wire import State
from opencode_a2a.printable import command, one_line
from opencode_a2a.services import running

_PREFIX = "A2A_CLIENT_"
_BEARER = "A2A_CLIENT_BEARER_TOKEN"
_BASIC = "A2A_CLIENT_BASIC_AUTH"
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Turn:
    """One message to the agent, and the account that the answer goes into."""

    parts: list[Part]
    account: PeerTask
    task_id: str | None = None
    context_id: str | None = None
    stream: bool = True
    seconds: float | None = None


class CanceledError(click.ClickException):
    """The person stopped the turn; the text says what became of the task."""

    exit_code = 130

    def show(self, file: IO[Any] | None = None) -> None:
        click.echo(self.message, file, err=True)


class RefusedError(click.ClickException):
    """The agent does not take our credential: nothing else will work either."""


class Talk:
    """One agent at the other end of a command."""

    def __init__(self, url: str, runner: asyncio.Runner) -> None:
        self.url = full_url(url)
        self._runner = runner
        self.peer = self.run(_open(self.url))

    def run(self, work: Coroutine[None, None, _T]) -> _T:
        """Do one thing with the agent; what goes wrong ends the command with one line."""
        try:
            return self._runner.run(work)
        except PeerError as error:
            raise _failure(error) from error

    def take(self, turn: Turn, shown: Shown) -> None:
        """Send a message and show what comes back; Ctrl-C cancels the task."""
        try:
            self._runner.run(self._take(turn, shown))
        except TimeoutError as error:
            last = turn.account.last_words
            why = f" ({one_line(last)})" if last else ""
            message = f"no end within {turn.seconds:g} s{why}"
            raise click.ClickException(self._unfinished(turn, message)) from error
        except PeerError as error:
            if not error.retryable:
                raise _failure(error) from error
            if isinstance(error, LostError) and turn.account.task_id:
                then = command("task", "--follow", self.url, "--", turn.account.task_id)
                raise click.ClickException(
                    f"The connection to {self.url} was lost; the task may still be running. "
                    f"Follow it with: {then}"
                ) from error
            message = one_line(error.message, 500)
            raise click.ClickException(self._unfinished(turn, message)) from error
        except KeyboardInterrupt as stop:
            raise CanceledError(self.cancel(turn.account)) from stop

    async def _take(self, turn: Turn, shown: Shown) -> None:
        shown.begin()
        try:
            async with asyncio.timeout(turn.seconds):
                await self.peer.ask(
                    Message(str(uuid.uuid4()), "user", turn.parts),
                    shown.show,
                    task_id=turn.task_id,
                    context_id=turn.context_id,
                    account=turn.account,
                    stream=turn.stream,
                )
        finally:
            shown.end()

    def follow(self, task_id: str, account: PeerTask, shown: Shown) -> None:
        """Show what a task tells until it ends or waits."""
        self.run(self._follow(task_id, account, shown))

    async def _follow(self, task_id: str, account: PeerTask, shown: Shown) -> None:
        shown.begin()
        try:
            await self.peer.follow(task_id, shown.show, account)
        finally:
            shown.end()

    def cancel(self, account: PeerTask) -> str:
        """Cancel a task that has not ended, and say what became of it."""
        if account.task_id is None or account.status.state.ended:
            return "stopped"
        try:
            return str(self._runner.run(self.peer.cancel(account.task_id)).status.state)
        except PeerError as error:
            return f"stopped, but not canceled: {one_line(error.message, 500)}"

    def _unfinished(self, turn: Turn, message: str) -> str:
        if turn.account.task_id is None:
            return message
        # What follows the dashes is an id, even if an agent made it look like an option.
        then = command("task", "--follow", self.url, "--", turn.account.task_id)
        return f"{message}; the task goes on, see: {then}"


@contextmanager
def talk_to(url: str) -> Generator[Talk]:
    """Talk to the agent at a URL, or end the command with the reason why not."""
    with asyncio.Runner() as runner:
        talk = Talk(url, runner)
        try:
            yield talk
        finally:
            runner.run(talk.peer.aclose())


def exit_status(state: State) -> int:
    """0 completed, 3 when somebody has to answer or sign in, 1 for every other end."""
    if state is State.COMPLETED:
        return 0
    return 3 if state.waits else 1


def full_url(url: str) -> str:
    """Let people leave out the scheme, and say localhost for the address of their own service."""
    if "://" not in url:
        url = f"http://{url}" if _is_loopback(f"http://{url}") else f"https://{url}"
    by_address = url.replace("//localhost", "//127.0.0.1", 1).rstrip("/")
    # By name another program might be reached: it may listen on the other loopback address.
    return by_address if by_address in running(state_dir()) else url


def _is_loopback(url: str) -> bool:
    try:
        host = urlsplit(url).hostname or ""
        return host == "localhost" or ip_address(host).is_loopback
    except ValueError:
        return False


async def _open(url: str) -> Peer:
    options, hosts = _settings()
    try:
        check(url, Egress())
    except EgressError as error:
        raise click.UsageError(f"{one_line(url)} cannot be called: {error}") from error
    try:
        # A person may call any address; a public agent's card may not lead to a private one.
        await vet(url, Egress())
        rules = Egress(hosts)
    except HostNotFoundError as error:
        host = one_line(urlsplit(url).hostname or url)
        raise click.ClickException(f"the host {host} cannot be found; check the address") from error
    except EgressError:
        rules = Egress(hosts, allow_private=True)
    return await Peer.open(url, rules, _credential(url), options)


def _credential(url: str) -> Credential | None:
    """Return what the environment has for the agent, or our own service's token."""
    try:
        if token := os.environ.get(_BEARER):
            return Credential.bearer(url, token)
        if basic := os.environ.get(_BASIC):
            return Credential.basic(url, basic)
    except ValueError as error:
        # The message names the rule that is broken, never the value.
        raise click.UsageError(f"{_BEARER} or {_BASIC}: {error}") from error
    if origin(url) not in map(origin, running(state_dir())):
        return None
    try:
        return Credential.bearer(url, (state_dir() / "token").read_text().strip())
    except (OSError, ValueError):
        return None


def state_dir() -> Path:
    """Return where a service of this user keeps its token; as ``config`` says, without its cost."""
    if given := os.environ.get("A2A_STATE_DIR"):
        return Path(given)
    state = os.environ.get("XDG_STATE_HOME")
    return (Path(state) if state else Path.home() / ".local" / "state") / "opencode-a2a"


def _settings() -> tuple[Options, tuple[str, ...]]:
    """Read the client settings; their machinery is only loaded when one of them is set."""
    given = {name: value for name, value in os.environ.items() if name.startswith(_PREFIX)}
    if not given.keys() - {_BEARER, _BASIC}:
        return Options(), ()

    from opencode_a2a.config import SettingsError, load
    from opencode_a2a.peers.options import options

    try:
        client = load({}, given, None).client
    except SettingsError as error:
        raise click.UsageError("; ".join(str(problem) for problem in error.problems)) from error
    return options(client), client.allowed_hosts


def _failure(error: PeerError) -> click.ClickException:
    """A URL that cannot be called is a usage error; everything else is a failed call."""
    message = one_line(error.message, 500)
    refused_here = error.http_status is None and error.rpc_code is None
    if error.code is ErrorCode.INVALID_INPUT and refused_here:
        return click.UsageError(message)
    if error.code is ErrorCode.RETRYABLE and refused_here:
        return click.ClickException(f"{message}; check the address, and that the agent is running")
    if error.code is ErrorCode.AUTH_FAILED:
        return RefusedError(f"{message}; set {_BEARER} or {_BASIC}")
    return click.ClickException(message)
