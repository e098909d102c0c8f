"""``call``, ``chat``, ``tasks``, ``task``, ``cancel`` and ``ping``: talk to an agent.

Only the commands are declared here, so that `--help` is fast; ``cli.talk`` and ``cli.chat`` do the
work.
"""

import math
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import click
from click.shell_completion import CompletionItem

if TYPE_CHECKING:
    from opencode_a2a.cli.talk import Talk
    from opencode_a2a.peers.proof import Proof


class Words(click.ParamType[str]):
    """Text that can be sent: invalid UTF-8 is refused before it breaks the call."""

    name = "text"

    def convert(self, value: str, param: click.Parameter | None, ctx: click.Context | None) -> str:
        try:
            value.encode()
        except UnicodeEncodeError:
            self.fail("should be valid UTF-8", param, ctx)
        return value


WORDS = Words()


def after_url(words: tuple[str, ...], name: str) -> tuple[str | None, str]:
    """Return the URL, if one is given, and the other argument."""
    match words:
        case (url,) if "://" in url and " " not in url:
            raise click.UsageError(f"{name} is missing after the URL")
        case (word,):
            return None, word
        case (url, word):
            return url, word
        case ():
            raise click.UsageError(f"{name} is missing")
        case _:
            raise click.UsageError(f"too many words; put {name} into quotes if it has spaces")


STATES = (
    "waiting", "running", "ended", "submitted", "working", "input-required", "auth-required",
    "completed", "failed", "canceled", "rejected",
)  # fmt: skip
"""What ``tasks --state`` takes: kinds of states, then states."""


