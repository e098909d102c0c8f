"""``call``, ``chat``, ``tasks``, ``task`` and ``cancel``: talk to an agent.

Only the commands are declared here, so that `--help` is quick; ``cli.talk`` and ``cli.chat``
do the work.
"""

import math
import sys
from pathlib import Path

import click


class Words(click.ParamType[str]):
    """Text that can be sent: bytes of another encoding are refused instead of breaking the call."""

    name = "text"

    def convert(self, value: str, param: click.Parameter | None, ctx: click.Context | None) -> str:
        try:
            value.encode()
        except UnicodeEncodeError:
            self.fail("should be valid UTF-8", param, ctx)
        return value


WORDS = Words()


@click.command()
@click.argument("url", type=WORDS)
@click.argument("text", type=WORDS)
@click.option("--context", metavar="ID", type=WORDS, help="Go on in this context: a conversation.")
@click.option("--task", metavar="ID", type=WORDS, help="Go on with this task, or answer it.")
@click.option(
    "--file",
    "files",
    multiple=True,
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Send a file along; may be given several times.",
)
@click.option(
    "--timeout",
    default=600.0,
    show_default=True,
    type=click.FloatRange(0, min_open=True),
    help="Seconds to wait for the end.",
)
@click.option("--no-stream", is_flag=True, help="Wait for the whole answer instead of streaming.")
@click.option("--json", "as_json", is_flag=True, help="Print each event as a line of JSON.")
def call(
    url: str,
    text: str,
    context: str | None,
    task: str | None,
    files: tuple[Path, ...],
    timeout: float,
    no_stream: bool,
    as_json: bool,
) -> None:
    """Send TEXT to the agent at URL and print the answer as it arrives.

    URL is the agent's base address or that of its card. TEXT may be "-" for standard input.
    The credential comes from A2A_CLIENT_BEARER_TOKEN or A2A_CLIENT_BASIC_AUTH; for a service of
    yours on this machine the token that it generated is found by itself.

    With --json the last line is the event "interrupted" or "finished"; it holds the state, the
    whole answer, task_id and context_id.

    Exit status: 0 completed, 1 failed, 2 wrong usage, 3 input or sign-in required, 130 canceled
    with Ctrl-C.
    """
    if math.isnan(timeout):
        raise click.UsageError("--timeout should be a number of seconds")

    from opencode_a2a.cli.screen import JsonLines, Screen, report_end
    from opencode_a2a.cli.talk import exit_status, file_part, talk_to
    from opencode_a2a.messages import Part
    from opencode_a2a.peers.answer import PeerTask

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
    with talk_to(url) as talk:
        talk.ask(
            parts,
            answer,
            JsonLines(answer) if as_json else Screen(),
            task_id=task,
            context_id=context,
            stream=not no_stream,
            seconds=timeout,
        )
        if not as_json:
            report_end(talk.url, answer)
    sys.exit(exit_status(answer.status.state))


@click.command()
@click.argument("url", type=WORDS)
@click.option("--context", metavar="ID", type=WORDS, help="Go on in this context: a conversation.")
def chat(url: str, context: str | None) -> None:
    """Talk to the agent at URL.

    What the agent asks (a question, a permission) is shown, and your lines answer it until it is
    settled; what was typed before it could be read does not. A paste of several lines is one
    message. Ctrl-C cancels the turn, a second one leaves; /new begins a new conversation, /quit or
    Ctrl-D leaves. Credentials are found as by `call`.

    Exit status: that of `call` for the last turn, 1 also if the credential is refused.
    """
    from opencode_a2a.cli.chat import Conversation, line_editing
    from opencode_a2a.cli.talk import talk_to
    from opencode_a2a.printable import command, one_line

    with talk_to(url) as talk, line_editing(talk.state_dir / "history"):
        card = talk.peer.card
        click.echo(one_line(f"{card.name} {card.version}"), err=True)
        conversation = Conversation(talk, context)
        status = conversation.hold()
    if conversation.context_id:
        then = command("chat", talk.url, "--context", conversation.context_id)
        click.echo(f"go on with: {then}", err=True)
    sys.exit(status)


@click.command()
@click.argument("url", type=WORDS)
@click.option("--context", metavar="ID", type=WORDS, help="Only tasks of this context.")
@click.option("--limit", default=20, show_default=True, type=click.IntRange(1, 100))
@click.option("--json", "as_json", is_flag=True, help="Print each task as a line of JSON.")
def tasks(url: str, context: str | None, limit: int, as_json: bool) -> None:
    """List the tasks at the agent at URL, the newest first."""
    from opencode_a2a.cli.screen import print_task
    from opencode_a2a.cli.talk import talk_to
    from opencode_a2a.peers.answer import state_word
    from opencode_a2a.printable import one_line

    with talk_to(url) as talk:
        found = talk.run(talk.peer.tasks(context, limit))
    for task in found:
        if as_json:
            print_task(task)
            continue
        task_id, state = one_line(task.task_id, 100), state_word(task.status.state)
        when = one_line((task.status.timestamp or "")[:19].replace("T", " "))
        said = task.history[0].text if task.history else task.status.text or ""
        click.echo(f"{task_id}  {state:<14}  {when:<19}  {one_line(said, 60)}".rstrip())


@click.command()
@click.argument("url", type=WORDS)
@click.argument("task_id", metavar="TASK", type=WORDS)
@click.option("--follow", "-f", is_flag=True, help="Go on printing until the task ends or waits.")
@click.option("--json", "as_json", is_flag=True, help="Print the task, or its events, as JSON.")
def task(url: str, task_id: str, follow: bool, as_json: bool) -> None:
    """Print the state and the answer of TASK at the agent at URL.

    With --follow the exit status is that of `call`.
    """
    from opencode_a2a.cli.screen import JsonLines, Screen, print_task, report_end
    from opencode_a2a.cli.talk import exit_status, talk_to
    from opencode_a2a.peers.answer import PeerTask, state_word
    from opencode_a2a.printable import indented, one_line
    from opencode_a2a.tasks.state import State

    answer, screen = PeerTask(), Screen()
    with talk_to(url) as talk:
        if follow:
            try:
                talk.follow(task_id, answer, JsonLines(answer) if as_json else screen)
            except KeyboardInterrupt:
                sys.exit(130)  # only the listening ends, the task goes on
            if not as_json:
                report_end(talk.url, answer)
            sys.exit(exit_status(answer.status.state))
        found = talk.run(talk.peer.task(task_id, 10))
    if as_json:
        print_task(found)
        return
    context = f"  context {found.context_id}" if found.context_id else ""
    click.echo(
        one_line(f"{found.task_id}  {state_word(found.status.state)}{context}", 300), err=True
    )
    for event in answer.take(found):
        screen.show(event)
    screen.close()
    if found.status.text and found.status.state is not State.COMPLETED:  # else it is the answer
        click.echo(indented(found.status.text), err=True)


@click.command()
@click.argument("url", type=WORDS)
@click.argument("task_id", metavar="TASK", type=WORDS)
def cancel(url: str, task_id: str) -> None:
    """Cancel TASK at the agent at URL, and print the state that it is in then."""
    from opencode_a2a.cli.talk import talk_to
    from opencode_a2a.peers.answer import state_word
    from opencode_a2a.tasks.state import State

    with talk_to(url) as talk:
        found = talk.run(talk.peer.cancel(task_id))
    click.echo(state_word(found.status.state))
    sys.exit(0 if found.status.state is State.CANCELED else 1)
