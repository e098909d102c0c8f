"""``opencode-a2a tasks``, ``task`` and ``cancel``: look after work that runs at an agent."""

import sys
from typing import NoReturn

import click

from opencode_a2a.cli.params import WORDS


@click.command()
@click.argument("url", type=WORDS)
@click.option("--context", metavar="ID", type=WORDS, help="Only tasks of this context.")
@click.option("--limit", default=20, show_default=True, type=click.IntRange(1, 100))
@click.option("--json", "as_json", is_flag=True, help="Print each task as a line of JSON.")
def tasks(url: str, context: str | None, limit: int, as_json: bool) -> None:
    """List the tasks at the agent at URL, the newest first."""
    from opencode_a2a.cli.screen import print_json
    from opencode_a2a.cli.talk import talk_to
    from opencode_a2a.printable import one_line

    with talk_to(url) as talk:
        found = talk.run(talk.peer.tasks(context, limit))
    for task in found:
        if as_json:
            print_json(task)
            continue
        task_id, state = one_line(task.task_id, 100), task.status.state
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
    if follow:
        _follow(url, task_id, as_json)

    from opencode_a2a.cli.screen import Screen, print_json
    from opencode_a2a.cli.talk import talk_to
    from opencode_a2a.peers.answer import PeerTask
    from opencode_a2a.printable import indented, one_line

    with talk_to(url) as talk:
        found = talk.run(talk.peer.task(task_id, 10))
    if as_json:
        print_json(found)
        return
    context = f"  context {found.context_id}" if found.context_id else ""
    click.echo(one_line(f"{found.task_id}  {found.status.state}{context}", 300), err=True)
    screen = Screen()
    for event in PeerTask().take(found):
        screen.show(event)
    screen.close()
    if found.status.text:
        click.echo(indented(found.status.text), err=True)


def _follow(url: str, task_id: str, as_json: bool) -> NoReturn:
    from opencode_a2a.cli.screen import printed
    from opencode_a2a.cli.talk import exit_status, talk_to
    from opencode_a2a.peers.answer import PeerTask

    account = PeerTask()
    with talk_to(url) as talk:
        try:
            with printed(talk.url, account, as_json) as shown:
                talk.follow(task_id, account, shown)
        except KeyboardInterrupt:
            sys.exit(130)  # only the listening ends, the task goes on
    sys.exit(exit_status(account.status.state))


@click.command()
@click.argument("url", type=WORDS)
@click.argument("task_id", metavar="TASK", type=WORDS)
def cancel(url: str, task_id: str) -> None:
    """Cancel TASK at the agent at URL, and print the state that it is in then."""
    from opencode_a2a.cli.talk import talk_to
    from opencode_a2a.peers.wire import State

    with talk_to(url) as talk:
        found = talk.run(talk.peer.cancel(task_id))
    click.echo(found.status.state)
    sys.exit(0 if found.status.state is State.CANCELED else 1)