def task_ids(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Offer the newest tasks of the service that runs here; silent when there is none."""
    from opencode_a2a.cli.screen import TaskLine
    from opencode_a2a.cli.talk import talk_to
    from opencode_a2a.printable import SHORT_ID

    try:
        with talk_to(None) as talk:
            rows = [TaskLine.of(task) for task in talk.tasks(None, 50)]
    except click.ClickException:
        return []
    return [
        CompletionItem(row.task_id[:SHORT_ID], help=row.title)
        for row in rows
        if row.task_id.startswith(incomplete)
    ]


def proof_options(command: Callable[..., None]) -> Callable[..., None]:
    """Add the options that say how an agent's card has to be proven."""
    keys = "Keys that must have signed the card: a JSON Web Key Set, as a file or URL."
    verify = "Call the agent only if its card is signed; default: by a key at its own origin."
    command = click.option("--card-keys", metavar="FILE|URL", type=WORDS, help=keys)(command)
    return click.option("--verify-card", is_flag=True, help=verify)(command)


def wanted_proof(verify: bool, keys: str | None) -> "Proof | None":
    """Return how the card has to be proven, if at all; say at once if it cannot be."""
    from opencode_a2a.config import SettingsError
    from opencode_a2a.peers.proof import Proof
    from opencode_a2a.signing import require_security

    if not verify and keys is None:
        return None
    try:
        require_security("--card-keys" if keys is not None else "--verify-card")
    except SettingsError as error:
        raise click.UsageError(str(error)) from error
    if keys is None:
        click.echo(
            "Verifying the card with a key that its own origin publishes; "
            "name trusted keys with --card-keys.",
            err=True,
        )
    return Proof(keys)


@click.command()
@click.argument("words", type=WORDS, nargs=-1, metavar="[URL] TEXT")
@click.option(
    "--context", metavar="ID", type=WORDS, help="Continue the conversation with this context ID."
)
@click.option("--task", metavar="ID", type=WORDS, help="Continue this task, or answer its request.")
@click.option(
    "--file",
    "files",
    multiple=True,
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Attach a file; may be repeated.",
)
@click.option(
    "--timeout",
    default=600.0,
    show_default=True,
    type=click.FloatRange(0, min_open=True),
    help="Seconds to wait for the end.",
)
@click.option(
    "--plan",
    is_flag=True,
    help='Let OpenCode plan first; answer "go" to carry the plan out.',
)
@click.option("--no-stream", is_flag=True, help="Wait for the whole answer instead of streaming.")
@click.option("--full", is_flag=True, help="Show changes in full.")
@click.option("--json", "as_json", is_flag=True, help="Print each event as a line of JSON.")
@proof_options
def call(
    words: tuple[str, ...],
    context: str | None,
    task: str | None,
    files: tuple[Path, ...],
    timeout: float,
    plan: bool,
    no_stream: bool,
    full: bool,
    as_json: bool,
    verify_card: bool,
    card_keys: str | None,
) -> None:
    """Send TEXT to the agent at URL and print the answer as it arrives.

    URL is the address of the agent or of its card. The default is A2A_CLIENT_URL, or your running
    service on this machine. TEXT may be "-" to read standard input. The credential comes from
    A2A_CLIENT_BEARER_TOKEN or A2A_CLIENT_BASIC_AUTH; the token that your own service on this
    machine generated is found automatically.

    With --json the last line is the event "interrupted" or "finished"; it holds the state, the
    whole answer, task_id and context_id.

    Exit status: 0 completed, 1 failed, 2 wrong usage, 3 input or sign-in required, 130 canceled
    with Ctrl-C.
    """
    url, text = after_url(words, "TEXT")
    if math.isnan(timeout):
        raise click.UsageError("--timeout should be a number of seconds")

    from opencode_a2a.cli.screen import JsonLines, make_screen, report_end
    from opencode_a2a.cli.talk import exit_status, file_part, talk_to
    from opencode_a2a.messages import Part
    from opencode_a2a.peers.received import PeerTask

    if text == "-":
        try:
            text = sys.stdin.buffer.read().decode()
        except UnicodeDecodeError:
            raise click.UsageError("standard input should be valid UTF-8") from None
    if not text.strip() and not files:
        raise click.UsageError("there is nothing to send: TEXT is empty")
    parts = [Part("text", text=text)] if text.strip() else []
    parts += map(file_part, files)
    answer = PeerTask()
    with talk_to(url, wanted_proof(verify_card, card_keys)) as talk:
        talk.ask(
            parts,
            answer,
            JsonLines(answer) if as_json else make_screen(full=full),
            task_id=task and talk.whole_id(task),
            context_id=context,
            metadata={"opencode": {"plan": True}} if plan else None,
            stream=not no_stream,
            seconds=timeout,
        )
        if not as_json:
            report_end(talk, answer)
    sys.exit(exit_status(answer.status.state))


@click.command()
@click.argument("url", type=WORDS, required=False)
@click.option(
    "--context", metavar="ID", type=WORDS, help="Continue the conversation with this context ID."
)
@proof_options
def chat(url: str | None, context: str | None, verify_card: bool, card_keys: str | None) -> None:
    """Talk to the agent at URL.

    While the agent works, what you enter is sent to it, and it takes that into account at its next
    step. When it asks a question or for permission, your lines answer until the request is settled;
    what was typed before approves nothing. Pasted lines are one message, and so are lines that end
    with a backslash. Ctrl-C cancels the turn, a second Ctrl-C quits, and /help lists the commands.
    "/plan TEXT" lets OpenCode plan first, and "go" carries the plan out. URL and credentials are
    found as in `call`.

    Exit status: that of `call` for the last turn, or 1 if the credential is refused.
    """
    from opencode_a2a.cli.chat import Conversation, line_editing
    from opencode_a2a.cli.talk import talk_to
    from opencode_a2a.printable import command, one_line

    with (
        talk_to(url, wanted_proof(verify_card, card_keys)) as talk,
        line_editing(talk.state_dir / "history"),
    ):
        card = talk.peer.card
        hint = "   /help lists the commands" if sys.stdin.isatty() else ""
        click.echo(one_line(f"{card.name} {card.version}") + hint, err=True)
        conversation = Conversation(talk, context)
        status = conversation.hold()
    if conversation.context_id:
        then = command("chat", *talk.named, "--context", conversation.context_id)
        click.echo(f"go on with: {then}", err=True)
    sys.exit(status)


@click.command()
@click.argument("url", type=WORDS, required=False)
@click.option("--context", metavar="ID", type=WORDS, help="Only tasks of this context.")
@click.option("--state", type=click.Choice(STATES), help="Only tasks in this state.")
@click.option("--limit", default=20, show_default=True, type=click.IntRange(1, 100))
@click.option("--all", "everything", is_flag=True, help="All tasks, not only the newest.")
@click.option("--watch", is_flag=True, help="Keep the table up to date; Enter follows the first.")
@click.option("--json", "as_json", is_flag=True, help="Print each task as a line of JSON.")
def tasks(
    url: str | None,
    context: str | None,
    state: str | None,
    limit: int,
    everything: bool,
    watch: bool,
    as_json: bool,
) -> None:
    """List the tasks at the agent at URL: first those that wait for you, then the newest.

    "!" marks a task that waits for you. All commands accept the short IDs of this table.
    """
    if watch and (as_json or not sys.stdin.isatty() or not sys.stdout.isatty()):
        raise click.UsageError("--watch needs a terminal, and cannot be combined with --json")

    import shutil

    from opencode_a2a.cli.screen import (
        print_task,
        print_task_lines,
        states_named,
        task_table,
        watch_tasks,
    )
    from opencode_a2a.cli.talk import talk_to

    with talk_to(url) as talk:
        read = partial(talk.tasks, context, None if everything else limit, states_named(state))
        if watch:
            first = watch_tasks(read, talk.url)
            if first is None:
                return
            _follow(talk, first)
        found = read()
    if as_json:
        for task in found:
            print_task(task)
    elif sys.stdout.isatty():
        rows = task_table(found, shutil.get_terminal_size().columns)
        click.echo("\n".join(rows) if found else "no tasks")
    else:
        print_task_lines(found)


def _follow(talk: "Talk", task_id: str, *, as_json: bool = False, full: bool = False) -> NoReturn:
    """Show a task until it ends or waits, and exit as `call` does."""
    from opencode_a2a.cli.screen import JsonLines, make_screen, report_end
    from opencode_a2a.cli.talk import exit_status
    from opencode_a2a.peers.received import PeerTask

    answer = PeerTask()
    try:
        talk.follow(task_id, answer, JsonLines(answer) if as_json else make_screen(full=full))
    except KeyboardInterrupt:
        sys.exit(130)  # the task continues without this reader
    if not as_json:
        report_end(talk, answer)
    sys.exit(exit_status(answer.status.state))


@click.command()
@click.argument("words", type=WORDS, nargs=-1, metavar="[URL] TASK", shell_complete=task_ids)
@click.option("--follow", "-f", is_flag=True, help="Keep printing until the task ends or waits.")
@click.option("--full", is_flag=True, help="Show changes in full.")
@click.option("--json", "as_json", is_flag=True, help="Print the task, or its events, as JSON.")
def task(words: tuple[str, ...], follow: bool, full: bool, as_json: bool) -> None:
    """Print the state and the answer of TASK at the agent at URL.

    With --follow the exit status is that of `call`.
    """
    from opencode_a2a.cli.screen import make_screen, print_task
    from opencode_a2a.cli.talk import talk_to
    from opencode_a2a.log.state import State
    from opencode_a2a.peers.received import PeerTask, state_word
    from opencode_a2a.printable import indented, one_line

    url, named = after_url(words, "TASK")
    with talk_to(url) as talk:
        task_id = talk.whole_id(named)
        if follow:
            _follow(talk, task_id, as_json=as_json, full=full)
        found = talk.run(talk.peer.task(task_id, 10))
    if as_json:
        print_task(found)
        return
    context = f"  context {found.context_id}" if found.context_id else ""
    click.echo(
        one_line(f"{found.task_id}  {state_word(found.status.state)}{context}", 300), err=True
    )
    answer, screen = PeerTask(), make_screen(full=full)
    for event in answer.take(found):
        screen.show(event)
    screen.close()
    if answer.said and found.status.state is not State.COMPLETED:  # else it is the answer
        click.echo(indented(answer.said), err=True)


@click.command()
@click.argument("words", type=WORDS, nargs=-1, metavar="[URL] TASK", shell_complete=task_ids)
def cancel(words: tuple[str, ...]) -> None:
    """Cancel TASK at the agent at URL, and print its resulting state."""
    from opencode_a2a.cli.talk import talk_to
    from opencode_a2a.log.state import State
    from opencode_a2a.peers.received import state_word

    url, named = after_url(words, "TASK")
    with talk_to(url) as talk:
        found = talk.run(talk.peer.cancel(talk.whole_id(named)))
    click.echo(state_word(found.status.state))
    sys.exit(0 if found.status.state is State.CANCELED else 1)


@click.command()
@click.argument("url", type=WORDS, required=False)
@click.option("--timeout", default=5.0, show_default=True, type=click.FloatRange(0, min_open=True))
def ping(url: str | None, timeout: float) -> None:
    """Check that the service at URL is ready; exit with status 1 if not.

    Meant for probes; needs no credential. For other kinds of agents, it fetches the card.
    """
    import time

    import httpx2

    from opencode_a2a.cli.talk import find
    from opencode_a2a.events import Json
    from opencode_a2a.jsonguard import as_object
    from opencode_a2a.net.egress import tls_trouble
    from opencode_a2a.printable import one_line

    target = find(url)
    base = target.url.rstrip("/")
    began = time.monotonic()
    try:
        with httpx2.Client(timeout=timeout, trust_env=False, verify=target.tls) as http:
            answer = http.get(f"{base}/readyz")
            if answer.status_code not in (200, 503):
                answer = http.get(f"{base}/.well-known/agent-card.json").raise_for_status()
        said: Json = answer.json()
    except (httpx2.HTTPError, httpx2.InvalidURL, ValueError) as error:
        trouble = "does not answer; check the address, and whether the service is running"
        reason = f"{one_line(base)} {tls_trouble(error) or trouble}"
        raise click.ClickException(reason) from error
    checks = as_object(said.get("checks")) if isinstance(said, dict) else {}
    if answer.status_code == 503:
        failed = [name for name, found in checks.items() if found != "ok"] or ["a check"]
        raise click.ClickException(one_line(f"{base} is not ready: {', '.join(failed)} failed"))
    took = round((time.monotonic() - began) * 1000)
    click.echo(f"{one_line(base)} is {'ready' if checks else 'there'} ({took} ms)")
